//! High throughput: the buffer and its operations. [`crate::ep`] describes it to users.
//!
//! | file | holds |
//! |---|---|
//! | `mod.rs` | [`Buffer`]: how it is made, and its checks of arguments |
//! | `options.rs`, `config.rs` | how a buffer is made, channels and launch shapes |
//! | `layout.rs`, `dispatch.rs`, `combine.rs` | the operations |
//! | `halves.rs` | operations in two halves, and measured ones |
//! | `quantise.rs` | rows that become e4m3 in front of a dispatch |
//! | `received.rs`, `handle.rs`, `by_node.rs` | their results |
//! | `backward.rs` | gradients, along the handle of the forward pass |
//! | `copy.rs`, `columns.rs` | copies of received rows and columns into tensors of the caller's |
//! | `place.rs`, `pool.rs` | what is in a place, and where in the pool |
//! | `wire.rs` | wire memory, and the tables of the ways to other nodes |
//! | `kernels.rs` | the loaded kernels, and the shapes of their launches |
//! | `fault.rs` | the texts of faults that only this mode has |
//! | `ceiling.rs`, `copy_by_expert.rs` | the links' own speed, and a copy by expert, for benchmarks |

mod backward;
mod by_node;
mod ceiling;
mod columns;
mod combine;
mod config;
mod copy;
mod copy_by_expert;
mod dispatch;
mod fault;
mod halves;
mod handle;
mod kernels;
mod layout;
mod options;
mod place;
mod pool;
mod quantise;
mod received;
mod wire;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytemuck::Zeroable;
use epoxide_gpu::layout::{
    Call, Comm, DevicePtr, FirstTokensArgs, LOCAL_EPOCH, LOCAL_STATE, LOCAL_TICKET, LocalState, MAX_CHANNELS,
    MAX_LOCAL_EXPERTS, PLAN_HEADER, PlanHeader, PoolLayout, QUANTUM, ROW_ALIGN, Section, Wire, WireLayout,
    done_offset, expert_message, expert_message_offset, internode_copies_offset, message_offset,
    wire_message,
};

use super::core::{
    self, Core, HasCore, Operation, PlaceState, Pools, Step, StreamOrder, Uses, agree_on, agree_on_part,
    check_timeout, laid_out,
};
use super::{DType, Tensor, Topology, TypedTensor};
use crate::driver::{Device, Event, MappedMemory, Memory, MemoryKind, Stream};
use crate::error::{Error, Result, Scope};
use crate::group::ProcessGroup;
use crate::virtual_time::spawn;

pub use backward::GradWeights;
pub use by_node::NodeCounts;
pub use ceiling::{CeilingShape, Direction, launch_ceiling, launch_local_ceiling, local_parts};
pub use combine::{CombineRequest, CombineRows, Combined};
pub use config::{Config, low_latency_rdma_size_hint};
pub use copy_by_expert::copy_by_expert;
pub use dispatch::{CachedDispatchRequest, Counts, DispatchRequest};
pub use halves::{CombineOutputs, Pending};
pub use handle::{DispatchHandle, InternodeHandle, IntranodeHandle};
pub use layout::DispatchLayout;
pub use options::{Fields, Options, Shape, Tuning};
pub use place::{Place, PoolRows};
pub use received::{Detached, Received};

use fault::{Calls, Limits, Plans};
use kernels::Kernels;
use place::Room;
use pool::pool_layouts;
use quantise::Scratch;
use wire::{WireTables, wire_layout};

/// Offset of the expert counts in the host's copy of the counts.
const HOST_EXPERTS: u64 = size_of::<PlanHeader>() as u64;

/// Moves tokens between the ranks of a group. One per rank. A method is collective if its
/// documentation contains that word: every rank makes the same collective calls in the same order.
///
/// The peers map each rank's pool. Received rows are in one of its places ([`Place`]), and are
/// valid until the next dispatch to that place. Routing handles and sums have their own memory and
/// live as long as they are held.
///
/// Operations keep the memory that they need: inputs and outputs may be dropped as soon as a call
/// has returned, even while streams use them. Memory is freed and reused behind all work enqueued
/// on the device's streams ([`Stream`]) by then. Work on streams without a [`Stream`] is not waited
/// for.
///
/// Operations run one after the other on the device, on any streams: an operation on another stream
/// than the last waits for it.
///
/// # Example
/// A forward pass and its gradients. The second dispatch uses the first one's routing and another
/// place, so that both results are valid at once.
///
/// ```
/// use std::time::Duration;
///
/// use epoxide::driver::Stream;
/// use epoxide::driver::virt::{VirtConfig, VirtualGpu};
/// use epoxide::throughput::*;
/// use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
/// use epoxide::group::run_threads;
///
/// let sums = run_threads(2, Duration::from_secs(60), |rank, group| {
///     let device = VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() });
///     let stream = Stream::new(&device)?;
///     let order = StreamOrder::on(&stream);
///     let shape = Shape { max_tokens: 3, hidden: 16, dtype: DType::Bf16, max_topk: 1, max_scales: 0 };
///     let mut buffer = Buffer::new(device, &*group, Options::new(shape).places(2))?;
///     let (mut first, mut second) = (buffer.place(0)?, buffer.place(1)?);
///
///     // Three tokens of this rank, two experts, one on each rank.
///     let topk_idx = TypedTensor::from_host(&stream, &[3, 1], &[0i64, 1, 1])?;
///     let layout = buffer.get_dispatch_layout(&topk_idx, 2, order)?;
///     let x = Tensor::from_host(&stream, DType::F32, &[3, 8], &[1.0f32; 24])?;
///     let received = buffer.dispatch(&mut first, DispatchRequest::new(&x, &layout), order)?;
///     assert_eq!(received.num_recv_tokens, Some([2, 4][rank as usize]));
///
///     let gradient = Tensor::from_host(&stream, DType::F32, &[3, 8], &[0.5f32; 24])?;
///     let again = CachedDispatchRequest::new(&gradient, &received.handle);
///     let gradients = buffer.dispatch_cached(&mut second, again, order)?;
///     assert_eq!(gradients.recv_x.rows(), received.recv_x.rows());
///
///     let combined = buffer.combine(CombineRequest::new(&received.recv_x, &received.handle), order)?;
///     combined.combined_x.to_host::<f32>(&stream)
/// })?;
/// assert_eq!(sums, [vec![1.0; 24], vec![1.0; 24]]);
/// # Ok::<(), epoxide::group::RankFailure>(())
/// ```
#[derive(Debug)]
pub struct Buffer {
    // Dropped first: its end waits for the kernels that use the rest.
    core: Core<Room>,
    kernels: Kernels,
    /// This rank's side of the network, where there are several nodes.
    wire: Option<WireTables>,
    host_counts: MappedMemory,
    plans: Arc<Plans>,
    /// The pools' addresses, u64 `[ranks]`, then the [`LocalState`].
    tables: Memory,
    comm: Comm,
    config: Config,
    options: Fields,
    tag: u64,
    row_bytes: RowBytes,
    /// Memory for quantised rows, from the first dispatch that makes some.
    scratch: Option<Scratch>,
}

/// How long the rows in the pool are, as it has been described.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RowBytes {
    recv: u64,
    combine: u64,
}

impl Buffer {
    /// Makes the buffer and maps the peers' pools. Collective.
    ///
    /// # Errors
    /// * [`Error::Argument`] where an option breaks a rule
    /// * [`Error::Mismatch`] where ranks give different options
    /// * [`Error::Unavailable`] where GPUs of a node are linked without native atomics (PCIe)
    /// * [`Error::OutOfMemory`], and errors of the driver and the group
    pub fn new(device: Device, group: &dyn ProcessGroup, options: Options) -> Result<Buffer> {
        let options = options.fields;
        let rank = group.rank();
        let nodes = Topology::new(group.size(), options.ranks_per_node)?;
        options.tuning.validate()?;
        check_timeout(Some(options.timeout))?;
        let config = options.config.of_buffer(nodes.nodes);
        check_channels(&config)?;
        let joined = nodes.joined(options.transport.kind, options.keep_nodes);
        if nodes.nodes > 1 && joined.is_none() {
            config.check_nodes(nodes.nodes)?;
        }
        let lay_out = |topology| {
            let (by_expert, limit) = (options.rows_by_expert, options.num_nvl_bytes);
            pool_layouts(&options.shape, topology, options.places, by_expert, limit)
        };
        let (layouts, joined_layouts) = (lay_out(nodes)?, joined.map(lay_out).transpose()?);
        // One node has no wire memory.
        let wire_limit = options.num_rdma_bytes.filter(|_| nodes.nodes > 1);
        let wire_layout = wire_layout(&options.shape, nodes, options.rows_by_expert.is_some(), wire_limit)?;
        let rows =
            [Some(&layouts), joined_layouts.as_ref()].map(|of| of.map_or(0, |layouts| layouts[0].rows));
        agree(group, nodes, rows, &wire_layout, (&options, &config))?;

        let largest = options.shape.max_row_bytes();
        let row_bytes = RowBytes { recv: largest, combine: largest };
        let of = |topology| joined_layouts.as_ref().filter(|_| Some(topology) == joined).unwrap_or(&layouts);
        let alloc = |topology: Topology| {
            let layouts = of(topology);
            let pool = Memory::alloc(&device, layouts[0].bytes, MemoryKind::Shareable, "pool")?;
            pool.describe(&sections(layouts, topology, row_bytes));
            Ok(pool)
        };
        // A driver without the kernels in its cache compiles them for hundreds of milliseconds. The
        // pool is made meanwhile.
        let load = |topology: Topology| {
            if topology.nodes > 1 {
                config.check_nodes(topology.nodes)?;
            }
            let (device, options) = (device.clone(), options.clone());
            let load = move || Kernels::load(&device, topology, &options);
            spawn("kernels of a buffer".into(), load).map_err(|error| Error::system("spawn thread", error))
        };
        let prepare = || {
            let (pools, loader) =
                Pools::map(&device, group, (nodes, joined), &options.transport, alloc, load)?;
            let (max_tokens, timeout) = (options.shape.max_tokens, options.timeout);
            let core = Core::new(&device, rank, pools, timeout, max_tokens, Box::new(Calls))?;
            let (addresses, comm_stream) = (core.pool_addresses(), core.stream());
            let (tables, (pools, local)) = laid_out(&device, "peer table", |pieces| {
                let pools = pieces.array("pools", addresses.len() as u64, 8);
                let local = Section::one("local", size_of::<LocalState>() as u64).of(LOCAL_STATE);
                (pools, pieces.push(local))
            })?;
            tables.write_at(comm_stream, pools, bytemuck::cast_slice(addresses))?;
            tables.write_at(comm_stream, local, &[0; size_of::<LocalState>()])?;
            let experts =
                Section::array("num_recv_tokens_per_expert", MAX_LOCAL_EXPERTS as u64, 4).at(HOST_EXPERTS);
            let host_counts = MappedMemory::alloc(&device, HOST_EXPERTS + experts.bytes, "host counts")?;
            host_counts.describe(&[Section::one("header", HOST_EXPERTS).of(PLAN_HEADER), experts]);
            let kernels = loader
                .join()
                .map_err(|_| Error::internal("module load", "the loading thread panicked"))??;
            Ok((core, tables, pools, local, host_counts, kernels))
        };
        let (mut core, tables, pools, local, host_counts, kernels) = agree_on_part(group, prepare())?;
        let topology = core.topology();
        let layouts = of(topology);

        let finish = || {
            let comm = Comm { pool_table: pools, pool: layouts[0], ..core.comm(local) };
            let wire = match topology.nodes {
                1 => None,
                _ => Some(WireTables::new(&mut core, group, &options, wire_layout)?),
            };
            core.make_places(layouts.iter().map(|&layout| Room {
                layout,
                max_row_bytes: largest,
                rows_given: AtomicBool::new(false),
                rows_used: AtomicBool::new(false),
            }));
            let limits = Limits {
                shape: options.shape,
                places: options.places,
                rows: comm.pool.rows,
                by_expert: options.rows_by_expert.is_some(),
                slots: wire.as_ref().map_or(0, |tables| tables.wire.layout.slots),
            };
            let plans = Plans::new(core.faults().clone(), limits);
            Ok(Buffer {
                core,
                kernels,
                wire,
                host_counts,
                plans,
                tables,
                comm,
                config,
                options,
                tag: 0,
                row_bytes,
                scratch: None,
            })
        };
        // No peer may write before all mappings exist.
        agree_on_part(group, finish())
    }

    core::buffer_methods! {
        /// Received rows detach with [`Received::detach`]. Dispatches leave their counts on
        /// the device ([`Counts::OnDevice`]).
        ///
        capture,
        /// The status stays 0 if the plan of a dispatch with [`Counts::OnDevice`] fails, which ends
        /// that dispatch alone.
        status_ptr,
        /// A dispatch with [`Counts::OnDevice`] whose plan fails does not change the bytes: it has
        /// no sums.
        missing_ptr,
        /// [`Buffer::get_dispatch_layout`] takes the result.
        first_tokens,
    }

    /// The configuration it was made with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Changes the number of multiprocessors and channels of the operations that follow.
    /// Collective, with the same configuration on every rank, though it waits for no rank.
    ///
    /// # Errors
    /// [`Error::Argument`] where `num_sms` is odd, or gives no channel or more than 256. With
    /// several nodes also where a chunk or a ring is 0, or where a ring does not suit its chunks or
    /// the number of nodes. With one node the chunks and rings are not used, and not checked.
    pub fn set_config(&mut self, config: Config) -> Result<()> {
        let nodes = self.core.topology().nodes;
        let config = config.of_buffer(nodes);
        check_channels(&config)?;
        if nodes > 1 {
            config.check_nodes(nodes)?;
        }
        self.config = config;
        Ok(())
    }

    /// Rows that this rank can receive in one dispatch.
    pub fn capacity(&self) -> u64 {
        self.comm.pool.rows
    }

    /// Describes the pool anew where its rows have another length now.
    fn describe_rows(&mut self, row_bytes: RowBytes) {
        if row_bytes != self.row_bytes {
            self.row_bytes = row_bytes;
            let layouts: Vec<PoolLayout> =
                self.core.places().iter().map(|place| place.room().layout).collect();
            self.core.pool().describe(&sections(&layouts, self.core.topology(), row_bytes));
        }
    }

    /// The [`Wire`] for the kernels of an operation: how they reach the other nodes. Within one
    /// node no kernel takes it.
    fn wire(&self) -> Wire {
        let wire = self.wire.as_ref().map_or_else(Wire::zeroed, |tables| tables.wire);
        Wire { chunk: self.config.num_max_rdma_chunked_send_tokens, ..wire }
    }

    /// The [`Comm`] for the kernels of an operation in this place. `timeout`: the longest wait for
    /// a peer, if not the buffer's.
    fn comm_in(&self, place: &PlaceState<Room>, call: Call, timeout: Option<Duration>) -> Comm {
        let timeout_ns = self.core.timeout_ns(timeout);
        Comm { pool: place.room().layout, call: call.bits(), timeout_ns, ..self.comm }
    }

    /// Multiprocessors and channels of a dispatch with a count exchange that requests `asked`.
    /// Across nodes channels are pairs of its blocks. Within one node, blocks do not depend on
    /// them, so that ranks which agree on channels may differ in blocks.
    fn sms_of_dispatch(&self, asked: Option<u32>) -> Result<(u32, u32)> {
        check_sms(asked)?;
        let num_sms = asked.unwrap_or(self.config.num_sms);
        let is_one_node = self.core.topology().nodes == 1;
        Ok((num_sms, if is_one_node { self.config.num_channels() } else { num_sms / 2 }))
    }

    /// Multiprocessors of an operation along a handle that requests `asked`: across nodes, two for
    /// each of the handle's channels.
    fn sms_along(&self, handle: &DispatchHandle, asked: Option<u32>) -> Result<u32> {
        check_sms(asked)?;
        if self.core.topology().nodes == 1 {
            return Ok(asked.unwrap_or(self.config.num_sms));
        }
        let of_handle = 2 * handle.0.num_channels;
        match asked {
            Some(other) if other != of_handle => {
                let rule = format!(
                    "across nodes it is that of the dispatch, {of_handle}: leave it out, or dispatch with {other}"
                );
                Err(Error::argument("num_sms", other, rule))
            }
            _ => Ok(of_handle),
        }
    }

    fn check_tokens(&self, tokens: u64) -> Result<u32> {
        let most = pool::most_tokens(self.core.topology().ranks());
        match u32::try_from(tokens) {
            Ok(fits) if tokens <= most => {
                let have = self.options.shape.max_tokens;
                check_fits(("num_tokens", "tokens"), tokens, have.into(), "max_tokens")?;
                Ok(fits)
            }
            _ => Err(Error::argument("num_tokens", tokens, format!("must be at most {most}"))),
        }
    }

    fn check_experts(&self, num_experts: u32) -> Result<()> {
        let ranks = self.core.topology().ranks();
        if num_experts == 0 || !num_experts.is_multiple_of(ranks) {
            let rule = format!("must be a positive multiple of the number of ranks, {ranks}");
            return Err(Error::argument("num_experts", num_experts, rule));
        }
        let counters = (num_experts as u64 + ranks as u64 + self.core.topology().nodes as u64) * 4;
        let shared = self.core.device().info().max_shared_bytes_per_block;
        if counters > shared as u64 {
            let rule =
                format!("counting them takes {counters} bytes of shared memory, the device has {shared}");
            return Err(Error::argument("num_experts", num_experts, rule));
        }
        if num_experts / ranks > MAX_LOCAL_EXPERTS {
            let rule = format!("must be at most {MAX_LOCAL_EXPERTS} per rank");
            return Err(Error::argument("num_experts", num_experts, rule));
        }
        Ok(())
    }

    fn check_row_capacity(&self, row_bytes: u64) -> Result<()> {
        check_fits(
            ("hidden", "bytes"),
            row_bytes,
            self.options.shape.max_row_bytes(),
            "hidden * dtype.size()",
        )
    }

    /// [`Core::run`]; an asynchronous call's event reports the buffer's faults. Along a handle, the
    /// caller makes it report the handle's outcome.
    fn run(
        &mut self,
        order: StreamOrder<'_>,
        capturing: bool,
        operation: Operation,
        uses: &Uses,
        work: impl FnOnce(&mut Self, &Stream) -> Result<()>,
    ) -> Result<Option<Event>> {
        let event = Core::run(self, order, capturing, operation, uses, work)?;
        Ok(event.map(|event| event.of(self.core.faults().clone())))
    }
}

impl HasCore for Buffer {
    type Room = Room;

    fn core(&mut self) -> &mut Core<Room> {
        &mut self.core
    }

    fn core_ref(&self) -> &Core<Room> {
        &self.core
    }

    fn first_tokens(&self) -> &core::Choice<FirstTokensArgs> {
        &self.kernels.first_tokens
    }
}

/// Numbers operations as after `operations` of them, equal on every rank and more than there
/// were. No operation may be under way. For tests of long runs.
///
/// # Errors
/// Errors of the group and of the driver.
pub fn run_ahead(buffer: &Buffer, group: &dyn ProcessGroup, operations: u64) -> Result<()> {
    let (stream, done) = (buffer.core.stream(), operations * QUANTUM);
    group.barrier(group.timeout())?;
    buffer.tables.write_at(stream, buffer.comm.local.add(LOCAL_EPOCH), &operations.to_ne_bytes())?;
    buffer.tables.write_at(stream, buffer.comm.local.add(LOCAL_TICKET), &done.to_ne_bytes())?;
    for peer in 0..buffer.core.topology().ranks_per_node {
        buffer.core.pool().write(stream, done_offset(peer), &done.to_ne_bytes())?;
    }
    // Peers add to the words from the next operation on.
    group.barrier(group.timeout())
}

/// Bytes on the wire of one count message, of which an uncached dispatch sends one to every
/// other node.
pub fn count_message_bytes(buffer: &Buffer, num_experts: u32) -> u64 {
    let words = wire_message::EXPERT_COUNTS + num_experts / buffer.num_nodes();
    (words as u64 * 4).next_multiple_of(16)
}

/// An error where more of something, in a unit, is `needed` than the buffer was made for with
/// `option`.
fn check_fits(what: (&'static str, &'static str), needed: u64, have: u64, option: &str) -> Result<()> {
    if needed <= have {
        return Ok(());
    }
    let remedy = format!("create the buffer with {option} >= {needed}");
    Err(Error::capacity(what, needed, have, remedy, Scope::ThisRank))
}

/// Blocks of an operation on this rank's tokens within one node, at most `num_sms`: a block without
/// a token would only take part in the protocol.
fn blocks_for(num_tokens: u32, num_sms: u32) -> u32 {
    num_tokens.clamp(1, num_sms)
}

/// An error unless a call may request this many multiprocessors.
fn check_sms(asked: Option<u32>) -> Result<()> {
    let most = 2 * MAX_CHANNELS;
    match asked {
        Some(num_sms) if !num_sms.is_multiple_of(2) || !(2..=most).contains(&num_sms) => {
            let rule = format!("must be even, 2 to {most}: leave it out for those of the configuration");
            Err(Error::argument("num_sms", num_sms, rule))
        }
        _ => Ok(()),
    }
}

fn check_channels(config: &Config) -> Result<()> {
    if !config.num_sms.is_multiple_of(2) {
        return Err(Error::argument("num_sms", config.num_sms, "must be even: a channel is two"));
    }
    let channels = config.num_channels();
    if channels == 0 || channels > MAX_CHANNELS {
        let rule = format!("gives {channels} channels; 1 to {MAX_CHANNELS} are possible");
        return Err(Error::argument("num_sms", config.num_sms, rule));
    }
    Ok(())
}

/// Names the parts of a pool: control words and messages once, rows for each place.
fn sections(layouts: &[PoolLayout], topology: Topology, row_bytes: RowBytes) -> Vec<Section> {
    let RowBytes { recv, combine } = row_bytes;
    let nodes = topology.nodes;
    let of_place = |(index, layout): (usize, &PoolLayout)| {
        let first = if index == 0 { 0 } else { layout.recv_x };
        let sections = layout.sections(nodes, recv, combine);
        sections.into_iter().filter(move |section| section.offset >= first).collect::<Vec<_>>()
    };
    let mut all: Vec<Section> = layouts.iter().enumerate().flat_map(of_place).collect();
    // Messages of rows by expert follow the count messages: first rows across nodes, and records of
    // copies.
    let counts = message_offset(topology.ranks_per_node, 0);
    if nodes == 1
        && let Some(messages) = all.iter_mut().find(|section| section.name == "messages")
        && messages.bytes > counts + ROW_ALIGN
    {
        let records = Section::array("copies", (messages.bytes - counts) / 8, 8);
        let behind = records.at(messages.offset + counts);
        messages.bytes = counts;
        all.push(behind);
        all.sort_by_key(|section| section.offset);
    }
    let first = expert_message_offset(nodes, topology.ranks_per_node, 0, 0, 0);
    if nodes > 1
        && let Some(messages) = all.iter_mut().find(|section| section.name == "messages")
        && messages.bytes > first + message_offset(0, expert_message::WORDS)
    {
        let stride = message_offset(0, expert_message::WORDS);
        let copies = internode_copies_offset(nodes, topology.ranks_per_node);
        let array = Section::array("expert_messages", (copies - first) / stride, stride);
        let behind = array.at(messages.offset + first);
        let records = Section::array("copies", (messages.bytes - copies) / 8, 8);
        let records = records.at(messages.offset + copies);
        messages.bytes = first;
        all.extend([behind.of(EXPERT_MESSAGE), records]);
        all.sort_by_key(|section| section.offset);
    }
    all
}

/// The parts of a message of first rows by expert.
const EXPERT_MESSAGE: &[Section] = &[
    Section::array("starts", MAX_LOCAL_EXPERTS as u64, 8),
    Section::one("rows", 8).at(expert_message::ROWS as u64 * 8),
];

/// Checks that all ranks run the same version with the same options, and the configuration that the
/// buffer goes by. Rows are those of a pool of one of the nodes, and of one of all ranks as one
/// node.
fn agree(
    group: &dyn ProcessGroup,
    topology: Topology,
    [rows, joined_rows]: [u64; 2],
    wire: &WireLayout,
    (options, config): (&Fields, &Config),
) -> Result<()> {
    let transport = &options.transport;
    let ours = vec![
        ("ranks_per_node", topology.ranks_per_node.to_string()),
        ("keep_nodes", options.keep_nodes.to_string()),
        ("max_tokens", options.shape.max_tokens.to_string()),
        ("rows of a place in the pool", rows.to_string()),
        ("rows of a place in the pool", joined_rows.to_string()),
        ("places", options.places.to_string()),
        ("rows_by_expert", format!("{:?}", options.rows_by_expert)),
        ("slots of wire memory", wire.slots.to_string()),
        ("hidden", options.shape.hidden.to_string()),
        ("dtype", options.shape.dtype.to_string()),
        ("max_topk", options.shape.max_topk.to_string()),
        ("max_scales", options.shape.max_scales.to_string()),
        ("num_sms", config.num_sms.to_string()),
        ("num_max_nvl_chunked_send_tokens", config.num_max_nvl_chunked_send_tokens.to_string()),
        ("num_max_nvl_chunked_recv_tokens", config.num_max_nvl_chunked_recv_tokens.to_string()),
        ("num_max_rdma_chunked_send_tokens", config.num_max_rdma_chunked_send_tokens.to_string()),
        ("num_max_rdma_chunked_recv_tokens", config.num_max_rdma_chunked_recv_tokens.to_string()),
        ("transport", transport.kind.to_string()),
        ("queues_per_peer", transport.queues_per_peer.to_string()),
    ];
    agree_on(group, ours)
}

//! The buffer: a rank's pool, the mappings of its peers' pools, and what every operation shares.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use epoxide_gpu::layout::{
    Call, Comm, DevicePtr, FEW_RANKS, LOCAL_STATE, LocalState, MAX_CHANNELS, MAX_LOCAL_EXPERTS, PLAN_HEADER,
    PlanHeader, PoolLayout, SEND_LIST_STRIDE, SEND_ROW_STRIDE, Section, WireLayout,
};

use super::beside::{Activity, next_id};
use super::captured::Recordings;
use super::enqueue::Enqueuer;
use super::fault::{Faults, Limits};
use super::kernels::{Kernels, Loaded};
use super::options::BufferOptions;
use super::peers::Peers;
use super::place::{Place, PlaceState, Pool, Room};
use super::pool::pool_layouts;
use super::scratch::Arena;
use super::sequence::Sequence;
use super::tensor::Owner;
use super::trace::Trace;
use super::wire::{WireSide, wire_layout};
use super::{Config, StreamOrder, Topology};
use crate::driver::{Device, Event, MappedMemory, Memory, MemoryKind, Stream};
use crate::error::{Error, Result, Scope};
use crate::group::ProcessGroup;
use crate::virtual_time::spawn;

/// Where expert counts start in the host's copy of the counts.
pub(super) const HOST_EXPERTS: u64 = size_of::<PlanHeader>() as u64;

/// Moves tokens between the ranks of a group. One per rank; every method that says so is collective.
///
/// A pool is mapped by all peers. Received rows lie in one of its places ([`super::Place`]), and are there until the next dispatch to that
/// place; routing handles and sums have memory of their own and live as long as they are held.
///
/// Operations take what they need: tensors that were given, and outputs, may be dropped as soon as a call has returned, whatever
/// streams still do with them. Memory goes back, and is overwritten, behind all that the device's streams ([`Stream`]) have been given by
/// then. Work of other code in streams without a [`Stream`] is not seen.
///
/// Operations follow each other on the device whatever streams they run on: one on another stream than the last waits for it.
///
/// # Example
/// A forward pass and its gradients: the second dispatch goes the way of the first, into another place, so that both results are there at once.
///
/// ```
/// use std::time::Duration;
///
/// use epoxide::driver::Stream;
/// use epoxide::driver::virt::{VirtConfig, VirtualGpu};
/// use epoxide::ep::*;
/// use epoxide::group::launch::run_threads;
///
/// let sums = run_threads(2, Duration::from_secs(60), |rank, group| {
///     let device = VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() });
///     let stream = Stream::new(&device, false)?;
///     let order = StreamOrder::on(&stream);
///     let shape = BufferShape { max_tokens_per_rank: 3, max_row_bytes: 32, max_topk: 1, max_scales: 0 };
///     let mut buffer = Buffer::new(device, &*group, BufferOptions::new(shape).places(2))?;
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
/// # Ok::<(), epoxide::group::launch::RankFailure>(())
/// ```
#[derive(Debug)]
pub struct Buffer {
    // Dropped in this order: streams first, so that no kernel runs when memory goes.
    enqueuer: Arc<Enqueuer>,
    pub(super) kernels: Kernels,
    pub(super) arena: Arc<Arena>,
    pub(super) host_counts: MappedMemory,
    pub(super) faults: Arc<Faults>,
    pub(super) places: Vec<Arc<PlaceState<Room>>>,
    pool: Arc<Pool>,
    _peers: Peers,
    /// The pools' addresses, u64 `[ranks]`, then the [`LocalState`].
    tables: Memory,
    pub(super) sequence: Arc<Sequence>,
    pub(super) recordings: Recordings,
    pub(super) device: Arc<dyn Device>,
    pub(super) comm: Comm,
    pub(super) config: Config,
    pub(super) options: BufferOptions,
    pub(super) rank: u32,
    pub(super) topology: Topology,
    pub(super) id: u64,
    pub(super) tag: u64,
    pub(super) trace: Option<Trace>,
    pub(super) row_bytes: RowBytes,
}

/// How long the rows in the pool are, as it has been described.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RowBytes {
    pub recv: u64,
    pub combine: u64,
}

impl Buffer {
    /// Makes the buffer and maps the peers' pools. Collective.
    ///
    /// # Errors
    /// [`Error::Argument`] where an option breaks a rule, [`Error::Mismatch`] where ranks give different ones,
    /// [`Error::Unavailable`] where GPUs of a node are linked without native atomics (PCIe), [`Error::OutOfMemory`], and whatever the
    /// driver or the group reports.
    pub fn new(device: Arc<dyn Device>, group: &dyn ProcessGroup, options: BufferOptions) -> Result<Buffer> {
        let rank = group.rank();
        let nodes = Topology::new(group.size(), options.ranks_per_node)?;
        options.tuning.validate()?;
        let config = options.config;
        check_channels(&config)?;
        let joined = nodes.joined(options.transport.kind, options.keep_nodes);
        if nodes.nodes > 1 && joined.is_none() {
            config.check_nodes(nodes.nodes)?;
        }
        let lay_out = |topology| {
            let (by_expert, limit) = (options.rows_by_expert, options.num_nvl_bytes);
            pool_layouts(&options.shape, topology, options.places, by_expert, limit)
        };
        let layouts = (lay_out(nodes)?, joined.map(lay_out).transpose()?);
        let wire_layout = wire_layout(&options.shape, nodes, options.num_rdma_bytes)?;
        let rows = [Some(&layouts.0), layouts.1.as_ref()].map(|of| of.map_or(0, |layouts| layouts[0].rows));
        agree(group, nodes, rows, &wire_layout, &options)?;

        let largest = options.shape.max_row_bytes;
        let row_bytes = RowBytes { recv: largest, combine: largest };
        let alloc = |layouts: &[PoolLayout], nodes| -> Result<Arc<Memory>> {
            let pool = Memory::alloc(&device, layouts[0].bytes, MemoryKind::Shareable, "pool")?;
            pool.describe(&sections(layouts, nodes, row_bytes));
            Ok(Arc::new(pool))
        };
        let mapped = match joined.zip(layouts.1) {
            None => None,
            Some((topology, layouts)) => {
                let pool = alloc(&layouts, 1)?;
                let peers = Peers::map_all(&device, group, &options.transport, &pool)?;
                peers.map(|peers| (topology, layouts, pool, peers))
            }
        };
        let topology = mapped.as_ref().map_or(nodes, |(topology, ..)| *topology);
        if topology.nodes > 1 {
            config.check_nodes(topology.nodes)?;
        }
        // A driver that has not seen the kernels before compiles them for hundreds of milliseconds: meanwhile, the pool.
        let loader = {
            let (device, ptx) = (device.clone(), options.ptx.clone());
            let by_expert = options.rows_by_expert.is_some();
            spawn("kernels of a buffer".into(), move || Loaded::new(&device, topology, by_expert, ptx))
                .map_err(|error| Error::os("spawn thread", error))?
        };
        let (layouts, pool, peers) = match mapped {
            Some((_, layouts, pool, peers)) => (layouts, pool, peers),
            None => {
                let (pool, layouts) = (alloc(&layouts.0, topology.nodes)?, layouts.0);
                let peers = Peers::map(&device, group, topology, &pool, layouts[0].bytes)?;
                (layouts, pool, peers)
            }
        };
        let layout = layouts[0];

        let enqueuer = Enqueuer::new(&device)?;
        let comm_stream = enqueuer.comm_stream();
        let local_at = size_of_val(&peers.addresses[..]) as u64;
        let local_bytes = size_of::<LocalState>() as u64;
        let tables = Memory::alloc(&device, local_at + local_bytes, MemoryKind::Device, "peer table")?;
        tables.write(comm_stream, 0, bytemuck::cast_slice(&peers.addresses))?;
        tables.write(comm_stream, local_at, &vec![0; local_bytes as usize])?;
        tables.describe(&[
            Section::array("pools", peers.addresses.len() as u64, 8),
            Section::one("local", local_bytes).of(LOCAL_STATE).at(local_at),
        ]);
        let status = Activity::alloc_status(&device, options.shape.max_tokens_per_rank)?;
        let experts =
            Section::array("num_recv_tokens_per_expert", MAX_LOCAL_EXPERTS as u64, 4).at(HOST_EXPERTS);
        let host_counts = MappedMemory::alloc(&device, HOST_EXPERTS + experts.bytes, "host counts")?;
        host_counts.describe(&[Section::one("header", HOST_EXPERTS).of(PLAN_HEADER), experts]);
        let loaded = loader.join().map_err(|_| Error::os("module load", "the loading thread panicked"))??;

        let comm = Comm {
            pools: peers.few(),
            pool_table: tables.ptr(),
            local: tables.ptr().add(local_at),
            status: status.ptr(),
            timeout_ns: nanoseconds(options.timeout),
            trace: DevicePtr::NULL,
            rank: topology.index(rank),
            num_ranks: topology.ranks_per_node,
            call: 0,
            pool: layout,
        };
        let wire = match topology.nodes {
            1 => None,
            _ => Some(WireSide::new(&device, group, comm_stream, topology, &options, wire_layout)?),
        };
        let kernels = Kernels::new(&device, options.tuning, &loaded, wire)?;
        let (id, arena) = (next_id(), Arena::new(&device));
        let pool = Pool::new(pool, &arena, options.timeout);
        let place = |(index, layout): (usize, &PoolLayout)| {
            let room = Room { layout: *layout, max_row_bytes: largest, rows_given: AtomicBool::new(false) };
            PlaceState::new(index as u32, id, room, pool.clone(), arena.clone())
        };
        let sequence = enqueuer.sequence().clone();
        let activity = Activity::list(id, &device, &sequence, &status);
        let limits = Limits {
            shape: options.shape,
            places: options.places,
            rows: layout.rows,
            by_expert: options.rows_by_expert.is_some(),
            slots: kernels.wire().map_or(0, |wire| wire.layout.slots),
        };
        let faults =
            Faults { activity, rank, topology, limits, told: AtomicU64::new(0), beside: OnceLock::new() };
        let buffer = Buffer {
            enqueuer,
            kernels,
            places: layouts.iter().enumerate().map(place).collect(),
            arena,
            host_counts,
            faults: Arc::new(faults),
            pool,
            _peers: peers,
            tables,
            sequence,
            recordings: Recordings::default(),
            device,
            comm,
            config,
            options,
            rank,
            topology,
            id,
            tag: 0,
            trace: None,
            row_bytes,
        };
        // No peer may write before every mapping stands.
        group.barrier(group.timeout())?;
        Ok(buffer)
    }

    /// Its number among the buffers that this process has made, by which errors name it.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks of the group.
    pub fn num_ranks(&self) -> u32 {
        self.topology.ranks()
    }

    /// The configuration it was made with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Changes the number of multiprocessors and channels of the operations that follow. The same on every rank.
    ///
    /// # Errors
    /// [`Error::Argument`] where the number of channels is out of range.
    pub fn set_config(&mut self, config: Config) -> Result<()> {
        check_channels(&config)?;
        if self.topology.nodes > 1 {
            config.check_nodes(self.topology.nodes)?;
        }
        self.config = config;
        Ok(())
    }

    /// The device it lives on.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Rows that this rank can receive in one dispatch.
    pub fn capacity(&self) -> u64 {
        self.comm.pool.rows
    }

    /// Device bytes of the pool, rounding included.
    pub fn pool_bytes(&self) -> u64 {
        self.pool.memory().footprint()
    }

    /// Hands out the place of index `index`. It comes back when the [`Place`] is dropped.
    ///
    /// # Errors
    /// [`Error::Argument`] where the buffer has no such place or it is handed out already.
    pub fn place(&self, index: u32) -> Result<Place> {
        PlaceState::hand_out(&self.places, index).map(Place)
    }

    /// Nodes of the group; 1 where all ranks' memory is mapped
    /// ([`BufferOptions::ranks_per_node`]).
    pub fn num_nodes(&self) -> u32 {
        self.topology.nodes
    }

    /// Ranks of each node.
    pub fn ranks_per_node(&self) -> u32 {
        self.topology.ranks_per_node
    }

    /// This rank's node, its "RDMA rank".
    pub fn node(&self) -> u32 {
        self.topology.node(self.rank)
    }

    /// Bytes of wire memory; 0 with one node.
    pub fn wire_bytes(&self) -> u64 {
        self.kernels.wire().map_or(0, |wire| wire.layout.bytes)
    }

    /// Describes the pool anew where its rows have another length now.
    pub(super) fn describe_rows(&mut self, row_bytes: RowBytes) {
        if row_bytes != self.row_bytes {
            self.row_bytes = row_bytes;
            let layouts: Vec<PoolLayout> = self.places.iter().map(|place| place.room.layout).collect();
            self.pool.memory().describe(&sections(&layouts, self.topology.nodes, row_bytes));
        }
    }

    /// The [`Comm`] for the kernels of an operation in this place.
    pub(super) fn comm_in(&self, place: &PlaceState<Room>, call: Call) -> Comm {
        Comm { pool: place.room.layout, call: call.bits(), ..self.comm }
    }

    /// Device table of the pools' addresses.
    pub(super) fn pool_table(&self) -> DevicePtr {
        self.tables.ptr()
    }

    /// The address of this rank's pool.
    pub(super) fn pool_ptr(&self) -> DevicePtr {
        self.pool.memory().ptr()
    }

    /// Blocks of an operation on this rank's tokens within one node: a block without a token would only take part in the protocol.
    pub(super) fn blocks_for(&self, num_tokens: u32) -> u32 {
        num_tokens.clamp(1, self.config.num_sms)
    }

    /// An error unless the place is one of this buffer's.
    pub(super) fn check_place(&self, place: &PlaceState<Room>) -> Result<()> {
        if place.buffer == self.id {
            return Ok(());
        }
        Err(Error::argument("place", place.index, "it is of another buffer: use one that this buffer gave"))
    }

    pub(super) fn check_tokens(&self, tokens: u64) -> Result<u32> {
        // Token times rank count and row stride stay inside 31 bits in the kernels.
        let ranks = self.topology.ranks();
        let entries = if ranks <= FEW_RANKS as u32 { SEND_ROW_STRIDE } else { ranks.max(SEND_LIST_STRIDE) };
        let most = (1 << 30) / u64::from(entries);
        match u32::try_from(tokens) {
            Ok(fits) if tokens <= most => {
                let have = self.options.shape.max_tokens_per_rank;
                self.check_column_capacity(
                    "num_tokens",
                    tokens,
                    have.into(),
                    "max_tokens_per_rank",
                    "tokens",
                )?;
                Ok(fits)
            }
            _ => Err(Error::argument("num_tokens", tokens, format!("must be at most {most}"))),
        }
    }

    pub(super) fn check_experts(&self, num_experts: u32) -> Result<()> {
        let ranks = self.topology.ranks();
        if num_experts == 0 || !num_experts.is_multiple_of(ranks) {
            let rule = format!("must be a positive multiple of the number of ranks, {ranks}");
            return Err(Error::argument("num_experts", num_experts, rule));
        }
        let counters = (num_experts as u64 + ranks as u64 + self.topology.nodes as u64) * 4;
        let shared = self.device.info().max_shared_bytes_per_block;
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

    pub(super) fn check_row_capacity(&self, row_bytes: u64) -> Result<()> {
        self.check_column_capacity(
            "hidden",
            row_bytes,
            self.options.shape.max_row_bytes,
            "max_row_bytes",
            "bytes",
        )
    }

    pub(super) fn check_column_capacity(
        &self,
        what: &'static str,
        needed: u64,
        have: u64,
        option: &str,
        unit: &'static str,
    ) -> Result<()> {
        if needed <= have {
            return Ok(());
        }
        let remedy = format!("create the buffer with {option} >= {needed}");
        Err(Error::Capacity { what, needed, have, unit, remedy, scope: Scope::ThisRank })
    }

    /// Begins an operation: an error where an earlier one has failed. Says whether this one is only recorded.
    pub(super) fn begin(&self, order: StreamOrder<'_>) -> Result<bool> {
        // A plan that failed is no reason: peers, whose devices may be behind, make the call.
        self.check_usable()?;
        order.caller.is_capturing()
    }

    /// Runs `work` where `order` says, behind the operation before and whoever still uses the blocks that were taken for it; gives the
    /// event of an asynchronous call. `capturing`: what [`Buffer::begin`] said; `operation`: its
    /// name, where it waits for peers; `uses`: what must live as long as a recording of it.
    pub(super) fn run(
        &mut self,
        order: StreamOrder<'_>,
        capturing: bool,
        operation: Option<&'static str>,
        uses: impl IntoIterator<Item = Owner>,
        work: impl FnOnce(&mut Self, &Stream) -> Result<()>,
    ) -> Result<Option<Event>> {
        let event = self.enqueuer.clone().run(order, capturing, operation, |stream| {
            if capturing {
                self.recordings.keep(uses);
                self.arena.are_settled();
            } else {
                self.arena.come_before(stream)?;
            }
            work(self, stream)
        })?;
        Ok(event.map(|event| event.of(self.faults.clone())))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Peers' mappings of this pool keep its memory alive for them, so no barrier is needed.
        self.enqueuer.close(self.options.timeout.saturating_mul(2));
        if let Some(side) = self.kernels.wire_side_mut() {
            side.close();
        }
    }
}

fn check_channels(config: &Config) -> Result<()> {
    let channels = config.num_channels();
    if channels == 0 || channels > MAX_CHANNELS {
        let rule = format!("gives {channels} channels; 1 to {MAX_CHANNELS} are possible");
        return Err(Error::argument("num_sms", config.num_sms, rule));
    }
    Ok(())
}

/// Names the parts of a pool: control words and messages once, rows for each place.
fn sections(layouts: &[PoolLayout], nodes: u32, row_bytes: RowBytes) -> Vec<Section> {
    let RowBytes { recv, combine } = row_bytes;
    let of_place = |(index, layout): (usize, &PoolLayout)| {
        let first = if index == 0 { 0 } else { layout.recv_x };
        let sections = layout.sections(nodes, recv, combine);
        sections.into_iter().filter(move |section| section.offset >= first).collect::<Vec<_>>()
    };
    layouts.iter().enumerate().flat_map(of_place).collect()
}

/// Checks that all ranks run the same version with the same options. Rows are those of a pool of one
/// of the nodes, and of one of all ranks as one node.
fn agree(
    group: &dyn ProcessGroup,
    topology: Topology,
    [rows, joined_rows]: [u64; 2],
    wire: &WireLayout,
    options: &BufferOptions,
) -> Result<()> {
    let (config, transport) = (options.config, &options.transport);
    let ours: Vec<(&'static str, String)> = vec![
        ("epoxide's version", env!("CARGO_PKG_VERSION").to_owned()),
        ("ranks_per_node", topology.ranks_per_node.to_string()),
        ("keep_nodes", options.keep_nodes.to_string()),
        ("rows of a place in the pool", rows.to_string()),
        ("rows of a place in the pool", joined_rows.to_string()),
        ("places", options.places.to_string()),
        ("rows_by_expert", format!("{:?}", options.rows_by_expert)),
        ("slots of wire memory", wire.slots.to_string()),
        ("max_row_bytes", options.shape.max_row_bytes.to_string()),
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
    agree_on(group, &ours)
}

/// A deadline as kernels are told it.
pub(super) fn nanoseconds(timeout: Duration) -> u64 {
    timeout.as_nanos().try_into().unwrap_or(u64::MAX)
}

/// Checks that all ranks have the same values of the same names.
pub(super) fn agree_on(group: &dyn ProcessGroup, ours: &[(&'static str, String)]) -> Result<()> {
    let message = ours.iter().map(|(_, value)| value.as_str()).collect::<Vec<_>>().join("\n");
    for (peer, theirs) in group.all_gather(message.as_bytes())?.into_iter().enumerate() {
        let theirs = String::from_utf8_lossy(&theirs);
        let mut theirs = theirs.split('\n');
        for (what, ours) in ours {
            let theirs = theirs.next().unwrap_or("nothing");
            if ours != theirs {
                return Err(Error::Mismatch {
                    rank: group.rank(),
                    peer: peer as u32,
                    what,
                    ours: ours.clone(),
                    theirs: theirs.to_owned(),
                });
            }
        }
    }
    Ok(())
}

//! Low latency: the buffer and its operations. [`crate::low_latency`] describes it to users.
//!
//! | file | holds |
//! |---|---|
//! | `mod.rs` | [`Buffer`]: how it is made, and how its operations run |
//! | `options.rs` | how a buffer is made, and how rows are quantised |
//! | `dispatch.rs`, `combine.rs`, `gather.rs`, `halves.rs` | the operations, and their launches in one or two halves |
//! | `results.rs` | their results, and their places |
//! | `kernels.rs` | the kernels of a buffer, and which of them an operation launches |
//! | `layout.rs` | the layout of the pool |
//! | `internode.rs` | messages to the ranks of other nodes |
//! | `regroup.rs` | continuation without lost ranks |
//! | `fault.rs` | the texts of faults that only this mode has, and the outcome of the operations between two regroups |

mod combine;
mod dispatch;
mod fault;
mod gather;
mod halves;
mod internode;
mod kernels;
mod layout;
mod options;
mod regroup;
mod results;

use std::iter;
use std::sync::Arc;
use std::time::Duration;

use bytemuck::Zeroable;
use epoxide_gpu::layout::{
    Comm, DevicePtr, FirstTokensArgs, LowLatencyArgs, LowLatencyCall, LowLatencyMessages, LowLatencyPlace,
};

use super::core::{
    self, Core, HasCore, Pieces, PlaceState, Pools, Step, StreamOrder, Uses, agree_on, agree_on_part,
    laid_out,
};
use super::{DType, Topology};
use crate::driver::{Device, Event, Memory, MemoryKind, Stream};
use crate::error::{Error, Result};
use crate::group::ProcessGroup;

pub use combine::CombineRequest;
pub use dispatch::DispatchRequest;
pub use halves::Pending;
use options::check_members;
pub use options::{Options, Shape};
pub use regroup::regroup_ahead;
pub use results::{ByExpertPtrs, Combined, Detached, Place, Received, ReceivedByExpert};

use fault::{Calls, Generation};
use internode::{MessageLayout, Messages};
use kernels::Kernels;
use layout::{OwnTables, PoolLayout};
use results::Room;

/// Moves decode-sized batches between ranks, of one node or of several. One per rank. A method is
/// collective if its documentation contains that word: every rank makes the same collective calls
/// in the same order.
///
/// Operations keep the memory that they need: inputs may be dropped as soon as a call has returned.
/// Results are in a [`Place`], until the next dispatch to that place.
///
/// Operations run one after the other on the device, on any streams: an operation on another stream
/// than the last waits for it.
#[derive(Debug)]
pub struct Buffer {
    // Dropped first: its end waits for the kernels that use the rest.
    core: Core<Room>,
    kernels: Kernels,
    /// Where there are several nodes.
    messages: Option<Messages>,
    tables: Arc<Memory>,
    /// f32 `[rows, num_topk]` of ones: the weights of rows that are summed without.
    unit_weights: DevicePtr,
    /// A bit for each rank that is left out.
    left_out: u64,
    /// The operations since the last regroup.
    generation: Arc<Generation>,
    comm: Comm,
    options: Options,
}

impl Buffer {
    /// Makes the buffer and maps the peers' pools. Collective.
    ///
    /// # Errors
    /// * [`Error::Argument`] where an option breaks a rule
    /// * [`Error::Mismatch`] where ranks give different options
    /// * [`Error::Unavailable`] where GPUs of a node are linked without native atomics (PCIe), or
    ///   the transport is missing
    /// * [`Error::Transport`] where ranks of different nodes cannot be joined
    /// * [`Error::OutOfMemory`], and errors of the driver and the group
    pub fn new(device: Device, group: &dyn ProcessGroup, options: Options) -> Result<Buffer> {
        let rank = group.rank();
        let nodes = Topology::new(group.size(), options.ranks_per_node)?;
        options.validate(nodes)?;
        agree(group, &options, group.size())?;
        let ranks = nodes.ranks();
        // Within a node a pool holds the places; across nodes, the messages of the ranks of this
        // one.
        let layout = PoolLayout::new(&options, ranks);
        let messages = MessageLayout::new(&options, nodes.ranks_per_node, false);
        let alloc = |topology: Topology| {
            let pieces = if topology.nodes == 1 { &layout.pieces } else { &messages.pieces };
            let pool = Memory::alloc(&device, pieces.bytes(), MemoryKind::Shareable, "low-latency pool")?;
            pool.describe(pieces.sections());
            Ok(pool)
        };
        let joined = options.joined(nodes);
        let load = |topology: Topology| {
            check_members(topology)?;
            Kernels::load(&device, topology, &options)
        };
        let prepare = || {
            let (pools, kernels) =
                Pools::map(&device, group, (nodes, joined), &options.transport, alloc, load)?;
            let topology = pools.topology();

            let calls =
                Box::new(Calls { num_experts: options.shape.num_experts, hidden: options.shape.hidden });
            let core = Core::new(&device, rank, pools, options.timeout, options.shape.max_tokens, calls)?;
            let own = |pieces: &mut Pieces| layout::tables(pieces, &options, topology);
            let (tables, own) = laid_out(&device, "low-latency tables", own)?;
            tables.write(core.stream(), 0, &vec![0; tables.bytes() as usize])?;
            if topology.nodes == 1 {
                let addresses = bytemuck::cast_slice(core.pool_addresses());
                tables.write_at(core.stream(), own.pools, addresses)?;
            }
            let entries = u64::from(ranks * options.shape.max_tokens * options.shape.num_topk);
            let ones = 1f32.to_ne_bytes().repeat(entries as usize);
            tables.write(core.stream(), own.unit_weights.0 - tables.ptr().0, &ones)?;
            Ok((core, kernels, tables, own))
        };
        let (mut core, kernels, tables, own) = agree_on_part(group, prepare())?;
        let topology = core.topology();
        let OwnTables { places: of_places, unit_weights, pools: pool_table } = own;

        let finish = || {
            let messages = (topology.nodes > 1)
                .then(|| Messages::new(&mut core, group, &options, &messages))
                .transpose()?;
            // Kernels across nodes find memory by routes.
            let comm = Comm { pool_table, rank, num_ranks: ranks, ..core.comm(tables.ptr()) };
            let tables = Arc::new(tables);
            let of_messages = messages.iter().map(Messages::memory);
            let memory: Vec<_> = iter::once(&tables).chain(of_messages).cloned().collect();
            let at_pool = |offset| core.pool().ptr().add(offset);
            let within = |at: LowLatencyPlace| {
                let combine_rows = (options.combine_dtype == DType::Bf16).then(|| at_pool(at.returned_x));
                (at, None, at_pool(at.recv_x), at_pool(at.recv_scales), combine_rows)
            };
            let across = |messages: LowLatencyMessages| {
                (Zeroable::zeroed(), Some(messages), messages.recv_x, messages.recv_scales, None)
            };
            let spots: Vec<_> = match &messages {
                None => layout.places.iter().copied().map(within).collect(),
                Some(messages) => messages.places().iter().copied().map(across).collect(),
            };
            let room = |(own, spot)| {
                let (at, messages, recv_x, recv_scales, combine_rows) = spot;
                Room { at, recv_x, recv_scales, combine_rows, messages, own, _memory: memory.clone() }
            };
            core.make_places(of_places.into_iter().zip(spots).map(room));
            let generation = Generation::new(core.faults());
            Ok(Buffer {
                core,
                kernels,
                messages,
                tables,
                unit_weights,
                left_out: 0,
                generation,
                comm,
                options,
            })
        };
        // No peer may write before all mappings exist.
        agree_on_part(group, finish())
    }

    core::buffer_methods! {
        /// Results detach with [`Received::detach`] and [`Combined::detach`].
        ///
        capture,
        status_ptr,
        /// [`Buffer::regroup`] sets all bytes to 0. A token with an expert id out of range has a 1
        /// as well, from its dispatch on. Shares of experts on ranks that a regroup left out are
        /// not counted: they are those that are not among [`Buffer::members`].
        missing_ptr,
        /// [`DispatchRequest::new`] takes the result.
        first_tokens,
    }

    /// Experts of each rank.
    pub fn local_experts(&self) -> u32 {
        self.options.shape.num_experts / self.num_ranks()
    }

    /// Rows of a place: those of token t from rank s are `s * max_tokens + t`.
    pub fn rows(&self) -> u64 {
        u64::from(self.num_ranks() * self.options.shape.max_tokens)
    }

    /// The place of a dispatch's rows; an error unless this buffer made the dispatch with its
    /// current members.
    fn place_of(&self, received: &Received<'_>) -> Result<Arc<PlaceState<Room>>> {
        let place = received.lease.place().clone();
        self.core.check_place(&place)?;
        if !Arc::ptr_eq(&received.generation, &self.generation) {
            return Err(Error::StaleHandle("the ranks regrouped since its dispatch: dispatch again".into()));
        }
        Ok(place)
    }

    /// The arguments that all kernels share. `timeout`: the longest wait for a peer, if not the
    /// buffer's.
    fn args(
        &self,
        place: &PlaceState<Room>,
        call: LowLatencyCall,
        timeout: Option<Duration>,
    ) -> LowLatencyArgs {
        let timeout_ns = self.core.timeout_ns(timeout);
        LowLatencyArgs {
            comm: Comm { call: call.bits().into(), timeout_ns, ..self.comm },
            place: place.room().at,
            tables: place.room().own.tables,
            num_tokens: call.num_tokens,
            max_tokens: self.options.shape.max_tokens,
            num_topk: self.options.shape.num_topk,
            local_experts: self.local_experts(),
            chunk_tokens: self.options.chunk_tokens,
            phases: 0,
            packet_tokens: self.options.most_in_packets(self.num_ranks()),
            reserved: 0,
        }
    }

    /// Blocks for `pieces` of work of a call that requests `asked` multiprocessors. All blocks wait
    /// for peers, so at most as many as are resident at once.
    fn blocks_for(&self, pieces: u32, asked: Option<u32>) -> u32 {
        let most = self.core.device().info().sm_count;
        pieces.clamp(1, asked.or(self.options.num_sms).map_or(most, |num_sms| num_sms.min(most)))
    }

    /// Runs `work` on the stream of `order`, behind the previous operation; returns the event of an
    /// asynchronous call. `work` gets whether the operation is only recorded.
    fn run(
        &mut self,
        order: StreamOrder<'_>,
        operation: core::Operation,
        uses: &Uses,
        work: impl FnOnce(&mut Self, &Stream, bool) -> Result<()>,
    ) -> Result<Option<Event>> {
        let capturing = self.core.begin(order)?;
        let event = Core::run(self, order, capturing, operation, uses, |buffer, stream| {
            work(buffer, stream, capturing)
        })?;
        Ok(event.map(|event| event.of(self.outcome_where(capturing))))
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

/// Checks that all ranks of the group run the same version with the same options, those of a buffer
/// of `num_ranks` ranks.
fn agree(group: &dyn ProcessGroup, options: &Options, num_ranks: u32) -> Result<()> {
    let ours = vec![
        ("max_tokens", options.shape.max_tokens.to_string()),
        ("hidden", options.shape.hidden.to_string()),
        ("num_topk", options.shape.num_topk.to_string()),
        ("num_experts", options.shape.num_experts.to_string()),
        ("places", options.places.to_string()),
        ("max_scales", options.max_scales.to_string()),
        ("combine_dtype", options.combine_dtype.to_string()),
        ("chunk_tokens", options.chunk_tokens.to_string()),
        ("packet_tokens", options.most_in_packets(num_ranks).to_string()),
        ("ranks_per_node", options.ranks_per_node.unwrap_or(num_ranks).to_string()),
        ("keep_nodes", options.keep_nodes.to_string()),
        ("transport", options.transport.kind.to_string()),
    ];
    agree_on(group, ours)
}

//! The low-latency buffer: a rank's pool, the mappings of its peers' pools, and what both operations share.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytemuck::Zeroable;
use epoxide_gpu::kernels::{
    LowLatencyCombineBf16, LowLatencyCombineFp8, LowLatencyCombineSummed, LowLatencyDispatch,
    LowLatencyGather, LowLatencyInternodeCombineBf16, LowLatencyInternodeCombineFp8,
    LowLatencyInternodeDispatch,
};
use epoxide_gpu::layout::{
    Comm, DevicePtr, FEW_RANKS, LowLatencyArgs, LowLatencyCall, LowLatencyMessages, LowLatencyPlace,
};

use super::fault::Faults;
use super::internode::{MessageLayout, Network};
use super::layout::{PoolLayout, TableLayout};
use super::options::Options;
use super::place::{Place, PlaceState, Room};
use super::results::Received;
use crate::driver::{Device, Event, Kernel, Memory, MemoryKind, Module, Stream};
use crate::ep::beside::{Activity, next_id};
use crate::ep::buffer::{agree_on, nanoseconds};
use crate::ep::captured::Recordings;
use crate::ep::enqueue::Enqueuer;
use crate::ep::peers::Peers;
use crate::ep::place::Pool;
use crate::ep::scratch::{Arena, Pieces};
use crate::ep::sequence::Sequence;
use crate::ep::tensor::Owner;
use crate::ep::trace::{Trace, TracedLaunch};
use crate::ep::{StreamOrder, Topology};
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::transport::QueueStats;

/// Moves decode-sized batches between ranks, of one node or of several. One per rank; every method that says so is collective.
///
/// Operations take what they need: tensors that were given may be dropped as soon as a call has returned. Their results lie in a
/// [`Place`], and is there until the next dispatch to that place.
///
/// Operations follow each other on the device whatever streams they run on: one on another stream than the last waits for it.
#[derive(Debug)]
pub struct Buffer {
    // Dropped in this order: streams first, so that no kernel runs when memory goes.
    pub(super) enqueuer: Arc<Enqueuer>,
    pub(super) kernels: Kernels,
    /// Where there are several nodes. Its proxies end before memory goes.
    pub(super) network: Option<Network>,
    pub(super) places: Vec<Arc<PlaceState>>,
    pub(super) tables: Arc<Memory>,
    pool: Arc<Pool>,
    _peers: Peers,
    pub(super) sequence: Arc<Sequence>,
    /// Where kernels write when their blocks reached each phase, while somebody wants to know.
    pub(super) trace: Option<Trace>,
    /// The operation whose rows have left and which nobody has received yet.
    pub(super) sent: Option<&'static str>,
    pub(super) recordings: Recordings,
    /// A bit for each rank that is left out.
    pub(super) left_out: u32,
    /// How often the ranks have regrouped.
    pub(super) generation: u64,
    pub(super) arena: Arc<Arena>,
    pub(super) faults: Arc<Faults>,
    pub(super) device: Arc<dyn Device>,
    comm: Comm,
    pub(super) options: Options,
    pub(super) rank: u32,
    pub(super) topology: Topology,
    id: u64,
}

/// The kernels within a node, or those across nodes.
#[derive(Debug)]
pub(super) struct Kernels {
    pub dispatch: Kernel,
    pub combine: Kernel,
    pub quantised_combine: Kernel,
    /// Within a node, of many rows that are summed over experts already.
    pub summed_combine: Kernel,
    pub gather: Kernel,
}

impl Kernels {
    fn load(device: &Arc<dyn Device>, nodes: u32) -> Result<Kernels> {
        let infos = if nodes == 1 {
            [LowLatencyDispatch::INFO, LowLatencyCombineBf16::INFO, LowLatencyCombineFp8::INFO]
        } else {
            [
                LowLatencyInternodeDispatch::INFO,
                LowLatencyInternodeCombineBf16::INFO,
                LowLatencyInternodeCombineFp8::INFO,
            ]
        };
        let [dispatch, combine, quantised_combine] = infos.map(|info| info.name);
        let [summed_combine, gather] = [LowLatencyCombineSummed::INFO.name, LowLatencyGather::INFO.name];
        let names = [dispatch, combine, quantised_combine, summed_combine, gather];
        let module = Module::shipped(device, None, &names)?;
        Ok(Kernels {
            dispatch: module.kernel(dispatch, 0)?,
            combine: module.kernel(combine, 0)?,
            quantised_combine: module.kernel(quantised_combine, 0)?,
            summed_combine: module.kernel(summed_combine, 0)?,
            gather: module.kernel(gather, 0)?,
        })
    }
}

impl Buffer {
    /// Makes the buffer and maps the peers' pools. Collective.
    ///
    /// # Errors
    /// [`Error::Argument`] where an option breaks a rule, [`Error::Mismatch`] where ranks give different ones, [`Error::Unavailable`] where
    /// GPUs of a node are linked without native atomics (PCIe) or the transport is not there, [`Error::Transport`] where ranks of different
    /// nodes cannot be joined, [`Error::OutOfMemory`], and whatever the driver or the group reports.
    pub fn new(device: Arc<dyn Device>, group: &dyn ProcessGroup, options: Options) -> Result<Buffer> {
        let rank = group.rank();
        let nodes = Topology::new(group.size(), options.ranks_per_node)?;
        options.validate(nodes)?;
        agree(group, &options)?;
        let ranks = nodes.ranks();
        // Within a node a pool holds the places; across nodes, the messages of the ranks of this one.
        let layout = PoolLayout::new(&options, ranks);
        let messages = MessageLayout::new(&options, nodes.ranks_per_node, false);
        let alloc = |pieces: &Pieces| -> Result<Arc<Memory>> {
            let pool = Memory::alloc(&device, pieces.bytes(), MemoryKind::Shareable, "low-latency pool")?;
            pool.describe(pieces.sections());
            Ok(Arc::new(pool))
        };
        let joined = nodes.joined(options.transport.kind, options.keep_nodes);
        let mapped = match joined.filter(|_| ranks <= FEW_RANKS as u32) {
            None => None,
            Some(topology) => {
                let pool = alloc(&layout.pieces)?;
                let peers = Peers::map_all(&device, group, &options.transport, &pool)?;
                peers.map(|peers| (topology, pool, peers))
            }
        };
        let (topology, pool, peers) = match mapped {
            Some(mapped) => mapped,
            None => {
                let pieces = if nodes.nodes == 1 { &layout.pieces } else { &messages.pieces };
                let pool = alloc(pieces)?;
                let peers = Peers::map(&device, group, nodes, &pool, pieces.bytes())?;
                (nodes, pool, peers)
            }
        };

        let enqueuer = Enqueuer::new(&device)?;
        // Where nothing is, only to learn how much there is.
        let bytes = TableLayout::new(&options, topology, DevicePtr::NULL).pieces.bytes();
        let tables = Memory::alloc(&device, bytes, MemoryKind::Device, "low-latency tables")?;
        let table_layout = TableLayout::new(&options, topology, tables.ptr());
        tables.write(enqueuer.comm_stream(), 0, &vec![0; bytes as usize])?;
        tables.describe(table_layout.pieces.sections());
        let status = Activity::alloc_status(&device, options.max_tokens)?;

        let kernels = Kernels::load(&device, topology.nodes)?;
        let stream = enqueuer.comm_stream();
        let within = (pool.ptr(), &messages, &peers);
        let network = (topology.nodes > 1)
            .then(|| Network::new(&device, group, stream, topology, &options, within))
            .transpose()?;
        let comm = Comm {
            pools: peers.few(),
            // Kernels of low latency go by registers, or by routes.
            pool_table: DevicePtr::NULL,
            local: tables.ptr(),
            status: status.ptr(),
            timeout_ns: nanoseconds(options.timeout),
            trace: DevicePtr::NULL,
            rank,
            num_ranks: ranks,
            call: 0,
            // Only a high-throughput buffer has it.
            pool: Zeroable::zeroed(),
        };
        let (id, arena) = (next_id(), Arena::new(&device));
        let pool = Pool::new(pool, &arena, options.timeout);
        let tables = Arc::new(tables);
        let at_pool = |offset| pool.memory().ptr().add(offset);
        let within = |at: LowLatencyPlace| (at, None, at_pool(at.recv_x), at_pool(at.recv_scales));
        let across = |messages: LowLatencyMessages| {
            (Zeroable::zeroed(), Some(messages), messages.recv_x, messages.recv_scales)
        };
        let spots: Vec<_> = match &network {
            None => layout.places.iter().copied().map(within).collect(),
            Some(network) => network.messages.iter().copied().map(across).collect(),
        };
        let place = |(index, ((at_tables, combined_x), spot)): (u32, (_, _))| {
            let (at, messages, recv_x, recv_scales) = spot;
            let _tables = tables.clone();
            let room = Room { at, recv_x, recv_scales, messages, tables: at_tables, combined_x, _tables };
            PlaceState::new(index, id, room, pool.clone(), arena.clone())
        };
        let places = (0..).zip(table_layout.places.into_iter().zip(spots)).map(place).collect();
        let sequence = enqueuer.sequence().clone();
        let activity = Activity::list(id, &device, &sequence, &status);
        let num_experts = options.num_experts;
        let faults = Faults { activity, rank, num_experts, past: Mutex::default() };
        let buffer = Buffer {
            enqueuer,
            kernels,
            network,
            places,
            tables,
            pool,
            _peers: peers,
            sequence,
            trace: None,
            sent: None,
            recordings: Recordings::default(),
            left_out: 0,
            generation: 0,
            arena,
            faults: Arc::new(faults),
            device,
            comm,
            options,
            rank,
            topology,
            id,
        };
        // No peer may write before every mapping stands.
        group.barrier(group.timeout())?;
        Ok(buffer)
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks of the group.
    pub fn num_ranks(&self) -> u32 {
        self.topology.ranks()
    }

    /// Nodes of the group; 1 where ranks of several are one ([`Options::ranks_per_node`]).
    pub fn num_nodes(&self) -> u32 {
        self.topology.nodes
    }

    /// Experts of each rank.
    pub fn local_experts(&self) -> u32 {
        self.options.num_experts / self.num_ranks()
    }

    /// Rows of a place: those of token t from rank s are `s * max_tokens + t`.
    pub fn rows(&self) -> u64 {
        u64::from(self.num_ranks() * self.options.max_tokens)
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

    /// Has the kernels that follow write down when each of their blocks reached each phase, up to `blocks` blocks in all; launches beyond that
    /// go untraced.
    ///
    /// A CUDA graph that was captured meanwhile keeps writing to the trace: end its use before [`Buffer::take_trace`].
    ///
    /// # Errors
    /// [`Error::Argument`] for no blocks, [`Error::OutOfMemory`].
    #[doc(hidden)]
    pub fn start_trace(&mut self, blocks: u64) -> Result<()> {
        self.trace = Some(Trace::new(&self.device, blocks)?);
        Ok(())
    }

    /// Ends the trace and reads it: the launches in order, and how many went untraced. Waits for the last operation; `stream`
    /// carries the copy. Empty without a trace.
    ///
    /// # Errors
    /// Whatever the driver reports.
    #[doc(hidden)]
    pub fn take_trace(&mut self, stream: &Stream) -> Result<(Vec<TracedLaunch>, u64)> {
        Trace::take(&mut self.trace, &self.sequence, self.options.timeout, stream)
    }

    /// Statistics of the puts of the proxies so far: (peer, statistics), in ascending order of peers. Empty with one node, and where all peers are
    /// mapped.
    #[doc(hidden)]
    pub fn wire_stats(&self) -> Vec<(u32, QueueStats)> {
        let proxies = self.network.iter().flat_map(|network| network.proxies.all());
        proxies.map(|proxy| (proxy.peer(), proxy.stats())).collect()
    }

    /// An error unless the place is one of this buffer's.
    pub(super) fn check_place(&self, place: &PlaceState) -> Result<()> {
        if place.buffer == self.id {
            return Ok(());
        }
        Err(Error::argument("place", place.index, "it is of another buffer: use one that this buffer gave"))
    }

    /// Where the rows of a dispatch are; an error unless it was one of this buffer's, with the ranks that are its members still.
    pub(super) fn place_of(&self, received: &Received<'_>) -> Result<Arc<PlaceState>> {
        let place = received.lease.place.clone();
        self.check_place(&place)?;
        if received.generation != self.generation {
            return Err(Error::StaleHandle("the ranks regrouped since its dispatch: dispatch again".into()));
        }
        Ok(place)
    }

    /// The arguments that all kernels share. `timeout`: the longest wait for a peer, if not the buffer's.
    pub(super) fn args(
        &self,
        place: &PlaceState,
        call: LowLatencyCall,
        timeout: Option<Duration>,
    ) -> LowLatencyArgs {
        let timeout_ns = timeout.map_or(self.comm.timeout_ns, nanoseconds);
        LowLatencyArgs {
            comm: Comm { call: call.bits().into(), timeout_ns, ..self.comm },
            place: place.room.at,
            tables: place.room.tables,
            num_tokens: call.num_tokens,
            max_tokens: self.options.max_tokens,
            num_topk: self.options.num_topk,
            local_experts: self.local_experts(),
            chunk_tokens: self.options.chunk_tokens,
            phases: 0,
            packet_tokens: self.options.most_in_packets(),
            reserved: 0,
        }
    }

    /// Blocks for so many pieces of work: all of them wait for peers, so that they must fit on the device together.
    pub(super) fn blocks_for(&self, pieces: u32) -> u32 {
        let most = self.device.info().sm_count;
        pieces.clamp(1, self.options.num_sms.map_or(most, |num_sms| num_sms.min(most)))
    }

    /// Runs `work` where `order` says, behind the operation before; gives the event of an asynchronous call. `operation`: its name, where
    /// it waits for peers; `uses`: what must live as long as a recording of it.
    pub(super) fn run(
        &mut self,
        order: StreamOrder<'_>,
        operation: Option<&'static str>,
        place: &PlaceState,
        uses: impl IntoIterator<Item = Owner>,
        work: impl FnOnce(&mut Self, &Stream) -> Result<()>,
    ) -> Result<Option<Event>> {
        if let Some(call) = self.sent {
            let reason = "its rows have left, but what it brings was not received".into();
            return Err(Error::Broken { call, reason });
        }
        self.check()?;
        let capturing = order.caller.is_capturing()?;
        let event = self.enqueuer.clone().run(order, capturing, operation, |stream| {
            if capturing {
                self.recordings.keep(uses);
            } else {
                place.come_before(stream)?;
            }
            work(self, stream)
        })?;
        let outcomes = self.outcomes(order)?;
        Ok(event.map(|event| event.of(outcomes)))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Peers' mappings of this pool keep its memory alive for them, so no barrier is needed.
        self.enqueuer.close(self.options.timeout.saturating_mul(2));
        if let Some(network) = &mut self.network {
            network.close();
        }
    }
}

/// Checks that all ranks run the same version with the same options.
pub(super) fn agree(group: &dyn ProcessGroup, options: &Options) -> Result<()> {
    let ours: [(&'static str, String); 11] = [
        ("epoxide's version", env!("CARGO_PKG_VERSION").to_owned()),
        ("max_tokens", options.max_tokens.to_string()),
        ("hidden", options.hidden.to_string()),
        ("num_topk", options.num_topk.to_string()),
        ("num_experts", options.num_experts.to_string()),
        ("places", options.places.to_string()),
        ("chunk_tokens", options.chunk_tokens.to_string()),
        ("packet_tokens", options.most_in_packets().to_string()),
        ("ranks_per_node", options.ranks_per_node.unwrap_or(group.size()).to_string()),
        ("keep_nodes", options.keep_nodes.to_string()),
        ("transport", options.transport.kind.to_string()),
    ];
    agree_on(group, &ours)
}

//! Low latency across nodes: where the messages of each pair of ranks are, and what carries them.

use std::sync::Arc;

use epoxide_gpu::layout::{
    DISPATCH_HEADER, DevicePtr, LowLatencyCopies, LowLatencyMessage, LowLatencyMessages, LowLatencyRoute,
    LowLatencySlot, LowLatencyWords, MAX_MEMBERS, QueueHandle, answer_slot_bytes, low_latency_head_bytes,
    row_stride,
};

use super::options::Options;
use super::results::Room;
use crate::driver::{Memory, Stream};
use crate::ep::Topology;
use crate::ep::core::{Core, Pieces, laid_out};
use crate::error::{Error, Result};
use crate::group::ProcessGroup;

/// Messages of a place in one memory, `[peers]` of each kind: offsets in bytes.
#[derive(Debug, Clone, Copy)]
struct MessageOffsets {
    /// Incoming messages.
    dispatch_in: u64,
    answer_in: u64,
    /// Outgoing messages, which puts read, if any.
    dispatch_out: u64,
    answer_out: u64,
}

/// The places of words and messages in memory that this many peers write to.
#[derive(Debug)]
pub struct MessageLayout {
    words: u64,
    places: Vec<MessageOffsets>,
    dispatch_bytes: u64,
    answer_bytes: u64,
    pub pieces: Pieces,
}

impl MessageLayout {
    /// `has_puts`: whether the memory also has outgoing messages.
    pub fn new(options: &Options, peers: u32, has_puts: bool) -> MessageLayout {
        let (tokens, topk) = (u64::from(options.shape.max_tokens), options.shape.num_topk);
        let (bf16, fp8) = ((options.shape.hidden * 2) as u32, options.shape.hidden as u32);
        let (scales, words) = (options.fp8_scales() as u32, options.most_words() as u32);
        let slot = |row, scales| u64::from(LowLatencySlot::new(row, scales, topk).bytes);
        let dispatch_bytes = u64::from(DISPATCH_HEADER) + tokens * slot(bf16, words).max(slot(fp8, scales));
        let answer = |row, scales| u64::from(answer_slot_bytes(row, scales));
        let answer_bytes = tokens * answer(options.combine_row_bytes() as u32, 0).max(answer(fp8, scales));
        let mut pieces = Pieces::default();
        let mut array = |name, count: u64, stride| pieces.array(name, count, stride).0;
        let (all, leaving) = (u64::from(peers), u64::from(if has_puts { peers } else { 0 }));
        let words = array("words", all, size_of::<LowLatencyWords>() as u64);
        let place = |_| MessageOffsets {
            dispatch_in: array("dispatch_in", all, dispatch_bytes),
            answer_in: array("answer_in", all, answer_bytes),
            dispatch_out: array("dispatch_out", leaving, dispatch_bytes),
            answer_out: array("answer_out", leaving, answer_bytes),
        };
        let places = (0..options.places).map(place).collect();
        MessageLayout { words, places, dispatch_bytes, answer_bytes, pieces }
    }

    fn words(&self, peer: u32) -> u64 {
        self.words + u64::from(peer) * size_of::<LowLatencyWords>() as u64
    }

    fn dispatch(&self, begin: u64, peer: u32) -> u64 {
        begin + u64::from(peer) * self.dispatch_bytes
    }

    fn answer(&self, begin: u64, peer: u32) -> u64 {
        begin + u64::from(peer) * self.answer_bytes
    }
}

/// The number of `peer` among those that write to the wire memory of `owner`: the ranks of other
/// nodes.
fn among_others(topology: Topology, owner: u32, peer: u32) -> u32 {
    let of_owner = topology.node(owner);
    if topology.node(peer) < of_owner { peer } else { peer - topology.ranks_per_node }
}

/// The tables of a buffer's messages, among them the received rows.
#[derive(Debug)]
pub struct Messages {
    tables: Arc<Memory>,
    /// Arguments of the kernels, by place.
    places: Vec<LowLatencyMessages>,
}

impl Messages {
    /// Opens the network to each rank of the other nodes, and lays out the tables. `layout`: that
    /// of this rank's pool, for the ranks of its node. Collective.
    pub fn new(
        core: &mut Core<Room>,
        group: &dyn ProcessGroup,
        options: &Options,
        layout: &MessageLayout,
    ) -> Result<Messages> {
        let (topology, rank) = (core.topology(), core.rank());
        let ranks = topology.ranks();
        let others: Vec<u32> =
            (0..ranks).filter(|&peer| topology.node(peer) != topology.node(rank)).collect();
        let wire = MessageLayout::new(options, others.len() as u32, true);
        // An operation has one message for each peer, and one queue keeps its words in order.
        let transport = options.transport.with_one_queue();
        let network = core.open_network(group, &transport, wire.pieces.bytes(), &others)?;
        let (ways, stream) = (network.ways(), core.stream());
        ways.iter().for_each(|way| way.memory.describe(wire.pieces.sections()));

        let (tables, (posted, places)) = laid_out(core.device(), "low-latency messages", |pieces| {
            message_tables(pieces, options, topology)
        })?;
        tables.write_at(stream, posted, &vec![0; ranks as usize * 8])?;
        for (index, place) in places.iter().enumerate() {
            let route = |peer: u32| {
                if topology.node(peer) == topology.node(rank) {
                    let (own, its) = (topology.index(rank), topology.index(peer));
                    let there = (DevicePtr(core.pool_addresses()[its as usize]), own);
                    return Ok(direct_route(layout, index, (core.pool().ptr(), its), there));
                }
                let no_way = || Error::internal("connect", format!("no way to rank {peer}"));
                let way = ways.iter().find(|way| way.peer == peer).ok_or_else(no_way)?;
                // The number of each in the other's memory.
                let (its, own) = (among_others(topology, rank, peer), among_others(topology, peer, rank));
                let here = (way.memory.ptr(), its);
                if let Some(memory) = &way.mapped {
                    let is_on_host = u64::from(way.is_on_host());
                    let route = direct_route(&wire, index, here, (memory.ptr(), own));
                    return Ok(LowLatencyRoute { is_on_host, ..route });
                }
                let posted = posted.add(u64::from(peer) * 8);
                let queue = network.queue(0, peer, posted).ok_or_else(no_way)?;
                Ok(queued_route(&wire, index, here, own, queue))
            };
            let routes = (0..ranks).map(route).collect::<Result<Vec<LowLatencyRoute>>>()?;
            tables.write_at(stream, place.routes, bytemuck::cast_slice(&routes))?;
            tables.write_at(stream, place.num_slots, &[0; MAX_MEMBERS * 4])?;
            tables.write_at(stream, place.copies, &[0; size_of::<LowLatencyCopies>()])?;
        }
        let messages = Messages { places, tables: Arc::new(tables) };
        messages.forget_unfinished(stream)?;
        Ok(messages)
    }

    /// Arguments of the kernels, by place.
    pub fn places(&self) -> &[LowLatencyMessages] {
        &self.places
    }

    /// The memory of the tables and the received rows.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.tables
    }

    /// Clears the records of an operation's written tokens and returned rows.
    pub fn forget_unfinished(&self, stream: &Stream) -> Result<()> {
        for messages in &self.places {
            self.tables.write_at(stream, messages.written, &[0; 8])?;
            self.tables.write_at(stream, messages.returned, &[0; MAX_MEMBERS * 8])?;
        }
        Ok(())
    }
}

/// A rank's own tables of messages: the word of puts posted to each rank, then for each place the
/// kernels' arguments and the received rows.
pub fn message_tables(
    pieces: &mut Pieces,
    options: &Options,
    topology: Topology,
) -> (DevicePtr, Vec<LowLatencyMessages>) {
    let (tokens, ranks) = (u64::from(options.shape.max_tokens), u64::from(topology.ranks()));
    let (rows, members) = (ranks * tokens, MAX_MEMBERS as u64);
    let head_bytes = u64::from(low_latency_head_bytes(options.shape.num_topk));
    let mut array = |name, count: u64, stride| pieces.array(name, count, stride);
    let posted = array("posted", ranks, 8);
    let place = |_| {
        let routes = array("routes", ranks, size_of::<LowLatencyRoute>() as u64);
        let num_slots = array("num_slots", members, 4);
        let slot_tokens = array("slot_tokens", rows, 4);
        let positions = array("positions", tokens, members * 4);
        let (written, returned) = (array("written", 1, 8), array("returned", members, 8));
        let copies = array("copies", 1, size_of::<LowLatencyCopies>() as u64);
        // Kernels find the heads right behind the copies.
        array("heads", rows, head_bytes);
        LowLatencyMessages {
            routes,
            recv_x: array("recv_x", rows, row_stride(options.shape.hidden * 2)),
            recv_scales: array("recv_scales", options.most_words(), rows * 4),
            num_slots,
            slot_tokens,
            positions,
            written,
            returned,
            copies,
        }
    };
    (posted, (0..options.places).map(place).collect())
}

/// The route to a peer whose memory is mapped: the addresses of both memories, and the other rank's
/// number in each.
fn direct_route(
    layout: &MessageLayout,
    place: usize,
    (own, its): (DevicePtr, u32),
    (peer, ours): (DevicePtr, u32),
) -> LowLatencyRoute {
    let at = layout.places[place];
    let message = |of: &dyn Fn(u32) -> u64| LowLatencyMessage {
        written: peer.add(of(ours)),
        arrives: own.add(of(its)),
        ..LowLatencyMessage::default()
    };
    LowLatencyRoute {
        words_in: own.add(layout.words(its)),
        words_out: peer.add(layout.words(ours)),
        dispatch: message(&|peer| layout.dispatch(at.dispatch_in, peer)),
        answer: message(&|peer| layout.answer(at.answer_in, peer)),
        ..LowLatencyRoute::default()
    }
}

/// The route to a peer by puts. `ours` is this rank's number in the peer's memory.
fn queued_route(
    layout: &MessageLayout,
    place: usize,
    (own, its): (DevicePtr, u32),
    ours: u32,
    queue: QueueHandle,
) -> LowLatencyRoute {
    let at = layout.places[place];
    let message = |from: u64, arrives: u64, to: u64| LowLatencyMessage {
        written: own.add(from),
        arrives: own.add(arrives),
        from,
        to,
    };
    let dispatch = |begin, peer| layout.dispatch(begin, peer);
    let answer = |begin, peer| layout.answer(begin, peer);
    LowLatencyRoute {
        words_in: own.add(layout.words(its)),
        words_out: DevicePtr::NULL,
        words_to: layout.words(ours),
        is_on_host: 1,
        dispatch: message(
            dispatch(at.dispatch_out, its),
            dispatch(at.dispatch_in, its),
            dispatch(at.dispatch_in, ours),
        ),
        answer: message(answer(at.answer_out, its), answer(at.answer_in, its), answer(at.answer_in, ours)),
        queue,
    }
}

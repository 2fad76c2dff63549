//! The side of a buffer towards other nodes: wire memory, the queues to its peers and the proxies that serve them.

use std::sync::Arc;
use std::time::Duration;

use epoxide_gpu::layout::{
    ControlWord, MAX_CHANNELS, MAX_NODES, NODE_PATH, NodePath, QUEUE_HANDLE, QueueHandle, Section, SlotShape,
    Wire, WireLayout, combine_slot_bytes, wire_message,
};

use super::options::{BufferOptions, BufferShape};
use super::topology::Topology;
use crate::driver::{Device, DevicePtr, Memory, MemoryKind, Stream};
use crate::error::{Error, Result, Scope};
use crate::group::ProcessGroup;
use crate::transport::{self, Proxies, Way};

/// Regions start at multiples of this many bytes.
const ALIGN: u64 = 128;
/// How long queues may go on with what was posted when the buffer goes.
pub(super) const GRACE: Duration = Duration::from_millis(200);

/// A buffer's side of the network.
#[derive(Debug)]
pub(super) struct WireSide {
    // The proxies go first: they use the rest.
    pub proxies: Proxies,
    /// How each other node is reached.
    pub ways: Vec<Way>,
    _own: Arc<Memory>,
    tables: Memory,
    /// Where in `tables` the addresses of all nodes' wire memory are, u64 `[num_nodes]`; 0 for nodes that are not mapped.
    bases_at: u64,
}

impl WireSide {
    /// Allocates wire memory, finds a way to the rank with this one's index on every other node, and starts the proxies. Gives
    /// with it what kernels are told of the other nodes. Collective.
    pub fn new(
        device: &Arc<dyn Device>,
        group: &dyn ProcessGroup,
        stream: &Stream,
        topology: Topology,
        options: &BufferOptions,
        layout: WireLayout,
    ) -> Result<(WireSide, Wire)> {
        let node = topology.node(group.rank());
        let peers: Vec<u32> = topology.rail(group.rank()).collect();
        let (ways, links) =
            transport::open(&options.transport, device, group, layout.bytes, &peers, group.timeout())?;
        let proxies = Proxies::start(device, links)?;

        let queues = options.transport.queues_per_peer;
        let entries = (queues * topology.ranks()) as usize;
        let table_bytes = (entries * size_of::<QueueHandle>()) as u64;
        let paths_at = table_bytes + entries as u64 * 8;
        let bases_at = paths_at + topology.nodes as u64 * size_of::<NodePath>() as u64;
        let bytes = bases_at + topology.nodes as u64 * 8;
        let tables = Memory::alloc(device, bytes, MemoryKind::Device, "queue table")?;
        let mut table = vec![QueueHandle::default(); entries];
        for queue in 0..queues {
            for peer in 0..topology.ranks() {
                // Ranks that this one does not talk to, itself included, keep their placeholder.
                if let Some(handle) = proxies.handle(queue, peer) {
                    let at = queue * topology.ranks() + peer;
                    let posted = tables.ptr().add(table_bytes + at as u64 * 8);
                    table[at as usize] = QueueHandle { queue: handle, posted };
                }
            }
        }
        tables.write(stream, 0, bytemuck::cast_slice(&table))?;
        tables.write(stream, table_bytes, &vec![0; entries * 8])?;
        let mut paths = vec![NodePath::default(); topology.nodes as usize];
        for way in &ways {
            let peer = way.mapped.as_ref().map_or(DevicePtr::NULL, |memory| memory.ptr());
            paths[topology.node(way.peer) as usize] = NodePath { memory: way.memory.ptr(), peer };
        }
        // Rows for the own node are written where they are read, in this rank's device memory.
        let on_device = ways.iter().map(|way| &way.memory).find(|memory| memory.host_ptr().is_null());
        let own = match on_device {
            Some(memory) => memory.clone(),
            None => Arc::new(Memory::alloc(device, layout.bytes, MemoryKind::Shareable, "own wire memory")?),
        };
        paths[node as usize] = NodePath { memory: own.ptr(), peer: own.ptr() };
        tables.write(stream, paths_at, bytemuck::cast_slice(&paths))?;
        let bases: Vec<u64> = paths.iter().map(|path| path.peer.0).collect();
        tables.write(stream, bases_at, bytemuck::cast_slice(&bases))?;
        let (entries, nodes) = (entries as u64, topology.nodes as u64);
        tables.describe(&[
            Section::array("queues", entries, size_of::<QueueHandle>() as u64).of(QUEUE_HANDLE),
            Section::array("posted", entries, 8).at(table_bytes),
            Section::array("paths", nodes, size_of::<NodePath>() as u64).of(NODE_PATH).at(paths_at),
            Section::array("bases", nodes, 8).at(bases_at),
        ]);
        let sections = layout.sections();
        ways.iter().map(|way| &way.memory).chain([&own]).for_each(|memory| memory.describe(&sections));
        let wire = Wire {
            paths: tables.ptr().add(paths_at),
            queues: tables.ptr(),
            node,
            num_nodes: topology.nodes,
            num_queues: queues,
            chunk: options.config.num_max_rdma_chunked_send_tokens,
            layout,
        };
        Ok((WireSide { proxies, ways, _own: own, tables, bases_at }, wire))
    }

    /// Device table of all nodes' wire memory, u64 `[num_nodes]`, where all of it is mapped.
    pub fn mapped(&self) -> Option<DevicePtr> {
        let all = self.ways.iter().all(|way| way.mapped.is_some());
        all.then(|| self.tables.ptr().add(self.bases_at))
    }

    /// The first failure of a queue or of the receiving side.
    pub fn failure(&self) -> Option<Error> {
        self.proxies.failure()
    }

    /// Lets the queues finish, says goodbye and ends all threads.
    pub fn close(&mut self) {
        self.proxies.close(GRACE);
    }
}

/// The layout of wire memory with the slots that `shape` asks for, or with as many as fit in `limit` bytes.
pub(super) fn wire_layout(shape: &BufferShape, topology: Topology, limit: Option<u64>) -> Result<WireLayout> {
    let (nodes, topk) = (topology.nodes as u64, shape.max_topk);
    let row_bytes = u32::try_from(shape.max_row_bytes).map_err(|_| {
        Error::argument("hidden", format!("{} bytes per row", shape.max_row_bytes), "must fit in 32 bits")
    })?;
    let dispatch = SlotShape::new(row_bytes, shape.max_scales, Some(topk)).bytes;
    let slot_bytes = dispatch.max(combine_slot_bytes(row_bytes, topk)) as u64;
    let lay_out = |slots: u64| {
        let mut at = 0;
        let mut place = |bytes: u64| {
            let offset = at;
            at = (at + bytes).next_multiple_of(ALIGN);
            offset
        };
        let words = MAX_NODES as u64 * size_of::<ControlWord>() as u64;
        let message_bytes = (wire_message::WORDS as u64 * 4).next_multiple_of(ALIGN);
        let node_bytes = (slots * slot_bytes).next_multiple_of(ALIGN);
        let mut layout = WireLayout {
            ready: place(words),
            counts: place(words),
            arrived: place(MAX_NODES as u64 * MAX_CHANNELS as u64 * 8),
            messages_out: place(nodes * message_bytes),
            messages_in: place(nodes * message_bytes),
            message_bytes,
            slots_out: place(nodes * node_bytes),
            slots_in: place(nodes * node_bytes),
            node_bytes,
            slots,
            bytes: 0,
        };
        layout.bytes = place(0);
        layout
    };
    let wanted = shape.max_tokens_per_rank as u64;
    let Some(limit) = limit else { return Ok(lay_out(wanted)) };
    let least = lay_out(1).bytes;
    if limit < least {
        return Err(Error::Capacity {
            what: "num_rdma_bytes",
            needed: least,
            have: limit,
            unit: "bytes",
            remedy: "give at least room for one row, or leave num_rdma_bytes out".into(),
            scope: Scope::ThisRank,
        });
    }
    // Each node's slots may lose up to an alignment, in both directions.
    let room = (limit - lay_out(0).bytes).saturating_sub(2 * nodes * ALIGN);
    Ok(lay_out((room / (2 * nodes * slot_bytes)).clamp(1, wanted.max(1))))
}

/// The bytes that wire memory must have for `slots` tokens of a rank for one node.
pub(super) fn wire_bytes(shape: &BufferShape, topology: Topology, slots: u64) -> u64 {
    let shape = BufferShape { max_tokens_per_rank: slots.min(u32::MAX as u64) as u32, ..*shape };
    wire_layout(&shape, topology, None).map_or(0, |layout| layout.bytes + 2 * topology.nodes as u64 * ALIGN)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: BufferShape =
        BufferShape { max_tokens_per_rank: 4096, max_row_bytes: 14336, max_topk: 8, max_scales: 0 };
    const TOPOLOGY: Topology = Topology { nodes: 2, ranks_per_node: 8 };

    #[test]
    fn the_benchmark_shape() {
        let layout = wire_layout(&SHAPE, TOPOLOGY, None).unwrap();
        // 14336 bytes of row, 48 of heads and token, 64 of top-k: 14448, which is 16 less than a multiple of 128.
        assert_eq!(layout.node_bytes, 4096 * (14336 + 48 + 64 + 16));
        assert_eq!(layout.bytes, layout.slots_in + 2 * layout.node_bytes);
        let name = |at| Section::name_of(&layout.sections(), at).unwrap();
        assert_eq!(name(layout.counts - 128), "ready[31]");
        assert_eq!(name(layout.slots_out - layout.message_bytes), "messages_in[1].signature[0]");
        assert_eq!(name(layout.bytes - 16), format!("slots_in[1] + {:#x}", layout.node_bytes - 16));
    }

    #[test]
    fn a_limit_is_kept_and_used() {
        for limit in [310_000u64, 1_000_000, 84_000_000] {
            let layout = wire_layout(&SHAPE, TOPOLOGY, Some(limit)).unwrap();
            assert!(layout.bytes <= limit, "{} of {limit}", layout.bytes);
            assert!(wire_bytes(&SHAPE, TOPOLOGY, layout.slots + 1) > limit - 4 * ALIGN);
        }
        assert!(wire_layout(&SHAPE, TOPOLOGY, Some(1000)).is_err());
    }
}

//! Wire memory, and the tables by which kernels find the ways to other nodes.

use std::sync::Arc;

use epoxide_gpu::layout::{
    ControlWord, MAX_CHANNELS, MAX_NODES, NODE_PATH, NodePath, QUEUE_HANDLE, QueueHandle, Section, SlotShape,
    Wire, WireLayout, combine_slot_bytes, wire_message,
};

use super::options::{Fields, Shape};
use super::place::Room;
use crate::driver::{DevicePtr, Memory, MemoryKind};
use crate::ep::Topology;
use crate::ep::core::{Core, Offsets, laid_out};
use crate::error::{Error, Result, Scope};
use crate::group::ProcessGroup;

/// Regions start at multiples of this many bytes.
const ALIGN: u64 = 128;

/// The tables of a buffer's ways to other nodes.
#[derive(Debug)]
pub struct WireTables {
    _own: Arc<Memory>,
    _tables: Memory,
    /// Device table of all nodes' wire memory, u64 `[num_nodes]`, where all of it is mapped device
    /// memory.
    pub mapped: Option<DevicePtr>,
    pub wire: Wire,
}

impl WireTables {
    /// Opens the network to the rank with this one's index on every other node, and writes the
    /// tables. Collective.
    pub fn new(
        core: &mut Core<Room>,
        group: &dyn ProcessGroup,
        options: &Fields,
        layout: WireLayout,
    ) -> Result<WireTables> {
        let (topology, device) = (core.topology(), core.device().clone());
        let node = topology.node(group.rank());
        let peers: Vec<u32> = topology.rail(group.rank()).collect();
        let network = core.open_network(group, &options.transport, layout.bytes, &peers)?;
        let (ways, stream) = (network.ways(), core.stream());

        let queues = options.transport.queues_per_peer;
        let entries = (queues * topology.ranks()) as usize;
        let nodes = topology.nodes as u64;
        let (tables, [queues_at, posted_at, paths_at, bases_at]) =
            laid_out(&device, "queue table", |pieces| {
                [
                    Section::array("queues", entries as u64, size_of::<QueueHandle>() as u64)
                        .of(QUEUE_HANDLE),
                    Section::array("posted", entries as u64, 8),
                    Section::array("paths", nodes, size_of::<NodePath>() as u64).of(NODE_PATH),
                    Section::array("bases", nodes, 8),
                ]
                .map(|piece| pieces.push(piece))
            })?;
        let mut table = vec![QueueHandle::default(); entries];
        for queue in 0..queues {
            for peer in 0..topology.ranks() {
                // Ranks without a route, this rank included, keep their placeholder.
                let at = queue * topology.ranks() + peer;
                let posted = posted_at.add(at as u64 * 8);
                if let Some(handle) = network.queue(queue, peer, posted) {
                    table[at as usize] = handle;
                }
            }
        }
        tables.write_at(stream, queues_at, bytemuck::cast_slice(&table))?;
        tables.write_at(stream, posted_at, &vec![0; entries * 8])?;
        let mut paths = vec![NodePath::default(); topology.nodes as usize];
        for way in ways {
            let peer = way.mapped.as_ref().map_or(DevicePtr::NULL, |memory| memory.ptr());
            let peer_on_host = u64::from(way.mapped.is_some() && way.is_on_host());
            paths[topology.node(way.peer) as usize] =
                NodePath { memory: way.memory.ptr(), peer, peer_on_host };
        }
        // Rows for the own node are written where they are read, in this rank's device memory.
        let own = match ways.iter().find(|way| !way.is_on_host()) {
            Some(way) => way.memory.clone(),
            None => Arc::new(Memory::alloc(&device, layout.bytes, MemoryKind::Shareable, "own wire memory")?),
        };
        paths[node as usize] = NodePath { memory: own.ptr(), peer: own.ptr(), peer_on_host: 0 };
        tables.write_at(stream, paths_at, bytemuck::cast_slice(&paths))?;
        let bases: Vec<u64> = paths.iter().map(|path| path.peer.0).collect();
        tables.write_at(stream, bases_at, bytemuck::cast_slice(&bases))?;
        let sections = layout.sections();
        ways.iter().map(|way| &way.memory).chain([&own]).for_each(|memory| memory.describe(&sections));
        let wire = Wire {
            paths: paths_at,
            queues: queues_at,
            node,
            num_nodes: topology.nodes,
            num_queues: queues,
            chunk: options.config.num_max_rdma_chunked_send_tokens,
            layout,
        };
        let all_mapped = ways.iter().all(|way| way.mapped.is_some() && !way.is_on_host());
        Ok(WireTables { _own: own, _tables: tables, mapped: all_mapped.then_some(bases_at), wire })
    }
}

/// The layout of wire memory with the slots that `shape` requires, or with as many as fit in
/// `limit` bytes. Slots with rows `by_expert` are longer.
pub fn wire_layout(
    shape: &Shape,
    topology: Topology,
    by_expert: bool,
    limit: Option<u64>,
) -> Result<WireLayout> {
    let (nodes, topk) = (topology.nodes as u64, shape.max_topk);
    let row_bytes = u32::try_from(shape.max_row_bytes()).map_err(|_| {
        Error::argument("hidden", format!("{} bytes per row", shape.max_row_bytes()), "must fit in 32 bits")
    })?;
    let slot = if by_expert { SlotShape::by_expert } else { SlotShape::new };
    let dispatch = slot(row_bytes, shape.max_scales, Some(topk)).bytes;
    let slot_bytes = dispatch.max(combine_slot_bytes(row_bytes, topk)) as u64;
    let lay_out = |slots: u64| {
        let mut offsets = Offsets::default();
        let mut reserve = |bytes| offsets.take(bytes);
        let words = MAX_NODES as u64 * size_of::<ControlWord>() as u64;
        let message_bytes = (wire_message::WORDS as u64 * 4).next_multiple_of(ALIGN);
        let node_bytes = (slots * slot_bytes).next_multiple_of(ALIGN);
        let mut layout = WireLayout {
            ready: reserve(words),
            counts: reserve(words),
            arrived: reserve(MAX_NODES as u64 * MAX_CHANNELS as u64 * 8),
            messages_out: reserve(nodes * message_bytes),
            messages_in: reserve(nodes * message_bytes),
            message_bytes,
            slots_out: reserve(nodes * node_bytes),
            slots_in: reserve(nodes * node_bytes),
            node_bytes,
            slots,
            bytes: 0,
        };
        layout.bytes = reserve(0);
        layout
    };
    let wanted = shape.max_tokens as u64;
    let Some(limit) = limit else { return Ok(lay_out(wanted)) };
    let least = lay_out(1).bytes;
    if limit < least {
        let remedy = "give at least room for one row, or leave num_rdma_bytes out";
        return Err(Error::capacity(("num_rdma_bytes", "bytes"), least, limit, remedy, Scope::ThisRank));
    }
    // Each node's slots may lose up to an alignment, in both directions.
    let room = (limit - lay_out(0).bytes).saturating_sub(2 * nodes * ALIGN);
    Ok(lay_out((room / (2 * nodes * slot_bytes)).clamp(1, wanted.max(1))))
}

/// The bytes that wire memory must have for `slots` tokens of a rank for one node.
pub fn wire_bytes(shape: &Shape, topology: Topology, by_expert: bool, slots: u64) -> u64 {
    let shape = Shape { max_tokens: slots.min(u32::MAX as u64) as u32, ..*shape };
    wire_layout(&shape, topology, by_expert, None)
        .map_or(0, |layout| layout.bytes + 2 * topology.nodes as u64 * ALIGN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ep::DType;

    const SHAPE: Shape =
        Shape { max_tokens: 4096, hidden: 7168, dtype: DType::Bf16, max_topk: 8, max_scales: 0 };
    const TOPOLOGY: Topology = Topology { nodes: 2, ranks_per_node: 8 };

    #[test]
    fn the_benchmark_shape() {
        let layout = wire_layout(&SHAPE, TOPOLOGY, false, None).unwrap();
        // 14336 bytes of row, 48 of heads and token, 64 of top-k: 14448, which is 16 less than a
        // multiple of 128.
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
            let layout = wire_layout(&SHAPE, TOPOLOGY, false, Some(limit)).unwrap();
            assert!(layout.bytes <= limit, "{} of {limit}", layout.bytes);
            assert!(wire_bytes(&SHAPE, TOPOLOGY, false, layout.slots + 1) > limit - 4 * ALIGN);
        }
        for by_expert in [false, true] {
            let enough = wire_bytes(&SHAPE, TOPOLOGY, by_expert, 100);
            assert!(wire_layout(&SHAPE, TOPOLOGY, by_expert, Some(enough)).unwrap().slots >= 100);
        }
        assert!(wire_layout(&SHAPE, TOPOLOGY, false, Some(1000)).is_err());
    }
}

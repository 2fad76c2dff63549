//! The layout of a low-latency pool, and of a rank's private memory.

use bytemuck::Zeroable;
use epoxide_gpu::layout::{
    ControlWord, DevicePtr, FEW_RANKS, LOCAL_STATE, LocalState, LowLatencyExpertRows, LowLatencyPlace,
    LowLatencyTables, LowLatencyTurns, MAX_MEMBERS, MAX_RANKS, PIECE_PACKET_BYTES, SCALE_PACKET_BYTES,
    Section, call_offset, gave_up_offset, has_scale_packets, pieces_of, room_for_ranks, row_stride,
    scale_packets,
};

use super::options::Options;
use crate::ep::Topology;
use crate::ep::core::Pieces;

/// The parts of the control words of a pool with room for so many ranks.
const fn control(room: u32) -> [Section; 3] {
    let ranks = room as u64;
    [
        Section::array("ready", ranks, size_of::<ControlWord>() as u64),
        Section::array("calls", ranks, 16).at(call_offset(room, 0, 0)),
        Section::array("gave_up", ranks, 8).at(gave_up_offset(room, 0)),
    ]
}

/// A pool: the places in it, and its parts by name.
#[derive(Debug)]
pub struct PoolLayout {
    pub places: Vec<LowLatencyPlace>,
    pub pieces: Pieces,
}

impl PoolLayout {
    pub fn new(options: &Options, num_ranks: u32) -> PoolLayout {
        const FEW: &[Section] = &control(FEW_RANKS as u32);
        const MANY: &[Section] = &control(MAX_RANKS as u32);
        let room = room_for_ranks(num_ranks);
        let parts = if room == FEW_RANKS as u32 { FEW } else { MANY };
        let mut pool = Pieces::default();
        pool.push(Section::one("control", gave_up_offset(room, room)).of(parts));
        let (tokens, topk) = (u64::from(options.shape.max_tokens), u64::from(options.shape.num_topk));
        let (rows, chunks) = (u64::from(num_ranks) * tokens, options.chunks());
        let (stride, returned) = (row_stride(options.shape.hidden * 2), options.combine_row_bytes());
        let few = u64::from(num_ranks) * u64::from(options.most_in_packets(num_ranks));
        let pieces = u64::from(pieces_of(returned as u32) * PIECE_PACKET_BYTES);
        let of_scales = u64::from(scale_packets(options.most_words() as u32) * SCALE_PACKET_BYTES);
        let packs_scales = has_scale_packets(options.shape.max_tokens, num_ranks);
        let room = u64::from(room);
        let mut array = |name, count, stride| pool.array(name, count, stride).0;
        let mut place = || LowLatencyPlace {
            arrived: array("arrived", room, chunks * 8),
            returned: array("returned", room, chunks * 8),
            ids: array("ids", room * tokens, topk.div_ceil(2) * 8),
            weights: array("weights", room * tokens, topk * 8),
            recv_x: array("recv_x", rows, stride),
            recv_scales: array("recv_scales", options.most_words(), rows * 4),
            scale_packets: array("scale_packets", if packs_scales { rows } else { 0 }, of_scales),
            returned_x: array("returned_x", rows, row_stride(returned)),
            returned_packets: array("returned_packets", few, pieces),
            returned_scales: array("returned_scales", few, options.fp8_scales() * 8),
        };
        PoolLayout { places: (0..options.places).map(|_| place()).collect(), pieces: pool }
    }
}

/// The number of ranks that kernels expect.
pub fn most_ranks(topology: Topology) -> u64 {
    if topology.nodes == 1 { room_for_ranks(topology.ranks()).into() } else { MAX_MEMBERS as u64 }
}

/// A rank's private memory, behind the [`LocalState`] at its start.
#[derive(Debug)]
pub struct OwnTables {
    pub places: Vec<PlaceTables>,
    /// Weights of rows that have none, f32 `[num_ranks * max_tokens, num_topk]`.
    pub unit_weights: DevicePtr,
    /// The address of each rank's pool, u64 `[num_ranks]`, within a node.
    pub pools: DevicePtr,
}

/// A place's parts of a rank's private memory.
#[derive(Debug, Clone, Copy)]
pub struct PlaceTables {
    /// The kernels' arguments.
    pub tables: LowLatencyTables,
    /// Tables of rows by expert, if there is room for such rows.
    pub by_expert: Option<LowLatencyExpertRows>,
    /// Sums.
    pub combined_x: DevicePtr,
}

/// Lays out a rank's private memory: the [`LocalState`] first, then the parts of each place.
pub fn tables(pieces: &mut Pieces, options: &Options, topology: Topology) -> OwnTables {
    pieces.push(Section::one("local", size_of::<LocalState>() as u64).of(LOCAL_STATE));
    let (tokens, topk) = (u64::from(options.shape.max_tokens), u64::from(options.shape.num_topk));
    let (ranks, chunks) = (u64::from(topology.ranks()), options.chunks());
    let members = most_ranks(topology);
    let bytes_of_set = if members > MAX_MEMBERS as u64 { 8 } else { 4 };
    let (rows, experts) = (ranks * tokens, u64::from(options.shape.num_experts) / ranks);
    let mut array = |name, count, stride| pieces.array(name, count, stride);
    let place = |_| {
        let tables = LowLatencyTables {
            num_tokens: array("num_tokens", members, 4),
            token_ranks: array("token_ranks", tokens, bytes_of_set),
            expert_counts: array("expert_counts", experts, 4),
            expert_rows: array("expert_rows", experts, rows * 4),
            src_info: array("src_info", experts, rows * 4),
            layout_range: array("layout_range", experts, ranks * 8),
            slots: array("slots", rows, topk * 4),
            weights: array("row_weights", rows, topk * 4),
            sent: array("sent", chunks, 8),
            answered: array("answered", members, chunks * 8),
            turns: array("turns", 1, size_of::<LowLatencyTurns>() as u64),
        };
        let by_expert = options.rows_by_expert.map(|room| LowLatencyExpertRows {
            expert_counts: array("counts_by_expert", experts, 4),
            expert_starts: array("expert_starts", experts + 1, 4),
            psum_expert: array("psum_expert", experts + 1, 4),
            slots: array("slots_by_expert", rows, topk * 4),
            src_idx: array("recv_src_idx", room, 4),
            src_entry: array("recv_src_entry", room, 8),
            weights: array("recv_topk_weights", room, 4),
            rows: room as u32,
            ..Zeroable::zeroed()
        });
        let combined_x = array("combined_x", tokens, options.combine_row_bytes());
        PlaceTables { tables, by_expert, combined_x }
    };
    let places = (0..options.places).map(place).collect();
    OwnTables { places, unit_weights: array("unit_weights", rows, topk * 4), pools: array("pools", ranks, 8) }
}

#[cfg(test)]
mod tests {
    use epoxide_gpu::layout::ROW_ALIGN;

    use super::super::options::Shape;
    use super::*;

    #[test]
    fn nothing_overlaps_and_everything_has_a_name() {
        let options = Options::new(Shape { max_tokens: 5, hidden: 24, num_topk: 3, num_experts: 12 })
            .places(2)
            .chunk_tokens(2)
            .rows_by_expert(40);
        let (pool, mut own) = (PoolLayout::new(&options, 3), Pieces::default());
        tables(&mut own, &options, Topology::new(3, None).unwrap());
        for pieces in [&pool.pieces, &own] {
            let (sections, bytes) = (pieces.sections(), pieces.bytes());
            for pair in sections.windows(2) {
                assert!(pair[0].offset + pair[0].bytes <= pair[1].offset, "{pair:?}");
                assert_eq!(pair[1].offset % ROW_ALIGN, 0);
            }
            let last = sections[sections.len() - 1];
            assert!(last.offset + last.bytes <= bytes);
        }
        let [first, second] = pool.places[..] else { panic!("{:?}", pool.places) };
        assert!(first.returned_scales < second.arrived);
        let name = |at| Section::name_of(pool.pieces.sections(), at).unwrap();
        assert_eq!(name(second.recv_x + 7 * 128 + 4), "recv_x[7] + 0x4");
        assert_eq!(name(first.arrived + 3 * 8 + 8), "arrived[1] + 0x8");
    }
}

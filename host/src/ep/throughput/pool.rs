//! Sizes and places in the pool, the one allocation per rank that its peers map.

use epoxide_gpu::layout::{
    CLAIMS_SHIFT, Control, FEW_RANKS, MAX_CHANNELS, MAX_TOPK, PoolLayout, ROW_ALIGN, SEND_LIST_STRIDE,
    SEND_ROW_STRIDE, copies_offset, internode_copies_offset, message_offset, relay_message, row_stride,
};

use super::dispatch::ROWS;
use super::options::Shape;
use crate::ep::Topology;
use crate::ep::core::{Offsets, check_count};
use crate::ep::tensor::check_rows_of_16;
use crate::error::{Error, Result, Scope};

/// Bytes of the count messages in a pool: one from each rank. With rows `by_expert` the records of
/// copies follow them, across nodes behind as many messages of first rows.
fn message_bytes(shape: &Shape, topology: Topology, by_expert: bool) -> u64 {
    match topology.nodes {
        1 if by_expert => {
            let records = u64::from(topology.ranks()) * (u64::from(shape.max_tokens) + 1);
            copies_offset(topology.ranks()) + records * u64::from(shape.max_topk) * 8
        }
        1 => message_offset(topology.ranks(), 0),
        _ if !by_expert => u64::from(topology.ranks()) * u64::from(relay_message::WORDS) * 8,
        nodes => {
            let records = u64::from(topology.ranks()) * most_copy_records(shape.max_tokens);
            internode_copies_offset(nodes, topology.ranks_per_node) + records * u64::from(shape.max_topk) * 8
        }
    }
}

/// Records of copies that a source has across nodes, with any number of channels: each of these has
/// one more than tokens, rounded up.
fn most_copy_records(max_tokens: u32) -> u64 {
    u64::from(max_tokens) + 2 * u64::from(MAX_CHANNELS)
}

/// Bytes of a row's source, which only matters across nodes.
fn meta_bytes(topology: Topology) -> u64 {
    if topology.nodes == 1 { 0 } else { 8 }
}

/// Bytes at the start of every pool: control words and count messages.
fn fixed_bytes(shape: &Shape, topology: Topology, by_expert: bool) -> u64 {
    (size_of::<Control>() as u64 + message_bytes(shape, topology, by_expert)).next_multiple_of(ROW_ALIGN)
}

/// Bytes of one row in all regions of a place together, without alignment.
fn bytes_per_row(shape: &Shape, topology: Topology) -> u64 {
    let (topk, scales) = (shape.max_topk as u64, shape.max_scales as u64);
    2 * row_stride(shape.max_row_bytes()) + scales * 4 + topk * (8 + 4 + 4) + 4 + meta_bytes(topology)
}

/// Most scales of a row: all sizes that follow from them fit in their types.
const MOST_SCALES: u32 = u16::MAX as u32;

/// Most tokens that one of `ranks` ranks can send in a dispatch. Token times rank count and row
/// stride stay inside 31 bits in the kernels, and tokens that are claimed inside those of a claim.
pub fn most_tokens(ranks: u32) -> u64 {
    let entries = if ranks <= FEW_RANKS as u32 { SEND_ROW_STRIDE } else { ranks.max(SEND_LIST_STRIDE) };
    ((1 << 30) / u64::from(entries)).min((1 << (CLAIMS_SHIFT - 1)) - 1)
}

/// Regions of a place that each may lose up to one alignment.
const REGIONS: u64 = 9;

/// The bytes of a pool whose places each have room for `rows` rows.
pub fn pool_bytes(shape: &Shape, topology: Topology, places: u32, by_expert: bool, rows: u64) -> u64 {
    let of_place = rows * bytes_per_row(shape, topology) + REGIONS * ROW_ALIGN;
    fixed_bytes(shape, topology, by_expert) + u64::from(places) * of_place
}

/// The layouts of a pool, one per place, at least one; they differ in the offset of the rows. Each
/// place has the rows that `shape` requires, or `by_expert` if more. With `limit`, it has as many
/// as fit in that many bytes.
pub fn pool_layouts(
    shape: &Shape,
    topology: Topology,
    places: u32,
    by_expert: Option<u64>,
    limit: Option<u64>,
) -> Result<Vec<PoolLayout>> {
    check_count(places)?;
    let most = most_tokens(topology.ranks());
    if u64::from(shape.max_tokens) > most {
        return Err(Error::argument("max_tokens", shape.max_tokens, format!("must be at most {most}")));
    }
    if !ROWS.contains(&shape.dtype) {
        let rule = "no dispatch sends rows of i64 or bool: use u8";
        return Err(Error::argument("dtype", shape.dtype, rule));
    }
    check_rows_of_16(shape.hidden, shape.dtype, "")?;
    if shape.max_scales > MOST_SCALES {
        return Err(Error::argument(
            "max_scales",
            shape.max_scales,
            format!("must be at most {MOST_SCALES}"),
        ));
    }
    if shape.max_topk == 0 || shape.max_topk > MAX_TOPK {
        return Err(Error::argument("max_topk", shape.max_topk, format!("must be 1 to {MAX_TOPK}")));
    }
    let wanted = shape.max_tokens as u64 * topology.ranks() as u64;
    let wanted = wanted.max(by_expert.unwrap_or(0));
    let rows = match limit {
        None => wanted,
        Some(limit) => {
            let least = pool_bytes(shape, topology, places, by_expert.is_some(), 1);
            if limit < least {
                let remedy = "give at least room for one row, or leave num_nvl_bytes out";
                return Err(Error::capacity(
                    ("num_nvl_bytes", "bytes"),
                    least,
                    limit,
                    remedy,
                    Scope::ThisRank,
                ));
            }
            let room = limit - pool_bytes(shape, topology, places, by_expert.is_some(), 0);
            (room / (u64::from(places) * bytes_per_row(shape, topology))).min(i32::MAX as u64)
        }
    };
    if let Some(given) = by_expert.filter(|&given| given > i32::MAX as u64) {
        let rule = format!("must be at most {}: rows are counted in 31 bits", i32::MAX);
        return Err(Error::argument("rows_by_expert", given, rule));
    }
    if rows > i32::MAX as u64 {
        return Err(Error::argument(
            "max_tokens",
            shape.max_tokens,
            format!("{wanted} rows for {} ranks do not fit in 31 bits", topology.ranks()),
        ));
    }

    let mut offsets = Offsets::default();
    offsets.take(size_of::<Control>() as u64);
    let mut reserve = |bytes| offsets.take(bytes);
    let (topk, stride) = (shape.max_topk as u64, row_stride(shape.max_row_bytes()));
    let messages = reserve(message_bytes(shape, topology, by_expert.is_some()));
    let mut of_place = || PoolLayout {
        messages,
        recv_x: reserve(rows * stride),
        recv_scales: reserve(rows * shape.max_scales as u64 * 4),
        recv_topk_idx: reserve(rows * topk * 8),
        recv_topk_weights: reserve(rows * topk * 4),
        recv_src_idx: reserve(rows * 4),
        recv_src_meta: reserve(rows * meta_bytes(topology)),
        combine_x: reserve(rows * stride),
        combine_weights: reserve(rows * topk * 4),
        rows,
        bytes: 0,
    };
    let mut layouts: Vec<PoolLayout> = (0..places).map(|_| of_place()).collect();
    let bytes = reserve(0);
    layouts.iter_mut().for_each(|layout| layout.bytes = bytes);
    Ok(layouts)
}

#[cfg(test)]
mod tests {
    use epoxide_gpu::layout::{Section, copy_records_of_channel, expert_message, expert_message_offset};

    use super::super::{RowBytes, sections};
    use super::*;
    use crate::ep::DType;

    const SHAPE: Shape =
        Shape { max_tokens: 4096, hidden: 7168, dtype: DType::Bf16, max_topk: 8, max_scales: 56 };

    fn one_node(ranks: u32) -> Topology {
        Topology { nodes: 1, ranks_per_node: ranks }
    }

    #[test]
    fn across_nodes_every_rank_has_a_message_and_rows_a_source() {
        let topology = Topology { nodes: 2, ranks_per_node: 8 };
        let layout = pool_layouts(&SHAPE, topology, 1, None, None).unwrap()[0];
        assert_eq!(layout.rows, 65536);
        assert!(layout.recv_x - layout.messages >= 16 * relay_message::WORDS as u64 * 8);
        let by_expert = pool_layouts(&SHAPE, topology, 1, Some(1), None).unwrap()[0];
        let last = expert_message_offset(2, 8, 1, 7, expert_message::WORDS - 1);
        assert!(by_expert.recv_x - by_expert.messages >= last + 8);
        let lengths = RowBytes { recv: 14336, combine: 14336 };
        let name = |layout, at| Section::name_of(&sections(&[layout], topology, lengths), at);
        let last = name(by_expert, by_expert.messages + last);
        assert_eq!(last.as_deref(), Some("expert_messages[15].rows"));
        let copies = by_expert.messages + internode_copies_offset(2, 8);
        assert_eq!(name(by_expert, copies).as_deref(), Some("copies[0]"));
        for channels in [1, 2, 12, 255, MAX_CHANNELS] {
            let of_source = u64::from(channels * copy_records_of_channel(SHAPE.max_tokens, channels));
            assert!(of_source <= most_copy_records(SHAPE.max_tokens));
            assert!(copies + 16 * of_source * 64 <= by_expert.recv_x);
        }
        let last = layout.messages + expert_message_offset(2, 8, 0, 0, 0) - 8;
        assert_eq!(name(layout, last), name(by_expert, last));
        assert_eq!(name(layout, layout.recv_x).as_deref(), Some("recv_x[0]"));
        assert!(layout.combine_x - layout.recv_src_meta >= 65536 * 8);
        assert!(layout.bytes <= pool_bytes(&SHAPE, topology, 1, false, layout.rows));
    }

    #[test]
    fn the_benchmark_shape_fits_in_its_budget() {
        let layout = pool_layouts(&SHAPE, one_node(8), 1, None, None).unwrap()[0];
        assert_eq!(layout.rows, 32768);
        assert!(layout.bytes < 1_300_000_000, "{} bytes", layout.bytes);
    }

    #[test]
    fn a_limit_is_kept_and_used() {
        for (limit, places) in [(400_000u64, 1), (1_000_000, 1), (335_712_000, 1), (335_712_000, 3)] {
            let layout = pool_layouts(&SHAPE, one_node(8), places, None, Some(limit)).unwrap()[0];
            assert!(layout.bytes <= limit, "{} of {limit}", layout.bytes);
            assert!(pool_bytes(&SHAPE, one_node(8), places, false, layout.rows + 1) > limit);
        }
    }

    #[test]
    fn rows_by_expert_have_room() {
        let rows = |rows| pool_layouts(&SHAPE, one_node(2), 1, Some(rows), None).unwrap()[0].rows;
        assert_eq!([rows(8191), rows(8192), rows(100_000)], [8192, 8192, 100_000]);
        let error = pool_layouts(&SHAPE, one_node(2), 1, Some(1 << 31), None).unwrap_err().to_string();
        assert!(error.contains("rows_by_expert = 2147483648") && error.contains("31 bits"), "{error}");
    }

    #[test]
    fn places_differ_in_their_rows_alone() {
        let layouts = pool_layouts(&SHAPE, one_node(2), 3, None, None).unwrap();
        for pair in layouts.windows(2) {
            assert_eq!(
                (pair[0].messages, pair[0].rows, pair[0].bytes),
                (pair[1].messages, pair[1].rows, pair[1].bytes)
            );
            assert!(pair[0].combine_weights + pair[0].rows * 32 <= pair[1].recv_x);
        }
        assert!(layouts[2].combine_weights + layouts[2].rows * 32 <= layouts[2].bytes);
        assert!(pool_layouts(&SHAPE, one_node(2), 0, None, None).is_err());
    }

    #[test]
    fn regions_do_not_overlap() {
        let l = pool_layouts(&SHAPE, one_node(3), 1, None, None).unwrap()[0];
        let places = [
            (0, size_of::<Control>() as u64),
            (l.messages, message_offset(3, 0)),
            (l.recv_x, l.rows * 14336),
            (l.recv_scales, l.rows * 56 * 4),
            (l.recv_topk_idx, l.rows * 64),
            (l.recv_topk_weights, l.rows * 32),
            (l.recv_src_idx, l.rows * 4),
            (l.combine_x, l.rows * 14336),
            (l.combine_weights, l.rows * 32),
            (l.bytes, 0),
        ];
        for pair in places.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
            assert_eq!(pair[1].0 % ROW_ALIGN, 0);
        }
        // Reports name the first and the last row of each.
        let sections = l.sections(1, 14336, 14336);
        let name = |at| Section::name_of(&sections, at).unwrap();
        let last = l.rows - 1;
        assert_eq!(name(l.recv_x), "recv_x[0]");
        assert_eq!(name(l.recv_x + last * 14336), format!("recv_x[{last}]"));
        assert_eq!(name(l.combine_x + last * 14336), format!("combine_x[{last}]"));
        assert_eq!(name(l.recv_src_idx + last * 4), format!("recv_src_idx[{last}]"));
        assert_eq!(Section::name_of(&sections, l.bytes), None);
    }
}

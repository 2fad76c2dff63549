//! Sizes and places in the pool, the one allocation per rank that its peers map.

use epoxide_gpu::layout::{
    Control, MAX_RANKS, MAX_TOPK, PoolLayout, ROW_ALIGN, message, message_offset, row_stride,
};

use super::BufferShape;
use crate::error::{Error, Result};

/// Bytes at the start of every pool: control words and count messages.
fn fixed_bytes() -> u64 {
    (size_of::<Control>() as u64 + message_offset(MAX_RANKS as u32, 0)).next_multiple_of(ROW_ALIGN)
}

/// Bytes that one row takes in all regions together, their alignment aside.
fn bytes_per_row(shape: &BufferShape) -> u64 {
    let (topk, scales) = (shape.max_topk as u64, shape.max_scales as u64);
    2 * row_stride(shape.max_row_bytes) + scales * 4 + topk * (8 + 4 + 4) + 4
}

/// Regions that each may lose up to one alignment.
const REGIONS: u64 = 8;

/// The bytes of a pool with room for `rows` rows.
pub(super) fn pool_bytes(shape: &BufferShape, rows: u64) -> u64 {
    fixed_bytes() + rows * bytes_per_row(shape) + REGIONS * ROW_ALIGN
}

/// The layout of a pool with the rows that `shape` asks for, or with as many as fit in `limit` bytes.
pub(super) fn pool_layout(shape: &BufferShape, num_ranks: u32, limit: Option<u64>) -> Result<PoolLayout> {
    if shape.max_row_bytes == 0 || !shape.max_row_bytes.is_multiple_of(16) {
        return Err(Error::argument(
            "hidden",
            format!("{} bytes per row", shape.max_row_bytes),
            "hidden * element size must be a positive multiple of 16 bytes",
        ));
    }
    if shape.max_topk == 0 || shape.max_topk > MAX_TOPK {
        return Err(Error::argument("num_topk", shape.max_topk, format!("must be 1 to {MAX_TOPK}")));
    }
    let wanted = shape.max_tokens_per_rank as u64 * num_ranks as u64;
    let rows = match limit {
        None => wanted,
        Some(limit) => {
            let least = pool_bytes(shape, 1);
            if limit < least {
                return Err(Error::Capacity {
                    what: "num_nvl_bytes",
                    needed: least,
                    have: limit,
                    unit: "bytes",
                    remedy: "give at least room for one row, or leave num_nvl_bytes out".into(),
                });
            }
            ((limit - pool_bytes(shape, 0)) / bytes_per_row(shape)).min(i32::MAX as u64)
        }
    };
    if rows > i32::MAX as u64 {
        return Err(Error::argument(
            "max_tokens_per_rank",
            shape.max_tokens_per_rank,
            format!("{wanted} rows for {num_ranks} ranks do not fit in 31 bits"),
        ));
    }

    let mut at = size_of::<Control>() as u64;
    let mut place = |bytes: u64| {
        let offset = at.next_multiple_of(ROW_ALIGN);
        at = offset + bytes;
        offset
    };
    let (topk, stride) = (shape.max_topk as u64, row_stride(shape.max_row_bytes));
    let mut layout = PoolLayout {
        messages: place(MAX_RANKS as u64 * message::WORDS as u64 * 8),
        recv_x: place(rows * stride),
        recv_scales: place(rows * shape.max_scales as u64 * 4),
        recv_topk_idx: place(rows * topk * 8),
        recv_topk_weights: place(rows * topk * 4),
        recv_src_idx: place(rows * 4),
        combine_x: place(rows * stride),
        combine_weights: place(rows * topk * 4),
        rows,
        bytes: 0,
    };
    layout.bytes = place(0);
    Ok(layout)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: BufferShape =
        BufferShape { max_tokens_per_rank: 4096, max_row_bytes: 14336, max_topk: 8, max_scales: 56 };

    #[test]
    fn the_benchmark_shape_fits_in_its_budget() {
        let layout = pool_layout(&SHAPE, 8, None).unwrap();
        assert_eq!(layout.rows, 32768);
        assert!(layout.bytes < 1_300_000_000, "{} bytes", layout.bytes);
    }

    #[test]
    fn a_limit_is_kept_and_used() {
        for limit in [200_000u64, 1_000_000, 335_712_000] {
            let layout = pool_layout(&SHAPE, 8, Some(limit)).unwrap();
            assert!(layout.bytes <= limit, "{} of {limit}", layout.bytes);
            assert!(pool_bytes(&SHAPE, layout.rows + 1) > limit);
        }
    }

    #[test]
    fn regions_do_not_overlap() {
        let l = pool_layout(&SHAPE, 3, None).unwrap();
        let places = [
            (0, size_of::<Control>() as u64),
            (l.messages, MAX_RANKS as u64 * message::WORDS as u64 * 8),
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
    }
}

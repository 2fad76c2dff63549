//! How much there can be of what, and how rows are spaced.

/// Most ranks that map each other's memory, on one host or in one NVLink domain.
pub const MAX_RANKS: usize = 64;
/// Ranks that kernels keep in registers: most of a node between which and others rows are relayed.
/// With more, kernels of their own go by tables.
pub const FEW_RANKS: usize = 8;
/// Most entries per token in `topk_idx`: one lane each.
pub const MAX_TOPK: u32 = 32;
/// Most experts on one rank.
pub const MAX_LOCAL_EXPERTS: u32 = 1024;
/// Most tokens that a warp of a dispatch within a node does not claim: beside them it holds up to
/// four that it has claimed, one in each lane.
pub const MAX_FIXED_TOKENS: u32 = 28;
/// Most channels of a `Config`.
pub const MAX_CHANNELS: u32 = 256;
/// Most bytes of a slot of a combine's ring: a warp keeps the sums of so many in registers.
pub const MAX_SLOT_BYTES: u32 = 4096;
/// The same of a combine of several nodes, or of rows that are staged meanwhile: its warps need
/// registers for waits.
pub const MAX_WAITED_SLOT_BYTES: u32 = 3584;
/// Rows in a pool start at multiples of this many bytes.
pub const ROW_ALIGN: u64 = 128;

/// The bits in place of sums that a failed combine did not make: two NaN of BF16, one of FP32.
pub const NAN_BITS: u32 = 0x7fff_7fff;

/// Bytes from one row to the next in a pool, for rows of `row_bytes`.
#[inline(always)]
pub const fn row_stride(row_bytes: u64) -> u64 {
    (row_bytes + ROW_ALIGN - 1) & !(ROW_ALIGN - 1)
}

/// Bytes of a token's scales that dispatch moves by bulk copy, behind the row in its stage; 0 where
/// they are not a multiple of 16 bytes or too many, and go by ordinary stores.
#[inline(always)]
pub const fn bulk_scale_bytes(num_scales: u32) -> u32 {
    if num_scales.is_multiple_of(4) && num_scales <= 1024 { num_scales * 4 } else { 0 }
}

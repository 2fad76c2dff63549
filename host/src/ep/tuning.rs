//! Launch shapes.

use epoxide_gpu::kernels::MAX_SLOT_BYTES;

use crate::error::{Error, Result};

/// Launch shapes of the copy kernels. The defaults are the best measured on H200 (docs/BENCHMARKS.md). With many
/// multiprocessors an operation takes fewer warps on each: too many bytes in flight crowd the links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// Warps per block in dispatch, 1 to 8.
    pub dispatch_warps: u32,
    /// Warps per block in dispatch across nodes, beside the one that delivers, 1 to 8: there half of the blocks send.
    pub internode_dispatch_warps: u32,
    /// Further warps per block in a dispatch within one node that exchanges counts, which send the rows' metadata, 1 to 4.
    pub dispatch_metadata_warps: u32,
    /// Largest stage in dispatch, in bytes; longer rows travel in pieces.
    pub dispatch_stage_bytes: u32,
    /// Most stages per warp in dispatch, at least 2.
    pub dispatch_stages: u32,
    /// Warps per block in combine, 1 to 16.
    pub combine_warps: u32,
    /// Largest slot in combine, in bytes, at most 4096; longer rows travel in pieces.
    pub combine_slot_bytes: u32,
    /// Most slots per warp in combine, at least 2.
    pub combine_slots: u32,
    /// Blocks that copy rows into the pool during a combine of a tensor within a node, 1 to 1024. `None`: all multiprocessors that the
    /// configuration leaves. The number never exceeds the work there is.
    pub combine_stagers: Option<u32>,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning {
            dispatch_warps: 3,
            internode_dispatch_warps: 6,
            dispatch_metadata_warps: 4,
            dispatch_stage_bytes: 8192,
            dispatch_stages: 10,
            combine_warps: 16,
            combine_slot_bytes: 4096,
            combine_slots: 3,
            combine_stagers: None,
        }
    }
}

impl Tuning {
    /// Checks the ranges.
    pub(super) fn validate(&self) -> Result<()> {
        let check = |name, value: u32, range: std::ops::RangeInclusive<u32>| {
            if range.contains(&value) {
                return Ok(());
            }
            Err(Error::argument(name, value, format!("must be {} to {}", range.start(), range.end())))
        };
        check("dispatch_warps", self.dispatch_warps, 1..=8)?;
        check("internode_dispatch_warps", self.internode_dispatch_warps, 1..=8)?;
        check("dispatch_metadata_warps", self.dispatch_metadata_warps, 1..=4)?;
        check("dispatch_stage_bytes", self.dispatch_stage_bytes, 128..=65536)?;
        check("dispatch_stages", self.dispatch_stages, 2..=32)?;
        check("combine_warps", self.combine_warps, 1..=16)?;
        check("combine_slot_bytes", self.combine_slot_bytes, 512..=MAX_SLOT_BYTES)?;
        check("combine_slots", self.combine_slots, 2..=32)?;
        self.combine_stagers.map_or(Ok(()), |blocks| check("combine_stagers", blocks, 1..=1024))
    }
}

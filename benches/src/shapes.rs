//! Launch shapes that a measurement may ask for.

use epoxide::internal::Tuning;
use serde::{Deserialize, Serialize};

/// Launch shapes that were asked for; the library's own where not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shapes {
    /// Warps per block in dispatch.
    pub dispatch_warps: Option<u32>,
    /// Warps per block that send metadata, in dispatch within one node.
    #[serde(default)]
    pub dispatch_metadata_warps: Option<u32>,
    /// Most stages per warp in dispatch.
    pub dispatch_stages: Option<u32>,
    /// Largest stage in dispatch, in bytes.
    pub dispatch_stage_bytes: Option<u32>,
    /// Warps per block in combine.
    pub combine_warps: Option<u32>,
    /// Most slots per warp in combine.
    pub combine_slots: Option<u32>,
    /// Largest slot in combine, in bytes.
    pub combine_slot_bytes: Option<u32>,
    /// Blocks that copy rows into the pool during a combine of a tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub combine_stagers: Option<u32>,
}

impl Shapes {
    /// The launch shapes, the library's own where none was asked for.
    pub fn tuning(&self) -> Tuning {
        let d = Tuning::default();
        Tuning {
            dispatch_warps: self.dispatch_warps.unwrap_or(d.dispatch_warps),
            internode_dispatch_warps: self.dispatch_warps.unwrap_or(d.internode_dispatch_warps),
            dispatch_metadata_warps: self.dispatch_metadata_warps.unwrap_or(d.dispatch_metadata_warps),
            dispatch_stages: self.dispatch_stages.unwrap_or(d.dispatch_stages),
            dispatch_stage_bytes: self.dispatch_stage_bytes.unwrap_or(d.dispatch_stage_bytes),
            combine_warps: self.combine_warps.unwrap_or(d.combine_warps),
            combine_slots: self.combine_slots.unwrap_or(d.combine_slots),
            combine_slot_bytes: self.combine_slot_bytes.unwrap_or(d.combine_slot_bytes),
            combine_stagers: self.combine_stagers.or(d.combine_stagers),
        }
    }
}

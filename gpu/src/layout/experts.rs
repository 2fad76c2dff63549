//! Where experts are: a table in device memory that gives each logical expert its physical ones.

use bytemuck::{Pod, Zeroable};

use super::assert::layout_assert;
use super::device_ptr::DevicePtr;

/// The table that a kernel looks ids up in. A physical expert has the id
/// `rank * local_experts + local`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ExpertTable {
    /// In, or null where ids are those of physical experts: i32 `[num_experts, choices]`, physical
    /// experts, or -1 for none. An entry of token t of rank r takes choice `(t + r) % choices`.
    pub entries: DevicePtr,
    /// Logical experts.
    pub num_experts: u32,
    /// Choices of each, at least 1 where there is a table.
    pub choices: u32,
}

layout_assert!(ExpertTable, size = 16, choices at 12);

/// Set in the token that is recorded with such an id, where there is a table.
pub const WITH_TABLE: u64 = 1 << 32;
/// Set in an id that is out of range because no logical expert has it.
pub const UNKNOWN_EXPERT: i64 = 1 << 62;
/// Set in an id whose entry in the table is no physical expert.
pub const UNKNOWN_PLACE: i64 = 1 << 61;

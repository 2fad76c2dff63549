//! Expert ids as callers give them, i64 or i32, and the physical experts that a table gives for them.

use crate::layout::{DevicePtr, ExpertTable, UNKNOWN_EXPERT, UNKNOWN_PLACE, WITH_TABLE};
use crate::simt::*;

/// Id number `at` of `ids`: i32 where they are `narrow`, else i64. The branch is the same in all lanes.
#[inline(always)]
pub unsafe fn ld_id(ids: DevicePtr, narrow: u32, at: u64) -> i64 {
    // SAFETY: the caller vouches for the entry.
    unsafe { if narrow == 0 { ld_i64(ids.0 + at * 8) } else { ld_i32(ids.0 + at * 4) as i64 } }
}

/// A token as it is recorded with an id that is out of range.
#[inline(always)]
pub fn recorded_token(table: &ExpertTable, token: u32) -> u64 {
    token as u64 | if table.entries.is_null() { 0 } else { WITH_TABLE }
}

/// The physical expert, below `physical`, that `table` gives for the id of an entry of token `token` of rank `rank`, or -1 for none.
/// Without a table the id itself. An id that names no expert stays out of range, and so does one whose place is out of range.
#[inline(always)]
pub unsafe fn place(table: &ExpertTable, id: i64, token: u32, rank: u32, physical: u32) -> i64 {
    if table.entries.is_null() {
        return id;
    }
    let is_known = id >= 0 && id < table.num_experts as i64;
    // A clamp, so that no division needs a trap: hosts give at least one.
    let choices = table.choices.max(1);
    let choice = (token + rank) % choices;
    let at = table.entries.0 + (id as u64 * choices as u64 + choice as u64) * 4;
    // SAFETY: the table has so many choices for each of so many experts.
    let place = unsafe { ld_i32_if(is_known, at, -1) };
    if !is_known {
        // Not an id that happens to be a physical one.
        if id >= 0 { id | UNKNOWN_EXPERT } else { id }
    } else if place >= -1 && place < physical as i32 {
        place as i64
    } else {
        id | UNKNOWN_PLACE
    }
}

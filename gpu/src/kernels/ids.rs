//! Expert ids as callers give them, i64 or i32, and the physical experts that a table gives for
//! them.

use crate::layout::{DevicePtr, ExpertTable, UNKNOWN_EXPERT, UNKNOWN_PLACE, WITH_TABLE};
use crate::simt::*;

/// An id as it was loaded, ahead of its use: the load puts no instruction behind it that would wait
/// for it.
#[derive(Clone, Copy)]
pub struct Id(u64);

impl Id {
    /// -1, of either type.
    pub const NONE: Id = Id(u64::MAX);

    /// Id number `at` of `ids`: i32 where they are `narrow`, else i64. The branch is the same in
    /// all lanes.
    ///
    /// # Safety
    /// The entry is live.
    #[device]
    pub unsafe fn load(ids: DevicePtr, narrow: u32, at: u64) -> Id {
        Id(if narrow == 0 { ids.array::<u64>().ld(at) } else { ids.array::<u32>().ld(at) as u64 })
    }

    /// The id as i64, by the same `narrow`.
    #[device]
    pub fn value(self, narrow: u32) -> i64 {
        if narrow == 0 { self.0 as i64 } else { self.0 as i32 as i64 }
    }
}

/// Id number `at` of `ids`, which is used at once.
#[device]
pub unsafe fn ld_id(ids: DevicePtr, narrow: u32, at: u64) -> i64 {
    Id::load(ids, narrow, at).value(narrow)
}

/// A token as it is recorded with an id that is out of range.
#[device]
pub fn recorded_token(table: &ExpertTable, token: u32) -> u64 {
    token as u64 | if table.entries.is_null() { 0 } else { WITH_TABLE }
}

/// The physical expert, below `physical`, that `table` gives for the id of an entry of token
/// `token` of rank `rank`, or -1 for none. Without a table the id itself. An id that names no
/// expert stays out of range, and so does one whose place is out of range.
///
/// # Safety
/// The table has so many choices for each of so many experts.
#[device]
pub unsafe fn place(table: &ExpertTable, id: i64, token: u32, rank: u32, physical: u32) -> i64 {
    if table.entries.is_null() {
        return id;
    }
    let is_known = id >= 0 && id < table.num_experts as i64;
    // A clamp, so that no division needs a trap: hosts give at least one.
    let choices = at_least_one(table.choices);
    let choice = (token + rank) % choices;
    let at = table.entries.array::<i32>().at(row_major(id as u64, choices, choice));
    let place = ld_i32_if(is_known, at, -1);
    if !is_known {
        // Not an id that happens to be a physical one.
        if id >= 0 { id | UNKNOWN_EXPERT } else { id }
    } else if place >= -1 && place < physical as i32 {
        place as i64
    } else {
        id | UNKNOWN_PLACE
    }
}

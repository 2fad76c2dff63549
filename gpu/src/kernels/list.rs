//! Lists of a token's destinations, of which notify makes one for each token where there are more
//! ranks than fit in registers: lane d of a warp has the d-th destination, `rank << 32 | row`, or
//! -1. Ranks ascend.

use super::epoch::pool_at;
use crate::layout::{Comm, SEND_LIST_STRIDE};
use crate::simt::*;

/// A row at a rank.
#[derive(Clone, Copy)]
pub struct Destination {
    /// The row, or -1 where there is none.
    pub row: i32,
    /// The rank, where there is a row.
    pub rank: u32,
}

impl Destination {
    /// The entry at `at` of a list, where it `exists`.
    ///
    /// # Safety
    /// The entry is live.
    #[device]
    pub unsafe fn at(at: u64, exists: bool) -> Destination {
        let entry = ld_i64_if(exists, at, -1);
        Destination { row: entry as i32, rank: (entry >> 32) as u32 }
    }

    /// The lane's destination of `token`, where the token `exists`: a list is as long as a warp.
    ///
    /// # Safety
    /// The token's list is live.
    #[device]
    pub unsafe fn of_lane(lists: u64, token: u32, exists: bool) -> Destination {
        const { assert!(SEND_LIST_STRIDE == 32) };
        Destination::at(entry_at(lists, token, laneid()), exists)
    }

    /// The pool of its rank; 0 where there is no row.
    ///
    /// # Safety
    /// `notify` lists ranks that there are.
    #[device]
    pub unsafe fn pool(&self, comm: &Comm) -> u64 {
        if self.row >= 0 { pool_at::<true>(comm, self.rank) } else { 0 }
    }
}

/// Where entry `nth` of a token's list is.
#[device]
pub fn entry_at(lists: u64, token: u32, nth: u32) -> u64 {
    Global::<i64>::new(lists).at(row_major(token, SEND_LIST_STRIDE, nth))
}

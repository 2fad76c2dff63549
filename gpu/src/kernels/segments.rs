//! Rows in segments that follow each other, such as those of a rank's experts.

use crate::simt::*;

/// The sum of the numbers of all lanes up to this one, by `add`. The whole warp calls it.
#[device]
pub unsafe fn sum_upto(number: u32, add: impl Fn(u32, u32) -> u32) -> u32 {
    sum_upto_of_group(32, number, add)
}

/// Up to 32 segments, one to a lane.
pub struct Segments {
    /// The number of the first one.
    pub first: u32,
    /// Rows of the lane's segment.
    count: u32,
    /// Rows of all segments up to the lane's, and with it.
    upto: u32,
    /// Rows of all segments up to the last of these.
    pub end: u32,
}

impl Segments {
    /// The segments from number `first` on, of which the lane's has `count` rows; those in front of
    /// them have `before` rows together. The whole warp calls it.
    #[device]
    pub unsafe fn new(first: u32, before: u32, count: u32) -> Segments {
        let upto = sum_upto(count, |a, b| a + b) + before;
        Segments { first, count, upto, end: shfl_u32(upto, 31) }
    }

    /// The lane whose segment has row `row`, counted through all segments and below `end`, and the
    /// row's index there. The whole warp calls it.
    ///
    /// # Safety
    /// The last lane's sum is above `row`, so not all bits are set.
    #[device]
    pub unsafe fn find(&self, row: u32) -> (u32, u32) {
        let lane = ballot(self.upto <= row).count_ones() & 31;
        (lane, row - shfl_u32(self.upto - self.count, lane))
    }
}

/// The sum of the numbers of the lanes of a group up to this one, by `add`. Groups are of `lanes`
/// neighbours, a power of two. The whole warp calls it.
#[device]
pub unsafe fn sum_upto_of_group(lanes: u32, number: u32, add: impl Fn(u32, u32) -> u32) -> u32 {
    let (mut upto, mut distance) = (number, 1);
    while distance < lanes {
        let of_others = shfl_u32(upto, laneid().wrapping_sub(distance) & 31);
        upto = add(upto, if laneid() & (lanes - 1) >= distance { of_others } else { 0 });
        distance *= 2;
    }
    upto
}

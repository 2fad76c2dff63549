//! Sets of ranks as bits, and the ranks that a lane stands for.
//!
//! Kernels within a node are compiled twice from one source: for [`Few`] ranks, whose pools are in
//! the arguments, and for [`Many`], whose pools are in a table.

use core::marker::PhantomData;

use super::super::epoch::{pool_at, pool_of};
use super::{FewShared, ManyShared, NodeShared};
use crate::layout::{
    Comm, FEW_RANKS, LOCAL_LEFT_OUT, LOCAL_LEFT_OUT_HIGH, MAX_MEMBERS, MAX_RANKS, room_for_ranks,
};
use crate::simt::*;

/// Sets of up to [`FEW_RANKS`] ranks within a node, and of up to [`MAX_MEMBERS`] across nodes.
pub(super) type Few = u32;
/// Sets of up to [`MAX_RANKS`] ranks.
pub(super) type Many = u64;

/// A set of ranks, a bit for each. What differs between few and many ranks is here.
pub(super) trait Ranks: Element {
    /// Whether there may be more than [`FEW_RANKS`] ranks within a node.
    const MANY: bool;
    /// Ranks that pools and tables have room for within a node.
    const ROOM: u32;
    /// Bits of a set.
    const BITS: u32;
    /// No rank.
    const NONE: Self;

    /// The bits as one word, and those behind it.
    fn halves(self) -> (u32, u32);
    /// Loads a set from two words of shared memory, of few ranks from the first one alone.
    unsafe fn ld_shared(low: u32, high: u32) -> Self;
    /// Stores it to two words of shared memory, of few ranks to the first one alone.
    unsafe fn st_shared(self, low: u32, high: u32);
    /// The ranks 0 to `num_ranks - 1`. A group has ranks, and no more than bits.
    fn all(num_ranks: u32) -> Self;
    /// The set of `rank` alone, which is below the number of bits.
    fn only(rank: u32) -> Self;
    /// Whether `rank`, which is below the number of bits, is in it.
    fn has(self, rank: u32) -> bool;
    /// Those that are not in `others`. No operators, which generic code would call as functions.
    fn without(self, others: Self) -> Self;
    /// Whether no rank is in it.
    fn is_empty(self) -> bool;
    /// The first rank, of one or more.
    fn first(self) -> u32;
    /// The others, of one or more.
    fn without_first(self) -> Self;
    /// The ranks of all lanes' sets together. All lanes get the same, which the compiler sees. The
    /// whole warp calls it.
    unsafe fn of_warp(self) -> Self;
    /// What [`begin`](super::begin) leaves in four words of shared memory: the epoch, whether the
    /// place is answered, and in the last word the first members.
    fn opened_words(epoch: u64, is_answered: u32, members: Self) -> [u32; 4];
    /// The epoch in those words.
    unsafe fn opened_epoch(words: SharedArray<u32, 4>) -> u64;
    /// Whether they show that the place is answered.
    unsafe fn is_opened_answered(words: SharedArray<u32, 4>) -> bool;
    /// Loads the set of those left out from the rank's own state at `local`.
    unsafe fn left_out(local: u64) -> Self;
    /// The address of a rank's pool.
    unsafe fn pool(comm: &Comm, rank: u32) -> u64;
    /// Shared memory of a block within a node.
    fn shared() -> NodeShared<Self>;
}

impl Ranks for Few {
    const BITS: u32 = MAX_MEMBERS as u32;
    const MANY: bool = false;
    const NONE: Self = 0;
    const ROOM: u32 = room_for_ranks(1);

    #[device]
    fn halves(self) -> (u32, u32) {
        (self, 0)
    }

    #[device]
    unsafe fn ld_shared(low: u32, _: u32) -> Self {
        ld_shared_u32(low)
    }

    #[device]
    unsafe fn st_shared(self, low: u32, _: u32) {
        st_shared_u32(low, self);
    }

    #[device]
    fn all(num_ranks: u32) -> Self {
        u32::MAX >> ((32 - num_ranks) & 31)
    }

    #[device]
    fn only(rank: u32) -> Self {
        1 << rank
    }

    #[device]
    fn has(self, rank: u32) -> bool {
        self >> rank & 1 != 0
    }

    #[device]
    fn without(self, others: Self) -> Self {
        self & !others
    }

    #[device]
    fn is_empty(self) -> bool {
        self == 0
    }

    #[device]
    fn first(self) -> u32 {
        self.trailing_zeros()
    }

    #[device]
    fn without_first(self) -> Self {
        self & (self - 1)
    }

    #[device]
    unsafe fn of_warp(self) -> Self {
        redux_or(self)
    }

    /// The low and the high half of the epoch, whether the place is answered, and the members.
    #[device]
    fn opened_words(epoch: u64, is_answered: u32, members: Self) -> [u32; 4] {
        [epoch as u32, (epoch >> 32) as u32, is_answered, members]
    }

    #[device]
    unsafe fn opened_epoch(words: SharedArray<u32, 4>) -> u64 {
        (words.ld(1) as u64) << 32 | words.ld(0) as u64
    }

    #[device]
    unsafe fn is_opened_answered(words: SharedArray<u32, 4>) -> bool {
        words.ld(2) != 0
    }

    #[device]
    unsafe fn left_out(local: u64) -> Self {
        ld_u32(local + LOCAL_LEFT_OUT)
    }

    #[device]
    unsafe fn pool(comm: &Comm, rank: u32) -> u64 {
        pool_of(comm, rank)
    }

    #[device]
    fn shared() -> NodeShared<Self> {
        let it = FewShared::dynamic();
        NodeShared {
            tokens: SharedArray::new(it.tokens().at(0)),
            of_source: SharedArray::new(it.of_source().at(0)),
            of_warp: it.of_warp(),
            opened: it.opened(),
            call_targets: it.call_targets(),
            before: SharedArray::new(0),
            ranks_high: SharedArray::new(0),
            of: PhantomData,
        }
    }
}

/// The bit of the epoch's high half that shows, of many ranks, that the place is answered.
const ANSWERED_BIT: u32 = 31;

/// The set of many ranks that has these bits.
#[device]
fn of_halves(low: u32, high: u32) -> Many {
    (high as u64) << 32 | low as u64
}

impl Ranks for Many {
    const BITS: u32 = MAX_RANKS as u32;
    const MANY: bool = true;
    const NONE: Self = 0;
    const ROOM: u32 = room_for_ranks(FEW_RANKS as u32 + 1);

    #[device]
    fn halves(self) -> (u32, u32) {
        (self as u32, (self >> 32) as u32)
    }

    #[device]
    unsafe fn ld_shared(low: u32, high: u32) -> Self {
        of_halves(ld_shared_u32(low), ld_shared_u32(high))
    }

    #[device]
    unsafe fn st_shared(self, low: u32, high: u32) {
        st_shared_u32(low, self as u32);
        st_shared_u32(high, (self >> 32) as u32);
    }

    #[device]
    fn all(num_ranks: u32) -> Self {
        u64::MAX >> ((64 - num_ranks) & 63)
    }

    #[device]
    fn only(rank: u32) -> Self {
        1 << rank
    }

    #[device]
    fn has(self, rank: u32) -> bool {
        self >> rank & 1 != 0
    }

    #[device]
    fn without(self, others: Self) -> Self {
        self & !others
    }

    #[device]
    fn is_empty(self) -> bool {
        self == 0
    }

    #[device]
    fn first(self) -> u32 {
        trailing_zeros_u64(self)
    }

    #[device]
    fn without_first(self) -> Self {
        self & (self - 1)
    }

    #[device]
    unsafe fn of_warp(self) -> Self {
        let (low, high) = self.halves();
        of_halves(redux_or(low), redux_or(high))
    }

    /// As of few, but the third word has the members from 32 on, and [`ANSWERED_BIT`] of the second
    /// one is whether the place is answered.
    #[device]
    fn opened_words(epoch: u64, is_answered: u32, members: Self) -> [u32; 4] {
        let (low, high) = members.halves();
        [epoch as u32, is_answered << ANSWERED_BIT | (epoch >> 32) as u32, high, low]
    }

    #[device]
    unsafe fn opened_epoch(words: SharedArray<u32, 4>) -> u64 {
        let high = words.ld(1) & !(1 << ANSWERED_BIT);
        (high as u64) << 32 | words.ld(0) as u64
    }

    #[device]
    unsafe fn is_opened_answered(words: SharedArray<u32, 4>) -> bool {
        words.ld(1) >> ANSWERED_BIT != 0
    }

    #[device]
    unsafe fn left_out(local: u64) -> Self {
        of_halves(ld_u32(local + LOCAL_LEFT_OUT), ld_u32(local + LOCAL_LEFT_OUT_HIGH))
    }

    #[device]
    unsafe fn pool(comm: &Comm, rank: u32) -> u64 {
        pool_at::<true>(comm, rank)
    }

    #[device]
    fn shared() -> NodeShared<Self> {
        let it = ManyShared::dynamic();
        NodeShared {
            tokens: it.tokens(),
            of_source: it.of_source(),
            of_warp: it.of_warp(),
            opened: it.opened(),
            call_targets: it.call_targets(),
            before: it.before(),
            ranks_high: it.ranks_high(),
            of: PhantomData,
        }
    }
}

/// Does something for each rank that a lane stands for: its own number and, of many ranks, the one
/// 32 further. No closure, so that kernels for few ranks come out as if written for them alone.
macro_rules! each_rank {
    ($ranks:ty, $lane:expr, $rank:ident => $body:block) => {{
        let $rank = $lane;
        $body
    }
    if <$ranks>::MANY {
        let $rank = $lane + 32;
        $body
    }};
}
pub(super) use each_rank;

/// Does something for the pool of each rank of a set: of few ranks side by side, by the arguments
/// of the kernel. No closure, as above.
macro_rules! each_pool {
    ($ranks:ty, $comm:expr, $set:expr, $pool:ident => $body:block) => {
        if <$ranks>::MANY {
            let mut left = $set;
            while !left.is_empty() {
                let $pool = <$ranks>::pool(&$comm, left.first());
                left = left.without_first();
                $body
            }
        } else {
            unroll!(8, RANK => {
                if $set.has(RANK as u32) {
                    let $pool = $comm.pools[RANK].0;
                    $body
                }
            });
        }
    };
}
pub(super) use each_pool;

//! Tokens that the warps of a dispatch claim from a counter of their rank, so that each sends as
//! many as its multiprocessor can. Some multiprocessors get a larger share of the links than
//! others, and some have more copies to make: with a fixed part of the tokens for each, the last
//! ones alone do not fill the links.
//!
//! The counter ([`LocalState::claims`](crate::layout::LocalState::claims)) has the epoch above the
//! number of claims. Each warp starts it in front of its first claim, so nothing resets it.
//!
//! Claims that are made ahead are on their way while the warp sends as many tokens, and no
//! instruction reads them before. An atomic waits behind the stores of its multiprocessor,
//! longer than a token takes where there are few of those. So several tokens are claimed at once,
//! but for the last ones.
//!
//! Soundness: each token has one claim or is fixed, so one warp sends it. Claims order nothing.

use crate::layout::{CLAIMS_SHIFT, Comm, LOCAL_CLAIMS};
use crate::simt::*;

/// Most tokens that a warp claims at once. They are neighbours, whose destinations share a cache
/// line.
const AT_ONCE: u32 = 4;
/// Tokens for each warp of the grid that are claimed one at a time, the last of the rank.
const LAST: u32 = 16;
/// Blocks from which on all are: their multiprocessors wait for the links.
const MANY_BLOCKS: u32 = 24;

/// The tokens of a warp, by number: fixed ones, then claimed ones.
pub struct Claims {
    /// The token of the rank's first claim.
    first_claimed: u32,
    /// The first token that is claimed alone.
    last: u32,
    /// Lane l: the last value whose number is l modulo 32. Its low [`CLAIMS_SHIFT`] bits are the
    /// token's number behind `first_claimed`.
    values: u32,
    /// The first of the claims that are on their way, in the lane of its number.
    next: u64,
    /// How many there are, of tokens one behind the other.
    coming: u32,
    /// Number of values.
    made: u32,
}

impl Claims {
    /// The tokens of a warp, of `num_tokens`: up to `fixed` ones, every `step`-th from `first` on
    /// and in front of `end`, at most [`MAX_FIXED_TOKENS`](crate::layout::MAX_FIXED_TOKENS).
    /// `warps` of the grid send.
    #[device]
    pub fn behind_fixed(
        (first, end, step): (u32, u32, u32),
        warps: u32,
        fixed: u32,
        num_tokens: u32,
    ) -> Claims {
        let (first_claimed, token) = (fixed * warps, first + laneid() * step);
        let values = (if token < end { token } else { num_tokens }).wrapping_sub(first_claimed);
        let last = if nctaid() < MANY_BLOCKS { num_tokens.saturating_sub(LAST * warps) } else { 0 };
        Claims { first_claimed, last, values, next: 0, coming: 1, made: fixed }
    }

    /// Starts the counter, and claims the first `count` tokens of a warp that has no fixed ones,
    /// less than 32. The whole warp calls it, and waits for them.
    ///
    /// # Safety
    /// Words are in this rank's own memory.
    #[device]
    pub unsafe fn at_once(comm: &Comm, epoch: u64, count: u32) -> Claims {
        let mut first = 0;
        if laneid() == 0 && count != 0 {
            raise(comm, epoch);
            first = atom_relaxed_gpu_add_u64(comm.local.0 + LOCAL_CLAIMS, count as u64) as u32;
        }
        let first = shfl_u32(first, 0);
        // Later claims, by other lanes, come behind the start of the counter.
        syncwarp();
        let values = first + laneid();
        Claims { first_claimed: 0, last: 0, values, next: 0, coming: 0, made: count }
    }

    /// Whether some of `num_tokens` tokens are claimed.
    #[device]
    pub fn are_needed(&self, num_tokens: u32) -> bool {
        self.first_claimed < num_tokens
    }

    /// Starts the counter, and makes the first claim ahead. The whole warp calls it.
    ///
    /// # Safety
    /// Words are in this rank's own memory.
    #[device]
    pub unsafe fn start(&mut self, comm: &Comm, epoch: u64) {
        if laneid() == 0 {
            raise(comm, epoch);
        }
        syncwarp();
        self.claim_ahead(comm);
    }

    /// Where the warp has no token behind number `nth`: takes the claims that are on their way, and
    /// makes the next ones ahead. The whole warp calls it.
    ///
    /// # Safety
    /// The counter has been started.
    #[device]
    pub unsafe fn take_behind(&mut self, comm: &Comm, nth: u32) {
        if self.made != nth + 1 {
            return;
        }
        let first = shfl_u32(self.next as u32, self.made & 31);
        let place = laneid().wrapping_sub(self.made) & 31;
        if place < self.coming {
            self.values = first + place;
        }
        self.made += self.coming;
        self.coming = if self.token(self.made - 1) < self.last { AT_ONCE } else { 1 };
        self.claim_ahead(comm);
    }

    #[device]
    unsafe fn claim_ahead(&mut self, comm: &Comm) {
        let (claims, count) = (laneid() == self.made & 31, self.coming as u64);
        self.next = atom_relaxed_gpu_add_u64_if(claims, comm.local.0 + LOCAL_CLAIMS, count, self.next);
    }

    /// Claims token number `nth` at once: the next read of a token waits for it. The whole warp
    /// calls it.
    ///
    /// # Safety
    /// The counter has been started.
    #[device]
    pub unsafe fn claim(&mut self, comm: &Comm, nth: u32) {
        if laneid() == nth & 31 {
            self.values = atom_relaxed_gpu_add_u64(comm.local.0 + LOCAL_CLAIMS, 1) as u32;
        }
    }

    /// The warp's token number `nth`, one of the last 32 that it has taken; no token of the rank
    /// where none was left. The whole warp calls it.
    ///
    /// # Safety
    /// As a collective.
    #[device]
    pub unsafe fn token(&self, nth: u32) -> u32 {
        (shfl_u32(self.values, nth & 31) + self.first_claimed) & ((1 << CLAIMS_SHIFT) - 1)
    }
}

/// Starts the counter of the operation `epoch`: the first warp's call counts, since that epoch is
/// the largest.
#[device]
unsafe fn raise(comm: &Comm, epoch: u64) {
    red_relaxed_gpu_max_u64(comm.local.0 + LOCAL_CLAIMS, epoch << CLAIMS_SHIFT);
}

/// A place in the sequence of pieces of a warp's tokens.
#[derive(Clone, Copy)]
pub struct Piece {
    /// The token's number among those of the warp.
    pub nth: u32,
    pub token: u32,
    pub offset: u32,
}

//! Tokens that the warps of a dispatch claim from a counter of their rank, so that each sends as
//! many as its multiprocessor can. Some multiprocessors get a larger share of the links than
//! others, and some have more copies to make: with a fixed part of the tokens for each, the last
//! ones alone do not fill the links.
//!
//! The counter ([`LocalState::claims`](crate::layout::LocalState::claims)) has the epoch above the
//! number of claims. Each warp starts it in front of its first claim, so nothing resets it.
//!
//! A claim that is made ahead is on its way for as long as the warp sends a token, and no instruction
//! looks at it before. A warp that waits for its claims takes up to 0.3 us longer for each token.
//!
//! Soundness: each token has one claim or is fixed, so one warp sends it. Claims order nothing.

use crate::layout::{CLAIMS_SHIFT, Comm, LOCAL_CLAIMS};
use crate::simt::*;

/// The tokens of a warp, by number: fixed ones, then claimed ones.
pub struct Claims {
    /// The token of the rank's first claim.
    first_claimed: u32,
    /// Lane l: the last value whose number is l modulo 32. Its low [`CLAIMS_SHIFT`] bits are the
    /// token's number behind `first_claimed`.
    values: u32,
    /// The claim that is on its way, in the lane of its number.
    next: u64,
}

impl Claims {
    /// The tokens of warp `warp` of `warps` of a grid. `fixed` are its own, every `warps`-th one, at
    /// most [`MAX_FIXED_TOKENS`](crate::layout::MAX_FIXED_TOKENS).
    #[device]
    pub fn behind_fixed(warp: u32, warps: u32, fixed: u32) -> Claims {
        let first_claimed = fixed * warps;
        Claims { first_claimed, values: (warp + laneid() * warps).wrapping_sub(first_claimed), next: 0 }
    }

    /// Starts the counter, and claims the first `count` tokens of a warp that has no fixed ones, less
    /// than 32. The whole warp calls it, and waits for them.
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
        Claims { first_claimed: 0, values: first + laneid(), next: 0 }
    }

    /// Whether some of `num_tokens` tokens are claimed.
    #[device]
    pub fn are_needed(&self, num_tokens: u32) -> bool {
        self.first_claimed < num_tokens
    }

    /// Starts the counter, and makes the claim of token number `nth`, the first that is not fixed,
    /// ahead. The whole warp calls it.
    ///
    /// # Safety
    /// Words are in this rank's own memory.
    #[device]
    pub unsafe fn start(&mut self, comm: &Comm, epoch: u64, nth: u32) {
        if laneid() == 0 {
            raise(comm, epoch);
        }
        syncwarp();
        self.claim_ahead(comm, nth);
    }

    /// Takes the claim of token number `nth`, which is on its way, and makes the next one ahead. The
    /// whole warp calls it.
    ///
    /// # Safety
    /// The counter has been started.
    #[device]
    pub unsafe fn take(&mut self, comm: &Comm, nth: u32) {
        if laneid() == nth & 31 {
            self.values = self.next as u32;
        }
        self.claim_ahead(comm, nth + 1);
    }

    #[device]
    unsafe fn claim_ahead(&mut self, comm: &Comm, nth: u32) {
        let is_own = laneid() == nth & 31;
        self.next = atom_relaxed_gpu_add_u64_if(is_own, comm.local.0 + LOCAL_CLAIMS, 1, self.next);
    }

    /// Claims token number `nth` at once: the next look at a token waits for it. The whole warp calls
    /// it.
    ///
    /// # Safety
    /// The counter has been started.
    #[device]
    pub unsafe fn claim(&mut self, comm: &Comm, nth: u32) {
        if laneid() == nth & 31 {
            self.values = atom_relaxed_gpu_add_u64(comm.local.0 + LOCAL_CLAIMS, 1) as u32;
        }
    }

    /// The warp's token number `nth`, one of the last 32 that it has taken; no token of the rank where none was
    /// left. The whole warp calls it.
    ///
    /// # Safety
    /// As a collective.
    #[device]
    pub unsafe fn token(&self, nth: u32) -> u32 {
        (shfl_u32(self.values, nth & 31) + self.first_claimed) & ((1 << CLAIMS_SHIFT) - 1)
    }
}

/// Starts the counter of the operation `epoch`: the first warp's call counts, since that epoch is the
/// largest.
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

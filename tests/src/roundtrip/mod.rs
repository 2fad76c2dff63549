//! Round trips of either mode: dispatch and combine of one routing, each output compared with the
//! oracle, bit for bit. Those of high throughput are here, those of low latency in
//! [`low_latency`](crate::low_latency).
//!
//! Every rank computes its expected results from the case alone, a piece at a time. So the same
//! code serves threads and processes, thousands of small cases, and rows as large as a model's.

mod by_expert;
mod case;
mod check;
mod graph;

use epoxide::Result;
use epoxide::driver::Device;
use epoxide::group::ProcessGroup;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::harness::Rank;
use crate::oracle::{Routing, Style};
use crate::payload::rng_of;
use crate::sizes::Sizes;

pub use by_expert::Weights;
pub use case::{Case, Return, Scales};
pub use check::{Expected, compare_weights};

/// A mode's buffer, whose round trips are compared with the oracle.
pub trait RoundTrip: Sized {
    /// Inputs of a round trip: the same on every rank, so that each can compute the others' data.
    type Case;
    /// Options of the buffer.
    type Options;
    /// The number of the first case behind [`RoundTrip::first_cases`], as messages give it.
    const FIRST_NUMBER: u64;

    /// Makes the buffer of a rank. Collective.
    ///
    /// # Errors
    /// Errors of the buffer.
    fn create(device: Device, group: &dyn ProcessGroup, options: Self::Options) -> Result<Self>;

    /// Ok unless an operation has recorded an error.
    ///
    /// # Errors
    /// The recorded error.
    fn recorded(&self) -> Result<()>;

    /// Cases in front of all others.
    fn first_cases(cases: &Cases) -> Vec<Self::Case>;

    /// Case `number`, from [`RoundTrip::FIRST_NUMBER`]. Each number is another case.
    fn case(cases: &Cases, number: u64, draw: Draw) -> Self::Case;

    /// See [`Rank::round_trip`].
    ///
    /// # Errors
    /// Errors of the operations.
    fn round_trip(rank: &mut Rank<Self>, case: &Self::Case) -> Result<u64>;

    /// Captures a round trip as a step and runs that `replays` times; differences are noted, and
    /// `step` is called after each. Collective.
    ///
    /// # Errors
    /// Errors of the operations.
    fn replay(rank: &mut Rank<Self>, cases: &Cases, replays: u64, step: impl Fn()) -> Result<Replays>;
}

/// Replays of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replays {
    /// The number compared with the oracle.
    pub verified: u64,
    /// Rows that those received.
    pub rows: u64,
}

/// Sizes and seed that the cases of a run are drawn from.
#[derive(Debug, Clone, Copy)]
pub struct Cases {
    /// The most of each size.
    pub sizes: Sizes,
    /// Nodes of the ranks.
    pub nodes: u32,
    /// The seed of all random data.
    pub seed: u64,
}

/// The size of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Draw {
    /// The largest sizes.
    Full,
    /// Random sizes, and another number of tokens on each rank.
    Random,
}

impl Cases {
    /// The generator of a case.
    pub(crate) fn rng(&self, number: u64) -> ChaCha8Rng {
        rng_of(&[self.seed, number])
    }

    /// A routing of the full size.
    pub fn routing(&self, rng: &mut ChaCha8Rng, style: Style) -> Routing {
        let Sizes { ranks, tokens, experts, topk, .. } = self.sizes;
        Routing::random(rng, &vec![tokens; ranks as usize], topk, experts, style)
    }
}

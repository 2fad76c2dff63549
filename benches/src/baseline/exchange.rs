//! The calls of a way that are timed, and the rows that they bring.

use epoxide::Result;
use epoxide::driver::Stream;
use epoxide_testing::roundtrip::Case;

/// A way on one rank: its calls enqueue, and wait for nothing that the device does.
pub(crate) trait Exchange {
    /// Tokens to their experts' ranks.
    fn dispatch(&self, stream: &Stream) -> Result<()>;

    /// And back.
    fn combine(&self, stream: &Stream) -> Result<()>;

    /// Whether each combine answers a dispatch of its own.
    fn in_pairs(&self) -> bool {
        false
    }

    /// Returns an error that happened on the device.
    fn check(&self) -> Result<()>;

    /// Bytes that others send this rank in a dispatch and in a combine, at the least.
    fn link_bytes(&self) -> (u64, u64);
}

/// Rows of a dispatch and of a combine that others send a rank.
pub(crate) fn link_rows(case: &Case, rank: u32) -> (u64, u64) {
    let (routing, ranks) = (&case.routing, case.routing.num_ranks());
    let sent = |from: u32, to: u32| {
        (0..routing.num_tokens(from)).filter(|&token| routing.hits(from, token, to)).count() as u64
    };
    let others = || (0..ranks).filter(|&other| other != rank);
    (others().map(|other| sent(other, rank)).sum(), others().map(|other| sent(rank, other)).sum())
}

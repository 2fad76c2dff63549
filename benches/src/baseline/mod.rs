//! Other ways of doing a dispatch and a combine, timed beside them on the same routing.
//!
//! Every way is timed as the phases are: each call by itself, enqueued ahead, behind an emptied L2
//! cache and a barrier between the devices. The kernels of epoxide also lay rows together by
//! destination, put received rows in place, and sum the returned rows. NCCL needs extra work for
//! that, which is not timed: its figures are of the exchange alone, less than a user would see. The
//! page docs/BENCH-METHOD.md lists the advantages of each side.

mod low_latency;
mod nccl;

use epoxide::Result;
use epoxide::driver::Stream;
use epoxide_testing::roundtrip::Case;

use self::low_latency::LowLatency;
pub(crate) use self::nccl::Nccl;
use crate::Baseline;
use crate::bench::Bench;
use crate::measured::WaySamples;
use crate::results::Way;

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

impl Baseline {
    /// Whether this program has it and this machine too.
    ///
    /// # Errors
    /// [`epoxide::Error::Unavailable`], with what is missing and how to get it.
    pub fn check(self) -> Result<()> {
        let Baseline::Nccl = self;
        Nccl::check()
    }
}

impl Bench<'_> {
    /// Times all other ways, each of which is held against the oracle before. Collective.
    pub fn others(&mut self, nccl: &Nccl, case: &Case) -> Result<Vec<WaySamples>> {
        let mut all = Vec::new();
        if self.plan.has_low_latency() {
            self.settle(Way::LowLatency)?;
            let exchange = LowLatency::checked(self, case)?;
            all.push(self.time_way(Way::LowLatency, &exchange)?);
        }
        self.settle(Way::NcclAllToAll)?;
        let all_to_all = nccl.all_to_all(case, &self.rig)?;
        all.push(self.time_way(Way::NcclAllToAll, &all_to_all)?);
        self.settle(Way::NcclAllGather)?;
        let all_gather = nccl.all_gather(case, &self.rig)?;
        all.push(self.time_way(Way::NcclAllGather, &all_gather)?);
        Ok(all)
    }

    /// Waits until no rank's device works. Making a way allocates, connects and frees, and a driver
    /// may wait for running work then.
    fn settle(&self, way: Way) -> Result<()> {
        self.watch.doing(self.rig.rank, way.text());
        self.rig.stream.synchronize()?;
        self.rig.group.barrier(self.rig.group.timeout())
    }

    fn time_way(&mut self, way: Way, exchange: &dyn Exchange) -> Result<WaySamples> {
        let stream = self.rig.stream.clone();
        let dispatch = self.isolated(true, |_| exchange.dispatch(&stream))?;
        let before = |_: &mut Self| if exchange.in_pairs() { exchange.dispatch(&stream) } else { Ok(()) };
        let combine = self.isolated_behind(before, true, |_| exchange.combine(&stream))?;
        let stream_us = match exchange.in_pairs() {
            true => None,
            false => Some((
                self.back_to_back(|_| exchange.dispatch(&stream))?,
                self.back_to_back(|_| exchange.combine(&stream))?,
            )),
        };
        let pair = self.pairs(|_| exchange.dispatch(&stream).and_then(|()| exchange.combine(&stream)))?;
        exchange.check()?;
        // No rank frees memory that another rank may still access.
        self.settle(way)?;
        Ok(WaySamples { way, dispatch, combine, stream: stream_us, pair, link_bytes: exchange.link_bytes() })
    }
}

//! What else does what a dispatch and a combine do, timed beside them on the same routing.
//!
//! Every way is timed as the phases are: each call by itself, enqueued ahead, behind an emptied L2 cache and a barrier between the devices.
//! What a way needs besides, and epoxide's kernels do on the way (to lay rows together by destination, to put received rows in place, to sum
//! what comes back), is not timed of NCCL's: they are the exchange alone, less than a user would see. docs/BENCHMARKS.md says what favours whom.

mod low_latency;
#[cfg(feature = "nccl")]
mod nccl;
#[cfg(not(feature = "nccl"))]
#[path = "no_nccl.rs"]
mod nccl;

use epoxide::Result;
use epoxide::driver::Stream;
use epoxide_testing::roundtrip::Case;
use serde::{Deserialize, Serialize};

pub(crate) use self::nccl::Nccl;
use crate::Plan;
use crate::bench::Bench;
use crate::measured::Samples;
use crate::results::Way;

/// Pairs of a dispatch and a combine that follow each other where pairs are timed. Few: NCCL is launched call by call, which takes the host
/// about as long as the smallest calls take a device, and has to be done while the L2 cache is emptied in front of them.
pub(crate) const CHAIN: u32 = 4;

/// What can be measured beside epoxide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Baseline {
    /// NCCL, by all-to-all and by all-gather + reduce-scatter.
    Nccl,
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

/// What a rank measured of a way.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WaySamples {
    /// The way.
    pub way: Way,
    /// Dispatches, each by itself.
    pub dispatch: Samples,
    /// Combines.
    pub combine: Samples,
    /// Dispatches and combines back to back, mean per call; missing where a combine goes with one dispatch alone.
    pub stream: Option<(f64, f64)>,
    /// Pairs one after the other, the time of one.
    pub pair: Samples,
    /// Bytes that others send this rank in a dispatch and in a combine, at the least.
    pub link_bytes: (u64, u64),
}

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

    /// What went wrong on the device.
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

impl Plan {
    /// Steps of a run that [`Bench::others`] makes, and those of pairs of the point's own way.
    pub(crate) fn baseline_steps(&self) -> u64 {
        let calls = u64::from(self.warmup + self.iters);
        match self.baseline {
            None => 0,
            // Dispatch, combine and pair each; back to back, too, where that can be.
            Some(Baseline::Nccl) => {
                let low_latency = if self.has_low_latency() { 3 } else { 0 };
                calls * (self.num_sms.len() as u64 + low_latency + 2 * 5)
            }
        }
    }
}

impl Bench<'_> {
    /// Times all other ways, each of which is held against the oracle before. Collective.
    pub fn others(&mut self, nccl: &Nccl, case: &Case) -> Result<Vec<WaySamples>> {
        let mut all = Vec::new();
        if self.plan.has_low_latency() {
            self.settle(Way::LowLatency)?;
            let exchange = low_latency::LowLatency::checked(self, case)?;
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

    /// Waits until no rank's device does anything: what makes a way allocates, connects and frees, for which a driver may wait.
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
        // Nobody gives anything back that another rank may still be told of.
        self.settle(way)?;
        Ok(WaySamples { way, dispatch, combine, stream: stream_us, pair, link_bytes: exchange.link_bytes() })
    }

    /// Pairs one after the other, the time of one.
    pub fn pairs(&mut self, mut pair: impl FnMut(&mut Self) -> Result<()>) -> Result<Samples> {
        let chains = self.isolated(true, |bench| (0..CHAIN).try_for_each(|_| pair(bench)))?;
        Ok(chains.into_iter().map(|us| us / f64::from(CHAIN)).collect())
    }
}

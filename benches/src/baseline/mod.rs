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
use epoxide_testing::oracle::Routing;

use self::low_latency::low_latency;
pub(crate) use self::nccl::Nccl;
use crate::Baseline;
use crate::high_throughput::HighThroughput;
use crate::measured::{PhaseTimes, WaySamples};
use crate::plan::CHAIN;
use crate::results::{PhaseName, Way};
use crate::script::{Front, Script};

/// A way on one rank: its calls enqueue, and wait for nothing that the device does.
pub(crate) trait Exchange {
    /// Tokens to their experts' ranks.
    fn dispatch(&self, stream: &Stream) -> Result<()>;

    /// And back.
    fn combine(&self, stream: &Stream) -> Result<()>;

    /// Whether each combine answers a dispatch of its own, and each dispatch comes behind a
    /// combine, as a model's do: one behind another dispatch waits for all ranks first.
    fn in_pairs(&self) -> bool {
        false
    }

    /// Returns an error that happened on the device.
    fn check(&self) -> Result<()>;

    /// Bytes that others send this rank in a dispatch and in a combine, at the least.
    fn link_bytes(&self) -> (u64, u64);
}

/// Rows of a dispatch and of a combine that others send a rank.
pub(crate) fn link_rows(routing: &Routing, rank: u32) -> (u64, u64) {
    let ranks = routing.num_ranks();
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

impl Script<'_, HighThroughput> {
    /// Times all other ways, each of which is held against the oracle before. Collective.
    pub fn ways(&mut self, nccl: &Nccl) -> Result<Vec<WaySamples>> {
        let mut all = Vec::new();
        if self.plan.has_low_latency() {
            self.settle(Way::LowLatency)?;
            let exchange = low_latency(self)?;
            all.push(self.time_way(Way::LowLatency, &exchange)?);
        }
        self.settle(Way::NcclAllToAll)?;
        let all_to_all = nccl.all_to_all(&self.mode.case, &self.mode.rig)?;
        all.push(self.time_way(Way::NcclAllToAll, &all_to_all)?);
        self.settle(Way::NcclAllGather)?;
        let all_gather = nccl.all_gather(&self.mode.case, &self.mode.rig)?;
        all.push(self.time_way(Way::NcclAllGather, &all_gather)?);
        Ok(all)
    }

    /// Waits until no rank's device works. Making a way allocates, connects and frees, and a driver
    /// may wait for running work then.
    fn settle(&self, way: Way) -> Result<()> {
        self.doing(way.text());
        self.stream.synchronize()?;
        self.group.barrier(self.group.timeout())
    }

    fn time_way(&mut self, way: Way, exchange: &dyn Exchange) -> Result<WaySamples> {
        let stream = self.stream.clone();
        let (dispatch, combine) = (|| exchange.dispatch(&stream), || exchange.combine(&stream));
        let in_pairs = exchange.in_pairs();
        let whole = || dispatch().and_then(|()| combine());
        let [before_dispatch, before_combine] = match in_pairs {
            true => [Front::Behind(&whole), Front::Behind(&dispatch)],
            false => [Front::EmptiedCaches; 2],
        };
        let calls =
            [self.isolated(before_dispatch, |_| dispatch())?, self.isolated(before_combine, |_| combine())?];
        let back_to_back = match in_pairs {
            true => [None; 2],
            false => [Some(self.back_to_back(|_| dispatch())?), Some(self.back_to_back(|_| combine())?)],
        };
        let names = [PhaseName::DispatchCached, PhaseName::CombineInPool];
        let phases = names
            .into_iter()
            .zip(calls)
            .zip(back_to_back)
            .map(|((name, calls), back_to_back)| PhaseTimes { back_to_back, ..PhaseTimes::new(name, calls) });
        let pairs = |_: &mut Self| (0..CHAIN).try_for_each(|_| whole());
        let pair = self.chains(Front::Held, self.plan.repetitions(), CHAIN, pairs)?;
        exchange.check()?;
        // No rank frees memory that another rank may still access.
        self.settle(way)?;
        Ok(WaySamples { way, phases: phases.collect(), pair, link_bytes: exchange.link_bytes() })
    }
}

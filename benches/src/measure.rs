//! One rank's part of a benchmark: check that the results are right, then time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use epoxide::Result;
use epoxide::driver::Device;
use epoxide::group::ProcessGroup;
use epoxide::internal::driver::shipped_ptx;

use crate::measured::RankResult;
use crate::results::seconds_since_1970;
use crate::versions::{NcclVersion, Versions};
use crate::{Baseline, Plan, high_throughput, low_latency};

/// Receives the progress of a measurement, from every rank of this process that measures.
pub trait Watch: Sync {
    /// Rank `rank` begins with this.
    fn doing(&self, rank: u32, what: &str) {
        let _ = (rank, what);
    }

    /// Rank `rank` has done one more of the measurement's steps.
    fn step(&self, rank: u32) {
        let _ = rank;
    }
}

/// No progress reports.
impl Watch for () {}

/// Counts the steps of rank 0, for tests.
#[derive(Default)]
pub struct Counted(AtomicU64);

impl Counted {
    /// The count so far.
    pub fn of_rank_0(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Watch for Counted {
    fn step(&self, rank: u32) {
        self.0.fetch_add(u64::from(rank == 0), Ordering::Relaxed);
    }
}

/// All runs of rank `group.rank()`, one after the other. Collective.
pub fn runs(
    plan: &Plan,
    device: &Device,
    group: &Arc<dyn ProcessGroup>,
    watch: &dyn Watch,
) -> Result<Vec<RankResult>> {
    (0..plan.repeat).map(|_| rank(plan, device.clone(), group, watch)).collect()
}

/// One run of rank `group.rank()`, with a buffer and rows of its own. Collective.
pub fn rank(
    plan: &Plan,
    device: Device,
    group: &Arc<dyn ProcessGroup>,
    watch: &dyn Watch,
) -> Result<RankResult> {
    let info = device.info();
    let mut result = RankResult {
        kernels: Versions::of_ptx(&shipped_ptx(plan.ptx.as_deref())?, info.is_virtual),
        nccl: plan.baseline.map(|Baseline::Nccl| NcclVersion::found()).transpose()?,
        started: seconds_since_1970(),
        device: info.name.clone(),
        is_virtual: info.is_virtual,
        driver_version: info.driver_version,
        ..RankResult::default()
    };
    watch.doing(group.rank(), "making the buffer");
    match plan.low_latency {
        Some(low) => low_latency::measure(plan, low, &device, group, watch, &mut result)?,
        None => high_throughput::measure(plan, &device, group, watch, &mut result)?,
    }
    // After the buffer: sizes without room in memory have a routing that takes minutes to draw.
    result.topk_idx = plan.routing(group.rank());
    Ok(result)
}

/// Makes a buffer, on all ranks at once, and records its time and memory.
pub(crate) fn made<B>(
    device: &Device,
    group: &Arc<dyn ProcessGroup>,
    result: &mut RankResult,
    make: impl FnOnce() -> Result<B>,
) -> Result<B> {
    group.barrier(group.timeout())?;
    let free_before = device.free_memory()?;
    let start = Instant::now();
    let buffer = make()?;
    result.setup_ms = result.setup_ms.max(start.elapsed().as_secs_f64() * 1e3);
    result.device_bytes = result.device_bytes.max(free_before.saturating_sub(device.free_memory()?));
    Ok(buffer)
}

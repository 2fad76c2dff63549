//! Where the ranks of a benchmark run.

use std::sync::Arc;

use epoxide::driver::Device;
use epoxide::driver::virt::{Time, VirtConfig, VirtualGpu};
use epoxide::group::run_threads;
use epoxide::group::{Member, ProcessGroup, Rendezvous};
use epoxide_bench::measured::RankResult;
use epoxide_bench::results::Point;
use epoxide_bench::{Plan, TIMEOUT, Watch, measure, points};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::Result;
use crate::options::{DeviceKind, Topology};
use crate::output;
use crate::ranks::{self, Groups};

/// Runs `main` on all ranks of a topology, each with its device; the results in rank order. The
/// ranks are threads of this process or, where a launcher started it as one of them, processes.
pub fn on_ranks<T: Clone + Send + Serialize + DeserializeOwned>(
    topology: Topology,
    device: DeviceKind,
    main: impl Fn(Device, &Arc<dyn ProcessGroup>) -> epoxide::Result<T> + Sync,
) -> Result<Vec<T>> {
    if Member::detect()?.is_none() {
        return run_threads(topology.ranks(), TIMEOUT, |rank, group| main(open(device, rank)?, &group))
            .map_err(|failure| epoxide_bench::Error::from(failure.error).into());
    }
    let meeting = Rendezvous::from_env(TIMEOUT)?;
    let groups = Groups::of_processes(&meeting, "bench", TIMEOUT, TIMEOUT * 2)?;
    let (rank, local_rank) = (groups.work.rank(), meeting.member.local_rank);
    let outcome = open(device, local_rank.unwrap_or(rank)).and_then(|device| main(device, &groups.work));
    let own = outcome.as_ref().ok().cloned();
    let outcome = outcome.map_err(|error| epoxide_bench::Error::from(error).into());
    let mut results = groups.gather(outcome).map_err(|error| ranks::reported_by(error, rank))?;
    // Traces do not travel: each process has its own.
    if let (Some(own), Some(place)) = (own, results.get_mut(rank as usize)) {
        *place = own;
    }
    Ok(results)
}

/// Measures all plans of one group of ranks. Returns the points, and each rank's results in the
/// first run of the first plan, with the traced calls of all plans.
pub fn measure_points(plans: &[Plan], watch: &dyn Watch) -> Result<(Vec<Point>, Vec<RankResult>)> {
    plans.iter().try_for_each(Plan::check)?;
    let Some(first) = plans.first() else { return Ok((Vec::new(), Vec::new())) };
    let ranks = on_ranks(first.topology, device_of(first), |device, group| {
        let runs = plans.iter().map(|plan| measure::runs(plan, &device, group, watch));
        runs.collect::<epoxide::Result<Vec<_>>>()
    })?;
    let mut ranks: Vec<_> = ranks.into_iter().map(Vec::into_iter).collect();
    let (mut all, mut results): (Vec<Point>, Vec<RankResult>) = (Vec::new(), Vec::new());
    for plan in plans {
        let runs = ranks.iter_mut().filter_map(Iterator::next).collect();
        let (points, of_ranks) = points::of_runs(plan, runs)?;
        all.extend(points);
        for (rank, more) in results.iter_mut().zip(&of_ranks) {
            rank.traced.extend_from_slice(&more.traced);
        }
        if results.is_empty() {
            results = of_ranks;
        }
    }
    Ok((all, results))
}

/// Which GPUs a plan is for.
pub fn device_of(plan: &Plan) -> DeviceKind {
    if plan.is_virtual { DeviceKind::Virtual } else { DeviceKind::Cuda }
}

/// Prints the estimated needs of one group's plans before they begin; `open`: sizes were left to
/// the command.
pub fn announce(plans: &[Plan], open: bool) {
    let Some(plan) = plans.first().filter(|_| ranks::prints()) else { return };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let mut estimate = plan.estimate(processors);
    for more in plans[1..].iter().map(|plan| plan.estimate(processors)) {
        estimate.device_bytes = estimate.device_bytes.max(more.device_bytes);
        estimate.host_bytes = estimate.host_bytes.max(more.host_bytes);
        estimate.seconds = estimate.seconds.zip(more.seconds).map(|(a, b)| a + b);
    }
    let gigabytes = |bytes: f64| format!("{:.1} GB", (bytes / 1e9).max(0.1));
    let tokens: Vec<String> = plans.iter().map(|plan| plan.tokens.to_string()).collect();
    let mut text = format!(
        "bench: {}{} ranks, {} tokens of {} elements each, {} of {} experts: ",
        if plan.low_latency.is_some() { "low latency, " } else { "" },
        plan.topology.ranks(),
        tokens.join(", "),
        plan.hidden,
        plan.topk,
        plan.experts
    );
    text += &match estimate.seconds {
        None => format!("about {} on each GPU", gigabytes(estimate.device_bytes)),
        Some(seconds) => {
            format!("about {} and {}", output::duration(seconds), gigabytes(estimate.host_bytes))
        }
    };
    if let Some(left) = output::memory_left().filter(|left| plan.is_virtual && *left < estimate.host_bytes) {
        text += &format!(", but {} are left on this machine", gigabytes(left));
    }
    if open && plan.is_virtual {
        text += "; sizes for an interpreter, --tokens, --hidden and others give your own";
    }
    output::complain(&text);
}

/// The number of ranks that a launcher started, and of those on this host; `None` without a
/// launcher.
pub fn launched() -> Result<Option<(u32, Option<u32>)>> {
    Ok(Member::detect()?.map(|member| (member.size, member.local_size)))
}

pub fn open(device: DeviceKind, rank: u32) -> epoxide::Result<Device> {
    match device {
        DeviceKind::Virtual => {
            // Benchmarks and traces show real time.
            let config = VirtConfig { ordinal: rank, time: Time::Real, ..VirtConfig::default() };
            Ok(VirtualGpu::new(config))
        }
        DeviceKind::Cuda => open_cuda(rank),
    }
}

#[cfg(feature = "cuda")]
fn open_cuda(rank: u32) -> epoxide::Result<Device> {
    epoxide::driver::cuda::CudaDevice::open(rank)
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(_rank: u32) -> epoxide::Result<Device> {
    Err(epoxide::Error::Unavailable {
        what: "--device cuda".into(),
        reason: "this binary was built without it; build with --features cuda".into(),
    })
}

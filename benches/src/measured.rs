//! Measurements of one rank.

use std::time::Instant;

use epoxide::internal::TracedLaunch;
use epoxide::internal::transport::PutTrace;
use epoxide_gpu::layout::BlockTrace;
use serde::{Deserialize, Serialize};

use crate::counts::RankCounts;
use crate::results::{PhaseName, Way};
use crate::versions::{NcclVersion, Versions};

/// One traced call.
#[derive(Debug, Clone)]
pub struct TracedCall {
    /// The phase.
    pub phase: PhaseName,
    /// Multiprocessors.
    pub num_sms: u32,
    /// Tokens per rank.
    pub tokens: u32,
    /// The launch of the barrier before it; missing in low latency, which has none.
    pub barrier: Option<TracedLaunch>,
    /// Its own launches, in order.
    pub launches: Vec<TracedLaunch>,
    /// Puts of the proxies meanwhile.
    pub puts: Vec<PutTrace>,
    /// Before the barrier was enqueued, and after the device had ended all.
    pub host: (Instant, Instant),
}

/// Microseconds of every timed iteration.
pub type Samples = Vec<f64>;

/// One rank's times for one number of multiprocessors.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Times {
    /// Multiprocessors.
    pub num_sms: u32,
    /// The phases, in order.
    pub phases: Vec<PhaseTimes>,
    /// Pairs one after the other, the time of one; empty if [`Plan::pairs`](crate::Plan::pairs) is
    /// `None`.
    pub pair: Samples,
    /// Uncached dispatch with exact counts, by the host's clock: the call until it returns. Empty
    /// in low latency.
    pub exact_dispatch_returns: Samples,
    /// The links' own speed in GB/s with as many blocks: (push, pull).
    pub ceiling: Option<(f64, f64)>,
    /// GB/s that a copy within the device's memory reads and writes, where rows come by expert.
    pub memory_ceiling: Option<f64>,
    /// GB/s that as many multiprocessors store in the device's memory, where rows come by expert
    /// within one node.
    pub store_ceiling: Option<f64>,
    /// Replays of captured steps; empty if none were requested.
    pub replays: Vec<ReplayTimes>,
}

/// One rank's times of a phase.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PhaseTimes {
    /// The phase.
    pub name: PhaseName,
    /// Whole calls, each by itself between two events.
    pub calls: Samples,
    /// Calls back to back, mean per call; missing where they are not timed so.
    pub back_to_back: Option<f64>,
    /// Puts of the proxies in all calls; none of phases that take turns.
    pub wire: WireCount,
    /// Times in the kernels, of traced calls apart.
    pub kernels: KernelTimes,
}

impl PhaseTimes {
    /// Times of calls by themselves alone.
    pub(crate) fn new(name: PhaseName, calls: Samples) -> PhaseTimes {
        let (wire, kernels) = (WireCount::default(), KernelTimes::default());
        PhaseTimes { name, calls, back_to_back: None, wire, kernels }
    }
}

/// One rank's traced calls of a phase: the time from the start of the first block until the last
/// one reaches a point.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct KernelTimes {
    /// Has sent its rows.
    pub sent: Samples,
    /// Has read that all ranks have entered the operation.
    pub entered: Samples,
    /// Is done.
    pub done: Samples,
}

impl KernelTimes {
    /// Adds a call.
    pub(crate) fn add(&mut self, launches: &[TracedLaunch]) {
        let blocks = || launches.iter().flat_map(|launch| &launch.blocks);
        let start = blocks().map(|block| block.enter).min().unwrap_or(0);
        let latest = |of: fn(&BlockTrace) -> u64| {
            blocks().map(of).max().unwrap_or(0).saturating_sub(start) as f64 / 1e3
        };
        self.sent.push(latest(|block| block.moved));
        self.entered.push(latest(|block| block.ready));
        self.done.push(latest(|block| block.done));
    }
}

/// One rank's replays of one step.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ReplayTimes {
    /// The calls that were captured together.
    pub calls: Vec<PhaseName>,
    /// Replays of a chain.
    pub chain: u32,
    /// Each replay by itself.
    pub alone: Samples,
    /// Likewise, with L2 emptied before; missing if nothing empties it.
    pub flushed: Option<Samples>,
    /// Chains of replays, the time of one.
    pub chained: Samples,
}

impl Times {
    /// Times of a phase.
    pub fn phase(&self, name: PhaseName) -> Option<&PhaseTimes> {
        self.phases.iter().find(|phase| phase.name == name)
    }

    /// The same, to be changed.
    pub fn phase_mut(&mut self, name: PhaseName) -> Option<&mut PhaseTimes> {
        self.phases.iter_mut().find(|phase| phase.name == name)
    }
}

/// Puts of a rank's proxies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireCount {
    /// Bytes.
    pub bytes: u64,
    /// Puts that carried bytes.
    pub puts: u64,
}

/// Measurements of one rank for one way.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WaySamples {
    /// The way.
    pub way: Way,
    /// Its dispatch and its combine.
    pub phases: Vec<PhaseTimes>,
    /// Pairs one after the other, the time of one.
    pub pair: Samples,
    /// Bytes that others send this rank in a dispatch and in a combine, at the least.
    pub link_bytes: (u64, u64),
}

/// Everything that one rank measured.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RankResult {
    /// The measured program and kernels.
    pub kernels: Versions,
    /// The NCCL of the baselines.
    pub nccl: Option<NcclVersion>,
    /// When the run began, in seconds since 1970.
    pub started: f64,
    /// The device's name.
    pub device: String,
    /// True for the virtual GPU.
    pub is_virtual: bool,
    /// CUDA version of the driver.
    pub driver_version: u32,
    /// Milliseconds that the buffer took, on the host's clock.
    pub setup_ms: f64,
    /// Bytes of the pool.
    pub pool_bytes: u64,
    /// Bytes of wire memory.
    pub wire_bytes: u64,
    /// Bytes of the count messages that an uncached dispatch puts on the wire.
    pub message_bytes: u64,
    /// Device bytes in use by all of the buffer.
    pub device_bytes: u64,
    /// The routing that this rank drew.
    pub topk_idx: Vec<i64>,
    /// Tokens of a dispatch, as the device's handle has them.
    pub counts: RankCounts,
    /// Whether the ranks of several nodes were one node to the buffer, as all their memory is
    /// mapped.
    pub is_joined: bool,
    /// Whether rows for other nodes are sent over NVLink too: their wire memory is mapped, and
    /// nothing is put.
    pub mapped: bool,
    /// Whether proxies put rows for other nodes. If not, kernels store them.
    pub has_queues: bool,
    /// Times of the transport alone for the rows of each phase, in microseconds; empty if all peers
    /// are mapped.
    pub transport_us: Vec<(PhaseName, f64)>,
    /// Traced calls; of ranks in other processes none.
    #[serde(skip)]
    pub traced: Vec<TracedCall>,
    /// Times of the other ways; empty without a baseline.
    pub others: Vec<WaySamples>,
    /// Times by number of multiprocessors.
    pub times: Vec<Times>,
}

//! Measurements of one rank.

use std::time::Instant;

use epoxide::internal::TracedLaunch;
use epoxide::internal::transport::PutTrace;
use serde::{Deserialize, Serialize};

use crate::counts::RankCounts;
use crate::results::{Kernels, PhaseName, Way};

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

impl TracedCall {
    /// Microseconds from the first block's start to the last block's end.
    pub fn kernel_us(&self) -> f64 {
        let blocks = || self.launches.iter().flat_map(|launch| &launch.blocks);
        let start = blocks().map(|block| block.enter).min().unwrap_or(0);
        let end = blocks().map(|block| block.done).max().unwrap_or(0);
        end.saturating_sub(start) as f64 / 1e3
    }
}

/// Microseconds of every timed iteration.
pub type Samples = Vec<f64>;

/// One rank's times for one number of multiprocessors.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Times {
    /// Multiprocessors.
    pub num_sms: u32,
    /// Cached dispatch: one kernel, the whole call.
    pub dispatch_cached: Samples,
    /// Uncached dispatch without a wait of the host: both kernels.
    pub dispatch_uncached: Samples,
    /// Uncached dispatch with exact counts, as the host's clock sees it: the call until it returns.
    pub dispatch_exact_host: Samples,
    /// Combine of rows that are in the pool: one kernel, the whole call.
    pub combine: Samples,
    /// Combine of rows from elsewhere: copy into the pool and combine.
    pub combine_staged: Samples,
    /// Cached dispatches back to back, mean per call.
    pub dispatch_stream: f64,
    /// Exact-size dispatches back to back, as MSCCL++'s test times them across nodes; 0 within one.
    pub dispatch_exact_stream: f64,
    /// Combines back to back, mean per call.
    pub combine_stream: f64,
    /// The links' own speed in GB/s with as many blocks: (push, pull).
    pub ceiling: Option<(f64, f64)>,
    /// Puts of the proxies in each phase's calls.
    pub wire: Vec<(PhaseName, WireCount)>,
    /// Replays of captured steps; nothing where none were asked for.
    pub replays: Vec<ReplayTimes>,
    /// Pairs one after the other, the time of one: low latency's, else cached dispatch and combine
    /// in the pool where there is a baseline.
    pub pair: Samples,
    /// Times of low latency; empty in the other modes.
    pub low_latency: Vec<(PhaseName, LowLatencyTimes)>,
}

/// One rank's replays of a low-latency operation.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct LowLatencyTimes {
    /// Each replay by itself.
    pub replays: Samples,
    /// Traced kernels until the last block has sent its rows.
    pub sent: Samples,
    /// Until it knows of all ranks.
    pub entered: Samples,
    /// Until it is done.
    pub done: Samples,
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
    /// Likewise, L2 emptied before; missing where nothing empties it.
    pub flushed: Option<Samples>,
    /// Chains of replays, the time of one.
    pub chained: Samples,
}

impl Times {
    /// Times of a low-latency operation.
    pub fn low_latency(&self, name: PhaseName) -> Option<&LowLatencyTimes> {
        self.low_latency.iter().find(|(phase, _)| *phase == name).map(|(_, times)| times)
    }

    /// Puts of the proxies in all calls of a phase.
    pub fn wire_of(&self, name: PhaseName) -> Option<WireCount> {
        self.wire.iter().find(|(phase, _)| *phase == name).map(|(_, count)| *count)
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
    /// Dispatches, each by itself.
    pub dispatch: Samples,
    /// Combines.
    pub combine: Samples,
    /// Dispatches and combines back to back, mean per call; missing where a combine goes with one
    /// dispatch alone.
    pub stream: Option<(f64, f64)>,
    /// Pairs one after the other, the time of one.
    pub pair: Samples,
    /// Bytes that others send this rank in a dispatch and in a combine, at the least.
    pub link_bytes: (u64, u64),
}

/// Everything that one rank measured.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RankResult {
    /// The measured program and kernels.
    pub kernels: Kernels,
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
    /// Whether rows for other nodes go over NVLink too: their wire memory is mapped, and nothing is
    /// put.
    pub mapped: bool,
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

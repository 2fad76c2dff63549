//! Results of a benchmark in their stored form: docs/BENCH-SCHEMA.md describes the JSON form of
//! these types.

use std::path::Path;

use epoxide::internal::{JSON, read_text_file};
use epoxide_gpu::layout::{SlotShape, combine_slot_bytes};
use serde::{Deserialize, Serialize};

use crate::counts::TokenCounts;
use crate::versions::{NcclVersion, Versions};
use crate::{Error, Result, Shapes, version_1};

/// Version of the JSON form. The version grows when a field changes its meaning or is removed, not
/// when one is added.
pub const SCHEMA_VERSION: u32 = 2;
/// The oldest version that is read. Its points of low latency had a form of their own.
const OLDEST_VERSION: u32 = 1;
/// The mode of points whose rows were relayed between nodes.
pub(crate) const INTERNODE: &str = "internode";
/// The mode of low-latency points.
pub const LOW_LATENCY: &str = "low-latency";

/// A results file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`SCHEMA_VERSION`] of the writer.
    pub schema_version: u32,
    /// Program that wrote it.
    pub tool: String,
    /// Further facts about the measurement.
    #[serde(default)]
    pub note: Option<String>,
    /// Measured points.
    pub points: Vec<Point>,
}

/// Everything measured with one set of sizes and one number of multiprocessors.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Version of the form of this line: sweeps write points alone.
    pub schema_version: u32,
    /// `intranode`, `internode` or [`LOW_LATENCY`]: as the buffer ran.
    pub mode: String,
    /// The device's name.
    pub device: String,
    /// True for the virtual GPU: every time is an interpreter's, and no bandwidth is given.
    #[serde(rename = "virtual")]
    pub is_virtual: bool,
    /// Source of the times.
    pub clock: String,
    /// CUDA version of the driver, 1000 * major + 10 * minor; 0 on the virtual GPU.
    pub driver_version: u32,
    /// Day of the measurement, UTC, `YYYY-MM-DD`.
    pub date: String,
    /// The measured program and kernels; missing in files of version 1.
    #[serde(default)]
    pub kernels: Option<Versions>,
    /// The NCCL of the baselines; missing without one, and in older files.
    #[serde(default)]
    pub nccl: Option<NcclVersion>,
    /// Sizes and settings.
    #[serde(flatten)]
    pub key: Key,
    /// Requested launch shapes.
    #[serde(default, rename = "tuning")]
    pub shapes: Shapes,
    /// Settings that are no part of the key; missing in older files.
    #[serde(default)]
    pub settings: Option<Settings>,
    /// Untimed iterations.
    pub warmup: u32,
    /// Timed iterations.
    pub iters: u32,
    /// Milliseconds to make the buffer, of the slowest rank.
    pub setup_ms: f64,
    /// Bytes of a rank's pool.
    pub pool_bytes: u64,
    /// Bytes of a rank's wire memory; 0 within one node.
    #[serde(default)]
    pub wire_bytes: u64,
    /// Device bytes of a rank's whole buffer.
    pub device_bytes: u64,
    /// Digest of the routing (docs/BENCH-SCHEMA.md): points with equal digests measured the same.
    /// Missing in older files.
    #[serde(default)]
    pub routing_digest: Option<String>,
    /// Token counts of a dispatch, means over ranks, as the devices' handles have them; combine's
    /// are swapped.
    pub counts: TokenCounts<f64>,
    /// The same by rank; empty in files converted from older ones.
    pub counts_by_rank: Vec<TokenCounts<u64>>,
    /// Rows per rank received over NVLink: without the rank's own rows and those that it relayed.
    pub remote_rows: f64,
    /// The phases.
    pub phases: Vec<Phase>,
    /// Host's clock: an exact-size dispatch returns after this.
    pub exact_dispatch_returns: Distribution,
    /// Dispatches by expert beside those whose rows are sorted behind them; empty in other points.
    #[serde(default)]
    pub by_expert: Vec<BesideSort>,
    /// Replays of captured steps; empty if none were requested.
    #[serde(default)]
    pub graph: Vec<Replays>,
    /// Cached dispatch and combine in the pool, pair after pair; missing if no baseline was
    /// requested.
    #[serde(default)]
    pub pair: Option<Pairs>,
    /// Times of other ways for the same exchange, NCCL's and low latency; empty without a baseline.
    #[serde(default)]
    pub baselines: Vec<WayResult>,
    /// The runs, whose samples follow each other, as many of each; empty in files of before, whose
    /// points are one run.
    #[serde(default)]
    pub runs: Vec<Run>,
}

/// One run: a buffer and rows of its own, warmed up and timed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// When it began, in seconds since 1970.
    pub started: f64,
}

/// Settings of a point: points with equal keys can be compared.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Key {
    /// Nodes.
    pub nodes: u32,
    /// Ranks.
    pub num_ranks: u32,
    /// Tokens per rank.
    pub tokens: u32,
    /// Elements per row.
    pub hidden: u64,
    /// Experts of all ranks.
    pub experts: u32,
    /// Entries per token.
    pub topk: u32,
    /// Row type of dispatch.
    pub dtype: String,
    /// Seed of the routing.
    pub seed: u64,
    /// Share of entries that select no expert.
    pub masked: f64,
    /// Multiprocessors.
    pub num_sms: u32,
    /// The network between nodes; missing within one.
    #[serde(default)]
    pub transport: Option<String>,
    /// Queues to each peer on another node; likewise.
    #[serde(default)]
    pub queues: Option<u32>,
    /// Rows of a put; likewise.
    #[serde(default)]
    pub rdma_send: Option<u32>,
    /// Low latency: row type of combine; missing in the other modes, as the next six but for rows
    /// by expert and those that are quantised.
    #[serde(default)]
    pub combine_dtype: Option<String>,
    /// Rows that combine takes, as [`ReturnPath::text`](crate::ReturnPath::text) names them;
    /// missing: by expert.
    #[serde(default)]
    pub combine_rows: Option<String>,
    /// Rows are received by expert, in segments that begin at multiples of this; in low latency by
    /// rank as well.
    #[serde(default)]
    pub rows_by_expert: Option<u32>,
    /// High throughput: rows are given as BF16, and are quantised on their way; missing: they are
    /// given as `dtype`.
    #[serde(default)]
    pub quantised: Option<bool>,
    /// Tokens of a rank that are complete together.
    #[serde(default)]
    pub chunk_tokens: Option<u32>,
    /// Most tokens of a rank whose rows return as packets.
    #[serde(default)]
    pub packet_tokens: Option<u32>,
    /// Most tokens of a rank that the buffer was made for; missing: `tokens`.
    #[serde(default)]
    pub max_tokens: Option<u32>,
    /// Microseconds of the kernel behind each call of a chain of pairs; missing: none.
    #[serde(default)]
    pub between_us: Option<u32>,
}

/// Settings of a point that are no part of its [`Key`]. Points that differ in them can be compared,
/// but a sweep does not reuse one for the other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Connections of each queue over tcp, if given.
    pub connections: Option<u32>,
    /// Bytes of the pool, if given.
    pub nvl_bytes: Option<u64>,
    /// Bytes of wire memory, if given.
    pub rdma_bytes: Option<u64>,
    /// MiB written between iterations to empty the L2 cache.
    pub flush_mib: u64,
    /// Whether ceilings were left out.
    pub no_ceiling: bool,
}

impl Key {
    /// An error in a key of a file that was not written by this program.
    fn broken(&self) -> Option<String> {
        let counts = [
            ("nodes", u64::from(self.nodes)),
            ("num_ranks", self.num_ranks.into()),
            ("tokens", self.tokens.into()),
            ("hidden", self.hidden),
            ("experts", self.experts.into()),
            ("topk", self.topk.into()),
        ];
        if let Some((name, _)) = counts.iter().find(|(_, value)| *value == 0) {
            return Some(format!("a point has {name} 0, and must have at least 1"));
        }
        if !self.num_ranks.is_multiple_of(self.nodes) {
            let (ranks, nodes) = (self.num_ranks, self.nodes);
            return Some(format!(
                "a point has num_ranks {ranks}, and must have a multiple of its {nodes} nodes"
            ));
        }
        None
    }

    /// Nodes and their network, for people, without parts that are printed elsewhere; `None` within
    /// one node.
    pub fn network(&self, without_nodes: bool, without_chunk: bool) -> Option<String> {
        let transport = self.transport.clone()?;
        let nodes = (!without_nodes).then(|| format!("{} nodes", self.nodes));
        let queues = self.queues.map(|queues| format!("queues {queues}"));
        let chunk = self.rdma_send.filter(|_| !without_chunk).map(|rows| format!("{rows} rows a put"));
        Some([nodes, Some(transport), queues, chunk].into_iter().flatten().collect::<Vec<_>>().join(", "))
    }
}

/// One phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// Which phase it is.
    pub name: PhaseName,
    /// Bytes of a row on the way, scales included.
    pub row_bytes: u64,
    /// Whole calls, each by itself, L2 emptied before.
    pub call: Distribution,
    /// The same calls, of each iteration the slowest rank; missing in files of before.
    #[serde(default)]
    pub slowest: Option<Slowest>,
    /// Mean time in the kernels, first block's start to last block's end, from their own clock; of
    /// traced calls apart.
    pub kernel_us: Option<f64>,
    /// Calls back to back, as MSCCL++'s test times them: one pair of events around all. Only of the
    /// two phases that it has.
    pub back_to_back: Option<Spread>,
    /// Its traffic on the wire; `null` within one node.
    #[serde(default)]
    pub wire: Option<OnWire>,
    /// Bandwidths; `null` on the virtual GPU and in low latency.
    pub bandwidth: Option<Bandwidth>,
    /// Bytes that the phase moves, for rows by expert in high throughput.
    #[serde(default)]
    pub traffic: Option<Traffic>,
    /// The times within a kernel, in low latency.
    #[serde(default)]
    pub within: Option<Within>,
}

/// Bytes that a call moves for a rank, the least that can be, means over ranks; and their time at
/// the ceilings of the same run. Scales are part of a row. Metadata is not counted, nor are slots
/// between nodes, which [`OnWire`] has.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Traffic {
    /// Over the links: out of a rank in a dispatch, into it in a combine.
    pub link_bytes: f64,
    /// Read in a rank's memory by the dispatch or the combine, of whichever rank.
    pub read_bytes: f64,
    /// Written in a rank's memory by the dispatch or the combine, of whichever rank.
    pub written_bytes: f64,
    /// Read by the copy that follows a dispatch, or precedes a combine; 0 where there is none.
    pub copy_read_bytes: f64,
    /// Written by the copy.
    pub copy_written_bytes: f64,
    /// GB/s that a plain copy within the device's memory reads and writes; missing where not
    /// measured, as on the virtual GPU.
    pub memory_ceiling: Option<f64>,
    /// `link_bytes` at the ceiling of the links; likewise.
    pub link_us: Option<f64>,
    /// `read_bytes` and `written_bytes` at the ceiling of the memory.
    pub memory_us: Option<f64>,
    /// GB/s that the call's number of multiprocessors stores in the device's memory, by the copy
    /// engine: for a dispatch by expert within a node, most of whose stores are local.
    #[serde(default)]
    pub store_ceiling: Option<f64>,
    /// `written_bytes` at that ceiling.
    #[serde(default)]
    pub store_us: Option<f64>,
    /// The copy's bytes at the ceiling of the memory.
    pub copy_us: Option<f64>,
    /// The longest of `link_us`, `memory_us` and `store_us`, and `copy_us`: the copy does not
    /// overlap.
    /// Missing where rows are relayed between nodes, whose time is under `wire`.
    pub ceiling_us: Option<f64>,
    /// `ceiling_us` over the mean call: 1 is the ceiling, 0.91 is 10 % above it.
    pub share: Option<f64>,
}

/// A dispatch by expert beside an ordinary one whose rows are sorted, medians of the slowest rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BesideSort {
    /// The dispatch.
    pub name: PhaseName,
    /// By expert.
    pub by_expert_us: f64,
    /// The ordinary one, and the kernel that copies its rows to their segments.
    pub dispatch_and_sort_us: f64,
}

/// The times at which the last block of a low-latency kernel reaches a point, from the first
/// block's start; of each iteration the slowest rank. Pairs follow each other as single launches,
/// without waits of the host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Within {
    /// The first warp has sent its rows: in a dispatch within a node, another warp waits until they
    /// have arrived.
    pub sent: Slowest,
    /// Has read that all ranks have entered the operation.
    pub entered: Slowest,
    /// Has received all that it waits for, and has summed it.
    pub done: Slowest,
}

impl Within {
    /// Joins these iterations and those of another run.
    fn with(&self, more: &Within) -> Within {
        Within {
            sent: self.sent.with(&more.sent),
            entered: self.entered.with(&more.entered),
            done: self.done.with(&more.done),
        }
    }
}

/// A phase's traffic on the wire for each rank and call, means over ranks, and the time of the
/// transport alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OnWire {
    /// Bytes of a row on the wire, its metadata included.
    pub slot_bytes: u64,
    /// Rows for other nodes.
    pub rows: f64,
    /// Bytes of rows and count messages, as the proxies counted them. They equal the layout's
    /// prediction, or the benchmark fails. 0 where kernels write the other nodes' memory
    /// themselves.
    pub bytes: f64,
    /// Puts that carried bytes.
    pub puts: f64,
    /// The same rows put by host code through rings and proxies of the same transport, in the same
    /// run; host's clock.
    pub transport_us: Option<f64>,
    /// The rows that pass NVLink at its ceiling, with those for other nodes where their memory is
    /// mapped; missing on the virtual GPU.
    pub nvlink_us: Option<f64>,
    /// The mean call over the sum of both, or over the latter if nothing is put; 1 means no
    /// overlap, less means overlap.
    pub share: Option<f64>,
}

/// The phases of a benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PhaseName {
    /// Dispatch along a known routing.
    DispatchCached,
    /// Dispatch with count exchange and metadata.
    DispatchUncached,
    /// Combine of rows that the experts wrote into the pool.
    CombineInPool,
    /// Combine of rows that are copied into the pool first.
    CombineStaged,
    /// Ordinary dispatch along a known routing, and a kernel that copies its rows to their experts'
    /// segments.
    DispatchCachedAndSort,
    /// The same behind a dispatch with count exchange.
    DispatchUncachedAndSort,
    /// Low-latency dispatch: replays of a graph of one.
    LowLatencyDispatch,
    /// The combine that answers it.
    LowLatencyCombine,
}

impl PhaseName {
    /// Those of high throughput, in order.
    pub const HIGH_THROUGHPUT: [PhaseName; 4] = [
        PhaseName::DispatchCached,
        PhaseName::DispatchUncached,
        PhaseName::CombineInPool,
        PhaseName::CombineStaged,
    ];
    /// Those of high throughput with rows by expert.
    pub const BY_EXPERT: [PhaseName; 6] = [
        PhaseName::DispatchCached,
        PhaseName::DispatchUncached,
        PhaseName::CombineInPool,
        PhaseName::CombineStaged,
        PhaseName::DispatchCachedAndSort,
        PhaseName::DispatchUncachedAndSort,
    ];
    /// Those of low latency.
    pub const LOW_LATENCY: [PhaseName; 2] = [PhaseName::LowLatencyDispatch, PhaseName::LowLatencyCombine];

    /// All, in order.
    pub fn all() -> impl Iterator<Item = PhaseName> {
        Self::BY_EXPERT.into_iter().chain(Self::LOW_LATENCY)
    }

    /// Bytes on the wire of a row of `row_bytes`, scales included, with the rest of its slot.
    pub fn slot_bytes(self, row_bytes: u64, topk: u32) -> u64 {
        let row_bytes = row_bytes as u32;
        u64::from(match self {
            PhaseName::DispatchCached | PhaseName::DispatchCachedAndSort => {
                SlotShape::new(row_bytes, 0, None).bytes
            }
            PhaseName::DispatchUncached | PhaseName::DispatchUncachedAndSort => {
                SlotShape::new(row_bytes, 0, Some(topk)).bytes
            }
            PhaseName::CombineInPool | PhaseName::CombineStaged => combine_slot_bytes(row_bytes, 0),
            // Its messages have no slots.
            PhaseName::LowLatencyDispatch | PhaseName::LowLatencyCombine => row_bytes,
        })
    }

    /// The text that people read.
    pub fn text(self) -> &'static str {
        match self {
            PhaseName::DispatchCached => "dispatch cached",
            PhaseName::DispatchUncached => "dispatch uncached",
            PhaseName::CombineInPool => "combine in pool",
            PhaseName::CombineStaged => "combine staged",
            PhaseName::DispatchCachedAndSort => "cached + sort",
            PhaseName::DispatchUncachedAndSort => "uncached + sort",
            PhaseName::LowLatencyDispatch => "dispatch",
            PhaseName::LowLatencyCombine => "combine",
        }
    }

    /// True for dispatches.
    pub fn is_dispatch(self) -> bool {
        use PhaseName::{DispatchCached, DispatchUncached, LowLatencyDispatch};
        matches!(self, DispatchCached | DispatchUncached | LowLatencyDispatch) || self.sorts()
    }

    /// True where a kernel sorts the rows of an ordinary dispatch behind it.
    pub fn sorts(self) -> bool {
        matches!(self, PhaseName::DispatchCachedAndSort | PhaseName::DispatchUncachedAndSort)
    }

    /// True where counts are exchanged in front of the rows.
    pub fn counts(self) -> bool {
        matches!(self, PhaseName::DispatchUncached | PhaseName::DispatchUncachedAndSort)
    }

    /// The same dispatch with a sort behind it.
    fn with_sort(self) -> Option<PhaseName> {
        match self {
            PhaseName::DispatchCached => Some(PhaseName::DispatchCachedAndSort),
            PhaseName::DispatchUncached => Some(PhaseName::DispatchUncachedAndSort),
            _ => None,
        }
    }
}

/// A way to bring tokens to the ranks of their experts and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// Cached dispatch, and combine of rows in the pool.
    HighThroughput,
    /// Low-latency dispatch, and combine of a row for each token.
    LowLatency,
    /// NCCL's sends and receives between all ranks, with counts from the host.
    NcclAllToAll,
    /// NCCL's all-gather of all tokens, and its reduce-scatter of a row for each of them.
    NcclAllGather,
}

impl Way {
    /// All, in order.
    pub const ALL: [Way; 4] = [Way::HighThroughput, Way::LowLatency, Way::NcclAllToAll, Way::NcclAllGather];

    /// The text that people read.
    pub fn text(self) -> &'static str {
        match self {
            Way::HighThroughput => "epoxide high throughput",
            Way::LowLatency => "epoxide low latency",
            Way::NcclAllToAll => "NCCL all-to-all",
            Way::NcclAllGather => "NCCL all-gather + reduce-scatter",
        }
    }

    /// Whether it is epoxide's.
    pub fn is_ours(self) -> bool {
        matches!(self, Way::HighThroughput | Way::LowLatency)
    }
}

/// Microseconds over ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Mean over ranks.
    pub avg_us: f64,
    /// Fastest rank; missing in files converted from older ones.
    pub min_us: Option<f64>,
    /// Slowest rank; likewise.
    pub max_us: Option<f64>,
}

impl Spread {
    /// The spread of one value a rank.
    pub fn new(ranks: &[f64]) -> Spread {
        Spread {
            avg_us: mean(ranks),
            min_us: ranks.iter().copied().reduce(f64::min),
            max_us: ranks.iter().copied().reduce(f64::max),
        }
    }
}

/// A distribution over iterations, in microseconds; an iteration counts as the mean over ranks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    /// Mean.
    pub avg_us: f64,
    /// Mean of the fastest rank.
    pub min_rank_us: f64,
    /// Mean of the slowest rank.
    pub max_rank_us: f64,
    /// Median.
    pub median_us: f64,
    /// 90th percentile, nearest rank; missing in files converted from older ones.
    pub p90_us: Option<f64>,
    /// 99th percentile, nearest rank.
    pub p99_us: f64,
    /// Every iteration, in order; empty in files converted from older ones.
    pub samples_us: Vec<f64>,
}

impl Distribution {
    /// The distribution of every rank's iterations.
    pub fn new(ranks: &[&[f64]]) -> Distribution {
        let iterations = ranks.first().map_or(0, |samples| samples.len());
        let samples: Vec<f64> = (0..iterations)
            .map(|i| ranks.iter().map(|samples| samples[i]).sum::<f64>() / ranks.len() as f64)
            .collect();
        let spread = Spread::new(&ranks.iter().map(|samples| mean(samples)).collect::<Vec<f64>>());
        Distribution {
            avg_us: spread.avg_us,
            min_rank_us: spread.min_us.unwrap_or_default(),
            max_rank_us: spread.max_us.unwrap_or_default(),
            ..Distribution::of(samples)
        }
    }

    /// The distribution of iterations alone.
    pub(crate) fn of(samples_us: Vec<f64>) -> Distribution {
        let avg_us = mean(&samples_us);
        Distribution {
            avg_us,
            min_rank_us: avg_us,
            max_rank_us: avg_us,
            median_us: percentile(&samples_us, 0.5),
            p90_us: Some(percentile(&samples_us, 0.9)),
            p99_us: percentile(&samples_us, 0.99),
            samples_us,
        }
    }

    /// Joins these iterations and those of another run; `of` is the number of earlier runs.
    fn with(&self, more: &Distribution, of: f64) -> Distribution {
        Distribution {
            min_rank_us: joined(self.min_rank_us, more.min_rank_us, of),
            max_rank_us: joined(self.max_rank_us, more.max_rank_us, of),
            ..Distribution::of([&self.samples_us[..], &more.samples_us].concat())
        }
    }
}

/// The mean over runs: of `of` runs, and of one more.
fn joined(mean: f64, more: f64, of: f64) -> f64 {
    (mean * of + more) / (of + 1.0)
}

/// The same of what either may lack.
fn joined_if(mean: Option<f64>, more: Option<f64>, of: f64) -> Option<f64> {
    Some(joined(mean?, more?, of))
}

/// Replays of one step: calls that were captured together as a CUDA graph.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Replays {
    /// The calls, in order.
    pub calls: Vec<PhaseName>,
    /// Replays of a chain.
    pub chain: u32,
    /// Each replay by itself, L2 as it is.
    pub alone: Slowest,
    /// Likewise, with L2 emptied before; `null` if nothing empties it.
    pub flushed: Option<Slowest>,
    /// Chains of replays that follow each other directly, the time of one.
    pub chained: Slowest,
}

impl Replays {
    /// The calls, for people.
    pub fn text(&self) -> String {
        self.calls.iter().map(|call| call.text()).collect::<Vec<_>>().join(" + ")
    }

    /// The ways in which replays were timed, for people, with the times.
    pub fn timings(&self) -> [(String, Option<&Slowest>); 3] {
        [
            ("replay".into(), Some(&self.alone)),
            ("replay, L2 emptied".into(), self.flushed.as_ref()),
            (format!("{} chained replays", self.chain), Some(&self.chained)),
        ]
    }
}

/// A distribution over iterations, in microseconds; an iteration counts as its slowest rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Slowest {
    /// Median, nearest rank.
    pub p50_us: f64,
    /// 90th percentile, nearest rank; missing in files of before.
    #[serde(default)]
    pub p90_us: Option<f64>,
    /// 99th percentile, nearest rank.
    pub p99_us: f64,
    /// Shortest iteration.
    pub min_us: f64,
    /// Mean.
    pub mean_us: f64,
    /// Every iteration, in order.
    pub samples_us: Vec<f64>,
}

impl Slowest {
    /// The slowest rank of each iteration, from every rank's iterations.
    pub fn new(ranks: &[&[f64]]) -> Slowest {
        let iterations = ranks.iter().map(|samples| samples.len()).min().unwrap_or(0);
        let slowest = |at| ranks.iter().map(|samples: &&[f64]| samples[at]).fold(f64::NEG_INFINITY, f64::max);
        Slowest::of((0..iterations).map(slowest).collect())
    }

    fn of(samples: Vec<f64>) -> Slowest {
        Slowest {
            p50_us: percentile(&samples, 0.5),
            p90_us: Some(percentile(&samples, 0.9)),
            p99_us: percentile(&samples, 0.99),
            min_us: percentile(&samples, 0.0),
            mean_us: mean(&samples),
            samples_us: samples,
        }
    }

    /// Joins these iterations and those of another run.
    pub(crate) fn with(&self, more: &Slowest) -> Slowest {
        Slowest::of([&self.samples_us[..], &more.samples_us].concat())
    }
}

/// Times of one way, apart from the point's own, [`Way::HighThroughput`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WayResult {
    /// The way.
    pub way: Way,
    /// Tokens to their experts' ranks; bandwidths are of the rows that epoxide counts, for every
    /// way.
    pub dispatch: Phase,
    /// And back.
    pub combine: Phase,
    /// Both, one pair after the other.
    pub pair: Pairs,
    /// Least bytes that others send a rank in a dispatch, mean over ranks: the bytes that the way
    /// has to move, not its useful ones.
    pub dispatch_link_bytes: f64,
    /// The same of a combine.
    pub combine_link_bytes: f64,
}

/// Pairs of a dispatch and a combine, one after the other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pairs {
    /// Pairs between the two events.
    pub chain: u32,
    /// The time between them over the number of pairs.
    pub period: Slowest,
}

/// Bandwidths of one phase in GB/s (1e9 bytes), per rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Bandwidth {
    /// Over the links only: own rows left out, and slots for other nodes included where those are
    /// mapped.
    pub links: f64,
    /// Bandwidth of plain bulk copies with as many blocks over the same links, if measured.
    pub link_ceiling: Option<f64>,
    /// Over the wire, metadata included; missing within one node, and where nodes are mapped.
    #[serde(default)]
    pub wire: Option<f64>,
    /// Bandwidth of the transport alone with the same rows.
    #[serde(default)]
    pub wire_ceiling: Option<f64>,
    /// As DeepEP counts: received rows, own included.
    pub deepep: f64,
    /// As NCCL EP counts: the six metrics at the mean call.
    pub nccl_ep: TokenCounts<f64>,
    /// As MSCCL++'s test counts, at its own timing; only of the two phases that it has.
    #[serde(rename = "seed")]
    pub mscclpp: Option<MscclppBandwidth>,
}

/// The bandwidths that MSCCL++'s test prints, in GB/s.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MscclppBandwidth {
    /// Input bytes over the mean time.
    pub per_rank: f64,
    /// `per_rank` times the ranks.
    pub aggregate: f64,
    /// The six metrics.
    pub six: TokenCounts<f64>,
}

impl Point {
    /// The phase, if the point has it.
    pub fn phase(&self, name: PhaseName) -> Option<&Phase> {
        self.phases.iter().find(|phase| phase.name == name)
    }

    /// Each dispatch by expert beside the one with a sort that was measured with it.
    pub(crate) fn beside_sort(&self) -> Vec<BesideSort> {
        let median = |name: PhaseName| Some(self.phase(name)?.slowest.as_ref()?.p50_us);
        let beside = |phase: &Phase| {
            Some(BesideSort {
                name: phase.name,
                by_expert_us: median(phase.name)?,
                dispatch_and_sort_us: median(phase.name.with_sort()?)?,
            })
        };
        self.phases.iter().filter_map(beside).collect()
    }

    /// Adds another run of the same measurement.
    pub fn add_runs(&mut self, more: Point) {
        let of = self.runs.len().max(1) as f64;
        for (phase, more) in self.phases.iter_mut().zip(&more.phases) {
            phase.add_run(more, of);
        }
        self.by_expert = self.beside_sort();
        for (step, more) in self.graph.iter_mut().zip(&more.graph) {
            step.alone = step.alone.with(&more.alone);
            step.chained = step.chained.with(&more.chained);
            step.flushed = step.flushed.as_ref().zip(more.flushed.as_ref()).map(|(a, b)| a.with(b));
        }
        self.pair = self.pair.as_ref().zip(more.pair.as_ref()).map(|(a, b)| a.with(b));
        for (way, more) in self.baselines.iter_mut().zip(&more.baselines) {
            way.add_run(more, of);
        }
        self.exact_dispatch_returns = self.exact_dispatch_returns.with(&more.exact_dispatch_returns, of);
        self.setup_ms = self.setup_ms.max(more.setup_ms);
        self.device_bytes = self.device_bytes.max(more.device_bytes);
        self.runs.extend(more.runs);
    }

    /// Source of the times.
    pub(crate) fn clock_of(is_virtual: bool) -> &'static str {
        if is_virtual { "virtual GPU: time of an interpreter" } else { "CUDA events" }
    }

    /// Whether high throughput relayed rows between nodes. Nodes whose ranks are all mapped are one
    /// to the buffer.
    pub fn is_internode(&self) -> bool {
        self.mode == INTERNODE
    }

    /// Whether the L2 cache was emptied before each call of high throughput.
    pub fn empties_caches(&self) -> bool {
        // Files without settings are of runs that emptied it.
        !self.is_virtual && self.settings.is_none_or(|settings| settings.flush_mib > 0)
    }

    /// Whether it is of low latency.
    pub fn is_low_latency(&self) -> bool {
        self.mode == LOW_LATENCY
    }

    /// The kernels, for people. Files of version 1 have only the day.
    pub fn kernels_text(&self) -> String {
        self.kernels.as_ref().map_or_else(|| format!("unknown, of {}", self.date), Versions::text)
    }

    /// Note for every figure and drawing of the point, if the times are not hardware's.
    pub fn caveat(&self) -> &'static str {
        if self.is_virtual { "VIRTUAL GPU: interpreter times, of no hardware" } else { "" }
    }
}

impl Phase {
    /// Adds another run; `of` is how many there are already. Bytes are the same in every run, so
    /// bandwidths follow the mean times.
    pub(crate) fn add_run(&mut self, more: &Phase, of: f64) {
        let before = (self.call.avg_us, self.back_to_back.map(|spread| spread.avg_us));
        self.call = self.call.with(&more.call, of);
        self.slowest = self.slowest.as_ref().zip(more.slowest.as_ref()).map(|(a, b)| a.with(b));
        self.kernel_us = joined_if(self.kernel_us, more.kernel_us, of);
        self.within = self.within.as_ref().zip(more.within.as_ref()).map(|(a, b)| a.with(b));
        self.back_to_back = self.back_to_back.zip(more.back_to_back).map(|(a, b)| Spread {
            avg_us: joined(a.avg_us, b.avg_us, of),
            min_us: joined_if(a.min_us, b.min_us, of),
            max_us: joined_if(a.max_us, b.max_us, of),
        });
        let call = before.0 / self.call.avg_us;
        let back_to_back = before.1.zip(self.back_to_back).map(|(before, now)| before / now.avg_us);
        if let Some((wire, more)) = self.wire.as_mut().zip(more.wire.as_ref()) {
            wire.transport_us = joined_if(wire.transport_us, more.transport_us, of);
            wire.nvlink_us = joined_if(wire.nvlink_us, more.nvlink_us, of);
            wire.share = joined_if(wire.share, more.share, of);
            wire.puts = joined(wire.puts, more.puts, of);
        }
        if let Some((traffic, more)) = self.traffic.as_mut().zip(more.traffic.as_ref()) {
            traffic.memory_ceiling = joined_if(traffic.memory_ceiling, more.memory_ceiling, of);
            traffic.link_us = joined_if(traffic.link_us, more.link_us, of);
            traffic.memory_us = joined_if(traffic.memory_us, more.memory_us, of);
            traffic.store_ceiling = joined_if(traffic.store_ceiling, more.store_ceiling, of);
            traffic.store_us = joined_if(traffic.store_us, more.store_us, of);
            traffic.copy_us = joined_if(traffic.copy_us, more.copy_us, of);
            traffic.ceiling_us = joined_if(traffic.ceiling_us, more.ceiling_us, of);
            traffic.share = joined_if(traffic.share, more.share, of);
        }
        if let Some((bandwidth, more)) = self.bandwidth.as_mut().zip(more.bandwidth.as_ref()) {
            bandwidth.links *= call;
            bandwidth.deepep *= call;
            bandwidth.wire = bandwidth.wire.map(|wire| wire * call);
            bandwidth.nccl_ep = bandwidth.nccl_ep.map(|gbps| gbps * call);
            bandwidth.link_ceiling = joined_if(bandwidth.link_ceiling, more.link_ceiling, of);
            bandwidth.wire_ceiling = joined_if(bandwidth.wire_ceiling, more.wire_ceiling, of);
            bandwidth.mscclpp = bandwidth.mscclpp.zip(back_to_back).map(|(test, by)| MscclppBandwidth {
                per_rank: test.per_rank * by,
                aggregate: test.aggregate * by,
                six: test.six.map(|gbps| gbps * by),
            });
        }
    }
}

impl Pairs {
    /// These and those of another run.
    pub(crate) fn with(&self, more: &Pairs) -> Pairs {
        Pairs { chain: self.chain, period: self.period.with(&more.period) }
    }
}

impl WayResult {
    /// Its dispatch or its combine, if that is compared with this phase of the point itself.
    pub fn phase(&self, name: PhaseName) -> Option<&Phase> {
        [&self.dispatch, &self.combine].into_iter().find(|phase| phase.name == name)
    }

    /// Adds another run; `of` is how many there are already.
    pub(crate) fn add_run(&mut self, more: &WayResult, of: f64) {
        self.dispatch.add_run(&more.dispatch, of);
        self.combine.add_run(&more.combine, of);
        self.pair = self.pair.with(&more.pair);
    }
}

impl Results {
    /// A file of this program.
    pub fn new(points: Vec<Point>) -> Results {
        let tool = concat!("epoxide ", env!("CARGO_PKG_VERSION")).to_owned();
        Results { schema_version: SCHEMA_VERSION, tool, note: None, points }
    }

    /// Reads a results file, or the JSON lines of a sweep.
    pub fn read(path: &Path) -> Result<Results> {
        let text = read_text_file(path, JSON)
            .map_err(|error| Error::Usage(format!("{}: {error}", path.display())))?;
        Results::of_text(&text).map_err(|why| Error::Usage(format!("{}: {why}", path.display())))
    }

    /// The results that a text holds, or why it holds none.
    pub fn of_text(text: &str) -> std::result::Result<Results, String> {
        let points = values_of(text)?.into_iter().map(point_of);
        let points = points.collect::<std::result::Result<Vec<Point>, String>>()?;
        if let Some(why) = points.iter().find_map(|point| point.key.broken()) {
            return Err(format!("not a results file: {why}"));
        }
        Ok(Results::new(points))
    }

    /// Parses bytes as results, which are refused with a reason, or are the same when written and
    /// read again. For the fuzz target.
    ///
    /// # Panics
    /// The rule above does not hold.
    pub fn fuzz(bytes: &[u8]) {
        match Results::of_text(&String::from_utf8_lossy(bytes)) {
            Ok(results) => {
                let again = results.json().map(|text| Results::of_text(&text));
                assert!(matches!(&again, Ok(Ok(again)) if *again == results), "{results:?}, then {again:?}");
            }
            Err(reason) => assert!(!reason.is_empty()),
        }
    }

    /// Parses bytes as results and does with them what the command does with files: compares them,
    /// and holds them against the model. Either gives a text or a reason. For the fuzz target.
    pub fn fuzz_uses(bytes: &[u8]) {
        let Ok(results) = Results::of_text(&String::from_utf8_lossy(bytes)) else { return };
        if let Ok(comparison) = crate::compare::compare(&results.points, &results.points, 0.01) {
            assert!(!comparison.text().is_empty());
            let _ = comparison.slower_by(0.01);
        }
        let machine = crate::model::Machine::h200(50.0, 5.0);
        let _ = crate::model::check_text(&crate::model::check(&results.points, &machine), &results.points);
        let _ = machine.with_ceilings_of(&results.points);
    }

    /// The results as JSON.
    ///
    /// # Errors
    /// Where a figure has no JSON form.
    pub fn json(&self) -> Result<String> {
        json_of(self)
    }
}

/// A file of results as JSON.
pub(crate) fn json_of(results: &impl Serialize) -> Result<String> {
    serde_json::to_string_pretty(results).map_err(|error| Error::Failed(format!("JSON: {error}")))
}

/// The point that a value holds, in the form of this version.
fn point_of(value: serde_json::Value) -> std::result::Result<Point, String> {
    let broken = |error: serde_json::Error| format!("not a results file: {error}");
    let is = |name: &str, wanted: &serde_json::Value| value.get(name) == Some(wanted);
    if is("mode", &LOW_LATENCY.into()) && is("schema_version", &OLDEST_VERSION.into()) {
        return version_1::point_of(value).map_err(broken);
    }
    let point: Point = serde_json::from_value(value).map_err(broken)?;
    Ok(Point { schema_version: SCHEMA_VERSION, ..point })
}

/// The values of points that a text holds, or why it holds none.
fn values_of(text: &str) -> std::result::Result<Vec<serde_json::Value>, String> {
    #[derive(Deserialize)]
    struct Versioned {
        schema_version: u32,
    }
    #[derive(Deserialize)]
    struct File {
        points: Vec<serde_json::Value>,
    }
    let broken = |error: serde_json::Error| format!("not a results file: {error}");
    // A results file is one value, a sweep's are many: both are a stream.
    let mut points = Vec::new();
    for value in serde_json::Deserializer::from_str(text).into_iter::<serde_json::Value>() {
        let value = value.map_err(broken)?;
        let Ok(Versioned { schema_version }) = serde_json::from_value(value.clone()) else {
            return Err("has no schema_version: not a results file".into());
        };
        if !(OLDEST_VERSION..=SCHEMA_VERSION).contains(&schema_version) {
            return Err(format!(
                "schema_version {schema_version}; this epoxide reads {OLDEST_VERSION} and {SCHEMA_VERSION} (docs/BENCH-SCHEMA.md)"
            ));
        }
        match value.get("points").is_some() {
            true => points.extend(serde_json::from_value::<File>(value).map_err(broken)?.points),
            false => points.push(value),
        }
    }
    if points.is_empty() { Err("holds no points".into()) } else { Ok(points) }
}

/// Now, in seconds since 1970.
pub fn seconds_since_1970() -> f64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0.0, |since| since.as_secs_f64())
}

/// The mean; 0 of nothing.
pub fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// The nearest-rank percentile `q` of 0 to 1; 0 of nothing.
pub fn percentile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (q * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// GB/s (1e9 bytes) of `bytes` in `us` microseconds.
pub fn gbps(bytes: f64, us: f64) -> f64 {
    bytes / us / 1e3
}

/// Today, UTC, `YYYY-MM-DD`.
pub fn today() -> String {
    let (year, month, day) = civil(seconds_since_1970() as u64 / 86_400);
    format!("{year:04}-{month:02}-{day:02}")
}

/// The date of a day since 1970-01-01 (Hinnant's algorithm, for days from then on).
fn civil(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let (era, of_era) = (z / 146_097, z % 146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year + era * 400 + u64::from(month <= 2), month, day)
}

/// The points of `benches/data/h200.json`, which is part of the program: the seeded fuzz runs need
/// no checkout.
#[cfg(test)]
pub fn committed_points() -> Vec<Point> {
    Results::of_text(include_str!("../data/h200.json")).unwrap().points
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(11_016), (2000, 2, 29));
        assert_eq!(civil(20_777), (2026, 11, 20));
    }

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let values: Vec<f64> = (1..=20).rev().map(f64::from).collect();
        assert_eq!([0.5, 0.9, 0.99, 1.0].map(|q| percentile(&values, q)), [10.0, 18.0, 20.0, 20.0]);
        assert_eq!(percentile(&[7.0], 0.5), 7.0);
        let two = Distribution::new(&[&[1.0, 3.0], &[3.0, 9.0]]);
        assert_eq!(two.samples_us, [2.0, 6.0]);
        assert_eq!((two.avg_us, two.min_rank_us, two.max_rank_us), (4.0, 2.0, 6.0));
        let slowest = Slowest::new(&[&[1.0, 9.0, 2.0], &[3.0, 3.0, 1.0]]);
        assert_eq!(slowest.samples_us, [3.0, 9.0, 2.0]);
        assert_eq!([slowest.min_us, slowest.p50_us, slowest.p99_us], [2.0, 3.0, 9.0]);
        assert_eq!(slowest.mean_us, 14.0 / 3.0);
        // Pairs without what stands between their calls.
        assert_eq!(Slowest::new(&[&[-2.0], &[-1.0]]).samples_us, [-1.0]);
    }

    #[test]
    fn malformed_results_do_not_panic() {
        let points = committed_points();
        let few = Results { note: Some("two".to_owned()), ..Results::new(points[..2].to_vec()) };
        let mut lines: Vec<Vec<u8>> =
            points.iter().step_by(7).take(3).map(|point| serde_json::to_vec(point).unwrap()).collect();
        lines.push(few.json().unwrap().into_bytes());
        epoxide_testing::fuzz::run("results", 5_000, &lines, Results::fuzz);
    }

    #[test]
    fn uses_of_malformed_results_do_not_panic() {
        let points = committed_points();
        let lines: Vec<Vec<u8>> =
            points.iter().step_by(5).take(4).map(|point| serde_json::to_vec(point).unwrap()).collect();
        epoxide_testing::fuzz::run("uses of results", 10_000, &lines, Results::fuzz_uses);
    }

    #[test]
    fn files_that_are_not_results_are_named_as_such() {
        for (text, part) in [
            ("", "no points"),
            ("{}", "no schema_version"),
            ("{\"schema_version\": 99}", "schema_version 99"),
            ("{\"schema_version\": 1, \"points\": 3}", "not a results file"),
            ("nonsense", "not a results file"),
        ] {
            let error = Results::of_text(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
        // Quantities derived from a point divide by these.
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/data/h200.json");
        let results = Results::read(Path::new(path)).unwrap();
        for (change, part) in [
            ((|key| key.nodes = 0) as fn(&mut Key), "nodes 0, and must have at least 1"),
            (|key| key.topk = 0, "topk 0"),
            (
                |key| (key.nodes, key.num_ranks) = (3, 8),
                "num_ranks 8, and must have a multiple of its 3 nodes",
            ),
        ] {
            let mut point = results.points[0].clone();
            change(&mut point.key);
            let error = Results::of_text(&serde_json::to_string(&point).unwrap()).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}

//! What low-latency dispatch and combine take, by number of tokens: replays of graphs, one after the other, the host waiting for nothing.

use std::sync::Arc;
use std::time::Duration;

use epoxide::driver::{Device, Event, Graph, Stream};
use epoxide::ep::{DType, StreamOrder};
use epoxide::group::ProcessGroup;
use epoxide::low_latency::{Buffer, Options, Place, Quantise};
use epoxide::transport::{TransportKind, TransportOptions};
use epoxide_gpu::layout::BlockTrace;
use epoxide_testing::low_latency::{LowLatencyCase, LowLatencyInputs, LowLatencyRank};
use epoxide_testing::oracle::{Routing, Style};
use epoxide_testing::payload::rng_of;
use epoxide_testing::sizes::Sizes;
use serde::{Deserialize, Serialize};

use crate::plan::{check_count, transport_text};
use crate::results::{self, Run, SCHEMA_VERSION, Slowest, today};
use crate::{Error, Result, Watch, digest};

/// Longest wait for a peer.
const PATIENCE: Duration = Duration::from_secs(60);

/// What is measured.
#[derive(Debug, Clone)]
pub struct LowLatencyPlan {
    /// Ranks.
    pub ranks: u32,
    /// Nodes that they are spread over.
    pub nodes: u32,
    /// What joins nodes.
    pub transport: TransportKind,
    /// Whether nodes are kept apart though all ranks can map each other's memory.
    pub keep_nodes: bool,
    /// Tokens of each rank, one point for each; the buffer is made for as many.
    pub tokens: Vec<u32>,
    /// Elements of a row.
    pub hidden: u32,
    /// Experts of all ranks.
    pub experts: u32,
    /// Experts per token.
    pub topk: u32,
    /// What happens to rows on their way.
    pub quantise: Quantise,
    /// What happens to them on their way back.
    pub quantise_back: Quantise,
    /// Most multiprocessors; all without.
    pub num_sms: Option<u32>,
    /// Tokens of a chunk.
    pub chunk_tokens: u32,
    /// Most tokens of a rank whose rows return as packets.
    pub packet_tokens: u32,
    /// Untimed iterations.
    pub warmup: u32,
    /// Timed iterations.
    pub iters: u32,
    /// Pairs that a chained replay has.
    pub chain: u32,
    /// Seed of routing and rows.
    pub seed: u64,
}

/// A number of tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LowLatencyPoint {
    /// Version of the form of this line.
    pub schema_version: u32,
    /// `low-latency`.
    pub mode: String,
    /// The device's name.
    pub device: String,
    /// True where an interpreter ran the kernels.
    #[serde(rename = "virtual")]
    pub is_virtual: bool,
    /// Day of the measurement, UTC.
    pub date: String,
    /// Ranks.
    pub num_ranks: u32,
    /// Nodes.
    pub nodes: u32,
    /// What joins nodes; `null` where there is one.
    pub transport: Option<String>,
    /// Tokens of each rank.
    pub tokens: u32,
    /// Elements of a row.
    pub hidden: u32,
    /// Experts of all ranks.
    pub experts: u32,
    /// Experts per token.
    pub topk: u32,
    /// Type of dispatched rows: `bf16` or `fp8`.
    pub dtype: String,
    /// Type of rows on their way back.
    pub combine_dtype: String,
    /// Most multiprocessors.
    pub num_sms: u32,
    /// Tokens of a rank that are said to be complete together.
    pub chunk_tokens: u32,
    /// Most tokens of a rank whose rows return as packets: those of the point do where `tokens` is no larger.
    pub packet_tokens: u32,
    /// A replay of a graph of one dispatch, between two events; of each iteration the slowest rank.
    pub dispatch: Slowest,
    /// The same of the combine that answers it.
    pub combine: Slowest,
    /// Both, per pair, where a graph has `chain` pairs.
    pub pair: Slowest,
    /// Where the time of a dispatch's kernel goes.
    pub dispatch_within: Within,
    /// Where the time of a combine's kernel goes.
    pub combine_within: Within,
    /// Pairs of that graph.
    pub chain: u32,
    /// Rows that a rank sends to others, mean over ranks: a token counts once for each.
    pub remote_rows: f64,
    /// What tells routings apart ([`digest::of_routing`]).
    pub routing_digest: String,
    /// The runs, whose samples follow each other, as many of each; empty in files of before, whose points are one run.
    #[serde(default)]
    pub runs: Vec<Run>,
}

impl LowLatencyPoint {
    /// Adds another run of the same measurement.
    pub fn add_runs(&mut self, more: LowLatencyPoint) {
        self.dispatch = self.dispatch.with(&more.dispatch);
        self.combine = self.combine.with(&more.combine);
        self.pair = self.pair.with(&more.pair);
        self.dispatch_within = self.dispatch_within.with(&more.dispatch_within);
        self.combine_within = self.combine_within.with(&more.combine_within);
        self.runs.extend(more.runs);
    }
}

/// When the last block of a kernel has done something, from the start of the first one on; of each iteration the slowest rank. Pairs follow
/// each other as single launches, the host waiting for nothing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Within {
    /// Has sent its rows, as its first warp sees it: in a dispatch within a node, another warp waits until they have arrived.
    pub sent: Slowest,
    /// Knows that all ranks have entered the operation.
    pub entered: Slowest,
    /// Has what it waits for, and has summed it.
    pub done: Slowest,
}

impl Within {
    /// Of these iterations and those of another run.
    fn with(&self, more: &Within) -> Within {
        Within {
            sent: self.sent.with(&more.sent),
            entered: self.entered.with(&more.entered),
            done: self.done.with(&more.done),
        }
    }
}

/// The same of a rank: `[sent, entered, done]`, by iteration, in us.
type WithinRank = [Vec<f64>; 3];

/// What a rank measured at one number of tokens, in us.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RankTimes {
    /// The device's name, and whether it is virtual.
    pub device: (String, bool),
    /// Multiprocessors of the device.
    pub sm_count: u32,
    /// When the run began, in seconds since 1970.
    pub started: f64,
    /// Replays of the dispatch.
    pub dispatch: Vec<f64>,
    /// Replays of the combine.
    pub combine: Vec<f64>,
    /// Pairs of chained replays.
    pub pair: Vec<f64>,
    /// Within the kernels of dispatches.
    pub dispatch_within: WithinRank,
    /// Within the kernels of combines.
    pub combine_within: WithinRank,
}

impl LowLatencyPlan {
    fn routing(&self, tokens: u32) -> Routing {
        let tokens = vec![tokens; self.ranks as usize];
        Routing::random(&mut rng_of(&[self.seed]), &tokens, self.topk, self.experts, Style::DistinctTopK)
    }

    fn case(&self, tokens: u32) -> LowLatencyCase {
        let case = LowLatencyCase::new(self.routing(tokens), self.hidden);
        LowLatencyCase { quantise: self.quantise, quantise_back: self.quantise_back, seed: self.seed, ..case }
    }

    /// Pairs of a dispatch and a combine, of which [`Watch`] is told.
    pub fn steps(&self) -> u64 {
        let chained = u64::from(self.warmup.min(2) + self.iters.min(20)) * u64::from(self.chain);
        self.tokens.len() as u64 * (u64::from(self.warmup + self.iters) + chained)
    }

    /// Whether all sizes can be run.
    ///
    /// # Errors
    /// [`Error::Usage`] that names the one that cannot.
    pub fn check(&self) -> Result<()> {
        let is_quantised = [self.quantise, self.quantise_back].iter().any(|it| *it != Quantise::Not);
        for &tokens in &self.tokens {
            let sizes = Sizes {
                ranks: self.ranks,
                low_latency: true,
                tokens,
                fewest_tokens: 1,
                hidden: self.hidden.into(),
                dtype: if is_quantised { DType::Fp8E4m3 } else { DType::Bf16 },
                experts: self.experts,
                topk: self.topk,
            };
            sizes.check().map_err(Error::Usage)?;
        }
        check_count("--iters", self.iters, 1)?;
        check_count("--warmup", self.warmup, 0)?;
        check_count("--graph", self.chain, 1)
    }
}

/// Measures on one rank of a group, all sizes. Collective.
///
/// # Errors
/// Where something that came differs from the oracle, and whatever the operations report.
pub fn rank(
    plan: &LowLatencyPlan,
    device: Arc<dyn Device>,
    group: &Arc<dyn ProcessGroup>,
    watch: &dyn Watch,
) -> epoxide::Result<Vec<RankTimes>> {
    let one = |&tokens| {
        watch.doing(group.rank(), &format!("{tokens} tokens"));
        one_size(plan, tokens, &device, group, watch)
    };
    plan.tokens.iter().map(one).collect()
}

fn one_size(
    plan: &LowLatencyPlan,
    tokens: u32,
    device: &Arc<dyn Device>,
    group: &Arc<dyn ProcessGroup>,
    watch: &dyn Watch,
) -> epoxide::Result<RankTimes> {
    let started = results::seconds_since_1970();
    let case = plan.case(tokens);
    let mut options = Options::new(tokens, plan.hidden.into(), plan.topk, plan.experts)
        .chunk_tokens(plan.chunk_tokens)
        .packet_tokens(plan.packet_tokens)
        .ranks_per_node(plan.ranks / plan.nodes)
        .transport(TransportOptions::new(plan.transport))
        .timeout(PATIENCE);
    if let Some(num_sms) = plan.num_sms {
        options = options.num_sms(num_sms);
    }
    if plan.keep_nodes {
        options = options.keep_nodes();
    }
    let buffer = Buffer::new(device.clone(), &**group, options)?;
    let stream = Arc::new(Stream::new(device, false)?);
    let mut rank = LowLatencyRank { buffer, group: group.clone(), stream };
    // Right before it is fast, and still right behind it.
    case.verify(&mut rank)?;
    let times = times(plan, &case, &mut rank, watch)?;
    case.verify(&mut rank)?;
    group.barrier(PATIENCE)?;
    Ok(RankTimes { started, ..times })
}

/// Graphs of one call each.
pub(crate) struct Recorded {
    /// A dispatch.
    pub dispatch: Graph,
    /// The combine that answers it.
    pub combine: Graph,
}

impl Recorded {
    /// Replays need the buffer, the inputs and the place for as long as they run.
    pub fn new(
        case: &LowLatencyCase,
        rank: &mut LowLatencyRank,
        inputs: &LowLatencyInputs,
        place: &mut Place,
    ) -> epoxide::Result<Recorded> {
        let LowLatencyRank { buffer, stream, .. } = rank;
        let order = StreamOrder::on(stream);
        let mut received = None;
        let dispatch = stream.capture(|| {
            received = Some(buffer.dispatch(place, inputs.request(case.quantise), order)?);
            Ok(())
        })?;
        let combine = stream.capture(|| match received.take() {
            Some(received) => buffer.combine(received, inputs.experts(case), order).map(drop),
            None => Err(epoxide::Error::Unavailable {
                what: "combine".into(),
                reason: "no dispatch before it".into(),
            }),
        })?;
        Ok(Recorded { dispatch, combine })
    }
}

fn times(
    plan: &LowLatencyPlan,
    case: &LowLatencyCase,
    rank: &mut LowLatencyRank,
    watch: &dyn Watch,
) -> epoxide::Result<RankTimes> {
    let inputs = case.inputs(rank)?;
    let mut place = rank.buffer.place(0)?;
    let Recorded { dispatch, combine } = Recorded::new(case, rank, &inputs, &mut place)?;
    let LowLatencyRank { buffer, group, stream } = rank;
    let order = StreamOrder::on(stream);
    let chain = stream.capture(|| {
        for _ in 0..plan.chain {
            let received = buffer.dispatch(&mut place, inputs.request(case.quantise), order)?;
            buffer.combine(received, inputs.experts(case), order)?;
        }
        Ok(())
    })?;
    let device = stream.device().clone();
    let event = || Event::new(&device, true);
    // SAFETY: what was recorded is the buffer's and the inputs', which live until the stream has been waited for.
    let launch = |graph: &Graph| unsafe { graph.launch(stream) };
    let us = |from: &Event, to: &Event| -> epoxide::Result<f64> { Ok(f64::from(from.elapsed_ms(to)?) * 1e3) };

    group.barrier(PATIENCE)?;
    let mut events = vec![event()?];
    events[0].record(stream)?;
    for _ in 0..plan.warmup + plan.iters {
        for graph in [&dispatch, &combine] {
            launch(graph)?;
            let end = event()?;
            end.record(stream)?;
            events.push(end);
        }
    }
    for pair in events[1..].chunks(2) {
        pair[1].synchronize()?;
        watch.step(group.rank());
    }
    stream.synchronize()?;
    buffer.check()?;
    let spans =
        events.windows(2).map(|pair| us(&pair[0], &pair[1])).collect::<epoxide::Result<Vec<f64>>>()?;
    let timed = &spans[2 * plan.warmup as usize..];
    let every_other = |first: usize| timed.iter().skip(first).step_by(2).copied().collect();

    let mut pair = Vec::new();
    for iteration in 0..plan.warmup.min(2) + plan.iters.min(20) {
        group.barrier(PATIENCE)?;
        let (start, end) = (event()?, event()?);
        start.record(stream)?;
        launch(&chain)?;
        end.record(stream)?;
        stream.synchronize()?;
        (0..plan.chain).for_each(|_| watch.step(group.rank()));
        if iteration >= plan.warmup.min(2) {
            pair.push(us(&start, &end)? / f64::from(plan.chain));
        }
    }
    buffer.check()?;

    let info = device.info();
    group.barrier(PATIENCE)?;
    let calls = u64::from(plan.warmup + plan.iters) * 2;
    buffer.start_trace(calls * u64::from(info.sm_count))?;
    for _ in 0..calls / 2 {
        let received = buffer.dispatch(&mut place, inputs.request(case.quantise), order)?;
        buffer.combine(received, inputs.experts(case), order)?;
    }
    let (launches, _) = buffer.take_trace(stream)?;
    let (mut dispatch_within, mut combine_within) = (WithinRank::default(), WithinRank::default());
    for launch in launches.iter().skip(2 * plan.warmup as usize) {
        let start = launch.blocks.iter().map(|block| block.enter).min().unwrap_or(0);
        let latest = |of: fn(&BlockTrace) -> u64| {
            launch.blocks.iter().map(of).max().unwrap_or(0).saturating_sub(start) as f64 / 1e3
        };
        let within = if launch.operation == "dispatch" { &mut dispatch_within } else { &mut combine_within };
        within[0].push(latest(|block| block.moved));
        within[1].push(latest(|block| block.ready));
        within[2].push(latest(|block| block.done));
    }
    Ok(RankTimes {
        device: (info.name.clone(), info.is_virtual),
        sm_count: info.sm_count,
        started: 0.0,
        dispatch: every_other(0),
        combine: every_other(1),
        pair,
        dispatch_within,
        combine_within,
    })
}

/// Makes a point of every number of tokens that `ranks`, in rank order, measured.
pub fn points(plan: &LowLatencyPlan, ranks: &[Vec<RankTimes>]) -> Vec<LowLatencyPoint> {
    let point = |(index, &tokens): (usize, &u32)| {
        let slowest = |pick: &dyn Fn(&RankTimes) -> &Vec<f64>| {
            Slowest::new(&ranks.iter().map(|rank| pick(&rank[index]).as_slice()).collect::<Vec<_>>())
        };
        let within = |pick: &dyn Fn(&RankTimes) -> &WithinRank| Within {
            sent: slowest(&|times| &pick(times)[0]),
            entered: slowest(&|times| &pick(times)[1]),
            done: slowest(&|times| &pick(times)[2]),
        };
        let first = &ranks[0][index];
        let routing = plan.routing(tokens);
        let remote = |rank: u32| {
            let to = |token| {
                (0..plan.ranks).filter(|&dst| dst != rank && routing.hits(rank, token, dst)).count() as f64
            };
            (0..tokens).map(to).sum::<f64>()
        };
        LowLatencyPoint {
            schema_version: SCHEMA_VERSION,
            mode: "low-latency".into(),
            device: first.device.0.clone(),
            is_virtual: first.device.1,
            date: today(),
            num_ranks: plan.ranks,
            nodes: plan.nodes,
            transport: (plan.nodes > 1).then(|| transport_text(plan.transport, plan.keep_nodes)),
            tokens,
            hidden: plan.hidden,
            experts: plan.experts,
            topk: plan.topk,
            dtype: travels_as(plan.quantise),
            combine_dtype: travels_as(plan.quantise_back),
            num_sms: plan.num_sms.unwrap_or(first.sm_count),
            chunk_tokens: plan.chunk_tokens,
            packet_tokens: plan.packet_tokens,
            dispatch: slowest(&|times| &times.dispatch),
            combine: slowest(&|times| &times.combine),
            pair: slowest(&|times| &times.pair),
            dispatch_within: within(&|times| &times.dispatch_within),
            combine_within: within(&|times| &times.combine_within),
            chain: plan.chain,
            remote_rows: (0..plan.ranks).map(remote).sum::<f64>() / f64::from(plan.ranks),
            routing_digest: {
                let ids: Vec<Vec<i64>> = (0..plan.ranks).map(|rank| routing.flat_topk_idx(rank)).collect();
                digest::of_routing(ids.iter().map(Vec::as_slice))
            },
            runs: vec![Run { started: first.started }],
        }
    };
    plan.tokens.iter().enumerate().map(point).collect()
}

fn travels_as(quantise: Quantise) -> String {
    if quantise == Quantise::Not { "bf16" } else { "fp8" }.into()
}

/// The points of all runs of all ranks, `runs[rank][run]`: a point for each number of tokens.
pub fn of_runs(plan: &LowLatencyPlan, runs: &[Vec<Vec<RankTimes>>]) -> Vec<LowLatencyPoint> {
    let count = runs.iter().map(Vec::len).min().unwrap_or(0);
    let of = |run: usize| points(plan, &runs.iter().map(|runs| runs[run].clone()).collect::<Vec<_>>());
    join_runs((0..count).map(of).collect())
}

/// One point of each, where `runs` have the same points in the same order.
pub fn join_runs(runs: Vec<Vec<LowLatencyPoint>>) -> Vec<LowLatencyPoint> {
    let mut runs = runs.into_iter();
    let mut joined = runs.next().unwrap_or_default();
    for (point, more) in runs.flat_map(|run| run.into_iter().enumerate()) {
        joined[point].add_runs(more);
    }
    joined
}

/// The points that a text holds, or why it holds none.
pub fn of_text(text: &str) -> std::result::Result<Vec<LowLatencyPoint>, String> {
    let broken = |error: serde_json::Error| format!("not a results file of low latency: {error}");
    results::values_of(text)?.into_iter().map(|value| serde_json::from_value(value).map_err(broken)).collect()
}

/// Points as JSON.
///
/// # Errors
/// Where a figure has no JSON form.
pub fn json(points: &[LowLatencyPoint]) -> Result<String> {
    let tool = concat!("epoxide ", env!("CARGO_PKG_VERSION"));
    let file = serde_json::json!({ "schema_version": SCHEMA_VERSION, "tool": tool, "points": points });
    serde_json::to_string_pretty(&file).map_err(|error| Error::Failed(format!("JSON: {error}")))
}

//! What low-latency dispatch and combine take, by number of tokens: replays of graphs, one after the other, the host waiting for nothing.

use std::sync::Arc;
use std::time::Duration;

use epoxide::driver::{Device, Event, Graph, Stream};
use epoxide::ep::StreamOrder;
use epoxide::group::ProcessGroup;
use epoxide::low_latency::{Buffer, Quantise};
use epoxide_testing::low_latency::{LowLatencyCase, LowLatencyRank};
use epoxide_testing::oracle::{Routing, Style};
use epoxide_testing::payload::rng_of;
use serde::{Deserialize, Serialize};

use crate::results::{SCHEMA_VERSION, Slowest, today};
use crate::{Error, Result};

/// Longest wait for a peer.
const PATIENCE: Duration = Duration::from_secs(60);

/// What is measured.
#[derive(Debug, Clone)]
pub struct LowLatencyPlan {
    /// Ranks.
    pub ranks: u32,
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
    /// Most multiprocessors; all without.
    pub num_sms: Option<u32>,
    /// Tokens of a chunk; the library's own number without.
    pub chunk_tokens: Option<u32>,
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
    /// Most multiprocessors.
    pub num_sms: u32,
    /// A replay of a graph of one dispatch, between two events; of each iteration the slowest rank.
    pub dispatch: Slowest,
    /// The same of the combine that answers it.
    pub combine: Slowest,
    /// Both, per pair, where a graph has `chain` pairs.
    pub pair: Slowest,
    /// Pairs of that graph.
    pub chain: u32,
    /// Rows that a rank sends to others, mean over ranks: a token counts once for each.
    pub remote_rows: f64,
}

/// What a rank measured at one number of tokens, in us.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RankTimes {
    /// The device's name, and whether it is virtual.
    pub device: (String, bool),
    /// Multiprocessors of the device.
    pub sm_count: u32,
    /// Replays of the dispatch.
    pub dispatch: Vec<f64>,
    /// Replays of the combine.
    pub combine: Vec<f64>,
    /// Pairs of chained replays.
    pub pair: Vec<f64>,
}

impl LowLatencyPlan {
    fn routing(&self, tokens: u32) -> Routing {
        let tokens = vec![tokens; self.ranks as usize];
        Routing::random(&mut rng_of(&[self.seed]), &tokens, self.topk, self.experts, Style::DistinctTopK)
    }

    fn case(&self, tokens: u32) -> LowLatencyCase {
        let case = LowLatencyCase::new(self.routing(tokens), self.hidden);
        LowLatencyCase { quantise: self.quantise, seed: self.seed, ..case }
    }

    /// Whether all sizes can be run.
    ///
    /// # Errors
    /// [`Error::Usage`] that names the one that cannot.
    pub fn check(&self) -> Result<()> {
        let refuse =
            |flag: &str, value: u32, rule: String| Err(Error::Usage(format!("{flag} {value}: {rule}")));
        if self.experts == 0 || !self.experts.is_multiple_of(self.ranks) {
            return refuse(
                "--experts",
                self.experts,
                format!("must be a positive multiple of the {} ranks", self.ranks),
            );
        }
        if self.topk == 0 || self.topk > self.experts.min(32) {
            return refuse("--topk", self.topk, format!("must be 1 to {}", self.experts.min(32)));
        }
        let unit = if self.quantise == Quantise::Not { 8 } else { 128 };
        if self.hidden == 0 || !self.hidden.is_multiple_of(unit) {
            return refuse("--hidden", self.hidden, format!("must be a positive multiple of {unit}"));
        }
        if let Some(&tokens) = self.tokens.iter().find(|tokens| !(1..=1024).contains(*tokens)) {
            return refuse("--tokens", tokens, "must be 1 to 1024 with --mode low-latency".into());
        }
        if self.iters == 0 {
            return refuse("--iters", 0, "must be at least 1".into());
        }
        Ok(())
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
) -> epoxide::Result<Vec<RankTimes>> {
    plan.tokens.iter().map(|&tokens| one_size(plan, tokens, &device, group)).collect()
}

fn one_size(
    plan: &LowLatencyPlan,
    tokens: u32,
    device: &Arc<dyn Device>,
    group: &Arc<dyn ProcessGroup>,
) -> epoxide::Result<RankTimes> {
    let case = plan.case(tokens);
    let mut options = epoxide::low_latency::Options::new(tokens, plan.hidden.into(), plan.topk, plan.experts)
        .timeout(PATIENCE);
    if let Some(num_sms) = plan.num_sms {
        options = options.num_sms(num_sms);
    }
    if let Some(chunk_tokens) = plan.chunk_tokens {
        options = options.chunk_tokens(chunk_tokens);
    }
    let buffer = Buffer::new(device.clone(), &**group, options)?;
    let stream = Arc::new(Stream::new(device, false)?);
    let mut rank = LowLatencyRank { buffer, group: group.clone(), stream };
    // Right before it is fast, and still right behind it.
    case.verify(&mut rank)?;
    let times = times(plan, &case, &mut rank)?;
    case.verify(&mut rank)?;
    group.barrier(PATIENCE)?;
    Ok(times)
}

fn times(
    plan: &LowLatencyPlan,
    case: &LowLatencyCase,
    rank: &mut LowLatencyRank,
) -> epoxide::Result<RankTimes> {
    let inputs = case.inputs(rank)?;
    let mut place = rank.buffer.place(0)?;
    let LowLatencyRank { buffer, group, stream } = rank;
    let order = StreamOrder::on(stream);
    let mut received = None;
    let dispatch = stream.capture(|| {
        received = Some(buffer.dispatch(&mut place, inputs.request(case.quantise), order)?);
        Ok(())
    })?;
    let combine = stream.capture(|| match received.take() {
        Some(received) => buffer.combine(received, inputs.experts(case), order).map(drop),
        None => Err(epoxide::Error::Unavailable {
            what: "combine".into(),
            reason: "no dispatch before it".into(),
        }),
    })?;
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
        if iteration >= plan.warmup.min(2) {
            pair.push(us(&start, &end)? / f64::from(plan.chain));
        }
    }
    buffer.check()?;
    let info = device.info();
    Ok(RankTimes {
        device: (info.name.clone(), info.is_virtual),
        sm_count: info.sm_count,
        dispatch: every_other(0),
        combine: every_other(1),
        pair,
    })
}

/// Makes a point of every number of tokens that `ranks`, in rank order, measured.
pub fn points(plan: &LowLatencyPlan, ranks: &[Vec<RankTimes>]) -> Vec<LowLatencyPoint> {
    let point = |(index, &tokens): (usize, &u32)| {
        let slowest = |pick: &dyn Fn(&RankTimes) -> &Vec<f64>| {
            Slowest::new(&ranks.iter().map(|rank| pick(&rank[index]).as_slice()).collect::<Vec<_>>())
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
            tokens,
            hidden: plan.hidden,
            experts: plan.experts,
            topk: plan.topk,
            dtype: if plan.quantise == Quantise::Not { "bf16" } else { "fp8" }.into(),
            num_sms: plan.num_sms.unwrap_or(first.sm_count),
            dispatch: slowest(&|times| &times.dispatch),
            combine: slowest(&|times| &times.combine),
            pair: slowest(&|times| &times.pair),
            chain: plan.chain,
            remote_rows: (0..plan.ranks).map(remote).sum::<f64>() / f64::from(plan.ranks),
        }
    };
    plan.tokens.iter().enumerate().map(point).collect()
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

//! `epoxide roundtrip --mode low-latency`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use epoxide::driver::Stream;
use epoxide::low_latency::{Buffer, Options, Quantise};
use epoxide_testing::low_latency::{CombineRows, LowLatencyCase, LowLatencyRank};
use epoxide_testing::oracle::{Routing, Style};
use epoxide_testing::payload::rng_of;
use rand::Rng;

use super::report::{ConfigReport, LowLatencyRankReport, Publish, Ranks};
use super::{Beside, Clock};
use crate::options::{RowType, Setup};
use crate::output::Voice;
use crate::ranks::{Rank, Run};
use crate::stop::{Result, Stop};

/// Work beside the first round trips.
#[derive(Debug, Clone, Copy)]
pub struct Work {
    /// Round trips with new routings and contents.
    pub iterations: u64,
    /// With random numbers of tokens.
    pub random: bool,
    /// Replays of a graph.
    pub graph_replays: u64,
    /// Beside threads that use the same devices.
    pub neighbour: bool,
}

/// Dispatches and combines on every rank, every bit against the oracle.
pub fn roundtrip(rank: &Rank, run: &Run, work: Work, voice: &Voice, publish: Publish<'_>) -> Result<()> {
    let (setup, mut clock) = (&run.setup, Clock(Instant::now()));
    let beside = Beside::start(rank, work.neighbour);
    let first = rank.agree(case(setup, 0, false))?;
    voice.doing("making the buffer");
    let mut low_latency = rank.agree(join(rank, setup, &first).map_err(Stop::from))?;
    voice.line(format!(
        "[cfg] mode=low-latency nodes={} num_ranks={}{} tokens={} hidden={} experts={} topk={} dtype={} device={:?} seed={:#x} pool_bytes={}",
        setup.nodes,
        setup.ranks,
        if setup.nodes == 1 { String::new() } else { format!(" transport={}", setup.transport) },
        setup.tokens,
        setup.hidden,
        setup.experts,
        setup.topk,
        setup.dtype.dtype(),
        rank.device.info().name,
        setup.seed,
        low_latency.buffer.pool_bytes(),
    ));
    let config = ConfigReport::new(rank, run, low_latency.buffer.rows(), low_latency.buffer.pool_bytes());
    let seconds = clock.lap();
    publish(&|report| {
        report.config = Some(config.clone());
        report.times.setup_seconds = seconds;
    });

    voice.doing("every bit against the oracle");
    let reports = rank.gather(first_data(setup, rank, &first, &mut low_latency))?;
    let seconds = clock.lap();
    publish(&|report| {
        report.ranks = Ranks::LowLatency(reports.clone());
        report.times.bit_for_bit_seconds = seconds;
    });
    for report in &reports {
        if let Some(failure) = &report.failure {
            return Err(Stop { agreed: true, ..Stop::failed(failure).on_rank(report.rank) });
        }
    }
    let rows =
        if setup.nodes == 1 { "by expert, summed already, in the pool" } else { "by expert, summed already" };
    voice.line(format!(
        "[verify] OK (rows {rows}: contents, tables, counts, expert-major copies, exact sums)"
    ));

    if work.iterations > 0 {
        voice.doing("round trips");
        voice.count(work.iterations);
        rank.gather(iterate(setup, &mut low_latency, work, voice))?;
        let (kind, seconds) = (if work.random { "random round trips" } else { "round trips" }, clock.lap());
        voice.line(format!("[iterations] OK ({} {kind}, 0 mismatches, {seconds:.1} s)", work.iterations));
        publish(&|report| {
            report.iterations = work.iterations;
            report.times.iterations_seconds = seconds;
        });
    }
    if work.graph_replays > 0 {
        voice.doing("replays of a graph");
        let replays = u32::try_from(work.graph_replays).unwrap_or(u32::MAX);
        let case = LowLatencyCase { rounds: 3, ..first };
        let differing = case.replayed(&mut low_latency, replays).map_err(Stop::from);
        rank.gather(differing.and_then(|differing| {
            differing.into_iter().next().map_or(Ok(()), |what| Err(Stop::failed(what)))
        }))?;
        let seconds = clock.lap();
        voice.line(format!("[graph] OK ({replays} replays of 3 pairs, exact sums)"));
        publish(&|report| {
            report.graph_replays = replays.into();
            report.times.graph_seconds = seconds;
        });
    }
    super::say_checked(rank, run, voice, publish)?;
    beside.end(rank, voice)
}

fn join(rank: &Rank, setup: &Setup, case: &LowLatencyCase) -> epoxide::Result<LowLatencyRank> {
    let mut options = case
        .options(rank.rank)
        .timeout(Duration::from_secs(setup.timeout))
        .num_sms(setup.num_sms)
        .ranks_per_node(setup.ranks / setup.nodes)
        .transport(setup.network());
    if setup.keep_nodes {
        options = options.keep_nodes();
    }
    let buffer = Buffer::new(rank.device.clone(), &*rank.group, options)?;
    let stream = Arc::new(Stream::new(&rank.device)?);
    Ok(LowLatencyRank { buffer, group: rank.group.clone(), stream })
}

/// Round trips of the first data, and what this rank found.
fn first_data(
    setup: &Setup,
    rank: &Rank,
    first: &LowLatencyCase,
    low_latency: &mut LowLatencyRank,
) -> Result<LowLatencyRankReport> {
    let (me, routing) = (rank.rank, &first.routing);
    let mut report =
        LowLatencyRankReport { rank: me, num_tokens: routing.num_tokens(me), ..Default::default() };
    for combine_rows in [CombineRows::ByExpert, CombineRows::ByRow, CombineRows::InPool] {
        if combine_rows == CombineRows::InPool && setup.nodes > 1 {
            continue;
        }
        let case = LowLatencyCase { combine_rows, rounds: 2, ..first.clone() };
        let differing = case.step_by_step(low_latency)?;
        report.failure = report.failure.or(differing.into_iter().next());
    }
    // As many as have been compared.
    let from =
        |source| (0..routing.num_tokens(source)).filter(|&token| routing.hits(source, token, me)).count();
    report.num_recv_tokens = (0..routing.num_ranks()).map(from).sum::<usize>() as u32;
    Ok(report)
}

/// A round trip of a setup; `random`: of any number of tokens on each rank up to the setup's. A
/// different `number` is a different case.
fn case(setup: &Setup, number: u64, random: bool) -> Result<LowLatencyCase> {
    let mut rng = rng_of(&[setup.seed, number]);
    let tokens = (0..setup.ranks)
        .map(|_| if random { rng.random_range(0..=setup.tokens) } else { setup.tokens })
        .collect::<Vec<_>>();
    let style =
        if number == 0 { Style::WithHoles } else { Style::ALL[rng.random_range(0..Style::ALL.len())] };
    let routing = Routing::random(&mut rng, &tokens, setup.topk, setup.experts, style);
    let hidden = u32::try_from(setup.hidden)
        .map_err(|_| Stop::usage(format!("--hidden {}: too large", setup.hidden)))?;
    let quantise = match (setup.dtype, number % 2) {
        (RowType::Fp8, 0) => Quantise::Fp8,
        (RowType::Fp8, _) => Quantise::Fp8PowerOfTwo,
        _ => Quantise::Not,
    };
    // Blocks of 128 elements have a scale.
    let quantise_back = match number % 4 {
        1 if hidden.is_multiple_of(128) => Quantise::Fp8,
        3 if hidden.is_multiple_of(128) => Quantise::Fp8PowerOfTwo,
        _ => Quantise::Not,
    };
    Ok(LowLatencyCase {
        max_tokens: setup.tokens.max(1),
        quantise,
        quantise_back,
        combine_rows: match number % 6 {
            // Ranks of one node can gather; odd numbers have rows that are quantised.
            2 if setup.nodes == 1 => CombineRows::InPool,
            2 | 5 => CombineRows::ByRow,
            _ => CombineRows::ByExpert,
        },
        chunk_tokens: Options::DEFAULT_CHUNK_TOKENS,
        packet_tokens: Options::default_packet_tokens(setup.ranks),
        seed: rng.random(),
        ..LowLatencyCase::new(routing, hidden)
    })
}

fn iterate(setup: &Setup, rank: &mut LowLatencyRank, work: Work, voice: &Voice) -> Result<()> {
    let mut failure = None;
    for number in 1..=work.iterations {
        let case = case(setup, number, work.random)?;
        let differing = case.step_by_step(rank).map_err(Stop::from)?;
        // The others would wait for a rank that stops here.
        failure = failure.or(differing.into_iter().next().map(|what| format!("iteration {number}: {what}")));
        voice.step();
    }
    failure.map_or(Ok(()), |failure| Err(Stop::failed(failure)))
}

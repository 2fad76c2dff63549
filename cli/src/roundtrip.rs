//! `epoxide roundtrip`: the acceptance test. Layout, dispatch and combine on all ranks, every
//! result checked.
//!
//! The first data is that of MSCCL++'s test: every element of a rank's rows is the rank's number,
//! and combine is called right behind dispatch. Then come rows of random bytes, compared bit for
//! bit. On request follow many random cases, and replays of one graph.

use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use epoxide::driver::Event;
use epoxide::throughput::{CombineRequest, Combined, DispatchLayout, DispatchRequest, PoolRows, Received};
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide_testing::compare;
use epoxide_testing::harness::Rank as Rig;
use epoxide_testing::neighbour::Neighbour;
use epoxide_testing::oracle::{Plan, Routing, Style};
use epoxide_testing::payload::{ELEMENTS_PER_SCALE, rng_of};
use epoxide_testing::roundtrip::{Case, Expected, compare_weights};
use half::bf16;

use crate::cases;
use crate::options::{Check, Defaults, Mode, RoundTripFlags, RowType, Setup};
use crate::output::{Voice, complain, duration, json};
use crate::ranks::{self, Placement, Rank, Run};
use crate::stop::{Result, Stop};

mod low_latency;
mod report;

use report::{ConfigReport, HighThroughput, Publish, RankReport, Ranks, Report};

const DEFAULTS: Defaults = Defaults { mode: Mode::Internode, tokens: 128, hidden: 1024, num_sms: None };
/// The same in check mode, in which kernels take ten to fifty times as long.
const CHECK_DEFAULTS: Defaults =
    Defaults { mode: Mode::Internode, tokens: 32, hidden: 256, num_sms: Some(8) };
/// How far a received element may be from the rank number it was sent as.
const RECV_TOLERANCE: f32 = 1e-3;
/// The fp8 (e4m3) byte of its largest number, 448: scaled, it stands for any rank number.
const FP8_MAX_BYTE: u8 = 0x7e;
const FP8_MAX: f32 = 448.0;

/// Options of `epoxide roundtrip`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "With RANK in the environment (torchrun, `epoxide launch`) this process is one rank; without, it \
                        starts all ranks.\nExit codes: 0 pass, 1 a check failed, 2 bad usage, 77 skipped for want of \
                        hardware."
)]
pub struct Args {
    #[command(flatten)]
    shared: RoundTripFlags,

    /// Round trips with new routings and contents behind the first two
    #[arg(long, value_name = "N", default_value_t = 0)]
    iterations: u64,

    /// Random sizes up to the given ones in those, with another number of tokens on each rank [N:
    /// 100]
    #[arg(long)]
    random: bool,

    /// Replays of one graph of layout, dispatch and combine, each with a new routing and contents
    #[arg(long, value_name = "N", default_value_t = 0)]
    graph_replays: u64,

    /// Meanwhile threads of each rank's process allocate, free, load modules and copy on its
    /// device, as other libraries do
    #[arg(long)]
    neighbour: bool,
}

impl Args {
    fn iterations(&self) -> u64 {
        if self.random && self.iterations == 0 { 100 } else { self.iterations }
    }
}

/// Runs the test and prints the object, if that was asked for.
pub fn run(args: Args) -> Result<()> {
    let (report, outcome) = execute(&args);
    // Where the ranks are other processes, rank 0 has printed it.
    let ours = report.config.is_some() || (report.error.is_some() && ranks::speaks());
    if args.shared.json && ours {
        json(&report)?;
    }
    outcome
}

/// Runs the test; the report is filled where rank 0 runs.
fn execute(args: &Args) -> (Report, Result<()>) {
    let start = Instant::now();
    let report = Mutex::new(Report { command: "roundtrip", ..Report::default() });
    let defaults = if args.shared.virtual_gpu.check.is_some() { CHECK_DEFAULTS } else { DEFAULTS };
    let outcome = ranks::run(&args.shared, defaults, |rank, run| roundtrip(rank, run, args, &report));
    let mut report = report.into_inner().unwrap_or_else(PoisonError::into_inner);
    report.times.total_seconds = start.elapsed().as_secs_f64();
    report.pass = outcome.is_ok();
    if let Err(stop) = &outcome {
        (report.exit_code, report.error) = (stop.code, stop.message.clone());
    }
    (report, outcome)
}

fn roundtrip(rank: &Rank, run: &Run, args: &Args, report: &Mutex<Report>) -> Result<()> {
    let setup = &run.setup;
    let voice = Voice::new(rank.is_root(), !args.shared.json);
    let voice = if run.checker.is_some() { voice.with_progress("roundtrip --check") } else { voice };
    if run.checker.is_some() && rank.is_root() {
        complain(&before_check(setup, args));
    }
    let publish = |change: &dyn Fn(&mut Report)| {
        if rank.is_root() {
            change(&mut report.lock().unwrap_or_else(PoisonError::into_inner));
        }
    };
    if setup.mode == Mode::LowLatency {
        let (iterations, random) = (args.iterations(), args.random);
        let work = low_latency::Work {
            iterations,
            random,
            graph_replays: args.graph_replays,
            neighbour: args.neighbour,
        };
        return low_latency::roundtrip(rank, run, work, &voice, &publish);
    }
    let mut clock = Clock(Instant::now());

    let beside = Beside::start(rank, args.neighbour);

    voice.doing("making the buffer");
    let rig = Rig::new(rank.device.clone(), rank.group.clone(), setup.buffer_options());
    let mut rig = rank.agree(rig.map_err(Stop::from))?;
    let more = high_throughput(setup, &rig);
    let config = ConfigReport {
        high_throughput: Some(more.clone()),
        ..ConfigReport::new(rank, run, rig.buffer.capacity(), rig.buffer.pool_bytes())
    };
    voice.line(cfg_line(&config, &more));
    let seconds = clock.lap();
    publish(&|report| {
        report.config = Some(config.clone());
        report.times.setup_seconds = seconds;
    });

    voice.doing("layout, dispatch and combine of rank numbers");
    let reports = first_data(rank, setup, &mut rig, &voice)?;
    let seconds = clock.lap();
    publish(&|report| {
        report.ranks = Ranks::HighThroughput(reports.clone());
        report.times.first_data_seconds = seconds;
    });
    say_first_data(&reports, &voice)?;

    voice.doing("every bit against the oracle");
    let rows = rank.gather(bit_for_bit(setup, &mut rig))?.iter().sum::<u64>();
    voice.line(format!(
        "[verify] OK ({rows} rows of random bytes: contents, order, metadata, handles, cached dispatch, exact sums)"
    ));
    let seconds = clock.lap();
    publish(&|report| report.times.bit_for_bit_seconds = seconds);

    let iterations = args.iterations();
    if iterations > 0 {
        voice.doing("round trips");
        voice.count(iterations);
        let rows =
            rank.gather(iterate(setup, &mut rig, iterations, args.random, &voice))?.iter().sum::<u64>();
        let seconds = clock.lap();
        let kind = if args.random { "random round trips" } else { "round trips" };
        voice.line(format!(
            "[iterations] OK ({iterations} {kind}, {rows} rows, 0 mismatches, {seconds:.1} s)"
        ));
        publish(&|report| {
            report.iterations = iterations;
            report.times.iterations_seconds = seconds;
        });
    }

    if args.graph_replays > 0 {
        voice.doing("replays of a graph");
        voice.count(args.graph_replays);
        let found = rank.gather(replay_graph(setup, &mut rig, args.graph_replays, &voice))?;
        let rows: u64 = found.iter().map(|(_, rows)| rows).sum();
        let verified = found.first().map_or(0, |(verified, _)| *verified);
        let seconds = clock.lap();
        voice.line(format!(
            "[graph] OK ({} replays, {verified} verified, each beside an eager run, {rows} rows, 0 mismatches, {seconds:.1} s)",
            args.graph_replays
        ));
        publish(&|report| {
            report.graph_replays = args.graph_replays;
            report.times.graph_seconds = seconds;
        });
    }

    say_checked(rank, run, &voice, &publish)?;
    beside.end(rank, &voice)
}

/// Estimate of the time of check mode, and the flags for other sizes.
fn before_check(setup: &Setup, args: &Args) -> String {
    let trips = args.iterations() + args.graph_replays;
    let (ranks, tokens, hidden, sms) = (setup.ranks, setup.tokens, setup.hidden, setup.num_sms);
    let seconds = duration(check_seconds(setup, trips));
    let shared = &args.shared;
    let open = [shared.tokens.is_none(), shared.hidden.is_none(), shared.num_sms.is_none()];
    let remedy = match open.contains(&true) {
        true => "; sizes for check mode, --tokens, --hidden and --num-sms give your own",
        false => "",
    };
    format!(
        "roundtrip --check: {ranks} ranks, {tokens} tokens of {hidden} elements each, {sms} multiprocessors: about {seconds}{remedy}"
    )
}

/// Estimated seconds of check mode, which runs one warp at a time, with so many round trips behind
/// the first ones. It was fitted to runs on the two cores that docs/BENCH-NOTES.md names, with an
/// error of at most a half.
fn check_seconds(setup: &Setup, trips: u64) -> f64 {
    // Seconds of a rank, of a multiprocessor, of a token, and of an element of a token.
    let (fixed, of_sm, of_token, of_element) = match (setup.mode, setup.nodes) {
        (Mode::LowLatency, _) => (0.1, 0.032, 4.4e-3, 38e-6),
        (_, 1) => (0.44, 0.021, 3.7e-3, 3.9e-6),
        _ => (0.6, 0.025, 7.4e-3, 7.8e-6),
    };
    let tokens = f64::from(setup.tokens);
    // Blocks without tokens end at once.
    let sms = f64::from(setup.num_sms.min(setup.tokens.max(2)));
    let copies = 0.5 + f64::from(setup.topk.min(setup.ranks)) / 8.0;
    let rows = tokens * copies * (of_token + of_element * setup.hidden as f64);
    f64::from(setup.ranks) * (fixed + of_sm * sms + rows) * (1.0 + 0.3 * trips as f64)
}

/// Prints the amount that check mode has checked, once all ranks have finished: any finding ends a
/// run before.
fn say_checked(rank: &Rank, run: &Run, voice: &Voice, publish: Publish<'_>) -> Result<()> {
    if let Some((check, checker)) = &run.checker {
        rank.gather(Ok(()))?;
        let accesses = checker.accesses();
        voice.line(checked_line(*check, accesses));
        publish(&|report| report.checked_accesses = Some(accesses));
    }
    Ok(())
}

fn checked_line(check: Check, accesses: u64) -> String {
    let found = match check {
        Check::Weak => "0 wrong results of weak memory",
        Check::Races => "0 races and 0 reads of unwritten memory",
    };
    format!("[check] {found} in {} of kernels' lanes", count_of(accesses))
}

/// A number of accesses, for people.
fn count_of(accesses: u64) -> String {
    match accesses {
        0..1_000_000 => format!("{accesses} accesses"),
        _ => format!("{:.1} M accesses", accesses as f64 / 1e6),
    }
}

fn high_throughput(setup: &Setup, rig: &Rig) -> HighThroughput {
    let row_bytes = setup.hidden * DType::Bf16.size();
    let hint = |hint: fn(&epoxide::throughput::Config, u64, u32, u32) -> u64| {
        hint(&setup.config, row_bytes, setup.ranks, setup.ranks / setup.nodes)
    };
    HighThroughput {
        num_channels: setup.config.num_channels(),
        num_max_nvl_chunked_send_tokens: setup.config.num_max_nvl_chunked_send_tokens,
        num_max_nvl_chunked_recv_tokens: setup.config.num_max_nvl_chunked_recv_tokens,
        wire_bytes: rig.buffer.wire_bytes(),
        is_one_node: rig.buffer.num_nodes() == 1,
        nvl_buffer_size_hint: hint(epoxide::throughput::Config::nvl_buffer_size_hint),
        rdma_buffer_size_hint: hint(epoxide::throughput::Config::rdma_buffer_size_hint),
    }
}

fn cfg_line(config: &ConfigReport, more: &HighThroughput) -> String {
    let s = &config.setup;
    let placement = match config.placement {
        Placement::Threads => "threads",
        Placement::Processes | Placement::OneRank => "processes",
    };
    let mut line = format!(
        "[cfg] mode={} nodes={} num_ranks={} tokens={} hidden={} experts={} topk={} dtype={} device={:?} ({placement})",
        if s.nodes == 1 { "intranode" } else { "internode" },
        s.nodes,
        s.ranks,
        s.tokens,
        s.hidden,
        s.experts,
        s.topk,
        s.dtype.dtype(),
        config.device_name,
    );
    // Writing to a string cannot fail.
    let _ = write!(
        line,
        " seed={:#x} num_sms={} channels={} nvl_send={} nvl_recv={} pool_bytes={} rows={} nvl_hint={} rdma_hint={}",
        s.seed,
        s.num_sms,
        more.num_channels,
        more.num_max_nvl_chunked_send_tokens,
        more.num_max_nvl_chunked_recv_tokens,
        config.pool_bytes,
        config.capacity_rows,
        more.nvl_buffer_size_hint,
        more.rdma_buffer_size_hint,
    );
    if s.nodes > 1 {
        let _ = write!(
            line,
            " transport={} one_node={} queues={} rdma_send={} rdma_recv={} wire_bytes={}",
            s.transport,
            more.is_one_node,
            s.queues,
            s.config.num_max_rdma_chunked_send_tokens,
            s.config.num_max_rdma_chunked_recv_tokens,
            more.wire_bytes,
        );
    }
    line
}

/// The data of MSCCL++'s test. Every rank's report.
fn first_data(rank: &Rank, setup: &Setup, rig: &mut Rig, voice: &Voice) -> Result<Vec<RankReport>> {
    let me = rank.rank;
    let tokens = vec![setup.tokens; setup.ranks as usize];
    let mut rng = rng_of(&[setup.seed]);
    let routing = Routing::random(&mut rng, &tokens, setup.topk, setup.experts, Style::DistinctTopK);
    let case = Case { weight: Some(1.0), seed: setup.seed, ..cases::along(setup, routing, setup.hidden) };
    let expected = rig.expect(&case);
    let plan = &expected.plan;

    let mut marks = Marks::default();
    let (topk_weights, layout) = rank.agree(lay_out(setup, rig, &case, &expected, &mut marks))?;
    voice.line("[layout] OK");

    let outcome = (|| {
        let (x, x_scales) = rank_number_rows(setup, rig, me)?;
        let request = DispatchRequest::new(&x, &layout).topk_weights(&topk_weights);
        let request = x_scales.iter().fold(request, DispatchRequest::scales);
        let mut place = rig.place()?;
        marks.mark(rig)?;
        let output = rig.buffer.dispatch(&mut place, request, StreamOrder::comm(&rig.stream))?;
        marks.mark(rig)?;
        // Combine follows at once: no barrier and, where the rows can be returned as they are, no
        // look at them either.
        let staged = expert_rows(rig, &output)?;
        let request = match &staged {
            Staged::AsReceived => CombineRequest::new(&output.recv_x, &output.handle),
            Staged::Converted(rows) => CombineRequest::new(rows, &output.handle),
            Staged::InPool(rows) => CombineRequest::new(rows, &output.handle),
        };
        let request = output.recv_topk_weights.iter().fold(request, CombineRequest::topk_weights);
        marks.mark(rig)?;
        let combined = rig.buffer.combine(request, StreamOrder::comm(&rig.stream))?;
        marks.mark(rig)?;
        rig.stream.synchronize()?;
        rig.buffer.check()?;
        rig.learn_regions(&output);

        let mut report = RankReport {
            rank: me,
            num_tokens: setup.tokens,
            num_recv_tokens: output.num_recv_tokens.unwrap_or(0),
            dispatch_failure: check_rank_numbers(rig, plan, &output)?,
            layout_ms: marks.elapsed_ms(0)?,
            dispatch_ms: marks.elapsed_ms(2)?,
            combine_ms: marks.elapsed_ms(4)?,
            ..RankReport::default()
        };
        check_sums(rig, &case, me, &combined, &mut report)?;
        Ok(report)
    })();
    rank.gather(outcome)
}

/// Makes the layout and compares it.
fn lay_out(
    setup: &Setup,
    rig: &mut Rig,
    case: &Case,
    expected: &Expected,
    marks: &mut Marks,
) -> Result<(TypedTensor<'static, f32>, DispatchLayout<'static>)> {
    let (topk_idx, topk_weights) = rig.topk(case)?;
    marks.mark(rig)?;
    let layout = rig.buffer.get_dispatch_layout(&topk_idx, setup.experts, StreamOrder::comm(&rig.stream))?;
    marks.mark(rig)?;
    match rig.compare_layout(&layout, expected)? {
        None => Ok((topk_weights, layout)),
        Some(difference) => Err(Stop::failed(format!("layout: {difference}"))),
    }
}

/// Rows whose every element is the rank's number, and their scales.
fn rank_number_rows(
    setup: &Setup,
    rig: &Rig,
    rank: u32,
) -> Result<(Tensor<'static>, Option<TypedTensor<'static, f32>>)> {
    let (stream, shape) = (&rig.stream, [u64::from(setup.tokens), setup.hidden]);
    let elements = setup.tokens as usize * setup.hidden as usize;
    match setup.dtype {
        RowType::Bf16 => {
            let values = vec![bf16::from_f32(rank as f32); elements];
            Ok((Tensor::from_host(stream, DType::Bf16, &shape, &values)?, None))
        }
        RowType::Fp8 => {
            let bytes = vec![FP8_MAX_BYTE; elements];
            let shape_of_scales = [u64::from(setup.tokens), setup.dtype.num_scales(setup.hidden)];
            let scales = vec![rank as f32 / FP8_MAX; shape_of_scales.iter().product::<u64>() as usize];
            let scales = TypedTensor::from_host(stream, &shape_of_scales, &scales)?;
            Ok((Tensor::from_host(stream, DType::Fp8E4m3, &shape, &bytes)?, Some(scales)))
        }
    }
}

/// The received rows as numbers.
fn received_numbers(rig: &Rig, output: &Received) -> Result<Vec<f32>> {
    let Some(scales) = &output.recv_x_scales else {
        let values = output.recv_x.to_host::<bf16>(&rig.stream)?;
        return Ok(values.into_iter().map(bf16::to_f32).collect());
    };
    let bytes = output.recv_x.to_host::<u8>(&rig.stream)?;
    let (hidden, per_row) = (output.recv_x.columns() as usize, scales.columns() as usize);
    let scales = scales.to_host::<f32>(&rig.stream)?;
    let rows = bytes.chunks_exact(hidden).zip(scales.chunks_exact(per_row));
    let value = |byte: u8, scale: f32| if byte == FP8_MAX_BYTE { FP8_MAX * scale } else { f32::NAN };
    Ok(rows
        .flat_map(|(row, scales)| {
            let blocks = row.chunks(ELEMENTS_PER_SCALE as usize).zip(scales);
            blocks.flat_map(|(block, &scale)| block.iter().map(move |&byte| value(byte, scale)))
        })
        .collect())
}

/// Rows that identity experts return, and the place where combine finds them.
enum Staged<'p> {
    /// In the received rows themselves.
    AsReceived,
    /// In a tensor of bf16.
    Converted(Tensor<'static>),
    /// In the place's rows for combine.
    InPool(PoolRows<'p>),
}

fn expert_rows<'p>(rig: &Rig, output: &Received<'p>) -> Result<Staged<'p>> {
    let recv_x = &output.recv_x;
    if recv_x.dtype() != DType::Bf16 {
        let values: Vec<bf16> = received_numbers(rig, output)?.into_iter().map(bf16::from_f32).collect();
        return Ok(Staged::Converted(Tensor::from_host(&rig.stream, DType::Bf16, recv_x.shape(), &values)?));
    }
    // By the shape alone, not by how many rows came: all ranks return rows in the same way.
    if recv_x.row_stride() == recv_x.row_bytes() {
        return Ok(Staged::AsReceived);
    }
    // The pool pads these rows, in both of its regions alike.
    let rows = output.combine_rows(DType::Bf16, recv_x.columns())?;
    // SAFETY: both are regions of the own pool with this many rows, and the buffer outlives the
    // stream's work.
    unsafe { rig.stream.copy(rows.tensor().ptr(), recv_x.ptr(), recv_x.rows() * recv_x.row_stride())? };
    Ok(Staged::InPool(rows))
}

/// Checks the shape of the received rows and, block by block, that each element is its source
/// rank's number.
fn check_rank_numbers(rig: &Rig, plan: &Plan, output: &Received) -> Result<Option<String>> {
    let (shape, hidden) = (output.recv_x.shape(), output.recv_x.columns());
    let expected_shape = [u64::from(plan.num_recv_tokens), hidden];
    if let Some(difference) = compare::value("recv_x shape", shape, &expected_shape[..]) {
        return Ok(Some(difference));
    }
    let values = received_numbers(rig, output)?;
    for (row, (values, &(source, _))) in values.chunks_exact(hidden as usize).zip(&plan.recv_src).enumerate()
    {
        let wrong = |value: &f32| value.is_nan() || (value - source as f32).abs() > RECV_TOLERANCE;
        if let Some(column) = values.iter().position(wrong) {
            let got = values[column];
            return Ok(Some(format!(
                "recv_x, row {row}, column {column}: expected {source}, the source rank, got {got}"
            )));
        }
    }
    Ok(None)
}

/// Checks each token's mean, every element, and the weights: a token comes back once from each of
/// its destinations.
fn check_sums(rig: &Rig, case: &Case, me: u32, combined: &Combined, report: &mut RankReport) -> Result<()> {
    let tokens = case.routing.num_tokens(me);
    let hidden = case.hidden() as usize;
    let expected: Vec<f32> =
        (0..tokens).map(|token| (case.routing.num_destinations(me, token) * me) as f32).collect();
    let largest = expected.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let tolerance = (largest / 64.0).max(1e-2);
    report.combine_max_abs_expected = largest;

    let shape = [u64::from(tokens), case.hidden()];
    if let Some(difference) = compare::value("combined_x shape", combined.combined_x.shape(), &shape[..]) {
        report.combine_failure = Some(difference);
        return Ok(());
    }
    let got = combined.combined_x.to_host::<bf16>(&rig.stream)?;
    for (token, (row, expected)) in got.chunks_exact(hidden).zip(&expected).enumerate() {
        let mean = row.iter().map(|value| f64::from(value.to_f32())).sum::<f64>() / hidden as f64;
        // Not a number is as far off as can be.
        let distance = |value: f32| if value.is_nan() { f32::MAX } else { (value - expected).abs() };
        let difference = distance(mean as f32);
        report.combine_max_abs_difference = report.combine_max_abs_difference.max(difference);
        if report.combine_failure.is_none() && difference > tolerance {
            let failure = format!("combined_x, token {token}: expected a mean of {expected}, got {mean}");
            report.combine_failure = Some(failure);
        }
        let wrong = row.iter().position(|value| distance(value.to_f32()) > tolerance);
        if let (None, Some(column)) = (&report.combine_failure, wrong) {
            let failure = format!(
                "combined_x, token {token}, column {column}: expected {expected}, got {}",
                row[column]
            );
            report.combine_failure = Some(failure);
        }
    }
    if report.combine_failure.is_none() {
        let expected = rig.round_trip_of_weights(case);
        report.combine_failure = compare_weights(rig, case, Some(&expected), combined)?;
    }
    Ok(())
}

/// Prints what the ranks found with the first data; an error where any found something wrong.
fn say_first_data(reports: &[RankReport], voice: &Voice) -> Result<()> {
    let failed = |report: &RankReport, phase: &str, failure: &Option<String>| {
        let stop =
            failure.as_ref().map(|failure| Stop::failed(format!("{phase}: {failure}")).on_rank(report.rank));
        stop.map_or(Ok(()), |stop| Err(Stop { agreed: true, ..stop }))
    };
    for report in reports {
        failed(report, "dispatch", &report.dispatch_failure)?;
    }
    if let Some(root) = reports.first() {
        voice.line(format!("[dispatch] OK (recv {} tokens)", root.num_recv_tokens));
    }
    for report in reports {
        voice.line(format!(
            "[combine r{}] max|got-expected|={} max|expected|={}",
            report.rank, report.combine_max_abs_difference, report.combine_max_abs_expected
        ));
    }
    reports.iter().try_for_each(|report| failed(report, "combine", &report.combine_failure))
}

/// Round trips of random bytes at full size: one as routers give them, one with holes.
fn bit_for_bit(setup: &Setup, rig: &mut Rig) -> Result<u64> {
    let mut rows = 0;
    for (number, style) in [(1, Style::DistinctTopK), (2, Style::WithHoles)] {
        rows += rig.round_trip(&cases::full_size(setup, number, style))?;
    }
    match rig.take_failure() {
        None => Ok(rows),
        Some(failure) => Err(Stop::failed(failure)),
    }
}

/// Many round trips, without any barrier between them.
fn iterate(setup: &Setup, rig: &mut Rig, iterations: u64, random: bool, voice: &Voice) -> Result<u64> {
    let (mut rows, mut failure) = (0, None);
    for iteration in 0..iterations {
        // The first numbers are taken.
        let number = 3 + iteration;
        let case = match random {
            true => cases::random(setup, number),
            false => cases::full_size(setup, number, Style::DistinctTopK),
        };
        let named = |what: String| format!("iteration {iteration}: {what}");
        rows += rig
            .round_trip(&case)
            .map_err(Stop::from)
            .map_err(|stop| Stop { message: stop.message.clone().map(named), ..stop })?;
        // The others would wait for a rank that stops here.
        failure = failure.or(rig.take_failure().map(named));
        voice.step();
    }
    failure.map_or(Ok(rows), |failure| Err(Stop::failed(failure)))
}

/// Replays one graph, with new routings and rows each time. How many replays were verified, and the
/// rows that those received.
fn replay_graph(setup: &Setup, rig: &mut Rig, replays: u64, voice: &Voice) -> Result<(u64, u64)> {
    // Case numbers of replays start past those of other round trips.
    const FIRST_CASE: u64 = 1 << 32;
    // An argument of the dispatch, so a graph has one.
    const ALIGNMENT: u32 = 4;
    let case = |replay: u64| {
        let style = Style::ALL[replay as usize % Style::ALL.len()];
        Case { expert_alignment: ALIGNMENT, ..cases::full_size(setup, FIRST_CASE + replay, style) }
    };
    let found = rig.replay_graph(case, replays, || voice.step())?;
    rig.take_failure().map_or(Ok(found), |failure| Err(Stop::failed(failure)))
}

/// Points of the rank's stream, for the device's time between them.
#[derive(Default)]
struct Marks(Vec<Event>);

impl Marks {
    fn mark(&mut self, rig: &Rig) -> Result<()> {
        let event = Event::timed(rig.buffer.device())?;
        event.record(&rig.stream)?;
        self.0.push(event);
        Ok(())
    }

    /// Milliseconds from mark `from` to the next; the stream must have passed both.
    fn elapsed_ms(&self, from: usize) -> Result<f32> {
        match self.0.get(from..from + 2) {
            Some([start, end]) => Ok(start.elapsed_ms(end)?),
            _ => Ok(0.0),
        }
    }
}

/// Wall time between calls.
struct Clock(Instant);

impl Clock {
    /// Seconds since the last call, or the start.
    fn lap(&mut self) -> f64 {
        let seconds = self.0.elapsed().as_secs_f64();
        self.0 = Instant::now();
        seconds
    }
}

/// Threads that use the rank's device as other libraries do, if a flag asks for them.
struct Beside(Option<Neighbour>);

impl Beside {
    fn start(rank: &Rank, is_wanted: bool) -> Beside {
        // An interpreter has no cycles to spare.
        let pause = Duration::from_micros(if rank.device.info().is_virtual { 5_000 } else { 100 });
        Beside(is_wanted.then(|| Neighbour::start(&rank.device, pause)))
    }

    /// Ends the threads, and with them a test that has passed. Buffers live until then: no rank
    /// leaves while another still uses its pool.
    fn end(self, rank: &Rank, voice: &Voice) -> Result<()> {
        if let Some(neighbour) = self.0 {
            let calls = rank.gather(neighbour.stop().map_err(Stop::from))?.iter().sum::<u64>();
            voice.line(format!("[neighbour] OK ({calls} rounds of its threads beside all of this)"));
        }
        rank.gather(Ok(()))?;
        voice.line("PASS");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use epoxide_testing::tier;

    use super::*;
    use crate::testing::parse;

    /// Runs with `--json`, under which only [`run`] prints.
    fn execute_line(line: &str) -> (Report, Result<()>) {
        let words = ["roundtrip", "--json", "--threads"].into_iter().chain(line.split_whitespace());
        execute(&parse(words).unwrap())
    }

    #[test]
    fn small_shapes_pass() {
        let lines = [
            "--nodes 1 --ranks-per-node 1 --tokens 0 --hidden 8",
            "--nodes 1 --ranks-per-node 2 --tokens 9 --hidden 72 --num-sms 2",
            "--nodes 1 --ranks-per-node 4 --tokens 5 --hidden 144 --dtype fp8 --topk 7 --experts 12",
            "--nodes 1 --ranks-per-node 3 --tokens 7 --hidden 64 --num-sms 4 --random --iterations 5",
            "--nodes 1 --ranks-per-node 2 --tokens 3 --hidden 32 --iterations 2 --seed 9",
            "--nodes 1 --ranks-per-node 3 --tokens 6 --hidden 40 --graph-replays 7",
            "--nodes 1 --ranks-per-node 2 --tokens 5 --hidden 144 --dtype fp8 --num-sms 4 --graph-replays 6",
            "--nodes 1 --ranks-per-node 1 --tokens 0 --hidden 8 --graph-replays 1",
            "--nodes 2 --ranks-per-node 1 --tokens 0 --hidden 8 --num-sms 4",
            "--nodes 2 --ranks-per-node 2 --tokens 9 --hidden 144 --dtype fp8 --num-sms 6 --random --iterations 3",
            "--nodes 3 --ranks-per-node 1 --tokens 5 --hidden 72 --num-sms 4 --transport shm --queues 2 --graph-replays 4",
            "--nodes 2 --ranks-per-node 2 --tokens 7 --hidden 72 --num-sms 4 --transport tcp --iterations 3 --neighbour",
            "--nodes 1 --ranks-per-node 2 --tokens 7 --hidden 72 --num-sms 2 --iterations 3 --neighbour",
        ];
        for line in lines.into_iter().step_by(tier::pick(5, 1)) {
            let (report, outcome) = execute_line(line);
            assert_eq!(outcome, Ok(()), "{line}");
            assert!(report.pass && report.exit_code == 0 && report.error.is_none(), "{line}");
        }
    }

    #[test]
    fn the_number_of_checked_accesses_is_printed() {
        let races = checked_line(Check::Races, 999_999);
        assert_eq!(
            races,
            "[check] 0 races and 0 reads of unwritten memory in 999999 accesses of kernels' lanes"
        );
        let weak = checked_line(Check::Weak, 12_345_678);
        assert_eq!(weak, "[check] 0 wrong results of weak memory in 12.3 M accesses of kernels' lanes");
    }

    #[test]
    fn small_shapes_pass_in_check_mode() {
        for line in tier::sample([
            "--nodes 1 --ranks-per-node 2 --tokens 9 --hidden 72 --num-sms 2 --check",
            "--nodes 1 --ranks-per-node 2 --tokens 9 --hidden 144 --dtype fp8 --num-sms 4 --check --preemptions 5",
            "--nodes 1 --ranks-per-node 2 --tokens 9 --hidden 72 --num-sms 2 --check=weak",
            "--nodes 2 --ranks-per-node 1 --tokens 7 --hidden 72 --num-sms 4 --transport direct --check",
            "--nodes 2 --ranks-per-node 2 --tokens 5 --hidden 72 --num-sms 4 --transport shm --check",
            "--nodes 2 --ranks-per-node 2 --tokens 5 --hidden 72 --num-sms 4 --transport direct --check=weak",
        ]) {
            let (report, outcome) = execute_line(line);
            assert_eq!(outcome, Ok(()), "{line}");
            assert!(report.checked_accesses.is_some_and(|accesses| accesses > 100), "{line}");
            assert!(report.pass, "{line}");
        }
    }

    #[test]
    fn the_report_has_the_results_of_every_rank() {
        let (report, _) =
            execute_line("--nodes 1 --ranks-per-node 3 --tokens 6 --hidden 16 --random --iterations 2");
        let value = serde_json::to_value(&report).unwrap();
        assert_eq!(value["config"]["ranks"], 3);
        assert_eq!((&value["config"]["placement"], &value["iterations"]), (&"threads".into(), &2.into()));
        let ranks = value["ranks"].as_array().unwrap();
        assert_eq!(
            ranks.iter().map(|rank| rank["rank"].as_u64()).collect::<Vec<_>>(),
            [Some(0), Some(1), Some(2)]
        );
        // Every token goes to all three ranks or fewer, and comes back that many times.
        let largest = ranks[2]["combine_max_abs_expected"].as_f64().unwrap();
        assert!(largest > 0.0 && largest <= 6.0, "{largest}");
        assert_eq!(ranks[2]["combine_max_abs_difference"], 0.0);
    }

    #[test]
    fn low_latency_reports_in_the_same_form() {
        let line = "--mode low-latency --ranks-per-node 3 --tokens 6 --hidden 128 --dtype fp8 --iterations 2 --graph-replays 3";
        let (report, outcome) = execute_line(line);
        assert_eq!(outcome, Ok(()));
        let value = serde_json::to_value(&report).unwrap();
        let config = &value["config"];
        assert_eq!((&config["mode"], &config["ranks"]), (&"low-latency".into(), &3.into()));
        assert_eq!((&config["capacity_rows"], &config["device_is_virtual"]), (&18.into(), &true.into()));
        assert!(config["pool_bytes"].as_u64() > Some(0) && config.get("num_channels").is_none(), "{config}");
        assert_eq!((&value["iterations"], &value["graph_replays"]), (&2.into(), &3.into()));
        assert_eq!((&value["pass"], &value["exit_code"]), (&true.into(), &0.into()));
        let ranks = value["ranks"].as_array().unwrap();
        assert_eq!(ranks.iter().map(|rank| &rank["num_tokens"]).collect::<Vec<_>>(), [&6, &6, &6]);
        let rows: Vec<u64> = ranks.iter().filter_map(|rank| rank["num_recv_tokens"].as_u64()).collect();
        assert!(rows.len() == 3 && rows.iter().all(|&rows| rows > 0 && rows <= 18), "{rows:?}");
        for phase in ["setup", "bit_for_bit", "iterations", "graph"] {
            assert!(value["times"][format!("{phase}_seconds")].as_f64() > Some(0.0), "{phase}");
        }
        // The JSON report contains errors as well.
        let (report, outcome) = execute_line("--mode low-latency --ranks-per-node 2 --tokens 2000");
        assert!(
            outcome.is_err()
                && report.exit_code == 2
                && report.error.is_some_and(|what| what.contains("2000"))
        );
    }

    #[test]
    fn the_readme_has_the_counts_that_the_defaults_give() {
        let args: Args = crate::testing::parse(["roundtrip"]).unwrap();
        let topology = args.shared.topology(DEFAULTS, None).unwrap();
        let setup = args.shared.resolve(topology, DEFAULTS).unwrap();
        let tokens = vec![setup.tokens; setup.ranks as usize];
        let mut rng = rng_of(&[setup.seed]);
        let routing = Routing::random(&mut rng, &tokens, setup.topk, setup.experts, Style::DistinctTopK);
        let to_first = |source| (0..setup.tokens).filter(|&token| routing.hits(source, token, 0)).count();
        let line = format!("[dispatch] OK (recv {} tokens)", (0..setup.ranks).map(to_first).sum::<usize>());
        assert!(include_str!("../../README.md").contains(&line), "{line}");
    }

    #[test]
    fn check_mode_prints_its_estimate_beforehand() {
        let of = |line: &str| {
            let words = format!("roundtrip --check {line}");
            let args: Args = crate::testing::parse(words.split_whitespace()).unwrap();
            let topology = args.shared.topology(CHECK_DEFAULTS, None).unwrap();
            let setup = args.shared.resolve(topology, CHECK_DEFAULTS).unwrap();
            (check_seconds(&setup, args.iterations()), before_check(&setup, &args))
        };
        // The defaults fit into a minute, even on a machine that is two times slower.
        for line in ["", "--mode intranode", "--mode low-latency", "--dtype fp8", "--nodes 2 --transport tcp"]
        {
            let (seconds, text) = of(line);
            assert!(seconds < 30.0 && text.contains("about ") && text.contains("give your own"), "{text}");
        }
        let (seconds, text) = of("--mode intranode --tokens 32 --hidden 256 --num-sms 8 --iterations 10");
        let words = "8 ranks, 32 tokens of 256 elements each, 8 multiprocessors: about ";
        assert!(text.contains(words) && !text.contains("give your own"), "{text}");
        for longer in ["--iterations 20", "--iterations 10 --tokens 256", "--iterations 10 --hidden 65536"] {
            assert!(of(&format!("--mode intranode {longer}")).0 > seconds, "{longer}");
        }
    }

    #[test]
    fn bad_shapes_and_missing_hardware_are_told_apart() {
        for (line, code) in [
            ("--ranks-per-node 9", 2),
            ("--mode internode --nodes 1", 2),
            ("--nodes 1 --tokens 4294967295", 2),
            ("--nodes 2 --ranks-per-node 1 --tokens 4294967295", 2),
        ] {
            let (report, outcome) = execute_line(line);
            assert_eq!(outcome.unwrap_err().code, code, "{line}");
            assert!(!report.pass && report.exit_code == code && report.error.is_some(), "{line}");
        }
        #[cfg(not(feature = "cuda"))]
        assert_eq!(execute_line("--device cuda").1.unwrap_err().code, crate::stop::SKIPPED);
        #[cfg(not(feature = "rdma"))]
        {
            let line = "--nodes 2 --ranks-per-node 1 --tokens 1 --hidden 8 --transport verbs";
            let stop = execute_line(line).1.unwrap_err();
            let message = stop.message.unwrap_or_default();
            assert!(stop.code == crate::stop::SKIPPED && message.contains("--features rdma"), "{message}");
        }
    }

    #[test]
    fn failures_are_printed_with_the_number_of_their_rank() {
        let voice = Voice::new(false, false);
        let failure = Some("combined_x, token 3: expected a mean of 4, got 5".to_owned());
        let reports = [
            RankReport::default(),
            RankReport { rank: 1, combine_failure: failure, ..RankReport::default() },
        ];
        let stop = say_first_data(&reports, &voice).unwrap_err();
        assert_eq!((stop.code, stop.agreed), (crate::stop::FAILED, true));
        let message = "rank 1: combine: combined_x, token 3: expected a mean of 4, got 5";
        assert_eq!(stop.message.as_deref(), Some(message));
    }
}

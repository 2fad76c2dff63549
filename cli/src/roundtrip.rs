//! `epoxide roundtrip`: the acceptance test. Layout, dispatch and combine on all ranks, every
//! result checked.
//!
//! [`Script::run`] is the test, for either mode. The first data and rows of random bytes are compared
//! with the oracle. On request follow many random cases, and replays of one graph. [`Acceptance`]
//! has what differs between the modes, beside [`RoundTrip`].

use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use epoxide::group::Member;
use epoxide::{low_latency as low, throughput};
use epoxide_testing::harness::Rank;
use epoxide_testing::neighbour::Neighbour;
use epoxide_testing::roundtrip::{Cases, Draw, Replays, RoundTrip};

use crate::error::{CommandError, Result};
use crate::options::{Check, Defaults, Mode, RoundTripFlags, Settings};
use crate::output::{Console, complain, duration, json};
use crate::ranks::{self, Placement, RankContext};

mod high_throughput;
mod low_latency;
mod report;

use report::{ConfigReport, Publish, Report};

const DEFAULTS: Defaults = Defaults { mode: Mode::Internode, tokens: 128, hidden: 1024, num_sms: None };
/// The same in check mode, in which kernels take ten to fifty times as long.
const CHECK_DEFAULTS: Defaults =
    Defaults { mode: Mode::Internode, tokens: 32, hidden: 256, num_sms: Some(8) };

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

    /// Draw new sizes for each iteration, up to the given ones, and another number of tokens for each
    /// rank. Without --iterations there are 100
    #[arg(long)]
    random: bool,

    /// Replays of one graph of layout, dispatch and combine, each with a new routing and contents
    #[arg(long, value_name = "N", default_value_t = 0)]
    graph_replays: u64,

    /// Meanwhile threads of each rank's process allocate, free, load modules and copy on its
    /// device, as other libraries do. A thread pauses this many microseconds between two calls
    /// [default: 100, on the virtual GPU 5000]
    #[arg(long, value_name = "US", num_args = 0..=1, require_equals = true)]
    neighbour: Option<Option<u64>>,
}

impl Args {
    fn iterations(&self) -> u64 {
        if self.random && self.iterations == 0 { 100 } else { self.iterations }
    }
}

/// Runs the test and prints the JSON object, if requested.
pub fn run(args: Args) -> Result<()> {
    let (report, outcome) = execute(&args);
    // The parent of the ranks has an error only if rank 0 has printed no object. A process that is
    // rank 0 of several prints the object even if another rank prints the reason of its error.
    let is_rank_0 = matches!(Member::detect(), Ok(Some(member)) if member.rank == 0);
    let ours = is_rank_0 || report.config.is_some() || (report.error.is_some() && ranks::prints());
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
    let outcome = ranks::run(&args.shared, defaults, |context| roundtrip(context, args, &report))
        .map_err(CommandError::of_timeout_flag);
    let mut report = report.into_inner().unwrap_or_else(PoisonError::into_inner);
    report.times.total_seconds = start.elapsed().as_secs_f64();
    report.pass = outcome.is_ok();
    if let Err(error) = &outcome {
        (report.exit_code, report.error) = (error.code, error.message.clone());
    }
    (report, outcome)
}

fn roundtrip(context: &RankContext, args: &Args, report: &Mutex<Report>) -> Result<()> {
    let console = Console::new(context.is_root(), !args.shared.json);
    let console =
        if context.checker.is_some() { console.with_progress("roundtrip --check") } else { console };
    if context.checker.is_some() && context.is_root() {
        complain(&before_check(&context.settings, args));
    }
    let publish = |change: &dyn Fn(&mut Report)| {
        if context.is_root() {
            change(&mut report.lock().unwrap_or_else(PoisonError::into_inner));
        }
    };
    let cases = context.settings.cases();
    let script = Script { context, console, publish: &publish, cases, lap: Instant::now() };
    match context.settings.mode {
        Mode::LowLatency => script.run::<low::Buffer>(args),
        Mode::Intranode | Mode::Internode => script.run::<throughput::Buffer>(args),
    }
}

/// A mode in the acceptance test: all that differs beside its round trips.
trait Acceptance: RoundTrip {
    /// Options of the buffer.
    fn options(settings: &Settings) -> Self::Options;

    /// The settings, and what follows from them.
    fn config(context: &RankContext, rank: &Rank<Self>) -> ConfigReport;

    /// The first data, and the first cases. Collective.
    fn first_checks(script: &mut Script<'_>, rank: &mut Rank<Self>) -> Result<()>;

    /// The part of a line that gives the rows of all round trips.
    fn rows_text(rows: u64) -> String;

    /// The line about replays.
    fn replays_text(replays: u64, found: Replays, seconds: f64) -> String;
}

/// The test on one rank.
struct Script<'a> {
    context: &'a RankContext,
    console: Console,
    publish: Publish<'a>,
    cases: Cases,
    /// When the last phase has ended.
    lap: Instant,
}

impl Script<'_> {
    fn run<B: Acceptance>(mut self, args: &Args) -> Result<()> {
        let (context, publish) = (self.context, self.publish);
        let neighbour = args.neighbour.map(|pause| start_neighbour(context, pause));

        self.console.doing("making the buffer");
        let options = B::options(&context.settings);
        let rank = Rank::<B>::new(context.device.clone(), context.groups.work.clone(), options);
        let mut rank = context.agree(rank.map_err(CommandError::from))?;
        let config = B::config(context, &rank);
        self.console.line(cfg_line(&config));
        let seconds = self.lap();
        publish(&|report| {
            report.config = Some(config.clone());
            report.times.setup_seconds = seconds;
        });

        B::first_checks(&mut self, &mut rank)?;

        let iterations = args.iterations();
        if iterations > 0 {
            self.console.doing("round trips");
            self.console.count(iterations);
            let (draw, kind) = match args.random {
                true => (Draw::Random, "random round trips"),
                false => (Draw::Full, "round trips"),
            };
            let rows = self.iterate(&mut rank, iterations, draw);
            let rows = context.gather(rows)?.iter().sum();
            let (seconds, rows) = (self.lap(), B::rows_text(rows));
            self.console
                .line(format!("[iterations] OK ({iterations} {kind}{rows}, 0 mismatches, {seconds:.1} s)"));
            publish(&|report| {
                report.iterations = iterations;
                report.times.iterations_seconds = seconds;
            });
        }

        let replays = args.graph_replays;
        if replays > 0 {
            self.console.doing("replays of a graph");
            self.console.count(replays);
            let found = B::replay(&mut rank, &self.cases, replays, || self.console.step());
            let found = context.gather(settle(&mut rank, found))?;
            let verified = found.first().map_or(0, |found| found.verified);
            let rows = found.iter().map(|found| found.rows).sum();
            let seconds = self.lap();
            let text = B::replays_text(replays, Replays { verified, rows }, seconds);
            self.console.line(format!("[graph] OK ({text})"));
            publish(&|report| {
                report.graph_replays = replays;
                report.times.graph_seconds = seconds;
            });
        }

        if let Some((check, checker)) = &context.checker {
            // Any finding ends a run before: all ranks have finished here.
            context.gather(Ok(()))?;
            let accesses = checker.accesses();
            self.console.line(checked_line(*check, accesses));
            publish(&|report| report.checked_accesses = Some(accesses));
        }
        if let Some(neighbour) = neighbour {
            let calls = context.gather(neighbour.stop().map_err(CommandError::from))?.iter().sum::<u64>();
            self.console.line(format!("[neighbour] OK ({calls} rounds of its threads beside all of this)"));
        }
        // Buffers live until then: no rank leaves while another still uses its pool.
        context.gather(Ok(()))?;
        self.console.line("PASS");
        Ok(())
    }

    /// Seconds since the last call, or the start.
    fn lap(&mut self) -> f64 {
        let before = std::mem::replace(&mut self.lap, Instant::now());
        self.lap.duration_since(before).as_secs_f64()
    }

    /// Runs many round trips without a barrier between them. Returns the number of their rows.
    fn iterate<B: Acceptance>(&self, rank: &mut Rank<B>, iterations: u64, draw: Draw) -> Result<u64> {
        let (mut rows, mut failure) = (0, None);
        for number in (B::FIRST_NUMBER..).take(iterations as usize) {
            let named = |what: String| format!("iteration {number}: {what}");
            rows += rank
                .round_trip(&B::case(&self.cases, number, draw))
                .map_err(CommandError::from)
                .map_err(|error| CommandError { message: error.message.clone().map(named), ..error })?;
            // The others would wait for a rank that stops here.
            failure = failure.or(rank.take_failure().map(named));
            self.console.step();
        }
        failure.map_or(Ok(rows), |failure| Err(CommandError::failed(failure)))
    }
}

/// The outcome, or the first check that the rank has noted as failed.
fn settle<B, T>(rank: &mut Rank<B>, outcome: epoxide::Result<T>) -> Result<T> {
    let value = outcome?;
    rank.take_failure().map_or(Ok(value), |failure| Err(CommandError::failed(failure)))
}

/// A failed check of a rank, which all ranks return.
fn failure_of(rank: u32, failure: Option<String>) -> Result<()> {
    failure.map_or(Ok(()), |failure| {
        Err(CommandError { agreed: true, ..CommandError::failed(failure).on_rank(rank) })
    })
}

/// Threads that use the rank's device as other libraries do, with rests of `pause` us.
fn start_neighbour(context: &RankContext, pause: Option<u64>) -> Neighbour {
    // An interpreter has no cycles to spare.
    let default = if context.device.info().is_virtual { 5_000 } else { 100 };
    Neighbour::start(&context.device, Duration::from_micros(pause.unwrap_or(default)))
}

/// Estimate of the time of check mode, and the flags for other sizes.
fn before_check(settings: &Settings, args: &Args) -> String {
    let trips = args.iterations() + args.graph_replays;
    let (ranks, tokens, hidden, sms) = (settings.ranks, settings.tokens, settings.hidden, settings.num_sms);
    let seconds = duration(check_seconds(settings, trips));
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

/// Estimated seconds of check mode, which runs one warp at a time, for `trips` round trips after
/// the first ones. The model fits runs on the two cores in docs/BENCH-NOTES.md, with an error of at
/// most a half.
fn check_seconds(settings: &Settings, trips: u64) -> f64 {
    // Seconds of a rank, of a multiprocessor, of a token, and of an element of a token.
    let (fixed, of_sm, of_token, of_element) = match (settings.mode, settings.nodes) {
        (Mode::LowLatency, _) => (0.1, 0.032, 4.4e-3, 38e-6),
        (_, 1) => (0.44, 0.021, 3.7e-3, 3.9e-6),
        _ => (0.6, 0.025, 7.4e-3, 7.8e-6),
    };
    let tokens = f64::from(settings.tokens);
    // Blocks without tokens end at once.
    let sms = f64::from(settings.num_sms.min(settings.tokens.max(2)));
    let copies = 0.5 + f64::from(settings.topk.min(settings.ranks)) / 8.0;
    let rows = tokens * copies * (of_token + of_element * settings.hidden as f64);
    f64::from(settings.ranks) * (fixed + of_sm * sms + rows) * (1.0 + 0.3 * trips as f64)
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

fn cfg_line(config: &ConfigReport) -> String {
    let s = &config.settings;
    let mut line = String::from("[cfg]");
    // Writing to a string cannot fail.
    let mut add = |text: std::fmt::Arguments<'_>| _ = line.write_fmt(text);
    let mode = match s.mode {
        Mode::LowLatency => "low-latency",
        Mode::Intranode => "intranode",
        Mode::Internode => "internode",
    };
    add(format_args!(" mode={mode} nodes={} num_ranks={}", s.nodes, s.ranks));
    if s.mode == Mode::LowLatency && s.nodes > 1 {
        add(format_args!(" transport={}", s.transport));
    }
    add(format_args!(
        " tokens={} hidden={} experts={} topk={} dtype={}{} device={:?}",
        s.tokens,
        s.hidden,
        s.experts,
        s.topk,
        s.dtype.name(),
        if s.quantise { " quantise" } else { "" },
        config.device_name,
    ));
    let Some(more) = &config.high_throughput else {
        add(format_args!(" seed={:#x} pool_bytes={}", s.seed, config.pool_bytes));
        return line;
    };
    let placement = match config.placement {
        Placement::Threads => "threads",
        Placement::Processes | Placement::OneRank => "processes",
    };
    add(format_args!(
        " ({placement}) seed={:#x} num_sms={} channels={} nvl_send={} nvl_recv={} pool_bytes={} rows={} nvl_hint={} rdma_hint={}",
        s.seed,
        s.num_sms,
        more.num_channels,
        more.num_max_nvl_chunked_send_tokens,
        more.num_max_nvl_chunked_recv_tokens,
        config.pool_bytes,
        config.capacity_rows,
        more.nvl_buffer_size_hint,
        more.rdma_buffer_size_hint,
    ));
    if s.nodes > 1 {
        add(format_args!(
            " transport={} one_node={} queues={} rdma_send={} rdma_recv={} wire_bytes={}",
            s.transport,
            more.is_one_node,
            s.queues,
            s.config.num_max_rdma_chunked_send_tokens,
            s.config.num_max_rdma_chunked_recv_tokens,
            more.wire_bytes,
        ));
    }
    line
}

#[cfg(test)]
mod tests {
    use epoxide_testing::oracle::{Style, recv_order};
    use epoxide_testing::payload::rng_of;
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
            "--nodes 1 --ranks-per-node 2 --tokens 6 --hidden 64 --num-sms 4 --dtype f32 --random --iterations 6",
            "--nodes 1 --ranks-per-node 3 --tokens 6 --hidden 40 --graph-replays 7",
            "--nodes 1 --ranks-per-node 2 --tokens 5 --hidden 144 --dtype fp8 --num-sms 4 --graph-replays 6",
            "--nodes 1 --ranks-per-node 1 --tokens 0 --hidden 8 --graph-replays 1",
            "--nodes 2 --ranks-per-node 1 --tokens 0 --hidden 8 --num-sms 4",
            "--nodes 2 --ranks-per-node 2 --tokens 9 --hidden 160 --dtype mxfp8 --num-sms 6 --random --iterations 2",
            "--nodes 1 --ranks-per-node 2 --tokens 5 --hidden 160 --dtype nvfp4 --num-sms 4 --graph-replays 2",
            "--nodes 1 --ranks-per-node 2 --tokens 9 --hidden 256 --dtype fp8 --quantise --random --iterations 2 --graph-replays 3",
            "--nodes 2 --ranks-per-node 2 --tokens 9 --hidden 160 --dtype mxfp8 --quantise --num-sms 6 --random --iterations 2",
            "--nodes 2 --ranks-per-node 2 --tokens 9 --hidden 144 --dtype fp8 --num-sms 6 --random --iterations 3",
            "--nodes 3 --ranks-per-node 1 --tokens 5 --hidden 72 --num-sms 4 --transport shm --queues 2 --graph-replays 4",
            "--nodes 2 --ranks-per-node 2 --tokens 7 --hidden 72 --num-sms 4 --transport tcp --iterations 3 --neighbour",
            "--nodes 1 --ranks-per-node 2 --tokens 7 --hidden 72 --num-sms 2 --iterations 3 --neighbour=900",
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
        // Every token is sent to at most three ranks, and each returns it.
        let largest = ranks[2]["combine_max_abs_expected"].as_f64().unwrap();
        assert!(largest > 0.0 && largest <= 6.0, "{largest}");
        assert_eq!(ranks[2]["combine_max_abs_difference"], 0.0);
    }

    #[test]
    fn low_latency_reports_in_the_same_form() {
        let line = "--mode low-latency --nodes 2 --ranks-per-node 1 --tokens 5 --hidden 256 --dtype mxfp8 --iterations 4";
        assert_eq!(execute_line(line).1, Ok(()));
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
        let cases = args.shared.resolve(topology, DEFAULTS).unwrap().cases();
        let routing = cases.routing(&mut rng_of(&[cases.seed]), Style::DistinctTopK);
        let line = format!("[dispatch] OK (recv {} tokens)", recv_order(&routing, 0).len());
        assert!(include_str!("../../README.md").contains(&line), "{line}");
    }

    #[test]
    fn a_gpu_has_neither_checks_nor_an_order_of_warps() {
        for flag in ["--check", "--random-schedule", "--preemptions 2"] {
            let (_, outcome) = execute_line(&format!("--device cuda {flag}"));
            let error = outcome.unwrap_err();
            let message = error.message.unwrap();
            let name = flag.split(' ').next().unwrap();
            assert_eq!(error.code, crate::error::USAGE);
            assert!(message.starts_with(&format!("{name} with --device cuda: ")), "{message}");
        }
    }

    #[test]
    fn check_mode_prints_its_estimate_beforehand() {
        let of = |line: &str| {
            let words = format!("roundtrip --check {line}");
            let args: Args = crate::testing::parse(words.split_whitespace()).unwrap();
            let topology = args.shared.topology(CHECK_DEFAULTS, None).unwrap();
            let settings = args.shared.resolve(topology, CHECK_DEFAULTS).unwrap();
            (check_seconds(&settings, args.iterations()), before_check(&settings, &args))
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
        assert_eq!(execute_line("--device cuda").1.unwrap_err().code, crate::error::SKIPPED);
        #[cfg(not(feature = "rdma"))]
        {
            let line = "--nodes 2 --ranks-per-node 1 --tokens 1 --hidden 8 --transport verbs";
            let error = execute_line(line).1.unwrap_err();
            let message = error.message.unwrap_or_default();
            assert!(error.code == crate::error::SKIPPED && message.contains("--features rdma"), "{message}");
        }
    }
}

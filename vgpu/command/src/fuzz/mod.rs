//! `vgpu fuzz`: runs random programs on the virtual GPU and on another device, and compares all of
//! their results, bit for bit.
//!
//! [`forms`] is the table of instructions with the formulas of the PTX manual, [`effects`] those
//! without one, [`program`] draws programs of both and writes them as PTX, [`target`] has the
//! devices, `worker` runs one in a process of its own, [`shrink`] makes a program that differs small.

mod effects;
mod float;
mod forms;
mod kind;
mod program;
mod report;
mod shrink;
mod target;

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "cuda", test))]
mod worker;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::output::{self, Verdict};
use forms::Form;
use kind::Kind;
use program::{Dealer, Program, Style, Written};
use report::Report;
use target::{Failure, Job, Target, Virtual};

/// Shown below the flags.
pub const HELP: &str = "Programs: one in three has instructions with operands of their own, which are held against the formulas of
the PTX manual as well; all instructions come in turn. The others are straight lines, branches and loops over
one another's results, with votes, shuffles, reductions, shared, global and local memory, barriers and atomics.

A NaN is any NaN where the manual leaves its bits open (f64, conversions, abs and neg): such results are
compared as NaN, and a program makes one NaN of all before it goes on. Left out are quotients by zero,
approximations, sums and products without a rounding (an assembler may contract them), and what
docs/KERNELS.md lists as departures of hardware from the manual.

Examples:
  vgpu fuzz                                    two modes of the virtual GPU
  vgpu fuzz --device cuda --seed 7 --programs 3000 --limit 500
  vgpu fuzz --device cuda --seed 7 --first 41 --programs 1 --out DIR      one program again, with its PTX

Exit codes: 0 no difference, 1 differences, 2 bad usage, or no such device.";

/// Programs of a module: a driver takes long for each module.
const BATCH: u64 = 24;
/// The longest search for a smaller program.
const LONGEST_SEARCH: Duration = Duration::from_secs(20);

/// Arguments of the command.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The device to compare the virtual GPU with
    #[arg(long, value_enum, default_value = "virtual")]
    device: Device,
    /// Number of the GPU, of those that the driver has
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpu: u32,
    /// Seed of the programs: the same seed gives the same programs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The number of the first program
    #[arg(long, value_name = "N", default_value_t = 0)]
    first: u64,
    /// How many programs
    #[arg(long, value_name = "N", default_value_t = 240, value_parser = clap::value_parser!(u64).range(1..))]
    programs: u64,
    /// Begin nothing after so many seconds, and make no difference smaller
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    /// Differences of an instruction that are printed in full
    #[arg(long, value_name = "N", default_value_t = 2)]
    show: usize,
    /// Write the PTX of all modules, of each difference, and the counts of each opcode to this
    /// folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// The device that the virtual GPU is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Device {
    /// The virtual GPU itself, with checks and other schedules
    Virtual,
    /// The formulas of the PTX manual alone: instructions with operands of their own
    Manual,
    /// An NVIDIA GPU, through its driver
    Cuda,
}

/// All forms, those with a formula first.
fn all_forms() -> Vec<Form> {
    let mut all = forms::all();
    all.extend(effects::all());
    all
}

/// Runs the programs and compares.
///
/// # Errors
/// The device does not exist, or a file cannot be written.
pub fn run(args: &Args) -> Result<Verdict> {
    let forms = all_forms();
    if let Some(out) = &args.out {
        std::fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    }
    let mut session = Session {
        forms: &forms,
        virt: Virtual::Fast,
        other: match args.device {
            Device::Manual => None,
            Device::Virtual => Some(Box::new(Virtual::Checked(args.seed))),
            Device::Cuda => Some(cuda(args.gpu)?),
        },
        report: Report::new(args),
        end: Instant::now() + Duration::from_secs(args.limit.min(u64::from(u32::MAX))),
    };
    output::print(&format!("virtual: {}\n", session.virt.description()))?;
    if let Some(other) = &session.other {
        output::print(&format!("{}: {}\n", other.name(), other.description()))?;
    }
    let begin = Instant::now();
    let dealer = Dealer::new(&forms, args.seed);
    let end =
        args.first.checked_add(args.programs).context("--first and --programs are too large together")?;
    let mut number = args.first;
    while number < end && Instant::now() < session.end {
        let numbers = number..end.min(number.saturating_add(BATCH));
        let programs: Vec<(u64, Program)> =
            numbers.map(|number| (number, drawn(&dealer, number, args.device))).collect();
        if let Err(error) = session.batch(&programs) {
            session.report.end(&forms, number - args.first, begin.elapsed())?;
            return Err(error);
        }
        number += programs.len() as u64;
    }
    session.report.end(&forms, number - args.first, begin.elapsed())
}

/// Program `number` of a run: one in three has its instructions apart, and of the others one in two
/// stores each result.
fn drawn(dealer: &Dealer, number: u64, device: Device) -> Program {
    match (number % 3, device) {
        (_, Device::Manual) => dealer.program(number, Style::Apart),
        (0, _) => dealer.program(number / 3, Style::Apart),
        (1, _) => dealer.program(number / 3 * 2, Style::Traced),
        _ => dealer.program(number / 3 * 2 + 1, Style::Chained),
    }
}

#[cfg(feature = "cuda")]
fn cuda(gpu: u32) -> Result<Box<dyn Target>> {
    let program = std::env::current_exe().context("this program has no path")?;
    let worker = worker::Worker::start("cuda", target::LONGEST_ANSWER, move || {
        let mut command = std::process::Command::new(&program);
        command.args(["serve-gpu", "--gpu", &gpu.to_string()]);
        command
    })?;
    Ok(Box::new(worker))
}

/// Arguments of the process that `--device cuda` runs programs in.
#[cfg(feature = "cuda")]
#[derive(Debug, clap::Args)]
pub struct ServeArgs {
    #[arg(long)]
    gpu: u32,
}

/// Runs the programs that come by standard input on an NVIDIA GPU, up to the first that fails.
///
/// # Errors
/// Standard input is no socket of [`run`].
#[cfg(feature = "cuda")]
pub fn serve(args: &ServeArgs) -> Result<Verdict> {
    worker::serve(|| Ok(Box::new(cuda::Cuda::open(args.gpu)?)))?;
    Ok(Verdict::Clean)
}

#[cfg(not(feature = "cuda"))]
fn cuda(_gpu: u32) -> Result<Box<dyn Target>> {
    bail!(
        "--device cuda: this program was built without the feature `cuda`; build it by \
         `cargo build --release --package epoxide-vgpu-cli --features cuda`"
    )
}

/// The head of a module.
const HEAD: &str = "// Random kernels of vgpu fuzz, each with words in and words out.
.version 8.5
.target sm_90
.address_size 64
";

/// A program, as it is run.
struct Run<'a> {
    program: &'a Program,
    written: Written,
    job: Job,
}

impl<'a> Run<'a> {
    fn new(program: &'a Program, forms: &[Form], kernel: String) -> Self {
        let written = program.write(forms, &kernel);
        let outputs = written.outputs.len() * program.lanes();
        Self {
            program,
            job: Job { kernel, threads: program.threads, input: program.input(), outputs },
            written,
        }
    }
}

fn module(runs: &[Run]) -> String {
    let kernels: String = runs.iter().map(|run| format!("\n{}", run.written.text)).collect();
    let functions = if kernels.contains("call ") { effects::FUNCTIONS } else { "" };
    format!("{HEAD}{functions}{kernels}")
}

/// Outcome of a comparison.
#[derive(Debug)]
enum Outcome {
    Same,
    /// Results that differ: the output's number, the lane, the virtual GPU's value, the other's.
    Differ(Vec<Difference>),
    /// One of the two fails.
    Fails(&'static str, Failure),
}

/// A result that differs.
#[derive(Clone, Copy, Debug)]
struct Difference {
    output: usize,
    lane: usize,
    virt: u64,
    other: u64,
}

/// Both devices, and the findings.
struct Session<'a> {
    forms: &'a [Form],
    virt: Virtual,
    other: Option<Box<dyn Target>>,
    report: Report,
    /// The end of `--limit`.
    end: Instant,
}

impl Session<'_> {
    /// Runs a module of programs; where it fails, its programs one by one.
    fn batch(&mut self, programs: &[(u64, Program)]) -> Result<()> {
        let forms = self.forms;
        let runs: Vec<Run> =
            programs.iter().map(|(number, program)| Run::new(program, forms, kernel(*number))).collect();
        let first = programs.first().map_or(0, |(number, _)| *number);
        self.report.keep(&format!("module-{first:06}.ptx"), module(&runs))?;
        let outcomes: Vec<Outcome> = match self.on_both(&runs) {
            Ok(both) => {
                for (run, (virt, _)) in runs.iter().zip(&both) {
                    self.report.against_the_manual(forms, run, virt);
                }
                runs.iter().zip(&both).map(|(run, both)| compare(run, both)).collect()
            }
            Err((who, failure @ Failure::Lost(_))) => bail!("{who} {failure}"),
            Err(_) if runs.len() > 1 => {
                for (number, program) in programs {
                    self.batch(&[(*number, program.clone())])?;
                }
                return Ok(());
            }
            Err((who, failure)) => vec![Outcome::Fails(who, failure)],
        };
        for (((number, program), run), outcome) in programs.iter().zip(&runs).zip(outcomes) {
            if !matches!(outcome, Outcome::Fails(..)) {
                self.report.count(forms, program);
            }
            for text in self.found(*number, run, &outcome)? {
                output::print(&format!("{text}\n"))?;
            }
        }
        Ok(())
    }

    /// The results of both devices; or which of them fails, and how.
    fn on_both(&mut self, runs: &[Run]) -> Result<Vec<Both>, (&'static str, Failure)> {
        let text = module(runs);
        let jobs: Vec<&Job> = runs.iter().map(|run| &run.job).collect();
        let virt = self.virt.run(&text, &jobs).map_err(|failure| (self.virt.name(), failure))?;
        let Some(other) = &mut self.other else {
            return Ok(virt.into_iter().map(|words| (words, None)).collect());
        };
        let words = other.run(&text, &jobs).map_err(|failure| (other.name(), failure))?;
        Ok(virt.into_iter().zip(words.into_iter().map(Some)).collect())
    }

    /// Runs one program.
    fn outcome(&mut self, run: &Run) -> Outcome {
        match self.on_both(std::slice::from_ref(run)) {
            Ok(both) => both.first().map_or(Outcome::Same, |both| compare(run, both)),
            Err((who, failure)) => Outcome::Fails(who, failure),
        }
    }

    /// Reports about a program, if it differs: of each instruction that is apart, or of the program
    /// after making it small.
    fn found(&mut self, number: u64, run: &Run, outcome: &Outcome) -> Result<Vec<String>> {
        let fails = match outcome {
            Outcome::Same => return Ok(vec![]),
            Outcome::Differ(_) => false,
            Outcome::Fails(..) => true,
        };
        self.report.differing += 1;
        let mut texts = vec![];
        if let (Style::Apart, Outcome::Differ(found)) = (run.program.style, outcome) {
            let differs = |at: &usize| found.iter().any(|one| one.output == *at);
            for at in (0..run.program.steps.len()).filter(differs) {
                let steps = vec![run.program.steps[at].clone()];
                let small = Program { steps, ..run.program.clone() };
                texts.extend(self.report(number, (run, outcome), &small)?);
            }
            return Ok(texts);
        }
        if !self.report.is_worth_a_search(self.forms, run, outcome) {
            return Ok(texts);
        }
        let end = self.end.min(Instant::now() + LONGEST_SEARCH);
        let mut small = shrink::smallest(run.program, |program| {
            if Instant::now() > end {
                return None;
            }
            Some(match self.outcome(&Run::new(program, self.forms, kernel(number))) {
                Outcome::Same => false,
                Outcome::Differ(_) => !fails,
                Outcome::Fails(..) => fails,
            })
        });
        // With each result stored, the first step that differs shows. Storing may hide a
        // difference.
        if small.style == Style::Chained {
            let traced = Program { style: Style::Traced, ..small.clone() };
            if matches!(self.outcome(&Run::new(&traced, self.forms, kernel(number))), Outcome::Differ(_)) {
                small = traced;
            }
        }
        texts.extend(self.report(number, (run, outcome), &small)?);
        Ok(texts)
    }

    /// The report about what is left of a program, if it is one of those that are printed; about
    /// the whole program where what is left does not differ when it runs once more.
    fn report(&mut self, number: u64, whole: (&Run, &Outcome), small: &Program) -> Result<Option<String>> {
        let small = Run::new(small, self.forms, kernel(number));
        let again = self.outcome(&small);
        let shown = if matches!(again, Outcome::Same) { whole } else { (&small, &again) };
        let name = self.other.as_ref().map_or("manual", |other| other.name());
        self.report.difference(self.forms, (number, whole.0), shown, name)
    }
}

/// The name of a program's kernel.
fn kernel(number: u64) -> String {
    format!("fuzz_{number}")
}

/// The results of the virtual GPU and the other device.
type Both = (Vec<u64>, Option<Vec<u64>>);

/// Compares the results of both devices.
fn compare(run: &Run, (virt, other): &Both) -> Outcome {
    let Some(other) = other else { return Outcome::Same };
    let lanes = run.program.lanes();
    let mut found = vec![];
    for (output, of) in run.written.outputs.iter().enumerate() {
        for lane in 0..lanes {
            let at = output * lanes + lane;
            let (virt, other) = (virt[at], other[at]);
            if !alike(of.kind, of.any_nan, virt, other) {
                found.push(Difference { output, lane, virt, other });
            }
        }
    }
    if found.is_empty() { Outcome::Same } else { Outcome::Differ(found) }
}

/// Whether two results are the same, or NaNs whose bits the manual leaves open.
fn alike(kind: Kind, any_nan: bool, a: u64, b: u64) -> bool {
    a == b || any_nan && both_nan(kind, a, b)
}

/// Whether two results are the same but for the bits of NaNs.
fn both_nan(kind: Kind, a: u64, b: u64) -> bool {
    match kind {
        Kind::Float(format) => format.is_nan(a) && format.is_nan(b),
        Kind::Pair(format) => [0, format.bits().0].into_iter().all(|shift| {
            let (a, b) = (a >> shift & 0xffff, b >> shift & 0xffff);
            a == b || format.is_nan(a) && format.is_nan(b)
        }),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// A device that executes one opcode as another.
    struct Wrong(&'static str, &'static str);

    impl Target for Wrong {
        fn name(&self) -> &'static str {
            "wrong"
        }

        fn description(&self) -> String {
            format!("takes {} for {}", self.0, self.1)
        }

        fn run(&mut self, ptx: &str, jobs: &[&Job]) -> Result<Vec<Vec<u64>>, Failure> {
            Virtual::Fast.run(&ptx.replace(self.0, self.1), jobs)
        }
    }

    fn args(words: &[&str]) -> Args {
        let command = <Args as clap::Args>::augment_args(clap::Command::new("fuzz"));
        let matches = command.get_matches_from([&["fuzz"], words].concat());
        <Args as clap::FromArgMatches>::from_arg_matches(&matches).unwrap()
    }

    fn session<'a>(forms: &'a [Form], other: Option<Box<dyn Target>>) -> Session<'a> {
        let report = Report::new(&args(&["--show", "1000"]));
        Session { forms, virt: Virtual::Fast, other, report, end: Instant::now() + Duration::from_secs(600) }
    }

    /// Runs programs of a style until one differs; the reports.
    fn texts(session: &mut Session, style: Style) -> Vec<String> {
        let dealer = Dealer::new(session.forms, 11);
        let mut texts = vec![];
        for number in 0..session.forms.len() as u64 {
            if !texts.is_empty() {
                break;
            }
            let program = dealer.program(number, style);
            let run = Run::new(&program, session.forms, kernel(number));
            let outcome = session.outcome(&run);
            texts.extend(session.found(number, &run, &outcome).unwrap());
        }
        texts
    }

    #[test]
    fn the_virtual_gpu_computes_what_the_manual_says() {
        let forms = all_forms();
        let mut session = session(&forms, None);
        let dealer = Dealer::new(&forms, 7);
        let programs: Vec<_> = (0..60).map(|number| (number, dealer.program(number, Style::Apart))).collect();
        session.batch(&programs).unwrap();
        assert!(session.report.from_manual.is_empty(), "{:?}", session.report.from_manual);
    }

    #[test]
    fn a_formula_that_is_wrong_is_noticed() {
        let mut forms = forms::all();
        let at = forms.iter().position(|form| form.text.starts_with("add.u32 ")).unwrap();
        let form = forms.swap_remove(at);
        let right = form.eval.unwrap();
        let forms = [Form { eval: Some(Box::new(move |x| right(x) ^ u64::from(x[0] == 0))), ..form }];
        let mut session = session(&forms, None);
        session.batch(&[(0, Dealer::new(&forms, 1).program(0, Style::Apart))]).unwrap();
        let (count, first) = &session.report.from_manual[&0];
        assert!(*count > 0 && first.starts_with("(0x0, "), "{first}");
    }

    #[test]
    fn both_modes_of_the_virtual_gpu_agree() {
        let forms = all_forms();
        let mut session = session(&forms, Some(Box::new(Virtual::Checked(5))));
        let dealer = Dealer::new(&forms, 5);
        for number in 0..60 {
            session.batch(&[(number, drawn(&dealer, number, Device::Virtual))]).unwrap();
        }
        assert_eq!(session.report.differing, 0, "{:?}", session.report.by_subject);
    }

    #[test]
    fn a_wrong_instruction_is_found_alone() {
        let forms = all_forms();
        for (style, wrong, by) in [
            (Style::Apart, "prmt.b32.f4e", "prmt.b32.b4e"),
            (Style::Traced, "redux.sync.min.s32", "redux.sync.min.u32"),
            (Style::Chained, "shfl.sync.bfly", "shfl.sync.idx"),
            (Style::Chained, "red.relaxed.gpu.shared.add.u32", "red.relaxed.gpu.shared.xor.b32"),
        ] {
            let mut session = session(&forms, Some(Box::new(Wrong(wrong, by))));
            let texts = texts(&mut session, style);
            assert!(!texts.is_empty(), "{wrong}: no program has it");
            for text in &texts {
                assert!(text.contains(&format!(": {wrong}")), "{text}");
                assert!(text.contains(": 1 of "), "one instruction is left: {text}");
                assert!(text.contains("<- differs") && text.contains(".visible .entry fuzz_"), "{text}");
            }
        }
        // A formula decides which of the two is right.
        let mut session = session(&forms, Some(Box::new(Wrong("prmt.b32.f4e", "prmt.b32.b4e"))));
        let text = texts(&mut session, Style::Apart).remove(0);
        let value = |begin: &str| text.split(begin).nth(1).unwrap().split([',', '\n', ' ']).next().unwrap();
        assert_eq!(value("the manual: "), value("      virtual "), "{text}");
    }

    /// A device that computes something else the first time.
    struct Once(bool);

    impl Target for Once {
        fn name(&self) -> &'static str {
            "once"
        }

        fn description(&self) -> String {
            "differs once".to_owned()
        }

        fn run(&mut self, ptx: &str, jobs: &[&Job]) -> Result<Vec<Vec<u64>>, Failure> {
            let mut words = Virtual::Fast.run(ptx, jobs)?;
            if std::mem::take(&mut self.0) {
                words[0][0] ^= 1;
            }
            Ok(words)
        }
    }

    #[test]
    fn a_difference_that_does_not_stay_is_reported_as_it_was() {
        let forms = all_forms();
        for style in [Style::Apart, Style::Traced, Style::Chained] {
            let mut session = session(&forms, Some(Box::new(Once(true))));
            let texts = texts(&mut session, style);
            assert_eq!(texts.len(), 1, "{texts:?}");
            assert!(texts[0].contains("not the same in each run"), "{}", texts[0]);
            assert!(texts[0].contains("virtual 0x") && texts[0].contains("1 of "), "{}", texts[0]);
        }
    }

    #[test]
    fn a_program_that_fails_is_found() {
        let forms = all_forms();
        let mut session = session(&forms, Some(Box::new(Wrong("popc.b64", "popc.b65"))));
        let texts = texts(&mut session, Style::Apart);
        assert!(
            !texts.is_empty() && texts.iter().all(|text| text.contains("refused: popc.b64")),
            "{texts:?}"
        );
        assert!(texts[0].contains("wrong does not load the program: "), "{}", texts[0]);
    }

    #[test]
    fn every_form_comes() {
        let forms = all_forms();
        let dealer = Dealer::new(&forms, 2);
        let used = |programs: u64, style: Style| {
            let programs = (0..programs).map(|number| dealer.program(number, style));
            programs
                .flat_map(|program| program.uses().iter().map(|(_, one)| one.form).collect::<Vec<_>>())
                .collect()
        };
        let formulas = forms.iter().filter(|form| form.eval.is_some()).count();
        let apart: BTreeSet<usize> = used(formulas.div_ceil(program::APART) as u64, Style::Apart);
        assert_eq!(apart.len(), formulas, "none comes twice before all have come");
        // A short program deals fewer.
        let programs = formulas.div_ceil(program::DEALT) as u64 + 40;
        let chained: BTreeSet<usize> = used(programs, Style::Chained);
        let missing =
            (0..forms.len()).filter(|form| !chained.contains(form) && !forms[*form].may_be_contracted());
        let missing: Vec<&str> = missing.map(|form| forms[form].text.as_str()).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn the_same_seed_gives_the_same_programs() {
        let forms = all_forms();
        let go = |seed, style| {
            let program = Dealer::new(&forms, seed).program(3, style);
            (program.write(&forms, "k").text, program.input())
        };
        for style in [Style::Apart, Style::Traced, Style::Chained] {
            assert_eq!(go(5, style), go(5, style));
            assert_ne!(go(5, style), go(6, style));
        }
    }

    #[test]
    fn nans_are_alike_only_where_the_format_has_them() {
        use kind::Format::{Bf16, F32};
        assert!(both_nan(Kind::Float(F32), 0x7fff_ffff, 0xffc0_0000));
        assert!(!both_nan(Kind::Float(F32), 0x7fff_ffff, 0x7f80_0000));
        assert!(both_nan(Kind::Pair(Bf16), 0x7fff_1234, 0xffff_1234));
        assert!(!both_nan(Kind::Pair(Bf16), 0x7fff_1234, 0xffff_1235));
        assert!(!both_nan(Kind::Int(32), 0x7fff_ffff, 0xffc0_0000));
    }
}

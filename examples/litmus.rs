//! Runs the litmus tests of `tests/src/litmus/` on GPUs, many instances at once, and counts how
//! often each showed the outcome that its text describes. The exit code is 1 if that was forbidden,
//! 2 is bad usage, and 77 says that there is no GPU or one too few for all tests.
//!
//! ```text
//! cargo run --release -p epoxide-examples --features cuda --example litmus -- --out litmus.tsv
//! ```
//!
//! Tests across devices need two GPUs that map each other's memory. Without the feature `cuda` the
//! devices are virtual, which tests the kernels themselves; `--runs 500` is enough then.

use std::error::Error as StdError;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use epoxide::Error;
use epoxide::driver::{Device, Kernel, LaunchConfig, Memory, MemoryKind, Module, Stream};
use epoxide::internal::driver::{export, import};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use epoxide_testing::litmus::many;
use epoxide_testing::litmus::program::{Form, Program};
use epoxide_testing::litmus::table::{NOT_SHOWN, TESTS, Verdict};

type Fallible<T> = Result<T, Box<dyn StdError>>;

/// Names of the kernels of a test, in the order of their launches.
const KERNELS: [&str; 3] = ["k0", "k1", "k2"];
/// Groups of blocks in a launch. All of them have to be resident at once, so that every thread
/// meets the others of its instance.
const PACKED_GROUPS: u32 = (many::INSTANCES / 32) as u32;
const SINGLE_GROUPS: u32 = 1024;
/// Threads of a block of `clear` and `check`.
const BLOCK: u32 = 128;

#[derive(Parser)]
struct Args {
    /// Instances of each test, at least.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..=4_000_000_000))]
    runs: u64,
    /// Draws what differs from launch to launch.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Blocks that keep the memory busy in every other launch.
    #[arg(long, default_value_t = 264, value_parser = clap::value_parser!(u32).range(..=1 << 20))]
    stress: u32,
    /// Numbers of the tests, as in `1,29`; all if left out.
    #[arg(long, value_delimiter = ',', value_parser = test_number)]
    tests: Vec<u32>,
    /// Tests of your own beside them, in the notation of the table; what they show is only counted.
    #[arg(long, value_parser = in_notation)]
    text: Vec<String>,
    /// A file for the counts, with tabs between the columns.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Writes the modules to this folder and runs nothing.
    #[arg(long)]
    ptx: Option<PathBuf>,
}

/// The number of a test of the table.
fn test_number(text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number| TESTS.iter().any(|test| test.number == *number));
    number.ok_or_else(|| format!("no test has this number: there are {} from 1 on", TESTS.len()))
}

/// A text that is a test.
fn in_notation(text: &str) -> Result<String, String> {
    Program::new(text, Form::Many)
        .map(|_| text.to_owned())
        .map_err(|rule| format!("{rule}; the head of tests/src/litmus/table.rs has the notation"))
}

/// A test of the table, or one of the command line, which has no number and no verdict.
struct Case<'a> {
    number: Option<u32>,
    text: &'a str,
    verdict: Option<Verdict>,
}

impl Case<'_> {
    fn name(&self) -> String {
        self.number.map_or("own".into(), |n| format!("#{n}"))
    }

    fn verdict(&self) -> String {
        self.verdict.map_or("-".into(), |v| format!("{v:?}"))
    }
}

/// The outcome counts of the instances of a test.
struct Counts {
    runs: u64,
    /// The guarded reads had their values, or there are none.
    guards: u64,
    /// The whole condition held.
    held: u64,
    /// Some thread did not wait for the others. These are executions as well, though not
    /// interesting ones.
    late: u64,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) if matches!(error.downcast_ref(), Some(Error::Unavailable { .. })) => {
            println!("SKIP  {error}");
            ExitCode::from(77)
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// At most two devices.
#[cfg(feature = "cuda")]
fn open() -> Result<Vec<Device>, Error> {
    use epoxide::driver::cuda;
    cuda::devices()?.iter().take(2).map(|info| cuda::CudaDevice::open(info.ordinal)).collect()
}

#[cfg(not(feature = "cuda"))]
fn open() -> Result<Vec<Device>, Error> {
    use epoxide::driver::virt::{VirtConfig, VirtualGpu};
    Ok((0..2).map(|ordinal| VirtualGpu::new(VirtConfig { ordinal, ..VirtConfig::default() })).collect())
}

/// Runs the tests; false if something forbidden was seen.
fn run(args: &Args) -> Fallible<bool> {
    let chosen = TESTS.iter().filter(|t| args.tests.is_empty() || args.tests.contains(&t.number));
    let cases: Vec<Case> = chosen
        .map(|t| Case { number: Some(t.number), text: t.text, verdict: Some(t.verdict) })
        .chain(args.text.iter().map(|text| Case { number: None, text, verdict: None }))
        .collect();
    if let Some(dir) = &args.ptx {
        std::fs::create_dir_all(dir)?;
        for (index, case) in cases.iter().enumerate() {
            for (device, part) in Program::new(case.text, Form::Many)?.devices.iter().enumerate() {
                let name = case.number.map_or(format!("own{index}"), |n| n.to_string());
                std::fs::write(dir.join(format!("{name}-{device}.ptx")), &part.ptx)?;
            }
        }
        return Ok(true);
    }

    let devices = open()?;
    let names: Vec<&str> = devices.iter().map(|d| d.info().name.as_str()).collect();
    println!("{} tests on {}, seed {}", cases.len(), names.join(" and "), args.seed);
    let bench = Bench::new(&devices)?;
    let mut table = "number\ttext\tverdict\truns\tguards\theld\tlate\n".to_string();
    let (mut forbidden, mut unseen, mut ran) = (vec![], vec![], false);
    for case in &cases {
        let program = Program::new(case.text, Form::Many)?;
        if program.devices.len() > devices.len() {
            println!(
                "{:>4} {}: SKIP, needs {} GPUs and finds {}",
                case.name(),
                case.text,
                program.devices.len(),
                devices.len()
            );
            continue;
        }
        let began = Instant::now();
        let counts =
            bench.run(&program, args).map_err(|error| format!("{} {}: {error}", case.name(), case.text))?;
        let Counts { runs, guards, held, late } = counts;
        ran = true;
        println!(
            "{:>4} {}: {}, {runs} runs, guards passed {guards}, held {held}, not together {late} ({:.1?})",
            case.name(),
            case.text,
            case.verdict(),
            began.elapsed()
        );
        let _ = writeln!(
            table,
            "{}\t{}\t{}\t{runs}\t{guards}\t{held}\t{late}",
            case.name(),
            case.text,
            case.verdict()
        );
        match (case.verdict, held) {
            (Some(Verdict::Forbidden), 1..) => forbidden.push(case),
            (Some(Verdict::Allowed | Verdict::Racy), 0) => unseen.push(case),
            _ => {}
        }
    }
    if let Some(file) = &args.out {
        std::fs::write(file, table)?;
    }
    if !ran {
        let reason = "all tests were skipped for want of it".into();
        return Err(Error::Unavailable { what: "a second GPU".into(), reason }.into());
    }
    println!("{} allowed or racy, never seen:", unseen.len());
    for case in unseen {
        let here = NOT_SHOWN.iter().any(|(n, _)| case.number == Some(*n));
        let note = if here { " (nor by the virtual GPU)" } else { "" };
        println!("{:>4} {}{note}", case.name(), case.text);
    }
    println!("{} forbidden, seen:", forbidden.len());
    forbidden.iter().for_each(|case| println!("{:>4} {}", case.name(), case.text));
    Ok(forbidden.is_empty())
}

/// The devices, and memory of the first that all of them map.
struct Bench<'a> {
    devices: &'a [Device],
    streams: Vec<Stream>,
    memory: Vec<Memory>,
    counts: Memory,
}

impl<'a> Bench<'a> {
    fn new(devices: &'a [Device]) -> Fallible<Self> {
        let first = devices.first().ok_or("no device")?;
        let mut memory = vec![Memory::alloc(first, many::BYTES, MemoryKind::Shareable, "litmus")?];
        for device in &devices[1..] {
            memory.push(import(device, export(&memory[0])?, many::BYTES, "the first device")?);
        }
        let counts = Memory::alloc(first, 4096, MemoryKind::Shareable, "counts")?;
        let streams = devices.iter().map(Stream::new).collect::<Result<_, _>>()?;
        Ok(Self { devices, streams, memory, counts })
    }

    /// Runs a test.
    fn run(&self, program: &Program, args: &Args) -> Fallible<Counts> {
        let mine = program.devices.len();
        // Each device has all kernels: the devices change roles, since it matters which of them
        // owns the memory.
        let mut kernels: Vec<Vec<Vec<Kernel>>> = vec![];
        let mut ends = vec![];
        for device in &self.devices[..mine] {
            let mut of_device = vec![];
            for part in &program.devices {
                let module = Module::load(device, &part.ptx)?;
                let names = KERNELS.get(..part.kernels).ok_or("too many kernels")?;
                of_device.push(names.iter().map(|name| module.kernel(name, 0)).collect::<Result<_, _>>()?);
                if kernels.is_empty() && ends.is_empty() {
                    ends = vec![module.kernel("clear", 0)?, module.kernel("check", 0)?];
                }
            }
            kernels.push(of_device);
        }
        self.counts.write(&self.streams[0], 0, &[0; 12])?;
        let launched = self.launch(program, &kernels, &ends, args);
        // After an error as well, every launch must end before the kernels are unloaded.
        let waited = self.wait(mine);
        let runs = launched?;
        waited?;
        let mut bytes = [0; 12];
        self.counts.read(&self.streams[0], 0, &mut bytes)?;
        let [guards, held, late] =
            [0, 4, 8].map(|i| u64::from(u32::from_ne_bytes(std::array::from_fn(|b| bytes[i + b]))));
        Ok(Counts { runs, guards, held, late })
    }

    /// Waits for the first so many devices, for the others even where one fails.
    fn wait(&self, devices: usize) -> Result<(), Error> {
        let waited: Vec<_> = self.streams[..devices].iter().map(Stream::synchronize).collect();
        waited.into_iter().collect()
    }

    /// Runs a test launch by launch, each with other distances, delays and pairs of blocks, and
    /// returns the number of instances. The kernels are by device and role, the two `ends` are
    /// `clear` and `check`.
    fn launch(
        &self,
        program: &Program,
        kernels: &[Vec<Vec<Kernel>>],
        ends: &[Kernel],
        args: &Args,
    ) -> Result<u64, Error> {
        let mine = program.devices.len();
        let groups = if program.packed > 1 { PACKED_GROUPS } else { SINGLE_GROUPS };
        let instances = groups * program.packed;
        let launches = args.runs.div_ceil(u64::from(instances));
        let whole = LaunchConfig {
            grid: instances.div_ceil(BLOCK),
            block: BLOCK,
            shared_bytes: 0,
            cooperative: false,
            dependent: false,
        };
        let mut draw = ChaCha8Rng::seed_from_u64(args.seed);
        for launch in 0..launches {
            let stride = many::STRIDE[draw.random_range(0..many::STRIDE.len())] as u32;
            let shift = draw.random_range(0..groups);
            let spread = [0u32, 64, 512, 4096][draw.random_range(0..4)];
            let (seed, warm) = (draw.random::<u32>(), u32::from(draw.random::<bool>()));
            let stress = if launch % 2 == 1 { args.stress } else { 0 };
            let address = |d: usize, at: u64| self.memory[d].ptr().add(at).0.to_ne_bytes();
            let [stride, shift, spread, seed, warm, stressed, groups_of, instances_of] =
                [stride, shift, spread, seed, warm, stress, groups, instances].map(u32::to_ne_bytes);
            let (buf, results) = (address(0, 0), address(0, many::RESULTS_AT));
            // SAFETY: the entry takes two addresses and two numbers. Accesses stay within the
            // memory, which has room for all instances at the largest distance. Kernels and memory
            // live until the caller has waited.
            unsafe {
                self.streams[0].launch(&ends[0], &whole, &[&buf, &results, &stride, &instances_of])?;
            }
            if mine > 1 {
                self.wait(mine)?;
            }
            for (role, part) in program.devices.iter().enumerate() {
                // Each role runs with and without stress.
                let device = (role + launch as usize / 2) % mine;
                let (buf, results) = (address(device, 0), address(device, many::RESULTS_AT));
                let scratch = address(device, many::SCRATCH_AT);
                let params: [&[u8]; 11] = [
                    &buf, &results, &scratch, &groups_of, &stride, &shift, &seed, &spread, &warm, &stressed,
                    &[0; 4],
                ];
                let config = LaunchConfig {
                    grid: part.blocks * groups + stress,
                    block: part.threads,
                    shared_bytes: 0,
                    cooperative: false,
                    dependent: false,
                };
                for kernel in &kernels[device][role] {
                    // SAFETY: as above, for `KERNEL_PARAMS`; the memory is this device's mapping of
                    // it.
                    unsafe { self.streams[device].launch(kernel, &config, &params)? };
                }
            }
            if mine > 1 {
                self.wait(mine)?;
            }
            let counts = self.counts.ptr().0.to_ne_bytes();
            // SAFETY: as above, for three addresses; the counts have room for three words.
            unsafe {
                self.streams[0].launch(
                    &ends[1],
                    &whole,
                    &[&buf, &results, &counts, &stride, &instances_of],
                )?;
            }
        }
        Ok(launches * u64::from(instances))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(arguments: &[&str]) -> String {
        let parsed = Args::try_parse_from([&["litmus"], arguments].concat());
        parsed.err().map_or_else(String::new, |error| error.to_string())
    }

    #[test]
    fn numbers_and_texts_that_are_no_test_are_bad_usage() {
        assert!(error(&["--tests", "1,999"]).contains("no test has this number: there are 80 from 1 on"));
        assert!(error(&["--stress", "4294967295"]).contains("4294967295 is not in"));
        for (text, rule) in [
            ("foo", "no placement"),
            ("g:foo", "no step 'foo'"),
            ("g:Wqg.x=1", "no order 'q'"),
            ("g:Wrz.x=1", "no scope 'z'"),
            ("g:Wrg.z=1", "no location 'z'"),
            ("g:Wrg.p16.8=1", "no location 'p16.8'"),
            ("g:W", "no step 'W'"),
            ("g:Dxg.x", "no step 'Dxg.x'"),
            ("g:Uxg.x=y", "no number 'y'"),
            ("g:Wxg.v4=(1,2)", "2 values at 'v4'"),
            ("g:Wxg.x=r", "no read gives 'r' before"),
            ("g:Rxg.x=r", "no value of 'r' at the end"),
            ("g,g:Wxg.x=1‖Wxg.x=2‖Wxg.x=3", "no place '' for thread 2"),
            ("g:b‖b", "threads of one block"),
            ("c:b;b‖b", "different numbers of warp barriers"),
            (&format!("c:{}", ["Wxg.x=1"; 13].join("‖")), "13 threads"),
            (&format!("c:{}", ["Rxg.x=1"; 17].join(";")), "more than 16 reads"),
        ] {
            assert!(error(&["--text", text]).contains(rule), "{text}: {}", error(&["--text", text]));
        }
        let fits = ["--tests", "1,80", "--text", "g:Ww.x=1;Wrg.f=1‖Rag.f=1?;Rw.x=0", "--stress", "0"];
        assert_eq!(error(&fits), "");
    }
}

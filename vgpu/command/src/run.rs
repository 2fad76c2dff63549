//! `vgpu run`: runs a kernel under one or many seeds or under all schedules, and reports what it
//! does wrong.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use epoxide_vgpu::{
    AcceptList, Array, Assumptions, Cause, CheckConfig, Cluster, ClusterSizes, Coverage, DeviceConfig,
    Explore, GridConfig, Machine, MachineError, Module, Path, Refusal, Report,
};
use serde_json::{Map, Value, json};

use crate::argument::{Argument, Buffer};
use crate::names;
use crate::output::{Document, Finding, Format, MOST_SEEDS, Verdict, read};

/// Shown below the flags.
pub const HELP: &str = "Arguments of the kernel, one --arg each, in order:
  u32:5  f32:1.5  i64:-1  ..    a number: u8 i8 u16 i16 u32 i32 u64 i64 f16 bf16 f32 f64
  buf:f32:1024                  the address of a buffer of 1024 numbers; nothing was written to it
  buf:u32:256=zero              filled with 0; or iota (0, 1, 2, ..), fill(VALUE), random, random(SEED)
  buf:u8:64=@input.bin          the bytes of a file; the count may be left out: buf:u8=@input.bin
  device                        the number of the device, from 0 (32 bits); for --devices
  peer:0                        the buffer of argument 0 of the next device, as this one addresses it
  all:0                         the multicast address of the buffers of argument 0 of all devices
  bytes:00ff10                  bytes in hexadecimal, for parameters that are structs

Examples:
  vgpu run k.ptx saxpy --grid 4 --block 256 --arg f32:2 --arg buf:f32:1024=iota --arg buf:f32:1024=zero --out 2
  vgpu run k.ptx --grid 8 --block 128 --arg buf:u32:8=zero --check --seeds 0..100 --format sarif
  vgpu run k.ptx --grid 2 --block 1 --arg buf:u32:8=zero --weak --explore 2 --out 0

A line of the file that --accept names is KIND KERNEL PLACE [PLACE] -- REASON. KIND and KERNEL may be *.
A place is ptx:LINE, or FILE:LINE with the end of the path of a source file:
  race reduce reduce.cu:41 reduce.cu:57 -- the values are the same

Exit codes: 0 nothing to report or all accepted, 1 reports, 2 bad usage or a launch that cannot start.";

/// Numbers that are printed of a buffer.
const MOST_PRINTED: usize = 256;

/// Arguments of the command.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// PTX file; of CUDA sources `nvcc -ptx -lineinfo` makes one
    file: PathBuf,
    /// Kernel: its name, or a part of it as the source has it. May be left out if there is only one
    kernel: Option<String>,
    /// Blocks: X, X,Y or X,Y,Z
    #[arg(long, default_value = "1", value_parser = dimensions)]
    grid: [u32; 3],
    /// Threads per block: X, X,Y or X,Y,Z
    #[arg(long, default_value = "32", value_parser = dimensions)]
    block: [u32; 3],
    /// Blocks of a cluster: X, X,Y or X,Y,Z. Left out: as the kernel declares
    #[arg(long, value_parser = dimensions)]
    cluster: Option<[u32; 3]>,
    /// Allow clusters of 9 to 16 blocks, which not every device takes
    #[arg(long, requires = "cluster")]
    non_portable_cluster: bool,
    /// Dynamic shared memory per block, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    shared: u32,
    /// An argument of the kernel; see below
    #[arg(long = "arg", value_name = "ARG", allow_hyphen_values = true)]
    arguments: Vec<Argument>,
    /// Devices. Each runs the kernel, with buffers of its own
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    devices: u32,
    /// Print the buffer of argument N (from 0) of device 0 behind the last run, or write it to a
    /// file. With --check or --weak, elements that nothing has written are '-', or zero in a file
    #[arg(long = "out", value_name = "N[=FILE]", value_parser = output)]
    outputs: Vec<(usize, Option<PathBuf>)>,
    /// Report races, missing fences and reads of unwritten memory
    #[arg(long)]
    check: bool,
    /// Let reads see older values where the memory model allows it, so that a missing fence shows
    /// in the results
    #[arg(long, conflicts_with = "check")]
    weak: bool,
    /// Seeds of the runs, each of which takes another order of warps: FIRST..END, or one
    #[arg(long, value_name = "A..B", default_value = "0..1", value_parser = seeds)]
    seeds: Range<u64>,
    /// Run every schedule that has at most so many preemptions, in place of seeds; with --weak also
    /// every value that a load may see. For small kernels
    #[arg(long, value_name = "PREEMPTIONS", conflicts_with = "seeds")]
    explore: Option<u32>,
    /// Most runs of --explore
    #[arg(long, value_name = "N", default_value_t = 100_000, requires = "explore", value_parser = clap::value_parser!(u64).range(1..))]
    runs: u64,
    /// File with reports that are accepted; see below
    #[arg(long, value_name = "FILE")]
    accept: Option<PathBuf>,
    /// Assume what the memory model does not promise: FenceBeforeBarrier, ConvergedWarps,
    /// ClusterArrivals, ReadsBeforeBulkCopies, CoherentLoads. ConvergedWarps changes the execution,
    /// also without --check
    #[arg(long, value_name = "NAME")]
    assume: Vec<String>,
    /// Most reports that are collected in a run
    #[arg(long, value_name = "N", default_value_t = 100)]
    reports: usize,
    /// Most warp instructions while no block begins or ends, before a kernel is taken to hang; 2^28
    /// by default
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Multiprocessors of a device
    #[arg(long, value_name = "N", default_value_t = 132, value_parser = clap::value_parser!(u32).range(1..=4096))]
    sms: u32,
    /// Form of the output
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

fn dimensions(text: &str) -> Result<[u32; 3]> {
    let mut all = [1; 3];
    let parts: Vec<&str> = text.split([',', 'x']).collect();
    ensure!(parts.len() <= 3, "'{text}' has more than three dimensions");
    for (dimension, part) in all.iter_mut().zip(parts) {
        *dimension = part.trim().parse().with_context(|| format!("'{part}' is no number"))?;
    }
    Ok(all)
}

fn output(text: &str) -> Result<(usize, Option<PathBuf>)> {
    let (number, file) = text.split_once('=').map_or((text, None), |(n, file)| (n, Some(file.into())));
    Ok((number.parse().with_context(|| format!("'{number}' is no argument's number"))?, file))
}

fn seeds(text: &str) -> Result<Range<u64>> {
    let number = |text: &str| text.parse::<u64>().with_context(|| format!("'{text}' is no seed"));
    let range = match text.split_once("..") {
        Some((first, end)) => number(first)?..number(end)?,
        None => number(text)?..number(text)?.checked_add(1).context("the seed is too large")?,
    };
    ensure!(!range.is_empty(), "'{text}' has no seed");
    Ok(range)
}

/// An argument as the parameter block holds it.
struct Packed(Vec<u8>);

impl epoxide_vgpu::Argument for Packed {
    fn pack(&self, params: &mut Vec<u8>) {
        params.extend_from_slice(&self.0);
    }
}

/// The outcome of a run.
struct Outcome {
    reports: Vec<Report>,
    /// The requested buffers.
    outputs: Vec<Output>,
}

/// The contents of a buffer.
#[derive(Clone, PartialEq, Eq)]
struct Output {
    /// Elements that nothing has written are zero here.
    bytes: Vec<u8>,
    /// By element: whether something has written it, as far as the mode tracks writes.
    written: Vec<bool>,
}

impl Output {
    /// The contents of a buffer with elements of `size` bytes.
    fn of(array: &Array<u8>, size: usize) -> Result<Self> {
        let mut bytes = array.download()?;
        let by_byte = array.written();
        let written: Vec<bool> = by_byte.chunks_exact(size).map(|own| own.iter().all(|byte| *byte)).collect();
        let elements = bytes.chunks_exact_mut(size).zip(&written);
        elements.filter(|(_, written)| !**written).for_each(|(element, _)| element.fill(0));
        Ok(Self { bytes, written })
    }
}

impl Args {
    fn assumptions(&self) -> Result<Assumptions> {
        let mut assume = Assumptions::default();
        for name in &self.assume {
            assume.state(name).map_err(anyhow::Error::msg)?;
        }
        Ok(assume)
    }

    fn check_config(&self) -> Result<Option<CheckConfig>> {
        let base =
            CheckConfig { assume: self.assumptions()?, collect: self.reports, ..CheckConfig::default() };
        Ok(match (self.check, self.weak) {
            (true, _) => Some(base),
            (_, true) => Some(CheckConfig { races: false, ..base }),
            _ => {
                ensure!(self.accept.is_none(), "--accept is for --check");
                None
            }
        })
    }

    /// Argument `number`, which has to be a buffer.
    fn buffer(&self, number: usize) -> Result<&Buffer> {
        match self.arguments.get(number) {
            Some(Argument::Buffer(buffer)) => Ok(buffer),
            _ => bail!("argument {number} is no buffer: arguments are counted from 0"),
        }
    }

    /// Runs the kernel under a seed, or by the choices of an exploration.
    fn run_once(
        &self,
        module: &Module,
        kernel: &str,
        seed: u64,
        check: Option<CheckConfig>,
        path: Option<&Path>,
    ) -> Result<Outcome> {
        let config = DeviceConfig {
            schedule_seed: Some(seed),
            livelock_limit: self.steps,
            sm_count: self.sms,
            collect: self.reports,
            assume: self.assumptions()?,
            ..DeviceConfig::default()
        };
        let check = check.map(|check| CheckConfig { weak_memory: (!check.races).then_some(seed), ..check });
        let devices = self.devices as usize;
        let mut machine = Machine::with_config(devices, config, check);
        if let Some(path) = path {
            machine = machine.explored(path);
        }
        let mut buffers: Vec<Vec<Option<Array<u8>>>> = vec![];
        for device in 0..devices {
            let mut own = vec![];
            for (number, argument) in self.arguments.iter().enumerate() {
                let Argument::Buffer(buffer) = argument else {
                    own.push(None);
                    continue;
                };
                let filled = buffer.fill()?;
                let array = machine.alloc::<u8>(device, &format!("argument {number}"), filled.len)?;
                if let Some(bytes) = filled.bytes {
                    array.upload(&bytes)?;
                }
                own.push(Some(array));
            }
            buffers.push(own);
        }
        // Mappings live until the run is over.
        let (mut mapped, mut multicasts) = (vec![], BTreeMap::new());
        let sizes = match self.non_portable_cluster {
            true => ClusterSizes::NonPortable,
            false => ClusterSizes::Portable,
        };
        let shape = GridConfig {
            grid: self.grid,
            block: self.block,
            dynamic_shared_bytes: self.shared,
            cluster: self.cluster.map(|blocks| Cluster { blocks, sizes }),
        };
        for device in 0..devices {
            let mut packed = vec![];
            for (argument, own) in self.arguments.iter().zip(&buffers[device]) {
                packed.push(Packed(match (argument, own) {
                    (Argument::Value(bytes), _) => bytes.clone(),
                    (Argument::Device, _) => (device as u32).to_ne_bytes().to_vec(),
                    (Argument::Peer(number), _) => {
                        self.buffer(*number)?;
                        let peer = buffers[(device + 1) % devices][*number].as_ref();
                        let map = machine.map(device, peer.context("no such buffer")?)?;
                        let address = map.addr().to_ne_bytes().to_vec();
                        mapped.push(map);
                        address
                    }
                    (Argument::All(number), _) => {
                        self.buffer(*number)?;
                        if !multicasts.contains_key(number) {
                            let each: Option<Vec<_>> =
                                buffers.iter().map(|own| own[*number].as_ref()).collect();
                            multicasts
                                .insert(*number, machine.multicast_of(&each.context("no such buffer")?)?);
                        }
                        multicasts[number][device].addr().to_ne_bytes().to_vec()
                    }
                    (Argument::Buffer(_), own) => own.as_ref().map_or(0, Array::addr).to_ne_bytes().to_vec(),
                }));
            }
            let arguments: Vec<&dyn epoxide_vgpu::Argument> =
                packed.iter().map(|packed| packed as &dyn epoxide_vgpu::Argument).collect();
            machine.launch_with(device, module, kernel, shape, &arguments)?;
        }
        let ended = machine.run();
        let mut outcome = Outcome { reports: machine.reports(), outputs: vec![] };
        match ended {
            Ok(()) => {
                for (number, _) in &self.outputs {
                    let array = buffers[0][*number].as_ref().context("no such buffer")?;
                    outcome.outputs.push(Output::of(array, self.buffer(*number)?.ty.size())?);
                }
            }
            // The fault or the hang is among the reports.
            Err(MachineError::Fault(_) | MachineError::Stuck(_)) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(outcome)
    }
}

/// The outcomes of all runs.
#[derive(Default)]
struct Runs {
    collected: Collected,
    /// The outputs of the last run that has them, and of the first, with its number.
    last: Vec<Output>,
    first: Option<(u64, Vec<Output>)>,
    /// The first two runs whose outputs differ.
    differs: Option<(u64, u64)>,
}

impl Runs {
    /// Adds a run by its seed or number.
    fn add(&mut self, args: &Args, number: u64, outcome: Outcome) {
        self.collected.add(number, &outcome.reports);
        if outcome.outputs.len() != args.outputs.len() {
            return;
        }
        match &self.first {
            Some((of, outputs)) if *outputs != outcome.outputs => {
                self.differs.get_or_insert((*of, number));
            }
            Some(_) => {}
            None => self.first = Some((number, outcome.outputs.clone())),
        }
        self.last = outcome.outputs;
    }
}

/// Reports of several runs, each with the seeds that showed it.
#[derive(Default)]
struct Collected {
    reports: Vec<Report>,
    seeds: Vec<Vec<u64>>,
}

impl Collected {
    /// The numbers of an exploration's runs are no seeds.
    fn forget_seeds(&mut self) {
        self.seeds.iter_mut().for_each(Vec::clear);
    }

    fn add(&mut self, seed: u64, reports: &[Report]) {
        for report in reports {
            let known = self.reports.iter().position(|known| known.is_alike(report));
            let at = known.unwrap_or(self.reports.len());
            Report::merge(&mut self.reports, vec![report.clone()]);
            self.seeds.resize(self.reports.len(), vec![]);
            note(&mut self.seeds[at], seed);
        }
    }
}

/// A number of things, as in `1 run` or `20 runs`.
fn counted(number: u64, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

fn note(seeds: &mut Vec<u64>, seed: u64) {
    if seeds.len() < MOST_SEEDS {
        seeds.push(seed);
    }
}

/// Runs the kernel under all seeds, and prints the reports.
///
/// # Errors
/// Bad usage: a file that cannot be read, PTX that cannot be loaded, a kernel or arguments that do
/// not fit.
pub fn run(args: &Args) -> Result<Verdict> {
    let text = read(&args.file)?;
    let loaded = Module::parse_supported(&text);
    let (module, refusals) = loaded.with_context(|| {
        let file = args.file.display();
        let is_cuda = args.file.extension().is_some_and(|ext| ext == "cu");
        let remedy = if is_cuda { "; `nvcc -ptx -lineinfo` compiles CUDA C++ to PTX" } else { "" };
        format!("{file} cannot be loaded{remedy}")
    })?;
    let mut all: Vec<&str> = module.kernels().map(|kernel| kernel.name()).collect();
    all.extend(refusals.iter().map(|refusal| refusal.kernel.as_str()));
    all.sort_unstable();
    all.dedup();
    let kernel = names::find(&all, args.kernel.as_deref())?;
    if let Some(Refusal { error, .. }) = refusals.iter().find(|refusal| refusal.kernel == kernel) {
        bail!("the kernel cannot be loaded; `vgpu check` lists all reasons: {error}");
    }
    let check = args.check_config()?;
    for (number, _) in &args.outputs {
        args.buffer(*number)?;
    }
    let mut accepts = match &args.accept {
        None => AcceptList::default(),
        Some(path) => {
            let list = AcceptList::parse(&read(path)?).map_err(anyhow::Error::msg);
            list.with_context(|| format!("{}", path.display()))?
        }
    };
    let mut runs = Runs::default();
    let mut explored = None;
    if let Some(preemptions) = args.explore {
        let mut number = 0;
        let exploration = Explore::new().preemptions(preemptions).runs(args.runs).run(|path| {
            number += 1;
            runs.add(args, number, args.run_once(&module, &kernel, 0, check, Some(path))?);
            Ok::<(), anyhow::Error>(())
        });
        if let Some(failure) = exploration.failure {
            return Err(failure.error);
        }
        runs.collected.forget_seeds();
        explored = Some((exploration.runs, exploration.coverage));
    } else {
        for seed in args.seeds.clone() {
            runs.add(args, seed, args.run_once(&module, &kernel, seed, check, None)?);
        }
    }
    let Runs { collected, last, differs, .. } = runs;
    let mut document = Document { command: "run", findings: vec![], notes: vec![], more: Map::new() };
    let mut open_reports = vec![];
    for (report, seeds) in collected.reports.iter().zip(&collected.seeds) {
        let text = format!("  {}", report.fault);
        let accepted = accepts.accepts(report, &names::readable);
        let finding = Finding::of(&args.file, report, text);
        if accepted.is_none() {
            open_reports.push((document.findings.len(), report.clone()));
        }
        document.findings.push(Finding { seeds: seeds.clone(), accepted, ..finding });
    }
    let causes = causes(&open_reports, &mut document);
    document.findings.sort_by_key(|finding| finding.class);
    let outputs = write_outputs(args, &last, &mut document)?;
    if let Some((one, other)) = differs {
        let of = if explored.is_some() { "runs" } else { "seeds" };
        document.notes.push(format!("the outputs differ between {of} {one} and {other}"));
    }
    let unused: Vec<String> = accepts
        .unused()
        .map(|entry| format!("line {} of the accept list has accepted nothing: {}", entry.line, entry.reason))
        .collect();
    document.notes.extend(unused.iter().cloned());
    let open = document.findings.iter().filter(|finding| finding.accepted.is_none()).count();
    let accepted = document.findings.len() - open;
    document.notes.push(format!(
        "{}: {}, {}{}",
        names::readable(&kernel),
        counted(explored.map_or(args.seeds.end - args.seeds.start, |(runs, _)| runs), "run"),
        counted(open as u64, "report"),
        if accepted == 0 { String::new() } else { format!(", {accepted} accepted") }
    ));
    if let Some((_, coverage)) = explored {
        document.notes.push(coverage.to_string());
    }
    document.more = Map::from_iter([
        ("file".to_owned(), json!(args.file.display().to_string())),
        ("kernel".to_owned(), json!(names::readable(&kernel))),
        ("seeds".to_owned(), json!(explored.is_none().then_some([args.seeds.start, args.seeds.end]))),
        ("explored".to_owned(), explored.map_or(Value::Null, explored_json)),
        ("outputs".to_owned(), outputs),
        ("outputs_differ".to_owned(), json!(differs.map(|(one, other)| [one, other]))),
        ("unused_accepts".to_owned(), json!(unused)),
        ("causes".to_owned(), causes),
    ]);
    document.print(args.format)
}

/// Numbers the causes of reports, given with their findings. If a cause has several reports, the
/// notes list all causes. Returns them as JSON.
fn causes(open: &[(usize, Report)], document: &mut Document) -> Value {
    let reports: Vec<Report> = open.iter().map(|(_, report)| report.clone()).collect();
    let summary = Report::summary(&reports);
    for (number, cause) in summary.causes.iter().enumerate() {
        cause.reports.iter().for_each(|at| document.findings[open[*at].0].cause = Some(number));
    }
    if summary.causes.iter().any(|cause| cause.reports.len() > 1) {
        document.notes.extend(summary.causes.iter().map(ToString::to_string));
    }
    let json = |cause: &Cause| json!({ "text": cause.text, "reports": cause.reports.len(), "occurrences": cause.occurrences });
    summary.causes.iter().map(json).collect()
}

fn explored_json((runs, coverage): (u64, Coverage)) -> Value {
    json!({ "runs": runs, "complete": coverage.is_complete(), "coverage": coverage.to_string() })
}

/// Writes each requested buffer to its file, or as a note if it has none. Returns them as JSON.
fn write_outputs(args: &Args, last: &[Output], document: &mut Document) -> Result<Value> {
    let mut all = vec![];
    for ((number, file), Output { bytes, written }) in args.outputs.iter().zip(last) {
        let ty = args.buffer(*number)?.ty;
        if let Some(file) = file {
            std::fs::write(file, bytes).with_context(|| format!("cannot write {}", file.display()))?;
            all.push(json!({ "argument": number, "file": file.display().to_string() }));
            continue;
        }
        let numbers = bytes.chunks_exact(ty.size()).zip(written).map(|(number, written)| match written {
            true => ty.show(number),
            false => "-".to_owned(),
        });
        let shown: Vec<String> = numbers.take(MOST_PRINTED).collect();
        let more = bytes.len() / ty.size() - shown.len();
        let rest = if more == 0 { String::new() } else { format!(" and {more} more") };
        document.notes.push(format!("argument {number}: {}{rest}", shown.join(" ")));
        all.push(json!({ "argument": number, "numbers": shown, "more": more }));
    }
    Ok(json!(all))
}

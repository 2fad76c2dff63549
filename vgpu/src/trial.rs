//! A program that runs in several modes and under several seeds, with its reports merged.

use std::error::Error;
use std::fmt;
use std::process::ExitCode;

use crate::check::{AcceptList, Accepted, CheckConfig, MOST_COLLECTED, Report};
use crate::device::DeviceConfig;
use crate::fault::{FaultKind, ranges};
use crate::machine::{Machine, MachineError};
use crate::names::{brief_name, counted, readable_name};
use crate::seeds::for_each_seed;

/// The checks of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// No checks but those that cost nothing.
    Fast,
    /// Check mode.
    Check,
    /// Weak memory without race reports, so that a missing fence shows as a wrong result.
    Weak,
}

impl Mode {
    /// All of them.
    pub const ALL: [Mode; 3] = [Mode::Fast, Mode::Check, Mode::Weak];

    /// The name in texts, such as `check`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Mode::Fast => "fast",
            Mode::Check => "check",
            Mode::Weak => "weak",
        }
    }
}

/// The limit of warp instructions without progress in a [`Trial`], unless
/// [`DeviceConfig::livelock_limit`] sets another: seconds of a kernel in check mode. It is lower
/// than that of a [`Machine`](crate::CHECKED_LIVELOCK_LIMIT), because each run of a trial reaches
/// it where the kernel hangs.
pub const TRIAL_LIVELOCK_LIMIT: u64 = 1 << 24;

/// Runs a program in several modes, in each under the same seeds, and merges the reports.
///
/// ```
/// use epoxide_vgpu::{GridConfig, Module, Trial};
///
/// let module = Module::parse(
///     ".version 8.4\n.target sm_90\n.address_size 64
///      .visible .entry one(.param .u64 out) {
///          .reg .b32 %r<2>; .reg .b64 %rd<2>;
///          ld.param.u64 %rd1, [out];
///          mov.u32 %r1, 1;
///          st.global.u32 [%rd1], %r1;
///          ret;
///      }",
/// )?;
/// let trial = Trial { seeds: 3, ..Trial::default() };
/// let tried = trial.run(|machine| {
///     let out = machine.alloc::<u32>(0, "out", 1)?;
///     machine.launch_with(0, &module, "one", GridConfig::new(1, 1, 0), &[&out])?;
///     machine.run()?;
///     Ok(out.expect([1])?)
/// });
/// assert_eq!(tried.to_string(), "9 runs, 0 reports, 0 failures\n");
/// assert!(tried.is_clean());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Reports that are known stand in an [`AcceptList`]. The trial leaves them out, and prints the
/// entries that fit none:
///
/// ```
/// # use epoxide_vgpu::{GridConfig, Module};
/// use epoxide_vgpu::{AcceptList, Trial};
/// # let module = Module::parse(
/// #     ".version 8.4\n.target sm_90\n.address_size 64
/// #      .visible .entry both(.param .u64 out) {
/// #          .reg .b32 %r<2>; .reg .b64 %rd<2>;
/// #          ld.param.u64 %rd1, [out];
/// #          mov.u32 %r1, %ctaid.x;
/// #          st.global.u32 [%rd1], %r1;
/// #          ret;
/// #      }",
/// # )?;
///
/// let accept = AcceptList::parse(
///     "race both ptx:8 -- nothing reads the number
///      race both ptx:9 -- a line that has no race",
/// )?;
/// let tried = Trial { seeds: 3, accept, ..Trial::default() }.run(|machine| {
///     let out = machine.alloc::<u32>(0, "out", 1)?;
///     machine.launch_with(0, &module, "both", GridConfig::new(2, 1, 0), &[&out])?;
///     Ok(machine.run()?)
/// });
/// assert_eq!(
///     tried.to_string(),
///     "line 2 of the accept list has accepted nothing: a line that has no race
/// 9 runs, 0 reports, 1 accepted, 0 failures\n"
/// );
/// assert!(tried.is_clean());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Trial {
    /// Devices of each machine.
    pub devices: usize,
    /// Seeds of each mode, from 0. With `EPOXIDE_VGPU_SEED` set, only that seed runs.
    pub seeds: u64,
    /// The modes, in order.
    pub modes: Vec<Mode>,
    /// The checks; [`Mode::Weak`] sets `races` and `weak_memory`.
    pub check: CheckConfig,
    /// The devices. Each run sets the seed and, in [`Mode::Fast`], the assumptions of `check`.
    /// Without a limit of instructions it has that of [`TRIAL_LIVELOCK_LIMIT`].
    pub device: DeviceConfig,
    /// Reports that are known. They are no reports of the outcome and of its exit code.
    pub accept: AcceptList,
}

impl Default for Trial {
    /// One device, 20 seeds, all modes, up to 100 reports of a run, none of which is accepted.
    fn default() -> Self {
        Self {
            devices: 1,
            seeds: 20,
            modes: Mode::ALL.to_vec(),
            check: CheckConfig::collecting(),
            device: DeviceConfig { collect: MOST_COLLECTED, ..DeviceConfig::default() },
            accept: AcceptList::default(),
        }
    }
}

/// Runs of one mode.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModeSeeds {
    /// The mode.
    pub mode: Mode,
    /// The seeds of the runs, in order.
    pub seeds: Vec<u64>,
}

impl fmt::Display for ModeSeeds {
    /// As in `check, seeds 0-2, 5`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seeds = if self.seeds.len() == 1 { "seed" } else { "seeds" };
        write!(f, "{}, {seeds} {}", self.mode.name(), ranges(self.seeds.iter().copied()))
    }
}

/// A report of a [`Trial`], merged of all runs that had it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TriedReport {
    /// The report.
    pub report: Report,
    /// The runs that had it, by their modes. `EPOXIDE_VGPU_SEED` set to one of the seeds replays
    /// it.
    pub seen: Vec<ModeSeeds>,
}

impl TriedReport {
    fn see(&mut self, mode: Mode, seed: u64) {
        match self.seen.iter_mut().find(|runs| runs.mode == mode) {
            Some(runs) => runs.seeds.push(seed),
            None => self.seen.push(ModeSeeds { mode, seeds: vec![seed] }),
        }
    }
}

/// A wrong result, or another error of the program that is no report.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailedRuns {
    /// The runs that had it.
    pub runs: ModeSeeds,
    /// The text of the error.
    pub text: String,
}

/// The outcome of a [`Trial`]. Displayed, it has these lines: the [`Summary`](crate::Summary) of
/// the reports, with the runs that had each and the waits of each hang; each failure; each unused
/// entry of the accept list; and the counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tried {
    /// Runs of all modes.
    pub runs: u64,
    /// The reports of all runs, merged, without those that [`Trial::accept`] accepts.
    pub reports: Vec<TriedReport>,
    /// The reports that [`Trial::accept`] accepts.
    pub accepted: Vec<TriedReport>,
    /// The entries of the list that have accepted nothing.
    pub unused: Vec<Accepted>,
    /// Errors of the program. A fault or a hang is a report and no failure.
    pub failures: Vec<FailedRuns>,
}

impl Trial {
    /// The machine of a run.
    #[must_use]
    pub fn machine(&self, mode: Mode, seed: u64) -> Machine {
        let device = DeviceConfig {
            schedule_seed: Some(seed),
            assume: self.check.assume,
            livelock_limit: self.device.livelock_limit.or(Some(TRIAL_LIVELOCK_LIMIT)),
            ..self.device.clone()
        };
        let check = match mode {
            Mode::Fast => None,
            Mode::Check => Some(self.check),
            Mode::Weak => Some(CheckConfig { races: false, weak_memory: Some(seed), ..self.check }),
        };
        Machine::with_config(self.devices, device, check)
    }

    /// Calls `program` with the machine of each run. The program launches, runs and compares the
    /// results, and returns an error where one is wrong.
    ///
    /// # Panics
    /// If `program` does: the seed is printed, as by [`for_each_seed`].
    pub fn run(&self, mut program: impl FnMut(&mut Machine) -> Result<(), Box<dyn Error>>) -> Tried {
        let mut tried = Tried::default();
        for &mode in &self.modes {
            for_each_seed(self.seeds, |seed| {
                let mut machine = self.machine(mode, seed);
                let outcome = program(&mut machine);
                tried.runs += 1;
                machine.reports().into_iter().for_each(|report| tried.add(mode, seed, report));
                let Err(error) = outcome else { return };
                match error.downcast_ref() {
                    // It is among the reports.
                    Some(MachineError::Fault(_) | MachineError::Stuck(_)) => {}
                    Some(MachineError::Mismatch(all)) => {
                        all.iter().for_each(|mismatch| tried.fail(mode, seed, mismatch.to_string()));
                    }
                    _ => tried.fail(mode, seed, error.to_string()),
                }
            });
        }
        let mut list = self.accept.clone();
        let is_accepted = |known: &mut TriedReport| list.accepts(&known.report, &readable_name).is_some();
        tried.accepted = tried.reports.extract_if(.., is_accepted).collect();
        tried.unused = list.unused().cloned().collect();
        tried
    }
}

impl Tried {
    /// Adds a report of a run. Reports of one run are not alike.
    fn add(&mut self, mode: Mode, seed: u64, report: Report) {
        match self.reports.iter_mut().find(|known| known.report.is_alike(&report)) {
            Some(known) => {
                known.report.add(report);
                known.see(mode, seed);
            }
            None => {
                self.reports.push(TriedReport { report, seen: vec![ModeSeeds { mode, seeds: vec![seed] }] })
            }
        }
    }

    fn fail(&mut self, mode: Mode, seed: u64, text: String) {
        match self.failures.iter_mut().find(|known| known.runs.mode == mode && known.text == text) {
            Some(known) => known.runs.seeds.push(seed),
            None => self.failures.push(FailedRuns { runs: ModeSeeds { mode, seeds: vec![seed] }, text }),
        }
    }

    /// Whether there were runs, and none failed or had a report that is not accepted.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.runs > 0 && self.reports.is_empty() && self.failures.is_empty()
    }

    /// Success if it is clean; else failure, as `vgpu run` has it.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        if self.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// The warps that wait, with their events, where a report is a hang of any kind.
fn waits(report: &Report) -> String {
    let text = match &report.fault.kind {
        FaultKind::Deadlock(waits) | FaultKind::Livelock { report: waits, .. } => waits.to_string(),
        FaultKind::Hang(devices) => {
            devices.iter().map(|(device, waits)| format!("device {device}: {waits}\n")).collect()
        }
        _ => return String::new(),
    };
    let kernels = match &report.fault.kind {
        FaultKind::Hang(devices) => devices.iter().map(|(_, waits)| &waits.kernel).collect(),
        _ => vec![&report.fault.kernel],
    };
    kernels.iter().fold(text, |text, kernel| text.replace(&readable_name(kernel), &brief_name(kernel)))
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reports: Vec<Report> = self.reports.iter().map(|tried| tried.report.clone()).collect();
        let summary = Report::summary(&reports);
        for cause in &summary.causes {
            writeln!(f, "{cause}")?;
            for &at in &cause.reports {
                let seen: Vec<String> = self.reports[at].seen.iter().map(ToString::to_string).collect();
                writeln!(f, "  {}: {}", summary.reports[at], seen.join("; "))?;
                waits(&reports[at]).lines().try_for_each(|line| writeln!(f, "    {line}"))?;
            }
        }
        for FailedRuns { runs, text } in &self.failures {
            writeln!(f, "{runs}: {text}")?;
        }
        for Accepted { line, reason, .. } in &self.unused {
            writeln!(f, "line {line} of the accept list has accepted nothing: {reason}")?;
        }
        let [reports, failures] = [self.reports.len(), self.failures.len()].map(|number| number as u64);
        write!(f, "{}, {}, ", counted(self.runs, "run"), counted(reports, "report"))?;
        if !self.accepted.is_empty() {
            write!(f, "{} accepted, ", self.accepted.len())?;
        }
        writeln!(f, "{}", counted(failures, "failure"))
    }
}

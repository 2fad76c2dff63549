//! Runs ranks: as threads of this process, as processes that it starts, or as one rank in this
//! process.

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use epoxide::driver::Device;
use epoxide::driver::virt::{Checker, VirtConfig, VirtualGpu};
use epoxide::group::run_threads;
use epoxide::group::{Member, ProcessGroup, Rendezvous};
use epoxide::internal::Topology;
use epoxide::internal::group::member_of;
use epoxide_launch::{Launch, LaunchEnd, Signals};
use epoxide_launch::{RankExit, current_exe};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{CommandError, FAILED, Result};
use crate::launch::launch_error;
use crate::options::{Check, Defaults, DeviceKind, Mode, RoundTripFlags, Settings, VirtualFlags};
use crate::output::complain;

/// Time for the other ranks to end after one has failed.
const GRACE: Duration = Duration::from_secs(5);
/// Exit code of a process whose main thread has panicked.
const PANICKED: i32 = 101;

/// Where the ranks of this run are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Threads of this process.
    Threads,
    /// Processes that this one starts.
    Processes,
    /// This process is one of them.
    #[serde(rename = "processes")]
    OneRank,
}

impl Placement {
    /// The placement that the flags and the environment give.
    fn of(
        shared: &RoundTripFlags,
        defaults: Defaults,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Placement {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        // A checker records the threads of one process only.
        if shared.virtual_gpu.check.is_some() {
            return Placement::Threads;
        }
        // The rendezvous reports errors in the variables.
        if !matches!(member_of(&variable), Ok(None)) {
            return Placement::OneRank;
        }
        match shared.device {
            _ if shared.threads => Placement::Threads,
            _ if shared.processes => Placement::Processes,
            DeviceKind::Cuda => Placement::Processes,
            DeviceKind::Virtual
                if shared.topology(defaults, None).is_ok_and(|topology| topology.nodes > 1) =>
            {
                Placement::Processes
            }
            DeviceKind::Virtual => Placement::Threads,
        }
    }
}

/// The groups of all ranks.
pub struct Groups {
    /// The group of the ranks' work. A rank that fails aborts it, so that no rank waits for it.
    pub work: Arc<dyn ProcessGroup>,
    /// The group in which all ranks agree on outcomes. A rank that fails cannot do that in `work`,
    /// where the others have other collectives ahead of them.
    outcomes: Arc<dyn ProcessGroup>,
}

impl Groups {
    /// The groups of ranks that are processes. A rank waits up to `timeout` for the others' work,
    /// and up to `outcomes_timeout` for their outcomes: until their own waits have timed out.
    pub fn of_processes(
        meeting: &Rendezvous,
        name: &str,
        timeout: Duration,
        outcomes_timeout: Duration,
    ) -> epoxide::Result<Groups> {
        let work = Arc::new(meeting.group(name, timeout)?);
        let outcomes = Arc::new(meeting.group(&format!("outcomes of {name}"), outcomes_timeout)?);
        // No rank aborts a group that another still connects to.
        outcomes.barrier(timeout)?;
        Ok(Groups { work, outcomes })
    }

    /// The groups of ranks that are threads. One is enough: this process has all their failures.
    fn of_threads(work: Arc<dyn ProcessGroup>) -> Groups {
        Groups { outcomes: work.clone(), work }
    }

    /// Every rank's result; or, where any has failed, the same failure on all processes.
    /// Collective.
    pub fn gather<T: Serialize + DeserializeOwned>(&self, outcome: Result<T>) -> Result<Vec<T>> {
        if let Err(error) = &outcome {
            self.work.abort(error.message.as_deref().unwrap_or("a rank failed"));
        }
        gather(&*self.outcomes, outcome)
    }

    /// This rank's result; or, where any rank has failed, the same failure on all processes.
    /// Collective.
    fn agree<T>(&self, outcome: Result<T>) -> Result<T> {
        match outcome {
            Ok(value) => self.gather(Ok(())).map(|_| value),
            Err(error) => self.gather::<()>(Err(error.clone())).and(Err(error)),
        }
    }
}

/// A rank of a run: the settings of all ranks, and its own groups and device.
pub struct RankContext {
    /// The settings.
    pub settings: Settings,
    /// Where the ranks are.
    pub placement: Placement,
    /// Checker of the devices, and the kind of its findings.
    pub checker: Option<(Check, Checker)>,
    /// The groups of all ranks.
    pub groups: Groups,
    /// Its GPU.
    pub device: Device,
}

impl RankContext {
    /// True on the rank that prints for all.
    pub fn is_root(&self) -> bool {
        self.groups.work.rank() == 0
    }

    /// See [`Groups::gather`].
    pub fn gather<T: Serialize + DeserializeOwned>(&self, outcome: Result<T>) -> Result<Vec<T>> {
        self.groups.gather(outcome)
    }

    /// See [`Groups::agree`].
    pub fn agree<T>(&self, outcome: Result<T>) -> Result<T> {
        self.groups.agree(outcome)
    }
}

/// True in a process that may print a run's result: all but ranks above 0 of another launcher.
pub fn prints() -> bool {
    !matches!(Member::detect(), Ok(Some(member)) if member.rank != 0)
}

/// Runs `main` on every rank that `shared` and the environment specify. Returns the failure of all
/// ranks if they agreed on one, and otherwise that of a rank of this process.
pub fn run(
    shared: &RoundTripFlags,
    defaults: Defaults,
    main: impl Fn(&RankContext) -> Result<()> + Sync,
) -> Result<()> {
    let placement = Placement::of(shared, defaults, |name| std::env::var(name).ok());
    let VirtualFlags { check, random_schedule, preemptions } = shared.virtual_gpu;
    for (flag, is_given) in [
        ("--check", check.is_some()),
        ("--random-schedule", random_schedule),
        ("--preemptions", preemptions.is_some()),
    ] {
        if is_given && shared.device == DeviceKind::Cuda {
            let rule = "the virtual GPU alone can do it; leave --device cuda out";
            return Err(CommandError::usage(format!("{flag} with --device cuda: {rule}")));
        }
    }
    let checker = shared.virtual_gpu.checker(shared.seed);
    let open = |ordinal| match shared.device {
        DeviceKind::Virtual => {
            Ok(VirtualGpu::new(shared.virtual_gpu.device(ordinal, shared.seed, checker.as_ref())))
        }
        DeviceKind::Cuda => open_device(DeviceKind::Cuda, ordinal),
    };
    // Opens the rank's device and runs `main`.
    let one_rank = |groups: Groups, local_rank: u32, settings: Result<Settings>| {
        let opened = settings.and_then(|settings| Ok((settings, open(local_rank)?)));
        let (settings, device) = groups.agree(opened)?;
        let checker = shared.virtual_gpu.check.zip(checker.clone());
        main(&RankContext { settings, placement, checker, groups, device })
    };
    // The others wait for a failing rank until its kernels' deadlines have passed.
    let group_timeout = shared.timeout() * 3 + Duration::from_secs(10);
    match placement {
        Placement::OneRank => {
            let meeting = Rendezvous::from_env(group_timeout)?;
            let groups = Groups::of_processes(&meeting, "world", group_timeout, group_timeout)?;
            let rank = groups.work.rank();
            let launched = Some((groups.work.size(), meeting.member.local_size));
            let settings =
                shared.topology(defaults, launched).and_then(|topology| shared.resolve(topology, defaults));
            let local_rank = meeting.member.local_rank.unwrap_or(meeting.member.rank);
            one_rank(groups, local_rank, settings).map_err(|error| reported_by(error, rank))
        }
        Placement::Threads => {
            let topology = shared.topology(defaults, None)?;
            let (settings, ranks) = (shared.resolve(topology, defaults)?, topology.ranks());
            require_devices(settings.device, settings.mode, topology)?;
            let ended = run_threads(ranks, group_timeout, |rank, group| {
                Ok(one_rank(Groups::of_threads(group), rank, Ok(settings.clone())))
            });
            let outcomes = match ended {
                Ok(outcomes) => outcomes,
                Err(failure) => return Err(CommandError::from(failure.error).on_rank(failure.rank)),
            };
            root_cause((0..).zip(outcomes).filter_map(|(rank, outcome)| Some((rank, outcome.err()?))))
                .map_or(Ok(()), Err)
        }
        Placement::Processes => {
            let topology = shared.topology(defaults, None)?;
            let (settings, ranks) = (shared.resolve(topology, defaults)?, topology.ranks());
            require_devices(settings.device, settings.mode, topology)?;
            let launch = Launch { settle: GRACE, relay: false, ..Launch::new(ranks) };
            let mut signals = Signals::catch()?;
            let ended = launch.run(Some(&mut signals), |_| {
                let mut command = current_exe()?;
                command.args(std::env::args_os().skip(1)).stdin(Stdio::null());
                Ok(command)
            })?;
            outcome_of(&ended)
        }
    }
}

/// The outcome of a launch of processes. An error has a message unless rank 0 has ended by itself,
/// because rank 0 has then printed the result of the run.
fn outcome_of(ended: &LaunchEnd) -> Result<()> {
    let said = match (&ended.failure, ended.signal) {
        (None, None) => return Ok(()),
        (Some(failure), _) => format!("rank {} {}; the other ranks were ended", failure.rank, failure.exit),
        (None, Some(signal)) => format!("ended by signal {signal}"),
    };
    let error = launch_error(ended, said);
    let by_itself = |exit: RankExit| matches!(exit, RankExit::Code(code) if code != PANICKED);
    if !ended.exits.first().copied().is_some_and(by_itself) {
        return Err(error);
    }
    // A rank that has ended by itself, or rank 0, has printed the reason.
    if !ended.failure.as_ref().is_some_and(|failure| by_itself(failure.exit)) {
        error.message.iter().for_each(|message| complain(message));
    }
    Err(CommandError::reported(error.code))
}

/// Part of a failure that a rank in a process of its own prints: rank 0 prints failures that all
/// ranks agree on.
pub fn reported_by(error: CommandError, rank: u32) -> CommandError {
    match error.agreed {
        true if rank != 0 => CommandError::reported(error.code),
        true => error,
        false => error.on_rank(rank),
    }
}

/// Every rank's result; or, where any has failed, the same failure on all ranks, or the own one
/// where the ranks cannot meet. Collective.
fn gather<T: Serialize + DeserializeOwned>(group: &dyn ProcessGroup, outcome: Result<T>) -> Result<Vec<T>> {
    let broken = |error: serde_json::Error| CommandError::failed(format!("a rank's report: {error}"));
    let message = serde_json::to_vec(&outcome).map_err(broken)?;
    let messages = match (group.all_gather(&message), outcome) {
        (Err(_), Err(own)) => return Err(own),
        (messages, _) => messages?,
    };
    let (mut results, mut errors) = (Vec::new(), Vec::new());
    for (rank, message) in (0..).zip(messages) {
        match serde_json::from_slice::<Result<T>>(&message).map_err(broken)? {
            Ok(result) => results.push(result),
            Err(error) => errors.push((rank, error)),
        }
    }
    match root_cause(errors.into_iter()) {
        None => Ok(results),
        Some(error) => Err(CommandError { agreed: true, ..error }),
    }
}

/// The failure to report: of the lowest rank whose failure does not follow from another's. Among
/// consequences, that of a rank that waited until a time-out names the cause best.
pub fn root_cause(errors: impl Iterator<Item = (u32, CommandError)>) -> Option<CommandError> {
    let mut errors: Vec<(u32, CommandError)> = errors.collect();
    errors.sort_by_key(|(rank, error)| (error.consequence, !error.timed_out, *rank));
    let (rank, error) = errors.into_iter().next()?;
    // An agreed failure names its rank already, if it has one.
    Some(if error.agreed || error.code != FAILED { error } else { error.on_rank(rank) })
}

/// Checks that each rank has a device, before anything is started.
fn require_devices(kind: DeviceKind, mode: Mode, topology: Topology) -> Result<()> {
    match kind {
        DeviceKind::Virtual => Ok(()),
        DeviceKind::Cuda => {
            let (have, count) = (cuda_devices()?, topology.ranks());
            if have < count {
                let remedy = match have {
                    0 => "leave --device cuda out to use the virtual GPU".to_owned(),
                    _ => format!("use {}", flags_for(mode, topology.nodes, have)),
                };
                return Err(CommandError::skipped(format!(
                    "{count} ranks need {count} GPUs, this machine has {have}; {remedy}"
                )));
            }
            Ok(())
        }
    }
}

/// The flags of ranks that need at most `devices`, on as many nodes if each has a device.
fn flags_for(mode: Mode, nodes: u32, devices: u32) -> String {
    let one_node = if mode == Mode::Internode { Mode::Intranode } else { mode };
    let (mode, nodes) = if nodes <= devices { (mode, nodes) } else { (one_node, 1) };
    format!("--mode {} --nodes {nodes} --ranks-per-node {}", mode.name(), devices / nodes)
}

/// Opens device `ordinal`.
pub fn open_device(kind: DeviceKind, ordinal: u32) -> Result<Device> {
    match kind {
        DeviceKind::Virtual => Ok(VirtualGpu::new(VirtConfig { ordinal, ..VirtConfig::default() })),
        DeviceKind::Cuda => open_cuda(ordinal),
    }
}

/// Remedy for a binary without CUDA.
#[cfg(not(feature = "cuda"))]
pub const NO_CUDA: &str =
    "this binary was built without CUDA; build with `cargo build --release --features cuda`";

/// How many CUDA devices there are.
#[cfg(feature = "cuda")]
pub fn cuda_devices() -> Result<u32> {
    epoxide::driver::cuda::devices().map(|devices| devices.len() as u32).map_err(CommandError::from)
}

/// How many CUDA devices there are.
#[cfg(not(feature = "cuda"))]
pub fn cuda_devices() -> Result<u32> {
    Err(CommandError::skipped(NO_CUDA))
}

#[cfg(feature = "cuda")]
fn open_cuda(ordinal: u32) -> Result<Device> {
    epoxide::driver::cuda::CudaDevice::open(ordinal).map_err(CommandError::from)
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(_ordinal: u32) -> Result<Device> {
    Err(CommandError::skipped(NO_CUDA))
}

#[cfg(test)]
mod tests {
    use epoxide::group::RANK;

    use crate::testing;

    use super::*;

    #[test]
    fn the_environment_wins_over_flags_and_flags_over_the_device() {
        let placement = |line: &str, rank: Option<&str>| {
            let words = ["epoxide"].into_iter().chain(line.split_whitespace());
            let shared = testing::parse(words).unwrap();
            let defaults = Defaults { mode: Mode::Intranode, tokens: 1, hidden: 8, num_sms: None };
            Placement::of(&shared, defaults, |name| rank.filter(|_| name == RANK).map(str::to_owned))
        };
        assert_eq!(placement("", None), Placement::Threads);
        assert_eq!(placement("", Some("")), Placement::Threads);
        assert_eq!(placement("--device cuda", None), Placement::Processes);
        assert_eq!(placement("--device cuda --threads", None), Placement::Threads);
        assert_eq!(placement("--nodes 2", None), Placement::Processes);
        assert_eq!(placement("--nodes 2 --threads", None), Placement::Threads);
        assert_eq!(placement("--processes", None), Placement::Processes);
        assert_eq!(placement("--processes", Some("3")), Placement::OneRank);
    }

    #[test]
    fn the_flags_for_fewer_devices_need_no_more() {
        for line in
            ["", "--mode internode", "--nodes 3", "--mode low-latency", "--mode low-latency --nodes 4"]
        {
            let shared = |line: &str| -> RoundTripFlags {
                testing::parse(["epoxide"].into_iter().chain(line.split_whitespace())).unwrap()
            };
            let defaults = Defaults { mode: Mode::Internode, tokens: 1, hidden: 8, num_sms: None };
            let asked = shared(line).topology(defaults, None).unwrap();
            let mode = shared(line).resolve(asked, defaults).unwrap().mode;
            for devices in 1..asked.ranks() {
                let flags = flags_for(mode, asked.nodes, devices);
                let shared = shared(&flags);
                let topology = shared.topology(defaults, None).unwrap();
                assert!(topology.ranks() <= devices && topology.ranks() > 0, "{line}: {flags}");
                shared.resolve(topology, defaults).unwrap();
            }
        }
    }

    #[test]
    fn the_cause_is_reported_not_its_consequences() {
        let timeout = CommandError { consequence: true, ..CommandError::failed("rank 0 waited for rank 2") };
        let errors = [
            (0, timeout.clone()),
            (2, CommandError::failed("wrong")),
            (3, CommandError::failed("also wrong")),
        ];
        let cause = root_cause(errors.into_iter()).unwrap();
        assert_eq!(cause.message.as_deref(), Some("rank 2: wrong"));
        let waited = CommandError { timed_out: true, ..timeout.clone() };
        let cause = root_cause([(0, timeout.clone()), (1, waited)].into_iter()).unwrap();
        assert_eq!(cause.message.as_deref(), Some("rank 1: rank 0 waited for rank 2"));
        let of_peer =
            epoxide::Error::PeerFailed { what: "the buffer", rank: 0, peer: 1, reason: "experts 0".into() };
        let cause =
            root_cause([(0, of_peer.into()), (1, CommandError::usage("experts 0".to_owned()))].into_iter());
        assert_eq!(cause.map(|error| error.code), Some(crate::error::USAGE));
        assert!(root_cause([(0, timeout)].into_iter()).is_some());
        assert_eq!(root_cause(std::iter::empty()), None);
    }

    #[test]
    fn the_parent_has_a_message_where_rank_0_has_printed_no_result() {
        use epoxide_launch::FirstFailure;
        let (code, signal) = (RankExit::Code, RankExit::Signal);
        let message = |rank: u32, exits: [RankExit; 2], signal| {
            let exit = exits[rank as usize];
            let failure = FirstFailure { rank, node: 0, local_rank: rank, pid: 1, exit, stderr: Vec::new() };
            let failure = Some(failure).filter(|_| !exit.success());
            let ended = LaunchEnd { failure, signal, restarts: 0, exits: exits.into() };
            let error = outcome_of(&ended).unwrap_err();
            assert_eq!(i32::from(error.code), ended.code(), "{ended:?}");
            error.message
        };
        for rank_0 in [code(PANICKED), signal(15)] {
            for rank_1 in [code(PANICKED), code(1), signal(9)] {
                let said = message(1, [rank_0, rank_1], None).unwrap();
                assert!(said.starts_with(&format!("rank 1 {rank_1}; ")), "{said}");
            }
        }
        for rank_0 in [code(0), code(1), code(77)] {
            for rank_1 in [code(PANICKED), code(1), signal(9)] {
                assert_eq!(message(1, [rank_0, rank_1], None), None);
            }
        }
        assert_eq!(message(0, [code(1), signal(15)], None), None);
        assert!(message(0, [code(PANICKED), signal(15)], None).is_some());
        assert_eq!(message(0, [code(0), signal(15)], Some(15)), None);
        let interrupted = LaunchEnd { failure: None, signal: Some(2), restarts: 0, exits: Vec::new() };
        assert!(outcome_of(&interrupted).unwrap_err().message.is_some());
    }

    fn of_processes(work: Arc<dyn ProcessGroup>) -> Groups {
        Groups { outcomes: work.split(0).unwrap(), work }
    }

    #[test]
    fn a_failure_of_one_rank_is_agreed_on_by_all() {
        let outcomes = run_threads(3, Duration::from_secs(120), |rank, group| {
            let groups = of_processes(group);
            let gathered = groups.gather(Ok(rank));
            Ok((
                gathered,
                groups.agree(if rank == 1 { Err(CommandError::failed("broke")) } else { Ok(rank) }),
            ))
        })
        .unwrap();
        for (gathered, agreed) in outcomes {
            let error = agreed.unwrap_err();
            assert!(error.agreed && error.message.as_deref() == Some("rank 1: broke"), "{error:?}");
            assert_eq!(gathered.unwrap(), [0, 1, 2]);
        }
    }

    /// The rank that fails has left out a collective in which the other waits.
    #[test]
    fn a_failure_in_front_of_a_collective_is_reported_and_not_the_failed_collective() {
        let outcomes = |groups: fn(Arc<dyn ProcessGroup>) -> Groups| {
            run_threads(2, Duration::from_secs(120), |rank, group| {
                group.barrier(group.timeout())?;
                let groups = groups(group);
                let outcome = match rank {
                    0 => groups.work.barrier(groups.work.timeout()).map_err(CommandError::from),
                    _ => Err(CommandError::skipped("no GPU")),
                };
                Ok(groups.gather(outcome).unwrap_err())
            })
            .unwrap()
        };
        for error in outcomes(of_processes) {
            assert!(error.agreed && error.code == crate::error::SKIPPED, "{error:?}");
            assert_eq!(error.message.as_deref(), Some("skipped: no GPU"));
        }
        let errors = outcomes(Groups::of_threads);
        let waited = errors[0].message.as_deref().unwrap();
        assert!(errors[0].code == FAILED && waited.contains("no GPU"), "{waited}");
        let cause = root_cause((0..).zip(errors)).unwrap();
        assert_eq!(cause.message.as_deref(), Some("skipped: no GPU"));
    }
}

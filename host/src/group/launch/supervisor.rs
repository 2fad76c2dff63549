//! Starting the ranks of this host, watching them, ending them in order, and starting them again.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::meeting::{Meeting, Trouble};
use super::place::Place;
use super::port::HeldPort;
use super::relay::{Kind, Relay, Sinks, Stream};
use super::signals::{Signals, ends};
use super::watched::{Process, Watched};
use super::{RankExit, StoreDirectory, die_with_parent};
use crate::error::{Error, Result};
use crate::group::FileStore;

/// How long ranks get to end by themselves when another has failed, before they are asked to.
const SETTLE: Duration = Duration::from_secs(1);
/// How often the other nodes are asked how they are.
const ASK: Duration = Duration::from_millis(100);

/// The hosts of a launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nodes {
    /// How many.
    pub count: u32,
    /// The number of this one.
    pub rank: u32,
    /// With several hosts: a host name of the first and a port there, which its launcher listens at; the same on all.
    /// On one host: where rank 0 is to serve the store, instead of any free port.
    pub endpoint: Option<(String, u16)>,
}

impl Nodes {
    /// Only this host.
    pub fn one() -> Nodes {
        Nodes { count: 1, rank: 0, endpoint: None }
    }
}

/// A launch of ranks on this host, with the environment that torchrun gives them.
///
/// Every rank is a process group of its own and finds the variables of [`Place::variables`] in its environment, with
/// `OMP_NUM_THREADS` = 1 where there are several ranks and it is unset. Rank 0 of the host keeps the launcher's standard
/// input unless that is a terminal; the others have none. What the ranks print is passed on by whole lines.
///
/// When a rank fails, the store of the launch is given up and the other ranks get a second to end by themselves; those
/// still running are sent SIGTERM and, after [`Launch::grace`], SIGKILL, with all processes of their groups. Then, if
/// restarts are left, all ranks are started again, on all hosts. The kernel kills the ranks (not what they have started) if the
/// thread that called [`Launch::run`] dies.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Ranks of each host.
    pub ranks_per_node: u32,
    /// The hosts.
    pub nodes: Nodes,
    /// How often all ranks are started again after a failure.
    pub max_restarts: u32,
    /// How long a rank may take to end after SIGTERM.
    pub grace: Duration,
    /// Where each rank's output is also written: `DIR/attempt_N/RANK/stdout.log` and `stderr.log`.
    pub log_dir: Option<PathBuf>,
    /// Begin each line with `[rank R] `.
    pub prefix: bool,
    /// The launch's name, the same on all hosts.
    pub run_id: String,
    /// Where output goes.
    pub sinks: Sinks,
}

/// The rank that failed first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Its number.
    pub rank: u32,
    /// Its host's number.
    pub node: u32,
    /// Its number on its host.
    pub local_rank: u32,
    /// Its process.
    pub pid: u32,
    /// How it ended.
    pub exit: RankExit,
    /// The last lines of its standard error; only its own host has them.
    pub stderr: Vec<String>,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} {}", self.rank, self.exit)?;
        if !self.stderr.is_empty() {
            write!(f, "; its last lines on standard error:")?;
        }
        self.stderr.iter().try_for_each(|line| write!(f, "\n  {line}"))
    }
}

/// How a launch ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// The first failure of the last start, if a rank failed before a signal ended the launch.
    pub failure: Option<Failure>,
    /// The signal that ended the launch.
    pub signal: Option<i32>,
    /// How often the ranks were started again.
    pub restarts: u32,
}

impl Ended {
    /// The exit code of the launch: 0, 128 plus the signal that ended it, or that of the first rank that failed.
    pub fn code(&self) -> i32 {
        match (&self.failure, self.signal) {
            (Some(failure), _) => failure.exit.code(),
            (None, Some(signal)) => 128 + signal,
            (None, None) => 0,
        }
    }
}

impl Launch {
    /// A launch of `ranks` ranks on this host alone, without restarts.
    pub fn new(ranks: u32) -> Launch {
        Launch {
            ranks_per_node: ranks,
            nodes: Nodes::one(),
            max_restarts: 0,
            grace: Duration::from_secs(5),
            log_dir: None,
            prefix: true,
            run_id: format!("epoxide-{}", std::process::id()),
            sinks: Sinks::standard(),
        }
    }

    fn check(&self) -> Result<()> {
        let nodes = &self.nodes;
        if self.ranks_per_node == 0 {
            return Err(Error::argument("ranks_per_node", 0, "a host has at least one rank"));
        }
        if nodes.rank >= nodes.count {
            let rule = format!("must be below the number of nodes, which is {}", nodes.count);
            return Err(Error::argument("node rank", nodes.rank, rule));
        }
        if nodes.count > 1 && nodes.endpoint.is_none() {
            let rule = "several nodes need the host and port of the first, the same on every node";
            return Err(Error::argument("rendezvous endpoint", "none", rule));
        }
        if u64::from(nodes.count) * u64::from(self.ranks_per_node) > u64::from(u32::MAX) {
            return Err(Error::argument("ranks_per_node", self.ranks_per_node, "too many ranks in all"));
        }
        Ok(())
    }

    /// Starts the ranks and waits until all have ended, with restarts if need be; passes on the signals that `signals`
    /// catches. `command` makes the command line of each rank.
    ///
    /// # Errors
    /// Where the launch is not well formed, or a rank cannot be started. A rank that fails is no error here.
    pub fn run(
        &self,
        mut signals: Option<&mut Signals>,
        command: impl Fn(&Place) -> Result<Command>,
    ) -> Result<Ended> {
        self.check()?;
        let meeting = match &self.nodes.endpoint {
            Some(endpoint) if self.nodes.count > 1 => {
                Some(Meeting::join(self, endpoint, signals.as_deref_mut())?)
            }
            _ => None,
        };
        let meeting = meeting.as_ref();
        for restarts in 0.. {
            let (failure, signal) = self.attempt(restarts, signals.as_deref_mut(), meeting, &command)?;
            match failure {
                Some(failure) if signal.is_none() && restarts < self.max_restarts => {
                    let next = restarts + 1;
                    self.sinks.say(&format!("launch: restart {next} of {}: {failure}", self.max_restarts));
                }
                failure => return Ok(Ended { failure, signal, restarts }),
            }
        }
        Err(Error::os("launch", "more restarts than can be counted"))
    }

    /// Starts all ranks once. Returns the first failure and the signal that ended it.
    fn attempt(
        &self,
        restarts: u32,
        mut signals: Option<&mut Signals>,
        meeting: Option<&Meeting>,
        command: impl Fn(&Place) -> Result<Command>,
    ) -> Result<(Option<Failure>, Option<i32>)> {
        // With several hosts the ranks meet at rank 0's store alone.
        let directory = (self.nodes.count == 1).then(StoreDirectory::create).transpose()?;
        let store = directory.as_ref().map(|directory| FileStore::new(&directory.path)).transpose()?;
        // Rank 0's store needs a port here, unless it was given or rank 0 is elsewhere.
        let first = self.nodes.rank == 0 && (meeting.is_some() || self.nodes.endpoint.is_none());
        let port = first.then(HeldPort::any).transpose()?;
        let held = port.as_ref().map(HeldPort::number);
        let (master_addr, master_port) = match (&self.nodes.endpoint, meeting) {
            (Some((host, _)), Some(meeting)) => {
                (host.clone(), meeting.begin(restarts, held, signals.as_deref_mut())?)
            }
            (Some((host, port)), None) => (host.clone(), *port),
            (None, _) => ("127.0.0.1".to_owned(), held.unwrap_or_default()),
        };
        let mut ranks = Watched::default();
        let (mut out, mut err) = (Vec::new(), Vec::new());
        for local_rank in 0..self.ranks_per_node {
            let place = Place {
                local_rank,
                local_size: self.ranks_per_node,
                node: self.nodes.rank,
                nodes: self.nodes.count,
                master_addr: master_addr.clone(),
                master_port,
                store: directory.as_ref().map(|directory| format!("file://{}", directory.path.display())),
                restarts,
                max_restarts: self.max_restarts,
                run_id: meeting.map_or(&self.run_id, Meeting::run_id).clone(),
            };
            let mut child = self.spawn(&place, command(&place)?)?;
            let prefix = if self.prefix { format!("[rank {}] ", place.rank()) } else { String::new() };
            let mut streams = [None, None];
            streams[0] = child.stdout.take().map(OwnedFd::from);
            streams[1] = child.stderr.take().map(OwnedFd::from);
            // The logs come last: a rank that runs must be watched whatever happens.
            ranks.0.push(Process::new(&place, child));
            for (pipe, name, streams) in streams
                .into_iter()
                .zip([("stdout", &mut out), ("stderr", &mut err)])
                .map(|(a, (b, c))| (a, b, c))
            {
                if let Some(pipe) = pipe {
                    streams.push(Stream { prefix: prefix.clone(), pipe, log: self.log(&place, name)? });
                }
            }
        }
        let out = Relay::start(Kind::Out, out, self.sinks.clone())?;
        let err = Relay::start(Kind::Err, err, self.sinks.clone())?;
        let report = |trouble: Trouble| match (&store, meeting) {
            (Some(store), _) => store.poison(&trouble.to_string()),
            (None, Some(meeting)) => meeting.report(restarts, &trouble),
            (None, None) => Ok(()),
        };
        let elsewhere = || meeting.map_or(Ok(false), |meeting| Ok(meeting.trouble(restarts)?.is_some()));
        let asks = meeting.is_some().then_some(ASK);
        let watched = self.watch(&mut ranks, signals.as_deref_mut(), asks, report, elsewhere);
        drop(ranks);
        out.finish();
        let mut tails = err.finish();
        let (first, signal) = watched?;
        let own = first.map(|mut failure| {
            let index = failure.local_rank as usize;
            failure.stderr = tails.get_mut(index).map(std::mem::take).unwrap_or_default().into_lines();
            failure
        });
        let Some(meeting) = meeting else { return Ok((own, signal)) };
        // What came first on any node is what all report.
        Ok(match meeting.end(restarts, self.grace, signals)? {
            None => (None, None),
            Some(Trouble::Signal(signal)) => (None, Some(signal)),
            Some(Trouble::Rank(first)) => {
                (Some(own.filter(|own| own.rank == first.rank).unwrap_or(first)), None)
            }
        })
    }

    fn spawn(&self, place: &Place, mut command: Command) -> Result<Child> {
        command.envs(place.variables()).process_group(0);
        if self.ranks_per_node > 1 && std::env::var_os("OMP_NUM_THREADS").is_none() {
            command.env("OMP_NUM_THREADS", "1");
        }
        let reads = place.local_rank == 0 && !std::io::IsTerminal::is_terminal(&std::io::stdin());
        command.stdin(if reads { Stdio::inherit() } else { Stdio::null() });
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        die_with_parent(&mut command);
        command.spawn().map_err(|error| {
            let program = Path::new(command.get_program()).display();
            Error::os("spawn", format!("rank {}, {program}: {error}", place.rank()))
        })
    }

    /// The log file of one of a rank's streams.
    fn log(&self, place: &Place, name: &str) -> Result<Option<File>> {
        let Some(directory) = &self.log_dir else { return Ok(None) };
        let directory = directory.join(format!("attempt_{}", place.restarts)).join(place.rank().to_string());
        let path = directory.join(format!("{name}.log"));
        let file = fs::create_dir_all(&directory).and_then(|()| File::create(&path));
        file.map(Some).map_err(|error| {
            Error::os("open", format!("{}: {error}; name a writable log directory", path.display()))
        })
    }

    /// Waits until all ranks have ended, and sees to it that they do once one has failed or a signal says so.
    fn watch(
        &self,
        ranks: &mut Watched,
        mut signals: Option<&mut Signals>,
        asks: Option<Duration>,
        report: impl Fn(Trouble) -> Result<()>,
        elsewhere: impl Fn() -> Result<bool>,
    ) -> Result<(Option<Failure>, Option<i32>)> {
        let mut failure: Option<Failure> = None;
        let (mut ended_by, mut ended_elsewhere) = (None, false);
        let mut phase = Phase::Running;
        while ranks.running() > 0 {
            let timeout = [phase.left(), asks].into_iter().flatten().min();
            ranks.wait(signals.as_deref(), timeout)?;
            for signal in signals.as_deref_mut().map(Signals::take).unwrap_or_default() {
                tracing::info!(signal, "passing a signal on");
                if !ends(signal) {
                    ranks.pass(signal);
                } else if ended_by.replace(signal).is_none() {
                    ranks.signal(signal);
                    report(Trouble::Signal(signal))?;
                    phase = Phase::Ending(Instant::now() + self.grace);
                } else {
                    // Whoever sends a second one does not want to wait.
                    ranks.signal(libc::SIGKILL);
                    phase = Phase::Killed;
                }
            }
            if let Some(first) = ranks.look()?
                && failure.is_none()
                && ended_by.is_none()
                && !ended_elsewhere
            {
                report(Trouble::Rank(first.clone()))?;
                failure = Some(first);
                phase = Phase::Settling(Instant::now() + SETTLE);
            }
            if matches!(phase, Phase::Running) && elsewhere()? {
                ended_elsewhere = true;
                phase = Phase::Settling(Instant::now() + SETTLE);
            }
            phase = match phase {
                Phase::Settling(end) if Instant::now() >= end => {
                    ranks.signal(libc::SIGTERM);
                    // A stopped process acts on SIGTERM only once it goes on.
                    ranks.signal(libc::SIGCONT);
                    Phase::Ending(Instant::now() + self.grace)
                }
                Phase::Ending(end) if Instant::now() >= end => {
                    ranks.signal(libc::SIGKILL);
                    Phase::Killed
                }
                phase => phase,
            };
        }
        if failure.is_some() || ended_by.is_some() || ended_elsewhere {
            // What the ranks have started goes with them. None is reaped yet, so the groups are still theirs.
            ranks.sweep();
        }
        Ok((failure, ended_by))
    }
}

/// How far the end has come.
#[derive(Clone, Copy)]
enum Phase {
    Running,
    /// A rank has failed; the others may end by themselves until then.
    Settling(Instant),
    /// They were asked to end and may take until then.
    Ending(Instant),
    Killed,
}

impl Phase {
    /// How long until something has to be done.
    fn left(self) -> Option<Duration> {
        match self {
            Phase::Settling(end) | Phase::Ending(end) => Some(end.saturating_duration_since(Instant::now())),
            Phase::Running | Phase::Killed => None,
        }
    }
}

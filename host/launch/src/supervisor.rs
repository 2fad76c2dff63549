//! Starting the ranks of this host, watching them, ending them in order, and starting them again.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::child::{default_interrupts, die_with_parent};
use super::exit::{FirstFailure, LaunchEnd, RankExit};
use super::launchers::{Interrupted, Launchers, Trouble};
use epoxide_base::deadline;

use super::plan::Launch;
use super::rank_environment::RankEnvironment;
use super::relay::{Kind, RankOutput, Relay};
use super::signals::{Signals, default_sigchld, ends, hurries};
use super::store_directory::StoreDirectory;
use super::watched::{Process, Watched};
use crate::error::{Error, Result};
use crate::group::FileStore;
use crate::group::internal::{HeldPort, LAUNCH, give_secret, poison_files};
use crate::own_file;

/// The number of threads of a rank's parallel loops.
const THREADS: &str = "OMP_NUM_THREADS";
/// How often the state of the other nodes is polled.
const ASK: Duration = Duration::from_millis(100);

/// The phases of a launch's end, in order.
#[derive(Clone, Copy)]
enum Phase {
    Running,
    /// A rank has failed; the others may end by themselves until then.
    Settling(Instant),
    /// The ranks were sent SIGTERM or the signal, and may take until then.
    Ending(Instant),
    /// The ranks were killed, and must have ended by then.
    Killed(Instant),
}

impl Phase {
    /// How long until something has to be done.
    fn left(self) -> Option<Duration> {
        match self {
            Phase::Settling(end) | Phase::Ending(end) | Phase::Killed(end) => {
                Some(end.saturating_duration_since(Instant::now()))
            }
            Phase::Running => None,
        }
    }
}

/// How one start of the ranks ended.
struct Attempt {
    failure: Option<FirstFailure>,
    signal: Option<i32>,
    exits: Vec<RankExit>,
}

impl Launch {
    /// Starts the ranks and waits until all have ended, with restarts if need be; passes on the
    /// signals that `signals` catches. `command` makes the command line of each rank. If this
    /// process ignores SIGCHLD, the signal's action becomes the default one.
    ///
    /// # Errors
    /// The launch is not well formed, a rank cannot be started or does not end after SIGKILL, or
    /// another node's launcher is lost.
    pub fn run(
        &self,
        mut signals: Option<&mut Signals>,
        command: impl Fn(&RankEnvironment) -> Result<Command>,
    ) -> Result<LaunchEnd> {
        self.check()?;
        default_sigchld()?;
        let interrupted = |why, restarts| match why {
            Interrupted::Signal(signal) => {
                Ok(LaunchEnd { failure: None, signal: Some(signal), restarts, exits: Vec::new() })
            }
            Interrupted::Error(error) => Err(error),
        };
        let secret = self.job_secret()?;
        let launchers = match &self.nodes.endpoint {
            Some(endpoint) if self.nodes.count > 1 => {
                match Launchers::join(self, endpoint, secret.as_ref(), signals.as_deref_mut()) {
                    Ok(launchers) => Some(launchers),
                    Err(why) => return interrupted(why, 0),
                }
            }
            _ => None,
        };
        let launchers = launchers.as_ref();
        let command = |environment: &RankEnvironment| {
            let mut command = command(environment)?;
            if let Some(secret) = &secret {
                give_secret(secret, &mut command);
            }
            Ok(command)
        };
        for restarts in 0.. {
            let ended = match self.attempt(restarts, signals.as_deref_mut(), launchers, command) {
                Ok(ended) => ended,
                Err(why) => {
                    if let Some(launchers) = launchers {
                        launchers.leave(restarts, &why);
                        // The others may begin the next start, after a rank's failure in this one.
                        launchers.leave(restarts + 1, &why);
                    }
                    return interrupted(why, restarts);
                }
            };
            match ended {
                Attempt { failure: Some(failure), signal: None, .. } if restarts < self.max_restarts => {
                    let next = restarts + 1;
                    self.sinks.say(&format!("launch: restart {next} of {}: {failure}", self.max_restarts));
                }
                Attempt { failure, signal, exits } => {
                    if let (Some(launchers), Some(_), Some(signal)) = (launchers, &failure, signal) {
                        launchers.leave(restarts + 1, &Interrupted::Signal(signal));
                    }
                    return Ok(LaunchEnd { failure, signal, restarts, exits });
                }
            }
        }
        Err(Error::os("launch", "more restarts than can be counted"))
    }

    /// Starts all ranks once.
    fn attempt(
        &self,
        restarts: u32,
        mut signals: Option<&mut Signals>,
        launchers: Option<&Launchers>,
        command: impl Fn(&RankEnvironment) -> Result<Command>,
    ) -> Result<Attempt, Interrupted> {
        let directory = StoreDirectory::create()?;
        // With several hosts the ranks meet at the store of the first node's launcher. It listens
        // already, so no other process can take its port.
        let board = (self.nodes.count == 1).then(|| directory.path.join("store"));
        let store = board.as_ref().map(FileStore::new).transpose()?;
        let meet = match (&board, &self.nodes.endpoint) {
            (Some(board), _) => Some(format!("file://{}", board.display())),
            (None, Some((host, port))) if host.contains(':') => Some(format!("tcp://[{host}]:{port}")),
            (None, Some((host, port))) => Some(format!("tcp://{host}:{port}")),
            (None, None) => None,
        };
        // For programs whose rank 0 serves its own store, as PyTorch's does: a port here, unless
        // one was given or rank 0 is on another host.
        let first = self.nodes.rank == 0 && (launchers.is_some() || self.nodes.endpoint.is_none());
        let port = first.then(HeldPort::any).transpose()?;
        let held = port.as_ref().map(HeldPort::number);
        let (master_addr, master_port) = match (&self.nodes.endpoint, launchers) {
            (Some((host, _)), Some(launchers)) => {
                (host.clone(), launchers.begin(restarts, held, signals.as_deref_mut())?)
            }
            (Some((host, port)), None) => (host.clone(), *port),
            (None, _) => ("127.0.0.1".to_owned(), held.unwrap_or_default()),
        };
        let mut ranks = Watched::default();
        let (mut out, mut err) = (Vec::new(), Vec::new());
        // Signals that arrived during the start of the ranks, which may take long.
        let mut early: Vec<i32> = Vec::new();
        for local_rank in 0..self.ranks_per_node {
            early.extend(signals.as_deref_mut().map(Signals::take).unwrap_or_default());
            if let Some(signal) = early.iter().copied().find(|signal| ends(*signal)) {
                if local_rank == 0 {
                    return Err(Interrupted::Signal(signal));
                }
                break;
            }
            let environment = RankEnvironment {
                local_rank,
                local_size: self.ranks_per_node,
                node: self.nodes.rank,
                nodes: self.nodes.count,
                master_addr: master_addr.clone(),
                master_port,
                store: meet.clone(),
                restarts,
                max_restarts: self.max_restarts,
                run_id: launchers.map_or(&self.run_id, Launchers::run_id).clone(),
            };
            let mut command = command(&environment)?;
            command.env(LAUNCH, &directory.path);
            let mut child = self.spawn(&environment, command)?;
            if self.groups {
                directory.note_group(child.id());
            }
            let prefix = if self.prefix { format!("[rank {}] ", environment.rank()) } else { String::new() };
            let mut streams = [None, None];
            streams[0] = child.stdout.take().map(OwnedFd::from);
            streams[1] = child.stderr.take().map(OwnedFd::from);
            // Logs last: a running rank must be watched even if its logs fail.
            let process = Process::new(environment.rank(), environment.node, child);
            ranks.0.push(if self.groups { process.as_group_leader() } else { process });
            for (pipe, name, streams) in streams
                .into_iter()
                .zip([("stdout", &mut out), ("stderr", &mut err)])
                .map(|(a, (b, c))| (a, b, c))
            {
                if let Some(pipe) = pipe {
                    streams.push(RankOutput {
                        prefix: prefix.clone(),
                        pipe,
                        log: self.log(&environment, name)?,
                    });
                }
            }
        }
        // Lines of this thread take the way of the ranks' lines: a relay holds the lock of the
        // sinks while a reader stalls, and the ranks have to be ended meanwhile.
        let (pipe, mut own_lines) = std::io::pipe().map_err(|error| Error::system("pipe", error))?;
        err.push(RankOutput { prefix: String::new(), pipe: pipe.into(), log: None });
        let out = Relay::start(Kind::Out, out, self.sinks.clone())?;
        let err = Relay::start(Kind::Err, err, self.sinks.clone())?;
        // If the report fails, the signal still ends the other ranks. The cause stays the same.
        let report = |trouble: Trouble| {
            let reported = match (&store, launchers) {
                (Some(store), _) => poison_files(store, &trouble.to_string()),
                (None, Some(launchers)) => launchers.report(restarts, &trouble),
                (None, None) => Ok(()),
            };
            if let Err(error) = reported {
                // The reader of the output may be gone.
                let _ = writeln!(own_lines, "launch: the other ranks cannot be told, and are ended: {error}");
            }
        };
        let elsewhere =
            || launchers.map_or(Ok(false), |launchers| Ok(launchers.trouble(restarts)?.is_some()));
        let asks = launchers.is_some().then_some(ASK);
        let watched = self.watch(&mut ranks, early, signals.as_deref_mut(), asks, report, elsewhere);
        let exits = ranks.exits();
        drop(ranks);
        drop(own_lines);
        // A signal from now on concerns the reader of the output: the ranks have ended.
        let mut late = None;
        let mut hurry = || {
            let caught = signals.as_deref_mut().map(Signals::take).unwrap_or_default();
            late = late.or(caught.into_iter().find(|signal| ends(*signal)));
            late.is_some() || !matches!(watched, Ok((_, None)))
        };
        let out = out.finish(&mut hurry);
        let err = err.finish(&mut hurry);
        let mut tails = err.tails;
        // This thread's, which is no rank's.
        tails.pop();
        let (first, caught) = watched?;
        let lost = [("standard output", out.lost), ("standard error", err.lost)];
        if let Some((stream, error)) = lost.into_iter().find_map(|(stream, lost)| Some((stream, lost?))) {
            let cause = first.map(|failure| format!("; then {failure}")).unwrap_or_default();
            let reason = format!("{stream}: {error}; the output of the ranks is lost{cause}");
            return Err(Error::os("write", reason).with_errno(&error).into());
        }
        let own = first.map(|mut failure| {
            let index = failure.local_rank as usize;
            failure.stderr = tails.get_mut(index).map(std::mem::take).unwrap_or_default().into_lines();
            failure
        });
        let Some(launchers) = launchers else {
            // A failure decides the exit code, and the signal that no rank starts again.
            return Ok(Attempt { signal: caught.or(late), failure: own, exits });
        };
        if own.is_none()
            && let Some(signal) = late
        {
            return Err(Interrupted::Signal(signal));
        }
        // All nodes report the first failure of any node.
        let trouble = launchers.end(restarts, self.longest_end(), signals)?;
        let (failure, signal) = match trouble {
            None => (None, None),
            Some(Trouble::Signal(signal)) => (None, Some(signal)),
            Some(Trouble::Rank(first)) => {
                (Some(own.filter(|own| own.rank == first.rank).unwrap_or(first)), None)
            }
            Some(lost @ Trouble::Lost { .. }) => {
                // The loss of a node ends its ranks, and then the ranks connected to them.
                let own = own.map(|own| format!("; here, {own}")).unwrap_or_default();
                return Err(Error::os("launch", format!("{lost}{own}")).into());
            }
        };
        Ok(Attempt { failure, signal: signal.or(caught).or(late), exits })
    }

    fn spawn(&self, environment: &RankEnvironment, mut command: Command) -> Result<Child> {
        command.envs(environment.variables());
        let is_set =
            command.get_envs().any(|(name, _)| name == THREADS) || std::env::var_os(THREADS).is_some();
        if self.ranks_per_node > 1 && !is_set {
            command.env(THREADS, "1");
        }
        if self.groups {
            command.process_group(0);
            default_interrupts(&mut command);
        }
        if self.relay {
            let reads = environment.local_rank == 0 && !std::io::IsTerminal::is_terminal(&std::io::stdin());
            command.stdin(if reads { Stdio::inherit() } else { Stdio::null() });
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        die_with_parent(&mut command);
        command.spawn().map_err(|error| {
            let program = Path::new(command.get_program()).display();
            Error::os("spawn", format!("rank {}, {program}: {error}", environment.rank())).with_errno(&error)
        })
    }

    /// The log file of one of a rank's streams.
    fn log(&self, environment: &RankEnvironment, name: &str) -> Result<Option<File>> {
        let Some(directory) = &self.log_dir else { return Ok(None) };
        let directory =
            directory.join(format!("attempt_{}", environment.restarts)).join(environment.rank().to_string());
        let path = directory.join(format!("{name}.log"));
        // Each folder, because its owner can replace its contents.
        let mut folders = directory.ancestors().take(3).collect::<Vec<_>>().into_iter().rev();
        let file = folders.try_for_each(own_file::create_folder).and_then(|()| own_file::create(&path));
        file.map(Some).map_err(|error| {
            Error::os("open", format!("{}: {error}; name a writable log directory", path.display()))
                .with_errno(&error)
        })
    }

    /// Waits until all ranks have ended. Ends them on a signal, and once one has failed unless
    /// survivors are kept.
    fn watch(
        &self,
        ranks: &mut Watched,
        mut early: Vec<i32>,
        mut signals: Option<&mut Signals>,
        asks: Option<Duration>,
        mut report: impl FnMut(Trouble),
        elsewhere: impl Fn() -> Result<bool>,
    ) -> Result<(Option<FirstFailure>, Option<i32>)> {
        let mut failure: Option<FirstFailure> = None;
        let (mut ended_by, mut ended_elsewhere) = (None, false);
        let mut phase = Phase::Running;
        while ranks.running() > 0 {
            let timeout = [phase.left(), asks].into_iter().flatten().min();
            if early.is_empty() {
                ranks.wait(signals.as_deref(), timeout)?;
            }
            early.extend(signals.as_deref_mut().map(Signals::take).unwrap_or_default());
            for signal in std::mem::take(&mut early) {
                tracing::info!(signal, "caught a signal");
                if !ends(signal) {
                    ranks.pass(signal);
                } else if ended_by.is_none() {
                    ended_by = Some(signal);
                    ranks.signal(signal);
                    report(Trouble::Signal(signal));
                    phase = Phase::Ending(deadline(self.grace));
                } else if hurries(signal) && !matches!(phase, Phase::Killed(_)) {
                    ended_by = Some(signal);
                    ranks.signal(libc::SIGKILL);
                    phase = Phase::Killed(deadline(self.kill_timeout));
                }
            }
            let failed = ranks.try_wait()?;
            if failed.is_some() && self.keep_survivors {
                // None is reaped yet, so the groups are still theirs.
                ranks.sweep_failed();
            }
            if let Some(first) = failed
                && failure.is_none()
                && ended_by.is_none()
                && !ended_elsewhere
            {
                tracing::info!(rank = first.rank, "{}", first.exit);
                if !self.keep_survivors {
                    report(Trouble::Rank(first.clone()));
                    phase = Phase::Settling(deadline(self.settle));
                }
                failure = Some(first);
            }
            if matches!(phase, Phase::Running) && elsewhere()? {
                ended_elsewhere = true;
                phase = Phase::Settling(deadline(self.settle));
            }
            phase = match phase {
                Phase::Settling(end) if Instant::now() >= end => {
                    ranks.signal(libc::SIGTERM);
                    // A stopped process handles SIGTERM only once it continues.
                    ranks.signal(libc::SIGCONT);
                    Phase::Ending(deadline(self.grace))
                }
                Phase::Ending(end) if Instant::now() >= end => {
                    ranks.signal(libc::SIGKILL);
                    Phase::Killed(deadline(self.kill_timeout))
                }
                Phase::Killed(end) if Instant::now() >= end && ranks.running() > 0 => {
                    let reason =
                        format!("{:?} after SIGKILL there is still: {}", self.kill_timeout, ranks.give_up());
                    return Err(Error::os("kill", reason));
                }
                phase => phase,
            };
        }
        if failure.is_some() || ended_by.is_some() || ended_elsewhere {
            // Processes that the ranks have started end with them. None is reaped yet, so the
            // groups are still theirs.
            ranks.sweep();
        }
        Ok((failure, ended_by))
    }
}

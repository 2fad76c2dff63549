//! `epoxide nccl-check`: the communicator on the GPUs of this machine.
//!
//! Ranks are processes, one a GPU. They run in three stages. The first checks operations while all
//! ranks live. The others kill a rank: once over the transports that NCCL chooses, and once over
//! sockets, because sockets report a death to NCCL. Ranks write each stage's outcomes to a store,
//! and rank 0 reads and prints them: no report relies on the checked library.

mod oracle;
mod rank;
mod stages;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use epoxide::group::FileStore;
use epoxide_launch::current_exe;
use epoxide_launch::{Process, RankExit, default_sigchld, die_with_parent};
use epoxide_nccl::{Config, DEBUG_INFO_FILE, Library};
use rustix::process::{Pid, Signal, getpid, kill_process};

use self::rank::{Act, Rank};
use crate::error::{CommandError, FAILED, Result};
use crate::options::DeviceKind;
use crate::output;
use crate::ranks::{cuda_devices, open_device};

/// Seconds of a day, more than any operation takes. Sums of such times do not overflow a clock.
const DAY: u64 = 24 * 3600;

/// Options of `epoxide nccl-check`.
#[derive(Debug, Clone, clap::Args)]
#[command(
    after_help = "Prints a line for each stage, with what was checked and how long it took on the slowest rank, and PASS at the end. \
                  Exit code 77 where there is no NCCL, or there are too few GPUs."
)]
pub struct Args {
    /// Ranks, one a GPU [default: as many as there are GPUs, up to 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=64))]
    ranks: Option<u32>,

    /// The file of libnccl [default: the one that `epoxide doctor` finds]
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,

    /// Seconds until a stage that is meant to hang is given up, at most a day
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=DAY))]
    deadline: u64,

    /// Seconds that anything else may take, at most a day
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=DAY))]
    timeout: u64,

    /// This process is a rank: a flag for the command's own processes
    #[arg(long, hide = true, value_name = "ACT:RANK:SIZE:FOLDER")]
    rank: Option<RankOf>,
}

/// The rank of a process.
#[derive(Debug, Clone)]
struct RankOf {
    act: Act,
    rank: u32,
    size: u32,
    folder: PathBuf,
}

impl std::str::FromStr for RankOf {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<RankOf, String> {
        let parts: Vec<&str> = text.splitn(4, ':').collect();
        let &[act, rank, size, folder] = &parts[..] else { return Err("is ACT:RANK:SIZE:FOLDER".into()) };
        let number = |text: &str| text.parse().map_err(|error| format!("{text}: {error}"));
        let act = Act::ALL.into_iter().find(|known| known.name() == act).ok_or("no such act")?;
        Ok(RankOf { act, rank: number(rank)?, size: number(size)?, folder: folder.into() })
    }
}

/// Runs the command, or one of its ranks.
pub fn run(args: &Args) -> Result<()> {
    match &args.rank {
        Some(rank) => run_rank(args, rank),
        None => run_all(args),
    }
}

fn library(args: &Args) -> Result<Arc<Library>> {
    Ok(match &args.library {
        Some(file) => Library::open(file)?,
        None => Library::find()?,
    })
}

fn run_all(args: &Args) -> Result<()> {
    let library = library(args)?;
    let have = cuda_devices()?;
    let size = args.ranks.unwrap_or(have.min(4));
    if have < size || size < 2 {
        return Err(CommandError::skipped(format!(
            "{} ranks need as many GPUs, this machine has {have}",
            size.max(2)
        )));
    }
    let version = library.version_text();
    default_sigchld()?;
    output::text_line(&format!("NCCL {version} of {}, {size} ranks", library.path().display()))?;
    for act in Act::ALL {
        let folder = tempfile::tempdir()
            .map_err(|error| CommandError::failed(format!("a folder for the store: {error}")))?;
        let mut ranks = Ranks::start(args, act, size, folder.path())?;
        // Each stage has its own deadlines; this one ends a rank that exceeds them.
        ranks.finish(act, Instant::now() + Duration::from_secs(args.timeout * 4 + args.deadline * 20))?;
    }
    output::text_line("PASS")?;
    Ok(())
}

/// The processes of an act; killed on drop.
struct Ranks(Vec<Process>);

impl Ranks {
    fn start(args: &Args, act: Act, size: u32, folder: &Path) -> Result<Ranks> {
        let mut ranks = Ranks(Vec::new());
        for rank in 0..size {
            let mut command = current_exe()?;
            die_with_parent(&mut command);
            let place = format!("{}:{rank}:{size}:{}", act.name(), folder.display());
            command.args(["nccl-check", "--rank", &place]);
            command.args(["--deadline", &args.deadline.to_string(), "--timeout", &args.timeout.to_string()]);
            if let Some(file) = &args.library {
                command.arg("--library").arg(file);
            }
            command.env(DEBUG_INFO_FILE, folder.join("debug_info_"));
            command.envs(act.variables().iter().copied());
            let started =
                command.spawn().map_err(|error| CommandError::failed(format!("rank {rank}: {error}")))?;
            ranks.0.push(Process::new(rank, 0, started));
        }
        Ok(ranks)
    }

    /// Waits for all of them; each must end as it is meant to.
    fn finish(&mut self, act: Act, until: Instant) -> Result<()> {
        let last = self.0.len() - 1;
        let mut open: Vec<usize> = (0..self.0.len()).collect();
        while let Some(&first) = open.first() {
            for index in open.clone() {
                let Some(exit) = self.0[index].try_wait()? else { continue };
                open.retain(|other| *other != index);
                let killed = index == last && act != Act::Together;
                if !as_meant(exit, killed) {
                    // The rank, or rank 0, has printed the reason.
                    return Err(CommandError::failed(format!("{}: rank {index} {exit}", act.name())));
                }
            }
            if Instant::now() > until {
                let text =
                    format!("{}: rank {first} has not ended in time; all ranks are killed", act.name());
                return Err(CommandError::failed(text));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

fn as_meant(exit: RankExit, killed: bool) -> bool {
    if killed { exit == RankExit::Signal(Signal::KILL.as_raw()) } else { exit.success() }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        // All at once: the drop of each process waits until it has ended, at most 10 s.
        for rank in self.0.iter().filter(|rank| rank.exit().is_none()) {
            if let Some(pid) = Pid::from_raw(rank.id() as i32) {
                // Killing an ended process fails, which is fine.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

/// How long a rank waits for the others. One of them may be in a stage that hangs until the deadline
/// and then closes its communicator.
fn timeout_of_rank(args: &Args) -> Duration {
    Duration::from_secs(args.timeout + args.deadline) + Config::default().close_timeout
}

fn run_rank(args: &Args, place: &RankOf) -> Result<()> {
    let rank = Rank {
        rank: place.rank,
        size: place.size,
        act: place.act,
        store: Arc::new(FileStore::new(&place.folder)?),
        library: library(args)?,
        device: open_device(DeviceKind::Cuda, place.rank)?,
        deadline: Duration::from_secs(args.deadline),
        timeout: timeout_of_rank(args),
        die: || {
            // No process waits for a report.
            let _ = kill_process(getpid(), Signal::KILL);
        },
    };
    // NCCL may still have threads in abandoned calls, which must not keep the process alive.
    let outcome = stages::run(&rank, &place.folder);
    if let Err(error) = &outcome
        && error.code == FAILED
    {
        return Err(error.clone().on_rank(place.rank));
    }
    outcome
}

#[cfg(test)]
mod tests;

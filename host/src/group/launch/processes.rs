//! Ranks that are processes of this host, without the rules of torchrun.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::child::die_with_parent;
use super::exit::RankExits;
use super::phase::Phase;
use super::store_directory::StoreDirectory;
use super::watched::{Process, Watched};
use crate::error::{Error, Result};
use crate::group::env::{LOCAL_RANK, LOCAL_WORLD_SIZE, RANK, STORE, WORLD_SIZE};
use crate::group::{FileStore, JobSecret};

/// How long a rank that was asked to end (SIGTERM) may take before it is killed.
const TERMINATION: Duration = Duration::from_secs(1);

/// Starts `size` ranks as processes and waits until all have ended.
///
/// `command` makes each rank's command line; [`RANK`], [`WORLD_SIZE`], [`LOCAL_RANK`], [`LOCAL_WORLD_SIZE`] and
/// [`STORE`] are added to its environment, so that the rank can call [`rendezvous`](crate::group::rendezvous), and a
/// [`JobSecret`], which is new unless this process's environment has one. The store is a fresh directory, removed at the end.
///
/// When a rank fails, the store is given up, so that the others fail at their next call of the group; those still
/// running after `grace` are sent SIGTERM, and a second later SIGKILL. All processes are waited for in every case,
/// and the kernel kills them if the thread that called this dies.
pub fn spawn_ranks(
    size: u32,
    grace: Duration,
    command: impl Fn(u32) -> Result<Command>,
) -> Result<RankExits> {
    if size == 0 {
        return Err(Error::argument("size", size, "a group has at least one rank"));
    }
    let directory = StoreDirectory::create()?;
    let store = FileStore::new(&directory.path)?;
    let secret = JobSecret::from_env()?.map_or_else(JobSecret::generate, Ok)?;
    let mut ranks = Watched::default();
    for rank in 0..size {
        let mut command = command(rank)?;
        command
            .env(RANK, rank.to_string())
            .env(WORLD_SIZE, size.to_string())
            .env(LOCAL_RANK, rank.to_string())
            .env(LOCAL_WORLD_SIZE, size.to_string())
            .env(STORE, format!("file://{}", directory.path.display()));
        secret.give_to(&mut command);
        die_with_parent(&mut command);
        match command.spawn() {
            Ok(child) => ranks.0.push(Process::new(rank, 0, child, false)),
            Err(error) => {
                let program = Path::new(command.get_program()).display();
                return Err(Error::os("spawn", format!("rank {rank}, {program}: {error}")));
            }
        }
    }

    let mut first_failure = None;
    let mut phase = Phase::Running;
    while ranks.running() > 0 {
        ranks.wait(None, phase.left())?;
        if let Some(failure) = ranks.look()? {
            tracing::error!(rank = failure.rank, "{}", failure.exit);
            if first_failure.is_none() {
                store.poison(&format!("rank {} {}", failure.rank, failure.exit))?;
                first_failure = Some(failure.rank);
                phase = Phase::Settling(Instant::now() + grace);
            }
        }
        phase = match phase {
            Phase::Settling(end) if Instant::now() >= end => {
                ranks.signal(libc::SIGTERM);
                Phase::Ending(Instant::now() + TERMINATION)
            }
            Phase::Ending(end) if Instant::now() >= end => {
                ranks.signal(libc::SIGKILL);
                Phase::Killed
            }
            phase => phase,
        };
    }
    Ok(RankExits { exits: ranks.exits(), first_failure })
}

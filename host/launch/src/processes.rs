//! Ranks that are processes of this host, without the rules of torchrun.

use std::process::Command;
use std::time::Duration;

use super::exit::RankExits;
use super::plan::Launch;
use crate::error::{Error, Result};

/// How long a rank may take to end after SIGTERM before it is killed.
const TERMINATION: Duration = Duration::from_secs(1);

/// Starts `size` ranks as processes and waits until all have ended.
///
/// `command` makes each rank's command line. Its environment gets [`RANK`](crate::group::RANK),
/// [`WORLD_SIZE`](crate::group::WORLD_SIZE), [`LOCAL_RANK`](crate::group::LOCAL_RANK),
/// [`LOCAL_WORLD_SIZE`](crate::group::LOCAL_WORLD_SIZE), [`STORE`](crate::group::STORE) and
/// torchrun's other variables, so that the rank can call [`rendezvous`](crate::group::rendezvous).
/// It also gets a [`JobSecret`](crate::group::JobSecret), which is new unless this process's
/// environment has one. The store is a fresh directory, removed at the end. If this process is
/// killed, the next one removes it.
///
/// When a rank fails, the store is poisoned, so that the others fail at their next call of the
/// group. Ranks still running after `grace` are sent SIGTERM, and a second later SIGKILL. All
/// processes are waited for in every case, and the kernel kills them if the calling thread dies.
/// The caller handles signals: ranks share its process group, so a terminal's Ctrl-C reaches them
/// too.
///
/// # Errors
/// `size` is 0, a rank cannot be started, or one does not end within 10 s of SIGKILL, as in a
/// driver call that does not return.
pub fn spawn_ranks(
    size: u32,
    grace: Duration,
    command: impl Fn(u32) -> Result<Command>,
) -> Result<RankExits> {
    if size == 0 {
        return Err(Error::argument("size", size, "a group has at least one rank"));
    }
    let launch =
        Launch { settle: grace, grace: TERMINATION, groups: false, relay: false, ..Launch::new(size) };
    let ended = launch.run(None, |environment| command(environment.rank()))?;
    Ok(RankExits { exits: ended.exits, first_failure: ended.failure.map(|failure| failure.rank) })
}

//! Joining the group that the environment, or an address, names.
//!
//! First a rank gets its identity ([`Member`]), then the meeting place ([`Site`]), and then the
//! ranks [`Rendezvous`].

mod again;
mod member;
mod site;
mod slurm;
mod unique_id;

use std::sync::Arc;
use std::time::Duration;

pub use member::Member;
use site::Site;
pub use site::{fuzz_addresses, sample_addresses};
pub use unique_id::UniqueId;

use super::env::{Lookup, environment};
use super::mesh_group::Connect;
use super::{
    ConnectionLimits, FileStore, JobSecret, MeshGroup, MeshOptions, PrefixStore, Store, TcpStore,
    TcpStoreOptions,
};
use crate::error::{Error, Result};
use crate::foreign::escaped;

/// How long rank 0, when it is done, stays with its server for the others.
const LINGER: Duration = Duration::from_secs(10);
/// The prefix of epoxide's keys in a store that others may use as well.
const PREFIX: &str = "epoxide";
/// The key of the number of ranks.
const SIZE_KEY: &str = "world_size";

/// Joins the group that the environment names; see [`Rendezvous::from_env`]. Collectives wait up to
/// `timeout`.
///
/// A program of one rank, which `epoxide launch --nproc-per-node 8 -- ./program`, torchrun, mpirun
/// or srun starts as many times as there are ranks:
///
/// ```no_run
/// use std::time::Duration;
///
/// use epoxide_group::{Collectives, ProcessGroup, rendezvous};
///
/// fn main() -> epoxide_group::Result<()> {
///     let group = rendezvous(Duration::from_secs(60))?;
///     let ranks: Vec<Vec<u32>> = group.all_gather_slices(&[group.rank()])?;
///     assert_eq!(ranks.len(), group.size() as usize);
///     // .. `Buffer::new` of `epoxide` takes `&group`, as it takes one of threads.
///     Ok(())
/// }
/// ```
///
/// # Errors
/// Those of [`Rendezvous::from_env`] and [`Rendezvous::group`].
pub fn rendezvous(timeout: Duration) -> Result<MeshGroup> {
    Rendezvous::from_env(timeout)?.group("world", timeout)
}

/// A rank with an identity and a connection to the store, from which process groups are made.
///
/// With an address from the program in place of the environment; here two ranks meet in a
/// directory, as processes do:
///
/// ```
/// use std::time::Duration;
///
/// use epoxide_group::{ProcessGroup, Rendezvous};
///
/// let directory = std::env::temp_dir().join(format!("run-{}", std::process::id()));
/// let timeout = Duration::from_secs(60);
/// let join = |rank: u32| -> epoxide_group::Result<u32> {
///     let address = format!("file://{}?rank={rank}&world_size=2", directory.display());
///     let rendezvous = Rendezvous::at(&address, timeout)?;
///     let group = rendezvous.group("world", timeout)?;
///     group.barrier(timeout)?;
///     Ok(group.size())
/// };
/// std::thread::scope(|scope| {
///     let other = scope.spawn(|| join(1));
///     assert_eq!(join(0)?, 2);
///     other.join().expect("no panic").map(drop)
/// })?;
/// # std::fs::remove_dir_all(&directory).unwrap();
/// # Ok::<(), epoxide_group::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Rendezvous {
    /// This rank.
    pub member: Member,
    /// Where the ranks meet. Keys of other programs on the same server cannot collide with these.
    pub store: Arc<dyn Store>,
    /// Limits on connections of the groups made here.
    pub limits: ConnectionLimits,
    /// The secret of the job, if it has one: the store and the groups require it.
    secret: Option<JobSecret>,
}

impl Rendezvous {
    /// Joins at the place that the environment names (`env://`).
    ///
    /// The launcher's variables give this rank's number: see [`Member::detect`]. The first of these
    /// names the place where the ranks meet:
    /// - `EPOXIDE_STORE`, a `file://` directory or the `tcp://` address of a server that runs
    ///   already;
    /// - `MASTER_ADDR` and `MASTER_PORT`: rank 0 serves the store there; with
    ///   `TORCHELASTIC_USE_AGENT_STORE=True`, as torchrun sets it, torchrun itself does;
    /// - Open MPI's variables for the job's directory, if all ranks are on one host;
    /// - Slurm's list of hosts: rank 0 serves the store on the first, at a port that follows from
    ///   the job's number.
    ///
    /// If the environment has a job's secret ([`JobSecret::from_env`]), a store that a rank serves
    /// and the groups admit only processes that prove it. torchrun's own store is PyTorch's, which
    /// supports no secret.
    ///
    /// Waits up to `timeout` for the store.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) where a variable is missing or malformed,
    /// [`Error::Store`](crate::Error::Store) where the store is not reached in time.
    pub fn from_env(timeout: Duration) -> Result<Rendezvous> {
        Rendezvous::at("env://", timeout)
    }

    /// Meets at an address: `env://` (see [`Rendezvous::from_env`]),
    /// `tcp://host:port?rank=R&world_size=N`, where rank 0 is the server, or
    /// `file:///directory?rank=R&world_size=N`. Rank and size default to those of the environment.
    ///
    /// # Errors
    /// As of [`Rendezvous::from_env`]; also [`Error::Argument`](crate::Error::Argument) where the
    /// address is malformed.
    pub fn at(address: &str, timeout: Duration) -> Result<Rendezvous> {
        Rendezvous::at_with(address, timeout, JobSecret::from_env()?, ConnectionLimits::default())
    }

    /// Like [`Rendezvous::at`], with this secret, or none, regardless of the environment. The
    /// limits bound the resources that connections take of this process. They apply to the store,
    /// if this rank serves it, and to the groups made here.
    ///
    /// # Errors
    /// The same as [`Rendezvous::at`].
    pub fn at_with(
        address: &str,
        timeout: Duration,
        secret: Option<JobSecret>,
        limits: ConnectionLimits,
    ) -> Result<Rendezvous> {
        Rendezvous::looking_up(address, timeout, limits, secret, &environment)
    }

    fn looking_up(
        address: &str,
        timeout: Duration,
        limits: ConnectionLimits,
        secret: Option<JobSecret>,
        variable: Lookup<'_>,
    ) -> Result<Rendezvous> {
        let (member, site) = if address == "env://" {
            let member = Member::required(variable)?;
            let site = Site::from_variables(&member, variable)?;
            (member, site)
        } else {
            Site::from_address(address, variable)?
        };
        let store = open(&site, &member, timeout, &limits, secret.as_ref(), variable)?;
        agree_on_size(&*store, &member)?;
        Ok(Rendezvous { member, store, limits, secret })
    }

    /// A group of the ranks that met. Collectives wait up to `timeout`. Fails when another rank has
    /// joined with the same number and `name`.
    ///
    /// # Errors
    /// [`Error::Group`](crate::Error::Group) or [`Error::Store`](crate::Error::Store) where a rank
    /// does not join in time, or another one has joined under its number.
    pub fn group(&self, name: &str, timeout: Duration) -> Result<MeshGroup> {
        // At once, since the store's host may leave first.
        let (connect, limits, secret) = (Connect::Eager, self.limits.clone(), self.secret.clone());
        let options = MeshOptions { timeout, connect, limits, secret, ..MeshOptions::default() };
        MeshGroup::with_secret(self.store.clone(), self.member.rank, self.member.size, name, options)
    }
}

fn open(
    site: &Site,
    member: &Member,
    timeout: Duration,
    limits: &ConnectionLimits,
    secret: Option<&JobSecret>,
    variable: Lookup<'_>,
) -> Result<Arc<dyn Store>> {
    // torchrun's own store outlives a start of the ranks.
    let run = variable("TORCHELASTIC_RUN_ID").map_or(String::new(), |run| {
        let restarts = variable("TORCHELASTIC_RESTART_COUNT");
        format!("/{run}/{}", restarts.as_deref().unwrap_or("0"))
    });
    let start = format!("{PREFIX}{run}");
    let options = TcpStoreOptions {
        secret: secret.cloned(),
        linger: LINGER.min(timeout),
        limits: limits.clone(),
        ..TcpStoreOptions::new(timeout)
    };
    let of_run = || TcpStoreOptions { run, ..options.clone() };
    let store = match site {
        Site::Directory(path) => return Ok(Arc::new(FileStore::new(path)?)),
        // PyTorch's, which supports no secret. The groups over it still require one.
        Site::Agent { host, port } => TcpStore::connect_with(host, *port, &TcpStoreOptions::new(timeout))?,
        Site::Rank0 { host, port } if member.rank == 0 => TcpStore::host_at(host, *port, &of_run())?,
        Site::Rank0 { host, port } => return again::connect(host, *port, member, start, &of_run()),
        Site::Server { host, port } => TcpStore::connect_with(host, *port, &options)?,
    };
    // A server of PyTorch may wait for as many to join.
    store.join()?;
    Ok(Arc::new(PrefixStore::new(start, Arc::new(store))))
}

/// The first rank stores the number of ranks; the others compare.
fn agree_on_size(store: &dyn Store, member: &Member) -> Result<()> {
    let ours = member.size.to_string();
    let theirs = store.compare_set(SIZE_KEY, b"", ours.as_bytes())?;
    if theirs == ours.as_bytes() {
        return Ok(());
    }
    let rule = format!(
        "the rank that came first says {}; all ranks need the same, and a store of their own for each run",
        escaped(&theirs)
    );
    Err(Error::argument(member.size_name, ours, rule))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::HeldPort;
    use crate::{ProcessGroup, RANK, STORE, WORLD_SIZE};

    const TIMEOUT: Duration = Duration::from_secs(120);

    fn meet(address: &str, variables: &[(&str, &str)]) -> Result<Rendezvous> {
        let lookup =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Rendezvous::looking_up(address, TIMEOUT, ConnectionLimits::default(), None, &lookup)
    }

    #[test]
    fn through_a_directory() {
        let directory = tempfile::tempdir().unwrap();
        let store = format!("file://{}", directory.path().display());
        let variables = [(RANK, "0"), (WORLD_SIZE, "1"), (STORE, &*store)];
        let group = meet("env://", &variables).unwrap().group("world", TIMEOUT).unwrap();
        assert_eq!((group.rank(), group.size()), (0, 1));
        let error = meet("env://", &variables).unwrap().group("world", TIMEOUT).unwrap_err();
        assert!(error.to_string().contains("rank 0 is taken"), "joins twice: {error}");
        let error = meet(&format!("{store}?rank=1&world_size=2"), &[]).unwrap_err();
        assert!(error.to_string().starts_with("world_size = 2: the rank that came first says 1"), "{error}");
    }

    /// Rank 0's server stays for the late rank, and rank 1 meets again meanwhile.
    #[test]
    fn ranks_meet_twice_at_one_port() {
        let held = HeldPort::any().unwrap();
        std::thread::scope(|scope| {
            for rank in 0..3u8 {
                let address = format!("tcp://127.0.0.1:{}?rank={rank}&world_size=3", held.number());
                scope.spawn(move || {
                    for _ in 0..2 {
                        let meeting = meet(&address, &[]).unwrap();
                        let group = meeting.group("world", TIMEOUT).unwrap();
                        assert_eq!(group.all_gather(&[rank]).unwrap(), [[0], [1], [2]]);
                        group.destroy().unwrap();
                        if rank == 2 {
                            std::thread::sleep(Duration::from_millis(300));
                        }
                    }
                });
            }
        });
    }

    /// In a process of its own, since tests share the environment.
    #[test]
    fn no_secret_means_none_whatever_the_environment_has() {
        const DIRECTORY: &str = "EPOXIDE_TEST_DIRECTORY";
        let Ok(directory) = std::env::var(DIRECTORY) else {
            let directory = tempfile::tempdir().unwrap();
            let name = "rendezvous::tests::no_secret_means_none_whatever_the_environment_has";
            let output = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", name, "--nocapture"])
                .env(DIRECTORY, directory.path())
                .env("EPOXIDE_JOB_SECRET", "s".repeat(32))
                .output()
                .unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            return;
        };
        let secret = JobSecret::from_env().unwrap();
        assert!(secret.is_some());
        for (name, secret) in [("without", None), ("with", secret)] {
            let place = format!("file://{directory}/{name}?rank=0&world_size=1");
            let limits = ConnectionLimits::default();
            let meeting = Rendezvous::at_with(&place, TIMEOUT, secret.clone(), limits).unwrap();
            let group = meeting.group("world", TIMEOUT).unwrap();
            assert_eq!(group.job_secret().unwrap().is_some(), secret.is_some());
        }
    }

    #[test]
    fn rank_0_serves() {
        let held = HeldPort::any().unwrap();
        let port = held.number().to_string();
        let meetings = std::thread::scope(|scope| {
            let ranks: Vec<_> = ["0", "1", "2"]
                .map(|rank| {
                    let port = &*port;
                    scope.spawn(move || {
                        let place = [("MASTER_ADDR", "localhost"), ("MASTER_PORT", port)];
                        let meeting = match rank {
                            "2" => meet(&format!("tcp://127.0.0.1:{port}?world_size=3&rank=2"), &[]),
                            _ => meet("env://", &[place[0], place[1], (RANK, rank), (WORLD_SIZE, "3")]),
                        }
                        .unwrap();
                        let group = meeting.group("world", TIMEOUT).unwrap();
                        assert_eq!(group.all_gather(rank.as_bytes()).unwrap(), [b"0", b"1", b"2"]);
                        meeting
                    })
                })
                .into_iter()
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        });
        let place = [("MASTER_ADDR", "localhost"), ("MASTER_PORT", &*port)];
        let error = meet("env://", &[place[0], place[1], (RANK, "1"), (WORLD_SIZE, "2")]).unwrap_err();
        assert!(error.to_string().starts_with("WORLD_SIZE = 2: "), "{error}");
        let error = meet("env://", &[place[0], place[1], (RANK, "0"), (WORLD_SIZE, "3")]).unwrap_err();
        assert!(error.to_string().contains("in use"), "two ranks 0: {error}");
        let twice = meet("env://", &[place[0], place[1], (RANK, "1"), (WORLD_SIZE, "3")]).unwrap();
        let error = twice.group("world", TIMEOUT).unwrap_err();
        assert!(error.to_string().contains("rank 1 is taken"), "{error}");
        drop(twice);
        // Rank 0 last: it would wait for the others, which this thread has as well.
        meetings.into_iter().rev().for_each(drop);
    }
}

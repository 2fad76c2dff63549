//! The process group over the mesh.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use super::call::{Call, CallResult, Operation};
use super::collectives::within;
use super::env::{MAX_RANKS, too_many_ranks};
use super::mesh::{Directory, Engine, Listener, Signature, Sockets, Wake, address_key};
use super::recorder::{Entry, Recorder, Writer};
use super::store::store_error;
use super::turns::Core;
use super::work::Work;
use super::{ConnectionLimits, JobSecret, ProcessGroup, Store, fds};
use crate::error::{Error, Result};
use epoxide_base::meeting::meet;

/// When the ranks of a [`MeshGroup`] connect to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Connect {
    /// At their first message. Joining does not wait for the others, but the store must exist until
    /// then.
    #[default]
    Lazy,
    /// All of them while joining, which waits for the others; nothing needs the store from then on.
    Eager,
}

/// How a [`MeshGroup`] works.
#[derive(Clone)]
pub struct MeshOptions {
    /// How long an operation waits for the other ranks, unless it is given a timeout of its own.
    pub timeout: Duration,
    /// When the ranks connect.
    pub connect: Connect,
    /// Over what they connect.
    pub sockets: Sockets,
    /// Network interface, or its address, that other hosts reach this rank by. Default: the
    /// environment's [`SOCKET_IFNAME`](super::SOCKET_IFNAME), else the interface of the default
    /// route.
    pub interface: Option<String>,
    /// The secret of the members: a connection is accepted only with a proof of it. Default: the
    /// environment's ([`JobSecret::from_env`]). Without that, a token in the store replaces it, so
    /// any process that may read the store is admitted.
    pub secret: Option<JobSecret>,
    /// The purpose of the group, for people to read.
    pub description: String,
    /// Limits on connections to the group's sockets.
    pub limits: ConnectionLimits,
    /// How many operations the flight recorder keeps.
    pub recorded: usize,
    /// Gets the flight recorder's dumps, in addition to the file of
    /// [`FLIGHT_RECORDER`](super::FLIGHT_RECORDER).
    pub recorder: Option<Writer>,
}

impl Default for MeshOptions {
    /// 5 minutes, lazy, Unix sockets where possible, the default limits, 1024 operations recorded.
    fn default() -> MeshOptions {
        MeshOptions {
            timeout: Duration::from_secs(300),
            connect: Connect::Lazy,
            sockets: Sockets::Auto,
            interface: None,
            secret: None,
            description: String::new(),
            limits: ConnectionLimits::default(),
            recorded: 1024,
            recorder: None,
        }
    }
}

impl MeshOptions {
    /// The sockets of a member of a group of `size` ranks; those of other hosts reach it with
    /// `network`.
    pub(super) fn listen(&self, size: u32, network: bool) -> Result<Listener> {
        Listener::open(size, self.sockets, self.interface.as_deref(), self.secret.clone(), network)
    }
}

impl std::fmt::Debug for MeshOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MeshOptions")
            .field("timeout", &self.timeout)
            .field("connect", &self.connect)
            .field("sockets", &self.sockets)
            .field("interface", &self.interface)
            .field("secret", &self.secret)
            .finish_non_exhaustive()
    }
}

/// A [`ProcessGroup`] whose ranks exchange messages directly: over Unix sockets on one host, over
/// TCP between hosts.
///
/// An error of an operation ends the group on this rank and, through it, on all others. Each
/// reports the rank that failed, and the operation. Then call [`MeshGroup::shrink_group`], or drop
/// the group. Wrong arguments do not end the group.
///
/// Operations run one at a time, in the order of the calls, on this rank. Background operations
/// (see [`ProcessGroup::start`]) run on one thread that the first of them starts. A dropped group
/// informs the others that this rank left; [`ProcessGroup::destroy`] waits for them first.
#[derive(Debug)]
pub struct MeshGroup {
    pub(super) core: Arc<Core>,
    pub(super) options: MeshOptions,
    /// Ranks of the first group, by rank of this one.
    pub(super) members: Vec<u32>,
    pub(super) store: Arc<dyn Store>,
    /// Groups made from this one so far. An error may leave ranks with different numbers.
    pub(super) children: AtomicU64,
    /// Calls of `shrink_group` so far; the same on every survivor.
    pub(super) shrunk: AtomicU64,
    /// All members are known to be on one host.
    shares_host: bool,
}

impl MeshGroup {
    /// Joins the group `name` as `rank` of `size`, whose members find each other through `store`.
    ///
    /// # Errors
    /// The rank is taken, or a network interface does not exist. With [`Connect::Eager`] also: a
    /// rank does not join within the timeout, or joins with another size of the group.
    pub fn new(
        store: Arc<dyn Store>,
        rank: u32,
        size: u32,
        name: &str,
        mut options: MeshOptions,
    ) -> Result<MeshGroup> {
        if options.secret.is_none() {
            options.secret = JobSecret::from_env()?;
        }
        MeshGroup::with_secret(store, rank, size, name, options)
    }

    /// Like [`MeshGroup::new`], with the secret of `options`, or none, regardless of the
    /// environment.
    pub(super) fn with_secret(
        store: Arc<dyn Store>,
        rank: u32,
        size: u32,
        name: &str,
        options: MeshOptions,
    ) -> Result<MeshGroup> {
        if size > MAX_RANKS {
            return Err(Error::argument("size", size, too_many_ranks()));
        }
        MeshGroup::join(store, rank, name, (0..size).collect(), options)
    }

    pub(super) fn join(
        store: Arc<dyn Store>,
        rank: u32,
        name: &str,
        members: Vec<u32>,
        options: MeshOptions,
    ) -> Result<MeshGroup> {
        let size = members.len() as u32;
        if rank >= size {
            return Err(Error::argument("rank", rank, format!("ranks of a group of {size} are 0..{size}")));
        }
        let key = format!("{name}/join/{rank}");
        if store.add(&key, 1)? != 1 {
            let reason = format!(
                "rank {rank} is taken: two ranks have the same number, or the store is left from an earlier run; \
                 use a fresh store or another group name"
            );
            return Err(store_error("join", &key, reason));
        }
        // Ranks that connect while they join read each other's hosts first; others must accept
        // connections from any host.
        let network = options.connect == Connect::Lazy;
        let listener = options.listen(size, network)?;
        let address =
            serde_json::to_vec(&listener.address).map_err(|error| Error::internal("serialise", error))?;
        store.set(&address_key(name, rank), &address)?;
        MeshGroup::assemble(listener, Directory::Store, store, rank, name, members, options)
    }

    pub(super) fn assemble(
        listener: Listener,
        directory: Directory,
        store: Arc<dyn Store>,
        rank: u32,
        name: &str,
        members: Vec<u32>,
        options: MeshOptions,
    ) -> Result<MeshGroup> {
        let wake = Arc::new(Wake::new()?);
        // A rank that connects authenticates at once, or in its next operation.
        let authentication_timeout = options.limits.authentication_timeout.max(options.timeout);
        let limits = ConnectionLimits { authentication_timeout, ..options.limits.clone() };
        let mut engine = Engine::new(name, rank, listener, directory, store.clone(), wake, &limits)?;
        if options.connect == Connect::Eager
            && let Err(error) = engine.connect_all(options.timeout)
        {
            engine.abort(&error.to_string());
            return Err(error);
        }
        let recorder = Recorder::new(name, rank, engine.size, options.recorded, options.recorder.clone());
        let shares_host = !engine.on_network();
        let core = Arc::new(Core::new(engine, recorder));
        let (children, shrunk) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(MeshGroup { core, options, members, store, children, shrunk, shares_host })
    }

    /// The last operations, oldest first.
    pub(crate) fn flight_record(&self) -> Vec<Entry> {
        self.core.recorder.entries()
    }

    /// The failed ranks after an operation ended with an error: ranks whose connections broke, and
    /// ranks that the error blames. The result may differ between ranks.
    pub fn failed_ranks(&self) -> Vec<u32> {
        self.core.failed_ranks()
    }

    /// The store it was made over.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }
}

impl ProcessGroup for MeshGroup {
    fn rank(&self) -> u32 {
        self.core.rank
    }

    fn size(&self) -> u32 {
        self.core.size
    }

    fn timeout(&self) -> Duration {
        self.options.timeout
    }

    fn barrier(&self, timeout: Duration) -> Result<()> {
        self.call(Call::Barrier, timeout).map(drop)
    }

    fn all_gather(&self, data: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.call(Call::AllGather { data: data.to_owned() }, self.options.timeout)?.parts()
    }

    fn broadcast(&self, root: u32, data: &[u8]) -> Result<Vec<u8>> {
        let data = if root == self.rank() { data.to_owned() } else { Vec::new() };
        self.call(Call::Broadcast { root, data }, self.options.timeout)?.data()
    }

    fn split(&self, color: u64) -> Result<Arc<dyn ProcessGroup>> {
        match self.split_group(Some(color), self.rank() as i64)? {
            Some(group) => Ok(Arc::new(group)),
            None => Err(Error::internal("split", "a rank with a color got no group")),
        }
    }

    fn exchange_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<Vec<Vec<OwnedFd>>> {
        if fds.len() > fds::MAX_FDS {
            let rule =
                format!("at most {} descriptors fit one exchange; call it several times", fds::MAX_FDS);
            return Err(Error::argument("fds", fds.len(), rule));
        }
        let timeout = self.options.timeout;
        // Outlives the operation: where it fails, the others get the reason before this is closed.
        let mut mailbox = None;
        meet();
        let mut all = self.core.run(|engine, recorder| {
            let signature = Signature::new(Operation::ExchangeFds);
            within(engine, recorder, signature, 0, None, timeout, |run| {
                let start = Instant::now();
                let left = || timeout.saturating_sub(start.elapsed());
                let (rank, size) = (run.rank, run.size);
                if size == 1 {
                    return Ok(vec![Vec::new()]);
                }
                let (secret, limits) = (self.options.secret.as_ref(), &self.options.limits);
                let mailbox = mailbox.insert(fds::Mailbox::open(rank, size, limits, secret.cloned())?);
                let addresses = run.all_gather(mailbox.address().to_owned())?;
                let mut asked = start;
                for (peer, address) in (0u32..).zip(&addresses).filter(|(peer, _)| *peer != rank) {
                    let pause = || {
                        mailbox.take(Duration::from_millis(1))?;
                        run.engine.check_awaited(&[], &mut asked)
                    };
                    if let Err(error) = fds::send(address, secret, rank, peer, fds, left(), pause) {
                        // The reason of a rank that has ended says more.
                        run.engine.check_awaited(&[peer], &mut asked)?;
                        let reason = format!("descriptors to rank {peer}: {error}");
                        return Err(run.engine.error(vec![peer], reason));
                    }
                }
                match mailbox.receive(left(), |missing| run.engine.check_awaited(missing, &mut asked))? {
                    fds::Received::All(all) => Ok(all),
                    fds::Received::Missing(ranks) => {
                        run.engine.waiting = ranks;
                        Err(run.engine.timed_out(timeout))
                    }
                }
            })
        })?;
        meet();
        all[self.rank() as usize] = fds::duplicate(fds)?;
        Ok(all)
    }

    fn name(&self) -> &str {
        &self.core.name
    }

    fn backend(&self) -> &'static str {
        "mesh"
    }

    fn description(&self) -> &str {
        &self.options.description
    }

    fn job_secret(&self) -> Result<Option<JobSecret>> {
        Ok(self.options.secret.clone())
    }

    fn shares_host(&self) -> bool {
        self.shares_host
    }

    fn interface(&self) -> Option<&str> {
        self.options.interface.as_deref()
    }

    fn global_rank(&self, rank: u32) -> Option<u32> {
        self.members.get(rank as usize).copied()
    }

    fn group_rank(&self, global: u32) -> Option<u32> {
        (0..).zip(&self.members).find(|(_, member)| **member == global).map(|(rank, _)| rank)
    }

    fn call(&self, call: Call, timeout: Duration) -> Result<CallResult> {
        call.check(self.rank(), self.size())?;
        // Work of a rank before the call is visible after it.
        meet();
        let outcome = self.core.call(call, timeout);
        meet();
        outcome
    }

    fn start(&self, call: Call, timeout: Duration) -> Work {
        match call.check(self.rank(), self.size()) {
            Ok(()) => self.core.start(call, timeout),
            Err(error) => Work::ready(Err(error)),
        }
    }

    fn missing_ranks(&self, wait: Duration) -> Result<Vec<u32>> {
        self.core.missing_ranks(wait)
    }

    fn abort(&self, reason: &str) {
        self.core.abort(reason);
    }

    fn destroy(&self) -> Result<()> {
        let timeout = self.options.timeout;
        let outcome = self.core.run(|engine, recorder| {
            let signature = Signature::new(Operation::Destroy);
            within(engine, recorder, signature, 0, None, timeout, |run| run.barrier())
        });
        self.core.close("the group was destroyed");
        outcome
    }
}

impl Drop for MeshGroup {
    fn drop(&mut self) {
        self.core.close("the group was dropped");
    }
}

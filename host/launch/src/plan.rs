//! The plan of a launch: programs, ranks and nodes.

use std::path::PathBuf;
use std::time::Duration;

use super::relay::Sinks;
use crate::error::{Error, Result};
use crate::group::internal::{MAX_RANKS, MAX_RANKS_PER_NODE, too_many_ranks};
use crate::group::{JOB_SECRET, JOB_SECRET_FILE, JobSecret};

/// The shortest time after which a silent node may count as lost.
const SHORTEST: Duration = Duration::from_millis(100);

/// The hosts of a launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nodes {
    /// How many.
    pub count: u32,
    /// The number of this one.
    pub rank: u32,
    /// With several hosts: a host name of the first and the port of its launcher; the same on all.
    /// On one host: the address for rank 0's store, instead of any free port.
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
/// Every rank gets the variables of
/// [`RankEnvironment::variables`](super::rank_environment::RankEnvironment::variables) in its
/// environment, with `OMP_NUM_THREADS` = 1 where there are several ranks and neither the command
/// nor this process sets it.
///
/// When a rank fails, the store of the launch is poisoned and the other ranks get
/// [`Launch::settle`] to end by themselves. Ranks still running then are sent SIGTERM and, after
/// [`Launch::grace`], SIGKILL, with all processes of their groups. If restarts are left, all ranks
/// are started again, on all hosts. With [`Launch::keep_survivors`] the other ranks go on.
///
/// SIGINT, SIGTERM, SIGHUP and SIGQUIT end the launch: the ranks get the signal, and SIGKILL after
/// [`Launch::grace`]. SIGINT or SIGQUIT behind the first signal kills them at once; another SIGTERM
/// or SIGHUP does not. The kernel kills the ranks (not the processes that they have started) if the
/// thread that called [`Launch::run`] dies.
///
/// With several hosts, a launcher without a heartbeat for [`Launch::node_timeout`] ends the launch
/// on all others, with an error that names its node.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Ranks of each host.
    pub ranks_per_node: u32,
    /// The hosts.
    pub nodes: Nodes,
    /// How often all ranks are started again after a failure.
    pub max_restarts: u32,
    /// The other ranks go on when one has failed, as those do that regroup: the store is not
    /// poisoned, and no rank is ended. What the failed rank has left of its process group is killed.
    /// The launch fails once all have ended. On one host, without restarts.
    pub keep_survivors: bool,
    /// How long the other ranks get to end by themselves when one has failed.
    pub settle: Duration,
    /// How long a rank may then take to end after SIGTERM.
    pub grace: Duration,
    /// How long the kernel may take to end it after SIGKILL. A rank in a driver call that does not
    /// return is then left behind.
    pub kill_timeout: Duration,
    /// Each rank leads its own process group, which is killed when the launch fails. Otherwise
    /// ranks share the launcher's group and receive its signals, such as a terminal's. A rank with
    /// its own group ends at SIGINT and SIGQUIT even if the launcher ignores them, as a script's
    /// background jobs do.
    pub groups: bool,
    /// Output of the ranks is passed on by whole lines. Rank 0 of the host keeps the launcher's
    /// standard input unless that is a terminal; the other ranks have none. Else each has the
    /// streams that its command gives it.
    pub relay: bool,
    /// How long the launcher of another node may give no sign of life before the launch ends; the
    /// same on all nodes.
    pub node_timeout: Duration,
    /// Where each rank's output is also written: `DIR/attempt_N/RANK/stdout.log` and `stderr.log`.
    pub log_dir: Option<PathBuf>,
    /// Begin each line with `[rank R] `.
    pub prefix: bool,
    /// The launch's name, the same on all hosts.
    pub run_id: String,
    /// The destination of output.
    pub sinks: Sinks,
    /// The secret of the launch, shared by its processes alone; every rank gets it in its
    /// environment. Default: the environment's ([`JobSecret::from_env`]), else a new one on a
    /// single host, and none on several.
    pub secret: Option<JobSecret>,
}

impl Launch {
    /// A launch of `ranks` ranks on this host alone, without restarts.
    pub fn new(ranks: u32) -> Launch {
        Launch {
            ranks_per_node: ranks,
            nodes: Nodes::one(),
            max_restarts: 0,
            keep_survivors: false,
            settle: Duration::from_secs(1),
            grace: Duration::from_secs(5),
            kill_timeout: Duration::from_secs(10),
            groups: true,
            relay: true,
            node_timeout: Duration::from_secs(30),
            log_dir: None,
            prefix: true,
            run_id: format!("epoxide-{}", std::process::id()),
            sinks: Sinks::standard(),
            secret: None,
        }
    }

    /// The secret of this launch's processes, if they have one.
    pub(super) fn job_secret(&self) -> Result<Option<JobSecret>> {
        let given = match &self.secret {
            Some(secret) => Some(secret.clone()),
            None => JobSecret::from_env()?,
        };
        match given {
            None if self.nodes.count == 1 => JobSecret::generate().map(Some),
            None => {
                self.sinks.say(&format!(
                    "launch: no {JOB_SECRET} and no {JOB_SECRET_FILE}: whoever reaches the ports of this launch can take \
                     part in it and end it, as with torchrun; give all nodes the same secret"
                ));
                Ok(None)
            }
            given => Ok(given),
        }
    }

    /// The longest time that the ranks of a host may take to end once one has failed.
    pub(super) fn longest_end(&self) -> Duration {
        self.settle.saturating_add(self.grace).saturating_add(self.kill_timeout)
    }

    /// Rejects a launch that is not well formed.
    pub(super) fn check(&self) -> Result<()> {
        let nodes = &self.nodes;
        if self.ranks_per_node == 0 {
            return Err(Error::argument("ranks_per_node", 0, "a host has at least one rank"));
        }
        if self.ranks_per_node > MAX_RANKS_PER_NODE {
            let rule = format!("a host has at most {MAX_RANKS_PER_NODE} ranks; give the number of its GPUs");
            return Err(Error::argument("ranks_per_node", self.ranks_per_node, rule));
        }
        if nodes.rank >= nodes.count {
            let rule = format!("must be below the number of nodes, which is {}", nodes.count);
            return Err(Error::argument("node rank", nodes.rank, rule));
        }
        if nodes.count > 1 && nodes.endpoint.is_none() {
            let rule = "several nodes need the host and port of the first, the same on every node";
            return Err(Error::argument("rendezvous endpoint", "none", rule));
        }
        if self.keep_survivors && (nodes.count > 1 || self.max_restarts > 0) {
            let value = format!("with {} nodes and {} restarts", nodes.count, self.max_restarts);
            let rule = "the ranks of one node alone go on, and are not started again: leave out nodes and restarts, or keep_survivors";
            return Err(Error::argument("keep_survivors", value, rule));
        }
        if self.node_timeout < SHORTEST {
            let rule =
                format!("must be at least {SHORTEST:?}: signs of life go through a store on the first node");
            return Err(Error::argument("node_timeout", format!("{:?}", self.node_timeout), rule));
        }
        let all = u64::from(nodes.count) * u64::from(self.ranks_per_node);
        if all > u64::from(MAX_RANKS) {
            let value = format!("{} on each of {} nodes", self.ranks_per_node, nodes.count);
            return Err(Error::argument("ranks_per_node", value, too_many_ranks()));
        }
        Ok(())
    }
}

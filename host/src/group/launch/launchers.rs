//! How the launchers of several nodes agree: on who takes part, on each start, and on why it ended.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::exit::FirstFailure;
use super::plan::Launch;
use super::signals::{Signals, ends};
use crate::error::{Error, Result};
use crate::group::{ConnectionLimits, JobSecret, Store, TcpStore};

/// How long the launchers wait for each other to come.
const JOIN: Duration = Duration::from_secs(300);
/// How long the first node's launcher may take to answer.
const ANSWER: Duration = Duration::from_secs(10);
/// How much longer than its own ranks' end a node waits for that of the others', after a failure.
const SLACK: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(50);

/// Why a start ended before its work was done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Trouble {
    /// A rank failed.
    Rank(FirstFailure),
    /// Somebody ended the launch.
    Signal(i32),
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Trouble::Rank(failure) => write!(f, "rank {} {}", failure.rank, failure.exit),
            Trouble::Signal(signal) => write!(f, "signal {signal} ended the launch"),
        }
    }
}

/// What must be the same on all nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Shape {
    nodes: u32,
    ranks_per_node: u32,
    max_restarts: u32,
}

/// The launchers of all nodes, who meet at a store that the first node's serves.
#[derive(Debug)]
pub(super) struct Launchers {
    store: TcpStore,
    node: u32,
    nodes: u32,
    run_id: String,
}

fn key(start: u32, name: &str) -> String {
    format!("epoxide-launch.{start}.{name}")
}

fn json(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|error| Error::os("JSON", error))
}

/// What another launcher wrote.
fn parse<T: for<'a> Deserialize<'a>>(key: &str, value: &[u8]) -> Result<T> {
    serde_json::from_slice(value).map_err(|error| Error::Store {
        operation: "get",
        key: key.to_owned(),
        reason: format!("another program, or another version of this one, is at the endpoint: {error}"),
    })
}

impl Launchers {
    /// Waits until all nodes have come.
    pub fn join(
        launch: &Launch,
        endpoint: &(String, u16),
        secret: Option<&JobSecret>,
        signals: Option<&mut Signals>,
    ) -> Result<Launchers> {
        let (host, port) = endpoint;
        let (node, nodes) = (launch.nodes.rank, launch.nodes.count);
        let store = match node {
            0 => TcpStore::host_at(host, *port, ANSWER, ANSWER, secret, &ConnectionLimits::default())?,
            _ => TcpStore::connect_with_secret(host, *port, JOIN, secret)?,
        };
        let mut launchers = Launchers { store, node, nodes, run_id: launch.run_id.clone() };
        let shape = Shape { nodes, ranks_per_node: launch.ranks_per_node, max_restarts: launch.max_restarts };
        let own = format!("epoxide-launch.node.{node}");
        if launchers.store.add(&format!("{own}.joins"), 1)? != 1 {
            let rule = "another launcher has this number; give each node its own";
            return Err(Error::argument("node rank", node, rule));
        }
        let run = "epoxide-launch.run";
        if node == 0 {
            launchers.store.set(run, launch.run_id.as_bytes())?;
        }
        launchers.store.set(&own, &json(&shape)?)?;
        let others: Vec<String> = (0..nodes).map(|node| format!("epoxide-launch.node.{node}")).collect();
        launchers.wait(&others, Instant::now() + JOIN, "launchers to come", signals, |_| Ok(()))?;
        for (other, key) in (0..).zip(&others) {
            let theirs: Shape = parse(key, &launchers.store.get(key, ANSWER)?)?;
            if theirs != shape {
                return Err(Error::Mismatch {
                    rank: node,
                    peer: other,
                    what: "the launch (the numbers are those of nodes)",
                    ours: format!("{shape:?}"),
                    theirs: format!("{theirs:?}"),
                });
            }
        }
        launchers.run_id = String::from_utf8_lossy(&launchers.store.get(run, ANSWER)?).into_owned();
        Ok(launchers)
    }

    /// The launch's name, from the first node.
    pub fn run_id(&self) -> &String {
        &self.run_id
    }

    /// Begins start number `start`: the first node gives the port of rank 0, which all return.
    pub fn begin(&self, start: u32, port: Option<u16>, signals: Option<&mut Signals>) -> Result<u16> {
        let name = key(start, "port");
        if let Some(port) = port {
            self.store.set(&name, &json(&port)?)?;
        }
        let names = std::slice::from_ref(&name);
        self.wait(names, Instant::now() + SLACK, "the first node to start its ranks", signals, |_| Ok(()))?;
        parse(&name, &self.store.get(&name, ANSWER)?)
    }

    /// Tells all nodes why this start ends. The first reason stays.
    pub fn report(&self, start: u32, trouble: &Trouble) -> Result<()> {
        self.store.compare_set(&key(start, "trouble"), b"", &json(trouble)?).map(drop)
    }

    /// Why this start ends, on any node.
    pub fn trouble(&self, start: u32) -> Result<Option<Trouble>> {
        let name = key(start, "trouble");
        match self.store.check(&name)? {
            true => parse(&name, &self.store.get(&name, ANSWER)?).map(Some),
            false => Ok(None),
        }
    }

    /// Waits until the ranks of all nodes have ended, as those of this one have.
    pub fn end(&self, start: u32, grace: Duration, signals: Option<&mut Signals>) -> Result<Option<Trouble>> {
        let ends: Vec<String> = (0..self.nodes).map(|node| key(start, &format!("end.{node}"))).collect();
        if let Some(own) = ends.get(self.node as usize) {
            self.store.set(own, b"")?;
        }
        // Ranks that do well may go on as long as they like; those that follow from a failure may not.
        let forever = Instant::now() + Duration::from_secs(u64::from(u32::MAX));
        let mut deadline = forever;
        let tick = |limit: &mut Instant| {
            if deadline == forever && self.trouble(start)?.is_some() {
                deadline = Instant::now() + grace + SLACK;
                *limit = deadline;
            }
            Ok(())
        };
        let interrupted = self.wait(&ends, forever, "the other nodes' ranks to end", signals, tick);
        if let Err(Interrupted::Signal(signal)) = interrupted {
            self.report(start, &Trouble::Signal(signal))?;
        }
        interrupted?;
        self.trouble(start)
    }

    /// Waits until all keys are set; in the meantime calls `tick`, which may move the deadline.
    fn wait(
        &self,
        keys: &[String],
        mut deadline: Instant,
        what: &str,
        mut signals: Option<&mut Signals>,
        mut tick: impl FnMut(&mut Instant) -> Result<()>,
    ) -> Result<(), Interrupted> {
        let names: Vec<&str> = keys.iter().map(String::as_str).collect();
        while !self.store.check_all(&names)? {
            let caught = signals.as_deref_mut().map(Signals::take).unwrap_or_default();
            if let Some(signal) = caught.into_iter().find(|signal| ends(*signal)) {
                return Err(Interrupted::Signal(signal));
            }
            tick(&mut deadline)?;
            if Instant::now() >= deadline {
                let missing = names.iter().copied().find(|name| !self.store.check(name).unwrap_or(false));
                return Err(Interrupted::Error(Error::Store {
                    operation: "wait",
                    key: missing.unwrap_or_default().to_owned(),
                    reason: format!("waited in vain for {what}; look at the launcher of the node it names"),
                }));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}

/// Why a wait ended early.
#[derive(Debug, Clone)]
enum Interrupted {
    Signal(i32),
    Error(Error),
}

impl From<Error> for Interrupted {
    fn from(error: Error) -> Interrupted {
        Interrupted::Error(error)
    }
}

impl From<Interrupted> for Error {
    fn from(interrupted: Interrupted) -> Error {
        match interrupted {
            Interrupted::Signal(signal) => {
                Error::os("launch", format!("ended by signal {signal} while it waited for the other nodes"))
            }
            Interrupted::Error(error) => error,
        }
    }
}

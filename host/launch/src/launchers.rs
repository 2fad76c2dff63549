//! Agreement of several nodes' launchers: on the participants, on each start, and on the reason of
//! its end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::exit::FirstFailure;
use super::heartbeat::{self, Heartbeat, Losses};
use epoxide_base::deadline;

use super::plan::Launch;
use super::signals::{Signals, ends};
use crate::error::{Error, Result};
use crate::foreign::escaped;
use crate::group::internal::{connect_unless, host_at, set_linger};
use crate::group::{JobSecret, Store, TcpStore, TcpStoreOptions};

/// How long the launchers wait for each other to join.
const JOIN: Duration = Duration::from_secs(300);
/// How long the first node's launcher stays for the others when it leaves ...
const LINGER: Duration = Duration::from_secs(10);
/// ... and after a loss, because a lost launcher's connection may stay open as long as its host is
/// silent.
const LINGER_AFTER_LOSS: Duration = Duration::from_secs(1);
/// How much longer a node waits for other nodes' ranks than its own may take to end after a failure.
const SLACK: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(50);

/// Why a start ended before its work was done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Trouble {
    /// A rank failed.
    Rank(FirstFailure),
    /// A signal ended the launch.
    Signal(i32),
    /// The launcher of a node has died or given up.
    Lost { node: u32, why: String },
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Trouble::Rank(failure) => write!(f, "rank {} {}", failure.rank, failure.exit),
            Trouble::Signal(signal) => write!(f, "signal {signal} ended the launch"),
            Trouble::Lost { node, why } => write!(
                f,
                "the launcher of node {node} {}; see what it said, and whether its host and the network to it are up \
                 (a node may be silent for --node-timeout)",
                escaped(why.as_bytes())
            ),
        }
    }
}

/// Why a wait ended early.
#[derive(Debug, Clone)]
pub(super) enum Interrupted {
    /// A signal ended the launch, here or on another node.
    Signal(i32),
    Error(Error),
}

impl From<Error> for Interrupted {
    fn from(error: Error) -> Interrupted {
        Interrupted::Error(error)
    }
}

impl From<Trouble> for Interrupted {
    fn from(trouble: Trouble) -> Interrupted {
        match trouble {
            Trouble::Signal(signal) => Interrupted::Signal(signal),
            trouble => Interrupted::Error(Error::os("launch", trouble)),
        }
    }
}

/// Settings that must be the same on all nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Shape {
    nodes: u32,
    ranks_per_node: u32,
    max_restarts: u32,
    node_timeout: Duration,
}

/// The launchers of all nodes, which share a store of the first node's launcher.
#[derive(Debug)]
pub(super) struct Launchers {
    heartbeat: Option<Heartbeat>,
    losses: Losses,
    store: Arc<TcpStore>,
    node: u32,
    nodes: u32,
    run_id: String,
    timeout: Duration,
}

fn key(start: u32, name: &str) -> String {
    format!("epoxide-launch.{start}.{name}")
}

fn node_key(node: u32) -> String {
    format!("epoxide-launch.node.{node}")
}

fn end_key(start: u32, node: u32) -> String {
    key(start, &format!("end.{node}"))
}

fn json(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|error| Error::internal("JSON", error))
}

/// An entry of another launcher.
fn parse<T: for<'a> Deserialize<'a>>(key: &str, value: &[u8]) -> Result<T> {
    serde_json::from_slice(value).map_err(|error| Error::Store {
        operation: "get",
        key: key.to_owned(),
        reason: format!("another program, or another version of this one, is at the endpoint: {error}"),
    })
}

/// The first signal since the last call that ends the launch.
fn ending(signals: &mut Option<&mut Signals>) -> Option<i32> {
    let caught = signals.as_deref_mut().map(Signals::take).unwrap_or_default();
    caught.into_iter().find(|signal| ends(*signal))
}

impl Launchers {
    /// Waits until all nodes have joined.
    pub fn join(
        launch: &Launch,
        endpoint: &(String, u16),
        secret: Option<&JobSecret>,
        mut signals: Option<&mut Signals>,
    ) -> Result<Launchers, Interrupted> {
        let (host, port) = endpoint;
        let (node, nodes) = (launch.nodes.rank, launch.nodes.count);
        let timeout = launch.node_timeout;
        let options =
            TcpStoreOptions { secret: secret.cloned(), linger: LINGER, ..TcpStoreOptions::new(timeout) };
        let store = match node {
            0 => host_at(host, *port, &options)?,
            _ => {
                let mut ended = None;
                let stop = |warning: Option<&str>| {
                    if let Some(warning) = warning {
                        launch.sinks.say(&format!("launch: {warning}"));
                    }
                    ended = ending(&mut signals);
                    ended.is_some()
                };
                let store = connect_unless(host, *port, &options, JOIN, stop);
                match ended {
                    Some(signal) => return Err(Interrupted::Signal(signal)),
                    None => store?,
                }
            }
        };
        if store.add(&format!("{}.joins", node_key(node)), 1)? != 1 {
            let rule = "another launcher has this number; give each node its own";
            return Err(Error::argument("node rank", node, rule).into());
        }
        let (heartbeat, losses, store) = (None, Losses::default(), Arc::new(store));
        let run_id = launch.run_id.clone();
        let mut launchers = Launchers { heartbeat, losses, store, node, nodes, run_id, timeout };
        launchers.meet(launch, signals).inspect_err(|why| launchers.leave(0, why))?;
        Ok(launchers)
    }

    fn meet(&mut self, launch: &Launch, signals: Option<&mut Signals>) -> Result<(), Interrupted> {
        let (node, nodes) = (self.node, self.nodes);
        let shape = Shape {
            nodes,
            ranks_per_node: launch.ranks_per_node,
            max_restarts: launch.max_restarts,
            node_timeout: launch.node_timeout,
        };
        let run = "epoxide-launch.run";
        if node == 0 {
            self.store.set(run, launch.run_id.as_bytes())?;
        }
        // Before this node counts as joined, as the others poll its sign from then on.
        self.store.add(&heartbeat::key(node), 1)?;
        self.store.set(&node_key(node), &json(&shape)?)?;
        let others: Vec<String> = (0..nodes).map(node_key).collect();
        let end = Some(Instant::now() + JOIN);
        self.wait(&others, end, "launchers to come", signals, |_| self.unless_trouble(0))?;
        for (other, key) in (0..).zip(&others) {
            let theirs: Shape = parse(key, &self.store.get(key, self.timeout)?)?;
            if theirs != shape {
                return Err(Interrupted::Error(Error::Mismatch {
                    rank: node,
                    peer: other,
                    what: "the launch (the numbers are those of nodes)",
                    ours: format!("{shape:?}"),
                    theirs: format!("{theirs:?}"),
                }));
            }
        }
        // The id becomes a variable of the ranks' environment and part of their output.
        self.run_id = escaped(&self.store.get(run, self.timeout)?);
        self.heartbeat =
            Some(Heartbeat::start(self.store.clone(), node, nodes, self.timeout, self.losses.clone())?);
        Ok(())
    }

    /// The launch's name, from the first node.
    pub fn run_id(&self) -> &String {
        &self.run_id
    }

    /// Begins start number `start`: the first node gives the port of rank 0, which all return.
    pub fn begin(
        &self,
        start: u32,
        port: Option<u16>,
        signals: Option<&mut Signals>,
    ) -> Result<u16, Interrupted> {
        let name = key(start, "port");
        if let Some(port) = port {
            self.store.set(&name, &json(&port)?)?;
        }
        let names = std::slice::from_ref(&name);
        let end = Some(Instant::now() + SLACK);
        self.wait(names, end, "the first node to start its ranks", signals, |_| self.unless_trouble(start))?;
        Ok(parse(&name, &self.store.get(&name, self.timeout)?)?)
    }

    /// Publishes to all nodes why this start ends. The first reason stays.
    pub fn report(&self, start: u32, trouble: &Trouble) -> Result<()> {
        let told = self.store.compare_set(&key(start, "trouble"), b"", &json(trouble)?);
        match self.reach(told) {
            // The others get the same error: the store has ended for all.
            Err(_) if self.losses.of(0).is_some() => Ok(()),
            told => told.map(drop),
        }
    }

    /// Publishes the early end of this node, so that the others need not time out.
    pub fn leave(&self, start: u32, why: &Interrupted) {
        let trouble = match why {
            Interrupted::Signal(signal) => Trouble::Signal(*signal),
            Interrupted::Error(error) => Trouble::Lost { node: self.node, why: format!("gave up: {error}") },
        };
        // If the store cannot be reached, no launcher can read a report.
        if self.losses.of(0).is_some() {
            return;
        }
        let _ = self.report(start, &trouble);
        let _ = self.store.set(&end_key(start, self.node), b"");
    }

    /// Why this start ends, on any node; losses of nodes before all.
    pub fn trouble(&self, start: u32) -> Result<Option<Trouble>> {
        let lost: Vec<Trouble> = self.losses.all().map(|(node, why)| Trouble::Lost { node, why }).collect();
        if self.node == 0 {
            for trouble in &lost {
                // No other launcher checks that node, and none should wait for it.
                self.report(start, trouble)?;
                if let Trouble::Lost { node, .. } = trouble {
                    self.store.set(&end_key(start, *node), &json(trouble)?)?;
                }
            }
        }
        if let Some(first) = lost.into_iter().next() {
            return Ok(Some(first));
        }
        let name = key(start, "trouble");
        let look = || match self.reach(self.store.check(&name))? {
            true => parse(&name, &self.reach(self.store.get(&name, self.timeout))?).map(Some),
            false => Ok(None),
        };
        look().or_else(|error| match self.losses.of(0) {
            Some(why) => Ok(Some(Trouble::Lost { node: 0, why })),
            None => Err(error),
        })
    }

    /// An error where this start has ended.
    fn unless_trouble(&self, start: u32) -> Result<(), Interrupted> {
        self.trouble(start)?.map_or(Ok(()), |trouble| Err(trouble.into()))
    }

    /// Waits until the ranks of all nodes have ended, as those of this one have. Returns why they
    /// have, if not by themselves. After a failure the ranks of a node may take `longest` to end.
    pub fn end(
        &self,
        start: u32,
        longest: Duration,
        signals: Option<&mut Signals>,
    ) -> Result<Option<Trouble>, Interrupted> {
        let ends: Vec<String> = (0..self.nodes).map(|node| end_key(start, node)).collect();
        self.reach(self.store.set(&end_key(start, self.node), b""))?;
        // The deadline applies only after a failure: healthy ranks may run without limit.
        let tick = |limit: &mut Option<Instant>| match self.trouble(start)? {
            // The wait needs the store of node 0.
            Some(trouble @ Trouble::Lost { node: 0, .. }) if self.node != 0 => Err(trouble.into()),
            Some(_) => {
                limit.get_or_insert_with(|| deadline(longest.saturating_add(SLACK)));
                Ok(())
            }
            None => Ok(()),
        };
        let what = "the other nodes' ranks to end";
        if let Err(why) = self.wait(&ends, None, what, signals, tick) {
            self.leave(start, &why);
            return Err(why);
        }
        // A node lost after another failure is only in its own key.
        for name in &ends {
            let value = self.reach(self.store.get(name, self.timeout))?;
            if !value.is_empty() {
                return Ok(Some(parse(name, &value)?));
            }
        }
        Ok(self.trouble(start)?)
    }

    /// Returns the outcome of a call of the store. A failure is blamed on the first node's
    /// launcher, because it owns the store.
    fn reach<T>(&self, outcome: Result<T>) -> Result<T> {
        outcome.map_err(|error| {
            if self.node == 0 {
                return error;
            }
            let why = self.losses.note(0, format!("does not answer: {error}"));
            Error::os("launch", Trouble::Lost { node: 0, why })
        })
    }

    /// Waits until all keys are set; in the meantime calls `tick`, which may set the deadline. An
    /// error of `tick` ends the wait, unless the keys have been set since `tick` was called. So
    /// launchers that differ all report it, even if one of them has already given up because of it.
    fn wait(
        &self,
        keys: &[String],
        mut deadline: Option<Instant>,
        what: &str,
        mut signals: Option<&mut Signals>,
        mut tick: impl FnMut(&mut Option<Instant>) -> Result<(), Interrupted>,
    ) -> Result<(), Interrupted> {
        let names: Vec<&str> = keys.iter().map(String::as_str).collect();
        while !self.reach(self.store.check_all(&names))? {
            if let Some(signal) = ending(&mut signals) {
                return Err(Interrupted::Signal(signal));
            }
            if let Err(why) = tick(&mut deadline) {
                return if self.reach(self.store.check_all(&names))? { Ok(()) } else { Err(why) };
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
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

impl Drop for Launchers {
    fn drop(&mut self) {
        // Ends the thread that holds the store.
        drop(self.heartbeat.take());
        if let Some(store) = Arc::get_mut(&mut self.store)
            && self.losses.all().next().is_some()
        {
            set_linger(store, LINGER_AFTER_LOSS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The launcher of the only node.
    fn alone() -> Launchers {
        let timeout = Duration::from_secs(60);
        let options = TcpStoreOptions { linger: LINGER, ..TcpStoreOptions::new(timeout) };
        let store = host_at("127.0.0.1", 0, &options).unwrap();
        Launchers {
            heartbeat: None,
            losses: Losses::default(),
            store: Arc::new(store),
            node: 0,
            nodes: 1,
            run_id: "run".into(),
            timeout,
        }
    }

    #[test]
    fn keys_that_are_set_count_even_if_a_launcher_gave_up_since() {
        let launchers = alone();
        let gone = || Trouble::Lost { node: 1, why: "gave up".into() }.into();
        let wait = |key: &str, sets: bool| {
            launchers.wait(&[key.into()], None, "a key", None, |_| {
                if sets {
                    launchers.store.set(key, b"")?;
                }
                Err(gone())
            })
        };
        assert!(matches!(wait("missing", false), Err(Interrupted::Error(_))));
        assert!(wait("set in time", true).is_ok());
    }

    #[test]
    fn other_nodes_may_take_any_time_to_end() {
        let mut launchers = alone();
        launchers.nodes = 2;
        launchers.report(0, &Trouble::Signal(libc::SIGTERM)).unwrap();
        std::thread::scope(|scope| {
            let end = scope.spawn(|| launchers.end(0, Duration::MAX, None));
            // So that the other node is waited for.
            while !launchers.store.check(&end_key(0, 0)).unwrap() {
                std::thread::sleep(POLL);
            }
            std::thread::sleep(4 * POLL);
            launchers.store.set(&end_key(0, 1), b"").unwrap();
            assert_eq!(end.join().unwrap().unwrap(), Some(Trouble::Signal(libc::SIGTERM)));
        });
    }
}

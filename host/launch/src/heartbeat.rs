//! Heartbeats of several nodes' launchers: each stores its own and polls those that it depends on.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::group::{Store, TcpStore};
use crate::lock::lock;

/// Signs in the time after which a launcher counts as lost: one that is late, or a store that is
/// slow, is no loss.
const SIGNS: u32 = 8;
/// Longest time between two signs.
const SLOWEST: Duration = Duration::from_secs(1);

/// The nodes whose launchers are lost, and the reasons.
#[derive(Debug, Clone, Default)]
pub(super) struct Losses(Arc<Mutex<BTreeMap<u32, String>>>);

impl Losses {
    /// Records that a launcher is lost. Returns the first recorded reason.
    pub fn note(&self, node: u32, why: String) -> String {
        self.lock().entry(node).or_insert(why).clone()
    }

    /// Why this node's launcher counts as lost, if it does.
    pub fn of(&self, node: u32) -> Option<String> {
        self.lock().get(&node).cloned()
    }

    /// All that are lost now.
    pub fn all(&self) -> impl Iterator<Item = (u32, String)> + use<> {
        self.lock().clone().into_iter()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, String>> {
        lock(&self.0)
    }
}

/// A thread that stores heartbeats. The first node polls all others and reports losses to them; the
/// others poll the first.
///
/// A separate thread, because the launcher's may be blocked for longer than a sign may be late: by
/// a rank's executable that is slow to load, or a slow reader of the output.
#[derive(Debug)]
pub(super) struct Heartbeat {
    /// Dropped to end the thread.
    beats: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The key that a launcher counts its signs at.
pub(super) fn key(node: u32) -> String {
    format!("epoxide-launch.sign.{node}")
}

impl Heartbeat {
    /// Starts to store signs and to poll for them. Every node must have stored one before any
    /// polls, and the store must not take longer for an answer than `silence`.
    pub fn start(
        store: Arc<TcpStore>,
        node: u32,
        nodes: u32,
        silence: Duration,
        losses: Losses,
    ) -> Result<Heartbeat> {
        let (beats, ended) = channel();
        let others = if node == 0 { (1..nodes).collect() } else { vec![0] };
        let signs = Signs { store, node, others, silence, seen: BTreeMap::new(), losses };
        let thread =
            std::thread::Builder::new().name("epoxide-signs".to_owned()).spawn(move || signs.run(&ended));
        let thread = thread.map_err(|error| Error::system("spawn thread", error))?;
        Ok(Heartbeat { beats: Some(beats), thread: Some(thread) })
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        drop(self.beats.take());
        if let Some(thread) = self.thread.take() {
            // The thread is between two signs, or in a call of the store, which ends by the store's
            // timeout.
            let _ = thread.join();
        }
    }
}

/// The state of the thread.
struct Signs {
    store: Arc<TcpStore>,
    node: u32,
    others: Vec<u32>,
    silence: Duration,
    /// The last sign of each, and when it was first read.
    seen: BTreeMap<u32, (Vec<u8>, Instant)>,
    losses: Losses,
}

impl Signs {
    fn run(mut self, ended: &Receiver<()>) {
        let pause = (self.silence / SIGNS).min(SLOWEST);
        loop {
            if let Err(error) = self.look() {
                // The store is the first node's, so no other node's signs can be read either.
                self.losses.note(0, format!("does not answer: {error}"));
                return;
            }
            if ended.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                return;
            }
        }
    }

    /// Stores a sign, then reads those of the others. In this order a launcher that was itself
    /// stopped does not mistake old readings for silence: its readings are as new as its own sign.
    fn look(&mut self) -> Result<()> {
        self.store.add(&key(self.node), 1)?;
        let keys: Vec<String> = self.others.iter().map(|node| key(*node)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let signs = self.store.multi_get(&keys, Duration::ZERO)?;
        let now = Instant::now();
        for (node, sign) in self.others.iter().zip(signs) {
            let (last, since) = self.seen.entry(*node).or_insert_with(|| (sign.clone(), now));
            if *last != sign {
                (*last, *since) = (sign, now);
            } else if now.duration_since(*since) >= self.silence {
                let why = format!("has given no sign of life for {:?}", self.silence);
                self.losses.note(*node, why);
            }
        }
        Ok(())
    }
}

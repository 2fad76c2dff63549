//! Ranks that are threads, from the test's side.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use super::context::Context;
use super::outcome::Outcome;
use super::report::End;
use super::session::Ranks;
use super::slot::Slot;
use super::trace::{self, Thread};
use super::verdict::{RankMain, Verdict};
use epoxide::group::{Connect, HashStore, MeshGroup, MeshOptions, ProcessGroup};
use epoxide::internal::group::poison;
use epoxide::{Error, Result};

/// The ranks. Dropping ends them, but for those that hang.
#[derive(Debug)]
pub(super) struct Threads {
    peers: Vec<Peer>,
    events: Receiver<Event>,
    store: Arc<HashStore>,
}

#[derive(Debug)]
struct Event {
    rank: u32,
    verdict: Verdict,
    at: SystemTime,
}

#[derive(Debug)]
struct Peer {
    /// Sends the tests to the thread; closed at the end.
    tests: Option<Sender<Arc<RankMain>>>,
    handle: Option<JoinHandle<()>>,
    slot: Slot,
    thread: Arc<OnceLock<Thread>>,
    busy: bool,
}

impl Threads {
    pub fn start(size: u32, timeout: Duration) -> Result<Threads> {
        let store = Arc::new(HashStore::new());
        let (sender, events) = channel();
        let mut this = Threads { peers: Vec::new(), events, store: store.clone() };
        for rank in 0..size {
            let (tests, inbox) = channel::<Arc<RankMain>>();
            let (slot, thread) = (Slot::memory(), Arc::new(OnceLock::new()));
            let store = store.clone();
            let join = move || {
                let options =
                    MeshOptions { timeout: timeout * 2, connect: Connect::Eager, ..MeshOptions::default() };
                let group = MeshGroup::new(store.clone(), rank, size, "world", options)?;
                Ok(Arc::new(group) as Arc<dyn ProcessGroup>)
            };
            let ctx = Context::new(rank, size, slot.clone(), Box::new(join));
            let (sender, own) = (sender.clone(), thread.clone());
            let work = move || {
                let _ = own.set(Thread::current());
                for test in inbox {
                    let event = Event { rank, verdict: test(&ctx), at: SystemTime::now() };
                    if sender.send(event).is_err() {
                        // The test has given this rank up.
                        return;
                    }
                }
            };
            let handle = std::thread::Builder::new().name(format!("rank {rank}")).spawn(work);
            let handle = Some(handle.map_err(|error| Error::os("spawn thread", error))?);
            this.peers.push(Peer { tests: Some(tests), handle, slot, thread, busy: false });
        }
        Ok(this)
    }
}

impl Ranks for Threads {
    fn size(&self) -> u32 {
        self.peers.len() as u32
    }

    fn begin(&mut self, _: u64, rank_main: Arc<RankMain>) {
        for peer in &mut self.peers {
            // A rank ends only when this is dropped, or by a failure after which there are no more
            // tests.
            peer.busy = peer.tests.as_ref().is_some_and(|tests| tests.send(rank_main.clone()).is_ok());
        }
    }

    fn conclude(&mut self, _: &Outcome) {}

    fn wait(&mut self, timeout: Duration) -> Vec<(u32, End, SystemTime)> {
        let first = self.events.recv_timeout(timeout).ok();
        let events: Vec<Event> = first.into_iter().chain(self.events.try_iter()).collect();
        for event in &events {
            self.peers.get_mut(event.rank as usize).into_iter().for_each(|peer| peer.busy = false);
        }
        events.into_iter().map(|event| (event.rank, event.verdict.into(), event.at)).collect()
    }

    fn give_up(&self, reason: &str) {
        poison(&self.store, reason);
    }

    fn trace(&mut self, rank: u32, end: Instant) -> String {
        let thread = self.peers.get(rank as usize).and_then(|peer| peer.thread.get());
        let Some(thread) = thread else { return "it has not begun".to_owned() };
        trace::request_here(*thread, end)
    }

    fn operation(&self, rank: u32) -> String {
        self.peers.get(rank as usize).map_or_else(String::new, |peer| peer.slot.read())
    }

    fn output(&self, _: u32) -> String {
        // The rank's output is part of the test's own.
        String::new()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        for peer in &mut self.peers {
            peer.tests = None;
        }
        for peer in self.peers.iter_mut().filter(|peer| !peer.busy) {
            // A test's panic was caught.
            let _ = peer.handle.take().map(JoinHandle::join);
        }
    }
}

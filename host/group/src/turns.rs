//! One operation of a group at a time, in the order of the calls, from any thread.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::call::{Call, CallResult, P2p};
use super::collectives;
use super::mesh::{Engine, Wake};
use super::recorder::Recorder;
use super::work::{Promise, Work};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::virtual_time::spawn;

/// State that the handles and the worker of a group share.
#[derive(Debug)]
pub(crate) struct Core {
    pub name: String,
    pub rank: u32,
    pub size: u32,
    pub wake: Arc<Wake>,
    pub recorder: Recorder,
    engine: Mutex<Engine>,
    turns: Mutex<Turns>,
    turned: Condvar,
}

#[derive(Debug, Default)]
struct Turns {
    next: u64,
    serving: u64,
    jobs: VecDeque<Job>,
    worker: Option<JoinHandle<()>>,
    closing: bool,
    /// Why no operation runs any more.
    broken: Option<String>,
    failed: Vec<u32>,
    messages: u64,
}

#[derive(Debug)]
struct Job {
    ticket: u64,
    call: Call,
    timeout: Duration,
    promise: Promise,
}

/// Passes the turn to the next operation when dropped. A panic breaks the group, because the engine
/// is then in the middle of the operation.
struct Turn<'a>(&'a Core);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut turns = lock(&self.0.turns);
        turns.serving += 1;
        if self.0.engine.is_poisoned() {
            turns.broken.get_or_insert_with(|| "an operation panicked".to_owned());
        }
        drop(turns);
        self.0.turned.notify_all();
    }
}

/// Fails queued operations when the worker ends, by a panic or not.
struct FailQueued<'a>(&'a Core);

impl Drop for FailQueued<'_> {
    fn drop(&mut self) {
        let jobs = {
            let mut turns = lock(&self.0.turns);
            turns.closing = true;
            std::mem::take(&mut turns.jobs)
        };
        drop(jobs);
        self.0.turned.notify_all();
    }
}

impl Core {
    pub(crate) fn new(engine: Engine, recorder: Recorder) -> Core {
        Core {
            name: engine.name.clone(),
            rank: engine.rank,
            size: engine.size,
            wake: engine.wake.clone(),
            recorder,
            engine: Mutex::new(engine),
            turns: Mutex::default(),
            turned: Condvar::new(),
        }
    }

    /// Waits for the turn of `ticket`; an error once no operation runs any more.
    fn turn(&self, ticket: u64) -> Result<Turn<'_>> {
        let turns = lock(&self.turns);
        let turns = self
            .turned
            .wait_while(turns, |turns| turns.serving != ticket && turns.broken.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        let broken = turns.broken.clone();
        drop(turns);
        let turn = Turn(self);
        match broken {
            Some(reason) => Err(self.unusable(&reason)),
            None => Ok(turn),
        }
    }

    fn unusable(&self, reason: &str) -> Error {
        Error::Group {
            group: self.name.clone(),
            rank: self.rank,
            operation: "after its end",
            sequence: 0,
            peers: lock(&self.turns).failed.clone(),
            reason: format!("the group is of no use any more, make a new one or shrink it: {reason}"),
        }
    }

    /// Waits for its turn and runs `body` in the calling thread. An error breaks the group.
    pub(crate) fn run<T>(&self, body: impl FnOnce(&mut Engine, &Recorder) -> Result<T>) -> Result<T> {
        let ticket = {
            let mut turns = lock(&self.turns);
            turns.next += 1;
            turns.next - 1
        };
        let _turn = self.turn(ticket)?;
        let mut engine = lock(&self.engine);
        let outcome = body(&mut engine, &self.recorder);
        outcome.inspect_err(|error| self.fail(&mut engine, error))
    }

    /// Runs a checked call in the calling thread.
    pub(crate) fn call(&self, call: Call, timeout: Duration) -> Result<CallResult> {
        let Call::P2p(list) = call else {
            return self.run(|engine, recorder| collectives::perform(engine, recorder, call, timeout));
        };
        let mut result = None;
        let sequence = self.message_number();
        self.run(|engine, recorder| {
            let done = |_, outcome| result = Some(outcome);
            collectives::p2p::run(engine, recorder, sequence, (0, list), timeout, Vec::new, done)
        })?;
        Ok(result.unwrap_or(CallResult::Done))
    }

    fn message_number(&self) -> u64 {
        let mut turns = lock(&self.turns);
        turns.messages += 1;
        turns.messages - 1
    }

    /// Queues a checked call for the worker, and starts a worker if none runs.
    pub(crate) fn start(self: &Arc<Core>, call: Call, timeout: Duration) -> Work {
        let (work, promise) = Work::pending();
        let mut turns = lock(&self.turns);
        if turns.closing {
            let reason = turns.broken.clone().unwrap_or_default();
            drop(turns);
            return Work::ready(Err(self.unusable(&reason)));
        }
        let ticket = turns.next;
        if turns.worker.is_none() {
            let core = self.clone();
            let name = format!("epoxide-group-{}", self.rank);
            match spawn(name, move || core.work()) {
                Ok(worker) => turns.worker = Some(worker),
                Err(error) => return Work::ready(Err(Error::system("spawn", error))),
            }
        }
        turns.next += 1;
        turns.jobs.push_back(Job { ticket, call, timeout, promise });
        drop(turns);
        self.turned.notify_all();
        // A worker in send and receive adds the call to its batch.
        self.wake.ring();
        work
    }

    /// The worker: runs jobs until the group closes and none is left.
    fn work(&self) {
        let _ended = FailQueued(self);
        loop {
            let turns = lock(&self.turns);
            let idle = |turns: &mut Turns| turns.jobs.is_empty() && !turns.closing;
            let mut turns = self.turned.wait_while(turns, idle).unwrap_or_else(PoisonError::into_inner);
            let Some(job) = turns.jobs.pop_front() else { return };
            drop(turns);
            let turn = match self.turn(job.ticket) {
                Ok(turn) => turn,
                Err(error) => {
                    job.promise.complete(Err(error));
                    continue;
                }
            };
            let mut engine = lock(&self.engine);
            match job.call {
                Call::P2p(list) => self.send_and_receive(&mut engine, list, job.timeout, job.promise),
                call => {
                    let outcome = collectives::perform(&mut engine, &self.recorder, call, job.timeout);
                    let outcome = outcome.inspect_err(|error| self.fail(&mut engine, error));
                    drop(engine);
                    drop(turn);
                    job.promise.complete(outcome);
                }
            }
        }
    }

    /// Runs a batch together with those queued right behind it, so that none waits for others.
    fn send_and_receive(&self, engine: &mut Engine, list: Vec<P2p>, timeout: Duration, promise: Promise) {
        let sequence = self.message_number();
        let promises = std::cell::RefCell::new(vec![Some(promise)]);
        let more = || {
            let mut promises = promises.borrow_mut();
            let mut lists = Vec::new();
            let mut turns = lock(&self.turns);
            // Tickets in between are other threads' operations, which run first.
            while let Some(job) = turns.jobs.front() {
                let next = turns.serving + promises.len() as u64;
                if job.ticket != next || !matches!(job.call, Call::P2p(_)) {
                    break;
                }
                let Some(job) = turns.jobs.pop_front() else { break };
                if let Call::P2p(list) = job.call {
                    lists.push((promises.len() as u64, list, job.timeout));
                    promises.push(Some(job.promise));
                }
            }
            lists
        };
        let done = |key: u64, outcome| {
            if let Some(promise) = promises.borrow_mut()[key as usize].take() {
                promise.complete(Ok(outcome));
            }
        };
        let outcome = collectives::p2p::run(engine, &self.recorder, sequence, (0, list), timeout, more, done);
        if let Err(error) = &outcome {
            self.fail(engine, error);
        }
        let promises = promises.into_inner();
        // The caller's turn ends by itself; the others' end here.
        lock(&self.turns).serving += promises.len() as u64 - 1;
        for promise in promises.into_iter().flatten() {
            if let Err(error) = &outcome {
                promise.complete(Err(error.clone()));
            }
        }
    }

    /// Ends the group after an error: dumps the record and sends the reason to the other ranks.
    fn fail(&self, engine: &mut Engine, error: &Error) {
        let reason = error.to_string();
        {
            let mut turns = lock(&self.turns);
            if turns.broken.is_some() {
                return;
            }
            turns.broken = Some(reason.clone());
            turns.failed = engine.failed_ranks(error);
        }
        self.recorder.dump(&reason);
        engine.abort(&reason);
        engine.current = None;
    }

    /// Aborts the group; a running operation of another thread ends with an error.
    pub(crate) fn abort(&self, reason: &str) {
        self.wake.give_up(reason);
        // The thread that holds the engine, if any, reads the reason soon and releases it.
        let mut engine = lock(&self.engine);
        let error = engine.error(Vec::new(), format!("the group was given up: {reason}"));
        self.fail(&mut engine, &error);
    }

    /// Ranks found dead, or to blame for the group's end.
    pub(crate) fn failed_ranks(&self) -> Vec<u32> {
        lock(&self.turns).failed.clone()
    }

    /// Ranks that have ended or have not joined. Does not break the group.
    pub(crate) fn missing_ranks(&self, wait: Duration) -> Result<Vec<u32>> {
        if self.is_broken() {
            return Ok(self.failed_ranks());
        }
        self.run(|engine, _| Ok(engine.missing(wait)))?
    }

    pub(crate) fn is_broken(&self) -> bool {
        lock(&self.turns).broken.is_some()
    }

    /// Rejects further operations and sends the peers a goodbye. Fails queued operations and waits
    /// for the worker.
    pub(crate) fn close(&self, reason: &str) {
        let worker = {
            let mut turns = lock(&self.turns);
            turns.closing = true;
            turns.worker.take()
        };
        let busy = {
            let turns = lock(&self.turns);
            turns.serving != turns.next
        };
        if busy {
            self.wake.give_up(reason);
        }
        self.turned.notify_all();
        if let Some(worker) = worker {
            // A panic of the worker has shown in the operation that it ran.
            let _ = worker.join();
        }
        let mut engine = lock(&self.engine);
        let mut turns = lock(&self.turns);
        if turns.broken.is_none() {
            turns.broken = Some(reason.to_owned());
            drop(turns);
            engine.leave();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::{HashStore, MeshGroup, MeshOptions};

    const PATIENCE: Duration = Duration::from_secs(120);

    #[test]
    fn a_panic_of_the_worker_ends_what_waits_behind_it() {
        let store = Arc::new(HashStore::new());
        let group = MeshGroup::new(store, 0, 1, "g", MeshOptions::default()).unwrap();
        let core = group.core.clone();
        let engine = lock(&core.engine);
        // The worker panics once it has the engine, because this rank's part is missing.
        let mut works = vec![core.start(Call::AllToAll { parts: Vec::new() }, PATIENCE)];
        let (ended, outcomes) = mpsc::channel();
        for _ in 0..2 {
            let (caller, ended) = (core.clone(), ended.clone());
            let before = lock(&core.turns).next;
            std::thread::spawn(move || ended.send(caller.call(Call::Barrier, PATIENCE)));
            while lock(&core.turns).next == before {
                std::thread::yield_now();
            }
            works.push(core.start(Call::Barrier, PATIENCE));
        }
        drop(engine);
        for work in works {
            assert!(work.wait_timeout(PATIENCE) && work.error().is_some());
        }
        for _ in 0..2 {
            assert!(outcomes.recv_timeout(PATIENCE).unwrap().is_err());
        }
    }
}

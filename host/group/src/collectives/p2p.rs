//! Send and receive: any number of them under way at the same time.

use std::time::{Duration, Instant};

use crate::call::{CallResult, Message, Operation, P2p};
use crate::error::Result;
use crate::mesh::{Current, Engine, Signature};
use crate::recorder::Recorder;

/// A batch of sends and receives.
pub(crate) struct Batch {
    key: u64,
    start: Instant,
    timeout: Duration,
    list: Vec<P2p>,
    /// One for each receive, in order.
    received: Vec<Option<Message>>,
    posted: bool,
}

impl Batch {
    pub(crate) fn new(key: u64, list: Vec<P2p>, timeout: Duration) -> Batch {
        let receives = list.iter().filter(|one| matches!(one, P2p::Recv { .. })).count();
        Batch { key, start: Instant::now(), timeout, list, received: vec![None; receives], posted: false }
    }

    fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.start.elapsed())
    }

    /// Takes received messages; true when all is done. Records the ranks still awaited.
    fn advance(&mut self, engine: &mut Engine) -> Result<bool> {
        if !self.posted {
            self.posted = true;
            for one in &self.list {
                if let P2p::Send { to, tag, data } = one {
                    engine.send_message(*to, *tag, data)?;
                }
            }
        }
        let mut done = true;
        let mut slots = self.received.iter_mut();
        for one in &self.list {
            match one {
                P2p::Send { to, .. } if *to != engine.rank && !engine.flushed(*to) => {
                    engine.waiting.push(*to);
                    done = false;
                }
                P2p::Send { .. } => {}
                P2p::Recv { from, tag } => {
                    let Some(slot) = slots.next() else { continue };
                    if slot.is_none() {
                        *slot = engine.take_message(*from, *tag)?;
                    }
                    if slot.is_none() {
                        done = false;
                        let (rank, size) = (engine.rank, engine.size);
                        match from {
                            Some(from) => engine.waiting.push(*from),
                            None => engine.waiting.extend((0..size).filter(|peer| *peer != rank)),
                        }
                    }
                }
            }
        }
        Ok(done)
    }

    fn outcome(self) -> CallResult {
        CallResult::Messages(self.received.into_iter().flatten().collect())
    }
}

/// Runs `first`, and the operations that `more` gives meanwhile, until all are done. `done` gets
/// each as it ends, with its key. Each has its own deadline, and the first to pass ends all.
pub(crate) fn run(
    engine: &mut Engine,
    recorder: &Recorder,
    sequence: u64,
    first: (u64, Vec<P2p>),
    timeout: Duration,
    mut more: impl FnMut() -> Vec<(u64, Vec<P2p>, Duration)>,
    mut done: impl FnMut(u64, CallResult),
) -> Result<()> {
    let bytes = |list: &[P2p]| -> u64 {
        list.iter().map(|one| if let P2p::Send { data, .. } = one { data.len() as u64 } else { 0 }).sum()
    };
    recorder.start(sequence, Operation::PointToPoint, bytes(&first.1), None, None);
    let signature = Signature::new(Operation::PointToPoint);
    engine.current = Some(Current { sequence, signature, start: Instant::now(), timeout });
    let mut batches = vec![Batch::new(first.0, first.1, timeout)];
    let outcome = engine.wait(|engine| {
        batches.extend(more().into_iter().map(|(key, list, timeout)| Batch::new(key, list, timeout)));
        engine.waiting.clear();
        let mut index = 0;
        while index < batches.len() {
            if batches[index].advance(engine)? {
                let batch = batches.remove(index);
                done(batch.key, batch.outcome());
            } else {
                index += 1;
            }
        }
        // The wait lasts until the next deadline. An error then names the ranks of that batch.
        if let (Some(next), Some(current)) =
            (batches.iter_mut().min_by_key(|batch| batch.left()), &mut engine.current)
        {
            (current.start, current.timeout) = (next.start, next.timeout);
            if next.left().is_zero() {
                engine.waiting.clear();
                next.advance(engine)?;
            }
        }
        Ok(batches.is_empty())
    });
    engine.waiting.clear();
    if outcome.is_ok() {
        engine.current = None;
    }
    let error = outcome.as_ref().err().map(ToString::to_string);
    recorder.end(error.as_deref());
    outcome
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::call::Call;
    use crate::{HashStore, MeshGroup, MeshOptions, ProcessGroup as _};

    const PATIENCE: Duration = Duration::from_secs(120);

    #[test]
    fn a_receive_in_vain_ends_at_its_deadline_though_others_keep_coming() {
        let store = Arc::new(HashStore::new());
        let join = |rank| MeshGroup::new(store.clone(), rank, 3, "g", MeshOptions::default()).unwrap();
        let groups = [0, 1, 2].map(join);
        let call = |one, timeout| groups[0].start(Call::P2p(vec![one]), timeout);
        let received = call(P2p::Recv { from: Some(2), tag: 1 }, Duration::from_millis(500));
        let (start, mut tag) = (Instant::now(), 0);
        while !received.is_completed() && start.elapsed() < PATIENCE / 4 {
            tag += 1;
            let sent = call(P2p::Send { to: 1, tag, data: vec![0] }, PATIENCE);
            sent.wait_timeout(Duration::from_millis(20));
        }
        assert!(received.is_completed(), "{tag} sends later");
        let error = received.error().unwrap().to_string();
        assert!(error.contains("timed out after 500ms waiting for rank 2:"), "{error}");
    }
}

//! Send and receive: any number of them under way at the same time.

use std::time::{Duration, Instant};

use crate::call::{CallResult, Message, Operation, P2p};
use crate::error::Result;
use crate::mesh::{Current, Engine, Signature};
use crate::recorder::Recorder;

/// A batch of sends and receives.
pub(crate) struct Batch {
    list: Vec<P2p>,
    /// One for each receive, in order.
    received: Vec<Option<Message>>,
    posted: bool,
}

impl Batch {
    pub(crate) fn new(list: Vec<P2p>) -> Batch {
        let receives = list.iter().filter(|one| matches!(one, P2p::Recv { .. })).count();
        Batch { list, received: vec![None; receives], posted: false }
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
/// each as it ends, with its key.
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
    let mut batches = vec![(first.0, Batch::new(first.1))];
    let outcome = engine.wait(|engine| {
        for (key, list, timeout) in more() {
            batches.push((key, Batch::new(list)));
            if let Some(current) = &mut engine.current {
                (current.start, current.timeout) = (Instant::now(), current.timeout.max(timeout));
            }
        }
        engine.waiting.clear();
        let mut index = 0;
        while index < batches.len() {
            if batches[index].1.advance(engine)? {
                let (key, batch) = batches.remove(index);
                done(key, batch.outcome());
            } else {
                index += 1;
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

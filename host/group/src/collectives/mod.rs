//! The collectives over the mesh: trees for what has a root, doubling for what is small, rings for
//! what is large.

pub(super) mod blocks;
pub(crate) mod p2p;
mod reductions;
mod rooted;
mod run;

use std::time::Duration;

use self::run::Run;
use super::call::{Call, CallResult};
use super::mesh::{Engine, Signature};
use super::recorder::Recorder;
use crate::error::{Error, Result};

impl Run<'_> {
    /// Dissemination: in round `k` each rank signals the rank 2^k after it.
    pub(crate) fn barrier(&mut self) -> Result<()> {
        let mut distance = 1;
        while distance < self.size {
            let to = (self.rank + distance) % self.size;
            let from = (self.rank + self.size - distance) % self.size;
            self.swap(to, &[], from)?;
            distance *= 2;
        }
        Ok(())
    }

    /// Each rank signals every other, so that each can name all missing ranks.
    fn monitored_barrier(&mut self) -> Result<()> {
        let others: Vec<u32> = (0..self.size).filter(|peer| *peer != self.rank).collect();
        let sends: Vec<(u32, &[u8])> = others.iter().map(|peer| (*peer, &[][..])).collect();
        self.engine.exchange(&sends, &others).map(drop)
    }

    fn run(&mut self, call: Call) -> Result<CallResult> {
        Ok(match call {
            Call::Barrier => {
                self.barrier()?;
                CallResult::Done
            }
            Call::MonitoredBarrier => {
                self.monitored_barrier()?;
                CallResult::Done
            }
            Call::Broadcast { root, data } => CallResult::Data(self.broadcast(root, data)?),
            Call::AllGather { data } => CallResult::Parts(self.all_gather(data)?),
            Call::Gather { root, data } => {
                self.gather(root, data)?.map_or(CallResult::Done, CallResult::Parts)
            }
            Call::Scatter { root, parts } => CallResult::Data(self.scatter(root, parts)?),
            Call::Reduce { root, data, dtype, op } => {
                self.reduce(root, data, dtype, op)?.map_or(CallResult::Done, CallResult::Data)
            }
            Call::AllReduce { data, dtype, op } => CallResult::Data(self.all_reduce(data, dtype, op)?),
            Call::ReduceScatter { data, counts, dtype, op } => {
                CallResult::Data(self.reduce_scatter(data, &counts, dtype, op)?)
            }
            Call::AllToAll { parts } => CallResult::Parts(self.all_to_all(parts)?),
            Call::P2p(_) | Call::Coalesced(_) => {
                return Err(Error::argument("call", "a batch", "runs on its own, not inside a collective"));
            }
        })
    }
}

/// Runs one collective from start to end, recording it.
pub(crate) fn perform(
    engine: &mut Engine,
    recorder: &Recorder,
    call: Call,
    timeout: Duration,
) -> Result<CallResult> {
    match call {
        Call::Coalesced(calls) => coalesced(engine, recorder, calls, timeout),
        call => {
            let mut signature = Signature::new(call.operation());
            let mut reduction = None;
            match &call {
                Call::Broadcast { root, .. } | Call::Gather { root, .. } | Call::Scatter { root, .. } => {
                    signature.root = Some(*root);
                }
                Call::Reduce { root, data, dtype, op } => {
                    (signature.root, signature.bytes) = (Some(*root), Some(data.len() as u64));
                    (signature.dtype, signature.reduce) = (*dtype, *op);
                }
                Call::AllReduce { data, dtype, op } | Call::ReduceScatter { data, dtype, op, .. } => {
                    signature.bytes = Some(data.len() as u64);
                    (signature.dtype, signature.reduce) = (*dtype, *op);
                }
                _ => {}
            }
            if signature.bytes.is_some() {
                reduction = Some(format!("{} {}", signature.dtype, signature.reduce));
            }
            let bytes = call.bytes();
            within(engine, recorder, signature, bytes, reduction, timeout, |run| run.run(call))
        }
    }
}

/// Runs `body` as one operation.
pub(crate) fn within<T>(
    engine: &mut Engine,
    recorder: &Recorder,
    signature: Signature,
    bytes: u64,
    reduction: Option<String>,
    timeout: Duration,
    body: impl FnOnce(&mut Run<'_>) -> Result<T>,
) -> Result<T> {
    recorder.start(engine.next_sequence, signature.operation, bytes, signature.root, reduction);
    engine.begin(signature, timeout);
    let (rank, size) = (engine.rank, engine.size);
    let outcome = engine.check_given_up().and_then(|()| body(&mut Run { engine: &mut *engine, rank, size }));
    engine.waiting.clear();
    if outcome.is_ok() {
        engine.current = None;
    }
    let error = outcome.as_ref().err().map(ToString::to_string);
    recorder.end(error.as_deref());
    outcome
}

/// Runs the calls one after the other; neighbouring all-reduces of one kind as one.
fn coalesced(
    engine: &mut Engine,
    recorder: &Recorder,
    calls: Vec<Call>,
    timeout: Duration,
) -> Result<CallResult> {
    let mut outcomes = Vec::with_capacity(calls.len());
    let mut calls = calls.into_iter().peekable();
    while let Some(call) = calls.next() {
        let Call::AllReduce { mut data, dtype, op } = call else {
            outcomes.push(perform(engine, recorder, call, timeout)?);
            continue;
        };
        let mut ends = vec![data.len()];
        let same =
            |next: &Call| matches!(next, Call::AllReduce { dtype: d, op: o, .. } if (*d, *o) == (dtype, op));
        while let Some(Call::AllReduce { data: more, .. }) = calls.next_if(same) {
            data.extend_from_slice(&more);
            ends.push(data.len());
        }
        let whole = perform(engine, recorder, Call::AllReduce { data, dtype, op }, timeout)?.data()?;
        let mut start = 0;
        for end in ends {
            outcomes.push(CallResult::Data(whole[start..end].to_vec()));
            start = end;
        }
    }
    Ok(CallResult::Several(outcomes))
}

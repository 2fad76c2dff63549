//! Collectives over slices and over types that serde serialises.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::ProcessGroup;
use super::call::{Call, CallResult, Message, P2p};
use super::element::{ReduceOp, Reducible};
use super::work::Work;
use crate::error::{Error, Result};

/// The collectives of a [`ProcessGroup`] with types. Every group implements the trait, `dyn` ones
/// included.
///
/// All but the getters and send/recv are collective: every rank makes the same call, in the same
/// order. The `start_*` ones run in the background, in the order of the calls, and give their
/// result through [`Work::wait`].
pub trait Collectives: ProcessGroup {
    /// A barrier whose error names every rank that did not arrive within `timeout`.
    fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        self.call(Call::MonitoredBarrier, timeout).map(drop)
    }

    /// Overwrites `data` with that of `root`, which has as many elements.
    fn broadcast_slice<T: Reducible>(&self, root: u32, data: &mut [T]) -> Result<()> {
        let bytes = if self.rank() == root { bytes(data) } else { Vec::new() };
        let out = self.call(Call::Broadcast { root, data: bytes }, self.timeout())?.data()?;
        fill(data, &out)
    }

    /// Every rank's elements, by rank. Lengths may differ.
    fn all_gather_slices<T: Reducible>(&self, data: &[T]) -> Result<Vec<Vec<T>>> {
        elements_of(self.call(Call::AllGather { data: bytes(data) }, self.timeout())?.parts()?)
    }

    /// Every rank's elements, by rank, on `root`. Lengths may differ.
    fn gather<T: Reducible>(&self, root: u32, data: &[T]) -> Result<Option<Vec<Vec<T>>>> {
        match self.call(Call::Gather { root, data: bytes(data) }, self.timeout())? {
            CallResult::Done => Ok(None),
            outcome => elements_of(outcome.parts()?).map(Some),
        }
    }

    /// This rank's part of the `parts` of `root`, one for each rank. The others' `parts` are
    /// ignored.
    fn scatter<T: Reducible>(&self, root: u32, parts: &[Vec<T>]) -> Result<Vec<T>> {
        let parts =
            if self.rank() == root { parts.iter().map(|part| bytes(part)).collect() } else { Vec::new() };
        elements(&self.call(Call::Scatter { root, parts }, self.timeout())?.data()?)
    }

    /// Reduces `data` elementwise into that of `root`; the others' stays as it is.
    fn reduce<T: Reducible>(&self, root: u32, data: &mut [T], op: ReduceOp) -> Result<()> {
        match self.call(Call::Reduce { root, data: bytes(data), dtype: T::DTYPE, op }, self.timeout())? {
            CallResult::Done => Ok(()),
            outcome => fill(data, &outcome.data()?),
        }
    }

    /// Reduces `data` elementwise, into that of every rank.
    fn all_reduce<T: Reducible>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        let call = Call::AllReduce { data: bytes(data), dtype: T::DTYPE, op };
        fill(data, &self.call(call, self.timeout())?.data()?)
    }

    /// Reduces several slices, which are sent as one.
    fn all_reduce_coalesced<T: Reducible>(&self, all: &mut [&mut [T]], op: ReduceOp) -> Result<()> {
        let call = |data: &&mut [T]| Call::AllReduce { data: bytes(data), dtype: T::DTYPE, op };
        let calls = Call::Coalesced(all.iter().map(call).collect());
        for (data, outcome) in all.iter_mut().zip(self.call(calls, self.timeout())?.several()?) {
            fill(data, &outcome.data()?)?;
        }
        Ok(())
    }

    /// Reduces `data` elementwise; rank `r` gets the `r`-th piece, of `counts[r]` elements.
    fn reduce_scatter<T: Reducible>(&self, data: &[T], counts: &[usize], op: ReduceOp) -> Result<Vec<T>> {
        // Bytes that saturate are more than any data has.
        let size = size_of::<T>() as u64;
        let counts = counts.iter().map(|count| (*count as u64).saturating_mul(size)).collect();
        let call = Call::ReduceScatter { data: bytes(data), counts, dtype: T::DTYPE, op };
        elements(&self.call(call, self.timeout())?.data()?)
    }

    /// Sends part `p` to rank `p`; returns the parts for this rank, by rank. Lengths may differ.
    fn all_to_all<T: Reducible>(&self, parts: &[Vec<T>]) -> Result<Vec<Vec<T>>> {
        let parts = parts.iter().map(|part| bytes(part)).collect();
        elements_of(self.call(Call::AllToAll { parts }, self.timeout())?.parts()?)
    }

    /// All-to-all over one slice: `input` is cut by `input_splits` (elements for each rank),
    /// `output` is filled by `output_splits` (elements of each rank). Empty splits cut evenly.
    fn all_to_all_single<T: Reducible>(
        &self,
        output: &mut [T],
        input: &[T],
        output_splits: &[usize],
        input_splits: &[usize],
    ) -> Result<()> {
        let size = self.size() as usize;
        let output_splits = splits("output_splits", output.len(), output_splits, size)?;
        let input_splits = splits("input_splits", input.len(), input_splits, size)?;
        let mut rest = input;
        let mut parts = Vec::with_capacity(size);
        for split in input_splits {
            let (part, tail) = rest.split_at(split);
            parts.push(bytes(part));
            rest = tail;
        }
        let mut rest = output;
        let received = self.call(Call::AllToAll { parts }, self.timeout())?.parts()?;
        for (peer, (part, split)) in (0u32..).zip(received.iter().zip(output_splits)) {
            let (into, tail) = rest.split_at_mut(split);
            if part.len() != size_of_val(into) {
                return Err(Error::Mismatch {
                    rank: self.rank(),
                    peer,
                    what: "the split",
                    ours: format!("{} bytes", size_of_val(into)),
                    theirs: format!("{} bytes", part.len()),
                });
            }
            fill(into, part)?;
            rest = tail;
        }
        Ok(())
    }

    /// Sends `data` to rank `to`. Returns when the network has it.
    fn send<T: Reducible>(&self, to: u32, tag: u64, data: &[T]) -> Result<()> {
        let send = P2p::Send { to, tag, data: bytes(data) };
        self.call(Call::P2p(vec![send]), self.timeout()).map(drop)
    }

    /// The next message under `tag` of `from`, or of any rank.
    fn recv<T: Reducible>(&self, from: Option<u32>, tag: u64) -> Result<Message<Vec<T>>> {
        let messages = self.call(Call::P2p(vec![P2p::Recv { from, tag }]), self.timeout())?.messages()?;
        typed(only(messages)?)
    }

    /// [`Collectives::all_reduce`] in the background.
    fn start_all_reduce<T: Reducible>(&self, data: Vec<T>, op: ReduceOp) -> Work<Vec<T>> {
        let call = Call::AllReduce { data: bytes(&data), dtype: T::DTYPE, op };
        self.start(call, self.timeout()).map(|outcome| elements(&outcome.data()?))
    }

    /// [`Collectives::all_gather_slices`] in the background.
    fn start_all_gather<T: Reducible>(&self, data: &[T]) -> Work<Vec<Vec<T>>> {
        let call = Call::AllGather { data: bytes(data) };
        self.start(call, self.timeout()).map(|outcome| elements_of(outcome.parts()?))
    }

    /// [`Collectives::broadcast_slice`] in the background; `data` is ignored outside `root`.
    fn start_broadcast<T: Reducible>(&self, root: u32, data: &[T]) -> Work<Vec<T>> {
        let data = if self.rank() == root { bytes(data) } else { Vec::new() };
        self.start(Call::Broadcast { root, data }, self.timeout()).map(|outcome| elements(&outcome.data()?))
    }

    /// A barrier in the background.
    fn start_barrier(&self) -> Work<()> {
        self.start(Call::Barrier, self.timeout()).map(|_| Ok(()))
    }

    /// [`Collectives::send`] in the background.
    fn start_send<T: Reducible>(&self, to: u32, tag: u64, data: &[T]) -> Work<()> {
        let send = P2p::Send { to, tag, data: bytes(data) };
        self.start(Call::P2p(vec![send]), self.timeout()).map(|_| Ok(()))
    }

    /// [`Collectives::recv`] in the background.
    fn start_recv<T: Reducible>(&self, from: Option<u32>, tag: u64) -> Work<Message<Vec<T>>> {
        let recv = Call::P2p(vec![P2p::Recv { from, tag }]);
        self.start(recv, self.timeout()).map(|outcome| typed(only(outcome.messages()?)?))
    }

    /// Sends the object of `root` to all ranks. The others' is ignored.
    fn broadcast_object<T: Serialize + DeserializeOwned>(&self, root: u32, object: &T) -> Result<T> {
        let data = if self.rank() == root { encode(object)? } else { Vec::new() };
        decode(root, &self.call(Call::Broadcast { root, data }, self.timeout())?.data()?)
    }

    /// Every rank's object, by rank.
    fn all_gather_object<T: Serialize + DeserializeOwned>(&self, object: &T) -> Result<Vec<T>> {
        let all = self.call(Call::AllGather { data: encode(object)? }, self.timeout())?.parts()?;
        (0u32..).zip(all).map(|(peer, data)| decode(peer, &data)).collect()
    }

    /// Every rank's object, by rank, on `root`.
    fn gather_object<T: Serialize + DeserializeOwned>(
        &self,
        root: u32,
        object: &T,
    ) -> Result<Option<Vec<T>>> {
        match self.call(Call::Gather { root, data: encode(object)? }, self.timeout())? {
            CallResult::Done => Ok(None),
            outcome => {
                let all = (0u32..).zip(outcome.parts()?);
                all.map(|(peer, data)| decode(peer, &data)).collect::<Result<_>>().map(Some)
            }
        }
    }

    /// This rank's object of those that `root` has, one for each rank.
    fn scatter_object<T: Serialize + DeserializeOwned>(&self, root: u32, objects: &[T]) -> Result<T> {
        let parts =
            if self.rank() == root { objects.iter().map(encode).collect::<Result<_>>()? } else { Vec::new() };
        decode(root, &self.call(Call::Scatter { root, parts }, self.timeout())?.data()?)
    }

    /// Sends an object to rank `to`.
    fn send_object<T: Serialize>(&self, to: u32, tag: u64, object: &T) -> Result<()> {
        let send = P2p::Send { to, tag, data: encode(object)? };
        self.call(Call::P2p(vec![send]), self.timeout()).map(drop)
    }

    /// The next object under `tag` of `from`, or of any rank.
    fn recv_object<T: DeserializeOwned>(&self, from: Option<u32>, tag: u64) -> Result<Message<T>> {
        let messages = self.call(Call::P2p(vec![P2p::Recv { from, tag }]), self.timeout())?.messages()?;
        let Message { from, tag, data } = only(messages)?;
        Ok(Message { from, tag, data: decode(from, &data)? })
    }
}

impl<G: ProcessGroup + ?Sized> Collectives for G {}

fn bytes<T: Reducible>(data: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(data).to_vec()
}

fn elements<T: Reducible>(bytes: &[u8]) -> Result<Vec<T>> {
    if !bytes.len().is_multiple_of(size_of::<T>()) {
        let reason = format!("{} bytes came, which are no whole number of {}", bytes.len(), T::DTYPE);
        return Err(Error::internal("process group", reason));
    }
    Ok(bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
}

fn elements_of<T: Reducible>(parts: Vec<Vec<u8>>) -> Result<Vec<Vec<T>>> {
    parts.iter().map(|part| elements(part)).collect()
}

fn fill<T: Reducible>(into: &mut [T], from: &[u8]) -> Result<()> {
    let into: &mut [u8] = bytemuck::cast_slice_mut(into);
    if into.len() != from.len() {
        let rule = format!("{} bytes came; every rank passes as many elements", from.len());
        return Err(Error::argument("data", format!("{} bytes", into.len()), rule));
    }
    into.copy_from_slice(from);
    Ok(())
}

fn splits(argument: &'static str, len: usize, splits: &[usize], size: usize) -> Result<Vec<usize>> {
    if splits.is_empty() && len.is_multiple_of(size) {
        return Ok(vec![len / size; size]);
    }
    let sum = splits.iter().try_fold(0usize, |sum, split| sum.checked_add(*split));
    if splits.len() != size || sum != Some(len) {
        let rule = format!("must be {size} counts that add up to {len}, or none where {len} divides evenly");
        return Err(Error::argument(argument, format!("{splits:?}"), rule));
    }
    Ok(splits.to_vec())
}

fn only(mut messages: Vec<Message>) -> Result<Message> {
    messages.pop().ok_or_else(|| Error::internal("recv", "the backend gave no message"))
}

fn typed<T: Reducible>(message: Message) -> Result<Message<Vec<T>>> {
    Ok(Message { from: message.from, tag: message.tag, data: elements(&message.data)? })
}

fn encode<T: Serialize>(object: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(object).map_err(|error| Error::os("serialise", error))
}

fn decode<T: DeserializeOwned>(peer: u32, data: &[u8]) -> Result<T> {
    serde_json::from_slice(data)
        .map_err(|error| Error::os("deserialise", format!("the object of rank {peer}: {error}")))
}

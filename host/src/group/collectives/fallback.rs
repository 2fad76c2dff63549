//! The collectives of a group that has only all-gather, such as one whose ranks run one at a time.

use std::time::Duration;

use super::{Call, CallResult, blocks};
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::group::element;

/// Runs `call` with what every group has. Meant for small data: everything goes everywhere.
pub(crate) fn call<G: ProcessGroup + ?Sized>(group: &G, call: Call, timeout: Duration) -> Result<CallResult> {
    let (rank, size) = (group.rank() as usize, group.size());
    call.check(group.rank(), size)?;
    let short = |peer: u32, ours: usize, theirs: usize| Error::Mismatch {
        rank: rank as u32,
        peer,
        what: "the size",
        ours: format!("{ours} bytes"),
        theirs: format!("{theirs} bytes"),
    };
    let reduced = |data: &[u8], dtype, op| -> Result<Vec<u8>> {
        let mut all = (0u32..).zip(group.all_gather(data)?);
        let mut sum = all.next().map(|(_, first)| first).unwrap_or_default();
        for (peer, theirs) in all {
            if theirs.len() != data.len() || sum.len() != data.len() {
                return Err(short(peer, data.len(), theirs.len()));
            }
            element::reduce(dtype, op, &mut sum, &theirs, true);
        }
        element::finish(dtype, op, &mut sum, size);
        Ok(sum)
    };
    let unpack = |payload: &[u8]| {
        blocks::unpack(payload, size as usize)
            .ok_or_else(|| Error::os("process group", "a peer's parts do not fit the group"))
    };
    Ok(match call {
        Call::Barrier | Call::MonitoredBarrier => {
            group.barrier(timeout)?;
            CallResult::Done
        }
        Call::Broadcast { root, data } => CallResult::Data(group.broadcast(root, &data)?),
        Call::AllGather { data } => CallResult::Parts(group.all_gather(&data)?),
        Call::Gather { root, data } => {
            let all = group.all_gather(&data)?;
            if root as usize == rank { CallResult::Parts(all) } else { CallResult::Done }
        }
        Call::Scatter { root, parts } => {
            let all = group.broadcast(root, &blocks::pack(parts.iter().map(Vec::as_slice)))?;
            CallResult::Data(unpack(&all)?.swap_remove(rank))
        }
        Call::Reduce { root, data, dtype, op } => {
            let data = reduced(&data, dtype, op)?;
            if root as usize == rank { CallResult::Data(data) } else { CallResult::Done }
        }
        Call::AllReduce { data, dtype, op } => CallResult::Data(reduced(&data, dtype, op)?),
        Call::ReduceScatter { data, counts, dtype, op } => {
            let data = reduced(&data, dtype, op)?;
            let start: u64 = counts[..rank].iter().sum();
            CallResult::Data(data[start as usize..(start + counts[rank]) as usize].to_vec())
        }
        Call::AllToAll { parts } => {
            let all = group.all_gather(&blocks::pack(parts.iter().map(Vec::as_slice)))?;
            let mine = all.iter().map(|theirs| Ok(unpack(theirs)?.swap_remove(rank)));
            CallResult::Parts(mine.collect::<Result<_>>()?)
        }
        Call::P2p(_) => {
            let reason = "this backend has no send and receive; use a MeshGroup";
            return Err(Error::Unavailable { what: "send/recv".to_owned(), reason: reason.to_owned() });
        }
        Call::Coalesced(calls) => {
            let each = calls.into_iter().map(|call| self::call(group, call, timeout));
            CallResult::Several(each.collect::<Result<_>>()?)
        }
    })
}

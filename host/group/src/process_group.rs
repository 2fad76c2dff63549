//! [`ProcessGroup`], and its operations where a group has only all-gather.

use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use super::JobSecret;
use super::call::{Call, CallResult};
use super::collectives::blocks;
use super::element;
use super::work::Work;
use crate::error::{Error, Result};

/// Ranks that make the same calls in the same order.
///
/// Every method but the getters and [`ProcessGroup::missing_ranks`] is collective. Each rank of the
/// group makes the same call, and none returns before the ranks it needs data from have made it. A
/// call that fails on one rank leaves the group unusable there, because the ranks no longer agree
/// on the next call. From then on every call returns an error with that reason.
pub trait ProcessGroup: Send + Sync + Debug {
    /// This rank, `0..size()`.
    fn rank(&self) -> u32;

    /// The number of ranks, at least 1.
    fn size(&self) -> u32;

    /// How long a collective waits for the other ranks.
    fn timeout(&self) -> Duration;

    /// Returns once every rank has called it; `timeout` may differ from [`ProcessGroup::timeout`].
    ///
    /// # Errors
    /// [`Error::Group`](crate::Error::Group) where a rank does not come in time, has failed, or has
    /// aborted the group.
    fn barrier(&self, timeout: Duration) -> Result<()>;

    /// Every rank's bytes, indexed by rank. Lengths may differ between ranks.
    ///
    /// # Errors
    /// [`Error::Group`](crate::Error::Group) where a rank does not come in time, has failed, or has
    /// aborted the group.
    fn all_gather(&self, data: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// The bytes of `root`. The other ranks' `data` is ignored.
    ///
    /// # Errors
    /// [`Error::Group`](crate::Error::Group) where a rank does not come in time, has failed, or has
    /// aborted the group.
    fn broadcast(&self, root: u32, data: &[u8]) -> Result<Vec<u8>>;

    /// Gives every rank a duplicate of every rank's descriptors, indexed by rank and then in the
    /// order passed; the own entry is duplicated too. At most [`MAX_FDS`](super::MAX_FDS) per rank;
    /// counts may differ between ranks. The results are close-on-exec.
    ///
    /// # Errors
    /// As of [`ProcessGroup::all_gather`]; also [`Error::Argument`](crate::Error::Argument) where
    /// there are too many, and [`Error::Os`](crate::Error::Os) where ranks are on several hosts or
    /// descriptors are exhausted.
    fn exchange_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<Vec<Vec<OwnedFd>>>;

    /// The group of those ranks that give the same `color`, in the order of their ranks.
    /// Collective.
    ///
    /// # Errors
    /// By default [`Error::Unavailable`]: not every group can be split.
    fn split(&self, _color: u64) -> Result<Arc<dyn ProcessGroup>> {
        Err(Error::Unavailable {
            what: format!("a part of group {:?}", self.name()),
            reason: format!("its backend, {}, cannot split it; use a MeshGroup", self.backend()),
        })
    }

    /// The group's name.
    fn name(&self) -> &str {
        "world"
    }

    /// The back end of its operations: `mesh` for sockets between the ranks, `store` for a shared
    /// board.
    fn backend(&self) -> &'static str {
        "store"
    }

    /// Its purpose, as its creator described it; may be empty.
    fn description(&self) -> &str {
        ""
    }

    /// The secret of the members, if they have one: connections set up over the group require it.
    /// By default the environment's ([`JobSecret::from_env`]).
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) where it is malformed.
    fn job_secret(&self) -> Result<Option<JobSecret>> {
        JobSecret::from_env()
    }

    /// True if all members are certainly on one host, so that no address has to be reachable from
    /// another. By default false.
    fn shares_host(&self) -> bool {
        false
    }

    /// Network interface, or its address, by which other hosts reach this rank. Connections set up
    /// over the group use it. `None`, the default: the environment's
    /// [`SOCKET_IFNAME`](super::SOCKET_IFNAME), else the interface of the default route.
    fn interface(&self) -> Option<&str> {
        None
    }

    /// The rank of `rank` in the first group, which this one was made from; `None` outside the
    /// group.
    fn global_rank(&self, rank: u32) -> Option<u32> {
        Some(rank).filter(|rank| *rank < self.size())
    }

    /// The rank in this group of `global` in the first group, if it is a member.
    fn group_rank(&self, global: u32) -> Option<u32> {
        Some(global).filter(|rank| *rank < self.size())
    }

    /// Runs an operation. [`Collectives`](super::Collectives) has all of them with types.
    ///
    /// The default uses [`ProcessGroup::all_gather`], which has its own timeout, and has no send
    /// and receive.
    #[doc(hidden)]
    fn call(&self, call: Call, timeout: Duration) -> Result<CallResult> {
        call_by_gathering(self, call, timeout)
    }

    /// Starts an operation in the background. Operations run in the order of the calls; sends and
    /// receives that directly follow each other run at the same time. The default runs the
    /// operation before it returns.
    #[doc(hidden)]
    fn start(&self, call: Call, timeout: Duration) -> Work {
        Work::ready(self.call(call, timeout))
    }

    /// The ranks that have died or left, or have not joined. Not collective: only this rank checks,
    /// for `wait`, once the calls ahead of this one have ended, or until this rank aborts the
    /// group. Meant for the time after an error such as [`Error::PeerTimeout`], which names one
    /// rank. The result is an argument of
    /// [`MeshGroup::shrink_group`](super::MeshGroup::shrink_group).
    ///
    /// A rank that hangs, or that was stopped, counts as present. So does a rank whose host lost
    /// its network or its power, until the system closes the connection. Once a call of the group
    /// has failed, the ranks are those of
    /// [`MeshGroup::failed_ranks`](super::MeshGroup::failed_ranks), and `wait` is not waited for.
    ///
    /// # Errors
    /// By default [`Error::Unavailable`]: not every group can check. Else the error of the store or
    /// of a socket; the group works as before.
    fn missing_ranks(&self, _wait: Duration) -> Result<Vec<u32>> {
        Err(Error::Unavailable {
            what: format!("the missing ranks of group {:?}", self.name()),
            reason: format!("its backend, {}, does not know them; use a MeshGroup", self.backend()),
        })
    }

    /// Gives the group up: operations under way here and on the other ranks end with an error that
    /// has `reason`, and later ones fail. The default does nothing: calls of the others time out.
    fn abort(&self, _reason: &str) {}

    /// Waits for all ranks and leaves in order; later operations fail. By default a barrier.
    ///
    /// # Errors
    /// As of [`ProcessGroup::barrier`].
    fn destroy(&self) -> Result<()> {
        self.barrier(self.timeout())
    }
}

/// Runs `call` with the methods of every group. Meant for small data, because every rank gathers
/// all data.
fn call_by_gathering<G: ProcessGroup + ?Sized>(
    group: &G,
    call: Call,
    timeout: Duration,
) -> Result<CallResult> {
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
            element::reduce(dtype, op, &mut sum, &theirs);
        }
        element::finish(dtype, op, &mut sum, size);
        Ok(sum)
    };
    let unpack = |payload: &[u8]| {
        blocks::unpack(payload, size as usize)
            .ok_or_else(|| Error::internal("process group", "a peer's parts do not fit the group"))
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
            let each = calls.into_iter().map(|call| call_by_gathering(group, call, timeout));
            CallResult::Several(each.collect::<Result<_>>()?)
        }
    })
}

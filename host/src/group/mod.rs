//! Process groups: how ranks find each other and agree before they share memory.
//!
//! A [`Store`] is a small key-value board that all ranks see: [`HashStore`] for threads of one process, [`FileStore`]
//! for processes that share a directory, [`TcpStore`] for all others, those of PyTorch included; [`PrefixStore`] is a part
//! of another store. A [`ProcessGroup`] is built over it and offers the collectives that setting
//! up a buffer takes. This is the control plane: tokens never go through it.
//!
//! [`rendezvous`] joins the group that the environment names; [`launch`] starts the ranks, as processes or as threads.

mod board;
mod collectives;
mod element;
mod env;
mod fds;
mod file_store;
mod hash_store;
pub mod launch;
mod mesh;
pub(crate) mod mesh_group;
mod prefix_store;
pub(crate) mod recorder;
mod rendezvous;
mod store;
mod subgroups;
pub(crate) mod tcp;
mod turns;
mod typed;
mod work;

use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

pub use collectives::Message;
#[doc(hidden)]
pub use collectives::{Call, CallResult, Operation, P2p};
pub use element::{Element, ReduceOp};
pub use env::{RANK, STORE, WORLD_SIZE};
pub use fds::MAX_FDS;
pub use file_store::FileStore;
pub use hash_store::HashStore;
pub use mesh::{SOCKET_IFNAME, Sockets};
pub(crate) use mesh::{host_id, interface_address};
pub use mesh_group::{MeshGroup, MeshOptions};
pub use prefix_store::PrefixStore;
#[doc(hidden)]
pub use recorder::{FLIGHT_RECORDER, Writer};
pub use rendezvous::{Meeting, Member, rendezvous};
pub use store::Store;
pub use tcp::{DEFAULT_PORT, TcpStore};
pub use typed::Collectives;
pub use work::Work;

use crate::error::Result;

/// Ranks that make the same calls in the same order.
///
/// Every method but the getters is collective: each rank of the group makes the same call, and none returns before
/// the ranks it needs data from have made it. A call that fails on one rank leaves the group unusable there, since
/// the ranks no longer agree on which call comes next; the error says so from then on.
pub trait ProcessGroup: Send + Sync + Debug {
    /// This rank, `0..size()`.
    fn rank(&self) -> u32;

    /// How many ranks there are, at least 1.
    fn size(&self) -> u32;

    /// How long a collective waits for the other ranks.
    fn timeout(&self) -> Duration;

    /// Returns once every rank has called it; `timeout` may differ from [`ProcessGroup::timeout`].
    fn barrier(&self, timeout: Duration) -> Result<()>;

    /// Every rank's bytes, indexed by rank. Lengths may differ between ranks.
    fn all_gather(&self, data: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// The bytes of `root`. The other ranks' `data` is not looked at.
    fn broadcast(&self, root: u32, data: &[u8]) -> Result<Vec<u8>>;

    /// Gives every rank a duplicate of every rank's descriptors, indexed by rank and then in the order passed; the own
    /// entry is duplicated too. At most [`MAX_FDS`] per rank; counts may differ between ranks. The results are
    /// close-on-exec.
    fn exchange_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<Vec<Vec<OwnedFd>>>;

    /// The group of those ranks that give the same `color`, in the order of their ranks. Collective.
    ///
    /// # Errors
    /// By default [`Error::Unavailable`](crate::Error::Unavailable): not every group can be split.
    fn split(&self, _color: u64) -> Result<Arc<dyn ProcessGroup>> {
        Err(crate::error::Error::Unavailable {
            what: format!("a part of group {:?}", self.name()),
            reason: format!("its backend, {}, cannot split it; use a MeshGroup", self.backend()),
        })
    }

    /// The group's name.
    fn name(&self) -> &str {
        "world"
    }

    /// What carries its operations: `mesh` for sockets between the ranks, `store` for a board that all see.
    fn backend(&self) -> &'static str {
        "store"
    }

    /// What it is for, in the words of who made it; may be empty.
    fn description(&self) -> &str {
        ""
    }

    /// The rank of `rank` in the first group, which this one was made from; `None` outside the group.
    fn global_rank(&self, rank: u32) -> Option<u32> {
        Some(rank).filter(|rank| *rank < self.size())
    }

    /// The rank in this group of `global` in the first group, if it is a member.
    fn group_rank(&self, global: u32) -> Option<u32> {
        Some(global).filter(|rank| *rank < self.size())
    }

    /// Runs an operation. [`Collectives`] has all of them with types.
    ///
    /// By default they are made of [`ProcessGroup::all_gather`], which has its own timeout, and there is no send and
    /// receive.
    #[doc(hidden)]
    fn call(&self, call: Call, timeout: Duration) -> Result<CallResult> {
        collectives::fallback::call(self, call, timeout)
    }

    /// Starts an operation, to go on in the background. Operations run in the order of the calls; sends and receives
    /// that directly follow each other run at the same time. By default it is over when this returns.
    #[doc(hidden)]
    fn start(&self, call: Call, timeout: Duration) -> Work {
        Work::ready(self.call(call, timeout))
    }

    /// Gives the group up: operations under way here and on the other ranks end with an error that has `reason`, and
    /// later ones fail. By default nothing: the others see their timeout.
    fn abort(&self, _reason: &str) {}

    /// Waits for all ranks and leaves in order; no operation works from then on. By default a barrier.
    fn destroy(&self) -> Result<()> {
        self.barrier(self.timeout())
    }
}

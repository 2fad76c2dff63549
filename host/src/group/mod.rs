//! Process groups: how ranks find each other and agree before they share memory.
//!
//! A [`Store`] is a small key-value board that all ranks see: [`HashStore`] for threads of one process, [`FileStore`]
//! for processes that share a directory. A [`ProcessGroup`] is built over it and offers the collectives that setting
//! up a buffer takes. This is the control plane: tokens never go through it.
//!
//! [`rendezvous`] joins the group that the environment names; [`launch`] starts the ranks, as processes or as threads.

mod env;
mod fds;
mod file_store;
mod hash_store;
pub mod launch;
mod store;
mod store_group;

use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

pub use env::{RANK, STORE, WORLD_SIZE, rendezvous};
pub use fds::MAX_FDS;
pub use file_store::FileStore;
pub use hash_store::HashStore;
pub use store::Store;
pub use store_group::StoreGroup;

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
}

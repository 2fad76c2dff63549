//! Process groups: how ranks find each other and agree before they share memory.
//!
//! A [`Store`] is a small table of keys and values that all ranks read and write. [`HashStore`] is
//! for threads of one process, [`FileStore`] for processes that share a directory, and [`TcpStore`]
//! for all others, those of PyTorch included. [`PrefixStore`] is a part of another store. A
//! [`ProcessGroup`] is built over a store and offers the collectives that the setup of a buffer
//! needs. This is the control plane: it never carries tokens.
//!
//! Where the job has a [`JobSecret`], stores and groups accept only processes that have it.
//!
//! [`rendezvous`] joins the group that the environment names. [`UniqueId::group`] joins the group
//! of an id that one rank has made, as with NCCL. [`run_threads`] starts ranks as threads of this
//! process, the crate `epoxide-launch` as processes.

mod board;
mod call;
mod collectives;
mod element;
mod env;
mod fds;
mod file_store;
mod hash_store;
#[doc(hidden)]
pub mod internal;
mod mesh;
mod mesh_group;
mod pending;
mod port;
mod prefix_store;
mod process_group;
mod recorder;
mod rendezvous;
mod same_user;
mod secret;
mod store;
mod subgroups;
mod tcp;
mod threads;
mod turns;
mod typed;
mod work;

use epoxide_base::{error, foreign, lock, own_file, virtual_time};

pub use call::Message;
pub use element::{ReduceOp, Reducible};
pub use env::{LOCAL_RANK, LOCAL_WORLD_SIZE, RANK, STORE, WORLD_SIZE};
pub use epoxide_base::{Error, Result, Scope};
pub use fds::MAX_FDS;
pub use file_store::FileStore;
pub use hash_store::HashStore;
pub use mesh::{SOCKET_IFNAME, Sockets};
pub use mesh_group::{Connect, MeshGroup, MeshOptions};
pub use pending::ConnectionLimits;
pub use prefix_store::PrefixStore;
pub use process_group::ProcessGroup;
pub use recorder::{FLIGHT_RECORDER, Writer};
pub use rendezvous::{Member, Rendezvous, UniqueId, rendezvous};
pub use secret::{JOB_SECRET, JOB_SECRET_FILE, JobSecret};
pub use store::Store;
pub use tcp::{DEFAULT_PORT, TcpStore, TcpStoreOptions};
pub use threads::{RankFailure, run_threads};
pub use typed::Collectives;
pub use work::Work;

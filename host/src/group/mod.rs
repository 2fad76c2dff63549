//! Process groups: how ranks find each other and agree before they share memory.
//!
//! A [`Store`] is a small key-value board that all ranks see. [`HashStore`] is for threads of one
//! process, [`FileStore`] for processes that share a directory, and [`TcpStore`] for all others,
//! those of PyTorch included. [`PrefixStore`] is a part of another store. A [`ProcessGroup`] is
//! built over a store and offers the collectives that the setup of a buffer needs. This is the
//! control plane: tokens never go through it.
//!
//! Where the job has a [`JobSecret`], stores and groups let in only processes that know it.
//!
//! [`rendezvous`] joins the group that the environment names; [`launch`] starts the ranks, as
//! processes or as threads.

mod board;
pub(crate) mod call;
mod collectives;
mod element;
mod env;
mod fds;
pub(crate) mod file_store;
mod hash_store;
pub mod launch;
pub(crate) mod mesh;
pub(crate) mod mesh_group;
mod prefix_store;
mod process_group;
pub(crate) mod recorder;
pub(crate) mod rendezvous;
pub(crate) mod same_user;
pub(crate) mod secret;
mod store;
pub(crate) mod strangers;
mod subgroups;
pub(crate) mod tcp;
mod turns;
pub(crate) mod typed;
pub(crate) mod work;

pub use call::Message;
pub use element::{ReduceOp, Reducible};
pub use env::{RANK, STORE, WORLD_SIZE};
pub use fds::MAX_FDS;
pub use file_store::FileStore;
pub use hash_store::HashStore;
pub use mesh::{SOCKET_IFNAME, Sockets};
pub(crate) use mesh::{host_id, interface_address, loopback};
pub use mesh_group::{Connect, MeshGroup, MeshOptions};
pub use prefix_store::PrefixStore;
pub use process_group::ProcessGroup;
pub use recorder::{FLIGHT_RECORDER, Writer};
pub use rendezvous::{Member, Rendezvous, rendezvous};
pub use secret::{JOB_SECRET, JOB_SECRET_FILE, JobSecret};
pub use store::Store;
pub use strangers::ConnectionLimits;
pub use tcp::{DEFAULT_PORT, TcpStore, TcpStoreOptions};
pub use typed::Collectives;
pub use work::Work;

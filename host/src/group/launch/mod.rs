//! Starting the ranks of a group: as threads with [`run_threads`], as processes with
//! [`spawn_ranks`], and as processes under the rules of torchrun with [`Launch`]. The command
//! `epoxide launch` uses [`Launch`].

mod child;
mod exit;
mod heart;
mod launchers;
mod leftovers;
mod phase;
mod plan;
mod port;
mod processes;
mod rank_environment;
mod relay;
mod signals;
mod store_directory;
mod supervisor;
#[cfg(test)]
pub(crate) mod tests;
mod threads;
mod watched;

pub use child::current_exe;
#[doc(hidden)]
pub use child::{die_with_parent, heed_interrupts};
#[doc(hidden)]
pub use exit::{FirstFailure, LaunchEnd};
pub use exit::{RankExit, RankExits};
#[doc(hidden)]
pub use plan::{Launch, Nodes};
#[doc(hidden)]
pub use port::HeldPort;
pub use processes::spawn_ranks;
#[doc(hidden)]
pub use rank_environment::RankEnvironment;
#[doc(hidden)]
pub use relay::Sinks;
#[doc(hidden)]
pub use signals::Signals;
#[doc(hidden)]
pub use store_directory::StoreDirectory;
#[doc(hidden)]
pub use threads::panic_text;
pub use threads::{RankFailure, run_threads};
#[doc(hidden)]
pub use watched::Process;

pub use super::env::{LOCAL_RANK, LOCAL_WORLD_SIZE};
#[doc(hidden)]
pub use super::env::{MASTER_ADDR, MASTER_PORT, RESTART_COUNT};

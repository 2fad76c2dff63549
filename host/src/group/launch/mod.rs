//! Starting the ranks of a group: as threads with [`run_threads`], as processes with [`spawn_ranks`], and as
//! processes under the rules of torchrun with [`Launch`], which `epoxide launch` is the command of.

mod child;
mod exit;
mod launchers;
mod phase;
mod place;
mod plan;
mod port;
mod processes;
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
pub use child::die_with_parent;
pub use exit::{Failure, LaunchEnd, RankExit, RankExits};
pub use place::Place;
pub use plan::{Launch, Nodes};
pub use port::HeldPort;
pub use processes::spawn_ranks;
pub use relay::Sinks;
pub use signals::Signals;
#[doc(hidden)]
pub use store_directory::StoreDirectory;
#[doc(hidden)]
pub use threads::panic_text;
pub use threads::{RankFailure, run_threads};
#[doc(hidden)]
pub use watched::Process;

pub use super::env::{LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, RESTART_COUNT};

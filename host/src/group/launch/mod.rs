//! Starting the ranks of a group: as threads with [`run_threads`], as processes with
//! [`spawn_ranks`]. The command `epoxide launch` starts them under the rules of torchrun.

pub(crate) mod child;
pub(crate) mod exit;
mod heart;
mod launchers;
mod leftovers;
pub(crate) mod plan;
pub(crate) mod port;
mod processes;
pub(crate) mod rank_environment;
pub(crate) mod relay;
pub(crate) mod signals;
pub(crate) mod store_directory;
mod supervisor;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod threads;
pub(crate) mod watched;

pub use child::current_exe;
pub use exit::{RankExit, RankExits};
pub use processes::spawn_ranks;
pub use threads::{RankFailure, run_threads};

pub use super::env::{LOCAL_RANK, LOCAL_WORLD_SIZE};

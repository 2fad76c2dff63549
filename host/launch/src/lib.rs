//! Starting the ranks of a job as processes: [`spawn_ranks`] on this host, and [`Launch`] under the
//! rules of torchrun, on several hosts too. The command `epoxide launch` uses the latter.

mod child;
mod exit;
mod heartbeat;
mod launchers;
mod leftovers;
mod plan;
mod processes;
mod rank_environment;
mod relay;
mod signals;
mod store_directory;
mod supervisor;
#[cfg(test)]
mod tests;
mod watched;

use epoxide_base::{error, foreign, lock, own_file};
use epoxide_group as group;

pub use child::{current_exe, default_interrupts, die_with_parent, one_test};
pub use exit::{FirstFailure, LaunchEnd, RankExit, RankExits};
pub use plan::{Launch, Nodes};
pub use processes::spawn_ranks;
pub use rank_environment::RankEnvironment;
pub use relay::Sinks;
pub use signals::{Signals, default_sigchld};
pub use store_directory::StoreDirectory;
pub use watched::Process;

//! A rank of the check, and what is done with it.

use std::sync::Arc;
use std::time::Duration;

use epoxide::driver::Device;
use epoxide::group::Store;
use epoxide_nccl::Library;

/// Checks of one set of processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// All ranks live.
    Together,
    /// The last rank is killed.
    Killed,
    /// The same, with all of NCCL's traffic on sockets.
    KilledOverSockets,
}

impl Act {
    pub const ALL: [Act; 3] = [Act::Together, Act::Killed, Act::KilledOverSockets];

    pub fn name(self) -> &'static str {
        match self {
            Act::Together => "together",
            Act::Killed => "killed",
            Act::KilledOverSockets => "killed-over-sockets",
        }
    }

    /// NCCL's environment variables.
    pub fn variables(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Act::Together | Act::Killed => &[],
            Act::KilledOverSockets => &[
                ("NCCL_P2P_DISABLE", "1"),
                ("NCCL_SHM_DISABLE", "1"),
                ("NCCL_NET", "Socket"),
                ("NCCL_SOCKET_IFNAME", "lo"),
            ],
        }
    }
}

/// One rank with its resources.
pub struct Rank {
    pub rank: u32,
    pub size: u32,
    pub act: Act,
    pub store: Arc<dyn Store>,
    pub library: Arc<Library>,
    pub device: Device,
    /// Time after which an operation that hangs on purpose is abandoned.
    pub deadline: Duration,
    /// Timeout of all other operations.
    pub timeout: Duration,
    /// Ends this process without a word.
    pub die: fn(),
}

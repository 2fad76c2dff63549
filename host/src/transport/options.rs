//! The choice of transport, and how ranks are connected.

use std::str::FromStr;
use std::time::Duration;

use super::shaping::Shaping;
use super::verbs_options::VerbsOptions;
use crate::error::{Error, Result};
use crate::group::ConnectionLimits;

/// The transport that carries the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TransportKind {
    /// [`TransportKind::Direct`] to the peers whose wire memory can be mapped,
    /// [`TransportKind::Tcp`] to the others.
    Auto,
    /// Kernels write into the peers' wire memory, which is mapped. The ranks are on one host, or in
    /// one NVLink domain whose driver has fabric handles.
    Direct,
    /// Shared host memory: the ranks are on one host and play several nodes. Kernels write into the
    /// peers' memory.
    Shm,
    /// TCP connections between page-locked host memories, over any network.
    Tcp,
    /// RDMA writes by ibverbs, over InfiniBand or RoCE. [`Error::Unavailable`] without the feature
    /// `rdma`, or without a device.
    Verbs,
}

impl TransportKind {
    /// All of them.
    pub const ALL: [TransportKind; 5] = [
        TransportKind::Auto,
        TransportKind::Direct,
        TransportKind::Shm,
        TransportKind::Tcp,
        TransportKind::Verbs,
    ];

    /// Whether ranks whose memory can be mapped write it themselves.
    pub(crate) fn maps_memory(self) -> bool {
        matches!(self, TransportKind::Auto | TransportKind::Direct)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            TransportKind::Auto => "auto",
            TransportKind::Direct => "direct",
            TransportKind::Shm => "shm",
            TransportKind::Tcp => "tcp",
            TransportKind::Verbs => "verbs",
        }
    }
}

impl std::fmt::Display for TransportKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TransportKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<TransportKind> {
        TransportKind::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
            let rule = "give auto, direct (mapped memory), shm (ranks of one host), tcp or verbs (RDMA)";
            Error::argument("transport", text, rule)
        })
    }
}

/// How ranks are connected.
#[derive(Debug, Clone)]
pub struct TransportOptions {
    /// The transport; the same on every rank.
    pub kind: TransportKind,
    /// Queues to each peer that has any, 1 to [`MAX_QUEUES`]; the same on every rank. A queue has
    /// its own thread at the sending end.
    pub queues_per_peer: u32,
    /// With [`TransportKind::Tcp`]: connections of each queue, 1 to [`MAX_CONNECTIONS`]; the same
    /// on every rank. Large puts are divided among them, and each has a thread at either end.
    /// `None`: as many, up to four, as let the threads of all of a rank's connections fit half of
    /// its processors, on the rank that has the fewest; one with a virtual GPU.
    pub connections_per_queue: Option<u32>,
    /// How long a put waits while the network takes none of its bytes. A slow network that takes
    /// some does not end it. A buffer that is dropped waits as long for its last puts, in all.
    pub timeout: Duration,
    /// Limits on connections to the sockets of [`TransportKind::Tcp`] while ranks connect.
    pub limits: ConnectionLimits,
    /// For [`TransportKind::Verbs`]: which devices, and how. `None`: from the environment
    /// ([`VerbsOptions::from_env`]).
    pub verbs: Option<VerbsOptions>,
    /// For epoxide's own tests.
    #[doc(hidden)]
    pub hooks: Hooks,
}

/// Settings of a transport for tests of epoxide.
#[derive(Debug, Clone, Default)]
pub struct Hooks {
    /// Delays, limits or cuts this rank's queues. No effect on kernels that write mapped memory.
    pub shaping: Option<Shaping>,
    /// The host that this rank is on: ranks of differing ones do not share memory by descriptors.
    /// `None`: the system's name. A test plays several hosts with it.
    pub host: Option<String>,
    /// Fewest bytes that a connection of [`TransportKind::Tcp`] has of a divided put.
    pub smallest_part: Option<u64>,
    /// Whether threads of [`TransportKind::Tcp`] poll their sockets before they block.
    pub polls: Option<bool>,
}

/// Most queues to a peer.
pub const MAX_QUEUES: u32 = 64;

/// Most connections of a queue.
pub const MAX_CONNECTIONS: u32 = 16;

impl TransportOptions {
    /// The same with one queue to each peer, which is on the first of the named devices.
    pub(crate) fn with_one_queue(&self) -> TransportOptions {
        let mut one = TransportOptions { queues_per_peer: 1, ..self.clone() };
        // Ranks agree later on an error of the environment.
        if one.kind == TransportKind::Verbs
            && let Ok(mut verbs) = one.verbs.take().map_or_else(VerbsOptions::from_env, Ok)
        {
            verbs.devices.truncate(1);
            one.verbs = Some(verbs);
        }
        one
    }

    /// No shaping, 30 s, the default limits, and enough queues for a fast network: eight if a
    /// processor moves the bytes, one if a card does.
    pub fn new(kind: TransportKind) -> TransportOptions {
        let queues_per_peer = match kind {
            TransportKind::Shm | TransportKind::Tcp | TransportKind::Auto => 8,
            TransportKind::Direct | TransportKind::Verbs => 1,
        };
        TransportOptions {
            kind,
            queues_per_peer,
            connections_per_queue: None,
            timeout: Duration::from_secs(30),
            limits: ConnectionLimits::default(),
            verbs: None,
            hooks: Hooks::default(),
        }
    }
}

//! How a low-latency buffer is made.

use std::time::Duration;

use epoxide_gpu::layout::{FEW_RANKS, LowLatencyCall, MAX_LOCAL_EXPERTS, MAX_MEMBERS, MAX_TOPK, SCALE_BLOCK};

use crate::ep::Topology;
use crate::error::{Error, Result};
use crate::transport::{TransportKind, TransportOptions};

/// Most places of a buffer.
const MAX_PLACES: u32 = 64;

/// How to make a low-latency [`Buffer`](super::Buffer). The same on every rank.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    // The methods of the same names say what these are.
    pub(super) max_tokens: u32,
    pub(super) hidden: u64,
    pub(super) num_topk: u32,
    pub(super) num_experts: u32,
    pub(super) places: u32,
    pub(super) num_sms: Option<u32>,
    pub(super) chunk_tokens: u32,
    packet_tokens: u32,
    pub(super) timeout: Duration,
    pub(super) nan_on_failure: bool,
    pub(super) ranks_per_node: Option<u32>,
    pub(super) keep_nodes: bool,
    pub(super) transport: TransportOptions,
}

impl Options {
    /// [`Options::chunk_tokens`] where nothing else is said.
    pub const DEFAULT_CHUNK_TOKENS: u32 = 1;
    /// [`Options::packet_tokens`] where nothing else is said.
    pub const DEFAULT_PACKET_TOKENS: u32 = 32;

    /// For up to `max_tokens` tokens of a rank, at most 1024, with `hidden` elements and `num_topk` entries each, of `num_experts` experts on
    /// all ranks together. One place, all multiprocessors, 30 s for a peer.
    pub fn new(max_tokens: u32, hidden: u64, num_topk: u32, num_experts: u32) -> Options {
        Options {
            max_tokens,
            hidden,
            num_topk,
            num_experts,
            places: 1,
            num_sms: None,
            chunk_tokens: Self::DEFAULT_CHUNK_TOKENS,
            packet_tokens: Self::DEFAULT_PACKET_TOKENS,
            timeout: Duration::from_secs(30),
            nan_on_failure: true,
            ranks_per_node: None,
            keep_nodes: false,
            transport: TransportOptions::new(TransportKind::Auto),
        }
    }

    /// Places for received rows, 1 to 64: so many dispatches' results can be in use at once. Each takes the pool's memory once more.
    pub fn places(mut self, places: u32) -> Options {
        self.places = places;
        self
    }

    /// Most multiprocessors that an operation takes; without, all of the device.
    pub fn num_sms(mut self, num_sms: u32) -> Options {
        self.num_sms = Some(num_sms);
        self
    }

    /// Tokens of a rank that are said to be complete together, at least 1: with fewer, whoever waits for the first can begin earlier. Says
    /// nothing across nodes, where all of a rank's tokens for another are one message.
    pub fn chunk_tokens(mut self, tokens: u32) -> Options {
        self.chunk_tokens = tokens;
        self
    }

    /// Most tokens of a rank whose rows return, in a combine, as packets of 16 bytes with 12 of payload, 0 for none: they take a third more of
    /// the links, and nobody waits for stores to arrive before a word can say so. Says nothing across nodes.
    pub fn packet_tokens(mut self, tokens: u32) -> Options {
        self.packet_tokens = tokens;
        self
    }

    /// Longest wait for a peer. On virtual GPUs of [`run_threads`](crate::group::launch::run_threads)
    /// the ranks' own clock counts, which stands while any of them is at work
    /// ([`Time::OfRanks`](crate::driver::virt::Time::OfRanks)).
    pub fn timeout(mut self, timeout: Duration) -> Options {
        self.timeout = timeout;
        self
    }

    /// Whether a combine that fails leaves NaN where it has no sum, for kernels that read sums and
    /// see no error; else what was there before. It does, unless this says otherwise.
    pub fn nan_on_failure(mut self, nan: bool) -> Options {
        self.nan_on_failure = nan;
        self
    }

    /// Ranks of a node, 1 to 8, that map each other's memory; nodes talk through
    /// [`Options::transport`], and there are up to 32 ranks. Without: all ranks are one node.
    ///
    /// Up to 8 ranks that can all map each other's memory are one node whatever this says, unless the
    /// transport is one of shm, tcp and verbs, or [`Options::keep_nodes`] was called.
    pub fn ranks_per_node(mut self, ranks: u32) -> Options {
        self.ranks_per_node = Some(ranks);
        self
    }

    /// Keeps nodes apart though all ranks can map each other's memory: rows travel in messages, as
    /// over tcp or verbs. Sums have the same bits either way.
    pub fn keep_nodes(mut self) -> Options {
        self.keep_nodes = true;
        self
    }

    /// The transport between nodes; unused with one node. Each rank of another node has one queue, whatever
    /// [`TransportOptions::queues_per_peer`] says: an operation has one message for it.
    pub fn transport(mut self, transport: TransportOptions) -> Options {
        self.transport = transport;
        self
    }

    /// An error where an option breaks a rule.
    pub(super) fn validate(&self, topology: Topology) -> Result<()> {
        let refuse = |argument, value: u64, rule: String| Err(Error::argument(argument, value, rule));
        let ranks = topology.ranks();
        if topology.nodes == 1 && ranks > FEW_RANKS as u32 {
            let rule = format!("one node has at most {FEW_RANKS} ranks; with more, set ranks_per_node");
            return refuse("group size", ranks.into(), rule);
        }
        if ranks > MAX_MEMBERS as u32 {
            let rule = format!("low latency has at most {MAX_MEMBERS} ranks");
            return refuse("group size", ranks.into(), rule);
        }
        if self.max_tokens == 0 || self.max_tokens > LowLatencyCall::MAX_TOKENS {
            let most = LowLatencyCall::MAX_TOKENS;
            let rule =
                format!("must be 1 to {most}; larger batches are what the high-throughput buffer is for");
            return refuse("max_tokens", self.max_tokens.into(), rule);
        }
        // A call's packet tells lengths apart that differ by less than this many bytes.
        const MOST_BYTES: u64 = 1 << 17;
        if self.hidden == 0 || !(self.hidden * 2).is_multiple_of(16) || self.hidden * 2 >= MOST_BYTES {
            let rule = format!(
                "must be a positive multiple of 8, below {}: rows move 16 bytes at a time",
                MOST_BYTES / 2
            );
            return refuse("hidden", self.hidden, rule);
        }
        if self.num_topk == 0 || self.num_topk > MAX_TOPK {
            return refuse("num_topk", self.num_topk.into(), format!("must be 1 to {MAX_TOPK}"));
        }
        if self.num_experts == 0 || !self.num_experts.is_multiple_of(ranks) {
            let rule = format!("must be a positive multiple of the number of ranks, {ranks}");
            return refuse("num_experts", self.num_experts.into(), rule);
        }
        if self.num_experts / ranks > MAX_LOCAL_EXPERTS {
            return refuse(
                "num_experts",
                self.num_experts.into(),
                format!("must be at most {MAX_LOCAL_EXPERTS} per rank"),
            );
        }
        if self.places == 0 || self.places > MAX_PLACES {
            return refuse("places", self.places.into(), format!("must be 1 to {MAX_PLACES}"));
        }
        if self.chunk_tokens == 0 {
            return refuse("chunk_tokens", 0, "must be at least 1".into());
        }
        if self.num_sms == Some(0) {
            return refuse("num_sms", 0, "must be at least 1".into());
        }
        Ok(())
    }

    /// Most tokens of a rank whose rows return as packets.
    pub(super) fn most_in_packets(&self) -> u32 {
        self.packet_tokens.min(self.max_tokens)
    }

    /// Chunks of a rank with all its tokens.
    pub(super) fn chunks(&self) -> u64 {
        self.max_tokens.div_ceil(self.chunk_tokens).into()
    }

    /// Most scales of a row.
    pub(super) fn max_scales(&self) -> u64 {
        self.hidden.div_ceil(SCALE_BLOCK.into())
    }
}

//! How a low-latency buffer is made.

use std::time::Duration;

use epoxide_gpu::layout::{
    LowLatencyCall, MAX_EXPERTS_OF_ROWS, MAX_LOCAL_EXPERTS, MAX_MEMBERS, MAX_RANKS, MAX_TOPK, SCALE_BLOCK,
};

use super::internode::{MessageLayout, message_tables};
use super::layout::{PoolLayout, tables};
use crate::ep::core::{Pieces, check_count, check_timeout, option_methods, setters};
use crate::ep::experts::most_rows_by_expert;
use crate::ep::{DType, Sizes, Topology};
use crate::error::{Error, Result};
use crate::transport::{TransportKind, TransportOptions};

/// Most words of columns: blocks keep those of some tokens in shared memory.
const MOST_WORDS: u32 = 512;

/// The sizes that a low-latency buffer must have room for. The same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Most tokens that any rank sends, 1 to 1024.
    pub max_tokens: u32,
    /// Elements of a row, a multiple of 8 below 65,536. Below 32,768 where combines sum f32
    /// ([`Options::combine_dtype`]).
    pub hidden: u64,
    /// Top-k entries of each token, 1 to 32.
    pub num_topk: u32,
    /// Experts on all ranks together: a multiple of the number of ranks, at most 1,024 for each
    /// rank, and at most 4,096 in all with [`Options::rows_by_expert`].
    pub num_experts: u32,
}

impl Shape {
    /// Most rows by expert that one of `num_ranks` ranks can receive, where segments are aligned to
    /// `alignment`: the argument of [`Options::rows_by_expert`]. Padding is in it.
    ///
    /// ```
    /// # use epoxide::low_latency::Shape;
    /// let shape = Shape { max_tokens: 128, hidden: 7168, num_topk: 8, num_experts: 256 };
    /// assert_eq!(shape.most_rows_by_expert(8, 64), 8 * 128 * 8 + 32 * 63);
    /// ```
    pub fn most_rows_by_expert(&self, num_ranks: u32, alignment: u32) -> u64 {
        let local_experts = self.num_experts / num_ranks.max(1);
        most_rows_by_expert(num_ranks, self.max_tokens, self.num_topk, local_experts, alignment)
    }
}

/// How to make a low-latency [`Buffer`](super::Buffer). Ranks give the same options. `num_sms`,
/// `rows_by_expert`, `beside_persistent_kernels`, `keep_sums_on_failure` and `timeout` may differ.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    // The methods of the same names document these.
    pub(super) shape: Shape,
    pub(super) places: u32,
    pub(super) num_sms: Option<u32>,
    pub(super) beside_persistent_kernels: bool,
    pub(super) chunk_tokens: u32,
    pub(super) rows_by_expert: Option<u64>,
    pub(super) max_scales: u32,
    pub(super) combine_dtype: DType,
    packet_tokens: Option<u32>,
    pub(super) timeout: Duration,
    pub(super) nan_on_failure: bool,
    pub(super) ranks_per_node: Option<u32>,
    pub(super) keep_nodes: bool,
    pub(super) transport: TransportOptions,
}

impl Options {
    /// [`Options::chunk_tokens`] where nothing else is set.
    pub const DEFAULT_CHUNK_TOKENS: u32 = 1;

    /// [`Options::packet_tokens`] where nothing else is set, for a group of `num_ranks`: 128 tokens
    /// for two ranks, fewer for more, at least 32. The third that packets take more of the links
    /// grows with the ranks that a token returns from; the time that they save does not.
    pub fn default_packet_tokens(num_ranks: u32) -> u32 {
        (128 / num_ranks.saturating_sub(1).max(1)).max(32)
    }

    /// Room for `shape`, one place, all multiprocessors, one node, 30 s for a peer.
    pub fn new(shape: Shape) -> Options {
        Options {
            shape,
            places: 1,
            num_sms: None,
            beside_persistent_kernels: false,
            chunk_tokens: Self::DEFAULT_CHUNK_TOKENS,
            rows_by_expert: None,
            max_scales: 0,
            combine_dtype: DType::Bf16,
            packet_tokens: None,
            timeout: Duration::from_secs(30),
            nan_on_failure: true,
            ranks_per_node: None,
            keep_nodes: false,
            transport: TransportOptions::new(TransportKind::Auto),
        }
    }

    option_methods! {
        /// Up to 64 ranks that can all map each other's memory are one node, regardless of this
        /// option. This does not hold if the transport is one of shm, tcp and verbs, or
        /// [`Options::keep_nodes`] was called: then a group has up to 32 ranks.
        ranks_per_node,
        /// Sums have the same bits either way.
        keep_nodes,
        /// Each rank of another node has one queue, regardless of
        /// [`TransportOptions::queues_per_peer`]: an operation has one message for it.
        transport,
    }

    /// Kernels of other streams may hold multiprocessors forever, as a persistent kernel does.
    ///
    /// All blocks of an operation must otherwise be resident at once, because blocks that wait for
    /// a peer keep others of this rank, on which the peer's blocks wait, from a multiprocessor.
    /// With this option each operation is launched as its two halves, regardless of its peers.
    /// Blocks of the first half wait for nothing, or for the first block of each rank where a place
    /// was not combined; blocks of the second wait for first halves alone. So one free
    /// multiprocessor is enough. The second launch takes a few microseconds. Operations on
    /// the stream of a green context with fewer multiprocessors than they have blocks are launched
    /// like that anyway.
    ///
    /// Such a kernel must run on a stream outside this library, neither a
    /// [`Stream`](crate::driver::Stream) nor an adopted one. The library waits for all its streams
    /// before it frees or reuses memory, and such a wait would not end.
    pub fn beside_persistent_kernels(mut self) -> Options {
        self.beside_persistent_kernels = true;
        self
    }

    setters! {
        /// Room for columns sent with rows, in units of 4 bytes
        /// ([`Payload::max_scales`](crate::Payload::max_scales)), at most 512. There is room for a
        /// unit of each 128 elements anyway: an f32 scale, or four UE8M0 scales.
        max_scales: u32;
        /// Type of the rows that combines take and of their sums: bf16, which is the default, f16 or
        /// f32. A share of f16 that is too large for it is infinite.
        ///
        /// Rows of f32 take twice the memory of bf16 in the pool and twice the links. Rows of f16
        /// and f32 return as they are:
        /// [`CombineRequest::quantise`](super::CombineRequest::quantise) and
        /// [`CombineRequest::in_pool`](super::CombineRequest::in_pool) take bf16. Dispatches do not
        /// depend on this option.
        combine_dtype: DType;
        /// Most multiprocessors that an operation takes; without, all of the device. A call may
        /// have its own number: [`DispatchRequest::num_sms`](super::DispatchRequest::num_sms).
        num_sms: u32;
        /// Tokens of a rank that are published as complete together, at least 1. With fewer, the
        /// receiver of the first ones can begin earlier. No effect across nodes, where all of a
        /// rank's tokens for another are one message.
        chunk_tokens: u32;
        /// Most tokens of a rank for which a combine returns rows as packets of 16 bytes with 12 of
        /// payload; 0 for none. Packets take a third more of the links, but the sender publishes no
        /// flag after the stores have arrived. No effect across nodes. Where nothing is set,
        /// [`Options::default_packet_tokens`].
        packet_tokens: u32;
        /// Room for so many rows by expert, padding included, in each place:
        /// [`DispatchRequest::by_expert`](super::DispatchRequest::by_expert).
        /// [`Shape::most_rows_by_expert`] is the number; no host waits for counts, so a buffer must
        /// have room for the worst case. The room takes 16 bytes for each row. Rows themselves are
        /// in memory of the call, or in the caller's.
        rows_by_expert: u64;
    }

    /// The memory and the rows of each rank's buffer in a group of `num_ranks`.
    ///
    /// ```
    /// # use epoxide::low_latency::{Options, Shape};
    /// let shape = Shape { max_tokens: 128, hidden: 7168, num_topk: 8, num_experts: 256 };
    /// let sizes = Options::new(shape).sizes(8)?;
    /// assert_eq!((sizes.rows, sizes.wire_bytes), (8 * 128, 0));
    /// # Ok::<(), epoxide::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Argument`] where an option breaks a rule.
    pub fn sizes(&self, num_ranks: u32) -> Result<Sizes> {
        let nodes = Topology::new(num_ranks, self.ranks_per_node)?;
        self.validate(nodes)?;
        let rows = u64::from(num_ranks) * u64::from(self.shape.max_tokens);
        let sizes = |nodes: Topology| {
            let (mut own, per_node) = (Pieces::default(), nodes.ranks_per_node);
            tables(&mut own, self, nodes);
            if nodes.nodes == 1 {
                let pool_bytes = PoolLayout::new(self, num_ranks).pieces.bytes();
                return Sizes { rows, pool_bytes, wire_bytes: 0, own_bytes: own.bytes(), quantise_bytes: 0 };
            }
            message_tables(&mut own, self, nodes);
            Sizes {
                rows,
                pool_bytes: MessageLayout::new(self, per_node, false).pieces.bytes(),
                wire_bytes: MessageLayout::new(self, num_ranks - per_node, true).pieces.bytes(),
                own_bytes: own.bytes(),
                quantise_bytes: 0,
            }
        };
        Ok(sizes(nodes).or_more(self.joined(nodes).map(sizes)))
    }

    /// The ranks of several nodes as one node, where that is to be tried.
    pub(super) fn joined(&self, nodes: Topology) -> Option<Topology> {
        nodes.joined(self.transport.kind, self.keep_nodes)
    }

    /// An error where an option breaks a rule.
    pub(super) fn validate(&self, topology: Topology) -> Result<()> {
        let refuse = |argument, value: u64, rule: String| Err(Error::argument(argument, value, rule));
        let ranks = topology.ranks();
        if self.joined(topology).is_none() {
            check_members(topology)?;
        }
        if self.shape.max_tokens == 0 || self.shape.max_tokens > LowLatencyCall::MAX_TOKENS {
            let most = LowLatencyCall::MAX_TOKENS;
            let rule =
                format!("must be 1 to {most}; larger batches are what the high-throughput buffer is for");
            return refuse("max_tokens", self.shape.max_tokens.into(), rule);
        }
        if !matches!(self.combine_dtype, DType::Bf16 | DType::F16 | DType::F32) {
            let rule = "combines sum rows of bf16, f16 or f32";
            return Err(Error::argument("combine_dtype", self.combine_dtype, rule));
        }
        // A call's packet distinguishes lengths that differ by less than this many bytes.
        const MOST_BYTES: u64 = 1 << 17;
        let most = MOST_BYTES / self.combine_dtype.size();
        if self.shape.hidden == 0 || !self.shape.hidden.is_multiple_of(8) || self.shape.hidden >= most {
            let rule = match self.combine_dtype {
                DType::F32 => {
                    format!("must be a positive multiple of 8, below {most} where combines sum f32")
                }
                _ => format!("must be a positive multiple of 8, below {most}: rows move 16 bytes at a time"),
            };
            return refuse("hidden", self.shape.hidden, rule);
        }
        if self.shape.num_topk == 0 || self.shape.num_topk > MAX_TOPK {
            return refuse("num_topk", self.shape.num_topk.into(), format!("must be 1 to {MAX_TOPK}"));
        }
        if self.shape.num_experts == 0 || !self.shape.num_experts.is_multiple_of(ranks) {
            let rule = format!("must be a positive multiple of the number of ranks, {ranks}");
            return refuse("num_experts", self.shape.num_experts.into(), rule);
        }
        if self.shape.num_experts / ranks > MAX_LOCAL_EXPERTS {
            return refuse(
                "num_experts",
                self.shape.num_experts.into(),
                format!("must be at most {MAX_LOCAL_EXPERTS} per rank"),
            );
        }
        check_count(self.places)?;
        check_timeout(Some(self.timeout))?;
        if self.chunk_tokens == 0 {
            return refuse("chunk_tokens", 0, "must be at least 1".into());
        }
        if let Some(rows) = self.rows_by_expert {
            if rows == 0 || rows > i32::MAX as u64 {
                let rule = format!("must be 1 to {}: rows are numbered with 31 bits", i32::MAX);
                return refuse("rows_by_expert", rows, rule);
            }
            if self.shape.num_experts > MAX_EXPERTS_OF_ROWS {
                let rule = format!("must be at most {MAX_EXPERTS_OF_ROWS} where rows come by expert");
                return refuse("num_experts", self.shape.num_experts.into(), rule);
            }
        }
        if self.max_scales > MOST_WORDS {
            let rule = format!("must be at most {MOST_WORDS}");
            return refuse("max_scales", self.max_scales.into(), rule);
        }
        check_sms(self.num_sms)
    }

    /// Most tokens of a rank whose rows return as packets, in a group of `num_ranks`.
    pub(super) fn most_in_packets(&self, num_ranks: u32) -> u32 {
        let tokens = self.packet_tokens.unwrap_or(Self::default_packet_tokens(num_ranks));
        tokens.min(self.shape.max_tokens)
    }

    /// Chunks of a rank with all its tokens.
    pub(super) fn chunks(&self) -> u64 {
        self.shape.max_tokens.div_ceil(self.chunk_tokens).into()
    }

    /// Bytes of a row that a combine takes, and of its sum.
    pub(super) fn combine_row_bytes(&self) -> u64 {
        self.shape.hidden * self.combine_dtype.size()
    }

    /// Most words sent with a row: f32 scales, or columns.
    pub(super) fn most_words(&self) -> u64 {
        self.fp8_scales().max(self.max_scales.into())
    }

    /// Most f32 scales of a row.
    pub(super) fn fp8_scales(&self) -> u64 {
        self.shape.hidden.div_ceil(SCALE_BLOCK.into())
    }
}

/// An error for more ranks than messages between nodes support.
pub(super) fn check_members(topology: Topology) -> Result<()> {
    if topology.nodes == 1 || topology.ranks() <= MAX_MEMBERS as u32 {
        return Ok(());
    }
    let rule = format!(
        "low latency has at most {MAX_MEMBERS} ranks on several nodes, and up to {MAX_RANKS} that all map each other's memory"
    );
    Err(Error::argument("group size", topology.ranks(), rule))
}

/// An error unless there is a multiprocessor.
pub(super) fn check_sms(num_sms: Option<u32>) -> Result<()> {
    match num_sms {
        Some(0) => {
            Err(Error::argument("num_sms", 0, "must be at least 1: leave it out for all that there are"))
        }
        _ => Ok(()),
    }
}

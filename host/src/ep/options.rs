//! How a buffer is made.

use std::path::PathBuf;
use std::time::Duration;

use super::config::Config;
use super::tuning::Tuning;
use crate::transport::{TransportKind, TransportOptions};

/// The sizes that a pool must have room for. The same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferShape {
    /// Most tokens that any rank sends: a layout of more is refused. A pool has room for this many from every rank.
    pub max_tokens_per_rank: u32,
    /// Largest row in bytes: hidden times element size.
    pub max_row_bytes: u64,
    /// Most top-k entries per token, 1 to 32.
    pub max_topk: u32,
    /// Most scales per token; 0 where none are used.
    pub max_scales: u32,
}

impl BufferShape {
    /// Most rows by expert that a rank with `local_experts` experts can receive from `num_ranks`
    /// ranks, its own included, in segments aligned to `alignment`: what
    /// [`BufferOptions::rows_by_expert`] takes for the worst case.
    ///
    /// ```
    /// # use epoxide::ep::BufferShape;
    /// let shape = BufferShape { max_tokens_per_rank: 4096, max_row_bytes: 14336, max_topk: 8, max_scales: 0 };
    /// assert_eq!(shape.most_rows_by_expert(2, 128, 64), 2 * 4096 * 8 + 128 * 63);
    /// ```
    pub fn most_rows_by_expert(&self, num_ranks: u32, local_experts: u32, alignment: u32) -> u64 {
        // An entry is a row, whether or not entries of a token are of different experts.
        let rows = u64::from(self.max_tokens_per_rank) * u64::from(num_ranks) * u64::from(self.max_topk);
        let padded = u64::from(local_experts).min(rows);
        rows + padded * u64::from(alignment.saturating_sub(1))
    }
}

/// How to make a [`Buffer`](super::Buffer). The same on every rank.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BufferOptions {
    // The methods of the same names say what these are; tests change them one by one.
    #[doc(hidden)]
    pub shape: BufferShape,
    #[doc(hidden)]
    pub places: u32,
    #[doc(hidden)]
    pub rows_by_expert: Option<u64>,
    #[doc(hidden)]
    pub num_nvl_bytes: Option<u64>,
    #[doc(hidden)]
    pub config: Config,
    #[doc(hidden)]
    pub timeout: Duration,
    #[doc(hidden)]
    pub nan_on_failure: bool,
    #[doc(hidden)]
    pub tuning: Tuning,
    #[doc(hidden)]
    pub ranks_per_node: Option<u32>,
    #[doc(hidden)]
    pub keep_nodes: bool,
    #[doc(hidden)]
    pub transport: TransportOptions,
    #[doc(hidden)]
    pub num_rdma_bytes: Option<u64>,
    /// A file with the kernels' PTX in place of the embedded one: what `EPOXIDE_PTX` is to a process, to one buffer.
    #[doc(hidden)]
    pub ptx: Option<PathBuf>,
}

impl BufferOptions {
    /// Room for the worst case of `shape`, one place, one node, defaults for the rest; 30 s for a peer.
    pub fn new(shape: BufferShape) -> Self {
        BufferOptions {
            shape,
            places: 1,
            rows_by_expert: None,
            num_nvl_bytes: None,
            config: Config::default(),
            timeout: Duration::from_secs(30),
            nan_on_failure: true,
            tuning: Tuning::default(),
            ranks_per_node: None,
            keep_nodes: false,
            transport: TransportOptions::new(TransportKind::Auto),
            num_rdma_bytes: None,
            ptx: None,
        }
    }

    /// Places for received rows, at least 1: so many dispatches' results can be in use at once. Each takes the pool's memory once more.
    pub fn places(mut self, places: u32) -> Self {
        self.places = places;
        self
    }

    /// Room for so many rows by expert in each place, padding included, for dispatches with
    /// [`DispatchRequest::by_expert`](super::DispatchRequest::by_expert);
    /// [`BufferShape::most_rows_by_expert`] is the worst case. A dispatch that needs more is an
    /// error on every rank, before any row moves. Within one node.
    pub fn rows_by_expert(mut self, rows: u64) -> Self {
        self.rows_by_expert = Some(rows);
        self
    }

    /// Bytes to spend on the pool instead of room for the worst case; a dispatch that needs more rows is an error on
    /// every rank, before any row moves. See [`Config::nvl_buffer_size_hint`].
    pub fn num_nvl_bytes(mut self, bytes: u64) -> Self {
        self.num_nvl_bytes = Some(bytes);
        self
    }

    /// Multiprocessors and channels.
    pub fn config(mut self, config: Config) -> Self {
        self.config = config;
        self
    }

    /// Longest wait for a peer. On virtual GPUs of [`run_threads`](crate::group::launch::run_threads)
    /// the ranks' own clock counts, which stands while any of them is at work
    /// ([`Time::OfRanks`](crate::driver::virt::Time::OfRanks)).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Whether a combine that fails leaves NaN where it has no sum, for kernels that read sums and
    /// see no error; else what was there before. It does, unless this says otherwise.
    pub fn nan_on_failure(mut self, nan: bool) -> Self {
        self.nan_on_failure = nan;
        self
    }

    /// Launch shapes.
    #[doc(hidden)]
    pub fn tuning(mut self, tuning: Tuning) -> Self {
        self.tuning = tuning;
        self
    }

    /// Ranks of a node, 1 to 8: ranks 0 to `ranks_per_node - 1` are node 0, and so on. Those of a node
    /// map each other's pools; nodes talk through [`BufferOptions::transport`]. Without: all ranks, up
    /// to 64, are one node.
    ///
    /// Up to 64 ranks that can all map each other's memory are one node whatever this says, unless the
    /// transport is one of shm, tcp and verbs, or [`BufferOptions::keep_nodes`] was called.
    pub fn ranks_per_node(mut self, ranks: u32) -> Self {
        self.ranks_per_node = Some(ranks);
        self
    }

    /// Keeps nodes apart though all ranks can map each other's memory: rows are relayed, and a token's
    /// sum is rounded once for each node, bit for bit as over tcp or verbs.
    pub fn keep_nodes(mut self) -> Self {
        self.keep_nodes = true;
        self
    }

    /// The transport of rows between nodes.
    pub fn transport(mut self, transport: TransportOptions) -> Self {
        self.transport = transport;
        self
    }

    /// Bytes to spend on wire memory instead of slots for `max_tokens_per_rank` tokens to each node; a dispatch that needs more is
    /// an error on every rank, before any row moves. See [`Config::rdma_buffer_size_hint`].
    pub fn num_rdma_bytes(mut self, bytes: u64) -> Self {
        self.num_rdma_bytes = Some(bytes);
        self
    }
}

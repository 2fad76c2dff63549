//! How a buffer is made, and the shapes of its launches.

use std::path::PathBuf;
use std::time::Duration;

use epoxide_gpu::kernels::MAX_SLOT_BYTES;
use epoxide_gpu::layout::MAX_FIXED_TOKENS;

use super::config::Config;
use super::pool::pool_layouts;
use super::quantise::scratch_bytes;
use super::wire::wire_layout;
use crate::ep::core::option_methods;
use crate::ep::experts::most_rows_by_expert;
use crate::ep::{DType, Sizes, Topology};
use crate::error::{Error, Result};
use crate::transport::{TransportKind, TransportOptions};

/// Most warps of a block that send rows in a dispatch, in addition to those that send metadata.
pub(super) const MOST_DISPATCH_WARPS: u32 = 8;

/// The sizes that a pool must have room for. The same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Most tokens that any rank sends; a layout of more is an error. A pool has room for this many
    /// from every rank. At most 33,554,431, among more than 32 ranks at most 2^30 divided by their
    /// number. 0 where no rank ever has a token.
    pub max_tokens: u32,
    /// Elements of a row, which has a multiple of 16 bytes below 16 MiB.
    pub hidden: u64,
    /// The largest type of elements: rows of smaller ones fit too. Any but i64 and bool.
    pub dtype: DType,
    /// Most top-k entries per token, 1 to 32.
    pub max_topk: u32,
    /// Most f32 scales per token, or room for columns in units of 4 bytes
    /// ([`Payload::max_scales`](crate::Payload::max_scales)); 0 where there are none.
    pub max_scales: u32,
}

impl Shape {
    /// Bytes of the largest row.
    pub fn max_row_bytes(&self) -> u64 {
        self.hidden.saturating_mul(self.dtype.size())
    }

    /// Most rows by expert that a rank can receive: the argument of [`Options::rows_by_expert`] for
    /// the worst case. The rank has `local_experts` experts and receives from `num_ranks` ranks,
    /// itself included. Segments are aligned to `alignment`.
    ///
    /// ```
    /// # use epoxide::{DType, throughput::Shape};
    /// let (max_tokens, hidden, max_topk) = (4096, 7168, 8);
    /// let shape = Shape { max_tokens, hidden, dtype: DType::Bf16, max_topk, max_scales: 0 };
    /// assert_eq!(shape.most_rows_by_expert(2, 128, 64), 2 * 4096 * 8 + 128 * 63);
    /// ```
    pub fn most_rows_by_expert(&self, num_ranks: u32, local_experts: u32, alignment: u32) -> u64 {
        most_rows_by_expert(num_ranks, self.max_tokens, self.max_topk, local_experts, alignment)
    }
}

/// How to make a [`Buffer`](super::Buffer). Ranks give the same options. `timeout` and
/// `keep_sums_on_failure` may differ.
#[derive(Debug, Clone)]
pub struct Options {
    pub(crate) fields: Fields,
}

/// The options one by one; the methods of [`Options`] document them.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct Fields {
    pub shape: Shape,
    pub places: u32,
    pub rows_by_expert: Option<u64>,
    pub num_nvl_bytes: Option<u64>,
    pub config: Config,
    pub timeout: Duration,
    pub nan_on_failure: bool,
    pub tuning: Tuning,
    pub ranks_per_node: Option<u32>,
    pub keep_nodes: bool,
    pub transport: TransportOptions,
    pub num_rdma_bytes: Option<u64>,
    /// A file with the kernels' PTX in place of the embedded one, for this buffer; `EPOXIDE_PTX`
    /// names one for the whole process.
    pub ptx: Option<PathBuf>,
}

impl Options {
    /// Room for the worst case of `shape`, one place, one node, defaults for the rest; 30 s for a
    /// peer.
    pub fn new(shape: Shape) -> Self {
        let fields = Fields {
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
        };
        Options { fields }
    }

    option_methods! {
        of fields;
        /// Up to 64 ranks that can all map each other's memory are one node, regardless of this
        /// option. This does not hold if the transport is one of shm, tcp and verbs, or
        /// [`Options::keep_nodes`] was called.
        ranks_per_node,
        /// Rows are relayed, and a token's sum is rounded once for each node.
        keep_nodes,
        transport,
    }

    /// The memory and the rows of each rank's buffer in a group of `num_ranks`. `rows` counts rows
    /// by expert as well. Layouts, handles and sums are not in it: calls take their memory.
    ///
    /// ```
    /// # use epoxide::{DType, throughput::{Options, Shape}};
    /// let (max_tokens, hidden, max_topk) = (4096, 7168, 8);
    /// let shape = Shape { max_tokens, hidden, dtype: DType::Bf16, max_topk, max_scales: 0 };
    /// let sizes = Options::new(shape).sizes(8)?;
    /// assert_eq!(sizes.rows, 8 * 4096);
    /// assert!(sizes.pool_bytes > 2 * sizes.rows * 2 * 7168);
    /// # Ok::<(), epoxide::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Argument`] and [`Error::Capacity`] where an option breaks a rule.
    pub fn sizes(&self, num_ranks: u32) -> Result<Sizes> {
        let Fields { shape, places, rows_by_expert, num_nvl_bytes, num_rdma_bytes, .. } = self.fields.clone();
        let sizes = |nodes: Topology| -> Result<Sizes> {
            let layout = pool_layouts(&shape, nodes, places, rows_by_expert, num_nvl_bytes)?[0];
            let by_expert = rows_by_expert.is_some();
            let wire_bytes = match nodes.nodes {
                1 => 0,
                _ => wire_layout(&shape, nodes, by_expert, num_rdma_bytes)?.bytes,
            };
            let quantise_bytes = scratch_bytes(shape.max_tokens, shape.hidden);
            Ok(Sizes {
                rows: layout.rows,
                pool_bytes: layout.bytes,
                wire_bytes,
                own_bytes: 0,
                quantise_bytes,
            })
        };
        let nodes = Topology::new(num_ranks, self.fields.ranks_per_node)?;
        let joined = nodes.joined(self.fields.transport.kind, self.fields.keep_nodes);
        Ok(sizes(nodes)?.or_more(joined.map(sizes).transpose()?))
    }

    /// Room for so many rows by expert in each place, padding included, for dispatches with
    /// [`DispatchRequest::by_expert`](super::DispatchRequest::by_expert);
    /// [`Shape::most_rows_by_expert`] is the worst case. A dispatch that needs more is an
    /// error on every rank, before any row moves.
    pub fn rows_by_expert(mut self, rows: u64) -> Self {
        self.fields.rows_by_expert = Some(rows);
        self
    }

    /// Bytes to spend on the pool instead of room for the worst case. A dispatch that needs more
    /// rows is an error on every rank, before any row moves. See [`Config::nvl_buffer_size_hint`].
    pub fn num_nvl_bytes(mut self, bytes: u64) -> Self {
        self.fields.num_nvl_bytes = Some(bytes);
        self
    }

    /// Multiprocessors and channels.
    pub fn config(mut self, config: Config) -> Self {
        self.fields.config = config;
        self
    }

    /// Bytes to spend on wire memory instead of slots for `max_tokens` tokens to each
    /// node. A dispatch that needs more is an error on every rank, before any row moves. See
    /// [`Config::rdma_buffer_size_hint`].
    pub fn num_rdma_bytes(mut self, bytes: u64) -> Self {
        self.fields.num_rdma_bytes = Some(bytes);
        self
    }
}

/// Launch shapes of the copy kernels. The defaults are the best measured on H200
/// (docs/BENCHMARKS.md). With many multiprocessors an operation uses fewer warps on each, because
/// too many bytes in flight congest the links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// Warps per block in dispatch, 1 to 8. A dispatch of rows by expert within a node has three
    /// more, at most 10. Rows of up to 8,192 bytes have one more, at most 8, from
    /// `dispatch_claiming_blocks` on: three do not fill the links there.
    pub dispatch_warps: u32,
    /// Warps per block in dispatch across nodes, in addition to the one that delivers, 1 to 8.
    /// There half of the blocks send.
    pub internode_dispatch_warps: u32,
    /// Further warps per block in a dispatch within one node that exchanges counts, which send the
    /// rows' metadata, 1 to 4.
    pub dispatch_metadata_warps: u32,
    /// Further warps per block in a dispatch of rows by expert, 1 to 6: they copy received rows
    /// that are for several experts of this rank. Across nodes a block has up to 12 warps.
    pub dispatch_copy_warps: u32,
    /// Largest stage in dispatch, in bytes; longer rows are sent in pieces.
    pub dispatch_stage_bytes: u32,
    /// Most stages per warp in dispatch, 2 to 28.
    pub dispatch_stages: u32,
    /// Blocks of a dispatch within a node from which on warps claim the tokens that do not fill
    /// their stages, at least 1. Fewer multiprocessors are slower than the links, and claims cost
    /// them more than they gain.
    pub dispatch_claiming_blocks: u32,
    /// Warps per block in combine, 1 to 16.
    pub combine_warps: u32,
    /// Largest slot in combine, in bytes, at most 4096; longer rows are sent in pieces.
    pub combine_slot_bytes: u32,
    /// Most slots per warp in combine, at least 2.
    pub combine_slots: u32,
    /// Blocks that copy rows into the pool during a combine of a tensor within a node, 1 to 1024.
    /// `None`: all other multiprocessors. The number never exceeds the work there is.
    pub combine_stagers: Option<u32>,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning {
            dispatch_warps: 3,
            internode_dispatch_warps: 6,
            dispatch_metadata_warps: 4,
            dispatch_copy_warps: 6,
            dispatch_stage_bytes: 8192,
            dispatch_stages: 10,
            dispatch_claiming_blocks: 18,
            combine_warps: 16,
            combine_slot_bytes: 4096,
            combine_slots: 3,
            combine_stagers: None,
        }
    }
}

impl Tuning {
    /// Checks the ranges.
    pub(super) fn validate(&self) -> Result<()> {
        let check = |name, value: u32, range: std::ops::RangeInclusive<u32>| {
            if range.contains(&value) {
                return Ok(());
            }
            Err(Error::argument(name, value, format!("must be {} to {}", range.start(), range.end())))
        };
        check("dispatch_warps", self.dispatch_warps, 1..=MOST_DISPATCH_WARPS)?;
        check("internode_dispatch_warps", self.internode_dispatch_warps, 1..=8)?;
        check("dispatch_metadata_warps", self.dispatch_metadata_warps, 1..=4)?;
        check("dispatch_copy_warps", self.dispatch_copy_warps, 1..=6)?;
        check("dispatch_stage_bytes", self.dispatch_stage_bytes, 128..=65536)?;
        check("dispatch_stages", self.dispatch_stages, 2..=MAX_FIXED_TOKENS)?;
        check("dispatch_claiming_blocks", self.dispatch_claiming_blocks, 1..=u32::MAX)?;
        check("combine_warps", self.combine_warps, 1..=16)?;
        check("combine_slot_bytes", self.combine_slot_bytes, 512..=MAX_SLOT_BYTES)?;
        check("combine_slots", self.combine_slots, 2..=32)?;
        self.combine_stagers.map_or(Ok(()), |blocks| check("combine_stagers", blocks, 1..=1024))
    }
}

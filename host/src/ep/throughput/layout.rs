//! Dispatch layout: the ranks of each token, and the tokens of each rank.

use std::sync::Arc;

use epoxide_gpu::layout::{DevicePtr, ExpertTable, LayoutArgs, MAX_TOPK, Section};

use super::{Buffer, DType, StreamOrder, Tensor, TypedTensor};
use crate::driver::{Event, Stream};
use crate::ep::core::{Block, Sequence, Uses};
use crate::ep::experts::{ExpertId, ExpertMap, is_narrow};
use crate::ep::tensor::Owner;
use crate::error::{Error, Result};

/// Threads per block of the layout kernel: as many tokens as possible at once.
const THREADS: u32 = 1024;

/// The sender's counts for one `topk_idx`, and those ids; feeds [`Buffer::dispatch`]. Immutable,
/// and cheap to clone.
#[derive(Debug, Clone)]
pub struct DispatchLayout<'a> {
    topk_idx: Tensor<'a>,
    map: Option<ExpertMap>,
    pub(super) buffer: u64,
    pub(super) block: Arc<Block>,
    pub(super) tables: LayoutTables,
    pub(super) num_tokens: u32,
    pub(super) num_topk: u32,
    pub(super) num_experts: u32,
    pub(super) num_ranks: u32,
    num_nodes: u32,
    event: Option<Arc<Event>>,
    sequence: Arc<Sequence>,
}

#[derive(Debug, Clone, Copy)]
pub struct LayoutTables {
    pub invalid: DevicePtr,
    pub num_tokens_per_rank: DevicePtr,
    pub num_tokens_per_rdma_rank: DevicePtr,
    pub num_tokens_per_expert: DevicePtr,
    pub is_token_in_rank: DevicePtr,
    /// Without a map, the ids themselves, or -1 for those out of range.
    pub physical: DevicePtr,
}

impl<'a> DispatchLayout<'a> {
    /// The ids that it was made of, i64 or i32 `[num_tokens, num_topk]`.
    pub fn topk_idx(&self) -> &Tensor<'a> {
        &self.topk_idx
    }

    /// `[num_tokens, num_topk]`: the physical experts that the [`ExpertMap`] gave for the ids, or
    /// -1; `None` without a map.
    pub fn physical_topk_idx(&self) -> Option<TypedTensor<'static, i32>> {
        let shape = [self.num_tokens as u64, self.num_topk as u64];
        self.map.as_ref().map(|_| self.tensor("physical_topk_idx", self.tables.physical, &shape))
    }

    /// The ids of physical experts that dispatch reads, with whether they are i32. They are the
    /// layout's own, which counts were made of: the caller may have overwritten `topk_idx` since.
    pub(super) fn ids(&self) -> (DevicePtr, u32) {
        (self.tables.physical, 1)
    }

    /// `[num_ranks]`: tokens for each rank, each token once per rank. Ids out of range are not
    /// counted; [`DispatchLayout::validate`] reports them.
    pub fn num_tokens_per_rank(&self) -> TypedTensor<'static, i32> {
        self.tensor("num_tokens_per_rank", self.tables.num_tokens_per_rank, &[self.num_ranks as u64])
    }

    /// `[num_nodes]`: tokens for each node, each token once per node, the own node included; `None`
    /// with one node, for which [`DispatchLayout::tokens_per_node`] counts on the host.
    pub fn num_tokens_per_rdma_rank(&self) -> Option<TypedTensor<'static, i32>> {
        let shape = [self.num_nodes as u64];
        (self.num_nodes > 1)
            .then(|| self.tensor("num_tokens_per_rdma_rank", self.tables.num_tokens_per_rdma_rank, &shape))
    }

    /// `[num_experts]`: selections of each expert, with a map of each physical one. Ids out of
    /// range are not counted; [`DispatchLayout::validate`] reports them.
    pub fn num_tokens_per_expert(&self) -> TypedTensor<'static, i32> {
        self.tensor("num_tokens_per_expert", self.tables.num_tokens_per_expert, &[self.num_experts as u64])
    }

    /// bool `[num_tokens, num_ranks]`: whether a token has an expert on a rank.
    pub fn is_token_in_rank(&self) -> Tensor<'static> {
        let shape = [self.num_tokens as u64, self.num_ranks as u64];
        Tensor::in_memory(self.tables.is_token_in_rank, DType::Bool, &shape, self.block.clone())
            .result("is_token_in_rank", &self.sequence)
    }

    /// Where an asynchronous call ends.
    pub fn event(&self) -> Option<&Event> {
        self.event.as_deref()
    }

    /// Waits for `stream`, which the layout was made on or after, and checks that every expert id
    /// was in range.
    ///
    /// # Errors
    /// [`Error::Argument`] naming the first token and entry whose id is neither -1 nor below
    /// `num_experts`.
    pub fn validate(&self, stream: &Stream) -> Result<()> {
        let mut word = [0u8; 8];
        // SAFETY: the layout's block holds the word.
        unsafe { stream.read(&mut word, self.tables.invalid)? };
        let first = u64::from_le_bytes(word);
        if first == u64::MAX {
            return Ok(());
        }
        let (token, k) = (first >> 8, first & 0xff);
        if token >= self.num_tokens.into() || k >= self.num_topk.into() {
            let rule =
                "must be the stream that the layout was made on, or wait for it: the layout is not there yet";
            return Err(Error::argument("stream", "another one", rule));
        }
        let at = token * self.num_topk as u64 + k;
        let id = if self.topk_idx.dtype() == DType::I32 {
            let mut id = [0u8; 4];
            // SAFETY: the entry is one of these ids, as was just checked, and they are contiguous.
            unsafe { stream.read(&mut id, self.topk_idx.ptr().add(at * 4))? };
            i32::from_le_bytes(id).into()
        } else {
            let mut id = [0u8; 8];
            // SAFETY: as above.
            unsafe { stream.read(&mut id, self.topk_idx.ptr().add(at * 8))? };
            i64::from_le_bytes(id)
        };
        let experts = self.map.as_ref().map_or(self.num_experts, ExpertMap::num_experts);
        if (0..experts.into()).contains(&id) {
            let rule = format!("a physical expert must be -1 or 0 to {}", self.num_experts - 1);
            return Err(Error::argument("map", format!("its entries of expert {id}"), rule));
        }
        let name = self.topk_idx.name();
        let of = if name.is_empty() { String::new() } else { format!(" of {name}") };
        Err(Error::argument(
            "topk_idx",
            format!("{id} (token {token}, entry {k}){of}"),
            format!("an expert id must be -1 or 0 to num_experts - 1 = {}", experts - 1),
        ))
    }

    fn tensor(&self, name: &'static str, ptr: DevicePtr, shape: &[u64]) -> TypedTensor<'static, i32> {
        TypedTensor::in_memory(ptr, shape, self.block.clone()).result(name, &self.sequence)
    }
}

impl Buffer {
    /// Counts the tokens for each rank and the selections of each expert. `topk_idx` is
    /// `[num_tokens, num_topk]`, i64 or i32, with entries -1 or below `num_experts`. Experts are
    /// spread in order: expert e is on rank `e / (num_experts / num_ranks)`, and `num_experts` must
    /// be a multiple of the number of ranks; [`Buffer::get_placed_dispatch_layout`] takes any other
    /// placement. Local to this rank; the host does not wait.
    ///
    /// # Errors
    /// [`Error::Argument`] or [`Error::Shape`] on arguments that break a rule, [`Error::Capacity`]
    /// where there are more tokens than
    /// [`Shape::max_tokens`](super::Shape::max_tokens). An id that is out of
    /// range shows in [`DispatchLayout::validate`], and as an error of the dispatch on every rank.
    pub fn get_dispatch_layout<'a>(
        &mut self,
        topk_idx: &TypedTensor<'a, impl ExpertId>,
        num_experts: u32,
        order: StreamOrder<'_>,
    ) -> Result<DispatchLayout<'a>> {
        self.lay_out(topk_idx, num_experts, None, order)
    }

    /// [`Buffer::get_dispatch_layout`] with ids of logical experts, which `map` translates to ids
    /// of physical ones. Counts, results and the dispatch have physical ids. Ranks may have
    /// different maps, of placements with as many local experts. The device translates ids when it
    /// runs this call, and again in each replay of a graph. A dispatch and the calls behind it
    /// therefore always use one state of the map.
    ///
    /// # Errors
    /// As [`Buffer::get_dispatch_layout`], and [`Error::Argument`] where the map is for another
    /// number of ranks.
    pub fn get_placed_dispatch_layout<'a>(
        &mut self,
        topk_idx: &TypedTensor<'a, impl ExpertId>,
        map: &ExpertMap,
        order: StreamOrder<'_>,
    ) -> Result<DispatchLayout<'a>> {
        map.check_ranks(self.core.topology().ranks())?;
        self.lay_out(topk_idx, map.num_physical_experts(), Some(map), order)
    }

    fn lay_out<'a>(
        &mut self,
        topk_idx: &Tensor<'a>,
        num_experts: u32,
        map: Option<&ExpertMap>,
        order: StreamOrder<'_>,
    ) -> Result<DispatchLayout<'a>> {
        let capturing = self.core.begin(order)?;
        let dims = [("num_tokens", None), ("num_topk", None)];
        topk_idx.expect("topk_idx", &[DType::I64, DType::I32], &dims)?;
        let (num_tokens, num_topk) = (self.check_tokens(topk_idx.rows())?, topk_idx.columns());
        if num_topk == 0 || num_topk > MAX_TOPK as u64 {
            return Err(Error::argument("num_topk", num_topk, format!("must be 1 to {MAX_TOPK}")));
        }
        self.check_experts(num_experts)?;

        let (ranks, tokens) = (self.core.topology().ranks() as u64, num_tokens as u64);
        let nodes = self.core.topology().nodes as u64;
        let (block, tables) = self.core.arena().take(|pieces| LayoutTables {
            invalid: pieces.push(Section::one("invalid", 8)),
            num_tokens_per_rank: pieces.array("num_tokens_per_rank", ranks, 4),
            num_tokens_per_rdma_rank: pieces.array("num_tokens_per_rdma_rank", nodes, 4),
            num_tokens_per_expert: pieces.array("num_tokens_per_expert", num_experts as u64, 4),
            is_token_in_rank: pieces.array("is_token_in_rank", tokens * ranks, 1),
            physical: pieces.array("physical_topk_idx", tokens * num_topk, 4),
        })?;
        let args = LayoutArgs {
            topk_idx: topk_idx.ptr(),
            table: map.map_or_else(ExpertTable::default, ExpertMap::table),
            physical: tables.physical,
            num_tokens_per_rank: tables.num_tokens_per_rank,
            num_tokens_per_rdma_rank: tables.num_tokens_per_rdma_rank,
            num_tokens_per_expert: tables.num_tokens_per_expert,
            is_token_in_rank: tables.is_token_in_rank,
            invalid: tables.invalid,
            num_tokens,
            num_topk: num_topk as u32,
            num_experts,
            num_ranks: self.core.topology().ranks(),
            ranks_per_node: self.ranks_per_node(),
            rank: self.rank(),
            narrow_ids: is_narrow(topk_idx),
            reserved: 0,
        };
        let shared = (self.core.topology().ranks() + num_experts + self.core.topology().nodes) * 4;
        let grid = num_tokens.div_ceil(THREADS / 32).clamp(1, self.config.num_sms);
        let entries = map.map(|map| &**map.entries());
        let mut uses = Uses::from(self.core.owners([("topk_idx", Some(topk_idx)), ("map", entries)])?);
        uses.push(block.clone() as Owner);
        let event = self.run(order, capturing, None, &uses, |buffer, stream| {
            // SAFETY: the memory of block and ids is freed only behind all work enqueued on
            // streams, and a recording keeps them.
            unsafe {
                stream.fill(tables.invalid, 0xff, 8)?;
                let counts = tables.is_token_in_rank.0 - tables.num_tokens_per_rank.0;
                stream.fill(tables.num_tokens_per_rank, 0, counts)?;
                buffer.kernels.dispatch_layout.call(stream, grid, THREADS, shared, args)
            }
        })?;
        Ok(DispatchLayout {
            topk_idx: topk_idx.clone(),
            map: map.cloned(),
            buffer: self.core.id(),
            block,
            tables,
            num_tokens,
            num_topk: num_topk as u32,
            num_experts,
            num_ranks: self.core.topology().ranks(),
            num_nodes: self.core.topology().nodes,
            event: event.map(Arc::new),
            sequence: self.core.sequence().clone(),
        })
    }

    /// An error unless the layout was made by this buffer.
    pub(super) fn check_layout(&self, layout: &DispatchLayout<'_>) -> Result<()> {
        if layout.buffer == self.core.id() {
            return Ok(());
        }
        Err(Error::StaleHandle(
            "the layout was made by another buffer; make one with this buffer first".into(),
        ))
    }
}

//! Low-latency dispatch: rows go to the ranks that hold their experts.

use std::marker::PhantomData;
use std::time::Duration;

use epoxide_gpu::layout::{
    DevicePtr, ExpertTable, FEW_TOKENS, LowLatencyCall, LowLatencyDispatchArgs, SCALE_BLOCK, row_stride,
};

use super::Buffer;
use super::halves::{Arguments, Halves, Operation, Pending};
use super::layout::most_ranks;
use super::options::Quantise;
use super::results::Place;
use super::results::Received;
use crate::ep::core::setters;
use crate::ep::experts::is_narrow;
use crate::ep::tensor::{Owner, owners};
use crate::ep::{DType, ExpertId, ExpertMap, StreamOrder, Tensor, TypedTensor};
use crate::error::{Error, Result};

/// Arguments of [`Buffer::dispatch`].
#[derive(Debug, Clone, Copy)]
pub struct DispatchRequest<'a> {
    x: &'a Tensor<'a>,
    topk_idx: &'a Tensor<'a>,
    map: Option<&'a ExpertMap>,
    topk_weights: Option<&'a TypedTensor<'a, f32>>,
    scales: Option<&'a TypedTensor<'a, f32>>,
    quantise: Quantise,
    timeout: Option<Duration>,
}

impl<'a> DispatchRequest<'a> {
    /// Rows `x` to send, `[num_tokens, hidden]`, bf16 or fp8, to the experts `topk_idx`,
    /// `[num_tokens, num_topk]`: global ids, i64 or i32, or -1 for none. Weights are 1.
    pub fn new(x: &'a Tensor<'a>, topk_idx: &'a TypedTensor<'a, impl ExpertId>) -> Self {
        DispatchRequest {
            x,
            topk_idx,
            map: None,
            topk_weights: None,
            scales: None,
            quantise: Quantise::Not,
            timeout: None,
        }
    }

    setters! {
        /// Weights `[num_tokens, num_topk]` of the experts' outputs, for the combine.
        topk_weights: &'a TypedTensor<'a, f32>;
        /// Takes ids for those of logical experts, of which `map` has the places: its physical
        /// experts are the experts of the buffer. The device looks ids up in the call, and in each
        /// replay of a graph anew. Ranks may have different maps.
        map: &'a ExpertMap;
        /// Sends scales `[num_tokens, hidden / 128 rounded up]` with fp8 rows.
        scales: &'a TypedTensor<'a, f32>;
        /// Quantises bf16 rows on their way; hidden must be a multiple of 128.
        quantise: Quantise;
        /// Longest wait for a peer, instead of the buffer's: microseconds where a step must not
        /// take longer.
        timeout: Duration;
    }
}

impl Buffer {
    /// Sends every token's row to each rank that has one of its experts, into `place`, the one of
    /// the same index on every rank. Collective; does not wait for the host.
    ///
    /// # Errors
    /// Arguments that break a rule, on this rank alone; its peers then wait for it until their
    /// deadlines. [`Buffer::check`] returns errors that the device finds, once the stream has
    /// passed. These are a peer that timed out or made another call, and an expert id out of range.
    /// The rank that gave the id gets that error; others may get
    /// [`Error::PeerTimeout`](crate::Error::PeerTimeout) for that rank in a later call.
    pub fn dispatch<'p>(
        &mut self,
        place: &'p mut Place,
        request: DispatchRequest<'_>,
        order: StreamOrder<'_>,
    ) -> Result<Received<'p>> {
        let (operation, received) = self.prepare_dispatch(place, request, order)?;
        let event = self.launch(order, &operation, Halves::BOTH)?;
        Ok(Received { event, ..received })
    }

    /// The first half of [`Buffer::dispatch`]: sends rows. The second, [`Pending::receive`], waits
    /// for those of the peers; no multiprocessor is held in between.
    ///
    /// # Errors
    /// The same as [`Buffer::dispatch`].
    pub fn dispatch_send<'b, 'p>(
        &'b mut self,
        place: &'p mut Place,
        request: DispatchRequest<'_>,
        order: StreamOrder<'_>,
    ) -> Result<Pending<'b, Received<'p>>> {
        let (operation, received) = self.prepare_dispatch(place, request, order)?;
        self.send(order, operation, received)
    }

    fn prepare_dispatch<'p>(
        &self,
        place: &'p mut Place,
        request: DispatchRequest<'_>,
        order: StreamOrder<'_>,
    ) -> Result<(Operation, Received<'p>)> {
        let outcome = self.outcome(order)?;
        let place = place.0.place();
        self.core.check_place(place)?;
        let DispatchRequest { x, topk_idx, map, topk_weights, scales, quantise, timeout } = request;
        let (hidden, num_tokens) = (self.options.shape.hidden, self.check_tokens(x.rows())?);
        let tokens = Some(u64::from(num_tokens));
        x.expect("x", &[DType::Bf16, DType::Fp8E4m3], &[("num_tokens", tokens), ("hidden", Some(hidden))])?;
        x.expect_rows_of_16("x")?;
        let entries = [("num_tokens", tokens), ("num_topk", Some(self.options.shape.num_topk.into()))];
        topk_idx.expect("topk_idx", &[DType::I64, DType::I32], &entries)?;
        if let Some(map) = map {
            map.check_ranks(self.num_ranks())?;
            if map.local_experts() != self.local_experts() {
                let value = format!("{} experts on a rank", map.local_experts());
                let rule = format!(
                    "must be those of the buffer, {}: make it with num_experts = {}",
                    self.local_experts(),
                    map.num_physical_experts()
                );
                return Err(Error::argument("map", value, rule));
            }
        }
        if let Some(weights) = topk_weights {
            weights.expect("topk_weights", &[DType::F32], &entries)?;
        }
        let of_row = hidden.div_ceil(SCALE_BLOCK.into());
        let is_fp8 = x.dtype() == DType::Fp8E4m3;
        quantise.check(hidden, x.dtype())?;
        if let Some(scales) = scales {
            if !is_fp8 {
                return Err(Error::argument(
                    "scales",
                    "given",
                    format!("only fp8 rows have them; x is {}", x.dtype()),
                ));
            }
            scales.expect(
                "scales",
                &[DType::F32],
                &[("num_tokens", tokens), ("hidden / 128", Some(of_row))],
            )?;
        }
        let dtype = if quantise == Quantise::Not { x.dtype() } else { DType::Fp8E4m3 };
        let with_scales = scales.is_some() || quantise != Quantise::Not;
        let row_bytes = hidden * dtype.size();

        let call = LowLatencyCall {
            is_combine: false,
            has_scales: with_scales,
            place: place.index(),
            row_bytes: row_bytes as u32,
            num_tokens,
        };
        let null = DevicePtr::NULL;
        let args = LowLatencyDispatchArgs {
            common: self.args(place, call, timeout),
            x: x.ptr(),
            scales: scales.map_or(null, |scales| scales.ptr()),
            topk_idx: topk_idx.ptr(),
            table: map.map_or_else(ExpertTable::default, ExpertMap::table),
            topk_weights: topk_weights.map_or(null, |weights| weights.ptr()),
            row_bytes: row_bytes as u32,
            num_scales: if scales.is_some() { of_row as u32 } else { 0 },
            quantise: quantise as u32,
            narrow_ids: is_narrow(topk_idx),
        };
        let entries = map.map(|map| &**map.entries());
        let uses = [Some(x), Some(topk_idx), entries, topk_weights.map(|it| &**it), scales.map(|it| &**it)];
        let lease = place.begin()?;
        let operation = Operation {
            name: "low-latency dispatch",
            kernel: Arguments::Dispatch(args),
            place: place.clone(),
            send_blocks: self.dispatch_blocks(num_tokens),
            receive_blocks: self.receive_blocks(),
            fills: Some(lease.clone()),
            uses: owners(uses),
        };
        let owner = || lease.clone() as Owner;
        let (rows, experts, ranks) =
            (self.rows(), u64::from(self.local_experts()), u64::from(self.num_ranks()));
        let tables = &place.room().tables;
        let x = Tensor::in_memory(place.room().recv_x, dtype, &[rows, hidden], owner());
        let of_experts =
            |name, ptr| TypedTensor::in_memory(ptr, &[experts, rows], owner()).result(name, &outcome);
        let received = Received {
            x: x.with_row_stride(row_stride(row_bytes)).result("x", &outcome),
            scales: with_scales.then(|| {
                TypedTensor::in_memory(place.room().recv_scales, &[of_row, rows], owner())
                    .result("scales", &outcome)
            }),
            num_tokens: TypedTensor::in_memory(
                tables.num_tokens,
                &[most_ranks(self.core.topology())],
                owner(),
            )
            .result("num_tokens", &outcome),
            expert_counts: TypedTensor::in_memory(tables.expert_counts, &[experts], owner())
                .result("expert_counts", &outcome),
            expert_rows: of_experts("expert_rows", tables.expert_rows),
            src_info: of_experts("src_info", tables.src_info),
            layout_range: TypedTensor::in_memory(tables.layout_range, &[experts, ranks], owner())
                .result("layout_range", &outcome),
            event: None,
            combine_rows: place.room().combine_rows.map(|rows| {
                let rows = Tensor::in_memory(rows, DType::Bf16, &[self.rows(), hidden], owner());
                rows.with_row_stride(row_stride(hidden * 2)).named("rows")
            }),
            num_local_tokens: num_tokens,
            generation: self.generation.clone(),
            lease,
            place: PhantomData,
        };
        Ok((operation, received))
    }

    /// Blocks of the first half. The links of more than two ranks are full with fewer blocks, each of
    /// which then waits for its stores once for two tokens: 128 tokens between four ranks leave 4 to
    /// 6 us earlier.
    fn dispatch_blocks(&self, num_tokens: u32) -> u32 {
        const TOKENS_OF_BLOCKS_WITH_ONE: u32 = 64;
        let links_are_full = self.core.topology().nodes == 1 && self.num_ranks() > 2;
        if links_are_full && num_tokens > TOKENS_OF_BLOCKS_WITH_ONE {
            num_tokens.div_ceil(2)
        } else {
            num_tokens
        }
    }

    /// Blocks of the second half, which list the rows of experts. Across nodes they also copy rows
    /// to their places, several rows per block. With few tokens each warp lists an expert, and a
    /// block has two: with 15, a pair of 16 tokens took 1.1 us longer.
    fn receive_blocks(&self) -> u32 {
        const ROWS_OF_BLOCK: u32 = 16;
        const EXPERTS_OF_BLOCK: u32 = 2;
        let (rows, experts) = (self.num_ranks() * self.options.shape.max_tokens, self.local_experts());
        match self.core.topology().nodes {
            1 if rows <= FEW_TOKENS => experts.div_ceil(EXPERTS_OF_BLOCK),
            1 => experts,
            _ => rows.div_ceil(ROWS_OF_BLOCK).max(experts),
        }
    }

    fn check_tokens(&self, tokens: u64) -> Result<u32> {
        let most = self.options.shape.max_tokens;
        if tokens <= u64::from(most) {
            return Ok(tokens as u32);
        }
        let rule = format!("the buffer was made for at most {most}: create it with max_tokens >= {tokens}");
        Err(Error::argument("num_tokens", tokens, rule))
    }
}

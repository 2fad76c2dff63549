//! Low-latency dispatch: rows go to the ranks that hold their experts.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use epoxide_gpu::layout::{self, DevicePtr, LowLatencyCall, LowLatencyDispatchArgs, SCALE_BLOCK, row_stride};

use super::buffer::Buffer;
use super::halves::{Arguments, Halves, Operation, Pending};
use super::layout::most_ranks;
use super::place::{Lease, Place};
use crate::driver::Event;
use crate::ep::tensor::Owner;
use crate::ep::{DType, StreamOrder, Tensor, TypedTensor};
use crate::error::{Error, Result};

/// What an operation does to BF16 rows on their way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantise {
    /// They travel as they are.
    Not,
    /// They travel as e4m3. Each 128 elements have a scale of their own, their largest magnitude (at least 1e-4) over 448, that they are to be
    /// multiplied with.
    Fp8,
    /// The same, with the next larger power of two as scale.
    Fp8PowerOfTwo,
}

impl Quantise {
    /// An error unless rows of so many elements of the type can be quantised so.
    pub(super) fn check(self, hidden: u64, dtype: DType) -> Result<()> {
        let is_possible = dtype == DType::Bf16 && hidden.is_multiple_of(SCALE_BLOCK.into());
        if self == Quantise::Not || is_possible {
            return Ok(());
        }
        let rule = format!("quantising takes bf16 rows with a multiple of {SCALE_BLOCK} elements");
        Err(Error::argument("quantise", format!("{self:?} of {hidden} x {dtype}"), rule))
    }

    /// What kernels are told.
    pub(super) fn on_device(self) -> u32 {
        match self {
            Quantise::Not => layout::Quantise::Not as u32,
            Quantise::Fp8 => layout::Quantise::Fp8 as u32,
            Quantise::Fp8PowerOfTwo => layout::Quantise::Fp8PowerOfTwo as u32,
        }
    }
}

/// Arguments of [`Buffer::dispatch`].
#[derive(Debug, Clone, Copy)]
pub struct DispatchRequest<'a> {
    x: &'a Tensor<'a>,
    topk_idx: &'a TypedTensor<'a, i64>,
    topk_weights: Option<&'a TypedTensor<'a, f32>>,
    scales: Option<&'a TypedTensor<'a, f32>>,
    quantise: Quantise,
    timeout: Option<Duration>,
}

impl<'a> DispatchRequest<'a> {
    /// Rows `x` to send, `[num_tokens, hidden]`, bf16 or fp8, to the experts `topk_idx`, `[num_tokens, num_topk]`: global ids, or -1 for
    /// none. Weights are 1.
    pub fn new(x: &'a Tensor<'a>, topk_idx: &'a TypedTensor<'a, i64>) -> Self {
        DispatchRequest {
            x,
            topk_idx,
            topk_weights: None,
            scales: None,
            quantise: Quantise::Not,
            timeout: None,
        }
    }

    /// Weights `[num_tokens, num_topk]` of the experts' outputs, for the combine.
    pub fn topk_weights(mut self, weights: &'a TypedTensor<'a, f32>) -> Self {
        self.topk_weights = Some(weights);
        self
    }

    /// Sends scales `[num_tokens, hidden / 128 rounded up]` with fp8 rows.
    pub fn scales(mut self, scales: &'a TypedTensor<'a, f32>) -> Self {
        self.scales = Some(scales);
        self
    }

    /// Quantises bf16 rows on their way; hidden must be a multiple of 128.
    pub fn quantise(mut self, quantise: Quantise) -> Self {
        self.quantise = quantise;
        self
    }

    /// Longest wait for a peer, instead of the buffer's: microseconds where a step must not take longer.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}

/// What a dispatch brings. The tensors lie in the place that the dispatch was given, and hold on to its borrow; [`Buffer::combine`] answers
/// it. `rows` stands for `num_ranks * max_tokens`.
#[derive(Debug)]
#[non_exhaustive]
pub struct Received<'p> {
    /// `[rows, hidden]`: token t of rank s is row `s * max_tokens + t`, where it came here; other rows hold anything. Rows are
    /// `row_stride()` bytes apart, a multiple of 128.
    pub x: Tensor<'p>,
    /// f32 `[hidden / 128 rounded up, rows]`, of fp8 rows: a row's scales are a column.
    pub scales: Option<TypedTensor<'p, f32>>,
    /// `[8]`, across nodes `[32]`: tokens of each rank.
    pub num_tokens: TypedTensor<'p, i32>,
    /// `[local_experts]`: rows of each local expert.
    pub expert_counts: TypedTensor<'p, i32>,
    /// `[local_experts, rows]`: the rows of each local expert, by source rank, then by token; behind as many as it has, anything.
    /// [`Buffer::gather_by_expert`] copies them together.
    pub expert_rows: TypedTensor<'p, i32>,
    /// `[local_experts, rows]`: their tokens' indices on their source ranks.
    pub src_info: TypedTensor<'p, i32>,
    /// `[local_experts, num_ranks]`: of each source rank the number of an expert's rows in the low 32 bits, and in the high ones where in
    /// `expert_rows[expert]` they begin.
    pub layout_range: TypedTensor<'p, i64>,
    /// Where an asynchronous call ends.
    pub event: Option<Event>,
    pub(super) num_local_tokens: u32,
    /// Of the buffer, at the dispatch.
    pub(super) generation: u64,
    pub(super) lease: Arc<Lease>,
    pub(super) place: PhantomData<&'p mut Place>,
}

impl Buffer {
    /// Sends every token's row to each rank that has one of its experts, into `place`, the one of the same index on every rank. Collective;
    /// does not wait for the host.
    ///
    /// # Errors
    /// Arguments that break a rule, on this rank alone; its peers then wait for it until their deadlines. What shows on the device shows in
    /// [`Buffer::check`] once the stream has passed: a peer that did not come or made another call, an expert id out of range.
    pub fn dispatch<'p>(
        &mut self,
        place: &'p mut Place,
        request: DispatchRequest<'_>,
        order: StreamOrder<'_>,
    ) -> Result<Received<'p>> {
        let (operation, received) = self.prepare_dispatch(place, request)?;
        let event = self.launch(order, &operation, Halves::BOTH)?;
        Ok(Received { event, ..received })
    }

    /// The first half of [`Buffer::dispatch`]: rows leave. The second, [`Pending::receive`], waits for those of the peers; no multiprocessor
    /// is held in between.
    ///
    /// # Errors
    /// As [`Buffer::dispatch`].
    pub fn dispatch_send<'b, 'p>(
        &'b mut self,
        place: &'p mut Place,
        request: DispatchRequest<'_>,
        order: StreamOrder<'_>,
    ) -> Result<Pending<'b, Received<'p>>> {
        let (operation, received) = self.prepare_dispatch(place, request)?;
        self.send(order, operation, received)
    }

    fn prepare_dispatch<'p>(
        &self,
        place: &'p mut Place,
        request: DispatchRequest<'_>,
    ) -> Result<(Operation, Received<'p>)> {
        let place = &place.0;
        self.check_place(place)?;
        let DispatchRequest { x, topk_idx, topk_weights, scales, quantise, timeout } = request;
        let (hidden, num_tokens) = (self.options.hidden, self.check_tokens(x.rows())?);
        let tokens = Some(u64::from(num_tokens));
        x.expect("x", &[DType::Bf16, DType::Fp8E4m3], &[("num_tokens", tokens), ("hidden", Some(hidden))])?;
        x.expect_rows_of_16("x")?;
        let entries = [("num_tokens", tokens), ("num_topk", Some(self.options.num_topk.into()))];
        topk_idx.expect("topk_idx", &[DType::I64], &entries)?;
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
            place: place.index,
            row_bytes: row_bytes as u32,
            num_tokens,
        };
        let null = DevicePtr::NULL;
        let args = LowLatencyDispatchArgs {
            common: self.args(place, call, timeout),
            x: x.ptr(),
            scales: scales.map_or(null, |scales| scales.ptr()),
            topk_idx: topk_idx.ptr(),
            topk_weights: topk_weights.map_or(null, |weights| weights.ptr()),
            row_bytes: row_bytes as u32,
            num_scales: if scales.is_some() { of_row as u32 } else { 0 },
            quantise: quantise.on_device(),
            reserved: 0,
        };
        let uses = [x.owner(), topk_idx.owner()].into_iter();
        let uses = uses.chain([
            topk_weights.and_then(|weights| weights.owner()),
            scales.and_then(|scales| scales.owner()),
        ]);
        let operation = Operation {
            name: "low-latency dispatch",
            kernel: Arguments::Dispatch(args),
            place: place.clone(),
            send_blocks: num_tokens,
            receive_blocks: self.receive_blocks(),
            uses: uses.flatten().cloned().collect(),
        };
        let lease = Arc::new(Lease(place.clone()));
        let owner = || lease.clone() as Owner;
        let (rows, experts, ranks) =
            (self.rows(), u64::from(self.local_experts()), u64::from(self.num_ranks()));
        let tables = &place.tables;
        let x = Tensor::in_memory(place.recv_x, dtype, &[rows, hidden], owner());
        let of_experts = |name, ptr| TypedTensor::in_memory(ptr, &[experts, rows], owner()).named(name);
        let received = Received {
            x: x.with_row_stride(row_stride(row_bytes)).named("x"),
            scales: with_scales
                .then(|| TypedTensor::in_memory(place.recv_scales, &[of_row, rows], owner()).named("scales")),
            num_tokens: TypedTensor::in_memory(tables.num_tokens, &[most_ranks(self.topology)], owner())
                .named("num_tokens"),
            expert_counts: TypedTensor::in_memory(tables.expert_counts, &[experts], owner())
                .named("expert_counts"),
            expert_rows: of_experts("expert_rows", tables.expert_rows),
            src_info: of_experts("src_info", tables.src_info),
            layout_range: TypedTensor::in_memory(tables.layout_range, &[experts, ranks], owner())
                .named("layout_range"),
            event: None,
            num_local_tokens: num_tokens,
            generation: self.generation,
            lease,
            place: PhantomData,
        };
        Ok((operation, received))
    }

    /// Pieces of work in the second half: experts whose rows are listed, and across nodes rows that are put where they belong, some to a block.
    fn receive_blocks(&self) -> u32 {
        const ROWS_OF_BLOCK: u32 = 16;
        let rows = self.num_ranks() * self.options.max_tokens;
        let blocks = if self.topology.nodes == 1 { 0 } else { rows.div_ceil(ROWS_OF_BLOCK) };
        blocks.max(self.local_experts())
    }

    fn check_tokens(&self, tokens: u64) -> Result<u32> {
        let most = self.options.max_tokens;
        if tokens <= u64::from(most) {
            return Ok(tokens as u32);
        }
        let rule = format!("the buffer was made for at most {most}: create it with max_tokens >= {tokens}");
        Err(Error::argument("num_tokens", tokens, rule))
    }
}

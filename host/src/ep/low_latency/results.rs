//! What operations bring.

use std::marker::PhantomData;
use std::sync::Arc;

use super::place::{Lease, Place};
use crate::driver::Event;
use crate::ep::{Tensor, TypedTensor};

/// What a dispatch brings. The tensors lie in the place that the dispatch was given, and hold on to its borrow;
/// [`Buffer::combine`](super::Buffer::combine) answers it. `rows` stands for `num_ranks * max_tokens`.
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
    /// [`Buffer::gather_by_expert`](super::Buffer::gather_by_expert) copies them together.
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

/// What a combine brings, in the place of the dispatch that it answers.
#[derive(Debug)]
#[non_exhaustive]
pub struct Combined<'p> {
    /// bf16 `[num_tokens, hidden]`: the sum over the ranks that the token went to, accumulated in FP32 in rank order and rounded once, so bit
    /// for bit reproducible. 0 for a token that went nowhere.
    pub x: Tensor<'p>,
    /// Where an asynchronous call ends.
    pub event: Option<Event>,
    pub(super) place: PhantomData<&'p mut Place>,
}

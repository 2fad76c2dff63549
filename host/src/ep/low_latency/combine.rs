//! Low-latency combine: every token's owner sums the rows that came back.

use std::marker::PhantomData;
use std::sync::Arc;

use epoxide_gpu::kernels::{Kernel as _, LOW_LATENCY_SHARED_BYTES, LowLatencyCombine};
use epoxide_gpu::layout::LowLatencyCombineArgs;

use super::buffer::{Buffer, THREADS};
use super::dispatch::Received;
use super::place::{Lease, Place};
use crate::driver::Event;
use crate::ep::tensor::Owner;
use crate::ep::{DType, StreamOrder, Tensor};
use crate::error::Result;

/// What the experts made of the rows that a dispatch brought. `rows` stands for `num_ranks * max_tokens`. The same kind on every rank.
#[derive(Debug, Clone, Copy)]
pub enum ExpertRows<'a> {
    /// bf16 `[local_experts * rows, hidden]`: row `e * rows + i` is what expert e made of row `expert_rows[e][i]`. The sum over a token's
    /// experts on this rank, each times its weight, is accumulated in FP32 in the order of its top-k entries and rounded once.
    ByExpert(&'a Tensor<'a>),
    /// bf16 `[rows, hidden]`, in the order of [`Received::x`]: weighted and summed over this rank's experts already.
    ByRow(&'a Tensor<'a>),
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
    place: PhantomData<&'p mut Place>,
}

impl Buffer {
    /// Returns what the experts made of the rows of `received`, and sums. Collective; does not wait for the host.
    ///
    /// The received rows are up with it: their peers may overwrite them from here on.
    ///
    /// # Errors
    /// As [`Buffer::dispatch`].
    pub fn combine<'p>(
        &mut self,
        received: Received<'p>,
        rows: ExpertRows<'_>,
        order: StreamOrder<'_>,
    ) -> Result<Combined<'p>> {
        let (num_tokens, place) = (received.num_local_tokens, received.lease.0.clone());
        self.check_place(&place)?;
        let hidden = self.options.hidden;
        let (x, expected, by_expert) = match rows {
            ExpertRows::ByExpert(x) => (x, self.rows() * u64::from(self.local_experts()), 1),
            ExpertRows::ByRow(x) => (x, self.rows(), 0),
        };
        x.expect_strided("rows", &[DType::Bf16], &[("rows", Some(expected)), ("hidden", Some(hidden))])?;
        x.expect_rows_of_16("rows")?;
        let args = LowLatencyCombineArgs {
            common: self.args(&place, num_tokens, true, hidden * 2),
            x: x.ptr(),
            x_stride: x.row_stride(),
            combined_x: place.combined_x,
            row_bytes: (hidden * 2) as u32,
            by_expert,
        };
        let grid = self.blocks_for(self.options.max_tokens * self.num_ranks());
        // Whoever was given the rows on other streams comes first: peers may overwrite them once this rank has entered the combine.
        drop(received);
        let uses: Vec<Owner> = x.owner().cloned().into_iter().collect();
        let event = self.run(order, "low-latency combine", &place, uses, |buffer, stream| {
            // SAFETY: the rows go back behind all that streams have been given, and a recording keeps them; the rest is the buffer's.
            unsafe {
                let call = LowLatencyCombine::call(args);
                stream.call(&buffer.combine_kernel, grid, THREADS, LOW_LATENCY_SHARED_BYTES, call)
            }
        })?;
        let owner = Arc::new(Lease(place.clone())) as Owner;
        let x = Tensor::in_memory(place.combined_x, DType::Bf16, &[num_tokens.into(), hidden], owner);
        Ok(Combined { x, event, place: PhantomData })
    }
}

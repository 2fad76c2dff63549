//! Low-latency combine: every token's owner sums the rows that came back.

use std::marker::PhantomData;
use std::sync::Arc;

use epoxide_gpu::layout::LowLatencyCombineArgs;

use super::buffer::Buffer;
use super::dispatch::Received;
use super::halves::{Arguments, Halves, Operation, Pending};
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
    pub(super) place: PhantomData<&'p mut Place>,
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
        let (operation, combined) = self.prepare_combine(received, rows)?;
        let event = self.launch(order, &operation, Halves::BOTH)?;
        Ok(Combined { event, ..combined })
    }

    /// The first half of [`Buffer::combine`]: rows go back. The second, [`Pending::receive`], waits for those of the peers and sums; no
    /// multiprocessor is held in between.
    ///
    /// # Errors
    /// As [`Buffer::dispatch`].
    pub fn combine_send<'b, 'p>(
        &'b mut self,
        received: Received<'p>,
        rows: ExpertRows<'_>,
        order: StreamOrder<'_>,
    ) -> Result<Pending<'b, Combined<'p>>> {
        let (operation, combined) = self.prepare_combine(received, rows)?;
        self.send(order, operation, combined)
    }

    fn prepare_combine<'p>(
        &self,
        received: Received<'p>,
        rows: ExpertRows<'_>,
    ) -> Result<(Operation, Combined<'p>)> {
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
        // Whoever was given the rows on other streams comes first: peers may overwrite them once this rank has entered the combine.
        drop(received);
        let operation = Operation {
            name: "low-latency combine",
            kernel: Arguments::Combine(args),
            place: place.clone(),
            send_blocks: self.options.max_tokens * self.num_ranks(),
            receive_blocks: num_tokens,
            uses: x.owner().cloned().into_iter().collect(),
        };
        let owner = Arc::new(Lease(place.clone())) as Owner;
        let x = Tensor::in_memory(place.combined_x, DType::Bf16, &[num_tokens.into(), hidden], owner);
        Ok((operation, Combined { x, event: None, place: PhantomData }))
    }
}

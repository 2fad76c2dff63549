//! Low-latency combine: every token's owner sums the returned rows.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use epoxide_gpu::layout::{DevicePtr, LowLatencyCall, LowLatencyCombineArgs, SCALE_BLOCK, pieces_of};

use super::Buffer;
use super::fault::Generation;
use super::halves::{Arguments, Operation, Pending};
use super::options::check_sms;
use super::results::{Combined, Received};
use crate::driver::Event;
use crate::ep::core::{Halves, Uses, check_timeout, setters};
use crate::ep::tensor::Owner;
use crate::ep::{DType, Quantise, StreamOrder, Tensor, TypedTensor};
use crate::error::{Error, Result};

/// Arguments of [`Buffer::combine`]: the experts' results for the rows of a dispatch. `rows` stands
/// for `num_ranks * max_tokens`. `quantise` is the same on every rank. One rank may give rows
/// `by_expert` and another one `by_row`, but all ranks give rows `in_pool` or none does. Weighting,
/// `num_sms`, `cumulative_wait_ns` and the deadline may differ between ranks.
#[derive(Debug, Clone, Copy)]
pub struct CombineRequest<'a> {
    rows: Rows<'a>,
    weights: Weights,
    quantise: Quantise,
    cumulative_wait_ns: Option<&'a TypedTensor<'a, i64>>,
    num_sms: Option<u32>,
    timeout: Option<Duration>,
}

/// The factors of rows by expert in a combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Weights {
    OfDispatch,
    Ones,
}

/// The location of the experts' results.
#[derive(Debug, Clone, Copy)]
enum Rows<'a> {
    ByExpert(&'a Tensor<'a>),
    ByRow(&'a Tensor<'a>),
    InPool,
}

impl<'a> CombineRequest<'a> {
    fn of(rows: Rows<'a>) -> Self {
        CombineRequest {
            rows,
            weights: Weights::OfDispatch,
            quantise: Quantise::None,
            cumulative_wait_ns: None,
            num_sms: None,
            timeout: None,
        }
    }

    /// `[local_experts * rows, hidden]` of
    /// [`Options::combine_dtype`](super::Options::combine_dtype), bf16 unless it is set: row
    /// `e * rows + i` is the result of expert e for row `expert_rows[e][i]`. Combine sums over a
    /// token's experts on this rank, each times its weight. The sum is accumulated in FP32 in the
    /// order of the token's top-k entries and rounded once.
    ///
    /// If the dispatch brought rows [by expert](super::DispatchRequest::by_expert), they are the
    /// results for those: `[rows_by_expert, hidden]`, in the same order. Padding may hold
    /// anything, and is not read.
    pub fn by_expert(x: &'a Tensor<'a>) -> Self {
        CombineRequest::of(Rows::ByExpert(x))
    }

    /// `[rows, hidden]` of [`Options::combine_dtype`](super::Options::combine_dtype), bf16 unless
    /// it is set, in the order of [`Received::x`]: weighted and summed over this rank's experts
    /// already. Weights of the dispatch are not applied.
    pub fn by_row(x: &'a Tensor<'a>) -> Self {
        CombineRequest::of(Rows::ByRow(x))
    }

    /// The same rows, stored by experts in [`Received::combine_rows`]: the tokens' owners read them
    /// there without a copy. On every rank or on none; within a node, of bf16.
    pub fn in_pool() -> Self {
        CombineRequest::of(Rows::InPool)
    }

    /// Sums rows by expert as they are, without weights: the experts have applied them already.
    /// [`CombineRequest::by_row`] and [`CombineRequest::in_pool`] do so anyway.
    pub fn unweighted(mut self) -> Self {
        self.weights = Weights::Ones;
        self
    }

    setters! {
        /// Sends each rank's share of a token, of bf16 rows, as e4m3 with a scale for each 128
        /// elements: half the bytes. `hidden` must be a multiple of 128, and rows not those of the
        /// pool. [`Quantise::Mxfp8`] is for dispatches alone.
        ///
        /// The share is rounded once, from its FP32 sum. The error of each element is at most 16
        /// times its block's scale, which [`Quantise`] defines. The error of a token's sum is at
        /// most that of its shares together, plus the rounding to bf16.
        quantise: Quantise;
        /// Adds the nanoseconds that this rank waited for each rank's results to these, i64
        /// `[num_ranks]`, as a dispatch does
        /// ([`DispatchRequest::cumulative_wait_ns`](super::DispatchRequest::cumulative_wait_ns)).
        /// Rows that owners gather ([`CombineRequest::in_pool`]) are waited for until their rank
        /// has entered the combine.
        cumulative_wait_ns: &'a TypedTensor<'a, i64>;
        /// Most multiprocessors of the call, as
        /// [`DispatchRequest::num_sms`](super::DispatchRequest::num_sms). A dispatch and its
        /// combine may differ.
        num_sms: u32;
        /// Longest wait for a peer, instead of the buffer's.
        timeout: Duration;
    }
}

impl Buffer {
    /// Returns the experts' results for the rows of `received`, and sums them. Collective; the host
    /// does not wait.
    ///
    /// The received rows become invalid: peers may overwrite them from here on.
    ///
    /// # Errors
    /// The same as [`Buffer::dispatch`]. A call whose arguments break a rule has taken `received`
    /// as well, so it cannot be repeated. Peers then wait for this rank until their deadlines:
    /// check the rows' type and shape before the call, where they can be wrong.
    /// [`Error::StaleHandle`] where a later dispatch has overwritten the rows, such as that of a
    /// step, or where the ranks regrouped since.
    pub fn combine<'p>(
        &mut self,
        received: Received<'p>,
        request: CombineRequest<'_>,
        order: StreamOrder<'_>,
    ) -> Result<Combined<'p>> {
        let (mut operation, combined) = self.prepare_combine(received, request, order)?;
        let event = self.launch(order, &mut operation, Halves::Both)?;
        Ok(Combined { event, ..combined })
    }

    /// The first half of [`Buffer::combine`]: returns rows. The second, [`Pending::receive`], waits
    /// for those of the peers and sums; no multiprocessor is held in between. Collective; each rank
    /// decides for itself whether it calls the halves.
    ///
    /// # Errors
    /// The same as [`Buffer::combine`].
    pub fn combine_send<'b, 'p>(
        &'b mut self,
        received: Received<'p>,
        request: CombineRequest<'_>,
        order: StreamOrder<'_>,
    ) -> Result<Pending<'b, Combined<'p>>> {
        let (operation, combined) = self.prepare_combine(received, request, order)?;
        self.send(order, operation, combined)
    }

    /// [`Buffer::combine`] with the sums in a tensor of the caller's: `out`, `[num_tokens, hidden]`
    /// of the rows' type. The receiving rank's kernel writes there; nothing needs to be
    /// registered, and nothing is copied. The values are those of [`Combined::x`]. The place is
    /// free for a dispatch at once. Gives the event of an asynchronous call. Collective, as
    /// [`Buffer::combine`]; each rank decides for itself which of the two it calls.
    ///
    /// Reading `out` on the host gives the error of the combine, if it has failed, until
    /// [`Tensor::write`] fills it.
    ///
    /// # Errors
    /// The same as [`Buffer::combine`]. [`Error::DType`], [`Error::Shape`] and [`Error::Argument`]
    /// where `out` breaks a rule or shares memory with the rows.
    pub fn combine_into(
        &mut self,
        received: Received<'_>,
        request: CombineRequest<'_>,
        out: &Tensor<'_>,
        order: StreamOrder<'_>,
    ) -> Result<Option<Event>> {
        let mut operation = self.prepare_combine_into(received, request, out, order)?;
        self.launch(order, &mut operation, Halves::Both)
    }

    /// The first half of [`Buffer::combine_into`]. The second is [`Pending::receive`]. Collective.
    ///
    /// # Errors
    /// The same as [`Buffer::combine_into`].
    pub fn combine_send_into<'b, 'o>(
        &'b mut self,
        received: Received<'_>,
        request: CombineRequest<'_>,
        out: &'o Tensor<'o>,
        order: StreamOrder<'_>,
    ) -> Result<Pending<'b, &'o Tensor<'o>>> {
        let operation = self.prepare_combine_into(received, request, out, order)?;
        self.send(order, operation, out)
    }

    fn prepare_combine_into(
        &self,
        received: Received<'_>,
        request: CombineRequest<'_>,
        out: &Tensor<'_>,
        order: StreamOrder<'_>,
    ) -> Result<Operation> {
        let hidden = self.options.shape.hidden;
        let dims = [("num_tokens", Some(received.num_local_tokens.into())), ("hidden", Some(hidden))];
        out.expect("out", &[self.options.combine_dtype], &dims)?;
        out.expect_rows_of_16("out")?;
        let rows = match request.rows {
            Rows::ByExpert(rows) | Rows::ByRow(rows) => rows,
            Rows::InPool => received.combine_rows()?,
        };
        out.expect_apart("out", rows, "rows")?;
        let outcome = self.outcome(order)?;
        let mut operation = self.combine_operation(received, request, out.ptr(), &outcome)?;
        operation.uses.extend(self.core.owners([("out", Some(out))])?);
        operation.uses.fills_last(out, &outcome);
        Ok(operation)
    }

    fn prepare_combine<'p>(
        &self,
        received: Received<'p>,
        request: CombineRequest<'_>,
        order: StreamOrder<'_>,
    ) -> Result<(Operation, Combined<'p>)> {
        let outcome = self.outcome(order)?;
        let num_tokens = received.num_local_tokens;
        let combined_x = self.place_of(&received)?.room().own.combined_x;
        let mut operation = self.combine_operation(received, request, combined_x, &outcome)?;
        let lease = operation.place.lease();
        operation.sums = Some(lease.clone());
        let shape = [num_tokens.into(), self.options.shape.hidden];
        let x = Tensor::in_memory(combined_x, self.options.combine_dtype, &shape, lease.clone() as Owner)
            .result("combined", &outcome);
        Ok((operation, Combined { x, event: None, lease, place: PhantomData }))
    }

    /// The combine of `received` with its sums at `combined_x`.
    fn combine_operation(
        &self,
        received: Received<'_>,
        request: CombineRequest<'_>,
        combined_x: DevicePtr,
        outcome: &Arc<Generation>,
    ) -> Result<Operation> {
        let (num_tokens, place) = (received.num_local_tokens, self.place_of(&received)?);
        let (hidden, dtype) = (self.options.shape.hidden, self.options.combine_dtype);
        let CombineRequest { rows, weights, quantise, cumulative_wait_ns, num_sms, timeout } = request;
        check_sms(num_sms)?;
        check_timeout(timeout)?;
        let x = match rows {
            Rows::ByExpert(x) | Rows::ByRow(x) => x,
            Rows::InPool => received.combine_rows()?,
        };
        let segments = place.room().own.by_expert.filter(|_| received.has_segments);
        let (is_by_expert, in_pool) = (matches!(rows, Rows::ByExpert(_)), matches!(rows, Rows::InPool));
        let segments = segments.filter(|_| is_by_expert);
        let expected = match segments {
            Some(to) => ("rows_by_expert", Some(u64::from(to.rows))),
            None if is_by_expert => {
                ("local_experts * rows", Some(self.rows() * u64::from(self.local_experts())))
            }
            None => ("rows", Some(self.rows())),
        };
        let is_other = matches!(x.dtype(), DType::Bf16 | DType::F16 | DType::F32) && x.dtype() != dtype;
        if is_other {
            let rule = format!(
                "the buffer sums rows of {dtype}: create it with Options::combine_dtype({:?}) to sum these",
                x.dtype()
            );
            return Err(Error::argument("rows", format!("of {}", x.dtype()), rule));
        }
        x.expect_strided("rows", &[dtype], &[expected, ("hidden", Some(hidden))])?;
        x.expect_rows_of_16("rows")?;
        // Peers return rows to the memory of rows in the pool.
        if let (false, Some(pooled)) = (in_pool, &received.combine_rows) {
            x.expect_apart("rows", pooled, "combine_rows")?;
        }
        if in_pool && quantise != Quantise::None {
            let rule = "rows in the pool are read as they are: leave them in memory of your own, and give that by row, to quantise them";
            return Err(Error::argument("quantise", format!("{quantise:?}"), rule));
        }
        if quantise == Quantise::Mxfp8 {
            let rule = "rows return as they are or with f32 scales: give Fp8 or Fp8PowerOfTwo";
            return Err(Error::argument("quantise", format!("{quantise:?}"), rule));
        }
        quantise.check(hidden, x.dtype(), SCALE_BLOCK)?;
        let is_quantised = quantise != Quantise::None;
        let row_bytes = hidden * if is_quantised { DType::Fp8E4m3 } else { dtype }.size();
        let call = LowLatencyCall {
            is_combine: true,
            has_scales: is_quantised,
            place: place.index(),
            // No row is sent from the pool.
            row_bytes: if in_pool { 0 } else { row_bytes as u32 },
            num_tokens,
        };
        let mut common = self.args(&place, call, timeout);
        if let Some(to) = segments {
            common.tables.slots = to.slots;
        }
        if weights == Weights::Ones {
            common.tables.weights = self.unit_weights;
        }
        let args = LowLatencyCombineArgs {
            common,
            x: x.ptr(),
            x_stride: x.row_stride(),
            combined_x,
            row_bytes: row_bytes as u32,
            by_expert: is_by_expert.into(),
            quantise: quantise as u32,
            spoils: self.options.nan_on_failure.into(),
        };
        // Rows in the pool live as long as the buffer.
        let mut uses = Uses::from(self.core.owners([("rows", Some(x).filter(|_| !in_pool))])?);
        let wait_ns = self.wait_ns(cumulative_wait_ns, outcome, &mut uses)?;
        Ok(Operation {
            name: "low-latency combine",
            kernel: if in_pool { Arguments::PooledCombine(args) } else { Arguments::Combine(args) },
            place: place.clone(),
            // One piece of a row per block, though one warp moves it: pieces on one multiprocessor
            // wait for each other. One more block publishes the call.
            send_blocks: self.options.shape.max_tokens * self.num_ranks() * pieces_of(row_bytes as u32) + 1,
            receive_blocks: num_tokens * pieces_of(row_bytes as u32),
            fills: None,
            rows: Some(received.lease),
            sums: None,
            records: None,
            cumulative_counts: None,
            num_sms,
            wait_ns,
            packs_scales: false,
            uses,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::driver::virt::{VirtConfig, VirtualGpu};
    use crate::driver::{Outcome, Stream};
    use crate::group::run_threads;
    use crate::lock::lock;
    use crate::low_latency::{DispatchRequest, Options, Shape};

    /// The outcome of a call that filled a tensor, and has failed.
    #[derive(Debug)]
    struct Failed;

    impl Outcome for Failed {
        fn report(&self) -> Result<()> {
            Err(Error::internal("test", "an earlier call has failed"))
        }

        fn order_before(&self, _: &Stream) -> Result<()> {
            Ok(())
        }
    }

    /// Runs `work` with the buffer of one rank, a token of ones, and its expert.
    fn on_one_rank(work: impl Fn(Buffer, &Stream, &Tensor<'_>, &TypedTensor<'_, i64>) -> Result<()> + Sync) {
        run_threads(1, Duration::from_secs(60), |_, group| {
            let device = VirtualGpu::new(VirtConfig::default());
            let stream = Stream::new(&device)?;
            let shape = Shape { max_tokens: 1, hidden: 8, num_topk: 1, num_experts: 1 };
            let x = Tensor::from_host(&stream, DType::Bf16, &[1, 8], &[half::bf16::ONE; 8])?;
            let ids = TypedTensor::from_host(&stream, &[1, 1], &[0i64])?;
            work(Buffer::new(device, &*group, Options::new(shape))?, &stream, &x, &ids)
        })
        .unwrap();
    }

    #[test]
    fn a_first_half_leaves_the_outcome_of_the_sums_alone() {
        on_one_rank(|mut buffer, stream, x, ids| {
            let order = StreamOrder::on(stream);
            let mut place = buffer.place(0)?;
            let out = Tensor::from_host(stream, DType::Bf16, &[1, 8], &[half::bf16::ONE; 8])?;
            let received = buffer.dispatch(&mut place, DispatchRequest::new(x, ids), order)?;
            let earlier = out.filled(&Arc::new(Failed));
            *lock(&earlier.tensor) = Some(earlier.of.clone());
            let pending = buffer.combine_send_into(received, CombineRequest::by_row(x), &out, order)?;
            assert!(out.to_host::<half::bf16>(stream).is_err());
            pending.receive(order)?;
            assert_eq!(out.to_host::<half::bf16>(stream)?, [half::bf16::ONE; 8]);
            Ok(())
        });
    }

    /// Steps run between the check of the arguments and the enqueueing, as those of another thread
    /// may.
    #[test]
    fn rows_that_a_step_has_overwritten_since_are_not_combined() {
        on_one_rank(|mut buffer, stream, x, ids| {
            let order = StreamOrder::on(stream);
            let mut place = buffer.place(0)?;
            let (out, rows) = (Tensor::alloc(stream.device(), DType::Bf16, &[1, 8])?, x.clone());
            let (request, rows) = (DispatchRequest::new(x, ids), CombineRequest::by_row(&rows));
            let mut capture = |buffer: &mut Buffer| {
                buffer.capture(stream, |buffer, order| {
                    let received = buffer.dispatch(&mut place, request, order)?.detach();
                    Ok(RefCell::new(Some(received)))
                })
            };
            let (step, other) = (capture(&mut buffer)?, capture(&mut buffer)?);

            let received = buffer.dispatch(&mut place, request, order)?;
            let mut operation = buffer.prepare_combine_into(received, rows, &out, order)?;
            let launched = step.launch(stream);
            assert!(matches!(launched, Err(Error::Argument { .. })), "{launched:?}");
            buffer.launch(order, &mut operation, Halves::Both)?;

            // Rows of a step borrow nothing.
            step.launch(stream)?;
            let of_step = step.output().take().ok_or_else(|| Error::internal("test", "taken"))?;
            let received = of_step.attach(&mut place)?;
            let mut operation = buffer.prepare_combine_into(received, rows, &out, order)?;
            other.launch(stream)?;
            let combined = buffer.launch(order, &mut operation, Halves::Both);
            assert!(matches!(combined, Err(Error::StaleHandle(_))), "{combined:?}");
            stream.synchronize()?;
            buffer.check()
        });
    }
}

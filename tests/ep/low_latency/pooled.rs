//! Rows that peers gather in the pool, where a rank gives up while another one still reads them.

use std::sync::Arc;
use std::time::Duration;

use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::driver::{DevicePtr, Stream};
use epoxide::group::ProcessGroup;
use epoxide::internal::driver::{Hooks, Stop};
use epoxide::low_latency::{
    Buffer, CombineRequest, DispatchRequest, Options, Place, Quantise, Received, Shape,
};
use epoxide::transport::{TransportKind, TransportOptions};
use epoxide::{DType, Error, Result, StreamOrder, Tensor, TypedTensor};
use epoxide_testing::harness::{PATIENCE, assert_names, run_ranks};
use epoxide_testing::tier;
use half::bf16;

const TOKENS: u64 = 12;
/// Rows of three pieces, without a gap between them.
const HIDDEN: u64 = 2304;
const DEADLINE: Duration = Duration::from_millis(150);

/// A rank, each of whose tokens goes to all ranks.
struct Rank {
    buffer: Buffer,
    stream: Arc<Stream>,
    group: Arc<dyn ProcessGroup>,
    x: Tensor<'static>,
    topk_idx: TypedTensor<'static, i64>,
}

impl Rank {
    fn new(
        number: u32,
        group: &Arc<dyn ProcessGroup>,
        stop: Option<Arc<Stop>>,
        change: impl Fn(Options) -> Options,
    ) -> Result<Rank> {
        let hooks = Hooks { stop, ..Hooks::default() };
        let config = VirtConfig { ordinal: number, sm_count: 2, hooks, ..VirtConfig::default() };
        let stream = Arc::new(Stream::new(&VirtualGpu::new(config))?);
        let ranks = group.size();
        let shape = Shape { max_tokens: TOKENS as u32, hidden: HIDDEN, num_topk: ranks, num_experts: ranks };
        let options = change(Options::new(shape).timeout(DEADLINE));
        let ids: Vec<i64> = (0..TOKENS).flat_map(|_| 0..i64::from(ranks)).collect();
        let x = vec![bf16::ONE; (TOKENS * HIDDEN) as usize];
        Ok(Rank {
            buffer: Buffer::new(stream.device().clone(), &**group, options)?,
            x: Tensor::from_host(&stream, DType::Bf16, &[TOKENS, HIDDEN], &x)?,
            topk_idx: TypedTensor::from_host(&stream, &[TOKENS, ranks.into()], &ids)?,
            group: group.clone(),
            stream,
        })
    }

    fn dispatch<'p>(&mut self, place: &'p mut Place) -> Result<Received<'p>> {
        let request = DispatchRequest::new(&self.x, &self.topk_idx);
        self.buffer.dispatch(place, request, StreamOrder::on(&self.stream))
    }

    /// Stands in for a kernel behind a dispatch, whether that has failed or not: all of its rows are
    /// `value`.
    fn leave(&self, rows: DevicePtr, value: f32) -> Result<()> {
        let count = TOKENS * u64::from(self.group.size()) * HIDDEN;
        let values = vec![bf16::from_f32(value); count as usize];
        // SAFETY: the pool has so many rows there, and outlives the stream's work.
        unsafe { self.stream.write(rows, bytemuck::cast_slice(&values)) }
    }
}

/// Whether the last rank, whose GPU stops after so many instructions of a combine, was told that
/// others gave up; and how many it has executed, if it has not stopped. If it was not told, its sums are those of the
/// combine. `go_on` is what the others do while it stands.
fn stopped_combine(
    ranks: u32,
    after: u64,
    go_on: impl Fn(&mut Rank, &dyn ProcessGroup) + Sync,
) -> (bool, u64) {
    let late = ranks - 1;
    let stop = Stop::of(late);
    let told = run_ranks(ranks, |number, group| {
        let others = group.split((number == late).into())?;
        let mut rank = Rank::new(number, &group, Some(stop.clone()), |options| options)?;
        let mut place = rank.buffer.place(0)?;
        let received = rank.dispatch(&mut place)?;
        let rows = received.combine_rows()?.ptr();
        rank.leave(rows, 1.0)?;
        rank.stream.synchronize()?;
        group.barrier(PATIENCE)?;
        if number == late {
            stop.after(after);
        }
        let combined =
            rank.buffer.combine(received, CombineRequest::in_pool(), StreamOrder::on(&rank.stream))?;
        let sums = combined.x.ptr();
        drop(combined);
        if number != late {
            go_on(&mut rank, &*others);
            drop(rank.dispatch(&mut place));
            rank.stream.synchronize()?;
            rank.leave(rows, 3.0)?;
            rank.stream.synchronize()?;
        }
        group.barrier(PATIENCE)?;
        let mut told = false;
        if number == late {
            if stop.left() == 0 {
                stop.go_on();
            }
            rank.stream.synchronize()?;
            match rank.buffer.check() {
                Err(Error::Broken { reason, .. }) => {
                    assert!(reason.contains("gave up"), "{reason}");
                    told = true;
                }
                Err(error) => panic!("{error}"),
                Ok(()) => {
                    let mut got = vec![bf16::ZERO; (TOKENS * HIDDEN) as usize];
                    // SAFETY: it is the place's, which is borrowed here.
                    unsafe { rank.stream.read(bytemuck::cast_slice_mut(&mut got), sums)? };
                    let want = bf16::from_f32(ranks as f32);
                    assert!(got.iter().all(|sum| *sum == want), "stopped after {after} instructions");
                }
            }
        }
        group.barrier(PATIENCE)?;
        Ok(told)
    });
    let told = told.unwrap_or_else(|failure| panic!("{failure}"));
    (told.contains(&true), after.saturating_sub(stop.left()))
}

/// Stops the last rank at points that are spread over its combine.
fn sweep(ranks: u32, go_on: impl Fn(&mut Rank, &dyn ProcessGroup) + Sync) {
    // Ranks that regroup may be so early that it is told, though it does not stop.
    let (_, executed) = stopped_combine(ranks, u64::MAX / 2, &go_on);
    let points = tier::pick(8, 120);
    let told = (0..points).filter(|point| stopped_combine(ranks, executed * point / points, &go_on).0);
    // It is, at least, where it stops before the first instruction. The others are where the busy
    // machine lets them be: a rank executes more or fewer while it waits.
    assert!(told.count() > 0, "never told");
}

#[test]
fn a_rank_that_gives_up_tells_those_that_still_read_its_rows() {
    sweep(2, |_, _| ());
}

#[test]
fn ranks_that_regroup_tell_those_that_still_read_their_rows() {
    sweep(3, |rank, others| {
        rank.stream.synchronize().unwrap();
        rank.buffer.regroup(others).unwrap();
    });
}

#[test]
fn rows_of_one_rank_in_the_pool_and_of_another_one_in_a_tensor_are_different_calls() {
    let failures = run_ranks(2, |number, group| {
        let mut rank = Rank::new(number, &group, None, |options| options)?;
        let rows = Tensor::alloc(rank.stream.device(), DType::Bf16, &[2 * TOKENS, HIDDEN])?;
        let (mut place, order) = (rank.buffer.place(0)?, StreamOrder::on(&rank.stream));
        let request = DispatchRequest::new(&rank.x, &rank.topk_idx);
        let received = rank.buffer.dispatch(&mut place, request, order)?;
        let request = if number == 0 { CombineRequest::in_pool() } else { CombineRequest::by_row(&rows) };
        drop(rank.buffer.combine(received, request, order)?);
        rank.stream.synchronize()?;
        let error = rank.buffer.check().unwrap_err();
        assert_names(&error, &["of rows in the pool", "4608 bytes per row"]);
        group.barrier(PATIENCE)?;
        Ok(())
    });
    failures.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn rows_in_the_pool_are_of_one_node_and_not_quantised() {
    let across = |options: Options| {
        let transport = TransportOptions::new(TransportKind::Tcp);
        options.ranks_per_node(1).keep_nodes().transport(transport)
    };
    let outcome = run_ranks(2, |number, group| {
        let mut rank = Rank::new(number, &group, None, |options| options)?;
        let (mut place, order) = (rank.buffer.place(0)?, StreamOrder::on(&rank.stream));
        let request = DispatchRequest::new(&rank.x, &rank.topk_idx);
        let received = rank.buffer.dispatch(&mut place, request, order)?;
        let quantised = CombineRequest::in_pool().quantise(Quantise::Fp8);
        let error = rank.buffer.combine(received, quantised, order).unwrap_err();
        assert_names(&error, &["quantise = Fp8", "by row"]);

        let mut rank = Rank::new(number, &group, None, across)?;
        let (mut place, order) = (rank.buffer.place(0)?, StreamOrder::on(&rank.stream));
        let request = DispatchRequest::new(&rank.x, &rank.topk_idx);
        let received = rank.buffer.dispatch(&mut place, request, order)?;
        assert_names(&received.combine_rows().unwrap_err(), &["combine_rows", "other nodes", "by_row"]);
        let error = rank.buffer.combine(received, CombineRequest::in_pool(), order).unwrap_err();
        assert_names(&error, &["combine_rows", "by_row"]);
        rank.stream.synchronize()?;
        group.barrier(PATIENCE)
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}

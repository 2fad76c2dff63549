//! Rows that peers gather in the pool: a rank times out while another one still reads them.

use std::sync::Arc;
use std::time::Duration;

use epoxide::driver::DevicePtr;
use epoxide::driver::virt::{CheckConfig, Checker, VirtConfig, VirtualGpu};
use epoxide::group::ProcessGroup;
use epoxide::internal::driver::{Hooks, Stop};
use epoxide::low_latency::{CombineRequest, DispatchRequest, Options, Quantise, Shape};
use epoxide::transport::{TransportKind, TransportOptions};
use epoxide::{DType, Error, Result, StreamOrder, Tensor, TypedTensor};
use epoxide_testing::harness::{PATIENCE, assert_names, run_ranks};
use epoxide_testing::tier;
use half::bf16;

use super::ones::Ones;

const TOKENS: u64 = 12;
/// Rows of three pieces of 1,536 bytes, without a gap between them; two and a quarter of 2,048.
const HIDDEN: u64 = 2304;
const DEADLINE: Duration = Duration::from_millis(150);

/// A rank, each of whose tokens goes to all ranks.
fn join(
    group: &Arc<dyn ProcessGroup>,
    stop: Option<Arc<Stop>>,
    change: impl Fn(Options) -> Options,
) -> Result<Ones> {
    let hooks = Hooks { stop, ..Hooks::default() };
    join_on(VirtConfig { hooks, ..VirtConfig::default() }, group, change)
}

fn join_on(
    config: VirtConfig,
    group: &Arc<dyn ProcessGroup>,
    change: impl Fn(Options) -> Options,
) -> Result<Ones> {
    let config = VirtConfig { ordinal: group.rank(), sm_count: 2, ..config };
    let ranks = group.size();
    let shape = Shape { max_tokens: TOKENS as u32, hidden: HIDDEN, num_topk: ranks, num_experts: ranks };
    let ids: Vec<i64> = (0..TOKENS).flat_map(|_| 0..i64::from(ranks)).collect();
    let options = |options: Options| change(options.timeout(DEADLINE));
    Ones::new(VirtualGpu::new(config), group.clone(), shape, options, &ids)
}

/// Stands in for a kernel behind a dispatch, whether that has failed or not: all of its rows are
/// `value`.
fn leave(rank: &Ones, rows: DevicePtr, value: f32) -> Result<()> {
    let values = vec![bf16::from_f32(value); (rank.buffer.rows() * HIDDEN) as usize];
    // SAFETY: the pool has so many rows there, and outlives the stream's work.
    unsafe { rank.stream.write(rows, bytemuck::cast_slice(&values)) }
}

/// Stops the last rank's GPU after `after` instructions of a combine. Returns whether the rank got
/// the others' error, and its instructions if it did not stop. Without an error its sums are right.
/// `go_on` runs on the others while the rank is stopped. `packet_tokens` decides the size of the
/// pieces that a warp sums, and the number of tokens with rows in packets.
fn stopped_combine(
    ranks: u32,
    after: u64,
    packet_tokens: u32,
    go_on: impl Fn(&mut Ones, &dyn ProcessGroup) + Sync,
) -> (bool, u64) {
    let late = ranks - 1;
    let stop = Stop::of(late);
    let failed = run_ranks(ranks, |number, group| {
        let others = group.split((number == late).into())?;
        let mut rank = join(&group, Some(stop.clone()), |options| options.packet_tokens(packet_tokens))?;
        let mut place = rank.buffer.place(0)?;
        let received = rank.dispatch(&mut place)?;
        let rows = received.combine_rows()?.ptr();
        leave(&rank, rows, 1.0)?;
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
            leave(&rank, rows, 3.0)?;
            rank.stream.synchronize()?;
        }
        group.barrier(PATIENCE)?;
        let mut failed = false;
        if number == late {
            if stop.left() == 0 {
                stop.go_on();
            }
            match rank.outcome() {
                Err(Error::Broken { reason, .. }) => {
                    assert!(reason.contains("gave up"), "{reason}");
                    failed = true;
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
        Ok(failed)
    });
    (failed.contains(&true), after.saturating_sub(stop.left()))
}

/// Stops the last rank at points that are spread over its combine.
fn sweep(ranks: u32, go_on: impl Fn(&mut Ones, &dyn ProcessGroup) + Sync) {
    // Ranks may regroup so early that the last rank gets an error though it does not stop.
    let (_, executed) = stopped_combine(ranks, u64::MAX / 2, 0, &go_on);
    let points = tier::pick(8, 60);
    let packet_tokens = |point| [0, TOKENS as u32, 5][point as usize % 3];
    let failed = (0..points)
        .filter(|point| stopped_combine(ranks, executed * point / points, packet_tokens(*point), &go_on).0);
    // At least a stop before the first instruction gives an error. At other points it depends on
    // the machine: a rank executes more or fewer instructions while it waits.
    assert!(failed.count() > 0, "never told");
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

/// A rank without tokens has no chunk whose word releases what it did before. Its call alone orders
/// its gathering of rows before the next stores of another rank's experts.
#[test]
fn a_rank_that_has_no_tokens_any_more_has_gathered_rows_before_its_call() {
    let checker = Some(Checker::new(CheckConfig::default()));
    run_ranks(2, |number, group| {
        let config = VirtConfig { checker: checker.clone(), ..VirtConfig::default() };
        let mut rank = join_on(config, &group, |options| options.packet_tokens(0).timeout(PATIENCE))?;
        let (mut place, stream) = (rank.buffer.place(0)?, rank.stream.clone());
        let order = StreamOrder::on(&stream);
        let x = Tensor::alloc(stream.device(), DType::Bf16, &[0, HIDDEN])?;
        let ids = TypedTensor::<i64>::from_host(&stream, &[0, 2], &[])?;
        // The host waits for no other rank from here on, since the checker would record the order.
        for round in 0..2 {
            let received = if (round, number) == (1, 1) {
                rank.buffer.dispatch(&mut place, DispatchRequest::new(&x, &ids), order)?
            } else {
                rank.dispatch(&mut place)?
            };
            leave(&rank, received.combine_rows()?.ptr(), 1.0)?;
            rank.buffer.combine(received, CombineRequest::in_pool(), order)?;
        }
        rank.outcome()
    });
}

#[test]
fn rows_of_one_rank_in_the_pool_and_of_another_one_in_a_tensor_are_different_calls() {
    run_ranks(2, |number, group| {
        let mut rank = join(&group, None, |options| options)?;
        let rows = Tensor::alloc(rank.stream.device(), DType::Bf16, &[2 * TOKENS, HIDDEN])?;
        let (mut place, stream) = (rank.buffer.place(0)?, rank.stream.clone());
        let order = StreamOrder::on(&stream);
        let received = rank.dispatch(&mut place)?;
        let request = if number == 0 { CombineRequest::in_pool() } else { CombineRequest::by_row(&rows) };
        drop(rank.buffer.combine(received, request, order)?);
        let error = rank.outcome().unwrap_err();
        assert_names(&error, &["of rows in the pool", "4608 bytes per row"]);
        group.barrier(PATIENCE)?;
        Ok(())
    });
}

#[test]
fn rows_in_the_pool_are_of_one_node_and_not_quantised() {
    let across = |options: Options| {
        let transport = TransportOptions::new(TransportKind::Tcp);
        options.ranks_per_node(1).keep_nodes().transport(transport)
    };
    run_ranks(2, |_, group| {
        let mut rank = join(&group, None, |options| options)?;
        let (mut place, stream) = (rank.buffer.place(0)?, rank.stream.clone());
        let order = StreamOrder::on(&stream);
        let received = rank.dispatch(&mut place)?;
        let quantised = CombineRequest::in_pool().quantise(Quantise::Fp8);
        let error = rank.buffer.combine(received, quantised, order).unwrap_err();
        assert_names(&error, &["quantise = Fp8", "by row"]);

        let mut rank = join(&group, None, across)?;
        let (mut place, stream) = (rank.buffer.place(0)?, rank.stream.clone());
        let order = StreamOrder::on(&stream);
        let received = rank.dispatch(&mut place)?;
        assert_names(&received.combine_rows().unwrap_err(), &["combine_rows", "other nodes", "by_row"]);
        let error = rank.buffer.combine(received, CombineRequest::in_pool(), order).unwrap_err();
        assert_names(&error, &["combine_rows", "by_row"]);
        rank.stream.synchronize()?;
        group.barrier(PATIENCE)
    });
}

/// Peers return rows to their memory.
#[test]
fn rows_in_the_pool_are_not_given_as_a_tensor() {
    run_ranks(2, |_, group| {
        let mut rank = join(&group, None, |options| options.timeout(PATIENCE).packet_tokens(0))?;
        let mut place = rank.buffer.place(0)?;
        for quantise in [Quantise::None, Quantise::Fp8] {
            let received = rank.dispatch(&mut place)?;
            let rows = received.combine_rows()?.clone();
            let request = CombineRequest::by_row(&rows).quantise(quantise);
            let refused = rank.buffer.combine(received, request, StreamOrder::on(&rank.stream)).unwrap_err();
            assert!(matches!(refused, Error::Argument { argument: "rows", .. }), "{refused}");
            assert_names(&refused, &["shares memory with combine_rows", "give memory of its own"]);
        }
        rank.outcome()
    });
}

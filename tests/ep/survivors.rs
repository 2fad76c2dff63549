//! A rank stops before a dispatch or before a combine. The others, its survivors, get an error that
//! names it, read no wrong number, and continue without it in the same context.
//!
//! These tests also run on GPUs: `EPOXIDE_TEST_DEVICE=cuda EPOXIDE_TEST_RANKS=2`, one at a time
//! (docs/BENCH-METHOD.md, "Larger machines").

use std::sync::Arc;
use std::time::Duration;

use epoxide::driver::Device;
use epoxide::driver::virt::VirtConfig;
use epoxide::group::ProcessGroup;
use epoxide::low_latency;
use epoxide::throughput::{self, CombineRequest, Place, Received, Step};
use epoxide::transport::{TransportKind, TransportOptions};
use epoxide::{DType, Error, Result, Tensor};
use epoxide_testing::harness::{
    NodeLinks, PATIENCE, Rank, Setup, keep, num_ranks, on_gpus, open_device, try_run_ranks,
};
use epoxide_testing::payload::{bytes_of, values_of};
use epoxide_testing::tier;
use half::bf16;

use crate::low_latency::ones::{CapturedPair, Ones};
use crate::promises::{captured_echo, is_nan, status};
use crate::turns::{HIDDEN, Inputs, ROW, TOPK, Turn, echo};

/// The rank that stops.
const GONE: u32 = 1;
/// Rounds ahead of the one in which it does.
const COMPLETE: usize = 3;

/// Before which call of its last round the rank stops.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Before {
    Dispatch,
    Combine,
}

/// The kind of the survivors' calls.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Calls {
    /// One by one; the host waits for the counts of a dispatch.
    Exact,
    /// One by one; counts stay on the device.
    Eager,
    /// As replays of a step that has run before.
    Replayed,
}

/// The value that a failed combine leaves for a token without a sum.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Leaves {
    Nan,
    /// The value of before.
    Anything,
}

/// The longest wait for the stopped rank. On GPUs it passes in real time, so the other ranks must
/// meet it.
fn deadline() -> Duration {
    Duration::from_millis(if on_gpus() { 1500 } else { 200 })
}

/// One node, and nodes of one rank that map each other's memory.
fn spreads() -> [Option<NodeLinks>; 2] {
    [None, Some(NodeLinks { ranks_per_node: 1, transport: TransportKind::Direct, queues: 1 })]
}

/// All on GPUs, and every third in the default tier on virtual ones.
fn some_here<T>(variants: impl IntoIterator<Item = T>) -> Vec<T> {
    if on_gpus() { variants.into_iter().collect() } else { tier::sample(variants).collect() }
}

#[track_caller]
fn expect_gone<T>(what: &str, outcome: Result<T>) {
    match outcome {
        Err(Error::PeerTimeout { peer, ref late_ranks, .. })
            if peer == GONE || late_ranks.contains(&GONE) => {}
        Err(error) => panic!("{what}: not a time-out that names rank {GONE}: {error}"),
        Ok(_) => panic!("{what}: gave a result, although rank {GONE} has stopped"),
    }
}

/// Checks sums as a kernel reads them, without an error: each is right, or its token is marked as
/// missing.
#[track_caller]
fn check_sums(what: &str, leaves: Leaves, got: &[Vec<u8>], want: &[Vec<u8>], missing: &[u32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    assert!(!missing.is_empty(), "{what}: no token is missing");
    for (token, (got, want)) in (0..).zip(got.iter().zip(want)) {
        let is_missing = missing.contains(&token);
        let holds = if is_missing { leaves == Leaves::Anything || is_nan(got) } else { got == want };
        assert!(holds, "{what}: token {token}, missing {missing:?}: {got:?}, expected {want:?}");
    }
}

/// Tokens of each rank.
fn tokens(ranks: u32) -> Vec<u32> {
    let most = if on_gpus() { 200 } else { 8 };
    (0..ranks).map(|rank| most - rank % 3).collect()
}

fn setup(ranks: u32, nodes: Option<NodeLinks>) -> Setup {
    Setup::new(ranks, 1, *tokens(ranks).iter().max().unwrap(), ROW).max_topk(TOPK).nodes(nodes)
}

/// The sums of a round in which the rank that stops is still there.
fn check_complete(rank: &Rank, back: &throughput::Combined, turn: &Turn) -> Result<()> {
    let want = &turn.sums[rank.rank as usize];
    assert_eq!(rank.row_bytes(&back.combined_x)?[..want.len()], want[..]);
    assert!(rank.buffer.missing_tokens()?.is_empty());
    rank.buffer.check()
}

/// A dispatch of the round in which it stops.
fn dispatch<'p>(
    rank: &mut Rank,
    place: &'p mut Place,
    inputs: &Inputs,
    calls: Calls,
) -> Result<Received<'p>> {
    if calls == Calls::Exact { inputs.dispatch_exact(rank, place) } else { inputs.dispatch(rank, place) }
}

/// The round in which it stops, of a survivor.
fn failed_round(
    rank: &mut Rank,
    place: &mut Place,
    (inputs, turn): (&Inputs, &Turn),
    step: &Step<throughput::Combined>,
    (before, calls, leaves): (Before, Calls, Leaves),
) -> Result<()> {
    let (stream, want) = (rank.stream.clone(), &turn.sums[rank.rank as usize]);
    let what = format!("rank {}, {before:?}, {calls:?}, {leaves:?}", rank.rank);
    let combined = |rank: &Rank, back: &throughput::Combined| -> Result<()> {
        let kept = rank.row_bytes(&keep(&stream, &back.combined_x, want.len() as u64)?)?;
        check_sums(&what, leaves, &kept, want, &rank.buffer.missing_tokens()?);
        expect_gone(&format!("{what}: combined_x"), back.combined_x.to_host::<u16>(&stream));
        Ok(())
    };
    if calls == Calls::Replayed {
        step.launch(&stream)?;
        combined(rank, step.output())?;
        expect_gone(&format!("{what}: the step's check"), step.check(&stream));
    } else {
        let output = dispatch(rank, place, inputs, calls);
        if calls == Calls::Exact && before == Before::Dispatch {
            expect_gone(&format!("{what}: a dispatch that waits for counts"), output);
        } else {
            let output = output?;
            if before == Before::Combine {
                let (received, want) = (rank.row_bytes(&output.recv_x)?, turn.recv(rank.rank));
                assert_eq!(received[..want.len()], want[..], "{what}");
                rank.buffer.check()?;
            }
            let rows = output.combine_rows(DType::Bf16, HIDDEN as u64)?;
            let to = rows.tensor();
            // SAFETY: both are in the pool, which lives as long as the buffer.
            unsafe { stream.copy(to.ptr(), output.recv_x.ptr(), to.rows() * to.row_stride())? };
            match rank.combine(CombineRequest::new(&rows, &output.handle)) {
                Ok(back) => combined(rank, &back)?,
                // The dispatch may have timed out by then.
                refused => {
                    assert_eq!(before, Before::Dispatch, "{what}");
                    expect_gone(&format!("{what}: the combine behind it"), refused);
                }
            }
            if before == Before::Dispatch {
                expect_gone(&format!("{what}: recv_x"), output.recv_x.to_host::<u16>(&stream));
                expect_gone(&format!("{what}: counts"), output.handle.num_recv_tokens(&stream));
            }
        }
    }
    assert_ne!(status(&stream, rank.buffer.status_ptr())?, 0, "{what}");
    expect_gone(&format!("{what}: check"), rank.buffer.check());
    // The buffer is of no use any more.
    for _ in 0..2 {
        expect_gone(&format!("{what}: a launch behind it"), step.launch(&stream));
        let next = inputs.dispatch(rank, place);
        expect_gone(&format!("{what}: a dispatch behind it"), next);
    }
    Ok(())
}

/// The survivors of a group make a buffer of their own on the same devices.
fn go_on(rank: &Rank, part: Arc<dyn ProcessGroup>, nodes: Option<NodeLinks>) -> Result<()> {
    let survivors = setup(part.size(), nodes);
    let turn = Turn::random(9, &tokens(part.size()), 1);
    let mut rank = Rank::new(rank.device().clone(), part, survivors.options)?;
    let (inputs, mut place) = turn.begin(&rank)?;
    for _ in 0..3 {
        let (output, back) = echo(&mut rank, &mut place, &inputs)?;
        let want = turn.recv(rank.rank);
        assert_eq!(rank.row_bytes(&output.recv_x)?[..want.len()], want[..]);
        check_complete(&rank, &back, &turn)?;
    }
    rank.synchronize()
}

fn high_throughput(before: Before, calls: Calls) {
    let ranks = num_ranks(3);
    let turns: Vec<Turn> = (0..=COMPLETE as u64).map(|seed| Turn::random(seed, &tokens(ranks), 1)).collect();
    let variants = spreads().into_iter().flat_map(|nodes| [(nodes, Leaves::Nan), (nodes, Leaves::Anything)]);
    for (nodes, leaves) in some_here(variants) {
        let mut setup = setup(ranks, nodes);
        setup.fields().timeout = deadline();
        setup.fields().nan_on_failure = leaves == Leaves::Nan;
        setup.run(|rank| {
            let (stream, group) = (rank.stream.clone(), rank.group.clone());
            let part = group.split((rank.rank == GONE).into())?;
            let (inputs, mut place) = turns[0].begin(rank)?;
            group.barrier(PATIENCE)?;
            let step = captured_echo(rank, &mut place, &inputs)?;
            for (index, turn) in turns.iter().enumerate() {
                let mine = rank.rank as usize;
                inputs.topk_idx.write(&stream, &turn.routing.topk_idx[mine].concat())?;
                inputs.x.write(&stream, &values_of::<u16>(&turn.x[mine].concat()))?;
                stream.synchronize()?;
                group.barrier(PATIENCE)?;
                if index < COMPLETE {
                    // Both ways, so that either may have left what a later round must not show.
                    step.launch(&stream)?;
                    step.check(&stream)?;
                    check_complete(rank, step.output(), turn)?;
                    let (_, back) = echo(rank, &mut place, &inputs)?;
                    check_complete(rank, &back, turn)?;
                } else if rank.rank != GONE {
                    failed_round(rank, &mut place, (&inputs, turn), &step, (before, calls, leaves))?;
                } else if before == Before::Combine {
                    // A dispatch that waits for counts compares calls on the host: all ranks make
                    // the same one.
                    dispatch(rank, &mut place, &inputs, calls)?;
                    stream.synchronize()?;
                    rank.buffer.check()?;
                }
            }
            if rank.rank != GONE {
                go_on(rank, part, nodes)?;
            }
            group.barrier(PATIENCE)
        });
    }
}

#[test]
fn a_rank_stops_before_a_dispatch() {
    high_throughput(Before::Dispatch, Calls::Eager);
}

#[test]
fn a_rank_stops_before_a_dispatch_that_waits_for_counts() {
    high_throughput(Before::Dispatch, Calls::Exact);
}

#[test]
fn a_rank_stops_before_a_dispatch_of_a_step() {
    high_throughput(Before::Dispatch, Calls::Replayed);
}

#[test]
fn a_rank_stops_before_a_combine() {
    high_throughput(Before::Combine, Calls::Eager);
    high_throughput(Before::Combine, Calls::Exact);
}

#[test]
fn a_rank_stops_before_the_combine_of_a_step() {
    high_throughput(Before::Combine, Calls::Replayed);
}

const EXPERTS_OF_A_RANK: u32 = 2;
const FEW_HIDDEN: u64 = 128;

/// A low-latency rank on a device. Collective.
fn few(
    device: &Device,
    group: &Arc<dyn ProcessGroup>,
    options: impl FnOnce(low_latency::Options) -> low_latency::Options,
) -> Result<Ones> {
    let tokens = if on_gpus() { 100 } else { 6 };
    let num_experts = EXPERTS_OF_A_RANK * group.size();
    let shape = low_latency::Shape { max_tokens: tokens, hidden: FEW_HIDDEN, num_topk: 2, num_experts };
    let experts = i64::from(num_experts);
    // Each expert by itself and with another one; every fifth token selects none.
    let ids = (0..i64::from(tokens)).flat_map(|token| match token % 5 {
        4 => [-1, -1],
        _ => [(token * 3 + 1) % experts, if token % 2 == 0 { -1 } else { (token * 3 + 2) % experts }],
    });
    Ones::new(device.clone(), group.clone(), shape, options, &ids.collect::<Vec<i64>>())
}

/// A round of all ranks of the group.
fn complete_round(few: &mut Ones, place: &mut low_latency::Place, value: f32) -> Result<()> {
    few.set_experts(value)?;
    let received = few.dispatch(place)?;
    let combined = few.combine(received)?;
    assert_eq!(few.kept(&combined.x)?, few.sums(value)?);
    assert!(few.buffer.missing_tokens()?.is_empty());
    few.buffer.check()
}

/// The round in which the rank stops, of a survivor.
fn failed_few(
    few: &mut Ones,
    place: &mut low_latency::Place,
    step: &CapturedPair,
    (before, calls, leaves): (Before, Calls, Leaves),
    value: f32,
) -> Result<()> {
    let (stream, want) = (few.stream.clone(), few.sums(value)?);
    let what = format!("rank {}, low latency, {before:?}, {calls:?}, {leaves:?}", few.rank);
    let combined = |few: &Ones, sums: &Tensor<'_>| -> Result<()> {
        let rows = |sums: &[bf16]| sums.chunks(FEW_HIDDEN as usize).map(bytes_of).collect::<Vec<_>>();
        let missing = few.buffer.missing_tokens()?;
        check_sums(&what, leaves, &rows(&few.kept(sums)?), &rows(&want), &missing);
        expect_gone(&format!("{what}: x"), sums.to_host::<bf16>(&stream));
        Ok(())
    };
    if calls == Calls::Replayed {
        step.launch(&stream)?;
        combined(few, &step.output().at(place)?.x)?;
        expect_gone(&format!("{what}: the step's check"), step.check(&stream));
    } else {
        let received = few.dispatch(place)?;
        if before == Before::Dispatch {
            expect_gone(&format!("{what}: rows"), received.x.to_host::<bf16>(&stream));
            expect_gone(&format!("{what}: counts"), received.expert_counts.to_host::<i32>(&stream));
        } else {
            received.expert_counts.to_host::<i32>(&stream)?;
            few.buffer.check()?;
            let sums = few.combine(received)?;
            combined(few, &sums.x)?;
        }
    }
    assert_ne!(status(&stream, few.buffer.status_ptr())?, 0, "{what}");
    expect_gone(&format!("{what}: check"), few.buffer.check());
    for _ in 0..2 {
        expect_gone(&format!("{what}: a launch behind it"), step.launch(&stream));
        expect_gone(&format!("{what}: a dispatch behind it"), few.dispatch(place));
    }
    Ok(())
}

/// The survivors go on with the same buffer, then with one of their own.
fn go_on_with_few(
    few: &mut Ones,
    place: &mut low_latency::Place,
    part: &Arc<dyn ProcessGroup>,
) -> Result<()> {
    let gone = i64::from(GONE * EXPERTS_OF_A_RANK)..i64::from((GONE + 1) * EXPERTS_OF_A_RANK);
    let mut ids = few.topk_idx.values(&few.stream)?;
    ids.iter_mut().filter(|id| gone.contains(id)).for_each(|id| *id = -1);
    few.topk_idx.write(&few.stream, &ids)?;
    few.buffer.regroup(&**part)?;
    for value in [2.0, 11.0] {
        complete_round(few, place, value)?;
    }
    few.stream.synchronize()?;
    part.barrier(PATIENCE)
}

fn low_latency_calls(before: Before, calls: Calls) {
    let mut variants = Vec::new();
    for nodes in spreads() {
        for packet_tokens in [0, 1024] {
            variants.extend([Leaves::Nan, Leaves::Anything].map(|leaves| (nodes, packet_tokens, leaves)));
        }
    }
    for (nodes, packet_tokens, leaves) in some_here(variants) {
        let spread = |options: low_latency::Options| match nodes {
            None => options,
            Some(nodes) => options
                .ranks_per_node(nodes.ranks_per_node)
                .keep_nodes()
                .transport(TransportOptions::new(nodes.transport)),
        };
        let outcome = try_run_ranks(num_ranks(3), |number, group| {
            let config = VirtConfig { ordinal: number, sm_count: 4, ..VirtConfig::default() };
            let device = open_device(config)?;
            let part = group.split((number == GONE).into())?;
            let mut rank = few(&device, &group, |options| {
                let options = spread(options).packet_tokens(packet_tokens).timeout(deadline());
                if leaves == Leaves::Nan { options } else { options.keep_sums_on_failure() }
            })?;
            let (stream, mut place) = (rank.stream.clone(), rank.buffer.place(0)?);
            let meet = || stream.synchronize().and_then(|()| group.barrier(PATIENCE));
            meet()?;
            let step = rank.captured(&mut place)?;
            for value in [3.0, 5.0, 9.0] {
                rank.set_experts(value)?;
                meet()?;
                step.launch(&stream)?;
                step.check(&stream)?;
                assert_eq!(rank.kept(&step.output().at(&place)?.x)?, rank.sums(value)?);
                complete_round(&mut rank, &mut place, value + 1.0)?;
            }
            rank.set_experts(17.0)?;
            meet()?;
            if number != GONE {
                failed_few(&mut rank, &mut place, &step, (before, calls, leaves), 17.0)?;
                drop(step);
                go_on_with_few(&mut rank, &mut place, &part)?;
                let mut rank = few(&device, &part, |options| spread(options).timeout(PATIENCE))?;
                let mut place = rank.buffer.place(0)?;
                complete_round(&mut rank, &mut place, 7.0)?;
                rank.stream.synchronize()?;
                part.barrier(PATIENCE)?;
            } else if before == Before::Combine {
                drop(rank.dispatch(&mut place)?);
                rank.outcome()?;
            }
            group.barrier(PATIENCE)
        });
        outcome.unwrap_or_else(|failure| panic!("{nodes:?}, {packet_tokens}, {leaves:?}: {failure}"));
    }
}

#[test]
fn low_latency_a_rank_stops_before_a_dispatch() {
    low_latency_calls(Before::Dispatch, Calls::Eager);
}

#[test]
fn low_latency_a_rank_stops_before_a_dispatch_of_a_step() {
    low_latency_calls(Before::Dispatch, Calls::Replayed);
}

#[test]
fn low_latency_a_rank_stops_before_a_combine() {
    low_latency_calls(Before::Combine, Calls::Eager);
}

#[test]
fn low_latency_a_rank_stops_before_the_combine_of_a_step() {
    low_latency_calls(Before::Combine, Calls::Replayed);
}

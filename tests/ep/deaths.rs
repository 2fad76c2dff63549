//! A rank that stops anywhere in an operation. The other one gets an error that names it, and reads
//! no number that is wrong: neither on the host, nor as a kernel does that sees no error.

use std::sync::Arc;
use std::time::Duration;

use epoxide::driver::Stream;
use epoxide::driver::virt::{Stop, VirtConfig, VirtualGpu};
use epoxide::ep::{
    CachedDispatchRequest, CombineRequest, Counts, DType, DispatchRequest, StreamOrder, Tensor, TypedTensor,
};
use epoxide::low_latency;
use epoxide::transport::{TransportKind, TransportOptions};
use epoxide::{Error, Result};
use epoxide_testing::harness::{Nodes, PATIENCE, Setup, run_ranks};
use epoxide_testing::tier;
use half::bf16;

use crate::promises::{is_nan, keep_on};
use crate::turns::{HIDDEN, Inputs, ROW, TOPK, Turn};

const DEADLINE: Duration = Duration::from_millis(100);
/// Rounds in which the rank may stop, and those behind.
const ROUNDS: usize = 2;
const ALL_ROUNDS: usize = 4;

/// Runs `round_trips` with the stop of rank 1 at points that are spread over its rounds; it gives
/// whether rank 0 was told. `EPOXIDE_DEATHS` says how many points.
fn sweep(round_trips: impl Fn(&Arc<Stop>, Option<u64>) -> bool) {
    let counting = Stop::of(1);
    round_trips(&counting, None);
    let executed = u64::MAX - counting.left();
    let points = std::env::var("EPOXIDE_DEATHS").ok().map(|points| points.parse().expect("a number"));
    let points: u64 = points.unwrap_or(tier::pick(5, 60));
    let told = (0..points).filter(|point| round_trips(&Stop::of(1), Some(executed * point / points)));
    // A wait for the other rank takes more or fewer instructions in each run.
    assert!(told.count() as u64 * 2 > points);
}

/// Whether a read gave an error, which then names rank 1.
fn has_failed<T>(read: &Result<T>) -> bool {
    match read {
        Ok(_) => false,
        Err(Error::PeerTimeout { peer: 1, .. }) => true,
        Err(error) => panic!("{error}"),
    }
}

fn bytes(words: Vec<u16>) -> Vec<u8> {
    words.into_iter().flat_map(u16::to_le_bytes).collect()
}

/// How sums are combined.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rows {
    InPool,
    InTensor,
}

fn high_throughput(nodes: Option<Nodes>, rows: Rows) {
    let turns: [Turn; ALL_ROUNDS] = std::array::from_fn(|seed| Turn::random(seed as u64, &[8, 5], 1));
    sweep(|stop, point| {
        let mut setup = Setup::new(2, 1, 8, ROW).max_topk(TOPK).nodes(nodes);
        setup.options.timeout = DEADLINE;
        setup.device.stop = Some(stop.clone());
        let outcomes = setup.run(|rank| {
            let (stream, mut place) = (rank.stream.clone(), rank.place()?);
            let all: Vec<Inputs> =
                turns.iter().map(|turn| Inputs::upload(turn, rank)).collect::<Result<_>>()?;
            stream.synchronize()?;
            rank.group.barrier(PATIENCE)?;
            if rank.rank == 1 {
                stop.after(point.unwrap_or(u64::MAX));
            }
            let rounds = if point.is_some() { ALL_ROUNDS } else { ROUNDS };
            let mut failed = false;
            for (turn, inputs) in turns.iter().zip(&all).take(rounds) {
                let mut round = || -> Result<bool> {
                    let order = StreamOrder::on(&stream);
                    let experts = turn.routing.num_experts;
                    let layout = rank.buffer.get_dispatch_layout(&inputs.topk_idx, experts, order)?;
                    let counts = Counts::OnDevice { capacity: rank.buffer.capacity() };
                    let request = DispatchRequest::new(&inputs.x, &layout).counts(counts);
                    let output = rank.buffer.dispatch(&mut place, request, order)?;
                    let back = if rows == Rows::InPool {
                        let in_pool = output.combine_rows(DType::Bf16, HIDDEN as u64)?;
                        let (to, from) = (in_pool.tensor(), &output.recv_x);
                        // SAFETY: both are in the pool, which lives as long as the buffer.
                        unsafe { stream.copy(to.ptr(), from.ptr(), to.rows() * to.row_stride())? };
                        rank.buffer.combine(CombineRequest::new(&in_pool, &output.handle), order)?
                    } else {
                        rank.buffer.combine(CombineRequest::new(&output.recv_x, &output.handle), order)?
                    };
                    let has_received = |rows: &Tensor<'_>| {
                        let received = rows.to_host::<u16>(&stream).map(bytes);
                        if let Ok(received) = &received {
                            let want = turn.recv(0).concat();
                            assert!(received[..want.len()] == want, "at {point:?}: {received:?}");
                        }
                        !has_failed(&received)
                    };
                    let mut complete = true;
                    if rank.rank == 0 {
                        let want = &turn.sums[0];
                        let kept = rank.row_bytes(&keep_on(&stream, &back.combined_x, want.len())?)?;
                        for (got, want) in kept.iter().zip(want) {
                            assert!(is_nan(got) || got == want, "at {point:?}: {got:?}, {want:?}");
                        }
                        let missing = rank.buffer.missing_tokens()?;
                        for (token, (got, want)) in (0..).zip(kept.iter().zip(want)) {
                            let is_told = missing.contains(&token);
                            assert!(is_told || got == want, "at {point:?}, {token}: {missing:?}");
                        }
                        let sums = back.combined_x.to_host::<u16>(&stream).map(bytes);
                        if let Ok(sums) = &sums {
                            assert!(*sums == want.concat(), "at {point:?}: {sums:?}");
                        }
                        complete = !has_failed(&sums) & has_received(&output.recv_x);
                    }
                    // Across nodes it takes more blocks than there are here.
                    if nodes.is_none() {
                        let handle = output.handle.clone();
                        drop(output);
                        let request = CachedDispatchRequest::new(&inputs.x, &handle);
                        let again = rank.buffer.dispatch_cached(&mut place, request, order)?;
                        complete &= rank.rank != 0 || has_received(&again.recv_x);
                    }
                    Ok(!complete)
                };
                let outcome = round();
                failed = rank.rank == 0 && (matches!(outcome, Ok(true)) || has_failed(&outcome));
                if failed || outcome.is_err() {
                    break;
                }
            }
            let has_stopped = point.is_some() && stop.left() == 0;
            rank.group.barrier(PATIENCE)?;
            if rank.rank == 1 && point.is_some() {
                stop.go_on();
            }
            stream.synchronize()?;
            Ok((failed, has_stopped))
        });
        let (failed, has_stopped) = outcomes[0];
        assert!(has_stopped || !failed, "at {point:?}");
        failed
    });
}

#[test]
fn within_a_node_with_rows_in_the_pool() {
    high_throughput(None, Rows::InPool);
}

#[test]
fn within_a_node_with_rows_of_a_tensor() {
    high_throughput(None, Rows::InTensor);
}

#[test]
fn across_nodes() {
    for transport in [TransportKind::Direct, TransportKind::Shm, TransportKind::Tcp] {
        high_throughput(Some(Nodes { ranks_per_node: 1, transport, queues: 1 }), Rows::InPool);
    }
}

fn low_latency(change: impl Fn(low_latency::Options) -> low_latency::Options + Sync) {
    const TOKENS: u64 = 4;
    const HIDDEN: u64 = 128;
    sweep(|stop, point| {
        let outcomes = run_ranks(2, |number, group| {
            let config = VirtConfig {
                ordinal: number,
                sm_count: 4,
                stop: Some(stop.clone()),
                ..VirtConfig::default()
            };
            let device = VirtualGpu::new(config);
            let stream = Stream::new(&device, false)?;
            let options = change(low_latency::Options::new(TOKENS as u32, HIDDEN, 2, 4).timeout(DEADLINE));
            let mut buffer = low_latency::Buffer::new(device.clone(), &*group, options)?;
            let mut place = buffer.place(0)?;
            // Tokens for both ranks, for this one and the other alone, and for nobody.
            let topk_idx = TypedTensor::from_host(&stream, &[TOKENS, 2], &[0i64, 3, 1, 0, 2, -1, -1, -1])?;
            let ranks = [2.0, 1.0, 1.0, 0.0];
            let numbers = |value: f32, rows: u64| vec![bf16::from_f32(value); (rows * HIDDEN) as usize];
            let tensor =
                |value, rows| Tensor::from_host(&stream, DType::Bf16, &[rows, HIDDEN], &numbers(value, rows));
            let x = tensor(1.0, TOKENS)?;
            let values = [3.0f32, 5.0, 9.0, 17.0];
            let experts: Vec<Tensor<'static>> =
                values.iter().map(|value| tensor(*value, buffer.rows())).collect::<Result<_>>()?;
            stream.synchronize()?;
            group.barrier(PATIENCE)?;
            if number == 1 {
                stop.after(point.unwrap_or(u64::MAX));
            }
            let rounds = if point.is_some() { ALL_ROUNDS } else { ROUNDS };
            let mut failed = false;
            for (value, experts) in values.iter().zip(&experts).take(rounds) {
                let order = StreamOrder::on(&stream);
                let mut round = || -> Result<bool> {
                    let request = low_latency::DispatchRequest::new(&x, &topk_idx);
                    let received = buffer.dispatch(&mut place, request, order)?;
                    let counts =
                        if number == 0 { Some(received.expert_counts.values(&stream)) } else { None };
                    if let Some(Ok(counts)) = &counts {
                        assert_eq!(counts[..], [4, 2], "at {point:?}");
                    }
                    let request = low_latency::CombineRequest::by_row(experts);
                    let combined = buffer.combine(received, request, order)?;
                    if number == 1 {
                        return Ok(false);
                    }
                    let kept = Tensor::alloc(&device, DType::Bf16, &[TOKENS, HIDDEN])?;
                    // SAFETY: both have so many bytes, and live until the copy has been read.
                    unsafe { stream.copy(kept.ptr(), combined.x.ptr(), TOKENS * HIDDEN * 2)? };
                    let want = |index: usize| ranks[index / HIDDEN as usize] * value;
                    let kept = kept.to_host::<bf16>(&stream)?;
                    let missing = buffer.missing_tokens()?;
                    for (index, got) in kept.into_iter().enumerate() {
                        let (got, want) = (got.to_f32(), want(index));
                        let is_told = missing.contains(&((index / HIDDEN as usize) as u32));
                        let is_right = got == want || (got.is_nan() && is_told);
                        assert!(is_right, "at {point:?}, {index}: {got}, {want}, missing {missing:?}");
                    }
                    let sums = combined.x.to_host::<bf16>(&stream);
                    for (index, got) in sums.iter().flatten().enumerate() {
                        assert_eq!(got.to_f32(), want(index), "at {point:?}, {index}");
                    }
                    Ok(has_failed(&sums) | counts.is_some_and(|counts| has_failed(&counts)))
                };
                let outcome = round();
                failed = number == 0 && (matches!(outcome, Ok(true)) || has_failed(&outcome));
                if failed || outcome.is_err() {
                    break;
                }
            }
            let has_stopped = point.is_some() && stop.left() == 0;
            group.barrier(PATIENCE)?;
            if number == 1 && point.is_some() {
                stop.go_on();
            }
            stream.synchronize()?;
            group.barrier(PATIENCE)?;
            Ok((failed, has_stopped))
        });
        let (failed, has_stopped) = outcomes.unwrap_or_else(|failure| panic!("{failure}"))[0];
        assert!(has_stopped || !failed, "at {point:?}");
        failed
    });
}

#[test]
fn low_latency_with_packets() {
    low_latency(|options| options);
}

#[test]
fn low_latency_with_words() {
    low_latency(|options| options.packet_tokens(0));
}

#[test]
fn low_latency_across_nodes() {
    for transport in [TransportKind::Direct, TransportKind::Shm, TransportKind::Tcp] {
        let transport = TransportOptions::new(transport);
        low_latency(|options| options.ranks_per_node(1).transport(transport.clone()));
    }
}

//! Times that calls waited for each rank, in tensors of the caller's.

use std::time::Duration;

use epoxide::low_latency::{CombineRequest, DispatchRequest, Place, Received};
use epoxide::{Error, Result, StreamOrder, TypedTensor};
use epoxide_testing::harness::{PATIENCE, sleep};

use super::faults::{DEADLINE, RANKS, run};
use super::ones::Ones;
use crate::valid::refused;

/// The delay of the slow rank, rank 1.
const DELAY: Duration = Duration::from_millis(60);
/// What the times held before.
const BEFORE: i64 = 1 << 40;

/// Tensors of times, for dispatches and for combines.
fn times(rank: &Ones) -> Result<[TypedTensor<'static, i64>; 2]> {
    let new = || TypedTensor::from_host(&rank.stream, &[RANKS.into()], &[BEFORE; RANKS as usize]);
    Ok([new()?, new()?])
}

fn dispatch<'p>(
    rank: &mut Ones,
    place: &'p mut Place,
    waits: &TypedTensor<'_, i64>,
    halves: bool,
) -> Result<Received<'p>> {
    let request = DispatchRequest::new(&rank.x, &rank.topk_idx).cumulative_wait_ns(waits);
    let order = StreamOrder::on(&rank.stream);
    if halves {
        return rank.buffer.dispatch_send(place, request, order)?.receive(order);
    }
    rank.buffer.dispatch(place, request, order)
}

/// Lets rank 1 begin late, when all ranks are here.
fn begin(rank: &Ones) -> Result<()> {
    rank.stream.synchronize()?;
    rank.group.barrier(PATIENCE)?;
    if rank.rank == 1 {
        sleep(rank.stream.device(), DELAY);
    }
    Ok(())
}

/// Times that `since` has grown by, where rank 1 was late `calls` times.
fn check(
    rank: &Ones,
    what: &str,
    waits: &TypedTensor<'_, i64>,
    since: &[i64],
    calls: u32,
) -> Result<Vec<i64>> {
    let now = waits.values(&rank.stream)?;
    let delay = DELAY.as_nanos() as i64;
    for (source, (now, before)) in (0..).zip(now.iter().zip(since)) {
        let waited = now - before;
        let is_right = match source {
            own if own == rank.rank => waited == 0,
            1 => waited >= i64::from(calls) * delay && waited < 2 * i64::from(calls) * delay,
            _ => (0..delay / 4).contains(&waited),
        };
        assert!(is_right, "{what}: rank {} waited {waited} ns for rank {source}, {calls} calls", rank.rank);
    }
    Ok(now)
}

/// The slow rank itself waits for no rank; the others wait for it alone.
#[test]
fn the_others_wait_for_a_slow_rank() {
    for halves in [false, true] {
        run(|rank| {
            let (mut place, [there, back]) = (rank.buffer.place(0)?, times(rank)?);
            let stream = rank.stream.clone();
            let order = StreamOrder::on(&stream);
            let (mut since_there, mut since_back) = (vec![BEFORE; 3], vec![BEFORE; 3]);
            for _ in 0..2 {
                begin(rank)?;
                let received = dispatch(rank, &mut place, &there, halves)?;
                rank.outcome()?;
                since_there = check(rank, "dispatch", &there, &since_there, 1)?;
                begin(rank)?;
                let request = CombineRequest::by_row(&rank.experts).cumulative_wait_ns(&back);
                let combined = if halves {
                    rank.buffer.combine_send(received, request, order)?.receive(order)?
                } else {
                    rank.buffer.combine(received, request, order)?
                };
                rank.outcome()?;
                since_back = check(rank, "combine", &back, &since_back, 1)?;
                assert_eq!(combined.x.to_host::<half::bf16>(&rank.stream)?, rank.sums(1.0)?);
            }
            Ok(())
        });
    }
}

#[test]
fn replays_add_up() {
    run(|rank| {
        let (mut place, [there, back]) = (rank.buffer.place(0)?, times(rank)?);
        let stream = rank.stream.clone();
        let Ones { buffer, x, topk_idx, experts, .. } = rank;
        let step = buffer.capture(&stream, |buffer, order| {
            let request = DispatchRequest::new(x, topk_idx).cumulative_wait_ns(&there);
            let received = buffer.dispatch(&mut place, request, order)?;
            let request = CombineRequest::by_row(experts).cumulative_wait_ns(&back);
            Ok(buffer.combine(received, request, order)?.detach())
        })?;
        stream.synchronize()?;
        let since = there.values(&stream)?;
        for _ in 0..3 {
            begin(rank)?;
            step.launch(&stream)?;
        }
        step.check(&stream)?;
        check(rank, "three replays", &there, &since, 3)?;
        assert_eq!(rank.kept(&step.output().at(&place)?.x)?, rank.sums(1.0)?);
        Ok(())
    });
}

/// The wait between the halves has the deadline of the call, and names who is late.
#[test]
fn a_rank_that_is_gone_is_named_as_without() {
    for is_combine in [false, true] {
        run(|rank| {
            let (mut place, [there, back]) = (rank.buffer.place(0)?, times(rank)?);
            let mut start = rank.now();
            if is_combine {
                let received = rank.dispatch(&mut place)?;
                rank.outcome()?;
                start = rank.now();
                if rank.rank != 1 {
                    let request = CombineRequest::by_row(&rank.experts).cumulative_wait_ns(&back);
                    drop(rank.buffer.combine(received, request, StreamOrder::on(&rank.stream))?);
                }
            } else if rank.rank != 1 {
                drop(dispatch(rank, &mut place, &there, false)?);
            }
            if rank.rank == 1 {
                return Ok(());
            }
            let error = rank.outcome().unwrap_err();
            let Error::PeerTimeout { peer: 1, operation, waited, .. } = &error else { panic!("{error}") };
            let named = if is_combine { "low-latency combine" } else { "low-latency dispatch" };
            assert!(*operation == named && *waited >= DEADLINE, "{error}");
            assert!(rank.now() - start < 2 * DEADLINE, "{error} after {:?}", rank.now() - start);
            let times = if is_combine { &back } else { &there };
            assert!(matches!(times.values(&rank.stream), Err(Error::PeerTimeout { peer: 1, .. })));
            Ok(())
        });
    }
}

/// The error names a rank in another call, and no rank waits for it until the deadline.
#[test]
fn another_call_is_named_as_without() {
    run(|rank| {
        let (mut place, [there, back]) = (rank.buffer.place(0)?, times(rank)?);
        let received = rank.dispatch(&mut place)?;
        rank.outcome()?;
        let (start, order) = (rank.now(), StreamOrder::on(&rank.stream));
        if rank.rank == 1 {
            drop(received);
            let request = DispatchRequest::new(&rank.x, &rank.topk_idx).cumulative_wait_ns(&there);
            drop(rank.buffer.dispatch(&mut place, request, order)?);
        } else {
            let request = CombineRequest::by_row(&rank.experts).cumulative_wait_ns(&back);
            drop(rank.buffer.combine(received, request, order)?);
        }
        let error = rank.outcome().unwrap_err();
        assert!(matches!(error, Error::OtherCall { .. }), "{error}");
        assert!(rank.now() - start < DEADLINE, "{error} after {:?}", rank.now() - start);
        Ok(())
    });
}

#[test]
fn times_have_an_entry_for_each_rank() {
    run(|rank| {
        let (mut place, order) = (rank.buffer.place(0)?, StreamOrder::on(&rank.stream));
        let two = TypedTensor::from_host(&rank.stream, &[2], &[0, 0])?;
        let named = ["cumulative_wait_ns has shape [2]", "[num_ranks = 3]"];
        let request = DispatchRequest::new(&rank.x, &rank.topk_idx);
        refused(rank.buffer.dispatch(&mut place, request.cumulative_wait_ns(&two), order), &named);
        let received = rank.buffer.dispatch(&mut place, request, order)?;
        let request = CombineRequest::by_row(&rank.experts).cumulative_wait_ns(&two);
        refused(rank.buffer.combine(received, request, order), &named);
        Ok(())
    });
}

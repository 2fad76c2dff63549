//! Every collective against the same thing done by one thread.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use epoxide::group::{Collectives, Connect, MeshOptions, ProcessGroup, ReduceOp, Reducible, Sockets};
use epoxide::internal::group::{Call, CallResult, P2p, REDUCE_OPS, flight_record};
use epoxide_testing::tier;
use half::bf16;

use super::harness::{PATIENCE, options, threads};

/// Small whole numbers, so that no order of operations rounds differently.
trait Sample: Reducible + PartialEq + std::fmt::Debug {
    const IS_FLOAT: bool;
    fn sample(number: u32) -> Self;
    fn oracle(op: ReduceOp, a: Self, b: Self) -> Self;
    fn average(sum: Self, size: u32) -> Self;
}

macro_rules! integer_samples {
    ($($type:ty),*) => {$(
        impl Sample for $type {
            const IS_FLOAT: bool = false;
            fn sample(number: u32) -> Self { (number % 7) as $type }
            fn oracle(op: ReduceOp, a: Self, b: Self) -> Self {
                match op {
                    ReduceOp::Sum | ReduceOp::Average => a.wrapping_add(b),
                    ReduceOp::Product => a.wrapping_mul(b),
                    ReduceOp::Min => a.min(b),
                    ReduceOp::Max => a.max(b),
                    ReduceOp::Band => a & b,
                    ReduceOp::Bor => a | b,
                    ReduceOp::Bxor => a ^ b,
                }
            }
            fn average(sum: Self, size: u32) -> Self { sum / size as $type }
        }
    )*};
}
integer_samples!(i8, u8, i32, u32, i64, u64);

macro_rules! float_samples {
    ($($type:ty: $from:expr),*) => {$(
        impl Sample for $type {
            const IS_FLOAT: bool = true;
            fn sample(number: u32) -> Self { $from((number % 2 + 1) as f32) }
            fn oracle(op: ReduceOp, a: Self, b: Self) -> Self {
                match op {
                    ReduceOp::Sum | ReduceOp::Average => a + b,
                    ReduceOp::Product => a * b,
                    ReduceOp::Min => if a < b { a } else { b },
                    _ => if a > b { a } else { b },
                }
            }
            fn average(sum: Self, size: u32) -> Self { sum / $from(size as f32) }
        }
    )*};
}
float_samples!(f32: |x: f32| x, f64: f64::from, bf16: bf16::from_f32);

fn input<T: Sample>(rank: u32, len: usize) -> Vec<T> {
    (0..len as u32).map(|index| T::sample(index.wrapping_mul(31).wrapping_add(rank * 5) >> 1)).collect()
}

fn expected<T: Sample>(size: u32, len: usize, op: ReduceOp) -> Vec<T> {
    let mut sum = input::<T>(0, len);
    for rank in 1..size {
        for (a, b) in sum.iter_mut().zip(input::<T>(rank, len)) {
            *a = T::oracle(op, *a, b);
        }
    }
    if op == ReduceOp::Average {
        sum.iter_mut().for_each(|value| *value = T::average(*value, size));
    }
    sum
}

fn reductions<T: Sample>(group: &dyn ProcessGroup, len: usize, ops: &[ReduceOp]) {
    let (rank, size) = (group.rank(), group.size());
    for op in ops.iter().copied() {
        let is_bitwise = matches!(op, ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor);
        if is_bitwise && T::IS_FLOAT {
            let error = group.all_reduce(&mut input::<T>(rank, len), op).unwrap_err();
            let text = format!("op = {op}: bitwise operations need integers, not {}", T::DTYPE);
            assert_eq!(error.to_string(), text);
            continue;
        }
        let expected = expected::<T>(size, len, op);
        let mut data = input::<T>(rank, len);
        group.all_reduce(&mut data, op).unwrap();
        assert_eq!(data, expected, "all_reduce {op} of {len} {} on {size}", T::DTYPE);

        let root = (len as u32 + 1) % size;
        let mut data = input::<T>(rank, len);
        group.reduce(root, &mut data, op).unwrap();
        let wanted = if rank == root { expected.clone() } else { input::<T>(rank, len) };
        assert_eq!(data, wanted, "reduce {op} of {len} {} on {size}", T::DTYPE);

        // Uneven pieces, the first ones empty when there are few elements.
        let mut counts = vec![len / size as usize; size as usize];
        *counts.last_mut().unwrap() += len % size as usize;
        let start: usize = counts[..rank as usize].iter().sum();
        let piece = group.reduce_scatter(&input::<T>(rank, len), &counts, op).unwrap();
        let wanted = &expected[start..start + counts[rank as usize]];
        assert_eq!(piece, wanted, "reduce_scatter {op} of {len} {} on {size}", T::DTYPE);
        if size > 1 && size_of::<T>() > 1 {
            // This many elements have 2^64 bytes, which overflow to 0 in 64 bits.
            counts = vec![0; size as usize];
            (counts[0], counts[1]) = (usize::MAX / size_of::<T>() + 1, len);
            let error = group.reduce_scatter(&input::<T>(rank, len), &counts, op).unwrap_err();
            assert!(error.to_string().contains("18446744073709551615"), "{error}");
        }
    }
}

fn pattern(from: u32, to: u32, len: usize) -> Vec<u8> {
    (0..len).map(|index| (index as u32 ^ from << 3 ^ to << 5) as u8).collect()
}

fn moves(group: &dyn ProcessGroup, len: usize) {
    let (rank, size) = (group.rank(), group.size());
    group.barrier(PATIENCE).unwrap();
    group.monitored_barrier(PATIENCE).unwrap();
    let mine = |peer: u32| pattern(peer, 0, len + peer as usize % 3);
    for root in [0, size / 2, size - 1] {
        assert_eq!(group.broadcast(root, &mine(rank)).unwrap(), mine(root));
        let gathered = group.gather(root, &mine(rank)).unwrap();
        let wanted = (rank == root).then(|| (0..size).map(mine).collect::<Vec<_>>());
        assert_eq!(gathered, wanted, "gather of {len} on {size}");
        let parts: Vec<_> = (0..size).map(|peer| pattern(root, peer, len + peer as usize)).collect();
        let parts = if rank == root { parts } else { Vec::new() };
        assert_eq!(group.scatter(root, &parts).unwrap(), pattern(root, rank, len + rank as usize));
    }
    assert_eq!(group.all_gather(&mine(rank)).unwrap(), (0..size).map(mine).collect::<Vec<_>>());
    let parts: Vec<_> =
        (0..size).map(|peer| pattern(rank, peer, len / size as usize + peer as usize)).collect();
    let wanted: Vec<_> =
        (0..size).map(|peer| pattern(peer, rank, len / size as usize + rank as usize)).collect();
    assert_eq!(group.all_to_all(&parts).unwrap(), wanted, "all_to_all of {len} on {size}");

    // Rank r sends r + p elements to rank p.
    let input_splits: Vec<usize> = (0..size).map(|peer| (rank + peer) as usize).collect();
    let input: Vec<i32> =
        (0..size).flat_map(|peer| vec![(rank * 100 + peer) as i32; (rank + peer) as usize]).collect();
    let mut output = vec![0; input.len()];
    group.all_to_all_single(&mut output, &input, &input_splits, &input_splits).unwrap();
    let wanted: Vec<i32> =
        (0..size).flat_map(|peer| vec![(peer * 100 + rank) as i32; (rank + peer) as usize]).collect();
    assert_eq!(output, wanted);
    let mut output = vec![0u8; size as usize * 2];
    group.all_to_all_single(&mut output, &vec![rank as u8; size as usize * 2], &[], &[]).unwrap();
    assert_eq!(output, (0..size as u8).flat_map(|peer| [peer; 2]).collect::<Vec<_>>());

    // A ring of messages, each rank sending before it receives.
    let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
    let send = P2p::Send { to: next, tag: 7, data: pattern(rank, next, len) };
    let calls = Call::P2p(vec![send, P2p::Recv { from: Some(last), tag: 7 }]);
    let got = group.call(calls, group.timeout()).unwrap().messages().unwrap();
    assert_eq!(got[0].data, pattern(last, rank, len));
}

#[test]
fn small_sizes_on_1_to_17_ranks() {
    for size in 1..=17 {
        threads(size, options(PATIENCE), |group| {
            for len in [0, 1, 37, 1000] {
                moves(&group, len);
                reductions::<f32>(&group, len, &[ReduceOp::Sum, ReduceOp::Average]);
            }
            group.destroy().unwrap();
        });
    }
}

#[test]
fn every_dtype_and_operation() {
    for size in [1, 2, 3, 5, 8, 13] {
        threads(size, options(PATIENCE), |group| {
            let len = 19;
            reductions::<i8>(&group, len, &REDUCE_OPS);
            reductions::<u8>(&group, len, &REDUCE_OPS);
            reductions::<i32>(&group, len, &REDUCE_OPS);
            reductions::<u32>(&group, len, &REDUCE_OPS);
            reductions::<i64>(&group, len, &REDUCE_OPS);
            reductions::<u64>(&group, len, &REDUCE_OPS);
            reductions::<f32>(&group, len, &REDUCE_OPS);
            reductions::<f64>(&group, len, &REDUCE_OPS);
            reductions::<bf16>(&group, len, &REDUCE_OPS);
        });
    }
}

#[test]
fn large_sizes() {
    for size in tier::pick(vec![3, 7], vec![2, 3, 4, 7]) {
        threads(size, options(PATIENCE), |group| {
            moves(&group, 1 << 20);
            reductions::<f32>(&group, (1 << 18) + 3, &[ReduceOp::Sum]);
            reductions::<u8>(&group, 100_001, &[ReduceOp::Bxor, ReduceOp::Average]);
        });
    }
}

#[test]
fn over_tcp_and_eager() {
    let options = MeshOptions {
        sockets: Sockets::Tcp,
        connect: Connect::Eager,
        interface: Some("lo".to_owned()),
        ..options(PATIENCE)
    };
    threads(5, options, |group| {
        moves(&group, 70_000);
        reductions::<f32>(&group, 50_000, &[ReduceOp::Sum]);
        group.destroy().unwrap();
    });
}

#[test]
fn float_sums_are_the_same_bits_everywhere() {
    for (size, len) in [(7, 1000), (5, 40_000)] {
        let run = || {
            threads(size, options(PATIENCE), |group| {
                let mut data: Vec<f32> =
                    (0..len).map(|index| 1.0 / (index as f32 + 1.3 * group.rank() as f32 + 0.1)).collect();
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                data.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
            })
        };
        let first = run();
        assert!(first.iter().all(|data| *data == first[0]));
        assert_eq!(first, run());
    }
}

#[test]
fn zeros_of_both_signs_and_nans_give_the_same_bits_everywhere() {
    let nans = [f32::from_bits(0x7fc0_0001), f32::from_bits(0xffc0_0002)];
    let pairs = [[0.0f32, -0.0], [-0.0, 0.0], nans, [f32::INFINITY, f32::NEG_INFINITY], [nans[1], 1.0]];
    for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max, ReduceOp::Average] {
        let bits = threads(2, options(PATIENCE), |group| {
            // As many of each as a vectorised loop takes at once, and some more.
            let data = pairs.map(|pair| [pair[group.rank() as usize]; 67]).concat();
            let (mut single, mut double) = (data.clone(), Vec::new());
            double.extend(data.iter().map(|value| f64::from(*value)));
            let mut half: Vec<bf16> = data.iter().map(|value| bf16::from_f32(*value)).collect();
            group.all_reduce(&mut single, op).unwrap();
            group.all_reduce(&mut double, op).unwrap();
            group.all_reduce(&mut half, op).unwrap();
            let single = single.into_iter().map(|value| u64::from(value.to_bits()));
            let double = double.into_iter().map(f64::to_bits);
            single
                .chain(double)
                .chain(half.into_iter().map(|value| value.to_bits().into()))
                .collect::<Vec<_>>()
        });
        assert_eq!(bits[0], bits[1], "{op}");
    }
}

#[test]
fn objects_and_descriptors() {
    threads(4, options(PATIENCE), |group| {
        let rank = group.rank();
        let object = (rank, format!("rank {rank}"));
        let all: Vec<_> = (0..4).map(|rank| (rank, format!("rank {rank}"))).collect();
        assert_eq!(group.all_gather_object(&object).unwrap(), all);
        assert_eq!(group.broadcast_object(2, &object).unwrap(), all[2]);
        assert_eq!(group.gather_object(1, &object).unwrap(), (rank == 1).then(|| all.clone()));
        assert_eq!(group.scatter_object(3, &all).unwrap(), all[rank as usize]);
        if rank == 0 {
            let mut from: Vec<u32> = (0..3)
                .map(|_| group.recv_object::<u32>(None, 5).unwrap())
                .map(|message| {
                    assert_eq!(message.from * 10, message.data);
                    message.from
                })
                .collect();
            from.sort_unstable();
            assert_eq!(from, [1, 2, 3]);
        } else {
            group.send_object(0, 5, &(rank * 10)).unwrap();
        }
        let file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut &file, &[rank as u8]).unwrap();
        for (peer, fds) in group.exchange_fds(&[file.as_fd()]).unwrap().into_iter().enumerate() {
            let mut byte = [0];
            let file = std::fs::File::from(fds.into_iter().next().unwrap());
            std::os::unix::fs::FileExt::read_exact_at(&file, &mut byte, 0).unwrap();
            assert_eq!(byte, [peer as u8]);
        }
    });
}

#[test]
fn coalesced_calls() {
    threads(3, options(PATIENCE), |group| {
        let rank = group.rank() as f32;
        let (mut a, mut b) = ([rank, 1.0], [2.0; 5]);
        group.all_reduce_coalesced(&mut [&mut a, &mut b], ReduceOp::Sum).unwrap();
        assert_eq!((a, b), ([3.0, 3.0], [6.0; 5]));
        let coalesce = |calls| group.call(Call::Coalesced(calls), group.timeout())?.several();
        let before = flight_record(&group).len();
        let outcomes = coalesce(vec![Call::Barrier, Call::AllGather { data: vec![group.rank() as u8] }]);
        let parts = vec![vec![0], vec![1], vec![2]];
        assert_eq!(outcomes.unwrap(), [CallResult::Done, CallResult::Parts(parts)]);
        assert_eq!(flight_record(&group).len(), before + 2);
        let error = coalesce(vec![Call::P2p(Vec::new())]).unwrap_err().to_string();
        assert!(error.ends_with("collectives only: send and receive in batches of their own"), "{error}");
    });
}

#[test]
fn thousands_of_barriers() {
    let count = tier::pick(2_000, 10_000);
    let took = threads(8, options(PATIENCE), |group| {
        let start = Instant::now();
        for _ in 0..count {
            group.barrier(PATIENCE).unwrap();
        }
        start.elapsed()
    });
    let took = took.into_iter().max().unwrap_or(Duration::ZERO);
    println!("{count} barriers of 8 ranks: {took:?}, {:?} each", took / count);
}

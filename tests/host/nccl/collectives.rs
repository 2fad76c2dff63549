//! Every operation against what it should give, on several ranks.

use epoxide::Error;
use epoxide::driver::Stream;
use epoxide::group::ReduceOp;
use epoxide::{DType, Element, Tensor};
use epoxide_nccl::{Communicator, Config, P2p};
use half::bf16;

use super::fake::{Fake, Version, patient};

const RANKS: u32 = 3;

fn put<T: Element>(stream: &Stream, shape: &[u64], values: &[T]) -> Tensor<'static> {
    Tensor::from_host(stream, T::DTYPE, shape, values).unwrap()
}

fn operations(communicator: &Communicator) {
    let (rank, size) = (communicator.rank(), communicator.size());
    let stream = Stream::new(communicator.device()).unwrap();
    let mine = f32::from(rank as u8) + 1.0;
    let all: Vec<f32> = (1..=size).map(|value| value as f32).collect();

    for (op, expected) in [
        (ReduceOp::Sum, all.iter().sum()),
        (ReduceOp::Product, all.iter().product()),
        (ReduceOp::Min, 1.0),
        (ReduceOp::Max, size as f32),
        (ReduceOp::Average, all.iter().sum::<f32>() / size as f32),
    ] {
        let tensor = put(&stream, &[4], &[mine; 4]);
        communicator.all_reduce(&tensor, op, &stream).unwrap().wait().unwrap();
        assert_eq!(tensor.to_host::<f32>(&stream).unwrap(), [expected; 4], "{op}");
    }
    let narrow = put(&stream, &[2, 3], &[bf16::from_f32(mine); 6]);
    communicator.all_reduce(&narrow, ReduceOp::Sum, &stream).unwrap().wait().unwrap();
    assert_eq!(narrow.to_host::<bf16>(&stream).unwrap(), [bf16::from_f32(all.iter().sum()); 6]);

    let reduced = put(&stream, &[2], &[i64::from(rank), 1]);
    communicator.reduce(1, &reduced, ReduceOp::Sum, &stream).unwrap().wait().unwrap();
    let expected =
        if rank == 1 { [i64::from(size * (size - 1) / 2), i64::from(size)] } else { [i64::from(rank), 1] };
    assert_eq!(reduced.to_host::<i64>(&stream).unwrap(), expected);

    let said = put(&stream, &[2], &[rank as i32, 7]);
    communicator.broadcast(2, &said, &stream).unwrap().wait().unwrap();
    assert_eq!(said.to_host::<i32>(&stream).unwrap(), [2, 7]);

    let input = put(&stream, &[2], &[rank as i32, -1]);
    let output = Tensor::alloc(communicator.device(), DType::I32, &[u64::from(size), 2]).unwrap();
    communicator.all_gather(&output, &input, &stream).unwrap().wait().unwrap();
    let expected: Vec<i32> = (0..size as i32).flat_map(|rank| [rank, -1]).collect();
    assert_eq!(output.to_host::<i32>(&stream).unwrap(), expected);

    let values: Vec<f32> = (0..2 * size).map(|index| index as f32 * mine).collect();
    let input = put(&stream, &[u64::from(size), 2], &values);
    let output = Tensor::alloc(communicator.device(), DType::F32, &[2]).unwrap();
    communicator.reduce_scatter(&output, &input, ReduceOp::Sum, &stream).unwrap().wait().unwrap();
    let total: f32 = all.iter().sum();
    let expected = [2 * rank, 2 * rank + 1].map(|index| index as f32 * total);
    assert_eq!(output.to_host::<f32>(&stream).unwrap(), expected);

    // Rank r sends r + p rows to rank p; each row holds its sender and its receiver.
    let splits: Vec<u64> = (0..size).map(|peer| u64::from(rank + peer)).collect();
    let rows: u64 = splits.iter().sum();
    let row = |from: u32, to: u32| [from as i32, to as i32];
    let lines = |pairs: &dyn Fn(u32) -> [i32; 2]| -> Vec<i32> {
        (0..size).flat_map(|peer| vec![pairs(peer); (rank + peer) as usize]).flatten().collect()
    };
    let input = put(&stream, &[rows, 2], &lines(&|peer| row(rank, peer)));
    let output = Tensor::alloc(communicator.device(), DType::I32, &[rows, 2]).unwrap();
    communicator.all_to_all(&output, &input, &splits, &splits, &stream).unwrap().wait().unwrap();
    assert_eq!(output.to_host::<i32>(&stream).unwrap(), lines(&|peer| row(peer, rank)));

    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    let (sent, received) = (put(&stream, &[1], &[rank as i32]), put(&stream, &[1], &[-1i32]));
    let ring = [P2p::Send { to: next, tensor: &sent }, P2p::Recv { from: previous, tensor: &received }];
    communicator.batch_send_recv(&ring, &stream).unwrap().wait().unwrap();
    assert_eq!(received.to_host::<i32>(&stream).unwrap(), [previous as i32]);
    // One after the other, along the ranks.
    if rank > 0 {
        communicator.recv(rank - 1, &received, &stream).unwrap().wait().unwrap();
        assert_eq!(received.to_host::<i32>(&stream).unwrap(), [rank as i32 - 1]);
    }
    if rank + 1 < size {
        communicator.send(rank + 1, &sent, &stream).unwrap().wait().unwrap();
    }
}

#[test]
fn every_operation_gives_the_expected_result() {
    for (version, config) in [
        (Version::New, patient()),
        (Version::New, Config { blocking: true, ..patient() }),
        (Version::Old, patient()),
    ] {
        let fake = Fake::of(version);
        fake.ranks(RANKS, &config, |communicator| {
            operations(&communicator);
            communicator.finalize().unwrap();
        });
        fake.assert_clean();
    }
}

#[test]
fn wrong_arguments_end_nothing() {
    let fake = Fake::new();
    let communicator = fake.single(patient());
    let device = communicator.device().clone();
    let stream = Stream::new(&device).unwrap();
    let tensor = put(&stream, &[4], &[1.0f32; 4]);
    let whole = put(&stream, &[2], &[1i32; 2]);
    let bytes = Tensor::alloc(&device, DType::Fp8E4m3, &[4]).unwrap();
    let outcomes = [
        communicator.all_reduce(&tensor, ReduceOp::Bxor, &stream),
        communicator.all_reduce(&bytes, ReduceOp::Sum, &stream),
        communicator.broadcast(1, &tensor, &stream),
        communicator.all_gather(&whole, &tensor, &stream),
        communicator.all_to_all(&tensor, &tensor, &[3], &[4], &stream),
        communicator.send(5, &tensor, &stream),
    ];
    for outcome in outcomes {
        let error = outcome.unwrap_err();
        assert!(
            matches!(error, Error::Argument { .. } | Error::DType { .. } | Error::Shape { .. }),
            "{error:?}"
        );
    }
    let captured = stream.capture(|| communicator.all_reduce(&tensor, ReduceOp::Sum, &stream).map(drop));
    assert!(matches!(captured, Err(Error::Unavailable { .. })), "{captured:?}");
    communicator.all_reduce(&tensor, ReduceOp::Sum, &stream).unwrap().wait().unwrap();
}

#[test]
fn parts_are_ordered_by_key_and_some_ranks_have_none() {
    let fake = Fake::new();
    let places = fake.ranks(4, &patient(), |communicator| {
        let rank = communicator.rank();
        // Ranks 0, 1 and 3 turned round; 2 stays out.
        let color = (rank != 2).then_some(7);
        let part = communicator.split(color, -(rank as i32), None).unwrap();
        assert_eq!(communicator.splits(), 1);
        let place = part.as_ref().map(|part| {
            operations_of_a_part(part);
            (part.rank(), part.size(), part.name().to_owned())
        });
        // A part outlives what it was split from.
        drop(communicator);
        if let Some(part) = &part {
            operations_of_a_part(part);
        }
        place
    });
    let named = |rank, size| Some((rank, size, "test/split0".to_owned()));
    assert_eq!(places, [named(2, 3), named(1, 3), None, named(0, 3)]);
    fake.assert_clean();
}

fn operations_of_a_part(part: &Communicator) {
    let stream = Stream::new(part.device()).unwrap();
    let tensor = put(&stream, &[1], &[1i32]);
    part.all_reduce(&tensor, ReduceOp::Sum, &stream).unwrap().wait().unwrap();
    assert_eq!(tensor.to_host::<i32>(&stream).unwrap(), [part.size() as i32]);
}

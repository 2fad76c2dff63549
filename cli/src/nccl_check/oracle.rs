//! Expected results of operations, computed by a rank alone from the ranks' numbers.

use epoxide::driver::Stream;
use epoxide::group::ReduceOp;
use epoxide::{DType, Element, Tensor};
use epoxide_nccl::{Communicator, P2p};
use half::bf16;

use crate::error::{CommandError, Result};

/// An element that the check makes and compares. Values are small integers, so that no order of
/// summation rounds.
pub trait Value: Element + PartialEq + std::fmt::Debug {
    fn of(value: i64) -> Self;
}

impl Value for f32 {
    fn of(value: i64) -> f32 {
        value as f32
    }
}

impl Value for bf16 {
    fn of(value: i64) -> bf16 {
        bf16::from_f32(value as f32)
    }
}

impl Value for i32 {
    fn of(value: i64) -> i32 {
        value as i32
    }
}

impl Value for i64 {
    fn of(value: i64) -> i64 {
        value
    }
}

/// Element `index` of rank `rank`'s input.
fn input(rank: u32, index: u64) -> i64 {
    ((index * 7 + u64::from(rank) * 3) % 5) as i64 + 1
}

fn reduced(op: ReduceOp, size: u32, index: u64) -> i64 {
    let values = (0..size).map(|rank| input(rank, index));
    match op {
        ReduceOp::Min => values.min().unwrap_or(0),
        ReduceOp::Max => values.max().unwrap_or(0),
        _ => values.sum(),
    }
}

/// One rank of a communicator, and the count of its comparisons.
pub struct Check<'a> {
    pub communicator: &'a Communicator,
    pub stream: &'a Stream,
    pub operations: u64,
    pub elements: u64,
}

impl<'a> Check<'a> {
    pub fn new(communicator: &'a Communicator, stream: &'a Stream) -> Check<'a> {
        Check { communicator, stream, operations: 0, elements: 0 }
    }

    fn put<T: Value>(&self, shape: &[u64], value: impl Fn(u64) -> i64) -> Result<Tensor<'static>> {
        let values: Vec<T> = (0..shape.iter().product()).map(|index| T::of(value(index))).collect();
        Ok(Tensor::from_host(self.stream, T::DTYPE, shape, &values)?)
    }

    fn compare<T: Value>(
        &mut self,
        what: &str,
        tensor: &Tensor<'_>,
        expected: impl Fn(u64) -> i64,
    ) -> Result<()> {
        let values = tensor.to_host::<T>(self.stream)?;
        for (index, value) in (0..).zip(&values) {
            if *value != T::of(expected(index)) {
                let text = format!(
                    "{what} of {} {}: element {index} is {value:?} and should be {:?}",
                    values.len(),
                    T::DTYPE,
                    T::of(expected(index))
                );
                return Err(CommandError::failed(text));
            }
        }
        self.operations += 1;
        self.elements += values.len() as u64;
        Ok(())
    }

    /// Every operation, on `count` elements of each dtype.
    pub fn all(&mut self, count: u64) -> Result<()> {
        self.every::<f32>(count)?;
        self.every::<bf16>(count)?;
        self.every::<i32>(count)?;
        self.every::<i64>(count)
    }

    fn every<T: Value>(&mut self, count: u64) -> Result<()> {
        let (communicator, stream) = (self.communicator, self.stream);
        let (rank, size) = (communicator.rank(), communicator.size());
        let ranks = u64::from(size);
        for op in [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max] {
            let tensor = self.put::<T>(&[count], |index| input(rank, index))?;
            communicator.all_reduce(&tensor, op, stream)?.wait()?;
            self.compare::<T>("all_reduce", &tensor, |index| reduced(op, size, index))?;
        }
        // As many times as there are ranks, so that the mean is a whole number. NCCL multiplies
        // each rank's floats by 1 / ranks first, which is exact only for a power of two.
        if matches!(T::DTYPE, DType::I32 | DType::I64) || size.is_power_of_two() {
            let tensor = self.put::<T>(&[count], |index| input(rank, index) * i64::from(size))?;
            communicator.all_reduce(&tensor, ReduceOp::Average, stream)?.wait()?;
            self.compare::<T>("all_reduce", &tensor, |index| reduced(ReduceOp::Sum, size, index))?;
        }
        let tensor = self.put::<T>(&[count], |_| if rank == 0 { 5 } else { 1 + i64::from(rank == 1) })?;
        communicator.all_reduce(&tensor, ReduceOp::Product, stream)?.wait()?;
        self.compare::<T>("all_reduce", &tensor, |_| if size > 1 { 10 } else { 5 })?;

        let root = size - 1;
        let tensor = self.put::<T>(&[count], |index| input(rank, index))?;
        communicator.reduce(root, &tensor, ReduceOp::Sum, stream)?.wait()?;
        let expected =
            |index| if rank == root { reduced(ReduceOp::Sum, size, index) } else { input(rank, index) };
        self.compare::<T>("reduce", &tensor, expected)?;

        let tensor = self.put::<T>(&[count], |index| input(rank, index))?;
        communicator.broadcast(root, &tensor, stream)?.wait()?;
        self.compare::<T>("broadcast", &tensor, |index| input(root, index))?;

        let own = self.put::<T>(&[count], |index| input(rank, index))?;
        let all = self.put::<T>(&[ranks, count], |_| 0)?;
        communicator.all_gather(&all, &own, stream)?.wait()?;
        self.compare::<T>("all_gather", &all, |index| input((index / count) as u32, index % count))?;

        let all = self.put::<T>(&[ranks, count], |index| input(rank, index))?;
        let own = self.put::<T>(&[count], |_| 0)?;
        communicator.reduce_scatter(&own, &all, ReduceOp::Sum, stream)?.wait()?;
        let first = u64::from(rank) * count;
        self.compare::<T>("reduce_scatter", &own, |index| reduced(ReduceOp::Sum, size, first + index))?;

        // Rank r sends 1 + (r + p) % 3 rows to rank p.
        let rows = |peer: u32| 1 + u64::from((rank + peer) % 3);
        let splits: Vec<u64> = (0..size).map(rows).collect();
        let total = splits.iter().sum();
        let owner = |row: u64| {
            let mut end = 0;
            (0..size).find(|peer| {
                end += rows(*peer);
                row < end
            })
        };
        let line = |from: u32, to: u32| i64::from(from * size + to) % 100;
        let sent =
            self.put::<T>(&[total, count], |index| owner(index / count).map_or(-1, |peer| line(rank, peer)))?;
        let received = self.put::<T>(&[total, count], |_| 0)?;
        communicator.all_to_all(&received, &sent, &splits, &splits, stream)?.wait()?;
        let expected = |index| owner(index / count).map_or(-1, |peer| line(peer, rank));
        self.compare::<T>("all_to_all", &received, expected)?;

        let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
        let sent = self.put::<T>(&[count], |index| input(rank, index))?;
        let received = self.put::<T>(&[count], |_| 0)?;
        let ring = [P2p::Send { to: next, tensor: &sent }, P2p::Recv { from: previous, tensor: &received }];
        communicator.batch_send_recv(&ring, stream)?.wait()?;
        self.compare::<T>("send/recv", &received, |index| input(previous, index))
    }

    /// A sum over all ranks, of a few elements.
    pub fn sum(&mut self) -> Result<()> {
        let rank = self.communicator.rank();
        let tensor = self.put::<i32>(&[64], |index| input(rank, index))?;
        self.communicator.all_reduce(&tensor, ReduceOp::Sum, self.stream)?.wait()?;
        let size = self.communicator.size();
        self.compare::<i32>("all_reduce", &tensor, |index| reduced(ReduceOp::Sum, size, index))
    }

    /// Time of an all-reduce of `bytes`, the median of some, in the stream.
    pub fn all_reduce_time(&self, bytes: u64) -> Result<std::time::Duration> {
        let tensor = Tensor::alloc(self.communicator.device(), DType::F32, &[bytes / 4])?;
        tensor.write(self.stream, &vec![0f32; bytes as usize / 4])?;
        let mut times = Vec::new();
        for _ in 0..9 {
            let start = std::time::Instant::now();
            self.communicator.all_reduce(&tensor, ReduceOp::Sum, self.stream)?.wait()?;
            times.push(start.elapsed());
        }
        times.sort();
        Ok(times[times.len() / 2])
    }
}

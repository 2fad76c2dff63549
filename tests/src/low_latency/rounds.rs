//! Rounds of dispatch and combine on the ranks of a case.

use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use rand::Rng;

use epoxide::driver::Stream;
use epoxide::group::ProcessGroup;
use epoxide::low_latency::{Buffer, Combined, Place, Received};
use epoxide::{DType, StreamOrder, Tensor};
use epoxide::{Error, Result};

use super::case::{CombineRows, LowLatencyCase};
use super::data::Data;
use super::inputs::LowLatencyInputs;
use crate::harness::{PATIENCE, assert_no_failures, run_ranks};
use crate::payload::rng_of;

/// Rounds whose inputs differ; those behind them have the same again, one after the other.
const DIFFERENT_ROUNDS: u32 = 16;

/// A rank of a case.
#[derive(Debug)]
pub struct LowLatencyRank {
    /// Its buffer.
    pub buffer: Buffer,
    /// All ranks.
    pub group: Arc<dyn ProcessGroup>,
    /// Its stream.
    pub stream: Arc<Stream>,
}

impl LowLatencyCase {
    /// Runs it on ranks that are threads, and compares all that there is after each step.
    ///
    /// # Panics
    /// Where anything differs from the oracle.
    pub fn check(&self) {
        self.on_threads(|rank| self.step_by_step(rank));
    }

    /// The same with the host waiting for nothing but, at random, for a moment; sums are compared
    /// at the end.
    ///
    /// # Panics
    /// Where a sum differs from the oracle.
    pub fn check_chained(&self) {
        self.on_threads(|rank| self.chained(rank));
    }

    /// The same as one step of all rounds that is captured and run `replays` times.
    ///
    /// # Panics
    /// Where a sum differs from the oracle.
    pub fn check_replayed(&self, replays: u32) {
        self.on_threads(|rank| self.replayed(rank, replays));
    }

    /// Runs `main` on ranks that are threads.
    ///
    /// # Panics
    /// Where a rank fails, or says that something differs.
    pub fn on_threads(&self, main: impl Fn(&mut LowLatencyRank) -> Result<Vec<String>> + Sync) {
        let outcome = run_ranks(self.routing.num_ranks(), |rank, group| {
            let device = self.device(rank);
            let stream = Stream::new(&device)?;
            let buffer = Buffer::new(device, &*group, self.options(rank))?;
            let mut rank = LowLatencyRank { buffer, group, stream: Arc::new(stream) };
            let number = rank.buffer.rank();
            let failures = main(&mut rank).inspect_err(|error| eprintln!("rank {number} failed: {error}"))?;
            rank.stream.synchronize()?;
            rank.group.barrier(PATIENCE)?;
            Ok(failures.into_iter().map(|failure| format!("rank {number}: {failure}")).collect::<Vec<_>>())
        });
        let failures = outcome.unwrap_or_else(|failure| panic!("{failure}")).concat();
        assert_no_failures(failures);
    }

    /// Runs it on one rank, and compares all that there is after each step. Collective.
    ///
    /// # Errors
    /// Where anything differs from the oracle, and those of the calls.
    pub fn verify(&self, rank: &mut LowLatencyRank) -> Result<()> {
        match self.step_by_step(rank)?.into_iter().next() {
            None => Ok(()),
            Some(what) => Err(Error::os("verify", what)),
        }
    }

    /// A rank's inputs to the calls of the first round.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn inputs(&self, rank: &LowLatencyRank) -> Result<LowLatencyInputs> {
        LowLatencyInputs::upload(self, &Data::new(self, 0), rank.buffer.rank(), &rank.stream)
    }

    /// The same; gives all that differs.
    ///
    /// # Errors
    /// Those of the calls.
    pub fn step_by_step(&self, rank: &mut LowLatencyRank) -> Result<Vec<String>> {
        let mut places = self.places(&rank.buffer)?;
        let (data, inputs) = self.rounds(rank)?;
        let mut differing = Vec::new();
        for (index, (data, inputs)) in self.in_turn(data.iter().zip(&inputs)) {
            let LowLatencyRank { buffer, stream, .. } = &mut *rank;
            let order = StreamOrder::on(stream);
            let place = &mut places[index % self.places as usize];
            let received = self.dispatch(buffer, place, inputs, order)?;
            let mut note = self.check_received(&received, data, stream, buffer.rank())?;
            note.extend(self.check_gathered(buffer, &received, data, stream)?);
            if self.is_answered(index) {
                let combined = self.combine(buffer, received, inputs, stream)?;
                let got: Vec<bf16> = combined.x.to_host(stream)?;
                note.extend(self.check_sums(&got, data, buffer.rank()));
            }
            buffer.check()?;
            differing.extend(note.into_iter().map(|what| format!("round {index}: {what}")));
        }
        Ok(differing)
    }

    fn chained(&self, rank: &mut LowLatencyRank) -> Result<Vec<String>> {
        let mut places = self.places(&rank.buffer)?;
        let (data, inputs) = self.rounds(rank)?;
        let sums = self.sums(rank)?;
        let mut rng = rng_of(&[self.seed, 4, rank.buffer.rank().into()]);
        for (index, inputs) in self.in_turn(inputs.iter()) {
            if rng.random_bool(0.1) {
                std::thread::sleep(Duration::from_micros(rng.random_range(0..300)));
            }
            let LowLatencyRank { buffer, stream, .. } = &mut *rank;
            self.enqueue(buffer, stream, &mut places, &sums, index, inputs)?;
        }
        rank.stream.synchronize()?;
        rank.buffer.check()?;
        self.check_all_sums(rank, &sums, &data)
    }

    /// Captures all rounds as one step, and runs it so many times on one rank; gives what differs
    /// in the end. Collective.
    ///
    /// # Errors
    /// Those of the calls.
    pub fn replayed(&self, rank: &mut LowLatencyRank, replays: u32) -> Result<Vec<String>> {
        let mut places = self.places(&rank.buffer)?;
        let (data, inputs) = self.rounds(rank)?;
        let sums = self.sums(rank)?;
        let stream = rank.stream.clone();
        let step = rank.buffer.capture(&stream, |buffer, _| {
            let mut all = self.in_turn(inputs.iter());
            all.try_for_each(|(index, inputs)| {
                self.enqueue(buffer, &stream, &mut places, &sums, index, inputs)
            })
        })?;
        for _ in 0..replays {
            step.launch(&stream)?;
        }
        step.check(&stream)?;
        self.check_all_sums(rank, &sums, &data)
    }

    /// Values of the differing rounds, round after round.
    fn in_turn<T>(&self, differing: impl Iterator<Item = T> + Clone) -> impl Iterator<Item = (usize, T)> {
        differing.cycle().enumerate().take(self.rounds as usize)
    }

    /// Enqueues a round, and the copy of its sums.
    fn enqueue(
        &self,
        buffer: &mut Buffer,
        stream: &Stream,
        places: &mut [Place],
        sums: &Tensor<'static>,
        index: usize,
        inputs: &LowLatencyInputs,
    ) -> Result<()> {
        let order = StreamOrder::on(stream);
        let place = &mut places[index % self.places as usize];
        let received = self.dispatch(buffer, place, inputs, order)?;
        if !self.is_answered(index) {
            return Ok(());
        }
        let combined = self.combine(buffer, received, inputs, stream)?;
        let bytes = combined.x.rows() * combined.x.row_bytes();
        // SAFETY: both tensors have so many bytes, and outlive the stream's work: memory goes back
        // behind it.
        unsafe { stream.copy(sums.ptr().add(index as u64 * bytes), combined.x.ptr(), bytes) }
    }

    fn dispatch<'p>(
        &self,
        buffer: &mut Buffer,
        place: &'p mut Place,
        inputs: &LowLatencyInputs,
        order: StreamOrder<'_>,
    ) -> Result<Received<'p>> {
        let request = inputs.request(self.quantise);
        if self.halves {
            buffer.dispatch_send(place, request, order)?.receive(order)
        } else {
            buffer.dispatch(place, request, order)
        }
    }

    fn combine<'p>(
        &self,
        buffer: &mut Buffer,
        received: Received<'p>,
        inputs: &LowLatencyInputs,
        stream: &Stream,
    ) -> Result<Combined<'p>> {
        let (rows, order) = (inputs.experts(self), StreamOrder::on(stream));
        if self.gathers {
            buffer.gather_by_expert(&received, &inputs.by_expert, None, order)?;
        }
        if self.combine_rows == CombineRows::InPool {
            inputs.leave_rows(&received, stream)?;
        }
        if self.halves {
            buffer.combine_send(received, rows, order)?.receive(order)
        } else {
            buffer.combine(received, rows, order)
        }
    }

    fn is_answered(&self, round: usize) -> bool {
        self.unanswered == 0 || !(round as u32 + 1).is_multiple_of(self.unanswered)
    }

    fn places(&self, buffer: &Buffer) -> Result<Vec<Place>> {
        (0..self.places).map(|index| buffer.place(index)).collect()
    }

    /// Inputs of the differing rounds.
    fn rounds(&self, rank: &LowLatencyRank) -> Result<(Vec<Data>, Vec<LowLatencyInputs>)> {
        let data: Vec<Data> =
            (0..self.rounds.min(DIFFERENT_ROUNDS)).map(|round| Data::new(self, round)).collect();
        let upload = |data| LowLatencyInputs::upload(self, data, rank.buffer.rank(), &rank.stream);
        let inputs = data.iter().map(upload).collect::<Result<Vec<_>>>()?;
        rank.group.barrier(PATIENCE * 4)?;
        Ok((data, inputs))
    }

    /// Room for the sums of all rounds.
    fn sums(&self, rank: &LowLatencyRank) -> Result<Tensor<'static>> {
        let rows = u64::from(self.routing.num_tokens(rank.buffer.rank())) * u64::from(self.rounds);
        Tensor::alloc(rank.stream.device(), DType::Bf16, &[rows, self.hidden.into()])
    }

    fn check_all_sums(&self, rank: &LowLatencyRank, sums: &Tensor<'_>, data: &[Data]) -> Result<Vec<String>> {
        let number = rank.buffer.rank();
        let of_round = (self.routing.num_tokens(number) * self.hidden) as usize;
        let mut differing = Vec::new();
        for (index, data) in self.in_turn(data.iter()).filter(|(index, _)| self.is_answered(*index)) {
            let mut got = vec![bf16::ZERO; of_round];
            let from = sums.ptr().add((index * of_round * 2) as u64);
            // SAFETY: it is the part of the tensor that a round has.
            unsafe { rank.stream.read(bytemuck::cast_slice_mut(&mut got), from)? };
            let note = self.check_sums(&got, data, number);
            differing.extend(note.map(|what| format!("round {index}: {what}")));
        }
        Ok(differing)
    }
}

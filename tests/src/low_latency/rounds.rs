//! Rounds of dispatch and combine on the ranks of a case.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng;

use epoxide::driver::{Device, Stream};
use epoxide::group::ProcessGroup;
use epoxide::low_latency::{Buffer, CombineRequest, Combined, Options, Place, Received};
use epoxide::{Error, Result};
use epoxide::{StreamOrder, Tensor};

use super::case::{LowLatencyCase, ReturnPath, Segments};
use super::data::Data;
use super::inputs::LowLatencyInputs;
use crate::harness::{PATIENCE, POISON, Rank, run_checked};
use crate::oracle::recv_order;
use crate::payload::{numbers_of, rng_of};
use crate::roundtrip::{Cases, Draw, Replays, RoundTrip};

/// Rounds whose inputs differ; those behind them have the same again, one after the other.
const DIFFERENT_ROUNDS: u32 = 16;

/// A rank with a low-latency buffer.
pub type LowLatencyRank = Rank<Buffer>;

impl RoundTrip for Buffer {
    type Case = LowLatencyCase;
    type Options = Options;
    const FIRST_NUMBER: u64 = 1;

    fn create(device: Device, group: &dyn ProcessGroup, options: Options) -> Result<Buffer> {
        Buffer::new(device, group, options)
    }

    fn recorded(&self) -> Result<()> {
        self.check()
    }

    /// The same routing with each way back that the nodes allow, and with rows by expert. The pool's
    /// way runs between the others, because it writes no packets: one that is left is of an older
    /// call. A dispatch by expert reuses the place of an unanswered one, whose words are one epoch
    /// less.
    fn first_cases(cases: &Cases) -> Vec<LowLatencyCase> {
        let mut ways = vec![ReturnPath::ByExpert, ReturnPath::InPool, ReturnPath::ByRow];
        ways.retain(|way| *way != ReturnPath::InPool || cases.nodes == 1);
        let first = LowLatencyCase { rounds: 2, ..LowLatencyCase::draw(cases, 0, Draw::Full) };
        let segments = Segments::of_draws(cases.sizes.experts);
        let by_expert = LowLatencyCase {
            combine_rows: ReturnPath::ByExpert,
            segments,
            rounds: 3,
            unanswered: 2,
            ..first.clone()
        };
        let ways = ways.into_iter().map(|combine_rows| LowLatencyCase { combine_rows, ..first.clone() });
        ways.chain([by_expert]).collect()
    }

    fn case(cases: &Cases, number: u64, draw: Draw) -> LowLatencyCase {
        LowLatencyCase::draw(cases, number, draw)
    }

    /// All rounds of the case, with a wait of the host after each step.
    fn round_trip(rank: &mut LowLatencyRank, case: &LowLatencyCase) -> Result<u64> {
        let mut places = case.places(&rank.buffer)?;
        let (data, inputs) = case.rounds(rank)?;
        let stream = rank.stream.clone();
        for (index, (data, inputs)) in case.in_turn(data.iter().zip(&inputs)) {
            let noted = rank.failures.len();
            let place = &mut places[index % case.places as usize];
            let received = case.dispatch(&mut rank.buffer, place, inputs, StreamOrder::on(&stream))?;
            case.check_received(rank, &received, data)?;
            case.check_gathered(rank, &received, data)?;
            case.check_segments(rank, &received, inputs, data)?;
            if case.is_answered(index) && case.own_memory {
                let rows = case.routing.num_tokens(rank.rank).into();
                let out = Tensor::alloc(stream.device(), case.combine_dtype, &[rows, case.hidden.into()])?;
                let received = received.detach();
                received.at(place)?;
                let received = received.attach(place)?;
                case.combine_into(&mut rank.buffer, received, inputs, &out, &stream)?;
                rank.note(case.compare_sums(&sums_of(rank, &out)?, data, rank, out.ptr()));
            } else if case.is_answered(index) {
                let combined = case.combine(&mut rank.buffer, received, inputs, &stream)?;
                let got = sums_of(rank, &combined.x)?;
                rank.note(case.compare_sums(&got, data, rank, combined.x.ptr()));
            }
            rank.buffer.check()?;
            for failure in &mut rank.failures[noted..] {
                *failure = format!("round {index}: {failure}");
            }
        }
        inputs.iter().try_for_each(|inputs| inputs.check_waits(rank))?;
        Ok(recv_order(&case.routing, rank.rank).len() as u64)
    }

    /// Three rounds of the first case; the sums of the last replay are compared.
    fn replay(rank: &mut LowLatencyRank, cases: &Cases, replays: u64, step: impl Fn()) -> Result<Replays> {
        let case = LowLatencyCase { rounds: 3, ..LowLatencyCase::draw(cases, 0, Draw::Full) };
        case.replay(rank, replays, step)?;
        Ok(Replays::default())
    }
}

impl LowLatencyCase {
    /// Runs `main` on ranks that are threads.
    ///
    /// # Panics
    /// See [`run_checked`].
    pub fn run<T: Send>(&self, main: impl Fn(&mut LowLatencyRank) -> Result<T> + Sync) -> Vec<T> {
        let join = |group: Arc<dyn ProcessGroup>| {
            let number = group.rank();
            Rank::new(self.device(number), group, self.options(number))
        };
        run_checked(self.routing.num_ranks(), join, main)
    }

    /// Runs it on ranks that are threads, and compares all that there is after each step.
    ///
    /// # Panics
    /// Where anything differs from the oracle.
    pub fn check(&self) {
        self.run(|rank| rank.round_trip(self));
    }

    /// The same without waits of the host, except for random short pauses; sums are compared at the
    /// end.
    ///
    /// # Panics
    /// Where a sum differs from the oracle.
    pub fn check_chained(&self) {
        self.run(|rank| self.chained(rank));
    }

    /// The same as one step of all rounds that is captured and run `replays` times.
    ///
    /// # Panics
    /// Where a sum differs from the oracle.
    pub fn check_replayed(&self, replays: u64) {
        self.run(|rank| self.replay(rank, replays, || ()));
    }

    /// Runs it on one rank, and compares all that there is after each step. Collective.
    ///
    /// # Errors
    /// Where anything differs from the oracle, and those of the calls.
    pub fn verify(&self, rank: &mut LowLatencyRank) -> Result<()> {
        rank.round_trip(self)?;
        rank.take_failure().map_or(Ok(()), |what| Err(Error::os("verify", what)))
    }

    /// A rank's inputs to the calls of the first round.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn inputs(&self, rank: &LowLatencyRank) -> Result<LowLatencyInputs> {
        LowLatencyInputs::upload(self, &Data::new(self, 0), rank.rank, &rank.stream)
    }

    fn chained(&self, rank: &mut LowLatencyRank) -> Result<()> {
        let mut places = self.places(&rank.buffer)?;
        let (data, inputs) = self.rounds(rank)?;
        let sums = self.sums(rank)?;
        let mut rng = rng_of(&[self.seed, 4, rank.rank.into()]);
        for (index, inputs) in self.in_turn(inputs.iter()) {
            if rng.random_bool(0.1) {
                std::thread::sleep(Duration::from_micros(rng.random_range(0..300)));
            }
            self.enqueue(&mut rank.buffer, &rank.stream, &mut places, &sums, index, inputs)?;
        }
        rank.outcome()?;
        inputs.iter().try_for_each(|inputs| inputs.check_waits(rank))?;
        self.check_all_sums(rank, &sums, &data)
    }

    /// Captures all rounds as one step, and runs it so many times; the sums of the last one are
    /// compared.
    fn replay(&self, rank: &mut LowLatencyRank, replays: u64, step: impl Fn()) -> Result<()> {
        let mut places = self.places(&rank.buffer)?;
        let (data, inputs) = self.rounds(rank)?;
        let sums = self.sums(rank)?;
        let stream = rank.stream.clone();
        let captured = rank.buffer.capture(&stream, |buffer, _| {
            let mut all = self.in_turn(inputs.iter());
            all.try_for_each(|(index, inputs)| {
                self.enqueue(buffer, &stream, &mut places, &sums, index, inputs)
            })
        })?;
        for _ in 0..replays {
            // The previous run has left the same sums. SAFETY: the memory is live until the
            // synchronise of the check below.
            unsafe { stream.fill(sums.ptr(), POISON, sums.rows() * sums.row_stride())? };
            captured.launch(&stream)?;
            step();
        }
        captured.check(&stream)?;
        inputs.iter().try_for_each(|inputs| inputs.check_waits(rank))?;
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
        let (tokens, hidden) = (self.routing.num_tokens(buffer.rank()).into(), u64::from(self.hidden));
        let bytes = tokens * hidden * self.combine_dtype.size();
        if self.own_memory {
            let received = received.detach().attach(place)?;
            // SAFETY: it is a part of the sums, which outlive the stream's work.
            let out = unsafe {
                Tensor::from_raw(sums.ptr().add(index as u64 * bytes), self.combine_dtype, &[tokens, hidden])
            };
            return self.combine_into(buffer, received, inputs, &out, stream);
        }
        let combined = self.combine(buffer, received, inputs, stream)?;
        // SAFETY: both tensors have so many bytes, and outlive the stream's work: memory is freed
        // after it.
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

    /// Does the experts' work on received rows; gives the request of their combine. `in_place` has the
    /// rows by expert, where there are such.
    fn work<'a>(
        &self,
        buffer: &mut Buffer,
        received: &Received<'_>,
        in_place: Option<&'a Tensor<'a>>,
        inputs: &'a LowLatencyInputs,
        stream: &Stream,
    ) -> Result<CombineRequest<'a>> {
        if self.gathers && self.segments.is_none() {
            buffer.gather_by_expert(received, &inputs.by_expert, None, StreamOrder::on(stream))?;
        }
        if self.combine_rows == ReturnPath::InPool {
            inputs.leave_rows(received, stream)?;
        }
        Ok(match in_place {
            Some(x) if self.gathers => inputs.returning(self, x),
            _ => inputs.experts(self),
        })
    }

    fn combine_into(
        &self,
        buffer: &mut Buffer,
        received: Received<'_>,
        inputs: &LowLatencyInputs,
        out: &Tensor<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let in_place = rows_in_place(&received);
        let rows = self.work(buffer, &received, in_place.as_ref(), inputs, stream)?;
        let order = StreamOrder::on(stream);
        if self.halves {
            buffer.combine_send_into(received, rows, out, order)?.receive(order)?;
        } else {
            buffer.combine_into(received, rows, out, order)?;
        }
        Ok(())
    }

    fn combine<'p>(
        &self,
        buffer: &mut Buffer,
        received: Received<'p>,
        inputs: &LowLatencyInputs,
        stream: &Stream,
    ) -> Result<Combined<'p>> {
        let in_place = rows_in_place(&received);
        let rows = self.work(buffer, &received, in_place.as_ref(), inputs, stream)?;
        let order = StreamOrder::on(stream);
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
        let upload = |data| LowLatencyInputs::upload(self, data, rank.rank, &rank.stream);
        let inputs = data.iter().map(upload).collect::<Result<Vec<_>>>()?;
        rank.group.barrier(PATIENCE * 4)?;
        Ok((data, inputs))
    }

    /// Room for the sums of all rounds.
    fn sums(&self, rank: &LowLatencyRank) -> Result<Tensor<'static>> {
        let rows = u64::from(self.routing.num_tokens(rank.rank)) * u64::from(self.rounds);
        Tensor::alloc(rank.stream.device(), self.combine_dtype, &[rows, self.hidden.into()])
    }

    fn check_all_sums(&self, rank: &mut LowLatencyRank, sums: &Tensor<'_>, data: &[Data]) -> Result<()> {
        let of_round =
            u64::from(self.routing.num_tokens(rank.rank) * self.hidden) * self.combine_dtype.size();
        for (index, data) in self.in_turn(data.iter()).filter(|(index, _)| self.is_answered(*index)) {
            let mut got = vec![0; of_round as usize];
            let from = sums.ptr().add(index as u64 * of_round);
            // SAFETY: it is the part of the tensor that a round has.
            unsafe { rank.stream.read(&mut got, from)? };
            let got = numbers_of(self.combine_dtype, &got);
            let difference = self.compare_sums(&got, data, rank, from);
            rank.note(difference.map(|what| format!("round {index}: {what}")));
        }
        Ok(())
    }
}

/// Sums of a combine, as numbers.
fn sums_of(rank: &LowLatencyRank, sums: &Tensor<'_>) -> Result<Vec<f32>> {
    Ok(numbers_of(sums.dtype(), &rank.values(sums)?))
}

/// Rows by expert, on which experts work in place.
fn rows_in_place<'p>(received: &Received<'p>) -> Option<Tensor<'p>> {
    received.by_expert.as_ref().and_then(|rows| rows.recv_x.clone())
}

//! Low-latency round trips that compare every bit with the oracle.

use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use rand::Rng;

use epoxide::driver::virt::{Checker, VirtConfig, VirtualGpu};
use epoxide::driver::{Device, Stream};
use epoxide::ep::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide::group::ProcessGroup;
use epoxide::group::launch::run_threads;
use epoxide::low_latency::{
    Buffer, CombineRequest, Combined, DispatchRequest, Options, Place, Quantise, Received,
};
use epoxide::{Error, Result};

use crate::harness::{Nodes, PATIENCE};
use crate::oracle::{
    Routing, Travel, from_e4m3, low_latency_plan, low_latency_share, low_latency_sum, quantised, rounded,
};
use crate::payload::{PerToken, bytes_of, per_token, rng_of, rough_bf16};

mod gathered;

/// Rounds whose inputs differ; those behind them have the same again, one after the other.
const DIFFERENT_ROUNDS: u32 = 16;

/// What an element may be off by, in scales, after it has been quantised: half of the largest e4m3 step, 32, and what rounding of the
/// inverse adds.
const FP8_ERROR: f32 = 16.1;
/// What part of itself a scale may be off by.
const SCALE_ERROR: f32 = 1e-6;

/// One round trip, or several.
#[derive(Debug, Clone)]
pub struct LowLatencyCase {
    /// Who goes where.
    pub routing: Routing,
    /// How ranks are spread over nodes; `None`: they are one.
    pub nodes: Option<Nodes>,
    /// Most tokens of a rank: what the buffer was made for.
    pub max_tokens: u32,
    /// Elements of a row.
    pub hidden: u32,
    /// What happens to rows on their way.
    pub quantise: Quantise,
    /// What happens to shares on their way back.
    pub quantise_back: Quantise,
    /// Whether the experts' rows are given by expert, else summed already.
    pub by_expert: bool,
    /// Whether the experts give the rows of the expert-major copy back as they are: bf16, by expert.
    pub gathers: bool,
    /// Whether tokens have weights, else 1.
    pub weighted: bool,
    /// Whether each call is made in two halves.
    pub halves: bool,
    /// Tokens of a chunk.
    pub chunk_tokens: u32,
    /// Most tokens of a rank whose rows return as packets.
    pub packet_tokens: u32,
    /// Multiprocessors of each device.
    pub sm_count: u32,
    /// Round trips behind each other.
    pub rounds: u32,
    /// Every so manieth dispatch is not answered by a combine; 0: all are.
    pub unanswered: u32,
    /// Places that they go round.
    pub places: u32,
    /// Where rows and weights come from.
    pub seed: u64,
    /// Draws the order of warps.
    pub schedule_seed: Option<u64>,
    /// Watches the ranks' memory.
    pub checker: Option<Checker>,
}

impl LowLatencyCase {
    /// BF16 rows along a routing, weighted, by expert.
    pub fn new(routing: Routing, hidden: u32) -> LowLatencyCase {
        LowLatencyCase {
            max_tokens: routing.max_tokens().max(1),
            routing,
            nodes: None,
            hidden,
            quantise: Quantise::Not,
            quantise_back: Quantise::Not,
            by_expert: true,
            gathers: false,
            weighted: true,
            halves: false,
            chunk_tokens: 4,
            packet_tokens: 4,
            sm_count: 3,
            rounds: 1,
            unanswered: 0,
            places: 1,
            seed: 1,
            schedule_seed: None,
            checker: None,
        }
    }

    /// The same where these ranks have no tokens and their experts do nothing.
    pub fn without(&self, ranks: &[u32]) -> LowLatencyCase {
        let mut case = self.clone();
        for &rank in ranks {
            case.routing.topk_idx[rank as usize].clear();
        }
        let owner = |expert: i64| self.routing.owner(expert);
        for expert in case.routing.topk_idx.iter_mut().flatten().flatten() {
            if owner(*expert).is_some_and(|owner| ranks.contains(&owner)) {
                *expert = -1;
            }
        }
        case
    }

    /// The options of a rank's buffer.
    pub fn options(&self, rank: u32) -> Options {
        let routing = &self.routing;
        let options =
            Options::new(self.max_tokens, self.hidden.into(), routing.num_topk, routing.num_experts)
                .places(self.places)
                .chunk_tokens(self.chunk_tokens)
                .packet_tokens(self.packet_tokens)
                .timeout(PATIENCE);
        match self.nodes {
            None => options,
            Some(nodes) => options.ranks_per_node(nodes.ranks_per_node).transport(nodes.transport_of(rank)),
        }
    }

    /// A device of a rank.
    pub fn device(&self, rank: u32) -> Arc<dyn Device> {
        let schedule_seed = self.schedule_seed.map(|seed| seed + u64::from(rank));
        let checker = self.checker.clone();
        let config = VirtConfig {
            ordinal: rank,
            sm_count: self.sm_count,
            schedule_seed,
            checker,
            ..VirtConfig::default()
        };
        VirtualGpu::new(config)
    }

    /// Runs it on ranks that are threads, and compares all that there is after each step.
    ///
    /// # Panics
    /// Where anything differs from the oracle.
    pub fn check(&self) {
        self.on_threads(|rank| self.step_by_step(rank));
    }

    /// The same with the host waiting for nothing but, at random, for a moment; sums are compared at the end.
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
        let outcome = run_threads(self.routing.num_ranks(), PATIENCE, |rank, group| {
            let device = self.device(rank);
            let stream = Stream::new(&device, false)?;
            let buffer = Buffer::new(device, &*group, self.options(rank))?;
            let mut rank = LowLatencyRank { buffer, group, stream: Arc::new(stream) };
            let number = rank.buffer.rank();
            let failures = main(&mut rank).inspect_err(|error| eprintln!("rank {number} failed: {error}"))?;
            rank.stream.synchronize()?;
            rank.group.barrier(PATIENCE)?;
            Ok(failures.into_iter().map(|failure| format!("rank {number}: {failure}")).collect::<Vec<_>>())
        });
        let failures = outcome.unwrap_or_else(|failure| panic!("{failure}")).concat();
        crate::harness::assert_no_failures(failures);
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

    /// What a rank gives to the calls of the first round.
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
                let combined = self.combine(buffer, received, inputs, order)?;
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
            self.enqueue(rank, &mut places, &sums, index, inputs)?;
        }
        rank.stream.synchronize()?;
        rank.buffer.check()?;
        self.check_all_sums(rank, &sums, &data)
    }

    /// Captures all rounds as one step, and runs it so many times on one rank; gives what differs in the end. Collective.
    ///
    /// # Errors
    /// Those of the calls.
    pub fn replayed(&self, rank: &mut LowLatencyRank, replays: u32) -> Result<Vec<String>> {
        let mut places = self.places(&rank.buffer)?;
        let (data, inputs) = self.rounds(rank)?;
        let sums = self.sums(rank)?;
        let stream = rank.stream.clone();
        let graph = stream.capture(|| {
            let mut all = self.in_turn(inputs.iter());
            all.try_for_each(|(index, inputs)| self.enqueue(rank, &mut places, &sums, index, inputs))
        })?;
        for _ in 0..replays {
            // SAFETY: what was recorded is this function's, which waits for the stream before it goes.
            unsafe { graph.launch(&rank.stream)? };
        }
        rank.stream.synchronize()?;
        rank.buffer.check()?;
        self.check_all_sums(rank, &sums, &data)
    }

    /// What the rounds that differ have, round after round.
    fn in_turn<T>(&self, differing: impl Iterator<Item = T> + Clone) -> impl Iterator<Item = (usize, T)> {
        differing.cycle().enumerate().take(self.rounds as usize)
    }

    /// Enqueues a round, and the copy of its sums.
    fn enqueue(
        &self,
        rank: &mut LowLatencyRank,
        places: &mut [Place],
        sums: &Tensor<'static>,
        index: usize,
        inputs: &LowLatencyInputs,
    ) -> Result<()> {
        let LowLatencyRank { buffer, stream, .. } = rank;
        let order = StreamOrder::on(stream);
        let place = &mut places[index % self.places as usize];
        let received = self.dispatch(buffer, place, inputs, order)?;
        if !self.is_answered(index) {
            return Ok(());
        }
        let combined = self.combine(buffer, received, inputs, order)?;
        let bytes = combined.x.rows() * combined.x.row_bytes();
        // SAFETY: both tensors have so many bytes, and outlive the stream's work: memory goes back behind it.
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
        order: StreamOrder<'_>,
    ) -> Result<Combined<'p>> {
        let rows = inputs.experts(self);
        if self.gathers {
            buffer.gather_by_expert(&received, &inputs.by_expert, None, order)?;
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

    /// What goes in, in the rounds that differ.
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

    /// Where sums differ from the oracle.
    fn check_sums(&self, got: &[bf16], data: &Data, rank: u32) -> Option<String> {
        let want = data.combined(self, rank).concat();
        if got.len() != want.len() {
            return Some(format!("combined has {} elements, expected {}", got.len(), want.len()));
        }
        let at = got.iter().zip(&want).position(|(got, want)| got.to_bits() != want.to_bits())?;
        let (token, column) = (at / self.hidden as usize, at % self.hidden as usize);
        let row = token * self.hidden as usize..(token + 1) * self.hidden as usize;
        let differ: Vec<usize> = row
            .clone()
            .filter(|&at| got[at].to_bits() != want[at].to_bits())
            .map(|at| at - row.start)
            .collect();
        let (count, last) = (differ.len(), differ.last().copied().unwrap_or(column));
        Some(format!(
            "combined[{token}][{column}] = {}, expected {}; {count} columns of the token differ, the last is {last}",
            got[at], want[at]
        ))
    }

    /// A row's bytes as it travels, and its scales if it has any.
    fn as_it_travels(&self, x: &[bf16]) -> (Vec<u8>, Vec<f32>) {
        match self.quantise {
            Quantise::Not => (bytes_of(x), Vec::new()),
            quantise => quantised(&numbers(x), quantise == Quantise::Fp8PowerOfTwo),
        }
    }

    /// What of a dispatch differs from the oracle.
    ///
    /// # Errors
    /// Those of the driver.
    fn check_received(
        &self,
        received: &Received<'_>,
        data: &Data,
        stream: &Stream,
        rank: u32,
    ) -> Result<Vec<String>> {
        let routing = &self.routing;
        let (plan, max_tokens) = (low_latency_plan(routing, rank), self.max_tokens);
        let rows = routing.num_ranks() * max_tokens;
        let mut differing = Vec::new();
        let mut equal = |what: String, got: Vec<i64>, want: Vec<i64>| {
            if got != want {
                differing.push(format!("{what} = {got:?}, expected {want:?}"));
            }
        };
        let num_tokens = received.num_tokens.values(stream)?;
        let counts = received.expert_counts.values(stream)?;
        let (of_expert, info) = (received.expert_rows.values(stream)?, received.src_info.values(stream)?);
        let ranges = received.layout_range.values(stream)?;
        let want = (0..num_tokens.len() as u32)
            .map(|rank| if rank < routing.num_ranks() { routing.num_tokens(rank).into() } else { 0 });
        equal("num_tokens".into(), num_tokens.iter().map(|&tokens| tokens.into()).collect(), want.collect());
        for (expert, want) in plan.expert_rows.iter().enumerate() {
            equal(format!("expert_counts[{expert}]"), vec![counts[expert].into()], vec![want.len() as i64]);
            let first = expert * rows as usize;
            let part = |from: &[i32]| {
                from[first..first + want.len()].iter().map(|&value| value.into()).collect::<Vec<i64>>()
            };
            let row = |&(source, token): &(u32, u32)| i64::from(source * max_tokens + token);
            equal(format!("expert_rows[{expert}]"), part(&of_expert), want.iter().map(row).collect());
            equal(format!("src_info[{expert}]"), part(&info), want.iter().map(|row| row.1.into()).collect());
            let ranges = &ranges[expert * routing.num_ranks() as usize..][..routing.num_ranks() as usize];
            let range = |&(count, begin): &(u32, u32)| i64::from(begin) << 32 | i64::from(count);
            equal(
                format!("layout_range[{expert}]"),
                ranges.to_vec(),
                plan.layout_range[expert].iter().map(range).collect(),
            );
        }
        // Rows that nobody sent hold anything, and a checker would see them read: rows are read one by one.
        let row_bytes = received.x.row_bytes() as usize;
        for source in 0..routing.num_ranks() {
            for token in (0..routing.num_tokens(source)).filter(|&token| routing.hits(source, token, rank)) {
                let row = u64::from(source * max_tokens + token);
                let mut got = vec![0u8; row_bytes];
                // SAFETY: the row is one of the tensor's.
                unsafe { stream.read(&mut got, received.x.ptr().add(row * received.x.row_stride()))? };
                let x = &data.x[source as usize][token as usize];
                let (bytes, scales) = self.as_it_travels(x);
                if got != bytes {
                    differing.push(format!("row of token {token} of rank {source} differs"));
                }
                if self.quantise == Quantise::Not {
                    continue;
                }
                let tensor = received.scales.as_ref().ok_or_else(|| Error::os("check", "no scales"))?;
                for (block, &scale) in scales.iter().enumerate() {
                    let mut got = [0u8; 4];
                    let at = (block as u64 * u64::from(rows) + row) * 4;
                    // SAFETY: it is one of the tensor's elements.
                    unsafe { stream.read(&mut got, tensor.ptr().add(at))? };
                    let got = f32::from_le_bytes(got);
                    if (got - scale).abs() > SCALE_ERROR * scale {
                        differing.push(format!(
                            "scale {block} of token {token} of rank {source} is {got}, expected {scale}"
                        ));
                    }
                }
                let values = bytes.iter().enumerate().map(|(at, &byte)| from_e4m3(byte) * scales[at / 128]);
                let worst = worst_error(&numbers(x), &values.collect::<Vec<f32>>(), &scales);
                // A power of two may be up to twice the scale: the step is the same in units of it.
                if worst > FP8_ERROR {
                    differing.push(format!("token {token} of rank {source} is off by {worst} scales"));
                }
            }
        }
        Ok(differing)
    }
}

fn numbers(row: &[bf16]) -> Vec<f32> {
    row.iter().map(|value| value.to_f32()).collect()
}

/// By how many scales of its block of 128 an element is off, at most.
fn worst_error(row: &[f32], arrived: &[f32], scales: &[f32]) -> f32 {
    let errors = row.iter().zip(arrived).enumerate();
    errors.map(|(at, (row, arrived))| (row - arrived).abs() / scales[at / 128]).fold(0.0, f32::max)
}

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

/// What all ranks send and what all experts make of it, in one round.
#[derive(Debug)]
struct Data {
    x: PerToken<Vec<bf16>>,
    weights: PerToken<Vec<f32>>,
    seed: u64,
}

impl Data {
    fn new(case: &LowLatencyCase, round: u32) -> Data {
        let routing = &case.routing;
        let tokens: Vec<u32> = (0..routing.num_ranks()).map(|rank| routing.num_tokens(rank)).collect();
        let seed = case.seed ^ u64::from(round) << 32;
        let mut rng = rng_of(&[seed, 1]);
        let mut of_weights = rng_of(&[seed, 2]);
        let mut weight = || if case.weighted { of_weights.random_range(-2.0f32..2.0) } else { 1.0 };
        Data {
            x: per_token(&tokens, |_, _| rough_bf16(&mut rng, case.hidden as usize)),
            weights: per_token(&tokens, |_, _| (0..routing.num_topk).map(|_| weight()).collect()),
            seed,
        }
    }

    /// What an expert makes of a token: anything, as long as all ranks know it.
    fn output(&self, case: &LowLatencyCase, expert: i64, source: u32, token: u32) -> Vec<bf16> {
        if case.gathers {
            return self.x[source as usize][token as usize].clone();
        }
        let mut rng = rng_of(&[self.seed, 3, expert as u64, source.into(), token.into()]);
        rough_bf16(&mut rng, case.hidden as usize)
    }

    /// What a rank has of a token.
    fn share(&self, case: &LowLatencyCase, source: u32, token: u32, dst: u32) -> Option<Vec<f32>> {
        let weights = &self.weights[source as usize][token as usize];
        low_latency_share(&case.routing, weights, source, token, dst, |expert| {
            self.output(case, expert, source, token)
        })
    }

    /// What arrives of it.
    fn returned(&self, case: &LowLatencyCase, source: u32, token: u32, dst: u32) -> Option<Vec<f32>> {
        let share = self.share(case, source, token, dst)?;
        // Rows that are summed already are given in bf16.
        let share = if case.by_expert { share } else { Travel::Bf16.arrives(&share) };
        let travel = match case.quantise_back {
            Quantise::Not => Travel::Bf16,
            Quantise::Fp8 => Travel::Fp8 { power_of_two: false },
            Quantise::Fp8PowerOfTwo => Travel::Fp8 { power_of_two: true },
        };
        let arrives = travel.arrives(&share);
        if case.quantise_back != Quantise::Not {
            let (_, scales) = quantised(&share, case.quantise_back == Quantise::Fp8PowerOfTwo);
            let worst = worst_error(&share, &arrives, &scales);
            assert!(worst <= FP8_ERROR, "a share of token {token} of rank {source} is off by {worst} scales");
        }
        Some(arrives)
    }

    /// What a rank has at the end.
    fn combined(&self, case: &LowLatencyCase, rank: u32) -> Vec<Vec<bf16>> {
        let ranks = 0..case.routing.num_ranks();
        let sum = |token: u32| {
            let shares = ranks.clone().filter_map(|dst| self.returned(case, rank, token, dst));
            low_latency_sum(shares, case.hidden as usize)
        };
        (0..case.routing.num_tokens(rank)).map(sum).collect()
    }
}

/// What a rank gives to one round's calls.
#[derive(Debug)]
pub struct LowLatencyInputs {
    x: Tensor<'static>,
    topk_idx: TypedTensor<'static, i64>,
    weights: Option<TypedTensor<'static, f32>>,
    by_expert: Tensor<'static>,
    by_row: Tensor<'static>,
}

impl LowLatencyInputs {
    fn upload(case: &LowLatencyCase, data: &Data, rank: u32, stream: &Stream) -> Result<LowLatencyInputs> {
        let (routing, hidden) = (&case.routing, u64::from(case.hidden));
        let tokens = u64::from(routing.num_tokens(rank));
        let x = data.x[rank as usize].concat();
        let entries = [tokens, routing.num_topk.into()];
        let weights = case
            .weighted
            .then(|| TypedTensor::from_host(stream, &entries, &data.weights[rank as usize].concat()))
            .transpose()?;
        let (plan, max_tokens) = (low_latency_plan(routing, rank), case.max_tokens);
        let rows = u64::from(routing.num_ranks() * max_tokens);
        let device = stream.device();
        let experts = u64::from(routing.local_experts());
        // Rows that are not there hold what they hold.
        let by_expert =
            Tensor::alloc(device, DType::Bf16, &[if case.by_expert { experts * rows } else { 1 }, hidden])?;
        let by_row = Tensor::alloc(device, DType::Bf16, &[if case.by_expert { 1 } else { rows }, hidden])?;
        let write = |tensor: &Tensor<'_>, row: u64, values: &[bf16]| {
            // SAFETY: the row is one of the tensor's, which nobody else has yet.
            unsafe { stream.write(tensor.ptr().add(row * hidden * 2), bytemuck::cast_slice(values)) }
        };
        if case.gathers {
            // The copy is what fills them.
        } else if case.by_expert {
            for (expert, list) in (0..).zip(&plan.expert_rows) {
                let id = i64::from(rank * routing.local_experts()) + expert as i64;
                for (at, &(source, token)) in (0..).zip(list) {
                    write(&by_expert, expert * rows + at, &data.output(case, id, source, token))?;
                }
            }
        } else {
            for source in 0..routing.num_ranks() {
                for token in 0..routing.num_tokens(source) {
                    if let Some(share) = data.share(case, source, token, rank) {
                        write(&by_row, u64::from(source * max_tokens + token), &rounded(&share))?;
                    }
                }
            }
        }
        Ok(LowLatencyInputs {
            x: Tensor::from_host(stream, DType::Bf16, &[tokens, hidden], &x)?,
            topk_idx: TypedTensor::from_host(stream, &entries, &routing.flat_topk_idx(rank))?,
            weights,
            by_expert,
            by_row,
        })
    }

    /// What its experts made.
    pub fn experts(&self, case: &LowLatencyCase) -> CombineRequest<'_> {
        let request = if case.by_expert {
            CombineRequest::by_expert(&self.by_expert)
        } else {
            CombineRequest::by_row(&self.by_row)
        };
        request.quantise(case.quantise_back)
    }

    /// What it dispatches.
    pub fn request(&self, quantise: Quantise) -> DispatchRequest<'_> {
        let request = DispatchRequest::new(&self.x, &self.topk_idx).quantise(quantise);
        match &self.weights {
            Some(weights) => request.topk_weights(weights),
            None => request,
        }
    }
}

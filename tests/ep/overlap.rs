//! Two batches of a rank in flight: a buffer for each, whose operations interleave on two streams.

use std::time::Duration;

use half::bf16;
use rand::Rng;

use epoxide::driver::virt::{CheckConfig, Checker, VirtConfig, VirtualGpu};
use epoxide::driver::{Device, Event, Stream};
use epoxide::group::{ProcessGroup, run_threads};
use epoxide::low_latency::{Buffer, CombineRequest, DispatchRequest, Options, Place, Shape};
use epoxide::{DType, Result, StreamOrder, Tensor, TypedTensor};
use epoxide_testing::oracle::{Routing, Style};
use epoxide_testing::payload::rng_of;
use epoxide_testing::tier;
use epoxide_vgpu::for_each_seed;

const RANKS: u32 = 3;
const HIDDEN: u64 = 64;
const TOPK: u32 = 3;
const EXPERTS: u32 = 6;
const MAX_TOKENS: u32 = 9;
/// Multiprocessors of each buffer: blocks of both fit on the device together.
const NUM_SMS: u32 = 8;

/// A buffer and its stream.
struct Lane {
    buffer: Buffer,
    place: Place,
    stream: Stream,
}

/// A rank's part of a batch, in memory that keeps its address.
struct Batch {
    x: Tensor<'static>,
    ids: TypedTensor<'static, i64>,
    /// The experts' output, `[RANKS * MAX_TOKENS, HIDDEN]`.
    made: Tensor<'static>,
    sums: Tensor<'static>,
}

/// The routing of a batch of a round: the same on every rank, with fewer tokens on some.
fn routing(round: u64, lane: u64) -> Routing {
    let mut rng = rng_of(&[round, lane]);
    let tokens: Vec<u32> = (0..RANKS).map(|_| rng.random_range(0..=MAX_TOKENS)).collect();
    let style = Style::ALL[rng.random_range(0..Style::ALL.len())];
    Routing::random(&mut rng, &tokens, TOPK, EXPERTS, style)
}

/// The elements of a token's row: small, so that sums over ranks are exact.
fn value(round: u64, lane: u64, rank: u32, token: u32) -> f32 {
    ((u64::from(rank) * 7 + u64::from(token) * 3 + round * 5 + lane) % 32 + 1) as f32
}

impl Batch {
    fn upload(stream: &Stream, routing: &Routing, (round, lane): (u64, u64), rank: u32) -> Result<Batch> {
        let tokens = routing.num_tokens(rank);
        let row = |token| vec![bf16::from_f32(value(round, lane, rank, token)); HIDDEN as usize];
        let rows: Vec<bf16> = (0..tokens).flat_map(row).collect();
        let (count, topk) = (u64::from(tokens), u64::from(TOPK));
        Ok(Batch {
            x: Tensor::from_host(stream, DType::Bf16, &[count, HIDDEN], &rows)?,
            ids: TypedTensor::from_host(stream, &[count, topk], &routing.flat_topk_idx(rank))?,
            made: Tensor::alloc(stream.device(), DType::Bf16, &[u64::from(RANKS * MAX_TOKENS), HIDDEN])?,
            sums: Tensor::alloc(stream.device(), DType::Bf16, &[count, HIDDEN])?,
        })
    }

    /// Experts that give their rows back as they are.
    fn experts(&self, x: &Tensor<'_>, stream: &Stream) -> Result<CombineRequest<'_>> {
        assert_eq!((x.rows(), x.row_stride()), (self.made.rows(), self.made.row_stride()));
        // SAFETY: the tensors have as many bytes, and are freed behind all work of the stream.
        unsafe { stream.copy(self.made.ptr(), x.ptr(), x.rows() * x.row_stride())? };
        Ok(CombineRequest::by_row(&self.made))
    }

    /// Every destination rank of a token returns its row unchanged.
    fn check(&self, stream: &Stream, routing: &Routing, (round, lane): (u64, u64), rank: u32) -> Result<()> {
        let sums = self.sums.to_host::<bf16>(stream)?;
        for token in 0..routing.num_tokens(rank) {
            let ranks = (0..RANKS).filter(|&to| routing.hits(rank, token, to)).count();
            let expected = bf16::from_f32(ranks as f32 * value(round, lane, rank, token));
            let at = token as usize * HIDDEN as usize;
            assert_eq!(sums[at..at + HIDDEN as usize], [expected; HIDDEN as usize], "{round} {lane} {token}");
        }
        Ok(())
    }
}

/// Runs `work` on every rank with two buffers.
fn run(seed: u64, config: CheckConfig, work: impl Fn(u32, &mut [Lane; 2]) -> Result<()> + Sync) {
    let checker = Checker::new(config);
    let outcome = run_threads(RANKS, Duration::from_secs(120), |rank, group| {
        let device = VirtualGpu::new(VirtConfig {
            ordinal: rank,
            checker: Some(checker.clone()),
            schedule_seed: Some(seed * u64::from(RANKS) + u64::from(rank)),
            ..VirtConfig::default()
        });
        let mut lanes = [lane(&device, &*group)?, lane(&device, &*group)?];
        work(rank, &mut lanes)?;
        for lane in &lanes {
            lane.stream.synchronize()?;
            lane.buffer.check()?;
        }
        // No pool is freed before all peers have finished both.
        group.barrier(group.timeout())
    });
    outcome.unwrap();
}

fn lane(device: &Device, group: &dyn ProcessGroup) -> Result<Lane> {
    let shape = Shape { max_tokens: MAX_TOKENS, hidden: HIDDEN, num_topk: TOPK, num_experts: EXPERTS };
    let buffer = Buffer::new(device.clone(), group, Options::new(shape).num_sms(NUM_SMS))?;
    Ok(Lane { place: buffer.place(0)?, buffer, stream: Stream::new(device)? })
}

/// Both batches' halves in turn: each batch has one under way while the other's is launched.
fn interleave([a, b]: &mut [Lane; 2], batches: [&Batch; 2]) -> Result<()> {
    let orders = [StreamOrder::on(&a.stream), StreamOrder::on(&b.stream)];
    let [first, second] = batches;
    let sent_a =
        a.buffer.dispatch_send(&mut a.place, DispatchRequest::new(&first.x, &first.ids), orders[0])?;
    let sent_b =
        b.buffer.dispatch_send(&mut b.place, DispatchRequest::new(&second.x, &second.ids), orders[1])?;
    let received_a = sent_a.receive(orders[0])?;
    let request = first.experts(&received_a.x, &a.stream)?;
    let returned_a = a.buffer.combine_send_into(received_a, request, &first.sums, orders[0])?;
    let received_b = sent_b.receive(orders[1])?;
    let request = second.experts(&received_b.x, &b.stream)?;
    let returned_b = b.buffer.combine_send_into(received_b, request, &second.sums, orders[1])?;
    returned_a.receive(orders[0])?;
    returned_b.receive(orders[1])?;
    Ok(())
}

#[test]
fn halves_of_two_batches_interleave() {
    for_each_seed(tier::pick(2, 8), |seed| {
        let weak = (seed % 2 == 1).then_some(seed);
        let config = CheckConfig { races: weak.is_none(), weak_memory: weak, ..CheckConfig::default() };
        run(seed, config, |rank, lanes| {
            let rounds: Vec<_> = (seed * 10..seed * 10 + tier::pick(3, 5)).collect();
            let mut batches = Vec::new();
            for &round in &rounds {
                let batch = |lane: u64| {
                    let routing = routing(round, lane);
                    let stream = &lanes[lane as usize].stream;
                    Batch::upload(stream, &routing, (round, lane), rank).map(|batch| (routing, batch))
                };
                let pair = [batch(0)?, batch(1)?];
                interleave(lanes, [&pair[0].1, &pair[1].1])?;
                batches.push(pair);
            }
            for (&round, pair) in rounds.iter().zip(&batches) {
                for (lane, (routing, batch)) in (0..).zip(pair) {
                    batch.check(&lanes[lane as usize].stream, routing, (round, lane), rank)?;
                }
            }
            Ok(())
        });
    });
}

/// One graph has both batches, on two branches, and finds other routings in each replay.
#[test]
fn a_graph_has_two_batches() {
    for_each_seed(tier::pick(1, 4), |seed| {
        run(seed, CheckConfig::default(), |rank, lanes| {
            let full = |lane| {
                let tokens = [MAX_TOKENS; RANKS as usize];
                Routing::random(&mut rng_of(&[seed, lane]), &tokens, TOPK, EXPERTS, Style::WithHoles)
            };
            let batch = |lane: u64| {
                Batch::upload(&lanes[lane as usize].stream, &full(100 + lane), (seed, lane), rank)
            };
            let batches = [batch(0)?, batch(1)?];
            let both = [&batches[0], &batches[1]];
            lanes.iter_mut().for_each(|lane| lane.buffer.begin_warmup());
            interleave(lanes, both)?;
            lanes.iter().try_for_each(|lane| lane.stream.synchronize())?;
            lanes.iter_mut().for_each(|lane| lane.buffer.end_warmup());
            let device = lanes[0].stream.device().clone();
            let (fork, join) = (Event::new(&device)?, Event::new(&device)?);
            let recorder = Stream::new(&device)?;
            let graph = recorder.capture(|| {
                fork.record(&recorder)?;
                lanes.iter().try_for_each(|lane| lane.stream.wait(&fork))?;
                interleave(lanes, both)?;
                for lane in lanes.iter() {
                    join.record(&lane.stream)?;
                    recorder.wait(&join)?;
                }
                Ok(())
            })?;
            for replay in 0..tier::pick(2, 4) {
                let routings = [full(replay * 2), full(replay * 2 + 1)];
                for (batch, routing) in batches.iter().zip(&routings) {
                    batch.ids.write(&recorder, &routing.flat_topk_idx(rank))?;
                }
                // SAFETY: both buffers, the batches and the streams outlive the replay.
                unsafe { graph.launch(&recorder)? };
                recorder.synchronize()?;
                for ((lane, routing), batch) in (0..).zip(&routings).zip(&batches) {
                    batch.check(&recorder, routing, (seed, lane), rank)?;
                }
            }
            Ok(())
        });
    });
}

//! Times of low-latency dispatch and combine: replays of graphs, one after the other, without a
//! wait of the host.

use std::sync::Arc;
use std::time::Instant;

use epoxide::Result;
use epoxide::driver::{Device, Event, Graph, Stream};
use epoxide::group::ProcessGroup;
use epoxide::internal::Instruments;
use epoxide::low_latency::{Buffer, Options, Place, Quantise, Shape};
use epoxide::{DType, StreamOrder};
use epoxide_gpu::layout::BlockTrace;
use epoxide_testing::low_latency::{LowLatencyCase, LowLatencyInputs, LowLatencyRank};

use crate::measure::{TRACED_CALLS, made};
use crate::measured::{LowLatencyTimes, RankResult, Times, TracedCall};
use crate::plan::chains_of;
use crate::results::PhaseName;
use crate::{LowLatency, Plan, TIMEOUT, Watch};

/// Rows that a rank sends to others, mean over ranks: a token counts once for each.
pub(crate) fn remote_rows(plan: &Plan) -> f64 {
    let (routing, ranks) = (plan.low_latency_routing(), plan.topology.ranks());
    let pairs = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
    let rows = |(from, to): (u32, u32)| {
        (0..plan.tokens).filter(|&token| from != to && routing.hits(from, token, to)).count() as f64
    };
    pairs.map(rows).sum::<f64>() / f64::from(ranks)
}

fn quantise(dtype: DType) -> Quantise {
    if dtype == DType::Bf16 { Quantise::Not } else { Quantise::Fp8 }
}

/// One run on rank `group.rank()`, a buffer for each number of multiprocessors. Collective.
///
/// # Errors
/// A received row or a sum differs from the oracle; and errors of the operations.
pub(crate) fn measure(
    plan: &Plan,
    low: LowLatency,
    device: &Device,
    group: &Arc<dyn ProcessGroup>,
    watch: &dyn Watch,
    result: &mut RankResult,
) -> Result<()> {
    let max_tokens = low.max_tokens.unwrap_or(plan.tokens);
    let case = LowLatencyCase {
        max_tokens,
        quantise: quantise(plan.dtype),
        quantise_back: quantise(low.combine_dtype),
        combine_rows: low.combine_rows,
        seed: plan.seed,
        ..LowLatencyCase::new(plan.low_latency_routing(), plan.hidden as u32)
    };
    for &num_sms in &plan.num_sms {
        let mut options = Options::new(Shape {
            max_tokens,
            hidden: plan.hidden,
            num_topk: plan.topk,
            num_experts: plan.experts,
        })
        .chunk_tokens(low.chunk_tokens)
        .packet_tokens(low.packet_tokens)
        .ranks_per_node(plan.topology.ranks_per_node)
        .transport(plan.transport_options(TIMEOUT))
        .timeout(TIMEOUT);
        if num_sms != Plan::ALL_SMS {
            options = options.num_sms(num_sms);
        }
        if plan.keep_nodes {
            options = options.keep_nodes();
        }
        let buffer = made(device, group, result, || Buffer::new(device.clone(), &**group, options))?;
        result.pool_bytes = buffer.pool_bytes();
        let mut rank = LowLatencyRank::with(group.clone(), Stream::new(device)?, buffer);
        watch.doing(group.rank(), &format!("{} tokens", plan.tokens));
        // Right before it is fast, and still right behind it.
        case.verify(&mut rank)?;
        let num_sms = if num_sms == Plan::ALL_SMS { device.info().sm_count } else { num_sms };
        let times = times(plan, num_sms, &case, &mut rank, watch, &mut result.traced)?;
        result.times.push(times);
        case.verify(&mut rank)?;
        group.barrier(TIMEOUT)?;
    }
    Ok(())
}

/// Graphs of one call each.
pub(crate) struct Recorded {
    /// A dispatch.
    pub dispatch: Graph,
    /// The combine that answers it.
    pub combine: Graph,
}

impl Recorded {
    /// Replays need the buffer, the inputs and the place for as long as they run.
    pub fn new(
        case: &LowLatencyCase,
        rank: &mut LowLatencyRank,
        inputs: &LowLatencyInputs,
        place: &mut Place,
    ) -> Result<Recorded> {
        let LowLatencyRank { buffer, stream, .. } = rank;
        let order = StreamOrder::on(stream);
        let mut received = None;
        let dispatch = stream.capture(|| {
            received = Some(buffer.dispatch(place, inputs.request(case.quantise), order)?);
            Ok(())
        })?;
        let combine = stream.capture(|| match received.take() {
            Some(received) => buffer.combine(received, inputs.experts(case), order).map(drop),
            None => Err(epoxide::Error::Unavailable {
                what: "combine".into(),
                reason: "no dispatch before it".into(),
            }),
        })?;
        Ok(Recorded { dispatch, combine })
    }
}

fn times(
    plan: &Plan,
    num_sms: u32,
    case: &LowLatencyCase,
    rank: &mut LowLatencyRank,
    watch: &dyn Watch,
    traced: &mut Vec<TracedCall>,
) -> Result<Times> {
    let inputs = case.inputs(rank)?;
    let mut place = rank.buffer.place(0)?;
    let Recorded { dispatch, combine } = Recorded::new(case, rank, &inputs, &mut place)?;
    let LowLatencyRank { buffer, group, stream, .. } = rank;
    let order = StreamOrder::on(stream);
    let mut pair = |buffer: &mut Buffer| {
        let received = buffer.dispatch(&mut place, inputs.request(case.quantise), order)?;
        buffer.combine(received, inputs.experts(case), order).map(drop)
    };
    let chain = stream.capture(|| (0..plan.chain()).try_for_each(|_| pair(buffer)))?;
    let device = stream.device().clone();
    let event = || Event::timed(&device);
    // SAFETY: the recorded addresses are the buffer's and the inputs', which live until the stream
    // has been waited for.
    let launch = |graph: &Graph| unsafe { graph.launch(stream) };
    let us = |from: &Event, to: &Event| -> Result<f64> { Ok(f64::from(from.elapsed_ms(to)?) * 1e3) };
    let mut times = Times { num_sms, ..Times::default() };
    let mut of = [LowLatencyTimes::default(), LowLatencyTimes::default()];

    group.barrier(TIMEOUT)?;
    let mut events = vec![event()?];
    events[0].record(stream)?;
    for _ in 0..plan.warmup + plan.iters {
        for graph in [&dispatch, &combine] {
            launch(graph)?;
            let end = event()?;
            end.record(stream)?;
            events.push(end);
        }
    }
    for pair in events[1..].chunks(2) {
        pair[1].synchronize()?;
        watch.step(group.rank());
    }
    stream.synchronize()?;
    buffer.check()?;
    let timed = events.windows(2).enumerate().skip(2 * plan.warmup as usize);
    for (at, ends) in timed {
        of[at % 2].replays.push(us(&ends[0], &ends[1])?);
    }

    let [untimed, timed] = chains_of(plan.warmup, plan.iters);
    for iteration in 0..untimed + timed {
        group.barrier(TIMEOUT)?;
        let (start, end) = (event()?, event()?);
        start.record(stream)?;
        launch(&chain)?;
        end.record(stream)?;
        stream.synchronize()?;
        (0..plan.chain()).for_each(|_| watch.step(group.rank()));
        if iteration >= untimed {
            times.pair.push(us(&start, &end)? / f64::from(plan.chain()));
        }
    }
    buffer.check()?;

    group.barrier(TIMEOUT)?;
    let pairs = plan.warmup + plan.iters;
    let enqueued = Instant::now();
    buffer.start_trace(2 * u64::from(pairs) * u64::from(device.info().sm_count))?;
    (0..pairs).try_for_each(|_| pair(buffer))?;
    let (launches, _) = buffer.take_trace(stream)?;
    let host = (enqueued, Instant::now());
    for (at, launch) in launches.into_iter().enumerate().skip(2 * plan.warmup as usize) {
        let start = launch.blocks.iter().map(|block| block.enter).min().unwrap_or(0);
        let latest = |of: fn(&BlockTrace) -> u64| {
            launch.blocks.iter().map(of).max().unwrap_or(0).saturating_sub(start) as f64 / 1e3
        };
        let times = &mut of[at % 2];
        times.sent.push(latest(|block| block.moved));
        times.entered.push(latest(|block| block.ready));
        times.done.push(latest(|block| block.done));
        if times.done.len() <= TRACED_CALLS as usize {
            let (phase, launches) = (PhaseName::LOW_LATENCY[at % 2], vec![launch]);
            let (tokens, puts) = (plan.tokens, Vec::new());
            traced.push(TracedCall { phase, num_sms, tokens, barrier: None, launches, puts, host });
        }
    }
    times.low_latency = PhaseName::LOW_LATENCY.into_iter().zip(of).collect();
    Ok(times)
}

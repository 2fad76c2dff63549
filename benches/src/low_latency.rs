//! Low latency as a mode of the script: replays of graphs, one after the other, without a wait of
//! the host.

use std::sync::Arc;

use epoxide::driver::{Device, Graph, Stream};
use epoxide::group::ProcessGroup;
use epoxide::low_latency::{Buffer, Options, Place, Quantise, Shape};
use epoxide::{DType, Error, Result, StreamOrder};
use epoxide_testing::low_latency::{LowLatencyCase, LowLatencyInputs, LowLatencyRank, RowMemory, Segments};

use crate::baseline::link_rows;
use crate::between::Between;
use crate::measure::made;
use crate::measured::{RankResult, Times};
use crate::results::{PhaseName, percentile};
use crate::script::{Front, Mode, Script};
use crate::{LowLatencySettings, Plan, TIMEOUT, Watch};

/// Rows that a rank sends to others, mean over ranks: a token counts once for each.
pub(crate) fn remote_rows(plan: &Plan) -> f64 {
    let (routing, ranks) = (plan.low_latency_routing(), plan.topology.ranks());
    (0..ranks).map(|rank| link_rows(&routing, rank).1 as f64).sum::<f64>() / f64::from(ranks)
}

/// Quantisation of rows on their way as rows of this type.
pub(crate) fn quantise(dtype: DType) -> Quantise {
    if dtype == DType::Bf16 { Quantise::None } else { Quantise::Fp8 }
}

/// Options of a buffer for so many tokens.
pub(crate) fn options(plan: &Plan, max_tokens: u32) -> Options {
    let (hidden, num_topk, num_experts) = (plan.hidden, plan.topk, plan.experts);
    Options::new(Shape { max_tokens, hidden, num_topk, num_experts }).timeout(TIMEOUT)
}

/// One run on rank `group.rank()`, a buffer for each number of multiprocessors. Collective.
///
/// # Errors
/// A received row or a sum differs from the oracle; and errors of the operations.
pub(crate) fn measure(
    plan: &Plan,
    low: LowLatencySettings,
    device: &Device,
    group: &Arc<dyn ProcessGroup>,
    watch: &dyn Watch,
    result: &mut RankResult,
) -> Result<()> {
    let max_tokens = low.max_tokens.unwrap_or(plan.tokens);
    let case = LowLatencyCase {
        max_tokens,
        quantise: low.quantise,
        quantise_back: quantise(low.combine_dtype),
        combine_rows: low.combine_rows,
        segments: plan
            .rows_by_expert
            .map(|alignment| Segments { memory: RowMemory::Caller, ..Segments::aligned(alignment) }),
        seed: plan.seed,
        ..LowLatencyCase::new(plan.low_latency_routing(), plan.hidden as u32)
    };
    let chain = plan.pairs().map_or(1, |(chain, _)| chain);
    let between = |stream: &Arc<Stream>| low.between_us.map(|us| Between::new(stream, us)).transpose();
    for &num_sms in &plan.num_sms {
        let mut options = options(plan, max_tokens)
            .chunk_tokens(low.chunk_tokens)
            .packet_tokens(low.packet_tokens)
            .ranks_per_node(plan.topology.ranks_per_node)
            .transport(plan.transport_options(TIMEOUT));
        if num_sms != Plan::ALL_SMS {
            options = options.num_sms(num_sms);
        }
        if plan.keep_nodes {
            options = options.keep_nodes();
        }
        if let Some(rows) = case.room_by_expert() {
            options = options.rows_by_expert(rows);
        }
        let buffer = made(device, group, result, || Buffer::new(device.clone(), &**group, options))?;
        result.pool_bytes = buffer.pool_bytes();
        let stream = Arc::new(Stream::new(device)?);
        let mode = LowLatency::checked(case.clone(), buffer, group, &stream, (chain, between(&stream)?))?;
        let mut script = Script::new(plan, group, &stream, watch, mode)?;
        let num_sms = if num_sms == Plan::ALL_SMS { device.info().sm_count } else { num_sms };
        result.times.push(script.times(num_sms)?);
        result.traced.append(&mut script.traced);
        // Right before it is fast, and still right behind it.
        script.mode.verify()?;
        group.barrier(TIMEOUT)?;
    }
    Ok(())
}

/// Low latency on one rank: graphs of one call each and of a chain of pairs. An operation lends its
/// place to the next, so calls cannot be enqueued one by one from different functions.
struct LowLatency {
    // Graphs go before what they were recorded of.
    dispatch: Graph,
    combine: Graph,
    chain: Graph,
    /// A chain of only the stand-ins between the calls.
    alone: Option<Graph>,
    _between: Option<Between>,
    inputs: LowLatencyInputs,
    case: LowLatencyCase,
    rank: LowLatencyRank,
}

impl LowLatency {
    /// Ready to be timed, behind calls with correct results. A chain has so many pairs, with this
    /// between their calls. Collective.
    fn checked(
        case: LowLatencyCase,
        buffer: Buffer,
        group: &Arc<dyn ProcessGroup>,
        stream: &Arc<Stream>,
        (pairs, between): (u32, Option<Between>),
    ) -> Result<LowLatency> {
        let mut rank = LowLatencyRank::with(group.clone(), stream.clone(), buffer);
        case.verify(&mut rank)?;
        let inputs = case.inputs(&rank)?;
        let buffer = &mut rank.buffer;
        let (mut place, order) = (buffer.place(0)?, StreamOrder::on(stream));
        let mut received = None;
        let dispatch = stream.capture(|| {
            received = Some(buffer.dispatch(&mut place, inputs.request(case.quantise), order)?);
            Ok(())
        })?;
        let combine = stream.capture(|| match received.take() {
            Some(received) => buffer.combine(received, inputs.experts(&case), order).map(drop),
            None => {
                let reason = "no dispatch before it".into();
                Err(Error::Unavailable { what: "combine".into(), reason })
            }
        })?;
        let enqueue = || enqueue_pairs(&case, buffer, &mut place, &inputs, stream, (pairs, between.as_ref()));
        let chain = stream.capture(enqueue)?;
        drop(place);
        let alone = |between: &Between| stream.capture(|| (0..2 * pairs).try_for_each(|_| between.enqueue()));
        let alone = between.as_ref().map(alone).transpose()?;
        Ok(LowLatency { dispatch, combine, chain, alone, _between: between, inputs, case, rank })
    }

    fn launch(&self, graph: &Graph) -> Result<()> {
        // SAFETY: the recorded addresses are of the buffer and the inputs, which `self` keeps until
        // the stream has been waited for: by `drop` at the latest. Other calls in the same place are
        // on this stream.
        unsafe { graph.launch(&self.rank.stream) }
    }
}

fn enqueue_pairs(
    case: &LowLatencyCase,
    buffer: &mut Buffer,
    place: &mut Place,
    inputs: &LowLatencyInputs,
    stream: &Stream,
    (pairs, between): (u32, Option<&Between>),
) -> Result<()> {
    let order = StreamOrder::on(stream);
    let pause = || between.map_or(Ok(()), Between::enqueue);
    (0..pairs).try_for_each(|_| {
        let received = buffer.dispatch(place, inputs.request(case.quantise), order)?;
        pause()?;
        drop(buffer.combine(received, inputs.experts(case), order)?);
        pause()
    })
}

impl Mode for LowLatency {
    type Buffer = Buffer;

    const FRONT: Front<'static> = Front::Nothing;
    const FRONT_OF_PAIRS: Front<'static> = Front::Hosts;

    fn buffer(&mut self) -> &mut Buffer {
        &mut self.rank.buffer
    }

    fn check(&self) -> Result<()> {
        self.rank.buffer.check()
    }

    fn verify(&mut self) -> Result<()> {
        self.case.verify(&mut self.rank)
    }

    fn call(&mut self, name: PhaseName) -> Result<()> {
        self.launch(if name.is_dispatch() { &self.dispatch } else { &self.combine })
    }

    /// Pairs of single calls: graphs were recorded without a trace.
    fn traced(&mut self, _: &[PhaseName], rounds: u32) -> Result<()> {
        let LowLatencyRank { buffer, stream, .. } = &mut self.rank;
        let mut place = buffer.place(0)?;
        enqueue_pairs(&self.case, buffer, &mut place, &self.inputs, stream, (rounds, None))
    }

    fn pairs(&mut self, _: u32) -> Result<()> {
        self.launch(&self.chain)
    }

    /// Subtracts the time of the stand-ins between the calls from that of the pairs. Differences
    /// below 0 are kept: the stand-ins' time then scatters by more than the calls take.
    fn others(script: &mut Script<'_, Self>, times: &mut Times) -> Result<()> {
        let (Some((chain, repetitions)), true) = (script.plan.pairs(), script.mode.alone.is_some()) else {
            return Ok(());
        };
        script.doing("what stands between the calls");
        let alone = script.chains(Self::FRONT_OF_PAIRS, repetitions, chain, |script| {
            script.mode.alone.as_ref().map_or(Ok(()), |alone| script.mode.launch(alone))
        })?;
        let alone = percentile(&alone, 0.5);
        times.pair.iter_mut().for_each(|us| *us -= alone);
        Ok(())
    }
}

impl Drop for LowLatency {
    fn drop(&mut self) {
        // After an error of the timing, replays may be under way. The timing's error already
        // reports the stream's fault.
        let _ = self.rank.stream.synchronize();
    }
}

//! High throughput in the acceptance test. The first data is that of MSCCL++'s test: every element
//! of a rank's rows is the rank's number, and combine is called right behind dispatch.

use epoxide::driver::Event;
use epoxide::throughput::{
    Buffer, CombineRequest, Combined, Config, DispatchLayout, DispatchRequest, Options, Received,
};
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide_testing::compare;
use epoxide_testing::harness::Rank;
use epoxide_testing::oracle::{Plan, Style, from_e4m3};
use epoxide_testing::payload::{ELEMENTS_PER_SCALE, rng_of};
use epoxide_testing::roundtrip::{Case, Cases, Expected, Replays, RoundTrip, compare_weights};
use half::bf16;

use super::report::{ConfigReport, FirstData, HighThroughput, RankReport};
use super::{Acceptance, Script, failure_of, settle};
use crate::error::{CommandError, Result};
use crate::options::{RowFormat, Settings};
use crate::output::Console;
use crate::ranks::RankContext;

/// Most difference between a received element and the rank number that was sent.
const RECV_TOLERANCE: f32 = 1e-3;
/// The fp8 (e4m3) byte of its largest number, 448: scaled, it stands for any rank number but 0.
const FP8_MAX_BYTE: u8 = 0x7e;
const FP8_MAX: f32 = 448.0;

impl Acceptance for Buffer {
    fn options(settings: &Settings) -> Options {
        settings.buffer_options()
    }

    fn config(context: &RankContext, rank: &Rank) -> ConfigReport {
        let (settings, buffer) = (&context.settings, &rank.buffer);
        let config = &settings.config;
        let row_bytes = settings.hidden * DType::Bf16.size();
        let hint = |hint: fn(&Config, u64, u32, u32) -> u64| {
            hint(config, row_bytes, settings.ranks, settings.ranks / settings.nodes)
        };
        let more = HighThroughput {
            num_channels: config.num_channels(),
            num_max_nvl_chunked_send_tokens: config.num_max_nvl_chunked_send_tokens,
            num_max_nvl_chunked_recv_tokens: config.num_max_nvl_chunked_recv_tokens,
            wire_bytes: buffer.wire_bytes(),
            is_one_node: buffer.num_nodes() == 1,
            nvl_buffer_size_hint: hint(Config::nvl_buffer_size_hint),
            rdma_buffer_size_hint: hint(Config::rdma_buffer_size_hint),
        };
        ConfigReport {
            high_throughput: Some(more),
            ..ConfigReport::new(context, buffer.capacity(), buffer.pool_bytes())
        }
    }

    fn first_checks(script: &mut Script<'_>, rank: &mut Rank) -> Result<()> {
        let dtype = script.context.settings.dtype;
        // The rank numbers of MSCCL++'s test are rows of these two.
        if matches!(dtype, RowFormat::Bf16 | RowFormat::Fp8) {
            script.console.doing("layout, dispatch and combine of rank numbers");
            let reports = first_data(script, rank)?;
            let seconds = script.lap();
            (script.publish)(&|report| {
                report.ranks.clone_from(&reports);
                report.times.first_data_seconds = seconds;
            });
            say_first_data(&reports, &script.console)?;
        }

        script.console.doing("every bit against the oracle");
        let cases = Buffer::first_cases(&script.cases);
        let rows = cases.iter().try_fold(0, |rows, case| Ok(rows + rank.round_trip(case)?));
        let rows = script.context.gather(settle(rank, rows))?.iter().sum::<u64>();
        script.console.line(format!(
            "[verify] OK ({rows} rows of random bytes: contents, order, metadata, handles, cached dispatch, exact sums)"
        ));
        let seconds = script.lap();
        (script.publish)(&|report| report.times.bit_for_bit_seconds = seconds);
        Ok(())
    }

    fn rows_text(rows: u64) -> String {
        format!(", {rows} rows")
    }

    fn replays_text(replays: u64, Replays { verified, rows }: Replays, seconds: f64) -> String {
        format!(
            "{replays} replays, {verified} verified, each beside an eager run, {rows} rows, 0 mismatches, {seconds:.1} s"
        )
    }
}

/// The data of MSCCL++'s test. Every rank's report.
fn first_data(script: &Script<'_>, rank: &mut Rank) -> Result<Vec<RankReport>> {
    let (context, cases) = (script.context, &script.cases);
    let Cases { sizes, seed, .. } = *cases;
    let routing = cases.routing(&mut rng_of(&[seed]), Style::DistinctTopK);
    let case = Case { weight: Some(1.0), seed, ..Case::along(cases, routing, sizes.hidden) };
    let expected = rank.expect(&case);
    let mut marks = Marks::default();
    let (topk_weights, layout) = context.agree(lay_out(rank, &case, &expected, &mut marks))?;
    script.console.line("[layout] OK");

    let outcome = (|| {
        let (x, x_scales) = rank_number_rows(&context.settings, rank)?;
        let request = DispatchRequest::new(&x, &layout).topk_weights(&topk_weights);
        let request = x_scales.iter().fold(request.quantise(case.quantise), DispatchRequest::scales);
        let mut place = rank.place()?;
        marks.mark(rank)?;
        let output = rank.buffer.dispatch(&mut place, request, StreamOrder::comm(&rank.stream))?;
        marks.mark(rank)?;
        // Combine follows at once, without a barrier. Rows that can be returned unchanged are not
        // read either.
        let (recv_x, handle) = (&output.recv_x, &output.handle);
        let (converted, pooled);
        let request = if recv_x.dtype() != DType::Bf16 {
            let values: Vec<bf16> =
                received_numbers(rank, &output)?.into_iter().map(bf16::from_f32).collect();
            converted = Tensor::from_host(&rank.stream, DType::Bf16, recv_x.shape(), &values)?;
            CombineRequest::new(&converted, handle)
        } else if recv_x.row_stride() == recv_x.row_bytes() {
            // The shape decides, not the number of received rows: all ranks return rows alike.
            CombineRequest::new(recv_x, handle)
        } else {
            // The pool pads these rows, in both of its regions alike.
            pooled = output.combine_rows(DType::Bf16, recv_x.columns())?;
            let (to, bytes) = (pooled.tensor().ptr(), recv_x.rows() * recv_x.row_stride());
            // SAFETY: both are regions of the own pool with this many rows, and the buffer outlives
            // the stream's work.
            unsafe { rank.stream.copy(to, recv_x.ptr(), bytes)? };
            CombineRequest::new(&pooled, handle)
        };
        let request = output.recv_topk_weights.iter().fold(request, CombineRequest::topk_weights);
        marks.mark(rank)?;
        let combined = rank.buffer.combine(request, StreamOrder::comm(&rank.stream))?;
        marks.mark(rank)?;
        rank.stream.synchronize()?;
        rank.buffer.check()?;
        rank.learn_regions(&output);

        check_rank_numbers(rank, &expected.plan, &output)?;
        let mut found = FirstData {
            dispatch_failure: rank.take_failure(),
            layout_ms: marks.elapsed_ms(0)?,
            dispatch_ms: marks.elapsed_ms(2)?,
            combine_ms: marks.elapsed_ms(4)?,
            ..FirstData::default()
        };
        check_sums(rank, &case, &combined, &mut found)?;
        Ok(RankReport {
            rank: rank.rank,
            num_tokens: sizes.tokens,
            num_recv_tokens: output.num_recv_tokens.unwrap_or(0),
            first_data: Some(found),
            failure: None,
        })
    })();
    context.gather(outcome)
}

/// Makes the layout and compares it.
fn lay_out(
    rank: &mut Rank,
    case: &Case,
    expected: &Expected,
    marks: &mut Marks,
) -> Result<(TypedTensor<'static, f32>, DispatchLayout<'static>)> {
    let (topk_idx, topk_weights) = rank.topk(case)?;
    marks.mark(rank)?;
    let layout = rank.buffer.get_dispatch_layout(
        &topk_idx,
        case.routing.num_experts,
        StreamOrder::comm(&rank.stream),
    )?;
    marks.mark(rank)?;
    match rank.compare_layout(&layout, expected)? {
        None => Ok((topk_weights, layout)),
        Some(difference) => Err(CommandError::failed(format!("layout: {difference}"))),
    }
}

/// Rows whose every element is the rank's number, as they are given: in bf16, or in fp8 with
/// scales.
fn rank_number_rows(
    settings: &Settings,
    rank: &Rank,
) -> Result<(Tensor<'static>, Option<TypedTensor<'static, f32>>)> {
    let Settings { tokens, hidden, dtype, quantise, .. } = *settings;
    let (stream, number, tokens) = (&rank.stream, rank.rank as f32, u64::from(tokens));
    let (shape, elements) = ([tokens, hidden], (tokens * hidden) as usize);
    if dtype == RowFormat::Bf16 || quantise {
        let values = vec![bf16::from_f32(number); elements];
        return Ok((Tensor::from_host(stream, DType::Bf16, &shape, &values)?, None));
    }
    let bytes = vec![FP8_MAX_BYTE; elements];
    let shape_of_scales = [tokens, hidden.div_ceil(ELEMENTS_PER_SCALE)];
    let scales = vec![number / FP8_MAX; shape_of_scales.iter().product::<u64>() as usize];
    let scales = TypedTensor::from_host(stream, &shape_of_scales, &scales)?;
    Ok((Tensor::from_host(stream, DType::Fp8E4m3, &shape, &bytes)?, Some(scales)))
}

/// The received rows as numbers.
fn received_numbers(rank: &Rank, output: &Received) -> Result<Vec<f32>> {
    let Some(scales) = &output.recv_x_scales else {
        let values = output.recv_x.to_host::<bf16>(&rank.stream)?;
        return Ok(values.into_iter().map(bf16::to_f32).collect());
    };
    let bytes = output.recv_x.to_host::<u8>(&rank.stream)?;
    let (hidden, per_row) = (output.recv_x.columns() as usize, scales.columns() as usize);
    let scales = scales.to_host::<f32>(&rank.stream)?;
    let rows = bytes.chunks_exact(hidden).zip(scales.chunks_exact(per_row));
    Ok(rows
        .flat_map(|(row, scales)| {
            let blocks = row.chunks(ELEMENTS_PER_SCALE as usize).zip(scales);
            blocks.flat_map(|(block, &scale)| block.iter().map(move |&byte| from_e4m3(byte) * scale))
        })
        .collect())
}

/// Checks the shape of the received rows and, block by block, that each element is its source
/// rank's number.
fn check_rank_numbers(rank: &mut Rank, plan: &Plan, output: &Received) -> Result<()> {
    let (shape, hidden) = (output.recv_x.shape(), output.recv_x.columns());
    let expected_shape = [u64::from(plan.num_recv_tokens), hidden];
    if let Some(difference) = compare::value("recv_x shape", shape, &expected_shape[..]) {
        let origin = compare::origin_of_rows(rank.buffer.device(), &output.handle);
        rank.note(Some(difference + &origin));
        return Ok(());
    }
    let values = received_numbers(rank, output)?;
    for (row, (values, &(source, _))) in values.chunks_exact(hidden as usize).zip(&plan.recv_src).enumerate()
    {
        let wrong = |value: &f32| value.is_nan() || (value - source as f32).abs() > RECV_TOLERANCE;
        let difference = values.iter().position(wrong).map(|column| {
            let (got, from) = (values[column], &output.recv_x);
            let at = row as u64 * from.row_stride() + column as u64 * from.dtype().size();
            let origin = compare::origin(rank.buffer.device(), from.ptr().add(at));
            format!(
                "recv_x, row {row}, column {column}: expected {source}, the source rank, got {got}{origin}"
            )
        });
        rank.note(difference);
    }
    Ok(())
}

/// Checks each token's mean, every element, and the weights: each destination returns a token once.
fn check_sums(rank: &mut Rank, case: &Case, combined: &Combined, found: &mut FirstData) -> Result<()> {
    let (me, routing, hidden) = (rank.rank, &case.routing, case.hidden() as usize);
    let expected: Vec<f32> =
        (0..routing.num_tokens(me)).map(|token| (routing.num_destinations(me, token) * me) as f32).collect();
    let largest = expected.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let tolerance = (largest / 64.0).max(1e-2);
    found.combine_max_abs_expected = largest;

    let shape = [expected.len() as u64, case.hidden()];
    let difference = compare::value("combined_x shape", combined.combined_x.shape(), &shape[..]);
    if difference.is_some() {
        found.combine_failure = difference;
        return Ok(());
    }
    let got = combined.combined_x.to_host::<bf16>(&rank.stream)?;
    for (token, (row, expected)) in got.chunks_exact(hidden).zip(&expected).enumerate() {
        let mean = row.iter().map(|value| f64::from(value.to_f32())).sum::<f64>() / hidden as f64;
        // Not a number is as far off as can be.
        let distance = |value: f32| if value.is_nan() { f32::MAX } else { (value - expected).abs() };
        let difference = distance(mean as f32);
        found.combine_max_abs_difference = found.combine_max_abs_difference.max(difference);
        let wrong = row.iter().position(|value| distance(value.to_f32()) > tolerance);
        // One origin is enough: a fault makes many tokens wrong.
        let is_first = rank.failures.is_empty();
        let origin = || {
            let place = token as u64 * combined.combined_x.row_stride() + 2 * wrong.unwrap_or(0) as u64;
            compare::origin(rank.device(), combined.combined_x.ptr().add(place))
        };
        let failure = (difference > tolerance).then(|| {
            let origin = if is_first { origin() } else { String::new() };
            format!("combined_x, token {token}: expected a mean of {expected}, got {mean}{origin}")
        });
        rank.note(failure);
        rank.note(wrong.map(|column| {
            format!("combined_x, token {token}, column {column}: expected {expected}, got {}", row[column])
        }));
    }
    let weights = rank.round_trip_of_weights(case);
    let difference = compare_weights(rank, case, Some(&weights), combined)?;
    rank.note(difference);
    found.combine_failure = rank.take_failure();
    Ok(())
}

/// Prints what the ranks found with the first data; an error where any found something wrong.
fn say_first_data(reports: &[RankReport], console: &Console) -> Result<()> {
    let all = || reports.iter().filter_map(|report| Some((report.rank, report.first_data.as_ref()?)));
    let failed = |rank: u32, phase: &str, failure: &Option<String>| {
        failure_of(rank, failure.as_ref().map(|failure| format!("{phase}: {failure}")))
    };
    all().try_for_each(|(rank, found)| failed(rank, "dispatch", &found.dispatch_failure))?;
    if let Some(root) = reports.first() {
        console.line(format!("[dispatch] OK (recv {} tokens)", root.num_recv_tokens));
    }
    for (rank, found) in all() {
        console.line(format!(
            "[combine r{rank}] max|got-expected|={} max|expected|={}",
            found.combine_max_abs_difference, found.combine_max_abs_expected
        ));
    }
    all().try_for_each(|(rank, found)| failed(rank, "combine", &found.combine_failure))
}

/// Points of the rank's stream, for the device's time between them.
#[derive(Default)]
struct Marks(Vec<Event>);

impl Marks {
    fn mark(&mut self, rank: &Rank) -> Result<()> {
        let event = Event::timed(rank.buffer.device())?;
        event.record(&rank.stream)?;
        self.0.push(event);
        Ok(())
    }

    /// Milliseconds from mark `from` to the next; the stream must have passed both.
    fn elapsed_ms(&self, from: usize) -> Result<f32> {
        match self.0.get(from..from + 2) {
            Some([start, end]) => Ok(start.elapsed_ms(end)?),
            _ => Ok(0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_printed_with_the_number_of_their_rank() {
        let console = Console::new(false, false);
        let failure = Some("combined_x, token 3: expected a mean of 4, got 5".to_owned());
        let report = |rank, combine_failure| RankReport {
            rank,
            first_data: Some(FirstData { combine_failure, ..FirstData::default() }),
            ..RankReport::default()
        };
        let reports = [report(0, None), report(1, failure)];
        let error = say_first_data(&reports, &console).unwrap_err();
        assert_eq!((error.code, error.agreed), (crate::error::FAILED, true));
        let message = "rank 1: combine: combined_x, token 3: expected a mean of 4, got 5";
        assert_eq!(error.message.as_deref(), Some(message));
    }
}

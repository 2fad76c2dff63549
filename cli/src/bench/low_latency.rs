//! `epoxide bench --mode low-latency`: times decode-sized batches, by number of tokens.

use std::fmt::Write;

use epoxide::low_latency::Quantise;
use epoxide_bench::low_latency::{self, LowLatencyPlan, LowLatencyPoint};

use super::Args;
use super::start::{launched, on_ranks};
use crate::options::{Mode, RowType};
use crate::output::{self, write_text};
use crate::ranks;
use crate::stop::{Result, Stop};

/// Pairs of a chained replay.
const CHAIN: u32 = 128;
/// Tokens where none are given: a ladder.
const LADDER: [u32; 11] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];

/// Measures, prints and stores.
pub fn run(args: &Args) -> Result<()> {
    let plan = plan(args)?;
    let topology = args.place.topology(Mode::LowLatency, launched()?)?;
    let ranks = on_ranks(topology, args.device, |device, group| low_latency::rank(&plan, device, group))?;
    if !ranks::speaks() {
        return Ok(());
    }
    let points = low_latency::points(&plan, &ranks);
    if let Some(path) = &args.json {
        write_text(path, &low_latency::json(&points)?)?;
        if path.as_os_str() == "-" {
            return Ok(());
        }
    }
    output::text_line(&text(&points))
}

/// What the flags come to.
fn plan(args: &Args) -> Result<LowLatencyPlan> {
    let topology = args.place.topology(Mode::LowLatency, launched()?)?;
    let unused = [
        ("--csv", args.csv.is_some()),
        ("--plot", args.plot.is_some()),
        ("--trace", args.trace.is_some()),
        ("--sweep", args.sweep.is_some()),
    ];
    if let Some((flag, _)) = unused.iter().find(|(_, given)| *given) {
        return Err(Stop::usage(format!("bench: {flag}: not with --mode low-latency")));
    }
    if args.num_sms.len() > 1 {
        return Err(Stop::usage("bench: --num-sms: one number with --mode low-latency"));
    }
    let plan = LowLatencyPlan {
        ranks: topology.ranks(),
        tokens: args.tokens.map_or(LADDER.to_vec(), |tokens| vec![tokens]),
        hidden: u32::try_from(args.hidden).unwrap_or(u32::MAX),
        experts: args.experts,
        topk: args.topk,
        quantise: if args.dtype == RowType::Fp8 { Quantise::Fp8 } else { Quantise::Not },
        num_sms: args.num_sms.first().copied(),
        chunk_tokens: args.chunk_tokens,
        warmup: args.warmup,
        iters: args.iters,
        chain: args.graph.unwrap_or(CHAIN),
        seed: args.seed,
    };
    plan.check()?;
    Ok(plan)
}

fn text(points: &[LowLatencyPoint]) -> String {
    let mut out = String::new();
    let Some(first) = points.first() else { return out };
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "[bench low-latency] num_ranks={} hidden={} experts={} topk={} dispatch={} combine=bf16 num_sms={} device={:?}; {}",
        first.num_ranks,
        first.hidden,
        first.experts,
        first.topk,
        first.dtype,
        first.num_sms,
        first.device,
        first.date
    );
    if first.is_virtual {
        let _ = writeln!(out, "  VIRTUAL GPU: times of an interpreter, of no hardware");
    }
    let _ = writeln!(
        out,
        "  us; of each iteration the slowest rank: replays of a graph each between two events, and per pair of {} in one graph\n  {:>7} \
         {:>13} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8} {:>8}",
        first.chain, "tokens", "rows to links", "dispatch", "p99", "combine", "p99", "sum", "pair", "p99"
    );
    for point in points {
        let (dispatch, combine, pair) = (&point.dispatch, &point.combine, &point.pair);
        let _ = writeln!(
            out,
            "  {:>7} {:>13.1} {:>8.1} {:>8.1} {:>8.1} {:>8.1} {:>9.1} {:>8.1} {:>8.1}",
            point.tokens,
            point.remote_rows,
            dispatch.p50_us,
            dispatch.p99_us,
            combine.p50_us,
            combine.p99_us,
            dispatch.p50_us + combine.p50_us,
            pair.p50_us,
            pair.p99_us
        );
    }
    out.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::testing::parse;
    use super::*;

    #[test]
    fn every_number_of_tokens_is_measured() {
        let args = parse("bench --mode low-latency --ranks-per-node 3 --tokens 5 --hidden 128 --experts 6 --topk 2 --warmup 1 --iters 2 --graph=3").unwrap();
        for dtype in [RowType::Bf16, RowType::Fp8] {
            let args = Args { dtype, ..args.clone() };
            let plan = plan(&args).unwrap();
            let topology = args.place.topology(Mode::LowLatency, None).unwrap();
            let ranks =
                on_ranks(topology, args.device, |device, group| low_latency::rank(&plan, device, group))
                    .unwrap();
            let points = low_latency::points(&plan, &ranks);
            let [point] = &points[..] else { panic!("{points:?}") };
            assert_eq!(
                (
                    point.dispatch.samples_us.len(),
                    point.combine.samples_us.len(),
                    point.pair.samples_us.len()
                ),
                (2, 2, 2)
            );
            assert!(point.remote_rows > 0.0 && point.remote_rows <= 10.0, "{point:?}");
            assert!(text(&points).contains("VIRTUAL GPU"), "{}", text(&points));
            assert!(low_latency::json(&points).unwrap().contains("\"tokens\": 5"));
        }
    }

    #[test]
    fn what_cannot_be_measured_is_said() {
        for (line, part) in [
            ("--tokens 2000", "--tokens 2000"),
            ("--experts 7 --ranks-per-node 3", "--experts 7"),
            ("--topk 33", "--topk 33"),
            ("--hidden 100", "--hidden 100"),
            ("--nodes 2", "--nodes 2"),
            ("--plot a.svg", "--plot"),
            ("--iters 0", "--iters 0"),
        ] {
            let message = plan(&parse(&format!("bench --mode low-latency {line}")).unwrap())
                .unwrap_err()
                .message
                .unwrap();
            assert!(message.contains(part), "{message}");
        }
    }
}

//! `epoxide bench --mode low-latency`: times decode-sized batches, by number of tokens.

use std::fmt::Write;

use epoxide_bench::low_latency::{self, LowLatencyPlan, LowLatencyPoint};
use epoxide_bench::results::Slowest;

use super::start::{launched, on_ranks};
use super::{Args, csv};
use crate::options::Mode;
use crate::output::{self, Progress, write_text};
use crate::ranks;
use crate::stop::{Result, Stop};

/// Measures, prints and stores.
pub fn run(args: &Args) -> Result<()> {
    let plan = plan(args)?;
    let topology = args.sizes.place.topology(Mode::LowLatency, launched()?)?;
    if ranks::speaks() {
        let (ranks, hidden) = (plan.ranks, plan.hidden);
        let tokens: Vec<String> = plan.tokens.iter().map(u32::to_string).collect();
        let sizes = format!("{} tokens of {hidden} elements each", tokens.join(", "));
        output::complain(&format!("bench: low latency, {ranks} ranks, {sizes}"));
    }
    let progress = Progress::new("bench", u64::from(args.repeat) * plan.steps(), ranks::speaks());
    let runs = on_ranks(topology, args.sizes.device, |device, group| {
        let run = |_| low_latency::rank(&plan, device.clone(), group, &progress);
        (0..args.repeat).map(run).collect::<epoxide::Result<Vec<_>>>()
    })?;
    drop(progress);
    if !ranks::speaks() {
        return Ok(());
    }
    let points = low_latency::of_runs(&plan, &runs);
    if let Some(path) = &args.csv {
        csv::write_lines(path, &COLUMNS, points.iter().flat_map(records))?;
    }
    if let Some(path) = &args.json {
        write_text(path, &low_latency::json(&points)?)?;
        if path.as_os_str() == "-" {
            return Ok(());
        }
    }
    output::text_line(&text(&points))
}

/// The columns of the CSV: a line for each point and thing that was timed.
const COLUMNS: [&str; 21] = [
    "mode",
    "device",
    "virtual",
    "date",
    "nodes",
    "num_ranks",
    "transport",
    "tokens",
    "hidden",
    "experts",
    "topk",
    "dtype",
    "combine_dtype",
    "num_sms",
    "chunk_tokens",
    "packet_tokens",
    "timed",
    "p50_us",
    "p99_us",
    "min_us",
    "mean_us",
];

fn records(point: &LowLatencyPoint) -> Vec<Vec<String>> {
    let sizes = [
        point.mode.clone(),
        point.device.clone(),
        point.is_virtual.to_string(),
        point.date.clone(),
        point.nodes.to_string(),
        point.num_ranks.to_string(),
        point.transport.clone().unwrap_or_default(),
        point.tokens.to_string(),
        point.hidden.to_string(),
        point.experts.to_string(),
        point.topk.to_string(),
        point.dtype.clone(),
        point.combine_dtype.clone(),
        point.num_sms.to_string(),
        point.chunk_tokens.to_string(),
        point.packet_tokens.to_string(),
    ];
    let timed = [
        ("dispatch", &point.dispatch),
        ("combine", &point.combine),
        ("pair", &point.pair),
        ("dispatch_kernel", &point.dispatch_within.done),
        ("combine_kernel", &point.combine_within.done),
    ];
    let record = |(name, times): (&str, &Slowest)| {
        let times = [times.p50_us, times.p99_us, times.min_us, times.mean_us].map(|us| us.to_string());
        [&sizes[..], &[name.to_owned()], &times].concat()
    };
    timed.into_iter().map(record).collect()
}

/// What the flags come to.
fn plan(args: &Args) -> Result<LowLatencyPlan> {
    let unused = [
        ("--plot", args.plot.is_some()),
        ("--trace", args.trace.is_some()),
        ("--sweep", args.sweep.is_some()),
    ];
    if args.baseline.is_some() {
        let remedy = "leave the mode out: low latency is measured then, too";
        return Err(Stop::usage(format!("--baseline: not with --mode low-latency; {remedy}")));
    }
    if let Some((flag, _)) = unused.iter().find(|(_, given)| *given) {
        return Err(Stop::usage(format!("{flag}: not with --mode low-latency")));
    }
    if args.repeat == 0 {
        return Err(Stop::usage("--repeat 0: must be at least 1"));
    }
    args.sizes.low_latency_plan()
}

fn text(points: &[LowLatencyPoint]) -> String {
    let mut out = String::new();
    let Some(first) = points.first() else { return out };
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "[bench low-latency] num_ranks={}{} hidden={} experts={} topk={} dispatch={} combine={} num_sms={} chunk_tokens={} packet_tokens={} \
         device={:?}; {}",
        first.num_ranks,
        first
            .transport
            .as_ref()
            .map_or_else(String::new, |transport| format!(" nodes={} transport={transport}", first.nodes)),
        first.hidden,
        first.experts,
        first.topk,
        first.dtype,
        first.combine_dtype,
        first.num_sms,
        first.chunk_tokens,
        first.packet_tokens,
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
    let _ = writeln!(
        out,
        "  us from the start of a kernel's first block to the last that has sent its rows, knows of all ranks, is done; medians\n  {:>7} {:>8} \
         {:>8} {:>8} {:>11} {:>8} {:>8}",
        "tokens", "dispatch", "", "", "combine", "", ""
    );
    for point in points {
        let (dispatch, combine) = (&point.dispatch_within, &point.combine_within);
        let _ = writeln!(
            out,
            "  {:>7} {:>8.1} {:>8.1} {:>8.1} {:>11.1} {:>8.1} {:>8.1}",
            point.tokens,
            dispatch.sent.p50_us,
            dispatch.entered.p50_us,
            dispatch.done.p50_us,
            combine.sent.p50_us,
            combine.entered.p50_us,
            combine.done.p50_us
        );
    }
    out.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Counted, parse};
    use super::*;
    use crate::options::RowType;

    #[test]
    fn every_number_of_tokens_is_measured() {
        let args = parse("bench --mode low-latency --ranks-per-node 3 --tokens 5 --hidden 128 --experts 6 --topk 2 --warmup 1 --iters 2 --graph=3").unwrap();
        for (dtype, combine_dtype) in [(RowType::Bf16, RowType::Fp8), (RowType::Fp8, RowType::Bf16)] {
            let mut args = args.clone();
            (args.sizes.dtype, args.sizes.combine_dtype) = (dtype, combine_dtype);
            let plan = plan(&args).unwrap();
            let topology = args.sizes.place.topology(Mode::LowLatency, None).unwrap();
            let steps = Counted::default();
            let ranks = on_ranks(topology, args.sizes.device, |device, group| {
                low_latency::rank(&plan, device, group, &steps)
            })
            .unwrap();
            assert_eq!(steps.of_rank_0(), plan.steps());
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
            for within in [&point.dispatch_within, &point.combine_within] {
                let (sent, entered, done) = (&within.sent, &within.entered, &within.done);
                assert_eq!(
                    (sent.samples_us.len(), entered.samples_us.len(), done.samples_us.len()),
                    (2, 2, 2)
                );
                assert!(sent.min_us > 0.0 && entered.min_us > 0.0, "{within:?}");
                assert!(sent.p50_us.max(entered.p50_us) <= done.p50_us, "{within:?}");
            }
            assert!(point.remote_rows > 0.0 && point.remote_rows <= 10.0, "{point:?}");
            assert!(text(&points).contains("VIRTUAL GPU"), "{}", text(&points));
            assert!(low_latency::json(&points).unwrap().contains("\"tokens\": 5"));
            assert_ne!(point.dtype, point.combine_dtype);
        }
    }

    #[test]
    fn repetitions_have_bounds() {
        for flag in ["--iters", "--warmup", "--graph"] {
            let line =
                format!("bench --mode low-latency --ranks-per-node 2 --experts 4 --topk 2 {flag}=4294967295");
            let message = plan(&parse(&line).unwrap()).unwrap_err().message.unwrap();
            assert_eq!(message, format!("{flag} 4294967295: must be at most 100000"));
        }
    }

    #[test]
    fn several_runs_are_stored_as_json_and_csv() {
        let folder = tempfile::tempdir().unwrap();
        let [json, table] = ["low.json", "low.csv"].map(|name| folder.path().join(name));
        let line = "bench --mode low-latency --ranks-per-node 2 --tokens 3 --hidden 64 --experts 4 --topk 2 --warmup 0 --iters 2 --graph=1";
        let mut args = parse(&format!("{line} --repeat 3")).unwrap();
        (args.json, args.csv) = (Some(json.clone()), Some(table.clone()));
        run(&args).unwrap();
        let points = low_latency::of_text(&std::fs::read_to_string(json).unwrap()).unwrap();
        assert_eq!((points[0].runs.len(), points[0].pair.samples_us.len()), (3, 6));
        let table = std::fs::read_to_string(table).unwrap();
        let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split(',').collect()).collect();
        assert!(lines.len() == 6 && lines.iter().all(|line| line.len() == COLUMNS.len()), "{table}");
        let at = |name| COLUMNS.iter().position(|column| *column == name).unwrap();
        assert_eq!((lines[3][at("timed")], lines[3][at("tokens")]), ("pair", "3"));
        assert_eq!(lines[3][at("p50_us")], points[0].pair.p50_us.to_string());
    }

    #[test]
    fn nodes_are_measured() {
        let line = "bench --mode low-latency --nodes 2 --ranks-per-node 2 --transport shm --tokens 3 --hidden 64 --experts 4 --topk 2 --warmup 0 --iters 1 --graph=1";
        let args = parse(line).unwrap();
        let plan = plan(&args).unwrap();
        let topology = args.sizes.place.topology(Mode::LowLatency, None).unwrap();
        let ranks = on_ranks(topology, args.sizes.device, |device, group| {
            low_latency::rank(&plan, device, group, &Counted::default())
        })
        .unwrap();
        let points = low_latency::points(&plan, &ranks);
        assert_eq!((points[0].nodes, points[0].transport.as_deref()), (2, Some("shm")));
        assert!(text(&points).contains("num_ranks=4 nodes=2 transport=shm"), "{}", text(&points));
        let within = &points[0].combine_within;
        assert!(within.sent.min_us > 0.0 && within.entered.p50_us <= within.done.p50_us, "{within:?}");
    }

    #[test]
    fn packets_and_words_are_both_measured() {
        let line = "bench --mode low-latency --ranks-per-node 2 --tokens 3 --hidden 64 --experts 4 --topk 2 --warmup 0 --iters 1 --graph=1";
        for (flags, chunk_tokens, packet_tokens) in
            [("", 1, 32), ("--packet-tokens 0 --chunk-tokens 2", 2, 0), ("--packet-tokens 3", 1, 3)]
        {
            let args = parse(&format!("{line} {flags}")).unwrap();
            let plan = plan(&args).unwrap();
            let topology = args.sizes.place.topology(Mode::LowLatency, None).unwrap();
            let ranks = on_ranks(topology, args.sizes.device, |device, group| {
                low_latency::rank(&plan, device, group, &Counted::default())
            })
            .unwrap();
            let points = low_latency::points(&plan, &ranks);
            let json: serde_json::Value = serde_json::from_str(&low_latency::json(&points).unwrap()).unwrap();
            let point = &json["points"][0];
            assert_eq!(
                (&point["chunk_tokens"], &point["packet_tokens"]),
                (&chunk_tokens.into(), &packet_tokens.into())
            );
            assert!(text(&points).contains(&format!("packet_tokens={packet_tokens}")), "{}", text(&points));
        }
    }

    #[test]
    fn what_cannot_be_measured_is_said() {
        for (line, part) in [
            ("--tokens 2000", "--tokens 2000"),
            ("--experts 7 --ranks-per-node 3", "--experts 7"),
            ("--topk 33", "--topk 33"),
            ("--hidden 100", "--hidden 100"),
            ("--nodes 0", "--nodes 0"),
            ("--nodes 5 --ranks-per-node 8", "40 ranks in all, and low latency has at most 32"),
            ("--plot a.svg", "--plot"),
            ("--iters 0", "--iters 0"),
            ("--tokens 0", "--tokens 0: must be 1 to 1024"),
            ("--combine-dtype fp8 --hidden 64", "--hidden 64: must be a positive multiple of 128"),
            ("--hidden 2", "--hidden 2: must be a positive multiple of 8 (rows are multiples of 16 bytes)"),
            ("--repeat 0", "--repeat 0: must be at least 1"),
            ("--baseline nccl", "--baseline: not with --mode low-latency; leave the mode out"),
        ] {
            let stop = plan(&parse(&format!("bench --mode low-latency {line}")).unwrap()).unwrap_err();
            let message = stop.message.unwrap();
            assert!(stop.code == crate::stop::USAGE && message.contains(part), "{message}");
        }
    }
}

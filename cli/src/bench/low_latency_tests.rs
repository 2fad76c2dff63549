//! Tests of runs of low latency, on the virtual GPU.

use epoxide_bench::Counted;
use epoxide_bench::results::{PhaseName, Results};

use super::report::low_latency as text;
use super::testing::parse;
use super::*;

const SMALL: &str = "bench --mode low-latency --ranks-per-node 2 --tokens 3 --hidden 64 --experts 4 --topk 2 --warmup 0 --iters 1 --graph=1";

fn measured(line: &str) -> Vec<Point> {
    measure_points(&parse(line).unwrap().plans().unwrap(), &()).unwrap().0
}

#[test]
fn every_number_of_tokens_is_measured() {
    for types in ["bf16 --combine-dtype fp8", "fp8 --combine-dtype bf16", "mxfp8 --combine-dtype fp8"] {
        let line = "bench --mode low-latency --ranks-per-node 3 --tokens 5 --hidden 128 --experts 6 --topk 2 --warmup 1 --iters 2 --graph=3";
        let plans = parse(&format!("{line} --dtype {types}")).unwrap().plans().unwrap();
        let steps = Counted::default();
        let (points, _) = measure_points(&plans, &steps).unwrap();
        assert_eq!(steps.of_rank_0(), plans[0].steps());
        let [point] = &points[..] else { panic!("{points:?}") };
        assert_eq!(point.pair.as_ref().unwrap().period.samples_us.len(), 2);
        for phase in &point.phases {
            let (replays, within) = (phase.slowest.as_ref().unwrap(), phase.within.as_ref().unwrap());
            let (sent, entered, done) = (&within.sent, &within.entered, &within.done);
            assert!([replays, sent, entered, done].iter().all(|times| times.samples_us.len() == 2));
            assert!(sent.min_us > 0.0 && entered.min_us > 0.0, "{within:?}");
            assert!(sent.p50_us.max(entered.p50_us) <= done.p50_us, "{within:?}");
        }
        assert!(point.remote_rows > 0.0 && point.remote_rows <= 10.0, "{point:?}");
        assert!(text(&points).contains("VIRTUAL GPU"), "{}", text(&points));
        assert!(Results::new(points.clone()).json().unwrap().contains("\"tokens\": 5"));
        assert_ne!(Some(&point.key.dtype), point.key.combine_dtype.as_ref());
        assert_eq!(Some(&*point.key.dtype), types.split(' ').next());
        assert_eq!(plans[0].row_bytes(PhaseName::LowLatencyDispatch) == 256, types.starts_with("bf16"));
    }
    let tokens = |line: &str| -> Vec<u32> {
        parse(line).unwrap().plans().unwrap().iter().map(|plan| plan.tokens).collect()
    };
    assert_eq!(tokens("bench --mode low-latency"), [1, 2, 4, 8]);
    assert_eq!(tokens("bench --mode low-latency --device cuda").last(), Some(&1024));
    // The buffer has no room for more.
    assert_eq!(tokens("bench --mode low-latency --max-tokens 5"), [1, 2, 4]);
    assert_eq!(tokens("bench --mode low-latency --device cuda --max-tokens 128").last(), Some(&128));
    let plans = parse("bench --mode low-latency --max-tokens 0").unwrap().plans().unwrap();
    let message = measure_points(&plans, &()).unwrap_err().message.unwrap();
    assert!(message.starts_with("--max-tokens 0: must be at least --tokens, 1"), "{message}");
}

#[test]
fn pairs_have_as_many_samples_as_calls() {
    let points = measured(&SMALL.replace("--iters 1", "--iters 21"));
    assert_eq!(points[0].pair.as_ref().unwrap().period.samples_us.len(), 21);
}

/// The 99th percentile of fewer is the longest iteration.
#[test]
fn fewer_than_100_samples_have_no_99th_percentile() {
    let few = measured(SMALL).remove(0);
    let mut many = few.clone();
    many.key.tokens += 1;
    let pair = many.pair.iter_mut().map(|pair| &mut pair.period);
    let phases = many.phases.iter_mut().filter_map(|phase| phase.slowest.as_mut());
    for times in phases.chain(pair) {
        (times.samples_us, times.p99_us) = (vec![2.0; 100], 77.0);
    }
    let table = |points: &[Point]| -> Vec<Vec<String>> {
        let text = text(points);
        let lines =
            text.lines().skip_while(|line| !line.trim_start().starts_with("SMs")).take(points.len() + 1);
        lines.map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
    };
    let count = |line: &[String], word: &str| line.iter().filter(|of| *of == word).count();
    let own = table(std::slice::from_ref(&few));
    assert_eq!((count(&own[0], "max"), count(&own[0], "p99"), count(&own[1], "-")), (3, 0, 0), "{own:?}");
    let both = table(&[few, many]);
    assert_eq!((count(&both[0], "max"), count(&both[0], "p99")), (0, 3), "{both:?}");
    assert_eq!((count(&both[1], "-"), count(&both[2], "77.0")), (3, 3), "{both:?}");
}

/// Graphs of a dispatch whose rows by expert have UE8M0 scales: nothing may be allocated there.
#[test]
fn rows_by_expert_of_mxfp8_are_measured() {
    let line = format!("{SMALL} --rows-by-expert 4 --dtype mxfp8").replace("--hidden 64", "--hidden 256");
    let [point] = &measured(&line)[..] else { panic!("one point") };
    assert_eq!((&*point.key.dtype, point.key.rows_by_expert), ("mxfp8", Some(4)));
}

#[test]
fn repetitions_have_bounds() {
    for flag in ["--iters", "--warmup", "--graph"] {
        let line =
            format!("bench --mode low-latency --ranks-per-node 2 --experts 4 --topk 2 {flag}=4294967295");
        let plans = parse(&line).unwrap().plans().unwrap();
        let message = measure_points(&plans, &()).unwrap_err().message.unwrap();
        assert_eq!(message, format!("{flag} 4294967295: must be at most 100000"));
    }
}

#[test]
fn several_runs_are_stored_as_json_csv_and_trace() {
    let folder = tempfile::tempdir().unwrap();
    let [json, table, trace] = ["low.json", "low.csv", "low.trace"].map(|name| folder.path().join(name));
    let mut args = parse(&format!("{SMALL} --repeat 3 --num-sms 2,3")).unwrap();
    (args.json, args.csv, args.trace) = (Some(json.clone()), Some(table.clone()), Some(trace.clone()));
    run(&Bench { tool: None, args }).unwrap();
    let points = Results::read(&json).unwrap().points;
    assert_eq!(points.iter().map(|point| point.key.num_sms).collect::<Vec<_>>(), [2, 3]);
    let pair = &points[0].pair.as_ref().unwrap().period;
    assert_eq!((points[0].runs.len(), pair.samples_us.len()), (3, 3));
    let table = std::fs::read_to_string(table).unwrap();
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split(',').collect()).collect();
    // Dispatch, combine and pair of two points.
    assert!(lines.len() == 7 && lines.iter().all(|line| line.len() == lines[0].len()), "{table}");
    let at = |name| lines[0].iter().position(|column| *column == name).unwrap();
    assert_eq!((lines[3][at("phase")], lines[3][at("tokens")]), ("pair", "3"));
    assert_eq!(lines[3][at("slowest_p50_us")], pair.p50_us.to_string());
    assert_eq!((lines[2][at("phase")], lines[2][at("packet_tokens")]), ("combine", "128"));
    assert!(!lines[2][at("kernel_us")].is_empty() && lines[3][at("kernel_us")].is_empty());
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for name in ["send", "enter", "receive"] {
        assert!(events.iter().any(|event| event["name"] == name), "{name}");
    }
    let spans = events.iter().filter(|event| event["ph"] == "X");
    assert!(spans.clone().count() > 0 && spans.clone().all(|span| span["dur"].as_f64().unwrap() >= 0.0));
}

#[test]
fn a_sweep_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("low.jsonl");
    let mut args = parse(SMALL).unwrap();
    (args.sweep, args.out) = (Some("tokens=1..4,ranks=1,2".parse().unwrap()), Some(out.clone()));
    run(&Bench { tool: None, args: args.clone() }).unwrap();
    let lines = std::fs::read_to_string(&out).unwrap();
    let points = Results::read(&out).unwrap().points;
    let of = |point: &Point| (point.mode.clone(), point.key.num_ranks, point.key.tokens);
    let sizes = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)];
    let sizes = sizes.map(|(ranks, tokens)| ("low-latency".to_owned(), ranks, tokens));
    assert_eq!(points.iter().map(of).collect::<Vec<_>>(), sizes);
    run(&Bench { tool: None, args: args.clone() }).unwrap();
    assert_eq!(std::fs::read_to_string(&out).unwrap(), lines);
    // Chains of another length are another measurement.
    args.sizes.graph = Some(2);
    run(&Bench { tool: None, args }).unwrap();
    assert_eq!(Results::read(&out).unwrap().points.len(), 12);
}

/// `--help` documents these.
#[test]
fn defaults_of_a_sweep_are_those_of_its_ranks() {
    let args = parse("bench --mode low-latency --tokens 1").unwrap();
    let of = |nodes, ranks| {
        let plan = args.plan_on(nodes, ranks).unwrap();
        (plan.topology.ranks(), plan.low_latency.unwrap().packet_tokens, plan.experts)
    };
    assert_eq!([of(1, 2), of(1, 3), of(2, 2)], [(2, 128, 16), (3, 64, 24), (4, 42, 32)]);
}

/// The sizes of another group of ranks than the first.
#[test]
fn a_sweep_measures_with_the_defaults_of_its_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("low.jsonl");
    let mut args = parse(SMALL).unwrap();
    (args.sweep, args.out) = (Some("tokens=1,ranks=2,3".parse().unwrap()), Some(out.clone()));
    args.sizes.experts = Some(6);
    run(&Bench { tool: None, args }).unwrap();
    let points = Results::read(&out).unwrap().points;
    assert_eq!(points.iter().map(|point| point.key.packet_tokens).collect::<Vec<_>>(), [Some(128), Some(64)]);
}

/// The default number of ranks, 8, has no part of 6 experts.
#[test]
fn a_sweep_does_not_need_sizes_that_suit_other_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let line = SMALL.replace("--ranks-per-node 2", "").replace("--experts 4", "--experts 6");
    let mut args = parse(&line).unwrap();
    args.sweep = Some("tokens=1,ranks=2,3".parse().unwrap());
    args.out = Some(folder.path().join("low.jsonl"));
    run(&Bench { tool: None, args: args.clone() }).unwrap();
    assert_eq!(Results::read(&args.out.unwrap()).unwrap().points.len(), 2);
}

#[test]
fn flags_that_a_mode_does_not_use_are_rejected() {
    for (line, rule) in [
        ("--mode low-latency --masked 0.5", "--masked 0.5: not with --mode low-latency"),
        ("--mode low-latency --queues 2", "--queues: not with --mode low-latency"),
        ("--mode low-latency --rdma-send 3", "--rdma-send: not with"),
        ("--mode low-latency --nvl-bytes 3", "--nvl-bytes: not with"),
        ("--mode low-latency --rdma-bytes 3", "--rdma-bytes: not with"),
        ("--mode low-latency --flush-mib 0", "--flush-mib: not with"),
        ("--mode low-latency --dispatch-warps 2", "--dispatch-warps: not with"),
        ("--mode low-latency --combine-stagers 2", "--combine-stagers: not with"),
        ("--chunk-tokens 2", "--chunk-tokens: only with --mode low-latency"),
        ("--packet-tokens 0", "--packet-tokens: only with --mode low-latency"),
    ] {
        let plans = parse(&format!("bench {line}")).unwrap().plans();
        let error = plans.and_then(|plans| measure_points(&plans, &())).unwrap_err();
        assert_eq!(error.code, crate::error::USAGE);
        assert!(error.message.as_ref().is_some_and(|message| message.starts_with(rule)), "{error:?}");
    }
    // Commands of both modes have it.
    assert!(parse("bench --mode low-latency --no-ceiling").unwrap().plans().is_ok());
}

#[test]
fn points_of_version_1_are_read() {
    let times = |us: f64| serde_json::json!({"p50_us": us, "p99_us": us, "min_us": us, "mean_us": us, "samples_us": [us, us]});
    let within = serde_json::json!({"sent": times(1.0), "entered": times(2.0), "done": times(3.0)});
    let old = serde_json::json!({
        "schema_version": 1, "mode": "low-latency", "device": "GPU", "virtual": false, "date": "2026-11-23",
        "num_ranks": 2, "nodes": 1, "transport": null, "tokens": 8, "hidden": 256, "experts": 8, "topk": 2,
        "dtype": "fp8", "combine_dtype": "bf16", "num_sms": 4, "chunk_tokens": 1, "packet_tokens": 32,
        "dispatch": times(11.0), "combine": times(12.0), "pair": times(13.0), "dispatch_within": within,
        "combine_within": within, "chain": 128, "remote_rows": 4.5, "routing_digest": "1", "runs": [{"started": 1.0}],
    });
    let points = Results::of_text(&old.to_string()).unwrap().points;
    let [point] = &points[..] else { panic!("{points:?}") };
    assert_eq!((point.schema_version, point.iters, point.phases[0].row_bytes), (2, 2, 256 + 8));
    assert_eq!(point.pair.as_ref().map(|pair| (pair.chain, pair.period.p50_us)), Some((128, 13.0)));
    let text = text(&points);
    assert!(text.contains("kernels: unknown, of 2026-11-23") && text.contains("     11.0"), "{text}");
    // The point can be compared with current points, with any seed.
    let mut new = point.clone();
    new.key.seed = 7;
    let compared = epoxide_bench::compare::compare(&points, &[new], 0.01).unwrap().text();
    assert!(compared.contains("pair of 128") && compared.contains("kernel of dispatch"), "{compared}");
}

#[test]
fn nodes_are_measured() {
    let points = measured(&format!("{SMALL} --nodes 2 --transport shm"));
    assert_eq!((points[0].key.nodes, points[0].key.transport.as_deref()), (2, Some("shm")));
    assert!(text(&points).contains("num_ranks=4 nodes=2 transport=shm"), "{}", text(&points));
    let within = points[0].phases[1].within.as_ref().unwrap();
    assert!(within.sent.min_us > 0.0 && within.entered.p50_us <= within.done.p50_us, "{within:?}");
}

#[test]
fn rows_that_are_summed_already_are_measured() {
    let of = |flags: &str| measured(&format!("{SMALL} {flags}"));
    let (by_expert, by_row) = (of(""), of("--combine-rows by-row"));
    assert_eq!(by_expert[0].key.combine_rows, None);
    assert_eq!(by_row[0].key.combine_rows.as_deref(), Some("by-row"));
    assert!(text(&by_row).contains("combine=bf16 by-row"), "{}", text(&by_row));
    // Different work is not compared.
    assert!(epoxide_bench::compare::compare(&by_expert, &by_row, 0.01).is_err());
}

#[test]
fn rows_by_expert_are_measured() {
    let of = |flags: &str| measured(&format!("{SMALL} {flags}"));
    let (without, with) = (of(""), of("--rows-by-expert 8"));
    assert_eq!((without[0].key.rows_by_expert, with[0].key.rows_by_expert), (None, Some(8)));
    assert!(text(&with).contains("dispatch=bf16 rows_by_expert=8 combine=bf16"), "{}", text(&with));
    // Different work is not compared.
    assert!(epoxide_bench::compare::compare(&without, &with, 0.01).is_err());
}

#[test]
fn a_buffer_for_more_tokens_is_measured() {
    let of = |flags: &str| measured(&format!("{SMALL} {flags}"));
    let (own, larger) = (of(""), of("--max-tokens 16"));
    assert_eq!((own[0].key.max_tokens, larger[0].key.max_tokens), (None, Some(16)));
    assert!(larger[0].pool_bytes > own[0].pool_bytes);
    assert!(text(&larger).contains(" max_tokens=16 "), "{}", text(&larger));
    assert!(epoxide_bench::compare::compare(&own, &larger, 0.01).is_err());
}

/// On the virtual GPU a call takes as long with something before it as without.
#[test]
fn pairs_with_something_between_their_calls_are_measured() {
    let of = |flags: &str| measured(&format!("{SMALL} {flags}"));
    let (close, apart) = (of(""), of("--between-us 3"));
    assert_eq!((close[0].key.between_us, apart[0].key.between_us), (None, Some(3)));
    assert!(text(&apart).contains(" between_us=3 "), "{}", text(&apart));
    assert!(epoxide_bench::compare::compare(&close, &apart, 0.01).is_err());
}

#[test]
fn packets_and_words_are_both_measured() {
    for (flags, chunk_tokens, packet_tokens) in
        [("", 1, 128), ("--packet-tokens 0 --chunk-tokens 2", 2, 0), ("--packet-tokens 3", 1, 3)]
    {
        let points = measured(&format!("{SMALL} {flags}"));
        let key = &points[0].key;
        assert_eq!((key.chunk_tokens, key.packet_tokens), (Some(chunk_tokens), Some(packet_tokens)));
        assert!(text(&points).contains(&format!("packet_tokens={packet_tokens}")), "{}", text(&points));
    }
}

#[test]
fn impossible_sizes_are_rejected_by_name() {
    for (line, part) in [
        ("--tokens 2000", "--tokens 2000"),
        ("--experts 7 --ranks-per-node 3", "--experts 7"),
        ("--topk 33", "--topk 33"),
        ("--hidden 100", "--hidden 100"),
        ("--nodes 0", "--nodes 0"),
        ("--nodes 9 --ranks-per-node 8", "72 ranks in all, and low latency has at most 64"),
        ("--rows-by-expert 48", "--rows-by-expert 48: must be a power of two, at most 4096: take 32 or 64"),
        ("--num-sms 0", "--num-sms 0: must be at least 1"),
        ("--iters 0", "--iters 0"),
        ("--tokens 0", "--tokens 0: must be 1 to 1024"),
        ("--tokens 4 --max-tokens 3", "--max-tokens 3: must be at least --tokens, 4, and at most 1024"),
        ("--max-tokens 1025", "--max-tokens 1025: must be at least --tokens"),
        ("--combine-dtype fp8 --hidden 64", "--hidden 64: must be a positive multiple of 128"),
        ("--dtype mxfp8 --hidden 192", "--hidden 192: must be a positive multiple of 128"),
        ("--combine-dtype mxfp8", "--combine-dtype mxfp8: a combine returns bf16 or fp8"),
        ("--hidden 2", "--hidden 2: must be a positive multiple of 8 (rows are multiples of 16 bytes)"),
        ("--repeat 0", "--repeat 0: must be at least 1"),
        ("--baseline nccl", "--baseline: not with --mode low-latency; leave the mode out"),
    ] {
        let args = parse(&format!("bench --mode low-latency {line}")).unwrap();
        let stop = run(&Bench { tool: None, args }).unwrap_err();
        let message = stop.message.unwrap();
        assert!(stop.code == crate::error::USAGE && message.contains(part), "{message}");
    }
}

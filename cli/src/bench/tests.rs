//! Tests of whole runs, on the virtual GPU.

use epoxide_bench::Counted;
use epoxide_bench::counts::ACROSS_NODES;
use epoxide_bench::measured::{Times, WireCount};
use epoxide_bench::points;
use epoxide_bench::results::{PhaseName, Results};
use epoxide_testing::tier;

use super::testing::{arguments, flags, measured, parse};
use super::*;
use crate::error::{SKIPPED, USAGE};
use crate::options::{Defaults, Mode, RoundTripFlags};

/// Times of a phase: calls by themselves, and back to back.
fn set(times: &mut Times, name: PhaseName, calls: Vec<f64>, back_to_back: f64) {
    let phase = times.phase_mut(name).unwrap();
    (phase.calls, phase.back_to_back) = (calls, Some(back_to_back));
}

/// Ids of four ranks, in docs/BENCH-METHOD.md.
const BY_HAND: [[i64; 4]; 4] = [[0, 2, 1, -1], [6, 7, 2, 5], [-1, -1, 0, 4], [1, 6, 3, 2]];

/// docs/BENCH-METHOD.md, "How the figures are computed", works these by hand.
#[test]
fn the_figures_worked_by_hand_are_the_output() {
    let mut plan = arguments("--ranks-per-node 4 --tokens 2 --hidden 8192");
    plan.ids = Some(BY_HAND.map(|ids| ids.to_vec()).into());
    let (points, mut ranks) = measure_points(std::slice::from_ref(&plan), &()).unwrap();
    let counts = points[0].counts;
    assert_eq!((counts.send_total, counts.send_nvl, counts.send_rdma), (1.75, 1.75, 0.0));
    assert_eq!((counts.recv_total, counts.recv_nvl, counts.recv_rdma), (2.75, 2.75, 0.0));
    assert_eq!(points[0].remote_rows, 1.5);

    // Bandwidths need times of hardware; these stand in for them.
    for (rank, result) in ranks.iter_mut().enumerate() {
        (result.is_virtual, result.device, result.driver_version) = (false, "GPU".into(), 13_000);
        let times = &mut result.times[0];
        set(times, PhaseName::DispatchCached, vec![2.048, 6.144], 1.28 + 0.256 * rank as f64);
        set(times, PhaseName::CombineInPool, vec![8.192, 8.192], 2.048);
        times.ceiling = Some((12.0, 24.0));
    }
    let point = &points::points(&plan, &ranks).unwrap()[0];
    let text = report::text(point);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[..6],
        [
            "[bench intranode HT] nodes=1 num_ranks=4 tokens=2 hidden=8192 experts=8 topk=2 warmup=1 iters=2",
            "  dispatch: avg=1.66us min=1.28us max=2.05us  per_rank_bw=19.69 GB/s  agg_bw=78.77 GB/s  (BW @ avg time)",
            "            send: total=17.23  nvl=17.23  rdma=0.00 GB/s  recv: total=27.08  nvl=27.08  rdma=0.00 GB/s",
            "  combine : avg=2.05us min=2.05us max=2.05us  per_rank_bw=16.00 GB/s  agg_bw=64.00 GB/s  (BW @ avg time)",
            "            send: total=22.00  nvl=22.00  rdma=0.00 GB/s  recv: total=14.00  nvl=14.00  rdma=0.00 GB/s",
            "  byte counts (per rank avg): total_send=0.03 MB (1.8 tok)  rdma_send=0.00 MB (0.0 tok)  total_recv=0.05 MB (2.8 tok)  rdma_recv=0.00 MB (0.0 tok)",
        ],
        "{text}"
    );
    let bandwidth = |name| point.phase(name).and_then(|phase| phase.bandwidth.clone()).unwrap();
    let dispatch = bandwidth(PhaseName::DispatchCached);
    assert_eq!((dispatch.links, dispatch.deepep, dispatch.link_ceiling), (6.0, 11.0, Some(12.0)));
    assert_eq!((dispatch.nccl_ep.send_total, dispatch.nccl_ep.recv_total), (7.0, 11.0));
    let combine = bandwidth(PhaseName::CombineInPool);
    assert_eq!((combine.links, combine.deepep, combine.link_ceiling), (3.0, 5.5, Some(24.0)));
    assert_eq!((combine.nccl_ep.send_total, combine.nccl_ep.recv_total), (5.5, 3.5));
    assert!(text.contains("50.0%") && text.contains("12.5%"), "{text}");
}

/// docs/BENCH-METHOD.md, "Rows by expert", works these by hand.
#[test]
fn the_figures_by_expert_worked_by_hand_are_the_output() {
    let mut plan = arguments("--ranks-per-node 4 --tokens 2 --hidden 8192 --rows-by-expert 8");
    plan.ids = Some(BY_HAND.map(|ids| ids.to_vec()).into());
    let (points, mut ranks) = measure_points(std::slice::from_ref(&plan), &()).unwrap();
    assert!(points[0].phases.iter().all(|phase| phase.traffic.unwrap().ceiling_us.is_none()));
    // Bandwidths need times of hardware; these stand in for them.
    for (rank, result) in ranks.iter_mut().enumerate() {
        (result.is_virtual, result.device, result.driver_version) = (false, "GPU".into(), 13_000);
        let times = &mut result.times[0];
        for (name, us) in [
            (PhaseName::DispatchCached, 4.096),
            (PhaseName::CombineInPool, 2.1504),
            (PhaseName::CombineStaged, 4.8128),
            (PhaseName::DispatchCachedAndSort, 5.5296),
        ] {
            // The slowest rank takes 1.536 us more than the mean.
            let skew = 1.024 * rank as f64 - 1.536;
            times.phase_mut(name).unwrap().calls = vec![us + skew; 2];
        }
        (times.ceiling, times.memory_ceiling) = (Some((16.0, 32.0)), Some(80.0));
        times.store_ceiling = Some(26.0);
    }
    let point = &points::points(&plan, &ranks).unwrap()[0];
    let near = |got: Option<f64>, want: f64| assert!((got.unwrap() - want).abs() < 1e-9, "{got:?}, {want}");
    for (name, bytes, us, share) in [
        (PhaseName::DispatchCached, [24576, 36864, 53248, 0, 0], [1.536, 1.1264, 2.048, 0.0, 2.048], 0.5),
        (PhaseName::CombineInPool, [32768, 53248, 32768, 0, 0], [1.024, 1.0752, 0.0, 0.0, 1.0752], 0.5),
        (
            PhaseName::CombineStaged,
            [32768, 53248, 32768, 53248, 53248],
            [1.024, 1.0752, 0.0, 1.3312, 2.4064],
            0.5,
        ),
        (
            PhaseName::DispatchCachedAndSort,
            [24576, 28672, 45056, 45056, 53248],
            [1.536, 0.9216, 0.0, 1.2288, 2.7648],
            0.5,
        ),
    ] {
        let of = point.phase(name).unwrap().traffic.unwrap();
        let moved =
            [of.link_bytes, of.read_bytes, of.written_bytes, of.copy_read_bytes, of.copy_written_bytes];
        assert_eq!(moved, bytes.map(f64::from), "{name:?}");
        let stores = of.store_us.or(Some(0.0));
        for (got, want) in [of.link_us, of.memory_us, stores, of.copy_us, of.ceiling_us].into_iter().zip(us) {
            near(got, want);
        }
        near(of.share, share);
    }
    let beside = &point.by_expert[0];
    assert_eq!(beside.name, PhaseName::DispatchCached);
    near(Some(beside.by_expert_us), 5.632);
    near(Some(beside.dispatch_and_sort_us), 7.0656);
    let links = |name| point.phase(name).unwrap().bandwidth.as_ref().unwrap().links;
    near(Some(links(PhaseName::DispatchCached)), 6.0);
    let text = report::text(point);
    for line in [
        "  dispatch cached            0.02     0.04     0.05       0.00        0.00 |      1.5      1.1      2.0      0.0      2.0   50.0%",
        "  cached + sort              0.02     0.03     0.05       0.05        0.05 |      1.5      0.9        -      1.2      2.8   50.0%",
        "    dispatch cached      5.6 by expert, 7.1 with a sort",
    ] {
        assert!(text.contains(line), "{text}");
    }
    let folder = tempfile::tempdir().unwrap();
    csv::write(&folder.path().join("a.csv"), std::slice::from_ref(point)).unwrap();
    let table = std::fs::read_to_string(folder.path().join("a.csv")).unwrap();
    assert!(table.lines().nth(1).unwrap().contains(",24576,36864,53248,0,0,80,2.048,0.5,"), "{table}");
}

#[test]
fn nothing_of_the_virtual_gpu_is_a_bandwidth() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let mut args = flags("--num-sms 2,4 --dispatch-warps 3");
    args.json = Some(file("a.json"));
    let points = single(&args, &args.plans().unwrap()).unwrap();
    for point in &points {
        let text = report::text(point);
        assert!(text.contains("VIRTUAL GPU: interpreter time"), "{text}");
        assert!(text.contains("  kernels: PTX ") && text.contains(", commit "), "{text}");
        assert!(!text.contains("GB/s") && !text.contains("n/a") && !text.contains("_bw"), "{text}");
        assert!(point.phases.iter().all(|phase| phase.bandwidth.is_none()));
    }
    let json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(file("a.json")).unwrap()).unwrap();
    assert_eq!(json["schema_version"], 2);
    for point in json["points"].as_array().unwrap() {
        assert_eq!(point["virtual"], true);
        assert_eq!(point["clock"], "virtual GPU: time of an interpreter");
        assert!(point["kernels"]["driver"].is_null() && !point["kernels"]["commit"].is_null());
        // The PTX that was loaded, by SHA-256.
        let digest = point["kernels"]["ptx"].as_str().unwrap();
        assert!(digest.len() == 16 && digest.chars().all(|digit| digit.is_ascii_hexdigit()), "{digest}");
        for phase in point["phases"].as_array().unwrap() {
            assert!(phase["bandwidth"].is_null());
            assert_eq!(phase["call"]["samples_us"].as_array().unwrap().len(), 2);
        }
    }
    // The stored results equal the measured ones.
    assert_eq!(Results::read(&file("a.json")).unwrap().points, points);

    csv::write(&file("a.csv"), &points).unwrap();
    let table = std::fs::read_to_string(file("a.csv")).unwrap();
    let mut table = table.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let columns = table.next().unwrap();
    assert_eq!((columns[0], columns[64], columns[65]), ("mode", "store_ceiling_gbps", "quantised"));
    assert_eq!(columns.len(), 80);
    assert_eq!(columns[66..71], ["seed", "masked", "warmup", "iters", "flush_mib"]);
    assert_eq!((columns[71], columns[79]), ("dispatch_warps", "combine_stagers"));
    let column = |name: &str| columns.iter().position(|column| *column == name).unwrap();
    let mut lines = 0;
    for line in table {
        assert_eq!(line.len(), columns.len());
        assert_eq!(line[column("virtual")], "true");
        assert_eq!(line[66..73], ["7", "0", "1", "2", "256", "3", ""]);
        assert!(line[column("avg_us")].parse::<f64>().unwrap() > 0.0);
        for (name, field) in columns.iter().zip(&line) {
            assert!(!name.ends_with("_gbps") || field.is_empty(), "{name} = {field}");
        }
        lines += 1;
    }
    assert_eq!(lines, 2 * 4);

    if cfg!(feature = "plots") {
        plot::draw_points(&points, &file("a.svg")).unwrap();
        let svg = std::fs::read_to_string(file("a.svg")).unwrap();
        assert!(svg.contains("VIRTUAL GPU: interpreter times") && !svg.contains("GB/s"));
    }
}

#[test]
fn replays_are_printed_stored_compared_and_swept() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let mut args = flags(tier::pick("--iters 2", "--iters 5"));
    let (plain, _) = measure_points(&args.plans().unwrap(), &()).unwrap();
    (args.sizes.graph, args.json) = (Some(3), Some(file("a.json")));
    let points = single(&args, &args.plans().unwrap()).unwrap();
    let text = report::text(&points[0]);
    let table = text.split_once("graph replays").unwrap().1;
    assert!(
        table.contains("VIRTUAL GPU: interpreter times") && table.contains("chained: 3 one after"),
        "{table}"
    );
    assert!(!report::text(&plain[0]).contains("graph replays"));

    // Five steps: each by itself and in a chain. A side without replays has none to pair.
    let stored = Results::read(&file("a.json")).unwrap().points;
    assert_eq!(stored, points);
    let text_of = |a: &[Point], b: &[Point]| epoxide_bench::compare::compare(a, b, 0.01).unwrap().text();
    let compared = text_of(&stored, &points);
    assert_eq!(compared.matches("replay").count(), 10, "{compared}");
    assert!(compared.contains("dispatch cached + combine in pool, 3 chained replays"), "{compared}");
    let compared = text_of(&stored, &plain);
    assert!(!compared.contains("replay") && compared.contains("combine staged"), "{compared}");
    if cfg!(feature = "plots") {
        plot::draw_points(&points, &file("a.svg")).unwrap();
    }
    let chain = |line: &str| parse(line).map(|args| args.sizes.graph);
    assert_eq!(chain("bench --graph --iters 3").unwrap(), Some(128));
    assert_eq!(chain("bench --graph=7").unwrap(), Some(7));
    assert!(chain("bench --graph=0").is_err());

    // A point without replays does not replace one with replays.
    let asked = "tokens=1,8".parse().unwrap();
    let swept = |graph| {
        let mut args = args.clone();
        args.sizes.graph = graph;
        sweep::run(&args, &args.plans().unwrap(), &asked, &file("a.jsonl")).unwrap()
    };
    assert!(swept(None).iter().all(|point| point.graph.is_empty()));
    let points = swept(Some(3));
    assert!(points.iter().all(|point| point.graph.len() == 5) && swept(Some(3)) == points);
    let table = report::replays(&points);
    let tokens: Vec<&str> = table.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    assert_eq!(tokens[tokens.len() - 10..], [["1"; 5], ["8"; 5]].concat(), "{table}");
}

#[test]
fn sizes_that_cannot_be_are_bad_usage_as_in_a_round_trip() {
    for (line, reason) in [
        ("--experts 9", "--experts 9: must be a positive multiple of the 2 ranks"),
        ("--tokens 0", "--tokens 0: must be at least 1"),
        ("--rows-by-expert 0", "--rows-by-expert 0: must be a power of two, at most 4096: take 1"),
        ("--rows-by-expert 48", "--rows-by-expert 48: must be a power of two, at most 4096: take 32 or 64"),
        ("--rows-by-expert 8192", "--rows-by-expert 8192: must be a power of two, at most 4096: take 4096"),
        (
            "--rows-by-expert 8 --baseline nccl",
            "--baseline: not with --rows-by-expert; measure each in a run of its own",
        ),
        ("--iters 0", "--iters 0: must be at least 1"),
        ("--flush-mib 17592186044416", "--flush-mib 17592186044416: must be at most 1048576"),
        ("--iters 4294967295", "--iters 4294967295: must be at most 100000"),
        ("--warmup 4294967295", "--warmup 4294967295: must be at most 100000"),
        ("--repeat 4294967295", "--repeat 4294967295: must be at most 100000"),
        ("--graph=4294967295", "--graph 4294967295: must be at most 100000"),
        ("--topk 9", "--topk 9: must be 1 to 8 (at most 32, and at most the number of experts)"),
        ("--hidden 2", "--hidden 2: must be a positive multiple of 8 (rows are multiples of 16 bytes)"),
        ("--experts 80 --topk 40", "--topk 40: must be 1 to 32"),
        (
            "--experts 4096",
            "--experts 4096: must be a positive multiple of the 2 ranks, at most 1024 for each",
        ),
        ("--nodes 2 --num-sms 4 --experts 9", "--experts 9: must be a positive multiple of the 4 ranks"),
        (
            "--nodes 2 --ranks-per-node 8 --experts 16 --num-sms 4 --hidden 65536 --rdma-bytes 2000000",
            "--hidden 65536: a row in combine, of 2 bytes an element, must not exceed the smaller of nvl_bytes / num_ranks = 34080800 and rdma_bytes / num_ranks = 125000",
        ),
    ] {
        let error = measure_points(&[arguments(line)], &()).unwrap_err();
        let message = error.message.unwrap();
        assert_eq!(error.code, USAGE, "{line}: {message}");
        assert!(message.starts_with(reason), "{line}: {message}");
        // A round trip reports the same, but has no timing flags and accepts 0 tokens.
        if line.split_whitespace().count() == 2
            && !["--iters", "--warmup", "--repeat", "--tokens", "--rows-by-expert", "--flush-mib"]
                .iter()
                .any(|flag| line.contains(flag))
        {
            let words = format!("roundtrip --ranks-per-node 2 --nodes 1 --experts 8 {line}");
            let mut words: Vec<&str> = words.split_whitespace().collect();
            if line.contains("--experts") {
                words.drain(5..7);
            }
            let flags: RoundTripFlags = crate::testing::parse(words).unwrap();
            let defaults = Defaults { mode: Mode::Intranode, tokens: 8, hidden: 64, num_sms: None };
            let topology = flags.topology(defaults, None).unwrap();
            assert_eq!(flags.resolve(topology, defaults).unwrap_err().message, Some(message));
        }
    }
}

#[test]
fn only_low_latency_chooses_what_rows_return() {
    for flag in ["--combine-dtype fp8", "--combine-rows by-row"] {
        let args = parse(&format!("bench {flag}")).unwrap();
        let message = args.plans().unwrap_err().message.unwrap();
        let name = flag.split(' ').next().unwrap();
        assert!(message.starts_with(&format!("{name}: only with --mode low-latency")), "{message}");
    }
    let message = parse("bench --dtype mxfp8").unwrap().plans().unwrap_err().message.unwrap();
    assert!(message.starts_with("--dtype mxfp8: only with --quantise or --mode low-latency"), "{message}");
    for (flags, rule) in [
        ("--quantise", "--quantise: give --dtype fp8 or mxfp8"),
        ("--mode low-latency --dtype fp8 --quantise", "--quantise: --mode low-latency converts rows"),
        ("--dtype mxfp8 --quantise --rows-by-expert 4", "--rows-by-expert: the sort"),
    ] {
        let message = parse(&format!("bench {flags}")).unwrap().plans().unwrap_err().message.unwrap();
        assert!(message.starts_with(rule), "{message}");
    }
}

/// Rows of bf16 that every dispatch converts: their bytes are held against the oracle before they
/// are timed.
#[test]
fn rows_that_are_quantised_on_their_way_are_measured() {
    for line in [
        "--ranks-per-node 2 --num-sms 2 --dtype fp8 --graph=2",
        "--ranks-per-node 2 --num-sms 2 --dtype fp8 --rows-by-expert 4",
        "--nodes 2 --ranks-per-node 1 --transport shm --num-sms 4 --dtype mxfp8",
    ] {
        let sizes = "--tokens 6 --hidden 256 --experts 8 --topk 2 --warmup 1 --iters 2";
        let plans = parse(&format!("bench {line} {sizes} --quantise")).unwrap().plans().unwrap();
        let (points, _) = measure_points(&plans, &()).unwrap();
        let [point] = &points[..] else { panic!("one point") };
        assert_eq!(point.key.quantised, Some(true));
        assert!(line.contains(&format!("--dtype {}", point.key.dtype)));
        let text = report::text(point);
        assert!(text.contains(&format!("dtype={} quantised on the way", point.key.dtype)), "{text}");
        let dispatch = point.phase(PhaseName::DispatchCached).map(|phase| phase.row_bytes);
        assert_eq!(dispatch, Some(256 + 2 * 4));
    }
}

#[test]
fn files_that_cannot_be_written_are_bad_usage_before_anything_is_measured() {
    for flag in ["--json", "--csv", "--trace"] {
        let path = "/no/such/folder/a";
        // Other sizes are impossible too, but that would be reported later.
        let args = flags(&format!("--tokens 0 {flag} {path}"));
        let error = run(&Bench { tool: None, args }).unwrap_err();
        let message = error.message.unwrap();
        assert_eq!(error.code, USAGE);
        assert!(message.starts_with(&format!("{flag} {path}: No such file")), "{message}");
    }
}

#[test]
fn one_file_for_two_results_is_bad_usage_before_anything_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let path = path.display();
    for line in [format!("--json {path} --csv {path}"), format!("--csv {path} --out {path} --sweep tokens=1")]
    {
        let error = run(&Bench { tool: None, args: flags(&format!("--tokens 0 {line}")) }).unwrap_err();
        assert_eq!(error.code, USAGE);
        let message = error.message.unwrap();
        assert!(message.contains(&format!(" {path}: --")) && message.contains("the same file"), "{message}");
    }
}

#[test]
fn sizes_without_room_on_the_device_are_skipped() {
    let error = measure_points(&[arguments("--tokens 30000000 --hidden 7168")], &()).unwrap_err();
    assert_eq!(error.code, SKIPPED);
    assert!(error.message.unwrap().contains("do not fit"));
}

#[test]
fn every_step_of_a_plan_is_told() {
    let lines = [
        "--graph=3 --repeat 2",
        "--graph=3 --rows-by-expert 4",
        "--num-sms 2,4",
        "--nodes 2 --num-sms 4 --transport shm",
    ];
    for line in tier::sample(lines) {
        let args: Args = parse(&format!(
            "bench --ranks-per-node 2 --tokens 8 --hidden 64 --experts 8 --topk 2 --warmup 1 --iters 2 {}{line}",
            if line.contains("--num-sms") { "" } else { "--num-sms 2 " }
        ))
        .unwrap();
        let plan = args.plans().unwrap().remove(0);
        let steps = Counted::default();
        let (points, _) = measure_points(std::slice::from_ref(&plan), &steps).unwrap();
        assert_eq!(steps.of_rank_0(), u64::from(plan.repeat) * plan.steps(), "{line}");
        assert!(points.iter().all(|point| point.runs.len() == plan.repeat as usize));
    }
}

/// docs/BENCH-METHOD.md, "Across nodes, by hand".
#[test]
fn the_figures_across_nodes_worked_by_hand_are_the_output() {
    let mut plan =
        arguments("--nodes 2 --ranks-per-node 2 --tokens 4 --hidden 8192 --num-sms 4 --transport tcp");
    plan.ids = Some(ACROSS_NODES.map(|ids| ids.to_vec()).into());
    let (points, mut ranks) = measure_points(std::slice::from_ref(&plan), &()).unwrap();
    assert_eq!(points[0].remote_rows, 3.75);
    for result in &mut ranks {
        (result.is_virtual, result.device, result.driver_version) = (false, "GPU".into(), 13_000);
        result.transport_us = vec![
            (PhaseName::DispatchCached, 4.096),
            (PhaseName::DispatchUncached, 4.096),
            (PhaseName::CombineInPool, 2.048),
        ];
        let times = &mut result.times[0];
        times.phase_mut(PhaseName::DispatchUncached).unwrap().back_to_back = Some(16.384);
        for name in [PhaseName::DispatchCached, PhaseName::CombineInPool] {
            set(times, name, vec![8.192; 2], 8.192);
        }
        times.ceiling = Some((15.0, 30.0));
    }
    let point = &points::points(&plan, &ranks).unwrap()[0];
    let text = report::text(point);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[..8],
        [
            "[bench internode HT] nodes=2 num_ranks=4 tokens=4 hidden=8192 experts=8 topk=2 warmup=1 iters=2",
            "  dispatch: avg=16.38us min=16.38us max=16.38us  per_rank_bw=4.00 GB/s  agg_bw=16.00 GB/s  (BW @ avg time)",
            "            send: total=6.00  nvl=3.00  rdma=3.00 GB/s  recv: total=6.75  nvl=3.00  rdma=3.75 GB/s",
            "  combine : avg=8.19us min=8.19us max=8.19us  per_rank_bw=8.00 GB/s  agg_bw=32.00 GB/s  (BW @ avg time)",
            "            send: total=13.50  nvl=6.00  rdma=7.50 GB/s  recv: total=12.00  nvl=6.00  rdma=6.00 GB/s",
            "  byte counts (per rank avg): total_send=0.10 MB (6.0 tok)  rdma_send=0.05 MB (3.0 tok)  total_recv=0.11 MB (6.8 tok)  rdma_recv=0.06 MB (3.8 tok)",
            "  cached  : avg=8.19us min=8.19us max=8.19us  per_rank_bw=8.00 GB/s  agg_bw=32.00 GB/s  (BW @ avg time)",
            "            send: total=12.00  nvl=6.00  rdma=6.00 GB/s  recv: total=13.50  nvl=6.00  rdma=7.50 GB/s",
        ],
        "{text}"
    );
    let wire = |name| point.phase(name).and_then(|phase| phase.wire.clone()).unwrap();
    // Three rows of 16384 bytes cross; 3.75 pass NVLink: 4.096 us at 15 GB/s, 2.048 at 30.
    let (dispatch, combine) = (wire(PhaseName::DispatchCached), wire(PhaseName::CombineInPool));
    assert_eq!((dispatch.rows, dispatch.slot_bytes, dispatch.bytes), (3.0, 16_384, 49_152.0));
    assert_eq!((dispatch.nvlink_us, dispatch.share), (Some(4.096), Some(1.0)));
    assert_eq!((combine.rows, combine.bytes), (3.0, 49_152.0));
    assert_eq!((combine.nvlink_us, combine.share), (Some(2.048), Some(2.0)));
    let uncached = wire(PhaseName::DispatchUncached);
    assert_eq!((uncached.slot_bytes, uncached.bytes), (16_384 + 64 + 64, 3.0 * 16_512.0 + 10_416.0));
    let bandwidth = point.phase(PhaseName::DispatchCached).and_then(|phase| phase.bandwidth.clone()).unwrap();
    assert_eq!((bandwidth.wire, bandwidth.wire_ceiling, bandwidth.links), (Some(6.0), Some(12.0), 7.5));

    // Into mapped memory: nothing is put, and the three rows pass NVLink as well: 6.75 rows, 110592
    // bytes.
    for result in &mut ranks {
        (result.mapped, result.has_queues) = (true, false);
        result.transport_us.clear();
        result.times[0].phases.iter_mut().for_each(|phase| phase.wire = WireCount::default());
    }
    let point = &points::points(&plan, &ranks).unwrap()[0];
    let wire = |name| point.phase(name).and_then(|phase| phase.wire.clone()).unwrap();
    let (dispatch, combine) = (wire(PhaseName::DispatchCached), wire(PhaseName::CombineInPool));
    assert_eq!((dispatch.bytes, dispatch.puts, dispatch.transport_us), (0.0, 0.0, None));
    let close = |value: Option<f64>, to: f64| value.is_some_and(|value| (value - to).abs() < 1e-9);
    assert!(close(dispatch.nvlink_us, 7.3728) && close(dispatch.share, 8.192 / 7.3728), "{dispatch:?}");
    assert!(close(combine.nvlink_us, 3.6864) && close(combine.share, 8.192 / 3.6864), "{combine:?}");
    for (name, ceiling) in [(PhaseName::DispatchCached, 15.0), (PhaseName::CombineInPool, 30.0)] {
        let bandwidth = point.phase(name).and_then(|phase| phase.bandwidth.clone()).unwrap();
        assert_eq!((bandwidth.links, bandwidth.link_ceiling), (13.5, Some(ceiling)));
        assert_eq!((bandwidth.wire, bandwidth.wire_ceiling), (None, None));
    }
}

#[test]
fn the_report_says_whether_caches_were_emptied() {
    let report = |mib| {
        let (mut points, _) = measured(&format!("--flush-mib {mib}"));
        points[0].is_virtual = false;
        report::text(&points[0])
    };
    let (with, without) = (report(1), report(0));
    assert!(with.contains("each call by itself, L2 emptied before, between"), "{with}");
    assert!(without.contains("each call by itself, L2 not emptied, between"), "{without}");
}

#[test]
fn nodes_that_are_all_mapped_have_the_report_of_one_node() {
    let (points, _) = measured("--nodes 2 --ranks-per-node 2 --num-sms 4 --transport direct");
    let text = report::text(&points[0]);
    assert!(text.starts_with("[bench intranode HT] nodes=2 num_ranks=4"), "{text}");
    let starts: Vec<&str> = text.lines().map(|line| line.get(..11).unwrap_or(line)).collect();
    assert!(starts.contains(&"  dispatch:") && !starts.contains(&"  cached  :"), "{text}");
    assert!(!text.contains("on the wire"), "{text}");
}

#[test]
fn nothing_across_virtual_nodes_is_a_bandwidth() {
    let (points, _) = measured("--nodes 2 --ranks-per-node 2 --num-sms 4 --transport tcp");
    let text = report::text(&points[0]);
    assert!(text.starts_with("[bench internode HT] nodes=2 num_ranks=4"), "{text}");
    assert!(!text.contains("GB/s") && !text.contains("n/a"), "{text}");
    for phase in &points[0].phases {
        let wire = phase.wire.as_ref().unwrap();
        assert!(phase.bandwidth.is_none() && wire.share.is_none() && wire.nvlink_us.is_none());
        assert!(wire.transport_us.is_some_and(|us| us > 0.0) && wire.puts > 0.0);
    }
}

#[test]
fn the_library_is_as_strict_as_the_flags() {
    for (line, part) in [
        ("--nodes 2 --num-sms 2", "--num-sms 2: a cached dispatch across nodes takes at least 4"),
        ("--nodes 2 --num-sms 4 --rdma-send 500", "num_max_rdma_chunked_send_tokens = 500"),
        ("--num-sms 3", "num_sms = 3"),
    ] {
        let error = measure_points(&[arguments(line)], &()).unwrap_err();
        let message = error.message.unwrap();
        assert_eq!(error.code, crate::error::USAGE, "{message}");
        assert!(message.contains(part), "{message}");
    }
}

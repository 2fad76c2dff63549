//! Runs with a baseline, on the virtual GPU beside the fake libnccl of the tests.

use epoxide_bench::results::{Results, Way};
use epoxide_bench::{Counted, ways};
use epoxide_nccl::NCCL_LIBRARY;
use epoxide_testing::{alone, fake_nccl, tier};

use super::testing::flags;
use super::*;
use crate::error::{FAILED, SKIPPED};

/// True if this process has a libnccl, or is meant to have none. Otherwise the test has run in such
/// a process.
fn alone_with(test: &str, flags: Option<&[&str]>) -> bool {
    if std::env::var_os(NCCL_LIBRARY).is_some() {
        return true;
    }
    let file = flags.map_or("/nowhere/libnccl.so.2".into(), fake_nccl::built);
    let ended =
        alone::one_test(&format!("bench::baseline_tests::{test}")).env(NCCL_LIBRARY, file).output().unwrap();
    let said = [ended.stdout, ended.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(ended.status.success(), "{}", said.concat());
    false
}

/// Small sizes beside NCCL.
fn beside(line: &str) -> Args {
    flags(&format!("--baseline nccl {line}"))
}

#[test]
fn every_way_is_measured_checked_and_stored() {
    if !alone_with("every_way_is_measured_checked_and_stored", Some(&[])) {
        return;
    }
    for (line, low_latency) in tier::sample([
        ("--ranks-per-node 3 --experts 9 --tokens 5 --dtype fp8 --hidden 256 --masked 0.3", true),
        ("--num-sms 2,4 --repeat 2", true),
        ("--ranks-per-node 3 --experts 9 --masked 1.0", true),
        ("--nodes 2 --num-sms 4 --transport shm", false),
        ("--ranks-per-node 1", true),
    ]) {
        let plan = beside(line).plans().unwrap().remove(0);
        let steps = Counted::default();
        let (points, _) = measure_points(std::slice::from_ref(&plan), &steps).unwrap();
        assert_eq!(steps.of_rank_0(), u64::from(plan.repeat) * plan.steps(), "{line}");
        for point in &points {
            let measured: Vec<Way> = point.baselines.iter().map(|result| result.way).collect();
            assert_eq!(measured, Way::ALL[if low_latency { 1 } else { 2 }..], "{line}");
            let samples = (plan.iters * plan.repeat) as usize;
            for way in measured.into_iter().chain([Way::HighThroughput]) {
                for times in point.way(way).map(Option::unwrap) {
                    assert_eq!(times.samples_us.len(), samples, "{line}: {way:?}");
                    assert!(times.p50_us <= times.p90_us.unwrap() && times.p90_us.unwrap() <= times.p99_us);
                }
            }
            // Rows that the ways must move: rows for each rank with an expert of a token, or all
            // tokens and a row for each.
            let of = |way| point.baselines.iter().find(|result| result.way == way).unwrap();
            let (one, all) = (of(Way::NcclAllToAll), of(Way::NcclAllGather));
            if plan.topology.nodes == 1 {
                let linked = point.remote_rows;
                assert_eq!(one.dispatch_link_bytes, linked * plan.dispatch_row_bytes() as f64, "{line}");
                assert_eq!(one.combine_link_bytes, linked * plan.combine_row_bytes() as f64, "{line}");
            }
            let others = f64::from((plan.topology.ranks() - 1) * plan.tokens);
            let row = (plan.dispatch_row_bytes() + 12 * u64::from(plan.topk)) as f64;
            assert_eq!(all.dispatch_link_bytes, others * row, "{line}");
            assert_eq!(all.combine_link_bytes, others * plan.combine_row_bytes() as f64, "{line}");
        }
    }
}

#[test]
fn results_with_a_baseline_are_printed_stored_drawn_and_compared() {
    if !alone_with("results_with_a_baseline_are_printed_stored_drawn_and_compared", Some(&[])) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let mut args = beside("");
    args.json = Some(file("a.json"));
    let points = single(&args, &args.plans().unwrap()).unwrap();
    let text = report::text(&points[0]);
    for part in [
        "[epoxide low latency] whole calls",
        "[NCCL all-to-all] the exchange alone",
        "[NCCL all-gather + reduce-scatter] the exchange alone",
        "bytes over links (per rank avg): dispatch=",
        &format!("routing={}", points[0].routing_digest.as_deref().unwrap()),
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(text.matches("VIRTUAL GPU: interpreter time)").count(), 6, "{text}");
    assert!(!text.contains("GB/s"), "{text}");
    let table = ways::summary(&points).unwrap();
    for step in 0..ways::STEPS.len() {
        let line = table.lines().nth(2 + step).unwrap();
        let (fastest, us) = points[0].ranking(step)[0];
        assert!(line.contains(ways::STEPS[step]) && line.contains(&format!("{us:.1}")), "{line}");
        assert!(line.rsplit('|').next().unwrap().contains(fastest.text()), "{line}");
    }

    assert!(text.contains("  beside NCCL 2.28.3"), "{text}");

    let json = std::fs::read_to_string(file("a.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let point = &json["points"][0];
    assert_eq!(point["routing_digest"].as_str().unwrap().len(), 16);
    assert_eq!(point["pair"]["chain"], 4);
    assert_eq!(point["nccl"]["version"], "2.28.3");
    let slowest = |value: &serde_json::Value| {
        for name in ["p50_us", "p90_us", "p99_us", "min_us", "mean_us"] {
            assert!(value[name].is_f64(), "{name}: {value}");
        }
        assert_eq!(value["samples_us"].as_array().unwrap().len(), 2);
    };
    slowest(&point["pair"]["period"]);
    point["phases"].as_array().unwrap().iter().for_each(|phase| slowest(&phase["slowest"]));
    let ways: Vec<&str> =
        point["baselines"].as_array().unwrap().iter().map(|of| of["way"].as_str().unwrap()).collect();
    assert_eq!(ways, ["low_latency", "nccl_all_to_all", "nccl_all_gather"]);
    for of in point["baselines"].as_array().unwrap() {
        slowest(&of["dispatch"]["slowest"]);
        slowest(&of["combine"]["slowest"]);
        slowest(&of["pair"]["period"]);
        assert!(of["dispatch_link_bytes"].is_f64() && of["combine_link_bytes"].is_f64(), "{of}");
        assert!(of["dispatch"]["bandwidth"].is_null());
    }
    let stored = Results::read(&file("a.json")).unwrap().points;
    assert_eq!(stored, points);

    // An older point has no such fields, and can still be compared with this one. The baselines get
    // no verdict.
    let mut before = stored.clone();
    (before[0].baselines, before[0].pair, before[0].routing_digest) = (Vec::new(), None, None);
    let compared = epoxide_bench::compare::compare(&before, &stored, 0.01).unwrap().text();
    assert!(compared.contains("combine staged") && !compared.contains("NCCL"), "{compared}");

    if !cfg!(feature = "plots") {
        return;
    }
    // One configuration: distributions. Several: over the axis, in the panels of dispatch and of
    // combine.
    plot::draw_points(&points, &file("a.svg")).unwrap();
    let mut more = points.clone();
    more[0].key.tokens *= 2;
    plot::draw_points(&[points.clone(), more].concat(), &file("b.svg")).unwrap();
    for name in ["a.svg", "b.svg"] {
        let svg = std::fs::read_to_string(file(name)).unwrap();
        for way in &Way::ALL[1..] {
            assert!(svg.contains(way.text()), "{name}: {way:?}");
        }
    }
}

#[test]
fn a_sweep_of_sizes_says_which_way_is_fastest_at_each() {
    if !alone_with("a_sweep_of_sizes_says_which_way_is_fastest_at_each", Some(&[])) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("a.jsonl");
    let (asked, tokens) = tier::pick(("tokens=1..2", &["1", "2"][..]), ("tokens=1..4", &["1", "2", "4"]));
    let asked = asked.parse().unwrap();
    // A point without the baseline does not replace one with it.
    let plain = flags("");
    let points = sweep::run(&plain, &plain.plans().unwrap(), &asked, &out).unwrap();
    assert!(points.iter().all(|point| point.baselines.is_empty()) && ways::summary(&points).is_none());
    let args = beside("");
    let points = sweep::run(&args, &args.plans().unwrap(), &asked, &out).unwrap();
    assert!(points.iter().all(|point| point.baselines.len() == 3));
    assert_eq!(sweep::run(&args, &args.plans().unwrap(), &asked, &out).unwrap(), points);
    let table = ways::summary(&points).unwrap();
    let sizes: Vec<&str> = table.lines().skip(2).filter_map(|line| line.split_whitespace().nth(2)).collect();
    let expected: Vec<&str> = tokens.iter().flat_map(|tokens| [*tokens; 3]).collect();
    assert_eq!(sizes[..expected.len()], expected, "{table}");
}

#[test]
fn points_beside_another_nccl_are_measured_again() {
    if !alone_with("points_beside_another_nccl_are_measured_again", Some(&[])) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("a.jsonl");
    let args = beside("");
    let measured = || {
        let axes = "tokens=1".parse().unwrap();
        let points = sweep::run(&args, &args.plans().unwrap(), &axes, &out).unwrap();
        assert!(points.len() == 1 && points[0].nccl.as_ref().unwrap().version == "2.28.3");
        std::fs::read_to_string(&out).unwrap()
    };
    let first = measured();
    assert_eq!(measured(), first);
    let others = [
        first.replace("2.28.3", "2.27.3"),
        first.replace("\"variables\":{", "\"variables\":{\"NCCL_OTHER\":\"1\","),
        first.replace("\"nccl\":", "\"no_nccl\":"),
    ];
    for other in others {
        // One variable more has no comma behind it where none was set.
        let other = other.replace("\"1\",}", "\"1\"}");
        assert_ne!(other, first);
        std::fs::write(&out, &other).unwrap();
        let lines = measured();
        assert!(lines.starts_with(&other) && lines.lines().count() == 2, "{lines}");
    }
}

/// A libnccl whose function `name` gives a wrong byte ends the measurement, which names the
/// operation.
fn wrong_bytes(test: &str, name: &str, operation: &str) {
    if !alone_with(test, Some(&[&format!("--cfg=wrong=\"{name}\"")])) {
        return;
    }
    let error = measure_points(&beside("").plans().unwrap(), &()).unwrap_err();
    let message = error.message.unwrap();
    assert_eq!(error.code, FAILED, "{message}");
    assert!(message.contains(operation) && message.contains("byte 0 of row"), "{message}");
}

#[test]
fn messages_that_bring_wrong_bytes_are_no_baseline() {
    wrong_bytes("messages_that_bring_wrong_bytes_are_no_baseline", "ncclRecv", "all-to-all dispatch");
}

#[test]
fn a_gather_that_brings_wrong_bytes_is_no_baseline() {
    wrong_bytes("a_gather_that_brings_wrong_bytes_is_no_baseline", "ncclAllGather", "all-gather dispatch");
}

#[test]
fn a_reduction_that_sums_wrongly_is_no_baseline() {
    wrong_bytes(
        "a_reduction_that_sums_wrongly_is_no_baseline",
        "ncclReduceScatter",
        "reduce-scatter combine",
    );
}

#[test]
fn without_a_libnccl_the_command_says_what_to_do() {
    if !alone_with("without_a_libnccl_the_command_says_what_to_do", None) {
        return;
    }
    let error = run(&Bench { tool: None, args: beside("") }).unwrap_err();
    let message = error.message.unwrap();
    assert_eq!(error.code, SKIPPED, "{message}");
    for part in ["NCCL is not available", "/nowhere/libnccl.so.2", "pip install", NCCL_LIBRARY] {
        assert!(message.contains(part), "{part}: {message}");
    }
}

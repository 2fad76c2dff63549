//! `benches/larger.sh`, which measures on machines that have no cargo: each of its command lines is
//! one that this command accepts.

use std::path::Path;
use std::process::{Command, Output};

use epoxide_testing::tier;

use super::launcher::text;

fn larger(arguments: &[&str]) -> Output {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/larger.sh");
    Command::new("bash").arg(script).args(arguments).output().unwrap()
}

#[test]
fn every_run_passes_on_virtual_gpus() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    // All runs that are possible here, without those that need another program or NVIDIA's tools.
    let listed = text(&larger(&["--list", "--gpus", "2"]).stdout);
    let needs_more = ["survivors", "killed", "residency", "ab-", "sanitizer"];
    let can_run = listed.lines().filter(|name| !needs_more.iter().any(|word| name.contains(word)));
    let runs: Vec<&str> = can_run.step_by(tier::pick(5, 1)).collect();
    let program = env!("CARGO_BIN_EXE_epoxide");
    let output = larger(&["--virtual", "--program", program, "--out", out, "--only", &runs.join(",")]);
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{printed}{}", text(&output.stderr));
    assert!(printed.contains(" 0 failed, 0 left out, "), "{printed}");

    for name in &runs {
        assert!(printed.contains(&format!("\n-- {name}\n")), "{name} is missing in {printed}");
    }
    let summary = std::fs::read_to_string(folder.path().join("summary.txt")).unwrap();
    assert!(summary.contains("combine"), "{summary}");
    let packed = Command::new("tar").arg("-tzf").arg(folder.path().join("results.tar.gz")).output().unwrap();
    let packed = text(&packed.stdout);
    for name in &runs {
        assert!(packed.contains(&format!("{name}.txt")), "{name}.txt is missing in {packed}");
    }
    assert!(packed.contains("ll-fp8.json"), "{packed}");
}

#[test]
fn a_limit_leaves_runs_out_and_says_where_to_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    let all = ["--virtual", "--program", env!("CARGO_BIN_EXE_epoxide"), "--out", out, "--limit", "1"];
    let output = larger(&all);
    let printed = text(&output.stdout);
    assert!(output.status.success() && printed.contains("0 runs, 0 failed"), "{printed}");
    assert!(printed.contains("go on with: --from ll-fp8"), "{printed}");
}

#[test]
fn options_that_leave_no_run_are_a_failure() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    let program = env!("CARGO_BIN_EXE_epoxide");
    // The only run comes before the first one.
    let none = ["--virtual", "--program", program, "--out", out, "--from", "ll-bf16", "--only", "ll-fp8"];
    let output = larger(&none);
    let printed = text(&output.stdout);
    assert!(output.status.code() == Some(1) && printed.contains("no run was made"), "{printed}");
}

#[test]
fn arguments_that_are_wrong_are_named() {
    let program = env!("CARGO_BIN_EXE_epoxide");
    let all = ["--program", program, "--out", "x", "--virtual"];
    let with = |more: &[&'static str]| [&all[..], more].concat();
    let killed = with(&["--from", "killed"]);
    let compared = with(&["--only", "ll-fp8,ab-ll"]);
    let cases: [(&[&str], &str); 7] = [
        (&["--out", "x"], "--program: missing"),
        (&["--program", program], "--out: missing"),
        (&["--program", program, "--out", "x", "--gpus", "3"], "--gpus 3: must be 2, 4 or 8"),
        (&["--program", program, "--out", "x", "--virtual", "--from", "ht"], "ht: no run has this name"),
        (&["--fast"], "--fast: no such option"),
        (&killed, "killed: needs --tests"),
        (&compared, "ab-ll: needs --before"),
    ];
    for (arguments, expected) in cases {
        let output = larger(arguments);
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(expected), "{arguments:?}: {said}");
    }
}

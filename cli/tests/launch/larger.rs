//! `benches/larger.sh`, which measures on machines that have no cargo: each of its command lines is
//! one that this command accepts.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use epoxide_testing::tier;
use rustix::process::{Pid, Signal, kill_process};

use super::PATIENCE;
use super::launcher::{text, write_program};

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new("bash");
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/larger.sh")).args(arguments);
    command
}

fn larger(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
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
fn a_signal_ends_the_run_under_way_and_leaves_out_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let started = path("started");
    let stub =
        format!("#!/bin/sh\n[ $1 = --version ] && exit\n: >'{}'\nexec sleep 1000\n", started.display());
    write_program(path("stub"), &stub);
    let (program, out) = (path("stub"), path("out"));
    let [program, out] = [&program, &out].map(|path| path.to_str().unwrap());
    let mut command = command(&["--virtual", "--program", program, "--out", out, "--from", "trips-fp8"]);
    let running = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while !started.exists() {
        assert!(start.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(10));
    }
    kill_process(Pid::from_raw(running.id() as i32).unwrap(), Signal::TERM).unwrap();
    let output = running.wait_with_output().unwrap();
    let printed = text(&output.stdout);
    assert_eq!(output.status.code(), Some(128 + 15), "{printed}{}", text(&output.stderr));
    for part in
        ["left out at signal 15: trips-fp8 ll-trips-fp8", "go on with: --from trips-fp8", "\n0 runs, "]
    {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    assert!(Path::new(out).join("results.tar.gz").exists());
}

/// A program that lacks a feature skips everything.
#[test]
fn a_program_that_skips_every_run_is_a_failure() {
    let folder = tempfile::tempdir().unwrap();
    let [program, out] = ["stub", "out"].map(|name| folder.path().join(name).to_str().unwrap().to_owned());
    write_program(&program, "#!/bin/sh\n[ $1 = --version ] && exit\nexit 77\n");
    let output = larger(&["--virtual", "--program", &program, "--out", &out, "--only", "ll-fp8,ht-fp8"]);
    let printed = text(&output.stdout);
    assert!(output.status.code() == Some(1) && printed.contains("no run passed"), "{printed}");
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

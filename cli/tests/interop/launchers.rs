//! Rust ranks that torchrun and mpirun start.

use std::path::Path;
use std::process::Command;

use epoxide_testing::HeldPort;

use crate::tools::{Running, mpirun, python};

/// A small job of ours: every rank dispatches and combines, and compares with the oracle.
const JOB: [&str; 5] = ["roundtrip", "--tokens", "16", "--hidden", "256"];

fn epoxide() -> &'static str {
    env!("CARGO_BIN_EXE_epoxide")
}

fn torchrun(python: &Path, flags: &[&str]) -> Command {
    let mut command = Command::new(python);
    command.args(["-W", "ignore", "-m", "torch.distributed.run", "--no-python"]).args(flags);
    command
}

/// The job's result, which one rank prints.
fn passed_once(output: &str, ranks: u32) {
    assert_eq!(output.matches("PASS").count(), 1, "{output}");
    assert!(output.contains(&format!("num_ranks={ranks} ")), "{output}");
}

pub fn under_torchrun() {
    let python = python();
    let mut command = torchrun(&python, &["--standalone", "--nproc-per-node", "3", epoxide()]);
    command.args(JOB);
    passed_once(&Running::start(command).succeed(), 3);
}

pub fn under_torchrun_with_a_static_rendezvous() {
    let python = python();
    let held = HeldPort::any().unwrap();
    let port = held.number().to_string();
    let flags = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", &port, epoxide()];
    let mut command = torchrun(&python, &flags);
    command.args(JOB);
    passed_once(&Running::start(command).succeed(), 2);
}

pub fn under_torchrun_where_rank_0_serves() {
    let python = python();
    let mut command = torchrun(&python, &["--standalone", "--nproc-per-node", "2", "sh", "-c"]);
    command.env("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1");
    let script =
        format!(r#"[ "$TORCHELASTIC_USE_AGENT_STORE" = False ] && exec {} {}"#, epoxide(), JOB.join(" "));
    command.arg(script);
    passed_once(&Running::start(command).succeed(), 2);
}

pub fn an_error_of_a_rank_ends_torchrun() {
    let python = python();
    let mut command = torchrun(&python, &["--standalone", "--nproc-per-node", "2", "sh", "-c"]);
    // Rank 1 has a world size of three.
    command.arg(format!(
        r#"[ "$RANK" = 0 ] || WORLD_SIZE=3; export WORLD_SIZE; exec {} {} --timeout 60"#,
        epoxide(),
        JOB.join(" ")
    ));
    let (code, output) = Running::start(command).end();
    assert_ne!(code, Some(0), "{output}");
    assert!(output.contains(": the rank that came first says "), "{output}");
}

pub fn a_restart_of_torchrun_finds_a_clean_store() {
    let python = python();
    let flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "sh", "-c"];
    let mut command = torchrun(&python, &flags);
    // The first start runs to its end, and fails after that.
    let script = format!(r#"{} {} && [ "$TORCHELASTIC_RESTART_COUNT" = 1 ]"#, epoxide(), JOB.join(" "));
    command.arg(script);
    let output = Running::start(command).succeed();
    assert_eq!(output.matches("PASS").count(), 2, "{output}");
}

pub fn under_mpirun() {
    // Otherwise all runs of a user share a folder in /tmp, and one of two concurrent runs fails to
    // make it.
    let files = tempfile::tempdir().unwrap();
    let mut command = mpirun(files.path());
    command.args(["-n", "4", epoxide()]).args(JOB);
    passed_once(&Running::start(command).succeed(), 4);
}

pub fn under_mpirun_where_rank_0_serves() {
    let files = tempfile::tempdir().unwrap();
    let mut command = mpirun(files.path());
    let held = HeldPort::any().unwrap();
    let port = format!("MASTER_PORT={}", held.number());
    command.args(["-x", "MASTER_ADDR=127.0.0.1", "-x", &port, "-n", "3", epoxide()]).args(JOB);
    passed_once(&Running::start(command).succeed(), 3);
}

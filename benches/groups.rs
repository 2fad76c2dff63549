//! Latency of a group's operations over the mesh, 8 processes of this host, beside PyTorch's Gloo.
//!
//! `cargo bench --bench groups`. `tests/interop/gloo_bench.py` measures Gloo, run by the Python
//! that `EPOXIDE_TORCH_PYTHON` names, else by that of `target/torch-venv` (see
//! `tests/interop/setup.sh`), if there is one.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use epoxide::group::{Collectives, FileStore, MeshGroup, MeshOptions, ProcessGroup, ReduceOp, Sockets};

const RANKS: u32 = 8;
/// Variable of a rank's process: its number.
const RANK: &str = "EPOXIDE_BENCH_RANK";
/// The folder of the store.
const FOLDER: &str = "EPOXIDE_BENCH_FOLDER";
/// `unix` or `tcp`.
const SOCKETS: &str = "EPOXIDE_BENCH_SOCKETS";

fn measure(group: &MeshGroup, rounds: u32, operation: impl Fn()) -> Duration {
    (0..rounds / 10 + 1).for_each(|_| operation());
    group.barrier(group.timeout()).expect("barrier");
    let start = Instant::now();
    (0..rounds).for_each(|_| operation());
    start.elapsed() / rounds
}

fn rank_main(rank: u32) {
    let folder = std::env::var_os(FOLDER).expect("the parent sets it");
    let name = std::env::var(SOCKETS).expect("the parent sets it");
    let sockets = if name == "tcp" { Sockets::Tcp } else { Sockets::Auto };
    let store = Arc::new(FileStore::new(PathBuf::from(folder)).expect("opens the store"));
    let options = MeshOptions { sockets, interface: Some("lo".to_owned()), ..MeshOptions::default() };
    let group = MeshGroup::new(store, rank, RANKS, "bench", options).expect("joins");
    let barrier = measure(&group, 2000, || group.barrier(group.timeout()).expect("barrier"));
    let gather = measure(&group, 1000, || drop(group.all_gather(&[7; 1024]).expect("all_gather")));
    let mut data = vec![1.0f32; 1 << 18];
    let data = std::cell::RefCell::new(&mut data);
    let reduce = measure(&group, 50, || {
        let mut data = data.borrow_mut();
        data.fill(1.0);
        group.all_reduce(&mut data, ReduceOp::Sum).expect("all_reduce");
    });
    if rank == 0 {
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        println!(
            "epoxide over {name}, {RANKS} ranks: barrier {:.1}µs, all_gather of 1 KiB {:.1}µs, all_reduce of 1 MiB {:.1}µs",
            micros(barrier),
            micros(gather),
            micros(reduce)
        );
    }
    group.destroy().expect("destroy");
}

fn main() {
    if let Ok(rank) = std::env::var(RANK) {
        return rank_main(rank.parse().expect("a number"));
    }
    for sockets in ["unix", "tcp"] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let rank = |rank: u32| {
            let mut command = Command::new(std::env::current_exe().expect("this program"));
            command.env(RANK, rank.to_string()).env(FOLDER, folder.path()).env(SOCKETS, sockets);
            command.spawn().expect("starts a rank")
        };
        let ranks: Vec<_> = (0..RANKS).map(rank).collect();
        for mut rank in ranks {
            assert!(rank.wait().expect("waits for a rank").success(), "a rank failed");
        }
    }
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let python = std::env::var_os("EPOXIDE_TORCH_PYTHON")
        .map_or_else(|| root.join("target/torch-venv/bin/python"), PathBuf::from);
    if !python.exists() {
        return println!("gloo: no PyTorch at {}, skipped", python.display());
    }
    let status =
        Command::new(python).args(["-W", "ignore"]).arg(root.join("tests/interop/gloo_bench.py")).status();
    if !status.as_ref().is_ok_and(|status| status.success()) {
        println!("gloo: gloo_bench.py failed: {status:?}");
    }
}

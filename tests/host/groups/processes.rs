//! Ranks as processes: many of them, and ones that are killed or stopped in the middle of an
//! operation.

use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use epoxide::Result;
use epoxide::group::{Collectives, FLIGHT_RECORDER, FileStore, MeshGroup, ProcessGroup, ReduceOp, Store};
use epoxide::internal::group::{Call, P2p};
use epoxide_testing::alone::one_test;
use rustix::process::{Pid, Signal, getpid, kill_process};

use super::harness::{PATIENCE, options};

/// Variable that turns `rank_process` into a rank: `RANK SIZE MODE SIGNAL`.
const RANK_PROCESS: &str = "EPOXIDE_TEST_RANK";
const DIRECTORY: &str = "EPOXIDE_TEST_DIRECTORY";
const VICTIM: u32 = 2;
/// The deadline by which a stopped rank is found. A killed rank is found at once, because its
/// connections break.
const STOPPED: Duration = Duration::from_secs(5);
const MODES: [&str; 13] = [
    "barrier",
    "monitored_barrier",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce",
    "all_reduce",
    "large_all_reduce",
    "reduce_scatter",
    "all_to_all",
    "send/recv",
    "exchange_fds",
];

fn operation(group: &MeshGroup, mode: &str, round: u32) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    let root = round % size;
    let part = vec![rank; 500];
    match mode {
        "barrier" => group.barrier(group.timeout()),
        "monitored_barrier" => group.monitored_barrier(group.timeout()),
        "broadcast" => group.broadcast(root, &[1; 3000]).map(drop),
        "all_gather" => group.all_gather(&[1; 3000]).map(drop),
        "gather" => group.gather(root, &part).map(drop),
        "scatter" => group.scatter(root, &vec![part; size as usize]).map(drop),
        "reduce" => group.reduce(root, &mut vec![1i64; 700], ReduceOp::Sum),
        "all_reduce" => group.all_reduce(&mut vec![1i64; 700], ReduceOp::Sum),
        "large_all_reduce" => group.all_reduce(&mut vec![1f32; 1 << 18], ReduceOp::Sum),
        "reduce_scatter" => group
            .reduce_scatter(&vec![1u32; size as usize * 50], &vec![50; size as usize], ReduceOp::Max)
            .map(drop),
        "all_to_all" => group.all_to_all(&vec![part; size as usize]).map(drop),
        "exchange_fds" => group.exchange_fds(&[std::io::stderr().as_fd()]).map(drop),
        _ => {
            let send = P2p::Send { to: (rank + 1) % size, tag: 1, data: vec![1; 9000] };
            let from = Some((rank + size - 1) % size);
            group.call(Call::P2p(vec![send, P2p::Recv { from, tag: 1 }]), group.timeout()).map(drop)
        }
    }
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn running_threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Not a test: the main function of a rank, if the environment names one.
#[test]
fn rank_process() {
    let Ok(text) = std::env::var(RANK_PROCESS) else { return };
    let fields: Vec<&str> = text.split(' ').collect();
    let (rank, size, mode) = (fields[0].parse::<u32>().unwrap(), fields[1].parse().unwrap(), fields[2]);
    let directory = std::env::var(DIRECTORY).unwrap();
    let store: Arc<dyn Store> = Arc::new(FileStore::new(&directory).unwrap());
    if mode == "many" {
        let group = MeshGroup::new(store, rank, size, "many", options(PATIENCE)).unwrap();
        let mut sum = vec![rank; 1000];
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, vec![size * (size - 1) / 2; 1000]);
        for _ in 0..10 {
            group.barrier(group.timeout()).unwrap();
        }
        let all = group.all_gather_slices(&[rank]).unwrap();
        assert_eq!(all.concat(), (0..size).collect::<Vec<_>>());
        group.destroy().unwrap();
        return;
    }

    if mode == "missing" {
        return shrink_by_the_missing(store, rank, size, &directory);
    }

    let before = (open_files(), running_threads());
    let timeout = if fields[3] == "kill" { PATIENCE } else { STOPPED };
    let group = MeshGroup::new(store, rank, size, mode, options(timeout)).unwrap();
    group.barrier(PATIENCE).unwrap();
    let rounds = Arc::new(AtomicU32::new(0));
    if rank == VICTIM {
        let signal = if fields[3] == "kill" { Signal::KILL } else { Signal::STOP };
        let rounds = rounds.clone();
        std::thread::spawn(move || {
            // All ranks have been the root twice, so that none is in the barrier of round 0.
            while rounds.load(Ordering::Relaxed) < 2 * size {
                std::thread::sleep(Duration::from_millis(1));
            }
            kill_process(getpid(), signal).unwrap();
        });
    }
    // A background operation as well, so that there is a worker to be ended.
    let mut round = 0;
    let error = loop {
        rounds.store(round, Ordering::Relaxed);
        let background = (round == 0).then(|| group.start_barrier());
        if let Some(Err(error)) = background.map(|work| work.wait()) {
            break error;
        }
        if let Err(error) = operation(&group, mode, round) {
            break error;
        }
        round += 1;
    };
    drop(group);
    let after = (open_files(), running_threads());
    std::fs::write(format!("{directory}/report.{rank}"), format!("{error}\n{before:?} {after:?}\n")).unwrap();
}

/// Ranks that die between calls, before any call of the group has failed because of them.
const LOST: [u32; 2] = [1, VICTIM];

fn shrink_by_the_missing(store: Arc<dyn Store>, rank: u32, size: u32, directory: &str) {
    let group = MeshGroup::new(store.clone(), rank, size, "missing", options(PATIENCE)).unwrap();
    group.barrier(PATIENCE).unwrap();
    assert_eq!(group.missing_ranks(Duration::ZERO).unwrap(), Vec::<u32>::new());
    group.barrier(PATIENCE).unwrap();
    // A rank that has passed the barrier dies only once all others have passed it, too.
    let passed = |rank: u32| format!("passed/{rank}");
    store.set(&passed(rank), b"1").unwrap();
    if LOST.contains(&rank) {
        let all: Vec<String> = (0..size).map(passed).collect();
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        store.wait(&all, PATIENCE).unwrap();
        kill_process(getpid(), Signal::KILL).unwrap();
    }
    let start = Instant::now();
    let missing = loop {
        let missing = group.missing_ranks(Duration::from_millis(100)).unwrap();
        assert!(start.elapsed() < PATIENCE, "rank {rank} misses {missing:?}");
        if missing.len() >= LOST.len() {
            break missing;
        }
    };
    let left = group.shrink_group(&missing).unwrap();
    left.barrier(PATIENCE).unwrap();
    std::fs::write(format!("{directory}/report.{rank}"), format!("{missing:?} {}", left.size())).unwrap();
}

#[test]
fn all_that_were_killed_are_missing_without_a_call_that_fails() {
    let directory = tempfile::tempdir().unwrap();
    let mut ranks: Vec<_> = (0..4).map(|rank| spawn(rank, 4, "missing", "none", directory.path())).collect();
    for (rank, process) in (0u32..).zip(&mut ranks) {
        let status = process.0.wait().unwrap();
        if !LOST.contains(&rank) {
            assert!(status.success(), "rank {rank}");
            let report = std::fs::read_to_string(directory.path().join(format!("report.{rank}"))).unwrap();
            assert_eq!(report, "[1, 2] 2", "rank {rank}");
        }
    }
}

/// A rank; killed and waited for when dropped.
struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn spawn(rank: u32, size: u32, mode: &str, signal: &str, directory: &Path) -> Rank {
    let child = one_test("groups::processes::rank_process")
        .env(RANK_PROCESS, format!("{rank} {size} {mode} {signal}"))
        .env(DIRECTORY, directory)
        .env(FLIGHT_RECORDER, directory.join("flight"))
        .stdout(Stdio::null())
        .spawn();
    Rank(child.unwrap())
}

/// Sends the signal to the victim of 4 ranks in the middle of each operation. The operations are
/// tried at the same time, because the tests mostly wait.
fn faults(signal: &str) {
    std::thread::scope(|scope| {
        for mode in MODES {
            scope.spawn(move || fault(mode, signal));
        }
    });
}

fn fault(mode: &str, signal: &str) {
    let directory = tempfile::tempdir().unwrap();
    let mut ranks: Vec<_> = (0..4).map(|rank| spawn(rank, 4, mode, signal, directory.path())).collect();
    let start = Instant::now();
    for (rank, process) in (0u32..).zip(&mut ranks) {
        if rank == VICTIM {
            continue;
        }
        while process.0.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < PATIENCE, "{mode} {signal}: rank {rank} still runs");
            std::thread::sleep(Duration::from_millis(5));
        }
        let report = std::fs::read_to_string(directory.path().join(format!("report.{rank}"))).unwrap();
        let (error, leaks) = report.trim_end().rsplit_once('\n').unwrap();
        assert!(error.contains(&format!("rank {VICTIM}")), "{mode} {signal}, rank {rank}: {error}");
        let named = mode.trim_start_matches("large_");
        assert!(error.contains(named), "{mode} {signal}, rank {rank}: {error}");
        let (before, after) = leaks.split_once(") ").unwrap();
        assert_eq!(format!("{before})"), after, "{mode} {signal}, rank {rank}: files and threads");
        let name = mode.replace('/', "_");
        let flight = std::fs::read(directory.path().join(format!("flight.{name}.rank{rank}.json"))).unwrap();
        let flight: serde_json::Value = serde_json::from_slice(&flight).unwrap();
        let last = flight["operations"].as_array().unwrap().last().unwrap();
        assert_eq!(last["state"], "failed", "{mode} {signal}, rank {rank}: {flight}");
    }
    let victim = Pid::from_child(&ranks[VICTIM as usize].0);
    kill_process(victim, Signal::KILL).unwrap();
}

#[test]
fn a_rank_killed_in_each_operation() {
    faults("kill");
}

#[test]
fn a_rank_stopped_in_each_operation() {
    faults("stop");
}

#[test]
fn sixty_four_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let start = Instant::now();
    let mut ranks: Vec<_> = (0..64).map(|rank| spawn(rank, 64, "many", "none", directory.path())).collect();
    for (rank, process) in ranks.iter_mut().enumerate() {
        assert!(process.0.wait().unwrap().success(), "rank {rank}");
    }
    println!("64 ranks from start to end: {:?}", start.elapsed());
}

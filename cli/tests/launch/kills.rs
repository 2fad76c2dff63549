//! Launches that are killed at any moment leave nothing behind.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use epoxide_testing::{HeldPort, tier};
use rustix::process::{Pid, Signal, kill_process};

use crate::launcher::{epoxide, launcher, write_program};

/// Number of launches to kill, in place of the tier's; 200 take about five minutes.
const COUNT: &str = "EPOXIDE_TEST_KILLS";
/// Marks the processes of a launch.
const MARK: &str = "EPOXIDE_TEST_MARK";
/// Longest time from the launcher's end until no process is left, on a busy machine. Leaked
/// processes stay for longer.
const LEFT: Duration = Duration::from_secs(60);
/// Every launcher ends within this: the others detect a rank's failure within 5 s, then end within
/// 5 s.
const END: Duration = Duration::from_secs(120);
const SEED: u64 = 0x5eed;

/// SplitMix64, the same in every version, so that a kill can be made again.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

#[derive(Debug, Clone, Copy)]
enum What {
    /// A launcher of round trips.
    Launch,
    /// The command that starts its own ranks.
    Roundtrip,
    /// Launchers of two nodes.
    Nodes,
    /// A launcher of shells that start something that would outlive them.
    Shells,
}

impl What {
    fn start(self, temporary: &Path, mark: &str) -> Vec<Child> {
        let exe = env!("CARGO_BIN_EXE_epoxide");
        let trip =
            ["roundtrip", "--tokens", "16", "--hidden", "128", "--iterations", "100000", "--timeout", "10"];
        let ranks = [&[exe], &trip[..]].concat();
        let port = HeldPort::any().unwrap();
        let endpoint = format!("127.0.0.1:{}", port.number());
        let node = |node: &str| {
            let flags =
                ["--nnodes", "2", "--node-rank", node, "--rdzv-endpoint", &endpoint, "--node-timeout", "2"];
            launcher(&[&["--nproc-per-node", "1", "--grace", "2"], &flags[..]].concat(), &ranks)
        };
        let launchers = match self {
            What::Launch => vec![launcher(&["--nproc-per-node", "2"], &ranks)],
            What::Roundtrip => {
                vec![epoxide(&[&trip[..], &["--processes", "--ranks-per-node", "2"]].concat())]
            }
            What::Nodes => vec![node("0"), node("1")],
            What::Shells => vec![launcher(&["--nproc-per-node", "2"], &["sh", "-c", "sleep 1000 & wait"])],
        };
        let start = |mut launcher: std::process::Command| {
            launcher.env("TMPDIR", temporary).env(MARK, mark).stdout(Stdio::null()).stderr(Stdio::null());
            launcher.spawn().unwrap()
        };
        launchers.into_iter().map(start).collect()
    }
}

/// The processes with the mark that have not ended, but the given ones.
fn marked(mark: &str, but: &[Child]) -> Vec<i32> {
    let wanted = format!("{MARK}={mark}");
    let numbers = fs::read_dir("/proc").unwrap().flatten();
    let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    // The environment of an ended process is empty.
    let has = |pid: &i32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes())
    };
    numbers.filter(|pid| !but.iter().any(|child| child.id() as i32 == *pid)).filter(has).collect()
}

/// The sockets of these processes, by inode.
fn sockets(pids: impl Iterator<Item = i32>) -> BTreeSet<String> {
    let of = |pid: i32| fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let targets = pids.flat_map(of).filter_map(|entry| fs::read_link(entry.path()).ok());
    let inode =
        |target: PathBuf| Some(target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned());
    targets.filter_map(inode).collect()
}

/// The sockets among `of` that the kernel still has.
fn open_sockets(of: &BTreeSet<String>) -> BTreeSet<String> {
    let tables = ["unix", "tcp", "tcp6", "udp", "udp6"].map(|name| format!("/proc/net/{name}"));
    let text = tables.map(|table| fs::read_to_string(table).unwrap_or_default()).concat();
    text.split_whitespace().filter(|word| of.contains(*word)).map(str::to_owned).collect()
}

/// Names of shared memory that this program could have made.
fn shared_memory() -> Vec<PathBuf> {
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| path.to_string_lossy().contains("epoxide")).collect()
}

/// Waits until `left` returns nothing or the time is over. Returns the rest.
fn wait_none<T>(limit: Duration, left: impl Fn() -> Vec<T>) -> (Vec<T>, Duration) {
    let start = Instant::now();
    loop {
        let now = left();
        if now.is_empty() || start.elapsed() >= limit {
            return (now, start.elapsed());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn pid(number: i32) -> Pid {
    Pid::from_raw(number).unwrap()
}

#[test]
fn launches_killed_at_any_moment_leave_nothing() {
    let count: u64 = std::env::var(COUNT).map_or_else(|_| tier::pick(2, 12), |text| text.parse().unwrap());
    let mut draw = Draw(SEED);
    let (mut slowest, mut longest, mut swept) = (Duration::ZERO, Duration::ZERO, 0);
    for number in 0..count {
        let what = [What::Launch, What::Roundtrip, What::Nodes, What::Shells][number as usize % 4];
        let signal = [Signal::INT, Signal::TERM, Signal::KILL][draw.below(3) as usize];
        let (at_rank, which, moment) = (draw.below(2) == 1, draw.next() as usize, draw.below(600));
        let case = format!("kill {number}: {what:?}, {signal:?}, rank: {at_rank}, after {moment} ms");

        let temporary = tempfile::tempdir().unwrap();
        let mark = format!("{}-{number}", std::process::id());
        let mut launchers = what.start(temporary.path(), &mark);
        std::thread::sleep(Duration::from_millis(moment));
        let ranks = marked(&mark, &launchers);
        let had = sockets(ranks.iter().copied().chain(launchers.iter().map(|child| child.id() as i32)));
        let launcher = launchers[which % launchers.len()].id() as i32;
        let victim = if at_rank && !ranks.is_empty() { ranks[which % ranks.len()] } else { launcher };
        let launcher_killed = victim == launcher && signal == Signal::KILL;
        // The victim may just have ended, as a shell's process does when another one is ended.
        let _ = kill_process(pid(victim), signal);

        let start = Instant::now();
        // A shell whose child was killed exits with success, and then nothing ends the others.
        if matches!(what, What::Shells) && victim != launcher {
            std::thread::sleep(Duration::from_millis(200));
            let _ = kill_process(pid(launcher), Signal::TERM);
        }
        // Launchers wait for one that was killed before it joined, up to five minutes, as for a
        // late one.
        if matches!(what, What::Nodes) && ranks.is_empty() {
            for other in launchers.iter().map(|child| child.id() as i32).filter(|other| *other != launcher) {
                let _ = kill_process(pid(other), Signal::TERM);
            }
        }
        for launcher in &mut launchers {
            while launcher.try_wait().unwrap().is_none() {
                if start.elapsed() > END {
                    launcher.kill().unwrap();
                    panic!("{case}: the launcher does not end");
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        slowest = slowest.max(start.elapsed());
        let folders =
            || fs::read_dir(temporary.path()).unwrap().flatten().map(|entry| entry.path()).collect();
        if launcher_killed {
            let next = crate::launcher::launcher(&["--nproc-per-node", "1"], &["true"])
                .env("TMPDIR", temporary.path())
                .output()
                .unwrap();
            assert!(next.status.success(), "{case}: {next:?}");
            swept += 1;
        }
        let end = Instant::now();
        let (processes, took) = wait_none(LEFT, || marked(&mark, &[]));
        assert!(processes.is_empty(), "{case}: processes are left: {processes:?}");
        longest = longest.max(took);
        let left = || LEFT.saturating_sub(end.elapsed());
        let (folders, _) = wait_none(left(), folders);
        assert!(folders.is_empty(), "{case}: folders are left: {folders:?}");
        let (open, _) = wait_none(left(), || open_sockets(&had).into_iter().collect());
        assert!(open.is_empty(), "{case}: sockets are left: {open:?}");
        let shared = shared_memory();
        assert!(shared.is_empty(), "{case}: shared memory is left: {shared:?}");
    }
    println!(
        "{count} kills, {swept} of them of a launcher by SIGKILL: launchers ended within {slowest:?}, and {longest:?} later \
         nothing of them was left"
    );
}

#[test]
fn a_killed_comparison_leaves_no_program() {
    let folder = tempfile::tempdir().unwrap();
    let [program, started] = ["stub", "started"].map(|name| folder.path().join(name));
    write_program(&program, &format!("#!/bin/sh\necho $$ >'{}'\nexec sleep 1000\n", started.display()));
    let program = program.to_str().unwrap();
    let mut command = epoxide(&["bench", "ab", "--a", program, "--b", program]);
    let mut comparison = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let number = || fs::read_to_string(&started).ok().filter(|text| text.ends_with('\n'));
    wait_none(END, || if number().is_none() { vec![()] } else { Vec::new() });
    let number = number().expect("the program has started");
    comparison.kill().unwrap();
    comparison.wait().unwrap();
    crate::wait_gone(number.trim());
}

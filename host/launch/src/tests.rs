//! Ranks as processes.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::plan::{Launch, Nodes};
use super::signals::Signals;
use super::*;
use crate::error::Result;
use crate::group::{MeshGroup, ProcessGroup, RANK, rendezvous};

/// Longer than anything takes on a busy machine that is meant to end.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The role of a re-executed test binary.
const ROLE: &str = "EPOXIDE_TEST_ROLE";

/// This test binary again, as a rank that runs [`as_a_rank`] in `role`.
fn rank_command(role: &str) -> Result<Command> {
    let mut command = one_test("tests::as_a_rank");
    command.env(ROLE, role).stdout(Stdio::null());
    Ok(command)
}

/// The ranks of the tests below; does nothing as a test of its own.
#[test]
fn as_a_rank() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let group = rendezvous(TIMEOUT);
    let rank: u32 = std::env::var(RANK).unwrap().parse().unwrap();
    match role.as_str() {
        "fds" => exchange_files(&group.unwrap()),
        "fail" if rank == 1 => std::process::exit(7),
        "fail" => {
            // From the connection that breaks, or, when late, from the launcher through the store.
            let error = group.and_then(|group| group.barrier(TIMEOUT)).unwrap_err();
            assert!(error.to_string().contains("rank 1"), "{error}");
        }
        "hang" if rank == 0 => std::process::abort(),
        "hang" => std::thread::sleep(TIMEOUT),
        other => panic!("no role {other}"),
    }
}

fn exchange_files(group: &MeshGroup) {
    let mut own = tempfile::tempfile().unwrap();
    own.write_all(&[group.rank() as u8]).unwrap();
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    // The first exchange opens what the group keeps.
    drop(group.exchange_fds(&[own.as_fd()]).unwrap());
    let before = open();
    for _ in 0..50 {
        let all = group.exchange_fds(&[own.as_fd()]).unwrap();
        for (peer, mut fds) in all.into_iter().enumerate() {
            assert_eq!(fds.len(), 1);
            let mut byte = [0xff];
            File::from(fds.remove(0)).read_exact_at(&mut byte, 0).unwrap();
            assert_eq!(byte, [peer as u8]);
        }
    }
    let after = open();
    // No rank may leave, and so close a connection, before all have counted.
    group.barrier(TIMEOUT).unwrap();
    assert_eq!(after, before, "descriptors leak");
}

#[test]
fn processes_exchange_descriptors() {
    let outcome = spawn_ranks(3, TIMEOUT, |_| rank_command("fds")).unwrap();
    assert_eq!(outcome, RankExits { exits: vec![RankExit::Code(0); 3], first_failure: None });
    assert_eq!(outcome.code(), 0);
}

#[test]
fn a_failing_process_fails_the_others_fast() {
    let start = Instant::now();
    let outcome = spawn_ranks(3, TIMEOUT, |_| rank_command("fail")).unwrap();
    assert_eq!(outcome.exits, [RankExit::Code(0), RankExit::Code(7), RankExit::Code(0)]);
    assert_eq!((outcome.first_failure, outcome.code()), (Some(1), 7));
    assert!(start.elapsed() < TIMEOUT);
}

#[test]
fn a_hanging_process_is_ended() {
    let outcome = spawn_ranks(2, Duration::from_millis(50), |_| rank_command("hang")).unwrap();
    let (abort, term) = (Signal::ABORT.as_raw(), Signal::TERM.as_raw());
    assert_eq!(outcome.exits, [RankExit::Signal(abort), RankExit::Signal(term)]);
    assert_eq!((outcome.first_failure, outcome.code()), (Some(0), 128 + abort));
}

#[test]
fn exits_are_known_though_the_launcher_was_started_with_sigchld_ignored() {
    if std::env::var_os(ROLE).is_none() {
        let mut launcher =
            one_test("tests::exits_are_known_though_the_launcher_was_started_with_sigchld_ignored");
        let output = launcher.env(ROLE, "launcher").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    // SAFETY: the action is no function of this process.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    let command = || {
        let mut command = Command::new("sh");
        command.args(["-c", "true"]);
        command
    };
    let outcome = spawn_ranks(2, TIMEOUT, |_| Ok(command())).unwrap();
    assert_eq!(outcome, RankExits { exits: vec![RankExit::Code(0); 2], first_failure: None });
}

#[test]
fn waits_may_be_longer_than_the_clock_can_tell() {
    let long = Launch { grace: Duration::MAX, kill_timeout: Duration::MAX, relay: false, ..Launch::new(2) };
    for (settle, fails, other) in [
        // The other rank ends by itself.
        (Duration::MAX, "exit 7", "exit 0"),
        // The other rank ends at SIGTERM.
        (Duration::ZERO, "exit 7", "exec sleep 1000"),
    ] {
        let launch = Launch { settle, ..long.clone() };
        let ended = launch.run(None, |environment| {
            let mut command = Command::new("sh");
            command.args(["-c", if environment.rank() == 1 { fails } else { other }]);
            Ok(command)
        });
        assert_eq!(ended.unwrap().code(), 7, "{settle:?}");
    }
}

/// Rank 0 works on behind the failure of rank 1, in a process and by the store, once the process that
/// rank 1 has left is gone.
#[test]
fn survivors_go_on_where_they_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let done = folder.path().join("done");
    let script = format!(
        r#"store="${{EPOXIDE_STORE#file://}}"
        case $RANK in
            0) while [ ! -e {folder}/failed ]; do sleep 0.02; done
                while grep -qs 'State:.[^ZX]' /proc/$(cat {folder}/left)/status; do sleep 0.02; done
                sleep 0.3; ls -A "$store" > {folder}/after; mv {folder}/after {folder}/done;;
            1) sleep 1000 & echo $! > {folder}/left
                ls -A "$store" > {folder}/before; touch {folder}/failed; exit 7;;
        esac"#,
        folder = folder.path().display()
    );
    for keep_survivors in [false, true] {
        let launch = Launch { keep_survivors, settle: Duration::ZERO, relay: false, ..Launch::new(2) };
        let ended = launch.run(None, |_| {
            let mut command = Command::new("sh");
            command.args(["-c", &script]);
            Ok(command)
        });
        let ended = ended.unwrap();
        assert_eq!((ended.code(), ended.exits.get(1)), (7, Some(&RankExit::Code(7))));
        assert_eq!(done.exists(), keep_survivors);
        std::fs::remove_file(folder.path().join("failed")).unwrap();
    }
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    assert_eq!(read("done"), read("before"), "the store is poisoned");
}

/// A reader of output that stalls: a write makes the file and lasts until the sender is dropped.
struct Stalled(PathBuf, Receiver<()>);

impl Write for Stalled {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        std::fs::write(&self.0, "")?;
        let _ = self.1.recv();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn ranks_are_ended_though_the_reader_of_the_output_stalls() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let (read_on, stalls) = std::sync::mpsc::channel();
    let (mut said, err) = std::io::pipe().unwrap();
    let sinks = Sinks::new(Box::new(Stalled(file("stalled"), stalls)), Box::new(err));
    // Rank 1 fails while its line is written, without the store that poisoning needs.
    let script = format!(
        r#"cd {}; case $RANK in
            0) trap 'touch ended; exit 0' TERM; touch ready; while :; do sleep 0.05; done;;
            1) while [ ! -e ready ]; do sleep 0.02; done; rm -r "$(dirname "${{EPOXIDE_STORE#file://}}")"; echo line
                while [ ! -e stalled ]; do sleep 0.02; done; exit 7;;
        esac"#,
        folder.path().display()
    );
    let launcher = std::thread::spawn(move || {
        let launch = Launch { settle: Duration::ZERO, grace: TIMEOUT, sinks, ..Launch::new(2) };
        launch.run(None, |_| {
            let mut command = Command::new("sh");
            command.args(["-c", &script]);
            Ok(command)
        })
    });
    let start = Instant::now();
    while !file("ended").exists() {
        assert!(start.elapsed() < TIMEOUT, "rank 0 has not been asked to end");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(read_on);
    assert_eq!(launcher.join().unwrap().unwrap().code(), 7);
    let mut text = String::new();
    said.read_to_string(&mut text).unwrap();
    assert!(text.contains("launch: the other ranks cannot be told, and are ended: "), "{text}");
}

#[test]
fn the_longest_end_has_every_phase() {
    let [settle, grace, kill_timeout] = [60, 5, 10].map(Duration::from_secs);
    let launch = Launch { settle, grace, kill_timeout, ..Launch::new(1) };
    assert_eq!(launch.longest_end(), Duration::from_secs(75));
    assert_eq!(Launch { grace: Duration::MAX, ..launch }.longest_end(), Duration::MAX);
}

#[test]
fn a_command_keeps_the_number_of_threads_that_it_sets() {
    let launch = Launch { relay: false, ..Launch::new(2) };
    let ended = launch.run(None, |_| {
        let mut command = Command::new("sh");
        command.args(["-c", "test \"$OMP_NUM_THREADS\" = 7"]).env("OMP_NUM_THREADS", "7");
        Ok(command)
    });
    assert_eq!(ended.unwrap().code(), 0);
}

#[test]
fn a_command_that_does_not_start_is_named() {
    let error = spawn_ranks(2, TIMEOUT, |_| Ok(Command::new("/no/such/program"))).unwrap_err();
    assert!(error.to_string().contains("rank 0, /no/such/program"), "{error}");
    assert!(spawn_ranks(0, TIMEOUT, |_| current_exe()).is_err());
}

/// How many ranks of the launch below have been started.
const STARTED: &str = "EPOXIDE_TEST_STARTED";

/// The launcher of the test below, which ends itself while it starts its ranks; does nothing as a
/// test of its own.
#[test]
fn as_an_interrupted_launcher() {
    let Some(path) = std::env::var_os(STARTED) else { return };
    let mut signals = Signals::catch().unwrap();
    let launch = Launch { relay: false, ..Launch::new(200) };
    let started = std::cell::Cell::new(0);
    let ended = launch.run(Some(&mut signals), |environment| {
        started.set(started.get() + 1);
        if environment.rank() == 1 {
            rustix::process::kill_process(rustix::process::getpid(), Signal::TERM).unwrap();
        }
        // Starting a rank takes its time.
        std::thread::sleep(Duration::from_millis(10));
        let mut command = Command::new("sleep");
        command.arg("1000");
        Ok(command)
    });
    let ended = ended.unwrap();
    assert_eq!((ended.signal, ended.code()), (Some(Signal::TERM.as_raw()), 128 + Signal::TERM.as_raw()));
    assert_eq!(ended.exits.len(), started.get());
    std::fs::write(path, started.get().to_string()).unwrap();
}

#[test]
fn a_signal_that_comes_while_ranks_are_started_ends_the_launch_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("started");
    let mut launcher = one_test("tests::as_an_interrupted_launcher");
    let output = launcher.env(STARTED, &path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let started: u32 = std::fs::read_to_string(path).unwrap().parse().unwrap();
    assert!((2..200).contains(&started), "{started} ranks were started");
}

/// Where the rank of the launch below writes that it runs.
const READY: &str = "EPOXIDE_TEST_READY";

/// The launcher of the test below, whose terminal is closed; does nothing as a test of its own.
#[test]
fn as_a_launcher_whose_terminal_closes() {
    let Some(ready) = std::env::var_os(READY).map(PathBuf::from) else { return };
    // SAFETY: the action is no function of this process, which may be run under `nohup`.
    unsafe { libc::signal(libc::SIGHUP, libc::SIG_DFL) };
    let mut signals = Signals::catch().unwrap();
    let launch = Launch { relay: false, grace: 10 * TIMEOUT, ..Launch::new(3) };
    let ended = launch.run(Some(&mut signals), |environment| {
        let mut command = Command::new("sh");
        if environment.rank() == 0 {
            let script = "trap 'sleep 0.5; exit 0' HUP; touch $0; while :; do sleep 0.05; done";
            command.args(["-c", script]).arg(&ready);
            return Ok(command);
        }
        while !ready.exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
        // From the kernel, and from the shell.
        for signal in [libc::SIGHUP; 2] {
            // SAFETY: its handler is that of `Signals`.
            assert_eq!(unsafe { libc::raise(signal) }, 0);
        }
        command.args(["-c", "true"]);
        Ok(command)
    });
    let ended = ended.unwrap();
    assert_eq!((ended.signal, ended.exits[0]), (Some(libc::SIGHUP), RankExit::Code(0)));
}

#[test]
fn ranks_may_end_by_themselves_where_the_terminal_is_closed() {
    let directory = tempfile::tempdir().unwrap();
    let mut launcher = one_test("tests::as_a_launcher_whose_terminal_closes");
    let output = launcher.env(READY, directory.path().join("ready")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn numbers_of_ranks_have_bounds() {
    for (nodes, ranks, named) in [(1, 1025, "ranks_per_node = 1025"), (65, 1024, "1024 on each of 65 nodes")]
    {
        let endpoint = (nodes > 1).then(|| ("h".to_owned(), 5));
        let nodes = Nodes { count: nodes, rank: 0, endpoint };
        let launch = Launch { nodes, ..Launch::new(ranks) };
        let error = launch.run(None, |_| Ok(Command::new("/no/such/program"))).unwrap_err().to_string();
        assert!(error.contains(named) && error.contains("give the number of"), "{error}");
    }
}

/// Where the test below and its launcher meet.
const MEET: &str = "EPOXIDE_TEST_MEET";

/// The launcher of the test below; does nothing as a test of its own.
#[test]
fn as_a_launcher() {
    let Some(meet) = std::env::var_os(MEET) else { return };
    let short = Duration::from_millis(500);
    // The kernel has to have made a zombie of the rank before that.
    let kill_timeout = Duration::from_secs(3);
    let launch = Launch { settle: short, grace: short, kill_timeout, relay: false, ..Launch::new(2) };
    let error = launch.run(None, |environment| {
        let mut command = Command::new("sh");
        let script = match environment.rank() {
            0 => "while [ ! -e $0/go ]; do sleep 0.02; done; exit 3",
            _ => "echo $$ > $0/pid; trap '' TERM; while :; do sleep 0.05; done",
        };
        command.args(["-c", script]).arg(&meet);
        Ok(command)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("3s after SIGKILL there is still: rank 1 (process "), "{error}");
    assert!(error.contains("in state Z"), "{error}");
}

/// A rank that does not end after SIGKILL, like one in a driver call that does not return. The test
/// simulates it by a process that has ended under a debugger, this process. Its parent gets no exit
/// status until the debugger has read it.
#[test]
fn a_rank_that_does_not_end_though_killed_is_left_behind() {
    let meet = tempfile::tempdir().unwrap();
    let mut launcher = one_test("tests::as_a_launcher");
    let launcher =
        launcher.env(MEET, meet.path()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    let pid: i32 = loop {
        let text = std::fs::read_to_string(meet.path().join("pid")).unwrap_or_default();
        if let Ok(pid) = text.trim().parse() {
            break pid;
        }
        assert!(start.elapsed() < TIMEOUT);
        std::thread::sleep(Duration::from_millis(5));
    };
    // SAFETY: of a process that this one's child has started; there are no addresses in it.
    let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) };
    let refused = std::io::Error::last_os_error();
    assert_eq!(seized, 0, "ptrace, which the kernel lets a process do to what it has started: {refused}");
    std::fs::write(meet.path().join("go"), "").unwrap();
    let output = launcher.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(start.elapsed() < TIMEOUT, "{:?}", start.elapsed());
}

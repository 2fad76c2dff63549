//! `epoxide launch` as a user runs it.

#![forbid(unsafe_code)]

mod kills;
mod larger;
mod launcher;
mod nodes;
mod peers;

use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use launcher::{epoxide, launcher, lines, script, text};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A launcher whose ranks run; its output so far was one line of each.
struct Running {
    launcher: Child,
    /// First line of each rank of the host, without the prefix.
    said: Vec<String>,
    out: BufReader<std::process::ChildStdout>,
}

impl Running {
    /// Starts ranks that each print a line and then go on.
    fn start(flags: &[&str], ranks: usize, script: &str) -> Running {
        Running::of(&mut launcher(flags, &["sh", "-c", script]), ranks)
    }

    fn of(launcher: &mut Command, ranks: usize) -> Running {
        let launcher = launcher.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        Running::watch(launcher, 0..ranks)
    }

    /// Watches a started launcher, with pipes, and the ranks of its host.
    fn watch(mut launcher: Child, ranks: Range<usize>) -> Running {
        let mut out = BufReader::new(launcher.stdout.take().unwrap());
        let mut said = vec![String::new(); ranks.len()];
        for _ in 0..ranks.len() {
            let mut line = String::new();
            out.read_line(&mut line).unwrap();
            let (rank, rest) = line.strip_prefix("[rank ").unwrap().split_once("] ").unwrap();
            said[rank.parse::<usize>().unwrap() - ranks.start] = rest.trim().to_owned();
        }
        Running { launcher, said, out }
    }

    /// The next line that a rank prints.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.launcher.id() as i32).unwrap(), signal).unwrap();
    }

    fn wait(mut self) -> Output {
        let mut stdout = Vec::new();
        std::io::Read::read_to_end(&mut self.out, &mut stdout).unwrap();
        Output { stdout, ..self.launcher.wait_with_output().unwrap() }
    }
}

/// Waits until a process is gone, reaped by its present parent.
fn wait_gone(pid: &str) {
    let start = Instant::now();
    let number = Pid::from_raw(pid.parse().unwrap()).unwrap();
    while test_kill_process(number).is_ok() {
        // Without a process that reaps orphans, a zombie counts as gone.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        if stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" Z")) {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "process {pid} is left: {stat}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn ranks_find_the_variables_of_torchrun() {
    let names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME \
                 ROLE_WORLD_SIZE TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID \
                 OMP_NUM_THREADS MASTER_ADDR";
    let print = format!("for name in {names}; do eval echo $name=\\$$name; done");
    let output = script(&["--nproc-per-node", "2", "--max-restarts", "4", "--rdzv-id", "me"], &print);
    assert!(output.status.success(), "{output:?}");
    let lines = lines(&output.stdout);
    for rank in ["0", "1"] {
        for (name, value) in [
            ("RANK", rank),
            ("LOCAL_RANK", rank),
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("GROUP_RANK", "0"),
            ("GROUP_WORLD_SIZE", "1"),
            ("ROLE_RANK", rank),
            ("ROLE_NAME", "default"),
            ("ROLE_WORLD_SIZE", "2"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_MAX_RESTARTS", "4"),
            ("TORCHELASTIC_RUN_ID", "me"),
            ("OMP_NUM_THREADS", "1"),
            ("MASTER_ADDR", "127.0.0.1"),
        ] {
            let line = format!("[rank {rank}] {name}={value}");
            assert!(lines.contains(&line), "{line} is not in {lines:?}");
        }
    }
    let output = launcher(&["--nproc-per-node", "2", "--no-prefix"], &["sh", "-c", "echo $OMP_NUM_THREADS"])
        .env("OMP_NUM_THREADS", "7")
        .output()
        .unwrap();
    assert_eq!(text(&output.stdout), "7\n7\n");
}

#[test]
fn output_stays_whole_and_apart() {
    // Lines in two writes, with bytes that are no text, and a last one without an end.
    let print = r"i=0; while [ $i -lt 200 ]; do printf 'begin'; printf ' %s\377\000end\n' $i; \
                  printf 'err %s\n' $i >&2; i=$((i+1)); done; printf last";
    let output = script(&["--nproc-per-node", "4"], print);
    for rank in 0..4 {
        let prefix = format!("[rank {rank}] ");
        let of = |bytes: &[u8]| -> Vec<Vec<u8>> {
            let lines = bytes.split_inclusive(|byte| *byte == b'\n');
            lines.filter_map(|line| line.strip_prefix(prefix.as_bytes())).map(<[u8]>::to_vec).collect()
        };
        let (out, err) = (of(&output.stdout), of(&output.stderr));
        assert_eq!((out.len(), err.len()), (201, 200));
        for (number, (out, err)) in out.iter().zip(&err).enumerate() {
            assert_eq!(*out, [format!("begin {number}").as_bytes(), b"\xff\0end\n"].concat());
            assert_eq!(*err, format!("err {number}\n").as_bytes());
        }
        assert_eq!(out[200], b"last\n");
    }
    assert_eq!(output.stdout.iter().filter(|byte| **byte == b'\n').count(), 4 * 201);
}

#[test]
fn only_rank_0_reads_standard_input() {
    let mut launcher = launcher(&["--nproc-per-node", "2"], &["cat"]);
    let mut child = launcher.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"hello\n").unwrap();
    assert_eq!(text(&child.wait_with_output().unwrap().stdout), "[rank 0] hello\n");
}

#[test]
fn a_failure_ends_the_rest_and_is_told() {
    // Rank 1 fails. Rank 2 ends at SIGTERM, which may take seconds on a busy machine, and rank 0
    // only at SIGKILL. The processes that they started end as well.
    let fail = r#"case $RANK in
        1) while [ ! -e $READY/0 ] || [ ! -e $READY/2 ]; do sleep 0.01; done; echo one >&2; echo two >&2; exit 7;;
        2) trap 'echo asked; exit 0' TERM; sleep 1000 & touch $READY/2; wait;;
        0) trap '' TERM; sleep 1000 & echo $!; touch $READY/0; wait; sleep 1000;;
    esac"#;
    let directory = tempfile::tempdir().unwrap();
    let output = launcher(&["--nproc-per-node", "3", "--grace", "4"], &["sh", "-c", fail])
        .env("READY", directory.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(7));
    let said = text(&output.stderr);
    let message = "launch: rank 1 exited with code 7; its last lines on standard error:\n  one\n  two\n";
    assert!(said.contains("[rank 1] two\n") && said.ends_with(message), "{said}");
    let out = text(&output.stdout);
    assert!(out.contains("[rank 2] asked"), "{out}");
    let sleeper = out.lines().find_map(|line| line.strip_prefix("[rank 0] ")).unwrap();
    wait_gone(sleeper);
}

#[test]
fn all_ranks_start_again() {
    let flags = ["--nproc-per-node", "2", "--max-restarts", "2"];
    // Rank 1 fails once rank 0 has printed its line.
    let count = r#"echo "$TORCHELASTIC_RESTART_COUNT"; said=$READY/$TORCHELASTIC_RESTART_COUNT
        [ $RANK = 1 ] || { touch $said; exit; }
        while [ ! -e $said ]; do sleep 0.01; done; exit $((3 - TORCHELASTIC_RESTART_COUNT))"#;
    let directory = tempfile::tempdir().unwrap();
    let output = launcher(&flags, &["sh", "-c", count]).env("READY", directory.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let expected = ["[rank 0] 0", "[rank 0] 1", "[rank 0] 2", "[rank 1] 0", "[rank 1] 1", "[rank 1] 2"];
    assert_eq!(lines(&output.stdout), expected);
    let said = text(&output.stderr);
    for line in ["restart 1 of 2: rank 1 exited with code 3", "restart 2 of 2: rank 1 exited with code 2"] {
        assert!(said.contains(line), "{said}");
    }
    let output = script(&flags, r#"[ "$TORCHELASTIC_RESTART_COUNT" = 1 ]"#);
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn signals_reach_every_rank() {
    let mut running = Running::start(
        &["--nproc-per-node", "2"],
        2,
        "trap 'echo usr1' USR1; trap 'echo int; exit 0' INT; sleep 1000 & echo ready; wait; wait",
    );
    running.signal(Signal::USR1);
    let mut said = [running.line(), running.line()];
    said.sort();
    assert_eq!(said, ["[rank 0] usr1", "[rank 1] usr1"]);
    running.signal(Signal::INT);
    let output = running.wait();
    assert_eq!(output.status.code(), Some(128 + 2), "{output:?}");
    assert_eq!(lines(&output.stdout), ["[rank 0] int", "[rank 1] int"]);
    assert!(text(&output.stderr).contains("launch: ended by signal 2"));
}

#[test]
fn a_second_interrupt_kills() {
    let mut running = Running::start(
        &["--nproc-per-node", "2", "--grace", "1000"],
        2,
        "trap 'echo asked' TERM; echo $$; while :; do sleep 0.05; done",
    );
    let said = running.said.clone();
    running.signal(Signal::TERM);
    // The ranks have received SIGTERM, and continue.
    assert!([running.line(), running.line()].iter().all(|line| line.ends_with("asked")));
    running.signal(Signal::INT);
    assert_eq!(running.wait().status.code(), Some(128 + 2));
    said.iter().for_each(|pid| wait_gone(pid));
}

/// How many entries a directory has.
fn entries(directory: &tempfile::TempDir) -> usize {
    std::fs::read_dir(directory.path()).unwrap().count()
}

#[test]
fn ranks_die_with_a_killed_launcher_and_the_next_sweeps_the_rest() {
    let directory = tempfile::tempdir().unwrap();
    let begin = |script: &str| {
        let mut launcher = launcher(&["--nproc-per-node", "2"], &["sh", "-c", script]);
        Running::of(launcher.env("TMPDIR", directory.path()), 2)
    };
    // One launch keeps running, and its files are no leftovers.
    let alive = begin("echo $$; exec sleep 1000");
    let running = begin("sleep 1000 & echo $$ $!; wait");
    let said = running.said.clone();
    running.signal(Signal::KILL);
    running.wait();
    let pids = said.iter().map(|line| line.split_once(' ').unwrap());
    for (rank, started) in pids.clone() {
        wait_gone(rank);
        // The process has received no signal.
        test_kill_process(Pid::from_raw(started.parse().unwrap()).unwrap()).unwrap();
    }
    assert_eq!(entries(&directory), 2);
    let mut next = launcher(&["--nproc-per-node", "1"], &["true"]);
    assert!(next.env("TMPDIR", directory.path()).status().unwrap().success());
    pids.for_each(|(_, started)| wait_gone(started));
    assert_eq!(entries(&directory), 1);
    for rank in &alive.said {
        test_kill_process(Pid::from_raw(rank.parse().unwrap()).unwrap()).unwrap();
    }
    alive.signal(Signal::TERM);
    assert_eq!(alive.wait().status.code(), Some(128 + 15));
    assert_eq!(entries(&directory), 0);
}

#[test]
fn ranks_heed_an_interrupt_that_their_launcher_ignores() {
    // Run as a background job of a script without job control.
    let launch =
        "trap '' INT QUIT; exec \"$0\" launch --nproc-per-node 1 -- sh -c 'kill -INT $$; echo alive'";
    let output = Command::new("sh").args(["-c", launch, env!("CARGO_BIN_EXE_epoxide")]).output().unwrap();
    assert_eq!(output.status.code(), Some(128 + 2), "{output:?}");
    assert!(text(&output.stderr).contains("rank 0 was ended by signal 2 (SIGINT)"), "{output:?}");
}

/// The processes that a process has started, once they are two or more.
fn ranks_of(parent: &Child) -> Vec<String> {
    let start = Instant::now();
    loop {
        let text = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", parent.id())).unwrap();
        let ranks: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        if ranks.len() >= 2 {
            return ranks;
        }
        assert!(start.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_round_trip_of_processes_ends_with_its_signal_and_leaves_nothing() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let directory = tempfile::tempdir().unwrap();
        let line =
            ["roundtrip", "--processes", "--ranks-per-node", "2", "--tokens", "64", "--iterations", "100000"];
        let mut command = epoxide(&line);
        let command = command.env("TMPDIR", directory.path()).stdout(Stdio::null()).stderr(Stdio::piped());
        let running = command.spawn().unwrap();
        let own = Pid::from_raw(running.id() as i32).unwrap();
        let ranks = ranks_of(&running);
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(entries(&directory), 1);
        kill_process(own, signal).unwrap();
        let output = running.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert!(text(&output.stderr).contains(&format!("ended by signal {}", signal.as_raw())), "{output:?}");
        assert_eq!(entries(&directory), 0);
        ranks.iter().for_each(|rank| wait_gone(rank));
    }
}

#[test]
fn a_round_trip_of_processes_prints_one_object_though_a_rank_is_killed() {
    let line =
        "roundtrip --processes --mode intranode --ranks-per-node 2 --tokens 64 --iterations 100000 --json";
    // With the short timeout rank 0 reports the missing rank; without it rank 0 is ended before.
    for timeout in [&["--timeout", "1"][..], &[]] {
        let mut command = epoxide(&line.split_whitespace().collect::<Vec<_>>());
        let command = command.args(timeout).stdout(Stdio::piped()).stderr(Stdio::piped());
        let running = command.spawn().unwrap();
        let killed = ranks_of(&running).remove(1);
        // The ranks begin their round trips in that time, as a rule.
        std::thread::sleep(Duration::from_millis(500));
        kill_process(Pid::from_raw(killed.parse().unwrap()).unwrap(), Signal::KILL).unwrap();
        let output = running.wait_with_output().unwrap();
        assert!(!output.status.success(), "{output:?}");
        let object: serde_json::Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{timeout:?}: {error}: {output:?}"));
        assert_eq!((&object["command"], &object["pass"]), (&"roundtrip".into(), &false.into()));
        assert_ne!(object["exit_code"], 0, "{object}");
    }
}

#[test]
fn logs_hold_what_ranks_print() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("logs");
    let flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", path.to_str().unwrap()];
    script(&flags, "echo out $RANK; echo err $RANK >&2; exit 1");
    for (attempt, rank) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let directory = path.join(format!("attempt_{attempt}/{rank}"));
        let read = |name: &str| std::fs::read_to_string(directory.join(name)).unwrap();
        assert_eq!(
            (read("stdout.log"), read("stderr.log")),
            (format!("out {rank}\n"), format!("err {rank}\n"))
        );
    }
}

#[test]
fn logs_are_for_this_user_alone_and_follow_no_link() {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = tempfile::tempdir().unwrap();
    let (victim, logs) = (directory.path().join("victim"), directory.path().join("logs"));
    std::fs::write(&victim, "of somebody else").unwrap();
    let flags = ["--nproc-per-node", "1", "--log-dir", logs.to_str().unwrap()];
    assert!(script(&flags, "echo hello").status.success());
    let file = logs.join("attempt_0/0/stdout.log");
    for (path, mode) in [(logs.clone(), 0o700), (logs.join("attempt_0/0"), 0o700), (file.clone(), 0o600)] {
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o7777, mode, "{}", path.display());
    }
    std::fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink(&victim, &file).unwrap();
    let output = script(&flags, "echo hello");
    assert!(!output.status.success());
    let said = text(&output.stderr);
    assert!(said.contains("stdout.log: a link is there, which is not followed"), "{said}");
    assert_eq!(std::fs::read(&victim).unwrap(), b"of somebody else");
    std::fs::remove_file(&file).unwrap();
    std::fs::set_permissions(&logs, std::fs::Permissions::from_mode(0o777)).unwrap();
    let said = text(&script(&flags, "echo hello").stderr);
    assert!(said.contains("all users may replace files in the folder (mode 0777)"), "{said}");
}

#[test]
fn a_reader_that_leaves_ends_the_launch() {
    let mut child = launcher(&["--nproc-per-node", "2"], &["yes"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("[rank "));
    assert!(!child.wait().unwrap().success());
}

/// As `epoxide launch .. 2>&1 | less`, which reads no further. The test holds the pipe open.
#[test]
fn a_reader_that_stalls_does_not_hold_up_the_end_by_a_signal() {
    let (reader, writer) = std::io::pipe().unwrap();
    let mut launcher = launcher(&["--nproc-per-node", "2"], &["yes"]);
    let mut child = launcher.stdout(writer.try_clone().unwrap()).stderr(writer).spawn().unwrap();
    let start = Instant::now();
    // A pipe holds 64 KiB.
    while rustix::io::ioctl_fionread(&reader).unwrap() < 60 << 10 {
        assert!(start.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(5));
    }
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let ended = loop {
        if let Some(ended) = child.try_wait().unwrap() {
            break ended;
        }
        if start.elapsed() > PATIENCE {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(ended.code(), Some(128 + 15), "{ended}");
    drop(reader);
}

#[test]
fn empty_variables_count_as_unset_and_bad_ones_are_named() {
    let print = |variable: &str, value: &str| {
        let mut launcher = launcher(&["--nproc-per-node", "1"], &["sh", "-c", "echo $EPOXIDE_STORE"]);
        launcher.env(variable, value).output().unwrap()
    };
    let output = print("TMPDIR", "");
    assert!(text(&output.stdout).starts_with("[rank 0] file:///tmp/epoxide-store-"), "{output:?}");
    let output = print("EPOXIDE_NODE_TIMEOUT", "");
    assert!(output.status.success(), "{output:?}");
    for value in ["abc", "0", "-1"] {
        let output = print("EPOXIDE_NODE_TIMEOUT", value);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        let rule = format!("EPOXIDE_NODE_TIMEOUT = {value}: must be seconds, at least 1");
        assert!(said.contains(&rule), "{said}");
    }
}

/// A full file system of TMPDIR: the launcher cannot write the reason to the ranks' store.
#[test]
fn a_store_that_takes_nothing_does_not_hide_why_a_rank_failed() {
    let fail =
        r#"[ $RANK = 0 ] && exec sleep 1000; echo the reason >&2; rm -rf "${EPOXIDE_STORE#file://}"; exit 7"#;
    let output = script(&["--nproc-per-node", "2", "--grace", "1"], fail);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    let said = text(&output.stderr);
    assert!(said.contains("launch: rank 1 exited with code 7; its last lines"), "{said}");
    assert!(said.ends_with("  the reason\n") && said.contains("the other ranks cannot be told"), "{said}");
}

#[test]
fn output_to_a_full_device_is_an_error() {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let flags = ["--tokens", "3", "--hidden", "64", "--num-sms", "4", "--ranks-per-node", "2"];
    let mut roundtrip = epoxide(&[&["roundtrip"], &flags[..]].concat());
    let mut processes = epoxide(&[&["roundtrip", "--processes"], &flags[..]].concat());
    let (mut help, mut version) = (epoxide(&["--help"]), epoxide(&["--version"]));
    let mut doctor = epoxide(&["doctor"]);
    let mut launch = launcher(&["--nproc-per-node", "2"], &["echo", "hello"]);
    let commands = [&mut roundtrip, &mut processes, &mut help, &mut version, &mut doctor, &mut launch];
    for command in commands {
        let output = command.stdout(full()).stderr(Stdio::piped()).output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{command:?}: {said}");
        assert!(said.contains("standard output: No space left on device"), "{command:?}: {said}");
    }
}

/// As `epoxide .. | true`: the files and the exit code are those of a command that is read.
#[test]
fn a_reader_that_closes_the_pipe_loses_no_file_and_no_verdict() {
    let unread = |command: &mut Command| {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        command.stdout(writer).stderr(Stdio::piped()).output().unwrap()
    };
    let folder = tempfile::tempdir().unwrap();
    let [csv, trace] = ["a.csv", "a.trace"].map(|name| folder.path().join(name));
    let sizes = "bench --ranks-per-node 2 --tokens 2 --hidden 64 --experts 4 --topk 2 --num-sms 2 --warmup 0 --iters 1";
    let mut bench = epoxide(&sizes.split_whitespace().collect::<Vec<_>>());
    let output = unread(bench.arg("--csv").arg(&csv).arg("--trace").arg(&trace));
    assert!(output.status.success(), "{output:?}");
    assert!(csv.exists() && trace.exists());

    let results = concat!(env!("CARGO_MANIFEST_DIR"), "/../benches/data/h200.json");
    let output = unread(&mut epoxide(&["bench", "compare", results, results, "--fail-if-slower", "1%"]));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(text(&output.stderr).contains("too few samples"), "{output:?}");
}

#[test]
fn numbers_that_no_host_has_and_files_without_an_end_are_refused() {
    let cases: [(&[&str], &str); 4] = [
        (&["launch", "--nproc-per-node", "4294967295", "--", "true"], "1..=1024"),
        (&["launch", "--nproc-per-node", "1", "--nnodes", "4294967295", "--", "true"], "1..=65536"),
        (
            &["inspect", "handle", "--topk", "/dev/zero", "--experts", "8", "--ranks-per-node", "2"],
            "more than 268435456 bytes",
        ),
        (&["bench", "compare", "/dev/zero", "/dev/zero"], "more than 268435456 bytes"),
    ];
    for (arguments, reason) in cases {
        let output = epoxide(arguments).output().unwrap();
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(reason), "{arguments:?}: {said}");
    }
    let arguments = ["roundtrip", "--tokens", "3", "--hidden", "64", "--num-sms", "4"];
    let output = epoxide(&arguments).env("EPOXIDE_PTX", "/dev/zero").output().unwrap();
    assert!(text(&output.stderr).contains("more than 67108864 bytes"), "{output:?}");
    let output = epoxide(&arguments).env("RANK", "0").env("WORLD_SIZE", "4294967295").output().unwrap();
    let said = text(&output.stderr);
    assert!(said.contains("WORLD_SIZE = 4294967295: a group has at most 65536 ranks"), "{said}");
}

#[test]
fn roundtrip_runs_under_it_unchanged() {
    let exe = env!("CARGO_BIN_EXE_epoxide");
    let line = [exe, "roundtrip", "--tokens", "3", "--hidden", "64", "--num-sms", "4"];
    let output = launcher(&["--nproc-per-node", "2"], &line).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let said = text(&output.stdout);
    assert!(said.contains("[rank 0] ") && !said.contains("[rank 1] ") && said.contains("PASS"), "{said}");
}

/// The other rank waits in a collective that the failing one has left out.
#[test]
fn a_failure_of_one_rank_is_what_a_benchmark_reports() {
    let failing = "[ $RANK = 1 ] && export EPOXIDE_PTX=/nonexistent.ptx";
    let sizes =
        "--ranks-per-node 2 --tokens 2 --hidden 64 --experts 4 --topk 2 --num-sms 2 --warmup 0 --iters 1";
    let bench = format!("{failing}; {} bench {sizes}", env!("CARGO_BIN_EXE_epoxide"));
    let output = script(&["--nproc-per-node", "2"], &bench);
    let said = text(&output.stderr);
    // Once, for all ranks. The launcher repeats the lines of the rank that ended first.
    assert_eq!(
        said.matches("] epoxide: EPOXIDE_PTX = /nonexistent.ptx: cannot be read").count(),
        1,
        "{said}"
    );
    assert!(!said.contains("which collective comes next"), "{said}");
    assert_eq!(output.status.code(), Some(2), "{said}");
}

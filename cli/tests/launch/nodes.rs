//! Launchers of several nodes, all of them on this host.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use epoxide_testing::{HeldPort, tier};
use rustix::process::{Pid, Signal, kill_process};

use crate::launcher::{launcher, lines, text};
use crate::{PATIENCE, Running, wait_gone};

const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// A launcher for each node, with these flags and this script.
fn nodes(count: u32, flags: impl Fn(u32) -> Vec<&'static str>, script: &str) -> Vec<Output> {
    let port = HeldPort::any().unwrap();
    let (count_text, endpoint) = (count.to_string(), format!("127.0.0.1:{}", port.number()));
    let start = |node: u32| -> Child {
        let node_text = node.to_string();
        let own = flags(node);
        let mut all = vec!["--nnodes", &count_text, "--node-rank", &node_text, "--rdzv-endpoint", &endpoint];
        // Later flags win.
        all.extend(own);
        let mut launcher = launcher(&all, &["sh", "-c", script]);
        launcher
            .env("EPOXIDE_JOB_SECRET", SECRET)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    // The first node starts last: the others wait for it.
    let children: Vec<Child> = (0..count).rev().map(start).collect();
    children.into_iter().rev().map(|child| child.wait_with_output().unwrap()).collect()
}

#[test]
fn ranks_count_through_the_nodes() {
    let print = "echo $RANK $LOCAL_RANK $WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $MASTER_ADDR \
                 ${EPOXIDE_STORE%%:*}; echo $EPOXIDE_STORE $MASTER_PORT $TORCHELASTIC_RUN_ID >&2";
    let outputs = nodes(3, |_| vec!["--nproc-per-node", "2"], print);
    let mut meeting = Vec::new();
    for (node, output) in outputs.iter().enumerate() {
        let (first, second) = (2 * node, 2 * node + 1);
        let expected = [
            format!("[rank {first}] {first} 0 6 {node} 3 127.0.0.1 tcp"),
            format!("[rank {second}] {second} 1 6 {node} 3 127.0.0.1 tcp"),
        ];
        assert_eq!(lines(&output.stdout), expected, "{output:?}");
        meeting.extend(lines(&output.stderr).iter().map(|line| line.split_once("] ").unwrap().1.to_owned()));
    }
    assert_eq!(meeting, vec![meeting[0].clone(); 6]);
}

#[test]
fn a_failure_ends_all_nodes_and_all_start_again() {
    // Rank 3 fails at the first start; the others would go on.
    let script = r#"echo $TORCHELASTIC_RESTART_COUNT
        if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then
            if [ $RANK = 3 ]; then echo why >&2; exit 7; fi
            exec sleep 1000
        fi"#;
    let outputs = nodes(2, |_| vec!["--nproc-per-node", "2", "--max-restarts", "1"], script);
    for (node, output) in outputs.iter().enumerate() {
        assert!(output.status.success(), "{output:?}");
        let (first, second) = (2 * node, 2 * node + 1);
        let lines = lines(&output.stdout);
        let expected = [(first, 0), (first, 1), (second, 0), (second, 1)];
        assert_eq!(lines, expected.map(|(rank, start)| format!("[rank {rank}] {start}")));
        let said = text(&output.stderr);
        assert!(said.contains("launch: restart 1 of 1: rank 3 exited with code 7"), "{said}");
    }
    let outputs = nodes(2, |_| vec!["--nproc-per-node", "2"], script);
    assert_eq!(outputs.iter().map(|output| output.status.code()).collect::<Vec<_>>(), [Some(7); 2]);
    assert!(text(&outputs[1].stderr).ends_with("standard error:\n  why\n"), "{outputs:?}");
}

/// Another user takes the port that was chosen for rank 0 before it listens there. Ranks of this
/// library meet elsewhere.
#[test]
fn a_port_that_is_taken_from_rank_0_does_not_keep_ranks_from_meeting() {
    let directory = tempfile::tempdir().unwrap();
    let ready = directory.path().to_str().unwrap().to_owned();
    let program = env!("CARGO_BIN_EXE_epoxide");
    let script = format!(
        "echo $MASTER_PORT > {ready}/port.$RANK; while [ ! -e {ready}/taken ]; do sleep 0.02; done; \
         exec {program} roundtrip --mode intranode --tokens 3 --hidden 64 --num-sms 4"
    );
    let path = directory.path().to_owned();
    let attacker = std::thread::spawn(move || {
        let start = Instant::now();
        loop {
            let text = std::fs::read_to_string(path.join("port.0")).unwrap_or_default();
            if let Ok(port) = text.trim().parse::<u16>() {
                let taken = std::net::TcpListener::bind(("0.0.0.0", port)).unwrap();
                std::fs::write(path.join("taken"), "").unwrap();
                return taken;
            }
            assert!(start.elapsed() < PATIENCE);
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let outputs = nodes(2, |_| vec!["--nproc-per-node", "1"], &script);
    let taken = attacker.join().unwrap();
    for output in &outputs {
        assert!(output.status.success(), "{output:?}");
    }
    assert!(text(&outputs[0].stdout).contains("PASS"), "{outputs:?}");
    drop(taken);
}

#[test]
fn launchers_that_differ_say_so() {
    let different = |node| vec!["--nproc-per-node", if node == 0 { "1" } else { "2" }];
    for output in nodes(2, different, "true") {
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("disagree on the launch") && said.contains("ranks_per_node: 2"), "{said}");
    }
}

/// Launchers of two nodes with these flags, whose ranks run the script in the folder; node 0 first.
fn two_running(flags: &[&str], script: &str, folder: &Path) -> [Running; 2] {
    let port = HeldPort::any().unwrap();
    let endpoint = format!("127.0.0.1:{}", port.number());
    let start = |node: u32| {
        let node_text = node.to_string();
        let place = [
            "--nproc-per-node",
            "1",
            "--nnodes",
            "2",
            "--node-rank",
            &node_text,
            "--rdzv-endpoint",
            &endpoint,
        ];
        let mut launcher = launcher(&[&place, flags].concat(), &["sh", "-c", script]);
        launcher.current_dir(folder).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let [first, second] = [start(0), start(1)];
    [Running::watch(first, 0..1), Running::watch(second, 1..2)]
}

#[test]
fn a_node_that_vanishes_ends_the_others_by_name() {
    // The ranks have no connection: only the launchers can detect it.
    let vanish = |gone: usize, how| {
        // Longer than a launcher takes to give a sign of life on a busy machine.
        let flags = ["--node-timeout", "4", "--grace", "1"];
        let mut running = two_running(&flags, "echo $$; exec sleep 1000", Path::new("/")).map(Some);
        let [vanishing, other] = [gone, 1 - gone].map(|node| running[node].take().unwrap());
        vanishing.signal(how);
        let rank = other.said[0].clone();
        let output = other.wait();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let said = text(&output.stderr);
        assert!(said.contains(&format!("the launcher of node {gone} ")), "node {gone}, {how:?}: {said}");
        wait_gone(&rank);
        if how == Signal::STOP {
            vanishing.signal(Signal::CONT);
            let said = text(&vanishing.wait().stderr);
            assert!(said.contains("launch"), "{said}");
        }
    };
    // All at once, since most of it is waiting.
    std::thread::scope(|scope| {
        let all = [(0, Signal::KILL), (1, Signal::KILL), (0, Signal::STOP), (1, Signal::STOP)];
        for &(gone, how) in &all[..tier::pick(2, 4)] {
            scope.spawn(move || vanish(gone, how));
        }
    });
}

/// SIGINT kills a rank that does not end, though the failure and SIGTERM before it ask it to.
#[test]
fn a_signal_behind_a_failure_starts_no_rank_again() {
    let script = r#"echo $TORCHELASTIC_RESTART_COUNT
        if [ $RANK = 1 ]; then while [ ! -e ready ]; do sleep 0.02; done; exit 7; fi
        trap 'echo asked' TERM; touch ready; while :; do sleep 0.05; done"#;
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--max-restarts", "1", "--grace", "1000"];
    let start = Instant::now();
    let [mut first, second] = two_running(&flags, script, folder.path());
    // From the launcher because of the failure, and then from this test.
    assert_eq!(first.line(), "[rank 0] asked");
    first.signal(Signal::TERM);
    assert_eq!(first.line(), "[rank 0] asked");
    first.signal(Signal::INT);
    assert_eq!(first.line(), "", "rank 0 has been started again");
    let [first, second] = [first, second].map(Running::wait);
    assert_eq!(first.status.code(), Some(7), "{first:?}");
    assert_eq!(second.status.code(), Some(128 + 2), "{second:?}");
    assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
}

#[test]
fn a_signal_behind_a_failure_ends_the_other_nodes_too() {
    // Rank 0 ends some time after the signal to the other node's launcher.
    let script = r#"echo $TORCHELASTIC_RESTART_COUNT
        trap 'echo asked; sleep 2; exit 0' TERM
        [ $RANK = 0 ] && touch ready
        while [ $RANK = 0 ] || [ $TORCHELASTIC_RESTART_COUNT = 1 ] || [ ! -e ready ]; do sleep 0.05; done
        exit 7"#;
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--max-restarts", "1", "--grace", "1000", "--node-timeout", "60"];
    let [mut first, second] = two_running(&flags, script, folder.path());
    assert_eq!(first.line(), "[rank 0] asked");
    second.signal(Signal::TERM);
    let [first, second] = [first, second].map(Running::wait);
    assert!(!second.status.success(), "{second:?}");
    assert_eq!(first.status.code(), Some(128 + 15), "{first:?}");
    assert!(!text(&first.stderr).contains("no sign of life"), "{first:?}");
}

#[test]
fn a_launcher_that_gives_up_says_so_to_the_others() {
    let port = HeldPort::any().unwrap();
    let endpoint = format!("127.0.0.1:{}", port.number());
    let start = |node: &str, program: &str| {
        let flags =
            ["--nproc-per-node", "1", "--nnodes", "2", "--node-rank", node, "--rdzv-endpoint", &endpoint];
        // Longer than this test may take: the first launcher does not detect it by a timeout.
        let flags = [&flags[..], &["--node-timeout", "600"]].concat();
        let mut launcher = launcher(&flags, &[program, "1000"]);
        launcher.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let begin = Instant::now();
    let launchers = [start("0", "sleep"), start("1", "/no/such/program")];
    let [first, second] = launchers.map(|launcher| launcher.wait_with_output().unwrap());
    assert!(begin.elapsed() < PATIENCE, "{:?}", begin.elapsed());
    for output in [&first, &second] {
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(text(&output.stderr).contains("/no/such/program"), "{output:?}");
    }
    assert!(text(&first.stderr).contains("the launcher of node 1 gave up"), "{first:?}");
}

/// Whether a process has a handler for the signal.
fn catches(process: u32, signal: Signal) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
    u64::from_str_radix(caught.trim(), 16).unwrap() >> (signal.as_raw() - 1) & 1 == 1
}

/// A name that does not resolve may be that of a host that is still being set up. So the launch
/// continues to try, and reports it.
#[test]
fn a_name_that_does_not_resolve_is_named_before_the_launch_gives_up() {
    let flags = [
        "--nproc-per-node",
        "1",
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--rdzv-endpoint",
        "no-host.invalid:29500",
    ];
    let mut launcher = launcher(&flags, &["true"]);
    let mut child = launcher.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    // Without a secret the launcher first warns that it is open to all.
    let warning = loop {
        let mut line = String::new();
        assert!(said.read_line(&mut line).unwrap() > 0, "it has ended without a warning");
        if line.contains("no-host.invalid") {
            break line;
        }
    };
    assert!(warning.starts_with("launch: no store server at no-host.invalid:29500 yet: "), "{warning}");
    assert!(warning.contains("resolve") || warning.contains("address"), "{warning}");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(128 + Signal::TERM.as_raw()));
}

#[test]
fn a_signal_while_waiting_for_nodes_is_the_exit_code() {
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        // The first waits for the second at its own store; the second for a store that is not
        // there.
        for node in ["0", "1"] {
            let port = HeldPort::any().unwrap();
            let endpoint = format!("127.0.0.1:{}", port.number());
            let flags =
                ["--nproc-per-node", "1", "--nnodes", "2", "--node-rank", node, "--rdzv-endpoint", &endpoint];
            let launcher = launcher(&flags, &["true"]).stderr(Stdio::piped()).spawn().unwrap();
            let start = Instant::now();
            while !catches(launcher.id(), signal) {
                assert!(start.elapsed() < PATIENCE, "the launcher does not catch signals");
                std::thread::sleep(Duration::from_millis(5));
            }
            // Give the launcher time to wait for the other.
            std::thread::sleep(Duration::from_millis(300));
            kill_process(Pid::from_raw(launcher.id() as i32).unwrap(), signal).unwrap();
            let output = launcher.wait_with_output().unwrap();
            assert_eq!(output.status.code(), Some(code), "node {node}: {output:?}");
            assert!(text(&output.stderr).contains(&format!("ended by signal {}", signal.as_raw())));
        }
    }
}

/// Two nodes whose ranks run `script`, the first of them with a secret in a file. Returns their
/// output, once `attack` was tried on the port of their store.
fn attacked(secret: bool, script: &str, attack: impl Fn(u16)) -> Vec<Output> {
    use std::os::unix::fs::PermissionsExt as _;
    let port = HeldPort::any().unwrap();
    let endpoint = format!("127.0.0.1:{}", port.number());
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("secret");
    std::fs::write(&file, format!("{SECRET}\n")).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let children = ["0", "1"].map(|node| {
        let flags =
            ["--nproc-per-node", "1", "--nnodes", "2", "--node-rank", node, "--rdzv-endpoint", &endpoint];
        let mut launcher = launcher(&flags, &["sh", "-c", script]);
        match (secret, node) {
            (false, _) => &mut launcher,
            (true, "0") => launcher.env("EPOXIDE_JOB_SECRET_FILE", &file),
            (true, _) => launcher.env("EPOXIDE_JOB_SECRET", SECRET),
        };
        launcher.env("READY", directory.path()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    while !["0", "1"].iter().all(|rank| directory.path().join(rank).exists()) {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    attack(port.number());
    children.map(|child| child.wait_with_output().unwrap()).into()
}

#[test]
fn a_stranger_at_the_launchers_store_ends_nothing() {
    use epoxide::group::{Store, TcpStore, TcpStoreOptions};
    // Longer than the launchers take to detect a failure.
    let script =
        "touch $READY/$RANK; sleep 2; printf '%s %s\\n' $EPOXIDE_JOB_SECRET ${EPOXIDE_JOB_SECRET_FILE-none}";
    let connect = |port| TcpStore::connect_with("127.0.0.1", port, &TcpStoreOptions::new(PATIENCE));
    let outputs = attacked(true, script, |port| {
        let error = connect(port).unwrap_err().to_string();
        assert!(error.contains("lets in only who shows the job's secret"), "{error}");
    });
    for (rank, output) in outputs.iter().enumerate() {
        assert!(output.status.success(), "{output:?}");
        assert_eq!(lines(&output.stdout), [format!("[rank {rank}] {SECRET} none")]);
        assert_eq!(text(&output.stderr), "");
    }
    // Without a secret: as with torchrun, with one warning from each.
    let outputs = attacked(false, "touch $READY/$RANK; exec sleep 1000", |port| {
        let trouble = br#"{"Signal":15}"#;
        connect(port).unwrap().set("epoxide-launch.0.trouble", trouble).unwrap();
    });
    for output in outputs {
        assert_eq!(output.status.code(), Some(128 + 15), "{output:?}");
        let said = text(&output.stderr);
        assert_eq!(said.matches("launch: no EPOXIDE_JOB_SECRET").count(), 1, "{said}");
    }
}

#[test]
fn nodes_with_different_secrets_say_so() {
    let port = HeldPort::any().unwrap();
    let endpoint = format!("127.0.0.1:{}", port.number());
    let start = |node: &str, secret: &str| {
        let flags =
            ["--nproc-per-node", "1", "--nnodes", "2", "--node-rank", node, "--rdzv-endpoint", &endpoint];
        let mut launcher = launcher(&flags, &["true"]);
        launcher.env("EPOXIDE_JOB_SECRET", secret).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut first = start("0", SECRET);
    let second = start("1", "another secret, but as long as it has to be").wait_with_output().unwrap();
    let said = text(&second.stderr);
    assert_ne!(second.status.code(), Some(0));
    assert!(said.contains("does not know this job's secret") && !said.contains("another secret"), "{said}");
    first.kill().unwrap();
    first.wait().unwrap();
}

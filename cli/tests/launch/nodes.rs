//! Launchers of several nodes, all of them on this host.

use std::process::{Child, Output, Stdio};

use epoxide_testing::HeldPort;

use crate::launcher::{launcher, lines, text};

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
        launcher.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    // The first comes last: the others wait for it.
    let children: Vec<Child> = (0..count).rev().map(start).collect();
    children.into_iter().rev().map(|child| child.wait_with_output().unwrap()).collect()
}

#[test]
fn ranks_count_through_the_nodes() {
    let print = "echo $RANK $LOCAL_RANK $WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $MASTER_ADDR \
                 ${EPOXIDE_STORE-none}; echo $MASTER_PORT $TORCHELASTIC_RUN_ID >&2";
    let outputs = nodes(3, |_| vec!["--nproc-per-node", "2"], print);
    let mut meeting = Vec::new();
    for (node, output) in outputs.iter().enumerate() {
        let (first, second) = (2 * node, 2 * node + 1);
        let expected = [
            format!("[rank {first}] {first} 0 6 {node} 3 127.0.0.1 none"),
            format!("[rank {second}] {second} 1 6 {node} 3 127.0.0.1 none"),
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
            exec sleep 100
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

#[test]
fn launchers_that_differ_say_so() {
    let different = |node| vec!["--nproc-per-node", if node == 0 { "1" } else { "2" }];
    for output in nodes(2, different, "true") {
        assert_eq!(output.status.code(), Some(2));
        let said = text(&output.stderr);
        assert!(said.contains("disagree on the launch") && said.contains("ranks_per_node: 2"), "{said}");
    }
}

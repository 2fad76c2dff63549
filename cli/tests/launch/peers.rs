//! `benches/peers.sh`, which makes the figures of other projects: its commands, and the table that
//! it makes of what the projects' benchmarks print. The benchmarks themselves need GPUs and a
//! network.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::launcher::text;

const PEERS: [&str; 5] = ["nccl", "nccl-ep", "flashinfer", "deepep", "pplx"];

/// Output of DeepEP's two tests on two GPUs.
const DEEPEP: &str = "\
case $* in
*test_low_latency*)
    echo '[rank 0] Dispatch + combine bandwidth: 200.00 GB/s, avg_t=72.50 us, min_t=70.00 us, max_t=90.00 us'
    echo '[rank 1] Dispatch + combine bandwidth: 200.00 GB/s, avg_t=73.25 us, min_t=70.00 us, max_t=90.00 us'
    echo '[rank 0] Dispatch bandwidth: 250.00 GB/s, avg_t=29.50 us | Combine bandwidth: 350.00 GB/s, avg_t=40.80 us'
    echo '[rank 1] Dispatch bandwidth: 260.00 GB/s, avg_t=28.00 us | Combine bandwidth: 340.00 GB/s, avg_t=41.10 us'
    echo '[rank 0] Dispatch send/recv time: 20.00 + 8.00 us | Combine send/recv time: 30.00 + 9.00 us'
    ;;
*test_intranode*)
    echo '[tuning] SMs 24, NVL chunk 4: 300.00 GB/s (NVL), 500.00 us'
    echo '[tuning] Best dispatch (FP8): SMs 24, NVL chunk 20, 323.00 GB/s (NVL), t: 496.00 us'
    echo '[tuning] Best dispatch (BF16): SMs 24, NVL chunk 20, 333.00 GB/s (NVL), t: 930.00 us'
    echo '[tuning] Best combine: SMs 24, NVL chunk 6: 328.00 GB/s (NVL), t: 946.00 us'
    ;;
esac
";

const FLASHINFER: &str = "\
case $* in
*torch.distributed.run*)
    echo 'some warning'
    echo 'figures 8 11.8 13.1 15.2 12.0/13.4'
    echo 'figures 4096 220.0 240.0 450.0 225.0/250.0'
    ;;
esac
";

/// Output of `ep_bench`, in either mode: whole calls, then kernels.
const EP_BENCH: &str = "\
case $* in
*'--algorithm ll'*)
    echo 'Dispatch:  avg=64.80 us, min=60.00 us, max=70.00 us'
    echo 'Combine:   avg=82.50 us, min=80.00 us, max=90.00 us'
    echo 'Total (D+C):      avg=156.00 us, min=150.00 us, max=160.00 us'
    echo 'Dispatch:    avg=52.90 us, min=50.00 us, max=60.00 us'
    echo 'Combine:     avg=83.00 us, min=80.00 us, max=90.00 us'
    ;;
*)
    echo 'Dispatch:    total=970.00 us (min=960.00, max=980.00)'
    echo 'Combine:     total=880.00 us (min=870.00, max=890.00)'
    echo 'Total (D+C): avg=1850.00 us, min=1840.00 us, max=1860.00 us'
    echo 'Dispatch:    kernel=935.00 us'
    ;;
esac
";

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/peers.sh")
}

fn peers(arguments: &[&str]) -> Output {
    Command::new("bash").arg(script()).args(arguments).output().unwrap()
}

/// A program of these lines.
fn program(path: &Path, lines: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, format!("#!/bin/sh\n{lines}")).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_dry_run_prints_the_commands_of_every_peer_and_makes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let work = folder.path().join("work");
    let output = peers(&["--dry-run", "--gpus", "4", "--work", work.to_str().unwrap()]);
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{printed}{}", text(&output.stderr));
    assert!(!work.exists());
    let listed = text(&peers(&["--list"]).stdout);
    for (peer, line) in PEERS.into_iter().zip(listed.lines()) {
        let (name, version) = line.split_once(' ').unwrap();
        assert_eq!(name, peer);
        let of_peer = printed.split("# ").find(|part| part.starts_with(&format!("{peer}\n"))).unwrap();
        assert!(of_peer.contains(version) && of_peer.contains("7168"), "{peer}: {of_peer}");
    }
    assert_eq!(listed.lines().count(), PEERS.len());
    for command in [
        "--baseline nccl --device cuda --mode intranode --ranks-per-node 4 --hidden 7168 --topk 8 --experts 256",
        "ep_bench --algorithm ll --layout rank-major --tokens 1024 --disable-token-dropping",
        "--nproc-per-node 4",
        "tests/test_low_latency.py --num-tokens 128 --num-processes 4",
        "tests/test_intranode.py --num-tokens 4096 --num-processes 4",
        "benchmarks.bench_all_to_all --world-size 4",
    ] {
        assert!(printed.contains(command), "{command}: {printed}");
    }

    let one = text(&peers(&["deepep", "--dry-run"]).stdout);
    assert!(one.starts_with("# deepep\n") && one.matches("# ").count() == 1, "{one}");
}

#[test]
fn missing_programs_are_named() {
    // Without a search path there is no program but the shell itself.
    let mut command = Command::new("bash");
    command.args(["-c", "PATH=/nowhere exec \"$BASH\" \"$0\" nccl-ep deepep"]).arg(script());
    let output = command.env_remove("CUDA_HOME").output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    for part in
        ["2 NVIDIA GPUs at least", "nccl-ep: mpirun", "deepep: git", "deepep: nvcc of CUDA 12.3 to 12.9"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("flashinfer"), "{said}");
}

#[test]
fn arguments_that_are_wrong_are_named() {
    let cases: [(&[&str], &str); 4] = [
        (&["mscclpp"], "mscclpp: no such peer"),
        (&["--fast"], "--fast: no such option"),
        (&["--tokens", "1,,2"], "--tokens 1,,2: must be numbers"),
        (&["--dry-run", "--gpus", "1"], "--gpus 1: must be a number, at least 2"),
    ];
    for (arguments, expected) in cases {
        let output = peers(arguments);
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(expected), "{arguments:?}: {said}");
    }
}

/// On a machine that is made of stand-ins: two GPUs, compilers, and benchmarks that print what the
/// projects' own do.
#[test]
fn output_of_benchmarks_becomes_a_table() {
    let folder = tempfile::tempdir().unwrap();
    let at = |path: &str| folder.path().join(path);
    program(&at("bin/nvidia-smi"), "echo 'GPU 0: one'; echo 'GPU 1: another'\n");
    program(&at("bin/nvcc"), "echo 'Cuda compilation tools, release '$RELEASE', V1'\n");
    program(&at("bin/mpirun"), "shift 2; exec \"$@\"\n");
    program(&at("bin/g++"), "cat >/dev/null\n");
    for tool in ["git", "make", "python3"] {
        program(&at(&format!("bin/{tool}")), "exit 0\n");
    }
    // Existing parts are not fetched or built again.
    let deepep = "work/deepep-v1.2.1-torch2.8.0-nvshmem3.3.9";
    std::fs::create_dir_all(at(deepep).join("source")).unwrap();
    program(&at(deepep).join("venv/bin/python"), DEEPEP);
    program(&at("work/flashinfer-0.7.2-torch2.8.0/venv/bin/python"), FLASHINFER);
    let nccl_ep = "work/nccl-ep-44d2de0d70498a4e5df7cc9132c310c54392309d/source/build/test/nccl_ep";
    program(&at(nccl_ep).join("ep_bench"), EP_BENCH);

    let path = format!("{}:{}", at("bin").display(), std::env::var("PATH").unwrap());
    let work = at("work");
    let run_with = |arguments: &str, release: &str, variables: &[(&str, &str)]| {
        let mut command = Command::new("bash");
        command.arg(script()).args(arguments.split_whitespace()).arg("--work").arg(&work);
        command.env("PATH", &path).env("RELEASE", release).env_remove("CUDA_HOME");
        command.envs(variables.iter().copied()).output().unwrap()
    };
    let run = |arguments: &str, release: &str| run_with(arguments, release, &[]);
    let output = run("deepep flashinfer --tokens 1,8", "12.8");
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{printed}{}", text(&output.stderr));
    for row in [
        "| peer | version | tokens | sms | dispatch_us | combine_us | pair_us | p99 | command | date |",
        "| deepep-ll-fp8 | v1.2.1 | 8 | - | 29.5 | 41.1 | 73.2 | - | deepep-v1.2.1-torch2.8.0-nvshmem3.3.9/venv/bin/python \
         tests/test_low_latency.py ",
        "| deepep-ht-fp8 | v1.2.1 | 4096 | 24 | 496.00 | 946.00 | - | - | ",
        "| deepep-ht-bf16 | v1.2.1 | 4096 | 24 | 930.00 | 946.00 | - | - | ",
        "| flashinfer | 0.7.2 | 8 | - | 11.8 | 13.1 | 15.2 | 12.0/13.4 | ",
        "| flashinfer | 0.7.2 | 4096 | - | 220.0 | 240.0 | 450.0 | 225.0/250.0 | ",
    ] {
        assert!(printed.contains(row), "{row}: {printed}");
    }
    // Two tokens in all are no multiple of four.
    assert_eq!(printed.matches("| deepep-ll-fp8 |").count(), 1, "{printed}");

    let output = run("nccl-ep --tokens 128", "13.0");
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{printed}{}", text(&output.stderr));
    for row in [
        &format!("| 128 | - | 64.80 | 82.50 | 156.00 | - | mpirun -np 2 {nccl_ep}/ep_bench ")
            .replace("work/", ""),
        "| 4096 | 16 | 970.00 | 880.00 | 1850.00 | - | mpirun ",
    ] {
        assert!(printed.contains(row), "{row}: {printed}");
    }

    // A size that fails, or prints no figures, is a failure of its peer. Other sizes are kept.
    let python = at(deepep).join("venv/bin/python");
    program(&python, &format!("case \"$*\" in *'--num-tokens 2 '*) exit ;; esac\n{DEEPEP}"));
    let bench = at(nccl_ep).join("ep_bench");
    program(&bench, &format!("case \"$*\" in *'--tokens 2 '*) exit 4 ;; esac\n{EP_BENCH}"));
    for (peer, release, row) in
        [("deepep", "12.8", "| deepep-ll-fp8 | v1.2.1 | 8 |"), ("nccl-ep", "13.0", "| 8 | - | 64.80 | ")]
    {
        let output = run(&format!("{peer} --tokens 2,8"), release);
        let (printed, said) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(1), "{printed}{said}");
        assert!(printed.contains(row) && !printed.contains(" | 2 | "), "{printed}");
        assert!(said.contains(&format!("peers.sh: {peer}: no figures, or not all")), "{said}");
    }

    // Builds of other versions are not used. Nothing here can make one.
    for (peer, variable, release) in [
        ("deepep", "PEERS_DEEPEP", "12.8"),
        ("deepep", "PEERS_NVSHMEM", "12.8"),
        ("deepep", "PEERS_TORCH_12", "12.8"),
        ("flashinfer", "PEERS_FLASHINFER", "12.8"),
        ("flashinfer", "PEERS_TORCH_12", "12.8"),
        ("nccl-ep", "PEERS_NCCL_EP", "13.0"),
    ] {
        let output = run_with(&format!("{peer} --tokens 8"), release, &[(variable, "other/version")]);
        let printed = text(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{variable}: {printed}");
        assert!(!printed.contains(&format!("| {peer}")), "{variable}: {printed}");
    }

    // A peer without figures is named, and the others' are kept.
    program(&python, "case $* in *tests*) exit 3 ;; esac\n");
    let output = run("deepep flashinfer --tokens 8", "12.8");
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("failed with 3") && said.contains("peers.sh: deepep: no figures"), "{said}");
    assert!(text(&output.stdout).contains("| flashinfer |"));
}

//! The checks can fail: kernels that accept an earlier operation's value of an arrival word give
//! wrong results.

use std::path::Path;
use std::process::Output;

use epoxide_gpu::layout::ARRIVAL_SHIFT;
use epoxide_testing::alone::one_test;
use epoxide_testing::tier;
use epoxide_vgpu::ptx::{self, Operand};

use super::pairs::PAIRS_VARIABLE;

/// Names the file with the kernels to load.
const PTX: &str = "EPOXIDE_PTX";

/// The kernels with a fault: the comparison of an arrival word's epoch with the running one
/// compares the epoch with itself. The word's rows then count as arrived at any time.
fn without_epochs(text: &str) -> String {
    let shift = Operand::Int(ARRIVAL_SHIFT.into());
    let mut epoch = None;
    let mut edits = vec![];
    let file = ptx::parse(text).unwrap();
    for inst in file.entries.iter().flat_map(|entry| entry.instructions()) {
        match inst.operands.as_slice() {
            [(register, _), _, (by, _)] if inst.opcode == "shr.u64" && *by == shift => epoch = Some(register),
            [_, (left, kept), (_, lost)] if inst.is("setp") && Some(left) == epoch => {
                edits.push((lost.start..lost.end, kept.of(text)));
            }
            _ => {}
        }
    }
    assert!(!edits.is_empty(), "no kernel compares the epoch of an arrival word");
    let mut mutated = text.to_owned();
    edits.into_iter().rev().for_each(|(lost, kept)| mutated.replace_range(lost, kept));
    mutated
}

/// Names the folder of `cargo xtask mutate`, with the sound text and a faulty one.
const FAULTY: &str = "EPOXIDE_VGPU_FAULTY";

/// Runs some pairs in a process of its own, where a variable names a file or a folder.
fn pairs(variable: &str, path: &Path) -> Output {
    one_test("internode::pairs::pairs_without_a_host_wait")
        .env_remove(PTX)
        .env(variable, path)
        .env(PAIRS_VARIABLE, tier::pick("12", "30"))
        .output()
        .unwrap()
}

/// The output of a process.
fn text(output: &Output) -> String {
    let all = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&all).into_owned()
}

/// The pairs fail by a check.
#[track_caller]
fn assert_noticed(output: &Output) {
    let text = text(output);
    assert!(!output.status.success(), "the pairs must notice");
    let noticed = ["checks failed", "virtual GPU:"].iter().any(|what| text.contains(what));
    assert!(noticed, "the pairs failed for another reason: {text}");
}

#[test]
fn without_epochs_the_pairs_go_wrong() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("kernels.ptx");
    std::fs::write(&file, epoxide_gpu::PTX).unwrap();
    let sound = pairs(PTX, &file);
    assert!(sound.status.success() && text(&sound).contains("1 passed"), "{}", text(&sound));
    std::fs::write(&file, without_epochs(epoxide_gpu::PTX)).unwrap();
    assert_noticed(&pairs(PTX, &file));
}

/// The library loads the kernels that it launches, a part of the text.
#[test]
fn single_faults_reach_the_kernels_that_the_library_loads() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("sound.ptx"), epoxide_gpu::PTX).unwrap();
    std::fs::write(directory.path().join("faulty.ptx"), without_epochs(epoxide_gpu::PTX)).unwrap();
    assert_noticed(&pairs(FAULTY, directory.path()));
}

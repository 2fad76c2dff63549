//! The checks can fail: kernels that believe what an earlier operation left in an arrival word give
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

/// Runs some pairs in a process of its own, with these kernels.
fn pairs(directory: &Path, ptx: &str) -> Output {
    let file = directory.join("kernels.ptx");
    std::fs::write(&file, ptx).unwrap();
    one_test("internode::pairs::pairs_without_a_host_wait")
        .env(PTX, &file)
        .env(PAIRS_VARIABLE, tier::pick("12", "30"))
        .output()
        .unwrap()
}

#[test]
fn without_epochs_the_pairs_go_wrong() {
    let directory = tempfile::tempdir().unwrap();
    let text = |output: &Output| {
        let all = [&output.stdout[..], &output.stderr].concat();
        String::from_utf8_lossy(&all).into_owned()
    };
    let sound = pairs(directory.path(), epoxide_gpu::PTX);
    assert!(sound.status.success() && text(&sound).contains("1 passed"), "{}", text(&sound));
    let mutated = pairs(directory.path(), &without_epochs(epoxide_gpu::PTX));
    let text = text(&mutated);
    assert!(!mutated.status.success(), "the pairs must notice");
    let noticed = ["checks failed", "virtual GPU:"].iter().any(|what| text.contains(what));
    assert!(noticed, "the pairs failed for another reason: {text}");
}

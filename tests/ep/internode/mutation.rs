//! The checks can fail: kernels that believe what an earlier operation left in an arrival word give
//! wrong results.

use std::path::Path;
use std::process::Output;

use epoxide_gpu::layout::ARRIVAL_SHIFT;
use epoxide_testing::alone::one_test;
use epoxide_testing::tier;

use super::pairs::PAIRS_VARIABLE;

/// Names the file with the kernels to load.
const PTX: &str = "EPOXIDE_PTX";

/// The kernels with a fault: the comparison of an arrival word's epoch with the running one
/// compares the epoch with itself. The word's rows then count as arrived at any time.
fn without_epochs(ptx: &str) -> String {
    let shift = format!(", {ARRIVAL_SHIFT};");
    let mut epoch = None;
    let mut changed = 0;
    let mut mutated = String::new();
    for line in ptx.lines() {
        let words: Vec<&str> = line.split([' ', '\t', ',', ';']).filter(|word| !word.is_empty()).collect();
        match (words.as_slice(), epoch) {
            (["shr.u64", register, ..], _) if line.ends_with(&shift) => epoch = Some(*register),
            ([compare, predicate, left, _], Some(register))
                if compare.starts_with("setp.") && *left == register =>
            {
                changed += 1;
                mutated += &format!("\t{compare} \t{predicate}, {left}, {left};\n");
                continue;
            }
            _ => {}
        }
        mutated += line;
        mutated.push('\n');
    }
    assert!(changed > 0, "no kernel compares the epoch of an arrival word");
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

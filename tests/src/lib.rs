//! Test support for epoxide: reference answers and payloads in plain serial Rust, and ways to run
//! ranks. The tests of this package use it, the benchmarks and `epoxide roundtrip` as well. No code
//! here is shared with the kernels.
//!
//! [`oracle`] computes every public quantity of layout, dispatch and combine from the routing
//! alone. [`payload`] makes rows that identify their tokens, or that have exact sums. [`lockstep`]
//! runs ranks one at a time. [`roundtrip`] is the round trip that compares every bit, on the ranks
//! of [`harness`]. [`alone`] runs a test in a process of its own. [`fake_nccl`] compiles a stand-in
//! for NCCL.
//! [`neighbour`] is another library on the ranks' devices. [`litmus`] has the litmus tests of the
//! PTX memory model, as text and as PTX. [`fuzz`] gives malformed bytes to readers of untrusted
//! bytes. [`sizes`] lists the sizes that can be run, and [`tier`] decides how much a test tries.

pub mod alone;
pub mod compare;
#[cfg(test)]
mod docs;
pub mod fake_nccl;
pub mod fuzz;
pub mod harness;
pub mod ids;
pub mod litmus;
pub mod lockstep;
pub mod low_latency;
pub mod neighbour;
pub mod oracle;
pub mod payload;
pub mod roundtrip;
pub mod selections;
pub mod sizes;
pub mod tier;

pub use epoxide::internal::group::HeldPort;

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

#[cfg(test)]
mod tests {
    /// The first block of Rust, without the prefix of its lines.
    fn example(text: &str, before: &str) -> Vec<String> {
        let lines = text.lines().map(|line| line.strip_prefix(before).unwrap_or(line).trim_end());
        let mut behind = lines.skip_while(|line| !matches!(*line, "```" | "```rust"));
        behind.next();
        behind.take_while(|line| *line != "```").map(str::to_owned).collect()
    }

    #[test]
    fn the_layer_of_the_readme_is_the_tested_one_of_the_documentation() {
        let readme = include_str!("../../README.md");
        let (_, library) = readme.split_once("## As a library").unwrap();
        let shown = example(library, "");
        assert!(shown.len() > 30);
        let front = include_str!("../../host/src/lib.rs");
        let spaced = front.lines().map(|line| if line == "//!" { "//! " } else { line });
        assert_eq!(shown, example(&spaced.collect::<Vec<_>>().join("\n"), "//! "));
    }
}

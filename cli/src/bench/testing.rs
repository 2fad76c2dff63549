//! Runs for tests, on the virtual GPU.

use epoxide_bench::Plan;
use epoxide_bench::measured::RankResult;
use epoxide_bench::results::Point;

use super::args::Args;
use super::start::measure_points;
use crate::testing;

/// The flags of `line`, or the error.
pub fn parse(line: &str) -> Result<Args, clap::Error> {
    testing::parse(line.split_whitespace())
}

/// Small sizes, changed by the flags in `line`.
pub fn flags(line: &str) -> Args {
    let small = "bench --ranks-per-node 2 --tokens 8 --hidden 64 --experts 8 --topk 2 --warmup 1 --iters 2 \
                 --num-sms 2 --seed 7";
    let mut words: Vec<&str> = small.split_whitespace().collect();
    for pair in line.split_whitespace().collect::<Vec<_>>().chunks(2) {
        match words.iter().position(|word| *word == pair[0]) {
            Some(at) => words[at + 1] = pair[1],
            None => words.extend(pair),
        }
    }
    testing::parse(words).unwrap()
}

/// The plan that the flags give.
pub fn arguments(line: &str) -> Plan {
    flags(line).plans().unwrap().remove(0)
}

/// A run on the virtual GPU.
pub fn measured(line: &str) -> (Vec<Point>, Vec<RankResult>) {
    measure_points(&[arguments(line)], &()).unwrap()
}

/// The committed points of H200s.
#[cfg(feature = "plots")]
pub fn h200() -> Vec<Point> {
    let text = include_str!("../../../benches/data/h200.json");
    epoxide_bench::results::Results::of_text(text).unwrap().points
}

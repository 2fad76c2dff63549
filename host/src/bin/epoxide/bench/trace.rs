//! Traced calls in the Chrome / Perfetto format: open the file at <https://ui.perfetto.dev>.
//!
//! A process per rank; in it a track for the kernels and one for each block with its phases. Times are those of the
//! devices' own clocks, from the first event on; devices of one machine share theirs to about a microsecond.

use std::path::Path;

use epoxide::ep::TracedLaunch;
use serde_json::{Value, json};

use super::measure::{RankResult, TracedCall};
use super::results::write_text;
use crate::stop::Result;

/// Track of the kernels; block b is track b + 1.
const KERNELS: u64 = 0;

/// Writes all traced calls.
pub fn write(path: &Path, ranks: &[RankResult]) -> Result<()> {
    write_text(path, &events(ranks).to_string())
}

fn events(ranks: &[RankResult]) -> Value {
    let is_virtual = ranks.first().is_some_and(|rank| rank.is_virtual);
    let start = all_launches(ranks).flat_map(|launch| &launch.blocks).map(|block| block.enter).min();
    let us = |ns: u64| ns.saturating_sub(start.unwrap_or(0)) as f64 / 1e3;
    let mut events = Vec::new();
    for (number, rank) in ranks.iter().enumerate() {
        let device = if is_virtual { "VIRTUAL GPU, interpreter time" } else { rank.device.as_str() };
        let name = format!("rank {number}: {device}");
        events.push(json!({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}));
        let tracks = rank.traced.iter().flat_map(launches).map(|launch| launch.blocks.len()).max();
        for track in 0..=tracks.unwrap_or(0) as u64 {
            let name = match track {
                KERNELS => "kernels".to_owned(),
                block => format!("block {}", block - 1),
            };
            events.push(
                json!({"ph": "M", "name": "thread_name", "pid": number, "tid": track, "args": {"name": name}}),
            );
            events.push(
                json!({"ph": "M", "name": "thread_sort_index", "pid": number, "tid": track, "args": {"sort_index": track}}),
            );
        }
        for call in &rank.traced {
            for (index, launch) in launches(call).enumerate() {
                let label = match index {
                    0 => "barrier".to_owned(),
                    _ => format!("{} ({})", launch.operation, call.phase.text()),
                };
                push_launch(&mut events, number, &label, call.num_sms, launch, us);
            }
        }
    }
    json!({
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "tool": concat!("epoxide ", env!("CARGO_PKG_VERSION")),
            "virtual": is_virtual,
            "clock": if is_virtual { "interpreter time of the virtual GPU" } else { "globaltimer of each GPU" },
        },
    })
}

fn push_launch(
    events: &mut Vec<Value>,
    rank: usize,
    label: &str,
    num_sms: u32,
    launch: &TracedLaunch,
    us: impl Fn(u64) -> f64,
) {
    let mut push = |name: &str, track: u64, from: u64, to: u64| {
        events.push(json!({
            "ph": "X", "name": name, "cat": label, "pid": rank, "tid": track,
            "ts": us(from), "dur": to.saturating_sub(from) as f64 / 1e3, "args": {"num_sms": num_sms},
        }));
    };
    let starts = launch.blocks.iter().map(|block| block.enter);
    let ends = launch.blocks.iter().map(|block| block.done);
    if let (Some(start), Some(end)) = (starts.min(), ends.max()) {
        push(label, KERNELS, start, end);
    }
    for (track, block) in (1..).zip(&launch.blocks) {
        push("enter", track, block.enter, block.ready);
        push("move", track, block.ready, block.moved);
        push("done", track, block.moved, block.done);
    }
}

fn launches(call: &TracedCall) -> impl Iterator<Item = &TracedLaunch> {
    std::iter::once(&call.barrier).chain(&call.launches)
}

fn all_launches(ranks: &[RankResult]) -> impl Iterator<Item = &TracedLaunch> {
    ranks.iter().flat_map(|rank| &rank.traced).flat_map(launches)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::measured;

    #[test]
    fn phases_follow_each_other_on_every_block_of_every_rank() {
        let (_, ranks) = measured("--ranks-per-node 2 --tokens 9 --num-sms 2,4");
        let trace = events(&ranks);
        let events = trace["traceEvents"].as_array().unwrap();
        // Three calls of three phases, each with 2 and with 4 multiprocessors.
        for rank in &ranks {
            assert_eq!(rank.traced.len(), 2 * 3 * 3);
            for call in &rank.traced {
                let names: Vec<_> = call.launches.iter().map(|launch| launch.operation).collect();
                match call.phase.text() {
                    "dispatch cached" => assert_eq!(names, ["dispatch"]),
                    "dispatch uncached" => assert_eq!(names, ["notify", "dispatch"]),
                    _ => assert_eq!(names, ["combine"]),
                }
                for launch in launches(call) {
                    let blocks = if launch.operation == "notify" { call.num_sms / 2 } else { call.num_sms };
                    assert_eq!(launch.blocks.len(), blocks as usize, "{launch:?}");
                    for block in &launch.blocks {
                        assert!(block.enter > 0, "{launch:?}");
                        assert!(block.enter <= block.ready && block.ready <= block.moved, "{launch:?}");
                        assert!(block.moved <= block.done, "{launch:?}");
                    }
                }
            }
        }
        let spans = events.iter().filter(|event| event["ph"] == "X");
        let (mut kernels, mut blocks) = (0, 0);
        for span in spans {
            assert!(span["ts"].as_f64().unwrap() >= 0.0 && span["dur"].as_f64().unwrap() >= 0.0);
            if span["tid"] == KERNELS { kernels += 1 } else { blocks += 1 }
        }
        assert_eq!(kernels, 2 * 2 * 3 * (2 + 3 + 2));
        assert!(blocks > kernels);
        assert_eq!(trace["otherData"]["virtual"], true);
        let named = events.iter().any(|event| {
            event["args"]["name"].as_str().is_some_and(|name| name.contains("VIRTUAL GPU, interpreter time"))
        });
        assert!(named);
    }
}

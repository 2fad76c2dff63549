//! Traced calls in the Chrome / Perfetto format: open the file at <https://ui.perfetto.dev>.
//!
//! A process per rank. It has a track for the kernels, one for each block with its phases, and one
//! for each queue with the puts of its proxy. Times are those of the devices' own clocks, from the
//! first event on; devices of one machine share theirs to about a microsecond. Proxies run on the
//! host's clock, which `Offset` converts to the device's.

use epoxide::internal::TracedLaunch;
use std::time::Instant;

use serde_json::{Value, json};

use crate::measured::{RankResult, TracedCall};
use crate::results::PhaseName;

/// Track of the kernels; block b is track b + 1.
const KERNELS: u64 = 0;
/// Track of the first queue, behind all blocks.
const QUEUES: u64 = 1 << 16;

/// How far a device's clock is ahead of the host's time since `origin`, in nanoseconds, with the
/// uncertainty.
///
/// A traced call's first block starts after the host enqueued it, and its last block ends before
/// the host observed its end. So every call bounds the difference of the clocks from both sides.
/// The remaining interval of all bounds is the uncertainty.
struct Offset {
    origin: Instant,
    ahead: f64,
    uncertain: f64,
}

impl Offset {
    fn of(calls: &[TracedCall]) -> Option<Offset> {
        let origin = calls.first()?.host.0;
        let since = |at: Instant| at.saturating_duration_since(origin).as_nanos() as f64;
        let (mut least, mut most) = (f64::MIN, f64::MAX);
        for call in calls {
            let blocks = || launches(call).flat_map(|launch| &launch.blocks);
            let (start, end) = (blocks().map(|b| b.enter).min()?, blocks().map(|b| b.done).max()?);
            most = most.min(start as f64 - since(call.host.0));
            least = least.max(end as f64 - since(call.host.1));
        }
        Some(Offset { origin, ahead: (least + most) / 2.0, uncertain: (most - least).abs() / 2.0 })
    }

    /// The device's time at a moment of the host's.
    fn device_ns(&self, at: Instant) -> u64 {
        (at.saturating_duration_since(self.origin).as_nanos() as f64 + self.ahead).max(0.0) as u64
    }
}

/// All traced calls, as the text of a trace file.
pub fn text(ranks: &[RankResult]) -> String {
    events(ranks).to_string()
}

fn events(ranks: &[RankResult]) -> Value {
    let is_virtual = ranks.first().is_some_and(|rank| rank.is_virtual);
    let start = all_launches(ranks).flat_map(|launch| &launch.blocks).map(|block| block.enter).min();
    let us = |ns: u64| ns.saturating_sub(start.unwrap_or(0)) as f64 / 1e3;
    let mut events = Vec::new();
    let mut uncertain = Vec::new();
    for (number, rank) in ranks.iter().enumerate() {
        let device = if is_virtual { "VIRTUAL GPU, interpreter time" } else { rank.device.as_str() };
        let name = format!("rank {number}: {device}");
        events.push(json!({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}));
        let tracks = rank.traced.iter().flat_map(launches).map(|launch| launch.blocks.len()).max();
        for track in 0..=tracks.unwrap_or(0) as u64 {
            let name = match track {
                KERNELS => "kernels".to_owned(),
                track => block_name(track - 1, rank.wire_bytes > 0),
            };
            push_track(&mut events, number, track, &name);
        }
        if let Some(offset) = Offset::of(&rank.traced) {
            push_puts(&mut events, number, &rank.traced, &offset, us);
            uncertain.push(offset.uncertain / 1e3);
        }
        for call in &rank.traced {
            for (index, launch) in launches(call).enumerate() {
                let label = match call.barrier.is_some() && index == 0 {
                    true => "barrier".to_owned(),
                    false => format!("{} ({})", launch.operation, call.phase.text()),
                };
                push_launch(&mut events, number, &label, call, launch, us);
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
            "clock_of_puts": "the host's, moved by the middle of the offsets that are possible: a call's first block starts after it was enqueued, its last ends before the host sees that",
            "clock_of_puts_uncertain_us": uncertain,
        },
    })
}

/// Across nodes a channel has two blocks, each with a part in a dispatch and one in a combine.
fn block_name(block: u64, across: bool) -> String {
    match (across, block % 2) {
        (false, _) => format!("block {block}"),
        (true, 0) => format!("channel {}: sender, gatherer", block / 2),
        (true, _) => format!("channel {}: forwarder, finisher", block / 2),
    }
}

fn push_track(events: &mut Vec<Value>, rank: usize, track: u64, name: &str) {
    events.push(json!({"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}));
    events.push(
        json!({"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": track, "args": {"sort_index": track}}),
    );
}

/// A track for each (peer, queue). Puts of a queue leave in order, so a span begins when the put
/// before it has left. `taken_us` is the time from the proxy's removal of the put from the ring to
/// its end.
fn push_puts(
    events: &mut Vec<Value>,
    rank: usize,
    calls: &[TracedCall],
    offset: &Offset,
    us: impl Fn(u64) -> f64,
) {
    let mut queues: Vec<(u32, u32)> =
        calls.iter().flat_map(|call| &call.puts).map(|put| (put.peer, put.queue)).collect();
    queues.sort_unstable();
    queues.dedup();
    for (track, (peer, queue)) in (QUEUES..).zip(queues) {
        push_track(events, rank, track, &format!("puts to rank {peer}, queue {queue}"));
        for call in calls {
            let of_queue: Vec<_> =
                call.puts.iter().filter(|put| (put.peer, put.queue) == (peer, queue)).collect();
            let mut left = 0;
            // Puts that left at the same time by the proxy's clock are one span.
            for puts in of_queue.chunk_by(|a, b| a.end == b.end) {
                let bytes: u64 = puts.iter().map(|put| put.bytes).sum();
                let (taken, end) = (offset.device_ns(puts[0].begin), offset.device_ns(puts[0].end));
                let start = taken.max(left).min(end);
                left = end;
                events.push(json!({
                    "ph": "X", "name": if bytes > 0 { "rows" } else { "counter" }, "cat": "put", "pid": rank, "tid": track,
                    "ts": us(start), "dur": us(end) - us(start),
                    "args": {
                        "bytes": bytes, "puts": puts.len(), "taken_us": end.saturating_sub(taken) as f64 / 1e3,
                        "call": call.phase.text(), "num_sms": call.num_sms,
                    },
                }));
            }
        }
    }
}

fn push_launch(
    events: &mut Vec<Value>,
    rank: usize,
    label: &str,
    call: &TracedCall,
    launch: &TracedLaunch,
    us: impl Fn(u64) -> f64,
) {
    let args = json!({"num_sms": call.num_sms, "tokens": call.tokens});
    let mut push = |name: &str, track: u64, from: u64, to: u64| {
        events.push(json!({
            "ph": "X", "name": name, "cat": label, "pid": rank, "tid": track,
            "ts": us(from), "dur": to.saturating_sub(from) as f64 / 1e3, "args": args,
        }));
    };
    let starts = launch.blocks.iter().map(|block| block.enter);
    let ends = launch.blocks.iter().map(|block| block.done);
    if let (Some(start), Some(end)) = (starts.min(), ends.max()) {
        push(label, KERNELS, start, end);
    }
    for (track, block) in (1..).zip(&launch.blocks) {
        // A low-latency block sends before or after it has read that all ranks entered.
        let low_latency = PhaseName::LOW_LATENCY.contains(&call.phase);
        let names = if low_latency { ["send", "enter", "receive"] } else { ["move", "enter", "done"] };
        let mut marks = [(block.ready, names[1]), (block.moved, names[0])];
        if low_latency {
            marks.sort_unstable();
        }
        let mut from = block.enter;
        // A block that waits for no rank has no time of `enter`.
        let marks = marks.into_iter().filter(|(to, _)| *to != 0);
        for (to, name) in marks.chain([(block.done, names[2])]) {
            push(name, track, from, to);
            from = to;
        }
    }
}

fn launches(call: &TracedCall) -> impl Iterator<Item = &TracedLaunch> {
    call.barrier.iter().chain(&call.launches)
}

fn all_launches(ranks: &[RankResult]) -> impl Iterator<Item = &TracedLaunch> {
    ranks.iter().flat_map(|rank| &rank.traced).flat_map(launches)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::measured;

    #[test]
    fn phases_follow_each_other_on_every_block_of_every_rank() {
        let (_, ranks) = measured("--ranks-per-node 2 --tokens 9 --num-sms 2,4");
        let trace = events(&ranks);
        let events = trace["traceEvents"].as_array().unwrap();
        // Three calls of four phases, each with 2 and with 4 multiprocessors.
        for rank in &ranks {
            assert_eq!(rank.traced.len(), 2 * 3 * 4);
            for call in &rank.traced {
                let names: Vec<_> = call.launches.iter().map(|launch| launch.operation).collect();
                match call.phase.text() {
                    "dispatch cached" => assert_eq!(names, ["dispatch"]),
                    "dispatch uncached" => assert_eq!(names, ["notify", "dispatch"]),
                    _ => assert_eq!(names, ["combine"]),
                }
                // No rank has a token.
                assert_eq!(call.barrier.as_ref().unwrap().blocks.len(), 1);
                for launch in &call.launches {
                    let blocks = match (launch.operation, call.phase) {
                        ("notify", _) => call.num_sms / 2,
                        // `num_sms` blocks that gather, and 32 that copy: several for each channel
                        // and rank, as there are few.
                        (_, PhaseName::CombineStaged) => call.num_sms + 32,
                        _ => call.num_sms,
                    };
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
        assert_eq!(kernels, 2 * 2 * 3 * (2 + 3 + 2 + 2));
        assert!(blocks > kernels);
        assert_eq!(trace["otherData"]["virtual"], true);
        assert!(ranks.iter().all(|rank| rank.traced.iter().all(|call| call.puts.is_empty())));
        let named = events.iter().any(|event| {
            event["args"]["name"].as_str().is_some_and(|name| name.contains("VIRTUAL GPU, interpreter time"))
        });
        assert!(named);
    }

    /// Kernels store the rows for mapped nodes, and nothing is put.
    #[test]
    fn blocks_of_mapped_nodes_have_their_parts() {
        let line = "--nodes 2 --ranks-per-node 1 --num-sms 4 --tokens 9 --transport shm";
        let trace = text(&measured(line).1);
        assert!(trace.contains("channel 1: forwarder, finisher") && !trace.contains("puts to rank"));
    }

    #[test]
    fn puts_have_tracks_on_the_device_s_time_axis() {
        let (_, ranks) =
            measured("--nodes 2 --ranks-per-node 1 --num-sms 4 --tokens 9 --queues 2 --transport tcp");
        let trace = events(&ranks);
        let events = trace["traceEvents"].as_array().unwrap();
        let names: Vec<&str> = events.iter().filter_map(|event| event["args"]["name"].as_str()).collect();
        for name in [
            "channel 0: sender, gatherer",
            "channel 1: forwarder, finisher",
            "puts to rank 1, queue 0",
            "puts to rank 0, queue 1",
        ] {
            assert!(names.contains(&name), "{name} is not in {names:?}");
        }
        let rows = events.iter().filter(|event| event["cat"] == "put" && event["name"] == "rows");
        let bytes: u64 = rows.map(|event| event["args"]["bytes"].as_u64().unwrap()).sum();
        let of_puts = ranks.iter().flat_map(|rank| &rank.traced).flat_map(|call| &call.puts);
        assert!(bytes > 0 && bytes == of_puts.map(|put| put.bytes).sum::<u64>());
        for rank in &ranks {
            // The virtual GPU's clock is the host's: the bounds do not contradict each other, and
            // each put lies within its call.
            let offset = Offset::of(&rank.traced).unwrap();
            for call in &rank.traced {
                let slack = offset.uncertain as u64 + 1_000;
                let start = launches(call).flat_map(|launch| &launch.blocks).map(|block| block.enter).min();
                for put in call.puts.iter().filter(|put| put.bytes > 0) {
                    assert!(offset.device_ns(put.begin) + slack >= start.unwrap());
                }
            }
        }
        let uncertain = trace["otherData"]["clock_of_puts_uncertain_us"].as_array().unwrap();
        assert_eq!(uncertain.len(), 2);
    }
}

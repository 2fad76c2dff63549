//! Results as CSV: one line for each point and phase.

use std::path::Path;

use epoxide_bench::results::{Phase, Point};

use crate::output::write_text;
use crate::stop::{Result, Stop};

/// The columns, in order. An empty field is a value that there is not: every bandwidth on the virtual GPU.
pub const COLUMNS: [&str; 42] = [
    "mode",
    "device",
    "virtual",
    "clock",
    "date",
    "nodes",
    "num_ranks",
    "tokens",
    "hidden",
    "experts",
    "topk",
    "dtype",
    "num_sms",
    "transport",
    "queues",
    "rdma_send",
    "phase",
    "row_bytes",
    "avg_us",
    "median_us",
    "p90_us",
    "p99_us",
    "min_rank_us",
    "max_rank_us",
    "kernel_us",
    "seed_avg_us",
    "send_tokens",
    "recv_tokens",
    "links_gbps",
    "link_ceiling_gbps",
    "deepep_gbps",
    "nccl_ep_recv_gbps",
    "seed_per_rank_gbps",
    "seed_agg_gbps",
    "wire_rows",
    "wire_slot_bytes",
    "wire_bytes",
    "transport_us",
    "nvlink_us",
    "wire_share",
    "wire_gbps",
    "wire_ceiling_gbps",
];

/// Writes all points.
pub fn write(path: &Path, points: &[Point]) -> Result<()> {
    let phases = points.iter().flat_map(|point| point.phases.iter().map(move |phase| (point, phase)));
    write_lines(path, &COLUMNS, phases.map(|(point, phase)| record(point, phase).to_vec()))
}

/// Writes a table.
pub fn write_lines(path: &Path, columns: &[&str], lines: impl Iterator<Item = Vec<String>>) -> Result<()> {
    let text = text(columns, lines).map_err(|error| Stop::failed(format!("CSV: {error}")))?;
    write_text(path, text.trim_end())
}

fn text(
    columns: &[&str],
    lines: impl Iterator<Item = Vec<String>>,
) -> std::result::Result<String, Box<dyn std::error::Error>> {
    let mut csv = csv::Writer::from_writer(Vec::new());
    csv.write_record(columns)?;
    for line in lines {
        csv.write_record(line)?;
    }
    Ok(String::from_utf8(csv.into_inner()?)?)
}

fn record(point: &Point, phase: &Phase) -> [String; COLUMNS.len()] {
    let (key, call) = (&point.key, &phase.call);
    let (bandwidth, wire) = (phase.bandwidth.as_ref(), phase.wire.as_ref());
    let mscclpp = bandwidth.and_then(|bandwidth| bandwidth.mscclpp);
    let six = if phase.name.is_dispatch() { point.counts } else { point.counts.swapped() };
    let optional = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
    [
        point.mode.clone(),
        point.device.clone(),
        point.is_virtual.to_string(),
        point.clock.clone(),
        point.date.clone(),
        key.nodes.to_string(),
        key.num_ranks.to_string(),
        key.tokens.to_string(),
        key.hidden.to_string(),
        key.experts.to_string(),
        key.topk.to_string(),
        key.dtype.clone(),
        key.num_sms.to_string(),
        key.transport.clone().unwrap_or_default(),
        key.queues.map_or_else(String::new, |queues| queues.to_string()),
        key.rdma_send.map_or_else(String::new, |rows| rows.to_string()),
        phase.name.text().into(),
        phase.row_bytes.to_string(),
        call.avg_us.to_string(),
        call.median_us.to_string(),
        optional(call.p90_us),
        call.p99_us.to_string(),
        call.min_rank_us.to_string(),
        call.max_rank_us.to_string(),
        optional(phase.kernel_us),
        optional(phase.back_to_back.map(|spread| spread.avg_us)),
        six.send_total.to_string(),
        six.recv_total.to_string(),
        optional(bandwidth.map(|bandwidth| bandwidth.links)),
        optional(bandwidth.and_then(|bandwidth| bandwidth.link_ceiling)),
        optional(bandwidth.map(|bandwidth| bandwidth.deepep)),
        optional(bandwidth.map(|bandwidth| bandwidth.nccl_ep.recv_total)),
        optional(mscclpp.map(|test| test.per_rank)),
        optional(mscclpp.map(|test| test.aggregate)),
        optional(wire.map(|wire| wire.rows)),
        wire.map_or_else(String::new, |wire| wire.slot_bytes.to_string()),
        optional(wire.map(|wire| wire.bytes)),
        optional(wire.and_then(|wire| wire.transport_us)),
        optional(wire.and_then(|wire| wire.nvlink_us)),
        optional(wire.and_then(|wire| wire.share)),
        optional(bandwidth.and_then(|bandwidth| bandwidth.wire)),
        optional(bandwidth.and_then(|bandwidth| bandwidth.wire_ceiling)),
    ]
}

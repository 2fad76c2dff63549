//! Results as CSV: one line for each point and phase, and one for the point's pairs.

use std::path::Path;

use epoxide_bench::results::{Phase, Point, Slowest};

use crate::error::{CommandError, Result};
use crate::output::write_text;

/// The columns, in order. An empty field is a value that there is not: every bandwidth on the
/// virtual GPU.
pub const COLUMNS: [&str; 54] = [
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
    "slowest_p50_us",
    "slowest_p99_us",
    "slowest_min_us",
    "slowest_mean_us",
    "combine_dtype",
    "combine_rows",
    "chunk_tokens",
    "packet_tokens",
    "max_tokens",
    "commit",
    "ptx_digest",
    "driver",
];

/// Writes all points.
pub fn write(path: &Path, points: &[Point]) -> Result<()> {
    let lines = points.iter().flat_map(|point| {
        let phases = point.phases.iter().map(|phase| record(point, Some(phase), phase.slowest.as_ref()));
        phases.chain(point.pair.iter().map(|pair| record(point, None, Some(&pair.period))))
    });
    write_lines(path, &COLUMNS, lines.map(Vec::from))
}

/// Writes a table.
pub fn write_lines(path: &Path, columns: &[&str], lines: impl Iterator<Item = Vec<String>>) -> Result<()> {
    let text = table(columns, lines).map_err(|error| CommandError::failed(format!("CSV: {error}")))?;
    write_text(path, text.trim_end())
}

fn table(
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

/// The line of a phase, or of the point's pairs.
fn record(point: &Point, phase: Option<&Phase>, slowest: Option<&Slowest>) -> [String; COLUMNS.len()] {
    fn text(value: Option<impl ToString>) -> String {
        value.map_or_else(String::new, |value| value.to_string())
    }
    let (key, call) = (&point.key, phase.map(|phase| &phase.call));
    let (bandwidth, wire) =
        (phase.and_then(|phase| phase.bandwidth.as_ref()), phase.and_then(|phase| phase.wire.as_ref()));
    let mscclpp = bandwidth.and_then(|bandwidth| bandwidth.mscclpp);
    let six = phase.map(|phase| match phase.name.is_dispatch() {
        true => point.counts,
        false => point.counts.swapped(),
    });
    let kernels = point.kernels.as_ref();
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
        text(key.transport.as_ref()),
        text(key.queues),
        text(key.rdma_send),
        phase.map_or("pair", |phase| phase.name.text()).into(),
        text(phase.map(|phase| phase.row_bytes)),
        text(call.map(|call| call.avg_us)),
        text(call.map(|call| call.median_us)),
        text(call.and_then(|call| call.p90_us)),
        text(call.map(|call| call.p99_us)),
        text(call.map(|call| call.min_rank_us)),
        text(call.map(|call| call.max_rank_us)),
        text(phase.and_then(|phase| phase.kernel_us)),
        text(phase.and_then(|phase| phase.back_to_back).map(|spread| spread.avg_us)),
        text(six.map(|six| six.send_total)),
        text(six.map(|six| six.recv_total)),
        text(bandwidth.map(|bandwidth| bandwidth.links)),
        text(bandwidth.and_then(|bandwidth| bandwidth.link_ceiling)),
        text(bandwidth.map(|bandwidth| bandwidth.deepep)),
        text(bandwidth.map(|bandwidth| bandwidth.nccl_ep.recv_total)),
        text(mscclpp.map(|test| test.per_rank)),
        text(mscclpp.map(|test| test.aggregate)),
        text(wire.map(|wire| wire.rows)),
        text(wire.map(|wire| wire.slot_bytes)),
        text(wire.map(|wire| wire.bytes)),
        text(wire.and_then(|wire| wire.transport_us)),
        text(wire.and_then(|wire| wire.nvlink_us)),
        text(wire.and_then(|wire| wire.share)),
        text(bandwidth.and_then(|bandwidth| bandwidth.wire)),
        text(bandwidth.and_then(|bandwidth| bandwidth.wire_ceiling)),
        text(slowest.map(|times| times.p50_us)),
        text(slowest.map(|times| times.p99_us)),
        text(slowest.map(|times| times.min_us)),
        text(slowest.map(|times| times.mean_us)),
        text(key.combine_dtype.as_ref()),
        text(key.combine_rows.as_ref()),
        text(key.chunk_tokens),
        text(key.packet_tokens),
        text(key.max_tokens),
        text(kernels.map(|kernels| &kernels.commit)),
        text(kernels.map(|kernels| &kernels.ptx)),
        text(kernels.and_then(|kernels| kernels.driver.as_ref())),
    ]
}

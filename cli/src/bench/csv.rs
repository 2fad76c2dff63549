//! Results as CSV: one line for each point and phase, and one for the point's pairs.

use std::path::Path;

use epoxide_bench::results::{Phase, Point, Slowest};

use crate::error::{CommandError, Result};
use crate::output::write_text;

/// A field of a line: the column and the value. An empty value is one that there is not: every
/// bandwidth on the virtual GPU.
pub type Field = (&'static str, String);

/// Writes all points.
pub fn write(path: &Path, points: &[Point]) -> Result<()> {
    let lines = points.iter().flat_map(|point| {
        let phases = point.phases.iter().map(|phase| record(point, Some(phase), phase.slowest.as_ref()));
        phases.chain(point.pair.iter().map(|pair| record(point, None, Some(&pair.period))))
    });
    write_lines(path, lines)
}

/// Writes a table, whose lines have the same columns.
pub fn write_lines(path: &Path, lines: impl Iterator<Item = Vec<Field>>) -> Result<()> {
    let mut csv = csv::Writer::from_writer(Vec::new());
    let mut write = |fields: Vec<String>| {
        csv.write_record(fields).map_err(|error| CommandError::failed(format!("CSV: {error}")))
    };
    for (at, line) in lines.enumerate() {
        let (columns, values): (Vec<_>, Vec<_>) = line.into_iter().unzip();
        if at == 0 {
            write(columns.into_iter().map(str::to_owned).collect())?;
        }
        write(values)?;
    }
    let text = csv.into_inner().map_err(|error| CommandError::failed(format!("CSV: {error}")))?;
    write_text(path, String::from_utf8_lossy(&text).trim_end())
}

/// The line of a phase, or of the point's pairs.
fn record(point: &Point, phase: Option<&Phase>, slowest: Option<&Slowest>) -> Vec<Field> {
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
    let shapes = &point.shapes;
    let (kernels, traffic) = (point.kernels.as_ref(), phase.and_then(|phase| phase.traffic.as_ref()));
    vec![
        ("mode", point.mode.clone()),
        ("device", point.device.clone()),
        ("virtual", point.is_virtual.to_string()),
        ("clock", point.clock.clone()),
        ("date", point.date.clone()),
        ("nodes", key.nodes.to_string()),
        ("num_ranks", key.num_ranks.to_string()),
        ("tokens", key.tokens.to_string()),
        ("hidden", key.hidden.to_string()),
        ("experts", key.experts.to_string()),
        ("topk", key.topk.to_string()),
        ("dtype", key.dtype.clone()),
        ("num_sms", key.num_sms.to_string()),
        ("transport", text(key.transport.as_ref())),
        ("queues", text(key.queues)),
        ("rdma_send", text(key.rdma_send)),
        ("phase", phase.map_or("pair", |phase| phase.name.text()).into()),
        ("row_bytes", text(phase.map(|phase| phase.row_bytes))),
        ("avg_us", text(call.map(|call| call.avg_us))),
        ("median_us", text(call.map(|call| call.median_us))),
        ("p90_us", text(call.and_then(|call| call.p90_us))),
        ("p99_us", text(call.map(|call| call.p99_us))),
        ("min_rank_us", text(call.map(|call| call.min_rank_us))),
        ("max_rank_us", text(call.map(|call| call.max_rank_us))),
        ("kernel_us", text(phase.and_then(|phase| phase.kernel_us))),
        ("seed_avg_us", text(phase.and_then(|phase| phase.back_to_back).map(|spread| spread.avg_us))),
        ("send_tokens", text(six.map(|six| six.send_total))),
        ("recv_tokens", text(six.map(|six| six.recv_total))),
        ("links_gbps", text(bandwidth.map(|bandwidth| bandwidth.links))),
        ("link_ceiling_gbps", text(bandwidth.and_then(|bandwidth| bandwidth.link_ceiling))),
        ("deepep_gbps", text(bandwidth.map(|bandwidth| bandwidth.deepep))),
        ("nccl_ep_recv_gbps", text(bandwidth.map(|bandwidth| bandwidth.nccl_ep.recv_total))),
        ("seed_per_rank_gbps", text(mscclpp.map(|test| test.per_rank))),
        ("seed_agg_gbps", text(mscclpp.map(|test| test.aggregate))),
        ("wire_rows", text(wire.map(|wire| wire.rows))),
        ("wire_slot_bytes", text(wire.map(|wire| wire.slot_bytes))),
        ("wire_bytes", text(wire.map(|wire| wire.bytes))),
        ("transport_us", text(wire.and_then(|wire| wire.transport_us))),
        ("nvlink_us", text(wire.and_then(|wire| wire.nvlink_us))),
        ("wire_share", text(wire.and_then(|wire| wire.share))),
        ("wire_gbps", text(bandwidth.and_then(|bandwidth| bandwidth.wire))),
        ("wire_ceiling_gbps", text(bandwidth.and_then(|bandwidth| bandwidth.wire_ceiling))),
        ("slowest_p50_us", text(slowest.map(|times| times.p50_us))),
        ("slowest_p99_us", text(slowest.map(|times| times.p99_us))),
        ("slowest_min_us", text(slowest.map(|times| times.min_us))),
        ("slowest_mean_us", text(slowest.map(|times| times.mean_us))),
        ("combine_dtype", text(key.combine_dtype.as_ref())),
        ("combine_rows", text(key.combine_rows.as_ref())),
        ("rows_by_expert", text(key.rows_by_expert)),
        ("chunk_tokens", text(key.chunk_tokens)),
        ("packet_tokens", text(key.packet_tokens)),
        ("max_tokens", text(key.max_tokens)),
        ("between_us", text(key.between_us)),
        ("link_bytes", text(traffic.map(|of| of.link_bytes))),
        ("read_bytes", text(traffic.map(|of| of.read_bytes))),
        ("written_bytes", text(traffic.map(|of| of.written_bytes))),
        ("copy_read_bytes", text(traffic.map(|of| of.copy_read_bytes))),
        ("copy_written_bytes", text(traffic.map(|of| of.copy_written_bytes))),
        ("memory_ceiling_gbps", text(traffic.and_then(|of| of.memory_ceiling))),
        ("ceiling_us", text(traffic.and_then(|of| of.ceiling_us))),
        ("ceiling_share", text(traffic.and_then(|of| of.share))),
        ("commit", text(kernels.map(|kernels| &kernels.commit))),
        ("ptx_digest", text(kernels.map(|kernels| &kernels.ptx))),
        ("driver", text(kernels.and_then(|kernels| kernels.driver.as_ref()))),
        ("store_ceiling_gbps", text(traffic.and_then(|of| of.store_ceiling))),
        ("quantised", text(key.quantised)),
        ("seed", key.seed.to_string()),
        ("masked", key.masked.to_string()),
        ("warmup", point.warmup.to_string()),
        ("iters", point.iters.to_string()),
        ("flush_mib", text(point.settings.map(|settings| settings.flush_mib))),
        ("dispatch_warps", text(shapes.dispatch_warps)),
        ("dispatch_metadata_warps", text(shapes.dispatch_metadata_warps)),
        ("dispatch_copy_warps", text(shapes.dispatch_copy_warps)),
        ("dispatch_stages", text(shapes.dispatch_stages)),
        ("dispatch_stage_bytes", text(shapes.dispatch_stage_bytes)),
        ("combine_warps", text(shapes.combine_warps)),
        ("combine_slots", text(shapes.combine_slots)),
        ("combine_slot_bytes", text(shapes.combine_slot_bytes)),
        ("combine_stagers", text(shapes.combine_stagers)),
    ]
}

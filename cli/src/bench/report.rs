//! Points as text.

use std::fmt::Write;

use epoxide_bench::counts::TokenCounts;
use epoxide_bench::results::{Phase, PhaseName, Point};

/// A point for people: the lines of MSCCL++'s test first.
pub fn text(point: &Point) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = mscclpp_lines(&mut out, point);
    let _ = setting(&mut out, point);
    let _ = distributions(&mut out, point);
    let _ = on_wire(&mut out, point);
    let _ = conventions(&mut out, point);
    let _ = baselines(&mut out, point);
    out + &replays(std::slice::from_ref(point))
}

/// Meaning of the tables' words, and the origin of their conventions.
pub fn legend(points: &[Point]) -> String {
    let mut lines = vec![
        ("cached", "a dispatch along a known routing: rows alone travel"),
        ("uncached", "a dispatch that exchanges counts first, and moves ids, weights and indices too"),
        ("in pool", "a combine of rows that the experts wrote to `Buffer::combine_rows`"),
        ("staged", "a combine of a tensor, whose rows are copied into the pool on the way"),
        ("avg=", "calls back to back, one pair of events around all: MSCCL++'s test"),
        ("avg, median", "each call by itself between two events, devices aligned: DeepEP, NCCL EP"),
    ];
    if points.iter().any(|point| !point.is_virtual) {
        lines.extend([
            ("per_rank_bw", "input rows (MSCCL++'s test); agg_bw is that times the ranks"),
            ("links", "rows over NVLink, own ones left out; ceiling: plain copies with as many blocks"),
            ("DeepEP", "received rows, own ones included, in both phases"),
            ("NCCL EP", "unique (token, node) pairs sent, unique (token, rank) pairs received"),
        ]);
    }
    if points.iter().any(|point| !point.graph.is_empty()) {
        lines.push(("chained", "replays of a CUDA graph with nothing between them"));
    }
    let lines: Vec<String> = lines.iter().map(|(word, text)| format!("  {word:<12} {text}")).collect();
    format!("\n  words (docs/BENCH-METHOD.md works them by hand)\n{}", lines.join("\n"))
}

/// Replays of captured graphs, a line for each point and step; nothing where none were measured.
pub fn replays(points: &[Point]) -> String {
    let mut out = String::new();
    let lines = || points.iter().flat_map(|point| point.graph.iter().map(move |step| (point, step)));
    let Some((first, step)) = lines().next() else { return out };
    let width = lines().map(|(_, step)| step.text().len()).max().unwrap_or(0);
    let unit = if first.is_virtual { first.caveat() } else { "us" };
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "\n  graph replays, slowest rank of each iteration, {unit}; chained: {} one after the other, time of one",
        step.chain
    );
    let _ = write!(out, "  {:>5} {:>5} {:>7} {:>4} {:<width$}", "", "", "", "", "");
    for how in ["by itself", "L2 emptied before", "chained"] {
        let _ = write!(out, " | {how:<35}");
    }
    let _ = write!(out, "\n  {:>5} {:>5} {:>7} {:>4} {:<width$}", "nodes", "ranks", "tokens", "SMs", "");
    for _ in 0..3 {
        let _ = write!(out, " | {:>8} {:>8} {:>8} {:>8}", "p50", "p99", "min", "mean");
    }
    for (point, step) in lines() {
        let key = &point.key;
        let (nodes, ranks, text) = (key.nodes, key.num_ranks, step.text());
        let _ = write!(out, "\n  {nodes:>5} {ranks:>5} {:>7} {:>4} {text:<width$}", key.tokens, key.num_sms);
        for (_, times) in step.timings() {
            let _ = match times {
                Some(t) => {
                    let (p50, p99, min, mean) = (t.p50_us, t.p99_us, t.min_us, t.mean_us);
                    write!(out, " | {p50:>8.2} {p99:>8.2} {min:>8.2} {mean:>8.2}")
                }
                None => write!(out, " | {:>8} {:>8} {:>8} {:>8}", "-", "-", "-", "-"),
            };
        }
    }
    out + "\n"
}

/// A figure, or that there is none.
fn figure(value: Option<f64>) -> String {
    value.map_or("n/a".into(), |value| format!("{value:.2}"))
}

fn mscclpp_lines(out: &mut String, point: &Point) -> std::fmt::Result {
    let key = &point.key;
    writeln!(
        out,
        "[bench {} HT] nodes={} num_ranks={} tokens={} hidden={} experts={} topk={} warmup={} iters={}",
        point.mode,
        key.nodes,
        key.num_ranks,
        key.tokens,
        key.hidden,
        key.experts,
        key.topk,
        point.warmup,
        point.iters
    )?;
    // Across nodes MSCCL++'s test times the dispatch that exchanges counts, within one the cached
    // one.
    let dispatch = if key.nodes > 1 { PhaseName::DispatchUncached } else { PhaseName::DispatchCached };
    mscclpp_phase(out, point, "dispatch", point.phase(dispatch))?;
    mscclpp_phase(out, point, "combine ", point.phase(PhaseName::CombineInPool))?;
    let row_bytes = point.phase(PhaseName::DispatchCached).map_or(0, |phase| phase.row_bytes);
    let count = |tokens: f64| format!("{:.2} MB ({tokens:.1} tok)", tokens * row_bytes as f64 / 1e6);
    writeln!(
        out,
        "  byte counts (per rank avg): total_send={}  rdma_send={}  total_recv={}  rdma_recv={}",
        count(point.counts.send_total),
        count(point.counts.send_rdma),
        count(point.counts.recv_total),
        count(point.counts.recv_rdma)
    )?;
    match key.nodes {
        1 => Ok(()),
        // MSCCL++'s test has none; in its form.
        _ => mscclpp_phase(out, point, "cached  ", point.phase(PhaseName::DispatchCached)),
    }
}

fn mscclpp_phase(out: &mut String, point: &Point, label: &str, phase: Option<&Phase>) -> std::fmt::Result {
    let Some(phase) = phase else { return Ok(()) };
    let Some(time) = phase.back_to_back else { return Ok(()) };
    if point.is_virtual {
        let (avg, min, max) = (time.avg_us, figure(time.min_us), figure(time.max_us));
        return writeln!(
            out,
            "  {label}: avg={avg:.2}us min={min}us max={max}us  (VIRTUAL GPU: interpreter time)"
        );
    }
    let mscclpp = phase.bandwidth.as_ref().and_then(|bandwidth| bandwidth.mscclpp);
    let six = |pick: fn(&TokenCounts<f64>) -> f64| figure(mscclpp.map(|test| pick(&test.six)));
    writeln!(
        out,
        "  {label}: avg={:.2}us min={}us max={}us  per_rank_bw={} GB/s  agg_bw={} GB/s  (BW @ avg time)",
        time.avg_us,
        figure(time.min_us),
        figure(time.max_us),
        figure(mscclpp.map(|test| test.per_rank)),
        figure(mscclpp.map(|test| test.aggregate)),
    )?;
    writeln!(
        out,
        "            send: total={}  nvl={}  rdma={} GB/s  recv: total={}  nvl={}  rdma={} GB/s",
        six(|six| six.send_total),
        six(|six| six.send_nvl),
        six(|six| six.send_rdma),
        six(|six| six.recv_total),
        six(|six| six.recv_nvl),
        six(|six| six.recv_rdma),
    )
}

fn setting(out: &mut String, point: &Point) -> std::fmt::Result {
    let key = &point.key;
    let runs = if point.runs.len() > 1 { format!("; {} runs", point.runs.len()) } else { String::new() };
    let (sms, dtype, seed) = (key.num_sms, &key.dtype, key.seed);
    let routing = point.routing_digest.as_ref().map_or(String::new(), |digest| format!(" routing={digest}"));
    writeln!(out, "\n  num_sms={sms} dtype={dtype} seed={seed:#x}{routing}; {}{runs}", point.date)?;
    match point.is_virtual {
        true => writeln!(out, "  device: {}", point.caveat())?,
        false => {
            let driver = (point.driver_version / 1000, point.driver_version % 1000 / 10);
            writeln!(out, "  device: {}, driver for CUDA {}.{}", point.device, driver.0, driver.1)?;
        }
    }
    writeln!(out, "  kernels: {}", point.kernels_text())?;
    writeln!(
        out,
        "  set-up {:.0} ms; pool {:.1} MB, device memory {:.1} MB a rank",
        point.setup_ms,
        point.pool_bytes as f64 / 1e6,
        point.device_bytes as f64 / 1e6
    )?;
    if let Some(network) = key.network(false, false) {
        writeln!(out, "  network: {network}; wire memory {:.1} MB a rank", point.wire_bytes as f64 / 1e6)?;
    }
    writeln!(
        out,
        "  rows per rank: received {:.1} (own included), over the links {:.1}; tokens sent {:.1}; equal to a serial count of the routing",
        point.counts.recv_total, point.remote_rows, point.counts.send_total
    )
}

fn distributions(out: &mut String, point: &Point) -> std::fmt::Result {
    writeln!(
        out,
        "\n  each call by itself{}, between two events; kernel: by the blocks' own clocks, of traced calls apart",
        if point.is_virtual { "" } else { ", L2 emptied before" }
    )?;
    let unit = if point.is_virtual { "us of an interpreter" } else { "us" };
    writeln!(
        out,
        "  {unit:<22} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}{}",
        "avg",
        "median",
        "p90",
        "p99",
        "min rank",
        "max rank",
        "kernel",
        // An interpreter has no links.
        if point.is_virtual { "" } else { " |    links  ceiling   of it" }
    )?;
    let optional = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.1}"));
    for phase in &point.phases {
        let call = &phase.call;
        write!(
            out,
            "  {:<22} {:>9.1} {:>9.1} {:>9} {:>9.1} {:>9.1} {:>9.1} {:>9}",
            phase.name.text(),
            call.avg_us,
            call.median_us,
            optional(call.p90_us),
            call.p99_us,
            call.min_rank_us,
            call.max_rank_us,
            optional(phase.kernel_us)
        )?;
        match &phase.bandwidth {
            None => writeln!(out)?,
            Some(bandwidth) => {
                let share = bandwidth
                    .link_ceiling
                    .map(|ceiling| format!("{:.1}%", 100.0 * bandwidth.links / ceiling));
                writeln!(
                    out,
                    " | {:>8.1} {:>8} {:>7}",
                    bandwidth.links,
                    optional(bandwidth.link_ceiling),
                    share.unwrap_or("-".into())
                )?;
            }
        }
    }
    writeln!(
        out,
        "  an exact-size dispatch returns to the host after {:.1} us",
        point.exact_dispatch_returns.median_us
    )
}

/// Bytes that cross the network, and the call compared with the transport and the links alone.
fn on_wire(out: &mut String, point: &Point) -> std::fmt::Result {
    if point.key.nodes == 1 {
        return Ok(());
    }
    writeln!(
        out,
        "\n  on the wire, of a rank and call: equal to what the layout makes of the serial count; transport: the same rows put by \
         host code{}",
        if point.is_virtual { ", wall time of this host" } else { "" }
    )?;
    writeln!(
        out,
        "  {:<22} {:>9} {:>9} {:>12} {:>7} | {:>12} {:>9} {:>18}",
        "", "rows", "B a row", "bytes", "puts", "transport us", "NVLink us", "call / their sum"
    )?;
    let optional = |value: Option<f64>, digits| value.map_or("-".into(), |value| format!("{value:.digits$}"));
    for phase in &point.phases {
        let Some(wire) = &phase.wire else { continue };
        writeln!(
            out,
            "  {:<22} {:>9.1} {:>9} {:>12.1} {:>7.1} | {:>12} {:>9} {:>18}",
            phase.name.text(),
            wire.rows,
            wire.slot_bytes,
            wire.bytes,
            wire.puts,
            optional(wire.transport_us, 1),
            optional(wire.nvlink_us, 1),
            optional(wire.share, 2)
        )?;
    }
    Ok(())
}

/// The same calls, cached dispatch and combine in the pool, as others count them.
fn conventions(out: &mut String, point: &Point) -> std::fmt::Result {
    if point.is_virtual {
        return Ok(());
    }
    writeln!(out, "\n  the same calls as others count them, GB/s at the mean call")?;
    writeln!(
        out,
        "  {:<10} {:>9} {:>9} | {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}",
        "", "DeepEP", "links", "NCCL EP:", "", "", "", "", ""
    )?;
    writeln!(
        out,
        "  {:<10} {:>9} {:>9} | {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}",
        "", "received", "remote", "send", "send nvl", "send rdma", "recv", "recv nvl", "recv rdma"
    )?;
    for (label, name) in [("dispatch", PhaseName::DispatchCached), ("combine", PhaseName::CombineInPool)] {
        let Some(bandwidth) = point.phase(name).and_then(|phase| phase.bandwidth.as_ref()) else { continue };
        let six = bandwidth.nccl_ep;
        writeln!(
            out,
            "  {label:<10} {:>9.1} {:>9.1} | {:>10.1} {:>10.1} {:>10.1} {:>10.1} {:>10.1} {:>10.1}",
            bandwidth.deepep,
            bandwidth.links,
            six.send_total,
            six.send_nvl,
            six.send_rdma,
            six.recv_total,
            six.recv_nvl,
            six.recv_rdma
        )?;
    }
    Ok(())
}

/// Times of other ways for the same exchange, in the lines of MSCCL++'s test and each call by
/// itself. Bandwidths are of the rows that epoxide moves, so that the faster way has the higher
/// one. The column of bytes shows what a way moves besides.
fn baselines(out: &mut String, point: &Point) -> std::fmt::Result {
    for of in &point.baselines {
        let what = if of.way.is_ours() { "whole calls" } else { "the exchange alone" };
        writeln!(out, "\n  [{}] {what}, on the same routing", of.way.text())?;
        mscclpp_phase(out, point, "dispatch", Some(&of.dispatch))?;
        mscclpp_phase(out, point, "combine ", Some(&of.combine))?;
        let megabytes = |bytes: f64| format!("{:.2} MB", bytes / 1e6);
        writeln!(
            out,
            "  bytes over links (per rank avg): dispatch={} combine={}",
            megabytes(of.dispatch_link_bytes),
            megabytes(of.combine_link_bytes)
        )?;
        for (label, phase) in [("dispatch", &of.dispatch), ("combine ", &of.combine)] {
            let call = &phase.call;
            let links =
                phase.bandwidth.as_ref().map(|bandwidth| format!("  links={:.1} GB/s", bandwidth.links));
            writeln!(
                out,
                "  {label} by itself: avg={:.1}us median={:.1}us p99={:.1}us{}",
                call.avg_us,
                call.median_us,
                call.p99_us,
                links.unwrap_or_default()
            )?;
        }
    }
    Ok(())
}

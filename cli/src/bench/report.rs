//! Points as text.

use std::fmt::{Result, Write};

use epoxide_bench::results::{
    BesideSort, Distribution, Key, OnWire, Phase, PhaseName, Point, Slowest, Within,
};
use epoxide_bench::ways;

/// All points of a run for people.
pub fn whole(points: &[Point]) -> String {
    if points.iter().any(Point::is_low_latency) {
        return low_latency(points);
    }
    let tables = points.iter().map(text).chain(ways::summary(points));
    tables.chain([legend(points)]).collect::<Vec<_>>().join("\n")
}

/// A point of high throughput for people: the lines of MSCCL++'s test first.
pub fn text(point: &Point) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    for part in [mscclpp_lines, setting, distributions, by_expert, on_wire, conventions, baselines] {
        let _ = part(&mut out, point);
    }
    out + &replays(std::slice::from_ref(point))
}

/// Points of low latency for people, of one configuration, by numbers of tokens.
pub fn low_latency(points: &[Point]) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = low_latency_setting(&mut out, points);
    let _ = low_latency_replays(&mut out, points);
    let _ = low_latency_kernels(&mut out, points);
    out + "  words: rows to links: rows that a rank sends to others; sum: of both medians; pair: a dispatch and its combine, in a graph\n  \
           of many, so that launches and waits overlap; the events around a single replay take 4 to 5 us of it on an H200"
}

/// Meaning of the tables' words, and the origin of their conventions.
pub fn legend(points: &[Point]) -> String {
    let mut lines = vec![
        ("cached", "a dispatch along a known routing: rows alone travel"),
        ("uncached", "a dispatch that exchanges counts first, and moves ids, weights and indices too"),
        ("in pool", "a combine of rows that the experts wrote to `Received::combine_rows`"),
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
    if points.iter().any(|point| point.key.rows_by_expert.is_some()) {
        lines.push((
            "sort",
            "behind an ordinary dispatch, a kernel that copies its rows to their experts' segments",
        ));
    }
    if points.iter().any(|point| !point.graph.is_empty()) {
        lines.push(("chained", "replays of a CUDA graph with nothing between them"));
    }
    let lines: Vec<String> = lines.iter().map(|(word, text)| format!("  {word:<12} {text}")).collect();
    format!("\n  words (docs/BENCH-METHOD.md works them by hand)\n{}", lines.join("\n"))
}

/// Fewest samples whose 99th percentile is not the longest of them.
const FEWEST_OF_A_TAIL: usize = 100;

/// The column of a table that has the slowest iterations.
#[derive(Clone, Copy, PartialEq)]
pub enum Tail {
    /// 99th percentiles.
    P99,
    /// The longest iterations, where no times of the table have a 99th percentile.
    Longest,
}

impl Tail {
    /// The column of a table of times with these samples.
    pub fn of<'a>(mut samples: impl Iterator<Item = &'a [f64]>) -> Tail {
        if samples.all(Tail::lacks) { Tail::Longest } else { Tail::P99 }
    }

    /// Whether so few samples have no 99th percentile. Files of before have no samples at all.
    fn lacks(samples: &[f64]) -> bool {
        (1..FEWEST_OF_A_TAIL).contains(&samples.len())
    }

    pub fn title(self) -> &'static str {
        if self == Tail::P99 { "p99" } else { "max" }
    }

    /// The nearest-rank 99th percentile of the samples, which is the longest of few.
    pub fn text(self, p99_us: f64, samples: &[f64], digits: usize) -> String {
        optional(Some(p99_us).filter(|_| self == Tail::Longest || !Tail::lacks(samples)), digits)
    }
}

/// Replays of captured graphs, a line for each point and step; empty if none were measured.
pub fn replays(points: &[Point]) -> String {
    let lines = || points.iter().flat_map(|point| point.graph.iter().map(move |step| (point, step)));
    let Some((first, step)) = lines().next() else { return String::new() };
    let width = lines().map(|(_, step)| step.text().len()).max().unwrap_or(0);
    let unit = if first.is_virtual { first.caveat() } else { "us" };
    let how = ["by itself", "L2 emptied before", "chained"].map(|how| format!(" | {how:<35}")).concat();
    let timings = lines().flat_map(|(_, step)| step.timings());
    let tail = Tail::of(timings.filter_map(|(_, times)| Some(&times?.samples_us[..])));
    let titles = format!(" |      p50      {}      min     mean", tail.title()).repeat(3);
    let mut out = format!(
        "\n  graph replays, slowest rank of each iteration, {unit}; chained: {} one after the other, time of one\n\
         {:27}{:width$}{how}\n  nodes ranks  tokens  SMs {:width$}{titles}",
        step.chain, "", "", ""
    );
    for (point, step) in lines() {
        let Key { nodes, num_ranks, tokens, num_sms, .. } = &point.key;
        out += &format!("\n  {nodes:>5} {num_ranks:>5} {tokens:>7} {num_sms:>4} {:<width$}", step.text());
        for (_, times) in step.timings() {
            out += &match times {
                Some(Slowest { p50_us, p99_us, min_us, mean_us, samples_us, .. }) => {
                    let slow = tail.text(*p99_us, samples_us, 2);
                    format!(" | {p50_us:>8.2} {slow:>8} {min_us:>8.2} {mean_us:>8.2}")
                }
                None => " |        -        -        -        -".into(),
            };
        }
    }
    out + "\n"
}

/// A figure, or that there is none.
fn figure(value: Option<f64>) -> String {
    value.map_or("n/a".into(), |value| format!("{value:.2}"))
}

/// The same in a column.
fn optional(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".into(), |value| format!("{value:.digits$}"))
}

fn mscclpp_lines(out: &mut String, point: &Point) -> Result {
    let Point { mode, warmup, iters, counts, .. } = point;
    let Key { nodes, num_ranks, tokens, hidden, experts, topk, .. } = point.key;
    writeln!(
        out,
        "[bench {mode} HT] nodes={nodes} num_ranks={num_ranks} tokens={tokens} hidden={hidden} experts={experts} topk={topk} \
         warmup={warmup} iters={iters}"
    )?;
    // Across nodes MSCCL++'s test times the dispatch that exchanges counts, within one the cached
    // one.
    let is_internode = point.is_internode();
    let dispatch = if is_internode { PhaseName::DispatchUncached } else { PhaseName::DispatchCached };
    mscclpp_phase(out, point, "dispatch", point.phase(dispatch))?;
    mscclpp_phase(out, point, "combine ", point.phase(PhaseName::CombineInPool))?;
    let row_bytes = point.phase(PhaseName::DispatchCached).map_or(0, |phase| phase.row_bytes);
    let bytes = counts.map(|tokens| format!("{:.2} MB ({tokens:.1} tok)", tokens * row_bytes as f64 / 1e6));
    writeln!(
        out,
        "  byte counts (per rank avg): total_send={}  rdma_send={}  total_recv={}  rdma_recv={}",
        bytes.send_total, bytes.send_rdma, bytes.recv_total, bytes.recv_rdma
    )?;
    // MSCCL++'s test has none of the cached one across nodes; in its form.
    let cached = point.phase(PhaseName::DispatchCached).filter(|_| is_internode);
    mscclpp_phase(out, point, "cached  ", cached)
}

fn mscclpp_phase(out: &mut String, point: &Point, label: &str, phase: Option<&Phase>) -> Result {
    let Some((phase, time)) = phase.and_then(|phase| Some((phase, phase.back_to_back?))) else {
        return Ok(());
    };
    let (avg, min, max) = (time.avg_us, figure(time.min_us), figure(time.max_us));
    write!(out, "  {label}: avg={avg:.2}us min={min}us max={max}us  ")?;
    if point.is_virtual {
        return writeln!(out, "(VIRTUAL GPU: interpreter time)");
    }
    let mscclpp = phase.bandwidth.as_ref().and_then(|bandwidth| bandwidth.mscclpp);
    let per_rank = figure(mscclpp.map(|test| test.per_rank));
    let aggregate = figure(mscclpp.map(|test| test.aggregate));
    let six = mscclpp.map(|test| test.six.map(Some)).unwrap_or_default().map(figure);
    writeln!(out, "per_rank_bw={per_rank} GB/s  agg_bw={aggregate} GB/s  (BW @ avg time)")?;
    writeln!(
        out,
        "            send: total={}  nvl={}  rdma={} GB/s  recv: total={}  nvl={}  rdma={} GB/s",
        six.send_total, six.send_nvl, six.send_rdma, six.recv_total, six.recv_nvl, six.recv_rdma
    )
}

fn setting(out: &mut String, point: &Point) -> Result {
    let key = &point.key;
    let runs = if point.runs.len() > 1 { format!("; {} runs", point.runs.len()) } else { String::new() };
    let Point { date, device, setup_ms, .. } = point;
    let Key { num_sms, dtype, seed, .. } = key;
    let routing = point.routing_digest.as_ref().map_or(String::new(), |digest| format!(" routing={digest}"));
    let segments = key.rows_by_expert.map_or_else(String::new, |rows| format!(" rows_by_expert={rows}"));
    let quantised = if key.quantised.is_some() { " quantised on the way" } else { "" };
    writeln!(
        out,
        "\n  num_sms={num_sms} dtype={dtype}{quantised}{segments} seed={seed:#x}{routing}; {date}{runs}"
    )?;
    let (major, minor) = (point.driver_version / 1000, point.driver_version % 1000 / 10);
    match point.is_virtual {
        true => writeln!(out, "  device: {}", point.caveat())?,
        false => writeln!(out, "  device: {device}, driver for CUDA {major}.{minor}")?,
    }
    writeln!(out, "  kernels: {}", point.kernels_text())?;
    if let Some(nccl) = &point.nccl {
        writeln!(out, "  beside {}", nccl.text())?;
    }
    let [pool, memory] = [point.pool_bytes, point.device_bytes].map(|bytes| bytes as f64 / 1e6);
    writeln!(out, "  set-up {setup_ms:.0} ms; pool {pool:.1} MB, device memory {memory:.1} MB a rank")?;
    if let Some(network) = key.network(false, false) {
        writeln!(out, "  network: {network}; wire memory {:.1} MB a rank", point.wire_bytes as f64 / 1e6)?;
    }
    writeln!(
        out,
        "  rows per rank: received {:.1} (own included), over the links {:.1}; tokens sent {:.1}; equal to a serial count of the routing",
        point.counts.recv_total, point.remote_rows, point.counts.send_total
    )
}

fn distributions(out: &mut String, point: &Point) -> Result {
    let emptied = match (point.is_virtual, point.empties_caches()) {
        (true, _) => "",
        (false, true) => ", L2 emptied before",
        (false, false) => ", L2 not emptied",
    };
    let unit = if point.is_virtual { "us of an interpreter" } else { "us" };
    // An interpreter has no links.
    let links = if point.is_virtual { "" } else { " |    links  ceiling   of it" };
    let tail = Tail::of(point.phases.iter().map(|phase| &phase.call.samples_us[..]));
    writeln!(
        out,
        "\n  each call by itself{emptied}, between two events; kernel: by the blocks' own clocks, of traced calls apart\n  \
         {unit:<22}       avg    median       p90       {title}  min rank  max rank    kernel{links}",
        title = tail.title()
    )?;
    for phase in &point.phases {
        let Distribution { avg_us, median_us, p99_us, min_rank_us, max_rank_us, .. } = phase.call;
        let slow = tail.text(p99_us, &phase.call.samples_us, 1);
        let (p90, kernel) = (optional(phase.call.p90_us, 1), optional(phase.kernel_us, 1));
        let times = format!("{avg_us:>9.1} {median_us:>9.1} {p90:>9} {slow:>9}");
        let name = phase.name.text();
        write!(out, "  {name:<22} {times} {min_rank_us:>9.1} {max_rank_us:>9.1} {kernel:>9}")?;
        if let Some(bandwidth) = &phase.bandwidth {
            let (links, ceiling) = (bandwidth.links, bandwidth.link_ceiling);
            let share = ceiling.map_or("-".into(), |ceiling| format!("{:.1}%", 100.0 * links / ceiling));
            write!(out, " | {links:>8.1} {:>8} {share:>7}", optional(ceiling, 1))?;
        }
        writeln!(out)?;
    }
    let returns = point.exact_dispatch_returns.median_us;
    writeln!(out, "  an exact-size dispatch returns to the host after {returns:.1} us")
}

/// Bytes that rows by expert move, their time at the ceilings, and dispatches beside those with a
/// sort.
fn by_expert(out: &mut String, point: &Point) -> Result {
    if point.by_expert.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\n  rows by expert: MB of a rank and call, at the least; their us at the ceilings: the longest of links, memory and stores, then the copy\n  \
         {:22}    links     read  written    copy: read, written |    links   memory   stores     copy  ceiling   of it",
        ""
    )?;
    for phase in &point.phases {
        let Some(of) = &phase.traffic else { continue };
        let bytes = [of.link_bytes, of.read_bytes, of.written_bytes].map(|bytes| bytes / 1e6);
        let copied = [of.copy_read_bytes, of.copy_written_bytes].map(|bytes| bytes / 1e6);
        let us = [of.link_us, of.memory_us, of.store_us, of.copy_us, of.ceiling_us].map(|us| optional(us, 1));
        let share = of.share.map_or("-".into(), |share| format!("{:.1}%", 100.0 * share));
        write!(out, "  {:<22}", phase.name.text())?;
        bytes.iter().try_for_each(|bytes| write!(out, " {bytes:>8.2}"))?;
        write!(out, " {:>10.2} {:>11.2} |", copied[0], copied[1])?;
        us.iter().try_for_each(|us| write!(out, " {us:>8}"))?;
        writeln!(out, " {share:>7}")?;
    }
    let unit = if point.is_virtual { "us of an interpreter" } else { "us" };
    writeln!(out, "  slowest rank, medians, {unit}")?;
    for BesideSort { name, by_expert_us, dispatch_and_sort_us } in &point.by_expert {
        let name = name.text();
        writeln!(out, "    {name:<20} {by_expert_us:.1} by expert, {dispatch_and_sort_us:.1} with a sort")?;
    }
    Ok(())
}

/// Bytes that cross the network, and the call compared with the transport and the links alone.
fn on_wire(out: &mut String, point: &Point) -> Result {
    if !point.is_internode() {
        return Ok(());
    }
    let clock = if point.is_virtual { ", wall time of this host" } else { "" };
    writeln!(
        out,
        "\n  on the wire, of a rank and call: equal to what the layout makes of the serial count; transport: the same rows put by \
         host code{clock}\n  {:22}      rows   B a row        bytes    puts | transport us NVLink us   call / their sum",
        ""
    )?;
    for phase in &point.phases {
        let Some(OnWire { slot_bytes, rows, bytes, puts, transport_us, nvlink_us, share }) = &phase.wire
        else {
            continue;
        };
        let (name, transport, nvlink) =
            (phase.name.text(), optional(*transport_us, 1), optional(*nvlink_us, 1));
        write!(out, "  {name:<22} {rows:>9.1} {slot_bytes:>9} {bytes:>12.1} {puts:>7.1}")?;
        writeln!(out, " | {transport:>12} {nvlink:>9} {:>18}", optional(*share, 2))?;
    }
    Ok(())
}

/// The same calls, cached dispatch and combine in the pool, as others count them.
fn conventions(out: &mut String, point: &Point) -> Result {
    if point.is_virtual {
        return Ok(());
    }
    writeln!(
        out,
        "\n  the same calls as others count them, GB/s at the mean call\n  \
         {0:10}    DeepEP     links |   NCCL EP: {0:10} {0:10} {0:10} {0:10} {0:10}\n  \
         {0:10}  received    remote |       send   send nvl  send rdma       recv   recv nvl  recv rdma",
        ""
    )?;
    for (label, name) in [("dispatch", PhaseName::DispatchCached), ("combine", PhaseName::CombineInPool)] {
        let Some(bandwidth) = point.phase(name).and_then(|phase| phase.bandwidth.as_ref()) else { continue };
        let (deepep, links) = (bandwidth.deepep, bandwidth.links);
        let six = bandwidth.nccl_ep.map(|gbps| format!(" {gbps:>10.1}"));
        write!(out, "  {label:<10} {deepep:>9.1} {links:>9.1} |")?;
        write!(out, "{}{}{}", six.send_total, six.send_nvl, six.send_rdma)?;
        writeln!(out, "{}{}{}", six.recv_total, six.recv_nvl, six.recv_rdma)?;
    }
    Ok(())
}

/// Times of other ways for the same exchange, in the lines of MSCCL++'s test and each call by
/// itself. Bandwidths are of the rows that epoxide moves, so that the faster way has the higher
/// one. The column of bytes shows what a way moves besides.
fn baselines(out: &mut String, point: &Point) -> Result {
    for of in &point.baselines {
        let what = if of.way.is_ours() { "whole calls" } else { "the exchange alone" };
        writeln!(out, "\n  [{}] {what}, on the same routing", of.way.text())?;
        mscclpp_phase(out, point, "dispatch", Some(&of.dispatch))?;
        mscclpp_phase(out, point, "combine ", Some(&of.combine))?;
        let [there, back] = [of.dispatch_link_bytes, of.combine_link_bytes].map(|bytes| bytes / 1e6);
        writeln!(out, "  bytes over links (per rank avg): dispatch={there:.2} MB combine={back:.2} MB")?;
        for (label, phase) in [("dispatch", &of.dispatch), ("combine ", &of.combine)] {
            let Distribution { avg_us, median_us, p99_us, .. } = phase.call;
            let tail = Tail::of([&phase.call.samples_us[..]].into_iter()).title();
            write!(
                out,
                "  {label} by itself: avg={avg_us:.1}us median={median_us:.1}us {tail}={p99_us:.1}us"
            )?;
            if let Some(bandwidth) = &phase.bandwidth {
                write!(out, "  links={:.1} GB/s", bandwidth.links)?;
            }
            writeln!(out)?;
        }
    }
    Ok(())
}

fn low_latency_setting(out: &mut String, points: &[Point]) -> Result {
    let Some(first) = points.first() else { return Ok(()) };
    let Key { num_ranks, nodes, hidden, experts, topk, dtype, num_sms, .. } = &first.key;
    let key = &first.key;
    let transport = key.transport.as_ref();
    let nodes = transport.map_or(String::new(), |transport| format!(" nodes={nodes} transport={transport}"));
    let back = key.combine_dtype.as_deref().unwrap_or_default();
    let rows = key.combine_rows.as_ref().map_or_else(String::new, |rows| format!(" {rows}"));
    let segments = key.rows_by_expert.map_or_else(String::new, |rows| format!(" rows_by_expert={rows}"));
    let [chunk, packet] = [key.chunk_tokens, key.packet_tokens].map(Option::unwrap_or_default);
    let most = key.max_tokens.map_or_else(String::new, |most| format!(" max_tokens={most}"));
    let between = key.between_us.map_or_else(String::new, |us| format!(" between_us={us}"));
    writeln!(
        out,
        "[bench low-latency] num_ranks={num_ranks}{nodes} hidden={hidden} experts={experts} topk={topk} dispatch={dtype}{segments} \
         combine={back}{rows} num_sms={num_sms} chunk_tokens={chunk} packet_tokens={packet}{most}{between} device={:?}; {}",
        first.device, first.date
    )?;
    writeln!(out, "  kernels: {}", first.kernels_text())?;
    if first.is_virtual { writeln!(out, "  {}", first.caveat()) } else { Ok(()) }
}

fn low_latency_phases(points: &[Point]) -> impl Iterator<Item = (&Point, &Phase, &Phase)> {
    points.iter().filter_map(|point| {
        let [dispatch, combine] = PhaseName::LOW_LATENCY.map(|name| point.phase(name));
        Some((point, dispatch?, combine?))
    })
}

fn low_latency_replays(out: &mut String, points: &[Point]) -> Result {
    let chain = points.iter().find_map(|point| Some(point.pair.as_ref()?.chain)).unwrap_or_default();
    let times = low_latency_phases(points).flat_map(|(point, dispatch, combine)| {
        let phases = [dispatch, combine].map(|phase| phase.slowest.as_ref());
        phases.into_iter().flatten().chain(point.pair.iter().map(|pair| &pair.period))
    });
    let tail = Tail::of(times.map(|times| &times.samples_us[..]));
    writeln!(
        out,
        "  us; of each iteration the slowest rank: replays of a graph each between two events, and per pair of {chain} in one graph\n  \
         {:5}  tokens rows to links dispatch      {title}  combine      {title}       sum     pair      {title}",
        "  SMs",
        title = tail.title()
    )?;
    for (point, dispatch, combine) in low_latency_phases(points) {
        let (Some(dispatch), Some(combine), Some(pair)) = (&dispatch.slowest, &combine.slowest, &point.pair)
        else {
            continue;
        };
        let (Key { num_sms, tokens, .. }, rows) = (&point.key, point.remote_rows);
        let [there, back, pair] = [dispatch, combine, &pair.period].map(|times| {
            let Slowest { p50_us, p99_us, samples_us, .. } = times;
            format!("{p50_us:>8.1} {:>8}", tail.text(*p99_us, samples_us, 1))
        });
        let sum = dispatch.p50_us + combine.p50_us;
        writeln!(out, "  {num_sms:>5} {tokens:>7} {rows:>13.1} {there} {back} {sum:>9.1} {pair}")?;
    }
    Ok(())
}

fn low_latency_kernels(out: &mut String, points: &[Point]) -> Result {
    writeln!(
        out,
        "  us from the start of a kernel's first block to the last that has sent its rows, knows of all ranks, is done; medians\n  \
         {:5}  tokens dispatch {:17}     combine {:17}",
        "  SMs", "", ""
    )?;
    for (point, dispatch, combine) in low_latency_phases(points) {
        let (Some(dispatch), Some(combine)) = (&dispatch.within, &combine.within) else { continue };
        let Key { num_sms, tokens, .. } = &point.key;
        let [there, back] = [dispatch, combine].map(|Within { sent, entered, done }| {
            format!("{:>8.1} {:>8.1} {:>8.1}", sent.p50_us, entered.p50_us, done.p50_us)
        });
        writeln!(out, "  {num_sms:>5} {tokens:>7} {there}    {back}")?;
    }
    Ok(())
}

//! Turns the ranks' samples into points, and points into text.

use std::fmt::Write;

use super::Args;
use super::counts::{self, RankCounts, Six};
use super::measure::{RankResult, Samples, Times, WireCount};
use super::results::{
    Bandwidth, Distribution, Key, OnWire, Phase, PhaseName, Point, SCHEMA_VERSION, SeedBandwidth, Spread,
    gbps, mean, today,
};
use crate::stop::{Result, Stop};

/// Makes a point of every number of multiprocessors that `ranks`, in rank order, measured.
///
/// # Errors
/// Where the devices' counts are not those of the serial count of the same routing.
pub fn points(args: &Args, ranks: &[RankResult]) -> Result<Vec<Point>> {
    let by_rank = checked_counts(args, ranks)?;
    check_wire(args, ranks, &by_rank)?;
    let first = &ranks[0];
    let mean_of = |pick: &dyn Fn(&RankCounts) -> u64| {
        mean(&by_rank.iter().map(|rank| pick(rank) as f64).collect::<Vec<f64>>())
    };
    let numbers = 0..first.times.len();
    Ok(numbers
        .map(|index| {
            let shared = Shared {
                args,
                ranks,
                index,
                is_virtual: first.is_virtual,
                counts: counts::mean(&by_rank),
                remote_rows: mean_of(&|rank| rank.linked),
                relayed: mean_of(&|rank| rank.relayed),
            };
            Point {
                schema_version: SCHEMA_VERSION,
                mode: args.mode().into(),
                device: first.device.clone(),
                is_virtual: first.is_virtual,
                clock: if first.is_virtual {
                    "virtual GPU: time of an interpreter".into()
                } else {
                    "CUDA events".into()
                },
                driver_version: if first.is_virtual { 0 } else { first.driver_version },
                date: today(),
                key: args.key(first.times[index].num_sms),
                tuning: args.tuning,
                warmup: args.warmup,
                iters: args.iters,
                setup_ms: ranks.iter().map(|rank| rank.setup_ms).fold(0.0, f64::max),
                pool_bytes: first.pool_bytes,
                wire_bytes: first.wire_bytes,
                device_bytes: ranks.iter().map(|rank| rank.device_bytes).max().unwrap_or(0),
                counts: shared.counts,
                counts_by_rank: by_rank.iter().map(|rank| rank.six).collect(),
                remote_rows: shared.remote_rows,
                phases: shared.phases(),
                exact_dispatch_returns: shared.distribution(|times| &times.dispatch_exact_host),
            }
        })
        .collect())
}

/// The devices' counts, which must be those of a serial count from the ids alone.
fn checked_counts(args: &Args, ranks: &[RankResult]) -> Result<Vec<RankCounts>> {
    let ids: Vec<Vec<i64>> = ranks.iter().map(|rank| rank.topk_idx.clone()).collect();
    let expected = counts::serial(&ids, args.count_sizes());
    for (number, (rank, serial)) in ranks.iter().zip(&expected).enumerate() {
        let device = rank.counts;
        if device != *serial {
            return Err(Stop::failed(format!(
                "rank {number}: the device counts {device:?} for a dispatch, a serial count of the routing {serial:?}"
            )));
        }
    }
    Ok(expected)
}

/// Holds what the proxies put against what the layout of wire memory makes of the serial counts.
fn check_wire(args: &Args, ranks: &[RankResult], counts: &[RankCounts]) -> Result<()> {
    let calls = u64::from(args.warmup + args.iters);
    for (number, (rank, counts)) in ranks.iter().zip(counts).enumerate() {
        for (times, name) in rank.times.iter().flat_map(|times| PhaseName::ALL.map(|name| (times, name))) {
            let rows = if name.is_dispatch() { counts.six.send_rdma } else { counts.relayed };
            let messages = if name == PhaseName::DispatchUncached { rank.message_bytes } else { 0 };
            // What kernels write themselves is not put.
            let calls = if rank.mapped { 0 } else { calls };
            let expected = calls * (rows * name.slot_bytes(args.row_bytes(name), args.topk) + messages);
            let put = times.wire_of(name).map_or(0, |count| count.bytes);
            if put != expected {
                return Err(Stop::failed(format!(
                    "rank {number}: {calls} calls of {} with {} SMs put {put} bytes on the wire, by the layout {expected}",
                    name.text(),
                    times.num_sms
                )));
            }
        }
    }
    Ok(())
}

/// What the phases of one point have in common.
struct Shared<'a> {
    args: &'a Args,
    ranks: &'a [RankResult],
    index: usize,
    is_virtual: bool,
    counts: Six<f64>,
    remote_rows: f64,
    relayed: f64,
}

impl Shared<'_> {
    fn times(&self) -> impl Iterator<Item = &Times> {
        self.ranks.iter().map(|rank| &rank.times[self.index])
    }

    fn distribution(&self, samples: impl Fn(&Times) -> &Samples) -> Distribution {
        let all: Vec<&[f64]> = self.times().map(|times| samples(times).as_slice()).collect();
        Distribution::new(&all)
    }

    fn spread(&self, value: impl Fn(&Times) -> f64) -> Spread {
        Spread::new(&self.times().map(value).collect::<Vec<f64>>())
    }

    fn phases(&self) -> Vec<Phase> {
        let stream = |pick: fn(&Times) -> f64| Some(self.spread(pick));
        let exact = if self.args.world.nodes > 1 { stream(|t| t.dispatch_exact_stream) } else { None };
        vec![
            self.phase(PhaseName::DispatchCached, |t| &t.dispatch_cached, stream(|t| t.dispatch_stream)),
            self.phase(PhaseName::DispatchUncached, |t| &t.dispatch_uncached, exact),
            self.phase(PhaseName::CombineInPool, |t| &t.combine, stream(|t| t.combine_stream)),
            self.phase(PhaseName::CombineStaged, |t| &t.combine_staged, None),
        ]
    }

    fn phase(&self, name: PhaseName, samples: fn(&Times) -> &Samples, back_to_back: Option<Spread>) -> Phase {
        let row_bytes = self.args.row_bytes(name);
        let call = self.distribution(samples);
        let ceilings: Option<Vec<f64>> = self
            .times()
            .map(|times| times.ceiling.map(|(push, pull)| if name.is_dispatch() { push } else { pull }))
            .collect();
        let ceiling = ceilings.map(|ceilings| mean(&ceilings));
        let rows = Rows { sent: self.counts, remote: self.remote_rows, tokens: f64::from(self.args.tokens) };
        let wire = (self.args.world.nodes > 1).then(|| self.on_wire(name, row_bytes, &call, ceiling));
        let bandwidth = (!self.is_virtual).then(|| {
            let ranks = self.ranks.len();
            let bandwidth = bandwidth(name, &rows, row_bytes, ranks, &call, back_to_back, ceiling);
            let put = wire.as_ref().map(|wire| (wire.rows * wire.slot_bytes as f64, wire.transport_us));
            Bandwidth {
                wire: put.map(|(bytes, _)| gbps(bytes, call.avg_us)),
                wire_ceiling: put.and_then(|(bytes, us)| Some(gbps(bytes, us?))),
                ..bandwidth
            }
        });
        Phase { name, row_bytes, call, kernel_us: self.kernel_us(name), back_to_back, wire, bandwidth }
    }

    fn on_wire(&self, name: PhaseName, row_bytes: u64, call: &Distribution, ceiling: Option<f64>) -> OnWire {
        let calls = f64::from(self.args.warmup + self.args.iters) * self.ranks.len() as f64;
        let of = |pick: fn(&WireCount) -> u64| {
            self.times().filter_map(|times| times.wire_of(name)).map(|count| pick(&count)).sum::<u64>() as f64
        };
        // Rows of a staged combine are those of one in the pool.
        let alone = if name == PhaseName::CombineStaged { PhaseName::CombineInPool } else { name };
        let times = self.ranks.iter().flat_map(|rank| &rank.transport_us);
        let times: Vec<f64> = times.filter(|(phase, _)| *phase == alone).map(|(_, us)| *us).collect();
        let transport_us = (!times.is_empty()).then(|| mean(&times));
        let slot_bytes = name.slot_bytes(row_bytes, self.args.topk);
        let rows = if name.is_dispatch() { self.counts.send_rdma } else { self.relayed };
        let mapped = self.ranks.iter().all(|rank| rank.mapped);
        let slots_over_links = if mapped { rows * slot_bytes as f64 } else { 0.0 };
        let linked_bytes = self.remote_rows * row_bytes as f64 + slots_over_links;
        let nvlink_us =
            if linked_bytes == 0.0 { Some(0.0) } else { ceiling.map(|ceiling| linked_bytes / ceiling / 1e3) };
        // An interpreter's time over a network's says nothing.
        let nvlink_us = nvlink_us.filter(|_| !self.is_virtual);
        let alone_us = if mapped { Some(0.0) } else { transport_us };
        OnWire {
            slot_bytes,
            rows,
            bytes: of(|count| count.bytes) / calls,
            puts: of(|count| count.puts) / calls,
            transport_us,
            nvlink_us,
            share: alone_us.zip(nvlink_us).map(|(transport, nvlink)| call.avg_us / (transport + nvlink)),
        }
    }

    fn kernel_us(&self, name: PhaseName) -> Option<f64> {
        let num_sms = self.times().next()?.num_sms;
        let calls = self.ranks.iter().flat_map(|rank| &rank.traced);
        let times: Vec<f64> = calls
            .filter(|call| call.phase == name && call.num_sms == num_sms)
            .map(|call| call.kernel_us())
            .collect();
        (!times.is_empty()).then(|| mean(&times))
    }
}

/// Rows of a dispatch per rank.
pub struct Rows {
    /// The six metrics.
    pub sent: Six<f64>,
    /// Rows that crossed a link.
    pub remote: f64,
    /// Tokens.
    pub tokens: f64,
}

/// A phase's bandwidths by every convention.
pub fn bandwidth(
    name: PhaseName,
    rows: &Rows,
    row_bytes: u64,
    ranks: usize,
    call: &Distribution,
    back_to_back: Option<Spread>,
    link_ceiling: Option<f64>,
) -> Bandwidth {
    let bytes = |rows: f64| rows * row_bytes as f64;
    let six = if name.is_dispatch() { rows.sent } else { rows.sent.swapped() };
    Bandwidth {
        links: gbps(bytes(rows.remote), call.avg_us),
        link_ceiling,
        wire: None,
        wire_ceiling: None,
        deepep: gbps(bytes(rows.sent.recv_total), call.avg_us),
        nccl_ep: six.map(|rows| gbps(bytes(rows), call.avg_us)),
        seed: back_to_back.map(|spread| {
            let per_rank = gbps(bytes(rows.tokens), spread.avg_us);
            SeedBandwidth {
                per_rank,
                aggregate: per_rank * ranks as f64,
                six: six.map(|rows| gbps(bytes(rows), spread.avg_us)),
            }
        }),
    }
}

/// A point for people: the seed's lines first.
pub fn text(point: &Point) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = seed_lines(&mut out, point);
    let _ = setting(&mut out, point);
    let _ = distributions(&mut out, point);
    let _ = on_wire(&mut out, point);
    let _ = conventions(&mut out, point);
    out
}

/// A figure, or that there is none.
fn figure(value: Option<f64>) -> String {
    value.map_or("n/a".into(), |value| format!("{value:.2}"))
}

fn seed_lines(out: &mut String, point: &Point) -> std::fmt::Result {
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
    // Across nodes the seed times the dispatch that exchanges counts, within one the cached one.
    let dispatch = if key.nodes > 1 { PhaseName::DispatchUncached } else { PhaseName::DispatchCached };
    seed_phase(out, point, "dispatch", dispatch)?;
    seed_phase(out, point, "combine ", PhaseName::CombineInPool)?;
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
        // Not of the seed, in its form.
        _ => seed_phase(out, point, "cached  ", PhaseName::DispatchCached),
    }
}

fn seed_phase(out: &mut String, point: &Point, label: &str, name: PhaseName) -> std::fmt::Result {
    let Some(phase) = point.phase(name) else { return Ok(()) };
    let Some(time) = phase.back_to_back else { return Ok(()) };
    let note = if point.is_virtual { "(VIRTUAL GPU: interpreter time, no BW)" } else { "(BW @ avg time)" };
    let seed = phase.bandwidth.as_ref().and_then(|bandwidth| bandwidth.seed);
    let six = |pick: fn(&Six<f64>) -> f64| figure(seed.map(|seed| pick(&seed.six)));
    writeln!(
        out,
        "  {label}: avg={:.2}us min={}us max={}us  per_rank_bw={} GB/s  agg_bw={} GB/s  {note}",
        time.avg_us,
        figure(time.min_us),
        figure(time.max_us),
        figure(seed.map(|seed| seed.per_rank)),
        figure(seed.map(|seed| seed.aggregate)),
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
    writeln!(out, "\n  num_sms={} dtype={} seed={:#x}; {}", key.num_sms, key.dtype, key.seed, point.date)?;
    match point.is_virtual {
        true => writeln!(out, "  device: {}", point.caveat())?,
        false => {
            let driver = (point.driver_version / 1000, point.driver_version % 1000 / 10);
            writeln!(out, "  device: {}, driver for CUDA {}.{}", point.device, driver.0, driver.1)?;
        }
    }
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
        "  {unit:<22} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} | {:>8} {:>8} {:>7}",
        "avg", "median", "p90", "p99", "min rank", "max rank", "kernel", "links", "ceiling", "of it"
    )?;
    let optional = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.1}"));
    for phase in &point.phases {
        let call = &phase.call;
        write!(
            out,
            "  {:<22} {:>9.1} {:>9.1} {:>9} {:>9.1} {:>9.1} {:>9.1} {:>9} |",
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
            None => writeln!(out, " no bandwidth: virtual GPU")?,
            Some(bandwidth) => {
                let share = bandwidth
                    .link_ceiling
                    .map(|ceiling| format!("{:.1}%", 100.0 * bandwidth.links / ceiling));
                writeln!(
                    out,
                    " {:>8.1} {:>8} {:>7}",
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

/// What crosses the network, and how the call compares with the transport and the links alone.
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
        return writeln!(out, "  no table of conventions: no bandwidth comes of {}", point.caveat());
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

impl Args {
    /// The key of a point with `num_sms` multiprocessors.
    pub fn key(&self, num_sms: u32) -> Key {
        let across = self.world.nodes > 1;
        Key {
            nodes: self.world.nodes,
            num_ranks: self.world.ranks(),
            tokens: self.tokens,
            hidden: self.hidden,
            experts: self.experts,
            topk: self.topk,
            dtype: self.dtype().name().to_string(),
            seed: self.seed,
            masked: self.masked,
            num_sms,
            transport: across.then(|| self.network.transport.kind().to_string()),
            queues: across.then_some(self.network.queues(self.device)),
            rdma_send: across.then_some(self.rdma_send),
        }
    }
}

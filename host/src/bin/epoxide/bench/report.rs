//! Turns the ranks' samples into points, and points into text.

use std::fmt::Write;

use super::Args;
use super::counts::{self, Six};
use super::measure::{RankResult, Samples, Times};
use super::results::{
    Bandwidth, Distribution, Key, Phase, PhaseName, Point, SCHEMA_VERSION, SeedBandwidth, Spread, gbps, mean,
    today,
};
use crate::stop::{Result, Stop};

/// Makes a point of every number of multiprocessors that `ranks`, in rank order, measured.
///
/// # Errors
/// Where the devices' counts are not those of the serial count of the same routing.
pub fn points(args: &Args, ranks: &[RankResult]) -> Result<Vec<Point>> {
    let by_rank = checked_counts(args, ranks)?;
    let first = &ranks[0];
    let remote: Vec<f64> = ranks.iter().map(|rank| (rank.counts.recv_total - rank.own_rows) as f64).collect();
    let numbers = 0..first.times.len();
    Ok(numbers
        .map(|index| {
            let shared = Shared {
                args,
                ranks,
                index,
                is_virtual: first.is_virtual,
                counts: counts::mean(&by_rank),
                remote_rows: mean(&remote),
            };
            Point {
                schema_version: SCHEMA_VERSION,
                mode: args.mode.clone(),
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
                device_bytes: ranks.iter().map(|rank| rank.device_bytes).max().unwrap_or(0),
                counts: shared.counts,
                counts_by_rank: by_rank.clone(),
                remote_rows: shared.remote_rows,
                phases: shared.phases(),
                exact_dispatch_returns: shared.distribution(|times| &times.dispatch_exact_host),
            }
        })
        .collect())
}

/// The devices' counts, which must be those of a serial count from the ids alone.
fn checked_counts(args: &Args, ranks: &[RankResult]) -> Result<Vec<Six<u64>>> {
    let ids: Vec<Vec<i64>> = ranks.iter().map(|rank| rank.topk_idx.clone()).collect();
    let expected = counts::serial(&ids, args.count_sizes());
    for (number, (rank, expected)) in ranks.iter().zip(&expected).enumerate() {
        let sides = [(rank.counts, *expected), (rank.counts.swapped(), expected.swapped())];
        for (phase, (device, serial)) in ["dispatch", "combine"].into_iter().zip(sides) {
            if device != serial {
                return Err(Stop::failed(format!(
                    "rank {number}: the device counts {device:?} for {phase}, a serial count of the routing {serial:?}"
                )));
            }
        }
    }
    Ok(ranks.iter().map(|rank| rank.counts).collect())
}

/// What the phases of one point have in common.
struct Shared<'a> {
    args: &'a Args,
    ranks: &'a [RankResult],
    index: usize,
    is_virtual: bool,
    counts: Six<f64>,
    remote_rows: f64,
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
        vec![
            self.phase(PhaseName::DispatchCached, |t| &t.dispatch_cached, stream(|t| t.dispatch_stream)),
            self.phase(PhaseName::DispatchUncached, |t| &t.dispatch_uncached, None),
            self.phase(PhaseName::CombineInPool, |t| &t.combine, stream(|t| t.combine_stream)),
            self.phase(PhaseName::CombineStaged, |t| &t.combine_staged, None),
        ]
    }

    fn phase(&self, name: PhaseName, samples: fn(&Times) -> &Samples, back_to_back: Option<Spread>) -> Phase {
        let row_bytes = match name.is_dispatch() {
            true => self.args.dispatch_row_bytes(),
            false => self.args.combine_row_bytes(),
        };
        let call = self.distribution(samples);
        let ceilings: Option<Vec<f64>> = self
            .times()
            .map(|times| times.ceiling.map(|(push, pull)| if name.is_dispatch() { push } else { pull }))
            .collect();
        let rows = Rows { sent: self.counts, remote: self.remote_rows, tokens: f64::from(self.args.tokens) };
        let bandwidth = (!self.is_virtual).then(|| {
            let ceiling = ceilings.map(|ceilings| mean(&ceilings));
            bandwidth(name, &rows, row_bytes, self.ranks.len(), &call, back_to_back, ceiling)
        });
        Phase { name, row_bytes, call, kernel_us: self.kernel_us(name), back_to_back, bandwidth }
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
    let note = if point.is_virtual { "(VIRTUAL GPU: interpreter time, no BW)" } else { "(BW @ avg time)" };
    for (label, name) in [("dispatch", PhaseName::DispatchCached), ("combine ", PhaseName::CombineInPool)] {
        let Some(phase) = point.phase(name) else { continue };
        let Some(time) = phase.back_to_back else { continue };
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
        )?;
    }
    let row_bytes = point.phase(PhaseName::DispatchCached).map_or(0, |phase| phase.row_bytes);
    let count = |tokens: f64| format!("{:.2} MB ({tokens:.1} tok)", tokens * row_bytes as f64 / 1e6);
    writeln!(
        out,
        "  byte counts (per rank avg): total_send={}  rdma_send={}  total_recv={}  rdma_recv={}",
        count(point.counts.send_total),
        count(point.counts.send_rdma),
        count(point.counts.recv_total),
        count(point.counts.recv_rdma)
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
        Key {
            nodes: 1,
            num_ranks: self.ranks_per_node,
            tokens: self.tokens,
            hidden: self.hidden,
            experts: self.experts,
            topk: self.topk,
            dtype: self.dtype().name().to_string(),
            seed: self.seed,
            masked: self.masked,
            num_sms,
        }
    }
}

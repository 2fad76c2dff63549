//! Turns the ranks' samples into points.

use crate::counts::{self, RankCounts, TokenCounts};
use crate::measured::{LowLatencyTimes, RankResult, ReplayTimes, Samples, Times, WaySamples, WireCount};
use crate::results::{
    Bandwidth, Distribution, MscclppBandwidth, OnWire, Pairs, Phase, PhaseName, Point, Replays, Run,
    SCHEMA_VERSION, Slowest, Spread, WayResult, Within, gbps, mean, today,
};
use crate::timing::CHAIN;
use crate::{Effort, Error, Plan, Result, digest, low_latency};

/// The points of all runs of all ranks, `runs[rank][run]`, and what the ranks measured in the
/// first.
///
/// # Errors
/// As [`points`].
pub fn of_runs(plan: &Plan, runs: Vec<Vec<RankResult>>) -> Result<(Vec<Point>, Vec<RankResult>)> {
    let first = runs.iter().filter_map(|runs| runs.first().cloned()).collect();
    Ok((join_runs(by_run(plan, runs)?), first))
}

/// The points of each run of all ranks, `runs[rank][run]`.
///
/// # Errors
/// As [`points`].
pub fn by_run(plan: &Plan, runs: Vec<Vec<RankResult>>) -> Result<Vec<Vec<Point>>> {
    let mut ranks: Vec<_> = runs.into_iter().map(Vec::into_iter).collect();
    let mut all = Vec::new();
    loop {
        let run: Vec<RankResult> = ranks.iter_mut().filter_map(Iterator::next).collect();
        if run.is_empty() {
            return Ok(all);
        }
        all.push(points(plan, &run)?);
    }
}

/// One point of each, where `runs` have the same points in the same order.
pub fn join_runs(runs: Vec<Vec<Point>>) -> Vec<Point> {
    let mut runs = runs.into_iter();
    let mut joined = runs.next().unwrap_or_default();
    for run in runs {
        for (point, more) in joined.iter_mut().zip(run) {
            point.add_runs(more);
        }
    }
    joined
}

/// Makes a point of every number of multiprocessors that `ranks`, in rank order, measured.
///
/// # Errors
/// Where the devices' counts are not those of the serial count of the same routing.
pub fn points(plan: &Plan, ranks: &[RankResult]) -> Result<Vec<Point>> {
    let asked = plan;
    let plan = &*asked.as_run(ranks.iter().all(|rank| rank.is_joined));
    let by_rank = checked_counts(plan, ranks)?;
    check_wire(plan, ranks, &by_rank)?;
    let low_latency_rows = plan.low_latency.map(|_| low_latency::remote_rows(plan));
    let first = &ranks[0];
    let mean_of = |pick: &dyn Fn(&RankCounts) -> u64| {
        mean(&by_rank.iter().map(|rank| pick(rank) as f64).collect::<Vec<f64>>())
    };
    let numbers = 0..first.times.len();
    Ok(numbers
        .map(|index| {
            let shared = Common {
                plan,
                ranks,
                index,
                is_virtual: first.is_virtual,
                counts: counts::mean(&by_rank),
                remote_rows: low_latency_rows.unwrap_or_else(|| mean_of(&|rank| rank.linked)),
                relayed: mean_of(&|rank| rank.relayed),
            };
            Point {
                schema_version: SCHEMA_VERSION,
                mode: plan.mode().into(),
                device: first.device.clone(),
                is_virtual: first.is_virtual,
                clock: Point::clock_of(first.is_virtual).into(),
                driver_version: if first.is_virtual { 0 } else { first.driver_version },
                date: today(),
                kernels: Some(first.kernels.clone()),
                key: asked.key(first.times[index].num_sms),
                shapes: plan.shapes,
                warmup: plan.warmup,
                iters: plan.iters,
                setup_ms: ranks.iter().map(|rank| rank.setup_ms).fold(0.0, f64::max),
                pool_bytes: first.pool_bytes,
                wire_bytes: first.wire_bytes,
                device_bytes: ranks.iter().map(|rank| rank.device_bytes).max().unwrap_or(0),
                counts: shared.counts,
                counts_by_rank: by_rank.iter().map(|rank| rank.six).collect(),
                remote_rows: shared.remote_rows,
                phases: shared.phases(),
                runs: vec![Run { started: first.started }],
                routing_digest: Some(digest::of_routing(ranks.iter().map(|rank| rank.topk_idx.as_slice()))),
                pair: shared.pair(),
                baselines: shared.baselines(),
                exact_dispatch_returns: shared.distribution(|times| &times.dispatch_exact_host),
                graph: shared.replays(),
            }
        })
        .collect())
}

/// The devices' counts, which must be those of a serial count from the ids alone.
fn checked_counts(plan: &Plan, ranks: &[RankResult]) -> Result<Vec<RankCounts>> {
    let ids: Vec<Vec<i64>> = ranks.iter().map(|rank| rank.topk_idx.clone()).collect();
    let expected = counts::serial(&ids, plan.count_sizes());
    if plan.low_latency.is_some() {
        // Its tables were compared with the oracle.
        return Ok(expected);
    }
    for (number, (rank, serial)) in ranks.iter().zip(&expected).enumerate() {
        let device = rank.counts;
        if device != *serial {
            return Err(Error::Failed(format!(
                "rank {number}: the device counts {device:?} for a dispatch, a serial count of the routing {serial:?}"
            )));
        }
    }
    Ok(expected)
}

/// Holds what the proxies put against what the layout of wire memory makes of the serial counts.
fn check_wire(plan: &Plan, ranks: &[RankResult], counts: &[RankCounts]) -> Result<()> {
    if plan.low_latency.is_some() {
        return Ok(());
    }
    let calls = u64::from(plan.warmup + plan.iters);
    for (number, (rank, counts)) in ranks.iter().zip(counts).enumerate() {
        for (times, name) in
            rank.times.iter().flat_map(|times| PhaseName::HIGH_THROUGHPUT.map(|name| (times, name)))
        {
            let rows = if name.is_dispatch() { counts.six.send_rdma } else { counts.relayed };
            let messages = if name == PhaseName::DispatchUncached { rank.message_bytes } else { 0 };
            // Kernels store to mapped peers themselves, without puts.
            let calls = if rank.mapped { 0 } else { calls };
            let expected = calls * (rows * name.slot_bytes(plan.row_bytes(name), plan.topk) + messages);
            let put = times.wire_of(name).map_or(0, |count| count.bytes);
            if put != expected {
                return Err(Error::Failed(format!(
                    "rank {number}: {calls} calls of {} with {} SMs put {put} bytes on the wire, by the layout {expected}",
                    name.text(),
                    times.num_sms
                )));
            }
        }
    }
    Ok(())
}

/// Data that the phases of one point share.
struct Common<'a> {
    plan: &'a Plan,
    ranks: &'a [RankResult],
    index: usize,
    is_virtual: bool,
    counts: TokenCounts<f64>,
    remote_rows: f64,
    relayed: f64,
}

impl Common<'_> {
    fn times(&self) -> impl Iterator<Item = &Times> {
        self.ranks.iter().map(|rank| &rank.times[self.index])
    }

    fn samples(&self, samples: impl Fn(&Times) -> &Samples) -> Vec<&[f64]> {
        self.times().map(|times| samples(times).as_slice()).collect()
    }

    fn distribution(&self, samples: impl Fn(&Times) -> &Samples) -> Distribution {
        Distribution::new(&self.samples(samples))
    }

    fn spread(&self, value: impl Fn(&Times) -> f64) -> Spread {
        Spread::new(&self.times().map(value).collect::<Vec<f64>>())
    }

    fn phases(&self) -> Vec<Phase> {
        if self.plan.low_latency.is_some() {
            return PhaseName::LOW_LATENCY.into_iter().filter_map(|name| self.low_latency(name)).collect();
        }
        let whole = self.plan.effort == Effort::Whole;
        let stream = |pick: fn(&Times) -> f64| whole.then(|| self.spread(pick));
        let exact = if self.plan.topology.nodes > 1 { stream(|t| t.dispatch_exact_stream) } else { None };
        vec![
            self.phase(PhaseName::DispatchCached, |t| &t.dispatch_cached, stream(|t| t.dispatch_stream)),
            self.phase(PhaseName::DispatchUncached, |t| &t.dispatch_uncached, exact),
            self.phase(PhaseName::CombineInPool, |t| &t.combine, stream(|t| t.combine_stream)),
            self.phase(PhaseName::CombineStaged, |t| &t.combine_staged, None),
        ]
    }

    fn low_latency(&self, name: PhaseName) -> Option<Phase> {
        let ranks: Vec<&LowLatencyTimes> = self.times().filter_map(|times| times.low_latency(name)).collect();
        let samples = |pick: fn(&LowLatencyTimes) -> &Samples| -> Vec<&[f64]> {
            ranks.iter().map(|times| pick(times).as_slice()).collect()
        };
        let (replays, done) = (samples(|times| &times.replays), samples(|times| &times.done));
        (!ranks.is_empty()).then(|| Phase {
            name,
            row_bytes: self.plan.row_bytes(name),
            call: Distribution::new(&replays),
            slowest: Some(Slowest::new(&replays)),
            kernel_us: Some(Distribution::new(&done).avg_us),
            back_to_back: None,
            wire: None,
            bandwidth: None,
            within: Some(Within {
                sent: Slowest::new(&samples(|times| &times.sent)),
                entered: Slowest::new(&samples(|times| &times.entered)),
                done: Slowest::new(&done),
            }),
        })
    }

    /// All ranks replay the same steps in the same order.
    fn replays(&self) -> Vec<Replays> {
        let steps = self.ranks[0].times[self.index].replays.iter().enumerate();
        let of = |at: usize, pick: fn(&ReplayTimes) -> Option<&Samples>| {
            let ranks: Option<Vec<&[f64]>> =
                self.times().map(|times| pick(&times.replays[at]).map(Vec::as_slice)).collect();
            ranks.map(|ranks| Slowest::new(&ranks))
        };
        steps
            .filter_map(|(at, step)| {
                Some(Replays {
                    calls: step.calls.clone(),
                    chain: step.chain,
                    alone: of(at, |times| Some(&times.alone))?,
                    flushed: of(at, |times| times.flushed.as_ref()),
                    chained: of(at, |times| Some(&times.chained))?,
                })
            })
            .collect()
    }

    fn phase(&self, name: PhaseName, samples: fn(&Times) -> &Samples, back_to_back: Option<Spread>) -> Phase {
        let phase = self.whole_calls(name, &self.samples(samples), back_to_back);
        let ceiling = self.ceiling(name);
        let wire =
            (self.plan.topology.nodes > 1).then(|| self.on_wire(name, phase.row_bytes, &phase.call, ceiling));
        let put = wire.as_ref().map(|wire| (wire.rows * wire.slot_bytes as f64, wire.transport_us));
        let bandwidth = phase.bandwidth.map(|bandwidth| Bandwidth {
            wire: put.map(|(bytes, _)| gbps(bytes, phase.call.avg_us)),
            wire_ceiling: put.and_then(|(bytes, us)| Some(gbps(bytes, us?))),
            ..bandwidth
        });
        Phase { kernel_us: self.kernel_us(name), wire, bandwidth, ..phase }
    }

    /// The links' own speed with as many blocks, where that was measured.
    fn ceiling(&self, name: PhaseName) -> Option<f64> {
        let ceilings: Option<Vec<f64>> = self
            .times()
            .map(|times| times.ceiling.map(|(push, pull)| if name.is_dispatch() { push } else { pull }))
            .collect();
        ceilings.map(|ceilings| mean(&ceilings))
    }

    /// Figures from all ranks' times for a phase, for any way.
    fn whole_calls(&self, name: PhaseName, samples: &[&[f64]], back_to_back: Option<Spread>) -> Phase {
        let row_bytes = self.plan.row_bytes(name);
        let call = Distribution::new(samples);
        let rows = Rows { sent: self.counts, remote: self.remote_rows, tokens: f64::from(self.plan.tokens) };
        let ranks = self.ranks.len();
        let bandwidth = (!self.is_virtual)
            .then(|| bandwidth(name, &rows, row_bytes, ranks, &call, back_to_back, self.ceiling(name)));
        let slowest = Some(Slowest::new(samples));
        let (kernel_us, wire, within) = (None, None, None);
        Phase { name, row_bytes, call, slowest, kernel_us, back_to_back, wire, bandwidth, within }
    }

    fn pair(&self) -> Option<Pairs> {
        let period = || Slowest::new(&self.samples(|times| &times.pair));
        let of_low_latency = self.plan.low_latency.map(|_| self.plan.chain());
        let chain = of_low_latency.or(self.plan.baseline.map(|_| CHAIN));
        chain.map(|chain| Pairs { chain, period: period() })
    }

    /// All ranks measure the same ways in the same order.
    fn baselines(&self) -> Vec<WayResult> {
        let ways = self.ranks[0].others.iter().enumerate();
        ways.map(|(at, first)| {
            let of_ranks = || self.ranks.iter().map(|rank| &rank.others[at]);
            let samples = |pick: fn(&WaySamples) -> &Samples| -> Vec<&[f64]> {
                of_ranks().map(|way| pick(way).as_slice()).collect()
            };
            let stream = |pick: fn((f64, f64)) -> f64| {
                let ranks: Option<Vec<f64>> = of_ranks().map(|way| way.stream.map(pick)).collect();
                ranks.map(|ranks| Spread::new(&ranks))
            };
            let bytes = |pick: fn((u64, u64)) -> u64| {
                mean(&of_ranks().map(|way| pick(way.link_bytes) as f64).collect::<Vec<f64>>())
            };
            let (dispatch, combine) = (samples(|way| &way.dispatch), samples(|way| &way.combine));
            WayResult {
                way: first.way,
                dispatch: self.whole_calls(PhaseName::DispatchCached, &dispatch, stream(|of| of.0)),
                combine: self.whole_calls(PhaseName::CombineInPool, &combine, stream(|of| of.1)),
                pair: Pairs { chain: CHAIN, period: Slowest::new(&samples(|way| &way.pair)) },
                dispatch_link_bytes: bytes(|of| of.0),
                combine_link_bytes: bytes(|of| of.1),
            }
        })
        .collect()
    }

    fn on_wire(&self, name: PhaseName, row_bytes: u64, call: &Distribution, ceiling: Option<f64>) -> OnWire {
        let calls = f64::from(self.plan.warmup + self.plan.iters) * self.ranks.len() as f64;
        let of = |pick: fn(&WireCount) -> u64| {
            self.times().filter_map(|times| times.wire_of(name)).map(|count| pick(&count)).sum::<u64>() as f64
        };
        // Rows of a staged combine are those of one in the pool.
        let alone = if name == PhaseName::CombineStaged { PhaseName::CombineInPool } else { name };
        let times = self.ranks.iter().flat_map(|rank| &rank.transport_us);
        let times: Vec<f64> = times.filter(|(phase, _)| *phase == alone).map(|(_, us)| *us).collect();
        let transport_us = (!times.is_empty()).then(|| mean(&times));
        let slot_bytes = name.slot_bytes(row_bytes, self.plan.topk);
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
    pub sent: TokenCounts<f64>,
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
        mscclpp: back_to_back.map(|spread| {
            let per_rank = gbps(bytes(rows.tokens), spread.avg_us);
            MscclppBandwidth {
                per_rank,
                aggregate: per_rank * ranks as f64,
                six: six.map(|rows| gbps(bytes(rows), spread.avg_us)),
            }
        }),
    }
}

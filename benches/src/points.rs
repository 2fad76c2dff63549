//! Turns the ranks' samples into points.

use crate::counts::{self, RankCounts, SelectionCounts, TokenCounts};
use crate::measured::{KernelTimes, PhaseTimes, RankResult, ReplayTimes, Samples, Times, WaySamples};
use crate::plan::CHAIN;
use crate::results::{
    Bandwidth, Distribution, MscclppBandwidth, OnWire, Pairs, Phase, PhaseName, Point, Replays, Run,
    SCHEMA_VERSION, Slowest, Spread, Traffic, WayResult, Within, gbps, mean, today,
};
use crate::versions::digest_of_routing;
use crate::{Error, Plan, Result, low_latency};

/// The points of all runs of all ranks, `runs[rank][run]`, and what the ranks measured in the
/// first.
///
/// # Errors
/// See [`points`].
pub fn of_runs(plan: &Plan, runs: Vec<Vec<RankResult>>) -> Result<(Vec<Point>, Vec<RankResult>)> {
    let first = runs.iter().filter_map(|runs| runs.first().cloned()).collect();
    Ok((join_runs(by_run(plan, runs)?), first))
}

/// The points of each run of all ranks, `runs[rank][run]`.
///
/// # Errors
/// See [`points`].
pub fn by_run(plan: &Plan, runs: Vec<Vec<RankResult>>) -> Result<Vec<Vec<Point>>> {
    let mut ranks: Vec<_> = runs.into_iter().map(Vec::into_iter).collect();
    let runs = std::iter::from_fn(|| {
        let run: Vec<RankResult> = ranks.iter_mut().filter_map(Iterator::next).collect();
        Some(run).filter(|run| !run.is_empty())
    });
    runs.map(|run| points(plan, &run)).collect()
}

/// One point of each, where `runs` have the same points in the same order.
pub fn join_runs(runs: Vec<Vec<Point>>) -> Vec<Point> {
    let mut runs = runs.into_iter();
    let mut joined = runs.next().unwrap_or_default();
    runs.for_each(|run| joined.iter_mut().zip(run).for_each(|(point, more)| point.add_runs(more)));
    joined
}

/// Makes a point of every number of multiprocessors that `ranks`, in rank order, measured.
///
/// # Errors
/// The devices' counts differ from the serial count of the same routing.
pub fn points(plan: &Plan, ranks: &[RankResult]) -> Result<Vec<Point>> {
    let asked = plan;
    let plan = &*asked.as_run(ranks.iter().all(|rank| rank.is_joined));
    let ids: Vec<Vec<i64>> = ranks.iter().map(|rank| rank.topk_idx.clone()).collect();
    let by_rank = counts::serial(&ids, plan.count_sizes());
    // The tables of low latency were compared with the oracle.
    if plan.low_latency.is_none() {
        check(plan, ranks, &by_rank)?;
    }
    let selections = counts::selections(&ids, plan.count_sizes());
    let low_latency_rows = plan.low_latency.map(|_| low_latency::remote_rows(plan));
    let first = &ranks[0];
    let mean_of = |pick: &dyn Fn(&RankCounts) -> u64| {
        mean(&by_rank.iter().map(|rank| pick(rank) as f64).collect::<Vec<f64>>())
    };
    let mean_selections = |pick: fn(&SelectionCounts) -> u64| {
        mean(&selections.iter().map(|rank| pick(rank) as f64).collect::<Vec<f64>>())
    };
    let by_expert = plan.rows_by_expert.filter(|_| plan.low_latency.is_none()).map(|_| Selections {
        sent_tokens: mean_selections(|rank| rank.sent_tokens),
        received: mean_selections(|rank| rank.received),
        linked: mean_selections(|rank| rank.linked),
        copied: mean_selections(|rank| rank.copied),
    });
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
                by_expert,
            };
            let point = Point {
                schema_version: SCHEMA_VERSION,
                mode: plan.mode().into(),
                device: first.device.clone(),
                is_virtual: first.is_virtual,
                clock: Point::clock_of(first.is_virtual).into(),
                driver_version: if first.is_virtual { 0 } else { first.driver_version },
                date: today(),
                kernels: Some(first.kernels.clone()),
                nccl: first.nccl.clone(),
                key: asked.key(first.times[index].num_sms),
                shapes: plan.shapes,
                settings: Some(plan.settings()),
                warmup: plan.warmup,
                iters: plan.iters,
                setup_ms: ranks.iter().map(|rank| rank.setup_ms).fold(0.0, f64::max),
                pool_bytes: first.pool_bytes,
                wire_bytes: first.wire_bytes,
                device_bytes: ranks.iter().map(|rank| rank.device_bytes).max().unwrap_or(0),
                counts: shared.counts,
                counts_by_rank: by_rank.iter().map(|rank| rank.six).collect(),
                remote_rows: shared.remote_rows,
                phases: plan.phases().iter().filter_map(|&name| shared.phase(name)).collect(),
                runs: vec![Run { started: first.started }],
                routing_digest: Some(digest_of_routing(ranks.iter().map(|rank| rank.topk_idx.as_slice()))),
                pair: shared.pair(),
                baselines: shared.baselines(),
                exact_dispatch_returns: Distribution::new(
                    &shared.samples(|times| &times.exact_dispatch_returns),
                ),
                graph: shared.replays(),
                by_expert: Vec::new(),
            };
            Point { by_expert: point.beside_sort(), ..point }
        })
        .collect())
}

/// Holds the devices' counts against the serial ones, and what the proxies put against what the
/// layout of wire memory makes of those.
fn check(plan: &Plan, ranks: &[RankResult], counts: &[RankCounts]) -> Result<()> {
    for (number, (rank, serial)) in ranks.iter().zip(counts).enumerate() {
        let device = rank.counts;
        if device != *serial {
            return Err(Error::Failed(format!(
                "rank {number}: the device counts {device:?} for a dispatch, a serial count of the routing {serial:?}"
            )));
        }
    }
    let calls = u64::from(plan.warmup + plan.iters);
    for (number, (rank, counts)) in ranks.iter().zip(counts).enumerate() {
        let phases = rank.times.iter().flat_map(|times| times.phases.iter().map(move |phase| (times, phase)));
        for (times, phase) in phases {
            let (name, put) = (phase.name, phase.wire.bytes);
            let rows = if name.is_dispatch() { counts.six.send_rdma } else { counts.relayed };
            let messages = if name.counts() { rank.message_bytes } else { 0 };
            let calls = if rank.has_queues { calls } else { 0 };
            let expected = calls * (rows * plan.slot_bytes(name) + messages);
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

/// Rows by expert, means over ranks, as [`SelectionCounts`] has them.
#[derive(Clone, Copy)]
struct Selections {
    sent_tokens: f64,
    received: f64,
    linked: f64,
    copied: f64,
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
    /// Where rows come by expert in high throughput.
    by_expert: Option<Selections>,
}

impl Common<'_> {
    fn times(&self) -> impl Iterator<Item = &Times> {
        self.ranks.iter().map(|rank| &rank.times[self.index])
    }

    fn samples(&self, samples: impl Fn(&Times) -> &Samples) -> Vec<&[f64]> {
        self.times().map(|times| samples(times).as_slice()).collect()
    }

    /// All ranks replay the same steps in the same order.
    fn replays(&self) -> Vec<Replays> {
        let of = |at: usize, pick: fn(&ReplayTimes) -> &[f64]| {
            Slowest::new(&self.times().map(|times| pick(&times.replays[at])).collect::<Vec<_>>())
        };
        let flushed = |at| of(at, |times| times.flushed.as_deref().unwrap_or_default());
        let replays = |(at, step): (usize, &ReplayTimes)| Replays {
            calls: step.calls.clone(),
            chain: step.chain,
            alone: of(at, |times| &times.alone),
            flushed: step.flushed.as_ref().map(|_| flushed(at)),
            chained: of(at, |times| &times.chained),
        };
        self.ranks[0].times[self.index].replays.iter().enumerate().map(replays).collect()
    }

    /// A phase of the point's own, if it was measured.
    fn phase(&self, name: PhaseName) -> Option<Phase> {
        let ranks = self.times().map(|times| times.phase(name)).collect::<Option<Vec<_>>>()?;
        let phase = self.whole_calls(&ranks)?;
        let kernels = |pick: fn(&KernelTimes) -> &Samples| -> Vec<&[f64]> {
            ranks.iter().map(|times| pick(&times.kernels).as_slice()).collect()
        };
        let done = kernels(|times| &times.done);
        let within = self.plan.low_latency.map(|_| Within {
            sent: Slowest::new(&kernels(|times| &times.sent)),
            entered: Slowest::new(&kernels(|times| &times.entered)),
            done: Slowest::new(&done),
        });
        let has_wire = self.plan.topology.nodes > 1 && self.plan.low_latency.is_none();
        let wire = has_wire.then(|| self.on_wire(&ranks, &phase.call));
        let traffic = self.by_expert.map(|rows| self.traffic(&phase, rows, wire.is_some()));
        // Rows for mapped nodes pass links.
        let put = wire.as_ref().filter(|_| !self.is_mapped());
        let put = put.map(|wire| (wire.rows * wire.slot_bytes as f64, wire.transport_us));
        let bandwidth = phase.bandwidth.map(|bandwidth| Bandwidth {
            wire: put.map(|(bytes, _)| gbps(bytes, phase.call.avg_us)),
            wire_ceiling: put.and_then(|(bytes, us)| Some(gbps(bytes, us?))),
            ..bandwidth
        });
        // The kernel that sorts is not traced.
        let is_traced = done.iter().any(|samples| !samples.is_empty()) && !name.sorts();
        let kernel_us = is_traced.then(|| Distribution::new(&done).avg_us);
        Some(Phase { kernel_us, wire, bandwidth, within, traffic, ..phase })
    }

    /// Rows of a phase over NVLink: one for each selection, if a combine takes rows by expert. A
    /// dispatch sends one to each rank, which copies it.
    fn linked_rows(&self, name: PhaseName) -> f64 {
        let is_for_each = !name.sorts() && !self.is_copied(name);
        self.by_expert.filter(|_| is_for_each).map_or(self.remote_rows, |rows| rows.linked)
    }

    /// Rows of a phase for other nodes.
    fn wire_rows(&self, name: PhaseName) -> f64 {
        if name.is_dispatch() { self.counts.send_rdma } else { self.relayed }
    }

    /// Whether rows for other nodes pass NVLink: all wire memory is mapped.
    fn is_mapped(&self) -> bool {
        self.ranks.iter().all(|rank| rank.mapped)
    }

    /// Bytes of a phase over NVLink, with the slots of rows for other nodes where those are mapped.
    fn linked_bytes(&self, name: PhaseName) -> f64 {
        let slots = if self.is_mapped() { self.wire_rows(name) } else { 0.0 };
        let row_bytes = self.plan.row_bytes(name) as f64;
        self.linked_rows(name) * row_bytes + slots * self.plan.slot_bytes(name) as f64
    }

    /// Whether ranks copy rows to the places of further selections, if rows come by expert.
    fn is_copied(&self, name: PhaseName) -> bool {
        name.is_dispatch() && !name.sorts()
    }

    /// Rows of a phase that a rank receives in a dispatch, and gives back in a combine.
    fn received_rows(&self, name: PhaseName) -> f64 {
        self.by_expert.filter(|_| !name.sorts()).map_or(self.counts.recv_total, |rows| rows.received)
    }

    /// The bytes of a phase with rows by expert. `is_relayed`: rows for other nodes are not among
    /// those that pass links.
    fn traffic(&self, phase: &Phase, rows: Selections, is_relayed: bool) -> Traffic {
        let (name, us) = (phase.name, phase.call.avg_us);
        let bytes = |rows: f64| rows * phase.row_bytes as f64;
        let received = bytes(self.received_rows(name));
        let (read_bytes, written_bytes) = match name.is_dispatch() {
            true if self.is_copied(name) => (bytes(rows.sent_tokens + rows.copied), received),
            true => (bytes(rows.sent_tokens), received),
            // Tokens that go nowhere have sums, too.
            false => (received, bytes(self.plan.tokens.into())),
        };
        let (copy_read_bytes, copy_written_bytes) = match name {
            PhaseName::CombineStaged => (received, received),
            _ if name.sorts() => (received, bytes(rows.received)),
            _ => (0.0, 0.0),
        };
        let memory: Option<Vec<f64>> = self.times().map(|times| times.memory_ceiling).collect();
        let memory_ceiling = memory.map(|ranks| mean(&ranks));
        let at = |bytes: f64, ceiling: Option<f64>| match bytes {
            0.0 => Some(0.0),
            _ => ceiling.map(|gbps| bytes / gbps / 1e3),
        };
        let link_bytes = bytes(self.linked_rows(name));
        // An interpreter has no ceilings, and its times cannot be compared with any.
        let at = |bytes, ceiling| at(bytes, ceiling).filter(|_| !self.is_virtual);
        let link_us = at(link_bytes, self.ceiling(name));
        let memory_us = at(read_bytes + written_bytes, memory_ceiling);
        let stores: Option<Vec<f64>> = self.times().map(|times| times.store_ceiling).collect();
        let store_ceiling = stores.map(|ranks| mean(&ranks)).filter(|_| self.is_copied(name));
        let store_us = store_ceiling.and_then(|ceiling| at(written_bytes, Some(ceiling)));
        let copy_us = at(copy_read_bytes + copy_written_bytes, memory_ceiling);
        let ceiling_us =
            link_us.zip(memory_us).map(|(link, memory)| link.max(memory).max(store_us.unwrap_or(0.0)));
        let ceiling_us =
            ceiling_us.zip(copy_us).map(|(moved, copied)| moved + copied).filter(|_| !is_relayed);
        Traffic {
            link_bytes,
            read_bytes,
            written_bytes,
            copy_read_bytes,
            copy_written_bytes,
            memory_ceiling,
            link_us,
            memory_us,
            store_ceiling,
            store_us,
            copy_us,
            ceiling_us,
            share: ceiling_us.map(|ceiling| ceiling / us),
        }
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
    fn whole_calls(&self, ranks: &[&PhaseTimes]) -> Option<Phase> {
        let name = ranks.first()?.name;
        let row_bytes = self.plan.row_bytes(name);
        let samples: Vec<&[f64]> = ranks.iter().map(|times| times.calls.as_slice()).collect();
        let call = Distribution::new(&samples);
        let back_to_back: Option<Vec<f64>> = ranks.iter().map(|times| times.back_to_back).collect();
        let back_to_back = back_to_back.map(|ranks| Spread::new(&ranks));
        let slowest = Some(Slowest::new(&samples));
        let (kernel_us, wire, bandwidth, within, traffic) = (None, None, None, None, None);
        let phase = Phase {
            name,
            row_bytes,
            call,
            slowest,
            kernel_us,
            back_to_back,
            wire,
            bandwidth,
            traffic,
            within,
        };
        let has_bandwidth = !self.is_virtual && self.plan.low_latency.is_none();
        Some(Phase { bandwidth: has_bandwidth.then(|| self.bandwidth(&phase)), ..phase })
    }

    fn pair(&self) -> Option<Pairs> {
        let period = || Slowest::new(&self.samples(|times| &times.pair));
        self.plan.pairs().map(|(chain, _)| Pairs { chain, period: period() })
    }

    /// All ranks measure the same ways in the same order.
    fn baselines(&self) -> Vec<WayResult> {
        let way = |at: usize| {
            let ranks: Vec<&WaySamples> = self.ranks.iter().map(|rank| &rank.others[at]).collect();
            let phase = |of: usize| {
                self.whole_calls(&ranks.iter().filter_map(|way| way.phases.get(of)).collect::<Vec<_>>())
            };
            let bytes = |pick: fn((u64, u64)) -> u64| {
                mean(&ranks.iter().map(|way| pick(way.link_bytes) as f64).collect::<Vec<f64>>())
            };
            let pairs: Vec<&[f64]> = ranks.iter().map(|way| way.pair.as_slice()).collect();
            Some(WayResult {
                way: ranks.first()?.way,
                dispatch: phase(0)?,
                combine: phase(1)?,
                pair: Pairs { chain: CHAIN, period: Slowest::new(&pairs) },
                dispatch_link_bytes: bytes(|of| of.0),
                combine_link_bytes: bytes(|of| of.1),
            })
        };
        (0..self.ranks[0].others.len()).filter_map(way).collect()
    }

    fn on_wire(&self, phases: &[&PhaseTimes], call: &Distribution) -> OnWire {
        let (name, ceiling) = (phases[0].name, self.ceiling(phases[0].name));
        let calls = f64::from(self.plan.warmup + self.plan.iters) * phases.len() as f64;
        // Rows of a staged combine are those of one in the pool.
        let alone = if name == PhaseName::CombineStaged { PhaseName::CombineInPool } else { name };
        let times = self.ranks.iter().flat_map(|rank| &rank.transport_us);
        let times: Vec<f64> = times.filter(|(phase, _)| *phase == alone).map(|(_, us)| *us).collect();
        let transport_us = (!times.is_empty()).then(|| mean(&times));
        let slot_bytes = self.plan.slot_bytes(name);
        let linked_bytes = self.linked_bytes(name);
        let nvlink_us =
            if linked_bytes == 0.0 { Some(0.0) } else { ceiling.map(|ceiling| linked_bytes / ceiling / 1e3) };
        // The ratio of an interpreter's time to a network's is meaningless.
        let nvlink_us = nvlink_us.filter(|_| !self.is_virtual);
        let alone_us = if self.is_mapped() { Some(0.0) } else { transport_us };
        OnWire {
            slot_bytes,
            rows: self.wire_rows(name),
            bytes: phases.iter().map(|phase| phase.wire.bytes).sum::<u64>() as f64 / calls,
            puts: phases.iter().map(|phase| phase.wire.puts).sum::<u64>() as f64 / calls,
            transport_us,
            nvlink_us,
            share: alone_us
                .zip(nvlink_us)
                // The sum has no time for a sort.
                .filter(|_| !name.sorts())
                .map(|(transport, nvlink)| call.avg_us / (transport + nvlink)),
        }
    }

    /// A phase's bandwidths by every convention.
    fn bandwidth(&self, phase: &Phase) -> Bandwidth {
        let (sent, us) = (self.counts, phase.call.avg_us);
        let bytes = |rows: f64| rows * phase.row_bytes as f64;
        let six = if phase.name.is_dispatch() { sent } else { sent.swapped() };
        Bandwidth {
            links: gbps(self.linked_bytes(phase.name), us),
            link_ceiling: self.ceiling(phase.name),
            wire: None,
            wire_ceiling: None,
            deepep: gbps(bytes(self.received_rows(phase.name)), us),
            nccl_ep: six.map(|rows| gbps(bytes(rows), us)),
            mscclpp: phase.back_to_back.map(|spread| {
                let per_rank = gbps(bytes(self.plan.tokens.into()), spread.avg_us);
                MscclppBandwidth {
                    per_rank,
                    aggregate: per_rank * self.ranks.len() as f64,
                    six: six.map(|rows| gbps(bytes(rows), spread.avg_us)),
                }
            }),
        }
    }
}

//! One rank's part of a benchmark: check that the results are right, then time.

use std::sync::Arc;
use std::time::Instant;

use epoxide::driver::{Device, Stream};
use epoxide::group::ProcessGroup;
use epoxide::internal::driver::shipped_ptx;
use epoxide::internal::{CeilingShape, Direction, Instruments, count_message_bytes, fields, launch_ceiling};
use epoxide::throughput::{Buffer, Counts, Options, Shape};
use epoxide::{DType, Tensor};
use epoxide::{Error, Result};
use epoxide_testing::harness::Rank;
use epoxide_testing::roundtrip::Case;

use crate::baseline::Nccl;
use crate::bench::Bench;
use crate::measured::{RankResult, Samples, Times, TracedCall, WireCount};
use crate::puts::Poster;
use crate::results::{Kernels, PhaseName, seconds_since_1970};
use crate::{Baseline, Effort, Plan, TIMEOUT, low_latency};

/// Receives the progress of a measurement, from every rank of this process that measures.
pub trait Watch: Sync {
    /// Rank `rank` begins with this.
    fn doing(&self, rank: u32, what: &str) {
        let _ = (rank, what);
    }

    /// Rank `rank` has done one more of the measurement's steps.
    fn step(&self, rank: u32) {
        let _ = rank;
    }
}

/// No progress reports.
impl Watch for () {}

/// Puts that a trace has room for, of each queue.
const TRACED_PUTS: usize = 1 << 16;
/// Calls of each phase that are traced, apart from the timed ones.
pub(crate) const TRACED_CALLS: u32 = 3;

/// All runs of rank `group.rank()`, one after the other. Collective.
pub fn runs(
    plan: &Plan,
    device: &Device,
    group: &Arc<dyn ProcessGroup>,
    watch: &dyn Watch,
) -> Result<Vec<RankResult>> {
    (0..plan.repeat).map(|_| rank(plan, device.clone(), group, watch)).collect()
}

/// One run of rank `group.rank()`, with a buffer and rows of its own. Collective.
pub fn rank(
    plan: &Plan,
    device: Device,
    group: &Arc<dyn ProcessGroup>,
    watch: &dyn Watch,
) -> Result<RankResult> {
    let info = device.info();
    let mut result = RankResult {
        kernels: Kernels::of_ptx(&shipped_ptx(plan.ptx.as_deref())?, info.is_virtual),
        started: seconds_since_1970(),
        device: info.name.clone(),
        is_virtual: info.is_virtual,
        driver_version: info.driver_version,
        ..RankResult::default()
    };
    watch.doing(group.rank(), "making the buffer");
    match plan.low_latency {
        Some(low) => low_latency::measure(plan, low, &device, group, watch, &mut result)?,
        None => high_throughput(plan, &device, group, watch, &mut result)?,
    }
    // Behind the buffer: sizes that have no room have a routing that takes minutes to draw.
    result.topk_idx = plan.routing(group.rank());
    Ok(result)
}

/// Makes a buffer, on all ranks at once, and notes what it took.
pub(crate) fn made<B>(
    device: &Device,
    group: &Arc<dyn ProcessGroup>,
    result: &mut RankResult,
    make: impl FnOnce() -> Result<B>,
) -> Result<B> {
    group.barrier(group.timeout())?;
    let free_before = device.free_memory()?;
    let start = Instant::now();
    let buffer = make()?;
    result.setup_ms = result.setup_ms.max(start.elapsed().as_secs_f64() * 1e3);
    result.device_bytes = result.device_bytes.max(free_before.saturating_sub(device.free_memory()?));
    Ok(buffer)
}

fn high_throughput(
    plan: &Plan,
    device: &Device,
    group: &Arc<dyn ProcessGroup>,
    watch: &dyn Watch,
    result: &mut RankResult,
) -> Result<()> {
    let stream = Stream::new(device)?;
    let shape = Shape {
        max_tokens_per_rank: plan.tokens,
        max_row_bytes: plan.combine_row_bytes(),
        max_topk: plan.topk,
        max_scales: plan.num_scales() as u32,
    };
    let config = plan.config(plan.num_sms[0])?;
    // First of all, so that a missing library is reported before anything is made.
    let nccl = plan.baseline.map(|Baseline::Nccl| Nccl::join(device, group)).transpose()?;
    let topology = plan.topology;
    let mut options = Options::new(shape)
        .config(config)
        .timeout(TIMEOUT)
        .ranks_per_node(topology.ranks_per_node)
        .transport(plan.transport_options(TIMEOUT));
    let fields = fields(&mut options);
    fields.tuning = plan.shapes.tuning();
    fields.keep_nodes = plan.keep_nodes;
    (fields.num_nvl_bytes, fields.num_rdma_bytes) = (plan.nvl_bytes, plan.rdma_bytes);
    fields.ptx = plan.ptx.clone();
    let buffer = made(device, group, result, || Buffer::new(device.clone(), &**group, options))?;

    result.is_joined = topology.nodes > 1 && buffer.num_nodes() == 1;
    let plan = &*plan.as_run(result.is_joined);
    let topology = plan.topology;
    result.mapped = topology.nodes > 1 && buffer.mapped_peers().len() as u32 == topology.nodes - 1;
    let case = plan.case();
    let mut bench = Bench::new(plan, &case, Rank::with(group.clone(), stream, buffer), watch)?;
    let whole = plan.effort == Effort::Whole;
    if whole {
        bench.doing("every bit against the oracle");
        bench.verify(&case)?;
    }
    if let Some(nccl) = &nccl {
        result.others = bench.others(nccl, &case)?;
    }
    nccl.as_ref().map_or(Ok(()), Nccl::finalize)?;
    if whole && !result.mapped {
        result.transport_us = bench.transport_alone(&**group)?;
    }
    group.barrier(group.timeout())?;
    for &num_sms in &plan.num_sms {
        bench.rig.buffer.set_config(plan.config(num_sms)?)?;
        (bench.calls.routing, bench.nothing) = bench.routings()?;
        result.times.push(bench.time(num_sms, &case)?);
        group.barrier(group.timeout())?;
    }
    result.counts = bench.counts()?;
    bench.rig.buffer.check()?;
    let buffer = &bench.rig.buffer;
    result.pool_bytes = buffer.pool_bytes();
    result.wire_bytes = buffer.wire_bytes();
    result.message_bytes = u64::from(topology.nodes - 1) * count_message_bytes(buffer, plan.experts);
    result.traced = bench.traced;
    Ok(())
}

impl Bench<'_> {
    /// Times of the transport alone for the rows of each phase. Host code puts as many bytes to the
    /// same peers, in puts of as many rows, all ranks at once. Mean of iterations one after the
    /// other. Collective.
    fn transport_alone(&self, group: &dyn ProcessGroup) -> Result<Vec<(PhaseName, f64)>> {
        let plan = self.plan;
        if plan.topology.nodes == 1 || plan.no_ceiling {
            return Ok(Vec::new());
        }
        self.doing("the transport alone");
        let options = plan.transport_options(TIMEOUT);
        let slot = PhaseName::DispatchUncached.slot_bytes(plan.combine_row_bytes(), plan.topk);
        let region = slot * u64::from(plan.tokens.max(plan.rdma_send));
        let mut poster = Poster::new(self.rig.buffer.device(), group, plan.topology, &options, region)?;
        let (sent, relayed) = self.rows_by_node()?;
        let mut times = Vec::new();
        for name in [PhaseName::DispatchCached, PhaseName::DispatchUncached, PhaseName::CombineInPool] {
            let slot = name.slot_bytes(plan.row_bytes(name), plan.topk);
            let rows = if name.is_dispatch() { &sent } else { &relayed };
            let bytes: Vec<u64> = rows.iter().map(|rows| rows * slot).collect();
            let message = slot * u64::from(plan.rdma_send);
            poster.put_all(&bytes, message, Poster::DEEPEST, plan.warmup)?;
            let took = poster.put_all(&bytes, message, Poster::DEEPEST, plan.iters)?;
            times.push((name, took.as_secs_f64() * 1e6 / f64::from(plan.iters)));
        }
        poster.close()?;
        Ok(times)
    }

    /// Puts of the proxies so far. All puts of an operation have left when it has ended.
    fn wire_count(&self) -> WireCount {
        self.rig.buffer.wire_stats().iter().fold(WireCount::default(), |sum, (_, _, stats)| WireCount {
            bytes: sum.bytes + stats.bytes,
            puts: sum.puts + stats.puts.saturating_sub(stats.counter_puts),
        })
    }

    /// [`Self::isolated`] calls of a phase, with what the proxies put.
    fn phase(
        &mut self,
        times: &mut Times,
        name: PhaseName,
        call: impl FnMut(&mut Self) -> Result<()>,
    ) -> Result<Samples> {
        self.doing(name.text());
        // An exact-size dispatch returns while its rows are on their way.
        self.rig.stream.synchronize()?;
        let before = self.wire_count();
        let samples = self.isolated(true, call)?;
        let after = self.wire_count();
        let count =
            WireCount { bytes: after.bytes - before.bytes, puts: after.puts.saturating_sub(before.puts) };
        times.wire.push((name, count));
        Ok(samples)
    }

    fn time(&mut self, num_sms: u32, case: &Case) -> Result<Times> {
        let capacity = self.rig.buffer.capacity();
        let mut times = Times { num_sms, ..Times::default() };
        let uncached = |bench: &mut Self| bench.dispatch(Counts::OnDevice { capacity }).map(drop);
        times.dispatch_cached =
            self.phase(&mut times, PhaseName::DispatchCached, |bench| bench.dispatch_cached())?;
        times.dispatch_uncached = self.phase(&mut times, PhaseName::DispatchUncached, uncached)?;
        times.combine =
            self.phase(&mut times, PhaseName::CombineInPool, |bench| bench.combine().map(drop))?;
        let shape = [self.calls.received, self.plan.hidden];
        let rows = Tensor::alloc(self.rig.buffer.device(), DType::Bf16, &shape)?;
        times.combine_staged =
            self.phase(&mut times, PhaseName::CombineStaged, |bench| bench.combine_staged(&rows))?;
        if self.plan.effort == Effort::Phases {
            return Ok(times);
        }
        self.doing("traces");
        self.trace(num_sms, PhaseName::DispatchCached, |bench| bench.dispatch_cached())?;
        self.trace(num_sms, PhaseName::DispatchUncached, uncached)?;
        self.trace(num_sms, PhaseName::CombineInPool, |bench| bench.combine().map(drop))?;
        self.trace(num_sms, PhaseName::CombineStaged, |bench| bench.combine_staged(&rows))?;
        self.doing("exact-size dispatch");
        for iteration in 0..self.plan.warmup + self.plan.iters {
            self.watch.step(self.rig.rank);
            self.barrier()?;
            self.rig.stream.synchronize()?;
            let start = Instant::now();
            drop(self.dispatch(Counts::Exact)?);
            if iteration >= self.plan.warmup {
                times.dispatch_exact_host.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        self.doing("calls back to back");
        times.dispatch_stream = self.back_to_back(|bench| bench.dispatch_cached())?;
        if self.plan.topology.nodes > 1 {
            times.dispatch_exact_stream =
                self.back_to_back(|bench| bench.dispatch(Counts::Exact).map(drop))?;
        }
        times.combine_stream = self.back_to_back(|bench| bench.combine().map(drop))?;
        let has_links = self.plan.topology.ranks_per_node > 1 || !self.rig.buffer.mapped_peers().is_empty();
        if !self.plan.no_ceiling && has_links && !self.rig.buffer.device().info().is_virtual {
            self.doing("the links' ceiling");
            times.ceiling =
                Some((self.ceiling(Direction::Push, num_sms)?, self.ceiling(Direction::Pull, num_sms)?));
        }
        if self.plan.baseline.is_some() {
            self.doing("pairs");
            times.pair =
                self.pairs(|bench| bench.dispatch_cached().and_then(|()| bench.combine().map(drop)))?;
        }
        if let Some(chain) = self.plan.graph {
            self.doing("replays of graphs");
            times.replays = self.replays(chain, case, &rows)?;
        }
        Ok(times)
    }

    /// Traces a few calls, each after a barrier, as the timed ones are.
    fn trace(
        &mut self,
        num_sms: u32,
        phase: PhaseName,
        mut call: impl FnMut(&mut Self) -> Result<()>,
    ) -> Result<()> {
        for _ in 0..TRACED_CALLS {
            // A barrier and at most two launches, of one of which all multiprocessors may have a
            // block more.
            let more = self.rig.buffer.device().info().sm_count;
            self.rig.buffer.start_trace((3 * num_sms + more) as u64)?;
            self.rig.buffer.start_put_trace(TRACED_PUTS);
            if let Some(flush) = &self.flush {
                // SAFETY: as in `isolated`.
                unsafe { self.rig.stream.fill(flush.ptr(), 0, flush.bytes())? };
            }
            self.rig.stream.synchronize()?;
            let start = Instant::now();
            self.barrier()?;
            call(self)?;
            let (launches, dropped) = self.rig.buffer.take_trace(&self.rig.stream)?;
            let host = (start, Instant::now());
            let puts = self.rig.buffer.take_put_trace();
            let mut launches = launches.into_iter();
            let (Some(barrier), 0) = (launches.next(), dropped) else {
                return Err(Error::os("trace", format!("{dropped} launches had no room")));
            };
            let launches = launches.collect();
            let (tokens, barrier) = (self.plan.tokens, Some(barrier));
            self.traced.push(TracedCall { phase, num_sms, tokens, barrier, launches, puts, host });
        }
        self.rig.buffer.check()
    }

    /// GB/s of remote bytes per rank that the bulk copies reach with `blocks` blocks.
    fn ceiling(&mut self, direction: Direction, blocks: u32) -> Result<f64> {
        let row_bytes = self.calls.x.row_bytes() as u32;
        let row_bytes =
            if direction == Direction::Pull { self.plan.combine_row_bytes() as u32 } else { row_bytes };
        let limit = self.rig.buffer.device().info().max_shared_bytes_per_block;
        let topology = &self.plan.topology;
        let peers = if topology.ranks_per_node > 1 { topology.ranks_per_node } else { topology.nodes } - 1;
        let mut best = f64::MAX;
        for warps in [4, 7] {
            let stages = (limit / (warps * (row_bytes + 8))).min(3);
            if stages < 2 {
                continue;
            }
            let fanout = 5.min(peers);
            let shape = CeilingShape { blocks, warps, stages, rows: self.plan.tokens, row_bytes, fanout };
            let samples = self.isolated(true, |bench| {
                launch_ceiling(&bench.rig.buffer, direction, shape, &bench.rig.stream)
            })?;
            // The next barrier may not start before all have written.
            self.barrier()?;
            let mean = samples.iter().sum::<f64>() / samples.len() as f64;
            best = best.min(mean / shape.remote_bytes() as f64);
        }
        Ok(1e-3 / best)
    }
}

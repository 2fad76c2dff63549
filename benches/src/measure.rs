//! One rank's part of a benchmark: check that the results are right, then time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use epoxide::driver::{Device, Event, Memory, MemoryKind, Stream};
use epoxide::ep::{
    Buffer, BufferOptions, BufferShape, CachedDispatchRequest, CeilingShape, CombineRequest, Counts, DType,
    Direction, DispatchHandle, DispatchLayout, DispatchOutput, DispatchRequest, Place, StreamOrder, Tensor,
    TracedLaunch, TypedTensor,
};
use epoxide::group::ProcessGroup;
use epoxide::transport::PutTrace;
use epoxide::{Error, Result};
use epoxide_testing::harness::Rank;
use epoxide_testing::oracle;
use epoxide_testing::roundtrip::Case;
use serde::{Deserialize, Serialize};

use crate::Plan;
use crate::counts::{RankCounts, Six};
use crate::puts::Poster;
use crate::results::PhaseName;

/// Longest wait for a peer: the ranks of a virtual GPU share few processors.
pub const TIMEOUT: Duration = Duration::from_secs(120);
/// Puts that a trace has room for, of each queue.
const TRACED_PUTS: usize = 1 << 16;
/// Turns of the case: of the rows that are sent, and of those that are given back.
const ROWS: u64 = 0;
const RETURNED: u64 = 1;
/// Calls of each phase that are traced, apart from the timed ones.
const TRACED_CALLS: u32 = 3;

/// One traced call.
#[derive(Debug, Clone)]
pub struct TracedCall {
    /// The phase.
    pub phase: PhaseName,
    /// Multiprocessors.
    pub num_sms: u32,
    /// The launch of the barrier before it.
    pub barrier: TracedLaunch,
    /// Its own launches, in order.
    pub launches: Vec<TracedLaunch>,
    /// What the proxies put meanwhile.
    pub puts: Vec<PutTrace>,
    /// Before the barrier was enqueued, and after the device had ended all.
    pub host: (Instant, Instant),
}

impl TracedCall {
    /// Microseconds from the first block's start to the last block's end.
    pub fn kernel_us(&self) -> f64 {
        let blocks = || self.launches.iter().flat_map(|launch| &launch.blocks);
        let start = blocks().map(|block| block.enter).min().unwrap_or(0);
        let end = blocks().map(|block| block.done).max().unwrap_or(0);
        end.saturating_sub(start) as f64 / 1e3
    }
}

/// Microseconds of every timed iteration.
pub type Samples = Vec<f64>;

/// One rank's times for one number of multiprocessors.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Times {
    /// Multiprocessors.
    pub num_sms: u32,
    /// Cached dispatch: one kernel, the whole call.
    pub dispatch_cached: Samples,
    /// Uncached dispatch without a wait of the host: both kernels.
    pub dispatch_uncached: Samples,
    /// Uncached dispatch with exact counts, as the host's clock sees it: the call until it returns.
    pub dispatch_exact_host: Samples,
    /// Combine of rows that are in the pool: one kernel, the whole call.
    pub combine: Samples,
    /// Combine of rows from elsewhere: copy into the pool and combine.
    pub combine_staged: Samples,
    /// Cached dispatches back to back, mean per call.
    pub dispatch_stream: f64,
    /// Exact-size dispatches back to back, as the seed times them across nodes; 0 within one.
    pub dispatch_exact_stream: f64,
    /// Combines back to back, mean per call.
    pub combine_stream: f64,
    /// The links' own speed in GB/s with as many blocks: (push, pull).
    pub ceiling: Option<(f64, f64)>,
    /// What the proxies put in a phase's calls.
    pub wire: Vec<(PhaseName, WireCount)>,
}

impl Times {
    /// What the proxies put in all calls of a phase.
    pub fn wire_of(&self, name: PhaseName) -> Option<WireCount> {
        self.wire.iter().find(|(phase, _)| *phase == name).map(|(_, count)| *count)
    }
}

/// What the proxies of a rank put.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireCount {
    /// Bytes.
    pub bytes: u64,
    /// Puts that carried bytes.
    pub puts: u64,
}

/// Everything that one rank measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RankResult {
    /// The device's name.
    pub device: String,
    /// True for the virtual GPU.
    pub is_virtual: bool,
    /// CUDA version of the driver.
    pub driver_version: u32,
    /// Milliseconds that [`Buffer::new`] took, on the host's clock.
    pub setup_ms: f64,
    /// Bytes of the pool.
    pub pool_bytes: u64,
    /// Bytes of wire memory.
    pub wire_bytes: u64,
    /// Bytes of the count messages that an uncached dispatch puts on the wire.
    pub message_bytes: u64,
    /// Device bytes in use by all of the buffer.
    pub device_bytes: u64,
    /// The routing that this rank drew.
    pub topk_idx: Vec<i64>,
    /// Tokens of a dispatch, as the device's handle has them.
    pub counts: RankCounts,
    /// Whether rows for other nodes go over NVLink too: their wire memory is mapped, and nothing is put.
    pub mapped: bool,
    /// What the transport alone takes for the rows of a phase, in microseconds; nothing where all is mapped.
    pub transport_us: Vec<(PhaseName, f64)>,
    /// Traced calls; of ranks in other processes none.
    #[serde(skip)]
    pub traced: Vec<TracedCall>,
    /// Times by number of multiprocessors.
    pub times: Vec<Times>,
}

/// Runs rank `group.rank()`.
pub fn rank(plan: &Plan, device: Arc<dyn Device>, group: &Arc<dyn ProcessGroup>) -> Result<RankResult> {
    let stream = Stream::new(&device, false)?;
    let shape = BufferShape {
        max_tokens_per_rank: plan.tokens,
        max_row_bytes: plan.combine_row_bytes(),
        max_topk: plan.topk,
        max_scales: plan.num_scales() as u32,
    };
    let config = plan.config(plan.num_sms[0])?;
    let world = plan.world;
    group.barrier(group.timeout())?;
    let free_before = device.free_memory()?;
    let start = Instant::now();
    let mut options = BufferOptions::new(shape)
        .config(config)
        .tuning(plan.shapes.tuning())
        .timeout(TIMEOUT)
        .ranks_per_node(world.ranks_per_node)
        .transport(plan.transport_options(TIMEOUT));
    (options.num_nvl_bytes, options.num_rdma_bytes) = (plan.nvl_bytes, plan.rdma_bytes);
    let buffer = Buffer::new(device.clone(), &**group, options)?;
    let setup_ms = start.elapsed().as_secs_f64() * 1e3;
    let device_bytes = free_before.saturating_sub(device.free_memory()?);

    let mapped = world.nodes > 1 && buffer.mapped_peers().len() as u32 == world.nodes - 1;
    let case = plan.case();
    let mut bench = Bench::new(plan, &case, Rank::with(group.clone(), stream, buffer))?;
    bench.verify(&case)?;
    drop(case);
    let transport_us = if mapped { Vec::new() } else { bench.transport_alone(&**group)? };
    group.barrier(group.timeout())?;
    let mut times = Vec::new();
    for &num_sms in &plan.num_sms {
        bench.rig.buffer.set_config(plan.config(num_sms)?)?;
        (bench.routing, bench.nothing) = bench.routings()?;
        times.push(bench.time(num_sms)?);
        group.barrier(group.timeout())?;
    }
    let counts = bench.counts()?;
    bench.rig.buffer.check()?;
    let (buffer, traced) = (&bench.rig.buffer, bench.traced);
    let info = device.info();
    Ok(RankResult {
        device: info.name.clone(),
        is_virtual: info.is_virtual,
        driver_version: info.driver_version,
        setup_ms,
        pool_bytes: buffer.pool_bytes(),
        wire_bytes: buffer.wire_bytes(),
        message_bytes: u64::from(world.nodes - 1) * buffer.count_message_bytes(plan.experts),
        device_bytes,
        topk_idx: plan.routing(group.rank()),
        counts,
        mapped,
        transport_us,
        traced,
        times,
    })
}

struct Bench<'a> {
    plan: &'a Plan,
    rig: Rank,
    place: Place,
    x: Tensor<'static>,
    scales: Option<TypedTensor<'static, f32>>,
    topk_weights: TypedTensor<'static, f32>,
    layout: DispatchLayout<'static>,
    no_rows: Tensor<'static>,
    /// Rows that the routing brings here.
    received: u64,
    /// The routing, of as many channels as the buffer has.
    routing: DispatchHandle,
    /// A routing of no tokens: its dispatch is a barrier between the devices.
    nothing: DispatchHandle,
    flush: Option<Memory>,
    traced: Vec<TracedCall>,
}

impl<'a> Bench<'a> {
    fn new(plan: &'a Plan, case: &Case, mut rig: Rank) -> Result<Self> {
        let (topk_idx, topk_weights) = rig.topk(case)?;
        let (x, scales) = rig.payload(case, ROWS)?;
        let (buffer, stream) = (&mut rig.buffer, &rig.stream);
        let layout = buffer.get_dispatch_layout(&topk_idx, plan.experts, StreamOrder::on(stream))?;
        let no_rows = Tensor::alloc(buffer.device(), x.dtype(), &[0, plan.hidden])?;
        let mut place = buffer.place(0)?;
        let rows = (&x, scales.as_ref(), &layout);
        let (routing, nothing) = Self::route(plan, buffer, stream, &mut place, rows, &no_rows)?;
        let received = routing.num_recv_tokens(stream)?.into();
        let flush_bytes = if buffer.device().info().is_virtual { 0 } else { plan.flush_mib << 20 };
        let flush = match flush_bytes {
            0 => None,
            bytes => Some(Memory::alloc(buffer.device(), bytes, MemoryKind::Device, "L2 flush")?),
        };
        let traced = Vec::new();
        Ok(Bench {
            plan,
            rig,
            place,
            x,
            scales,
            topk_weights,
            layout,
            no_rows,
            received,
            routing,
            nothing,
            flush,
            traced,
        })
    }

    /// Dispatches the rows, and none at all, with the buffer's present configuration: the two routings.
    fn route(
        plan: &Plan,
        buffer: &mut Buffer,
        stream: &Stream,
        place: &mut Place,
        (x, x_scales, layout): (&Tensor, Option<&TypedTensor<'_, f32>>, &DispatchLayout),
        no_rows: &Tensor,
    ) -> Result<(DispatchHandle, DispatchHandle)> {
        let order = StreamOrder::on(stream);
        let no_ids = TypedTensor::from_host(stream, &[0, plan.topk as u64], &[])?;
        let empty = buffer.get_dispatch_layout(&no_ids, plan.experts, order)?;
        let nothing = buffer.dispatch(place, DispatchRequest::new(no_rows, &empty), order)?.handle;
        let request = x_scales.into_iter().fold(DispatchRequest::new(x, layout), DispatchRequest::scales);
        Ok((buffer.dispatch(place, request, order)?.handle, nothing))
    }

    /// The routings with the buffer's present configuration.
    fn routings(&mut self) -> Result<(DispatchHandle, DispatchHandle)> {
        let rows = (&self.x, self.scales.as_ref(), &self.layout);
        let (buffer, stream) = (&mut self.rig.buffer, &self.rig.stream);
        Self::route(self.plan, buffer, stream, &mut self.place, rows, &self.no_rows)
    }

    fn dispatch(&mut self, counts: Counts) -> Result<DispatchOutput<'_>> {
        let request = DispatchRequest::new(&self.x, &self.layout).topk_weights(&self.topk_weights);
        let request = self.scales.iter().fold(request.counts(counts), DispatchRequest::scales);
        self.rig.buffer.dispatch(&mut self.place, request, StreamOrder::on(&self.rig.stream))
    }

    fn dispatch_cached(&mut self) -> Result<()> {
        let request = CachedDispatchRequest::new(&self.x, &self.routing);
        let request = self.scales.iter().fold(request, CachedDispatchRequest::scales);
        let order = StreamOrder::on(&self.rig.stream);
        self.rig.buffer.dispatch_cached(&mut self.place, request, order).map(drop)
    }

    fn combine(&mut self) -> Result<Tensor<'static>> {
        let rows = self.place.combine_rows(DType::Bf16, self.received, self.plan.hidden)?;
        let request = CombineRequest::new(&rows, &self.routing);
        Ok(self.rig.buffer.combine(request, StreamOrder::on(&self.rig.stream))?.combined_x)
    }

    fn combine_staged(&mut self, rows: &Tensor) -> Result<()> {
        let request = CombineRequest::new(rows, &self.routing);
        self.rig.buffer.combine(request, StreamOrder::on(&self.rig.stream)).map(drop)
    }

    /// A barrier between the devices, on the device.
    fn barrier(&mut self) -> Result<()> {
        let request = CachedDispatchRequest::new(&self.no_rows, &self.nothing);
        let order = StreamOrder::on(&self.rig.stream);
        self.rig.buffer.dispatch_cached(&mut self.place, request, order).map(drop)
    }

    /// Every received row and every sum, bit for bit.
    fn verify(&mut self, case: &Case) -> Result<()> {
        let sources = oracle::recv_order(&case.routing, self.rig.rank);
        let output = self.dispatch(Counts::Exact)?.detach();
        self.rig.check_received(case, ROWS, &sources, "dispatch", output.at(&self.place)?)?;
        let target = self.place.combine_rows(DType::Bf16, sources.len() as u64, self.plan.hidden)?;
        self.rig.write_returned(case, RETURNED, &sources, target.tensor())?;
        drop(target);
        for _ in 0..2 {
            let sums = self.combine()?;
            let difference = self.rig.compare_sums(case, RETURNED, DType::Bf16, self.plan.hidden, &sums)?;
            self.rig.note(difference.map(|difference| format!("combine: {difference}")));
        }
        self.rig.buffer.check()?;
        match self.rig.take_failure() {
            None => Ok(()),
            Some(failure) => Err(Error::Mismatch {
                rank: self.rig.rank,
                peer: self.rig.rank,
                what: "a checked result",
                ours: failure,
                theirs: "what its source sent".into(),
            }),
        }
    }

    /// Rows that this rank received from ranks up to and with r.
    fn rows_up_to(&self, handle: &DispatchHandle) -> Result<Vec<i32>> {
        if let Some(handle) = handle.internode() {
            return handle.recv_gbl_rank_prefix_sum().to_host(&self.rig.stream);
        }
        let Some(handle) = handle.intranode() else { return Ok(Vec::new()) };
        let (ranks, me) = (self.plan.world.ranks() as usize, self.rig.rank as usize);
        let prefix = handle.rank_prefix_matrix().to_host::<i32>(&self.rig.stream)?;
        Ok((0..ranks).map(|source| prefix[source * ranks + me]).collect())
    }

    /// Tokens of a dispatch as the handle on the device has them.
    fn counts(&self) -> Result<RankCounts> {
        let per_node = self.plan.world.ranks_per_node as usize;
        let (me, ends) = (self.rig.rank as usize, self.rows_up_to(&self.routing)?);
        let starts = std::iter::once(&0).chain(&ends);
        let from: Vec<u64> = ends.iter().zip(starts).map(|(end, start)| (end - start) as u64).collect();
        let received = |wanted: &dyn Fn(usize) -> bool| {
            from.iter().enumerate().filter(|(source, _)| wanted(*source)).map(|(_, rows)| rows).sum::<u64>()
        };
        let (sent, relayed) = self.rows_by_node()?;
        let node = me / per_node;
        let all: u64 = sent.iter().sum();
        let total: u64 = from.iter().sum();
        let near = received(&|source| source / per_node == node);
        let six = Six {
            send_total: all,
            send_nvl: sent[node],
            send_rdma: all - sent[node],
            recv_total: total,
            recv_nvl: near,
            recv_rdma: total - near,
        };
        Ok(RankCounts {
            six,
            relayed: relayed.iter().sum::<u64>() - relayed[node],
            linked: received(&|source| source % per_node != me % per_node),
        })
    }

    /// By node: tokens that this rank sends there, and those from there that it relays, as the handle has them.
    fn rows_by_node(&self) -> Result<(Vec<u64>, Vec<u64>)> {
        let Some(handle) = self.routing.internode() else {
            let heads = self.routing.send_head().to_host::<i32>(&self.rig.stream)?;
            let tokens = heads.chunks(self.plan.world.ranks() as usize);
            let sent = tokens.filter(|token| token.iter().any(|&head| head >= 0)).count() as u64;
            return Ok((vec![sent], vec![0]));
        };
        // Both matrices are inclusive over channels: the last column has a node's tokens.
        let by_node = |matrix: TypedTensor<'_, i32>| -> Result<Vec<u64>> {
            let (channels, entries) = (matrix.columns() as usize, matrix.values(&self.rig.stream)?);
            Ok(entries.chunks(channels).map(|row| row[channels - 1] as u64).collect())
        };
        Ok((
            by_node(handle.rdma_channel_prefix_matrix())?,
            by_node(handle.recv_rdma_channel_prefix_matrix())?,
        ))
    }

    /// What the transport alone takes for the rows of each phase: host code puts as many bytes to the same peers, in puts of as many
    /// rows, all ranks at once. Mean of iterations one after the other. Collective.
    fn transport_alone(&self, group: &dyn ProcessGroup) -> Result<Vec<(PhaseName, f64)>> {
        let plan = self.plan;
        if plan.world.nodes == 1 || plan.no_ceiling {
            return Ok(Vec::new());
        }
        let options = plan.transport_options(TIMEOUT);
        let slot = PhaseName::DispatchUncached.slot_bytes(plan.combine_row_bytes(), plan.topk);
        let region = slot * u64::from(plan.tokens.max(plan.rdma_send));
        let mut poster = Poster::new(self.rig.buffer.device(), group, plan.world, &options, region)?;
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

    /// What the proxies have put so far. All that carries bytes has left when an operation has ended.
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
        // An exact-size dispatch returns while its rows are on their way.
        self.rig.stream.synchronize()?;
        let before = self.wire_count();
        let samples = self.isolated(call)?;
        let after = self.wire_count();
        let count =
            WireCount { bytes: after.bytes - before.bytes, puts: after.puts.saturating_sub(before.puts) };
        times.wire.push((name, count));
        Ok(samples)
    }

    fn time(&mut self, num_sms: u32) -> Result<Times> {
        let capacity = self.rig.buffer.capacity();
        let mut times = Times { num_sms, ..Times::default() };
        let uncached = |bench: &mut Self| bench.dispatch(Counts::OnDevice { capacity }).map(drop);
        times.dispatch_cached =
            self.phase(&mut times, PhaseName::DispatchCached, |bench| bench.dispatch_cached())?;
        times.dispatch_uncached = self.phase(&mut times, PhaseName::DispatchUncached, uncached)?;
        times.combine =
            self.phase(&mut times, PhaseName::CombineInPool, |bench| bench.combine().map(drop))?;
        let shape = [self.received, self.plan.hidden];
        let rows = Tensor::alloc(self.rig.buffer.device(), DType::Bf16, &shape)?;
        times.combine_staged =
            self.phase(&mut times, PhaseName::CombineStaged, |bench| bench.combine_staged(&rows))?;
        self.trace(num_sms, PhaseName::DispatchCached, |bench| bench.dispatch_cached())?;
        self.trace(num_sms, PhaseName::DispatchUncached, uncached)?;
        self.trace(num_sms, PhaseName::CombineInPool, |bench| bench.combine().map(drop))?;
        for iteration in 0..self.plan.warmup + self.plan.iters {
            self.barrier()?;
            self.rig.stream.synchronize()?;
            let start = Instant::now();
            drop(self.dispatch(Counts::Exact)?);
            if iteration >= self.plan.warmup {
                times.dispatch_exact_host.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        times.dispatch_stream = self.back_to_back(|bench| bench.dispatch_cached())?;
        if self.plan.world.nodes > 1 {
            times.dispatch_exact_stream =
                self.back_to_back(|bench| bench.dispatch(Counts::Exact).map(drop))?;
        }
        times.combine_stream = self.back_to_back(|bench| bench.combine().map(drop))?;
        let has_links = self.plan.world.ranks_per_node > 1 || !self.rig.buffer.mapped_peers().is_empty();
        if !self.plan.no_ceiling && has_links && !self.rig.buffer.device().info().is_virtual {
            times.ceiling =
                Some((self.ceiling(Direction::Push, num_sms)?, self.ceiling(Direction::Pull, num_sms)?));
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
            // A barrier and at most two launches.
            self.rig.buffer.start_trace(3 * num_sms as u64)?;
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
            self.traced.push(TracedCall { phase, num_sms, barrier, launches, puts, host });
        }
        self.rig.buffer.check()
    }

    /// Times every iteration by itself: L2 emptied, devices aligned, then one call between two events. All of it is
    /// enqueued ahead, so that the host's own delays stay out.
    fn isolated(&mut self, mut call: impl FnMut(&mut Self) -> Result<()>) -> Result<Samples> {
        let mut pairs = Vec::new();
        for iteration in 0..self.plan.warmup + self.plan.iters {
            if let Some(flush) = &self.flush {
                // SAFETY: the memory lives as long as the bench, which synchronises below.
                unsafe { self.rig.stream.fill(flush.ptr(), iteration as u8, flush.bytes())? };
            }
            self.barrier()?;
            let pair =
                (Event::new(self.rig.buffer.device(), true)?, Event::new(self.rig.buffer.device(), true)?);
            pair.0.record(&self.rig.stream)?;
            call(self)?;
            pair.1.record(&self.rig.stream)?;
            pairs.push(pair);
        }
        self.rig.stream.synchronize()?;
        self.rig.buffer.check()?;
        let timed = &pairs[self.plan.warmup as usize..];
        timed.iter().map(|(start, end)| Ok(start.elapsed_ms(end)? as f64 * 1e3)).collect()
    }

    /// Mean microseconds of calls that follow each other directly: one pair of events around all of them.
    fn back_to_back(&mut self, mut call: impl FnMut(&mut Self) -> Result<()>) -> Result<f64> {
        let (start, end) =
            (Event::new(self.rig.buffer.device(), true)?, Event::new(self.rig.buffer.device(), true)?);
        for _ in 0..self.plan.warmup {
            call(self)?;
        }
        self.barrier()?;
        start.record(&self.rig.stream)?;
        for _ in 0..self.plan.iters {
            call(self)?;
        }
        end.record(&self.rig.stream)?;
        self.rig.stream.synchronize()?;
        Ok(start.elapsed_ms(&end)? as f64 * 1e3 / self.plan.iters as f64)
    }

    /// GB/s of remote bytes per rank that the bulk copies reach with `blocks` blocks.
    fn ceiling(&mut self, direction: Direction, blocks: u32) -> Result<f64> {
        let row_bytes = self.x.row_bytes() as u32;
        let row_bytes =
            if direction == Direction::Pull { self.plan.combine_row_bytes() as u32 } else { row_bytes };
        let limit = self.rig.buffer.device().info().max_shared_bytes_per_block;
        let world = &self.plan.world;
        let peers = if world.ranks_per_node > 1 { world.ranks_per_node } else { world.nodes } - 1;
        let mut best = f64::MAX;
        for warps in [4, 7] {
            let stages = (limit / (warps * (row_bytes + 8))).min(3);
            if stages < 2 {
                continue;
            }
            let fanout = 5.min(peers);
            let shape = CeilingShape { blocks, warps, stages, rows: self.plan.tokens, row_bytes, fanout };
            let samples =
                self.isolated(|bench| bench.rig.buffer.launch_ceiling(direction, shape, &bench.rig.stream))?;
            // The next barrier may not start before all have written.
            self.barrier()?;
            let mean = samples.iter().sum::<f64>() / samples.len() as f64;
            best = best.min(mean / shape.remote_bytes() as f64);
        }
        Ok(1e-3 / best)
    }
}

//! High throughput as a mode of the script: its calls, checks of their results, and what is
//! measured in this mode alone.

use std::sync::Arc;
use std::time::Instant;

use epoxide::driver::{Device, Stream};
use epoxide::group::ProcessGroup;
use epoxide::internal::{
    CeilingShape, Direction, Instruments, count_message_bytes, fields, launch_ceiling, launch_local_ceiling,
    local_parts,
};
use epoxide::throughput::{
    Buffer, CachedDispatchRequest, CombineRequest, Counts, Detached, DispatchHandle, DispatchLayout,
    DispatchRequest, Options, Place, Quantise, Received,
};
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide::{Error, Result};
use epoxide_testing::harness::Rank;
use epoxide_testing::oracle;
use epoxide_testing::roundtrip::{Case, Weights};

use crate::baseline::Nccl;
use crate::by_expert::ByExpert;
use crate::counts::{RankCounts, TokenCounts};
use crate::hold::{Hold, LIMIT};
use crate::measure::made;
use crate::measured::{RankResult, Times};
use crate::puts::Poster;
use crate::results::{PhaseName, mean};
use crate::script::{Front, Mode, Script};
use crate::{Baseline, Effort, Plan, TIMEOUT, Watch};

/// Turns of the case: of the rows that are sent, and of those that are given back.
pub(crate) const ROWS: u64 = 0;
pub(crate) const RETURNED: u64 = 1;

/// One run on rank `group.rank()`. Collective.
pub(crate) fn measure(
    plan: &Plan,
    device: &Device,
    group: &Arc<dyn ProcessGroup>,
    watch: &dyn Watch,
    result: &mut RankResult,
) -> Result<()> {
    // First of all, so that a missing library is reported before anything is made.
    let nccl = plan.baseline.map(|Baseline::Nccl| Nccl::join(device, group)).transpose()?;
    let stream = Stream::new(device)?;
    // All ranks meet behind it, before any kernel waits for another rank.
    let hold = plan.baseline.map(|_| Hold::new(device, LIMIT)).transpose()?;
    let topology = plan.topology;
    let mut options = Options::new(plan.shape())
        .config(plan.config(plan.num_sms[0])?)
        .timeout(TIMEOUT)
        .ranks_per_node(topology.ranks_per_node)
        .transport(plan.transport_options(TIMEOUT));
    let fields = fields(&mut options);
    fields.rows_by_expert = plan.room_by_expert();
    fields.tuning = plan.shapes.tuning();
    fields.keep_nodes = plan.keep_nodes;
    (fields.num_nvl_bytes, fields.num_rdma_bytes) = (plan.nvl_bytes, plan.rdma_bytes);
    fields.ptx = plan.ptx.clone();
    let buffer = made(device, group, result, || Buffer::new(device.clone(), &**group, options))?;

    let announced = plan.steps();
    result.is_joined = topology.nodes > 1 && buffer.num_nodes() == 1;
    let plan = &*plan.as_run(result.is_joined);
    let topology = plan.topology;
    result.mapped = topology.nodes > 1 && buffer.mapped_peers().len() as u32 == topology.nodes - 1;
    result.has_queues = !buffer.wire_stats().is_empty();
    let mode = HighThroughput::new(plan, Rank::with(group.clone(), stream, buffer))?;
    let stream = mode.rig.stream.clone();
    let mut script = Script::new(plan, group, &stream, watch, mode)?;
    script.hold = hold;
    // Steps of several nodes are not made where the buffer has joined them.
    script.step(announced.saturating_sub(plan.steps()) as u32);
    let whole = plan.effort == Effort::Whole;
    if whole {
        script.doing("every bit against the oracle");
        script.mode.verify()?;
    }
    if let Some(nccl) = &nccl {
        result.others = script.ways(nccl)?;
        nccl.finalize()?;
    }
    if whole && !result.mapped && topology.nodes > 1 && !plan.no_ceiling {
        script.doing("the transport alone");
        result.transport_us = script.mode.transport_alone(plan)?;
    }
    group.barrier(group.timeout())?;
    for &num_sms in &plan.num_sms {
        script.mode.rig.buffer.set_config(plan.config(num_sms)?)?;
        script.mode.route()?;
        result.times.push(script.times(num_sms)?);
        group.barrier(group.timeout())?;
    }
    result.counts = script.mode.counts(plan)?;
    script.mode.check()?;
    let buffer = &script.mode.rig.buffer;
    result.pool_bytes = buffer.pool_bytes();
    result.wire_bytes = buffer.wire_bytes();
    result.message_bytes = u64::from(topology.nodes - 1) * count_message_bytes(buffer, plan.experts);
    result.traced = script.traced;
    Ok(())
}

/// Rows of one rank, and their routing.
pub(crate) struct Inputs {
    x: Tensor<'static>,
    scales: Option<TypedTensor<'static, f32>>,
    topk_weights: TypedTensor<'static, f32>,
    layout: DispatchLayout<'static>,
    quantise: Quantise,
}

impl Inputs {
    /// Enqueues a dispatch; of rows by expert where it has an alignment.
    fn dispatch<'p>(
        &self,
        place: &'p mut Place,
        buffer: &mut Buffer,
        order: StreamOrder<'_>,
        (counts, alignment): (Counts, Option<u32>),
    ) -> Result<Received<'p>> {
        let request = DispatchRequest::new(&self.x, &self.layout).quantise(self.quantise);
        let request = request.topk_weights(&self.topk_weights);
        let request = self.scales.iter().fold(request.counts(counts), DispatchRequest::scales);
        let request = alignment.into_iter().fold(request, DispatchRequest::by_expert);
        buffer.dispatch(place, request, order)
    }

    /// Enqueues a dispatch along a known routing.
    pub fn dispatch_cached<'p>(
        &self,
        place: &'p mut Place,
        routing: &DispatchHandle,
        buffer: &mut Buffer,
        order: StreamOrder<'_>,
    ) -> Result<Received<'p>> {
        let request = CachedDispatchRequest::new(&self.x, routing).quantise(self.quantise);
        let request = self.scales.iter().fold(request, CachedDispatchRequest::scales);
        buffer.dispatch_cached(place, request, order)
    }

    /// A routing, of as many channels as the buffer has.
    pub fn route(
        &self,
        place: &mut Place,
        buffer: &mut Buffer,
        order: StreamOrder<'_>,
        alignment: Option<u32>,
    ) -> Result<DispatchHandle> {
        let request = DispatchRequest::new(&self.x, &self.layout).quantise(self.quantise);
        let request = self.scales.iter().fold(request, DispatchRequest::scales);
        let request = match alignment {
            // Across nodes the weights of a combine have come with the dispatch.
            Some(alignment) => request.by_expert(alignment).topk_weights(&self.topk_weights),
            None => request,
        };
        Ok(buffer.dispatch(place, request, order)?.handle)
    }
}

/// One rank's operations on the rows of one case, whether they run or are recorded.
pub(crate) struct Calls {
    pub place: Place,
    pub inputs: Inputs,
    /// Rows that the routing brings here; by expert with their padding.
    pub received: u64,
    /// Elements of a row.
    pub hidden: u64,
    /// Rows of a staged combine.
    pub staged: Tensor<'static>,
    /// The routing, of as many channels as the buffer has.
    pub routing: DispatchHandle,
    /// Where rows come by expert, and what they are held against.
    pub by_expert: Option<ByExpert>,
}

/// Results of a call: `R` are received rows.
pub(crate) enum Called<R> {
    Rows(Box<R>),
    Sums(Tensor<'static>),
    /// Rows in [`ByExpert::sorted`].
    Sorted,
}

impl Calls {
    /// Multiples at which segments begin, where rows come by expert.
    fn alignment(&self) -> Option<u32> {
        self.by_expert.as_ref().map(|by_expert| by_expert.alignment)
    }

    /// The routing of an ordinary dispatch.
    fn by_token(&self) -> &DispatchHandle {
        self.by_expert.as_ref().map_or(&self.routing, |by_expert| &by_expert.by_token)
    }

    /// Enqueues a call of a phase.
    pub fn call(
        &mut self,
        name: PhaseName,
        buffer: &mut Buffer,
        order: StreamOrder<'_>,
    ) -> Result<Called<Received<'_>>> {
        let (alignment, on_device) = (self.alignment(), Counts::OnDevice { capacity: buffer.capacity() });
        let unavailable =
            |reason: &str| Err(Error::Unavailable { what: name.text().into(), reason: reason.into() });
        let (place, inputs) = (&mut self.place, &self.inputs);
        let rows;
        let request = match name {
            PhaseName::DispatchCached => {
                let received = inputs.dispatch_cached(place, &self.routing, buffer, order)?;
                return Ok(Called::Rows(Box::new(received)));
            }
            PhaseName::DispatchUncached => {
                let received = inputs.dispatch(place, buffer, order, (on_device, alignment))?;
                return Ok(Called::Rows(Box::new(received)));
            }
            PhaseName::DispatchCachedAndSort | PhaseName::DispatchUncachedAndSort => {
                let Some(by_expert) = &self.by_expert else {
                    return unavailable("the plan has no rows by expert");
                };
                let received = match name.counts() {
                    true => inputs.dispatch(place, buffer, order, (on_device, None))?,
                    false => inputs.dispatch_cached(place, &by_expert.by_token, buffer, order)?,
                };
                by_expert.sort(buffer, &received, order)?;
                return Ok(Called::Sorted);
            }
            PhaseName::CombineInPool => {
                rows = place.combine_rows(DType::Bf16, self.received, self.hidden)?;
                CombineRequest::new(&rows, &self.routing)
            }
            PhaseName::CombineStaged => CombineRequest::new(&self.staged, &self.routing),
            PhaseName::LowLatencyDispatch | PhaseName::LowLatencyCombine => {
                return unavailable("low latency has a buffer of its own");
            }
        };
        // Rows by expert are weighted on their way back.
        let weights = alignment.map(|_| &inputs.topk_weights);
        let request = weights.into_iter().fold(request, CombineRequest::weights);
        Ok(Called::Sums(buffer.combine(request, order)?.combined_x))
    }
}

/// High throughput on one rank.
pub(crate) struct HighThroughput {
    pub rig: Rank,
    pub case: Case,
    pub calls: Calls,
    no_rows: Tensor<'static>,
    /// The layout of no tokens.
    empty: DispatchLayout<'static>,
    /// A routing of no tokens: its dispatch is a barrier between the devices.
    nothing: DispatchHandle,
}

impl Mode for HighThroughput {
    type Buffer = Buffer;

    const FRONT: Front<'static> = Front::EmptiedCaches;
    const FRONT_OF_PAIRS: Front<'static> = Front::Held;

    fn buffer(&mut self) -> &mut Buffer {
        &mut self.rig.buffer
    }

    fn check(&self) -> Result<()> {
        self.rig.buffer.check()
    }

    fn verify(&mut self) -> Result<()> {
        let output = self.dispatch_exact()?.detach();
        self.check_rows("dispatch", &output)?;
        let target = self.calls.place.combine_rows(DType::Bf16, self.calls.received, self.calls.hidden)?;
        self.give_back(target.tensor())?;
        drop(target);
        for _ in 0..2 {
            let order = StreamOrder::on(&self.rig.stream);
            let sums = self.calls.call(PhaseName::CombineInPool, &mut self.rig.buffer, order)?;
            if let Called::Sums(sums) = sums {
                self.check_sums("combine", &sums)?;
            }
        }
        for name in [PhaseName::DispatchCachedAndSort, PhaseName::DispatchUncachedAndSort] {
            let Some(by_expert) = &self.calls.by_expert else { break };
            by_expert.poison(&self.rig)?;
            self.call(name)?;
            self.check_sorted(name.text())?;
        }
        self.check()?;
        self.no_failure()
    }

    fn call(&mut self, name: PhaseName) -> Result<()> {
        self.calls.call(name, &mut self.rig.buffer, StreamOrder::on(&self.rig.stream)).map(drop)
    }

    fn traced(&mut self, names: &[PhaseName], rounds: u32) -> Result<()> {
        (0..rounds).try_for_each(|_| names.iter().try_for_each(|&name| self.call(name)))
    }

    fn pairs(&mut self, chain: u32) -> Result<()> {
        self.traced(&[PhaseName::DispatchCached, PhaseName::CombineInPool], chain)
    }

    fn barrier(&mut self) -> Result<()> {
        let request = CachedDispatchRequest::new(&self.no_rows, &self.nothing);
        let order = StreamOrder::on(&self.rig.stream);
        self.rig.buffer.dispatch_cached(&mut self.calls.place, request, order).map(drop)
    }

    fn others(script: &mut Script<'_, Self>, times: &mut Times) -> Result<()> {
        let (plan, num_sms) = (script.plan, times.num_sms);
        script.doing("exact-size dispatch");
        for iteration in 0..plan.warmup + plan.iters {
            script.step(1);
            script.mode.barrier()?;
            script.stream.synchronize()?;
            let start = Instant::now();
            drop(script.mode.dispatch_exact()?);
            if iteration >= plan.warmup {
                times.exact_dispatch_returns.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        script.doing("calls back to back");
        for phase in &mut times.phases {
            phase.back_to_back = match phase.name {
                PhaseName::DispatchCached | PhaseName::CombineInPool => {
                    Some(script.back_to_back(|script| script.mode.call(phase.name))?)
                }
                // MSCCL++'s test times this one, with the host's wait for the counts.
                PhaseName::DispatchUncached if plan.topology.nodes > 1 => {
                    Some(script.back_to_back(|script| script.mode.dispatch_exact().map(drop))?)
                }
                _ => None,
            };
        }
        let has_links = plan.topology.ranks_per_node > 1 || !script.mode.rig.buffer.mapped_peers().is_empty();
        if !plan.no_ceiling && has_links && !plan.is_virtual {
            script.doing("the links' ceiling");
            let [push, pull] = [Direction::Push, Direction::Pull].map(|way| script.ceiling(way, num_sms));
            times.ceiling = push?.zip(pull?);
        }
        if !plan.no_ceiling && !plan.is_virtual && plan.rows_by_expert.is_some() {
            script.doing("the memory's ceiling");
            times.memory_ceiling = script.memory_ceiling()?;
            if plan.topology.nodes == 1 {
                times.store_ceiling = script.store_ceiling(num_sms)?;
            }
        }
        if let Some(chain) = plan.replays() {
            script.doing("replays of graphs");
            times.replays = script.replays(chain)?;
        }
        Ok(())
    }
}

impl HighThroughput {
    fn new(plan: &Plan, mut rig: Rank) -> Result<Self> {
        let case = plan.case();
        let (topk_idx, topk_weights) = rig.topk(&case)?;
        let (x, scales) = rig.payload(&case, ROWS)?;
        let (buffer, stream) = (&mut rig.buffer, &rig.stream);
        let order = StreamOrder::on(stream);
        let layout = buffer.get_dispatch_layout(&topk_idx, plan.experts, order)?;
        let no_ids = TypedTensor::<i64>::from_host(stream, &[0, plan.topk as u64], &[])?;
        let empty = buffer.get_dispatch_layout(&no_ids, plan.experts, order)?;
        let no_rows = Tensor::alloc(buffer.device(), x.dtype(), &[0, plan.hidden])?;
        let mut place = buffer.place(0)?;
        let request = DispatchRequest::new(&no_rows, &empty);
        let nothing = buffer.dispatch(&mut place, request, order)?.handle;
        let inputs = Inputs { x, scales, topk_weights, layout, quantise: case.quantise };
        let routing = inputs.route(&mut place, buffer, order, plan.rows_by_expert)?;
        let by_expert = match plan.rows_by_expert {
            Some(alignment) => Some(ByExpert::new(&case, &mut rig, &mut place, &inputs, alignment)?),
            None => None,
        };
        let received = routing.num_recv_tokens(&rig.stream)?.into();
        let hidden = plan.hidden;
        let staged = Tensor::alloc(rig.device(), DType::Bf16, &[received, hidden])?;
        let calls = Calls { place, inputs, received, hidden, staged, routing, by_expert };
        Ok(HighThroughput { rig, case, calls, no_rows, empty, nothing })
    }

    /// Routes again, with the buffer's present configuration.
    fn route(&mut self) -> Result<()> {
        let (buffer, calls, order) =
            (&mut self.rig.buffer, &mut self.calls, StreamOrder::on(&self.rig.stream));
        let request = DispatchRequest::new(&self.no_rows, &self.empty);
        self.nothing = buffer.dispatch(&mut calls.place, request, order)?.handle;
        let alignment = calls.alignment();
        let (place, inputs) = (&mut calls.place, &calls.inputs);
        calls.routing = inputs.route(place, buffer, order, alignment)?;
        if let Some(by_expert) = &mut calls.by_expert {
            by_expert.by_token = inputs.route(place, buffer, order, None)?;
        }
        Ok(())
    }

    fn dispatch_exact(&mut self) -> Result<Received<'_>> {
        let (alignment, order) = (self.calls.alignment(), StreamOrder::on(&self.rig.stream));
        let Calls { place, inputs, .. } = &mut self.calls;
        inputs.dispatch(place, &mut self.rig.buffer, order, (Counts::Exact, alignment))
    }

    /// Notes a difference of received rows from the oracle.
    pub fn check_rows(&mut self, what: &str, output: &Detached) -> Result<()> {
        let (rig, case, calls) = (&mut self.rig, &self.case, &self.calls);
        let output = output.at(&calls.place)?;
        match &calls.by_expert {
            Some(by_expert) => rig.check_rows_by_expert(case, ROWS, &by_expert.segments, what, output),
            None => {
                let sources = oracle::recv_order(&case.routing, rig.rank);
                rig.check_received(case, ROWS, &sources, what, output)
            }
        }
    }

    /// Notes a difference of sorted rows from the oracle.
    pub fn check_sorted(&mut self, what: &str) -> Result<()> {
        let Some(by_expert) = &self.calls.by_expert else { return Ok(()) };
        self.rig.check_segments(&self.case, ROWS, &by_expert.segments, what, by_expert.sorted())
    }

    /// Writes what the experts give back for the received rows.
    pub fn give_back(&self, rows: &Tensor) -> Result<()> {
        let (rig, case) = (&self.rig, &self.case);
        match &self.calls.by_expert {
            Some(by_expert) => rig.write_made(case, RETURNED, &by_expert.segments, rows),
            None => {
                let sources = oracle::recv_order(&case.routing, rig.rank);
                rig.write_returned(case, RETURNED, &sources, rows)
            }
        }
    }

    /// Notes a difference of a combine's sums from the oracle.
    pub fn check_sums(&mut self, what: &str, sums: &Tensor) -> Result<()> {
        if self.calls.by_expert.is_some() {
            return self.rig.check_sums_by_expert(&self.case, RETURNED, Weights::OfCase, sums);
        }
        let difference = self.rig.compare_sums(&self.case, RETURNED, DType::Bf16, self.calls.hidden, sums)?;
        self.rig.note(difference.map(|difference| format!("{what}: {difference}")));
        Ok(())
    }

    /// An error where a check has failed since the last call.
    pub fn no_failure(&mut self) -> Result<()> {
        match self.rig.take_failure() {
            None => Ok(()),
            // Not a mismatch between ranks, which are to change what they ask for: the library is
            // wrong.
            Some(failure) => Err(Error::os("verify", format!("rank {}: {failure}", self.rig.rank))),
        }
    }

    /// Times of the transport alone for the rows of each phase. Host code puts as many bytes to the
    /// same peers, in puts of as many rows, all ranks at once. Mean of iterations one after the
    /// other. Collective.
    fn transport_alone(&self, plan: &Plan) -> Result<Vec<(PhaseName, f64)>> {
        let options = plan.transport_options(TIMEOUT);
        let slot = plan.phases().iter().map(|&name| plan.slot_bytes(name)).max().unwrap_or(0);
        let region = slot * u64::from(plan.tokens.max(plan.rdma_send));
        let group = &*self.rig.group;
        let mut poster = Poster::new(self.rig.device(), group, plan.topology, &options, region)?;
        let (sent, relayed) = self.rows_by_node()?;
        let mut times = Vec::new();
        // Rows of a staged combine are those of one in the pool.
        for &name in plan.phases().iter().filter(|name| **name != PhaseName::CombineStaged) {
            let slot = plan.slot_bytes(name);
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

    /// Rows that this rank received from ranks up to and with r.
    fn rows_up_to(&self) -> Result<Vec<i32>> {
        if let Some(handle) = self.calls.by_token().internode() {
            return handle.recv_gbl_rank_prefix_sum(&self.rig.stream);
        }
        let Some(handle) = self.calls.by_token().intranode() else { return Ok(Vec::new()) };
        let (ranks, me) = (self.case.routing.num_ranks() as usize, self.rig.rank as usize);
        let prefix = handle.rank_prefix_matrix().to_host::<i32>(&self.rig.stream)?;
        Ok((0..ranks).map(|source| prefix[source * ranks + me]).collect())
    }

    /// Tokens of a dispatch as the handle on the device has them.
    fn counts(&self, plan: &Plan) -> Result<RankCounts> {
        let per_node = plan.topology.ranks_per_node as usize;
        let (me, ends) = (self.rig.rank as usize, self.rows_up_to()?);
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
        let six = TokenCounts {
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

    /// By node: tokens that this rank sends there, and those from there that it relays, as the
    /// handle has them.
    fn rows_by_node(&self) -> Result<(Vec<u64>, Vec<u64>)> {
        let Some(handle) = self.calls.by_token().internode() else {
            let heads = self.calls.by_token().send_head().to_host::<i32>(&self.rig.stream)?;
            let tokens = heads.chunks(self.case.routing.num_ranks() as usize);
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
}

/// Rows that a loaded one is stored to where the ceiling of local stores is measured: those of a
/// token with eight entries between two ranks.
const LOCAL_FANOUT: u32 = 4;

impl Script<'_, HighThroughput> {
    /// GB/s that the driver's copy within the device's memory reads and writes: as many bytes as are
    /// sorted. Missing where no rows come.
    fn memory_ceiling(&mut self) -> Result<Option<f64>> {
        let Some(by_expert) = &self.mode.calls.by_expert else { return Ok(None) };
        let (rows, _) = by_expert.sorted();
        let (to, bytes) = (rows.ptr(), rows.rows() * rows.row_bytes());
        let samples = self.unannounced(|script| match bytes {
            0 => Ok(()),
            // SAFETY: rows of a staged combine are BF16 and as many as the sorted ones, of at most as
            // many bytes. `unannounced` waits for the stream, and replays of sorts write the rows
            // anew.
            _ => unsafe { script.stream.copy(to, script.mode.calls.staged.ptr(), bytes) },
        })?;
        Ok((bytes > 0).then(|| 2e-3 * bytes as f64 / mean(&samples)))
    }

    /// GB/s of remote bytes per rank that the bulk copies reach with `blocks` blocks; missing where
    /// none can be measured.
    fn ceiling(&mut self, direction: Direction, blocks: u32) -> Result<Option<f64>> {
        let row_bytes = match direction {
            Direction::Push => self.mode.case.row_bytes,
            Direction::Pull => self.plan.combine_row_bytes() as u32,
        };
        let topology = &self.plan.topology;
        let peers = if topology.ranks_per_node > 1 { topology.ranks_per_node } else { topology.nodes } - 1;
        self.best_of_shapes(blocks, row_bytes, 5.min(peers), |script, shape| {
            launch_ceiling(&script.mode.rig.buffer, direction, shape, &script.stream)
        })
    }

    /// GB/s that the same copies store in the own memory; likewise.
    fn store_ceiling(&mut self, blocks: u32) -> Result<Option<f64>> {
        let row_bytes = self.mode.case.row_bytes;
        let mut parts = None;
        self.best_of_shapes(blocks, row_bytes, LOCAL_FANOUT, |script, shape| {
            let (buffer, stream) = (&script.mode.rig.buffer, &script.stream);
            // The same for all shapes of as many rows.
            let of_shape = match parts.take() {
                Some((rows, of_shape)) if rows == shape.rows => of_shape,
                _ => local_parts(buffer, shape, stream)?,
            };
            let (_, of_shape) = parts.insert((shape.rows, of_shape));
            launch_local_ceiling(buffer, of_shape, shape, stream)
        })
    }

    /// The most GB/s of stored bytes per rank that launches of several shapes reach, with as many of
    /// the plan's rows as the pool has room for. Missing where a block has no room for two stages of
    /// a warp, or the pool none for a row.
    fn best_of_shapes(
        &mut self,
        blocks: u32,
        row_bytes: u32,
        fanout: u32,
        mut launch: impl FnMut(&mut Self, CeilingShape) -> Result<()>,
    ) -> Result<Option<f64>> {
        let mut best: Option<f64> = None;
        let mut rows = self.plan.tokens;
        for (warps, stages) in ring_shapes(self.stream.device().info().max_shared_bytes_per_block, row_bytes)
        {
            let mut shape = CeilingShape { blocks, warps, stages, rows, row_bytes, fanout };
            let samples = loop {
                match self.unannounced(|script| launch(script, shape)) {
                    // Nothing was launched, on no rank: their pools are of one size.
                    Err(Error::Capacity { needed, have, .. }) => {
                        shape.rows = (u128::from(shape.rows) * u128::from(have) / u128::from(needed)) as u32;
                        if shape.rows == 0 {
                            return Ok(None);
                        }
                    }
                    samples => break samples?,
                }
            };
            rows = shape.rows;
            // The next barrier may not start before all have written.
            self.mode.barrier()?;
            let gbps = 1e-3 * shape.stored_bytes() as f64 / mean(&samples);
            best = Some(best.map_or(gbps, |best| best.max(gbps)));
        }
        Ok(best)
    }
}

/// Warps of a block, and the stages of each, with which a ceiling is measured: of the rows that fit
/// into its shared memory, fewer warps than usual where those have no two stages.
fn ring_shapes(shared_bytes: u32, row_bytes: u32) -> Vec<(u32, u32)> {
    let stages = |warps: u32| (shared_bytes / (warps * (row_bytes + 8))).min(3);
    let shape = |warps: u32| Some((warps, stages(warps))).filter(|(_, stages)| *stages >= 2);
    let usual: Vec<_> = [4, 7].into_iter().filter_map(shape).collect();
    if usual.is_empty() { [2, 1].into_iter().find_map(shape).into_iter().collect() } else { usual }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Counted;
    use crate::tests::{open, plan};

    #[test]
    fn large_rows_have_fewer_warps_in_a_ceiling() {
        let shared = 227 << 10;
        assert_eq!(ring_shapes(shared, 14_336), [(4, 3), (7, 2)]);
        assert_eq!(ring_shapes(shared, 28_672), [(4, 2)]);
        assert_eq!(ring_shapes(shared, 32_768), [(2, 3)]);
        assert_eq!(ring_shapes(shared, 65_536), [(1, 3)]);
        assert_eq!(ring_shapes(shared, 131_072), []);
    }

    /// The virtual GPU runs the kernels of the ceilings, too, if a plan calls it hardware.
    #[test]
    fn ceilings_fit_into_the_pool_or_are_left_out() {
        let measured = |line: &str, nvl_bytes: Option<u64>| {
            let plan = Plan { is_virtual: false, flush_mib: 0, nvl_bytes, ..plan(line) };
            let steps = Counted::default();
            let result = crate::measure(&plan, open, &steps).unwrap().1.remove(0);
            assert_eq!(steps.of_rank_0(), plan.steps(), "{line}");
            result
        };
        let mut whole = measured("--tokens 32 --hidden 1024", None);
        // Without room for all rows of all ranks: two rows fewer to receive, and as many to return.
        let mut less = measured("--tokens 32 --hidden 1024", Some(whole.pool_bytes - 4 * 2048));
        let mut by_expert = measured("--tokens 40 --rows-by-expert 4", None);
        let mut large = measured("--tokens 2 --hidden 20480", None);
        for (result, is_by_expert) in
            [(&mut whole, false), (&mut less, false), (&mut by_expert, true), (&mut large, false)]
        {
            let times = result.times.remove(0);
            assert!(times.ceiling.is_some_and(|(push, pull)| push > 1e-9 && pull > 1e-9), "{times:?}");
            assert_eq!(times.store_ceiling.is_some(), is_by_expert);
        }
        assert_eq!(measured("--tokens 2 --hidden 65536", None).times[0].ceiling, None);
    }
}

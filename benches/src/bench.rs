//! Calls of a rank of a benchmark, and checks of their results.

use epoxide::driver::{Memory, MemoryKind, Stream};
use epoxide::throughput::{
    Buffer, CachedDispatchRequest, CombineRequest, CombineRows, Counts, DispatchHandle, DispatchLayout,
    DispatchRequest, Place, Received,
};
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide::{Error, Result};
use epoxide_testing::harness::Rank;
use epoxide_testing::oracle;
use epoxide_testing::roundtrip::Case;

use crate::counts::{RankCounts, TokenCounts};
use crate::measured::TracedCall;
use crate::{Plan, Watch};

/// Turns of the case: of the rows that are sent, and of those that are given back.
pub(crate) const ROWS: u64 = 0;
pub(crate) const RETURNED: u64 = 1;

/// One rank's operations on the rows of one case, whether they run or are recorded.
pub(crate) struct Calls {
    pub place: Place,
    pub x: Tensor<'static>,
    pub scales: Option<TypedTensor<'static, f32>>,
    pub topk_weights: TypedTensor<'static, f32>,
    pub layout: DispatchLayout<'static>,
    /// Rows that the routing brings here.
    pub received: u64,
    /// Elements of a row.
    pub hidden: u64,
    /// The routing, of as many channels as the buffer has.
    pub routing: DispatchHandle,
}

impl Calls {
    pub fn dispatch(
        &mut self,
        buffer: &mut Buffer,
        order: StreamOrder<'_>,
        counts: Counts,
    ) -> Result<Received<'_>> {
        let request = DispatchRequest::new(&self.x, &self.layout).topk_weights(&self.topk_weights);
        let request = self.scales.iter().fold(request.counts(counts), DispatchRequest::scales);
        buffer.dispatch(&mut self.place, request, order)
    }

    pub fn dispatch_cached(&mut self, buffer: &mut Buffer, order: StreamOrder<'_>) -> Result<Received<'_>> {
        let request = CachedDispatchRequest::new(&self.x, &self.routing);
        let request = self.scales.iter().fold(request, CachedDispatchRequest::scales);
        buffer.dispatch_cached(&mut self.place, request, order)
    }

    /// Combines the rows that are in the pool.
    pub fn combine(&self, buffer: &mut Buffer, order: StreamOrder<'_>) -> Result<Tensor<'static>> {
        let rows = self.place.combine_rows(DType::Bf16, self.received, self.hidden)?;
        self.combine_of((&rows).into(), buffer, order)
    }

    pub fn combine_of(
        &self,
        rows: CombineRows<'_>,
        buffer: &mut Buffer,
        order: StreamOrder<'_>,
    ) -> Result<Tensor<'static>> {
        let request = match rows {
            CombineRows::Tensor(rows) => CombineRequest::new(rows, &self.routing),
            CombineRows::InPool(rows) => CombineRequest::new(rows, &self.routing),
        };
        Ok(buffer.combine(request, order)?.combined_x)
    }
}

/// One rank's benchmark.
pub(crate) struct Bench<'a> {
    pub plan: &'a Plan,
    pub rig: Rank,
    pub calls: Calls,
    pub no_rows: Tensor<'static>,
    /// A routing of no tokens: its dispatch is a barrier between the devices.
    pub nothing: DispatchHandle,
    pub flush: Option<Memory>,
    pub traced: Vec<TracedCall>,
    pub watch: &'a dyn Watch,
}

impl<'a> Bench<'a> {
    pub fn new(plan: &'a Plan, case: &Case, mut rig: Rank, watch: &'a dyn Watch) -> Result<Self> {
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
        let hidden = plan.hidden;
        let calls = Calls { place, x, scales, topk_weights, layout, received, hidden, routing };
        Ok(Bench { plan, rig, calls, no_rows, nothing, flush, traced: Vec::new(), watch })
    }

    /// Reports the current work.
    pub fn doing(&self, what: &str) {
        self.watch.doing(self.rig.rank, what);
    }

    /// Dispatches the rows, and none at all, with the buffer's present configuration: the two
    /// routings.
    fn route(
        plan: &Plan,
        buffer: &mut Buffer,
        stream: &Stream,
        place: &mut Place,
        (x, x_scales, layout): (&Tensor, Option<&TypedTensor<'_, f32>>, &DispatchLayout),
        no_rows: &Tensor,
    ) -> Result<(DispatchHandle, DispatchHandle)> {
        let order = StreamOrder::on(stream);
        let no_ids = TypedTensor::<i64>::from_host(stream, &[0, plan.topk as u64], &[])?;
        let empty = buffer.get_dispatch_layout(&no_ids, plan.experts, order)?;
        let nothing = buffer.dispatch(place, DispatchRequest::new(no_rows, &empty), order)?.handle;
        let request = x_scales.into_iter().fold(DispatchRequest::new(x, layout), DispatchRequest::scales);
        Ok((buffer.dispatch(place, request, order)?.handle, nothing))
    }

    /// The routings with the buffer's present configuration.
    pub fn routings(&mut self) -> Result<(DispatchHandle, DispatchHandle)> {
        let calls = &mut self.calls;
        let rows = (&calls.x, calls.scales.as_ref(), &calls.layout);
        let (buffer, stream) = (&mut self.rig.buffer, &self.rig.stream);
        Self::route(self.plan, buffer, stream, &mut calls.place, rows, &self.no_rows)
    }

    pub fn dispatch(&mut self, counts: Counts) -> Result<Received<'_>> {
        self.calls.dispatch(&mut self.rig.buffer, StreamOrder::on(&self.rig.stream), counts)
    }

    pub fn dispatch_cached(&mut self) -> Result<()> {
        self.calls.dispatch_cached(&mut self.rig.buffer, StreamOrder::on(&self.rig.stream)).map(drop)
    }

    pub fn combine(&mut self) -> Result<Tensor<'static>> {
        self.calls.combine(&mut self.rig.buffer, StreamOrder::on(&self.rig.stream))
    }

    pub fn combine_staged(&mut self, rows: &Tensor) -> Result<()> {
        let order = StreamOrder::on(&self.rig.stream);
        self.calls.combine_of(rows.into(), &mut self.rig.buffer, order).map(drop)
    }

    /// A barrier between the devices, on the device.
    pub fn barrier(&mut self) -> Result<()> {
        let request = CachedDispatchRequest::new(&self.no_rows, &self.nothing);
        let order = StreamOrder::on(&self.rig.stream);
        self.rig.buffer.dispatch_cached(&mut self.calls.place, request, order).map(drop)
    }

    /// Every received row and every sum, bit for bit.
    pub fn verify(&mut self, case: &Case) -> Result<()> {
        let sources = oracle::recv_order(&case.routing, self.rig.rank);
        let output = self.dispatch(Counts::Exact)?.detach();
        self.rig.check_received(case, ROWS, &sources, "dispatch", output.at(&self.calls.place)?)?;
        let target = self.calls.place.combine_rows(DType::Bf16, sources.len() as u64, self.plan.hidden)?;
        self.rig.write_returned(case, RETURNED, &sources, target.tensor())?;
        drop(target);
        for _ in 0..2 {
            let sums = self.combine()?;
            let difference = self.rig.compare_sums(case, RETURNED, DType::Bf16, self.plan.hidden, &sums)?;
            self.rig.note(difference.map(|difference| format!("combine: {difference}")));
        }
        self.rig.buffer.check()?;
        self.no_failure()
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

    /// Rows that this rank received from ranks up to and with r.
    fn rows_up_to(&self, handle: &DispatchHandle) -> Result<Vec<i32>> {
        if let Some(handle) = handle.internode() {
            return handle.recv_gbl_rank_prefix_sum(&self.rig.stream);
        }
        let Some(handle) = handle.intranode() else { return Ok(Vec::new()) };
        let (ranks, me) = (self.plan.topology.ranks() as usize, self.rig.rank as usize);
        let prefix = handle.rank_prefix_matrix().to_host::<i32>(&self.rig.stream)?;
        Ok((0..ranks).map(|source| prefix[source * ranks + me]).collect())
    }

    /// Tokens of a dispatch as the handle on the device has them.
    pub fn counts(&self) -> Result<RankCounts> {
        let per_node = self.plan.topology.ranks_per_node as usize;
        let (me, ends) = (self.rig.rank as usize, self.rows_up_to(&self.calls.routing)?);
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
    pub fn rows_by_node(&self) -> Result<(Vec<u64>, Vec<u64>)> {
        let Some(handle) = self.calls.routing.internode() else {
            let heads = self.calls.routing.send_head().to_host::<i32>(&self.rig.stream)?;
            let tokens = heads.chunks(self.plan.topology.ranks() as usize);
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

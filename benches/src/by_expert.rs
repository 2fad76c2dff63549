//! Rows by expert in high throughput, and their baseline: an ordinary dispatch, and a kernel that
//! copies its rows to the segments of their experts.

use epoxide::internal::copy_by_expert;
use epoxide::throughput::{Buffer, DispatchHandle, Place, Received};
use epoxide::{Result, StreamOrder, Tensor, TypedTensor};
use epoxide_testing::harness::Rank;
use epoxide_testing::oracle::{self, ExpertPlan};
use epoxide_testing::roundtrip::Case;

use crate::TIMEOUT;
use crate::high_throughput::Inputs;

/// The segments of a rank, and what a sort of ordinary rows needs.
pub(crate) struct ByExpert {
    /// Rows to multiples of which segments begin.
    pub alignment: u32,
    /// The place of each row.
    pub segments: ExpertPlan,
    /// The routing of an ordinary dispatch.
    pub by_token: DispatchHandle,
    /// i32 `[num_recv_tokens, num_topk]`: the rows that a received one is copied to; -1 for none.
    places: TypedTensor<'static, i32>,
    rows: Tensor<'static>,
    scales: Option<TypedTensor<'static, f32>>,
}

impl ByExpert {
    /// Makes what a rank's case needs, and sorts once. Collective.
    pub fn new(
        case: &Case,
        rig: &mut Rank,
        place: &mut Place,
        inputs: &Inputs,
        alignment: u32,
    ) -> Result<ByExpert> {
        let segments = oracle::by_expert(&case.routing, rig.rank, alignment);
        let (buffer, stream, group) = (&mut rig.buffer, &rig.stream, &rig.group);
        let order = StreamOrder::on(stream);
        let by_token = inputs.route(place, buffer, order, None)?;
        let (sources, topk) = (oracle::recv_order(&case.routing, rig.rank), case.routing.num_topk);
        let shape = [sources.len() as u64, topk.into()];
        let places = TypedTensor::from_host(stream, &shape, &segments.places(&sources, topk))?;
        let num_rows = segments.rows.len() as u64;
        let rows = Tensor::alloc(stream.device(), case.dtype, &[num_rows, case.hidden()])?;
        let num_scales = case.scale_bytes() / 4;
        let zeros = || vec![0.0; (num_rows * num_scales) as usize];
        let scales = || TypedTensor::from_host(stream, &[num_rows, num_scales], &zeros());
        let scales = (num_scales > 0).then(scales).transpose()?;
        let by_expert = ByExpert { alignment, segments, by_token, places, rows, scales };
        // The kernel is loaded now, while no rank's device works.
        let received = inputs.dispatch_cached(place, &by_expert.by_token, buffer, order)?;
        stream.synchronize()?;
        group.barrier(TIMEOUT)?;
        by_expert.sort(buffer, &received, order)?;
        group.barrier(TIMEOUT)?;
        Ok(by_expert)
    }

    /// Enqueues the sort of an ordinary dispatch's rows.
    pub fn sort(&self, buffer: &mut Buffer, received: &Received<'_>, order: StreamOrder<'_>) -> Result<()> {
        copy_by_expert(buffer, received, &self.places, (&self.rows, self.scales.as_ref()), order)
    }

    /// The sorted rows, and their scales.
    pub fn sorted(&self) -> (&Tensor<'static>, Option<&Tensor<'static>>) {
        (&self.rows, self.scales.as_deref())
    }

    /// Spoils the sorted rows.
    pub fn poison(&self, rig: &Rank) -> Result<()> {
        let (rows, scales) = self.sorted();
        let written = [Some(rows), scales].into_iter().flatten().filter(|tensor| tensor.rows() > 0);
        written.into_iter().try_for_each(|tensor| rig.poison(tensor))
    }
}

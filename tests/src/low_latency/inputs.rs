//! The tensors that a rank gives to a round's calls.

use half::bf16;

use epoxide::Result;
use epoxide::driver::Stream;
use epoxide::low_latency::{CombineRequest, DispatchRequest, Quantise, Received};
use epoxide::{DType, ExpertMap, Tensor, TypedTensor};
use epoxide_gpu::layout::row_stride;

use super::LowLatencyRank;
use super::case::{LowLatencyCase, ReturnPath, RowMemory, Segments};
use super::data::Data;
use super::segments::mark;
use crate::ids::{Ids, upload_narrow};
use crate::oracle::{by_expert as by_expert_plan, low_latency_plan};
use crate::payload::rounded_bytes;

/// The times of waiting in front of the first call, to which calls add.
const WAITED_BEFORE: i64 = 1 << 50;

/// A rank's inputs to one round's calls.
#[derive(Debug)]
pub struct LowLatencyInputs {
    x: Tensor<'static>,
    topk_idx: TypedTensor<'static, i64>,
    narrow_idx: Option<TypedTensor<'static, i32>>,
    map: Option<ExpertMap>,
    weights: Option<TypedTensor<'static, f32>>,
    pub(super) by_expert: Tensor<'static>,
    /// Rows of the pool lie [`row_stride`] bytes apart, and so do these for it.
    by_row: Tensor<'static>,
    segments: Option<Segments>,
    /// Memory for rows by expert and their scales or columns, where it is the caller's and not
    /// `by_expert`.
    recv_x: Option<Tensor<'static>>,
    recv_x_scales: Option<TypedTensor<'static, f32>>,
    recv_columns: Option<TypedTensor<'static, i32>>,
    /// Multiprocessors of the dispatch and of the combine, if not the buffer's.
    num_sms: [Option<u32>; 2],
    /// Times that the calls waited for each rank, if measured.
    waits: Option<TypedTensor<'static, i64>>,
}

/// The caller's memory for rows by expert.
#[derive(Debug, Clone, Copy)]
pub(super) struct Given<'a> {
    pub x: &'a Tensor<'static>,
    pub scales: Option<&'a TypedTensor<'static, f32>>,
    pub columns: Option<&'a TypedTensor<'static, i32>>,
}

impl LowLatencyInputs {
    pub(super) fn upload(
        case: &LowLatencyCase,
        data: &Data,
        rank: u32,
        stream: &Stream,
    ) -> Result<LowLatencyInputs> {
        let (routing, hidden, dtype) = (&case.routing, u64::from(case.hidden), case.combine_dtype);
        let tokens = u64::from(routing.num_tokens(rank));
        let x = data.x[rank as usize].concat();
        let entries = [tokens, routing.num_topk.into()];
        let weights = case
            .weighted
            .then(|| TypedTensor::from_host(stream, &entries, &data.weights[rank as usize].concat()))
            .transpose()?;
        let (plan, max_tokens) = (low_latency_plan(routing, rank), case.max_tokens);
        let rows = u64::from(routing.num_ranks() * max_tokens);
        let device = stream.device();
        let experts = u64::from(routing.local_experts());
        // Rows that are not there hold what they hold.
        let is_by_expert = case.combine_rows == ReturnPath::ByExpert;
        let (of_experts, of_rows) = if is_by_expert { (experts * rows, 1) } else { (1, rows) };
        let of_experts = case.room_by_expert().filter(|_| is_by_expert).unwrap_or(of_experts);
        let by_expert = Tensor::alloc(device, dtype, &[of_experts, hidden])?;
        // Padding must keep what it holds.
        let marked = |rows: u64, columns: u64, dtype: DType| {
            let tensor = Tensor::alloc(device, dtype, &[rows, columns])?;
            mark(stream, &tensor).map(|()| tensor)
        };
        let (mut recv_x, mut recv_x_scales, mut recv_columns) = (None, None, None);
        if let Some(room) = case.room_by_expert()
            && case.segments.is_some_and(|it| it.memory == RowMemory::Caller)
        {
            match case.quantise {
                Quantise::None if case.gathers => mark(stream, &by_expert)?,
                Quantise::None => recv_x = Some(marked(room, hidden, DType::Bf16)?),
                Quantise::Mxfp8 => {
                    recv_x = Some(marked(room, hidden, DType::Fp8E4m3)?);
                    recv_columns = Some(marked(hidden / 128, room, DType::I32)?.typed()?);
                }
                Quantise::Fp8 | Quantise::Fp8PowerOfTwo => {
                    recv_x = Some(marked(room, hidden, DType::Fp8E4m3)?);
                    recv_x_scales = Some(marked(hidden.div_ceil(128), room, DType::F32)?.typed()?);
                }
            }
        }
        let by_row = if case.combine_rows == ReturnPath::InPool {
            // Gaps, and rows that are not there, are copied with the others, and never read.
            let columns = row_stride(hidden * 2) / 2;
            let all = vec![bf16::NAN; (rows * columns) as usize];
            Tensor::from_host(stream, DType::Bf16, &[rows, columns], &all)?
        } else {
            Tensor::alloc(device, dtype, &[of_rows, hidden])?
        };
        let mut made = Vec::new();
        if case.gathers {
            // The copy is what fills them.
        } else if let Some(segments) = case.segments.filter(|_| is_by_expert) {
            let rows = by_expert_plan(routing, rank, segments.alignment).rows;
            for (row, (source, token, k)) in (0..).zip(rows).filter_map(|(row, of)| Some((row, of?))) {
                let id = routing.topk_idx[source as usize][token as usize][k as usize];
                made.push((row, data.output(case, id, source, token)));
            }
        } else if is_by_expert {
            for (expert, list) in (0..).zip(&plan.expert_rows) {
                let id = i64::from(rank * routing.local_experts()) + expert as i64;
                for (at, &(source, token)) in (0..).zip(list) {
                    made.push((expert * rows + at, data.output(case, id, source, token)));
                }
            }
        } else {
            for source in 0..routing.num_ranks() {
                for token in 0..routing.num_tokens(source) {
                    if let Some(share) = data.share(case, source, token, rank) {
                        made.push((u64::from(source * max_tokens + token), share));
                    }
                }
            }
        }
        write_rows(stream, if is_by_expert { &by_expert } else { &by_row }, &made)?;
        let narrow = |ids: &[Vec<i64>]| upload_narrow(stream, routing.num_topk, ids);
        let (narrow_idx, map) = match &case.ids {
            Ids::Wide => (None, None),
            Ids::Narrow => (Some(narrow(&routing.topk_idx[rank as usize])?), None),
            Ids::Placed(logical) => (Some(logical.upload(stream, rank)?), Some(logical.upload_map(stream)?)),
        };
        let ranks = u64::from(routing.num_ranks());
        let before = vec![WAITED_BEFORE; ranks as usize];
        Ok(LowLatencyInputs {
            x: Tensor::from_host(stream, DType::Bf16, &[tokens, hidden], &x)?,
            topk_idx: TypedTensor::from_host(stream, &entries, &routing.flat_topk_idx(rank))?,
            narrow_idx,
            map,
            weights,
            by_expert,
            by_row,
            segments: case.segments,
            recv_x,
            recv_x_scales,
            recv_columns,
            num_sms: case.num_sms(rank, data.seed),
            waits: case.measures.then(|| TypedTensor::from_host(stream, &[ranks], &before)).transpose()?,
        })
    }

    /// Combine request with its experts' outputs.
    pub fn experts(&self, case: &LowLatencyCase) -> CombineRequest<'_> {
        self.returning(case, &self.by_expert)
    }

    /// The same with other rows where they are by expert.
    pub(super) fn returning<'a>(
        &'a self,
        case: &LowLatencyCase,
        by_expert: &'a Tensor<'a>,
    ) -> CombineRequest<'a> {
        let request = match case.combine_rows {
            ReturnPath::ByExpert if case.segments.is_some_and(|it| it.unweighted) => {
                CombineRequest::by_expert(by_expert).unweighted()
            }
            ReturnPath::ByExpert => CombineRequest::by_expert(by_expert),
            ReturnPath::ByRow => CombineRequest::by_row(&self.by_row),
            ReturnPath::InPool => CombineRequest::in_pool(),
        };
        let request = self.waits.iter().fold(request, CombineRequest::cumulative_wait_ns);
        self.num_sms[1].into_iter().fold(request.quantise(case.quantise_back), CombineRequest::num_sms)
    }

    /// Checks the times that measured calls have added: none for the own rank, and for each other one
    /// less than 18 minutes.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(super) fn check_waits(&self, rank: &mut LowLatencyRank) -> Result<()> {
        let Some(waits) = &self.waits else { return Ok(()) };
        let own = rank.rank as usize;
        for (source, now) in waits.values(&rank.stream)?.into_iter().enumerate() {
            let waited = now - WAITED_BEFORE;
            let is_right = if source == own { waited == 0 } else { (0..1 << 40).contains(&waited) };
            rank.check(is_right, format!("waited {waited} ns for rank {source}"));
        }
        Ok(())
    }

    /// Stands in for experts that leave their rows in the pool.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn leave_rows(&self, received: &Received<'_>, stream: &Stream) -> Result<()> {
        let rows = received.combine_rows()?;
        // SAFETY: both have as many rows, so far apart, and outlive the stream's work.
        unsafe { stream.copy(rows.ptr(), self.by_row.ptr(), rows.rows() * rows.row_stride()) }
    }

    /// The caller's memory for rows by expert, if any.
    pub(super) fn given(&self) -> Option<Given<'_>> {
        let segments = self.segments?;
        let given = Given {
            x: self.recv_x.as_ref().unwrap_or(&self.by_expert),
            scales: self.recv_x_scales.as_ref(),
            columns: self.recv_columns.as_ref(),
        };
        (segments.memory == RowMemory::Caller).then_some(given)
    }

    /// Its rows.
    pub fn x(&self) -> &Tensor<'static> {
        &self.x
    }

    /// Its dispatch request.
    pub fn request(&self, quantise: Quantise) -> DispatchRequest<'_> {
        let request = match &self.narrow_idx {
            Some(narrow) => DispatchRequest::new(&self.x, narrow),
            None => DispatchRequest::new(&self.x, &self.topk_idx),
        };
        let request = self.num_sms[0].into_iter().fold(request, DispatchRequest::num_sms);
        let request = self.waits.iter().fold(request, DispatchRequest::cumulative_wait_ns);
        let request = self.map.iter().fold(request, DispatchRequest::map).quantise(quantise);
        let request = self.segments.iter().fold(request, |it, segments| it.by_expert(segments.alignment));
        let request = match self.given() {
            None => request,
            Some(Given { x, scales, columns }) => {
                let request = scales.into_iter().fold(request.recv_x(x), DispatchRequest::recv_x_scales);
                columns.into_iter().fold(request, DispatchRequest::recv_columns)
            }
        };
        match &self.weights {
            Some(weights) => request.topk_weights(weights),
            None => request,
        }
    }
}

/// Writes rows by their numbers, which ascend: at once those that lie next to each other. `tensor` is
/// contiguous, and its rows may have room behind the numbers.
fn write_rows(stream: &Stream, tensor: &Tensor<'_>, rows: &[(u64, Vec<f32>)]) -> Result<()> {
    let is_whole = |numbers: &[f32]| numbers.len() as u64 * tensor.dtype().size() == tensor.row_bytes();
    for run in rows.chunk_by(|(row, numbers), (next, _)| row + 1 == *next && is_whole(numbers)) {
        let bytes: Vec<u8> =
            run.iter().flat_map(|(_, numbers)| rounded_bytes(tensor.dtype(), numbers)).collect();
        let at = tensor.ptr().add(run[0].0 * tensor.row_bytes());
        // SAFETY: the rows are the tensor's, and no other code has the tensor yet.
        unsafe { stream.write(at, &bytes)? };
    }
    Ok(())
}

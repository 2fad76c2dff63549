//! Low-latency ranks whose rows are ones, and whose experts give rows of one number: sums are known
//! without the oracle.

use std::sync::Arc;
use std::time::Duration;

use half::bf16;

use epoxide::driver::{Device, Stream};
use epoxide::group::ProcessGroup;
use epoxide::low_latency::{
    Buffer, CombineRequest, Combined, Detached, DispatchRequest, Options, Place, Received, Shape,
};
use epoxide::throughput::Step;
use epoxide::{DType, Result, StreamOrder, Tensor, TypedTensor};
use epoxide_testing::harness::{keep, now};

/// A rank, and its inputs.
pub struct Ones {
    /// Its number.
    pub rank: u32,
    pub group: Arc<dyn ProcessGroup>,
    pub stream: Arc<Stream>,
    pub buffer: Buffer,
    pub x: Tensor<'static>,
    pub topk_idx: TypedTensor<'static, i64>,
    /// The experts' outputs; ones at first.
    pub experts: Tensor<'static>,
    pub shape: Shape,
}

/// A captured dispatch and combine.
pub type CapturedPair = Step<Detached<Combined<'static>>>;

impl Ones {
    /// Makes the buffer; `topk_idx` has the ids of all tokens. Collective.
    pub fn new(
        device: Device,
        group: Arc<dyn ProcessGroup>,
        shape: Shape,
        options: impl FnOnce(Options) -> Options,
        topk_idx: &[i64],
    ) -> Result<Ones> {
        let stream = Arc::new(Stream::new(&device)?);
        let buffer = Buffer::new(device, &*group, options(Options::new(shape)))?;
        let topk = u64::from(shape.num_topk);
        let tokens = topk_idx.len() as u64 / topk;
        let ones = |rows| rows_of(&stream, rows, shape.hidden, 1.0);
        Ok(Ones {
            rank: group.rank(),
            x: ones(tokens)?,
            topk_idx: TypedTensor::from_host(&stream, &[tokens, topk], topk_idx)?,
            experts: ones(buffer.rows())?,
            group,
            stream,
            buffer,
            shape,
        })
    }

    /// The time by which deadlines pass.
    pub fn now(&self) -> Duration {
        now(self.stream.device())
    }

    pub fn dispatch<'p>(&mut self, place: &'p mut Place) -> Result<Received<'p>> {
        let request = DispatchRequest::new(&self.x, &self.topk_idx);
        self.buffer.dispatch(place, request, StreamOrder::on(&self.stream))
    }

    pub fn combine<'p>(&mut self, received: Received<'p>) -> Result<Combined<'p>> {
        let rows = CombineRequest::by_row(&self.experts);
        self.buffer.combine(received, rows, StreamOrder::on(&self.stream))
    }

    /// Waits for the stream; the error that the device has recorded.
    pub fn outcome(&self) -> Result<()> {
        self.stream.synchronize()?;
        self.buffer.check()
    }

    /// A dispatch into `place` and the combine of the experts' rows, as a step.
    pub fn captured(&mut self, place: &mut Place) -> Result<CapturedPair> {
        let Ones { buffer, stream, x, topk_idx, experts, .. } = self;
        buffer.capture(stream, |buffer, order| {
            let received = buffer.dispatch(place, DispatchRequest::new(x, topk_idx), order)?;
            Ok(buffer.combine(received, CombineRequest::by_row(experts), order)?.detach())
        })
    }

    /// Other outputs of the experts.
    pub fn rows_of(&self, value: f32) -> Result<Tensor<'static>> {
        rows_of(&self.stream, self.buffer.rows(), self.shape.hidden, value)
    }

    /// Other rows of the tokens.
    pub fn tokens_of(&self, value: f32) -> Result<Tensor<'static>> {
        rows_of(&self.stream, self.x.rows(), self.shape.hidden, value)
    }

    /// Overwrites the experts' outputs.
    pub fn set_experts(&self, value: f32) -> Result<()> {
        self.experts.write(&self.stream, &numbers(self.experts.rows() * self.shape.hidden, value))
    }

    /// A token's sum: the experts' number from each rank that has one of its experts.
    pub fn sums(&self, value: f32) -> Result<Vec<bf16>> {
        let local_experts = i64::from(self.buffer.local_experts());
        let ids = self.topk_idx.values(&self.stream)?;
        let sums = ids.chunks(self.shape.num_topk as usize).flat_map(|ids| {
            let mut ranks: Vec<i64> =
                ids.iter().filter(|id| **id >= 0).map(|id| id / local_experts).collect();
            ranks.sort_unstable();
            ranks.dedup();
            numbers(self.shape.hidden, value * ranks.len() as f32)
        });
        Ok(sums.collect())
    }

    /// Sums as a kernel reads them, past the check of the tensor.
    pub fn kept(&self, sums: &Tensor<'_>) -> Result<Vec<bf16>> {
        keep(&self.stream, sums, sums.rows())?.to_host(&self.stream)
    }
}

pub fn numbers(count: u64, value: f32) -> Vec<bf16> {
    vec![bf16::from_f32(value); count as usize]
}

fn rows_of(stream: &Stream, rows: u64, hidden: u64, value: f32) -> Result<Tensor<'static>> {
    Tensor::from_host(stream, DType::Bf16, &[rows, hidden], &numbers(rows * hidden, value))
}

//! A dispatch and a combine of small, predetermined rows, without waits of the host.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use epoxide::Result;
use epoxide::driver::Stream;
use epoxide::throughput::{
    Buffer, CombineRequest, Combined, Counts, DispatchHandle, DispatchLayout, DispatchRequest, Place,
    Received,
};
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide_testing::oracle::{self, Plan, Routing, Style};
use epoxide_testing::payload;

use epoxide_testing::harness::{Rank, as_bytes};

pub const TOPK: u32 = 3;
pub const HIDDEN: usize = 24;
pub const ROW: u64 = 2 * HIDDEN as u64;

/// One dispatch and one combine of the received rows, with all expected results.
pub struct Turn {
    pub routing: Routing,
    pub plans: Vec<Plan>,
    /// `[rank][token]`.
    pub x: Vec<Vec<Vec<u8>>>,
    /// Result of combine if the experts return their rows unchanged, `[rank][token]`.
    pub sums: Vec<Vec<Vec<u8>>>,
}

impl Turn {
    /// `tokens` tokens per rank of small integers.
    pub fn random(seed: u64, tokens: &[u32], num_channels: u32) -> Turn {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let style = Style::ALL[seed as usize % 4];
        let ranks = tokens.len() as u32;
        let routing = Routing::random(&mut rng, tokens, TOPK, 2 * ranks, style);
        let plans: Vec<_> = (0..ranks).map(|rank| oracle::plan(&routing, rank, num_channels, 1)).collect();
        let x = payload::per_token(tokens, |_, _| payload::small_integers(&mut rng, HIDDEN));
        let returned: Vec<_> =
            plans.iter().map(|plan| payload::widen(&oracle::recv_rows(plan, &x))).collect();
        let sum = |rank| as_bytes(&payload::round(&oracle::combine_f32(&routing, rank, &returned, HIDDEN)));
        let sums = (0..ranks).map(sum).collect();
        Turn { x: x.iter().map(|rows| as_bytes(rows)).collect(), routing, plans, sums }
    }

    /// A rank's inputs, and place 0.
    pub fn begin(&self, rank: &Rank) -> Result<(Inputs, Place)> {
        Ok((Inputs::upload(self, rank)?, rank.place()?))
    }

    pub fn recv(&self, rank: u32) -> Vec<Vec<u8>> {
        oracle::recv_rows(&self.plans[rank as usize], &self.x)
    }
}

/// A turn's inputs on a rank's device.
pub struct Inputs {
    pub topk_idx: TypedTensor<'static, i64>,
    pub x: Tensor<'static>,
    num_experts: u32,
}

impl Inputs {
    pub fn upload(turn: &Turn, rank: &Rank) -> Result<Inputs> {
        let mine = rank.rank as usize;
        Ok(Inputs {
            topk_idx: rank.upload_typed(TOPK as usize, &turn.routing.topk_idx[mine])?,
            x: rank.upload_rows(DType::Bf16, HIDDEN as u64, &turn.x[mine])?,
            num_experts: turn.routing.num_experts,
        })
    }

    pub fn layout<'a>(&'a self, rank: &mut Rank) -> Result<DispatchLayout<'a>> {
        rank.layout(&self.topk_idx, self.num_experts)
    }

    /// A dispatch for whose counts the host does not wait.
    pub fn dispatch<'p>(&self, rank: &mut Rank, place: &'p mut Place) -> Result<Received<'p>> {
        let (layout, counts) = (self.layout(rank)?, rank.on_device());
        rank.dispatch(place, DispatchRequest::new(&self.x, &layout).counts(counts))
    }

    /// A dispatch for whose counts the host waits.
    pub fn dispatch_exact<'p>(&self, rank: &mut Rank, place: &'p mut Place) -> Result<Received<'p>> {
        let layout = self.layout(rank)?;
        rank.dispatch(place, DispatchRequest::new(&self.x, &layout))
    }

    pub fn layout_on<'a>(
        &'a self,
        buffer: &mut Buffer,
        order: StreamOrder<'_>,
    ) -> Result<DispatchLayout<'a>> {
        buffer.get_dispatch_layout(&self.topk_idx, self.num_experts, order)
    }
}

/// Dispatches, and returns the rows without a host wait: they are copied from the receive rows to
/// the combine rows on the device.
pub fn echo<'p>(rank: &mut Rank, place: &'p mut Place, inputs: &Inputs) -> Result<(Received<'p>, Combined)> {
    let stream = rank.stream.clone();
    let order = if rank.on_comm_stream { StreamOrder::comm(&stream) } else { StreamOrder::on(&stream) };
    echo_on(&mut rank.buffer, place, order, &stream, inputs)
}

/// The same in the order `order`, which is of `stream`.
pub fn echo_on<'p>(
    buffer: &mut Buffer,
    place: &'p mut Place,
    order: StreamOrder<'_>,
    stream: &Stream,
    inputs: &Inputs,
) -> Result<(Received<'p>, Combined)> {
    let layout = inputs.layout_on(buffer, order)?;
    let counts = Counts::OnDevice { capacity: buffer.capacity() };
    let output = buffer.dispatch(place, DispatchRequest::new(&inputs.x, &layout).counts(counts), order)?;
    let rows = output.combine_rows(DType::Bf16, HIDDEN as u64)?;
    let to = rows.tensor();
    // SAFETY: both are in the pool, which lives as long as the buffer.
    unsafe { stream.copy(to.ptr(), output.recv_x.ptr(), to.rows() * to.row_stride())? };
    let back = buffer.combine(CombineRequest::new(&rows, &output.handle), order)?;
    drop(rows);
    Ok((output, back))
}

/// A combine of the place's current rows, along a dispatch without counts on the host.
pub fn combine_in_pool(rank: &mut Rank, place: &Place, handle: &DispatchHandle) -> Result<Combined> {
    let rows = place.combine_rows(DType::Bf16, rank.buffer.capacity(), HIDDEN as u64)?;
    rank.combine(CombineRequest::new(&rows, handle))
}

/// Compares the first rows of a tensor.
pub fn check_rows(rank: &mut Rank, what: &str, rows: &Tensor<'_>, want: &[Vec<u8>]) -> Result<()> {
    let got = rank.row_bytes(rows)?;
    rank.equal(what, &got[..want.len().min(got.len())], want);
    Ok(())
}

/// Compares the sums of a turn.
pub fn check_sums(rank: &mut Rank, what: &str, back: &Combined, turn: &Turn) -> Result<()> {
    let got = rank.row_bytes(&back.combined_x)?;
    rank.equal(what, &got, &turn.sums[rank.rank as usize]);
    Ok(())
}

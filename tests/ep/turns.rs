//! A dispatch and a combine of small rows, known beforehand, that never make the host wait.

use rand::SeedableRng;
use rand::rngs::SmallRng;

use epoxide::Result;
use epoxide::ep::{CombineOutput, CombineRows, DType, DispatchOutput, DispatchRequest, Tensor};
use epoxide_testing::oracle::{self, Plan, Routing, Style};
use epoxide_testing::payload;

use epoxide_testing::harness::{Rank, as_bytes};

pub const TOPK: u32 = 3;
pub const HIDDEN: usize = 24;
pub const ROW: u64 = 2 * HIDDEN as u64;

/// One dispatch and one combine of the rows that came, with all that is known about them beforehand.
pub struct Turn {
    pub routing: Routing,
    pub plans: Vec<Plan>,
    /// `[rank][token]`.
    pub x: Vec<Vec<Vec<u8>>>,
    /// What combine gives where the experts hand their rows back unchanged, `[rank][token]`.
    pub sums: Vec<Vec<Vec<u8>>>,
}

impl Turn {
    /// `tokens` tokens per rank of small integers.
    pub fn random(seed: u64, tokens: &[u32], num_channels: u32) -> Turn {
        let mut rng = SmallRng::seed_from_u64(seed);
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

    pub fn recv(&self, rank: u32) -> Vec<Vec<u8>> {
        oracle::recv_rows(&self.plans[rank as usize], &self.x)
    }
}

/// A turn's inputs on a rank's device.
pub struct Inputs {
    pub topk_idx: Tensor,
    pub x: Tensor,
}

impl Inputs {
    pub fn upload(turn: &Turn, rank: &Rank) -> Result<Inputs> {
        let mine = rank.rank as usize;
        Ok(Inputs {
            topk_idx: rank.upload(DType::I64, TOPK as usize, &turn.routing.topk_idx[mine])?,
            x: rank.upload_rows(DType::Bf16, HIDDEN as u64, &turn.x[mine])?,
        })
    }
}

/// Sends, and hands the rows back without a host wait anywhere: the rows are copied from the receive rows to the combine
/// rows on the device.
pub fn echo(rank: &mut Rank, inputs: &Inputs, num_experts: u32) -> Result<(DispatchOutput, CombineOutput)> {
    let layout = rank.layout(&inputs.topk_idx, num_experts)?;
    let counts = rank.on_device();
    let output = rank.dispatch(DispatchRequest { counts, ..DispatchRequest::new(&inputs.x, &layout) })?;
    let rows = rank.buffer.combine_rows(DType::Bf16, rank.buffer.capacity(), HIDDEN as u64)?;
    // SAFETY: both are in the pool, which lives as long as the buffer.
    unsafe { rank.stream.copy(rows.ptr(), output.recv_x.ptr(), rows.rows() * rows.row_stride())? };
    let rows = CombineRows::InPool { dtype: DType::Bf16, hidden: HIDDEN as u64 };
    let back = rank.combine(rows, None, &output.handle)?;
    Ok((output, back))
}

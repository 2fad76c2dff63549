//! An MoE layer in candle's operations: dense, and with its experts spread over ranks.

use candle_core::{D, DType, Device, Result as Candle, Tensor};
use epoxide::group::ProcessGroup;
use epoxide::half::bf16;
use epoxide::low_latency::{Buffer, CombineRequest, DispatchRequest, Options, Place, Shape};
use epoxide::{Error, Result, StreamOrder, TypedTensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::adapter::{Adapter, candle};

/// Segments of rows by expert begin at multiples of so many rows.
const ALIGNMENT: u32 = 8;

/// The sizes of a layer.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub hidden: usize,
    pub intermediate: usize,
    pub num_experts: usize,
    pub num_topk: usize,
    /// Most tokens of a rank.
    pub max_tokens: usize,
}

/// An expert, SwiGLU: f32 `[hidden, 2 * intermediate]` and `[intermediate, hidden]`.
pub struct Expert {
    gate_up: Tensor,
    down: Tensor,
}

/// The experts of a layer, or those of one rank, and the router, f32 `[hidden, num_experts]`.
pub struct Weights {
    sizes: Sizes,
    router: Tensor,
    experts: Vec<Expert>,
}

/// The choice of a router: ids i64 `[tokens, num_topk]`, and weights f32 of the same shape.
struct Selected {
    topk_idx: Tensor,
    topk_weights: Tensor,
}

/// Random numbers `[rows, columns]`, f32, whose variance is 1 / `inputs`.
fn random(
    rng: &mut ChaCha8Rng,
    [rows, columns]: [usize; 2],
    inputs: usize,
    device: &Device,
) -> Candle<Tensor> {
    let bound = (3.0 / inputs as f32).sqrt();
    let values: Vec<f32> = (0..rows * columns).map(|_| rng.random_range(-bound..bound)).collect();
    Tensor::from_vec(values, (rows, columns), device)
}

/// The tokens of a rank, bf16 `[tokens, hidden]`.
pub fn tokens(sizes: &Sizes, rank: u32, count: usize, device: &Device) -> Candle<Tensor> {
    let mut rng = ChaCha8Rng::seed_from_u64(1000 + u64::from(rank));
    random(&mut rng, [count, sizes.hidden], 1, device)?.to_dtype(DType::BF16)
}

impl Expert {
    /// The expert's results for f32 `[rows, hidden]`.
    fn forward(&self, x: &Tensor) -> Candle<Tensor> {
        let both = x.matmul(&self.gate_up)?.chunk(2, 1)?;
        (both[0].silu()? * &both[1])?.matmul(&self.down)
    }
}

impl Weights {
    /// The same on every rank; keeps the experts `kept`.
    pub fn new(sizes: Sizes, kept: std::ops::Range<usize>, device: &Device) -> Candle<Weights> {
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let Sizes { hidden, intermediate, num_experts, .. } = sizes;
        let router = random(&mut rng, [hidden, num_experts], hidden, device)?;
        let mut experts = Vec::new();
        for expert in 0..num_experts {
            let gate_up = random(&mut rng, [hidden, 2 * intermediate], hidden, device)?;
            let down = random(&mut rng, [intermediate, hidden], intermediate, device)?;
            if kept.contains(&expert) {
                experts.push(Expert { gate_up, down });
            }
        }
        Ok(Weights { sizes, router, experts })
    }

    /// The experts with the largest logits, and their softmax among each other.
    fn select(&self, x: &Tensor) -> Candle<Selected> {
        let logits = x.to_dtype(DType::F32)?.matmul(&self.router)?;
        let topk_idx = logits.arg_sort_last_dim(false)?.narrow(1, 0, self.sizes.num_topk)?.contiguous()?;
        let chosen = logits.gather(&topk_idx, 1)?;
        let scores = chosen.broadcast_sub(&chosen.max_keepdim(D::Minus1)?)?.exp()?;
        let topk_weights = scores.broadcast_div(&scores.sum_keepdim(D::Minus1)?)?;
        Ok(Selected { topk_idx: topk_idx.to_dtype(DType::I64)?, topk_weights })
    }

    /// The layer without ranks, with all experts here: f32 `[tokens, hidden]`.
    pub fn dense(&self, x: &Tensor) -> Candle<Tensor> {
        let Selected { topk_idx, topk_weights } = self.select(x)?;
        let x = x.to_dtype(DType::F32)?;
        let mut out = x.zeros_like()?;
        for (expert, of_expert) in self.experts.iter().enumerate() {
            let chosen = topk_idx.eq(expert as i64)?.to_dtype(DType::F32)?;
            let weight = (&topk_weights * chosen)?.sum_keepdim(1)?;
            out = (out + of_expert.forward(&x)?.broadcast_mul(&weight)?)?;
        }
        Ok(out)
    }
}

/// A layer on one rank, with its share of the experts.
pub struct Layer {
    weights: Weights,
    buffer: Buffer,
    place: Place,
    /// Most rows that a dispatch brings, padding included.
    most_rows: u64,
}

impl Layer {
    /// Collective.
    pub fn new(sizes: Sizes, adapter: &impl Adapter, group: &dyn ProcessGroup) -> Result<Layer> {
        let (rank, ranks) = (group.rank() as usize, group.size() as usize);
        let local = sizes.num_experts / ranks;
        let kept = rank * local..(rank + 1) * local;
        let weights = Weights::new(sizes, kept, adapter.candle()).map_err(candle)?;
        let shape = Shape {
            max_tokens: sizes.max_tokens as u32,
            hidden: sizes.hidden as u64,
            num_topk: sizes.num_topk as u32,
            num_experts: sizes.num_experts as u32,
        };
        let most_rows = shape.most_rows_by_expert(group.size(), ALIGNMENT);
        let options = Options::new(shape).rows_by_expert(most_rows);
        let buffer = Buffer::new(adapter.stream().device().clone(), group, options)?;
        let place = buffer.place(0)?;
        Ok(Layer { weights, buffer, place, most_rows })
    }

    /// The layer's results, bf16 `[tokens, hidden]`, for `x` of the same shape. Collective.
    ///
    /// Rows land in a tensor of candle's, grouped by expert, and combine reads the experts' results
    /// from one. The host waits once, for the number of rows of each expert: shapes are on the host
    /// in candle.
    pub fn forward(&mut self, adapter: &impl Adapter, x: &Tensor) -> Result<Tensor> {
        let order = StreamOrder::on(adapter.stream());
        let (tokens, hidden) = x.dims2().map_err(candle)?;
        let rows = [self.most_rows, hidden as u64];
        let Selected { topk_idx, topk_weights } = self.weights.select(x).map_err(candle)?;
        let (buffer, place) = (&mut self.buffer, &mut self.place);

        let (recv_x, received) = adapter.input(x, |x: &TypedTensor<'_, bf16>| {
            adapter.input(&topk_idx, |ids: &TypedTensor<'_, i64>| {
                adapter.input(&topk_weights, |weights| {
                    adapter.output(rows, |recv_x: &TypedTensor<'_, bf16>| {
                        let request = DispatchRequest::new(x, ids).topk_weights(weights);
                        buffer.dispatch(place, request.by_expert(ALIGNMENT).recv_x(recv_x), order)
                    })
                })
            })
        })?;

        let Some(by_expert) = &received.by_expert else { return Err(Error::internal("dispatch", "no rows")) };
        let starts = by_expert.experts.starts().values(adapter.stream())?;
        let counts = by_expert.experts.counts().values(adapter.stream())?;
        let results = experts(&self.weights, &recv_x, &starts, &counts).map_err(candle)?;

        // Combine applies the weights that the dispatch was given.
        let sums = adapter.input(&results, |results: &TypedTensor<'_, bf16>| {
            adapter.output([tokens as u64, hidden as u64], |out: &TypedTensor<'_, bf16>| {
                let request = CombineRequest::by_expert(results);
                buffer.combine_into(received, request, out, order)
            })
        })?;
        Ok(sums.0)
    }
}

/// The experts' results for rows by expert, bf16 in the same order. Padding has zeros.
fn experts(weights: &Weights, recv_x: &Tensor, starts: &[i32], counts: &[i32]) -> Candle<Tensor> {
    let (rows, hidden) = recv_x.dims2()?;
    let (mut parts, mut made) = (Vec::new(), 0);
    // Rows without an expert up to this one, which may be none: candle has no empty tensor on GPUs.
    let pad = |parts: &mut Vec<Tensor>, made: usize, upto: usize| -> Candle<()> {
        if upto > made {
            parts.push(Tensor::zeros((upto - made, hidden), DType::BF16, recv_x.device())?);
        }
        Ok(())
    };
    for ((expert, start), count) in weights.experts.iter().zip(starts).zip(counts) {
        let (start, count) = (*start as usize, *count as usize);
        if count == 0 {
            continue;
        }
        pad(&mut parts, made, start)?;
        let of_expert = recv_x.narrow(0, start, count)?.to_dtype(DType::F32)?;
        parts.push(expert.forward(&of_expert)?.to_dtype(DType::BF16)?);
        made = start + count;
    }
    pad(&mut parts, made, rows)?;
    Tensor::cat(&parts, 0)
}

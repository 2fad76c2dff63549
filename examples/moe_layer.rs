//! A small Mixture-of-Experts layer on GPUs, real or virtual: router, dispatch, experts, combine.
//! All run on one stream of the layer. The host does not wait before the layer has ended. The
//! result is compared with a computation on the host that does not model ranks.
//!
//! ```text
//! cargo run --release --example moe_layer
//! cargo run --release --features cuda --example moe_layer -- --device cuda --ranks 2
//! ```
//!
//! Exit codes: 0 pass, 1 a check failed, 2 bad usage, 77 not enough GPUs.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::driver::{Device, Kernel, Stream};
use epoxide::group::run_threads;
use epoxide::throughput::{self, Buffer, CombineRequest, Counts, DispatchHandle, DispatchRequest, Place};
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide::{Error, Result};
use epoxide_gpu::kernels::{MoeExperts, MoeRouter};
use epoxide_gpu::layout::{MoeExpertsArgs, MoeRouterArgs};
use half::bf16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Tokens of each rank.
const TOKENS: usize = 64;
/// Elements of a token.
const HIDDEN: usize = 128;
/// Experts of all ranks.
const EXPERTS: usize = 16;
/// Experts that a token selects.
const TOPK: usize = 2;

/// Warps per block of the router: tokens at a time.
const ROUTER_WARPS: u32 = 4;

#[derive(Parser)]
struct Options {
    /// Which GPUs to use
    #[arg(long, value_enum, default_value = "virtual")]
    device: DeviceKind,

    /// Ranks, one GPU each: 1, 2, 4 or 8
    #[arg(long, default_value_t = 4, value_parser = ranks)]
    ranks: u32,
}

#[derive(Clone, Copy, ValueEnum)]
enum DeviceKind {
    Virtual,
    Cuda,
}

fn ranks(text: &str) -> Result<u32, &'static str> {
    text.parse().ok().filter(|ranks| [1, 2, 4, 8].contains(ranks)).ok_or("must be 1, 2, 4 or 8")
}

fn main() -> ExitCode {
    let options = Options::parse();
    let ended = run_threads(options.ranks, Duration::from_secs(60), |rank, group| {
        let device = open(options.device, rank)?;
        let stream = Stream::new(&device)?;
        let model = Model::new();
        let mut layer = Layer::new(&model, &device, &stream, |shape| {
            Buffer::new(device.clone(), &*group, throughput::Options::new(shape))
        })?;

        let x = tokens_of(rank);
        let x_on_device = Tensor::from_host(&stream, DType::Bf16, &[TOKENS as u64, HIDDEN as u64], &x)?;
        let output = layer.forward(&x_on_device, &stream)?;

        // All work is enqueued. The read is the first call that waits; errors of the operations
        // show after it.
        let got = output.combined.combined_x.to_host::<bf16>(&stream)?;
        let selected = layer.topk_idx.values(&stream)?;
        layer.buffer.check_dispatch(&output.handle, &stream)?;
        Ok(compare(&model, &x, &selected, &got))
    });
    let outcomes = match ended {
        Ok(outcomes) => outcomes,
        Err(failure) if matches!(failure.error, Error::Unavailable { .. }) => {
            eprintln!("skipped: {failure}");
            return ExitCode::from(77);
        }
        Err(failure) => {
            eprintln!("{failure}");
            return ExitCode::FAILURE;
        }
    };

    let mut passed = true;
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok((error, value)) => {
                println!("rank {rank}: {TOKENS} tokens, max|error|={error:.2e} max|value|={value:.2e}")
            }
            Err(difference) => {
                passed = false;
                println!("rank {rank}: {difference}");
            }
        }
    }
    println!("{}", if passed { "PASS" } else { "FAIL" });
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The layer on one rank, which holds the router and its share of the experts.
struct Layer {
    buffer: Buffer,
    place: Place,
    router: Kernel,
    experts: Kernel,
    router_weights: Tensor<'static>,
    expert_weights: Tensor<'static>,
    topk_idx: TypedTensor<'static, i64>,
    topk_weights: TypedTensor<'static, f32>,
}

/// The result of a pass of the layer.
struct Output {
    combined: throughput::Combined,
    handle: DispatchHandle,
}

impl Layer {
    /// Loads the kernels and this rank's weights. Collective, since `buffer` is.
    fn new(
        model: &Model,
        device: &Device,
        stream: &Stream,
        buffer: impl FnOnce(throughput::Shape) -> Result<Buffer>,
    ) -> Result<Layer> {
        let buffer = buffer(throughput::Shape {
            max_tokens: TOKENS as u32,
            hidden: HIDDEN as u64,
            dtype: DType::Bf16,
            max_topk: TOPK as u32,
            max_scales: 0,
        })?;
        let (hidden, local_experts) = (HIDDEN as u64, EXPERTS / buffer.num_ranks() as usize);
        let first = buffer.rank() as usize * local_experts;
        let own = &model.experts[first * HIDDEN * HIDDEN..(first + local_experts) * HIDDEN * HIDDEN];
        let shape = [local_experts as u64 * hidden, hidden];
        let topk_shape = [TOKENS as u64, TOPK as u64];
        Ok(Layer {
            router: Kernel::shipped::<MoeRouter>(device, 0)?,
            experts: Kernel::shipped::<MoeExperts>(device, 0)?,
            router_weights: Tensor::from_host(stream, DType::F32, &[hidden, EXPERTS as u64], &model.router)?,
            expert_weights: Tensor::from_host(stream, DType::Bf16, &shape, own)?,
            topk_idx: Tensor::alloc(device, DType::I64, &topk_shape)?.typed()?,
            topk_weights: Tensor::alloc(device, DType::F32, &topk_shape)?.typed()?,
            place: buffer.place(0)?,
            buffer,
        })
    }

    /// Enqueues one pass over `x`, bf16 `[TOKENS, HIDDEN]`, on `stream`, and waits for nothing.
    /// Collective.
    fn forward(&mut self, x: &Tensor, stream: &Stream) -> Result<Output> {
        let router = MoeRouter::call(MoeRouterArgs {
            x: x.ptr(),
            w: self.router_weights.ptr(),
            topk_idx: self.topk_idx.ptr(),
            topk_weights: self.topk_weights.ptr(),
            num_tokens: TOKENS as u32,
            hidden: HIDDEN as u32,
            num_experts: EXPERTS as u32,
            num_topk: TOPK as u32,
        });
        let blocks = (TOKENS as u32).div_ceil(ROUTER_WARPS);
        // SAFETY: the tensors have the shapes of the argument struct, and their memory is reused
        // only behind the work enqueued on the stream.
        unsafe { stream.call(&self.router, blocks, ROUTER_WARPS * 32, 0, router)? };

        let order = StreamOrder::on(stream);
        let layout = self.buffer.get_dispatch_layout(&self.topk_idx, EXPERTS as u32, order)?;
        // How many rows come stays on the device.
        let counts = Counts::OnDevice { capacity: self.buffer.capacity() };
        let request = DispatchRequest::new(x, &layout).topk_weights(&self.topk_weights).counts(counts);
        let received = self.buffer.dispatch(&mut self.place, request, order)?;
        let (Some(local_idx), Some(weights)) = (&received.recv_topk_idx, &received.recv_topk_weights) else {
            unreachable!("top-k was sent");
        };

        // The experts write where the peers gather from, so combine has nothing to copy.
        let rows = received.combine_rows(DType::Bf16, HIDDEN as u64)?;
        let experts = MoeExperts::call(MoeExpertsArgs {
            x: received.recv_x.ptr(),
            topk_idx: local_idx.ptr(),
            topk_weights: weights.ptr(),
            num_rows: received.handle.num_recv_tokens_on_device().ptr(),
            w: self.expert_weights.ptr(),
            out: rows.tensor().ptr(),
            capacity: self.buffer.capacity() as u32,
            hidden: HIDDEN as u32,
            local_experts: EXPERTS as u32 / self.buffer.num_ranks(),
            num_topk: TOPK as u32,
        });
        let (blocks, threads) = (self.buffer.device().info().sm_count, HIDDEN as u32 / 2);
        // SAFETY: all rows lie in the place, with room for `capacity` of them, and the count in the
        // handle. The place is overwritten, and the handle's memory is reused, only behind the work
        // enqueued on the stream.
        unsafe { stream.call(&self.experts, blocks, threads, 0, experts)? };

        let combined = self.buffer.combine(CombineRequest::new(&rows, &received.handle), order)?;
        Ok(Output { combined, handle: received.handle.clone() })
    }
}

/// The weights of the whole layer, the same on every rank.
struct Model {
    /// `[HIDDEN, EXPERTS]`.
    router: Vec<f32>,
    /// `[EXPERTS, HIDDEN, HIDDEN]`.
    experts: Vec<bf16>,
}

impl Model {
    fn new() -> Model {
        let mut rng = ChaCha8Rng::seed_from_u64(0x0e);
        let scale = 1.0 / (HIDDEN as f32).sqrt();
        let mut weight = || rng.random_range(-1.0f32..1.0) * scale;
        Model {
            router: (0..HIDDEN * EXPERTS).map(|_| weight()).collect(),
            experts: (0..EXPERTS * HIDDEN * HIDDEN).map(|_| bf16::from_f32(weight())).collect(),
        }
    }

    /// The experts of a token, best first, and their logits. They are computed in FP32 and in the
    /// order that the router's documentation promises. Ties and near ties are decided as on the
    /// device.
    fn select(&self, x: &[bf16]) -> Vec<(usize, f32)> {
        let logit = |expert: usize| {
            let products = x.iter().enumerate().map(|(i, x)| x.to_f32() * self.router[i * EXPERTS + expert]);
            (expert, products.fold(0.0, |sum, product| sum + product))
        };
        let mut logits: Vec<_> = (0..EXPERTS).map(logit).collect();
        // Stable, so the lowest expert stays first among equals.
        logits.sort_by(|a, b| b.1.total_cmp(&a.1));
        logits.truncate(TOPK);
        logits
    }

    /// The layer's result for a token, in FP64. Each element also has the sum of its terms'
    /// magnitudes, expert by expert and product by product. These sums bound the rounding errors.
    fn forward(&self, x: &[bf16], selected: &[(usize, f32)]) -> Vec<Element> {
        let powers: Vec<f64> =
            selected.iter().map(|(_, logit)| f64::from(logit - selected[0].1).exp()).collect();
        let sum: f64 = powers.iter().sum();
        let mut out = vec![Element::default(); HIDDEN];
        for ((expert, _), power) in selected.iter().zip(powers) {
            let w = &self.experts[expert * HIDDEN * HIDDEN..(expert + 1) * HIDDEN * HIDDEN];
            for (column, out) in out.iter_mut().enumerate() {
                let products =
                    x.iter().enumerate().map(|(i, x)| x.to_f64() * w[i * HIDDEN + column].to_f64());
                let (value, magnitude) = products.fold((0.0, 0.0), |(v, m), p| (v + p, m + p.abs()));
                let weight = power / sum;
                out.value += weight * value;
                out.experts += weight * f64::abs(value);
                out.products += weight * magnitude;
            }
        }
        out
    }
}

#[derive(Clone, Copy, Default)]
struct Element {
    value: f64,
    experts: f64,
    products: f64,
}

impl Element {
    /// How far the device may be off. Each rank rounds its part to BF16 (8 bits: half a unit is
    /// 2^-8 of the value), and combine rounds their sum once more. These are two roundings of
    /// values that are at most `experts` together. All else is FP32 (24 bits): a product, sums over
    /// HIDDEN and over the experts, and a softmax of a few operations and `ex2.approx`. Together
    /// these are fewer than HIDDEN + 32 roundings of values that are at most `products`.
    fn tolerance(&self) -> f64 {
        let bf16_unit = 2f64.powi(-8);
        2.0 * bf16_unit * (1.0 + bf16_unit) * self.experts
            + (HIDDEN + 32) as f64 * 2f64.powi(-24) * self.products
    }
}

/// This rank's tokens, `[TOKENS, HIDDEN]`.
fn tokens_of(rank: u32) -> Vec<bf16> {
    let mut rng = ChaCha8Rng::seed_from_u64(100 + u64::from(rank));
    (0..TOKENS * HIDDEN).map(|_| bf16::from_f32(rng.random_range(-1.0..1.0))).collect()
}

/// Compares one rank's result with the dense computation. Gives the largest error and the largest
/// value, or the first element that is wrong.
fn compare(model: &Model, x: &[bf16], topk_idx: &[i64], got: &[bf16]) -> Result<(f64, f64), String> {
    let mut largest = (0.0f64, 0.0f64);
    let tokens = x.chunks(HIDDEN).zip(topk_idx.chunks(TOPK)).zip(got.chunks(HIDDEN));
    for (token, ((x, topk_idx), got)) in tokens.enumerate() {
        let selected = model.select(x);
        let expected: Vec<_> = selected.iter().map(|&(expert, _)| expert as i64).collect();
        if topk_idx != expected {
            return Err(format!("token {token} selected experts {topk_idx:?}, expected {expected:?}"));
        }
        for (column, (got, expected)) in got.iter().zip(model.forward(x, &selected)).enumerate() {
            let error = (got.to_f64() - expected.value).abs();
            // Written so that not-a-number is wrong.
            let right = error <= expected.tolerance();
            if !right {
                return Err(format!("token {token}, column {column}: {got}, expected {}", expected.value));
            }
            largest = (largest.0.max(error), largest.1.max(expected.value.abs()));
        }
    }
    Ok(largest)
}

/// The GPU of a rank.
fn open(kind: DeviceKind, rank: u32) -> Result<Device> {
    match kind {
        DeviceKind::Virtual => Ok(VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() })),
        #[cfg(feature = "cuda")]
        DeviceKind::Cuda => epoxide::driver::cuda::CudaDevice::open(rank),
        #[cfg(not(feature = "cuda"))]
        DeviceKind::Cuda => Err(Error::Unavailable {
            what: "CUDA".into(),
            reason: "this example was built without it; add --features cuda".into(),
        }),
    }
}

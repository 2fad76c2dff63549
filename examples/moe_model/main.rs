//! A Mixture-of-Experts model, expert-parallel: a training step, and decode steps from captured
//! graphs. Results and gradients are compared with a dense computation on the host.
//!
//! ```text
//! cargo run --release --example moe_model
//! cargo run --release --example moe_model -- --shape 3584/16/896 --ranks 4
//! cargo run --release --features cuda --example moe_model -- --device cuda --gemm cublas --factor 8
//! ```
//!
//! | file | holds |
//! |---|---|
//! | `main.rs` | ranks, their buffers, the training step, the decode steps, and the comparison |
//! | `layer.rs` | a layer: router, dispatch, experts, combine, and their backward |
//! | `gemm.rs`, `cublas.rs` | products of rows by expert with the experts' matrices |
//! | `model.rs`, `dense.rs` | shapes and weights; the same layer without ranks |
//!
//! Exit codes: 0 pass, 1 a check or a call failed, 2 bad usage, 77 not enough GPUs or no cuBLAS.

#[cfg(feature = "cuda")]
mod cublas;
mod dense;
mod gemm;
mod layer;
mod model;

use std::process::ExitCode;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use clap::{Parser, ValueEnum};
use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::driver::{Device, Stream};
use epoxide::group::{ProcessGroup, run_threads};
use epoxide::{DType, Element, Error, Result, Tensor};
use epoxide::{low_latency, throughput};
use half::bf16;

use dense::Dense;
use gemm::{Gemm, RustGemm};
use layer::{Compute, Forward, GradExperts, Layer};
use model::{Matrices, Shape, rows_of};

/// Layers of the model.
const LAYERS: usize = 2;

/// Tokens of a rank in a decode step, each number with a graph of its own.
const BUCKETS: [usize; 9] = [1, 2, 4, 8, 16, 32, 48, 64, 96];

/// The largest error that a result may have, as part of its largest element. BF16 rounds by 2^-9 of
/// a number. A layer rounds six times from its input to its output, and as often on the way back,
/// and SwiGLU multiplies two rounded numbers.
const TOLERANCE: f64 = 0.05;

/// How much logits may be off, whose variance is about 1.
const LOGIT_TOLERANCE: f64 = 0.1;

#[derive(Parser, Clone)]
struct Options {
    /// Which GPUs to use
    #[arg(long, value_enum, default_value = "virtual")]
    device: DeviceKind,

    /// Ranks, one GPU each
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,

    /// Hidden size, top-k and experts of the model
    #[arg(long, default_value = "7168/8/256", value_parser = Shape::NAMES)]
    shape: String,

    /// Divides hidden sizes
    #[arg(long, default_value_t = 64, value_parser = positive())]
    factor: usize,

    /// Divides the number of experts
    #[arg(long, default_value_t = 8, value_parser = positive())]
    expert_factor: usize,

    /// Tokens of each rank in the training step
    #[arg(long, default_value_t = 12, value_parser = positive())]
    tokens: usize,

    /// Tokens of each rank in the decode steps
    #[arg(long, value_delimiter = ',', default_values_t = BUCKETS, value_parser = positive())]
    buckets: Vec<usize>,

    /// The library or kernel that multiplies matrices
    #[arg(long, value_enum, default_value = "rust")]
    gemm: GemmKind,
}

/// A number from 1 on, which fits into the library's 32 bits.
fn positive() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=u64::from(u32::MAX))
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum DeviceKind {
    Virtual,
    Cuda,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum GemmKind {
    Rust,
    Cublas,
}

fn main() -> ExitCode {
    let options = Options::parse();
    if (options.device, options.gemm) == (DeviceKind::Virtual, GemmKind::Cublas) {
        eprintln!("--gemm cublas needs --device cuda: a virtual GPU has no cuBLAS");
        return ExitCode::from(2);
    }
    let shape = Shape::named(&options.shape, options.factor, options.expert_factor);
    let shape =
        match shape.ok_or("unknown").and_then(|shape| shape.check(options.ranks as usize).map(|()| shape)) {
            Ok(shape) => shape,
            Err(rule) => {
                eprintln!("--shape {} with these factors on {} ranks: {rule}", options.shape, options.ranks);
                return ExitCode::from(2);
            }
        };
    match run(&options, &shape) {
        Ok(lines) => {
            lines.iter().for_each(|line| println!("{line}"));
            println!("PASS");
            ExitCode::SUCCESS
        }
        Err(Failure::Unavailable(text)) => {
            eprintln!("skipped: {text}");
            ExitCode::from(77)
        }
        Err(Failure::Wrong(text)) => {
            eprintln!("{text}");
            println!("FAIL");
            ExitCode::FAILURE
        }
    }
}

enum Failure {
    Unavailable(String),
    Wrong(String),
}

/// Runs the ranks and compares what they found. Gives a line for each comparison.
fn run(options: &Options, shape: &Shape) -> Result<Vec<String>, Failure> {
    let matrices: Vec<_> = (0..LAYERS).map(|layer| Matrices::random(shape, layer)).collect();
    let batch = |rank| Batch {
        x: rows_of(shape, rank, options.tokens, 0),
        grad: rows_of(shape, rank, options.tokens, 1),
    };
    let batches: Vec<Batch> = (0..options.ranks).map(batch).collect();
    let (trained, decoded): (Vec<_>, Vec<_>) = on_ranks(options, &matrices, shape, options.ranks, |rank| {
        Ok((train(&rank, &batches[rank.group.rank() as usize])?, decode(&rank, &options.buckets)?))
    })?
    .into_iter()
    .unzip();
    // The same tokens, and all experts, on one device.
    let all = Batch {
        x: batches.iter().flat_map(|batch| batch.x.clone()).collect(),
        grad: batches.iter().flat_map(|batch| batch.grad.clone()).collect(),
    };
    let alone = on_ranks(options, &matrices, shape, 1, |rank| train(&rank, &all))?;

    let dense: Vec<_> = matrices.iter().map(|matrices| Dense::new(shape, matrices)).collect();
    let compared = compare_alone(options.gemm, &trained, &alone[0]).and_then(|line| {
        let mut lines = vec![line];
        lines.extend(compare_training(&dense, &trained)?);
        lines.extend(compare_decoding(&dense, &decoded.concat(), shape)?);
        Ok(lines)
    });
    compared.map_err(Failure::Wrong)
}

/// A rank, and its part of the model.
struct Rank<'a> {
    shape: &'a Shape,
    group: &'a dyn ProcessGroup,
    compute: Compute<'a>,
    layers: Vec<Layer>,
}

/// Runs `main` on ranks that are threads, each with a device of its own.
fn on_ranks<T: Send>(
    options: &Options,
    matrices: &[Matrices<bf16>],
    shape: &Shape,
    ranks: u32,
    main: impl Fn(Rank<'_>) -> Result<T> + Sync,
) -> Result<Vec<T>, Failure> {
    let ended = run_threads(ranks, Duration::from_secs(300), |rank, group| {
        let device = open(options.device, rank)?;
        let stream = Stream::new(&device)?;
        let gemm = open_gemm(options.gemm, &stream)?;
        let layer = |matrices| Layer::new(&stream, shape, matrices, rank, group.size());
        let layers = matrices.iter().map(layer).collect::<Result<Vec<_>>>()?;
        main(Rank { shape, group: &*group, compute: Compute::new(&stream, &*gemm)?, layers })
    });
    ended.map_err(|failure| match failure.error {
        Error::Unavailable { .. } => Failure::Unavailable(failure.to_string()),
        _ => Failure::Wrong(failure.to_string()),
    })
}

/// Tokens of a training step, and the gradients of what the model makes of them; both
/// `[tokens, hidden]`.
struct Batch {
    x: Vec<bf16>,
    grad: Vec<bf16>,
}

/// A rank's tokens, and the results that it read back.
#[derive(Clone)]
struct Outputs {
    x: Vec<f64>,
    /// By layer.
    topk_idx: Vec<Vec<i64>>,
    out: Vec<f64>,
}

/// A training step of a rank.
struct Trained {
    outputs: Outputs,
    grad: Vec<f64>,
    grad_x: Vec<f64>,
    /// By layer: gradients of the router, of this rank's experts and of the shared one, each one
    /// after the other.
    grads: Vec<[Vec<f64>; 5]>,
}

/// The indices of this rank's experts' gradients among those of a layer.
const OF_EXPERTS: std::ops::Range<usize> = 1..3;

/// A forward pass through all layers and its backward, in high throughput.
fn train(rank: &Rank, batch: &Batch) -> Result<Trained> {
    let Rank { shape, group, compute, layers } = rank;
    let (stream, ranks) = (compute.stream, group.size());
    let tokens = (batch.x.len() / shape.hidden) as u64;
    let of_buffer = throughput::Shape {
        max_tokens: tokens as u32,
        hidden: shape.hidden as u64,
        dtype: DType::Bf16,
        max_topk: shape.num_topk as u32,
        max_scales: 0,
    };
    // Rows of each layer stay in a place until its backward; one more place has the gradients.
    let rows = of_buffer.most_rows_by_expert(ranks, shape.num_experts as u32 / ranks, 1);
    let buffer_options = throughput::Options::new(of_buffer).rows_by_expert(rows).places(LAYERS as u32 + 1);
    let mut buffer = throughput::Buffer::new(stream.device().clone(), *group, buffer_options)?;
    let places = (0..=LAYERS as u32).map(|index| buffer.place(index)).collect::<Result<Vec<_>>>();
    let mut places = places?;
    let Some((of_grads, places)) = places.split_last_mut() else { unreachable!("there is one more") };

    let dims = [tokens, shape.hidden as u64];
    let mut passes: Vec<Forward> = Vec::new();
    for (layer, place) in layers.iter().zip(places) {
        let x = match passes.last() {
            None => Tensor::from_host(stream, DType::Bf16, &dims, &batch.x)?,
            Some(before) => before.out.clone(),
        };
        passes.push(layer.forward(compute, &mut buffer, place, x)?);
    }
    let mut grad_x = Tensor::from_host(stream, DType::Bf16, &dims, &batch.grad)?;
    let mut grads = Vec::new();
    for (layer, pass) in layers.iter().zip(&passes).rev() {
        let backward = layer.backward(compute, &mut buffer, of_grads, pass, &grad_x)?;
        grad_x = backward.x;
        let [experts, shared] =
            [backward.experts, backward.shared].map(|GradExperts { gate_up, down }| [gate_up, down]);
        let tensors = [backward.router].into_iter().chain(experts).chain(shared);
        let values = tensors.map(|tensor| read::<f32>(&tensor, stream)).collect::<Result<Vec<_>>>()?;
        grads.push(values.try_into().expect("five tensors"));
    }
    grads.reverse();
    let ids = |pass: &Forward| pass.routed.topk_idx.values(stream);
    let outputs = Outputs {
        x: batch.x.iter().map(|value| value.to_f64()).collect(),
        topk_idx: passes.iter().map(ids).collect::<Result<_>>()?,
        out: read::<bf16>(&passes[LAYERS - 1].out, stream)?,
    };
    let grad = batch.grad.iter().map(|value| value.to_f64()).collect();
    Ok(Trained { outputs, grad, grad_x: read::<bf16>(&grad_x, stream)?, grads })
}

/// Decode steps of each number of tokens, captured once and launched with two batches, in low
/// latency.
fn decode(rank: &Rank, buckets: &[usize]) -> Result<Vec<Outputs>> {
    let Rank { shape, group, compute, layers } = rank;
    let stream = compute.stream;
    let of_buffer = low_latency::Shape {
        max_tokens: buckets.iter().copied().max().unwrap_or(1) as u32,
        hidden: shape.hidden as u64,
        num_topk: shape.num_topk as u32,
        num_experts: shape.num_experts as u32,
    };
    let buffer_options = low_latency::Options::new(of_buffer);
    let mut buffer = low_latency::Buffer::new(stream.device().clone(), *group, buffer_options)?;
    let mut place = buffer.place(0)?;
    let mut outputs = Vec::new();
    for &tokens in buckets {
        // Memory that the graph keeps, since its kernels have the addresses.
        let first = rows_of(shape, group.rank(), tokens, 2);
        let x = Tensor::from_host(stream, DType::Bf16, &[tokens as u64, shape.hidden as u64], &first)?;
        let room = |layer: &Layer| layer.room(compute, &buffer, tokens as u64);
        let rooms = layers.iter().map(room).collect::<Result<Vec<_>>>()?;
        let step = buffer.capture(stream, |buffer, _| {
            let mut x = &x;
            for (layer, room) in layers.iter().zip(&rooms) {
                layer.decode(compute, buffer, &mut place, x, room)?;
                x = &room.out;
            }
            Ok(())
        })?;
        for seed in [3, 4] {
            let values = rows_of(shape, group.rank(), tokens, seed);
            x.write(stream, &values)?;
            step.launch(stream)?;
            let ids = |room: &layer::Room| room.routed.topk_idx.values(stream);
            outputs.push(Outputs {
                x: values.iter().map(|value| value.to_f64()).collect(),
                topk_idx: rooms.iter().map(ids).collect::<Result<_>>()?,
                out: read::<bf16>(&rooms[LAYERS - 1].out, stream)?,
            });
            step.check(stream)?;
        }
    }
    Ok(outputs)
}

fn read<T: Element + Into<f64>>(tensor: &Tensor, stream: &Stream) -> Result<Vec<f64>> {
    Ok(tensor.to_host::<T>(stream)?.into_iter().map(Into::into).collect())
}

/// Passes of all layers over the same tokens, dense.
fn forward(dense: &[Dense], outputs: &Outputs) -> Result<Vec<dense::Forward>, String> {
    let mut passes: Vec<dense::Forward> = Vec::new();
    for (layer, ids) in dense.iter().zip(&outputs.topk_idx) {
        let x = passes.last().map_or_else(|| outputs.x.clone(), |before| before.out.clone());
        passes.push(layer.forward(x, ids, LOGIT_TOLERANCE)?);
    }
    Ok(passes)
}

/// Compares the training step with that of all tokens on one rank. A sum has the order of a token's
/// experts, or of an expert's rows, on any number of ranks. So the bits are the same, unless cuBLAS
/// multiplies: its order depends on the number of rows.
fn compare_alone(gemm: GemmKind, ranks: &[Trained], alone: &Trained) -> Result<String, String> {
    let all = |of: fn(&Trained) -> &Vec<f64>| ranks.iter().flat_map(of).copied().collect::<Vec<_>>();
    let mut pairs = vec![
        ("output", all(|rank| &rank.outputs.out), &alone.outputs.out),
        ("gradient of x", all(|rank| &rank.grad_x), &alone.grad_x),
    ];
    for (layer, grads) in alone.grads.iter().enumerate() {
        for index in OF_EXPERTS {
            let parts = ranks.iter().flat_map(|rank| rank.grads[layer][index].clone());
            pairs.push(("gradient of the experts", parts.collect(), &grads[index]));
        }
    }
    for (name, got, want) in &pairs {
        let name = format!("training on one rank: {name}");
        match gemm {
            GemmKind::Rust if got != *want => return Err(format!("{name}: other bits")),
            GemmKind::Rust => {}
            GemmKind::Cublas => drop(compare(&name, got, want)?),
        }
    }
    Ok(format!("training on {} ranks and on one: the same results", ranks.len()))
}

/// Compares the training step with that of all tokens on one device.
fn compare_training(dense: &[Dense], ranks: &[Trained]) -> Result<Vec<String>, String> {
    let all = |of: fn(&Trained) -> &Vec<f64>| ranks.iter().flat_map(of).copied().collect::<Vec<_>>();
    let ids = |layer: usize| ranks.iter().flat_map(|rank| rank.outputs.topk_idx[layer].clone()).collect();
    let outputs = Outputs {
        x: all(|rank| &rank.outputs.x),
        topk_idx: (0..LAYERS).map(ids).collect(),
        out: all(|rank| &rank.outputs.out),
    };
    let passes = forward(dense, &outputs)?;
    let mut lines = vec![compare("training: output", &outputs.out, &passes[LAYERS - 1].out)?];
    let mut grad = all(|rank| &rank.grad);
    for layer in (0..LAYERS).rev() {
        let backward = dense[layer].backward(&passes[layer], &grad);
        let matrices = backward.matrices;
        let of_experts = |of: fn(&model::Expert<f64>) -> &Vec<f64>| -> Vec<f64> {
            matrices.experts.iter().flat_map(of).copied().collect()
        };
        let wants = [
            ("router", matrices.router.clone()),
            ("experts' gate and up", of_experts(|expert| &expert.gate_up)),
            ("experts' down", of_experts(|expert| &expert.down)),
            ("shared gate and up", matrices.shared.gate_up.clone()),
            ("shared down", matrices.shared.down.clone()),
        ];
        for (index, (name, want)) in wants.iter().enumerate() {
            let mut parts = ranks.iter().map(|rank| rank.grads[layer][index].clone());
            // Experts are on one rank each. The others' gradients are summed over the ranks.
            let got = if OF_EXPERTS.contains(&index) {
                parts.flatten().collect()
            } else {
                let sum = |mut sum: Vec<f64>, part: Vec<f64>| {
                    sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
                    sum
                };
                let first = parts.next().unwrap_or_default();
                parts.fold(first, sum)
            };
            lines.push(compare(&format!("training: gradient of layer {layer}, {name}"), &got, want)?);
        }
        grad = backward.x;
    }
    lines.push(compare("training: gradient of x", &all(|rank| &rank.grad_x), &grad)?);
    Ok(lines)
}

fn compare_decoding(dense: &[Dense], steps: &[Outputs], shape: &Shape) -> Result<Vec<String>, String> {
    let compared = steps.iter().map(|outputs| {
        let name = format!("decoding: {} tokens", outputs.x.len() / shape.hidden);
        let passes = forward(dense, outputs).map_err(|text| format!("{name}: {text}"))?;
        compare(&name, &outputs.out, &passes[LAYERS - 1].out)
    });
    compared.collect()
}

/// A line about the largest error.
fn compare(name: &str, got: &[f64], want: &[f64]) -> Result<String, String> {
    if got.len() != want.len() {
        return Err(format!("{name}: {} elements, expected {}", got.len(), want.len()));
    }
    let largest = want.iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
    let mut worst = 0.0f64;
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        // All may be zeros.
        let error = if got == want { 0.0 } else { (got - want).abs() / largest };
        // Written so that not-a-number is wrong.
        let is_right = error <= TOLERANCE;
        if !is_right {
            return Err(format!("{name}: element {at} is {got}, expected {want}; the largest is {largest}"));
        }
        worst = worst.max(error);
    }
    Ok(format!("{name}: {} elements, error {worst:.1e} of {largest:.3}", got.len()))
}

/// The GPU of a rank.
fn open(kind: DeviceKind, rank: u32) -> Result<Device> {
    match kind {
        DeviceKind::Virtual => Ok(VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() })),
        #[cfg(feature = "cuda")]
        DeviceKind::Cuda => epoxide::driver::cuda::CudaDevice::open(rank),
        #[cfg(not(feature = "cuda"))]
        DeviceKind::Cuda => Err(without_cuda("CUDA")),
    }
}

fn open_gemm(kind: GemmKind, stream: &Stream) -> Result<Box<dyn Gemm>> {
    match kind {
        GemmKind::Rust => Ok(Box::new(RustGemm::new(stream.device())?)),
        #[cfg(feature = "cuda")]
        GemmKind::Cublas => Ok(Box::new(cublas::CublasGemm::new(stream)?)),
        #[cfg(not(feature = "cuda"))]
        GemmKind::Cublas => Err(without_cuda("cuBLAS")),
    }
}

#[cfg(not(feature = "cuda"))]
fn without_cuda(what: &str) -> Error {
    let reason = "this example was built without it; add --features cuda".into();
    Error::Unavailable { what: what.into(), reason }
}

#[cfg(test)]
mod tests {
    use epoxide_testing::tier;

    use super::*;

    #[test]
    fn zero_is_no_number_of_tokens_and_no_factor() {
        for flag in ["--tokens", "--buckets", "--factor", "--expert-factor"] {
            let parse = |value: &str| Options::try_parse_from(["moe_model", flag, value]);
            assert!(parse("1").is_ok() && parse("0").is_err() && parse("4294967296").is_err(), "{flag}");
        }
    }

    #[test]
    fn zeros_are_equal_and_not_a_number_is_wrong() {
        assert_eq!(
            compare("zeros", &[0.0; 2], &[0.0; 2]).unwrap(),
            "zeros: 2 elements, error 0.0e0 of 0.000"
        );
        for wrong in [1e-9, f64::NAN] {
            assert!(compare("zeros", &[0.0, wrong], &[0.0; 2]).is_err());
        }
        assert!(compare("one", &[0.9], &[1.0]).is_err() && compare("one", &[0.99], &[1.0]).is_ok());
    }

    #[test]
    fn every_shape_is_the_dense_model() {
        for name in tier::sample(Shape::NAMES) {
            let buckets = tier::pick("1,4", "1,2,8,32,96");
            let options =
                Options::parse_from(["moe_model", "--shape", name, "--tokens", "3", "--buckets", buckets]);
            let shape = Shape::named(name, options.factor, options.expert_factor).expect("it has a name");
            if let Err(Failure::Unavailable(text) | Failure::Wrong(text)) = run(&options, &shape) {
                panic!("{name}: {text}");
            }
        }
    }
}

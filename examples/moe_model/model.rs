//! The model's sizes and its weights, which every rank makes of the same seed.

use half::bf16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// How a router weighs the experts that it selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scores {
    /// The softmax over the selected logits.
    Softmax,
    /// The sigmoids of the selected logits, divided by their sum.
    Sigmoid,
}

/// The sizes of a layer.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub hidden: usize,
    /// Elements between an expert's two projections.
    pub intermediate: usize,
    pub num_experts: usize,
    pub num_topk: usize,
    pub scores: Scores,
}

impl Shape {
    /// Names of the shapes that models in use have: hidden, top-k, experts.
    pub const NAMES: [&'static str; 4] = ["7168/8/256", "4096/6/256", "7168/6/384", "3584/16/896"];

    /// A shape by its name. Hidden sizes are divided by `factor`, the number of experts by
    /// `expert_factor`.
    pub fn named(name: &str, factor: usize, expert_factor: usize) -> Option<Shape> {
        let (hidden, intermediate, num_experts, num_topk, scores) = match name {
            "7168/8/256" => (7168, 2048, 256, 8, Scores::Sigmoid),
            "4096/6/256" => (4096, 2048, 256, 6, Scores::Sigmoid),
            "7168/6/384" => (7168, 3072, 384, 6, Scores::Softmax),
            "3584/16/896" => (3584, 1024, 896, 16, Scores::Softmax),
            _ => return None,
        };
        Some(Shape {
            hidden: hidden / factor,
            intermediate: intermediate / factor,
            num_experts: num_experts / expert_factor,
            num_topk,
            scores,
        })
    }

    /// The rule that the shape breaks on so many ranks, if any.
    pub fn check(&self, ranks: usize) -> Result<(), &'static str> {
        let rules = [
            (self.hidden > 0 && self.hidden.is_multiple_of(8), "the hidden size must be a multiple of 8"),
            (
                self.intermediate > 0 && self.intermediate.is_multiple_of(8),
                "and so must that between projections",
            ),
            (self.num_experts.is_multiple_of(2 * ranks), "experts must be a multiple of twice the ranks"),
            (self.num_experts >= self.num_topk, "there must be as many experts as a token selects"),
        ];
        rules.into_iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, rule)| Err(rule))
    }
}

/// An expert's matrices: SwiGLU between two projections.
#[derive(Clone)]
pub struct Expert<T> {
    /// `[hidden, 2 * intermediate]`: the gate's columns, then the others.
    pub gate_up: Vec<T>,
    /// `[intermediate, hidden]`.
    pub down: Vec<T>,
}

/// The matrices of a layer, or their gradients.
#[derive(Clone)]
pub struct Matrices<T> {
    /// `[hidden, num_experts]`.
    pub router: Vec<T>,
    /// The experts that tokens are routed to.
    pub experts: Vec<Expert<T>>,
    /// The expert of every token, which every rank has.
    pub shared: Expert<T>,
}

impl Matrices<bf16> {
    /// Weights of layer `layer`.
    pub fn random(shape: &Shape, layer: usize) -> Matrices<bf16> {
        let mut rng = ChaCha8Rng::seed_from_u64(layer as u64);
        let mut matrix = |rows: usize, columns: usize| -> Vec<bf16> {
            // Products of rows of variance 1 have the variance 1.
            let scale = (3.0 / rows as f32).sqrt();
            (0..rows * columns).map(|_| bf16::from_f32(rng.random_range(-scale..scale))).collect()
        };
        let Shape { hidden, intermediate, .. } = *shape;
        let mut expert =
            || Expert { gate_up: matrix(hidden, 2 * intermediate), down: matrix(intermediate, hidden) };
        let shared = expert();
        let experts = (0..shape.num_experts).map(|_| expert()).collect();
        Matrices { router: matrix(hidden, shape.num_experts), experts, shared }
    }
}

/// Rows of this rank, `[tokens, hidden]`: tokens, or gradients of what the model makes of them.
pub fn rows_of(shape: &Shape, rank: u32, tokens: usize, seed: u64) -> Vec<bf16> {
    let mut rng = ChaCha8Rng::seed_from_u64(1000 * (seed + 1) + u64::from(rank));
    (0..tokens * shape.hidden).map(|_| bf16::from_f32(rng.random_range(-1.7f32..1.7))).collect()
}

//! The same layer without ranks, in FP64 on the host: what all experts together make of all tokens.

use half::bf16;

use crate::model::{Expert, Matrices, Scores, Shape};

/// A layer's weights, widened.
pub struct Dense {
    shape: Shape,
    matrices: Matrices<f64>,
}

/// A pass of a layer.
pub struct Forward {
    x: Vec<f64>,
    /// By token: the selected experts and their scores.
    selected: Vec<Vec<(usize, f64)>>,
    /// `[tokens, hidden]`.
    pub out: Vec<f64>,
}

/// The gradients of a layer.
pub struct Backward {
    /// `[tokens, hidden]`.
    pub x: Vec<f64>,
    pub matrices: Matrices<f64>,
}

fn widen(values: &[bf16]) -> Vec<f64> {
    values.iter().map(|value| value.to_f64()).collect()
}

/// `row * matrix`, `matrix` `[row, columns]`.
fn times(row: &[f64], matrix: &[f64], columns: usize) -> Vec<f64> {
    let mut out = vec![0.0; columns];
    for (value, weights) in row.iter().zip(matrix.chunks(columns)) {
        out.iter_mut().zip(weights).for_each(|(out, weight)| *out += value * weight);
    }
    out
}

/// `matrix * row`, `matrix` `[.., row]`.
fn times_transposed(row: &[f64], matrix: &[f64]) -> Vec<f64> {
    matrix.chunks(row.len()).map(|weights| inner_product(row, weights)).collect()
}

fn inner_product(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f64], values: &[f64], factor: f64) {
    to.iter_mut().zip(values).for_each(|(to, value)| *to += factor * value);
}

/// Adds the outer product of two rows to a matrix.
fn add_outer(matrix: &mut [f64], a: &[f64], b: &[f64]) {
    matrix.chunks_mut(b.len()).zip(a).for_each(|(row, &a)| add(row, b, a));
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

impl Expert<f64> {
    fn widened(of: &Expert<bf16>) -> Expert<f64> {
        Expert { gate_up: widen(&of.gate_up), down: widen(&of.down) }
    }

    fn zeros(shape: &Shape) -> Expert<f64> {
        let count = shape.hidden * shape.intermediate;
        Expert { gate_up: vec![0.0; 2 * count], down: vec![0.0; count] }
    }

    /// Gate, the other half, and their product.
    fn activations(&self, x: &[f64]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let intermediate = self.down.len() / x.len();
        let mut gate = times(x, &self.gate_up, 2 * intermediate);
        let up = gate.split_off(intermediate);
        let product = gate.iter().zip(&up).map(|(gate, up)| gate * sigmoid(*gate) * up).collect();
        (gate, up, product)
    }

    fn forward(&self, x: &[f64]) -> Vec<f64> {
        times(&self.activations(x).2, &self.down, x.len())
    }

    /// Adds to the gradients of the matrices; gives that of `x`.
    fn backward(&self, x: &[f64], grad: &[f64], grads: &mut Expert<f64>) -> Vec<f64> {
        let (gate, up, product) = self.activations(x);
        add_outer(&mut grads.down, &product, grad);
        let of_product = times_transposed(grad, &self.down);
        let of_gate = |((gate, up), grad): ((&f64, &f64), &f64)| {
            let s = sigmoid(*gate);
            grad * up * (s + gate * s * (1.0 - s))
        };
        let mut both: Vec<f64> = gate.iter().zip(&up).zip(&of_product).map(of_gate).collect();
        both.extend(gate.iter().zip(&of_product).map(|(gate, grad)| grad * gate * sigmoid(*gate)));
        add_outer(&mut grads.gate_up, x, &both);
        times_transposed(&both, &self.gate_up)
    }
}

impl Dense {
    pub fn new(shape: &Shape, matrices: &Matrices<bf16>) -> Dense {
        let matrices = Matrices {
            router: widen(&matrices.router),
            experts: matrices.experts.iter().map(Expert::widened).collect(),
            shared: Expert::widened(&matrices.shared),
        };
        Dense { shape: *shape, matrices }
    }

    /// The experts that the device has selected, and their scores, not divided by the sum. They
    /// must be among the best ones; two logits that differ by less than `tolerance` may have either
    /// order.
    fn select(&self, x: &[f64], ids: &[i64], tolerance: f64) -> Result<Vec<(usize, f64)>, String> {
        let logits = times(x, &self.matrices.router, self.shape.num_experts);
        let mut sorted = logits.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let least = sorted[ids.len() - 1] - tolerance;
        let mut selected = Vec::new();
        for &id in ids {
            let known = usize::try_from(id).ok().filter(|id| *id < logits.len());
            let is_new = known.filter(|id| selected.iter().all(|(other, _)| other != id));
            let Some(id) = is_new.filter(|id| logits[*id] >= least) else {
                return Err(format!("{ids:?} were selected, which are not the largest logits"));
            };
            let score = match self.shape.scores {
                Scores::Softmax => (logits[id] - sorted[0]).exp(),
                Scores::Sigmoid => sigmoid(logits[id]),
            };
            selected.push((id, score));
        }
        Ok(selected)
    }

    /// A pass over `x`, `[tokens, hidden]`, whose tokens go to `ids`, `[tokens, num_topk]`.
    ///
    /// # Errors
    /// `ids` are not the experts with the largest logits.
    pub fn forward(&self, x: Vec<f64>, ids: &[i64], tolerance: f64) -> Result<Forward, String> {
        let (mut out, mut selected) = (Vec::with_capacity(x.len()), Vec::new());
        for (token, (x, ids)) in x.chunks(self.shape.hidden).zip(ids.chunks(self.shape.num_topk)).enumerate()
        {
            let of_token = self.select(x, ids, tolerance).map_err(|text| format!("token {token}: {text}"))?;
            let sum: f64 = of_token.iter().map(|(_, score)| score).sum();
            let mut row = self.matrices.shared.forward(x);
            for (expert, score) in &of_token {
                add(&mut row, &self.matrices.experts[*expert].forward(x), score / sum);
            }
            out.extend(row);
            selected.push(of_token);
        }
        Ok(Forward { x, selected, out })
    }

    /// The gradients for `grad`, `[tokens, hidden]`.
    pub fn backward(&self, pass: &Forward, grad: &[f64]) -> Backward {
        let Shape { hidden, num_experts, .. } = self.shape;
        let mut grads = Matrices {
            router: vec![0.0; hidden * num_experts],
            experts: vec![Expert::zeros(&self.shape); num_experts],
            shared: Expert::zeros(&self.shape),
        };
        let mut grad_x = Vec::with_capacity(grad.len());
        let tokens = pass.x.chunks(hidden).zip(&pass.selected).zip(grad.chunks(hidden));
        for ((x, selected), grad) in tokens {
            let sum: f64 = selected.iter().map(|(_, score)| score).sum();
            let mut row = self.matrices.shared.backward(x, grad, &mut grads.shared);
            let mut of_weights = Vec::new();
            for (expert, score) in selected {
                let weighted: Vec<f64> = grad.iter().map(|grad| grad * score / sum).collect();
                let matrices = &self.matrices.experts[*expert];
                add(&mut row, &matrices.backward(x, &weighted, &mut grads.experts[*expert]), 1.0);
                of_weights.push(inner_product(grad, &matrices.forward(x)));
            }
            let mean: f64 =
                selected.iter().zip(&of_weights).map(|((_, score), grad)| score / sum * grad).sum();
            let mut of_logits = vec![0.0; num_experts];
            for ((expert, score), grad) in selected.iter().zip(of_weights) {
                let of_score = match self.shape.scores {
                    Scores::Softmax => *score,
                    Scores::Sigmoid => score * (1.0 - score),
                };
                of_logits[*expert] = of_score / sum * (grad - mean);
            }
            add_outer(&mut grads.router, x, &of_logits);
            add(&mut row, &times_transposed(&of_logits, &self.matrices.router), 1.0);
            grad_x.extend(row);
        }
        Backward { x: grad_x, matrices: grads }
    }
}

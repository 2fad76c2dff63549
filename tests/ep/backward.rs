//! Gradients along the handle of a forward pass.
//!
//! All numbers are small and whole, so that every sum is exact: gradients are compared bit for bit
//! with the serial answer, and both sides of `<A x, y> = <x, A^T y>` are the same number.

use std::ops::RangeInclusive;

use half::bf16;
use proptest::prelude::*;

use epoxide::Result;
use epoxide::throughput::{CombineRequest, Counts, DispatchRequest, Place, Received};
use epoxide::transport::TransportKind;
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide_testing::harness::{NodeLinks, Rank, Setup, rank_counts};
use epoxide_testing::oracle::{self, Routing, Style};
use epoxide_testing::payload::{bytes_of, mix, rng_of};
use epoxide_testing::tier;

use crate::property::config;
use crate::valid::refused;

/// Elements of a row.
const HIDDEN: usize = 16;

/// A whole number from -2 to 2.
fn small(numbers: &[u64]) -> f32 {
    (mix(numbers) % 5) as f32 - 2.0
}

fn row(what: u64, rank: u32, token: u32, k: u32) -> Vec<f32> {
    let number = |column| small(&[what, rank.into(), token.into(), k.into(), column]);
    (0..HIDDEN as u64).map(number).collect()
}

/// The expert's result for entry `k` of a token.
fn made(rank: u32, token: u32, k: u32) -> Vec<f32> {
    row(1, rank, token, k)
}

/// The gradient of a token's sum.
fn grad_of(rank: u32, token: u32) -> Vec<f32> {
    row(2, rank, token, 0)
}

fn x_of(rank: u32, token: u32) -> Vec<f32> {
    row(3, rank, token, 0)
}

fn weight(rank: u32, token: u32, k: u32) -> f32 {
    small(&[4, rank.into(), token.into(), k.into()])
}

fn inner_product(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn bytes(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F32 => bytes_of(values),
        _ => bytes_of(&values.iter().map(|&value| bf16::from_f32(value)).collect::<Vec<_>>()),
    }
}

/// A routing, and the order of its received rows.
#[derive(Debug, Clone)]
struct Pass {
    routing: Routing,
    dtype: DType,
    /// The alignment of rows by expert.
    by_expert: Option<u32>,
    counts: Option<Counts>,
}

/// The row of a selection: source rank, token and entry; without one, of a token by rank.
type Source = Option<(u32, u32, Option<u32>)>;

impl Pass {
    fn setup(&self, nodes: Option<NodeLinks>) -> Setup {
        let (ranks, tokens) = (self.routing.num_ranks(), self.routing.max_tokens());
        let mut setup = Setup::new(ranks, 2, tokens.max(1), 4 * 32).max_topk(32).nodes(nodes);
        setup.fields().places = 2;
        let most = |rank| oracle::by_expert(&self.routing, rank, self.by_expert.unwrap_or(1)).rows.len();
        setup.fields().rows_by_expert =
            self.by_expert.map(|_| (0..ranks).map(most).max().unwrap_or(0) as u64);
        setup
    }

    /// The sources of this rank's received rows; `None` in padding.
    fn sources(&self, rank: u32) -> Vec<Source> {
        match self.by_expert {
            None => oracle::recv_order(&self.routing, rank)
                .into_iter()
                .map(|(source, token)| Some((source, token, None)))
                .collect(),
            Some(alignment) => oracle::by_expert(&self.routing, rank, alignment)
                .rows
                .into_iter()
                .map(|row| row.map(|(source, token, k)| (source, token, Some(k))))
                .collect(),
        }
    }

    /// The entries of a received row that this rank's experts have.
    fn entries(&self, rank: u32, (source, token, k): (u32, u32, Option<u32>)) -> Vec<u32> {
        let ids = &self.routing.topk_idx[source as usize][token as usize];
        let is_here = |k: &u32| self.routing.owner(ids[*k as usize]) == Some(rank);
        (0..self.routing.num_topk).filter(|entry| k.is_none_or(|k| k == *entry)).filter(is_here).collect()
    }

    fn tokens(&self, rank: u32) -> std::ops::Range<u32> {
        0..self.routing.num_tokens(rank)
    }

    fn own(&self, rank: &Rank, of: impl Fn(u32, u32) -> Vec<f32>) -> Result<Tensor<'static>> {
        let rows: Vec<_> =
            self.tokens(rank.rank).map(|token| bytes(self.dtype, &of(rank.rank, token))).collect();
        rank.upload_rows(self.dtype, HIDDEN as u64, &rows)
    }

    fn values(&self, rank: &Rank, tensor: &Tensor) -> Result<Vec<f32>> {
        Ok(match tensor.dtype() {
            DType::F32 => rank.values(tensor)?,
            _ => rank.values::<bf16>(tensor)?.iter().map(|value| value.to_f32()).collect(),
        })
    }

    fn dispatch<'p>(&self, rank: &mut Rank, place: &'p mut Place) -> Result<Received<'p>> {
        let ids =
            rank.upload_typed(self.routing.num_topk as usize, &self.routing.topk_idx[rank.rank as usize])?;
        let x = self.own(rank, x_of)?;
        let weights = self.weights(rank.rank);
        let weights = rank.upload_typed(self.routing.num_topk as usize, &weights)?;
        let layout = rank.layout(&ids, self.routing.num_experts)?;
        let request = DispatchRequest::new(&x, &layout).topk_weights(&weights);
        let request = self.by_expert.into_iter().fold(request, DispatchRequest::by_expert);
        rank.dispatch(place, self.counts.into_iter().fold(request, DispatchRequest::counts))
    }

    fn weights(&self, rank: u32) -> Vec<Vec<f32>> {
        let of = |token| (0..self.routing.num_topk).map(|k| weight(rank, token, k)).collect();
        self.tokens(rank).map(of).collect()
    }

    /// Runs it, and compares each gradient with the serial answer. Gives this rank's parts of both
    /// sides of three identities.
    fn check(&self, rank: &mut Rank) -> Result<[[f64; 2]; 3]> {
        let own = rank.rank;
        let stream = rank.stream.clone();
        let order = StreamOrder::on(&stream);
        let (mut first, mut second) = (rank.place()?, rank.buffer.place(1)?);
        let received = self.dispatch(rank, &mut first)?;
        let sources = self.sources(own);
        let capacity = received.recv_x.rows() as usize;

        // The experts' results, and their sums by row. Padding and other entries are no numbers.
        let nothing = vec![f32::NAN; HIDDEN];
        let per_row = if self.by_expert.is_some() { 1 } else { self.routing.num_topk as usize };
        let mut of_experts = vec![nothing.clone(); capacity * per_row];
        let mut sums = vec![nothing.clone(); capacity];
        for (at, source) in sources.iter().enumerate() {
            let Some((from, token, _)) = *source else { continue };
            sums[at] = vec![0.0; HIDDEN];
            for k in self.entries(own, source.expect("it has one")) {
                let made = made(from, token, k);
                let weight = if self.by_expert.is_some() { 1.0 } else { weight(from, token, k) };
                sums[at].iter_mut().zip(&made).for_each(|(sum, made)| *sum += weight * made);
                of_experts[at * per_row + if per_row == 1 { 0 } else { k as usize }] = made;
            }
        }
        let upload = |rows: &[Vec<f32>]| {
            let rows: Vec<_> = rows.iter().map(|row| bytes(self.dtype, row)).collect();
            rank.upload_rows(self.dtype, HIDDEN as u64, &rows)
        };
        let (expert_rows, rows) = (upload(&of_experts)?, upload(&sums)?);

        // Gradients of rows.
        let grad = self.own(rank, grad_of)?;
        let grads = rank.buffer.combine_backward(&mut second, &grad, &received.handle, order)?;
        let grad_rows = self.values(rank, &grads.recv_x)?;
        let came = self.values(rank, &received.recv_x)?;
        for (at, source) in sources.iter().enumerate() {
            let Some((from, token, _)) = *source else { continue };
            let (got, want) = (&grad_rows[at * HIDDEN..][..HIDDEN], grad_of(from, token));
            rank.equal(&format!("gradient of row {at}"), got, &want);
        }
        // Gradients of tokens.
        let grad_x = rank.buffer.dispatch_backward(&rows, &received.handle, order)?.combined_x;
        let grad_x = self.values(rank, &grad_x)?;
        // Gradients of weights.
        let grad_weights =
            rank.buffer.weights_backward(&received, &grads.recv_x, &expert_rows, order)?.grad_topk_weights;
        rank.check(
            grad_weights.shape()
                == [u64::from(self.routing.num_tokens(own)), u64::from(self.routing.num_topk)],
            "a gradient for each weight",
        );
        let grad_weights = grad_weights.values(&stream)?;
        let weights = self.weights(own);
        for token in self.tokens(own) {
            let ids = &self.routing.topk_idx[own as usize][token as usize];
            let product = |k: u32| match ids[k as usize] {
                -1 => 0.0,
                _ => inner_product(&grad_of(own, token), &made(own, token, k)) as f32,
            };
            let want: Vec<f32> = (0..self.routing.num_topk).map(product).collect();
            let topk = self.routing.num_topk as usize;
            rank.equal(
                &format!("weights of token {token}"),
                &grad_weights[token as usize * topk..][..topk],
                &want,
            );
        }
        // The weighted sums, which experts make by row or the combine by entry.
        let device_weights = rank.upload_typed(self.routing.num_topk as usize, &weights)?;
        let request = CombineRequest::new(&rows, &received.handle);
        let request = match self.by_expert {
            Some(_) => request.weights(&device_weights),
            None => request,
        };
        let out = rank.combine(request)?.combined_x;
        let out = self.values(rank, &out)?;

        let of_rows = |values: &[f32], others: &[Vec<f32>]| -> f64 {
            let is_row = |(at, _): &(usize, &Source)| sources[*at].is_some();
            let rows = sources.iter().enumerate().filter(is_row);
            rows.map(|(at, _)| inner_product(&values[at * HIDDEN..][..HIDDEN], &others[at])).sum()
        };
        let flat = |of: fn(u32, u32) -> Vec<f32>| -> Vec<f32> {
            self.tokens(own).flat_map(|token| of(own, token)).collect()
        };
        let selected = self.routing.topk_idx[own as usize].iter().flatten().map(|id| *id >= 0);
        let weighted = weights
            .concat()
            .iter()
            .zip(selected)
            .map(|(w, is)| if is { *w } else { 0.0 })
            .collect::<Vec<_>>();
        let unweighted = rank.buffer.dispatch_backward(&rows, &received.handle, order)?.combined_x;
        let unweighted = self.values(rank, &unweighted)?;
        Ok([
            // The dispatch of x against rows, x against its backward.
            [of_rows(&came, &sums), inner_product(&flat(x_of), &grad_x)],
            // The combine of rows against a gradient, rows against its backward.
            [inner_product(&unweighted, &flat(grad_of)), of_rows(&grad_rows, &sums)],
            // The weighted sums against a gradient, weights against theirs.
            [inner_product(&out, &flat(grad_of)), inner_product(&weighted, &grad_weights)],
        ])
    }

    fn run(&self, nodes: Option<NodeLinks>) {
        let parts = self.setup(nodes).run(|rank| self.check(rank));
        for (identity, name) in ["dispatch", "combine", "weights"].into_iter().enumerate() {
            let side = |side: usize| parts.iter().map(|of_rank| of_rank[identity][side]).sum::<f64>();
            assert_eq!(side(0), side(1), "{name}: <A x, y> = <x, A^T y> in {self:?}");
        }
    }
}

fn pass(tokens: &[u32], topk: u32, local_experts: u32, style: Style, seed: u64) -> Pass {
    let experts = local_experts * tokens.len() as u32;
    let routing = Routing::random(&mut rng_of(&[seed]), tokens, topk, experts, style);
    Pass { routing, dtype: DType::Bf16, by_expert: None, counts: None }
}

fn passes(ranks: RangeInclusive<usize>) -> impl Strategy<Value = Pass> {
    let tokens = prop_oneof![1 => Just(0u32), 3 => 0..=12u32];
    let style = prop::sample::select(Style::ALL.to_vec());
    let tokens = prop::collection::vec(tokens, rank_counts(ranks));
    (tokens, 1..=9u32, 1..=4u32, style, any::<u64>())
        .prop_map(|(tokens, topk, experts, style, seed)| pass(&tokens, topk, experts, style, seed))
}

proptest! {
    #![proptest_config(config(64))]

    #[test]
    fn by_token_backward_is_the_transpose(given in passes(1..=9), is_f32 in any::<bool>()) {
        let dtype = if is_f32 { DType::F32 } else { DType::Bf16 };
        Pass { dtype, ..given }.run(None);
    }

    #[test]
    fn by_expert_backward_is_the_transpose(
        given in passes(1..=9), is_f32 in any::<bool>(), alignment in 0..=4u32,
    ) {
        let dtype = if is_f32 { DType::F32 } else { DType::Bf16 };
        Pass { dtype, by_expert: Some(1 << alignment), ..given }.run(None);
    }

    #[test]
    fn across_nodes_backward_is_the_transpose(given in passes(4..=4)) {
        given.run(Some(NodeLinks { ranks_per_node: 2, transport: TransportKind::Direct, queues: 1 }));
    }
}

#[test]
fn counts_may_stay_on_the_device() {
    let given = pass(&[5, 0, 7], 4, 2, Style::Repeats, 3);
    for by_expert in [None, Some(4)] {
        let mut given = Pass { by_expert, ..given.clone() };
        let capacity = given.setup(None).run(|rank| Ok(rank.buffer.capacity()))[0];
        given.counts = Some(Counts::OnDevice { capacity });
        given.run(None);
    }
}

/// Experts that are no linear maps: `y[c] = (e + 1) * x[c] * x[c + 1]`.
fn expert(id: i64, x: &[f32]) -> Vec<f32> {
    (0..x.len()).map(|c| (id + 1) as f32 * x[c] * x[(c + 1) % x.len()]).collect()
}

/// The gradient of `x` for the gradient `dy` of the expert's output.
fn expert_backward(id: i64, x: &[f32], dy: &[f32]) -> Vec<f32> {
    let n = x.len();
    let of = |c: usize| dy[c] * x[(c + 1) % n] + dy[(c + n - 1) % n] * x[(c + n - 1) % n];
    (0..n).map(|c| (id + 1) as f32 * of(c)).collect()
}

/// Central differences of a loss `<out, grad>` that is of second degree in x are its derivative,
/// without an error: the layer's gradients are those numbers.
#[test]
fn a_layer_has_the_gradients_of_finite_differences() {
    let mut given = pass(&[3, 0, 4], 3, 2, Style::Repeats, 9);
    given.dtype = DType::F32;
    given.by_expert = Some(4);
    let topk = given.routing.num_topk as usize;
    given.setup(None).run(|rank| {
        let (own, stream) = (rank.rank, rank.stream.clone());
        let order = StreamOrder::on(&stream);
        let tokens = given.routing.num_tokens(own) as usize;
        let ids = rank.upload_typed(topk, &given.routing.topk_idx[own as usize])?;
        let grad = given.own(rank, grad_of)?;
        let first_expert = i64::from(own * given.routing.local_experts());
        let plan = oracle::by_expert(&given.routing, own, 4);
        let expert_of_row = |row: usize| {
            first_expert + plan.starts.iter().skip(1).filter(|end| **end as usize <= row).count() as i64
        };
        let (mut first, mut second) = (rank.place()?, rank.buffer.place(1)?);

        // The layer: its rows, what the experts make of them, and the sums.
        let mut forward = |rank: &mut Rank,
                           x: &[Vec<f32>],
                           weights: &[Vec<f32>],
                           backward: bool|
         -> Result<(Vec<f32>, Vec<f32>, Vec<f32>)> {
            let rows: Vec<_> = x.iter().map(|row| bytes_of(row)).collect();
            let x = rank.upload_rows(DType::F32, HIDDEN as u64, &rows)?;
            let weights = rank.upload_typed(topk, weights)?;
            let layout = rank.layout(&ids, given.routing.num_experts)?;
            let request = DispatchRequest::new(&x, &layout).topk_weights(&weights).by_expert(4);
            let received = rank.dispatch(&mut first, request)?;
            let rows: Vec<f32> = rank.values(&received.recv_x)?;
            let of_experts = |(row, x): (usize, &[f32])| bytes_of(&expert(expert_of_row(row), x));
            let made: Vec<_> = rows.chunks(HIDDEN).enumerate().map(of_experts).collect();
            let made = rank.upload_rows(DType::F32, HIDDEN as u64, &made)?;
            let out = rank.combine(CombineRequest::new(&made, &received.handle).weights(&weights))?;
            let out = rank.values(&out.combined_x)?;
            if !backward {
                return Ok((out, vec![], vec![]));
            }
            let grads = rank.buffer.combine_backward(&mut second, &grad, &received.handle, order)?;
            let grad_weights = rank.buffer.weights_backward(&received, &grads.recv_x, &made, order)?;
            let of_rows = received.recv_topk_weights.as_ref().expect("weights were sent").values(&stream)?;
            let grad_rows: Vec<f32> = rank.values(&grads.recv_x)?;
            let of_experts = |(row, (x, dy)): (usize, (&[f32], &[f32]))| {
                let dy: Vec<f32> = dy.iter().map(|dy| of_rows[row] * dy).collect();
                bytes_of(&expert_backward(expert_of_row(row), x, &dy))
            };
            let rows = rows.chunks(HIDDEN).zip(grad_rows.chunks(HIDDEN)).enumerate().map(of_experts);
            let rows = rank.upload_rows(DType::F32, HIDDEN as u64, &rows.collect::<Vec<_>>())?;
            let grad_x = rank.buffer.dispatch_backward(&rows, &received.handle, order)?;
            Ok((out, rank.values(&grad_x.combined_x)?, grad_weights.grad_topk_weights.values(&stream)?))
        };
        let x: Vec<_> = given.tokens(own).map(|token| x_of(own, token)).collect();
        let weights = given.weights(own);
        let (_, grad_x, grad_weights) = forward(rank, &x, &weights, true)?;

        // All tokens at once: a token's loss has no other one's numbers.
        let losses = |out: &[f32]| -> Vec<f64> {
            let of = |(token, out): (usize, &[f32])| inner_product(out, &grad_of(own, token as u32));
            out.chunks(HIDDEN).enumerate().map(of).collect()
        };
        let shifted = |rows: &[Vec<f32>], column: usize, by: f32| -> Vec<Vec<f32>> {
            let mut rows = rows.to_vec();
            rows.iter_mut().for_each(|row| row[column] += by);
            rows
        };
        let columns = (0..HIDDEN).step_by(tier::pick(5, 2));
        for column in columns {
            let (up, _, _) = forward(rank, &shifted(&x, column, 0.5), &weights, false)?;
            let (down, _, _) = forward(rank, &shifted(&x, column, -0.5), &weights, false)?;
            let want: Vec<f64> = losses(&up).iter().zip(losses(&down)).map(|(up, down)| up - down).collect();
            let got: Vec<f64> = (0..tokens).map(|token| grad_x[token * HIDDEN + column].into()).collect();
            rank.equal(&format!("gradient of column {column}"), &got, &want);
        }
        for k in 0..topk {
            let (up, _, _) = forward(rank, &x, &shifted(&weights, k, 0.5), false)?;
            let (down, _, _) = forward(rank, &x, &shifted(&weights, k, -0.5), false)?;
            let want: Vec<f64> = losses(&up).iter().zip(losses(&down)).map(|(up, down)| up - down).collect();
            let got: Vec<f64> = (0..tokens).map(|token| grad_weights[token * topk + k].into()).collect();
            rank.equal(&format!("gradient of weights {k}"), &got, &want);
        }
        Ok(())
    });
}

#[test]
fn arguments_are_checked() {
    let given = pass(&[3, 4], 2, 2, Style::DistinctTopK, 5);
    given.setup(None).run(|rank| {
        let stream = rank.stream.clone();
        let order = StreamOrder::on(&stream);
        let (mut first, mut second) = (rank.place()?, rank.buffer.place(1)?);
        let mut received = given.dispatch(rank, &mut first)?;
        let rows = received.recv_x.rows();
        let of = |dtype, rows| Tensor::alloc(stream.device(), dtype, &[rows, HIDDEN as u64]);
        let (grads, made) = (of(DType::Bf16, rows)?, of(DType::Bf16, rows * 2)?);
        let wide = of(DType::F32, rows * 2)?;
        for tensor in [&grads, &made] {
            tensor.write(&stream, &vec![bf16::ONE; tensor.rows() as usize * HIDDEN])?;
        }
        let mut weights = |grads, made| rank.buffer.weights_backward(&received, grads, made, order);
        refused(weights(&grads, &grads), &["expert_rows", "num_recv_tokens * num_topk"]);
        refused(weights(&made, &made), &["grad_rows"]);
        refused(weights(&grads, &wide), &["expert_rows", "f32", "bf16"]);
        let in_pool = received.combine_rows(DType::Bf16, HIDDEN as u64)?;
        refused(weights(&grads, &made), &["place = 0", "given out"]);
        drop(in_pool);
        // Ids that the caller has put into the results are not read.
        let few = TypedTensor::from_host(&stream, &[1, 9], &[0i64; 9])?;
        let want = weights(&grads, &made)?.grad_topk_weights.values(&stream)?;
        received.recv_topk_idx = Some(few);
        let got = rank.buffer.weights_backward(&received, &grads, &made, order)?;
        assert_eq!(got.grad_topk_weights.values(&stream)?, want);
        // Received rows without ids.
        let grad = given.own(rank, grad_of)?;
        let again = rank.buffer.combine_backward(&mut second, &grad, &received.handle, order)?;
        let without = rank.buffer.weights_backward(&again, &grads, &made, order);
        refused(without, &["received", "topk_weights"]);
        drop(again);
        // A gradient of more tokens than were sent.
        let fewer = of(DType::Bf16, u64::from(given.routing.num_tokens(rank.rank)) + 1)?;
        refused(
            rank.buffer.combine_backward(&mut second, &fewer, &received.handle, order),
            &["x", "num_tokens"],
        );
        Ok(())
    });
}

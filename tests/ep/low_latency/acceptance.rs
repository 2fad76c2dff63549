//! The acceptance test of MSCCL++'s low-latency path, on its own sizes.

use half::bf16;
use rand::Rng;

use epoxide::Result;
use epoxide::low_latency::{CombineRequest, DispatchRequest};
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide_testing::low_latency::{LowLatencyCase, LowLatencyRank};
use epoxide_testing::oracle::{Routing, Style, low_latency_plan};
use epoxide_testing::payload::rng_of;

const RANKS: u32 = 2;
const TOKENS: u32 = 128;
const HIDDEN: usize = 7168;
const TOPK: u32 = 8;
const EXPERTS: u32 = 256;
/// Columns at a row's end that hold the token's index.
const INDEX_COLUMNS: usize = 128;
/// Most difference between sums: two roundings to BF16, of one part in 2^8 each. The original test
/// allows 1e-2.
const MOST_APART: f64 = (2.0 / 256.0) * (2.0 / 256.0) / 2.0;

/// A token's row: its rank less 128, and at the end its index.
fn row(rank: u32, token: u32) -> Vec<bf16> {
    let mut row = vec![bf16::from_f32(rank as f32 - 128.0); HIDDEN];
    row[HIDDEN - INDEX_COLUMNS..].fill(bf16::from_f32(token as f32));
    row
}

/// The difference between two vectors: 0 if they are equal.
fn difference(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    1.0 - 2.0 * dot(a, b) / (dot(a, a) + dot(b, b))
}

#[test]
fn every_expert_gives_its_rows_back() {
    let mut rng = rng_of(&[0xB3C4]);
    let mut routing =
        Routing::random(&mut rng, &[TOKENS; RANKS as usize], TOPK, EXPERTS, Style::DistinctTopK);
    for ids in &mut routing.topk_idx {
        for _ in 0..10 {
            ids[rng.random_range(0..TOKENS as usize)][rng.random_range(0..TOPK as usize)] = -1;
        }
    }
    let case =
        LowLatencyCase { chunk_tokens: 32, sm_count: 8, ..LowLatencyCase::new(routing, HIDDEN as u32) };
    case.run(|rank| one_rank(&case, rank));
}

fn one_rank(case: &LowLatencyCase, rank: &mut LowLatencyRank) -> Result<()> {
    let (me, routing) = (rank.rank, &case.routing);
    let mut rng = rng_of(&[0xB3C4, me.into()]);
    let weights: Vec<f32> = (0..TOKENS * TOPK).map(|_| rng.random_range(0.0f32..1.0)).collect();
    let mut place = rank.buffer.place(0)?;
    let LowLatencyRank { buffer, stream, failures, .. } = rank;
    let order = StreamOrder::on(stream);
    let x: Vec<bf16> = (0..TOKENS).flat_map(|token| row(me, token)).collect();
    let x = Tensor::from_host(stream, DType::Bf16, &[TOKENS.into(), HIDDEN as u64], &x)?;
    let entries = [u64::from(TOKENS), u64::from(TOPK)];
    let topk_idx = TypedTensor::from_host(stream, &entries, &routing.flat_topk_idx(me))?;
    let topk_weights = TypedTensor::from_host(stream, &entries, &weights)?;

    let request = DispatchRequest::new(&x, &topk_idx).topk_weights(&topk_weights);
    let received = buffer.dispatch_send(&mut place, request, order)?.receive(order)?;
    let plan = low_latency_plan(routing, me);
    let counts = received.expert_counts.values(stream)?;
    let expert_rows = received.expert_rows.values(stream)?;
    let rows = buffer.rows();
    let by_expert = Tensor::alloc(
        stream.device(),
        DType::Bf16,
        &[rows * u64::from(buffer.local_experts()), HIDDEN as u64],
    )?;
    for (expert, list) in plan.expert_rows.iter().enumerate() {
        if counts[expert] as usize != list.len() {
            failures.push(format!("expert {expert} has {} rows, expected {}", counts[expert], list.len()));
        }
        for (at, &(source, token)) in list.iter().enumerate() {
            let slot = expert as u64 * rows + at as u64;
            let from = received.x.ptr().add(expert_rows[slot as usize] as u64 * received.x.row_stride());
            let mut got = vec![bf16::ZERO; HIDDEN];
            // SAFETY: both rows are in their tensors, and as long.
            unsafe {
                stream.read(bytemuck::cast_slice_mut(&mut got), from)?;
                stream.copy(
                    by_expert.ptr().add(slot * by_expert.row_bytes()),
                    from,
                    by_expert.row_bytes(),
                )?;
            }
            if got != row(source, token) {
                failures.push(format!(
                    "row {at} of expert {expert} is not that of token {token} of rank {source}"
                ));
            }
        }
    }
    let combined =
        buffer.combine_send(received, CombineRequest::by_expert(&by_expert), order)?.receive(order)?;
    let sums: Vec<bf16> = combined.x.to_host(stream)?;
    buffer.check()?;
    for token in 0..TOKENS as usize {
        let ids = &routing.topk_idx[me as usize][token];
        let of_token = &weights[token * TOPK as usize..][..TOPK as usize];
        let sum: f32 = ids.iter().zip(of_token).filter(|(id, _)| **id >= 0).map(|(_, weight)| weight).sum();
        let want: Vec<f32> = row(me, token as u32).iter().map(|x| x.to_f32() * sum).collect();
        let got: Vec<f32> = sums[token * HIDDEN..][..HIDDEN].iter().map(|x| x.to_f32()).collect();
        let apart = difference(&got, &want);
        if apart.is_nan() || apart > MOST_APART {
            failures.push(format!("token {token} is off by {apart}"));
        }
    }
    Ok(())
}

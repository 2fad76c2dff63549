//! DeepEP V1's kernels within a node (`intranode.cu`), between two virtual GPUs.
//!
//! Each rank launches what `Buffer.dispatch` and `Buffer.combine` do, with experts that return
//! their rows. Rings are small, so that slots are used again. Numbers are small whole ones, so that
//! sums are exact.

use std::error::Error;

use epoxide_vgpu::GridConfig;
use half::bf16;

use crate::{Case, Found, outcome};

const RANKS: usize = 2;
const EXPERTS: usize = 4;
const TOP_K: usize = 2;
const HIDDEN: usize = 256;
const TOKENS: [usize; RANKS] = [67, 61];
const CHANNELS: usize = 1;
/// Slots that a chunk takes.
const CHUNK: usize = 4;
// The values of the launchers: threads of a block, and bytes of shared memory of each of its warps.
const THREADS: u32 = 768;
const DISPATCH_SHARED: u32 = 8192 * (THREADS / 32);
const COMBINE_SHARED: u32 = 4096 * (THREADS / 32);

fn expert_of(rank: usize, token: usize, k: usize) -> usize {
    (rank + token * 3 + k * (1 + token % 2)) % EXPERTS
}

fn rank_of(expert: usize) -> usize {
    expert / (EXPERTS / RANKS)
}

fn goes_to(from: usize, token: usize, to: usize) -> bool {
    (0..TOP_K).any(|k| rank_of(expert_of(from, token, k)) == to)
}

fn tokens_to(from: usize, to: usize) -> impl Iterator<Item = usize> {
    (0..TOKENS[from]).filter(move |&token| goes_to(from, token, to))
}

fn value(rank: usize, token: usize, at: usize) -> bf16 {
    bf16::from_f32(((rank * 31 + token * 17 + at) % 101) as f32)
}

fn weight(rank: usize, token: usize, k: usize) -> f32 {
    (rank * 100 + token * 4 + k) as f32 / 8.0
}

/// One run; an error if the kernels cannot be launched at all.
pub fn run(case: &Case) -> Result<Found, Box<dyn Error>> {
    let (module, mut machine) = (case.module, case.machine(RANKS));
    let notify = case.kernel(&["15notify_dispatchILi2E"])?;
    let dispatch = case.kernel(&["8dispatchILi2E"])?;
    let notify_combine = case.kernel(&["21cached_notify_combineILi2E"])?;
    let combine = case.kernel(&["7combine", "Li2ELi768E"])?;

    // The matrix of counts, the words of the channels, and the rings.
    let slots = if case.step.ends_with("ring-of-8") { 8 } else { 32 };
    let slot = 2 * HIDDEN + 4 + 12 * TOP_K;
    let bytes = 4 * RANKS * (RANKS + 4 * CHANNELS) + CHANNELS * RANKS * slots * slot;
    let buffers = machine.symmetric_alloc::<u8>("buffer", bytes)?;
    let signals = machine.symmetric("barrier_signal", &[0i32; RANKS])?;
    let mut results = vec![];
    for (rank, tokens) in TOKENS.into_iter().enumerate() {
        let each = |width: usize| (0..tokens).flat_map(move |token| (0..width).map(move |at| (token, at)));
        let experts: Vec<usize> = each(TOP_K).map(|(token, k)| expert_of(rank, token, k)).collect();
        let to_expert = |expert| experts.iter().filter(|&&chosen| chosen == expert).count() as i32;
        let x: Vec<bf16> = each(HIDDEN).map(|(token, at)| value(rank, token, at)).collect();
        let topk_idx: Vec<i64> = experts.iter().map(|&expert| expert as i64).collect();
        let topk_weights: Vec<f32> = each(TOP_K).map(|(token, k)| weight(rank, token, k)).collect();
        let in_rank: Vec<u8> = each(RANKS).map(|(token, to)| u8::from(goes_to(rank, token, to))).collect();
        let per_rank: Vec<i32> = (0..RANKS).map(|to| tokens_to(rank, to).count() as i32).collect();
        let per_expert: Vec<i32> = (0..EXPERTS).map(to_expert).collect();
        let rows: usize = (0..RANKS).map(|from| tokens_to(from, rank).count()).sum();

        let x = machine.upload(rank, "x", &x)?;
        let topk_idx = machine.upload(rank, "topk_idx", &topk_idx)?;
        let topk_weights = machine.upload(rank, "topk_weights", &topk_weights)?;
        let in_rank = machine.upload(rank, "is_token_in_rank", &in_rank)?;
        let per_rank = machine.upload(rank, "num_tokens_per_rank", &per_rank)?;
        let per_expert = machine.upload(rank, "num_tokens_per_expert", &per_expert)?;
        let buffer_ptrs = machine.upload(rank, "buffer_ptrs", &buffers.addrs(rank))?;
        let signal_ptrs = machine.upload(rank, "barrier_signal_ptrs", &signals.addrs(rank))?;
        let numbers = |label, len| machine.alloc::<i32>(rank, label, len);
        let rank_counter = numbers("moe_recv_counter", 1)?;
        let expert_counter = numbers("moe_recv_expert_counter", EXPERTS / RANKS)?;
        let channel_prefix = numbers("channel_prefix_matrix", RANKS * CHANNELS)?;
        let rank_prefix = numbers("rank_prefix_matrix", RANKS * RANKS)?;
        let channel_offset = numbers("recv_channel_offset", RANKS * CHANNELS)?;
        let send_head = numbers("send_head", tokens * RANKS)?;
        let src_idx = numbers("recv_src_idx", rows)?;
        let recv_x = machine.alloc::<bf16>(rank, "recv_x", rows * HIDDEN)?;
        let recv_idx = machine.alloc::<i64>(rank, "recv_topk_idx", rows * TOP_K)?;
        let recv_weights = machine.alloc::<f32>(rank, "recv_topk_weights", rows * TOP_K)?;
        let combined_x = machine.alloc::<bf16>(rank, "combined_x", tokens * HIDDEN)?;
        let combined_weights = machine.alloc::<f32>(rank, "combined_topk_weights", tokens * TOP_K)?;

        let int = |number: usize| number as i32;
        let (null, own, words) = (0u64, rank as i32, CHANNELS * RANKS);
        #[rustfmt::skip]
        machine.launch_with(rank, module, &notify, GridConfig::new(1 + RANKS as u32, 128, 0), &[
            &per_rank, &rank_counter, &per_expert, &expert_counter,
            &[EXPERTS, tokens, CHANNELS].map(int), &in_rank, &channel_prefix, &rank_prefix,
            &[4 * words, 1].map(int), &buffer_ptrs, &signal_ptrs, &own,
        ])?;
        // No scales, and no rows beyond those that come.
        let blocks = 2 * CHANNELS as u32;
        #[rustfmt::skip]
        machine.launch_with(rank, module, &dispatch, GridConfig::new(blocks, THREADS, DISPATCH_SHARED), &[
            &recv_x, &null, &src_idx, &recv_idx, &recv_weights, &channel_offset, &send_head,
            &x, &null, &topk_idx, &topk_weights, &in_rank, &channel_prefix,
            &[tokens, 0, HIDDEN / 8, TOP_K, EXPERTS, 0, 0, 0].map(int), &buffer_ptrs, &own,
            &[CHUNK, slots].map(int),
        ])?;
        #[rustfmt::skip]
        machine.launch_with(rank, module, &notify_combine, GridConfig::new(1 + CHANNELS as u32, 128, 0), &[
            &buffer_ptrs, &send_head, &[CHANNELS, tokens, 2 * words].map(int), &signal_ptrs, &own,
        ])?;
        // The experts return what they get. No bias.
        #[rustfmt::skip]
        machine.launch_with(rank, module, &combine, GridConfig::new(blocks, THREADS, COMBINE_SHARED), &[
            &combined_x, &combined_weights, &recv_x, &recv_weights, &null, &null, &src_idx,
            &rank_prefix, &channel_offset, &send_head, &[rows, tokens, HIDDEN, TOP_K].map(int),
            &buffer_ptrs, &own, &[CHUNK, slots].map(int),
        ])?;
        results.push((recv_x, src_idx, recv_idx, recv_weights, combined_x, combined_weights));
    }
    let oracle = || {
        for (rank, (x, src_idx, idx, weights, combined_x, combined_weights)) in results.iter().enumerate() {
            let (x, src_idx, idx, weights) =
                (x.download()?, src_idx.download()?, idx.download()?, weights.download()?);
            let sent = (0..RANKS).flat_map(|from| tokens_to(from, rank).map(move |token| (from, token)));
            for (row, (from, token)) in sent.enumerate() {
                let is_row = (0..HIDDEN).all(|at| x[row * HIDDEN + at] == value(from, token, at));
                let chosen = (0..TOP_K).all(|k| {
                    let expert = expert_of(from, token, k);
                    let local = rank_of(expert) == rank;
                    let index = if local { (expert % (EXPERTS / RANKS)) as i64 } else { -1 };
                    let factor = if local { weight(from, token, k) } else { 0.0 };
                    idx[row * TOP_K + k] == index && weights[row * TOP_K + k] == factor
                });
                if !is_row || !chosen || src_idx[row] as usize != token {
                    return Ok(Some(format!(
                        "row: row {row} of rank {rank} is not token {token} of rank {from}"
                    )));
                }
            }
            let (x, weights) = (combined_x.download()?, combined_weights.download()?);
            for token in 0..TOKENS[rank] {
                let copies = (0..RANKS).filter(|&to| goes_to(rank, token, to)).count() as f32;
                let sum = |at| copies * value(rank, token, at).to_f32();
                let is_sum = (0..HIDDEN).all(|at| x[token * HIDDEN + at].to_f32() == sum(at));
                if !is_sum || (0..TOP_K).any(|k| weights[token * TOP_K + k] != weight(rank, token, k)) {
                    return Ok(Some(format!("sum: token {token} of rank {rank}")));
                }
            }
        }
        Ok(None)
    };
    Ok(outcome(&mut machine, oracle)?)
}

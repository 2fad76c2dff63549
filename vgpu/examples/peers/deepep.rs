//! DeepEP V1's dispatch within a node (`intranode.cu`), between two virtual GPUs.
//!
//! The host does what `notify_dispatch` does: it counts, and clears the channels. Rings are small,
//! so that slots are used again. The oracle compares rows, indices, choices and weights.

use std::any::Any;
use std::error::Error;

use epoxide_vgpu::{Argument, CheckConfig, DeviceConfig, GridConfig, Machine, Module};
use half::bf16;

use crate::{Outcome, kernel, named};

const RANKS: usize = 2;
const EXPERTS: usize = 4;
const TOP_K: usize = 2;
/// In units of 8 numbers, which are 16 bytes.
const HIDDEN_INT4: usize = 32;
const HIDDEN: usize = 8 * HIDDEN_INT4;
const TOKENS: [usize; RANKS] = [11, 9];
/// Slots of a ring, and how many of them a chunk takes.
const SLOTS: usize = 6;
const CHUNK: usize = 3;
// As the launcher has them.
const THREADS: u32 = 768;
const SHARED: u32 = 8192 * (THREADS / 32);

fn expert_of(rank: usize, token: usize, k: usize) -> usize {
    (rank + token * 3 + k * (1 + token % 2)) % EXPERTS
}

fn rank_of(expert: usize) -> usize {
    expert / (EXPERTS / RANKS)
}

fn goes_to(from: usize, token: usize, to: usize) -> bool {
    (0..TOP_K).any(|k| rank_of(expert_of(from, token, k)) == to)
}

fn count(from: usize, to: usize) -> usize {
    (0..TOKENS[from]).filter(|&token| goes_to(from, token, to)).count()
}

fn value(rank: usize, token: usize, at: usize) -> bf16 {
    bf16::from_f32(((rank * 31 + token * 17 + at) % 251) as f32)
}

fn weight(rank: usize, token: usize, k: usize) -> f32 {
    (rank * 100 + token * 4 + k) as f32 / 8.0
}

/// One run; an error if the kernels cannot be launched at all.
pub fn run(module: &Module, seed: u64, check: Option<CheckConfig>) -> Result<Outcome, Box<dyn Error>> {
    let config = DeviceConfig { schedule_seed: Some(seed), ..DeviceConfig::default() };
    let mut machine = Machine::with_config(RANKS, config, check);
    let dispatch = kernel(module, &["8dispatchILi2ELi768ELi8192E"])?;

    // The matrix of counts, the four words of each channel, and the rings.
    let (matrix, channels) = (RANKS * RANKS, 4 * RANKS);
    let slot = 2 * HIDDEN + 4 + 12 * TOP_K;
    let buffer_bytes = 4 * (matrix + channels) + RANKS * SLOTS * slot;
    let mut own = vec![];
    for to in 0..RANKS {
        let buffer = machine.alloc::<u8>(to, "buffer", buffer_bytes)?;
        let sums = |from: usize, to: usize| (0..=from).map(|from| count(from, to)).sum::<usize>() as i32;
        let matrix = (0..matrix).map(|at| sums(at / RANKS, at % RANKS));
        let begin: Vec<u8> = matrix.chain((0..channels).map(|_| 0)).flat_map(i32::to_ne_bytes).collect();
        buffer.upload(&begin)?;
        own.push(buffer);
    }
    let mut kept: Vec<Box<dyn Any>> = vec![];
    let mut received = vec![];
    for (rank, tokens) in TOKENS.into_iter().enumerate() {
        let mapped: Result<Vec<_>, _> = own.iter().map(|buffer| machine.map(rank, buffer)).collect();
        let mapped = mapped?;
        let pointers: Vec<u64> = mapped.iter().map(|buffer| buffer.addr()).collect();
        let pointers = machine.upload(rank, "buffer_ptrs", &pointers)?;
        let x: Vec<bf16> = (0..tokens * HIDDEN).map(|at| value(rank, at / HIDDEN, at % HIDDEN)).collect();
        let choices: Vec<i64> =
            (0..tokens * TOP_K).map(|at| expert_of(rank, at / TOP_K, at % TOP_K) as i64).collect();
        let weights: Vec<f32> = (0..tokens * TOP_K).map(|at| weight(rank, at / TOP_K, at % TOP_K)).collect();
        let in_rank: Vec<u8> =
            (0..tokens * RANKS).map(|at| u8::from(goes_to(rank, at / RANKS, at % RANKS))).collect();
        let prefix: Vec<i32> = (0..RANKS).map(|to| count(rank, to) as i32).collect();
        let x = machine.upload(rank, "x", &x)?;
        let choices = machine.upload(rank, "topk_idx", &choices)?;
        let weights = machine.upload(rank, "topk_weights", &weights)?;
        let in_rank = machine.upload(rank, "is_token_in_rank", &in_rank)?;
        let prefix = machine.upload(rank, "channel_prefix_matrix", &prefix)?;
        let rows: usize = (0..RANKS).map(|from| count(from, rank)).sum();
        let recv_x = machine.alloc::<bf16>(rank, "recv_x", rows * HIDDEN)?;
        let recv_src_idx = machine.alloc::<i32>(rank, "recv_src_idx", rows)?;
        let recv_topk_idx = machine.alloc::<i64>(rank, "recv_topk_idx", rows * TOP_K)?;
        let recv_topk_weights = machine.alloc::<f32>(rank, "recv_topk_weights", rows * TOP_K)?;
        let recv_channel_offset = machine.alloc::<i32>(rank, "recv_channel_offset", RANKS)?;
        let send_head = machine.alloc::<i32>(rank, "send_head", tokens * RANKS)?;
        let null = 0u64;
        let [tokens, hidden, top_k, experts, chunk, slots, own_rank] =
            [tokens, HIDDEN_INT4, TOP_K, EXPERTS, CHUNK, SLOTS, rank].map(|number| number as i32);
        // No row beyond those that come, and no scales.
        let none = 0i32;
        let arguments: [&dyn Argument; 25] = [
            &recv_x,
            &null,
            &recv_src_idx,
            &recv_topk_idx,
            &recv_topk_weights,
            &recv_channel_offset,
            &send_head,
            &x,
            &null,
            &choices,
            &weights,
            &in_rank,
            &prefix,
            &tokens,
            &none,
            &hidden,
            &top_k,
            &experts,
            &none,
            &none,
            &none,
            &pointers,
            &own_rank,
            &chunk,
            &slots,
        ];
        // One channel: a block that sends, and one that receives.
        machine.launch_with(rank, module, &dispatch, GridConfig::new(2, THREADS, SHARED), &arguments)?;
        received.push((recv_x, recv_src_idx, recv_topk_idx, recv_topk_weights));
        kept.push(Box::new((mapped, pointers, x, choices, weights, in_rank, prefix)));
        kept.push(Box::new((recv_channel_offset, send_head)));
    }
    if let Err(error) = machine.run() {
        return Ok(Some((named(&error), error.to_string())));
    }
    for (to, (x, src_idx, topk_idx, topk_weights)) in received.iter().enumerate() {
        let (x, src_idx) = (x.download()?, src_idx.download()?);
        let (topk_idx, topk_weights) = (topk_idx.download()?, topk_weights.download()?);
        let sent = (0..RANKS).flat_map(|from| (0..TOKENS[from]).map(move |token| (from, token)));
        for (row, (from, token)) in sent.filter(|&(from, token)| goes_to(from, token, to)).enumerate() {
            let is_row = (0..HIDDEN).all(|at| x[row * HIDDEN + at] == value(from, token, at));
            let chosen = (0..TOP_K).all(|k| {
                let expert = expert_of(from, token, k);
                let local = rank_of(expert) == to;
                let index = if local { (expert % (EXPERTS / RANKS)) as i64 } else { -1 };
                let factor = if local { weight(from, token, k) } else { 0.0 };
                topk_idx[row * TOP_K + k] == index && topk_weights[row * TOP_K + k] == factor
            });
            if !is_row || !chosen || src_idx[row] as usize != token {
                let what = format!("row {row} of rank {to}: token {token} of rank {from}");
                return Ok(Some(("wrong rows".to_owned(), what)));
            }
        }
    }
    Ok(None)
}

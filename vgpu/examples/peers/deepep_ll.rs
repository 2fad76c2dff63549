//! DeepEP V1's low-latency kernels (`internode_ll.cu`), between two virtual GPUs of one node.
//!
//! Two rounds of dispatch and combine in bf16, with experts that return their rows. The layout of
//! the heap is that of `LowLatencyLayout` in `config.hpp`. Numbers are small whole ones, so that
//! sums are exact.

use std::error::Error;

use epoxide_vgpu::GridConfig;
use half::bf16;

use crate::{Case, Found, outcome};

const RANKS: usize = 2;
const EXPERTS: usize = 4;
const LOCAL: usize = EXPERTS / RANKS;
const TOP_K: usize = 2;
/// The least that the kernels are made for.
const HIDDEN: usize = 2048;
const TOKENS: [usize; RANKS] = [6, 5];
const MOST_TOKENS: usize = 8;
/// Rows that an expert gets at most: all tokens of all ranks.
const ROWS: usize = RANKS * MOST_TOKENS;
const ROUNDS: usize = 2;
/// The value of the launchers on a device of two multiprocessors.
const BLOCKS: u32 = 2;
const WARP_GROUPS: usize = EXPERTS / BLOCKS as usize;
const WARPS_PER_GROUP: usize = 32 / WARP_GROUPS;
const SHARED: u32 = 32 * (3 * (32 * 16 * 4 + 16) + HIDDEN as u32 / 32);
/// Bytes of the heap: two areas of counts, two to send from and two to receive in.
const COUNTS: usize = 128;
const AREA: usize = EXPERTS * MOST_TOKENS * (HIDDEN * 2 + HIDDEN / 32);

fn expert_of(rank: usize, token: usize, k: usize) -> usize {
    (rank + token * 3 + k * (1 + token % 2)) % EXPERTS
}

/// A small whole number for each element.
pub(crate) fn value(round: usize, rank: usize, token: usize, at: usize) -> bf16 {
    bf16::from_f32(((round * 13 + rank * 31 + token * 17 + at) % 101) as f32)
}

/// A weight whose sums are exact.
pub(crate) fn weight(rank: usize, token: usize, k: usize) -> f32 {
    (1 + rank * 8 + token * 2 + k) as f32 / 8.0
}

/// One run; an error if the kernels cannot be launched at all.
pub fn run(case: &Case) -> Result<Found, Box<dyn Error>> {
    let (module, mut machine) = (case.module, case.machine(RANKS));
    let dispatch = case.kernel(&["8dispatchILb0ELb0ELi2048E"])?;
    let combine = case.kernel(&["7combineILb0ELi2048E"])?;
    let bytes = 2 * (COUNTS + AREA + AREA);
    let heap = machine.symmetric_alloc::<u8>("heap", bytes)?;
    for rank in 0..RANKS {
        heap.of(rank).upload(&[0; 2 * COUNTS])?;
        machine.variable::<u64>(rank, module, "peer_heaps")?.upload(&heap.addrs(rank))?;
    }
    let mut results = vec![];
    for (rank, tokens) in TOKENS.into_iter().enumerate() {
        let at = |offset: usize| heap.of(rank).addr() + offset as u64;
        let counts = |half: usize| at(half * COUNTS);
        let send = |half: usize| at(2 * COUNTS + half * AREA);
        let receive = |half: usize| at(2 * COUNTS + (2 + half) * AREA);
        let workspace = machine.upload(rank, "workspace", &[0i32; 2 * EXPERTS])?;
        for round in 0..ROUNDS {
            let each = |width: usize| (0..tokens * width).map(move |at| (at / width, at % width));
            let x: Vec<bf16> = each(HIDDEN).map(|(token, at)| value(round, rank, token, at)).collect();
            let topk_idx: Vec<i64> = each(TOP_K).map(|(token, k)| expert_of(rank, token, k) as i64).collect();
            let topk_weights: Vec<f32> = each(TOP_K).map(|(token, k)| weight(rank, token, k)).collect();
            let x = machine.upload(rank, "x", &x)?;
            let topk_idx = machine.upload(rank, "topk_idx", &topk_idx)?;
            let topk_weights = machine.upload(rank, "topk_weights", &topk_weights)?;
            let recv_x = machine.alloc::<bf16>(rank, "packed_recv_x", LOCAL * ROWS * HIDDEN)?;
            let src_info = machine.alloc::<i32>(rank, "packed_recv_src_info", LOCAL * ROWS)?;
            let ranges = machine.alloc::<i64>(rank, "packed_recv_layout_range", LOCAL * RANKS)?;
            let recv_count = machine.alloc::<i32>(rank, "packed_recv_count", LOCAL)?;
            let combined_x = machine.alloc::<bf16>(rank, "combined_x", tokens * HIDDEN)?;

            let int = |number: usize| number as i32;
            // No scales, mask or statistics; not rounded, not copied already; both phases.
            let (null, no, phases) = (0u64, 0u8, 3i32);
            let finished = workspace.addr() + 4 * EXPERTS as u64;
            #[rustfmt::skip]
            machine.launch_cooperative(rank, module, &dispatch, GridConfig::new(BLOCKS, 1024, 0), &[
                &recv_x, &null, &src_info, &ranges, &recv_count, &[null; 3],
                &receive(0), &counts(0), &send(0), &x, &topk_idx, &workspace, &finished, &counts(1),
                &[EXPERTS, tokens, MOST_TOKENS, TOP_K, EXPERTS, rank, RANKS].map(int),
                &[WARP_GROUPS, WARPS_PER_GROUP].map(int), &no, &phases,
            ])?;
            #[rustfmt::skip]
            machine.launch_cooperative(rank, module, &combine, GridConfig::new(BLOCKS, 1024, SHARED), &[
                &combined_x, &receive(1), &counts(1), &send(1), &recv_x, &topk_idx, &topk_weights,
                &src_info, &ranges, &[null; 2], &counts(0), &int(EXPERTS), &workspace,
                &[tokens, HIDDEN, TOP_K, MOST_TOKENS, EXPERTS, rank, RANKS].map(int),
                &[WARP_GROUPS, WARPS_PER_GROUP].map(int), &phases, &no,
            ])?;
            results.push((round, rank, recv_x, src_info, ranges, combined_x));
        }
    }
    let oracle = || {
        for (round, rank, recv_x, src_info, ranges, combined_x) in &results {
            let (x, src_info, ranges) = (recv_x.download()?, src_info.download()?, ranges.download()?);
            for (at, range) in ranges.iter().enumerate() {
                let (local, from) = (at / RANKS, at % RANKS);
                // The number of rows, and the first of them.
                let (rows, begin) = (*range as i32 as usize, (range >> 32) as usize);
                let first = local * ROWS + begin;
                let mut tokens: Vec<usize> = vec![];
                for row in first..first + rows {
                    let token = src_info[row] as usize;
                    tokens.push(token);
                    if (0..HIDDEN).any(|at| x[row * HIDDEN + at] != value(*round, from, token, at)) {
                        return Ok(Some(format!("row: row {row} of rank {rank} in round {round}")));
                    }
                }
                tokens.sort_unstable();
                let expert = rank * LOCAL + local;
                let sent = (0..TOKENS[from])
                    .filter(|&token| (0..TOP_K).any(|k| expert_of(from, token, k) == expert));
                if !sent.eq(tokens) {
                    return Ok(Some(format!(
                        "rows: those from rank {from} to expert {expert} in round {round}"
                    )));
                }
            }
            let x = combined_x.download()?;
            for (at, got) in x.iter().enumerate() {
                let (token, column) = (at / HIDDEN, at % HIDDEN);
                let factor: f32 = (0..TOP_K).map(|k| weight(*rank, token, k)).sum();
                if *got != bf16::from_f32(factor * value(*round, *rank, token, column).to_f32()) {
                    return Ok(Some(format!("sum: token {token} of rank {rank} in round {round}")));
                }
            }
        }
        Ok(None)
    };
    Ok(outcome(&mut machine, oracle)?)
}

//! Shapes at the edges of what is allowed.

use rand::SeedableRng;
use rand::rngs::SmallRng;

use epoxide::ep::{CombineRows, DType, DispatchRequest, Tuning};
use epoxide_testing::oracle::{Routing, Style};

use crate::harness::Setup;
use crate::roundtrip::{Case, Scales};
use crate::turns::{Inputs, Turn};

fn routing(tokens_per_rank: &[u32], num_topk: u32, num_experts: u32) -> Routing {
    Routing::random(
        &mut SmallRng::seed_from_u64(7),
        tokens_per_rank,
        num_topk,
        num_experts,
        Style::DistinctTopK,
    )
}

/// Every token of every rank selects just these.
fn uniform(tokens_per_rank: &[u32], num_experts: u32, ids: &[i64]) -> Routing {
    let topk_idx = tokens_per_rank.iter().map(|&tokens| vec![ids.to_vec(); tokens as usize]).collect();
    Routing { num_experts, num_topk: ids.len() as u32, topk_idx }
}

/// The smallest buffers: long rows travel in many pieces and the rings go round.
const SMALL: Tuning = Tuning {
    dispatch_warps: 2,
    internode_dispatch_warps: 2,
    dispatch_stage_bytes: 1024,
    dispatch_stages: 2,
    combine_warps: 2,
    combine_slot_bytes: 512,
    combine_slots: 2,
};

#[test]
fn rows_of_7168_bf16() {
    Case { num_channels: 1, ..Case::new(routing(&[5, 3], 4, 8), 2 * 7168) }.check();
}

#[test]
fn rows_in_many_pieces() {
    // 7168 BF16 are 14 pieces in dispatch and 28 in combine; with 16 bytes more, the last piece is a short one.
    for row_bytes in [2 * 7168, 2 * 7168 + 16] {
        Case { tuning: SMALL, ..Case::new(routing(&[6, 1, 3], 4, 6), row_bytes) }.check();
    }
}

#[test]
fn rows_longer_than_all_shared_memory_of_a_warp() {
    let tuning = Tuning { dispatch_stage_bytes: 65536, dispatch_warps: 8, ..Tuning::default() };
    Case { num_channels: 1, tuning, ..Case::new(routing(&[3, 2], 2, 4), 100_000) }.check();
}

#[test]
fn the_shortest_row() {
    Case::new(routing(&[9, 5, 1], 2, 6), 16).check();
}

#[test]
fn fewer_tokens_than_channels() {
    Case { num_channels: 8, ..Case::new(routing(&[3, 1, 7], 4, 12), 48) }.check();
}

#[test]
fn tokens_that_channels_do_not_divide() {
    Case { num_channels: 7, ..Case::new(routing(&[13, 50, 8, 15], 4, 16), 48) }.check();
}

#[test]
fn more_than_a_warp_of_tokens_per_channel() {
    Case { num_channels: 2, ..Case::new(routing(&[333, 150], 2, 8), 16) }.check();
}

#[test]
fn more_channels_than_the_other_ranks_have_tokens() {
    Case { num_channels: 40, ..Case::new(routing(&[100, 1], 2, 4), 16) }.check();
}

#[test]
fn some_ranks_without_tokens() {
    Case::new(routing(&[0, 9, 0, 4], 3, 8), 48).check();
}

#[test]
fn all_ranks_without_tokens() {
    Case::new(routing(&[0, 0, 0], 3, 6), 48).check();
}

#[test]
fn no_selection_at_all() {
    Case::new(uniform(&[4, 6], 8, &[-1, -1, -1]), 48).check();
}

#[test]
fn everything_to_one_rank() {
    Case::new(uniform(&[20, 3, 0, 11], 8, &[4, 5]), 48).check();
}

#[test]
fn everything_to_every_rank() {
    let all: Vec<i64> = (0..8).collect();
    Case::new(uniform(&[5; 8], 8, &all), 80).check();
}

#[test]
fn one_expert_in_every_entry() {
    Case::new(uniform(&[6, 6], 4, &[3; 32]), 48).check();
}

#[test]
fn a_single_rank() {
    Case { expert_alignment: 128, ..Case::new(routing(&[17], 4, 5), 48) }.check();
}

#[test]
fn the_most_experts_on_a_rank() {
    // Many warps of one block count them: the order in which they do must not matter.
    for schedule_seed in [None, Some(1), Some(2), Some(3)] {
        Case { schedule_seed, ..Case::new(routing(&[40, 3], 8, 2 * 1024), 16) }.check();
    }
}

#[test]
fn more_scales_than_lanes() {
    let case = Case {
        dtype: DType::Fp8E4m3,
        scales: Scales::Columns(67),
        ..Case::new(routing(&[7, 12], 3, 4), 208)
    };
    case.check();
}

#[test]
fn any_dtype_travels() {
    for dtype in [DType::F32, DType::I32, DType::Fp8E4m3] {
        Case { dtype, ..Case::new(routing(&[4, 4], 2, 4), 64) }.check();
    }
}

#[test]
fn a_layer_of_256_experts_on_8_ranks() {
    let mut rng = SmallRng::seed_from_u64(8);
    let routing = Routing::random(&mut rng, &[16; 8], 8, 256, Style::DistinctTopK);
    Case { num_channels: 4, expert_alignment: 128, ..Case::new(routing, 2 * 7168) }.check();
}

#[test]
fn a_pool_of_more_than_4_gib() {
    // Rows for combine start behind 200 000 * 2 receive rows of 14 KiB; only what is touched takes memory.
    let setup = Setup::new(2, 1, 200_000, 2 * 7168);
    let turn = Turn::random(3, &[6, 5], 1);
    setup.run(|rank| {
        rank.check(rank.buffer.pool_bytes() > 2 << 32, "the pool is large");
        let inputs = Inputs::upload(&turn, rank)?;
        let layout = rank.layout(&inputs.topk_idx, turn.routing.num_experts)?;
        let output = rank.dispatch(DispatchRequest::new(&inputs.x, &layout))?;
        let rows = rank.row_bytes(&output.recv_x)?;
        rank.equal("recv_x", &rows, &turn.recv(rank.rank));
        let back = rank.combine(CombineRows::Tensor(&output.recv_x), None, &output.handle)?;
        let sums = rank.row_bytes(&back.combined_x)?;
        rank.equal("combined_x", &sums, &turn.sums[rank.rank as usize]);
        rank.stream.synchronize()
    });
}

//! One node, and what several nodes have in common with it.

use super::routing::Routing;

/// Results of `get_dispatch_layout` on one rank. Sender side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// `[num_ranks]`: tokens for each rank, each token once per rank.
    pub num_tokens_per_rank: Vec<i32>,
    /// `[num_experts]`: selections of each expert.
    pub num_tokens_per_expert: Vec<i32>,
    /// `[num_tokens][num_ranks]`: 1 where the token has a selection on the rank.
    pub is_token_in_rank: Vec<Vec<u8>>,
}

/// Results of a dispatch on one rank, without its rows' contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The layout that the dispatch was given. Sender side.
    pub layout: Layout,
    /// `[num_ranks][num_ranks]`, the same on all ranks: `[i][j]` = tokens from ranks up to and with
    /// i to rank j.
    pub rank_prefix_matrix: Vec<Vec<i32>>,
    /// Sender side, `[num_ranks][num_channels]`: tokens for a destination in channels up to and
    /// with c.
    pub channel_prefix_matrix: Vec<Vec<i32>>,
    /// Receiver side, `[num_ranks][num_channels]`: start of channel c in the block of a source
    /// (exclusive, relative).
    pub recv_channel_prefix_matrix: Vec<Vec<i32>>,
    /// Sender side, `[num_tokens][num_ranks]`: the token's number in the (channel, destination)
    /// queue, or -1.
    pub send_head: Vec<Vec<i32>>,
    /// Receiver side: (source rank, token there) of each row.
    pub recv_src: Vec<(u32, u32)>,
    /// Receiver side, `[num_recv_tokens][num_topk]`: local ids, or -1 where the expert is on
    /// another rank.
    pub recv_topk_idx: Vec<Vec<i64>>,
    /// Rows received.
    pub num_recv_tokens: u32,
    /// `[local_experts]`: selections of each local expert, each rounded up to the alignment.
    pub num_recv_tokens_per_expert: Vec<u32>,
}

/// The tokens of channel `channel`, where `num_tokens` are cut into `num_channels` ranges.
pub fn channel_tokens(num_tokens: u32, num_channels: u32, channel: u32) -> std::ops::Range<u32> {
    let per_channel = num_tokens.div_ceil(num_channels);
    let start = (per_channel * channel).min(num_tokens);
    start..(start + per_channel).min(num_tokens)
}

/// The layout of `rank`.
pub fn layout(routing: &Routing, rank: u32) -> Layout {
    let ranks = 0..routing.num_ranks();
    let tokens = 0..routing.num_tokens(rank);
    let to_rank = |dst| count_hits(routing, rank, tokens.clone(), dst);
    let in_rank = |token| ranks.clone().map(|dst| routing.hits(rank, token, dst) as u8).collect();
    let mut per_expert = vec![0; routing.num_experts as usize];
    for &expert in routing.topk_idx[rank as usize].iter().flatten().filter(|&&expert| expert >= 0) {
        per_expert[expert as usize] += 1;
    }
    Layout {
        num_tokens_per_rank: ranks.clone().map(to_rank).collect(),
        num_tokens_per_expert: per_expert,
        is_token_in_rank: tokens.clone().map(in_rank).collect(),
    }
}

/// The plan of `rank`.
///
/// # Panics
/// Where `num_channels` or `expert_alignment` is 0.
pub fn plan(routing: &Routing, rank: u32, num_channels: u32, expert_alignment: u32) -> Plan {
    let ranks = 0..routing.num_ranks();
    let channel = |source, c| channel_tokens(routing.num_tokens(source), num_channels, c);
    let to_rank = |source, dst| count_hits(routing, source, 0..routing.num_tokens(source), dst);
    let up_to_rank = |last: u32, dst| (0..=last).map(|source| to_rank(source, dst)).sum();
    let up_to_channel = |dst, c| count_hits(routing, rank, 0..channel(rank, c).end, dst);
    let before_channel = |source, c| count_hits(routing, source, 0..channel(source, c).start, rank);

    let mut send_head = vec![vec![-1; routing.num_ranks() as usize]; routing.num_tokens(rank) as usize];
    for c in 0..num_channels {
        for dst in ranks.clone() {
            let queue = channel(rank, c).filter(|&token| routing.hits(rank, token, dst));
            for (number, token) in queue.enumerate() {
                send_head[token as usize][dst as usize] = number as i32;
            }
        }
    }

    let recv_src = recv_order(routing, rank);
    let local_ids = |&(source, token): &(u32, u32)| -> Vec<i64> {
        let ids = &routing.topk_idx[source as usize][token as usize];
        ids.iter().map(|&expert| local_id(routing, expert, rank)).collect()
    };
    let recv_topk_idx: Vec<Vec<i64>> = recv_src.iter().map(local_ids).collect();
    let selections =
        |expert| recv_topk_idx.iter().flatten().filter(|&&id| id == expert as i64).count() as u32;

    Plan {
        layout: layout(routing, rank),
        rank_prefix_matrix: matrix(ranks.clone(), ranks.clone(), up_to_rank),
        channel_prefix_matrix: matrix(ranks.clone(), 0..num_channels, up_to_channel),
        recv_channel_prefix_matrix: matrix(ranks.clone(), 0..num_channels, before_channel),
        send_head,
        num_recv_tokens: recv_src.len() as u32,
        num_recv_tokens_per_expert: (0..routing.local_experts())
            .map(|expert| selections(expert).next_multiple_of(expert_alignment))
            .collect(),
        recv_src,
        recv_topk_idx,
    }
}

/// Tokens of `rank` among `tokens` that go to `dst`.
pub(super) fn count_hits(routing: &Routing, rank: u32, tokens: std::ops::Range<u32>, dst: u32) -> i32 {
    tokens.filter(|&token| routing.hits(rank, token, dst)).count() as i32
}

pub(super) fn matrix(
    rows: std::ops::Range<u32>,
    columns: std::ops::Range<u32>,
    entry: impl Fn(u32, u32) -> i32,
) -> Vec<Vec<i32>> {
    rows.map(|row| columns.clone().map(|column| entry(row, column)).collect()).collect()
}

/// The id of `expert` on `rank`, or -1 where it is not there.
fn local_id(routing: &Routing, expert: i64, rank: u32) -> i64 {
    match routing.owner(expert) {
        Some(owner) if owner == rank => expert - (rank * routing.local_experts()) as i64,
        _ => -1,
    }
}

/// (source rank, token there) of each row that `rank` receives: by source rank, then by token.
pub fn recv_order(routing: &Routing, rank: u32) -> Vec<(u32, u32)> {
    (0..routing.num_ranks())
        .flat_map(|source| (0..routing.num_tokens(source)).map(move |token| (source, token)))
        .filter(|&(source, token)| routing.hits(source, token, rank))
        .collect()
}

/// The rows that a rank receives, where `all[rank][token]` is what each token carries: its bytes,
/// or its scales.
pub fn recv_rows<T: Clone>(plan: &Plan, all: &[Vec<Vec<T>>]) -> Vec<Vec<T>> {
    plan.recv_src.iter().map(|&(source, token)| all[source as usize][token as usize].clone()).collect()
}

/// The weights that a rank receives, where `all[rank][token][k]` are all weights: 0 where
/// `recv_topk_idx` is -1.
pub fn recv_topk_weights(plan: &Plan, all: &[Vec<Vec<f32>>]) -> Vec<Vec<f32>> {
    let kept = |(weights, ids): (Vec<f32>, &Vec<i64>)| -> Vec<f32> {
        weights.iter().zip(ids).map(|(&weight, &id)| if id < 0 { 0.0 } else { weight }).collect()
    };
    recv_rows(plan, all).into_iter().zip(&plan.recv_topk_idx).map(kept).collect()
}

/// The rows that combine returns to `rank`. `returned[receiver]` are each receiver's rows in
/// `recv_x` order, widened to f32, and `columns` is their length. They are sums from +0 over
/// receivers in ascending order, in f32, unweighted, not yet rounded to the rows' type.
pub fn combine_f32(
    routing: &Routing,
    rank: u32,
    returned: &[Vec<Vec<f32>>],
    columns: usize,
) -> Vec<Vec<f32>> {
    let mut sums = vec![vec![0.0f32; columns]; routing.num_tokens(rank) as usize];
    for (receiver, rows) in returned.iter().enumerate() {
        let order = recv_order(routing, receiver as u32);
        assert_eq!(rows.len(), order.len(), "receiver {receiver} must return every row");
        for ((source, token), row) in order.into_iter().zip(rows) {
            if source == rank {
                assert_eq!(row.len(), columns, "rows must have equal lengths");
                sums[token as usize].iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
            }
        }
    }
    sums
}

/// The weights that combine gives `rank`, where `returned[receiver][row][k]` are the weights that
/// receivers give back.
pub fn combined_weights(routing: &Routing, rank: u32, returned: &[Vec<Vec<f32>>]) -> Vec<Vec<f32>> {
    combine_f32(routing, rank, returned, routing.num_topk as usize)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Four ranks, eight experts, four tokens each; channel 0 has tokens 0 and 1, channel 1 tokens
    /// 2 and 3.
    pub(in crate::oracle) fn worked_example() -> Routing {
        let tokens = |ids: [[i64; 2]; 4]| ids.map(Vec::from).to_vec();
        Routing {
            num_experts: 8,
            num_topk: 2,
            topk_idx: vec![
                tokens([[0, 6], [3, 5], [7, 6], [1, -1]]),
                tokens([[2, 4], [6, 1], [0, 1], [5, 7]]),
                tokens([[7, 0], [1, 2], [4, 5], [3, 6]]),
                tokens([[0, 2], [6, 7], [5, 1], [4, 3]]),
            ],
        }
    }

    fn bits(tokens: [&str; 4]) -> Vec<Vec<u8>> {
        tokens.iter().map(|token| token.bytes().map(|digit| digit - b'0').collect()).collect()
    }

    #[test]
    fn worked_example_layout() {
        let expected = [
            (["1001", "0110", "0001", "1000"], [2, 1, 1, 2], [1, 1, 0, 1, 0, 1, 2, 1]),
            (["0110", "1001", "1000", "0011"], [2, 1, 2, 2], [1, 2, 1, 0, 1, 1, 1, 1]),
            (["1001", "1100", "0010", "0101"], [2, 2, 1, 2], [1, 1, 1, 1, 1, 1, 1, 1]),
            (["1100", "0001", "1010", "0110"], [2, 2, 2, 1], [1, 1, 1, 1, 1, 1, 1, 1]),
        ];
        for (rank, (in_rank, per_rank, per_expert)) in expected.into_iter().enumerate() {
            let expected = Layout {
                num_tokens_per_rank: per_rank.to_vec(),
                num_tokens_per_expert: per_expert.to_vec(),
                is_token_in_rank: bits(in_rank),
            };
            assert_eq!(layout(&worked_example(), rank as u32), expected, "rank {rank}");
        }
    }

    #[test]
    fn worked_example_plan_of_rank_0() {
        let plan = plan(&worked_example(), 0, 2, 1);
        assert_eq!(plan.layout, layout(&worked_example(), 0));
        assert_eq!(plan.rank_prefix_matrix, [[2, 1, 1, 2], [4, 2, 3, 4], [6, 4, 4, 6], [8, 6, 6, 7]]);
        assert_eq!(plan.channel_prefix_matrix, [[1, 2], [1, 1], [1, 1], [1, 2]]);
        assert_eq!(plan.recv_channel_prefix_matrix, [[0, 1], [0, 1], [0, 2], [0, 1]]);
        assert_eq!(plan.send_head, [[0, -1, -1, 0], [-1, 0, 0, -1], [-1, -1, -1, 0], [0, -1, -1, -1]]);
        assert_eq!(plan.recv_src, [(0, 0), (0, 3), (1, 1), (1, 2), (2, 0), (2, 1), (3, 0), (3, 2)]);
        let ids = [[0, -1], [1, -1], [-1, 1], [0, 1], [-1, 0], [1, -1], [0, -1], [-1, 1]];
        assert_eq!(plan.recv_topk_idx, ids);
        assert_eq!((plan.num_recv_tokens, plan.num_recv_tokens_per_expert), (8, vec![4, 5]));
    }

    #[test]
    fn worked_example_plan_of_rank_3() {
        let plan = plan(&worked_example(), 3, 2, 1);
        assert_eq!(plan.rank_prefix_matrix, [[2, 1, 1, 2], [4, 2, 3, 4], [6, 4, 4, 6], [8, 6, 6, 7]]);
        assert_eq!(plan.channel_prefix_matrix, [[1, 2], [1, 2], [0, 2], [1, 1]]);
        assert_eq!(plan.recv_channel_prefix_matrix, [[0, 1], [0, 1], [0, 1], [0, 1]]);
        assert_eq!(plan.send_head, [[0, 0, -1, -1], [-1, -1, -1, 0], [0, -1, 0, -1], [-1, 0, 1, -1]]);
        assert_eq!(plan.recv_src, [(0, 0), (0, 2), (1, 1), (1, 3), (2, 0), (2, 3), (3, 1)]);
        assert_eq!(plan.recv_topk_idx, [[-1, 0], [1, 0], [0, -1], [-1, 1], [1, -1], [-1, 0], [0, 1]]);
        assert_eq!((plan.num_recv_tokens, plan.num_recv_tokens_per_expert), (7, vec![5, 4]));
    }

    #[test]
    fn sender_side_channel_prefixes_of_the_other_ranks() {
        let prefixes = |rank| plan(&worked_example(), rank, 2, 1).channel_prefix_matrix;
        assert_eq!(prefixes(1), [[1, 2], [1, 1], [1, 2], [1, 2]]);
        assert_eq!(prefixes(2), [[2, 2], [1, 2], [0, 1], [1, 2]]);
    }

    #[test]
    fn alignment_changes_the_expert_list_alone() {
        let (plain, aligned) = (plan(&worked_example(), 0, 2, 1), plan(&worked_example(), 0, 2, 4));
        assert_eq!(aligned.num_recv_tokens_per_expert, [4, 8]);
        let expert_list = plain.num_recv_tokens_per_expert.clone();
        assert_eq!(Plan { num_recv_tokens_per_expert: expert_list, ..aligned }, plain);
    }

    #[test]
    fn identity_experts_multiply_by_the_number_of_destinations() {
        let routing = worked_example();
        let all: Vec<Vec<Vec<f32>>> =
            (0..4).map(|rank| (0..4).map(|token| vec![(10 * rank + token + 1) as f32]).collect()).collect();
        let returned: Vec<_> = (0..4).map(|rank| recv_rows(&plan(&routing, rank, 2, 1), &all)).collect();
        assert_eq!(combine_f32(&routing, 0, &returned, 1), [[2.0], [4.0], [3.0], [4.0]]);
        assert_eq!(combine_f32(&routing, 3, &returned, 1), [[62.0], [32.0], [66.0], [68.0]]);
    }

    #[test]
    fn weights_are_kept_on_the_owner_and_round_trip() {
        let routing = worked_example();
        let all: Vec<Vec<Vec<f32>>> = (0..4)
            .map(|rank| (0..4).map(|token| vec![(100 * rank + 10 * token) as f32 + 1.0, 0.5]).collect())
            .collect();
        let returned: Vec<_> =
            (0..4).map(|rank| recv_topk_weights(&plan(&routing, rank, 2, 1), &all)).collect();
        assert_eq!(returned[0][..3], [[1.0, 0.0], [31.0, 0.0], [0.0, 0.5]]);
        // Entry 1 of token 3 is -1, so its weight is lost.
        assert_eq!(
            combined_weights(&routing, 0, &returned),
            [[1.0, 0.5], [11.0, 0.5], [21.0, 0.5], [31.0, 0.0]]
        );
        assert_eq!(combined_weights(&routing, 2, &returned), all[2]);
    }

    #[test]
    fn channels_cut_all_tokens_in_order() {
        assert_eq!((0..4).map(|c| channel_tokens(9, 4, c)).collect::<Vec<_>>(), [0..3, 3..6, 6..9, 9..9]);
        assert_eq!((0..3).map(|c| channel_tokens(0, 3, c)).collect::<Vec<_>>(), [0..0, 0..0, 0..0]);
        assert_eq!((0..3).map(|c| channel_tokens(2, 3, c)).collect::<Vec<_>>(), [0..1, 1..2, 2..2]);
    }
}

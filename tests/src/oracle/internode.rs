//! A plan's additions for several nodes: node-unique counts, the relaying ranks, and sums in two
//! steps.
//!
//! A token with a destination on a node is sent there once, to the rank with its sender's index in
//! the node. The receiving rank forwards it to the destination ranks. The *sender* owns tokens, the
//! *receiver* runs the experts, the *forwarder* relays.

use half::bf16;

use super::intranode::{channel_tokens, count_hits, matrix, recv_order};
use super::routing::Routing;

/// A routing on nodes of `ranks_per_node` ranks; rank r is on node `r / ranks_per_node`.
#[derive(Debug, Clone, Copy)]
pub struct InternodeOracle<'a> {
    routing: &'a Routing,
    ranks_per_node: u32,
}

/// Results of a dispatch across nodes on one rank, in addition to those of [`super::plan`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InternodePlan {
    /// Sender side, `[num_nodes]`: tokens for each node, each token once per node, the own node
    /// included.
    pub num_tokens_per_rdma_rank: Vec<i32>,
    /// Sender side, `[num_nodes][num_channels]`: tokens for a node in channels up to and with c.
    pub rdma_channel_prefix_matrix: Vec<Vec<i32>>,
    /// Sender side, `[num_ranks][num_channels]`: tokens for a rank in channels up to and with c.
    pub gbl_channel_prefix_matrix: Vec<Vec<i32>>,
    /// Forwarder side, `[num_nodes][num_channels]`: tokens for the own node from the peer on node
    /// n, in its channels up to and with c.
    pub recv_rdma_channel_prefix_matrix: Vec<Vec<i32>>,
    /// Forwarder side, `[num_nodes]`: tokens for the own node from the peers on nodes up to and
    /// with n.
    pub recv_rdma_rank_prefix_sum: Vec<i32>,
    /// Receiver side, `[num_ranks][num_channels]`: the row of `recv_x` at which channel c of a
    /// source starts.
    pub recv_gbl_channel_prefix_matrix: Vec<Vec<i32>>,
    /// Receiver side, `[num_ranks]`: rows from ranks up to and with r.
    pub recv_gbl_rank_prefix_sum: Vec<i32>,
    /// Receiver side, `[num_recv_tokens]`: the row's source node, and a bit for each rank of the
    /// own node that has the token.
    pub recv_src_meta: Vec<[i32; 2]>,
    /// Sender side, `[num_tokens][num_nodes]`: the token's number in the (channel, node) queue, or
    /// -1.
    pub send_rdma_head: Vec<Vec<i32>>,
    /// Forwarder side, `[num_rdma_recv_tokens][ranks_per_node]`, by source node and token. An entry
    /// is the token's number in the (source node, channel) stream to a rank of the own node, or -1.
    pub send_nvl_head: Vec<Vec<i32>>,
    /// `[num_nodes]`: pairs (token, node) that cross the network from here in a dispatch, and back
    /// in a combine.
    pub wire_sent: Vec<u32>,
    /// `[num_nodes]`: pairs (token, own node) that cross the network from the peer there in a
    /// dispatch.
    pub wire_received: Vec<u32>,
}

impl InternodePlan {
    /// Tokens that this rank relays, those of its own node included.
    pub fn num_rdma_recv_tokens(&self) -> u32 {
        self.send_nvl_head.len() as u32
    }
}

impl<'a> InternodeOracle<'a> {
    /// # Panics
    /// Where the ranks of the routing are no multiple of `ranks_per_node`.
    pub fn new(routing: &'a Routing, ranks_per_node: u32) -> InternodeOracle<'a> {
        let ranks = routing.num_ranks();
        assert!(ranks.is_multiple_of(ranks_per_node), "{ranks} ranks on nodes of {ranks_per_node}");
        InternodeOracle { routing, ranks_per_node }
    }

    /// Number of nodes.
    pub fn count(&self) -> u32 {
        self.routing.num_ranks() / self.ranks_per_node
    }

    /// The node of a rank.
    pub fn node(&self, rank: u32) -> u32 {
        rank / self.ranks_per_node
    }

    /// The ranks of a node.
    pub fn ranks(&self, node: u32) -> std::ops::Range<u32> {
        node * self.ranks_per_node..(node + 1) * self.ranks_per_node
    }

    /// The rank on `node` that `rank` exchanges tokens with.
    pub fn peer(&self, rank: u32, node: u32) -> u32 {
        node * self.ranks_per_node + rank % self.ranks_per_node
    }

    /// Whether a token of `rank` has at least one selection on `node`.
    pub fn hits(&self, rank: u32, token: u32, node: u32) -> bool {
        self.ranks(node).any(|dst| self.routing.hits(rank, token, dst))
    }

    /// The plan of `rank`.
    ///
    /// # Panics
    /// Where `num_channels` is 0.
    pub fn plan(&self, rank: u32, num_channels: u32) -> InternodePlan {
        let (routing, here) = (self.routing, self.node(rank));
        let (nodes, ranks, channels) = (0..self.count(), 0..routing.num_ranks(), 0..num_channels);
        let tokens = |source| 0..routing.num_tokens(source);
        let channel = |source, c| channel_tokens(routing.num_tokens(source), num_channels, c);
        let to_node = |source, tokens, node| self.count_hits(source, tokens, node);
        let from_node = |node| to_node(self.peer(rank, node), tokens(self.peer(rank, node)), here);
        let from_rank = |source| count_hits(routing, source, tokens(source), rank);
        let rows_before = |source: u32| -> i32 { (0..source).map(from_rank).sum() };

        InternodePlan {
            num_tokens_per_rdma_rank: nodes.clone().map(|node| to_node(rank, tokens(rank), node)).collect(),
            rdma_channel_prefix_matrix: matrix(nodes.clone(), channels.clone(), |node, c| {
                to_node(rank, 0..channel(rank, c).end, node)
            }),
            gbl_channel_prefix_matrix: matrix(ranks.clone(), channels.clone(), |dst, c| {
                count_hits(routing, rank, 0..channel(rank, c).end, dst)
            }),
            recv_rdma_channel_prefix_matrix: matrix(nodes.clone(), channels.clone(), |node, c| {
                let source = self.peer(rank, node);
                to_node(source, 0..channel(source, c).end, here)
            }),
            recv_rdma_rank_prefix_sum: nodes.clone().map(|last| (0..=last).map(from_node).sum()).collect(),
            recv_gbl_channel_prefix_matrix: matrix(ranks.clone(), channels, |source, c| {
                rows_before(source) + count_hits(routing, source, 0..channel(source, c).start, rank)
            }),
            recv_gbl_rank_prefix_sum: ranks.map(|last| rows_before(last + 1)).collect(),
            recv_src_meta: recv_order(routing, rank)
                .into_iter()
                .map(|(source, token)| [self.node(source) as i32, self.bits(source, token, here)])
                .collect(),
            send_rdma_head: self.send_rdma_head(rank, num_channels),
            send_nvl_head: self.send_nvl_head(rank, num_channels),
            wire_sent: nodes.clone().map(|node| self.crossing(rank, node)).collect(),
            wire_received: nodes.map(|node| self.crossing(self.peer(rank, node), here)).collect(),
        }
    }

    /// Pairs (token of `rank`, `node`) that cross the network.
    fn crossing(&self, rank: u32, node: u32) -> u32 {
        match self.node(rank) == node {
            true => 0,
            false => self.count_hits(rank, 0..self.routing.num_tokens(rank), node) as u32,
        }
    }

    /// Tokens of `rank` among `tokens` that go to `node`.
    fn count_hits(&self, rank: u32, tokens: std::ops::Range<u32>, node: u32) -> i32 {
        tokens.filter(|&token| self.hits(rank, token, node)).count() as i32
    }

    /// Bit j: rank j of `node` is a destination of the token.
    fn bits(&self, source: u32, token: u32, node: u32) -> i32 {
        let wanted = |dst| self.routing.hits(source, token, dst) as i32;
        self.ranks(node).zip(0..).map(|(dst, bit)| wanted(dst) << bit).sum()
    }

    fn send_rdma_head(&self, rank: u32, num_channels: u32) -> Vec<Vec<i32>> {
        let tokens = self.routing.num_tokens(rank);
        let mut head = vec![vec![-1; self.count() as usize]; tokens as usize];
        for c in 0..num_channels {
            for node in 0..self.count() {
                let queue = channel_tokens(tokens, num_channels, c).filter(|&t| self.hits(rank, t, node));
                for (number, token) in queue.enumerate() {
                    head[token as usize][node as usize] = number as i32;
                }
            }
        }
        head
    }

    fn send_nvl_head(&self, rank: u32, num_channels: u32) -> Vec<Vec<i32>> {
        let here = self.node(rank);
        let mut head = Vec::new();
        for source in (0..self.count()).map(|node| self.peer(rank, node)) {
            for c in 0..num_channels {
                let mut next = vec![0; self.ranks_per_node as usize];
                let relayed = channel_tokens(self.routing.num_tokens(source), num_channels, c)
                    .filter(|&token| self.hits(source, token, here));
                for token in relayed {
                    let number = |(dst, next): (u32, &mut i32)| match self.routing.hits(source, token, dst) {
                        true => std::mem::replace(next, *next + 1),
                        false => -1,
                    };
                    head.push(self.ranks(here).zip(&mut next).map(number).collect());
                }
            }
        }
        head
    }

    /// The rows that combine returns to `rank`. `returned[receiver]` are each receiver's rows in
    /// `recv_x` order, and `columns` is their length. Each node, the own one too, is summed in f32
    /// from +0 over its ranks in ascending order, and rounded to BF16. These sums are summed in f32
    /// from +0 over nodes in ascending order, and rounded to BF16. Unweighted.
    pub fn combine(&self, rank: u32, returned: &[Vec<Vec<bf16>>], columns: usize) -> Vec<Vec<bf16>> {
        let widen = |rows: &Vec<Vec<bf16>>| {
            rows.iter().map(|row| row.iter().map(|value| value.to_f32()).collect()).collect()
        };
        let returned: Vec<Vec<Vec<f32>>> = returned.iter().map(widen).collect();
        let sums = self.combine_rounded(rank, &returned, columns, |sum| bf16::from_f32(sum).to_f32());
        sums.iter().map(|row| row.iter().map(|&sum| bf16::from_f32(sum)).collect()).collect()
    }

    /// The same of rows of any type, to which `round` rounds a number.
    pub fn combine_rounded(
        &self,
        rank: u32,
        returned: &[Vec<Vec<f32>>],
        columns: usize,
        round: impl Fn(f32) -> f32,
    ) -> Vec<Vec<f32>> {
        let sums = self.sum(rank, returned, columns, &round);
        sums.into_iter().map(|row| row.into_iter().map(&round).collect()).collect()
    }

    /// The weights that combine returns to `rank`. `returned[receiver][row][k]` are the receivers'
    /// weights. They are f32 sums over the ranks of each node, then over nodes, both in ascending
    /// order and never rounded to BF16.
    pub fn combined_weights(&self, rank: u32, returned: &[Vec<Vec<f32>>]) -> Vec<Vec<f32>> {
        self.sum(rank, returned, self.routing.num_topk as usize, |sum| sum)
    }

    /// Sums over nodes of `on_the_wire` of the sums over each node's ranks.
    fn sum(
        &self,
        rank: u32,
        returned: &[Vec<Vec<f32>>],
        columns: usize,
        on_the_wire: impl Fn(f32) -> f32,
    ) -> Vec<Vec<f32>> {
        assert_eq!(returned.len() as u32, self.routing.num_ranks(), "every rank must return its rows");
        let zeros = || vec![vec![0.0f32; columns]; self.routing.num_tokens(rank) as usize];
        let mut sums = zeros();
        for node in 0..self.count() {
            let mut partial = zeros();
            for receiver in self.ranks(node) {
                let (order, rows) = (recv_order(self.routing, receiver), &returned[receiver as usize]);
                assert_eq!(rows.len(), order.len(), "receiver {receiver} must return every row");
                for ((_, token), row) in
                    order.into_iter().zip(rows).filter(|((source, _), _)| *source == rank)
                {
                    add(&mut partial[token as usize], row, |value| value);
                }
            }
            for (sum, partial) in sums.iter_mut().zip(&partial) {
                add(sum, partial, &on_the_wire);
            }
        }
        sums
    }
}

fn add(sums: &mut [f32], row: &[f32], value: impl Fn(f32) -> f32) {
    assert_eq!(row.len(), sums.len(), "rows must have equal lengths");
    sums.iter_mut().zip(row).for_each(|(sum, &term)| *sum += value(term));
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::super::intranode::tests::worked_example;
    use super::super::intranode::{Plan, combine_f32, combined_weights, plan, recv_rows, recv_topk_weights};
    use super::super::routing::Style;
    use super::*;
    use crate::payload::{self, per_token};

    #[test]
    fn worked_example_of_rank_0() {
        let routing = worked_example();
        let expected = InternodePlan {
            num_tokens_per_rdma_rank: vec![3, 3],
            rdma_channel_prefix_matrix: rows([[2, 3], [2, 3]]),
            gbl_channel_prefix_matrix: rows([[1, 2], [1, 1], [1, 1], [1, 2]]),
            recv_rdma_channel_prefix_matrix: rows([[2, 3], [2, 3]]),
            recv_rdma_rank_prefix_sum: vec![3, 6],
            recv_gbl_channel_prefix_matrix: rows([[0, 1], [2, 3], [4, 6], [6, 7]]),
            recv_gbl_rank_prefix_sum: vec![2, 4, 6, 8],
            recv_src_meta: vec![[0, 1], [0, 1], [0, 1], [0, 1], [1, 1], [1, 3], [1, 3], [1, 1]],
            send_rdma_head: rows([[0, 0], [1, 1], [-1, 0], [0, -1]]),
            send_nvl_head: rows([[0, -1], [-1, 0], [0, -1], [0, -1], [1, 0], [-1, 0]]),
            // Tokens 0 to 2 of rank 0 are for node 1; tokens 0, 1 and 3 of rank 2 are from there.
            wire_sent: vec![0, 3],
            wire_received: vec![0, 3],
        };
        assert_eq!(InternodeOracle::new(&routing, 2).plan(0, 2), expected);
        let of_rank_0 = plan(&routing, 0, 2, 1);
        assert_eq!(of_rank_0.recv_src, [(0, 0), (0, 3), (1, 1), (1, 2), (2, 0), (2, 1), (3, 0), (3, 2)]);
    }

    #[test]
    fn worked_example_of_rank_3() {
        let routing = worked_example();
        let expected = InternodePlan {
            num_tokens_per_rdma_rank: vec![3, 3],
            rdma_channel_prefix_matrix: rows([[1, 3], [1, 3]]),
            gbl_channel_prefix_matrix: rows([[1, 2], [1, 2], [0, 2], [1, 1]]),
            recv_rdma_channel_prefix_matrix: rows([[2, 3], [1, 3]]),
            recv_rdma_rank_prefix_sum: vec![3, 6],
            recv_gbl_channel_prefix_matrix: rows([[0, 1], [2, 3], [4, 5], [6, 7]]),
            recv_gbl_rank_prefix_sum: vec![2, 4, 6, 7],
            recv_src_meta: vec![[0, 2], [0, 2], [0, 2], [0, 3], [1, 2], [1, 2], [1, 2]],
            send_rdma_head: rows([[0, -1], [-1, 0], [0, 0], [1, 1]]),
            send_nvl_head: rows([[0, -1], [-1, 0], [0, 0], [-1, 0], [0, -1], [1, -1]]),
            // Tokens 0, 2 and 3 of rank 3 are for node 0; tokens 0, 1 and 3 of rank 1 are from
            // there.
            wire_sent: vec![3, 0],
            wire_received: vec![3, 0],
        };
        assert_eq!(InternodeOracle::new(&routing, 2).plan(3, 2), expected);
        let of_rank_3 = plan(&routing, 3, 2, 1);
        assert_eq!(of_rank_3.recv_src, [(0, 0), (0, 2), (1, 1), (1, 3), (2, 0), (2, 3), (3, 1)]);
    }

    #[test]
    fn worked_example_identity_experts() {
        let routing = worked_example();
        let x = per_token(&[4; 4], |rank, token| vec![bf16::from_f32((10 * rank + token + 1) as f32)]);
        let returned = returned(&routing, &x);
        let combine = |rank| payload::widen(&InternodeOracle::new(&routing, 2).combine(rank, &returned, 1));
        assert_eq!(combine(0), [[2.0], [4.0], [3.0], [4.0]]);
        assert_eq!(combine(3), [[62.0], [32.0], [66.0], [68.0]]);
    }

    #[test]
    fn a_nodes_sum_is_rounded_before_it_is_added() {
        // One token for all four ranks. BF16 has 8 bits: 256 + 1 is 256 on the way, and 256 + 3 is
        // 260.
        let routing = Routing {
            num_experts: 4,
            num_topk: 4,
            topk_idx: vec![vec![vec![0, 1, 2, 3]], vec![], vec![], vec![]],
        };
        let rows = |values: [f32; 4]| values.map(|value| vec![vec![bf16::from_f32(value)]]);
        let combine = |ranks_per_node, values| {
            InternodeOracle::new(&routing, ranks_per_node).combine(0, &rows(values), 1)[0][0].to_f32()
        };
        for (values, one_node, two_nodes) in [
            ([256.0, 1.0, -256.0, 0.0], 1.0, 0.0), // the own node's sum
            ([-256.0, 0.0, 256.0, 1.0], 1.0, 0.0), // the other node's
            ([256.0, 3.0, -256.0, 0.0], 3.0, 4.0),
        ] {
            assert_eq!((combine(4, values), combine(2, values)), (one_node, two_nodes), "{values:?}");
        }

        // Weights are not rounded.
        let rows = |values: [f32; 4]| values.map(|value| vec![vec![value, 0.0, 0.0, 0.0]]);
        let weights = InternodeOracle::new(&routing, 2).combined_weights(0, &rows([256.0, 1.0, 256.0, 1.0]));
        assert_eq!(weights, [[514.0, 0.0, 0.0, 0.0]]);
        // But they are summed by node: 2^24 + 1 is 2^24 in f32, 2^24 + 2 is not.
        let big = (1 << 24) as f32;
        let weights = |ranks_per_node| {
            InternodeOracle::new(&routing, ranks_per_node).combined_weights(0, &rows([big, 0.0, 1.0, 1.0]))[0]
                [0]
        };
        assert_eq!((weights(4), weights(2)), (big, big + 2.0));
    }

    #[test]
    fn both_sides_say_the_same() {
        let mut rng = ChaCha8Rng::seed_from_u64(6);
        for (nodes, ranks_per_node) in
            [(1, 1), (1, 4), (2, 1), (2, 2), (2, 4), (3, 2), (4, 1), (4, 8), (5, 3)]
        {
            for style in Style::ALL {
                let tokens: Vec<u32> = (0..nodes * ranks_per_node).map(|_| rng.random_range(0..14)).collect();
                let experts = nodes * ranks_per_node * rng.random_range(1..3);
                let routing = Routing::random(&mut rng, &tokens, 3, experts, style);
                check_sides(&routing, ranks_per_node, rng.random_range(1..6));
            }
        }
    }

    fn check_sides(routing: &Routing, ranks_per_node: u32, num_channels: u32) {
        let nodes = InternodeOracle::new(routing, ranks_per_node);
        let all: Vec<(Plan, InternodePlan)> = (0..routing.num_ranks())
            .map(|rank| (plan(routing, rank, num_channels, 1), nodes.plan(rank, num_channels)))
            .collect();
        for (rank, (flat, plan)) in (0..).zip(&all) {
            let (me, here) = (rank as usize, nodes.node(rank) as usize);
            let last = |row: &Vec<i32>| row[num_channels as usize - 1];

            // The sender's totals, against those of the layout and of the flat plan.
            let totals: Vec<i32> = plan.rdma_channel_prefix_matrix.iter().map(last).collect();
            assert_eq!(totals, plan.num_tokens_per_rdma_rank);
            assert_eq!(plan.gbl_channel_prefix_matrix, flat.channel_prefix_matrix);
            let sum: Vec<i32> = flat.rank_prefix_matrix.iter().map(|row| row[me]).collect();
            assert_eq!(plan.recv_gbl_rank_prefix_sum, sum);
            for (source, relative) in flat.recv_channel_prefix_matrix.iter().enumerate() {
                let start = if source == 0 { 0 } else { sum[source - 1] };
                let absolute: Vec<i32> = relative.iter().map(|row| start + row).collect();
                assert_eq!(plan.recv_gbl_channel_prefix_matrix[source], absolute);
            }

            // Each forwarder's rows are its peers' rows.
            for node in 0..nodes.count() {
                let peer = &all[nodes.peer(rank, node) as usize].1;
                let (node, there) = (node as usize, &peer.rdma_channel_prefix_matrix[here]);
                assert_eq!(&plan.recv_rdma_channel_prefix_matrix[node], there);
                assert_eq!(plan.wire_sent[node], peer.wire_received[here]);
                let own = node == here;
                assert_eq!(plan.wire_sent[node] as i32, if own { 0 } else { totals[node] });
                let before = if node == 0 { 0 } else { plan.recv_rdma_rank_prefix_sum[node - 1] };
                assert_eq!(plan.recv_rdma_rank_prefix_sum[node] - before, last(there));
            }
            let relayed = plan.recv_rdma_rank_prefix_sum[nodes.count() as usize - 1];
            assert_eq!(plan.num_rdma_recv_tokens() as i32, relayed);

            // Every row that a rank receives was relayed to it by one rank of its node, which sent
            // no other row there.
            let column = (rank % ranks_per_node) as usize;
            let relayed_here = nodes.ranks(nodes.node(rank)).flat_map(|forwarder| {
                all[forwarder as usize].1.send_nvl_head.iter().filter(|row| row[column] >= 0)
            });
            assert_eq!(relayed_here.count() as u32, flat.num_recv_tokens);
            assert!(plan.recv_src_meta.iter().all(|meta| meta[1] >> column & 1 == 1));

            // The last number of a queue is its length.
            for node in 0..nodes.count() as usize {
                let mut before = 0;
                for c in 0..num_channels {
                    let range = channel_tokens(routing.num_tokens(rank), num_channels, c);
                    let last = range.map(|token| plan.send_rdma_head[token as usize][node]).max();
                    let length = plan.rdma_channel_prefix_matrix[node][c as usize] - before;
                    assert_eq!(last.unwrap_or(-1) + 1, length);
                    before += length;
                }
            }
        }
        check_sums(routing, nodes);
    }

    /// Sums that are exact in BF16 are the same in one step and in two.
    fn check_sums(routing: &Routing, nodes: InternodeOracle<'_>) {
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let tokens: Vec<u32> = (0..routing.num_ranks()).map(|rank| routing.num_tokens(rank)).collect();
        let x = per_token(&tokens, |_, _| payload::small_integers(&mut rng, 5));
        let rows = returned(routing, &x);
        let widened: Vec<_> = rows.iter().map(|rows| payload::widen(rows)).collect();
        let weights = per_token(&tokens, |_, _| payload::rough_f32(&mut rng, 3));
        let masked: Vec<_> = (0..routing.num_ranks())
            .map(|rank| recv_topk_weights(&plan(routing, rank, 1, 1), &weights))
            .collect();
        for rank in 0..routing.num_ranks() {
            let one_step = payload::round(&combine_f32(routing, rank, &widened, 5));
            assert_eq!(nodes.combine(rank, &rows, 5), one_step);
            // Only one rank returns each weight, so nothing is rounded.
            let one_step = combined_weights(routing, rank, &masked);
            assert_eq!(nodes.combined_weights(rank, &masked), one_step);
        }
    }

    fn returned(routing: &Routing, x: &[Vec<Vec<bf16>>]) -> Vec<Vec<Vec<bf16>>> {
        (0..routing.num_ranks()).map(|rank| recv_rows(&plan(routing, rank, 1, 1), x)).collect()
    }

    fn rows<const COLUMNS: usize, const ROWS: usize>(rows: [[i32; COLUMNS]; ROWS]) -> Vec<Vec<i32>> {
        rows.map(Vec::from).to_vec()
    }
}

//! Counts the tokens that a rank sends and receives: the six metrics, counted serially from the
//! routing, and their means for uniform routing. The benchmark compares its devices' counts with
//! the serial ones.

use std::collections::BTreeSet;

use rand::Rng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// The six metrics of one phase for one rank: tokens as `u64`, means as `f64`, or bandwidths made
/// of them.
///
/// Dispatch sends unique (token, node) pairs and receives unique (source token, rank) pairs, own
/// ones included. `nvl` is the part within the node, `rdma` the part across. Combine swaps the
/// sides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenCounts<T> {
    /// Sent.
    pub send_total: T,
    /// Sent within the node.
    pub send_nvl: T,
    /// Sent to other nodes.
    pub send_rdma: T,
    /// Received.
    pub recv_total: T,
    /// Received from the own node.
    pub recv_nvl: T,
    /// Received from other nodes.
    pub recv_rdma: T,
}

impl<T: Copy> TokenCounts<T> {
    /// The other phase's counts.
    pub fn swapped(self) -> TokenCounts<T> {
        TokenCounts {
            send_total: self.recv_total,
            send_nvl: self.recv_nvl,
            send_rdma: self.recv_rdma,
            recv_total: self.send_total,
            recv_nvl: self.send_nvl,
            recv_rdma: self.send_rdma,
        }
    }

    /// Every metric through `f`.
    pub fn map<U>(self, f: impl Fn(T) -> U) -> TokenCounts<U> {
        TokenCounts {
            send_total: f(self.send_total),
            send_nvl: f(self.send_nvl),
            send_rdma: f(self.send_rdma),
            recv_total: f(self.recv_total),
            recv_nvl: f(self.recv_nvl),
            recv_rdma: f(self.recv_rdma),
        }
    }
}

/// Counts of one rank in a dispatch; a combine moves the same backwards.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct RankCounts {
    /// The six metrics.
    pub six: TokenCounts<u64>,
    /// Tokens of other nodes that this rank passes on in its own. In a combine, the sums that it
    /// sends to other nodes.
    pub relayed: u64,
    /// Rows received over NVLink: those of ranks with another index in their node, since relays
    /// keep the index.
    pub linked: u64,
}

/// Means over ranks.
pub fn mean(ranks: &[RankCounts]) -> TokenCounts<f64> {
    let of = |pick: fn(&TokenCounts<u64>) -> u64| {
        ranks.iter().map(|rank| pick(&rank.six)).sum::<u64>() as f64 / ranks.len() as f64
    };
    TokenCounts {
        send_total: of(|six| six.send_total),
        send_nvl: of(|six| six.send_nvl),
        send_rdma: of(|six| six.send_rdma),
        recv_total: of(|six| six.recv_total),
        recv_nvl: of(|six| six.recv_nvl),
        recv_rdma: of(|six| six.recv_rdma),
    }
}

/// Sizes that a count depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Ranks.
    pub ranks: u32,
    /// Ranks of a node.
    pub ranks_per_node: u32,
    /// Experts of all ranks.
    pub experts: u32,
    /// Entries per token.
    pub topk: u32,
}

/// Dispatch's counts of every rank, from the ids alone: `ids[rank]` is `[tokens, topk]`, negative
/// where none is selected.
pub fn serial(ids: &[Vec<i64>], sizes: Sizes) -> Vec<RankCounts> {
    let local_experts = i64::from(sizes.experts / sizes.ranks);
    let per_node = sizes.ranks_per_node as usize;
    let mut counts = vec![RankCounts::default(); ids.len()];
    for (source, ids) in ids.iter().enumerate() {
        let (home, index) = (source / per_node, source % per_node);
        for token in ids.chunks(sizes.topk as usize) {
            let wanted: BTreeSet<usize> =
                token.iter().filter(|&&id| id >= 0).map(|id| (id / local_experts) as usize).collect();
            let nodes: BTreeSet<usize> = wanted.iter().map(|&rank| rank / per_node).collect();
            for node in nodes {
                let sender = &mut counts[source].six;
                sender.send_total += 1;
                match node == home {
                    true => sender.send_nvl += 1,
                    false => {
                        sender.send_rdma += 1;
                        counts[node * per_node + index].relayed += 1;
                    }
                }
            }
            for rank in wanted {
                let receiver = &mut counts[rank];
                receiver.six.recv_total += 1;
                match rank / per_node == home {
                    true => receiver.six.recv_nvl += 1,
                    false => receiver.six.recv_rdma += 1,
                }
                receiver.linked += u64::from(rank % per_node != index);
            }
        }
    }
    counts
}

/// Rows by expert of one rank in a dispatch; a combine moves the same backwards.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SelectionCounts {
    /// Tokens of the rank that select any expert.
    pub sent_tokens: u64,
    /// Received rows: one for each selection of a local expert, without padding.
    pub received: u64,
    /// Those of them received over NVLink, if each row is sent by itself.
    pub linked: u64,
    /// Tokens of other ranks with several selections here, counted where `linked` counts them: a
    /// dispatch brings such a row once, and reads it again for its copies.
    pub copied: u64,
}

/// The same of rows by expert as [`serial`]: one for each selection.
pub fn selections(ids: &[Vec<i64>], sizes: Sizes) -> Vec<SelectionCounts> {
    let local_experts = i64::from(sizes.experts / sizes.ranks);
    let per_node = sizes.ranks_per_node as usize;
    let mut counts = vec![SelectionCounts::default(); ids.len()];
    for (source, ids) in ids.iter().enumerate() {
        for token in ids.chunks(sizes.topk as usize) {
            counts[source].sent_tokens += u64::from(token.iter().any(|&id| id >= 0));
            for &id in token.iter().filter(|id| **id >= 0) {
                let rank = (id / local_experts) as usize;
                counts[rank].received += 1;
                counts[rank].linked += u64::from(rank % per_node != source % per_node);
            }
            for (rank, counts) in counts.iter_mut().enumerate() {
                let here = token.iter().filter(|&&id| id >= 0 && (id / local_experts) as usize == rank);
                counts.copied += u64::from(rank % per_node != source % per_node && here.count() > 1);
            }
        }
    }
    counts
}

/// Dispatch's mean counts of a rank where every set of `topk` experts is equally likely.
pub fn expected(tokens: f64, sizes: Sizes) -> TokenCounts<f64> {
    let (ranks, per_node) = (f64::from(sizes.ranks), f64::from(sizes.ranks_per_node));
    let nodes = ranks / per_node;
    let rank = chance_of_any(sizes.experts, sizes.experts / sizes.ranks, sizes.topk);
    let node = chance_of_any(sizes.experts, sizes.experts / sizes.ranks * sizes.ranks_per_node, sizes.topk);
    TokenCounts {
        send_total: tokens * nodes * node,
        send_nvl: tokens * node,
        send_rdma: tokens * (nodes - 1.0) * node,
        recv_total: tokens * ranks * rank,
        recv_nvl: tokens * per_node * rank,
        recv_rdma: tokens * (ranks - per_node) * rank,
    }
}

/// The chance that `topk` distinct experts of `experts` hit any of `part` given ones: 1 - C(E -
/// part, K) / C(E, K).
fn chance_of_any(experts: u32, part: u32, topk: u32) -> f64 {
    let miss: f64 =
        (0..topk).map(|k| f64::from((experts - part).saturating_sub(k)) / f64::from(experts - k)).product();
    1.0 - miss
}

/// Ids of the `topk` best of `|normal| + 1` scores, for each token; each is replaced by -1 with
/// probability `masked`.
pub fn random_topk(rng: &mut ChaCha8Rng, tokens: u32, topk: u32, experts: u32, masked: f64) -> Vec<i64> {
    let mut ids = Vec::with_capacity((tokens * topk) as usize);
    for _ in 0..tokens {
        // Box-Muller; only the order of the scores matters.
        let score = |rng: &mut ChaCha8Rng| {
            let (u, v): (f64, f64) = (rng.random_range(f64::MIN_POSITIVE..1.0), rng.random());
            ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()).abs() + 1.0
        };
        let mut scored: Vec<(f64, i64)> = (0..experts).map(|e| (score(rng), e as i64)).collect();
        scored.sort_by(|a, b| b.0.total_cmp(&a.0));
        for &(_, expert) in scored.iter().take(topk as usize) {
            let gone = masked > 0.0 && rng.random_bool(masked);
            ids.push(if gone { -1 } else { expert });
        }
    }
    ids
}

/// Two nodes of two ranks, eight experts, top-2, four tokens a rank: docs/BENCH-METHOD.md works it
/// by hand.
pub const ACROSS_NODES: [[i64; 8]; 4] =
    [[0, 6, 3, 5, 7, 6, 1, -1], [2, 4, 6, 1, 0, 1, 5, 7], [7, 0, 1, 2, 4, 5, 3, 6], [0, 2, 6, 7, 5, 1, 4, 3]];

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    fn routing(seed: u64, tokens: u32, sizes: Sizes, masked: f64) -> Vec<Vec<i64>> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        (0..sizes.ranks).map(|_| random_topk(&mut rng, tokens, sizes.topk, sizes.experts, masked)).collect()
    }

    /// The routing worked by hand in docs/BENCH-METHOD.md: 4 ranks, 8 experts, top-2, two tokens a
    /// rank.
    const BY_HAND: [[i64; 4]; 4] = [[0, 2, 1, -1], [6, 7, 2, 5], [-1, -1, 0, 4], [1, 6, 3, 2]];

    #[test]
    fn the_routing_worked_by_hand_on_two_nodes() {
        let ids: Vec<Vec<i64>> = BY_HAND.iter().map(|ids| ids.to_vec()).collect();
        let sizes = Sizes { ranks: 4, ranks_per_node: 2, experts: 8, topk: 2 };
        let six = |st, sn, sr, rt, rn, rr| TokenCounts {
            send_total: st,
            send_nvl: sn,
            send_rdma: sr,
            recv_total: rt,
            recv_nvl: rn,
            recv_rdma: rr,
        };
        // Experts 0, 1 live on rank 0, 2, 3 on rank 1, and so on; ranks 0 and 1 are node 0.
        let sixes = |sizes| serial(&ids, sizes).iter().map(|rank| rank.six).collect::<Vec<_>>();
        assert_eq!(
            sixes(sizes),
            [six(2, 2, 0, 4, 2, 2), six(3, 1, 2, 3, 2, 1), six(2, 1, 1, 2, 1, 1), six(3, 1, 2, 2, 1, 1)]
        );
        let one_node = Sizes { ranks_per_node: 4, ..sizes };
        assert_eq!(
            sixes(one_node),
            [six(2, 2, 0, 4, 4, 0), six(2, 2, 0, 3, 3, 0), six(1, 1, 0, 2, 2, 0), six(2, 2, 0, 2, 2, 0)]
        );
    }

    #[test]
    fn the_routing_across_nodes_worked_by_hand() {
        let ids: Vec<Vec<i64>> = ACROSS_NODES.iter().map(|ids| ids.to_vec()).collect();
        let counts = serial(&ids, Sizes { ranks: 4, ranks_per_node: 2, experts: 8, topk: 2 });
        let send = |six: TokenCounts<u64>| (six.send_total, six.send_nvl, six.send_rdma);
        let recv = |six: TokenCounts<u64>| (six.recv_total, six.recv_nvl, six.recv_rdma);
        let by = |pick: fn(&RankCounts) -> u64| counts.iter().map(pick).collect::<Vec<_>>();
        assert_eq!(counts.iter().map(|rank| send(rank.six)).collect::<Vec<_>>(), [(6, 3, 3); 4]);
        let received = [(8, 4, 4), (6, 2, 4), (6, 3, 3), (7, 3, 4)];
        assert_eq!(counts.iter().map(|rank| recv(rank.six)).collect::<Vec<_>>(), received);
        assert_eq!((by(|rank| rank.relayed), by(|rank| rank.linked)), (vec![3; 4], vec![4, 3, 4, 4]));
    }

    #[test]
    fn sent_rows_equal_received_rows() {
        for (seed, ranks, ranks_per_node, topk, masked) in
            [(1, 4, 4, 2, 0.0), (2, 8, 2, 4, 0.3), (3, 8, 1, 8, 0.0), (4, 6, 3, 3, 0.9)]
        {
            let sizes = Sizes { ranks, ranks_per_node, experts: ranks * 4, topk };
            let ids = routing(seed, 50, sizes, masked);
            let counts = serial(&ids, sizes);
            let sum =
                |pick: fn(&TokenCounts<u64>) -> u64| counts.iter().map(|rank| pick(&rank.six)).sum::<u64>();
            for RankCounts { six, linked, .. } in &counts {
                assert!(*linked <= six.recv_total);
                assert_eq!(six.send_total, six.send_nvl + six.send_rdma);
                assert_eq!(six.recv_total, six.recv_nvl + six.recv_rdma);
                assert_eq!(six.swapped().swapped(), *six);
            }
            // Every pair (token, node) is at least one row there, and with one rank a node exactly
            // one.
            assert!(sum(|six| six.send_nvl) <= sum(|six| six.recv_nvl));
            assert!(sum(|six| six.send_rdma) <= sum(|six| six.recv_rdma));
            // Rows that cross nodes are relayed at the other end.
            assert_eq!(sum(|six| six.send_rdma), counts.iter().map(|rank| rank.relayed).sum::<u64>());
            if ranks_per_node == 1 {
                assert!(counts.iter().all(|rank| rank.linked == 0));
                assert_eq!(sum(|six| six.send_rdma), sum(|six| six.recv_rdma));
            }
        }
    }

    #[test]
    fn expected_counts_are_the_mean_of_many_routings() {
        for (ranks, ranks_per_node) in [(8, 8), (8, 4), (16, 4)] {
            let sizes = Sizes { ranks, ranks_per_node, experts: 64, topk: 6 };
            let counted = mean(&serial(&routing(7, 600, sizes, 0.0), sizes));
            let formula = expected(600.0, sizes);
            let pairs = [
                (counted.send_total, formula.send_total),
                (counted.send_nvl, formula.send_nvl),
                (counted.send_rdma, formula.send_rdma),
                (counted.recv_total, formula.recv_total),
                (counted.recv_nvl, formula.recv_nvl),
                (counted.recv_rdma, formula.recv_rdma),
            ];
            for (counted, formula) in pairs {
                assert!((counted - formula).abs() <= 0.02 * formula + 1e-9, "{counted} {formula}");
            }
        }
        // The benchmark's own: 5.295 ranks a token at 8 of 256 experts on 8 ranks.
        let anchor = expected(1.0, Sizes { ranks: 8, ranks_per_node: 8, experts: 256, topk: 8 });
        assert!((anchor.recv_total - 5.295).abs() < 0.01, "{anchor:?}");
    }
}

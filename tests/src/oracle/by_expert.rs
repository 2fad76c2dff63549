//! Rows by expert: one for each selection, in segments of the local experts.

use std::collections::HashMap;

use epoxide::DType;

use super::routing::Routing;
use crate::payload::rounded;

/// The results of a dispatch of rows by expert on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertPlan {
    /// `[local_experts]`: rows of each.
    pub counts: Vec<i32>,
    /// `[local_experts + 1]`: where segments begin; then all rows.
    pub starts: Vec<i32>,
    /// `[local_experts + 1]`: where rows end; then all rows.
    pub psum: Vec<i32>,
    /// Source rank, token and entry of each row; `None` in padding.
    pub rows: Vec<Option<(u32, u32, u32)>>,
}

impl ExpertPlan {
    /// The rows that each row of an ordinary dispatch is copied to, `num_topk` of each: those of its
    /// selections, then -1. `sources` are the rank and token of each received row.
    pub fn places(&self, sources: &[(u32, u32)], num_topk: u32) -> Vec<i32> {
        let mut of_token: HashMap<(u32, u32), Vec<i32>> = HashMap::new();
        for (row, selection) in (0..).zip(&self.rows) {
            if let Some((source, token, _)) = *selection {
                of_token.entry((source, token)).or_default().push(row);
            }
        }
        let of_row = |source: &(u32, u32)| {
            let mut places = of_token.remove(source).unwrap_or_default();
            places.resize(num_topk as usize, -1);
            places
        };
        sources.iter().flat_map(of_row).collect()
    }
}

/// The plan of `rank`, where segments begin at multiples of `alignment`.
pub fn by_expert(routing: &Routing, rank: u32, alignment: u32) -> ExpertPlan {
    let mut plan = ExpertPlan { counts: vec![], starts: vec![0], psum: vec![], rows: vec![] };
    for local in 0..routing.local_experts() {
        let id = i64::from(rank * routing.local_experts() + local);
        let first = plan.rows.len();
        for source in 0..routing.num_ranks() {
            for token in 0..routing.num_tokens(source) {
                let ids = &routing.topk_idx[source as usize][token as usize];
                for (k, _) in ids.iter().enumerate().filter(|(_, selected)| **selected == id) {
                    plan.rows.push(Some((source, token, k as u32)));
                }
            }
        }
        plan.counts.push((plan.rows.len() - first) as i32);
        plan.psum.push(plan.rows.len() as i32);
        plan.rows.resize(plan.rows.len().next_multiple_of(alignment as usize), None);
        plan.starts.push(plan.rows.len() as i32);
    }
    plan.psum.push(plan.rows.len() as i32);
    plan
}

/// The sum of a token of `rank`: of its selections in their order, each `row(receiver, k)` times
/// its weight, in f32 from +0. With `ranks_per_node`, across nodes: such a sum is made of the
/// selections of each node and rounded to `dtype`, and the nodes' sums are added in order.
#[allow(clippy::too_many_arguments)] // A sum depends on all of them.
pub fn combine_by_expert(
    routing: &Routing,
    rank: u32,
    token: u32,
    columns: usize,
    weights: &[f32],
    ranks_per_node: Option<u32>,
    dtype: DType,
    row: impl Fn(u32, u32) -> Vec<f32>,
) -> Vec<f32> {
    let ids = &routing.topk_idx[rank as usize][token as usize];
    let sum_of = |ranks: std::ops::Range<u32>| {
        let mut sums = None;
        for (k, &id) in ids.iter().enumerate() {
            let Some(receiver) = routing.owner(id).filter(|rank| ranks.contains(rank)) else { continue };
            let sums = sums.get_or_insert_with(|| vec![0.0f32; columns]);
            for (sum, value) in sums.iter_mut().zip(row(receiver, k as u32)) {
                let product = value * weights[k];
                *sum += product;
            }
        }
        sums
    };
    let all = routing.num_ranks();
    let zeros = vec![0.0; columns];
    let Some(per_node) = ranks_per_node else { return sum_of(0..all).unwrap_or(zeros) };
    let nodes = (0..all / per_node).filter_map(|node| sum_of(node * per_node..(node + 1) * per_node));
    nodes.fold(zeros, |mut sums, of_node| {
        sums.iter_mut().zip(of_node).for_each(|(sum, value)| *sum += rounded(dtype, value));
        sums
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worked_example() {
        // Two ranks with two experts each; rank 0 has tokens {1, 2}, {1, 1}, rank 1 has {0, -1},
        // {3, 1}.
        let topk_idx = vec![vec![vec![1, 2], vec![1, 1]], vec![vec![0, -1], vec![3, 1]]];
        let routing = Routing { num_experts: 4, num_topk: 2, topk_idx };
        let plan = by_expert(&routing, 0, 4);
        let sources = [(0, 0), (0, 1), (1, 0), (1, 1)];
        assert_eq!(plan.places(&sources, 2), [4, -1, 5, 6, 0, -1, 7, -1]);
        assert_eq!((plan.counts, plan.starts, plan.psum), (vec![1, 4], vec![0, 4, 8], vec![1, 8, 8]));
        let expected = [
            Some((1, 0, 0)),
            None,
            None,
            None,
            Some((0, 0, 0)),
            Some((0, 1, 0)),
            Some((0, 1, 1)),
            Some((1, 1, 1)),
        ];
        assert_eq!(plan.rows, expected);
        assert_eq!(by_expert(&routing, 1, 1).psum, [1, 2, 2]);
        let row = |receiver: u32, k: u32| vec![(10 * receiver + k + 1) as f32];
        assert_eq!(combine_by_expert(&routing, 0, 0, 1, &[2.0, 0.5], None, DType::Bf16, row), [2.0 + 6.0]);
        assert_eq!(combine_by_expert(&routing, 1, 0, 1, &[3.0, f32::NAN], None, DType::Bf16, row), [3.0]);
        // 257 / 256 lies between two BF16 numbers and goes to the even one, 1.
        let above_one = 257.0 / 256.0;
        let weights = [above_one, 0.25];
        assert_eq!(combine_by_expert(&routing, 0, 0, 1, &weights, None, DType::Bf16, row), [above_one + 3.0]);
        assert_eq!(combine_by_expert(&routing, 0, 0, 1, &weights, Some(1), DType::Bf16, row), [1.0 + 3.0]);
        // F16 has three bits more.
        for dtype in [DType::F16, DType::F32] {
            assert_eq!(
                combine_by_expert(&routing, 0, 0, 1, &weights, Some(1), dtype, row),
                [above_one + 3.0]
            );
        }
    }
}

//! The ways to pass a routing's experts to the library: by ids of either type, or by logical
//! experts that a map places.

use std::sync::Arc;

use rand::Rng;
use rand::seq::IndexedRandom;

use epoxide::Result;
use epoxide::driver::Stream;
use epoxide::{ExpertMap, Placement, TypedTensor};

use crate::oracle::{Routing, Style};

/// The ids of a case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ids {
    /// Those of its routing, as i64.
    Wide,
    /// The same as i32.
    Narrow,
    /// Logical experts as i32, and a map.
    Placed(Arc<Logical>),
}

/// Experts at any places, and the tokens' selections of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Logical {
    /// Logical experts.
    pub num_experts: u32,
    /// Entries per token.
    pub num_topk: u32,
    /// The experts of each rank.
    pub ranks: Vec<Vec<u32>>,
    /// By rank, token and entry.
    pub topk_idx: Vec<Vec<Vec<i64>>>,
}

impl Logical {
    /// Up to 3 replicas of each of some experts, on some of the ranks, and tokens that select them.
    pub fn random(rng: &mut impl Rng, tokens_per_rank: &[u32], num_topk: u32, style: Style) -> Logical {
        let num_experts = rng.random_range(1..=4 * tokens_per_rank.len() as u32 + 1);
        let topk_idx = Routing::draw(rng, tokens_per_rank, num_topk, num_experts, style);
        let mut this = Logical { num_experts, num_topk, ranks: Vec::new(), topk_idx };
        this.place(rng);
        this
    }

    /// Places the same experts elsewhere.
    pub fn place(&mut self, rng: &mut impl Rng) {
        let num_ranks = self.topk_idx.len();
        let ranks: Vec<usize> = (0..num_ranks).filter(|_| rng.random_bool(0.7)).collect();
        let ranks = if ranks.is_empty() { vec![num_ranks - 1] } else { ranks };
        self.ranks = vec![Vec::new(); num_ranks];
        for expert in 0..self.num_experts {
            for _ in 0..rng.random_range(1..=3) {
                let rank = ranks.choose(rng).expect("there are some");
                self.ranks[*rank].push(expert);
            }
        }
    }

    /// Local experts of each rank.
    pub fn local_experts(&self) -> u32 {
        self.ranks.iter().map(Vec::len).max().expect("there are ranks") as u32
    }

    /// The physical expert that an entry of a token selects, with `local_experts` on each rank:
    /// replicas take turns.
    fn physical(&self, rank: usize, token: usize, expert: i64, local_experts: u32) -> i64 {
        if expert < 0 {
            return -1;
        }
        let mut replicas = Vec::new();
        for (rank, experts) in self.ranks.iter().enumerate() {
            for (local, &here) in experts.iter().enumerate() {
                if i64::from(here) == expert {
                    replicas.push((rank * local_experts as usize + local) as i64);
                }
            }
        }
        replicas[(rank + token) % replicas.len()]
    }

    /// The routing over physical experts, where each rank has so many.
    pub fn routing(&self, local_experts: u32) -> Routing {
        let of_rank = |(rank, tokens): (usize, &Vec<Vec<i64>>)| {
            let of_token = |(token, ids): (usize, &Vec<i64>)| {
                ids.iter().map(|&id| self.physical(rank, token, id, local_experts)).collect()
            };
            tokens.iter().enumerate().map(of_token).collect()
        };
        Routing {
            num_experts: local_experts * self.ranks.len() as u32,
            num_topk: self.num_topk,
            topk_idx: self.topk_idx.iter().enumerate().map(of_rank).collect(),
        }
    }

    /// The placement.
    ///
    /// # Panics
    /// An expert has no place.
    pub fn placement(&self) -> Placement {
        Placement::new(self.num_experts, &self.ranks).expect("every expert has a place")
    }

    /// A rank's ids, on the device.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn upload(&self, stream: &Stream, rank: u32) -> Result<TypedTensor<'static, i32>> {
        upload_narrow(stream, self.num_topk, &self.topk_idx[rank as usize])
    }

    /// The map, on the device.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn upload_map(&self, stream: &Stream) -> Result<ExpertMap> {
        ExpertMap::new(stream, &self.placement())
    }
}

/// Ids of tokens as i32, on the device.
///
/// # Errors
/// Errors of the driver.
pub fn upload_narrow(stream: &Stream, num_topk: u32, ids: &[Vec<i64>]) -> Result<TypedTensor<'static, i32>> {
    let narrow: Vec<i32> = ids.iter().flatten().map(|&id| id as i32).collect();
    TypedTensor::from_host(stream, &[ids.len() as u64, num_topk.into()], &narrow)
}

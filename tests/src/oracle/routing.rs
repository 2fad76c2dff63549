//! Routings: the experts that tokens select.

use rand::Rng;
use rand::seq::SliceRandom;

/// The experts that every token of every rank selects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routing {
    /// Experts of all ranks; a multiple of the number of ranks.
    pub num_experts: u32,
    /// Entries per token.
    pub num_topk: u32,
    /// By rank, token and entry: a global expert id, or -1 for no selection.
    pub topk_idx: Vec<Vec<Vec<i64>>>,
}

/// How [`Routing::random`] draws a token's experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// The distinct experts with the best scores `|randn| + 1`, as a router gives them. Entries
    /// behind the last expert are -1.
    DistinctTopK,
    /// The same with about a third of the entries -1, and some tokens without any selection.
    WithHoles,
    /// Each entry drawn by itself, so that experts repeat in a token; some -1.
    Repeats,
    /// Most entries fall on a few experts, so that ranks receive very unequal numbers of rows.
    Skewed,
}

impl Style {
    /// All styles.
    pub const ALL: [Style; 4] = [Style::DistinctTopK, Style::WithHoles, Style::Repeats, Style::Skewed];
}

impl Routing {
    /// Draws a routing with `tokens_per_rank[rank]` tokens on each rank.
    ///
    /// # Panics
    /// Where `num_experts` is not a positive multiple of the number of ranks.
    pub fn random(
        rng: &mut impl Rng,
        tokens_per_rank: &[u32],
        num_topk: u32,
        num_experts: u32,
        style: Style,
    ) -> Routing {
        let ranks = tokens_per_rank.len() as u32;
        assert!(
            num_experts > 0 && num_experts.is_multiple_of(ranks),
            "{num_experts} experts on {ranks} ranks"
        );
        let topk_idx = Routing::draw(rng, tokens_per_rank, num_topk, num_experts, style);
        Routing { num_experts, num_topk, topk_idx }
    }

    /// Draws the selections of `tokens_per_rank[rank]` tokens on each rank, of any number of
    /// experts.
    pub fn draw(
        rng: &mut impl Rng,
        tokens_per_rank: &[u32],
        num_topk: u32,
        num_experts: u32,
        style: Style,
    ) -> Vec<Vec<Vec<i64>>> {
        // The experts that a skewed routing prefers.
        let mut favourites: Vec<i64> = (0..num_experts as i64).collect();
        favourites.shuffle(rng);
        favourites.truncate(num_experts.div_ceil(8) as usize);
        let topk = num_topk as usize;
        let mut token = || match style {
            Style::DistinctTopK => best_experts(rng, num_experts, topk),
            Style::WithHoles => {
                let mut ids = best_experts(rng, num_experts, topk);
                let chance = if rng.random_bool(0.1) { 1.0 } else { 0.3 };
                ids.iter_mut().filter(|_| rng.random_bool(chance)).for_each(|id| *id = -1);
                ids
            }
            Style::Repeats => (0..topk).map(|_| rng.random_range(-1..num_experts as i64)).collect(),
            Style::Skewed => (0..topk)
                .map(|_| match rng.random_bool(0.9) {
                    true => favourites[rng.random_range(0..favourites.len())],
                    false => rng.random_range(0..num_experts as i64),
                })
                .collect(),
        };
        tokens_per_rank.iter().map(|&tokens| (0..tokens).map(|_| token()).collect()).collect()
    }

    /// Number of ranks.
    pub fn num_ranks(&self) -> u32 {
        self.topk_idx.len() as u32
    }

    /// Experts on each rank.
    pub fn local_experts(&self) -> u32 {
        self.num_experts / self.num_ranks()
    }

    /// Tokens of a rank.
    pub fn num_tokens(&self, rank: u32) -> u32 {
        self.topk_idx[rank as usize].len() as u32
    }

    /// Tokens of the rank that has most.
    pub fn max_tokens(&self) -> u32 {
        (0..self.num_ranks()).map(|rank| self.num_tokens(rank)).max().unwrap_or(0)
    }

    /// A rank's ids, token after token, as they lie in `topk_idx`.
    pub fn flat_topk_idx(&self, rank: u32) -> Vec<i64> {
        self.topk_idx[rank as usize].concat()
    }

    /// The rank that owns an expert; `None` for -1.
    pub fn owner(&self, expert: i64) -> Option<u32> {
        u32::try_from(expert).ok().map(|expert| expert / self.local_experts())
    }

    /// Whether a token of `rank` has at least one selection that `dst` owns.
    pub fn hits(&self, rank: u32, token: u32, dst: u32) -> bool {
        self.topk_idx[rank as usize][token as usize].iter().any(|&expert| self.owner(expert) == Some(dst))
    }

    /// The number of a token's destination ranks.
    pub fn num_destinations(&self, rank: u32, token: u32) -> u32 {
        (0..self.num_ranks()).filter(|&dst| self.hits(rank, token, dst)).count() as u32
    }
}

/// The `topk` distinct experts with the best scores, best first.
fn best_experts(rng: &mut impl Rng, num_experts: u32, topk: usize) -> Vec<i64> {
    let mut scored: Vec<(f64, i64)> =
        (0..num_experts as i64).map(|id| (normal(rng).abs() + 1.0, id)).collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut ids: Vec<i64> = scored.into_iter().map(|(_, id)| id).take(topk).collect();
    ids.resize(topk, -1);
    ids
}

/// A standard normal number (Box and Muller).
fn normal(rng: &mut impl Rng) -> f64 {
    let (u, v): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    use super::*;

    #[test]
    fn styles_draw_as_described() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for style in Style::ALL {
            let routing = Routing::random(&mut rng, &[200, 0, 3, 50], 6, 16, style);
            assert_eq!((0..4).map(|rank| routing.num_tokens(rank)).collect::<Vec<_>>(), [200, 0, 3, 50]);
            let ids: Vec<i64> = routing.topk_idx.iter().flatten().flatten().copied().collect();
            assert!(ids.iter().all(|id| (-1..16).contains(id)), "{style:?}");
            let repeats = routing.topk_idx.iter().flatten().any(|token| {
                let mut ids: Vec<_> = token.iter().filter(|&&id| id >= 0).collect();
                ids.sort();
                ids.windows(2).any(|pair| pair[0] == pair[1])
            });
            assert_eq!(repeats, matches!(style, Style::Repeats | Style::Skewed), "{style:?}");
            assert_eq!(ids.contains(&-1), matches!(style, Style::WithHoles | Style::Repeats), "{style:?}");
        }
        let wide = Routing::random(&mut rng, &[1], 8, 4, Style::DistinctTopK);
        assert_eq!(wide.topk_idx[0][0][4..], [-1; 4]);
    }
}

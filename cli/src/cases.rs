//! The cases of `epoxide roundtrip`: the rows of each of its round trips.

use epoxide_testing::oracle::{Routing, Style};
use epoxide_testing::payload::rng_of;
use epoxide_testing::roundtrip::{Case, Scales};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::options::Setup;

/// Rows of a setup along a routing.
pub fn along(setup: &Setup, routing: Routing, hidden: u64) -> Case {
    let dtype = setup.dtype.dtype();
    Case {
        dtype,
        scales: Scales::columns(setup.dtype.num_scales(hidden)),
        ..Case::new(routing, (hidden * dtype.size()) as u32)
    }
}

/// The sizes of `setup` with a routing of the given style. A different `number` is a different
/// case.
pub fn full_size(setup: &Setup, number: u64, style: Style) -> Case {
    let mut rng = rng_of(&[setup.seed, number]);
    let tokens = vec![setup.tokens; setup.ranks as usize];
    let routing = Routing::random(&mut rng, &tokens, setup.topk, setup.experts, style);
    draw(&mut rng, along(setup, routing, setup.hidden))
}

/// Random sizes up to those of `setup`, another number of tokens on each rank, sometimes none.
pub fn random(setup: &Setup, number: u64) -> Case {
    let mut rng = rng_of(&[setup.seed, number]);
    let most = match rng.random_range(0..4) {
        0 => setup.tokens.min(3),
        _ => setup.tokens,
    };
    let mut tokens: Vec<u32> = (0..setup.ranks).map(|_| rng.random_range(0..=most)).collect();
    if rng.random_bool(0.3) {
        let idle = rng.random_range(0..tokens.len());
        tokens[idle] = 0;
    }
    let style = Style::ALL[rng.random_range(0..Style::ALL.len())];
    let experts = setup.ranks * rng.random_range(1..=setup.experts / setup.ranks);
    let topk = rng.random_range(1..=setup.topk);
    let unit = 16 / setup.dtype.dtype().size();
    let hidden = unit * rng.random_range(1..=setup.hidden / unit);
    let routing = Routing::random(&mut rng, &tokens, topk, experts, style);
    draw(&mut rng, along(setup, routing, hidden))
}

fn draw(rng: &mut ChaCha8Rng, case: Case) -> Case {
    let expert_alignment = [1, 1, 4, 16][rng.random_range(0..4)];
    Case { expert_alignment, seed: rng.random(), ..case }
}

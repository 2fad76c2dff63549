//! Numbers of selections, `number_selections` by itself, against a count on the host.

use std::collections::HashMap;

use proptest::prelude::*;

use epoxide::TypedTensor;
use epoxide::driver::virt::{CheckConfig, Checker, VirtConfig, VirtualGpu};
use epoxide::driver::{Kernel, Stream};
use epoxide_gpu::kernels::{NumberSelections, number_shared_bytes};
use epoxide_gpu::layout::NumberArgs;
use epoxide_testing::tier;

/// Value of numbers that are not written.
const UNTOUCHED: i32 = -7;

/// Ids of a rank's tokens, and the launch that numbers them.
#[derive(Clone, Debug)]
struct Numbering {
    /// `[tokens, num_topk]`.
    ids: Vec<i64>,
    num_topk: u32,
    num_experts: u32,
    is_narrow: bool,
    grid: u32,
    warps: u32,
    /// Seed of the schedule; check mode with odd ones.
    seed: u64,
}

impl Numbering {
    /// Selections of the same expert before each one; entries that select nothing have none.
    fn expected(&self) -> Vec<i32> {
        let mut selections = HashMap::new();
        let number = |id: &i64| {
            if !(0..self.num_experts as i64).contains(id) {
                return UNTOUCHED;
            }
            let next = selections.entry(*id).or_insert(0);
            *next += 1;
            *next - 1
        };
        self.ids.iter().map(number).collect()
    }

    /// The numbers that the kernel gives.
    fn run(&self) -> Vec<i32> {
        let checker = (self.seed % 2 == 1).then(|| Checker::new(CheckConfig::default()));
        let config = VirtConfig { schedule_seed: Some(self.seed), checker, ..VirtConfig::default() };
        let device = VirtualGpu::new(config);
        let stream = Stream::new(&device).unwrap();
        let shape = [self.ids.len() as u64];
        let wide = TypedTensor::from_host(&stream, &shape, &self.ids).unwrap();
        let narrow: Vec<i32> = self.ids.iter().map(|&id| id as i32).collect();
        let narrow = TypedTensor::from_host(&stream, &shape, &narrow).unwrap();
        let numbers = TypedTensor::from_host(&stream, &shape, &vec![UNTOUCHED; self.ids.len()]).unwrap();
        let call = NumberSelections::call(NumberArgs {
            topk_idx: if self.is_narrow { narrow.ptr() } else { wide.ptr() },
            numbers: numbers.ptr(),
            num_tokens: self.ids.len() as u32 / self.num_topk,
            num_topk: self.num_topk,
            num_experts: self.num_experts,
            narrow_ids: self.is_narrow as u32,
        });
        let threads = self.warps * 32;
        let shared = number_shared_bytes(threads, self.num_experts);
        let kernel = Kernel::shipped::<NumberSelections>(&device, shared).unwrap();
        // SAFETY: the tensors have the shapes that the arguments say.
        unsafe { stream.call(&kernel, self.grid, threads, shared, call).unwrap() };
        numbers.values(&stream).unwrap()
    }

    fn check(&self) {
        assert_eq!(self.run(), self.expected(), "{self:?}");
    }
}

/// Numbers of experts of one window, of a window and one more, and of several.
fn num_experts() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 1..=40u32, 1 => 1023..=1026u32, 1 => 2000..=2100u32, 1 => Just(5000u32)]
}

/// Ids of which many are equal, are at the borders of windows, or select nothing. Some are out of
/// range.
fn id(num_experts: u32) -> impl Strategy<Value = i64> {
    let experts = num_experts as i64;
    let border = (0..=experts / 1024, -2..=2i64)
        .prop_map(move |(window, beside)| (window * 1024 + beside).clamp(0, experts - 1));
    prop_oneof![
        4 => 0..experts,
        2 => 0..experts.min(3),
        2 => border,
        1 => Just(-1i64),
        1 => prop::sample::select(vec![experts, -2, i32::MAX as i64, i32::MIN as i64]),
    ]
}

fn numbering() -> impl Strategy<Value = Numbering> {
    let tokens = prop_oneof![1 => 0..=3usize, 3 => 0..=60usize, 1 => 100..=tier::pick(200, 600usize)];
    (num_experts(), 1..=9u32, tokens).prop_flat_map(|(num_experts, num_topk, tokens)| {
        let ids = prop::collection::vec(id(num_experts), tokens * num_topk as usize);
        let warps = prop::sample::select(vec![1u32, 2, 3, 5, 16]);
        (ids, any::<bool>(), 1..=9u32, warps, any::<u64>()).prop_map(
            move |(ids, is_narrow, grid, warps, seed)| Numbering {
                ids,
                num_topk,
                num_experts,
                is_narrow,
                grid,
                warps,
                seed,
            },
        )
    })
}

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: tier::pick(48, 500),
        max_shrink_iters: 200,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn numbers_equal_a_count_on_the_host(numbering in numbering()) {
        numbering.check();
    }
}

/// A batch of a model, on as many blocks as its dispatch has.
#[test]
fn a_batch_of_a_model() {
    let tokens = tier::pick(512, 4096);
    let ids: Vec<i64> = (0..tokens * 8).map(|entry| entry * 2_654_435_761 % 1009 % 256).collect();
    for (grid, seed) in [(24, 0), (4, 1)] {
        let ids = ids.clone();
        let shape = Numbering { ids, num_topk: 8, num_experts: 256, is_narrow: true, grid, warps: 16, seed };
        shape.check();
    }
}

/// A wide id is no expert because its low half is.
#[test]
fn wide_ids_are_compared_as_a_whole() {
    let ids = vec![1, 1 << 32 | 1, 1, i64::MIN, i64::MAX, -1 << 32, 0];
    let one = Numbering { ids, num_topk: 1, num_experts: 4, is_narrow: false, grid: 2, warps: 1, seed: 1 };
    assert_eq!(one.run(), [0, UNTOUCHED, 1, UNTOUCHED, UNTOUCHED, UNTOUCHED, 0]);
}

//! Random sequences of operations, queued without a host wait between them.

use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use epoxide::Result;
use epoxide::internal::Tuning;
use epoxide::throughput::{CachedDispatchRequest, CombineRequest, Counts, DispatchRequest};
use epoxide::{DType, Tensor, TypedTensor};
use epoxide_testing::oracle::{self, Plan, Routing, Style};
use epoxide_testing::{payload, tier};

use epoxide_testing::harness::{Rank, Setup, keep};
use epoxide_testing::roundtrip::{Case, Return};

pub const ROW: u32 = 48;
const TOPK: u32 = 3;

/// Steps of the ranks, and their expected results.
pub struct Program {
    steps: Vec<Step>,
}

enum Step {
    /// A dispatch along a new routing, and what it sends, `[rank][token]`.
    Dispatch { case: Box<Case>, x: Vec<Vec<Vec<u8>>>, plans: Vec<Plan>, exact: bool },
    /// Other rows along the last routing.
    Cached { x: Vec<Vec<Vec<u8>>>, plans: Vec<Plan> },
    /// A combine along the last routing.
    Combine(Return),
}

impl Program {
    /// Mostly the same operation several times in a row, where one could overlap the next. With
    /// `exact`, the host waits for the counts of some dispatches.
    pub fn random(
        seed: u64,
        steps: u32,
        most_tokens: u32,
        ranks: u32,
        num_channels: u32,
        exact: bool,
    ) -> Program {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut last: Option<(Box<Case>, Vec<Plan>)> = None;
        let mut kind = 0;
        let steps = (0..steps).map(|number| {
            if rng.random_bool(0.4) {
                kind = rng.random_range(0..4);
            }
            match &last {
                Some((case, plans)) if kind == 1 => {
                    Step::Cached { x: random_rows(&mut rng, &case.routing), plans: plans.clone() }
                }
                Some((case, plans)) if kind >= 2 => {
                    let dtype = if kind == 2 { DType::Bf16 } else { DType::F32 };
                    Step::Combine(Return::random(case, plans, number.into(), dtype))
                }
                _ => {
                    let tokens: Vec<u32> = (0..ranks).map(|_| rng.random_range(0..=most_tokens)).collect();
                    let style = Style::ALL[rng.random_range(0..4)];
                    let routing = Routing::random(&mut rng, &tokens, TOPK, 2 * ranks, style);
                    let x = random_rows(&mut rng, &routing);
                    let case = Box::new(Case { num_channels, seed: rng.random(), ..Case::new(routing, ROW) });
                    let plans = case.plans();
                    last = Some((case.clone(), plans.clone()));
                    Step::Dispatch { case, x, plans, exact: exact && rng.random_bool(0.2) }
                }
            }
        });
        Program { steps: steps.collect() }
    }

    /// Puts the inputs of all steps on a rank's device.
    pub fn upload(&self, rank: &Rank) -> Result<Vec<Inputs>> {
        let mine = rank.rank as usize;
        let bf16 = |rows: &[Vec<u8>]| rank.upload_rows(DType::Bf16, u64::from(ROW) / 2, rows);
        let upload = |step: &Step| match step {
            Step::Dispatch { case, x, .. } => {
                let ids = &case.routing.topk_idx[mine];
                Ok(Inputs { rows: bf16(&x[mine])?, topk_idx: Some(rank.upload_typed(TOPK as usize, ids)?) })
            }
            Step::Cached { x, .. } => Ok(Inputs { rows: bf16(&x[mine])?, topk_idx: None }),
            Step::Combine(back) => {
                let columns = u64::from(ROW) / back.dtype.size();
                Ok(Inputs { rows: rank.upload_rows(back.dtype, columns, &back.rows[mine])?, topk_idx: None })
            }
        };
        self.steps.iter().map(upload).collect()
    }

    /// Queues all steps, and copies of what each gives. `before` is called before each.
    pub fn enqueue(
        &self,
        rank: &mut Rank,
        inputs: &[Inputs],
        mut before: impl FnMut(),
    ) -> Result<Vec<Tensor<'static>>> {
        let mut handle = None;
        let mut place = rank.place()?;
        let mut kept = Vec::new();
        for (step, inputs) in self.steps.iter().zip(inputs) {
            before();
            // Outputs are dropped here, with the work still queued.
            let copy = match (step, &handle) {
                (Step::Dispatch { case, exact, .. }, _) => {
                    let topk_idx = inputs.topk_idx.as_ref().expect("a dispatch has ids");
                    let layout = rank.layout(topk_idx, case.routing.num_experts)?;
                    let counts = if *exact { Counts::Exact } else { rank.on_device() };
                    let request = DispatchRequest::new(&inputs.rows, &layout).counts(counts);
                    let output = rank.dispatch(&mut place, request)?;
                    handle = Some(output.handle);
                    keep(&rank.stream, &output.recv_x, output.recv_x.rows())?
                }
                (Step::Cached { .. }, Some(handle)) => {
                    let request = CachedDispatchRequest::new(&inputs.rows, handle);
                    let output = rank.dispatch_cached(&mut place, request)?;
                    keep(&rank.stream, &output.recv_x, output.recv_x.rows())?
                }
                (Step::Combine(_), Some(handle)) => {
                    let output = rank.combine(CombineRequest::new(&inputs.rows, handle))?;
                    keep(&rank.stream, &output.combined_x, output.combined_x.rows())?
                }
                (_, None) => unreachable!("a program begins with a dispatch"),
            };
            kept.push(copy);
        }
        Ok(kept)
    }

    /// Compares what was kept; gives all of it.
    pub fn check(&self, rank: &mut Rank, kept: &[Tensor]) -> Result<Vec<u8>> {
        let mine = rank.rank as usize;
        let mut all = Vec::new();
        for (number, (step, kept)) in self.steps.iter().zip(kept).enumerate() {
            let (what, want) = match step {
                Step::Dispatch { x, plans, .. } => ("dispatch", oracle::recv_rows(&plans[mine], x)),
                Step::Cached { x, plans } => ("cached dispatch", oracle::recv_rows(&plans[mine], x)),
                Step::Combine(back) => ("combine", back.sums[mine].clone()),
            };
            let mut got = rank.row_bytes(kept)?;
            // All of the pool was copied if the host has no count.
            got.truncate(want.len());
            rank.equal(&format!("rows of step {number}, a {what},"), &got, &want);
            all.extend(got.concat());
        }
        Ok(all)
    }
}

/// A step's inputs on a rank's device.
pub struct Inputs {
    rows: Tensor<'static>,
    topk_idx: Option<TypedTensor<'static, i64>>,
}

fn random_rows(rng: &mut ChaCha8Rng, routing: &Routing) -> Vec<Vec<Vec<u8>>> {
    let tokens: Vec<u32> = (0..routing.num_ranks()).map(|rank| routing.num_tokens(rank)).collect();
    payload::distinct_rows(rng, &tokens, ROW as usize)
}

#[test]
fn many_operations_without_a_host_wait() {
    let program = Program::random(1, tier::pick(25, 200), 12, 4, 2, false);
    run(&Setup::new(4, 2, 12, ROW.into()), &program);
}

#[test]
fn operations_that_wait_for_counts_between_those_that_do_not() {
    let program = Program::random(2, tier::pick(20, 100), 9, 3, 1, true);
    run(&Setup::new(3, 1, 9, ROW.into()), &program);
}

#[test]
fn operations_with_the_shortest_rings() {
    let tuning = Tuning {
        dispatch_warps: 1,
        dispatch_stages: 2,
        dispatch_claiming_blocks: 1,
        combine_warps: 1,
        combine_slots: 2,
        ..Tuning::default()
    };
    let program = Program::random(3, 60, 40, 2, 1, false);
    for seed in tier::sample([None, Some(1), Some(2)]) {
        run(&Setup::new(2, 1, 40, ROW.into()).tuning(tuning).schedule_seed(seed), &program);
    }
}

/// On threads, some of which dawdle.
fn run(setup: &Setup, program: &Program) {
    setup.run(|rank| {
        let inputs = program.upload(rank)?;
        let mut rng = ChaCha8Rng::seed_from_u64(rank.rank.into());
        let kept = program.enqueue(rank, &inputs, || {
            if rng.random_bool(0.1) {
                std::thread::sleep(Duration::from_micros(rng.random_range(0..2000)));
            }
        })?;
        rank.outcome()?;
        program.check(rank, &kept)
    });
}

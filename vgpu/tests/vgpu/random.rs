//! Random programs with guards, divergent branches and loops, against a scalar interpreter written
//! here. Its targets are register allocation, reconvergence, and the partial-mask paths.

use epoxide_vgpu::{DeviceConfig, Module, for_each_seed};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::common::*;

const REGISTERS: usize = 12;

#[derive(Clone, Copy, Debug)]
enum Step {
    /// `d = a op b`, under `p` if `Some((p, negated))`.
    Op { op: usize, d: usize, a: usize, b: usize, guard: Option<(usize, bool)> },
    /// `p = a < b`
    Compare { p: usize, a: usize, b: usize },
    /// Forward jump, under a predicate.
    Jump { to: usize, p: usize, negated: bool },
    /// Back to `to`, as long as the counter, which only this step changes, is below a limit that
    /// differs by lane.
    Loop { to: usize, counter: usize },
}

type Function = fn(u32, u32) -> u32;

const OPS: [(&str, Function); 5] = [
    ("add.u32", u32::wrapping_add),
    ("sub.u32", u32::wrapping_sub),
    ("mul.lo.u32", u32::wrapping_mul),
    ("xor.b32", |a, b| a ^ b),
    ("shf.l.wrap.b32", |a, b| a.rotate_left(b)),
];

fn program(rng: &mut ChaCha8Rng) -> Vec<Step> {
    let len = rng.random_range(10..40);
    let mut loops = 0;
    (0..len)
        .map(|i| match rng.random_range(0..10) {
            0 => Step::Compare { p: rng.random_range(0..4), a: register(rng), b: register(rng) },
            1 => Step::Jump {
                to: rng.random_range(i + 1..=len),
                p: rng.random_range(0..4),
                negated: rng.random(),
            },
            2 if i > 2 && loops < 2 => {
                loops += 1;
                Step::Loop { to: rng.random_range(0..i), counter: loops - 1 }
            }
            _ => {
                let guard = rng.random_bool(0.3).then(|| (rng.random_range(0..4), rng.random()));
                let op = rng.random_range(0..OPS.len());
                Step::Op { op, d: register(rng), a: register(rng), b: register(rng), guard }
            }
        })
        .collect()
}

fn register(rng: &mut ChaCha8Rng) -> usize {
    rng.random_range(0..REGISTERS)
}

fn bang(negated: bool) -> &'static str {
    if negated { "!" } else { "" }
}

fn ptx(steps: &[Step]) -> String {
    let mut body =
        String::from("mov.u32 %r30, 0; mov.u32 %r31, 0; and.b32 %r32, %r40, 3; add.u32 %r32, %r32, 1;\n");
    // Registers hold poison at first.
    (0..4).for_each(|p| body += &format!("setp.ne.u32 %p{p}, 0, 0;\n"));
    for i in 0..REGISTERS {
        body +=
            &format!("mad.lo.u32 %r{i}, %r40, {}, {};\n", 2654435761u32.wrapping_mul(i as u32 + 1), i * i);
    }
    for (i, step) in steps.iter().enumerate() {
        body += &format!("L{i}: ");
        body += &match *step {
            Step::Op { op, d, a, b, guard } => {
                let guard = guard.map_or(String::new(), |(p, n)| format!("@{}%p{p} ", bang(n)));
                let operands = if OPS[op].0.starts_with("shf") {
                    format!("%r{a}, %r{a}, %r{b}")
                } else {
                    format!("%r{a}, %r{b}")
                };
                format!("{guard}{} %r{d}, {operands};\n", OPS[op].0)
            }
            Step::Compare { p, a, b } => format!("setp.lt.u32 %p{p}, %r{a}, %r{b};\n"),
            Step::Jump { to, p, negated } => format!("@{}%p{p} bra L{to};\n", bang(negated)),
            Step::Loop { to, counter } => format!(
                "add.u32 %r{c}, %r{c}, 1; setp.lt.u32 %p9, %r{c}, %r32; @%p9 bra L{to};\n",
                c = 30 + counter
            ),
        };
    }
    body += &format!("L{}: mov.u32 %r20, 0;\n", steps.len());
    for i in 0..REGISTERS {
        body += &format!("mad.lo.u32 %r20, %r20, 31, %r{i};\n");
    }
    kernel("", &(body + "st.global.u32 [%rd42], %r20;"))
}

fn expected(steps: &[Step], lane: u32) -> u64 {
    let mut r: Vec<u32> = (0..REGISTERS as u32)
        .map(|i| lane.wrapping_mul(2654435761u32.wrapping_mul(i + 1)).wrapping_add(i * i))
        .collect();
    let (mut p, mut counters, limit, mut at) = ([false; 4], [0u32; 2], (lane & 3) + 1, 0);
    while at < steps.len() {
        let mut next = at + 1;
        match steps[at] {
            Step::Op { op, d, a, b, guard } => {
                if guard.is_none_or(|(g, negated)| p[g] != negated) {
                    r[d] = OPS[op].1(r[a], r[b]);
                }
            }
            Step::Compare { p: q, a, b } => p[q] = r[a] < r[b],
            Step::Jump { to, p: q, negated } => {
                if p[q] != negated {
                    next = to;
                }
            }
            Step::Loop { to, counter } => {
                counters[counter] += 1;
                if counters[counter] < limit {
                    next = to;
                }
            }
        }
        at = next;
    }
    r.iter().fold(0u32, |h, v| h.wrapping_mul(31).wrapping_add(*v)).into()
}

#[test]
fn random_programs() {
    for_each_seed(tier(400, 4000), |seed| {
        let steps = program(&mut ChaCha8Rng::seed_from_u64(seed));
        let text = ptx(&steps);
        let want: Vec<u64> = (0..48).map(|lane| expected(&steps, lane)).collect();
        for dev in
            [DeviceConfig::default(), DeviceConfig { schedule_seed: Some(seed), ..DeviceConfig::default() }]
        {
            let mut run = Run::new(&text, &[0; 48], launch(1, 48), &dev);
            run.finish().unwrap_or_else(|f| panic!("seed {seed}: {f}\n{text}"));
            assert_eq!(run.words(), want, "seed {seed}\n{text}");
        }
    });
}

#[test]
fn a_long_chain_of_registers_needs_few_slots() {
    let mut body = ".reg .b32 %c<1000>; mov.u32 %c0, %r40;\n".to_string();
    for i in 1..1000 {
        body += &format!("add.u32 %c{i}, %c{}, 7;\n", i - 1);
    }
    body += "st.global.u32 [%rd42], %c999;";
    let module = Module::parse(&kernel("", &body)).unwrap();
    let [r32, r64, pred] = module.kernel("k").unwrap().register_slots();
    assert!(r32 < 10 && r64 < 10 && pred < 4, "{r32} {r64} {pred}");
    assert_eq!(run_body("", &body, 3, &[0; 3]), [6993, 6994, 6995]);
}

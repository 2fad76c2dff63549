//! `mma.sync` of f64 and of single bits, against the places of the PTX manual's tables, section "Matrix
//! multiply-accumulate operation using mma instruction".

use epoxide_vgpu::supported_opcode;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::common::{per_lane, reject, tier};

/// The words of D, of a product whose registers of A, B and C have 32 lanes each, of so many bits.
fn run(opcode: &str, bits: u32, [a, b, c]: [&[Vec<u64>]; 3]) -> Vec<Vec<u64>> {
    let inputs: Vec<Vec<u64>> = [a, b, c].into_iter().flatten().cloned().collect();
    let name = if bits == 64 { "%rd" } else { "%r" };
    let list = |before: usize, n: usize| {
        (before + 1..=before + n).map(|r| format!("{name}{r}")).collect::<Vec<_>>().join(", ")
    };
    let (of_a, of_b, of_c) = (list(0, a.len()), list(a.len(), b.len()), list(a.len() + b.len(), c.len()));
    let one = |at: usize| {
        let d: Vec<String> =
            (0..c.len()).map(|i| format!("{name}{}", if i == at { 0 } else { 24 + i })).collect();
        let d = d.join(", ");
        per_lane(&format!("{opcode} {{{d}}}, {{{of_a}}}, {{{of_b}}}, {{{of_c}}};"), 32, &inputs)
    };
    (0..c.len()).map(one).collect()
}

/// Row and column in D of element `i` of a lane.
fn place_d(lane: usize, i: usize) -> (usize, usize) {
    (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2)
}

/// Row and column in A of element `i` of a lane, of f64.
fn place_a(rows: usize, k: usize, lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane / 4, lane % 4);
    match (rows, k) {
        (8, 4) => (group, thread),
        (16, 4) => (if i == 0 { group } else { group + 8 }, thread),
        (16, 8) => {
            (if i.is_multiple_of(2) { group } else { group + 8 }, if i < 2 { thread } else { thread + 4 })
        }
        (16, 16) if i.is_multiple_of(2) => (group, i * 2 + thread),
        (16, 16) => (group + 8, i * 2 - 2 + thread),
        other => panic!("{other:?}"),
    }
}

#[test]
fn products_of_f64_are_chains_of_fused_multiply_adds() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for (rows, k) in [(8usize, 4usize), (16, 4), (16, 8), (16, 16)] {
        for _ in 0..tier(2, 20) {
            let mut number = || {
                let (mantissa, exponent) = (rng.random_range(-1i64 << 52..1 << 52), rng.random_range(-60..9));
                mantissa as f64 * 2f64.powi(exponent)
            };
            let mut matrix = |rows: usize, columns: usize| -> Vec<Vec<f64>> {
                (0..rows).map(|_| (0..columns).map(|_| number()).collect()).collect()
            };
            let (a, b, c) = (matrix(rows, k), matrix(k, 8), matrix(rows, 8));
            let registers = |n: usize, value: &dyn Fn(usize, usize) -> f64| -> Vec<Vec<u64>> {
                (0..n).map(|i| (0..32).map(|lane| value(lane, i).to_bits()).collect()).collect()
            };
            let of_a = registers(rows * k / 32, &|lane, i| {
                let (row, column) = place_a(rows, k, lane, i);
                a[row][column]
            });
            let of_b = registers(k / 4, &|lane, i| b[lane % 4 + 4 * i][lane / 4]);
            let of_c = registers(rows / 4, &|lane, i| {
                let (row, column) = place_d(lane, i);
                c[row][column]
            });
            for round in ["", ".rn"] {
                let opcode = format!("mma.sync.aligned.m{rows}n8k{k}.row.col{round}.f64.f64.f64.f64");
                let d = run(&opcode, 64, [&of_a, &of_b, &of_c]);
                for (i, d) in d.iter().enumerate() {
                    for (lane, d) in d.iter().enumerate() {
                        let (row, column) = place_d(lane, i);
                        let sum = (0..k).fold(c[row][column], |sum, k| a[row][k].mul_add(b[k][column], sum));
                        assert_eq!(*d, sum.to_bits(), "{opcode}: {row}, {column}");
                    }
                }
            }
        }
    }
}

#[test]
fn products_of_f64_round_as_they_say() {
    // One third of the last bit above 1, and below it.
    let (one, third) = (vec![1f64.to_bits(); 32], vec![(2f64.powi(-52) / 3.0).to_bits(); 32]);
    let zero = vec![0; 32];
    // Only the first product counts: k is the lane of its four.
    let first: Vec<u64> = (0..32).map(|lane| if lane % 4 == 0 { one[0] } else { 0 }).collect();
    let sums = |round: &str, minus: bool| {
        let opcode = format!("mma.sync.aligned.m8n8k4.row.col{round}.f64.f64.f64.f64");
        let b: Vec<u64> = third.iter().map(|bits| bits | u64::from(minus) << 63).collect();
        run(&opcode, 64, [std::slice::from_ref(&first), &[b], &[one.clone(), zero.clone()]])[0][0]
    };
    let above = one[0] + 1;
    let below = one[0] - 1;
    assert_eq!([".rn", ".rz", ".rm", ".rp"].map(|r| sums(r, false)), [one[0], one[0], one[0], above]);
    assert_eq!([".rn", ".rz", ".rm", ".rp"].map(|r| sums(r, true)), [below, below, below, one[0]]);
}

#[test]
fn products_of_bits_count_what_is_left() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    for (rows, k) in [(8usize, 128usize), (16, 128), (16, 256)] {
        for xor in [false, true] {
            let mut bits = |rows: usize, columns: usize| -> Vec<Vec<bool>> {
                (0..rows).map(|_| (0..columns).map(|_| rng.random()).collect()).collect()
            };
            let (a, b) = (bits(rows, k), bits(k, 8));
            let c: Vec<Vec<i32>> =
                (0..rows).map(|_| (0..8).map(|_| rng.random_range(-99..99)).collect()).collect();
            let word = |bit: &dyn Fn(usize) -> bool| (0..32).fold(0, |word, i| word | u64::from(bit(i)) << i);
            let registers = |n: usize, value: &dyn Fn(usize, usize) -> u64| -> Vec<Vec<u64>> {
                (0..n).map(|r| (0..32).map(|lane| value(lane, r)).collect()).collect()
            };
            let of_a = registers(rows * k / 1024, &|lane, r| {
                word(&|i| {
                    let i = i + 32 * r;
                    // Rows and columns of elements 0 to 127 of a lane.
                    let (row, column) = match (rows, k) {
                        (8, 128) => (lane / 4, lane % 4 * 32 + (i & 31)),
                        (16, 128) => (lane / 4 + if i < 32 { 0 } else { 8 }, lane % 4 * 32 + (i & 31)),
                        _ => (
                            lane / 4 + if i < 32 || (64..96).contains(&i) { 0 } else { 8 },
                            lane % 4 * 32 + (i & 31) + if i < 64 { 0 } else { 128 },
                        ),
                    };
                    a[row][column]
                })
            });
            let of_b = registers(k / 128, &|lane, r| word(&|i| b[lane % 4 * 32 + i + 128 * r][lane / 4]));
            let of_c = registers(rows / 4, &|lane, r| {
                let (row, column) = place_d(lane, r);
                u64::from(c[row][column] as u32)
            });
            let op = if xor { "xor" } else { "and" };
            let opcode = format!("mma.sync.aligned.m{rows}n8k{k}.row.col.s32.b1.b1.s32.{op}.popc");
            for (i, d) in run(&opcode, 32, [&of_a, &of_b, &of_c]).iter().enumerate() {
                for (lane, d) in d.iter().enumerate() {
                    let (row, column) = place_d(lane, i);
                    let left = (0..k).filter(|&k| match xor {
                        true => a[row][k] != b[k][column],
                        false => a[row][k] && b[k][column],
                    });
                    let sum = c[row][column] + left.count() as i32;
                    assert_eq!(*d, u64::from(sum as u32), "{opcode}: {row}, {column}");
                }
            }
        }
    }
}

#[test]
fn what_is_no_product_of_these_is_refused() {
    for opcode in [
        "mma.sync.aligned.m16n8k32.row.col.f64.f64.f64.f64",
        "mma.sync.aligned.m16n8k8.row.row.f64.f64.f64.f64",
        "mma.sync.aligned.m16n8k8.row.col.satfinite.f64.f64.f64.f64",
        "mma.sync.aligned.m8n8k128.row.col.s32.b1.b1.s32.or.popc",
        "mma.sync.aligned.m8n8k128.row.col.s32.b1.b1.s32",
        "mma.sync.aligned.m16n8k64.row.col.s32.b1.b1.s32.and.popc",
    ] {
        assert!(!supported_opcode(opcode), "{opcode}");
    }
    let error = reject(
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%rd1, %rd2}, {%rd1, %rd2}, {%rd1}, {%rd1, %rd2};",
    );
    assert!(error.message.contains("2 registers given, 1 expected"), "{error}");
    let error =
        reject("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%r1, %r2}, {%rd1}, {%rd1}, {%rd1, %rd2};");
    assert!(error.message.contains("64 bits are needed"), "{error}");
}

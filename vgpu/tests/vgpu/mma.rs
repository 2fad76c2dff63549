//! `mma.sync` against a host oracle. The places of the elements in the registers are those of the
//! PTX manual, section "Matrix multiply-accumulate operation using mma instruction", written down
//! element by element as in its tables.

use epoxide_vgpu::{CheckConfig, FaultKind, GridConfig, Machine, MachineError, Module, supported_opcode};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::common::{device, kernel, launch, per_lane, reject, run_body, tier};
use crate::numbers::{BF16, E4M3, E5M2, F16, F32, Matrix, S8, S32, TF32, Type, U8, cut_off, matrix};

/// A product: `[rows, k]` by `[k, 8]`.
struct Shape {
    rows: usize,
    k: usize,
    a: Type,
    b: Type,
    sum: Type,
    saturates: bool,
}

fn shape(rows: usize, k: usize, a: Type, b: Type, sum: Type) -> Shape {
    Shape { rows, k, a, b, sum, saturates: false }
}

/// Row and column in A of element `i` of a lane.
fn place_a(shape: &Shape, group: usize, thread: usize, i: usize) -> (usize, usize) {
    match (shape.rows, shape.k, shape.a.bytes) {
        (8, 16, 1) => (group, thread * 4 + i),
        (16, 8, 2) => (if i < 2 { group } else { group + 8 }, thread * 2 + (i & 1)),
        (16, 16, 2) => (
            if matches!(i, 0 | 1 | 4 | 5) { group } else { group + 8 },
            if i < 4 { thread * 2 + (i & 1) } else { thread * 2 + (i & 1) + 8 },
        ),
        (16, 4, 4) => (if i == 0 { group } else { group + 8 }, thread),
        (16, 8, 4) => {
            (if matches!(i, 0 | 2) { group } else { group + 8 }, if i < 2 { thread } else { thread + 4 })
        }
        (16, 16, 1) => (if i < 4 { group } else { group + 8 }, thread * 4 + (i & 3)),
        (16, 32, 1) => (
            if matches!(i, 0..4 | 8..12) { group } else { group + 8 },
            if i < 8 { thread * 4 + (i & 3) } else { thread * 4 + (i & 3) + 16 },
        ),
        other => panic!("{other:?}"),
    }
}

/// Row and column in B.
fn place_b(shape: &Shape, group: usize, thread: usize, i: usize) -> (usize, usize) {
    let row = match (shape.k, shape.b.bytes) {
        (16, 1) => thread * 4 + i,
        (8, 2) => thread * 2 + i,
        (16, 2) => {
            if i < 2 {
                thread * 2 + (i & 1)
            } else {
                thread * 2 + (i & 1) + 8
            }
        }
        (4, 4) => thread,
        (8, 4) => {
            if i == 0 {
                thread
            } else {
                thread + 4
            }
        }
        (32, 1) => {
            if i < 4 {
                thread * 4 + (i & 3)
            } else {
                thread * 4 + (i & 3) + 16
            }
        }
        other => panic!("{other:?}"),
    };
    (row, group)
}

/// Row and column in C and D.
fn place_d(group: usize, thread: usize, i: usize) -> (usize, usize) {
    (if i < 2 { group } else { group + 8 }, thread * 2 + (i & 1))
}

/// The registers of a matrix, 32 lanes each.
fn registers(
    matrix: &Matrix,
    ty: Type,
    elements: usize,
    place: impl Fn(usize, usize, usize) -> (usize, usize),
) -> Vec<[u32; 32]> {
    let each = 4 / ty.bytes;
    let mut registers = vec![[0; 32]; elements / each];
    for i in 0..elements {
        for (lane, register) in registers[i / each].iter_mut().enumerate() {
            let (row, column) = place(lane / 4, lane % 4, i);
            *register |= (ty.bits)(matrix[row][column]) << (8 * ty.bytes * (i % each));
        }
    }
    registers
}

impl Shape {
    fn opcode(&self) -> String {
        let Shape { rows, k, a, b, sum, saturates } = self;
        let saturates = if *saturates { ".satfinite" } else { "" };
        format!("mma.sync.aligned.m{rows}n8k{k}.row.col{saturates}.{0}.{1}.{2}.{0}", sum.name, a.name, b.name)
    }

    /// The kernel: registers of A, B and C from the buffer, and those of D behind them.
    fn module(&self, a: usize, b: usize, c: usize) -> Module {
        let list = |from: usize, n: usize| {
            let names: Vec<_> = (from..from + n).map(|r| format!("%r{r}")).collect();
            format!("{{{}}}", names.join(", "))
        };
        let all = a + b + c;
        let loads: String =
            (0..all).map(|r| format!("ld.global.u32 %r{r}, [%rd42+{}];\n", 256 * r)).collect();
        // D in registers of A, which are read.
        let stores: String =
            (0..c).map(|r| format!("st.global.u32 [%rd42+{}], %r{r};\n", 256 * (all + r))).collect();
        let mma =
            format!("{} {}, {}, {}, {};", self.opcode(), list(0, c), list(0, a), list(a, b), list(a + b, c));
        let text = kernel("", &format!("{loads}{mma}\n{stores}"));
        Module::parse(&text).unwrap_or_else(|e| panic!("{e}"))
    }

    /// The bits of D.
    fn run(&self, a: &Matrix, b: &Matrix, c: &Matrix, check: Option<CheckConfig>) -> Vec<Vec<u32>> {
        let sums = self.rows * 8 / 32;
        let of_a = registers(a, self.a, self.rows * self.k / 32, |g, t, i| place_a(self, g, t, i));
        let of_b = registers(b, self.b, self.k * 8 / 32, |g, t, i| place_b(self, g, t, i));
        let of_c = registers(c, self.sum, sums, place_d);
        let module = self.module(of_a.len(), of_b.len(), of_c.len());
        let words: Vec<u64> =
            of_a.iter().chain(&of_b).chain(&of_c).chain(&of_c).flatten().map(|&v| v.into()).collect();
        let mut machine = Machine::with_config(1, device(3), check);
        let buf = machine.upload(0, "buf", &words).unwrap();
        machine.launch_with(0, &module, "k", launch(1, 32), &[&buf]).unwrap();
        machine.run().unwrap();
        let words = buf.download().unwrap();
        let out = &words[words.len() - 32 * of_c.len()..];
        let each = 4 / self.sum.bytes;
        let mut d = vec![vec![0; 8]; self.rows];
        for lane in 0..32 {
            for i in 0..sums {
                let (row, column) = place_d(lane / 4, lane % 4, i);
                let register = out[i / each * 32 + lane] as u32;
                let bits = register >> (8 * self.sum.bytes * (i % each));
                d[row][column] = if self.sum.bytes == 2 { bits & 0xffff } else { bits };
            }
        }
        d
    }

    /// The sums, each in the order of k in double precision.
    fn exact(&self, a: &Matrix, b: &Matrix, c: &Matrix) -> Matrix {
        let sum = |row: usize, column: usize| {
            (0..self.k).fold(c[row][column], |sum, k| sum + a[row][k] * b[k][column])
        };
        (0..self.rows).map(|row| (0..8).map(|column| sum(row, column)).collect()).collect()
    }
}

fn all_shapes() -> Vec<Shape> {
    let mut shapes = vec![
        shape(16, 8, F16, F16, F32),
        shape(16, 16, F16, F16, F32),
        shape(16, 8, F16, F16, F16),
        shape(16, 16, F16, F16, F16),
        shape(16, 8, BF16, BF16, F32),
        shape(16, 16, BF16, BF16, F32),
        shape(16, 4, TF32, TF32, F32),
        shape(16, 8, TF32, TF32, F32),
        shape(16, 32, E4M3, E5M2, F32),
        shape(16, 32, E5M2, E4M3, F16),
        shape(16, 16, E4M3, E4M3, F32),
    ];
    for (a, b) in [(S8, S8), (U8, S8), (S8, U8), (U8, U8)] {
        shapes.push(shape(8, 16, a, b, S32));
        shapes.push(shape(16, 16, a, b, S32));
        shapes.push(shape(16, 32, a, b, S32));
    }
    shapes
}

#[test]
fn products_of_small_whole_numbers_are_exact() {
    // Whole numbers up to 6 and sums up to 2048 are exact in all of the types.
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for shape in all_shapes() {
        let name = shape.opcode();
        assert!(supported_opcode(&name), "{name}");
        for check in [None, Some(CheckConfig::default())] {
            for _ in 0..tier(2, 20) {
                let mut whole = |ty: Type, most: i32| {
                    f64::from(rng.random_range(if ty.name == "u8" { 0 } else { -most }..=most))
                };
                let a = matrix(shape.rows, shape.k, || whole(shape.a, 6));
                let b = matrix(shape.k, 8, || whole(shape.b, 6));
                let c = matrix(shape.rows, 8, || whole(S32, 500));
                let expected: Vec<Vec<u32>> = shape
                    .exact(&a, &b, &c)
                    .into_iter()
                    .map(|row| row.into_iter().map(shape.sum.bits).collect())
                    .collect();
                assert_eq!(shape.run(&a, &b, &c, check), expected, "{name}");
            }
        }
    }
}

#[test]
fn sums_are_cut_off_as_by_an_h200() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    for ty in [F16, BF16, TF32] {
        for k in if ty.bytes == 4 { [4, 8] } else { [8, 16] } {
            let shape = shape(16, k, ty, ty, F32);
            // Numbers of 8 significant bits, which all types have, over many powers of 2.
            let mut number = || {
                let (mantissa, exponent) = (rng.random_range(-255..=255), rng.random_range(-12..4));
                f64::from(mantissa) * 2f64.powi(exponent)
            };
            let (a, b) = (matrix(16, k, &mut number), matrix(k, 8, &mut number));
            let c = matrix(16, 8, &mut number);
            let sum = |row: usize, column: usize| {
                let products: Vec<_> = (0..k).map(|at| [a[row][at], b[at][column]]).collect();
                cut_off(c[row][column], &products)
            };
            let expected: Vec<Vec<u32>> =
                (0..16).map(|row| (0..8).map(|column| sum(row, column)).collect()).collect();
            assert_eq!(shape.run(&a, &b, &c, None), expected, "{}", shape.opcode());
        }
    }
}

#[test]
fn integer_sums_wrap_or_saturate() {
    for saturates in [false, true] {
        let shape = Shape { saturates, ..shape(16, 32, U8, U8, S32) };
        let (a, b) = (matrix(16, 32, || 255.0), matrix(32, 8, || 255.0));
        let c = matrix(16, 8, || f64::from(i32::MAX) - 3.0);
        let sum = i64::from(i32::MAX) - 3 + 32 * 255 * 255;
        let expected = if saturates { i32::MAX as u32 } else { sum as u32 };
        assert_eq!(shape.run(&a, &b, &c, None), vec![vec![expected; 8]; 16]);
    }
}

#[test]
fn special_numbers_go_through() {
    let shape = shape(16, 16, F16, F16, F32);
    let (mut a, b) = (matrix(16, 16, || 1.0), matrix(16, 8, || 1.0));
    let c = matrix(16, 8, || 0.0);
    (a[3][7], a[4][2], a[5][0], a[5][1]) = (f64::INFINITY, f64::NAN, f64::INFINITY, f64::NEG_INFINITY);
    // The smallest f16, which is no normal number, counts.
    a[6] = vec![2f64.powi(-24); 16];
    let d = shape.run(&a, &b, &c, None);
    assert_eq!(d[3], [f32::INFINITY.to_bits(); 8]);
    assert_eq!([d[4][0], d[5][7]], [0x7fff_ffff; 2]);
    assert_eq!(d[6], [(16.0 * 2f32.powi(-24)).to_bits(); 8]);
}

#[test]
fn constants_and_unused_results_stand_in_vectors() {
    // The form that FlashInfer uses: two sums begin with 0, and two are unused.
    let body = "mov.f32 %r1, 0f40000000; mov.b32 %r2, 0x3c003c00; mov.f32 %r5, 0f7fc00000;
        mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r3, _, %r5, _}, {%r2, %r2}, {%r2}, {%r1, 0., 1.5, 0.};
        cvt.u64.u32 %rd1, %r3; cvt.u64.u32 %rd2, %r5; shl.b64 %rd2, %rd2, 32; or.b64 %rd1, %rd1, %rd2;
        st.global.u64 [%rd42], %rd1;";
    let expected = u64::from(10f32.to_bits()) | u64::from(9.5f32.to_bits()) << 32;
    assert_eq!(run_body("", body, 32, &[0; 32]), [expected; 32]);
}

#[test]
fn every_lane_takes_part() {
    let shape = shape(16, 8, BF16, BF16, F32);
    let module = shape.module(2, 1, 4);
    let run = |threads, check| {
        let mut machine = Machine::with_config(1, device(1), check);
        let buf = machine.upload(0, "buf", &[0u64; 32 * 11]).unwrap();
        machine.launch_with(0, &module, "k", GridConfig::new(1, threads, 0), &[&buf]).unwrap();
        machine.run()
    };
    run(32, Some(CheckConfig::default())).unwrap();
    for check in [Some(CheckConfig::default()), None] {
        let Err(MachineError::Fault(fault)) = run(16, check) else { panic!("passes") };
        assert!(matches!(fault.kind, FaultKind::AbsentMembers { absent: 0xffff_0000, .. }), "{fault}");
    }
}

#[test]
fn what_is_no_product_is_refused() {
    for opcode in [
        "mma.sync.aligned.m16n8k16.row.row.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16",
        "mma.sync.aligned.m16n8k16.row.col.satfinite.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f16",
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f32",
        "mma.sync",
    ] {
        assert!(!supported_opcode(opcode), "{opcode}");
    }
    let registers = |n: usize| format!("{{{}}}", vec!["%r1"; n].join(", "));
    for (counts, what) in
        [([4, 3, 2, 4], "3 registers given, 4 expected"), ([4, 4, 2, 5], "5 registers given")]
    {
        let operands: Vec<_> = counts.iter().map(|&n| registers(n)).collect();
        let error =
            reject(&format!("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {};", operands.join(", ")));
        assert!(error.message.contains(what), "{error}");
    }
}

#[test]
fn satfinite_may_stand_behind_the_types() {
    let ahead = "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.u8.u8.s32";
    assert!(
        supported_opcode(ahead)
            && supported_opcode(&format!("{}.satfinite", ahead.replace(".satfinite", "")))
    );
    assert!(!supported_opcode("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32.satfinite"));
}

/// Elements of 4 bits, at the places of the manual's tables for `m8n8k32`, `m16n8k32` and
/// `m16n8k64`.
#[test]
fn products_of_4_bits() {
    let mut rng = ChaCha8Rng::seed_from_u64(9);
    let values = |signed: bool| if signed { -8..8 } else { 0..16 };
    for (rows, k) in [(8usize, 32usize), (16, 32), (16, 64)] {
        for (of_a, of_b) in [(false, false), (false, true), (true, false), (true, true)] {
            let a: Vec<Vec<i32>> =
                (0..rows).map(|_| (0..k).map(|_| rng.random_range(values(of_a))).collect()).collect();
            let b: Vec<Vec<i32>> =
                (0..k).map(|_| (0..8).map(|_| rng.random_range(values(of_b))).collect()).collect();
            let c: Vec<Vec<i32>> =
                (0..rows).map(|_| (0..8).map(|_| rng.random_range(-99..99)).collect()).collect();
            let eight = |of: &dyn Fn(usize) -> i32| {
                (0..8).fold(0, |word, at| word | u64::from(of(at) as u32 & 15) << (4 * at))
            };
            // Registers of 32 lanes: of A, of B, of C.
            let mut inputs: Vec<Vec<u64>> = vec![];
            for register in 0..rows * k / 256 {
                let (below, right) = if rows == 16 { (register % 2 * 8, register / 2 * 32) } else { (0, 0) };
                inputs.push(
                    (0..32).map(|lane| eight(&|at| a[lane / 4 + below][lane % 4 * 8 + at + right])).collect(),
                );
            }
            for register in 0..k / 32 {
                let below = register * 32;
                inputs
                    .push((0..32).map(|lane| eight(&|at| b[lane % 4 * 8 + at + below][lane / 4])).collect());
            }
            for register in 0..rows / 4 {
                let (below, column) = (register / 2 * 8, register % 2);
                let of = |lane: usize| c[lane / 4 + below][lane % 4 * 2 + column] as u32;
                inputs.push((0..32).map(|lane| of(lane).into()).collect());
            }
            let list = |from: usize, n: usize| {
                let names: Vec<_> = (from..from + n).map(|r| format!("%r{r}")).collect();
                format!("{{{}}}", names.join(", "))
            };
            let (na, nb, nc) = (rows * k / 256, k / 32, rows / 4);
            let name = |signed| if signed { "s4" } else { "u4" };
            let opcode =
                format!("mma.sync.aligned.m{rows}n8k{k}.row.col.s32.{}.{}.s32", name(of_a), name(of_b));
            let operands = [list(1, na), list(1 + na, nb), list(1 + na + nb, nc)].join(", ");
            for at in 0..nc {
                let result = format!("mov.u32 %r0, %r{};", 30 + at);
                let snippet = format!("{opcode} {}, {operands};\n{result}", list(30, nc));
                for (lane, got) in per_lane(&snippet, 32, &inputs).into_iter().enumerate() {
                    let (row, column) = (lane / 4 + at / 2 * 8, lane % 4 * 2 + at % 2);
                    let sum = (0..k).fold(c[row][column], |sum, k| sum + a[row][k] * b[k][column]);
                    assert_eq!(got as u32 as i32, sum, "{opcode}: row {row}, column {column}");
                }
            }
        }
    }
    for wrong in
        ["m8n8k32.row.col.s32.u8.u8.s32", "m16n8k64.row.col.s32.s8.s8.s32", "m16n8k16.row.col.s32.s4.s4.s32"]
    {
        assert!(!supported_opcode(&format!("mma.sync.aligned.{wrong}")), "{wrong}");
    }
}

//! Sparse `mma.sp`, and metadata of sparse matrices for it and `wgmma.mma_async.sp`. The places of
//! elements and of metadata are those of the PTX manual, sections "Sparse matrix storage" and "Matrix
//! fragments for multiply-accumulate operation with sparse matrix A".

use epoxide_vgpu::{CheckConfig, Machine, MachineError, Module, supported_opcode};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::common::{device, kernel, launch, reject, tier};
use crate::numbers::{BF16, E4M3, E5M2, F16, F32, Matrix, S8, S32, TF32, Type, U8, matrix};

/// A matrix of which half of the elements of each chunk are stored.
pub struct Sparse {
    /// `[rows, k]`, with zeros.
    pub dense: Matrix,
    /// `[rows, k / 2]`
    pub stored: Matrix,
    /// The two indices of each chunk, 4 bits: `[rows, chunks]`.
    pub indices: Vec<Vec<u32>>,
}

/// A sparse matrix of elements of so many bits.
pub fn sparse(
    rng: &mut ChaCha8Rng,
    [rows, k]: [usize; 2],
    bits: usize,
    ordered: bool,
    mut value: impl FnMut(&mut ChaCha8Rng) -> f64,
) -> Sparse {
    // Elements of a chunk, and of what an index names: pairs of 4 bits, half an element of tf32.
    let chunk = if bits == 32 { 2 } else { 32 / bits.min(8) };
    let mut all = Sparse { dense: vec![vec![0.0; k]; rows], stored: vec![vec![]; rows], indices: vec![] };
    for row in 0..rows {
        let mut indices = vec![];
        for start in (0..k).step_by(chunk) {
            let (first, second) = match bits {
                32 => [(0, 1), (2, 3)][rng.random_range(0..2)],
                _ => {
                    let first = rng.random_range(0..4);
                    let second = (first + rng.random_range(1..4)) % 4;
                    if ordered { (first.min(second), first.max(second)) } else { (first, second) }
                }
            };
            indices.push(first | second << 2);
            let columns = match bits {
                32 => vec![first / 2],
                4 => vec![2 * first, 2 * first + 1, 2 * second, 2 * second + 1],
                _ => vec![first, second],
            };
            for column in columns {
                let value = value(rng);
                all.dense[row][start + column as usize] = value;
                all.stored[row].push(value);
            }
        }
        all.indices.push(indices);
    }
    all
}

/// The metadata register of each lane, for 16 rows of indices. Lanes that are not selected have
/// other bits.
pub fn metadata(indices: &[Vec<u32>], k: usize, bits: usize, selector: usize) -> [u32; 32] {
    let mut register = [0; 32];
    let mut selected = [false; 32];
    for (row, indices) in indices.iter().enumerate() {
        let (group, lower) = (row % 8, row >= 8);
        for (chunk, indices) in indices.iter().enumerate() {
            // The thread of a group of four, and the first bit: figures 119 to 147.
            let (thread, bit) = match (bits, k) {
                (16, 16) | (32, 8) => (selector, if lower { 16 } else { 0 } + 4 * chunk),
                (16, 32) | (32, 16) => {
                    let half = usize::from(chunk >= 4);
                    (2 * selector + half, if lower { 16 } else { 0 } + 4 * (chunk - 4 * half))
                }
                (8, 32) | (4, 64) => (2 * selector + usize::from(lower), 4 * chunk),
                (8, 64) | (4, 128) => {
                    let half = usize::from(chunk >= 8);
                    (2 * half + usize::from(lower), 4 * (chunk - 8 * half))
                }
                other => panic!("{other:?}"),
            };
            register[4 * group + thread] |= indices << bit;
            selected[4 * group + thread] = true;
        }
    }
    for (lane, register) in register.iter_mut().enumerate() {
        if !selected[lane] {
            *register = 0x5a0f_0000 + lane as u32;
        }
    }
    register
}

/// A type of factors.
#[derive(Clone, Copy)]
struct Factor {
    name: &'static str,
    bits: usize,
    of: fn(f64) -> u32,
}

const fn factor(ty: Type) -> Factor {
    Factor { name: ty.name, bits: 8 * ty.bytes, of: ty.bits }
}

const S4: Factor = Factor { name: "s4", bits: 4, of: |x| x as i32 as u32 & 15 };
const U4: Factor = Factor { name: "u4", bits: 4, of: |x| x as u32 };

/// A sparse product `[16, k]` by `[k, 8]`.
#[derive(Clone, Copy)]
struct Shape {
    k: usize,
    a: Factor,
    b: Factor,
    sum: Type,
    ordered: bool,
    selector: usize,
}

impl Shape {
    fn opcode(&self) -> String {
        let Shape { k, a, b, sum, ordered, .. } = self;
        let kind = if *ordered { "sp::ordered_metadata" } else { "sp" };
        format!("mma.{kind}.sync.aligned.m16n8k{k}.row.col.{0}.{1}.{2}.{0}", sum.name, a.name, b.name)
    }

    /// Row and column in the stored A of element `i` of a thread.
    fn place_a(&self, group: usize, thread: usize, i: usize) -> (usize, usize) {
        let below = |upper: bool| if upper { group } else { group + 8 };
        // The first of the columns of A that the elements of a register are from.
        let (row, first) = match (self.a.bits, self.k) {
            (16, 16) => (below(i < 2), thread * 4),
            (16, 32) => {
                (below(i < 2 || (4..6).contains(&i)), if i < 4 { thread * 4 } else { thread * 4 + 16 })
            }
            (32, 8) => (below(i == 0), thread * 2),
            (32, 16) => (below(i == 0 || i == 2), if i < 2 { thread * 2 } else { thread * 2 + 8 }),
            (8, 32) => (below(i < 4), thread * 8),
            (8, 64) => {
                (below(i < 4 || (8..12).contains(&i)), if i < 8 { thread * 8 } else { thread * 8 + 32 })
            }
            (4, 64) => (below(i < 8), thread * 16),
            (4, 128) => {
                (below(i < 8 || (16..24).contains(&i)), if i < 16 { thread * 16 } else { thread * 16 + 64 })
            }
            other => panic!("{other:?}"),
        };
        (row, first / 2 + i % (32 / self.a.bits))
    }

    /// Row in B of element `i` of a thread.
    fn place_b(&self, thread: usize, i: usize) -> usize {
        match self.b.bits {
            16 => thread * 2 + i % 2 + i / 2 * 8,
            32 => thread + 4 * i,
            8 => thread * 4 + i % 4 + i / 4 * 16,
            _ => thread * 8 + i % 8 + i / 8 * 32,
        }
    }

    /// Registers of A, B and C, 32 lanes each, and behind them the metadata.
    fn registers(&self, a: &Sparse, b: &Matrix, c: &Matrix) -> [Vec<[u32; 32]>; 4] {
        let fill = |elements: usize, bits: usize, value: &dyn Fn(usize, usize, usize) -> u32| {
            let each = 32 / bits;
            let mut registers = vec![[0; 32]; elements / each];
            for i in 0..elements {
                for (lane, register) in registers[i / each].iter_mut().enumerate() {
                    *register |= value(lane / 4, lane % 4, i) << (bits * (i % each));
                }
            }
            registers
        };
        let of_a = fill(self.k / 4, self.a.bits, &|group, thread, i| {
            let (row, column) = self.place_a(group, thread, i);
            (self.a.of)(a.stored[row][column])
        });
        let of_b =
            fill(self.k / 4, self.b.bits, &|group, thread, i| (self.b.of)(b[self.place_b(thread, i)][group]));
        let of_c = fill(4, 8 * self.sum.bytes, &|group, thread, i| {
            (self.sum.bits)(c[if i < 2 { group } else { group + 8 }][thread * 2 + (i & 1)])
        });
        [of_a, of_b, of_c, vec![metadata(&a.indices, self.k, self.a.bits, self.selector)]]
    }

    fn run(
        &self,
        registers: &[Vec<[u32; 32]>; 4],
        check: Option<CheckConfig>,
    ) -> Result<Vec<u64>, MachineError> {
        let counts = registers.each_ref().map(Vec::len);
        let all: usize = counts.iter().sum();
        let list = |at: usize| {
            let from: usize = counts[..at].iter().sum();
            let names: Vec<_> = (from..from + counts[at]).map(|r| format!("%r{r}")).collect();
            format!("{{{}}}", names.join(", "))
        };
        let loads: String =
            (0..all).map(|r| format!("ld.global.u32 %r{r}, [%rd42+{}];\n", 256 * r)).collect();
        // D in registers of A, which are read.
        let names: Vec<_> = (0..counts[2]).map(|r| format!("%r{r}")).collect();
        let d = format!("{{{}}}", names.join(", "));
        let stores: String =
            (0..counts[2]).map(|r| format!("st.global.u32 [%rd42+{}], %r{r};\n", 256 * (all + r))).collect();
        let mma = format!(
            "{} {d}, {}, {}, {}, %r{}, {};",
            self.opcode(),
            list(0),
            list(1),
            list(2),
            all - 1,
            self.selector
        );
        let module =
            Module::parse(&kernel("", &format!("{loads}{mma}\n{stores}"))).unwrap_or_else(|e| panic!("{e}"));
        let words: Vec<u64> =
            registers.iter().chain([&registers[2]]).flatten().flatten().map(|&v| v.into()).collect();
        let mut machine = Machine::with_config(1, device(3), check);
        let buf = machine.upload(0, "buf", &words)?;
        machine.launch_with(0, &module, "k", launch(1, 32), &[&buf])?;
        machine.run()?;
        let words = buf.download()?;
        Ok(words[words.len() - 32 * counts[2]..].to_vec())
    }

    /// A sparse A of whole numbers, B and C.
    fn draw(&self, rng: &mut ChaCha8Rng) -> (Sparse, Matrix, Matrix) {
        let range = |factor: Factor| if factor.name.starts_with('u') { 0..=6 } else { -6..=6 };
        let range_of_a = range(self.a);
        let a = sparse(rng, [16, self.k], self.a.bits, self.ordered, |rng| {
            f64::from(rng.random_range(range_of_a.clone()))
        });
        let b = matrix(self.k, 8, || f64::from(rng.random_range(range(self.b))));
        let c = matrix(16, 8, || f64::from(rng.random_range(-500..=500)));
        (a, b, c)
    }
}

fn all_shapes() -> Vec<Shape> {
    let mut shapes = vec![];
    for ordered in [false, true] {
        let mut add = |k, a: Factor, b: Factor, sum, selectors: usize| {
            shapes.extend((0..selectors).map(|selector| Shape { k, a, b, sum, ordered, selector }));
        };
        for (ty, sum) in [(F16, F32), (F16, F16), (BF16, F32)] {
            add(16, factor(ty), factor(ty), sum, 4);
            add(32, factor(ty), factor(ty), sum, 2);
        }
        add(8, factor(TF32), factor(TF32), F32, 4);
        add(16, factor(TF32), factor(TF32), F32, 2);
        for (a, b) in [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)] {
            add(64, factor(a), factor(b), F32, 1);
        }
        for (a, b) in [(S8, S8), (U8, S8), (S8, U8), (U8, U8)] {
            add(32, factor(a), factor(b), S32, 2);
            add(64, factor(a), factor(b), S32, 1);
        }
        for (a, b) in [(S4, S4), (U4, S4), (S4, U4), (U4, U4)] {
            add(64, a, b, S32, 2);
            add(128, a, b, S32, 1);
        }
    }
    shapes
}

#[test]
fn sparse_products_of_small_whole_numbers_are_exact() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for shape in all_shapes() {
        let name = shape.opcode();
        assert!(supported_opcode(&name), "{name}");
        for check in [None, Some(CheckConfig::default())] {
            for _ in 0..tier(1, 10) {
                let (a, b, c) = shape.draw(&mut rng);
                let sum = |row: usize, column: usize| {
                    (0..shape.k).fold(c[row][column], |sum, k| sum + a.dense[row][k] * b[k][column])
                };
                let out = shape.run(&shape.registers(&a, &b, &c), check).unwrap();
                for lane in 0..32 {
                    for i in 0..4 {
                        let each = 4 / shape.sum.bytes;
                        let word = out[i / each * 32 + lane] >> (8 * shape.sum.bytes * (i % each));
                        let bits = if each == 2 { word & 0xffff } else { word };
                        let (row, column) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
                        let expected = u64::from((shape.sum.bits)(sum(row, column)));
                        assert_eq!(bits, expected, "{name} {}: {row}, {column}", shape.selector);
                    }
                }
            }
        }
    }
}

#[test]
fn metadata_that_the_manual_leaves_undefined_spoils_its_row_alone() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let sum_f32 = |k, ty, ordered| Shape { k, a: factor(ty), b: factor(ty), sum: F32, ordered, selector: 0 };
    for (shape, bits) in [
        (sum_f32(32, F16, false), 0b1010),
        (sum_f32(32, F16, true), 0b0010),
        (sum_f32(16, TF32, false), 0b1001),
    ] {
        let (a, b, c) = shape.draw(&mut rng);
        let mut registers = shape.registers(&a, &b, &c);
        // A number that is not zero stands in the first chunk of row 1, with such metadata.
        registers[0][0][4] = (shape.a.of)(1.0);
        let defined = shape.run(&registers, None).unwrap();
        let metadata = &mut registers[3][0][4];
        *metadata = *metadata & !15 | bits;
        let spoilt = shape.run(&registers, None).unwrap();
        // Row 1 of D lies in the first two registers of lanes 4 to 7.
        for (at, (before, after)) in defined.iter().zip(&spoilt).enumerate() {
            let in_row = at < 64 && (4..8).contains(&(at % 32));
            assert_eq!(before != after, in_row, "{} {bits:#06b}: {at}", shape.opcode());
        }
        // Zeros may stand anywhere, as behind the end of a matrix.
        registers[0][0][4] = 0;
        let zeros = shape.run(&registers, None).unwrap();
        registers[3][0][4] = registers[3][0][4] & !15 | 0b0100;
        assert_eq!(zeros, shape.run(&registers, None).unwrap(), "{}", shape.opcode());
    }
}

#[test]
fn a_dropped_element_of_b_does_not_count() {
    let shape = Shape { k: 16, a: factor(F16), b: factor(F16), sum: F32, ordered: true, selector: 2 };
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let (mut a, mut b, c) = shape.draw(&mut rng);
    // Rows 0 and 1 of each chunk of B count, and the others are NaN.
    for row in 0..16 {
        a.indices[row] = vec![0b0100; 4];
    }
    (0..16).filter(|k| k % 4 > 1).for_each(|k| b[k] = vec![f64::NAN; 8]);
    let out = shape.run(&shape.registers(&a, &b, &c), None).unwrap();
    let sum = |row: usize, column: usize| {
        let counted = (0..16).filter(|k| k % 4 < 2).zip(&a.stored[row]);
        counted.fold(c[row][column], |sum, (k, stored)| sum + stored * b[k][column])
    };
    for (at, &word) in out.iter().enumerate() {
        let (lane, i) = (at % 32, at / 32);
        let (row, column) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
        assert_eq!(f64::from(f32::from_bits(word as u32)), sum(row, column), "{row}, {column}");
    }
}

#[test]
fn what_is_no_sparse_product_is_refused() {
    for opcode in [
        "mma.sp.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32",
        "mma.sp.sync.aligned.m16n8k32.row.row.f32.f16.f16.f32",
        "mma.sp.sync.aligned.m16n8k32.row.col.f16.bf16.bf16.f16",
        "mma.sp.sync.aligned.m16n8k32.row.col.satfinite.f32.f16.f16.f32",
        "mma.sp.sync.aligned.m16n8k64.row.col.s32.s8.s4.s32",
        "mma.sp.aligned.m16n8k32.row.col.f32.f16.f16.f32",
    ] {
        assert!(!supported_opcode(opcode), "{opcode}");
    }
    let operands = "{%r1, %r2, %r3, %r4}, {%r1, %r2, %r3, %r4}, {%r1, %r2, %r3, %r4}, {%r1, %r2, %r3, %r4}";
    let opcode = "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32";
    for (last, what) in [
        ("%r5, 2", "the sparsity selector must be a constant from 0 to 1"),
        ("%r5, %r6", "the sparsity selector must be a constant from 0 to 1"),
        ("%r5", "5 operands given, 6 expected"),
    ] {
        let error = reject(&format!("{opcode} {operands}, {last};"));
        assert!(error.message.contains(what), "{error}");
    }
}

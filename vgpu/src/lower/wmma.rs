//! `wmma`: products of matrices in fragments, whose layout in registers is up to the machine. Here
//! it is that of `mma.sync`, in tiles of 16 (or 8) rows and 8 columns, whatever the layout in
//! memory. If a fragment has more registers than it needs, the first ones count, and the others
//! hold copies.

use super::decode::Emit;
use super::matrix::{access, factor_type, parts_of};
use super::state::{Lower, Lowered};
use super::types::Mods;
use crate::exec::lanes::{op1, op2, op4};
use crate::exec::mma::{Element, Mma, Sum};
use crate::exec::products::{Shape, WarpProduct};
use crate::float::Round;
use crate::ir::{Addr, FULL, File, Init, Op, SINK, Space, Special, WarpOp};
use crate::ptx::{Operand, Span};

/// `[rows, k]` by `[k, columns]`.
#[derive(Clone, Copy)]
struct Sizes {
    rows: u32,
    columns: u32,
    k: u32,
}

const SIZES: [(&str, Sizes); 5] = [
    ("m16n16k16", Sizes { rows: 16, columns: 16, k: 16 }),
    ("m32n8k16", Sizes { rows: 32, columns: 8, k: 16 }),
    ("m8n32k16", Sizes { rows: 8, columns: 32, k: 16 }),
    ("m16n16k8", Sizes { rows: 16, columns: 16, k: 8 }),
    ("m8n8k4", Sizes { rows: 8, columns: 8, k: 4 }),
];

impl Sizes {
    /// Rows of a tile.
    fn tile(self) -> u32 {
        self.rows.min(16)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Matrix {
    A,
    B,
    C,
}

/// A register of a fragment: the row and the column of the element of lane 0, the step of both from
/// one element of the register to the next, and the step from one lane of four to the next. Every
/// four lanes are a row, or in B a column.
#[derive(Clone, Copy)]
struct Register {
    row: u32,
    column: u32,
    /// Elements along k, or along a row of C.
    elements: u32,
    /// The step of a lane of four, in elements.
    step: u32,
}

/// The registers of a fragment of elements of so many bits, in order.
fn fragment(sizes: Sizes, matrix: Matrix, bits: u32) -> Vec<Register> {
    let each = (32 / bits).max(1);
    let mut registers = vec![];
    match matrix {
        Matrix::A => {
            for tile in (0..sizes.rows).step_by(16) {
                for column in (0..sizes.k).step_by(4 * each as usize) {
                    for row in (0..sizes.tile()).step_by(8) {
                        registers.push(Register { row: tile + row, column, elements: each, step: each });
                    }
                }
            }
        }
        Matrix::B => {
            for column in (0..sizes.columns).step_by(8) {
                for row in (0..sizes.k).step_by(4 * each as usize) {
                    registers.push(Register { row, column, elements: each, step: each });
                }
            }
        }
        Matrix::C => {
            for tile in (0..sizes.rows).step_by(16) {
                for column in (0..sizes.columns).step_by(8) {
                    for row in (0..sizes.tile()).step_by(8) {
                        for at in (0..2).step_by(each as usize) {
                            let (row, column) = (tile + row, column + at);
                            registers.push(Register { row, column, elements: each, step: 2 });
                        }
                    }
                }
            }
        }
    }
    registers
}

/// `wmma.load`, `wmma.store`, `wmma.mma`
pub(super) fn decode(m: &mut Mods) -> Result<Emit, String> {
    let whole = m.has("sync") & m.has("aligned");
    let Some(sizes) = m.one_of(&SIZES).filter(|_| whole) else { return m.unsupported() };
    match (m.has("load"), m.has("store"), m.has("mma")) {
        (true, false, false) => {
            let matrix = m.one_of(&[("a", Matrix::A), ("b", Matrix::B), ("c", Matrix::C)]);
            transfer(m, sizes, matrix, true)
        }
        (false, true, false) => {
            let matrix = m.has("d").then_some(Matrix::C);
            transfer(m, sizes, matrix, false)
        }
        (false, false, true) => multiply(m, sizes),
        _ => m.unsupported(),
    }
}

/// Bits of the elements, and registers of a fragment.
fn registers(sizes: Sizes, matrix: Matrix, ty: &str) -> Option<(u32, usize)> {
    let bits = match (ty, matrix, sizes.k) {
        ("f16", _, 16) | ("bf16", Matrix::A | Matrix::B, 16) => 16,
        ("u8" | "s8", Matrix::A | Matrix::B, 16) => 8,
        ("f32", Matrix::C, 8 | 16) | ("s32", Matrix::C, 16) | ("tf32", Matrix::A | Matrix::B, 8) => 32,
        ("f64", _, 4) => 64,
        _ => return None,
    };
    let needed = fragment(sizes, matrix, bits).len();
    Some((bits, if ty == "f16" && matrix != Matrix::C { 8 } else { needed }))
}

fn transfer(m: &mut Mods, sizes: Sizes, matrix: Option<Matrix>, load: bool) -> Result<Emit, String> {
    let spaces = [("global", Space::Global), ("shared", Space::Shared), ("shared::cta", Space::Shared)];
    let space = m.one_of(&spaces).unwrap_or(Space::Generic);
    let by_rows = m.one_of(&[("row", true), ("col", false)]);
    let ty = m.names().last().unwrap_or_default();
    m.ignore(&[ty]);
    let (Some(matrix), Some(by_rows)) = (matrix, by_rows) else { return m.unsupported() };
    let Some((bits, count)) = registers(sizes, matrix, ty) else { return m.unsupported() };
    Ok(Box::new(move |l, ops| {
        l.count(ops, 2..=3)?;
        let (list, at) = if load { (&ops[0], &ops[1]) } else { (&ops[1], &ops[0]) };
        let file = if bits == 64 { File::R64 } else { File::R32 };
        let mut slots = vec![];
        for part in parts_of(list, count)? {
            let bits = bits.max(32);
            slots.push(if load { l.dest(&part, file, bits)? } else { l.source(&part, file, bits)? });
        }
        let address = l.address(at)?;
        let stride = match ops.get(2) {
            Some(stride) => l.source_of::<u32>(stride)?,
            None => {
                let packed = match (matrix, by_rows) {
                    (Matrix::A, true) | (Matrix::B, false) => sizes.k,
                    (Matrix::B | Matrix::C, true) => sizes.columns,
                    (Matrix::A | Matrix::C, false) => sizes.rows,
                };
                l.constant(File::R32, Init::Bits(packed.into()))
            }
        };
        // In B the lanes of four go down, and otherwise along a row.
        let lanes_by_rows = matrix != Matrix::B;
        let side = Side { load, space, address, stride, bits, lanes_by_rows, by_rows };
        let fragment = fragment(sizes, matrix, bits);
        for (&slot, register) in slots.iter().zip(&fragment) {
            side.register(l, *register, slot);
        }
        if load {
            let copy = op1(|a: u32| a);
            for (i, &slot) in slots.iter().enumerate().skip(fragment.len()) {
                l.push_alu(copy.f, [slot, slots[i % fragment.len()], 0, 0, 0, 0], copy.sig);
            }
        }
        Ok(())
    }))
}

/// A matrix in memory.
struct Side {
    load: bool,
    space: Space,
    address: Addr,
    /// The slot of the distance of rows, or of columns, in elements.
    stride: u32,
    bits: u32,
    /// Every four lanes are a row of the matrix, and not a column.
    lanes_by_rows: bool,
    /// Rows are stored one behind the other, and not columns.
    by_rows: bool,
}

impl Side {
    fn register(&self, l: &mut Lower, register: Register, slot: u32) {
        let bytes = (self.bits / 8) as u8;
        // Elements of the register are neighbours in memory.
        if self.lanes_by_rows == self.by_rows || register.elements == 1 {
            let at = self.place(l, register, 0);
            l.push(access(self.load, self.space, at, bytes.max(4), slot));
            return;
        }
        let mask = l.constant(File::R32, Init::Bits((1 << self.bits) - 1));
        let mut whole = l.constant(File::R32, Init::Bits(0));
        for i in 0..register.elements {
            let at = self.place(l, register, i);
            let part = l.slot(File::R32);
            let shift = l.constant(File::R32, Init::Bits((i * self.bits).into()));
            if self.load {
                l.push(access(true, self.space, at, bytes, part));
                let join = op4(|all: u32, part: u32, shift: u32, mask: u32| all | (part & mask) << shift);
                let to = if i + 1 == register.elements { slot } else { l.slot(File::R32) };
                l.push_alu(join.f, [to, whole, part, shift, mask, 0], join.sig);
                whole = to;
            } else {
                let split = op2(|all: u32, shift: u32| all >> shift);
                l.push_alu(split.f, [part, slot, shift, 0, 0, 0], split.sig);
                l.push(access(false, self.space, at, bytes, part));
            }
        }
    }

    /// The address of element `at` of a register, in each lane.
    fn place(&self, l: &mut Lower, register: Register, at: u32) -> Addr {
        let Register { row, column, step, .. } = register;
        let (row, column) = if self.lanes_by_rows { (row, column + at) } else { (column, row + at) };
        // `first` counts along the groups of four lanes, `second` along the lanes of four.
        let first = l.constant(File::R32, Init::Bits(row.into()));
        let packed = u64::from(column) | u64::from(step) << 16 | u64::from(self.bits / 8) << 24;
        let packed = l.constant(File::R32, Init::Bits(packed));
        let lane = l.constant(File::R32, Init::Special(Special::LaneId));
        fn places(lane: u32, first: u32, packed: u32) -> [u64; 3] {
            let second = (packed & 0xffff) + lane % 4 * (packed >> 16 & 0xff);
            [u64::from(lane / 4 + first), second.into(), u64::from(packed >> 24)]
        }
        let offset = if self.lanes_by_rows == self.by_rows {
            op4(|lane: u32, first: u32, packed: u32, stride: u32| {
                let [first, second, bytes] = places(lane, first, packed);
                (first * u64::from(stride) + second) * bytes
            })
        } else {
            op4(|lane: u32, first: u32, packed: u32, stride: u32| {
                let [first, second, bytes] = places(lane, first, packed);
                (second * u64::from(stride) + first) * bytes
            })
        };
        let distance = l.slot(File::R64);
        l.push_alu(offset.f, [distance, lane, first, packed, self.stride, 0], offset.sig);
        let (add, file) = match self.address.wide {
            true => (op2(u64::wrapping_add), File::R64),
            false => (op2(|at: u32, by: u64| at.wrapping_add(by as u32)), File::R32),
        };
        let slot = l.slot(file);
        l.push_alu(add.f, [slot, self.address.slot, distance, 0, 0, 0], add.sig);
        Addr { slot, ..self.address }
    }
}

/// `wmma.mma.sync.aligned.ALAYOUT.BLAYOUT.SHAPE`, which ends with the types of D and C of a product of
/// f16, and with all types of another.
fn multiply(m: &mut Mods, sizes: Sizes) -> Result<Emit, String> {
    for _ in 0..2 {
        if m.one_of(&[("row", ()), ("col", ())]).is_none() {
            return m.unsupported();
        }
    }
    let saturates = m.has("satfinite");
    let rounds = [("rn", Round::Nearest), ("rz", Round::Zero), ("rm", Round::Down), ("rp", Round::Up)];
    let round = m.one_of(&rounds);
    const TYPES: [&str; 8] = ["f16", "bf16", "tf32", "u8", "s8", "f32", "s32", "f64"];
    let types: Vec<&str> = m.names().filter(|name| TYPES.contains(name)).collect();
    let (d, factor, c) = match *types.as_slice() {
        [d, c] => (d, "f16", c),
        [d, a, b, c] if a == b && a != "f16" => (d, a, c),
        _ => return m.unsupported(),
    };
    types.iter().for_each(|ty| m.ignore(&[ty]));
    let (Some((_, na)), Some((_, nb))) =
        (registers(sizes, Matrix::A, factor), registers(sizes, Matrix::B, factor))
    else {
        return m.unsupported();
    };
    let Some((bits, nd)) = registers(sizes, Matrix::C, d) else { return m.unsupported() };
    let sum = match (factor, d) {
        ("f16", "f16") => Some(Sum::F16),
        ("f16" | "bf16" | "tf32", "f32") => Some(Sum::F32),
        ("u8" | "s8", "s32") if saturates => Some(Sum::SaturatedS32),
        ("u8" | "s8", "s32") => Some(Sum::S32),
        ("f64", "f64") => None,
        _ => return m.unsupported(),
    };
    let floats_saturate = saturates && sum != Some(Sum::SaturatedS32);
    if d != c || floats_saturate || round.is_some() && factor != "f64" {
        return m.unsupported();
    }
    let element: Option<Element> = factor_type(factor);
    Ok(Box::new(move |l, ops| {
        l.count(ops, 4..=4)?;
        let file = if bits == 64 { File::R64 } else { File::R32 };
        let width = bits.max(32);
        let sources = |l: &mut Lower, op: &(Operand, Span), n| {
            parts_of(op, n)?.iter().map(|part| l.source(part, file, width)).collect::<Lowered<Vec<u32>>>()
        };
        let (a, b) = (sources(l, &ops[1], na)?, sources(l, &ops[2], nb)?);
        // D may be registers of A or B, so the sums have registers of their own.
        let copy = if file == File::R64 { op1(|a: u64| a) } else { op1(|a: u32| a) };
        let mut sums = vec![];
        for from in sources(l, &ops[3], nd)? {
            let slot = l.slot(file);
            l.push_alu(copy.f, [slot, from, 0, 0, 0, 0], copy.sig);
            sums.push(slot);
        }
        let mask = l.constant(File::R32, Init::Bits(FULL.into()));
        match (element, sum) {
            (Some(element), Some(sum)) => {
                // An H200 adds 4 products of tf32 in a step, unlike in `mma.sync` of that shape.
                let k = if element == Element::Tf32 { 4 } else { sizes.k };
                let mma = Mma { rows: sizes.tile() as u8, k: k as u8, a: element, b: element, sum };
                let [na, nb, nd] = mma.registers();
                let (columns, steps) = ((sizes.columns / 8) as usize, (sizes.k / k) as usize);
                for (i, d) in sums.chunks(nd).enumerate() {
                    for step in 0..steps {
                        let a = &a[(i / columns * steps + step) * na..][..na];
                        let b = &b[(i % columns * steps + step) * nb..][..nb];
                        let op = WarpOp::Mma { mma, d: padded(d), a: padded(a), b: padded(b) };
                        l.push(Op::Warp { op, mask });
                    }
                }
            }
            _ => {
                let shape = Shape::Double { rows: 8, k: 4, round: round.unwrap_or(Round::Nearest) };
                let product = l.operands.warp_products.len() as u32;
                l.operands.warp_products.push(WarpProduct { shape, d: sums.clone(), a, b });
                l.push(Op::Warp { op: WarpOp::Product { product }, mask });
            }
        }
        for (slot, part) in sums.into_iter().zip(parts_of(&ops[0], nd)?) {
            let to = l.dest(&part, file, width)?;
            l.push_alu(copy.f, [to, slot, 0, 0, 0, 0], copy.sig);
        }
        Ok(())
    }))
}

fn padded<const N: usize>(slots: &[u32]) -> [u32; N] {
    std::array::from_fn(|i| slots.get(i).copied().unwrap_or(SINK))
}

//! `mma.sync`: the product of two matrices that lie in the registers of a warp, added to a third.
//! `wgmma` does the same with a matrix of a warpgroup, whose B lies in shared memory.
//!
//! `sums` adds floats as an H200 does. Sums of integers are exact.

use std::sync::LazyLock;

use half::{bf16, f16};

use super::sums::{Adder, Sums, to_f16};
use crate::float::{E4M3, E5M2, F32, Format, Overflow, Round, canonical, convert};
use crate::registers::Regs;

/// Columns of B, C and D.
pub(super) const COLUMNS: usize = 8;
const MOST_ROWS: usize = 16;
pub(super) const MOST_K: usize = 32;

/// The same of elements of 4 bits.
const MOST_K_OF_4_BITS: usize = 64;

/// The matrix A, row by row.
pub(super) type Left<const K: usize = MOST_K> = [[f64; K]; MOST_ROWS];
/// The matrix B, row by row.
pub(super) type Right<const K: usize = MOST_K> = [[f64; COLUMNS]; K];

/// The value that a sum begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    Zero,
    /// The element of D.
    Registers,
}

/// The quarter of a row, and the row, of a lane's elements.
fn place(lane: usize) -> (usize, usize) {
    (lane % 4, lane / 4)
}

/// Type of the elements of A or B.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F16,
    Bf16,
    Tf32,
    E4m3,
    E5m2,
    U8,
    S8,
    U4,
    S4,
}

/// The values of all 256 numbers of a format.
fn values(format: Format) -> [f64; 256] {
    let wide = |bits: usize| convert(bits as u64, format, F32, Round::Nearest, Overflow::Ieee);
    std::array::from_fn(|bits| f64::from(f32::from_bits(wide(bits) as u32)))
}

static E4M3_VALUES: LazyLock<[f64; 256]> = LazyLock::new(|| values(E4M3));
static E5M2_VALUES: LazyLock<[f64; 256]> = LazyLock::new(|| values(E5M2));

/// Type of the elements of C and D.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sum {
    F32,
    F16,
    S32,
    /// Sums beyond the range become its ends.
    SaturatedS32,
}

/// Shape and types of a product. A is `[rows, k]`, B is `[k, 8]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mma {
    /// 8 or 16.
    pub(crate) rows: u8,
    pub(crate) k: u8,
    pub(crate) a: Element,
    pub(crate) b: Element,
    pub(crate) sum: Sum,
}

impl Element {
    /// Bits of an element.
    pub(crate) fn bits(self) -> usize {
        match self {
            Element::Tf32 => 32,
            Element::F16 | Element::Bf16 => 16,
            Element::E4m3 | Element::E5m2 | Element::U8 | Element::S8 => 8,
            Element::U4 | Element::S4 => 4,
        }
    }

    /// Bytes of an element of 8 bits or more.
    pub(crate) fn bytes(self) -> usize {
        self.bits() / 8
    }

    /// Element `at` of a register.
    pub(super) fn of(self, register: u32, at: usize) -> f64 {
        let bits = register >> (self.bits() * at);
        match self {
            Element::F16 => f16::from_bits(bits as u16).to_f64(),
            Element::Bf16 => bf16::from_bits(bits as u16).to_f64(),
            // The low 13 bits of the mantissa are ignored.
            Element::Tf32 => f64::from(f32::from_bits(bits & !0x1fff)),
            Element::E4m3 => E4M3_VALUES[usize::from(bits as u8)],
            Element::E5m2 => E5M2_VALUES[usize::from(bits as u8)],
            Element::U8 => f64::from(bits as u8),
            Element::S8 => f64::from(bits as i8),
            Element::U4 => f64::from(bits & 15),
            Element::S4 => f64::from((bits << 4) as i8 >> 4),
        }
    }
}

impl Mma {
    /// Registers of a lane for A, B, and C or D.
    pub(crate) fn registers(&self) -> [usize; 3] {
        let (rows, k) = (usize::from(self.rows), usize::from(self.k));
        // 32 lanes with 32 bits each.
        let sums = rows * COLUMNS / 32;
        let of = |elements: usize, element: Element| elements * element.bits() / 1024;
        let packed = if self.sum == Sum::F16 { sums / 2 } else { sums };
        [of(rows * k, self.a), of(k * COLUMNS, self.b), packed]
    }

    /// Adds the product of the matrices in the registers `a` and `b` to the one in `d`.
    pub(super) fn multiply(&self, regs: &mut Regs, d: &[u32], a: &[u32], b: &[u32]) {
        if usize::from(self.k) <= MOST_K {
            self.multiply_within::<MOST_K>(regs, d, a, b);
        } else {
            self.multiply_within::<MOST_K_OF_4_BITS>(regs, d, a, b);
        }
    }

    fn multiply_within<const K: usize>(&self, regs: &mut Regs, d: &[u32], a: &[u32], b: &[u32]) {
        let [na, nb, nd] = self.registers();
        let (left, right) = (self.left::<K>(regs, &a[..na]), self.right::<K>(regs, &b[..nb]));
        self.add_product(regs, &d[..nd], &left, &right, (Start::Registers, Adder::Warp));
    }

    /// The matrix A in the registers `a`.
    pub(super) fn left<const K: usize>(&self, regs: &Regs, a: &[u32]) -> Left<K> {
        let mut left = [[0.0; K]; MOST_ROWS];
        let each = 32 / self.a.bits();
        for (r, &slot) in a.iter().enumerate() {
            // The registers of 16 rows take turns between the halves of the rows.
            let (below, turn) = if self.rows == 16 { (r % 2, r / 2) } else { (0, r) };
            for (lane, &register) in regs.r32[slot as usize].iter().enumerate() {
                let (quarter, row) = place(lane);
                for at in 0..each {
                    left[row + 8 * below][(4 * turn + quarter) * each + at] = self.a.of(register, at);
                }
            }
        }
        left
    }

    /// The matrix B in the registers `b`.
    pub(super) fn right<const K: usize>(&self, regs: &Regs, b: &[u32]) -> Right<K> {
        let mut right = [[0.0; COLUMNS]; K];
        let each = 32 / self.b.bits();
        for (r, &slot) in b.iter().enumerate() {
            for (lane, &register) in regs.r32[slot as usize].iter().enumerate() {
                let (quarter, column) = place(lane);
                for at in 0..each {
                    right[(4 * r + quarter) * each + at][column] = self.b.of(register, at);
                }
            }
        }
        right
    }

    /// Stores the product of `left` and `right` in the registers `d`, added to what `start` names.
    pub(super) fn add_product<const K: usize>(
        &self,
        regs: &mut Regs,
        d: &[u32],
        left: &Left<K>,
        right: &Right<K>,
        (start, adder): (Start, Adder),
    ) {
        let k = usize::from(self.k);
        let Some(floats) = Sums::new(self.a, self.b, self.sum, adder) else {
            return self.change_sums(regs, d, start, |row, sums| {
                for k in 0..k {
                    for (sum, right) in sums.iter_mut().zip(&right[k]) {
                        *sum += left[row][k] * right;
                    }
                }
            });
        };
        let powers = floats.powers(right, k);
        let right = (right, &powers);
        self.change_sums(regs, d, start, |row, sums| {
            self.add_row(&floats, adder, sums, (0..k).map(|k| (left[row][k], k)), right);
        });
    }

    /// Adds the products of a row: of each element of A, and the row of B that belongs to it.
    /// `right` is B with its powers.
    pub(super) fn add_row<const K: usize>(
        &self,
        floats: &Sums,
        adder: Adder,
        sums: &mut [f64; COLUMNS],
        products: impl Iterator<Item = (f64, usize)> + Clone,
        right: (&Right<K>, &Right<K>),
    ) {
        if self.a.bits() > 8 || adder == Adder::Warpgroup {
            return floats.add(sums, products, right);
        }
        // A warp takes the first two of each four products, then the others, and at last C.
        let mut added = [0.0; COLUMNS];
        for half in 0..2 {
            let of_half = products.clone().enumerate().filter(|(at, _)| at / 2 % 2 == half);
            floats.add(&mut added, of_half.map(|(_, product)| product), right);
        }
        for (sum, added) in sums.iter_mut().zip(added) {
            *sum = match self.sum {
                Sum::F32 => f64::from(*sum as f32 + added as f32),
                _ => *sum + added,
            };
        }
    }

    /// Lets `f` change each row of sums, which begin with what `start` names, and stores them in
    /// the registers `d`.
    pub(super) fn change_sums(
        &self,
        regs: &mut Regs,
        d: &[u32],
        start: Start,
        mut f: impl FnMut(usize, &mut [f64; COLUMNS]),
    ) {
        let mut sums = [[0f64; COLUMNS]; MOST_ROWS];
        if start == Start::Registers {
            self.each_sum(d, |row, column, slot, lane, shift| {
                sums[row][column] = self.value(regs.r32[slot][lane] >> shift);
            });
        }
        for (row, sums) in sums.iter_mut().enumerate().take(self.rows.into()) {
            f(row, sums);
        }
        self.each_sum(d, |row, column, slot, lane, shift| {
            let register = &mut regs.r32[slot][lane];
            let mask = if self.sum == Sum::F16 { 0xffff } else { u32::MAX };
            *register = *register & !(mask << shift) | self.bits(sums[row][column]) << shift;
        });
    }

    /// Calls `f` with the row, column, slot, lane and first bit of each element of C or D.
    fn each_sum(&self, d: &[u32], mut f: impl FnMut(usize, usize, usize, usize, u32)) {
        let packed = self.sum == Sum::F16;
        for (r, &slot) in d.iter().enumerate() {
            for lane in 0..32 {
                let (row, column) = (lane / 4, 2 * (lane % 4));
                if packed {
                    f(row + 8 * r, column, slot as usize, lane, 0);
                    f(row + 8 * r, column + 1, slot as usize, lane, 16);
                } else {
                    f(row + 8 * (r / 2), column + r % 2, slot as usize, lane, 0);
                }
            }
        }
    }

    pub(super) fn value(&self, bits: u32) -> f64 {
        match self.sum {
            Sum::F32 => f32::from_bits(bits).into(),
            Sum::F16 => f16::from_bits(bits as u16).to_f64(),
            Sum::S32 | Sum::SaturatedS32 => (bits as i32).into(),
        }
    }

    fn bits(&self, sum: f64) -> u32 {
        match self.sum {
            Sum::F32 => canonical(sum as f32).to_bits(),
            Sum::F16 if sum.is_nan() => 0x7fff,
            Sum::F16 => to_f16(sum).to_bits().into(),
            // Whole numbers of far less than 53 bits.
            Sum::S32 => sum as i64 as u32,
            Sum::SaturatedS32 => sum as i32 as u32,
        }
    }
}

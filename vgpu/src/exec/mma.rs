//! `mma.sync`: the product of two matrices that lie in the registers of a warp, added to a third.
//! `wgmma` does the same with a matrix of a warpgroup, whose B lies in shared memory.
//!
//! Products are exact. The sum begins with the element of C and takes the products in the order of
//! k, in double precision; it is rounded once, to the type of D. Hardware adds in another way: with
//! a few bits more than those of D, which it cuts off, in an order that NVIDIA does not publish, and
//! with fewer bits yet for eight-bit floats. So results of a GPU differ from these in the last
//! places, unless every sum is exact. Sums of integers are exact here as there.

use std::sync::LazyLock;

use half::{bf16, f16};

use crate::float::{E4M3, E5M2, F32, Format, Overflow, Round, canonical, convert};
use crate::ir::Regs;

/// Columns of B, C and D.
pub(super) const COLUMNS: usize = 8;
const MOST_ROWS: usize = 16;
pub(super) const MOST_K: usize = 32;

/// The matrix A, row by row.
pub(super) type Left = [[f64; MOST_K]; MOST_ROWS];
/// The matrix B, row by row.
pub(super) type Right = [[f64; COLUMNS]; MOST_K];

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
    /// Bytes of an element.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Element::F16 | Element::Bf16 => 2,
            Element::Tf32 => 4,
            Element::E4m3 | Element::E5m2 | Element::U8 | Element::S8 => 1,
        }
    }

    /// Element `at` of a register.
    pub(super) fn of(self, register: u32, at: usize) -> f64 {
        let bits = register >> (8 * self.bytes() * at);
        match self {
            Element::F16 => f16::from_bits(bits as u16).to_f64(),
            Element::Bf16 => bf16::from_bits(bits as u16).to_f64(),
            // The low 13 bits of the mantissa are ignored.
            Element::Tf32 => f64::from(f32::from_bits(bits & !0x1fff)),
            Element::E4m3 => E4M3_VALUES[usize::from(bits as u8)],
            Element::E5m2 => E5M2_VALUES[usize::from(bits as u8)],
            Element::U8 => f64::from(bits as u8),
            Element::S8 => f64::from(bits as i8),
        }
    }
}

impl Mma {
    /// Registers of a lane for A, B, and C or D.
    pub(crate) fn registers(&self) -> [usize; 3] {
        let (rows, k) = (usize::from(self.rows), usize::from(self.k));
        // 32 lanes with 4 bytes each.
        let sums = rows * COLUMNS / 32;
        let of = |elements: usize, element: Element| elements * element.bytes() / 128;
        let packed = if self.sum == Sum::F16 { sums / 2 } else { sums };
        [of(rows * k, self.a), of(k * COLUMNS, self.b), packed]
    }

    /// Adds the product of the matrices in the registers `a` and `b` to the one in `d`.
    pub(super) fn multiply(&self, regs: &mut Regs, d: &[u32], a: &[u32], b: &[u32]) {
        let [na, nb, nd] = self.registers();
        let (left, right) = (self.left(regs, &a[..na]), self.right(regs, &b[..nb]));
        self.add_product(regs, &d[..nd], &left, &right, Start::Registers);
    }

    /// The matrix A in the registers `a`.
    pub(super) fn left(&self, regs: &Regs, a: &[u32]) -> Left {
        let mut left = [[0.0; MOST_K]; MOST_ROWS];
        let each = 4 / self.a.bytes();
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
    fn right(&self, regs: &Regs, b: &[u32]) -> Right {
        let mut right = [[0.0; COLUMNS]; MOST_K];
        let each = 4 / self.b.bytes();
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
    pub(super) fn add_product(&self, regs: &mut Regs, d: &[u32], left: &Left, right: &Right, start: Start) {
        let mut sums = [[0f64; COLUMNS]; MOST_ROWS];
        if start == Start::Registers {
            self.each_sum(d, |row, column, slot, lane, shift| {
                sums[row][column] = self.value(regs.r32[slot][lane] >> shift);
            });
        }
        for (row, sums) in sums.iter_mut().enumerate().take(self.rows.into()) {
            for k in 0..usize::from(self.k) {
                for (sum, right) in sums.iter_mut().zip(&right[k]) {
                    *sum += left[row][k] * right;
                }
            }
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

    fn value(&self, bits: u32) -> f64 {
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
            Sum::F16 => f16::from_f64(sum).to_bits().into(),
            // Whole numbers of far less than 53 bits.
            Sum::S32 => sum as i64 as u32,
            Sum::SaturatedS32 => sum as i32 as u32,
        }
    }
}

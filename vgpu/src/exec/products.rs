//! `mma.sync` of f64, of single bits and of a sparse A: operands that an instruction has no room
//! for.
//!
//! Elements lie in registers as those of [`Mma`] do: rows take turns between the halves of the rows,
//! and a register's elements are neighbours in a row of A, or in a column of B.

use super::mma::{COLUMNS, Mma};
use super::sparse::Sparsity;
use super::state::Exec;
use crate::check::hooks::Hooks;
use crate::float::{Directed, Round};
use crate::ir::File;
use crate::registers::Regs;

/// An `mma.sync`: adds the product of A and B to D, in place.
#[derive(Clone, Debug)]
pub(crate) struct WarpProduct {
    pub(crate) shape: Shape,
    pub(crate) d: Vec<u32>,
    pub(crate) a: Vec<u32>,
    pub(crate) b: Vec<u32>,
}

/// Shape and types of such a product. A is `[rows, k]`, B is `[k, 8]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Each product is added by a fused multiply-add of f64, in the order of k.
    Double { rows: u8, k: u8, round: Round },
    /// Single bits. A sum counts the bits that `combine` leaves.
    Bits { rows: u8, k: u16, combine: Combine },
    /// A has half of its elements, and `mma` is the product of these.
    Sparse { mma: Mma, sparsity: Sparsity },
}

/// The operation on a bit of A and one of B.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Combine {
    And,
    Xor,
}

impl Shape {
    /// Registers of a lane for A, B, and C or D.
    pub(crate) fn registers(&self) -> [usize; 3] {
        match *self {
            Shape::Double { rows, k, .. } => {
                let (rows, k) = (usize::from(rows), usize::from(k));
                [rows * k / 32, k * COLUMNS / 32, rows * COLUMNS / 32]
            }
            Shape::Bits { rows, k, .. } => {
                let (rows, k) = (usize::from(rows), usize::from(k));
                [rows * k / 1024, k * COLUMNS / 1024, rows * COLUMNS / 32]
            }
            Shape::Sparse { mma, .. } => {
                let [a, b, d] = mma.registers();
                [a, 2 * b, d]
            }
        }
    }

    /// The file of the registers of A, B, C and D.
    pub(crate) fn file(&self) -> File {
        match self {
            Shape::Double { .. } => File::R64,
            Shape::Bits { .. } | Shape::Sparse { .. } => File::R32,
        }
    }
}

/// A register of A for each lane, by the row and the column, in registers, of the lane's element.
fn left<T: Copy + Default, const K: usize>(rows: u8, a: &[u32], file: &[[T; 32]]) -> [[T; K]; 16] {
    let mut left = [[T::default(); K]; 16];
    for (r, &slot) in a.iter().enumerate() {
        let (below, turn) = if rows == 16 { (r % 2, r / 2) } else { (0, r) };
        for (lane, &value) in file[slot as usize].iter().enumerate() {
            left[lane / 4 + 8 * below][4 * turn + lane % 4] = value;
        }
    }
    left
}

/// A register of B for each lane, by the row, in registers, and the column of the lane's element.
fn right<T: Copy + Default, const K: usize>(b: &[u32], file: &[[T; 32]]) -> [[T; COLUMNS]; K] {
    let mut right = [[T::default(); COLUMNS]; K];
    for (r, &slot) in b.iter().enumerate() {
        for (lane, &value) in file[slot as usize].iter().enumerate() {
            right[4 * r + lane % 4][lane / 4] = value;
        }
    }
    right
}

/// Changes each element of D, which has its row and its column.
fn each<T>(d: &[u32], file: &mut [[T; 32]], mut f: impl FnMut(&mut T, usize, usize)) {
    for (r, &slot) in d.iter().enumerate() {
        for (lane, sum) in file[slot as usize].iter_mut().enumerate() {
            f(sum, lane / 4 + 8 * (r / 2), 2 * (lane % 4) + r % 2);
        }
    }
}

fn multiply_doubles(regs: &mut Regs, product: &WarpProduct, rows: u8, k: u8, round: Round) {
    let a: [[f64; 16]; 16] = left::<u64, 16>(rows, &product.a, &regs.r64).map(|row| row.map(f64::from_bits));
    let b: [[f64; COLUMNS]; 16] = right::<u64, 16>(&product.b, &regs.r64).map(|row| row.map(f64::from_bits));
    each(&product.d, &mut regs.r64, |sum, row, column| {
        let start = f64::from_bits(*sum);
        let value = (0..usize::from(k)).fold(start, |sum, k| match round {
            Round::Nearest => a[row][k].mul_add(b[k][column], sum),
            _ => a[row][k].fma(b[k][column], sum, round),
        });
        *sum = value.to_bits();
    });
}

fn count_bits(regs: &mut Regs, product: &WarpProduct, rows: u8, k: u16, combine: Combine) {
    let a: [[u32; 8]; 16] = left(rows, &product.a, &regs.r32);
    let b: [[u32; COLUMNS]; 8] = right(&product.b, &regs.r32);
    each(&product.d, &mut regs.r32, |sum, row, column| {
        for k in 0..usize::from(k) / 32 {
            let both = match combine {
                Combine::And => a[row][k] & b[k][column],
                Combine::Xor => a[row][k] ^ b[k][column],
            };
            *sum = sum.wrapping_add(both.count_ones());
        }
    });
}

impl<W: Hooks> Exec<'_, W> {
    /// Executes the product of this number.
    pub(super) fn warp_product(&mut self, number: u32) {
        let product = &self.kernel.operands.warp_products[number as usize];
        let regs = &mut self.warp.regs;
        match product.shape {
            Shape::Double { rows, k, round } => multiply_doubles(regs, product, rows, k, round),
            Shape::Bits { rows, k, combine } => count_bits(regs, product, rows, k, combine),
            Shape::Sparse { mma, sparsity } => {
                let poison = self.env.poison as u32;
                mma.multiply_sparse(regs, sparsity, poison, [&product.d, &product.a, &product.b]);
            }
        }
    }
}

//! The metadata of a sparse A: which elements of a row the stored ones are.
//!
//! A row of A is divided into chunks. Half of a chunk's elements are stored, and four bits of
//! metadata select them: two indices of two bits, of elements in a chunk of four. Elements of 4
//! bits come in pairs, in chunks of four pairs. A chunk of tf32 has two elements, each of which
//! counts as two indices.
//!
//! The bits of 8 rows and 8 more below lie in the four lanes that have the rows' elements. Figures
//! "metadata layout" of the PTX manual have them for each shape, section "Matrix fragments for
//! multiply-accumulate operation with sparse matrix A".

use super::mma::{COLUMNS, Element, Left, MOST_K, Mma, Right, Start};
use super::sums::{Adder, Sums};
use crate::registers::Regs;

/// Elements of a row of a stored A at most: those of `m16n8k128`.
const MOST_STORED: usize = 64;
/// Rows of B at most.
const MOST_K_SPARSE: usize = 2 * MOST_STORED;

/// The column of each stored element of A, by row.
pub(super) struct Columns<const K: usize> {
    of: [[u8; K]; 16],
    /// Rows, one bit each, with metadata that the manual leaves undefined.
    undefined: u16,
}

/// Where a product finds the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sparsity {
    /// The slot of its register.
    pub(crate) metadata: u32,
    /// The lanes of each four that have it: the operand of this name.
    pub(crate) selector: u8,
    /// `::ordered_metadata`: the first index of a chunk is below the second.
    pub(crate) ordered: bool,
}

impl Element {
    /// Stored elements of a chunk of A.
    fn stored(self) -> usize {
        match self.bits() {
            32 => 1,
            4 => 4,
            _ => 2,
        }
    }

    /// The greatest selector of a product whose stored A has `k` columns.
    pub(crate) fn most_selector(self, k: usize) -> i64 {
        match 4 * k / self.stored() {
            16 => 3,
            32 => 1,
            _ => 0,
        }
    }
}

impl Sparsity {
    /// The lane that has the bits of a chunk, and the first of the bits.
    fn place(&self, mma: &Mma, row: usize, chunk: usize) -> (usize, usize) {
        let (group, below) = (4 * (row % 8), row / 8);
        let selector = usize::from(self.selector);
        let bits = 4 * usize::from(mma.k) / mma.a.stored();
        match (bits, mma.a.bits()) {
            (16, _) => (group + selector, 16 * below + 4 * chunk),
            (32, 16 | 32) => (group + 2 * selector + chunk / 4, 16 * below + 4 * (chunk % 4)),
            (32, _) => (group + 2 * selector + below, 4 * chunk),
            _ => (group + 2 * (chunk / 8) + below, 4 * (chunk % 8)),
        }
    }

    /// The columns of the stored elements. Metadata of a chunk of zeros may be anything.
    pub(super) fn columns<const K: usize>(&self, mma: &Mma, regs: &Regs, left: &Left<K>) -> Columns<K> {
        let mut columns = Columns { of: [[0; K]; 16], undefined: 0 };
        let register = &regs.r32[self.metadata as usize];
        let stored = mma.a.stored();
        for (row, of) in columns.of.iter_mut().enumerate() {
            for chunk in 0..usize::from(mma.k) / stored {
                let (lane, shift) = self.place(mma, row, chunk);
                let bits = register[lane] >> shift & 15;
                let (first, second) = ((bits & 3) as u8, (bits >> 2) as u8);
                let is_defined = match stored {
                    1 => matches!(bits, 0b0100 | 0b1110),
                    _ if self.ordered => first < second,
                    _ => first != second,
                };
                let elements = chunk * stored..(chunk + 1) * stored;
                if !is_defined && left[row][elements.clone()].iter().any(|value| *value != 0.0) {
                    columns.undefined |= 1 << row;
                }
                let start = (2 * chunk * stored) as u8;
                for (at, column) in of[elements].iter_mut().enumerate() {
                    *column = start
                        + match stored {
                            1 => first / 2,
                            4 => 2 * [first, second][at / 2] + (at % 2) as u8,
                            _ => [first, second][at],
                        };
                }
            }
        }
        columns
    }
}

impl Mma {
    /// Adds the product of the matrices in registers to the one in `d`. A is stored in half of its
    /// columns. `poison`: what undefined sums are.
    pub(super) fn multiply_sparse(
        &self,
        regs: &mut Regs,
        sparsity: Sparsity,
        poison: u32,
        [d, a, b]: [&[u32]; 3],
    ) {
        if usize::from(self.k) <= MOST_K {
            self.multiply_sparse_within::<MOST_K, { 2 * MOST_K }>(regs, sparsity, poison, [d, a, b]);
        } else {
            self.multiply_sparse_within::<MOST_STORED, MOST_K_SPARSE>(regs, sparsity, poison, [d, a, b]);
        }
    }

    fn multiply_sparse_within<const STORED: usize, const K: usize>(
        &self,
        regs: &mut Regs,
        sparsity: Sparsity,
        poison: u32,
        [d, a, b]: [&[u32]; 3],
    ) {
        let (left, right): (Left<STORED>, Right<K>) = (self.left(regs, a), self.right(regs, b));
        let columns = sparsity.columns(self, regs, &left);
        self.add_sparse_product(regs, d, (&left, &columns), &right, (Start::Registers, Adder::Warp), poison);
    }

    /// Stores the product of a sparse A and `right` in the registers `d`, added to what `start`
    /// names.
    pub(super) fn add_sparse_product<const STORED: usize, const K: usize>(
        &self,
        regs: &mut Regs,
        d: &[u32],
        (left, columns): (&Left<STORED>, &Columns<STORED>),
        right: &Right<K>,
        (start, adder): (Start, Adder),
        poison: u32,
    ) {
        let floats = Sums::new(self.a, self.b, self.sum, adder)
            .map(|floats| (floats, floats.powers(right, 2 * usize::from(self.k))));
        self.change_sums(regs, d, start, |row, sums| {
            if columns.undefined >> row & 1 != 0 {
                *sums = [self.value(poison); COLUMNS];
                return;
            }
            let stored = left[row].iter().zip(&columns.of[row]).take(self.k.into());
            if let Some((floats, powers)) = &floats {
                let stored = stored.map(|(left, &k)| (*left, usize::from(k)));
                return self.add_row(floats, adder, sums, stored, (right, powers));
            }
            for (left, &k) in stored {
                for (sum, right) in sums.iter_mut().zip(&right[usize::from(k)]) {
                    *sum += left * right;
                }
            }
        });
    }
}

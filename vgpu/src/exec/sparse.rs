//! The metadata of a sparse A: which elements of a row the stored ones are.
//!
//! A row of A is divided into chunks. Half of a chunk's elements are stored, and four bits of
//! metadata say which: two indices of two bits, of elements in a chunk of four. Elements of 4 bits
//! come in pairs, in chunks of four pairs. A chunk of tf32 has two elements, each of which counts as
//! two indices.
//!
//! The bits of 8 rows and 8 more below lie in the four lanes that have the rows' elements. Figures
//! "metadata layout" of the PTX manual have them for each shape, section "Matrix fragments for
//! multiply-accumulate operation with sparse matrix A".

use super::mma::{Element, Left, MOST_K, Mma, Right, Start};
use crate::ir::Regs;

/// Elements of a row of a stored A at most: those of `m16n8k128`.
const MOST_STORED: usize = 64;
/// Rows of B at most.
const MOST_K_SPARSE: usize = 2 * MOST_STORED;

/// The column of each stored element of A, by row.
pub(super) type Columns<const K: usize> = [[u8; K]; 16];

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

    /// The columns of the stored elements. The error is the lane whose metadata says what the
    /// manual leaves undefined, unless the chunk's elements are all zero.
    pub(super) fn columns<const K: usize>(
        &self,
        mma: &Mma,
        regs: &Regs,
        left: &Left<K>,
    ) -> Result<Columns<K>, (usize, String)> {
        let mut columns = [[0; K]; 16];
        let register = &regs.r32[self.metadata as usize];
        let stored = mma.a.stored();
        for (row, columns) in columns.iter_mut().enumerate() {
            for chunk in 0..usize::from(mma.k) / stored {
                let (lane, shift) = self.place(mma, row, chunk);
                let bits = register[lane] >> shift & 15;
                let (first, second) = ((bits & 3) as u8, (bits >> 2) as u8);
                let fits = match stored {
                    1 => matches!(bits, 0b0100 | 0b1110),
                    _ if self.ordered => first < second,
                    _ => first != second,
                };
                let elements = chunk * stored..(chunk + 1) * stored;
                if !fits && left[row][elements.clone()].iter().any(|value| *value != 0.0) {
                    return Err((lane, self.message(mma, row, chunk, lane, shift, bits)));
                }
                let start = (2 * chunk * stored) as u8;
                for (at, column) in columns[elements].iter_mut().enumerate() {
                    *column = start
                        + match stored {
                            1 => first / 2,
                            4 => 2 * [first, second][at / 2] + (at % 2) as u8,
                            _ => [first, second][at],
                        };
                }
            }
        }
        Ok(columns)
    }

    fn message(&self, mma: &Mma, row: usize, chunk: usize, lane: usize, shift: usize, bits: u32) -> String {
        let rule = match (mma.a.stored(), self.ordered) {
            (1, _) => "0b0100 and 0b1110 are defined",
            (_, true) => "the first index, in the low bits, must be below the second",
            _ => "the two indices must differ",
        };
        format!(
            "bits {shift} to {} of lane {lane} are {bits:#06b}, for chunk {chunk} of row {row} of A: {rule}",
            shift + 3
        )
    }
}

impl Mma {
    /// Adds the product of the matrices in the registers `a` and `b` to the one in `d`. A is stored
    /// in half of its columns.
    pub(super) fn multiply_sparse(
        &self,
        regs: &mut Regs,
        sparsity: Sparsity,
        d: &[u32],
        a: &[u32],
        b: &[u32],
    ) -> Result<(), (usize, String)> {
        if usize::from(self.k) <= MOST_K {
            self.multiply_sparse_within::<MOST_K, { 2 * MOST_K }>(regs, sparsity, d, a, b)
        } else {
            self.multiply_sparse_within::<MOST_STORED, MOST_K_SPARSE>(regs, sparsity, d, a, b)
        }
    }

    fn multiply_sparse_within<const STORED: usize, const K: usize>(
        &self,
        regs: &mut Regs,
        sparsity: Sparsity,
        d: &[u32],
        a: &[u32],
        b: &[u32],
    ) -> Result<(), (usize, String)> {
        let (left, right): (Left<STORED>, Right<K>) = (self.left(regs, a), self.right(regs, b));
        let columns = sparsity.columns(self, regs, &left)?;
        self.add_sparse_product(regs, d, &left, &columns, &right, Start::Registers);
        Ok(())
    }

    /// Stores the product of a sparse A and `right` in the registers `d`, added to what `start`
    /// names.
    pub(super) fn add_sparse_product<const STORED: usize, const K: usize>(
        &self,
        regs: &mut Regs,
        d: &[u32],
        left: &Left<STORED>,
        columns: &Columns<STORED>,
        right: &Right<K>,
        start: Start,
    ) {
        self.change_sums(regs, d, start, |row, sums| {
            for (left, &k) in left[row].iter().zip(&columns[row]).take(self.k.into()) {
                for (sum, right) in sums.iter_mut().zip(&right[usize::from(k)]) {
                    *sum += left * right;
                }
            }
        });
    }
}

//! The basic blocks of a kernel, and sets of its registers.

use crate::ir::{Inst, NO_GUARD, Op};

/// A set of registers.
#[derive(Clone, PartialEq)]
pub(super) struct Set(Vec<u64>);

impl Set {
    pub(super) fn new(n: usize) -> Self {
        Set(vec![0; n.div_ceil(64)])
    }
    pub(super) fn insert(&mut self, i: usize) {
        self.0[i / 64] |= 1 << (i % 64);
    }
    pub(super) fn contains(&self, i: usize) -> bool {
        self.0[i / 64] >> (i % 64) & 1 != 0
    }
    pub(super) fn remove(&mut self, i: usize) {
        self.0[i / 64] &= !(1 << (i % 64));
    }
    /// Adds the elements of `other`; true if that changes the set.
    pub(super) fn absorb(&mut self, other: &Set) -> bool {
        let mut new = 0;
        for (a, b) in self.0.iter_mut().zip(&other.0) {
            new |= b & !*a;
            *a |= b;
        }
        new != 0
    }
    pub(super) fn clear(&mut self) {
        self.0.fill(0);
    }
    /// Becomes equal to `other`, of the same size.
    pub(super) fn copy_from(&mut self, other: &Set) {
        self.0.copy_from_slice(&other.0);
    }
    pub(super) fn for_each(&self, mut f: impl FnMut(usize)) {
        for (w, &bits) in self.0.iter().enumerate() {
            let mut left = bits;
            while left != 0 {
                f(w * 64 + left.trailing_zeros() as usize);
                left &= left - 1;
            }
        }
    }
}

/// A use or definition of one register by one instruction.
pub(super) struct Touch {
    pub(super) register: usize,
    /// The whole register is replaced (not under a guard).
    pub(super) kills: bool,
    pub(super) defines: bool,
}

/// The basic blocks, in the order of the code, and where each goes on.
pub(super) struct ControlFlow {
    pub(super) blocks: Vec<std::ops::Range<usize>>,
    pub(super) successors: Vec<Vec<usize>>,
}

impl ControlFlow {
    pub(super) fn new(code: &[Inst], tables: &[Vec<u32>]) -> Self {
        let targets = |i: usize| -> Vec<usize> {
            match code[i].op {
                Op::Bra { target } => vec![target as usize],
                Op::BrxIdx { table, .. } => tables[table as usize].iter().map(|&t| t as usize).collect(),
                _ => vec![],
            }
        };
        let ends = |i: usize| matches!(code[i].op, Op::Bra { .. } | Op::BrxIdx { .. } | Op::Exit | Op::Trap);
        let mut leader = vec![false; code.len() + 1];
        leader[0] = true;
        for i in (0..code.len()).filter(|&i| ends(i)) {
            leader[i + 1] = true;
            targets(i).into_iter().for_each(|t| leader[t] = true);
        }
        let starts: Vec<usize> = (0..code.len()).filter(|&i| leader[i]).collect();
        let blocks: Vec<_> = starts
            .iter()
            .enumerate()
            .map(|(b, &s)| s..starts.get(b + 1).copied().unwrap_or(code.len()))
            .collect();
        let block_of = |i: usize| starts.partition_point(|&s| s <= i) - 1;
        let successors: Vec<Vec<usize>> = blocks
            .iter()
            .map(|block| {
                let last = block.end - 1;
                let mut next: Vec<usize> = targets(last).into_iter().map(block_of).collect();
                if (!ends(last) || code[last].guard != NO_GUARD) && block.end < code.len() {
                    next.push(block_of(block.end));
                }
                next
            })
            .collect();
        ControlFlow { blocks, successors }
    }
}

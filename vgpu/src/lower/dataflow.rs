//! Sets of registers, and reads of registers without a write before them.

use crate::ptx::Flow;

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
    /// Removes what is not in `other`.
    pub(super) fn retain(&mut self, other: &Set) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a &= b);
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

/// Instructions and registers that they read without a definition that could reach them, in the
/// order of the code: the value is the register's old contents, which may differ from run to run.
/// `written`: registers that are initialised.
///
/// Only a read that no definition reaches, on any path, is reported. A path without a write is not
/// enough: compilers carry values around loops, or under guards, and write them wherever they
/// matter. No data flow analysis can distinguish these.
pub(super) fn unwritten(flow: &Flow, touches: &[Vec<Touch>], written: &Set) -> Vec<(u32, usize)> {
    // Registers that may be written at the start of each block; `None` for blocks that no path
    // reaches.
    let mut into: Vec<Option<Set>> = vec![None; flow.blocks.len()];
    if let Some(entry) = into.first_mut() {
        *entry = Some(written.clone());
    }
    let mut set = written.clone();
    // In the order of the code, and again only where something before a block has changed.
    let mut stale = vec![false; flow.blocks.len()];
    stale.first_mut().into_iter().for_each(|first| *first = true);
    while stale.contains(&true) {
        for b in 0..flow.blocks.len() {
            let (true, Some(known)) = (std::mem::take(&mut stale[b]), &into[b]) else { continue };
            set.copy_from(known);
            let defined = flow.blocks[b].clone().flat_map(|i| &touches[i]).filter(|t| t.defines);
            defined.for_each(|t| set.insert(t.register));
            for &next in &flow.successors[b] {
                stale[next] |= match &mut into[next] {
                    Some(known) => known.absorb(&set),
                    unknown => {
                        *unknown = Some(set.clone());
                        true
                    }
                };
            }
        }
    }
    let mut found = vec![];
    for (block, set) in flow.blocks.iter().zip(into) {
        let Some(mut set) = set else { continue };
        for i in block.clone() {
            let reads = touches[i].iter().filter(|t| !t.defines && !set.contains(t.register));
            found.extend(reads.map(|t| (i as u32, t.register)));
            touches[i].iter().filter(|t| t.defines).for_each(|t| set.insert(t.register));
        }
    }
    found.dedup();
    found
}

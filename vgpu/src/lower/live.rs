//! The registers of a lowered kernel that are alive in front of an instruction: compiled code need
//! not store others.

use super::allocate::Liveness;
use super::dataflow::{Set, Touch};
use super::slice::Touched;
use crate::ir::File;
use crate::kernel::Kernel;
use crate::ptx::Flow;

/// Liveness of a kernel's slots.
pub(crate) struct Live {
    flow: Flow,
    touches: Vec<Vec<Touch>>,
    liveness: Liveness,
    base: [usize; 3],
    total: usize,
    /// By instruction: its basic block.
    block_of: Vec<usize>,
}

impl Live {
    pub(crate) fn new(kernel: &Kernel) -> Self {
        let Touched { flow, touches, base, total } = Touched::new(kernel);
        let liveness = Liveness::new(&flow, &touches, total);
        let mut block_of = vec![0; kernel.code.len()];
        for (b, block) in flow.blocks.iter().enumerate() {
            block_of[block.clone()].fill(b);
        }
        Live { flow, touches, liveness, base, total, block_of }
    }

    /// By instruction: whether a basic block begins there.
    pub(crate) fn leaders(&self) -> Vec<bool> {
        let mut leaders = vec![false; self.block_of.len()];
        self.flow.blocks.iter().for_each(|block| leaders[block.start] = true);
        leaders
    }

    /// The slots that are alive in front of instruction `at`.
    pub(crate) fn before(&self, at: usize) -> Vec<(File, u32)> {
        let b = self.block_of[at];
        let mut set = Set::new(self.total);
        self.liveness.out(&self.flow, b, &mut set);
        for i in (at..self.flow.blocks[b].end).rev() {
            self.touches[i].iter().filter(|t| t.kills).for_each(|t| set.remove(t.register));
            self.touches[i].iter().filter(|t| !t.kills).for_each(|t| set.insert(t.register));
        }
        let mut slots = vec![];
        set.for_each(|r| {
            let file = [File::Pred, File::R64, File::R32].into_iter().find(|&f| self.base[f as usize] <= r);
            let file = file.unwrap_or(File::R32);
            slots.push((file, (r - self.base[file as usize]) as u32));
        });
        slots
    }
}

//! Reads of registers without a write before them: the value is the register's old contents, which
//! may differ from run to run.
//!
//! Only a read that no definition reaches, on any path, is reported. A path without a write is not
//! enough: compilers carry values around loops, or under guards, and write them wherever they
//! matter. No data flow analysis can tell these apart.

use super::flow::{ControlFlow, Set, Touch};

/// Instructions and registers that they read without a definition that could reach them, in the
/// order of the code. `written`: registers that are initialised.
pub(super) fn unwritten(flow: &ControlFlow, touches: &[Vec<Touch>], written: &Set) -> Vec<(u32, usize)> {
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

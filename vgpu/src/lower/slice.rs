//! The instructions of a lowered kernel that a register's contents come from.

use std::collections::{HashSet, VecDeque};

use super::allocate::{flow_of, touches_of};
use super::dataflow::Touch;
use crate::ir::{Addr, BulkOp, File, Op, Operands, Space};
use crate::kernel::Kernel;
use crate::ptx::Flow;

/// Slots that each instruction of a kernel uses and defines, as numbers: 32-bit ones first, then
/// 64-bit ones, then predicates.
pub(super) struct Touched {
    pub(super) flow: Flow,
    pub(super) touches: Vec<Vec<Touch>>,
    /// Number of the first slot of each file.
    pub(super) base: [usize; 3],
    pub(super) total: usize,
}

impl Touched {
    pub(super) fn new(kernel: &Kernel) -> Self {
        let [n32, n64, np] = kernel.slots.map(|n| n as usize);
        let (base, total) = ([0, n32, n32 + n64], n32 + n64 + np);
        let id = |file: File, slot: u32| base[file as usize] + slot as usize;
        let mut operands = Operands {
            products: kernel.operands.products.clone(),
            warp_products: kernel.operands.warp_products.clone(),
            tensor_copies: kernel.operands.tensor_copies.clone(),
            multicasts: kernel.operands.multicasts.clone(),
            remote_stores: kernel.operands.remote_stores.clone(),
            reductions: kernel.operands.reductions.clone(),
            multimems: kernel.operands.multimems.clone(),
        };
        let instructions = kernel.code.iter().zip(&kernel.sigs);
        let touches = instructions
            .map(|(inst, sig)| touches_of((&mut inst.op.clone(), inst.guard), sig, &mut operands, id))
            .collect();
        Touched { flow: flow_of(&kernel.code, &kernel.tables), touches, base, total }
    }
}

/// Parts of basic blocks that are searched at the most.
const MOST_SEARCHED: usize = 10_000;

/// Instructions that have computed the address of access `pc`, the nearest first, up to `most`
/// lines of the source. Those of a copy are its addresses in global memory, if it has any.
/// Predicates are left out, that of `selp` included: most decide whether an access happens, and not
/// where. `writers`: the instructions that have last written the shared memory which a load there
/// has read.
pub(crate) fn behind_address(
    kernel: &Kernel,
    pc: u32,
    writers: &dyn Fn(u32) -> Vec<u32>,
    most: usize,
) -> Vec<u32> {
    let Touched { flow, touches, base, .. } = Touched::new(kernel);
    let at = pc as usize;
    let block_of = |at: usize| flow.blocks.iter().position(|block| block.contains(&at));
    let Some(block) = block_of(at) else { return vec![] };
    let mut before = vec![vec![]; flow.blocks.len()];
    for (from, to) in flow.successors.iter().enumerate() {
        to.iter().for_each(|&to| before[to].push(from));
    }
    let uses = |at: usize| {
        let uses =
            touches[at].iter().filter(|touch| !touch.defines && touch.register < base[File::Pred as usize]);
        uses.map(|touch| touch.register)
    };
    let of_address = |address: Addr| {
        let file = if address.wide { File::R64 } else { File::R32 };
        vec![base[file as usize] + address.slot as usize]
    };
    let addresses = match &kernel.code[at].op {
        Op::Ld(access) | Op::St(access) => of_address(access.addr),
        Op::Atom(atomic) => of_address(atomic.addr),
        Op::Mbar { addr, .. } | Op::Line { addr, .. } | Op::CheckRows { addr, .. } => of_address(*addr),
        Op::Multimem { access, .. } => of_address(kernel.operands.multimems[*access as usize].addr),
        Op::Bulk(BulkOp::RemoteStore { store }) => {
            of_address(kernel.operands.remote_stores[*store as usize].dst)
        }
        // The other operands have 32 bits.
        _ => {
            let is_wide = |register: &usize| *register >= base[File::R64 as usize];
            let (wide, narrow) = uses(at).partition::<Vec<_>, _>(is_wide);
            if wide.is_empty() { narrow } else { wide }
        }
    };
    // Registers, each with the part of a basic block in front of which it is needed.
    let mut needed: VecDeque<_> = addresses.into_iter().map(|register| (register, block, at)).collect();
    let (mut instructions, mut ends) = (HashSet::new(), HashSet::new());
    let (mut lines, mut found) = (HashSet::from([kernel.lines(pc)[0]]), vec![]);
    for _ in 0..MOST_SEARCHED {
        let Some((register, block, end)) = needed.pop_front() else { break };
        let range = flow.blocks[block].start..end;
        let defined =
            |at: &usize| touches[*at].iter().find(|touch| touch.defines && touch.register == register);
        let mut is_replaced = false;
        for (at, touch) in range.rev().filter_map(|at| Some((at, defined(&at)?))) {
            // A load goes on with the last writes of what it has read.
            let mut new = vec![at];
            let is_shared = matches!(&kernel.code[at].op, Op::Ld(access) if access.space == Space::Shared);
            if is_shared && !instructions.contains(&at) {
                new.extend(writers(at as u32).into_iter().map(|at| at as usize));
            }
            for at in new.into_iter().filter(|at| instructions.insert(*at)) {
                if lines.insert(kernel.lines(at as u32)[0]) {
                    found.push(at as u32);
                }
                if found.len() == most {
                    return found;
                }
                if let Some(block) = block_of(at) {
                    needed.extend(uses(at).map(|register| (register, block, at)));
                }
            }
            is_replaced |= touch.kills;
            if is_replaced {
                break;
            }
        }
        if !is_replaced {
            let ahead = before[block].iter().filter(|ahead| ends.insert((register, **ahead)));
            needed.extend(ahead.map(|&ahead| (register, ahead, flow.blocks[ahead].end)));
        }
    }
    found
}

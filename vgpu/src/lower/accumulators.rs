//! Registers of `wgmma` products that may be under way, by data flow.
//!
//! A product uses its registers until a `wgmma.wait_group`. Instructions that touch such a register
//! on some path get a check in front, which decides when it runs. A register that was accessed
//! since the last `wgmma.fence` on every path makes the product a fault.
//!
//! A `mov` of a register, or of its halves to two others, is a renaming here, and no access:
//! compilers put such moves between products, and in front of the wait.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::allocate::{flow_of, registers};
use super::dataflow::Set;
use super::state::Lower;
use crate::exec::lanes::Role;
use crate::exec::wgmma::{MatrixA, Product, Register, RegisterCheck, Use};
use crate::ir::{File, Inst, NO_GUARD, Op, WgmmaOp};

/// Groups behind a product are counted up to here, more than `wgmma.wait_group` can name.
const OLDEST: u32 = 64;

/// Facts that hold in front of an instruction, whichever path led to it.
#[derive(Clone, PartialEq)]
struct State {
    /// Registers of products that may be under way, and how many groups were committed since, at
    /// least.
    busy: BTreeMap<u32, u32>,
    /// Registers that were accessed since the last fence, on every path.
    accessed: Set,
}

impl State {
    /// Merges the facts of another path. True if that changes anything.
    fn join(&mut self, other: &State) -> bool {
        let before = self.clone();
        for (&register, &age) in &other.busy {
            self.busy.entry(register).and_modify(|old| *old = age.min(*old)).or_insert(age);
        }
        self.accessed.retain(&other.accessed);
        *self != before
    }
}

/// The registers of 32 bits that an instruction reads and writes.
type Accesses = [Vec<u32>; 2];

fn accesses(l: &mut Lower, at: usize) -> Accesses {
    let mut all = Accesses::default();
    registers(&mut l.code[at].op, &l.sigs[at], &mut l.operands, &mut |file, role, slot| {
        if file == File::R32 {
            all[usize::from(role != Role::Use)].push(*slot);
        }
    });
    all
}

/// The registers of a product: D, and A.
fn registers_of(product: &Product) -> impl Iterator<Item = (u32, Use)> {
    let a: &[u32] = if let MatrixA::Registers(slots) = &product.a { slots } else { &[] };
    let d = product.d.iter().map(|&slot| (slot, Use::Accumulator));
    d.chain(a.iter().map(|&slot| (slot, Use::Input)))
}

/// Puts checks in front of instructions that touch registers of products.
pub(super) fn guard(l: &mut Lower) {
    if l.operands.products.is_empty() {
        return;
    }
    let all: Vec<Accesses> = (0..l.code.len()).map(|at| accesses(l, at)).collect();
    let states = states(l, &all);
    let mut tracked = BTreeSet::new();
    let mut checks = vec![];
    for (at, state) in states.into_iter().enumerate() {
        let Some(state) = state else { continue };
        let register = |l: &Lower, number: u32| Register {
            number,
            name: l.name_of(File::R32, number).map_or_else(|| Arc::from("?"), Arc::from),
        };
        let busy = |l: &Lower, list: &[u32]| -> Vec<Register> {
            let busy = list.iter().filter(|&number| state.busy.contains_key(number));
            busy.map(|&number| register(l, number)).collect()
        };
        if let Op::Wgmma(WgmmaOp::Multiply { product }) = l.code[at].op {
            let product = product as usize;
            let list: Vec<(u32, Use)> = registers_of(&l.operands.products[product]).collect();
            let of_a: Vec<u32> = list.iter().filter(|r| r.1 == Use::Input).map(|r| r.0).collect();
            let reads = busy(l, &of_a);
            tracked.extend(reads.iter().map(|register| register.number));
            l.operands.products[product].reads = reads;
            l.operands.products[product].unfenced =
                list.iter().any(|r| state.accessed.contains(r.0 as usize));
            continue;
        }
        let [reads, writes] = [0, 1].map(|side| busy(l, &all[at][side]));
        if reads.is_empty() && writes.is_empty() {
            continue;
        }
        let moves = moved(l, &all, at)
            .map(|(from, to)| (register(l, from), to.iter().map(|&to| register(l, to)).collect::<Vec<_>>()));
        let both = moves.iter().flat_map(|(from, to)| to.iter().chain([from]));
        tracked.extend(reads.iter().chain(&writes).chain(both).map(|register| register.number));
        checks.push((at, Inst { op: Op::CheckRegisters(l.register_checks.len() as u32), ..l.code[at] }));
        l.register_checks.push(RegisterCheck { reads, writes, moves });
    }
    for product in &mut l.operands.products {
        product.tracked = registers_of(product).filter(|(number, _)| tracked.contains(number)).collect();
    }
    l.insert(checks);
}

/// The register that a plain move moves from, and those that it moves to.
fn moved<'a>(l: &Lower, all: &'a [Accesses], at: usize) -> Option<(u32, &'a [u32])> {
    match (&all[at], l.moves.binary_search(&at).is_ok()) {
        ([from, to], true) if !to.is_empty() => Some((*from.first()?, to)),
        _ => None,
    }
}

/// The state in front of each instruction that a path reaches.
fn states(l: &Lower, all: &[Accesses]) -> Vec<Option<State>> {
    let flow = flow_of(&l.code, &l.tables);
    let total = l.slots[File::R32 as usize] as usize;
    let mut accessed = Set::new(total);
    (0..total).for_each(|register| accessed.insert(register));
    let mut constant = Set::new(total);
    for &(_, slot, _) in l.inits.iter().filter(|(file, ..)| *file == File::R32) {
        constant.insert(slot as usize);
        accessed.remove(slot as usize);
    }
    let mut into: Vec<Option<State>> = vec![None; flow.blocks.len()];
    if let Some(entry) = into.first_mut() {
        *entry = Some(State { busy: BTreeMap::new(), accessed });
    }
    let mut stale: BTreeSet<usize> = BTreeSet::from([0]);
    while let Some(block) = stale.pop_first() {
        let Some(mut state) = into[block].clone() else { continue };
        flow.blocks[block].clone().for_each(|at| step(l, all, &constant, at, &mut state));
        for &next in &flow.successors[block] {
            let changed = match &mut into[next] {
                Some(known) => known.join(&state),
                unknown => {
                    *unknown = Some(state.clone());
                    true
                }
            };
            if changed {
                stale.insert(next);
            }
        }
    }
    let mut states = vec![None; l.code.len()];
    for (block, state) in flow.blocks.iter().zip(into) {
        let Some(mut state) = state else { continue };
        for at in block.clone() {
            // Only instructions that touch something busy, and products, are checked again.
            let product = matches!(l.code[at].op, Op::Wgmma(WgmmaOp::Multiply { .. }));
            if product || all[at].iter().flatten().any(|register| state.busy.contains_key(register)) {
                states[at] = Some(state.clone());
            }
            step(l, all, &constant, at, &mut state);
        }
    }
    states
}

/// Changes the state as an instruction does.
fn step(l: &Lower, all: &[Accesses], constant: &Set, at: usize, state: &mut State) {
    let Inst { op, guard, .. } = &l.code[at];
    match op {
        Op::Wgmma(WgmmaOp::Fence) => state.accessed.clear(),
        Op::Wgmma(WgmmaOp::Commit) => state.busy.values_mut().for_each(|age| *age = OLDEST.min(*age + 1)),
        Op::Wgmma(WgmmaOp::Wait { allowed }) => state.busy.retain(|_, age| *age <= *allowed),
        Op::Wgmma(WgmmaOp::Multiply { product }) => {
            for (register, _) in registers_of(&l.operands.products[*product as usize]) {
                state.busy.insert(register, 0);
            }
        }
        _ => {
            let [reads, writes] = &all[at];
            if let Some((from, to)) = moved(l, all, at) {
                let (age, accessed) =
                    (state.busy.get(&from).copied(), state.accessed.contains(from as usize));
                for &to in to {
                    if let Some(age) = age {
                        state.busy.insert(to, age);
                    } else if *guard == NO_GUARD {
                        state.busy.remove(&to);
                    }
                    match accessed {
                        true => state.accessed.insert(to as usize),
                        false => state.accessed.remove(to as usize),
                    }
                }
                return;
            }
            for &register in reads.iter().chain(writes) {
                if !constant.contains(register as usize) {
                    state.accessed.insert(register as usize);
                }
            }
            if *guard == NO_GUARD {
                state.busy.retain(|register, _| !writes.contains(register));
            }
        }
    }
}

//! Register allocation. PTX names a fresh register for nearly every value, and a slot of 32 lanes
//! is 128 or 256 bytes. So a kernel of a thousand registers would drag hundreds of KiB per warp
//! through the caches. Registers that are never alive at the same time share a slot here: liveness
//! by data flow, then linear scan over whole intervals.
//!
//! Divergence does not matter: each lane has its own column of every slot and writes only there, so
//! only the liveness on a lane's own path through the code matters to it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::dataflow::{Set, Touch, unwritten};
use crate::exec::lanes::{Role, Sig};
use crate::exec::products::{Shape, WarpProduct};
use crate::exec::wgmma::{MatrixA, Product};
use crate::ir::{
    Access, Addr, BulkOp, CARRY, CopyOp, File, GUARD_NOT, Init, Inst, MbarOp, Multicast, Multimem, NO_GUARD,
    Op, Operands, Reduction, RemoteStore, SINK, TensorCopy, Votes, WarpOp, Way, WgmmaOp,
};
use crate::ptx::Flow;
use crate::ptx::flow::Leave;

/// Shows every register of an instruction, its guard aside, to `f`. `sig` describes the slots of
/// [`Op::Alu`]; those of some others are in `operands`.
pub(super) fn registers(
    op: &mut Op,
    sig: &[Sig],
    operands: &mut Operands,
    f: &mut dyn FnMut(File, Role, &mut u32),
) {
    use File::{Pred, R32, R64};
    use Role::{Def, Update, Use};
    fn address(a: &mut Addr, f: &mut dyn FnMut(File, Role, &mut u32)) {
        f(if a.wide { R64 } else { R32 }, Use, &mut a.slot);
    }
    fn vector(a: &mut Access, role: Role, f: &mut dyn FnMut(File, Role, &mut u32)) {
        address(&mut a.addr, f);
        let n = usize::from(a.n);
        a.regs[..n].iter_mut().for_each(|r| f(if a.wide { R64 } else { R32 }, role, r));
    }
    match op {
        Op::Alu { s, .. } => sig.iter().zip(s).for_each(|(sig, slot)| f(sig.file, sig.role, slot)),
        Op::BrxIdx { index, .. } => f(R32, Use, index),
        Op::Ld(a) => vector(a, Def, f),
        Op::St(a) => vector(a, Use, f),
        Op::Atom(a) => {
            let file = if a.bytes == 8 { R64 } else { R32 };
            address(&mut a.addr, f);
            f(file, Use, &mut a.a);
            f(file, Use, &mut a.b);
            f(file, Def, &mut a.d);
        }
        Op::Timer { what, d } => f(if what.is_wide() { R64 } else { R32 }, Def, d),
        Op::ActiveMask { d } => f(R32, Def, d),
        Op::Warp { op, mask } => {
            f(R32, Use, mask);
            match op {
                WarpOp::Sync => {}
                WarpOp::Shfl { d, p, a, lane, clamp, .. } => {
                    [a, lane, clamp].into_iter().for_each(|s| f(R32, Use, s));
                    f(R32, Def, d);
                    f(Pred, Def, p);
                }
                WarpOp::VoteAll { d, p } | WarpOp::VoteAny { d, p } | WarpOp::VoteUni { d, p } => {
                    f(Pred, Use, p);
                    f(Pred, Def, d);
                }
                WarpOp::Ballot { d, p } => {
                    f(Pred, Use, p);
                    f(R32, Def, d);
                }
                WarpOp::MatchAny { d, a, wide } => {
                    f(if *wide { R64 } else { R32 }, Use, a);
                    f(R32, Def, d);
                }
                WarpOp::MatchAll { d, p, a, wide } => {
                    f(if *wide { R64 } else { R32 }, Use, a);
                    f(R32, Def, d);
                    f(Pred, Def, p);
                }
                WarpOp::Redux { d, a, .. } => {
                    f(R32, Use, a);
                    f(R32, Def, d);
                }
                WarpOp::Mma { mma, d, a, b } => {
                    let [na, nb, nd] = mma.registers();
                    // The lowering's own registers, written in front of it and read behind it.
                    d[..nd].iter_mut().for_each(|s| f(R32, Use, s));
                    a[..na].iter_mut().chain(&mut b[..nb]).for_each(|s| f(R32, Use, s));
                }
                WarpOp::Product { product } => {
                    let WarpProduct { shape, d, a, b } = &mut operands.warp_products[*product as usize];
                    let file = shape.file();
                    d.iter_mut().chain(a).chain(b).for_each(|s| f(file, Use, s));
                    if let Shape::Sparse { sparsity, .. } = shape {
                        f(R32, Use, &mut sparsity.metadata);
                    }
                }
                WarpOp::Elect { d, p } => {
                    f(R32, Def, d);
                    f(Pred, Def, p);
                }
            }
        }
        Op::Barrier { id, count, .. } => {
            f(R32, Use, id);
            f(R32, Use, count);
        }
        Op::BarrierVote { id, p } => {
            f(R32, Use, id);
            f(Pred, Use, p);
        }
        Op::BarrierResult { what, d } => f(if *what == Votes::Count { R32 } else { Pred }, Def, d),
        Op::Mbar { op, addr, .. } => {
            address(addr, f);
            match op {
                MbarOp::Init { count } => f(R32, Use, count),
                MbarOp::Inval => {}
                MbarOp::Arrive { state, count, tx, .. } => {
                    f(R32, Use, count);
                    f(R32, Use, tx);
                    f(R64, Def, state);
                }
                MbarOp::ExpectTx { tx } | MbarOp::CompleteTx { tx } => f(R32, Use, tx),
                MbarOp::TestState { p, state, .. } => {
                    f(R64, Use, state);
                    f(Pred, Def, p);
                }
                MbarOp::TestParity { p, parity, .. } => {
                    f(R32, Use, parity);
                    f(Pred, Def, p);
                }
            }
        }
        Op::Line { addr, .. } | Op::CheckRows { addr, .. } => address(addr, f),
        Op::Print { format, arguments, d } => {
            [format, arguments].into_iter().for_each(|s| f(R64, Use, s));
            f(R32, Def, d);
        }
        Op::PendingCount { d, state } => {
            f(R64, Use, state);
            f(R32, Def, d);
        }
        Op::Bulk(op) => match op {
            BulkOp::Load { dst, src, size, mbar } | BulkOp::SharedToShared { dst, src, size, mbar } => {
                [dst, src, mbar].into_iter().for_each(|a| address(a, f));
                f(R32, Use, size);
            }
            BulkOp::Store { dst, src, size } => {
                [dst, src].into_iter().for_each(|a| address(a, f));
                f(R32, Use, size);
            }
            BulkOp::Prefetch { src, size } => {
                address(src, f);
                f(R32, Use, size);
            }
            BulkOp::Tensor { copy } => {
                let TensorCopy { way, map, coordinates, shared, blocks, rank, offsets } =
                    &mut operands.tensor_copies[*copy as usize];
                address(map, f);
                coordinates[..usize::from(*rank)].iter_mut().for_each(|s| f(R32, Use, s));
                f(R32, Use, blocks);
                offsets.iter_mut().flatten().for_each(|s| f(R32, Use, s));
                if let Way::Load(mbar) = way {
                    address(mbar, f);
                }
                if !matches!(way, Way::Prefetch) {
                    address(shared, f);
                }
            }
            BulkOp::Multicast { copy } => {
                let Multicast { dst, src, size, mbar, blocks } = &mut operands.multicasts[*copy as usize];
                [dst, src, mbar].into_iter().for_each(|a| address(a, f));
                [size, blocks].into_iter().for_each(|s| f(R32, Use, s));
            }
            BulkOp::RemoteStore { store } => {
                let RemoteStore { dst, mbar, bytes, n, regs, .. } =
                    &mut operands.remote_stores[*store as usize];
                [dst, mbar].into_iter().for_each(|a| address(a, f));
                let file = if *bytes == 8 { R64 } else { R32 };
                regs[..usize::from(*n)].iter_mut().for_each(|s| f(file, Use, s));
            }
            BulkOp::Reduce { copy } => {
                let Reduction { dst, src, size, mbar, .. } = &mut operands.reductions[*copy as usize];
                [dst, src].into_iter().chain(mbar).for_each(|a| address(a, f));
                f(R32, Use, size);
            }
            BulkOp::Commit | BulkOp::Wait { .. } => {}
        },
        Op::Multimem { access, loads } => {
            let Multimem { addr, bytes, n, regs, .. } = &mut operands.multimems[*access as usize];
            address(addr, f);
            let (file, role) = (if *bytes == 8 { R64 } else { R32 }, if *loads { Def } else { Use });
            regs[..usize::from(*n)].iter_mut().for_each(|s| f(file, role, s));
        }
        Op::Copy(op) => match op {
            CopyOp::Start { dst, src, read, .. } => {
                [dst, src].into_iter().for_each(|a| address(a, f));
                if *read != SINK {
                    f(R32, Use, read);
                }
            }
            CopyOp::Arrive { mbar, .. } => address(mbar, f),
            CopyOp::Commit | CopyOp::Wait { .. } | CopyOp::WaitAll => {}
        },
        Op::Wgmma(WgmmaOp::Multiply { product }) => {
            let Product { a, b, d, adds, sparsity, .. } = &mut operands.products[*product as usize];
            f(Pred, Use, adds);
            f(R64, Use, b);
            if let Some(sparsity) = sparsity {
                f(R32, Use, &mut sparsity.metadata);
            }
            match a {
                MatrixA::Registers(slots) => slots.iter_mut().for_each(|s| f(R32, Use, s)),
                MatrixA::Shared(descriptor, _) => f(R64, Use, descriptor),
            }
            d.iter_mut().for_each(|s| f(R32, Update, s));
        }
        Op::Bra { .. }
        | Op::Wgmma(_)
        | Op::CheckRegisters(_)
        | Op::UnwrittenRegisters(_)
        | Op::ClusterArrive { .. }
        | Op::ClusterWait { .. }
        | Op::Fence(_)
        | Op::Sleep
        | Op::Exit
        | Op::Trap
        | Op::CallThroughPointer
        | Op::Nop => {}
    }
}

/// The registers that an instruction under a guard uses and defines, by their numbers.
pub(super) fn touches_of(
    (op, guard): (&mut Op, u32),
    sig: &[Sig],
    operands: &mut Operands,
    id: impl Fn(File, u32) -> usize,
) -> Vec<Touch> {
    let guarded = guard != NO_GUARD;
    let mut list = vec![];
    if guarded {
        let register = id(File::Pred, guard & !GUARD_NOT);
        list.push(Touch { register, kills: false, defines: false });
    }
    registers(op, sig, operands, &mut |file, role, slot| {
        let (defines, kills) = (role != Role::Use, role == Role::Def && !guarded);
        list.push(Touch { register: id(file, *slot), kills, defines });
    });
    list
}

/// The control flow of lowered code.
pub(super) fn flow_of(code: &[Inst], tables: &[Vec<u32>]) -> Flow {
    Flow::new(code.len(), |i| {
        let (targets, exits) = match code[i].op {
            Op::Bra { target } => (vec![target as usize], false),
            Op::BrxIdx { table, .. } => {
                (tables[table as usize].iter().map(|&target| target as usize).collect(), false)
            }
            Op::Exit | Op::Trap | Op::CallThroughPointer => (vec![], true),
            _ => return None,
        };
        Some(Leave { targets, exits, continues: code[i].guard != NO_GUARD })
    })
}

/// Results of [`allocate`].
pub(super) struct Allocated {
    /// Reads of registers that nothing can have written, in the order of the code.
    pub(super) unwritten: Vec<Unwritten>,
    /// Slots that are alive at the first instruction. The initial contents of the others are never
    /// read.
    pub(super) alive: Vec<(File, u32)>,
}

/// A read of a register that nothing can have written.
pub(super) struct Unwritten {
    /// Number of the instruction.
    pub(super) at: usize,
    pub(super) file: File,
    /// The slot before [`allocate`].
    pub(super) slot: u32,
    /// The register is the instruction's guard, which is read in any case.
    pub(super) guards: bool,
}

/// Gives registers that are never alive together the same slot.
pub(super) fn allocate(
    code: &mut [Inst],
    sigs: &[Vec<Sig>],
    tables: &[Vec<u32>],
    operands: &mut Operands,
    slots: &mut [u32; 3],
    inits: &mut Vec<(File, u32, Init)>,
) -> Allocated {
    let base = [0, slots[0] as usize, (slots[0] + slots[1]) as usize];
    let total = base[2] + slots[2] as usize;
    let id = |file: File, slot: u32| base[file as usize] + slot as usize;

    // The sink, the carry flag and the initialised registers keep slots of their own.
    let mut pinned = vec![false; total];
    [id(File::R32, SINK), id(File::R64, SINK), id(File::Pred, SINK), id(File::Pred, CARRY)]
        .into_iter()
        .chain(inits.iter().map(|&(file, slot, _)| id(file, slot)))
        .for_each(|r| pinned[r] = true);

    let mut referenced = vec![false; total];
    let touches: Vec<Vec<Touch>> = code
        .iter_mut()
        .zip(sigs)
        .map(|(inst, sig)| {
            let list = touches_of((&mut inst.op, inst.guard), sig, operands, id);
            list.iter().for_each(|t| referenced[t.register] = true);
            list
        })
        .collect();

    let flow = flow_of(code, tables);
    let mut written = Set::new(total);
    (0..total).filter(|&r| pinned[r]).for_each(|r| written.insert(r));
    let file_and_slot = |r: usize| {
        let file = [File::Pred, File::R64, File::R32].into_iter().find(|&f| base[f as usize] <= r);
        let file = file.unwrap_or(File::R32);
        (file, (r - base[file as usize]) as u32)
    };
    let describe = |(at, r): (u32, usize)| {
        let (at, (file, slot)) = (at as usize, file_and_slot(r));
        let guard = code[at].guard;
        let guards = guard != NO_GUARD && r == id(File::Pred, guard & !GUARD_NOT);
        Unwritten { at, file, slot, guards }
    };
    let unwritten = unwritten(&flow, &touches, &written).into_iter().map(describe).collect();

    let live = Liveness::new(&flow, &touches, total);
    let mut out = Set::new(total);
    let (mut start, mut end) = (vec![usize::MAX; total], vec![0; total]);
    let mut extend = |r: usize, at: usize| {
        start[r] = start[r].min(at);
        end[r] = end[r].max(at);
    };
    // Uses of instruction i happen at 2i, definitions at 2i + 1.
    for (b, block) in flow.blocks.iter().enumerate() {
        live.into[b].for_each(|r| extend(r, 2 * block.start));
        live.out(&flow, b, &mut out);
        out.for_each(|r| extend(r, 2 * block.end - 1));
        for i in block.clone() {
            touches[i].iter().for_each(|t| extend(t.register, 2 * i + usize::from(t.defines)));
        }
    }

    let mut slot_of = vec![SINK; total];
    for (file, &first) in base.iter().enumerate() {
        let range = first..first + slots[file] as usize;
        let mut next = 0;
        let mut fresh = || {
            next += 1;
            next - 1
        };
        let sink = usize::from(file == File::Pred as usize);
        for r in range.clone().filter(|&r| pinned[r]) {
            if referenced[r] || r <= first + sink {
                slot_of[r] = fresh();
            }
        }
        let mut order: Vec<usize> = range.filter(|&r| !pinned[r] && referenced[r]).collect();
        order.sort_by_key(|&r| start[r]);
        let mut active: BinaryHeap<Reverse<(usize, u32)>> = BinaryHeap::new();
        let mut free: BinaryHeap<Reverse<u32>> = BinaryHeap::new();
        for r in order {
            while let Some(&Reverse((until, slot))) = active.peek() {
                if until >= start[r] {
                    break;
                }
                active.pop();
                free.push(Reverse(slot));
            }
            let slot = free.pop().map_or_else(&mut fresh, |Reverse(s)| s);
            slot_of[r] = slot;
            active.push(Reverse((end[r], slot)));
        }
        slots[file] = next;
    }

    for (inst, sig) in code.iter_mut().zip(sigs) {
        if inst.guard != NO_GUARD {
            let r = id(File::Pred, inst.guard & !GUARD_NOT);
            inst.guard = slot_of[r] | inst.guard & GUARD_NOT;
        }
        registers(&mut inst.op, sig, operands, &mut |file, _, slot| *slot = slot_of[id(file, *slot)]);
    }
    inits.retain(|&(file, slot, _)| referenced[id(file, slot)]);
    inits.iter_mut().for_each(|(file, slot, _)| *slot = slot_of[id(*file, *slot)]);

    let mut alive = vec![];
    if let Some(first) = live.into.first() {
        first.for_each(|r| alive.push((file_and_slot(r).0, slot_of[r])));
    }
    Allocated { unwritten, alive }
}

/// Slots that are alive at the start of each basic block.
pub(super) struct Liveness {
    into: Vec<Set>,
}

impl Liveness {
    pub(super) fn new(flow: &Flow, touches: &[Vec<Touch>], total: usize) -> Self {
        let mut live = Liveness { into: vec![Set::new(total); flow.blocks.len()] };
        let mut before = vec![vec![]; flow.blocks.len()];
        for (b, successors) in flow.successors.iter().enumerate() {
            successors.iter().for_each(|&next| before[next].push(b));
        }
        let mut set = Set::new(total);
        // Backwards, and again only where something behind a block has changed.
        let mut stale = vec![true; flow.blocks.len()];
        while stale.contains(&true) {
            for b in (0..flow.blocks.len()).rev() {
                if !std::mem::take(&mut stale[b]) {
                    continue;
                }
                live.out(flow, b, &mut set);
                for i in flow.blocks[b].clone().rev() {
                    touches[i].iter().filter(|t| t.kills).for_each(|t| set.remove(t.register));
                    touches[i].iter().filter(|t| !t.kills).for_each(|t| set.insert(t.register));
                }
                // A live set only ever grows.
                if live.into[b].absorb(&set) {
                    before[b].iter().for_each(|&earlier| stale[earlier] = true);
                }
            }
        }
        live
    }

    /// Sets `set` to the slots that are alive at the end of a block.
    pub(super) fn out(&self, flow: &Flow, b: usize, set: &mut Set) {
        set.clear();
        for &next in &flow.successors[b] {
            set.absorb(&self.into[next]);
        }
    }
}

//! `ldmatrix` and `stmatrix`, 8 x 8 matrices of 16-bit elements between shared memory and the
//! registers of a warp, and `mma.sync`, products of matrices in registers.
//!
//! Lane `8 m + r` gives the address of row `r` of matrix `m`, and lane `t` holds elements
//! `2 (t % 4)` and the next of row `t / 4`; with `.trans`, of column `t / 4`. So each lane gets the
//! addresses of its rows by shuffles, and then accesses shared memory by itself.

use super::decode::Emit;
use super::products;
use super::state::{Lower, Lowered};
use super::types::Mods;
use crate::exec::lanes::{op1, op2};
use crate::exec::mma::{Element, Mma, Sum};
use crate::ir::{Access, Addr, FULL, File, Init, Op, SINK, Scope, Sem, ShflMode, Space, Special, WarpOp};
use crate::ptx::{Operand, Span};

pub(super) fn transfer(m: &mut Mods) -> Result<Emit, String> {
    let load = m.base == "ldmatrix";
    let whole = m.has("sync") & m.has("aligned") & m.has("m8n8") & m.has("b16");
    let Some(n) = m.one_of(&[("x1", 1), ("x2", 2), ("x4", 4)]) else { return m.unsupported() };
    let transposed = m.has("trans");
    let space = match m.has("shared") || m.has("shared::cta") {
        true => Space::Shared,
        false => Space::Generic,
    };
    if !whole {
        return m.unsupported();
    }
    Ok(Box::new(move |l, ops| {
        l.count(ops, 2..=2)?;
        let (regs, address) = if load { (&ops[0], &ops[1]) } else { (&ops[1], &ops[0]) };
        let single;
        let regs_of = match &regs.0 {
            Operand::Vector(v) => v.as_slice(),
            other => {
                single = [other.clone()];
                &single
            }
        };
        if regs_of.len() != n {
            return Err((regs.1, format!("{} registers given, {n} expected", regs_of.len())));
        }
        let rows = row_addresses(l, address, 8 * n as u32)?;
        for (matrix, reg) in regs_of.iter().enumerate() {
            let reg = (reg.clone(), regs.1);
            let reg = if load { l.dest_of::<u32>(&reg)? } else { l.source_of::<u32>(&reg)? };
            one(l, load, transposed, space, rows, matrix as u64, reg);
        }
        Ok(())
    }))
}

/// The address that each lane gives, in two halves, since shuffles take 32 bits; the second is
/// missing in a 32-bit address. The first `rows` lanes give those of rows.
fn row_addresses(l: &mut Lower, op: &(Operand, Span), rows: u32) -> Lowered<(u32, Option<u32>)> {
    let addr @ Addr { slot, wide, offset } = l.address(op)?;
    l.push(Op::CheckRows { addr, rows });
    let low = l.slot(File::R32);
    let add = l.constant(if wide { File::R64 } else { File::R32 }, Init::Bits(offset as u64));
    if !wide {
        let sum = op2(u32::wrapping_add);
        l.push_alu(sum.f, [low, slot, add, 0, 0, 0], sum.sig);
        return Ok((low, None));
    }
    let high = l.slot(File::R32);
    let sums = [
        op2(|a: u64, b: u64| a.wrapping_add(b) as u32),
        op2(|a: u64, b: u64| (a.wrapping_add(b) >> 32) as u32),
    ];
    for (sum, d) in sums.iter().zip([low, high]) {
        l.push_alu(sum.f, [d, slot, add, 0, 0, 0], sum.sig);
    }
    Ok((low, Some(high)))
}

/// One matrix between shared memory and the register `reg`.
fn one(
    l: &mut Lower,
    load: bool,
    transposed: bool,
    space: Space,
    rows: (u32, Option<u32>),
    matrix: u64,
    reg: u32,
) {
    if !transposed {
        let row = op2(|lane: u32, first: u32| first + lane / 4);
        let at = op2(|a: u64, lane: u32| a.wrapping_add(u64::from(lane % 4 * 4)));
        let addr = element(l, rows, matrix, row, at);
        l.push(access(load, space, addr, 4, reg));
        return;
    }
    let halves = [l.slot(File::R32), l.slot(File::R32)];
    if !load {
        let parts = [op1(|v: u32| v & 0xffff), op1(|v: u32| v >> 16)];
        for (part, half) in parts.iter().zip(halves) {
            l.push_alu(part.f, [half, reg, 0, 0, 0, 0], part.sig);
        }
    }
    let row_of = [
        op2(|lane: u32, first: u32| first + lane % 4 * 2),
        op2(|lane: u32, first: u32| first + lane % 4 * 2 + 1),
    ];
    for (row, half) in row_of.into_iter().zip(halves) {
        let at = op2(|a: u64, lane: u32| a.wrapping_add(u64::from(lane / 4 * 2)));
        let addr = element(l, rows, matrix, row, at);
        l.push(access(load, space, addr, 2, half));
    }
    if load {
        let join = op2(|low: u32, high: u32| low | high << 16);
        l.push_alu(join.f, [reg, halves[0], halves[1], 0, 0, 0], join.sig);
    }
}

/// The address of a lane's element. `row` gives the lane that holds the row's address, `at` the
/// position in the row.
fn element(
    l: &mut Lower,
    rows: (u32, Option<u32>),
    matrix: u64,
    row: crate::exec::lanes::Spec,
    at: crate::exec::lanes::Spec,
) -> Addr {
    let lane = l.constant(File::R32, Init::Special(Special::LaneId));
    let first = l.constant(File::R32, Init::Bits(8 * matrix));
    let clamp = l.constant(File::R32, Init::Bits(31));
    let mask = l.constant(File::R32, Init::Bits(FULL.into()));
    let zero = l.constant(File::R32, Init::Bits(0));
    let source = l.slot(File::R32);
    l.push_alu(row.f, [source, lane, first, 0, 0, 0], row.sig);
    let fetch = |l: &mut Lower, a: u32| {
        let d = l.slot(File::R32);
        let op = WarpOp::Shfl { mode: ShflMode::Idx, d, p: SINK, a, lane: source, clamp };
        l.push(Op::Warp { op, mask });
        d
    };
    let low = fetch(l, rows.0);
    let high = rows.1.map_or(zero, |high| fetch(l, high));
    let whole = l.slot(File::R64);
    let join = op2(|low: u32, high: u32| u64::from(high) << 32 | u64::from(low));
    l.push_alu(join.f, [whole, low, high, 0, 0, 0], join.sig);
    l.push_alu(at.f, [whole, whole, lane, 0, 0, 0], at.sig);
    Addr { slot: whole, wide: true, offset: 0 }
}

/// A weak access of one element.
pub(super) fn access(load: bool, space: Space, addr: Addr, bytes: u8, reg: u32) -> Op {
    let regs = [reg, SINK, SINK, SINK];
    let a = Access {
        space,
        sem: Sem::Weak,
        scope: Scope::Cta,
        addr,
        bytes,
        n: 1,
        wide: bytes == 8,
        signed: false,
        whole: false,
        read_only: false,
        regs,
    };
    if load { Op::Ld(a) } else { Op::St(a) }
}

/// `movmatrix.sync.aligned.m8n8.trans.b16`: the transpose of a matrix in registers. A lane holds
/// column `lane / 4` of two rows of the source, which are in two lanes.
pub(super) fn transpose(m: &mut Mods) -> Result<Emit, String> {
    if !(m.has("sync") & m.has("aligned") & m.has("m8n8") & m.has("trans") & m.has("b16")) {
        return m.unsupported();
    }
    let holders = [op1(|lane: u32| lane % 4 * 8 + lane / 8), op1(|lane: u32| lane % 4 * 8 + 4 + lane / 8)];
    let half = op2(|v: u32, lane: u32| v >> (lane / 4 % 2 * 16) & 0xffff);
    let join = op2(|low: u32, high: u32| low | high << 16);
    Ok(Box::new(move |l, ops| {
        l.count(ops, 2..=2)?;
        let (d, a) = (l.dest_of::<u32>(&ops[0])?, l.source_of::<u32>(&ops[1])?);
        let lane = l.constant(File::R32, Init::Special(Special::LaneId));
        let clamp = l.constant(File::R32, Init::Bits(31));
        let mask = l.constant(File::R32, Init::Bits(FULL.into()));
        let mut halves = [SINK; 2];
        for (to, holder) in halves.iter_mut().zip(&holders) {
            let source = l.slot(File::R32);
            l.push_alu(holder.f, [source, lane, lane, 0, 0, 0], holder.sig);
            let value = l.slot(File::R32);
            let op = WarpOp::Shfl { mode: ShflMode::Idx, d: value, p: SINK, a, lane: source, clamp };
            l.push(Op::Warp { op, mask });
            *to = l.slot(File::R32);
            l.push_alu(half.f, [*to, value, lane, 0, 0, 0], half.sig);
        }
        l.push_alu(join.f, [d, halves[0], halves[1], 0, 0, 0], join.sig);
        Ok(())
    }))
}

/// The type of the elements of A or B that a modifier names.
pub(super) fn factor_type(name: &str) -> Option<Element> {
    Some(match name {
        "f16" => Element::F16,
        "bf16" => Element::Bf16,
        "tf32" => Element::Tf32,
        "e4m3" => Element::E4m3,
        "e5m2" => Element::E5m2,
        "u8" => Element::U8,
        "s8" => Element::S8,
        _ => return None,
    })
}

/// The same with the types of 4 bits, which `wgmma` lacks.
pub(super) fn small_factor_type(name: &str) -> Option<Element> {
    match name {
        "u4" => Some(Element::U4),
        "s4" => Some(Element::S4),
        other => factor_type(other),
    }
}

/// The type of the elements of D that a modifier names.
pub(super) fn sum_type(name: &str, saturates: bool) -> Option<Sum> {
    Some(match name {
        "f32" => Sum::F32,
        "f16" => Sum::F16,
        "s32" if saturates => Sum::SaturatedS32,
        "s32" => Sum::S32,
        _ => return None,
    })
}

/// `mma.sync.aligned.SHAPE.row.col{.satfinite}.D.A.B.C`: here the floats of 8 to 32 bits and the
/// integers of 4 and 8 in dense matrices, in [`products`] the others.
pub(super) fn multiply(m: &mut Mods) -> Result<Emit, String> {
    let whole = m.has("sync") & m.has("aligned") & m.has("row") & m.has("col");
    if let Some(emit) = products::decode(m, whole)? {
        return Ok(emit);
    }
    let shapes = [
        ("m8n8k16", (8, 16)),
        ("m16n8k4", (16, 4)),
        ("m16n8k8", (16, 8)),
        ("m16n8k16", (16, 16)),
        ("m16n8k32", (16, 32)),
        ("m8n8k32", (8, 32)),
        ("m16n8k64", (16, 64)),
    ];
    let Some((rows, k)) = m.one_of(&shapes) else { return m.unsupported() };
    let saturates = m.has("satfinite");
    // The last four others are the types of D, A, B and C. CUTLASS has `.satfinite` behind them.
    let names: Vec<&str> = m.names().filter(|name| *name != "satfinite").collect();
    let &[.., d, a, b, c] = names.as_slice() else { return m.unsupported() };
    m.ignore(&[d, a, b, c]);
    let Some(sum) = sum_type(d, saturates) else { return m.unsupported() };
    let (Some(a), Some(b)) = (small_factor_type(a), small_factor_type(b)) else { return m.unsupported() };
    use Element::{Bf16, E4m3, E5m2, F16, S4, S8, Tf32, U4, U8};
    let exists = match (a, b) {
        (F16, F16) => rows == 16 && matches!(k, 8 | 16) && matches!(sum, Sum::F32 | Sum::F16),
        (Bf16, Bf16) => rows == 16 && matches!(k, 8 | 16) && sum == Sum::F32,
        (Tf32, Tf32) => matches!(k, 4 | 8) && sum == Sum::F32,
        (E4m3 | E5m2, E4m3 | E5m2) => {
            rows == 16 && matches!(k, 16 | 32) && matches!(sum, Sum::F32 | Sum::F16)
        }
        (U8 | S8, U8 | S8) => {
            matches!((rows, k), (8, 16) | (16, 16 | 32)) && matches!(sum, Sum::S32 | Sum::SaturatedS32)
        }
        (U4 | S4, U4 | S4) => {
            matches!((rows, k), (8, 32) | (16, 32 | 64)) && matches!(sum, Sum::S32 | Sum::SaturatedS32)
        }
        _ => false,
    };
    let floats_saturate = saturates && sum != Sum::SaturatedS32;
    if !whole || !exists || floats_saturate || c != d {
        return m.unsupported();
    }
    let mma = Mma { rows, k, a, b, sum };
    Ok(Box::new(move |l, ops| product(l, mma, ops)))
}

fn product(l: &mut Lower, mma: Mma, ops: &[(Operand, Span)]) -> Lowered<()> {
    l.count(ops, 4..=4)?;
    let [na, nb, nd] = mma.registers();
    let (mut a, mut b, mut sums) = ([SINK; 4], [SINK; 2], [SINK; 4]);
    for (slot, op) in a.iter_mut().zip(parts_of(&ops[1], na)?) {
        *slot = l.source_of::<u32>(&op)?;
    }
    for (slot, op) in b.iter_mut().zip(parts_of(&ops[2], nb)?) {
        *slot = l.source_of::<u32>(&op)?;
    }
    // D may be registers of A or B, so the sums have registers of their own.
    let copy = op1(|a: u32| a);
    for (slot, op) in sums.iter_mut().zip(parts_of(&ops[3], nd)?) {
        let from = l.source_of::<u32>(&op)?;
        *slot = l.slot(File::R32);
        l.push_alu(copy.f, [*slot, from, 0, 0, 0, 0], copy.sig);
    }
    let mask = l.constant(File::R32, Init::Bits(FULL.into()));
    l.push(Op::Warp { op: WarpOp::Mma { mma, d: sums, a, b }, mask });
    for (slot, op) in sums.into_iter().zip(parts_of(&ops[0], nd)?) {
        let to = l.dest_of::<u32>(&op)?;
        l.push_alu(copy.f, [to, slot, 0, 0, 0, 0], copy.sig);
    }
    Ok(())
}

/// The registers of a matrix. One register needs no list.
pub(super) fn parts_of(op: &(Operand, Span), wanted: usize) -> Lowered<Vec<(Operand, Span)>> {
    let parts = match &op.0 {
        Operand::Vector(parts) => parts.clone(),
        other => vec![other.clone()],
    };
    match parts.len() == wanted {
        true => Ok(parts.into_iter().map(|part| (part, op.1)).collect()),
        false => Err((op.1, format!("{} registers given, {wanted} expected", parts.len()))),
    }
}

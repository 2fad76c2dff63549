//! Decoding of an opcode to the function that handles its operands.

use super::state::{Lower, Lowered, Patch, timer_register};
use super::types::{Mods, Ty};
use super::wgmma::integer;
use super::{arith, call, cluster, convert, extended, matrix, mem, multimem, sync, tensor, wgmma, wmma};
use crate::compiled::native::{Logic, Native, Unary, Width};
use crate::exec::lanes::{Lane, Role, Sig, Spec, lanes, op1};
use crate::ir::{File, Op, SINK};
use crate::ptx::{Operand, Span};
use crate::registers::Regs;

/// Takes the operands of an instruction with a decoded opcode, and adds the instruction to the
/// code.
pub(super) type Emit = Box<dyn Fn(&mut Lower, &[(Operand, Span)]) -> Lowered<()>>;

/// An instruction without anything to do at run time but `op`; its operands are only counted.
pub(super) fn plain(op: Op, operands: usize) -> Emit {
    Box::new(move |l, ops| {
        l.count(ops, operands..=operands)?;
        l.push(op);
        Ok(())
    })
}

/// An instruction whose operands are those of its [`Spec`].
pub(super) fn simple(spec: Spec) -> Emit {
    Box::new(move |l, ops| l.alu(&spec, ops, &[]))
}

/// Decodes an opcode with its modifiers. The error names the unsupported part.
pub(crate) fn decode(opcode: &str) -> Result<Emit, String> {
    let mut mods = Mods::new(opcode);
    let m = &mut mods;
    let emit: Emit = match m.base {
        "mov" => mov(m)?,
        "bra" => {
            m.has("uni");
            Box::new(branch)
        }
        "brx" => {
            if !m.has("idx") {
                return m.unsupported();
            }
            m.has("uni");
            Box::new(indexed_branch)
        }
        "ret" => {
            m.has("uni");
            Box::new(call::ret)
        }
        "exit" => plain(Op::Exit, 0),
        "trap" => plain(Op::Trap, 0),
        "brkpt" => plain(Op::Nop, 0),
        "pmevent" => {
            m.has("mask");
            plain(Op::Nop, 1)
        }
        "setmaxnreg" => {
            let way = m.one_of(&[("inc", ()), ("dec", ())]);
            let [sync, aligned, typed] = ["sync", "aligned", "u32"].map(|name| m.has(name));
            if way.is_none() || !(sync && aligned && typed) {
                return m.unsupported();
            }
            Box::new(|l, ops| {
                l.count(ops, 1..=1)?;
                if integer(l, &ops[0], 24..=256, "number of registers")? % 8 != 0 {
                    return l.error("the number of registers must be a multiple of 8");
                }
                l.push(Op::Nop);
                Ok(())
            })
        }
        "griddepcontrol" => {
            if m.one_of(&[("launch_dependents", ()), ("wait", ())]).is_none() {
                return m.unsupported();
            }
            plain(Op::Nop, 0)
        }
        "nanosleep" => {
            m.has("u32");
            Box::new(|l, ops| {
                l.count(ops, 1..=1)?;
                l.source_of::<u32>(&ops[0])?;
                l.push(Op::Sleep);
                Ok(())
            })
        }
        "activemask" => {
            m.has("b32");
            Box::new(|l, ops| {
                l.count(ops, 1..=1)?;
                let d = l.dest_of::<u32>(&ops[0])?;
                l.push(Op::ActiveMask { d });
                Ok(())
            })
        }
        "call" => {
            m.has("uni");
            Box::new(call::call)
        }
        "cvt" => convert::cvt(m)?,
        "ld" | "ldu" => mem::load(m)?,
        "st" => match m.has("async") {
            true => cluster::remote_store(m)?,
            false => mem::store(m)?,
        },
        "red" => match m.has("async") {
            true => cluster::remote_store(m)?,
            false => mem::atomic(m)?,
        },
        "atom" => mem::atomic(m)?,
        "multimem" => multimem::decode(m)?,
        "prefetch" | "prefetchu" | "discard" | "applypriority" | "createpolicy" => mem::hint(m)?,
        "cvta" | "isspacep" | "mapa" | "getctarank" => mem::spaces(m)?,
        "fence" | "membar" => sync::fence(m)?,
        "barrier" | "bar" => sync::barrier(m)?,
        "mbarrier" => sync::mbarrier(m)?,
        "cp" => sync::bulk(m)?,
        "ldmatrix" | "stmatrix" => matrix::transfer(m)?,
        "movmatrix" => matrix::transpose(m)?,
        "mma" => matrix::multiply(m)?,
        "wgmma" => wgmma::decode(m)?,
        "tensormap" => tensor::map(m)?,
        "wmma" => wmma::decode(m)?,
        "shfl" | "vote" | "match" | "redux" | "elect" => sync::warp_wide(m)?,
        "mad" | "madc" => match extended::decode(m)? {
            Some(emit) => emit,
            None => arith::decode(m)?,
        },
        _ => arith::decode(m)?,
    };
    m.finish()?;
    Ok(emit)
}

fn branch(l: &mut Lower, ops: &[(Operand, Span)]) -> Lowered<()> {
    l.count(ops, 1..=1)?;
    let (Operand::Name(name), pos) = &ops[0] else {
        return l.error("a branch needs a label");
    };
    let at = l.code.len();
    l.fixup(name, *pos, Patch::Branch(at));
    l.push(Op::Bra { target: 0 });
    Ok(())
}

fn indexed_branch(l: &mut Lower, ops: &[(Operand, Span)]) -> Lowered<()> {
    l.count(ops, 2..=2)?;
    let index = l.source_of::<u32>(&ops[0])?;
    let (Operand::Name(name), pos) = &ops[1] else {
        return l.error("brx.idx needs the name of a .branchtargets list");
    };
    match l.lookup(name, *pos)? {
        super::Binding::Targets { table } => {
            l.count_targets(*pos, name, l.tables[table as usize].len())?;
            l.push(Op::BrxIdx { index, table });
            Ok(())
        }
        _ => Err((*pos, format!("'{name}' is not a .branchtargets list"))),
    }
}

/// Marks a copy of a register for compiled code.
fn move_of(width: Width, spec: Spec) -> Spec {
    spec.compiled_as(Native::Unary(Unary::Move, width))
}

fn mov(m: &mut Mods) -> Result<Emit, String> {
    if m.has("b128") {
        return Ok(Box::new(move_wide));
    }
    let ty = m.ty()?;
    let spec = match ty {
        Ty::Pred => crate::exec::lanes::op_pred(|a, _| a).compiled_as(Native::Logic(Logic::Move)),
        Ty::B16 | Ty::U16 | Ty::S16 | Ty::F16 | Ty::Bf16 => op1(|a: u16| a),
        Ty::B32 | Ty::U32 | Ty::S32 | Ty::F32 | Ty::F16x2 | Ty::Bf16x2 => {
            move_of(Width::W32, op1(|a: u32| a))
        }
        Ty::B64 | Ty::U64 | Ty::S64 | Ty::F64 => move_of(Width::W64, op1(|a: u64| a)),
        _ => return m.unsupported(),
    };
    let (file, bits) = (ty.file(), ty.bits());
    Ok(Box::new(move |l, ops| {
        l.count(ops, 2..=2)?;
        match (&ops[0].0, &ops[1].0) {
            (Operand::Vector(parts), _) => move_parts(l, parts, ops[0].1, &ops[1], file, bits, Role::Def),
            (_, Operand::Vector(parts)) => move_parts(l, parts, ops[1].1, &ops[0], file, bits, Role::Use),
            (_, Operand::Name(name)) if timer_register(name).is_some_and(|(_, b)| b == bits) => {
                let d = l.dest(&ops[0], file, bits)?;
                let Some((what, _)) = timer_register(name) else { return l.error("not a timer") };
                l.push(Op::Timer { what, d });
                Ok(())
            }
            _ => {
                let (d, a) = (l.dest(&ops[0], file, bits)?, l.source(&ops[1], file, bits)?);
                l.moves.push(l.code.len());
                l.push_spec(&spec, [d, a, a, 0, 0, 0]);
                Ok(())
            }
        }
    }))
}

/// `mov.b128`: between registers of 128 bits, and their halves.
fn move_wide(l: &mut Lower, ops: &[(Operand, Span)]) -> Lowered<()> {
    l.count(ops, 2..=2)?;
    if ops.iter().all(|op| matches!(op.0, Operand::Vector(_))) {
        return l.error("one side is a 128-bit register");
    }
    let mut sides = [[SINK; 2]; 2];
    for (side, (op, pos)) in ops.iter().enumerate() {
        sides[side] = match op {
            Operand::Vector(halves) if halves.len() == 2 => {
                let mut slots = [SINK; 2];
                for (slot, half) in slots.iter_mut().zip(halves) {
                    let half = (half.clone(), *pos);
                    *slot = if side == 0 { l.dest_of::<u64>(&half)? } else { l.source_of::<u64>(&half)? };
                }
                slots
            }
            _ => l.halves(&(op.clone(), *pos))?,
        };
    }
    let spec = move_of(Width::W64, op1(|a: u64| a));
    for (to, from) in sides[0].into_iter().zip(sides[1]) {
        l.push_spec(&spec, [to, from, from, 0, 0, 0]);
    }
    Ok(())
}

/// `mov.b64 {a, b}, r` (`role` of the parts: `Def`) and `mov.b64 r, {a, b}` (`Use`).
fn move_parts(
    l: &mut Lower,
    parts: &[Operand],
    pos: Span,
    whole: &(Operand, Span),
    file: File,
    bits: u32,
    role: Role,
) -> Lowered<()> {
    let f = match (role, bits, parts.len()) {
        (Role::Def, 32, 2) => split::<u32, u16, 2>,
        (Role::Def, 64, 2) => split::<u64, u32, 2>,
        (Role::Def, 64, 4) => split::<u64, u16, 4>,
        (Role::Use, 32, 2) => join::<u32, u16, 2>,
        (Role::Use, 64, 2) => join::<u64, u32, 2>,
        (Role::Use, 64, 4) => join::<u64, u16, 4>,
        (_, _, n) => return Err((pos, format!("{n} parts of a {bits}-bit value are not supported"))),
    };
    let sig = Sig { role, file: File::R32, bits: bits / parts.len() as u32 };
    let other = Sig { role: if role == Role::Def { Role::Use } else { Role::Def }, file, bits };
    let mut s = [SINK; 6];
    let mut sigs = vec![other];
    s[0] = l.operand(whole, &other)?;
    for (i, p) in parts.iter().enumerate() {
        s[i + 1] = l.operand(&(p.clone(), pos), &sig)?;
        sigs.push(sig);
    }
    if role == Role::Def {
        l.moves.push(l.code.len());
    }
    let native = match (role, bits, parts.len()) {
        (Role::Def, 64, 2) => Native::Split,
        (Role::Use, 64, 2) => Native::Join,
        _ => Native::Function,
    };
    l.push_native(f, s, &sigs, native);
    Ok(())
}

/// Words that can be cut in parts.
trait Word: Lane {
    fn to_bits(self) -> u64;
    fn of_bits(v: u64) -> Self;
}

macro_rules! word {
    ($($t:ty),*) => {$(
        impl Word for $t {
            fn to_bits(self) -> u64 {
                u64::from(self)
            }
            fn of_bits(v: u64) -> Self {
                v as $t
            }
        }
    )*};
}
word!(u16, u32, u64);

/// Slots: whole, parts from the low end on.
fn split<W: Word, P: Word, const N: usize>(r: &mut Regs, s: &[u32; 6], m: u32) {
    for i in lanes(m) {
        let v = W::get(r, s[0], i).to_bits();
        for k in 0..N {
            P::set(r, s[k + 1], i, P::of_bits(v >> (k as u32 * P::BITS)));
        }
    }
}

fn join<W: Word, P: Word, const N: usize>(r: &mut Regs, s: &[u32; 6], m: u32) {
    for i in lanes(m) {
        let v = (0..N).fold(0, |v, k| v | P::get(r, s[k + 1], i).to_bits() << (k as u32 * P::BITS));
        W::set(r, s[0], i, W::of_bits(v));
    }
}

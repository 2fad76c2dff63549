//! Decoding of `mma.sync` of f64, of single bits and of a sparse A.

use super::decode::Emit;
use super::matrix::{parts_of, small_factor_type, sum_type};
use super::state::{Lower, Lowered};
use super::types::Mods;
use super::wgmma::integer;
use crate::exec::lanes::op1;
use crate::exec::mma::{Element, Mma, Sum};
use crate::exec::products::{Combine, Shape, WarpProduct};
use crate::exec::sparse::Sparsity;
use crate::float::Round;
use crate::ir::{FULL, File, Init, Op, WarpOp};
use crate::ptx::{Operand, Span};

/// `None` if the instruction is none of these. `whole`: it names the mandatory modifiers.
pub(super) fn decode(m: &mut Mods, whole: bool) -> Result<Option<Emit>, String> {
    let ordered = m.has("sp::ordered_metadata");
    let sparse = m.has("sp") || ordered;
    let names: Vec<&str> = m.names().filter(|name| *name != "satfinite").collect();
    let decoded = match names.as_slice() {
        _ if sparse => sparse_product(m, ordered)?,
        [.., "f64", "f64", "f64", "f64"] => double_product(m)?,
        [.., "b1", "b1", "s32", _, _] => bit_product(m)?,
        _ => return Ok(None),
    };
    if whole { Ok(Some(decoded)) } else { m.unsupported() }
}

/// `mma.sync.aligned.SHAPE.row.col{.rnd}.f64.f64.f64.f64`
fn double_product(m: &mut Mods) -> Result<Emit, String> {
    let shapes = [("m8n8k4", (8, 4)), ("m16n8k4", (16, 4)), ("m16n8k8", (16, 8)), ("m16n8k16", (16, 16))];
    let Some((rows, k)) = m.one_of(&shapes) else { return m.unsupported() };
    let rounds = [("rn", Round::Nearest), ("rz", Round::Zero), ("rm", Round::Down), ("rp", Round::Up)];
    let round = m.one_of(&rounds).unwrap_or(Round::Nearest);
    (0..4).for_each(|_| m.ignore(&["f64"]));
    Ok(Box::new(move |l, ops| {
        l.count(ops, 4..=4)?;
        emit(l, Shape::Double { rows, k, round }, ops)
    }))
}

/// `mma.sync.aligned.SHAPE.row.col.s32.b1.b1.s32.BITOP.popc`
fn bit_product(m: &mut Mods) -> Result<Emit, String> {
    let shapes = [("m8n8k128", (8, 128)), ("m16n8k128", (16, 128)), ("m16n8k256", (16, 256))];
    let combine = m.one_of(&[("and", Combine::And), ("xor", Combine::Xor)]);
    let (Some((rows, k)), Some(combine), true) = (m.one_of(&shapes), combine, m.has("popc")) else {
        return m.unsupported();
    };
    m.ignore(&["s32", "b1", "b1", "s32"]);
    Ok(Box::new(move |l, ops| {
        l.count(ops, 4..=4)?;
        emit(l, Shape::Bits { rows, k, combine }, ops)
    }))
}

/// `mma.sp{::ordered_metadata}.sync.aligned.SHAPE.row.col{.satfinite}.D.A.B.C`
fn sparse_product(m: &mut Mods, ordered: bool) -> Result<Emit, String> {
    let shapes = [("m16n8k8", 8), ("m16n8k16", 16), ("m16n8k32", 32), ("m16n8k64", 64), ("m16n8k128", 128u8)];
    let Some(k) = m.one_of(&shapes) else { return m.unsupported() };
    let saturates = m.has("satfinite");
    let names: Vec<&str> = m.names().filter(|name| *name != "satfinite").collect();
    let &[.., d, a, b, c] = names.as_slice() else { return m.unsupported() };
    m.ignore(&[d, a, b, c]);
    let (Some(sum), Some(a), Some(b)) = (sum_type(d, saturates), small_factor_type(a), small_factor_type(b))
    else {
        return m.unsupported();
    };
    use Element::{Bf16, E4m3, E5m2, F16, S4, S8, Tf32, U4, U8};
    let whole = matches!(sum, Sum::S32 | Sum::SaturatedS32);
    let exists = match (a, b) {
        (F16, F16) => matches!(k, 16 | 32) && !whole,
        (Bf16, Bf16) => matches!(k, 16 | 32) && sum == Sum::F32,
        (Tf32, Tf32) => matches!(k, 8 | 16) && sum == Sum::F32,
        (E4m3 | E5m2, E4m3 | E5m2) => k == 64 && !whole,
        (U8 | S8, U8 | S8) => matches!(k, 32 | 64) && whole,
        (U4 | S4, U4 | S4) => matches!(k, 64 | 128) && whole,
        _ => false,
    };
    let floats_saturate = saturates && sum != Sum::SaturatedS32;
    if !exists || floats_saturate || c != d {
        return m.unsupported();
    }
    let mma = Mma { rows: 16, k: k / 2, a, b, sum };
    Ok(Box::new(move |l, ops| {
        l.count(ops, 6..=6)?;
        let sparsity = sparsity(l, &mma, ordered, &ops[4], &ops[5])?;
        emit(l, Shape::Sparse { mma, sparsity }, ops)
    }))
}

/// The operands of a sparse A, whose stored columns are those of `mma`.
pub(super) fn sparsity(
    l: &mut Lower,
    mma: &Mma,
    ordered: bool,
    metadata: &(Operand, Span),
    selector: &(Operand, Span),
) -> Lowered<Sparsity> {
    let most = mma.a.most_selector(mma.k.into());
    let selector = integer(l, selector, 0..=most, "sparsity selector")? as u8;
    Ok(Sparsity { metadata: l.source_of::<u32>(metadata)?, selector, ordered })
}

/// Takes the registers of D, A, B and C, the first four of `ops`.
fn emit(l: &mut Lower, shape: Shape, ops: &[(Operand, Span)]) -> Lowered<()> {
    let [na, nb, nd] = shape.registers();
    let file = shape.file();
    let bits = if file == File::R64 { 64 } else { 32 };
    let copy = if file == File::R64 { op1(|a: u64| a) } else { op1(|a: u32| a) };
    let sources = |l: &mut Lower, op, n| {
        parts_of(op, n)?.iter().map(|part| l.source(part, file, bits)).collect::<Lowered<Vec<u32>>>()
    };
    let (a, b) = (sources(l, &ops[1], na)?, sources(l, &ops[2], nb)?);
    // D may be registers of A or B, so the sums have registers of their own.
    let mut d = vec![];
    for from in sources(l, &ops[3], nd)? {
        let slot = l.slot(file);
        l.push_alu(copy.f, [slot, from, 0, 0, 0, 0], copy.sig);
        d.push(slot);
    }
    let mask = l.constant(File::R32, Init::Bits(FULL.into()));
    let product = l.operands.warp_products.len() as u32;
    l.operands.warp_products.push(WarpProduct { shape, d: d.clone(), a, b });
    l.push(Op::Warp { op: WarpOp::Product { product }, mask });
    for (slot, part) in d.into_iter().zip(parts_of(&ops[0], nd)?) {
        let to = l.dest(&part, file, bits)?;
        l.push_alu(copy.f, [to, slot, 0, 0, 0, 0], copy.sig);
    }
    Ok(())
}

//! Decoding of `wgmma`.

use super::decode::{Emit, plain};
use super::matrix::{factor_type, sum_type};
use super::products::sparsity;
use super::state::{Lower, Lowered};
use super::types::Mods;
use crate::exec::descriptor::Major;
use crate::exec::mma::{Element, Mma, Sum};
use crate::exec::wgmma::{MatrixA, Product};
use crate::ir::{Op, WgmmaOp};
use crate::ptx::{Operand, Span};

/// `wgmma.fence`, `.commit_group`, `.wait_group`, `.mma_async` and `.mma_async.sp`.
pub(super) fn decode(m: &mut Mods) -> Result<Emit, String> {
    #[derive(Clone, Copy)]
    enum Kind {
        Fence,
        Commit,
        Wait,
        Multiply,
    }
    let kind = m.one_of(&[
        ("fence", Kind::Fence),
        ("commit_group", Kind::Commit),
        ("wait_group", Kind::Wait),
        ("mma_async", Kind::Multiply),
    ]);
    let (Some(kind), true, true) = (kind, m.has("sync"), m.has("aligned")) else { return m.unsupported() };
    match kind {
        Kind::Fence => Ok(plain(Op::Wgmma(WgmmaOp::Fence), 0)),
        Kind::Commit => Ok(plain(Op::Wgmma(WgmmaOp::Commit), 0)),
        Kind::Wait => Ok(Box::new(|l, ops| {
            l.count(ops, 1..=1)?;
            let allowed = integer(l, &ops[0], 0..=7, "number of groups")? as u32;
            l.push(Op::Wgmma(WgmmaOp::Wait { allowed }));
            Ok(())
        })),
        Kind::Multiply => multiply(m),
    }
}

/// `wgmma.mma_async{.sp}.sync.aligned.m64nNkK{.satfinite}.D.A.B`
fn multiply(m: &mut Mods) -> Result<Emit, String> {
    let (saturates, sparse) = (m.has("satfinite"), m.has("sp"));
    let names: Vec<&str> = m.names().collect();
    let shape = names.iter().find_map(|name| Some((*name, shape_of(name)?)));
    let (Some((shape, (columns, k))), &[.., d, a, b]) = (shape, names.as_slice()) else {
        return m.unsupported();
    };
    m.ignore(&[shape, d, a, b]);
    let (Some(sum), Some(a), Some(b)) = (sum_type(d, saturates), factor_type(a), factor_type(b)) else {
        return m.unsupported();
    };
    // A row of A has 32 bytes in memory. Half of the elements of a sparse A are there.
    let stored_k = 32 / a.bytes() as u8;
    let k_of_a = if sparse { 2 * stored_k } else { stored_k };
    use Element::{Bf16, E4m3, E5m2, F16, S8, Tf32, U8};
    let whole = matches!(sum, Sum::S32 | Sum::SaturatedS32);
    let exists = match (a, b) {
        (F16, F16) | (E4m3 | E5m2, E4m3 | E5m2) => !whole,
        (Bf16, Bf16) | (Tf32, Tf32) => sum == Sum::F32,
        (U8 | S8, U8 | S8) => whole,
        _ => false,
    };
    let fits = if whole { columns % 16 == 0 || matches!(columns, 8 | 24) } else { columns % 8 == 0 };
    let floats_saturate = saturates && sum != Sum::SaturatedS32;
    if !exists || !fits || floats_saturate || k != k_of_a || !(8..=256).contains(&columns) {
        return m.unsupported();
    }
    let mma = Mma { rows: 16, k: stored_k, a, b, sum };
    Ok(Box::new(move |l, ops| product(l, mma, columns, sparse, ops)))
}

/// Columns and k of `m64nNkK`.
fn shape_of(name: &str) -> Option<(u16, u8)> {
    let (columns, k) = name.strip_prefix("m64n")?.split_once('k')?;
    Some((columns.parse().ok()?, k.parse().ok()?))
}

fn product(l: &mut Lower, mma: Mma, columns: u16, sparse: bool, ops: &[(Operand, Span)]) -> Lowered<()> {
    let scales = !matches!(mma.sum, Sum::S32 | Sum::SaturatedS32);
    let transposes = mma.a.bytes() == 2;
    let in_registers = matches!(ops.get(1), Some((Operand::Vector(_), _)));
    // The metadata of a sparse A and the selector stand behind B.
    let behind_b = if sparse { 5 } else { 3 };
    let n = behind_b
        + 1
        + if scales { 2 } else { 0 }
        + if transposes { 2 - usize::from(in_registers) } else { 0 };
    l.count(ops, n..=n)?;
    let registers = |l: &mut Lower, op: &(Operand, Span), wanted: usize| {
        let Operand::Vector(parts) = &op.0 else {
            return Err((op.1, format!("a list of {wanted} registers is needed here")));
        };
        if parts.len() != wanted {
            return Err((op.1, format!("{} registers given, {wanted} expected", parts.len())));
        }
        parts.iter().map(|part| l.dest_of::<u32>(&(part.clone(), op.1))).collect::<Lowered<Vec<u32>>>()
    };
    let [na, _, nd] = mma.registers();
    let d = registers(l, &ops[0], nd * usize::from(columns) / 8)?;
    let mut sorted = d.clone();
    sorted.sort_unstable();
    sorted.dedup();
    if sorted.len() != d.len() || d.contains(&crate::ir::SINK) {
        return Err((ops[0].1, "each element of D needs a register of its own".into()));
    }
    let mut last = ops[behind_b + 1..].iter();
    let mut flag = |l: &mut Lower, what| last.next().map_or(Ok(0), |op| integer(l, op, -1..=1, what));
    let (mut negates, mut majors) = ([false; 2], [Major::K; 2]);
    if scales {
        for negates in &mut negates {
            *negates = match flag(l, "scale")? {
                1 => false,
                -1 => true,
                _ => return l.error("a scale of a matrix is 1 or -1"),
            };
        }
    }
    if transposes {
        // A in registers has no flag.
        for major in &mut majors[usize::from(in_registers)..] {
            *major = match flag(l, "transposition")? {
                0 => Major::K,
                1 => Major::Mn,
                _ => return l.error("a transposition of a matrix is 0 or 1"),
            };
        }
    }
    let a = if in_registers {
        let slots = registers(l, &ops[1], na)?;
        MatrixA::Registers(std::array::from_fn(|i| slots[i]))
    } else {
        MatrixA::Shared(l.source_of::<u64>(&ops[1])?, majors[0])
    };
    let sparsity = match sparse {
        true => Some(sparsity(l, &mma, false, &ops[3], &ops[4])?),
        false => None,
    };
    let product = Product {
        mma,
        columns,
        a,
        b: l.source_of::<u64>(&ops[2])?,
        b_major: majors[1],
        d,
        adds: l.source_of::<bool>(&ops[behind_b])?,
        sparsity,
        negates_a: negates[0],
        negates_b: negates[1],
        unfenced: false,
        tracked: vec![],
        reads: vec![],
    };
    l.operands.products.push(product);
    l.push(Op::Wgmma(WgmmaOp::Multiply { product: l.operands.products.len() as u32 - 1 }));
    Ok(())
}

/// A constant operand in a range.
pub(super) fn integer(
    l: &Lower,
    op: &(Operand, Span),
    range: std::ops::RangeInclusive<i64>,
    what: &str,
) -> Lowered<i64> {
    let value = if let Operand::Int(value) = op.0 { i64::try_from(value).ok() } else { None };
    match value.filter(|value| range.contains(value)) {
        Some(value) => Ok(value),
        None => l.error(format!("the {what} must be a constant from {} to {}", range.start(), range.end())),
    }
}

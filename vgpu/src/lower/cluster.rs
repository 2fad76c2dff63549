//! Decoding of instructions on addresses of a cluster: `mapa`, `getctarank`, `isspacep.shared::cta`,
//! `st.async`, `red.async`.

use super::decode::{Emit, simple};
use super::types::{Mods, Ty};
use crate::exec::access::SHARED_TAG;
use crate::exec::cluster::{RANK_SHIFT, map_shared, rank_of};
use crate::exec::lanes::{op1, op2};
use crate::ir::{BulkOp, File, Init, Op, Reduce, RemoteStore, SINK, Special};
use crate::ptx::Operand;

/// `mapa`, `getctarank`. Without `.shared::cluster` their addresses are generic.
pub(super) fn map_address(m: &mut Mods) -> Result<Emit, String> {
    let generic = !m.has("shared::cluster");
    let ranks = m.base == "getctarank";
    Ok(simple(match (ranks, m.ty()?, generic) {
        (true, Ty::U32, false) => op1(|a: u32| rank_of(a.into())),
        (true, Ty::U64, _) => op1(rank_of),
        (false, Ty::U32, false) => op2(|a: u32, rank: u32| map_shared(a.into(), rank) as u32),
        (false, Ty::U64, false) => op2(map_shared),
        (false, Ty::U64, true) => op2(|a: u64, rank: u32| {
            // Other memory has no counterpart in another block. The result lies outside of every
            // window.
            if a >> 56 == SHARED_TAG >> 56 { map_shared(a, rank) } else { SHARED_TAG | 0xff << RANK_SHIFT }
        }),
        _ => return m.unsupported(),
    }))
}

/// `isspacep.shared`, which is `.shared::cta`: the window of the block itself.
pub(super) fn is_own_shared() -> Emit {
    let spec = op2(|a: u64, rank: u32| a >> RANK_SHIFT == SHARED_TAG >> RANK_SHIFT | u64::from(rank));
    Box::new(move |l, ops| {
        l.count(ops, 2..=2)?;
        let (d, a) = (l.dest_of::<bool>(&ops[0])?, l.source_of::<u64>(&ops[1])?);
        let rank = l.constant(File::R32, Init::Special(Special::ClusterRank));
        l.push_alu(spec.f, [d, a, rank, 0, 0, 0], spec.sig);
        Ok(())
    })
}

/// `st.async`, `red.async`: to shared memory of a block of the cluster, completing on an mbarrier
/// there.
pub(super) fn remote_store(m: &mut Mods) -> Result<Emit, String> {
    let reduces = m.base == "red";
    m.ignore(if reduces { &["relaxed", "cluster"] } else { &["weak"] });
    if !(m.has("shared::cluster") && m.has("mbarrier::complete_tx::bytes")) {
        return m.unsupported();
    }
    let reduce = m.one_of(&Reduce::NAMES);
    let n = m.one_of(&[("v2", 2), ("v4", 4)]).unwrap_or(1);
    let ty = m.ty()?;
    let op = match (reduces, reduce, ty) {
        (false, None, Ty::B32 | Ty::U32 | Ty::S32 | Ty::F32) => None,
        (false, None, Ty::B64 | Ty::U64 | Ty::S64 | Ty::F64) if n <= 2 => None,
        (true, Some(reduce @ (Reduce::Add | Reduce::Min | Reduce::Max)), Ty::U32 | Ty::S32)
        | (true, Some(reduce @ (Reduce::Inc | Reduce::Dec)), Ty::U32)
        | (true, Some(reduce @ (Reduce::And | Reduce::Or | Reduce::Xor)), Ty::B32)
        | (true, Some(reduce @ Reduce::Add), Ty::U64) => Some(reduce.of_integers(ty == Ty::S32)),
        _ => return m.unsupported(),
    };
    if reduces && n != 1 {
        return m.unsupported();
    }
    let bytes = (ty.bits() / 8) as u8;
    Ok(Box::new(move |l, ops| {
        l.count(ops, 3..=3)?;
        let (dst, mbar) = (l.address(&ops[0])?, l.address(&ops[2])?);
        let values = match &ops[1].0 {
            Operand::Vector(values) => values.clone(),
            one => vec![one.clone()],
        };
        if values.len() != n {
            return l.error(format!("{} registers given, {n} expected", values.len()));
        }
        let mut regs = [SINK; 4];
        for (slot, value) in regs.iter_mut().zip(values) {
            *slot = l.source(&(value, ops[1].1), ty.file(), ty.bits())?;
        }
        l.operands.remote_stores.push(RemoteStore { dst, mbar, op, bytes, n: n as u8, regs });
        let store = l.operands.remote_stores.len() as u32 - 1;
        l.push(Op::Bulk(BulkOp::RemoteStore { store }));
        Ok(())
    }))
}

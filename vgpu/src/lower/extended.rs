//! Arithmetic that needs more than one operation of the host: multiply-add in a carry chain.

use super::decode::Emit;
use super::types::{Mods, Ty};
use crate::exec::lanes::{Lane, Spec, op_carry, op2};
use crate::ir::{CARRY, File, Init, SINK};

/// `mad.cc` and `madc`; `None` for the forms without a carry.
pub(super) fn decode(m: &mut Mods) -> Result<Option<Emit>, String> {
    let with_carry = m.base == "madc";
    if with_carry || m.has("cc") { chained(m, with_carry).map(Some) } else { Ok(None) }
}

/// `mad{c}.{lo,hi}{.cc}`: a product, and then the addition of the carry chain.
fn chained(m: &mut Mods, with_carry: bool) -> Result<Emit, String> {
    let sets = if with_carry { m.has("cc") } else { true };
    let Some(high) = m.one_of(&[("lo", false), ("hi", true)]) else { return m.unsupported() };
    Ok(match (m.ty()?, high) {
        (Ty::U32 | Ty::S32, false) => chain::<u32>(op2(u32::wrapping_mul), add::<u32>(), with_carry, sets),
        (Ty::U64 | Ty::S64, false) => chain::<u64>(op2(u64::wrapping_mul), add::<u64>(), with_carry, sets),
        (Ty::U32, true) => {
            let high = op2(|a: u32, b: u32| ((u64::from(a) * u64::from(b)) >> 32) as u32);
            chain::<u32>(high, add::<u32>(), with_carry, sets)
        }
        (Ty::S32, true) => {
            let high = op2(|a: i32, b: i32| ((i64::from(a) * i64::from(b)) >> 32) as i32);
            chain::<u32>(high, add::<u32>(), with_carry, sets)
        }
        (Ty::U64, true) => {
            let high = op2(|a: u64, b: u64| ((u128::from(a) * u128::from(b)) >> 64) as u64);
            chain::<u64>(high, add::<u64>(), with_carry, sets)
        }
        (Ty::S64, true) => {
            let high = op2(|a: i64, b: i64| ((i128::from(a) * i128::from(b)) >> 64) as i64);
            chain::<u64>(high, add::<u64>(), with_carry, sets)
        }
        _ => return m.unsupported(),
    })
}

/// Words that a carry chain is made of.
trait Limb: Lane {
    fn add(self, b: Self, carry: bool) -> (Self, bool);
}

macro_rules! limb {
    ($t:ty) => {
        impl Limb for $t {
            fn add(self, b: Self, carry: bool) -> (Self, bool) {
                let (v, c1) = self.overflowing_add(b);
                let (v, c2) = v.overflowing_add(<$t>::from(carry));
                (v, c1 | c2)
            }
        }
    };
}
limb!(u32);
limb!(u64);

fn add<T: Limb>() -> Spec {
    op_carry(|a: T, b: T, c: bool| a.add(b, c))
}

fn chain<T: Limb>(product: Spec, sum: Spec, with_carry: bool, sets: bool) -> Emit {
    Box::new(move |l, ops| {
        l.count(ops, 4..=4)?;
        let d = l.dest_of::<T>(&ops[0])?;
        let (a, b, c) = (l.source_of::<T>(&ops[1])?, l.source_of::<T>(&ops[2])?, l.source_of::<T>(&ops[3])?);
        let t = l.slot(T::FILE);
        let carry_in = if with_carry { CARRY } else { l.constant(File::Pred, Init::Bits(0)) };
        l.push_alu(product.f, [t, a, b, 0, 0, 0], product.sig);
        l.push_alu(sum.f, [d, t, c, carry_in, if sets { CARRY } else { SINK }, 0], sum.sig);
        Ok(())
    })
}

//! Arithmetic over the lanes of a warp: turns a closure on scalars into an [`AluFn`].

use std::marker::PhantomData;

use half::{bf16, f16};

use super::simd::top_bits;
use crate::compiled::native::Native;
use crate::ir::{AluFn, FULL, File};
use crate::registers::Regs;

/// A scalar type that fits a register.
pub(crate) trait Lane: Copy + Default + 'static {
    /// Register file that holds it.
    const FILE: File;
    /// Width of the register, as the parser checks it (1 for predicates).
    const BITS: u32;
    /// A register as the loops below read it.
    type View<'a>: Copy;
    fn view(r: &Regs, slot: u32) -> Self::View<'_>;
    fn at(v: &Self::View<'_>, lane: usize) -> Self;
    fn store(r: &mut Regs, slot: u32, v: &[Self; 32]);
    /// Stores the lanes `m` alone.
    fn blend(r: &mut Regs, slot: u32, v: &[Self; 32], m: u32);
    fn get(r: &Regs, slot: u32, lane: usize) -> Self;
    fn set(r: &mut Regs, slot: u32, lane: usize, v: Self);
}

macro_rules! lane {
    ($t:ty, $file:ident, $field:ident, $bits:expr, $word:ty, $from:expr, $to:expr) => {
        impl Lane for $t {
            const FILE: File = File::$file;
            const BITS: u32 = $bits;
            type View<'a> = &'a [$word; 32];
            #[inline(always)]
            fn view(r: &Regs, slot: u32) -> Self::View<'_> {
                &r.$field[slot as usize]
            }
            #[inline(always)]
            fn at(v: &Self::View<'_>, lane: usize) -> Self {
                $from(v[lane])
            }
            #[inline(always)]
            fn store(r: &mut Regs, slot: u32, v: &[Self; 32]) {
                let row = &mut r.$field[slot as usize];
                for i in 0..32 {
                    row[i] = $to(v[i]);
                }
            }
            #[inline(always)]
            fn blend(r: &mut Regs, slot: u32, v: &[Self; 32], m: u32) {
                let row = &mut r.$field[slot as usize];
                // A choice between two values becomes 32 branches; this is vectorised.
                let mut i = 0;
                while i < 32 {
                    let keep = (<$word>::from(m) >> i & 1).wrapping_sub(1);
                    row[i] ^= (row[i] ^ $to(v[i])) & !keep;
                    i += 1;
                }
            }
            #[inline(always)]
            fn get(r: &Regs, slot: u32, lane: usize) -> Self {
                $from(r.$field[slot as usize][lane])
            }
            #[inline(always)]
            fn set(r: &mut Regs, slot: u32, lane: usize, v: Self) {
                r.$field[slot as usize][lane] = $to(v);
            }
        }
    };
}

lane!(u16, R32, r32, 16, u32, |w: u32| w as u16, u32::from);
lane!(i16, R32, r32, 16, u32, |w: u32| w as i16, |v: i16| u32::from(v as u16));
lane!(f16, R32, r32, 16, u32, |w: u32| f16::from_bits(w as u16), |v: f16| u32::from(v.to_bits()));
lane!(bf16, R32, r32, 16, u32, |w: u32| bf16::from_bits(w as u16), |v: bf16| u32::from(v.to_bits()));
lane!(u32, R32, r32, 32, u32, |w: u32| w, |v: u32| v);
lane!(i32, R32, r32, 32, u32, |w: u32| w as i32, |v: i32| v as u32);
lane!(f32, R32, r32, 32, u32, f32::from_bits, f32::to_bits);
lane!(u64, R64, r64, 64, u64, |w: u64| w, |v: u64| v);
lane!(i64, R64, r64, 64, u64, |w: u64| w as i64, |v: i64| v as u64);
lane!(f64, R64, r64, 64, u64, f64::from_bits, f64::to_bits);

/// The mask of the lanes for which `f` holds.
#[inline(always)]
pub(crate) fn mask_of(f: impl Fn(usize) -> bool) -> u32 {
    top_bits(&every_lane(|i| if f(i) { u32::MAX } else { 0 }))
}

impl Lane for bool {
    const FILE: File = File::Pred;
    const BITS: u32 = 1;
    type View<'a> = u32;
    #[inline(always)]
    fn view(r: &Regs, slot: u32) -> u32 {
        r.pred[slot as usize]
    }
    #[inline(always)]
    fn at(v: &u32, lane: usize) -> Self {
        v >> lane & 1 != 0
    }
    #[inline(always)]
    fn store(r: &mut Regs, slot: u32, v: &[Self; 32]) {
        r.pred[slot as usize] = mask_of(|i| v[i]);
    }
    #[inline(always)]
    fn blend(r: &mut Regs, slot: u32, v: &[Self; 32], m: u32) {
        let p = &mut r.pred[slot as usize];
        *p = *p & !m | mask_of(|i| v[i]) & m;
    }
    #[inline(always)]
    fn get(r: &Regs, slot: u32, lane: usize) -> Self {
        r.pred[slot as usize] & (1 << lane) != 0
    }
    #[inline(always)]
    fn set(r: &mut Regs, slot: u32, lane: usize, v: Self) {
        let p = &mut r.pred[slot as usize];
        *p = *p & !(1 << lane) | u32::from(v) << lane;
    }
}

/// Computes 32 values. A plain loop into a local array: that is the shape the compiler vectorises
/// (`array::from_fn` is unrolled into scalar code).
#[inline(always)]
pub(crate) fn every_lane<T: Copy + Default>(f: impl Fn(usize) -> T) -> [T; 32] {
    let mut out = [T::default(); 32];
    // Without an iterator, whose layers the compiler would unwrap for each of the instructions.
    let mut i = 0;
    while i < 32 {
        out[i] = f(i);
        i += 1;
    }
    out
}

/// Lane numbers of a mask, ascending.
#[inline(always)]
pub(crate) fn lanes(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        (mask != 0).then(|| {
            let i = mask.trailing_zeros() as usize;
            mask &= mask - 1;
            i
        })
    })
}

/// Calls `f` with each lane of a mask, ascending: [`lanes`] as a loop, which compiles faster in
/// hundreds of instructions.
#[inline(always)]
fn each_lane(mut mask: u32, mut f: impl FnMut(usize)) {
    while mask != 0 {
        f(mask.trailing_zeros() as usize);
        mask &= mask - 1;
    }
}

/// Whether an operand is read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Def,
    Use,
    /// Read and written in place. The old value may not matter.
    Update,
}

/// An operand as the PTX text must supply it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sig {
    pub(crate) role: Role,
    pub(crate) file: File,
    pub(crate) bits: u32,
}

/// Signature entry of a result of type `T`.
pub(crate) const fn def<T: Lane>() -> Sig {
    Sig { role: Role::Def, file: T::FILE, bits: T::BITS }
}

/// Signature entry of an argument of type `T`.
pub(crate) const fn arg<T: Lane>() -> Sig {
    Sig { role: Role::Use, file: T::FILE, bits: T::BITS }
}

/// An arithmetic instruction: the function, and its operands in PTX order, which is also the order
/// of the slots.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) f: AluFn,
    pub(crate) sig: &'static [Sig],
    /// The operation, where compiled code has instructions for it.
    pub(crate) native: Native,
}

impl Spec {
    /// The same, with what it does.
    pub(crate) fn compiled_as(self, native: Native) -> Spec {
        Spec { native, ..self }
    }
}

/// Makes a value of a zero-sized closure type out of nothing, so that closures become plain
/// function pointers.
#[inline(always)]
fn conjure<F: Copy>() -> F {
    const { assert!(size_of::<F>() == 0, "the closure must not capture anything") };
    // SAFETY: `F` has no bytes, so any well-aligned pointer is valid to read it from. Each
    // constructor below was given a value of this `Copy` type. So the type is inhabited, and this
    // is a copy of that value.
    unsafe { std::ptr::NonNull::<F>::dangling().read() }
}

/// The effect of an arithmetic instruction, as a type, so that [`fastest`] can make a function of it.
trait Apply {
    /// The effect on the lanes `m`, computed for each of them.
    fn apply(r: &mut Regs, s: &[u32; 6], m: u32);
    /// The same, computed for all 32 lanes, in the shape that the compiler vectorises.
    fn apply_wide(r: &mut Regs, s: &[u32; 6], m: u32);
}

/// The instruction as compiled for the processor at hand. Without the feature `fma` no build
/// contracts a product and a sum, so both ways give the same bits.
///
/// An x86-64 without AVX2 computes lane by lane. Compiled for its vectors as well, these functions
/// were three quarters of this crate, and took as much of the time to compile it.
fn fastest<K: Apply>() -> AluFn {
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2"))]
    fn wide<K: Apply>(r: &mut Regs, s: &[u32; 6], m: u32) {
        if few(m) { K::apply(r, s, m) } else { K::apply_wide(r, s, m) }
    }
    #[cfg(target_arch = "x86_64")]
    if !is_x86_feature_detected!("avx2") {
        return K::apply;
    }
    wide::<K>
}

/// Whether so few lanes run that it is faster to compute them one by one than all 32.
#[inline(always)]
fn few(m: u32) -> bool {
    let without_last = |m: u32| m & m.wrapping_sub(1);
    without_last(without_last(without_last(m))) == 0
}

/// Stores the lanes `m` of a result of all lanes. The inactive lanes' results are dropped.
#[inline(always)]
pub(super) fn put<D: Lane>(r: &mut Regs, slot: u32, m: u32, v: &[D; 32]) {
    if m == FULL { D::store(r, slot, v) } else { D::blend(r, slot, v, m) }
}

struct Op1<A, D, F>(PhantomData<(A, D, F)>);

impl<A: Lane, D: Lane, F: Fn(A) -> D + Copy> Apply for Op1<A, D, F> {
    #[inline(never)]
    fn apply(r: &mut Regs, s: &[u32; 6], m: u32) {
        let f = conjure::<F>();
        each_lane(m, |i| D::set(r, s[0], i, f(A::get(r, s[1], i))));
    }
    #[inline(always)]
    fn apply_wide(r: &mut Regs, s: &[u32; 6], m: u32) {
        let f = conjure::<F>();
        let a = A::view(r, s[1]);
        let v = every_lane(|i| f(A::at(&a, i)));
        put(r, s[0], m, &v);
    }
}

/// `d = f(a)`
pub(crate) fn op1<A: Lane, D: Lane, F: Fn(A) -> D + Copy>(_: F) -> Spec {
    Spec { f: fastest::<Op1<A, D, F>>(), sig: const { &[def::<D>(), arg::<A>()] }, native: Native::Function }
}

struct Op2<A, B, D, F>(PhantomData<(A, B, D, F)>);

impl<A: Lane, B: Lane, D: Lane, F: Fn(A, B) -> D + Copy> Apply for Op2<A, B, D, F> {
    #[inline(never)]
    fn apply(r: &mut Regs, s: &[u32; 6], m: u32) {
        let f = conjure::<F>();
        each_lane(m, |i| D::set(r, s[0], i, f(A::get(r, s[1], i), B::get(r, s[2], i))));
    }
    #[inline(always)]
    fn apply_wide(r: &mut Regs, s: &[u32; 6], m: u32) {
        let f = conjure::<F>();
        let (a, b) = (A::view(r, s[1]), B::view(r, s[2]));
        let v = every_lane(|i| f(A::at(&a, i), B::at(&b, i)));
        put(r, s[0], m, &v);
    }
}

/// [`op1`] for an instruction that kernels seldom have, or that the host has no vectors for: lane by
/// lane always, which is a fifth of the code.
pub(crate) fn rare1<A: Lane, D: Lane, F: Fn(A) -> D + Copy>(_: F) -> Spec {
    Spec { f: Op1::<A, D, F>::apply, sig: const { &[def::<D>(), arg::<A>()] }, native: Native::Function }
}

/// `d = f(a, b)`
pub(crate) fn op2<A: Lane, B: Lane, D: Lane, F: Fn(A, B) -> D + Copy>(_: F) -> Spec {
    Spec {
        f: fastest::<Op2<A, B, D, F>>(),
        sig: const { &[def::<D>(), arg::<A>(), arg::<B>()] },
        native: Native::Function,
    }
}

struct Op3<A, B, C, D, F>(PhantomData<(A, B, C, D, F)>);

impl<A: Lane, B: Lane, C: Lane, D: Lane, F: Fn(A, B, C) -> D + Copy> Apply for Op3<A, B, C, D, F> {
    #[inline(never)]
    fn apply(r: &mut Regs, s: &[u32; 6], m: u32) {
        let f = conjure::<F>();
        each_lane(m, |i| {
            D::set(r, s[0], i, f(A::get(r, s[1], i), B::get(r, s[2], i), C::get(r, s[3], i)));
        });
    }
    #[inline(always)]
    fn apply_wide(r: &mut Regs, s: &[u32; 6], m: u32) {
        let f = conjure::<F>();
        let (a, b, c) = (A::view(r, s[1]), B::view(r, s[2]), C::view(r, s[3]));
        let v = every_lane(|i| f(A::at(&a, i), B::at(&b, i), C::at(&c, i)));
        put(r, s[0], m, &v);
    }
}

/// [`op2`] as [`rare1`] is [`op1`].
pub(crate) fn rare2<A: Lane, B: Lane, D: Lane, F: Fn(A, B) -> D + Copy>(_: F) -> Spec {
    Spec {
        f: Op2::<A, B, D, F>::apply,
        sig: const { &[def::<D>(), arg::<A>(), arg::<B>()] },
        native: Native::Function,
    }
}

/// `d = f(a, b, c)`
pub(crate) fn op3<A: Lane, B: Lane, C: Lane, D: Lane, F: Fn(A, B, C) -> D + Copy>(_: F) -> Spec {
    let sig = const { &[def::<D>(), arg::<A>(), arg::<B>(), arg::<C>()] };
    Spec { f: fastest::<Op3<A, B, C, D, F>>(), sig, native: Native::Function }
}

/// [`op3`] as [`rare1`] is [`op1`].
pub(crate) fn rare3<A: Lane, B: Lane, C: Lane, D: Lane, F: Fn(A, B, C) -> D + Copy>(_: F) -> Spec {
    let sig = const { &[def::<D>(), arg::<A>(), arg::<B>(), arg::<C>()] };
    Spec { f: Op3::<A, B, C, D, F>::apply, sig, native: Native::Function }
}

/// `d = f(a, b, c, e)`, lane by lane as well.
pub(crate) fn op4<A: Lane, B: Lane, C: Lane, E: Lane, D: Lane, F: Fn(A, B, C, E) -> D + Copy>(_: F) -> Spec {
    fn run<A: Lane, B: Lane, C: Lane, E: Lane, D: Lane, F: Fn(A, B, C, E) -> D + Copy>(
        r: &mut Regs,
        s: &[u32; 6],
        m: u32,
    ) {
        let f = conjure::<F>();
        each_lane(m, |i| {
            let (a, b, c) = (A::get(r, s[1], i), B::get(r, s[2], i), C::get(r, s[3], i));
            D::set(r, s[0], i, f(a, b, c, E::get(r, s[4], i)));
        });
    }
    Spec {
        f: run::<A, B, C, E, D, F>,
        sig: const { &[def::<D>(), arg::<A>(), arg::<B>(), arg::<C>(), arg::<E>()] },
        native: Native::Function,
    }
}

/// `d, flag = f(a, b, flag)`: the carry chain. Slots: d, a, b, flag in, flag out.
pub(crate) fn op_carry<T: Lane, F: Fn(T, T, bool) -> (T, bool) + Copy>(_: F) -> Spec {
    fn run<T: Lane, F: Fn(T, T, bool) -> (T, bool) + Copy>(r: &mut Regs, s: &[u32; 6], m: u32) {
        let f = conjure::<F>();
        each_lane(m, |i| {
            let (v, flag) = f(T::get(r, s[1], i), T::get(r, s[2], i), bool::get(r, s[3], i));
            T::set(r, s[0], i, v);
            bool::set(r, s[4], i, flag);
        });
    }
    Spec {
        f: run::<T, F>,
        sig: const { &[def::<T>(), arg::<T>(), arg::<T>(), arg::<bool>(), def::<bool>()] },
        native: Native::Function,
    }
}

/// How `setp` combines the comparison with its predicate operand; the number in slot 5.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Combine {
    None,
    And,
    Or,
    Xor,
}

struct Setp<T, F>(PhantomData<(T, F)>);

impl<T: Lane, F: Fn(T, T) -> bool + Copy> Apply for Setp<T, F> {
    #[inline(never)]
    fn apply(r: &mut Regs, s: &[u32; 6], m: u32) {
        let f = conjure::<F>();
        let mut t = 0;
        each_lane(m, |i| t |= u32::from(f(T::get(r, s[2], i), T::get(r, s[3], i))) << i);
        put_setp(r, s, m, t);
    }
    #[inline(always)]
    fn apply_wide(r: &mut Regs, s: &[u32; 6], m: u32) {
        let f = conjure::<F>();
        let (a, b) = (T::view(r, s[2]), T::view(r, s[3]));
        let t = mask_of(|i| f(T::at(&a, i), T::at(&b, i)));
        put_setp(r, s, m, t);
    }
}

/// Stores the lanes `m` of the comparison `t`, combined with the predicate of slot 5.
fn put_setp(r: &mut Regs, s: &[u32; 6], m: u32, t: u32) {
    let c = r.pred[s[4] as usize];
    let combine = |t: u32| match s[5] {
        0 => t,
        1 => t & c,
        2 => t | c,
        _ => t ^ c,
    };
    let (p, q) = (combine(t), combine(!t));
    // p and q are different registers or the sink, so the order does not matter.
    for (slot, v) in [(s[1], q), (s[0], p)] {
        let old = &mut r.pred[slot as usize];
        *old = *old & !m | v & m;
    }
}

/// `p|q = f(a, b) combined with c`. Slots: p, q, a, b, c, [`Combine`].
pub(crate) fn op_setp<T: Lane, F: Fn(T, T) -> bool + Copy>(_: F) -> Spec {
    let sig = const { &[def::<bool>(), def::<bool>(), arg::<T>(), arg::<T>(), arg::<bool>()] };
    Spec { f: fastest::<Setp<T, F>>(), sig, native: Native::Function }
}

/// Bitwise operation on whole predicate registers: `d = f(a, b)`.
pub(crate) fn op_pred<F: Fn(u32, u32) -> u32 + Copy>(_: F) -> Spec {
    fn run<F: Fn(u32, u32) -> u32 + Copy>(r: &mut Regs, s: &[u32; 6], m: u32) {
        let f = conjure::<F>();
        let v = f(r.pred[s[1] as usize], r.pred[s[2] as usize]);
        let d = &mut r.pred[s[0] as usize];
        *d = *d & !m | v & m;
    }
    Spec {
        f: run::<F>,
        sig: const { &[def::<bool>(), arg::<bool>(), arg::<bool>()] },
        native: Native::Function,
    }
}

//! `multimem`: one access to the same offset in the memory of each device of a multicast object.
//!
//! Each access counts as one access per device, of its semantics and scope. The manual leaves the
//! order of a reduction open: values are taken in the order of the devices' numbers here.

use std::sync::atomic::Ordering;

use half::f16;

use super::access::{modify, read, update, write};
use super::lanes::lanes;
use super::state::{Exec, Flow, Run, stop};
use crate::check::hooks::{Hooks, Part, Place};
use crate::check::record::{How, Update, ViolationAt};
use crate::fault::FaultKind;
use crate::float::{BF16, E4M3, E5M2, F16, F32, F64, Format, Overflow, Round, convert, max, min};
use crate::ir::{Multimem, Number, Reduce, Reduces, Rmw, Sem};
use crate::multicast::Target;

/// Most bytes of an access.
const MOST_BYTES: usize = 16;

impl Number {
    fn format(self) -> Option<Format> {
        match self {
            Number::Unsigned | Number::Signed => None,
            Number::F16 => Some(F16),
            Number::Bf16 => Some(BF16),
            Number::F32 => Some(F32),
            Number::F64 => Some(F64),
            Number::E4m3 => Some(E4M3),
            Number::E5m2 => Some(E5M2),
        }
    }
}

/// A number in another format, rounded to nearest. Numbers of 8 bits saturate, as all conversions
/// to them in PTX do.
fn in_format(bits: u64, from: Format, to: Format) -> u64 {
    let overflow = if to.mantissa < BF16.mantissa { Overflow::Finite } else { Overflow::Ieee };
    convert(bits, from, to, Round::Nearest, overflow)
}

/// The operation on two numbers of `bytes` bytes.
fn apply(op: Reduce, number: Number, bytes: u8, a: u64, b: u64) -> u64 {
    let rmw = match (number, op) {
        (Number::Unsigned | Number::Signed, op) => op.of_integers(number == Number::Signed),
        (Number::F16, Reduce::Add) => Rmw::AddF16,
        (Number::F16, Reduce::Min) => Rmw::MinF16,
        (Number::F16, _) => Rmw::MaxF16,
        (Number::Bf16, Reduce::Add) => Rmw::AddBf16,
        (Number::Bf16, Reduce::Min) => Rmw::MinBf16,
        (Number::Bf16, _) => Rmw::MaxBf16,
        // Both types have sums alone.
        (Number::F32, _) => Rmw::AddF32,
        (Number::F64, _) => Rmw::AddF64,
        (Number::E4m3 | Number::E5m2, _) => {
            let format = if number == Number::E4m3 { E4M3 } else { E5M2 };
            if op == Reduce::Add {
                // The sum of two is exact in f64.
                let [a, b] = [a, b].map(|bits| f64::from_bits(in_format(bits, format, F64)));
                return in_format((a + b).to_bits(), F64, format);
            }
            // Both are numbers of f16, and so is the result.
            let [a, b] = [a, b].map(|bits| f16::from_bits(in_format(bits, format, F16) as u16));
            let chosen = if op == Reduce::Min { min::<f16, false>(a, b) } else { max::<f16, false>(a, b) };
            return convert(chosen.to_bits().into(), F16, format, Round::Nearest, Overflow::Ieee);
        }
    };
    modify(rmw, bytes, a, b, 0) & of_bytes(bytes)
}

/// The mask of the low `bytes` bytes.
fn of_bytes(bytes: u8) -> u64 {
    u64::MAX >> (64 - 8 * u32::from(bytes))
}

impl Reduces {
    /// Each element of a register of `bytes` bytes, as `f` makes it of the elements of other values
    /// at its place, which `f` gets by a function.
    fn each(&self, bytes: u8, f: impl Fn(&dyn Fn(u64) -> u64) -> u64) -> u64 {
        let element = self.bytes.min(bytes);
        (0..bytes).step_by(element.into()).fold(0, |all, at| {
            let shift = 8 * u32::from(at);
            all | (f(&|value| value >> shift & of_bytes(element)) & of_bytes(element)) << shift
        })
    }

    /// Two values of a register reduced.
    fn two(&self, bytes: u8, a: u64, b: u64) -> u64 {
        self.each(bytes, |of| apply(self.op, self.number, self.bytes, of(a), of(b)))
    }

    /// A register's values on all devices reduced, in their order.
    fn all(&self, bytes: u8, values: &[u64]) -> u64 {
        if self.sums != self.number
            && self.op == Reduce::Add
            && let (Some(own), Some(sums)) = (self.number.format(), self.sums.format())
        {
            let sum_bytes = if self.sums == Number::F32 { 4 } else { 2 };
            return self.each(bytes, |of| {
                let wide = values.iter().map(|&value| in_format(of(value), own, sums));
                let sum = wide.reduce(|a, b| apply(self.op, self.sums, sum_bytes, a, b));
                in_format(sum.unwrap_or_default(), sums, own)
            });
        }
        values.iter().copied().reduce(|a, b| self.two(bytes, a, b)).unwrap_or_default()
    }
}

impl<W: Hooks> Exec<'_, W> {
    /// Executes a `multimem` for the lanes `m`.
    pub(super) fn multimem(&mut self, access: u32, m: u32) -> Run<Flow> {
        let env = self.env;
        let a = &env.kernel.operands.multimems[access as usize];
        let addr = self.addresses(&a.addr);
        let size = u64::from(a.bytes) * u64::from(a.n);
        let (mut seen, mut last) = (0, None);
        for i in lanes(m) {
            let at = addr[i];
            if !at.is_multiple_of(size) {
                return stop(FaultKind::Misaligned { addr: at, align: size }, Some(i));
            }
            let targets = env.table.targets(at, size).or_else(|kind| stop(kind, Some(i)))?;
            if let Some(reduces) = a.reduces.filter(|_| a.loads) {
                let value = self.load_reduced(a, &reduces, &targets, i)?;
                seen = u64::rotate_left(seen, 7) ^ value;
                last = Some((at, value));
                continue;
            }
            for (device, target) in &targets {
                match &a.reduces {
                    Some(reduces) => self.reduce_at(a, reduces, (*device, target), i)?,
                    None => self.store_at(a, (*device, target), i)?,
                }
            }
        }
        if !a.loads {
            self.changed();
        }
        let spins = match last {
            // A strong load is a poll.
            Some(last) if a.sem != Sem::Weak => self.poll_memory(last, seen),
            _ => false,
        };
        self.pc += 1;
        Ok(if spins { Flow::GiveWay } else { Flow::Next })
    }

    /// Reports a wrong access to a device.
    #[cold]
    fn blame_on(
        &mut self,
        (device, target): (u32, &Target),
        violation: ViolationAt,
        lane: usize,
        how: How,
        write: bool,
    ) -> Run<()> {
        // The label of memory of a machine names its device.
        let of = format!(" of device {device}");
        let label = target.label.strip_suffix(&of).unwrap_or(&target.label);
        self.blame_in(format!("{label}{of}"), place(target, 0), violation, lane, (how, write))
    }

    /// The value of register `e` of lane `i`.
    fn multimem_operand(&self, a: &Multimem, e: usize, i: usize) -> u64 {
        let (slot, regs) = (a.regs[e] as usize, &self.warp.regs);
        if a.bytes == 8 { regs.r64[slot][i] } else { u64::from(regs.r32[slot][i]) & of_bytes(a.bytes) }
    }

    /// Loads the values of all devices and reduces them into the registers of lane `i`. Returns a
    /// digest of the results.
    fn load_reduced(
        &mut self,
        a: &Multimem,
        reduces: &Reduces,
        targets: &[(u32, Target)],
        i: usize,
    ) -> Run<u64> {
        let n = usize::from(a.n);
        let how = How::generic(a.sem, a.scope, a.bytes, Update::No);
        let mut values = vec![vec![0; targets.len()]; n];
        for (d, (device, target)) in targets.iter().enumerate() {
            let size = u64::from(a.bytes) * u64::from(a.n);
            if W::ON {
                for (_, violation) in self.watch.read(place(target, 0), Part::of(i, size), self.pc, how).all {
                    self.blame_on((*device, target), violation, i, how, false)?;
                }
            }
            for (e, values) in values.iter_mut().enumerate() {
                let offset = e as u64 * u64::from(a.bytes);
                let order = if a.sem == Sem::Acquire { Ordering::Acquire } else { Ordering::Relaxed };
                // SAFETY: the target is valid for the access and aligned to it, and kept mapped.
                let mut value = unsafe { read((target.addr + offset) as *mut u8, a.bytes, order) };
                if W::ON {
                    let place = place(target, offset);
                    let old = match self.watch.weak_memory() {
                        true => self.watch.stale(place, a.bytes.into(), i, how),
                        false => None,
                    };
                    value = old.map_or(value, |[old, _]| old & of_bytes(a.bytes));
                    if a.sem != Sem::Weak {
                        self.watch.observe(place, 1 << i, self.pc, a.sem, a.scope, old.is_some());
                    }
                }
                values[d] = value;
            }
        }
        let mut seen = 0u64;
        for (e, values) in values.iter().enumerate() {
            let (value, slot) = (reduces.all(a.bytes, values), a.regs[e] as usize);
            match a.bytes {
                8 => self.warp.regs.r64[slot][i] = value,
                _ => self.warp.regs.r32[slot][i] = value as u32,
            }
            seen = seen.rotate_left(7) ^ value;
        }
        Ok(seen)
    }

    /// Stores the registers of lane `i` to a device.
    fn store_at(&mut self, a: &Multimem, to: (u32, &Target), i: usize) -> Run<()> {
        let (target, n) = (to.1, usize::from(a.bytes));
        let size = n * usize::from(a.n);
        let how = How::generic(a.sem, a.scope, a.bytes, Update::No);
        let mut strong_before = false;
        if W::ON {
            let now = present(a, target);
            let new = bytes_of(a, |e| self.multimem_operand(a, e, i));
            let (strong, found) =
                self.watch.write(place(target, 0), i, self.pc, how, &now[..size], &new[..size]);
            strong_before = strong;
            if let Some(violation) = found {
                self.blame_on(to, violation, i, how, true)?;
            }
        }
        let order = if a.sem == Sem::Release { Ordering::Release } else { Ordering::Relaxed };
        for at in (0..size).step_by(n) {
            let value = self.multimem_operand(a, at / n, i);
            // SAFETY: the target is valid for the access and aligned to it, and kept mapped.
            unsafe { write((target.addr as usize + at) as *mut u8, a.bytes, value, order) };
            if W::ON && (a.sem != Sem::Weak || strong_before) {
                self.watch.wrote(place(target, at as u64), i, self.pc, a.sem, a.scope, false);
            }
        }
        Ok(())
    }

    /// Changes the memory of a device by the registers of lane `i`, each register's part at once.
    fn reduce_at(&mut self, a: &Multimem, reduces: &Reduces, to: (u32, &Target), i: usize) -> Run<()> {
        let (target, n) = (to.1, usize::from(a.bytes));
        let size = n * usize::from(a.n);
        let how = How::generic(a.sem, a.scope, a.bytes, Update::Modifies);
        if W::ON {
            let now = present(a, target);
            let (_, found) = self.watch.write(place(target, 0), i, self.pc, how, &now[..size], &[]);
            if let Some(violation) = found {
                self.blame_on(to, violation, i, how, true)?;
            }
        }
        for at in (0..size).step_by(n) {
            let operand = self.multimem_operand(a, at / n, i);
            let p = (target.addr as usize + at) as *mut u8;
            // SAFETY: as in `store_at`.
            unsafe { update(p, a.bytes, |old| reduces.two(a.bytes, old, operand)) };
            if W::ON {
                self.watch.wrote(place(target, at as u64), i, self.pc, a.sem, a.scope, true);
            }
        }
        Ok(())
    }
}

/// The bytes of an access, of the value for each register.
fn bytes_of(a: &Multimem, value: impl Fn(usize) -> u64) -> [u8; MOST_BYTES] {
    let (mut bytes, n) = ([0; MOST_BYTES], usize::from(a.bytes));
    for e in 0..usize::from(a.n) {
        bytes[e * n..][..n].copy_from_slice(&value(e).to_ne_bytes()[..n]);
    }
    bytes
}

/// The bytes that are there now.
fn present(a: &Multimem, target: &Target) -> [u8; MOST_BYTES] {
    bytes_of(a, |e| {
        let at = target.addr + e as u64 * u64::from(a.bytes);
        // SAFETY: the target is valid for the access and aligned to it, and kept mapped.
        unsafe { read(at as *mut u8, a.bytes, Ordering::Relaxed) }
    })
}

/// The checked location of an access to a device, `bytes` behind its first byte.
fn place(target: &Target, bytes: u64) -> Place {
    Place::Global { shadow: target.shadow, offset: target.offset + bytes }
}

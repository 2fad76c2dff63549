//! Loads of warps without checks, whose addresses are compared with bounds all at once.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::access::{LOADS, LOCAL_TAG, TAG, order_of, read, whole};
use super::lanes::lanes;
use super::state::{Exec, Run};
use crate::check::hooks::Hooks;
use crate::ir::{Access, Space};
use crate::registers::Regs;

/// Numbers of lanes whose strong loads are done one by one.
pub(super) const FEW: RangeInclusive<u32> = 2..=4;

impl<W: Hooks> Exec<'_, W> {
    /// A strong load of few lanes. Returns what [`Exec::take_values`] returns.
    #[inline(always)]
    pub(super) fn load_few(&mut self, a: &Access, size: u64, m: u32) -> Run<(Option<(u64, u64)>, u64)> {
        if a.is_word_of_others()
            && let Some((first, seen)) = self.load_words(a, m)
        {
            return Ok((Some(first), seen));
        }
        let order = order_of(a);
        let (mut first, mut seen, mut alike) = (None, 0u64, a.n == 1);
        for i in lanes(m) {
            let at = self.address(&a.addr, i);
            let p = self.pointer(LOADS, a.space, at, size, i)?;
            let own = a.space == Space::Local || a.space == Space::Generic && at & TAG == LOCAL_TAG;
            for e in 0..a.n as usize {
                // SAFETY: `pointer` checked bounds and alignment of the whole vector.
                let v = a.extend(unsafe { read(p.add(e * a.bytes as usize), a.bytes, order) });
                let slot = a.regs[e] as usize;
                if a.wide {
                    self.warp.regs.r64[slot][i] = v;
                } else {
                    self.warp.regs.r32[slot][i] = v as u32;
                }
                let (one, _) = *first.get_or_insert((at, v));
                alike &= one == at && !own;
                seen = seen.rotate_left(7) ^ v;
            }
        }
        // `take_values` reads a place that all lanes share once: its value is the digest.
        Ok((first, if alike { first.map_or(0, |(_, v)| v) } else { seen }))
    }

    /// The same for words ([`Access::is_word_of_others`]), or for one lane. `None`, and nothing has
    /// happened, where there are more lanes, or a place is bad or not in the region used last.
    #[inline(always)]
    pub(super) fn load_words(&mut self, a: &Access, m: u32) -> Option<((u64, u64), u64)> {
        if a.wide { self.load_words_of::<8>(a, m) } else { self.load_words_of::<4>(a, m) }
    }

    #[inline(always)]
    fn load_words_of<const BYTES: u8>(&mut self, a: &Access, m: u32) -> Option<((u64, u64), u64)> {
        let (slot, places, bytes) = (a.regs[0] as usize, a.addr.slot as usize, u64::from(BYTES));
        let region = self.warp.regions[LOADS][0];
        let at = |regs: &Regs, i: usize| regs.r64[places][i].wrapping_add(a.addr.offset as u64);
        for (n, i) in lanes(m).enumerate() {
            let at = at(&self.warp.regs, i);
            if n == *FEW.end() as usize || at & (bytes - 1) != 0 || !region.holds(at, bytes) {
                return None;
            }
        }
        let (mut first, mut seen, mut alike) = (None, 0u64, true);
        for i in lanes(m) {
            let at = at(&self.warp.regs, i);
            // SAFETY: the region holds the element, which is aligned.
            let value = unsafe { read(at as *mut u8, BYTES, Ordering::Acquire) };
            alike &= first.get_or_insert((at, value)).0 == at;
            seen = seen.rotate_left(7) ^ value;
            if BYTES == 8 {
                self.warp.regs.r64[slot][i] = value;
            } else {
                self.warp.regs.r32[slot][i] = value as u32;
            }
        }
        // See above.
        first.map(|(at, value)| ((at, value), if alike { value } else { seen }))
    }

    /// A weak load of the lanes `m` from scattered places. False, and nothing has happened, where
    /// some place is bad or in another region than the others, or the shape has no fast path.
    #[inline(always)]
    pub(super) fn load_scattered(&mut self, a: &Access, addr: &[u64; 32], size: u64, m: u32) -> Run<bool> {
        let (start, bytes, p) = match a.space {
            Space::Global | Space::Generic => {
                // The first lane's region becomes the one used last. A fault here is the one that
                // the lanes would have one by one.
                let first = m.trailing_zeros() as usize;
                self.pointer(LOADS, a.space, addr[first], size, first)?;
                let region = self.warp.regions[LOADS][0];
                (region.start, region.bytes, region.start as *mut u8)
            }
            Space::Shared => self.block.shared.window(),
            _ => return Ok(false),
        };
        let Some(last) = bytes.checked_sub(size) else { return Ok(false) };
        let bad = |i: usize| addr[i].wrapping_sub(start) > last || addr[i] & (size - 1) != 0;
        if super::lanes::mask_of(bad) & m != 0 {
            return Ok(false);
        }
        macro_rules! gather {
            ($atomic:ty, $t:ty, $file:ident, $n:literal) => {{
                for i in lanes(m) {
                    // SAFETY: `last` is that of the window at `p`, so that the vector of each lane
                    // lies in it, and the vector is aligned to its size.
                    let vector = unsafe { p.add((addr[i] - start) as usize) }.cast::<$t>();
                    for e in 0..$n {
                        let slot = a.regs[e] as usize;
                        // SAFETY: as above, for the element. Other threads access it by atomics, or
                        // by raw copies.
                        let v = unsafe { <$atomic>::from_ptr(vector.add(e)) }.load(Ordering::Relaxed);
                        self.warp.regs.$file[slot][i] = v.into();
                    }
                }
                true
            }};
        }
        Ok(match (a.bytes, a.n, a.wide, a.signed) {
            _ if a.whole => false,
            (4, 1, false, _) => gather!(AtomicU32, u32, r32, 1),
            (4, 2, false, _) => gather!(AtomicU32, u32, r32, 2),
            (4, 4, false, _) => gather!(AtomicU32, u32, r32, 4),
            (8, 1, true, _) => gather!(AtomicU64, u64, r64, 1),
            (8, 2, true, _) => gather!(AtomicU64, u64, r64, 2),
            (2, 1, false, false) => gather!(AtomicU16, u16, r32, 1),
            (1, 1, false, false) => gather!(AtomicU8, u8, r32, 1),
            _ => false,
        })
    }

    /// A strong load of a full warp of consecutive elements at `p`, each by itself. Returns the
    /// first value, and the digest of all that [`Exec::take_values`] returns; `None` where the shape
    /// has no fast path.
    ///
    /// # Safety
    /// `p` must be valid for 32 vectors and aligned to one.
    #[inline(always)]
    pub(super) unsafe fn load_strong_rows(
        &mut self,
        a: &Access,
        p: *mut u8,
        order: Ordering,
    ) -> Option<(u64, u64)> {
        macro_rules! rows {
            ($atomic:ty, $t:ty, $file:ident, $n:literal) => {{
                let (mut rows, mut seen) = ([[0; 32]; $n], 0u64);
                for i in 0..32 {
                    for e in 0..$n {
                        // SAFETY: the caller checked the 32 * n elements, and their alignment.
                        // Other threads access them by atomics, or by raw copies.
                        let cell = unsafe { <$atomic>::from_ptr(p.cast::<$t>().add($n * i + e)) };
                        let v: $t = cell.load(order);
                        rows[e][i] = v;
                        seen = seen.rotate_left(7) ^ u64::from(v);
                    }
                }
                for e in 0..$n {
                    self.warp.regs.$file[a.regs[e] as usize] = rows[e];
                }
                Some((rows[0][0].into(), seen))
            }};
        }
        if a.whole {
            let (mut rows, mut seen) = ([[0; 32]; 2], 0u64);
            for i in 0..32 {
                // SAFETY: the caller checked 32 vectors of 16 bytes, and their alignment.
                let halves = unsafe { whole::read(p.add(16 * i)) };
                for (row, half) in rows.iter_mut().zip(halves) {
                    row[i] = half;
                    seen = seen.rotate_left(7) ^ half;
                }
            }
            for (row, &slot) in rows.iter().zip(&a.regs) {
                self.warp.regs.r64[slot as usize] = *row;
            }
            return Some((rows[0][0], seen));
        }
        match (a.bytes, a.n, a.wide) {
            _ if a.signed => None,
            (4, 1, false) => rows!(AtomicU32, u32, r32, 1),
            (4, 4, false) => rows!(AtomicU32, u32, r32, 4),
            (8, 1, true) => rows!(AtomicU64, u64, r64, 1),
            (8, 2, true) => rows!(AtomicU64, u64, r64, 2),
            _ => None,
        }
    }
}

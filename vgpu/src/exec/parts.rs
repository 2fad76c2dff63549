//! The lanes of a warp access memory in parts under watch: as many lanes as access consecutive
//! elements, or the same one, are watched at once.

use super::access::{LOADS, SHARED_TAG, TAG};
use super::state::Exec;
use crate::check::hooks::{Hooks, Part};
use crate::ir::{Access, Sem, Space};
use crate::registers::Regs;

impl<W: Hooks> Exec<'_, W> {
    /// The part of the lanes `todo` that its first lane belongs to. Elements have `size` bytes. A
    /// row comes with a pointer to its first element. Bounds and alignment of other parts are not
    /// checked.
    pub(super) fn part(
        &mut self,
        cache: usize,
        space: Space,
        addr: &[u64; 32],
        size: u64,
        todo: u32,
    ) -> (Part, Option<*mut u8>) {
        let first = todo.trailing_zeros() as usize % 32;
        let base = addr[first];
        let ahead = &addr[first..][..(todo >> first).trailing_ones() as usize];
        if size >= 4 && ahead.len() > 1 && ahead[1] == base.wrapping_add(size) {
            let in_row = |(i, at): &(u64, &u64)| **at == base.wrapping_add(i * size);
            let count = (0..).zip(ahead).take_while(in_row).count();
            if let Some(p) = self.span(cache, space, base, size, count as u64 * size) {
                let lanes = (u32::MAX >> (32 - count)) << first;
                return (Part { lanes, size, width: size, row: true }, Some(p));
            }
        }
        let mut lanes = 1 << first;
        if cache == LOADS {
            let mut others = todo & !lanes;
            while others != 0 && addr[others.trailing_zeros() as usize] == base {
                lanes |= others & others.wrapping_neg();
                others &= others - 1;
            }
        }
        (Part { lanes, size, width: size, row: false }, None)
    }

    /// The part of the lanes `todo` that its first lane belongs to, in a weak load of parts of
    /// words that lie 4, 8 or 16 bytes apart, such as a column of a matrix of flags. `None` where
    /// there is no such part.
    pub(super) fn parts_apart(&mut self, a: &Access, addr: &[u64; 32], size: u64, todo: u32) -> Option<Part> {
        if size >= 4 || a.sem != Sem::Weak || a.read_only {
            return None;
        }
        if self.watch.weak_memory() || self.watch.is_explored() {
            return None;
        }
        let first = todo.trailing_zeros() as usize % 32;
        let base = addr[first];
        let ahead = &addr[first..][..(todo >> first).trailing_ones() as usize];
        let step = ahead.get(1)?.wrapping_sub(base);
        if !matches!(step, 4 | 8 | 16) {
            return None;
        }
        let in_row = |(i, at): &(u64, &u64)| **at == base.wrapping_add(i * step);
        let count = (0..).zip(ahead).take_while(in_row).count();
        self.span(LOADS, a.space, base, size, (count as u64 - 1) * step + size)?;
        Some(Part { lanes: (u32::MAX >> (32 - count)) << first, size: step, width: size, row: true })
    }

    /// The pointer for `bytes` bytes of consecutive elements from `base` on, if they are aligned
    /// and lie in one region of memory that lanes share.
    fn span(&mut self, cache: usize, space: Space, base: u64, size: u64, bytes: u64) -> Option<*mut u8> {
        if base & (size - 1) != 0 {
            return None;
        }
        match (space, base & TAG) {
            (Space::Shared, 0) => self.block.shared.pointer(base, bytes).ok(),
            (Space::Cluster, 0) => self.block.in_cluster(base, bytes).ok(),
            (Space::Generic, SHARED_TAG) => self.block.in_cluster(base & !TAG, bytes).ok(),
            (Space::Global | Space::Generic, 0) => self.global(cache, base, bytes).ok(),
            _ => None,
        }
    }
}

/// The 4 bytes at the offset `at` of the vector that a lane stores.
pub(super) fn stored_word(a: &Access, regs: &Regs, lane: usize, at: usize) -> u32 {
    let bytes = usize::from(a.bytes);
    let element = |e: usize| {
        let slot = a.regs[e] as usize;
        if a.wide { regs.r64[slot][lane] } else { u64::from(regs.r32[slot][lane]) }
    };
    if bytes >= 4 {
        return (element(at / bytes) >> (8 * (at % bytes))) as u32;
    }
    let bits = 8 * bytes;
    let parts = (0..4 / bytes).map(|e| (element(at / bytes + e) & ((1 << bits) - 1)) << (bits * e));
    parts.fold(0, |word, part| word | part as u32)
}

//! Registers of warps, and the memory that they are in.

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use crate::ir::{Addr, File};
use crate::memory::Mapping;

/// The process keeps so many bytes at most of blocks that have ended.
const SPARE_BYTES: usize = 128 << 20;

/// The least memory of a block, so that the process has few mappings.
const MIN_BYTES: usize = 64 << 10;

/// Memory of blocks that have ended, for others. The system would fill new pages with zeros, and no
/// lane reads a register before it is written, see `Kernel::alive_at_start`.
static SPARE: Mutex<Spare> = Mutex::new(Spare { bytes: 0, by_length: BTreeMap::new() });

struct Spare {
    bytes: usize,
    by_length: BTreeMap<usize, Vec<Mapping>>,
}

/// Memory for the registers of a block. Many registers belong to paths that a warp does not take: a
/// page of them takes no memory of the machine, unless the system makes all pages huge.
#[derive(Debug)]
struct BlockMemory(ManuallyDrop<Mapping>);

impl BlockMemory {
    /// At least so many bytes, with arbitrary values.
    fn new(bytes: usize) -> Self {
        // Kernels share few lengths.
        let bytes = bytes.next_power_of_two().max(MIN_BYTES);
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        let found = spare.by_length.get_mut(&bytes).and_then(Vec::pop);
        spare.bytes -= found.as_ref().map_or(0, Mapping::bytes);
        drop(spare);
        BlockMemory(ManuallyDrop::new(found.unwrap_or_else(|| Mapping::zeroed(bytes))))
    }
}

impl Drop for BlockMemory {
    fn drop(&mut self) {
        // SAFETY: it is not used again.
        let memory = unsafe { ManuallyDrop::take(&mut self.0) };
        let bytes = memory.bytes();
        // Unmapped behind the lock.
        let mut displaced = vec![];
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        while spare.bytes + bytes > SPARE_BYTES {
            // Kernels of other lengths ran before this one.
            let mut others = spare.by_length.iter_mut().filter(|(length, _)| **length != bytes);
            let Some(other) = others.find_map(|(_, memories)| memories.pop()) else { return };
            spare.bytes -= other.bytes();
            displaced.push(other);
        }
        spare.bytes += bytes;
        spare.by_length.entry(bytes).or_default().push(memory);
    }
}

/// A register of all lanes. It begins at a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Row<T>([T; 32]);

/// A file of registers, as a slice of the lanes of each.
#[derive(Debug)]
pub(crate) struct Rows<T> {
    first: NonNull<Row<T>>,
    len: usize,
    /// The memory that the rows are in; missing where there are none.
    _memory: Option<Arc<BlockMemory>>,
}

// SAFETY: rows own their part of the memory as a `Vec` does.
unsafe impl<T: Send> Send for Rows<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Rows<T> {}

impl<T> Default for Rows<T> {
    fn default() -> Self {
        Rows { first: NonNull::dangling(), len: 0, _memory: None }
    }
}

impl<T> Rows<T> {
    /// A row has the length of its lanes, so the rows are an array of those.
    const WHOLE: () = assert!(size_of::<Row<T>>() == 32 * size_of::<T>());
}

impl<T> std::ops::Deref for Rows<T> {
    type Target = [[T; 32]];
    #[inline(always)]
    fn deref(&self) -> &[[T; 32]] {
        let () = Self::WHOLE;
        // SAFETY: `first` is the first of `len` rows, see `Regs::of_warps`, which nothing else has
        // and which stay mapped for as long as `_memory`. A row is an array of 32 lanes at its
        // start, and nothing behind it.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr().cast(), self.len) }
    }
}

impl<T> std::ops::DerefMut for Rows<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [[T; 32]] {
        let () = Self::WHOLE;
        // SAFETY: see `deref`.
        unsafe { std::slice::from_raw_parts_mut(self.first.as_ptr().cast(), self.len) }
    }
}

/// The registers of one warp.
#[derive(Debug, Default)]
pub(crate) struct Regs {
    pub(crate) r32: Rows<u32>,
    pub(crate) r64: Rows<u64>,
    /// One bit per lane.
    pub(crate) pred: Vec<u32>,
}

impl Regs {
    /// The address that an access names for a lane.
    #[inline(always)]
    pub(crate) fn address(&self, a: &Addr, lane: usize) -> u64 {
        if a.wide {
            self.r64[a.slot as usize][lane].wrapping_add(a.offset as u64)
        } else {
            u64::from(self.r32[a.slot as usize][lane].wrapping_add(a.offset as u32))
        }
    }

    /// The registers of the warps of a block: slots of each file, with arbitrary values.
    pub(crate) fn of_warps(warps: usize, [n32, n64, np]: [u32; 3]) -> Vec<Regs> {
        let [n32, n64, np] = [n32 as usize, n64 as usize, np as usize];
        let of_r32 = n32 * size_of::<Row<u32>>();
        let of_warp = of_r32 + n64 * size_of::<Row<u64>>();
        let memory = Arc::new(BlockMemory::new(warps * of_warp));
        let part = |warp: usize| {
            // SAFETY: both lie inside of the memory or right behind it.
            let (r32, r64) = unsafe {
                let start = memory.0.start().add(warp * of_warp);
                (start.cast(), start.add(of_r32).cast())
            };
            // Memory begins at a page, and each part of it is whole rows: all of them are aligned.
            Regs {
                r32: Rows { first: r32, len: n32, _memory: Some(memory.clone()) },
                r64: Rows { first: r64, len: n64, _memory: Some(memory.clone()) },
                pred: vec![0; np],
            }
        };
        (0..warps).map(part).collect()
    }

    /// Copies a slot of other registers.
    pub(crate) fn copy(&mut self, from: &Regs, file: File, slot: u32) {
        let slot = slot as usize;
        match file {
            File::R32 => self.r32[slot] = from.r32[slot],
            File::R64 => self.r64[slot] = from.r64[slot],
            File::Pred => self.pred[slot] = from.pred[slot],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of warps that live together share no byte, nor do those of other blocks.
    #[test]
    fn rows_are_apart() {
        let slots = [[5, 3, 2], [1, 0, 1], [0, 0, 0], [200, 100, 9]];
        for _ in 0..2 {
            let mut warps: Vec<_> = slots.iter().flat_map(|&slots| Regs::of_warps(3, slots)).collect();
            let mut n = 0;
            for warp in &mut warps {
                let narrow = warp.r32.iter_mut().map(|row| row.as_mut_ptr() as usize);
                let wide = warp.r64.iter_mut().map(|row| row.as_mut_ptr() as usize);
                assert!(narrow.chain(wide).all(|row| row.is_multiple_of(64)));
                warp.r32.iter_mut().flatten().for_each(|lane| (*lane, n) = (n, n + 1));
                warp.r64.iter_mut().flatten().for_each(|lane| (*lane, n) = (n.into(), n + 1));
            }
            n = 0;
            for warp in &warps {
                let narrow = warp.r32.iter().flatten().map(|&lane| u64::from(lane));
                for lane in narrow.chain(warp.r64.iter().flatten().copied()) {
                    assert_eq!(lane, u64::from(n));
                    n += 1;
                }
            }
            assert_eq!(n, 3 * 32 * (5 + 3 + 1 + 200 + 100));
        }
    }
}

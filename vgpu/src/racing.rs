//! Copies of memory that other threads access meanwhile.
//!
//! Kernels, kernels of peers and the host may access the same bytes at the same time. A plain copy
//! would be a data race of Rust's memory model there, and that is undefined behaviour. So accesses
//! here are relaxed atomics, as those of kernels are. One gap is left: the model defines no race of
//! atomics that differ in size. Processors define it.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

const WORD: usize = size_of::<u64>();

/// The offsets of the aligned words among `bytes` bytes at `p`.
fn words(p: *const u8, bytes: usize) -> Range<usize> {
    let start = ((p as usize).wrapping_neg() % WORD).min(bytes);
    start..bytes - (bytes - start) % WORD
}

/// The byte at `p`.
///
/// # Safety
/// `p` must be valid for `'a`, and others access it by atomics alone.
unsafe fn byte<'a>(p: *const u8) -> &'a AtomicU8 {
    // SAFETY: the caller vouches for it; an `AtomicU8` has no alignment.
    unsafe { AtomicU8::from_ptr(p.cast_mut()) }
}

/// The word at `p`.
///
/// # Safety
/// `p` must be aligned and valid for `'a`, and others access it by atomics alone.
unsafe fn word<'a>(p: *const u8) -> &'a AtomicU64 {
    // SAFETY: the caller vouches for it.
    unsafe { AtomicU64::from_ptr(p.cast_mut().cast()) }
}

/// Copies `bytes` bytes to memory that no other thread accesses.
///
/// # Safety
/// `from` must be readable and `to` writable for `bytes` bytes, and they must not overlap. Others
/// access `from` by atomics alone, and `to` not at all.
pub(crate) unsafe fn load(from: *const u8, to: *mut u8, bytes: usize) {
    let words = words(from, bytes);
    for at in (0..words.start).chain(words.end..bytes) {
        // SAFETY: `at` is below `bytes`.
        unsafe { to.add(at).write(byte(from.add(at)).load(Relaxed)) };
    }
    for at in words.step_by(WORD) {
        // SAFETY: `words` are aligned words of `from`, and their offsets end below `bytes`.
        unsafe { to.add(at).cast::<u64>().write_unaligned(word(from.add(at)).load(Relaxed)) };
    }
}

/// Copies `bytes` bytes from memory that no other thread writes.
///
/// # Safety
/// `from` must be readable and `to` writable for `bytes` bytes, and they must not overlap. Others
/// access `to` by atomics alone, and do not write `from`.
pub(crate) unsafe fn store(from: *const u8, to: *mut u8, bytes: usize) {
    let words = words(to, bytes);
    for at in (0..words.start).chain(words.end..bytes) {
        // SAFETY: `at` is below `bytes`.
        unsafe { byte(to.add(at)).store(from.add(at).read(), Relaxed) };
    }
    for at in words.step_by(WORD) {
        // SAFETY: `words` are aligned words of `to`, and their offsets end below `bytes`.
        unsafe { word(to.add(at)).store(from.add(at).cast::<u64>().read_unaligned(), Relaxed) };
    }
}

/// Copies `bytes` bytes between two places, which may overlap: byte by byte where they are
/// not aligned alike.
///
/// # Safety
/// `from` must be readable and `to` writable for `bytes` bytes. Others access both by atomics
/// alone.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    let apart = (to as usize).wrapping_sub(from as usize);
    let words = if apart.is_multiple_of(WORD) { words(from, bytes) } else { 0..0 };
    let (head, tail) = (0..words.start, words.end..bytes);
    // SAFETY: offsets are below `bytes`.
    let one = |at| unsafe { byte(to.add(at)).store(byte(from.add(at)).load(Relaxed), Relaxed) };
    // SAFETY: the same, and words of `from` are aligned words of `to` here.
    let eight = |at| unsafe { word(to.add(at)).store(word(from.add(at)).load(Relaxed), Relaxed) };
    if apart >= bytes {
        head.for_each(one);
        words.step_by(WORD).for_each(eight);
        tail.for_each(one);
    } else {
        // `to` begins inside of `from`.
        tail.rev().for_each(one);
        words.step_by(WORD).rev().for_each(eight);
        head.rev().for_each(one);
    }
}

/// Sets `bytes` bytes to `value`.
///
/// # Safety
/// `to` must be writable for `bytes` bytes. Others access them by atomics alone.
pub(crate) unsafe fn fill(to: *mut u8, value: u8, bytes: usize) {
    let words = words(to, bytes);
    for at in (0..words.start).chain(words.end..bytes) {
        // SAFETY: `at` is below `bytes`.
        unsafe { byte(to.add(at)) }.store(value, Relaxed);
    }
    for at in words.step_by(WORD) {
        // SAFETY: `words` are aligned words of `to`, and their offsets end below `bytes`.
        unsafe { word(to.add(at)) }.store(u64::from_ne_bytes([value; WORD]), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_copied_whatever_the_alignment_and_the_overlap() {
        // Miri takes minutes for all.
        let tos = if cfg!(miri) { 6..12 } else { 0..24 };
        let froms = if cfg!(miri) { 8..10 } else { 0..10 };
        for (from, to, bytes) in froms.flat_map(|from| {
            tos.clone().flat_map(move |to| [0, 1, 7, 8, 9, 20].map(|bytes| (from, to, bytes)))
        }) {
            let start: Vec<u8> = (1..=48).collect();
            let mut wanted = start.clone();
            wanted.copy_within(from..from + bytes, to);
            let mut one = start.clone();
            let p = one.as_mut_ptr();
            // SAFETY: both ranges lie in the vector of 48 bytes, which no other thread accesses.
            unsafe { copy(p.add(from), p.add(to), bytes) };
            assert_eq!(one, wanted, "{bytes} bytes from {from} to {to}");

            let (mut loaded, mut stored) = (start.clone(), start.clone());
            // SAFETY: as above, and the vectors are others.
            unsafe {
                load(start.as_ptr().add(from), loaded.as_mut_ptr().add(to), bytes);
                store(start.as_ptr().add(from), stored.as_mut_ptr().add(to), bytes);
            }
            assert_eq!((&loaded, &stored), (&wanted, &wanted), "{bytes} bytes from {from} to {to}");

            let mut filled = start.clone();
            // SAFETY: the range lies in the vector.
            unsafe { fill(filled.as_mut_ptr().add(to), 99, bytes) };
            assert!(
                filled.iter().enumerate().all(|(at, &byte)| {
                    byte == if (to..to + bytes).contains(&at) { 99 } else { start[at] }
                })
            );
        }
    }
}

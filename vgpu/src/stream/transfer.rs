//! Copies and fills, as work of a stream.

use std::sync::{Arc, OnceLock};

use crate::memory::Memory;
use crate::memory_error::MemoryError;

/// A host address that a copy reads or writes later, from another thread.
#[derive(Debug, Clone, Copy)]
pub struct HostPtr(*mut u8);

// SAFETY: an address without thread affinity; the caller of `HostPtr::new` keeps the range alive
// and unshared until the stream has passed the copy.
unsafe impl Send for HostPtr {}

// SAFETY: as above; `&HostPtr` gives out the address only.
unsafe impl Sync for HostPtr {}

impl HostPtr {
    /// The host side of a copy.
    ///
    /// # Safety
    /// The caller keeps the bytes that the copy reads or writes there valid and unshared until the
    /// stream has passed the copy, or has dropped it. They do not overlap the copy's other side,
    /// unless that is host memory too.
    #[must_use]
    pub unsafe fn new(address: *mut u8) -> HostPtr {
        HostPtr(address)
    }

    /// The address.
    #[must_use]
    pub fn as_ptr(self) -> *mut u8 {
        self.0
    }

    /// A copy of the present bytes.
    ///
    /// # Safety
    /// `bytes` bytes are readable.
    pub unsafe fn read(self, bytes: u64) -> Box<[u8]> {
        let mut copy = vec![0; bytes as usize].into_boxed_slice();
        // SAFETY: the caller vouches for the source; `copy` is our own and as long.
        unsafe { std::ptr::copy_nonoverlapping(self.0, copy.as_mut_ptr(), copy.len()) };
        copy
    }
}

/// Where a copy reads.
#[derive(Debug, Clone)]
pub enum Source {
    /// A device address.
    Device(u64),
    /// Host memory, read when the stream reaches the copy.
    Host(HostPtr),
    /// Pageable host memory as it was when the copy was enqueued.
    Staged(Box<[u8]>),
}

impl Source {
    /// A copy of the present bytes.
    fn read(&self, memory: &Memory, bytes: u64) -> Result<Box<[u8]>, MemoryError> {
        match self {
            Source::Device(address) => {
                let mut copy = vec![0; bytes as usize].into_boxed_slice();
                memory.read(*address, &mut copy).map(|()| copy)
            }
            // SAFETY: the caller of `HostPtr::new` keeps the source alive until the stream has
            // passed it.
            Source::Host(host) => Ok(unsafe { host.read(bytes) }),
            Source::Staged(staged) => Ok(staged.clone()),
        }
    }
}

/// Where a copy writes.
#[derive(Debug, Clone)]
pub enum Target {
    /// A device address.
    Device(u64),
    /// Host memory, written when the stream reaches the copy.
    Host(HostPtr),
    /// Bytes that the waiting caller then copies to pageable memory itself. So nothing writes there
    /// after the call has ended, even if the wait was abandoned.
    Staged(Arc<OnceLock<Box<[u8]>>>),
}

/// A copy or a fill.
#[derive(Debug, Clone)]
pub enum Transfer {
    /// A copy of `bytes` bytes.
    Copy {
        /// Where it writes.
        target: Target,
        /// Where it reads.
        source: Source,
        /// Length in bytes.
        bytes: u64,
    },
    /// Sets `bytes` bytes to `value`.
    Fill {
        /// The device address of the first byte.
        target: u64,
        /// The value of every byte.
        value: u8,
        /// Length in bytes.
        bytes: u64,
    },
    /// Sets `bytes` bytes to repetitions of the bytes of `word`.
    FillWords {
        /// The device address of the first byte.
        target: u64,
        /// The word, whose lowest byte comes first.
        word: u32,
        /// Length in bytes.
        bytes: u64,
    },
}

/// The longest part of a [`Transfer::FillWords`], in bytes: whole words.
const FILLED_AT_ONCE: u64 = 64 * 1024;

/// Sets `bytes` bytes to repetitions of `word`, in parts that take little host memory.
fn fill_words(memory: &Memory, target: u64, word: u32, bytes: u64) -> Result<(), MemoryError> {
    let longest = bytes.min(FILLED_AT_ONCE) as usize;
    let part: Vec<u8> = word.to_le_bytes().into_iter().cycle().take(longest).collect();
    let mut done = 0;
    while done < bytes {
        let length = (bytes - done).min(FILLED_AT_ONCE);
        memory.write(target + done, &part[..length as usize])?;
        done += length;
    }
    Ok(())
}

impl Transfer {
    /// Executes it.
    ///
    /// # Errors
    /// A range is not one live region's, or in check mode the access is a race.
    pub fn run(&self, memory: &Memory) -> Result<(), MemoryError> {
        match self {
            Transfer::Fill { target, value, bytes } => memory.fill(*target, *value, *bytes),
            Transfer::FillWords { target, word, bytes } => fill_words(memory, *target, *word, *bytes),
            Transfer::Copy { target, source, bytes } => match (target, source) {
                (Target::Device(target), Source::Device(source)) => {
                    memory.copy_device(*target, *source, *bytes)
                }
                (Target::Device(target), Source::Host(source)) => {
                    // SAFETY: the caller of `HostPtr::new` keeps the source alive until the stream
                    // has passed it.
                    unsafe { memory.copy_from_host(*target, source.0, *bytes) }
                }
                (Target::Device(target), Source::Staged(source)) => memory.write(*target, source),
                (Target::Host(target), Source::Device(source)) => {
                    // SAFETY: the caller of `HostPtr::new` keeps the target alive until the stream
                    // has passed it.
                    unsafe { memory.copy_to_host(target.0, *source, *bytes) }
                }
                (Target::Host(target), Source::Host(source)) => {
                    // SAFETY: as for the two cases above; `copy` allows an overlap.
                    unsafe { std::ptr::copy(source.0, target.0, *bytes as usize) };
                    Ok(())
                }
                (Target::Host(target), Source::Staged(source)) => {
                    // SAFETY: the target as above; the staged bytes are our own and `bytes` long.
                    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target.0, source.len()) };
                    Ok(())
                }
                (Target::Staged(landed), source) => source.read(memory, *bytes).map(|read| {
                    // A copy to pageable memory runs once.
                    let _ = landed.set(read);
                }),
            },
        }
    }
}

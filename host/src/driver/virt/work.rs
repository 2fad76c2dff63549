//! Units of a stream's work, run now or recorded by a capture: launches, copies and fills.

use std::sync::{Arc, OnceLock};

use epoxide_vgpu::{GridConfig, Kernel, Memory, MemoryError};

/// A kernel with its arguments, checked; it can be made a grid any number of times.
#[derive(Debug, Clone)]
pub(super) struct Launch {
    pub(super) name: &'static str,
    pub(super) kernel: Arc<Kernel>,
    pub(super) config: GridConfig,
    pub(super) params: Box<[u8]>,
}

impl Launch {
    /// How many warps it has.
    pub(super) fn warps(&self) -> u64 {
        let blocks: u64 = self.config.grid.iter().map(|extent| u64::from(*extent)).product();
        let threads: u64 = self.config.block.iter().map(|extent| u64::from(*extent)).product();
        blocks * threads.div_ceil(32)
    }
}

/// A host address that a copy reads or writes later, from another thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostPtr(pub(super) *mut u8);

// SAFETY: an address without thread affinity; `Driver::copy` has its caller keep the range alive
// and unshared until the stream has passed the copy.
unsafe impl Send for HostPtr {}

// SAFETY: as above; `&HostPtr` gives out the address only.
unsafe impl Sync for HostPtr {}

impl HostPtr {
    /// A copy of the present bytes.
    ///
    /// # Safety
    /// `bytes` bytes are readable.
    pub(super) unsafe fn read(self, bytes: u64) -> Box<[u8]> {
        let mut copy = vec![0; bytes as usize].into_boxed_slice();
        // SAFETY: the caller vouches for the source; `copy` is our own and as long.
        unsafe { std::ptr::copy_nonoverlapping(self.0, copy.as_mut_ptr(), copy.len()) };
        copy
    }
}

/// Where a copy reads.
#[derive(Debug, Clone)]
pub(super) enum Source {
    Device(u64),
    /// Host memory, read when the stream comes to the copy.
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
            // SAFETY: the caller of `Driver::copy` keeps the source alive until the stream has
            // passed it.
            Source::Host(host) => Ok(unsafe { host.read(bytes) }),
            Source::Staged(staged) => Ok(staged.clone()),
        }
    }
}

/// Where a copy writes.
#[derive(Debug, Clone)]
pub(super) enum Target {
    Device(u64),
    /// Host memory, written when the stream comes to the copy.
    Host(HostPtr),
    /// Bytes that the waiting caller then copies to pageable memory itself. So nothing writes there
    /// after the call has ended, even if the wait was given up.
    Staged(Arc<OnceLock<Box<[u8]>>>),
}

/// A copy or a fill.
#[derive(Debug, Clone)]
pub(super) enum Transfer {
    Copy { target: Target, source: Source, bytes: u64 },
    Fill { target: u64, value: u8, bytes: u64 },
}

impl Transfer {
    /// Executes it; the error names the wrong address.
    pub(super) fn run(&self, memory: &Memory) -> Result<(), String> {
        let outcome = match self {
            Transfer::Fill { target, value, bytes } => memory.fill(*target, *value, *bytes),
            Transfer::Copy { target, source, bytes } => match (target, source) {
                (Target::Device(target), Source::Device(source)) => {
                    memory.copy_device(*target, *source, *bytes)
                }
                (Target::Device(target), Source::Host(source)) => {
                    // SAFETY: the caller of `Driver::copy` keeps the source alive until the stream
                    // has passed it.
                    unsafe { memory.copy_from_host(*target, source.0, *bytes) }
                }
                (Target::Device(target), Source::Staged(source)) => memory.write(*target, source),
                (Target::Host(target), Source::Device(source)) => {
                    // SAFETY: the caller of `Driver::copy` keeps the target alive until the stream
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
        };
        outcome.map_err(|error| error.to_string())
    }
}

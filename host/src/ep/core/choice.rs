//! The kernels of a buffer: their choice, some among several with the same arguments, and their
//! load as one module.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use crate::driver::{Device, Kernel, LaunchShape, Module, Stream};
use crate::error::{Error, Result};

/// Launches a kernel with its arguments.
type Launch<A> = unsafe fn(&Stream, &Kernel, LaunchShape, A) -> Result<()>;

/// The kernel that takes `A`, or one of several.
#[derive(Debug)]
pub struct Choice<A> {
    slot: Arc<Slot>,
    launch: Launch<A>,
}

/// A chosen kernel.
#[derive(Debug)]
struct Slot {
    name: &'static str,
    /// The most dynamic shared memory of its launches.
    shared_bytes: u32,
    loaded: OnceLock<Kernel>,
}

/// The chosen kernels of a buffer.
#[derive(Debug, Default)]
pub struct Chosen(Vec<Arc<Slot>>);

impl Chosen {
    /// Adds a kernel, for [`choice!`].
    pub fn add<A>(&mut self, name: &'static str, shared_bytes: u32, launch: Launch<A>) -> Choice<A> {
        let slot = Arc::new(Slot { name, shared_bytes, loaded: OnceLock::new() });
        self.0.push(slot.clone());
        Choice { slot, launch }
    }

    /// Adds the kernels of `others`.
    pub fn extend(&mut self, others: &Chosen) {
        self.0.extend_from_slice(&others.0);
    }

    /// Loads the kernels from the embedded PTX, or from a file's.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn load(&self, device: &Device, ptx: Option<&Path>) -> Result<()> {
        let names: Vec<_> = self.0.iter().map(|slot| slot.name).collect();
        let module = Module::shipped(device, ptx, &names)?;
        for slot in &self.0 {
            let kernel = module.kernel(slot.name, slot.shared_bytes)?;
            slot.loaded.get_or_init(|| kernel);
        }
        Ok(())
    }
}

/// Chooses a kernel, with the most dynamic shared memory of its launches. A kernel with other
/// arguments than those of the choice is given with the function that makes them.
macro_rules! choice {
    ($chosen:expr, $kernel:ty, $shared_bytes:expr) => {
        $crate::ep::core::choice!($chosen, $kernel, $shared_bytes, std::convert::identity)
    };
    ($chosen:expr, $kernel:ty, $shared_bytes:expr, $arguments:expr) => {
        $chosen.add(<$kernel>::INFO.name, $shared_bytes, |stream, kernel, shape, args| {
            // SAFETY: `Choice::launch` has the same contract.
            unsafe { stream.launch_shaped(kernel, shape, <$kernel>::call($arguments(args))) }
        })
    };
}
pub(crate) use choice;

impl<A> Choice<A> {
    /// Launches the kernel in this shape.
    ///
    /// # Errors
    /// The same as of [`Stream::call`].
    ///
    /// # Safety
    /// The addresses in `args` are live until the kernel ends, and the buffer is.
    pub unsafe fn call(
        &self,
        stream: &Stream,
        grid: u32,
        block: u32,
        shared_bytes: u32,
        args: A,
    ) -> Result<()> {
        // SAFETY: the caller keeps the memory.
        unsafe { self.launch(stream, LaunchShape::All { grid, block, shared_bytes }, args) }
    }

    /// Launches the kernel in the shape that its attribute names.
    ///
    /// # Errors
    /// The same as of [`Stream::launch_call`].
    ///
    /// # Safety
    /// The same as of [`Choice::call`].
    pub unsafe fn call_named(&self, stream: &Stream, args: A) -> Result<()> {
        // SAFETY: the caller keeps the memory.
        unsafe { self.launch(stream, LaunchShape::Named, args) }
    }

    /// Launches the kernel on `grid` blocks of the shape that its attribute names.
    ///
    /// # Errors
    /// The same as of [`Stream::launch_call`].
    ///
    /// # Safety
    /// The same as of [`Choice::call`].
    pub unsafe fn call_on(&self, stream: &Stream, grid: u32, args: A) -> Result<()> {
        // SAFETY: the caller keeps the memory.
        unsafe { self.launch(stream, LaunchShape::Blocks(grid), args) }
    }

    /// Launches the kernel.
    ///
    /// # Safety
    /// The same as of [`Choice::call`].
    unsafe fn launch(&self, stream: &Stream, shape: LaunchShape, args: A) -> Result<()> {
        let Some(kernel) = self.slot.loaded.get() else {
            return Err(Error::internal(self.slot.name, "the buffer has not loaded it"));
        };
        // SAFETY: the caller keeps the memory; the slot keeps the kernel.
        unsafe { (self.launch)(stream, kernel, shape, args) }
    }
}

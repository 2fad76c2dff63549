//! Launches the kernels on a GPU. The driver's library is loaded at run time, so a program with
//! this module builds and starts on machines without a GPU.
//!
//! It is all that a program needs to launch kernels. Streams, memory and events are those of `cudarc`;
//! any other crate that loads PTX text would do.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use cudarc::driver::sys::{CUevent_flags, CUfunction_attribute_enum};
use cudarc::driver::{CudaContext, CudaModule, CudaSlice, CudaStream, DevicePtr, DeviceRepr, result};
use cudarc::nvrtc::Ptx;
use epoxide_simt::launch::{Call, Entry};
use epoxide_simt::{Global, ptx};

/// Result of a driver call.
pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A stream of a GPU, and the kernels of this crate there.
#[derive(Clone, Debug)]
pub struct Gpu {
    stream: Arc<CudaStream>,
    module: Arc<CudaModule>,
}

impl Gpu {
    /// A new stream of GPU `ordinal`. The driver compiles the PTX for the GPU that it finds.
    ///
    /// # Errors
    /// The machine has no such GPU, or it is older than the PTX.
    pub fn open(ordinal: usize) -> Result<Gpu> {
        let context = CudaContext::new(ordinal)?;
        let module = context.load_module(Ptx::from_src(crate::PTX))?;
        for name in ptx::CutPtx::new(crate::PTX).names() {
            // Load the kernel's code now. Otherwise the driver loads it at the first launch, and
            // may wait for all running kernels: even for one that waits for this launch.
            module.load_function(name)?.num_regs()?;
        }
        Ok(Gpu { stream: context.new_stream()?, module })
    }

    /// The same stream, with kernels of these names and arguments from a file of PTX or machine code, as
    /// nvcc writes it.
    ///
    /// # Errors
    /// The file is none of these, or of another architecture.
    pub fn with_kernels_of(&self, file: &Path) -> Result<Gpu> {
        let module = self.stream.context().load_module(Ptx::from_file(file))?;
        Ok(Gpu { stream: self.stream.clone(), module })
    }

    /// The name of the GPU.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn name(&self) -> Result<String> {
        Ok(self.stream.context().name()?)
    }

    /// An array with these numbers.
    ///
    /// # Errors
    /// No memory is left.
    pub fn upload<T: DeviceRepr>(&self, numbers: &[T]) -> Result<Array<T>> {
        let slice = self.stream.clone_htod(numbers)?;
        // Other streams may use the array after this.
        self.stream.synchronize()?;
        Ok(Array { stream: self.stream.clone(), slice: Arc::new(slice) })
    }

    /// Enqueues a call, in the shape that the kernel's attribute gives it.
    ///
    /// # Safety
    /// The arrays whose addresses the call has match the kernel's parameters, and live until the
    /// kernel has ended.
    ///
    /// # Errors
    /// The PTX is of another source, or the driver takes no such launch.
    pub unsafe fn launch<K: Entry>(&self, call: &Call<K>) -> Result<()> {
        ptx::check_fresh::<K>(crate::PTX)?;
        let shape = call.shape()?;
        let function = self.module.load_function(call.name())?;
        // Without a request the limit is 48 KiB, less the kernel's static shared memory.
        let most = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = shape.shared_bytes.try_into()?;
        if function.get_attribute(most)? < bytes {
            function.set_attribute(most, bytes)?;
        }
        let mut params = [call.param().as_ptr().cast_mut().cast()];
        let (grid, block) = ((shape.grid, 1, 1), (shape.block, 1, 1));
        self.stream.context().bind_to_thread()?;
        // SAFETY: the one parameter is what the kernel takes (`Call` is made by its attribute); the
        // driver copies it before it returns. The caller vouches for the addresses in it.
        unsafe {
            result::launch_kernel(
                function.cu_function(),
                grid,
                block,
                shape.shared_bytes,
                self.stream.cu_stream(),
                &mut params,
            )?;
        }
        Ok(())
    }

    /// Waits until all kernels of the stream have ended.
    ///
    /// # Errors
    /// A kernel failed.
    pub fn synchronize(&self) -> Result<()> {
        Ok(self.stream.synchronize()?)
    }

    /// Microseconds of the work of `enqueue`: the median of 50 measurements of 10 calls each, after
    /// an uncounted one that keeps the GPU busy while the host enqueues the first.
    ///
    /// # Errors
    /// Those of `enqueue` and of the driver.
    pub fn median_us(&self, enqueue: impl Fn() -> Result<()>) -> Result<f64> {
        const IN_A_ROW: usize = 10;
        let event = || self.stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let (begin, end) = (event()?, event()?);
        let mut times = Vec::new();
        for _ in 0..50 {
            enqueue()?;
            begin.record(&self.stream)?;
            for _ in 0..IN_A_ROW {
                enqueue()?;
            }
            end.record(&self.stream)?;
            times.push(f64::from(begin.elapsed_ms(&end)?) * 1e3 / IN_A_ROW as f64);
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }
}

/// An array in the memory of a GPU, freed when no clone is left.
#[derive(Clone, Debug)]
pub struct Array<T> {
    stream: Arc<CudaStream>,
    slice: Arc<CudaSlice<T>>,
}

impl<T: DeviceRepr> Array<T> {
    /// The array as a parameter of kernels.
    pub fn global(&self) -> Global<T> {
        Global::new(self.slice.device_ptr(&self.stream).0)
    }

    /// The number of its elements.
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies it to the host, behind the kernels of its stream.
    ///
    /// # Errors
    /// A kernel failed.
    pub fn download(&self) -> Result<Vec<T>> {
        let numbers = self.stream.clone_dtoh(&*self.slice)?;
        self.stream.synchronize()?;
        Ok(numbers)
    }
}

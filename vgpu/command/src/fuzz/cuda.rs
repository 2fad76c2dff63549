//! An NVIDIA GPU through the driver's library, which is found when the program runs.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use libloading::Library;

use super::program::BLOCKS;
use super::target::{Failure, Job, LONGEST_KERNEL, Target};

/// A result of the driver; 0 is success.
type Code = c_int;
/// Any handle of the driver.
type Handle = *mut c_void;
/// An address of the GPU.
type Address = u64;

/// The driver has not finished yet.
const NOT_READY: Code = 600;
/// The options of a load: where the compiler's errors go, and how many bytes fit there.
const ERROR_LOG: [c_int; 2] = [5, 6];
/// Bytes for the compiler's errors.
const LOG_BYTES: usize = 16 << 10;
/// Attributes of a device: the major and the minor number of its architecture.
const ARCHITECTURE: [c_int; 2] = [75, 76];

/// Declares the functions that are used here, and finds them in the library.
macro_rules! functions {
    ($($field:ident = $name:literal ($($argument:ty),*);)*) => {
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> Code,)*
            /// The functions are there as long as the library is.
            _library: Library,
        }

        impl Functions {
            fn load() -> Result<Self> {
                // SAFETY: the library is NVIDIA's driver, or one in its place, whose constructors
                // may run on any thread.
                let library = unsafe { Library::new("libcuda.so.1") }
                    .context("--device cuda: this machine has no NVIDIA driver (libcuda.so.1)")?;
                Ok(Self {
                    // SAFETY: each type is that of the function in the driver API's header.
                    $($field: *unsafe { library.get($name) }.context("the driver is too old")?,)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    init = b"cuInit\0" (c_uint);
    driver_version = b"cuDriverGetVersion\0" (*mut c_int);
    device_get = b"cuDeviceGet\0" (*mut c_int, c_int);
    device_name = b"cuDeviceGetName\0" (*mut c_char, c_int, c_int);
    device_attribute = b"cuDeviceGetAttribute\0" (*mut c_int, c_int, c_int);
    context_create = b"cuCtxCreate_v2\0" (*mut Handle, c_uint, c_int);
    module_load = b"cuModuleLoadDataEx\0" (*mut Handle, *const c_char, c_uint, *mut c_int, *mut *mut c_void);
    module_unload = b"cuModuleUnload\0" (Handle);
    module_function = b"cuModuleGetFunction\0" (*mut Handle, Handle, *const c_char);
    alloc = b"cuMemAlloc_v2\0" (*mut Address, usize);
    free = b"cuMemFree_v2\0" (Address);
    set = b"cuMemsetD8_v2\0" (Address, u8, usize);
    to_device = b"cuMemcpyHtoD_v2\0" (Address, *const c_void, usize);
    to_host = b"cuMemcpyDtoH_v2\0" (*mut c_void, Address, usize);
    launch = b"cuLaunchKernel\0" (
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
    query = b"cuStreamQuery\0" (Handle);
    error_name = b"cuGetErrorName\0" (Code, *mut *const c_char);
}

/// A GPU, with a context that lasts as long as this process: a fault leaves nothing usable in either.
pub struct Cuda {
    driver: Functions,
    description: String,
}

impl Cuda {
    /// GPU `ordinal` of this machine.
    ///
    /// # Errors
    /// The machine has no driver, or no such GPU.
    pub fn open(ordinal: u32) -> Result<Self> {
        let driver = Functions::load()?;
        let ordinal = c_int::try_from(ordinal).context("--gpu is too large")?;
        let (mut device, mut version, mut name, mut architecture) = (0, 0, [0u8; 128], [0; 2]);
        // SAFETY: the pointers are to variables of these types, and the text's length is the
        // array's.
        let code = unsafe {
            (driver.init)(0)
                .max((driver.driver_version)(&raw mut version))
                .max((driver.device_get)(&raw mut device, ordinal))
        };
        ensure!(code == 0, "--device cuda --gpu {ordinal}: no such GPU ({})", driver.name_of(code));
        // SAFETY: as above.
        unsafe {
            (driver.device_name)(name.as_mut_ptr().cast(), name.len() as c_int, device);
            for (number, attribute) in architecture.iter_mut().zip(ARCHITECTURE) {
                (driver.device_attribute)(number, attribute, device);
            }
        }
        let name = CStr::from_bytes_until_nul(&name).map_or("?".into(), CStr::to_string_lossy);
        let [major, minor] = architecture;
        let description =
            format!("{name}, sm_{major}{minor}, driver API {}.{}", version / 1000, version % 1000 / 10);
        let mut context = null_mut();
        // SAFETY: the pointer is to a handle of ours.
        let code = unsafe { (driver.context_create)(&raw mut context, 0, device) };
        ensure!(code == 0, "the GPU has no context: {}", driver.name_of(code));
        Ok(Self { driver, description })
    }

    /// Loads a module and runs its kernels.
    fn run_module(&self, ptx: &str, jobs: &[&Job]) -> Result<Vec<Vec<u64>>, Failure> {
        let text = CString::new(ptx).map_err(|error| Failure::Refused(error.to_string()))?;
        let mut log = vec![0u8; LOG_BYTES];
        let mut keys = ERROR_LOG;
        let mut values: [*mut c_void; 2] =
            [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(LOG_BYTES)];
        let mut module = null_mut();
        // SAFETY: the text ends in NUL, and the two options are a buffer and its length in bytes.
        let code = unsafe {
            (self.driver.module_load)(
                &raw mut module,
                text.as_ptr(),
                2,
                keys.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if code != 0 {
            let log =
                CStr::from_bytes_until_nul(&log).map_or("".into(), CStr::to_string_lossy).trim().to_owned();
            return Err(Failure::Refused(format!("{}\n{log}", self.driver.name_of(code))));
        }
        let results = jobs.iter().map(|job| self.run_kernel(module, job)).collect();
        if !matches!(results, Err(Failure::Lost(_))) {
            // SAFETY: the module is loaded, and its kernels have ended.
            unsafe { (self.driver.module_unload)(module) };
        }
        results
    }

    fn run_kernel(&self, module: Handle, job: &Job) -> Result<Vec<u64>, Failure> {
        let driver = &self.driver;
        let input = Memory::new(driver, job.input.len().max(1) * 8)?;
        let output = Memory::new(driver, job.outputs.max(1) * 8)?;
        let mut words = vec![0u64; job.outputs];
        let name = CString::new(job.kernel.as_str()).map_err(|error| Failure::Refused(error.to_string()))?;
        let mut function = null_mut();
        // SAFETY: the module is loaded, the name ends in NUL.
        let code = unsafe { (driver.module_function)(&raw mut function, module, name.as_ptr()) };
        driver.check(code, "cuModuleGetFunction")?;
        // SAFETY: both buffers are at least as long.
        unsafe {
            driver.check(
                (driver.to_device)(input.address, job.input.as_ptr().cast(), job.input.len() * 8),
                "cuMemcpyHtoD",
            )?;
            driver.check((driver.set)(output.address, 0, job.outputs * 8), "cuMemsetD8")?;
        }
        let (mut first, mut second) = (input.address, output.address);
        let mut parameters: [*mut c_void; 2] = [(&raw mut first).cast(), (&raw mut second).cast()];
        // SAFETY: the kernel takes two addresses, and stays inside both buffers: the virtual GPU
        // has run it on buffers of these lengths, and checks each access.
        let code = unsafe {
            (driver.launch)(
                function,
                BLOCKS as c_uint,
                1,
                1,
                job.threads as c_uint,
                1,
                1,
                0,
                null_mut(),
                parameters.as_mut_ptr(),
                null_mut(),
            )
        };
        driver.check(code, "cuLaunchKernel")?;
        let begin = Instant::now();
        loop {
            // SAFETY: takes the context's default stream.
            match unsafe { (driver.query)(null_mut()) } {
                NOT_READY if begin.elapsed() > LONGEST_KERNEL => {
                    // Every later call of the driver would wait for the kernel, so both are leaked.
                    std::mem::forget((input, output));
                    return Err(Failure::Lost(format!(
                        "{} hangs: it has not ended in {} s",
                        job.kernel,
                        LONGEST_KERNEL.as_secs()
                    )));
                }
                NOT_READY => std::thread::yield_now(),
                code => {
                    driver.check(code, &job.kernel)?;
                    break;
                }
            }
        }
        // SAFETY: both are as long.
        let code = unsafe { (driver.to_host)(words.as_mut_ptr().cast(), output.address, words.len() * 8) };
        driver.check(code, "cuMemcpyDtoH")?;
        Ok(words)
    }
}

impl Functions {
    fn name_of(&self, code: Code) -> String {
        let mut name = std::ptr::null();
        // SAFETY: the pointer is to a variable of this type.
        let found = unsafe { (self.error_name)(code, &raw mut name) } == 0 && !name.is_null();
        if !found {
            return format!("error {code}");
        }
        // SAFETY: the driver's names are text that ends in NUL and lasts as long as the driver.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    fn check(&self, code: Code, what: &str) -> Result<(), Failure> {
        if code == 0 { Ok(()) } else { Err(Failure::Faulted(format!("{what}: {}", self.name_of(code)))) }
    }
}

/// Device memory, freed at the end of its scope.
struct Memory<'a> {
    driver: &'a Functions,
    address: Address,
}

impl<'a> Memory<'a> {
    fn new(driver: &'a Functions, bytes: usize) -> Result<Self, Failure> {
        let mut address = 0;
        // SAFETY: the pointer is to a variable of this type.
        driver.check(unsafe { (driver.alloc)(&raw mut address, bytes) }, "cuMemAlloc")?;
        Ok(Self { driver, address })
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        // SAFETY: only this call frees it, and the kernel that used it has ended.
        unsafe { (self.driver.free)(self.address) };
    }
}

impl Target for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn description(&self) -> String {
        self.description.clone()
    }

    fn run(&mut self, ptx: &str, jobs: &[&Job]) -> Result<Vec<Vec<u64>>, Failure> {
        self.run_module(ptx, jobs)
    }
}

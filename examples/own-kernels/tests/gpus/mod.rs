//! GPUs for tests: virtual ones, and with the feature `cuda` a real one.

use std::sync::OnceLock;

use epoxide_simt::launch::{Call, ContractError, Entry};
use epoxide_simt::{Element, Global, ptx};
use epoxide_vgpu::{CheckConfig, GridConfig, Machine, Module, Number};
use own_kernels::PTX;
#[cfg(feature = "cuda")]
use own_kernels::cuda;

/// A number that kernels and tests move.
#[cfg(not(feature = "cuda"))]
pub trait Value: Number + Element + Default {}
/// A number that kernels and tests move.
#[cfg(feature = "cuda")]
pub trait Value: Number + Element + Default + cudarc::driver::DeviceRepr {}
impl Value for u32 {}
impl Value for u64 {}
impl Value for f32 {}

/// GPUs that can address each other's memory.
pub enum Gpus {
    Virtual(Machine),
    /// Streams of one GPU, whose kernels run side by side.
    #[cfg(feature = "cuda")]
    Real(Vec<cuda::Gpu>),
}

/// An array in the memory of one of them.
pub enum Array<T> {
    Virtual(epoxide_vgpu::Array<T>),
    #[cfg(feature = "cuda")]
    Real(cuda::Array<T>),
}

impl Gpus {
    /// An array with these numbers.
    pub fn upload<T: Value>(&self, device: usize, label: &str, numbers: &[T]) -> Array<T> {
        match self {
            Gpus::Virtual(machine) => Array::Virtual(machine.upload(device, label, numbers).unwrap()),
            #[cfg(feature = "cuda")]
            Gpus::Real(gpus) => Array::Real(gpus[device].upload(numbers).unwrap()),
        }
    }

    /// An array that a kernel is to fill. Virtual GPUs report who reads it before.
    pub fn alloc<T: Value>(&self, device: usize, label: &str, len: usize) -> Array<T> {
        match self {
            Gpus::Virtual(machine) => Array::Virtual(machine.alloc(device, label, len).unwrap()),
            #[cfg(feature = "cuda")]
            Gpus::Real(gpus) => Array::Real(gpus[device].upload(&vec![T::default(); len]).unwrap()),
        }
    }

    /// The same array as another device addresses it.
    pub fn map<T: Value>(&self, device: usize, array: &Array<T>) -> Array<T> {
        match (self, array) {
            (Gpus::Virtual(machine), Array::Virtual(array)) => {
                Array::Virtual(machine.map(device, array).unwrap())
            }
            // One address space for all streams.
            #[cfg(feature = "cuda")]
            (Gpus::Real(_), Array::Real(array)) => Array::Real(array.clone()),
            #[cfg(feature = "cuda")]
            _ => panic!("an array of other devices"),
        }
    }

    /// Enqueues a call, in the shape that the kernel's attribute gives it.
    pub fn launch<K: Entry>(&mut self, device: usize, call: Result<Call<K>, ContractError>) {
        let call = call.unwrap();
        ptx::check_fresh::<K>(PTX).unwrap();
        match self {
            Gpus::Virtual(machine) => launch_virtual(machine, device, module(), &call),
            #[cfg(feature = "cuda")]
            Gpus::Real(gpus) => {
                // SAFETY: the tests' arrays have the sizes in their calls, which the virtual GPU
                // has checked, and live until the end of `run`.
                unsafe { gpus[device].launch(&call) }.unwrap();
            }
        }
    }

    /// The virtual ones.
    pub fn machine(&mut self) -> &mut Machine {
        match self {
            Gpus::Virtual(machine) => machine,
            #[cfg(feature = "cuda")]
            Gpus::Real(_) => panic!("real GPUs"),
        }
    }

    /// Runs all kernels to their ends.
    pub fn run(&mut self) {
        match self {
            Gpus::Virtual(machine) => machine.run().unwrap(),
            #[cfg(feature = "cuda")]
            Gpus::Real(gpus) => gpus.iter().for_each(|gpu| gpu.synchronize().unwrap()),
        }
    }
}

impl<T: Value> Array<T> {
    /// The array as a parameter.
    pub fn global(&self) -> Global<T> {
        match self {
            Array::Virtual(array) => Global::new(array.addr()),
            #[cfg(feature = "cuda")]
            Array::Real(array) => array.global(),
        }
    }

    pub fn len(&self) -> usize {
        match self {
            Array::Virtual(array) => array.len(),
            #[cfg(feature = "cuda")]
            Array::Real(array) => array.len(),
        }
    }

    /// Its numbers, on the host.
    pub fn download(&self) -> Vec<T> {
        match self {
            Array::Virtual(array) => array.download().unwrap(),
            #[cfg(feature = "cuda")]
            Array::Real(array) => array.download().unwrap(),
        }
    }
}

/// The committed PTX, parsed once.
fn module() -> &'static Module {
    static MODULE: OnceLock<Module> = OnceLock::new();
    MODULE.get_or_init(|| Module::parse(PTX).unwrap_or_else(|error| panic!("{error}")))
}

/// Enqueues a call of a kernel in some module.
pub fn launch_virtual<K: Entry>(machine: &mut Machine, device: usize, module: &Module, call: &Call<K>) {
    let shape = call.shape().unwrap();
    let shape = GridConfig::new(shape.grid, shape.block, shape.shared_bytes);
    machine.launch(device, module, call.name(), shape, call.param()).unwrap();
}

/// Runs a test on `devices` virtual GPUs: in order, then in check mode with memory as it runs and as weak
/// as the model allows, on schedules drawn from 10 seeds. With the feature `cuda`, on a real GPU as well.
pub fn on_gpus(devices: usize, test: impl Fn(Gpus)) {
    test(Gpus::Virtual(Machine::new(devices)));
    epoxide_vgpu::for_each_seed(10, |seed| {
        test(Gpus::Virtual(Machine::checked(devices, seed)));
        // No reports: outcomes that the model allows show in results.
        let weak = CheckConfig { races: false, weak_memory: Some(seed), ..CheckConfig::default() };
        test(Gpus::Virtual(Machine::checked_with(devices, seed, weak)));
    });
    #[cfg(feature = "cuda")]
    on_real_gpus(devices, test);
}

/// Runs a test on streams of a real GPU, one test at a time: another test's frees and module loads
/// wait for running kernels, and block launches meanwhile. A kernel that waits for one of these
/// launches would time out.
#[cfg(feature = "cuda")]
pub fn on_real_gpus(devices: usize, test: impl Fn(Gpus)) {
    static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());
    // The mutex is poisoned where another test failed, which is no matter here.
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    test(Gpus::Real((0..devices).map(|_| cuda::Gpu::open(0).unwrap()).collect()));
}

//! The host's side of the tests of foreign PTX: loads a file, launches its kernels, and compares.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, PoisonError};

use epoxide_vgpu::{
    Argument, Array, CheckConfig, DeviceConfig, Fault, GridConfig, Machine, MachineError, Module, Number,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::common::tier;

/// Returns the schedules to run: a seed, or none for round robin, and whether check mode is on.
fn schedules() -> impl Iterator<Item = (Option<u64>, bool)> {
    let fast = [None, Some(1), Some(2), Some(0x5eed)].map(|seed| (seed, false));
    let checked = [Some(3), Some(4)].map(|seed| (seed, true));
    let more = (0..tier(0, 20)).map(|seed| (Some(100 + seed), seed % 2 == 0));
    fast.into_iter().chain(checked).chain(more)
}

/// Returns the module of `ptx/{name}.ptx`, or none where that file does not exist.
/// A file is parsed once a process, because 61 tests on all their schedules share 29 files.
/// Devices can share a module, because each memory has its own copy of the module's variables.
fn module(name: &str) -> Option<Arc<Module>> {
    static MODULES: Mutex<BTreeMap<String, Arc<Module>>> = Mutex::new(BTreeMap::new());
    let parsed = || MODULES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(module) = parsed().get(name) {
        return Some(module.clone());
    }
    let path = format!("{}/../../vgpu/tests/vgpu/foreign/ptx/{name}.ptx", env!("CARGO_MANIFEST_DIR"));
    let ptx = match std::fs::read_to_string(&path) {
        Ok(ptx) => ptx,
        Err(e) if e.kind() == ErrorKind::NotFound => return None,
        Err(e) => panic!("{path}: {e}"),
    };
    let module = Arc::new(Module::parse(&ptx).unwrap_or_else(|e| panic!("{path}: {e}")));
    Some(parsed().entry(name.to_string()).or_insert(module).clone())
}

/// A device on which one file of PTX is loaded.
pub struct Gpu {
    machine: RefCell<Machine>,
    seed: Option<u64>,
    module: Arc<Module>,
    /// Name of the type in PTX, for messages.
    kind: &'static str,
}

/// Runs a test on a fresh device for every schedule, and for the optimised and, where there is one,
/// the plain translation of a source. `file` is the name of the PTX without its end.
pub fn on_every_schedule(file: &str, test: impl Fn(&Gpu)) {
    let optimised = module(file).unwrap_or_else(|| panic!("no PTX '{file}'"));
    let plain = module(&format!("unoptimised/{file}"));
    for (kind, module) in [("optimised", Some(optimised)), ("unoptimised", plain)] {
        let Some(module) = module else { continue };
        for (seed, check) in schedules() {
            let config = DeviceConfig { schedule_seed: seed, ..DeviceConfig::default() };
            let machine = Machine::with_config(1, config, check.then(CheckConfig::default));
            test(&Gpu { machine: RefCell::new(machine), seed, module: module.clone(), kind });
        }
    }
}

/// The shape of a grid or a block, of which one dimension is enough.
pub struct Shape([u32; 3]);

impl From<u32> for Shape {
    fn from(x: u32) -> Self {
        Shape([x, 1, 1])
    }
}

impl From<[u32; 3]> for Shape {
    fn from(shape: [u32; 3]) -> Self {
        Shape(shape)
    }
}

impl Gpu {
    pub fn buffer<T: Number>(&self, values: &[T]) -> Array<T> {
        self.machine.borrow().upload(0, "buffer", values).unwrap()
    }

    pub fn zeros<T: Number + Default>(&self, len: usize) -> Array<T> {
        self.buffer(&vec![T::default(); len])
    }

    /// Runs a kernel without dynamic shared memory.
    #[track_caller]
    pub fn launch(
        &self,
        kernel: &str,
        grid: impl Into<Shape>,
        block: impl Into<Shape>,
        arguments: &[&dyn Argument],
    ) {
        self.launch_with(kernel, grid, block, 0, arguments);
    }

    #[track_caller]
    pub fn launch_with(
        &self,
        kernel: &str,
        grid: impl Into<Shape>,
        block: impl Into<Shape>,
        dynamic_shared_bytes: u32,
        arguments: &[&dyn Argument],
    ) {
        let config =
            GridConfig { grid: grid.into().0, block: block.into().0, dynamic_shared_bytes, cluster: None };
        if let Err(fault) = self.run(kernel, config, arguments) {
            panic!("{kernel}, {}, seed {:?}: {fault}", self.kind, self.seed);
        }
    }

    /// Runs a kernel in clusters of so many blocks, or as it declares.
    #[track_caller]
    pub fn launch_in_clusters(&self, kernel: &str, shape: GridConfig, arguments: &[&dyn Argument]) {
        if let Err(fault) = self.run(kernel, shape, arguments) {
            panic!("{kernel}, {}, seed {:?}: {fault}", self.kind, self.seed);
        }
    }

    /// Whether the runs are in check mode.
    pub fn is_checked(&self) -> bool {
        self.machine.borrow().checker().is_some()
    }

    /// Runs a kernel that must fault.
    #[track_caller]
    pub fn fault(
        &self,
        kernel: &str,
        grid: impl Into<Shape>,
        block: impl Into<Shape>,
        arguments: &[&dyn Argument],
    ) -> Fault {
        let config =
            GridConfig { grid: grid.into().0, block: block.into().0, dynamic_shared_bytes: 0, cluster: None };
        match self.run(kernel, config, arguments) {
            Err(MachineError::Fault(fault)) => *fault,
            other => panic!("{kernel} did not fault: {other:?}"),
        }
    }

    pub fn run(
        &self,
        name: &str,
        shape: GridConfig,
        arguments: &[&dyn Argument],
    ) -> Result<(), MachineError> {
        let kernel = self.module.kernel(name).unwrap_or_else(|| panic!("no kernel '{name}'"));
        // Triton adds pointers to scratch memory, which its kernels here do not use: they stay
        // null.
        let mut all = arguments.to_vec();
        all.resize(kernel.params().len().max(all.len()), &0u64);
        let mut machine = self.machine.borrow_mut();
        machine.launch_with(0, &self.module, name, shape, &all)?;
        machine.run()
    }
}

pub fn words(n: usize, seed: u64) -> Vec<u32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..n).map(|_| rng.random()).collect()
}

pub fn longs(n: usize, seed: u64) -> Vec<i64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..n).map(|_| rng.random()).collect()
}

/// Numbers between -10 and 10.
pub fn floats(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..n).map(|_| rng.random_range(-10.0..10.0)).collect()
}

/// Compares with a relative bound.
#[track_caller]
pub fn assert_close<T: Copy + Into<f64>>(got: &[T], want: &[f64], bound: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let g: f64 = (*g).into();
        let close = g == *w || (g - w).abs() <= bound * w.abs();
        assert!(close, "element {i}: {g} instead of {w}, off by {}", (g - w).abs() / w.abs());
    }
}

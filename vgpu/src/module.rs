//! Loaded PTX: a module, which is kernels by name.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::fault::PtxError;
use crate::kernel::{Globals, Kernel};
use crate::memory::{Memory, Region};
use crate::memory_error::MemoryError;
use crate::{lower, ptx};

/// A parsed PTX module.
#[derive(Debug)]
pub struct Module {
    version: ptx::Version,
    target: String,
    kernels: BTreeMap<String, Arc<Kernel>>,
    globals: Option<Arc<Globals>>,
}

impl Module {
    /// Parses and checks PTX. An instruction or modifier that the virtual GPU does not support is
    /// an error here.
    pub fn parse(text: &str) -> Result<Self, PtxError> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let file = ptx::parse(text)?;
        let (kernels, globals) = lower::module(text, &file, NEXT_ID.fetch_add(1, Ordering::Relaxed))?;
        let kernels = kernels.into_iter().map(|k| (k.name.clone(), Arc::new(k))).collect();
        Ok(Self { version: file.version, target: file.target, kernels, globals })
    }

    /// The kernel of this name.
    #[must_use]
    pub fn kernel(&self, name: &str) -> Option<Arc<Kernel>> {
        self.kernels.get(name).cloned()
    }

    /// All kernels, by name.
    pub fn kernels(&self) -> impl Iterator<Item = &Arc<Kernel>> {
        self.kernels.values()
    }

    /// Whether it has variables of its own, of which each load of the module has a copy.
    #[must_use]
    pub fn has_globals(&self) -> bool {
        self.globals.is_some()
    }

    /// Where a `.global` or `.const` variable lies: its offset in [`Module::variables`] and its
    /// length, in bytes.
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<(u64, u64)> {
        self.globals.as_ref()?.places.get(name).copied()
    }

    /// The module's variables on a device, with their initial contents if nothing has used them
    /// yet; `None` if it has none.
    ///
    /// # Errors
    /// The device has no memory left for them.
    pub fn variables(&self, memory: &Memory) -> Result<Option<Arc<Region>>, MemoryError> {
        self.globals.as_ref().map(|g| memory.module_globals(g.module_id, &g.init)).transpose()
    }

    /// Frees the module's variables on a device, once no kernel that runs uses them.
    pub fn unload(&self, memory: &Memory) {
        if let Some(globals) = &self.globals {
            memory.forget_module_globals(globals.module_id);
        }
    }

    /// `.version`.
    #[must_use]
    pub fn version(&self) -> ptx::Version {
        self.version
    }

    /// `.target`, such as `sm_90`.
    #[must_use]
    pub fn target(&self) -> &str {
        &self.target
    }
}

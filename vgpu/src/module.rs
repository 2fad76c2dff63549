//! Loaded PTX: a module, which is kernels by name.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::fault::PtxError;
use crate::kernel::{Globals, Kernel};
use crate::machine::MachineError;
use crate::memory::Memory;
use crate::{faulty, lower, ptx};

/// Something in PTX that the virtual GPU rejects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The kernel that it keeps from running; empty if that is every kernel of the module.
    pub kernel: String,
    /// The place and the reason.
    pub error: PtxError,
}

/// A parsed PTX module.
#[derive(Debug)]
pub struct Module {
    version: ptx::Version,
    target: String,
    kernels: BTreeMap<String, Arc<Kernel>>,
    globals: Option<Arc<Globals>>,
}

/// A number that identifies a module.
fn next_id() -> u64 {
    static NEXT_ID: AtomicU64 = AtomicU64::new(0);
    NEXT_ID.fetch_add(1, Ordering::Relaxed)
}

impl Module {
    /// Parses and checks PTX. An instruction or modifier that the virtual GPU does not support is
    /// an error here.
    pub fn parse(text: &str) -> Result<Self, PtxError> {
        let text = &*faulty::in_place_of(text);
        let file = ptx::parse(text)?;
        let loaded = lower::module(text, &file, next_id())?;
        Ok(Self::of(file, loaded))
    }

    /// The same without the kernels that the virtual GPU does not support, and with all reasons for
    /// which it does not.
    ///
    /// # Errors
    /// Text that is not PTX, and module variables that cannot be made.
    pub fn parse_supported(text: &str) -> Result<(Self, Vec<Refusal>), PtxError> {
        let text = &*faulty::in_place_of(text);
        let file = ptx::parse(text)?;
        let (loaded, refused) = lower::supported(text, &file, next_id())?;
        let mut refusals: Vec<Refusal> = vec![];
        for refusal in refused {
            // A function is lowered once for each call.
            if !refusals.contains(&refusal) {
                refusals.push(refusal);
            }
        }
        Ok((Self::of(file, loaded), refusals))
    }

    /// All that [`parse`](Self::parse) would refuse, not only the first: empty if it accepts the
    /// text. Text that is not PTX has one error, because nothing behind it can be read.
    #[must_use]
    pub fn refusals(text: &str) -> Vec<Refusal> {
        match Self::parse_supported(text) {
            Ok((_, refusals)) => refusals,
            Err(error) => vec![Refusal { kernel: String::new(), error }],
        }
    }

    fn of(file: ptx::File, lower::Loaded { kernels, globals }: lower::Loaded) -> Self {
        let kernels = kernels.into_iter().map(|k| (k.name.clone(), Arc::new(k))).collect();
        Self { version: file.version, target: file.target, kernels, globals }
    }

    /// The kernel of this name.
    #[must_use]
    pub fn kernel(&self, name: &str) -> Option<Arc<Kernel>> {
        self.kernels.get(name).cloned()
    }

    /// The kernel of this name. Otherwise the one whose name has all parts of `name`, which `*`
    /// separates, such as `8dispatch*ILi2E` for `dispatch<2>`.
    ///
    /// # Errors
    /// No kernel has them, or several have; the text lists the kernels.
    pub fn find(&self, name: &str) -> Result<Arc<Kernel>, MachineError> {
        if let Some(kernel) = self.kernel(name) {
            return Ok(kernel);
        }
        self.kernel_like(&name.split('*').collect::<Vec<_>>()).map_err(|error| match error {
            MachineError::NotOneKernel { found, .. } if found.is_empty() => {
                let known: Vec<_> = self.kernels().map(|kernel| kernel.name()).collect();
                MachineError::NoKernel { kernel: name.to_owned(), known: known.join(", ") }
            }
            several => several,
        })
    }

    /// The one kernel whose name has all of these parts. Parts of a mangled C++ name do, such as
    /// `["8dispatch", "ILi2E"]` for `dispatch<2>`.
    ///
    /// # Errors
    /// No kernel has them, or several have; the text lists those.
    pub fn kernel_like(&self, parts: &[&str]) -> Result<Arc<Kernel>, MachineError> {
        let has_all = |kernel: &&Arc<Kernel>| parts.iter().all(|part| kernel.name().contains(part));
        let found: Vec<_> = self.kernels().filter(has_all).collect();
        match found.as_slice() {
            [kernel] => Ok(Arc::clone(kernel)),
            _ => Err(MachineError::NotOneKernel {
                parts: parts.iter().map(|&part| part.to_owned()).collect(),
                found: found.iter().map(|kernel| kernel.name().to_owned()).collect(),
            }),
        }
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

    /// The names of its `.global` and `.const` variables with their lengths in bytes.
    /// [`Memory::variable`] gives the address on a device.
    pub fn variables(&self) -> impl Iterator<Item = (&str, u64)> {
        let variables = self.globals.iter().flat_map(|globals| &globals.variables);
        variables.map(|(name, &(_, bytes))| (name.as_str(), bytes))
    }

    /// Frees the module's variables on a device, once no kernel that runs uses them.
    pub fn unload(&self, memory: &Memory) {
        if let Some(globals) = &self.globals {
            memory.forget_module_globals(globals.module_id);
        }
    }

    pub(crate) fn globals(&self) -> Option<&Arc<Globals>> {
        self.globals.as_ref()
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

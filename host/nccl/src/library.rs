//! The library: found when the program runs, its version read, its functions checked one by one.

use std::ffi::{CStr, c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};

use super::ffi::{self, Code, Comm, Functions};
use super::places;
use crate::driver::Device;
use crate::error::{Error, Result};

/// A symbol of libraries that replace NCCL on the host, for tests. Such a library uses addresses of
/// this process as device memory, and ignores streams. NCCL itself would use both as CUDA's.
const ON_HOST: &str = "epoxide_nccl_on_host";

/// NCCL, loaded into this process.
///
/// It stays loaded until the process ends, because its own threads run its code.
pub struct Library {
    pub(super) functions: Functions,
    version: u32,
    path: PathBuf,
    works_on_host: bool,
    _loaded: ManuallyDrop<Loaded>,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Library(NCCL {} of {})", self.version_text(), self.path.display())
    }
}

impl Library {
    /// Finds the library. First the file that the environment's
    /// [`NCCL_LIBRARY`](super::NCCL_LIBRARY) names; then `libnccl.so.2` or `libnccl.so` on the
    /// loader's path; then the folder of the Python package (`nvidia/nccl/lib` below
    /// `site-packages`) of `VIRTUAL_ENV`, `CONDA_PREFIX`, `PYTHONPATH`, the Python on the `PATH`,
    /// the user's and the system's. No Python is run.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if none loads, with every place that was tried and its error; or if
    /// the loaded library lacks functions, with their names.
    pub fn find() -> Result<Arc<Library>> {
        let mut tried = Vec::new();
        for place in places::all() {
            match load(&place) {
                Ok(loaded) => return Library::check(loaded, place),
                Err(reason) => tried.push(reason),
            }
        }
        let reason = format!(
            "{}; install it (`pip install nvidia-nccl-cu12`, or the distribution's libnccl2), or name the file in {}",
            tried.join("; "),
            places::NCCL_LIBRARY
        );
        Err(Error::Unavailable { what: "NCCL".into(), reason })
    }

    /// Loads the library from a file.
    ///
    /// # Errors
    /// See [`Library::find`].
    pub fn open(path: impl AsRef<Path>) -> Result<Arc<Library>> {
        let path = path.as_ref();
        let loaded = load(path).map_err(|reason| Error::Unavailable { what: "NCCL".into(), reason })?;
        Library::check(loaded, path.to_owned())
    }

    fn check(loaded: Loaded, path: PathBuf) -> Result<Arc<Library>> {
        let unavailable = |reason| Error::Unavailable { what: format!("NCCL of {}", path.display()), reason };
        let find = |name: &str| {
            // SAFETY: only the address is taken; `Functions` gives the type of the call.
            let symbol = unsafe { loaded.get::<*const c_void>(name.as_bytes()) };
            symbol.map_or(std::ptr::null(), |symbol| symbol.as_raw_ptr().cast_const())
        };
        // SAFETY: a library that has NCCL's functions under NCCL's names is taken for NCCL.
        let functions = unsafe { Functions::resolve(find) }.map_err(|lacking| {
            unavailable(format!(
                "it lacks {}; NCCL has had them since 2.7: install a newer one",
                lacking.join(", ")
            ))
        })?;
        let works_on_host = !find(ON_HOST).is_null();
        let mut version: c_int = 0;
        // SAFETY: the out pointer is valid.
        let code = unsafe { (functions.ncclGetVersion)(&mut version) };
        if code != Code::SUCCESS || version <= 0 {
            return Err(unavailable(format!("ncclGetVersion gave {} and the version {version}", code.0)));
        }
        Ok(Arc::new(Library {
            functions,
            version: version as u32,
            path,
            works_on_host,
            _loaded: ManuallyDrop::new(loaded),
        }))
    }

    /// NCCL's number for its version: 10000 * major + 100 * minor + patch.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The version as people write it, such as `2.27.3`.
    pub fn version_text(&self) -> String {
        // Up to 2.8 there was a digit less.
        let (major, rest) = match self.version {
            version @ ..10000 => (version / 1000, version % 1000),
            version => (version / 10000, version % 10000),
        };
        format!("{major}.{}.{}", rest / 100, rest % 100)
    }

    /// The file, or the name that the loader found it by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Functions of later versions that this one lacks, each with the version that has it. A call
    /// that needs one returns [`Error::Unavailable`].
    pub fn lacking(&self) -> Vec<(&'static str, &'static str)> {
        self.functions.lacking()
    }

    /// An error if the device's addresses and streams are not of the kind that this library
    /// expects.
    pub(super) fn check_device(&self, device: &Device) -> Result<()> {
        let info = device.info();
        if info.is_virtual == self.works_on_host {
            return Ok(());
        }
        let rule = match info.is_virtual {
            true => "NCCL works on CUDA devices",
            false => "this library stands in for NCCL on virtual GPUs",
        };
        Err(Error::argument("device", format!("{} {}", info.name, info.ordinal), rule))
    }

    /// A function of a later version; or an error that names it and the version that has it.
    pub(super) fn require<F: Copy>(&self, function: Option<F>, name: &'static str) -> Result<F> {
        function.ok_or_else(|| Error::Unavailable {
            what: name.to_owned(),
            reason: format!(
                "NCCL {} of {} lacks it; it came with {}",
                self.version_text(),
                self.path.display(),
                ffi::since(name)
            ),
        })
    }

    /// The error for `code` of `call`.
    pub(super) fn error(&self, call: &'static str, code: Code) -> Error {
        let name = self.code_text(code);
        let last = self.last_error(std::ptr::null_mut());
        let detail = match last.as_str() {
            "" => "; NCCL_DEBUG=WARN says more".to_owned(),
            last => format!("; NCCL's last error: {last}"),
        };
        Error::Nccl { call, code: code.0, name, detail }
    }

    /// NCCL's text for a code.
    pub(super) fn code_text(&self, code: Code) -> String {
        // SAFETY: NCCL has a static text for every number.
        unsafe { text((self.functions.ncclGetErrorString)(code)) }
    }

    /// NCCL's text about the last error; may be empty.
    pub(super) fn last_error(&self, comm: *mut Comm) -> String {
        let Some(last) = self.functions.ncclGetLastError else { return String::new() };
        // SAFETY: NCCL documents that it ignores the argument, and null is allowed; NCCL owns the
        // text.
        unsafe { text(last(comm)) }.trim().to_owned()
    }
}

/// Loads one file; the error names it.
fn load(place: &Path) -> Result<Loaded, String> {
    // SAFETY: NCCL's initialisers are the loader's business; no other library is looked for under
    // these names.
    unsafe { Loaded::open(Some(place), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
        let reason = error.to_string();
        // The loader's texts begin with the file, mostly.
        let named = reason.contains(&*place.to_string_lossy());
        if named { reason } else { format!("{}: {reason}", place.display()) }
    })
}

/// # Safety
/// Null, or a NUL-terminated text that stays.
unsafe fn text(text: *const std::ffi::c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Diagnosis of NCCL on this machine, one check per entry: its name, and the finding, or the error
/// with its remedy.
pub fn doctor() -> Vec<(String, Result<String, String>)> {
    let library = match Library::find() {
        Ok(library) => library,
        Err(error) => return vec![("NCCL".into(), Err(error.to_string()))],
    };
    let found = format!("{} of {}", library.version_text(), library.path().display());
    let lacking = library.lacking();
    let functions = match lacking.is_empty() {
        true => Ok("all that are used".to_owned()),
        false => {
            let each = lacking.iter().map(|(name, since)| format!("{name} (NCCL {since})"));
            Err(format!(
                "lacks {}; calls that need one of them are rejected: install a newer NCCL",
                each.collect::<Vec<_>>().join(", ")
            ))
        }
    };
    vec![("NCCL".into(), Ok(found)), ("NCCL functions".into(), functions)]
}

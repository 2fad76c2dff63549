//! [`CudaDevice`], and the binding of its context to the calling thread.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};

use cust::context::Context;
use cust::device::Device as CustDevice;

use super::context::{self, Current, Relaxed};
use super::error::unavailable;
use super::pool::MemoryPool;
use super::vmm::{Sharing, sharing};
use crate::driver::{Device, DeviceInfo, NoDriverCalls, Staging, Streams};
use crate::error::{Error, Result};
use crate::lock::lock;

/// Kernels are compiled for `sm_90`.
const OLDEST_COMPUTE_CAPABILITY: (i32, i32) = (9, 0);

/// One CUDA device, through its primary context.
///
/// May be used from any thread and opened more than once: each opening is the same device. Other
/// users of the primary context in this process (candle, burn, the CUDA runtime) see the same
/// streams and addresses.
#[derive(Debug)]
pub struct CudaDevice {
    pub(super) info: DeviceInfo,
    pub(super) device: CustDevice,
    /// The pool of [`MemoryKind::Device`](crate::driver::MemoryKind::Device), which the drop of
    /// this takes out.
    pub(super) pool: MemoryPool,
    pub(super) context: Context,
    /// Features of [`MemoryKind::Shareable`](crate::driver::MemoryKind::Shareable), or the reason
    /// why it is unavailable.
    pub(super) sharing: Result<Sharing>,
    pub(super) staging: Staging,
    pub(super) streams: Streams,
    /// The files behind [`MemoryKind::SharedHost`](crate::driver::MemoryKind::SharedHost), by host
    /// address.
    files: Mutex<HashMap<u64, OwnedFd>>,
    /// Modules and names of the kernels that were looked up, for errors.
    kernels: Mutex<HashMap<u64, (u64, &'static str)>>,
    /// Names of the entries of each module, for errors.
    entries: Mutex<HashMap<u64, Vec<String>>>,
}

impl CudaDevice {
    /// Opens a device by its ordinal among the visible ones.
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable) where there is no driver, no such device,
    /// or one that is too old for the kernels.
    pub fn open(ordinal: u32) -> Result<Device> {
        let what = || format!("CUDA device {ordinal}");
        let count = context::device_count()?;
        if ordinal >= count {
            return Err(unavailable(
                what(),
                format!(
                    "this process sees {count} device(s), 0 to {}; start fewer ranks per node, or look at \
                     CUDA_VISIBLE_DEVICES",
                    count - 1
                ),
            ));
        }
        let device = context::cust_device(ordinal)?;
        let info = context::describe(device)?;
        let (major, minor) = context::compute_capability(device)?;
        if (major, minor) < OLDEST_COMPUTE_CAPABILITY {
            return Err(unavailable(
                what(),
                format!(
                    "{} has compute capability {major}.{minor}, and the kernels are built for sm_90; use a Hopper or \
                     newer GPU, or the virtual GPU",
                    info.name
                ),
            ));
        }
        // One object per device: a free of memory waits for the streams of its list.
        static OPEN: Mutex<BTreeMap<u32, Weak<CudaDevice>>> = Mutex::new(BTreeMap::new());
        let opened = lock(&OPEN).get(&ordinal).and_then(Weak::upgrade);
        if let Some(driver) = opened {
            return Ok(Device { driver });
        }
        let context = context::retain_primary(device)?;
        let sharing = sharing(device);
        let pool = {
            let _current = Current::set(&context)?;
            MemoryPool::new(device.as_raw())?
        };
        let driver = Arc::new(CudaDevice {
            info,
            device,
            context,
            sharing,
            pool,
            staging: Staging::default(),
            streams: Streams::default(),
            files: Mutex::default(),
            kernels: Mutex::default(),
            entries: Mutex::default(),
        });
        // Another thread may have opened it meanwhile.
        let mut open = lock(&OPEN);
        let driver = open.get(&ordinal).and_then(Weak::upgrade).unwrap_or(driver);
        open.insert(ordinal, Arc::downgrade(&driver));
        Ok(Device { driver })
    }

    /// Opens the device that is current on the calling thread, as `cudaSetDevice`, cudarc's
    /// `bind_to_thread` and PyTorch's `torch.cuda.set_device` set it.
    ///
    /// # Errors
    /// The same as [`CudaDevice::open`]. [`Error::Unavailable`](crate::Error::Unavailable) where no
    /// context is current, or another one than the device's primary context.
    pub fn current() -> Result<Device> {
        CudaDevice::open(context::current_ordinal()?)
    }

    /// Binds the primary context to the calling thread.
    pub(super) fn bind(&self) -> Result<Bound<'_>> {
        NoDriverCalls::check().inspect_err(|error| tracing::error!("{error}"))?;
        Ok(Bound { device: self, current: Current::set(&self.context)? })
    }

    pub(super) fn keep_file(&self, host: u64, file: OwnedFd) {
        lock(&self.files).insert(host, file);
    }

    pub(super) fn take_file(&self, host: u64) -> Option<OwnedFd> {
        lock(&self.files).remove(&host)
    }

    /// A descriptor of the file that is mapped at this host address.
    pub(super) fn file(&self, host: u64) -> Result<OwnedFd> {
        let files = lock(&self.files);
        let file = files
            .get(&host)
            .ok_or_else(|| Error::argument("memory", format!("{host:#x}"), "it was freed"))?;
        file.try_clone().map_err(|error| Error::system("dup", error))
    }

    pub(super) fn remember_kernel(&self, kernel: u64, module: u64, name: &'static str) {
        lock(&self.kernels).insert(kernel, (module, name));
    }

    pub(super) fn remember_entries<'a>(&self, module: u64, names: impl Iterator<Item = &'a str>) {
        lock(&self.entries).insert(module, names.map(str::to_owned).collect());
    }

    /// The names of a module's entries.
    pub(super) fn entries(&self, module: u64) -> Vec<String> {
        lock(&self.entries).get(&module).cloned().unwrap_or_default()
    }

    /// Forgets the kernels and entries of a module that is about to be unloaded.
    pub(super) fn forget_module(&self, module: u64) {
        lock(&self.kernels).retain(|_, (of, _)| *of != module);
        lock(&self.entries).remove(&module);
    }

    pub(super) fn kernel_name(&self, kernel: u64) -> &'static str {
        let kernels = lock(&self.kernels);
        kernels.get(&kernel).map_or("an unknown kernel", |(_, name)| name)
    }

    /// Runs a clean-up that cannot return an error. Owners are dropped in captures too.
    pub(super) fn clean_up(&self, work: impl FnOnce(&Bound<'_>)) {
        match self.bind() {
            Ok(bound) => {
                let _relaxed = Relaxed::new();
                work(&bound);
            }
            Err(error) => tracing::warn!("a CUDA object is leaked: {error}"),
        }
    }
}

/// Proof that `device`'s primary context is current on this thread, and that the thread may call
/// the driver.
pub(super) struct Bound<'a> {
    /// The device of the bound context.
    pub(super) device: &'a CudaDevice,
    pub(super) current: Current,
}

//! Conversion of the driver's result codes to [`Error`]: names, remedies, and the codes for "not
//! available here".

use std::ffi::CStr;

use cust::error::CudaError;

use super::ffi::{self, CuResult};
use crate::error::{Error, Result};

impl CuResult {
    /// `Ok` on success; else an [`Error::Cuda`] that names `call`, with the remedy for the code.
    pub fn check(self, call: &'static str) -> Result<()> {
        if self == CuResult::SUCCESS { Ok(()) } else { Err(self.error(call)) }
    }

    /// False on `CUDA_ERROR_NOT_READY`, true on success, and an error otherwise.
    pub fn check_ready(self, call: &'static str) -> Result<bool> {
        if self == CuResult::NOT_READY {
            return Ok(false);
        }
        self.check(call).map(|()| true)
    }

    /// Reports a failure where none can be returned. A driver that has shut down (a static dropped
    /// at exit) is no news.
    pub fn log(self, call: &'static str) {
        if self != CuResult::SUCCESS && self != CuResult::DEINITIALIZED {
            tracing::warn!("{}", self.error(call));
        }
    }

    /// The [`Error::Cuda`] for this code, with its remedy.
    pub fn error(self, call: &'static str) -> Error {
        let remedy = self.remedy();
        self.error_with(call, if remedy.is_empty() { String::new() } else { format!("; {remedy}") })
    }

    /// The [`Error::Cuda`] for this code with a detail of the caller's, separator included.
    pub fn error_with(self, call: &'static str, detail: String) -> Error {
        Error::Cuda { call, code: self.0, name: self.name(), detail }
    }

    /// The driver's name for this code, such as `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn name(self) -> String {
        let mut name = std::ptr::null();
        // SAFETY: the out pointer is valid; any integer is allowed.
        let found = unsafe { ffi::cuGetErrorName(self.0, &mut name) };
        if found == CuResult::SUCCESS && !name.is_null() {
            // SAFETY: on success the driver returns a NUL-terminated string that lives as long as
            // the process.
            return unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        }
        // A stub library answers no query, and a driver may lack codes of a newer one.
        match self {
            CuResult::STUB_LIBRARY => "CUDA_ERROR_STUB_LIBRARY".into(),
            _ => "unnamed CUresult".into(),
        }
    }

    /// The remedy for this code; empty if the name suffices.
    pub fn remedy(self) -> &'static str {
        match self {
            CuResult::NOT_INITIALIZED => {
                "no call before cuda::devices() or CudaDevice::open(), and none in a process that was forked from one that \
                 has called them: start processes anew (`spawn`)"
            }
            CuResult::STUB_LIBRARY => {
                "libcuda.so.1 is a stub of a CUDA toolkit, not a driver: remove its folder from LD_LIBRARY_PATH, or install \
                 the NVIDIA driver"
            }
            CuResult::DEVICE_UNAVAILABLE => {
                "another process holds the GPU in exclusive mode: stop it, or run `nvidia-smi -c DEFAULT`"
            }
            CuResult::NO_DEVICE => {
                "no GPU is visible to this process: look at `nvidia-smi` and CUDA_VISIBLE_DEVICES, and in a container \
                 pass the GPUs in (`--gpus all`)"
            }
            CuResult::SYSTEM_NOT_READY => {
                "the NVSwitch fabric is not up: start nvidia-fabricmanager (`systemctl start nvidia-fabricmanager`)"
            }
            CuResult::SYSTEM_DRIVER_MISMATCH => {
                "the kernel module and libcuda.so.1 are of different releases: reload the module or reboot after a \
                 driver update"
            }
            CuResult::COMPAT_NOT_SUPPORTED_ON_DEVICE => {
                "a CUDA forward-compatibility libcuda does not support this GPU: remove it from LD_LIBRARY_PATH"
            }
            CuResult::JIT_COMPILER_NOT_FOUND => {
                "libnvidia-ptxjitcompiler.so.1 is missing: install the whole driver, and in a container set \
                 NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            }
            CuResult::JIT_COMPILATION_DISABLED => "CUDA_DISABLE_PTX_JIT is set: unset it",
            CuResult::UNKNOWN => {
                "look for Xid lines in `dmesg`; if it is the first call, /dev/nvidia-uvm may be missing \
                 (`nvidia-modprobe -u`)"
            }
            CuResult::OPERATING_SYSTEM => "the system refused it: look at `ulimit -a` and at `dmesg`",
            CuResult::LAUNCH_TIMEOUT => {
                "the watchdog ended the kernel: this GPU drives a display; use another"
            }
            CuResult::CONTEXT_IS_DESTROYED => {
                "the primary context was reset: no other code of the process may do so"
            }
            CuResult::ILLEGAL_ADDRESS | CuResult::ASSERT => FAULT,
            _ if (CuResult::HARDWARE_STACK_ERROR.0..=CuResult::LAUNCH_FAILED.0).contains(&self.0) => FAULT,
            _ if (CuResult::STREAM_CAPTURE_UNSUPPORTED.0..=CuResult::STREAM_CAPTURE_WRONG_THREAD.0)
                .contains(&self.0) =>
            {
                "inside of `Stream::capture` and `Buffer::capture` only enqueue, from the thread that called them, in the \
                 captured stream or streams that joined it by an event; do not query, synchronise or allocate. Read \
                 results behind a launch of the recording. A buffer's operation needs no memory if it was called once \
                 before, in `Buffer::capture` or between `begin_warmup` and `end_warmup`, or if it is given memory such \
                 as `recv_x`. Another thread's capture in global mode forbids the same to all threads (capture with the \
                 thread-local mode), and one of a blocking stream forbids the legacy default stream"
            }
            _ => "",
        }
    }
}

const FAULT: &str = "a kernel faulted and the context is lost, so every later call in this process fails alike: \
                     restart it, and find the instruction with `compute-sanitizer` or the virtual GPU's check mode";

/// An [`Error::Unavailable`].
pub fn unavailable(what: impl Into<String>, reason: impl Into<String>) -> Error {
    Error::Unavailable { what: what.into(), reason: reason.into() }
}

/// The same for a failure of `cust`.
pub fn from_cust(call: &'static str) -> impl Fn(CudaError) -> Error {
    move |error| CuResult(error as u32 as i32).error(call)
}

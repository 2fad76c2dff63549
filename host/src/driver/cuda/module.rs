//! Modules, kernels and launches.

use std::ffi::{CString, c_int, c_void};
use std::sync::Mutex;

use epoxide_gpu::simt::ptx::CutPtx;
use epoxide_vgpu::ptx::Version;

use super::calls::raw;
use super::device::Bound;
use super::error::unavailable;
use super::ffi::{self, CuFunction, CuModule, CuResult};
use super::late::{self, LaunchAttribute, LaunchConfigEx};
use super::{context, ptx};
use crate::driver::LaunchConfig;
use crate::error::{Error, Result};
use crate::lock::lock;

const LOG_BYTES: usize = 16 * 1024;

/// Compiles and loads PTX. Several threads may do so at once; the driver keeps the result in its
/// cache (`~/.nv/ComputeCache`, `CUDA_CACHE_PATH`), so later processes load in milliseconds.
pub fn load(bound: &Bound<'_>, text: &str) -> Result<u64> {
    let image = CString::new(text)
        .map_err(|error| Error::Ptx(format!("NUL byte at offset {}", error.nul_position())))?;
    let mut errors = vec![0u8; LOG_BYTES];
    let mut infos = vec![0u8; LOG_BYTES];
    let mut options = [
        ffi::CU_JIT_ERROR_LOG_BUFFER,
        ffi::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ffi::CU_JIT_INFO_LOG_BUFFER,
        ffi::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
    ];
    // Sizes are passed by value in the pointer slots.
    let mut values: [*mut c_void; 4] = [
        errors.as_mut_ptr().cast(),
        LOG_BYTES as *mut c_void,
        infos.as_mut_ptr().cast(),
        LOG_BYTES as *mut c_void,
    ];
    let mut module: CuModule = std::ptr::null_mut();
    let start = std::time::Instant::now();
    // SAFETY: the image is NUL-terminated, both buffers have the given lengths and outlive the
    // call, and the two arrays have the length passed.
    let result = unsafe {
        ffi::cuModuleLoadDataEx(
            &mut module,
            image.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    let infos = log_text(&infos);
    tracing::debug!(elapsed = ?start.elapsed(), log = infos, "PTX module of {} bytes", text.len());
    if result == CuResult::SUCCESS {
        bound.device.remember_entries(module as u64, CutPtx::new(text).names());
        return Ok(module as u64);
    }
    Err(load_error(bound, result, text, &log_text(&errors), &infos))
}

fn load_error(bound: &Bound<'_>, result: CuResult, text: &str, errors: &str, infos: &str) -> Error {
    let log = if errors.is_empty() { infos } else { errors };
    match result {
        CuResult::UNSUPPORTED_PTX_VERSION => {
            let what = match Version::of(text) {
                Some(version) => format!("PTX {version}"),
                None => "the PTX module".into(),
            };
            unavailable(what, ptx::too_new(text, bound.device.info.driver_version))
        }
        CuResult::OUT_OF_MEMORY => Error::OutOfMemory {
            what: "a PTX module".into(),
            requested: text.len() as u64,
            available: context::free_bytes(&bound.current).unwrap_or(0),
        },
        CuResult::JIT_COMPILER_NOT_FOUND | CuResult::JIT_COMPILATION_DISABLED => {
            unavailable("the driver's PTX compiler", result.remedy())
        }
        CuResult::INVALID_IMAGE
        | CuResult::NO_BINARY_FOR_GPU
        | CuResult::INVALID_PTX
        | CuResult::INVALID_SOURCE => Error::Ptx(format!("{} ({}): {log}", result.name(), result.0)),
        other if log.is_empty() => other.error("cuModuleLoadDataEx"),
        other => other.error_with("cuModuleLoadDataEx", format!("; {log}")),
    }
}

/// The text of a log buffer, which the driver ends with NUL unless it left it untouched.
pub(super) fn log_text(buffer: &[u8]) -> String {
    let end = buffer.iter().position(|&byte| byte == 0).unwrap_or(buffer.len());
    String::from_utf8_lossy(&buffer[..end]).trim().to_owned()
}

/// Unloads a module.
///
/// # Safety
/// No kernel of it is in flight.
pub unsafe fn unload(bound: &Bound<'_>, module: u64) {
    // Before another module gets its handles.
    bound.device.forget_module(module);
    // SAFETY: passed on to the caller.
    unsafe { ffi::cuModuleUnload(module as CuModule) }.log("cuModuleUnload");
}

/// Looks up a kernel, loads its code and allows it `max_shared_bytes` of dynamic shared memory.
pub fn kernel(bound: &Bound<'_>, module: u64, name: &'static str, max_shared_bytes: u32) -> Result<u64> {
    let entry =
        CString::new(name).map_err(|_| Error::argument("name", name, "an entry's name has no NUL byte"))?;
    let mut function: CuFunction = std::ptr::null_mut();
    // SAFETY: the module is live, as the trait demands, and `entry` is NUL-terminated.
    let found = unsafe { ffi::cuModuleGetFunction(&mut function, module as CuModule, entry.as_ptr()) };
    if found == CuResult::NOT_FOUND {
        return Err(Error::Ptx(format!(
            "no entry {name}; there are: {}; `cargo build-ptx` builds the PTX of a crate of kernels anew",
            bound.device.entries(module).join(", ")
        )));
    }
    found.check("cuModuleGetFunction")?;

    // With lazy loading, the default since CUDA 12, code would be loaded at the first launch, which
    // may wait for running kernels. One that spins on a peer would then never end.
    if let Some(func_load) = late::late().func_load {
        // SAFETY: the function was looked up just now.
        unsafe { func_load(function) }.check("cuFuncLoad")?;
    }

    let max_dynamic = ffi::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // Without a request the limit is 48 KiB, less the kernel's static shared memory. It is never
    // lowered: another lookup of the same kernel may have requested more, or do so now.
    static RAISE: Mutex<()> = Mutex::new(());
    let raising = lock(&RAISE);
    if attribute(function, max_dynamic) < max_shared_bytes as c_int {
        // SAFETY: the function was looked up just now; a value out of range is an error.
        let raised = unsafe { ffi::cuFuncSetAttribute(function, max_dynamic, max_shared_bytes as c_int) };
        if raised == CuResult::INVALID_VALUE {
            let static_bytes = attribute(function, ffi::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
            return Err(Error::Launch {
                kernel: name,
                rule: format!(
                    "{max_shared_bytes} bytes of dynamic and {static_bytes} of static shared memory wanted, a block \
                     has {}",
                    bound.device.info.max_shared_bytes_per_block
                ),
            });
        }
        raised.check("cuFuncSetAttribute")?;
    }
    drop(raising);
    // The same division of a multiprocessor's memory for every kernel: to change it, one would wait
    // until it is empty.
    let carveout = ffi::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
    // SAFETY: as above; 100 requests the most shared memory and the least L1 cache.
    unsafe { ffi::cuFuncSetAttribute(function, carveout, 100) }.check("cuFuncSetAttribute")?;
    bound.device.remember_kernel(function as u64, module, name);
    Ok(function as u64)
}

/// An attribute of a kernel, for error texts; 0 if the driver does not return it.
fn attribute(function: CuFunction, which: c_int) -> c_int {
    let mut value = 0;
    // SAFETY: the out pointer is valid and the function live.
    let result = unsafe { ffi::cuFuncGetAttribute(&mut value, which, function) };
    if result == CuResult::SUCCESS { value } else { 0 }
}

/// `cuLaunchKernel` takes one pointer per parameter; the driver copies the values before it
/// returns.
pub(super) fn param_pointers(params: &[&[u8]]) -> Vec<*mut c_void> {
    params.iter().map(|param| param.as_ptr().cast_mut().cast()).collect()
}

/// [`Driver::launch`](crate::driver::device::Driver::launch).
///
/// # Safety
/// The parameters fit the kernel's signature and every address in them is live until the kernel
/// ends.
pub unsafe fn launch(
    bound: &Bound<'_>,
    stream: u64,
    kernel: u64,
    config: &LaunchConfig,
    params: &[&[u8]],
) -> Result<()> {
    let (function, stream) = (kernel as CuFunction, raw(stream));
    let mut pointers = param_pointers(params);
    let LaunchConfig { grid, block, shared_bytes, cooperative, dependent } = *config;
    let launch_ex = late::late().launch_kernel_ex.filter(|_| dependent);
    let (name, result) = match launch_ex {
        Some(launch_ex) => {
            let mut attributes = [LaunchAttribute::dependent(), LaunchAttribute::cooperative()];
            let config = LaunchConfigEx {
                grid: [grid, 1, 1],
                block: [block, 1, 1],
                shared_bytes,
                stream,
                attributes: attributes.as_mut_ptr(),
                attribute_count: if cooperative { 2 } else { 1 },
            };
            // SAFETY: one pointer per parameter, each valid for this call, as are the configuration
            // and its attributes; a null `extra` means that parameters come by pointer. The rest is
            // passed on to the caller.
            let result = unsafe { launch_ex(&config, function, pointers.as_mut_ptr(), std::ptr::null_mut()) };
            ("cuLaunchKernelEx", result)
        }
        None if cooperative => {
            // SAFETY: as above.
            let result = unsafe {
                ffi::cuLaunchCooperativeKernel(
                    function,
                    grid,
                    1,
                    1,
                    block,
                    1,
                    1,
                    shared_bytes,
                    stream,
                    pointers.as_mut_ptr(),
                )
            };
            ("cuLaunchCooperativeKernel", result)
        }
        None => {
            // SAFETY: as above.
            let result = unsafe {
                ffi::cuLaunchKernel(
                    function,
                    grid,
                    1,
                    1,
                    block,
                    1,
                    1,
                    shared_bytes,
                    stream,
                    pointers.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            };
            ("cuLaunchKernel", result)
        }
    };
    match result {
        CuResult::SUCCESS => Ok(()),
        CuResult::INVALID_VALUE
        | CuResult::LAUNCH_OUT_OF_RESOURCES
        | CuResult::COOPERATIVE_LAUNCH_TOO_LARGE => Err(refused(bound, result, function, config)),
        other => Err(other.error(name)),
    }
}

/// The error for a rejected launch configuration, with the limits of the kernel and the device.
fn refused(bound: &Bound<'_>, result: CuResult, function: CuFunction, config: &LaunchConfig) -> Error {
    let LaunchConfig { grid, block, shared_bytes, cooperative, .. } = *config;
    let mut blocks_per_sm = 0;
    // SAFETY: the out pointer is valid and the function live.
    let known = unsafe {
        ffi::cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &mut blocks_per_sm,
            function,
            block as c_int,
            shared_bytes as usize,
        )
    };
    let resident = match known {
        CuResult::SUCCESS => {
            let sms = bound.device.info.sm_count;
            format!(
                ", and at most {} such blocks are resident at once ({sms} SMs)",
                blocks_per_sm as u32 * sms
            )
        }
        _ => String::new(),
    };
    Error::Launch {
        kernel: bound.device.kernel_name(function as u64),
        rule: format!(
            "{} ({}) for {grid} {}blocks of {block} threads with {shared_bytes} bytes of dynamic shared memory; the \
             kernel takes up to {} threads per block ({} registers each) and {} bytes of dynamic shared memory{resident}",
            result.name(),
            result.0,
            if cooperative { "cooperative " } else { "" },
            attribute(function, ffi::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
            attribute(function, ffi::CU_FUNC_ATTRIBUTE_NUM_REGS),
            attribute(function, ffi::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES),
        ),
    }
}

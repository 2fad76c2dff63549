//! Types of the CUDA driver API in their C layout, and the arguments through which calls read and
//! write the caller's memory.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

/// A result code of the driver API.
pub type CUresult = c_int;
/// The number of a device.
pub type CUdevice = c_int;
/// A device address.
pub type CUdeviceptr = u64;
/// A context, stream, event, module, function, library, kernel, graph or memory pool. It is a
/// number that stands for an object in a table, so one that stands for nothing is an error and
/// never a bad pointer.
pub type Handle = usize;

/// The result of a call before it becomes a [`CUresult`]: the error is its code.
pub(crate) type Res<T = ()> = Result<T, CUresult>;

/// Codes of the driver API with their names and texts.
macro_rules! codes {
    ($($name:ident = $code:literal $text:literal),* $(,)?) => {
        $(pub(crate) const $name: CUresult = $code;)*
        /// Name and text of each code.
        pub(crate) const CODES: &[(CUresult, &CStr, &CStr)] = &[
            $(($code, name_of(concat!("CUDA_ERROR_", stringify!($name), "\0")), name_of(concat!($text, "\0")))),*
        ];
    };
}

const fn name_of(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => c"",
    }
}

codes! {
    INVALID_VALUE = 1 "invalid argument",
    OUT_OF_MEMORY = 2 "out of memory",
    NOT_INITIALIZED = 3 "initialization error",
    NO_DEVICE = 100 "no CUDA-capable device is detected",
    INVALID_DEVICE = 101 "invalid device ordinal",
    INVALID_IMAGE = 200 "device kernel image is invalid",
    INVALID_CONTEXT = 201 "invalid device context",
    ALREADY_MAPPED = 208 "resource already mapped",
    NO_BINARY_FOR_GPU = 209 "no kernel image is available for execution on the device",
    UNSUPPORTED_LIMIT = 215 "limit is not supported on this architecture",
    INVALID_PTX = 218 "a PTX JIT compilation failed",
    UNSUPPORTED_PTX_VERSION = 222 "the provided PTX was compiled with an unsupported toolchain.",
    FILE_NOT_FOUND = 301 "file not found",
    OPERATING_SYSTEM = 304 "OS call failed or operation not supported on this OS",
    INVALID_HANDLE = 400 "invalid resource handle",
    ILLEGAL_STATE = 401 "the operation cannot be performed in the present state",
    NOT_FOUND = 500 "named symbol not found",
    NOT_READY = 600 "device not ready",
    ILLEGAL_ADDRESS = 700 "an illegal memory access was encountered",
    LAUNCH_OUT_OF_RESOURCES = 701 "too many resources requested for launch",
    LAUNCH_TIMEOUT = 702 "the launch timed out and was terminated",
    PEER_ACCESS_ALREADY_ENABLED = 704 "peer access is already enabled",
    PEER_ACCESS_NOT_ENABLED = 705 "peer access has not been enabled",
    ASSERT = 710 "device-side assert triggered",
    HOST_MEMORY_ALREADY_REGISTERED = 712 "part or all of the requested memory range is already mapped",
    HOST_MEMORY_NOT_REGISTERED = 713 "pointer does not correspond to a registered memory region",
    ILLEGAL_INSTRUCTION = 715 "an illegal instruction was encountered",
    MISALIGNED_ADDRESS = 716 "misaligned address",
    LAUNCH_FAILED = 719 "unspecified launch failure",
    COOPERATIVE_LAUNCH_TOO_LARGE = 720 "too many blocks in cooperative launch",
    NOT_SUPPORTED = 801 "operation not supported",
    STREAM_CAPTURE_UNSUPPORTED = 900 "operation not permitted when stream is capturing",
    STREAM_CAPTURE_INVALIDATED = 901 "operation failed due to a previous error during capture",
    STREAM_CAPTURE_MERGE = 902 "operation would result in a merge of separate capture sequences",
    STREAM_CAPTURE_UNMATCHED = 903 "capture was not ended in the same stream as it began",
    STREAM_CAPTURE_UNJOINED = 904 "capturing stream has unjoined work",
    STREAM_CAPTURE_ISOLATION = 905 "dependency created on uncaptured work in another stream",
    STREAM_CAPTURE_IMPLICIT = 906 "operation would make the legacy stream depend on a capturing blocking stream",
    STREAM_CAPTURE_WRONG_THREAD = 908 "attempt to terminate a thread-local capture sequence from another thread",
    CAPTURED_EVENT = 907 "operation not permitted on an event last recorded in a capturing stream",
    INVALID_CLUSTER_SIZE = 912 "invalid cluster size",
    UNKNOWN = 999 "unknown error",
}

/// Memory of the caller that a call writes a result to. Null is allowed, and an error where the
/// result is not optional.
///
/// Only callers of the API make it, as a pointer argument. Each function's contract has them pass
/// null or a pointer that is valid for the writes of the call.
#[repr(transparent)]
#[derive(Debug)]
pub struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    pub(crate) fn null() -> Out<T> {
        Out(std::ptr::null_mut())
    }

    /// An address that the caller passed as a number, among options: null or valid.
    pub(crate) fn at(addr: usize) -> Out<T> {
        Out(std::ptr::with_exposed_provenance_mut(addr))
    }

    /// Writes the result.
    pub(crate) fn put(self, value: T) -> Res {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        self.put_optional(value);
        Ok(())
    }

    /// Writes the result unless the pointer is null.
    pub(crate) fn put_optional(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, so valid for the write by the invariant of `Out`.
            unsafe { self.0.write_unaligned(value) };
        }
    }

    /// Writes `values` from the first element on, for which the caller has room.
    pub(crate) fn put_all(self, values: impl IntoIterator<Item = T>) -> Res {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        for (at, value) in values.into_iter().enumerate() {
            // SAFETY: not null, so valid for all writes of the call by the invariant of `Out`.
            unsafe { self.0.add(at).write_unaligned(value) };
        }
        Ok(())
    }

    /// Whether it is null.
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Where the memory begins.
    pub(crate) fn addr(self) -> usize {
        self.0.addr()
    }

    /// The error of [`Out::put`] before the call has an effect.
    pub(crate) fn required(self) -> Res {
        if self.0.is_null() { Err(INVALID_VALUE) } else { Ok(()) }
    }

    /// The same memory as values of another type.
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// The value before the call.
    pub(crate) fn before(self) -> In<T> {
        In(self.0)
    }
}

/// Memory of the caller that a call reads. Like [`Out`], only callers of the API make it, and pass
/// null or a pointer that is valid for the reads of the call.
#[repr(transparent)]
#[derive(Debug)]
pub struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T: Copy> In<T> {
    /// The value.
    pub(crate) fn get(self) -> Res<T> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, so valid for the read by the invariant of `In`.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// The first `count` values.
    pub(crate) fn get_all(self, count: usize) -> Res<Vec<T>> {
        if count > 0 && self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        let mut all: Vec<T> = vec![];
        all.try_reserve_exact(count).map_err(|_| OUT_OF_MEMORY)?;
        if count > 0 {
            // SAFETY: the source is not null, so valid for all reads of the call by the invariant
            // of `In`; the vector has room for `count` values, which are `Copy`.
            unsafe {
                let bytes = count * size_of::<T>();
                std::ptr::copy_nonoverlapping(self.0.cast::<u8>(), all.as_mut_ptr().cast::<u8>(), bytes);
                all.set_len(count);
            }
        }
        Ok(all)
    }
}

impl<T> In<T> {
    pub(crate) fn null() -> In<T> {
        In(std::ptr::null())
    }

    /// An address that the caller passed as a number, among options: null or valid.
    pub(crate) fn at(addr: usize) -> In<T> {
        In(std::ptr::with_exposed_provenance(addr))
    }

    /// Whether it is null.
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The same memory as a value of another type.
    pub(crate) fn cast<U>(self) -> In<U> {
        In(self.0.cast())
    }

    /// Whether the memory begins with these bytes, read up to the first that differs.
    pub(crate) fn begins_with(self, bytes: &[u8]) -> bool {
        // SAFETY: not null, so valid for the reads of the call by the invariant of `In`.
        let at = |index: usize| unsafe { self.0.cast::<u8>().add(index).read() };
        !self.0.is_null() && bytes.iter().enumerate().all(|(index, byte)| at(index) == *byte)
    }
}

impl In<usize> {
    /// The value at `index`.
    pub(crate) fn at_index(self, index: usize) -> Res<usize> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, so valid for all reads of the call by the invariant of `In`. The call
        // reads no value behind the end of the list.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }
}

impl In<c_char> {
    /// The text up to its end.
    pub(crate) fn text(self) -> Res<String> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, so a C string by the invariant of `In`.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}

/// `CUuuid`.
pub type CUuuid = [u8; 16];
/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IpcHandle(pub(crate) [u8; 64]);
/// `CUhostFn`.
pub type HostFn = Option<unsafe extern "C" fn(*mut c_void)>;
/// `CUstreamCallback`.
pub type StreamCallback = Option<unsafe extern "C" fn(Handle, CUresult, *mut c_void)>;
/// `CUoccupancyB2DSize`.
pub type SharedOfBlock = Option<unsafe extern "C" fn(c_int) -> usize>;

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUlaunchConfig {
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) dynamic_shared_bytes: c_uint,
    pub(crate) stream: Handle,
    pub(crate) attributes: In<CUlaunchAttribute>,
    pub(crate) attribute_count: c_uint,
}

/// `CUlaunchAttribute`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUlaunchAttribute {
    pub(crate) id: c_uint,
    pub(crate) pad: [u8; 4],
    pub(crate) value: [u64; 8],
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemLocation {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemAllocationProp {
    pub(crate) kind: c_int,
    pub(crate) requested_handle_types: c_int,
    pub(crate) location: CUmemLocation,
    pub(crate) win32: usize,
    pub(crate) flags: [u8; 8],
}

/// `CUmulticastObjectProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmulticastObjectProp {
    pub(crate) num_devices: c_uint,
    pub(crate) size: usize,
    pub(crate) handle_types: c_ulonglong,
    pub(crate) flags: c_ulonglong,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemAccessDesc {
    pub(crate) location: CUmemLocation,
    pub(crate) flags: c_int,
}

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemPoolProps {
    pub(crate) kind: c_int,
    pub(crate) handle_types: c_int,
    pub(crate) location: CUmemLocation,
    pub(crate) win32: usize,
    pub(crate) max_bytes: usize,
    pub(crate) reserved: [u8; 56],
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Memcpy2D {
    pub(crate) src: Side2D,
    pub(crate) dst: Side2D,
    pub(crate) width_bytes: usize,
    pub(crate) height: usize,
}

/// One side of a [`Memcpy2D`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Side2D {
    pub(crate) x_bytes: usize,
    pub(crate) y: usize,
    pub(crate) memory_type: c_uint,
    pub(crate) host: usize,
    pub(crate) device: CUdeviceptr,
    pub(crate) array: usize,
    pub(crate) pitch: usize,
}

//! Several virtual GPUs and their memory, from PTX to results in ten lines.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ops::{Bound, Range, RangeBounds};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::check::{CheckConfig, Checker, MOST_COLLECTED, Past, Report, Timeline};
use crate::device::{CHECKED_LIVELOCK_LIMIT, Clock, DeviceConfig, EXPLORED_LIVELOCK_LIMIT, GridConfig};
use crate::explore::{Actor, Path};
use crate::fault::{Fault, FaultKind, HANG, LaunchError, StuckReport, StuckWarp, of_device};
use crate::grid::{Grid, Progress, Residency, Stats, Step};
use crate::kernel::Kernel;
use crate::memory::{Memory, Region, Reservation};
use crate::memory_error::MemoryError;
use crate::module::Module;
use crate::multicast::MulticastObject;
use crate::names::counted;
use crate::seeds::{Rng, mix};

/// Longest turn of a device, in warp instructions, unless the machine has another.
const LONGEST_TURN: u64 = 1024;
/// Sets the numbers of [`Machine::random`] apart from those of the schedule.
const PROGRAM: u64 = 0x7072_6f67_7261_6d00;
/// How many times the limit of a kernel that never waits ([`DeviceConfig::livelock_limit`]) kernels
/// of several devices may execute while they wait for each other and no block ends.
const EXCHANGING: u64 = 16;
/// How far the clock advances when all grids only wait, in nanoseconds; twice as far each time.
const FIRST_JUMP_NS: u64 = 1_000;
/// How far in one step at most.
const LONGEST_JUMP_NS: u64 = 10_000_000_000;
/// How long all grids may only wait, in nanoseconds of the virtual clock.
const STUCK_NS: u64 = 1_000_000_000_000;
/// Warp instructions that all warps execute together behind that, while the clock is held: a loop
/// that computes and reads an unchanged word looks like a wait. Explored runs do without: they have
/// few steps between two choices.
const HELD_INSTRUCTIONS: u64 = 1_000_000;
/// As many of these count for a turn at the least: a wait ends its turn when it has polled.
const HELD_TURN: u64 = 50;

/// The report of a [`Machine`]. `Debug` is the text as well, so that `unwrap` shows it.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum MachineError {
    /// A kernel did something that a program must not do. The text names both ends.
    #[error("{0}")]
    Fault(Box<Fault>),
    /// A launch that cannot start.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// Memory could not be allocated, or an access of the host is out of bounds or a race.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The machine has fewer devices.
    #[error("device {device} of a machine with {devices}: they are numbered from 0")]
    NoDevice {
        /// The number that was given.
        device: usize,
        /// Devices of the machine.
        devices: usize,
    },
    /// The module has no such kernel.
    #[error("the module has no kernel '{kernel}'; it has {known}")]
    NoKernel {
        /// The name that was given.
        kernel: String,
        /// The names of those that are there.
        known: String,
    },
    /// No name of a kernel has all of the given parts, or several have.
    #[error("{} kernels of the module have {parts:?} in their name: {}", found.len(), found.join(", "))]
    NotOneKernel {
        /// The parts that were given.
        parts: Vec<String>,
        /// The names that have them all.
        found: Vec<String>,
    },
    /// The module has no such variable.
    #[error("the module has no variable '{variable}'; it has {known}")]
    NoVariable {
        /// The name that was given.
        variable: String,
        /// The names of those that are there.
        known: String,
    },
    /// The length of a variable is no multiple of the size of the requested numbers.
    #[error("variable '{variable}' has {bytes} bytes, which are no whole numbers of {each} bytes")]
    VariableBytes {
        /// Name of the variable.
        variable: String,
        /// Its length in bytes.
        bytes: usize,
        /// Bytes of a number.
        each: usize,
    },
    /// An upload is longer than its array.
    #[error("{given} numbers for an array of {len} in '{label}'; upload at most as many as it has")]
    TooMany {
        /// The label of its memory.
        label: String,
        /// Numbers of the array.
        len: usize,
        /// Numbers given.
        given: usize,
    },
    /// All kernels wait for events that no kernel will cause.
    #[error("{HANG}{0}")]
    Stuck(String),
    /// An array of each device does not fit between two of them.
    #[error(
        "'{label}': the stride is {stride} bytes and the array has {bytes}: give a power of two, at least 4096 and at least the \
         bytes of the array"
    )]
    BadStride {
        /// The label of the arrays.
        label: String,
        /// Bytes from the array of one device to that of the next.
        stride: u64,
        /// Bytes of an array.
        bytes: u64,
    },
    /// Numbers of an array that it does not have.
    #[error("numbers {start}..{end} of '{label}', an array of {len}")]
    BadRange {
        /// The label of its memory.
        label: String,
        /// Numbers of the array.
        len: usize,
        /// The first number.
        start: usize,
        /// The first number behind them.
        end: usize,
    },
    /// Arrays do not hold what [`Machine::expect`] or [`Array::expect`] was given.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Mismatch(Vec<Mismatch>),
}

/// The difference between an array and what it should hold.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mismatch {
    /// The label of the array's memory.
    pub label: String,
    /// Numbers of the array.
    pub len: usize,
    /// Numbers that were expected. An iterator that does not know its length counts as one more
    /// than the array where it has more.
    pub expected_len: usize,
    /// How many numbers are wrong, among those that both have.
    pub wrong: usize,
    /// The first of these.
    pub first: Option<WrongNumber>,
}

/// A number of an array that is not as expected.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WrongNumber {
    /// The index of the number.
    pub index: usize,
    /// The number in the array, as text.
    pub actual: String,
    /// The expected one.
    pub expected: String,
    /// The last write there: the kernel, the line, and the memory that its block has read
    /// ([`Memory::origin`]). Or that no kernel has written the place. `None` without check mode or
    /// weak memory, where writes are not tracked.
    pub written: Option<String>,
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Mismatch { label, len, expected_len, wrong, first } = self;
        let are = if *wrong == 1 { "is" } else { "are" };
        let numbers = counted(*len as u64, "number");
        if len == expected_len {
            write!(f, "{wrong} of {numbers} of '{label}' {are} wrong")?;
        } else {
            write!(f, "'{label}' has {numbers}, {expected_len} were expected")?;
            if *wrong > 0 {
                write!(f, "; {wrong} of the first {} {are} wrong", len.min(expected_len))?;
            }
        }
        let Some(WrongNumber { index, actual, expected, written }) = first else { return Ok(()) };
        write!(f, ", the first at {index}: {actual}, expected {expected}")?;
        written.iter().try_for_each(|written| write!(f, "\n  {written}"))
    }
}

impl std::fmt::Debug for MachineError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl From<Fault> for MachineError {
    fn from(fault: Fault) -> Self {
        MachineError::Fault(Box::new(fault))
    }
}

/// A number as it lies in device memory.
pub trait Number: Copy + std::fmt::Debug + Argument + Send + Sync + sealed::Sealed + 'static {
    /// Appends its bytes.
    fn put(self, bytes: &mut Vec<u8>);
    /// The number of these bytes, as many as it has.
    fn get(bytes: &[u8]) -> Self;
}

/// Arguments of a kernel: a number, the address of an [`Array`], or a Rust array of numbers, which
/// is a parameter for each of them.
///
/// A [`Number`] has the size of its parameter, or the launch is an error: the wrong one of two
/// arguments is often of another size. `usize` and `isize` are whole numbers of any parameter of 1,
/// 2, 4 or 8 bytes, and the launch is an error where the value does not fit. So an index or a
/// length of the host needs no conversion for a parameter `int`, and `0usize` is also a null
/// pointer.
///
/// ```
/// use epoxide_vgpu::{GridConfig, Machine, Module};
///
/// let module = Module::parse(
///     ".version 8.4\n.target sm_90\n.address_size 64
///      .visible .entry put(.param .u64 out, .param .u32 at, .param .u32 value) {
///          .reg .b32 %r<2>; .reg .b64 %rd<3>;
///          ld.param.u64 %rd1, [out];
///          ld.param.u32 %r1, [at];
///          mul.wide.u32 %rd2, %r1, 4;
///          add.u64 %rd1, %rd1, %rd2;
///          ld.param.u32 %r1, [value];
///          st.global.u32 [%rd1], %r1;
///          ret;
///      }",
/// )?;
/// let mut machine = Machine::checked(1, 0);
/// let out = machine.upload(0, "out", &[0u32; 4])?;
/// let last: usize = out.len() - 1;
/// machine.launch_with(0, &module, "put", GridConfig::new(1, 1, 0), &[&out, &last, &-1isize])?;
/// machine.run()?;
/// out.expect([0, 0, 0, u32::MAX])?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Argument {
    /// Appends its bytes, as the parameter block holds them.
    fn pack(&self, params: &mut Vec<u8>);

    /// Appends the value of each parameter that it is. One, unless the type has it otherwise.
    fn pack_each(&self, values: &mut Vec<ArgumentValue>) {
        let mut bytes = vec![];
        self.pack(&mut bytes);
        values.push(ArgumentValue::Bytes(bytes));
    }

    /// Device memory that the launch keeps allocated until its kernel has ended.
    fn region(&self) -> Option<Arc<Region>> {
        None
    }
}

/// The value of a parameter, as an [`Argument`] has it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ArgumentValue {
    /// The bytes, as many as the parameter has.
    Bytes(Vec<u8>),
    /// A whole number, for a parameter of 1, 2, 4 or 8 bytes that can hold it, with or without a
    /// sign.
    Integer(i128),
}

mod sealed {
    pub trait Sealed {}
}

/// Whole numbers that take the size of their parameter.
macro_rules! sizes {
    ($($ty:ty),*) => { $(
        impl Argument for $ty {
            fn pack(&self, params: &mut Vec<u8>) {
                params.extend_from_slice(&self.to_ne_bytes());
            }
            fn pack_each(&self, values: &mut Vec<ArgumentValue>) {
                values.push(ArgumentValue::Integer(*self as i128));
            }
        }
        impl<const N: usize> Argument for [$ty; N] {
            fn pack(&self, params: &mut Vec<u8>) {
                self.iter().for_each(|number| number.pack(params));
            }
            fn pack_each(&self, values: &mut Vec<ArgumentValue>) {
                self.iter().for_each(|number| number.pack_each(values));
            }
        }
    )* };
}
sizes!(usize, isize);

macro_rules! numbers {
    ($($ty:ty),*) => { $(
        impl sealed::Sealed for $ty {}
        impl Argument for $ty {
            fn pack(&self, params: &mut Vec<u8>) {
                self.put(params);
            }
        }
        impl Number for $ty {
            fn put(self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_ne_bytes());
            }
            fn get(bytes: &[u8]) -> Self {
                let mut own = [0; size_of::<$ty>()];
                own.copy_from_slice(bytes);
                <$ty>::from_ne_bytes(own)
            }
        }
    )* };
}
numbers!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, half::bf16, half::f16);

impl<T: Number, const N: usize> Argument for [T; N] {
    fn pack(&self, params: &mut Vec<u8>) {
        self.iter().for_each(|number| number.put(params));
    }

    fn pack_each(&self, values: &mut Vec<ArgumentValue>) {
        self.iter().for_each(|number| number.pack_each(values));
    }
}

/// An array in the memory of a device. Dropping the last clone and slice of it frees it, unless it is
/// a variable of a module or an argument of a kernel that has not ended.
#[derive(Clone, Debug)]
pub struct Array<T> {
    memory: Memory,
    region: Arc<Region>,
    /// Where it begins in the region, in bytes.
    offset: u64,
    len: usize,
    /// The label of a slice.
    label: Option<Arc<str>>,
    of: PhantomData<T>,
}

impl<T: Number> Array<T> {
    /// The device address of its first number, for parameters of kernels.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.region.addr() + self.offset
    }

    /// The memory. The array is all of it, unless it is a variable or a slice.
    pub(crate) fn allocation(&self) -> Arc<Region> {
        self.region.clone()
    }

    /// The length of its memory, and its place there.
    pub(crate) fn shape(&self) -> [u64; 3] {
        [self.region.bytes(), self.offset, self.len as u64]
    }

    /// The label in errors: that of its memory, and the slice's in front of it.
    fn label(&self) -> String {
        match &self.label {
            Some(label) => format!("{label} of {}", self.region.label()),
            None => self.region.label().to_owned(),
        }
    }

    /// A part of it, as an array of the same memory. Uploads, downloads and [`Array::expect`] have
    /// the part's bounds. Reports of check mode name its numbers by `label`, as in `flags[3]`. A
    /// kernel has the bounds of the whole memory, because it may compute one address from another.
    ///
    /// ```
    /// use epoxide_vgpu::{GridConfig, Machine, Module};
    ///
    /// let module = Module::parse(
    ///     ".version 8.4\n.target sm_90\n.address_size 64
    ///      .visible .entry set(.param .u64 at) {
    ///          .reg .b32 %r<2>; .reg .b64 %rd<2>;
    ///          ld.param.u64 %rd1, [at];
    ///          mov.u32 %r1, 7;
    ///          st.global.u32 [%rd1], %r1;
    ///          ret;
    ///      }",
    /// )?;
    /// let mut machine = Machine::new(1);
    /// let heap = machine.upload(0, "heap", &[0u32; 64])?;
    /// let (flags, data) = (heap.slice(0..4, "flags")?, heap.slice(4..64, "data")?);
    /// machine.launch_with(0, &module, "set", GridConfig::new(1, 1, 0), &[&data])?;
    /// machine.run()?;
    /// flags.expect([0; 4])?;
    /// assert_eq!(data.download_range(0..2)?, [7, 0]);
    /// assert!(flags.upload(&[1; 5]).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The array lacks some of the numbers.
    pub fn slice(&self, range: Range<usize>, label: &str) -> Result<Array<T>, MachineError> {
        let Range { start, end } = self.checked(range)?;
        let (offset, len) = (self.offset + (start * size_of::<T>()) as u64, end - start);
        let label: Arc<str> = label.into();
        self.region.name_part(offset..offset + (len * size_of::<T>()) as u64, size_of::<T>() as u64, &label);
        let (memory, region, label) = (self.memory.clone(), self.region.clone(), Some(label));
        Ok(Array { memory, region, offset, len, label, of: PhantomData })
    }

    /// The same numbers in another mapping of its memory.
    fn mapped(&self, memory: Memory, region: Region) -> Array<T> {
        let Array { offset, len, ref label, .. } = *self;
        Array { memory, region: Arc::new(region), offset, len, label: label.clone(), of: PhantomData }
    }

    /// The range, if the array has all of it.
    fn checked(&self, range: Range<usize>) -> Result<Range<usize>, MachineError> {
        let Range { start, end } = range;
        if start > end || end > self.len {
            return Err(MachineError::BadRange { label: self.label(), len: self.len, start, end });
        }
        Ok(range)
    }

    /// How many numbers it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies it to the host. Numbers that nothing has written are poison; [`Array::written`]
    /// returns which are written.
    ///
    /// # Errors
    /// In check mode, a race with a kernel that has not ended, or that a fault has stopped. Also,
    /// the host lacks memory for the copy.
    pub fn download(&self) -> Result<Vec<T>, MachineError> {
        self.download_range(0..self.len)
    }

    /// Copies a part of it to the host. In check mode kernels that have not ended may use the rest.
    ///
    /// # Errors
    /// As [`Array::download`], and where the array lacks some of the numbers.
    pub fn download_range(&self, range: Range<usize>) -> Result<Vec<T>, MachineError> {
        let Range { start, end } = self.checked(range)?;
        let len = (end - start) * size_of::<T>();
        let mut bytes = host_memory(len)?;
        bytes.resize(len, 0);
        self.memory.read(self.addr() + (start * size_of::<T>()) as u64, &mut bytes)?;
        let mut numbers = host_memory(end - start)?;
        numbers.extend(bytes.chunks_exact(size_of::<T>()).map(T::get));
        Ok(numbers)
    }

    /// Whether something has written all bytes of each number. Unwritten numbers are poison.
    /// Tracked in check mode and under weak memory: in other modes all are true.
    #[must_use]
    pub fn written(&self) -> Vec<bool> {
        let bytes = self.memory.written(self.addr(), (self.len * size_of::<T>()) as u64);
        bytes.chunks_exact(size_of::<T>()).map(|number| number.iter().all(|byte| *byte)).collect()
    }

    /// Compares it with the numbers that it should hold. All bits count: a NaN equals itself, and
    /// `0.0` is not `-0.0`. In check mode and under weak memory the error names the write of the
    /// first wrong number.
    ///
    /// ```
    /// use epoxide_vgpu::{GridConfig, Machine, Module};
    ///
    /// let module = Module::parse(
    ///     ".version 8.4\n.target sm_90\n.address_size 64
    ///      .visible .entry first(.param .u64 out) {
    ///          .reg .b32 %r<2>; .reg .b64 %rd<2>;
    ///          ld.param.u64 %rd1, [out];
    ///          mov.u32 %r1, 7;
    ///          st.global.u32 [%rd1], %r1;
    ///          ret;
    ///      }",
    /// )?;
    /// let mut machine = Machine::checked(1, 0);
    /// let out = machine.upload(0, "out", &[0u32; 4])?;
    /// machine.launch_with(0, &module, "first", GridConfig::new(1, 1, 0), &[&out])?;
    /// machine.run()?;
    /// out.expect([7, 0, 0, 0])?;
    /// let error = out.expect([7; 4]).unwrap_err().to_string();
    /// assert!(error.starts_with("3 of 4 numbers of 'out' are wrong, the first at 1: 0, expected 7\n"));
    /// assert!(error.contains("last written by no kernel"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`MachineError::Mismatch`] where numbers or lengths differ, or those of
    /// [`Array::download`].
    pub fn expect(&self, expected: impl IntoIterator<Item = T>) -> Result<(), MachineError> {
        match self.compare(expected)? {
            None => Ok(()),
            Some(mismatch) => Err(MachineError::Mismatch(vec![mismatch])),
        }
    }

    fn compare(&self, expected: impl IntoIterator<Item = T>) -> Result<Option<Mismatch>, MachineError> {
        let actual = self.download()?;
        let (mut expected, mut compared) = (bounded(expected, self.len), 0);
        let (mut wrong, mut first) = (0, None);
        for (index, (actual, expected)) in actual.iter().zip(expected.by_ref()).enumerate() {
            compared = index + 1;
            let bytes = [*actual, expected].map(bytes_of);
            if bytes[0] == bytes[1] {
                continue;
            }
            wrong += 1;
            if first.is_none() {
                let [actual, expected] = shown([*actual, expected], &bytes);
                first = Some(WrongNumber { index, actual, expected, written: self.written_by(index) });
            }
        }
        let expected_len = compared + expected.count();
        let is_wrong = wrong > 0 || expected_len != self.len;
        Ok(is_wrong.then(|| Mismatch { label: self.label(), len: self.len, expected_len, wrong, first }))
    }

    /// The last write of a number, for reports. `None` where writes are not tracked.
    fn written_by(&self, index: usize) -> Option<String> {
        self.memory.checker()?;
        let addr = self.addr() + (index * size_of::<T>()) as u64;
        let origin = self.memory.origin(addr);
        let is_written = || self.memory.written(addr, size_of::<T>() as u64).into_iter().all(|byte| byte);
        Some(origin.unwrap_or_else(|| match is_written() {
            true => "last written by no kernel".to_owned(),
            false => "nothing has written it".to_owned(),
        }))
    }

    /// Copies `numbers` to its begin.
    ///
    /// # Errors
    /// It has too little room for them; or in check mode, a kernel that is not done uses it.
    pub fn upload(&self, numbers: &[T]) -> Result<(), MachineError> {
        if numbers.len() > self.len {
            // The region of a variable is longer than the variable.
            let (label, given) = (self.label(), numbers.len());
            return Err(MachineError::TooMany { label, len: self.len, given });
        }
        let mut bytes = Vec::with_capacity(size_of_val(numbers));
        numbers.iter().for_each(|number| number.put(&mut bytes));
        Ok(self.memory.write(self.addr(), &bytes)?)
    }
}

/// An empty vector with room for `len` elements.
fn host_memory<T>(len: usize) -> Result<Vec<T>, MemoryError> {
    let mut vec = vec![];
    vec.try_reserve_exact(len).map_err(|_| MemoryError::Os {
        call: "malloc",
        errno: rustix::io::Errno::NOMEM.raw_os_error(),
        message: format!("{len} elements of {} bytes in the host's memory", size_of::<T>()),
    })?;
    Ok(vec)
}

fn bytes_of(number: impl Number) -> Vec<u8> {
    let mut bytes = vec![];
    number.put(&mut bytes);
    bytes
}

/// Two numbers as texts, with their bits where the texts would be the same, as those of two NaNs.
fn shown<T: Number>(numbers: [T; 2], bytes: &[Vec<u8>; 2]) -> [String; 2] {
    let texts = numbers.map(|number| format!("{number:?}"));
    if texts[0] != texts[1] {
        return texts;
    }
    // Numbers have the byte order of the host.
    let bits = |bytes: &Vec<u8>| {
        let high_first = |digits: String, byte: &u8| format!("{byte:02x}{digits}");
        bytes.iter().fold(String::new(), high_first)
    };
    let [first, second] = texts;
    [format!("{first} (0x{})", bits(&bytes[0])), format!("{second} (0x{})", bits(&bytes[1]))]
}

impl<T: Number> Argument for Array<T> {
    fn pack(&self, params: &mut Vec<u8>) {
        self.addr().put(params);
    }

    fn region(&self) -> Option<Arc<Region>> {
        Some(self.region.clone())
    }
}

/// A kernel that was enqueued.
struct Launch {
    residency: Residency,
    kernel: Arc<Kernel>,
    shape: GridConfig,
    params: Vec<u8>,
    /// Memory of the arguments.
    memory: Vec<Arc<Region>>,
    /// The causal past of the host when it enqueued the kernel.
    past: Past,
}

/// A device, with one stream of kernels.
struct Device {
    memory: Memory,
    /// The number of the device, where the machine has several.
    number: Option<u32>,
    queue: VecDeque<Launch>,
    running: Option<Grid>,
    /// Memory of the arguments of the kernel that runs.
    arguments: Vec<Arc<Region>>,
    timeline: Option<Timeline>,
    /// The causal past of the next kernel.
    past: Past,
    /// Reports of its kernels without check mode.
    collected: Vec<Report>,
    spins: bool,
}

/// Virtual GPUs that can address each other's memory.
///
/// Each has one stream: its kernels run one behind the other, and beside those of the other
/// devices. They run in [`Machine::run`], on the calling thread, in an order drawn from the seed.
///
/// ```
/// use epoxide_vgpu::{GridConfig, Machine, Module};
///
/// let ptx = "
/// .version 8.4
/// .target sm_90
/// .address_size 64
/// .visible .entry square(.param .u64 out)
/// {
///     .reg .b32 %r<3>;
///     .reg .b64 %rd<4>;
///     ld.param.u64 %rd1, [out];
///     mov.u32 %r1, %tid.x;
///     mul.lo.u32 %r2, %r1, %r1;
///     mul.wide.u32 %rd2, %r1, 4;
///     add.s64 %rd3, %rd1, %rd2;
///     st.global.u32 [%rd3], %r2;
///     ret;
/// }";
/// let module = Module::parse(ptx)?;
/// let mut machine = Machine::checked(1, 7);
/// let out = machine.alloc::<u32>(0, "out", 32)?;
/// machine.launch_with(0, &module, "square", GridConfig::new(1, 32, 0), &[&out])?;
/// machine.run()?;
/// assert_eq!(out.download()?[5], 25);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Machine {
    devices: Vec<Device>,
    config: DeviceConfig,
    checker: Option<Checker>,
    clock_ns: Arc<AtomicU64>,
    rng: Rng,
    seed: u64,
    /// Draws what the program asks for, so that it changes no schedule.
    own_rng: Rng,
    longest_turn: u64,
    /// Whether the limit of instructions is the program's.
    has_own_limit: bool,
    /// The choices of an exploration.
    path: Option<Path>,
    /// The faults that ended runs and, without check mode, those behind which kernels continued.
    faults: Vec<Report>,
    /// Comparisons behind the next run.
    expected: Vec<Comparison>,
}

/// Compares an array, and returns the difference, if there is one.
type Comparison = Box<dyn FnOnce() -> Result<Option<Mismatch>, MachineError> + Send + Sync>;

/// Numbers to compare with an array of `len`. An iterator that does not know its length may have no
/// end: one number more than the array has shows that there are too many.
fn bounded<T>(numbers: impl IntoIterator<Item = T>, len: usize) -> impl Iterator<Item = T> {
    let numbers = numbers.into_iter();
    let most = match numbers.size_hint() {
        (least, Some(most)) if least == most => most,
        _ => len + 1,
    };
    numbers.take(most)
}

/// Devices whose schedules are drawn from a seed.
fn seeded(seed: u64) -> DeviceConfig {
    DeviceConfig { schedule_seed: Some(seed), ..DeviceConfig::default() }
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Machine").field("devices", &self.devices.len()).finish_non_exhaustive()
    }
}

impl Machine {
    /// A machine with this many devices, whose warps take turns. Bounds, alignment, poison and
    /// deadlocks are checked.
    #[must_use]
    pub fn new(devices: usize) -> Machine {
        Machine::with_config(devices, DeviceConfig::default(), None)
    }

    /// The same with a seed: the order of warps and devices, and when bulk copies land, are drawn
    /// from it. A run continues behind up to 100 copies that outlive their blocks, which
    /// [`Machine::reports`] lists.
    #[must_use]
    pub fn seeded(devices: usize, seed: u64) -> Machine {
        Machine::with_config(devices, DeviceConfig { collect: MOST_COLLECTED, ..seeded(seed) }, None)
    }

    /// A machine in check mode: races between lanes, blocks, devices, bulk copies and the host are
    /// faults, and so are reads of unwritten memory.
    #[must_use]
    pub fn checked(devices: usize, seed: u64) -> Machine {
        Machine::checked_with(devices, seed, CheckConfig::default())
    }

    /// A machine with the checks of `check`, with weak memory for instance.
    #[must_use]
    pub fn checked_with(devices: usize, seed: u64, check: CheckConfig) -> Machine {
        Machine::with_config(devices, seeded(seed), Some(check))
    }

    /// A machine of devices with this configuration, in check mode if `check` is given. Its clock
    /// is virtual, whatever the configuration's is.
    #[must_use]
    pub fn with_config(devices: usize, config: DeviceConfig, check: Option<CheckConfig>) -> Machine {
        let seed = config.schedule_seed.unwrap_or(0);
        let has_own_limit = config.livelock_limit.is_some();
        // A kernel that waits in a ring with itself would otherwise run for ever.
        let livelock_limit = config.livelock_limit.or(Some(CHECKED_LIVELOCK_LIMIT));
        let checker = check.map(Checker::new);
        let clock_ns = Arc::new(AtomicU64::new(0));
        let device = |number| Device {
            memory: Memory::checked(seed, checker.clone()),
            number: (devices > 1).then_some(number as u32),
            queue: VecDeque::new(),
            running: None,
            arguments: vec![],
            timeline: checker.as_ref().map(Checker::timeline),
            past: Past::default(),
            collected: vec![],
            spins: false,
        };
        let devices: Vec<Device> = (0..devices).map(device).collect();
        if let Some(checker) = &checker {
            // Kernels run while the caller waits in `run`, and threads pass arrays on in order.
            checker.world().only_host = Some(std::thread::current().id());
        }
        if let (Some(checker), 2..) = (&checker, devices.len()) {
            (0..).zip(&devices).for_each(|(number, device)| checker.number_device(&device.memory, number));
            checker.world().grids.names_devices = true;
        }
        Machine {
            devices,
            config: DeviceConfig { clock: Clock::Virtual(clock_ns.clone()), livelock_limit, ..config },
            checker,
            clock_ns,
            rng: Rng::new(seed),
            seed,
            own_rng: Rng::new(mix(seed ^ PROGRAM)),
            longest_turn: LONGEST_TURN,
            has_own_limit,
            path: None,
            faults: vec![],
            expected: vec![],
        }
    }

    /// Limits the turn of a device to this many warp instructions, so that kernels of several
    /// devices interleave more finely.
    #[must_use]
    pub fn with_longest_turn(self, warp_instructions: u64) -> Machine {
        Machine { longest_turn: warp_instructions.max(1), ..self }
    }

    /// Makes the machine follow the choices of an exploration ([`Explore`](crate::Explore)), in
    /// place of the seed's.
    #[must_use]
    pub fn explored(self, path: &Path) -> Machine {
        if let Some(checker) = &self.checker {
            checker.world().path = Some(path.clone());
        }
        let mut config = self.config;
        if !self.has_own_limit {
            config.livelock_limit = Some(EXPLORED_LIVELOCK_LIMIT);
        }
        Machine { path: Some(path.clone()), config, ..self }
    }

    /// The checker; `None` without check mode.
    #[must_use]
    pub fn checker(&self) -> Option<&Checker> {
        self.checker.as_ref()
    }

    /// The reports so far of a machine that collects them ([`CheckConfig::collect`], without check
    /// mode [`DeviceConfig::collect`]). A fault or a hang that ended a run is among them, and marked
    /// ([`Report::ended_run`]), in fast mode too.
    #[must_use]
    pub fn reports(&self) -> Vec<Report> {
        let mut all = self.checker.as_ref().map(Checker::reports).unwrap_or_default();
        Report::merge(&mut all, self.faults.clone());
        all
    }

    /// The seed of its schedule; 0 for one without.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// A whole number of the range, for the inputs of a program. The machine's seed determines all
    /// of them, so that a failure repeats with its inputs. They change no schedule.
    ///
    /// ```
    /// use epoxide_vgpu::Machine;
    ///
    /// let inputs = |seed| {
    ///     let mut machine = Machine::seeded(1, seed);
    ///     [(); 8].map(|()| machine.random(-3..=3))
    /// };
    /// assert_eq!(inputs(7), inputs(7));
    /// assert_ne!(inputs(7), inputs(8));
    /// assert!(inputs(7).iter().all(|number| (-3..=3).contains(number)));
    /// ```
    ///
    /// # Panics
    /// The range is empty.
    pub fn random(&mut self, range: impl RangeBounds<i64>) -> i64 {
        let first = match range.start_bound() {
            Bound::Included(first) => i128::from(*first),
            Bound::Excluded(before) => i128::from(*before) + 1,
            Bound::Unbounded => i128::from(i64::MIN),
        };
        let end = match range.end_bound() {
            Bound::Included(last) => i128::from(*last) + 1,
            Bound::Excluded(end) => i128::from(*end),
            Bound::Unbounded => i128::from(i64::MAX) + 1,
        };
        assert!(first < end, "a number of the range {first}..{end}, which is empty");
        // All numbers of 64 bits are one more than the largest.
        let drawn = match u64::try_from(end - first) {
            Ok(numbers) => self.own_rng.below(numbers),
            Err(_) => self.own_rng.next(),
        };
        (first + i128::from(drawn)) as i64
    }

    /// The number of devices.
    #[must_use]
    pub fn devices(&self) -> usize {
        self.devices.len()
    }

    /// The memory of a device.
    ///
    /// # Errors
    /// No such device.
    pub fn memory(&self, device: usize) -> Result<&Memory, MachineError> {
        Ok(&self.device(device)?.memory)
    }

    fn device(&self, device: usize) -> Result<&Device, MachineError> {
        self.devices.get(device).ok_or(MachineError::NoDevice { device, devices: self.devices.len() })
    }

    /// Memory of a device for `len` numbers, which hold poison. `label` names it in reports, with the
    /// device where the machine has several.
    ///
    /// # Errors
    /// No such device, or no memory.
    pub fn alloc<T: Number>(&self, device: usize, label: &str, len: usize) -> Result<Array<T>, MachineError> {
        let memory = self.device(device)?.memory.clone();
        // No memory has as many bytes as the product is cut to.
        let bytes = len.saturating_mul(size_of::<T>()) as u64;
        let region = memory.alloc(bytes, &format!("{label}{}", of_device(self.devices[device].number)))?;
        Ok(Array { memory, region: Arc::new(region), offset: 0, len, label: None, of: PhantomData })
    }

    /// Memory of a device that holds `numbers`.
    ///
    /// # Errors
    /// No such device, or no memory.
    pub fn upload<T: Number>(
        &self,
        device: usize,
        label: &str,
        numbers: &[T],
    ) -> Result<Array<T>, MachineError> {
        let array = self.alloc(device, label, numbers.len())?;
        array.upload(numbers)?;
        Ok(array)
    }

    /// The same memory as device `device` addresses it: a peer mapping.
    ///
    /// # Errors
    /// No such device, or the operating system maps no more.
    pub fn map<T: Number>(&self, device: usize, array: &Array<T>) -> Result<Array<T>, MachineError> {
        let memory = self.device(device)?.memory.clone();
        let region = if cfg!(miri) {
            // Miri maps no files, and nothing at a second address.
            memory.share(&array.region)?
        } else {
            memory.import(array.region.export()?, array.region.bytes(), array.region.label())?
        };
        Ok(array.mapped(memory, region))
    }

    /// The same at an address in a reservation. The array is all of its allocation.
    pub(crate) fn map_at<T: Number>(
        &self,
        device: usize,
        array: &Array<T>,
        place: (&Reservation, u64),
    ) -> Result<Array<T>, MachineError> {
        let memory = self.device(device)?.memory.clone();
        let (fd, bytes, label) = (array.region.export()?, array.region.bytes(), array.region.label());
        let region = memory.import_at(place, fd, bytes, label)?;
        Ok(array.mapped(memory, region))
    }

    /// The multicast addresses of arrays, of which this is one, on a device.
    pub(crate) fn map_multicast<T: Number>(
        &self,
        device: usize,
        array: &Array<T>,
        object: &MulticastObject,
    ) -> Result<Array<T>, MachineError> {
        let memory = self.device(device)?.memory.clone();
        // The addresses are those of all devices.
        let label = array.region.label();
        let label = label.strip_suffix(&of_device(self.devices[device].number)).unwrap_or(label);
        let region = memory.multicast(object, label)?;
        Ok(array.mapped(memory, region))
    }

    /// The `.global` or `.const` variable `name` of a module on a device, as numbers. It holds its
    /// initial value until a kernel or [`Array::upload`] writes it.
    ///
    /// # Errors
    /// No such device, no such variable, or its length is not that of whole numbers.
    pub fn variable<T: Number>(
        &self,
        device: usize,
        module: &Module,
        name: &str,
    ) -> Result<Array<T>, MachineError> {
        let memory = self.device(device)?.memory.clone();
        let Some((region, offset, bytes)) = memory.variable_in(module, name)? else {
            let known: Vec<_> = module.variables().map(|(name, _)| name).collect();
            return Err(MachineError::NoVariable { variable: name.to_owned(), known: known.join(", ") });
        };
        let (bytes, each) = (bytes as usize, size_of::<T>());
        if !bytes.is_multiple_of(each) {
            return Err(MachineError::VariableBytes { variable: name.to_owned(), bytes, each });
        }
        Ok(Array { memory, region, offset, len: bytes / each, label: None, of: PhantomData })
    }

    /// Enqueues a kernel on a device, behind those that are there: that which [`Module::find`]
    /// finds. `params` are the bytes of its parameters, with the PTX's layout.
    ///
    /// # Errors
    /// The device or the kernel does not exist. [`run`](Self::run) reports all other errors of a
    /// launch.
    pub fn launch(
        &mut self,
        device: usize,
        module: &Module,
        kernel: &str,
        shape: GridConfig,
        params: &[u8],
    ) -> Result<(), MachineError> {
        self.enqueue(Residency::InTurn, device, module.find(kernel)?, shape, params.to_vec(), vec![])
    }

    /// The same with the arguments by themselves, in the order of the kernel's parameters
    /// ([`Argument`]). Arrays among them stay allocated until the kernel has ended, even if they
    /// are dropped before.
    ///
    /// # Errors
    /// Those of [`launch`](Self::launch). Also, number and sizes of the arguments must be those of
    /// the parameters, and a `usize` or `isize` must fit.
    pub fn launch_with(
        &mut self,
        device: usize,
        module: &Module,
        kernel: &str,
        shape: GridConfig,
        arguments: &[&dyn Argument],
    ) -> Result<(), MachineError> {
        self.enqueue_with(Residency::InTurn, device, module.find(kernel)?, shape, arguments)
    }

    /// Enqueues a cooperative launch: all blocks are resident together, as kernels with
    /// `cooperative_groups::this_grid().sync()` need. That function traps in other launches, as on a
    /// GPU.
    ///
    /// # Errors
    /// Those of [`launch_with`](Self::launch_with). [`run`](Self::run) reports a grid of which not
    /// all blocks fit on the device.
    pub fn launch_cooperative(
        &mut self,
        device: usize,
        module: &Module,
        kernel: &str,
        shape: GridConfig,
        arguments: &[&dyn Argument],
    ) -> Result<(), MachineError> {
        self.enqueue_with(Residency::Together, device, module.find(kernel)?, shape, arguments)
    }

    fn enqueue_with(
        &mut self,
        residency: Residency,
        device: usize,
        kernel: Arc<Kernel>,
        shape: GridConfig,
        arguments: &[&dyn Argument],
    ) -> Result<(), MachineError> {
        let params = kernel.pack(arguments)?;
        let memory = arguments.iter().filter_map(|argument| argument.region()).collect();
        self.enqueue(residency, device, kernel, shape, params, memory)
    }

    fn enqueue(
        &mut self,
        residency: Residency,
        device: usize,
        kernel: Arc<Kernel>,
        shape: GridConfig,
        params: Vec<u8>,
        memory: Vec<Arc<Region>>,
    ) -> Result<(), MachineError> {
        self.device(device)?;
        let past = self.checker.as_ref().map(Checker::host_past).unwrap_or_default();
        let launch = Launch { residency, kernel, shape, params, memory, past };
        self.devices[device].queue.push_back(launch);
        Ok(())
    }

    /// Has the next [`run`](Self::run) compare an array with the numbers that it should hold behind
    /// all kernels, as [`Array::expect`] does at once. So a program says what a kernel computes where
    /// it launches the kernel, and one error has all arrays that are wrong.
    ///
    /// ```
    /// use epoxide_vgpu::{GridConfig, Machine, Module};
    ///
    /// let module = Module::parse(
    ///     ".version 8.4\n.target sm_90\n.address_size 64
    ///      .visible .entry rank(.param .u64 out, .param .u32 rank) {
    ///          .reg .b32 %r<2>; .reg .b64 %rd<2>;
    ///          ld.param.u64 %rd1, [out];
    ///          ld.param.u32 %r1, [rank];
    ///          st.global.u32 [%rd1], %r1;
    ///          ret;
    ///      }",
    /// )?;
    /// let mut machine = Machine::new(3);
    /// for rank in 0..3 {
    ///     let out = machine.alloc::<u32>(rank, "out", 1)?;
    ///     machine.launch_with(rank, &module, "rank", GridConfig::new(1, 1, 0), &[&out, &(rank as u32)])?;
    ///     machine.expect(&out, [if rank == 0 { 0 } else { 7 }]);
    /// }
    /// assert_eq!(
    ///     machine.run().unwrap_err().to_string(),
    ///     "1 of 1 number of 'out of device 1' is wrong, the first at 0: 1, expected 7
    /// 1 of 1 number of 'out of device 2' is wrong, the first at 0: 2, expected 7"
    /// );
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn expect<T: Number>(&mut self, array: &Array<T>, expected: impl IntoIterator<Item = T>) {
        let (array, expected) = (array.clone(), bounded(expected, array.len()).collect::<Vec<T>>());
        self.expected.push(Box::new(move || array.compare(expected)));
    }

    /// Runs all kernels to their ends, and compares the arrays of [`expect`](Self::expect).
    ///
    /// # Errors
    /// The first fault, or a report of all waits if no kernel can proceed. The remaining work is
    /// dropped then, and nothing is compared. A machine that collects reports returns no error for
    /// those that it collects: see [`reports`](Self::reports). [`MachineError::Mismatch`] has all
    /// arrays that are wrong. Without any, the first error of [`Array::download`].
    pub fn run(&mut self) -> Result<(), MachineError> {
        let result = match self.path.clone() {
            Some(path) => self.run_explored(&path),
            None => self.run_all(),
        };
        let ended = match &result {
            Err(MachineError::Fault(fault)) => Some(Fault::clone(fault)),
            Err(MachineError::Stuck(_)) => self.hang(),
            _ => None,
        };
        for device in &mut self.devices {
            device.end_collection();
            Report::merge(&mut self.faults, std::mem::take(&mut device.collected));
        }
        let ended = ended.map(|fault| Report { ended_run: true, ..Report::new(fault) });
        Report::merge(&mut self.faults, ended.into_iter().collect());
        for device in &mut self.devices {
            if let Some(checker) = &self.checker {
                checker.host_waited(&device.past);
            }
            device.running = None;
            device.arguments.clear();
            device.queue.clear();
        }
        let expected = std::mem::take(&mut self.expected);
        result?;
        let (mut wrong, mut failed) = (vec![], Ok(()));
        for compare in expected {
            match compare() {
                Ok(mismatch) => wrong.extend(mismatch),
                Err(error) => failed = failed.and(Err(error)),
            }
        }
        if wrong.is_empty() { failed } else { Err(MachineError::Mismatch(wrong)) }
    }

    fn run_all(&mut self) -> Result<(), MachineError> {
        let (mut stuck_ns, mut jump_ns) = (0, FIRST_JUMP_NS);
        // Kernels that only exchange words wait in turn, so that no limit of one kernel ends them.
        let limit = self.config.instructions_allowed(true).saturating_mul(EXCHANGING);
        // Warp instructions since the clock is held.
        let mut held = 0;
        let mut executed = 0;
        loop {
            for device in &mut self.devices {
                device.start(&self.config)?;
            }
            let busy: Vec<usize> =
                (0..self.devices.len()).filter(|&at| self.devices[at].running.is_some()).collect();
            if busy.is_empty() {
                return Ok(());
            }
            if busy.iter().all(|&at| self.devices[at].spins) {
                if stuck_ns < STUCK_NS {
                    // The clock advances to the kernels' own deadlines, after which they may continue.
                    self.clock_ns.fetch_add(jump_ns, Ordering::Relaxed);
                    stuck_ns += jump_ns;
                    jump_ns = (jump_ns * 2).min(LONGEST_JUMP_NS);
                } else if held >= HELD_INSTRUCTIONS {
                    return Err(MachineError::Stuck(self.stuck()));
                }
                self.devices.iter_mut().for_each(|device| device.spins = false);
            }
            let awake: Vec<usize> = busy.into_iter().filter(|&at| !self.devices[at].spins).collect();
            let at = awake[self.rng.below(awake.len() as u64) as usize];
            let turn = 1 + self.rng.below(self.longest_turn);
            let before = self.devices[at].work();
            let outcome = self.devices[at].step(turn)?;
            let after = self.devices[at].work();
            executed = match (before, after) {
                (Some(before), Some(after)) if before.blocks_done == after.blocks_done => {
                    let work = after.warp_instructions - before.warp_instructions;
                    held += if stuck_ns >= STUCK_NS { work.max(HELD_TURN) } else { 0 };
                    executed + work
                }
                _ => 0,
            };
            if let (true, Some(grid)) = (executed > limit, &self.devices[at].running) {
                return Err(MachineError::Fault(Box::new(grid.exchanges_for_ever(executed))));
            }
            match outcome {
                Turn::Spun => self.devices[at].spins = true,
                // Its warps poll, and some have not had their turn.
                Turn::ChangedNothing => {}
                Turn::Changed => {
                    (stuck_ns, jump_ns, held) = (0, FIRST_JUMP_NS, 0);
                    // Other kernels may wait for the change.
                    self.devices.iter_mut().for_each(|device| device.spins = false);
                }
            }
        }
    }

    /// Runs all kernels by the choices of `path`.
    fn run_explored(&mut self, path: &Path) -> Result<(), MachineError> {
        let (mut stuck_ns, mut jump_ns) = (0, FIRST_JUMP_NS);
        let mut current = None;
        // A step that was taken: its warps' computations behind it belong to it.
        let mut taken: Option<Step> = None;
        loop {
            let mut computing = true;
            while computing {
                computing = false;
                for device in &mut self.devices {
                    computing |= device.compute(&self.config)?;
                }
            }
            if let Some(step) = taken.take() {
                path.stepped(step.everything);
            }
            let mut actors = vec![];
            for (at, device) in self.devices.iter().enumerate() {
                device.running.iter().for_each(|grid| grid.actors(at, &mut actors));
            }
            if self.devices.iter().all(|device| device.running.is_none()) {
                return Ok(());
            }
            if actors.is_empty() {
                // A store becomes visible to others in the end, and kernels may wait for a
                // deadline.
                path.set_fresh(true);
                let mut goes_on = false;
                for grid in self.devices.iter_mut().filter_map(|device| device.running.as_mut()) {
                    goes_on |= grid.may_go_on()?;
                }
                if !goes_on {
                    if stuck_ns >= STUCK_NS {
                        return Err(MachineError::Stuck(self.stuck()));
                    }
                    self.clock_ns.fetch_add(jump_ns, Ordering::Relaxed);
                    stuck_ns += jump_ns;
                    jump_ns = (jump_ns * 2).min(LONGEST_JUMP_NS);
                }
                continue;
            }
            let last = actors.iter().position(|actor| Some(*actor) == current);
            let actor = actors[path.actor(&actors, last)];
            let (Actor::Warp { device, .. } | Actor::Copy { device, .. }) = actor;
            if let Actor::Warp { .. } = actor {
                current = Some(actor);
            }
            let Some(grid) = &mut self.devices[device].running else { continue };
            let step = grid.take_step(actor)?;
            if step.changed {
                (stuck_ns, jump_ns) = (0, FIRST_JUMP_NS);
                path.set_fresh(false);
                let running = self.devices.iter_mut().filter_map(|device| device.running.as_mut());
                running.for_each(Grid::poll_again);
            }
            taken = Some(step);
        }
    }

    /// The waits of all devices whose kernels run.
    fn waits(&self) -> Vec<(usize, StuckReport)> {
        let running = self.devices.iter().enumerate();
        running.filter_map(|(at, device)| Some((at, device.running.as_ref()?.stuck_report()))).collect()
    }

    fn stuck(&self) -> String {
        self.waits().into_iter().map(|(at, report)| format!("\ndevice {at}: {report}")).collect()
    }

    /// A hang as a fault, at the place of the first wait.
    fn hang(&self) -> Option<Fault> {
        let waits = self.waits();
        let (at, report, first) =
            waits.iter().find_map(|(at, report)| Some((*at, report, report.warps.first()?)))?;
        let device = self.devices[at].number;
        let StuckWarp { block, warp, at: place, .. } = first.clone();
        let (kernel, kind) = (report.kernel.clone(), FaultKind::Hang(waits));
        Some(Fault {
            kernel,
            device,
            block,
            warp,
            lane: None,
            at: place,
            kind,
            address: vec![],
            traces: vec![],
        })
    }
}

/// The outcome of a device's turn.
enum Turn {
    /// Something visible to others has changed, or a warp computed.
    Changed,
    ChangedNothing,
    /// All warps have polled since the last change.
    Spun,
}

impl Device {
    /// Starts the next kernel, if none runs.
    fn start(&mut self, config: &DeviceConfig) -> Result<(), MachineError> {
        if self.running.is_some() {
            return Ok(());
        }
        let Some(launch) = self.queue.pop_front() else { return Ok(()) };
        self.past.join(&launch.past);
        let order = self.timeline.map(|timeline| (timeline, &self.past));
        let Launch { residency, kernel, shape, params, memory: arguments, .. } = launch;
        self.arguments = arguments;
        let memory = self.memory.clone();
        let grid = Grid::launch(residency, kernel, memory, config, shape, &params, order)?;
        self.running = Some(grid.on_device(self.number));
        self.spins = false;
        Ok(())
    }

    /// The work of the running kernel so far.
    fn work(&self) -> Option<Stats> {
        self.running.as_ref().map(Grid::stats)
    }

    fn step(&mut self, turn: u64) -> Result<Turn, MachineError> {
        let Some(grid) = &mut self.running else { return Ok(Turn::Changed) };
        let before = grid.changes();
        Ok(match grid.step(turn)? {
            Progress::Spinning => Turn::Spun,
            Progress::Running if grid.changes() == before => Turn::ChangedNothing,
            Progress::Running => Turn::Changed,
            Progress::Done => {
                self.end();
                Turn::Changed
            }
        })
    }

    /// The kernel that runs has ended.
    fn end(&mut self) {
        self.end_collection();
        if let Some(grid) = self.running.take() {
            self.past = grid.past();
        }
        self.arguments.clear();
    }

    /// Collects the reports of the running kernel, which does not continue.
    fn end_collection(&mut self) {
        if let Some(grid) = &self.running {
            Report::merge(&mut self.collected, grid.collected().to_vec());
        }
    }

    /// In an exploration: starts the next kernel if none runs, and lets its warps compute up to
    /// their next steps. True if a kernel has ended before another one.
    fn compute(&mut self, config: &DeviceConfig) -> Result<bool, MachineError> {
        if self.running.is_none() {
            self.start(config)?;
            self.running.iter_mut().for_each(Grid::begin_exploration);
        }
        let Some(grid) = &mut self.running else { return Ok(false) };
        let ended = grid.compute()?;
        if ended {
            self.end();
        }
        Ok(ended && !self.queue.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = ".version 8.4\n.target sm_90\n.address_size 64\n";

    /// Kernels with one address as parameter: `add` adds 1 to its word, `write` stores 7 and sets a
    /// flag beside it, and `wait` polls that flag and adds 1 to the word. Each thread of `row` adds 1
    /// to a word of its own.
    fn module() -> Module {
        let kernel = |name: &str, body: &str| {
            format!(
                ".visible .entry {name}(.param .u64 at)\n{{\n.reg .pred %p;\n.reg .b32 %r<3>;\n.reg .b64 %rd<2>;\n\
                 ld.param.u64 %rd1, [at];\n{body}\nret;\n}}\n"
            )
        };
        let add = "ld.global.u32 %r1, [%rd1];\nadd.u32 %r1, %r1, 1;\nst.global.u32 [%rd1], %r1;";
        let write = "mov.u32 %r1, 7;\nst.global.u32 [%rd1], %r1;\nmov.u32 %r2, 1;\nst.release.sys.global.u32 [%rd1+4], %r2;";
        let wait = format!(
            "L:\nld.acquire.sys.global.u32 %r2, [%rd1+4];\nsetp.eq.u32 %p, %r2, 0;\n@%p bra L;\n{add}"
        );
        let row = "mov.u32 %r1, %tid.x;\nmad.wide.u32 %rd1, %r1, 4, %rd1;\nld.global.u32 %r1, [%rd1];\n\
                   add.u32 %r1, %r1, 1;\nst.global.u32 [%rd1], %r1;";
        let kernels = [kernel("add", add), kernel("write", write), kernel("wait", &wait), kernel("row", row)];
        Module::parse(&format!("{HEAD}{}", kernels.concat())).unwrap()
    }

    const ONE: GridConfig = GridConfig::new(1, 1, 0);

    #[test]
    fn kernels_of_a_device_run_one_behind_the_other() {
        let module = module();
        for mut machine in [Machine::new(1), Machine::seeded(1, 3), Machine::checked(1, 3)] {
            let word = machine.upload(0, "word", &[5u32]).unwrap();
            for _ in 0..3 {
                machine.launch_with(0, &module, "add", ONE, &[&word]).unwrap();
            }
            machine.run().unwrap();
            assert_eq!(word.download().unwrap(), [8]);
        }
    }

    #[test]
    fn devices_exchange_words_through_a_mapping() {
        let module = module();
        crate::for_each_seed(20, |seed| {
            let mut machine = Machine::checked(2, seed);
            let words = machine.upload(0, "words", &[0u32, 0]).unwrap();
            let peer = machine.map(1, &words).unwrap();
            machine.launch_with(0, &module, "wait", ONE, &[&words]).unwrap();
            machine.launch_with(1, &module, "write", ONE, &[&peer]).unwrap();
            machine.run().unwrap();
            assert_eq!(words.download().unwrap(), [8, 1]);
        });
    }

    #[test]
    fn kernels_of_two_devices_race() {
        let module = module();
        let mut machine = Machine::checked(2, 1);
        let word = machine.upload(0, "word", &[0u32, 0]).unwrap();
        let peer = machine.map(1, &word).unwrap();
        machine.launch_with(0, &module, "add", ONE, &[&word]).unwrap();
        machine.launch_with(1, &module, "add", ONE, &[&peer]).unwrap();
        let error = machine.run().unwrap_err();
        assert!(matches!(error, MachineError::Fault(_)), "{error}");
        for part in [
            "data race in global memory at 'word of device 0' + 0x0",
            "'add' of device 0, block",
            "'add' of device 1, block",
        ] {
            assert!(error.to_string().contains(part), "{error}");
        }
        assert_eq!(format!("{error:?}"), error.to_string());
    }

    #[test]
    fn faults_name_the_device_where_there_are_several() {
        let module = module();
        for (devices, named) in [(1, false), (2, true)] {
            let mut machine = Machine::new(devices);
            let word = machine.upload(0, "word", &[0u32, 0]).unwrap();
            machine.launch_with(devices - 1, &module, "add", ONE, &[&(word.addr() + 4096)]).unwrap();
            let error = machine.run().unwrap_err().to_string();
            assert_eq!(error.contains("in kernel 'add' of device 1, block [0, 0, 0]"), named, "{error}");
            assert_eq!(error.contains("in kernel 'add', block [0, 0, 0]"), !named, "{error}");
        }
    }

    /// The test is for miri, which reports a data race of Rust's memory model.
    #[test]
    fn accesses_of_kernels_in_several_threads_are_no_data_race_of_rust_s() {
        let (module, owner) = (module(), Machine::new(1));
        let words = owner.upload(0, "words", &[0u32; 32]).unwrap();
        let run = |kernel: &str, grid| {
            let mut machine = Machine::new(1);
            let shared = machine.memory(0).unwrap().share(&words.region).unwrap();
            machine.launch_with(0, &module, kernel, grid, &[&shared.addr()]).unwrap();
            machine.run().unwrap();
        };
        let row = GridConfig::new(1, 32, 0);
        std::thread::scope(|threads| {
            threads.spawn(|| run("row", row));
            threads.spawn(|| run("row", row));
            threads.spawn(|| run("write", ONE));
        });
        let words = words.download().unwrap();
        assert!((1..=9).contains(&words[0]) && (1..=3).contains(&words[1]), "{words:?}");
        assert!(words[2..].iter().all(|word| [1, 2].contains(word)), "{words:?}");
    }

    #[test]
    fn a_wait_without_end_is_reported_and_the_machine_continues() {
        let module = module();
        let mut machine = Machine::new(2);
        let words = machine.upload(0, "words", &[0u32, 0]).unwrap();
        machine.launch_with(0, &module, "wait", ONE, &[&words]).unwrap();
        let error = machine.run().unwrap_err().to_string();
        assert!(error.contains("only wait") && error.contains("device 0"), "{error}");
        machine.launch_with(0, &module, "add", ONE, &[&words]).unwrap();
        machine.run().unwrap();
        assert_eq!(words.download().unwrap(), [1, 0]);
    }

    #[test]
    fn grids_that_poll_for_longer_than_a_turn_are_a_hang() {
        let module = module();
        let mut machine = Machine::new(4).with_longest_turn(4);
        let words = machine.upload(0, "words", &[0u32, 0]).unwrap();
        let maps: Vec<_> = (1..4).map(|at| machine.map(at, &words).unwrap()).collect();
        for (at, words) in [&words].into_iter().chain(&maps).enumerate() {
            machine.launch_with(at, &module, "wait", GridConfig::new(32, 64, 0), &[words]).unwrap();
        }
        let error = machine.run().unwrap_err().to_string();
        assert!(error.contains("only wait") && error.contains("device 3"), "{error}");
    }

    #[test]
    fn an_iterator_without_an_end_has_too_many_numbers() {
        let machine = Machine::new(1);
        let out = machine.upload(0, "out", &[7u32; 3]).unwrap();
        let error = out.expect(std::iter::repeat(7)).unwrap_err().to_string();
        assert!(error.contains("'out' has 3 numbers, 4 were expected"), "{error}");
        let error = out.expect([7; 9]).unwrap_err().to_string();
        assert!(error.contains("9 were expected"), "{error}");
    }

    #[test]
    fn a_machine_frees_the_variables_of_its_modules() {
        let module = Module::parse(&format!(
            "{HEAD}.global .u32 counter = 5;\n.visible .entry get(.param .u64 out)\n{{\n.reg .b32 %r<2>;\n.reg .b64 %rd<2>;\n\
             ld.param.u64 %rd1, [out];\nld.global.u32 %r1, [counter];\nst.global.u32 [%rd1], %r1;\nret;\n}}\n"
        ))
        .unwrap();
        let checker = Checker::new(CheckConfig::default());
        let spaces: Vec<_> = (0..2)
            .map(|_| {
                let memory = Memory::checked(1, Some(checker.clone()));
                let region = memory.variables(&module).unwrap().unwrap();
                let space = std::sync::Arc::downgrade(&region);
                drop(region);
                assert!(space.upgrade().is_some(), "variables keep their values between launches");
                drop(memory);
                space
            })
            .collect();
        assert!(spaces.iter().all(|space| space.upgrade().is_none()), "nothing refers to them any more");
        let mut machine = Machine::checked(1, 1);
        let out = machine.alloc::<u32>(0, "out", 1).unwrap();
        machine.launch_with(0, &module, "get", ONE, &[&out]).unwrap();
        machine.run().unwrap();
        assert_eq!(out.download().unwrap(), [5]);
    }

    #[test]
    fn arrays_may_be_filled_and_read_in_other_threads() {
        let module = module();
        let mut machine = Machine::checked(1, 1);
        let word = machine.alloc::<u32>(0, "word", 1).unwrap();
        std::thread::scope(|scope| scope.spawn(|| word.upload(&[5]).unwrap()).join().unwrap());
        machine.launch_with(0, &module, "add", ONE, &[&word]).unwrap();
        machine.run().unwrap();
        let words = std::thread::scope(|scope| scope.spawn(|| word.download().unwrap()).join().unwrap());
        assert_eq!(words, [6]);
    }

    #[test]
    fn parts_that_are_named_again_and_again_stay_few() {
        let module = module();
        let mut machine = Machine::checked(2, 1);
        let heap = machine.upload(0, "heap", &[0u32; 64]).unwrap();
        for round in 0..200_000 {
            heap.slice(round % 64..round % 64 + 1, "row").unwrap();
        }
        let row = heap.slice(3..5, "last").unwrap();
        let peer = machine.map(1, &row).unwrap();
        machine.launch_with(0, &module, "add", ONE, &[&row]).unwrap();
        machine.launch_with(1, &module, "add", ONE, &[&peer]).unwrap();
        let error = machine.run().unwrap_err().to_string();
        assert!(error.contains("+ 0xc (last[0])"), "{error}");
    }

    #[test]
    fn missing_devices_and_kernels_are_named() {
        let mut machine = Machine::new(1);
        let error = machine.alloc::<u32>(1, "x", 1).unwrap_err().to_string();
        assert_eq!(error, "device 1 of a machine with 1: they are numbered from 0");
        let error = machine.launch(0, &module(), "sub", ONE, &[0; 8]).unwrap_err().to_string();
        assert_eq!(error, "the module has no kernel 'sub'; it has add, row, wait, write");
        let several = module().find("a").unwrap_err().to_string();
        assert_eq!(several, "2 kernels of the module have [\"a\"] in their name: add, wait");
        assert_eq!(module().find("w*ait").unwrap().name(), "wait");
        let call = |arguments: &[&dyn Argument]| {
            let module = module();
            Machine::new(1).launch_with(0, &module, "add", ONE, arguments).unwrap_err().to_string()
        };
        assert_eq!(call(&[]), "kernel 'add' takes 1 arguments, 0 were given\n  parameter 0: 8 bytes, 'at'");
        let text =
            "parameter 0 of kernel 'add' has 8 bytes, its argument has 4\n  parameter 0: 8 bytes, 'at'";
        assert_eq!(call(&[&5u32]), text);
        let array = machine.alloc::<half::bf16>(0, "x", 2).unwrap();
        array.upload(&[half::bf16::ONE; 2]).unwrap();
        assert!(!array.is_empty() && array.len() == 2);
        assert_eq!(array.download().unwrap(), [half::bf16::ONE; 2]);
        assert!(array.upload(&[half::bf16::ONE; 5000]).is_err());
    }

    #[test]
    fn a_wrong_array_names_its_first_wrong_number_and_who_wrote_it() {
        let module = module();
        let mut machine = Machine::checked(1, 1);
        let words = machine.upload(0, "words", &[0u32; 33]).unwrap();
        machine.launch_with(0, &module, "row", GridConfig::new(1, 32, 0), &[&words]).unwrap();
        machine.run().unwrap();
        let right = [[1; 32].as_slice(), &[0]].concat();
        words.expect(right.iter().copied()).unwrap();
        let error = |expected: &[u32]| words.expect(expected.iter().copied()).unwrap_err().to_string();
        let wrong = error(&[[1; 30].as_slice(), &[5; 3]].concat());
        let start = "3 of 33 numbers of 'words' are wrong, the first at 30: 1, expected 5\n  \
                     last written by a weak write in kernel 'row', block [0, 0, 0], warp 0, lane 30";
        assert!(wrong.starts_with(start), "{wrong}");
        let wrong = error(&[[1; 32].as_slice(), &[1]].concat());
        assert!(
            wrong.contains("1 of 33 numbers of 'words' is wrong, the first at 32: 0, expected 1\n"),
            "{wrong}"
        );
        assert!(wrong.contains("\n  last written by no kernel"), "{wrong}");
        assert_eq!(error(&right[..32]), "'words' has 33 numbers, 32 were expected");
        let longer = error(&[2; 40]);
        let start = "'words' has 33 numbers, 40 were expected; 33 of the first 33 are wrong, the first at 0: 1, expected 2\n";
        assert!(longer.starts_with(start), "{longer}");
        // Far from what kernels have written.
        let other = machine.alloc::<u32>(0, "other", 2).unwrap();
        let poison = other.download().unwrap()[0];
        let unwritten = other.expect([!poison, 0]).unwrap_err();
        let MachineError::Mismatch(unwritten) = unwritten else { panic!("{unwritten}") };
        let first = unwritten[0].first.clone().unwrap();
        assert_eq!((first.index, first.actual), (0, poison.to_string()));
        assert_eq!(first.written.as_deref(), Some("nothing has written it"));
        other.upload(&[5, 5]).unwrap();
        let uploaded = other.expect([5, 6]).unwrap_err().to_string();
        let text =
            "1 of 2 numbers of 'other' is wrong, the first at 1: 5, expected 6\n  last written by no kernel";
        assert_eq!(uploaded, text);
    }

    #[test]
    fn expected_numbers_are_compared_bit_by_bit() {
        let machine = Machine::new(1);
        let other_nan = f32::from_bits(f32::NAN.to_bits() ^ 1);
        let array = machine.upload(0, "x", &[0.0, f32::NAN]).unwrap();
        array.expect([0.0, f32::NAN]).unwrap();
        // Fast mode tracks no writes.
        let text = "1 of 2 numbers of 'x' is wrong, the first at 0: 0.0, expected -0.0";
        assert_eq!(array.expect([-0.0, f32::NAN]).unwrap_err().to_string(), text);
        let text =
            "1 of 2 numbers of 'x' is wrong, the first at 1: NaN (0x7fc00000), expected NaN (0x7fc00001)";
        assert_eq!(array.expect([0.0, other_nan]).unwrap_err().to_string(), text);
    }

    #[test]
    fn arrays_whose_bytes_are_no_number_find_no_memory() {
        let machine = Machine::new(1);
        for len in [1 << 61, (1 << 61) + 1, usize::MAX] {
            let error = machine.alloc::<u64>(0, "x", len).unwrap_err();
            let out_of_memory = |error: &MemoryError| matches!(error, MemoryError::OutOfMemory { .. });
            assert!(matches!(&error, MachineError::Memory(error) if out_of_memory(error)), "{error}");
        }
    }

    #[test]
    fn kernels_are_found_by_parts_of_their_names() {
        let module = module();
        assert_eq!(module.kernel_like(&["wr", "te"]).unwrap().name(), "write");
        let error = |parts: &[&str]| module.kernel_like(parts).unwrap_err().to_string();
        assert_eq!(error(&["d", "x"]), "0 kernels of the module have [\"d\", \"x\"] in their name: ");
        assert_eq!(error(&["i"]), "2 kernels of the module have [\"i\"] in their name: wait, write");
    }

    #[test]
    fn slices_are_parts_of_their_array_with_names_of_their_own() {
        let module = module();
        let mut machine = Machine::checked_with(2, 1, CheckConfig::collecting());
        let heap = machine.symmetric("heap", &[0u32; 12]).unwrap();
        let (flags, data) =
            (heap.of(0).slice(2..4, "flags").unwrap(), heap.of(0).slice(4..12, "data").unwrap());
        assert_eq!((flags.len(), data.len()), (2, 8));
        assert_eq!(data.addr(), heap.of(0).addr() + 16);
        data.upload(&[7, 8]).unwrap();
        heap.of(0).expect([0, 0, 0, 0, 7, 8, 0, 0, 0, 0, 0, 0]).unwrap();
        let inner = data.slice(1..3, "inner").unwrap();
        inner.expect([8, 0]).unwrap();
        let error = |error: MachineError| error.to_string();
        let text = "numbers 2..9 of 'data of heap of device 0', an array of 8";
        assert_eq!(error(data.slice(2..9, "x").unwrap_err()), text);
        assert_eq!(error(data.download_range(2..9).unwrap_err()), text);
        let text =
            "3 numbers for an array of 2 in 'flags of heap of device 0'; upload at most as many as it has";
        assert_eq!(error(flags.upload(&[1; 3]).unwrap_err()), text);
        let text = "1 of 2 numbers of 'inner of heap of device 0' is wrong, the first at 1: 0, expected 1";
        assert!(error(inner.expect([8, 1]).unwrap_err()).starts_with(text));
        // Both devices write the same number, which the report names by the innermost slice.
        let peer = machine.map(1, &inner).unwrap();
        assert_eq!((peer.len(), peer.addr() % 4096), (2, inner.addr() % 4096));
        machine.launch_with(0, &module, "add", ONE, &[&inner]).unwrap();
        machine.launch_with(1, &module, "add", ONE, &[&peer]).unwrap();
        machine.launch_with(0, &module, "write", ONE, &[&flags]).unwrap();
        drop(flags);
        machine.run().unwrap();
        let text = machine.reports()[0].fault.to_string();
        assert!(text.contains("'heap of device 0' + 0x14 (inner[0])"), "{text}");
    }

    #[test]
    fn random_numbers_depend_on_the_seed_alone_and_change_no_schedule() {
        let mut machine = Machine::seeded(1, 5);
        assert_eq!((machine.seed(), Machine::new(1).seed()), (5, 0));
        let schedule = machine.rng.clone().next();
        let drawn: Vec<i64> = (0..100).map(|_| machine.random(-2..3)).collect();
        assert_eq!(machine.rng.next(), schedule);
        let same = &mut Machine::checked(2, 5);
        assert!(drawn.iter().all(|number| *number == same.random(-2..=2)));
        assert!((-2..3).all(|number| drawn.contains(&number)), "{drawn:?}");
        assert_eq!((machine.random(7..8), machine.random(i64::MAX..)), (7, i64::MAX));
        assert_ne!(machine.random(..), machine.random(..));
    }

    #[test]
    fn arrays_of_a_launch_live_as_long_as_its_kernel() {
        let module = module();
        let mut machine = Machine::checked(2, 1);
        let words = machine.symmetric::<u32>("words", &[0, 0]).unwrap();
        let peer = &words.on(0)[1];
        machine.launch_with(0, &module, "write", ONE, &[peer]).unwrap();
        machine.launch_with(1, &module, "wait", ONE, &[words.of(1)]).unwrap();
        let dropped = machine.upload(0, "dropped", &[1u32]).unwrap();
        machine.launch_with(0, &module, "add", ONE, &[&dropped]).unwrap();
        drop(dropped);
        machine.run().unwrap();
        assert_eq!(words.of(1).download().unwrap(), [8, 1]);
        assert_eq!(words.of(0).download().unwrap(), [0, 0]);
        assert_eq!(words.addrs(1)[1], words.of(1).addr());
    }

    #[test]
    fn a_usize_takes_the_size_of_its_parameter_where_it_fits() {
        let params = [8, 4, 2, 1].map(|bytes| format!(".param .u{} p{bytes}", 8 * bytes)).join(", ");
        let kernel = format!("{HEAD}.visible .entry k({params}, .param .align 8 .b8 s[24]) {{ ret; }}");
        let module = Module::parse(&kernel).unwrap();
        let kernel = module.find("k").unwrap();
        struct Structure([u8; 24]);
        impl Argument for Structure {
            fn pack(&self, params: &mut Vec<u8>) {
                params.extend_from_slice(&self.0);
            }
        }
        let structure = [0; 24];
        let pack = |numbers: [&dyn Argument; 4]| {
            let [a, b, c, d] = numbers;
            kernel.pack(&[a, b, c, d, &Structure(structure)])
        };
        let bytes = pack([&usize::MAX, &0xffff_fffeusize, &0xfffdusize, &0xfcusize]).unwrap();
        let number =
            |at: usize, len: usize| bytes[at..at + len].iter().rev().fold(0, |n, b| n << 8 | u64::from(*b));
        assert_eq!(
            [(0, 8), (8, 4), (12, 2), (14, 1)].map(|(at, len)| number(at, len)),
            [u64::MAX, 0xffff_fffe, 0xfffd, 0xfc]
        );
        // Negative numbers in two's complement.
        let negative = pack([&-1isize, &-2isize, &-3isize, &-4isize]).unwrap();
        assert_eq!(negative[..15], bytes[..15]);
        assert_eq!(
            kernel.pack(&[&[usize::MAX, 0xffff_fffe, 0xfffd, 0xfc], &Structure(structure)]).unwrap(),
            bytes
        );
        let lowest = pack([&isize::MIN, &-0x8000_0000isize, &-0x8000isize, &-0x80isize]).unwrap();
        assert_eq!((lowest[7], lowest[11], lowest[13], lowest[14]), (0x80, 0x80, 0x80, 0x80));
        let error = |numbers: &[&dyn Argument; 4]| pack(*numbers).unwrap_err().to_string();
        for (place, number) in [(1, 1usize << 32), (2, 1 << 16), (3, 1 << 8)] {
            let mut numbers: [&dyn Argument; 4] = [&0usize; 4];
            numbers[place] = &number;
            let bytes = 8 >> place;
            let start = format!("parameter {place} of kernel 'k' has {bytes} bytes, too few for {number}\n");
            assert!(error(&numbers).starts_with(&start), "{}", error(&numbers));
            let below = -(1isize << (8 * bytes - 1)) - 1;
            let mut numbers: [&dyn Argument; 4] = [&0usize; 4];
            numbers[place] = &below;
            assert!(error(&numbers).contains(&format!("too few for {below}\n")), "{}", error(&numbers));
        }
        // A number with a size of its own keeps it.
        let other = error(&[&0usize, &0u64, &0usize, &0usize]);
        assert!(other.starts_with("parameter 1 of kernel 'k' has 4 bytes, its argument has 8\n"), "{other}");
        let other = kernel.pack(&[&[0usize; 5]]).unwrap_err().to_string();
        assert!(other.starts_with("parameter 4 of kernel 'k' has 24 bytes, its argument has 8\n"), "{other}");
    }

    #[test]
    fn an_array_of_numbers_is_a_parameter_for_each() {
        let body = "ld.param.u32 %r1, [b];\nld.param.u32 %r2, [c];\nld.param.u64 %rd1, [at];\nsub.u32 %r1, %r1, %r2;\n\
                    st.global.u32 [%rd1], %r1;\nret;";
        let kernel = format!(
            "{HEAD}.visible .entry sub(.param .u32 b, .param .u32 c, .param .u64 at)\n{{\n.reg .b32 %r<3>;\n\
             .reg .b64 %rd<2>;\n{body}\n}}\n"
        );
        let module = Module::parse(&kernel).unwrap();
        let mut machine = Machine::new(1);
        let out = machine.alloc::<u32>(0, "out", 1).unwrap();
        machine.launch_with(0, &module, "sub", ONE, &[&[9u32, 4], &out]).unwrap();
        machine.run().unwrap();
        assert_eq!(out.download().unwrap(), [5]);
        let error = machine.launch_with(0, &module, "sub", ONE, &[&[9u32, 4, 1], &out]).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("kernel 'sub' takes 3 arguments, 4 were given\n"), "{text}");
    }

    #[test]
    fn parameters_that_a_compiler_has_named_are_numbers_and_sizes_in_errors() {
        let name = "_Z5scalePfj";
        let kernel = format!(
            "{HEAD}.visible .entry {name}(.param .u64 {name}_param_0, .param .u32 {name}_param_1) {{ ret; }}\n"
        );
        let module = Module::parse(&kernel).unwrap();
        let call = |arguments: &[&dyn Argument]| {
            Machine::new(1).launch_with(0, &module, name, ONE, arguments).unwrap_err().to_string()
        };
        let lines = "\n  parameter 0: 8 bytes\n  parameter 1: 4 bytes";
        let readable = "scale(float*, unsigned int)";
        let count = format!("kernel '{readable}' takes 2 arguments, 1 were given{lines}");
        assert_eq!(call(&[&5u64]), count);
        let size = format!("parameter 1 of kernel '{readable}' has 4 bytes, its argument has 8{lines}");
        assert_eq!(call(&[&5u64, &5u64]), size);
    }
}

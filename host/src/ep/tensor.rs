//! Device tensors: an address with a dtype and a shape, checked before any launch.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

use bytemuck::Pod;

use super::core::{Arena, is_same_gpu, named};
use crate::driver::{Device, DevicePtr, Memory, MemoryKind, Outcome, Stream};
use crate::error::{Error, Result};
use crate::lock::lock;

/// Element type of a [`Tensor`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// 16-bit brain float.
    Bf16,
    /// 32-bit float.
    F32,
    /// 8-bit float, 4 exponent and 3 mantissa bits; moved as bytes.
    Fp8E4m3,
    /// Signed 64-bit integer.
    I64,
    /// Signed 32-bit integer.
    I32,
    /// 0 or 1 in a byte.
    Bool,
    /// 16-bit float, 5 exponent and 10 mantissa bits.
    F16,
    /// 8-bit float, 5 exponent and 2 mantissa bits; moved as bytes.
    Fp8E5m2,
    /// 8-bit exponent, a power of two: the scales of the OCP Microscaling formats. Moved as bytes.
    Ue8m0,
    /// Two 4-bit floats in a byte, each of 2 exponent bits and 1 mantissa bit; moved as bytes.
    Fp4E2m1x2,
    /// Unsigned 8-bit integer, or a byte of anything.
    U8,
}

impl DType {
    pub(super) const ALL: [DType; 11] = [
        DType::Bf16,
        DType::F32,
        DType::Fp8E4m3,
        DType::I64,
        DType::I32,
        DType::Bool,
        DType::F16,
        DType::Fp8E5m2,
        DType::Ue8m0,
        DType::Fp4E2m1x2,
        DType::U8,
    ];

    /// A number below 16, by which ranks compare what they send.
    pub(super) const fn code(self) -> u32 {
        self as u32
    }

    /// The type of this code.
    pub(super) fn of_code(code: u32) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.code() == code)
    }

    /// Bytes per element.
    pub const fn size(self) -> u64 {
        match self {
            DType::Bf16 | DType::F16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::Fp8E4m3 | DType::Fp8E5m2 | DType::Ue8m0 | DType::Fp4E2m1x2 => 1,
            DType::Bool | DType::U8 => 1,
            DType::I64 => 8,
        }
    }

    /// The name used in errors and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            DType::Bf16 => "bf16",
            DType::F32 => "f32",
            DType::Fp8E4m3 => "fp8",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::Bool => "bool",
            DType::F16 => "f16",
            DType::Fp8E5m2 => "fp8_e5m2",
            DType::Ue8m0 => "ue8m0",
            DType::Fp4E2m1x2 => "fp4",
            DType::U8 => "u8",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A host type whose values can be copied to and from tensors: [`bf16`](half::bf16),
/// [`f16`](half::f16), `f32`, `i64` and `i32` of the dtypes of their names, the bits of a bf16 as
/// `u16`, and all types of one byte as `u8`. No other type can implement it: copies rely on the size
/// of its dtype.
pub trait Element: Pod + sealed::Sealed {
    /// The dtype of a [`TypedTensor`] of this type.
    const DTYPE: DType;
}

/// Whether a tensor of `dtype` holds values of type `T`.
fn fits<T: Element>(dtype: DType) -> bool {
    dtype == T::DTYPE || T::DTYPE.size() == 1 && dtype.size() == 1
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($ty:ty: $dtype:ident;)*) => {
        $(
            impl sealed::Sealed for $ty {}
            impl Element for $ty {
                const DTYPE: DType = DType::$dtype;
            }
            const _: () = assert!(size_of::<$ty>() as u64 == DType::$dtype.size());
        )*
    };
}
elements! {
    half::bf16: Bf16;
    half::f16: F16;
    u16: Bf16;
    f32: F32;
    i64: I64;
    i32: I32;
    u8: Fp8E4m3;
}

/// Bytes that a row has less than.
const MOST_ROW_BYTES: u64 = 1 << 24;

/// Checks that rows of `elements` can be moved in units of 16 bytes, and are short enough for the
/// words by which ranks compare them. `of`: the tensor that they are of, if any, for the error.
pub fn check_rows_of_16(elements: u64, dtype: DType, of: &str) -> Result<()> {
    let bytes = elements.saturating_mul(dtype.size());
    if bytes != 0 && bytes.is_multiple_of(16) && bytes < MOST_ROW_BYTES {
        return Ok(());
    }
    let value = format!("{elements} x {dtype} ({bytes} bytes per row)");
    let of = if of.is_empty() { String::new() } else { format!("{of}: ") };
    let rule = format!("{of}hidden * element size must be a positive multiple of 16 bytes, below 16 MiB");
    Err(Error::argument("hidden", value, rule))
}

/// Keeps memory of a device alive.
pub trait Owns: fmt::Debug + Send + Sync {
    /// The memory's device. The memory is freed or reused behind all its streams.
    fn device(&self) -> &Device;

    /// The arena of the buffer that reuses the memory, by fences that leave out the streams of
    /// other buffers; none for memory that is freed.
    fn arena(&self) -> Option<&Arc<Arena>> {
        None
    }

    /// The owner of the memory alone, where this one is a right to its contents too. Recordings keep
    /// that one.
    fn memory(&self) -> Option<Owner> {
        None
    }
}

impl Owns for Memory {
    fn device(&self) -> &Device {
        self.device()
    }
}

/// Keeps the memory of a tensor alive.
pub type Owner = Arc<dyn Owns>;

/// A one- or two-dimensional tensor in device memory. Cloning shares the memory; the last clone
/// frees it, unless it was made by [`Tensor::from_raw`].
///
/// A tensor may be dropped while [`Stream`]s of its device still use it: its memory is freed behind
/// all work enqueued on them, those of [`Stream::adopt`] included. Work on a stream without a
/// [`Stream`] is not waited for. Memory given to [`Tensor::from_raw`] is the caller's to keep.
///
/// For `'a` its elements are the holder's. Tensors with memory of their own are `Tensor<'static>`;
/// those of a [`throughput::Received`](crate::throughput::Received) borrow their
/// [`Place`](crate::throughput::Place), which the next dispatch there overwrites.
///
/// ```
/// use epoxide::driver::Stream;
/// use epoxide::driver::virt::{VirtConfig, VirtualGpu};
/// use epoxide::{DType, Tensor, TypedTensor};
/// use epoxide::half::bf16;
///
/// let device = VirtualGpu::new(VirtConfig::default());
/// let stream = Stream::new(&device)?;
///
/// let x = Tensor::from_host(&stream, DType::Bf16, &[2, 8], &[bf16::ONE; 16])?.named("x of layer 3");
/// assert_eq!((x.rows(), x.columns(), x.row_bytes()), (2, 8, 16));
/// assert_eq!(x.to_host::<bf16>(&stream)?, [bf16::ONE; 16]);
/// // Reading it as another type is an error, which has the tensor's name.
/// let error = x.to_host::<f32>(&stream).unwrap_err().to_string();
/// assert!(error.starts_with("x of layer 3 has dtype bf16"));
///
/// // A `TypedTensor` has its dtype in its type.
/// let topk_idx = TypedTensor::from_host(&stream, &[2, 1], &[0i64, 3])?;
/// assert_eq!(topk_idx.dtype(), DType::I64);
/// # Ok::<(), epoxide::Error>(())
/// ```
///
/// [`Tensor::from_raw`] makes a tensor of rows in the memory of a framework or a kernel;
/// [`Tensor::ptr`] is their address for kernels.
#[derive(Clone)]
pub struct Tensor<'a> {
    ptr: DevicePtr,
    dtype: DType,
    shape: Vec<u64>,
    row_stride: u64,
    name: Cow<'static, str>,
    owner: Option<Owner>,
    outcome: Option<Arc<dyn Outcome>>,
    filled: Arc<Mutex<Option<Arc<dyn Outcome>>>>,
    place: PhantomData<&'a ()>,
}

/// A tensor of the caller's, with the outcome of an operation that fills it.
#[derive(Debug)]
pub(crate) struct Filled {
    /// The record of the tensor and all its clones.
    pub tensor: Arc<Mutex<Option<Arc<dyn Outcome>>>>,
    pub of: Arc<dyn Outcome>,
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tensor { name, dtype, shape, ptr, .. } = self;
        write!(
            f,
            "Tensor({name}{}{dtype} {shape:?} at {:#x})",
            if name.is_empty() { "" } else { ": " },
            ptr.0
        )
    }
}

/// Bytes of `[rows]` or `[rows, columns]` elements.
fn bytes_of(dtype: DType, shape: &[u64]) -> Result<u64> {
    if !matches!(shape.len(), 1 | 2) {
        let rule = "must be [rows] or [rows, columns]: multiply further dimensions";
        return Err(Error::argument("shape", format!("{shape:?}"), rule));
    }
    let bytes = shape.iter().try_fold(dtype.size(), |bytes, dim| bytes.checked_mul(*dim));
    bytes.filter(|bytes| *bytes <= i64::MAX as u64).ok_or_else(|| {
        let rule = format!("must have at most 2^63 bytes, as {dtype}");
        Error::argument("shape", format!("{shape:?}"), rule)
    })
}

impl Tensor<'static> {
    /// A tensor with new memory and unspecified contents. `shape` is `[rows]` or `[rows, columns]`.
    ///
    /// # Errors
    /// [`Error::Argument`] where `shape` has no or more than two dimensions, or more than 2^63
    /// bytes, and errors of the driver.
    pub fn alloc(device: &Device, dtype: DType, shape: &[u64]) -> Result<Tensor<'static>> {
        let bytes = bytes_of(dtype, shape)?;
        let memory = Memory::alloc(device, bytes.max(1), MemoryKind::Device, "tensor")?;
        Ok(Tensor::in_memory(memory.ptr(), dtype, shape, Arc::new(memory)))
    }

    /// A tensor of its own memory with the values of `data`.
    ///
    /// # Errors
    /// [`Error::Shape`] where `data` does not have as many elements as `shape`, [`Error::DType`]
    /// where `T` is not of `dtype`, and those of [`Tensor::alloc`].
    pub fn from_host<T: Element>(
        stream: &Stream,
        dtype: DType,
        shape: &[u64],
        data: &[T],
    ) -> Result<Tensor<'static>> {
        let tensor = Tensor::alloc(stream.device(), dtype, shape)?;
        tensor.write(stream, data)?;
        Ok(tensor)
    }
}

impl<'a> Tensor<'a> {
    /// A tensor in memory of another owner, such as a framework.
    ///
    /// The address of rows is a multiple of 16 bytes: rows that a call sends, combines, sums or
    /// copies. Other tensors need the alignment of their elements. Calls return
    /// [`Error::Argument`] otherwise.
    ///
    /// # Safety
    /// `shape` is `[rows]` or `[rows, columns]`. The memory is on the device that the tensor is used
    /// on, and holds `shape` contiguous elements of `dtype`. The memory stays allocated for `'a`, and
    /// until all enqueued work that uses the tensor has ended.
    pub unsafe fn from_raw(ptr: DevicePtr, dtype: DType, shape: &[u64]) -> Tensor<'a> {
        Tensor::new(ptr, dtype, shape, None)
    }

    /// A contiguous tensor inside memory that `owner` keeps alive.
    pub(crate) fn in_memory(ptr: DevicePtr, dtype: DType, shape: &[u64], owner: Owner) -> Tensor<'a> {
        Tensor::new(ptr, dtype, shape, Some(owner))
    }

    fn new(ptr: DevicePtr, dtype: DType, shape: &[u64], owner: Option<Owner>) -> Tensor<'a> {
        // No rows can be of any length.
        let row_stride = shape.get(1).copied().unwrap_or(1).saturating_mul(dtype.size());
        let (shape, name) = (shape.to_vec(), Cow::Borrowed(""));
        let filled = Arc::default();
        Tensor { ptr, dtype, shape, row_stride, name, owner, outcome: None, filled, place: PhantomData }
    }

    /// The same tensor with a name, which errors about it give. Results of a call have the name of
    /// their field, such as `recv_x`.
    pub fn named(mut self, name: impl Into<Cow<'static, str>>) -> Tensor<'a> {
        self.name = name.into();
        self
    }

    /// The same tensor as what operations give in the field `name`.
    pub(crate) fn result(self, name: &'static str, of: &Arc<impl Outcome + 'static>) -> Tensor<'a> {
        Tensor { outcome: Some(of.clone()), ..self.named(name) }
    }

    /// The record of this tensor of the caller's for an operation that is to fill it.
    pub(crate) fn filled(&self, of: &Arc<impl Outcome + 'static>) -> Filled {
        Filled { tensor: self.filled.clone(), of: of.clone() }
    }

    /// The operations that wrote the elements.
    fn outcomes(&self) -> impl Iterator<Item = Arc<dyn Outcome>> {
        let filled = lock(&self.filled).clone();
        self.outcome.clone().into_iter().chain(filled)
    }

    /// The name it was given; empty without one.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its name in errors.
    fn called(&self) -> String {
        if self.name.is_empty() { "tensor".into() } else { self.name.clone().into_owned() }
    }

    /// Its name in errors as this argument of a call.
    fn called_as(&self, argument: &str) -> String {
        if self.name.is_empty() || self.name == argument {
            return argument.into();
        }
        format!("{argument} ({})", self.name)
    }

    /// The same with rows `row_stride` bytes apart.
    pub(crate) fn with_row_stride(mut self, row_stride: u64) -> Tensor<'a> {
        self.row_stride = row_stride;
        self
    }

    /// The owner that keeps its memory alive, if epoxide does.
    pub(crate) fn owner(&self) -> Option<&Owner> {
        self.owner.as_ref()
    }

    /// The same tensor, for callers that ensure its use only while its elements are the holder's.
    pub(super) fn into_static(self) -> Tensor<'static> {
        let Tensor { ptr, dtype, shape, row_stride, name, owner, outcome, filled, place: _ } = self;
        Tensor { ptr, dtype, shape, row_stride, name, owner, outcome, filled, place: PhantomData }
    }

    /// The same tensor with its dtype in the type.
    ///
    /// # Errors
    /// [`Error::DType`] where it has another one.
    pub fn typed<T: Element>(self) -> Result<TypedTensor<'a, T>> {
        if self.dtype == T::DTYPE {
            return Ok(TypedTensor(self, PhantomData));
        }
        let (have, expected) = (self.dtype.to_string(), T::DTYPE.to_string());
        Err(Error::DType { tensor: self.called(), have, expected })
    }

    /// Address of the first element.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// `[rows]` or `[rows, columns]`.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Rows.
    pub fn rows(&self) -> u64 {
        self.shape.first().copied().unwrap_or(0)
    }

    /// Elements per row.
    pub fn columns(&self) -> u64 {
        self.shape.get(1).copied().unwrap_or(1)
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> u64 {
        self.columns().saturating_mul(self.dtype.size())
    }

    /// Bytes from one row to the next; more than [`Tensor::row_bytes`] where a pool pads its rows.
    pub fn row_stride(&self) -> u64 {
        self.row_stride
    }

    /// True when rows follow each other without padding.
    pub fn is_contiguous(&self) -> bool {
        self.row_stride == self.row_bytes() || self.rows() <= 1
    }

    /// Copies the elements to the host, row after row, and waits for it. If an operation of a
    /// buffer gave them, `stream` first waits for the last operation of that buffer, on any stream.
    ///
    /// # Errors
    /// For the result of an operation of a buffer: the error of any operation of that buffer that
    /// has failed by then, such as [`Error::PeerTimeout`]. The elements may be those of an earlier
    /// operation then. For a dispatch whose counts stay on the device, and for its combines, also
    /// the errors of [`Buffer::check_dispatch`](crate::throughput::Buffer::check_dispatch).
    /// [`Error::DType`] where `T` does not fit, [`Error::Argument`] where `stream` is of another
    /// device or under capture, and errors of the driver.
    pub fn to_host<T: Element>(&self, stream: &Stream) -> Result<Vec<T>> {
        self.check_element::<T>()?;
        self.check_stream(stream, "to_host", "read it behind a launch of the recording")?;
        for outcome in self.outcomes() {
            outcome.order_before(stream)?;
        }
        let (rows, row_bytes) = (self.rows() as usize, self.row_bytes() as usize);
        let mut out = vec![T::zeroed(); rows * self.columns() as usize];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut out);
        if bytes.is_empty() {
            return self.check_outcome(stream).map(|()| out);
        }
        if self.is_contiguous() {
            // SAFETY: a tensor's memory is live, and holds its elements.
            unsafe { stream.read(bytes, self.ptr)? };
        } else {
            let stride = self.row_stride as usize;
            let mut padded = vec![0u8; (rows - 1) * stride + row_bytes];
            // SAFETY: as above, from the first row to the end of the last one.
            unsafe { stream.read(&mut padded, self.ptr)? };
            for (to, from) in bytes.chunks_exact_mut(row_bytes).zip(padded.chunks(stride)) {
                to.copy_from_slice(&from[..row_bytes]);
            }
        }
        // The stream has passed what wrote them.
        self.check_outcome(stream).map(|()| out)
    }

    /// The error of the operations that it is a result of. `stream` has passed them.
    fn check_outcome(&self, stream: &Stream) -> Result<()> {
        self.outcomes().try_for_each(|outcome| outcome.check_behind(stream))
    }

    /// Copies elements from the host, row after row, and waits for it. If an operation of a buffer
    /// fills the tensor, the copy runs behind all operations of that buffer so far.
    ///
    /// # Errors
    /// [`Error::DType`] where `T` does not fit, [`Error::Shape`] where `data` has another number of
    /// elements, [`Error::Argument`] where `stream` is of another device or under capture, and
    /// errors of the driver.
    pub fn write<T: Element>(&self, stream: &Stream, data: &[T]) -> Result<()> {
        self.check_element::<T>()?;
        let elements = self.rows() * self.columns();
        if data.len() as u64 != elements {
            return Err(Error::Shape {
                tensor: self.called_as("data"),
                have: vec![data.len() as u64],
                expected: format!("{elements} elements, for shape {:?}", self.shape),
            });
        }
        self.check_stream(stream, "write", "write it before the capture")?;
        for outcome in self.outcomes() {
            outcome.order_before(stream)?;
        }
        let bytes: &[u8] = bytemuck::cast_slice(data);
        if self.is_contiguous() && !bytes.is_empty() {
            // SAFETY: a tensor's memory is live, holds its elements, and only its holder writes it.
            unsafe { stream.write(self.ptr, bytes)? };
        } else if !bytes.is_empty() {
            for (row, from) in bytes.chunks_exact(self.row_bytes() as usize).enumerate() {
                // SAFETY: as above, for one of its rows.
                unsafe { stream.write(self.ptr.add(row as u64 * self.row_stride), from)? };
            }
        }
        // Not before: a write that fails leaves elements of a failed operation.
        *lock(&self.filled) = None;
        Ok(())
    }

    /// An error unless `call` can wait for work of this tensor on `stream`, without a change of the
    /// stream's capture. `remedy`: for one under capture.
    fn check_stream(&self, stream: &Stream, call: &str, remedy: &str) -> Result<()> {
        let device = stream.device();
        if let Some(of) = self.owner.as_ref().map(|owner| owner.device())
            && !is_same_gpu(of, device)
        {
            let rule = format!("{call} takes one of the tensor's device, {}: make one there", named(of));
            return Err(Error::argument("stream", format!("one of {}", named(device)), rule));
        }
        if stream.is_capturing()? {
            let rule = format!("{call} waits for the stream, which only records: {remedy}");
            return Err(Error::argument("stream", "under capture", rule));
        }
        Ok(())
    }

    fn check_element<T: Element>(&self) -> Result<()> {
        if fits::<T>(self.dtype) {
            return Ok(());
        }
        Err(Error::DType {
            tensor: self.called(),
            have: self.dtype.to_string(),
            expected: format!("one that host type {} fits", std::any::type_name::<T>()),
        })
    }

    /// Checks dtype, shape, contiguity and alignment; `dims` are the expected sizes with their
    /// names, `None` for any.
    pub(crate) fn expect(
        &self,
        name: &'static str,
        dtypes: &[DType],
        dims: &[(&str, Option<u64>)],
    ) -> Result<()> {
        self.expect_strided(name, dtypes, dims)?;
        if self.is_contiguous() {
            return Ok(());
        }
        let rule = format!("rows must be contiguous, {} bytes apart; copy them together", self.row_bytes());
        Err(Error::argument(name, format!("row stride {} bytes", self.row_stride), rule))
    }

    /// [`Tensor::expect`] without contiguity.
    pub(crate) fn expect_strided(
        &self,
        name: &'static str,
        dtypes: &[DType],
        dims: &[(&str, Option<u64>)],
    ) -> Result<()> {
        if !dtypes.contains(&self.dtype) {
            let expected = dtypes.iter().map(|d| d.name()).collect::<Vec<_>>().join(" or ");
            return Err(Error::DType {
                tensor: self.called_as(name),
                have: self.dtype.to_string(),
                expected,
            });
        }
        let fits = self.shape.len() == dims.len()
            && self.shape.iter().zip(dims).all(|(have, (_, want))| want.is_none_or(|want| want == *have));
        if !fits {
            let expected = dims.iter().map(|(label, want)| match want {
                Some(want) => format!("{label} = {want}"),
                None => label.to_string(),
            });
            let expected = format!("[{}]", expected.collect::<Vec<_>>().join(", "));
            return Err(Error::Shape { tensor: self.called_as(name), have: self.shape.clone(), expected });
        }
        let align = self.dtype.size();
        if !self.ptr.0.is_multiple_of(align) {
            let rule = format!("the address must be a multiple of {align} bytes");
            return Err(Error::argument(name, format!("{:#x}", self.ptr.0), rule));
        }
        Ok(())
    }

    /// Checks that it shares no byte with `other`, which an operation uses while it writes this
    /// one.
    pub(crate) fn expect_apart(&self, name: &'static str, other: &Tensor<'_>, others: &str) -> Result<()> {
        let bytes = |tensor: &Tensor<'_>| match tensor.rows() {
            0 => tensor.ptr.0..tensor.ptr.0,
            rows => tensor.ptr.0..tensor.ptr.0 + (rows - 1) * tensor.row_stride + tensor.row_bytes(),
        };
        let (own, read) = (bytes(self), bytes(other));
        if own.start.max(read.start) >= own.end.min(read.end) {
            return Ok(());
        }
        let rule = format!(
            "it shares memory with {}, {:#x} to {:#x}, which the call uses as well: give memory of its own",
            other.called_as(others),
            read.start,
            read.end
        );
        Err(Error::argument(name, format!("{:#x} to {:#x}", own.start, own.end), rule))
    }

    /// Checks that rows can be moved in units of 16 bytes, and are short enough for the words by
    /// which ranks compare them.
    pub(crate) fn expect_rows_of_16(&self, name: &'static str) -> Result<()> {
        check_rows_of_16(self.columns(), self.dtype, name)?;
        if !self.ptr.0.is_multiple_of(16) {
            let rule = "the address must be a multiple of 16 bytes";
            return Err(Error::argument(name, format!("{:#x}", self.ptr.0), rule));
        }
        Ok(())
    }
}

/// A [`Tensor`] with its dtype in its type; [`TypedTensor::values`] copies its elements to the
/// host.
pub struct TypedTensor<'a, T>(Tensor<'a>, PhantomData<T>);

impl<'a, T> Clone for TypedTensor<'a, T> {
    fn clone(&self) -> TypedTensor<'a, T> {
        TypedTensor(self.0.clone(), PhantomData)
    }
}

impl<T> fmt::Debug for TypedTensor<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<'a, T> Deref for TypedTensor<'a, T> {
    type Target = Tensor<'a>;

    fn deref(&self) -> &Tensor<'a> {
        &self.0
    }
}

impl<'a, T> From<TypedTensor<'a, T>> for Tensor<'a> {
    fn from(typed: TypedTensor<'a, T>) -> Tensor<'a> {
        typed.0
    }
}

impl<T: Element> TypedTensor<'static, T> {
    /// A tensor of its own memory with the values of `data`.
    ///
    /// # Errors
    /// The same as [`Tensor::from_host`].
    pub fn from_host(stream: &Stream, shape: &[u64], data: &[T]) -> Result<TypedTensor<'static, T>> {
        Ok(TypedTensor(Tensor::from_host(stream, T::DTYPE, shape, data)?, PhantomData))
    }
}

impl<'a, T: Element> TypedTensor<'a, T> {
    /// [`Tensor::from_raw`] with the dtype of `T`.
    ///
    /// # Safety
    /// See there.
    pub unsafe fn from_raw(ptr: DevicePtr, shape: &[u64]) -> TypedTensor<'a, T> {
        // SAFETY: passed on to the caller.
        TypedTensor(unsafe { Tensor::from_raw(ptr, T::DTYPE, shape) }, PhantomData)
    }

    /// [`Tensor::named`].
    pub fn named(self, name: impl Into<Cow<'static, str>>) -> TypedTensor<'a, T> {
        TypedTensor(self.0.named(name), PhantomData)
    }

    /// [`Tensor::result`].
    pub(crate) fn result(self, name: &'static str, of: &Arc<impl Outcome + 'static>) -> TypedTensor<'a, T> {
        TypedTensor(self.0.result(name, of), PhantomData)
    }

    pub(crate) fn in_memory(ptr: DevicePtr, shape: &[u64], owner: Owner) -> TypedTensor<'a, T> {
        TypedTensor(Tensor::in_memory(ptr, T::DTYPE, shape, owner), PhantomData)
    }

    pub(super) fn into_static(self) -> TypedTensor<'static, T> {
        TypedTensor(self.0.into_static(), PhantomData)
    }

    /// [`Tensor::to_host`] with the elements' own type.
    ///
    /// # Errors
    /// See there.
    pub fn values(&self, stream: &Stream) -> Result<Vec<T>> {
        self.to_host(stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::virt::{VirtConfig, VirtualGpu};

    #[test]
    fn errors_give_the_name_of_a_tensor() {
        let device = VirtualGpu::new(VirtConfig::default());
        let stream = Stream::new(&device).unwrap();
        let plain = Tensor::from_host(&stream, DType::F32, &[1, 4], &[1.0f32; 4]).unwrap();
        let named = plain.clone().named("attention output");
        let text = |error: Error| error.to_string();
        assert!(text(plain.to_host::<i32>(&stream).unwrap_err()).starts_with("tensor has dtype f32, "));
        assert!(
            text(named.to_host::<i32>(&stream).unwrap_err()).starts_with("attention output has dtype f32, ")
        );
        let wants =
            |tensor: &Tensor| text(tensor.expect("x", &[DType::Bf16], &[("rows", None)]).unwrap_err());
        assert_eq!(wants(&plain), "x has dtype f32, expected bf16");
        assert_eq!(wants(&named), "x (attention output) has dtype f32, expected bf16");
        let shape = named.write(&stream, &[0.0f32; 3]).unwrap_err();
        assert_eq!(
            text(shape),
            "data (attention output) has shape [3], expected 4 elements, for shape [1, 4]"
        );
        let shape = Tensor::from_host(&stream, DType::F32, &[2, 2], &[0.0f32; 5]).unwrap_err();
        assert_eq!(text(shape), "data has shape [5], expected 4 elements, for shape [2, 2]");
        assert!(format!("{named:?}").starts_with("Tensor(attention output: f32 [1, 4] at "));
    }
}

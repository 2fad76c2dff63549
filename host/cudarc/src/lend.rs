//! Slices as tensors, and tensors as slices.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;

use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop,
};
use epoxide::driver::DevicePtr as Address;
use epoxide::{Element, Error, Result, Tensor, TypedTensor};

use crate::LentStream;
use crate::stream::error;

/// A slice of cudarc's as a tensor, and the guard of its use. It derefs to [`TypedTensor`], and so
/// to [`Tensor`](epoxide::Tensor).
///
/// Dropping it records the use in the slice's events, unless the stream was captured when it was
/// made.
#[must_use = "its drop records the use of the slice: keep it until the call is enqueued"]
pub struct Lent<'a, T> {
    tensor: TypedTensor<'a, T>,
    _guard: Option<SyncOnDrop<'a>>,
}

impl<T> fmt::Debug for Lent<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lent({:?})", self.tensor)
    }
}

impl<'a, T> Deref for Lent<'a, T> {
    type Target = TypedTensor<'a, T>;

    fn deref(&self) -> &TypedTensor<'a, T> {
        &self.tensor
    }
}

impl LentStream {
    /// A slice, view or mutable view that calls on this stream read, as a tensor of `shape`: its
    /// first elements. `u16` is bf16, `u8` fp8. The stream waits for the slice's last write.
    ///
    /// # Safety
    /// Calls that use the tensor run on this stream, or between waits of it, as those of
    /// [`StreamOrder::comm`](epoxide::StreamOrder::comm) do. Either none of them is recorded in a
    /// graph, or the slice outlives the graph and all of its runs. The result is dropped behind the
    /// last of these calls, also where they are given clones of its tensor: its drop records the
    /// use that cudarc waits for.
    ///
    /// # Errors
    /// [`Error::Shape`] where the slice has fewer elements, [`Error::Argument`] where it is of
    /// another context, or of another stream without events that would order the two; errors that
    /// cudarc reports.
    pub unsafe fn input<'a, T: Element>(
        &'a self,
        slice: &'a impl DevicePtr<T>,
        shape: &[u64],
    ) -> Result<Lent<'a, T>> {
        self.check(slice, shape)?;
        let (stream, is_recorded) = self.for_waits()?;
        let (at, guard) = slice.device_ptr(stream);
        // SAFETY: passed on to the caller; the slice has as many elements.
        unsafe { self.lend(at, guard, is_recorded, slice.stream(), shape) }
    }

    /// A slice or mutable view that calls on this stream write, as a tensor of `shape`: its first
    /// elements. The stream waits for all uses of the slice.
    ///
    /// # Safety
    /// The same as [`LentStream::input`].
    ///
    /// # Errors
    /// The same as [`LentStream::input`].
    pub unsafe fn output<'a, T: Element>(
        &'a self,
        slice: &'a mut impl DevicePtrMut<T>,
        shape: &[u64],
    ) -> Result<Lent<'a, T>> {
        self.check(slice, shape)?;
        let (stream, is_recorded) = self.for_waits()?;
        let own = slice.stream().clone();
        let (at, guard) = slice.device_ptr_mut(stream);
        // SAFETY: passed on to the caller; the slice has as many elements.
        unsafe { self.lend(at, guard, is_recorded, &own, shape) }
    }

    fn check<T>(&self, slice: &impl DeviceSlice<T>, shape: &[u64]) -> Result<()> {
        let elements = shape.iter().try_fold(1u64, |all, &size| all.checked_mul(size));
        if elements.is_none_or(|elements| elements > slice.len() as u64) {
            return Err(Error::Shape {
                tensor: "slice".into(),
                have: vec![slice.len() as u64],
                expected: format!("at least as many elements as {shape:?} has"),
            });
        }
        if slice.stream().context() != self.cudarc().context() {
            let value = format!("one of CUDA device {}", slice.stream().context().ordinal());
            let rule = format!(
                "must be of the context of the stream, device {}: allocate it there",
                self.cudarc().context().ordinal()
            );
            return Err(Error::argument("slice", value, rule));
        }
        Ok(())
    }

    /// The stream that waits for a slice's events, and whether this one is captured. A wait in the
    /// capture would be for work outside of it.
    fn for_waits(&self) -> Result<(&CudaStream, bool)> {
        let is_recorded = self.is_capturing()?;
        let waits = self.cudarc().context().is_managing_stream_synchronization();
        Ok((if is_recorded && waits { self.aside()? } else { self.cudarc() }, is_recorded))
    }

    /// # Safety
    /// Those of [`LentStream::input`]; at the address are as many elements as `shape` has.
    unsafe fn lend<'a, T: Element>(
        &self,
        at: u64,
        guard: SyncOnDrop<'a>,
        is_recorded: bool,
        own: &CudaStream,
        shape: &[u64],
    ) -> Result<Lent<'a, T>> {
        if is_recorded {
            // Its drop would record an event in the capture, on which no outside work may wait.
            std::mem::forget(guard);
            // SAFETY: passed on to the caller.
            let tensor = unsafe { TypedTensor::from_raw(Address(at), shape) };
            return Ok(Lent { tensor, _guard: None });
        }
        self.cudarc().context().check_err().map_err(error("cuStreamWaitEvent"))?;
        let is_ordered = match &guard {
            SyncOnDrop::Record(event) => {
                event.is_some() && self.cudarc().context().is_managing_stream_synchronization()
            }
            SyncOnDrop::Sync(_) => true,
        };
        if !is_ordered && own != &**self.cudarc() {
            let rule = "its stream is another one, and it has no events that would order the two (event tracking is \
                        or was off): use its own stream, or turn tracking on before it is allocated";
            return Err(Error::argument("slice", "one of another stream", rule));
        }
        // SAFETY: passed on to the caller.
        let tensor = unsafe { TypedTensor::from_raw(Address(at), shape) };
        Ok(Lent { tensor, _guard: Some(guard) })
    }

    /// Memory of epoxide, such as received rows, as a slice of cudarc, for its kernels. Kernels on
    /// other streams wait for the present work of this one.
    ///
    /// # Safety
    /// Work that uses the slice is enqueued before the result is dropped, on this stream or on one
    /// that this one then waits for.
    ///
    /// # Errors
    /// [`Error::Argument`] where rows have padding between them, as rows of a pool do whose bytes
    /// are no multiple of 128, and while the stream is captured: take the slice before, or give
    /// kernels the address. Errors that cudarc reports.
    pub unsafe fn slice<'a, T: Element>(&self, tensor: &'a TypedTensor<'_, T>) -> Result<LentSlice<'a, T>> {
        if !tensor.is_contiguous() {
            let rule = format!("rows must be contiguous, {} bytes apart, to be a slice", tensor.row_bytes());
            return Err(Error::argument("tensor", format!("row stride {} bytes", tensor.row_stride()), rule));
        }
        if self.is_capturing()? {
            let rule = "a slice has events, which a capture must not wait for: take it before the capture";
            return Err(Error::argument("stream", "captured", rule));
        }
        self.cudarc().context().bind_to_thread().map_err(error("cuCtxSetCurrent"))?;
        let len = (tensor.rows() * tensor.columns()) as usize;
        // SAFETY: the tensor's memory holds so many elements. The slice never frees it: LentSlice
        // gives out views alone, and leaks the slice.
        let slice = unsafe { self.cudarc().upgrade_device_ptr(tensor.ptr().0, len) };
        let mut lent = LentSlice { slice: ManuallyDrop::new(slice), tensor: PhantomData };
        // The tensor's contents are work of this stream's.
        drop(lent.slice.device_ptr_mut(self.cudarc()));
        self.cudarc().context().check_err().map_err(error("cuEventRecord"))?;
        Ok(lent)
    }
}

/// Memory of epoxide's as a slice of cudarc's, which does not free it.
pub struct LentSlice<'a, T> {
    slice: ManuallyDrop<CudaSlice<T>>,
    tensor: PhantomData<&'a Tensor<'a>>,
}

impl<T> fmt::Debug for LentSlice<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LentSlice({} elements)", self.slice.len())
    }
}

impl<T> LentSlice<'_, T> {
    /// The elements, for kernels that read them.
    pub fn view(&self) -> CudaView<'_, T> {
        self.slice.as_view()
    }

    /// The elements, for kernels that write them.
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.slice.as_view_mut()
    }
}

impl<T> Drop for LentSlice<'_, T> {
    fn drop(&mut self) {
        // SAFETY: it is taken once, here.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        // Destroys the events, and leaves the memory to epoxide. The slice's stream waits for its
        // uses.
        slice.leak();
    }
}

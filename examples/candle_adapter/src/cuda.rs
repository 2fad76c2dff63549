//! candle's CUDA device: its tensors are slices of cudarc's, which epoxide reads and writes in
//! place. Nothing is copied, and the host does not wait.

use std::ops::Range;

use candle_core::cuda_backend::CudaStorage;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, Device, Storage, Tensor};
use epoxide::driver::Stream;
use epoxide::{Error, Result, TypedTensor};
use epoxide_cudarc::LentStream;

use crate::adapter::{Adapter, Number, candle, elsewhere, extent};

/// A rank on a GPU.
pub struct Cuda {
    device: CudaDevice,
    candle: Device,
    lent: LentStream,
}

impl Cuda {
    /// A rank on the CUDA device `ordinal`, with a stream of its own for both libraries.
    pub fn new(ordinal: u32) -> Result<Cuda> {
        let device = CudaDevice::new_with_stream(ordinal as usize).map_err(candle)?;
        let lent = LentStream::new(&device.cuda_stream())?;
        Ok(Cuda { candle: Device::Cuda(device.clone()), device, lent })
    }
}

impl Adapter for Cuda {
    fn candle(&self) -> &Device {
        &self.candle
    }

    fn stream(&self) -> &Stream {
        &self.lent
    }

    fn input<T: Number, R>(
        &self,
        tensor: &Tensor,
        call: impl FnOnce(&TypedTensor<'_, T>) -> Result<R>,
    ) -> Result<R> {
        let (storage, layout) = tensor.storage_and_layout();
        let (shape, at) = extent(layout)?;
        let Storage::Cuda(storage) = &*storage else { return Err(elsewhere(tensor.device().location())) };
        let slice = storage.as_cuda_slice::<T>().map_err(candle)?;
        let view = slice.try_slice(at.clone()).ok_or_else(|| outside(at, slice.len()))?;
        // SAFETY: the calls of this program run on the stream, and none is recorded in a graph.
        let lent = unsafe { self.lent.input(&view, &shape)? };
        call(&lent)
    }

    fn output<T: Number, R>(
        &self,
        shape: [u64; 2],
        call: impl FnOnce(&TypedTensor<'_, T>) -> Result<R>,
    ) -> Result<(Tensor, R)> {
        // SAFETY: elements are numbers, of which all bits are one. The memory is used behind its
        // allocation, on the same stream.
        let mut slice = unsafe { self.device.alloc::<T>((shape[0] * shape[1]) as usize) }.map_err(candle)?;
        let result = {
            // SAFETY: as in `input`.
            let lent = unsafe { self.lent.output(&mut slice, &shape)? };
            call(&lent)?
        };
        let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(slice, self.device.clone()));
        let shape = shape.map(|size| size as usize);
        Ok((Tensor::from_storage(storage, &shape[..], BackpropOp::none(), false), result))
    }
}

fn outside(at: Range<usize>, len: usize) -> Error {
    Error::argument("tensor", format!("elements {at:?}"), format!("its storage has {len}"))
}

//! candle's CPU device beside a virtual GPU, whose memory is another one: tensors are copied there
//! and back.

use candle_core::{Device, Storage, Tensor};
use epoxide::driver::Stream;
use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::{Result, TypedTensor};

use crate::adapter::{Adapter, Number, candle, elsewhere, extent};

/// A rank on the CPU.
pub struct Cpu {
    stream: Stream,
}

impl Cpu {
    /// A rank with a virtual GPU of its own.
    pub fn new(rank: u32) -> Result<Cpu> {
        let device = VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() });
        Ok(Cpu { stream: Stream::new(&device)? })
    }
}

impl Adapter for Cpu {
    fn candle(&self) -> &Device {
        &Device::Cpu
    }

    fn stream(&self) -> &Stream {
        &self.stream
    }

    fn input<T: Number, R>(
        &self,
        tensor: &Tensor,
        call: impl FnOnce(&TypedTensor<'_, T>) -> Result<R>,
    ) -> Result<R> {
        let (storage, layout) = tensor.storage_and_layout();
        let (shape, at) = extent(layout)?;
        let Storage::Cpu(storage) = &*storage else { return Err(elsewhere(tensor.device().location())) };
        let values = storage.as_slice::<T>().map_err(candle)?;
        call(&TypedTensor::from_host(&self.stream, &shape, &values[at])?)
    }

    fn output<T: Number, R>(
        &self,
        shape: [u64; 2],
        call: impl FnOnce(&TypedTensor<'_, T>) -> Result<R>,
    ) -> Result<(Tensor, R)> {
        let values = vec![<T as candle_core::WithDType>::from_f64(0.0); (shape[0] * shape[1]) as usize];
        let filled = TypedTensor::from_host(&self.stream, &shape, &values)?;
        let result = call(&filled)?;
        // Waits for the call.
        let values = filled.values(&self.stream)?;
        let shape = shape.map(|size| size as usize);
        let tensor = Tensor::from_vec(values, &shape[..], &Device::Cpu);
        Ok((tensor.map_err(candle)?, result))
    }
}

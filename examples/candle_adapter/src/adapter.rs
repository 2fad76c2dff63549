//! candle's tensors in and out of epoxide's calls. [`Adapter`] is the same for every device of
//! candle's: `cpu.rs` has it for host memory, beside a virtual GPU, `cuda.rs` for GPUs.

use epoxide::driver::Stream;
use epoxide::{Error, Result, TypedTensor};

/// Numbers that both libraries have, on every device.
#[cfg(not(feature = "cuda"))]
pub trait Number: epoxide::Element + candle_core::WithDType {}
#[cfg(not(feature = "cuda"))]
impl<T: epoxide::Element + candle_core::WithDType> Number for T {}

/// Numbers that both libraries have, on every device.
#[cfg(feature = "cuda")]
pub trait Number:
    epoxide::Element + candle_core::WithDType + candle_core::cuda_backend::CudaDType + cudarc::driver::DeviceRepr
{
}
#[cfg(feature = "cuda")]
impl<T> Number for T where
    T: epoxide::Element
        + candle_core::WithDType
        + candle_core::cuda_backend::CudaDType
        + cudarc::driver::DeviceRepr
{
}

/// A rank's device, as candle and as epoxide have it.
pub trait Adapter {
    /// The device of candle's tensors.
    fn candle(&self) -> &candle_core::Device;

    /// The stream of epoxide's calls; on a GPU that of candle's kernels.
    fn stream(&self) -> &Stream;

    /// Gives `call` a contiguous tensor of candle's, of two dimensions, to read.
    fn input<T: Number, R>(
        &self,
        tensor: &candle_core::Tensor,
        call: impl FnOnce(&TypedTensor<'_, T>) -> Result<R>,
    ) -> Result<R>;

    /// A new tensor of candle's, of shape `[rows, columns]`, that `call` fills, and what it gives.
    /// Elements that it leaves out hold anything.
    fn output<T: Number, R>(
        &self,
        shape: [u64; 2],
        call: impl FnOnce(&TypedTensor<'_, T>) -> Result<R>,
    ) -> Result<(candle_core::Tensor, R)>;
}

/// An error of candle's as epoxide's.
pub fn candle(error: candle_core::Error) -> Error {
    Error::Unavailable { what: "candle".into(), reason: error.to_string() }
}

/// The shape of a tensor that epoxide accepts, and the range of its elements in the storage.
pub fn extent(layout: &candle_core::Layout) -> Result<([u64; 2], std::ops::Range<usize>)> {
    let (rows, columns) = layout.shape().dims2().map_err(candle)?;
    let Some((start, end)) = layout.contiguous_offsets() else {
        let value = format!("strides {:?} of {:?}", layout.stride(), layout.dims());
        return Err(Error::argument("tensor", value, "must be contiguous: call contiguous() first"));
    };
    Ok(([rows as u64, columns as u64], start..end))
}

/// An error of a tensor on another device than the adapter's.
pub fn elsewhere(device: candle_core::DeviceLocation) -> Error {
    let rule = "must be on the device of the rank: call to_device() first";
    Error::argument("tensor", format!("on {device:?}"), rule)
}

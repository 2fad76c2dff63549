//! A stream of cudarc's as one of epoxide's.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use cudarc::driver::{CudaStream, DriverError};
use epoxide::driver::cuda::CudaDevice;
use epoxide::driver::{Device, RawStream, Stream};
use epoxide::{Error, Result};

/// A stream of cudarc's that epoxide enqueues work on. It derefs to [`Stream`].
///
/// epoxide uses the stream, and never synchronises or destroys it. The legacy default stream
/// (`CudaContext::default_stream`) works as well, but waits for all others and cannot be captured.
#[derive(Debug)]
pub struct LentStream {
    // Before cudarc's, which it uses.
    stream: Stream,
    cudarc: Arc<CudaStream>,
    /// A stream for waits that must not be captured.
    aside: OnceLock<Arc<CudaStream>>,
}

impl LentStream {
    /// The stream, on the device of its context. The calling thread's context is then cudarc's.
    ///
    /// # Errors
    /// [`Error::Unavailable`] where the context is not the primary one of its device, or the device
    /// is too old for the kernels; errors of the driver.
    pub fn new(stream: &Arc<CudaStream>) -> Result<LentStream> {
        stream.context().bind_to_thread().map_err(error("cuCtxSetCurrent"))?;
        LentStream::on(&CudaDevice::current()?, stream)
    }

    /// The stream, on a device that is open already.
    ///
    /// # Errors
    /// [`Error::Argument`] where the stream is of another device or the device is not an NVIDIA
    /// GPU, [`Error::Unavailable`] where its context is not the primary one; errors of the driver.
    pub fn on(device: &Device, stream: &Arc<CudaStream>) -> Result<LentStream> {
        let (info, ordinal) = (device.info(), stream.context().ordinal());
        if info.is_virtual || info.ordinal as usize != ordinal {
            let rule = format!("it is of CUDA device {ordinal}: open that one, or use LentStream::new");
            return Err(Error::argument("stream", &info.name, rule));
        }
        stream.context().bind_to_thread().map_err(error("cuCtxSetCurrent"))?;
        // An error unless the context is the primary one, which epoxide uses.
        CudaDevice::current()?;
        let raw = RawStream(stream.cu_stream().cast());
        // SAFETY: the stream is of the device's primary context, as was just checked, and `cudarc`
        // below keeps it for as long as the result lives.
        let adopted = unsafe { Stream::adopt(device, raw)? };
        let lent = LentStream { stream: adopted, cudarc: stream.clone(), aside: OnceLock::new() };
        if stream.context().is_managing_stream_synchronization() && !lent.is_capturing()? {
            lent.aside()?;
        }
        Ok(lent)
    }

    /// The device, for buffers.
    pub fn device(&self) -> &Device {
        self.stream.device()
    }

    /// cudarc's stream.
    pub fn cudarc(&self) -> &Arc<CudaStream> {
        &self.cudarc
    }

    /// The stream that gets the waits of a slice while this one is captured.
    pub(crate) fn aside(&self) -> Result<&Arc<CudaStream>> {
        if self.aside.get().is_none() {
            let stream = self.cudarc.context().new_stream().map_err(error("cuStreamCreate"))?;
            // Another thread may have been first: its stream will do.
            let _ = self.aside.set(stream);
        }
        self.aside.get().ok_or_else(|| Error::internal("cuStreamCreate", "no stream was made"))
    }
}

impl Deref for LentStream {
    type Target = Stream;

    fn deref(&self) -> &Stream {
        &self.stream
    }
}

/// An error of cudarc's as epoxide's.
pub fn error(call: &'static str) -> impl Fn(DriverError) -> Error {
    move |error| {
        let name = error.error_name().ok().and_then(|name| name.to_str().ok()).unwrap_or("an unknown error");
        let name = name.to_owned();
        Error::Cuda { call, code: error.0 as i32, name, detail: "; reported to cudarc".into() }
    }
}

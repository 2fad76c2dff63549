//! Streams that are held up until a test lets them go on.

use std::sync::atomic::{AtomicU32, Ordering};

use epoxide::Result;
use epoxide::driver::{Device, Kernel, LaunchConfig, Memory, MemoryKind, Module, Stream};

/// Ends once the word has reached the value.
const PTX: &str = "
.version 7.8
.target sm_90
.address_size 64

.visible .entry wait(.param .u64 word, .param .u32 value)
{
    .reg .pred %p<2>;
    .reg .b32 %r<3>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [word];
    ld.param.u32 %r1, [value];
LOOP:
    ld.acquire.sys.global.u32 %r2, [%rd1];
    setp.lt.u32 %p1, %r2, %r1;
    @%p1 bra LOOP;
    ret;
}
";

/// Holds streams up, by a kernel that waits for a word of the host.
pub struct Gate {
    word: Memory,
    kernel: Kernel,
    /// The number of times that it was opened.
    opened: AtomicU32,
}

impl Gate {
    /// Made before anything is held up, since loading a kernel waits for the whole device.
    pub fn new(device: &Device) -> Result<Gate> {
        Ok(Gate {
            word: Memory::alloc(device, 4, MemoryKind::MappedHost, "gate")?,
            kernel: Module::load(device, PTX)?.kernel("wait", 0)?,
            opened: AtomicU32::new(0),
        })
    }

    /// Later work of `stream` waits until the gate is opened the next time.
    pub fn hold(&self, stream: &Stream) -> Result<()> {
        let config =
            LaunchConfig { grid: 1, block: 1, shared_bytes: 0, cooperative: false, dependent: false };
        let value = self.opened.load(Ordering::Relaxed) + 1;
        let params: [&[u8]; 2] = [&self.word.ptr().0.to_le_bytes(), &value.to_le_bytes()];
        // SAFETY: these are the parameters of the kernel, and the word is freed after the gate has
        // been opened.
        unsafe { stream.launch(&self.kernel, &config, &params) }
    }

    /// Lets all go on that is held up.
    pub fn open(&self) {
        let opened = self.opened.fetch_add(1, Ordering::Relaxed) + 1;
        // SAFETY: mapped host memory of 4 bytes, aligned to a page, which only atomics of host and
        // device touch.
        unsafe { AtomicU32::from_ptr(self.word.host_ptr().cast()) }.store(opened, Ordering::Release);
    }
}

impl Drop for Gate {
    /// A test that fails must not leave a kernel behind that its device waits for.
    fn drop(&mut self) {
        self.open();
    }
}

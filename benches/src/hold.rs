//! A kernel that holds a stream back until the host has enqueued what follows.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use epoxide::Result;
use epoxide::driver::{Device, Kernel, LaunchConfig, Memory, MemoryKind, Module, Stream};

/// The longest hold of a measurement. A call of the host that waits for running kernels then goes
/// on.
pub(crate) const LIMIT: Duration = Duration::from_millis(100);
const NAME: &str = "hold";
/// Polls a word until it has a value, or a time is over.
const PTX: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry hold(.param .u64 word, .param .u64 ns, .param .u32 value)
{
    .reg .u64 %word, %ns, %start, %now;
    .reg .u32 %value, %found;
    .reg .pred %go_on;
    ld.param.u64 %word, [word];
    ld.param.u64 %ns, [ns];
    ld.param.u32 %value, [value];
    mov.u64 %start, %globaltimer;
wait:
    ld.relaxed.sys.global.u32 %found, [%word];
    setp.ge.u32 %go_on, %found, %value;
    @%go_on bra done;
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %go_on, %now, %ns;
    @%go_on bra wait;
done:
    ret;
}
";

/// Holds streams of a device, one after the other.
pub(crate) struct Hold {
    kernel: Kernel,
    /// The number of the last hold that is released.
    word: Memory,
    /// The number of the last hold that is enqueued.
    last: Cell<u32>,
    /// The longest hold.
    limit: Duration,
}

impl Hold {
    /// Loads the kernel. Call it on all ranks before any kernel waits for another rank: the driver
    /// may wait for the kernels of all devices of the process here.
    pub fn new(device: &Device, limit: Duration) -> Result<Hold> {
        let kernel = Module::load(device, PTX)?.kernel(NAME, 0)?;
        let word = Memory::alloc(device, 4, MemoryKind::MappedHost, "word of a hold")?;
        let hold = Hold { kernel, word, last: Cell::new(0), limit };
        hold.release();
        Ok(hold)
    }

    /// Enqueues a hold, up to [`Hold::release`].
    pub fn enqueue(&self, stream: &Stream) -> Result<()> {
        self.last.set(self.last.get() + 1);
        let ns = self.limit.as_nanos() as u64;
        let params: [&[u8]; 3] =
            [&self.word.ptr().0.to_ne_bytes(), &ns.to_ne_bytes(), &self.last.get().to_ne_bytes()];
        let config =
            LaunchConfig { grid: 1, block: 1, shared_bytes: 0, cooperative: false, dependent: false };
        // SAFETY: the parameters are those of `PTX`. The free of the word, which is mapped host
        // memory, waits for the device's kernels.
        unsafe { stream.launch(&self.kernel, &config, &params) }
    }

    /// Ends the holds so far.
    pub fn release(&self) {
        // SAFETY: an aligned word of mapped memory that lives as long as this. Only atomic accesses
        // are made to it.
        let word = unsafe { AtomicU32::from_ptr(self.word.host_ptr().cast::<u32>()) };
        word.store(self.last.get(), Ordering::Release);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // After an error a round may still be held.
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use epoxide::driver::Event;
    use epoxide::driver::virt::{VirtConfig, VirtualGpu};

    use super::*;

    #[test]
    fn a_stream_is_held_until_the_host_releases_it_or_the_limit() {
        let device = VirtualGpu::new(VirtConfig::default());
        let stream = Stream::new(&device).unwrap();
        let event = Event::timed(&device).unwrap();
        let hold = Hold::new(&device, Duration::from_secs(3600)).unwrap();
        for _ in 0..3 {
            hold.enqueue(&stream).unwrap();
            event.record(&stream).unwrap();
            std::thread::sleep(Duration::from_millis(5));
            assert!(!event.is_done().unwrap());
            hold.release();
            stream.synchronize().unwrap();
            assert!(event.is_done().unwrap());
        }
        let hold = Hold::new(&device, Duration::from_millis(1)).unwrap();
        hold.enqueue(&stream).unwrap();
        stream.synchronize().unwrap();
    }
}

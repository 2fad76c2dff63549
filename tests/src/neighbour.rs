//! Another library in the same process and on the same device. It allocates, frees, loads modules
//! and copies at any time. Its calls wait for running kernels and block all other calls of the
//! device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use epoxide_gpu::kernels::DispatchLayout;

use epoxide::driver::{Device, Kernel, LaunchConfig, Memory, MemoryKind, Module, Stream};
use epoxide::internal::driver::{self, CopyEnd};
use epoxide::{Error, Result};

/// Bytes of copies: small enough, and too large, for a driver to copy at once.
const COPIES: [usize; 2] = [4 << 10, 2 << 20];

/// The neighbour's threads. Ended on drop.
#[derive(Debug)]
pub struct Neighbour {
    shared: Arc<NeighbourState>,
    threads: Vec<JoinHandle<Result<()>>>,
}

#[derive(Debug, Default)]
struct NeighbourState {
    stop: AtomicBool,
    calls: AtomicU64,
}

/// A thread's repeated operation.
type Habit = fn(&Device) -> Result<()>;

impl Neighbour {
    /// Starts on a device; each of its threads rests for `pause` between two calls.
    pub fn start(device: &Device, pause: Duration) -> Neighbour {
        let habits: [(&str, Habit); 4] =
            [("allocates", allocate), ("pins", pin), ("loads", load), ("copies", copy)];
        let shared = Arc::new(NeighbourState::default());
        let spawn = |(name, habit): (&str, Habit)| {
            let (device, shared) = (device.clone(), shared.clone());
            let run = move || {
                while !shared.stop.load(Ordering::Acquire) {
                    habit(&device)?;
                    shared.calls.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(pause);
                }
                Ok(())
            };
            std::thread::Builder::new().name(format!("neighbour {name}")).spawn(run)
        };
        // `stop` detects a thread that could not be started.
        let threads = habits.into_iter().filter_map(|habit| spawn(habit).ok()).collect();
        Neighbour { shared, threads }
    }

    /// Ends it; how many rounds its threads made.
    ///
    /// # Errors
    /// The first error of any of its calls.
    pub fn stop(mut self) -> Result<u64> {
        let started = self.threads.len();
        self.end()?;
        match started {
            4 => Ok(self.shared.calls.load(Ordering::Relaxed)),
            _ => Err(Error::os("spawn thread", "the neighbour lacks one")),
        }
    }

    fn end(&mut self) -> Result<()> {
        self.shared.stop.store(true, Ordering::Release);
        let ends = self.threads.drain(..).map(|thread| {
            thread.join().unwrap_or_else(|_| Err(Error::os("neighbour", "one of its threads panicked")))
        });
        // All are joined, even if the first has failed.
        ends.fold(Ok(()), Result::and)
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::warn!("neighbour: {error}");
        }
    }
}

/// Its blocks count themselves at `words`, and end once the next word is not 0.
const HOLD: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry hold(.param .u64 words)
{
    .reg .u64 %words;
    .reg .u32 %value;
    .reg .pred %go_on;
    ld.param.u64 %words, [words];
    red.relaxed.sys.global.add.u32 [%words], 1;
wait:
    ld.relaxed.sys.global.u32 %value, [%words+4];
    setp.eq.u32 %go_on, %value, 0;
    @%go_on bra wait;
    ret;
}
";

/// A kernel of another library that holds multiprocessors of a GPU until this is dropped.
#[derive(Debug)]
pub struct Holder {
    stream: Stream,
    kernel: Kernel,
    words: Memory,
}

impl Holder {
    /// Loads the kernel. Call it on all ranks before any of them holds: the driver may wait for the
    /// kernels of all devices of the process here. The device must be a GPU: on a virtual one
    /// kernels do not compete for multiprocessors.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn new(device: &Device) -> Result<Holder> {
        let kernel = Module::load(device, HOLD)?.kernel("hold", device.info().max_shared_bytes_per_block)?;
        let words = Memory::alloc(device, 8, MemoryKind::MappedHost, "of the neighbour")?;
        Ok(Holder { stream: driver::unfenced_stream(device)?, kernel, words })
    }

    /// Occupies this many multiprocessors, each by a block that uses all of its shared memory.
    /// Waits until all of these blocks run.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn hold(&self, multiprocessors: u32) -> Result<()> {
        let shared_bytes = self.stream.device().info().max_shared_bytes_per_block;
        let (grid, address) = (multiprocessors, self.words.ptr().0.to_ne_bytes());
        let config = LaunchConfig { grid, block: 1, shared_bytes, cooperative: false, dependent: false };
        // SAFETY: the kernel takes one address, of two words that live until it has ended.
        unsafe { self.stream.launch(&self.kernel, &config, &[&address])? };
        while self.word(0).load(Ordering::Relaxed) < multiprocessors {
            std::thread::yield_now();
        }
        Ok(())
    }

    /// A word that the kernel uses too.
    fn word(&self, number: usize) -> &AtomicU32 {
        // SAFETY: one of two aligned words of mapped memory that lives as long as this. Only atomic
        // accesses are made to it.
        unsafe { AtomicU32::from_ptr(self.words.host_ptr().cast::<u32>().add(number)) }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.word(1).store(1, Ordering::Relaxed);
        if let Err(error) = self.stream.synchronize() {
            tracing::warn!("a kernel that holds multiprocessors: {error}");
        }
    }
}

fn allocate(device: &Device) -> Result<()> {
    let small = Memory::alloc(device, 1 << 10, MemoryKind::Unpooled, "of the neighbour")?;
    let large = Memory::alloc(device, 16 << 20, MemoryKind::Unpooled, "of the neighbour")?;
    drop((small, large));
    Ok(())
}

fn pin(device: &Device) -> Result<()> {
    Memory::alloc(device, 1 << 20, MemoryKind::MappedHost, "of the neighbour").map(drop)
}

fn load(device: &Device) -> Result<()> {
    Kernel::shipped::<DispatchLayout>(device, 0).map(drop)
}

fn copy(device: &Device) -> Result<()> {
    let stream = Stream::new(device)?;
    for bytes in COPIES {
        let memory = Memory::alloc(device, bytes as u64, MemoryKind::Device, "of the neighbour")?;
        let sent: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
        let mut back = vec![0u8; bytes];
        let on_device = CopyEnd::Device(memory.ptr());
        // SAFETY: both host ranges are as long as the memory, and the stream is through with all of
        // them before they go.
        let copied = unsafe {
            let there =
                driver::copy(&stream, on_device, CopyEnd::Host(sent.as_ptr().cast_mut()), bytes as u64);
            there.and_then(|()| {
                driver::copy(&stream, CopyEnd::Host(back.as_mut_ptr()), on_device, bytes as u64)
            })
        };
        stream.synchronize()?;
        copied?;
        if sent != back {
            return Err(Error::os("neighbour", format!("{bytes} bytes came back from the device changed")));
        }
    }
    Ok(())
}

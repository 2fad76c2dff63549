//! Another library in the same process and on the same device. It allocates, frees, loads modules
//! and copies at any time. Its calls wait for running kernels and block all other calls of the
//! device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use epoxide_gpu::kernels::DispatchLayout;

use epoxide::driver::{Device, Kernel, Memory, MemoryKind, Stream};
use epoxide::internal::driver::{self, CopyEnd};
use epoxide::{Error, Result};

/// Bytes that are copied, small enough and too large for a driver to take at once.
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
        // One that cannot be started is missed in `stop`.
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

//! Configuration and executor of a virtual GPU.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use epoxide_vgpu::{Checker, Schedule};

use super::manual::ManualGpus;

/// Executor of a virtual GPU's work.
#[derive(Debug, Clone, Default)]
pub enum Executor {
    /// A thread of its own.
    #[default]
    Threaded,
    /// The threads that wait for it, in seeded order.
    Manual(ManualGpus),
}

/// The clock of a virtual GPU's `%globaltimer`, and so of every deadline of its kernels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Time {
    /// For a device made by a rank of [`run_threads`](crate::group::run_threads): the clock of all
    /// ranks; else [`Time::Real`]. The ranks' clock advances only while no rank can progress. So a
    /// deadline passes at once when a rank does not arrive, and never because the machine is busy.
    /// Events keep measuring real time.
    #[default]
    Virtual,
    /// The system's monotonic clock: for ranks of several processes, and for traces that show how
    /// long kernels take.
    Real,
}

/// Stops the instructions of a virtual GPU, as if its process were stopped. Copies continue.
#[derive(Debug)]
pub struct Stop {
    ordinal: u32,
    /// Warp instructions until then.
    left: AtomicU64,
}

impl Stop {
    /// For the device of this number, which runs until [`Stop::after`].
    pub fn of(ordinal: u32) -> Arc<Stop> {
        Arc::new(Stop { ordinal, left: AtomicU64::new(u64::MAX) })
    }

    /// Stops the device after about so many warp instructions more.
    pub fn after(&self, warp_instructions: u64) {
        self.left.store(warp_instructions, Ordering::Relaxed);
    }

    /// Lets the device continue.
    pub fn go_on(&self) {
        self.after(u64::MAX);
    }

    /// The warp instructions that are left; `u64::MAX`, less those executed, where it does not
    /// stop.
    pub fn left(&self) -> u64 {
        self.left.load(Ordering::Relaxed)
    }

    pub(super) fn is_of(&self, ordinal: u32) -> bool {
        self.ordinal == ordinal
    }

    /// Records this many executed instructions.
    pub(super) fn executed(&self, warp_instructions: u64) {
        // Cannot fail: there is always a next value.
        let _ = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
            Some(left.saturating_sub(warp_instructions))
        });
    }
}

/// Configuration of a virtual GPU.
#[derive(Debug, Clone)]
pub struct VirtConfig {
    /// Its index.
    pub ordinal: u32,
    /// Streaming multiprocessors; they bound how many blocks are resident at once.
    pub sm_count: u32,
    /// Device memory in bytes. Only written pages cost real memory.
    pub memory_bytes: u64,
    /// Draws the order of warps within a grid; without it, warps take turns.
    // A `ManualGpus` has its own seed, which is used where this is `None`.
    pub schedule_seed: Option<u64>,
    /// Source of `%globaltimer`.
    // A `ManualGpus` has its own.
    pub time: Time,
    /// Runs kernels in check mode, and watches the device's memory together with that of all
    /// devices of this process with the same checker. Accesses by other processes are not checked,
    /// so all ranks should be threads of this process.
    pub checker: Option<Checker>,
    /// For epoxide's own tests.
    #[doc(hidden)]
    pub hooks: Hooks,
}

/// Settings of a virtual GPU for tests of epoxide.
#[derive(Debug, Clone)]
pub struct Hooks {
    /// How the seed orders the warps.
    pub schedule: Schedule,
    /// The executor of the work.
    pub executor: Executor,
    /// Stops the device of its number in the middle of a kernel.
    pub stop: Option<Arc<Stop>>,
    /// Blocks of a kernel that run at a time, where kernels of others hold all other
    /// multiprocessors for good; `None`: as many as fit on the device.
    pub max_blocks_resident: Option<u32>,
    /// Links to other devices have native atomics, as NVLink has. Without it, a buffer rejects
    /// them; the memory is the host's either way.
    pub native_atomics: bool,
}

impl Default for Hooks {
    fn default() -> Hooks {
        Hooks {
            schedule: Schedule::Random,
            executor: Executor::Threaded,
            stop: None,
            max_blocks_resident: None,
            native_atomics: true,
        }
    }
}

impl Default for VirtConfig {
    fn default() -> VirtConfig {
        VirtConfig {
            ordinal: 0,
            sm_count: 132,
            memory_bytes: 16 << 30,
            schedule_seed: None,
            time: Time::Virtual,
            checker: None,
            hooks: Hooks::default(),
        }
    }
}

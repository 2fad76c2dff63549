//! Configuration of a virtual GPU (size, scheduler, clock) and of a launch.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::check::Assumptions;

/// Where `%globaltimer` comes from.
#[derive(Clone, Debug, Default)]
pub enum Clock {
    /// `CLOCK_MONOTONIC` in nanoseconds: the same for all devices and processes of this host.
    #[default]
    Real,
    /// A counter in nanoseconds that advances by [`VIRTUAL_NS_PER_WARP_INSTRUCTION`] per warp
    /// instruction of every device that shares it, so that runs can be repeated exactly.
    Virtual(Arc<AtomicU64>),
    /// A counter in nanoseconds that only its owner advances. The owner passes a deadline after all
    /// other work is done, so the speed of the machine does not matter.
    Stepped(Arc<AtomicU64>),
}

/// How far [`Clock::Virtual`] advances per warp instruction, in nanoseconds.
pub const VIRTUAL_NS_PER_WARP_INSTRUCTION: u64 = 1;

impl Clock {
    /// Current time in nanoseconds.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        match self {
            Clock::Real => {
                let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
                (t.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(t.tv_nsec as u64)
            }
            Clock::Virtual(ns) | Clock::Stepped(ns) => ns.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn advance(&self, warp_instructions: u64) {
        if let Clock::Virtual(ns) = self {
            ns.fetch_add(warp_instructions * VIRTUAL_NS_PER_WARP_INSTRUCTION, Ordering::Relaxed);
        }
    }
}

/// Destination of `printf` in kernels: the standard output, or a writer of the host's. Clones are
/// the same destination. Each call writes its text at once, in the order in which the calls ran.
#[derive(Clone, Default)]
pub struct Output(Option<Arc<Mutex<dyn Write + Send>>>);

impl Output {
    /// Writes to `writer`, such as a file. A failed write is ignored, as on a GPU, whose buffer may
    /// overflow.
    #[must_use]
    pub fn to(writer: impl Write + Send + 'static) -> Self {
        Self(Some(Arc::new(Mutex::new(writer))))
    }

    /// Keeps the text in memory. `text` has what kernels have printed so far.
    #[must_use]
    pub fn to_text(text: &Arc<Mutex<String>>) -> Self {
        Self::to(Text(text.clone()))
    }

    pub(crate) fn print(&self, text: &[u8]) {
        // An error of the writer is dropped, because the call has no result for it.
        let _ = match &self.0 {
            Some(writer) => writer.lock().unwrap_or_else(PoisonError::into_inner).write_all(text),
            None => std::io::stdout().lock().write_all(text),
        };
    }
}

impl std::fmt::Debug for Output {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "Output::to(..)" } else { "Output::default()" })
    }
}

struct Text(Arc<Mutex<String>>);

impl Write for Text {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.push_str(&String::from_utf8_lossy(text));
        Ok(text.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// How a seed orders the warps of a grid.
///
/// Except with [`Schedule::Preemptions`], a warp that polls memory in vain is left out for some
/// turns of the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Schedule {
    /// Any warp next, for any number of instructions.
    #[default]
    Random,
    /// Warps take turns, as without a seed.
    RoundRobin,
    /// The warp of the highest priority runs for as long as it can. Priorities are drawn. At this
    /// many drawn points of a run, the running warp gets the lowest priority. Faults that need few
    /// preemptions show in fewer runs this way (probabilistic concurrency testing, Burckhardt et
    /// al., ASPLOS 2010).
    Preemptions(u32),
}

/// Properties of a virtual device.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Streaming multiprocessors (`%nsmid`).
    pub sm_count: u32,
    /// Most shared memory one block may use, in bytes.
    pub shared_bytes_per_block: u32,
    /// `None`: warps take turns. `Some(seed)`: their order is drawn from the seed, as
    /// [`schedule`](Self::schedule) defines. The seed also draws other things that a program must
    /// not rely on: poison, the time at which bulk copies land, and lanes that stay apart. Without
    /// it they are drawn from the memory's seed.
    pub schedule_seed: Option<u64>,
    /// How a seed orders the warps.
    pub schedule: Schedule,
    /// Source of `%globaltimer`.
    pub clock: Clock,
    /// Most blocks of one grid that are resident at a time. `None` derives it from the SM count and
    /// the needs of a block, as on a GPU. An SM has room for 2048 threads, 32 blocks and 228 KiB of
    /// shared memory. Fewer blocks may be resident at first, as if other grids held multiprocessors
    /// for a while. The seed (the memory's, if the schedule has none) draws their number and the
    /// times at which others follow. They follow at the latest when all resident warps only wait.
    pub max_blocks_resident: Option<u32>,
    /// Most warp instructions that a grid may run without progress. Progress is the begin or the
    /// end of a block, or a time at which all warps only wait for others. A grid beyond the limit
    /// is stopped with [`FaultKind::Livelock`](crate::FaultKind::Livelock). `None`:
    /// [`TRIAL_LIVELOCK_LIMIT`](crate::TRIAL_LIVELOCK_LIMIT) in a [`Trial`](crate::Trial),
    /// [`EXPLORED_LIVELOCK_LIMIT`] where an [`Explore`](crate::Explore) makes the choices,
    /// [`CHECKED_LIVELOCK_LIMIT`] else in check mode and on a [`Machine`](crate::Machine), no limit
    /// otherwise.
    pub livelock_limit: Option<u64>,
    /// Destination of `printf` in kernels.
    pub output: Output,
    /// Without check mode: the most reports at different lines after which a launch continues.
    /// These are bulk copies that outlive their blocks
    /// ([`Machine::reports`](crate::Machine::reports) has them). All other faults end the launch.
    /// In check mode [`CheckConfig::collect`](crate::CheckConfig::collect) counts instead.
    pub collect: usize,
    /// Without check mode: the properties that kernels rely on. With
    /// [`Assumptions::converged_warps`] lanes meet where the arms of a branch join; otherwise the seed
    /// lets some stay apart. The others change no results. In check mode
    /// [`CheckConfig::assume`](crate::CheckConfig::assume) counts instead.
    pub assume: Assumptions,
}

/// Default of [`DeviceConfig::livelock_limit`] in check mode and on a
/// [`Machine`](crate::Machine): seconds of a loop that only computes,
/// minutes of one that accesses memory.
pub const CHECKED_LIVELOCK_LIMIT: u64 = 1 << 28;

/// Default of [`DeviceConfig::livelock_limit`] in an exploration, which keeps each choice: a run up
/// to here takes about 200 MB.
pub const EXPLORED_LIVELOCK_LIMIT: u64 = 1 << 20;

impl Default for DeviceConfig {
    /// An H200: 132 SMs, 227 KiB of shared memory per block, round robin, real clock.
    fn default() -> Self {
        Self {
            sm_count: 132,
            shared_bytes_per_block: 227 * 1024,
            schedule_seed: None,
            schedule: Schedule::Random,
            clock: Clock::Real,
            max_blocks_resident: None,
            livelock_limit: None,
            output: Output::default(),
            collect: 0,
            assume: Assumptions::default(),
        }
    }
}

impl DeviceConfig {
    /// How many blocks of this shape are resident at a time.
    #[must_use]
    pub fn resident_blocks(&self, threads: u32, shared_bytes: u32) -> u32 {
        self.max_blocks_resident
            .unwrap_or_else(|| {
                let warps = threads.div_ceil(32).max(1);
                // Each block also occupies one KiB that belongs to the system.
                let by_shared = (228 * 1024) / (shared_bytes.saturating_add(1024));
                (64 / warps).min(32).min(by_shared).max(1).saturating_mul(self.sm_count)
            })
            .max(1)
    }

    /// The limit that applies.
    pub(crate) fn instructions_allowed(&self, checked: bool) -> u64 {
        self.livelock_limit.unwrap_or(if checked { CHECKED_LIVELOCK_LIMIT } else { u64::MAX })
    }
}

/// Shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GridConfig {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads per block in x, y, z.
    pub block: [u32; 3],
    /// Dynamic shared memory per block, in bytes.
    pub dynamic_shared_bytes: u32,
    /// The clusters. `None`: as the kernel declares (`.reqnctapercluster`), or no cluster, which is
    /// one of one block.
    pub cluster: Option<Cluster>,
}

/// The clusters of a launch, whose blocks run together and access each other's shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Blocks in x, y, z.
    pub blocks: [u32; 3],
    /// How many blocks it may have.
    pub sizes: ClusterSizes,
}

impl From<[u32; 3]> for Cluster {
    /// Portable clusters of so many blocks in x, y, z.
    fn from(blocks: [u32; 3]) -> Self {
        Self { blocks, sizes: ClusterSizes::Portable }
    }
}

/// Sizes of clusters that a launch allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ClusterSizes {
    /// Up to 8 blocks, which every device with clusters takes.
    #[default]
    Portable,
    /// Up to 16 blocks (`CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED`).
    NonPortable,
}

impl GridConfig {
    /// A launch in one dimension: `blocks` of `threads`, with so many bytes of dynamic shared memory
    /// per block. `GridConfig::new(2, 128, 0)` is CUDA's `<<<2, 128>>>`. The fields have the other
    /// dimensions.
    #[must_use]
    pub const fn new(blocks: u32, threads: u32, dynamic_shared_bytes: u32) -> Self {
        Self { grid: [blocks, 1, 1], block: [threads, 1, 1], dynamic_shared_bytes, cluster: None }
    }

    /// The same launch in clusters of so many blocks in x, y, z, up to 8 in all. The blocks of a
    /// cluster run together and access each other's shared memory. The grid must have a multiple of
    /// them in each dimension: `GridConfig::new(8, 128, 0).in_clusters_of([2, 1, 1])` has four
    /// clusters.
    #[must_use]
    pub const fn in_clusters_of(self, blocks: [u32; 3]) -> Self {
        Self { cluster: Some(Cluster { blocks, sizes: ClusterSizes::Portable }), ..self }
    }

    /// The same launch in clusters of up to 16 blocks, which not every device takes.
    #[must_use]
    pub const fn in_non_portable_clusters_of(self, blocks: [u32; 3]) -> Self {
        Self { cluster: Some(Cluster { blocks, sizes: ClusterSizes::NonPortable }), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn occupancy() {
        let d = DeviceConfig { sm_count: 10, ..DeviceConfig::default() };
        assert_eq!(d.resident_blocks(1024, 0), 20);
        assert_eq!(d.resident_blocks(32, 0), 320);
        assert_eq!(d.resident_blocks(128, 100 * 1024), 20);
        assert_eq!(d.resident_blocks(u32::MAX, u32::MAX), 10);
        assert_eq!(DeviceConfig { max_blocks_resident: Some(3), ..d }.resident_blocks(32, 0), 3);
    }

    #[test]
    fn only_checks_limit_by_themselves() {
        let d = DeviceConfig::default();
        assert_eq!(
            (d.instructions_allowed(false), d.instructions_allowed(true)),
            (u64::MAX, CHECKED_LIVELOCK_LIMIT)
        );
        let d = DeviceConfig { livelock_limit: Some(7), ..d };
        assert_eq!((d.instructions_allowed(false), d.instructions_allowed(true)), (7, 7));
    }

    #[test]
    fn virtual_clock_advances_only_by_instructions() {
        let c = Clock::Virtual(Arc::new(AtomicU64::new(5)));
        assert_eq!(c.now_ns(), 5);
        c.advance(10);
        assert_eq!(c.now_ns(), 5 + 10 * VIRTUAL_NS_PER_WARP_INSTRUCTION);
        let a = Clock::Real.now_ns();
        assert!(a > 0 && Clock::Real.now_ns() >= a);
    }
}

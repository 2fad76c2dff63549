//! Units of a stream's work, run now or recorded by a capture: launches, copies and fills.

use std::sync::Arc;

use epoxide_vgpu::stream::Transfer;
use epoxide_vgpu::{GridConfig, Kernel, Residency};

/// Work as a call enqueues it or a capture records it.
#[derive(Debug, Clone)]
pub(super) enum Recorded {
    Launch(Launch),
    Transfer(Transfer),
}

/// Work in a queue.
pub(super) enum Enqueued {
    /// A kernel, and the seed of its schedule if it has one.
    Launch(Box<Launch>, Option<u64>),
    Transfer(Transfer),
}

/// A kernel with its arguments, checked; it can be made a grid any number of times.
#[derive(Debug, Clone)]
pub(super) struct Launch {
    pub(super) name: &'static str,
    pub(super) kernel: Arc<Kernel>,
    pub(super) residency: Residency,
    pub(super) config: GridConfig,
    pub(super) params: Box<[u8]>,
}

impl Launch {
    /// How many warps it has.
    pub(super) fn warps(&self) -> u64 {
        let blocks: u64 = self.config.grid.iter().map(|extent| u64::from(*extent)).product();
        let threads: u64 = self.config.block.iter().map(|extent| u64::from(*extent)).product();
        blocks * threads.div_ceil(32)
    }
}

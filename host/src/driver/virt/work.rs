//! Units of a stream's work, run now or recorded by a capture: launches, copies and fills.

use epoxide_vgpu::stream::{Launch, Transfer};

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

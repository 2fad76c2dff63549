//! Places for received rows.

use std::sync::Arc;

use epoxide_gpu::layout::{DevicePtr, LowLatencyMessages, LowLatencyPlace, LowLatencyTables};

use crate::driver::Memory;
use crate::ep::place;

/// Room for what one dispatch brings and for what comes back of it. [`Buffer::place`](super::Buffer::place) hands it out; whoever holds the
/// rows of a dispatch borrows it.
#[derive(Debug)]
pub struct Place(pub(super) Arc<PlaceState>);

impl Place {
    /// Its index: every rank dispatches to the place of the same one.
    pub fn index(&self) -> u32 {
        self.0.index
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.take_back();
    }
}

pub(super) type PlaceState = place::PlaceState<Room>;
pub(super) type Lease = place::Lease<Room>;

/// Received rows, what is known of them, and sums.
#[derive(Debug)]
pub(super) struct Room {
    /// Where it is in every pool; nowhere across nodes.
    pub at: LowLatencyPlace,
    /// Received rows, and their scales.
    pub recv_x: DevicePtr,
    pub recv_scales: DevicePtr,
    /// Arguments of the kernels for it across nodes.
    pub messages: Option<LowLatencyMessages>,
    /// This rank's private tables for it.
    pub tables: LowLatencyTables,
    /// Where sums go.
    pub combined_x: DevicePtr,
    /// The memory of its tables.
    pub _tables: Arc<Memory>,
}

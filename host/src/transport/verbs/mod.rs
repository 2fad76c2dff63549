//! Queues over ibverbs: reliable connections, RDMA writes, and a counter written behind the data on
//! the same connection. No atomics of the card are used.
//!
//! A rank uses one card (device, port and GID), or several
//! ([`VerbsOptions::devices`](super::VerbsOptions::devices)): queue q to a peer is on card q mod
//! their number. All wire memory is registered with each card. Each queue is a connection with its
//! own completion queue, so the failure of a queue does not affect others.

mod connect;
mod device;
mod doctor;
mod end;
mod queue;
mod raw;
mod register;
mod sysfs;

use std::sync::Arc;

pub(super) use connect::connect;
pub use doctor::doctor;

use self::device::settings;
use super::options::TransportOptions;
use crate::driver::{Device, Memory};
use crate::error::Result;

/// Allocates wire memory that the rank's network cards reach. It tries device memory by dma-buf,
/// then by a peer-memory module, then host memory that is mapped into the device.
pub(super) fn wire_memory(options: &TransportOptions, device: &Device, bytes: u64) -> Result<Arc<Memory>> {
    let cards = device::Card::open(&settings(options)?, device.info())?;
    let (memory, reach) = register::wire_memory(&cards, device, bytes)?;
    tracing::debug!(cards = cards.len(), bytes, %reach, "wire memory");
    Ok(memory)
}

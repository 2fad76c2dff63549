//! Queues over ibverbs: reliable connections, RDMA writes, and a counter written behind the data on the same connection. No
//! atomics of the card are used.
//!
//! A rank uses one device, port and GID ([`VerbsOptions`]). Wire memory is registered whole; [`wire_memory`] allocates it where the card
//! reaches it. Each queue is a connection with a completion queue of its own, so that a queue that fails takes no other with it.

mod connect;
mod device;
mod doctor;
mod options;
mod queue;
mod raw;
mod register;
mod sysfs;

use std::sync::Arc;

pub use connect::{Connected, connect};
pub use doctor::doctor;
pub use options::VerbsOptions;
pub use register::Reach;

use crate::driver::{Device, Memory};
use crate::error::Result;

/// Allocates `bytes` of wire memory where the rank's network card reaches it, and tells how: device memory by dma-buf, else by a
/// peer-memory module, else host memory that is mapped into the device.
///
/// # Errors
/// [`Error::Unavailable`](crate::Error::Unavailable) where there is no RDMA device that works.
pub fn wire_memory(
    options: &VerbsOptions,
    device: &Arc<dyn Device>,
    bytes: u64,
) -> Result<(Arc<Memory>, Reach)> {
    let card = device::Card::open(options, device.info())?;
    register::wire_memory(&card.pd, device, bytes)
}

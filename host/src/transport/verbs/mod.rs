//! Queues over ibverbs: reliable connections, RDMA writes, and a counter written behind the data on the same connection. No
//! atomics of the card are used.
//!
//! A rank uses one device, port and GID ([`VerbsOptions`]). Wire memory is registered whole. Each queue is a
//! connection with a completion queue of its own, so that a queue that fails takes no other with it.

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

use super::{TransportOptions, VerbsOptions};
use crate::driver::{Device, Memory};
use crate::error::Result;

/// Allocates wire memory where the rank's network card reaches it: device memory by dma-buf, else by a peer-memory module, else
/// host memory that is mapped into the device.
pub(super) fn wire_memory(
    options: &TransportOptions,
    device: &Arc<dyn Device>,
    bytes: u64,
) -> Result<Arc<Memory>> {
    let card = device::Card::open(&settings(options)?, device.info())?;
    let (memory, reach) = register::wire_memory(&card.pd, device, bytes)?;
    tracing::debug!(device = card.context.name(), bytes, %reach, "wire memory");
    Ok(memory)
}

fn settings(options: &TransportOptions) -> Result<VerbsOptions> {
    options.verbs.clone().map_or_else(VerbsOptions::from_env, Ok)
}

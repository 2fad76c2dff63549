//! Queues over ibverbs: reliable connections, RDMA writes, and a counter written behind the data on the same connection. No
//! atomics of the card are used.
//!
//! A rank uses one card (device, port and GID), or several ([`VerbsOptions::devices`]): queue q to a peer is on card q mod their
//! number. Wire memory is registered whole, with each. Each queue is a connection with a completion queue of its own, so that a
//! queue that fails takes no other with it.

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

use super::VerbsOptions;
use super::options::TransportOptions;
use crate::driver::{Device, Memory};
use crate::error::{Error, Result};

/// Allocates wire memory where the rank's network cards reach it: device memory by dma-buf, else by a peer-memory module, else
/// host memory that is mapped into the device.
pub(super) fn wire_memory(
    options: &TransportOptions,
    device: &Arc<dyn Device>,
    bytes: u64,
) -> Result<Arc<Memory>> {
    let cards = device::Card::open(&settings(options)?, device.info())?;
    let (memory, reach) = register::wire_memory(&cards, device, bytes)?;
    tracing::debug!(cards = cards.len(), bytes, %reach, "wire memory");
    Ok(memory)
}

fn settings(options: &TransportOptions) -> Result<VerbsOptions> {
    let settings = options.verbs.clone().map_or_else(VerbsOptions::from_env, Ok)?;
    let (cards, queues) = (settings.devices.len(), options.queues_per_peer);
    if cards > queues as usize {
        let rule = format!(
            "names {cards} devices, of which queues_per_peer = {queues} uses {queues}; name fewer, or give at least {cards} queues to \
             each peer (`--queues {cards}`)"
        );
        return Err(Error::argument("EPOXIDE_RDMA_DEVICE", settings.devices.join(","), rule));
    }
    Ok(settings)
}

/// Which of a rank's cards a queue is on, at both ends.
fn card_of(queue: u32, cards: usize) -> usize {
    queue as usize % cards.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::TransportKind;

    #[test]
    fn queues_go_round_the_cards() {
        assert_eq!((0..5).map(|queue| card_of(queue, 2)).collect::<Vec<_>>(), [0, 1, 0, 1, 0]);
        assert_eq!((0..3).map(|queue| card_of(queue, 1)).collect::<Vec<_>>(), [0, 0, 0]);
    }

    #[test]
    fn no_card_is_without_a_queue() {
        let devices = vec!["mlx5_0".into(), "mlx5_1".into()];
        let verbs = Some(VerbsOptions { devices, ..VerbsOptions::default() });
        let options = TransportOptions { verbs, ..TransportOptions::new(TransportKind::Verbs) };
        let error = settings(&options).unwrap_err().to_string();
        assert!(error.contains("EPOXIDE_RDMA_DEVICE = mlx5_0,mlx5_1: "), "{error}");
        assert!(error.contains("queues_per_peer = 1") && error.contains("--queues 2"), "{error}");
        settings(&TransportOptions { queues_per_peer: 2, ..options }).unwrap();
    }
}

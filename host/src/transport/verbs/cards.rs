//! Which cards a rank is to use, and which of them a queue is on.

use crate::error::{Error, Result};
use crate::transport::options::TransportOptions;
use crate::transport::verbs_options::VerbsOptions;

/// The options if given, else the environment.
pub(super) fn settings(options: &TransportOptions) -> Result<VerbsOptions> {
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
pub(super) fn card_of(queue: u32, cards: usize) -> usize {
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

//! The devices, port and GIDs of a rank, and their properties.

use std::sync::Arc;

use ibverbs_sys as ib;

use super::raw::{self, Context, Pd};
use super::sysfs::{self, Gid, Sysfs};
use crate::driver::DeviceInfo;
use crate::error::{Error, Result};
use crate::transport::options::TransportOptions;
use crate::transport::verbs_options::{VerbsOptions, mtu_bytes, mtu_code};

/// An opened device with a port that works.
#[derive(Debug)]
pub(super) struct Card {
    pub context: Arc<Context>,
    pub pd: Arc<Pd>,
    /// Routed by LID, not by GID.
    pub infiniband: bool,
    pub gid: Option<Gid>,
    pub lid: u16,
    /// The code of the largest MTU to use.
    pub mtu: u32,
    pub max_message: u32,
    /// Most writes in flight of a connection.
    pub depth: u32,
}

impl Card {
    /// Opens the cards for a GPU, at least one: those that the options name, in their order, else
    /// the nearest.
    pub fn open(options: &VerbsOptions, gpu: &DeviceInfo) -> Result<Vec<Card>> {
        options.check()?;
        let sysfs = Sysfs::new();
        if options.devices.is_empty() {
            return Card::nearest(options, &sysfs, gpu).map(|card| vec![card]);
        }
        options.devices.iter().map(|name| Card::named(options, &sysfs, name)).collect()
    }

    fn nearest(options: &VerbsOptions, sysfs: &Sysfs, gpu: &DeviceInfo) -> Result<Card> {
        let names = raw::device_names()?;
        let mut usable: Vec<(String, Card)> = Vec::new();
        let mut reasons = Vec::new();
        for name in names {
            match Card::named(options, sysfs, &name) {
                Ok(card) => usable.push((name, card)),
                Err(error) => reasons.push(error.to_string()),
            }
        }
        let candidates: Vec<&str> = usable.iter().map(|(name, _)| name.as_str()).collect();
        let Some(name) = sysfs::nearest(sysfs, &candidates, &gpu.pci_bus_id, gpu.ordinal).map(str::to_owned)
        else {
            return Err(unavailable("an RDMA device that works".into(), reasons.join("; ")));
        };
        let chosen = usable.into_iter().find(|(have, _)| *have == name).map(|(_, card)| card);
        chosen.ok_or_else(|| unavailable(format!("RDMA device {name}"), String::new()))
    }

    fn named(options: &VerbsOptions, sysfs: &Sysfs, name: &str) -> Result<Card> {
        let context = Context::open(name)?;
        let what = || format!("port {} of RDMA device {name}", options.port);
        let (device, port) = (context.device()?, context.port(options.port)?);
        if port.state != ib::ibv_port_state::IBV_PORT_ACTIVE {
            let reason = format!("it is {}; {}", state_name(port.state), state_remedy(port.state));
            return Err(unavailable(what(), reason));
        }
        let infiniband = is_infiniband(&port);
        let gids = sysfs.gids(name, options.port, infiniband);
        let gid = match sysfs::choose_gid(&gids, options.gid_index) {
            Ok(gid) => Some(gid.clone()),
            // LIDs do on one subnet.
            Err(_) if infiniband && options.gid_index.is_none() => None,
            Err(reason) => return Err(unavailable(what(), reason)),
        };
        let mtu = match options.path_mtu.and_then(mtu_code) {
            Some(wanted) if wanted > port.active_mtu => {
                let rule = format!("must be at most the {} of {}", mtu_bytes(port.active_mtu), what());
                return Err(Error::argument("EPOXIDE_RDMA_PATH_MTU", mtu_bytes(wanted), rule));
            }
            wanted => wanted.unwrap_or(port.active_mtu),
        };
        let pd = Pd::new(&context)?;
        let positive = |limit: i32| u32::try_from(limit).unwrap_or(0);
        let most = positive(device.max_qp_wr).min(positive(device.max_cqe));
        Ok(Card {
            infiniband,
            // A global address only if requested: within a subnet LIDs are simpler for the card.
            gid: gid.filter(|_| !infiniband || options.gid_index.is_some()),
            lid: port.lid,
            mtu,
            max_message: port.max_msg_sz.clamp(4096, 1 << 30),
            // One goodbye each way is additional.
            depth: options.queue_depth.min(most.saturating_sub(2)).max(4),
            context,
            pd,
        })
    }
}

pub(super) fn unavailable(what: String, reason: String) -> Error {
    Error::Unavailable { what, reason }
}

pub(super) fn is_infiniband(port: &ib::ibv_port_attr) -> bool {
    u32::from(port.link_layer) == ib::IBV_LINK_LAYER_INFINIBAND
}

/// A port's state as ibv_devinfo calls it.
pub(super) fn state_name(state: u32) -> &'static str {
    match state {
        ib::ibv_port_state::IBV_PORT_DOWN => "DOWN",
        ib::ibv_port_state::IBV_PORT_INIT => "INIT",
        ib::ibv_port_state::IBV_PORT_ARMED => "ARMED",
        ib::ibv_port_state::IBV_PORT_ACTIVE => "ACTIVE",
        _ => "in an unknown state",
    }
}

pub(super) fn state_remedy(state: u32) -> &'static str {
    match state {
        ib::ibv_port_state::IBV_PORT_INIT | ib::ibv_port_state::IBV_PORT_ARMED => {
            "an InfiniBand network needs a subnet manager (opensm)"
        }
        _ => "see to the cable, and on Ethernet set the interface up (`ip link set IFACE up`)",
    }
}

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
        assert_eq!(settings(&options.with_one_queue()).unwrap().devices, ["mlx5_0"]);
        settings(&TransportOptions { queues_per_peer: 2, ..options }).unwrap();
    }
}

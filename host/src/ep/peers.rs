//! The pools of the ranks of this node, mapped. Ranks that can all map each other's pools are one node.

use std::os::fd::AsFd;
use std::sync::Arc;

use epoxide_gpu::layout::{DevicePtr, FEW_RANKS};

use super::Topology;
use crate::driver::{Device, Memory};
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::transport::{self, TransportKind, TransportOptions};

/// The mappings, and where every pool is.
#[derive(Debug)]
pub(super) struct Peers {
    /// By index within the node, the own pool included.
    pub addresses: Vec<u64>,
    _mappings: Vec<Arc<Memory>>,
}

impl Peers {
    /// Where the pools of the first ranks are, as kernels are told it.
    pub fn few(&self) -> [DevicePtr; FEW_RANKS] {
        std::array::from_fn(|rank| DevicePtr(self.addresses.get(rank).copied().unwrap_or(0)))
    }

    /// Maps the pools of all ranks of the group, on one host or in one NVLink domain; `None`, on every
    /// rank, where any rank cannot map another's or has no native atomics there. Collective.
    ///
    /// # Errors
    /// Whatever the driver, the transport or the group reports.
    pub fn map_all(
        device: &Arc<dyn Device>,
        group: &dyn ProcessGroup,
        transport: &TransportOptions,
        pool: &Arc<Memory>,
    ) -> Result<Option<Peers>> {
        let rank = group.rank();
        let others: Vec<u32> = (0..group.size()).filter(|peer| *peer != rank).collect();
        let devices = group.all_gather(device.info().pci_bus_id.as_bytes())?;
        let options = TransportOptions { kind: TransportKind::Auto, ..transport.clone() };
        let links = transport::connect(&options, pool, group, &others, group.timeout())?;
        let mut peers = Peers { addresses: vec![0; group.size() as usize], _mappings: Vec::new() };
        peers.addresses[rank as usize] = pool.ptr().0;
        let mut map = |peer: u32| -> Result<bool> {
            let Some(mapping) = links.mapped(peer) else { return Ok(false) };
            peers.addresses[peer as usize] = mapping.ptr().0;
            peers._mappings.push(mapping.clone());
            device.has_native_atomics_with(&String::from_utf8_lossy(&devices[peer as usize]))
        };
        // An error of this rank is one of all: they wait for its answer.
        let are_mapped: Result<bool> = others.iter().try_fold(true, |all, peer| Ok(all & map(*peer)?));
        let answer = u8::from(*are_mapped.as_ref().unwrap_or(&false));
        let answers = group.all_gather(&[answer])?;
        are_mapped?;
        Ok(answers.iter().all(|answer| answer[..] == [1]).then_some(peers))
    }

    /// Exchanges descriptors with the ranks of this node and maps their pools, each of `bytes` bytes. Collective, among all ranks of the
    /// group.
    ///
    /// # Errors
    /// On every rank of the group where two of a node are linked in a way that the protocol cannot use; and whatever the driver or the group
    /// reports.
    pub fn map(
        device: &Arc<dyn Device>,
        group: &dyn ProcessGroup,
        topology: Topology,
        pool: &Memory,
        bytes: u64,
    ) -> Result<Peers> {
        let rank = group.rank();
        // Only the ranks of a node see each other's pools.
        let node_group;
        let node: &dyn ProcessGroup = if topology.nodes == 1 {
            group
        } else {
            node_group = group.split(topology.node(rank) as u64)?;
            &*node_group
        };
        let devices = node.all_gather(device.info().pci_bus_id.as_bytes())?;
        let rank_of = |index: usize| topology.rank(topology.node(rank), index as u32);
        let index = topology.index(rank) as usize;
        let others = || devices.iter().enumerate().filter(|(peer, _)| *peer != index);
        let mut unfit = None;
        for (peer, id) in others() {
            if !device.has_native_atomics_with(&String::from_utf8_lossy(id))? {
                unfit = unfit.or(Some(rank_of(peer)));
            }
        }
        refuse_unfit_links(group, unfit)?;

        let fd = pool.export()?;
        let mut peers = Peers { addresses: vec![0; devices.len()], _mappings: Vec::new() };
        for (peer, fds) in node.exchange_fds(&[fd.as_fd()])?.into_iter().enumerate() {
            if peer == index {
                peers.addresses[peer] = pool.ptr().0;
                continue;
            }
            for fd in fds {
                let mapping = Memory::import(device, fd, bytes, &format!("pool of rank {}", rank_of(peer)))?;
                peers.addresses[peer] = mapping.ptr().0;
                peers._mappings.push(Arc::new(mapping));
            }
        }
        if topology.nodes > 1 {
            node.destroy()?;
        }
        Ok(peers)
    }
}

/// An error on every rank where any has a peer on its node whose link lacks atomics: kernels would add to words that way and never see the
/// sum, so that every operation would run into its deadline.
fn refuse_unfit_links(group: &dyn ProcessGroup, unfit: Option<u32>) -> Result<()> {
    let mine = unfit.map_or_else(Vec::new, |peer| peer.to_string().into_bytes());
    let all = group.all_gather(&mine)?;
    let Some((rank, peer)) = all.iter().enumerate().find(|(_, peer)| !peer.is_empty()) else { return Ok(()) };
    Err(Error::Unavailable {
        what: format!("a pool that ranks {rank} and {} share", String::from_utf8_lossy(peer)),
        reason: "the link between their GPUs has no native atomics, as PCIe has not, and kernels count in each other's memory: use GPUs \
                 that NVLink connects (`nvidia-smi topo -p2p a` and `epoxide doctor` say which), or make these ranks different nodes \
                 (ranks_per_node) with a transport such as tcp"
            .into(),
    })
}

//! The pools of the ranks of this node, mapped. Ranks that can all map each other's pools are one
//! node.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use epoxide_gpu::layout::{DevicePtr, FEW_RANKS};

use super::agree_on_part;
use crate::driver::{Device, Memory};
use crate::ep::Topology;
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::transport::{self, TransportKind, TransportOptions};

/// The pools of the ranks of a node, mapped.
#[derive(Debug)]
pub struct Pools {
    topology: Topology,
    own: Arc<Memory>,
    /// By index within the node, the own pool included.
    addresses: Vec<u64>,
    _mappings: Vec<Arc<Memory>>,
}

impl Pools {
    fn new(topology: Topology, rank: u32, own: Memory) -> Pools {
        let mut addresses = vec![0; topology.ranks_per_node as usize];
        addresses[topology.index(rank) as usize] = own.ptr().0;
        Pools { topology, own: Arc::new(own), addresses, _mappings: Vec::new() }
    }

    fn add(&mut self, index: usize, mapping: Arc<Memory>) {
        self.addresses[index] = mapping.ptr().0;
        self._mappings.push(mapping);
    }

    /// Maps the pools of the ranks that are one node. If `joined` is given and all ranks can map
    /// each other's memory, these are all ranks; otherwise the ranks of a node of `nodes`. `alloc`
    /// makes this rank's pool; `meanwhile` gets the chosen topology, after the pools of all ranks
    /// are mapped or before those of a node. Collective.
    ///
    /// # Errors
    /// An error on every rank of the group where two ranks of a node are linked in a way that the
    /// protocol cannot use. Also all errors of `alloc`, `meanwhile`, the driver, the transport and
    /// the group.
    pub fn map<T>(
        device: &Device,
        group: &dyn ProcessGroup,
        (nodes, joined): (Topology, Option<Topology>),
        transport: &TransportOptions,
        alloc: impl Fn(Topology) -> Result<Memory>,
        meanwhile: impl FnOnce(Topology) -> Result<T>,
    ) -> Result<(Pools, T)> {
        if let Some(joined) = joined
            && let own = agree_on_part(group, alloc(joined))?
            && let Some(pools) = Pools::joined(device, group, joined, transport, own)?
        {
            return Ok((pools, meanwhile(joined)?));
        }
        let part = meanwhile(nodes).and_then(|done| {
            let own = alloc(nodes)?;
            Ok((done, own.export()?, own))
        });
        let (done, fd, own) = agree_on_part(group, part)?;
        Ok((Pools::of_node(device, group, nodes, own, fd)?, done))
    }

    /// How ranks are spread over nodes, one of which the pools are of.
    pub fn topology(&self) -> Topology {
        self.topology
    }

    /// This rank's pool.
    pub fn own(&self) -> &Arc<Memory> {
        &self.own
    }

    /// The addresses of the pools, by index within the node.
    pub fn addresses(&self) -> &[u64] {
        &self.addresses
    }

    /// The addresses of the first ranks' pools, as kernels get them.
    pub fn few(&self) -> [DevicePtr; FEW_RANKS] {
        std::array::from_fn(|rank| DevicePtr(self.addresses.get(rank).copied().unwrap_or(0)))
    }

    /// Maps the pools of all ranks of the group, which are one node in `topology`, on one host or
    /// in one NVLink domain; `None`, on every rank, where any rank cannot map another's or has no
    /// native atomics there. Collective.
    fn joined(
        device: &Device,
        group: &dyn ProcessGroup,
        topology: Topology,
        transport: &TransportOptions,
        own: Memory,
    ) -> Result<Option<Pools>> {
        let rank = group.rank();
        let mut pools = Pools::new(topology, rank, own);
        let others: Vec<u32> = (0..group.size()).filter(|peer| *peer != rank).collect();
        let devices = group.all_gather(device.info().pci_bus_id.as_bytes())?;
        let options = TransportOptions { kind: TransportKind::Auto, ..transport.clone() };
        let links = transport::connect(&options, &pools.own, group, &others, group.timeout())?;
        let mut map = |peer: u32| -> Result<bool> {
            let Some(mapping) = links.mapped(peer) else { return Ok(false) };
            pools.add(peer as usize, mapping.clone());
            device.driver.has_native_atomics_with(&String::from_utf8_lossy(&devices[peer as usize]))
        };
        let are_mapped = others.iter().try_fold(true, |all, peer| Ok(all & map(*peer)?));
        let answers = group.all_gather(&[agree_on_part(group, are_mapped)?.into()])?;
        Ok(answers.iter().all(|answer| answer[..] == [1]).then_some(pools))
    }

    /// Exchanges descriptors with the ranks of this node and maps their pools, all as large as
    /// `own`. Collective, among all ranks of the group.
    /// `fd` is that of `own`.
    fn of_node(
        device: &Device,
        group: &dyn ProcessGroup,
        topology: Topology,
        own: Memory,
        fd: OwnedFd,
    ) -> Result<Pools> {
        let rank = group.rank();
        // Only the ranks of a node map each other's pools.
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
        let unfit = others().try_fold(None, |unfit, (peer, id)| {
            let fits = device.driver.has_native_atomics_with(&String::from_utf8_lossy(id))?;
            Ok(unfit.or((!fits).then(|| rank_of(peer))))
        });
        refuse_unfit_links(group, agree_on_part(group, unfit)?)?;

        let bytes = own.bytes();
        let mut pools = Pools::new(topology, rank, own);
        for (peer, fds) in node.exchange_fds(&[fd.as_fd()])?.into_iter().enumerate() {
            for fd in fds.into_iter().filter(|_| peer != index) {
                let mapping = Memory::import(device, fd, bytes, &format!("pool of rank {}", rank_of(peer)))?;
                pools.add(peer, Arc::new(mapping));
            }
        }
        if topology.nodes > 1 {
            node.destroy()?;
        }
        Ok(pools)
    }
}

/// An error on every rank where any has a peer on its node whose link lacks atomics. Kernels add to
/// words of peers, and without atomics would never read the sum, so every operation would time out.
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

//! How ranks are spread over nodes.

use epoxide_gpu::layout::{FEW_RANKS, MAX_NODES, MAX_RANKS};

use crate::error::{Error, Result};
use crate::transport::TransportKind;

/// The number of ranks and their nodes: ranks 0 to `ranks_per_node - 1` are node 0, and so on. The
/// ranks of a node map each other's pools. The ranks with the same index on each node are a *rail*:
/// across nodes a rank exchanges data only with its rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Topology {
    /// Nodes.
    pub nodes: u32,
    /// Ranks of each node.
    pub ranks_per_node: u32,
}

impl Topology {
    /// `ranks` ranks, `ranks_per_node` on each node, or all on one.
    ///
    /// # Errors
    /// [`Error::Argument`] in these cases:
    /// * One node would have no ranks or more than 64.
    /// * One of several nodes would have no ranks or more than 8.
    /// * The nodes would not all have the same number of ranks.
    /// * There would be more than 32 nodes.
    pub fn new(ranks: u32, ranks_per_node: Option<u32>) -> Result<Topology> {
        let Some(per_node) = ranks_per_node else {
            if ranks == 0 || ranks > MAX_RANKS as u32 {
                let rule =
                    format!("one NVLink domain has 1 to {MAX_RANKS} ranks; with more, set ranks_per_node");
                return Err(Error::argument("group size", ranks, rule));
            }
            return Ok(Topology { nodes: 1, ranks_per_node: ranks });
        };
        let most = if per_node == ranks { MAX_RANKS } else { FEW_RANKS };
        if per_node == 0 || per_node > most as u32 {
            let rule =
                format!("one of several nodes has 1 to {FEW_RANKS} ranks, a single one up to {MAX_RANKS}");
            return Err(Error::argument("ranks_per_node", per_node, rule));
        }
        if ranks == 0 || !ranks.is_multiple_of(per_node) {
            let rule = format!("must divide the number of ranks, {ranks}: every node has as many");
            return Err(Error::argument("ranks_per_node", per_node, rule));
        }
        let nodes = ranks / per_node;
        if nodes > MAX_NODES as u32 {
            let rule = format!("{ranks} ranks would be {nodes} nodes; at most {MAX_NODES} are possible");
            return Err(Error::argument("ranks_per_node", per_node, rule));
        }
        Ok(Topology { nodes, ranks_per_node: per_node })
    }

    /// The ranks of several nodes as one node, which they become where all of them can map each
    /// other's memory; `None` where that is not to be tried.
    pub fn joined(&self, transport: TransportKind, keep_nodes: bool) -> Option<Topology> {
        let ranks = self.ranks();
        let may_join = self.nodes > 1 && ranks <= MAX_RANKS as u32 && transport.maps_memory() && !keep_nodes;
        may_join.then_some(Topology { nodes: 1, ranks_per_node: ranks })
    }

    /// Ranks of all nodes.
    pub fn ranks(&self) -> u32 {
        self.nodes * self.ranks_per_node
    }

    /// The node of a rank.
    pub fn node(&self, rank: u32) -> u32 {
        rank / self.ranks_per_node
    }

    /// A rank's index within its node, which is also the number of its rail.
    pub fn index(&self, rank: u32) -> u32 {
        rank % self.ranks_per_node
    }

    /// The rank with this index on this node.
    pub fn rank(&self, node: u32, index: u32) -> u32 {
        node * self.ranks_per_node + index
    }

    /// The other ranks of a rank's rail, in the order of their nodes.
    pub fn rail(&self, rank: u32) -> impl Iterator<Item = u32> + use<> {
        let (this, own) = (*self, self.node(rank));
        (0..self.nodes).filter(move |node| *node != own).map(move |node| this.rank(node, this.index(rank)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_a_node_an_index_and_a_rail() {
        let topology = Topology::new(12, Some(4)).unwrap();
        assert_eq!((topology.nodes, topology.ranks()), (3, 12));
        assert_eq!((topology.node(6), topology.index(6)), (1, 2));
        assert_eq!(topology.rank(1, 2), 6);
        assert_eq!(topology.rail(6).collect::<Vec<_>>(), [2, 10]);
        assert_eq!(Topology::new(3, None).unwrap().rail(1).count(), 0);
    }

    #[test]
    fn nodes_become_one_only_where_memory_may_be_mapped() {
        let topology = Topology::new(8, Some(2)).unwrap();
        let joined = Some(Topology { nodes: 1, ranks_per_node: 8 });
        assert_eq!(topology.joined(TransportKind::Auto, false), joined);
        assert_eq!(topology.joined(TransportKind::Direct, false), joined);
        assert_eq!(topology.joined(TransportKind::Direct, true), None);
        assert_eq!(topology.joined(TransportKind::Shm, false), None);
        assert_eq!(Topology::new(8, None).unwrap().joined(TransportKind::Auto, false), None);
        assert_eq!(Topology::new(64, Some(64)).unwrap(), Topology::new(64, None).unwrap());
        assert_eq!(Topology::new(256, Some(8)).unwrap().joined(TransportKind::Direct, false), None);
    }
}

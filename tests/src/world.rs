//! Where the ranks of a run are.

/// How many ranks there are, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct World {
    /// Nodes.
    pub nodes: u32,
    /// Ranks of each.
    pub ranks_per_node: u32,
}

impl World {
    /// Ranks of all nodes.
    pub fn ranks(&self) -> u32 {
        self.nodes * self.ranks_per_node
    }
}

//! Where the ranks of a run are.

pub use epoxide::ep::Topology as World;

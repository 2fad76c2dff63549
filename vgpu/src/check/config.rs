//! Configuration of check mode.

/// Configuration of check mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckConfig {
    /// Report races and reads of unwritten memory. If false, such accesses have the results that
    /// the memory model allows.
    pub races: bool,
    /// Weak memory: a read that may see an older value sometimes does, drawn from this seed. So a
    /// missing fence shows as a wrong result as well.
    pub weak_memory: Option<u64>,
    /// Report block barriers for all threads that some warps wait at and others end without, which
    /// the hardware lets pass.
    pub strict_exits: bool,
}

impl Default for CheckConfig {
    /// Checks races; loads return the values that the order of execution gives.
    fn default() -> Self {
        Self { races: true, weak_memory: None, strict_exits: false }
    }
}

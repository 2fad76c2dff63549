//! Where an access goes.

/// Memory that is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Global {
        shadow: u32,
        offset: u64,
    },
    /// Offset in the shared window.
    Shared {
        offset: u64,
    },
    /// A lane's own, or constant.
    Private,
}

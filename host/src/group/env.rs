//! The variables that ranks are described by.

/// Variable with this process's rank, `0..WORLD_SIZE`.
pub const RANK: &str = "RANK";
/// Variable with the number of ranks.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// Variable with the store's address: `file:///absolute/path` of a directory that is fresh for each run, or
/// `tcp://host:port` of a server that runs already. Goes before `MASTER_ADDR` and `MASTER_PORT`, where rank 0 is the
/// server.
pub const STORE: &str = "EPOXIDE_STORE";

pub use super::rendezvous::rendezvous;

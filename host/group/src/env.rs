//! The variables that ranks are described by.

/// Variable with this process's rank, `0..WORLD_SIZE`.
pub const RANK: &str = "RANK";
/// Variable with the number of ranks.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// Variable with the store's address: `file:///absolute/path` of a directory that is fresh for each
/// run, or `tcp://host:port` of a server that runs already. Takes precedence over `MASTER_ADDR` and
/// `MASTER_PORT`, where rank 0 is the server.
pub const STORE: &str = "EPOXIDE_STORE";
/// Variable with the rank's number among the ranks of its host.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// Variable with the number of ranks on the host.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
/// Variable with the host that rank 0 is on.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// Variable with the port on that host that rank 0 serves the store at.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// Variable with the number of restarts before this start.
pub const RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";

/// Variable with the folder of the launch that a process is part of. If the launcher is killed, the
/// next launch finds remaining processes by it.
pub const LAUNCH: &str = "EPOXIDE_LAUNCH";

/// Most ranks of a group. Each rank keeps state for every other, so a mistaken number could exhaust
/// memory.
pub const MAX_RANKS: u32 = 1 << 16;
/// Most ranks that a launch starts on a host.
pub const MAX_RANKS_PER_NODE: u32 = 1024;

/// The rule that a number of ranks breaks, and the remedy.
pub fn too_many_ranks() -> String {
    format!("a group has at most {MAX_RANKS} ranks; give the number of ranks of the whole job")
}

/// Reads a variable of the environment, or of a test's. An empty variable counts as unset.
pub type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Reads a variable of this process's environment; an empty one counts as unset.
pub fn environment(name: &str) -> Option<String> {
    let value = std::env::var_os(name)?;
    Some(value.to_string_lossy().trim().to_owned()).filter(|value| !value.is_empty())
}

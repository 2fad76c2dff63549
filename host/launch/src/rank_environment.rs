//! A rank's place in a launch, as the environment variables that torchrun sets.

use crate::group::internal::{MASTER_ADDR, MASTER_PORT, RESTART_COUNT};
use crate::group::{LOCAL_RANK, LOCAL_WORLD_SIZE, RANK, STORE, WORLD_SIZE};

/// The place of a rank among the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankEnvironment {
    /// The rank's number among the ranks of its host.
    pub local_rank: u32,
    /// Ranks of the host.
    pub local_size: u32,
    /// The host's number.
    pub node: u32,
    /// Hosts.
    pub nodes: u32,
    /// The host that rank 0 is on.
    pub master_addr: String,
    /// A port on that host for a store that rank 0 of a program may serve.
    pub master_port: u16,
    /// Where the ranks meet: the `file://` address of a directory on one host, the `tcp://` address
    /// of the first launcher's store with several.
    pub store: Option<String>,
    /// Restarts before this start.
    pub restarts: u32,
    /// Restarts that are allowed.
    pub max_restarts: u32,
    /// The launch's name.
    pub run_id: String,
}

impl RankEnvironment {
    /// The rank's number among all.
    pub fn rank(&self) -> u32 {
        self.node * self.local_size + self.local_rank
    }

    /// The number of all ranks.
    pub fn size(&self) -> u32 {
        self.nodes * self.local_size
    }

    /// The variables: those that torchrun sets, and [`STORE`].
    ///
    /// `OMP_NUM_THREADS` is not among them: see [`Launch`](super::Launch).
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        let mut variables = vec![
            (RANK, self.rank().to_string()),
            (WORLD_SIZE, self.size().to_string()),
            (LOCAL_RANK, self.local_rank.to_string()),
            (LOCAL_WORLD_SIZE, self.local_size.to_string()),
            ("GROUP_RANK", self.node.to_string()),
            ("GROUP_WORLD_SIZE", self.nodes.to_string()),
            ("ROLE_NAME", "default".to_owned()),
            ("ROLE_RANK", self.rank().to_string()),
            ("ROLE_WORLD_SIZE", self.size().to_string()),
            (MASTER_ADDR, self.master_addr.clone()),
            (MASTER_PORT, self.master_port.to_string()),
            (RESTART_COUNT, self.restarts.to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", self.max_restarts.to_string()),
            ("TORCHELASTIC_RUN_ID", self.run_id.clone()),
            // Rank 0 serves the store. torchrun's own process may serve it instead; this variable
            // then has another value.
            ("TORCHELASTIC_USE_AGENT_STORE", "False".to_owned()),
        ];
        if let Some(store) = &self.store {
            variables.push((STORE, store.clone()));
        }
        variables
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_count_through_the_nodes() {
        let environment = RankEnvironment {
            local_rank: 1,
            local_size: 4,
            node: 2,
            nodes: 3,
            master_addr: "host".to_owned(),
            master_port: 29500,
            store: None,
            restarts: 1,
            max_restarts: 5,
            run_id: "run".to_owned(),
        };
        let variables = environment.variables();
        let value =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str());
        for (name, expected) in [
            ("RANK", "9"),
            ("WORLD_SIZE", "12"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("GROUP_RANK", "2"),
            ("GROUP_WORLD_SIZE", "3"),
            ("ROLE_RANK", "9"),
            ("ROLE_WORLD_SIZE", "12"),
            ("MASTER_ADDR", "host"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RESTART_COUNT", "1"),
            ("TORCHELASTIC_MAX_RESTARTS", "5"),
            ("TORCHELASTIC_RUN_ID", "run"),
        ] {
            assert_eq!(value(name), Some(expected), "{name}");
        }
        assert_eq!(value(STORE), None);
    }
}

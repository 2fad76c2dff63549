//! Slurm's lists of hosts.

use crate::DEFAULT_PORT;

/// Ports that follow from a job's number are from here ...
const FIRST_PORT: u64 = 15000;
/// ... on; below the range that systems give out by themselves.
const PORTS: u64 = 15000;

/// The first host of a list such as `node[07-11,13],login1`.
pub(super) fn first_host(list: &str) -> Option<String> {
    let end = list.find(['[', ',']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let host = match rest.strip_prefix('[') {
        None => name.to_owned(),
        Some(ranges) => {
            let (ranges, rest) = ranges.split_once(']')?;
            let number = ranges.split(['-', ',']).next()?;
            // Several ranges in one name: racks and nodes.
            let suffix =
                if rest.is_empty() || rest.starts_with(',') { String::new() } else { first_host(rest)? };
            format!("{name}{number}{suffix}")
        }
    };
    Some(host).filter(|host| !host.is_empty())
}

/// The port that all ranks of a step compute alike.
pub(super) fn port(job: u64, step: u64) -> u16 {
    let port = FIRST_PORT + (job.wrapping_mul(31).wrapping_add(step)) % PORTS;
    u16::try_from(port).unwrap_or(DEFAULT_PORT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_ports() {
        let cases = [
            ("node7", "node7"),
            ("node7,node8", "node7"),
            ("node[07-11,13],login1", "node07"),
            ("n[3,5].cluster", "n3.cluster"),
            ("rack[1-2]node[4-9]", "rack1node4"),
            ("r[1-2]n[01,03],login1", "r1n01"),
        ];
        for (list, first) in cases {
            assert_eq!(first_host(list).as_deref(), Some(first), "{list}");
        }
        assert_eq!(first_host(""), None);
        assert_eq!(first_host("node[3"), None);
        assert_eq!(first_host("r[1]n[0"), None);
        assert!((15000..30000).contains(&port(u64::MAX, 7)));
    }
}

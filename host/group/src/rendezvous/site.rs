//! Where the ranks meet, from the environment or an address.

use std::path::{Path, PathBuf};

use super::member::{Launcher, Member};
use super::slurm;
use crate::env::{Lookup, MASTER_ADDR, MASTER_PORT, STORE};
use crate::error::{Error, Result};

/// torchrun sets it to `True` when it serves the store itself.
const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
const ADDRESS: &str = "address";
const FORMS: &str =
    "must be env://, tcp://host:port?rank=R&world_size=N or file:///directory?rank=R&world_size=N";

/// Where the ranks meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Site {
    /// In a directory.
    Directory(PathBuf),
    /// At a server that runs already.
    Server {
        /// Its host.
        host: String,
        /// Its port.
        port: u16,
    },
    /// At torchrun's own server.
    Agent {
        /// Its host.
        host: String,
        /// Its port.
        port: u16,
    },
    /// At a server that rank 0 is to start.
    Rank0 {
        /// Rank 0's host.
        host: String,
        /// The port there.
        port: u16,
    },
}

impl Site {
    /// The place that the environment names.
    pub(super) fn from_variables(member: &Member, variable: Lookup<'_>) -> Result<Site> {
        if let Some(address) = variable(STORE) {
            return store_address(&address);
        }
        match (variable(MASTER_ADDR), variable(MASTER_PORT)) {
            (Some(host), Some(port)) => {
                let port = parse_port(MASTER_PORT, &port)?;
                Ok(server(host, port, variable))
            }
            (Some(_), None) => {
                let rule = format!("{MASTER_ADDR} is set, and this must be the port of the store there");
                Err(Error::argument(MASTER_PORT, "unset", rule))
            }
            (None, Some(_)) => {
                let rule = format!("{MASTER_PORT} is set, and this must be the host of rank 0");
                Err(Error::argument(MASTER_ADDR, "unset", rule))
            }
            (None, None) => Site::of_launcher(member, variable),
        }
    }

    /// The place that the variables of a launcher name that sets none of PyTorch's.
    fn of_launcher(member: &Member, variable: Lookup<'_>) -> Result<Site> {
        match member.launcher {
            Launcher::OpenMpi => {
                // The session's directory is its own, and removed at its end; each host has one.
                let one_host = member.local_size == Some(member.size);
                if let (true, Some(session)) = (one_host, variable("PMIX_SERVER_TMPDIR")) {
                    let job = variable("PMIX_NAMESPACE").unwrap_or_default();
                    return Ok(Site::Directory(Path::new(&session).join(format!("epoxide-{job}"))));
                }
                let rule = format!(
                    "Open MPI does not say where rank 0 is; run `mpirun -x {MASTER_ADDR}=HOST -x {MASTER_PORT}=PORT ..` \
                     with the host of rank 0"
                );
                Err(Error::argument(MASTER_ADDR, "unset", rule))
            }
            Launcher::Slurm => {
                let hosts = variable("SLURM_STEP_NODELIST").or_else(|| variable("SLURM_JOB_NODELIST"));
                let host = hosts.as_deref().and_then(slurm::first_host);
                let number =
                    |names: [&str; 2]| names.iter().find_map(|name| variable(name)?.parse::<u64>().ok());
                let job = number(["SLURM_JOB_ID", "SLURM_JOBID"]);
                let step = number(["SLURM_STEP_ID", "SLURM_STEPID"]);
                match (host, job) {
                    (Some(host), Some(job)) => {
                        Ok(Site::Rank0 { host, port: slurm::port(job, step.unwrap_or_default()) })
                    }
                    (None, _) => Err(Error::argument(
                        "SLURM_STEP_NODELIST",
                        hosts.unwrap_or_else(|| "unset".to_owned()),
                        format!("must be a list of hosts; or set {MASTER_ADDR} and {MASTER_PORT}"),
                    )),
                    (_, None) => Err(Error::argument(
                        "SLURM_JOB_ID",
                        "unset",
                        format!("must be the job's number; or set {MASTER_ADDR} and {MASTER_PORT}"),
                    )),
                }
            }
            _ => Err(Error::argument(
                STORE,
                "unset",
                format!(
                    "the environment must say where the ranks meet: here, such as file:///tmp/run1, or with \
                     {MASTER_ADDR} and {MASTER_PORT}; `epoxide launch` and torchrun set them"
                ),
            )),
        }
    }

    /// The meeting place of an address, and this rank's identity: from the address, else from the
    /// environment.
    pub(super) fn from_address(address: &str, variable: Lookup<'_>) -> Result<(Member, Site)> {
        let (place, query) = address.split_once('?').unwrap_or((address, ""));
        let member = match parse_query(address, query)? {
            (Some(rank), Some(size)) => Member::new(rank, size, "rank", "world_size")?,
            (None, None) => Member::required(variable)?,
            (Some(_), None) => return Err(missing(address, "world_size")),
            (None, Some(_)) => return Err(missing(address, "rank")),
        };
        let site = if let Some(path) = place.strip_prefix("file://") {
            Site::Directory(absolute(ADDRESS, address, path)?)
        } else if let Some(authority) = place.strip_prefix("tcp://") {
            let (host, port) = host_and_port(ADDRESS, address, authority)?;
            server(host, port, variable)
        } else {
            return Err(Error::argument(ADDRESS, address, FORMS));
        };
        Ok((member, site))
    }
}

/// Reads an address that a user gives: it names a place, or the error names what is wrong with it.
pub fn fuzz_addresses(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    for site in [Site::from_address(&text, &|_| None).map(|(_, site)| site), store_address(&text)] {
        match site {
            Ok(Site::Directory(path)) => assert!(path.is_absolute()),
            Ok(Site::Server { host, port } | Site::Agent { host, port } | Site::Rank0 { host, port }) => {
                assert!(!host.is_empty() && port > 0);
            }
            Err(error) => assert!(matches!(error, Error::Argument { .. }), "{error}"),
        }
    }
    // Lists of hosts as Slurm writes them.
    if let Some(host) = slurm::first_host(&text) {
        assert!(host.len() <= text.len());
    }
}

/// Addresses of each kind.
pub fn sample_addresses() -> Vec<Vec<u8>> {
    let all = [
        "tcp://host:29500?rank=0&world_size=2",
        "tcp://[::1]:5?rank=1&world_size=2",
        "file:///tmp/run1?rank=0&world_size=1",
        "tcp://node1:29500",
        "file:///tmp/run1",
        "n[003-5,7]-ib,other",
    ];
    all.map(|text| text.as_bytes().to_vec()).to_vec()
}

/// The server at an address where rank 0 starts it, unless torchrun has.
fn server(host: String, port: u16, variable: Lookup<'_>) -> Site {
    let agent = variable(AGENT_STORE).is_some_and(|value| value == "True")
        && variable(MASTER_ADDR).is_some_and(|value| value == host)
        && variable(MASTER_PORT).is_some_and(|value| value == port.to_string());
    if agent { Site::Agent { host, port } } else { Site::Rank0 { host, port } }
}

fn store_address(address: &str) -> Result<Site> {
    if let Some(path) = address.strip_prefix("file://") {
        return absolute(STORE, address, path).map(Site::Directory);
    }
    if let Some(authority) = address.strip_prefix("tcp://") {
        let (host, port) = host_and_port(STORE, address, authority)?;
        return Ok(Site::Server { host, port });
    }
    let rule = "must be file:// with an absolute path, such as file:///tmp/run1, or tcp://host:port";
    Err(Error::argument(STORE, address, rule))
}

fn absolute(argument: &'static str, address: &str, path: &str) -> Result<PathBuf> {
    let path = Path::new(path);
    if !path.is_absolute() {
        let rule = "the path after file:// must be absolute, such as file:///tmp/run1";
        return Err(Error::argument(argument, address, rule));
    }
    Ok(path.to_owned())
}

fn host_and_port(argument: &'static str, address: &str, authority: &str) -> Result<(String, u16)> {
    let authority = authority.trim_end_matches('/');
    let is_host = |host: &str| !matches!(host, "" | "[]") && !host.ends_with(':');
    let parts = authority.rsplit_once(':').filter(|(host, _)| is_host(host));
    let Some((host, port)) = parts else {
        let rule = "must have a host and a port, such as tcp://node1:29500 or tcp://[::1]:29500";
        return Err(Error::argument(argument, address, rule));
    };
    let port = parse_port(argument, port)?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    Ok((bare.unwrap_or(host).to_owned(), port))
}

fn parse_port(argument: &'static str, text: &str) -> Result<u16> {
    text.trim().parse().ok().filter(|port| *port != 0).ok_or_else(|| {
        Error::argument(argument, text, "must be a port, 1 to 65535, which all ranks know beforehand")
    })
}

/// Rank and size.
fn parse_query(address: &str, query: &str) -> Result<(Option<u32>, Option<u32>)> {
    let (mut rank, mut size) = (None, None);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let (slot, name) = match name {
            "rank" => (&mut rank, "rank"),
            "world_size" => (&mut size, "world_size"),
            _ => {
                return Err(Error::argument(ADDRESS, address, format!("{name} is not known; it {FORMS}")));
            }
        };
        let number =
            value.parse::<u32>().map_err(|_| Error::argument(name, value, "must be a whole number"))?;
        if slot.replace(number).is_some() {
            return Err(Error::argument(ADDRESS, address, format!("has {name} twice")));
        }
    }
    Ok((rank, size))
}

fn missing(address: &str, name: &'static str) -> Error {
    Error::argument(name, "unset", format!("{address} needs both rank and world_size, or neither"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(address: &str, variables: &str) -> Result<Site> {
        let lookup = |name: &str| {
            let mut pairs = variables.split_whitespace().filter_map(|pair| pair.split_once('='));
            pairs.find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
        };
        match address {
            "env://" => Site::from_variables(&Member::required(&lookup)?, &lookup),
            _ => Site::from_address(address, &lookup).map(|(_, site)| site),
        }
    }

    #[test]
    fn sites() {
        let host = || "h".to_owned();
        let master = "RANK=0 WORLD_SIZE=1 MASTER_ADDR=h MASTER_PORT=5";
        let agent = format!("{master} {AGENT_STORE}=True");
        let ompi = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 \
                    PMIX_SERVER_TMPDIR=/tmp/s PMIX_NAMESPACE=77";
        let slurm = "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_ID=1 SLURM_JOB_ID=2 SLURM_STEP_NODELIST=n[3-4]";
        let cases = [
            ("env://", master, Site::Rank0 { host: host(), port: 5 }),
            ("env://", &*agent, Site::Agent { host: host(), port: 5 }),
            ("tcp://h:5", &*agent, Site::Agent { host: host(), port: 5 }),
            ("tcp://h:6", &*agent, Site::Rank0 { host: host(), port: 6 }),
            ("env://", "RANK=0 WORLD_SIZE=1 EPOXIDE_STORE=tcp://h:5", Site::Server { host: host(), port: 5 }),
            ("env://", "RANK=0 WORLD_SIZE=1 EPOXIDE_STORE=file:///d", Site::Directory("/d".into())),
            ("env://", ompi, Site::Directory("/tmp/s/epoxide-77".into())),
            ("env://", slurm, Site::Rank0 { host: "n3".to_owned(), port: 15063 }),
            ("tcp://[::1]:5?rank=0&world_size=1", "", Site::Rank0 { host: "::1".to_owned(), port: 5 }),
            ("file:///d/e?rank=0&world_size=1", "", Site::Directory("/d/e".into())),
        ];
        for (address, variables, site) in cases {
            assert_eq!(resolve(address, variables).unwrap(), site, "{address} {variables}");
        }
    }

    #[test]
    fn errors_name_the_part() {
        let cases = [
            ("env://", "RANK=0 WORLD_SIZE=1", STORE),
            ("env://", "RANK=0 WORLD_SIZE=1 MASTER_ADDR=h", MASTER_PORT),
            ("env://", "RANK=0 WORLD_SIZE=1 MASTER_PORT=1", MASTER_ADDR),
            ("env://", "RANK=0 WORLD_SIZE=1 MASTER_ADDR=h MASTER_PORT=0", MASTER_PORT),
            ("env://", "RANK=0 WORLD_SIZE=1 MASTER_ADDR=h MASTER_PORT=65536", MASTER_PORT),
            ("env://", "RANK=0 WORLD_SIZE=1 EPOXIDE_STORE=tcp://h", STORE),
            ("env://", "RANK=0 WORLD_SIZE=1 EPOXIDE_STORE=file://d", STORE),
            ("env://", "RANK=0 WORLD_SIZE=1 EPOXIDE_STORE=/d", STORE),
            ("env://", "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2", MASTER_ADDR),
            ("env://", "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_ID=1 SLURM_JOB_ID=2", "SLURM_STEP_NODELIST"),
            ("env://", "WORLD_SIZE=2", "RANK"),
            ("env://", "", "WORLD_SIZE"),
            ("tcp://h:5", "", "WORLD_SIZE"),
            ("tcp://h:5?rank=0", "", "world_size"),
            ("tcp://h:5?world_size=1", "", "rank"),
            ("tcp://h:5?rank=1&world_size=1", "", "rank"),
            ("tcp://h:5?rank=x&world_size=1", "", "rank"),
            ("tcp://h:5?rank=0&rank=0&world_size=1", "", ADDRESS),
            ("tcp://h:5?rank=0&world_size=1&color=2", "", ADDRESS),
            ("tcp://:5?rank=0&world_size=1", "", ADDRESS),
            ("tcp://[]:5?rank=0&world_size=1", "", ADDRESS),
            ("file://d?rank=0&world_size=1", "", ADDRESS),
            ("udp://h:5?rank=0&world_size=1", "", ADDRESS),
        ];
        for (address, variables, name) in cases {
            let error = resolve(address, variables).unwrap_err();
            assert!(
                matches!(&error, Error::Argument { argument, .. } if *argument == name),
                "{address} {variables}: {error}"
            );
        }
    }
}

//! The identity of a group before it exists, as in NCCL.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use hmac_sha256::HMAC;

use super::member::Launcher;
use super::{LINGER, Member, PREFIX, Rendezvous, agree_on_size};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::mesh::interface_address;
use crate::secret::{hex, random};
use crate::{ConnectionLimits, JobSecret, MeshGroup, PrefixStore, TcpStore, TcpStoreOptions};

/// The first bytes of an id; the last one is the version.
const MAGIC: [u8; 8] = *b"epoxide\x01";
const SECRET_BYTES: usize = 32;
/// Where the port, the address, the secret, zeros and the check sum begin.
const PORT: usize = 8;
const ADDRESS: usize = 10;
const SECRET: usize = 26;
const ZEROS: usize = SECRET + SECRET_BYTES;
const CHECK: usize = 120;

/// How long a server that was just started may take to answer.
const START: Duration = Duration::from_secs(60);

/// Servers of the ids that this process has made, until a rank of this process takes them.
static SERVERS: LazyLock<Mutex<HashMap<[u8; UniqueId::BYTES], TcpStore>>> = LazyLock::new(Mutex::default);

/// The identity of a group for its ranks: 128 bytes, as NCCL's `ncclUniqueId` has.
///
/// One process makes it; the caller brings its bytes to all ranks, which join with
/// [`UniqueId::group`]. The id is good for one group. It holds the address and the port of a store
/// that the process serves, and a secret that all connections of the group prove: share it like a
/// password. The environment's secret and addresses are ignored, except [`SOCKET_IFNAME`].
///
/// [`SOCKET_IFNAME`]: crate::SOCKET_IFNAME
///
/// ```
/// use std::time::Duration;
///
/// use epoxide_group::{ProcessGroup, UniqueId};
///
/// let timeout = Duration::from_secs(60);
/// let bytes: [u8; 128] = *UniqueId::new()?.bytes();
/// // .. which reach the other ranks by a message, a file or an argument of `ctx_create`.
/// let join = |rank: u32| -> epoxide_group::Result<Vec<Vec<u8>>> {
///     let group = UniqueId::from_bytes(bytes)?.group(rank, 2, timeout)?;
///     group.all_gather(&[rank as u8])
/// };
/// std::thread::scope(|scope| {
///     let other = scope.spawn(|| join(1));
///     assert_eq!(join(0)?, [[0], [1]]);
///     other.join().expect("no panic").map(drop)
/// })?;
/// # Ok::<(), epoxide_group::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; UniqueId::BYTES]);

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(..)")
    }
}

impl UniqueId {
    /// How long it is.
    pub const BYTES: usize = 128;

    /// A new one. This process serves the group's store from now on, at a free port of the address
    /// by which other hosts reach it ([`SOCKET_IFNAME`]). Usually rank 0 makes it. The server ends
    /// with the group of the first rank of this process that joins; without one, with the process.
    ///
    /// [`SOCKET_IFNAME`]: crate::SOCKET_IFNAME
    ///
    /// # Errors
    /// Where [`SOCKET_IFNAME`] names no interface, or the system has no port or no random numbers.
    pub fn new() -> Result<UniqueId> {
        let ip = interface_address(None)?;
        let mut bytes = [0; UniqueId::BYTES];
        bytes[..PORT].copy_from_slice(&MAGIC);
        let mapped = match ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        bytes[ADDRESS..SECRET].copy_from_slice(&mapped.octets());
        bytes[SECRET..ZEROS].copy_from_slice(&random::<SECRET_BYTES>()?);
        let options = TcpStoreOptions { secret: Some(secret_of(&bytes)?), ..TcpStoreOptions::new(START) };
        let store = TcpStore::host_at(&ip.to_string(), 0, &options)?;
        bytes[PORT..ADDRESS].copy_from_slice(&store.port().to_be_bytes());
        let check = check_of(&bytes);
        bytes[CHECK..].copy_from_slice(&check);
        lock(&SERVERS).insert(bytes, store);
        Ok(UniqueId(bytes))
    }

    /// The one of these bytes, as another rank's [`UniqueId::bytes`] gave them.
    ///
    /// # Errors
    /// [`Error::Argument`] where they are none: damaged, of another version, or of another library
    /// such as NCCL.
    pub fn from_bytes(bytes: [u8; UniqueId::BYTES]) -> Result<UniqueId> {
        let refuse = |rule: &str| Err(Error::argument("unique_id", "128 bytes, not shown", rule));
        if bytes[..PORT] != MAGIC {
            return refuse("it is not one of this version of epoxide: UniqueId::new makes them");
        }
        if bytes[CHECK..] != check_of(&bytes) {
            return refuse("bytes were changed on the way: send all 128 as UniqueId::bytes gives them");
        }
        Ok(UniqueId(bytes))
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8; UniqueId::BYTES] {
        &self.0
    }

    /// Joins the group as `rank` of `num_ranks`, and waits for the others. Collectives wait up to
    /// `timeout`. Collective.
    ///
    /// # Errors
    /// [`Error::Argument`] where `rank` is not below `num_ranks`, or another rank gave another
    /// `num_ranks`. Where the process that made the id has ended or cannot be reached, where `rank`
    /// has joined already, and where another rank does not join within `timeout`.
    pub fn group(&self, rank: u32, num_ranks: u32, timeout: Duration) -> Result<MeshGroup> {
        if rank >= num_ranks {
            let rule = format!("must be below num_ranks, {num_ranks}: ranks count from 0");
            return Err(Error::argument("rank", rank, rule));
        }
        let secret = secret_of(&self.0)?;
        let options = TcpStoreOptions { secret: Some(secret.clone()), ..TcpStoreOptions::new(timeout) };
        let own = lock(&SERVERS).remove(&self.0);
        let store = match own {
            Some(mut store) => {
                store.set_timeout(timeout);
                store.set_linger(LINGER.min(timeout));
                store
            }
            None => TcpStore::connect_with(&self.host(), self.port(), &options)?,
        };
        let store = Arc::new(PrefixStore::new(PREFIX, Arc::new(store)));
        let member = Member {
            rank,
            size: num_ranks,
            local_rank: None,
            local_size: None,
            launcher: Launcher::Plain,
            size_name: "num_ranks",
        };
        agree_on_size(&*store, &member)?;
        let limits = ConnectionLimits::default();
        Rendezvous { member, store, limits, secret: Some(secret) }.group("world", timeout)
    }

    fn port(&self) -> u16 {
        u16::from_be_bytes([self.0[PORT], self.0[PORT + 1]])
    }

    fn host(&self) -> String {
        let mut octets = [0; 16];
        octets.copy_from_slice(&self.0[ADDRESS..SECRET]);
        Ipv6Addr::from(octets).to_canonical().to_string()
    }
}

fn secret_of(bytes: &[u8; UniqueId::BYTES]) -> Result<JobSecret> {
    JobSecret::new(&hex(&bytes[SECRET..ZEROS]))
}

/// Bytes that change with any other byte.
fn check_of(bytes: &[u8; UniqueId::BYTES]) -> [u8; UniqueId::BYTES - CHECK] {
    let mut check = [0; UniqueId::BYTES - CHECK];
    check.copy_from_slice(&HMAC::mac(&bytes[..CHECK], MAGIC)[..UniqueId::BYTES - CHECK]);
    check
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::ProcessGroup;

    const TIMEOUT: Duration = Duration::from_secs(120);

    fn in_threads<T: Send>(ranks: u32, join: impl Fn(u32) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let join = &join;
            let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || join(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_meet_by_its_bytes_alone() {
        let bytes = *UniqueId::new().unwrap().bytes();
        let gathered = in_threads(3, |rank| {
            let group = UniqueId::from_bytes(bytes).unwrap().group(rank, 3, TIMEOUT).unwrap();
            assert_eq!((group.rank(), group.size()), (rank, 3));
            assert!(group.job_secret().unwrap().is_some(), "connections prove the secret");
            group.all_gather(&[rank as u8]).unwrap()
        });
        assert_eq!(gathered, vec![vec![vec![0], vec![1], vec![2]]; 3]);
    }

    #[test]
    fn two_groups_of_a_process_do_not_meet() {
        let ids = [UniqueId::new().unwrap(), UniqueId::new().unwrap()];
        assert_ne!(ids[0], ids[1]);
        let gathered = in_threads(4, |thread| {
            let (id, rank) = (ids[thread as usize % 2], thread / 2);
            id.group(rank, 2, TIMEOUT).unwrap().all_gather(&[thread as u8]).unwrap()
        });
        assert_eq!(gathered[0], [[0], [2]]);
        assert_eq!(gathered[3], [[1], [3]]);
    }

    #[test]
    fn other_bytes_are_refused_and_never_shown() {
        let id = UniqueId::new().unwrap();
        assert_eq!(format!("{id:?}"), "UniqueId(..)");
        for (at, part) in [(0, "UniqueId::new"), (PORT, "changed"), (SECRET, "changed"), (127, "changed")] {
            let mut bytes = *id.bytes();
            bytes[at] ^= 1;
            let error = UniqueId::from_bytes(bytes).unwrap_err().to_string();
            assert!(error.starts_with("unique_id = 128 bytes, not shown") && error.contains(part), "{error}");
        }
        assert!(UniqueId::from_bytes([0; UniqueId::BYTES]).is_err());
        assert_eq!(UniqueId::from_bytes(*id.bytes()).unwrap(), id);
    }

    #[test]
    fn arguments_are_checked() {
        let id = UniqueId::new().unwrap();
        for (rank, size) in [(0, 0), (2, 2)] {
            let error = id.group(rank, size, TIMEOUT).unwrap_err().to_string();
            assert!(error.starts_with(&format!("rank = {rank}: must be below num_ranks, {size}")), "{error}");
        }
        let group = id.group(0, 1, TIMEOUT).unwrap();
        let error = id.group(0, 2, TIMEOUT).unwrap_err().to_string();
        assert!(error.starts_with("num_ranks = 2: the rank that came first says 1"), "{error}");
        let error = id.group(0, 1, TIMEOUT).unwrap_err().to_string();
        assert!(error.contains("rank 0 is taken"), "{error}");
        drop(group);
    }

    #[test]
    fn who_does_not_know_the_secret_stays_out() {
        let id = UniqueId::new().unwrap();
        let mut forged = *id.bytes();
        forged[SECRET] ^= 1;
        let check = check_of(&forged);
        forged[CHECK..].copy_from_slice(&check);
        let error = UniqueId::from_bytes(forged).unwrap().group(0, 1, TIMEOUT).unwrap_err().to_string();
        assert!(error.contains("secret"), "{error}");
        id.group(0, 1, TIMEOUT).unwrap();
    }

    #[test]
    fn a_maker_that_is_gone_is_an_error_in_time() {
        // A port where nothing listens.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut bytes = *UniqueId::new().unwrap().bytes();
        bytes[ADDRESS..SECRET].copy_from_slice(&std::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets());
        bytes[PORT..ADDRESS].copy_from_slice(&port.to_be_bytes());
        let check = check_of(&bytes);
        bytes[CHECK..].copy_from_slice(&check);
        let id = UniqueId::from_bytes(bytes).unwrap();
        let error = id.group(1, 2, Duration::from_millis(300)).unwrap_err().to_string();
        assert!(error.contains(&format!("127.0.0.1:{port}")), "{error}");
    }
}

//! The exchange of ranks before they connect, so that they agree or all fail.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::options::{MAX_QUEUES, TransportKind};
use super::setup::{LinkEnds, Setup};
use crate::error::{Error, Result};
use crate::foreign::escaped;
use crate::group::ProcessGroup;

/// The first word of every transport's first message.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"epoxwire");
/// The version of the greeting and of all messages over the links.
pub(super) const VERSION: u32 = 5;
/// Distinguishes these links from others of the same ranks, such as those within a node.
pub(super) const PHASE: u32 = 1;

/// The part that stays the same in every version.
#[derive(Debug, Serialize, Deserialize)]
struct Preamble {
    magic: u64,
    version: u32,
}

/// The parameters with which a rank connects.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Greeting {
    magic: u64,
    version: u32,
    phase: u32,
    kind: String,
    queues: u32,
    memory: u64,
    pub peers: Vec<u32>,
    /// A connecting process must prove the job's secret.
    secret: bool,
    /// The rank's address in the transport's format, or the reason why it has none.
    pub address: Result<String, String>,
}

/// Rejects wrong arguments of this rank.
pub(super) fn check_arguments(setup: &Setup<'_>) -> Result<()> {
    let (rank, size) = (setup.group.rank(), setup.group.size());
    let queues = setup.options.queues_per_peer;
    if queues == 0 || queues > MAX_QUEUES {
        return Err(Error::argument("queues_per_peer", queues, format!("give 1 to {MAX_QUEUES}")));
    }
    let ascending = setup.peers.windows(2).all(|pair| pair[0] < pair[1]);
    if !ascending || setup.peers.iter().any(|peer| *peer >= size || *peer == rank) {
        let rule = format!("ranks of the group of {size}, ascending, without rank {rank} itself");
        return Err(Error::argument("peers", format!("{:?}", setup.peers), rule));
    }
    Ok(())
}

/// Publishes this rank's address, or why it has none. Returns every rank's greeting, by rank.
///
/// # Errors
/// On every rank, if one of them has no address or two of them differ.
pub(super) fn meet(setup: &Setup<'_>, address: Result<String>) -> Result<Vec<Greeting>> {
    let secret = setup.group.job_secret();
    let has_secret = secret.as_ref().is_ok_and(Option::is_some);
    let address = secret.and(address);
    let ours = Greeting {
        magic: MAGIC,
        version: VERSION,
        phase: PHASE,
        kind: setup.options.kind.to_string(),
        queues: setup.options.queues_per_peer,
        memory: setup.memory.bytes(),
        peers: setup.peers.to_vec(),
        secret: has_secret,
        address: address.as_ref().map_err(Error::to_string).cloned(),
    };
    let bytes = serde_json::to_vec(&ours).map_err(|error| Error::internal("serialise", error))?;
    let all = setup.group.all_gather(&bytes)?;
    // This rank's own error has more detail than the text in its greeting.
    address?;
    let all: Vec<Greeting> =
        (0..).zip(&all).map(|(peer, bytes)| read(setup, peer, bytes)).collect::<Result<_>>()?;
    for (peer, theirs) in (0..).zip(&all) {
        compare(setup, peer, &ours, theirs)?;
    }
    for (rank, greeting) in (0u32..).zip(&all) {
        for peer in &greeting.peers {
            let mutual = all.get(*peer as usize).is_some_and(|other| other.peers.contains(&rank));
            if !mutual {
                let reason =
                    format!("rank {rank} lists rank {peer} among its peers, but not the other way round");
                return Err(setup.ends(rank).error("connect", reason));
            }
        }
    }
    Ok(all)
}

/// Every rank's address, by rank, where the transport's addresses are offers in JSON.
pub(super) fn offers<T: DeserializeOwned>(setup: &Setup<'_>, all: &[Greeting]) -> Result<Vec<T>> {
    let read = |(peer, greeting): (u32, &Greeting)| {
        // `meet` has found an address in every greeting.
        let text = greeting.address.as_deref().unwrap_or_default();
        serde_json::from_str(text)
            .map_err(|error| setup.ends(peer).error("connect", format!("its offer is unreadable: {error}")))
    };
    (0..).zip(all).map(read).collect()
}

fn read(setup: &Setup<'_>, peer: u32, bytes: &[u8]) -> Result<Greeting> {
    let unreadable = |error: serde_json::Error| {
        setup.ends(peer).error("connect", format!("its greeting is unreadable: {error}"))
    };
    let Preamble { magic, version } = serde_json::from_slice(bytes).map_err(unreadable)?;
    if magic != MAGIC {
        return Err(setup.ends(peer).error("connect", "its greeting is not one of epoxide's transports"));
    }
    same(setup, peer, "the version of the transport's protocol", VERSION, version)?;
    serde_json::from_slice(bytes).map_err(unreadable)
}

fn compare(setup: &Setup<'_>, peer: u32, ours: &Greeting, theirs: &Greeting) -> Result<()> {
    if let Err(reason) = &theirs.address {
        return Err(setup
            .ends(peer)
            .error("connect", format!("rank {peer} cannot take part: {}", escaped(reason.as_bytes()))));
    }
    same(setup, peer, "the phase that is being connected", ours.phase, theirs.phase)?;
    same(setup, peer, "the transport", &ours.kind, &theirs.kind)?;
    same(setup, peer, "queues_per_peer", ours.queues, theirs.queues)?;
    same(setup, peer, "whether the job has a secret", ours.secret, theirs.secret)?;
    same(setup, peer, "the bytes of wire memory", ours.memory, theirs.memory)
}

/// An error where `what` differs between this rank and `peer`.
pub(super) fn same<T: PartialEq + ToString>(
    setup: &Setup<'_>,
    peer: u32,
    what: &'static str,
    ours: T,
    theirs: T,
) -> Result<()> {
    if ours == theirs {
        return Ok(());
    }
    let (ours, theirs) = (ours.to_string(), theirs.to_string());
    Err(Error::Mismatch { rank: setup.group.rank(), peer, what, ours, theirs })
}

/// Returns the outcome once every rank has one; fails where any of them failed.
pub(super) fn agree<T>(group: &dyn ProcessGroup, kind: TransportKind, outcome: Result<T>) -> Result<T> {
    let ends = |peer| LinkEnds { transport: kind.name(), rank: group.rank(), peer };
    agree_or(group, outcome, |peer, _, reason| {
        ends(peer).error("connect", format!("rank {peer} failed: {reason}"))
    })
}

/// The same; `failed` makes the error where a peer failed: of its rank, whether it lacks a
/// requirement, and the reason.
pub(crate) fn agree_or<T>(
    group: &dyn ProcessGroup,
    outcome: Result<T>,
    failed: impl FnOnce(u32, bool, String) -> Error,
) -> Result<T> {
    const LACKS: u8 = b'?';
    const FAILED: u8 = b'!';
    let mark = if matches!(outcome, Err(Error::Unavailable { .. })) { LACKS } else { FAILED };
    let text = outcome.as_ref().err().map(|error| [&[mark], error.to_string().as_bytes()].concat());
    let all = group.all_gather(&text.unwrap_or_default());
    let value = outcome?;
    match (0u32..).zip(&all?).find_map(|(peer, text)| Some((peer, text.split_first()?))) {
        None => Ok(value),
        Some((peer, (mark, text))) => Err(failed(peer, *mark == LACKS, escaped(text))),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::driver::virt::{VirtConfig, VirtualGpu};
    use crate::driver::{Memory, MemoryKind};
    use crate::group::{HashStore, MeshGroup, MeshOptions};
    use crate::transport::{TransportOptions, Writer};

    #[test]
    fn another_version_is_named_with_both_versions() {
        let device = VirtualGpu::new(VirtConfig::default());
        let memory = Memory::alloc(&device, 4096, MemoryKind::MappedHost, "wire").unwrap().into();
        let store = std::sync::Arc::new(HashStore::new());
        let group = MeshGroup::new(store, 0, 1, "alone", MeshOptions::default()).unwrap();
        let options = TransportOptions { queues_per_peer: 1, ..TransportOptions::new(TransportKind::Tcp) };
        let timeout = Duration::from_secs(120);
        let setup = Setup {
            options: &options,
            memory: &memory,
            group: &group,
            peers: &[],
            timeout,
            writer: Writer::Proxies,
        };
        let ours = meet(&setup, Ok("here".into())).unwrap().remove(0);

        let error = |value: serde_json::Value| {
            let bytes = serde_json::to_vec(&value).unwrap();
            read(&setup, 3, &bytes).unwrap_err().to_string()
        };
        let text = error(serde_json::json!({ "magic": MAGIC, "version": 7, "new": "field" }));
        assert!(text.contains("rank 3") && text.contains(&format!("{VERSION} here, 7 there")), "{text}");
        assert!(error(serde_json::json!({ "magic": 5, "version": 1 })).contains("not one of epoxide's"));
        assert!(error(serde_json::json!([1])).contains("unreadable"));

        let differs = |theirs: Greeting| compare(&setup, 3, &ours, &theirs).unwrap_err().to_string();
        assert!(differs(Greeting { phase: 0, ..ours.clone() }).contains("phase"));
        assert!(differs(Greeting { queues: 2, ..ours.clone() }).contains("1 here, 2 there"));
        assert!(
            differs(Greeting { secret: true, ..ours.clone() }).contains("secret: false here, true there")
        );
        assert!(differs(Greeting { memory: 8, ..ours.clone() }).contains("4096 here, 8 there"));
        assert!(differs(Greeting { address: Err("no door".into()), ..ours.clone() }).contains("no door"));
        compare(&setup, 3, &ours, &ours.clone()).unwrap();
    }
}

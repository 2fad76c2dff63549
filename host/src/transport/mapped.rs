//! Peers whose wire memory is mapped here: kernels write slots and words there themselves, and
//! nothing is put for them.
//!
//! Memory is given as a file descriptor to ranks of the same host, and as a fabric handle to ranks
//! of other hosts in the same NVLink domain. A pair of ranks is mapped when both could map the
//! other.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::greeting;
use super::links::{Links, MappedPeer};
use super::options::TransportKind;
use super::presence::{Life, Neighbours, Presence};
use super::setup::{LinkEnds, Setup};
use crate::driver::{FabricHandle, Memory};
use crate::error::{Error, Result};
use crate::group::internal::host_id;

/// How a rank's wire memory can be mapped.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    /// The same for ranks that can pass each other descriptors.
    host: String,
    /// The handle for ranks of other hosts, where the driver has such handles.
    fabric: Option<FabricHandle>,
}

/// Maps the wire memory of all peers, or with [`TransportKind::Auto`] of those that can be.
/// Collective.
pub(super) fn connect(setup: &Setup<'_>) -> Result<Links> {
    let prepared = greeting::check_arguments(setup).and_then(|()| {
        let (presence, reader) = Presence::new()?;
        Ok((presence, reader, setup.memory.export()?))
    });
    let offer = prepared.as_ref().map_err(Error::clone).and_then(|_| {
        // A driver without fabric handles has none to offer, which is no error.
        let fabric = setup.memory.export_fabric().inspect_err(|error| tracing::debug!("{error}")).ok();
        // Without a host id, a rank counts as alone on its host.
        let here = setup.options.hooks.host.clone().unwrap_or_else(host_id);
        let host = if here.is_empty() { format!("rank {}", setup.group.rank()) } else { here };
        serde_json::to_string(&Offer { host, fabric }).map_err(|error| Error::internal("serialise", error))
    });
    let all = greeting::meet(setup, offer)?;
    let (presence, reader, memory) = prepared?;
    let offers: Vec<Offer> = greeting::offers(setup, &all)?;

    // A group of one host's ranks may have failed alone.
    let received = exchange(setup, &offers, memory, reader.into());
    let received = greeting::agree(setup.group, setup.options.kind, received)?;
    let attempts = import_all(setup, &offers, received);
    let verdicts = agree(setup, &attempts)?;
    let mut mapped = Vec::new();
    let mut lives = Vec::new();
    for (peer, attempt) in attempts {
        let here = setup.group.rank();
        let both = !verdicts.contains_key(&(here, peer)) && !verdicts.contains_key(&(peer, here));
        if let Ok((memory, life)) = attempt
            && both
        {
            mapped.push(MappedPeer { peer, memory });
            lives.extend(life.map(|life| (setup.ends(peer), life)));
        }
    }
    Ok(Links { links: Vec::new(), mapped, receiving: vec![Box::new(Neighbours { presence, lives })] })
}

/// Wire memory and sign of life of each rank of this host, by rank.
fn exchange(
    setup: &Setup<'_>,
    offers: &[Offer],
    memory: OwnedFd,
    life: OwnedFd,
) -> Result<BTreeMap<u32, (OwnedFd, OwnedFd)>> {
    let rank = setup.group.rank();
    let own = &offers[rank as usize].host;
    let fds = [memory.as_fd(), life.as_fd()];
    // Descriptors reach the ranks of one host only; a group of several is taken apart first.
    let first = |host: &str| offers.iter().position(|offer| offer.host == host).unwrap_or_default() as u64;
    let received = if offers.iter().all(|offer| first(&offer.host) == 0) {
        (0u32..).zip(setup.group.exchange_fds(&fds)?).collect::<Vec<_>>()
    } else {
        let host = setup.group.split(first(own))?;
        let members = (0u32..).zip(offers).filter(|(_, offer)| offer.host == *own).map(|(peer, _)| peer);
        let received = members.zip(host.exchange_fds(&fds)?).collect();
        host.destroy()?;
        received
    };
    let pairs = received.into_iter().filter_map(|(peer, fds)| {
        let [memory, life] = <[OwnedFd; 2]>::try_from(fds).ok()?;
        Some((peer, (memory, life)))
    });
    Ok(pairs.collect())
}

type Attempt = Result<(Arc<Memory>, Option<Life>)>;

/// Tries to map the memory of every peer.
fn import_all(
    setup: &Setup<'_>,
    offers: &[Offer],
    mut received: BTreeMap<u32, (OwnedFd, OwnedFd)>,
) -> Vec<(u32, Attempt)> {
    let device = setup.memory.device();
    let mut attempt = |peer: u32| -> Attempt {
        let label = format!("wire memory of rank {peer}");
        let bytes = setup.memory.bytes();
        if let Some((memory, life)) = received.remove(&peer) {
            let memory = Memory::import(device, memory, bytes, &label)?;
            return Ok((Arc::new(memory), Some(Life::new(life))));
        }
        let Some(fabric) = &offers[peer as usize].fabric else {
            let reason = "it is on another host, and its memory has no fabric handle: there is no NVLink between the hosts, or no \
                          IMEX channel is set up";
            return Err(setup.ends(peer).error("connect", reason));
        };
        Ok((Arc::new(Memory::import_fabric(device, fabric, bytes, &label)?), None))
    };
    setup.peers.iter().map(|peer| (*peer, attempt(*peer))).collect()
}

/// Publishes failures to all ranks: the reason, by (rank that tried, rank whose memory it tried to
/// map).
fn agree(setup: &Setup<'_>, attempts: &[(u32, Attempt)]) -> Result<BTreeMap<(u32, u32), String>> {
    let failed: Vec<(u32, String)> = attempts
        .iter()
        .filter_map(|(peer, attempt)| attempt.as_ref().err().map(|error| (*peer, error.to_string())))
        .collect();
    let bytes = serde_json::to_vec(&failed).map_err(|error| Error::internal("serialise", error))?;
    let mut verdicts = BTreeMap::new();
    for (rank, bytes) in (0u32..).zip(setup.group.all_gather(&bytes)?) {
        let failed: Vec<(u32, String)> = serde_json::from_slice(&bytes).map_err(|error| {
            setup.ends(rank).error("connect", format!("its verdict is unreadable: {error}"))
        })?;
        verdicts.extend(failed.into_iter().map(|(peer, reason)| ((rank, peer), reason)));
    }
    if setup.options.kind != TransportKind::Direct {
        return Ok(verdicts);
    }
    // This rank's own error has the most detail.
    let own = attempts.iter().find_map(|(_, attempt)| attempt.as_ref().err().cloned());
    match (own, verdicts.first_key_value()) {
        (Some(error), _) => Err(error),
        (None, Some(((rank, peer), reason))) => {
            let reason = format!("rank {rank} cannot map the wire memory of rank {peer}: {reason}");
            Err(LinkEnds { transport: setup.options.kind.name(), rank: setup.group.rank(), peer: *rank }
                .error("connect", reason))
        }
        (None, None) => Ok(verdicts),
    }
}

//! How ranks come to be connected: each tells all others, through the group, where its ends of the connections are.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::net::Ipv6Addr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::device::Card;
use super::options::VerbsOptions;
use super::queue::{Remote, VerbsQueue};
use super::raw::{Behaviour, Qp, Route};
use super::register::Region;
use crate::driver::Memory;
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::transport::Queue;

/// A peer, the index among the queues to it, and the queue.
pub type Connected = (u32, u32, Box<dyn Queue>);

/// What a rank tells the others. As JSON: set-up is rare, and a dump of it can be read.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    device: String,
    infiniband: bool,
    lid: u16,
    gid: Option<(Ipv6Addr, String)>,
    /// Code of the MTU.
    mtu: u32,
    address: u64,
    rkey: u32,
    bytes: u64,
    ends: Vec<End>,
}

/// One end of a connection.
#[derive(Debug, Serialize, Deserialize)]
struct End {
    peer: u32,
    queue: u32,
    number: u32,
    psn: u32,
}

/// What this rank has made so far.
struct Prepared {
    card: Card,
    region: Arc<Region>,
    /// In the order of the offer's ends.
    pairs: Vec<Qp>,
    offer: Offer,
}

/// Connects wire memory with that of the peers, `queues_per_peer` queues to each: peer, index among its queues, and queue, ascending
/// by index and peer.
///
/// Collective over the group: each rank names the peers that name it. A rank that cannot take part fails the call on all ranks. The
/// queues keep the memory; when they are dropped, the peers' puts over them fail, so all ranks meet at a barrier before that.
///
/// # Errors
/// [`Error::Unavailable`] where there is no RDMA device that works; [`Error::Verbs`] where a call fails; [`Error::Argument`].
pub fn connect(
    options: &VerbsOptions,
    memory: &Arc<Memory>,
    group: &dyn ProcessGroup,
    peers: &[u32],
    queues_per_peer: u32,
) -> Result<Vec<Connected>> {
    let prepared =
        check(group, peers, queues_per_peer).and_then(|()| prepare(options, memory, peers, queues_per_peer));
    let offer = prepared.as_ref().map(|prepared| &prepared.offer).map_err(Error::clone);
    let offers: Vec<Offer> = agree(group, "set up a verbs device", offer)?;
    // Not reached where it failed: `agree` returned the error.
    let Prepared { card, region, mut pairs, offer } = prepared?;

    let mut queues: Vec<Connected> = Vec::new();
    let mut connect_all = || -> Result<()> {
        for (pair, own) in pairs.drain(..).zip(&offer.ends) {
            let theirs = &offers[own.peer as usize];
            let queue = connect_one(options, &card, &region, group.rank(), pair, own, theirs)?;
            queues.push((own.peer, own.queue, Box::new(queue)));
        }
        Ok(())
    };
    // All are ready to receive before any sends.
    let _: Vec<()> = agree(group, "connect over verbs", connect_all().as_ref().map_err(Error::clone))?;
    Ok(queues)
}

fn check(group: &dyn ProcessGroup, peers: &[u32], queues_per_peer: u32) -> Result<()> {
    let size = group.size();
    let wrong = |peer: &&u32| **peer >= size || **peer == group.rank();
    if let Some(peer) = peers.iter().find(wrong) {
        return Err(Error::argument("peers", peer, format!("must be other ranks of the group of {size}")));
    }
    if !peers.is_sorted_by(|a, b| a < b) {
        return Err(Error::argument("peers", format!("{peers:?}"), "must be ascending, each once"));
    }
    if !(1..=64).contains(&queues_per_peer) {
        return Err(Error::argument("queues_per_peer", queues_per_peer, "must be from 1 to 64"));
    }
    Ok(())
}

fn prepare(
    options: &VerbsOptions,
    memory: &Arc<Memory>,
    peers: &[u32],
    queues_per_peer: u32,
) -> Result<Prepared> {
    let card = Card::open(options, memory.device().info())?;
    let region = Arc::new(Region::new(&card.pd, memory)?);
    let depth = depth(options, &card);
    let mut pairs = Vec::new();
    let mut ends = Vec::new();
    for queue in 0..queues_per_peer {
        for &peer in peers {
            let pair = Qp::new(&card.pd, depth)?;
            ends.push(End { peer, queue, number: pair.number(), psn: packet_number() });
            pairs.push(pair);
        }
    }
    tracing::debug!(device = card.context.name(), gid = ?card.gid, reach = %region.reach(), "verbs");
    let offer = Offer {
        device: card.context.name().to_owned(),
        infiniband: card.infiniband,
        lid: card.lid,
        gid: card.gid.as_ref().map(|gid| (gid.address, gid.kind.to_string())),
        mtu: card.mtu,
        address: region.address(),
        rkey: region.rkey(),
        bytes: region.bytes(),
        ends,
    };
    Ok(Prepared { card, region, pairs, offer })
}

/// A first packet number, of 24 bits: random, so that packets of an earlier connection are not taken for those of this one.
fn packet_number() -> u32 {
    RandomState::new().build_hasher().finish() as u32 & 0xff_ffff
}

fn depth(options: &VerbsOptions, card: &Card) -> u32 {
    options.queue_depth.min(card.max_depth).max(4)
}

fn connect_one(
    options: &VerbsOptions,
    card: &Card,
    region: &Arc<Region>,
    rank: u32,
    mut pair: Qp,
    own: &End,
    theirs: &Offer,
) -> Result<VerbsQueue> {
    let mismatch =
        |what, ours: String, theirs: String| Error::Mismatch { rank, peer: own.peer, what, ours, theirs };
    let link = |infiniband: bool| if infiniband { "InfiniBand" } else { "Ethernet" }.to_owned();
    if card.infiniband != theirs.infiniband {
        return Err(mismatch("the link layer", link(card.infiniband), link(theirs.infiniband)));
    }
    let end = theirs.ends.iter().find(|end| end.peer == rank && end.queue == own.queue);
    let Some(end) = end else {
        return Err(mismatch(
            "the peers",
            format!("queue {} to rank {}", own.queue, own.peer),
            "none back".into(),
        ));
    };
    let gid = match (&card.gid, &theirs.gid) {
        (Some(ours), Some((address, kind))) => {
            if ours.kind.to_string() != *kind {
                return Err(mismatch("the type of the GID", ours.to_string(), format!("{kind} {address}")));
            }
            // The options and the kernel both keep indices below 256.
            Some((*address, ours.index as u8))
        }
        (None, None) => None,
        (ours, theirs) => {
            return Err(mismatch("EPOXIDE_RDMA_GID_INDEX", format!("{ours:?}"), format!("{theirs:?}")));
        }
    };
    let route = Route {
        number: end.number,
        psn: end.psn,
        gid,
        lid: theirs.lid,
        mtu: card.mtu.min(theirs.mtu).clamp(1, 5),
    };
    let behaviour = Behaviour {
        port: options.port,
        traffic_class: options.traffic_class,
        service_level: options.service_level,
        retry_count: options.retry_count,
        ack_timeout: options.ack_timeout,
    };
    pair.connect(&route, &behaviour, own.psn).map_err(|error| with_peer(error, own.peer, &theirs.device))?;
    let remote = Remote { rank: own.peer, address: theirs.address, bytes: theirs.bytes, rkey: theirs.rkey };
    Ok(VerbsQueue::new(pair, region.clone(), remote, depth(options, card), card.max_message, options.timeout))
}

fn with_peer(error: Error, rank: u32, device: &str) -> Error {
    match error {
        Error::Verbs { call, status, operation, remedy, .. } => {
            let operation = format!("{operation} ({device} of rank {rank})");
            Error::Verbs { call, status, peer: Some(rank), operation, remedy }
        }
        error => error,
    }
}

/// Every rank's value, where all ranks have one; else the own error, or one that names the first rank that failed.
fn agree<T, U>(group: &dyn ProcessGroup, operation: &'static str, own: Result<T, Error>) -> Result<Vec<U>>
where
    T: Serialize,
    U: for<'a> Deserialize<'a>,
{
    let message = own.as_ref().map_err(Error::to_string);
    let message = serde_json::to_vec(&message).map_err(|error| Error::os("serde_json::to_vec", error))?;
    let answers = group.all_gather(&message)?;
    own?;
    let read = |(rank, answer): (usize, Vec<u8>)| {
        let answer: Result<U, String> = serde_json::from_slice(&answer).unwrap_or_else(|error| {
            Err(format!("its answer cannot be read: {error}; do all ranks run one version?"))
        });
        answer.map_err(|reason| Error::Unavailable {
            what: format!("verbs on rank {rank} ({operation})"),
            reason,
        })
    };
    answers.into_iter().enumerate().map(read).collect()
}

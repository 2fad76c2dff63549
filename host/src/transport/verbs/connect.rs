//! How ranks come to be connected: each tells all others, in its greeting, where its ends of the connections are.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::net::Ipv6Addr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::device::Card;
use super::end::{End, Ends};
use super::queue::{Remote, VerbsQueue};
use super::raw::{Behaviour, Qp, Route};
use super::register::Region;
use crate::error::{Error, Result};
use crate::transport::greeting::{self, Greeting};
use crate::transport::{Link, Links, Setup, VerbsOptions};

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
    pairs: Vec<Pair>,
}

/// One end of a connection.
#[derive(Debug, Serialize, Deserialize)]
struct Pair {
    peer: u32,
    queue: u32,
    number: u32,
    psn: u32,
}

/// What this rank has made so far.
struct Prepared {
    settings: VerbsOptions,
    card: Card,
    region: Arc<Region>,
    depth: u32,
    /// In the order of the offer's pairs.
    qps: Vec<Qp>,
    offer: Offer,
}

pub(in crate::transport) fn connect(setup: &Setup<'_>) -> Result<Links> {
    let prepared = greeting::check_arguments(setup).and_then(|()| prepare(setup));
    let address = prepared.as_ref().map_err(Error::clone).and_then(|prepared| {
        serde_json::to_string(&prepared.offer).map_err(|error| Error::os("serialise", error))
    });
    let all = greeting::meet(setup, address)?;
    let links = prepared.and_then(|prepared| make_links(setup, prepared, &all));
    // All are ready to receive before any sends.
    greeting::agree(setup.group, setup.options.kind, links)
}

fn prepare(setup: &Setup<'_>) -> Result<Prepared> {
    let settings = super::settings(setup.options)?;
    let card = Card::open(&settings, setup.memory.device().info())?;
    let region = Arc::new(Region::new(&card.pd, setup.memory)?);
    let depth = settings.queue_depth.min(card.max_depth).max(4);
    let (mut qps, mut pairs) = (Vec::new(), Vec::new());
    for (queue, peer) in setup.pairs() {
        let qp = Qp::new(&card.pd, depth)?;
        pairs.push(Pair { peer, queue, number: qp.number(), psn: packet_number() });
        qps.push(qp);
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
        pairs,
    };
    Ok(Prepared { settings, card, region, depth, qps, offer })
}

/// A first packet number, of 24 bits: random, so that packets of an earlier connection are not taken for those of this one.
fn packet_number() -> u32 {
    RandomState::new().build_hasher().finish() as u32 & 0xff_ffff
}

fn make_links(setup: &Setup<'_>, mut prepared: Prepared, all: &[Greeting]) -> Result<Links> {
    let (mut links, mut ends) = (Vec::new(), Vec::new());
    for (mut qp, own) in std::mem::take(&mut prepared.qps).into_iter().zip(&prepared.offer.pairs) {
        let place = setup.place(own.peer);
        // `meet` found an address in every greeting.
        let text = all.get(own.peer as usize).and_then(|greeting| greeting.address.as_deref().ok());
        let theirs: Offer = serde_json::from_str(text.unwrap_or_default())
            .map_err(|error| place.error("connect", format!("its offer is unreadable: {error}")))?;
        let (route, psn) = (route(setup, &prepared, own, &theirs)?, own.psn);
        qp.connect(&route, &behaviour(&prepared.settings), psn)
            .map_err(|error| with_peer(error, own.peer, &theirs.device))?;
        let end = Arc::new(End::new(qp, &prepared.region)?);
        let queue = VerbsQueue::new(
            end.clone(),
            place,
            Remote { address: theirs.address, rkey: theirs.rkey },
            prepared.depth,
            prepared.card.max_message,
            setup.options.timeout,
        );
        links.push(Link { peer: own.peer, index: own.queue, queue: Box::new(queue) });
        ends.push(end);
    }
    Ok(Links { links, receiving: Box::new(Ends(ends)) })
}

/// The way to the peer's end of a connection.
fn route(setup: &Setup<'_>, prepared: &Prepared, own: &Pair, theirs: &Offer) -> Result<Route> {
    let (rank, card) = (setup.group.rank(), &prepared.card);
    let mismatch =
        |what, ours: String, theirs: String| Error::Mismatch { rank, peer: own.peer, what, ours, theirs };
    let link = |infiniband: bool| if infiniband { "InfiniBand" } else { "Ethernet" }.to_owned();
    if card.infiniband != theirs.infiniband {
        return Err(mismatch("the link layer", link(card.infiniband), link(theirs.infiniband)));
    }
    let end = theirs.pairs.iter().find(|pair| pair.peer == rank && pair.queue == own.queue);
    let end = end.ok_or_else(|| {
        setup.place(own.peer).error("connect", format!("its offer has no end of queue {}", own.queue))
    })?;
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
    Ok(Route {
        number: end.number,
        psn: end.psn,
        gid,
        lid: theirs.lid,
        mtu: card.mtu.min(theirs.mtu).clamp(1, 5),
    })
}

fn behaviour(settings: &VerbsOptions) -> Behaviour {
    Behaviour {
        port: settings.port,
        traffic_class: settings.traffic_class,
        service_level: settings.service_level,
        retry_count: settings.retry_count,
        ack_timeout: settings.ack_timeout,
    }
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

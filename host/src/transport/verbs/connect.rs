//! Connection set-up: each rank publishes its ends of the connections in its greeting.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::net::Ipv6Addr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::device::{Card, card_of, settings};
use super::end::{End, Ends};
use super::queue::{Remote, VerbsQueue};
use super::raw::{Behaviour, Qp, RemoteQp};
use super::register::Region;
use crate::error::{Error, Result};
use crate::transport::VerbsOptions;
use crate::transport::greeting::{self, Greeting};
use crate::transport::links::{Links, PeerQueue};
use crate::transport::setup::Setup;

/// A rank's message to the others. JSON, because set-up is rare and dumps are readable.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    cards: Vec<CardOffer>,
    pairs: Vec<Pair>,
}

impl Offer {
    /// The cards' names, for errors.
    fn names(&self) -> String {
        let names: Vec<&str> = self.cards.iter().map(|card| card.device.as_str()).collect();
        names.join(",")
    }
}

/// A card, and wire memory as it is registered there.
#[derive(Debug, Serialize, Deserialize)]
struct CardOffer {
    device: String,
    infiniband: bool,
    lid: u16,
    gid: Option<(Ipv6Addr, String)>,
    /// Code of the MTU.
    mtu: u32,
    address: u64,
    rkey: u32,
}

/// One end of a connection.
#[derive(Debug, Serialize, Deserialize)]
struct Pair {
    peer: u32,
    queue: u32,
    /// Its index in the offer.
    card: usize,
    number: u32,
    psn: u32,
}

/// The queues and regions that this rank has made so far.
struct Prepared {
    settings: VerbsOptions,
    /// In the order of the offer's cards.
    cards: Vec<(Card, Arc<Region>)>,
    /// In the order of the offer's pairs.
    qps: Vec<Qp>,
    offer: Offer,
}

pub(in crate::transport) fn connect(setup: &Setup<'_>) -> Result<Links> {
    let prepared = greeting::check_arguments(setup).and_then(|()| prepare(setup));
    let address = prepared.as_ref().map_err(Error::clone).and_then(|prepared| {
        serde_json::to_string(&prepared.offer).map_err(|error| Error::internal("serialise", error))
    });
    let all = greeting::meet(setup, address)?;
    let links = prepared.and_then(|prepared| make_links(setup, prepared, &all));
    // All are ready to receive before any sends.
    greeting::agree(setup.group, setup.options.kind, links)
}

fn prepare(setup: &Setup<'_>) -> Result<Prepared> {
    let settings = settings(setup.options)?;
    let cards = Card::open(&settings, setup.memory.device().info())?.into_iter().map(|card| {
        let region = Arc::new(Region::new(&card.pd, setup.memory)?);
        tracing::debug!(device = card.context.name(), gid = ?card.gid, reach = %region.reach(), "verbs");
        Ok((card, region))
    });
    let cards: Vec<(Card, Arc<Region>)> = cards.collect::<Result<_>>()?;
    let (mut qps, mut pairs) = (Vec::new(), Vec::new());
    for (queue, peer) in setup.pairs() {
        let index = card_of(queue, cards.len());
        let card = &cards[index].0;
        let qp = Qp::new(&card.pd, card.depth)?;
        pairs.push(Pair { peer, queue, card: index, number: qp.number(), psn: packet_number() });
        qps.push(qp);
    }
    let offer = |(card, region): &(Card, Arc<Region>)| CardOffer {
        device: card.context.name().to_owned(),
        infiniband: card.infiniband,
        lid: card.lid,
        gid: card.gid.as_ref().map(|gid| (gid.address, gid.kind.to_string())),
        mtu: card.mtu,
        address: region.address(),
        rkey: region.rkey(),
    };
    let offer = Offer { cards: cards.iter().map(offer).collect(), pairs };
    Ok(Prepared { settings, cards, qps, offer })
}

/// A first packet number, of 24 bits: random, so that packets of an earlier connection are not
/// taken for those of this one.
fn packet_number() -> u32 {
    RandomState::new().build_hasher().finish() as u32 & 0xff_ffff
}

fn make_links(setup: &Setup<'_>, mut prepared: Prepared, all: &[Greeting]) -> Result<Links> {
    let offers: Vec<Offer> = greeting::offers(setup, all)?;
    let (mut links, mut receiving) = (Vec::new(), Vec::new());
    for (mut qp, own) in std::mem::take(&mut prepared.qps).into_iter().zip(&prepared.offer.pairs) {
        let ends = setup.ends(own.peer);
        let (card, region) = &prepared.cards[own.card];
        let (end, at) = far_end(setup, &prepared.offer, own, &offers[own.peer as usize])?;
        qp.connect(&route(setup, card, end, at, own.peer)?, &behaviour(&prepared.settings), own.psn)
            .map_err(|error| with_peer(error, own.peer, &at.device))?;
        let end = Arc::new(End::new(qp, region)?);
        let queue = VerbsQueue::new(
            end.clone(),
            ends,
            Remote { address: at.address, rkey: at.rkey },
            card.depth,
            card.max_message,
            setup.options.timeout,
        );
        links.push(PeerQueue { peer: own.peer, index: own.queue, queue: Box::new(queue) });
        receiving.push(end);
    }
    Ok(Links { links, mapped: Vec::new(), receiving: vec![Box::new(Ends(receiving))] })
}

/// The peer's end of a connection, and the card that it is on.
fn far_end<'a>(
    setup: &Setup<'_>,
    ours: &Offer,
    own: &Pair,
    theirs: &'a Offer,
) -> Result<(&'a Pair, &'a CardOffer)> {
    let (rank, peer) = (setup.group.rank(), own.peer);
    if ours.cards.len() != theirs.cards.len() {
        let what = "the number of devices in EPOXIDE_RDMA_DEVICE";
        let text = |offer: &Offer| format!("{} ({})", offer.cards.len(), offer.names());
        return Err(Error::Mismatch { rank, peer, what, ours: text(ours), theirs: text(theirs) });
    }
    let end = theirs.pairs.iter().find(|pair| pair.peer == rank && pair.queue == own.queue);
    end.and_then(|end| Some((end, theirs.cards.get(end.card)?))).ok_or_else(|| {
        let reason = format!("its offer has no end of queue {}, or not the card of it", own.queue);
        setup.ends(peer).error("connect", reason)
    })
}

/// The way from a card to the peer's end of a connection.
fn route(setup: &Setup<'_>, card: &Card, end: &Pair, theirs: &CardOffer, peer: u32) -> Result<RemoteQp> {
    let rank = setup.group.rank();
    let mismatch = |what, ours: String, theirs: String| Error::Mismatch { rank, peer, what, ours, theirs };
    let link = |infiniband: bool| if infiniband { "InfiniBand" } else { "Ethernet" }.to_owned();
    if card.infiniband != theirs.infiniband {
        return Err(mismatch("the link layer", link(card.infiniband), link(theirs.infiniband)));
    }
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
    Ok(RemoteQp {
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

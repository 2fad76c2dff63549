//! A rank's knowledge about another rank.

use std::collections::VecDeque;
use std::time::Instant;

use super::address::Address;
use super::frame::{Header, Signature};

/// How a peer is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Health {
    /// Nothing shows that it has ended.
    Alive,
    /// It sent a goodbye.
    Left,
    /// It gave the group up, with this reason.
    GaveUp(String),
    /// Its connection broke, with this reason.
    Dead(String),
    /// The process at its address does not belong to the job.
    Stranger(String),
}

#[derive(Debug)]
pub(crate) struct Peer {
    pub address: Option<Address>,
    /// Indices of its connections: at most one that each side opened.
    pub conns: Vec<usize>,
    /// The one that this side sends on, always the same, so that frames keep their order.
    pub send_on: Option<usize>,
    /// Received steps of collectives that have not been taken.
    pub inbox: VecDeque<(Header, Vec<u8>)>,
    pub health: Health,
    /// It sent a goodbye on some connection.
    pub farewell: bool,
    /// The newest operation that a frame of the rank named.
    pub seen: Option<(u64, Signature)>,
    /// When it last reported that it waits, and for which ranks.
    pub status: Option<(Instant, Vec<u32>)>,
}

impl Peer {
    pub(crate) fn new(address: Option<Address>) -> Peer {
        Peer {
            address,
            conns: Vec::new(),
            send_on: None,
            inbox: VecDeque::new(),
            health: Health::Alive,
            farewell: false,
            seen: None,
            status: None,
        }
    }

    /// When its last frame arrived, for error texts.
    pub(crate) fn last_seen(&self) -> String {
        match &self.seen {
            Some((sequence, signature)) => format!("last seen in {} #{sequence}", signature.operation.name()),
            None => "never heard of".to_owned(),
        }
    }
}

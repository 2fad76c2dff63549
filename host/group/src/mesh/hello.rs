//! The beginning of a connection between two ranks.
//!
//! A hello: a frame whose tag is the rank that connects, and whose payload is the token of the rank
//! that it calls. If the job has a secret, an opening of a challenge follows in the same payload.
//! The called rank answers with its reply, and the connecting rank with its proof, both without a
//! header. Frames of the connecting rank wait for the answer. All frames behind the proof are
//! signed.

use rustix::net::AddressFamily;
use rustix::net::sockopt::socket_domain;

use super::address::Address;
use super::frame::{HEADER, Header, Kind};
use crate::JobSecret;
use crate::pending::{Challenge, PendingConnection};
use crate::secret::{OPENING, PROOF, Purpose};

/// The claims on which both ranks agree: the group, both ranks, their number, and the address.
pub(super) fn claims(name: &str, from: u32, to: u32, size: u32, address: &Address, unix: bool) -> Vec<u8> {
    let mut claims = Vec::new();
    for number in [from, to, size] {
        claims.extend_from_slice(&number.to_le_bytes());
    }
    for text in [name, &address.token, &address.called(unix)] {
        claims.extend_from_slice(&(text.len() as u64).to_le_bytes());
        claims.extend_from_slice(text.as_bytes());
    }
    claims
}

/// The token and proof that a stranger has to show.
pub(super) struct HelloCheck<'a> {
    pub name: &'a str,
    pub rank: u32,
    pub size: u32,
    pub address: &'a Address,
    pub secret: Option<&'a JobSecret>,
}

impl HelloCheck<'_> {
    /// The rank that a stranger is, once it has shown that it is.
    pub(super) fn read_hello(&self, pending: &mut PendingConnection) -> Result<Option<u32>, String> {
        let token = self.address.token.as_bytes();
        let length = token.len() + self.secret.map_or(0, |_| OPENING);
        if !pending.read(HEADER)? {
            return Ok(None);
        }
        hello_header(&pending.hello, self.size, length)?;
        if !pending.read(HEADER + length)? {
            return Ok(None);
        }
        let peer = check_hello(&pending.hello[..HEADER + length], self.size, token, length)?;
        let Some(secret) = self.secret else { return Ok(Some(peer)) };
        if matches!(pending.challenge, Challenge::NotStarted) {
            let unix = socket_domain(&pending.socket).is_ok_and(|domain| domain == AddressFamily::UNIX);
            let claims = claims(self.name, peer, self.rank, self.size, self.address, unix);
            let reply = pending.ask(secret, Purpose::Mesh, &claims, HEADER + token.len())?;
            pending.send(&reply)?;
        }
        if !pending.read(HEADER + length + PROOF)? {
            return Ok(None);
        }
        pending.prove(HEADER + length)?;
        Ok(Some(peer))
    }
}

fn hello_header(bytes: &[u8], size: u32, length: usize) -> Result<u32, String> {
    let header = bytes.first_chunk().ok_or("cut short")?;
    let header = Header::decode(header).map_err(|error| error.to_string())?;
    let rank = u32::try_from(header.tag).ok().filter(|rank| *rank < size);
    let hello = header.kind == Kind::Hello && header.len == length as u64;
    rank.filter(|_| hello).ok_or_else(|| "no hello of a rank of this group".to_owned())
}

/// The rank that a hello with a payload of `length` is of, at a listener of `token` in a group of
/// `size`.
pub(super) fn check_hello(bytes: &[u8], size: u32, token: &[u8], length: usize) -> Result<u32, String> {
    let rank = hello_header(bytes, size, length)?;
    let shown = bytes.get(HEADER..).filter(|shown| shown.len() == length);
    if shown.and_then(|shown| shown.get(..token.len())) == Some(token) {
        Ok(rank)
    } else {
        Err("wrong token: it is meant for another rank or group".to_owned())
    }
}

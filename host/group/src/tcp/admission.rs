//! The challenge before the first byte of PyTorch's protocol, if the job has a secret.
//!
//! The client begins with [`MARK`], which no request begins with, and its opening. The server
//! answers with the mark, a length of 4 bytes, and as many bytes: its reply. If it rejects the
//! client, the bytes are the reason as text, and the highest bit of the length is set. The client's
//! proof follows. A client that begins with a request gets the reason of its rejection in the same
//! way, and so does one that begins with the mark at a server without a secret. Behind the proof
//! both sides send [signed records](super::record) alone.

use std::net::SocketAddr;

use rustix::net::getsockname;

use crate::JobSecret;
use crate::mesh::host_id;
use crate::pending::{Challenge, PendingConnection};
use crate::secret::{OPENING, PROOF, Purpose, REPLY};

/// Begins what is none of PyTorch's.
pub(super) const MARK: [u8; 4] = *b"EPXS";
/// In the length of an answer: it is a reason.
const REFUSED: u32 = 1 << 31;
/// Longest reason that a client takes.
const MAX_REASON: u32 = 1024;

/// The claims on which both sides agree: the run, if it has a name, and the address at which the
/// server accepts. A loopback address, which means another host elsewhere, includes its host. A
/// process that forwards from another address therefore fails the challenge before the client sends
/// a proof or a request.
pub(super) fn claims(run: &str, served: SocketAddr) -> Vec<u8> {
    // An IPv4 client of an IPv6 socket has called an IPv4 address.
    let ip = served.ip().to_canonical();
    let host = if ip.is_loopback() { host_id() } else { String::new() };
    let mut claims = b"store 2".to_vec();
    claims.extend_from_slice(&served.port().to_le_bytes());
    for text in [&*ip.to_string(), &host, run] {
        claims.extend_from_slice(&(text.len() as u64).to_le_bytes());
        claims.extend_from_slice(text.as_bytes());
    }
    claims
}

/// The rule by which a server lets clients in.
#[derive(Debug, Clone, Default)]
pub(super) struct Terms {
    /// The secret that clients have to prove, if any.
    pub secret: Option<JobSecret>,
    /// The run that the server is of, as far as it has a name.
    pub run: String,
}

/// Continues the challenge before the first request. True once requests may follow, which stay in
/// the socket.
///
/// # Errors
/// Admits the stranger or returns the reason for its rejection. The stranger got the reason too, if
/// it can use it.
pub(super) fn admit(pending: &mut PendingConnection, terms: &Terms) -> Result<bool, String> {
    loop {
        match (&pending.challenge, &terms.secret) {
            (Challenge::Passed, _) => return Ok(true),
            (Challenge::NotStarted, None) => {
                if !pending.read(1)? {
                    return Ok(false);
                }
                if pending.hello.first() == MARK.first() {
                    return Err(refuse(
                        pending,
                        "this store has no secret, and the client has one; give the process that serves the store the \
                         job's secret as well",
                    ));
                }
                pending.challenge = Challenge::Passed;
            }
            (Challenge::NotStarted, Some(secret)) => {
                let whole = pending.read(MARK.len() + OPENING);
                let begun = pending.hello.len().min(MARK.len());
                if pending.hello[..begun] != MARK[..begun] {
                    return Err(refuse(
                        pending,
                        "this store lets in only who shows the job's secret, and the client has begun without; set \
                         EPOXIDE_JOB_SECRET or EPOXIDE_JOB_SECRET_FILE there as here (clients of PyTorch have no way to)",
                    ));
                }
                if !whole? {
                    return Ok(false);
                }
                let served = getsockname(&pending.socket).map_err(|error| error.to_string())?;
                let served = SocketAddr::try_from(served).map_err(|error| error.to_string())?;
                let claims = claims(&terms.run, served);
                let reply = pending.ask(secret, Purpose::Store, &claims, MARK.len())?;
                pending.hello.clear();
                pending.send(&answer(REPLY as u32, &reply))?;
            }
            (Challenge::Sent(_), _) => {
                if !pending.read(PROOF)? {
                    return Ok(false);
                }
                pending.prove(0)?;
                pending.hello.clear();
            }
        }
    }
}

fn answer(length: u32, bytes: &[u8]) -> Vec<u8> {
    [&MARK, length.to_le_bytes().as_slice(), bytes].concat()
}

/// Sends a stranger the reason of its rejection.
fn refuse(pending: &PendingConnection, reason: &'static str) -> String {
    // It is closed in any case.
    let _ = pending.send(&answer(REFUSED | reason.len() as u32, reason.as_bytes()));
    reason.to_owned()
}

/// The meaning of the length word of a server's answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Reply,
    /// Text of this many bytes.
    Reason(usize),
}

impl Answer {
    pub(super) fn of(length: u32) -> Option<Answer> {
        match (length & REFUSED, length & !REFUSED) {
            (0, length) if length as usize == REPLY => Some(Answer::Reply),
            (REFUSED, length) if length <= MAX_REASON => Some(Answer::Reason(length as usize)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_differ_by_address_port_and_run() {
        let claims = |run, address: &str| claims(run, address.parse().unwrap());
        let all = [
            claims("", "127.0.0.1:5"),
            claims("", "[::1]:5"),
            claims("", "127.0.0.1:6"),
            claims("", "10.0.0.1:5"),
            claims("r", "10.0.0.1:5"),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(!all[..at].contains(one), "{at}");
        }
        assert_eq!(claims("", "127.0.0.1:5"), claims("", "[::ffff:127.0.0.1]:5"));
        // A loopback address is one of a host, any other is one everywhere.
        let host = host_id();
        let names_host =
            |claims: &[u8]| claims.windows(host.len().max(1)).any(|part| part == host.as_bytes());
        assert!(host.is_empty() || names_host(&claims("", "[::1]:5")));
        assert!(!names_host(&claims("", "10.0.0.1:5")));
    }

    #[test]
    fn an_answer_is_a_reply_or_a_reason() {
        assert_eq!(Answer::of(REPLY as u32), Some(Answer::Reply));
        assert_eq!(Answer::of(REFUSED | REPLY as u32), Some(Answer::Reason(REPLY)));
        assert_eq!(Answer::of(REFUSED | MAX_REASON), Some(Answer::Reason(MAX_REASON as usize)));
        for length in [0, REPLY as u32 + 1, REFUSED | (MAX_REASON + 1), u32::MAX] {
            assert_eq!(Answer::of(length), None, "{length:#x}");
        }
    }
}

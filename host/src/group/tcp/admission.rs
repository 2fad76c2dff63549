//! What comes before the first byte of PyTorch's protocol where the job has a secret: the challenge.
//!
//! The client begins with [`MARK`], which no request begins with, and its opening. The server answers with the mark, a
//! length of 4 bytes, and as many bytes: its reply, or, where nobody is let in, the reason as text, behind a length whose
//! highest bit is set. The client's proof follows, and its first request right behind that. A client that begins with a
//! request is told why it is not let in in the same way, and so is one that begins with the mark at a server without a secret.

use crate::group::JobSecret;
use crate::group::secret::{OPENING, PROOF, Purpose, REPLY};
use crate::group::strangers::{Challenge, Stranger};

/// Begins what is none of PyTorch's.
pub(super) const MARK: [u8; 4] = *b"EPXS";
/// What both sides take to be so.
pub(super) const CLAIMS: &[u8] = b"store 1";
/// In the length of an answer: it is a reason.
const REFUSED: u32 = 1 << 31;
/// Longest reason that a client takes.
const MAX_REASON: u32 = 1024;

/// Goes on with what comes before the first request. True once requests may come, which are left in the socket.
///
/// # Errors
/// The reason where it is not let in; it has been told where it can do something about it.
pub(super) fn admit(stranger: &mut Stranger, secret: Option<&JobSecret>) -> Result<bool, String> {
    loop {
        match (&stranger.challenge, secret) {
            (Challenge::Passed, _) => return Ok(true),
            (Challenge::Unasked, None) => {
                if !stranger.read(1)? {
                    return Ok(false);
                }
                if stranger.hello.first() == MARK.first() {
                    return Err(refuse(
                        stranger,
                        "this store has no secret, and the client has one; give the process that serves the store the \
                         job's secret as well",
                    ));
                }
                stranger.challenge = Challenge::Passed;
            }
            (Challenge::Unasked, Some(secret)) => {
                let whole = stranger.read(MARK.len() + OPENING);
                let begun = stranger.hello.len().min(MARK.len());
                if stranger.hello[..begun] != MARK[..begun] {
                    return Err(refuse(
                        stranger,
                        "this store lets in only who shows the job's secret, and the client has begun without; set \
                         EPOXIDE_JOB_SECRET or EPOXIDE_JOB_SECRET_FILE there as here (clients of PyTorch have no way to)",
                    ));
                }
                if !whole? {
                    return Ok(false);
                }
                let reply = stranger.ask(secret, Purpose::Store, CLAIMS, MARK.len())?;
                stranger.hello.clear();
                stranger.send(&answer(REPLY as u32, &reply))?;
            }
            (Challenge::Asked(_), _) => {
                if !stranger.read(PROOF)? {
                    return Ok(false);
                }
                stranger.prove(0)?;
                stranger.hello.clear();
            }
        }
    }
}

fn answer(length: u32, bytes: &[u8]) -> Vec<u8> {
    [&MARK, length.to_le_bytes().as_slice(), bytes].concat()
}

/// Tells a stranger why it is not let in.
fn refuse(stranger: &Stranger, reason: &'static str) -> String {
    // It is closed in any case.
    let _ = stranger.send(&answer(REFUSED | reason.len() as u32, reason.as_bytes()));
    reason.to_owned()
}

/// What the length of a server's answer says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Reply,
    /// So many bytes of text.
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
    fn an_answer_is_a_reply_or_a_reason() {
        assert_eq!(Answer::of(REPLY as u32), Some(Answer::Reply));
        assert_eq!(Answer::of(REFUSED | REPLY as u32), Some(Answer::Reason(REPLY)));
        assert_eq!(Answer::of(REFUSED | MAX_REASON), Some(Answer::Reason(MAX_REASON as usize)));
        for length in [0, REPLY as u32 + 1, REFUSED | (MAX_REASON + 1), u32::MAX] {
            assert_eq!(Answer::of(length), None, "{length:#x}");
        }
    }
}

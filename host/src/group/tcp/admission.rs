//! What comes before the first byte of PyTorch's protocol where the job has a secret: the challenge.
//!
//! The client begins with [`MARK`], which no request begins with, and its opening. The server answers with the mark, a
//! length of 4 bytes, and as many bytes: its reply, or, where nobody is let in, the reason as text, behind a length whose
//! highest bit is set. The client's proof follows, and its first request right behind that. A client that begins with a
//! request is told why it is not let in in the same way, and so is one that begins with the mark at a server without a secret.

use std::mem;

use super::protocol::Violation;
use crate::group::JobSecret;
use crate::group::secret::{OPENING, PROOF, Purpose, REPLY, Responder};

/// Begins what is none of PyTorch's.
pub(super) const MARK: [u8; 4] = *b"EPXS";
/// What both sides take to be so.
pub(super) const CLAIMS: &[u8] = b"store 1";
/// In the length of an answer: it is a reason.
const REFUSED: u32 = 1 << 31;
/// Longest reason that a client takes.
const MAX_REASON: u32 = 1024;

/// How far a connection has come.
#[derive(Debug)]
pub(super) enum Admission {
    /// Nothing has come.
    Outside(Option<JobSecret>),
    /// The reply is out, the proof is to come.
    Asked(Responder),
    /// Requests may come.
    Inside,
}

/// What to do with what has come.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Wait for more.
    Incomplete,
    /// So many bytes are dealt with; send these.
    Taken(usize, Vec<u8>),
    /// Send these, and close.
    Refused(Vec<u8>, &'static str),
}

impl Admission {
    /// Looks at the bytes that have come and are not dealt with.
    pub(super) fn advance(&mut self, bytes: &[u8]) -> Result<Step, Violation> {
        match mem::replace(self, Admission::Inside) {
            Admission::Inside => Ok(Step::Taken(0, Vec::new())),
            Admission::Outside(secret) if bytes.is_empty() => {
                *self = Admission::Outside(secret);
                Ok(Step::Incomplete)
            }
            Admission::Outside(None) if bytes[0] != MARK[0] => Ok(Step::Taken(0, Vec::new())),
            Admission::Outside(None) => Ok(refuse(
                "this store has no secret, and the client has one; give the process that serves the store the job's \
                 secret as well",
            )),
            Admission::Outside(Some(secret)) => {
                let length = bytes.len().min(MARK.len());
                if bytes[..length] != MARK[..length] {
                    return Ok(refuse(
                        "this store lets in only who shows the job's secret, and the client has begun without; set \
                         EPOXIDE_JOB_SECRET or EPOXIDE_JOB_SECRET_FILE there as here (clients of PyTorch have no way to)",
                    ));
                }
                let Some(opening) = bytes[length..].first_chunk::<OPENING>() else {
                    *self = Admission::Outside(Some(secret));
                    return Ok(Step::Incomplete);
                };
                let (responder, reply) = Responder::new(&secret, Purpose::Store, CLAIMS, opening)
                    .map_err(|error| Violation(error.to_string()))?;
                *self = Admission::Asked(responder);
                Ok(Step::Taken(MARK.len() + OPENING, answer(reply.len() as u32, &reply)))
            }
            Admission::Asked(responder) => {
                let Some(proof) = bytes.first_chunk::<PROOF>() else {
                    *self = Admission::Asked(responder);
                    return Ok(Step::Incomplete);
                };
                responder.check(proof).map_err(|wrong| Violation(wrong.to_string()))?;
                Ok(Step::Taken(PROOF, Vec::new()))
            }
        }
    }

    /// True when requests may come.
    pub(super) fn inside(&self) -> bool {
        matches!(self, Admission::Inside)
    }
}

fn answer(length: u32, bytes: &[u8]) -> Vec<u8> {
    [&MARK, length.to_le_bytes().as_slice(), bytes].concat()
}

fn refuse(reason: &'static str) -> Step {
    Step::Refused(answer(REFUSED | reason.len() as u32, reason.as_bytes()), reason)
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
    use crate::group::secret::Initiator;

    fn secret() -> JobSecret {
        JobSecret::new(&"s".repeat(32)).unwrap()
    }

    #[test]
    fn byte_by_byte_and_all_at_once() {
        for whole in [false, true] {
            let mut admission = Admission::Outside(Some(secret()));
            let initiator = Initiator::new(&secret(), Purpose::Store, CLAIMS.to_vec()).unwrap();
            let opening = [&MARK, initiator.opening().as_slice()].concat();
            for end in if whole { opening.len() } else { 0 }..opening.len() {
                assert_eq!(admission.advance(&opening[..end]).unwrap(), Step::Incomplete);
            }
            let Step::Taken(taken, answered) = admission.advance(&opening).unwrap() else { panic!() };
            assert_eq!((taken, answered.len()), (opening.len(), MARK.len() + 4 + REPLY));
            assert_eq!(Answer::of(REPLY as u32), Some(Answer::Reply));
            let proof = initiator.answer(answered[8..].try_into().unwrap()).unwrap();
            assert_eq!(admission.advance(&proof[..31]).unwrap(), Step::Incomplete);
            assert!(!admission.inside());
            // With the first request behind it.
            let rest = [&proof, b"\0request".as_slice()].concat();
            assert_eq!(admission.advance(&rest).unwrap(), Step::Taken(PROOF, Vec::new()));
            assert!(admission.inside());
        }
    }

    #[test]
    fn whoever_does_not_know_the_secret_stays_outside() {
        let mut admission = Admission::Outside(Some(secret()));
        let Step::Refused(bytes, reason) = admission.advance(b"\0PyTorch").unwrap() else { panic!() };
        assert!(reason.contains("EPOXIDE_JOB_SECRET"));
        let length = u32::from_le_bytes(bytes[4..8].try_into().unwrap());
        assert_eq!(Answer::of(length), Some(Answer::Reason(reason.len())));
        assert!(reason.len() < MAX_REASON as usize);

        let mut admission = Admission::Outside(None);
        let refused = admission.advance(&MARK).unwrap();
        assert!(
            matches!(refused, Step::Refused(_, reason) if reason.contains("has no secret")),
            "{refused:?}"
        );
        assert_eq!(Admission::Outside(None).advance(b"\0").unwrap(), Step::Taken(0, Vec::new()));

        let mut admission = Admission::Outside(Some(secret()));
        let opening = [MARK.as_slice(), &[7; OPENING]].concat();
        assert!(matches!(admission.advance(&opening).unwrap(), Step::Taken(..)));
        assert!(admission.advance(&[0; PROOF]).is_err());
    }
}

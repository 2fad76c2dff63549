//! Signed records: the traffic of a connection behind the challenge, if the job has a secret.
//!
//! A record is a length of 4 bytes, as many bytes of PyTorch's protocol (1 to [`MOST`]), and their
//! signature. Requests and answers are split into records at any byte; a record is used only after
//! its signature has been checked.

use super::protocol::Violation;
use crate::secret::{Signer, TAG};

/// Most bytes of a record without length and signature: the bytes that a side buffers before it has
/// checked them.
pub(super) const MOST: usize = 64 * 1024;
const LENGTH: usize = 4;

/// Appends `bytes` as records.
pub(super) fn seal(signer: &mut Signer, bytes: &[u8], records: &mut Vec<u8>) {
    for part in bytes.chunks(MOST) {
        records.extend_from_slice(&(part.len() as u32).to_le_bytes());
        records.extend_from_slice(part);
        records.extend_from_slice(&signer.sign(part));
    }
}

/// Parses records as their bytes arrive.
#[derive(Debug)]
pub(super) struct Opener {
    signer: Signer,
    /// Bytes of the incomplete record.
    partial: Vec<u8>,
}

impl Opener {
    pub(super) fn new(signer: Signer) -> Opener {
        Opener { signer, partial: Vec::new() }
    }

    /// Appends to `plain` what the records hold that are complete with `bytes`.
    pub(super) fn open(&mut self, mut bytes: &[u8], plain: &mut Vec<u8>) -> Result<(), Violation> {
        loop {
            let needed = self.needed()?;
            let take = (needed - self.partial.len()).min(bytes.len());
            self.partial.extend_from_slice(&bytes[..take]);
            bytes = &bytes[take..];
            if self.partial.len() < needed {
                return Ok(());
            }
            if needed == LENGTH {
                continue;
            }
            let rest = &self.partial[LENGTH..];
            let Some((part, tag)) = rest.split_last_chunk::<TAG>() else { return Ok(()) };
            self.signer.check(part, tag).map_err(|forged| Violation(forged.to_string()))?;
            plain.extend_from_slice(part);
            self.partial.clear();
        }
    }

    /// Bytes that it holds.
    pub(super) fn bytes(&self) -> usize {
        self.partial.capacity()
    }

    /// The length that the partial record needs for its next step.
    fn needed(&self) -> Result<usize, Violation> {
        let Some(length) = self.partial.first_chunk().map(|length| u32::from_le_bytes(*length)) else {
            return Ok(LENGTH);
        };
        match length as usize {
            length @ 1..=MOST => Ok(LENGTH + length + TAG),
            length => Err(Violation(format!("a record of {length} bytes; it must have 1 to {MOST}"))),
        }
    }
}

/// Reads bytes as records. Any division into pieces gives the same records, and no unsigned ones.
pub fn fuzz_records(bytes: &[u8]) {
    let find = |mut pieces: Box<dyn Iterator<Item = &[u8]> + '_>| {
        let (mut opener, mut plain) = (Opener::new(Signer::fixed()), Vec::new());
        let whole = pieces.all(|piece| opener.open(piece, &mut plain).is_ok());
        assert!(opener.partial.len() <= LENGTH + MOST + TAG);
        (plain, whole)
    };
    let (plain, whole) = find(Box::new(crate::internal::fuzz::pieces(bytes)));
    assert_eq!((&plain, whole), (&find(Box::new(bytes.get(1..).into_iter())).0, whole));
    // Signing the same bytes record by record gives the same records.
    let (mut rest, mut signer) = (bytes.get(1..).unwrap_or_default(), Signer::fixed());
    let mut found = 0;
    while found < plain.len() {
        let length = rest.first_chunk().map_or(0, |length| u32::from_le_bytes(*length) as usize);
        let mut again = Vec::new();
        seal(&mut signer, &plain[found..found + length], &mut again);
        assert_eq!(rest.get(..again.len()), Some(&*again));
        rest = &rest[again.len()..];
        found += length;
    }
}

/// Records of several lengths, behind a byte with the length of the pieces.
pub fn sample_records() -> Vec<Vec<u8>> {
    let mut signer = Signer::fixed();
    let mut all = vec![7];
    for bytes in [b"x".as_slice(), &[1; 100], &[2; 1000]] {
        seal(&mut signer, bytes, &mut all);
    }
    vec![all[..LENGTH + 2 + TAG].to_vec(), all]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secret::Keys;

    #[test]
    fn records_come_back_in_any_pieces() {
        let (mut ours, theirs) = Keys::pair();
        let bytes: Vec<u8> = (0..3 * MOST + 17).map(|at| at as u8).collect();
        let mut records = Vec::new();
        seal(&mut ours.send, &bytes, &mut records);
        seal(&mut ours.send, b"last", &mut records);
        let (mut opener, mut plain) = (Opener::new(theirs.receive), Vec::new());
        for piece in records.chunks(1013) {
            opener.open(piece, &mut plain).unwrap();
        }
        assert_eq!(plain, [bytes.as_slice(), b"last"].concat());
    }

    #[test]
    fn nothing_of_a_record_that_was_changed_is_used() {
        let records = |keys: &mut Keys| {
            let mut records = Vec::new();
            seal(&mut keys.send, b"first", &mut records);
            seal(&mut keys.send, b"second", &mut records);
            records
        };
        let first = LENGTH + 5 + TAG;
        let length = records(&mut Keys::pair().0).len();
        for at in 0..length {
            let (mut ours, theirs) = Keys::pair();
            let mut records = records(&mut ours);
            records[at] ^= 1;
            let (mut opener, mut plain) = (Opener::new(theirs.receive), Vec::new());
            let outcome = opener.open(&records, &mut plain);
            let kept: &[u8] = if at < first { b"" } else { b"first" };
            assert_eq!(plain, kept, "byte {at}");
            // A longer record is incomplete.
            assert!(outcome.is_err() || at == 0 || at == first || opener.partial.len() > 4, "byte {at}");
        }
        // A record of another connection, and a missing record.
        let (mut ours, theirs) = Keys::pair();
        let records = records(&mut ours);
        let (_, others) = Keys::pair();
        assert!(Opener::new(others.receive).open(&records, &mut Vec::new()).is_err());
        assert!(Opener::new(theirs.receive).open(&records[first..], &mut Vec::new()).is_err());
    }

    #[test]
    fn no_record_makes_the_other_side_hold_more_than_one() {
        let (_, theirs) = Keys::pair();
        let mut opener = Opener::new(theirs.receive);
        for length in [0, MOST as u32 + 1, u32::MAX] {
            let mut plain = Vec::new();
            assert!(opener.open(&length.to_le_bytes(), &mut plain).is_err(), "{length}");
            opener.partial.clear();
        }
    }
}

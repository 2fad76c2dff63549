//! Parsers of bytes from strangers and from peers, for fuzzing.

use super::conn::Frames;
use super::frame::{HEADER, Header, Kind, Signature};
use super::hello::check_hello;
use crate::call::Operation;
use crate::internal::fuzz::pieces;

const SIZE: u32 = 4;
const TOKEN: &[u8; 32] = b"0123456789abcdef0123456789abcdef";

/// Reads a hello as a listener does: a connection without the token is rejected.
pub fn fuzz_hello(bytes: &[u8]) {
    if let Ok(rank) = check_hello(bytes, SIZE, TOKEN, TOKEN.len()) {
        assert!(rank < SIZE && &bytes[HEADER..] == TOKEN);
    }
}

/// Reads frames as a connection does. Any division into pieces gives the same frames, and no more
/// bytes than were sent.
pub fn fuzz_frames(bytes: &[u8]) {
    let find = |mut pieces: Box<dyn Iterator<Item = &[u8]> + '_>| {
        let (mut reader, mut frames) = (Frames::default(), Vec::new());
        let whole = pieces.all(|piece| reader.parse(piece, &mut frames).is_ok());
        (frames, whole)
    };
    let whole = find(Box::new(bytes.get(1..).into_iter()));
    assert_eq!(find(Box::new(pieces(bytes))), whole);
    let found: usize = whole
        .0
        .iter()
        .map(|(header, payload)| {
            assert_eq!(header.len, payload.len() as u64);
            // Bytes that mean nothing are the only ones that may change.
            let again = Header::decode(&header.encode());
            assert_eq!(again.ok().as_ref(), Some(header));
            HEADER + payload.len()
        })
        .sum();
    assert!(found <= bytes.len());
}

/// A hello that is let in.
pub fn sample_hello() -> Vec<Vec<u8>> {
    let header = Header::control(Kind::Hello, 3, TOKEN.len());
    vec![[&header.encode()[..], TOKEN].concat()]
}

/// Frames of each kind, behind a byte with the length of the pieces.
pub fn sample_frames() -> Vec<Vec<u8>> {
    let kinds = [Kind::Hello, Kind::Message, Kind::Query, Kind::Status, Kind::Abort, Kind::Goodbye];
    let mut all: Vec<Vec<u8>> = kinds
        .into_iter()
        .map(|kind| [&[5], &Header::control(kind, 2, 8).encode()[..], &[1; 8]].concat())
        .collect();
    let signature = Signature { root: Some(1), bytes: Some(9), ..Signature::new(Operation::Broadcast) };
    let step = Header { kind: Kind::Collective, signature, sequence: 7, tag: 0, len: 9 };
    all.push([&[200], &step.encode()[..], &[2; 9], &step.encode(), &[3; 9]].concat());
    all
}

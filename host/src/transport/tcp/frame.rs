//! The frames of a connection.
//!
//! A connection starts with a hello and the peer's answer. Then frames are sent one way: a header
//! of little-endian u64, and bytes. The other way is sent at most a farewell: the receiver's
//! goodbye, or why it rejected a frame.
//!
//! A queue's first connection carries the header of every put (bytes, to, counter, value, parts)
//! and the first of the put's bytes. `parts` is the number of further connections that carry a part
//! of the put, from connection 1 on. Their headers are (bytes, to, number of the put).
//!
//! If the job has a secret, each header is followed by its signature. So no process between the
//! ranks can add, repeat, drop or redirect a put.

use crate::group::internal::Signer;
use crate::transport::put::Put;

/// Bytes of a header of the first connection.
pub(super) const HEADER: usize = 40;
/// Bytes of a header of a further connection.
pub(super) const PART_HEADER: usize = 24;
/// In place of a header's bytes: no further put follows.
pub(super) const GOODBYE: u64 = u64::MAX;
/// In place of the length of a refusal: this rank receives no more.
pub(super) const FAREWELL: u32 = u32::MAX;
/// Longest text of a refusal, in bytes.
pub(super) const MAX_REASON: usize = 1024;

/// The bytes of a put that a further connection carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Part {
    /// Offset of the bytes in this rank's memory.
    pub(super) from: u64,
    /// Their offset in the peer's memory.
    pub(super) to: u64,
    /// How many; never 0.
    pub(super) bytes: u64,
    /// The number of the put in its queue, from 1 on.
    pub(super) number: u64,
}

/// The header of a put of which the first connection carries `bytes`.
pub(super) fn header(put: &Put, bytes: u64, parts: u64) -> [u8; HEADER] {
    words([bytes, put.to, put.counter, put.value, parts])
}

/// The header of a part.
pub(super) fn part_header(part: &Part) -> [u8; PART_HEADER] {
    words([part.bytes, part.to, part.number])
}

fn words<const N: usize, const BYTES: usize>(words: [u64; N]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    for (word, value) in bytes.chunks_exact_mut(8).zip(words) {
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// A header as it is sent: with its signature, if any.
pub(super) fn signed(header: &[u8], signer: Option<&mut Signer>) -> Vec<u8> {
    let tag = signer.map(|signer| signer.sign(header));
    header.iter().copied().chain(tag.into_iter().flatten()).collect()
}

/// The content of a header.
#[derive(Debug, Clone, Copy)]
pub(super) enum Frame {
    Goodbye,
    /// A put whose bytes on the first connection fit the receiver's memory, and the number of
    /// further connections that carry a part.
    Put(Put, u64),
    /// A part within the receiver's memory.
    Part(Part),
}

/// Reads a header of the first connection, at a receiver with `memory` bytes and so many `further`
/// connections; an error names the field that does not fit.
pub(super) fn read_header(header: &[u8; HEADER], memory: u64, further: u64) -> Result<Frame, String> {
    let [bytes, to, counter, value, parts] = [0, 8, 16, 24, 32].map(|at| word64(header, at));
    if bytes == GOODBYE {
        return Ok(Frame::Goodbye);
    }
    let put = Put { from: to, to, bytes, counter, value };
    put.check(memory)?;
    if parts > further {
        return Err(format!("{put:?}: its {parts} parts must be at most {further}, the further connections"));
    }
    Ok(Frame::Put(put, parts))
}

/// Reads a header of a further connection, at a receiver with `memory` bytes.
pub(super) fn read_part(header: &[u8; PART_HEADER], memory: u64) -> Result<Frame, String> {
    let [bytes, to, number] = [0, 8, 16].map(|at| word64(header, at));
    if bytes == GOODBYE {
        return Ok(Frame::Goodbye);
    }
    let part = Part { from: to, to, bytes, number };
    if to.checked_add(bytes).is_none_or(|end| end > memory) {
        return Err(format!("{part:?}: to + bytes must be within the {memory} bytes of wire memory"));
    }
    Ok(Frame::Part(part))
}

/// A refusal as it is sent.
pub(super) fn refusal(reason: &str) -> Vec<u8> {
    let text = &reason.as_bytes()[..reason.len().min(MAX_REASON)];
    let mut bytes = (text.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(text);
    bytes
}

pub(super) fn word32(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].iter().take(4).rev().fold(0, |word, byte| word << 8 | u32::from(*byte))
}

pub(super) fn word64(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].iter().take(8).rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

/// Parses bytes as a receiver does: of a first connection if the third byte is even, else of a
/// further one. No byte and no counter of a put may be outside of its memory, whose length is in
/// the first two bytes.
pub fn fuzz_tcp_frames(bytes: &[u8]) {
    let Some(([low, high, kind], mut rest)) = bytes.split_first_chunk::<3>() else { return };
    let memory = u64::from(u16::from_le_bytes([*low, *high]));
    let further = u64::from(kind / 2);
    loop {
        let (frame, behind) = if kind % 2 == 0 {
            let Some((header, behind)) = rest.split_first_chunk() else { return };
            (read_header(header, memory, further), behind)
        } else {
            let Some((header, behind)) = rest.split_first_chunk() else { return };
            (read_part(header, memory), behind)
        };
        let inside = |at: u64, len: u64| u128::from(at) + u128::from(len) <= memory.into();
        let bytes = match frame {
            Ok(Frame::Put(put, parts)) => {
                assert!(put.bytes == 0 || inside(put.to, put.bytes));
                assert!(inside(put.counter, 8));
                assert!(put.counter.is_multiple_of(8));
                assert!(parts <= further);
                put.bytes
            }
            Ok(Frame::Part(part)) => {
                assert!(inside(part.to, part.bytes));
                part.bytes
            }
            Ok(Frame::Goodbye) => return,
            Err(reason) => {
                let refusal = refusal(&reason);
                assert!(refusal.len() <= 4 + MAX_REASON && refusal.len() > 4);
                return;
            }
        };
        rest = behind.get(bytes as usize..).unwrap_or_default();
    }
}

/// Puts, parts and goodbyes, behind the length of the memory and the kind of connection.
pub fn sample_tcp_frames() -> Vec<Vec<u8>> {
    let put = |to, bytes, counter, parts| {
        let put = Put { from: to, to, bytes, counter, value: 1 };
        [&header(&put, bytes, parts)[..], &vec![7; bytes as usize]].concat()
    };
    let part = |to, bytes, number| {
        [&part_header(&Part { from: to, to, bytes, number })[..], &vec![7; bytes as usize]].concat()
    };
    let length = 1024u16.to_le_bytes();
    let goodbye = header(&Put::default(), GOODBYE, 0).to_vec();
    let first = [put(0, 64, 1016, 2), put(1000, 24, 0, 0), put(1024, 0, 8, 0), goodbye].concat();
    let last = part_header(&Part { bytes: GOODBYE, ..Part::default() }).to_vec();
    let further = [part(64, 64, 1), part(1000, 24, 2), last].concat();
    vec![length.to_vec(), [&length[..], &[4], &first].concat(), [&length[..], &[1], &further].concat()]
}

//! The frames of a connection.
//!
//! A connection starts with a hello and the peer's answer. Then frames go one way: a header of four
//! u64, little endian (bytes, to, counter, value), and the bytes. The other way there is at most a
//! farewell: the receiver's goodbye, or why it refused a frame.
//!
//! If the job has a secret, each header is followed by its signature. So no process between the
//! ranks can add, repeat, drop or redirect a put.

use crate::group::internal::{Signer, TAG};
use crate::transport::put::Put;

pub(super) const HEADER: usize = 32;
/// In place of a header's bytes: nothing is put any more.
pub(super) const GOODBYE: u64 = u64::MAX;
/// In place of the length of a refusal: this rank takes nothing any more.
pub(super) const FAREWELL: u32 = u32::MAX;
/// Longest text of a refusal, in bytes.
pub(super) const MAX_REASON: usize = 1024;

pub(super) fn header(put: &Put) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    for (word, value) in bytes.chunks_exact_mut(8).zip([put.bytes, put.to, put.counter, put.value]) {
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// A header as it goes over the connection: with its signature where there is one.
pub(super) fn signed_header(put: &Put, signer: Option<&mut Signer>) -> Vec<u8> {
    let header = header(put);
    let tag = signer.map(|signer| signer.sign(&header));
    header.into_iter().chain(tag.into_iter().flatten()).collect()
}

/// Bytes of a header with its signature, where there is one.
pub(super) fn header_length(signer: Option<&Signer>) -> usize {
    HEADER + signer.map_or(0, |_| TAG)
}

/// The content of a header.
#[derive(Debug, Clone, Copy)]
pub(super) enum Frame {
    Goodbye,
    /// All of it lies in the receiver's memory.
    Put(Put),
}

/// Reads a header at a receiver with `memory` bytes; an error names the field that does not fit.
pub(super) fn read_header(header: &[u8; HEADER], memory: u64) -> Result<Frame, String> {
    let [bytes, to, counter, value] = [0, 8, 16, 24].map(|at| word64(header, at));
    if bytes == GOODBYE {
        return Ok(Frame::Goodbye);
    }
    let put = Put { from: to, to, bytes, counter, value };
    put.check(memory)?;
    Ok(Frame::Put(put))
}

/// A refusal as it goes over the connection.
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

/// Reads bytes as a receiver does. No byte and no counter of a put lies outside of its memory,
/// whose length the first two bytes give.
pub fn fuzz_tcp_frames(bytes: &[u8]) {
    let Some((length, mut rest)) = bytes.split_first_chunk::<2>() else { return };
    let memory = u64::from(u16::from_le_bytes(*length));
    while let Some((header, behind)) = rest.split_first_chunk() {
        match read_header(header, memory) {
            Ok(Frame::Put(put)) => {
                let end = |at: u64, len: u64| u128::from(at) + u128::from(len);
                assert!(put.bytes == 0 || end(put.to, put.bytes) <= memory.into());
                assert!(end(put.counter, 8) <= memory.into());
                assert!(put.counter.is_multiple_of(8));
                rest = behind.get(put.bytes as usize..).unwrap_or_default();
            }
            Ok(Frame::Goodbye) => return,
            Err(reason) => {
                let refusal = refusal(&reason);
                assert!(refusal.len() <= 4 + MAX_REASON && refusal.len() > 4);
                return;
            }
        }
    }
}

/// Puts and a goodbye, behind the length of the memory.
pub fn sample_tcp_frames() -> Vec<Vec<u8>> {
    let put = |to, bytes, counter| {
        let put = Put { from: to, to, bytes, counter, value: 1 };
        [&header(&put)[..], &vec![7; bytes as usize]].concat()
    };
    let goodbye = header(&Put { bytes: GOODBYE, ..Put::default() }).to_vec();
    let all = [&1024u16.to_le_bytes()[..], &put(0, 64, 1016), &put(1000, 24, 0), &put(1024, 0, 8), &goodbye];
    vec![all[..2].concat(), all.concat()]
}

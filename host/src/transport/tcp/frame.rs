//! What goes over a connection.
//!
//! A connection starts with a hello and the peer's answer. Then frames go one way: a header of four u64, little endian
//! (bytes, to, counter, value), and the bytes. The other way there is at most a farewell: the receiver's goodbye, or why it
//! refused a frame.

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

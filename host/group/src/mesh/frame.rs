//! Frames between two ranks: a fixed header, then a payload.

use crate::call::Operation;
use crate::element::{ElementType, ReduceOp};
use crate::error::{Error, Result};

/// Bytes of a header.
pub(crate) const HEADER: usize = 48;
/// Largest payload; a longer one means that the stream is garbage.
pub(crate) const MAX_PAYLOAD: u64 = 1 << 36;
const MAGIC: u32 = u32::from_le_bytes(*b"EPXG");
/// Root of an operation without one; count of an operation whose sizes may differ between ranks.
const NONE_ROOT: u32 = u32::MAX;
const NONE_COUNT: u64 = u64::MAX;

/// The purpose of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// The first frame of a connection: `tag` is the rank that connects, the payload is the token
    /// of the rank called.
    Hello = 1,
    /// A step of a collective.
    Collective = 2,
    /// A message of send and receive, under `tag`.
    Message = 3,
    /// "I wait for you in this operation." Answered by a status when the rank is in an operation.
    Query = 4,
    /// The ranks this one waits for in vain, as little-endian `u32`s.
    Status = 5,
    /// The group is aborted; the payload is the reason.
    Abort = 6,
    /// The sender leaves in order.
    Goodbye = 7,
}

/// The properties on which all ranks must agree in an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Signature {
    pub operation: Operation,
    pub dtype: ElementType,
    pub reduce: ReduceOp,
    pub root: Option<u32>,
    /// In bytes, where the ranks must agree on it.
    pub bytes: Option<u64>,
}

impl Signature {
    pub(crate) fn new(operation: Operation) -> Signature {
        Signature { operation, dtype: ElementType::U8, reduce: ReduceOp::Sum, root: None, bytes: None }
    }

    /// The first property that differs, with this side's and the other side's value.
    pub(crate) fn difference(&self, other: &Signature) -> Option<(&'static str, String, String)> {
        let size = |bytes: Option<u64>| bytes.map_or("any size".to_owned(), |bytes| format!("{bytes} bytes"));
        let root = |root: Option<u32>| root.map_or("none".to_owned(), |root| root.to_string());
        if self.operation != other.operation {
            let names = (self.operation.name().to_owned(), other.operation.name().to_owned());
            Some(("which collective comes next", names.0, names.1))
        } else if self.root != other.root {
            Some(("the root", root(self.root), root(other.root)))
        } else if self.dtype != other.dtype {
            Some(("the dtype", self.dtype.to_string(), other.dtype.to_string()))
        } else if self.reduce != other.reduce {
            Some(("the reduction", self.reduce.to_string(), other.reduce.to_string()))
        } else if self.bytes != other.bytes {
            Some(("the size", size(self.bytes), size(other.bytes)))
        } else {
            None
        }
    }
}

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub kind: Kind,
    pub signature: Signature,
    /// Number of the operation in its group.
    pub sequence: u64,
    /// A message's tag, or a hello's rank.
    pub tag: u64,
    /// Bytes of the payload.
    pub len: u64,
}

impl Header {
    pub(crate) fn control(kind: Kind, tag: u64, len: usize) -> Header {
        let signature = Signature::new(Operation::Barrier);
        Header { kind, signature, sequence: 0, tag, len: len as u64 }
    }

    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let signature = &self.signature;
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4] = self.kind as u8;
        bytes[5] = signature.operation as u8;
        bytes[6] = signature.dtype as u8;
        bytes[7] = signature.reduce as u8;
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.tag.to_le_bytes());
        bytes[24..28].copy_from_slice(&signature.root.unwrap_or(NONE_ROOT).to_le_bytes());
        bytes[32..40].copy_from_slice(&signature.bytes.unwrap_or(NONE_COUNT).to_le_bytes());
        bytes[40..48].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Result<Header> {
        let garbage = || Error::os("recv", "bytes that are no frame of a process group");
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let kind = [
            Kind::Hello,
            Kind::Collective,
            Kind::Message,
            Kind::Query,
            Kind::Status,
            Kind::Abort,
            Kind::Goodbye,
        ]
        .into_iter()
        .find(|kind| *kind as u8 == bytes[4])
        .ok_or_else(garbage)?;
        if word(0) != MAGIC || long(40) > MAX_PAYLOAD {
            return Err(garbage());
        }
        let signature = Signature {
            operation: Operation::from_code(bytes[5]).ok_or_else(garbage)?,
            dtype: ElementType::from_code(bytes[6]).ok_or_else(garbage)?,
            reduce: ReduceOp::from_code(bytes[7]).ok_or_else(garbage)?,
            root: Some(word(24)).filter(|root| *root != NONE_ROOT),
            bytes: Some(long(32)).filter(|bytes| *bytes != NONE_COUNT),
        };
        Ok(Header { kind, signature, sequence: long(8), tag: long(16), len: long(40) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip_and_garbage_is_refused() {
        let header = Header {
            kind: Kind::Collective,
            signature: Signature {
                operation: Operation::AllReduce,
                dtype: ElementType::Bf16,
                reduce: ReduceOp::Max,
                root: Some(3),
                bytes: Some(77),
            },
            sequence: 1 << 40,
            tag: 9,
            len: 5,
        };
        assert_eq!(Header::decode(&header.encode()).unwrap(), header);
        assert!(Header::decode(&[0; HEADER]).is_err());
        for byte in [0, 4, 5, 6, 7, 47] {
            let mut bytes = header.encode();
            bytes[byte] = 0xff;
            assert!(Header::decode(&bytes).is_err(), "byte {byte}");
        }
    }
}

//! Errors of addresses and of allocations, with their texts.

use std::fmt;

/// No memory lies below this address.
pub(crate) const PAGE: u64 = 4096;

/// Errors of device memory outside of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The device's memory limit would be exceeded.
    #[error("out of device memory: {requested} bytes requested, {available} available")]
    OutOfMemory {
        /// Requested bytes.
        requested: u64,
        /// Bytes left under the limit.
        available: u64,
    },
    /// An address range is not inside one live region, but maybe in one that has been freed.
    #[error("device address {addr:#x} (+{bytes} bytes) {}", place(*.addr, .nearest.as_ref()))]
    OutOfBounds {
        /// First byte of the access.
        addr: u64,
        /// Length of the access in bytes.
        bytes: u64,
        /// The region that lies closest, or the freed one.
        nearest: Option<NearRegion>,
    },
    /// A word that does not lie at a multiple of its size.
    #[error("device address {addr:#x} is not a multiple of {align}")]
    Misaligned {
        /// The address.
        addr: u64,
        /// Alignment needed, in bytes.
        align: u64,
    },
    /// The file descriptor is smaller than the requested mapping.
    #[error("the imported file holds {actual} bytes, {wanted} were announced")]
    ImportTooSmall {
        /// Bytes announced by the caller.
        wanted: u64,
        /// Bytes in the file.
        actual: u64,
    },
    /// Multicast addresses were used as ordinary memory, or memory cannot be bound to them.
    #[error("{message}")]
    Multicast {
        /// The rule that is broken.
        message: String,
    },
    /// An access of the host, or of a copy in a stream, races with another one: check mode.
    #[error("data race at {}: {report}", Spot { label, offset: *offset, part })]
    Race {
        /// Label of the region.
        label: String,
        /// Offset of the first word in the region, in bytes.
        offset: u64,
        /// Name of the part, such as `ready[3]`; empty if the region's parts have no names.
        part: String,
        /// Both sides.
        report: String,
    },
    /// The operating system refused.
    #[error("{call} failed: {message} (errno {errno})")]
    Os {
        /// System call.
        call: &'static str,
        /// Raw error number.
        errno: i32,
        /// Its text.
        message: String,
    },
}

/// Where a bad address lies, in words.
pub(crate) fn place(addr: u64, nearest: Option<&NearRegion>) -> String {
    let null = if addr < PAGE { " (null pointer)" } else { "" };
    match nearest {
        Some(n) if n.freed => {
            format!("is in '{}' + {:#x}, which has been freed", n.label, addr.wrapping_sub(n.addr))
        }
        Some(n) => format!("is outside of every region{null}; {n}"),
        None => format!("is outside of every region{null}"),
    }
}

/// A region near a bad address, for error messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NearRegion {
    /// Label given at allocation.
    pub label: String,
    /// First address.
    pub addr: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Bytes from the region to the access. Negative when the access starts before the region,
    /// otherwise counted from the region's end to the start of the access (0 when the access
    /// straddles the end).
    pub distance: i64,
    /// The region was freed, and the access starts inside of its old range: use after free. The
    /// distance is 0 then.
    pub freed: bool,
}

impl std::fmt::Display for NearRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { label, addr, bytes, distance, freed } = self;
        if *freed {
            return write!(f, "'{label}' was at {addr:#x} ({bytes} bytes) and has been freed");
        }
        write!(f, "nearest is '{label}' at {addr:#x} ({bytes} bytes): ")?;
        match *distance {
            d if d < 0 => write!(f, "the access starts {} bytes before it", d.unsigned_abs()),
            0 => write!(f, "the access runs over or starts at its end"),
            d => write!(f, "the access starts {d} bytes past its end"),
        }
    }
}

/// A place in memory: `'pool' + 0x180 (ready[3])`, or an offset where there is no label.
pub(crate) struct Spot<'a> {
    pub(crate) label: &'a str,
    pub(crate) offset: u64,
    pub(crate) part: &'a str,
}

impl fmt::Display for Spot<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { label, offset, part } = self;
        match *label {
            "" => write!(f, "offset {offset:#x}")?,
            label => write!(f, "'{label}' + {offset:#x}")?,
        }
        if part.is_empty() { Ok(()) } else { write!(f, " ({part})") }
    }
}

//! The one error type of the library. Every variant names what was wrong, with its value, and what
//! to do about it.

use std::fmt;
use std::time::Duration;

use crate::foreign::printable;

/// `Result` with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The ranks that get an error of a collective call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// This rank, perhaps alone. Ranks that made the call wait for this one until their deadline,
    /// unless it makes the call after all.
    ThisRank,
    /// Every rank of the group gets an error of this call, and none has moved a row.
    EveryRank,
}

/// All errors of epoxide. Text of another process is shown without control characters. `Debug`
/// gives the same text as `Display`, so that a `main` that returns an error prints readable text.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument breaks a rule. Nothing was launched and nothing was written.
    #[error("{argument} = {value}: {rule}")]
    Argument {
        /// The argument's name as the API spells it.
        argument: &'static str,
        /// The value that was passed.
        value: String,
        /// The rule it breaks, and the remedy.
        rule: String,
    },
    /// A tensor has the wrong shape.
    #[error("{tensor} has shape {have:?}, expected {expected}")]
    Shape {
        /// The tensor's name as the API spells it, with the one that it was given
        /// (`Tensor::named`).
        tensor: String,
        /// The shape that was passed.
        have: Vec<u64>,
        /// The shape that is required, with the names of its dimensions.
        expected: String,
    },
    /// A tensor has the wrong element type.
    #[error("{tensor} has dtype {have}, expected {expected}")]
    DType {
        /// The tensor's name as the API spells it, with the one that it was given
        /// (`Tensor::named`).
        tensor: String,
        /// The dtype that was passed.
        have: String,
        /// The dtypes that are accepted.
        expected: String,
    },
    /// A buffer is too small for this operation. No byte was moved.
    #[error("{what}: needs {needed} {unit}, has {have} {unit}; {remedy}")]
    Capacity {
        /// The resource that is too small.
        what: &'static str,
        /// The size that this operation needs.
        needed: u64,
        /// The size there is.
        have: u64,
        /// `bytes`, `rows`, `tokens`, `entries`, `scales`, `words of 4 bytes` or `slots for each
        /// node`.
        unit: &'static str,
        /// The remedy.
        remedy: String,
        /// Whether this rank alone gets the error, or every rank.
        scope: Scope,
    },
    /// A rank's top-k ids hold one that is neither -1 nor the id of an expert. High throughput
    /// raises it on every rank, before any row moved.
    #[error(
        "topk_idx of rank {rank}: every expert id must be -1 or 0 to num_experts - 1; DispatchLayout::validate on that rank names the token"
    )]
    InvalidExpert {
        /// The rank whose ids are wrong.
        rank: u32,
    },
    /// A peer did not do its part before the deadline. The buffer cannot be used any more, except in
    /// low latency after a `regroup`. The device context is intact.
    #[error(
        "rank {rank} waited {waited:?} in {operation}{} (epoch {epoch}) for {word} of rank {peer}: needed {needed}, saw {seen}; \
         {} may have died, hang, or not have made the same call{other_causes}; \
         ask the group's missing_ranks() which ranks are gone, shrink the group by them, then make a new buffer, or regroup in low latency",
        in_place(*place), ranks(late_ranks)
    )]
    PeerTimeout {
        /// The rank that waited.
        rank: u32,
        /// The rank it waited for.
        peer: u32,
        /// The operation: `notify`, `dispatch`, `combine`, ...
        operation: &'static str,
        /// The place of the operation, where it is known: none for a count exchange.
        place: Option<u32>,
        /// The late ranks, in ascending order; `peer` is always among them. The list has all ranks
        /// that had not entered the operation when the wait expired. If all had entered, it has the
        /// ranks from which other data had not arrived. A rank that has entered may be late because
        /// it waits for another one itself.
        late_ranks: Box<[u32]>,
        /// The control word it waited on.
        word: &'static str,
        /// The epoch of the operation.
        epoch: u64,
        /// The value it waited for.
        needed: u64,
        /// The value it last saw.
        seen: u64,
        /// How long it waited.
        waited: Duration,
        /// Other possible causes, each with a separator in front; may be empty. Causes are a broken
        /// connection, proxies in a call that does not return, operations in flight of other
        /// buffers of this process and device, or in check mode the kernels' longest waits and what
        /// the block that recorded the wait has read.
        other_causes: Box<str>,
    },
    /// Ranks made calls that do not fit together.
    #[error(
        "rank {rank} and rank {peer} disagree on {what}: {ours} here, {} there; collective calls need the same on every rank",
        printable(theirs)
    )]
    Mismatch {
        /// This rank.
        rank: u32,
        /// The rank that differs.
        peer: u32,
        /// The name of the value that differs.
        what: &'static str,
        /// The value on this rank.
        ours: String,
        /// The value on the peer.
        theirs: String,
    },
    /// Ranks made different calls, each as its operation number `epoch`. A rank that exchanges data
    /// with a rank in another call returns this error. All other ranks wait until their deadline.
    /// The device context is intact, but the buffer cannot be used any more.
    #[error(
        "operation {epoch} is a {ours} on rank {rank} and a {} on rank {peer}; collective calls must be the same on every rank, in \
         the same order: make a new buffer{other_causes}",
        printable(theirs)
    )]
    OtherCall {
        /// This rank.
        rank: u32,
        /// The rank that made another call.
        peer: u32,
        /// The number of the operation.
        epoch: u64,
        /// The call of this rank.
        ours: String,
        /// The call of the peer.
        theirs: String,
        /// In check mode the kernels' longest waits and what the block that recorded the call has
        /// read, each with a separator in front: a kernel that ends early looks like another call.
        /// Otherwise empty.
        other_causes: Box<str>,
    },
    /// An operation of this rank failed, on the host or on the device, and the buffer cannot be used
    /// any more. In low latency, `regroup` makes it usable again where the device recorded the error.
    /// Peers may wait for this rank until their deadlines. After a bad expert id in low latency, peers
    /// still receive all other entries.
    #[error(
        "the buffer cannot be used since {call} failed: {reason}; peers may wait for this rank until their deadline: make a new buffer"
    )]
    Broken {
        /// The call.
        call: &'static str,
        /// Its error.
        reason: String,
        /// The same as an error, where a call on the host failed.
        source: Option<Box<Error>>,
    },
    /// A call of the CUDA driver failed.
    #[error("{call} failed: {name} ({code}){detail}")]
    Cuda {
        /// The driver function.
        call: &'static str,
        /// The `CUresult` code.
        code: i32,
        /// Its name, such as `CUDA_ERROR_OUT_OF_MEMORY`.
        name: String,
        /// The remedy, or the driver's log, with a leading separator; may be empty.
        detail: String,
    },
    /// A call of NCCL failed. The communicator cannot be used from then on.
    #[error("{call} failed: {name} ({code}){detail}")]
    Nccl {
        /// The function of libnccl.
        call: &'static str,
        /// The `ncclResult_t` code.
        code: i32,
        /// NCCL's text for it.
        name: String,
        /// NCCL's last error text, with a leading separator; may be empty.
        detail: String,
    },
    /// A call of the verbs library failed, or a write ended with an error. The queue cannot be used
    /// from then on.
    #[error("{call} failed: {status} ({operation}{}){remedy}", peer.map(|peer| format!(", rank {peer}")).unwrap_or_default())]
    Verbs {
        /// The function of libibverbs.
        call: &'static str,
        /// The system's error text, or that of the completion, with its number.
        status: String,
        /// The rank at the other end, where there is one.
        peer: Option<u32>,
        /// The operation that made the call.
        operation: String,
        /// The remedy, with a leading separator; may be empty.
        remedy: String,
    },
    /// This machine lacks a requirement (a driver, a device, peer access). The command exits with
    /// 77 on it.
    #[error("{what} is not available: {reason}")]
    Unavailable {
        /// The item that was requested.
        what: String,
        /// Why it cannot be had here, and the remedy.
        reason: String,
    },
    /// Device memory ran out.
    #[error(
        "out of device memory: {requested} bytes requested for {what}, {available} bytes free; dropped memory is free once all work enqueued before its drop has ended: synchronise, or use less"
    )]
    OutOfMemory {
        /// The purpose of the memory.
        what: String,
        /// Bytes requested.
        requested: u64,
        /// Bytes that were free.
        available: u64,
    },
    /// A kernel broke a rule of the virtual GPU; the text names the instruction and the Rust line.
    #[error("virtual GPU: {0}")]
    VirtualFault(String),
    /// A PTX module does not load; the text has line and column.
    #[error("PTX module: {0}")]
    Ptx(String),
    /// A launch breaks the contract of its kernel.
    #[error("launch of {kernel}: {rule}")]
    Launch {
        /// The kernel's entry name.
        kernel: &'static str,
        /// The rule it breaks, with both sides' values.
        rule: String,
    },
    /// The rendezvous store failed or timed out.
    #[error("store: {operation} of key {key:?}: {}", printable(reason))]
    Store {
        /// `get`, `set`, `wait`, ...
        operation: &'static str,
        /// The key.
        key: String,
        /// The cause.
        reason: String,
    },
    /// The launch of the rendezvous store was given up, because another rank failed.
    #[error("store: {operation} of key {key:?}: the group was given up: {}", printable(reason))]
    Aborted {
        /// `get`, `set`, `wait`, ...
        operation: &'static str,
        /// The key.
        key: String,
        /// The reason, from the failed rank or the launcher.
        reason: String,
    },
    /// An operation of a process group failed: a peer died, left, hung, or gave the group up.
    #[error("group {group:?}, rank {rank}, {operation} #{sequence}: {}", printable(reason))]
    Group {
        /// The group's name.
        group: String,
        /// This rank in the group.
        rank: u32,
        /// The operation.
        operation: &'static str,
        /// Its number in the group.
        sequence: u64,
        /// The ranks of the group to blame, if known.
        peers: Vec<u32>,
        /// The cause.
        reason: String,
    },
    /// Another rank failed in a call that all ranks make together. The call had no effect on any
    /// rank.
    #[error(
        "{what}, rank {rank}: rank {peer} failed: {}; mend that, and call again on all ranks",
        printable(reason)
    )]
    PeerFailed {
        /// The item that the ranks make together.
        what: &'static str,
        /// This rank.
        rank: u32,
        /// The lowest rank that failed.
        peer: u32,
        /// Its error.
        reason: String,
    },
    /// The transport between nodes failed. Its link to that peer cannot be used from then on.
    #[error(
        "{transport} transport: {operation}, rank {rank} with rank {peer}: {}; see what rank {peer} reported, then connect anew",
        printable(reason)
    )]
    Transport {
        /// `shm`, `tcp`, ...
        transport: &'static str,
        /// This rank.
        rank: u32,
        /// The rank at the other end.
        peer: u32,
        /// The operation: `connect`, `put`, `receive`, ...
        operation: &'static str,
        /// The cause.
        reason: String,
    },
    /// A handle was made by another buffer, or its data has been overwritten since.
    #[error("stale handle: {0}")]
    StaleHandle(String),
    /// Something had not ended by its deadline, other than a wait for a peer's word
    /// ([`Error::PeerTimeout`]).
    #[error("{call}: {}", printable(reason))]
    Timeout {
        /// The call that waited.
        call: &'static str,
        /// The awaited work, and the length of the wait.
        reason: String,
    },
    /// A fault inside epoxide, or in a back end: no call of the user's explains it. Please report
    /// it.
    #[error("{call}: {}", printable(reason))]
    Internal {
        /// The part that failed.
        call: &'static str,
        /// The state that must not occur.
        reason: String,
    },
    /// A call of the operating system failed.
    #[error("{call}: {}", printable(reason))]
    Os {
        /// The call.
        call: &'static str,
        /// The system's error text.
        reason: String,
        /// The system's error number, as in errno(3); `None` where no call of the system failed.
        errno: Option<i32>,
    },
}

/// An error of a call of the operating system.
pub trait OsError: fmt::Display {
    /// Its number.
    fn errno(&self) -> Option<i32>;
}

impl OsError for std::io::Error {
    fn errno(&self) -> Option<i32> {
        self.raw_os_error()
    }
}

impl OsError for rustix::io::Errno {
    fn errno(&self) -> Option<i32> {
        Some(self.raw_os_error())
    }
}

/// ` in place P`, which follows the name of an operation, or nothing.
fn in_place(place: Option<u32>) -> String {
    place.map_or_else(String::new, |place| format!(" in place {place}"))
}

/// Ranks as the subject of a sentence.
fn ranks(ranks: &[u32]) -> String {
    let list: Vec<_> = ranks.iter().map(u32::to_string).collect();
    match list.split_last() {
        Some((last, [])) => format!("rank {last}"),
        Some((last, others)) => format!("ranks {} and {last}", others.join(", ")),
        None => "no rank".into(),
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// An [`Error::Argument`].
    pub fn argument(argument: &'static str, value: impl ToString, rule: impl Into<String>) -> Self {
        Error::Argument { argument, value: value.to_string(), rule: rule.into() }
    }

    /// An [`Error::Capacity`] of a resource and the unit of its sizes.
    pub fn capacity(
        (what, unit): (&'static str, &'static str),
        needed: u64,
        have: u64,
        remedy: impl Into<String>,
        scope: Scope,
    ) -> Self {
        Error::Capacity { what, needed, have, unit, remedy: remedy.into(), scope }
    }

    /// The ranks that get this error of a collective call. Where other ranks get
    /// [`Error::PeerFailed`], as from `Buffer::new` and `regroup`, the rank that failed has its own
    /// error, for which this is [`Scope::ThisRank`].
    pub fn scope(&self) -> Scope {
        match self {
            Error::Capacity { scope, .. } => *scope,
            Error::InvalidExpert { .. } | Error::Mismatch { .. } | Error::PeerFailed { .. } => {
                Scope::EveryRank
            }
            _ => Scope::ThisRank,
        }
    }

    /// An [`Error::Timeout`].
    pub fn timeout(call: &'static str, reason: impl Into<String>) -> Self {
        Error::Timeout { call, reason: reason.into() }
    }

    /// An [`Error::Internal`].
    pub fn internal(call: &'static str, reason: impl ToString) -> Self {
        Error::Internal { call, reason: reason.to_string() }
    }

    /// An [`Error::Os`] from any displayable cause, without a number.
    pub fn os(call: &'static str, reason: impl ToString) -> Self {
        Error::Os { call, reason: reason.to_string(), errno: None }
    }

    /// An [`Error::Os`] with the text and the number of a failed call's error.
    pub fn system(call: &'static str, error: impl OsError) -> Self {
        Error::os(call, &error).with_errno(&error)
    }

    /// An [`Error::Os`] with the number of its cause.
    pub fn with_errno(mut self, cause: &impl OsError) -> Self {
        if let Error::Os { errno, .. } = &mut self {
            *errno = cause.errno();
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_main_that_returns_an_error_shows_it_as_text() {
        let error = Error::VirtualFault("out of bounds\n  in kernel 'dispatch'".into());
        let text = "virtual GPU: out of bounds\n  in kernel 'dispatch'";
        assert_eq!(format!("{error:?}"), text);
        assert_eq!(format!("{:?}", Box::<dyn std::error::Error>::from(error)), text);
    }

    #[test]
    fn the_number_of_a_failed_call_is_kept() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let error = std::net::TcpListener::bind(taken.local_addr().unwrap()).unwrap_err();
        let number = |error: &Error| match error {
            Error::Os { errno, .. } => *errno,
            error => panic!("{error}"),
        };
        assert_eq!(number(&Error::system("bind", error)), Some(libc::EADDRINUSE));
        let of_context = Error::os("dup", "rank 3").with_errno(&rustix::io::Errno::MFILE);
        assert_eq!((number(&of_context), of_context.to_string()), (Some(libc::EMFILE), "dup: rank 3".into()));
        assert_eq!(number(&Error::os("recvmsg", "a second packet")), None);
    }
}

//! Operations of a group as values, which the object-safe core of
//! [`ProcessGroup`](crate::ProcessGroup) runs.

use crate::element::{ElementType, ReduceOp};
use crate::error::{Error, Result};

/// The kind of an operation, on the wire, in errors and in the flight recorder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Operation {
    Barrier = 1,
    MonitoredBarrier = 2,
    Broadcast = 3,
    AllGather = 4,
    Gather = 5,
    Scatter = 6,
    Reduce = 7,
    AllReduce = 8,
    ReduceScatter = 9,
    AllToAll = 10,
    PointToPoint = 11,
    ExchangeFds = 12,
    Destroy = 13,
    Coalesced = 14,
    /// Finding the other ranks, before the first operation.
    Connect = 15,
}

impl Operation {
    /// The operation's name as the API spells it.
    pub fn name(self) -> &'static str {
        match self {
            Operation::Barrier => "barrier",
            Operation::MonitoredBarrier => "monitored_barrier",
            Operation::Broadcast => "broadcast",
            Operation::AllGather => "all_gather",
            Operation::Gather => "gather",
            Operation::Scatter => "scatter",
            Operation::Reduce => "reduce",
            Operation::AllReduce => "all_reduce",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::AllToAll => "all_to_all",
            Operation::PointToPoint => "send/recv",
            Operation::ExchangeFds => "exchange_fds",
            Operation::Destroy => "destroy",
            Operation::Coalesced => "coalesced",
            Operation::Connect => "connect",
        }
    }

    /// True where every rank makes the call, so that calls of the same number must be the same.
    pub(crate) fn is_collective(self) -> bool {
        !matches!(self, Operation::PointToPoint | Operation::Connect)
    }

    pub(crate) fn from_code(code: u8) -> Option<Operation> {
        use Operation::*;
        [
            Barrier,
            MonitoredBarrier,
            Broadcast,
            AllGather,
            Gather,
            Scatter,
            Reduce,
            AllReduce,
            ReduceScatter,
            AllToAll,
            PointToPoint,
            ExchangeFds,
            Destroy,
            Coalesced,
            Connect,
        ]
        .into_iter()
        .find(|operation| *operation as u8 == code)
    }
}

/// One send or receive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum P2p {
    /// Sends `data` to rank `to` under `tag`.
    Send {
        /// The receiver.
        to: u32,
        /// Matched by the receiver.
        tag: u64,
        /// The message.
        data: Vec<u8>,
    },
    /// Receives the next message with `tag`, from one rank or from any rank.
    Recv {
        /// The sender; `None` is any.
        from: Option<u32>,
        /// The tag it was sent under.
        tag: u64,
    },
}

/// A received message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message<T = Vec<u8>> {
    /// The rank that sent it.
    pub from: u32,
    /// The tag it was sent under.
    pub tag: u64,
    /// The payload.
    pub data: T,
}

/// An operation with its data. Byte counts of reductions are multiples of the dtype's size.
#[derive(Debug, Clone)]
pub enum Call {
    /// Waits for all ranks. Gives [`CallResult::Done`].
    Barrier,
    /// Waits for all ranks; an error names every missing rank. Gives [`CallResult::Done`].
    MonitoredBarrier,
    /// Sends `data` of `root` to all ranks; other `data` is ignored. Gives [`CallResult::Data`].
    Broadcast {
        /// The rank whose bytes are sent.
        root: u32,
        /// Its bytes.
        data: Vec<u8>,
    },
    /// Every rank's bytes, everywhere; lengths may differ. Gives [`CallResult::Parts`], by rank.
    AllGather {
        /// This rank's bytes.
        data: Vec<u8>,
    },
    /// Every rank's bytes, on `root`; lengths may differ. Gives [`CallResult::Parts`] there,
    /// [`CallResult::Done`] elsewhere.
    Gather {
        /// The rank that gets them.
        root: u32,
        /// This rank's bytes.
        data: Vec<u8>,
    },
    /// One part for each rank. Gives [`CallResult::Data`].
    Scatter {
        /// The rank that has the parts.
        root: u32,
        /// The payload for each rank, by rank; ignored on ranks other than the root.
        parts: Vec<Vec<u8>>,
    },
    /// Elementwise, the result on `root`. Gives [`CallResult::Data`] there, [`CallResult::Done`]
    /// elsewhere.
    Reduce {
        /// The rank that gets the result.
        root: u32,
        /// This rank's elements; the same length everywhere.
        data: Vec<u8>,
        /// Their type.
        dtype: ElementType,
        /// How they combine.
        op: ReduceOp,
    },
    /// Elementwise, the result everywhere. Gives [`CallResult::Data`].
    AllReduce {
        /// This rank's elements; the same length everywhere.
        data: Vec<u8>,
        /// Their type.
        dtype: ElementType,
        /// How they combine.
        op: ReduceOp,
    },
    /// Elementwise, rank `r` gets the `r`-th piece. Gives [`CallResult::Data`].
    ReduceScatter {
        /// This rank's elements, all pieces one after the other.
        data: Vec<u8>,
        /// Bytes of each rank's piece, the same everywhere.
        counts: Vec<u64>,
        /// The elements' type.
        dtype: ElementType,
        /// How they combine.
        op: ReduceOp,
    },
    /// Part `p` of rank `r` becomes part `r` of rank `p`; lengths may differ. Gives
    /// [`CallResult::Parts`], by sender.
    AllToAll {
        /// The payload for each receiver, by its rank.
        parts: Vec<Vec<u8>>,
    },
    /// Concurrent sends and receives. Gives [`CallResult::Messages`], one for each receive in
    /// order.
    P2p(Vec<P2p>),
    /// Several collectives in one turn; adjacent reductions of one kind are sent as one. Gives
    /// [`CallResult::Several`].
    Coalesced(Vec<Call>),
}

impl Call {
    /// Which operation it is.
    pub fn operation(&self) -> Operation {
        match self {
            Call::Barrier => Operation::Barrier,
            Call::MonitoredBarrier => Operation::MonitoredBarrier,
            Call::Broadcast { .. } => Operation::Broadcast,
            Call::AllGather { .. } => Operation::AllGather,
            Call::Gather { .. } => Operation::Gather,
            Call::Scatter { .. } => Operation::Scatter,
            Call::Reduce { .. } => Operation::Reduce,
            Call::AllReduce { .. } => Operation::AllReduce,
            Call::ReduceScatter { .. } => Operation::ReduceScatter,
            Call::AllToAll { .. } => Operation::AllToAll,
            Call::P2p(_) => Operation::PointToPoint,
            Call::Coalesced(_) => Operation::Coalesced,
        }
    }

    /// Bytes of this rank's input.
    pub fn bytes(&self) -> u64 {
        let parts = |parts: &[Vec<u8>]| parts.iter().map(|part| part.len() as u64).sum();
        match self {
            Call::Barrier | Call::MonitoredBarrier => 0,
            Call::Broadcast { data, .. }
            | Call::AllGather { data }
            | Call::Gather { data, .. }
            | Call::Reduce { data, .. }
            | Call::AllReduce { data, .. }
            | Call::ReduceScatter { data, .. } => data.len() as u64,
            Call::Scatter { parts: all, .. } | Call::AllToAll { parts: all } => parts(all),
            Call::P2p(list) => list
                .iter()
                .map(|one| if let P2p::Send { data, .. } = one { data.len() as u64 } else { 0 })
                .sum(),
            Call::Coalesced(calls) => calls.iter().map(Call::bytes).sum(),
        }
    }

    /// Checks what a rank can check alone; a call that fails here has not begun.
    pub(crate) fn check(&self, rank: u32, size: u32) -> Result<()> {
        let in_group = |argument: &'static str, value: u32| {
            let rule = || format!("ranks of a group of {size} are 0..{size}");
            if value < size { Ok(()) } else { Err(Error::argument(argument, value, rule())) }
        };
        let whole = |bytes: u64, dtype: ElementType| {
            if bytes.is_multiple_of(dtype.size() as u64) {
                return Ok(());
            }
            Err(Error::argument(
                "data",
                bytes,
                format!("must be a multiple of {dtype}'s {} bytes", dtype.size()),
            ))
        };
        let per_rank = |argument: &'static str, count: usize| {
            if count == size as usize {
                return Ok(());
            }
            Err(Error::argument(argument, count, format!("there must be one for each of the {size} ranks")))
        };
        match self {
            Call::Barrier | Call::MonitoredBarrier | Call::AllGather { .. } => Ok(()),
            Call::Broadcast { root, .. } | Call::Gather { root, .. } => in_group("root", *root),
            Call::Scatter { root, parts } => {
                in_group("root", *root)?;
                if *root == rank { per_rank("parts", parts.len()) } else { Ok(()) }
            }
            Call::Reduce { root, data, dtype, op } => {
                in_group("root", *root)?;
                whole(data.len() as u64, *dtype)?;
                op.check(*dtype)
            }
            Call::AllReduce { data, dtype, op } => {
                whole(data.len() as u64, *dtype)?;
                op.check(*dtype)
            }
            Call::ReduceScatter { data, counts, dtype, op } => {
                per_rank("counts", counts.len())?;
                for count in counts {
                    whole(*count, *dtype)?;
                }
                let sum = counts.iter().try_fold(0u64, |sum, count| sum.checked_add(*count));
                if sum != Some(data.len() as u64) {
                    let rule = format!("must add up to the {} bytes of data", data.len());
                    return Err(Error::argument("counts", format!("{counts:?}"), rule));
                }
                op.check(*dtype)
            }
            Call::AllToAll { parts } => per_rank("parts", parts.len()),
            Call::P2p(list) => list.iter().try_for_each(|one| match one {
                P2p::Send { to, .. } => in_group("to", *to),
                P2p::Recv { from: Some(from), .. } => in_group("from", *from),
                P2p::Recv { from: None, .. } => Ok(()),
            }),
            Call::Coalesced(calls) => calls.iter().try_for_each(|call| match call {
                Call::Coalesced(_) | Call::P2p(_) => {
                    let rule = "collectives only: send and receive in batches of their own";
                    Err(Error::argument("calls", call.operation().name(), rule))
                }
                call => call.check(rank, size),
            }),
        }
    }
}

/// The result of a [`Call`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallResult {
    /// Completion without data.
    Done,
    /// Bytes.
    Data(Vec<u8>),
    /// Bytes by rank.
    Parts(Vec<Vec<u8>>),
    /// The messages received, in the order of the receives.
    Messages(Vec<Message>),
    /// One for each call.
    Several(Vec<CallResult>),
}

impl CallResult {
    fn unexpected(self) -> Error {
        Error::internal("process group", format!("the backend gave another kind of outcome: {self:?}"))
    }

    /// The bytes of [`CallResult::Data`].
    pub fn data(self) -> Result<Vec<u8>> {
        if let CallResult::Data(data) = self { Ok(data) } else { Err(self.unexpected()) }
    }

    /// The bytes by rank of [`CallResult::Parts`].
    pub fn parts(self) -> Result<Vec<Vec<u8>>> {
        if let CallResult::Parts(parts) = self { Ok(parts) } else { Err(self.unexpected()) }
    }

    /// The messages of [`CallResult::Messages`].
    pub fn messages(self) -> Result<Vec<Message>> {
        if let CallResult::Messages(messages) = self { Ok(messages) } else { Err(self.unexpected()) }
    }

    /// The outcomes of [`CallResult::Several`].
    pub fn several(self) -> Result<Vec<CallResult>> {
        if let CallResult::Several(several) = self { Ok(several) } else { Err(self.unexpected()) }
    }
}

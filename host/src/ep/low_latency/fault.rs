//! Faults that only low latency has, and the outcome of the operations between two regroups.

use std::sync::{Arc, OnceLock};

use epoxide_gpu::layout::{LowLatencyCall, Status, UNKNOWN_EXPERT, UNKNOWN_PLACE, WITH_TABLE, Wait};

use super::Buffer;
use super::dispatch::describe_rows;
use crate::driver::{Outcome, Stream};
use crate::ep::StreamOrder;
use crate::ep::core::{self, Faults};
use crate::error::{Error, Result};

/// The remedy of errors that the device has recorded.
const REGROUP: &str = "`regroup` makes the buffer usable again";

/// In place of the number of tokens: no dispatch has run since a regroup.
pub(super) const NO_DISPATCH: u32 = u32::MAX;

impl Buffer {
    /// The error after which the buffer cannot be used, if any. It is the first wait for a peer
    /// that expired ([`Error::PeerTimeout`]) or found another call there ([`Error::OtherCall`]), or
    /// an expert id out of range. The error is visible once the stream has passed the operation;
    /// each replay of a captured one records it as well.
    ///
    /// A call that ended the buffer ([`Error::Broken`]) is one as well. A dropped
    /// [`Pending`](super::Pending) is one until the next [`Buffer::regroup`].
    pub fn check(&self) -> Result<()> {
        self.core.check_between_calls()
    }

    /// The outcome of an operation that begins now on the stream of `order`. Replays of a recording
    /// follow the buffer into later generations.
    pub(super) fn outcome(&self, order: StreamOrder<'_>) -> Result<Arc<Generation>> {
        Ok(self.outcome_where(self.core.is_capturing(order)?))
    }

    /// [`Buffer::outcome`] of an operation that is `recorded`, or runs.
    pub(super) fn outcome_where(&self, recorded: bool) -> Arc<Generation> {
        if recorded { Generation::new(self.core.faults()) } else { self.generation.clone() }
    }
}

/// The calls of this mode.
#[derive(Debug)]
pub struct Calls {
    pub num_experts: u32,
    /// Elements of a row.
    pub hidden: u64,
}

impl core::Calls for Calls {
    fn error(&self, status: &Status) -> Option<Error> {
        let &Status { code, needed, seen, .. } = status;
        if code == Wait::LowLatencyExpert as u64 {
            let (id, token, with_map) = (seen as i64, needed & !WITH_TABLE, needed & WITH_TABLE != 0);
            let of_token = |id: i64| ("topk_idx", format!("{id} of token {token}"));
            let ((argument, value), rule) = if with_map && id >= 0 && id & UNKNOWN_PLACE != 0 {
                let value = format!("its entries of expert {} of token {token}", id & !UNKNOWN_PLACE);
                let rule = format!("a physical expert must be -1 or 0 to {}", self.num_experts - 1);
                (("map", value), rule)
            } else if with_map {
                let id = if id >= 0 { id & !UNKNOWN_EXPERT } else { id };
                let rule = "must be -1 or a logical expert's id, below num_experts of the map";
                (of_token(id), rule.to_owned())
            } else {
                (of_token(id), format!("must be -1 or an expert's id, 0 to {}", self.num_experts - 1))
            };
            let reason =
                format!("{argument} = {value}: {rule}; peers got none of the token for it; {REGROUP}");
            return Some(Error::Broken { call: "low-latency dispatch", reason, source: None });
        }
        if code == Wait::LowLatencyUnpaired as u64 || code == Wait::LowLatencyTokens as u64 {
            let reason = if code == Wait::LowLatencyUnpaired as u64 || needed == u64::from(NO_DISPATCH) {
                format!(
                    "no dispatch came to its place since the combine before, or since a regroup; replay a dispatch \
                     in front of it; {REGROUP}"
                )
            } else {
                format!(
                    "it was captured for {seen} tokens of this rank, and the dispatch into its place had {needed}; \
                     replay the one that it was captured behind; {REGROUP}"
                )
            };
            return Some(Error::Broken { call: "low-latency combine", reason, source: None });
        }
        None
    }

    fn name(&self, call: u64) -> (&'static str, Option<u32>) {
        let call = LowLatencyCall::of(call as u32);
        (name_of(call), Some(call.place))
    }

    fn describe(&self, word: u64, _epoch: u64) -> String {
        let call = LowLatencyCall::of(word as u32);
        let LowLatencyCall { has_scales, place, row_bytes, .. } = call;
        let name = name_of(call);
        if call.is_combine && row_bytes == 0 {
            return format!("{name} in place {place} of rows in the pool");
        }
        let rows = if call.is_combine {
            format!("{row_bytes} bytes per row{}", if has_scales { " and f32 scales" } else { "" })
        } else {
            describe_rows(row_bytes, has_scales, self.hidden).unwrap_or_else(|| {
                let rows = "rows and columns that are none of the usual formats";
                format!("{rows} (number {} of type, sizes and columns)", row_bytes / 16)
            })
        };
        format!("{name} in place {place} with {rows}")
    }
}

fn name_of(call: LowLatencyCall) -> &'static str {
    if call.is_combine { "low-latency combine" } else { "low-latency dispatch" }
}

/// The operations between two regroups, and their outcome: [`Buffer::regroup`] clears the record,
/// and results of operations before it keep their error.
#[derive(Debug)]
pub struct Generation {
    faults: Arc<Faults>,
    /// The error that the operations had when a regroup ended the generation.
    ended: OnceLock<Error>,
}

impl Generation {
    pub fn new(faults: &Arc<Faults>) -> Arc<Generation> {
        Arc::new(Generation { faults: faults.clone(), ended: OnceLock::new() })
    }

    /// Ends it: keeps its error, if it has failed, and clears the record.
    pub fn end(&self, stream: &Stream) -> Result<()> {
        if let Err(error) = self.faults.check() {
            let _ = self.ended.set(error);
        }
        self.faults.clear(stream)
    }
}

impl Outcome for Generation {
    fn report(&self) -> Result<()> {
        self.ended.get().cloned().map_or_else(|| self.faults.check(), Err)
    }

    fn order_before(&self, stream: &Stream) -> Result<()> {
        self.faults.order_before(stream)
    }
}

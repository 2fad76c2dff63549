//! Faults that only low latency has, and the outcomes of operations between two regroups.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use epoxide_gpu::layout::{LowLatencyCall, Status, UNKNOWN_EXPERT, UNKNOWN_PLACE, WITH_TABLE, Wait};

use super::Buffer;
use crate::driver::{Report, Stream};
use crate::ep::StreamOrder;
use crate::ep::core::{self, Faults};
use crate::ep::tensor::Outcome;
use crate::error::{Error, Result};

impl Buffer {
    /// The error after which the buffer is of no use, if there was one: of the first wait for a peer that expired ([`Error::PeerTimeout`]) or
    /// found the peer in another call ([`Error::OtherCall`]), or of an expert id out of range. It shows once the stream has passed the
    /// operation; a captured one records it at each replay as well.
    pub fn check(&self) -> Result<()> {
        self.core.check()
    }

    /// The outcome of an operation that begins now, where `order` says.
    pub(super) fn outcomes(&self, order: StreamOrder<'_>) -> Result<Arc<Outcomes>> {
        let generation = if self.core.is_capturing(order)? { None } else { Some(self.generation) };
        Ok(Arc::new(Outcomes { generations: self.generations.clone(), generation }))
    }
}

/// The calls of this mode.
#[derive(Debug)]
pub struct Calls {
    pub num_experts: u32,
}

impl core::Calls for Calls {
    fn error(&self, status: &Status) -> Option<Error> {
        let &Status { code, needed, seen, .. } = status;
        if code == Wait::LowLatencyExpert as u64 {
            let (id, token, with_map) = (seen as i64, needed & !WITH_TABLE, needed & WITH_TABLE != 0);
            if with_map && id >= 0 && id & UNKNOWN_PLACE != 0 {
                let value = format!("its entries of expert {} of token {token}", id & !UNKNOWN_PLACE);
                let rule = format!(
                    "a physical expert must be -1 or 0 to {}; peers got none of the token for it, and the buffer is of no use after it",
                    self.num_experts - 1
                );
                return Some(Error::argument("map", value, rule));
            }
            if with_map {
                let id = if id >= 0 { id & !UNKNOWN_EXPERT } else { id };
                let rule = "must be -1 or a logical expert's id, below num_experts of the map; peers got none of the token for it, \
                            and the buffer is of no use after it";
                return Some(Error::argument("topk_idx", format!("{id} of token {token}"), rule));
            }
            let value = format!("{id} of token {token}");
            let rule = format!(
                "must be -1 or an expert's id, 0 to {}; peers got none of the token for it, and the buffer is of no use after it",
                self.num_experts - 1
            );
            return Some(Error::argument("topk_idx", value, rule));
        }
        if code == Wait::LowLatencyUnpaired as u64 || code == Wait::LowLatencyTokens as u64 {
            let reason = if code == Wait::LowLatencyUnpaired as u64 {
                "no dispatch came to its place since the combine before; replay a dispatch in front of it"
                    .into()
            } else {
                format!(
                    "it was captured for {seen} tokens of this rank, and the dispatch into its place had {needed}; \
                     replay the one that it was captured behind"
                )
            };
            return Some(Error::Broken { call: "low-latency combine", reason });
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
        let scales = if has_scales { " and scales" } else { "" };
        format!("{} in place {place} with {row_bytes} bytes per row{scales}", name_of(call))
    }
}

fn name_of(call: LowLatencyCall) -> &'static str {
    if call.is_combine { "low-latency combine" } else { "low-latency dispatch" }
}

/// The errors of the generations of a buffer's ranks that a regroup has ended, and the faults of the
/// one that runs.
#[derive(Debug)]
pub struct Generations {
    faults: Arc<Faults>,
    past: Mutex<BTreeMap<u64, Error>>,
}

impl Generations {
    pub fn new(faults: Arc<Faults>) -> Arc<Generations> {
        Arc::new(Generations { faults, past: Mutex::default() })
    }

    fn errors(&self) -> MutexGuard<'_, BTreeMap<u64, Error>> {
        self.past.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn past(&self, generation: u64) -> Option<Error> {
        self.errors().get(&generation).cloned()
    }

    /// Ends a generation: keeps its error, if it has failed, and clears the record.
    pub fn end(&self, generation: u64, stream: &Stream) -> Result<()> {
        if let Err(error) = self.faults.check() {
            self.errors().insert(generation, error);
        }
        self.faults.clear(stream)
    }
}

/// The outcome of the operations between two regroups. [`Buffer::regroup`] clears the status, and
/// what operations before it have left stays what it is.
#[derive(Debug)]
pub struct Outcomes {
    generations: Arc<Generations>,
    /// Number of regroups before; `None` for a recording, whose replays follow the buffer.
    generation: Option<u64>,
}

impl Report for Outcomes {
    fn report(&self) -> Result<()> {
        let past = self.generation.and_then(|generation| self.generations.past(generation));
        past.map_or_else(|| self.generations.faults.check(), Err)
    }
}

impl Outcome for Outcomes {
    fn come_before(&self, stream: &Stream) -> Result<()> {
        self.generations.faults.come_before(stream)
    }
}

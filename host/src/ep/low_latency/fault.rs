//! Turns what low-latency kernels recorded into errors.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use epoxide_gpu::layout::{LowLatencyCall, Status, UNKNOWN_EXPERT, UNKNOWN_PLACE, WITH_TABLE, Wait};

use super::buffer::Buffer;
use crate::driver::{DevicePtr, Report, Stream};
use crate::ep::StreamOrder;
use crate::ep::beside::Activity;
use crate::ep::tensor::Outcome;
use crate::error::{Error, Result};

impl Buffer {
    /// The error after which the buffer is of no use, if there was one: of the first wait for a peer that expired ([`Error::PeerTimeout`]) or
    /// found the peer in another call ([`Error::OtherCall`]), or of an expert id out of range. It shows once the stream has passed the
    /// operation; a captured one records it at each replay as well.
    pub fn check(&self) -> Result<()> {
        let outcome = self.faults.check();
        if matches!(outcome, Err(Error::PeerTimeout { .. }))
            && let Some(failure) = self.network.as_ref().and_then(|network| network.proxies.failure())
        {
            // The reason: a connection that broke, say.
            tracing::warn!(rank = self.rank, "{failure}");
        }
        outcome?;
        self.sequence.check()
    }

    /// Device address of the buffer's status, 8 bytes in mapped host memory: 0 until an operation fails in a
    /// way after which the buffer is of no use, some other number from then on. A kernel of the caller's own
    /// that runs behind an operation tells by it whether that operation gave results, also in a replayed graph;
    /// [`Buffer::check`] gives the error on the host.
    ///
    /// Read it with `ld.acquire.sys` of 8 bytes. The address stays valid, and the same, as long as the buffer.
    pub fn status_ptr(&self) -> DevicePtr {
        self.faults.activity.status_ptr()
    }

    /// The outcome of an operation that begins now, where `order` says.
    pub(super) fn outcomes(&self, order: StreamOrder<'_>) -> Result<Arc<Outcomes>> {
        let generation = if order.caller.is_capturing()? { None } else { Some(self.generation) };
        Ok(Arc::new(Outcomes { faults: self.faults.clone(), generation }))
    }

    /// Device address of the tokens that a combine has left without their sums, u8 `[max_tokens]` in
    /// mapped host memory: 1 for each token of which a combine that gave up may not have made the sum,
    /// 0 for the others. A kernel of the caller's own reads it behind the combine, where
    /// [`Buffer::status_ptr`] tells of a failure, also in a replayed graph. [`Buffer::regroup`] sets
    /// all bytes to 0.
    ///
    /// A token with an expert id out of range has a 1 as well, from its dispatch on. Shares of experts
    /// on ranks that a regroup left out are not counted: they are those that are not among
    /// [`Buffer::members`].
    pub fn missing_ptr(&self) -> DevicePtr {
        self.faults.activity.missing_ptr()
    }

    /// The tokens that a combine has left without their sums, by number in ascending order, as
    /// [`Buffer::missing_ptr`] has them on the device; empty as long as no operation has failed. The
    /// sums of all others are right. It waits for all that the device's streams were given.
    ///
    /// # Errors
    /// [`Error::Os`] where that has not ended after twice the buffer's timeout.
    pub fn missing_tokens(&self) -> Result<Vec<u32>> {
        let timeout = self.options.timeout.saturating_mul(2);
        self.faults.activity.missing_tokens(&self.arena, self.options.max_tokens, timeout)
    }
}

/// The first failed wait of a buffer's kernels, as they record it.
#[derive(Debug)]
pub(super) struct Faults {
    pub activity: Arc<Activity>,
    pub rank: u32,
    pub num_experts: u32,
    /// The error of each generation that failed before a regroup.
    pub past: Mutex<BTreeMap<u64, Error>>,
}

impl Outcome for Faults {
    fn come_before(&self, stream: &Stream) -> Result<()> {
        self.activity.come_before(stream)
    }

    fn check_behind(&self, _: &Stream) -> Result<()> {
        self.check()
    }
}

/// The outcome of the operations between two regroups. [`Buffer::regroup`] clears the status, and
/// what operations before it have left stays what it is.
#[derive(Debug)]
pub(super) struct Outcomes {
    faults: Arc<Faults>,
    /// Number of regroups before; `None` for a recording, whose replays follow the buffer.
    generation: Option<u64>,
}

impl Outcomes {
    fn check(&self) -> Result<()> {
        let past = self.generation.and_then(|generation| self.faults.past(generation));
        past.map_or_else(|| self.faults.check(), Err)
    }
}

impl Report for Outcomes {
    fn report(&self) -> Result<()> {
        self.check()
    }
}

impl Outcome for Outcomes {
    fn come_before(&self, stream: &Stream) -> Result<()> {
        self.faults.come_before(stream)
    }

    fn check_behind(&self, _: &Stream) -> Result<()> {
        self.check()
    }
}

impl Faults {
    fn past(&self, generation: u64) -> Option<Error> {
        self.past.lock().unwrap_or_else(PoisonError::into_inner).get(&generation).cloned()
    }

    /// Keeps the error of a generation, if it has failed, which a regroup ends.
    pub fn end_generation(&self, generation: u64) {
        if let Err(error) = self.check() {
            self.past.lock().unwrap_or_else(PoisonError::into_inner).insert(generation, error);
        }
    }

    fn check(&self) -> Result<()> {
        if !self.activity.has_failed()? {
            return Ok(());
        }
        let Status { code, peer, epoch, needed, seen, waited_ns, call } = self.activity.status.read(0)?;
        let (rank, peer, call) = (self.rank, peer as u32, LowLatencyCall::of(call as u32));
        if code == Wait::LowLatencyExpert as u64 {
            let (id, token, with_map) = (seen as i64, needed & !WITH_TABLE, needed & WITH_TABLE != 0);
            if with_map && id >= 0 && id & UNKNOWN_PLACE != 0 {
                let value = format!("its entries of expert {} of token {token}", id & !UNKNOWN_PLACE);
                let rule = format!(
                    "a physical expert must be -1 or 0 to {}; peers got none of the token for it, and the buffer is of no use after it",
                    self.num_experts - 1
                );
                return Err(Error::argument("map", value, rule));
            }
            if with_map {
                let id = if id >= 0 { id & !UNKNOWN_EXPERT } else { id };
                let rule = "must be -1 or a logical expert's id, below num_experts of the map; peers got none of the token for it, \
                            and the buffer is of no use after it";
                return Err(Error::argument("topk_idx", format!("{id} of token {token}"), rule));
            }
            let value = format!("{id} of token {token}");
            let rule = format!(
                "must be -1 or an expert's id, 0 to {}; peers got none of the token for it, and the buffer is of no use after it",
                self.num_experts - 1
            );
            return Err(Error::argument("topk_idx", value, rule));
        }
        if code == Wait::LowLatencyOtherCall as u64 {
            let (ours, theirs) = (describe(needed as u32), describe(seen as u32));
            return Err(Error::OtherCall { rank, peer, epoch, ours, theirs });
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
            return Err(Error::Broken { call: "low-latency combine", reason });
        }
        const WAITS: [(Wait, &str); 6] = [
            (Wait::LowLatencyReady, "ready"),
            (Wait::LowLatencyEnter, "its call"),
            (Wait::LowLatencyIds, "expert ids"),
            (Wait::LowLatencyRows, "rows"),
            (Wait::LowLatencyReturned, "returned rows"),
            (Wait::LowLatencyQueue, "the queue to it"),
        ];
        let known = WAITS.iter().find(|(wait, _)| *wait as u64 == code);
        let (_, word) = known.copied().unwrap_or((Wait::LowLatencyEnter, "unknown"));
        Err(Error::PeerTimeout {
            rank,
            peer,
            operation: name_of(call),
            place: Some(call.place),
            late: self.activity.late_ranks(peer, |_, number| number)?.into(),
            word,
            epoch,
            needed,
            seen,
            waited: Duration::from_nanos(waited_ns),
            beside: self.activity.beside().into(),
        })
    }
}

fn name_of(call: LowLatencyCall) -> &'static str {
    if call.is_combine { "low-latency combine" } else { "low-latency dispatch" }
}

/// The call that a packet says.
fn describe(bits: u32) -> String {
    let call = LowLatencyCall::of(bits);
    let LowLatencyCall { has_scales, place, row_bytes, .. } = call;
    let scales = if has_scales { " and scales" } else { "" };
    format!("{} in place {place} with {row_bytes} bytes per row{scales}", name_of(call))
}

//! Turns what kernels recorded into errors.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use epoxide_gpu::layout::{
    Call, CallKind, FailedPlan, FailedPlans, KEPT_PLANS, PlanHeader, PlanStatus, SIGNATURE_NAMES, Status,
    Wait, ready_epoch, ready_plan,
};

use super::beside::Activity;
use super::pool::pool_bytes;
use super::tensor::{DType, Outcome};
use super::topology::Topology;
use super::wire::{WireSide, wire_bytes};
use super::{Buffer, BufferShape};
use crate::driver::{DevicePtr, Report, Stream, poll};
use crate::error::{Error, Result, Scope};

/// How often a waiting host asks the stream whether it has failed.
const STREAM_CHECK: Duration = Duration::from_millis(2);

/// The first failed wait of a buffer's kernels, as they record it. Shared with the steps that were captured with it.
#[derive(Debug)]
pub(super) struct Faults {
    pub activity: Arc<Activity>,
    pub rank: u32,
    pub topology: Topology,
    pub limits: Limits,
    /// Failed plans that [`Faults::check_plans`] has told of.
    pub told: AtomicU64,
    /// Names other work that was in flight when a wait was first seen to have expired.
    pub beside: OnceLock<String>,
}

/// Limits that the plans of a buffer's dispatches must keep.
#[derive(Debug)]
pub(super) struct Limits {
    pub shape: BufferShape,
    pub places: u32,
    /// Rows that a rank can receive in one dispatch.
    pub rows: u64,
    /// Whether places have room for rows by expert.
    pub by_expert: bool,
    /// Slots of wire memory for each node; 0 with one node.
    pub slots: u64,
}

impl Report for Faults {
    fn report(&self) -> Result<()> {
        self.check()
    }
}

impl Outcome for Faults {
    fn come_before(&self, stream: &Stream) -> Result<()> {
        self.activity.come_before(stream)
    }

    fn check_behind(&self, _: &Stream) -> Result<()> {
        self.check()
    }
}

impl Faults {
    /// The error of the first wait that expired, or met another call.
    pub fn check(&self) -> Result<()> {
        if self.activity.has_failed()? {
            let status: Status = self.activity.status.read(0)?;
            let peer = self.rank_of(status.code, status.peer as u32);
            let late = self.activity.late_ranks(peer, |code, number| self.rank_of(code, number))?;
            return Err(self.error(&status, peer, late));
        }
        Ok(())
    }

    /// The rank that a kernel calls `number` where it waits for what `code` says.
    fn rank_of(&self, code: u64, number: u32) -> u32 {
        const OF_THIS_NODE: [Wait; 7] = [
            Wait::Counts,
            Wait::DispatchReady,
            Wait::DispatchDone,
            Wait::CombineReady,
            Wait::CombineDone,
            Wait::Staged,
            Wait::OtherCall,
        ];
        let (topology, node) = (self.topology, self.topology.node(self.rank));
        if OF_THIS_NODE.iter().any(|&wait| wait as u64 == code) {
            return topology.rank(node, number);
        }
        if code == Wait::RelayedCounts as u64 {
            return topology.rank(node, topology.index(number));
        }
        topology.rank(number, topology.index(self.rank))
    }

    fn error(&self, status: &Status, peer: u32, late: Vec<u32>) -> Error {
        let (rank, code) = (self.rank, status.code);
        if code == Wait::OtherCall as u64 || code == Wait::OtherNodeCall as u64 {
            return Error::OtherCall {
                rank,
                peer,
                epoch: status.epoch,
                ours: describe_call(status.needed, status.epoch),
                theirs: describe_call(status.seen, status.epoch),
            };
        }
        if code == Wait::MissingRows as u64 {
            let (came, given) = (status.needed, status.seen);
            let reason =
                format!("{came} rows came, and it was given {given}; combine a tensor of as many as came");
            return Error::Broken { call: "combine", reason };
        }
        const WAITS: [(Wait, &str, &str); 15] = [
            (Wait::Counts, "notify", "counts"),
            (Wait::DispatchReady, "dispatch", "ready"),
            (Wait::DispatchDone, "dispatch", "done"),
            (Wait::CombineReady, "combine", "ready"),
            (Wait::CombineDone, "combine", "done"),
            (Wait::NodeCounts, "notify", "counts of the node"),
            (Wait::RelayedCounts, "notify", "counts that it relays"),
            (Wait::DispatchNodeReady, "dispatch", "ready of the node"),
            (Wait::DispatchArrival, "dispatch", "rows of the node"),
            (Wait::CombineNodeReady, "combine", "ready of the node"),
            (Wait::CombineArrival, "combine", "sums of the node"),
            (Wait::NotifyQueue, "notify", "the queue to it"),
            (Wait::DispatchQueue, "dispatch", "the queue to it"),
            (Wait::CombineQueue, "combine", "the queue to it"),
            (Wait::Staged, "combine", "staged rows"),
        ];
        let known = WAITS.iter().find(|(wait, ..)| *wait as u64 == code);
        let &(wait, operation, word) = known.unwrap_or(&(Wait::CombineDone, "unknown", "unknown"));
        let seen = match wait {
            Wait::DispatchReady | Wait::CombineReady | Wait::DispatchNodeReady | Wait::CombineNodeReady => {
                ready_epoch(status.seen, status.epoch)
            }
            _ => status.seen,
        };
        let call = Call::of(status.call);
        Error::PeerTimeout {
            rank,
            peer,
            operation,
            place: (call.kind != CallKind::Dispatch).then_some(call.place),
            late: late.into(),
            word,
            epoch: status.epoch,
            needed: status.needed,
            seen,
            waited: Duration::from_nanos(status.waited_ns),
            // Asked once: later calls say the same.
            beside: self.beside.get_or_init(|| self.activity.beside()).as_str().into(),
        }
    }

    /// The error of the last plan that failed, of those that no call has returned yet. For dispatches
    /// whose counts stay on the device, since others give their plan's error themselves.
    pub fn check_plans(&self) -> Result<()> {
        const RECORD: u64 = size_of::<Status>() as u64;
        let memory = &self.activity.status;
        // The device stores the count with release after the plan, and this load acquires it.
        let mut count = memory.load(RECORD)?;
        if self.told.swap(count, Ordering::Relaxed) == count {
            return Ok(());
        }
        loop {
            let index = (count - 1) % KEPT_PLANS as u64;
            let at = offset_of!(FailedPlans, plans) as u64 + index * size_of::<FailedPlan>() as u64;
            let plan: FailedPlan = memory.read(RECORD + at)?;
            // Unless others have taken its place meanwhile.
            let now = memory.load(RECORD)?;
            if now - count < KEPT_PLANS as u64 - 1 {
                return self.check_plan(&plan.header, plan.capacity);
            }
            count = now;
        }
    }

    /// The error of a plan, if it is not ready. `capacity`: rows that the dispatch had room for.
    pub fn check_plan(&self, header: &PlanHeader, capacity: u64) -> Result<()> {
        let (status, limits) = (header.status, &self.limits);
        if status == PlanStatus::Ready as u32 {
            return Ok(());
        }
        if status == PlanStatus::Slots as u32 {
            let needed = header.detail as u64;
            return Err(Error::Capacity {
                what: "wire memory",
                needed,
                have: limits.slots,
                unit: "slots for each node",
                remedy: format!(
                    "rank {} has {needed} tokens for one node: create the buffer with max_tokens_per_rank >= {needed}, and with \
                     num_rdma_bytes >= {} or none",
                    header.peer,
                    wire_bytes(&limits.shape, self.topology, needed)
                ),
                scope: Scope::EveryRank,
            });
        }
        if status == PlanStatus::Capacity as u32 {
            let needed = header.detail as u64;
            let remedy = if needed <= limits.rows {
                format!("dispatch with capacity >= {needed}, or with exact counts")
            } else if limits.by_expert {
                format!("create the buffer with rows_by_expert >= {needed}")
            } else {
                format!(
                    "create the buffer with max_tokens_per_rank >= {} or with num_nvl_bytes >= {}",
                    needed.div_ceil(self.topology.ranks() as u64),
                    pool_bytes(&limits.shape, self.topology, limits.places, needed)
                )
            };
            return Err(Error::Capacity {
                what: "receive pool",
                needed,
                have: capacity,
                unit: "rows",
                remedy: format!("rank {} would receive {needed} rows: {remedy}", header.peer),
                scope: Scope::EveryRank,
            });
        }
        if status == PlanStatus::InvalidExpert as u32 {
            return Err(Error::InvalidExpert { rank: header.peer });
        }
        if status == PlanStatus::Mismatch as u32 {
            let (what, ours, theirs) = mismatch(header);
            return Err(Error::Mismatch { rank: self.rank, peer: header.peer, what, ours, theirs });
        }
        Err(Error::StaleHandle(if status == PlanStatus::Timeout as u32 {
            "its count exchange timed out".into()
        } else {
            "its dispatch has not run yet".into()
        }))
    }
}

/// The same as [`Faults::check`], with the state of the buffer's proxies.
fn check_status(buffer: &Buffer) -> Result<()> {
    if !buffer.faults.activity.has_failed()? {
        return Ok(());
    }
    // The reason may be known: a connection that broke, say.
    if let Some(failure) = buffer.kernels.wire_side().and_then(WireSide::failure) {
        tracing::warn!(rank = buffer.rank, "{failure}");
    }
    buffer.faults.beside.get_or_init(|| beside(buffer));
    buffer.faults.check()
}

/// Other possible causes of an expired wait: other buffers, and proxies of this rank that are in a call of the system or of a
/// card's driver.
fn beside(buffer: &Buffer) -> String {
    let calls = buffer.kernels.wire_side().map_or_else(Vec::new, |side| side.proxies.in_calls());
    let calls = calls.iter().map(|call| format!("; here, {call}"));
    calls.chain([buffer.faults.activity.beside()]).collect()
}

/// The call that a ready word of the operation `epoch` names.
fn describe_call(word: u64, epoch: u64) -> String {
    let Call { kind, place, row_bytes, columns } = Call::of(word);
    let (name, of_columns) = match kind {
        CallKind::Dispatch => return "dispatch with a count exchange".into(),
        CallKind::CachedDispatch => ("cached dispatch", "(a number of dtype and scales)"),
        CallKind::CombineBf16 => ("combine of bf16 rows", "top-k weights"),
        CallKind::CombineF32 => ("combine of f32 rows", "top-k weights"),
        CallKind::CombineStagedBf16 => ("combine of a tensor of bf16 rows", "top-k weights"),
        CallKind::CombineStagedF32 => ("combine of a tensor of f32 rows", "top-k weights"),
    };
    let along = ready_plan(word, epoch);
    format!(
        "{name} in place {place} with the handle of operation {along}, {row_bytes} bytes and {columns} {of_columns} per row"
    )
}

/// The argument that differs between two ranks' signatures, and its values. Words that hold several
/// arguments are taken apart.
fn mismatch(header: &PlanHeader) -> (&'static str, String, String) {
    const ROWS: u32 = 0;
    const COLUMNS: u32 = 1;
    let (ours, theirs) = (header.ours, header.theirs);
    let whole = SIGNATURE_NAMES.get(header.detail as usize).copied().unwrap_or("an argument");
    let parts: &[(&str, u32, u32)] = match header.detail {
        ROWS => &[("bytes per row", 4, u32::MAX >> 4), ("dtype", 0, 0xf)],
        COLUMNS => {
            &[("place", 24, 0xff), ("by_expert", 23, 1), ("num_topk", 16, 0x7f), ("num_scales", 0, 0xffff)]
        }
        _ => &[],
    };
    let part = |word: u32, shift: u32, mask: u32| word >> shift & mask;
    let differs = |&&(_, shift, mask): &&(_, u32, u32)| part(ours, shift, mask) != part(theirs, shift, mask);
    let Some(&(what, shift, mask)) = parts.iter().find(differs) else {
        return (whole, ours.to_string(), theirs.to_string());
    };
    let value = |word| match (what, part(word, shift, mask)) {
        ("bytes per row", sixteenths) => (sixteenths * 16).to_string(),
        ("dtype", code) => DType::of_code(code).map_or_else(|| code.to_string(), |dtype| dtype.to_string()),
        (_, value) => value.to_string(),
    };
    (what, value(ours), value(theirs))
}

/// The host gives up after this many timeouts: work that the caller queued before, and operations that expire one after the
/// other, come first. The kernels' own deadlines end the wait long before.
const HOST_PATIENCE: u32 = 20;

impl Buffer {
    /// The error of an operation, if one has failed by now. It does not wait: synchronise the stream
    /// of operations that do not wait for the host first.
    ///
    /// # Errors
    /// Errors that end the buffer are given from then on: the first wait for a peer that expired
    /// ([`Error::PeerTimeout`]) or found the peer in another call ([`Error::OtherCall`]), and a call that
    /// failed half way ([`Error::Broken`]).
    ///
    /// A dispatch with [`Counts::OnDevice`](super::Counts::OnDevice) that moved no row gives its
    /// error once, on every rank, and the buffer goes on: [`Error::InvalidExpert`],
    /// [`Error::Capacity`] or [`Error::Mismatch`]. Where several did since the last call, the last
    /// one's is given; [`Buffer::check_dispatch`] tells of each.
    pub fn check(&self) -> Result<()> {
        self.check_usable()?;
        self.faults.check_plans()
    }

    /// Device address of the buffer's status, 8 bytes in mapped host memory: 0 until an operation fails in a
    /// way after which the buffer is of no use, some other number from then on. A kernel of the caller's own
    /// that runs behind an operation tells by it whether that operation gave results, also in a replayed graph;
    /// [`Buffer::check`] gives the error on the host.
    ///
    /// Read it with `ld.acquire.sys` of 8 bytes. The address stays valid, and the same, as long as the buffer.
    ///
    /// It stays 0 where the plan of a dispatch with [`Counts::OnDevice`](super::Counts::OnDevice) fails,
    /// which ends that dispatch alone.
    pub fn status_ptr(&self) -> DevicePtr {
        self.faults.activity.status_ptr()
    }

    /// Device address of the tokens that a combine has left without their sums, u8
    /// `[max_tokens_per_rank]` in mapped host memory: 1 for each token of which a combine that gave up
    /// may not have made the sum, 0 for the others. A kernel of the caller's own reads it behind the
    /// combine, where [`Buffer::status_ptr`] tells of a failure, also in a replayed graph.
    ///
    /// A dispatch with [`Counts::OnDevice`](super::Counts::OnDevice) whose plan fails leaves the bytes
    /// as they are: no sum of it is made.
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
        let (options, faults) = (&self.options, &self.faults);
        let timeout = options.timeout.saturating_mul(2);
        faults.activity.missing_tokens(&self.arena, options.shape.max_tokens_per_rank, timeout)
    }

    /// The error after which the buffer is of no use, if there was one.
    pub(super) fn check_usable(&self) -> Result<()> {
        check_status(self)?;
        self.sequence.check()
    }

    /// Waits until notify has answered call `tag` in mapped host memory.
    pub(super) fn wait_counts(&self, stream: &Stream, tag: u64) -> Result<PlanHeader> {
        // The tag is released after all the rest.
        let seen = || self.host_counts.load(offset_of!(PlanHeader, tag) as u64);
        let mut last_check = Instant::now();
        let limit = self.options.timeout.saturating_mul(HOST_PATIENCE);
        let answered = poll(&*self.device, limit, || {
            if seen()? == tag {
                return Ok(true);
            }
            if last_check.elapsed() > STREAM_CHECK {
                last_check = Instant::now();
                // A fault of the device ends the wait; so does a peer's silence, which the kernel records.
                let done = stream.is_done()?;
                if done && seen()? != tag {
                    check_status(self)?;
                    return Err(Error::os("notify", "the stream is done but no counts came"));
                }
            }
            Ok(false)
        })?;
        if !answered {
            check_status(self)?;
            return Err(Error::os("notify", format!("no answer of the device in {limit:?}")));
        }
        self.host_counts.read(0)
    }
}

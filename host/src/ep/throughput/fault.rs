//! Faults that only high throughput has: plans of dispatches that failed. [`Calls`] has the names
//! of its calls.

use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use epoxide_gpu::layout::{
    Call, CallKind, FailedPlan, FailedPlans, KEPT_PLANS, PlanHeader, PlanStatus, SIGNATURE_NAMES, Status,
    Wait, ready_plan,
};

use super::pool::pool_bytes;
use super::wire::wire_bytes;
use super::{Buffer, Shape};
use crate::driver::{Stream, poll};
use crate::ep::DType;
use crate::ep::core::{self, Faults, LEAST_PATIENCE};
use crate::error::{Error, Result, Scope};

/// How often a waiting host queries the stream for an error.
const STREAM_CHECK: Duration = Duration::from_millis(2);

/// The calls of this mode.
#[derive(Debug)]
pub struct Calls;

impl core::Calls for Calls {
    fn error(&self, status: &Status) -> Option<Error> {
        (status.code == Wait::MissingRows as u64).then(|| {
            let (came, given) = (status.needed, status.seen);
            let reason =
                format!("{came} rows came, and it was given {given}; combine a tensor of as many as came");
            Error::Broken { call: "combine", reason, source: None }
        })
    }

    fn name(&self, call: u64) -> (&'static str, Option<u32>) {
        let call = Call::of(call);
        let name = match call.kind {
            CallKind::Dispatch | CallKind::CachedDispatch => "dispatch",
            _ => "combine",
        };
        (name, (call.kind != CallKind::Dispatch).then_some(call.place))
    }

    fn describe(&self, word: u64, epoch: u64) -> String {
        let Call { kind, place, row_bytes, columns } = Call::of(word);
        let (name, of_columns) = match kind {
            CallKind::Dispatch => return "dispatch with a count exchange".into(),
            CallKind::CachedDispatch => ("cached dispatch", "(both are numbers of bytes, dtype and columns)"),
            CallKind::CombineBf16 => ("combine of bf16 rows", "top-k weights"),
            CallKind::CombineF16 => ("combine of f16 rows", "top-k weights"),
            CallKind::CombineF32 => ("combine of f32 rows", "top-k weights"),
            CallKind::CombineStagedBf16 => ("combine of a tensor of bf16 rows", "top-k weights"),
            CallKind::CombineStagedF32 => ("combine of a tensor of f32 rows", "top-k weights"),
        };
        let along = ready_plan(word, epoch);
        format!(
            "{name} in place {place} with the handle of operation {along}, {row_bytes} bytes and {columns} {of_columns} per row"
        )
    }
}

/// Offset of the failed plans in the memory of a buffer's faults.
const RECORD: u64 = size_of::<Status>() as u64;

/// The plans of a buffer's dispatches. Shared with handles, which outlive it.
#[derive(Debug)]
pub struct Plans {
    faults: Arc<Faults>,
    limits: Limits,
    /// Failed plans that [`Plans::check`] has returned.
    reported: AtomicU64,
}

/// Limits that the plans of a buffer's dispatches must keep.
#[derive(Debug)]
pub struct Limits {
    pub shape: Shape,
    pub places: u32,
    /// Rows that a rank can receive in one dispatch.
    pub rows: u64,
    /// Whether places have room for rows by expert.
    pub by_expert: bool,
    /// Slots of wire memory for each node; 0 with one node.
    pub slots: u64,
}

impl Plans {
    pub fn new(faults: Arc<Faults>, limits: Limits) -> Arc<Plans> {
        Arc::new(Plans { faults, limits, reported: AtomicU64::new(0) })
    }

    /// The other faults of the buffer.
    pub fn faults(&self) -> &Arc<Faults> {
        &self.faults
    }

    /// How many plans have failed so far.
    pub fn failed(&self) -> Result<u64> {
        // The device stores the count with release after the plan, and this load acquires it.
        self.faults.memory().load(RECORD)
    }

    /// The error of the last failed plan whose error no call has returned yet. For dispatches whose
    /// counts stay on the device, since others return their plan's error themselves.
    pub fn check(&self) -> Result<()> {
        let memory = self.faults.memory();
        let mut count = self.failed()?;
        if self.reported.swap(count, Ordering::Relaxed) == count {
            return Ok(());
        }
        loop {
            let index = (count - 1) % KEPT_PLANS as u64;
            let at = offset_of!(FailedPlans, plans) as u64 + index * size_of::<FailedPlan>() as u64;
            let plan: FailedPlan = memory.read(RECORD + at)?;
            // Unless others have taken its place meanwhile.
            let now = self.failed()?;
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
            let remedy = format!(
                "rank {} has {needed} tokens for one node: create the buffer with max_tokens >= {needed}, and with \
                 num_rdma_bytes >= {} or none",
                header.peer,
                wire_bytes(&limits.shape, self.faults.topology(), limits.by_expert, needed)
            );
            let what = ("wire memory", "slots for each node");
            return Err(Error::capacity(what, needed, limits.slots, remedy, Scope::EveryRank));
        }
        if status == PlanStatus::Capacity as u32 {
            let needed = header.detail as u64;
            let remedy = if needed <= limits.rows {
                format!("dispatch with capacity >= {needed}, or with exact counts")
            } else if limits.by_expert {
                let bytes = pool_bytes(&limits.shape, self.faults.topology(), limits.places, true, needed);
                format!(
                    "create the buffer with rows_by_expert >= {needed}, and num_nvl_bytes >= {bytes} or none"
                )
            } else {
                format!(
                    "create the buffer with max_tokens >= {} or with num_nvl_bytes >= {}",
                    needed.div_ceil(self.faults.topology().ranks() as u64),
                    pool_bytes(
                        &limits.shape,
                        self.faults.topology(),
                        limits.places,
                        limits.by_expert,
                        needed,
                    )
                )
            };
            let remedy = format!("rank {} would receive {needed} rows: {remedy}", header.peer);
            return Err(Error::capacity(
                ("receive pool", "rows"),
                needed,
                capacity,
                remedy,
                Scope::EveryRank,
            ));
        }
        if status == PlanStatus::InvalidExpert as u32 {
            return Err(Error::InvalidExpert { rank: header.peer });
        }
        if status == PlanStatus::Mismatch as u32 {
            let (what, ours, theirs) = mismatch(header);
            return Err(Error::Mismatch { rank: self.faults.rank(), peer: header.peer, what, ours, theirs });
        }
        Err(Error::StaleHandle(if status == PlanStatus::Timeout as u32 {
            "its count exchange timed out".into()
        } else {
            "its dispatch has not run yet".into()
        }))
    }
}

/// The argument that differs between two ranks' signatures, and its values. Words that hold several
/// arguments are taken apart.
fn mismatch(header: &PlanHeader) -> (&'static str, String, String) {
    const ROWS: u32 = 0;
    const COLUMNS: u32 = 1;
    const COLUMN_TYPES: &str = "a hash of the types and bytes of columns";
    let (ours, theirs) = (header.ours, header.theirs);
    let whole = SIGNATURE_NAMES.get(header.detail as usize).copied().unwrap_or("an argument");
    let parts: &[(&str, u32, u32)] = match header.detail {
        ROWS => &[("bytes per row", 4, 0xf_ffff), ("dtype", 0, 0xf), (COLUMN_TYPES, 24, 0xff)],
        COLUMNS => &[
            ("place", 24, 0xff),
            ("by_expert", 23, 1),
            // Before the entries, of which a dispatch without weights has none.
            ("topk_weights", 22, 1),
            ("num_topk", 16, 0x3f),
            ("num_scales", 0, 0xffff),
        ],
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
        ("topk_weights", given) => if given == 0 { "none" } else { "given" }.to_owned(),
        (_, value) => value.to_string(),
    };
    (what, value(ours), value(theirs))
}

/// The host stops waiting after this many timeouts, and not before [`LEAST_PATIENCE`], because
/// queued work and expiring operations may run first. The kernels' own deadlines end the wait long
/// before.
const HOST_PATIENCE: u32 = 20;

impl Buffer {
    /// The error of an operation, if one has failed by now. It does not wait: synchronise the
    /// stream of operations that do not wait for the host first.
    ///
    /// # Errors
    /// Errors that end the buffer are returned from then on. Such an error is the first wait for a
    /// peer that expired ([`Error::PeerTimeout`]) or found the peer in another call
    /// ([`Error::OtherCall`]). A call that ended the buffer ([`Error::Broken`]) is one as well, and
    /// so is a dropped [`Pending`](super::Pending).
    ///
    /// A dispatch with [`Counts::OnDevice`](super::Counts::OnDevice) that moved no row returns its
    /// error once, on every rank, and the buffer stays usable: [`Error::InvalidExpert`],
    /// [`Error::Capacity`] or [`Error::Mismatch`]. If several did since the last call, the last
    /// one's error is returned; [`Buffer::check_dispatch`] returns that of each dispatch.
    pub fn check(&self) -> Result<()> {
        self.core.check_between_calls()?;
        self.plans.check()
    }

    /// Waits until notify has answered call `tag` in mapped host memory. `timeout`: its longest
    /// wait for a peer, if not the buffer's.
    pub(super) fn wait_counts(
        &self,
        stream: &Stream,
        tag: u64,
        timeout: Option<Duration>,
    ) -> Result<PlanHeader> {
        // The tag is released after all the rest.
        let seen = || self.host_counts.load(offset_of!(PlanHeader, tag) as u64);
        let mut last_check = Instant::now();
        let longest = timeout.unwrap_or_default().max(self.options.timeout);
        let limit = longest.saturating_mul(HOST_PATIENCE).max(LEAST_PATIENCE);
        let answered = poll(self.core.device(), limit, || {
            if seen()? == tag {
                return Ok(true);
            }
            if last_check.elapsed() > STREAM_CHECK {
                last_check = Instant::now();
                // A fault of the device ends the wait; so does a peer's silence, which the kernel
                // records.
                let done = stream.is_done()?;
                if done && seen()? != tag {
                    self.core.faults().check()?;
                    return Err(Error::internal("notify", "the stream is done but no counts came"));
                }
            }
            Ok(false)
        })?;
        if !answered {
            self.core.faults().check()?;
            return Err(Error::timeout("notify", format!("no answer of the device in {limit:?}")));
        }
        self.host_counts.read(0)
    }
}

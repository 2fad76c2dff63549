//! Turns what kernels recorded into errors.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use epoxide_gpu::layout::{PlanHeader, PlanStatus, SIGNATURE_NAMES, Status, Wait};

use super::Buffer;
use super::pool::pool_bytes;
use crate::driver::{Memory, Stream};
use crate::error::{Error, Result};

/// How often a waiting host asks the stream whether it has failed.
const STREAM_CHECK: Duration = Duration::from_millis(2);

/// The record of the first wait that expired, if one has.
pub(super) fn check_status(memory: &Memory, rank: u32) -> Result<()> {
    // SAFETY: the memory is mapped host memory of at least a `Status`, 8-byte aligned; the device stores `code` with
    // release after the rest, and this load acquires it.
    let (code, status) = unsafe {
        let code = AtomicU64::from_ptr(memory.host_ptr().cast()).load(Ordering::Acquire);
        (code, memory.host_ptr().cast::<Status>().read_volatile())
    };
    let (operation, word) = match code {
        0 => return Ok(()),
        c if c == Wait::Counts as u64 => ("notify", "counts"),
        c if c == Wait::DispatchReady as u64 => ("dispatch", "ready"),
        c if c == Wait::DispatchDone as u64 => ("dispatch", "done"),
        c if c == Wait::CombineReady as u64 => ("combine", "ready"),
        _ => ("combine", "done"),
    };
    Err(Error::PeerTimeout {
        rank,
        peer: status.peer as u32,
        operation,
        word,
        epoch: status.epoch,
        needed: status.needed,
        seen: status.seen,
        waited: Duration::from_nanos(status.waited_ns),
    })
}

/// The error of a plan, if it is not ready. `capacity`: rows that the dispatch had room for.
pub(super) fn check_plan(header: &PlanHeader, buffer: &Buffer, capacity: u64) -> Result<()> {
    let status = header.status;
    if status == PlanStatus::Ready as u32 {
        return Ok(());
    }
    if status == PlanStatus::Capacity as u32 {
        let needed = header.detail as u64;
        let remedy = if needed <= buffer.capacity() {
            format!("dispatch with capacity >= {needed}, or with exact counts")
        } else {
            format!(
                "create the buffer with max_tokens_per_rank >= {} or with num_nvl_bytes >= {}",
                needed.div_ceil(buffer.num_ranks as u64),
                pool_bytes(&buffer.options.shape, needed)
            )
        };
        return Err(Error::Capacity {
            what: "receive pool",
            needed,
            have: capacity,
            unit: "rows",
            remedy: format!("rank {} would receive {needed} rows: {remedy}", header.peer),
        });
    }
    if status == PlanStatus::InvalidExpert as u32 {
        return Err(Error::Argument {
            argument: "topk_idx",
            value: format!("an id on rank {}", header.peer),
            rule: "every expert id must be -1 or 0 to num_experts - 1; DispatchLayout::validate on that rank names the \
                   token"
                .into(),
        });
    }
    if status == PlanStatus::Mismatch as u32 {
        let name = SIGNATURE_NAMES.get(header.detail as usize).copied().unwrap_or("an argument");
        return Err(Error::Mismatch {
            rank: buffer.rank,
            peer: header.peer,
            what: name,
            ours: header.ours.to_string(),
            theirs: header.theirs.to_string(),
        });
    }
    Err(Error::StaleHandle(if status == PlanStatus::Timeout as u32 {
        "its count exchange timed out".into()
    } else {
        "its dispatch has not run yet".into()
    }))
}

/// The host gives up after this many timeouts: work that the caller queued before, and operations that expire one after the
/// other, come first. The kernels' own deadlines end the wait long before.
const HOST_PATIENCE: u32 = 20;

impl Buffer {
    /// Waits until notify has answered call `tag` in mapped host memory.
    pub(super) fn wait_counts(&self, stream: &Stream, tag: u64) -> Result<PlanHeader> {
        // SAFETY: mapped host memory that starts with a `PlanHeader`; the tag is released after all the rest.
        let seen = || unsafe {
            AtomicU64::from_ptr(self.host_counts.host_ptr().add(std::mem::offset_of!(PlanHeader, tag)).cast())
                .load(Ordering::Acquire)
        };
        let start = Instant::now();
        let mut last_check = start;
        while seen() != tag {
            self.device.make_progress();
            if last_check.elapsed() > STREAM_CHECK {
                last_check = Instant::now();
                // A fault of the device ends the wait; so does a peer's silence, which the kernel records.
                let done = stream.is_done()?;
                if done && seen() != tag {
                    check_status(&self.status, self.rank)?;
                    return Err(Error::os("notify", "the stream is done but no counts came"));
                }
                if start.elapsed() > self.options.timeout.saturating_mul(HOST_PATIENCE) {
                    check_status(&self.status, self.rank)?;
                    return Err(Error::os(
                        "notify",
                        format!("no answer of the device in {:?}", start.elapsed()),
                    ));
                }
            }
        }
        // SAFETY: as above; the acquire of the tag orders this read after the device's writes.
        Ok(unsafe { self.host_counts.host_ptr().cast::<PlanHeader>().read_volatile() })
    }
}

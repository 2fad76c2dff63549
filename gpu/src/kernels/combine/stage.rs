//! The way into the pool for the rows that a combine will gather.
//!
//! Soundness: the kernel reads tensors of the caller that are not written meanwhile. It writes the
//! own combine rows, which no peer reads between the end of the last combine and this rank's ready
//! word for the next. Behind an expired wait a peer may still read them, and nothing is copied. A
//! row has one warp.

use crate::kernels::epoch::{aborted, current_epoch};
use crate::kernels::peer_wait::PeerWait;
use crate::kernels::segments::Segments;
use crate::layout::{Comm, ExpertStageArgs, PlanHeader, PlanStatus, StageArgs, Wait, row_stride};
use crate::simt::*;

/// Copies the caller's rows and weights into this rank's pool, where peers can gather them. One
/// warp per row.
#[kernel(threads = 512, registers = 64, dependent, block >= 32)]
pub unsafe fn stage_combine(args: StageArgs) {
    let (lane, warps) = (laneid(), ntid() / 32);
    let Some(rows) = rows_to_copy(&args) else { return };
    stride!(row in ctaid() * warps + tid() / 32..rows, nctaid() * warps => {
        if !args.x.is_null() {
            let from = args.x.row(row, args.x_stride);
            let to = args.rows.row(row, row_stride(args.row_bytes as u64));
            copy_bytes(from, to, args.row_bytes);
        }
        if !args.weights.is_null() && lane < args.num_topk {
            let entry = row_major(row, args.num_topk, lane);
            st_f32(args.weight_rows.array::<f32>().at(entry), args.weights.array::<f32>().ld(entry));
        }
    });
}

/// Copies the caller's rows by expert into this rank's pool, and no padding. One warp per row; all
/// experts' rows count through.
#[kernel(threads = 512, registers = 64, dependent, block >= 32, requires(..StageArgs(args.stage)))]
pub unsafe fn stage_by_expert(args: ExpertStageArgs) {
    let stage = &args.stage;
    if rows_to_copy(stage).is_none() || stage.x.is_null() {
        return;
    }
    let (mut number, step) = (tid() / 32 * nctaid() + ctaid(), nctaid() * (ntid() / 32));
    let mut before = 0;
    stride!(first in 0..args.local_experts as u32, 32 => {
        // Lane l has expert `first + l`.
        let expert = first + laneid();
        let is_there = (expert as u64) < args.local_experts;
        let count = ld_i32_if(is_there, args.expert_counts.array::<i32>().at(expert), 0) as u32;
        let start = ld_i32_if(is_there, args.expert_starts.array::<i32>().at(expert), 0) as u32;
        let segments = Segments::new(first, before, count);
        while number < segments.end {
            let (owner, index) = segments.find(number);
            let row = shfl_u32(start, owner) + index;
            let to = stage.rows.row(row, row_stride(stage.row_bytes as u64));
            copy_bytes(stage.x.row(row, stage.x_stride), to, stage.row_bytes);
            number += step;
        }
        before = segments.end;
    });
}

/// How many rows are to be copied; `None` where there are none: the plan has failed, the tensors
/// have fewer rows than came, or the rank has given up what the rows are for. All threads of a block
/// call it.
///
/// Where rows are missing, the rank does not enter the combine behind this kernel: peers would sum
/// the pool's old rows.
///
/// # Safety
/// The header is live, and an earlier kernel of the stream wrote it.
#[device]
unsafe fn rows_to_copy(args: &StageArgs) -> Option<u32> {
    let status = ld_u32(field!(args.header.0, PlanHeader.status));
    let (rows, given) = (rows_of_plan(args.header.0), args.num_rows as u32);
    let gave_up = (args.is_for_peers != 0) & aborted(&args.comm);
    if (status != PlanStatus::Ready as u32) | gave_up {
        return None;
    }
    if rows > given {
        let epoch = current_epoch(&args.comm);
        note_missing(&args.comm, (rows, given), epoch, epoch - 1);
        return None;
    }
    Some(rows)
}

/// How many rows came, by the plan at `header`.
///
/// # Safety
/// The header is live, and an earlier kernel of the stream wrote it.
#[device]
pub(super) unsafe fn rows_of_plan(header: u64) -> u32 {
    ld_u32(field!(header, PlanHeader.num_recv_tokens))
}

/// Records that of the rows that `came` the caller's tensors have fewer, `given`, for the combine
/// `epoch`. The rank enters no operation behind `last`. Neither it nor its peers end the combine
/// then. All threads of a block call it.
#[device]
pub(super) unsafe fn note_missing(comm: &Comm, (came, given): (u32, u32), epoch: u64, last: u64) {
    if tid() == 0 {
        let failure = PeerWait::new(comm, comm.rank, epoch, Wait::MissingRows);
        failure.record_behind(last, came as u64, given as u64);
    }
}

/// Bytes that [`copy_bytes`] has in flight at most: eight vectors in each lane.
pub(super) const IN_FLIGHT_BYTES: u32 = 8 * 512;

/// Copies so many bytes, a multiple of 16, past the L1 cache. The whole warp calls it.
///
/// # Safety
/// Both addresses are live, for so many bytes.
#[device]
pub(super) unsafe fn copy_bytes(from: u64, to: u64, bytes: u32) {
    let mut at = laneid() * 16;
    while at + 7 * 512 < bytes {
        let mut vectors = [[0; 4]; 8];
        unroll!(8, J => { vectors[J] = ld_stream_v4(from + at as u64 + J as u64 * 512) });
        unroll!(8, J => { st_v4(to + at as u64 + J as u64 * 512, vectors[J]) });
        at += IN_FLIGHT_BYTES;
    }
    if at + 3 * 512 < bytes {
        let mut vectors = [[0; 4]; 4];
        unroll!(4, J => { vectors[J] = ld_stream_v4(from + at as u64 + J as u64 * 512) });
        unroll!(4, J => { st_v4(to + at as u64 + J as u64 * 512, vectors[J]) });
        at += IN_FLIGHT_BYTES / 2;
    }
    while at < bytes {
        st_v4(to + at as u64, ld_stream_v4(from + at as u64));
        at += 512;
    }
}

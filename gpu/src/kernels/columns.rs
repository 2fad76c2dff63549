//! Columns of tokens, put together so that they travel as one, and a received column as grouped
//! GEMMs read scales.
//!
//! Soundness: the kernels read columns and records that are not written meanwhile, and each word of
//! an output has one thread. Rows that are read lie inside the pool, because the dispatch has
//! planned them so.

use crate::layout::{DevicePtr, PackArgs, PlanHeader, PlanStatus, TransposeArgs, column_stride};
use crate::simt::*;

/// Puts the columns of each token together in its record. A warp takes a token at a time, a lane
/// every 32nd word.
#[kernel(threads = 256, registers = 40, dependent)]
pub unsafe fn pack_columns(args: PackArgs) {
    let words = args.record_bytes / 4;
    let warps = ntid() / 32;
    stride!(token in ctaid() * warps + tid() / 32..args.num_tokens, nctaid() * warps => {
        let record = DevicePtr(args.records.row(token, args.record_bytes)).array::<u32>();
        stride!(word in laneid()..words, 32 => {
            st_u32(record.at(word), word_of(&args, token, word * 4));
        });
    });
}

/// The word at `at` of a token's record.
///
/// # Safety
/// The token's columns are live.
#[device]
unsafe fn word_of(args: &PackArgs, token: u32, at: u32) -> u32 {
    let of = |column: DevicePtr, bytes| (column.row(token, bytes), bytes);
    // A column without bytes is skipped with the next one, if there is one.
    let place = (of(args.column_0, args.bytes_0), at);
    let place = behind(place, of(args.column_1, args.bytes_1));
    let place = behind(place, of(args.column_2, args.bytes_2));
    let ((column, bytes), at) = behind(place, of(args.column_3, args.bytes_3));
    let from = column + at as u64;
    let left = bytes.saturating_sub(at);
    if left >= 4 && from.is_multiple_of(4) {
        return ld_u32(from);
    }
    let mut word = 0;
    unroll!(4, BYTE => {
        word |= ld_u8_if((BYTE as u32) < left, from + BYTE as u64) << (8 * BYTE);
    });
    word
}

/// The next column, as its address and bytes, where `at` lies behind this one; and where `at` is in it.
#[device]
fn behind((column, at): ((u64, u32), u32), next: (u64, u32)) -> ((u64, u32), u32) {
    let stride = column_stride(column.1);
    if at >= stride { (next, at - stride) } else { (column, at) }
}

/// Writes the words of a column of received rows with the rows side by side. A warp takes 32 rows at
/// a time, a lane each; padding of rows by expert stays as it is.
#[kernel(threads = 256, registers = 40, dependent)]
pub unsafe fn transpose_column(args: TransposeArgs) {
    if ld_u32(field!(args.header.0, PlanHeader.status)) != PlanStatus::Ready as u32 {
        return;
    }
    let came = ld_u32(field!(args.header.0, PlanHeader.num_recv_tokens));
    let (rows, warps) = (came.min(args.num_rows), ntid() / 32);
    stride!(turn in ctaid() * warps + tid() / 32..rows.div_ceil(32), nctaid() * warps => {
        let row = turn * 32 + laneid();
        if row < rows && has_token(&args, row) {
            let from = Global::<u32>::new(args.words.row(row, args.record_bytes));
            let to = args.out.skip(row);
            stride!(word in 0..args.num_words, 4 => {
                // Four loads are in flight together.
                let mut words = [0; 4];
                unroll!(4, J => {
                    if word + (J as u32) < args.num_words {
                        words[J] = from.ld(word + J as u32);
                    }
                });
                unroll!(4, J => {
                    if word + (J as u32) < args.num_words {
                        to.st(row_major(word + J as u32, args.out_stride, 0), words[J]);
                    }
                });
            });
        }
    });
}

/// Whether a row is that of a token, and no padding.
///
/// # Safety
/// The tables of experts are live, or null.
#[device]
unsafe fn has_token(args: &TransposeArgs, row: u32) -> bool {
    if args.expert_starts.is_null() {
        return true;
    }
    // The last expert whose segment begins at the row or in front of it: those behind it begin
    // later, and those in front of it end in front of the row.
    let (mut expert, mut end) = (0, args.local_experts);
    while expert + 1 < end {
        let middle = expert + (end - expert) / 2;
        if args.expert_starts.ld(middle) <= row {
            expert = middle;
        } else {
            end = middle;
        }
    }
    row.wrapping_sub(args.expert_starts.ld(expert)) < args.expert_counts.ld(expert)
}

//! The expert-major copy of the columns of received rows, beside that of the rows: the words of each
//! expert's rows together.
//!
//! Soundness: words and tables are as the dispatch left them, and are not written while this kernel
//! runs. A word of the copy has one writer, a lane. Counts and rows are checked before use, because
//! the caller's code could have written to them.

use crate::layout::LowLatencyGatherColumnsArgs;
use crate::simt::*;

/// Words of a row that a lane copies: as many loads are in flight together.
const WORDS: usize = 4;

/// Copies the words of each local expert's rows, a row to a lane. A warp takes some lines of an
/// expert at a time, so that the lanes read and write along a line.
#[kernel(threads = 256, registers = 64, dependent, block >= 32)]
pub unsafe fn low_latency_gather_columns(args: LowLatencyGatherColumnsArgs) {
    let groups = args.num_words.div_ceil(WORDS as u32);
    assume(groups >= 1);
    let (lane, warps) = (laneid(), ntid() / 32);
    stride!(number in tid() / 32 * nctaid() + ctaid()..args.local_experts * groups, nctaid() * warps => {
        let (expert, first) = (number / groups, number % groups * WORDS as u32);
        let count = args.expert_counts.ld(expert).min(args.rows);
        stride!(index in lane..count, 32 => {
            let row = args.expert_rows.ld(row_major(expert, args.rows, index));
            if row < args.rows {
                copy_words(&args, expert * args.num_words, first, row, index);
            }
        });
    });
}

/// Copies some words of a row from `first` on, to place `index` of the lines from `lines` on.
///
/// # Safety
/// The row is one of those received, and the place one of the expert's.
#[device]
unsafe fn copy_words(args: &LowLatencyGatherColumnsArgs, lines: u32, first: u32, row: u32, index: u32) {
    let last = args.num_words - 1;
    let mut words = [0; WORDS];
    // The loads have no condition, so that all are in flight together.
    unroll!(4, J => {
        let word = (first + J as u32).min(last);
        words[J] = args.recv_columns.ld(row_major(word, args.rows, row));
    });
    unroll!(4, J => {
        let word = first + J as u32;
        if word <= last {
            args.columns.st(row_major(lines + word, args.rows, index), words[J]);
        }
    });
}

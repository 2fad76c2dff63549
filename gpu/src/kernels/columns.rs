//! Columns of tokens, put together so that they travel as one.
//!
//! Soundness: the kernel reads columns that are not written meanwhile, and each word of a record
//! has one thread.

use crate::layout::{DevicePtr, PackArgs, column_stride};
use crate::simt::*;

/// Puts the columns of each token together in its record. A warp takes a token at a time, a lane
/// every 32nd word.
#[kernel(threads = 256, registers = 40, dependent)]
pub unsafe fn pack_columns(args: PackArgs) {
    let words = args.record_bytes / 4;
    let warps = ntid() / 32;
    stride!(token in ctaid() * warps + tid() / 32..args.num_tokens, nctaid() * warps => {
        let record = args.records.0 + token as u64 * args.record_bytes as u64;
        stride!(word in laneid()..words, 32 => {
            st_u32(record + word as u64 * 4, word_of(&args, token, word * 4));
        });
    });
}

/// The word at `at` of a token's record.
///
/// # Safety
/// The token's columns are live.
#[device]
unsafe fn word_of(args: &PackArgs, token: u32, at: u32) -> u32 {
    let (mut column, mut bytes, mut at) = (args.column_0, args.bytes_0, at);
    let mut skip = |next: DevicePtr, next_bytes: u32| {
        if at >= column_stride(bytes) {
            at -= column_stride(bytes);
            (column, bytes) = (next, next_bytes);
        }
    };
    // A column without bytes is skipped with the next one, if there is one.
    skip(args.column_1, args.bytes_1);
    skip(args.column_2, args.bytes_2);
    skip(args.column_3, args.bytes_3);
    let from = column.0 + token as u64 * bytes as u64 + at as u64;
    let left = bytes.saturating_sub(at);
    if left >= 4 && from % 4 == 0 {
        return ld_u32(from);
    }
    let mut word = 0;
    unroll!(4, BYTE => {
        word |= ld_u8_if((BYTE as u32) < left, from + BYTE as u64) << (8 * BYTE);
    });
    word
}

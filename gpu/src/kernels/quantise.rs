//! Rows of BF16 as e4m3 with scales, in front of a high-throughput dispatch, which moves them as
//! rows that were e4m3 already.
//!
//! Soundness: the kernel reads rows that are not written meanwhile. Each 16 bytes of a quantised
//! row and each word of scales have one thread. Collectives stand where all lanes of a warp arrive.

use super::fp8::{LANES_PER_SCALE, from_bf16, mx_quantised, quantised};
use crate::layout::{QUANTISED_AT_ONCE, Quantise, QuantiseArgs, SCALE_BLOCK};
use crate::simt::*;

/// Blocks of 128 elements that a warp has at a time; each lane has 16 elements of a block.
const BLOCKS: u32 = 32 / LANES_PER_SCALE;
/// Times that a warp loads so many, before it converts the first ones.
const AT_ONCE: usize = (QUANTISED_AT_ONCE / BLOCKS) as usize;

// `unroll!(4, ..)` covers all of them.
const _: () = assert!(AT_ONCE == 4);

/// Quantises a batch of rows, and makes their scales.
#[kernel(threads = 512, registers = 96, dependent, block >= 32)]
pub unsafe fn quantise_rows(args: QuantiseArgs) {
    if args.quantise == Quantise::Mxfp8 as u32 {
        quantise::<true>(&args);
    } else {
        quantise::<false>(&args);
    }
}

/// `MX`: as MXFP8.
#[device]
unsafe fn quantise<const MX: bool>(args: &QuantiseArgs) {
    // The last block of a row may have fewer elements.
    let of_row = args.hidden.div_ceil(SCALE_BLOCK);
    // SAFETY: a row has elements, by the contract, which libNVVM does not follow so far.
    assume(of_row >= 1);
    let (blocks, warps) = (args.num_tokens * of_row, ntid() / 32);
    let (warp, turn) = (ctaid() * warps + tid() / 32, QUANTISED_AT_ONCE);
    stride!(first in warp * turn..blocks, nctaid() * warps * turn => {
        let block = |number: usize| first + number as u32 * BLOCKS + laneid() / LANES_PER_SCALE;
        let mut is_there = [false; AT_ONCE];
        let mut elements = [0u64; AT_ONCE];
        let mut pairs = [([0; 4], [0; 4]); AT_ONCE];
        unroll!(4, J => {
            let at = block(J) % of_row * SCALE_BLOCK + laneid() % LANES_PER_SCALE * 16;
            is_there[J] = (block(J) < blocks) & (at < args.hidden);
            elements[J] = row_major(block(J) / of_row, args.hidden, at);
            let from = args.x.0 + elements[J] * 2;
            pairs[J] = (ld_stream_v4_if(is_there[J], from), ld_stream_v4_if(is_there[J], from + 16));
        });
        unroll!(4, J => {
            let numbers = [from_bf16(pairs[J].0), from_bf16(pairs[J].1)];
            let (vector, scale) =
                if MX { mx_quantised(&numbers) } else { quantised(&numbers, args.quantise) };
            if is_there[J] {
                st_v4(args.rows.0 + elements[J], vector);
                if laneid().is_multiple_of(LANES_PER_SCALE) {
                    st_f32(args.scales.array::<f32>().at(block(J)), scale);
                }
            }
        });
    });
}

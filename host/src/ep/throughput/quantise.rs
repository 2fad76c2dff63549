//! Rows of a dispatch as its kernels read them: the caller's rows, or e4m3 rows that an earlier
//! kernel makes of them.

use std::sync::Arc;

use epoxide_gpu::layout::{DevicePtr, QUANTISED_AT_ONCE, QuantiseArgs, SCALE_BLOCK};

use super::Buffer;
use super::dispatch::Checked;
use crate::driver::Stream;
use crate::ep::Quantise;
use crate::ep::core::{Block, Choice, Pieces};
use crate::ep::payload::Records;
use crate::ep::tensor::Owner;
use crate::error::Result;

/// Threads per block of the kernel that quantises rows.
const THREADS: u32 = 512;
/// Blocks of the kernel for each multiprocessor that moves rows: few multiprocessors fill the
/// links, and do not suffice for the conversion.
const BLOCKS_PER_SM: u32 = 4;

/// Memory for quantised rows and their scales. Operations of a buffer follow each other on the
/// device, so that one is enough for all of them.
#[derive(Debug)]
pub struct Scratch {
    block: Arc<Block>,
    rows: DevicePtr,
    scales: DevicePtr,
    /// Most bytes of a row, and words of its scales.
    row_bytes: u32,
    num_scales: u32,
}

/// Bytes of the memory for quantised rows of any kind.
pub fn scratch_bytes(max_tokens: u32, hidden: u64) -> u64 {
    let mut pieces = Pieces::default();
    lay_out(&mut pieces, max_tokens, hidden, hidden.div_ceil(SCALE_BLOCK.into()));
    pieces.bytes()
}

/// Rows and words of scales.
fn lay_out(pieces: &mut Pieces, max_tokens: u32, row_bytes: u64, num_scales: u64) -> [DevicePtr; 2] {
    let rows = pieces.array("quantised rows", max_tokens.into(), row_bytes);
    [rows, pieces.array("scales of quantised rows", max_tokens.into(), num_scales * 4)]
}

/// The addresses of a dispatch's rows and their records.
#[derive(Debug)]
pub struct Source {
    pub x: DevicePtr,
    pub records: Records,
    /// Arguments of the kernel that makes them there, and their memory.
    quantised: Option<(QuantiseArgs, Owner)>,
}

impl Buffer {
    /// The rows of a payload, existing or to be made.
    pub(super) fn source(&mut self, payload: &Checked, num_tokens: u32) -> Result<Source> {
        if payload.quantise == Quantise::None {
            let records = payload.record.place(self.core.arena(), num_tokens)?;
            return Ok(Source { x: payload.x, records, quantised: None });
        }
        let (row_bytes, num_scales) = (payload.row_bytes, payload.num_scales());
        let fits = |it: &&Scratch| it.row_bytes >= row_bytes && it.num_scales >= num_scales;
        let scratch = match self.scratch.as_ref().filter(fits) {
            Some(scratch) => scratch,
            None => {
                let max_tokens = self.options.shape.max_tokens;
                let parts =
                    |pieces: &mut Pieces| lay_out(pieces, max_tokens, row_bytes.into(), num_scales.into());
                let (block, [rows, scales]) = self.core.arena().take(parts)?;
                self.scratch.insert(Scratch { block, rows, scales, row_bytes, num_scales })
            }
        };
        let args = QuantiseArgs {
            x: payload.x,
            rows: scratch.rows,
            scales: scratch.scales,
            hidden: row_bytes,
            num_tokens,
            quantise: payload.quantise as u32,
            reserved: 0,
        };
        let quantised = Some((args, scratch.block.clone() as Owner));
        Ok(Source { x: scratch.rows, records: Records::at(scratch.scales), quantised })
    }
}

impl Source {
    /// The memory that is not the caller's.
    pub fn owners(&self) -> impl Iterator<Item = Owner> {
        let scratch = self.quantised.as_ref().map(|(_, block)| block.clone());
        self.records.owner().into_iter().chain(scratch)
    }

    /// Enqueues the kernel that quantises the rows, if requested.
    ///
    /// # Safety
    /// The rows that were given are live until the stream has passed the kernel, and no other
    /// operation of the buffer runs meanwhile: they share its scratch.
    pub unsafe fn quantise(
        &self,
        stream: &Stream,
        kernel: &Choice<QuantiseArgs>,
        num_sms: u32,
    ) -> Result<()> {
        let Some((args, _)) = self.quantised else { return Ok(()) };
        let blocks = u64::from(args.num_tokens) * u64::from(args.hidden.div_ceil(SCALE_BLOCK));
        let work = blocks.div_ceil(u64::from(QUANTISED_AT_ONCE * THREADS / 32));
        let grid = work.clamp(1, u64::from(BLOCKS_PER_SM * num_sms)) as u32;
        // SAFETY: the caller keeps the rows; the scratch has room for all tokens of a call.
        unsafe { kernel.call(stream, grid, THREADS, 0, args) }
    }
}

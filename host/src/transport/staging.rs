//! Pinned host memory that bytes pass through on their way to or from a GPU, on a stream of its own.

use std::sync::Arc;
use std::time::Instant;

use super::{Interrupt, Place};
use crate::driver::{Device, DevicePtr, Event, Memory, MemoryKind, Stream};
use crate::error::Result;

/// Pieces of pinned memory, each with an event that says when the stream is through with it.
#[derive(Debug)]
pub(super) struct Staging {
    stream: Stream,
    pieces: Vec<Piece>,
    piece_bytes: u64,
    memory: Memory,
}

#[derive(Debug)]
struct Piece {
    event: Event,
    /// The stream may still use the piece.
    busy: bool,
}

impl Staging {
    pub(super) fn new(device: &Arc<dyn Device>, pieces: usize, piece_bytes: u64) -> Result<Staging> {
        let memory =
            Memory::alloc(device, pieces as u64 * piece_bytes, MemoryKind::MappedHost, "transport staging")?;
        let piece = |_| Ok(Piece { event: Event::new(device, false)?, busy: false });
        let pieces = (0..pieces).map(piece).collect::<Result<_>>()?;
        Ok(Staging { stream: Stream::new(device, true)?, pieces, piece_bytes, memory })
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(super) fn pieces(&self) -> usize {
        self.pieces.len()
    }

    pub(super) fn piece_bytes(&self) -> u64 {
        self.piece_bytes
    }

    /// Host and device address of a piece. `index` is below [`Staging::pieces`].
    pub(super) fn piece(&self, index: usize) -> (*mut u8, DevicePtr) {
        let offset = index as u64 * self.piece_bytes;
        debug_assert!(index < self.pieces.len());
        (self.memory.host_ptr().wrapping_add(offset as usize), DevicePtr(self.memory.ptr().0 + offset))
    }

    /// Says that all copies of this piece have been enqueued.
    pub(super) fn enqueued(&mut self, index: usize) -> Result<()> {
        let piece = &mut self.pieces[index];
        // Before the record: if that fails, a copy may still be under way.
        piece.busy = true;
        piece.event.record(&self.stream)
    }

    /// Whether the stream is through with the piece.
    pub(super) fn is_free(&mut self, index: usize) -> Result<bool> {
        let piece = &mut self.pieces[index];
        piece.busy = piece.busy && !piece.event.is_done()?;
        Ok(!piece.busy)
    }

    /// Waits until the stream is through with the piece.
    pub(super) fn wait(
        &mut self,
        index: usize,
        deadline: Instant,
        interrupt: &Interrupt,
        place: Place,
        operation: &'static str,
    ) -> Result<()> {
        while !self.is_free(index)? {
            if interrupt.is_raised() {
                return Err(place.error(operation, "interrupted: this rank closes the link"));
            }
            if Instant::now() >= deadline {
                return Err(place.error(operation, "a copy on this rank's device did not end in time"));
            }
            self.stream.device().make_progress();
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // The memory, and what copies go to, are freed next. A device that faulted runs no copies any more.
        if let Err(error) = self.stream.synchronize() {
            tracing::warn!("transport staging: {error}");
        }
    }
}

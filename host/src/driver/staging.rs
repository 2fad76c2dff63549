//! The page-locked memory that host data passes through.

use std::sync::Mutex;

use super::raw::RawMemory;

use crate::lock::lock;

/// Bytes of a piece.
pub(super) const PIECE_BYTES: u64 = 4 << 20;

/// Pieces of page-locked memory that are free. They are kept as long as the device, because a free
/// waits for running kernels. Their number is the largest number of threads that ever copied at the
/// same time.
#[derive(Debug, Default)]
pub struct Staging {
    free: Mutex<Vec<Piece>>,
}

#[derive(Debug)]
pub(super) struct Piece(pub(super) RawMemory);

// SAFETY: an address range without thread affinity; a piece is in the hands of one thread at a
// time.
unsafe impl Send for Piece {}

impl Staging {
    /// A free piece, if there is one. It is the caller's alone until it is given back.
    pub(super) fn take(&self) -> Option<Piece> {
        lock(&self.free).pop()
    }

    /// A piece that nothing uses any more.
    pub(super) fn give_back(&self, piece: Piece) {
        lock(&self.free).push(piece);
    }

    /// The free pieces, for a device that goes and has to give them back one by one.
    #[cfg(feature = "cuda")]
    pub(super) fn drain(&mut self) -> Vec<RawMemory> {
        lock(&self.free).drain(..).map(|piece| piece.0).collect()
    }
}

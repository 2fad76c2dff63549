//! Device memory that is handed out again: outputs and handles of repeated operations do not allocate.

use std::sync::{Arc, Mutex};

use epoxide_gpu::layout::Section;

use crate::driver::{Device, DevicePtr, Memory, MemoryKind};
use crate::error::Result;

/// Blocks that are free. A block goes back when its last owner drops it; since all operations of a buffer are ordered
/// one after the other, the next operation that gets it runs after the last one that used it.
#[derive(Debug)]
pub(super) struct Arena {
    device: Arc<dyn Device>,
    free: Mutex<Vec<Memory>>,
}

/// A block on loan.
#[derive(Debug)]
pub(super) struct Block {
    memory: Option<Memory>,
    ptr: DevicePtr,
    home: Arc<Arena>,
}

/// The pieces of a block and where each starts, 128-byte aligned.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    sections: Vec<Section>,
    bytes: u64,
}

impl Pieces {
    /// Reserves room for `piece` and returns its offset.
    pub fn push(&mut self, piece: Section) -> u64 {
        let offset = self.bytes;
        self.bytes = (offset + piece.bytes).next_multiple_of(128);
        self.sections.push(piece.at(offset));
        offset
    }

    /// Bytes of all pieces.
    fn bytes(&self) -> u64 {
        self.bytes.max(128)
    }
}

impl Arena {
    pub fn new(device: &Arc<dyn Device>) -> Arc<Arena> {
        Arc::new(Arena { device: device.clone(), free: Mutex::default() })
    }

    /// A block for `pieces`: the smallest free one that fits and is not more than four times too large.
    pub fn take(self: &Arc<Self>, pieces: &Pieces) -> Result<Block> {
        let bytes = pieces.bytes();
        let mut free = self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let best = (0..free.len())
            .filter(|&i| (bytes..=bytes * 4).contains(&free[i].bytes()))
            .min_by_key(|&i| free[i].bytes());
        let memory = match best {
            Some(i) => free.swap_remove(i),
            None => Memory::alloc(&self.device, bytes, MemoryKind::Device, "operation outputs")?,
        };
        memory.describe(&pieces.sections);
        Ok(Block { ptr: memory.ptr(), memory: Some(memory), home: self.clone() })
    }
}

impl Block {
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut free = self.home.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        free.extend(self.memory.take());
    }
}

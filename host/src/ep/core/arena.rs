//! Device memory for reuse: outputs and handles of repeated operations do not allocate.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use epoxide_gpu::layout::{ROW_ALIGN, Section};

use crate::driver::{Device, DevicePtr, Event, Fence, Memory, MemoryKind, Stream};
use crate::ep::tensor::Owns;
use crate::error::{Error, Result};
use crate::lock::lock;

/// Blocks that are free. A block is freed when its last owner drops it. Streams may still use it
/// then. Its next user therefore runs behind all work that had been enqueued by then.
#[derive(Debug)]
pub struct Arena {
    device: Device,
    state: Mutex<ArenaState>,
}

#[derive(Debug, Default)]
struct ArenaState {
    /// In the order in which they were freed, each with the fence that its next user must wait for.
    free: VecDeque<(Memory, Fence)>,
    /// Fences that the next enqueued operation must wait for, since it has taken blocks.
    before_next: Vec<Fence>,
    spare_events: Vec<Event>,
}

/// A block on loan.
#[derive(Debug)]
pub struct Block {
    memory: Option<Memory>,
    ptr: DevicePtr,
    home: Arc<Arena>,
}

impl Owns for Block {
    fn device(&self) -> &Device {
        &self.home.device
    }

    fn arena(&self) -> Option<&Arc<Arena>> {
        Some(&self.home)
    }
}

/// Offsets of regions that follow each other, 128-byte aligned.
#[derive(Debug, Default)]
pub struct Offsets(u64);

impl Offsets {
    /// Reserves `bytes` and returns their offset.
    pub fn take(&mut self, bytes: u64) -> u64 {
        let offset = self.0;
        self.0 = (offset + bytes).next_multiple_of(ROW_ALIGN);
        offset
    }
}

/// Regions of memory that follow each other, 128-byte aligned, and where each starts.
#[derive(Debug, Default)]
pub struct Pieces {
    base: DevicePtr,
    sections: Vec<Section>,
    offsets: Offsets,
}

impl Pieces {
    /// Reserves room for `piece` and returns its address; its offset, as long as there is no
    /// memory.
    pub fn push(&mut self, piece: Section) -> DevicePtr {
        let offset = self.offsets.take(piece.bytes);
        self.sections.push(piece.at(offset));
        self.base.add(offset)
    }

    /// Reserves room for `count` elements, `stride` bytes apart.
    pub fn array(&mut self, name: &'static str, count: u64, stride: u64) -> DevicePtr {
        self.push(Section::array(name, count, stride))
    }

    /// The pieces.
    pub fn sections(&self) -> &[Section] {
        &self.sections
    }

    /// Bytes of all pieces.
    pub fn bytes(&self) -> u64 {
        self.offsets.0.max(ROW_ALIGN)
    }
}

/// Memory of `alloc` for the pieces that `lay_out` reserves. It runs at address 0 first, to compute
/// the size, and then at the memory's.
fn lay_out<T>(
    alloc: impl FnOnce(u64) -> Result<Memory>,
    lay_out: impl Fn(&mut Pieces) -> T,
) -> Result<(Memory, T)> {
    let mut pieces = Pieces::default();
    lay_out(&mut pieces);
    let memory = alloc(pieces.bytes())?;
    pieces = Pieces { base: memory.ptr(), ..Pieces::default() };
    let parts = lay_out(&mut pieces);
    memory.describe(pieces.sections());
    Ok((memory, parts))
}

/// Device memory for the pieces that `parts` reserves, and its result with their addresses.
pub fn laid_out<T>(device: &Device, label: &str, parts: impl Fn(&mut Pieces) -> T) -> Result<(Memory, T)> {
    lay_out(|bytes| Memory::alloc(device, bytes, MemoryKind::Device, label), parts)
}

impl Arena {
    pub fn new(device: &Device) -> Arc<Arena> {
        Arc::new(Arena { device: device.clone(), state: Mutex::default() })
    }

    /// A block for the pieces that `parts` reserves, and its result with their addresses. The
    /// operation that uses the block calls [`Arena::order_before`].
    pub fn take<T>(self: &Arc<Self>, parts: impl Fn(&mut Pieces) -> T) -> Result<(Arc<Block>, T)> {
        let (memory, parts) = lay_out(|bytes| self.memory(bytes), parts)?;
        Ok((Arc::new(Block { ptr: memory.ptr(), memory: Some(memory), home: self.clone() }), parts))
    }

    /// The smallest free memory that has `bytes` and is at most four times too large. Among equal
    /// sizes it is the one that was freed first. Where none fits, new memory takes the place of the
    /// largest that is too small by less than four times: batches that grow by and by would
    /// otherwise leave one of each size.
    fn memory(&self, bytes: u64) -> Result<Memory> {
        let state = &mut *lock(&self.state);
        let free = state.free.iter().map(|(memory, _)| memory.bytes()).enumerate();
        let fits = free.clone().filter(|(_, have)| (bytes..=bytes.saturating_mul(4)).contains(have));
        let fits = fits.min_by_key(|(_, have)| *have).map(|(at, _)| at);
        let outgrown = free.filter(|(_, have)| (bytes / 4..bytes).contains(have));
        let outgrown = outgrown.max_by_key(|(_, have)| *have).map(|(at, _)| at);
        if let Some((memory, behind)) = fits.and_then(|at| state.free.remove(at)) {
            state.before_next.push(behind);
            return Ok(memory);
        }
        // The memory is freed behind all streams.
        if let Some((_, behind)) = outgrown.and_then(|at| state.free.remove(at)) {
            behind.into_spare(&mut state.spare_events);
        }
        Memory::alloc(&self.device, bytes, MemoryKind::Device, "operation outputs")
    }

    /// Makes `stream` wait for the last users of the blocks that were taken for its next operation.
    pub fn order_before(&self, stream: &Stream) -> Result<()> {
        let state = &mut *lock(&self.state);
        while let Some(fence) = state.before_next.pop() {
            if let Err(error) = fence.order_before(stream) {
                state.before_next.push(fence);
                return Err(error);
            }
            fence.into_spare(&mut state.spare_events);
        }
        Ok(())
    }

    /// Waits for the last users of the blocks that were taken for the next operation, which is only
    /// recorded: a stream under capture cannot wait for them.
    pub fn wait_before(&self, timeout: Duration) -> Result<()> {
        // Results that are dropped meanwhile must not wait for this.
        let mut fences = std::mem::take(&mut lock(&self.state).before_next);
        let ended = Fence::wait_all(&fences, timeout);
        if !matches!(ended, Ok(true)) {
            // The blocks may be in use still: the next operation waits for these fences.
            lock(&self.state).before_next.append(&mut fences);
            ended?;
            let reason = format!("work before it has not ended in {timeout:?}");
            return Err(Error::timeout("capture", reason));
        }
        fences.into_iter().for_each(|fence| self.give_back(fence));
        Ok(())
    }

    /// A fence behind all work enqueued on the device's streams so far.
    pub fn fence(&self) -> Result<Fence> {
        let mut spare = std::mem::take(&mut lock(&self.state).spare_events);
        let fence = Fence::new(&self.device, &mut spare);
        lock(&self.state).spare_events.append(&mut spare);
        fence
    }

    /// Waits for all work enqueued on the device's streams so far; false where it has not ended in
    /// time.
    pub fn wait_all(&self, timeout: Duration) -> Result<bool> {
        let fence = self.fence()?;
        let outcome = fence.wait_timeout(timeout);
        self.give_back(fence);
        outcome
    }

    /// Takes the events of a fence back once no stream waits for it.
    pub fn give_back(&self, fence: Fence) {
        fence.into_spare(&mut lock(&self.state).spare_events);
    }
}

impl Block {
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        match self.home.fence() {
            Ok(fence) => lock(&self.home.state).free.push_back((memory, fence)),
            // The device cannot be used any more; the driver frees the memory behind its streams.
            Err(error) => tracing::debug!("a block is not used again: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::driver::virt::tests::PTX;
    use crate::driver::virt::{VirtConfig, VirtualGpu};
    use crate::driver::{LaunchConfig, Module};
    use crate::virtual_time::VirtualTime;

    const ONE_THREAD: LaunchConfig =
        LaunchConfig { grid: 1, block: 1, shared_bytes: 0, cooperative: false, dependent: false };

    /// Ends the kernel, also where the test fails.
    struct Ends(Memory);

    impl Drop for Ends {
        fn drop(&mut self) {
            // SAFETY: the first 4 bytes of aligned mapped memory, which only atomics of host and device
            // touch.
            unsafe { AtomicU32::from_ptr(self.0.host_ptr().cast()) }.store(1, Ordering::Release);
        }
    }

    /// An operation that could not be ordered behind the last users of its blocks leaves their
    /// fences to the next one.
    #[test]
    fn an_order_that_fails_is_made_by_the_next_operation() {
        let device = VirtualGpu::new(VirtConfig::default());
        let [reader, recorded, next] = [(); 3].map(|()| Stream::new(&device).unwrap());
        let arena = Arena::new(&device);
        let take = || arena.take(|pieces| pieces.array("rows", 1, 128)).unwrap().0;
        let kernel = Module::load(&device, PTX).unwrap().kernel("wait", 0).unwrap();
        let ends = Ends(Memory::alloc(&device, 4, MemoryKind::MappedHost, "word").unwrap());
        let blocks = [take(), take()];
        let params: [&[u8]; 2] = [&ends.0.ptr().0.to_le_bytes(), &1u32.to_le_bytes()];
        // SAFETY: the kernel takes the address of a word that is freed behind it, and its value.
        unsafe { reader.launch(&kernel, &ONE_THREAD, &params) }.unwrap();
        drop(blocks);
        let blocks = [take(), take()];

        let has_ended = || {
            arena.order_before(&next).unwrap();
            next.is_done().unwrap()
        };
        let error = arena.wait_before(Duration::ZERO).unwrap_err();
        assert!(error.to_string().contains("has not ended"), "{error}");
        // A stream under capture cannot wait for work outside of it.
        recorded.capture(|| arena.order_before(&recorded)).unwrap_err();
        assert_eq!(lock(&arena.state).before_next.len(), 2);
        assert!(!has_ended());
        drop(ends);
        next.synchronize().unwrap();
        assert!(has_ended());
        drop(blocks);
    }

    #[test]
    fn a_recorded_operation_waits_for_all_its_blocks_by_one_deadline() {
        let time = VirtualTime::new().unwrap();
        let _member = time.join();
        let device = VirtualGpu::new(VirtConfig::default());
        let arena = Arena::new(&device);
        // No block fits the size of another one.
        let take = |number: u32| arena.take(|pieces| pieces.array("rows", 8u64.pow(number), 128)).unwrap().0;
        let kernel = Module::load(&device, PTX).unwrap().kernel("wait_or_expire", 0).unwrap();
        let ends = Ends(Memory::alloc(&device, 8, MemoryKind::MappedHost, "word").unwrap());
        let blocks: Vec<_> = (0..6).map(take).collect();
        // The last user of block `n` ends after `n + 1` seconds.
        let readers: Vec<_> = (1u64..)
            .zip(blocks)
            .map(|(seconds, block)| {
                let (reader, ns) = (Stream::new(&device).unwrap(), seconds * 1_000_000_000);
                let (word, out) = (ends.0.ptr(), ends.0.ptr().add(4));
                let params: [&[u8]; 4] =
                    [&word.0.to_le_bytes(), &1u32.to_le_bytes(), &out.0.to_le_bytes(), &ns.to_le_bytes()];
                // SAFETY: the kernel takes the addresses of two words that are freed behind it, and
                // numbers.
                unsafe { reader.launch(&kernel, &ONE_THREAD, &params) }.unwrap();
                drop(block);
                reader
            })
            .collect();
        let blocks: Vec<_> = (0..6).rev().map(take).collect();
        let error = arena.wait_before(Duration::from_secs(3)).unwrap_err();
        assert!(error.to_string().contains("has not ended in 3s"), "{error}");
        arena.wait_before(Duration::from_secs(600)).unwrap();
        assert!(readers.iter().all(|reader| reader.is_done().unwrap()));
        drop(blocks);
    }

    #[test]
    fn batches_that_grow_leave_no_block_of_each_size() {
        const ROW: u64 = 1 << 14;
        let device = VirtualGpu::new(VirtConfig::default());
        let stream = Stream::new(&device).unwrap();
        let arena = Arena::new(&device);
        let free = || device.free_memory().unwrap();
        let before = free();
        for rows in 1..=200 {
            let (block, _) = arena.take(|pieces| pieces.array("rows", rows, ROW)).unwrap();
            arena.order_before(&stream).unwrap();
            drop(block);
        }
        stream.synchronize().unwrap();
        let kept = before - free();
        assert!((200 * ROW..2 * 200 * ROW).contains(&kept), "{kept} bytes");
    }
}

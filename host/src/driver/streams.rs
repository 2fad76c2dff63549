//! The list of a device's streams, and fences: points behind all that they have been given.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use super::device::Device;
use super::owned::{Event, Module, Stream};
use crate::error::Result;
use crate::lock::lock;

/// The streams of a device that have an owner ([`Stream`](super::Stream)).
#[derive(Debug, Default)]
pub struct Streams {
    list: Mutex<List>,
    /// The modules that captures under way have recorded kernels of, one list a capture of this
    /// library. Behind its own lock, under which no driver call is made.
    recorded: Mutex<Vec<Recorded>>,
    /// Whether a wait for work of the device was given up. The work may still run.
    given_up: AtomicBool,
}

/// The modules that a capture under way has recorded kernels of.
#[derive(Debug)]
struct Recorded {
    /// Id and handle of the stream that began the capture.
    stream: u64,
    handle: u64,
    /// The number of the buffer whose step it is, if any.
    buffer: Option<u64>,
    modules: Vec<Module>,
}

#[derive(Debug, Default)]
pub(super) struct List {
    pub(super) streams: Vec<Listed>,
    /// A stream that waits for work of streams that were destroyed or captured since, which may
    /// still run.
    pub(super) departed: Option<u64>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Listed {
    pub(super) id: u64,
    pub(super) handle: u64,
    /// Whether fences wait for it; false if its work is ordered otherwise.
    pub(super) fenced: bool,
}

impl Streams {
    /// A number that no other stream of this process has or had: a driver may reuse handles.
    pub(super) fn new_id() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// The list. Meanwhile none of the streams is destroyed, or begins to be captured by this
    /// library.
    pub(super) fn hold(&self) -> MutexGuard<'_, List> {
        lock(&self.list)
    }

    /// Whether a wait was given up although its work may still run. The work's memory is unknown
    /// here, so all memory is leaked.
    pub(crate) fn are_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }

    /// Records that a wait was given up. True for the first time.
    pub(super) fn give_up(&self) -> bool {
        !self.given_up.swap(true, Ordering::AcqRel)
    }

    /// Records that a capture has begun on the stream `stream` of this handle, for a step of
    /// `buffer` if any.
    pub(super) fn begin_recording(&self, stream: u64, handle: u64, buffer: Option<u64>) {
        lock(&self.recorded).push(Recorded { stream, handle, buffer, modules: Vec::new() });
    }

    /// The handles of streams that began captures of steps, and the buffers' numbers. While the
    /// list is held, none of these streams is destroyed.
    pub(super) fn recorded_steps(&self) -> Vec<(u64, u64)> {
        let recorded = lock(&self.recorded);
        recorded.iter().filter_map(|capture| Some((capture.handle, capture.buffer?))).collect()
    }

    /// Whether a capture of this library is under way.
    pub(super) fn are_recorded(&self) -> bool {
        !lock(&self.recorded).is_empty()
    }

    /// Keeps modules of recorded kernels for the recording. All captures under way keep them,
    /// because only the driver has the capture that a stream joined.
    pub(super) fn keep_modules(&self, modules: &[Module]) {
        for capture in lock(&self.recorded).iter_mut() {
            capture.modules.extend(modules.iter().cloned());
        }
    }

    /// Ends the capture that began on the stream `stream`. Returns the modules of its kernels.
    pub(super) fn end_recording(&self, stream: u64) -> Vec<Module> {
        let mut recorded = lock(&self.recorded);
        let at = recorded.iter().position(|capture| capture.stream == stream);
        let mut modules = at.map(|at| recorded.swap_remove(at).modules).unwrap_or_default();
        drop(recorded);
        // Each once: a recording may have many kernels of few modules.
        modules.sort_by_key(Module::address);
        modules.dedup_by_key(|module| module.address());
        modules
    }

    pub(super) fn add(&self, stream: Listed) {
        self.hold().streams.push(stream);
    }
}

impl List {
    /// The entry of a stream.
    pub(super) fn find(&self, id: u64) -> Option<Listed> {
        self.streams.iter().find(|stream| stream.id == id).copied()
    }

    /// Takes a stream off the list.
    pub(super) fn remove(&mut self, id: u64) -> Option<Listed> {
        let at = self.streams.iter().position(|stream| stream.id == id)?;
        Some(self.streams.swap_remove(at))
    }

    /// (id, handle) of the streams that a fence waits for. Id 0 is the stream in place of destroyed
    /// and captured ones.
    pub(super) fn fenced(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let fenced = self.streams.iter().filter(|stream| stream.fenced);
        fenced.map(|stream| (stream.id, stream.handle)).chain(self.departed.map(|handle| (0, handle)))
    }
}

/// A point behind all work that the listed streams had been given when it was made. Captured work
/// is left out, because it does not run. Work that a stream had before its capture is not.
#[derive(Debug)]
pub struct Fence(Vec<(u64, Event)>);

impl Fence {
    /// A fence behind all that has been enqueued so far. Takes events from `spare` first.
    pub fn new(device: &Device, spare: &mut Vec<Event>) -> Result<Fence> {
        let list = device.driver.streams().hold();
        let mut events = Vec::with_capacity(list.streams.len() + 1);
        for (id, handle) in list.fenced() {
            if device.driver.stream_is_capturing(handle)? {
                continue;
            }
            let event = match spare.pop() {
                Some(event) => event,
                None => Event::new(device)?,
            };
            event.record_raw(handle)?;
            events.push((id, event));
        }
        Ok(Fence(events))
    }

    /// Makes `stream` wait for it. Earlier work of `stream` itself is ordered in any case.
    pub fn order_before(&self, stream: &Stream) -> Result<()> {
        let others = self.0.iter().filter(|(id, _)| *id != stream.id());
        others.map(|(_, event)| event).try_for_each(|event| stream.wait(event))
    }

    /// Waits for it; false if `timeout` passes before.
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool> {
        Fence::wait_all(std::slice::from_ref(self), timeout)
    }

    /// Waits for all of them; false if `timeout` passes before.
    pub fn wait_all(fences: &[Fence], timeout: Duration) -> Result<bool> {
        let events: Vec<&Event> = fences.iter().flat_map(|fence| &fence.0).map(|(_, event)| event).collect();
        Event::wait_all(&events, timeout)
    }

    /// Its events, for the next fence: a wait is for an event's last record at the time of the
    /// call.
    pub fn into_spare(self, spare: &mut Vec<Event>) {
        spare.extend(self.0.into_iter().map(|(_, event)| event));
    }
}

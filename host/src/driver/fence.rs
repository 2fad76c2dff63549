//! Fences: points behind all that the streams of a device have been given.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Device, Event, Stream};
use crate::error::Result;

/// The streams of a device that callers have ([`Stream::new`], [`Stream::adopt`]).
#[derive(Debug, Default)]
pub struct Streams(Mutex<List>);

#[derive(Debug, Default)]
struct List {
    streams: Vec<Listed>,
    /// A stream that has waited for those that are gone, whose work may still run.
    departed: Option<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Listed {
    id: u64,
    handle: u64,
}

/// The list, held still: none of the streams goes, or begins to be captured by this library, meanwhile.
pub(super) struct Still<'a>(MutexGuard<'a, List>);

impl Streams {
    /// A number that no other stream of this process has or had: a driver's handle may come back.
    pub(super) fn new_id() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn hold(&self) -> Still<'_> {
        Still(self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn add(&self, id: u64, handle: u64) {
        self.hold().0.streams.push(Listed { id, handle });
    }

    /// A stream that is about to go, or that is the caller's again. What it was given so far still counts.
    pub(super) fn remove(&self, device: &Arc<dyn Device>, id: u64) {
        let mut list = self.hold().0;
        let Some(at) = list.streams.iter().position(|stream| stream.id == id) else { return };
        let gone = list.streams.swap_remove(at);
        if let Err(error) = list.come_behind(device, gone.handle) {
            tracing::debug!("what a stream was given is not waited for: {error}");
        }
    }
}

impl List {
    fn come_behind(&mut self, device: &Arc<dyn Device>, gone: u64) -> Result<()> {
        if device.stream_is_capturing(gone)? {
            return Ok(());
        }
        let departed = match self.departed {
            Some(stream) => stream,
            // It goes with the device.
            None => *self.departed.insert(device.stream_create(false)?),
        };
        let event = device.event_create(false)?;
        let outcome = device.event_record(event, gone);
        let outcome = outcome.and_then(|()| device.stream_wait_event(departed, event));
        device.event_destroy(event);
        outcome
    }
}

/// A point behind all that the listed streams of a device had been given when it was made, but for what they record: that does not run.
#[derive(Debug)]
pub struct Fence(Vec<(u64, Event)>);

impl Fence {
    /// A fence behind all that has been enqueued so far. Takes events from `spare` as far as there are any.
    pub fn new(device: &Arc<dyn Device>, spare: &mut Vec<Event>) -> Result<Fence> {
        let list = device.streams().hold().0;
        let mut events = Vec::with_capacity(list.streams.len() + 1);
        let departed = list.departed.map(|handle| Listed { id: 0, handle });
        for stream in list.streams.iter().copied().chain(departed) {
            if device.stream_is_capturing(stream.handle)? {
                continue;
            }
            let event = match spare.pop() {
                Some(event) => event,
                None => Event::new(device, false)?,
            };
            event.record_raw(stream.handle)?;
            events.push((stream.id, event));
        }
        Ok(Fence(events))
    }

    /// Makes `stream` wait for it. What `stream` itself was given comes before anyway.
    pub fn come_before(&self, stream: &Stream) -> Result<()> {
        let others = self.0.iter().filter(|(id, _)| *id != stream.id());
        others.map(|(_, event)| event).try_for_each(|event| stream.wait(event))
    }

    /// Waits for it; false where it has not come in time.
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool> {
        for (_, event) in &self.0 {
            if !event.wait_timeout(timeout)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Its events, for the next fence: a wait is for an event's last record at the time of the call.
    pub fn into_spare(self, spare: &mut Vec<Event>) {
        spare.extend(self.0.into_iter().map(|(_, event)| event));
    }
}

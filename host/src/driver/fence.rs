//! Fences: points behind all that the streams of a device have been given.

use std::time::Duration;

use super::device::Device;
use super::owned::{Event, Stream};
use crate::error::Result;

/// A point behind all work that the listed streams had been given when it was made. Captured work
/// is left out: it does not run.
#[derive(Debug)]
pub struct Fence(Vec<(u64, Event)>);

impl Fence {
    /// A fence behind all that has been enqueued so far. Takes events from `spare` as far as there
    /// are any.
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

    /// Makes `stream` wait for it. The work of `stream` itself comes before in any case.
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

    /// Its events, for the next fence: a wait is for an event's last record at the time of the
    /// call.
    pub fn into_spare(self, spare: &mut Vec<Event>) {
        spare.extend(self.0.into_iter().map(|(_, event)| event));
    }
}

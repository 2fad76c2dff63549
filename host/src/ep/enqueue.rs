//! How the operations of a buffer get on a stream: the caller's or the buffer's own, one behind the other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::StreamOrder;
use super::sequence::Sequence;
use crate::driver::{Device, Event, Stream, give_up};
use crate::error::Result;

/// A buffer's own stream, and the events that order it with those of callers.
#[derive(Debug)]
pub(super) struct Enqueuer {
    comm_stream: Stream,
    start: Event,
    /// Where the last captured operation ends, in its recording.
    captured_end: Event,
    sequence: Arc<Sequence>,
}

impl Enqueuer {
    pub fn new(device: &Arc<dyn Device>) -> Result<Arc<Enqueuer>> {
        Ok(Arc::new(Enqueuer {
            comm_stream: Stream::unfenced(device, true)?,
            start: Event::new(device, false)?,
            captured_end: Event::new(device, false)?,
            sequence: Sequence::new(device)?,
        }))
    }

    /// The buffer's own stream, of high priority.
    pub fn comm_stream(&self) -> &Stream {
        &self.comm_stream
    }

    /// The order of the buffer's operations.
    pub fn sequence(&self) -> &Arc<Sequence> {
        &self.sequence
    }

    /// Runs `work` where `order` says, behind the operation before; gives the event of an asynchronous call. `capturing`: whether the caller's
    /// stream only records; `operation`: its name, where it waits for peers.
    pub fn run(
        &self,
        order: StreamOrder<'_>,
        capturing: bool,
        operation: Option<&'static str>,
        work: impl FnOnce(&Stream) -> Result<()>,
    ) -> Result<Option<Event>> {
        let caller = order.caller;
        let stream = if order.on_comm_stream { &self.comm_stream } else { caller };
        match order.previous_event {
            Some(event) => stream.wait(event)?,
            None if order.on_comm_stream => {
                self.start.record(caller)?;
                stream.wait(&self.start)?;
            }
            None => {}
        }
        let outcome = if capturing {
            let outcome = work(stream);
            outcome.and(self.captured_end.record(stream))
        } else {
            let turn = self.sequence.begin(stream, operation)?;
            let outcome = work(stream);
            // After an error as well: kernels that were launched still run, and the memory they use is given back.
            outcome.and(turn.end(stream))
        };
        if order.asynchronous && outcome.is_ok() {
            let event = Event::new(stream.device(), false)?;
            event.record(stream)?;
            return Ok(Some(event));
        }
        if order.on_comm_stream {
            let waits =
                if capturing { caller.wait(&self.captured_end) } else { self.sequence.wait_on(caller) };
            return outcome.and(waits).map(|()| None);
        }
        outcome.map(|()| None)
    }

    /// Takes no operation any more, and waits for the last one: kernels in flight hold addresses of memory that goes next. Where it takes
    /// longer than `limit`, the device is given up. Errors have nowhere to go.
    pub fn close(&self, limit: Duration) {
        self.sequence.close();
        let start = Instant::now();
        let copies = self.comm_stream.wait_timeout(limit);
        let last = self.sequence.wait(limit.saturating_sub(start.elapsed()));
        // Our kernels end by their own deadlines, but not before what the caller's stream was given before them.
        if matches!(copies, Ok(false)) || matches!(last, Ok(false)) {
            give_up(self.comm_stream.device(), "the last operation of a buffer", limit);
        }
    }
}

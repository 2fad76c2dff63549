//! Events. They measure the system's monotonic clock.

use std::ffi::c_uint;
use std::sync::Arc;

use epoxide_vgpu::stream::{Mark, Op};

use super::api;
use crate::abi::*;
use crate::work::Work;
use crate::world::{Event, LastRecord, Tables, world};

/// `CU_EVENT_DISABLE_TIMING`.
const NO_TIMING: c_uint = 2;
/// `CU_EVENT_INTERPROCESS`.
const INTERPROCESS: c_uint = 4;
/// `CU_EVENT_WAIT_EXTERNAL`.
const WAIT_EXTERNAL: c_uint = 1;

fn record(event: Handle, stream: Handle) -> Res {
    let world = world()?;
    let mut tables = world.lock();
    let stream = tables.resolve(stream)?;
    if tables.event(event)?.context != tables.stream(stream)?.context {
        return Err(INVALID_HANDLE);
    }
    if let Some((capture, lane)) = tables.recording(stream)? {
        let mark = capture.record(lane);
        if let Some((id, _)) = tables.stream(stream)?.queue.capture {
            tables.event(event)?.last = LastRecord::Capture(id, mark);
        }
        return Ok(());
    }
    let mark = Arc::new(Mark::default());
    let mut tables = world.enqueue(tables, stream, Op::Record(mark.clone()))?;
    tables.event(event)?.last = LastRecord::Stream(mark);
    Ok(())
}

/// The mark of an event's last record; `None` if it was never recorded. One in a capture is an
/// error, which ends the capture's validity.
fn last_mark(tables: &mut Tables, event: Handle) -> Res<Option<Arc<Mark>>> {
    let event = tables.event(event)?;
    let (context, last) = (event.context, event.last.clone());
    tables.observe(context)?;
    match last {
        LastRecord::Never => Ok(None),
        LastRecord::Stream(mark) => Ok(Some(mark)),
        LastRecord::Capture(id, _) => {
            tables.invalidate(id);
            Err(CAPTURED_EVENT)
        }
    }
}

fn elapsed_ms(tables: &mut Tables, start: Handle, end: Handle) -> Res<f32> {
    let mut passed_ns = |event: Handle| {
        if !tables.event(event)?.timing {
            return Err(INVALID_HANDLE);
        }
        last_mark(tables, event)?.ok_or(INVALID_HANDLE)?.passed_ns().ok_or(NOT_READY)
    };
    let (start, end) = (passed_ns(start)?, passed_ns(end)?);
    Ok(((i128::from(end) - i128::from(start)) as f64 / 1e6) as f32)
}

fn destroy_event(event: Handle) -> Res {
    world()?.lock().events.remove(&event).map(drop).ok_or(INVALID_HANDLE)
}

api! {
    /// Makes an event.
    fn cuEventCreate(to: Out<Handle>, flags: c_uint) {
        let mut tables = world()?.lock();
        to.required()?;
        if flags > 7 || (flags & INTERPROCESS != 0 && flags & NO_TIMING == 0) {
            return Err(INVALID_VALUE);
        }
        let context = tables.current()?;
        let handle = tables.new_handle();
        let timing = flags & NO_TIMING == 0;
        tables.events.insert(handle, Event { context, timing, last: LastRecord::Never });
        to.put(handle)
    }

    /// Destroys an event.
    fn cuEventDestroy_v2(event: Handle) {
        destroy_event(event)
    }

    /// The same by its first name, which programs that look functions up may have.
    fn cuEventDestroy(event: Handle) {
        destroy_event(event)
    }

    /// Records an event in a stream.
    fn cuEventRecord(event: Handle, stream: Handle) {
        record(event, stream)
    }

    /// The same; the flag for events outside of a capture is not supported.
    fn cuEventRecordWithFlags(event: Handle, stream: Handle, flags: c_uint) {
        if flags != 0 {
            return Err(NOT_SUPPORTED);
        }
        record(event, stream)
    }

    /// Whether a stream has reached the last record.
    fn cuEventQuery(event: Handle) {
        let world = world()?;
        let mut tables = world.lock();
        let mark = last_mark(&mut tables, event)?;
        tables.forbid_while_capturing()?;
        let passed = mark.is_none_or(|mark| mark.passed_ns().is_some());
        if !passed {
            return Err(NOT_READY);
        }
        world.host_waited(&tables);
        Ok(())
    }

    /// Waits until a stream has reached the last record.
    fn cuEventSynchronize(event: Handle) {
        let world = world()?;
        let mut tables = world.lock();
        let mark = last_mark(&mut tables, event)?;
        tables.forbid_while_capturing()?;
        let Some(mark) = mark else { return Ok(()) };
        let context = tables.event(event)?.context;
        let (tables, ()) = world.wait(tables, |tables| {
            tables.observe(context)?;
            Ok(mark.passed_ns().map(drop))
        })?;
        world.host_waited(&tables);
        Ok(())
    }

    /// The time between two events, in milliseconds.
    fn cuEventElapsedTime(ms: Out<f32>, start: Handle, end: Handle) {
        ms.put(elapsed_ms(&mut world()?.lock(), start, end)?)
    }

    /// The time between two events, in milliseconds.
    fn cuEventElapsedTime_v2(ms: Out<f32>, start: Handle, end: Handle) {
        ms.put(elapsed_ms(&mut world()?.lock(), start, end)?)
    }

    /// Has a stream wait for the last record of an event. A stream that waits for an event of a
    /// capture joins it. With `CU_EVENT_WAIT_EXTERNAL` each launch of the graph waits for the last
    /// record outside of captures.
    fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) {
        let world = world()?;
        let mut tables = world.lock();
        tables.event(event)?;
        let stream = tables.resolve(stream)?;
        let recording = tables.recording(stream)?;
        if flags == WAIT_EXTERNAL {
            let (capture, lane) = recording.ok_or(ILLEGAL_STATE)?;
            capture.work(lane, Work::Await(event));
            return Ok(());
        }
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let own = tables.stream(stream)?.queue.capture;
        match tables.event(event)?.last.clone() {
            LastRecord::Never => Ok(()),
            LastRecord::Stream(mark) => {
                if own.is_some() {
                    // The graph cannot wait for work outside of it. The capture is not valid any more.
                    let _ = tables.forbid_on_captured(stream);
                    return Err(STREAM_CAPTURE_ISOLATION);
                }
                world.enqueue(tables, stream, Op::Wait(mark)).map(drop)
            }
            LastRecord::Capture(id, mark) => {
                let lane = match own {
                    Some((own, lane)) if own == id => lane,
                    Some((own, _)) => {
                        tables.invalidate(own);
                        tables.invalidate(id);
                        return Err(STREAM_CAPTURE_MERGE);
                    }
                    None => {
                        if tables.is_legacy(stream) {
                            tables.invalidate(id);
                            return Err(STREAM_CAPTURE_IMPLICIT);
                        }
                        let (capture, _) = tables.captures.get_mut(&id).ok_or(CAPTURED_EVENT)?;
                        let lane = capture.join(stream as u64);
                        tables.stream(stream)?.queue.capture = Some((id, lane));
                        lane
                    }
                };
                if let Some((capture, _)) = tables.recording(stream)? {
                    capture.wait(lane, mark);
                }
                Ok(())
            }
        }
    }
}

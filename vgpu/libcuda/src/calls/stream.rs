//! Streams and host functions.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::MutexGuard;

use epoxide_vgpu::stream::Op;

use super::api;
use crate::abi::*;
use crate::work::{HostCall, Work};
use crate::world::{Tables, World, world};

/// Enqueues work in a stream, or records it if the stream is captured. The handle is one that
/// [`Tables::resolve`] gave.
pub(crate) fn submit(
    world: &'static World,
    mut tables: MutexGuard<'static, Tables>,
    stream: Handle,
    work: Work,
) -> Res<MutexGuard<'static, Tables>> {
    if let Some((capture, lane)) = tables.recording(stream)? {
        capture.work(lane, work);
        return Ok(tables);
    }
    world.enqueue(tables, stream, Op::Work(work))
}

fn create(to: Out<Handle>, flags: c_uint, priority: c_int) -> Res {
    let mut tables = world()?.lock();
    to.required()?;
    if flags > 1 {
        return Err(INVALID_VALUE);
    }
    let current = tables.current()?;
    let stream = tables.new_stream(current, flags, priority.clamp(-5, 0))?;
    to.put(stream)
}

fn destroy_stream(stream: Handle) -> Res {
    let world = world()?;
    let mut tables = world.lock();
    if stream <= 2 || tables.is_legacy(stream) {
        return Err(INVALID_HANDLE);
    }
    if tables.stream(stream)?.queue.closed {
        return Err(INVALID_HANDLE);
    }
    tables.leave_capture(stream);
    let queue = &mut tables.stream(stream)?.queue;
    queue.closed = true;
    if queue.is_idle() {
        tables.remove_stream(stream);
    }
    Ok(())
}

api! {
    /// Makes a stream.
    fn cuStreamCreate(stream: Out<Handle>, flags: c_uint) {
        create(stream, flags, 0)
    }

    /// Makes a stream with a priority, which changes nothing.
    fn cuStreamCreateWithPriority(stream: Out<Handle>, flags: c_uint, priority: c_int) {
        create(stream, flags, priority)
    }

    /// Destroys a stream, once its work is done.
    fn cuStreamDestroy_v2(stream: Handle) {
        destroy_stream(stream)
    }

    /// The same by its first name, which programs that look functions up may have.
    fn cuStreamDestroy(stream: Handle) {
        destroy_stream(stream)
    }

    /// Waits for the work of a stream.
    fn cuStreamSynchronize(stream: Handle) {
        let world = world()?;
        let mut tables = world.lock();
        let stream = tables.resolve(stream)?;
        tables.forbid_on_captured(stream)?;
        tables.forbid_while_capturing()?;
        world.synchronise(tables, &[stream]).map(drop)
    }

    /// Whether the work of a stream is done.
    fn cuStreamQuery(stream: Handle) {
        let world = world()?;
        let mut tables = world.lock();
        let stream = tables.resolve(stream)?;
        tables.forbid_on_captured(stream)?;
        tables.forbid_while_capturing()?;
        let context = tables.stream(stream)?.context;
        tables.observe(context)?;
        if !tables.stream(stream)?.queue.is_idle() {
            return Err(NOT_READY);
        }
        world.host_waited(&tables);
        Ok(())
    }

    /// The flags of a stream.
    fn cuStreamGetFlags(stream: Handle, flags: Out<c_uint>) {
        let mut tables = world()?.lock();
        let stream = tables.resolve(stream)?;
        flags.put(tables.stream(stream)?.flags)
    }

    /// The priority of a stream.
    fn cuStreamGetPriority(stream: Handle, priority: Out<c_int>) {
        let mut tables = world()?.lock();
        let stream = tables.resolve(stream)?;
        priority.put(tables.stream(stream)?.priority)
    }

    /// A number that no other stream has.
    fn cuStreamGetId(stream: Handle, id: Out<u64>) {
        let mut tables = world()?.lock();
        let stream = tables.resolve(stream)?;
        id.put(tables.stream(stream)?.number)
    }

    /// The context of a stream.
    fn cuStreamGetCtx(stream: Handle, context: Out<Handle>) {
        let mut tables = world()?.lock();
        let stream = tables.resolve(stream)?;
        context.put(tables.stream(stream)?.context)
    }

    /// The context of a stream; there are no green contexts.
    fn cuStreamGetCtx_v2(stream: Handle, context: Out<Handle>, green: Out<Handle>) {
        let mut tables = world()?.lock();
        let stream = tables.resolve(stream)?;
        green.put_optional(0);
        context.put(tables.stream(stream)?.context)
    }

    /// The device of a stream.
    fn cuStreamGetDevice(stream: Handle, device: Out<CUdevice>) {
        let mut tables = world()?.lock();
        let stream = tables.resolve(stream)?;
        device.put(tables.stream(stream)?.device as CUdevice)
    }

    /// Calls a function of the program in stream order.
    fn cuLaunchHostFunc(stream: Handle, function: HostFn, data: *mut c_void) {
        let world = world()?;
        let mut tables = world.lock();
        let stream = tables.resolve(stream)?;
        // SAFETY: the caller keeps the function and its data valid until the stream has passed.
        let call = unsafe { HostCall::host(function.ok_or(INVALID_VALUE)?, data) };
        submit(world, tables, stream, Work::Host(call)).map(drop)
    }

    /// Calls a function of the program in stream order. Behind a fault it is an error.
    fn cuStreamAddCallback(stream: Handle, function: StreamCallback, data: *mut c_void, flags: c_uint) {
        let world = world()?;
        let mut tables = world.lock();
        let resolved = tables.resolve(stream)?;
        tables.forbid_on_captured(resolved)?;
        let context = tables.stream(resolved)?.context;
        tables.observe(context)?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: as for `cuLaunchHostFunc`.
        let call = unsafe { HostCall::callback(function.ok_or(INVALID_VALUE)?, stream, data) };
        submit(world, tables, resolved, Work::Host(call)).map(drop)
    }

    /// Attaches managed memory to a stream, which changes nothing: it is never moved.
    fn cuStreamAttachMemAsync(stream: Handle, addr: CUdeviceptr, _bytes: usize, flags: c_uint) {
        let mut tables = world()?.lock();
        tables.resolve(stream)?;
        tables.allocation_at(addr).ok_or(INVALID_VALUE)?;
        if matches!(flags, 1 | 2 | 4) { Ok(()) } else { Err(INVALID_VALUE) }
    }
}

//! Contexts: primary ones, others, and the stack of each thread.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};

use epoxide_vgpu::Past;

use super::api;
use crate::abi::*;
use crate::world::{Context, Primary, Tables, World, with_contexts, world};

/// Limits, with the values that a driver has at first. The virtual GPU needs none of them.
const LIMITS: &[(c_uint, usize)] =
    &[(0, 1024), (1, 1 << 20), (2, 8 << 20), (3, 2), (4, 2048), (5, 64), (6, 0)];

pub(crate) fn new_context(tables: &mut Tables, device: usize, primary: bool, flags: c_uint) -> Res<Handle> {
    let handle = tables.new_handle();
    let context = Context {
        device,
        primary,
        flags,
        limits: LIMITS.iter().copied().collect(),
        cache_config: 0,
        shared_config: 0,
        error: None,
        is_error_seen: false,
        legacy: 0,
        of_threads: HashMap::new(),
        retired: Past::default(),
        retired_blocking: Past::default(),
    };
    tables.contexts.insert(handle, context);
    let legacy = tables.new_stream(handle, 0, 0)?;
    tables.context(handle)?.legacy = legacy;
    Ok(handle)
}

fn create(context: Out<Handle>, flags: c_uint, device: CUdevice) -> Res {
    let world = world()?;
    context.required()?;
    world.device(device)?;
    let handle = new_context(&mut world.lock(), device as usize, false, flags)?;
    with_contexts(|contexts| contexts.push(handle));
    context.put(handle)
}

/// Waits for the work of a context, and removes it.
fn destroy(world: &'static World, handle: Handle) -> Res {
    let tables = world.lock();
    let streams = tables.streams_of(handle);
    // The lock is kept from the end of the work on, so that no other thread enqueues work in
    // between. The work of a failed context is dropped already, and it gets no more.
    let mut tables = world.synchronise(tables, &streams).unwrap_or_else(|_| world.lock());
    let device = tables.device_of(handle)?;
    let (memory, modules) = tables.remove_context(handle);
    drop(tables);
    world.done.notify_all();
    world.work.notify_all();
    drop(memory);
    modules.iter().for_each(|loaded| loaded.module.unload(&world.devices[device].memory));
    Ok(())
}

fn primary(tables: &mut Tables, device: CUdevice) -> Res<&mut Primary> {
    usize::try_from(device).ok().and_then(|at| tables.primaries.get_mut(at)).ok_or(INVALID_DEVICE)
}

fn current() -> Option<Handle> {
    with_contexts(|contexts| contexts.last().copied())
}

/// The context that a handle stands for; the current one for null.
fn named_or_current(handle: Handle) -> Res<Handle> {
    match handle {
        0 => current().ok_or(INVALID_CONTEXT),
        handle => Ok(handle),
    }
}

fn synchronise(context: Handle) -> Res {
    let world = world()?;
    let mut tables = world.lock();
    tables.observe(context)?;
    tables.forbid_while_capturing()?;
    let streams = tables.streams_of(context);
    let captures = streams.iter().filter_map(|stream| tables.streams.get(stream)?.queue.capture);
    let captures: Vec<u64> = captures.map(|(id, _)| id).collect();
    if !captures.is_empty() {
        captures.into_iter().for_each(|id| tables.invalidate(id));
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    world.synchronise(tables, &streams).map(drop)
}

fn destroy_context(context: Handle) -> Res {
    let world = world()?;
    if world.lock().context(context)?.primary {
        return Err(INVALID_CONTEXT);
    }
    with_contexts(|contexts| {
        if contexts.last() == Some(&context) {
            contexts.pop();
        }
    });
    destroy(world, context)
}

fn push(context: Handle) -> Res {
    world()?.lock().context(context)?;
    with_contexts(|contexts| contexts.push(context));
    Ok(())
}

fn pop(context: Out<Handle>) -> Res {
    world()?;
    let popped = with_contexts(Vec::pop).ok_or(INVALID_CONTEXT)?;
    context.put_optional(popped);
    Ok(())
}

api! {
    /// Makes a context, current on this thread.
    fn cuCtxCreate_v2(context: Out<Handle>, flags: c_uint, device: CUdevice) {
        create(context, flags, device)
    }

    /// The same, without execution affinity.
    fn cuCtxCreate_v3(context: Out<Handle>, _affinity: In<c_void>, affinities: c_int, flags: c_uint, device: CUdevice) {
        if affinities != 0 {
            return Err(NOT_SUPPORTED);
        }
        create(context, flags, device)
    }

    /// The same; parameters must be null.
    fn cuCtxCreate_v4(context: Out<Handle>, params: Handle, flags: c_uint, device: CUdevice) {
        if params != 0 {
            return Err(NOT_SUPPORTED);
        }
        create(context, flags, device)
    }

    /// Destroys a context and all that belongs to it.
    fn cuCtxDestroy_v2(context: Handle) {
        destroy_context(context)
    }

    /// The same by its first name, which programs that look functions up may have.
    fn cuCtxDestroy(context: Handle) {
        destroy_context(context)
    }

    /// Makes a context current, on top of the others of this thread.
    fn cuCtxPushCurrent_v2(context: Handle) {
        push(context)
    }

    /// The same by its first name, which programs that look functions up may have.
    fn cuCtxPushCurrent(context: Handle) {
        push(context)
    }

    /// Removes the current context from the stack of the thread.
    fn cuCtxPopCurrent_v2(context: Out<Handle>) {
        pop(context)
    }

    /// The same by its first name, which programs that look functions up may have.
    fn cuCtxPopCurrent(context: Out<Handle>) {
        pop(context)
    }

    /// Replaces the current context; null removes it.
    fn cuCtxSetCurrent(context: Handle) {
        let world = world()?;
        if context != 0 {
            world.lock().context(context)?;
        }
        with_contexts(|contexts| {
            contexts.pop();
            if context != 0 {
                contexts.push(context);
            }
        });
        Ok(())
    }

    /// The current context, or null.
    fn cuCtxGetCurrent(context: Out<Handle>) {
        world()?;
        context.put(current().unwrap_or(0))
    }

    /// The device of the current context.
    fn cuCtxGetDevice(device: Out<CUdevice>) {
        let current = current().ok_or(INVALID_CONTEXT)?;
        device.put(world()?.lock().device_of(current)? as CUdevice)
    }

    /// The device of a context.
    fn cuCtxGetDevice_v2(device: Out<CUdevice>, context: Handle) {
        device.put(world()?.lock().device_of(named_or_current(context)?)? as CUdevice)
    }

    /// A number that no other context has.
    fn cuCtxGetId(context: Handle, id: Out<u64>) {
        let context = named_or_current(context)?;
        world()?.lock().context(context)?;
        id.put(context as u64)
    }

    /// The flags of the current context.
    fn cuCtxGetFlags(flags: Out<c_uint>) {
        let mut tables = world()?.lock();
        let current = tables.current()?;
        flags.put(tables.context(current)?.flags)
    }

    /// Sets the flags of the current context.
    fn cuCtxSetFlags(flags: c_uint) {
        let mut tables = world()?.lock();
        let current = tables.current()?;
        tables.context(current)?.flags = flags;
        Ok(())
    }

    /// Waits for all work of the current context.
    fn cuCtxSynchronize() {
        synchronise(current().ok_or(INVALID_CONTEXT)?)
    }

    /// Waits for all work of a context.
    fn cuCtxSynchronize_v2(context: Handle) {
        synchronise(named_or_current(context)?)
    }

    /// A limit of the current context.
    fn cuCtxGetLimit(value: Out<usize>, limit: c_uint) {
        let mut tables = world()?.lock();
        let current = tables.current()?;
        value.put(*tables.context(current)?.limits.get(&limit).ok_or(UNSUPPORTED_LIMIT)?)
    }

    /// Sets a limit of the current context.
    fn cuCtxSetLimit(limit: c_uint, value: usize) {
        let mut tables = world()?.lock();
        let current = tables.current()?;
        *tables.context(current)?.limits.get_mut(&limit).ok_or(UNSUPPORTED_LIMIT)? = value;
        Ok(())
    }

    /// The preference for the cache.
    fn cuCtxGetCacheConfig(config: Out<c_int>) {
        let mut tables = world()?.lock();
        let current = tables.current()?;
        config.put(tables.context(current)?.cache_config)
    }

    /// Sets the preference for the cache.
    fn cuCtxSetCacheConfig(config: c_int) {
        let mut tables = world()?.lock();
        let current = tables.current()?;
        tables.context(current)?.cache_config = config;
        Ok(())
    }

    /// The preference for banks of shared memory.
    fn cuCtxGetSharedMemConfig(config: Out<c_int>) {
        let mut tables = world()?.lock();
        let current = tables.current()?;
        config.put(tables.context(current)?.shared_config)
    }

    /// Sets the preference for banks of shared memory.
    fn cuCtxSetSharedMemConfig(config: c_int) {
        let mut tables = world()?.lock();
        let current = tables.current()?;
        tables.context(current)?.shared_config = config;
        Ok(())
    }

    /// The version of the API of a context.
    fn cuCtxGetApiVersion(context: Handle, version: Out<c_uint>) {
        let context = named_or_current(context)?;
        world()?.lock().context(context)?;
        version.put(3020)
    }

    /// The lowest and the highest priority of streams. Priorities change nothing.
    fn cuCtxGetStreamPriorityRange(lowest: Out<c_int>, highest: Out<c_int>) {
        world()?.lock().current()?;
        lowest.put_optional(0);
        highest.put_optional(-5);
        Ok(())
    }

    /// Resets persisting lines of the L2 cache, which does nothing.
    fn cuCtxResetPersistingL2Cache() {
        world()?.lock().current().map(drop)
    }

    /// The primary context of a device, with one user more.
    fn cuDevicePrimaryCtxRetain(context: Out<Handle>, device: CUdevice) {
        let world = world()?;
        context.required()?;
        let mut tables = world.lock();
        let (exists, flags) = primary(&mut tables, device).map(|primary| (primary.context, primary.flags))?;
        let handle = match exists {
            Some(handle) => handle,
            None => new_context(&mut tables, device as usize, true, flags)?,
        };
        let primary = primary(&mut tables, device)?;
        primary.context = Some(handle);
        primary.users += 1;
        context.put(handle)
    }

    /// Ends one use of the primary context. The last one destroys it.
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) {
        let world = world()?;
        let mut tables = world.lock();
        let primary = primary(&mut tables, device)?;
        primary.users = primary.users.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        let gone = if primary.users == 0 { primary.context.take() } else { None };
        drop(tables);
        gone.map_or(Ok(()), |handle| destroy(world, handle))
    }

    /// Destroys the primary context, even if it is in use.
    fn cuDevicePrimaryCtxReset_v2(device: CUdevice) {
        let world = world()?;
        let mut tables = world.lock();
        let primary = primary(&mut tables, device)?;
        primary.users = 0;
        let gone = primary.context.take();
        drop(tables);
        gone.map_or(Ok(()), |handle| destroy(world, handle))
    }

    /// Whether the primary context exists, and its flags.
    fn cuDevicePrimaryCtxGetState(device: CUdevice, flags: Out<c_uint>, active: Out<c_int>) {
        let mut tables = world()?.lock();
        let primary = primary(&mut tables, device)?;
        flags.put_optional(primary.flags);
        active.put_optional(c_int::from(primary.context.is_some()));
        Ok(())
    }

    /// Sets the flags of the primary context.
    fn cuDevicePrimaryCtxSetFlags_v2(device: CUdevice, flags: c_uint) {
        let mut tables = world()?.lock();
        let primary = primary(&mut tables, device)?;
        primary.flags = flags;
        match primary.context {
            Some(context) => tables.context(context).map(|context| context.flags = flags),
            None => Ok(()),
        }
    }

    /// Lets the current context access the memory of another device's context. All
    /// contexts of its device have the access then, but not to variables of modules, as on an H200.
    fn cuCtxEnablePeerAccess(peer: Handle, flags: c_uint) {
        let world = world()?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let mut tables = world.lock();
        let current = tables.current()?;
        let (own, other) = (tables.device_of(current)?, tables.device_of(peer)?);
        if own == other {
            return Err(INVALID_CONTEXT);
        }
        if tables.peers.contains_key(&(current, peer)) {
            return Err(PEER_ACCESS_ALREADY_ENABLED);
        }
        if !tables.has_peer_access(own, other) {
            super::memory::open_to_peer(world, &mut tables, own, other)?;
        }
        tables.peers.insert((current, peer), (own, other));
        Ok(())
    }

    /// Ends the access of the current context to the memory of another device's context.
    fn cuCtxDisablePeerAccess(peer: Handle) {
        let world = world()?;
        let mut tables = world.lock();
        let current = tables.current()?;
        tables.context(peer)?;
        if !tables.peers.contains_key(&(current, peer)) {
            return Err(PEER_ACCESS_NOT_ENABLED);
        }
        tables.close_to_peer((current, peer));
        Ok(())
    }
}

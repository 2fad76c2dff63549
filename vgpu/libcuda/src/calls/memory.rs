//! Memory: allocation, copies, fills, facts about addresses.

use std::ffi::{c_int, c_uint, c_ushort, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use epoxide_vgpu::stream::{HostPtr, Mark, Op, Source, Target, Transfer};

use super::api;
use super::stream::submit;
use crate::abi::*;
use crate::work::Work;
use crate::world::{Allocation, Kind, READ_WRITE, Shared, Tables, World, memory_code, world};

type Locked = MutexGuard<'static, Tables>;

/// The next number of an allocation, which names it in reports.
pub(crate) fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Counts memory of a device as used.
pub(crate) fn charge(world: &World, tables: &mut Tables, device: usize, bytes: u64) -> Res {
    let used = tables.used[device].checked_add(bytes).filter(|used| *used <= world.config.memory_bytes);
    tables.used[device] = used.ok_or(OUT_OF_MEMORY)?;
    Ok(())
}

/// Allocates memory for the current context.
fn allocate(kind: Kind, bytes: usize, host_flags: u32) -> Res<u64> {
    let mut tables = world()?.lock();
    tables.forbid_while_capturing()?;
    let context = tables.current()?;
    let device = tables.device_of(context)?;
    allocate_for(tables, (context, device), kind, bytes, host_flags)
}

/// Allocates memory that belongs to a context, on a device.
fn allocate_for(
    mut tables: Locked,
    (context, device): (Handle, usize),
    kind: Kind,
    bytes: usize,
    host_flags: u32,
) -> Res<u64> {
    let world = world()?;
    let bytes = bytes as u64;
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let charged = kind != Kind::Host;
    if charged {
        charge(world, &mut tables, device, bytes)?;
    }
    // Filling it takes a while: without the lock.
    drop(tables);
    let id = next_number();
    let region = match kind {
        Kind::Device => world.devices[device].memory.alloc(bytes, &format!("allocation {id}")),
        Kind::Managed => world.all.alloc_host(bytes, &format!("managed allocation {id}")),
        _ => world.all.alloc_host(bytes, &format!("host allocation {id}")),
    };
    let mut tables = world.lock();
    let owner = (kind == Kind::Device).then_some(device);
    let made = region.map_err(memory_code).and_then(|region| {
        // Another thread may have destroyed the context meanwhile, which frees all entered memory.
        tables.usable(context)?;
        Ok((world.share(&tables, owner, &region)?, region))
    });
    let (shared, region) = match made {
        Ok(made) => made,
        Err(code) => {
            if charged {
                tables.used[device] -= bytes;
            }
            return Err(code);
        }
    };
    let addr = region.addr();
    let allocation = Allocation {
        kind,
        context: Some(context),
        device: Some(device),
        bytes,
        id,
        host_flags,
        charged,
        region,
        shared,
        physical: None,
        exported: None,
        opened: None,
    };
    tables.allocations.insert(addr, allocation);
    Ok(addr)
}

/// Enters memory of the program's at its own address.
fn register(addr: u64, bytes: usize, flags: u32) -> Res {
    let world = world()?;
    let ptr =
        NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(addr as usize)).ok_or(INVALID_VALUE)?;
    let end = addr.checked_add(bytes as u64).filter(|_| bytes > 0 && flags <= 15).ok_or(INVALID_VALUE)?;
    let mut tables = world.lock();
    let context = tables.current()?;
    let device = tables.device_of(context)?;
    tables.forbid_while_capturing()?;
    let before = tables.allocations.range(..end).next_back();
    if before.is_some_and(|(start, allocation)| start + allocation.bytes > addr) {
        return Err(HOST_MEMORY_ALREADY_REGISTERED);
    }
    let id = next_number();
    // SAFETY: the caller of the API keeps memory that it registers until it has unregistered it,
    // and `free` waits for the work of all contexts before that returns. A caller that destroys the
    // context instead keeps the memory for as long as kernels of other contexts use it. Plain code
    // of the program accesses it as it does page-locked memory.
    let region = unsafe { world.all.lend(ptr, bytes, &format!("registered memory {id}")) };
    let shared = world.share(&tables, None, &region)?;
    let allocation = Allocation {
        kind: Kind::Registered,
        context: Some(context),
        device: Some(device),
        bytes: bytes as u64,
        id,
        host_flags: flags,
        charged: false,
        region,
        shared,
        physical: None,
        exported: None,
        opened: None,
    };
    tables.allocations.insert(addr, allocation);
    Ok(())
}

/// Frees memory of this kind, after the work of its context. The program may free memory that it
/// has lent once this returns, and kernels of all devices may access it: so this waits for all
/// contexts. Other memory stays mapped for kernels that still have its address.
fn free(addr: u64, allowed: &[Kind]) -> Res {
    let world = world()?;
    let mut tables = world.lock();
    let current = tables.current()?;
    tables.forbid_while_capturing()?;
    let allocation = tables.allocations.get(&addr).filter(|allocation| allowed.contains(&allocation.kind));
    let allocation = allocation.ok_or(INVALID_VALUE)?;
    let (kind, context) = (allocation.kind, allocation.context.unwrap_or(current));
    if kind == Kind::Registered {
        tables = world.drain(tables)?;
    }
    let streams = tables.streams_of(context);
    let mut tables = world.synchronise(tables, &streams)?;
    let allocation = tables.remove_allocation(addr);
    drop(tables);
    drop(allocation);
    Ok(())
}

/// Maps all memory of device `other` for device `own`, or none of it.
pub(crate) fn open_to_peer(world: &World, tables: &mut Tables, own: usize, other: usize) -> Res {
    let memory = &world.devices[own].memory;
    let of_peer = |allocation: &&mut Allocation| {
        allocation.device == Some(other) && matches!(allocation.kind, Kind::Device | Kind::Ipc)
    };
    let of_peer: Vec<&mut Allocation> = tables.allocations.values_mut().filter(of_peer).collect();
    let regions: Result<Vec<_>, _> = of_peer.iter().map(|peer| memory.share(&peer.region)).collect();
    for (allocation, region) in of_peer.into_iter().zip(regions.map_err(memory_code)?) {
        allocation.shared.push(Shared { device: Some(own), access: READ_WRITE, _region: region });
    }
    Ok(())
}

/// A side of a copy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    /// Memory that a device may access.
    Device(u64),
    /// Any other memory of the program.
    Pageable(u64),
}

impl Side {
    /// The side at an address. `must`: it is an error if no device may access it.
    fn of(world: &World, addr: u64, bytes: u64, must: Must) -> Res<Side> {
        if addr == 0 {
            return Err(INVALID_VALUE);
        }
        // Copies are cut where regions end, so the first byte decides.
        let known = world.all.check(addr, 1).is_ok() && bytes > 0;
        match must {
            Must::BeDevice if !known => Err(INVALID_VALUE),
            _ if known => Ok(Side::Device(addr)),
            _ => Ok(Side::Pageable(addr)),
        }
    }

    fn at(self, offset: u64) -> Side {
        match self {
            Side::Device(addr) => Side::Device(addr + offset),
            Side::Pageable(addr) => Side::Pageable(addr + offset),
        }
    }

    /// An error unless all bytes of a device's side lie in regions.
    fn check(self, world: &World, tables: &Tables, bytes: u64) -> Res {
        let mut done = 0;
        while let Side::Device(addr) = self.at(done)
            && done < bytes
        {
            let length = (bytes - done).min(self.at(done).run(tables));
            world.all.check(addr, length).map_err(memory_code)?;
            done += length;
        }
        Ok(())
    }

    /// Whether it is memory of the host.
    fn is_host(self, tables: &Tables) -> bool {
        match self {
            Side::Device(addr) => tables.allocation_at(addr).is_some_and(|(_, at)| at.kind.is_host()),
            Side::Pageable(_) => true,
        }
    }

    /// How many bytes lie in one region from here on.
    fn run(self, tables: &Tables) -> u64 {
        match self {
            Side::Device(addr) => tables
                .allocation_at(addr)
                .map_or(u64::MAX, |(start, allocation)| start + allocation.bytes - addr),
            Side::Pageable(_) => u64::MAX,
        }
    }
}

#[derive(Clone, Copy)]
enum Must {
    BeDevice,
    Nothing,
}

/// How a call waits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    /// Until the work is done. A fill of memory that the host cannot access is not waited for.
    Done,
    /// Only where pageable memory demands it, or for a copy from host memory to host memory.
    IfHost,
    /// Only where pageable memory demands it.
    IfPageable,
}

/// Enqueues a copy. Pageable memory is read before the call returns; a copy to it is waited for.
fn copy(world: &'static World, stream: Handle, dst: Side, src: Side, bytes: u64, wait: Wait) -> Res {
    let mut tables: Locked = world.lock();
    let stream = tables.resolve(stream)?;
    dst.check(world, &tables, bytes)?;
    src.check(world, &tables, bytes)?;
    let captured = tables.recording(stream)?.is_some();
    let waits = match wait {
        Wait::Done => !captured,
        Wait::IfHost => !captured && dst.is_host(&tables) && src.is_host(&tables),
        Wait::IfPageable => false,
    };
    if waits && matches!(src, Side::Pageable(_)) {
        // The source is read below, behind all work before the call.
        tables = world.enqueue(tables, stream, Op::Record(Arc::default()))?;
        tables = world.synchronise(tables, &[stream])?;
        dst.check(world, &tables, bytes)?;
        src.check(world, &tables, bytes)?;
    }
    let mut landings = vec![];
    let mut done = 0;
    while done < bytes {
        let (to, from) = (dst.at(done), src.at(done));
        let length = (bytes - done).min(to.run(&tables)).min(from.run(&tables));
        // SAFETY: the caller of the copy keeps both sides valid until the stream has passed it.
        let host = |addr: u64| unsafe { HostPtr::new(addr as *mut u8) };
        let source = match from {
            Side::Device(addr) => Source::Device(addr),
            Side::Pageable(addr) if captured => Source::Host(host(addr)),
            // SAFETY: the caller has the source readable.
            Side::Pageable(addr) => Source::Staged(unsafe { host(addr).read(length) }),
        };
        let target = match to {
            Side::Device(addr) => Target::Device(addr),
            Side::Pageable(addr) if captured => Target::Host(host(addr)),
            Side::Pageable(addr) => {
                let landed = Arc::new(OnceLock::new());
                landings.push((addr, landed.clone()));
                Target::Staged(landed)
            }
        };
        let transfer = Transfer::Copy { target, source, bytes: length };
        tables = submit(world, tables, stream, Work::Transfer(transfer))?;
        done += length;
    }
    if waits || !landings.is_empty() {
        drop(world.synchronise(tables, &[stream])?);
    }
    for (addr, landed) in landings {
        if let Some(bytes) = landed.get() {
            // SAFETY: the caller has the target writable for as many bytes until this returns.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), addr as *mut u8, bytes.len()) };
        }
    }
    Ok(())
}

/// A copy by addresses.
fn copy_at(
    stream: Handle,
    (dst, dst_must): (u64, Must),
    (src, src_must): (u64, Must),
    bytes: usize,
    wait: Wait,
) -> Res {
    let world = world()?;
    world.lock().current()?;
    let bytes = bytes as u64;
    if bytes == 0 {
        return Ok(());
    }
    let (dst, src) = (Side::of(world, dst, bytes, dst_must)?, Side::of(world, src, bytes, src_must)?);
    copy(world, stream, dst, src, bytes, wait)
}

/// Enqueues a copy between contexts in the default stream of the current one, behind the work of
/// the default streams of all three and in front of what they get later.
fn copy_between((dst, to): (u64, Handle), (src, from): (u64, Handle), bytes: usize) -> Res {
    let world = world()?;
    let mut tables = world.lock();
    let current = tables.current()?;
    let own = tables.context(current)?.legacy;
    let mut others = vec![tables.context(to)?.legacy, tables.context(from)?.legacy];
    others.retain(|other| *other != own);
    let order = |mut tables: Locked, first: Handle, then: Handle| {
        tables.recording(first)?;
        tables.recording(then)?;
        let mark = Arc::new(Mark::default());
        tables = world.enqueue(tables, first, Op::Record(mark.clone()))?;
        world.enqueue(tables, then, Op::Wait(mark))
    };
    for other in &others {
        tables = order(tables, *other, own)?;
    }
    drop(tables);
    copy_at(0, (dst, Must::BeDevice), (src, Must::BeDevice), bytes, Wait::IfPageable)?;
    others.into_iter().try_fold(world.lock(), |tables, other| order(tables, own, other)).map(drop)
}

/// Sets `count` elements of `width` bytes to the low bytes of `value`.
fn fill(stream: Handle, dst: u64, value: u32, width: usize, count: usize, wait: Wait) -> Res {
    let world = world()?;
    let mut tables = world.lock();
    tables.current()?;
    let bytes = count.checked_mul(width).ok_or(INVALID_VALUE)? as u64;
    if bytes == 0 {
        return Ok(());
    }
    if !dst.is_multiple_of(width as u64) || dst == 0 {
        return Err(INVALID_VALUE);
    }
    let stream = tables.resolve(stream)?;
    Side::Device(dst).check(world, &tables, bytes)?;
    // The element, as often as a word has room for it.
    let word = match width {
        1 => (value & 0xff) * 0x0101_0101,
        2 => (value & 0xffff) * 0x0001_0001,
        _ => value,
    };
    let byte = word as u8;
    let mut done = 0;
    while done < bytes {
        let length = (bytes - done).min(Side::Device(dst + done).run(&tables));
        let (target, bytes) = (dst + done, length);
        let transfer = if word.to_le_bytes() == [byte; 4] {
            Transfer::Fill { target, value: byte, bytes }
        } else {
            Transfer::FillWords { target, word, bytes }
        };
        tables = submit(world, tables, stream, Work::Transfer(transfer))?;
        done += length;
    }
    let kind = tables.allocation_at(dst).map(|(_, allocation)| allocation.kind);
    if wait == Wait::Done && kind.is_some_and(|kind| kind.is_host() || kind == Kind::Managed) {
        drop(world.synchronise(tables, &[stream])?);
    }
    Ok(())
}

/// The first address of a row.
fn row_at(base: u64, pitch: usize, row: usize) -> Res<u64> {
    let offset = pitch.checked_mul(row).ok_or(INVALID_VALUE)?;
    base.checked_add(offset as u64).ok_or(INVALID_VALUE)
}

/// An error unless the rows lie apart and their addresses are numbers of 64 bits.
fn check_rows(base: u64, pitch: usize, bytes: usize, rows: usize) -> Res {
    let Some(last) = rows.checked_sub(1) else { return Ok(()) };
    if last > 0 && pitch < bytes {
        return Err(INVALID_VALUE);
    }
    row_at(base, pitch, last)?.checked_add(bytes as u64).map(drop).ok_or(INVALID_VALUE)
}

/// A fill of rows. The pitch of one row counts for nothing.
fn fill_2d(
    stream: Handle,
    dst: u64,
    pitch: usize,
    value: u32,
    width: usize,
    [columns, rows]: [usize; 2],
    wait: Wait,
) -> Res {
    let bytes = columns.checked_mul(width).ok_or(INVALID_VALUE)?;
    check_rows(dst, pitch, bytes, rows)?;
    let rows = if bytes == 0 { 0 } else { rows };
    let world = world()?;
    let tables = world.lock();
    tables.current()?;
    // All rows, before the first one is filled.
    if rows > 1 && !pitch.is_multiple_of(width) {
        return Err(INVALID_VALUE);
    }
    for row in 0..rows {
        Side::Device(row_at(dst, pitch, row)?).check(world, &tables, bytes as u64)?;
    }
    drop(tables);
    for row in 0..rows {
        fill(stream, row_at(dst, pitch, row)?, value, width, columns, wait)?;
    }
    Ok(())
}

/// A copy of rows. A pitch of 0 stands for rows that follow each other.
fn copy_2d(stream: Handle, what: In<Memcpy2D>, wait: Wait) -> Res {
    let what = what.get()?;
    let world = world()?;
    // Start and pitch.
    let rows_of = |side: &Side2D| {
        let base = match side.memory_type {
            1 => side.host as u64,
            2 | 4 => side.device,
            _ => return Err(NOT_SUPPORTED),
        };
        let row_bytes = side.x_bytes.checked_add(what.width_bytes).ok_or(INVALID_VALUE)?;
        let pitch = if side.pitch == 0 { row_bytes } else { side.pitch };
        if pitch < row_bytes {
            return Err(INVALID_VALUE);
        }
        let row = row_at(base, pitch, side.y)?;
        let start = row.checked_add(side.x_bytes as u64).ok_or(INVALID_VALUE)?;
        check_rows(start, pitch, what.width_bytes, what.height)?;
        Ok((start, pitch))
    };
    let (dst, src) = (rows_of(&what.dst)?, rows_of(&what.src)?);
    let tables = world.lock();
    tables.current()?;
    let bytes = what.width_bytes;
    let rows = if bytes == 0 { 0 } else { what.height };
    let at = |(start, pitch): (u64, usize), side: &Side2D, row: usize| -> Res<(u64, Must)> {
        let must = if side.memory_type == 2 { Must::BeDevice } else { Must::Nothing };
        Ok((row_at(start, pitch, row)?, must))
    };
    // All rows, before the first one is copied.
    for row in 0..rows {
        for (lines, side) in [(dst, &what.dst), (src, &what.src)] {
            let (addr, must) = at(lines, side, row)?;
            Side::of(world, addr, bytes as u64, must)?.check(world, &tables, bytes as u64)?;
        }
    }
    drop(tables);
    for row in 0..rows {
        copy_at(stream, at(dst, &what.dst, row)?, at(src, &what.src, row)?, bytes, wait)?;
    }
    Ok(())
}

/// Allocates memory of a pool, or of the device of the stream.
fn allocate_async(to: Out<CUdeviceptr>, bytes: usize, pool: Option<Handle>, stream: Handle) -> Res {
    to.required()?;
    let mut tables = world()?.lock();
    let stream = tables.resolve(stream)?;
    if tables.recording(stream)?.is_none() {
        tables.forbid_while_capturing()?;
    }
    let (context, device) = (tables.stream(stream)?.context, tables.stream(stream)?.device);
    let device = match pool {
        Some(pool) => tables.pools.get(&pool).ok_or(INVALID_VALUE)?.0,
        None => device,
    };
    to.put(allocate_for(tables, (context, device), Kind::Device, bytes, 0)?)
}

fn pool_of(tables: &Tables, device: CUdevice, pools: &[Handle]) -> Res<Handle> {
    let pool = usize::try_from(device).ok().and_then(|device| pools.get(device)).copied();
    pool.filter(|pool| tables.pools.contains_key(pool)).ok_or(INVALID_DEVICE)
}

/// An attribute of the memory at an address.
fn pointer_attribute(world: &World, tables: &Tables, attribute: c_int, addr: u64, to: Out<c_void>) -> Res {
    let variable = world.all.check(addr, 1).is_ok();
    let found = tables.allocation_at(addr);
    let Some((start, allocation)) = found else {
        // Variables of modules are in no allocation.
        return match attribute {
            2 if variable => to.cast().put(2u32),
            3 if variable => to.cast().put(addr),
            8 => to.cast().put(0u32),
            13 if variable => to.cast().put(1u32),
            _ => Err(INVALID_VALUE),
        };
    };
    let kind = allocation.kind;
    match attribute {
        1 => to.cast().put(allocation.context.unwrap_or(0)),
        2 => to.cast().put(if kind.is_host() { 1u32 } else { 2 }),
        3 => to.cast().put(addr),
        4 if matches!(kind, Kind::Host | Kind::Registered | Kind::Managed) => to.cast().put(addr),
        6 => to.cast().put(0u32),
        7 => to.cast().put(allocation.id),
        8 => to.cast().put(u32::from(kind == Kind::Managed)),
        9 => to.cast().put(allocation.device.map_or(-2, |device| device as c_int)),
        10 => to.cast().put(u32::from(kind == Kind::Device)),
        11 => to.cast().put(start),
        12 => to.cast().put(allocation.bytes as usize),
        13 => to.cast().put(1u32),
        14 => {
            let physical = allocation.physical.and_then(|handle| tables.physical.get(&handle));
            let team = allocation.physical.and_then(|handle| tables.teams.get(&handle));
            let types = physical.map(|physical| physical.properties.requested_handle_types as u64);
            to.cast().put(types.or(team.map(|team| team.is_shareable.into())).unwrap_or(0))
        }
        15 => to.cast().put(0u32),
        16 => {
            let device = tables.device_of(tables.current()?)?;
            to.cast().put(allocation.access_of(device))
        }
        _ => Err(INVALID_VALUE),
    }
}

api! {
    /// Allocates device memory. It holds no numbers that a program would use.
    fn cuMemAlloc_v2(to: Out<CUdeviceptr>, bytes: usize) {
        to.required()?;
        to.put(allocate(Kind::Device, bytes, 0)?)
    }

    /// Allocates rows of device memory.
    fn cuMemAllocPitch_v2(to: Out<CUdeviceptr>, pitch: Out<usize>, width: usize, rows: usize, _element: c_uint) {
        to.required()?;
        pitch.required()?;
        let row = width.checked_next_multiple_of(512).ok_or(INVALID_VALUE)?;
        let addr = allocate(Kind::Device, row.checked_mul(rows).ok_or(INVALID_VALUE)?, 0)?;
        pitch.put(row)?;
        to.put(addr)
    }

    /// Allocates memory that the host and all devices access at one address.
    fn cuMemAllocManaged(to: Out<CUdeviceptr>, bytes: usize, flags: c_uint) {
        to.required()?;
        if !matches!(flags, 1 | 2) {
            return Err(INVALID_VALUE);
        }
        to.put(allocate(Kind::Managed, bytes, flags)?)
    }

    /// Frees device or managed memory, after the work of its context.
    fn cuMemFree_v2(addr: CUdeviceptr) {
        if addr == 0 { world().map(drop) } else { free(addr, &[Kind::Device, Kind::Managed]) }
    }

    /// Allocates memory on the device of the stream; it can be used at once.
    fn cuMemAllocAsync(to: Out<CUdeviceptr>, bytes: usize, stream: Handle) {
        allocate_async(to, bytes, None, stream)
    }

    /// Allocates memory of a pool; it can be used at once.
    fn cuMemAllocFromPoolAsync(to: Out<CUdeviceptr>, bytes: usize, pool: Handle, stream: Handle) {
        allocate_async(to, bytes, Some(pool), stream)
    }

    /// Frees memory in stream order. In a capture it is left to the end of its context, since the
    /// graph may run again.
    fn cuMemFreeAsync(addr: CUdeviceptr, stream: Handle) {
        let world = world()?;
        let mut tables = world.lock();
        let stream = tables.resolve(stream)?;
        if addr == 0 {
            return Ok(());
        }
        let kind = tables.allocations.get(&addr).ok_or(INVALID_VALUE)?.kind;
        if kind != Kind::Device {
            return Err(INVALID_VALUE);
        }
        if tables.recording(stream)?.is_some() {
            return Ok(());
        }
        tables.forbid_while_capturing()?;
        let allocation = Arc::new(Mutex::new(tables.remove_allocation(addr)));
        submit(world, tables, stream, Work::Free(allocation)).map(drop)
    }

    /// Allocates page-locked host memory, which all devices may access.
    fn cuMemHostAlloc(to: Out<u64>, bytes: usize, flags: c_uint) {
        to.required()?;
        if flags > 7 {
            return Err(INVALID_VALUE);
        }
        to.put(allocate(Kind::Host, bytes, flags)?)
    }

    /// The same without flags.
    fn cuMemAllocHost_v2(to: Out<u64>, bytes: usize) {
        to.required()?;
        to.put(allocate(Kind::Host, bytes, 0)?)
    }

    /// Frees page-locked host memory, after the work of its context.
    fn cuMemFreeHost(addr: u64) {
        if addr == 0 { Err(INVALID_VALUE) } else { free(addr, &[Kind::Host]) }
    }

    /// Makes memory of the program's page-locked, so that all devices may access it at its address.
    fn cuMemHostRegister_v2(addr: u64, bytes: usize, flags: c_uint) {
        register(addr, bytes, flags)
    }

    /// Ends that, after the work of all contexts.
    fn cuMemHostUnregister(addr: u64) {
        if addr == 0 {
            return Err(INVALID_VALUE);
        }
        free(addr, &[Kind::Registered]).map_err(|code| match code {
            INVALID_VALUE => HOST_MEMORY_NOT_REGISTERED,
            other => other,
        })
    }

    /// The device address of page-locked host memory: the same.
    fn cuMemHostGetDevicePointer_v2(to: Out<CUdeviceptr>, addr: u64, flags: c_uint) {
        let tables = world()?.lock();
        tables.current()?;
        let (_, allocation) = tables.allocation_at(addr).ok_or(INVALID_VALUE)?;
        if flags != 0 || !matches!(allocation.kind, Kind::Host | Kind::Registered | Kind::Managed) {
            return Err(INVALID_VALUE);
        }
        to.put(addr)
    }

    /// The flags of page-locked host memory.
    fn cuMemHostGetFlags(flags: Out<c_uint>, addr: u64) {
        let tables = world()?.lock();
        let (_, allocation) = tables.allocation_at(addr).ok_or(INVALID_VALUE)?;
        if !allocation.kind.is_host() {
            return Err(INVALID_VALUE);
        }
        // With unified addresses all of it is portable and mapped.
        flags.put(allocation.host_flags | 3)
    }

    /// Free and total memory of the current device, in bytes.
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let world = world()?;
        let tables = world.lock();
        let device = tables.device_of(tables.current()?)?;
        free.put_optional((world.config.memory_bytes - tables.used[device]) as usize);
        total.put_optional(world.config.memory_bytes as usize);
        Ok(())
    }

    /// The allocation that holds an address.
    fn cuMemGetAddressRange_v2(base: Out<CUdeviceptr>, bytes: Out<usize>, addr: CUdeviceptr) {
        let tables = world()?.lock();
        let (start, allocation) = tables.allocation_at(addr).ok_or(NOT_FOUND)?;
        base.put_optional(start);
        bytes.put_optional(allocation.bytes as usize);
        Ok(())
    }

    /// A fact about an address.
    fn cuPointerGetAttribute(to: Out<c_void>, attribute: c_int, addr: CUdeviceptr) {
        let world = world()?;
        to.required()?;
        pointer_attribute(world, &world.lock(), attribute, addr, to)
    }

    /// Facts about an address. A fact that it does not have is 0.
    fn cuPointerGetAttributes(count: c_uint, attributes: In<c_int>, to: In<Out<c_void>>, addr: CUdeviceptr) {
        let world = world()?;
        let tables = world.lock();
        let (attributes, to) = (attributes.get_all(count as usize)?, to.get_all(count as usize)?);
        for (attribute, to) in attributes.into_iter().zip(to) {
            to.required()?;
            if pointer_attribute(world, &tables, attribute, addr, to).is_err() {
                match attribute {
                    1 | 3 | 4 | 5 | 7 | 11 | 12 | 14 | 17 => to.cast().put(0u64)?,
                    9 => to.cast().put(-2i32)?,
                    _ => to.cast().put(0u32)?,
                }
            }
        }
        Ok(())
    }

    /// Sets the only attribute that can be set, which changes nothing.
    fn cuPointerSetAttribute(value: In<c_void>, attribute: c_int, addr: CUdeviceptr) {
        let tables = world()?.lock();
        tables.allocation_at(addr).ok_or(INVALID_VALUE)?;
        if attribute != 6 || value.is_null() { Err(INVALID_VALUE) } else { Ok(()) }
    }

    /// Copies from host to device memory, in the default stream, and waits.
    fn cuMemcpyHtoD_v2(dst: CUdeviceptr, src: u64, bytes: usize) {
        copy_at(0, (dst, Must::BeDevice), (src, Must::Nothing), bytes, Wait::Done)
    }

    /// Copies from device to host memory, in the default stream, and waits.
    fn cuMemcpyDtoH_v2(dst: u64, src: CUdeviceptr, bytes: usize) {
        copy_at(0, (dst, Must::Nothing), (src, Must::BeDevice), bytes, Wait::Done)
    }

    /// Copies device memory, in the default stream.
    fn cuMemcpyDtoD_v2(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize) {
        copy_at(0, (dst, Must::BeDevice), (src, Must::BeDevice), bytes, Wait::IfPageable)
    }

    /// Copies memory, in the default stream, and waits.
    fn cuMemcpy(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize) {
        copy_at(0, (dst, Must::Nothing), (src, Must::Nothing), bytes, Wait::Done)
    }

    /// Copies between devices, in the default streams of the current context and of both others.
    fn cuMemcpyPeer(dst: CUdeviceptr, to: Handle, src: CUdeviceptr, from: Handle, bytes: usize) {
        copy_between((dst, to), (src, from), bytes)
    }

    /// Copies from host to device memory.
    fn cuMemcpyHtoDAsync_v2(dst: CUdeviceptr, src: u64, bytes: usize, stream: Handle) {
        copy_at(stream, (dst, Must::BeDevice), (src, Must::Nothing), bytes, Wait::IfPageable)
    }

    /// Copies from device to host memory.
    fn cuMemcpyDtoHAsync_v2(dst: u64, src: CUdeviceptr, bytes: usize, stream: Handle) {
        copy_at(stream, (dst, Must::Nothing), (src, Must::BeDevice), bytes, Wait::IfPageable)
    }

    /// Copies device memory.
    fn cuMemcpyDtoDAsync_v2(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: Handle) {
        copy_at(stream, (dst, Must::BeDevice), (src, Must::BeDevice), bytes, Wait::IfPageable)
    }

    /// Copies memory. Waits for a copy from host memory to host memory.
    fn cuMemcpyAsync(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: Handle) {
        copy_at(stream, (dst, Must::Nothing), (src, Must::Nothing), bytes, Wait::IfHost)
    }

    /// Copies between devices.
    fn cuMemcpyPeerAsync(dst: CUdeviceptr, to: Handle, src: CUdeviceptr, from: Handle, bytes: usize, stream: Handle) {
        let mut tables = world()?.lock();
        tables.context(to)?;
        tables.context(from)?;
        drop(tables);
        copy_at(stream, (dst, Must::BeDevice), (src, Must::BeDevice), bytes, Wait::IfPageable)
    }

    /// Copies rows, in the default stream, and waits. Arrays are not supported.
    fn cuMemcpy2D_v2(what: In<Memcpy2D>) {
        copy_2d(0, what, Wait::Done)
    }

    /// The same for any alignment.
    fn cuMemcpy2DUnaligned_v2(what: In<Memcpy2D>) {
        copy_2d(0, what, Wait::Done)
    }

    /// Copies rows. Arrays are not supported.
    fn cuMemcpy2DAsync_v2(what: In<Memcpy2D>, stream: Handle) {
        copy_2d(stream, what, Wait::IfHost)
    }

    /// Sets bytes, in the default stream. Waits where the host can access them.
    fn cuMemsetD8_v2(dst: CUdeviceptr, value: u8, count: usize) {
        fill(0, dst, value.into(), 1, count, Wait::Done)
    }

    /// Sets 16-bit words, in the default stream. Waits where the host can access them.
    fn cuMemsetD16_v2(dst: CUdeviceptr, value: c_ushort, count: usize) {
        fill(0, dst, value.into(), 2, count, Wait::Done)
    }

    /// Sets 32-bit words, in the default stream. Waits where the host can access them.
    fn cuMemsetD32_v2(dst: CUdeviceptr, value: c_uint, count: usize) {
        fill(0, dst, value, 4, count, Wait::Done)
    }

    /// Sets bytes.
    fn cuMemsetD8Async(dst: CUdeviceptr, value: u8, count: usize, stream: Handle) {
        fill(stream, dst, value.into(), 1, count, Wait::IfPageable)
    }

    /// Sets 16-bit words.
    fn cuMemsetD16Async(dst: CUdeviceptr, value: c_ushort, count: usize, stream: Handle) {
        fill(stream, dst, value.into(), 2, count, Wait::IfPageable)
    }

    /// Sets 32-bit words.
    fn cuMemsetD32Async(dst: CUdeviceptr, value: c_uint, count: usize, stream: Handle) {
        fill(stream, dst, value, 4, count, Wait::IfPageable)
    }

    /// Sets rows of bytes, in the default stream. Waits where the host can access them.
    fn cuMemsetD2D8_v2(dst: CUdeviceptr, pitch: usize, value: u8, width: usize, rows: usize) {
        fill_2d(0, dst, pitch, value.into(), 1, [width, rows], Wait::Done)
    }

    /// Sets rows of 16-bit words, in the default stream. Waits where the host can access them.
    fn cuMemsetD2D16_v2(dst: CUdeviceptr, pitch: usize, value: c_ushort, width: usize, rows: usize) {
        fill_2d(0, dst, pitch, value.into(), 2, [width, rows], Wait::Done)
    }

    /// Sets rows of 32-bit words, in the default stream. Waits where the host can access them.
    fn cuMemsetD2D32_v2(dst: CUdeviceptr, pitch: usize, value: c_uint, width: usize, rows: usize) {
        fill_2d(0, dst, pitch, value, 4, [width, rows], Wait::Done)
    }

    /// Sets rows of bytes.
    fn cuMemsetD2D8Async(dst: CUdeviceptr, pitch: usize, value: u8, width: usize, rows: usize, stream: Handle) {
        fill_2d(stream, dst, pitch, value.into(), 1, [width, rows], Wait::IfPageable)
    }

    /// Sets rows of 32-bit words.
    fn cuMemsetD2D32Async(dst: CUdeviceptr, pitch: usize, value: c_uint, width: usize, rows: usize, stream: Handle) {
        fill_2d(stream, dst, pitch, value, 4, [width, rows], Wait::IfPageable)
    }

    /// Advises about managed memory, which changes nothing.
    fn cuMemAdvise(addr: CUdeviceptr, _bytes: usize, _advice: c_int, _device: CUdevice) {
        managed(addr)
    }

    /// Advises about managed memory, which changes nothing.
    fn cuMemAdvise_v2(addr: CUdeviceptr, _bytes: usize, _advice: c_int, _location: CUmemLocation) {
        managed(addr)
    }

    /// Moves managed memory, which changes nothing.
    fn cuMemPrefetchAsync(addr: CUdeviceptr, _bytes: usize, _device: CUdevice, stream: Handle) {
        world()?.lock().resolve(stream)?;
        managed(addr)
    }

    /// Moves managed memory, which changes nothing.
    fn cuMemPrefetchAsync_v2(
        addr: CUdeviceptr,
        _bytes: usize,
        _location: CUmemLocation,
        _flags: c_uint,
        stream: Handle,
    ) {
        world()?.lock().resolve(stream)?;
        managed(addr)
    }

    /// The memory pool that a device has from the beginning.
    fn cuDeviceGetDefaultMemPool(pool: Out<Handle>, device: CUdevice) {
        let tables = world()?.lock();
        pool.put(pool_of(&tables, device, &tables.default_pools)?)
    }

    /// The memory pool that a device uses.
    fn cuDeviceGetMemPool(pool: Out<Handle>, device: CUdevice) {
        let tables = world()?.lock();
        pool.put(pool_of(&tables, device, &tables.current_pools)?)
    }

    /// Sets the memory pool that a device uses.
    fn cuDeviceSetMemPool(device: CUdevice, pool: Handle) {
        let world = world()?;
        world.device(device)?;
        let mut tables = world.lock();
        tables.pools.get(&pool).ok_or(INVALID_VALUE)?;
        tables.current_pools[device as usize] = pool;
        Ok(())
    }

    /// Makes a memory pool.
    fn cuMemPoolCreate(pool: Out<Handle>, properties: In<CUmemPoolProps>) {
        let world = world()?;
        let properties = properties.get()?;
        pool.required()?;
        if properties.kind != 1 || properties.location.kind != 1 || properties.handle_types != 0 {
            return Err(NOT_SUPPORTED);
        }
        world.device(properties.location.id)?;
        let mut tables = world.lock();
        let handle = tables.new_handle();
        tables.pools.insert(handle, (properties.location.id as usize, 0));
        pool.put(handle)
    }

    /// Destroys a memory pool; its memory stays.
    fn cuMemPoolDestroy(pool: Handle) {
        let mut tables = world()?.lock();
        if tables.default_pools.contains(&pool) {
            return Err(INVALID_VALUE);
        }
        let (device, _) = tables.pools.remove(&pool).ok_or(INVALID_VALUE)?;
        if tables.current_pools[device] == pool {
            tables.current_pools[device] = tables.default_pools[device];
        }
        Ok(())
    }

    /// Returns unused memory of a pool, of which there is none.
    fn cuMemPoolTrimTo(pool: Handle, _keep: usize) {
        world()?.lock().pools.get(&pool).map(drop).ok_or(INVALID_VALUE)
    }

    /// Sets an attribute of a pool. Only the release threshold is kept.
    fn cuMemPoolSetAttribute(pool: Handle, attribute: c_int, value: In<c_void>) {
        let mut tables = world()?.lock();
        let (_, threshold) = tables.pools.get_mut(&pool).ok_or(INVALID_VALUE)?;
        match attribute {
            1..=3 => value.cast::<c_int>().get().map(drop),
            4 => {
                *threshold = value.cast::<u64>().get()?;
                Ok(())
            }
            5..=8 => value.cast::<u64>().get().map(drop),
            _ => Err(INVALID_VALUE),
        }
    }

    /// An attribute of a pool. Memory in use is that of the device.
    fn cuMemPoolGetAttribute(pool: Handle, attribute: c_int, value: Out<c_void>) {
        let tables = world()?.lock();
        let (device, threshold) = *tables.pools.get(&pool).ok_or(INVALID_VALUE)?;
        match attribute {
            1..=3 => value.cast().put(1i32),
            4 => value.cast().put(threshold),
            5..=8 => value.cast().put(tables.used[device]),
            _ => Err(INVALID_VALUE),
        }
    }
}

fn managed(addr: u64) -> Res {
    let tables = world()?.lock();
    let (_, allocation) = tables.allocation_at(addr).ok_or(INVALID_VALUE)?;
    if allocation.kind == Kind::Managed { Ok(()) } else { Err(INVALID_VALUE) }
}

//! Virtual memory management, and memory of other processes.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use epoxide_vgpu::Reservation;
use rustix::fs::{Mode, OFlags, fstat, open};

use super::api;
use super::memory::{charge, next_number};
use super::multicast::{self, Team};
use crate::abi::*;
use crate::world::{Allocation, Kind, Opened, Physical, Shared, Tables, World, memory_code, world};

/// The unit of physical memory and of mappings, in bytes.
pub(super) const GRANULARITY: u64 = 2 << 20;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(super) const FILE_DESCRIPTOR: c_int = 1;
/// Begins every [`IpcHandle`].
const MAGIC: u64 = u64::from_le_bytes(*b"vgpu-ipc");

pub(super) fn os(_: rustix::io::Errno) -> CUresult {
    OPERATING_SYSTEM
}

fn check_properties(world: &World, properties: &CUmemAllocationProp) -> Res {
    if properties.kind != 1 || properties.location.kind != 1 {
        return Err(INVALID_VALUE);
    }
    if !matches!(properties.requested_handle_types, 0 | FILE_DESCRIPTOR) {
        return Err(NOT_SUPPORTED);
    }
    world.device(properties.location.id).map(drop)
}

/// The starts of the mappings that make up a range.
fn mappings(tables: &Tables, addr: u64, bytes: u64) -> Res<Vec<u64>> {
    let end = addr.checked_add(bytes).filter(|end| *end > addr).ok_or(INVALID_VALUE)?;
    let mut at = addr;
    let mut found = vec![];
    while at < end {
        let mapping = tables.allocations.get(&at).filter(|mapping| mapping.kind == Kind::Mapping);
        let next = at + mapping.ok_or(INVALID_VALUE)?.bytes;
        found.push(at);
        at = next;
    }
    if at == end { Ok(found) } else { Err(INVALID_VALUE) }
}

fn import(world: &World, tables: &mut Tables, fd: OwnedFd) -> Res<u64> {
    if let Some(handle) = multicast::import(tables, &fd)? {
        return Ok(handle);
    }
    let bytes = u64::try_from(fstat(&fd).map_err(os)?.st_size).unwrap_or(0);
    // A multicast object of another process.
    if bytes == 0 {
        return Err(NOT_SUPPORTED);
    }
    let copy = rustix::io::fcntl_dupfd_cloexec(&fd, 0).map_err(os)?;
    let region = world.all.import(copy, bytes, "imported memory").map_err(memory_code)?;
    let location = CUmemLocation { kind: 1, id: 0 };
    let properties = CUmemAllocationProp {
        kind: 1,
        requested_handle_types: FILE_DESCRIPTOR,
        location,
        win32: 0,
        flags: [0; 8],
    };
    let handle = tables.new_handle() as u64;
    let physical = Physical { fd, bytes, device: None, properties, users: 1, region };
    tables.physical.insert(handle, physical);
    Ok(handle)
}

/// A number of an [`IpcHandle`].
fn word(handle: &IpcHandle, at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&handle.0[at * 8..at * 8 + 8]);
    u64::from_le_bytes(bytes)
}

api! {
    /// The unit of physical memory, in bytes.
    fn cuMemGetAllocationGranularity(bytes: Out<usize>, properties: In<CUmemAllocationProp>, option: c_int) {
        check_properties(world()?, &properties.get()?)?;
        if !matches!(option, 0 | 1) {
            return Err(INVALID_VALUE);
        }
        bytes.put(GRANULARITY as usize)
    }

    /// Reserves addresses. A requested address is ignored.
    fn cuMemAddressReserve(
        addr: Out<CUdeviceptr>,
        bytes: usize,
        align: usize,
        _wish: CUdeviceptr,
        flags: c_ulonglong,
    ) {
        let world = world()?;
        addr.required()?;
        let (bytes, align) = (bytes as u64, (align as u64).max(GRANULARITY));
        if bytes == 0 || !bytes.is_multiple_of(4096) || !align.is_power_of_two() || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let reservation = Reservation::new(bytes, align).map_err(memory_code)?;
        let start = reservation.addr();
        world.lock().reservations.insert(start, reservation);
        addr.put(start)
    }

    /// Frees reserved addresses, in which nothing is mapped.
    fn cuMemAddressFree(addr: CUdeviceptr, bytes: usize) {
        let mut tables = world()?.lock();
        let reservation = tables.reservations.get(&addr).ok_or(INVALID_VALUE)?;
        let end = addr + reservation.bytes();
        if reservation.bytes() != bytes as u64 || tables.allocations.range(addr..end).next().is_some() {
            return Err(INVALID_VALUE);
        }
        tables.reservations.remove(&addr);
        Ok(())
    }

    /// Allocates physical memory.
    fn cuMemCreate(handle: Out<u64>, bytes: usize, properties: In<CUmemAllocationProp>, flags: c_ulonglong) {
        let world = world()?;
        handle.required()?;
        let (bytes, properties) = (bytes as u64, properties.get()?);
        check_properties(world, &properties)?;
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let device = properties.location.id as usize;
        let mut tables = world.lock();
        charge(world, &mut tables, device, bytes)?;
        drop(tables);
        let made = world.all.alloc(bytes, &format!("physical memory {}", next_number())).and_then(|region| {
            Ok((region.export()?, region))
        });
        let mut tables = world.lock();
        let (fd, region) = made.map_err(|error| {
            tables.used[device] -= bytes;
            memory_code(error)
        })?;
        let new = tables.new_handle() as u64;
        let physical = Physical { fd, bytes, device: Some(device), properties, users: 1, region };
        tables.physical.insert(new, physical);
        handle.put(new)
    }

    /// Ends the use of a handle. The memory stays while it is mapped.
    fn cuMemRelease(handle: u64) {
        let world = world()?;
        let mut tables = world.lock();
        let mapped = tables.allocations.values().filter(|mapping| mapping.physical == Some(handle)).count();
        let bound = tables.teams.values().flat_map(Team::physical).filter(|bound| *bound == handle).count();
        // The other uses are those of the handle.
        if *tables.users_of(handle)? as usize <= mapped + bound {
            return Err(INVALID_VALUE);
        }
        tables.release_physical(handle);
        // Calls that wait for the devices of a multicast object end with it.
        world.done.notify_all();
        Ok(())
    }

    /// The handle of a mapping, with one use more.
    fn cuMemRetainAllocationHandle(handle: Out<u64>, addr: u64) {
        let mut tables = world()?.lock();
        handle.required()?;
        let own = tables.allocation_at(addr).and_then(|(_, mapping)| mapping.physical).ok_or(INVALID_VALUE)?;
        *tables.users_of(own)? += 1;
        handle.put(own)
    }

    /// The properties of physical memory.
    fn cuMemGetAllocationPropertiesFromHandle(properties: Out<CUmemAllocationProp>, handle: u64) {
        properties.put(world()?.lock().physical.get(&handle).ok_or(INVALID_VALUE)?.properties)
    }

    /// Maps physical memory, or a multicast object of which all devices have been added, at a
    /// reserved address. Waits for the devices. No device may access it yet.
    fn cuMemMap(addr: CUdeviceptr, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong) {
        let world = world()?;
        let mut tables = world.lock();
        let (bytes, offset, id) = (bytes as u64, offset as u64, next_number());
        let is_multicast = tables.teams.contains_key(&handle);
        let is_formed = match tables.physical.get(&handle) {
            Some(physical) => offset == 0 && bytes == physical.bytes && addr.is_multiple_of(4096),
            None => is_multicast && [addr, bytes, offset].iter().all(|at| at.is_multiple_of(GRANULARITY)),
        };
        if flags != 0 || !is_formed {
            return Err(INVALID_VALUE);
        }
        if is_multicast {
            tables = multicast::wait_until_full(world, tables, handle)?;
        }
        let (_, reservation) = tables.reservations.range(..=addr).next_back().ok_or(INVALID_VALUE)?;
        let end = addr.checked_add(bytes).ok_or(INVALID_VALUE)?;
        let last = tables.allocations.range(..end).next_back();
        if last.is_some_and(|(start, other)| start + other.bytes > addr) {
            return Err(ALREADY_MAPPED);
        }
        let (label, physical) = (format!("mapping {id}"), tables.physical.get(&handle));
        let device = physical.and_then(|physical| physical.device);
        let region = match physical {
            Some(physical) => {
                let fd = rustix::io::fcntl_dupfd_cloexec(&physical.fd, 0).map_err(os)?;
                world.all.import_at((reservation, addr), fd, bytes, &label).map_err(memory_code)?
            }
            None => world.map_team(&tables, handle, (addr, bytes, offset), &label)?,
        };
        *tables.users_of(handle)? += 1;
        let mapping = Allocation {
            kind: Kind::Mapping,
            context: None,
            device,
            bytes,
            id,
            host_flags: 0,
            charged: false,
            region,
            shared: vec![],
            physical: Some(handle),
            exported: None,
            opened: None,
        };
        tables.allocations.insert(addr, mapping);
        Ok(())
    }

    /// Ends the mappings of a range. Its physical memory is free once the addresses are used or
    /// freed.
    fn cuMemUnmap(addr: CUdeviceptr, bytes: usize) {
        let mut tables = world()?.lock();
        let gone = mappings(&tables, addr, bytes as u64)?;
        let gone: Vec<Option<Allocation>> = gone.into_iter().map(|at| tables.remove_allocation(at)).collect();
        drop(tables);
        drop(gone);
        Ok(())
    }

    /// Lets devices access the mappings of a range.
    fn cuMemSetAccess(addr: CUdeviceptr, bytes: usize, access: In<CUmemAccessDesc>, count: usize) {
        let world = world()?;
        let mut tables = world.lock();
        let access = access.get_all(count)?;
        let mappings = mappings(&tables, addr, bytes as u64)?;
        for CUmemAccessDesc { location, flags } in access {
            if location.kind != 1 {
                return Err(NOT_SUPPORTED);
            }
            if !matches!(flags, 0 | 1 | 3) {
                return Err(INVALID_VALUE);
            }
            let memory = &world.device(location.id)?.memory;
            let device = Some(location.id as usize);
            for at in &mappings {
                let mapping = tables.allocations.get_mut(at).ok_or(INVALID_VALUE)?;
                mapping.shared.retain(|shared| shared.device != device);
                if flags != 0 {
                    let region = memory.share(&mapping.region).map_err(memory_code)?;
                    mapping.shared.push(Shared { device, access: flags as u32, _region: region });
                }
            }
        }
        Ok(())
    }

    /// How a device may access a mapping: 3, 1 or 0. Any other memory has 0.
    fn cuMemGetAccess(flags: Out<c_ulonglong>, location: In<CUmemLocation>, addr: CUdeviceptr) {
        let world = world()?;
        let location = location.get()?;
        world.device(location.id)?;
        let tables = world.lock();
        let (_, allocation) = tables.allocation_at(addr).ok_or(INVALID_VALUE)?;
        let is_mapping = allocation.kind == Kind::Mapping;
        flags.put(if is_mapping { allocation.access_of(location.id as usize).into() } else { 0 })
    }

    /// A file descriptor that stands for physical memory, or for a multicast object within the
    /// process.
    fn cuMemExportToShareableHandle(to: Out<c_void>, handle: u64, kind: c_int, flags: c_ulonglong) {
        let mut tables = world()?.lock();
        to.required()?;
        if !tables.physical.contains_key(&handle) && !tables.teams.contains_key(&handle) {
            return Err(INVALID_VALUE);
        }
        if kind != FILE_DESCRIPTOR || flags != 0 {
            return Err(NOT_SUPPORTED);
        }
        let fd = match tables.teams.get_mut(&handle) {
            Some(team) => team.export()?,
            None => {
                let physical = tables.physical.get(&handle).ok_or(INVALID_VALUE)?;
                if physical.properties.requested_handle_types & FILE_DESCRIPTOR == 0 {
                    return Err(INVALID_VALUE);
                }
                rustix::io::fcntl_dupfd_cloexec(&physical.fd, 0).map_err(os)?
            }
        };
        to.cast::<c_int>().put(std::os::fd::IntoRawFd::into_raw_fd(fd))
    }

    /// The physical memory that a file descriptor stands for. The caller keeps the descriptor.
    fn cuMemImportFromShareableHandle(handle: Out<u64>, shared: usize, kind: c_int) {
        let world = world()?;
        handle.required()?;
        let raw = c_int::try_from(shared).map_err(|_| INVALID_VALUE)?;
        if kind != FILE_DESCRIPTOR {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: the caller passes an open file descriptor, which it keeps open for the call.
        let fd = unsafe { BorrowedFd::borrow_raw(raw) };
        let own = rustix::io::fcntl_dupfd_cloexec(fd, 0).map_err(|_| INVALID_VALUE)?;
        handle.put(import(world, &mut world.lock(), own)?)
    }

    /// A handle by which another process of this user opens an allocation.
    fn cuIpcGetMemHandle(handle: Out<IpcHandle>, addr: CUdeviceptr) {
        let mut tables = world()?.lock();
        handle.required()?;
        let (start, _) = tables.allocation_at(addr).ok_or(INVALID_VALUE)?;
        let allocation = tables.allocations.get_mut(&start).ok_or(INVALID_VALUE)?;
        if allocation.kind != Kind::Device {
            return Err(INVALID_VALUE);
        }
        if allocation.exported.is_none() {
            allocation.exported = Some(allocation.region.export().map_err(memory_code)?);
        }
        let fd = allocation.exported.as_ref().ok_or(OPERATING_SYSTEM)?;
        let facts = fstat(fd).map_err(os)?;
        let words = [
            MAGIC,
            u64::from(std::process::id()),
            fd.as_raw_fd() as u64,
            allocation.bytes,
            facts.st_dev,
            facts.st_ino,
        ];
        let mut bytes = [0; 64];
        for (at, word) in words.into_iter().enumerate() {
            bytes[at * 8..at * 8 + 8].copy_from_slice(&word.to_le_bytes());
        }
        handle.put(IpcHandle(bytes))
    }

    /// Maps an allocation of another process, if the current context has not opened it already.
    fn cuIpcOpenMemHandle_v2(to: Out<CUdeviceptr>, handle: IpcHandle, _flags: c_uint) {
        let world = world()?;
        to.required()?;
        let mut tables = world.lock();
        let context = tables.current()?;
        let device = tables.device_of(context)?;
        if word(&handle, 0) != MAGIC {
            return Err(INVALID_VALUE);
        }
        let file = (word(&handle, 4), word(&handle, 5));
        if let Some((addr, opened)) = tables.opened_by(context, file) {
            to.put(addr)?;
            opened.count += 1;
            return Ok(());
        }
        let path = format!("/proc/{}/fd/{}", word(&handle, 1), word(&handle, 2));
        let fd = open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|_| INVALID_VALUE)?;
        let facts = fstat(&fd).map_err(os)?;
        if (facts.st_dev, facts.st_ino) != file {
            return Err(INVALID_VALUE);
        }
        let (bytes, id) = (word(&handle, 3), next_number());
        let memory = &world.devices[device].memory;
        let region = memory.import(fd, bytes, &format!("IPC memory {id}")).map_err(memory_code)?;
        let shared = world.share(&tables, Some(device), &region)?;
        let addr = region.addr();
        let allocation = Allocation {
            kind: Kind::Ipc,
            context: Some(context),
            device: Some(device),
            bytes,
            id,
            host_flags: 0,
            charged: false,
            region,
            shared,
            physical: None,
            exported: None,
            opened: Some(Opened { file, count: 1 }),
        };
        tables.allocations.insert(addr, allocation);
        to.put(addr)
    }

    /// Ends the mapping of an allocation of another process, once it is closed as often as it was
    /// opened.
    fn cuIpcCloseMemHandle(addr: CUdeviceptr) {
        let mut tables = world()?.lock();
        tables.current()?;
        let allocation = tables.allocations.get_mut(&addr).ok_or(INVALID_VALUE)?;
        let opened = allocation.opened.as_mut().ok_or(INVALID_VALUE)?;
        opened.count -= 1;
        if opened.count > 0 {
            return Ok(());
        }
        let gone = tables.remove_allocation(addr);
        drop(tables);
        drop(gone);
        Ok(())
    }
}

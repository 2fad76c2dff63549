//! Multicast objects: memory of several devices behind one range of addresses.
//!
//! `cuMemMap` maps an object as it maps physical memory. Codes are those that the manual names.

use std::ffi::{c_int, c_ulonglong};
use std::os::fd::OwnedFd;
use std::sync::{Arc, MutexGuard};

use epoxide_vgpu::{MulticastObject, Region};
use rustix::fs::{MemfdFlags, fstat, memfd_create};

use super::api;
use super::sharing::{FILE_DESCRIPTOR, GRANULARITY, os};
use crate::abi::*;
use crate::world::{Tables, World, memory_code, world};

/// A multicast object.
pub(crate) struct Team {
    pub(crate) object: MulticastObject,
    /// Devices that memory is bound on.
    devices: u32,
    pub(crate) is_shareable: bool,
    /// The file that stands for it where it is exported.
    pub(crate) token: Option<OwnedFd>,
    /// Its handle and its mappings.
    pub(crate) users: u32,
    bound: Vec<Bound>,
}

/// Memory that is bound.
struct Bound {
    device: u32,
    at: u64,
    bytes: u64,
    /// The handle of physical memory.
    physical: Option<u64>,
}

impl Team {
    pub(crate) fn is_full(&self) -> bool {
        self.object.devices().len() == self.devices as usize
    }

    /// The handles of the physical memory that is bound.
    pub(crate) fn physical(&self) -> Vec<u64> {
        self.bound.iter().filter_map(|bound| bound.physical).collect()
    }

    /// A file descriptor that stands for it.
    pub(crate) fn export(&mut self) -> Res<OwnedFd> {
        if !self.is_shareable {
            return Err(INVALID_VALUE);
        }
        if self.token.is_none() {
            self.token = Some(memfd_create("vgpu-multicast", MemfdFlags::CLOEXEC).map_err(os)?);
        }
        let token = self.token.as_ref().ok_or(OPERATING_SYSTEM)?;
        rustix::io::fcntl_dupfd_cloexec(token, 0).map_err(os)
    }
}

/// The object that a file descriptor stands for, with one use more.
pub(crate) fn import(tables: &mut Tables, fd: &OwnedFd) -> Res<Option<u64>> {
    let wanted = fstat(fd).map_err(os)?;
    for (handle, team) in &mut tables.teams {
        let Some(token) = &team.token else { continue };
        let facts = fstat(token).map_err(os)?;
        if (facts.st_dev, facts.st_ino) == (wanted.st_dev, wanted.st_ino) {
            team.users += 1;
            return Ok(Some(*handle));
        }
    }
    Ok(None)
}

/// Whether lengths and offsets have the granularity.
fn are_units(values: &[u64]) -> bool {
    values.iter().all(|value| value.is_multiple_of(GRANULARITY))
}

fn check_properties(properties: &CUmulticastObjectProp) -> Res {
    let CUmulticastObjectProp { num_devices, size, handle_types, flags } = *properties;
    if num_devices == 0 || size == 0 || flags != 0 {
        return Err(INVALID_VALUE);
    }
    if !matches!(handle_types, 0 | 1) { Err(NOT_SUPPORTED) } else { Ok(()) }
}

/// Waits until all devices of an object are added.
pub(crate) fn wait_until_full<'a>(
    world: &'a World,
    tables: MutexGuard<'a, Tables>,
    handle: u64,
) -> Res<MutexGuard<'a, Tables>> {
    let full = |tables: &mut Tables| match tables.teams.get(&handle) {
        Some(team) => Ok(team.is_full().then_some(())),
        None => Err(INVALID_VALUE),
    };
    Ok(world.wait(tables, full)?.0)
}

/// Memory that is to be bound: a file that maps it, its length, the offset in it, its label, its
/// device, whether it can be exported, and its handle.
struct Part {
    fd: OwnedFd,
    bytes: u64,
    from: u64,
    label: String,
    device: Option<usize>,
    is_shareable: bool,
    physical: Option<u64>,
}

/// The part of physical memory from an offset on.
fn part_of(tables: &Tables, handle: u64, from: u64) -> Res<Part> {
    let physical = tables.physical.get(&handle).ok_or(INVALID_VALUE)?;
    Ok(Part {
        fd: rustix::io::fcntl_dupfd_cloexec(&physical.fd, 0).map_err(os)?,
        bytes: physical.bytes,
        from,
        label: physical.region.label().to_owned(),
        device: physical.device,
        is_shareable: physical.properties.requested_handle_types & FILE_DESCRIPTOR != 0,
        physical: Some(handle),
    })
}

/// The part of the allocation at an address.
fn part_at(tables: &Tables, addr: u64) -> Res<Part> {
    let (start, allocation) = tables.allocation_at(addr).ok_or(INVALID_VALUE)?;
    match allocation.physical {
        Some(handle) => part_of(tables, handle, addr - start),
        None => Ok(Part {
            fd: allocation.region.export().map_err(memory_code)?,
            bytes: allocation.bytes,
            from: addr - start,
            label: allocation.region.label().to_owned(),
            device: allocation.device,
            is_shareable: true,
            physical: None,
        }),
    }
}

/// Binds memory on a device, that of the memory unless one is named.
fn bind(
    handle: u64,
    device: Option<CUdevice>,
    at: u64,
    part: impl FnOnce(&Tables) -> Res<Part>,
    bytes: u64,
    flags: c_ulonglong,
) -> Res {
    let world = world()?;
    if flags != 0 || bytes == 0 || !are_units(&[at, bytes]) {
        return Err(INVALID_VALUE);
    }
    if let Some(device) = device {
        world.device(device)?;
    }
    let mut tables = wait_until_full(world, world.lock(), handle)?;
    let part = part(&tables)?;
    let team = tables.teams.get(&handle).ok_or(INVALID_VALUE)?;
    // Imported memory has no device of its own: the call names one.
    let own = part.device.map(|device| device as u32);
    let named = device.map(|device| device as u32);
    let device = own.or(named).ok_or(INVALID_DEVICE)?;
    if named.is_some_and(|named| named != device) || !team.object.devices().contains(&device) {
        return Err(INVALID_DEVICE);
    }
    let outside = bytes > part.bytes || part.from > part.bytes - bytes;
    if !are_units(&[part.from]) || outside || team.is_shareable && !part.is_shareable {
        return Err(INVALID_VALUE);
    }
    let region = world.all.import(part.fd, part.bytes, &part.label).map_err(memory_code)?;
    team.object.bind(device, at, (Arc::new(region), part.from), bytes).map_err(memory_code)?;
    let team = tables.teams.get_mut(&handle).ok_or(INVALID_VALUE)?;
    team.bound.push(Bound { device, at, bytes, physical: part.physical });
    if let Some(physical) = part.physical.and_then(|handle| tables.physical.get_mut(&handle)) {
        physical.users += 1;
    }
    Ok(())
}

impl World {
    /// Maps an object from an offset on at a reserved address. No device may access it yet.
    pub(crate) fn map_team(
        &self,
        tables: &Tables,
        handle: u64,
        (addr, bytes, offset): (u64, u64, u64),
        label: &str,
    ) -> Res<Region> {
        let team = tables.teams.get(&handle).ok_or(INVALID_VALUE)?;
        let (_, reservation) = tables.reservations.range(..=addr).next_back().ok_or(INVALID_VALUE)?;
        let place = (reservation, addr);
        self.all.multicast_at(place, (&team.object, offset), bytes, label).map_err(memory_code)
    }
}

api! {
    /// The unit of multicast objects and of what is bound to them, in bytes.
    fn cuMulticastGetGranularity(bytes: Out<usize>, properties: In<CUmulticastObjectProp>, option: c_int) {
        world()?;
        check_properties(&properties.get()?)?;
        if !matches!(option, 0 | 1) {
            return Err(INVALID_VALUE);
        }
        bytes.put(GRANULARITY as usize)
    }

    /// Makes a multicast object.
    fn cuMulticastCreate(handle: Out<u64>, properties: In<CUmulticastObjectProp>) {
        let world = world()?;
        handle.required()?;
        let properties = properties.get()?;
        check_properties(&properties)?;
        let (bytes, devices) = (properties.size as u64, properties.num_devices);
        if !are_units(&[bytes]) || devices as usize > world.devices.len() {
            return Err(INVALID_VALUE);
        }
        let mut tables = world.lock();
        let new = tables.new_handle() as u64;
        let team = Team {
            object: MulticastObject::new(bytes),
            devices,
            is_shareable: properties.handle_types != 0,
            token: None,
            users: 1,
            bound: vec![],
        };
        tables.teams.insert(new, team);
        handle.put(new)
    }

    /// Adds a device to a multicast object, for as long as there is the object.
    fn cuMulticastAddDevice(handle: u64, device: CUdevice) {
        let world = world()?;
        world.device(device)?;
        let tables = world.lock();
        let team = tables.teams.get(&handle).ok_or(INVALID_VALUE)?;
        if team.is_full() {
            return Err(INVALID_VALUE);
        }
        team.object.add_device(device as u32).map_err(memory_code)?;
        world.done.notify_all();
        Ok(())
    }

    /// Binds physical memory on its device. Waits until all devices are added.
    fn cuMulticastBindMem(
        handle: u64,
        at: usize,
        memory: u64,
        from: usize,
        bytes: usize,
        flags: c_ulonglong,
    ) {
        bind(handle, None, at as u64, |tables| part_of(tables, memory, from as u64), bytes as u64, flags)
    }

    /// The same on a device that is named.
    fn cuMulticastBindMem_v2(
        handle: u64,
        device: CUdevice,
        at: usize,
        memory: u64,
        from: usize,
        bytes: usize,
        flags: c_ulonglong,
    ) {
        let part = |tables: &Tables| part_of(tables, memory, from as u64);
        bind(handle, Some(device), at as u64, part, bytes as u64, flags)
    }

    /// Binds memory at an address on its device. Waits until all devices are added.
    fn cuMulticastBindAddr(handle: u64, at: usize, addr: CUdeviceptr, bytes: usize, flags: c_ulonglong) {
        bind(handle, None, at as u64, |tables| part_at(tables, addr), bytes as u64, flags)
    }

    /// The same on a device that is named.
    fn cuMulticastBindAddr_v2(
        handle: u64,
        device: CUdevice,
        at: usize,
        addr: CUdeviceptr,
        bytes: usize,
        flags: c_ulonglong,
    ) {
        bind(handle, Some(device), at as u64, |tables| part_at(tables, addr), bytes as u64, flags)
    }

    /// Ends the bindings of a device's memory in a range.
    fn cuMulticastUnbind(handle: u64, device: CUdevice, at: usize, bytes: usize) {
        let world = world()?;
        world.device(device)?;
        let mut tables = world.lock();
        let (at, bytes, device) = (at as u64, bytes as u64, device as u32);
        let team = tables.teams.get_mut(&handle).ok_or(INVALID_VALUE)?;
        if !team.object.devices().contains(&device) {
            return Err(INVALID_DEVICE);
        }
        let whole = team.object.bytes();
        if bytes == 0 || !are_units(&[at, bytes]) || bytes > whole || at > whole - bytes {
            return Err(INVALID_VALUE);
        }
        let inside = |b: &mut Bound| b.device == device && b.at >= at && b.at + b.bytes <= at + bytes;
        let gone: Vec<u64> = team.bound.extract_if(.., inside).filter_map(|bound| bound.physical).collect();
        team.object.unbind(device, at, bytes);
        gone.into_iter().for_each(|physical| tables.release_physical(physical));
        Ok(())
    }
}

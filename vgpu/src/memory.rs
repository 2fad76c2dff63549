//! The memory a virtual GPU can address.
//!
//! Device addresses are host virtual addresses of this process. Every region is a shared mapping of
//! a memfd. It can be passed to another process as a file descriptor, and be mapped there at
//! another address. Peers map each other's pools this way.
//!
//! Soundness rests on two rules. Nothing here ever makes a Rust reference into a region, because
//! other threads and processes write the same bytes at any time. All access goes through
//! `AtomicX::from_ptr`, and that of copies through [`racing`]. And a mapping stays in place for as
//! long as a [`Table`] snapshot lists it. So a running kernel that races with the drop of a
//! [`Region`] touches stale memory, never unmapped memory.
//!
//! Fresh memory is no region yet. Its first contents are written before a table lists it: a kernel
//! with the address of a freed region may access a new one there as soon as it is listed.

use std::alloc::{Layout, handle_alloc_error};
use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::check::Checker;
use crate::check::record::ViolationAt;
use crate::check::shadow::{Names, Shadow};
use crate::check::world::World;
use crate::fault::FaultKind;
use crate::kernel::Globals;
use crate::memory_error::{MemoryError, NearRegion, PAGE, Spot};
use crate::module::Module;
use crate::multicast::{MulticastObject, Target, Targets, Window};
use crate::racing;
use crate::seeds::mix;

use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

fn os(call: &'static str) -> impl Fn(rustix::io::Errno) -> MemoryError {
    move |e| MemoryError::Os { call, errno: e.raw_os_error(), message: e.to_string() }
}

/// Mapped memory.
#[derive(Debug)]
pub(crate) struct Mapping {
    ptr: NonNull<u8>,
    /// Bytes mapped (whole pages, unless it is the program's).
    mapped: usize,
    unmapped_by: UnmappedBy,
}

/// The one that unmaps a [`Mapping`].
#[derive(Debug)]
enum UnmappedBy {
    /// Its last user.
    Itself,
    /// The reservation that it lies in.
    Reservation(#[allow(dead_code, reason = "it is kept mapped")] Arc<Mapping>),
    /// The program that lent it.
    Program,
}

/// A range of addresses for mappings that [`Memory::import_at`] places. Nothing else gets these
/// addresses until the reservation and all mappings in it are dropped.
#[derive(Clone, Debug)]
pub struct Reservation(Arc<Mapping>);

impl Reservation {
    /// Reserves `bytes` bytes, in whole pages, at a multiple of `align`, a power of two.
    ///
    /// # Errors
    /// The operating system has no such range.
    pub fn new(bytes: u64, align: u64) -> Result<Reservation, MemoryError> {
        let none = || MemoryError::OutOfMemory { requested: bytes, available: 0 };
        let align = align.max(PAGE);
        let pages = bytes.max(1).checked_next_multiple_of(PAGE).ok_or_else(none)?;
        let length = pages.checked_add(align - PAGE).filter(|_| align.is_power_of_two()).ok_or_else(none)?;
        let (none_yet, flags) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a fresh mapping at an address of the kernel's choice disturbs no existing memory.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), length as usize, none_yet, flags) }
            .map_err(os("mmap"))?
            .cast::<u8>();
        let before = (start as usize).next_multiple_of(align as usize) - start as usize;
        let (first, behind) = (start.wrapping_add(before), length as usize - before - pages as usize);
        for (at, bytes) in [(start, before), (first.wrapping_add(pages as usize), behind)] {
            if bytes > 0 {
                // SAFETY: the range is part of the mapping made above, and nothing has its address.
                let _ = unsafe { munmap(at.cast(), bytes) };
            }
        }
        let ptr = NonNull::new(first).ok_or_else(none)?;
        Ok(Reservation(Arc::new(Mapping { ptr, mapped: pages as usize, unmapped_by: UnmappedBy::Itself })))
    }

    /// The first address.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.0.ptr.as_ptr() as u64
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.mapped as u64
    }

    /// Checks that `bytes` bytes at address `at` lie inside of it.
    fn check(&self, at: u64, bytes: u64) -> Result<(), MemoryError> {
        let offset = at.wrapping_sub(self.addr());
        if offset >= self.bytes() || bytes > self.bytes() - offset || bytes == 0 {
            return Err(MemoryError::OutOfBounds { addr: at, bytes, nearest: None });
        }
        Ok(())
    }
}

impl Mapping {
    /// So many bytes that no file holds, all zero.
    fn anonymous(mapped: usize) -> rustix::io::Result<Mapping> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice disturbs no existing memory.
        let ptr = unsafe { mmap_anonymous(std::ptr::null_mut(), mapped, prot, MapFlags::PRIVATE) }?;
        let ptr = NonNull::new(ptr.cast::<u8>()).expect("no page is at 0");
        Ok(Mapping { ptr, mapped, unmapped_by: UnmappedBy::Itself })
    }

    /// The same for what must exist, as the elements of a `Vec`: ends the process where the system
    /// has no such memory. `bytes` is not 0.
    pub(crate) fn zeroed(bytes: usize) -> Mapping {
        let layout = || Layout::from_size_align(bytes, PAGE as usize).unwrap_or(Layout::new::<u8>());
        Mapping::anonymous(bytes).unwrap_or_else(|_| handle_alloc_error(layout()))
    }

    pub(crate) fn bytes(&self) -> usize {
        self.mapped
    }

    /// Its first byte, at the start of a page.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.ptr
    }
}

// SAFETY: a mapping is plain shared memory; every access through the pointer is raw or atomic, see
// the module page.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives no reference into the bytes.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        if !matches!(self.unmapped_by, UnmappedBy::Itself) {
            return;
        }
        // SAFETY: `ptr` and `mapped` are the address and length of an mmap. No snapshot lists this
        // mapping any more, and no registers are in it.
        let _ = unsafe { munmap(self.ptr.as_ptr().cast(), self.mapped) };
    }
}

/// A mapping for [`Memory::enter`].
struct Fresh {
    mapping: Arc<Mapping>,
    /// Its file; missing where the program lent it.
    fd: Option<Arc<OwnedFd>>,
    /// Device and inode of the file, where a checker watches it.
    backing: Option<(u64, u64)>,
}

#[derive(Clone, Debug)]
struct Entry {
    addr: u64,
    bytes: u64,
    label: Arc<str>,
    shadow: u32,
    mapping: Arc<Mapping>,
    /// The memory behind multicast addresses. Nothing is mapped at the addresses.
    multicast: Option<Window>,
}

/// A freed region, kept so that reports name it.
#[derive(Clone, Debug)]
struct Freed {
    addr: u64,
    bytes: u64,
    label: Arc<str>,
    /// While it is kept, the operating system does not reuse the address.
    quarantine: Option<Arc<Mapping>>,
}

/// A region that was looked up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    /// Number of its shadow; 0 without a checker.
    pub(crate) shadow: u32,
}

impl Found {
    /// Whether `addr .. addr + bytes` lies inside it, for more than 0 bytes.
    #[inline(always)]
    pub(crate) fn holds(&self, addr: u64, bytes: u64) -> bool {
        let offset = addr.wrapping_sub(self.start);
        offset < self.bytes && bytes <= self.bytes - offset
    }
}

/// A snapshot of the regions, sorted by address. It keeps its regions mapped.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    entries: Vec<Entry>,
    /// The last freed regions whose addresses have not been reused, latest last.
    freed: Vec<Freed>,
}

impl Table {
    /// The region that holds `addr .. addr + bytes`. Multicast addresses are none.
    pub(crate) fn find(&self, addr: u64, bytes: u64) -> Option<Found> {
        let (e, offset) = self.entry_at(addr)?;
        (bytes <= e.bytes - offset && e.multicast.is_none()).then_some(Found {
            start: e.addr,
            bytes: e.bytes,
            shadow: e.shadow,
        })
    }

    /// The entry that holds an address or ends there, and the offset in it.
    fn entry_at(&self, addr: u64) -> Option<(&Entry, u64)> {
        let e = &self.entries[self.entries.partition_point(|e| e.addr <= addr).checked_sub(1)?];
        (addr - e.addr <= e.bytes).then_some((e, addr - e.addr))
    }

    /// An address as reports name it, as in `'buffers' + 0x4`, where it is in a region.
    pub(crate) fn place_of(&self, addr: u64) -> Option<String> {
        let (e, offset) = self.entry_at(addr).filter(|(e, offset)| *offset < e.bytes)?;
        Some(Spot { label: &e.label, offset, part: "" }.to_string())
    }

    /// The multicast addresses that hold `addr`: their entry, the memory behind them, and the offset.
    fn multicast_at(&self, addr: u64) -> Option<(&Entry, &Window, u64)> {
        let (e, offset) = self.entry_at(addr).filter(|(e, offset)| *offset < e.bytes)?;
        e.multicast.as_ref().map(|window| (e, window, offset))
    }

    /// The rule that an ordinary access to a multicast address breaks.
    fn misused(&self, addr: u64, bytes: u64) -> Option<String> {
        let (e, _, offset) = self.multicast_at(addr)?;
        Some(format!(
            "access of {bytes} bytes at {addr:#x}, which is the multicast address '{}' + {offset:#x}: multimem \
             instructions alone may access it",
            e.label
        ))
    }

    /// The memory of each device behind `addr .. addr + bytes`, which `multimem` accesses.
    pub(crate) fn targets(&self, addr: u64, bytes: u64) -> Result<Targets, FaultKind> {
        let Some((e, window, offset)) = self.multicast_at(addr) else {
            return Err(match self.nearest(addr) {
                Some(near) if !near.freed && self.find(addr, bytes).is_some() => {
                    let (label, offset) = (near.label, addr - near.addr);
                    let message = format!(
                        "multimem at {addr:#x}, which is no multicast address but '{label}' + {offset:#x}"
                    );
                    FaultKind::Multicast { message }
                }
                nearest => FaultKind::OutOfBounds { addr, bytes, nearest },
            });
        };
        if bytes > e.bytes - offset {
            return Err(FaultKind::OutOfBounds { addr, bytes, nearest: self.nearest(addr) });
        }
        window.targets(offset, bytes).map_err(|device| {
            let of = device.map_or_else(String::new, |device| format!(" of device {device}"));
            let message = format!(
                "multimem of {bytes} bytes at the multicast address '{}' + {offset:#x}, to which no memory{of} is bound",
                e.label
            );
            FaultKind::Multicast { message }
        })
    }

    /// The fault for an access that [`find`](Self::find) found no region for.
    pub(crate) fn out_of_bounds(&self, addr: u64, bytes: u64) -> FaultKind {
        match self.misused(addr, bytes) {
            Some(message) => FaultKind::Multicast { message },
            None => FaultKind::OutOfBounds { addr, bytes, nearest: self.nearest(addr) },
        }
    }

    /// The region of this shadow.
    pub(crate) fn label_of(&self, shadow: u32) -> Option<&str> {
        self.entries.iter().find(|e| e.shadow == shadow).map(|e| &*e.label)
    }

    /// The region closest to a bad access, or the freed one that it starts in.
    pub(crate) fn nearest(&self, addr: u64) -> Option<NearRegion> {
        let covers = |f: &&Freed| addr.checked_sub(f.addr).is_some_and(|offset| offset < f.bytes);
        if let Some(f) = self.freed.iter().rev().find(covers) {
            let (label, addr, bytes) = (f.label.to_string(), f.addr, f.bytes);
            return Some(NearRegion { label, addr, bytes, distance: 0, freed: true });
        }
        let i = self.entries.partition_point(|e| e.addr <= addr);
        let below = i.checked_sub(1).map(|i| &self.entries[i]);
        let above = self.entries.get(i);
        let past = |e: &Entry| addr.saturating_sub(e.addr + e.bytes);
        let (e, distance) = match (below, above) {
            (Some(b), Some(a)) if past(b) > a.addr - addr => (a, -((a.addr - addr) as i64)),
            (Some(b), _) => (b, past(b).min(i64::MAX as u64) as i64),
            (None, Some(a)) => (a, -((a.addr - addr).min(i64::MAX as u64) as i64)),
            (None, None) => return None,
        };
        let label = e.label.to_string();
        Some(NearRegion { label, addr: e.addr, bytes: e.bytes, distance, freed: false })
    }

    fn insert(&mut self, entry: Entry) {
        let (start, end) = (entry.addr, entry.addr + entry.mapping.mapped as u64);
        // The new region replaces freed ones at these addresses: errors here are reported as the
        // new region's.
        self.freed.retain(|f| f.addr >= end || f.addr + f.bytes <= start);
        let at = self.entries.partition_point(|e| e.addr < start);
        self.entries.insert(at, entry);
    }

    /// Removes a region and records it as freed. `quarantine`: its address is not reused for a
    /// while, so that a late access stays an error.
    fn remove(&mut self, addr: u64, quarantine: bool) {
        let Some(at) = self.entries.iter().position(|e| e.addr == addr) else { return };
        let Entry { addr, bytes, label, mapping, .. } = self.entries.remove(at);
        if self.freed.len() >= MAX_FREED {
            self.freed.remove(0);
        }
        self.freed.push(Freed { addr, bytes, label, quarantine: quarantine.then_some(mapping) });
        let mut kept = 0;
        for freed in self.freed.iter_mut().rev() {
            let Some(mapping) = &freed.quarantine else { continue };
            if kept + mapping.mapped <= QUARANTINE_BYTES {
                kept += mapping.mapped;
            } else {
                freed.quarantine = None;
            }
        }
    }
}

struct AddressSpace {
    table: Mutex<Arc<Table>>,
    /// Bumped on every change of the table, so that kernels can keep a snapshot.
    generation: AtomicU64,
    /// Bytes in use by `alloc`.
    used: AtomicU64,
    limit: u64,
    checker: Option<Checker>,
    /// Contents of fresh memory.
    poison: u64,
}

impl AddressSpace {
    fn change(&self, f: impl FnOnce(&mut Table)) {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = Table::clone(&table);
        f(&mut next);
        *table = Arc::new(next);
        self.generation.fetch_add(1, Ordering::Release);
    }

    fn snapshot(&self) -> Arc<Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The memory one virtual GPU can address. Cheap to clone; all clones are the same memory.
#[derive(Clone)]
pub struct Memory {
    shared: Arc<AddressSpace>,
    /// `.global`/`.const` variables of each module, by module id; made at the first launch or
    /// access to a variable. A region keeps its address space, which must not keep the region.
    globals: Arc<Mutex<HashMap<u64, Arc<Region>>>>,
}

impl Default for Memory {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").field("used_bytes", &self.used_bytes()).finish_non_exhaustive()
    }
}

/// The error for a race of the host, in memory of a device.
fn host_race(
    world: &World,
    device: u64,
    table: &Table,
    shadow: u32,
    (offset, wrong): ViolationAt,
    write: bool,
) -> MemoryError {
    MemoryError::Race {
        label: table.label_of(shadow).unwrap_or("memory").to_string(),
        offset,
        part: world.part(shadow, offset),
        report: crate::check::report::host_race(world, device, wrong, write),
    }
}

/// How much of fresh memory is poisoned, in bytes: each poisoned page costs a real one.
const POISON_BYTES: u64 = 64 << 20;
/// How many freed regions keep their names.
const MAX_FREED: usize = 256;
/// How many bytes of freed regions keep their addresses in check mode. They stay mapped, and so
/// keep their memory.
const QUARANTINE_BYTES: usize = 256 << 20;

/// Contents of unwritten memory: no number that a program would use, in any format and at any
/// offset.
fn poison(seed: u64) -> u64 {
    // The high bits of each half: large negative as an integer, a huge negative number as a float.
    mix(seed ^ 0x51ab) | 0xf000_0000_f000_0000
}

impl Memory {
    /// Memory without a limit of its own.
    #[must_use]
    pub fn new() -> Self {
        Self::with_limit(u64::MAX)
    }

    /// Memory whose allocations are limited to `limit_bytes` in total. Imports do not count.
    #[must_use]
    pub fn with_limit(limit_bytes: u64) -> Self {
        Self::build(limit_bytes, 0, None)
    }

    /// Memory without a limit whose fresh contents are drawn from `seed`. If there is a `checker`,
    /// it watches all accesses, and kernels launched on the memory run in check mode.
    #[must_use]
    pub fn checked(seed: u64, checker: Option<Checker>) -> Self {
        Self::build(u64::MAX, seed, checker)
    }

    fn build(limit: u64, seed: u64, checker: Option<Checker>) -> Self {
        let shared = AddressSpace {
            table: Mutex::default(),
            generation: AtomicU64::new(0),
            used: AtomicU64::new(0),
            limit,
            checker,
            poison: poison(seed),
        };
        Self { shared: Arc::new(shared), globals: Arc::default() }
    }

    pub(crate) fn checker(&self) -> Option<&Checker> {
        self.shared.checker.as_ref()
    }

    pub(crate) fn poison(&self) -> u64 {
        self.shared.poison
    }

    /// Identifies the device.
    pub(crate) fn id(&self) -> u64 {
        Arc::as_ptr(&self.shared) as u64
    }

    /// Bytes in use by [`alloc`](Self::alloc), in whole pages.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.shared.used.load(Ordering::Relaxed)
    }

    /// The limit in bytes; `u64::MAX` when there is none.
    #[must_use]
    pub fn limit_bytes(&self) -> u64 {
        self.shared.limit
    }

    /// Allocates memory of `bytes` bytes (page aligned), with poison in its first 64 MiB. `label`
    /// names it in error messages.
    pub fn alloc(&self, bytes: u64, label: &str) -> Result<Region, MemoryError> {
        self.alloc_file(bytes, label, false, |fresh| {
            let poisoned = fresh.len().min(POISON_BYTES as usize);
            fresh[..poisoned].as_chunks_mut().0.fill(self.shared.poison.to_ne_bytes());
        })
    }

    /// Allocates zeroed memory that plain host code writes, as page-locked host memory is; checks
    /// leave it out, unless [`Region::watch`] enables them.
    pub fn alloc_host(&self, bytes: u64, label: &str) -> Result<Region, MemoryError> {
        let region = self.alloc_zeroed(bytes, label)?;
        region.hide();
        Ok(region)
    }

    /// Allocates memory that is zero, and counts as written.
    pub fn alloc_zeroed(&self, bytes: u64, label: &str) -> Result<Region, MemoryError> {
        self.alloc_file(bytes, label, true, |_| ())
    }

    /// Allocates memory. `begin` writes its first contents, over zeros. `filled`: they count as
    /// written.
    fn alloc_file(
        &self,
        bytes: u64,
        label: &str,
        filled: bool,
        begin: impl FnOnce(&mut [u8]),
    ) -> Result<Region, MemoryError> {
        let used = self.used_bytes();
        let oom = |used: u64| MemoryError::OutOfMemory {
            requested: bytes,
            available: self.shared.limit.saturating_sub(used),
        };
        let rounded = bytes.max(1).checked_next_multiple_of(PAGE).ok_or_else(|| oom(used))?;
        self.shared
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                used.checked_add(rounded).filter(|&total| total <= self.shared.limit)
            })
            .map_err(oom)?;
        let made = if cfg!(miri) {
            self.map_anonymous(rounded)
        } else {
            memfd_create("epoxide-vgpu", MemfdFlags::CLOEXEC)
                .map_err(os("memfd_create"))
                .and_then(|fd| ftruncate(&fd, rounded).map_err(os("ftruncate")).map(|()| fd))
                .and_then(|fd| self.map(fd, bytes, None))
        };
        let fresh = made.inspect_err(|_| {
            self.shared.used.fetch_sub(rounded, Ordering::Relaxed);
        })?;
        // SAFETY: the mapping is new and has at least this many bytes, which are zero. No other
        // code has its address or its file: `enter` below is what lists it, and `export` needs the
        // region.
        begin(unsafe { std::slice::from_raw_parts_mut(fresh.mapping.ptr.as_ptr(), bytes as usize) });
        Ok(self.enter(fresh, bytes, label, (rounded, filled), None))
    }

    /// Maps `rounded` bytes that no file holds. Miri maps no files; regions are such memory there,
    /// and cannot be exported.
    fn map_anonymous(&self, rounded: u64) -> Result<Fresh, MemoryError> {
        let mapping = Arc::new(Mapping::anonymous(rounded as usize).map_err(os("mmap"))?);
        // No file has this number, and no other memory this address.
        let backing = self.checker().map(|_| (u64::MAX, mapping.ptr.as_ptr() as u64));
        Ok(Fresh { mapping, fd: None, backing })
    }

    /// Maps memory that [`Region::export`] gave, of this or another process. `bytes` is the length
    /// of the region.
    pub fn import(&self, fd: OwnedFd, bytes: u64, label: &str) -> Result<Region, MemoryError> {
        let actual = u64::try_from(fstat(&fd).map_err(os("fstat"))?.st_size).unwrap_or(0);
        if actual < bytes {
            return Err(MemoryError::ImportTooSmall { wanted: bytes, actual });
        }
        Ok(self.enter(self.map(fd, bytes, None)?, bytes, label, (0, true), None))
    }

    /// The same at address `at` in a reservation, in the place of what was there. Both `at` and
    /// `bytes` must be multiples of 4096, since the rest of a page would be replaced as well.
    ///
    /// # Errors
    /// The range is not inside of the reservation or not whole pages, or those of
    /// [`Memory::import`].
    pub fn import_at(
        &self,
        (reservation, at): (&Reservation, u64),
        fd: OwnedFd,
        bytes: u64,
        label: &str,
    ) -> Result<Region, MemoryError> {
        let actual = u64::try_from(fstat(&fd).map_err(os("fstat"))?.st_size).unwrap_or(0);
        if actual < bytes {
            return Err(MemoryError::ImportTooSmall { wanted: bytes, actual });
        }
        if let Some(addr) = [at, bytes].into_iter().find(|value| !value.is_multiple_of(PAGE)) {
            return Err(MemoryError::Misaligned { addr, align: PAGE });
        }
        reservation.check(at, bytes)?;
        Ok(self.enter(self.map(fd, bytes, Some((reservation, at)))?, bytes, label, (0, true), None))
    }

    /// The memory of another device at the same address, as devices with unified addressing have
    /// it.
    ///
    /// # Errors
    /// The region has been freed.
    pub fn share(&self, region: &Region) -> Result<Region, MemoryError> {
        let table = region.space.snapshot();
        let Some(entry) = table.entries.iter().find(|entry| entry.addr == region.addr) else {
            return Err(MemoryError::OutOfBounds { addr: region.addr, bytes: region.bytes, nearest: None });
        };
        let multicast = entry.multicast.clone().zip(region.multicast.clone());
        let (mapping, fd, backing) = (entry.mapping.clone(), region.fd.clone(), region.backing);
        let same = Fresh { mapping, fd, backing };
        Ok(self.enter(same, region.bytes, &region.label, (0, true), multicast))
    }

    /// Addresses by which `multimem` instructions of this device access all of a multicast object.
    ///
    /// # Errors
    /// The operating system has no such range.
    pub fn multicast(&self, object: &MulticastObject, label: &str) -> Result<Region, MemoryError> {
        let reservation = Reservation::new(object.bytes(), PAGE)?;
        self.multicast_at((&reservation, reservation.addr()), (object, 0), object.bytes(), label)
    }

    /// The same for `bytes` bytes from an offset in the object on, at an address in a reservation.
    /// The address and the offset are multiples of 4096.
    ///
    /// # Errors
    /// The range is not inside of the reservation or of the object, or not aligned.
    pub fn multicast_at(
        &self,
        (reservation, at): (&Reservation, u64),
        (object, from): (&MulticastObject, u64),
        bytes: u64,
        label: &str,
    ) -> Result<Region, MemoryError> {
        if let Some(addr) = [at, from].into_iter().find(|value| !value.is_multiple_of(PAGE)) {
            return Err(MemoryError::Misaligned { addr, align: PAGE });
        }
        reservation.check(at, bytes)?;
        if from > object.bytes() || bytes > object.bytes() - from {
            return Err(MemoryError::OutOfBounds { addr: from, bytes, nearest: None });
        }
        let ptr = NonNull::new(at as *mut u8).ok_or(MemoryError::Misaligned { addr: at, align: PAGE })?;
        let (mapped, unmapped_by) =
            (bytes.next_multiple_of(PAGE) as usize, UnmappedBy::Reservation(reservation.0.clone()));
        let mapping = Arc::new(Mapping { ptr, mapped, unmapped_by });
        let multicast = Some((object.window(from), object.clone()));
        let fresh = Fresh { mapping, fd: None, backing: None };
        Ok(self.enter(fresh, bytes, label, (0, true), multicast))
    }

    /// Memory of the program's at its own address, for kernels too, as page-locked memory that was
    /// registered is. Checks leave it out, because plain host code writes it. It does not count
    /// against the limit.
    ///
    /// # Safety `bytes` bytes at `ptr` can be read and written until the region and all that
    /// [`Memory::share`] has made of it are dropped and no grid runs that was launched before.
    /// Others access them by raw pointers and atomics alone meanwhile.
    pub unsafe fn lend(&self, ptr: NonNull<u8>, bytes: usize, label: &str) -> Region {
        let mapping = Arc::new(Mapping { ptr, mapped: bytes, unmapped_by: UnmappedBy::Program });
        // No file has this number, and no other memory this address.
        let backing = self.checker().map(|_| (u64::MAX, ptr.as_ptr() as u64));
        let fresh = Fresh { mapping, fd: None, backing };
        let region = self.enter(fresh, bytes as u64, label, (0, true), None);
        region.hide();
        region
    }

    /// Maps a file.
    fn map(&self, fd: OwnedFd, bytes: u64, place: Option<(&Reservation, u64)>) -> Result<Fresh, MemoryError> {
        let backing = match self.checker() {
            Some(_) => fstat(&fd).map(|s| Some((s.st_dev, s.st_ino))).map_err(os("fstat"))?,
            None => None,
        };
        let mapped = usize::try_from(bytes.max(1).next_multiple_of(PAGE))
            .map_err(|_| MemoryError::OutOfMemory { requested: bytes, available: u64::MAX })?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let (at, flags) = match place {
            Some((_, at)) => (at as *mut _, MapFlags::SHARED | MapFlags::FIXED),
            None => (std::ptr::null_mut(), MapFlags::SHARED),
        };
        // SAFETY: a fresh mapping at an address of the kernel's choice disturbs no existing memory.
        // One at a fixed address lies inside of a reservation, where memory is only accessed by the
        // rules of the module page, so that it may be replaced at any time.
        let ptr = unsafe { mmap(at, mapped, prot, flags, &fd, 0) }.map_err(os("mmap"))?;
        let ptr = NonNull::new(ptr.cast::<u8>()).ok_or(MemoryError::Os {
            call: "mmap",
            errno: 0,
            message: "returned the null page".into(),
        })?;
        let unmapped_by = match place {
            Some((reservation, _)) => UnmappedBy::Reservation(reservation.0.clone()),
            None => UnmappedBy::Itself,
        };
        let mapping = Arc::new(Mapping { ptr, mapped, unmapped_by });
        Ok(Fresh { mapping, fd: Some(Arc::new(fd)), backing })
    }

    /// Enters a mapping into the table. `filled`: its contents count as written, if this is the
    /// checker's first mapping of the file.
    fn enter(
        &self,
        Fresh { mapping, fd, backing }: Fresh,
        bytes: u64,
        label: &str,
        (charged, filled): (u64, bool),
        multicast: Option<(Window, MulticastObject)>,
    ) -> Region {
        let addr = mapping.ptr.as_ptr() as u64;
        let label: Arc<str> = label.into();
        let shadow = match (self.checker(), backing) {
            (Some(checker), Some(backing)) => {
                checker.world().map(backing, filled, (self.id(), label.clone()))
            }
            _ => 0,
        };
        let (window, multicast) = multicast.unzip();
        let entry = Entry { addr, bytes, label: label.clone(), shadow, mapping, multicast: window };
        self.shared.change(|table| table.insert(entry));
        Region { space: self.shared.clone(), addr, bytes, label, fd, charged, backing, shadow, multicast }
    }

    /// Changes whenever a region is added or removed.
    pub(crate) fn generation(&self) -> u64 {
        self.shared.generation.load(Ordering::Acquire)
    }

    pub(crate) fn snapshot(&self) -> Arc<Table> {
        self.shared.snapshot()
    }

    /// The variables of a module: allocated and initialised once per device.
    pub(crate) fn module_globals(&self, module: &Globals) -> Result<Arc<Region>, MemoryError> {
        let mut globals = self.globals.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(region) = globals.get(&module.module_id) {
            return Ok(region.clone());
        }
        // The variables count as written, by no actor: a module is loaded before all launches.
        let begin = |fresh: &mut [u8]| {
            fresh.copy_from_slice(&module.init);
            let base = fresh.as_ptr() as u64;
            for &(at, offset) in &module.addresses {
                fresh[at..at + 8].copy_from_slice(&base.wrapping_add(offset).to_ne_bytes());
            }
        };
        let bytes = module.init.len() as u64;
        let region = Arc::new(self.alloc_file(bytes, "module variables", true, begin)?);
        globals.insert(module.module_id, region.clone());
        Ok(region)
    }

    /// The device address and the length in bytes of a `.global` or `.const` variable of a module;
    /// `None` if it has no variable of this name. Each device has its own copy, which holds the
    /// initial value until a kernel or the host writes it.
    pub fn variable(&self, module: &Module, name: &str) -> Result<Option<(u64, u64)>, MemoryError> {
        let found = self.variable_in(module, name)?;
        Ok(found.map(|(region, offset, bytes)| (region.addr() + offset, bytes)))
    }

    /// The memory of all of a module's variables on this device; `None` if it has none.
    pub fn variables(&self, module: &Module) -> Result<Option<Arc<Region>>, MemoryError> {
        module.globals().map(|globals| self.module_globals(globals)).transpose()
    }

    /// The region of a module's variables, and the offset and length of one of them.
    pub(crate) fn variable_in(
        &self,
        module: &Module,
        name: &str,
    ) -> Result<Option<(Arc<Region>, u64, u64)>, MemoryError> {
        let Some(globals) = module.globals() else { return Ok(None) };
        let Some(&(offset, bytes)) = globals.variables.get(name) else { return Ok(None) };
        Ok(Some((self.module_globals(globals)?, offset, bytes)))
    }

    /// Frees the variables of module `id`.
    pub(crate) fn forget_module_globals(&self, id: u64) {
        let region = self.globals.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        drop(region);
    }

    /// Checks that `addr .. addr + bytes` lies inside one live region.
    pub fn check(&self, addr: u64, bytes: u64) -> Result<(), MemoryError> {
        self.locate(&self.snapshot(), addr, bytes).map(drop)
    }

    fn locate(&self, table: &Table, addr: u64, bytes: u64) -> Result<Found, MemoryError> {
        table.find(addr, bytes).ok_or_else(|| match table.misused(addr, bytes) {
            Some(message) => MemoryError::Multicast { message },
            None => MemoryError::OutOfBounds { addr, bytes, nearest: table.nearest(addr) },
        })
    }

    /// An access of the host, or of a copy in a stream: its bounds, and whether it races.
    fn access(&self, table: &Table, addr: u64, bytes: u64, write: bool) -> Result<(), MemoryError> {
        let found = self.locate(table, addr, bytes)?;
        let Some(checker) = self.checker() else { return Ok(()) };
        let mut world = checker.world();
        let outcome = world.host_access(found.shadow, addr - found.start, bytes, write);
        outcome.map_err(|violation| host_race(&world, self.id(), table, found.shadow, violation, write))
    }

    /// Loads the 8-byte word at `addr` for host code, with acquire. Releases by kernels there with
    /// system scope join the calling thread's past.
    pub fn load_acquire(&self, addr: u64) -> Result<u64, MemoryError> {
        let table = self.snapshot();
        let (found, word) = self.word(&table, addr)?;
        let Some(checker) = self.checker() else { return Ok(word.load(Ordering::Acquire)) };
        // Under the lock, because a kernel's store and its release happen under it together.
        let mut world = checker.world();
        let value = word.load(Ordering::Acquire);
        let outcome = world.host_acquires(found.shadow, addr - found.start);
        outcome.map_err(|violation| host_race(&world, self.id(), &table, found.shadow, violation, false))?;
        world.host_has_read();
        Ok(value)
    }

    /// Stores `value` in the 8-byte word at `addr` for host code, with release. Kernels that acquire
    /// it there with system scope come after the calling thread's past.
    pub fn store_release(&self, addr: u64, value: u64) -> Result<(), MemoryError> {
        let table = self.snapshot();
        let (found, word) = self.word(&table, addr)?;
        let Some(checker) = self.checker() else {
            word.store(value, Ordering::Release);
            return Ok(());
        };
        // Under the lock, because a kernel's load and its acquire happen under it together.
        let mut world = checker.world();
        world.host_is_to_write();
        let outcome = world.host_releases(found.shadow, addr - found.start);
        outcome.map_err(|violation| host_race(&world, self.id(), &table, found.shadow, violation, true))?;
        word.store(value, Ordering::Release);
        Ok(())
    }

    /// The 8-byte word at `addr`, and where it lies.
    fn word<'a>(&self, table: &'a Table, addr: u64) -> Result<(Found, &'a AtomicU64), MemoryError> {
        let found = self.locate(table, addr, 8)?;
        if !addr.is_multiple_of(8) {
            return Err(MemoryError::Misaligned { addr, align: 8 });
        }
        // SAFETY: aligned, and mapped for as long as `table` lives; all other accesses go through
        // raw pointers or atomics.
        Ok((found, unsafe { AtomicU64::from_ptr(addr as *mut u64) }))
    }

    /// Checks a read of `bytes` bytes at `addr` that host code is about to make by itself: an error
    /// where it is a race.
    pub fn host_reads(&self, addr: u64, bytes: u64) -> Result<(), MemoryError> {
        self.access(&self.snapshot(), addr, bytes, false)?;
        if let Some(checker) = self.checker() {
            checker.world().host_has_read();
        }
        Ok(())
    }

    /// The same for a write, in memory that is watched ([`Region::watch`]). A word that this thread
    /// stores next ([`Memory::store_release`]) releases it to kernels. So does a word of another
    /// thread behind a read of the bytes that host code has announced ([`Memory::host_reads`]).
    pub fn host_writes(&self, addr: u64, bytes: u64) -> Result<(), MemoryError> {
        if let Some(checker) = self.checker() {
            checker.world().host_is_to_write();
        }
        self.access(&self.snapshot(), addr, bytes, true)
    }

    /// The instruction that has last written the byte at `addr`, and the memory that its block has
    /// read, with the last writes there, and reads of its launch that came before a write: lines for
    /// the report of a wrong value. If no kernel has written the byte last, returns the writes of the
    /// nearest words. `None` without a checker, or without any such write.
    #[must_use]
    pub fn origin(&self, addr: u64) -> Option<String> {
        let found = self.snapshot().find(addr, 1)?;
        let world = self.checker()?.world();
        crate::check::report::origin(&world, found.shadow, addr - found.start)
    }

    /// Whether something has written each of `bytes` bytes at `addr`. True without a checker.
    pub(crate) fn written(&self, addr: u64, bytes: u64) -> Vec<bool> {
        let (found, checker) = (self.snapshot().find(addr, bytes), self.checker());
        let (Some(found), Some(checker)) = (found, checker) else { return vec![true; bytes as usize] };
        let world = checker.world();
        let shadow = world.shadows.get(found.shadow as usize);
        let at = addr - found.start;
        (at..at + bytes).map(|at| shadow.is_none_or(|shadow| shadow.is_written(at))).collect()
    }

    /// Copies `bytes` bytes from host memory to device address `dst`.
    ///
    /// # Safety
    /// `src` must be readable for `bytes` bytes and must not overlap the destination. No other
    /// thread writes it meanwhile.
    pub unsafe fn copy_from_host(&self, dst: u64, src: *const u8, bytes: u64) -> Result<(), MemoryError> {
        let table = self.snapshot();
        self.access(&table, dst, bytes, true)?;
        // SAFETY: the destination is mapped for as long as `table` lives, and only accessed by the
        // rules of the module page; the caller vouches for the source.
        unsafe { racing::store(src, dst as *mut u8, bytes as usize) };
        Ok(())
    }

    /// Copies `bytes` bytes from device address `src` to host memory.
    ///
    /// # Safety
    /// `dst` must be writable for `bytes` bytes and must not overlap the source. No other thread
    /// accesses it meanwhile.
    pub unsafe fn copy_to_host(&self, dst: *mut u8, src: u64, bytes: u64) -> Result<(), MemoryError> {
        let table = self.snapshot();
        self.access(&table, src, bytes, false)?;
        // SAFETY: the source is mapped for as long as `table` lives, and only accessed by the rules
        // of the module page; the caller vouches for the destination.
        unsafe { racing::load(src as *const u8, dst, bytes as usize) };
        Ok(())
    }

    /// Copies `bytes` bytes between device addresses; the ranges may overlap.
    pub fn copy_device(&self, dst: u64, src: u64, bytes: u64) -> Result<(), MemoryError> {
        let table = self.snapshot();
        self.access(&table, dst, bytes, true)?;
        self.access(&table, src, bytes, false)?;
        // SAFETY: both ranges are mapped for as long as `table` lives, and only accessed by the
        // rules of the module page.
        unsafe { racing::copy(src as *const u8, dst as *mut u8, bytes as usize) };
        Ok(())
    }

    /// Sets `bytes` bytes from device address `dst` on to `byte`.
    pub fn fill(&self, dst: u64, byte: u8, bytes: u64) -> Result<(), MemoryError> {
        let table = self.snapshot();
        self.access(&table, dst, bytes, true)?;
        // SAFETY: the range is mapped for as long as `table` lives, and only accessed by the rules
        // of the module page.
        unsafe { racing::fill(dst as *mut u8, byte, bytes as usize) };
        Ok(())
    }

    /// Copies a host slice to device address `dst`.
    pub fn write(&self, dst: u64, src: &[u8]) -> Result<(), MemoryError> {
        // SAFETY: a slice is readable for its length. It can overlap the region only if the caller
        // made a reference into device memory, which no safe interface of this crate does.
        unsafe { self.copy_from_host(dst, src.as_ptr(), src.len() as u64) }
    }

    /// Copies device memory from address `src` into a host slice.
    pub fn read(&self, src: u64, dst: &mut [u8]) -> Result<(), MemoryError> {
        // SAFETY: a mutable slice is writable for its length; as to overlap, see `write`.
        unsafe { self.copy_to_host(dst.as_mut_ptr(), src, dst.len() as u64) }
    }
}

impl Checker {
    /// Gives a device the number that [`Stored`](crate::Stored) has for it; 0 otherwise.
    pub fn number_device(&self, memory: &Memory, number: u32) {
        self.world().grids.devices.insert(memory.id(), number);
    }
}

/// A piece of device memory. Dropping it frees it.
pub struct Region {
    space: Arc<AddressSpace>,
    addr: u64,
    bytes: u64,
    label: Arc<str>,
    /// Its file; missing where the program lent it.
    fd: Option<Arc<OwnedFd>>,
    /// Bytes counted against the limit.
    charged: u64,
    /// Device and inode of the file, where a checker watches it.
    backing: Option<(u64, u64)>,
    shadow: u32,
    /// Keeps the memory behind multicast addresses allocated.
    multicast: Option<MulticastObject>,
}

impl Region {
    /// Device address of the first byte.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The label given at allocation or import.
    #[must_use]
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Leaves the memory out of all checks: others access it in ways that the checker does not
    /// track, such as another process or plain host code.
    pub fn hide(&self) {
        self.with_shadow(|shadow| shadow.hidden = true);
    }

    /// Ends [`Region::hide`], before the first use of the memory: host code accesses it through
    /// [`Memory`] alone, by [`Memory::load_acquire`] and [`Memory::store_release`] for instance, and
    /// behind [`Memory::host_reads`] and [`Memory::host_writes`].
    pub fn watch(&self) {
        self.with_shadow(|shadow| shadow.hidden = false);
    }

    /// Names the parts of the region by offset, such as `ready[3]`, for the reports of check mode.
    /// Reports of other mappings of the same memory use the names too.
    pub fn name_parts(&self, name: impl Fn(u64) -> Option<String> + Send + Sync + 'static) {
        self.with_shadow(|shadow| shadow.names = Some(Names(Arc::new(name))));
    }

    /// Names the elements of `bytes` bytes in a range of offsets, such as `ready[3]`. Other offsets
    /// keep their names.
    pub(crate) fn name_part(&self, range: Range<u64>, bytes: u64, label: &Arc<str>) {
        self.with_shadow(|shadow| shadow.name_part(range, bytes, label.clone()));
    }

    /// Marks `bytes` bytes at offset `at` as unwritten again, as after a free and another
    /// allocation inside of the region.
    pub fn renew(&self, at: u64, bytes: u64) {
        self.with_shadow(|shadow| shadow.renew(at, bytes));
    }

    fn with_shadow(&self, f: impl FnOnce(&mut Shadow)) {
        // Number 0 is no memory's.
        if self.shadow != 0
            && let Some(checker) = &self.space.checker
            && let Some(shadow) = checker.world().shadows.get_mut(self.shadow as usize)
        {
            f(shadow);
        }
    }

    /// The part of it that is bound to multicast addresses; `None` where it is multicast addresses
    /// itself.
    pub(crate) fn target(&self) -> Option<Target> {
        let table = self.space.snapshot();
        let entry =
            table.entries.iter().find(|entry| entry.addr == self.addr && entry.multicast.is_none())?;
        let (mapping, shadow) = (entry.mapping.clone(), self.shadow);
        Some(Target { addr: self.addr, offset: 0, shadow, label: self.label.clone(), mapping })
    }

    /// A file descriptor that [`Memory::import`] accepts, here or in another process.
    ///
    /// # Errors
    /// The memory has no file ([`Memory::lend`]), the region is multicast addresses, or the process
    /// has too many files open.
    pub fn export(&self) -> Result<OwnedFd, MemoryError> {
        if self.multicast.is_some() {
            let message = "multicast addresses have no memory of their own to map: map the arrays".to_owned();
            return Err(MemoryError::Multicast { message });
        }
        let dup = "fcntl(F_DUPFD_CLOEXEC)";
        let fd = self.fd.as_ref().ok_or_else(|| os(dup)(rustix::io::Errno::BADF))?;
        rustix::io::fcntl_dupfd_cloexec(&**fd, 0).map_err(os(dup))
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region('{}', {:#x}, {} bytes)", self.label, self.addr, self.bytes)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let quarantine = self.space.checker.is_some();
        self.space.change(|table| table.remove(self.addr, quarantine));
        self.space.used.fetch_sub(self.charged, Ordering::Relaxed);
        if let (Some(checker), Some(backing)) = (&self.space.checker, self.backing) {
            checker.world().unmap(backing);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_counts_pages_and_is_given_back() {
        let m = Memory::with_limit(3 * PAGE);
        let a = m.alloc(PAGE + 1, "a").unwrap();
        assert_eq!(m.used_bytes(), 2 * PAGE);
        assert_eq!(
            m.alloc(PAGE + 1, "b").unwrap_err(),
            MemoryError::OutOfMemory { requested: PAGE + 1, available: PAGE }
        );
        drop(a);
        assert_eq!(m.used_bytes(), 0);
        let zero = m.alloc(0, "zero").unwrap();
        assert_eq!(m.used_bytes(), PAGE);
        assert!(m.check(zero.addr(), 1).is_err());
        assert!(m.alloc(u64::MAX, "huge").is_err());
    }

    #[test]
    fn copies_are_checked_and_errors_name_the_region() {
        let m = Memory::new();
        let a = m.alloc(64, "pool").unwrap();
        m.write(a.addr() + 60, &[1, 2, 3, 4]).unwrap();
        let mut out = [0; 4];
        m.read(a.addr() + 60, &mut out).unwrap();
        assert_eq!(out, [1, 2, 3, 4]);
        let e = m.write(a.addr() + 61, &[0; 4]).unwrap_err();
        assert!(e.to_string().contains("'pool'"), "{e}");
        m.copy_device(a.addr(), a.addr() + 32, 32).unwrap();
        m.read(a.addr() + 28, &mut out).unwrap();
        assert_eq!(out, [1, 2, 3, 4]);
        m.fill(a.addr(), 7, 64).unwrap();
        assert!(m.fill(a.addr(), 7, 65).is_err());
        assert!(m.copy_device(a.addr(), a.addr() + 33, 32).is_err());
        m.read(a.addr(), &mut out).unwrap();
        assert_eq!(out, [7; 4]);
        let addr = a.addr();
        drop(a);
        let e = m.read(addr + 8, &mut out).unwrap_err();
        assert!(e.to_string().ends_with("is in 'pool' + 0x8, which has been freed"), "{e}");
        // Past its end it is not the freed region any more.
        assert!(m.check(addr + 64, 1).unwrap_err().to_string().ends_with("is outside of every region"));
    }

    #[test]
    fn memory_has_its_first_contents_once_a_table_lists_it() {
        let bytes = if cfg!(miri) { 2 * PAGE } else { POISON_BYTES };
        let init = vec![7; bytes as usize];
        let alloc = |m: &Memory| m.alloc(bytes, "region").map(Arc::new);
        let globals = Globals { module_id: 1, init, addresses: vec![], variables: Default::default() };
        let variables = |m: &Memory| m.module_globals(&globals);
        type Maker<'a> = &'a dyn Fn(&Memory) -> Result<Arc<Region>, MemoryError>;
        let makers: [(Maker<'_>, u64); 2] = [(&alloc, poison(0)), (&variables, u64::from_ne_bytes([7; 8]))];
        for (make, wanted) in makers {
            let (m, is_made) = (Memory::new(), AtomicU64::new(0));
            std::thread::scope(|threads| {
                // Reads the last word as soon as there is a region.
                let reader = threads.spawn(|| {
                    loop {
                        let is_last = is_made.load(Ordering::Acquire) == 1;
                        let at = m.snapshot().entries.first().map(|entry| entry.addr + entry.bytes - 8);
                        if let Some(at) = at {
                            return m.load_acquire(at);
                        }
                        assert!(!is_last, "no table has the region");
                        std::thread::yield_now();
                    }
                });
                let region = make(&m);
                is_made.store(1, Ordering::Release);
                assert_eq!(reader.join().unwrap(), Ok(wanted));
                drop(region.unwrap());
            });
        }
    }

    // Miri takes minutes for its 256 MiB.
    #[cfg(not(miri))]
    #[test]
    fn freed_addresses_are_handed_out_again_only_without_checks() {
        use crate::check::{CheckConfig, Checker};
        let m = Memory::checked(0, Some(Checker::new(CheckConfig::default())));
        let freed: Vec<u64> =
            (0..MAX_FREED).map(|i| m.alloc(PAGE, &format!("region {i}")).unwrap().addr()).collect();
        let later = m.alloc(PAGE, "later").unwrap();
        assert!(!freed.contains(&later.addr()));
        let distinct: std::collections::HashSet<u64> = freed.iter().copied().collect();
        assert_eq!(distinct.len(), MAX_FREED);
        let label = |addr: u64| m.snapshot().nearest(addr).unwrap().label;
        assert_eq!((label(freed[0]), label(freed[77])), ("region 0".into(), "region 77".into()));
        // With one more, the oldest is dropped.
        drop(later);
        assert!(!m.snapshot().nearest(freed[0]).is_some_and(|n| n.freed));
        assert_eq!(label(freed[1]), "region 1");
        // A region that is too large for the quarantine keeps its name until its address is reused,
        // and the others stay.
        let large = m.alloc_zeroed(QUARANTINE_BYTES as u64 + 1, "large").unwrap().addr();
        let held = |t: &Table| t.freed.iter().filter(|f| f.quarantine.is_some()).count();
        assert_eq!((label(large), held(&m.snapshot())), ("large".into(), MAX_FREED - 1));

        let m = Memory::new();
        let old = m.alloc(PAGE, "old").unwrap().addr();
        assert_eq!(held(&m.snapshot()), 0);
        // Wherever the next region lies, an access to it, or past its end, is no use of the old
        // one.
        let new = m.alloc(8, "new").unwrap();
        let nearest = m.snapshot().nearest(new.addr() + 8).unwrap();
        assert_eq!((nearest.label.as_str(), nearest.freed), ("new", false));
        assert!(new.addr() == old || m.snapshot().nearest(old).unwrap().freed);
    }

    // Miri maps no files.
    #[cfg(not(miri))]
    #[test]
    fn exported_memory_is_the_same_memory() {
        let (m, n) = (Memory::new(), Memory::new());
        let a = m.alloc(100, "a").unwrap();
        let b = n.import(a.export().unwrap(), 100, "b").unwrap();
        assert_ne!(a.addr(), b.addr());
        m.write(a.addr() + 96, &[9; 4]).unwrap();
        drop(a); // The mapping of `b` lives on.
        let mut out = [0; 4];
        n.read(b.addr() + 96, &mut out).unwrap();
        assert_eq!(out, [9; 4]);
        let e = n.import(b.export().unwrap(), 5000, "c").unwrap_err();
        assert_eq!(e, MemoryError::ImportTooSmall { wanted: 5000, actual: 4096 });
    }

    /// The test is for miri, which reports a data race of Rust's memory model.
    #[test]
    fn copies_of_several_threads_are_no_data_race_of_rust_s() {
        let m = Memory::new();
        let bytes = m.alloc_zeroed(64, "bytes").unwrap();
        let at = bytes.addr();
        std::thread::scope(|threads| {
            threads.spawn(|| m.write(at, &[1; 64]).unwrap());
            threads.spawn(|| m.fill(at, 2, 64).unwrap());
            threads.spawn(|| m.copy_device(at + 8, at, 56).unwrap());
            threads.spawn(|| m.load_acquire(at + 32).unwrap());
            let mut out = [0; 64];
            m.read(at, &mut out).unwrap();
        });
        let mut out = [0; 64];
        m.read(at, &mut out).unwrap();
        assert!(out.iter().all(|byte| [0, 1, 2].contains(byte)), "{out:?}");
    }

    #[test]
    fn devices_share_memory_at_one_address() {
        let (m, n) = (Memory::new(), Memory::new());
        let a = m.alloc(100, "a").unwrap();
        let b = n.share(&a).unwrap();
        assert_eq!((a.addr(), a.bytes()), (b.addr(), b.bytes()));
        drop(a);
        n.write(b.addr(), &[5; 4]).unwrap();
        assert!(m.check(b.addr(), 4).is_err());
    }

    // Miri maps no files, and no memory without access.
    #[cfg(not(miri))]
    #[test]
    fn mappings_are_placed_in_a_reservation() {
        let m = Memory::new();
        let wide = Reservation::new(4 * PAGE, 1 << 21).unwrap();
        assert_eq!((wide.addr() % (1 << 21), wide.bytes()), (0, 4 * PAGE));
        let file = |byte| {
            let region = m.alloc(PAGE, "backing").unwrap();
            m.fill(region.addr(), byte, PAGE).unwrap();
            region.export().unwrap()
        };
        let (at, next) = (wide.addr() + PAGE, wide.addr() + 2 * PAGE);
        let first = m.import_at((&wide, at), file(1), PAGE, "first").unwrap();
        let second = m.import_at((&wide, next), file(2), PAGE, "second").unwrap();
        let byte = |addr: u64| {
            let mut byte = [0];
            m.read(addr, &mut byte).map(|()| byte[0])
        };
        assert_eq!((first.addr(), byte(at), byte(next)), (at, Ok(1), Ok(2)));
        drop(first);
        assert!(byte(at).is_err());
        let again = m.import_at((&wide, at), file(3), PAGE, "again").unwrap();
        assert_eq!((byte(at), byte(next)), (Ok(3), Ok(2)));
        for (at, bytes) in
            [(at + 1, PAGE), (at, PAGE + 1), (at + 2 * PAGE, 2 * PAGE), (at, 0), (at - 2 * PAGE, PAGE)]
        {
            assert!(m.import_at((&wide, at), file(4), bytes, "no").is_err());
        }
        drop(wide);
        drop(second);
        assert_eq!((again.addr(), byte(at)), (at, Ok(3)));
        assert!(Reservation::new(u64::MAX, PAGE).is_err() && Reservation::new(PAGE, 3 * PAGE).is_err());
    }

    #[test]
    fn nearest_region() {
        let m = Memory::new();
        let a = m.alloc(64, "a").unwrap();
        let t = m.snapshot();
        assert_eq!(t.nearest(a.addr() + 70).unwrap().distance, 6);
        assert_eq!(t.nearest(a.addr() - 16).unwrap().distance, -16);
        assert_eq!(t.nearest(a.addr() + 60).unwrap().distance, 0);
        assert_eq!(t.find(a.addr() + 64, 0), Some(Found { start: a.addr(), bytes: 64, shadow: 0 }));
        assert_eq!(t.find(a.addr() + 64, 1), None);
        assert_eq!(t.find(a.addr(), u64::MAX), None);
        assert!(Memory::new().snapshot().nearest(5).is_none());
    }
}

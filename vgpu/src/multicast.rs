//! Multicast objects: memory of several devices behind one range of addresses.
//!
//! A `multimem` instruction at an offset of the range accesses the same offset in the memory of
//! each device. Nothing is mapped at the addresses themselves, and [`Memory`](crate::Memory) lists
//! them apart from memory, so that no other access finds them.

use std::sync::{Arc, Mutex, PoisonError};

use crate::memory::{Mapping, Region};
use crate::memory_error::{MemoryError, PAGE};

/// Memory of several devices that `multimem` instructions access together. Clones are the same
/// object. [`Memory::multicast`](crate::Memory::multicast) gives a device addresses of it.
///
/// The order of a reduction is that of the numbers of the devices.
#[derive(Clone, Debug)]
pub struct MulticastObject {
    bytes: u64,
    bound: Arc<Bound>,
    /// Keeps bound memory allocated: the regions of [`Bound`].
    owned: Arc<Mutex<Vec<Owned>>>,
}

/// A binding, with the region that it keeps.
#[derive(Debug)]
struct Owned {
    device: u32,
    at: u64,
    _region: Arc<Region>,
}

/// The bindings of an object. A snapshot keeps memory mapped, but not allocated, because a kernel
/// that drops it must not free a region.
#[derive(Debug, Default)]
struct Bound(Mutex<Arc<Devices>>);

/// The bindings of each device, by its number.
type Devices = Vec<(u32, Vec<Binding>)>;

/// A part of a device's memory behind a part of the addresses.
#[derive(Clone, Debug)]
struct Binding {
    at: u64,
    bytes: u64,
    /// Where the part begins.
    target: Target,
}

/// A place in the memory of a device.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) addr: u64,
    /// The place in its memory, as the checker numbers it.
    pub(crate) shadow: u32,
    pub(crate) offset: u64,
    pub(crate) label: Arc<str>,
    /// Kept mapped.
    #[allow(dead_code, reason = "it is kept mapped")]
    pub(crate) mapping: Arc<Mapping>,
}

impl Target {
    /// The place `bytes` bytes behind.
    fn behind(&self, bytes: u64) -> Target {
        Target { addr: self.addr + bytes, offset: self.offset + bytes, ..self.clone() }
    }
}

/// The place of an access in the memory of each device, with the number of the device, in the order
/// of the numbers.
pub(crate) type Targets = Vec<(u32, Target)>;

/// Addresses of an object, from an offset on.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    bound: Arc<Bound>,
    from: u64,
}

impl Window {
    /// The memory of each device behind `bytes` bytes at an offset. The error is the first device
    /// without memory there, if there is a device.
    pub(crate) fn targets(&self, offset: u64, bytes: u64) -> Result<Targets, Option<u32>> {
        let bound = self.bound.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let at = self.from + offset;
        let target = |(device, bindings): &(u32, Vec<Binding>)| {
            let holds = |b: &&Binding| at >= b.at && at - b.at < b.bytes && bytes <= b.bytes - (at - b.at);
            let binding = bindings.iter().find(holds).ok_or(Some(*device))?;
            Ok((*device, binding.target.behind(at - binding.at)))
        };
        match bound.is_empty() {
            true => Err(None),
            false => bound.iter().map(target).collect(),
        }
    }
}

impl MulticastObject {
    /// An object of so many bytes, without devices.
    #[must_use]
    pub fn new(bytes: u64) -> MulticastObject {
        MulticastObject { bytes, bound: Arc::default(), owned: Arc::default() }
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The numbers of its devices, in order.
    #[must_use]
    pub fn devices(&self) -> Vec<u32> {
        self.snapshot().iter().map(|(device, _)| *device).collect()
    }

    fn snapshot(&self) -> Arc<Devices> {
        self.bound.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn window(&self, from: u64) -> Window {
        Window { bound: self.bound.clone(), from }
    }

    fn change<T>(&self, f: impl FnOnce(&mut Devices) -> T) -> T {
        let mut bound = self.bound.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = Vec::clone(&bound);
        let result = f(&mut next);
        *bound = Arc::new(next);
        result
    }

    /// Adds a device. Accesses are faults until memory of all devices is bound at their offset.
    ///
    /// # Errors
    /// The device has been added already.
    pub fn add_device(&self, device: u32) -> Result<(), MemoryError> {
        self.change(|devices| match devices.binary_search_by_key(&device, |(number, _)| *number) {
            Ok(_) => {
                Err(MemoryError::Multicast { message: format!("device {device} is in the multicast object") })
            }
            Err(place) => {
                devices.insert(place, (device, vec![]));
                Ok(())
            }
        })
    }

    /// Binds `bytes` bytes of a device's memory from the offset `from` of a region on to the offset
    /// `at` of the object. The offsets are multiples of 4096. The region stays allocated until
    /// [`unbind`](Self::unbind), or until the object and all addresses of it are dropped.
    ///
    /// # Errors
    /// The device has not been added, the range lies outside of the region or of the object, or
    /// memory of the device is bound in a part of it.
    pub fn bind(
        &self,
        device: u32,
        at: u64,
        (region, from): (Arc<Region>, u64),
        bytes: u64,
    ) -> Result<(), MemoryError> {
        if let Some(addr) = [at, from].into_iter().find(|value| !value.is_multiple_of(PAGE)) {
            return Err(MemoryError::Misaligned { addr, align: PAGE });
        }
        for (start, whole) in [(at, self.bytes), (from, region.bytes())] {
            if start > whole || bytes > whole - start || bytes == 0 {
                return Err(MemoryError::OutOfBounds { addr: start, bytes, nearest: None });
            }
        }
        let wrong = |message: String| Err(MemoryError::Multicast { message });
        let Some(target) = region.target() else {
            return wrong("multicast addresses cannot be bound to others".into());
        };
        self.change(|devices| {
            let Some((_, bindings)) = devices.iter_mut().find(|(number, _)| *number == device) else {
                return wrong(format!("device {device} is not in the multicast object"));
            };
            if bindings.iter().any(|b| b.at < at + bytes && at < b.at + b.bytes) {
                return wrong(format!("memory of device {device} is bound there"));
            }
            bindings.push(Binding { at, bytes, target: target.behind(from) });
            Ok(())
        })?;
        let owned = Owned { device, at, _region: region };
        self.owned.lock().unwrap_or_else(PoisonError::into_inner).push(owned);
        Ok(())
    }

    /// Ends the bindings of a device's memory that lie in `bytes` bytes at an offset. Returns how
    /// many there were.
    pub fn unbind(&self, device: u32, at: u64, bytes: u64) -> usize {
        let inside = |start: u64, len: u64| start >= at && len <= bytes && start - at <= bytes - len;
        let mut gone = vec![];
        self.change(|devices| {
            if let Some((_, bindings)) = devices.iter_mut().find(|(number, _)| *number == device) {
                gone = bindings.extract_if(.., |b| inside(b.at, b.bytes)).map(|b| b.at).collect();
            }
        });
        let mut owned = self.owned.lock().unwrap_or_else(PoisonError::into_inner);
        let freed: Vec<Owned> =
            owned.extract_if(.., |owned| owned.device == device && gone.contains(&owned.at)).collect();
        drop(owned);
        freed.len()
    }
}

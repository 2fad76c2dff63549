//! How a network card reaches memory: the first way that works, and which one it was.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::device::Card;
use super::raw::{Mr, Pd};
use crate::driver::{Device, Memory, MemoryKind, RdmaWriteOrder};
use crate::error::{Error, Result};

/// How a network card reaches memory; the weakest way first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// It is host memory, page-locked by the registration. For a GPU's wire memory: the GPU reads
    /// and writes it over PCIe.
    Host,
    /// Device memory, by a peer-memory module of the kernel (nvidia-peermem).
    PeerMemory,
    /// Device memory, by a dma-buf from the GPU's driver.
    DmaBuf,
}

impl std::fmt::Display for Reach {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Reach::Host => "host memory",
            Reach::DmaBuf => "device memory by dma-buf",
            Reach::PeerMemory => "device memory by a peer-memory module",
        })
    }
}

/// The drivers' part in registering one memory; a test records its calls.
trait Drivers {
    type Region;
    fn export_dma_buf(&self) -> Result<OwnedFd>;
    fn register_dma_buf(&self, fd: OwnedFd) -> Result<Self::Region>;
    fn register_address(&self) -> Result<Self::Region>;
}

/// Registers memory: that of the host by its address; device memory by a dma-buf, or else by its
/// address too.
fn register_with<D: Drivers>(is_host: bool, drivers: &D) -> Result<(D::Region, Reach)> {
    if is_host {
        return Ok((drivers.register_address()?, Reach::Host));
    }
    let by_dma_buf = drivers.export_dma_buf().and_then(|fd| drivers.register_dma_buf(fd));
    let first = match by_dma_buf {
        Ok(region) => return Ok((region, Reach::DmaBuf)),
        Err(error) => error,
    };
    match drivers.register_address() {
        Ok(region) => Ok((region, Reach::PeerMemory)),
        Err(second) => Err(Error::Unavailable {
            what: "device memory for the network card".into(),
            reason: format!("by dma-buf: {first}; by a peer-memory module: {second}"),
        }),
    }
}

/// Wire memory in the place that the network cards reach: of the device, or, where one cannot reach
/// that, of the host.
fn choose<M>(
    is_virtual: bool,
    order: RdmaWriteOrder,
    alloc: impl Fn(MemoryKind) -> Result<M>,
    register: impl Fn(&M) -> Result<Reach>,
) -> Result<(M, Reach)> {
    if order >= RdmaWriteOrder::Owner {
        let memory = alloc(MemoryKind::Shareable)?;
        match register(&memory) {
            Ok(reach) => return Ok((memory, reach)),
            Err(error) if is_virtual => return Err(error),
            Err(error) => tracing::warn!(%error, "wire memory is host memory"),
        }
    } else {
        // The device could read a counter before the bytes written before it.
        tracing::warn!(
            "the driver does not order a card's writes to device memory: wire memory is host memory"
        );
    }
    let memory = alloc(MemoryKind::MappedHost)?;
    let reach = register(&memory)?;
    Ok((memory, reach))
}

/// Memory of a device and the registration on a card, one by one.
struct OnCard<'a> {
    pd: &'a Arc<Pd>,
    memory: &'a Arc<Memory>,
}

impl Drivers for OnCard<'_> {
    type Region = Mr;

    fn export_dma_buf(&self) -> Result<OwnedFd> {
        self.memory.export_dma_buf()
    }

    fn register_dma_buf(&self, fd: OwnedFd) -> Result<Mr> {
        Mr::of_dma_buf(self.pd, &fd, address(self.memory), self.memory.footprint())
    }

    fn register_address(&self) -> Result<Mr> {
        // SAFETY: `Region` keeps the memory for as long as the registration; wire memory is for
        // peers to write.
        unsafe { Mr::at_address(self.pd, address(self.memory), self.memory.footprint()) }
    }
}

/// Memory that is registered with a card, kept for as long as it is.
#[derive(Debug)]
pub(super) struct Region {
    // Before the memory: dropped first.
    mr: Mr,
    memory: Arc<Memory>,
    reach: Reach,
}

impl Region {
    /// The memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Registers all of the memory.
    pub fn new(pd: &Arc<Pd>, memory: &Arc<Memory>) -> Result<Region> {
        let is_host = memory.device().info().is_virtual || !memory.host_ptr().is_null();
        let (mr, reach) = register_with(is_host, &OnCard { pd, memory })?;
        Ok(Region { mr, memory: memory.clone(), reach })
    }

    pub fn address(&self) -> u64 {
        address(&self.memory)
    }

    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    pub fn lkey(&self) -> u32 {
        self.mr.lkey()
    }

    pub fn rkey(&self) -> u32 {
        self.mr.rkey()
    }

    pub fn reach(&self) -> Reach {
        self.reach
    }
}

/// The memory's address, in this process or, for a real GPU, on the device.
fn address(memory: &Memory) -> u64 {
    if memory.host_ptr().is_null() { memory.ptr().0 } else { memory.host_ptr() as u64 }
}

/// The weakest reach among all cards.
fn weakest(reaches: impl IntoIterator<Item = Result<Reach>>) -> Result<Reach> {
    reaches.into_iter().try_fold(Reach::DmaBuf, |weakest, reach| Ok(weakest.min(reach?)))
}

/// Allocates wire memory where all the cards reach it.
pub(super) fn wire_memory(cards: &[Card], device: &Device, bytes: u64) -> Result<(Arc<Memory>, Reach)> {
    choose(
        device.info().is_virtual,
        device.info().rdma_write_order,
        |kind| Memory::alloc(device, bytes, kind, "wire memory").map(Arc::new),
        |memory| weakest(cards.iter().map(|card| Ok(Region::new(&card.pd, memory)?.reach()))),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    /// Records the calls; those that are listed in `fails` fail.
    struct Fake {
        fails: &'static [&'static str],
        calls: RefCell<Vec<&'static str>>,
    }

    impl Fake {
        fn call<T>(&self, name: &'static str, value: impl FnOnce() -> T) -> Result<T> {
            self.calls.borrow_mut().push(name);
            if self.fails.contains(&name) { Err(Error::os(name, "no")) } else { Ok(value()) }
        }
    }

    impl Drivers for Fake {
        type Region = &'static str;
        fn export_dma_buf(&self) -> Result<OwnedFd> {
            self.call("export", || std::fs::File::open("/dev/null").unwrap().into())
        }
        fn register_dma_buf(&self, _: OwnedFd) -> Result<&'static str> {
            self.call("dma-buf", || "by dma-buf")
        }
        fn register_address(&self) -> Result<&'static str> {
            self.call("address", || "by address")
        }
    }

    fn tries(
        is_host: bool,
        fails: &'static [&'static str],
    ) -> (Result<(&'static str, Reach)>, Vec<&'static str>) {
        let fake = Fake { fails, calls: RefCell::default() };
        let result = register_with(is_host, &fake);
        (result, fake.calls.into_inner())
    }

    #[test]
    fn device_memory_goes_by_dma_buf_then_by_peer_memory() {
        let (result, calls) = tries(false, &[]);
        assert_eq!(result.unwrap(), ("by dma-buf", Reach::DmaBuf));
        assert_eq!(calls, ["export", "dma-buf"]);

        let (result, calls) = tries(false, &["export"]);
        assert_eq!(result.unwrap(), ("by address", Reach::PeerMemory));
        assert_eq!(calls, ["export", "address"]);

        let (result, calls) = tries(false, &["dma-buf"]);
        assert_eq!(result.unwrap(), ("by address", Reach::PeerMemory));
        assert_eq!(calls, ["export", "dma-buf", "address"]);

        let error = tries(false, &["export", "address"]).0.unwrap_err().to_string();
        assert!(
            error.contains("by dma-buf: export") && error.contains("peer-memory module: address"),
            "{error}"
        );
    }

    #[test]
    fn host_memory_goes_by_its_address_alone() {
        let (result, calls) = tries(true, &[]);
        assert_eq!(result.unwrap(), ("by address", Reach::Host));
        assert_eq!(calls, ["address"]);
        assert!(tries(true, &["address"]).0.is_err());
    }

    #[test]
    fn wire_memory_is_of_the_host_where_the_card_reaches_nothing_else() {
        let only_host = |kind: &MemoryKind| match kind {
            MemoryKind::MappedHost => Ok(Reach::Host),
            _ => Err(Error::os("register", "no")),
        };
        assert_eq!(
            choose(false, RdmaWriteOrder::Owner, Ok, |_| Ok(Reach::DmaBuf)).unwrap(),
            (MemoryKind::Shareable, Reach::DmaBuf)
        );
        assert_eq!(
            choose(false, RdmaWriteOrder::Owner, Ok, only_host).unwrap(),
            (MemoryKind::MappedHost, Reach::Host)
        );
        // One of two cards reaches it.
        let one_of_two = |kind: &MemoryKind| weakest([Ok(Reach::DmaBuf), only_host(kind)]);
        assert_eq!(
            choose(false, RdmaWriteOrder::Owner, Ok, one_of_two).unwrap(),
            (MemoryKind::MappedHost, Reach::Host)
        );
        assert_eq!(weakest([Ok(Reach::DmaBuf), Ok(Reach::PeerMemory)]).unwrap(), Reach::PeerMemory);
        // The card reaches device memory, but the device could read counters too early there.
        let unordered = choose(false, RdmaWriteOrder::None, Ok, |kind| match kind {
            MemoryKind::MappedHost => Ok(Reach::Host),
            _ => Ok(Reach::DmaBuf),
        });
        assert_eq!(unordered.unwrap(), (MemoryKind::MappedHost, Reach::Host));
        // The virtual GPU's memory is host memory: another kind would be no better.
        assert!(choose(true, RdmaWriteOrder::AllDevices, Ok, only_host).is_err());
    }
}

//! Ranks of one host that simulate several nodes. Each maps the peer's wire memory, which is host
//! memory: kernels write it themselves, or a put is a copy to it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::greeting;
use super::links::{Links, MappedPeer, PeerQueue};
use super::presence::{Life, Neighbours, Presence};
use super::put::{Put, PutQueue};
use super::setup::{LinkEnds, Setup, WireHost, Writer};
use crate::driver::Memory;
use crate::error::{Error, Result};

pub(super) fn connect(setup: &Setup<'_>) -> Result<Links> {
    let prepared = greeting::check_arguments(setup).and_then(|()| {
        let source = WireHost::of(setup)?;
        let (presence, reader) = Presence::new()?;
        Ok((source, presence, reader, setup.memory.export()?))
    });
    let address = prepared.as_ref().map(|_| String::new()).map_err(Error::clone);
    greeting::meet(setup, address)?;
    let (source, presence, reader, memory) = prepared?;
    // The ranks of one host exchange wire memory and a sign of life.
    let received = setup.group.exchange_fds(&[memory.as_fd(), reader.as_fd()])?;
    let mut neighbours = Neighbours { presence, lives: Vec::new() };
    let (mut links, mut mapped) = (Vec::new(), Vec::new());
    let connected = peers_of(setup, received).and_then(|peers| match setup.writer {
        Writer::Proxies => {
            links = make_links(setup, &source, peers)?;
            Ok(())
        }
        Writer::Kernels => peers.into_iter().try_for_each(|(peer, memory, life)| {
            let label = format!("wire memory of rank {peer}");
            let memory = Memory::import_host(setup.memory.device(), memory, source.bytes(), &label)?;
            mapped.push(MappedPeer { peer, memory: Arc::new(memory) });
            neighbours.lives.push((setup.ends(peer), life));
            Ok(())
        }),
    });
    greeting::agree(setup.group, setup.options.kind, connected)?;
    Ok(Links { links, mapped, receiving: vec![Box::new(neighbours)] })
}

/// Each peer's wire memory and sign of life.
fn peers_of(setup: &Setup<'_>, received: Vec<Vec<OwnedFd>>) -> Result<Vec<(u32, OwnedFd, Life)>> {
    let theirs = (0u32..).zip(received).filter(|(peer, _)| setup.peers.contains(peer));
    let pair = |(peer, fds): (u32, Vec<OwnedFd>)| {
        let count = fds.len();
        let [memory, life] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| {
            setup.ends(peer).error("connect", format!("it gave {count} descriptors instead of 2"))
        })?;
        Ok((peer, memory, Life::new(life)))
    };
    theirs.map(pair).collect()
}

fn make_links(
    setup: &Setup<'_>,
    source: &WireHost,
    peers: Vec<(u32, OwnedFd, Life)>,
) -> Result<Vec<PeerQueue>> {
    let target = |(peer, memory, life): (u32, OwnedFd, Life)| {
        let target = Target::map(&memory, source.bytes()).map_err(|reason| {
            setup.ends(peer).error("connect", format!("its wire memory cannot be mapped: {reason}"))
        })?;
        Ok((peer, Arc::new(target), Arc::new(life)))
    };
    let peers = peers.into_iter().map(target).collect::<Result<Vec<_>>>()?;
    let mut links = Vec::new();
    for index in 0..setup.options.queues_per_peer {
        for (peer, target, life) in &peers {
            let queue = ShmQueue {
                ends: setup.ends(*peer),
                source: source.clone(),
                target: target.clone(),
                life: life.clone(),
                posted: 0,
            };
            links.push(PeerQueue { peer: *peer, index, queue: Box::new(queue) });
        }
    }
    Ok(links)
}

/// A peer's wire memory as mapped here: ordinary memory, unknown to any driver.
#[derive(Debug)]
struct Target {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: an address range without thread affinity; its contents are accessed through raw pointers
// and atomics.
unsafe impl Send for Target {}
// SAFETY: as above; `&Target` gives out the address only.
unsafe impl Sync for Target {}

impl Target {
    /// Maps `bytes` of the file that a peer gave.
    fn map(file: &OwnedFd, bytes: u64) -> Result<Target, String> {
        // Behind the end of the file a copy would be a fault of this process.
        let has = rustix::fs::fstat(file).map_err(|error| format!("fstat: {error}"))?.st_size;
        if (has as u64) < bytes {
            return Err(format!("it has {has} bytes instead of {bytes}"));
        }
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a fresh mapping at an address of the system's choice.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes as usize, prot, flags, file, 0) }
            .map_err(|error| format!("mmap: {error}"))?;
        Ok(Target { base: base.cast(), bytes: bytes as usize })
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // SAFETY: mapped by us with this size; the queues that use it hold it.
        if let Err(error) = unsafe { munmap(self.base.cast(), self.bytes) } {
            tracing::warn!("munmap: {error}");
        }
    }
}

#[derive(Debug)]
struct ShmQueue {
    ends: LinkEnds,
    source: WireHost,
    target: Arc<Target>,
    life: Arc<Life>,
    posted: u64,
}

impl PutQueue for ShmQueue {
    fn put_with_counter(&mut self, puts: &[Put]) -> Result<()> {
        self.life.check().map_err(|reason| self.ends.error("put", reason))?;
        for put in puts {
            put.check(self.source.bytes()).map_err(|reason| self.ends.error("put", reason))?;
        }
        for put in puts {
            // SAFETY: checked above: all bytes are in the two memories, which have one size and
            // live as long as this queue. They are different memories, reached through addresses
            // only.
            unsafe {
                if put.bytes > 0 {
                    let to = self.target.base.add(put.to as usize);
                    std::ptr::copy_nonoverlapping(self.source.at(put.from), to, put.bytes as usize);
                }
                store_counter(self.target.base, put.counter, put.value);
            }
            self.posted += 1;
        }
        Ok(())
    }

    fn completed(&mut self) -> Result<u64> {
        Ok(self.posted)
    }

    fn source(&self) -> Option<&Memory> {
        Some(&self.source.memory)
    }

    // The peer reads the goodbye from this rank's `Presence`, once for all queues.
    fn close(&mut self) {}
}

/// Stores a counter in wire memory.
///
/// # Safety
/// `base` is the first byte of live memory in which `counter` lies with its 8 bytes; it is aligned.
unsafe fn store_counter(base: *mut u8, counter: u64, value: u64) {
    // SAFETY: the caller promises that the word is live and aligned; all readers use atomic loads.
    unsafe { AtomicU64::from_ptr(base.add(counter as usize).cast()) }.store(value, Ordering::Release);
}

//! One rank: its group, its wire memory, its queues.

use std::sync::Arc;
use std::time::{Duration, Instant};

use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::driver::{Device, Memory};
use epoxide::group::{MeshGroup, ProcessGroup, rendezvous};
use epoxide::internal::transport::{Links, connect, wire_memory};
use epoxide::transport::{TransportKind, TransportOptions};
use epoxide::{Error, Result};

/// A rank of the test.
pub struct Rank {
    pub group: MeshGroup,
    pub options: TransportOptions,
    pub timeout: Duration,
    pub deadline: Instant,
}

impl Rank {
    /// Joins the ranks that the environment names.
    pub fn join(timeout: Duration) -> Result<Rank> {
        let options =
            TransportOptions { timeout: timeout / 2, ..TransportOptions::new(TransportKind::Verbs) };
        Ok(Rank { group: rendezvous(timeout)?, options, timeout, deadline: Instant::now() + timeout })
    }

    pub fn rank(&self) -> u32 {
        self.group.rank()
    }

    pub fn peers(&self) -> Vec<u32> {
        (0..self.group.size()).filter(|peer| *peer != self.rank()).collect()
    }

    /// This rank's GPU, a virtual one; its number, the rank's on its host, picks the network card.
    pub fn device(&self) -> Device {
        let ordinal = std::env::var("LOCAL_RANK").ok().and_then(|rank| rank.parse().ok()).unwrap_or(0);
        VirtualGpu::new(VirtConfig { ordinal, ..VirtConfig::default() })
    }

    /// Zeroed wire memory of this rank's GPU.
    pub fn wire_memory(&self, bytes: u64) -> Result<Wire> {
        Ok(Wire { memory: wire_memory(&self.options, &self.device(), &self.group, bytes)? })
    }

    /// Queues to all peers; the group may be a wrapped one that lies.
    pub fn connect(&self, wire: &Wire, group: &dyn ProcessGroup, queues: u32) -> Result<Links> {
        let options = TransportOptions { queues_per_peer: queues, ..self.options.clone() };
        connect(&options, &wire.memory, group, &self.peers(), self.timeout)
    }

    /// Leaves in order: no rank drops its queues before all are done.
    pub fn leave(&self, mut links: Links) -> Result<()> {
        self.group.barrier(self.timeout)?;
        let start = Instant::now();
        links.close();
        println!("rank {} heard the goodbyes after {:.2?}", self.rank(), start.elapsed());
        self.group.destroy()
    }

    /// An error once the scenario takes too long.
    pub fn in_time(&self, what: impl Fn() -> String) -> Result<()> {
        if Instant::now() < self.deadline {
            return Ok(());
        }
        Err(Error::os("rdma_probe", format!("{} after {:?}", what(), self.timeout)))
    }
}

/// An error of the test: the result differs from the expected one.
pub fn wrong(what: impl std::fmt::Display) -> Error {
    Error::os("rdma_probe", what)
}

/// Wire memory that a virtual GPU and the host both access. Peers write it at any time.
pub struct Wire {
    pub memory: Arc<Memory>,
}

impl Wire {
    /// A word that a peer's card stores.
    pub fn counter(&self, at: u64) -> u64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.memory.bytes());
        let word = (self.memory.ptr().0 + at) as *const std::sync::atomic::AtomicU64;
        // SAFETY: within the memory, aligned, and on a virtual GPU an address of this process.
        unsafe { (*word).load(std::sync::atomic::Ordering::Acquire) }
    }

    /// Copies out the bytes that a peer has written; the caller must have read their counter.
    pub fn read(&self, at: u64, into: &mut [u8]) {
        assert!(at + into.len() as u64 <= self.memory.bytes());
        // SAFETY: within the memory; the peer does not write there until this read is acknowledged.
        unsafe {
            std::ptr::copy_nonoverlapping(
                (self.memory.ptr().0 + at) as *const u8,
                into.as_mut_ptr(),
                into.len(),
            );
        }
    }

    /// Fills what a put will send.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        assert!(at + bytes.len() as u64 <= self.memory.bytes());
        // SAFETY: within the memory; no put that has not left sends from there, and no peer writes
        // there.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), (self.memory.ptr().0 + at) as *mut u8, bytes.len());
        }
    }
}

//! A rank's side of a transport: its queues, the peers that need none, and its receivers.

use std::fmt::Debug;
use std::sync::Arc;

use super::put::PutQueue;
use crate::driver::Memory;
use crate::error::Error;

/// A queue, and where it leads.
#[derive(Debug)]
pub struct PeerQueue {
    /// The rank at the other end.
    pub peer: u32,
    /// Its index among the queues to this peer.
    pub index: u32,
    /// The queue.
    pub queue: Box<dyn PutQueue>,
}

/// The receiving side of a transport. Dropping it without [`Receiving::close`] looks like a death.
pub(crate) trait Receiving: Send + Sync + Debug {
    /// The first error of each peer that has one, by rank.
    fn failures(&self) -> Vec<(u32, Error)>;

    /// Signals the peers that this rank receives no more, and ends all threads.
    fn close(&mut self);
}

/// A peer whose wire memory is mapped here.
#[derive(Debug)]
pub(crate) struct MappedPeer {
    pub(super) peer: u32,
    pub(super) memory: Arc<Memory>,
}

/// All queues of a rank, the peers it needs none for, and what receives from its peers. Closed on
/// drop.
#[derive(Debug)]
pub struct Links {
    /// In ascending order of (queue, peer).
    pub(super) links: Vec<PeerQueue>,
    pub(super) mapped: Vec<MappedPeer>,
    pub(super) receiving: Vec<Box<dyn Receiving>>,
}

impl Links {
    /// The queues, in ascending order of (queue, peer).
    pub fn queues(&mut self) -> &mut [PeerQueue] {
        &mut self.links
    }

    /// The wire memory of a peer that is mapped here.
    pub fn mapped(&self, peer: u32) -> Option<&Arc<Memory>> {
        self.mapped.iter().find(|mapped| mapped.peer == peer).map(|mapped| &mapped.memory)
    }

    /// Failures of the receiving side, with their peers: peers that died without a goodbye, and
    /// those that sent an invalid frame.
    pub fn failures(&self) -> Vec<(u32, Error)> {
        self.receiving.iter().flat_map(|side| side.failures()).collect()
    }

    /// Sends all peers a goodbye and ends every thread. Later puts of peers fail there. Mapped
    /// memory is unmapped when this is dropped.
    pub fn close(&mut self) {
        for mut link in self.links.drain(..) {
            link.queue.close();
        }
        self.receiving.iter_mut().for_each(|side| side.close());
    }

    pub(super) fn extend(&mut self, mut more: Links) {
        self.links.append(&mut more.links);
        self.mapped.append(&mut more.mapped);
        self.receiving.append(&mut more.receiving);
    }

    pub(super) fn take(&mut self) -> Vec<PeerQueue> {
        std::mem::take(&mut self.links)
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.close();
    }
}

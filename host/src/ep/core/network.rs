//! The way to other nodes: wire memory, the queues to peers and the proxies that serve them.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use epoxide_gpu::layout::QueueHandle;

use crate::driver::{Device, DevicePtr};
use crate::error::Result;
use crate::group::ProcessGroup;
use crate::lock::lock;
use crate::transport::{self, Proxies, TransportOptions, Way, Writer};

/// How long queues may continue with posted puts when the buffer is dropped.
const GRACE: Duration = Duration::from_millis(200);

/// The ways to the ranks of other nodes, and the proxies of the queues to them.
#[derive(Debug)]
pub struct Network {
    // The proxies are dropped first: they use the ways' memory.
    proxies: Mutex<Proxies>,
    ways: Vec<Way>,
    bytes: u64,
}

impl Network {
    /// Allocates wire memory of `bytes`, finds a way to each of `peers`, and starts the proxies.
    /// `writer` is that of [`transport::open`].
    /// Collective.
    pub fn open(
        device: &Device,
        group: &dyn ProcessGroup,
        options: &TransportOptions,
        bytes: u64,
        peers: &[u32],
    ) -> Result<Network> {
        let timeout = group.timeout();
        let (ways, links) = transport::open(options, device, group, bytes, peers, timeout, Writer::Kernels)?;
        Ok(Network { proxies: Mutex::new(Proxies::start(device, links)?), ways, bytes })
    }

    /// Bytes of wire memory.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The ways, in the order of the peers.
    pub fn ways(&self) -> &[Way] {
        &self.ways
    }

    /// A queue to `peer` for kernels that count what they post at `posted`; `None` where there is
    /// no such queue.
    pub fn queue(&self, queue: u32, peer: u32, posted: DevicePtr) -> Option<QueueHandle> {
        self.proxies().handle(queue, peer).map(|queue| QueueHandle { queue, posted })
    }

    /// The network's part of the report of an expired wait, each entry with a separator in front.
    /// The entries are the first failure of a queue or of the receiving side, and proxies in a
    /// system call that does not return.
    pub fn context(&self) -> String {
        let proxies = self.proxies();
        let failure = proxies.failure().map(|failure| format!("; here, {failure}"));
        let calls = proxies.in_calls().into_iter().map(|call| format!("; here, {call}"));
        failure.into_iter().chain(calls).collect()
    }

    /// The proxies of the queues.
    pub fn proxies(&self) -> MutexGuard<'_, Proxies> {
        lock(&self.proxies)
    }

    /// Lets the queues finish, notifies the peers and ends all threads.
    pub fn close(&self) {
        self.proxies().close(GRACE);
    }
}

//! The way to other nodes: wire memory, the queues to peers and the proxies that serve them.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use epoxide_gpu::layout::QueueHandle;

use crate::driver::{Device, DevicePtr};
use crate::error::Result;
use crate::group::ProcessGroup;
use crate::lock::lock;
use crate::transport::{self, Proxies, TransportOptions, Way, Writer};

/// How long queues may continue with posted puts when a buffer is dropped that has failed.
const FAILED_GRACE: Duration = Duration::from_millis(200);

/// The ways to the ranks of other nodes, and the proxies of the queues to them.
#[derive(Debug)]
pub struct Network {
    // The proxies are dropped first: they use the ways' memory.
    proxies: Mutex<Proxies>,
    ways: Vec<Way>,
    bytes: u64,
    /// How long a put may wait for the network.
    put_timeout: Duration,
    /// The ranks that a regroup has left out.
    left_out: Mutex<Vec<u32>>,
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
        let proxies = Proxies::start(device, links)?;
        Ok(Network {
            proxies: Mutex::new(proxies),
            ways,
            bytes,
            put_timeout: options.timeout,
            left_out: Mutex::default(),
        })
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
    /// The entries are proxies in a system call that does not return, and for each rank not left
    /// out the first failure of a queue or of the receiving side.
    pub fn context(&self) -> String {
        let proxies = self.proxies();
        let mut named = lock(&self.left_out).clone();
        let mut failures = proxies.failures();
        failures.retain(|(peer, _)| {
            let is_new = !named.contains(peer);
            named.push(*peer);
            is_new
        });
        let failures = failures.into_iter().map(|(_, failure)| format!("; here, {failure}"));
        let calls = proxies.in_calls().into_iter().map(|call| format!("; here, {call}"));
        failures.chain(calls).collect()
    }

    /// Records the ranks that operations ignore from now on.
    pub fn leave_out(&self, ranks: Vec<u32>) {
        *lock(&self.left_out) = ranks;
    }

    /// The proxies of the queues.
    pub fn proxies(&self) -> MutexGuard<'_, Proxies> {
        lock(&self.proxies)
    }

    /// Lets the queues finish, notifies the peers and ends all threads. Peers may still need puts
    /// of operations that have succeeded here: such puts have as long as any other put.
    pub fn close(&self) {
        self.close_within(self.put_timeout);
    }

    /// The same, where an operation of the buffer has failed. Posted puts get little time.
    pub fn close_failed(&self) {
        self.close_within(FAILED_GRACE.min(self.put_timeout));
    }

    fn close_within(&self, grace: Duration) {
        let mut proxies = self.proxies();
        lock(&self.left_out).iter().for_each(|peer| proxies.give_up(*peer));
        proxies.close(grace);
    }
}

//! A process group that sends device tensors over NCCL.

use std::ffi::c_int;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use super::communicator::Communicator;
use super::config::Config;
use super::library::Library;
use crate::driver::Device;
use crate::error::Result;
use epoxide_group::internal::{Call, CallResult};
use epoxide_group::{JobSecret, ProcessGroup, Work};

/// A [`ProcessGroup`] with a backend for each kind of data, as PyTorch's groups have
/// (`cpu:gloo,cuda:nccl`). Host data is sent over another group, such as a
/// [`MeshGroup`](epoxide_group::MeshGroup), and device tensors over a [`Communicator`] of the same
/// ranks ([`NcclGroup::device`]).
///
/// Its parts ([`ProcessGroup::split`]) have both backends, [`ProcessGroup::abort`] aborts both, and
/// [`ProcessGroup::destroy`] ends both together with the other ranks.
#[derive(Debug)]
pub struct NcclGroup {
    host: Arc<dyn ProcessGroup>,
    device: Communicator,
    backend: &'static str,
}

impl NcclGroup {
    /// The ranks of `host`, with a device each. Collective. `config` is as for
    /// [`Communicator::over_group`].
    ///
    /// # Errors
    /// Those of [`Communicator::over_group`].
    pub fn new(
        host: Arc<dyn ProcessGroup>,
        library: &Arc<Library>,
        device: &Device,
        config: Config,
    ) -> Result<NcclGroup> {
        let device = Communicator::over_group(library, device, &*host, config)?;
        Ok(NcclGroup::of(host, device))
    }

    fn of(host: Arc<dyn ProcessGroup>, device: Communicator) -> NcclGroup {
        let backend = match host.backend() {
            "mesh" => "host:mesh,device:nccl",
            "store" => "host:store,device:nccl",
            _ => "device:nccl",
        };
        NcclGroup { host, device, backend }
    }

    /// The communicator of device tensors.
    pub fn device(&self) -> &Communicator {
        &self.device
    }

    /// The group of host data.
    pub fn host(&self) -> &Arc<dyn ProcessGroup> {
        &self.host
    }

    /// [`ProcessGroup::split`], keeping the type.
    ///
    /// # Errors
    /// Those of [`ProcessGroup::split`] and [`Communicator::new`].
    pub fn split_group(&self, color: u64) -> Result<NcclGroup> {
        let host = self.host.split(color)?;
        // NCCL has fewer colors than `u64`. So a part's color is the rank in this group of its
        // first member.
        let first = host.global_rank(0).and_then(|global| self.host.group_rank(global)).unwrap_or(0);
        let config = Config { name: host.name().to_owned(), ..self.device.config().clone() };
        let device = match self.device.library().functions.ncclCommSplit {
            Some(_) => self.device.split(Some(first), host.rank() as c_int, Some(config.clone()))?,
            None => None,
        };
        let device = match device {
            Some(device) => device,
            // Before 2.18.
            None => Communicator::over_group(self.device.library(), self.device.device(), &*host, config)?,
        };
        Ok(NcclGroup::of(host, device))
    }
}

impl ProcessGroup for NcclGroup {
    fn rank(&self) -> u32 {
        self.host.rank()
    }

    fn size(&self) -> u32 {
        self.host.size()
    }

    fn timeout(&self) -> Duration {
        self.host.timeout()
    }

    fn barrier(&self, timeout: Duration) -> Result<()> {
        self.host.barrier(timeout)
    }

    fn all_gather(&self, data: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.host.all_gather(data)
    }

    fn broadcast(&self, root: u32, data: &[u8]) -> Result<Vec<u8>> {
        self.host.broadcast(root, data)
    }

    fn exchange_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<Vec<Vec<OwnedFd>>> {
        self.host.exchange_fds(fds)
    }

    fn split(&self, color: u64) -> Result<Arc<dyn ProcessGroup>> {
        Ok(Arc::new(self.split_group(color)?))
    }

    fn missing_ranks(&self, wait: Duration) -> Result<Vec<u32>> {
        self.host.missing_ranks(wait)
    }

    fn name(&self) -> &str {
        self.host.name()
    }

    fn backend(&self) -> &'static str {
        self.backend
    }

    fn description(&self) -> &str {
        self.host.description()
    }

    fn job_secret(&self) -> Result<Option<JobSecret>> {
        self.host.job_secret()
    }

    fn shares_host(&self) -> bool {
        self.host.shares_host()
    }

    fn interface(&self) -> Option<&str> {
        self.host.interface()
    }

    fn global_rank(&self, rank: u32) -> Option<u32> {
        self.host.global_rank(rank)
    }

    fn group_rank(&self, global: u32) -> Option<u32> {
        self.host.group_rank(global)
    }

    fn call(&self, call: Call, timeout: Duration) -> Result<CallResult> {
        self.host.call(call, timeout)
    }

    fn start(&self, call: Call, timeout: Duration) -> Work {
        self.host.start(call, timeout)
    }

    fn abort(&self, reason: &str) {
        self.host.abort(reason);
        if let Err(left_behind) = self.device.abort(reason) {
            tracing::error!("{left_behind}");
        }
    }

    fn destroy(&self) -> Result<()> {
        // The host group ends after the device's communicator, so that a rank whose finalize fails
        // can abort the others.
        let device = self.device.finalize();
        if let Err(error) = &device {
            self.host.abort(&error.to_string());
        }
        device.and_then(|()| self.host.destroy())
    }
}

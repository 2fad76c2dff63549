//! The clusters of a grid: which block belongs to which, and how the blocks of one start, meet at
//! their barrier and end together.

use std::ops::Range;
use std::sync::Arc;

use super::{Block, Grid, Locked, WarpRef};
use crate::check::cluster::Peers;
use crate::device::{ClusterSizes, DeviceConfig, GridConfig};
use crate::exec::Barrier;
use crate::exec::cluster::ClusterMemory;
use crate::fault::{Fault, FaultKind, LaunchError};
use crate::ir::CLUSTER_BARRIER;
use crate::kernel::Kernel;
use crate::seeds::mix;

/// Most blocks of a cluster that every device with clusters takes.
const PORTABLE: u64 = 8;

/// Most blocks of a cluster where a launch allows sizes that not every device takes.
const MOST: u64 = 16;

/// How a grid is divided into clusters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clusters {
    /// Blocks of a cluster in x, y, z.
    pub(super) shape: [u32; 3],
    /// Clusters of the grid in x and y.
    clusters: [u64; 2],
    /// The launch or the kernel names a cluster.
    pub(super) explicit: bool,
}

impl Clusters {
    /// The clusters of a launch.
    ///
    /// # Errors
    /// The kernel or the grid does not allow them.
    pub(super) fn new(kernel: &Kernel, cfg: &GridConfig) -> Result<Self, LaunchError> {
        let given = cfg.cluster.map(|cluster| cluster.blocks).or(kernel.required_cluster);
        let sizes = cfg.cluster.map(|cluster| cluster.sizes).unwrap_or_default();
        let shape = given.unwrap_or([1; 3]);
        let refuse = |message: String| {
            Err(LaunchError::Cluster { kernel: kernel.name.clone(), cluster: shape, message })
        };
        if kernel.explicit_cluster && given.is_none() {
            return refuse("it is .explicitcluster: the launch names the blocks of a cluster".into());
        }
        if let Some(required) = kernel.required_cluster.filter(|required| *required != shape) {
            return refuse(format!("it requires clusters of {required:?} blocks (.reqnctapercluster)"));
        }
        let size = shape.iter().fold(1, |size: u64, &d| size.saturating_mul(d.into()));
        if size == 0 {
            return refuse("each dimension is 1 at least".into());
        }
        if size > MOST {
            return refuse(format!("{size} blocks, where {PORTABLE} are portable and {MOST} the most"));
        }
        if size > PORTABLE && sizes == ClusterSizes::Portable {
            return refuse(format!(
                "{size} blocks; {PORTABLE} are portable, and a launch allows up to {MOST} by ClusterSizes::NonPortable, \
                 --non-portable-cluster or CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED"
            ));
        }
        if let Some(max) = kernel.max_cluster.filter(|max| size > u64::from(*max)) {
            return refuse(format!("{size} blocks, and the kernel allows {max} (.maxclusterrank)"));
        }
        if let Some(d) = (0..3).find(|&d| !cfg.grid[d].is_multiple_of(shape[d])) {
            return refuse(format!(
                "the grid has {} blocks in {}, which is no multiple of {}: round it up, and let blocks without work return",
                cfg.grid[d],
                ["x", "y", "z"][d],
                shape[d]
            ));
        }
        let clusters = [0, 1].map(|d| u64::from(cfg.grid[d] / shape[d]));
        Ok(Self { shape, clusters, explicit: given.is_some() })
    }

    /// Blocks of a cluster.
    pub(super) fn size(&self) -> u32 {
        self.shape.iter().product()
    }

    /// The first of the slots that have the cluster of the block in `slot`.
    pub(super) fn first(&self, slot: u32) -> u32 {
        match self.size() {
            1 => slot,
            size => slot / size * size,
        }
    }

    /// The blocks that are resident at a time, as many as make whole clusters.
    ///
    /// # Errors
    /// Not even one cluster fits on the device.
    pub(super) fn resident(
        &self,
        kernel: &Kernel,
        dev: &DeviceConfig,
        threads: u32,
        shared: u32,
    ) -> Result<u32, LaunchError> {
        let blocks = dev.resident_blocks(threads, shared);
        let size = self.size();
        if blocks < size {
            return Err(LaunchError::Cluster {
                kernel: kernel.name.clone(),
                cluster: self.shape,
                message: format!(
                    "the device holds {blocks} blocks of {threads} threads and {shared} bytes at a time"
                ),
            });
        }
        Ok(blocks / size * size)
    }

    /// The index in the grid of the block that starts as number `number`, and its number in its
    /// cluster.
    pub(super) fn block(&self, number: u64) -> ([u32; 3], u32) {
        let size = u64::from(self.size());
        let (cluster, rank) = (number / size, number % size);
        let [x, y, _] = self.shape.map(u64::from);
        let of_cluster = [
            cluster % self.clusters[0],
            cluster / self.clusters[0] % self.clusters[1],
            cluster / self.clusters[0] / self.clusters[1],
        ];
        let within = [rank % x, rank / x % y, rank / x / y];
        let ctaid = [0, 1, 2].map(|d| (of_cluster[d] * u64::from(self.shape[d]) + within[d]) as u32);
        (ctaid, rank as u32)
    }
}

/// The block in `slot`, and the checks of the others of its cluster.
pub(super) fn with_peers(blocks: &mut [Block], clusters: Clusters, slot: u32) -> (&mut Block, Peers<'_>) {
    let size = clusters.size() as usize;
    if size == 1 {
        return (&mut blocks[slot as usize], Peers::default());
    }
    let first = clusters.first(slot) as usize;
    let rank = slot as usize - first;
    let (before, from) = blocks[first..first + size].split_at_mut(rank);
    let (own, behind) = from.split_at_mut(1);
    let others = before.iter_mut().map(|b| b.check.as_deref_mut());
    let others = others.chain([None]).chain(behind.iter_mut().map(|b| b.check.as_deref_mut()));
    (&mut own[0], Peers::new(rank as u32, others.collect()))
}

impl Grid {
    /// Puts the next cluster of the grid in the slots from `first` on.
    pub(super) fn start_cluster(&mut self, first: u32) {
        let size = self.clusters.size();
        (first..first + size).for_each(|slot| self.start_block(slot));
        if size > 1 {
            let blocks = &mut self.blocks[first as usize..(first + size) as usize];
            let memory = blocks.iter().map(|b| (b.state.shared.clone(), b.state.ctaid)).collect();
            let memory = Arc::new(ClusterMemory::new(memory));
            blocks.iter_mut().for_each(|b| b.state.join_cluster(&memory));
        }
    }

    fn cluster(&self, slot: u32) -> Range<usize> {
        let first = self.clusters.first(slot) as usize;
        first..first + self.clusters.size() as usize
    }

    /// Completes the barrier of a cluster if all of its blocks have arrived, or have ended.
    pub(super) fn wake_cluster(&mut self, slot: u32) {
        if self.clusters.size() == 1 {
            return;
        }
        let range = self.cluster(slot);
        let blocks = &mut self.blocks[range.clone()];
        let ended = |b: &Block| b.state.exited_warps == b.state.warps;
        if !blocks.iter().any(|b| b.state.waits_for_cluster)
            || !blocks.iter().all(|b| b.state.waits_for_cluster || ended(b))
        {
            return;
        }
        blocks.iter_mut().for_each(|b| b.state.complete_cluster_barrier());
        Peers::complete_barrier(blocks.iter_mut().filter_map(|b| b.check.as_deref_mut()));
        range.for_each(|slot| self.wake(slot as u32));
    }

    /// A warp of a cluster that waits at a barrier, if all of its warps do: only they could release
    /// each other.
    pub(super) fn waits_for_ever(&self, pick: WarpRef) -> Option<WarpRef> {
        let range = self.cluster(pick.block);
        let blocks = &self.blocks[range.clone()];
        if blocks.iter().any(|b| b.ready > 0) {
            return None;
        }
        let stuck = |slot: usize| {
            let state = &self.blocks[slot].state;
            state.exited_warps < state.warps
        };
        if stuck(pick.block as usize) {
            return Some(pick);
        }
        let slot = range.into_iter().find(|&slot| stuck(slot))?;
        let waits = self.blocks[slot].warps.iter().find(|warp| !warp.groups.is_empty())?;
        Some(WarpRef { block: slot as u32, warp: waits.index })
    }

    /// A hash of a cluster of which every warp waits for the others; 0 where one does not.
    pub(super) fn cluster_waits_for_itself(&self, range: Range<usize>) -> u64 {
        let blocks = &self.blocks[range];
        if blocks.iter().all(|b| b.state.exited_warps == b.state.warps) {
            return 0;
        }
        let mut hash = 0;
        for block in blocks {
            match self.waits_for_itself(block) {
                Some(state) if blocks.len() == 1 => hash = state,
                Some(state) => hash = mix(hash ^ state) | 1,
                None => return 0,
            }
        }
        hash
    }

    /// A barrier as a report on a block shows it: that of the cluster with all of its blocks.
    pub(super) fn barrier_of(&self, block: &Block, id: u32) -> Barrier {
        let mut own = block.state.barriers[id as usize];
        if id != CLUSTER_BARRIER || self.clusters.size() == 1 {
            return own;
        }
        let Some(slot) = self.blocks.iter().position(|b| std::ptr::eq(b, block)) else { return own };
        let blocks = &self.blocks[self.cluster(slot as u32)];
        own.arrived = blocks.iter().map(|b| b.state.barriers[id as usize].arrived).sum();
        own.expected = blocks.iter().map(|b| b.state.warps * 32).sum();
        own
    }

    /// A block of a cluster has ended: others must not need its shared memory.
    pub(super) fn leave_cluster(&mut self, slot: u32, locked: &mut Locked<'_>) -> Result<(), Box<Fault>> {
        let state = &self.blocks[slot as usize].state;
        let (rank, ctaid) = (state.rank, state.ctaid);
        if let Some(cluster) = &state.cluster {
            cluster.end(rank);
        }
        let late = self.cluster(slot).into_iter().find_map(|from| {
            let copy = self.blocks[from].state.copies_to(rank)?;
            (from != slot as usize).then_some((from as u32, copy))
        });
        if let Some((from, (warp, pc))) = late {
            let message = format!(
                "block {ctaid:?} has ended, and this copy to its shared memory is under way: its threads wait on their mbarrier before \
                 the last of them ends"
            );
            return Err(self.late_fault(from, (FaultKind::CopyOutlivesBlock { message }, warp, pc)));
        }
        let Some(block) = &self.blocks[slot as usize].check else { return Ok(()) };
        let Some(world) = locked.world() else { return Ok(()) };
        if !world.config.races {
            return Ok(());
        }
        let Some((visitor, pc, what)) = block.unordered_visitor(&world.grids) else { return Ok(()) };
        let kind = FaultKind::EndedBlock { block: ctaid, message: what };
        let fault =
            crate::check::report::collected(&world.grids, kind, (visitor, pc), None, std::iter::empty());
        world.reports.note(Box::new(fault))
    }
}

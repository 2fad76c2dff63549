//! Blocks of a cluster: each other's shared memory, and the barrier of them all.
//!
//! The window of shared memory has a part for each block of a cluster. Bits 24 to 31 of an address
//! are the block's number, as on sm_90: `mapa` exchanges them. The variables of a block lie in its
//! own part.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::state::{Barrier, BlockState, Exec, Flow, GroupState, Run, SharedMemory, stop};
use crate::check::hooks::Hooks;
use crate::fault::FaultKind;
use crate::ir::{CLUSTER_BARRIER, Op};

/// The lowest bit of a block's number in an address of shared memory.
pub(crate) const RANK_SHIFT: u32 = 24;

/// The number of the block whose shared memory has this address.
pub(crate) fn rank_of(address: u64) -> u32 {
    (address >> RANK_SHIFT) as u32 & 0xff
}

/// The offset of an address in its block's window.
pub(crate) fn offset_of(address: u64) -> u64 {
    address & ((1 << RANK_SHIFT) - 1)
}

/// The address in the block `rank` that corresponds to `address`.
pub(crate) fn map_shared(address: u64, rank: u32) -> u64 {
    address & !(0xff << RANK_SHIFT) | u64::from(rank & 0xff) << RANK_SHIFT
}

/// The shared memory of a cluster.
#[derive(Debug)]
pub(crate) struct ClusterMemory {
    /// By number, with the blocks' indices in the grid.
    blocks: Vec<(SharedMemory, [u32; 3])>,
    /// Blocks that have ended, one bit each.
    ended: AtomicU32,
}

impl ClusterMemory {
    pub(crate) fn new(blocks: Vec<(SharedMemory, [u32; 3])>) -> Self {
        Self { blocks, ended: AtomicU32::new(0) }
    }

    /// The block of this number ends.
    pub(crate) fn end(&self, rank: u32) {
        self.ended.fetch_or(1 << rank, Ordering::Relaxed);
    }

    /// Blocks of the cluster.
    pub(crate) fn size(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// The index in the grid of a block.
    pub(crate) fn ctaid(&self, rank: u32) -> Option<[u32; 3]> {
        self.blocks.get(rank as usize).map(|block| block.1)
    }

    fn pointer(&self, address: u64, bytes: u64) -> Result<*mut u8, FaultKind> {
        let rank = rank_of(address);
        let Some((memory, block)) = self.blocks.get(rank as usize) else {
            return Err(FaultKind::OutOfCluster { rank, blocks: self.blocks.len() as u32 });
        };
        if self.ended.load(Ordering::Relaxed) >> rank & 1 != 0 {
            return Err(FaultKind::EndedBlock { block: *block, message: String::new() });
        }
        memory.pointer(address, bytes)
    }
}

impl BlockState {
    /// Pointer to shared memory of any block of the cluster, if `bytes` bytes from `address` on
    /// exist.
    #[inline]
    pub(super) fn in_cluster(&self, address: u64, bytes: u64) -> Result<*mut u8, FaultKind> {
        match (self.shared.pointer(address, bytes), &self.cluster) {
            (Err(_), Some(cluster)) if rank_of(address) != self.rank => cluster.pointer(address, bytes),
            (own, _) => own,
        }
    }

    /// Whether an address is that of another block's shared memory.
    pub(crate) fn is_remote(&self, address: u64) -> bool {
        self.cluster.is_some() && rank_of(address) != self.rank
    }

    /// Counts a warp at the barrier of the cluster.
    pub(super) fn arrive_at_cluster(&mut self, warp: u32) {
        self.cluster_arrivals |= 1 << warp;
        let b = &mut self.barriers[CLUSTER_BARRIER as usize];
        b.arrived += 32;
        b.expected = self.warps * 32;
        self.complete_part_of_cluster();
    }

    /// The block has arrived at the barrier of the cluster once all of its warps have arrived or
    /// ended. A block that is a cluster by itself continues.
    pub(super) fn complete_part_of_cluster(&mut self) {
        let there = (self.cluster_arrivals | self.ended_warps).count_ones();
        if self.cluster_arrivals == 0 || there < self.warps {
            return;
        }
        match &self.cluster {
            None => self.complete_cluster_barrier(),
            Some(_) => self.waits_for_cluster = true,
        }
    }

    /// All blocks have arrived at the barrier of the cluster.
    pub(crate) fn complete_cluster_barrier(&mut self) {
        self.waits_for_cluster = false;
        self.cluster_arrivals = 0;
        self.barriers[CLUSTER_BARRIER as usize] = Barrier::default();
        self.completed |= 1 << CLUSTER_BARRIER;
        self.cluster_phases += 1;
    }

    /// Prepares a block of a cluster to start.
    pub(crate) fn join_cluster(&mut self, cluster: &Arc<ClusterMemory>) {
        self.cluster = Some(cluster.clone());
    }

    /// Resets the state of the previous cluster's barrier.
    pub(crate) fn start_in_cluster(&mut self, rank: u32) {
        (self.rank, self.cluster) = (rank, None);
        (self.cluster_arrivals, self.ended_warps, self.cluster_phases) = (0, 0, 0);
        self.waits_for_cluster = false;
    }
}

impl<W: Hooks> Exec<'_, W> {
    /// `barrier.cluster.arrive`: the warp counts once all its live lanes have arrived, and
    /// continues. A lane waits between two arrivals.
    pub(super) fn arrive_at_cluster(&mut self, aligned: bool) -> Run<Flow> {
        if aligned || self.gathers_to_wait() {
            self.one_aligned_barrier(CLUSTER_BARRIER)?;
        }
        let unwaited = self.mask & !self.warp.cluster_waited;
        if unwaited != 0 {
            return misuse(
                "the warp arrives again without a wait: barrier.cluster.wait comes between",
                unwaited,
            );
        }
        let state =
            GroupState::Barrier { id: CLUSTER_BARRIER, count: None, arrive_only: true, arrived: false };
        self.push(self.mask, self.pc, state);
        self.changed();
        self.count_warp(CLUSTER_BARRIER)?;
        Ok(Flow::Gone)
    }

    /// `barrier.cluster.wait`: the lanes continue once all blocks have arrived. With `.aligned` all
    /// live lanes of the warp come to it first.
    pub(super) fn wait_for_cluster(&mut self, aligned: bool) -> Run<Flow> {
        let early = self.mask & self.warp.cluster_waited;
        if early != 0 {
            return misuse("the warp waits without an arrival: barrier.cluster.arrive comes first", early);
        }
        let (id, count, arrive_only) = (CLUSTER_BARRIER, None, false);
        if aligned {
            self.one_aligned_barrier(CLUSTER_BARRIER)?;
            for g in self.warp.groups.extract_if(.., |g| g.waits_for_its_warp()) {
                self.mask |= g.mask;
            }
            self.apart = false;
            if self.mask != self.warp.live {
                let state = GroupState::Barrier { id, count, arrive_only, arrived: false };
                self.push(self.mask, self.pc, state);
                return Ok(Flow::Gone);
            }
            self.warp.converged.meet(self.mask);
        }
        // A completion that the block has not processed yet wakes the warp.
        let noticed = self.block.completed >> CLUSTER_BARRIER & 1 == 0;
        if noticed && self.warp.cluster_arrivals <= self.block.cluster_phases {
            if W::ON {
                self.watch.pass(self.mask, CLUSTER_BARRIER);
            }
            self.warp.cluster_waited |= self.mask;
            self.pc += 1;
            return Ok(Flow::Next);
        }
        self.push(self.mask, self.pc, GroupState::Barrier { id, count, arrive_only, arrived: true });
        Ok(Flow::Gone)
    }

    /// Whether lanes of the warp stand at an aligned wait, and other lanes have yet to come.
    fn gathers_to_wait(&self) -> bool {
        let code = &self.kernel.code;
        let waits = |pc: u32| matches!(code[pc as usize].op, Op::ClusterWait { .. });
        self.warp.groups.iter().any(|g| g.waits_for_its_warp() && waits(g.pc))
    }

    /// The lanes at the barrier of the cluster whose arrivals release nothing.
    pub(super) fn relaxed_arrivals(&self) -> u32 {
        let code = &self.kernel.code;
        let relaxed = |pc: u32| matches!(code[pc as usize].op, Op::ClusterArrive { relaxed: true, .. });
        self.warp.groups.iter().filter(|g| g.waits_for_its_warp() && relaxed(g.pc)).fold(0, |m, g| m | g.mask)
    }
}

/// The fault of the lanes `wrong` at the barrier of the cluster.
fn misuse<T>(message: &str, wrong: u32) -> Run<T> {
    let kind = FaultKind::BadBarrier { barrier: CLUSTER_BARRIER, message: message.into() };
    stop(kind, Some(wrong.trailing_zeros() as usize))
}

//! The links' own speed, measured with the copies that dispatch and combine consist of.

use bytemuck::Zeroable;
use epoxide_gpu::kernels::{CeilingPull, CeilingPush};
use epoxide_gpu::layout::{CeilingArgs, ring_bytes};

use super::{Buffer, DType, TypedTensor, check_fits};
use crate::driver::Stream;
use crate::error::{Error, Result};

/// The direction of the copies of `Buffer::launch_ceiling`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Each rank loads its own rows and stores them to its peers, as dispatch does.
    Push,
    /// Each rank loads its peers' rows and stores them locally, as combine does.
    Pull,
}

/// One ceiling measurement's shape. Each row is stored to (or loaded from) `fanout` peers.
#[derive(Debug, Clone, Copy)]
pub struct CeilingShape {
    /// Blocks: multiprocessors.
    pub blocks: u32,
    /// Warps per block.
    pub warps: u32,
    /// Buffers in flight per warp, each of a row; at least 2.
    pub stages: u32,
    /// Rows per rank.
    pub rows: u32,
    /// Bytes per row, a multiple of 16.
    pub row_bytes: u32,
    /// Peers per row, 1 to all of them.
    pub fanout: u32,
}

impl CeilingShape {
    /// The arguments that are the shape's.
    fn args(&self) -> CeilingArgs {
        CeilingArgs {
            rows: self.rows,
            row_bytes: self.row_bytes,
            stages: self.stages,
            fanout: self.fanout,
            ..CeilingArgs::zeroed()
        }
    }

    /// Bytes that are stored, over this rank's links where they are not local.
    pub fn stored_bytes(&self) -> u64 {
        self.rows as u64 * self.fanout as u64 * self.row_bytes as u64
    }
}

/// Enqueues one run on `stream`, among the ranks of this node or, where it has only this one,
/// between nodes whose wire memory is mapped. It overwrites received rows, or slots, on this
/// rank (pull) or on the peers (push). Separate it from operations by a barrier on both sides.
///
/// # Errors
/// [`Error::Argument`] and [`Error::Launch`] where the shape does not fit the group, the device
/// or the pool.
pub fn launch_ceiling(
    buffer: &Buffer,
    direction: Direction,
    shape: CeilingShape,
    stream: &Stream,
) -> Result<()> {
    let pool = buffer.comm.pool;
    let side = buffer.wire.as_ref().filter(|_| buffer.comm.num_ranks == 1);
    let between_nodes = side.and_then(|side| side.mapped).map(|mapped| (mapped, buffer.wire()));
    let (pools, rank, num_ranks, from, to, room) = match between_nodes {
        Some((table, wire)) => {
            let (layout, nodes) = (wire.layout, wire.num_nodes);
            let room = layout.node_bytes * nodes as u64;
            (table, wire.node, nodes, layout.slots_out, layout.slots_in, room)
        }
        // Pools of other nodes are out of reach.
        None => {
            let (comm, room) = (&buffer.comm, pool.combine_x - pool.recv_x);
            (buffer.tables.ptr(), comm.rank, comm.num_ranks, pool.combine_x, pool.recv_x, room)
        }
    };
    let args = CeilingArgs { pools: pools.into(), from, to, rank, num_ranks, ..shape.args() };
    launch_shape(buffer, direction, shape, (args, room), stream)
}

/// The parts of this rank's rows that stand for ranks in [`launch_local_ceiling`]:
/// `fanout` of the shape, and one.
pub fn local_parts(
    buffer: &Buffer,
    shape: CeilingShape,
    stream: &Stream,
) -> Result<TypedTensor<'static, i64>> {
    let part = u64::from(shape.rows) * u64::from(shape.row_bytes);
    let own = buffer.core.pool_addresses()[buffer.comm.rank as usize];
    let parts: Vec<i64> = (0..=u64::from(shape.fanout)).map(|number| (own + number * part) as i64).collect();
    TypedTensor::from_host(stream, &[parts.len() as u64], &parts)
}

/// Loads each row of the first part of this rank's received rows and stores it to all others,
/// as a dispatch of rows by expert does beside its pushes. The run measures how fast these
/// multiprocessors can store. `parts`: of the same shape.
pub fn launch_local_ceiling(
    buffer: &Buffer,
    parts: &TypedTensor<'static, i64>,
    shape: CeilingShape,
    stream: &Stream,
) -> Result<()> {
    parts.expect("parts", &[DType::I64], &[("parts", Some(u64::from(shape.fanout) + 1))])?;
    let (pool, num_ranks) = (buffer.comm.pool, shape.fanout + 1);
    let (from, to) = (pool.recv_x, pool.recv_x);
    let args = CeilingArgs { pools: parts.ptr().into(), from, to, rank: 0, num_ranks, ..shape.args() };
    launch_shape(buffer, Direction::Push, shape, (args, pool.combine_x - pool.recv_x), stream)
}

/// Enqueues the kernel of a direction whose rows have `room` bytes.
fn launch_shape(
    buffer: &Buffer,
    direction: Direction,
    shape: CeilingShape,
    (args, room): (CeilingArgs, u64),
    stream: &Stream,
) -> Result<()> {
    let needed = shape.rows as u64 * args.num_ranks as u64 * shape.row_bytes as u64;
    check_fits(("ceiling rows", "bytes"), needed, room, "more rows")?;
    if shape.blocks == 0 || shape.warps == 0 || shape.warps > 16 {
        let value = format!("{} blocks of {} warps", shape.blocks, shape.warps);
        return Err(Error::argument("ceiling shape", value, "at least one block of 1 to 16 warps"));
    }
    let (grid, block) = (shape.blocks, shape.warps * 32);
    let shared = ring_bytes(shape.warps, shape.stages, shape.row_bytes);
    // SAFETY: the pools are mapped as long as the buffer lives, and it synchronises before it
    // unmaps them.
    unsafe {
        match direction {
            Direction::Push => {
                let kernel = buffer.kernels.ceiling_push()?;
                stream.call(kernel, grid, block, shared, CeilingPush::call(args))
            }
            Direction::Pull => {
                let kernel = buffer.kernels.ceiling_pull()?;
                stream.call(kernel, grid, block, shared, CeilingPull::call(args))
            }
        }
    }
}

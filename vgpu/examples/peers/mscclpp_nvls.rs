//! Three of MSCCL++'s all-reduces over multicast addresses (NVLS), between three virtual GPUs:
//! without copies, by packets, and as a pipeline of warps.
//!
//! Each runs several times, so that scratch memory and semaphores are used again. A kernel of the
//! host writes the input of the one without copies, and another reads its result, as kernels of a
//! model would. Numbers are whole ones, so that sums are exact in any order.

use std::error::Error;

use epoxide_vgpu::{Array, GridConfig, Machine, MachineError, Module, Symmetric};

use crate::mscclpp::{RANKS, Semaphores};
use crate::{Case, Found, outcome};

const LAUNCHES: usize = 3;
const THREADS: u32 = 64;
/// Blocks of the all-reduce without copies, and of packets.
const BLOCKS: usize = 3;
const ZERO_COPY_LEN: usize = RANKS * 4 * 100;
const PACKET_LEN: usize = RANKS * 80;
/// Blocks of the pipeline, one for each connection, their threads, and the bytes of an iteration.
const CONNECTIONS: usize = 8;
const PIPELINE_THREADS: u32 = 1024;
const PIPELINE_STEP: usize = 1024 * 16;
/// An iteration and a part of one for each block, and room for four iterations.
const PIPELINE_LEN: usize = RANKS * CONNECTIONS * (PIPELINE_STEP + 1024) / 4;
const PIPELINE_SCRATCH: usize = RANKS * CONNECTIONS * 4 * PIPELINE_STEP / 4;

/// Copies a word for each thread of a grid.
pub const COPY: &str = "
.version 8.1
.target sm_90
.address_size 64
.visible .entry copy(.param .u64 from, .param .u64 to)
{
.reg .b32 %r<6>;
.reg .b64 %rd<4>;
ld.param.u64 %rd1, [from];
ld.param.u64 %rd2, [to];
mov.u32 %r1, %ctaid.x;
mov.u32 %r2, %ntid.x;
mov.u32 %r3, %tid.x;
mad.lo.u32 %r4, %r1, %r2, %r3;
mul.wide.u32 %rd3, %r4, 4;
add.s64 %rd1, %rd1, %rd3;
add.s64 %rd2, %rd2, %rd3;
ld.global.u32 %r5, [%rd1];
st.global.u32 [%rd2], %r5;
ret;
}
";

/// A rank's number at a place.
pub(crate) fn value(launch: usize, rank: usize, at: usize) -> f32 {
    (launch * 1000 + rank * 100 + at % 97) as f32
}

/// The numbers of all ranks there.
pub(crate) fn sum(launch: usize, at: usize) -> f32 {
    (0..RANKS).map(|rank| value(launch, rank, at)).sum()
}

/// `SwitchChannelDeviceHandle`s of an array: so many, all the same. Nothing uses their barriers.
fn switch(
    machine: &Machine,
    rank: usize,
    own: &Symmetric<f32>,
    all: &[Array<f32>],
    channels: usize,
) -> Result<Array<u64>, MachineError> {
    let bytes = 4 * own.of(rank).len() as u64;
    let handle = [own.of(rank).addr(), all[rank].addr(), bytes, 0, 0, 0, RANKS as u64];
    machine.upload(rank, "switch channels", &handle.repeat(channels))
}

/// One run; an error if the kernels cannot be launched at all.
pub fn run(case: &Case) -> Result<Found, Box<dyn Error>> {
    let (module, mut machine) = (case.module, case.machine(RANKS));
    let [zero_copy, packet, pipeline] =
        ["13allreduceNvlsI", "19allreduceNvlsPacket", "25allreduceNvlsWarpPipeline"]
            .map(|name| case.kernel(&[name]));
    let (zero_copy, packet, pipeline) = (zero_copy?, packet?, pipeline?);
    let copy = Module::parse(COPY)?;
    let copies = GridConfig::new(ZERO_COPY_LEN as u32 / 16, 16, 0);

    let symmetric = |label: &str, len: usize| machine.symmetric_alloc::<f32>(label, len);
    let (input, result) = (symmetric("input", ZERO_COPY_LEN)?, symmetric("result", ZERO_COPY_LEN)?);
    let packet_bytes = 2 * RANKS * PACKET_LEN * 8;
    let packet_scratch = machine.symmetric("packet scratch", &vec![0.0; packet_bytes / 4])?;
    let pipeline_scratch = symmetric("pipeline scratch", PIPELINE_SCRATCH)?;
    let (all_input, all_result) = (machine.multicast(&input)?, machine.multicast(&result)?);
    let (all_packets, all_pipeline) =
        (machine.multicast(&packet_scratch)?, machine.multicast(&pipeline_scratch)?);
    let zero_copy_sem = Semaphores::new(&machine, BLOCKS)?;
    let pipeline_sem = Semaphores::new(&machine, 2 * CONNECTIONS)?;

    let mut results = vec![];
    for rank in 0..RANKS {
        let flags = machine.upload(rank, "flags", &[1u32; 16])?;
        let channels = zero_copy_sem.base(&machine, rank, BLOCKS)?;
        let pipeline_channels = pipeline_sem.base(&machine, rank, 2 * CONNECTIONS)?;
        let switch_in = switch(&machine, rank, &input, &all_input, BLOCKS)?;
        let switch_out = switch(&machine, rank, &result, &all_result, BLOCKS)?;
        let switch_packets = switch(&machine, rank, &packet_scratch, &all_packets, 1)?;
        let switch_pipeline = switch(&machine, rank, &pipeline_scratch, &all_pipeline, CONNECTIONS)?;
        for launch in 0..LAUNCHES {
            let given = |machine: &Machine, len: usize| {
                let numbers: Vec<f32> = (0..len).map(|at| value(launch, rank, at)).collect();
                machine.upload(rank, "given", &numbers)
            };
            let out = |machine: &Machine, len: usize| machine.alloc::<f32>(rank, "out", len);
            let ranks = [rank as i32, RANKS as i32];
            let no_offsets = [0u64, 0];

            let (x, y) = (given(&machine, ZERO_COPY_LEN)?, out(&machine, ZERO_COPY_LEN)?);
            machine.launch_with(rank, &copy, "copy", copies, &[&x, input.of(rank)])?;
            let grid = GridConfig::new(BLOCKS as u32, THREADS, 0);
            #[rustfmt::skip]
            machine.launch_with(rank, module, &zero_copy, grid, &[
                &channels, &switch_in, &switch_out, &no_offsets, &(4 * ZERO_COPY_LEN as u64), &ranks,
            ])?;
            machine.launch_with(rank, &copy, "copy", copies, &[result.of(rank), &y])?;
            results.push(("result", launch, rank, y));

            let (x, y) = (given(&machine, PACKET_LEN)?, out(&machine, PACKET_LEN)?);
            #[rustfmt::skip]
            machine.launch_with(rank, module, &packet, grid, &[
                &x, packet_scratch.of(rank), &y, &switch_packets, &(PACKET_LEN as u64),
                &(packet_bytes as u64), &ranks, &flags, &64u32,
            ])?;
            results.push(("packets", launch, rank, y));

            let (x, y) = (given(&machine, PIPELINE_LEN)?, out(&machine, PIPELINE_LEN)?);
            let grid = GridConfig::new(CONNECTIONS as u32, PIPELINE_THREADS, 0);
            #[rustfmt::skip]
            machine.launch_with(rank, module, &pipeline, grid, &[
                &x, pipeline_scratch.of(rank), &y, &pipeline_channels, &switch_pipeline,
                &(4 * PIPELINE_LEN as u64), &(4 * PIPELINE_SCRATCH as u64), &ranks,
            ])?;
            results.push(("pipeline", launch, rank, y));
        }
    }
    let oracle = || {
        for (name, launch, rank, out) in &results {
            for (at, got) in out.download()?.into_iter().enumerate() {
                if got != sum(*launch, at) {
                    return Ok(Some(format!("sum of {name}: {got} at {at} of rank {rank}, launch {launch}")));
                }
            }
        }
        Ok(None)
    };
    Ok(outcome(&mut machine, oracle)?)
}

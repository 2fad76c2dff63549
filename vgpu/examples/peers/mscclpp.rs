//! Four of MSCCL++'s all-reduces over memory channels, between three virtual GPUs: by packets, by
//! reduce-scatter and all-gather, the same as a pipeline, and all to all.
//!
//! Each runs several times, so that scratch memory and semaphores are used again. Numbers are whole
//! ones. The handles of channels are laid out by hand, from `memory_channel_device.hpp`.

use std::error::Error;

use epoxide_vgpu::{Array, GridConfig, Machine, MachineError, Symmetric};

use crate::{Case, Found, outcome};

pub const RANKS: usize = 3;
const PEERS: usize = RANKS - 1;
const LAUNCHES: usize = 3;
const THREADS: u32 = 64;
/// Numbers of each all-reduce.
const PACKET_LEN: usize = RANKS * 80;
const RSAG_LEN: [usize; 2] = [RANKS * 4 * 50 + 2, RANKS * 4 * 50 + 4];
/// Three chunks of the pipeline and a part of one, in units of 16 bytes.
const PIPELINE_CHUNK: usize = RANKS * 2 * THREADS as usize * 4;
const PIPELINE_LEN: usize = 4 * (3 * PIPELINE_CHUNK + 100);
const FULLMESH_LEN: usize = RANKS * 4 * 150;

fn value(launch: usize, rank: usize, at: usize) -> i32 {
    (launch * 1000 + rank * 100 + at % 97) as i32
}

fn sum(launch: usize, at: usize) -> i32 {
    (0..RANKS).map(|rank| value(launch, rank, at)).sum()
}

/// The semaphores of a number of channels between each two ranks.
pub struct Semaphores {
    inbound: Symmetric<u64>,
    expected: Symmetric<u64>,
}

impl Semaphores {
    pub fn new(machine: &Machine, channels: usize) -> Result<Self, MachineError> {
        let zeros = vec![0; channels * RANKS];
        let (inbound, expected) = ("inbound tokens", "expected tokens");
        Ok(Self {
            inbound: machine.symmetric(inbound, &zeros)?,
            expected: machine.symmetric(expected, &zeros)?,
        })
    }

    /// `MemoryDevice2DeviceSemaphoreDeviceHandle` of a channel of `rank` to `peer`.
    fn handle(&self, rank: usize, peer: usize, channel: usize) -> [u64; 3] {
        let at = |with: usize| 8 * (channel * RANKS + with) as u64;
        let remote = self.inbound.on(rank)[peer].addr() + at(rank);
        [self.inbound.of(rank).addr() + at(peer), remote, self.expected.of(rank).addr() + at(peer)]
    }

    /// `BaseMemoryChannelDeviceHandle`s: those to all peers for each channel.
    pub fn base(&self, machine: &Machine, rank: usize, channels: usize) -> Result<Array<u64>, MachineError> {
        let each = (0..channels).flat_map(|channel| peers(rank).map(move |peer| (peer, channel)));
        let handles: Vec<u64> = each.flat_map(|(peer, channel)| self.handle(rank, peer, channel)).collect();
        machine.upload(rank, "channels", &handles)
    }

    /// `MemoryChannelDeviceHandle`s, which write into `to` of the peer and read from `from`.
    fn memory(
        &self,
        machine: &Machine,
        rank: usize,
        channels: usize,
        to: &Symmetric<i32>,
        from: u64,
    ) -> Result<Array<u64>, MachineError> {
        let each = (0..channels).flat_map(|channel| peers(rank).map(move |peer| (peer, channel)));
        let handle = |(peer, channel)| {
            self.handle(rank, peer, channel).into_iter().chain([to.on(rank)[peer].addr(), from, 0])
        };
        machine.upload(rank, "channels", &each.flat_map(handle).collect::<Vec<u64>>())
    }
}

fn peers(rank: usize) -> impl Iterator<Item = usize> {
    (0..RANKS).filter(move |&peer| peer != rank)
}

/// One run; an error if the kernels cannot be launched at all.
pub fn run(case: &Case) -> Result<Found, Box<dyn Error>> {
    let (module, mut machine) = (case.module, case.machine(RANKS));
    let [packet, rsag, pipeline, fullmesh] =
        ["15allreducePacket", "13allreduceRsAgI", "21allreduceRsAgPipeline", "17allreduceFullmesh"]
            .map(|name| case.kernel(&[name]));
    let (packet, rsag, pipeline, fullmesh) = (packet?, rsag?, pipeline?, fullmesh?);
    // Blocks of the packets and of the exchange, and those that put, reduce and receive.
    let (blocks, put, reduce, receive) = (2 * PEERS, 1, 2, 1);

    let rsag_len = RSAG_LEN[usize::from(case.step.ends_with("-604"))];

    let packet_half = 3 * (PACKET_LEN / 2) * 4;
    let packet_scratch = machine.symmetric("packet scratch", &vec![0; 2 * packet_half])?;
    let rsag_scratch = machine.symmetric_alloc("rsag scratch", rsag_len.next_multiple_of(4 * RANKS))?;
    let pipeline_scratch = machine.symmetric_alloc("pipeline scratch", 2 * 2 * PIPELINE_CHUNK * 4)?;
    let fullmesh_scratch = machine.symmetric_alloc("fullmesh scratch", RANKS * (256 << 10) / 4)?;
    let fullmesh_results: Vec<Symmetric<i32>> = (0..LAUNCHES)
        .map(|_| machine.symmetric_alloc("fullmesh result", FULLMESH_LEN))
        .collect::<Result<_, _>>()?;
    let semaphores =
        [1, blocks, reduce + receive, blocks].map(|channels| Semaphores::new(&machine, channels));
    let [packet_sem, rsag_sem, pipeline_sem, fullmesh_sem] = semaphores;
    let (packet_sem, rsag_sem) = (packet_sem?, rsag_sem?);
    let (pipeline_sem, fullmesh_sem) = (pipeline_sem?, fullmesh_sem?);
    let flags: Vec<_> =
        (0..RANKS).map(|rank| machine.upload(rank, "flags", &[1u32; 16])).collect::<Result<_, _>>()?;

    let mut results = vec![];
    for (rank, flags) in flags.iter().enumerate() {
        let remote = |scratch: &Symmetric<i32>| {
            let addrs: Vec<u64> = peers(rank).map(|peer| scratch.on(rank)[peer].addr()).collect();
            machine.upload(rank, "remote memories", &addrs)
        };
        let (rsag_remote, pipeline_remote) = (remote(&rsag_scratch)?, remote(&pipeline_scratch)?);
        let rsag_channels = rsag_sem.base(&machine, rank, blocks)?;
        let pipeline_channels = pipeline_sem.base(&machine, rank, reduce + receive)?;
        for (launch, fullmesh_result) in fullmesh_results.iter().enumerate() {
            let input = |machine: &Machine, len: usize| {
                machine.upload(
                    rank,
                    "input",
                    &(0..len).map(|at| value(launch, rank, at)).collect::<Vec<i32>>(),
                )
            };
            let result = |machine: &Machine, len: usize| machine.alloc::<i32>(rank, "result", len);
            let (null, null_offset) = (0u64, 0u64);
            let ranks = [rank, RANKS, RANKS].map(|number| number as i32);
            let grid = |blocks: usize| GridConfig::new(blocks as u32, THREADS, 0);

            let (x, out) = (input(&machine, PACKET_LEN)?, result(&machine, PACKET_LEN)?);
            let channels = packet_sem.memory(&machine, rank, 1, &packet_scratch, x.addr())?;
            #[rustfmt::skip]
            machine.launch_with(rank, module, &packet, grid(blocks), &[
                &x, packet_scratch.of(rank), &out, &channels, &null_offset, &(8 * packet_half as u64),
                &ranks, &(PACKET_LEN as u64), flags, &64u32, &2u32,
            ])?;
            results.push(("packets", launch, rank, out));

            let (x, out) = (input(&machine, rsag_len)?, result(&machine, rsag_len)?);
            #[rustfmt::skip]
            machine.launch_with(rank, module, &rsag, grid(blocks), &[
                &x, rsag_scratch.of(rank), &out, &rsag_channels, &null, &rsag_remote, &ranks, &(rsag_len as u64),
            ])?;
            results.push(("rsag", launch, rank, out));

            let (x, out) = (input(&machine, PIPELINE_LEN)?, result(&machine, PIPELINE_LEN)?);
            #[rustfmt::skip]
            machine.launch_with(rank, module, &pipeline, grid(put + reduce + receive), &[
                &x, pipeline_scratch.of(rank), &out, &pipeline_channels, &null, &pipeline_remote, &ranks,
                &[PIPELINE_LEN as u64, 4 * pipeline_scratch.of(rank).len() as u64],
                &[put, reduce, receive].map(|number| number as u32),
            ])?;
            results.push(("pipeline", launch, rank, out));

            let (x, out) = (input(&machine, FULLMESH_LEN)?, fullmesh_result);
            let channels = fullmesh_sem.memory(&machine, rank, blocks, &fullmesh_scratch, x.addr())?;
            let out_channels = fullmesh_sem.memory(&machine, rank, blocks, out, 0)?;
            #[rustfmt::skip]
            machine.launch_with(rank, module, &fullmesh, grid(blocks), &[
                &x, fullmesh_scratch.of(rank), out.of(rank), &channels, &out_channels, &null_offset,
                &ranks, &(FULLMESH_LEN as u64),
            ])?;
        }
    }
    let oracle = || {
        let fullmesh = fullmesh_results
            .iter()
            .zip(0..)
            .flat_map(|(out, launch)| (0..RANKS).map(move |rank| ("fullmesh", launch, rank, out.of(rank))));
        let others = results.iter().map(|(name, launch, rank, out)| (*name, *launch, *rank, out));
        for (name, launch, rank, out) in others.chain(fullmesh) {
            for (at, got) in out.download()?.into_iter().enumerate() {
                if got != sum(launch, at) {
                    return Ok(Some(format!("sum of {name}: {got} at {at} of rank {rank}, launch {launch}")));
                }
            }
        }
        Ok(None)
    };
    Ok(outcome(&mut machine, oracle)?)
}

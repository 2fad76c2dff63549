//! All-reduces over multicast addresses that NCCL has as examples of its device API
//! (`contrib/custom_algos/allreduce`), between three virtual GPUs.
//!
//! `peers.cu` of `nccl_allreduce.py` fills `ncclDevComm` and the windows. The host writes the
//! inputs while no kernel runs, as the kernels require, and a kernel of the host reads each result
//! behind the all-reduce. Numbers are whole, so that sums are exact in any order.

use std::error::Error;

use epoxide_vgpu::{Array, GridConfig, Machine, MachineError, Module, Symmetric};

use crate::mscclpp::RANKS;
use crate::mscclpp_nvls::{COPY, sum, value};
use crate::{Case, Found, outcome};

const ROUNDS: usize = 2;
const BLOCKS: u32 = 2;
const THREADS: u32 = 64;
/// Vectors of four numbers.
const LINES: usize = RANKS * 100;
const LEN: usize = 4 * LINES;
/// Pages of a window, and of the resources.
const PAGES: usize = (4 * LEN).div_ceil(4096);
/// Bytes between the windows of two ranks.
const STRIDE: u64 = 1 << 32;
/// The number that stands for one that has not arrived.
const POISON: u32 = 0xfffa_fffa;

/// The arguments of a rank's kernels.
struct Rank {
    /// `ncclDevComm`, and the addresses of the windows.
    comm: Vec<u8>,
    windows: [u64; 3],
    /// The memory of the windows.
    local: [u64; 3],
}

/// Fills `ncclDevComm` and the windows of all ranks, which have these multicast addresses.
fn communicators(
    case: &Case,
    machine: &mut Machine,
    buffer: &Symmetric<u32>,
    all: &[Array<u32>],
) -> Result<Vec<Rank>, MachineError> {
    let mut comms = vec![];
    for (rank, all) in all.iter().enumerate() {
        let numbers = [rank, RANKS, PAGES].map(|number| number as u32);
        machine.launch_with(
            rank,
            case.module,
            "make_comm",
            GridConfig::new(1, 1, 0),
            &[&buffer.addrs(rank)[0], all, &numbers],
        )?;
    }
    machine.run()?;
    for rank in 0..RANKS {
        let windows = machine.variable::<u8>(rank, case.module, "windows")?;
        let each = windows.len() as u64 / 3;
        let comm = machine.variable::<u8>(rank, case.module, "dev_comm")?.download()?;
        comms.push(Rank {
            comm,
            windows: [0, 1, 2].map(|at| windows.addr() + at * each),
            local: [0, 1, 2].map(|at| buffer.of(rank).addr() + at * PAGES as u64 * 4096),
        });
    }
    Ok(comms)
}

/// One run; an error if the kernels cannot be launched at all.
pub fn run(case: &Case) -> Result<Found, Box<dyn Error>> {
    let (module, mut machine) = (case.module, case.machine(RANKS));
    let [one_shot, two_shot, poison] =
        ["27oneshot_mc_allreduce", "34twoshot_mc_simple", "34twoshot_mc_poison"]
            .map(|name| case.kernel(&[name]));
    let (one_shot, two_shot, poison) = (one_shot?, two_shot?, poison?);
    let copy = Module::parse(COPY)?;
    let words = PAGES * 1024;
    let buffer = machine.symmetric_strided::<u32>("buffer", 4 * words, STRIDE)?;
    let (grid, copies) = (GridConfig::new(BLOCKS, THREADS, 0), GridConfig::new(LEN as u32 / 16, 16, 0));
    let zeros = vec![0; 4 * words];
    (0..RANKS).try_for_each(|rank| buffer.of(rank).upload(&zeros))?;
    let all = machine.multicast(&buffer)?;
    let ranks = communicators(case, &mut machine, &buffer, &all)?;
    let mut results: Vec<(&str, usize, usize, Array<f32>)> = vec![];
    for round in 0..ROUNDS {
        // Before any launch of the round, so that all of them are behind it. One number in
        // four of a result is awaited.
        for rank in 0..RANKS {
            let window = |number: &dyn Fn(usize) -> u32| (0..words).map(number).collect::<Vec<u32>>();
            let given = window(&|at| value(round, rank, at).to_bits());
            let awaited = window(&|_| POISON);
            buffer.of(rank).upload(&[given, awaited.clone(), awaited].concat())?;
        }
        for (rank, Rank { comm, windows, local: [_, own, clear] }) in ranks.iter().enumerate() {
            let [send, receive, _] = windows;
            let params = |first: &[u64], last: &[u8]| {
                let first = first.iter().flat_map(|word| word.to_ne_bytes());
                first.chain(comm.iter().copied()).chain(last.iter().copied()).collect::<Vec<u8>>()
            };
            let mut out = |machine: &Machine, name| -> Result<u64, MachineError> {
                let out = machine.alloc::<f32>(rank, "out", LEN)?;
                let addr = out.addr();
                results.push((name, round, rank, out));
                Ok(addr)
            };
            let lines = LINES as u64;
            if case.step == "poison" {
                let params = params(&[*send, *own, *receive, *clear, lines], &[0]);
                machine.launch(rank, module, &poison, grid, &params)?;
            } else {
                let to = out(&machine, "one shot")?;
                machine.launch(rank, module, &one_shot, grid, &params(&[to, *send, lines], &[]))?;
                machine.launch(rank, module, &two_shot, grid, &params(&[*send, *receive, lines], &[]))?;
            }
            let to = out(&machine, "two shots")?;
            machine.launch_with(rank, &copy, "copy", copies, &[own, &to])?;
        }
        if round + 1 < ROUNDS && machine.run().is_err() {
            break;
        }
    }
    let oracle = || {
        for (name, round, rank, out) in &results {
            for (at, got) in out.download()?.into_iter().enumerate() {
                if got != sum(*round, at) {
                    return Ok(Some(format!("sum of {name}: {got} at {at} of rank {rank}, round {round}")));
                }
            }
        }
        Ok(None)
    };
    Ok(outcome(&mut machine, oracle)?)
}

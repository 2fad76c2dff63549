//! DeepEP V1's dispatch within a node (`intranode.cu`), between two ranks.
//!
//! The host does the work of `notify_dispatch`: it counts, and clears the channels. Runs without
//! check mode only, which reports a race in the kernel (`vgpu/peers/deepep.txt`).

use epoxide_vgpu::{Argument, DeviceConfig, Grid, Kernel, Memory, Module, Region};
use half::bf16;
use rand::SeedableRng;
use rand::seq::index::sample;
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;

use super::{Result, Run, TOKENS, TOPK, finish, memory, shape};

const RANKS: usize = 2;
const EXPERTS: usize = 16;
const LOCAL_EXPERTS: usize = EXPERTS / RANKS;
/// In units of 8 numbers, which are 16 bytes.
const HIDDEN_INT4: usize = 128;
/// Slots of a ring, and tokens of a chunk.
const SLOTS: usize = 64;
const CHUNK: usize = 6;
const THREADS: u32 = 768;
const SHARED: u32 = 8192 * (THREADS / 32);

/// A rank's memory, and the parameters of its kernel.
struct Rank {
    buffer: u64,
    /// The first words of the buffer as the kernel expects them: counts, then empty channels.
    begin: Vec<u8>,
    params: Vec<u8>,
    recv_x: u64,
    rows: usize,
}

/// Two ranks with a buffer each.
pub struct DeepEp {
    kernel: Arc<Kernel>,
    memory: Memory,
    ranks: Vec<Rank>,
    _regions: Vec<Region>,
}

impl DeepEp {
    /// Loads the PTX at `path`.
    pub fn new(path: &str) -> Result<Self> {
        let module = Module::parse(&std::fs::read_to_string(path)?)?;
        let mut kernels = module.kernels();
        let kernel = kernels.find(|kernel| kernel.name().contains("8dispatchILi2ELi768ELi8192E"));
        let kernel = kernel.ok_or("the PTX has no dispatch between two ranks")?.clone();
        let (memory, mut regions) = (memory(false), vec![]);
        let tokens = TOKENS as usize;
        let ids: Vec<Vec<usize>> = (0..RANKS as u64)
            .map(|rank| {
                let mut rng = ChaCha8Rng::seed_from_u64(rank);
                (0..tokens).flat_map(|_| sample(&mut rng, EXPERTS, TOPK as usize)).collect()
            })
            .collect();
        let of_token = |from: usize, token: usize| ids[from].chunks(TOPK as usize).nth(token).into_iter();
        let goes_to = |from: usize, token: usize, to: usize| {
            of_token(from, token).flatten().any(|&expert| expert / LOCAL_EXPERTS == to)
        };
        let count = |from: usize, to: usize| (0..tokens).filter(|&token| goes_to(from, token, to)).count();

        // The matrix of counts, the four words of each channel, and the rings.
        let words = RANKS * RANKS + 4 * RANKS;
        let slot = 16 * HIDDEN_INT4 + 4 + 12 * TOPK as usize;
        let mut alloc = |label: &str, bytes: usize| -> Result<u64> {
            let region = memory.alloc_zeroed(bytes as u64, label)?;
            let at = region.addr();
            regions.push(region);
            Ok(at)
        };
        let buffers = (0..RANKS).map(|_| alloc("buffer", 4 * words + RANKS * SLOTS * slot));
        let buffers = buffers.collect::<Result<Vec<u64>>>()?;
        let pointers = alloc("buffer_ptrs", 8 * RANKS)?;
        memory.write(pointers, bytemuck::cast_slice(&buffers))?;
        let mut ranks = vec![];
        for rank in 0..RANKS {
            let rows: usize = (0..RANKS).map(|from| count(from, rank)).sum();
            let sums = |from: usize, to: usize| (0..=from).map(|from| count(from, to)).sum::<usize>() as i32;
            let matrix = (0..RANKS * RANKS).map(|at| sums(at / RANKS, at % RANKS));
            let begin = matrix.chain((0..4 * RANKS).map(|_| 0)).flat_map(i32::to_ne_bytes).collect();
            let (x, choices) =
                (alloc("x", tokens * 16 * HIDDEN_INT4)?, alloc("topk_idx", ids[rank].len() * 8)?);
            let weights = alloc("topk_weights", ids[rank].len() * 4)?;
            let (in_rank, prefix) = (alloc("is_token_in_rank", tokens * RANKS)?, alloc("prefix", RANKS * 4)?);
            let recv_x = alloc("recv_x", rows * 16 * HIDDEN_INT4)?;
            let recv_src_idx = alloc("recv_src_idx", rows * 4)?;
            let recv_topk_idx = alloc("recv_topk_idx", rows * TOPK as usize * 8)?;
            let recv_topk_weights = alloc("recv_topk_weights", rows * TOPK as usize * 4)?;
            let recv_channel_offset = alloc("recv_channel_offset", RANKS * 4)?;
            let send_head = alloc("send_head", tokens * RANKS * 4)?;
            // Rows of bf16 ones.
            memory.write(x, &[0x80, 0x3f].repeat(tokens * 8 * HIDDEN_INT4))?;
            let experts: Vec<i64> = ids[rank].iter().map(|&expert| expert as i64).collect();
            memory.write(choices, bytemuck::cast_slice(&experts))?;
            let goes: Vec<u8> =
                (0..tokens * RANKS).map(|at| u8::from(goes_to(rank, at / RANKS, at % RANKS))).collect();
            memory.write(in_rank, &goes)?;
            let counts: Vec<i32> = (0..RANKS).map(|to| count(rank, to) as i32).collect();
            memory.write(prefix, bytemuck::cast_slice(&counts))?;
            let null = 0u64;
            let numbers =
                [tokens, 0, HIDDEN_INT4, TOPK as usize, EXPERTS, 0, 0, 0].map(|number| number as i32);
            let [own_rank, chunk, slots] = [rank, CHUNK, SLOTS].map(|number| number as i32);
            let outputs = [
                recv_x,
                null,
                recv_src_idx,
                recv_topk_idx,
                recv_topk_weights,
                recv_channel_offset,
                send_head,
            ];
            let inputs = [x, null, choices, weights, in_rank, prefix];
            let mut arguments: Vec<&dyn Argument> = vec![];
            arguments.extend(outputs.iter().chain(&inputs).map(|address| address as &dyn Argument));
            arguments.extend(numbers.iter().map(|number| number as &dyn Argument));
            arguments.extend([&pointers as &dyn Argument, &own_rank, &chunk, &slots]);
            let params = kernel.pack(&arguments)?;
            ranks.push(Rank { buffer: buffers[rank], begin, params, recv_x, rows });
        }
        Ok(DeepEp { kernel, memory, ranks, _regions: regions })
    }

    /// Runs a dispatch: a block of each rank sends, and one receives.
    pub fn dispatch(&self) -> Result<Run> {
        for rank in &self.ranks {
            self.memory.write(rank.buffer, &rank.begin)?;
        }
        let grids = self.ranks.iter().map(|rank| {
            let (device, launch) = (DeviceConfig::default(), shape(2, THREADS, SHARED));
            Ok(Grid::new(self.kernel.clone(), self.memory.clone(), &device, launch, &rank.params)?)
        });
        let run = finish(super::DEEPEP[0], grids.collect::<Result<_>>()?)?;
        for rank in &self.ranks {
            let mut rows = vec![bf16::ZERO; rank.rows * 8 * HIDDEN_INT4];
            self.memory.read(rank.recv_x, bytemuck::cast_slice_mut(&mut rows))?;
            assert!(rows.iter().all(|&value| value == bf16::ONE));
        }
        Ok(run)
    }
}

//! Low-latency dispatch and combine between the ranks of one node.

use bytemuck::Zeroable;
use epoxide_gpu::kernels::{
    Entry, LOW_LATENCY_SHARED_BYTES, LowLatencyCombineBf16, LowLatencyDispatch,
    low_latency_dispatch_shared_bytes,
};
use epoxide_gpu::layout::{
    Comm, DevicePtr, ExpertTable, FEW_RANKS, LocalState, LowLatencyArgs, LowLatencyCall,
    LowLatencyCombineArgs, LowLatencyControl, LowLatencyDispatchArgs, LowLatencyPlace, LowLatencyTables,
    LowLatencyTurns, PIECE_PACKET_BYTES, Quantise, ROW_ALIGN, Status, phase, pieces_of,
};
use epoxide_vgpu::{DeviceConfig, Grid, GridConfig, Memory, Module, Region};
use half::bf16;
use rand::SeedableRng;
use rand::seq::index::sample;
use rand_chacha::ChaCha8Rng;

use super::{BLOCKS, EXPERTS, LOW_LATENCY, RANKS, ROW_BYTES, Result, Run, TOPK, finish, memory, shape};

/// Tokens of a rank: few enough that their rows return as packets.
const TOKENS: u32 = 32;
const THREADS: u32 = 512;
const LOCAL_EXPERTS: u32 = EXPERTS / RANKS;

/// Pieces of one region, behind each other.
#[derive(Default)]
struct Pieces {
    bytes: u64,
}

impl Pieces {
    /// Places `count` elements of `each` bytes. Returns their offset.
    fn array(&mut self, count: u32, each: u64) -> u64 {
        let offset = self.bytes.next_multiple_of(ROW_ALIGN);
        self.bytes = offset + u64::from(count) * each;
        offset
    }
}

/// Returns the layout of a pool, and its bytes. A chunk is a token.
fn place() -> (LowLatencyPlace, u64) {
    let (few, rows) = (FEW_RANKS as u32, RANKS * TOKENS);
    let mut pool = Pieces { bytes: size_of::<LowLatencyControl>() as u64 };
    let place = LowLatencyPlace {
        arrived: pool.array(few * TOKENS, 8),
        returned: pool.array(few * TOKENS, 8),
        ids: pool.array(few * TOKENS * TOPK.div_ceil(2), 8),
        weights: pool.array(few * TOKENS * TOPK, 8),
        recv_x: pool.array(rows, ROW_BYTES.into()),
        recv_scales: 0,
        scale_packets: 0,
        returned_x: pool.array(rows, ROW_BYTES.into()),
        returned_packets: pool.array(rows * pieces_of(ROW_BYTES), PIECE_PACKET_BYTES.into()),
        returned_scales: 0,
    };
    (place, pool.bytes)
}

/// Memory of a rank.
struct Rank {
    common: LowLatencyArgs,
    x: DevicePtr,
    topk_idx: DevicePtr,
    /// Rows by expert `[LOCAL_EXPERTS, RANKS * TOKENS]` that the combine returns: all ones.
    rows: DevicePtr,
    combined: DevicePtr,
    _memory: [Region; 2],
}

/// Ranks of one node with a low-latency buffer each.
pub struct LowLatency {
    module: Module,
    memory: Memory,
    ranks: Vec<Rank>,
}

impl LowLatency {
    pub fn new(checked: bool) -> Result<Self> {
        let names = [LowLatencyDispatch::INFO.name, LowLatencyCombineBf16::INFO.name];
        let module = Module::parse(&epoxide_gpu::shipped().only(&names))?;
        let memory = memory(checked);
        let (place, bytes) = place();
        let pools = (0..RANKS)
            .map(|_| memory.alloc_zeroed(bytes, "pool"))
            .collect::<std::result::Result<Vec<Region>, _>>()?;
        let mut addresses = [DevicePtr::NULL; FEW_RANKS];
        addresses.iter_mut().zip(&pools).for_each(|(to, pool)| *to = DevicePtr(pool.addr()));
        let ranks =
            (0..RANKS).zip(pools).map(|(rank, pool)| Rank::new(&memory, rank, addresses, place, pool));
        let ranks = ranks.collect::<Result<Vec<Rank>>>()?;
        Ok(LowLatency { module, memory, ranks })
    }

    fn grid<K: Entry>(&self, call: epoxide_gpu::kernels::Call<K>, shape: GridConfig) -> Result<Grid> {
        let kernel = self.module.kernel(K::INFO.name).ok_or("no such kernel")?;
        Ok(Grid::new(kernel, self.memory.clone(), &DeviceConfig::default(), shape, call.param())?)
    }

    /// Sends all rows, and brings the results of their experts back.
    /// Returns one run each of the dispatch and of the combine.
    pub fn round_trip(&self) -> Result<[Run; 2]> {
        let dispatches = self.ranks.iter().map(|rank| {
            let args = rank.dispatch();
            let shared = low_latency_dispatch_shared_bytes(&args);
            self.grid(LowLatencyDispatch::call(args)?, shape(BLOCKS, THREADS, shared))
        });
        let dispatch = finish(LOW_LATENCY[0], dispatches.collect::<Result<_>>()?)?;
        let combines = self.ranks.iter().map(|rank| {
            let call = LowLatencyCombineBf16::call(rank.combine())?;
            self.grid(call, shape(BLOCKS, THREADS, LOW_LATENCY_SHARED_BYTES))
        });
        let combine = finish(LOW_LATENCY[1], combines.collect::<Result<_>>()?)?;
        for rank in &self.ranks {
            let mut rows = vec![bf16::ZERO; (TOKENS * ROW_BYTES / 2) as usize];
            self.memory.read(rank.combined.0, bytemuck::cast_slice_mut(&mut rows))?;
            // Each expert returned a row of ones, with a weight of one.
            assert!(rows.iter().all(|value| value.to_f32() == TOPK as f32));
        }
        Ok([dispatch, combine])
    }
}

impl Rank {
    fn new(
        memory: &Memory,
        rank: u32,
        pools: [DevicePtr; FEW_RANKS],
        place: LowLatencyPlace,
        pool: Region,
    ) -> Result<Rank> {
        let (rows, few) = (RANKS * TOKENS, FEW_RANKS as u32);
        let mut own = Pieces::default();
        let local = own.array(1, size_of::<LocalState>() as u64);
        let status = own.array(1, size_of::<Status>() as u64);
        let x = own.array(TOKENS, ROW_BYTES.into());
        let combined = own.array(TOKENS, ROW_BYTES.into());
        let topk_idx = own.array(TOKENS * TOPK, 8);
        let expert_rows = own.array(LOCAL_EXPERTS * rows, ROW_BYTES.into());
        let mut table = |count, each| DevicePtr(own.array(count, each));
        let mut tables = LowLatencyTables {
            num_tokens: table(few, 4),
            token_ranks: table(TOKENS, 4),
            expert_counts: table(LOCAL_EXPERTS, 4),
            expert_rows: table(LOCAL_EXPERTS * rows, 4),
            src_info: table(LOCAL_EXPERTS * rows, 4),
            layout_range: table(LOCAL_EXPERTS * RANKS, 8),
            slots: table(rows * TOPK, 4),
            weights: table(rows * TOPK, 4),
            sent: table(TOKENS, 8),
            answered: table(few * TOKENS, 8),
            turns: table(1, size_of::<LowLatencyTurns>() as u64),
        };
        let region = memory.alloc_zeroed(own.bytes, "own")?;
        let at = |offset: u64| DevicePtr(region.addr() + offset);
        let LowLatencyTables {
            num_tokens,
            token_ranks,
            expert_counts,
            expert_rows: rows_of_experts,
            src_info,
            layout_range,
            slots,
            weights,
            sent,
            answered,
            turns,
        } = &mut tables;
        let all = [
            num_tokens,
            token_ranks,
            expert_counts,
            rows_of_experts,
            src_info,
            layout_range,
            slots,
            weights,
            sent,
            answered,
            turns,
        ];
        all.into_iter().for_each(|table| *table = at(table.0));

        let mut rng = ChaCha8Rng::seed_from_u64(rank.into());
        let ids: Vec<i64> = (0..TOKENS)
            .flat_map(|_| sample(&mut rng, EXPERTS as usize, TOPK as usize).into_iter().map(|e| e as i64))
            .collect();
        memory.write(at(topk_idx).0, bytemuck::cast_slice(&ids))?;
        // Rows of bf16 ones.
        let ones = |rows: u32| [0x80, 0x3f].repeat((rows * ROW_BYTES / 2) as usize);
        memory.write(at(x).0, &ones(TOKENS))?;
        memory.write(at(expert_rows).0, &ones(LOCAL_EXPERTS * rows))?;
        let comm = Comm {
            pools,
            local: at(local),
            status: at(status),
            timeout_ns: u64::MAX / 2,
            rank,
            num_ranks: RANKS,
            ..Comm::zeroed()
        };
        let common = LowLatencyArgs {
            comm,
            place,
            tables,
            num_tokens: TOKENS,
            max_tokens: TOKENS,
            num_topk: TOPK,
            local_experts: LOCAL_EXPERTS,
            chunk_tokens: 1,
            phases: phase::SEND | phase::RECEIVE,
            packet_tokens: TOKENS,
            reserved: 0,
        };
        Ok(Rank {
            common,
            x: at(x),
            topk_idx: at(topk_idx),
            rows: at(expert_rows),
            combined: at(combined),
            _memory: [pool, region],
        })
    }

    /// The arguments that all kernels share, in a call.
    fn common(&self, is_combine: bool) -> LowLatencyArgs {
        let call = LowLatencyCall {
            is_combine,
            has_scales: false,
            place: 0,
            row_bytes: ROW_BYTES,
            num_tokens: TOKENS,
        };
        LowLatencyArgs { comm: Comm { call: call.bits().into(), ..self.common.comm }, ..self.common }
    }

    fn dispatch(&self) -> LowLatencyDispatchArgs {
        LowLatencyDispatchArgs {
            common: self.common(false),
            x: self.x,
            scales: DevicePtr::NULL,
            topk_idx: self.topk_idx,
            table: ExpertTable::default(),
            topk_weights: DevicePtr::NULL,
            row_bytes: ROW_BYTES,
            num_scales: 0,
            quantise: Quantise::None as u32,
            narrow_ids: 0,
        }
    }

    fn combine(&self) -> LowLatencyCombineArgs {
        LowLatencyCombineArgs {
            common: self.common(true),
            x: self.rows,
            x_stride: ROW_BYTES.into(),
            combined_x: self.combined,
            row_bytes: ROW_BYTES,
            by_expert: 1,
            quantise: Quantise::None as u32,
            spoils: 1,
        }
    }
}

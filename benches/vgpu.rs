//! Speed of the virtual GPU on one core, without checks and in check mode.
//!
//! `cargo bench --bench vgpu` measures a loop of 16-byte copies, and kernels of the library from
//! the committed PTX. The ranks of an exchange share one thread and take turns, as the grids of one
//! device do in the library's virtual driver. Times are processor times of this thread, because
//! other programs may use the machine as well.
//!
//! ```sh
//! cargo bench --bench vgpu                             # everything
//! cargo bench --bench vgpu -- --fast dispatch          # programs with this in their names
//! cargo bench --bench vgpu -- --check polling          # check mode alone
//! cargo bench --bench vgpu -- --deepep kernels.ptx     # DeepEP's dispatch as well
//! ```
//!
//! A program's whole name selects that program alone, other words all programs that contain them.
//! `--fast` omits check mode, `--check` omits everything else. `--runs N` sets the number of runs;
//! a few are enough for a tool that counts instructions. `--deepep` takes the PTX that
//! `vgpu/peers/check.sh deepep` compiles, of the step `repaired`: the kernel as it is shipped ends
//! with a fault.
//!
//! Programs of one set-up run in turn, whether measured or not. With `--perf CONTROL,ACK`, `perf`
//! samples only while measured programs run:
//!
//! ```sh
//! mkfifo control ack
//! perf record -g -e cpu-clock -D -1 --control fifo:control,ack \
//!     target/release/deps/vgpu-* --check --runs 40 --perf control,ack notify
//! ```

#[path = "vgpu/deepep.rs"]
mod deepep;
#[path = "vgpu/low_latency.rs"]
mod low_latency;
#[path = "vgpu/perf.rs"]
mod perf;

use epoxide_gpu::kernels::{
    self, CombineBf16, Dispatch, DispatchLayout, Entry, JOINED_BYTES, Notify, notify_shared_bytes,
};
use epoxide_gpu::layout::{
    Call, CallKind, CombineArgs, Comm, Control, DevicePtr, DispatchArgs, ExpertTable, FEW_RANKS, LayoutArgs,
    LocalState, NotifyArgs, PlanHeader, PlanStatus, PoolLayout, ROW_ALIGN, SEND_ROW_STRIDE, Status,
    message_offset, ring_bytes,
};
use epoxide_vgpu::{CheckConfig, Checker, DeviceConfig, Grid, GridConfig, Memory, Module, Progress, Region};
use half::bf16;
use rand::seq::index::sample;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::time::{ClockId, clock_gettime};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A loop of 16-byte copies, as the compiler writes it.
const COPY: &str = "
.version 8.4
.target sm_90
.address_size 64
.visible .entry copy(.param .u64 dst, .param .u64 src, .param .u32 rounds)
{
	.reg .pred %p<3>;
	.reg .b32 %r<16>;
	.reg .b64 %rd<8>;
	ld.param.u64 %rd1, [dst];
	ld.param.u64 %rd2, [src];
	ld.param.u32 %r5, [rounds];
	mov.u32 %r6, %tid.x;
	mov.u32 %r7, %ctaid.x;
	mov.u32 %r8, %ntid.x;
	mad.lo.u32 %r9, %r7, %r8, %r6;
	mul.wide.u32 %rd3, %r9, 16;
	add.s64 %rd1, %rd1, %rd3;
	add.s64 %rd2, %rd2, %rd3;
	mov.u32 %r10, %nctaid.x;
	mul.lo.u32 %r11, %r10, %r8;
	mul.wide.u32 %rd4, %r11, 16;
$L__BB0_1:
	ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd2];
	st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4};
	add.s64 %rd2, %rd2, %rd4;
	add.s64 %rd1, %rd1, %rd4;
	add.s32 %r5, %r5, -1;
	setp.ne.s32 %p1, %r5, 0;
	@%p1 bra $L__BB0_1;
	ret;
}
";

const RANKS: u32 = 4;
/// Tokens of a rank, of 1024 bf16 elements each.
const TOKENS: u32 = 128;
const ROW_BYTES: u32 = 2048;
const TOPK: u32 = 8;
const EXPERTS: u32 = 64;
/// Blocks of a dispatch or combine, and half as many of notify.
const BLOCKS: u32 = 8;
const CHANNELS: u32 = BLOCKS / 2;

/// Launch shapes that the library uses for these sizes (host/src/ep/throughput/kernels.rs).
const NOTIFY_THREADS: u32 = 512;
const LAYOUT_THREADS: u32 = 1024;
const DISPATCH_WARPS: u32 = 3;
const METADATA_WARPS: u32 = 4;
const DISPATCH_STAGES: u32 = 10;
const COMBINE_WARPS: u32 = 16;
const COMBINE_SLOTS: u32 = 3;

/// Warp instructions of a rank before the next rank's turn, as in the library's driver.
const TURN: u64 = 64 * 1024;
/// Warp instructions for which the polling loop is measured.
const POLLED: u64 = 1 << 20;

/// Programs of one set-up, in the order of the table.
const COPY_LOOP: &[&str] = &["copy loop"];
const EXCHANGE: &[&str] = &["notify", "dispatch", "combine_bf16", "polling in dispatch"];
const LOW_LATENCY: &[&str] = &["low_latency_dispatch", "low_latency_combine"];
const DEEPEP: &[&str] = &["dispatch of DeepEP"];
const PROGRAMS: [&[&str]; 4] = [COPY_LOOP, EXCHANGE, LOW_LATENCY, DEEPEP];

/// Whether kernels run in check mode.
#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Fast,
    Check,
}

/// One run of a program: warp instructions of all ranks, and seconds of processor time.
#[derive(Clone, Copy)]
struct Run {
    warp_instructions: u64,
    seconds: f64,
}

impl Run {
    fn rate(&self) -> f64 {
        self.warp_instructions as f64 / self.seconds
    }
}

/// Returns the processor time of this thread so far, in seconds.
fn processor_time() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Runs grids of a program in turns until all have ended.
fn finish(program: &str, mut grids: Vec<Grid>) -> Result<Run> {
    let _sampled = perf::sampled(program)?;
    let start = processor_time();
    let mut running = true;
    while running {
        running = false;
        for grid in &mut grids {
            running |= grid.step(TURN)? != Progress::Done;
        }
    }
    let seconds = processor_time() - start;
    Ok(Run { warp_instructions: grids.iter().map(|grid| grid.stats().warp_instructions).sum(), seconds })
}

/// Returns memory without checks or in check mode.
fn memory(checked: bool) -> Memory {
    Memory::checked(0, checked.then(|| Checker::new(CheckConfig::default())))
}

fn shape(blocks: u32, threads: u32, dynamic_shared_bytes: u32) -> GridConfig {
    GridConfig::new(blocks, threads, dynamic_shared_bytes)
}

/// Runs the copy loop once to touch its memory, and then `times` times.
fn copy_loop(checked: bool, times: usize) -> Result<Vec<Run>> {
    const BLOCKS: u32 = 8;
    const THREADS: u32 = 256;
    // Check mode takes longer, and keeps a history of what a kernel has accessed.
    let rounds: u32 = if checked { 32 } else { 512 };
    let module = Module::parse(COPY)?;
    let kernel = module.kernel("copy").ok_or("no kernel")?;
    let memory = memory(checked);
    let bytes = u64::from(BLOCKS * THREADS * rounds * 16);
    let (src, dst) = (memory.alloc(bytes, "src")?, memory.alloc(bytes, "dst")?);
    memory.fill(src.addr(), 0x5a, bytes)?;
    let params = [&dst.addr().to_ne_bytes()[..], &src.addr().to_ne_bytes(), &rounds.to_ne_bytes()].concat();
    let (device, launch) = (DeviceConfig::default(), shape(BLOCKS, THREADS, 0));
    let grid = || Grid::new(kernel.clone(), memory.clone(), &device, launch, &params);
    let run = || finish(COPY_LOOP[0], vec![grid()?]);
    run()?;
    let runs = (0..times).map(|_| run()).collect();
    let mut last = [0; 16];
    memory.read(dst.addr() + bytes - 16, &mut last)?;
    assert_eq!(last, [0x5a; 16]);
    runs
}

/// Memory of a rank of the exchange.
struct Rank {
    comm: Comm,
    layout: LayoutArgs,
    notify: NotifyArgs,
    topk_weights: DevicePtr,
    x: DevicePtr,
    combined: DevicePtr,
    /// Frees the memory when the rank is dropped.
    _regions: Vec<Region>,
}

/// Ranks of one node that dispatch tokens to experts and combine the rows again.
struct Exchange {
    module: Module,
    memory: Memory,
    ranks: Vec<Rank>,
}

/// Returns the layout of a pool with room for the rows of all ranks.
fn pool_layout() -> PoolLayout {
    let (rows, topk) = (u64::from(RANKS * TOKENS), u64::from(TOPK));
    let mut at = size_of::<Control>() as u64;
    let mut place = |bytes: u64| {
        let offset = at.next_multiple_of(ROW_ALIGN);
        at = offset + bytes;
        offset
    };
    let mut layout = PoolLayout {
        messages: place(message_offset(FEW_RANKS as u32, 0)),
        recv_x: place(rows * u64::from(ROW_BYTES)),
        recv_scales: 0,
        recv_topk_idx: place(rows * topk * 8),
        recv_topk_weights: place(rows * topk * 4),
        recv_src_idx: place(rows * 4),
        recv_src_meta: 0,
        combine_x: place(rows * u64::from(ROW_BYTES)),
        combine_weights: place(rows * topk * 4),
        rows,
        bytes: 0,
    };
    layout.bytes = place(0);
    layout
}

impl Exchange {
    fn new(checked: bool) -> Result<Self> {
        let names = [DispatchLayout::INFO, Notify::INFO, Dispatch::INFO, CombineBf16::INFO].map(|k| k.name);
        let module = Module::parse(&epoxide_gpu::shipped().only(&names))?;
        let memory = memory(checked);
        let pool = pool_layout();
        let pools = (0..RANKS)
            .map(|_| memory.alloc_zeroed(pool.bytes, "pool"))
            .collect::<std::result::Result<Vec<Region>, _>>()?;
        let mut addresses = [DevicePtr::NULL; FEW_RANKS];
        addresses.iter_mut().zip(&pools).for_each(|(to, pool)| *to = DevicePtr(pool.addr()));
        let mut exchange = Exchange { module, memory, ranks: vec![] };
        for (rank, region) in (0..RANKS).zip(pools) {
            let comm = Comm {
                pools: addresses,
                pool_table: DevicePtr::NULL,
                local: DevicePtr::NULL,
                status: DevicePtr::NULL,
                // No wait expires: the polling loop must go on for as long as it is measured.
                timeout_ns: u64::MAX / 2,
                trace: DevicePtr::NULL,
                rank,
                num_ranks: RANKS,
                call: 0,
                pool,
            };
            let rank = exchange.rank(comm, region)?;
            exchange.ranks.push(rank);
        }
        Ok(exchange)
    }

    /// Allocates what a rank needs, and runs its layout kernel.
    fn rank(&self, mut comm: Comm, pool: Region) -> Result<Rank> {
        let mut regions = vec![];
        let mut place = |label: &str, bytes: u64| -> Result<DevicePtr> {
            let region = self.memory.alloc_zeroed(bytes, label)?;
            let at = DevicePtr(region.addr());
            regions.push(region);
            Ok(at)
        };
        let (tokens, ranks, topk) = (u64::from(TOKENS), u64::from(RANKS), u64::from(TOPK));
        let (experts, channels) = (u64::from(EXPERTS), u64::from(CHANNELS));
        comm.local = place("local state", size_of::<LocalState>() as u64)?;
        comm.status = place("status", size_of::<Status>() as u64)?;
        let x = place("x", tokens * u64::from(ROW_BYTES))?;
        let combined = place("combined", tokens * u64::from(ROW_BYTES))?;
        let topk_idx = place("topk_idx", tokens * topk * 8)?;
        let topk_weights = place("topk_weights", tokens * topk * 4)?;
        let layout = LayoutArgs {
            topk_idx,
            table: ExpertTable::default(),
            physical: DevicePtr::NULL,
            num_tokens_per_rank: place("num_tokens_per_rank", ranks * 4)?,
            num_tokens_per_rdma_rank: DevicePtr::NULL,
            num_tokens_per_expert: place("num_tokens_per_expert", experts * 4)?,
            is_token_in_rank: place("is_token_in_rank", tokens * ranks)?,
            invalid: place("invalid", 8)?,
            num_tokens: TOKENS,
            num_topk: TOPK,
            num_experts: EXPERTS,
            num_ranks: RANKS,
            ranks_per_node: RANKS,
            rank: comm.rank,
            narrow_ids: 0,
            reserved: 0,
        };
        let header = place("header", size_of::<PlanHeader>() as u64)?;
        let send_row = place("send_row", tokens * u64::from(SEND_ROW_STRIDE) * 4)?;
        let notify = NotifyArgs {
            comm,
            is_token_in_rank: layout.is_token_in_rank,
            num_tokens_per_rank: layout.num_tokens_per_rank,
            num_tokens_per_expert: layout.num_tokens_per_expert,
            invalid: layout.invalid,
            header,
            rank_prefix_matrix: place("rank_prefix_matrix", ranks * ranks * 4)?,
            channel_prefix_matrix: place("channel_prefix_matrix", ranks * channels * 4)?,
            recv_channel_prefix_matrix: place("recv_channel_prefix_matrix", ranks * channels * 4)?,
            send_head: place("send_head", tokens * ranks * 4)?,
            send_row,
            num_recv_tokens_per_expert: place("num_recv_tokens_per_expert", experts / ranks * 4)?,
            host: DevicePtr::NULL,
            tag: 0,
            num_tokens: TOKENS,
            num_channels: CHANNELS,
            num_experts: EXPERTS,
            expert_alignment: 1,
            row_signature: ROW_BYTES,
            columns: TOPK << 16,
        };
        let mut rng = ChaCha8Rng::seed_from_u64(comm.rank.into());
        let ids: Vec<i64> = (0..TOKENS)
            .flat_map(|_| sample(&mut rng, EXPERTS as usize, TOPK as usize).into_iter().map(|e| e as i64))
            .collect();
        self.memory.write(topk_idx.0, bytemuck::cast_slice(&ids))?;
        let weights: Vec<f32> = (0..TOKENS * TOPK).map(|_| rng.random()).collect();
        self.memory.write(topk_weights.0, bytemuck::cast_slice(&weights))?;
        // Rows of bf16 ones.
        self.memory.write(x.0, &[0x80, 0x3f].repeat((TOKENS * ROW_BYTES / 2) as usize))?;
        self.memory.write(layout.invalid.0, &[0xff; 8])?;
        let shared = (RANKS + EXPERTS + 1) * 4;
        let count = DispatchLayout::call(layout)?;
        finish("layout", vec![self.grid(count, shape(TOKENS.div_ceil(32), LAYOUT_THREADS, shared))?])?;
        regions.push(pool);
        Ok(Rank { comm, layout, notify, topk_weights, x, combined, _regions: regions })
    }

    fn grid<K: Entry>(&self, call: kernels::Call<K>, shape: GridConfig) -> Result<Grid> {
        let kernel = self.module.kernel(K::INFO.name).ok_or("no such kernel")?;
        Ok(Grid::new(kernel, self.memory.clone(), &DeviceConfig::default(), shape, call.param())?)
    }

    /// Launches `notify` of a rank.
    fn notify(&self, rank: &Rank) -> Result<Grid> {
        self.grid(Notify::call(rank.notify)?, shape(CHANNELS, NOTIFY_THREADS, notify_shared_bytes(false)))
    }

    /// Launches `dispatch` of a rank: after a count exchange, or `cached` without one.
    fn dispatch(&self, rank: &Rank, cached: bool) -> Result<Grid> {
        let call = if cached {
            Call { kind: CallKind::CachedDispatch, place: 0, row_bytes: ROW_BYTES, columns: 0 }
        } else {
            Call { kind: CallKind::Dispatch, place: 0, row_bytes: 0, columns: 0 }
        };
        let with = |value| if cached { DevicePtr::NULL } else { value };
        let args = DispatchArgs {
            comm: Comm { call: call.bits(), ..rank.comm },
            x: rank.x,
            scales: DevicePtr::NULL,
            topk_idx: with(rank.layout.topk_idx),
            topk_weights: with(rank.topk_weights),
            send_row: rank.notify.send_row,
            header: rank.notify.header,
            num_tokens: TOKENS,
            row_bytes: ROW_BYTES,
            num_scales: 0,
            num_topk: if cached { 0 } else { TOPK },
            local_experts: EXPERTS / RANKS,
            stages: DISPATCH_STAGES,
            piece_bytes: ROW_BYTES,
            stage_bytes: ROW_BYTES,
            with_metadata: (!cached).into(),
            first_expert: 0,
            metadata_warps: if cached { 1 } else { METADATA_WARPS },
            narrow_ids: 0,
            fixed_tokens: DISPATCH_STAGES,
            reserved: 0,
        };
        let shared = ring_bytes(DISPATCH_WARPS, DISPATCH_STAGES, ROW_BYTES) + JOINED_BYTES;
        let threads = (DISPATCH_WARPS + args.metadata_warps) * 32;
        self.grid(Dispatch::call(args)?, shape(BLOCKS, threads, shared))
    }

    /// Launches `combine_bf16` of a rank.
    fn combine(&self, rank: &Rank) -> Result<Grid> {
        let call = Call { kind: CallKind::CombineBf16, place: 0, row_bytes: ROW_BYTES, columns: 0 };
        let args = CombineArgs {
            comm: Comm { call: call.bits(), ..rank.comm },
            combined_x: rank.combined,
            combined_weights: DevicePtr::NULL,
            send_row: rank.notify.send_row,
            header: rank.notify.header,
            num_tokens: TOKENS,
            row_bytes: ROW_BYTES,
            num_topk: 0,
            slots: COMBINE_SLOTS,
            slot_bytes: ROW_BYTES,
            pieces: 1,
            spoils: 1,
            reserved: 0,
        };
        let shared = ring_bytes(COMBINE_WARPS, COMBINE_SLOTS, ROW_BYTES) + JOINED_BYTES;
        self.grid(CombineBf16::call(args)?, shape(BLOCKS, COMBINE_WARPS * 32, shared))
    }

    /// Runs a kernel on all ranks.
    fn on_ranks(&self, program: &str, grid: impl Fn(&Rank) -> Result<Grid>) -> Result<Run> {
        finish(program, self.ranks.iter().map(grid).collect::<Result<_>>()?)
    }

    /// Sends all rows to their experts, which return them unchanged.
    /// Returns one run each of notify, dispatch and combine.
    fn round_trip(&self) -> Result<[Run; 3]> {
        let notify = self.on_ranks(EXCHANGE[0], |rank| self.notify(rank))?;
        let dispatch = self.on_ranks(EXCHANGE[1], |rank| self.dispatch(rank, false))?;
        for rank in &self.ranks {
            let mut header = PlanHeader::default();
            self.memory.read(rank.notify.header.0, bytemuck::bytes_of_mut(&mut header))?;
            assert_eq!(header.status, PlanStatus::Ready as u32);
            let pool = rank.comm.pools[rank.comm.rank as usize];
            let mut rows = vec![0; (header.num_recv_tokens * ROW_BYTES) as usize];
            self.memory.read(pool.0 + rank.comm.pool.recv_x, &mut rows)?;
            self.memory.write(pool.0 + rank.comm.pool.combine_x, &rows)?;
        }
        let combine = self.on_ranks(EXCHANGE[2], |rank| self.combine(rank))?;
        for rank in &self.ranks {
            // The sum is the number of ranks that a row of ones was sent to.
            let mut sent = vec![0; (TOKENS * RANKS) as usize];
            self.memory.read(rank.layout.is_token_in_rank.0, &mut sent)?;
            let mut rows = vec![bf16::ZERO; (TOKENS * ROW_BYTES / 2) as usize];
            self.memory.read(rank.combined.0, bytemuck::cast_slice_mut(&mut rows))?;
            for (row, sent) in rows.chunks(ROW_BYTES as usize / 2).zip(sent.chunks(RANKS as usize)) {
                let copies = bf16::from_f32(sent.iter().map(|&sent| f32::from(sent)).sum());
                assert!(row.iter().all(|&value| value == copies));
            }
        }
        Ok([notify, dispatch, combine])
    }

    /// Measures `times` times how fast rank 0 polls in a dispatch that no other rank enters.
    /// Consumes the exchange, because that dispatch never ends.
    fn poll(self, times: usize) -> Result<Vec<Run>> {
        let mut grid = self.dispatch(&self.ranks[0], true)?;
        // Do not measure what precedes the wait.
        while grid.step(TURN)? != Progress::Spinning {}
        let mut poll = || {
            let _sampled = perf::sampled(EXCHANGE[3])?;
            let (before, start) = (grid.stats().warp_instructions, processor_time());
            while grid.stats().warp_instructions - before < POLLED {
                assert_ne!(grid.step(TURN)?, Progress::Done);
            }
            let seconds = processor_time() - start;
            Ok(Run { warp_instructions: grid.stats().warp_instructions - before, seconds })
        };
        (0..times).map(|_| poll()).collect()
    }
}

/// The command's arguments.
#[derive(Default)]
struct Options {
    /// Leave out check mode.
    fast: bool,
    /// Leave out all but check mode.
    check: bool,
    /// Runs of each program.
    runs: Option<usize>,
    /// The PTX of DeepEP's dispatch.
    deepep: Option<String>,
    /// Programs to measure, by a part of their names. All of them if empty.
    names: Vec<String>,
}

impl Options {
    fn parse() -> Result<Self> {
        let (mut options, mut words) = (Options::default(), std::env::args().skip(1));
        while let Some(word) = words.next() {
            match word.as_str() {
                // Cargo passes it.
                "--bench" => {}
                "--fast" => options.fast = true,
                "--check" => options.check = true,
                "--perf" => perf::open(&words.next().ok_or("--perf needs two pipes: CONTROL,ACK")?)?,
                "--runs" => options.runs = Some(words.next().ok_or("--runs needs a number")?.parse()?),
                "--deepep" => {
                    options.deepep = Some(words.next().ok_or("--deepep needs the path of a PTX file")?)
                }
                flag if flag.starts_with('-') => {
                    let known = "--fast, --check, --runs N, --deepep PTX and --perf CONTROL,ACK";
                    return Err(format!("no option {flag}: there are {known}").into());
                }
                name => options.names.push(name.to_owned()),
            }
        }
        let programs = PROGRAMS.concat();
        let is_unknown = |name: &&String| !programs.iter().any(|program| program.contains(name.as_str()));
        if let Some(name) = options.names.iter().find(is_unknown) {
            let known = programs.join(", ");
            return Err(format!("no program has '{name}' in its name: there are {known}").into());
        }
        Ok(options)
    }

    fn has(&self, name: &str) -> bool {
        perf::names(&self.names, name)
    }

    fn has_any(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.has(name))
    }
}

/// Runs `round` once to touch its memory, which takes longer, and then `times` times. Returns the
/// runs of each of its programs.
fn repeat<const N: usize>(
    times: usize,
    mut round: impl FnMut() -> Result<[Run; N]>,
) -> Result<[Vec<Run>; N]> {
    round()?;
    let mut programs = [const { vec![] }; N];
    for _ in 0..times {
        programs.iter_mut().zip(round()?).for_each(|(runs, run)| runs.push(run));
    }
    Ok(programs)
}

/// Runs the programs of `options` `times` times. Returns the names and the runs of each.
fn measure(options: &Options, mode: Mode, times: usize) -> Result<Vec<(&'static str, Vec<Run>)>> {
    let (checked, mut all) = (mode == Mode::Check, vec![]);
    if options.has_any(COPY_LOOP) {
        all.push((COPY_LOOP[0], copy_loop(checked, times)?));
    }
    if options.has_any(EXCHANGE) {
        let exchange = Exchange::new(checked)?;
        let (kernels, polling) = (options.has_any(&EXCHANGE[..3]), options.has(EXCHANGE[3]));
        let kernels = repeat(if kernels { times } else { 1 }, || exchange.round_trip())?;
        all.extend(EXCHANGE.iter().copied().zip(kernels));
        if polling {
            all.push((EXCHANGE[3], exchange.poll(times)?));
        }
    }
    if options.has_any(LOW_LATENCY) {
        let buffers = low_latency::LowLatency::new(checked)?;
        all.extend(LOW_LATENCY.iter().copied().zip(repeat(times, || buffers.round_trip())?));
    }
    // Check mode ends it at its first race.
    if let Some(path) = options.deepep.as_ref().filter(|_| options.has_any(DEEPEP) && !checked) {
        let ranks = deepep::DeepEp::new(path)?;
        all.extend(DEEPEP.iter().copied().zip(repeat(times, || Ok([ranks.dispatch()?]))?));
    }
    all.retain(|(name, _)| options.has(name));
    Ok(all)
}

/// Returns the best and the median rate, in millions of warp instructions a second.
fn rates(runs: &[Run]) -> [f64; 2] {
    let mut rates: Vec<f64> = runs.iter().map(|run| run.rate() / 1e6).collect();
    rates.sort_by(f64::total_cmp);
    [rates[rates.len() - 1], rates[rates.len() / 2]]
}

fn main() -> Result<()> {
    let options = Options::parse()?;
    perf::measures(options.names.clone());
    println!("{:20} | {:^29} | {:^29} |", "warp-instructions", "without checks", "check mode");
    let columns = format!("{:>11} {:>9} {:>7}", "in a run", "M/s best", "median");
    println!("{:20} | {columns} | {columns} | ratio of medians", "");
    let times = |default: usize| options.runs.unwrap_or(default).max(1);
    let fast = if options.check { vec![] } else { measure(&options, Mode::Fast, times(40))? };
    let checked = if options.fast { vec![] } else { measure(&options, Mode::Check, times(5))? };
    if fast.is_empty() && checked.is_empty() {
        let why =
            "--fast and --check exclude each other, and DeepEP's dispatch needs --deepep without --check";
        return Err(format!("no program is measured: {why}").into());
    }
    let side = |runs: &[Run]| {
        let [best, median] = rates(runs);
        format!("{:>11} {best:>9.2} {median:>7.2}", runs[0].warp_instructions)
    };
    let runs_of =
        |all: &[(&str, Vec<Run>)], name| all.iter().find(|all| all.0 == name).map(|all| all.1.clone());
    for (name, _) in if options.check { &checked } else { &fast } {
        match (runs_of(&fast, *name), runs_of(&checked, *name)) {
            (Some(fast), Some(checked)) => {
                let ratio = rates(&fast)[1] / rates(&checked)[1];
                println!("{name:20} | {} | {} | {ratio:.1}", side(&fast), side(&checked));
            }
            (Some(fast), None) => println!("{name:20} | {} |", side(&fast)),
            (None, Some(checked)) => println!("{name:20} | {:29} | {} |", "", side(&checked)),
            (None, None) => {}
        }
    }
    Ok(())
}

//! NCCL EP's low-latency kernels (`low_latency.cu`), between three virtual GPUs of one NVLink
//! domain.
//!
//! Two rounds of dispatch and combine in bf16 for each layout of the received rows, with experts
//! that return their rows. `peers.cu` of `nccl_ep.py` fills `ncclDevComm` and the window. The
//! layout of the buffer is that of `LowLatencyLayout` in `common.hpp`. Numbers are small and whole,
//! so that sums are exact.

use std::error::Error;

use epoxide_vgpu::{Array, GridConfig, Machine, MachineError, Symmetric};
use half::bf16;

use crate::deepep_ll::{value, weight};
use crate::{Case, Found, outcome};

const RANKS: usize = 3;
const EXPERTS: usize = 6;
const LOCAL: usize = EXPERTS / RANKS;
const TOP_K: usize = 3;
/// The least that the kernels are made for.
const HIDDEN: usize = 2048;
const TOKENS: [usize; RANKS] = [5, 4, 3];
const MOST_TOKENS: usize = 6;
/// Rows that an expert gets at most: all tokens of all ranks.
const ROWS: usize = RANKS * MOST_TOKENS;
const ROUNDS: usize = 2;
/// The value of the launchers on a device of two multiprocessors.
const BLOCKS: u32 = 2;
const WARP_GROUPS: usize = EXPERTS / BLOCKS as usize;
const WARPS_PER_GROUP: usize = 32 / WARP_GROUPS;
const THREADS: u32 = (WARP_GROUPS * WARPS_PER_GROUP * 32) as u32;
const SHARED: u32 = THREADS / 32 * (3 * (32 * 16 * 4 + 16) + HIDDEN as u32 / 32);
/// Bytes between the windows of two ranks.
const STRIDE: u64 = 1 << 32;
const TIMEOUT: u64 = 200_000_000_000;

/// `ncclEpLayout_t`.
#[derive(Clone, Copy, PartialEq)]
enum Layout {
    ExpertMajor = 1,
    RankMajor = 2,
}

/// The offsets of the parts of the buffer, as in `LowLatencyLayout`.
struct Offsets {
    counts: u64,
    send: u64,
    dispatch_receive: u64,
    combine_receive: u64,
}

impl Layout {
    fn slot_bytes(self) -> (u64, u64, u64) {
        let (header, send_slots) = match self {
            Layout::ExpertMajor => ((4 + TOP_K * 2).next_multiple_of(16), EXPERTS),
            Layout::RankMajor => ((4 + TOP_K * 8).next_multiple_of(16), RANKS),
        };
        let (row, sum) = (header + HIDDEN * 2, HIDDEN / 128 * 4 + HIDDEN * 2);
        let (dispatch, combine) = (MOST_TOKENS * row, send_slots * MOST_TOKENS * sum);
        let most = (dispatch * (1 + RANKS)).max(combine + MOST_TOKENS * TOP_K * sum);
        (dispatch as u64, combine as u64, most as u64)
    }

    fn offsets(self, half: u64) -> Offsets {
        let (dispatch, combine, slot) = self.slot_bytes();
        let send = 2 * 128 + half * slot;
        Offsets {
            counts: half * 128,
            send,
            dispatch_receive: send + dispatch,
            combine_receive: send + combine,
        }
    }
}

/// No expert for one choice of some tokens.
fn expert_of(rank: usize, token: usize, k: usize) -> Option<usize> {
    (token != 1 || k != 2).then_some((rank + token * 3 + k * (1 + token % 2)) % EXPERTS)
}

fn experts(rank: usize, token: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..TOP_K).filter_map(move |k| expert_of(rank, token, k).map(|expert| (k, expert)))
}

/// Outputs of a rank after a round.
struct Results {
    layout: Layout,
    round: usize,
    rank: usize,
    rows: Array<bf16>,
    src_info: Array<i32>,
    counts: Array<i32>,
    topk_idx: Array<i32>,
    topk_weights: Array<f32>,
    sums: Array<bf16>,
}

/// One run; an error if the kernels cannot be launched at all.
pub fn run(case: &Case) -> Result<Found, Box<dyn Error>> {
    let mut machine = case.machine(RANKS);
    let (mut results, mut buffers) = (vec![], vec![]);
    for layout in [Layout::ExpertMajor, Layout::RankMajor] {
        let bytes = (2 * 128 + 2 * layout.slot_bytes().2).next_multiple_of(4096);
        let buffer = machine.symmetric_strided::<u8>("buffer", bytes as usize, STRIDE)?;
        // Before any launch, so that all of them are behind it.
        (0..RANKS).try_for_each(|rank| buffer.of(rank).upload(&vec![0; bytes as usize]))?;
        for rank in 0..RANKS {
            enqueue(case, &mut machine, layout, &buffer, rank, &mut results)?;
        }
        buffers.push(buffer);
    }
    Ok(outcome(&mut machine, || results.iter().find_map(|results| results.wrong().transpose()).transpose())?)
}

/// Enqueues the rounds of a rank.
fn enqueue(
    case: &Case,
    machine: &mut Machine,
    layout: Layout,
    buffer: &Symmetric<u8>,
    rank: usize,
    results: &mut Vec<Results>,
) -> Result<(), Box<dyn Error>> {
    let module = case.module;
    let layout_part = format!("ncclEpLayout_t{}E", layout as u8);
    let dispatch = case.kernel(&["8dispatch", &layout_part])?;
    let combine = case.kernel(&["7combine", &layout_part])?;
    let int = |number: usize| number as i32;
    #[rustfmt::skip]
    machine.launch_with(rank, module, "make_comm", GridConfig::new(1, 1, 0), &[
        &buffer.addrs(rank)[0], &[rank, RANKS].map(int),
    ])?;
    let dev_comms = machine.variable::<u8>(rank, module, "dev_comm")?;
    let windows = machine.variable::<u8>(rank, module, "windows")?;
    let workspace = machine.upload(rank, "workspace", &[0i32; 2 * RANKS + EXPERTS])?;
    let tokens = TOKENS[rank];
    let at = |offset: u64| buffer.of(rank).addr() + offset;
    let [this, next] = [layout.offsets(0), layout.offsets(1)];
    for round in 0..ROUNDS {
        let each = |width: usize| (0..tokens * width).map(move |at| (at / width, at % width));
        let x: Vec<bf16> = each(HIDDEN).map(|(token, at)| value(round, rank, token, at)).collect();
        let topk_idx: Vec<i64> =
            each(TOP_K).map(|(token, k)| expert_of(rank, token, k).map_or(-1, |at| at as i64)).collect();
        let topk_weights: Vec<f32> = each(TOP_K).map(|(token, k)| weight(rank, token, k)).collect();
        let x = machine.upload(rank, "x", &x)?;
        let topk_idx = machine.upload(rank, "topk_idx", &topk_idx)?;
        let topk_weights = machine.upload(rank, "topk_weights", &topk_weights)?;
        let slots = if layout == Layout::ExpertMajor { LOCAL * ROWS } else { ROWS };
        let got = Results {
            layout,
            round,
            rank,
            rows: machine.alloc(rank, "recv_x", slots * HIDDEN)?,
            src_info: machine.alloc(rank, "src_info", RANKS + ROWS * (1 + TOP_K))?,
            counts: machine.alloc(rank, "recv_count", RANKS.max(LOCAL))?,
            topk_idx: machine.alloc(rank, "recv_topk_idx", ROWS * TOP_K)?,
            topk_weights: machine.alloc(rank, "recv_topk_weights", ROWS * TOP_K)?,
            sums: machine.alloc(rank, "combined_x", tokens * HIDDEN)?,
        };
        // No mask, error flag, scales or statistics; not rounded, no copy; both phases.
        let (null, no, phases) = (0u64, 0u8, 3i32);
        let (rank_counts, expert_counts) = match layout {
            Layout::ExpertMajor => (null, got.counts.addr()),
            Layout::RankMajor => (got.counts.addr(), null),
        };
        let done = workspace.addr() + 4 * 2 * RANKS as u64;
        let sizes = [WARP_GROUPS, WARPS_PER_GROUP].map(int);
        let cluster = |shared| GridConfig {
            cluster: Some([2, 1, 1].into()),
            ..GridConfig::new(BLOCKS, THREADS, shared)
        };
        #[rustfmt::skip]
        machine.launch_cooperative(rank, module, &dispatch, cluster(0), &[
            &x, &topk_idx, &topk_weights, &[null; 2],
            &got.rows, &null, &got.src_info, &rank_counts, &null, &expert_counts, &got.topk_weights, &got.topk_idx,
            &at(this.send), &at(this.dispatch_receive), &at(this.counts),
            &[this.send, this.dispatch_receive, this.counts],
            &workspace, &done, &at(next.counts), &int(EXPERTS), &[null; 2],
            &[tokens, MOST_TOKENS, TOP_K, EXPERTS, rank, RANKS].map(int), &sizes, &no, &phases, &1i32,
            &dev_comms, &windows, &0u32, &TIMEOUT,
        ])?;
        #[rustfmt::skip]
        machine.launch_cooperative(rank, module, &combine, cluster(SHARED), &[
            &got.rows, &got.src_info, &null, &topk_idx, &topk_weights, &[null; 2], &got.sums,
            &at(next.send), &at(next.combine_receive), &at(next.counts),
            &[next.send, next.combine_receive, next.counts],
            &workspace, &at(this.counts), &int(EXPERTS), &null,
            &[tokens, HIDDEN, TOP_K, MOST_TOKENS, EXPERTS, rank, RANKS].map(int), &sizes, &phases, &no, &1i32,
            &dev_comms, &windows, &0u32, &TIMEOUT,
        ])?;
        results.push(got);
    }
    Ok(())
}

impl Results {
    fn here(&self, expert: usize) -> bool {
        expert / LOCAL == self.rank
    }

    /// The first wrong result.
    fn wrong(&self) -> Result<Option<String>, MachineError> {
        let &Results { layout, round, rank, .. } = self;
        let name = if layout == Layout::ExpertMajor { "expert-major" } else { "rank-major" };
        let wrong =
            |what: &str, at| Ok(Some(format!("{what} ({name}): {at} of rank {rank} in round {round}")));
        let (rows, src_info, counts) =
            (self.rows.download()?, self.src_info.download()?, self.counts.download()?);
        let (topk_idx, topk_weights) = (self.topk_idx.download()?, self.topk_weights.download()?);
        let mut of_expert = [0; LOCAL];
        let mut slots = vec![];
        for from in 0..RANKS {
            let sent: Vec<usize> = (0..TOKENS[from])
                .filter(|&token| experts(from, token).any(|(_, expert)| self.here(expert)))
                .collect();
            if src_info[from] as usize != sent.len() {
                return wrong("count", from);
            }
            let mut tokens = vec![];
            for i in 0..sent.len() {
                let at = from * MOST_TOKENS + i;
                let info = &src_info[RANKS + at * (1 + TOP_K)..][..1 + TOP_K];
                let token = info[0] as usize;
                tokens.push(token);
                if token >= TOKENS[from] {
                    return wrong("token", at);
                }
                let is_row = |slot: usize| {
                    (0..HIDDEN).all(|at| rows[slot * HIDDEN + at] == value(round, from, token, at))
                };
                for k in 0..TOP_K {
                    let expert =
                        expert_of(from, token, k).filter(|&expert| self.here(expert)).map(|at| at % LOCAL);
                    match (layout, expert) {
                        (Layout::ExpertMajor, Some(expert)) => {
                            let slot = info[1 + k] as usize;
                            if slot / ROWS != expert || !is_row(slot) {
                                return wrong("row", slot);
                            }
                            slots.push(slot);
                            of_expert[expert] += 1;
                        }
                        (Layout::ExpertMajor, None) if info[1 + k] != -1 => return wrong("choice", at),
                        (Layout::ExpertMajor, None) => {}
                        (Layout::RankMajor, _) => {
                            let local = expert.map_or(-1, |expert| expert as i32);
                            let factor = weight(from, token, k);
                            if topk_idx[at * TOP_K + k] != local || topk_weights[at * TOP_K + k] != factor {
                                return wrong("choice", at);
                            }
                        }
                    }
                }
                if layout == Layout::RankMajor && !is_row(at) {
                    return wrong("row", at);
                }
            }
            tokens.sort_unstable();
            if tokens != sent {
                return wrong("tokens", from);
            }
            if layout == Layout::RankMajor && counts[from] as usize != sent.len() {
                return wrong("count", from);
            }
        }
        slots.sort_unstable();
        if slots.windows(2).any(|two| two[0] == two[1])
            || layout == Layout::ExpertMajor && counts[..LOCAL] != of_expert
        {
            return wrong("slots", 0);
        }
        for (at, got) in self.sums.download()?.iter().enumerate() {
            let (token, column) = (at / HIDDEN, at % HIDDEN);
            let factor: f32 = match layout {
                Layout::ExpertMajor => experts(rank, token).map(|(k, _)| weight(rank, token, k)).sum(),
                // The caller has applied weights: each rank returns a row once.
                Layout::RankMajor => (0..RANKS)
                    .filter(|&to| experts(rank, token).any(|(_, expert)| expert / LOCAL == to))
                    .count() as f32,
            };
            if *got != bf16::from_f32(factor * value(round, rank, token, column).to_f32()) {
                return wrong("sum", token);
            }
        }
        Ok(None)
    }
}

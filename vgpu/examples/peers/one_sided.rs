//! TensorRT-LLM's one-sided all-to-all (`moeAlltoAllKernels.cu`), from FlashInfer's wheel.
//!
//! Two rounds of dispatch, experts and combine between virtual GPUs, against an oracle. Numbers are
//! small whole ones, so that sums in bf16 are exact. The structures that kernels take as parameters
//! are laid out by hand, from the fields of `moeAlltoAllKernels.h`.

use std::any::Any;
use std::error::Error;

use epoxide_vgpu::{Argument, Array, GridConfig, Machine, MachineError, Module};
use half::bf16;

use crate::{Case, Found, outcome};

const RANKS: usize = 2;
const TOP_K: usize = 4;
const EXPERTS: usize = 8;
const HIDDEN: usize = 64;
/// Tokens of each rank; the buffers have room for more.
const TOKENS: [usize; RANKS] = [6, 5];
const MOST_TOKENS: usize = 8;
const ROUNDS: usize = 2;
/// The default of the project.
const BLOCK: u32 = 256;

// `kMaxRanks` and `kMaxPayloads`.
const MOST_RANKS: usize = 64;
const MOST_PAYLOADS: usize = 6;

/// The experts of a rank: each row of the ranks' parts times `rank + 1`.
const EXPERT: &str = "
.version 8.4
.target sm_90
.address_size 64
.visible .entry expert(.param .u64 rows, .param .u64 out, .param .u64 counts, .param .u32 factor)
{
    .reg .pred %p<3>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [rows];
    ld.param.u64 %rd2, [out];
    ld.param.u64 %rd3, [counts];
    ld.param.u32 %r1, [factor];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %tid.x;
    // Rows beyond the count of their rank were not sent.
    shr.u32 %r4, %r2, 3;
    and.b32 %r5, %r2, 7;
    mul.wide.u32 %rd4, %r4, 4;
    add.s64 %rd4, %rd3, %rd4;
    ld.global.u32 %r6, [%rd4];
    setp.ge.u32 %p1, %r5, %r6;
    @%p1 bra END;
    mad.lo.u32 %r7, %r2, 32, %r3;
    mul.wide.u32 %rd5, %r7, 4;
    add.s64 %rd6, %rd1, %rd5;
    add.s64 %rd7, %rd2, %rd5;
    ld.global.u32 %r8, [%rd6];
    mov.u32 %r9, 0x80008000;
    fma.rn.bf16x2 %r10, %r8, %r1, %r9;
    st.global.u32 [%rd7], %r10;
END:
    ret;
}";

/// A structure as its bytes.
#[derive(Default)]
struct Structure(Vec<u8>);

impl Structure {
    fn put(&mut self, number: u64) {
        self.0.extend_from_slice(&number.to_ne_bytes());
    }

    /// The `given` addresses, with null behind them up to `len`.
    fn addresses(&mut self, given: impl IntoIterator<Item = u64>, len: usize) {
        let end = self.0.len() + 8 * len;
        given.into_iter().for_each(|address| self.put(address));
        self.0.resize(end, 0);
    }
}

impl Argument for Structure {
    fn pack(&self, params: &mut Vec<u8>) {
        params.extend_from_slice(&self.0);
    }
}

/// A `bool`.
const NO: u8 = 0;

/// The part of a rank's workspace that its peers access.
struct Symmetric {
    rows: Array<bf16>,
    experts: Array<i32>,
    recv_counters: Array<i32>,
    dispatch_flags: Array<u32>,
    combine_flags: Array<u32>,
}

impl Symmetric {
    fn mapped(&self, machine: &Machine, device: usize) -> Result<Symmetric, MachineError> {
        Ok(Symmetric {
            rows: machine.map(device, &self.rows)?,
            experts: machine.map(device, &self.experts)?,
            recv_counters: machine.map(device, &self.recv_counters)?,
            dispatch_flags: machine.map(device, &self.dispatch_flags)?,
            combine_flags: machine.map(device, &self.combine_flags)?,
        })
    }
}

/// The expert of choice `k` of a token.
fn expert_of(rank: usize, token: usize, k: usize) -> usize {
    (rank * 3 + token * 5 + k * (1 + token % 3)) % EXPERTS
}

fn rank_of(expert: usize) -> usize {
    expert / (EXPERTS / RANKS)
}

fn value(round: usize, rank: usize, token: usize, at: usize) -> f32 {
    ((round * 7 + rank * 5 + token * 3 + at) % 13) as f32 - 6.0
}

/// One run; an error if the kernels cannot be launched at all.
pub fn run(case: &Case) -> Result<Found, Box<dyn Error>> {
    let (module, mut machine) = (case.module, case.machine(RANKS));
    let experts = Module::parse(EXPERT)?;
    let prepare_dispatch = case.kernel(&["moeA2APrepareDispatchKernel"])?;
    // No statistics, no mask, not compact, no phases; then bf16 and 4 choices.
    let dispatch = case.kernel(&["moeA2ADispatchKernelILi4ELb0ELb0ELb0ELb0ELb0E"])?;
    let prepare_combine = case.kernel(&["moeA2APrepareCombineKernelILb0E13__nv_bfloat16"])?;
    let combine = case.kernel(&["moeA2ACombineKernelI13__nv_bfloat16Li4ELb0E"])?;

    let rows = RANKS * MOST_TOKENS;
    let mut own = vec![];
    for rank in 0..RANKS {
        own.push(Symmetric {
            rows: machine.alloc(rank, "rows received", rows * HIDDEN)?,
            experts: machine.alloc(rank, "experts received", rows * TOP_K)?,
            recv_counters: machine.alloc(rank, "recv_counters", RANKS)?,
            dispatch_flags: machine.upload(rank, "dispatch flags", &[0; RANKS])?,
            combine_flags: machine.upload(rank, "combine flags", &[0; RANKS])?,
        });
    }
    // [rank][peer]: the peer's workspace as the rank addresses it.
    let mut peers = vec![];
    for rank in 0..RANKS {
        let of: Result<Vec<_>, _> = own.iter().map(|peer| peer.mapped(&machine, rank)).collect();
        peers.push(of?);
    }

    let mut outs = vec![];
    // Memory that kernels use lives as long as the machine runs.
    let mut kept: Vec<Box<dyn Any>> = vec![];
    for rank in 0..RANKS {
        let tokens = TOKENS[rank];
        let flag_val = machine.upload(rank, "flag_val", &[0u32])?;
        let token_counter = machine.alloc::<i32>(rank, "local_token_counter", 1)?;
        let send_counters = machine.alloc::<i32>(rank, "send_counters", RANKS)?;
        let target_ranks = machine.alloc::<i32>(rank, "topk_target_ranks", tokens * TOP_K)?;
        let send_indices = machine.alloc::<i32>(rank, "topk_send_indices", tokens * TOP_K)?;
        let payload = machine.alloc::<bf16>(rank, "rows of the experts", rows * HIDDEN)?;
        for round in 0..ROUNDS {
            let x: Vec<bf16> = (0..tokens * HIDDEN)
                .map(|at| bf16::from_f32(value(round, rank, at / HIDDEN, at % HIDDEN)))
                .collect();
            let chosen: Vec<i32> =
                (0..tokens * TOP_K).map(|at| expert_of(rank, at / TOP_K, at % TOP_K) as i32).collect();
            let x = machine.upload(rank, "x", &x)?;
            let chosen = machine.upload(rank, "topk_idx", &chosen)?;
            let out = machine.alloc::<bf16>(rank, "out", tokens * HIDDEN)?;

            let grid = GridConfig::new;
            let arguments: [&dyn Argument; 5] =
                [&send_counters, &token_counter, &(RANKS as i32), &flag_val, &NO];
            machine.launch_with(rank, module, &prepare_dispatch, grid(1, RANKS as u32, 0), &arguments)?;

            // `DispatchKernelPointers`
            let mut pointers = Structure::default();
            pointers.addresses([x.addr(), chosen.addr()], MOST_PAYLOADS);
            for peer in 0..MOST_RANKS {
                let of = peers[rank].get(peer).map(|peer| [peer.rows.addr(), peer.experts.addr()]);
                pointers.addresses(of.into_iter().flatten(), MOST_PAYLOADS);
            }
            let bytes = [(HIDDEN as u64 * 2) | ((TOP_K as u64 * 4) << 32), 0, 0];
            bytes.into_iter().for_each(|two| pointers.put(two));
            pointers.addresses(peers[rank].iter().map(|peer| peer.dispatch_flags.addr()), MOST_RANKS);
            [&flag_val.addr(), &send_counters.addr()].into_iter().for_each(|at| pointers.put(*at));
            pointers.addresses(peers[rank].iter().map(|peer| peer.recv_counters.addr()), MOST_RANKS);
            let rest = [token_counter.addr(), target_ranks.addr(), send_indices.addr(), 0];
            rest.into_iter().for_each(|at| pointers.put(at));
            pointers.addresses([], MOST_RANKS);
            pointers.put(u64::MAX);
            let numbers = [2, MOST_TOKENS, tokens, rank, RANKS, EXPERTS, 0].map(|number| number as i32);
            let mut arguments: Vec<&dyn Argument> = vec![&chosen, &pointers];
            arguments.extend(numbers.iter().map(|number| number as &dyn Argument));
            arguments.push(&NO);
            let shared = 2 * TOP_K as u32 * 4;
            machine.launch_with(rank, module, &dispatch, grid(tokens as u32, BLOCK, shared), &arguments)?;

            let factor = bf16::from_f32(rank as f32 + 1.0).to_bits();
            let factor = u32::from(factor) << 16 | u32::from(factor);
            let received = &own[rank];
            let arguments: [&dyn Argument; 4] = [&received.rows, &payload, &received.recv_counters, &factor];
            let shape = grid(rows as u32, HIDDEN as u32 / 2, 0);
            machine.launch_with(rank, &experts, "expert", shape, &arguments)?;

            let (hidden, stride) = (HIDDEN as i32, 2 * HIDDEN as i32);
            let (ranks, most) = (RANKS as i32, MOST_TOKENS as i32);
            let arguments: [&dyn Argument; 9] = [
                &received.rows,
                &payload,
                &hidden,
                &ranks,
                &most,
                &flag_val,
                &received.recv_counters,
                &stride,
                &NO,
            ];
            machine.launch_with(rank, module, &prepare_combine, grid(rows as u32, 256, 0), &arguments)?;

            // `CombineKernelPointers`
            let mut pointers = Structure::default();
            pointers.addresses([out.addr()], MOST_PAYLOADS);
            pointers.put(0);
            for peer in 0..MOST_RANKS {
                pointers.addresses(peers[rank].get(peer).map(|peer| peer.rows.addr()), MOST_PAYLOADS);
            }
            pointers.addresses(peers[rank].iter().map(|peer| peer.combine_flags.addr()), MOST_RANKS);
            let rest = [flag_val.addr(), target_ranks.addr(), send_indices.addr(), u64::MAX];
            rest.into_iter().for_each(|at| pointers.put(at));
            let numbers = [MOST_TOKENS, HIDDEN, 2 * HIDDEN, tokens, rank, RANKS].map(|number| number as i32);
            let mut arguments: Vec<&dyn Argument> = vec![&pointers];
            arguments.extend(numbers.iter().map(|number| number as &dyn Argument));
            arguments.extend([&NO as &dyn Argument, &1f32]);
            machine.launch_with(rank, module, &combine, grid(tokens as u32, BLOCK, 0), &arguments)?;
            outs.push((rank, round, out));
            kept.push(Box::new((x, chosen)));
        }
        kept.push(Box::new((flag_val, token_counter, send_counters, target_ranks, send_indices, payload)));
    }
    let wrong = |what: String| Ok(Some(what));
    let oracle = || {
        for (rank, round, out) in &outs {
            let got = out.download()?;
            for (at, got) in got.iter().enumerate() {
                let (token, column) = (at / HIDDEN, at % HIDDEN);
                let mut targets: Vec<_> = (0..TOP_K).map(|k| rank_of(expert_of(*rank, token, k))).collect();
                targets.sort_unstable();
                targets.dedup();
                let factors: usize = targets.iter().map(|target| target + 1).sum();
                if got.to_f32() != factors as f32 * value(*round, *rank, token, column) {
                    return wrong(format!("sum: token {token} of rank {rank} in round {round}"));
                }
            }
        }
        // The choices that came with the rows, in whatever order their tokens were sent.
        for (to, received) in own.iter().enumerate() {
            let (choices, counts) = (received.experts.download()?, received.recv_counters.download()?);
            for (from, &count) in counts.iter().enumerate() {
                let begin = from * MOST_TOKENS * TOP_K;
                let mut got: Vec<&[i32]> = choices[begin..][..count as usize * TOP_K].chunks(TOP_K).collect();
                let chosen = |token| (0..TOP_K).map(move |k| expert_of(from, token, k) as i32);
                let sent =
                    (0..TOKENS[from]).filter(|&token| chosen(token).any(|e| rank_of(e as usize) == to));
                let mut expected: Vec<Vec<i32>> = sent.map(|token| chosen(token).collect()).collect();
                got.sort_unstable();
                expected.sort_unstable();
                if got != expected {
                    return wrong(format!("choices: those that rank {from} sent to rank {to}"));
                }
            }
        }
        Ok(None)
    };
    Ok(outcome(&mut machine, oracle)?)
}

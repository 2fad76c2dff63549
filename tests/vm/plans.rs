//! The plan of rows by expert, `plan_by_expert` by itself: the messages of the other ranks are
//! written by the test.

use proptest::prelude::*;

use epoxide::TypedTensor;
use epoxide::driver::virt::{CheckConfig, Checker, VirtConfig, VirtualGpu};
use epoxide::driver::{Kernel, Stream};
use epoxide_gpu::kernels::{PLAN_BY_EXPERT_SHARED_BYTES, PlanByExpert};
use epoxide_gpu::layout::{
    Comm, DevicePtr, ExpertPlanArgs, FEW_RANKS, PlanStatus, PoolLayout, SEND_LIST_STRIDE, Wait, message,
    message_offset,
};
use epoxide_testing::tier;
use epoxide_vgpu::for_each_seed;

/// The epoch of the dispatch.
const EPOCH: u64 = 7;
/// Offset of messages in a pool.
const MESSAGES: u64 = 4096;
/// Rows that a pool has room for.
const ROWS: u64 = 1 << 16;
/// Value of numbers that are not written.
const UNTOUCHED: i32 = -7;

/// The exchange of ranks at rank 0.
#[derive(Clone, Debug)]
struct Plan {
    /// Rows of each rank for each expert of rank 0.
    counts: Vec<Vec<u32>>,
    /// Rank 0's first row for each expert of each rank. Those of rank 0 it computes itself.
    starts: Vec<Vec<u32>>,
    /// Rank 0's physical experts, `[tokens, num_topk]`, and a number for each.
    ids: Vec<i64>,
    numbers: Vec<i32>,
    num_topk: u32,
    is_narrow: bool,
    alignment: u32,
    grid: u32,
    warps: u32,
    /// Seed of the schedule; check mode with odd ones.
    seed: u64,
    /// A rank whose first rows do not arrive.
    absent: Option<u32>,
}

/// The results of the kernel.
struct Planned {
    /// Status and rows.
    header: Vec<i32>,
    lists: Vec<i64>,
    counts: Vec<i32>,
    starts: Vec<i32>,
    ends: Vec<i32>,
    /// Sources of the rows of rank 0.
    sources: Vec<i32>,
    /// Rank 0's packets at each rank: its rows, then the first row for each expert.
    sent: Vec<Vec<u64>>,
    /// The record of an expired wait: its code, and the peer.
    failure: (u64, u64),
}

fn packet(value: u32) -> u64 {
    EPOCH << 32 | value as u64
}

impl Plan {
    fn ranks(&self) -> u32 {
        self.counts.len() as u32
    }

    fn local_experts(&self) -> u32 {
        self.counts[0].len() as u32
    }

    fn run(&self) -> Planned {
        let checker = (self.seed % 2 == 1).then(|| Checker::new(CheckConfig::default()));
        let config = VirtConfig { schedule_seed: Some(self.seed), checker, ..VirtConfig::default() };
        let device = VirtualGpu::new(config);
        let stream = Stream::new(&device).unwrap();
        let (ranks, experts) = (self.ranks(), self.local_experts());
        let words = |values: &[u64]| {
            let values: Vec<i64> = values.iter().map(|&value| value as i64).collect();
            TypedTensor::from_host(&stream, &[values.len() as u64], &values).unwrap()
        };
        let untouched =
            |len: u64| TypedTensor::from_host(&stream, &[len], &vec![UNTOUCHED; len as usize]).unwrap();

        // Pools: all messages of rank 0's, those from rank 0 of the others'.
        let at = |rank: u32, word: u32| ((MESSAGES + message_offset(rank, word)) / 8) as usize;
        let recv_src_idx = MESSAGES + message_offset(ranks, 0);
        let mut own = vec![0; (recv_src_idx + ROWS * 4) as usize / 8];
        for rank in 0..ranks {
            for expert in 0..experts {
                own[at(rank, message::EXPERT_COUNTS + expert)] =
                    packet(self.counts[rank as usize][expert as usize]);
                if rank != 0 && self.absent != Some(rank) {
                    own[at(rank, message::EXPERT_STARTS + expert)] =
                        packet(self.starts[rank as usize][expert as usize]);
                }
            }
            if rank != 0 {
                own[at(rank, message::EXPERT_ROWS)] = packet(rank);
            }
        }
        let pools: Vec<_> =
            (0..ranks).map(|rank| words(if rank == 0 { &own } else { &own[..at(1, 0)] })).collect();
        let table = words(&pools.iter().map(|pool| pool.ptr().0).collect::<Vec<u64>>());

        let local = words(&[EPOCH - 1, 0, 0, 0, 0, 0]);
        let status = words(&[0; 4096]);
        let entries = [self.ids.len() as u64];
        let ids = TypedTensor::from_host(&stream, &entries, &self.ids).unwrap();
        let narrow: Vec<i32> = self.ids.iter().map(|&id| id as i32).collect();
        let narrow = TypedTensor::from_host(&stream, &entries, &narrow).unwrap();
        let numbers = TypedTensor::from_host(&stream, &entries, &self.numbers).unwrap();
        let exchange = words(&[PlanStatus::Ready as u64, 0, 0, 0, 0]);
        let header = untouched(10);
        let num_tokens = self.ids.len() as u32 / self.num_topk;
        let list_words = (num_tokens * SEND_LIST_STRIDE) as usize;
        let lists = words(&vec![UNTOUCHED as u64; list_words]);
        let (counts, starts, ends) =
            (untouched(experts as u64), untouched(experts as u64 + 1), untouched(experts as u64 + 1));
        let selections = untouched(experts as u64);
        let pool = PoolLayout {
            messages: MESSAGES,
            recv_x: 0,
            recv_scales: 0,
            recv_topk_idx: 0,
            recv_topk_weights: 0,
            recv_src_idx,
            recv_src_meta: 0,
            combine_x: 0,
            combine_weights: 0,
            rows: ROWS,
            bytes: recv_src_idx + ROWS * 4,
        };
        let call = PlanByExpert::call(ExpertPlanArgs {
            comm: Comm {
                pools: [DevicePtr::NULL; FEW_RANKS],
                pool_table: table.ptr(),
                local: local.ptr(),
                status: status.ptr(),
                timeout_ns: if self.absent.is_some() { 1_000_000 } else { u64::MAX / 2 },
                trace: DevicePtr::NULL,
                rank: 0,
                num_ranks: ranks,
                call: 0,
                pool,
            },
            topk_idx: if self.is_narrow { narrow.ptr() } else { ids.ptr() },
            numbers: numbers.ptr(),
            exchange: exchange.ptr(),
            header: header.ptr(),
            send_row: lists.ptr(),
            expert_counts: counts.ptr(),
            expert_starts: starts.ptr(),
            psum_expert: ends.ptr(),
            num_recv_tokens_per_expert: selections.ptr(),
            host: DevicePtr::NULL,
            tag: 0,
            num_tokens,
            num_topk: self.num_topk,
            local_experts: experts,
            alignment: self.alignment,
            narrow_ids: self.is_narrow as u32,
            reserved: 0,
        });
        let shared = PLAN_BY_EXPERT_SHARED_BYTES;
        let kernel = Kernel::shipped::<PlanByExpert>(&device, shared).unwrap();
        // SAFETY: the tensors have the shapes that the arguments say.
        unsafe { stream.call(&kernel, self.grid, self.warps * 32, shared, call).unwrap() };

        let read = |tensor: &TypedTensor<'_, i64>| -> Vec<u64> {
            tensor.values(&stream).unwrap().into_iter().map(|word| word as u64).collect()
        };
        let pools: Vec<Vec<u64>> = pools.iter().map(read).collect();
        let sources: &[i32] = bytemuck::cast_slice(&pools[0][recv_src_idx as usize / 8..]);
        let sent = pools.iter().map(|pool| {
            let starts = (0..experts).map(|expert| pool[at(0, message::EXPERT_STARTS + expert)]);
            std::iter::once(pool[at(0, message::EXPERT_ROWS)]).chain(starts).collect()
        });
        let status = read(&status);
        Planned {
            header: header.values(&stream).unwrap(),
            lists: lists.values(&stream).unwrap(),
            counts: counts.values(&stream).unwrap(),
            starts: starts.values(&stream).unwrap(),
            ends: ends.values(&stream).unwrap(),
            sources: sources.to_vec(),
            sent: sent.collect(),
            failure: (status[0], status[1]),
        }
    }

    /// Holds the results of the kernel against sums on the host.
    fn check(&self) {
        let got = self.run();
        let (ranks, experts) = (self.ranks() as usize, self.local_experts() as usize);
        let of_expert = |expert: usize| self.counts.iter().map(move |of_rank| of_rank[expert]);
        let mut sources = vec![0; ROWS as usize];
        let (mut start, mut first_rows, mut ends) = (0, vec![vec![]; ranks], vec![]);
        let (mut counts, mut starts) = (vec![], vec![]);
        for expert in 0..experts {
            let mut row = start;
            for (rank, rows) in of_expert(expert).enumerate() {
                first_rows[rank].push(row);
                row += rows;
            }
            counts.push((row - start) as i32);
            starts.push(start as i32);
            ends.push(row as i32);
            start = row.next_multiple_of(self.alignment);
            sources[row as usize..start as usize].fill(-1);
        }
        let total = start as i32;
        starts.push(total);
        ends.push(total);
        assert_eq!(got.failure, (0, 0), "{self:?}");
        assert_eq!(got.header[..2], [PlanStatus::Ready as i32, total], "{self:?}");
        assert_eq!((got.counts, got.starts, got.ends), (counts, starts, ends), "{self:?}");
        assert_eq!(got.sources, sources, "{self:?}");
        for (rank, sent) in got.sent.iter().enumerate() {
            let starts = first_rows[rank].iter().map(|&row| packet(row));
            let expected: Vec<u64> = std::iter::once(packet(total as u32)).chain(starts).collect();
            assert_eq!(*sent, expected, "to rank {rank} of {self:?}");
        }
        let destination = |entry: usize| {
            let id = usize::try_from(self.ids[entry]).ok()?;
            let (rank, expert) = (id / experts, id % experts);
            let first = if rank == 0 { first_rows[0][expert] } else { self.starts[rank][expert] };
            Some((rank as i64) << 32 | (first as i64 + self.numbers[entry] as i64))
        };
        for (at, &to) in got.lists.iter().enumerate() {
            let (token, k) = (at / SEND_LIST_STRIDE as usize, at % SEND_LIST_STRIDE as usize);
            let topk = self.num_topk as usize;
            let expected = if k < topk { destination(token * topk + k) } else { None };
            assert_eq!(to, expected.unwrap_or(-1), "entry {k} of token {token} of {self:?}");
        }
    }
}

fn plan() -> impl Strategy<Value = Plan> {
    let ranks = prop_oneof![2 => 1..=9usize, 1 => 30..=34usize, 1 => 60..=64usize];
    let experts = prop_oneof![3 => 1..=6usize, 1 => 30..=40usize];
    (ranks, experts, 1..=32u32, 0..=40usize).prop_flat_map(|(ranks, experts, num_topk, tokens)| {
        let by_rank = |most| prop::collection::vec(prop::collection::vec(0..=most, experts), ranks);
        let entries = tokens * num_topk as usize;
        let id = prop_oneof![1 => Just(-1), 5 => 0..(ranks * experts) as i64];
        let ids = prop::collection::vec(id, entries);
        let numbers = prop::collection::vec(0..100i32, entries);
        let warps = prop::sample::select(vec![1u32, 2, 5, 16]);
        let launch = (0..=3u32, any::<bool>(), 1..=4u32, warps, any::<u64>());
        // 40 segments of 64 * 20 + 8 rows fit into the pool.
        (by_rank(20u32), by_rank(1000), ids, numbers, launch).prop_map(
            move |(counts, starts, ids, numbers, (alignment, is_narrow, grid, warps, seed))| Plan {
                counts,
                starts,
                ids,
                numbers,
                num_topk,
                is_narrow,
                alignment: 1 << alignment,
                grid,
                warps,
                seed,
                absent: None,
            },
        )
    })
}

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: tier::pick(24, 250),
        max_shrink_iters: 200,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn plans_equal_sums_on_the_host(plan in plan()) {
        plan.check();
    }
}

/// Two ranks with four experts each. A thread lists more selections than it has in flight at once.
fn two_ranks() -> Plan {
    Plan {
        counts: vec![vec![3, 0, 5, 1], vec![2, 7, 0, 0]],
        starts: vec![vec![], vec![10, 20, 30, 40]],
        ids: (0..400).map(|entry| entry * 5 % 9 - 1).collect(),
        numbers: (0..400).collect(),
        num_topk: 2,
        is_narrow: false,
        alignment: 4,
        grid: 1,
        warps: 1,
        seed: 1,
        absent: None,
    }
}

#[test]
fn many_selections_of_a_thread() {
    two_ranks().check();
}

#[test]
fn first_rows_that_do_not_come() {
    for_each_seed(tier::pick(2, 20), |seed| {
        let got = Plan { absent: Some(1), seed, ..two_ranks() }.run();
        assert_eq!(got.header[0], PlanStatus::Timeout as i32);
        assert_eq!(got.failure, (Wait::Counts as u64, 1));
        // No row is sent to the rank.
        assert!(got.lists.iter().all(|&to| to == -1 || to >> 32 == 0), "{:?}", got.lists);
    });
}

//! Many dispatches and combines one after the other, while the puts of one queue are late.
//!
//! The host does not wait between the first call and the last: neither between the two phases of a
//! pair, nor between pairs.

use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use epoxide::Result;
use epoxide::internal::transport::Shaping;
use epoxide::throughput::{CombineRequest, DispatchRequest};
use epoxide::transport::TransportKind;
use epoxide::{DType, Tensor, TypedTensor};
use epoxide_gpu::layout::{DevicePtr, row_stride};
use epoxide_testing::oracle::{self, Plan, Routing, Style};
use epoxide_testing::payload::{self, PerToken, bytes_of};

use epoxide_testing::harness::{NodeLinks, Rank, Setup};
use epoxide_testing::roundtrip::{Case, Return};
use epoxide_testing::tier;

/// Number of pairs of [`pairs_without_a_host_wait`], for a process of its own.
pub const PAIRS_VARIABLE: &str = "EPOXIDE_TEST_PAIRS";
const MOST_TOKENS: u32 = 13;
const TOPK: u32 = 3;
/// Bytes of a row; pairs take turns.
const ROWS: [u32; 5] = [16, 48, 272, 144, 32];
const CHANNELS: u32 = 5;
const QUEUES: u32 = 3;
/// The delay of each put of a late queue.
const LAG: Duration = Duration::from_micros(500);

/// `nodes` nodes; each rank's queues number `late` lag behind the others.
struct Network {
    nodes: u32,
    place: NodeLinks,
    late: u32,
}

impl Network {
    fn ranks(&self) -> u32 {
        self.nodes * self.place.ranks_per_node
    }

    fn setup(&self) -> Setup {
        let most = ROWS.iter().max().copied().unwrap_or(0);
        let mut setup = Setup::new(self.ranks(), CHANNELS, MOST_TOKENS, most.into()).nodes(Some(self.place));
        let lag = |shaping: Shaping, peer| shaping.lag(peer, self.late, LAG);
        setup.fields().transport.hooks.shaping = Some((0..self.ranks()).fold(Shaping::new(1), lag));
        setup
    }

    fn run(&self, count: usize) {
        let mut rng = ChaCha8Rng::seed_from_u64(count as u64);
        let pairs: Vec<_> = (0..count).map(|number| Pair::random(self, &mut rng, number)).collect();
        self.setup().run(|rank| {
            let memory = Memory::upload(rank, &pairs)?;
            rank.synchronize()?;
            let mut place = rank.place()?;
            for (pair, at) in pairs.iter().zip(&memory.places) {
                let inputs = pair.inputs(rank, at);
                let layout = rank.layout(&inputs.topk_idx, pair.case.routing.num_experts)?;
                let request = DispatchRequest::new(&inputs.x, &layout).counts(rank.on_device());
                let output = rank.dispatch(&mut place, request)?;
                // SAFETY: the copies are read below, after the stream. The buffer or the arena owns
                // the sources and reuses them in stream order.
                unsafe { rank.stream.copy(at.recv_x, output.recv_x.ptr(), pair.recv_bytes(rank))? };
                let back = rank.combine(CombineRequest::new(&inputs.back, &output.handle))?;
                // SAFETY: as above.
                unsafe { rank.stream.copy(at.sums, back.combined_x.ptr(), pair.x_bytes(rank))? };
            }
            rank.outcome()?;
            for (number, (pair, at)) in pairs.iter().zip(&memory.places).enumerate() {
                let mut recv = vec![0; pair.recv_bytes(rank) as usize];
                let mut sums = vec![0; pair.x_bytes(rank) as usize];
                // SAFETY: the memory of all pairs is live, and has room for the copy.
                unsafe {
                    rank.stream.read(&mut recv, at.recv_x)?;
                    rank.stream.read(&mut sums, at.sums)?;
                }
                let row_bytes = pair.case.row_bytes as usize;
                let rows: Vec<_> =
                    recv.chunks(pair.recv_stride() as usize).map(|row| row[..row_bytes].to_vec()).collect();
                let want = oracle::recv_rows(pair.plan(rank), &pair.x);
                rank.equal(&format!("recv_x of pair {number}"), &rows, &want);
                let rows: Vec<_> = sums.chunks(row_bytes).map(<[u8]>::to_vec).collect();
                let want = &pair.back.sums[rank.rank as usize];
                rank.equal(&format!("combined_x of pair {number}"), &rows, want);
            }
            Ok(())
        });
    }
}

/// A dispatch, and a combine of rows that do not depend on what it brought.
struct Pair {
    case: Case,
    plans: Vec<Plan>,
    x: PerToken<Vec<u8>>,
    back: Return,
}

struct Inputs<'a> {
    topk_idx: TypedTensor<'a, i64>,
    x: Tensor<'a>,
    back: Tensor<'a>,
}

impl Pair {
    fn random(network: &Network, rng: &mut ChaCha8Rng, number: usize) -> Pair {
        let tokens: Vec<u32> = (0..network.ranks())
            .map(|_| match rng.random_range(0..6) {
                0 => 0,
                1 => 1,
                _ => rng.random_range(0..=MOST_TOKENS),
            })
            .collect();
        let (style, row_bytes) = (Style::ALL[number % 4], ROWS[number % ROWS.len()]);
        let routing = Routing::random(rng, &tokens, TOPK, 2 * network.ranks(), style);
        let x = payload::distinct_rows(rng, &tokens, row_bytes as usize);
        let case = Case {
            nodes: Some(network.place),
            num_channels: CHANNELS,
            seed: rng.random(),
            ..Case::new(routing, row_bytes)
        };
        let plans = case.plans();
        let back = Return::random(&case, &plans, 0, DType::Bf16);
        Pair { case, plans, x, back }
    }

    fn plan(&self, rank: &Rank) -> &Plan {
        &self.plans[rank.rank as usize]
    }

    fn tokens(&self, rank: &Rank) -> u64 {
        self.case.routing.num_tokens(rank.rank).into()
    }

    fn x_bytes(&self, rank: &Rank) -> u64 {
        self.tokens(rank) * u64::from(self.case.row_bytes)
    }

    fn recv_stride(&self) -> u64 {
        row_stride(self.case.row_bytes.into())
    }

    /// Received rows as they lie in the pool.
    fn recv_bytes(&self, rank: &Rank) -> u64 {
        u64::from(self.plan(rank).num_recv_tokens) * self.recv_stride()
    }

    fn inputs<'a>(&self, rank: &Rank, at: &'a Places) -> Inputs<'a> {
        let (tokens, hidden) = (self.tokens(rank), u64::from(self.case.row_bytes) / 2);
        let received = u64::from(self.plan(rank).num_recv_tokens);
        // SAFETY: the places have room for these tensors and outlive the stream's work.
        unsafe {
            Inputs {
                topk_idx: TypedTensor::from_raw(at.topk_idx, &[tokens, TOPK.into()]),
                x: Tensor::from_raw(at.x, DType::Bf16, &[tokens, hidden]),
                back: Tensor::from_raw(at.back, DType::Bf16, &[received, hidden]),
            }
        }
    }
}

/// A rank's device memory for all pairs: one allocation, since a device is not made for thousands.
struct Memory {
    _all: Tensor<'static>,
    places: Vec<Places>,
}

/// Where a pair's inputs and results are.
struct Places {
    topk_idx: DevicePtr,
    x: DevicePtr,
    back: DevicePtr,
    recv_x: DevicePtr,
    sums: DevicePtr,
}

impl Memory {
    /// Places for everything, and the inputs in them.
    fn upload(rank: &Rank, pairs: &[Pair]) -> Result<Memory> {
        let mine = rank.rank as usize;
        let inputs = |pair: &Pair| {
            let ids = pair.case.routing.flat_topk_idx(rank.rank);
            [bytes_of(&ids), pair.x[mine].concat(), pair.back.rows[mine].concat()]
        };
        let aligned = |bytes: u64| bytes.next_multiple_of(16);
        let room = |pair: &Pair| -> u64 {
            let results = aligned(pair.recv_bytes(rank)) + aligned(pair.x_bytes(rank));
            inputs(pair).iter().map(|input| aligned(input.len() as u64)).sum::<u64>() + results
        };
        let bytes: u64 = pairs.iter().map(room).sum();
        let all = Tensor::alloc(rank.device(), DType::Fp8E4m3, &[bytes.max(1)])?;
        let mut used = 0;
        let mut place = |bytes: u64| {
            used += aligned(bytes);
            all.ptr().add(used - aligned(bytes))
        };
        let mut places = Vec::new();
        for pair in pairs {
            let inputs = inputs(pair);
            let [topk_idx, x, back] = inputs.each_ref().map(|input| place(input.len() as u64));
            for (at, input) in [topk_idx, x, back].into_iter().zip(&inputs) {
                // SAFETY: the place was made for this input, in memory that is not used yet.
                unsafe { rank.stream.write(at, input)? };
            }
            let (recv_x, sums) = (place(pair.recv_bytes(rank)), place(pair.x_bytes(rank)));
            places.push(Places { topk_idx, x, back, recv_x, sums });
        }
        Ok(Memory { _all: all, places })
    }
}

#[test]
fn pairs_without_a_host_wait() {
    let count =
        std::env::var(PAIRS_VARIABLE).map_or(tier::pick(12, 200), |count| count.parse().expect("a number"));
    let place = NodeLinks { ranks_per_node: 2, transport: TransportKind::Shm, queues: QUEUES };
    Network { nodes: 3, place, late: 1 }.run(count);
}

/// Queue 0 carries the counts, so other queues' rows come before them.
#[test]
fn pairs_whose_counts_are_late() {
    let place = NodeLinks { ranks_per_node: 1, transport: TransportKind::Shm, queues: QUEUES };
    Network { nodes: 3, place, late: 0 }.run(tier::pick(3, 100));
}

#[test]
fn pairs_into_mapped_memory() {
    let place = NodeLinks { ranks_per_node: 2, transport: TransportKind::Direct, queues: QUEUES };
    Network { nodes: 3, place, late: 0 }.run(tier::pick(3, 100));
}

/// Two nodes map each other's memory, the third is reached over tcp.
#[test]
fn pairs_in_both_ways_at_once() {
    let place = NodeLinks { ranks_per_node: 1, transport: TransportKind::Auto, queues: QUEUES };
    Network { nodes: 3, place, late: 1 }.run(tier::pick(3, 100));
}

#[test]
fn pairs_over_tcp() {
    let place = NodeLinks { ranks_per_node: 2, transport: TransportKind::Tcp, queues: QUEUES };
    Network { nodes: 2, place, late: 2 }.run(tier::pick(3, 100));
}

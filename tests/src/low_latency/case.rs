//! Parameters of a low-latency round trip.

use epoxide::DType;
use epoxide::driver::Device;
use epoxide::driver::virt::{Checker, VirtConfig};
use epoxide::low_latency::{Options, Quantise, Shape};
use epoxide_gpu::layout::MAX_EXPERTS_OF_ROWS;
use rand::Rng;

use crate::harness::{NodeLinks, PATIENCE, open_device};
use crate::ids::Ids;
use crate::oracle::{Routing, Style};
use crate::payload::{Format, rng_of};
use crate::roundtrip::{Cases, Draw};
use crate::sizes::Sizes;

/// Rows that a combine takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReturnPath {
    /// One for each token and expert: combine weights and sums them.
    ByExpert,
    /// One for each token and rank, weighted and summed by the experts' kernel.
    ByRow,
    /// The same, in the pool, where the tokens' owners gather them.
    InPool,
}

impl ReturnPath {
    /// The name in flags and results.
    pub fn text(self) -> &'static str {
        match self {
            ReturnPath::ByExpert => "by-expert",
            ReturnPath::ByRow => "by-row",
            ReturnPath::InPool => "in-pool",
        }
    }
}

/// Rows by expert that a dispatch brings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segments {
    /// Segments begin at multiples of it.
    pub alignment: u32,
    /// The owner of the memory that receives them.
    pub memory: RowMemory,
    /// Whether a combine of such rows leaves the weights out.
    pub unweighted: bool,
}

impl Segments {
    /// Those of drawn cases, whose buffers have so many experts.
    pub fn of_draws(experts: u32) -> Option<Segments> {
        (experts <= MAX_EXPERTS_OF_ROWS).then(|| Segments::aligned(8))
    }

    /// In memory of the library's, weighted.
    pub fn aligned(alignment: u32) -> Segments {
        Segments { alignment, memory: RowMemory::Library, unweighted: false }
    }
}

/// The owner of the memory that receives rows by expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowMemory {
    /// Memory of the dispatch.
    Library,
    /// A tensor of the caller.
    Caller,
}

/// One round trip, or several.
#[derive(Debug, Clone)]
pub struct LowLatencyCase {
    /// Experts of every token.
    pub routing: Routing,
    /// How they are named.
    pub ids: Ids,
    /// The spread of ranks over nodes; `None`: one node.
    pub nodes: Option<NodeLinks>,
    /// Whether nodes whose ranks can map each other's memory are one.
    pub joins_nodes: bool,
    /// Most tokens of a rank: the buffer's size.
    pub max_tokens: u32,
    /// Elements of a row.
    pub hidden: u32,
    /// Quantisation of rows on their way.
    pub quantise: Quantise,
    /// The type of the rows that combine takes, and of its sums.
    pub combine_dtype: DType,
    /// Quantisation of shares on their way back.
    pub quantise_back: Quantise,
    /// Rows that combine takes.
    pub combine_rows: ReturnPath,
    /// Whether the experts give the rows of the expert-major copy back as they are, or those of
    /// `segments`: bf16, by expert.
    pub gathers: bool,
    /// Whether the dispatch brings rows by expert.
    pub segments: Option<Segments>,
    /// Whether tokens have weights, else 1.
    pub weighted: bool,
    /// Whether each call is made in two halves.
    pub halves: bool,
    /// Whether sums go to a tensor of the caller's, and dispatches are detached until their
    /// combine.
    pub own_memory: bool,
    /// Tokens of a chunk.
    pub chunk_tokens: u32,
    /// Most tokens of a rank whose rows return as packets.
    pub packet_tokens: u32,
    /// Multiprocessors of each device.
    pub sm_count: u32,
    /// Round trips behind each other.
    pub rounds: u32,
    /// Every so manieth dispatch is not answered by a combine; 0: all are.
    pub unanswered: u32,
    /// Places that they go round.
    pub places: u32,
    /// Room for columns, in words of 4 bytes.
    pub max_scales: u32,
    /// The seed of rows and weights.
    pub seed: u64,
    /// Draws the order of warps.
    pub schedule_seed: Option<u64>,
    /// Draws the multiprocessors of each call. Without, they are the buffer's.
    pub sms_seed: Option<u64>,
    /// Whether the waits of each call are measured.
    pub measures: bool,
    /// Watches the ranks' memory.
    pub checker: Option<Checker>,
}

impl LowLatencyCase {
    /// BF16 rows along a routing, weighted, by expert.
    pub fn new(routing: Routing, hidden: u32) -> LowLatencyCase {
        LowLatencyCase {
            max_tokens: routing.max_tokens().max(1),
            routing,
            ids: Ids::Wide,
            nodes: None,
            joins_nodes: false,
            hidden,
            quantise: Quantise::None,
            combine_dtype: DType::Bf16,
            quantise_back: Quantise::None,
            combine_rows: ReturnPath::ByExpert,
            gathers: false,
            segments: None,
            weighted: true,
            halves: false,
            own_memory: false,
            chunk_tokens: 4,
            packet_tokens: 4,
            sm_count: 3,
            rounds: 1,
            unanswered: 0,
            places: 1,
            max_scales: 0,
            seed: 1,
            schedule_seed: None,
            sms_seed: None,
            measures: false,
            checker: None,
        }
    }

    /// Case `number` of a run.
    pub(super) fn draw(cases: &Cases, number: u64, draw: Draw) -> LowLatencyCase {
        let mut rng = cases.rng(number);
        let Sizes { ranks, tokens: most, hidden, experts, topk, format, .. } = cases.sizes;
        let tokens: Vec<u32> = (0..ranks)
            .map(|_| if draw == Draw::Random { rng.random_range(0..=most) } else { most })
            .collect();
        let style =
            if number == 0 { Style::WithHoles } else { Style::ALL[rng.random_range(0..Style::ALL.len())] };
        let routing = Routing::random(&mut rng, &tokens, topk, experts, style);
        let quantise = match number % 2 {
            _ if format == Format::Bf16 => Quantise::None,
            _ if format == Format::Mxfp8 => Quantise::Mxfp8,
            0 => Quantise::Fp8,
            _ => Quantise::Fp8PowerOfTwo,
        };
        // Blocks of 128 elements have a scale.
        let quantise_back = match number % 4 {
            1 if hidden.is_multiple_of(128) => Quantise::Fp8,
            3 if hidden.is_multiple_of(128) => Quantise::Fp8PowerOfTwo,
            _ => Quantise::None,
        };
        LowLatencyCase {
            max_tokens: most.max(1),
            quantise,
            quantise_back,
            // The next dispatch overwrites what peers have read before the combine, which between
            // cases the ranks' own meetings order.
            rounds: 1 + u32::from(number % 4 == 1),
            combine_rows: match number % 6 {
                // Ranks of one node can gather; odd numbers have rows that are quantised.
                2 if cases.nodes == 1 => ReturnPath::InPool,
                2 | 5 => ReturnPath::ByRow,
                _ => ReturnPath::ByExpert,
            },
            segments: Segments::of_draws(experts).filter(|_| number % 4 == 3),
            chunk_tokens: Options::DEFAULT_CHUNK_TOKENS,
            packet_tokens: Options::default_packet_tokens(ranks),
            seed: rng.random(),
            ..LowLatencyCase::new(routing, hidden as u32)
        }
    }

    /// The same where these ranks have no tokens and their experts do nothing.
    pub fn without(&self, ranks: &[u32]) -> LowLatencyCase {
        let mut case = self.clone();
        for &rank in ranks {
            case.routing.topk_idx[rank as usize].clear();
        }
        let owner = |expert: i64| self.routing.owner(expert);
        for expert in case.routing.topk_idx.iter_mut().flatten().flatten() {
            if owner(*expert).is_some_and(|owner| ranks.contains(&owner)) {
                *expert = -1;
            }
        }
        case
    }

    /// Room for rows by expert, if the dispatch brings such.
    pub fn room_by_expert(&self) -> Option<u64> {
        self.segments
            .map(|segments| self.shape().most_rows_by_expert(self.routing.num_ranks(), segments.alignment))
    }

    /// Multiprocessors of the calls of a rank with inputs `number`, if not the buffer's: of the
    /// dispatch and of the combine.
    pub(super) fn num_sms(&self, rank: u32, number: u64) -> [Option<u32>; 2] {
        let Some(seed) = self.sms_seed else { return [None; 2] };
        let mut rng = rng_of(&[seed, u64::from(rank), number]);
        [(); 2].map(|()| rng.random_bool(0.8).then(|| rng.random_range(1..=self.sm_count + 1)))
    }

    fn shape(&self) -> Shape {
        Shape {
            max_tokens: self.max_tokens,
            hidden: self.hidden.into(),
            num_topk: self.routing.num_topk,
            num_experts: self.routing.num_experts,
        }
    }

    /// The options of a rank's buffer.
    pub fn options(&self, rank: u32) -> Options {
        let options = Options::new(self.shape())
            .places(self.places)
            .chunk_tokens(self.chunk_tokens)
            .packet_tokens(self.packet_tokens)
            .max_scales(self.max_scales)
            .combine_dtype(self.combine_dtype)
            .timeout(PATIENCE);
        let options = match self.room_by_expert() {
            Some(rows) => options.rows_by_expert(rows),
            None => options,
        };
        match self.nodes {
            None => options,
            Some(nodes) => {
                let options =
                    options.ranks_per_node(nodes.ranks_per_node).transport(nodes.transport_of(rank));
                if self.joins_nodes { options } else { options.keep_nodes() }
            }
        }
    }

    /// A rank's device: a virtual GPU, or in its place a GPU as [`open_device`] says.
    ///
    /// # Panics
    /// Where there is no such GPU.
    pub fn device(&self, rank: u32) -> Device {
        let schedule_seed = self.schedule_seed.map(|seed| seed + u64::from(rank));
        let checker = self.checker.clone();
        let config = VirtConfig {
            ordinal: rank,
            sm_count: self.sm_count,
            schedule_seed,
            checker,
            ..VirtConfig::default()
        };
        open_device(config).unwrap_or_else(|error| panic!("device of rank {rank}: {error}"))
    }
}

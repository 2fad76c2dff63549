//! Plan of a measurement.

use std::borrow::Cow;
use std::path::PathBuf;
use std::time::Duration;

use epoxide::DType;
use epoxide::internal::{Topology, Tuning, check_nodes};
use epoxide::low_latency::Quantise;
use epoxide::throughput::{Config, Shape};
use epoxide::transport::{TransportKind, TransportOptions};
use epoxide_gpu::layout::SlotShape;
use epoxide_testing::low_latency::ReturnPath;
use epoxide_testing::oracle::{Routing, Style};
use epoxide_testing::payload::{ELEMENTS_PER_SCALE, Format, rng_of};
use epoxide_testing::roundtrip::{Case, Scales};
use epoxide_testing::sizes::Sizes;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::counts::{self, random_topk};
use crate::replay::STEPS;
use crate::results::{INTERNODE, Key, LOW_LATENCY, PhaseName, Settings};
use crate::{Error, Result};

/// Longest wait for a peer: the ranks of a virtual GPU share few processors.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// Pairs of high throughput in one timed chain. Few, because NCCL is launched call by call, and a
/// kernel holds the device until the host has enqueued the chain.
pub(crate) const CHAIN: u32 = 4;
/// Fewest multiprocessors of a cached dispatch across nodes.
const FEWEST_SMS_ACROSS: u32 = 4;
/// Rows of as many bytes or more do not go by low latency.
const MOST_ROW_BYTES: u64 = 1 << 17;

/// How much of a measurement is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// Results checked, everything timed.
    Whole,
    /// The calls of each phase alone: for further runs of what has been checked.
    Phases,
}

/// Libraries that can be measured beside epoxide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Baseline {
    /// NCCL, by all-to-all and by all-gather + reduce-scatter.
    Nccl,
}

/// Settings of a low-latency measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LowLatencySettings {
    /// The conversion of BF16 rows to [`Plan::dtype`] when a dispatch sends them.
    pub quantise: Quantise,
    /// Row type of combine: BF16 or FP8.
    pub combine_dtype: DType,
    /// Rows that combine takes.
    pub combine_rows: ReturnPath,
    /// Tokens of a rank that are complete together.
    pub chunk_tokens: u32,
    /// Most tokens of a rank whose rows return as packets.
    pub packet_tokens: u32,
    /// Most tokens of a rank that the buffer is made for; missing: those that are measured.
    pub max_tokens: Option<u32>,
    /// Microseconds of a kernel that stands in for the experts behind each dispatch of a chain of
    /// pairs, and for the next layer behind each combine; missing: none.
    pub between_us: Option<u32>,
}

/// Sizes and settings of a measurement.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Low latency is measured; missing: high throughput.
    pub low_latency: Option<LowLatencySettings>,
    /// Nodes and ranks.
    pub topology: Topology,
    /// Whether nodes are kept apart though all ranks can map each other's memory.
    pub keep_nodes: bool,
    /// Whether the devices are virtual: points of theirs are no points of hardware.
    pub is_virtual: bool,
    /// The network between the nodes.
    pub transport: TransportKind,
    /// Queues to each peer on another node.
    pub queues: u32,
    /// Connections of each queue over tcp, if given.
    pub connections: Option<u32>,
    /// Tokens per rank.
    pub tokens: u32,
    /// Elements per row.
    pub hidden: u64,
    /// Experts of all ranks.
    pub experts: u32,
    /// Experts per token.
    pub topk: u32,
    /// Row type of dispatch; combine is BF16 in high throughput.
    pub dtype: DType,
    /// How BF16 rows of high throughput become those on their way.
    pub quantise: Quantise,
    /// The dispatch brings rows by expert, in segments that begin at multiples of this. In high
    /// throughput an ordinary dispatch and a kernel that sorts its rows are measured as well.
    pub rows_by_expert: Option<u32>,
    /// Multiprocessors for each operation: one point for each number. [`Plan::ALL_SMS`] in low
    /// latency is all that the device has.
    pub num_sms: Vec<u32>,
    /// Rows that travel together in one put.
    pub rdma_send: u32,
    /// Rows of the ring between nodes that the original interface's size hints assume; nothing here
    /// has one.
    pub rdma_recv: u32,
    /// Rows of a chunk within a node, of which the same is true.
    pub nvl_send: u32,
    /// Rows of the ring within a node, of which the same is true.
    pub nvl_recv: u32,
    /// Bytes to spend on the pool instead of room for the worst case.
    pub nvl_bytes: Option<u64>,
    /// Bytes to spend on wire memory instead of room for the worst case.
    pub rdma_bytes: Option<u64>,
    /// Untimed iterations.
    pub warmup: u32,
    /// Timed iterations.
    pub iters: u32,
    /// Runs, each with a buffer and rows of its own, whose times are kept apart.
    pub repeat: u32,
    /// How much of it is done.
    pub effort: Effort,
    /// A file with the kernels' PTX in place of the library's own.
    pub ptx: Option<PathBuf>,
    /// Seed of routing and rows.
    pub seed: u64,
    /// Share of the entries that select no expert.
    pub masked: f64,
    /// Measures replays of captured graphs as well, also in chains of this many. Low latency
    /// measures nothing else, and this is the number of pairs of a graph.
    pub graph: Option<u32>,
    /// Also measures this baseline, and epoxide's alternatives.
    pub baseline: Option<Baseline>,
    /// Leaves the links' own ceiling out.
    pub no_ceiling: bool,
    /// MiB written between iterations to empty the L2 cache; on the virtual GPU nothing is.
    pub flush_mib: u64,
    /// Launch shapes.
    pub shapes: Shapes,
    /// Every rank's ids, in place of random ones.
    pub ids: Option<Vec<Vec<i64>>>,
}

/// Requested launch shapes; the library's own for the others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shapes {
    /// Warps per block in dispatch.
    pub dispatch_warps: Option<u32>,
    /// Warps per block that send metadata, in dispatch within one node.
    #[serde(default)]
    pub dispatch_metadata_warps: Option<u32>,
    /// Warps per block that copy received rows in dispatch by expert.
    pub dispatch_copy_warps: Option<u32>,
    /// Most stages per warp in dispatch.
    pub dispatch_stages: Option<u32>,
    /// Largest stage in dispatch, in bytes.
    pub dispatch_stage_bytes: Option<u32>,
    /// Warps per block in combine.
    pub combine_warps: Option<u32>,
    /// Most slots per warp in combine.
    pub combine_slots: Option<u32>,
    /// Largest slot in combine, in bytes.
    pub combine_slot_bytes: Option<u32>,
    /// Blocks that copy rows into the pool during a combine of a tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub combine_stagers: Option<u32>,
}

impl Shapes {
    /// The launch shapes, with the library's own for those not requested.
    pub fn tuning(&self) -> Tuning {
        let d = Tuning::default();
        Tuning {
            dispatch_warps: self.dispatch_warps.unwrap_or(d.dispatch_warps),
            internode_dispatch_warps: self.dispatch_warps.unwrap_or(d.internode_dispatch_warps),
            dispatch_metadata_warps: self.dispatch_metadata_warps.unwrap_or(d.dispatch_metadata_warps),
            dispatch_copy_warps: self.dispatch_copy_warps.unwrap_or(d.dispatch_copy_warps),
            dispatch_stages: self.dispatch_stages.unwrap_or(d.dispatch_stages),
            dispatch_claiming_blocks: d.dispatch_claiming_blocks,
            dispatch_stage_bytes: self.dispatch_stage_bytes.unwrap_or(d.dispatch_stage_bytes),
            combine_warps: self.combine_warps.unwrap_or(d.combine_warps),
            combine_slots: self.combine_slots.unwrap_or(d.combine_slots),
            combine_slot_bytes: self.combine_slot_bytes.unwrap_or(d.combine_slot_bytes),
            combine_stagers: self.combine_stagers.or(d.combine_stagers),
        }
    }
}

/// Most rows from one multiple to the next at which a segment may begin.
const MOST_ALIGNMENT: u32 = 4096;

/// Most repetitions of anything: each sample is kept, and what is counted in products of them stays
/// countable.
const MOST_REPETITIONS: u32 = 100_000;

/// Most MiB that are written to empty an L2 cache: no device has more memory.
const MOST_FLUSHED_MIB: u64 = 1 << 20;

/// Rejects a number of repetitions that is too small or absurdly large.
pub(crate) fn check_count(flag: &str, value: u32, least: u32) -> Result<()> {
    let bound = match value {
        _ if value < least => format!("at least {least}"),
        _ if value > MOST_REPETITIONS => format!("at most {MOST_REPETITIONS}"),
        _ => return Ok(()),
    };
    Err(Error::Usage(format!("{flag} {value}: must be {bound}")))
}

/// Rejects segments that do not begin at multiples of a power of two, or far apart.
fn check_alignment(alignment: Option<u32>) -> Result<()> {
    let nearest = match alignment {
        None => return Ok(()),
        Some(0) => "1".to_owned(),
        Some(alignment) if alignment > MOST_ALIGNMENT => MOST_ALIGNMENT.to_string(),
        Some(alignment) if alignment.is_power_of_two() => return Ok(()),
        Some(alignment) => {
            let above = alignment.next_power_of_two();
            format!("{} or {above}", above / 2)
        }
    };
    let alignment = alignment.unwrap_or_default();
    let rule = format!("must be a power of two, at most {MOST_ALIGNMENT}: take {nearest}");
    Err(Error::Usage(format!("--rows-by-expert {alignment}: {rule}")))
}

/// A transport in a point's key. The text marks nodes that are kept apart though they could be one.
fn transport_text(transport: TransportKind, keep_nodes: bool) -> String {
    let could_be_one = matches!(transport, TransportKind::Auto | TransportKind::Direct);
    if keep_nodes && could_be_one { format!("{transport}, nodes kept") } else { transport.to_string() }
}

impl Plan {
    /// All multiprocessors of the device, in [`Plan::num_sms`].
    pub const ALL_SMS: u32 = 0;

    /// How tokens travel, as results name it.
    pub fn mode(&self) -> &'static str {
        match self.low_latency {
            Some(_) => LOW_LATENCY,
            None if self.topology.nodes > 1 => INTERNODE,
            None => "intranode",
        }
    }

    /// The timed phases.
    pub fn phases(&self) -> &'static [PhaseName] {
        match (self.low_latency, self.rows_by_expert) {
            (Some(_), _) => &PhaseName::LOW_LATENCY,
            (None, Some(_)) => &PhaseName::BY_EXPERT,
            (None, None) => &PhaseName::HIGH_THROUGHPUT,
        }
    }

    /// The phases by rounds: phases of a round alternate.
    pub(crate) fn rounds(&self) -> std::slice::Chunks<'static, PhaseName> {
        self.phases().chunks(if self.low_latency.is_some() { 2 } else { 1 })
    }

    /// Untimed and timed iterations.
    pub(crate) fn repetitions(&self) -> [u32; 2] {
        [self.warmup, self.iters]
    }

    /// Pairs of a chain, and untimed and timed repetitions of it: a graph in low latency, which has
    /// many calls. Missing where no pairs are timed.
    pub fn pairs(&self) -> Option<(u32, [u32; 2])> {
        match self.low_latency {
            _ if self.effort == Effort::Phases => None,
            Some(_) => Some((self.graph.unwrap_or(1), [self.warmup.min(2), self.iters])),
            None => self.baseline.map(|_| (CHAIN, self.repetitions())),
        }
    }

    /// Microseconds of the stand-ins between the calls of a chain.
    fn between_us(&self) -> Option<u32> {
        self.low_latency.and_then(|low| low.between_us)
    }

    /// Row type of dispatch, as flags and results name it.
    pub fn dtype_name(&self) -> &'static str {
        match self.low_latency.map_or(self.quantise, |low| low.quantise) {
            Quantise::Mxfp8 => "mxfp8",
            _ => self.dtype.name(),
        }
    }

    /// Row type of combine.
    fn combine_dtype(&self) -> DType {
        self.low_latency.map_or(DType::Bf16, |low| low.combine_dtype)
    }

    /// Bytes of a row of BF16, or of FP8 with its scales.
    pub(crate) fn bytes_of_row(hidden: u64, is_bf16: bool) -> u64 {
        if is_bf16 { hidden * 2 } else { hidden + hidden.div_ceil(ELEMENTS_PER_SCALE) * 4 }
    }

    /// Replays of a chain, where steps of high throughput are replayed.
    pub(crate) fn replays(&self) -> Option<u32> {
        self.graph.filter(|_| self.low_latency.is_none())
    }

    /// The calls of each step that is replayed.
    pub(crate) fn replayed(&self) -> impl Iterator<Item = &'static [PhaseName]> {
        STEPS.into_iter().filter(|names| names.iter().all(|name| self.phases().contains(name)))
    }

    /// The configuration with `num_sms` multiprocessors.
    pub fn config(&self, num_sms: u32) -> epoxide::Result<Config> {
        let nodes = self.topology.nodes;
        let config = Config::new(num_sms, self.nvl_send, self.nvl_recv, self.rdma_send, self.rdma_recv)?;
        let config = config.for_nodes(nodes);
        check_nodes(&config, nodes)?;
        Ok(config)
    }

    /// The sizes of a buffer of high throughput.
    pub(crate) fn shape(&self) -> Shape {
        Shape {
            max_tokens: self.tokens,
            hidden: self.hidden,
            dtype: DType::Bf16,
            max_topk: self.topk,
            max_scales: self.num_scales() as u32,
        }
    }

    /// Most rows by expert that a rank of high throughput can receive, if rows are by expert.
    pub(crate) fn room_by_expert(&self) -> Option<u64> {
        let ranks = self.topology.ranks();
        let alignment = self.rows_by_expert.filter(|_| self.low_latency.is_none())?;
        Some(self.shape().most_rows_by_expert(ranks, self.experts / ranks, alignment))
    }

    /// Words of scales per row.
    pub fn num_scales(&self) -> u64 {
        if self.dtype.size() == 1 { self.hidden.div_ceil(ELEMENTS_PER_SCALE) } else { 0 }
    }

    /// Bytes of one row in dispatch, scales included.
    pub fn dispatch_row_bytes(&self) -> u64 {
        self.row_bytes(PhaseName::DispatchCached)
    }

    /// Bytes of one row in combine.
    pub fn combine_row_bytes(&self) -> u64 {
        self.hidden * 2
    }

    /// Bytes of a row in `phase`, scales included.
    pub fn row_bytes(&self, phase: PhaseName) -> u64 {
        let dtype = if phase.is_dispatch() { self.dtype } else { self.combine_dtype() };
        Plan::bytes_of_row(self.hidden, dtype == DType::Bf16)
    }

    /// Bytes of a row of `phase` on the wire, with what else its slot holds.
    pub(crate) fn slot_bytes(&self, phase: PhaseName) -> u64 {
        let row_bytes = self.row_bytes(phase);
        match phase {
            PhaseName::DispatchUncached if self.rows_by_expert.is_some() => {
                SlotShape::by_expert(row_bytes as u32, 0, Some(self.topk)).bytes.into()
            }
            _ => phase.slot_bytes(row_bytes, self.topk),
        }
    }

    /// The plan as the buffer ran it: `is_joined` where the ranks of all nodes were one node to it.
    pub(crate) fn as_run(&self, is_joined: bool) -> Cow<'_, Plan> {
        if !is_joined {
            return Cow::Borrowed(self);
        }
        let topology = Topology { nodes: 1, ranks_per_node: self.topology.ranks() };
        Cow::Owned(Plan { topology, ..self.clone() })
    }

    /// Sizes for a count of the routing.
    pub fn count_sizes(&self) -> counts::Sizes {
        let (ranks, ranks_per_node) = (self.topology.ranks(), self.topology.ranks_per_node);
        counts::Sizes { ranks, ranks_per_node, experts: self.experts, topk: self.topk }
    }

    /// The ids of rank `rank`.
    pub fn routing(&self, rank: u32) -> Vec<i64> {
        if let Some(ids) = &self.ids {
            return ids[rank as usize].clone();
        }
        if self.low_latency.is_some() {
            return self.low_latency_routing().flat_topk_idx(rank);
        }
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed.wrapping_add(u64::from(rank)));
        random_topk(&mut rng, self.tokens, self.topk, self.experts, self.masked)
    }

    /// The routing of low latency.
    pub(crate) fn low_latency_routing(&self) -> Routing {
        let tokens = vec![self.tokens; self.topology.ranks() as usize];
        let mut rng = rng_of(&[self.seed]);
        Routing::random(&mut rng, &tokens, self.topk, self.experts, Style::DistinctTopK)
    }

    /// All inputs of the ranks, and the expected results.
    pub fn case(&self) -> Case {
        let of_rank = |rank| self.routing(rank).chunks(self.topk as usize).map(<[i64]>::to_vec).collect();
        let topk_idx = (0..self.topology.ranks()).map(of_rank).collect();
        let routing = Routing { num_experts: self.experts, num_topk: self.topk, topk_idx };
        let case = match self.quantise {
            Quantise::None => Case {
                dtype: self.dtype,
                scales: Scales::columns(self.num_scales()),
                ..Case::new(routing, (self.hidden * self.dtype.size()) as u32)
            },
            quantise => Case::quantised(routing, self.hidden, quantise),
        };
        Case { weight: Some(1.0), seed: self.seed, ..case }
    }

    /// The sizes.
    pub(crate) fn sizes(&self) -> Sizes {
        Sizes {
            ranks: self.topology.ranks(),
            low_latency: self.low_latency.is_some(),
            tokens: self.tokens,
            fewest_tokens: 1,
            hidden: self.hidden,
            format: match self.dtype == DType::Bf16 && self.combine_dtype() == DType::Bf16 {
                true => Format::Bf16,
                false if self.quantise == Quantise::Mxfp8 => Format::Mxfp8,
                false => Format::Fp8,
            },
            quantise: self.quantise,
            experts: self.experts,
            topk: self.topk,
        }
    }

    /// Checks that all of the plan can be run.
    ///
    /// # Errors
    /// [`Error::Usage`] that names what cannot.
    pub fn check(&self) -> Result<()> {
        let topology = self.topology;
        let ranks = topology.ranks();
        check_count("--iters", self.iters, 1)?;
        check_count("--repeat", self.repeat, 1)?;
        check_count("--warmup", self.warmup, 0)?;
        check_count("--graph", self.graph.unwrap_or(1), 1)?;
        self.sizes().check().map_err(Error::Usage)?;
        check_alignment(self.rows_by_expert)?;
        if self.flush_mib > MOST_FLUSHED_MIB {
            let rule = format!("must be at most {MOST_FLUSHED_MIB}; twice the L2 cache is enough");
            return Err(Error::Usage(format!("--flush-mib {}: {rule}", self.flush_mib)));
        }
        let others = [
            ("--rows-by-expert", self.rows_by_expert.is_some()),
            ("--quantise", self.quantise != Quantise::None),
        ];
        if let (Some((other, _)), Some(_)) = (others.iter().find(|(_, is_given)| *is_given), self.baseline) {
            let remedy = "measure each in a run of its own";
            return Err(Error::Usage(format!("--baseline: not with {other}; {remedy}")));
        }
        if let Some(low) = self.low_latency {
            if self.masked != 0.0 {
                let rule =
                    "not with --mode low-latency, whose tokens all select --topk experts; leave it out";
                return Err(Error::Usage(format!("--masked {}: {rule}", self.masked)));
            }
            let Some(most) = low.max_tokens else { return Ok(()) };
            let sizes = || Sizes { tokens: most, ..self.sizes() };
            if most < self.tokens || sizes().check().is_err() {
                return Err(Error::Usage(format!(
                    "--max-tokens {most}: must be at least --tokens, {}, and at most 1024",
                    self.tokens
                )));
            }
            return Ok(());
        }
        for &num_sms in &self.num_sms {
            let config = self.config(num_sms).map_err(|error| {
                let flags = "--num-sms, --rdma-send, --rdma-recv, --nvl-send, --nvl-recv";
                Error::Usage(format!("{flags}: {error}"))
            })?;
            if topology.nodes == 1 {
                continue;
            }
            if num_sms < FEWEST_SMS_ACROSS {
                return Err(Error::Usage(format!(
                    "--num-sms {num_sms}: a cached dispatch across nodes takes at least {FEWEST_SMS_ACROSS}"
                )));
            }
            // The rule of MSCCL++'s test; it sizes its buffers by the hints.
            let per_rank = |bytes: Option<u64>, hint: fn(&Config, u64, u32, u32) -> u64| {
                let bytes =
                    bytes.unwrap_or_else(|| hint(&config, self.hidden * 2, ranks, topology.ranks_per_node));
                bytes / u64::from(ranks)
            };
            let nvl = per_rank(self.nvl_bytes, Config::nvl_buffer_size_hint);
            let rdma = per_rank(self.rdma_bytes, Config::rdma_buffer_size_hint);
            if self.hidden * 2 > nvl.min(rdma) {
                return Err(Error::Usage(format!(
                    "--hidden {}: a row in combine, of 2 bytes an element, must not exceed the smaller of nvl_bytes / num_ranks = {nvl} \
                     and rdma_bytes / num_ranks = {rdma}; raise --nvl-bytes or --rdma-bytes",
                    self.hidden
                )));
            }
        }
        Ok(())
    }

    /// The settings of a point that are no part of its key.
    pub(crate) fn settings(&self) -> Settings {
        Settings {
            connections: self.connections,
            nvl_bytes: self.nvl_bytes,
            rdma_bytes: self.rdma_bytes,
            flush_mib: self.flush_mib,
            no_ceiling: self.no_ceiling,
        }
    }

    /// The key of a point with `num_sms` multiprocessors.
    pub fn key(&self, num_sms: u32) -> Key {
        let across = self.topology.nodes > 1;
        let (low, has_queues) = (self.low_latency, across && self.low_latency.is_none());
        Key {
            nodes: self.topology.nodes,
            num_ranks: self.topology.ranks(),
            tokens: self.tokens,
            hidden: self.hidden,
            experts: self.experts,
            topk: self.topk,
            dtype: self.dtype_name().to_string(),
            seed: self.seed,
            masked: self.masked,
            num_sms,
            transport: across.then(|| transport_text(self.transport, self.keep_nodes)),
            queues: has_queues.then_some(self.queues),
            rdma_send: has_queues.then_some(self.rdma_send),
            combine_dtype: low.map(|low| low.combine_dtype.name().to_string()),
            combine_rows: low
                .filter(|low| low.combine_rows != ReturnPath::ByExpert)
                .map(|low| low.combine_rows.text().to_string()),
            rows_by_expert: self.rows_by_expert,
            quantised: (self.quantise != Quantise::None).then_some(true),
            chunk_tokens: low.map(|low| low.chunk_tokens),
            packet_tokens: low.map(|low| low.packet_tokens),
            max_tokens: low.and_then(|low| low.max_tokens),
            between_us: low.and_then(|low| low.between_us),
        }
    }

    /// Steps of a run that are reported to [`Watch`](crate::Watch): calls, or the pairs of low
    /// latency. Measurements of ceilings have none.
    pub fn steps(&self) -> u64 {
        let calls = u64::from(self.warmup + self.iters);
        let mut of_a_number = self.rounds().len() as u64 * calls;
        if let Some((chain, [untimed, timed])) = self.pairs() {
            let chains = if self.between_us().is_some() { 2 } else { 1 };
            of_a_number += chains * u64::from(untimed + timed) * u64::from(chain);
        }
        if self.effort == Effort::Whole {
            if self.low_latency.is_none() {
                // Exact dispatches one by one, and calls back to back.
                of_a_number += if self.topology.nodes > 1 { 4 } else { 3 } * calls;
            }
            if let Some(chain) = self.replays() {
                let alone = if self.empties_caches() { 2 } else { 1 };
                of_a_number += self.replayed().count() as u64 * calls * (alone + u64::from(chain));
            }
        }
        // The other ways: dispatch, combine and pairs each; back to back, too, where that can be.
        let low_latency = if self.has_low_latency() { 2 + u64::from(CHAIN) } else { 0 };
        let ways = self.baseline.map_or(0, |Baseline::Nccl| low_latency + 2 * (4 + u64::from(CHAIN)));
        of_a_number * self.num_sms.len() as u64 + ways * calls
    }

    /// Whether the L2 cache is emptied in front of calls of high throughput.
    pub(crate) fn empties_caches(&self) -> bool {
        !self.is_virtual && self.flush_mib > 0
    }

    /// Whether sizes and nodes are such that low latency can do it, too.
    pub(crate) fn has_low_latency(&self) -> bool {
        let sizes = Sizes { low_latency: true, ..self.sizes() };
        self.topology.nodes == 1 && self.combine_row_bytes() < MOST_ROW_BYTES && sizes.check().is_ok()
    }

    /// The transport between nodes; `timeout` bounds a put.
    pub fn transport_options(&self, timeout: Duration) -> TransportOptions {
        TransportOptions {
            queues_per_peer: self.queues,
            connections_per_queue: self.connections,
            timeout,
            ..TransportOptions::new(self.transport)
        }
    }
}

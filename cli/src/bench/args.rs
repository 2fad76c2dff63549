//! The flags of `epoxide bench`.

use std::path::PathBuf;

use epoxide::DType;
use epoxide::low_latency::{Options, Quantise};
use epoxide_bench::sweep::Sweep;
use epoxide_bench::{Baseline, Effort, LowLatencySettings, Plan, ReturnPath, Shapes};

use crate::error::{CommandError, Result};
use crate::options::{DeviceKind, Mode, NO_QUANTISE_IN_LOW_LATENCY, NetworkFlags, RowType, WorldFlags};

/// Experts per token where neither flags nor environment give them.
const TOPK: u32 = 8;

/// Rows of a put, likewise, and the variable.
const DEFAULT_RDMA_SEND: u32 = 16;
const RDMA_SEND: &str = "EPOXIDE_RDMA_SEND";
/// MiB that empty an L2 cache.
const DEFAULT_FLUSH_MIB: u64 = 256;

/// Other sizes, likewise.
struct Defaults {
    tokens: u32,
    hidden: u64,
    /// Experts of all ranks.
    experts: u32,
    num_sms: u32,
    warmup: u32,
    iters: u32,
}

impl Defaults {
    /// On GPUs, a layer of a large model, with multiprocessors that fill the links of an H200. An
    /// interpreter on a processor or two has seconds for what such a layer would keep it busy with
    /// for ten minutes.
    fn of(device: DeviceKind, ranks: u32) -> Defaults {
        match device {
            DeviceKind::Cuda => {
                Defaults { tokens: 4096, hidden: 7168, experts: 256, num_sms: 24, warmup: 5, iters: 20 }
            }
            DeviceKind::Virtual => {
                Defaults { tokens: 64, hidden: 1024, experts: 8 * ranks, num_sms: 8, warmup: 1, iters: 10 }
            }
        }
    }
}

// The headings of `--help`.
const RANKS: &str = "Ranks and network";
const SIZES: &str = "Sizes and types";
const TIMING: &str = "Timing";
const OUTPUT: &str = "Output";
const SWEEP: &str = "Sweeps";
const LOW: &str = "Low latency alone";
const HINTS: &str = "Puts and size hints between nodes";
const SHAPES: &str = "Launch shapes";

/// Flags of `epoxide bench`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Sizes of the measurement.
    #[command(flatten)]
    pub sizes: PlanFlags,
    /// Runs, each with a buffer and rows of its own; the results keep their times apart.
    /// `bench compare` needs several runs for a verdict.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = TIMING)]
    pub repeat: u32,
    /// Also measure NCCL on the same routing, by all-to-all and by all-gather + reduce-scatter, and
    /// low latency if the sizes allow it. NCCL's figures are of the exchange alone, see
    /// docs/BENCH-METHOD.md. Print the fastest way. `epoxide doctor` explains where libnccl is
    /// searched. `--sweep tokens=1..8192` makes a table of it.
    #[arg(long, value_enum, value_name = "WHAT", help_heading = TIMING)]
    pub baseline: Option<BaselineName>,
    /// Write the results as JSON to this file (docs/BENCH-SCHEMA.md); `-` for standard output, in
    /// place of the text.
    #[arg(long, value_name = "FILE", help_heading = OUTPUT)]
    pub json: Option<PathBuf>,
    /// Write the results as CSV to this file, a line for each phase.
    #[arg(long, value_name = "FILE", help_heading = OUTPUT)]
    pub csv: Option<PathBuf>,
    /// Draw the results, as `bench plot` does (built with `--features plots`).
    #[arg(long, value_name = "FILE.svg|png", help_heading = OUTPUT)]
    pub plot: Option<PathBuf>,
    /// Write a Chrome/Perfetto trace of some calls apart from the timed ones.
    #[arg(long, value_name = "FILE", help_heading = OUTPUT)]
    pub trace: Option<PathBuf>,
    /// Measure all combinations, such as `tokens=128..8192,sms=4..48:4,ranks=2,4,8`: `a..b`
    /// doubles, `a..b:s` steps by s; the axes are tokens, sms, ranks (of a node), nodes and
    /// rdma_send. Combinations that cannot be are left out, and named.
    #[arg(long, value_name = "AXES", requires = "out", conflicts_with_all = ["trace", "json"], help_heading = SWEEP)]
    pub sweep: Option<Sweep>,
    /// File of a sweep's points, one JSON line each; points that it holds already are not measured
    /// again, unless another program, device, driver or other settings measured them.
    #[arg(long, value_name = "FILE", requires = "sweep", help_heading = SWEEP)]
    pub out: Option<PathBuf>,
}

/// Libraries that can be measured beside epoxide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum BaselineName {
    /// NVIDIA's collectives.
    Nccl,
}

/// Flags of the measurement's sizes.
#[derive(Debug, Clone, clap::Args)]
pub struct PlanFlags {
    /// Nodes and ranks.
    #[command(flatten, next_help_heading = RANKS)]
    pub place: WorldFlags,
    /// The network between the nodes.
    #[command(flatten, next_help_heading = RANKS)]
    pub network: NetworkFlags,
    /// Where the kernels run; the virtual GPU's times are those of an interpreter.
    #[arg(long, value_enum, default_value = "virtual", help_heading = SIZES)]
    pub device: DeviceKind,
    /// Tokens per rank [default: 4096; on the virtual GPU 64; with --mode low-latency each of 1, 2,
    /// 4 .. 1024, or 1 .. 8, up to --max-tokens].
    #[arg(long, env = "EPOXIDE_BENCH_TOKENS", help_heading = SIZES)]
    pub tokens: Option<u32>,
    /// Elements per row [default: 7168; on the virtual GPU 1024].
    #[arg(long, env = "EPOXIDE_BENCH_HIDDEN", help_heading = SIZES)]
    pub hidden: Option<u64>,
    /// Experts of all ranks [default: 256; on the virtual GPU 8 per rank].
    #[arg(long, env = "EPOXIDE_BENCH_EXPERTS", help_heading = SIZES)]
    pub experts: Option<u32>,
    /// Experts per token [default: 8].
    #[arg(long, env = "EPOXIDE_BENCH_TOPK", help_heading = SIZES)]
    pub topk: Option<u32>,
    /// Row type of dispatch; combine is BF16, if --combine-dtype does not say otherwise. In high
    /// throughput rows are given as fp8, with their scales, unless --quantise is given; mxfp8 needs
    /// it.
    #[arg(long, value_enum, default_value = "bf16", help_heading = SIZES)]
    pub dtype: RowType,
    /// In high throughput dispatch takes rows of bf16, and converts them to --dtype, fp8 or mxfp8,
    /// on their way. Low latency does it anyway.
    #[arg(long, help_heading = SIZES)]
    pub quantise: bool,
    /// With --mode low-latency: the type of rows on the way back.
    #[arg(long, value_enum, default_value = "bf16", help_heading = SIZES)]
    pub combine_dtype: RowType,
    /// With --mode low-latency: rows that combine takes: one for each token and expert, which it
    /// weights and sums, or one for each token and rank, summed already.
    #[arg(long, value_enum, default_value = "by-expert", help_heading = LOW)]
    pub combine_rows: ReturnPathFlag,
    /// Dispatch brings rows by expert, in segments that begin at multiples of so many rows, a power
    /// of two up to 4096. In high throughput a row comes for each selection; an ordinary dispatch
    /// and a kernel that sorts its rows are measured beside it. With --mode low-latency rows come
    /// by expert and by rank.
    #[arg(long, value_name = "ALIGNMENT", help_heading = SIZES)]
    pub rows_by_expert: Option<u32>,
    /// Multiprocessors for each operation; several values make a table [env: across nodes
    /// EPOXIDE_NSM, else EPOXIDE_NUM_SMS] [default: 24, with --mode low-latency all; on the virtual
    /// GPU 8].
    #[arg(long, value_delimiter = ',', help_heading = SIZES)]
    pub num_sms: Vec<u32>,
    /// Rows that travel together in one put.
    #[arg(long, env = RDMA_SEND, default_value_t = DEFAULT_RDMA_SEND, help_heading = HINTS)]
    pub rdma_send: u32,
    /// Rows of the ring between nodes that the original interface's size hints assume; nothing here
    /// has one.
    #[arg(long, env = "EPOXIDE_RDMA_RECV", default_value_t = 128, help_heading = HINTS)]
    pub rdma_recv: u32,
    /// Rows of a chunk within a node, of which the same is true.
    #[arg(long, env = "EPOXIDE_NVL_SEND", default_value_t = 8, help_heading = HINTS)]
    pub nvl_send: u32,
    /// Rows of the ring within a node, of which the same is true.
    #[arg(long, env = "EPOXIDE_NVL_RECV", default_value_t = 256, help_heading = HINTS)]
    pub nvl_recv: u32,
    /// Bytes to spend on the pool instead of room for the worst case.
    #[arg(long, value_name = "BYTES", help_heading = HINTS)]
    pub nvl_bytes: Option<u64>,
    /// Bytes to spend on wire memory instead of room for the worst case.
    #[arg(long, value_name = "BYTES", help_heading = HINTS)]
    pub rdma_bytes: Option<u64>,
    /// Untimed iterations [default: 5; on the virtual GPU 1].
    #[arg(long, env = "EPOXIDE_BENCH_WARMUP", help_heading = TIMING)]
    pub warmup: Option<u32>,
    /// Timed iterations [default: 20; on the virtual GPU 10].
    #[arg(long, env = "EPOXIDE_BENCH_ITERS", help_heading = TIMING)]
    pub iters: Option<u32>,
    /// Seed of routing and rows.
    #[arg(long, default_value_t = 0xA1B2, help_heading = SIZES)]
    pub seed: u64,
    /// In high throughput: share of the entries that select no expert.
    #[arg(long, default_value_t = 0.0, value_parser = parse_share, help_heading = SIZES)]
    pub masked: f64,
    /// Also measure replays of CUDA graphs: one graph for each phase, and one for cached dispatch +
    /// combine in pool. Each replay is timed by itself between two events, with devices aligned
    /// before it. It is timed with L2 as the replay before left it, and with L2 emptied. CHAIN
    /// replays one after the other are timed between two events, and the time is divided by CHAIN
    /// [default without =CHAIN: 128]. The slowest rank of each iteration counts. With --mode
    /// low-latency nothing but graphs is measured, and CHAIN is the number of pairs in one graph
    /// [default: 128; on the virtual GPU 2].
    #[arg(long, value_name = "CHAIN", num_args = 0..=1, require_equals = true, default_missing_value = "128",
        value_parser = clap::value_parser!(u32).range(1..), help_heading = TIMING)]
    pub graph: Option<u32>,
    /// Leave the links' own ceiling out.
    #[arg(long, help_heading = TIMING)]
    pub no_ceiling: bool,
    /// MiB written between iterations to empty the L2 cache; on the virtual GPU nothing is.
    #[arg(long, default_value_t = DEFAULT_FLUSH_MIB, help_heading = TIMING)]
    pub flush_mib: u64,
    /// With --mode low-latency: tokens of a rank that are published as complete together.
    #[arg(long, value_name = "C", value_parser = clap::value_parser!(u32).range(1..), default_value_t = Options::DEFAULT_CHUNK_TOKENS, help_heading = LOW)]
    pub chunk_tokens: u32,
    /// With --mode low-latency: most tokens of a rank whose rows return as packets instead of with
    /// a word for each chunk; 0 for none [default: 128 for 2 ranks, 64 for 3, 42 for 4, else 32].
    #[arg(long, value_name = "N", help_heading = LOW)]
    pub packet_tokens: Option<u32>,
    /// With --mode low-latency: most tokens of a rank that the buffer is made for, as a server has
    /// one buffer for batches of any size [default: --tokens].
    #[arg(long, value_name = "N", help_heading = LOW)]
    pub max_tokens: Option<u32>,
    /// With --mode low-latency: put a kernel of so many microseconds on all multiprocessors behind
    /// each call of a chain of pairs, as a model's experts and next layer are. It displaces the
    /// calls' instructions from caches. Its own time is taken off the pairs'.
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u32).range(1..=1_000_000), help_heading = LOW)]
    pub between_us: Option<u32>,
    /// Launch shapes.
    #[command(flatten)]
    pub tuning: TuningFlags,
}

/// Rows that a low-latency combine takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ReturnPathFlag {
    /// One for each token and expert.
    ByExpert,
    /// One for each token and rank, summed already.
    ByRow,
    /// The same, in the pool: within a node.
    InPool,
}

impl ReturnPathFlag {
    /// As a plan has it.
    fn rows(self) -> ReturnPath {
        match self {
            ReturnPathFlag::ByExpert => ReturnPath::ByExpert,
            ReturnPathFlag::ByRow => ReturnPath::ByRow,
            ReturnPathFlag::InPool => ReturnPath::InPool,
        }
    }
}

/// Launch shapes that were asked for; the library's own where not.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct TuningFlags {
    /// Warps per block in dispatch; rows by expert have three more, short ones of many blocks one.
    #[arg(long, help_heading = SHAPES)]
    pub dispatch_warps: Option<u32>,
    /// Warps per block that send metadata, in dispatch within one node.
    #[arg(long, help_heading = SHAPES)]
    pub dispatch_metadata_warps: Option<u32>,
    /// Warps per block that copy received rows, in dispatch of rows by expert.
    #[arg(long, help_heading = SHAPES)]
    pub dispatch_copy_warps: Option<u32>,
    /// Most stages per warp in dispatch.
    #[arg(long, help_heading = SHAPES)]
    pub dispatch_stages: Option<u32>,
    /// Largest stage in dispatch, in bytes.
    #[arg(long, help_heading = SHAPES)]
    pub dispatch_stage_bytes: Option<u32>,
    /// Warps per block in combine.
    #[arg(long, help_heading = SHAPES)]
    pub combine_warps: Option<u32>,
    /// Most slots per warp in combine.
    #[arg(long, help_heading = SHAPES)]
    pub combine_slots: Option<u32>,
    /// Largest slot in combine, in bytes.
    #[arg(long, help_heading = SHAPES)]
    pub combine_slot_bytes: Option<u32>,
    /// Blocks that copy rows into the pool during a combine of a tensor.
    #[arg(long, help_heading = SHAPES)]
    pub combine_stagers: Option<u32>,
}

impl Args {
    /// The plans that the flags and the environment give: one for each number of tokens.
    pub fn plans(&self) -> Result<Vec<Plan>> {
        let baseline = self.baseline.map(|BaselineName::Nccl| Baseline::Nccl);
        if baseline.is_some() && self.sizes.is_low_latency() {
            let remedy = "leave the mode out: low latency is measured then, too";
            return Err(CommandError::usage(format!("--baseline: not with --mode low-latency; {remedy}")));
        }
        let plans = self.sizes.plans()?.into_iter();
        Ok(plans.map(|plan| Plan { repeat: self.repeat, baseline, ..plan }).collect())
    }

    /// The plan of a sweep for these nodes and ranks, with the defaults for them.
    pub fn plan_on(&self, nodes: u32, ranks_per_node: u32) -> Result<Plan> {
        let sizes = &self.sizes;
        // High throughput follows the number of nodes.
        let mode = sizes.place.mode.filter(|mode| *mode == Mode::LowLatency);
        let (nodes, ranks_per_node) = (Some(nodes), Some(ranks_per_node));
        let place = WorldFlags { mode, nodes, ranks_per_node, ..sizes.place };
        let plan = PlanFlags { place, ..sizes.clone() }.plan()?;
        let baseline = self.baseline.map(|BaselineName::Nccl| Baseline::Nccl);
        Ok(Plan { repeat: self.repeat, baseline, ..plan })
    }
}

impl PlanFlags {
    /// Whether low latency is asked for.
    pub fn is_low_latency(&self) -> bool {
        self.place.mode == Some(Mode::LowLatency)
    }

    /// A plan for each number of tokens: where none is given, low latency is measured with many.
    pub fn plans(&self) -> Result<Vec<Plan>> {
        let plan = self.plan()?;
        let most = match self.device {
            _ if self.tokens.is_some() || !self.is_low_latency() => plan.tokens,
            DeviceKind::Virtual => 8,
            DeviceKind::Cuda => 1024,
        };
        let most = most.min(self.max_tokens.unwrap_or(most)).max(plan.tokens);
        let ladder = std::iter::successors(Some(plan.tokens), |tokens| tokens.checked_mul(2));
        let of = |tokens| Plan { tokens, ..plan.clone() };
        // No tokens stay no tokens, which is an error of its own.
        Ok(ladder.take_while(|&tokens| tokens <= most).take(11).map(of).collect())
    }

    /// The plan that the flags and the environment give, for one run and the least number of
    /// tokens.
    pub fn plan(&self) -> Result<Plan> {
        let is_low_latency = self.is_low_latency();
        for (flag, is_given, more) in [
            ("--combine-dtype", self.combine_dtype != RowType::Bf16, "; otherwise a combine is bf16"),
            ("--combine-rows", self.combine_rows != ReturnPathFlag::ByExpert, ""),
            ("--chunk-tokens", self.chunk_tokens != Options::DEFAULT_CHUNK_TOKENS, ""),
            ("--packet-tokens", self.packet_tokens.is_some(), ""),
            ("--max-tokens", self.max_tokens.is_some(), ""),
            ("--between-us", self.between_us.is_some(), ""),
        ] {
            if is_given && !is_low_latency {
                return Err(CommandError::usage(format!("{flag}: only with --mode low-latency{more}")));
            }
        }
        let tuning = self.tuning;
        // A variable may be set for measurements of both modes.
        let has_rdma_send = self.rdma_send != DEFAULT_RDMA_SEND && std::env::var_os(RDMA_SEND).is_none();
        for (flag, is_given) in [
            ("--queues", self.network.queues.is_some()),
            ("--rdma-send", has_rdma_send),
            ("--nvl-bytes", self.nvl_bytes.is_some()),
            ("--rdma-bytes", self.rdma_bytes.is_some()),
            ("--flush-mib", self.flush_mib != DEFAULT_FLUSH_MIB),
            ("--dispatch-warps", tuning.dispatch_warps.is_some()),
            ("--dispatch-metadata-warps", tuning.dispatch_metadata_warps.is_some()),
            ("--dispatch-copy-warps", tuning.dispatch_copy_warps.is_some()),
            ("--dispatch-stages", tuning.dispatch_stages.is_some()),
            ("--dispatch-stage-bytes", tuning.dispatch_stage_bytes.is_some()),
            ("--combine-warps", tuning.combine_warps.is_some()),
            ("--combine-slots", tuning.combine_slots.is_some()),
            ("--combine-slot-bytes", tuning.combine_slot_bytes.is_some()),
            ("--combine-stagers", tuning.combine_stagers.is_some()),
        ] {
            if is_given && is_low_latency {
                let rule = "not with --mode low-latency, which does not use it; leave it out";
                return Err(CommandError::usage(format!("{flag}: {rule}")));
            }
        }
        match self.dtype {
            _ if self.quantise && is_low_latency => {
                return Err(CommandError::usage(NO_QUANTISE_IN_LOW_LATENCY));
            }
            RowType::Bf16 if self.quantise => {
                return Err(CommandError::usage("--quantise: give --dtype fp8 or mxfp8, which rows become"));
            }
            RowType::Mxfp8 if !self.quantise && !is_low_latency => {
                let rule = "--dtype mxfp8: only with --quantise or --mode low-latency, which convert rows on their way";
                return Err(CommandError::usage(rule));
            }
            RowType::Mxfp8 if self.quantise && self.rows_by_expert.is_some() => {
                let rule = "--rows-by-expert: the sort that is measured beside it copies f32 scales: not with --dtype mxfp8";
                return Err(CommandError::usage(rule));
            }
            _ => {}
        }
        if self.combine_dtype == RowType::Mxfp8 {
            return Err(CommandError::usage("--combine-dtype mxfp8: a combine returns bf16 or fp8"));
        }
        if self.num_sms.contains(&0) {
            return Err(CommandError::usage("--num-sms 0: must be at least 1"));
        }
        let mode = if is_low_latency { Mode::LowLatency } else { Mode::Intranode };
        let topology = self.place.topology(mode, super::launched()?)?;
        let defaults = Defaults::of(self.device, topology.ranks());
        let num_sms = match (self.num_sms.is_empty(), is_low_latency, self.device) {
            (false, ..) => self.num_sms.clone(),
            // All of a GPU's; of an interpreter's, each costs as much as it does work.
            (true, true, DeviceKind::Cuda) => vec![Plan::ALL_SMS],
            (true, true, DeviceKind::Virtual) => vec![defaults.num_sms],
            (true, false, _) => {
                sms_of_environment(topology.nodes > 1, defaults.num_sms, |name| std::env::var(name).ok())?
            }
        };
        let chain = if self.device == DeviceKind::Virtual { 2 } else { 128 };
        Ok(Plan {
            low_latency: is_low_latency.then(|| LowLatencySettings {
                quantise: self.dtype.quantise(),
                combine_dtype: self.combine_dtype.dtype(),
                combine_rows: self.combine_rows.rows(),
                chunk_tokens: self.chunk_tokens,
                packet_tokens: self
                    .packet_tokens
                    .unwrap_or_else(|| Options::default_packet_tokens(topology.ranks())),
                max_tokens: self.max_tokens,
                between_us: self.between_us,
            }),
            topology,
            keep_nodes: self.place.keep_nodes,
            is_virtual: self.device == DeviceKind::Virtual,
            transport: self.network.transport,
            queues: self.network.queues(self.device),
            connections: self.network.connections,
            tokens: self.tokens.unwrap_or(if is_low_latency { 1 } else { defaults.tokens }),
            hidden: self.hidden.unwrap_or(defaults.hidden),
            experts: self.experts.unwrap_or(defaults.experts),
            topk: self.topk.unwrap_or(TOPK),
            dtype: self.dtype.dtype(),
            quantise: if self.quantise { self.dtype.quantise() } else { Quantise::None },
            rows_by_expert: self.rows_by_expert,
            num_sms,
            rdma_send: self.rdma_send,
            rdma_recv: self.rdma_recv,
            nvl_send: self.nvl_send,
            nvl_recv: self.nvl_recv,
            nvl_bytes: self.nvl_bytes,
            rdma_bytes: self.rdma_bytes,
            warmup: self.warmup.unwrap_or(defaults.warmup),
            iters: self.iters.unwrap_or(defaults.iters),
            repeat: 1,
            effort: Effort::Whole,
            ptx: None,
            seed: self.seed,
            masked: self.masked,
            graph: self.graph.or(is_low_latency.then_some(chain)),
            baseline: None,
            no_ceiling: self.no_ceiling,
            flush_mib: self.flush_mib,
            shapes: Shapes {
                dispatch_warps: tuning.dispatch_warps,
                dispatch_metadata_warps: tuning.dispatch_metadata_warps,
                dispatch_copy_warps: tuning.dispatch_copy_warps,
                dispatch_stages: tuning.dispatch_stages,
                dispatch_stage_bytes: tuning.dispatch_stage_bytes,
                combine_warps: tuning.combine_warps,
                combine_slots: tuning.combine_slots,
                combine_slot_bytes: tuning.combine_slot_bytes,
                combine_stagers: tuning.combine_stagers,
            },
            ids: None,
        })
    }

    /// Whether any size is the command's own choice.
    pub fn leaves_sizes_open(&self) -> bool {
        self.tokens.is_none() || self.hidden.is_none()
    }
}

/// The flags of these plans, independent of the defaults and the environment of the program that
/// parses them, which may be an older version. Such a program itself chooses the plans of several
/// numbers of tokens.
pub fn flags_of(plans: &[Plan]) -> Vec<String> {
    let Some(plan) = plans.first() else { return Vec::new() };
    let mut flags: Vec<String> = Vec::new();
    let mut flag = |name: &str, value: String| flags.push(format!("--{name}={value}"));
    let device = if plan.is_virtual { "virtual" } else { "cuda" };
    flag("device", device.into());
    flag("mode", plan.mode().into());
    flag("nodes", plan.topology.nodes.to_string());
    flag("ranks-per-node", plan.topology.ranks_per_node.to_string());
    flag("transport", plan.transport.to_string());
    if plans.len() == 1 {
        flag("tokens", plan.tokens.to_string());
    }
    flag("hidden", plan.hidden.to_string());
    flag("experts", plan.experts.to_string());
    flag("topk", plan.topk.to_string());
    flag("dtype", plan.dtype_name().into());
    if !plan.num_sms.contains(&Plan::ALL_SMS) {
        flag("num-sms", plan.num_sms.iter().map(u32::to_string).collect::<Vec<_>>().join(","));
    }
    flag("warmup", plan.warmup.to_string());
    flag("iters", plan.iters.to_string());
    flag("seed", plan.seed.to_string());
    if let Some(chain) = plan.graph {
        flag("graph", chain.to_string());
    }
    if let Some(alignment) = plan.rows_by_expert {
        flag("rows-by-expert", alignment.to_string());
    }
    if let Some(connections) = plan.connections {
        flag("connections", connections.to_string());
    }
    if let Some(low) = &plan.low_latency {
        flag("combine-dtype", row_type(low.combine_dtype));
        flag("combine-rows", low.combine_rows.text().into());
        flag("chunk-tokens", low.chunk_tokens.to_string());
        flag("packet-tokens", low.packet_tokens.to_string());
        if let Some(most) = low.max_tokens {
            flag("max-tokens", most.to_string());
        }
        if let Some(us) = low.between_us {
            flag("between-us", us.to_string());
        }
        if plan.keep_nodes {
            flags.push("--keep-nodes".into());
        }
        return flags;
    }
    flag("queues", plan.queues.to_string());
    flag("rdma-send", plan.rdma_send.to_string());
    flag("rdma-recv", plan.rdma_recv.to_string());
    flag("nvl-send", plan.nvl_send.to_string());
    flag("nvl-recv", plan.nvl_recv.to_string());
    flag("masked", plan.masked.to_string());
    flag("flush-mib", plan.flush_mib.to_string());
    let shapes = &plan.shapes;
    let optional = [
        ("nvl-bytes", plan.nvl_bytes),
        ("rdma-bytes", plan.rdma_bytes),
        ("dispatch-warps", shapes.dispatch_warps.map(u64::from)),
        ("dispatch-metadata-warps", shapes.dispatch_metadata_warps.map(u64::from)),
        ("dispatch-copy-warps", shapes.dispatch_copy_warps.map(u64::from)),
        ("dispatch-stages", shapes.dispatch_stages.map(u64::from)),
        ("dispatch-stage-bytes", shapes.dispatch_stage_bytes.map(u64::from)),
        ("combine-warps", shapes.combine_warps.map(u64::from)),
        ("combine-slots", shapes.combine_slots.map(u64::from)),
        ("combine-slot-bytes", shapes.combine_slot_bytes.map(u64::from)),
        ("combine-stagers", shapes.combine_stagers.map(u64::from)),
    ];
    for (name, value) in optional {
        if let Some(value) = value {
            flag(name, value.to_string());
        }
    }
    if plan.keep_nodes {
        flags.push("--keep-nodes".into());
    }
    if plan.quantise != Quantise::None {
        flags.push("--quantise".into());
    }
    if plan.no_ceiling {
        flags.push("--no-ceiling".into());
    }
    flags
}

fn row_type(dtype: DType) -> String {
    if dtype == DType::Bf16 { "bf16" } else { "fp8" }.into()
}

/// Multiprocessors where no flag gives them: `EPOXIDE_NSM` across nodes, else `EPOXIDE_NUM_SMS`,
/// both comma-separated.
fn sms_of_environment(
    across: bool,
    default: u32,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Vec<u32>> {
    let names = if across { &["EPOXIDE_NSM", "EPOXIDE_NUM_SMS"][..] } else { &["EPOXIDE_NUM_SMS"] };
    let Some((name, text)) = names.iter().find_map(|name| Some((name, variable(name)?))) else {
        return Ok(vec![default]);
    };
    let values = text.split(',').map(|part| part.trim().parse::<u32>());
    values.collect::<std::result::Result<_, _>>().map_err(|error| {
        CommandError::usage(format!("{name}={text}: {error}; give even numbers, such as 16,24"))
    })
}

fn parse_share(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("must be 0 to 1".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::parse;
    use super::*;
    use crate::testing;

    #[test]
    fn multiprocessors_come_from_the_environment_where_no_flag_gives_them() {
        let variable = |name: &str| match name {
            "EPOXIDE_NSM" => Some("8, 16".to_owned()),
            "EPOXIDE_NUM_SMS" => Some("4".to_owned()),
            _ => None,
        };
        assert_eq!(sms_of_environment(true, 24, variable).unwrap(), [8, 16]);
        assert_eq!(sms_of_environment(false, 24, variable).unwrap(), [4]);
        assert_eq!(sms_of_environment(true, 24, |_| None).unwrap(), [24]);
        let error = sms_of_environment(true, 24, |_| Some("many".into())).unwrap_err();
        assert!(error.message.unwrap().contains("EPOXIDE_NSM=many"));
    }

    #[test]
    fn help_has_headings() {
        use clap::Args as _;
        let command = Args::augment_args(clap::Command::new("bench"));
        let without = command.get_arguments().filter(|arg| arg.get_help_heading().is_none());
        assert_eq!(without.map(clap::Arg::get_id).collect::<Vec<_>>(), Vec::<&clap::Id>::new());
        let heading = |id: &str| {
            command.get_arguments().find(|arg| arg.get_id() == id).and_then(clap::Arg::get_help_heading)
        };
        for (id, expected) in [("nodes", RANKS), ("tokens", SIZES), ("iters", TIMING), ("csv", OUTPUT)] {
            assert_eq!(heading(id), Some(expected), "{id}");
        }
    }

    #[test]
    fn sizes_suit_the_device() {
        let of = |line: &str| parse(line).unwrap().sizes.plan().unwrap();
        let sizes =
            |plan: &Plan| (plan.tokens, plan.hidden, plan.experts, plan.topk, plan.num_sms[0], plan.iters);
        assert_eq!(sizes(&of("bench --device cuda")), (4096, 7168, 256, 8, 24, 20));
        assert_eq!(sizes(&of("bench")), (64, 1024, 64, 8, 8, 10));
        assert_eq!(sizes(&of("bench --ranks-per-node 3 --tokens 7")), (7, 1024, 24, 8, 8, 10));
        for line in ["bench", "bench --ranks-per-node 1", "bench --nodes 3 --ranks-per-node 5"] {
            of(line).check().unwrap();
        }
    }

    #[test]
    fn flags_of_a_plan_come_to_that_plan() {
        for line in [
            "bench",
            "bench --device cuda --dtype fp8 --num-sms 4,8 --no-ceiling --graph=3 --combine-warps 2 --seed 5",
            "bench --nodes 2 --ranks-per-node 3 --transport shm --queues 2 --connections 3 --masked 0.25 --nvl-bytes 5 --combine-stagers 1",
            "bench --mode low-latency",
            "bench --mode low-latency --device cuda --dtype fp8 --combine-dtype fp8 --combine-rows by-row --num-sms 4 --graph=3 --seed 5",
            "bench --mode low-latency --rows-by-expert 64",
            "bench --mode low-latency --dtype mxfp8",
            "bench --mode low-latency --nodes 2 --transport direct --keep-nodes",
            "bench --device cuda --dtype fp8 --rows-by-expert 128",
            "bench --device cuda --dtype mxfp8 --quantise",
            "bench --mode low-latency --nodes 2 --ranks-per-node 3 --transport shm --tokens 5 --chunk-tokens 2 --packet-tokens 0",
        ] {
            let plans = parse(line).unwrap().plans().unwrap();
            let words = ["bench".to_owned()].into_iter().chain(flags_of(&plans));
            let again: Args = testing::parse(words).unwrap();
            assert_eq!(format!("{:?}", again.plans().unwrap()), format!("{plans:?}"));
        }
    }
}

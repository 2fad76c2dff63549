//! Flags that several commands share, those of `roundtrip`, and their resolution for a number of
//! ranks.

use std::time::Duration;

use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use epoxide::DType;
use epoxide::driver::virt::{CheckConfig, Checker, VirtConfig};
use epoxide::internal::Schedule;
pub use epoxide::internal::Topology;
use epoxide::internal::driver::Hooks;
use epoxide::low_latency::Quantise;
use epoxide::throughput::{Config, Options, Shape};
use epoxide::transport::{MAX_CONNECTIONS, MAX_QUEUES, TransportKind, TransportOptions};
use epoxide_gpu::layout::{FEW_RANKS, MAX_NODES, MAX_RANKS};
use epoxide_testing::payload::{ELEMENTS_PER_SCALE, Format};
use epoxide_testing::roundtrip::Cases;
use epoxide_testing::sizes::Sizes;
use serde::{Serialize, Serializer};

use crate::error::{CommandError, Result};

/// How tokens travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// High throughput within one node.
    Intranode,
    /// High throughput across nodes.
    Internode,
    /// Low latency.
    LowLatency,
}

impl Mode {
    /// The name as a value of `--mode`.
    pub fn name(self) -> String {
        name_of(self)
    }
}

/// The name of a flag's value.
fn name_of(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Element type of the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RowType {
    /// 16-bit brain float.
    Bf16,
    /// 8-bit float (e4m3) with one f32 scale per 128 elements; combine returns bf16.
    Fp8,
    /// 8-bit float (e4m3) with one UE8M0 scale per 32 elements, of rows that are quantised on their
    /// way; combine returns bf16.
    Mxfp8,
}

impl RowType {
    /// The dtype of dispatched rows.
    pub fn dtype(self) -> DType {
        match self {
            RowType::Bf16 => DType::Bf16,
            RowType::Fp8 | RowType::Mxfp8 => DType::Fp8E4m3,
        }
    }

    /// The conversion of bf16 rows to this type when they are sent.
    pub fn quantise(self) -> Quantise {
        match self {
            RowType::Bf16 => Quantise::None,
            RowType::Fp8 => Quantise::Fp8,
            RowType::Mxfp8 => Quantise::Mxfp8,
        }
    }

    /// Words of scales per token.
    pub fn num_scales(self, hidden: u64) -> u64 {
        match self {
            RowType::Bf16 => 0,
            RowType::Fp8 | RowType::Mxfp8 => hidden.div_ceil(ELEMENTS_PER_SCALE),
        }
    }
}

/// How the rows of a round trip are encoded, and what travels with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RowFormat {
    /// 16-bit brain float.
    Bf16,
    /// 16-bit float.
    F16,
    /// 32-bit float.
    F32,
    /// 8-bit float (e4m3) with one f32 scale per 128 elements.
    Fp8,
    /// 8-bit float (e5m2) with one f32 scale per 128 elements.
    Fp8E5m2,
    /// 8-bit float (e4m3) with one UE8M0 scale per 128 elements, four to an i32.
    Fp8Ue8m0,
    /// 8-bit float (e4m3) with one UE8M0 scale per 32 elements.
    Mxfp8,
    /// 4-bit float (e2m1) with one e4m3 scale per 16 elements, and one f32 scale.
    Nvfp4,
}

impl RowFormat {
    /// The row format of test cases.
    pub fn format(self) -> Format {
        match self {
            RowFormat::Bf16 => Format::Bf16,
            RowFormat::F16 => Format::F16,
            RowFormat::F32 => Format::F32,
            RowFormat::Fp8 => Format::Fp8,
            RowFormat::Fp8E5m2 => Format::Fp8E5m2,
            RowFormat::Fp8Ue8m0 => Format::Fp8Ue8m0,
            RowFormat::Mxfp8 => Format::Mxfp8,
            RowFormat::Nvfp4 => Format::Nvfp4,
        }
    }

    /// The name on the command line.
    pub fn name(self) -> String {
        name_of(self)
    }
}

/// Why low latency takes no `--quantise`.
pub const NO_QUANTISE_IN_LOW_LATENCY: &str =
    "--quantise: --mode low-latency converts rows by --dtype alone: leave it out";

/// Which GPUs to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The virtual GPU: runs the shipped PTX on the processor.
    Virtual,
    /// NVIDIA GPUs: rank r of a host uses GPU r.
    Cuda,
}

/// The transports, with `--help`'s text for each.
fn transports() -> impl TypedValueParser<Value = TransportKind> {
    let values = [
        ("auto", "Direct to the ranks whose memory can be mapped, tcp to the others"),
        ("direct", "Kernels write to mapped memory: one host, or one NVLink domain"),
        ("shm", "Shared host memory of one host"),
        ("tcp", "Any network, between host memories"),
        ("verbs", "RDMA: InfiniBand or RoCE, as the EPOXIDE_RDMA_* variables say"),
    ];
    let values = values.map(|(name, help)| PossibleValue::new(name).help(help));
    PossibleValuesParser::new(values).try_map(|name| name.parse())
}

/// Findings of check mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Check {
    /// Data races, reads of unwritten memory.
    Races,
    /// Wrong results of weak memory: loads sometimes see older values, where the memory model lets
    /// them.
    Weak,
}

/// How the virtual GPU runs kernels.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct VirtualFlags {
    /// Run kernels in check mode, slowly: report data races and reads of unwritten memory. With
    /// --check=weak, let weak memory show as wrong results instead. The ranks are threads of this
    /// process, and the schedule is drawn from the seed (0 in `inspect`)
    #[arg(long, value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "races", value_name = "WHAT")]
    pub check: Option<Check>,

    /// Draw the order of warps from the seed: any warp next
    #[arg(long, conflicts_with = "preemptions")]
    pub random_schedule: bool,

    /// Draw the order of warps from the seed: the most urgent one runs, and loses its urgency at so
    /// many points
    #[arg(long, value_name = "D")]
    pub preemptions: Option<u32>,
}

impl VirtualFlags {
    /// The checker of all devices of a run.
    pub fn checker(&self, seed: u64) -> Option<Checker> {
        let config = match self.check? {
            Check::Races => CheckConfig::default(),
            Check::Weak => CheckConfig { races: false, weak_memory: Some(seed), ..CheckConfig::default() },
        };
        Some(Checker::new(config))
    }

    /// Configuration of a rank's virtual GPU.
    pub fn device(&self, ordinal: u32, seed: u64, checker: Option<&Checker>) -> VirtConfig {
        let schedule = self.preemptions.map_or(Schedule::Random, Schedule::Preemptions);
        let seeded = self.check.is_some() || self.random_schedule || self.preemptions.is_some();
        let schedule_seed = seeded.then_some(seed);
        let hooks = Hooks { schedule, ..Hooks::default() };
        VirtConfig { ordinal, schedule_seed, hooks, checker: checker.cloned(), ..VirtConfig::default() }
    }
}

/// The default number of nodes in modes across nodes.
const DEFAULT_NODES: u32 = 2;

/// How many ranks there are, as asked for.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct WorldFlags {
    /// How tokens travel [default: intranode with --nodes 1, internode with more; without --nodes,
    /// internode in `roundtrip` and intranode in `bench`]
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,

    /// Nodes; several may be on one host [default: 2 internode, 1 intranode]
    #[arg(long, value_name = "N")]
    pub nodes: Option<u32>,

    /// Ranks of a node, one GPU each [default: 8; where WORLD_SIZE is set, as many as that leaves]
    #[arg(long, value_name = "P")]
    pub ranks_per_node: Option<u32>,

    /// Keep nodes apart though all ranks can map each other's memory: sums are rounded for each
    /// node, as over tcp or verbs. Without, such ranks are one node
    #[arg(long)]
    pub keep_nodes: bool,
}

/// The network between nodes.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct NetworkFlags {
    /// How bytes cross nodes; of no effect on one node
    #[arg(long, value_parser = transports(), default_value = "auto")]
    pub transport: TransportKind,

    /// Queues to each peer on another node, where there are any [default: 8 over shm and tcp on
    /// GPUs, else 1]
    #[arg(long, value_name = "Q", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_QUEUES)))]
    pub queues: Option<u32>,

    /// Connections of each queue over tcp [default: up to 4, by the processors of a rank]
    #[arg(long, value_name = "C", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_CONNECTIONS)))]
    pub connections: Option<u32>,
}

impl NetworkFlags {
    /// Queues to each peer, if to any.
    pub fn queues(&self, device: DeviceKind) -> u32 {
        // With a virtual GPU all threads compete for the same processors.
        let default = match device {
            DeviceKind::Virtual => 1,
            DeviceKind::Cuda => TransportOptions::new(self.transport).queues_per_peer,
        };
        self.queues.unwrap_or(default)
    }

    /// The options in the library's form; `timeout` bounds a put.
    pub fn options(&self, device: DeviceKind, timeout: Duration) -> TransportOptions {
        TransportOptions {
            queues_per_peer: self.queues(device),
            connections_per_queue: self.connections,
            timeout,
            ..TransportOptions::new(self.transport)
        }
    }
}

impl WorldFlags {
    /// Number and places of the ranks: from the flags. In a group of another launcher, its size and
    /// the number of its ranks on this host.
    pub fn topology(&self, default: Mode, group: Option<(u32, Option<u32>)>) -> Result<Topology> {
        let usage = |flag: &str, value: u32, rule: String| {
            Err(CommandError::usage(format!("{flag} {value}: {rule}")))
        };
        match (self.mode, self.nodes) {
            (Some(Mode::Intranode), Some(nodes)) if nodes != 1 => {
                return usage("--nodes", nodes, "--mode intranode has one node".into());
            }
            (Some(Mode::Internode), Some(1)) | (_, Some(0)) => {
                let nodes = self.nodes.unwrap_or(0);
                return usage("--nodes", nodes, "must be at least 2, or 1 with --mode intranode".into());
            }
            _ => {}
        }
        let one_node = match (self.mode, self.nodes) {
            (Some(Mode::LowLatency), nodes) => nodes.is_none_or(|nodes| nodes == 1),
            (Some(mode), _) => mode != Mode::Internode,
            (None, Some(nodes)) => nodes == 1,
            // A group that cannot be cut in two is one node.
            (None, None) => {
                default != Mode::Internode
                    || group.is_some_and(|(size, _)| {
                        self.ranks_per_node.map_or(size % 2 != 0, |asked| asked == size)
                    })
            }
        };
        let (nodes, ranks_per_node) = match group {
            None => {
                let nodes = if one_node { 1 } else { self.nodes.unwrap_or(DEFAULT_NODES) };
                (nodes, self.ranks_per_node.unwrap_or(FEW_RANKS as u32))
            }
            Some((size, local)) => {
                let on_host = local.filter(|local| *local < size && *local > 0 && size % local == 0);
                let nodes = match (one_node, self.nodes, self.ranks_per_node) {
                    (true, ..) => 1,
                    (_, Some(nodes), _) => nodes,
                    (_, _, Some(asked)) if asked > 0 && size % asked == 0 => size / asked,
                    (_, _, Some(asked)) => {
                        let rule = format!("the environment's WORLD_SIZE, {size}, is not a multiple of it");
                        return usage("--ranks-per-node", asked, rule);
                    }
                    _ => on_host.map_or(DEFAULT_NODES, |local| size / local),
                };
                if size % nodes != 0 {
                    let rule = format!("the environment's WORLD_SIZE, {size}, is not a multiple of it");
                    return usage("--nodes", nodes, rule);
                }
                if let Some(asked) =
                    self.ranks_per_node.filter(|asked| asked.checked_mul(nodes) != Some(size))
                {
                    let rule = format!(
                        "with {nodes} node(s) that is not the environment's WORLD_SIZE, {size}; leave the flag out or make them \
                         equal"
                    );
                    return usage("--ranks-per-node", asked, rule);
                }
                (nodes, size / nodes)
            }
        };
        let most = if nodes == 1 { MAX_RANKS } else { FEW_RANKS };
        if ranks_per_node == 0 || ranks_per_node > most as u32 {
            let rule = format!("must be 1 to {FEW_RANKS}, on one node up to {MAX_RANKS}");
            return usage("--ranks-per-node", ranks_per_node, rule);
        }
        if nodes > MAX_NODES as u32 {
            return usage("--nodes", nodes, format!("must be 1 to {MAX_NODES}"));
        }
        Ok(Topology { nodes, ranks_per_node })
    }
}

/// The flags of `roundtrip`.
#[derive(Debug, Clone, clap::Args)]
pub struct RoundTripFlags {
    #[command(flatten)]
    pub place: WorldFlags,

    /// Tokens of each rank [default: 128, with --check 32]
    #[arg(long, value_name = "T")]
    pub tokens: Option<u32>,

    /// Elements of a row [default: 1024, with --check 256]
    #[arg(long, value_name = "H")]
    pub hidden: Option<u64>,

    /// Experts of all ranks [default: 4 per rank]
    #[arg(long, value_name = "E")]
    pub experts: Option<u32>,

    /// Experts that a token selects [default: 4, or the number of ranks where that is less]
    #[arg(long, value_name = "K")]
    pub topk: Option<u32>,

    /// Element type of the dispatched rows, and what travels with them; combine returns bf16. Low
    /// latency has bf16, fp8 and mxfp8, and converts rows on their way
    #[arg(long, value_enum, default_value = "bf16")]
    pub dtype: RowFormat,

    /// With --dtype fp8 or mxfp8 in high throughput: dispatch takes rows of bf16, and converts them
    /// on their way
    #[arg(long)]
    pub quantise: bool,

    /// Which GPUs to use
    #[arg(long, value_enum, default_value = "virtual")]
    pub device: DeviceKind,

    #[command(flatten)]
    pub network: NetworkFlags,

    #[command(flatten)]
    pub virtual_gpu: VirtualFlags,

    /// Seed of all random data, decimal or 0x..
    #[arg(long, value_parser = parse_seed, default_value = "0xA1B2")]
    pub seed: u64,

    /// Multiprocessors for dispatch and for combine, an even number [default: 20 on one node, 152 on
    /// several, with --check 8]
    #[arg(long, value_name = "S")]
    pub num_sms: Option<u32>,

    /// Run every rank as a process of its own [default with --device cuda, and on several nodes]
    #[arg(long, conflicts_with_all = ["threads", "check"])]
    pub processes: bool,

    /// Run the ranks as threads of this process [default on one node of virtual GPUs, and with
    /// --check]
    #[arg(long)]
    pub threads: bool,

    /// Longest wait for another rank [default: 60, and 600 with --check]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub timeout: Option<u64>,

    /// Print one JSON object instead of lines
    #[arg(long)]
    pub json: bool,
}

/// Sizes that neither flags nor the number of ranks determine.
#[derive(Debug, Clone, Copy)]
pub struct Defaults {
    /// How tokens travel.
    pub mode: Mode,
    /// Tokens of each rank.
    pub tokens: u32,
    /// Elements of a row.
    pub hidden: u64,
    /// Multiprocessors; missing: those of the test that the round trip is taken from.
    pub num_sms: Option<u32>,
}

/// Checked and complete values of the flags.
#[derive(Debug, Clone, Serialize)]
pub struct Settings {
    /// How tokens travel.
    pub mode: Mode,
    /// Nodes.
    pub nodes: u32,
    /// Whether they are kept apart though all ranks can map each other's memory.
    pub keep_nodes: bool,
    /// Ranks of all nodes.
    pub ranks: u32,
    /// Most tokens of any rank.
    pub tokens: u32,
    /// Most elements of a row.
    pub hidden: u64,
    /// Experts of all ranks.
    pub experts: u32,
    /// Experts per token.
    pub topk: u32,
    /// Element type of the dispatched rows, and what travels with them.
    pub dtype: RowFormat,
    /// Whether rows are given as bf16, and are converted on their way; low latency does it anyway.
    pub quantise: bool,
    /// Which GPUs.
    pub device: DeviceKind,
    /// How bytes cross nodes.
    #[serde(serialize_with = "by_name")]
    pub transport: TransportKind,
    /// Queues to each peer on another node.
    pub queues: u32,
    /// Connections of each queue over tcp, if given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connections: Option<u32>,
    /// Seed of all random data.
    pub seed: u64,
    /// Multiprocessors for dispatch and for combine.
    pub num_sms: u32,
    /// Longest wait for another rank, in seconds.
    pub timeout: u64,
    /// The sizes among the fields above.
    #[serde(skip)]
    pub sizes: Sizes,
    /// The library's configuration, from `num_sms`.
    #[serde(skip)]
    pub config: Config,
}

fn by_name<S: Serializer>(kind: &TransportKind, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(kind)
}

impl RoundTripFlags {
    /// How many ranks there are, and where.
    pub fn topology(&self, defaults: Defaults, group: Option<(u32, Option<u32>)>) -> Result<Topology> {
        self.place.topology(defaults.mode, group)
    }

    /// How high throughput quantises rows on their way.
    fn quantise(&self) -> Result<Quantise> {
        let rule = match self.dtype {
            _ if !self.quantise => return Ok(Quantise::None),
            _ if self.place.mode == Some(Mode::LowLatency) => NO_QUANTISE_IN_LOW_LATENCY.to_owned(),
            RowFormat::Fp8 => return Ok(Quantise::Fp8),
            RowFormat::Mxfp8 => return Ok(Quantise::Mxfp8),
            other => format!("--quantise: rows become fp8 or mxfp8, give --dtype, which is {}", other.name()),
        };
        Err(CommandError::usage(rule))
    }

    /// Longest wait for another rank.
    pub fn timeout(&self) -> Duration {
        // Checks make kernels up to thirty times slower.
        let default = if self.virtual_gpu.check.is_some() { 600 } else { 60 };
        Duration::from_secs(self.timeout.unwrap_or(default))
    }

    /// The settings that the flags give for these ranks.
    pub fn resolve(&self, topology: Topology, defaults: Defaults) -> Result<Settings> {
        let (ranks, nodes) = (topology.ranks(), topology.nodes);
        let experts = self.experts.unwrap_or(4 * ranks);
        let sizes = Sizes {
            ranks,
            low_latency: self.place.mode == Some(Mode::LowLatency),
            tokens: self.tokens.unwrap_or(defaults.tokens),
            fewest_tokens: 0,
            hidden: self.hidden.unwrap_or(defaults.hidden),
            format: self.dtype.format(),
            quantise: self.quantise()?,
            experts,
            topk: self.topk.unwrap_or(4.min(ranks)),
        };
        if sizes.low_latency && !matches!(self.dtype, RowFormat::Bf16 | RowFormat::Fp8 | RowFormat::Mxfp8) {
            let name = self.dtype.name();
            let rule = format!("--dtype {name}: --mode low-latency has bf16, fp8 and mxfp8");
            return Err(CommandError::usage(rule));
        }
        sizes.check().map_err(CommandError::usage)?;
        let Sizes { tokens, hidden, topk, .. } = sizes;
        let num_sms = self.num_sms.or(defaults.num_sms);
        // Across nodes, the settings of the test that `roundtrip` is taken from.
        let config = match nodes {
            1 => Config::with_sms(num_sms.unwrap_or(20)),
            _ => Config::new(num_sms.unwrap_or(152), 8, 256, 16, 128).map(|config| config.for_nodes(nodes)),
        };
        let config = config.map_err(|error| CommandError::usage(format!("--num-sms: {error}")))?;
        Ok(Settings {
            mode: match self.place.mode {
                Some(Mode::LowLatency) => Mode::LowLatency,
                _ if nodes == 1 => Mode::Intranode,
                _ => Mode::Internode,
            },
            nodes,
            keep_nodes: self.place.keep_nodes,
            ranks,
            tokens,
            hidden,
            experts,
            topk,
            dtype: self.dtype,
            quantise: self.quantise,
            device: self.device,
            transport: self.network.transport,
            queues: self.network.queues(self.device),
            connections: self.network.connections,
            seed: self.seed,
            num_sms: config.num_sms,
            timeout: self.timeout().as_secs(),
            sizes,
            config,
        })
    }
}

impl Settings {
    /// Sizes and seed that cases are drawn from.
    pub fn cases(&self) -> Cases {
        Cases { sizes: self.sizes, nodes: self.nodes, seed: self.seed }
    }

    /// Options of a buffer that can dispatch these rows and combine rows of bf16.
    pub fn buffer_options(&self) -> Options {
        let shape = Shape {
            max_tokens: self.tokens,
            hidden: self.hidden,
            // Rows of f32 are larger than those of bf16 that a combine returns.
            dtype: if self.dtype == RowFormat::F32 { DType::F32 } else { DType::Bf16 },
            max_topk: self.topk,
            max_scales: self.dtype.format().payload(self.hidden).max_scales(),
        };
        let options = Options::new(shape)
            .config(self.config)
            .timeout(Duration::from_secs(self.timeout))
            .ranks_per_node(self.ranks / self.nodes)
            .transport(self.network());
        if self.keep_nodes { options.keep_nodes() } else { options }
    }

    /// The network between nodes.
    pub fn network(&self) -> TransportOptions {
        let (transport, connections) = (self.transport, self.connections);
        let flags = NetworkFlags { transport, queues: Some(self.queues), connections };
        flags.options(self.device, Duration::from_secs(self.timeout))
    }
}

/// A seed, decimal or hexadecimal behind `0x`.
fn parse_seed(text: &str) -> Result<u64, std::num::ParseIntError> {
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    }
}

#[cfg(test)]
mod tests {
    use epoxide::internal::{check_nodes, fields};

    use super::*;
    use crate::testing;

    const DEFAULTS: Defaults = Defaults { mode: Mode::Internode, tokens: 128, hidden: 1024, num_sms: None };

    fn one_node(ranks: u32) -> Topology {
        Topology { nodes: 1, ranks_per_node: ranks }
    }

    fn parse(line: &str) -> RoundTripFlags {
        testing::parse(["epoxide"].into_iter().chain(line.split_whitespace())).unwrap()
    }

    #[test]
    fn defaults_follow_the_number_of_ranks() {
        let settings = parse("").resolve(one_node(8), DEFAULTS).unwrap();
        assert_eq!(
            (settings.ranks, settings.tokens, settings.hidden, settings.experts, settings.topk),
            (8, 128, 1024, 32, 4)
        );
        assert_eq!((settings.seed, settings.config.num_channels()), (0xA1B2, 10));
        let settings = parse("").resolve(one_node(2), DEFAULTS).unwrap();
        assert_eq!((settings.experts, settings.topk), (8, 2));
    }

    #[test]
    fn across_nodes_the_settings_are_those_of_the_original_test() {
        let settings = parse("").resolve(Topology { nodes: 2, ranks_per_node: 8 }, DEFAULTS).unwrap();
        assert_eq!(
            (settings.ranks, settings.experts, settings.topk, settings.mode),
            (16, 64, 4, Mode::Internode)
        );
        assert_eq!(settings.config, Config::new(152, 8, 256, 16, 128).unwrap());
        let settings = parse("").resolve(Topology { nodes: 3, ranks_per_node: 2 }, DEFAULTS).unwrap();
        assert!(check_nodes(&settings.config, 3).is_ok());
        assert_eq!(fields(&mut settings.buffer_options()).ranks_per_node, Some(2));
    }

    #[test]
    fn ranks_are_spread_as_flags_and_group_say() {
        let intranode = Defaults { mode: Mode::Intranode, ..DEFAULTS };
        for (line, defaults, group, nodes, ranks_per_node) in [
            ("", DEFAULTS, None, 2, 8),
            ("", intranode, None, 1, 8),
            ("--mode intranode", DEFAULTS, None, 1, 8),
            ("--mode internode --ranks-per-node 4", intranode, None, 2, 4),
            ("--nodes 3 --ranks-per-node 2", intranode, None, 3, 2),
            ("--nodes 1 --ranks-per-node 2", DEFAULTS, None, 1, 2),
            ("--ranks-per-node 1", DEFAULTS, None, 2, 1),
            ("", DEFAULTS, Some((16, Some(16))), 2, 8),
            ("", DEFAULTS, Some((32, Some(8))), 4, 8),
            ("", DEFAULTS, Some((3, None)), 1, 3),
            ("", intranode, Some((4, None)), 1, 4),
            ("--ranks-per-node 4", DEFAULTS, Some((4, None)), 1, 4),
            ("--ranks-per-node 2", DEFAULTS, Some((6, None)), 3, 2),
            ("--nodes 3", DEFAULTS, Some((6, None)), 3, 2),
            ("--mode intranode", DEFAULTS, Some((6, Some(3))), 1, 6),
            ("--mode low-latency", DEFAULTS, None, 1, 8),
            ("--mode low-latency --nodes 3 --ranks-per-node 2", DEFAULTS, None, 3, 2),
            ("--mode low-latency", DEFAULTS, Some((6, Some(3))), 1, 6),
            ("--mode low-latency --nodes 2", DEFAULTS, Some((6, Some(3))), 2, 3),
        ] {
            let topology = parse(line).topology(defaults, group).unwrap();
            assert_eq!(topology, Topology { nodes, ranks_per_node }, "{line:?} {group:?}");
        }
    }

    #[test]
    fn wrong_numbers_of_ranks_are_named() {
        for (line, group, flag) in [
            ("--mode low-latency --nodes 0", None, "--nodes 0"),
            ("--mode low-latency --nodes 4", Some((6, None)), "--nodes 4"),
            ("--mode intranode --nodes 2", None, "--nodes 2"),
            ("--mode internode --nodes 1", None, "--nodes 1"),
            ("--nodes 0", None, "--nodes 0"),
            ("--nodes 33", None, "--nodes 33"),
            ("--ranks-per-node 9", None, "--ranks-per-node 9"),
            ("--ranks-per-node 0", None, "--ranks-per-node 0"),
            ("--ranks-per-node 4", Some((6, None)), "--ranks-per-node 4"),
            ("--nodes 4", Some((6, None)), "--nodes 4"),
            ("--mode intranode", Some((65, None)), "--ranks-per-node 65"),
            ("--mode intranode --ranks-per-node 4", Some((8, None)), "--ranks-per-node 4"),
        ] {
            let error = parse(line).topology(DEFAULTS, group).unwrap_err();
            assert_eq!(error.code, crate::error::USAGE);
            let named = error.message.as_deref().is_some_and(|message| message.starts_with(flag));
            assert!(named, "{line} {group:?}: {error:?}");
        }
    }

    #[test]
    fn flags_win() {
        let line =
            "--tokens 0 --hidden 48 --experts 64 --topk 8 --dtype fp8 --seed 17 --num-sms 6 --transport tcp";
        let settings = parse(line).resolve(one_node(4), DEFAULTS).unwrap();
        assert_eq!((settings.tokens, settings.hidden, settings.experts, settings.topk), (0, 48, 64, 8));
        assert_eq!((settings.seed, settings.config.num_channels()), (17, 3));
        let shape = fields(&mut settings.buffer_options()).shape;
        assert_eq!((shape.max_row_bytes(), shape.max_scales), (96, 1));
    }

    #[test]
    fn wrong_flags_are_named() {
        for (line, ranks, flag) in [
            ("--hidden 4", 8, "--hidden 4"),
            ("--hidden 8 --dtype fp8", 8, "--hidden 8"),
            ("--hidden 0", 8, "--hidden 0"),
            ("--hidden 16 --dtype mxfp8", 8, "--hidden 16"),
            ("--hidden 128 --dtype nvfp4 --mode low-latency", 8, "--dtype nvfp4"),
            ("--hidden 144 --dtype fp8 --quantise", 8, "--hidden 144: must be a positive multiple of 128"),
            ("--hidden 48 --dtype mxfp8 --quantise", 8, "--hidden 48: must be a positive multiple of 32"),
            ("--quantise", 8, "--quantise: rows become fp8 or mxfp8"),
            ("--dtype nvfp4 --quantise", 8, "--quantise: rows become fp8 or mxfp8"),
            ("--dtype fp8 --quantise --mode low-latency", 8, "--quantise: --mode low-latency"),
            ("--experts 12", 8, "--experts 12"),
            ("--experts 0", 8, "--experts 0"),
            ("--experts 8200", 8, "--experts 8200"),
            ("--topk 0", 8, "--topk 0"),
            ("--topk 33 --experts 64", 8, "--topk 33"),
            ("--topk 9 --experts 8", 8, "--topk 9"),
            ("--num-sms 7", 8, "--num-sms"),
        ] {
            let error = parse(line).resolve(one_node(ranks), DEFAULTS).unwrap_err();
            assert_eq!(error.code, crate::error::USAGE);
            assert!(
                error.message.as_deref().is_some_and(|message| message.starts_with(flag)),
                "{line}: {error:?}"
            );
        }
    }

    #[test]
    fn clap_refuses_the_rest() {
        for line in [
            "--processes --threads",
            "--dtype f64",
            "--tokens -1",
            "--seed 0xg",
            "--timeout 0",
            "--device gpu",
        ] {
            let words = ["epoxide"].into_iter().chain(line.split_whitespace());
            assert!(testing::parse::<RoundTripFlags>(words).is_err(), "{line}");
        }
        assert_eq!(parse("--seed 0xff").seed, 255);
    }
}

//! The flags that `roundtrip` and `bench` share, and what they come to for a number of ranks.

use std::time::Duration;

use clap::ValueEnum;
use epoxide::ep::{BufferOptions, BufferShape, Config, DType};
use epoxide_gpu::layout::{MAX_LOCAL_EXPERTS, MAX_RANKS, MAX_TOPK};
use serde::Serialize;

use crate::stop::{Result, Stop};

/// Elements that share one scale, for 1-byte dtypes.
pub const ELEMENTS_PER_SCALE: u64 = 128;

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

/// Element type of the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RowType {
    /// 16-bit brain float.
    Bf16,
    /// 8-bit float (e4m3) with one f32 scale per 128 elements; combine returns bf16.
    Fp8,
}

impl RowType {
    /// The dtype of dispatched rows.
    pub fn dtype(self) -> DType {
        match self {
            RowType::Bf16 => DType::Bf16,
            RowType::Fp8 => DType::Fp8E4m3,
        }
    }

    /// Scales per token.
    pub fn num_scales(self, hidden: u64) -> u64 {
        match self {
            RowType::Bf16 => 0,
            RowType::Fp8 => hidden.div_ceil(ELEMENTS_PER_SCALE),
        }
    }
}

/// Which GPUs to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The virtual GPU: runs the shipped PTX on the processor.
    Virtual,
    /// NVIDIA GPUs: rank r of a host uses GPU r.
    Cuda,
}

/// How bytes cross nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Shared memory of one host.
    Shm,
    /// Any network.
    Tcp,
    /// RDMA.
    Verbs,
}

/// The flags that `roundtrip` and `bench` share.
#[derive(Debug, Clone, clap::Args)]
pub struct Shared {
    /// How tokens travel; only intranode so far
    #[arg(long, value_enum, default_value = "intranode")]
    pub mode: Mode,

    /// Nodes; only 1 so far
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub nodes: u32,

    /// Ranks of a node, one GPU each [default: 8, or WORLD_SIZE where that is set]
    #[arg(long, value_name = "P")]
    pub ranks_per_node: Option<u32>,

    /// Tokens of each rank [default: 128]
    #[arg(long, value_name = "T")]
    pub tokens: Option<u32>,

    /// Elements of a row [default: 1024]
    #[arg(long, value_name = "H")]
    pub hidden: Option<u64>,

    /// Experts of all ranks [default: 4 per rank]
    #[arg(long, value_name = "E")]
    pub experts: Option<u32>,

    /// Experts that a token selects [default: 4, or the number of ranks where that is less]
    #[arg(long, value_name = "K")]
    pub topk: Option<u32>,

    /// Element type of the dispatched rows
    #[arg(long, value_enum, default_value = "bf16")]
    pub dtype: RowType,

    /// Which GPUs to use
    #[arg(long, value_enum, default_value = "virtual")]
    pub device: DeviceKind,

    /// How bytes cross nodes; of no effect on one node
    #[arg(long, value_enum, default_value = "shm")]
    pub transport: Transport,

    /// Seed of all random data, decimal or 0x..
    #[arg(long, value_parser = parse_seed, default_value = "0xA1B2")]
    pub seed: u64,

    /// Multiprocessors for dispatch and for combine; even, a channel is two
    #[arg(long, value_name = "S", default_value_t = 20)]
    pub num_sms: u32,

    /// Run every rank as a process of its own [default with --device cuda]
    #[arg(long, conflicts_with = "threads")]
    pub processes: bool,

    /// Run the ranks as threads of this process [default with --device virtual]
    #[arg(long)]
    pub threads: bool,

    /// Longest wait for another rank
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub timeout: u64,

    /// Print one JSON object instead of lines
    #[arg(long)]
    pub json: bool,
}

/// Sizes where neither the user nor the number of ranks says otherwise.
#[derive(Debug, Clone, Copy)]
pub struct Defaults {
    /// Tokens of each rank.
    pub tokens: u32,
    /// Elements of a row.
    pub hidden: u64,
}

/// What the flags come to: checked, and complete.
#[derive(Debug, Clone, Serialize)]
pub struct Setup {
    /// How tokens travel.
    pub mode: Mode,
    /// Nodes.
    pub nodes: u32,
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
    /// Element type of the dispatched rows.
    pub dtype: RowType,
    /// Which GPUs.
    pub device: DeviceKind,
    /// Seed of all random data.
    pub seed: u64,
    /// Multiprocessors for dispatch and for combine.
    pub num_sms: u32,
    /// Longest wait for another rank, in seconds.
    pub timeout: u64,
    /// The library's configuration, from `num_sms`.
    #[serde(skip)]
    pub config: Config,
}

impl Shared {
    /// Checks the flags that do not depend on the number of ranks.
    pub fn check(&self) -> Result<()> {
        if self.mode != Mode::Intranode {
            let mode =
                self.mode.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
            return Err(Stop::usage(format!("--mode {mode}: not built yet: intranode only in this version")));
        }
        if self.nodes != 1 {
            let nodes = self.nodes;
            return Err(Stop::usage(format!(
                "--nodes {nodes}: not built yet: intranode only in this version, so --nodes 1"
            )));
        }
        Ok(())
    }

    /// Longest wait for another rank.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// What the flags come to for `ranks` ranks.
    pub fn resolve(&self, ranks: u32, defaults: Defaults) -> Result<Setup> {
        self.check()?;
        let wrong =
            |flag: &str, value: u64, rule: String| Err(Stop::usage(format!("{flag} {value}: {rule}")));
        if let Some(asked) = self.ranks_per_node.filter(|&asked| asked != ranks) {
            let rule =
                format!("the environment's WORLD_SIZE is {ranks}; leave the flag out or make them equal");
            return wrong("--ranks-per-node", u64::from(asked), rule);
        }
        if ranks == 0 || ranks > MAX_RANKS as u32 {
            return wrong("--ranks-per-node", u64::from(ranks), format!("must be 1 to {MAX_RANKS}"));
        }
        let hidden = self.hidden.unwrap_or(defaults.hidden);
        let unit = 16 / self.dtype.dtype().size();
        if hidden == 0 || !hidden.is_multiple_of(unit) || hidden > 1 << 24 {
            let rule = format!(
                "must be a positive multiple of {unit} (rows are multiples of 16 bytes), at most {}",
                1 << 24
            );
            return wrong("--hidden", hidden, rule);
        }
        let experts = self.experts.unwrap_or(4 * ranks);
        if experts == 0 || !experts.is_multiple_of(ranks) || experts / ranks > MAX_LOCAL_EXPERTS {
            let rule = format!(
                "must be a positive multiple of the {ranks} ranks, at most {MAX_LOCAL_EXPERTS} for each of them"
            );
            return wrong("--experts", u64::from(experts), rule);
        }
        let topk = self.topk.unwrap_or(4.min(ranks));
        if topk == 0 || topk > MAX_TOPK || topk > experts {
            let rule = format!(
                "must be 1 to {} (at most {MAX_TOPK}, and at most the number of experts)",
                MAX_TOPK.min(experts)
            );
            return wrong("--topk", u64::from(topk), rule);
        }
        let config = match Config::with_sms(self.num_sms) {
            Ok(config) => config,
            Err(error) => return Err(Stop::usage(format!("--num-sms: {error}"))),
        };
        Ok(Setup {
            mode: self.mode,
            nodes: self.nodes,
            ranks,
            tokens: self.tokens.unwrap_or(defaults.tokens),
            hidden,
            experts,
            topk,
            dtype: self.dtype,
            device: self.device,
            seed: self.seed,
            num_sms: self.num_sms,
            timeout: self.timeout,
            config,
        })
    }
}

impl Setup {
    /// Options of a buffer that can dispatch these rows and combine rows of bf16.
    pub fn buffer_options(&self) -> BufferOptions {
        let shape = BufferShape {
            max_tokens_per_rank: self.tokens,
            max_row_bytes: self.hidden * DType::Bf16.size(),
            max_topk: self.topk,
            max_scales: self.dtype.num_scales(self.hidden) as u32,
        };
        let timeout = Duration::from_secs(self.timeout);
        BufferOptions { config: self.config, timeout, ..BufferOptions::new(shape) }
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
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        shared: Shared,
    }

    const DEFAULTS: Defaults = Defaults { tokens: 128, hidden: 1024 };

    fn parse(line: &str) -> Shared {
        Line::try_parse_from(["epoxide"].into_iter().chain(line.split_whitespace())).unwrap().shared
    }

    #[test]
    fn defaults_follow_the_number_of_ranks() {
        let setup = parse("").resolve(8, DEFAULTS).unwrap();
        assert_eq!(
            (setup.ranks, setup.tokens, setup.hidden, setup.experts, setup.topk),
            (8, 128, 1024, 32, 4)
        );
        assert_eq!((setup.seed, setup.config.num_channels()), (0xA1B2, 10));
        let setup = parse("").resolve(2, DEFAULTS).unwrap();
        assert_eq!((setup.experts, setup.topk), (8, 2));
    }

    #[test]
    fn flags_win() {
        let line =
            "--tokens 0 --hidden 48 --experts 64 --topk 8 --dtype fp8 --seed 17 --num-sms 6 --transport tcp";
        let setup = parse(line).resolve(4, DEFAULTS).unwrap();
        assert_eq!((setup.tokens, setup.hidden, setup.experts, setup.topk), (0, 48, 64, 8));
        assert_eq!((setup.seed, setup.config.num_channels()), (17, 3));
        let shape = setup.buffer_options().shape;
        assert_eq!((shape.max_row_bytes, shape.max_scales), (96, 1));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (line, ranks, flag) in [
            ("--mode internode", 8, "--mode internode"),
            ("--mode low-latency", 8, "--mode low-latency"),
            ("--nodes 2", 8, "--nodes 2"),
            ("--ranks-per-node 4", 8, "--ranks-per-node 4"),
            ("", 9, "--ranks-per-node 9"),
            ("", 0, "--ranks-per-node 0"),
            ("--hidden 4", 8, "--hidden 4"),
            ("--hidden 8 --dtype fp8", 8, "--hidden 8"),
            ("--hidden 0", 8, "--hidden 0"),
            ("--experts 12", 8, "--experts 12"),
            ("--experts 0", 8, "--experts 0"),
            ("--experts 8200", 8, "--experts 8200"),
            ("--topk 0", 8, "--topk 0"),
            ("--topk 33 --experts 64", 8, "--topk 33"),
            ("--topk 9 --experts 8", 8, "--topk 9"),
            ("--num-sms 7", 8, "--num-sms"),
        ] {
            let stop = parse(line).resolve(ranks, DEFAULTS).unwrap_err();
            assert_eq!(stop.code, crate::stop::USAGE);
            assert!(
                stop.message.as_deref().is_some_and(|message| message.starts_with(flag)),
                "{line}: {stop:?}"
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
            assert!(Line::try_parse_from(words).is_err(), "{line}");
        }
        assert_eq!(parse("--seed 0xff").seed, 255);
    }
}

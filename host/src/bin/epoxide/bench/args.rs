//! The flags of `epoxide bench`.

use std::path::PathBuf;

use clap::ValueEnum;
use epoxide::ep::{DType, Tuning};
use epoxide_gpu::layout::{MAX_LOCAL_EXPERTS, MAX_RANKS, MAX_TOPK};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde::{Deserialize, Serialize};

use super::counts::{Sizes, random_topk};
use super::sweep::Sweep;
use crate::stop::{Result, Stop};

/// Where the kernels run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// The virtual GPU: its times are those of an interpreter.
    Virtual,
    /// NVIDIA GPUs.
    Cuda,
}

/// What the rows are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RowType {
    /// BF16 rows.
    Bf16,
    /// FP8 rows in dispatch, with one f32 scale per 128 elements; combine stays BF16.
    Fp8,
}

/// Flags of `epoxide bench`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Which path is timed.
    #[arg(long, default_value = "intranode", value_parser = ["intranode"])]
    pub mode: String,
    /// Where the kernels run.
    #[arg(long, value_enum, default_value = "virtual")]
    pub device: Backend,
    /// Ranks, one GPU each; threads of this process.
    #[arg(long, default_value_t = 8)]
    pub ranks_per_node: u32,
    /// Tokens per rank.
    #[arg(long, env = "EPOXIDE_BENCH_TOKENS", default_value_t = 4096)]
    pub tokens: u32,
    /// Elements per row.
    #[arg(long, env = "EPOXIDE_BENCH_HIDDEN", default_value_t = 7168)]
    pub hidden: u64,
    /// Experts of all ranks.
    #[arg(long, env = "EPOXIDE_BENCH_EXPERTS", default_value_t = 256)]
    pub experts: u32,
    /// Experts per token.
    #[arg(long, env = "EPOXIDE_BENCH_TOPK", default_value_t = 8)]
    pub topk: u32,
    /// Row type of dispatch.
    #[arg(long, value_enum, default_value = "bf16")]
    pub dtype: RowType,
    /// Multiprocessors for each operation; several values make a table.
    #[arg(long, env = "EPOXIDE_NUM_SMS", value_delimiter = ',', default_value = "24")]
    pub num_sms: Vec<u32>,
    /// Untimed iterations.
    #[arg(long, env = "EPOXIDE_BENCH_WARMUP", default_value_t = 5)]
    pub warmup: u32,
    /// Timed iterations.
    #[arg(long, env = "EPOXIDE_BENCH_ITERS", default_value_t = 20)]
    pub iters: u32,
    /// Seed of routing and rows.
    #[arg(long, default_value_t = 0xA1B2)]
    pub seed: u64,
    /// Share of the entries that select no expert.
    #[arg(long, default_value_t = 0.0, value_parser = parse_share)]
    pub masked: f64,
    /// Leave the links' own ceiling out.
    #[arg(long)]
    pub no_ceiling: bool,
    /// MiB written between iterations to empty the L2 cache; on the virtual GPU nothing is.
    #[arg(long, default_value_t = 256)]
    pub flush_mib: u64,
    /// Write the results as JSON to this file (docs/BENCH-SCHEMA.md); `-` for standard output, in place of the text.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the results as CSV to this file, a line for each phase.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Draw the results: bandwidth, and the distributions of the times.
    #[arg(long, value_name = "FILE.svg|png")]
    pub plot: Option<PathBuf>,
    /// Write a Chrome/Perfetto trace of some calls apart from the timed ones.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Measure all combinations, such as `tokens=128..8192,sms=4..48:4,ranks=2,4,8`: `a..b` doubles, `a..b:s` steps by s.
    #[arg(long, value_name = "AXES", requires = "out", conflicts_with_all = ["trace", "json"])]
    pub sweep: Option<Sweep>,
    /// File of a sweep's points, one JSON line each; points that it holds already are not measured again.
    #[arg(long, value_name = "FILE", requires = "sweep")]
    pub out: Option<PathBuf>,
    /// Launch shapes.
    #[command(flatten)]
    pub tuning: TuningFlags,
    /// Every rank's ids, in place of random ones: tests.
    #[arg(skip)]
    pub ids: Option<Vec<Vec<i64>>>,
}

/// Launch shapes that were asked for; the library's own where not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::Args, Serialize, Deserialize)]
pub struct TuningFlags {
    /// Warps per block in dispatch.
    #[arg(long)]
    pub dispatch_warps: Option<u32>,
    /// Most stages per warp in dispatch.
    #[arg(long)]
    pub dispatch_stages: Option<u32>,
    /// Largest stage in dispatch, in bytes.
    #[arg(long)]
    pub dispatch_stage_bytes: Option<u32>,
    /// Warps per block in combine.
    #[arg(long)]
    pub combine_warps: Option<u32>,
    /// Most slots per warp in combine.
    #[arg(long)]
    pub combine_slots: Option<u32>,
    /// Largest slot in combine, in bytes.
    #[arg(long)]
    pub combine_slot_bytes: Option<u32>,
}

impl TuningFlags {
    /// With the library's own where none was asked for.
    pub fn tuning(&self) -> Tuning {
        let d = Tuning::default();
        Tuning {
            dispatch_warps: self.dispatch_warps.unwrap_or(d.dispatch_warps),
            dispatch_stages: self.dispatch_stages.unwrap_or(d.dispatch_stages),
            dispatch_stage_bytes: self.dispatch_stage_bytes.unwrap_or(d.dispatch_stage_bytes),
            combine_warps: self.combine_warps.unwrap_or(d.combine_warps),
            combine_slots: self.combine_slots.unwrap_or(d.combine_slots),
            combine_slot_bytes: self.combine_slot_bytes.unwrap_or(d.combine_slot_bytes),
        }
    }
}

impl Args {
    /// Row type of dispatch.
    pub fn dtype(&self) -> DType {
        match self.dtype {
            RowType::Bf16 => DType::Bf16,
            RowType::Fp8 => DType::Fp8E4m3,
        }
    }

    /// Scales per row.
    pub fn num_scales(&self) -> u64 {
        if self.dtype == RowType::Fp8 { self.hidden.div_ceil(128) } else { 0 }
    }

    /// Bytes of one row in dispatch, scales included.
    pub fn dispatch_row_bytes(&self) -> u64 {
        self.hidden * self.dtype().size() + self.num_scales() * 4
    }

    /// Bytes of one row in combine.
    pub fn combine_row_bytes(&self) -> u64 {
        self.hidden * 2
    }

    /// What a count of the routing needs to know.
    pub fn count_sizes(&self) -> Sizes {
        let ranks = self.ranks_per_node;
        Sizes { ranks, ranks_per_node: ranks, experts: self.experts, topk: self.topk }
    }

    /// The ids of rank `rank`.
    pub fn routing(&self, rank: u32) -> Vec<i64> {
        if let Some(ids) = &self.ids {
            return ids[rank as usize].clone();
        }
        let mut rng = SmallRng::seed_from_u64(self.seed + u64::from(rank));
        random_topk(&mut rng, self.tokens, self.topk, self.experts, self.masked)
    }

    /// Sizes that cannot be run are a reason to skip, as in the seed.
    pub fn check(&self) -> Result<()> {
        let (ranks, experts, topk) = (self.ranks_per_node, self.experts, self.topk);
        if self.iters == 0 {
            return Err(Stop::usage("bench: --iters must be at least 1"));
        }
        let skip = |why: String| Err(Stop::skipped(format!("bench: {why}")));
        if ranks == 0 || ranks > MAX_RANKS as u32 {
            return skip(format!("{ranks} ranks do not fit one NVLink domain of 1 to {MAX_RANKS}"));
        }
        if experts == 0 || !experts.is_multiple_of(ranks) {
            return skip(format!("num_experts {experts} is not divisible by num_ranks {ranks}"));
        }
        if topk == 0 || topk > experts {
            return skip(format!("num_topk {topk} is not 1 to num_experts {experts}"));
        }
        if topk > MAX_TOPK {
            return skip(format!("num_topk {topk} does not fit: at most {MAX_TOPK}"));
        }
        if experts / ranks > MAX_LOCAL_EXPERTS {
            let local = experts / ranks;
            return skip(format!("{local} experts a rank do not fit: at most {MAX_LOCAL_EXPERTS}"));
        }
        let row_bytes = self.hidden * self.dtype().size();
        if row_bytes == 0 || !row_bytes.is_multiple_of(16) {
            return skip(format!(
                "rows of {row_bytes} bytes do not fit: a positive multiple of 16 bytes is needed"
            ));
        }
        if self.tokens == 0 {
            return skip("no tokens to time".into());
        }
        if let Some(&sms) = self.num_sms.iter().find(|&&sms| sms < 2 || !sms.is_multiple_of(2)) {
            return Err(Stop::usage(format!("bench: --num-sms {sms}: an even number is needed")));
        }
        Ok(())
    }
}

fn parse_share(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("must be 0 to 1".into()),
    }
}

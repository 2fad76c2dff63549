//! `epoxide bench`: times dispatch and combine apart, and prints every convention that the field counts by.

mod measure;
mod report;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use epoxide::driver::Device;
use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::ep::DType;
use epoxide::group::launch::run_threads;
use epoxide::{Error, Result};

/// Where the kernels run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Backend {
    /// The virtual GPU: its times are those of an interpreter.
    Virtual,
    /// NVIDIA GPUs.
    Cuda,
}

/// What the rows are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RowType {
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
    mode: String,
    /// Where the kernels run.
    #[arg(long, value_enum, default_value = "virtual")]
    device: Backend,
    /// Ranks, one GPU each; threads of this process.
    #[arg(long, default_value_t = 8)]
    ranks_per_node: u32,
    /// Tokens per rank.
    #[arg(long, env = "EPOXIDE_BENCH_TOKENS", default_value_t = 4096)]
    tokens: u32,
    /// Elements per row.
    #[arg(long, env = "EPOXIDE_BENCH_HIDDEN", default_value_t = 7168)]
    hidden: u64,
    /// Experts of all ranks.
    #[arg(long, env = "EPOXIDE_BENCH_EXPERTS", default_value_t = 256)]
    experts: u32,
    /// Experts per token.
    #[arg(long, env = "EPOXIDE_BENCH_TOPK", default_value_t = 8)]
    topk: u32,
    /// Row type of dispatch.
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: RowType,
    /// Multiprocessors for each operation; several values make a table.
    #[arg(long, env = "EPOXIDE_NUM_SMS", value_delimiter = ',', default_value = "24")]
    num_sms: Vec<u32>,
    /// Untimed iterations.
    #[arg(long, env = "EPOXIDE_BENCH_WARMUP", default_value_t = 5)]
    warmup: u32,
    /// Timed iterations.
    #[arg(long, env = "EPOXIDE_BENCH_ITERS", default_value_t = 20)]
    iters: u32,
    /// Seed of routing and rows.
    #[arg(long, default_value_t = 0xA1B2)]
    seed: u64,
    /// Leave the links' own ceiling out.
    #[arg(long)]
    no_ceiling: bool,
    /// MiB written between iterations to empty the L2 cache; on the virtual GPU nothing is.
    #[arg(long, default_value_t = 256)]
    flush_mib: u64,
    /// Write the results as JSON to this file, `-` for standard output.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Warps per block in dispatch.
    #[arg(long)]
    dispatch_warps: Option<u32>,
    /// Most stages per warp in dispatch.
    #[arg(long)]
    dispatch_stages: Option<u32>,
    /// Largest stage in dispatch, in bytes.
    #[arg(long)]
    dispatch_stage_bytes: Option<u32>,
    /// Warps per block in combine.
    #[arg(long)]
    combine_warps: Option<u32>,
    /// Most slots per warp in combine.
    #[arg(long)]
    combine_slots: Option<u32>,
    /// Largest slot in combine, in bytes.
    #[arg(long)]
    combine_slot_bytes: Option<u32>,
}

impl Args {
    /// Row type of dispatch.
    fn dtype(&self) -> DType {
        match self.dtype {
            RowType::Bf16 => DType::Bf16,
            RowType::Fp8 => DType::Fp8E4m3,
        }
    }

    /// Scales per row.
    fn num_scales(&self) -> u64 {
        if self.dtype == RowType::Fp8 { self.hidden.div_ceil(128) } else { 0 }
    }

    /// Bytes of one row in dispatch, scales included.
    fn dispatch_row_bytes(&self) -> u64 {
        self.hidden * self.dtype().size() + self.num_scales() * 4
    }

    /// Bytes of one row in combine.
    fn combine_row_bytes(&self) -> u64 {
        self.hidden * 2
    }
}

/// Runs the benchmark.
///
/// # Errors
/// [`Error::Unavailable`] where the devices are missing, and whatever the operations report.
pub fn run(args: &Args) -> Result<()> {
    if args.iters == 0 {
        return Err(Error::argument("iters", 0, "must be at least 1"));
    }
    let results = run_threads(args.ranks_per_node, Duration::from_secs(120), |rank, group| {
        measure::rank(args, open(args, rank)?, &*group)
    })
    .map_err(|failure| failure.error)?;
    let report = report::Report::new(args, &results);
    match &args.json {
        Some(path) if path.as_os_str() == "-" => println!("{}", report.json()),
        Some(path) => {
            std::fs::write(path, report.json().to_string())
                .map_err(|error| Error::os("write", format!("{}: {error}", path.display())))?;
            report.print();
        }
        None => report.print(),
    }
    Ok(())
}

fn open(args: &Args, rank: u32) -> Result<Arc<dyn Device>> {
    match args.device {
        Backend::Virtual => Ok(VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() })),
        Backend::Cuda => open_cuda(rank),
    }
}

#[cfg(feature = "cuda")]
fn open_cuda(rank: u32) -> Result<Arc<dyn Device>> {
    epoxide::driver::cuda::CudaDevice::open(rank)
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(_rank: u32) -> Result<Arc<dyn Device>> {
    Err(Error::Unavailable {
        what: "--device cuda".into(),
        reason: "this binary was built without it; build with --features cuda".into(),
    })
}

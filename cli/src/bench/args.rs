//! The flags of `epoxide bench`.

use std::path::PathBuf;

use epoxide_bench::sweep::Sweep;
use epoxide_bench::{Plan, Shapes};

use crate::options::{DeviceKind, Mode, NetworkFlags, RowType, WorldFlags};
use crate::stop::{Result, Stop};

/// Multiprocessors unless the user says otherwise: enough to fill the links of an H200.
const DEFAULT_SMS: u32 = 24;
/// Tokens of each rank unless the user says otherwise.
const DEFAULT_TOKENS: u32 = 4096;

/// Flags of `epoxide bench`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Nodes and ranks.
    #[command(flatten)]
    pub place: WorldFlags,
    /// What joins the nodes.
    #[command(flatten)]
    pub network: NetworkFlags,
    /// Where the kernels run; the virtual GPU's times are those of an interpreter.
    #[arg(long, value_enum, default_value = "virtual")]
    pub device: DeviceKind,
    /// Tokens per rank [default: 4096; with --mode low-latency each of 1, 2, 4 .. 1024].
    #[arg(long, env = "EPOXIDE_BENCH_TOKENS")]
    pub tokens: Option<u32>,
    /// Elements per row.
    #[arg(long, env = "EPOXIDE_BENCH_HIDDEN", default_value_t = 7168)]
    pub hidden: u64,
    /// Experts of all ranks.
    #[arg(long, env = "EPOXIDE_BENCH_EXPERTS", default_value_t = 256)]
    pub experts: u32,
    /// Experts per token.
    #[arg(long, env = "EPOXIDE_BENCH_TOPK", default_value_t = 8)]
    pub topk: u32,
    /// Row type of dispatch; combine is BF16.
    #[arg(long, value_enum, default_value = "bf16")]
    pub dtype: RowType,
    /// Multiprocessors for each operation; several values make a table [env: across nodes EPOXIDE_NSM, else EPOXIDE_NUM_SMS]
    /// [default: 24]
    #[arg(long, value_delimiter = ',')]
    pub num_sms: Vec<u32>,
    /// Rows that travel together in one put.
    #[arg(long, env = "EPOXIDE_RDMA_SEND", default_value_t = 16)]
    pub rdma_send: u32,
    /// Rows of the ring between nodes that the original interface's size hints assume; nothing here has one.
    #[arg(long, env = "EPOXIDE_RDMA_RECV", default_value_t = 128)]
    pub rdma_recv: u32,
    /// Rows of a chunk within a node, of which the same is true.
    #[arg(long, env = "EPOXIDE_NVL_SEND", default_value_t = 8)]
    pub nvl_send: u32,
    /// Rows of the ring within a node, of which the same is true.
    #[arg(long, env = "EPOXIDE_NVL_RECV", default_value_t = 256)]
    pub nvl_recv: u32,
    /// Bytes to spend on the pool instead of room for the worst case.
    #[arg(long, value_name = "BYTES")]
    pub nvl_bytes: Option<u64>,
    /// Bytes to spend on wire memory instead of room for the worst case.
    #[arg(long, value_name = "BYTES")]
    pub rdma_bytes: Option<u64>,
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
    /// Measure replays of CUDA graphs too, of one graph for each phase and one for cached dispatch + combine in pool: each replay by
    /// itself between two events, devices aligned before, with L2 as the replay before left it and with L2 emptied; and CHAIN replays
    /// one after the other between two events, over CHAIN [default without =CHAIN: 128]. Of each iteration the slowest rank counts. With --mode low-latency nothing but graphs is
    /// measured, and CHAIN are the pairs of one.
    #[arg(long, value_name = "CHAIN", num_args = 0..=1, require_equals = true, default_missing_value = "128",
        value_parser = clap::value_parser!(u32).range(1..))]
    pub graph: Option<u32>,
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
    /// Measure all combinations, such as `tokens=128..8192,sms=4..48:4,ranks=2,4,8`: `a..b` doubles, `a..b:s` steps by s; the
    /// axes are tokens, sms, ranks (of a node), nodes and rdma_send.
    #[arg(long, value_name = "AXES", requires = "out", conflicts_with_all = ["trace", "json"])]
    pub sweep: Option<Sweep>,
    /// File of a sweep's points, one JSON line each; points that it holds already are not measured again.
    #[arg(long, value_name = "FILE", requires = "sweep")]
    pub out: Option<PathBuf>,
    /// With --mode low-latency: tokens of a rank that are said to be complete together.
    #[arg(long, value_name = "C", value_parser = clap::value_parser!(u32).range(1..))]
    pub chunk_tokens: Option<u32>,
    /// Launch shapes.
    #[command(flatten)]
    pub tuning: TuningFlags,
}

/// Launch shapes that were asked for; the library's own where not.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct TuningFlags {
    /// Warps per block in dispatch.
    #[arg(long)]
    pub dispatch_warps: Option<u32>,
    /// Warps per block that send metadata, in dispatch within one node.
    #[arg(long)]
    pub dispatch_metadata_warps: Option<u32>,
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
    /// Blocks that copy rows into the pool during a combine of a tensor.
    #[arg(long)]
    pub combine_stagers: Option<u32>,
}

impl Args {
    /// What the flags and the environment come to.
    pub fn plan(&self) -> Result<Plan> {
        let topology = self.place.topology(Mode::Intranode, super::launched()?)?;
        let num_sms = match self.num_sms.is_empty() {
            true => sms_of_environment(topology.nodes > 1, |name| std::env::var(name).ok())?,
            false => self.num_sms.clone(),
        };
        let TuningFlags {
            dispatch_warps,
            dispatch_metadata_warps,
            dispatch_stages,
            dispatch_stage_bytes,
            combine_warps,
            combine_slots,
            combine_slot_bytes,
            combine_stagers,
        } = self.tuning;
        Ok(Plan {
            topology,
            is_virtual: self.device == DeviceKind::Virtual,
            transport: self.network.transport.kind(),
            queues: self.network.queues(self.device),
            tokens: self.tokens.unwrap_or(DEFAULT_TOKENS),
            hidden: self.hidden,
            experts: self.experts,
            topk: self.topk,
            dtype: self.dtype.dtype(),
            num_sms,
            rdma_send: self.rdma_send,
            rdma_recv: self.rdma_recv,
            nvl_send: self.nvl_send,
            nvl_recv: self.nvl_recv,
            nvl_bytes: self.nvl_bytes,
            rdma_bytes: self.rdma_bytes,
            warmup: self.warmup,
            iters: self.iters,
            seed: self.seed,
            masked: self.masked,
            graph: self.graph,
            no_ceiling: self.no_ceiling,
            flush_mib: self.flush_mib,
            shapes: Shapes {
                dispatch_warps,
                dispatch_metadata_warps,
                dispatch_stages,
                dispatch_stage_bytes,
                combine_warps,
                combine_slots,
                combine_slot_bytes,
                combine_stagers,
            },
            ids: None,
        })
    }
}

/// Multiprocessors where no flag gives them: `EPOXIDE_NSM` across nodes, else `EPOXIDE_NUM_SMS`, both comma-separated.
fn sms_of_environment(across: bool, variable: impl Fn(&str) -> Option<String>) -> Result<Vec<u32>> {
    let names = if across { &["EPOXIDE_NSM", "EPOXIDE_NUM_SMS"][..] } else { &["EPOXIDE_NUM_SMS"] };
    let Some((name, text)) = names.iter().find_map(|name| Some((name, variable(name)?))) else {
        return Ok(vec![DEFAULT_SMS]);
    };
    let values = text.split(',').map(|part| part.trim().parse::<u32>());
    values.collect::<std::result::Result<_, _>>().map_err(|error| {
        Stop::usage(format!("bench: {name}={text}: {error}; give even numbers, such as 16,24"))
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
    use super::*;

    #[test]
    fn multiprocessors_come_from_the_environment_where_no_flag_gives_them() {
        let variable = |name: &str| match name {
            "EPOXIDE_NSM" => Some("8, 16".to_owned()),
            "EPOXIDE_NUM_SMS" => Some("4".to_owned()),
            _ => None,
        };
        assert_eq!(sms_of_environment(true, variable).unwrap(), [8, 16]);
        assert_eq!(sms_of_environment(false, variable).unwrap(), [4]);
        assert_eq!(sms_of_environment(true, |_| None).unwrap(), [DEFAULT_SMS]);
        let stop = sms_of_environment(true, |_| Some("many".into())).unwrap_err();
        assert!(stop.message.unwrap().contains("EPOXIDE_NSM=many"));
    }
}

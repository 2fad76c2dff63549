//! The flags of `epoxide bench`.

use std::path::PathBuf;

use epoxide::ep::{Config, DType, Tuning};
use epoxide_gpu::layout::{MAX_LOCAL_EXPERTS, MAX_TOPK};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde::{Deserialize, Serialize};

use super::counts::{Sizes, random_topk};
use super::results::PhaseName;
use super::sweep::Sweep;
use crate::options::{DeviceKind, Mode, NetworkFlags, RowType, World, WorldFlags};
use crate::stop::{Result, Stop};

/// Multiprocessors unless the user says otherwise: enough to fill the links of an H200.
const DEFAULT_SMS: u32 = 24;
/// Fewest multiprocessors of a cached dispatch across nodes.
const FEWEST_SMS_ACROSS: u32 = 4;

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
    /// Likewise, rows of a chunk within a node.
    #[arg(long, env = "EPOXIDE_NVL_SEND", default_value_t = 8)]
    pub nvl_send: u32,
    /// Likewise, rows of the ring within a node.
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
    /// Launch shapes.
    #[command(flatten)]
    pub tuning: TuningFlags,
    /// Every rank's ids, in place of random ones: tests.
    #[arg(skip)]
    pub ids: Option<Vec<Vec<i64>>>,
    /// What the flags come to.
    #[arg(skip = World { nodes: 1, ranks_per_node: 1 })]
    pub world: World,
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
            internode_dispatch_warps: self.dispatch_warps.unwrap_or(d.internode_dispatch_warps),
            dispatch_stages: self.dispatch_stages.unwrap_or(d.dispatch_stages),
            dispatch_stage_bytes: self.dispatch_stage_bytes.unwrap_or(d.dispatch_stage_bytes),
            combine_warps: self.combine_warps.unwrap_or(d.combine_warps),
            combine_slots: self.combine_slots.unwrap_or(d.combine_slots),
            combine_slot_bytes: self.combine_slot_bytes.unwrap_or(d.combine_slot_bytes),
        }
    }
}

impl Args {
    /// Settles what several flags and the environment say together.
    pub fn resolve(self) -> Result<Args> {
        let world = self.place.world(Mode::Intranode, super::launched()?)?;
        let num_sms = match self.num_sms.is_empty() {
            true => sms_of_environment(world.nodes > 1, |name| std::env::var(name).ok())?,
            false => self.num_sms.clone(),
        };
        Ok(Args { world, num_sms, ..self })
    }

    /// How tokens travel, as results name it.
    pub fn mode(&self) -> &'static str {
        if self.world.nodes > 1 { "internode" } else { "intranode" }
    }

    /// The configuration with `num_sms` multiprocessors.
    pub fn config(&self, num_sms: u32) -> epoxide::Result<Config> {
        let nodes = self.world.nodes;
        let config = Config::new(num_sms, self.nvl_send, self.nvl_recv, self.rdma_send, self.rdma_recv)?;
        let config = config.for_nodes(nodes);
        config.check_nodes(nodes)?;
        Ok(config)
    }

    /// Scales per row.
    pub fn num_scales(&self) -> u64 {
        self.dtype.num_scales(self.hidden)
    }

    /// Bytes of one row in dispatch, scales included.
    pub fn dispatch_row_bytes(&self) -> u64 {
        self.hidden * self.dtype().size() + self.num_scales() * 4
    }

    /// Row type of dispatch.
    pub fn dtype(&self) -> DType {
        self.dtype.dtype()
    }

    /// Bytes of one row in combine.
    pub fn combine_row_bytes(&self) -> u64 {
        self.hidden * 2
    }

    /// Bytes of a row in `phase`, scales included.
    pub fn row_bytes(&self, phase: PhaseName) -> u64 {
        if phase.is_dispatch() { self.dispatch_row_bytes() } else { self.combine_row_bytes() }
    }

    /// What a count of the routing needs to know.
    pub fn count_sizes(&self) -> Sizes {
        let (ranks, ranks_per_node) = (self.world.ranks(), self.world.ranks_per_node);
        Sizes { ranks, ranks_per_node, experts: self.experts, topk: self.topk }
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
        let (world, experts, topk) = (self.world, self.experts, self.topk);
        let ranks = world.ranks();
        if self.iters == 0 {
            return Err(Stop::usage("bench: --iters must be at least 1"));
        }
        let skip = |why: String| Err(Stop::skipped(format!("bench: {why}")));
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
        if row_bytes == 0 || !row_bytes.is_multiple_of(16) || self.hidden > 1 << 24 {
            return skip(format!(
                "rows of {row_bytes} bytes do not fit: a positive multiple of 16 bytes, of at most 2^24 elements, is needed"
            ));
        }
        if self.tokens == 0 {
            return skip("no tokens to time".into());
        }
        for &num_sms in &self.num_sms {
            let config = self.config(num_sms).map_err(|error| {
                let flags = "--num-sms, --rdma-send, --rdma-recv, --nvl-send, --nvl-recv";
                Stop::usage(format!("bench: {flags}: {error}"))
            })?;
            if world.nodes == 1 {
                continue;
            }
            if num_sms < FEWEST_SMS_ACROSS {
                return Err(Stop::usage(format!(
                    "bench: --num-sms {num_sms}: a cached dispatch across nodes takes at least {FEWEST_SMS_ACROSS}"
                )));
            }
            // The seed's rule; it sizes its buffers by the hints.
            let per_rank = |bytes: Option<u64>, hint: fn(&Config, u64, u32, u32) -> u64| {
                let bytes =
                    bytes.unwrap_or_else(|| hint(&config, self.hidden * 2, ranks, world.ranks_per_node));
                bytes / u64::from(ranks)
            };
            let nvl = per_rank(self.nvl_bytes, Config::nvl_buffer_size_hint);
            let rdma = per_rank(self.rdma_bytes, Config::rdma_buffer_size_hint);
            if self.hidden * 2 > nvl.min(rdma) {
                return skip(format!(
                    "hidden {} x 2 bytes exceed the smaller of nvl_bytes / num_ranks = {nvl} and rdma_bytes / num_ranks = {rdma}; \
                     raise --nvl-bytes or --rdma-bytes",
                    self.hidden
                ));
            }
        }
        Ok(())
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

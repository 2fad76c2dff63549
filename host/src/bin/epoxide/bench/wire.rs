//! `epoxide bench wire`: what the network between nodes does with puts, by size and by how many are under way. No kernel runs: host
//! code posts to the proxies' rings, so that the figures hold what a kernel sees, ring and proxy included. Where a peer's memory is
//! mapped there is no queue that a kernel could use: there the puts are copies on a stream, by the devices' copy engines.

use std::fmt::Write;
use std::path::PathBuf;

use epoxide::driver::Device;
use epoxide::group::ProcessGroup;
use serde::{Deserialize, Serialize};

use super::measure::TIMEOUT;
use super::puts::Poster;
use super::results::{Distribution, SCHEMA_VERSION, gbps, mean, today, write_text};
use super::sweep::parse_values;
use super::{csv, launched, on_ranks};
use crate::options::{DeviceKind, Mode, NetworkFlags, World, WorldFlags};
use crate::output;
use crate::ranks;
use crate::stop::{Result, Stop};

/// Fewest and most puts that a bandwidth is measured with, on each queue.
const PUTS: std::ops::RangeInclusive<u64> = 32..=4096;
/// What is said of every figure that has no device of hardware behind it.
const CAVEAT: &str = "VIRTUAL GPU: puts between memories of one host, of no hardware";

/// Flags of `epoxide bench wire`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Nodes [default: 2, or where a launcher started the ranks as many as it has hosts]
    #[arg(long)]
    nodes: Option<u32>,
    /// Ranks of a node; each puts to the ranks with its index on the other nodes, all at once [default: 1, or what a launcher's
    /// ranks leave]
    #[arg(long)]
    ranks_per_node: Option<u32>,
    #[command(flatten)]
    network: NetworkFlags,
    /// Where the memory is.
    #[arg(long, value_enum, default_value = "virtual")]
    device: DeviceKind,
    /// Bytes of a put, multiples of 16: a list, `a..b` doubles.
    #[arg(long, value_delimiter = ',', default_value = "16,1024,16384,262144,1048576,4194304")]
    sizes: Vec<String>,
    /// Puts under way on a queue: a list, `a..b` doubles.
    #[arg(long, value_delimiter = ',', default_value = "1,16,256")]
    depths: Vec<String>,
    /// Measure the bandwidth with puts of the ranks of node 0 alone, instead of all at once.
    #[arg(long)]
    one_way: bool,
    /// MiB that each rank puts to each peer for a bandwidth, within 32 to 4096 puts a queue.
    #[arg(long, default_value_t = 64)]
    mib: u64,
    /// Untimed puts there and back of a latency.
    #[arg(long, env = "EPOXIDE_BENCH_WARMUP", default_value_t = 5)]
    warmup: u32,
    /// Timed puts there and back of a latency.
    #[arg(long, env = "EPOXIDE_BENCH_ITERS", default_value_t = 20)]
    iters: u32,
    /// Write the results as JSON to this file (docs/BENCH-SCHEMA.md); `-` for standard output, in place of the text.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the results as CSV to this file.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

/// One size and depth.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WirePoint {
    /// Version of the form of this line.
    pub schema_version: u32,
    /// `wire`.
    pub mode: String,
    /// What carries the puts.
    pub transport: String,
    /// Queues to each peer.
    pub queues: u32,
    /// Nodes.
    pub nodes: u32,
    /// Ranks.
    pub num_ranks: u32,
    /// The device's name.
    pub device: String,
    /// True where no device of hardware holds the memory.
    #[serde(rename = "virtual")]
    pub is_virtual: bool,
    /// Day of the measurement, UTC.
    pub date: String,
    /// Bytes of a put.
    pub message_bytes: u64,
    /// Puts under way on a queue.
    pub depth: u64,
    /// Whether only the ranks of node 0 put, for a bandwidth; `gbps` and its like are then theirs.
    pub one_way: bool,
    /// Puts of a rank to each peer.
    pub puts: u64,
    /// GB/s out of a rank, to all peers together, mean over ranks.
    pub gbps: f64,
    /// Of the slowest rank.
    pub min_rank_gbps: f64,
    /// Of the fastest rank.
    pub max_rank_gbps: f64,
    /// Puts of a rank per second, mean over ranks.
    pub puts_per_second: f64,
    /// Half a put there and one back, in microseconds; the same at every depth.
    pub latency: Distribution,
}

/// The object of `--json`.
#[derive(Debug, Serialize, Deserialize)]
struct WireResults {
    schema_version: u32,
    tool: String,
    points: Vec<WirePoint>,
}

/// What is measured.
struct Plan {
    sizes: Vec<u64>,
    depths: Vec<u64>,
    world: World,
}

/// What a rank measured of one size.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct OfSize {
    latency: Vec<f64>,
    /// Seconds by depth.
    seconds: Vec<f64>,
}

/// Measures, prints and stores.
pub fn run(args: &Args) -> Result<()> {
    let points = measure(args)?;
    if !ranks::speaks() {
        return Ok(());
    }
    if let Some(path) = &args.csv {
        csv::write_lines(path, &COLUMNS, points.iter().map(record))?;
    }
    if let Some(path) = &args.json {
        let tool = concat!("epoxide ", env!("CARGO_PKG_VERSION")).to_owned();
        let results = WireResults { schema_version: SCHEMA_VERSION, tool, points: points.clone() };
        let json =
            serde_json::to_string_pretty(&results).map_err(|error| Stop::failed(format!("JSON: {error}")))?;
        write_text(path, &json)?;
        if path.as_os_str() == "-" {
            return Ok(());
        }
    }
    output::text_line(&text(&points))
}

fn measure(args: &Args) -> Result<Vec<WirePoint>> {
    let plan = plan(args)?;
    let results = on_ranks(plan.world, args.device, |device, group| {
        let info = device.info();
        Ok((info.name.clone(), info.is_virtual, rank(args, &plan, &device, group)?))
    })?;
    let Some((device, is_virtual, _)) = results.first() else { return Ok(Vec::new()) };
    let measured: Vec<&Vec<OfSize>> = results.iter().map(|(_, _, of)| of).collect();
    let peers = f64::from(plan.world.nodes - 1);
    let putting = if args.one_way { plan.world.ranks_per_node as usize } else { measured.len() };
    let mut points = Vec::new();
    for (index, &message_bytes) in plan.sizes.iter().enumerate() {
        let timed: Vec<&[f64]> = measured
            .iter()
            .map(|of| of[index].latency.as_slice())
            .filter(|times| !times.is_empty())
            .collect();
        let latency = Distribution::new(&timed);
        let puts = puts_of(args, message_bytes);
        for (at, &depth) in plan.depths.iter().enumerate() {
            let per_rank: Vec<f64> =
                measured.iter().take(putting).map(|of| peers * puts as f64 / of[index].seconds[at]).collect();
            let to_gbps = |puts: f64| gbps(puts * message_bytes as f64, 1e6);
            points.push(WirePoint {
                schema_version: SCHEMA_VERSION,
                mode: "wire".into(),
                transport: args.network.transport.kind().to_string(),
                queues: args.network.queues(args.device),
                nodes: plan.world.nodes,
                num_ranks: plan.world.ranks(),
                device: device.clone(),
                is_virtual: *is_virtual,
                date: today(),
                message_bytes,
                depth,
                one_way: args.one_way,
                puts,
                gbps: to_gbps(mean(&per_rank)),
                min_rank_gbps: to_gbps(per_rank.iter().copied().fold(f64::MAX, f64::min)),
                max_rank_gbps: to_gbps(per_rank.iter().copied().fold(0.0, f64::max)),
                puts_per_second: mean(&per_rank),
                latency: latency.clone(),
            });
        }
    }
    Ok(points)
}

fn plan(args: &Args) -> Result<Plan> {
    let values = |flag: &str, texts: &[String]| -> Result<Vec<u64>> {
        let mut values = Vec::new();
        for text in texts {
            let more = parse_values(text).map_err(|why| Stop::usage(format!("bench wire: {flag} {why}")))?;
            values.extend(more.into_iter().map(u64::from));
        }
        Ok(values)
    };
    let (sizes, depths) = (values("--sizes", &args.sizes)?, values("--depths", &args.depths)?);
    if let Some(size) = sizes.iter().find(|size| !size.is_multiple_of(16) || **size > Poster::LARGEST) {
        let rule = format!("must be a multiple of 16, at most {}", Poster::LARGEST);
        return Err(Stop::usage(format!("bench wire: --sizes {size}: {rule}")));
    }
    if let Some(depth) = depths.iter().find(|depth| **depth > Poster::DEEPEST) {
        let rule = format!("must be 1 to {}, the entries of a queue's ring", Poster::DEEPEST);
        return Err(Stop::usage(format!("bench wire: --depths {depth}: {rule}")));
    }
    if args.iters == 0 {
        return Err(Stop::usage("bench wire: --iters must be at least 1"));
    }
    let launched = launched()?;
    let ranks_per_node = args.ranks_per_node.or(launched.is_none().then_some(1));
    let place = WorldFlags { mode: Some(Mode::Internode), nodes: args.nodes, ranks_per_node };
    Ok(Plan { sizes, depths, world: place.world(Mode::Internode, launched)? })
}

/// Puts of a rank to each peer.
fn puts_of(args: &Args, size: u64) -> u64 {
    let queues = u64::from(args.network.queues(args.device));
    ((args.mib << 20) / size).clamp(PUTS.start() * queues, PUTS.end() * queues)
}

fn rank(
    args: &Args,
    plan: &Plan,
    device: &std::sync::Arc<dyn Device>,
    group: &dyn ProcessGroup,
) -> epoxide::Result<Vec<OfSize>> {
    let options = args.network.options(args.device, TIMEOUT);
    let mut poster = Poster::new(device, group, plan.world, &options, Poster::LARGEST)?;
    let mut measured = Vec::new();
    for &size in &plan.sizes {
        poster.ping_pong(size, args.warmup)?;
        let latency = poster.ping_pong(size, args.iters)?;
        let puts = puts_of(args, size);
        let puts_here = !args.one_way || group.rank() < plan.world.ranks_per_node;
        let total = |puts: u64| vec![if puts_here { puts * size } else { 0 }; plan.world.nodes as usize];
        let mut seconds = Vec::new();
        for &depth in &plan.depths {
            poster.put_all(&total(puts.div_ceil(8)), size, depth, 1)?;
            seconds.push(poster.put_all(&total(puts), size, depth, 1)?.as_secs_f64());
        }
        measured.push(OfSize { latency, seconds });
    }
    poster.close()?;
    Ok(measured)
}

fn text(points: &[WirePoint]) -> String {
    let mut out = String::new();
    let Some(first) = points.first() else { return out };
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "[bench wire] transport={} nodes={} num_ranks={} queues={} one_way={} device={:?}; {}",
        first.transport, first.nodes, first.num_ranks, first.queues, first.one_way, first.device, first.date
    );
    let unit = match first.is_virtual {
        true => {
            let _ = writeln!(out, "  {CAVEAT}");
            "virtual GB/s"
        }
        false => "GB/s",
    };
    let _ = writeln!(
        out,
        "  GB/s out of a rank to all its peers; latency: half of a put there and one back\n  {:>10} {:>6} {:>8} {:>12} {:>10} \
         {:>10} {:>12} {:>12} {:>10} {:>10}",
        "bytes", "depth", "puts", unit, "min rank", "max rank", "puts/s", "latency us", "p90", "p99"
    );
    for point in points {
        let _ = writeln!(
            out,
            "  {:>10} {:>6} {:>8} {:>12.4} {:>10.4} {:>10.4} {:>12.0} {:>12.1} {:>10.1} {:>10.1}",
            point.message_bytes,
            point.depth,
            point.puts,
            point.gbps,
            point.min_rank_gbps,
            point.max_rank_gbps,
            point.puts_per_second,
            point.latency.median_us,
            point.latency.p90_us.unwrap_or_default(),
            point.latency.p99_us
        );
    }
    out.trim_end().to_owned()
}

/// The columns of `--csv`.
const COLUMNS: [&str; 17] = [
    "mode",
    "transport",
    "queues",
    "nodes",
    "num_ranks",
    "device",
    "virtual",
    "date",
    "message_bytes",
    "depth",
    "one_way",
    "puts",
    "gbps",
    "puts_per_second",
    "latency_median_us",
    "latency_p90_us",
    "latency_p99_us",
];

fn record(point: &WirePoint) -> Vec<String> {
    vec![
        point.mode.clone(),
        point.transport.clone(),
        point.queues.to_string(),
        point.nodes.to_string(),
        point.num_ranks.to_string(),
        point.device.clone(),
        point.is_virtual.to_string(),
        point.date.clone(),
        point.message_bytes.to_string(),
        point.depth.to_string(),
        point.one_way.to_string(),
        point.puts.to_string(),
        point.gbps.to_string(),
        point.puts_per_second.to_string(),
        point.latency.median_us.to_string(),
        point.latency.p90_us.map_or_else(String::new, |us| us.to_string()),
        point.latency.p99_us.to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn arguments(line: &str) -> Args {
        let small = "wire --mib 1 --warmup 1 --iters 5";
        Line::try_parse_from(small.split_whitespace().chain(line.split_whitespace())).unwrap().args
    }

    #[test]
    fn every_transport_is_measured_at_every_size_and_depth() {
        for line in [
            "--transport shm --sizes 16,65536 --depths 1,256",
            "--transport tcp --sizes 4096..16384 --depths 4 --queues 2",
            "--transport shm --sizes 1024 --depths 8 --nodes 3 --ranks-per-node 2",
            "--transport tcp --sizes 1024 --depths 8 --nodes 3 --one-way",
            "--transport direct --sizes 16,65536 --depths 1,16 --nodes 3",
        ] {
            let args = arguments(line);
            let points = measure(&args).unwrap();
            let plan = plan(&args).unwrap();
            assert_eq!(points.len(), plan.sizes.len() * plan.depths.len(), "{line}");
            for point in &points {
                assert!(point.gbps > 0.0 && point.min_rank_gbps <= point.max_rank_gbps, "{point:?}");
                assert_eq!(point.latency.samples_us.len(), 5);
                assert!(point.latency.median_us > 0.0 && point.is_virtual);
            }
            let text = text(&points);
            assert!(text.contains(CAVEAT) && text.contains("virtual GB/s"), "{text}");
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("wire.csv");
            csv::write_lines(&path, &COLUMNS, points.iter().map(record)).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), points.len() + 1);
        }
    }

    #[test]
    fn what_cannot_be_put_is_said() {
        for (line, part) in [
            ("--sizes 24", "--sizes 24: must be a multiple of 16"),
            ("--sizes 0", "--sizes 0"),
            ("--depths 257", "--depths 257: must be 1 to 256"),
            ("--nodes 1", "--nodes 1"),
            ("--iters 0", "--iters"),
        ] {
            // Of two of a flag the last one counts.
            let words = ["wire"].into_iter().chain(line.split_whitespace());
            let args = Line::try_parse_from(words).unwrap().args;
            let message = measure(&args).unwrap_err().message.unwrap();
            assert!(message.contains(part), "{message}");
        }
    }
}

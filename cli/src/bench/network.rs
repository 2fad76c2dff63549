//! `epoxide bench wire`: measures the network between nodes alone, and prints and stores what it
//! does.

use std::fmt::Write;
use std::path::PathBuf;

use epoxide_bench::network::{self, NetworkPlan, WirePoint, WireResults};
use epoxide_bench::sweep::parse_values;

use super::csv;
use super::report::Tail;
use super::start::{launched, on_ranks};
use crate::error::{CommandError, Result};
use crate::options::{DeviceKind, Mode, NetworkFlags, WorldFlags};
use crate::output::{self, Progress, write_text};
use crate::ranks;

/// Note on every figure without hardware behind it.
const CAVEAT: &str = "VIRTUAL GPU: puts between memories of one host, of no hardware";

/// Flags of `epoxide bench wire`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Nodes [default: 2, or where a launcher started the ranks as many as it has hosts]
    #[arg(long)]
    nodes: Option<u32>,
    /// Ranks of a node; each puts to the ranks with its index on the other nodes, all at once
    /// [default: 1; with a launcher, its ranks divided by the nodes]
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
    /// Measure the bandwidth with puts of the ranks of node 0 alone, instead of all at once, until
    /// they have arrived.
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
    /// Write the results as JSON to this file (docs/BENCH-SCHEMA.md); `-` for standard output, in
    /// place of the text.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the results as CSV to this file.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

/// Measures, prints and stores.
pub fn run(args: &Args) -> Result<()> {
    let plan = args.plan()?;
    for (flag, path) in [("--json", &args.json), ("--csv", &args.csv)].into_iter().filter(|_| ranks::prints())
    {
        output::check_file(flag, path.as_deref())?;
    }
    let progress = Progress::new("bench wire", 0, ranks::prints());
    let points = measure(&plan, args.device)?;
    drop(progress);
    if !ranks::prints() {
        return Ok(());
    }
    if args.json.as_ref().is_none_or(|path| path.as_os_str() != "-") {
        output::text_line(&text(&points))?;
    }
    if let Some(path) = &args.csv {
        csv::write_lines(path, points.iter().map(record))?;
    }
    match &args.json {
        Some(path) => write_text(path, &WireResults::new(points).json()?),
        None => Ok(()),
    }
}

fn measure(plan: &NetworkPlan, device: DeviceKind) -> Result<Vec<WirePoint>> {
    let ranks = on_ranks(plan.topology, device, |device, group| network::rank(plan, &device, &**group))?;
    Ok(network::points(plan, &ranks))
}

impl Args {
    /// The plan that the flags give.
    fn plan(&self) -> Result<NetworkPlan> {
        let values = |flag: &str, texts: &[String]| -> Result<Vec<u64>> {
            let mut values = Vec::new();
            for text in texts {
                let more = parse_values(text)
                    .map_err(|why| CommandError::usage(format!("bench wire: {flag} {why}")))?;
                values.extend(more.into_iter().map(u64::from));
            }
            Ok(values)
        };
        let (sizes, depths) = (values("--sizes", &self.sizes)?, values("--depths", &self.depths)?);
        let launched = launched()?;
        let ranks_per_node = self.ranks_per_node.or(launched.is_none().then_some(1));
        let place =
            WorldFlags { mode: Some(Mode::Internode), nodes: self.nodes, ranks_per_node, keep_nodes: false };
        let plan = NetworkPlan {
            sizes,
            depths,
            topology: place.topology(Mode::Internode, launched)?,
            transport: self.network.transport,
            queues: self.network.queues(self.device),
            connections: self.network.connections,
            one_way: self.one_way,
            mib: self.mib,
            warmup: self.warmup,
            iters: self.iters,
        };
        plan.check()?;
        Ok(plan)
    }
}

fn text(points: &[WirePoint]) -> String {
    let mut out = String::new();
    let Some(first) = points.first() else { return out };
    let WirePoint { transport, nodes, num_ranks, queues, one_way, device, date, commit, .. } = first;
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "[bench wire] transport={transport} nodes={nodes} num_ranks={num_ranks} queues={queues} one_way={one_way} device={device:?}; {date}, \
         commit {commit}"
    );
    if first.is_virtual {
        let _ = writeln!(out, "  {CAVEAT}");
    }
    let tail = Tail::of(points.iter().map(|point| &point.latency.samples_us[..]));
    let unit = if first.is_virtual { "virtual GB/s" } else { "GB/s" };
    let _ = writeln!(
        out,
        "  GB/s out of a rank to all its peers; latency: half of a put there and one back\n  {:>10}  depth     puts {unit:>12}   min rank   max \
         rank       puts/s   latency us        p90        {}",
        "bytes",
        tail.title()
    );
    for point in points {
        let WirePoint { message_bytes, depth, puts, gbps, min_rank_gbps, max_rank_gbps, .. } = point;
        let median = point.latency.median_us;
        let slow = tail.text(point.latency.p99_us, &point.latency.samples_us, 1);
        let (rate, p90) = (point.puts_per_second, point.latency.p90_us.unwrap_or_default());
        let _ = write!(out, "  {message_bytes:>10} {depth:>6} {puts:>8} {gbps:>12.4} {min_rank_gbps:>10.4}");
        let _ = writeln!(out, " {max_rank_gbps:>10.4} {rate:>12.0} {median:>12.1} {p90:>10.1} {slow:>10}");
    }
    out.trim_end().to_owned()
}

/// The line of a point in `--csv`.
fn record(point: &WirePoint) -> Vec<csv::Field> {
    vec![
        ("mode", point.mode.clone()),
        ("transport", point.transport.clone()),
        ("queues", point.queues.to_string()),
        ("nodes", point.nodes.to_string()),
        ("num_ranks", point.num_ranks.to_string()),
        ("device", point.device.clone()),
        ("virtual", point.is_virtual.to_string()),
        ("date", point.date.clone()),
        ("commit", point.commit.clone()),
        ("message_bytes", point.message_bytes.to_string()),
        ("depth", point.depth.to_string()),
        ("one_way", point.one_way.to_string()),
        ("puts", point.puts.to_string()),
        ("gbps", point.gbps.to_string()),
        ("puts_per_second", point.puts_per_second.to_string()),
        ("latency_median_us", point.latency.median_us.to_string()),
        ("latency_p90_us", point.latency.p90_us.map_or_else(String::new, |us| us.to_string())),
        ("latency_p99_us", point.latency.p99_us.to_string()),
    ]
}

#[cfg(test)]
mod tests {
    use epoxide_testing::tier;

    use super::*;
    use crate::testing::parse;

    fn arguments(line: &str) -> Args {
        let small = "wire --mib 1 --warmup 1 --iters 5";
        parse(small.split_whitespace().chain(line.split_whitespace())).unwrap()
    }

    #[test]
    fn every_transport_is_measured_at_every_size_and_depth() {
        for line in tier::sample([
            "--transport shm --sizes 1024,65536 --depths 1,256 --nodes 3 --ranks-per-node 2",
            "--transport tcp --sizes 4096..16384 --depths 4 --queues 2",
            "--transport shm --sizes 16,65536 --depths 1,256",
            "--transport tcp --sizes 1024 --depths 8 --nodes 3 --one-way",
            "--transport direct --sizes 16,65536 --depths 1,16 --nodes 3",
        ]) {
            let args = arguments(line);
            let plan = args.plan().unwrap();
            let points = measure(&plan, args.device).unwrap();
            assert_eq!(points.len(), plan.sizes.len() * plan.depths.len(), "{line}");
            for point in &points {
                assert!(point.gbps > 0.0 && point.min_rank_gbps <= point.max_rank_gbps, "{point:?}");
                assert_eq!(point.latency.samples_us.len(), 5);
                assert!(point.latency.median_us > 0.0 && point.is_virtual);
            }
            let text = text(&points);
            assert!(text.contains(CAVEAT) && text.contains("virtual GB/s"), "{text}");
            assert!(text.contains("p90        max\n"), "{text}");
            let commit = &points[0].commit;
            assert!(!commit.is_empty() && text.contains(&format!("commit {commit}\n")), "{text}");
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("wire.csv");
            csv::write_lines(&path, points.iter().map(record)).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), points.len() + 1);
        }
    }

    #[test]
    fn impossible_puts_are_rejected_by_name() {
        for (line, part) in [
            ("--sizes 24", "--sizes 24: must be a multiple of 16"),
            ("--sizes 0", "--sizes 0"),
            ("--depths 257", "--depths 257: must be 1 to 256"),
            ("--nodes 1", "--nodes 1"),
            ("--iters 0", "--iters"),
            ("--iters 4294967295", "--iters 4294967295: must be at most 100000"),
            ("--warmup 4294967295", "--warmup 4294967295: must be at most 100000"),
        ] {
            // The last of two equal flags counts.
            let words = ["wire"].into_iter().chain(line.split_whitespace());
            let args: Args = parse(words).unwrap();
            let message = args.plan().unwrap_err().message.unwrap();
            assert!(message.contains(part), "{message}");
        }
    }
}

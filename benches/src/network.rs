//! Puts over the network between nodes, measured by size and by the number under way. No kernel
//! runs. Host code posts to the proxies' rings, so the figures include ring and proxy, as for a
//! kernel. Mapped peers have no queue that a kernel could use. Puts to them are copies on a stream,
//! by the devices' copy engines.

use epoxide::driver::Device;
use epoxide::group::ProcessGroup;
use epoxide::internal::Topology;
use epoxide::transport::{TransportKind, TransportOptions};
use serde::{Deserialize, Serialize};

use crate::plan::check_count;
use crate::puts::Poster;
use crate::results::{Distribution, SCHEMA_VERSION, gbps, json_of, mean, today};
use crate::versions::Versions;
use crate::{Error, Result, TIMEOUT};

/// Fewest and most puts that a bandwidth is measured with, on each queue.
const PUTS: std::ops::RangeInclusive<u64> = 32..=4096;

/// One size and depth.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WirePoint {
    /// Version of the form of this line.
    pub schema_version: u32,
    /// `wire`.
    pub mode: String,
    /// Transport of the puts.
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
    /// Commit of the program, as in [`Versions::commit`]; empty in files of before. No kernel runs.
    #[serde(default)]
    pub commit: String,
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
    /// Bandwidth of the slowest rank.
    pub min_rank_gbps: f64,
    /// Bandwidth of the fastest rank.
    pub max_rank_gbps: f64,
    /// Puts of a rank per second, mean over ranks.
    pub puts_per_second: f64,
    /// Half a put there and one back, in microseconds; the same at every depth.
    pub latency: Distribution,
}

/// A results file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WireResults {
    /// [`SCHEMA_VERSION`] of the writer.
    pub schema_version: u32,
    /// Program that wrote it.
    pub tool: String,
    /// Measured points.
    pub points: Vec<WirePoint>,
}

impl WireResults {
    /// A file of this program.
    pub fn new(points: Vec<WirePoint>) -> WireResults {
        let tool = concat!("epoxide ", env!("CARGO_PKG_VERSION")).to_owned();
        WireResults { schema_version: SCHEMA_VERSION, tool, points }
    }

    /// The results as JSON.
    ///
    /// # Errors
    /// Where a figure has no JSON form.
    pub fn json(&self) -> Result<String> {
        json_of(self)
    }
}

/// Settings of the measurement.
#[derive(Debug, Clone)]
pub struct NetworkPlan {
    /// Bytes of a put, multiples of 16.
    pub sizes: Vec<u64>,
    /// Puts under way on a queue.
    pub depths: Vec<u64>,
    /// Nodes and ranks.
    pub topology: Topology,
    /// The network between the nodes.
    pub transport: TransportKind,
    /// Queues to each peer.
    pub queues: u32,
    /// Connections of each queue over tcp, if given.
    pub connections: Option<u32>,
    /// The ranks of node 0 alone put for a bandwidth, instead of all at once.
    pub one_way: bool,
    /// MiB that each rank puts to each peer for a bandwidth, within 32 to 4096 puts a queue.
    pub mib: u64,
    /// Untimed puts there and back of a latency.
    pub warmup: u32,
    /// Timed puts there and back of a latency.
    pub iters: u32,
}

/// Measurements of one rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct OfRank {
    /// The device's name.
    pub device: String,
    /// True where no device of hardware holds the memory.
    pub is_virtual: bool,
    /// Measurements by size.
    pub sizes: Vec<OfSize>,
}

/// Measurements of one rank for one size.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct OfSize {
    /// Microseconds; empty on ranks that answered or have no partner.
    pub latency: Vec<f64>,
    /// Seconds by depth.
    pub seconds: Vec<f64>,
}

impl NetworkPlan {
    /// # Errors
    /// An error if the plan cannot be measured.
    pub fn check(&self) -> Result<()> {
        if let Some(size) =
            self.sizes.iter().find(|size| !size.is_multiple_of(16) || **size > Poster::LARGEST)
        {
            let rule = format!("must be a multiple of 16, at most {}", Poster::LARGEST);
            return Err(Error::Usage(format!("bench wire: --sizes {size}: {rule}")));
        }
        if let Some(depth) = self.depths.iter().find(|depth| **depth > Poster::DEEPEST) {
            let rule = format!("must be 1 to {}, the entries of a queue's ring", Poster::DEEPEST);
            return Err(Error::Usage(format!("bench wire: --depths {depth}: {rule}")));
        }
        check_count("bench wire: --iters", self.iters, 1)?;
        check_count("bench wire: --warmup", self.warmup, 0)
    }

    /// Puts of a rank to each peer.
    fn puts_of(&self, size: u64) -> u64 {
        let queues = u64::from(self.queues);
        (self.mib.saturating_mul(1 << 20) / size).clamp(PUTS.start() * queues, PUTS.end() * queues)
    }
}

/// Makes a point of every size and depth that `ranks`, in rank order, measured.
pub fn points(plan: &NetworkPlan, ranks: &[OfRank]) -> Vec<WirePoint> {
    let Some(first) = ranks.first() else { return Vec::new() };
    let measured: Vec<&Vec<OfSize>> = ranks.iter().map(|rank| &rank.sizes).collect();
    let peers = f64::from(plan.topology.nodes - 1);
    let ranks_per_node = plan.topology.ranks_per_node as usize;
    let putting = if plan.one_way { ranks_per_node } else { measured.len() };
    // One way, a sender's own time ends when its bytes have left. A receiver's ends when they have
    // arrived.
    let seconds = |rank: usize, size: usize, depth: usize| {
        let receivers = measured.iter().skip(rank + ranks_per_node).step_by(ranks_per_node);
        let others = receivers.filter(|_| plan.one_way).map(|of| of[size].seconds[depth]);
        others.fold(measured[rank][size].seconds[depth], f64::max)
    };
    let mut points = Vec::new();
    for (index, &message_bytes) in plan.sizes.iter().enumerate() {
        let timed = measured.iter().map(|of| of[index].latency.as_slice());
        let latency = Distribution::new(&timed.filter(|times| !times.is_empty()).collect::<Vec<_>>());
        let puts = plan.puts_of(message_bytes);
        for (at, &depth) in plan.depths.iter().enumerate() {
            let per_rank: Vec<f64> =
                (0..putting).map(|rank| peers * puts as f64 / seconds(rank, index, at)).collect();
            let to_gbps = |puts: f64| gbps(puts * message_bytes as f64, 1e6);
            points.push(WirePoint {
                schema_version: SCHEMA_VERSION,
                mode: "wire".into(),
                transport: plan.transport.to_string(),
                queues: plan.queues,
                nodes: plan.topology.nodes,
                num_ranks: plan.topology.ranks(),
                device: first.device.clone(),
                is_virtual: first.is_virtual,
                date: today(),
                commit: Versions::commit_of_this_program(),
                message_bytes,
                depth,
                one_way: plan.one_way,
                puts,
                gbps: to_gbps(mean(&per_rank)),
                min_rank_gbps: to_gbps(per_rank.iter().copied().fold(f64::MAX, f64::min)),
                max_rank_gbps: to_gbps(per_rank.iter().copied().fold(0.0, f64::max)),
                puts_per_second: mean(&per_rank),
                latency: latency.clone(),
            });
        }
    }
    points
}

/// Runs rank `group.rank()`. Collective.
///
/// # Errors
/// Errors of the transport.
pub fn rank(plan: &NetworkPlan, device: &Device, group: &dyn ProcessGroup) -> epoxide::Result<OfRank> {
    let options = TransportOptions {
        queues_per_peer: plan.queues,
        connections_per_queue: plan.connections,
        timeout: TIMEOUT,
        ..TransportOptions::new(plan.transport)
    };
    let mut poster = Poster::new(device, group, plan.topology, &options, Poster::LARGEST)?;
    let mut sizes = Vec::new();
    for &size in &plan.sizes {
        poster.ping_pong(size, plan.warmup)?;
        let latency = poster.ping_pong(size, plan.iters)?;
        let puts = plan.puts_of(size);
        let puts_here = !plan.one_way || group.rank() < plan.topology.ranks_per_node;
        let total = |puts: u64| vec![if puts_here { puts * size } else { 0 }; plan.topology.nodes as usize];
        let mut seconds = Vec::new();
        for &depth in &plan.depths {
            poster.put_all(&total(puts.div_ceil(8)), size, depth, 1)?;
            seconds.push(poster.put_all(&total(puts), size, depth, 1)?.as_secs_f64());
        }
        sizes.push(OfSize { latency, seconds });
    }
    poster.close()?;
    let info = device.info();
    Ok(OfRank { device: info.name.clone(), is_virtual: info.is_virtual, sizes })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Over tcp the bytes of a sender have left when its socket has them.
    #[test]
    fn puts_of_one_way_take_until_they_have_arrived() {
        let plan = |one_way| NetworkPlan {
            sizes: vec![1 << 20],
            depths: vec![1],
            topology: Topology { nodes: 3, ranks_per_node: 2 },
            transport: TransportKind::Tcp,
            queues: 1,
            connections: None,
            one_way,
            mib: 64,
            warmup: 0,
            iters: 1,
        };
        // The rank with index 0 of node 1 is the last to have its bytes, and index 1 of node 2.
        let seconds = [0.1, 0.2, 0.5, 0.3, 0.4, 0.8];
        let of_size = |seconds| OfSize { latency: Vec::new(), seconds: vec![seconds] };
        let rank = |seconds| OfRank { device: "a".into(), is_virtual: true, sizes: vec![of_size(seconds)] };
        let rates = |one_way| {
            let point = points(&plan(one_way), &seconds.map(rank)).remove(0);
            let rate = |seconds: f64| 2.0 * 64.0 * f64::from(1 << 20) / 1e9 / seconds;
            [point.max_rank_gbps, point.min_rank_gbps].map(|gbps| rate(1.0) / gbps)
        };
        let close = |a: [f64; 2], b: [f64; 2]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-9);
        assert!(close(rates(true), [0.5, 0.8]), "{:?}", rates(true));
        assert!(close(rates(false), [0.1, 0.8]), "{:?}", rates(false));
    }
}

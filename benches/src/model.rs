//! Predicted times for sizes that cannot be run here, from measured figures and exact counts.
//!
//! A call takes a fixed time plus that of its slowest resource, since bytes stream through all of
//! them at once:
//!
//! | resource | bytes of a rank | rate |
//! |---|---|---|
//! | multiprocessors | every row that they move, own ones and those staged for the NIC included | per multiprocessor, measured |
//! | NVLink | rows to (dispatch) or from (combine) other ranks of the node | the measured ceiling of plain bulk copies |
//! | NIC | one slot, row and metadata, for each (token, other node), the same both ways | as given |
//!
//! Across nodes a token travels once to each node with a destination, to the rank with the sender's
//! index in that node. The receiving rank passes it on over NVLink. Combine is the same backwards
//! with sums on the way. [`check`] compares the model with measurements of hardware, of one node
//! and of several. The existing ones are of one.

use std::collections::BTreeSet;
use std::fmt::Write;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use crate::counts::{self, Sizes, TokenCounts, random_topk};
use crate::results::{Key, PhaseName, Point};
use crate::{Error, Result};

/// The kernels that the figures were measured with.
pub const FITTED: &str =
    "the model's constants are of the kernels of 2026-11-20 on 8 and 4 H200, not of this program's";

/// Measured figures of a machine. GB/s are 1e9 bytes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Machine {
    /// Ceiling of pushes over NVLink by multiprocessors, where the links limit: ascending.
    pub push_gbps: Vec<(u32, f64)>,
    /// The same of pulls.
    pub pull_gbps: Vec<(u32, f64)>,
    /// Bandwidth of one multiprocessor's stores in a dispatch, own rows included.
    pub sm_push_gbps: f64,
    /// Bandwidth of one multiprocessor's loads in a combine, own rows included.
    pub sm_pull_gbps: f64,
    /// A dispatch's fixed part: launch, the ready and done words, the tail.
    pub dispatch_us: f64,
    /// A combine's.
    pub combine_us: f64,
    /// Extra time of an uncached dispatch: the count exchange.
    pub notify_us: f64,
    /// Time of one multiprocessor for the metadata of a row, in ns.
    pub metadata_ns: f64,
    /// Copy of rows into the pool, GB/s of rows.
    pub staging_gbps: f64,
    /// GB/s of a rank's NIC, each way.
    pub nic_gbps: f64,
    /// A hop between nodes.
    pub nic_latency_us: f64,
}

impl Machine {
    /// 8 x H200, 2026-11-20: docs/BENCHMARKS.md.
    pub fn h200(nic_gbps: f64, nic_latency_us: f64) -> Machine {
        Machine {
            push_gbps: [
                (12, 321.0),
                (16, 326.0),
                (24, 328.0),
                (32, 330.0),
                (48, 337.0),
                (64, 338.0),
                (132, 343.0),
            ]
            .to_vec(),
            pull_gbps: vec![(12, 327.0)],
            sm_push_gbps: 49.5,
            sm_pull_gbps: 61.5,
            dispatch_us: 8.0,
            combine_us: 13.0,
            notify_us: 14.0,
            metadata_ns: 9.5,
            staging_gbps: 1_820.0,
            nic_gbps,
            nic_latency_us,
        }
    }

    /// Takes the links' ceilings from measured points: those that the multiprocessors' own rate
    /// does not hide.
    ///
    /// # Errors
    /// No point has a ceiling.
    pub fn with_ceilings_of(mut self, points: &[Point]) -> Result<Machine> {
        let ceilings = |name: PhaseName, sm_gbps: f64| {
            let mut of_sms: Vec<(u32, f64)> = points
                .iter()
                .filter_map(|point| {
                    let ceiling = point.phase(name)?.bandwidth.as_ref()?.link_ceiling?;
                    let visible = ceiling < 0.75 * sm_gbps * f64::from(point.key.num_sms);
                    visible.then_some((point.key.num_sms, ceiling))
                })
                .collect();
            of_sms.sort_by(|a, b| a.0.cmp(&b.0).then(b.1.total_cmp(&a.1)));
            of_sms.dedup_by_key(|(sms, _)| *sms);
            of_sms
        };
        self.push_gbps = ceilings(PhaseName::DispatchCached, self.sm_push_gbps);
        self.pull_gbps = ceilings(PhaseName::CombineInPool, self.sm_pull_gbps);
        match self.push_gbps.is_empty() || self.pull_gbps.is_empty() {
            true => Err(Error::Usage(
                "--from: no link ceiling of hardware with enough SMs in these results".into(),
            )),
            false => Ok(self),
        }
    }
}

/// Linear between the entries, level beyond them.
fn at(table: &[(u32, f64)], sms: u32) -> f64 {
    let above = table.iter().position(|entry| entry.0 >= sms);
    match above {
        Some(0) => table[0].1,
        Some(i) => {
            let ((x0, y0), (x1, y1)) = (table[i - 1], table[i]);
            y0 + (y1 - y0) * f64::from(sms - x0) / f64::from(x1 - x0)
        }
        None => table[table.len() - 1].1,
    }
}

/// A case to predict.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Ranks, experts, top-k.
    pub sizes: Sizes,
    /// Multiprocessors.
    pub num_sms: u32,
    /// Bytes of a dispatched row, scales included.
    pub dispatch_row_bytes: u64,
    /// Bytes of a combined row.
    pub combine_row_bytes: u64,
    /// Whether nodes reach each other over NVLink as well: kernels write into mapped memory.
    pub mapped: bool,
}

/// One phase's prediction for a rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prediction {
    /// The phase.
    pub phase: PhaseName,
    /// Microseconds.
    pub us: f64,
    /// Bytes over NVLink, out in a dispatch and in in a combine; where nodes are mapped with the
    /// rows for other nodes.
    pub nvlink_bytes: f64,
    /// Bytes over the NIC, each way.
    pub nic_bytes: f64,
    /// The resource that limits the time.
    pub limit: &'static str,
}

impl Case {
    /// Predicts a phase. `six`: a rank's counts of a dispatch.
    pub fn predict(&self, phase: PhaseName, six: TokenCounts<f64>, machine: &Machine) -> Prediction {
        let per_node = f64::from(self.sizes.ranks_per_node);
        let row = if phase.is_dispatch() { self.dispatch_row_bytes } else { self.combine_row_bytes } as f64;
        // One in `per_node` of a node's rows is for the rank that already has them.
        let nvlink_bytes = six.recv_total * (per_node - 1.0) / per_node * row;
        // A combine sends as many sums as it received rows, on average as many as a rank sends.
        let slot_bytes = six.send_rdma * phase.slot_bytes(row as u64, self.sizes.topk) as f64;
        let (nvlink_bytes, nic_bytes) =
            if self.mapped { (nvlink_bytes + slot_bytes, 0.0) } else { (nvlink_bytes, slot_bytes) };
        let sm_bytes = (six.recv_total + six.send_rdma) * row;
        let sms = f64::from(self.num_sms);
        let (link, sm, fixed) = match phase.is_dispatch() {
            true => (at(&machine.push_gbps, self.num_sms), machine.sm_push_gbps, machine.dispatch_us),
            false => (at(&machine.pull_gbps, self.num_sms), machine.sm_pull_gbps, machine.combine_us),
        };
        let (limit, streaming) = [
            ("SMs", sm_bytes / (sm * sms)),
            ("NVLink", nvlink_bytes / link),
            ("NIC", nic_bytes / machine.nic_gbps),
        ]
        .into_iter()
        .fold(("SMs", 0.0), |slowest, next| if next.1 > slowest.1 { next } else { slowest });
        let extra = match phase {
            PhaseName::DispatchUncached => {
                machine.notify_us + six.recv_total * machine.metadata_ns / 1e3 / sms
            }
            PhaseName::CombineStaged => six.recv_total * row / machine.staging_gbps / 1e3,
            _ => 0.0,
        };
        let over_nic = self.sizes.ranks > self.sizes.ranks_per_node && !self.mapped;
        let hop = if over_nic { machine.nic_latency_us } else { 0.0 };
        Prediction { phase, us: fixed + streaming / 1e3 + extra + hop, nvlink_bytes, nic_bytes, limit }
    }
}

/// Most entries of all ranks' tokens in a sample, of 8 bytes each.
const MOST_ENTRIES: u64 = 1 << 27;

/// Mean counts, and the most rows that a rank receives, of `sample` random tokens a rank, scaled to
/// `tokens`.
///
/// # Errors
/// Where the sample is empty, or larger than a machine can draw.
pub fn sampled(sample: u32, tokens: f64, sizes: Sizes) -> Result<(TokenCounts<f64>, f64)> {
    let entries = u64::from(sample) * u64::from(sizes.ranks) * u64::from(sizes.topk);
    if sample == 0 || entries > MOST_ENTRIES {
        let most = MOST_ENTRIES / (u64::from(sizes.ranks) * u64::from(sizes.topk)).max(1);
        return Err(Error::Usage(format!("model: --sampled {sample}: must be 1 to {most} for these sizes")));
    }
    let ids: Vec<Vec<i64>> = (0..u64::from(sizes.ranks))
        .map(|rank| {
            let mut rng = ChaCha8Rng::seed_from_u64(0xA1B2 + rank);
            random_topk(&mut rng, sample, sizes.topk, sizes.experts, 0.0)
        })
        .collect();
    let counts = counts::serial(&ids, sizes);
    let scale = tokens / f64::from(sample);
    let most = counts.iter().map(|rank| rank.six.recv_total).max().unwrap_or(0);
    Ok((counts::mean(&counts).map(|tokens| tokens * scale), most as f64 * scale))
}

/// A measured phase and the model's prediction.
#[derive(Debug)]
pub struct Checked<'a> {
    point: &'a Point,
    phase: PhaseName,
    measured_us: f64,
    predicted: Prediction,
}

impl Checked<'_> {
    /// Predicted over measured, less one.
    pub fn error(&self) -> f64 {
        self.predicted.us / self.measured_us - 1.0
    }
}

/// Whether the model has what a point measured: high throughput of rows by token, on hardware.
fn is_modelled(point: &Point) -> bool {
    !point.is_virtual && !point.is_low_latency() && point.key.rows_by_expert.is_none()
}

/// Predicts every measured phase of hardware from its sizes alone. Points that the model does not
/// have are left out.
pub fn check<'a>(points: &'a [Point], machine: &Machine) -> Vec<Checked<'a>> {
    let mut checked = Vec::new();
    for point in points.iter().filter(|point| is_modelled(point)) {
        let key = &point.key;
        let row_bytes = |name| point.phase(name).map_or(0, |phase| phase.row_bytes);
        let nodes = if point.is_internode() { key.nodes } else { 1 };
        let case = Case {
            sizes: Sizes {
                ranks: key.num_ranks,
                ranks_per_node: key.num_ranks / nodes,
                experts: key.experts,
                topk: key.topk,
            },
            num_sms: key.num_sms,
            dispatch_row_bytes: row_bytes(PhaseName::DispatchCached),
            combine_row_bytes: row_bytes(PhaseName::CombineInPool),
            // Rows for other nodes without puts.
            mapped: point
                .phases
                .iter()
                .filter_map(|phase| phase.wire.as_ref())
                .any(|wire| wire.rows > 0.0 && wire.bytes == 0.0),
        };
        let six = counts::expected(f64::from(key.tokens), case.sizes);
        for phase in &point.phases {
            // Across nodes, the network that was measured with the point.
            let network = phase.bandwidth.as_ref().and_then(|bandwidth| bandwidth.wire_ceiling);
            let machine = Machine { nic_gbps: network.unwrap_or(machine.nic_gbps), ..machine.clone() };
            let predicted = case.predict(phase.name, six, &machine);
            checked.push(Checked { point, phase: phase.name, measured_us: phase.call.avg_us, predicted });
        }
    }
    checked
}

/// The results of [`check`] of these points, as a table.
pub fn check_text(checked: &[Checked<'_>], points: &[Point]) -> String {
    let mut out =
        "nodes ranks   SMs dtype phase              measured us    model us   error  limit".to_owned();
    for c in checked {
        let Key { nodes, num_ranks, num_sms, dtype, .. } = &c.point.key;
        let (phase, measured, error) = (c.phase.text(), c.measured_us, 100.0 * c.error());
        let Prediction { us, limit, .. } = c.predicted;
        let _ = write!(out, "\n{nodes:>5} {num_ranks:>5} {num_sms:>5} {dtype:<5} {phase:<18}");
        let _ = write!(out, " {measured:>11.1} {us:>11.1} {error:>6.1}%  {limit}");
    }
    let worst = checked.iter().map(|c| c.error().abs()).fold(0.0, f64::max);
    let _ = write!(out, "\n{} points, largest error {:.1}%", checked.len(), 100.0 * worst);
    let left_out = points.iter().filter(|point| !is_modelled(point)).count();
    if left_out > 0 {
        let _ = write!(out, "\nleft out: {left_out} points of low latency, rows by expert or virtual GPUs");
    }
    let kernels: BTreeSet<String> = checked.iter().map(|c| c.point.kernels_text()).collect();
    for kernels in kernels {
        let _ = write!(out, "\nmeasured kernels: {kernels}");
    }
    let _ = write!(out, "\n{FITTED}");
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::Bandwidth;
    use crate::tests::{h200 as measured, measured as measured_here};

    #[test]
    fn every_measured_point_is_within_15_percent() {
        let points = measured();
        let own = Machine::h200(50.0, 10.0);
        let from_file = own.clone().with_ceilings_of(&points).unwrap();
        for machine in [own, from_file] {
            let checked = check(&points, &machine);
            assert_eq!(checked.len(), 36 * 4);
            for c in &checked {
                let error = c.error();
                assert!(error.abs() <= 0.15, "{} SMs, {:?}: {error}", c.point.key.num_sms, c.predicted);
            }
            // Not by luck of a wide band: half of the points are within 3%.
            let close = checked.iter().filter(|c| c.error().abs() <= 0.03).count();
            assert!(close * 2 > checked.len(), "{close}");
        }
    }

    #[test]
    fn a_table_is_linear_inside_and_level_outside() {
        let table = [(4, 10.0), (8, 20.0)];
        assert_eq!([2, 4, 5, 8, 99].map(|sms| at(&table, sms)), [10.0, 10.0, 12.5, 20.0, 20.0]);
    }

    #[test]
    fn nodes_are_limited_by_what_is_slowest() {
        let case = |nodes: u32, experts| Case {
            sizes: Sizes { ranks: nodes * 8, ranks_per_node: 8, experts, topk: 8 },
            num_sms: 24,
            dispatch_row_bytes: 14_336,
            combine_row_bytes: 14_336,
            mapped: false,
        };
        let predict = |nodes, nic| {
            let case = case(nodes, 1024);
            let six = counts::expected(4096.0, case.sizes);
            case.predict(PhaseName::DispatchCached, six, &Machine::h200(nic, 10.0))
        };
        assert_eq!(predict(1, 50.0).nic_bytes, 0.0);
        assert_eq!(predict(1, 50.0).limit, "NVLink");
        assert_eq!(predict(16, 50.0).limit, "NIC");
        assert_eq!(predict(2, 1e6).limit, "NVLink");
        assert!(predict(128, 50.0).us > predict(16, 50.0).us && predict(16, 100.0).us < predict(16, 50.0).us);
        // At most top-8 nodes of a token: the NIC's bytes level off.
        let most = 8.0 * 4096.0 * 14_336.0;
        assert!(predict(128, 50.0).nic_bytes < most && predict(128, 50.0).nic_bytes > 0.9 * most);
        // Over NVLink the links carry the same bytes, without another hop.
        let over_links = Case { mapped: true, ..case(2, 256) };
        let over_nic = case(2, 256);
        let six = counts::expected(4096.0, over_nic.sizes);
        let [links, nic] = [over_links, over_nic]
            .map(|case| case.predict(PhaseName::DispatchCached, six, &Machine::h200(1e6, 10.0)));
        assert_eq!((links.nic_bytes, links.limit), (0.0, "NVLink"));
        assert_eq!(links.nvlink_bytes, nic.nvlink_bytes + nic.nic_bytes);
    }

    #[test]
    fn points_across_nodes_are_checked_with_the_network_they_were_measured_with() {
        let (mut points, _) =
            measured_here("--nodes 2 --ranks-per-node 2 --num-sms 4 --experts 8 --transport tcp");
        let point = &mut points[0];
        point.is_virtual = false;
        for phase in &mut point.phases {
            phase.bandwidth = Some(Bandwidth {
                links: 1.0,
                link_ceiling: None,
                wire: None,
                wire_ceiling: Some(1e-3),
                deepep: 1.0,
                nccl_ep: point.counts,
                mscclpp: None,
            });
        }
        let checked = check(&points, &Machine::h200(50.0, 10.0));
        assert_eq!(checked.len(), 4);
        for c in &checked {
            let expected = counts::expected(8.0, Sizes { ranks: 4, ranks_per_node: 2, experts: 8, topk: 2 });
            let slot = c.phase.slot_bytes(128, 2) as f64;
            assert_eq!(c.predicted.nic_bytes, expected.send_rdma * slot);
            assert_eq!(c.predicted.limit, "NIC");
        }
        assert!(check_text(&checked, &points).contains("4 points"));
    }

    #[test]
    fn points_that_the_model_does_not_have_are_left_out() {
        let changes: [fn(&mut Point); 3] = [
            |point| point.mode = crate::results::LOW_LATENCY.into(),
            |point| point.key.rows_by_expert = Some(64),
            |point| point.is_virtual = true,
        ];
        let mut points = measured();
        points.truncate(4);
        for (change, point) in changes.into_iter().zip(&mut points) {
            change(point);
        }
        let checked = check(&points, &Machine::h200(50.0, 10.0));
        assert_eq!(checked.len(), 4);
        let text = check_text(&checked, &points);
        assert!(text.contains("4 points, largest") && text.contains("left out: 3 points"), "{text}");
    }

    #[test]
    fn a_sample_agrees_with_the_expected_counts() {
        let sizes = Sizes { ranks: 16, ranks_per_node: 8, experts: 64, topk: 4 };
        let (six, busiest) = sampled(64, 4096.0, sizes).unwrap();
        let expected = counts::expected(4096.0, sizes);
        assert!((six.recv_total / expected.recv_total - 1.0).abs() < 0.05, "{six:?} {expected:?}");
        assert!(busiest >= six.recv_total);
    }
}

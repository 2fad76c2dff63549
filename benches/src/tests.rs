//! Tests of whole measurements, on the virtual GPU.

use epoxide::DType;
use epoxide::driver::virt::{Time, VirtConfig, VirtualGpu};
use epoxide::internal::Topology;
use epoxide::throughput::Quantise;
use epoxide::transport::TransportKind;
use epoxide_testing::tier;

use super::counts::Sizes;
use super::measured::RankResult;
use super::results::{PhaseName, Point, Results};
use super::*;

/// Small sizes, changed by `line`, in the syntax of the command's flags.
pub fn plan(line: &str) -> Plan {
    let mut plan = Plan {
        low_latency: None,
        topology: Topology { nodes: 1, ranks_per_node: 2 },
        // Most of what is measured across nodes is there only where rows are relayed.
        keep_nodes: true,
        is_virtual: true,
        transport: TransportKind::Auto,
        queues: 1,
        connections: None,
        tokens: 8,
        hidden: 64,
        experts: 8,
        topk: 2,
        dtype: DType::Bf16,
        quantise: Quantise::None,
        rows_by_expert: None,
        num_sms: vec![2],
        rdma_send: 16,
        rdma_recv: 128,
        nvl_send: 8,
        nvl_recv: 256,
        nvl_bytes: None,
        rdma_bytes: None,
        warmup: 1,
        iters: 2,
        repeat: 1,
        effort: Effort::Whole,
        ptx: None,
        seed: 7,
        masked: 0.0,
        graph: None,
        baseline: None,
        no_ceiling: false,
        flush_mib: 256,
        shapes: Shapes::default(),
        ids: None,
    };
    for pair in line.split_whitespace().collect::<Vec<_>>().chunks(2) {
        let number = || pair[1].parse().unwrap();
        match pair[0] {
            "--nodes" => plan.topology.nodes = number(),
            "--ranks-per-node" => plan.topology.ranks_per_node = number(),
            "--transport" => {
                plan.transport = match pair[1] {
                    "shm" => TransportKind::Shm,
                    "tcp" => TransportKind::Tcp,
                    "direct" => TransportKind::Direct,
                    other => panic!("{other}"),
                }
            }
            "--queues" => plan.queues = number(),
            "--tokens" => plan.tokens = number(),
            "--hidden" => plan.hidden = u64::from(number()),
            "--experts" => plan.experts = number(),
            "--topk" => plan.topk = number(),
            "--dtype" => plan.dtype = if pair[1] == "fp8" { DType::Fp8E4m3 } else { DType::Bf16 },
            "--rows-by-expert" => plan.rows_by_expert = Some(number()),
            "--num-sms" => plan.num_sms = pair[1].split(',').map(|sms| sms.parse().unwrap()).collect(),
            "--rdma-send" => plan.rdma_send = number(),
            "--iters" => plan.iters = number(),
            "--repeat" => plan.repeat = number(),
            "--seed" => plan.seed = u64::from(number()),
            "--masked" => plan.masked = pair[1].parse().unwrap(),
            "--graph" => plan.graph = Some(number()),
            "--combine-warps" => plan.shapes.combine_warps = Some(number()),
            other => panic!("{other}"),
        }
    }
    plan
}

/// The device of a rank.
pub fn open(rank: u32) -> epoxide::Result<Device> {
    // Benchmarks and traces show real time.
    Ok(VirtualGpu::new(VirtConfig { ordinal: rank, time: Time::Real, ..VirtConfig::default() }))
}

/// A run on the virtual GPU.
pub fn measured(line: &str) -> (Vec<Point>, Vec<RankResult>) {
    measure(&plan(line), open, &()).unwrap()
}

/// The committed points of H200s.
pub fn h200() -> Vec<Point> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/data/h200.json");
    Results::read(path.as_ref()).unwrap().points
}

/// Not a usage error: the rank with the wrong sum reports it.
#[test]
fn kernels_that_sum_wrongly_are_not_measured() {
    let folder = tempfile::tempdir().unwrap();
    let ptx = folder.path().join("wrong.ptx");
    std::fs::write(&ptx, epoxide_gpu::PTX.replace("add.rn.f32", "sub.rn.f32")).unwrap();
    let plan = Plan { ptx: Some(ptx), ..plan("--ranks-per-node 2 --topk 4") };
    let error = measure(&plan, open, &()).unwrap_err();
    let Error::Operation(epoxide::Error::Os { call: "verify", reason, .. }) = &error else {
        panic!("{error}")
    };
    assert!(reason.starts_with("rank ") && reason.contains("combine"), "{reason}");
}

#[test]
fn counts_of_the_devices_are_those_of_a_serial_count() {
    let lines = [
        "--ranks-per-node 1 --topk 3",
        "--ranks-per-node 2 --tokens 33 --masked 0.5",
        "--ranks-per-node 3 --experts 9 --topk 4",
        "--ranks-per-node 4 --masked 1.0",
        "--ranks-per-node 8 --experts 16 --topk 8 --dtype fp8 --hidden 256",
        "--nodes 2 --ranks-per-node 2 --tokens 21 --num-sms 4 --transport shm",
        "--nodes 3 --ranks-per-node 1 --tokens 13 --experts 9 --topk 3 --num-sms 6 --queues 2 --rdma-send 3 --masked 0.4 --transport tcp",
        "--nodes 3 --ranks-per-node 2 --experts 12 --topk 3 --num-sms 4 --transport direct",
        "--nodes 2 --ranks-per-node 3 --experts 12 --topk 5 --num-sms 4 --dtype fp8 --hidden 256 --transport shm",
        "--nodes 2 --ranks-per-node 1 --num-sms 4 --masked 1.0",
    ];
    for (seed, line) in lines.into_iter().enumerate().step_by(tier::pick(5, 1)) {
        let plan = plan(&format!("{line} --seed {seed}"));
        let (points, ranks) = measure(&plan, open, &()).unwrap();
        let ids: Vec<Vec<i64>> = (0..plan.topology.ranks()).map(|rank| plan.routing(rank)).collect();
        let serial = counts::serial(&ids, plan.count_sizes());
        let (point, sixes) = (&points[0], serial.iter().map(|rank| rank.six).collect::<Vec<_>>());
        assert_eq!(point.counts_by_rank, sixes, "{line}");
        assert_eq!(point.counts, counts::mean(&serial), "{line}");
        assert!(ranks.iter().zip(&serial).all(|(rank, serial)| rank.counts == *serial), "{line}");
        let per_rank = f64::from(plan.topology.ranks());
        let sum = |pick: fn(&counts::RankCounts) -> u64| serial.iter().map(pick).sum::<u64>() as f64;
        assert_eq!(point.remote_rows * per_rank, sum(|rank| rank.linked), "{line}");
        for phase in &point.phases {
            let Some(wire) = &phase.wire else {
                assert_eq!(point.key.nodes, 1);
                continue;
            };
            let rows = if phase.name.is_dispatch() { sum(|r| r.six.send_rdma) } else { sum(|r| r.relayed) };
            assert!((wire.rows * per_rank - rows).abs() < 1e-9, "{line}");
            let messages = match phase.name {
                PhaseName::DispatchUncached => {
                    ranks.iter().map(|rank| rank.message_bytes).sum::<u64>() as f64
                }
                _ => 0.0,
            };
            let put = if ranks[0].has_queues { rows * wire.slot_bytes as f64 + messages } else { 0.0 };
            assert_eq!(ranks[0].has_queues, line.contains("tcp"), "{line}");
            assert_eq!(ranks[0].mapped, !line.contains("shm") && !line.contains("tcp"), "{line}");
            assert!((wire.bytes * per_rank - put).abs() < 1e-6, "{line}");
        }
    }
}

#[test]
fn ranks_that_are_all_mapped_are_measured_as_one_node() {
    let kept = plan("--nodes 2 --ranks-per-node 2 --tokens 13 --num-sms 4 --transport direct");
    let asked = Plan { keep_nodes: false, ..kept.clone() };
    let steps = Counted::default();
    let (points, ranks) = measure(&asked, open, &steps).unwrap();
    assert_eq!(steps.of_rank_0(), asked.steps());
    let (point, whole) = (&points[0], asked.as_run(true));
    assert!(ranks.iter().all(|rank| rank.is_joined && !rank.mapped && rank.wire_bytes == 0));
    assert!(point.phases.iter().all(|phase| phase.wire.is_none()));
    let ids: Vec<Vec<i64>> = (0..4).map(|rank| whole.routing(rank)).collect();
    assert_eq!(point.counts, counts::mean(&counts::serial(&ids, whole.count_sizes())));
    assert_eq!((point.mode.as_str(), point.key.nodes), ("intranode", 2));
    // Results of either way are not those of the other.
    assert_eq!(point.key.transport.as_deref(), Some("direct"));
    assert_eq!(kept.key(4).transport.as_deref(), Some("direct, nodes kept"));
}

#[test]
fn replays_of_every_step_are_right_and_timed() {
    for line in tier::sample([
        "--ranks-per-node 3 --experts 9 --tokens 5 --dtype fp8 --hidden 256 --masked 0.3",
        "--num-sms 2,4 --masked 1.0",
        "--nodes 2 --ranks-per-node 2 --num-sms 4 --transport shm",
    ]) {
        let plan = plan(&format!("{line} --graph 3"));
        let (points, ranks) = measure(&plan, open, &()).unwrap();
        for (index, point) in points.iter().enumerate() {
            let steps: Vec<String> = point.graph.iter().map(|step| step.text()).collect();
            assert_eq!(
                steps,
                [
                    "dispatch cached",
                    "dispatch uncached",
                    "combine in pool",
                    "combine staged",
                    "dispatch cached + combine in pool"
                ],
                "{line}"
            );
            for (at, step) in point.graph.iter().enumerate() {
                assert_eq!(step.chain, 3);
                // Nothing empties the cache of a virtual GPU.
                assert!(step.flushed.is_none());
                let slowest = |iteration: usize| {
                    ranks
                        .iter()
                        .map(|rank| rank.times[index].replays[at].alone[iteration])
                        .fold(0.0, f64::max)
                };
                assert_eq!(step.alone.samples_us, [slowest(0), slowest(1)], "{line}");
                for times in [&step.alone, &step.chained] {
                    assert!(0.0 < times.min_us && times.min_us <= times.mean_us, "{line}: {times:?}");
                    assert!(times.mean_us <= times.p99_us && times.samples_us.len() == 2, "{line}");
                }
            }
        }
    }
}

#[test]
fn a_device_that_counts_wrongly_ends_the_benchmark() {
    let plan = plan("--tokens 8");
    let (_, mut ranks) = measure(&plan, open, &()).unwrap();
    assert!(points::points(&plan, &ranks).is_ok());
    ranks[1].counts.six.recv_nvl += 1;
    let stop = points::points(&plan, &ranks).unwrap_err();
    assert!(stop.to_string().contains("rank 1: the device counts"));
}

#[test]
fn a_hypothetical_split_into_nodes_counts_serially() {
    // The same routing on one node and on several: ranks receive the same rows, from other ranks.
    let plan = plan("--ranks-per-node 8 --experts 16 --topk 4 --tokens 40");
    let ids: Vec<Vec<i64>> = (0..8).map(|rank| plan.routing(rank)).collect();
    let sizes = |ranks_per_node| Sizes { ranks_per_node, ..plan.count_sizes() };
    let one = counts::serial(&ids, sizes(8));
    for ranks_per_node in [1, 2, 4] {
        for (split, whole) in counts::serial(&ids, sizes(ranks_per_node)).iter().zip(&one) {
            let (split, whole) = (split.six, whole.six);
            assert_eq!(split.recv_total, whole.recv_total);
            assert!(split.recv_nvl <= whole.recv_nvl && split.send_total >= whole.send_total);
        }
    }
}

#[test]
fn bytes_on_the_wire_that_the_layout_does_not_predict_end_the_benchmark() {
    let plan = plan("--nodes 2 --ranks-per-node 1 --num-sms 4 --transport shm");
    let (points, mut ranks) = measure(&plan, open, &()).unwrap();
    assert_eq!((points[0].mode.as_str(), points[0].key.transport.as_deref()), ("internode", Some("shm")));
    ranks[0].times[0].phases[2].wire.bytes += 16;
    let message = points::points(&plan, &ranks).unwrap_err().to_string();
    assert!(message.contains("rank 0") && message.contains("combine in pool"), "{message}");
}

/// The run itself compares the rows of each dispatch, sort and replay with the oracle.
#[test]
fn rows_by_expert_are_measured_beside_a_sort() {
    let lines = [
        ("--ranks-per-node 3 --experts 9 --topk 4 --tokens 5 --dtype fp8 --hidden 256", "--graph 2"),
        ("--ranks-per-node 1 --masked 1.0", ""),
        ("--nodes 2 --ranks-per-node 2 --num-sms 4 --transport shm --repeat 2", ""),
        ("--nodes 2 --ranks-per-node 1 --num-sms 4 --dtype fp8 --hidden 256 --transport direct", "--graph 2"),
        ("--num-sms 2,4 --masked 0.3", "--graph 2"),
    ];
    for (line, graph) in tier::sample(lines) {
        let plan = plan(&format!("{line} {graph} --rows-by-expert 4"));
        let (points, _) = measure(&plan, open, &()).unwrap();
        let ids: Vec<Vec<i64>> = (0..plan.topology.ranks()).map(|rank| plan.routing(rank)).collect();
        let selected = ids.iter().flatten().filter(|id| **id >= 0).count() as f64;
        let per_rank = f64::from(plan.topology.ranks());
        for point in &points {
            assert_eq!((point.key.rows_by_expert, point.by_expert.len()), (Some(4), 2), "{line}");
            let names: Vec<PhaseName> = point.phases.iter().map(|phase| phase.name).collect();
            assert_eq!(names, PhaseName::BY_EXPERT, "{line}");
            for phase in &point.phases {
                let of = phase.traffic.unwrap();
                let written = if phase.name.sorts() { of.copy_written_bytes } else { of.written_bytes };
                if phase.name.is_dispatch() {
                    assert_eq!(written * per_rank, selected * phase.row_bytes as f64, "{line}");
                }
                assert_eq!(phase.kernel_us.is_none(), phase.name.sorts(), "{line}");
                assert!(of.ceiling_us.is_none() && of.memory_ceiling.is_none(), "{line}");
            }
            for beside in &point.by_expert {
                let slowest = point.phase(beside.name).and_then(|phase| phase.slowest.as_ref());
                assert_eq!(Some(beside.by_expert_us), slowest.map(|times| times.p50_us), "{line}");
            }
            if !graph.is_empty() {
                let steps: Vec<String> = point.graph.iter().map(|step| step.text()).collect();
                assert_eq!(steps[5..], ["cached + sort", "uncached + sort"], "{line}");
            }
        }
    }
}

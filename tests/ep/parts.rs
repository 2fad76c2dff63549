//! A rank that lacks memory or an answer for a part of its buffer: every rank gets the reason, and
//! no rank waits.

use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::internal::driver;
use epoxide::transport::{TransportKind, TransportOptions};
use epoxide::{Error, low_latency, throughput};
use epoxide_testing::harness::{NodeLinks, PATIENCE, Setup, now, run_ranks};

use crate::failing::{FailingDevice, LINKS, REFUSAL};
use crate::turns::ROW;

/// Makes a buffer on each of two ranks by `make`. Rank 1 has no memory with the label `label`, or
/// no answer about its links.
fn fails_on_both<B>(
    label: &'static str,
    make: impl Fn(epoxide::driver::Device, &dyn epoxide::group::ProcessGroup) -> epoxide::Result<B> + Sync,
) {
    run_ranks(2, |number, group| {
        let device = VirtualGpu::new(VirtConfig { ordinal: number, ..VirtConfig::default() });
        let lacks = if number == 1 { label } else { "nothing" };
        let (clock, start) = (device.clone(), now(&device));
        let outcome = make(driver::device(FailingDevice::without(device, lacks)), &*group);
        let took = now(&clock) - start;
        assert!(took < group.timeout() / 2, "{label}: {took:?}");
        let error = outcome.err().expect("rank 1 has no part");
        let is_of_peer =
            matches!(error, Error::PeerFailed { peer: 1, .. } | Error::Transport { peer: 1, .. });
        assert_eq!(is_of_peer, number == 0, "{label}: {error:?}");
        let text = error.to_string();
        assert!(text.contains(REFUSAL), "{label}: {text}");
        assert_eq!(text.contains("rank 1 failed: "), number == 0, "{label}: {text}");
        // All ranks are behind the same call of the group.
        group.barrier(PATIENCE)
    });
}

#[test]
fn low_latency() {
    let labels = ["low-latency pool", "low-latency tables", "queue of puts", "low-latency messages"];
    for (label, ranks_per_node) in
        labels.map(|label| (label, 1)).into_iter().chain([(labels[0], 2), (labels[1], 2)])
    {
        fails_on_both(label, |device, group| {
            let shape = low_latency::Shape { max_tokens: 1, hidden: 8, num_topk: 1, num_experts: 2 };
            let transport = TransportOptions::new(TransportKind::Tcp);
            let options = low_latency::Options::new(shape).ranks_per_node(ranks_per_node);
            low_latency::Buffer::new(device, group, options.transport(transport))
        });
    }
}

#[test]
fn high_throughput() {
    let nodes = NodeLinks { ranks_per_node: 1, transport: TransportKind::Tcp, queues: 1 };
    let across = ["pool", "peer table", "queue of puts", "queue table"].map(|label| (label, Some(nodes)));
    for (label, nodes) in across.into_iter().chain([("pool", None), ("host counts", None)]) {
        let setup = Setup::new(2, 1, 2, ROW).nodes(nodes);
        fails_on_both(label, |device, group| throughput::Buffer::new(device, group, setup.options.clone()));
    }
}

#[test]
fn links_of_ranks_that_map_each_other() {
    let nodes = NodeLinks { ranks_per_node: 1, transport: TransportKind::Direct, queues: 1 };
    for nodes in [None, Some(nodes)] {
        let setup = Setup::new(2, 1, 2, ROW).nodes(nodes).join_nodes();
        fails_on_both(LINKS, |device, group| throughput::Buffer::new(device, group, setup.options.clone()));
    }
}

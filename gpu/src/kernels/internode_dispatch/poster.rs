//! The sender of a channel: its last warp, which delivers what the workers have packed.

use crate::kernels::progress::Progress;
use crate::kernels::rail::{
    Delivery, Operation, Path, Posted, arrival, arrival_word, channel_rows, deliver, is_in_vain,
    wait_node_ready, wait_quiet,
};
use crate::kernels::ring::channel_range;
use crate::layout::{InternodeDispatchArgs, Wait};
use crate::simt::*;

/// The last warp of a sender: delivers each chunk of tokens for a node when it is packed. Lane n
/// serves node n.
///
/// # Safety
/// Slots were planned inside wire memory, and the words at the peers have this rank's queue as
/// their only writer.
#[device]
pub unsafe fn post_channel(
    args: &InternodeDispatchArgs,
    channel: u32,
    planned: bool,
    progress: &Progress,
    operation: Operation,
) {
    let (rows, wire, comm) = (&args.dispatch, &args.wire, &args.dispatch.comm);
    // The peers' slots must be free, and a rank that enters late must find this one still here.
    if !wait_node_ready(comm, wire, operation, Wait::DispatchNodeReady) || !planned {
        return;
    }
    let (begin, end) = channel_range(rows.num_tokens, args.route.num_channels, channel);
    let node = laneid();
    let serves = node < wire.num_nodes && node != wire.node;
    let path = Path::of_lane(wire);
    let mut first = 0;
    if serves {
        let prefix = args.route.rdma_channel_prefix_matrix.0;
        first = channel_rows(prefix, args.route.num_channels, node, channel).0;
    }
    let (mut seen, mut packed, mut sent) = (begin, 0, 0);
    let mut posted = Posted::NONE;
    let mut turns = 0;
    while seen < end && !is_in_vain(comm, &mut turns) {
        let upto = (begin + progress.slowest()).min(end);
        if serves {
            // The last new token for this node holds the number of the node's tokens so far.
            let mut token = upto;
            while token > seen {
                token -= 1;
                let entry = row_major(token, wire.num_nodes, node);
                let head = args.route.send_rdma_head.array::<i32>().ld(entry);
                if head >= 0 {
                    packed = head as u32 + 1;
                    token = seen;
                }
            }
            if packed - sent >= wire.chunk || (upto == end && packed != sent) {
                let bytes = args.slot_bytes as u64;
                let from = (first + sent) as u64 * bytes;
                let delivery = Delivery {
                    from: DevicePtr(wire.layout.slots_out).row(node, wire.layout.node_bytes) + from,
                    to: DevicePtr(wire.layout.slots_in).row(wire.node, wire.layout.node_bytes) + from,
                    bytes: (packed - sent) as u64 * bytes,
                    counter: arrival_word(wire, wire.node, channel),
                    value: arrival(operation.epoch, packed),
                };
                posted = deliver(comm, wire, &path, node, channel, delivery, operation);
                sent = packed;
            }
        }
        syncwarp();
        seen = upto;
    }
    // The slots may be packed anew as soon as the operation has ended.
    wait_quiet(comm, node, posted, operation);
}

//! Faults that change nothing in a round trip, each with the reason. They are not tried, and
//! counted apart.

use super::faults::{Fault, Kind};
use crate::workspace::Workspace;

/// A kind of place, by instruction and Rust line.
struct Harmless {
    kinds: &'static [Kind],
    /// The only kernel in which it is; empty for all.
    kernel: &'static str,
    /// Start of the opcode.
    opcode: &'static str,
    /// A part of the kernel's own source line, or of one of the two lines above it.
    source: &'static str,
    why: &'static str,
}

const HARMLESS: [Harmless; 15] = [
    Harmless {
        kinds: &[Kind::DeviceToBlock],
        kernel: "",
        opcode: "ld.relaxed.gpu.global.b64",
        source: "current_epoch(",
        why: "an earlier kernel of the stream wrote the epoch",
    },
    Harmless {
        kinds: &[Kind::DeviceToBlock],
        kernel: "",
        opcode: "ld.relaxed.gpu.global.b32",
        source: "",
        why: "only a wait that expires writes the abort word, and none does",
    },
    Harmless {
        kinds: &[Kind::ProxyFenceDropped],
        kernel: "",
        opcode: "fence.proxy.async.shared::cta",
        source: "Ring::new(",
        why: "the copy engine uses an mbarrier, not its bytes: the manual asks for no fence, and NVIDIA's own barrier has none",
    },
    Harmless {
        kinds: &[Kind::ProxyFenceDropped],
        kernel: "dispatch",
        opcode: "fence.proxy.async.shared::cta",
        source: "ring.init()",
        why: "as for a ring that is made whole: the copy engine uses an mbarrier, not its bytes",
    },
    Harmless {
        kinds: &[Kind::WarpSyncDropped],
        kernel: "",
        opcode: "bar.warp.sync",
        source: "Ring::new(args.",
        why: "one lane sets up the mbarriers and starts loads; the block meets before the other lanes wait for one",
    },
    Harmless {
        kinds: &[Kind::ProxyFenceDropped, Kind::ProxyFenceOnlyShared],
        kernel: "",
        opcode: "fence.proxy.async",
        source: "The peers' rows were released to this thread",
        why: "the rows were written before the peers' kernels began, and a kernel's boundary orders all proxies",
    },
    Harmless {
        kinds: &[Kind::ProxyFenceDropped, Kind::ProxyFenceOnlyShared],
        kernel: "",
        opcode: "fence.proxy.async",
        source: "comes behind that too",
        why: "the rows were last read before the peers' kernels began, and a kernel's boundary orders all proxies",
    },
    Harmless {
        kinds: &[Kind::ProxyFenceDropped, Kind::ProxyFenceOnlyShared],
        kernel: "internode_dispatch",
        opcode: "fence.proxy.async",
        source: "take most of the links and end early",
        why: "it paces bulk stores that have been waited for; the forwarder's proxy fence orders all other writes",
    },
    Harmless {
        kinds: &[Kind::ProxyFenceDropped, Kind::ProxyFenceOnlyShared],
        kernel: "internode_dispatch",
        opcode: "fence.proxy.async",
        source: "continue;",
        why: "two orders suffice: the sender has a proxy fence of its own behind what it wrote",
    },
    Harmless {
        kinds: &[Kind::WarpSyncDropped],
        kernel: "combine_bf16",
        opcode: "bar.warp.sync",
        source: "from.wait(row);",
        why: "within a node no row has a wait of its own: the block has waited for all ranks",
    },
    Harmless {
        kinds: &[Kind::DeviceToBlock],
        kernel: "",
        opcode: "atom.relaxed.gpu.",
        source: "posted = deliver(",
        why: "one warp alone posts to the queue in this kernel",
    },
    Harmless {
        kinds: &[Kind::DeviceToBlock],
        kernel: "",
        opcode: "atom.relaxed.gpu.",
        source: "post_to(&args.comm",
        why: "a queue leads to one rank, which gets one message in a kernel",
    },
    Harmless {
        kinds: &[Kind::ReleaseToRelaxed],
        kernel: "",
        opcode: "st.release.sys.global.b64",
        source: "if turn == 0 && tid() < 32 {",
        why: "the ready word of a combine of a tensor says that the rank has entered; `staged` words order its rows",
    },
    Harmless {
        kinds: &[Kind::AcquireToRelaxed],
        kernel: "",
        opcode: "ld.acquire.sys.global.b64",
        source: "ring_bytes(warps, rows.slots, rows.slot_bytes)",
        why: "the ready word of a peer in a combine of a tensor orders nothing: `staged` words order its rows",
    },
    Harmless {
        kinds: &[Kind::ProxyFenceDropped],
        kernel: "",
        opcode: "fence.proxy.async.shared::cta",
        source: "while load.piece < rows.stages && load.token < end {",
        why: "these loads fill the ring for the first time: no thread has touched the stages before",
    },
];

/// Why a fault changes nothing, if it is known not to.
pub fn why(ws: &Workspace, fault: &Fault) -> Option<&'static str> {
    let source = std::fs::read_to_string(ws.root.join(&fault.own.0)).unwrap_or_default();
    let lines: Vec<&str> = source.lines().take(fault.own.1 as usize).collect();
    let lines = &lines[lines.len().saturating_sub(3)..];
    let known = |harmless: &&Harmless| {
        harmless.kinds.contains(&fault.kind)
            && (harmless.kernel.is_empty() || harmless.kernel == fault.kernel)
            && fault.opcode.starts_with(harmless.opcode)
            && lines.iter().any(|line| line.contains(harmless.source))
    };
    HARMLESS.iter().find(known).map(|harmless| harmless.why)
}

#[cfg(test)]
mod tests {
    use super::super::{faults, names, text};
    use super::*;

    #[test]
    fn every_reason_is_needed() {
        let ws = crate::repository::find().unwrap();
        let faults = faults::enumerate(&text::bodies(epoxide_gpu::PTX, &names(epoxide_gpu::PTX)).unwrap());
        let reasons: Vec<_> = faults.iter().filter_map(|fault| why(&ws, fault)).collect();
        assert!(HARMLESS.iter().all(|harmless| reasons.contains(&harmless.why)));
        assert!(reasons.len() < faults.len() / 4);
    }
}

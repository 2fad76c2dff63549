//! Faults that change nothing, each with the reason. The command does not try them, and counts them
//! separately. Some reasons hold in round trips alone: a program's own tests try those faults.

use epoxide_build_ptx::header::Header;

use super::faults::{Fault, Kind};
use crate::workspace::Workspace;

/// The package of the kernels that the reasons are about.
const OWN_PACKAGE: &str = "epoxide-gpu";

/// A kind of place, by instruction and Rust line.
#[derive(Debug)]
pub struct Harmless {
    kinds: &'static [Kind],
    /// The only kernel in which it is, with a `*` for any part of names; empty for all.
    kernel: &'static str,
    /// Start of the opcode.
    opcode: &'static str,
    /// A part of the kernel's own source line, or of one of the [`above`](Self::above) lines above
    /// it.
    source: &'static str,
    above: usize,
    /// The reason why a fault there changes nothing.
    pub why: &'static str,
    /// Whether the reason is that no round trip has a wait that expires, a rank that gives up, or
    /// ranks that make different calls. Other programs may.
    pub only_in_round_trips: bool,
}

static HARMLESS: [Harmless; 54] = [
    Harmless {
        kinds: &[Kind::DeviceToBlock],
        kernel: "",
        opcode: "ld.relaxed.gpu.global.b64",
        source: "current_epoch(",
        above: 2,
        why: "an earlier kernel of the stream wrote the epoch",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::DeviceToBlock],
        kernel: "",
        opcode: "ld.relaxed.gpu.global.b32",
        source: "",
        above: 2,
        why: "only a wait that expires writes the abort word, and none does",
        only_in_round_trips: true,
    },
    Harmless {
        kinds: &[Kind::ProxyFenceDropped],
        kernel: "",
        opcode: "fence.proxy.async.shared::cta",
        source: "Ring::new(",
        above: 2,
        why: "the copy engine uses an mbarrier, not its bytes: the manual asks for no fence, and NVIDIA's own barrier has none",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::ProxyFenceDropped],
        kernel: "dispatch*",
        opcode: "fence.proxy.async.shared::cta",
        source: "ring.init()",
        above: 2,
        why: "as for a ring that is made whole: the copy engine uses an mbarrier, not its bytes",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::WarpSyncDropped],
        kernel: "",
        opcode: "bar.warp.sync",
        source: "Ring::new(args.",
        above: 2,
        why: "one lane sets up the mbarriers and starts loads; the block meets before the other lanes wait for one",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::ProxyFenceDropped, Kind::ProxyFenceOnlyShared],
        kernel: "",
        opcode: "fence.proxy.async",
        source: "The peers' rows were released to this thread",
        above: 2,
        why: "the rows were written before the peers' kernels began, and a kernel's boundary orders all proxies",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::ProxyFenceDropped, Kind::ProxyFenceOnlyShared],
        kernel: "",
        opcode: "fence.proxy.async",
        source: "comes behind that too",
        above: 2,
        why: "the rows were last read before the peers' kernels began, and a kernel's boundary orders all proxies",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::ProxyFenceDropped, Kind::ProxyFenceOnlyShared],
        kernel: "internode_dispatch",
        opcode: "fence.proxy.async",
        source: "take most of the links and end early",
        above: 2,
        why: "it paces bulk stores that have been waited for; the forwarder's proxy fence orders all other writes",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::ProxyFenceDropped, Kind::ProxyFenceOnlyShared],
        kernel: "internode_dispatch",
        opcode: "fence.proxy.async",
        source: "continue;",
        above: 2,
        why: "two orders suffice: the sender has a proxy fence of its own behind what it wrote",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::WarpSyncDropped],
        kernel: "combine_bf16",
        opcode: "bar.warp.sync",
        source: "from.wait(row);",
        above: 2,
        why: "within a node no row has a wait of its own: the block has waited for all ranks",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::DeviceToBlock],
        kernel: "",
        opcode: "atom.relaxed.gpu.",
        source: "posted = deliver(",
        above: 2,
        why: "one warp alone posts to the queue in this kernel",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::DeviceToBlock],
        kernel: "",
        opcode: "atom.relaxed.gpu.",
        source: "post_to(&args.comm",
        above: 2,
        why: "a queue leads to one rank, which gets one message in a kernel",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::ReleaseToRelaxed],
        kernel: "",
        opcode: "st.release.sys.global.b64",
        source: "if turn == 0 && tid() < 32 {",
        above: 2,
        why: "the ready word of a combine of a tensor says that the rank has entered; `staged` words order its rows",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::AcquireToRelaxed],
        kernel: "",
        opcode: "ld.acquire.sys.global.b64",
        source: "ring_bytes(warps, rows.slots, rows.slot_bytes)",
        above: 2,
        why: "the ready word of a peer in a combine of a tensor orders nothing: `staged` words order its rows",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::ProxyFenceDropped],
        kernel: "",
        opcode: "fence.proxy.async.shared::cta",
        source: "while load.piece < rows.stages && load.token < end {",
        above: 2,
        why: "these loads fill the ring for the first time: no thread has touched the stages before",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::BlockBarrierDropped],
        kernel: "low_latency_*",
        opcode: "barrier.sync",
        source: "unsafe fn finish(comm: &Comm)",
        above: 1,
        why: "the ticket that follows is read by later kernels, behind the end of this one, and by blocks ahead of their own shares",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::DeviceToBlock],
        kernel: "low_latency_*combine_*",
        opcode: "ld.relaxed.gpu.global.b64",
        source: "it.turns = ",
        above: 0,
        why: "dispatches alone add to the turns: an earlier kernel of the stream has written them",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::DeviceToBlock],
        kernel: "low_latency_*dispatch*",
        opcode: "ld.relaxed.gpu.global.b64",
        source: "it.answered = ",
        above: 0,
        why: "combines alone store the answer: an earlier kernel of the stream has written it",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::SystemToDevice],
        kernel: "",
        opcode: "st.relaxed.sys.global.b64",
        source: "st_relaxed_sys_u64(answered_at(args)",
        above: 0,
        why: "blocks of the same device alone read the answer, which scope .gpu includes",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::AcquireToRelaxed],
        kernel: "low_latency_dispatch*",
        opcode: "ld.acquire.sys.global.b64",
        source: "Wait::LowLatencyEnter).packet::<true>(packet)?",
        above: 0,
        why: "the words of a rank's chunks release the same, and no round trip has a rank whose tokens end: `low_latency::pooled` reports it",
        only_in_round_trips: true,
    },
    Harmless {
        kinds: &[Kind::EpochOneLess],
        kernel: "low_latency_*combine_*",
        opcode: "setp.",
        source: "let seen = ld_acquire_sys_u64(word);",
        above: 1,
        why: "a word of returned rows holds the epoch of a combine, and a dispatch lies between two of them",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::EpochOneLess],
        kernel: "low_latency_dispatch*",
        opcode: "setp.",
        source: "if (seen >> 32) as u32 == epoch as u32 {",
        above: 0,
        why: "the wait that follows compares again, and the packets of the place have no epoch of a combine",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::EpochIgnored, Kind::EpochOneLess],
        kernel: "low_latency_internode_*",
        opcode: "setp.eq.b64",
        source: "if ready != 0 && (ready >> 32) as u32 == epoch as u32 && is_other {",
        above: 0,
        why: "it looks for a rank in another call, and no round trip has one",
        only_in_round_trips: true,
    },
    Harmless {
        kinds: &[Kind::WarpSyncDropped],
        kernel: "",
        opcode: "bar.warp.sync",
        source: "barrier_any(",
        above: 0,
        why: "the vote is an aligned barrier, in front of which the assembler converges the warp",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::WarpSyncDropped],
        kernel: "combine_staged_*",
        opcode: "bar.warp.sync",
        source: "let is_sound = !warp_aborted(comm);",
        above: 1,
        why: "the lanes have met at a vote, and the barrier of the block takes threads one by one",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::WarpSyncDropped],
        kernel: "low_latency_dispatch_*",
        opcode: "bar.warp.sync",
        source: "barrier_arrive_part::<4>(",
        above: 0,
        why: "`barrier.arrive` takes threads one by one, each behind what it has done",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::WarpSyncDropped],
        kernel: "low_latency_dispatch_*",
        opcode: "bar.warp.sync",
        source: "barrier_sync_part::<4>(both);",
        above: 0,
        why: "`barrier.sync` takes threads one by one, and the lanes of these warps have not parted in front of it",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::SystemToDevice],
        kernel: "low_latency_combine_*pooled",
        opcode: "ld.relaxed.sys.global.b64",
        source: "let seen = ld_relaxed_sys_u64(word);",
        above: 0,
        why: "only a rank that gives up writes the word, and none of a round trip does",
        only_in_round_trips: true,
    },
    Harmless {
        kinds: &[Kind::EpochOneLess],
        kernel: "low_latency_combine_*pooled",
        opcode: "setp.lt.u64",
        source: "if seen >= epoch {",
        above: 0,
        why: "only a rank that gives up writes the word, and none of a round trip does",
        only_in_round_trips: true,
    },
    Harmless {
        kinds: &[Kind::SystemToDevice],
        kernel: "low_latency_internode_*",
        opcode: "st.release.sys.global.b64",
        source: "st_release_sys_u64(copy, seen);",
        above: 0,
        why: "blocks of the same device alone poll the copy, which scope .gpu includes",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::SystemToDevice, Kind::EpochIgnored, Kind::EpochOneLess],
        kernel: "low_latency_internode_*",
        opcode: "",
        source: "let ready = ld_relaxed_sys_u64(incoming.words + READY);",
        above: 2,
        why: "the word is compared for another call of the rank, which no round trip makes: `low_latency::faults` does",
        only_in_round_trips: true,
    },
    Harmless {
        kinds: &[Kind::WarpSyncDropped],
        kernel: "internode_*",
        opcode: "bar.warp.sync",
        source: "if !wait_node_ready(comm, wire, operation, Wait::",
        above: 0,
        why: "the lane that acquires a node's word delivers to that node alone, and the lanes meet at a vote behind it",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::WarpSyncDropped],
        kernel: "internode_*",
        opcode: "bar.warp.sync",
        source: "            sent = ",
        above: 3,
        why: "lanes pass nothing on here: each serves a node, and `slowest` has a barrier of its own behind its loads",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::WarpSyncDropped],
        kernel: "internode_*",
        opcode: "bar.warp.sync",
        source: "warp_aborted(comm)",
        above: 1,
        why: "the lanes have met at a vote, and the barrier of the block takes threads one by one",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::BlockBarrierDropped],
        kernel: "",
        opcode: "barrier.sync",
        source: "warp_aborted(comm), Wait::DispatchDone);",
        above: 0,
        why: "the block has met in front of it, and has only read the abort word since",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::BlockBarrierDropped],
        kernel: "",
        opcode: "barrier.sync",
        source: "(comm, epoch, is_sound, Wait::CombineDone)",
        above: 0,
        why: "the block has met in front of it, and has only read the abort word since",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::BlockBarrierDropped],
        kernel: "",
        opcode: "barrier.sync",
        source: "keeps the block from saying that it has done its",
        above: 2,
        why: "the block meets again in `leave`; the abort word, which it reads in between, changes only where a wait expires",
        only_in_round_trips: true,
    },
    Harmless {
        kinds: &[Kind::SystemToDevice],
        kernel: "internode_*",
        opcode: "ld.relaxed.sys.global.b64",
        source: "wait_mapped_ready(comm, wire, operation, Wait::",
        above: 0,
        why: "the word is compared for another call of the node, which no round trip makes: any other value is passed over",
        only_in_round_trips: true,
    },
    Harmless {
        kinds: &[Kind::SystemToDevice],
        kernel: "internode_*",
        opcode: "ld.relaxed.sys.global.b64",
        source: "if !wait_node_ready(comm, wire, operation, Wait::",
        above: 0,
        why: "the word is compared for another call of the node, which no round trip makes: any other value is passed over",
        only_in_round_trips: true,
    },
    Harmless {
        kinds: &[Kind::AcquireToRelaxed],
        kernel: "low_latency_combine_*summed",
        opcode: "ld.acquire.sys.global.b64",
        source: "Wait::LowLatencyEnter).packet::<true>(packet)?",
        above: 0,
        why: "its rows are no packets, so that block 0 acquires a word of every member for its token, which releases the same",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::EpochOneLess],
        kernel: "",
        opcode: "setp.ge.u64",
        source: "leave::<",
        above: 0,
        why: "blocks add shares of more than 1 in grids below 32,768, so that a sum is never 1 short of a multiple of `QUANTUM`",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::WarpSyncDropped],
        kernel: "dispatch",
        opcode: "bar.warp.sync",
        source: "ring.init();",
        above: 0,
        why: "lane 0 sets up the mbarriers and starts loads; the block meets before the other lanes wait for one",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::WarpSyncDropped],
        kernel: "dispatch_claiming",
        opcode: "bar.warp.sync",
        source: "ring.init();",
        above: 0,
        why: "lane 0 sets up the mbarriers and starts loads; the block meets before the other lanes wait for one",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::AcquireToRelaxed],
        kernel: "internode_dispatch*",
        opcode: "ld.acquire.cta.shared.b32",
        source: "if ballot(arrivals.wait(comm, load.node, load.row)) != u32::MAX",
        above: 0,
        why: "the loop acquires the same word once more before it takes a row",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::WarpSyncDropped],
        kernel: "internode_dispatch*",
        opcode: "bar.warp.sync",
        source: "`syncwarp` orders every lane behind the acquire of lane 0.",
        above: 1,
        why: "lane 0 starts the loads itself, and the other lanes read slots behind its arrival at the mbarrier",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::EpochOneLess],
        kernel: "internode_dispatch*",
        opcode: "setp.",
        source: "if ballot(arrivals.wait(comm, load.node, load.row)) != u32::MAX",
        above: 0,
        why: "the loop compares the rows again before it takes one; what is lost is a look at the abort word",
        only_in_round_trips: true,
    },
    Harmless {
        kinds: &[Kind::AcquireToRelaxed],
        kernel: "internode_combine*",
        opcode: "ld.acquire.cta.shared.b32",
        source: "self.arrivals.wait(&self.args.combine.comm, laneid(), row as u32);",
        above: 0,
        why: "the load behind it acquires the same word once more, ahead of the row",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::SystemToDevice],
        kernel: "internode_notify",
        opcode: "ld.relaxed.sys.global.b64",
        source: "|| is_in_other_call(&other, ready)",
        above: 0,
        why: "the ready word is looked at for another call of the node, which no round trip makes: an older one is passed over",
        only_in_round_trips: true,
    },
    Harmless {
        kinds: &[Kind::EpochOneLess],
        kernel: "internode_combine*",
        opcode: "setp.gt.s64",
        source: "has_given_up = note_gave_up(comm, rank, epoch, seen);",
        above: 0,
        why: "the sign is tested: one more changes it only after 2^47 operations",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::WarpSyncDropped],
        kernel: "notify*",
        opcode: "bar.warp.sync",
        source: "let totals = self.sum_rows(verdict.status);",
        above: 1,
        why: "the lanes read what a barrier of the block has ordered, and pass on registers by a shuffle, which waits for all",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::WarpSyncDropped],
        kernel: "low_latency_combine_*summed",
        opcode: "bar.warp.sync",
        source: "say_returned::<R, true>(args, index + laneid()",
        above: 2,
        why: "lanes pass nothing on here: rows reach the lane that publishes them by `slowest`, which has a barrier of its own behind its loads",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::WarpSyncDropped],
        kernel: "low_latency_internode_dispatch_by_expert*",
        opcode: "bar.warp.sync",
        source: "barrier_arrive_part::<PLACES>(team.threads);",
        above: 2,
        why: "a block has more than `TOKENS` warps, whose lanes meet in front of the arrival, and both barriers take threads one by one",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::WarpSyncDropped],
        kernel: "low_latency_internode_dispatch_by_expert*",
        opcode: "bar.warp.sync",
        source: "Orders the other lanes' loads behind lane 0's wait.",
        above: 1,
        why: "no lane waits there between nodes: the messages have come in front of a barrier of the block",
        only_in_round_trips: false,
    },
    Harmless {
        kinds: &[Kind::WarpSyncDropped],
        kernel: "low_latency_internode_combine_*",
        opcode: "bar.warp.sync",
        source: "unsafe fn finish(comm: &Comm)",
        above: 1,
        why: "the lanes have met behind the last sum or at a vote, and the barrier of the block takes threads one by one",
        only_in_round_trips: false,
    },
];

/// Whether a pattern with `*` for any part is that of a whole name.
pub fn is_like(name: &str, pattern: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return name == pattern };
    let Some(name) = name.strip_prefix(first) else { return false };
    let cuts = name.char_indices().map(|(at, _)| at).chain([name.len()]);
    cuts.into_iter().any(|at| is_like(&name[at..], rest))
}

/// Whether a PTX text has epoxide's own kernels.
pub fn is_own(text: &str) -> bool {
    Header::parse(text).is_some_and(|header| header.package == OWN_PACKAGE)
}

/// The reason why a fault in a PTX text changes nothing, if it is in the list. The reasons are
/// those of epoxide's own kernels: in kernels of another crate, the same instruction may matter.
pub fn reason(ws: &Workspace, text: &str, fault: &Fault) -> Option<&'static Harmless> {
    if !is_own(text) {
        return None;
    }
    let source = std::fs::read_to_string(ws.root.join(&fault.own.0)).unwrap_or_default();
    let lines: Vec<&str> = source.lines().take(fault.own.1 as usize).collect();
    let near = |above: usize| &lines[lines.len().saturating_sub(above + 1)..];
    HARMLESS.iter().find(|harmless| {
        harmless.kinds.contains(&fault.kind)
            && (harmless.kernel.is_empty() || is_like(&fault.kernel, harmless.kernel))
            && fault.opcode.starts_with(harmless.opcode)
            && near(harmless.above).iter().any(|line| line.contains(harmless.source))
    })
}

#[cfg(test)]
mod tests {
    use super::super::{faults, names, text};
    use super::*;

    #[test]
    fn kernels_are_named_by_patterns() {
        assert!(
            is_like("combine_bf16", "combine_bf16") && !is_like("low_latency_combine_bf16", "combine_bf16")
        );
        assert!(is_like("low_latency_internode_combine_fp8", "low_latency_*combine_*"));
        assert!(is_like("low_latency_combine_summed", "low_latency_*combine_*"));
        assert!(
            !is_like("low_latency_dispatch", "low_latency_*combine_*")
                && !is_like("dispatch", "low_latency_*")
        );
    }

    #[test]
    fn every_reason_is_needed() {
        let ws = crate::repository::find().unwrap();
        let faults = faults::enumerate(&text::bodies(epoxide_gpu::PTX, &names(epoxide_gpu::PTX)).unwrap());
        let reasons: Vec<_> =
            faults.iter().filter_map(|fault| reason(&ws, epoxide_gpu::PTX, fault)).collect();
        for harmless in &HARMLESS {
            // Some entries have the same text.
            assert!(reasons.iter().any(|reason| std::ptr::eq(*reason, harmless)), "{harmless:?}");
        }
        assert!(reasons.len() < faults.len() / 4);
        let other =
            epoxide_gpu::PTX.replacen("// Device code of epoxide-gpu,", "// Device code of scale,", 1);
        assert!(faults.iter().all(|fault| reason(&ws, &other, fault).is_none()), "kernels of another crate");
    }
}

//! Decoding of fences, barriers, warp-wide instructions and bulk copies.

use super::decode::Emit;
use super::state::{Lower, Lowered};
use super::types::{Mods, Ty};
use crate::ir::{
    BarrierKind, BulkOp, Combine, Fence, File, MbarOp, Multicast, Op, Order, Reduce, Reduction, Rmw, SINK,
    Scope, ShflMode, Space, Votes, WarpOp,
};
use crate::ptx::{Operand, Span};

const SCOPES: &[(&str, Scope)] = &[("cta", Scope::Cta), ("cluster", Scope::Cluster)];
const SHARED: &[(&str, Space)] =
    &[("shared", Space::Shared), ("shared::cta", Space::Shared), ("shared::cluster", Space::Cluster)];

/// `fence`, `membar`. A fence for tensor maps orders as one without a proxy: copies read the map in
/// the generic proxy.
pub(super) fn fence(m: &mut Mods) -> Result<Emit, String> {
    const WIDTHS: &[(&str, Scope)] = &[
        ("cta", Scope::Cta),
        ("cluster", Scope::Cluster),
        ("gpu", Scope::Gpu),
        ("gl", Scope::Gpu),
        ("sys", Scope::Sys),
    ];
    // `membar.proxy` is `fence.proxy`.
    let fence = if m.base == "fence" && m.has("tensormap::generic") && m.has("proxy") {
        let acquires = m.one_of(&[("acquire", true), ("release", false)]);
        let (Some(acquires), Some(scope)) = (acquires, m.one_of(WIDTHS)) else { return m.unsupported() };
        return Ok(Box::new(move |l, ops| {
            // An acquire names the tensor map and its size.
            let n = if acquires { 2 } else { 0 };
            l.count(ops, n..=n)?;
            if acquires {
                l.address(&ops[0])?;
            }
            l.push(Op::Fence(Fence::AcqRel(scope)));
            Ok(())
        }));
    } else if m.has("proxy") {
        let known = m.one_of(&[("async", true), ("alias", false), ("async::generic", true)]);
        let shared = m.one_of(SHARED).is_some();
        let global = m.has("global");
        m.ignore(&["acquire", "release"]);
        m.ignore(&["sync_restrict::shared::cta", "sync_restrict::shared::cluster", "cluster"]);
        known.map(|asynchronous| match asynchronous {
            // Naming no space means all.
            true => Fence::Async { shared: shared || !global, global: global || !shared },
            false => Fence::Other,
        })
    } else if m.base == "membar" {
        // `membar` is `fence.sc`.
        m.one_of(WIDTHS).map(Fence::Sc)
    } else if m.has("mbarrier_init") {
        m.ignore(&["release", "cluster"]);
        Some(Fence::MbarrierInit)
    } else {
        // A restriction to mbarriers and copies of a space is taken as none.
        m.ignore(&["sync_restrict::shared::cta", "sync_restrict::shared::cluster"]);
        type Side = (&'static str, fn(Scope) -> Fence);
        const SIDES: &[Side] = &[
            ("sc", Fence::Sc),
            ("acq_rel", Fence::AcqRel),
            ("acquire", Fence::Acquire),
            ("release", Fence::Release),
        ];
        let side = m.one_of(SIDES).unwrap_or(Fence::AcqRel);
        m.one_of(WIDTHS).map(side)
    };
    let Some(fence) = fence else { return m.unsupported() };
    Ok(Box::new(move |l, ops| {
        l.count(ops, 0..=0)?;
        l.push(Op::Fence(fence));
        Ok(())
    }))
}

/// `barrier`, `bar`
pub(super) fn barrier(m: &mut Mods) -> Result<Emit, String> {
    if m.has("warp") {
        if !m.has("sync") {
            return m.unsupported();
        }
        return Ok(Box::new(|l, ops| {
            l.count(ops, 1..=1)?;
            let mask = l.source_of::<u32>(&ops[0])?;
            l.push(Op::Warp { op: WarpOp::Sync, mask });
            Ok(())
        }));
    }
    if m.base == "barrier" && m.has("cluster") {
        let aligned = m.has("aligned");
        m.ignore(&["release", "acquire"]);
        return match m.one_of(&[("arrive", true), ("wait", false)]) {
            Some(true) => {
                let relaxed = m.has("relaxed");
                Ok(super::decode::plain(Op::ClusterArrive { aligned, relaxed }, 0))
            }
            Some(false) => Ok(super::decode::plain(Op::ClusterWait { aligned }, 0)),
            None => m.unsupported(),
        };
    }
    // `bar` is `barrier.aligned`.
    let aligned = m.base == "bar";
    m.has("cta");
    if m.has("red") {
        return vote(m, aligned);
    }
    let kind = m.one_of(&[("sync", BarrierKind::Sync), ("arrive", BarrierKind::Arrive)]);
    let aligned = m.has("aligned") || aligned;
    let Some(kind) = kind else { return m.unsupported() };
    Ok(Box::new(move |l, ops| {
        // An arrive must give the expected number of threads.
        l.count(ops, if kind == BarrierKind::Arrive { 2 } else { 1 }..=2)?;
        let id = l.source_of::<u32>(&ops[0])?;
        let count = ops.get(1).map_or(Ok(SINK), |op| l.source_of::<u32>(op))?;
        l.push(Op::Barrier { kind, id, count, aligned });
        Ok(())
    }))
}

/// `barrier.red`: a vote, a barrier, and a read of the outcome.
fn vote(m: &mut Mods, aligned: bool) -> Result<Emit, String> {
    let aligned = m.has("aligned") || aligned;
    let what = m.one_of(&[("popc", Votes::Count), ("and", Votes::All), ("or", Votes::Any)]);
    let Some(what) = what else { return m.unsupported() };
    let result = if what == Votes::Count { Ty::U32 } else { Ty::Pred };
    if m.ty()? != result {
        return m.unsupported();
    }
    Ok(Box::new(move |l, ops| {
        l.count(ops, 3..=4)?;
        let d = l.dest(&ops[0], result.file(), result.bits())?;
        let id = l.source_of::<u32>(&ops[1])?;
        let count = if ops.len() == 4 { l.source_of::<u32>(&ops[2])? } else { SINK };
        let p = l.source_of::<bool>(&ops[ops.len() - 1])?;
        l.push(Op::BarrierVote { id, p });
        l.push(Op::Barrier { kind: BarrierKind::Sync, id, count, aligned });
        l.push(Op::BarrierResult { what, d });
        Ok(())
    }))
}

/// `d` or `d|p`.
fn pair(op: &(Operand, Span)) -> ((Operand, Span), Option<(Operand, Span)>) {
    match &op.0 {
        Operand::Pair(a, b) => ((Operand::clone(a), op.1), Some((Operand::clone(b), op.1))),
        other => ((other.clone(), op.1), None),
    }
}

fn optional_pred(l: &mut Lower, op: &Option<(Operand, Span)>) -> Lowered<u32> {
    op.as_ref().map_or(Ok(SINK), |op| l.dest(op, File::Pred, 1))
}

/// `shfl`, `vote`, `match`, `redux`, `elect`
pub(super) fn warp_wide(m: &mut Mods) -> Result<Emit, String> {
    if !m.has("sync") {
        return Err(format!("'{}' is not supported: only the .sync form is", m.opcode));
    }
    match m.base {
        "shfl" => {
            let mode = m.one_of(&[
                ("up", ShflMode::Up),
                ("down", ShflMode::Down),
                ("bfly", ShflMode::Bfly),
                ("idx", ShflMode::Idx),
            ]);
            let (Some(mode), true) = (mode, m.has("b32")) else { return m.unsupported() };
            Ok(Box::new(move |l, ops| {
                l.count(ops, 5..=5)?;
                let (d, p) = pair(&ops[0]);
                let op = WarpOp::Shfl {
                    mode,
                    d: l.dest_of::<u32>(&d)?,
                    p: optional_pred(l, &p)?,
                    a: l.source_of::<u32>(&ops[1])?,
                    lane: l.source_of::<u32>(&ops[2])?,
                    clamp: l.source_of::<u32>(&ops[3])?,
                };
                let mask = l.source_of::<u32>(&ops[4])?;
                l.push(Op::Warp { op, mask });
                Ok(())
            }))
        }
        "vote" => {
            type Make = fn(u32, u32) -> WarpOp;
            let all: Make = |d, p| WarpOp::VoteAll { d, p };
            let any: Make = |d, p| WarpOp::VoteAny { d, p };
            let uni: Make = |d, p| WarpOp::VoteUni { d, p };
            let ballot: Make = |d, p| WarpOp::Ballot { d, p };
            let Some((make, file)) = m.one_of(&[
                ("all", (all, File::Pred)),
                ("any", (any, File::Pred)),
                ("uni", (uni, File::Pred)),
                ("ballot", (ballot, File::R32)),
            ]) else {
                return m.unsupported();
            };
            if !m.has(if file == File::Pred { "pred" } else { "b32" }) {
                return m.unsupported();
            }
            Ok(Box::new(move |l, ops| {
                l.count(ops, 3..=3)?;
                let d = l.dest(&ops[0], file, if file == File::Pred { 1 } else { 32 })?;
                let p = l.source_of::<bool>(&ops[1])?;
                let mask = l.source_of::<u32>(&ops[2])?;
                l.push(Op::Warp { op: make(d, p), mask });
                Ok(())
            }))
        }
        "match" => {
            let Some(all) = m.one_of(&[("any", false), ("all", true)]) else { return m.unsupported() };
            let Some(bits) = m.one_of(&[("b32", 32), ("b64", 64)]) else { return m.unsupported() };
            Ok(Box::new(move |l, ops| {
                l.count(ops, 3..=3)?;
                let (d, p) = pair(&ops[0]);
                if p.is_some() && !all {
                    return l.error("match.any has no predicate result");
                }
                let (wide, file) = (bits == 64, if bits == 64 { File::R64 } else { File::R32 });
                let d = l.dest_of::<u32>(&d)?;
                let p = optional_pred(l, &p)?;
                let a = l.source(&ops[1], file, bits)?;
                let mask = l.source_of::<u32>(&ops[2])?;
                let op =
                    if all { WarpOp::MatchAll { d, p, a, wide } } else { WarpOp::MatchAny { d, a, wide } };
                l.push(Op::Warp { op, mask });
                Ok(())
            }))
        }
        "redux" => {
            let names = [
                ("add", (Rmw::Add, Rmw::Add)),
                ("min", (Rmw::Min, Rmw::MinS)),
                ("max", (Rmw::Max, Rmw::MaxS)),
                ("and", (Rmw::And, Rmw::And)),
                ("or", (Rmw::Or, Rmw::Or)),
                ("xor", (Rmw::Xor, Rmw::Xor)),
            ];
            let Some((unsigned, signed)) = m.one_of(&names) else { return m.unsupported() };
            let bitwise = matches!(unsigned, Rmw::And | Rmw::Or | Rmw::Xor);
            let op = match m.ty()? {
                Ty::B32 if bitwise => unsigned,
                Ty::U32 if !bitwise => unsigned,
                Ty::S32 if !bitwise => signed,
                _ => return m.unsupported(),
            };
            Ok(Box::new(move |l, ops| {
                l.count(ops, 3..=3)?;
                let (d, a) = (l.dest_of::<u32>(&ops[0])?, l.source_of::<u32>(&ops[1])?);
                let mask = l.source_of::<u32>(&ops[2])?;
                l.push(Op::Warp { op: WarpOp::Redux { op, d, a }, mask });
                Ok(())
            }))
        }
        _ => Ok(Box::new(|l, ops| {
            l.count(ops, 2..=2)?;
            let (d, p) = pair(&ops[0]);
            let Some(p) = p else { return l.error("elect.sync needs two results: d|p") };
            let op = WarpOp::Elect { d: l.dest_of::<u32>(&d)?, p: l.dest_of::<bool>(&p)? };
            let mask = l.source_of::<u32>(&ops[1])?;
            l.push(Op::Warp { op, mask });
            Ok(())
        })),
    }
}

/// `mbarrier`
pub(super) fn mbarrier(m: &mut Mods) -> Result<Emit, String> {
    #[derive(Clone, Copy, PartialEq)]
    enum Kind {
        Init,
        Inval,
        Arrive { expect: bool, drop: bool, no_complete: bool },
        ExpectTx,
        CompleteTx,
        Wait { parity: bool, blocking: bool },
        PendingCount,
    }
    // `expect_tx` is an operation of its own, and a modifier of the arrivals.
    let Some(mut kind) = m.one_of(&[
        ("init", Kind::Init),
        ("inval", Kind::Inval),
        ("arrive", Kind::Arrive { expect: false, drop: false, no_complete: false }),
        ("arrive_drop", Kind::Arrive { expect: false, drop: true, no_complete: false }),
        ("expect_tx", Kind::ExpectTx),
        ("complete_tx", Kind::CompleteTx),
        ("test_wait", Kind::Wait { parity: false, blocking: false }),
        ("try_wait", Kind::Wait { parity: false, blocking: true }),
        ("pending_count", Kind::PendingCount),
    ]) else {
        return m.unsupported();
    };
    match &mut kind {
        Kind::Arrive { expect, no_complete, .. } => {
            *expect = m.has("expect_tx");
            *no_complete = m.has("noComplete");
        }
        Kind::Wait { parity, .. } => *parity = m.has("parity"),
        _ => {}
    }
    let mut order = Order { relaxed: false, scope: Scope::Cta };
    if !matches!(kind, Kind::Init | Kind::Inval | Kind::PendingCount) {
        m.ignore(&["release", "acquire"]);
        order.relaxed = m.has("relaxed");
        order.scope = m.one_of(SCOPES).unwrap_or(Scope::Cta);
    }
    let space = m.one_of(SHARED).unwrap_or(Space::Generic);
    if !m.has("b64") {
        return m.unsupported();
    }
    Ok(Box::new(move |l, ops| {
        let push = |l: &mut Lower, op: MbarOp, addr: &(Operand, Span)| {
            let addr = l.address(addr)?;
            l.push(Op::Mbar { op, addr, space });
            Ok(())
        };
        match kind {
            Kind::Init => {
                l.count(ops, 2..=2)?;
                let count = l.source_of::<u32>(&ops[1])?;
                push(l, MbarOp::Init { count }, &ops[0])
            }
            Kind::Inval => {
                l.count(ops, 1..=1)?;
                push(l, MbarOp::Inval, &ops[0])
            }
            Kind::ExpectTx | Kind::CompleteTx => {
                l.count(ops, 2..=2)?;
                let tx = l.source_of::<u32>(&ops[1])?;
                let expect = kind == Kind::ExpectTx;
                push(l, if expect { MbarOp::ExpectTx { tx } } else { MbarOp::CompleteTx { tx } }, &ops[0])
            }
            Kind::Arrive { expect, drop, no_complete } => {
                // The state operand may be missing.
                let state_given = !matches!(ops.first(), Some((Operand::Address { .. }, _)));
                let at = usize::from(state_given);
                l.count(ops, at + 1 + usize::from(expect)..=at + 2)?;
                let state = if state_given { l.dest_of::<u64>(&ops[0])? } else { SINK };
                let last = ops.get(at + 1).map_or(Ok(SINK), |op| l.source_of::<u32>(op))?;
                let (count, tx) = if expect { (SINK, last) } else { (last, SINK) };
                push(l, MbarOp::Arrive { state, count, tx, drop, no_complete, order }, &ops[at])
            }
            Kind::Wait { parity, blocking } => {
                // `try_wait` may carry a time hint.
                l.count(ops, 3..=if blocking { 4 } else { 3 })?;
                let p = l.dest_of::<bool>(&ops[0])?;
                if let Some(hint) = ops.get(3) {
                    l.source_of::<u32>(hint)?;
                }
                let op = if parity {
                    MbarOp::TestParity { p, parity: l.source_of::<u32>(&ops[2])?, order }
                } else {
                    MbarOp::TestState { p, state: l.source_of::<u64>(&ops[2])?, order }
                };
                push(l, op, &ops[1])
            }
            Kind::PendingCount => {
                l.count(ops, 2..=2)?;
                let (d, state) = (l.dest_of::<u32>(&ops[0])?, l.source_of::<u64>(&ops[1])?);
                l.push(Op::PendingCount { d, state });
                Ok(())
            }
        }
    }))
}

/// `cp.async`, `cp.async.bulk`, `cp.reduce.async.bulk`
pub(super) fn bulk(m: &mut Mods) -> Result<Emit, String> {
    if !m.has("async") {
        return m.unsupported();
    }
    if !m.has("bulk") {
        return super::mem::copy(m);
    }
    if m.has("tensor") {
        return super::tensor::copy(m);
    }
    if m.has("reduce") {
        return reduction(m);
    }
    if m.has("commit_group") {
        return Ok(Box::new(|l, ops| {
            l.count(ops, 0..=0)?;
            l.push(Op::Bulk(BulkOp::Commit));
            Ok(())
        }));
    }
    if m.has("wait_group") {
        let read_only = m.has("read");
        return Ok(Box::new(move |l, ops| {
            l.count(ops, 1..=1)?;
            let Operand::Int(n) = ops[0].0 else { return l.error("the number of groups must be a constant") };
            let Ok(pending) = u32::try_from(n) else { return l.error("the number of groups is negative") };
            l.push(Op::Bulk(BulkOp::Wait { pending, read_only }));
            Ok(())
        }));
    }
    if m.has("prefetch") {
        if !(m.has("L2") && m.has("global")) {
            return m.unsupported();
        }
        let policy = usize::from(m.has("L2::cache_hint"));
        return Ok(Box::new(move |l, ops| {
            l.count(ops, 2 + policy..=2 + policy)?;
            let src = l.address(&ops[0])?;
            let size = l.source_of::<u32>(&ops[1])?;
            l.push(Op::Bulk(BulkOp::Prefetch { src, size }));
            Ok(())
        }));
    }
    // Destination and source space, in this order.
    let spaces: Vec<&str> =
        m.names().filter(|n| matches!(*n, "global" | "shared::cta" | "shared::cluster")).collect();
    spaces.iter().for_each(|s| {
        m.has(s);
    });
    let on_mbarrier = m.has("mbarrier::complete_tx::bytes");
    let in_group = m.has("bulk_group");
    let multicast = usize::from(m.has("multicast::cluster"));
    let policy = usize::from(m.has("L2::cache_hint"));
    #[derive(Clone, Copy)]
    enum Kind {
        Load,
        Multicast,
        Store,
        Inside,
    }
    let kind = match (spaces.as_slice(), on_mbarrier, in_group) {
        (["shared::cluster", "global"], true, false) if multicast == 1 => Kind::Multicast,
        _ if multicast == 1 => return m.unsupported(),
        (["shared::cluster" | "shared::cta", "global"], true, false) => Kind::Load,
        (["global", "shared::cta"], false, true) => Kind::Store,
        (["shared::cluster", "shared::cta"], true, false) => Kind::Inside,
        _ => return m.unsupported(),
    };
    Ok(Box::new(move |l, ops| {
        let n = 3 + usize::from(on_mbarrier) + multicast + policy;
        l.count(ops, n..=n)?;
        if policy == 1 {
            l.source_of::<u64>(&ops[n - 1])?;
        }
        let (dst, src) = (l.address(&ops[0])?, l.address(&ops[1])?);
        let size = l.source_of::<u32>(&ops[2])?;
        let mbar = if on_mbarrier { Some(l.address(&ops[3])?) } else { None };
        let op = match (kind, mbar) {
            (Kind::Multicast, Some(mbar)) => {
                let blocks = l.source(&ops[4], File::R32, 16)?;
                l.operands.multicasts.push(Multicast { dst, src, size, mbar, blocks });
                BulkOp::Multicast { copy: l.operands.multicasts.len() as u32 - 1 }
            }
            (Kind::Load, Some(mbar)) => BulkOp::Load { dst, src, size, mbar },
            (Kind::Inside, Some(mbar)) => BulkOp::SharedToShared { dst, src, size, mbar },
            _ => BulkOp::Store { dst, src, size },
        };
        l.push(Op::Bulk(op));
        Ok(())
    }))
}

/// `cp.reduce.async.bulk`, to global memory or to shared memory of a block of the cluster.
fn reduction(m: &mut Mods) -> Result<Emit, String> {
    let spaces: Vec<&str> =
        m.names().filter(|n| matches!(*n, "global" | "shared::cta" | "shared::cluster")).collect();
    m.ignore(&spaces);
    let on_mbarrier = m.has("mbarrier::complete_tx::bytes");
    let to_global = match (spaces.as_slice(), on_mbarrier, m.has("bulk_group")) {
        (["global", "shared::cta"], false, true) => true,
        (["shared::cluster", "shared::cta"], true, false) => false,
        _ => return m.unsupported(),
    };
    let policy = usize::from(m.has("L2::cache_hint"));
    if policy == 1 && !to_global {
        return m.unsupported();
    }
    let reduce = m.one_of(&Reduce::NAMES);
    let noftz = m.has("noftz");
    let Some(reduce) = reduce else { return m.unsupported() };
    let ty = m.ty()?;
    let op = match (reduce, ty) {
        (Reduce::Add, Ty::U32 | Ty::S32 | Ty::U64)
        | (Reduce::Min | Reduce::Max, Ty::U32 | Ty::S32)
        | (Reduce::Inc | Reduce::Dec, Ty::U32)
        | (Reduce::And | Reduce::Or | Reduce::Xor, Ty::B32) => reduce.of_integers(ty == Ty::S32),
        // The others are to global memory.
        _ if !to_global => return m.unsupported(),
        (Reduce::Min | Reduce::Max, Ty::U64 | Ty::S64)
        | (Reduce::And | Reduce::Or | Reduce::Xor, Ty::B64) => reduce.of_integers(ty == Ty::S64),
        // An H200 flushes no subnormals, unlike `red` in global memory.
        (Reduce::Add, Ty::F32) => Rmw::AddF32,
        (Reduce::Add, Ty::F64) => Rmw::AddF64,
        (Reduce::Add, Ty::F16) => Rmw::AddF16,
        (Reduce::Add, Ty::Bf16) => Rmw::AddBf16,
        (Reduce::Min, Ty::F16) => Rmw::MinF16,
        (Reduce::Max, Ty::F16) => Rmw::MaxF16,
        (Reduce::Min, Ty::Bf16) => Rmw::MinBf16,
        (Reduce::Max, Ty::Bf16) => Rmw::MaxBf16,
        _ => return m.unsupported(),
    };
    // Among floats of 16 bits, sums alone name the qualifier.
    if noftz != matches!(op, Rmw::AddF16 | Rmw::AddBf16) {
        return m.unsupported();
    }
    let combine = Combine { op, bytes: (ty.bits() / 8) as u8 };
    Ok(Box::new(move |l, ops| {
        let n = 3 + usize::from(!to_global) + policy;
        l.count(ops, n..=n)?;
        if policy == 1 {
            l.source_of::<u64>(&ops[n - 1])?;
        }
        let (dst, src) = (l.address(&ops[0])?, l.address(&ops[1])?);
        let size = l.source_of::<u32>(&ops[2])?;
        let mbar = if to_global { None } else { Some(l.address(&ops[3])?) };
        l.operands.reductions.push(Reduction { dst, src, size, mbar, combine });
        l.push(Op::Bulk(BulkOp::Reduce { copy: l.operands.reductions.len() as u32 - 1 }));
        Ok(())
    }))
}

//! The tests, and the PTX memory model's verdict on each.
//!
//! Placement: `1` one thread, `c` one block, `k` different blocks of a cluster, `g` different
//! clusters, which are one block each where there is no `k`, `s` different devices. `‖` separates
//! threads. An access is kind (`W` write, `R` read, `U` atom, `D` red), order (`w` weak, `x`
//! relaxed, `a` acquire, `r` release, `b` acq_rel, `s` sc), scope (`c` block, `k` cluster, `g`
//! device, `s` system), `.location=value`. `D` as a location is in shared memory of the cluster's
//! first block. `F` is a fence. `L.S/m` is a bulk load from `G` to `S` on mbarrier `m`, `T` a
//! committed bulk store from `S` to `G`. `E` is arrive.expect_tx, `V` a wait for the mbarrier, `Q`
//! wait_group 0, `q` its `.read` form. `P*` and `Ps` are a full and a shared::cta proxy fence, `B`
//! and `b` a block and a warp barrier, `C` and `X` a barrier of the cluster, whose arrivals
//! release or are relaxed, `K` is a kernel boundary. A `?` behind a read ends the thread unless it
//! has read that value. Only then do the accesses behind it belong to the execution in question.

/// Whether the execution that the text describes may happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may not.
    Forbidden,
    /// It may.
    Allowed,
    /// Allowed, and with a race in it.
    Racy,
}
use Verdict::{Allowed as A, Forbidden as F, Racy as R};

/// One test.
pub struct Test {
    /// Counted from 1.
    pub number: u32,
    /// The program and the execution in question, in the notation above.
    pub text: &'static str,
    /// The model's verdict.
    pub verdict: Verdict,
    /// The rule that decides.
    pub rule: &'static str,
    /// The verdict of Dat3M: `=` agrees, `~` agrees for the like shape with the surface proxy;
    /// other texts give the difference and its reason.
    pub dat3m: &'static str,
}

const fn t(
    number: u32,
    text: &'static str,
    verdict: Verdict,
    rule: &'static str,
    dat3m: &'static str,
) -> Test {
    Test { number, text, verdict, rule, dat3m }
}

/// All of them.
pub static TESTS: [Test; 80] = [
    t(1, "g:Ww.x=1;Wrg.f=1‖Rag.f=1?;Rw.x=0", F, "causality", "=Proxy-MP-gpu1"),
    t(2, "g:Ww.x=1;Wrc.f=1‖Rac.f=1?;Rw.x=0", R, "scope", "=MP-cta"),
    t(3, "c:Ww.x=1;Wrc.f=1‖Rag.f=1?;Rw.x=0", F, "mutual scope", "=MP-cta-gpu"),
    t(4, "g:Ww.x=1;Wxg.f=1‖Rxg.f=1?;Rw.x=0", R, "no pattern", ""),
    t(5, "c:Ww.x=1;Fbs;Wxs.f=1‖Rxs.f=1?;Fbs;Rw.x=0", F, "fence patterns", "=MP-sys-fence"),
    t(6, "s:Ww.x=1;Wrg.f=1‖Rag.f=1?;Rw.x=0", R, "scope", ""),
    t(7, "s:Ww.x=1;Wrs.f=1‖Ras.f=1?;Rw.x=0", F, "causality", ""),
    t(8, "g:Ww.x=1;Wrs.f=1;Wxs.f=2‖Rxs.f=2?;Fbs;Rw.x=0", F, "release pattern", "=Release-acquire-pattern"),
    t(9, "c:Wxg.x=1;Wrg.f=1‖Uxg.f=1→2‖Rag.f=2?;Rxg.x=0", F, "RMW chain", "=MP+RMW"),
    t(10, "g:Ww.x=1;Wrg.f=1;Ww.f=2‖Rag.f=2?;Rw.x=0", R, "weak breaks chain", ""),
    t(11, "g:Ww.x=1;Wrg.f=1‖Dxg.f→2;Fbg;Rw.x=0", R, "8.11.1: a red begins no acquire pattern", ""),
    t(12, "c,c,g:Ww.x=1;Wrc.f=1‖Rac.f=1?;Wrg.h=1‖Rag.h=1?;Rw.x=0", F, "cumulativity", "=MP-3-transitive"),
    t(13, "g:Ww.x=1;Rw.y=0‖Ww.y=1;Rw.x=0", R, "no sync", "=SB-weak"),
    t(14, "c:Wrc.x=1;Fbc;Rac.y=0‖Wrc.y=1;Fbc;Rac.x=0", A, "needs sc", "=SB+acq_rel-cta"),
    t(15, "c:Ww.x=1;Fsc;Rw.y=0‖Ww.y=1;Fsc;Rw.x=0", F, "Fence-SC", "=SB+sc-cta"),
    t(
        16,
        "g:Ww.x=1;Fsc;Rw.y=0‖Ww.y=1;Fsc;Rw.x=0",
        R,
        "scope",
        "SB+sc-cta-outScope differs: its condition is trivially true. 8.10.2 orders only morally strong fence.sc operations, and 8.7 asks \
         that each scope contain the other's thread",
    ),
    t(17, "g:Ubg.x;Ubg.y=0‖Ubg.y;Ubg.x=0", F, "atomicity", "=Atom-SB"),
    t(18, "g:Ubg.x;Ubg.y=0‖Wxg.y=1;Rxg.x=0", A, "no sync", "=Atom-SB-ld"),
    t(19, "c:Ww.x=1;B;Rw.y=0‖Ww.y=1;B;Rw.x=0", F, "barrier", "=SB+bar-const-equal"),
    t(20, "g:Ww.x=1;B;Rw.y=0‖Ww.y=1;B;Rw.x=0", R, "block-local", "=SB+bar-diff-cta"),
    t(21, "c:Rw.x=1;B‖B;Ww.x=1", F, "barrier, write after read", "=PC-bar-sync-sync-1"),
    t(22, "c:Rw.x=1;b‖b;Ww.x=1", F, "warp barrier, inferred", ""),
    t(23, "g:Wxg.x=1‖Rxg.x=1;Rxg.x=0", F, "SC per location", ""),
    t(24, "c:Wxs.x=1‖Wxs.x=2‖Ras.x=1;Ras.x=2‖Ras.x=2;Ras.x=1", F, "coherence", "=Coherence"),
    t(25, "s:Wrg.x=1‖Rw.x=1;Rw.x=0", R, "weak", "=CoRR-weak-weak"),
    t(26, "g:Wrg.x=1‖Rag.x=1?;Rw.x=0", F, "causality", "=CoRR-acquire-weak"),
    t(27, "g:Ubs.x+1‖Ubs.x+1;x=1", F, "atomicity", "=Atom-plus-location_"),
    t(28, "g:Ubc.x+1‖Ubc.x+1;x=1", R, "scope", "=Atom-plus-location-weak_"),
    t(29, "g:Rw.x=1;Ww.y=1‖Rw.y=1;Ww.x=1", R, "8.10.4", ""),
    t(30, "g:Rw.x=v;Ww.y=v‖Rw.y=v;Ww.x=v;v=42", F, "thin air", "=LB+NoThinAir-location_"),
    t(31, "c:Rag.y=1?;Ww.x=1‖Rxg.x=1?;Wrg.y=1", F, "causality", "=LB+RMW-b"),
    t(32, "g:Wxs.x=1‖Wxs.y=1‖Ras.x=1;Ras.y=0‖Ras.y=1;Ras.x=0", A, "no sc", ""),
    t(33, "g:Wxs.x=1‖Wxs.y=1‖Ras.x=1;Fss;Ras.y=0‖Ras.y=1;Fss;Ras.x=0", F, "Fence-SC", ""),
    t(34, "g:Ww.v4=1‖Rw.v4=(1,0,1,0)", R, "8.2.4", ""),
    t(35, "s:Wxs.p64=(1,1)‖Rxs.p64=(1,0)", F, "single copy", ""),
    t(36, "s:Wxs.p64‖Rxs.p32", R, "8.7.2: a race of mixed size, any value", ""),
    t(37, "g:Ww.x=1;Ubg.t=0‖Ubg.t=1?;Rw.x=0", F, "RMW sync", ""),
    t(38, "g:Rag.e=2;Ubg.t=0‖Ubg.t=1?;Ww.e=2", F, "causality, write after read", ""),
    t(39, "s:Ww.x=1;K;Wrs.f=1‖Ras.f=1?;Rw.x=0", F, "API, cumulative", ""),
    t(40, "1:Ww.S=1;T;Q;Rw.G=0", R, "proxies", "~SingleThread-rf-genW-surR"),
    t(41, "1:Ww.S=1;Ps;T;Q;Rw.G=0", F, "fence", "~SingleThread-rf-genW-surF-surR"),
    t(42, "c:Ww.S=1;B‖B;T;Q;Rw.G=0", R, "proxies", "~MP-gen-sur-no-proxyFence"),
    t(43, "c:Ww.S=1;Ps;B‖B;T;Q;Rw.G=0", F, "fence", "~MP-gen-sur-surfaceFence"),
    t(44, "c:Ww.S=1;B‖B;Ps;T;Q;Rw.G=0", F, "fence", "~MP-gen-sur-surfaceFence1"),
    t(45, "1:E;L.S/m;V;Rw.S=0", F, "implicit fence", ""),
    t(46, "1:E;L.S/m;Rw.S=0", R, "no completion", ""),
    t(47, "c:E;L.S/m;V;B‖B;Rw.S=0", F, "cumulative, inferred", ""),
    t(48, "c:E;Ww.y=1;L.S/m‖V;Rw.y=0", R, "8.9.1.1: a completion publishes its own copy only", ""),
    t(49, "c:Ww.y=1;E;L.S/m‖V;Rw.y=0", F, "arrive releases", ""),
    t(50, "c:Rw.S=1;b‖b;E;L.S/m", R, "proxies, write after read", ""),
    t(51, "c:Rw.S=1;b‖b;Ps;E;L.S/m", F, "fence, inferred", ""),
    t(52, "1:T;q;Ww.S=2;Q;Rw.G=2", F, "read end", ""),
    t(53, "g:T;q;Wrg.f=1‖Rag.f=1?;Rw.G=0", R, "read end only", ""),
    t(54, "g:T;Q;Wrg.f=1‖Rag.f=1?;Rw.G=0", F, "completion, inferred", "~MP-gpu6"),
    t(55, "s:Ww.G=1;Wrs.f=1‖Ras.f=1?;E;L.S/m;V;Rw.S=0", R, "proxies", "~MP-gpu2"),
    t(56, "s:Ww.G=1;Wrs.f=1‖Ras.f=1?;P*;E;L.S/m;V;Rw.S=0", F, "fence", "~MP-gpu13"),
    t(57, "s:Ww.G=1;Wrs.f=1‖Ras.f=1?;Ps;E;L.S/m;V;Rw.S=0", R, "wrong space", ""),
    // The next three are disputed: no sentence of the PTX page specifies at which end of a path the
    // fence must be. The checker accepts either end (see `check/mod.rs`).
    t(
        58,
        "s:Ww.G=1;P*;Wrs.f=1‖Ras.f=1?;E;L.S/m;V;Rw.S=0",
        F,
        "fence anywhere on the path",
        "~MP-gpu5 differs: it allows this, since it wants the fence in the block of the access in the other proxy. 8.9.5 has no clause \
         on fence.proxy.async. (Proxy-Const-MP-cause-different-cta, often cited here, uses block scopes across blocks, so it does not tell)",
    ),
    t(59, "s:Rw.G=1;K;Wrs.f=1‖Ras.f=1?;T", F, "a kernel boundary orders all proxies (8.9.4)", ""),
    t(
        60,
        "g:T;Q;Wrg.f=1‖Rag.f=1?;E;L.S/m;V;Rw.S=0",
        F,
        "completion suffices",
        "unfenced ~MP-gpu4 differs: it allows this, since it wants fences in the blocks of both copies. No sentence decides; that the \
         completion which was waited for (8.9.1.1) is enough is inferred",
    ),
    // Beyond the reference: an observation may begin a causality path (8.9.5), though it orders
    // nothing else of the writer.
    t(61, "g:Wxg.x=1‖Rxg.x=1?;Wrg.f=1‖Rag.f=1?;Rw.x=0", F, "observation, then synchronization", ""),
    t(62, "g:Wxg.x=1‖Rxg.x=1?;Rw.x=0", F, "observation, then program order", ""),
    t(63, "g:Wxg.x=1‖Rxg.x=1?;Ww.x=2;x=1", F, "observation, then a weak write", ""),
    t(64, "g:Ww.y=1;Wxg.x=1‖Rxg.x=1?;Wrg.f=1‖Rag.f=1?;Rw.y=0", R, "an observation brings no past", ""),
    t(65, "g:Wxc.x=1‖Rxc.x=1?;Rw.x=0", R, "no observation across scopes", ""),
    t(66, "g:Wxg.x=1‖Rxg.x=1?;Wxg.f=1‖Rxg.f=1?;Rw.x=0", R, "observations do not chain", ""),
    t(67, "g:Ww.x=1;Wrg.f=1;Wrg.f=2‖Rag.f=1?;Rw.x=0", F, "an older release brings what came with it", ""),
    t(68, "g:Rxg.x=1;Wxg.y=1‖Rxg.y=1;Wxg.x=1", A, "relaxed accesses order nothing else", ""),
    // Parts of a word.
    t(69, "g:Ww.p8=1‖Ww.p8.1=1;p=1", F, "bytes of a word are locations of their own", ""),
    t(70, "g:Rw.p16=0;Ww.p16=1‖Rw.p16.1=0;Ww.p16.1=1;p=1", F, "in place, beside a neighbour", ""),
    t(71, "c:Rw.p8=0;Ww.p8=1;b‖Rw.p8.1=0;Ww.p8.1=1;b;p=1", F, "in place, beside a lane", ""),
    t(72, "g:Ww.p8=1;Wrg.p8.1=1‖Rag.p8.1=1?;Rw.p8=0", F, "causality within a word", ""),
    t(73, "g:Ww.p8=1;Wxg.p8.1=1‖Rxg.p8.1=1?;Rw.p8=0", R, "no pattern within a word", ""),
    t(74, "s:Ww.p16.1=1;Wrs.p16=1‖Ras.p16=1?;Rw.p16.1=0", F, "causality within a word", ""),
    t(75, "g:Ww.p8=1;Wrg.f=1‖Rag.f=1?;Rw.p16=0", F, "causality, a wider read", ""),
    t(76, "c:Ww.p8=1;B;Rw.p8.1=0‖Ww.p8.1=1;B;Rw.p8=0", F, "barrier", ""),
    t(77, "g:Wrg.p16=1‖Rw.p16=1;Rw.p16=0", R, "weak", ""),
    t(78, "g:Wxg.p8=1‖Rxg.p8=1;Rxg.p8=0", F, "SC per location", ""),
    t(79, "g:Wxg.p16=257‖Rxg.p8.1=0", R, "8.7.2: a race of mixed size, any value", ""),
    t(80, "g:Ww.p8=2‖Ww.p16=257;p=258", R, "mixed sizes, no order", ""),
];

/// Tests of clusters, which run on virtual GPUs alone so far. Numbers go on behind those of
/// [`TESTS`].
pub static CLUSTER_TESTS: [Test; 36] = [
    t(81, "k:Ww.x=1;Wrk.f=1‖Rak.f=1?;Rw.x=0", F, "causality", ""),
    t(82, "g:Ww.x=1;Wrk.f=1‖Rak.f=1?;Rw.x=0", R, "scope", ""),
    t(83, "k:Ww.x=1;Wrk.f=1‖Rag.f=1?;Rw.x=0", F, "mutual scope", ""),
    t(84, "k:Ww.x=1;Wrc.f=1‖Rak.f=1?;Rw.x=0", R, "scope", ""),
    t(85, "k:Ww.x=1;Wrk.f=1‖Rac.f=1?;Rw.x=0", R, "scope", ""),
    t(86, "c:Ww.x=1;Wrk.f=1‖Rac.f=1?;Rw.x=0", F, "mutual scope", ""),
    t(87, "k:Ww.x=1;Fbk;Wxk.f=1‖Rxk.f=1?;Fbk;Rw.x=0", F, "fence patterns", ""),
    t(88, "k:Ww.x=1;Fbc;Wxk.f=1‖Rxk.f=1?;Fbk;Rw.x=0", R, "scope of the fence", ""),
    t(89, "k:Ww.x=1;Wxk.f=1‖Rxk.f=1?;Rw.x=0", R, "no pattern", ""),
    t(90, "k:Wxk.x=1;Fsk;Rxk.y=0‖Wxk.y=1;Fsk;Rxk.x=0", F, "Fence-SC", ""),
    t(91, "k:Wxk.x=1;Fbk;Rxk.y=0‖Wxk.y=1;Fbk;Rxk.x=0", A, "needs sc", ""),
    t(92, "g:Wxg.x=1;Fsk;Rxg.y=0‖Wxg.y=1;Fsk;Rxg.x=0", A, "scope of the fence", ""),
    t(93, "k,k,g:Ww.x=1;Wrk.f=1‖Rak.f=1?;Wrg.h=1‖Rag.h=1?;Rw.x=0", F, "cumulativity", ""),
    t(94, "k,k,g:Ww.x=1;Wrk.f=1‖Rak.f=1?;Wrk.h=1‖Rag.h=1?;Rw.x=0", R, "scope", ""),
    t(95, "k:Ww.x=1;Ubk.t=0‖Ubk.t=1?;Rw.x=0", F, "RMW sync", ""),
    t(96, "k:Ubk.x+1‖Ubk.x+1;x=1", F, "atomicity", ""),
    t(97, "k:Wxk.x=1‖Rxk.x=1?;Rw.x=0", F, "observation, then program order", ""),
    t(98, "g:Wxk.x=1‖Rxk.x=1?;Rw.x=0", R, "no observation across scopes", ""),
    // The barrier of a cluster.
    t(99, "k:Ww.x=1;C;Rw.y=0‖Ww.y=1;C;Rw.x=0", F, "barrier", ""),
    t(100, "k:Ww.x=1;X;Rw.y=0‖Ww.y=1;X;Rw.x=0", R, "a relaxed arrival releases nothing", ""),
    t(101, "k:Ww.x=1;C‖X;Rw.x=0", F, "the reader need not release", ""),
    t(102, "k:Ww.x=1;X‖C;Rw.x=0", R, "the writer must release", ""),
    t(103, "k:Ww.x=1;Fbk;X‖X;Rw.x=0", F, "a fence and a relaxed arrival, inferred", ""),
    t(104, "k:Ww.x=1;Fbc;X‖X;Rw.x=0", R, "scope of the fence", ""),
    t(105, "g:Ww.x=1;C;Rw.y=0‖Ww.y=1;C;Rw.x=0", R, "cluster-local", ""),
    t(106, "k:Rw.x=1;C‖C;Ww.x=1", F, "barrier, write after read", ""),
    // Distributed shared memory.
    t(107, "k:Ww.D=1;C‖C;Rw.D=0", F, "barrier", ""),
    t(108, "k:Ww.D=1;X‖X;Rw.D=0", R, "a relaxed arrival releases nothing", ""),
    t(109, "k:Ww.D=1;Wrk.f=1‖Rak.f=1?;Rw.D=0", F, "causality", ""),
    t(110, "k:Ww.D=1;Wrc.f=1‖Rac.f=1?;Rw.D=0", R, "scope", ""),
    t(111, "k:Ww.x=1;Wrk.D=1‖Rak.D=1?;Rw.x=0", F, "causality", ""),
    t(112, "k:Ww.x=1;Wxk.D=1‖Rxk.D=1?;Rw.x=0", R, "no pattern", ""),
    t(113, "k:Ww.x=1;Ubk.D=0‖Ubk.D=1?;Rw.x=0", F, "RMW sync", ""),
    t(114, "k:Wxk.D=1‖Rxk.D=1;Rxk.D=0", F, "SC per location", ""),
    t(115, "k,k,k:Ww.D=1;Wrk.f=1‖Rak.f=1?;Wrk.h=1‖Rak.h=1?;Rw.D=0", F, "cumulativity", ""),
    t(116, "k:Wxc.D=1‖Rxc.D=1?;Rw.D=0", R, "no observation across scopes", ""),
];

/// Programs that have a race in executions other than the one in question.
pub const RACY_ELSEWHERE: &[(u32, &str)] = &[
    (15, "a weak read that sees 0 is ordered behind nothing, nor is the write before it"),
    (30, "each thread reads what the other writes, and nothing orders them"),
];

/// Allowed executions that the simulation does not bring about.
pub const NOT_SHOWN: &[(u32, &str)] = &[
    (28, "a read-modify-write is one step here, whatever its scope"),
    (50, "a copy never starts before its instruction"),
];

/// Forbidden executions of which even the guarded reads cannot have their values.
pub const NEVER_REACHED: &[(u32, &str)] = &[(31, "each guard waits for what comes behind the other")];

//! Divergence, reconvergence, warp-wide instructions, special registers.

use epoxide_vgpu::{DeviceConfig, FaultKind, GridConfig, WaitingFor};

use crate::common::*;

fn lanes(f: impl Fn(u64) -> u64) -> Vec<u64> {
    (0..32).map(f).collect()
}

/// Runs a snippet with the lane number in `%r1` and returns `%r0` of each lane.
fn by_lane(snippet: &str) -> Vec<u64> {
    per_lane(snippet, 32, &[lanes(|i| i)])
}

#[test]
fn nested_loops_with_different_trip_counts() {
    // Lane i: sum over a in 0..=i of (a % 3 + 1) rounds of the inner loop.
    let body = "
        mov.u32 %r0, 0; mov.u32 %r2, 0;
    OUTER:
        rem.u32 %r3, %r2, 3; add.u32 %r3, %r3, 1;
    INNER:
        add.u32 %r0, %r0, 1; sub.u32 %r3, %r3, 1;
        setp.ne.u32 %p1, %r3, 0; @%p1 bra INNER;
        add.u32 %r2, %r2, 1; setp.le.u32 %p2, %r2, %r1; @%p2 bra.uni OUTER;";
    assert_eq!(by_lane(body), lanes(|i| (0..=i).map(|a| a % 3 + 1).sum()));
}

#[test]
fn early_exit_leaves_the_others_running() {
    let body = "
        setp.lt.u32 %p1, %r40, 10; @%p1 exit;
        activemask.b32 %r2; setp.eq.u32 %p2, 0, 0; bar.warp.sync -1;
        vote.sync.ballot.b32 %r3, %p2, 0xffffffff;
        xor.b32 %r2, %r2, %r3; cvt.u64.u32 %rd1, %r3; cvt.u64.u32 %rd2, %r2; add.u64 %rd1, %rd1, %rd2;
        st.global.u64 [%rd42], %rd1;";
    let got = run_body("", body, 32, &[0; 32]);
    assert_eq!(got, lanes(|i| if i < 10 { 0 } else { 0xffff_fc00 }));
}

#[test]
fn branches_reconverge() {
    let body = "
        and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra EVEN;
        mul.lo.u32 %r3, %r1, 3; bra.uni JOIN;
    EVEN:
        mul.lo.u32 %r3, %r1, 5;
    JOIN:
        activemask.b32 %r4; setp.eq.u32 %p2, %r4, -1; selp.u32 %r0, %r3, 0, %p2;";
    assert_eq!(by_lane(body), lanes(|i| if i % 2 == 0 { i * 5 } else { i * 3 }));
}

#[test]
fn guards_on_everything() {
    assert_eq!(
        by_lane("setp.lt.u32 %p1, %r1, 5; mov.u32 %r0, 1; @%p1 mov.u32 %r0, 2; @!%p1 add.u32 %r0, %r0, 6;"),
        lanes(|i| if i < 5 { 2 } else { 7 })
    );
    // A guarded warp-wide instruction: the lanes that do not take part go on.
    let body = "setp.lt.u32 %p1, %r1, 4; mov.u32 %r0, 99; @%p1 shfl.sync.idx.b32 %r0, %r1, 2, 31, 0xf;";
    assert_eq!(by_lane(body), lanes(|i| if i < 4 { 2 } else { 99 }));
}

#[test]
fn indexed_branch() {
    let body = "
        and.b32 %r2, %r1, 3;
        targets: .branchtargets L0, L1, L2, L1;
        brx.idx %r2, targets;
    L0: mov.u32 %r0, 10; bra END;
    L1: mov.u32 %r0, 11; bra END;
    L2: mov.u32 %r0, 12;
    END:";
    let want = [10, 11, 12, 11];
    assert_eq!(by_lane(body), lanes(|i| want[i as usize % 4]));
    let kind = fault_kind("mov.u32 %r1, 9; t: .branchtargets A; brx.idx %r1, t; A:");
    assert!(matches!(kind, FaultKind::Unsupported(_)));
}

#[test]
fn a_lane_that_waits_for_another_lane_of_its_warp_gets_it() {
    // Lane 0 spins at a low address until lane 1, on the other side of the branch, has stored the
    // flag.
    let body = "
        setp.ne.u32 %p1, %r40, 0; @%p1 bra STORE;
    SPIN:
        ld.acquire.gpu.global.u32 %r2, [%rd40]; setp.eq.u32 %p2, %r2, 0; @%p2 bra SPIN;
        st.global.u64 [%rd40+8], 77; bra END;
    STORE:
        st.release.gpu.global.u32 [%rd40], 1;
    END:";
    assert_eq!(run_body("", body, 2, &[0, 0])[..2], [1, 77]);
    // The same with weak loads, where only the fuel of the group helps.
    let weak = body.replace("ld.acquire.gpu", "ld");
    assert_eq!(run_body("", &weak, 2, &[0, 0])[..2], [1, 77]);
}

#[test]
fn shuffles() {
    let r = |mode: &str, b: &str, c: u32| {
        by_lane(&format!(
            "shfl.sync.{mode}.b32 %r2|%p1, %r1, {b}, {c}, -1; selp.u32 %r3, 100, 0, %p1; add.u32 %r0, %r2, %r3;"
        ))
    };
    // In range: value + 100; out of range: own value.
    assert_eq!(r("up", "3", 0), lanes(|i| if i >= 3 { i - 3 + 100 } else { i }));
    assert_eq!(r("down", "3", 31), lanes(|i| if i + 3 <= 31 { i + 3 + 100 } else { i }));
    assert_eq!(r("bfly", "5", 31), lanes(|i| (i ^ 5) + 100));
    assert_eq!(r("idx", "7", 31), lanes(|_| 107));
    // Segments of 8 lanes: mask 0x18 in bits 8..13.
    assert_eq!(r("up", "3", 0x1800), lanes(|i| if i % 8 >= 3 { i - 3 + 100 } else { i }));
    assert_eq!(r("down", "3", 0x181f), lanes(|i| if i % 8 + 3 < 8 { i + 3 + 100 } else { i }));
    assert_eq!(r("idx", "5", 0x181f), lanes(|i| i / 8 * 8 + 5 + 100));
    // Clamp below the source lane: out of range.
    assert_eq!(r("idx", "5", 0x1803), lanes(|i| i));
    // Only the low five bits of the lane count.
    assert_eq!(r("idx", "39", 31), lanes(|_| 107));
    assert_eq!(by_lane("shfl.sync.idx.b32 %r0, %r1, %r1, 31, -1;"), lanes(|i| i));
    // Two half warps with masks of their own, in one instruction.
    let halves = "setp.lt.u32 %p1, %r1, 16; selp.b32 %r2, 0xffff, 0xffff0000, %p1;
        selp.b32 %r3, 3, 19, %p1; shfl.sync.idx.b32 %r0, %r1, %r3, 31, %r2;";
    assert_eq!(by_lane(halves), lanes(|i| if i < 16 { 3 } else { 19 }));
}

#[test]
fn votes_and_matches() {
    let odd = "and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 1;";
    let sel = "selp.u32 %r0, 1, 0, %p2;";
    assert_eq!(by_lane(&format!("{odd} vote.sync.ballot.b32 %r0, %p1, -1;")), lanes(|_| 0xaaaa_aaaa));
    assert_eq!(by_lane(&format!("{odd} vote.sync.ballot.b32 %r0, !%p1, -1;")), lanes(|_| 0x5555_5555));
    assert_eq!(by_lane(&format!("{odd} vote.sync.any.pred %p2, %p1, -1; {sel}")), lanes(|_| 1));
    assert_eq!(by_lane(&format!("{odd} vote.sync.all.pred %p2, %p1, -1; {sel}")), lanes(|_| 0));
    assert_eq!(by_lane(&format!("{odd} vote.sync.uni.pred %p2, %p1, -1; {sel}")), lanes(|_| 0));
    let all = "setp.ge.u32 %p1, %r1, 0;";
    assert_eq!(by_lane(&format!("{all} vote.sync.all.pred %p2, %p1, -1; {sel}")), lanes(|_| 1));
    assert_eq!(by_lane(&format!("{all} vote.sync.uni.pred %p2, !%p1, -1; {sel}")), lanes(|_| 1));
    assert_eq!(by_lane(&format!("{all} vote.sync.any.pred %p2, !%p1, -1; {sel}")), lanes(|_| 0));
    let mod4 = "and.b32 %r2, %r1, 3;";
    assert_eq!(
        by_lane(&format!("{mod4} match.any.sync.b32 %r0, %r2, -1;")),
        lanes(|i| 0x1111_1111 << (i % 4))
    );
    assert_eq!(
        by_lane(&format!(
            "{mod4} cvt.u64.u32 %rd2, %r2; shl.b64 %rd2, %rd2, 40; match.any.sync.b64 %r0, %rd2, -1;"
        )),
        lanes(|i| 0x1111_1111 << (i % 4))
    );
    assert_eq!(by_lane(&format!("{mod4} match.all.sync.b32 %r3|%p2, %r2, -1; {sel}")), lanes(|_| 0));
    assert_eq!(by_lane(&format!("{mod4} match.all.sync.b32 %r0, %r2, -1;")), lanes(|_| 0));
    assert_eq!(
        by_lane("mov.u32 %r2, 7; match.all.sync.b32 %r0|%p2, %r2, -1;  and.b32 %r2, %r1, 0;"),
        lanes(|_| 0xffff_ffff)
    );
}

#[test]
fn reductions_and_election() {
    let r = |op: &str| by_lane(&format!("sub.u32 %r2, %r1, 3; redux.sync.{op} %r0, %r2, -1;"))[5];
    assert_eq!(r("add.u32"), (0..32u32).map(|i| i.wrapping_sub(3)).fold(0u32, u32::wrapping_add).into());
    assert_eq!(r("min.s32"), 0xffff_fffd);
    assert_eq!(r("min.u32"), 0);
    assert_eq!(r("max.s32"), 28);
    assert_eq!(r("max.u32"), 0xffff_ffff);
    assert_eq!(r("and.b32"), 0);
    assert_eq!(r("or.b32"), 0xffff_ffff);
    assert_eq!(r("xor.b32"), (0..32u32).map(|i| i.wrapping_sub(3)).fold(0, |a, b| a ^ b).into());
    let elect = "elect.sync %r2|%p1, -1; selp.u32 %r3, 100, 0, %p1; add.u32 %r0, %r2, %r3;";
    assert_eq!(by_lane(elect), lanes(|i| if i == 0 { 100 } else { 0 }));
    // Among some lanes: one is chosen, and all get its number.
    let some = "setp.ge.u32 %p1, %r1, 24; mov.u32 %r0, 7; @!%p1 bra END;
        elect.sync %r0|%p2, 0xff000000; END:";
    assert_eq!(by_lane(some), lanes(|i| if i >= 24 { 24 } else { 7 }));
}

#[test]
fn warp_sync_at_different_places() {
    let body = "
        setp.lt.u32 %p1, %r1, 16; @%p1 bra LOW;
        bar.warp.sync 0xffffffff; mov.u32 %r0, 1; bra END;
    LOW:
        barrier.warp.sync 0xffffffff; mov.u32 %r0, 2;
    END:";
    assert_eq!(by_lane(body), lanes(|i| if i < 16 { 2 } else { 1 }));
}

#[test]
fn collectives_at_different_places_meet() {
    // Code as nvcc makes it: a loop with shuffles is copied for lane 0, which alone stores the sum.
    let split = |low: &str, high: &str| {
        by_lane(&format!(
            "mov.u32 %r5, 1000; setp.lt.u32 %p1, %r1, 16; @%p1 bra LOW;
            {high} bra END;
        LOW:
            {low}
        END:
            add.u32 %r0, %r0, %r5;"
        ))
    };
    // The registers are those of the other place in another order.
    let low = "mov.u32 %r3, 16; add.u32 %r2, %r1, 100; shfl.sync.bfly.b32 %r5|%p2, %r2, %r3, 31, -1; mov.u32 %r0, 0;";
    let high = "mov.u32 %r2, 16; add.u32 %r3, %r1, 200; shfl.sync.bfly.b32 %r0|%p3, %r3, %r2, 31, -1;";
    let shuffled = lanes(|i| if i < 16 { 200 + i + 16 } else { 1000 + 100 + i - 16 });
    assert_eq!(split(low, high), shuffled);
    // At one of the places, one constant is both the lane and the clamp.
    let of_lane = |lane: u32| format!("shfl.sync.idx.b32 %r0, %r1, {lane}, 31, -1;");
    let shuffled = lanes(|i| 1000 + if i < 16 { 31 } else { 0 });
    assert_eq!(split(&of_lane(31), &of_lane(0)), shuffled);
    let shuffled = lanes(|i| 1000 + if i < 16 { 0 } else { 31 });
    assert_eq!(split(&of_lane(0), &of_lane(31)), shuffled);
    let sum = "redux.sync.add.u32 %r0, %r1, -1;";
    assert_eq!(split(sum, &format!("nanosleep.u32 1; {sum}")), lanes(|_| 1000 + 31 * 16));
    let ballot = "setp.lt.u32 %p2, %r1, 2; vote.sync.ballot.b32 %r0, %p2, -1;";
    let ballot_of_high = "setp.gt.u32 %p3, %r1, 29; vote.sync.ballot.b32 %r0, %p3, -1;";
    assert_eq!(split(ballot, ballot_of_high), lanes(|_| 0xc000_0003 + 1000));
    let matched = "and.b32 %r2, %r1, 15; match.any.sync.b32 %r0, %r2, -1;";
    assert_eq!(
        split(matched, &format!("nanosleep.u32 1; {matched}")),
        lanes(|i| (0x1_0001 << (i % 16)) + 1000)
    );
}

#[test]
fn member_masks_are_checked() {
    let kind = fault_kind("bar.warp.sync 0x0000ffff;");
    assert!(matches!(kind, FaultKind::BadMemberMask { mask: 0xffff, .. }), "{kind}");
    // Lane 0 waits for lanes that wait elsewhere for it: reported with both sides.
    let body = "setp.eq.u32 %p1, %r40, 0; @%p1 bra A; shfl.sync.idx.b32 %r1, %r1, 0, 31, -1; bra END;
        A: vote.sync.any.pred %p2, %p1, -1; END:";
    let FaultKind::Deadlock(report) = fault_kind(body) else { panic!("no deadlock") };
    assert_eq!(report.warps.len(), 2);
    assert!(report.warps.iter().any(|w| w.lanes == 1 && w.at.ptx_text.starts_with("A: vote")));
    assert!(report.warps.iter().all(|w| matches!(w.waiting, WaitingFor::Lanes { mask: u32::MAX, .. })));
}

#[test]
fn special_registers() {
    let body = "
        mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z; mov.u32 %r4, %ctaid.y; mov.u32 %r5, %warpid;
        mov.u32 %r6, %laneid; mov.u32 %r7, %nctaid.y; mov.u32 %r8, %ntid.z; mov.u32 %r9, %nwarpid;
        mov.u32 %r10, %ntid.x; mov.u32 %r11, %ntid.y; mov.u32 %r12, %nctaid.x; mov.u32 %r13, %ctaid.x;
        mad.lo.u32 %r14, %r3, %r11, %r2; mad.lo.u32 %r14, %r14, %r10, %r1;
        mad.lo.u32 %r15, %r4, %r12, %r13; mul.lo.u32 %r16, %r10, %r11; mul.lo.u32 %r16, %r16, %r8;
        mad.lo.u32 %r17, %r15, %r16, %r14; mul.wide.u32 %rd1, %r17, 8; add.s64 %rd1, %rd40, %rd1;
        mad.lo.u32 %r18, %r5, 32, %r6; mul.lo.u32 %r19, %r9, 1000000; add.u32 %r18, %r18, %r19;
        cvt.u64.u32 %rd2, %r18; st.global.u64 [%rd1], %rd2;";
    let cfg = GridConfig { grid: [2, 3, 1], block: [4, 5, 2], dynamic_shared_bytes: 0, cluster: None };
    let mut run = Run::new(&kernel("", body), &[0; 240], cfg, &DeviceConfig::default());
    run.finish().unwrap();
    assert_eq!(run.words(), (0..240).map(|i| i % 40 + 2_000_000).collect::<Vec<u64>>());
    assert_eq!(by_lane("mov.u32 %r0, %lanemask_lt; and.b32 %r1, %r1, 0;"), lanes(|i| (1 << i) - 1));
    assert_eq!(by_lane("mov.u32 %r0, %lanemask_le; and.b32 %r1, %r1, 0;"), lanes(|i| (2 << i) - 1));
    assert_eq!(by_lane("mov.u32 %r0, %lanemask_eq; and.b32 %r1, %r1, 0;"), lanes(|i| 1 << i));
    assert_eq!(
        by_lane("mov.u32 %r0, %lanemask_gt; and.b32 %r1, %r1, 0;"),
        lanes(|i| 0xffff_ffff & !((2 << i) - 1))
    );
    assert_eq!(
        by_lane("mov.u32 %r0, %lanemask_ge; and.b32 %r1, %r1, 0;"),
        lanes(|i| 0xffff_ffff & !((1 << i) - 1))
    );
    check("mov.u32 %r1, %smid; mov.u32 %r2, %nsmid; setp.lt.u32 %p0, %r1, %r2;", &[], 1);
    check(
        "mov.u64 %rd1, %globaltimer; nanosleep.u32 100; mov.u64 %rd2, %globaltimer; setp.le.u64 %p0, %rd1, %rd2;",
        &[],
        1,
    );
    check("mov.u64 %rd1, %clock64; mov.u64 %rd2, %clock64; setp.lt.u64 %p0, %rd1, %rd2;", &[], 1);
    check("mov.u32 %r1, %clock; mov.u32 %r2, %clock; sub.u32 %r0, %r2, %r1;", &[], 1);
    check("mov.u32 %r1, %globaltimer_lo; mov.u32 %r0, %cluster_ctarank;", &[], 0);
    check("mov.u32 %r0, %cluster_nctarank;", &[], 1);
    check(
        "mov.u64 %rd0, %gridid; pmevent 1; griddepcontrol.wait; griddepcontrol.launch_dependents; brkpt;",
        &[],
        0,
    );
}

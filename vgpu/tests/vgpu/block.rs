//! Block barriers, mbarriers, bulk copies.

use epoxide_vgpu::{
    CheckConfig, Class, DeviceConfig, FaultKind, GridConfig, Machine, MachineError, Module, Progress,
    StuckWarp, WaitingFor, for_each_seed,
};

use crate::common::*;

fn seeded(seed: u64) -> DeviceConfig {
    DeviceConfig { schedule_seed: Some(seed), ..DeviceConfig::default() }
}

/// Runs with the fast scheduler and with a number of seeds; the results must agree.
fn run_all(globals: &str, body: &str, threads: u32, buf: &[u64]) -> Vec<u64> {
    let want = run_body(globals, body, threads, buf);
    for_each_seed(tier(20, 200), |seed| {
        let mut run = Run::new(&kernel(globals, body), buf, launch(1, threads), &seeded(seed));
        run.finish().unwrap_or_else(|f| panic!("seed {seed}: {f}"));
        assert_eq!(run.words(), want, "seed {seed}");
    });
    want
}

#[test]
fn block_barrier_orders_shared_memory() {
    // Every thread reads what its mirror image wrote before the barrier.
    for barrier in ["barrier.sync 0;", "bar.sync 0;", "barrier.cta.sync.aligned 0;", "bar.sync 3, 128;"] {
        let body = format!(
            "mov.u32 %r1, S; mad.lo.u32 %r2, %r40, 4, %r1; st.shared.u32 [%r2], %r40;
             {barrier}
             sub.u32 %r3, 127, %r40; mad.lo.u32 %r3, %r3, 4, %r1; ld.shared.u32 %r4, [%r3];
             cvt.u64.u32 %rd1, %r4; st.global.u64 [%rd42], %rd1;"
        );
        let got = run_all(".shared .align 4 .b8 S[512];", &body, 128, &[0; 128]);
        assert_eq!(got, (0..128).rev().collect::<Vec<u64>>(), "{barrier}");
    }
}

#[test]
fn lanes_may_not_come_to_two_copies_of_an_aligned_barrier() {
    let body = "
        and.b32 %r1, %r40, 1; setp.eq.u32 %p1, %r1, 0; @%p1 bra EVEN;
        bar.sync 0; mov.u64 %rd1, 1; bra END;
    EVEN:
        bar.sync 0; mov.u64 %rd1, 2;
    END:
        st.global.u64 [%rd42], %rd1;";
    let fault = fault_of("", body, 64);
    assert!(matches!(fault.kind, FaultKind::DivergentBarrier { barrier: 0, live: u32::MAX, .. }), "{fault}");
}

#[test]
fn lanes_may_come_late_to_an_aligned_barrier() {
    // Lane 0 of warp 0 waits for warp 1 while the other lanes go on to the barrier, which is the
    // same for all.
    let body = "
        mov.u32 %r1, S; mov.u64 %rd1, 5; setp.ne.u32 %p1, %r40, 0; @!%p1 st.shared.u32 [%r1], 0; barrier.sync 1;
        @%p1 bra SKIP;
    WAIT:
        ld.acquire.cta.shared.u32 %r2, [%r1]; setp.eq.u32 %p2, %r2, 0; @%p2 bra WAIT;
    SKIP:
        setp.ne.u32 %p3, %r40, 63; @%p3 bra MEET;
        st.release.cta.shared.u32 [%r1], 1;
    MEET:
        bar.sync 0;
        st.global.u64 [%rd42], %rd1;";
    let got = run_all(".shared .align 4 .b8 S[4];", body, 64, &[0; 64]);
    assert_eq!(got, vec![5; 64]);
    // A lane that leaves completes it, as CUDA's guide says of `__syncthreads`.
    let gone = body.replace("SKIP:", "exit; SKIP:");
    let got = run_all(".shared .align 4 .b8 S[4];", &gone, 64, &[0; 64]);
    assert_eq!(got, (0..64).map(|i| if i == 0 { 0 } else { 5 }).collect::<Vec<u64>>());
}

#[test]
fn barriers_reduce_predicates() {
    // How many threads are below a bound, and whether all and any are, twice with the same barrier.
    let body = "
        mov.u32 %r5, 0; mov.u64 %rd1, 0;
    AGAIN:
        mad.lo.u32 %r1, %r5, 63, 33; setp.lt.u32 %p1, %r40, %r1;
        bar.red.popc.u32 %r2, 0, %p1; barrier.cta.red.and.aligned.pred %p2, 3, 96, %p1;
        barrier.red.or.pred %p3, 0, !%p1;
        selp.u32 %r3, 1000, 0, %p2; selp.u32 %r4, 2000, 0, %p3;
        add.u32 %r2, %r2, %r3; add.u32 %r2, %r2, %r4;
        mul.lo.u64 %rd1, %rd1, 10000; cvt.u64.u32 %rd2, %r2; add.u64 %rd1, %rd1, %rd2;
        add.u32 %r5, %r5, 1; setp.lt.u32 %p4, %r5, 2; @%p4 bra AGAIN;
        st.global.u64 [%rd42], %rd1;";
    assert_eq!(run_all("", body, 96, &[0; 96]), vec![2033_1096; 96]);
}

/// Warps 1 and 2 vote at the same barrier again before warp 0 has read the earlier votes.
#[test]
fn a_later_vote_leaves_the_outcome_of_the_one_before() {
    let body = "
        shr.u32 %r2, %r40, 5; setp.eq.u32 %p1, %r40, %r40; mov.u32 %r3, 0; mov.u32 %r4, 0;
        setp.eq.u32 %p2, %r2, 2; @%p2 bra AGAIN;
        barrier.red.popc.u32 %r3, 1, 64, %p1;
        setp.eq.u32 %p2, %r2, 0; @%p2 bra END;
    AGAIN:
        barrier.sync 2, 64;
        barrier.red.popc.u32 %r4, 1, 64, !%p1;
        add.u32 %r4, %r4, 7;
    END:
        mad.lo.u32 %r3, %r3, 1000, %r4; cvt.u64.u32 %rd1, %r3; st.global.u64 [%rd42], %rd1;";
    let got = run_all("", body, 96, &[0; 96]);
    let want = |i: u64| [64_000, 64_007, 7][i as usize / 32];
    assert_eq!(got, (0..96).map(want).collect::<Vec<u64>>());
}

/// Warp 0 waits first, as the fast scheduler has it. Warp 1 completes that phase by an arrival, and
/// waits for the next one at once.
#[test]
fn a_wait_behind_an_arrival_is_for_the_next_phase() {
    for (wait, votes) in [("bar.sync 1, 64;", 0), ("bar.red.popc.u32 %r3, 1, 64, %p2;", 2)] {
        let body = format!(
            "mov.u32 %r1, S; mov.u64 %rd1, 0; mov.u32 %r3, 0;
             and.b32 %r2, %r40, 31; setp.eq.u32 %p2, %r2, 0;
             setp.ge.u32 %p1, %r40, 32; @%p1 bra B;
             bar.sync 1, 64; nanosleep.u32 1; nanosleep.u32 1;
             @%p2 st.shared.u32 [%r1], 5; {wait} bra END;
         B:
             bar.arrive 1, 64; {wait}
             ld.shared.u32 %r2, [%r1]; mad.lo.u32 %r2, %r3, 10, %r2; cvt.u64.u32 %rd1, %r2;
         END:
             st.global.u64 [%rd42], %rd1;"
        );
        let globals = ".shared .align 4 .b8 S[4];";
        let want: Vec<u64> = (0..64).map(|i| if i < 32 { 0 } else { 5 + 10 * votes }).collect();
        assert_eq!(run_body(globals, &body, 64, &[0; 64]), want, "{wait}");
        // The second phase orders the store before the load.
        let module = Module::parse(&kernel(globals, &body)).unwrap();
        let mut machine = Machine::with_config(1, DeviceConfig::default(), Some(CheckConfig::default()));
        let buf = machine.upload(0, "buf", &[0u64; 64]).unwrap();
        machine.launch_with(0, &module, "k", launch(1, 64), &[&buf]).unwrap();
        machine.run().unwrap_or_else(|e| panic!("{wait}: {e}"));
        assert_eq!(buf.download().unwrap(), want, "{wait}");
    }
}

/// Warp 3 arrives at a barrier of all threads and ends. Warp 2 comes last.
#[test]
fn a_warp_that_has_arrived_and_ended_counts_once() {
    let body = "
        mov.u32 %r1, S; mov.u64 %rd1, 0; shr.u32 %r2, %r40, 5;
        setp.eq.u32 %p1, %r2, 3; @%p1 bra ARRIVE; setp.eq.u32 %p1, %r2, 2; @%p1 bra LATE;
        nanosleep.u32 1; bar.sync 0; ld.shared.u32 %r3, [%r1]; cvt.u64.u32 %rd1, %r3; bra END;
    ARRIVE:
        bar.arrive 0, 128; exit;
    LATE:
        nanosleep.u32 1; nanosleep.u32 1; nanosleep.u32 1; nanosleep.u32 1;
        nanosleep.u32 1; nanosleep.u32 1; nanosleep.u32 1; nanosleep.u32 1;
        st.shared.u32 [%r1], 5; bar.sync 0;
    END:
        st.global.u64 [%rd42], %rd1;";
    let got = run_all(".shared .align 4 .b8 S[4];", body, 128, &[0; 128]);
    let want: Vec<u64> = (0..128).map(|i| if i < 64 { 5 } else { 0 }).collect();
    assert_eq!(got, want);
    // All threads arrive, so strict exits are kept too.
    let body = body.replace("st.shared", "and.b32 %r4, %r40, 31; setp.eq.u32 %p2, %r4, 0; @%p2 st.shared");
    let module = Module::parse(&kernel(".shared .align 4 .b8 S[4];", &body)).unwrap();
    let check = CheckConfig { strict_exits: true, ..CheckConfig::default() };
    for_each_seed(correct_seeds(), |seed| {
        let mut machine = Machine::with_config(1, device(seed), Some(check));
        let buf = machine.upload(0, "buf", &[0u64; 128]).unwrap();
        machine.launch_with(0, &module, "k", launch(1, 128), &[&buf]).unwrap();
        machine.run().unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        assert_eq!(buf.download().unwrap(), want, "seed {seed}");
    });
}

#[test]
fn named_barriers_with_partial_counts() {
    // Warps 0 and 1 produce and only arrive; warps 2 and 3 wait. Another pair uses another barrier
    // meanwhile.
    let body = "
        mov.u32 %r1, S; shr.u32 %r2, %r40, 5; setp.ge.u32 %p1, %r2, 2; @%p1 bra CONSUME;
        mad.lo.u32 %r3, %r40, 4, %r1; add.u32 %r4, %r40, 100; st.shared.u32 [%r3], %r4;
        barrier.arrive 1, 128;
        mov.u64 %rd1, 1; bra END;
    CONSUME:
        barrier.sync 1, 128;
        sub.u32 %r3, %r40, 64; mad.lo.u32 %r3, %r3, 4, %r1; ld.shared.u32 %r4, [%r3];
        cvt.u64.u32 %rd1, %r4;
        barrier.sync 2, 64;
    END:
        st.global.u64 [%rd42], %rd1;";
    let got = run_all(".shared .align 4 .b8 S[256];", body, 128, &[0; 128]);
    assert_eq!(got, (0..128).map(|i| if i < 64 { 1 } else { i + 36 }).collect::<Vec<u64>>());
}

#[test]
fn a_barrier_for_all_does_not_wait_for_exited_warps() {
    let body = "setp.ge.u32 %p1, %r40, 64; @%p1 exit; setp.lt.u32 %p2, %r40, 5; @%p2 exit;
        barrier.sync 0; st.global.u64 [%rd42], 1;";
    let got = run_all("", body, 128, &[0; 128]);
    assert_eq!(got, (0..128).map(|i| u64::from((5..64).contains(&i))).collect::<Vec<u64>>());
}

#[test]
fn deadlocks_are_reported_with_every_warp() {
    let body = "
        .loc 1 7 1
        setp.lt.u32 %p1, %r40, 32; @!%p1 bra WAIT;
        .loc 2 3 1, function_name $L, inlined_at 1 8 1
        barrier.sync 5, 96; bra END;
    WAIT:
        .loc 1 9 1
        barrier.sync 6, 96;
    END:";
    let ptx = kernel(".file 1 \"src/dead.rs\"\n.file 2 \"src/wait.rs\"\n", body);
    for dev in [DeviceConfig::default(), seeded(3)] {
        let mut run = Run::new(&ptx, &[0], launch(2, 96), &dev);
        let fault = run.finish().unwrap_err();
        let FaultKind::Deadlock(report) = &fault.kind else { panic!("{fault}") };
        let of_block = |b: u32| report.warps.iter().filter(move |w| w.block == [b, 0, 0]);
        assert!(of_block(0).count() == 3 || of_block(1).count() == 3, "{fault}");
        assert!(
            report
                .warps
                .iter()
                .any(|w| w.waiting == WaitingFor::Barrier { barrier: 6, arrived: 64, expected: 96 }
                    && w.at.source == Some(("src/dead.rs".to_string(), 9)))
        );
        let text = fault.to_string();
        assert!(
            text.contains("32 of 96 threads") && text.contains(" at src/dead.rs:8 (inlined: src/wait.rs:3) "),
            "{text}"
        );
    }
    // Half a warp never arrives.
    let fault = fault_of("", "setp.lt.u32 %p1, %r40, 16; @%p1 bra E; bar.sync 0; E: bar.warp.sync -1;", 32);
    assert!(matches!(fault.kind, FaultKind::Deadlock(_)), "{fault}");
}

/// Two arms of a kernel pair `sync` with `arrive`; the second arm has lost its `arrive`.
#[test]
fn a_deadlock_names_the_other_arrivals_of_its_barrier() {
    let body = "
        setp.lt.u32 %p1, %r40, 32; setp.lt.u32 %p2, %r40, 64; @%p2 bra SECOND;
        .loc 1 10 1
        @%p1 barrier.sync 5, 64;
        .loc 1 11 1
        @!%p1 barrier.arrive 5, 64;
        bra END;
    SECOND:
        .loc 1 20 1
        @%p1 barrier.sync 5, 64;
        .loc 1 25 1
        barrier.sync 0;
    END:";
    let ptx = kernel(".file 1 \"k.rs\"\n", body);
    let fault = Run::new(&ptx, &[0], launch(1, 64), &DeviceConfig::default()).finish().unwrap_err();
    let FaultKind::Deadlock(report) = &fault.kind else { panic!("{fault}") };
    let [(5, places)] = &report.barriers[..] else { panic!("{report:?}") };
    assert_eq!(places.iter().map(|place| place.source.clone().unwrap().1).collect::<Vec<_>>(), [10, 11]);
    let lines = "\n  barrier 5 has another arrival at k.rs:10\n  barrier 5 has another arrival at k.rs:11";
    assert!(fault.to_string().contains(lines), "{fault}");
}

#[test]
fn bad_barriers() {
    for (body, what) in [
        ("mov.u32 %r1, 16; barrier.sync %r1;", "0 to 15"),
        ("barrier.sync 0, 33;", "multiple of 32"),
        ("barrier.sync %r40;", "disagree"),
        ("setp.lt.u32 %p1, %r40, 32; selp.u32 %r1, 64, 96, %p1; barrier.sync 0, %r1;", "expected"),
    ] {
        let fault = fault_of("", body, 96);
        assert!(matches!(&fault.kind, FaultKind::BadBarrier { .. }), "{fault}");
        assert!(fault.to_string().contains(what), "{fault}");
    }
}

const BAR: &str = ".shared .align 8 .b8 BAR[8];\n.shared .align 128 .b8 DATA[1024];\n";

#[test]
fn mbarrier_producer_and_consumer() {
    // Warp 0 fills a slot for each round, warp 1 reads it; full and empty barriers alternate by
    // parity.
    let body = "
        mov.u32 %r1, FULL; mov.u32 %r2, EMPTY; mov.u32 %r3, SLOT; mov.u32 %r4, 0; mov.u64 %rd3, 0;
        setp.eq.u32 %p1, %r40, 0;
        @%p1 mbarrier.init.shared.b64 [%r1], 32; @%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
        fence.mbarrier_init.release.cluster; barrier.sync 0;
        setp.ge.u32 %p2, %r40, 32; and.b32 %r5, %r40, 31; mad.lo.u32 %r6, %r5, 4, %r3; @%p2 bra CONSUME;
    PRODUCE:
        and.b32 %r7, %r4, 1; xor.b32 %r8, %r7, 1;
    WAIT1:
        mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2], %r8; @!%p3 bra WAIT1;
        mad.lo.u32 %r9, %r4, 100, %r5; st.shared.u32 [%r6], %r9;
        mbarrier.arrive.release.cta.shared::cta.b64 %rd1, [%r1];
        add.u32 %r4, %r4, 1; setp.lt.u32 %p4, %r4, 5; @%p4 bra PRODUCE;
        bra END;
    CONSUME:
        and.b32 %r7, %r4, 1;
    WAIT2:
        mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 %p3, [%r1], %r7; @!%p3 bra WAIT2;
        ld.shared.u32 %r9, [%r6]; cvt.u64.u32 %rd2, %r9; add.u64 %rd3, %rd3, %rd2;
        bar.warp.sync -1;
        setp.eq.u32 %p5, %r5, 0; @%p5 mbarrier.arrive.shared.b64 _, [%r2];
        add.u32 %r4, %r4, 1; setp.lt.u32 %p4, %r4, 5; @%p4 bra CONSUME;
        st.global.u64 [%rd42], %rd3;
    END:";
    let globals =
        ".shared .align 8 .b8 FULL[8];\n.shared .align 8 .b8 EMPTY[8];\n.shared .align 16 .b8 SLOT[128];\n";
    let got = run_all(globals, body, 64, &[0; 64]);
    // Rounds 0..5: the sum of 100 * round + lane.
    assert_eq!(got, (0..64).map(|i| if i < 32 { 0 } else { 1000 + 5 * (i - 32) }).collect::<Vec<u64>>());
}

#[test]
fn every_mbarrier_form() {
    let body = "
        mov.u32 %r1, BAR; cvt.u64.u32 %rd1, %r1; cvta.shared.u64 %rd1, %rd1;
        mbarrier.init.b64 [%rd1], 3;
        mbarrier.arrive.noComplete.shared.b64 %rd2, [%r1], 1;
        mbarrier.pending_count.b64 %r2, %rd2;
        mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 16;
        mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %rd3, [%r1], 16;
        mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1];
        mbarrier.test_wait.shared.b64 %p1, [%r1], %rd3;
        mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r1], 32;
        mbarrier.test_wait.shared.b64 %p2, [%r1], %rd3;
        mbarrier.try_wait.shared::cta.b64 %p3, [%r1], %rd3, 1000;
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p4, [%r1], 0, 1000;
        mbarrier.test_wait.parity.shared.b64 %p5, [%r1], 1;
        mbarrier.arrive_drop.shared.b64 _, [%r1]; mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 0;
        mbarrier.arrive.b64 _, [%rd1];
        mbarrier.test_wait.parity.shared.b64 %p7, [%r1], 1;
        mbarrier.arrive.shared.b64 _, [%r1], 2;
        mbarrier.test_wait.parity.shared.b64 %p6, [%r1], 0;
        mbarrier.inval.shared.b64 [%r1];
        selp.u32 %r3, 1, 0, %p1; selp.u32 %r4, 2, 0, %p2; selp.u32 %r5, 4, 0, %p3; selp.u32 %r6, 8, 0, %p4;
        selp.u32 %r7, 16, 0, %p5; selp.u32 %r8, 32, 0, %p6;
        or.b32 %r3, %r3, %r4; or.b32 %r3, %r3, %r5; or.b32 %r3, %r3, %r6; or.b32 %r3, %r3, %r7; or.b32 %r3, %r3, %r8;
        st.global.u32 [%rd40], %r2; st.global.u32 [%rd40+8], %r3;";
    let got = run_all(BAR, body, 1, &[0; 2]);
    let module = Module::parse(&kernel(BAR, body)).unwrap();
    run_numbered(&module, launch(1, 1), 0, Some(CheckConfig::default())).unwrap();
    // Pending before the first arrival: 3. Phase 0 is not complete while bytes are missing; in the
    // end phase 2, of parity 0 like phase 0, is complete as well.
    assert_eq!(got, [3, 2 | 4 | 8 | 32]);
}

#[test]
fn mbarrier_misuse() {
    for (body, what) in [
        ("mov.u32 %r1, BAR; mbarrier.arrive.shared.b64 _, [%r1];", "not initialised"),
        ("mov.u32 %r1, BAR; mbarrier.init.shared.b64 [%r1], 0;", "count 0"),
        (
            "mov.u32 %r1, BAR; mbarrier.init.shared.b64 [%r1], 1; mbarrier.arrive.shared.b64 _, [%r1], 2;",
            "pending",
        ),
        ("mbarrier.init.b64 [%rd40], 1;", "not in shared memory"),
    ] {
        let fault = fault_of(BAR, body, 1);
        assert!(fault.to_string().contains(what), "{fault}");
    }
    let kind = fault_of(BAR, "mov.u32 %r1, BAR; mbarrier.init.shared.b64 [%r1+4], 1;", 1).kind;
    assert!(matches!(kind, FaultKind::Misaligned { align: 8, .. }));
}

#[test]
fn undefined_uses_of_an_mbarrier_are_reported() {
    let start = "mov.u32 %r1, BAR; mbarrier.init.shared.b64 [%r1], 1;";
    let kind =
        fault_of(BAR, &format!("{start} mbarrier.arrive.noComplete.shared.b64 %rd1, [%r1], 1;"), 1).kind;
    assert!(kind.to_string().contains("arrival of .noComplete completes phase 0"), "{kind}");
    let checked = |body: &str, shape: GridConfig| {
        let ptx = kernel(BAR, &format!("{start} {body}"));
        let module = Module::parse(&ptx).unwrap_or_else(|e| panic!("{e}\n{ptx}"));
        run_numbered(&module, shape, 0, Some(CheckConfig::default()))
    };
    let (arrive, test) =
        ("mbarrier.arrive.shared.b64 %rd1, [%r1];", "mbarrier.test_wait.shared.b64 %p1, [%r1], %rd1;");
    let parity = "mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;";
    let init = "mbarrier.init.shared.b64 [%r1], 1;";
    for (body, what) in [
        (format!("{arrive} {arrive}"), "no test_wait or try_wait has returned true"),
        (format!("{parity} {arrive} {arrive}"), "no test_wait or try_wait has returned true"),
        (format!("{arrive} {test} {arrive} {arrive}"), "no test_wait or try_wait has returned true"),
        (init.to_string(), "holds a valid mbarrier"),
        (format!("{arrive} {test} {init}"), "holds a valid mbarrier"),
    ] {
        match checked(&body, launch(1, 1)) {
            Err(MachineError::Fault(fault)) => {
                assert!(fault.to_string().contains(what), "{fault}");
                assert_eq!((fault.kind.name(), fault.kind.class()), ("mbarrier", Class::Synchronisation));
            }
            other => panic!("{other:?}\n{body}"),
        }
    }
    for body in [
        format!("{arrive} {test} {arrive} {test} {arrive}"),
        format!("{arrive} {parity} {arrive}"),
        format!("{arrive} mbarrier.inval.shared.b64 [%r1]; {init} {arrive}"),
        // The memory has held something else.
        format!("{arrive} st.shared.u64 [%r1], 5; {init} {arrive}"),
    ] {
        checked(&body, launch(1, 1)).unwrap_or_else(|e| panic!("{e}\n{body}"));
    }
    // The test of one thread is enough, and each block has its own.
    let body =
        "mov.u32 %r1, BAR; setp.eq.u32 %p2, %r40, 0; @%p2 mbarrier.init.shared.b64 [%r1], 32; bar.sync 0;
        mbarrier.arrive.shared.b64 %rd1, [%r1]; @!%p2 bra MEET;
        W: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra W;
        MEET: bar.sync 0; mbarrier.arrive.shared.b64 %rd1, [%r1];";
    let module = Module::parse(&kernel(BAR, body)).unwrap();
    for_each_seed(tier(20, 200), |seed| {
        run_numbered(&module, launch(3, 32), seed, Some(CheckConfig::default())).unwrap();
    });
}

/// Loads 256 bytes by bulk copy, adds 1 to each word, stores them by bulk copy.
fn bulk_body(wait_load: &str, wait_store: &str) -> String {
    format!(
        "mov.u32 %r1, BAR; mov.u32 %r2, DATA; setp.eq.u32 %p1, %r40, 0;
         createpolicy.fractional.L2::evict_first.b64 %rd9, 1.0;
         @!%p1 bra READY;
         mbarrier.init.shared::cta.b64 [%r1], 1; fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;
         mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 256;
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd40], 128, [%r1];
         cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint [%r2+128], [%rd40+128], 128, [%r1], %rd9;
     READY:
         bar.sync 0;
         {wait_load}
         mad.lo.u32 %r3, %r40, 8, %r2; ld.shared.u64 %rd1, [%r3]; add.u64 %rd1, %rd1, 1; st.shared.u64 [%r3], %rd1;
         fence.proxy.async; bar.sync 0;
         @!%p1 bra END;
         cp.async.bulk.prefetch.L2.global [%rd40], 256;
         cp.async.bulk.global.shared::cta.bulk_group [%rd40+256], [%r2], 128;
         cp.async.bulk.commit_group;
         cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%rd40+384], [%r2+128], 128, %rd9;
         cp.async.bulk.commit_group;
         {wait_store}
         mov.u64 %rd2, 0; st.shared.v2.u64 [%r2], {{%rd2, %rd2}}; st.shared.v2.u64 [%r2+128], {{%rd2, %rd2}};
     END:"
    )
}

const WAIT_LOAD: &str = "W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0; @!%p2 bra W;";

#[test]
fn bulk_copies() {
    let buf: Vec<u64> = (0..64).map(|i| if i < 32 { i * 3 } else { 0 }).collect();
    let want: Vec<u64> = (0..64).map(|i| if i < 32 { i * 3 } else { (i - 32) * 3 + 1 }).collect();
    for wait in ["cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"] {
        assert_eq!(run_all(BAR, &bulk_body(WAIT_LOAD, wait), 32, &buf), want, "{wait}");
    }
}

/// Returns how many of `seeds` runs end in a fault or in other words than a correct kernel's.
fn wrong_runs(seeds: u64, body: &str, buf: &[u64], want: &[u64]) -> u64 {
    (0..seeds)
        .filter(|&seed| {
            let mut run = Run::new(&kernel(BAR, body), buf, launch(1, 32), &seeded(seed));
            run.finish().is_err() || run.words() != want
        })
        .count() as u64
}

#[test]
fn missing_waits_show_under_a_seed() {
    let buf: Vec<u64> = (0..64).map(|i| if i < 32 { i * 3 + 1 } else { 0 }).collect();
    let want: Vec<u64> = (0..64).map(|i| if i < 32 { i * 3 + 1 } else { (i - 32) * 3 + 2 }).collect();
    let seeds = tier(40, 400);
    let wrong = |wait_load, wait_store| wrong_runs(seeds, &bulk_body(wait_load, wait_store), &buf, &want);
    let all = "cp.async.bulk.wait_group.read 0;";
    assert_eq!(wrong(WAIT_LOAD, all), 0);
    assert!(wrong("", all) > seeds / 2, "no wait for the load");
    assert!(wrong(WAIT_LOAD, "") > seeds / 4, "no wait for the store");
    // One group may still be under way: the second half is at risk.
    assert!(wrong(WAIT_LOAD, "cp.async.bulk.wait_group.read 1;") > seeds / 4);
}

#[test]
fn bulk_copy_rules() {
    for (body, what) in [
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd40+8], [%r2], 16;", "multiple of 16"),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd40], [%r2+4], 16;", "multiple of 16"),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd40], [%r2], 24;", "multiple of 16"),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd40+512], [%r2], 16;", "outside of every region"),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd40], [%r2+1024], 16;", "valid are"),
        (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd40], 16, [%r1];",
            "not initialised",
        ),
    ] {
        let body = format!("mov.u32 %r1, BAR; mov.u32 %r2, DATA; {body}");
        for dev in [DeviceConfig::default(), seeded(1)] {
            let mut run = Run::new(&kernel(BAR, &body), &[0; 64], launch(1, 1), &dev);
            let fault = run.finish().unwrap_err();
            assert!(fault.to_string().contains(what), "{fault}");
        }
    }
}

#[test]
fn a_wait_for_memory_spins_and_says_for_what() {
    // Another warp may write it.
    let body = "W: ld.relaxed.gpu.global.u64 %rd1, [%rd40]; setp.eq.u64 %p1, %rd1, 7; @%p1 bra W;";
    for dev in [DeviceConfig::default(), seeded(5)] {
        let mut run = Run::new(&kernel("", body), &[7], launch(1, 1), &dev);
        for _ in 0..10 {
            while run.grid.step(10_000).unwrap() != Progress::Spinning {}
        }
        let report = run.grid.stuck_report();
        assert!(matches!(report.warps[0].waiting, WaitingFor::Memory { value: 7, .. }), "{report}");
    }
}

#[test]
fn a_wait_for_bytes_without_a_copy_is_a_deadlock() {
    let body = "mov.u32 %r1, BAR; mbarrier.init.shared.b64 [%r1], 2; mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 64;
        W: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra W;";
    for dev in [DeviceConfig::default(), seeded(5)] {
        let fault = Run::new(&kernel(BAR, body), &[0], launch(1, 1), &dev).finish().unwrap_err();
        let FaultKind::Deadlock(report) = &fault.kind else { panic!("{fault}") };
        let waiting = &report.warps[0].waiting;
        assert!(
            matches!(waiting, WaitingFor::Mbarrier { pending: 1, pending_bytes: 64, phase: 0, .. }),
            "{report}"
        );
    }
}

#[test]
fn a_block_that_waits_for_an_mbarrier_that_only_it_could_complete_is_a_deadlock() {
    // One arrival of two; the other warp waits at a barrier for the first.
    let body = "
        mov.u32 %r1, BAR;
        setp.ge.u32 %p1, %r40, 32;
        @%p1 bra MEET;
        setp.eq.u32 %p2, %r40, 0;
        @%p2 mbarrier.init.shared.b64 [%r1], 2;
        bar.warp.sync -1;
        @%p2 mbarrier.arrive.shared.b64 _, [%r1];
    WAIT:
        mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0;
        @!%p3 bra WAIT;
    MEET:
        barrier.sync 0;";
    let ptx = kernel(".shared .align 8 .b8 BAR[8];\n", body);
    let fault = Run::new(&ptx, &[0], launch(1, 64), &DeviceConfig::default()).finish().unwrap_err();
    let FaultKind::Deadlock(report) = &fault.kind else { panic!("{fault}") };
    assert!(fault.at.ptx_text.contains("try_wait"), "{fault}");
    let waits = |w: &&StuckWarp| matches!(w.waiting, WaitingFor::Mbarrier { pending: 1, .. });
    assert_eq!(report.warps.iter().filter(waits).count(), 1, "{fault}");
    assert!(
        fault.to_string().contains(": waits on mbarrier 'BAR + 0x0' in shared memory: phase 0, 1 "),
        "{fault}"
    );
}

#[test]
fn a_wait_for_an_mbarrier_that_is_given_up_is_no_deadlock() {
    let body = "
        mov.u32 %r1, BAR; mov.u32 %r2, 0;
        mbarrier.init.shared.b64 [%r1], 2;
    WAIT:
        add.u32 %r2, %r2, 1;
        setp.gt.u32 %p2, %r2, 100000;
        @%p2 bra END;
        mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0;
        @!%p3 bra WAIT;
    END:
        st.global.u32 [%rd40], %r2;";
    let ptx = kernel(".shared .align 8 .b8 BAR[8];\n", body);
    let mut run = Run::new(&ptx, &[0], launch(1, 1), &DeviceConfig::default());
    // The kernel appears to spin, but not for ever.
    while run.grid.step(10_000).unwrap() != Progress::Done {}
}

#[test]
fn reductions_by_bulk_copies_change_each_element() {
    let twice = |word: u32| u64::from(word) << 32 | u64::from(word);
    let four = |half: u16| twice(u32::from(half) << 16 | u32::from(half));
    let [one, two, subnormal] = [1f32, 2.0, f32::from_bits(1)].map(|x| twice(x.to_bits()));
    let minus_one = twice(u32::MAX);
    for (operation, old, data, new) in [
        ("add.u32", twice(5), twice(u32::MAX), twice(4)),
        ("add.s32", twice(5), twice(7), twice(12)),
        ("add.u64", u64::MAX, 3, 2),
        ("add.f32", one, two, twice(3f32.to_bits())),
        // Unlike `red` in global memory.
        ("add.f32", subnormal, subnormal, twice(2)),
        ("add.f64", 1f64.to_bits(), 2f64.to_bits(), 3f64.to_bits()),
        ("add.noftz.f16", four(0x3c00), four(0x4000), four(0x4200)),
        ("add.noftz.f16", four(1), four(2), four(3)),
        ("add.noftz.bf16", four(0x3f80), four(0x4000), four(0x4040)),
        ("min.u32", twice(5), minus_one, twice(5)),
        ("min.s32", twice(5), minus_one, minus_one),
        ("max.u64", 1 << 63, 1, 1 << 63),
        ("max.s64", 1 << 63, 1, 1),
        ("min.f16", four(0xbc00), four(0x3c00), four(0xbc00)),
        ("max.bf16", four(0x7fc0), four(0x3f80), four(0x3f80)),
        ("inc.u32", twice(4), twice(4), 0),
        ("dec.u32", twice(0), twice(9), twice(9)),
        ("and.b32", twice(0b1100), twice(0b1010), twice(0b1000)),
        ("or.b64", 0b1100, 0b1010, 0b1110),
        ("xor.b64", 0b1100, 0b1010, 0b0110),
    ] {
        let body = format!(
            "mov.u32 %r1, DATA; mov.u64 %rd1, {data};
             st.shared.u64 [%r1], %rd1; st.shared.u64 [%r1+8], %rd1; fence.proxy.async.shared::cta;
             cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation} [%rd40], [%r1], 16;
             cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
        );
        let words = run_body(".shared .align 16 .b8 DATA[16];", &body, 1, &[old, old, old]);
        assert_eq!(words, [new, new, old], "{operation}");
    }
}

#[test]
fn a_reduction_into_shared_memory_needs_a_cluster() {
    let fault = fault_of(
        ".shared .align 16 .b8 DATA[32]; .shared .align 8 .b8 MBAR[8];",
        "mov.u32 %r1, DATA; mov.u32 %r2, MBAR; mbarrier.init.shared.b64 [%r2], 1;
         mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16;
         cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u64 [%r1+16], [%r1], 16, [%r2];",
        1,
    );
    let FaultKind::BulkCopy { message } = &fault.kind else { panic!("{fault}") };
    assert!(message.contains("no cluster"), "{message}");
}

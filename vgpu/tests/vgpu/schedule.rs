//! The scheduler: progress, replay, spinning, launches, sharing between grids and threads.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use epoxide_vgpu::{
    CheckConfig, Clock, DeviceConfig, FaultKind, Grid, GridConfig, LaunchError, Machine, MachineError,
    Memory, Module, Progress, Schedule, WaitingFor, for_each_seed,
};

use crate::common::*;

fn seeded(seed: u64) -> DeviceConfig {
    DeviceConfig { schedule_seed: Some(seed), ..DeviceConfig::default() }
}

/// Blocks add up their numbers with atomics and shuffle; the last one to arrive doubles the sum.
const SUM: &str = "
    mov.u32 %r1, %ctaid.x; redux.sync.add.u32 %r2, %r1, -1; cvt.u64.u32 %rd1, %r2;
    and.b32 %r3, %r40, 31; setp.ne.u32 %p1, %r3, 0; @%p1 bra END;
    red.relaxed.gpu.global.add.u64 [%rd40], %rd1;
    fence.acq_rel.gpu;
    atom.acq_rel.gpu.global.add.u32 %r4, [%rd40+8], 1;
    mov.u32 %r5, %nctaid.x; mov.u32 %r6, %nwarpid; mad.lo.u32 %r5, %r5, %r6, -1;
    setp.ne.u32 %p2, %r4, %r5; @%p2 bra END;
    ld.acquire.gpu.global.u64 %rd2, [%rd40]; shl.b64 %rd2, %rd2, 1; st.global.u64 [%rd40+16], %rd2;
END:";

#[test]
fn seeds_replay_and_differ_but_results_agree() {
    let go = |dev: &DeviceConfig| {
        let mut run = Run::new(&kernel("", SUM), &[0; 3], launch(10, 96), dev);
        run.finish().unwrap();
        (run.grid.schedule_digest(), run.words()[2])
    };
    let want = 2 * 3 * 32 * 45;
    let (seeds, mut digests) = (tier(50, 500), std::collections::HashSet::new());
    for seed in 0..seeds {
        let (digest, sum) = go(&seeded(seed));
        assert_eq!(sum, want, "seed {seed}");
        assert_eq!(go(&seeded(seed)).0, digest, "seed {seed} must replay");
        digests.insert(digest);
    }
    assert_eq!(digests.len() as u64, seeds);
    assert_eq!(go(&DeviceConfig::default()), go(&DeviceConfig::default()));
}

/// One warp of 32 computes, and the others wait for it.
#[test]
fn warps_that_wait_leave_the_turns_to_those_that_work() {
    let body = "
        setp.ge.u32 %p1, %r40, 32; @%p1 bra WAIT;
        mov.u32 %r3, 0;
    WORK:
        add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 20000; @%p2 bra WORK;
        st.release.gpu.global.u32 [%rd40], 1; bra END;
    WAIT:
        ld.acquire.gpu.global.u32 %r4, [%rd40]; setp.eq.u32 %p3, %r4, 0; @%p3 bra WAIT;
    END:";
    for dev in (0..5).map(seeded).chain([DeviceConfig::default()]) {
        let mut run = Run::new(&kernel("", body), &[0], launch(1, 1024), &dev);
        run.finish().unwrap();
        let instructions = run.grid.stats().warp_instructions;
        assert!(instructions < 90_000, "{instructions} with {dev:?}, and the work takes 60,000");
    }
}

#[test]
fn the_digest_does_not_depend_on_the_size_of_steps() {
    let go = |step: u64| {
        let mut run = Run::new(&kernel("", SUM), &[0; 3], launch(10, 96), &seeded(7));
        while run.grid.step(step).unwrap() != Progress::Done {}
        run.grid.schedule_digest()
    };
    assert_eq!(go(1), go(1_000_000));
}

#[test]
fn more_blocks_than_fit_run_in_turn() {
    let body = "mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd1, %r1, 8; add.s64 %rd1, %rd40, %rd1;
        red.relaxed.gpu.global.add.u64 [%rd1], 1;";
    let dev = DeviceConfig { max_blocks_resident: Some(3), ..DeviceConfig::default() };
    let mut run = Run::new(&kernel("", body), &[0; 100], launch(100, 64), &dev);
    run.finish().unwrap();
    assert_eq!(run.words(), [64; 100]);
    assert_eq!(run.grid.stats().blocks_done, 100);
    // Shared memory and registers of a slot are fresh for each block: the same poison, regardless
    // of the block before.
    let body = "mov.u32 %r1, S; ld.shared.u32 %r4, [%r1]; sub.u32 %r2, %r4, %r30; st.shared.u32 [%r1], %r3; mov.u32 %r30, 7;
        add.u32 %r2, %r2, 1; mov.u32 %r3, %ctaid.x; mul.wide.u32 %rd1, %r3, 8; add.s64 %rd1, %rd40, %rd1;
        st.global.u32 [%rd1], %r2;";
    let mut run = Run::new(&kernel(".shared .align 4 .b8 S[4];", body), &[0; 100], launch(100, 1), &dev);
    run.finish().unwrap();
    assert_eq!(run.words(), [1; 100]);
}

#[test]
fn all_blocks_of_a_grid_that_fits_are_resident() {
    // A grid-wide barrier: it ends only if every block runs.
    let body = "
        setp.ne.u32 %p1, %r40, 0; @%p1 bra JOIN;
        atom.add.release.gpu.global.u32 %r1, [%rd40], 1; mov.u32 %r2, %nctaid.x;
    SPIN:
        ld.acquire.gpu.global.u32 %r3, [%rd40]; setp.lt.u32 %p2, %r3, %r2; @%p2 bra SPIN;
    JOIN:
        bar.warp.sync -1; barrier.sync 0; red.relaxed.gpu.global.add.u64 [%rd40+8], 1;";
    let preemptions = |seed| DeviceConfig { schedule: Schedule::Preemptions(3), ..seeded(seed) };
    for dev in
        (0..tier(10, 50)).flat_map(|seed| [seeded(seed), preemptions(seed)]).chain([DeviceConfig::default()])
    {
        let mut run = Run::new(&kernel("", body), &[0; 2], launch(132, 128), &dev);
        run.finish().unwrap();
        assert_eq!(run.words(), [132, 132 * 128]);
    }
}

#[test]
fn how_much_of_a_grid_is_resident_at_first_is_drawn() {
    // Every block counts itself when it starts, and block 0 stores the count at its end.
    let body = "
        atom.add.relaxed.gpu.global.u32 %r1, [%rd40], 1; mov.u32 %r3, 0;
    WORK:
        add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 300; @%p2 bra WORK;
        mov.u32 %r2, %ctaid.x; setp.ne.u32 %p1, %r2, 0; @%p1 bra END;
        ld.relaxed.gpu.global.u32 %r4, [%rd40]; st.global.u32 [%rd40+8], %r4;
    END:";
    let module = Module::parse(&kernel("", body)).unwrap();
    let blocks = |seed: u64, dev: &DeviceConfig| {
        // Without a seed of the schedule, the memory's counts.
        let memory = Memory::checked(seed, None);
        let buf = memory.alloc_zeroed(16, "buf").unwrap();
        let (k, params) = (module.kernel("k").unwrap(), buf.addr().to_ne_bytes());
        let mut grid = Grid::new(k, memory.clone(), dev, launch(16, 1), &params).unwrap();
        while grid.step(1000).unwrap() != Progress::Done {}
        let mut words = [0; 16];
        memory.read(buf.addr(), &mut words).unwrap();
        assert_eq!(words[0], 16, "all start in the end");
        usize::from(words[8])
    };
    let drawn = |of: &dyn Fn(u64) -> usize| {
        let seeds = tier(100, 1000);
        let counts: Vec<usize> = (0..seeds).map(of).collect();
        assert_eq!(counts, (0..seeds).map(of).collect::<Vec<usize>>(), "a seed replays");
        counts.into_iter().collect::<std::collections::BTreeSet<usize>>()
    };
    for counts in
        [drawn(&|seed| blocks(0, &seeded(seed))), drawn(&|seed| blocks(seed, &DeviceConfig::default()))]
    {
        assert!(counts.contains(&1) && counts.contains(&16) && counts.len() > 8, "{counts:?}");
    }
}

#[test]
fn a_grid_without_progress_is_a_livelock() {
    // Both blocks make progress: one passes a word on, and the other passes it back.
    let ping_pong = "mov.u32 %r1, %ctaid.x; xor.b32 %r2, %r1, 1;
        L: atom.cas.relaxed.gpu.global.b32 %r3, [%rd40], %r1, %r2; bra L;";
    let endless = "mov.u32 %r1, 0; L: add.u32 %r1, %r1, 1; bra L;";
    let limited = |seed| DeviceConfig { livelock_limit: Some(20_000), ..seeded(seed) };
    for (body, name) in [(ping_pong, "atom.cas"), (endless, "add.u32 %r1, %r1, 1")] {
        let (seeds, mut both) = (tier(10, 100), 0);
        for seed in 0..seeds {
            let mut run = Run::new(&kernel("", body), &[0], launch(2, 1), &limited(seed));
            let fault = run.finish().unwrap_err();
            let FaultKind::Livelock { instructions, report } = &fault.kind else { panic!("{fault}") };
            assert!((20_001..25_000).contains(instructions), "{instructions}");
            both += u64::from(report.warps.len() == 2);
            assert!(report.warps.iter().any(|w| w.at.ptx_text.contains(name)), "{fault}");
            assert!(fault.to_string().contains("raise the device's livelock limit"), "{fault}");
            assert_eq!(run.grid.step(1).unwrap_err(), *fault, "it stays stopped");
        }
        // A few seeds admit the second block later than that: it is not in the report.
        assert!(both > seeds * 9 / 10, "{both} of {seeds} seeds");
    }
}

#[test]
fn blocks_that_end_or_wait_are_no_livelock() {
    // Many times the limit, but blocks come and go.
    let body = "mov.u32 %r1, 0; L: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 1000; @%p1 bra L;";
    let dev = DeviceConfig { livelock_limit: Some(10_000), max_blocks_resident: Some(2), ..seeded(3) };
    let mut run = Run::new(&kernel("", body), &[0], launch(50, 1), &dev);
    run.finish().unwrap();
    assert!(run.grid.stats().warp_instructions > 100_000);
    // A waiting block may then wait for ever.
    let body = "L: ld.relaxed.sys.global.u32 %r1, [%rd40]; setp.eq.u32 %p1, %r1, 0; @%p1 bra L;";
    let dev = DeviceConfig { livelock_limit: Some(500), ..seeded(3) };
    let mut run = Run::new(&kernel("", body), &[0], launch(1, 1), &dev);
    while run.grid.stats().warp_instructions < 5000 {
        assert_ne!(run.grid.step(1_000_000).unwrap(), Progress::Done);
    }
    run.memory.write(run.buf.addr(), &[1]).unwrap();
    run.finish().unwrap();
}

#[test]
fn spinning_grids_say_so_and_go_on_when_memory_changes() {
    let body = "SPIN: ld.acquire.sys.global.u64 %rd1, [%rd40]; setp.lt.u64 %p1, %rd1, 5; @%p1 bra SPIN;
        st.global.u64 [%rd42+8], %rd1;";
    for (body, dev) in [
        (body.to_string(), DeviceConfig::default()),
        (body.to_string(), seeded(9)),
        (body.replace("setp", "nanosleep.u32 20; setp"), DeviceConfig::default()),
        // A failed compare-and-swap is waiting, too.
        (
            body.replace(
                "ld.acquire.sys.global.u64 %rd1, [%rd40]",
                "atom.acquire.sys.global.cas.b64 %rd1, [%rd40], 99, 0",
            ),
            seeded(3),
        ),
        (body.replace("ld.acquire.sys", "ld.volatile"), seeded(4)),
    ] {
        let mut run = Run::new(&kernel("", &body), &[1, 0, 0], launch(1, 2), &dev);
        // Warps that begin are a change.
        while run.grid.step(1_000_000).unwrap() == Progress::Running {}
        for _ in 0..3 {
            assert_eq!(run.grid.step(1_000_000).unwrap(), Progress::Spinning);
        }
        assert!(run.grid.stats().warp_instructions < 10_000, "spinning must give way soon");
        let report = run.grid.stuck_report();
        let addr = run.buf.addr();
        assert!(report.warps.iter().any(|w| w.waiting == WaitingFor::Memory { addr, value: 1 }), "{report}");
        assert!(report.to_string().contains(": spins on 'buf' + 0x0, last value 0x1 (1)"), "{report}");
        run.memory.write(addr, &6u64.to_ne_bytes()).unwrap();
        run.finish().unwrap();
        assert_eq!(run.words(), [6, 6, 6]);
    }
}

/// Lanes that stay apart poll two words by the same instruction, in turns. A turn of a warp is too
/// short for both to come around a loop twice.
#[test]
fn lanes_that_wait_apart_at_one_load_count_as_spinning() {
    let body = format!(
        "setp.eq.u32 %p2, %r40, 0; @%p2 bra SPIN; add.u64 %rd40, %rd40, 8;
         SPIN: ld.acquire.sys.global.u64 %rd1, [%rd40]; {}
         setp.lt.u64 %p1, %rd1, 5; @%p1 bra SPIN; st.global.u64 [%rd42+16], %rd1;",
        "add.u64 %rd2, %rd1, 1; ".repeat(100)
    );
    for_each_seed(tier(40, 400), |seed| {
        let mut run = Run::new(&kernel("", &body), &[1, 2, 0, 0, 0, 0], launch(4, 4), &seeded(seed));
        while run.grid.step(1_000_000).unwrap() == Progress::Running {}
        for _ in 0..10 {
            assert_eq!(run.grid.step(1_000_000).unwrap(), Progress::Spinning, "seed {seed}");
        }
        for value in [run.buf.addr(), run.buf.addr() + 8] {
            run.memory.write(value, &6u64.to_ne_bytes()).unwrap();
        }
        run.finish().unwrap();
        assert_eq!(run.words()[2..], [6; 4]);
    });
}

#[test]
fn warps_of_a_block_that_wait_alike_are_one_line() {
    let body = "L: ld.acquire.sys.global.u64 %rd1, [%rd40]; setp.eq.u64 %p1, %rd1, 1; @%p1 bra L;";
    let mut run = Run::new(&kernel("", body), &[1], launch(2, 96), &DeviceConfig::default());
    while run.grid.step(1_000_000).unwrap() != Progress::Spinning {}
    let report = run.grid.stuck_report();
    let text = report.to_string();
    assert_eq!((report.warps.len(), text.lines().count()), (6, 3), "{text}");
    assert!(text.contains("\n  block [1, 0, 0] warps 0-2 lanes 0xffffffff: spins on 'buf' + 0x0"), "{text}");
}

#[test]
fn a_wait_of_lanes_lists_the_word_of_each() {
    let report = |globals: &str, body: &str, threads: u32| {
        let body = kernel(globals, body);
        let mut run =
            Run::new(&body, &[0, 1, 2, 0, 4, 5, 6, 7], launch(1, threads), &DeviceConfig::default());
        while run.grid.step(1_000_000).unwrap() != Progress::Spinning {}
        let report = run.grid.stuck_report();
        let text = report.to_string();
        (report, text)
    };
    // All lanes wait until each has the number of its lane, which lane 3 lacks.
    let all =
        "L: ld.acquire.sys.global.u64 %rd1, [%rd42]; cvt.u64.u32 %rd2, %r40; setp.eq.u64 %p1, %rd1, %rd2;
               vote.sync.all.pred %p2, %p1, 0x3f; @!%p2 bra L;";
    let (found, text) = report("", all, 6);
    let [warp] = found.warps.as_slice() else { panic!("{text}") };
    assert_eq!(warp.place, "'buf' + 0x0", "{text}");
    let words: Vec<_> = warp.others.iter().map(|word| (word.lanes, word.value)).collect();
    assert_eq!(words, [(2, 1), (4, 2), (8, 0), (16, 4), (32, 5)], "{text}");
    assert!(text.contains("\n    lane 3: 'buf' + 0x18, value 0x0 (0)"), "{text}");
    // Lanes with the same word are one line; the others of a guard wait for nothing.
    let pairs = "shr.u32 %r1, %r40, 1; mul.wide.u32 %rd1, %r1, 8; add.s64 %rd1, %rd1, %rd40;
                 setp.lt.u32 %p3, %r40, 6;
                 L: @%p3 ld.acquire.sys.global.u32 %r2, [%rd1+4]; setp.eq.u32 %p1, %r2, 9; bar.warp.sync -1;
                 bra L;";
    let (found, text) = report("", pairs, 32);
    let words: Vec<_> = found.warps[0].others.iter().map(|word| (word.lanes, word.value)).collect();
    assert_eq!(words, [(12, 0), (48, 0)], "{text}");
    assert!(text.contains("\n    lanes 2-3: 'buf' + 0xc, value 0x0 (0)"), "{text}");
    // Lanes that wait apart have a word each, in shared memory as well.
    let apart = "mov.u64 %rd1, FLAGS; setp.eq.u32 %p2, %r40, 0; @%p2 bra M;
                 L: ld.volatile.shared.u64 %rd5, [%rd1+8]; setp.ne.u64 %p1, %rd5, 9; @%p1 bra L;
                 M: ld.volatile.shared.u64 %rd5, [%rd1]; setp.ne.u64 %p1, %rd5, 9; @%p1 bra M;";
    let (found, text) = report(".shared .align 8 .b64 FLAGS[4];", apart, 2);
    let mut waits: Vec<_> = found.warps.iter().map(|warp| (warp.lanes, warp.place.as_str())).collect();
    waits.sort_unstable();
    assert_eq!(
        waits,
        [(1, "'FLAGS + 0x0' in shared memory"), (2, "'FLAGS + 0x8' in shared memory")],
        "{text}"
    );
    // The warp's last wait is that of another group, on an mbarrier.
    let mixed =
        "mov.u64 %rd1, BAR; setp.eq.u32 %p2, %r40, 0; @%p2 mbarrier.init.shared.b64 [%rd1], 2; bar.sync 0;
                 @%p2 bra M; L: ld.acquire.sys.global.u64 %rd2, [%rd42]; setp.ne.u64 %p1, %rd2, 99;
                 @%p1 bra L; ret;
                 M: mbarrier.test_wait.parity.shared.b64 %p3, [%rd1], 0; @!%p3 bra M;";
    let (found, text) = report(".shared .align 8 .b64 BAR;", mixed, 3);
    let mut waits: Vec<_> =
        found.warps.iter().map(|warp| (warp.lanes, &*warp.place, warp.others.len())).collect();
    waits.sort_unstable();
    assert_eq!(waits, [(1, "'BAR + 0x0' in shared memory", 0), (6, "'buf' + 0x8", 1)], "{text}");
    // A report has a few of many words.
    let many = "cvt.u64.u32 %rd1, %r40; add.u64 %rd1, %rd1, %rd40;
                L: ld.acquire.sys.global.u8 %r1, [%rd1]; setp.ne.u32 %p1, %r1, 77; bar.warp.sync -1; @%p1 bra L;";
    let (found, text) = report("", many, 32);
    assert_eq!(found.warps[0].others.len(), 31);
    assert!(text.contains("\n    lane 8: 'buf' + 0x8, value 0x1 (1)\n    and 23 more words"), "{text}");
}

#[test]
fn a_grid_that_computes_does_not_count_as_spinning() {
    let body = "mov.u32 %r1, 0; L: add.u32 %r1, %r1, 1; setp.ne.u32 %p1, %r1, 100000; @%p1 bra L;
        st.global.u32 [%rd40], %r1;";
    let mut run = Run::new(&kernel("", body), &[0], launch(1, 32), &DeviceConfig::default());
    run.finish().unwrap();
    assert_eq!(run.words(), [100_000]);
}

#[test]
fn two_grids_on_two_threads_and_two_mappings_play_ping_pong() {
    // A turn costs a switch between threads, which takes long where other programs run.
    let turns = tier(20, 200);
    let ptx = kernel(
        "",
        &"ld.global.u64 %rd1, [%rd40+8]; mov.u64 %rd2, 0;
         // %rd1: the address of the ball in this device; even or odd turn in [buf].
         ld.global.u64 %rd3, [%rd40];
     L:  ld.acquire.sys.u64 %rd4, [%rd1]; and.b64 %rd5, %rd4, 1; setp.ne.u64 %p1, %rd5, %rd3; @%p1 bra L;
         add.u64 %rd4, %rd4, 1; st.release.sys.u64 [%rd1], %rd4;
         add.u64 %rd2, %rd2, 1; setp.lt.u64 %p2, %rd2, TURNS; @%p2 bra L;"
            .replace("TURNS", &turns.to_string()),
    );
    let owner = Memory::new();
    let ball = owner.alloc(8, "ball").unwrap();
    owner.fill(ball.addr(), 0, 8).unwrap();
    let module = Arc::new(Module::parse(&ptx).unwrap());
    std::thread::scope(|s| {
        for turn in 0..2u64 {
            let (module, ball) = (module.clone(), ball.export().unwrap());
            s.spawn(move || {
                let memory = Memory::new();
                let ball = memory.import(ball, 8, "ball of the other").unwrap();
                let buf = memory.alloc(16, "buf").unwrap();
                memory.write(buf.addr(), &turn.to_ne_bytes()).unwrap();
                memory.write(buf.addr() + 8, &ball.addr().to_ne_bytes()).unwrap();
                let mut grid = Grid::new(
                    module.kernel("k").unwrap(),
                    memory.clone(),
                    &seeded(turn),
                    launch(1, 1),
                    &buf.addr().to_ne_bytes(),
                )
                .unwrap();
                loop {
                    match grid.step(1000).unwrap() {
                        Progress::Done => break,
                        Progress::Running => {}
                        Progress::Spinning => std::thread::yield_now(),
                    }
                }
            });
        }
    });
    let mut out = [0; 8];
    owner.read(ball.addr(), &mut out).unwrap();
    assert_eq!(u64::from_ne_bytes(out), 2 * turns);
}

#[test]
fn a_region_freed_under_a_kernel_is_a_fault() {
    let ptx = kernel("", "L: ld.relaxed.sys.global.u64 %rd1, [%rd40]; bra L;");
    let module = Module::parse(&ptx).unwrap();
    let memory = Memory::new();
    let buf = memory.alloc(8, "short-lived").unwrap();
    let params = buf.addr().to_ne_bytes();
    let mut grid =
        Grid::new(module.kernel("k").unwrap(), memory, &DeviceConfig::default(), launch(1, 1), &params)
            .unwrap();
    assert_eq!(grid.step(1000).unwrap(), Progress::Spinning);
    drop(buf);
    let fault = grid.step(1000).unwrap_err().to_string();
    assert!(fault.contains("is in 'short-lived' + 0x0, which has been freed"), "{fault}");
}

#[test]
fn virtual_time_is_exact() {
    let time = Arc::new(AtomicU64::new(1_000));
    let dev = DeviceConfig { clock: Clock::Virtual(time.clone()), ..DeviceConfig::default() };
    let body = "mov.u64 %rd1, %globaltimer; add.u64 %rd2, %rd1, 5000;
        L: mov.u64 %rd3, %globaltimer; setp.lt.u64 %p1, %rd3, %rd2; @%p1 bra L;
        sub.u64 %rd4, %rd3, %rd1; st.global.u64 [%rd40], %rd4;";
    let mut run = Run::new(&kernel("", body), &[0], launch(1, 1), &dev);
    run.finish().unwrap();
    let waited = run.words()[0];
    assert!((5000..5003).contains(&waited), "{waited}");
    let now = time.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(now, 1000 + run.grid.stats().warp_instructions);
}

/// Each lane waits for its word, and reads the clock at its first poll and then at every 64th. It
/// stores the word, or how long it has waited, if that is more than 1000 ns.
const WAIT_WITH_DEADLINE: &str = "
    mov.u32 %r1, 0; mov.u64 %rd1, 0;
    POLL: ld.relaxed.sys.global.u64 %rd2, [%rd42];
    setp.ne.u64 %p1, %rd2, 0; @%p1 bra END;
    and.b32 %r2, %r1, 63; add.u32 %r1, %r1, 1; setp.ne.u32 %p2, %r2, 0; @%p2 bra POLL;
    mov.u64 %rd3, %globaltimer;
    setp.ne.u64 %p3, %rd1, 0; @%p3 bra LATER;
    mov.u64 %rd1, %rd3; bra POLL;
    LATER: sub.u64 %rd2, %rd3, %rd1; setp.le.u64 %p4, %rd2, 1000; @%p4 bra POLL;
    END: st.global.u64 [%rd42+16], %rd2;";

/// The other lane has just stored a word, which resets all polls: that the waiting lane reads the
/// clock is recorded from before.
#[test]
fn a_clock_that_stands_is_read_before_its_owner_moves_it_again() {
    let time = Arc::new(AtomicU64::new(1_000));
    let dev = DeviceConfig { clock: Clock::Stepped(time.clone()), ..DeviceConfig::default() };
    let mut run = Run::new(&kernel("", WAIT_WITH_DEADLINE), &[0; 4], launch(1, 2), &dev);
    let step = |run: &mut Run| while run.grid.step(10_000).unwrap() == Progress::Running {};
    step(&mut run);
    // Both have begun to wait at 1000 ns.
    for _ in 0..64 {
        step(&mut run);
    }
    run.memory.write(run.buf.addr(), &7u64.to_ne_bytes()).unwrap();
    step(&mut run);
    assert_eq!(run.words(), [7, 0, 7, 0]);
    time.store(3_000, std::sync::atomic::Ordering::Relaxed);
    let mut steps = 0;
    loop {
        step(&mut run);
        steps += 1;
        if run.grid.has_read_the_clock(3_000) {
            break;
        }
        assert!(steps < 256);
    }
    assert_eq!(run.words(), [7, 0, 7, 2_000], "after {steps} steps");
}

/// The clock's owner is another thread, which moves the clock between two checks of this one.
#[test]
fn a_clock_that_has_moved_since_it_was_read_is_read_again() {
    let time = Arc::new(AtomicU64::new(1_000));
    let dev = DeviceConfig { clock: Clock::Stepped(time.clone()), ..DeviceConfig::default() };
    let mut run = Run::new(&kernel("", WAIT_WITH_DEADLINE), &[0; 4], launch(1, 1), &dev);
    for _ in 0..64 {
        assert_ne!(run.grid.step(10_000).unwrap(), Progress::Running);
    }
    assert!(run.grid.has_read_the_clock(1_000));
    time.store(1_500, std::sync::atomic::Ordering::Relaxed);
    run.grid.expect_no_more_readings(1_000);
    assert!(!run.grid.has_read_the_clock(1_500));
    // A lane that does not read it again before its owner has waited in vain.
    run.grid.expect_no_more_readings(1_500);
    assert!(run.grid.has_read_the_clock(1_500));
}

#[test]
fn launches_are_checked() {
    let ptx = kernel(".shared .align 4 .b8 S[1000];", "st.shared.u32 [S], 1;")
        .replace("buf)\n{", "buf)\n.maxntid 128, 1, 1\n{");
    let module = Module::parse(&ptx).unwrap();
    let k = module.kernel("k").unwrap();
    assert_eq!((k.max_threads(), k.param_bytes(), k.static_shared_bytes()), (Some(128), 8, 1000));
    assert_eq!((k.params()[0].name.as_str(), k.params()[0].offset, k.params()[0].align), ("buf", 0, 8));
    let go = |cfg: GridConfig, params: &[u8]| {
        Grid::new(k.clone(), Memory::new(), &DeviceConfig::default(), cfg, params).map(|_| ()).unwrap_err()
    };
    assert!(matches!(go(launch(1, 32), &[0; 7]), LaunchError::ParamBytes { expected: 8, actual: 7, .. }));
    assert!(matches!(go(launch(0, 32), &[0; 8]), LaunchError::Dimension { what: "grid", .. }));
    assert!(matches!(go(launch(1, 0), &[0; 8]), LaunchError::Dimension { what: "block", .. }));
    assert!(matches!(
        go(launch(1, 160), &[0; 8]),
        LaunchError::TooManyThreads { max: 128, threads: 160, .. }
    ));
    let wide = GridConfig { grid: [1, 70_000, 1], ..launch(1, 32) };
    assert!(matches!(go(wide, &[0; 8]), LaunchError::Dimension { what: "grid", .. }));
    let fat = GridConfig { dynamic_shared_bytes: 227 * 1024 - 999, ..launch(1, 32) };
    assert!(matches!(go(fat, &[0; 8]), LaunchError::SharedMemory { .. }));
    let e = go(GridConfig { dynamic_shared_bytes: u32::MAX, ..launch(1, 32) }, &[0; 8]);
    assert!(e.to_string().contains("232448"), "{e}");
    let required = Module::parse(&ptx.replace(".maxntid 128, 1, 1", ".reqntid 64")).unwrap();
    let e = Grid::new(
        required.kernel("k").unwrap(),
        Memory::new(),
        &DeviceConfig::default(),
        launch(1, 32),
        &[0; 8],
    );
    assert!(matches!(e.unwrap_err(), LaunchError::BlockShape { required: [64, 1, 1], .. }));
}

#[test]
fn types_cross_threads() {
    fn send<T: Send>() {}
    fn sync<T: Sync>() {}
    send::<Grid>();
    send::<Memory>();
    sync::<Memory>();
    sync::<epoxide_vgpu::Kernel>();
    sync::<Module>();
    send::<epoxide_vgpu::Region>();
    sync::<epoxide_vgpu::Region>();
}

#[test]
fn a_warp_in_which_one_lane_goes_on_does_not_count_as_spinning() {
    // Every lane takes a lock, and its holder computes for a while. The others of its warp poll the
    // lock in vain, but the grid needs nothing from outside.
    let body = "
    TRY:
        atom.exch.acquire.gpu.global.b32 %r1, [%rd40], 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra TRY;
        ld.global.u64 %rd1, [%rd40+8]; mov.u32 %r2, 0;
    WORK:
        mad.lo.u64 %rd1, %rd1, 3, 1; add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 100; @%p2 bra WORK;
        st.global.u64 [%rd40+8], %rd1;
        st.release.gpu.global.b32 [%rd40], 0;";
    let want = (0..2 * 64 * 100).fold(0u64, |v, _| v.wrapping_mul(3).wrapping_add(1));
    for_each_seed(tier(20, 200), |seed| {
        let mut run = Run::new(&kernel("", body), &[0; 2], launch(2, 64), &seeded(seed));
        run.finish().unwrap();
        assert_eq!(run.words()[1], want, "seed {seed}");
    });
}

#[test]
fn coverage_marks_instructions_that_any_lane_has_executed() {
    let body = "setp.eq.u32 %p1, %r40, 31; @%p1 mov.u32 %r1, 1; setp.eq.u32 %p2, %r40, 99;
        @%p2 mov.u32 %r2, 1; @%p2 bra NEVER; bra END; NEVER: mov.u32 %r3, 1; END:";
    let text = |body: &str| kernel("", body);
    let module = Module::parse(&text(body)).unwrap();
    let kernel = module.kernel("k").unwrap();
    assert_eq!(kernel.coverage(), None);
    kernel.record_coverage();
    assert!(!kernel.coverage().unwrap().contains(&true));
    let memory = Memory::new();
    let buf = memory.alloc(8, "buf").unwrap();
    let mut grid =
        Grid::new(kernel.clone(), memory, &DeviceConfig::default(), launch(1, 32), &buf.addr().to_ne_bytes())
            .unwrap();
    while grid.step(100).unwrap() != Progress::Done {}
    let executed = kernel.coverage().unwrap();
    assert_eq!(executed.len(), kernel.instruction_count());
    // Behind the four instructions of the frame: instructions of lane 31 alone count, and so does a
    // branch that no lane takes.
    assert_eq!(executed[4..], [true, true, true, false, true, true, false, true, false]);
    // Another text of the same length is another kernel.
    let other = Module::parse(&text(&body.replace("99", "98"))).unwrap().kernel("k").unwrap();
    assert_ne!(other.fingerprint(), kernel.fingerprint());
    let same = Module::parse(&text(body)).unwrap().kernel("k").unwrap();
    assert_eq!(same.fingerprint(), kernel.fingerprint());
}

#[test]
fn a_loop_that_computes_and_reads_an_unchanged_word_is_no_hang() {
    let body = "mov.u32 %r1, 0;
        L: ld.relaxed.gpu.global.u64 %rd1, [%rd40]; add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 10000; @%p1 bra L;
        st.global.u32 [%rd40+8], %r1;";
    let module = Module::parse(&kernel("", body)).unwrap();
    for check in [None, Some(CheckConfig::default())] {
        let (outcome, _, words) = run(&module, launch(1, 1), 1, check);
        outcome.unwrap();
        assert_eq!(words[..2], [0, 10_000]);
    }
}

#[test]
fn lanes_that_compute_beside_others_that_wait_are_no_hang() {
    // All lanes poll once in vain. Lane 0 then computes and stores the word.
    let body = "mov.u32 %r1, 0; mov.u32 %r2, 0;
        POLL: ld.acquire.gpu.global.u64 %rd1, [%rd40]; setp.ne.u64 %p1, %rd1, 0; @%p1 bra END;
        add.u32 %r2, %r2, 1; setp.ne.u32 %p2, %r40, 0; @%p2 bra POLL; setp.lt.u32 %p2, %r2, 4; @%p2 bra POLL;
        WORK: add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 300000; @%p2 bra WORK;
        st.release.gpu.global.u64 [%rd40], 1; bra POLL;
        END:";
    let module = Module::parse(&kernel("", body)).unwrap();
    for_each_seed(tier(4, 20), |seed| {
        for check in [None, Some(CheckConfig::default())] {
            let (outcome, _, words) = run(&module, launch(1, 2), seed, check);
            outcome.unwrap();
            assert_eq!(words[0], 1);
        }
    });
}

#[test]
fn a_wait_that_reads_several_words_by_one_load_is_a_hang() {
    let body = "mov.u32 %r1, 0;
        L: add.u32 %r1, %r1, 8; and.b32 %r2, %r1, 8; cvt.u64.u32 %rd1, %r2; add.u64 %rd1, %rd40, %rd1;
        ld.acquire.gpu.global.u64 %rd2, [%rd1]; setp.eq.u64 %p1, %rd2, 0; @%p1 bra L;";
    let module = Module::parse(&kernel("", body)).unwrap();
    for check in [None, Some(CheckConfig::default())] {
        let (outcome, ..) = run(&module, launch(1, 1), 1, check);
        assert!(matches!(outcome, Err(MachineError::Stuck(_))), "{outcome:?}");
    }
}

/// A lane has polled a word that then changed, and waits for the clock alone.
#[test]
fn a_wait_for_a_clock_behind_a_poll_counts_as_spinning() {
    let time = Arc::new(AtomicU64::new(1_000));
    let dev = DeviceConfig { clock: Clock::Stepped(time.clone()), ..DeviceConfig::default() };
    let body = "POLL: ld.acquire.sys.global.u64 %rd1, [%rd40]; setp.eq.u64 %p1, %rd1, 0; @%p1 bra POLL;
        mov.u64 %rd2, %globaltimer;
        WAIT: mov.u64 %rd3, %globaltimer; sub.u64 %rd4, %rd3, %rd2; setp.lt.u64 %p1, %rd4, 500; @%p1 bra WAIT;
        st.global.u64 [%rd40], %rd4;";
    let mut run = Run::new(&kernel("", body), &[1], launch(1, 1), &dev);
    for _ in 0..10 {
        assert_eq!(run.grid.step(10_000).unwrap(), Progress::Spinning);
    }
    time.store(1_600, std::sync::atomic::Ordering::Relaxed);
    run.finish().unwrap();
    assert_eq!(run.words(), [600]);
}

#[test]
fn a_wait_for_an_mbarrier_with_a_deadline_is_no_deadlock() {
    let time = Arc::new(AtomicU64::new(1_000));
    let dev = DeviceConfig { clock: Clock::Stepped(time.clone()), ..DeviceConfig::default() };
    let body = "mov.u32 %r1, BAR; mbarrier.init.shared.b64 [%r1], 2; mov.u64 %rd2, %globaltimer;
        WAIT: mov.u64 %rd3, %globaltimer; sub.u64 %rd4, %rd3, %rd2; setp.ge.u64 %p1, %rd4, 500; @%p1 bra END;
        mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0; @!%p3 bra WAIT;
        END: st.global.u64 [%rd40], %rd4;";
    let mut run = Run::new(&kernel(".shared .align 8 .b8 BAR[8];\n", body), &[0], launch(1, 1), &dev);
    while run.grid.step(10_000).unwrap() == Progress::Running {}
    for _ in 0..10 {
        assert_eq!(run.grid.step(10_000).unwrap(), Progress::Spinning);
    }
    time.store(1_600, std::sync::atomic::Ordering::Relaxed);
    run.finish().unwrap();
    assert_eq!(run.words(), [600]);
}

/// The second block stores the word late. The first one tests an mbarrier beside it, and weak memory
/// may deliver the word's value later than its load.
#[test]
fn a_wait_for_a_word_or_an_mbarrier_in_weak_memory_is_no_deadlock() {
    let body = "mov.u32 %r3, %ctaid.x; setp.ne.u32 %p1, %r3, 0; mov.u32 %r2, 0; @%p1 bra LATE;
        mov.u32 %r1, BAR; mbarrier.init.shared.b64 [%r1], 2;
        WAIT: ld.relaxed.gpu.global.u64 %rd1, [%rd40];
        mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r1], 0; @%p3 bra END;
        setp.eq.u64 %p1, %rd1, 0; @%p1 bra WAIT;
        bra END;
        LATE: ld.relaxed.gpu.global.u64 %rd1, [%rd40+8]; setp.eq.u64 %p1, %rd1, 0; @%p1 bra LATE;
        st.relaxed.gpu.global.u64 [%rd40], 1;
        END:";
    let ptx = kernel(".shared .align 8 .b8 BAR[8];\n", body);
    let module = Module::parse(&ptx).unwrap();
    for_each_seed(tier(40, 400), |seed| {
        let check = CheckConfig { weak_memory: Some(seed), ..CheckConfig::default() };
        let (outcome, ..) = run(&module, launch(2, 1), seed, Some(check));
        // The second word never changes.
        assert!(matches!(outcome, Err(MachineError::Stuck(_))), "{outcome:?}");
    });
}

/// `at` takes turns: waits for its parity in the word `ball`, and adds 1, `rounds` times. A
/// wait of longer than 1 s sets the word behind it.
fn exchange() -> Module {
    let body = "\
.visible .entry exchange(.param .u64 ball, .param .u32 parity, .param .u32 rounds)
{
.reg .pred %p<3>;
.reg .b32 %r<6>;
.reg .b64 %rd<4>;
ld.param.u64 %rd1, [ball];
ld.param.u32 %r1, [parity];
ld.param.u32 %r2, [rounds];
ROUND:
mov.u64 %rd2, %globaltimer;
WAIT:
mov.u64 %rd3, %globaltimer;
sub.u64 %rd3, %rd3, %rd2;
setp.gt.u64 %p1, %rd3, 1000000000;
@%p1 st.relaxed.sys.global.u32 [%rd1+4], 1;
ld.acquire.sys.global.u32 %r3, [%rd1];
and.b32 %r4, %r3, 1;
setp.ne.u32 %p2, %r4, %r1;
@%p2 bra WAIT;
add.u32 %r3, %r3, 1;
st.release.sys.global.u32 [%rd1], %r3;
sub.u32 %r2, %r2, 1;
setp.ne.u32 %p2, %r2, 0;
@%p2 bra ROUND;
ret;
}
";
    Module::parse(&format!("{HEAD}{body}")).unwrap()
}

fn take_turns(mut machine: Machine, rounds: u32) -> (Result<(), MachineError>, Vec<u32>) {
    let module = exchange();
    let ball = machine.upload(0, "ball", &[0u32, 0]).unwrap();
    let peer = machine.map(1, &ball).unwrap();
    machine.launch_with(0, &module, "exchange", launch(1, 1), &[&ball, &0u32, &rounds]).unwrap();
    machine.launch_with(1, &module, "exchange", launch(1, 1), &[&peer, &1u32, &rounds]).unwrap();
    let result = machine.run();
    let words = if result.is_ok() { ball.download().unwrap() } else { vec![] };
    (result, words)
}

#[test]
fn kernels_that_take_turns_do_not_wait_in_vain() {
    for_each_seed(8, |seed| {
        for machine in [Machine::new(2), Machine::seeded(2, seed), Machine::checked(2, seed)] {
            let (result, words) = take_turns(machine, 2000);
            result.unwrap();
            assert_eq!(words, [4000, 0], "no virtual second passes between two turns");
        }
    });
}

#[test]
fn kernels_that_take_turns_for_ever_end_as_a_livelock() {
    for turn in [1, 1024] {
        let config = DeviceConfig { livelock_limit: Some(1 << 12), ..seeded(3) };
        let machine = Machine::with_config(2, config, None).with_longest_turn(turn);
        let (result, _) = take_turns(machine, u32::MAX);
        let error = result.unwrap_err();
        let MachineError::Fault(fault) = &error else { panic!("{error}") };
        assert!(matches!(fault.kind, FaultKind::Livelock { .. }), "{error}");
        assert!(error.to_string().contains("'exchange' of device"), "{error}");
    }
}

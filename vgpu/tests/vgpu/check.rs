//! Check mode, as a specification: faults that shipped in other people's communication kernels,
//! each beside its mended twin; every rule of the checker by itself; and what a program sees of
//! memory and registers that it must not rely on.
//!
//! A case is a correct kernel and the edit that breaks it. The correct kernel must run without a
//! report and compute the same under every seed, and the broken one must be reported under every
//! seed: which of the two accesses comes second depends on the schedule, so a case names both. What
//! would have ordered them is part of the report, and of the case.

use epoxide_vgpu::{
    CheckConfig, Checker, DeviceConfig, Fault, FaultKind, Grid, GridConfig, Launch, LaunchError, Memory,
    MemoryError, Module, Past, Progress, Region, Schedule, Trace, for_each_seed,
};

use crate::common::{kernel, launch, tier};

/// Returns how many seeds a correct kernel must pass.
fn correct_seeds() -> u64 {
    tier(200, 2000)
}

/// Returns how many seeds of a broken kernel must each be reported.
fn broken_seeds() -> u64 {
    tier(24, 240)
}

/// 8-byte words of every test's buffer.
const WORDS: usize = 64;

/// Shared variables that the kernels use: data, and an mbarrier.
const SHARED: &str = ".shared .align 128 .b8 DATA[1024];\n.shared .align 8 .b8 MBAR[16];";

fn device(seed: u64) -> DeviceConfig {
    let schedule = if seed.is_multiple_of(2) { Schedule::Random } else { Schedule::Preemptions(3) };
    DeviceConfig { schedule_seed: Some(seed), schedule, ..DeviceConfig::default() }
}

/// Whether one seed runs alone: nothing is to be counted then.
fn replaying() -> bool {
    std::env::var_os("EPOXIDE_VGPU_SEED").is_some()
}

fn races() -> Checker {
    Checker::new(CheckConfig::default())
}

/// A kernel `k(buf)` from a body.
fn parse(body: &str) -> Module {
    let ptx = kernel(SHARED, body);
    Module::parse(&ptx).unwrap_or_else(|e| panic!("{e}\n{ptx}"))
}

/// Begins a launch of `k` as work of no stream.
fn start(module: &Module, memory: &Memory, buf: &Region, shape: GridConfig, seed: u64) -> Grid {
    let kernel = module.kernel("k").unwrap();
    Grid::new(kernel, memory.clone(), &device(seed), shape, &buf.addr().to_ne_bytes()).unwrap()
}

/// Runs grids to their ends, in turns of random lengths.
fn finish(grids: &mut [&mut Grid], seed: u64) -> Result<(), Box<Fault>> {
    let mut turn = seed;
    let mut done = vec![false; grids.len()];
    let mut rounds = 0;
    while done.iter().any(|d| !d) {
        turn = turn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = (turn >> 33) as usize % grids.len();
        done[at] = grids[at].step(1 + (turn >> 40) % 16)? == Progress::Done;
        rounds += 1;
        assert!(rounds < 1_000_000, "does not end: {}", grids[at].stuck_report());
    }
    Ok(())
}

/// A buffer whose words are their numbers, written by the host.
fn numbered(memory: &Memory) -> Region {
    let buf = memory.alloc(WORDS as u64 * 8, "buf").unwrap();
    let bytes: Vec<u8> = (0..WORDS as u64).flat_map(|i| (i << 32).to_ne_bytes()).collect();
    memory.write(buf.addr(), &bytes).unwrap();
    buf
}

fn words(memory: &Memory, buf: &Region) -> Result<Vec<u64>, MemoryError> {
    let mut bytes = vec![0; buf.bytes() as usize];
    memory.read(buf.addr(), &mut bytes)?;
    Ok(bytes.chunks_exact(8).map(|c| u64::from_ne_bytes(c.try_into().unwrap())).collect())
}

/// Runs a kernel by itself, on a buffer of which word `i` holds `i << 32`, so that flags of 32 bits
/// begin as 0.
fn run(
    module: &Module,
    shape: GridConfig,
    seed: u64,
    checker: Option<Checker>,
) -> Result<Vec<u64>, Box<Fault>> {
    let memory = Memory::checked(seed, checker);
    let buf = numbered(&memory);
    finish(&mut [&mut start(module, &memory, &buf, shape, seed)], seed)?;
    Ok(words(&memory, &buf).unwrap())
}

/// A correct kernel, and an edit that breaks it.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    shape: (u32, u32),
    body: &'static str,
    /// Text to replace, and its replacement.
    edit: (&'static str, &'static str),
    /// The two accesses, as the PTX has them, in either order.
    between: [&'static str; 2],
    /// The missing synchronisation that the report names.
    missing: &'static str,
    /// Result of the correct kernel in these words of the buffer.
    result: &'static [(usize, u64)],
}

/// A race's two PTX lines, and what is missing.
fn described(fault: &Fault) -> ([&str; 2], &str) {
    match &fault.kind {
        FaultKind::Race(race) => ([&fault.ptx_text, &race.other.ptx_text], &race.missing),
        _ => panic!("not a race: {fault}"),
    }
}

/// The fault must be a race between these two accesses, in either order, for want of `missing`.
fn assert_race(name: &str, fault: &Fault, between: [&str; 2], missing: &str) {
    let ([second, first], wants) = described(fault);
    let [a, b] = between;
    assert!(
        second.contains(a) && first.contains(b) || second.contains(b) && first.contains(a),
        "{name}: not between '{a}' and '{b}': {fault}"
    );
    assert!(wants.contains(missing), "{name}: does not name '{missing}': {fault}");
    let FaultKind::Race(race) = &fault.kind else { return };
    assert_eq!((race.other.kernel.as_str(), fault.kernel.as_str()), ("k", "k"), "{name}: {fault}");
}

impl Case {
    fn check(&self) {
        let Case { name, shape, body, edit, between, missing, result } = *self;
        let shape = launch(shape.0, shape.1);
        assert_eq!(body.matches(edit.0).count(), 1, "{name}: the edit fits once");
        let correct = parse(body);
        for_each_seed(correct_seeds(), |seed| {
            let got =
                run(&correct, shape, seed, Some(races())).unwrap_or_else(|f| panic!("{name}, correct: {f}"));
            for &(word, value) in result {
                assert_eq!(got[word], value, "{name}: word {word}");
            }
        });
        let mutant = body.replace(edit.0, edit.1);
        let (ptx, broken) = (kernel(SHARED, &mutant), parse(&mutant));
        for_each_seed(broken_seeds(), |seed| {
            let fault = *run(&broken, shape, seed, Some(races())).expect_err(name);
            assert_race(name, &fault, between, missing);
            // The numbers of the lines are those of the text.
            let FaultKind::Race(race) = &fault.kind else { return };
            for (number, text) in
                [(fault.ptx_line, &fault.ptx_text), (race.other.ptx_line, &race.other.ptx_text)]
            {
                let line = ptx.lines().nth(number - 1).unwrap();
                assert_eq!(line.trim(), text.trim(), "{name}: line {number}: {fault}");
            }
        });
    }
}

fn check_all(cases: &[Case]) {
    cases.iter().for_each(Case::check);
}

/// Block 0 tells block 1 by a flag that it has written a word.
const MESSAGE: &str = "
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READER;
    mov.u64 %rd1, 7;
    mov.u32 %r2, 1;
    st.global.u64 [%rd40], %rd1;
    st.release.gpu.global.u32 [%rd40+8], %r2;
    ret;
READER:
    ld.acquire.gpu.global.u32 %r3, [%rd40+8];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra READER;
    ld.global.u64 %rd2, [%rd40];
    st.global.u64 [%rd40+16], %rd2;";

/// The same with fences around relaxed accesses.
const FENCED_MESSAGE: &str = "
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READER;
    mov.u64 %rd1, 7;
    mov.u32 %r2, 1;
    st.global.u64 [%rd40], %rd1;
    fence.acq_rel.gpu; // of the writer
    st.relaxed.gpu.global.u32 [%rd40+8], %r2;
    ret;
READER:
    ld.relaxed.gpu.global.u32 %r3, [%rd40+8];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra READER;
    fence.acq_rel.gpu; // of the reader
    ld.global.u64 %rd2, [%rd40];
    st.global.u64 [%rd40+16], %rd2;";

const MESSAGE_DATA: [&str; 2] = ["st.global.u64 [%rd40],", "ld.global.u64 %rd2,"];

/// A message, broken in one way.
const fn message(name: &'static str, body: &'static str, from: &'static str, to: &'static str) -> Case {
    Case {
        name,
        shape: (2, 1),
        body,
        edit: (from, to),
        between: MESSAGE_DATA,
        missing: "release and acquire of scope .gpu or wider",
        result: &[(2, 7)],
    }
}

#[test]
fn a_message_needs_release_and_acquire_that_reach_each_other() {
    check_all(&[
        message("release made relaxed", MESSAGE, "st.release.gpu", "st.relaxed.gpu"),
        message("acquire made relaxed", MESSAGE, "ld.acquire.gpu", "ld.relaxed.gpu"),
        message("no fence of the writer", FENCED_MESSAGE, "fence.acq_rel.gpu; // of the writer", ""),
        message("no fence of the reader", FENCED_MESSAGE, "fence.acq_rel.gpu; // of the reader", ""),
        message(
            "a fence that is too narrow",
            FENCED_MESSAGE,
            "fence.acq_rel.gpu; // of the writer",
            "fence.acq_rel.cta;",
        ),
        Case {
            between: ["st.release.cta", "ld.acquire.gpu"],
            missing: "a scope does not reach the other thread: .gpu or wider",
            ..message("a release of scope .cta to another block", MESSAGE, "st.release.gpu", "st.release.cta")
        },
        Case {
            between: ["st.release.gpu", "ld.acquire.cta"],
            missing: "a scope does not reach the other thread: .gpu or wider",
            ..message(
                "an acquire of scope .cta from another block",
                MESSAGE,
                "ld.acquire.gpu",
                "ld.acquire.cta",
            )
        },
        Case {
            between: ["st.global.u32 [%rd40+8]", "ld.acquire.gpu"],
            ..message("a weak flag", MESSAGE, "st.release.gpu.global.u32", "st.global.u32")
        },
    ]);
}

#[test]
fn lanes_and_warps_need_barriers() {
    // The exchanged words have been written once before, so that the read is no read of garbage.
    let exchange = "
    mov.u32 %r1, DATA;
    mov.u32 %r6, 0;
    mad.lo.u32 %r2, %r40, 4, %r1;
    st.shared.u32 [%r2], %r6;
    bar.sync 0;
    st.shared.u32 [%r2], %r40;
    bar.warp.sync -1;
    xor.b32 %r3, %r40, 1;
    mad.lo.u32 %r4, %r3, 4, %r1;
    ld.shared.u32 %r5, [%r4];
    cvt.u64.u32 %rd1, %r5;
    st.global.u64 [%rd42], %rd1;";
    let between_warps = "
    mov.u32 %r1, DATA;
    mov.u32 %r6, 0;
    mad.lo.u32 %r2, %r40, 4, %r1;
    st.shared.u32 [%r2], %r6;
    bar.sync 1;
    st.shared.u32 [%r2], %r40;
    bar.sync 0;
    xor.b32 %r3, %r40, 32;
    mad.lo.u32 %r4, %r3, 4, %r1;
    ld.shared.u32 %r5, [%r4];
    cvt.u64.u32 %rd1, %r5;
    st.global.u64 [%rd42], %rd1;";
    let warps = Case {
        name: "block barrier dropped",
        shape: (1, 64),
        body: between_warps,
        edit: ("bar.sync 0;", ""),
        between: ["st.shared.u32 [%r2], %r40", "ld.shared"],
        missing: "a barrier",
        result: &[(0, 32), (63, 31)],
    };
    check_all(&[
        Case {
            name: "bar.warp.sync dropped",
            shape: (1, 32),
            body: exchange,
            edit: ("bar.warp.sync -1;", ""),
            missing: "bar.warp.sync between the lanes",
            result: &[(0, 1), (31, 30)],
            ..warps
        },
        Case { name: "a barrier of each warp alone", edit: ("bar.sync 0;", "bar.warp.sync -1;"), ..warps },
    ]);
}

/// Every thread adds 1 to an element of 2 bytes, in place.
const IN_PLACE: &str = "
    mul.wide.u32 %rd1, %r40, 2;
    add.s64 %rd2, %rd40, %rd1;
    ld.global.u16 %h1, [%rd2];
    add.u16 %h1, %h1, 1;
    st.global.u16 [%rd2], %h1;";

/// Two blocks write neighbouring bytes of a word, a third reads an unwritten one.
const NEIGHBOURS: &str = "
    mov.u32 %r1, %ctaid.x;
    mov.u16 %h1, 7;
    setp.eq.u32 %p1, %r1, 2;
    @%p1 bra READER;
    cvt.u64.u32 %rd1, %r1;
    add.s64 %rd2, %rd40, %rd1;
    st.global.u8 [%rd2], %h1;
    ret;
READER:
    ld.global.u8 %h2, [%rd40+2];";

/// A byte of a word is published, while its neighbour is written by another block.
const BYTE_MESSAGE: &str = "
    mov.u32 %r1, %ctaid.x;
    mov.u16 %h1, 7;
    setp.eq.u32 %p1, %r1, 1;
    @%p1 bra READER;
    setp.eq.u32 %p2, %r1, 2;
    @%p2 bra NEIGHBOUR;
    mov.u32 %r2, 1;
    st.global.u8 [%rd40], %h1;
    st.release.gpu.global.u32 [%rd40+8], %r2;
    ret;
NEIGHBOUR:
    st.global.u8 [%rd40+1], %h1;
    ret;
READER:
    ld.acquire.gpu.global.u32 %r3, [%rd40+8];
    setp.eq.u32 %p3, %r3, 0;
    @%p3 bra READER;
    ld.global.u8 %h2, [%rd40];
    cvt.u64.u16 %rd2, %h2;
    st.global.u64 [%rd40+16], %rd2;";

#[test]
fn each_byte_of_a_word_has_its_own_history() {
    let in_place = Case {
        name: "an element of 2 bytes that another lane changes",
        shape: (1, 64),
        body: IN_PLACE,
        edit: ("st.global.u16 [%rd2]", "st.global.u16 [%rd2+2]"),
        between: ["ld.global.u16", "st.global.u16"],
        missing: "bar.warp.sync between the lanes",
        // Words 0 and 1 held 0 and 1 << 32.
        result: &[(0, 0x1_0001_0001_0001), (1, 0x1_0002_0001_0001)],
    };
    let neighbours = Case {
        name: "a byte whose neighbour is written after it",
        shape: (3, 1),
        body: NEIGHBOURS,
        edit: ("ld.global.u8 %h2, [%rd40+2]", "ld.global.u8 %h2, [%rd40]"),
        between: ["st.global.u8 [%rd2]", "ld.global.u8"],
        missing: "release and acquire of scope .gpu or wider",
        result: &[(0, 0x0707)],
    };
    check_all(&[
        in_place,
        neighbours,
        Case {
            name: "an element of 1 byte that another lane changes",
            shape: (1, 32),
            body: "
    cvt.u64.u32 %rd1, %r40;
    add.s64 %rd2, %rd40, %rd1;
    ld.global.u8 %h1, [%rd2];
    add.u16 %h1, %h1, 1;
    st.global.u8 [%rd2], %h1;",
            edit: ("st.global.u8 [%rd2]", "st.global.u8 [%rd2+1]"),
            between: ["ld.global.u8", "st.global.u8"],
            result: &[(0, 0x0101_0101_0101_0101)],
            ..in_place
        },
        Case {
            name: "a half whose neighbour is written after it",
            body: "
    mov.u32 %r1, %ctaid.x;
    mov.u16 %h1, 7;
    setp.eq.u32 %p1, %r1, 2;
    @%p1 bra READER;
    mul.wide.u32 %rd1, %r1, 2;
    add.s64 %rd2, %rd40, %rd1;
    st.global.u16 [%rd2], %h1;
    ret;
READER:
    ld.global.u8 %h2, [%rd40+4];",
            edit: ("ld.global.u8 %h2, [%rd40+4]", "ld.global.u8 %h2, [%rd40+1]"),
            between: ["st.global.u16 [%rd2]", "ld.global.u8"],
            result: &[(0, 0x7_0007)],
            ..neighbours
        },
        Case {
            name: "a published byte",
            body: BYTE_MESSAGE,
            edit: ("st.release.gpu", "st.relaxed.gpu"),
            between: ["st.global.u8 [%rd40],", "ld.global.u8"],
            result: &[(0, 0x0707), (2, 7)],
            ..neighbours
        },
    ]);
}

/// A word that was written by halves and is then read and written whole has one history again.
#[test]
fn a_word_written_by_halves_is_read_whole() {
    let message = "
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READER;
    mov.u16 %h1, 7;
    mov.u32 %r2, 1;
    st.global.u16 [%rd40], %h1;
    st.global.u16 [%rd40+2], %h1;
    st.release.gpu.global.u32 [%rd40+8], %r2;
    ret;
READER:
    ld.acquire.gpu.global.u32 %r3, [%rd40+8];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra READER;
    ld.global.u32 %r4, [%rd40];
    add.u32 %r4, %r4, 1;
    st.global.u32 [%rd40], %r4;";
    check_all(&[Case {
        name: "halves behind a weak flag",
        shape: (2, 1),
        body: message,
        edit: ("st.release.gpu", "st.relaxed.gpu"),
        between: ["st.global.u16 [%rd40", "ld.global.u32"],
        missing: "release and acquire of scope .gpu or wider",
        result: &[(0, 0x7_0008)],
    }]);
}

/// One thread writes 16 bytes of shared memory and stores them by a bulk copy.
const BULK_STORE: &str = "
    mov.u32 %r1, DATA;
    mov.u64 %rd1, 7;
    st.shared.u64 [%r1], %rd1;
    st.shared.u64 [%r1+8], %rd1;
    fence.proxy.async.shared::cta;
    cp.async.bulk.global.shared::cta.bulk_group [%rd40], [%r1], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    ld.global.u64 %rd2, [%rd40];
    st.global.u64 [%rd40+16], %rd2;";

/// One thread loads what it wrote to global memory by a bulk copy.
const BULK_LOAD: &str = "
    mov.u32 %r1, DATA;
    mov.u32 %r2, MBAR;
    mbarrier.init.shared.b64 [%r2], 1;
    fence.proxy.async.shared::cta;
    mov.u64 %rd1, 7;
    st.global.u64 [%rd40], %rd1;
    fence.proxy.async.global;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd40], 16, [%r2];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0;
    @!%p1 bra WAIT;
    ld.shared.u64 %rd2, [%r1];
    st.global.u64 [%rd40+16], %rd2;";

const STORE: &str = "cp.async.bulk.global.shared::cta";
const LOAD: &str = "cp.async.bulk.shared::cluster.global";

#[test]
fn bulk_copies_need_proxy_fences_and_waits() {
    let store = Case {
        name: "proxy fence dropped before a bulk store",
        shape: (1, 1),
        body: BULK_STORE,
        edit: ("fence.proxy.async.shared::cta;", ""),
        between: ["st.shared.u64 [%r1]", STORE],
        missing: "a fence.proxy.async",
        result: &[(0, 7), (2, 7)],
    };
    let load = Case {
        name: "proxy fence dropped before a bulk load",
        body: BULK_LOAD,
        edit: ("fence.proxy.async.global;", ""),
        between: ["st.global.u64 [%rd40],", LOAD],
        result: &[(2, 7)],
        ..store
    };
    let landed = Case {
        name: "destination of a bulk store read after wait_group.read only",
        edit: ("wait_group 0", "wait_group.read 0"),
        between: [STORE, "ld.global.u64 %rd2"],
        missing: "wait_group (without .read)",
        ..store
    };
    check_all(&[
        store,
        Case {
            name: "proxy fence of global memory only",
            edit: ("async.shared::cta;", "async.global;"),
            ..store
        },
        load,
        Case {
            name: "proxy fence of shared memory only",
            edit: ("fence.proxy.async.global;", "fence.proxy.async.shared::cta;"),
            ..load
        },
        landed,
        Case {
            name: "source of a bulk store overwritten before it was read",
            body: SOURCE_REUSED,
            edit: ("cp.async.bulk.wait_group.read 0;", ""),
            between: [STORE, "st.shared.u64 [%r1], %rd3"],
            missing: "wait_group.read",
            result: &[(0, 7)],
            ..store
        },
        Case {
            name: "destination of a bulk load read before its mbarrier",
            edit: ("@!%p1 bra WAIT;", ""),
            between: [LOAD, "ld.shared.u64 %rd2"],
            missing: "its mbarrier's phase",
            ..load
        },
    ]);
}

const SOURCE_REUSED: &str = "
    mov.u32 %r1, DATA;
    mov.u64 %rd1, 7;
    mov.u64 %rd3, 9;
    st.shared.u64 [%r1], %rd1;
    st.shared.u64 [%r1+8], %rd1;
    fence.proxy.async.shared::cta;
    cp.async.bulk.global.shared::cta.bulk_group [%rd40], [%r1], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    st.shared.u64 [%r1], %rd3;
    cp.async.bulk.wait_group 0;";

#[test]
fn a_release_covers_a_bulk_store_only_once_it_has_landed() {
    check_all(&[Case {
        name: "released after wait_group.read only",
        shape: (2, 1),
        body: "
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READER;
    mov.u32 %r2, DATA;
    mov.u64 %rd1, 7;
    st.shared.u64 [%r2], %rd1;
    st.shared.u64 [%r2+8], %rd1;
    fence.proxy.async.shared::cta;
    cp.async.bulk.global.shared::cta.bulk_group [%rd40], [%r2], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    mov.u32 %r3, 1;
    st.release.gpu.global.u32 [%rd40+16], %r3;
    ret;
READER:
    ld.acquire.gpu.global.u32 %r3, [%rd40+16];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra READER;
    ld.global.u64 %rd2, [%rd40];
    st.global.u64 [%rd40+24], %rd2;",
        edit: ("wait_group 0", "wait_group.read 0"),
        between: [STORE, "ld.global.u64 %rd2"],
        missing: "wait_group (without .read)",
        result: &[(0, 7), (3, 7)],
    }]);
}

#[test]
fn read_modify_writes_carry_a_release_on_and_other_writes_end_it() {
    check_all(&[
        Case {
            name: "a strong write between release and acquire",
            shape: (3, 1),
            body: "
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, 1;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra WRITER;
    setp.eq.u32 %p1, %r1, 1;
    @%p1 bra MIDDLE;
READER:
    ld.relaxed.gpu.global.u32 %r3, [%rd40+8];
    setp.ne.u32 %p2, %r3, 2;
    @%p2 bra READER;
    ld.acquire.gpu.global.u32 %r3, [%rd40+8];
    ld.global.u64 %rd2, [%rd40];
    st.global.u64 [%rd40+16], %rd2;
    ret;
WRITER:
    mov.u64 %rd1, 7;
    st.global.u64 [%rd40], %rd1;
    red.release.gpu.global.add.u32 [%rd40+8], %r2;
    ret;
MIDDLE:
    ld.relaxed.gpu.global.u32 %r3, [%rd40+8];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra MIDDLE;
    mov.u32 %r4, 2;
    atom.relaxed.gpu.global.add.u32 %r5, [%rd40+8], %r2;",
            edit: (
                "atom.relaxed.gpu.global.add.u32 %r5, [%rd40+8], %r2;",
                "st.relaxed.gpu.global.u32 [%rd40+8], %r4;",
            ),
            between: MESSAGE_DATA,
            missing: "release and acquire of scope .gpu or wider",
            result: &[(2, 7)],
        },
        Case {
            name: "red does not begin an acquire pattern",
            shape: (2, 1),
            body: "
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, 1;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READER;
    mov.u64 %rd1, 7;
    st.global.u64 [%rd40], %rd1;
    st.release.gpu.global.u32 [%rd40+8], %r2;
    st.relaxed.gpu.global.u32 [%rd40+16], %r2;
    ret;
READER:
    ld.relaxed.gpu.global.u32 %r3, [%rd40+16];
    setp.ne.u32 %p2, %r3, 1;
    @%p2 bra READER;
    atom.relaxed.gpu.global.add.u32 %r5, [%rd40+8], %r2;
    fence.acq_rel.gpu;
    ld.global.u64 %rd2, [%rd40];
    st.global.u64 [%rd40+24], %rd2;",
            edit: ("atom.relaxed.gpu.global.add.u32 %r5, ", "red.relaxed.gpu.global.add.u32 "),
            between: MESSAGE_DATA,
            missing: "release and acquire of scope .gpu or wider",
            result: &[(3, 7)],
        },
    ]);
}

/// A launch of `k` as work of a stream, after `past`.
fn start_in(
    checker: &Checker,
    module: &Module,
    memory: &Memory,
    buf: &Region,
    past: &Past,
    seed: u64,
) -> Grid {
    let kernel = module.kernel("k").unwrap();
    let order = Some((checker.timeline(), past));
    let params = buf.addr().to_ne_bytes();
    Grid::launch(kernel, memory.clone(), &device(seed), launch(1, 1), &params, order).unwrap()
}

/// Adds 1 to the first word, in the plainest way.
const INCREMENT: &str = "ld.global.u64 %rd1, [%rd40]; add.u64 %rd1, %rd1, 1; st.global.u64 [%rd40], %rd1;";

#[test]
fn the_end_of_a_kernel_orders_what_is_launched_after_it() {
    let module = parse(INCREMENT);
    for_each_seed(correct_seeds(), |seed| {
        let memory = Memory::checked(seed, Some(races()));
        let buf = numbered(&memory);
        for _ in 0..3 {
            finish(&mut [&mut start(&module, &memory, &buf, launch(1, 1), seed)], seed).unwrap();
        }
        assert_eq!(words(&memory, &buf).unwrap()[0], 3);
    });
}

#[test]
fn kernels_of_two_streams_race_without_an_event() {
    let module = parse(INCREMENT);
    for_each_seed(correct_seeds(), |seed| {
        for event in [true, false] {
            let checker = races();
            let memory = Memory::checked(seed, Some(checker.clone()));
            let buf = numbered(&memory);
            let before = checker.host_past();
            let mut first = start_in(&checker, &module, &memory, &buf, &before, seed);
            finish(&mut [&mut first], seed).unwrap();
            // It has run after the other one, but nothing says that it had to.
            let past = if event { first.past() } else { before };
            let mut second = start_in(&checker, &module, &memory, &buf, &past, seed);
            let result = finish(&mut [&mut second], seed);
            if event {
                result.unwrap();
                checker.host_waited(&second.past());
                assert_eq!(words(&memory, &buf).unwrap()[0], 2);
            } else {
                let fault = result.unwrap_err();
                assert_race("no event", &fault, ["st.global.u64", "ld.global.u64"], "kernel boundary");
            }
        }
    });
}

#[test]
fn the_host_must_wait_for_the_stream_that_wrote() {
    let module = parse(INCREMENT);
    let checker = races();
    let memory = Memory::checked(0, Some(checker.clone()));
    let buf = numbered(&memory);
    let mut grid = start_in(&checker, &module, &memory, &buf, &checker.host_past(), 0);
    finish(&mut [&mut grid], 0).unwrap();
    let error = words(&memory, &buf).unwrap_err().to_string();
    assert!(error.contains("a read by the host") && error.contains("st.global.u64"), "{error}");
    checker.host_waited(&grid.past());
    assert_eq!(words(&memory, &buf).unwrap()[0], 1);
}

/// Runs a writer on one device and a reader on another over a buffer of the first.
fn between_devices(writer: &Module, reader: &Module, seed: u64) -> Result<Vec<u64>, Box<Fault>> {
    let checker = races();
    let [a, b] = [seed, seed + 1].map(|seed| Memory::checked(seed, Some(checker.clone())));
    let buf = numbered(&a);
    let near = b.import(buf.export().unwrap(), buf.bytes(), "buf").unwrap();
    let mut w = start(writer, &a, &buf, launch(1, 1), seed);
    let mut r = start(reader, &b, &near, launch(1, 1), seed);
    finish(&mut [&mut w, &mut r], seed)?;
    Ok(words(&a, &buf).unwrap())
}

#[test]
fn messages_between_devices_need_scope_sys() {
    let writer = "
    mov.u64 %rd1, 7;
    mov.u32 %r2, 1;
    st.global.u64 [%rd40], %rd1;
    st.release.sys.global.u32 [%rd40+8], %r2;";
    let reader = "
READER:
    ld.acquire.sys.global.u32 %r3, [%rd40+8];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra READER;
    ld.global.u64 %rd2, [%rd40];
    st.global.u64 [%rd40+16], %rd2;";
    let [wide_writer, wide_reader] = [writer, reader].map(parse);
    let [gpu_writer, gpu_reader] = [writer, reader].map(|body| parse(&body.replace(".sys", ".gpu")));
    for_each_seed(correct_seeds(), |seed| {
        assert_eq!(between_devices(&wide_writer, &wide_reader, seed).unwrap()[2], 7);
        if seed < broken_seeds() {
            for (name, w, r) in [
                ("release of scope .gpu", &gpu_writer, &wide_reader),
                ("acquire of scope .gpu", &wide_writer, &gpu_reader),
            ] {
                let fault = between_devices(w, r, seed).expect_err(name);
                assert_race(
                    name,
                    &fault,
                    ["st.release", "ld.acquire"],
                    "does not reach the other thread: .sys",
                );
            }
        }
    });
}

/// Runs a kernel that answers the host in mapped memory, whose words the host polls and then reads;
/// or reads as early as after `steps` instructions, if it does not poll.
fn answers_the_host(body: &str, seed: u64, polls: bool, steps: u64) -> Result<u64, String> {
    let module = parse(body);
    let checker = races();
    let memory = Memory::checked(seed, Some(checker.clone()));
    let buf = memory.alloc_host(64, "answers").unwrap();
    buf.watch();
    buf.name_parts(|at| (at < 16).then(|| ["count", "tag"][at as usize / 8].to_owned()));
    let mut grid = start_in(&checker, &module, &memory, &buf, &checker.host_past(), seed);
    grid.step(steps).map_err(|fault| fault.to_string())?;
    while polls && memory.load_acquire(buf.addr() + 8).map_err(|error| error.to_string())? == 0 {
        grid.step(1).map_err(|fault| fault.to_string())?;
    }
    memory.host_reads(buf.addr(), 16).map_err(|error| error.to_string())?;
    // SAFETY: aligned, and mapped for as long as `buf` lives.
    let count = unsafe { (buf.addr() as *const u64).read_volatile() };
    finish(&mut [&mut grid], seed).map_err(|fault| fault.to_string())?;
    Ok(count)
}

#[test]
fn the_host_reads_what_was_released_to_it() {
    let body = "
    mov.u64 %rd1, 7;
    st.global.u64 [%rd40], %rd1;
    st.release.sys.global.u64 [%rd40+8], %rd1;";
    for_each_seed(correct_seeds(), |seed| {
        assert_eq!(answers_the_host(body, seed, true, 0).unwrap(), 7);
        if seed >= broken_seeds() {
            return;
        }
        let relaxed = body.replace("st.release", "st.relaxed");
        let error = answers_the_host(&relaxed, seed, true, 0).unwrap_err();
        assert!(error.contains("at 'answers' + 0x0 (count): a read by the host"), "{error}");
        let narrow = body.replace(".sys", ".gpu");
        let error = answers_the_host(&narrow, seed, true, 0).unwrap_err();
        assert!(error.contains("at 'answers' + 0x8 (tag)"), "{error}");
        // Published before its data: the host reads before the data are there, or behind a write
        // that it does not know.
        let early = "
    mov.u64 %rd1, 7;
    st.release.sys.global.u64 [%rd40+8], %rd1;
    st.global.u64 [%rd40], %rd1;";
        for steps in [0, 100] {
            let error = answers_the_host(early, seed, true, steps).unwrap_err();
            assert!(error.contains("at 'answers' + 0x0 (count)"), "{error}");
        }
        // A host that reads without a look at the word that is released races as well.
        for steps in [0, 100] {
            assert!(answers_the_host(body, seed, false, steps).unwrap_err().contains("data race"));
        }
    });
}

/// Memory that host code writes as well is not watched; but what host code says that it takes must
/// have been released to it.
#[test]
fn the_host_takes_what_was_released_to_it() {
    let body = "
    mov.u64 %rd1, 7;
    st.global.u64 [%rd40], %rd1;
    st.release.sys.global.u64 [%rd40+8], %rd1;";
    let takes = |body: &str, seed: u64, polls: bool| -> Result<(), String> {
        let module = parse(body);
        let checker = races();
        let memory = Memory::checked(seed, Some(checker.clone()));
        let buf = memory.alloc_host(64, "request").unwrap();
        // No checker sees this store, and it is no kernel's.
        // SAFETY: aligned, and mapped for as long as `buf` lives.
        unsafe { (buf.addr() as *mut u64).add(2).write_volatile(1) };
        let mut grid = start_in(&checker, &module, &memory, &buf, &checker.host_past(), seed);
        finish(&mut [&mut grid], seed).map_err(|fault| fault.to_string())?;
        let error = |error: epoxide_vgpu::MemoryError| error.to_string();
        if polls {
            assert_eq!(memory.load_acquire(buf.addr() + 8).map_err(error)?, 7);
        }
        memory.host_reads(buf.addr() + 16, 48).map_err(error)?;
        memory.host_reads(buf.addr(), 8).map_err(error)
    };
    for_each_seed(correct_seeds(), |seed| {
        takes(body, seed, true).unwrap();
        let early = "
    mov.u64 %rd1, 7;
    st.release.sys.global.u64 [%rd40+8], %rd1;
    st.global.u64 [%rd40], %rd1;";
        let unheard = takes(body, seed, false);
        let others = [body.replace("st.release", "st.relaxed"), body.replace(".sys", ".gpu"), early.into()];
        for wrong in others.iter().map(|body| takes(body, seed, true)).chain([unheard]) {
            let error = wrong.unwrap_err();
            assert!(error.contains("at 'request' + 0x0: a read by the host"), "{error}");
        }
    });
}

#[test]
fn a_race_names_the_part_on_every_device_that_maps_it() {
    let checker = races();
    let [a, b] = [0, 1].map(|seed| Memory::checked(seed, Some(checker.clone())));
    let buf = numbered(&a);
    buf.name_parts(|at| (at < 64).then(|| format!("ready[{}]", at / 8)));
    let near = b.import(buf.export().unwrap(), buf.bytes(), "buf of rank 0").unwrap();
    let module = parse("st.global.u64 [%rd40+24], %rd40;");
    let before = checker.host_past();
    finish(&mut [&mut start_in(&checker, &module, &a, &buf, &before, 0)], 0).unwrap();
    // The address that it writes is another one there.
    let mut second = start_in(&checker, &module, &b, &near, &before, 0);
    let fault = finish(&mut [&mut second], 0).unwrap_err().to_string();
    assert!(fault.contains("global memory at 'buf of rank 0' + 0x18 (ready[3]): a weak write"), "{fault}");
}

/// Runs a body of one block under check; the fault.
fn fault_of(body: &str, threads: u32, config: CheckConfig) -> Fault {
    *run(&parse(body), launch(1, threads), 0, Some(Checker::new(config))).expect_err(body)
}

fn clean(body: &str, shape: (u32, u32), config: CheckConfig) {
    let module = parse(body);
    for_each_seed(correct_seeds(), |seed| {
        run(&module, launch(shape.0, shape.1), seed, Some(Checker::new(config)))
            .unwrap_or_else(|f| panic!("{f}\n{body}"));
    });
}

#[test]
fn reads_of_unwritten_memory_are_reported() {
    let fault = fault_of("mov.u32 %r1, DATA; ld.shared.u32 %r2, [%r1+4];", 1, CheckConfig::default());
    assert!(
        matches!(fault.kind, FaultKind::Unwritten { space: "shared", offset, .. } if offset % 128 == 4),
        "{fault}"
    );
    let module = parse("ld.global.u64 %rd1, [%rd40+40];");
    let memory = Memory::checked(0, Some(races()));
    let reads = |buf: &Region| {
        finish(&mut [&mut start(&module, &memory, buf, launch(1, 1), 0)], 0)
            .map_err(|fault| fault.to_string())
    };
    let fresh = memory.alloc(64, "fresh").unwrap();
    fresh.name_parts(|at| Some(format!("word[{}]", at / 8)));
    let garbage = reads(&fresh).unwrap_err();
    assert!(garbage.contains("unwritten global memory, at 'fresh' + 0x28 (word[5])"), "{garbage}");
    reads(&memory.alloc_zeroed(64, "zeroed").unwrap()).unwrap();
    reads(&memory.alloc_host(64, "host").unwrap()).unwrap();
    // A bulk copy reads its source too.
    let fault = fault_of(&BULK_STORE.replace("st.shared.u64 [%r1+8], %rd1;", ""), 1, CheckConfig::default());
    assert!(matches!(fault.kind, FaultKind::Unwritten { space: "shared", .. }), "{fault}");
}

#[test]
fn renewed_memory_is_garbage_with_no_past() {
    let checker = races();
    let memory = Memory::checked(0, Some(checker.clone()));
    let buf = numbered(&memory);
    let [reader, writer] = ["ld.global.u64 %rd1, [%rd40];", "st.global.u64 [%rd40], %rd40;"].map(parse);
    let before = checker.host_past();
    let run = |module| finish(&mut [&mut start_in(&checker, module, &memory, &buf, &before, 0)], 0);
    run(&reader).unwrap();
    buf.renew(0, 16);
    let fault = run(&reader).unwrap_err();
    assert!(matches!(fault.kind, FaultKind::Unwritten { offset: 0, .. }), "{fault}");
    // Its next owner does not race with earlier users, and bytes that it did not renew are
    // unchanged.
    run(&writer).unwrap();
    assert!(matches!(run(&reader).unwrap_err().kind, FaultKind::Race(_)));
}

#[test]
fn weak_writes_race_only_where_values_differ_and_bytes_meet() {
    let all = CheckConfig::default();
    clean("mov.u64 %rd1, 5; st.global.u64 [%rd40], %rd1;", (2, 64), all);
    clean("cvt.u64.u32 %rd1, %r40; add.u64 %rd1, %rd1, %rd40; st.global.u8 [%rd1], %r40;", (1, 64), all);
    let fault = fault_of("cvt.u64.u32 %rd1, %r40; st.global.u64 [%rd40], %rd1;", 32, all);
    let same = "st.global.u64 [%rd40], %rd1";
    assert_race("values differ", &fault, [same, same], "bar.warp.sync");
    let fault = fault_of(
        "shr.u32 %r1, %r40, 1; cvt.u64.u32 %rd1, %r1; add.u64 %rd1, %rd1, %rd40; st.global.u8 [%rd1], %r40;",
        32,
        all,
    );
    assert_race("bytes meet", &fault, ["st.global.u8", "st.global.u8"], "bar.warp.sync");
}

/// A kernel body broken in fast mode shows a wrong result, or a fault, for some seeds of `n`; these
/// are counted.
fn wrong_without_checks(body: &str, threads: u32, n: u64, right: impl Fn(&[u64]) -> bool) -> usize {
    let module = parse(body);
    (0..n).filter(|&seed| !run(&module, launch(1, threads), seed, None).is_ok_and(|got| right(&got))).count()
}

#[test]
fn a_block_must_not_end_before_its_bulk_copies() {
    let unread = BULK_STORE
        .replace("cp.async.bulk.wait_group 0;\n    ld.global.u64 %rd2, [%rd40];", "mov.u64 %rd2, 0;");
    let under_way = BULK_LOAD.replace("@!%p1 bra WAIT;\n    ld.shared.u64 %rd2, [%r1];", "mov.u64 %rd2, 0;");
    for (body, what) in
        [(unread, "a bulk store may still read its source"), (under_way, "a bulk load is under way")]
    {
        let module = parse(&body);
        for checker in [None, Some(races())] {
            let mut caught = 0;
            for_each_seed(correct_seeds(), |seed| {
                // The fault is there whenever the hardware may be late. A seed may let the copy be
                // in time.
                if let Err(fault) = run(&module, launch(1, 1), seed, checker.as_ref().map(|_| races())) {
                    let FaultKind::BulkCopy { message } = &fault.kind else { panic!("{fault}") };
                    assert!(message.contains(what), "{fault}");
                    assert!(fault.ptx_text.contains("cp.async.bulk"), "{fault}");
                    caught += 1;
                }
            });
            assert!(
                caught > correct_seeds() / 2 || replaying(),
                "{what}: {caught} of {} seeds",
                correct_seeds()
            );
        }
    }
    clean(
        &BULK_STORE.replace(
            "wait_group 0;\n    ld.global.u64 %rd2, [%rd40];",
            "wait_group.read 0;\n    mov.u64 %rd2, 0;",
        ),
        (1, 1),
        CheckConfig::default(),
    );
}

#[test]
fn lanes_that_diverged_need_not_meet_before_a_sync() {
    // Lane 0 writes, and the others read what stood there before they have been told to wait for
    // it.
    let body = "
    mov.u32 %r1, DATA;
    mov.u32 %r2, 0;
    st.shared.u32 [%r1], %r2;
    bar.sync 0;
    setp.ne.u32 %p1, %r40, 0;
    @%p1 bra JOIN;
    mov.u32 %r3, 7;
    st.shared.u32 [%r1], %r3;
JOIN:
    bar.warp.sync -1;
    ld.shared.u32 %r4, [%r1];
    cvt.u64.u32 %rd1, %r4;
    st.global.u64 [%rd42], %rd1;";
    let right = |got: &[u64]| got[..32].iter().all(|&v| v == 7);
    assert_eq!(wrong_without_checks(body, 32, correct_seeds(), right), 0);
    let broken = body.replace("bar.warp.sync -1;", "");
    let wrong = wrong_without_checks(&broken, 32, correct_seeds(), right);
    assert!(wrong > 0, "it never shows");
    check_all(&[Case {
        name: "implicit reconvergence",
        shape: (1, 32),
        body,
        edit: ("bar.warp.sync -1;", ""),
        between: ["st.shared.u32 [%r1], %r3", "ld.shared.u32 %r4"],
        missing: "bar.warp.sync between the lanes",
        result: &[(0, 7), (31, 7)],
    }]);
}

#[test]
fn unwritten_memory_is_poison_that_depends_on_the_seed() {
    let module = parse(
        "
    st.global.u64 [%rd42], %rd5;
    mov.u32 %r1, DATA;
    ld.shared.u64 %rd1, [%r1];
    st.global.u64 [%rd42+64], %rd1;
    ld.global.u64 %rd2, [%rd42+128];
    st.global.u64 [%rd42+128], %rd2;",
    );
    let [one, same, other] = [1, 1, 2].map(|seed| {
        let memory = Memory::checked(seed, None);
        let buf = memory.alloc(WORDS as u64 * 8, "fresh").unwrap();
        finish(&mut [&mut start(&module, &memory, &buf, launch(1, 1), 0)], 0).unwrap();
        let got = words(&memory, &buf).unwrap();
        [got[0], got[8], got[16]]
    });
    assert_eq!(one, same);
    for (a, b) in one.iter().zip(&other) {
        assert_ne!(a, b, "the seed draws the poison");
        // As an integer it is far below zero, as a float as well, in both halves: nothing that
        // passes for a result.
        for value in [a, b] {
            assert!(value >> 60 == 15 && value >> 28 & 15 == 15, "{value:#x}");
        }
    }
}

#[test]
fn shuffles_from_lanes_that_take_no_part_give_poison() {
    // Lanes 0 to 15 shuffle among themselves, but take from 16 lanes above.
    let body = "
    setp.gt.u32 %p1, %r40, 15;
    @%p1 bra END;
    add.u32 %r1, %r40, 16;
    shfl.sync.idx.b32 %r2|%p2, %r40, %r1, 31, 65535;
    cvt.u64.u32 %rd1, %r2;
    st.global.u64 [%rd42], %rd1;
END:";
    let module = parse(body);
    let got = [1, 2].map(|seed| run(&module, launch(1, 32), seed, Some(races())).unwrap()[0]);
    assert!(got[0] >= 0xf000_0000 && got[1] >= 0xf000_0000 && got[0] != got[1], "{got:x?}");
}

#[test]
fn collectives_name_only_lanes_that_are_there() {
    for (op, threads) in [
        ("shfl.sync.down.b32 %r2|%p2, %r40, 1, 31, -1;", 32),
        ("vote.sync.any.pred %p2, %p1, -1;", 32),
        ("vote.sync.ballot.b32 %r2, %p1, -1;", 32),
        ("match.any.sync.b32 %r2, %r40, -1;", 32),
        ("redux.sync.add.s32 %r2, %r40, -1;", 32),
        ("elect.sync %r2|%p2, -1;", 32),
        // The last warp of a block of 40 threads has 8 lanes.
        ("redux.sync.add.s32 %r2, %r40, -1;", 40),
    ] {
        let exits = if threads == 32 {
            "setp.gt.u32 %p1, %r40, 19; @%p1 exit;"
        } else {
            "setp.gt.u32 %p1, %r40, 99;"
        };
        let (broken, absent) =
            (format!("{exits} {op}"), if threads == 32 { 0xfff0_0000 } else { 0xffff_ff00u32 });
        let module = parse(&broken);
        for_each_seed(broken_seeds(), |seed| {
            let fault = run(&module, launch(1, threads), seed, Some(races())).expect_err(op);
            assert!(
                matches!(fault.kind, FaultKind::AbsentMembers { mask: u32::MAX, absent: a } if a == absent),
                "{op}: {fault}"
            );
            assert!(fault.to_string().contains("which have exited or never were"), "{fault}");
        });
        // Faster runs let it pass, as the hardware mostly does, and a mask of those who are there
        // is right.
        run(&module, launch(1, threads), 0, None).unwrap();
        if threads == 32 {
            clean(&broken.replace("-1;", "1048575;"), (1, threads), CheckConfig::default());
        }
    }
    clean("setp.gt.u32 %p1, %r40, 19; @%p1 exit; bar.warp.sync -1;", (1, 32), CheckConfig::default());
}

#[test]
fn strict_exits_report_barriers_that_some_warps_never_reach() {
    let body = "setp.gt.u32 %p1, %r40, 31; @%p1 bra END; bar.sync 0; END:";
    let strict = CheckConfig { strict_exits: true, ..CheckConfig::default() };
    let module = parse(body);
    for_each_seed(correct_seeds(), |seed| {
        let fault = run(&module, launch(1, 96), seed, Some(Checker::new(strict))).unwrap_err();
        let FaultKind::BadBarrier { barrier: 0, message } = &fault.kind else { panic!("{fault}") };
        assert!(message.contains("waits for all threads of the block"), "{fault}");
        // Whether the wait came first or the exit, the wait is where it stands.
        assert!(fault.warp == 0 && fault.ptx_text.contains("bar.sync 0"), "{fault}");
    });
    clean(body, (1, 96), CheckConfig::default());
    // With a count it is not all threads that are waited for.
    clean(&body.replace("bar.sync 0", "bar.sync 0, 32"), (2, 96), strict);
    clean("bar.sync 0;", (2, 96), strict);
}

/// A block takes data off one stage of shared memory twice, by bulk loads that its first thread
/// issues. The barrier shows that thread that all threads have read the stage; only the fence
/// orders the copy.
const STAGE_GIVEN_BACK: &str = "
    mov.u32 %r1, DATA;
    mov.u32 %r2, MBAR;
    setp.ne.u32 %p1, %r40, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r2], 1;
    fence.proxy.async.shared::cta;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd40], 256, [%r2];
READY:
    bar.sync 0;
FIRST:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;
    @!%p2 bra FIRST;
    mad.lo.u32 %r3, %r40, 4, %r1;
    ld.shared.u32 %r4, [%r3];
    fence.proxy.async.shared::cta; // before the stage goes back
    bar.sync 0;
    @%p1 bra SECOND;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd40+256], 256, [%r2]; // again
SECOND:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 1;
    @!%p2 bra SECOND;
    ld.shared.u32 %r5, [%r3];
    add.u32 %r5, %r5, %r4;
    mul.wide.u32 %rd2, %r40, 4;
    add.u64 %rd2, %rd2, %rd40;
    st.global.u32 [%rd2], %r5;";

/// A thread stores two results by way of one stage, of which the second is a copy that a bulk load
/// brings.
const STAGE_STORED: &str = "
    mov.u32 %r1, DATA;
    mov.u32 %r2, MBAR;
    mbarrier.init.shared.b64 [%r2], 1;
    mov.u64 %rd1, 7;
    st.shared.u64 [%r1], %rd1;
    st.shared.u64 [%r1+8], %rd1;
    fence.proxy.async.shared::cta;
    cp.async.bulk.global.shared::cta.bulk_group [%rd40], [%r1], 16; // first
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0; // before the stage is filled again
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd40+64], 16, [%r2];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0;
    @!%p1 bra WAIT;
    cp.async.bulk.global.shared::cta.bulk_group [%rd40+32], [%r1], 16; // second
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;";

/// Blocks wait for the epoch that all of them count up to; block 0 starts the next one when all
/// have said that they have seen this one.
const EPOCH: &str = "
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, 1;
    ld.global.u32 %r3, [%rd40]; // the epoch
    cvt.u64.u32 %rd1, %r3;
    mul.wide.u32 %rd2, %r1, 8;
    add.u64 %rd2, %rd2, %rd40;
    st.global.u64 [%rd2+64], %rd1;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra LAST;
    red.release.gpu.global.add.u32 [%rd40+8], %r2;
    ret;
LAST:
    ld.acquire.gpu.global.u32 %r4, [%rd40+8];
    setp.ne.u32 %p2, %r4, 3;
    @%p2 bra LAST;
    add.u32 %r3, %r3, 1;
    st.global.u32 [%rd40], %r3; // advanced";

/// Two pairs of blocks: blocks 0 and 2 each tell the block after them that its word is written.
/// Each pair has a flag of its own.
const TWO_GROUPS: &str = "
    mov.u32 %r1, %ctaid.x;
    shr.u32 %r2, %r1, 1;
    mul.lo.u32 %r3, %r2, 8; // the flag of the pair
    cvt.u64.u32 %rd3, %r3;
    add.u64 %rd3, %rd3, %rd40;
    mul.wide.u32 %rd2, %r2, 64;
    add.u64 %rd2, %rd2, %rd40;
    and.b32 %r4, %r1, 1;
    setp.eq.u32 %p1, %r4, 1;
    @%p1 bra READER;
    mov.u64 %rd1, 7;
    st.global.u64 [%rd2+64], %rd1; // data
    mov.u32 %r5, 1;
    st.release.gpu.global.u32 [%rd3], %r5;
    ret;
READER:
    ld.acquire.gpu.global.u32 %r5, [%rd3];
    setp.eq.u32 %p2, %r5, 0;
    @%p2 bra READER;
    ld.global.u64 %rd1, [%rd2+64];
    st.global.u64 [%rd2+72], %rd1;";

/// A barrier of all blocks that block 0 resets for the next kernel, once all of them have said that
/// they are through.
const RESET: &str = "
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, 1;
    red.release.gpu.global.add.u32 [%rd40], %r2;
ALL:
    ld.acquire.gpu.global.u32 %r3, [%rd40]; // the counter
    setp.ne.u32 %p1, %r3, 4;
    @%p1 bra ALL;
    red.release.gpu.global.add.u32 [%rd40+8], %r2;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra END;
THROUGH:
    ld.acquire.gpu.global.u32 %r4, [%rd40+8];
    setp.ne.u32 %p1, %r4, 4;
    @%p1 bra THROUGH;
    mov.u32 %r5, 0;
    st.global.u32 [%rd40], %r5; // reset
    st.global.u32 [%rd40+8], %r5;
END:";

#[test]
fn a_stage_goes_back_to_bulk_copies_by_a_fence_and_after_its_source_was_read() {
    let given_back = Case {
        name: "a stage given back after generic reads, with a barrier but without a proxy fence",
        shape: (1, 64),
        body: STAGE_GIVEN_BACK,
        edit: ("fence.proxy.async.shared::cta; // before the stage goes back", ""),
        between: ["ld.shared.u32 %r4", LOAD],
        missing: "a fence.proxy.async",
        result: &[(0, 32 << 32), (31, 94 << 32)],
    };
    check_all(&[
        given_back,
        Case {
            name: "a stage refilled before its bulk store has read it",
            shape: (1, 1),
            body: STAGE_STORED,
            edit: ("cp.async.bulk.wait_group.read 0; // before the stage is filled again", ""),
            between: [STORE, LOAD],
            missing: "wait_group.read",
            result: &[(0, 7), (1, 7), (4, 8 << 32), (5, 9 << 32)],
        },
    ]);
    // The fence may as well stand behind the barrier, in the thread that issues the copy.
    let fence = "fence.proxy.async.shared::cta; // before the stage goes back";
    let behind = STAGE_GIVEN_BACK
        .replace(fence, "")
        .replace("@%p1 bra SECOND;", "@%p1 bra SECOND;\n fence.proxy.async.shared::cta;");
    clean(&behind, (1, 64), CheckConfig::default());
}

#[test]
fn words_that_blocks_still_read_are_neither_advanced_nor_reset() {
    let epoch = Case {
        name: "the epoch advanced while blocks read it",
        shape: (4, 1),
        body: EPOCH,
        edit: ("ld.acquire.gpu.global.u32 %r4, [%rd40+8];", "mov.u32 %r4, 3;"),
        between: ["// the epoch", "// advanced"],
        missing: "release and acquire of scope .gpu or wider",
        result: &[(0, 1), (1, 1 << 32 | 3), (8, 0), (11, 0)],
    };
    check_all(&[
        epoch,
        Case {
            name: "a counter reset while blocks poll it",
            body: RESET,
            edit: ("ld.acquire.gpu.global.u32 %r4, [%rd40+8];", "mov.u32 %r4, 4;"),
            between: ["// the counter", "// reset"],
            result: &[(0, 0), (1, 1 << 32)],
            ..epoch
        },
    ]);
}

#[test]
fn a_counter_that_a_kernel_resets_is_not_for_two_streams_at_a_time() {
    let module = parse(
        "
    mov.u32 %r2, 1;
    atom.acq_rel.gpu.global.add.u32 %r3, [%rd40], %r2; // count
    setp.ne.u32 %p1, %r3, 3;
    @%p1 bra END;
    mov.u32 %r4, 0;
    st.global.u32 [%rd40], %r4; // reset
END:",
    );
    for_each_seed(correct_seeds(), |seed| {
        for event in [true, false] {
            let checker = races();
            let memory = Memory::checked(seed, Some(checker.clone()));
            let buf = numbered(&memory);
            let before = checker.host_past();
            let begin = |past: &Past| {
                let order = Some((checker.timeline(), past));
                let params = buf.addr().to_ne_bytes();
                let kernel = module.kernel("k").unwrap();
                Grid::launch(kernel, memory.clone(), &device(seed), launch(4, 1), &params, order).unwrap()
            };
            let mut first = begin(&before);
            if event {
                finish(&mut [&mut first], seed).unwrap();
                let mut second = begin(&first.past());
                finish(&mut [&mut second], seed).unwrap();
                checker.host_waited(&second.past());
                assert_eq!(words(&memory, &buf).unwrap()[0], 0);
            } else {
                let mut second = begin(&before);
                let fault = finish(&mut [&mut first, &mut second], seed).unwrap_err();
                assert_race("no event", &fault, ["// count", "// reset"], "kernel boundary");
            }
        }
    });
}

#[test]
fn groups_that_share_a_signal_word_by_mistake_are_found() {
    let correct = parse(TWO_GROUPS);
    let aliased = parse(&TWO_GROUPS.replace("mul.lo.u32 %r3, %r2, 8;", "mul.lo.u32 %r3, %r2, 0;"));
    let mut caught = 0;
    for_each_seed(correct_seeds(), |seed| {
        let got = run(&correct, launch(4, 1), seed, Some(races())).unwrap();
        assert_eq!([got[8], got[9], got[16], got[17]], [7; 4]);
        // A reader may be lucky and see the flag only after its own writer has set it.
        if let Err(fault) = run(&aliased, launch(4, 1), seed, Some(races())) {
            assert_race(
                "one flag",
                &fault,
                ["// data", "ld.global.u64"],
                "release and acquire of scope .gpu",
            );
            caught += 1;
        }
    });
    assert!(caught > correct_seeds() / 2 || replaying(), "{caught} of {} seeds", correct_seeds());
}

#[test]
fn a_rank_that_joins_does_not_clear_signals_that_others_use() {
    // The kernel of rank 0 signals and then waits for rank 1.
    let module = parse(
        "
    mov.u32 %r2, 1;
    st.release.sys.global.u32 [%rd40], %r2; // signal
WAIT:
    ld.acquire.sys.global.u32 %r3, [%rd40+8]; // poll
    setp.eq.u32 %p1, %r3, 0;
    @%p1 bra WAIT;",
    );
    for_each_seed(correct_seeds(), |seed| {
        let checker = races();
        let [ours, theirs] = [seed, seed + 1].map(|seed| Memory::checked(seed, Some(checker.clone())));
        let signals = ours.alloc(4096, "signals").unwrap();
        let near = theirs.import(signals.export().unwrap(), 4096, "signals").unwrap();
        // In order: rank 1 clears its mapping, and rank 0 learns of it before it starts.
        let _ = checker.host_past();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _ = checker.host_past();
                theirs.fill(near.addr(), 0, 4096).unwrap();
                epoxide_vgpu::host_meets();
            });
        });
        epoxide_vgpu::host_meets();
        let mut grid = start(&module, &ours, &signals, launch(1, 1), seed);
        while grid.step(16).unwrap() != Progress::Spinning {}
        // Out of order: rank 1 joins while the kernel runs. It knows all that rank 0 did before,
        // but not what the kernel does.
        epoxide_vgpu::host_meets();
        let join = |at: u64| {
            std::thread::scope(|scope| {
                let rank_1 = scope.spawn(|| {
                    let _ = checker.host_past();
                    epoxide_vgpu::host_meets();
                    theirs.fill(near.addr() + at, 0, 8)
                });
                rank_1.join().unwrap()
            })
        };
        let error = join(0).unwrap_err().to_string();
        assert!(error.contains("a write by the host") && error.contains("// signal"), "{error}");
        assert!(error.contains("missing: a wait of the host"), "{error}");
        // A kernel that looks at what was overwritten reports it as well.
        join(16).unwrap();
        let late = parse("ld.relaxed.sys.global.u32 %r1, [%rd40+16]; // late");
        let fault = finish(&mut [&mut start(&late, &ours, &signals, launch(1, 1), seed)], seed).unwrap_err();
        let FaultKind::Race(race) = &fault.kind else { panic!("{fault}") };
        assert!(race.other.kernel.is_empty() && race.missing.contains("a wait of the host"), "{fault}");
        assert!(fault.ptx_text.contains("// late"), "{fault}");
    });
}

#[test]
fn a_race_names_the_synchronisation_that_failed() {
    let cases = [
        ("st.release.gpu", "st.relaxed.gpu", "the write is no release"),
        ("ld.acquire.gpu", "ld.relaxed.gpu", "the read is no acquire"),
        // The message itself is correct; the read is of bytes written behind it.
        (
            "ld.global.u64 %rd2, [%rd40]",
            "ld.global.u64 %rd2, [%rd40+24]",
            "orders what its thread did before the write",
        ),
    ];
    for (from, to, verdict) in cases {
        let late = "st.release.gpu.global.u32 [%rd40+8], %r2;\n    st.global.u64 [%rd40+24], %rd1;";
        let body = MESSAGE.replace("st.release.gpu.global.u32 [%rd40+8], %r2;", late).replace(from, to);
        let module = parse(&body);
        let mut named = 0;
        for seed in 0..broken_seeds() {
            let Err(fault) = run(&module, launch(2, 1), seed, Some(races())) else { continue };
            let FaultKind::Race(race) = &fault.kind else { panic!("{fault}") };
            // If the reader came first, no thread has read the flag correctly.
            if !fault.ptx_text.contains("ld.") {
                continue;
            }
            let [attempt] = race.attempts.as_slice() else { panic!("{fault}") };
            let of = attempt.of.as_ref().unwrap();
            assert!(attempt.what.ptx_text.contains("%r3, [%rd40+8]"), "{fault}");
            assert!(of.ptx_text.contains("[%rd40+8], %r2"), "{fault}");
            assert!(attempt.verdict.contains(verdict), "{to}: {fault}");
            named += 1;
        }
        assert!(named > 0, "{to}: no report by the reader");
    }
}

#[test]
fn an_order_is_named_across_blocks() {
    // Block 0 tells block 1, and block 1 tells block 2, but with a relaxed store.
    let body = "
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, 1;
    mov.u64 %rd1, 7;
    setp.eq.u32 %p1, %r1, 1;
    @%p1 bra SECOND;
    setp.eq.u32 %p1, %r1, 2;
    @%p1 bra THIRD;
    st.global.u64 [%rd40], %rd1;
    st.release.gpu.global.u32 [%rd40+8], %r2;
    ret;
SECOND:
    ld.acquire.gpu.global.u32 %r3, [%rd40+8];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra SECOND;
    st.relaxed.gpu.global.u32 [%rd40+16], %r2;
    ret;
THIRD:
    ld.acquire.gpu.global.u32 %r3, [%rd40+16];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra THIRD;
    ld.global.u64 %rd2, [%rd40];";
    let fault = run(&parse(body), launch(3, 1), 1, Some(races())).unwrap_err();
    let FaultKind::Race(race) = &fault.kind else { panic!("{fault}") };
    let verdicts: Vec<&str> = race.attempts.iter().map(|a| a.verdict.as_str()).collect();
    assert_eq!(verdicts.len(), 2, "{fault}");
    assert!(verdicts[0].starts_with("orders what its thread did"), "{fault}");
    assert!(verdicts[1].starts_with("orders nothing: the write is no release"), "{fault}");
}

#[test]
fn reads_of_an_earlier_kernel_of_the_stream_are_named() {
    // One stream writes and tells by a relaxed store; on the other a kernel waits for that, and the
    // next one reads.
    let writer = "
    mov.u64 %rd1, 7;
    mov.u32 %r2, 1;
    st.global.u64 [%rd40], %rd1;
    st.relaxed.gpu.global.u32 [%rd40+8], %r2;";
    let waiter = "
AGAIN:
    ld.acquire.gpu.global.u32 %r3, [%rd40+8];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra AGAIN;";
    let [writer, waiter, reader] = [writer, waiter, "ld.global.u64 %rd2, [%rd40];"].map(parse);
    let checker = races();
    let memory = Memory::checked(1, Some(checker.clone()));
    let buf = numbered(&memory);
    let before = checker.host_past();
    let mut first = start_in(&checker, &writer, &memory, &buf, &before, 1);
    finish(&mut [&mut first], 1).unwrap();
    let mut second = start_in(&checker, &waiter, &memory, &buf, &before, 1);
    finish(&mut [&mut second], 1).unwrap();
    let mut third = start_in(&checker, &reader, &memory, &buf, &second.past(), 1);
    let fault = finish(&mut [&mut third], 1).unwrap_err();
    let FaultKind::Race(race) = &fault.kind else { panic!("{fault}") };
    let [attempt] = race.attempts.as_slice() else { panic!("{fault}") };
    assert!(attempt.what.ptx_text.contains("ld.acquire") && attempt.what.launch == Launch::Other, "{fault}");
    assert!(attempt.verdict.contains("the write is no release"), "{fault}");
}

#[test]
fn a_wait_for_an_mbarrier_that_never_completes_names_its_initialisation() {
    let body = "
    mov.u32 %r1, MBAR;
    mbarrier.init.shared.b64 [%r1], 2;
    mbarrier.arrive.shared.b64 _, [%r1];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
    @!%p1 bra WAIT;";
    let fault = run(&parse(body), launch(1, 1), 1, Some(races())).unwrap_err();
    let FaultKind::Deadlock(report) = &fault.kind else { panic!("{fault}") };
    let texts: Vec<&str> = report.warps[0].mbarrier.iter().map(|step| step.ptx_text.as_str()).collect();
    assert_eq!(
        texts,
        ["mbarrier.init.shared.b64 [%r1], 2;", "mbarrier.arrive.shared.b64 _, [%r1];"],
        "{fault}"
    );
    assert!(fault.to_string().contains("its mbarrier: PTX"), "{fault}");
}

#[test]
fn a_copy_without_a_wait_names_the_missing_wait() {
    let body = "
    mov.u32 %r1, DATA;
    mov.u64 %rd1, 7;
    st.shared.u64 [%r1], %rd1;
    st.shared.u64 [%r1+8], %rd1;
    fence.proxy.async.shared::cta;
    cp.async.bulk.global.shared::cta.bulk_group [%rd40], [%r1], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    ld.global.u64 %rd2, [%rd40];";
    let fault = run(&parse(body), launch(1, 1), 1, Some(races())).unwrap_err();
    let FaultKind::Race(race) = &fault.kind else { panic!("{fault}") };
    let wait = &race.attempts[0];
    assert!(wait.what.ptx_text.contains("wait_group.read"), "{fault}");
    assert_eq!(wait.verdict, "waits for the copy to be read, not for it to arrive");
}

#[test]
fn a_fault_lists_the_last_steps_of_its_warps() {
    let body = MESSAGE.replace("st.release.gpu", "st.relaxed.gpu");
    let module = parse(&body);
    let read = |fault: &Fault| fault.ptx_text.contains("ld.");
    let run = |seed| run(&module, launch(2, 1), seed, Some(races())).unwrap_err();
    let fault = (0..broken_seeds()).map(run).find(|fault| read(fault)).expect("a report by the reader");
    let texts = |trace: &Trace| trace.steps.iter().map(|step| step.ptx_text.clone()).collect::<Vec<_>>();
    let [reader, ..] = fault.traces.as_slice() else { panic!("{fault}") };
    assert_eq!((reader.block, reader.warp), ([1, 0, 0], 0));
    assert_eq!(texts(reader), ["ld.acquire.gpu.global.u32 %r3, [%rd40+8];"], "{fault}");
    if let Some(writer) = fault.traces.get(1) {
        assert_eq!(texts(writer)[0], "st.relaxed.gpu.global.u32 [%rd40+8], %r2;", "{fault}");
    }
    // Without checks no steps are recorded.
    let plain = self::run(&parse("trap;"), launch(1, 1), 1, None).unwrap_err();
    assert!(plain.traces.is_empty());
}

#[test]
fn a_kernel_that_reads_an_unwritten_register_is_not_launched() {
    let body = ".file 1 \"src/k.rs\"\n.loc 1 42 0\nst.global.u32 [%rd42], %r7; // garbage";
    let launch_with = |body: &str, checker: Option<Checker>| {
        let (module, memory) = (parse(body), Memory::checked(0, checker));
        let (kernel, buf) = (module.kernel("k").unwrap(), numbered(&memory));
        Grid::new(kernel, memory, &device(0), launch(1, 32), &buf.addr().to_ne_bytes()).map(drop)
    };
    let error = launch_with(body, Some(races())).unwrap_err();
    assert!(
        matches!(&error, LaunchError::UnwrittenRegister { read, .. } if read.register == "%r7"),
        "{error}"
    );
    let text = error.to_string();
    assert!(text.starts_with("kernel 'k' reads register '%r7', which nothing has written"), "{text}");
    assert!(
        text.contains("at src/k.rs:42") && text.ends_with("st.global.u32 [%rd42], %r7; // garbage"),
        "{text}"
    );
    // A kernel of others that gets by with it can be run without checks, and a mended one with
    // them.
    launch_with(body, None).unwrap();
    launch_with(&body.replace("%r7", "%r40"), Some(races())).unwrap();
}

#[test]
fn freed_memory_is_called_by_its_name() {
    let module = parse("ld.global.u64 %rd1, [%rd40]; st.global.u32 [%rd1+16], %r40; // late");
    for checker in [None, Some(races())] {
        let memory = Memory::checked(1, checker.clone());
        let buf = numbered(&memory);
        let victim = memory.alloc(4096, "victim").unwrap();
        let address = victim.addr();
        memory.write(buf.addr(), &address.to_ne_bytes()).unwrap();
        finish(&mut [&mut start(&module, &memory, &buf, launch(1, 1), 1)], 1).unwrap();
        drop(victim);
        // In check mode its place is not reused.
        let _others = if checker.is_some() {
            (0..100).map(|_| memory.alloc(4096, "other").unwrap()).collect::<Vec<Region>>()
        } else {
            vec![]
        };
        let fault = finish(&mut [&mut start(&module, &memory, &buf, launch(1, 1), 1)], 1).unwrap_err();
        let FaultKind::OutOfBounds { nearest: Some(near), .. } = &fault.kind else { panic!("{fault}") };
        assert_eq!((near.label.as_str(), near.addr, near.bytes, near.freed), ("victim", address, 4096, true));
        let text = fault.to_string();
        assert!(
            text.contains("is in 'victim' + 0x10, which has been freed") && text.contains("// late"),
            "{text}"
        );
        let error = memory.fill(address + 8, 0, 8).unwrap_err();
        assert!(error.to_string().ends_with("is in 'victim' + 0x8, which has been freed"), "{error}");
    }
}

/// Block 0 writes pairs of equal words one after the other; block 1 reads pairs, and notes in word
/// 4 that it has seen one of two writes.
const PAIRS: &str = "
    .reg .b128 %q;
    mov.u32 %r1, %ctaid.x;
    mov.u64 %rd1, 0;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READ;
WRITE:
    add.s64 %rd1, %rd1, 1;
    mov.b128 %q, {%rd1, %rd1};
    st.relaxed.sys.global.b128 [%rd40], %q;
    setp.lt.u64 %p2, %rd1, 12;
    @%p2 bra WRITE;
    bra END;
READ:
    add.s64 %rd1, %rd1, 1;
    ld.relaxed.sys.global.b128 %q, [%rd40];
    mov.b128 {%rd2, %rd3}, %q;
    sub.s64 %rd4, %rd3, %rd2;
    and.b64 %rd5, %rd4, 0xffffffff;
    setp.ne.u64 %p3, %rd5, 0;
    @%p3 st.global.u64 [%rd40+32], %rd4;
    setp.lt.u64 %p2, %rd1, 12;
    @%p2 bra READ;
END:";

#[test]
fn values_written_whole_are_read_whole() {
    let torn = |body: &str, seed: u64, checker: Checker| {
        // In front of all writes the words are 0 and 1 << 32, whose low halves are equal too.
        run(&parse(body), launch(2, 1), seed, Some(checker)).map(|words| words[4] != 4 << 32)
    };
    let weak =
        |seed| Checker::new(CheckConfig { races: false, weak_memory: Some(seed), strict_exits: false });
    for_each_seed(correct_seeds(), |seed| {
        assert!(!torn(PAIRS, seed, races()).unwrap_or_else(|fault| panic!("{fault}")));
        assert!(!torn(PAIRS, seed, weak(seed)).unwrap_or_else(|fault| panic!("{fault}")));
    });
    // A vector of two words is two accesses.
    let vectors = PAIRS
        .replace("    mov.b128 %q, {%rd1, %rd1};\n", "")
        .replace("    mov.b128 {%rd2, %rd3}, %q;\n", "")
        .replace(
            "st.relaxed.sys.global.b128 [%rd40], %q",
            "st.relaxed.sys.global.v2.b64 [%rd40], {%rd1, %rd1}",
        )
        .replace(
            "ld.relaxed.sys.global.b128 %q, [%rd40]",
            "ld.relaxed.sys.global.v2.b64 {%rd2, %rd3}, [%rd40]",
        );
    if !replaying() {
        let seen = (0..correct_seeds()).filter(|&seed| torn(&vectors, seed, weak(seed)).unwrap()).count();
        assert!(seen > 0, "no vector was ever seen in part");
    }
}

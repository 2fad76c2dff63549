//! The gaps that a race report names: each missing or narrow fence, scope or barrier, with its line.

use epoxide_vgpu::{
    CheckConfig, FaultKind, Gap, GapKind, Machine, MachineError, Module, Report, Side, for_each_seed,
};

use crate::cases::SHARED;
use crate::common::{broken_seeds, device, kernel, launch, replaying};

/// Where the reader of the flag runs, relative to the writer.
#[derive(Clone, Copy)]
enum Reader {
    OtherBlock,
    OtherDevice,
}
use GapKind::{
    AheadOfAccess, FenceAheadOfBarrier, NarrowAccess, NarrowFence, NoFence, NoProxyFence, NoWait, OtherProxy,
    OtherSpace, ProxyFenceAhead, Uncovered,
};
use Reader::{OtherBlock, OtherDevice};

/// Every thread writes its word, and one of them the flag.
const DATA: &str = "st.global.u32 [%rd2], %r40;";
/// The threads meet, and all but one leave.
const MEET: &str = "bar.sync 0;\n@%p2 ret;";
/// The thread that reads the flag waits.
fn wait(load: &str) -> String {
    format!("@%p2 bra READ;\nWAIT: {load}\nsetp.eq.u32 %p3, %r3, 0;\n@%p3 bra WAIT;")
}

/// Runs a writer and a reader of 64 threads each, in one launch or on two devices, until one of
/// them is reported.
fn gaps_of(seed: u64, place: Reader, writer: &str, reader: &str) -> (Vec<Gap>, String) {
    let head = "
    setp.ne.u32 %p2, %r40, 0;
    mov.u32 %r7, 1;
    mul.wide.u32 %rd1, %r40, 4;
    add.s64 %rd2, %rd40, %rd1;";
    let reader = format!("{reader}\nREAD: bar.sync 0;\nld.global.u32 %r5, [%rd2]; // data");
    let parse = |body: &str| {
        let ptx = kernel(SHARED, &format!("{head}\n{body}"));
        Module::parse(&ptx).unwrap_or_else(|e| panic!("{e}\n{ptx}"))
    };
    let devices = if matches!(place, OtherDevice) { 2 } else { 1 };
    let mut machine = Machine::with_config(devices, device(seed), Some(CheckConfig::default()));
    let buf = machine.upload(0, "buf", &[0u64; 64]).unwrap();
    match place {
        OtherBlock => {
            let both = format!(
                "mov.u32 %r1, %ctaid.x;\nsetp.ne.u32 %p1, %r1, 0;\n@%p1 bra READER;\n{writer}\nret;\nREADER:\n{reader}"
            );
            machine.launch_with(0, &parse(&both), "k", launch(2, 64), &[&buf]).unwrap();
        }
        OtherDevice => {
            let peer = machine.map(1, &buf).unwrap();
            machine.launch_with(0, &parse(writer), "k", launch(1, 64), &[&buf]).unwrap();
            machine.launch_with(1, &parse(&reader), "k", launch(1, 64), &[&peer]).unwrap();
            return match machine.run() {
                Err(MachineError::Fault(fault)) => gaps(*fault),
                other => panic!("{other:?}\n{writer}\n{reader}"),
            };
        }
    }
    match machine.run() {
        Err(MachineError::Fault(fault)) => gaps(*fault),
        other => panic!("{other:?}\n{writer}\n{reader}"),
    }
}

fn gaps(fault: epoxide_vgpu::Fault) -> (Vec<Gap>, String) {
    let text = fault.to_string();
    let FaultKind::Race(race) = fault.kind else { panic!("{text}") };
    (race.gaps, text)
}

/// Side, kind, the scope that is needed, and a part of the line.
type Expected = (Side, GapKind, &'static str, &'static str);

const W: Side = Side::Writer;
const R: Side = Side::Reader;

fn assert_gaps(name: &str, (gaps, text): &(Vec<Gap>, String), expected: &[Expected]) {
    let got: Vec<_> = gaps.iter().map(|gap| (gap.side, gap.kind, gap.needs)).collect();
    let want: Vec<_> = expected.iter().map(|(side, kind, needs, _)| (*side, *kind, *needs)).collect();
    assert_eq!(got, want, "{name}: {text}");
    for (gap, (.., line)) in gaps.iter().zip(expected) {
        assert!(gap.at.at.ptx_text.contains(line), "{name}: not at '{line}': {text}");
        assert!(text.contains(&format!("\n  gap: {}\n    ", gap.sentence())), "{name}: {text}");
    }
}

#[test]
fn a_report_names_the_fence_scope_or_barrier_that_is_missing() {
    let fenced = |fence: &str, store: &str| format!("{DATA}\n{MEET}\n{fence}\n{store}");
    let relaxed = "st.relaxed.sys.global.u32 [%rd40+400], %r7;";
    let load = |load: &str, fence: &str| format!("{}\n{fence}", wait(load));
    let acquire = "ld.acquire.sys.global.u32 %r3, [%rd40+400];";
    let plain = "ld.relaxed.sys.global.u32 %r3, [%rd40+400];";
    let atomic = "atom.relaxed.sys.global.add.u32 %r3, [%rd40+400], 0;";
    let table: Vec<(&str, Reader, String, String, &[Expected])> = vec![
        (
            "the writer's fence is too narrow for another block",
            OtherBlock,
            fenced("fence.acq_rel.cta;", relaxed),
            load(plain, "fence.acq_rel.gpu;"),
            &[(W, NarrowFence, ".gpu", "fence.acq_rel.cta")],
        ),
        (
            "the writer's fence is too narrow for another device",
            OtherDevice,
            fenced("membar.gl;", "atom.relaxed.sys.global.exch.b32 %r6, [%rd40+400], 1;"),
            load(atomic, "membar.sys;"),
            &[(W, NarrowFence, ".sys", "membar.gl")],
        ),
        (
            "the reader's fence is too narrow",
            OtherBlock,
            fenced("fence.acq_rel.gpu;", relaxed),
            load(plain, "fence.acq_rel.cta;"),
            &[(R, NarrowFence, ".gpu", "fence.acq_rel.cta")],
        ),
        (
            "both fences are too narrow",
            OtherDevice,
            fenced("fence.sc.gpu;", relaxed),
            load(plain, "fence.acq_rel.cta;"),
            &[(W, NarrowFence, ".sys", "fence.sc.gpu"), (R, NarrowFence, ".sys", "fence.acq_rel.cta")],
        ),
        (
            "both fences are absent",
            OtherBlock,
            fenced("", relaxed),
            load(plain, ""),
            &[(W, NoFence, ".gpu", "st.relaxed"), (R, NoFence, ".gpu", "ld.relaxed")],
        ),
        (
            "the reader has a fence, the writer none",
            OtherDevice,
            fenced("", relaxed),
            load(plain, "fence.acq_rel.sys;"),
            &[(W, NoFence, ".sys", "st.relaxed")],
        ),
        (
            "the writer has a fence, the reader none",
            OtherDevice,
            fenced("fence.acq_rel.sys;", relaxed),
            load(plain, ""),
            &[(R, NoFence, ".sys", "ld.relaxed")],
        ),
        (
            "the reader's fence stands ahead of its read",
            OtherBlock,
            fenced("fence.acq_rel.gpu;", relaxed),
            wait(&format!("fence.acq_rel.gpu; {plain}")),
            &[(R, NoFence, ".gpu", "ld.relaxed")],
        ),
        (
            "the fence stands ahead of the barrier",
            OtherBlock,
            format!("{DATA}\nfence.acq_rel.gpu;\n{MEET}\n{relaxed}"),
            load(acquire, ""),
            &[(W, FenceAheadOfBarrier, ".gpu", "fence.acq_rel.gpu")],
        ),
        (
            "the fence stands ahead of the barrier, and is too narrow",
            OtherDevice,
            format!("@%p2 {DATA}\n@%p2 fence.acq_rel.gpu;\n{MEET}\n{relaxed}"),
            load(acquire, ""),
            &[
                (W, FenceAheadOfBarrier, ".sys", "fence.acq_rel.gpu"),
                (W, NarrowFence, ".sys", "fence.acq_rel.gpu"),
            ],
        ),
        (
            "the release stands ahead of the barrier",
            OtherBlock,
            format!("{DATA}\n@%p2 ret;\nst.release.gpu.global.u32 [%rd40+400], %r7;"),
            load(acquire, ""),
            &[(W, Uncovered, ".gpu", "st.release.gpu")],
        ),
        (
            "the release stands ahead of the data",
            OtherBlock,
            format!("@%p2 ret;\nst.release.gpu.global.u32 [%rd40+400], %r7;\n{DATA}"),
            load(acquire, ""),
            &[(W, AheadOfAccess, ".gpu", "st.release.gpu")],
        ),
    ];
    for (name, place, writer, reader, expected) in table {
        let mut found = 0;
        for_each_seed(broken_seeds(), |seed| {
            let (gaps, text) = gaps_of(seed, place, &writer, &reader);
            // Without a barrier the writer may come later than the reader: no flag is meant for that.
            if text.contains("is not ordered behind\n  a weak write") {
                assert_gaps(name, &(gaps, text), expected);
                found += 1;
            }
        });
        assert!(found >= broken_seeds() / 2 || replaying(), "{name}: {found}");
    }
}

#[test]
fn a_flag_of_too_narrow_a_scope_is_a_race_itself_and_is_named() {
    let release = |scope: &str| format!("@%p2 ret;\nst.release.{scope}.global.u32 [%rd40+400], %r7;");
    let acquire = |scope: &str| wait(&format!("ld.acquire.{scope}.global.u32 %r3, [%rd40+400];"));
    let add = "@%p2 ret;\natom.acq_rel.gpu.global.add.u32 %r6, [%rd40+400], 1;".to_owned();
    let table: Vec<(&str, Reader, String, String, &[Expected])> = vec![
        (
            "a release store",
            OtherBlock,
            release("cta"),
            acquire("gpu"),
            &[(W, NarrowAccess, ".gpu", "st.release.cta")],
        ),
        ("an atomic", OtherDevice, add, acquire("sys"), &[(W, NarrowAccess, ".sys", "atom.acq_rel.gpu")]),
        (
            "an acquire",
            OtherDevice,
            release("sys"),
            acquire("gpu"),
            &[(R, NarrowAccess, ".sys", "ld.acquire.gpu")],
        ),
    ];
    for (name, place, writer, reader, expected) in table {
        for_each_seed(broken_seeds(), |seed| {
            assert_gaps(name, &gaps_of(seed, place, &writer, &reader), expected);
        });
    }
}

#[test]
fn a_flag_that_one_warp_hands_on_needs_an_acquire_of_the_others() {
    // Thread 0 waits for the flag, and the second warp for a word of shared memory.
    let reader = |load: &str| {
        format!(
            "mov.u32 %r1, DATA;
            @%p2 bra POLLED;
            WAIT: ld.acquire.gpu.global.u32 %r3, [%rd40+400];
            setp.eq.u32 %p3, %r3, 0;
            @%p3 bra WAIT;
            POLLED: @%p2 bra TOLD;
            st.release.cta.shared.u32 [%r1], %r7;
            TOLD: setp.lt.u32 %p4, %r40, 32;
            @%p4 ret;
            AGAIN: {load}
            setp.eq.u32 %p3, %r3, 0;
            @%p3 bra AGAIN;
            ld.global.u32 %r5, [%rd2]; // data"
        )
    };
    let run = |seed: u64, load: &str| {
        let head = "
        mov.u32 %r8, DATA;
        mov.u32 %r9, 0;
        setp.ne.u32 %p2, %r40, 0;
        @!%p2 st.relaxed.cta.shared.u32 [%r8], %r9;
        bar.sync 0;
        mov.u32 %r7, 1;
        mul.wide.u32 %rd1, %r40, 4;
        add.s64 %rd2, %rd40, %rd1;
        mov.u32 %r1, %ctaid.x;
        setp.ne.u32 %p1, %r1, 0;
        @%p1 bra READER;";
        let store = "st.release.gpu.global.u32 [%rd40+400], %r7;";
        let body = format!("{head}\n{DATA}\n{MEET}\n{store}\nret;\nREADER:\n{}", reader(load));
        let ptx = kernel(SHARED, &body);
        let module = Module::parse(&ptx).unwrap_or_else(|e| panic!("{e}\n{ptx}"));
        let mut machine = Machine::with_config(1, device(seed), Some(CheckConfig::default()));
        let buf = machine.upload(0, "buf", &[0u64; 64]).unwrap();
        machine.launch_with(0, &module, "k", launch(2, 64), &[&buf]).unwrap();
        machine.run()
    };
    for_each_seed(broken_seeds(), |seed| {
        run(seed, "ld.acquire.cta.shared.u32 %r3, [%r1];").unwrap();
        let Err(MachineError::Fault(fault)) = run(seed, "ld.relaxed.cta.shared.u32 %r3, [%r1];") else {
            panic!("no report")
        };
        assert_gaps("handed on", &gaps(*fault), &[(R, NoFence, ".cta", "ld.relaxed.cta.shared")]);
    });
}

#[test]
fn a_missing_proxy_fence_names_the_fence_that_stands_in_its_place() {
    let body = |before: &str, between: &str| {
        format!(
            "mov.u32 %r1, DATA;
            {before}
            st.shared.u64 [%r1], %rd40;
            st.shared.u64 [%r1+8], %rd40;
            {between}
            cp.async.bulk.global.shared::cta.bulk_group [%rd40], [%r1], 16;
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0;"
        )
    };
    let table: [(&str, &str, Expected); 4] = [
        ("", "", (R, NoProxyFence, "", "cp.async.bulk.global")),
        ("", "fence.acq_rel.cta;", (R, OtherProxy, "", "fence.acq_rel.cta")),
        ("", "fence.proxy.async.global;", (R, OtherSpace, "", "fence.proxy.async.global")),
        ("fence.proxy.async;", "", (R, ProxyFenceAhead, "", "fence.proxy.async;")),
    ];
    for (before, between, expected) in table {
        let ptx = kernel(SHARED, &body(before, between));
        let module = Module::parse(&ptx).unwrap();
        for_each_seed(broken_seeds(), |seed| {
            let mut machine = Machine::with_config(1, device(seed), Some(CheckConfig::default()));
            let buf = machine.upload(0, "buf", &[0u64; 64]).unwrap();
            machine.launch_with(0, &module, "k", launch(1, 1), &[&buf]).unwrap();
            let Err(MachineError::Fault(fault)) = machine.run() else { panic!("no report: {ptx}") };
            assert_gaps(between, &gaps(*fault), &[expected]);
        });
    }
}

#[test]
fn a_bulk_store_that_was_waited_for_has_the_gaps_of_its_flag() {
    let body = |wait: &str, write: &str, read: &str| {
        format!(
            "
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, DATA;
    mov.u64 %rd1, 7;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READER;
    st.shared.u64 [%r2], %rd1;
    st.shared.u64 [%r2+8], %rd1;
    fence.proxy.async;
    cp.async.bulk.global.shared::cta.bulk_group [%rd40], [%r2], 16;
    cp.async.bulk.commit_group;
    {wait}
    st.{write}.gpu.global.u64 [%rd40+64], %rd1;
    cp.async.bulk.wait_group 0;
    ret;
READER:
    ld.{read}.gpu.global.u64 %rd1, [%rd40+64];
    setp.eq.u64 %p3, %rd1, 0;
    @%p3 bra READER;
    ld.global.u64 %rd1, [%rd40];"
        )
    };
    let wait = "cp.async.bulk.wait_group 0;";
    let table = [
        (wait, "relaxed", "relaxed", &[(W, NoFence), (R, NoFence)][..]),
        ("", "relaxed", "relaxed", &[]),
        ("", "release", "acquire", &[(W, NoWait)]),
        ("cp.async.bulk.wait_group.read 0;", "release", "acquire", &[(W, NoWait)]),
        (wait, "release", "relaxed", &[(R, NoFence)]),
    ];
    for (wait, write, read, expected) in table {
        let module = Module::parse(&kernel(SHARED, &body(wait, write, read))).unwrap();
        for_each_seed(broken_seeds(), |seed| {
            let mut machine = Machine::with_config(1, device(seed), Some(CheckConfig::collecting()));
            let buf = machine.upload(0, "buf", &[0u64; 64]).unwrap();
            machine.launch_with(0, &module, "k", launch(2, 1), &[&buf]).unwrap();
            machine.run().unwrap();
            for report in machine.reports() {
                let gaps: Vec<_> = report.gaps().iter().map(|gap| (gap.side, gap.kind)).collect();
                assert_eq!(gaps, expected, "{}", report.fault);
            }
            assert!(!machine.reports().is_empty());
        });
    }
}

#[test]
fn reports_with_the_same_gaps_have_one_cause() {
    // Two words behind a narrow fence, and one without any order.
    let body = "
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r7, 1;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READER;
    st.global.u32 [%rd40], %r7;
    st.global.u32 [%rd40+4], %r7;
    fence.acq_rel.cta;
    st.relaxed.gpu.global.u32 [%rd40+8], %r7;
    ret;
READER:
    ld.relaxed.gpu.global.u32 %r3, [%rd40+8];
    setp.eq.u32 %p3, %r3, 0;
    @%p3 bra READER;
    fence.acq_rel.gpu;
    ld.global.u32 %r5, [%rd40];
    ld.global.u32 %r5, [%rd40+4];
    ld.shared.u32 %r5, [DATA];";
    let module = Module::parse(&kernel(SHARED, body)).unwrap();
    for_each_seed(broken_seeds(), |seed| {
        let mut machine = Machine::with_config(1, device(seed), Some(CheckConfig::collecting()));
        let buf = machine.upload(0, "buf", &[0u64; 64]).unwrap();
        machine.launch_with(0, &module, "k", launch(2, 1), &[&buf]).unwrap();
        machine.run().unwrap();
        let reports = machine.reports();
        let summary = Report::summary(&reports);
        let [narrow, unwritten] = summary.causes.as_slice() else { panic!("{summary}") };
        assert_eq!((narrow.reports.as_slice(), narrow.occurrences), ([0, 1].as_slice(), 2), "{summary}");
        assert_eq!((narrow.gaps[0].kind, unwritten.gaps.len()), (NarrowFence, 0), "{summary}");
        let text = summary.to_string();
        for part in [
            "cause: 2 reports, 2 times: the writer's fence has scope .cta, which leaves the reader out",
            "fence.acq_rel.cta;, in kernel 'k')\n  race (corrupts) read-after-write on 'buf' at PTX line ",
            "cause: 1 report, 1 time: read of 4 bytes of unwritten shared memory",
            "DATA + 0x0) (in kernel 'k')\n",
        ] {
            assert!(text.contains(part), "without '{part}': {text}");
        }
        assert!(text.ends_with("in kernel 'k', 1 time\n"), "{text}");
        // Without gaps a race's cause names the kernel as well.
        let mut bare = reports[0].clone();
        if let FaultKind::Race(race) = &mut bare.fault.kind {
            race.gaps.clear();
        }
        let bare = Report::summary(&[bare]).to_string();
        let cause = bare.lines().next().unwrap_or_default();
        assert!(cause.contains(": missing: ") && cause.ends_with("(in kernel 'k')"), "{bare}");
        // One change would not also fix a race with another gap.
        let mut other = reports[1].clone();
        if let FaultKind::Race(race) = &mut other.fault.kind {
            let gap = race.gaps[0].clone();
            race.gaps.push(gap);
            assert!(reports[0].has_cause_of(&other), "the same gap twice");
        }
        if let FaultKind::Race(race) = &mut other.fault.kind {
            race.gaps[1].side = R;
        }
        assert!(!reports[0].has_cause_of(&other));
    });
}

/// The first lane of warp 1 writes the data by a copy and waits for it.
const COPIED: &str = "
    setp.ne.u32 %p6, %r40, 32;
    mov.u64 %rd3, 7;
    @!%p6 st.shared.u64 [%r8+128], %rd3;
    @!%p6 st.shared.u64 [%r8+136], %rd3;
    fence.proxy.async;
    @!%p6 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r8+128], 16; // data
    @!%p6 cp.async.bulk.commit_group;
    @!%p6 cp.async.bulk.wait_group 0;";

/// Warp 1 writes the data and hands its progress to warp 0 by a word of shared memory. `store` and
/// `load` are the accesses of that word, one of which is relaxed.
fn handed_to_the_writer(data: &str, store: &str, load: &str) -> String {
    let writer = format!(
        "
    setp.lt.u32 %p4, %r40, 32;
    mov.u32 %r8, DATA;
    mov.u32 %r9, 0;
    @!%p2 st.shared.u32 [%r8], %r9;
    bar.sync 0;
    @%p4 bra FLAG;
    {data}
    bar.warp.sync -1; // met
    setp.ne.u32 %p5, %r40, 32;
    @%p5 ret;
    {store}.shared.u32 [%r8], %r7; // progress
    ret;
FLAG:
    @%p2 ret;
POLL:
    {load}.shared.u32 %r9, [%r8]; // poll
    setp.eq.u32 %p5, %r9, 0;
    @%p5 bra POLL;
    st.release.sys.global.u32 [%rd40+400], %r7;"
    );
    let acquire = "ld.acquire.sys.global.u32 %r3, [%rd40+400];";
    let (gaps, text) = gaps_of(0, OtherDevice, &writer, &wait(acquire));
    let kinds: Vec<_> = gaps.iter().map(|gap| (gap.side, gap.kind)).collect();
    assert_eq!(kinds, [(W, Uncovered)], "{text}");
    text
}

#[test]
fn an_uncovered_access_names_what_its_block_has_shared_with_the_flags_writer() {
    for data in ["st.global.u32 [%rd2], %r40; // data", COPIED] {
        let relaxed_load = handed_to_the_writer(data, "st.release.cta", "ld.relaxed.cta");
        let relaxed_store = handed_to_the_writer(data, "st.relaxed.cta", "ld.acquire.cta");
        for (text, read) in [(relaxed_load, "last relaxed read"), (relaxed_store, "last acquire")] {
            assert!(text.contains(&format!("seen: {read} of shared memory by the flag's writer")), "{text}");
            for part in ["seen: next barrier of its thread", "seen: next strong write of shared memory"] {
                assert!(text.contains(part), "{text}");
            }
            let lines = ["// met", "// progress", "// poll", "// data"];
            assert!(lines.iter().all(|line| text.contains(line)), "{text}");
        }
    }
}

/// One thread writes an index to shared memory, and another one uses it for an address.
#[test]
fn the_lines_behind_an_address_go_on_through_shared_memory() {
    let body = "
    mov.u32 %r8, DATA;
    setp.ne.u32 %p2, %r40, 0;
    @%p2 bra USE;
    mul.lo.u32 %r1, %r40, 7;
    add.u32 %r2, %r1, 1000000; // index
    st.shared.u32 [%r8+64], %r2; // stored
    st.shared.u32 [%r8+68], %r1; // other
USE:
    bar.sync 0;
    ld.shared.u32 %r3, [%r8+64];
    mul.wide.u32 %rd1, %r3, 4;
    add.s64 %rd2, %rd40, %rd1;
    ld.global.u32 %r4, [%rd2];";
    let module = Module::parse(&kernel(SHARED, body)).unwrap();
    for check in [Some(CheckConfig::default()), None] {
        let mut machine = Machine::with_config(1, device(0), check);
        let buf = machine.upload(0, "buf", &[0u64; 64]).unwrap();
        machine.launch_with(0, &module, "k", launch(1, 64), &[&buf]).unwrap();
        let Err(MachineError::Fault(fault)) = machine.run() else { panic!("no fault") };
        let text = fault.to_string();
        let has = |line: &str| fault.address.iter().any(|at| at.ptx_text.contains(line));
        assert!(has("add.s64 %rd2") && has("ld.shared.u32 %r3") && !has("// other"), "{text}");
        assert_eq!((has("// stored"), has("// index")), (check.is_some(), check.is_some()), "{text}");
    }
}

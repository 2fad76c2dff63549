//! Collected reports: how runs continue behind one, how they are counted, and what ends a run.

use epoxide_vgpu::{
    AcceptList, Assumptions, CheckConfig, Class, DeviceConfig, FaultKind, Hazard, Machine, MachineError,
    Mode, Module, Report, TRIAL_LIVELOCK_LIMIT, Trial, Tried, TriedReport, for_each_seed,
};

use crate::cases::SHARED;
use crate::common::{kernel, launch, run};

fn parse(body: &str) -> Module {
    let ptx = kernel(SHARED, body);
    Module::parse(&ptx).unwrap_or_else(|e| panic!("{e}\n{ptx}"))
}

fn merged(tried: &Tried) -> Vec<Report> {
    tried.reports.iter().map(|tried| tried.report.clone()).collect()
}

fn kinds(reports: &[Report]) -> Vec<&'static str> {
    let mut kinds: Vec<_> = reports.iter().map(Report::kind).collect();
    kinds.sort_unstable();
    kinds
}

/// Two blocks race at two words, and read a word of shared memory that nothing has written.
const THREE: &str = "
    mov.u32 %r1, %ctaid.x;
    cvt.u64.u32 %rd1, %r1;
    add.u64 %rd1, %rd1, 5;
    st.global.u64 [%rd40], %rd1;
    st.global.v2.u64 [%rd40+16], {%rd1, %rd1};
    mov.u32 %r2, DATA;
    ld.shared.u32 %r3, [%r2];
    st.shared.u32 [%r2], %r1;
    bar.sync 0;
    red.relaxed.gpu.global.add.u32 [%rd40+64], 1;";

#[test]
fn one_report_for_each_pair_of_lines_and_the_kernel_goes_on() {
    let module = parse(THREE);
    for_each_seed(20, |seed| {
        let (outcome, reports, words) = run(&module, launch(8, 1), seed, Some(CheckConfig::collecting()));
        outcome.unwrap();
        assert_eq!(kinds(&reports), ["race", "race", "unwritten-read"]);
        assert_eq!(words[8], 8, "every block has run to its end");
        let of = |kind: &str, class: Class| {
            let all = reports.iter().filter(|report| report.kind() == kind && report.class() == class);
            all.map(|report| report.occurrences).collect::<Vec<_>>()
        };
        // Each of the blocks behind the first races with the one before it.
        assert_eq!(of("race", Class::Corrupts), [7, 7]);
        assert_eq!(of("unwritten-read", Class::Lifetime), [8]);
        // A report names the steps of its warp before it.
        let last = reports.iter().find(|report| report.kind() == "unwritten-read").unwrap();
        let steps = &last.fault.traces[0].steps;
        assert!(steps[0].at.ptx_text.starts_with("st.global.v2.u64"), "{}", last.fault);
        assert!(last.fault.at.ptx_text.contains("ld.shared.u32"), "{}", last.fault);
    });
}

#[test]
fn a_report_beyond_the_limit_ends_the_run() {
    let module = parse(THREE);
    for limit in 0..3 {
        let check = CheckConfig { collect: limit, ..CheckConfig::default() };
        let (outcome, reports, _) = run(&module, launch(8, 1), 3, Some(check));
        let Err(MachineError::Fault(fault)) = outcome else { panic!("{outcome:?}") };
        assert_eq!(reports.len(), limit + 1);
        assert_eq!(reports[limit].fault, *fault);
    }
}

#[test]
fn a_read_of_a_register_that_nothing_writes_is_a_report_where_a_lane_executes_it() {
    // Registers, the lane to blame, occurrences.
    type Report<'a> = (&'a [&'a str], u32, u64);
    let table = ".branchtargets OUT, READ;";
    for (body, expected) in [
        ("add.u32 %r1, %r2, %r3;", Some((&["%r2", "%r3"][..], 0, 1))),
        // A guard keeps all lanes out, or all but one.
        ("setp.ge.u32 %p1, %r40, 32;\n@%p1 add.u32 %r1, %r2, 1;", None),
        ("setp.eq.u32 %p1, %r40, 7;\n@%p1 add.u32 %r1, %r2, 1;", Some((&["%r2"], 7, 1))),
        // Every lane reads the guard, and then perhaps the operands.
        ("@%p2 add.u32 %r1, %r40, 1;", Some((&["%p2"], 0, 1))),
        ("@!%p2 add.u32 %r1, %r2, 1;", Some((&["%p2", "%r2"], 0, 1))),
        ("@%p2 selp.u32 %r1, 1, 0, %p2;", Some((&["%p2"], 0, 1))),
        ("mad.lo.u32 %r1, %r2, %r3, %r2;", Some((&["%r2", "%r3"], 0, 1))),
        // A jump to the instruction, by a branch and by a table.
        ("setp.ge.u32 %p1, %r40, 32;\n@%p1 bra A;\nbra B;\nA: add.u32 %r1, %r2, 1;\nB:", None),
        (
            "setp.eq.u32 %p1, %r40, 3;\n@%p1 bra A;\nbra B;\nA: add.u32 %r1, %r2, 1;\nB:",
            Some((&["%r2"], 3, 1)),
        ),
        (
            "setp.eq.u32 %p1, %r40, 5; selp.u32 %r3, 1, 0, %p1;\nto: TARGETS\nbrx.idx %r3, to;
             READ: add.u32 %r1, %r2, 1;\nOUT:",
            Some((&["%r2"], 5, 1)),
        ),
        // Reads in front of a branch's target move it.
        (
            "mov.u32 %r5, 0; setp.ne.u32 %p1, %r5, 0;\n@%p1 add.u32 %r1, %r2, 1;\nL: add.u32 %r6, %r7, 1;\nadd.u32 %r5, %r5, 1;
             setp.lt.u32 %p1, %r5, 3; @%p1 bra L;",
            Some((&["%r7"], 0, 3)),
        ),
        // A constant selector takes bytes of one source only.
        ("prmt.b32 %r1, %r40, %r2, 0x3210;", None),
        ("prmt.b32 %r1, %r2, %r40, 0x7654;", None),
        ("prmt.b32 %r1, %r40, %r2, 0x3214;", Some((&["%r2"], 0, 1))),
        ("prmt.b32 %r1, %r2, %r40, 0xb654;", Some((&["%r2"], 0, 1))),
        ("prmt.b32.b4e %r1, %r40, %r2, 0;", Some((&["%r2"], 0, 1))),
    ] {
        let expected: Option<Report> = expected;
        let body = body.replace("TARGETS", table);
        let module = parse(&format!("{body}\nred.relaxed.gpu.global.add.u32 [%rd40+64], 1;"));
        let run = |check| {
            let (outcome, reports, words) = run(&module, launch(1, 32), 3, check);
            outcome.unwrap_or_else(|e| panic!("{body}: {e}"));
            assert_eq!(words[8], 32, "every lane has run to its end: {body}");
            reports
        };
        assert_eq!(run(None), [], "{body}");
        assert_eq!(run(Some(CheckConfig { races: false, ..CheckConfig::collecting() })), [], "{body}");
        let reports = run(Some(CheckConfig::collecting()));
        let found: Vec<_> = reports
            .iter()
            .map(|report| {
                assert_eq!((report.kind(), report.class()), ("unwritten-register", Class::Lifetime));
                let FaultKind::UnwrittenRegister { registers } = &report.fault.kind else {
                    panic!("{report:?}")
                };
                assert!(registers.iter().all(|name| report.fault.at.ptx_text.contains(name)), "{report:?}");
                (
                    registers.iter().map(String::as_str).collect::<Vec<_>>(),
                    report.fault.lane,
                    report.occurrences,
                )
            })
            .collect();
        let listed = module.kernel("k").unwrap().unwritten_registers();
        let listed: Vec<_> = listed.iter().map(|read| read.register.as_str()).collect();
        let expected: Vec<_> =
            expected.into_iter().map(|(registers, lane, times)| (registers.to_vec(), Some(lane), times)).collect();
        assert_eq!(found, expected, "{body}");
        assert!(found.iter().flat_map(|(registers, ..)| registers).all(|name| listed.contains(name)), "{body}");
    }
}

#[test]
fn a_bad_address_ends_its_run_and_what_was_collected_stays() {
    let module = parse(&format!("{THREE}\nadd.s64 %rd3, %rd40, 65536;\nst.global.u32 [%rd3], %r1;"));
    let (outcome, reports, _) = run(&module, launch(8, 1), 3, Some(CheckConfig::collecting()));
    assert!(matches!(outcome, Err(MachineError::Fault(_))), "{outcome:?}");
    let last = reports.last().unwrap();
    assert_eq!((last.kind(), last.class()), ("out-of-bounds", Class::Bounds));
    assert!(reports.len() > 1, "{:?}", kinds(&reports));
    // Without checks too, the fault is among the reports.
    let (_, reports, _) = run(&module, launch(8, 1), 3, None);
    assert_eq!(kinds(&reports), ["out-of-bounds"]);
}

#[test]
fn a_read_after_a_write_and_a_write_after_a_read_are_two_reports() {
    // The schedule decides which of the two blocks is first.
    let module = parse(
        "
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra WRITE;
    ld.global.u64 %rd1, [%rd40];
    ret;
WRITE:
    st.global.u64 [%rd40], %rd40;",
    );
    let mut all = vec![];
    for seed in 0..20 {
        let (outcome, reports, _) = run(&module, launch(2, 1), seed, Some(CheckConfig::collecting()));
        outcome.unwrap();
        Report::merge(&mut all, reports);
    }
    let mut hazards: Vec<_> =
        all.iter().map(|report| report.hazard().map(Hazard::name).unwrap_or_default()).collect();
    hazards.sort_unstable();
    assert_eq!(hazards, ["read-after-write", "write-after-read"]);
    let text = Report::summary(&all).to_string();
    assert!(text.contains("race (corrupts) write-after-read on 'buf' at PTX line "), "{text}");
    // One line of a list accepts both directions.
    let lines = |hazard| {
        let of = all.iter().find(|report| report.hazard() == Some(hazard)).unwrap().places();
        format!("race k ptx:{} ptx:{} -- known", of[0].at.ptx_line, of[1].at.ptx_line)
    };
    let mut list = AcceptList::parse(&lines(Hazard::ReadAfterWrite)).unwrap();
    let accepted = all.iter().filter(|report| list.accepts(report, &|kernel| kernel.to_owned()).is_some());
    assert_eq!(accepted.count(), 2);
}

/// A bulk store that outlives its block.
const OUTLIVES: &str = "
    mov.u32 %r1, DATA;
    mov.u64 %rd1, 7;
    st.shared.u64 [%r1], %rd1;
    st.shared.u64 [%r1+8], %rd1;
    fence.proxy.async;
    cp.async.bulk.global.shared::cta.bulk_group [%rd40], [%r1], 16;
    cp.async.bulk.commit_group;";

#[test]
fn a_copy_that_outlives_its_block_is_collected_and_lands() {
    let module = parse(OUTLIVES);
    let (outcome, reports, words) = run(&module, launch(1, 1), 1, Some(CheckConfig::collecting()));
    outcome.unwrap();
    assert_eq!(kinds(&reports), ["copy-outlives-block"]);
    assert_eq!(reports[0].class(), Class::Lifetime);
    assert_eq!(words[..2], [7, 7]);
}

#[test]
fn fast_mode_collects_copies_that_outlive_their_blocks_and_marks_what_ended_the_run() {
    // Each block's copy outlives it. The second launch writes to a bad address.
    let outlives = parse(OUTLIVES);
    let beyond = parse("add.s64 %rd3, %rd40, 65536;\nst.global.u32 [%rd3], %r40;");
    for_each_seed(20, |seed| {
        let run = |collect| {
            let config = DeviceConfig { schedule_seed: Some(seed), collect, ..DeviceConfig::default() };
            let mut machine = Machine::with_config(1, config, None);
            let buf = machine.upload(0, "buf", &[0u64; 64]).unwrap();
            machine.launch_with(0, &outlives, "k", launch(3, 1), &[&buf]).unwrap();
            machine.launch_with(0, &beyond, "k", launch(1, 1), &[&buf]).unwrap();
            let outcome = machine.run();
            let Err(MachineError::Fault(fault)) = outcome else { panic!("{outcome:?}") };
            assert_eq!(fault.to_string().contains("because DeviceConfig::collect is 0: "), collect == 0);
            let reports: Vec<_> = machine
                .reports()
                .iter()
                .map(|report| (report.kind(), report.occurrences, report.ended_run))
                .collect();
            (reports, buf.download().unwrap()[..3].to_vec())
        };
        assert_eq!(run(0).0, [("copy-outlives-block", 1, true)]);
        let mut machine = Machine::seeded(1, seed);
        let buf = machine.upload(0, "buf", &[0u64; 64]).unwrap();
        machine.launch_with(0, &outlives, "k", launch(3, 1), &[&buf]).unwrap();
        machine.run().unwrap();
        assert_eq!(kinds(&machine.reports()), ["copy-outlives-block"]);
        let (reports, words) = run(4);
        assert_eq!(reports, [("copy-outlives-block", 3, false), ("out-of-bounds", 1, true)]);
        assert_eq!(words, [7, 7, 0], "the copies have landed");
    });
}

#[test]
fn a_hang_is_a_report_that_ended_the_run_in_both_modes() {
    let module =
        parse("AGAIN: ld.acquire.gpu.global.u32 %r1, [%rd40]; setp.eq.u32 %p1, %r1, 0; @%p1 bra AGAIN;");
    for check in [None, Some(CheckConfig::default()), Some(CheckConfig::collecting())] {
        let (outcome, reports, _) = run(&module, launch(1, 1), 1, check);
        let Err(MachineError::Stuck(text)) = outcome else { panic!("{outcome:?}") };
        let [report] = reports.as_slice() else { panic!("{reports:?}") };
        assert_eq!((report.kind(), report.class(), report.ended_run), ("hang", Class::Synchronisation, true));
        assert!(report.fault.to_string().contains(&text), "{}", report.fault);
        assert!(
            report.fault.at.ptx_text.contains("bra AGAIN") || report.fault.at.ptx_text.contains("ld.acquire")
        );
    }
}

#[test]
fn only_the_report_that_ended_the_run_is_marked_so() {
    let module = parse(&format!("{THREE}\ntrap;"));
    let (_, reports, _) = run(&module, launch(8, 1), 3, Some(CheckConfig::collecting()));
    let ended: Vec<_> = reports.iter().filter(|report| report.ended_run).map(Report::kind).collect();
    assert_eq!(ended, ["trap"]);
    assert!(reports.len() > 1);
}

#[test]
fn a_part_of_an_array_is_downloaded_where_a_kernel_was_stopped_in_the_rest() {
    let [first, second] =
        ["st.global.u64 [%rd40], 7; st.global.u64 [%rd40+8], 8;", "st.global.u64 [%rd40+24], 9; trap;"]
            .map(parse);
    let mut machine = Machine::checked(1, 1);
    let buf = machine.alloc::<u64>(0, "buf", 4).unwrap();
    for module in [&first, &second] {
        machine.launch_with(0, module, "k", launch(1, 1), &[&buf]).unwrap();
    }
    assert!(machine.run().is_err());
    assert_eq!(buf.download_range(0..2).unwrap(), [7, 8]);
    assert_eq!(buf.download_range(1..2).unwrap(), [8]);
    assert_eq!(buf.download_range(4..4).unwrap(), [0; 0]);
    // Unwritten numbers are poison, and no report.
    assert_eq!(buf.download_range(1..3).unwrap().len(), 2);
    for racing in [3..4, 0..4] {
        let error = buf.download_range(racing).unwrap_err().to_string();
        assert!(error.contains("data race at 'buf' + 0x18"), "{error}");
    }
    assert!(buf.download().is_err());
    let error = buf.download_range(2..5).unwrap_err().to_string();
    assert_eq!(error, "numbers 2..5 of 'buf', an array of 4");
}

#[test]
fn a_missing_proxy_fence_has_a_class_of_its_own() {
    let module = parse(
        "
    mov.u32 %r1, DATA;
    st.shared.u64 [%r1], %rd40;
    st.shared.u64 [%r1+8], %rd40;
    cp.async.bulk.global.shared::cta.bulk_group [%rd40], [%r1], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;",
    );
    let (outcome, reports, _) = run(&module, launch(1, 1), 1, Some(CheckConfig::collecting()));
    outcome.unwrap();
    assert_eq!(kinds(&reports), ["missing-proxy-fence"], "{}", reports[0].fault);
    assert_eq!(reports[0].class(), Class::Proxy);
}

/// Thread 0 fills a slot of shared memory twice by bulk loads. Thread 32 reads it, and arrives on the
/// mbarrier that thread 0 waits for by `wait` ahead of the second load.
fn pipeline(wait: &str) -> Module {
    let full = |label: &str, parity: u32| {
        format!("{label}: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], {parity};\n@!%p2 bra {label};")
    };
    let load = "mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r2], 16;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd40], 16, [%r2];";
    let shared =
        ".shared .align 16 .b8 SLOT[16];\n.shared .align 8 .b8 FULL[8];\n.shared .align 8 .b8 EMPTY[8];\n";
    let body = format!(
        "
    mov.u32 %r1, SLOT;
    mov.u32 %r2, FULL;
    mov.u32 %r3, EMPTY;
    setp.ne.u32 %p1, %r40, 0;
    @%p1 bra INITIALISED;
    mbarrier.init.shared.b64 [%r2], 1;
    mbarrier.init.shared.b64 [%r3], 1;
    fence.mbarrier_init.release.cluster;
INITIALISED:
    bar.sync 0;
    setp.eq.u32 %p1, %r40, 32;
    @%p1 bra CONSUMER;
    setp.ne.u32 %p1, %r40, 0;
    @%p1 ret;
    {load}
    {wait}
    {load}
    ret;
CONSUMER:
    {}
    ld.shared.u64 %rd1, [%r1];
    st.global.u64 [%rd40+64], %rd1;
    mbarrier.arrive.shared.b64 %rd2, [%r3];
    {}
    ld.shared.u64 %rd1, [%r1];
    st.global.u64 [%rd40+72], %rd1;",
        full("FIRST", 0),
        full("SECOND", 1)
    );
    let ptx = kernel(shared, &body);
    Module::parse(&ptx).unwrap_or_else(|e| panic!("{e}\n{ptx}"))
}

#[test]
fn a_bulk_load_may_overwrite_what_was_read_where_that_is_assumed() {
    let waits = pipeline("EMPTIED: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;\n@!%p2 bra EMPTIED;");
    let mut assume = Assumptions::default();
    assume.state("ReadsBeforeBulkCopies").unwrap();
    let assuming = CheckConfig { assume, ..CheckConfig::collecting() };
    for_each_seed(20, |seed| {
        let (outcome, reports, _) = run(&waits, launch(1, 64), seed, Some(CheckConfig::collecting()));
        outcome.unwrap();
        assert_eq!(kinds(&reports), ["missing-proxy-fence"]);
        let text = reports[0].fault.to_string();
        // The wait for the mbarrier orders the two, not the barrier ahead of it.
        let seen = text.split("seen: ").nth(1).unwrap_or_default();
        assert!(seen.starts_with("test of an mbarrier") && seen.contains("[%r3], 0"), "{text}");
        assert!(text.contains("assume ReadsBeforeBulkCopies"), "{text}");
        let (outcome, reports, _) = run(&waits, launch(1, 64), seed, Some(assuming));
        outcome.unwrap();
        assert_eq!(reports, []);
    });
    // An order is still needed: here thread 0 waits for the first load alone.
    let early = pipeline("LANDED: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;\n@!%p2 bra LANDED;");
    let raced = (0..20).any(|seed| {
        // The consumer may miss the first phase, and then waits for ever.
        let (_, reports, _) = run(&early, launch(1, 64), seed, Some(assuming));
        reports.iter().any(|report| report.kind() == "race")
    });
    assert!(raced);
}

#[test]
fn a_trial_merges_the_reports_of_its_modes_and_seeds() {
    let module = parse(
        "
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READER;
    st.global.u64 [%rd40], 7;
    st.relaxed.gpu.global.u64 [%rd40+8], 1;
    ret;
READER:
    ld.relaxed.gpu.global.u64 %rd1, [%rd40+8];
    setp.eq.u64 %p1, %rd1, 0;
    @%p1 bra READER;
    ld.global.u64 %rd1, [%rd40];
    st.global.u64 [%rd40+16], %rd1;",
    );
    let run = |modes: &[Mode], body: &Module| {
        Trial { modes: modes.to_vec(), ..Trial::default() }.run(|machine| {
            let buf = machine.upload(0, "buf", &[0u64; 64])?;
            machine.launch_with(0, body, "k", launch(2, 1), &[&buf])?;
            machine.run()?;
            match buf.download()?[2] {
                7 => Ok(()),
                _ => Err("another word than the writer's".into()),
            }
        })
    };
    assert!(run(&[Mode::Fast], &module).is_clean());
    let tried = run(&Mode::ALL, &module);
    assert_eq!((tried.runs, kinds(&merged(&tried))), (60, vec!["race"]));
    let TriedReport { report, seen, .. } = &tried.reports[0];
    assert_eq!(report.occurrences, 20);
    let [runs] = seen.as_slice() else { panic!("{tried}") };
    assert_eq!((runs.mode, runs.seeds.clone()), (Mode::Check, (0..20).collect()));
    assert!(tried.to_string().contains(" in kernel 'k', 20 times: check, seeds 0-19\n"), "{tried}");
    let [failed] = tried.failures.as_slice() else { panic!("{tried}") };
    assert!(failed.runs.mode == Mode::Weak && !failed.runs.seeds.is_empty(), "{tried}");
    let text = tried.to_string();
    assert!(text.contains(": another word than the writer's\n60 runs, 1 report, 1 failure\n"), "{text}");
    // A fault is a report and no failure.
    let beyond = parse("add.s64 %rd3, %rd40, 65536;\nst.global.u32 [%rd3], %r40;");
    let tried = run(&Mode::ALL, &beyond);
    assert_eq!((kinds(&merged(&tried)), tried.failures.len()), (vec!["out-of-bounds"], 0), "{tried}");
    let all = "fast, seeds 0-19; check, seeds 0-19; weak, seeds 0-19\n60 runs, 1 report, 0 failures\n";
    assert!(tried.to_string().ends_with(&format!(", 60 times: {all}")), "{tried}");
}

#[test]
fn arrays_are_compared_behind_the_next_run() {
    let module = parse("mov.u64 %rd1, 7; st.global.u64 [%rd40], %rd1;");
    let mut machine = Machine::checked(2, 0);
    let wrong = |machine: &mut Machine| {
        let Err(MachineError::Mismatch(all)) = machine.run() else { panic!("no array is wrong") };
        all.iter().map(|m| (m.label.clone(), m.len, m.expected_len, m.wrong)).collect::<Vec<_>>()
    };
    for device in 0..2 {
        let words = machine.upload(device, "words", &[0u64; 3]).unwrap();
        machine.launch_with(device, &module, "k", launch(1, 1), &[&words]).unwrap();
        // The comparison keeps the array.
        machine.expect(&words, [7, device as u64, 0]);
    }
    assert_eq!(wrong(&mut machine), [("words of device 1".to_owned(), 3, 3, 1)]);
    // Each comparison is made once.
    machine.run().unwrap();
    let words = machine.upload(0, "words", &[7u64; 3]).unwrap();
    machine.expect(&words, std::iter::repeat(7));
    machine.expect(&words, [7; 9]);
    machine.expect(&words, [7; 3]);
    machine.expect(&words.slice(1..3, "part").unwrap(), [7; 1]);
    let name = |part: &str| format!("{part}words of device 0");
    assert_eq!(wrong(&mut machine), [(name(""), 3, 4, 0), (name(""), 3, 9, 0), (name("part of "), 2, 1, 0)]);
    // Each wrong array of a trial is a failure of its own.
    let tried = Trial { modes: vec![Mode::Fast], seeds: 4, ..Trial::default() }.run(|machine| {
        for (label, value) in [("a", 1), ("b", machine.seed() % 2)] {
            let array = machine.upload(0, label, &[0u64])?;
            machine.expect(&array, [value]);
        }
        Ok(machine.run()?)
    });
    let failures: Vec<_> =
        tried.failures.iter().map(|f| (f.text.as_str(), f.runs.seeds.as_slice())).collect();
    let text = |label| format!("1 of 1 number of '{label}' is wrong, the first at 0: 0, expected 1");
    let expected = [(text("a"), &[0u64, 1, 2, 3][..]), (text("b"), &[1, 3])];
    assert_eq!(failures, expected.each_ref().map(|(text, seeds)| (text.as_str(), *seeds)), "{tried}");
    // A fault ends the run, and says more than the contents.
    machine.expect(&words, [0; 3]);
    let beyond = parse("st.global.u64 [%rd40+65536], %rd40;");
    machine.launch_with(0, &beyond, "k", launch(1, 1), &[&words]).unwrap();
    assert!(matches!(machine.run(), Err(MachineError::Fault(_))));
    machine.run().unwrap();
}

#[test]
fn a_trial_leaves_accepted_reports_out_and_lists_unused_entries() {
    let module = parse(THREE);
    let run = |accept: &str| {
        let accept = AcceptList::parse(accept).unwrap();
        Trial { seeds: 3, modes: vec![Mode::Check], accept, ..Trial::default() }.run(|machine| {
            let buf = machine.upload(0, "buf", &[0u64; 64])?;
            machine.launch_with(0, &module, "k", launch(8, 1), &[&buf])?;
            Ok(machine.run()?)
        })
    };
    let tried = run("race k ptx:9999 -- another line\n* * ptx:9998 -- a second one");
    assert_eq!((tried.reports.len(), tried.accepted.len(), tried.is_clean()), (3, 0, false), "{tried}");
    let text = "\nline 1 of the accept list has accepted nothing: another line\n\
                line 2 of the accept list has accepted nothing: a second one\n3 runs, 3 reports, 0 failures\n";
    assert!(tried.to_string().ends_with(text), "{tried}");
    let entry = |TriedReport { report, .. }: &TriedReport| {
        format!("{} k ptx:{} -- known", report.kind(), report.places()[0].at.ptx_line)
    };
    let one = run(&entry(&tried.reports[0]));
    assert_eq!((one.accepted, one.unused.len()), (tried.reports[..1].to_vec(), 0));
    assert!(one.reports == tried.reports[1..], "{:?}", one.reports);
    let all = run(&tried.reports.iter().map(entry).collect::<Vec<_>>().join("\n"));
    assert!(all.is_clean() && all.accepted.len() == 3, "{all}");
    assert_eq!(all.to_string(), "3 runs, 0 reports, 3 accepted, 0 failures\n");
}

/// A warp polls and stores the values, so that the block never only waits.
const WAITS_FOR_ITSELF: &str = "
AGAIN:
    ld.relaxed.gpu.global.u32 %r1, [%rd40];
    mov.u32 %r2, DATA;
    st.shared.u32 [%r2], %r1;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra AGAIN;";

#[test]
fn hangs_of_a_trial_come_soon_and_list_the_waits() {
    let polls = "
POLL:
    ld.relaxed.gpu.global.u32 %r1, [%rd40+8];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra POLL;";
    let barrier = "
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 32;
    @%p1 bra FIRST;
    bar.sync 1, 64;
FIRST:
    bar.sync 2, 64;";
    for (body, devices, kind, waits) in [
        (polls, 2, "hang", "\n    device 0: kernel 'k': 2 groups of lanes are alive\n"),
        (WAITS_FOR_ITSELF, 1, "livelock", "\n    kernel 'k': 2 groups of lanes are alive\n"),
        (barrier, 1, "deadlock", "\n    kernel 'k': 2 groups of lanes are alive\n"),
    ] {
        let module = parse(body);
        let trial = Trial { devices, seeds: 1, modes: vec![Mode::Fast], ..Trial::default() };
        let tried = trial.run(|machine| {
            let buf = machine.symmetric("buf", &[0u64; 64])?;
            for device in 0..machine.devices() {
                machine.launch_with(device, &module, "k", launch(1, 64), &[buf.of(device)])?;
            }
            Ok(machine.run()?)
        });
        let text = tried.to_string();
        assert_eq!((kinds(&merged(&tried)), tried.failures.len()), (vec![kind], 0), "{text}");
        assert!(text.contains(waits) && text.contains("\n      block [0, 0, 0] warp"), "{text}");
        match &tried.reports[0].report.fault.kind {
            FaultKind::Hang(_) => {
                let device = "\n    device 1: kernel 'k': 2 groups of lanes are alive\n      block [0, 0, 0] warps 0-1 \
                              lanes 0xffffffff: spins on 'buf of device 1' + 0x8";
                assert!(text.contains(device), "{text}");
            }
            FaultKind::Livelock { instructions, .. } => {
                assert!((TRIAL_LIVELOCK_LIMIT..TRIAL_LIVELOCK_LIMIT + 4096).contains(instructions), "{text}");
            }
            _ => {}
        }
    }
    // A limit of the device's own.
    let device = DeviceConfig { livelock_limit: Some(1000), ..DeviceConfig::default() };
    let module = parse(WAITS_FOR_ITSELF);
    let tried = Trial { seeds: 1, device, ..Trial::default() }.run(|machine| {
        let buf = machine.upload(0, "buf", &[0u64; 64])?;
        machine.launch_with(0, &module, "k", launch(1, 32), &[&buf])?;
        Ok(machine.run()?)
    });
    let FaultKind::Livelock { instructions, .. } = tried.reports[0].report.fault.kind else {
        panic!("{tried}")
    };
    assert!((1000..5000).contains(&instructions), "{tried}");
}

#[test]
fn a_ring_that_waits_for_itself_ends_in_fast_mode_too() {
    let module = parse(WAITS_FOR_ITSELF);
    let device = DeviceConfig { livelock_limit: Some(100_000), ..DeviceConfig::default() };
    for check in [None, Some(CheckConfig::default()), Some(CheckConfig::collecting())] {
        let mut machine = Machine::with_config(1, device.clone(), check);
        let buf = machine.upload(0, "buf", &[0u64; 64]).unwrap();
        machine.launch_with(0, &module, "k", launch(1, 32), &[&buf]).unwrap();
        let Err(MachineError::Fault(fault)) = machine.run() else { panic!("no fault") };
        assert!(matches!(fault.kind, FaultKind::Livelock { .. }), "{fault}");
        assert_eq!(kinds(&machine.reports()), ["livelock"]);
    }
}

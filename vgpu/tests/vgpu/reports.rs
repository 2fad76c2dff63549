//! Reports that are collected: what goes on behind one, how they are counted, and what ends a run.

use epoxide_vgpu::{
    CheckConfig, Class, DeviceConfig, FaultKind, GridConfig, Machine, MachineError, Module, Report,
};

use crate::cases::SHARED;
use crate::common::{kernel, launch};

fn parse(body: &str) -> Module {
    let ptx = kernel(SHARED, body);
    Module::parse(&ptx).unwrap_or_else(|e| panic!("{e}\n{ptx}"))
}

/// Runs a kernel on a buffer of zeros; gives the outcome of the run, its reports and the buffer.
fn run(
    module: &Module,
    shape: GridConfig,
    seed: u64,
    check: Option<CheckConfig>,
) -> (Result<(), MachineError>, Vec<Report>, Vec<u64>) {
    let device = DeviceConfig { schedule_seed: Some(seed), ..DeviceConfig::default() };
    let mut machine = Machine::with_config(1, device, check);
    let buf = machine.upload(0, "buf", &[0u64; 64]).unwrap();
    machine.launch_with(0, module, "k", shape, &[&buf]).unwrap();
    let outcome = machine.run();
    // Behind a run that a fault has ended, reading is a race.
    (outcome, machine.reports(), buf.download().unwrap_or_default())
}

fn kinds(reports: &[Report]) -> Vec<&str> {
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
    for seed in 0..20 {
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
        assert!(steps[0].ptx_text.starts_with("st.global.v2.u64"), "{}", last.fault);
        assert!(last.fault.ptx_text.contains("ld.shared.u32"), "{}", last.fault);
    }
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
fn a_copy_that_outlives_its_block_is_collected_and_lands() {
    let module = parse(
        "
    mov.u32 %r1, DATA;
    mov.u64 %rd1, 7;
    st.shared.u64 [%r1], %rd1;
    st.shared.u64 [%r1+8], %rd1;
    fence.proxy.async;
    cp.async.bulk.global.shared::cta.bulk_group [%rd40], [%r1], 16;
    cp.async.bulk.commit_group;",
    );
    let (outcome, reports, words) = run(&module, launch(1, 1), 1, Some(CheckConfig::collecting()));
    outcome.unwrap();
    assert_eq!(kinds(&reports), ["copy-outlives-block"]);
    assert_eq!(reports[0].class(), Class::Lifetime);
    assert_eq!(words[..2], [7, 7]);
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

#[test]
fn a_ring_that_waits_for_itself_ends_in_fast_mode_too() {
    // A warp polls and stores what it saw, so that the block never only waits.
    let module = parse(
        "
AGAIN:
    ld.relaxed.gpu.global.u32 %r1, [%rd40];
    mov.u32 %r2, DATA;
    st.shared.u32 [%r2], %r1;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra AGAIN;",
    );
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

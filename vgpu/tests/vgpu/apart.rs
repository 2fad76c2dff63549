//! Block barriers and warps whose lanes may be apart. By the manual every lane waits at
//! `barrier.sync` for itself; an H200 let lanes pass while others of their warp still waited in a
//! loop (docs/KERNELS.md). So a program must make the warp converge first.

use epoxide_vgpu::{Assumptions, DeviceConfig, Fault, FaultKind};

use crate::common::*;

/// Lane 0 waits for a word and the others have nothing to wait for; all read the data of the word
/// behind `meeting`. Warp 1 writes it.
fn fault_seen(meeting: &str) -> String {
    kernel(
        "",
        &format!(
            "setp.ge.u32 %p1, %r40, 32; @%p1 bra WRITE;
             setp.ne.u32 %p2, %r40, 0; @%p2 bra MEET;
         WAIT:
             ld.acquire.gpu.global.u64 %rd1, [%rd40+512]; setp.eq.u64 %p3, %rd1, 0; @%p3 bra WAIT;
             bra MEET;
         WRITE:
             setp.ne.u32 %p2, %r40, 32; @%p2 bra MEET;
             st.global.u64 [%rd40+520], 7; st.release.gpu.global.u64 [%rd40+512], 1;
         MEET:
             {meeting}
             ld.global.u64 %rd2, [%rd40+520]; st.global.u64 [%rd42], %rd2;"
        ),
    )
}

/// The default schedule and some that a seed draws.
fn schedules() -> impl Iterator<Item = DeviceConfig> {
    let seeded = |seed| DeviceConfig { schedule_seed: Some(seed), ..DeviceConfig::default() };
    std::iter::once(DeviceConfig::default()).chain((0..tier(20, 200)).map(seeded))
}

#[test]
fn lanes_that_wait_are_not_left_behind_at_a_barrier() {
    for device in schedules() {
        let run = |meeting: &str| {
            let mut run = Run::new(&fault_seen(meeting), &[0; 66], launch(1, 64), &device);
            run.finish().map(|()| run.words())
        };
        let fault = run("barrier.sync 0;").unwrap_err();
        let FaultKind::ApartAtBarrier { barrier: 0, together, live: u32::MAX, .. } = fault.kind else {
            panic!("{fault}");
        };
        assert!(together == 1 || together == u32::MAX - 1, "{fault}");
        assert!(
            fault.at.ptx_text.contains("barrier.sync") && fault.to_string().contains("`bar.warp.sync`"),
            "{fault}"
        );
        for meeting in ["bar.warp.sync 0xffffffff; barrier.sync 0;", "bar.sync 0;"] {
            assert_eq!(run(meeting).unwrap()[..64], [7; 64], "{meeting}");
        }
    }
}

#[test]
fn lanes_meet_behind_a_branch_without_checks_where_the_device_assumes_so() {
    let module = kernel(
        "",
        "setp.ne.u32 %p1, %r40, 0; @%p1 bra MEET; add.u32 %r1, %r40, 1;
         MEET: activemask.b32 %r2; cvt.u64.u32 %rd1, %r2; st.global.u64 [%rd42], %rd1;",
    );
    let all_meet = |seed, converged_warps| {
        let mut assume = Assumptions::default();
        assume.converged_warps = converged_warps;
        let device = DeviceConfig { schedule_seed: Some(seed), assume, ..DeviceConfig::default() };
        let mut run = Run::new(&module, &[0; 66], launch(1, 32), &device);
        run.finish().unwrap();
        run.words()[..32] == [u64::from(u32::MAX); 32]
    };
    assert!((0..200).all(|seed| all_meet(seed, true)));
    assert!((0..200).any(|seed| !all_meet(seed, false)));
}

/// The fault of these two warps in the first run that ends by one, if any; the same on every
/// schedule.
fn outcome(body: &str) -> Option<Box<Fault>> {
    let mut outcomes = schedules()
        .map(|device| Run::new(&kernel("", body), &[0; 64], launch(1, 64), &device).finish().err());
    let first = outcomes.next().flatten();
    for other in outcomes {
        assert_eq!(other.is_some(), first.is_some(), "{body}\n{other:?}\n{first:?}");
    }
    first
}

/// A branch that lane 0 takes, and one that the lanes below 16 take.
const PART: &str =
    "and.b32 %r1, %r40, 31; setp.ne.u32 %p1, %r1, 0; @%p1 bra JOIN; st.global.u64 [%rd42], 1; JOIN:";
const HALVES: &str = "and.b32 %r1, %r40, 16; setp.ne.u32 %p1, %r1, 0; @%p1 bra HIGH;";

#[test]
fn only_a_meeting_of_the_whole_warp_brings_it_together() {
    let refused = [
        format!("{PART} barrier.sync 0;"),
        format!("{PART} barrier.cta.sync 1, 64;"),
        format!("{PART} barrier.arrive 0, 64;"),
        format!("{PART} barrier.red.popc.u32 %r2, 0, %p1;"),
        // Collectives wait for the lanes, but do not keep them together.
        format!("{PART} shfl.sync.idx.b32 %r2, %r1, 0, 31, 0xffffffff; vote.sync.all.pred %p2, %p1, -1; barrier.sync 0;"),
        // Some of them met.
        format!("{PART} setp.lt.u32 %p2, %r1, 16; @%p2 bar.warp.sync 0xffff; barrier.sync 0;"),
        // Lanes that meet in two places go on in two places.
        format!("{HALVES} bar.warp.sync -1; barrier.sync 0; bra END; HIGH: bar.warp.sync -1; barrier.sync 0; END:"),
        format!("{HALVES} barrier.sync 0; bra END; HIGH: barrier.sync 0; END:"),
        // Together, and then apart again.
        format!("{PART} bar.warp.sync -1; barrier.sync 0; @%p1 bra AGAIN; st.global.u64 [%rd42], 2; AGAIN: barrier.sync 1;"),
        format!("{PART} @%p1 bar.warp.sync 0xfffffffe; barrier.sync 0;"),
        "and.b32 %r1, %r40, 1; setp.ne.u32 %p1, %r1, 0; @%p1 barrier.sync 0; @!%p1 barrier.sync 0;".to_owned(),
        "and.b32 %r1, %r40, 1; T: .branchtargets A, B; brx.idx %r1, T; A: mov.u32 %r2, 1; B: barrier.sync 0;".to_owned(),
        // The number of iterations of each lane is its number.
        "and.b32 %r1, %r40, 31; mov.u32 %r2, 0; L: add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, %r1; @%p1 bra L; barrier.sync 0;".to_owned(),
    ];
    for body in &refused {
        let fault = outcome(body).unwrap_or_else(|| panic!("passes: {body}"));
        assert!(matches!(fault.kind, FaultKind::ApartAtBarrier { .. }), "{body}\n{fault}");
    }
}

#[test]
fn warps_that_are_together_pass() {
    let passing = [
        format!("{PART} bar.warp.sync 0xffffffff; barrier.sync 0;"),
        format!("{PART} bar.warp.sync -1; barrier.arrive 1, 128; barrier.red.popc.u32 %r2, 0, %p1;"),
        // In front of an aligned barrier the assembler brings the warp together, and it stays so.
        format!("{PART} bar.sync 0; barrier.sync 1;"),
        // The predicates divert no lane.
        "setp.eq.u32 %p1, %r40, 0; @%p1 st.global.u64 [%rd42], 1; barrier.sync 0;".to_owned(),
        // Whole warps part, lanes do not; nor do lanes that all take the same way.
        "setp.ge.u32 %p1, %r40, 32; @%p1 bra HIGH; barrier.sync 0; bra END; HIGH: barrier.sync 0; END:"
            .to_owned(),
        "setp.ge.u32 %p1, %r40, 64; @%p1 bra END; barrier.sync 0; END:".to_owned(),
        // Lanes that have ended are no longer of the warp.
        format!("{HALVES} exit; HIGH: bar.warp.sync 0xffff0000; barrier.sync 0;"),
        "setp.lt.u32 %p1, %r40, 5; @%p1 exit; barrier.sync 0;".to_owned(),
    ];
    for body in &passing {
        assert!(outcome(body).is_none(), "{body}\n{}", outcome(body).unwrap());
    }
    // A warp of 8 lanes.
    let mut run = Run::new(&kernel("", &passing[0]), &[0; 64], launch(1, 40), &DeviceConfig::default());
    run.finish().unwrap();
}

#[test]
fn the_report_names_the_branch() {
    let body = format!("{PART}\nbarrier.sync 0;");
    let fault = outcome(&body).unwrap();
    let FaultKind::ApartAtBarrier { parted_on, .. } = fault.kind else { panic!("{fault}") };
    let ptx = kernel("", &body);
    assert!(ptx.lines().nth(parted_on - 1).unwrap().contains("@%p1 bra JOIN"), "{fault}");
    assert_eq!(fault.at.ptx_line, parted_on + 1);
}

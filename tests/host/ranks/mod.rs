//! The harness for tests on several ranks, as a test uses it: passes, failures, hangs, deaths and
//! skips.

mod common;
mod helper;
mod session;

use std::time::{Duration, Instant};

use self::common::{PATIENCE, hurried, processes, sum_of_ranks, threads};
use epoxide::{Error, Result};
use epoxide_launch::RankExit;
use epoxide_testing::ranks::{Cause, Context, End, Failed, Kind, Outcome, RankReport, Run, SkipCode};

/// The report about a rank.
fn of(failed: &Failed, rank: u32) -> &RankReport {
    failed.ranks.iter().find(|report| report.rank == rank).unwrap()
}

#[test]
fn ranks_form_a_group() {
    for size in [1, 3] {
        assert_eq!(processes(size).run(sum_of_ranks), Outcome::Passed);
        assert_eq!(threads(size).run(sum_of_ranks), Outcome::Passed);
    }
}

#[test]
fn processes_are_processes() {
    let own = std::process::id();
    // In the ranks, `own` is the rank's.
    let outcome = processes(2).run(move |ctx| -> Result<()> {
        let pids = ctx.group()?.all_gather(&std::process::id().to_le_bytes())?;
        assert_ne!(pids[0], pids[1]);
        assert_eq!(own, std::process::id());
        for (name, value) in [("RANK", ctx.rank()), ("WORLD_SIZE", 2), ("LOCAL_RANK", ctx.rank())] {
            assert_eq!(std::env::var(name), Ok(value.to_string()));
        }
        assert!(std::env::var("MASTER_PORT").is_ok_and(|port| port.parse::<u16>().is_ok()));
        Ok(())
    });
    assert_eq!(outcome, Outcome::Passed);
}

/// Stays a function of its own, because a backtrace must name it.
#[inline(never)]
fn fails(ctx: &Context) -> Result<()> {
    if ctx.rank() == 1 {
        ctx.doing("failing");
        assert_eq!(1 + 1, 3, "the sum is wrong");
    }
    ctx.group()?.barrier(PATIENCE)
}

#[test]
fn a_panic_is_reported_with_its_backtrace() {
    for run in [processes(3), threads(3)] {
        let start = Instant::now();
        let failed = run.try_run(fails).unwrap_err();
        assert!(start.elapsed() < PATIENCE);
        assert_eq!(failed.kind, Kind::Failed);
        let first = &failed.ranks[0];
        assert_eq!((first.rank, first.operation.as_str()), (1, "failing"), "{failed}");
        let End::Failed { text, cause: Cause::Own, backtrace: Some(backtrace) } = &first.end else {
            panic!("{failed}")
        };
        assert!(text.contains(file!()) && text.contains("the sum is wrong"), "{text}");
        assert!(backtrace.contains("fails"), "{backtrace}");
        for other in [0, 2] {
            let report = of(&failed, other);
            assert!(report.end.to_string().contains("given up: rank 1: panicked"), "{report}");
            assert!(matches!(report.end, End::Failed { cause: Cause::Group, .. }), "{report}");
        }
        let whole = failed.to_string();
        assert!(
            whole.contains("a_panic_is_reported_with_its_backtrace: rank 1 of 3 failed first"),
            "{whole}"
        );
    }
}

#[test]
fn an_error_is_reported() {
    let failed = processes(2).try_run(|ctx| match ctx.rank() {
        0 => Err(Error::argument("x", 1, "bad")),
        _ => Ok(()),
    });
    let failed = failed.unwrap_err();
    assert_eq!(failed.ranks[0].end.to_string(), "x = 1: bad");
    assert_eq!(of(&failed, 1).end, End::Passed);
}

#[test]
#[should_panic(expected = "rank 1 of 2 failed first")]
fn run_panics_with_the_report() {
    let _ = threads(2).run(fails);
}

#[inline(never)]
fn hangs_here() {
    std::thread::sleep(3 * PATIENCE);
    // Without a last step the call above takes this frame's place.
    std::hint::black_box(());
}

#[test]
fn a_hang_of_a_process_is_reported_with_backtraces_and_operations() {
    hang(processes(3));
}

#[test]
fn a_hang_of_a_thread_is_reported_with_backtraces_and_operations() {
    hang(threads(3));
}

fn hang(run: Run) {
    let failed = hurried(run, Duration::from_secs(3)).try_test("hangs", |ctx| {
        let group = ctx.group()?;
        match ctx.rank() {
            0 => group.barrier(PATIENCE),
            1 => {
                ctx.doing("hanging");
                hangs_here();
                Ok(())
            }
            _ => Ok(()),
        }
    });
    let failed = failed.unwrap_err();
    assert_eq!(failed.kind, Kind::TimedOut);
    assert!(failed.summary.contains("rank 0, 1 not through after 3s"), "{failed}");
    let trace = |rank| match &of(&failed, rank).end {
        End::Unfinished { trace } => trace.clone(),
        other => panic!("{other}"),
    };
    assert_eq!(of(&failed, 1).operation, "hanging");
    assert!(trace(1).contains("hangs_here") && trace(1).contains("<- the rank"), "{}", trace(1));
    assert_eq!(of(&failed, 0).operation, "barrier (call 1 of the group)");
    assert!(trace(0).contains("barrier"), "{}", trace(0));
    assert_eq!(of(&failed, 2).end, End::Passed);
}

#[test]
fn a_stopped_rank_is_reported() {
    let failed = hurried(processes(2), Duration::from_secs(3)).try_test("stops", |ctx| {
        if ctx.rank() == 1 {
            ctx.doing("stopping");
            let own = rustix::process::getpid();
            rustix::process::kill_process(own, rustix::process::Signal::STOP).unwrap();
            // The signal may be taken by another thread first.
            std::thread::sleep(PATIENCE);
        }
    });
    let failed = failed.unwrap_err();
    let End::Unfinished { trace } = &of(&failed, 1).end else { panic!("{failed}") };
    assert!(trace.contains("T (stopped)") && trace.contains("no backtrace"), "{trace}");
}

#[test]
fn a_killed_rank_is_reported() {
    let failed = processes(3).try_run(|ctx| {
        if ctx.rank() == 2 {
            eprintln!("my last words");
            ctx.doing("dying");
            let own = rustix::process::getpid();
            rustix::process::kill_process(own, rustix::process::Signal::KILL).unwrap();
        }
        ctx.group()?.barrier(PATIENCE)
    });
    let failed = failed.unwrap_err();
    let first = &failed.ranks[0];
    assert_eq!((first.rank, &first.end), (2, &End::Died(RankExit::Signal(9))), "{failed}");
    assert_eq!(first.operation, "dying");
    assert!(first.output.contains("my last words"), "{failed}");
    let report = of(&failed, 0).end.to_string();
    assert!(report.contains("given up: rank 2: was ended by signal 9 (SIGKILL)"), "{failed}");
}

#[test]
fn a_rank_that_exits_is_reported() {
    let failed = processes(2).try_run(|ctx| {
        if ctx.rank() == 0 {
            std::process::exit(0);
        }
    });
    assert_eq!(of(&failed.unwrap_err(), 0).end, End::Died(RankExit::Code(0)));
}

#[test]
fn a_skip_that_all_agree_on_is_no_failure() {
    for run in [processes(3), threads(3)] {
        let outcome = run.try_run(|ctx| {
            if ctx.size() % 2 == 1 {
                ctx.skip(SkipCode::OddWorldSize, format!("{} ranks make no pairs", ctx.size()));
            }
        });
        let reason = "3 ranks make no pairs".to_owned();
        assert_eq!(outcome, Ok(Outcome::Skipped { code: SkipCode::OddWorldSize, reason }));
    }
}

#[test]
fn ranks_that_disagree_on_a_skip_fail() {
    for run in [processes(3), threads(3)] {
        let failed = run.try_run(|ctx| {
            if ctx.rank() == 1 {
                ctx.skip(SkipCode::NoRdma, "no device");
            }
            ctx.group()?.barrier(PATIENCE)
        });
        let failed = failed.unwrap_err();
        assert_eq!(failed.kind, Kind::Disagreement);
        assert!(failed.summary.contains("rank 0: not skipped, rank 1: no RDMA, rank 2: not"), "{failed}");
    }
    let failed = threads(2).try_run(|ctx| -> Result<()> {
        let code = if ctx.rank() == 0 { SkipCode::NoRdma } else { SkipCode::TooFewGpus };
        ctx.skip(code, "nothing here")
    });
    assert_eq!(failed.map_err(|failed: Failed| failed.kind), Err::<Outcome, _>(Kind::Disagreement));
}

#[test]
fn a_wrong_path_is_told() {
    let failed = processes(1).test("no::such::test").try_run(|_| ()).unwrap_err();
    assert!(failed.to_string().contains("give that with Run::test"), "{failed}");
    assert_eq!(threads(0).try_run(|_| ()).unwrap_err().kind, Kind::NotStarted);
}

#[test]
fn no_process_is_left() {
    // The ranks' processes, and what they have started, have the name of this test in their
    // environment.
    let left = || {
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let environments = processes.filter_map(|process| std::fs::read(process.path().join("environ")).ok());
        let name = b"\"ranks::no_process_is_left\"";
        environments.filter(|text| text.windows(name.len()).any(|part| part == name)).count()
    };
    let _ = processes(2).try_run(|ctx| {
        // Something that would outlive its rank.
        let started = std::process::Command::new("sh").args(["-c", "sleep 1000 &"]).status();
        assert!(started.unwrap().success());
        assert_eq!(ctx.rank(), 0, "fail");
    });
    // A killed process that is not this one's child may take a moment to disappear.
    let start = Instant::now();
    while left() > 0 {
        assert!(start.elapsed() < PATIENCE, "{} processes are left", left());
        std::thread::sleep(Duration::from_millis(10));
    }
}

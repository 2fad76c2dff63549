//! Ranks that run many tests.

use std::sync::atomic::{AtomicU32, Ordering};

use epoxide::Result;
use epoxide_testing::ranks::{Kind, Outcome, SkipCode};

use super::common::{PATIENCE, processes, sum_of_ranks, threads};

#[test]
fn ranks_and_their_group_stay() {
    for run in [processes(3), threads(3)] {
        let mut session = run.session();
        assert_eq!(session.test("first", sum_of_ranks), Outcome::Passed);
        for number in 0..20 {
            let outcome = session.test("again", move |ctx| -> Result<()> {
                let all = ctx.group()?.all_gather(&[number])?;
                assert_eq!(all, vec![vec![number]; 3]);
                Ok(())
            });
            assert_eq!(outcome, Outcome::Passed);
        }
        let skipped = session.test("skips", |ctx| -> Result<()> { ctx.skip(SkipCode::Unsupported, "here") });
        assert!(matches!(skipped, Outcome::Skipped { code: SkipCode::Unsupported, .. }));
        assert_eq!(session.test("last", sum_of_ranks), Outcome::Passed);
    }
}

#[test]
fn processes_keep_their_state() {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let mut session = processes(2).session();
    for number in 0..3 {
        let outcome = session.test("count", move |_| {
            assert_eq!(COUNT.fetch_add(1, Ordering::Relaxed), number);
        });
        assert_eq!(outcome, Outcome::Passed);
    }
}

#[test]
fn nothing_runs_after_a_failure() {
    for run in [processes(2), threads(2)] {
        let mut session = run.session();
        let failed = session.try_test("fails", |ctx| {
            assert_eq!(ctx.rank(), 0, "not mine");
            ctx.group()?.barrier(PATIENCE)
        });
        let failed = failed.unwrap_err();
        assert!(failed.to_string().contains("nothing_runs_after_a_failure, fails: rank 1 of 2"), "{failed}");
        let next = session.try_test("next", |_| ()).unwrap_err();
        assert_eq!(next.kind, Kind::NotStarted);
    }
}

//! Ranks that are kept for several tests.

use std::cell::RefCell;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::panic::Location;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::child::{self, Call};
use super::context::Context;
use super::outcome::Outcome;
use super::processes::Processes;
use super::report::{End, Failed, Kind, RankReport, evaluate};
use super::run::Run;
use super::threads::Threads;
use super::trace;
use super::verdict::{IntoVerdict, RankMain, judge};

/// Time for the other ranks to end after a rank has failed. They end as soon as they detect it, so
/// only ranks that hang take this long.
const SETTLE: Duration = Duration::from_secs(30);
/// Time for the others to skip a test that a rank has skipped, before the group is aborted.
const SKIP_SETTLE: Duration = Duration::from_secs(1);

/// Started ranks of any kind, as the test sees them.
pub(super) trait Ranks: std::fmt::Debug {
    /// The number of ranks.
    fn size(&self) -> u32;
    /// Has all ranks run the test of this number.
    fn begin(&mut self, number: u64, rank_main: Arc<RankMain>);
    /// The ranks that are through with it since the last call; waits up to `timeout` for one.
    fn wait(&mut self, timeout: Duration) -> Vec<(u32, End, SystemTime)>;
    /// Sends the outcome of all ranks to each.
    fn conclude(&mut self, outcome: &Outcome);
    /// Gives the group up.
    fn give_up(&self, reason: &str);
    /// State of the rank's thread.
    fn trace(&mut self, rank: u32, end: Instant) -> String;
    /// The rank's last operation.
    fn operation(&self, rank: u32) -> String;
    /// The last of what it printed.
    fn output(&self, rank: u32) -> String;
}

/// Ranks, and their group, that run one test after another: starting processes takes longer than
/// most tests.
///
/// ```no_run
/// use epoxide_testing::ranks::Run;
///
/// #[test]
/// fn collectives() {
///     let mut session = Run::new(8).processes().session();
///     let _ = session.test("barrier", |ctx| ctx.group()?.barrier(ctx.group()?.timeout()));
///     let _ = session.test("all_gather", |ctx| ctx.group()?.all_gather(b"x").map(drop));
/// }
/// ```
///
/// Processes run the test's code up to [`Run::session`](super::Run::session) and then the session's
/// tests as they come. So the set of tests must not depend on state of the parent alone. After a
/// failure the ranks are ended, and no further test runs.
#[derive(Debug)]
pub struct Session {
    inner: Inner,
    path: String,
    next: u64,
    timeout: Duration,
    /// The kernel kills the processes when the thread that has started them ends: the session stays
    /// on it.
    _thread: PhantomData<*const ()>,
}

#[derive(Debug)]
enum Inner {
    /// The ranks are elsewhere, and this is the test.
    Parent(Box<dyn Ranks>),
    /// This process is a rank.
    Rank(Box<child::RankProcess>),
    /// This process is a rank of another session of the same test.
    Elsewhere,
    /// A test has failed.
    Over,
}

impl Session {
    pub(super) fn open(run: Run, site: &Location<'_>, function: Option<&str>) -> Result<Session, Failed> {
        let path = run.test.clone().or_else(|| test_path(function));
        let name = path.clone().unwrap_or_else(|| "a test".to_owned());
        let session = |inner| Session {
            inner,
            path: name.clone(),
            next: 0,
            timeout: run.timeout,
            _thread: PhantomData,
        };
        if run.size == 0 {
            return Err(Failed::to_start(&name, "a group has at least one rank"));
        }
        let site = site.to_string();
        let visit = count_visit(&name, &site);
        if let Some(call) = Call::of_this_process().map_err(|error| Failed::to_start(&name, error))? {
            if (&call.site, call.visit) != (&site, visit) {
                return Ok(session(Inner::Elsewhere));
            }
            let rank = child::RankProcess::enter(call).map_err(|error| Failed::to_start(&name, error))?;
            return Ok(session(Inner::Rank(Box::new(rank))));
        }
        let started: epoxide::Result<Box<dyn Ranks>> = if run.processes {
            let Some(test) = path else {
                let remedy = "the path of the test is not known here; give it with Run::test";
                return Err(Failed::to_start(&name, remedy));
            };
            let call = Call { test, site, visit, directory: Default::default(), timeout: run.timeout };
            Processes::start(run.size, call).map(|ranks| Box::new(ranks) as _)
        } else {
            Threads::start(run.size, run.timeout).map(|ranks| Box::new(ranks) as _)
        };
        started.map(|ranks| session(Inner::Parent(ranks))).map_err(|error| Failed::to_start(&name, error))
    }

    /// Sets the time limit of later tests.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Runs a test on every rank.
    ///
    /// # Panics
    /// Where [`Session::try_test`] returns an error, with that.
    #[track_caller]
    pub fn test<R: IntoVerdict>(
        &mut self,
        name: &str,
        rank_main: impl Fn(&Context) -> R + Send + Sync + 'static,
    ) -> Outcome {
        match self.try_test(name, rank_main) {
            Ok(outcome) => outcome,
            Err(failed) => panic!("{failed}"),
        }
    }

    /// Runs a test on every rank.
    ///
    /// # Errors
    /// See [`Run::try_run`](super::Run::try_run); also if an earlier test has failed.
    pub fn try_test<R: IntoVerdict>(
        &mut self,
        name: &str,
        rank_main: impl Fn(&Context) -> R + Send + Sync + 'static,
    ) -> Result<Outcome, Failed> {
        let number = self.next;
        self.next += 1;
        let test = if name.is_empty() { self.path.clone() } else { format!("{}, {name}", self.path) };
        let ranks = match &mut self.inner {
            Inner::Elsewhere => return Ok(Outcome::Passed),
            Inner::Rank(rank) => {
                return Ok(rank.test(number, |ctx| judge(&rank_main, ctx)));
            }
            Inner::Over => {
                let summary = "not run, since an earlier test of the session failed".to_owned();
                return Err(Failed { test, kind: Kind::NotStarted, summary, ranks: Vec::new() });
            }
            Inner::Parent(ranks) => ranks,
        };
        ranks.begin(number, Arc::new(move |ctx: &Context| judge(&rank_main, ctx)));
        let outcome = conduct(&mut **ranks, &test, self.timeout);
        match &outcome {
            Ok(outcome) => ranks.conclude(outcome),
            Err(_) => self.inner = Inner::Over,
        }
        if let Ok(Outcome::Skipped { code, reason }) = &outcome {
            eprintln!("{test}: skipped ({code}: {reason})");
        }
        outcome
    }
}

/// Waits until all ranks are through, or until there is no point in it.
fn conduct(ranks: &mut dyn Ranks, test: &str, timeout: Duration) -> Result<Outcome, Failed> {
    let mut ends: Vec<Option<(End, SystemTime)>> = (0..ranks.size()).map(|_| None).collect();
    let deadline = Instant::now() + timeout;
    // The times at which the group is aborted because a rank skipped, and at which the wait for the
    // others ends.
    let (mut skip_end, mut settle_end): (Option<Instant>, Option<Instant>) = (None, None);
    let mut timed_out = None;
    while ends.iter().any(Option::is_none) {
        let until = [Some(deadline), skip_end, settle_end].into_iter().flatten().min().unwrap_or(deadline);
        for (rank, end, at) in ranks.wait(until.saturating_duration_since(Instant::now())) {
            if end.is_failure() && settle_end.is_none() {
                ranks.give_up(&format!("rank {rank}: {end}"));
                settle_end = Some(Instant::now() + SETTLE);
            }
            if matches!(end, End::Skipped { .. }) && skip_end.is_none() && settle_end.is_none() {
                skip_end = Some(Instant::now() + SKIP_SETTLE);
            }
            if let Some(slot) = ends.get_mut(rank as usize) {
                *slot = Some((end, at));
            }
        }
        let now = Instant::now();
        if settle_end.is_some_and(|end| now >= end) {
            break;
        }
        if now >= deadline && settle_end.is_none() {
            timed_out = Some(timeout);
            break;
        }
        if skip_end.is_some_and(|end| now >= end) {
            skip_end = None;
            if settle_end.is_none() {
                ranks.give_up("another rank skipped the test, this one did not");
                settle_end = Some(now + SETTLE);
            }
        }
    }
    let patience = Instant::now() + trace::PATIENCE;
    let reports = (0u32..).zip(ends).map(|(rank, end)| {
        let (end, at) = end
            .unwrap_or_else(|| (End::Unfinished { trace: ranks.trace(rank, patience) }, SystemTime::now()));
        let (operation, output) = match end.is_failure() {
            true => (ranks.operation(rank), ranks.output(rank)),
            false => Default::default(),
        };
        (RankReport { rank, end, operation, output }, at)
    });
    let reports = reports.collect();
    if timed_out.is_some() {
        ranks.give_up("the time of the test was over");
    }
    evaluate(test, timed_out, reports)
}

/// The path of the test that this thread runs, in the test harness's form.
fn test_path(function: Option<&str>) -> Option<String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let named: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    if arguments.iter().any(|argument| argument == "--exact")
        && let [path] = named[..]
    {
        return Some(path.clone());
    }
    let thread = std::thread::current();
    if let Some(name) = thread.name().filter(|name| *name != "main") {
        return Some(name.to_owned());
    }
    // `crate::module::test::{{closure}}`
    let function = function?.split("::{{closure}}").next()?;
    function.split_once("::").map(|(_, path)| path.to_owned())
}

/// The number of this thread's earlier visits to this place in this test.
fn count_visit(test: &str, site: &str) -> u32 {
    thread_local! {
        static VISITS: RefCell<HashMap<(String, String), u32>> = RefCell::default();
    }
    VISITS.with_borrow_mut(|visits| {
        let count = visits.entry((test.to_owned(), site.to_owned())).or_default();
        *count += 1;
        *count - 1
    })
}

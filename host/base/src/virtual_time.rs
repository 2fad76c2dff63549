//! One clock for ranks that are threads of one process. It advances only while none of them can
//! progress.
//!
//! Deadlines on virtual GPUs are read from this clock, so that no result depends on the speed of
//! the machine. A busy machine delays the ranks and their clock alike. The invariant: the clock
//! moves forward only after a moment at which every member thread was blocked or idle.
//!
//! A *member* is a rank's thread ([`VirtualTime::join`]) or a thread that the library started for
//! it ([`spawn`]). `/proc/self/task` shows for each member whether it is blocked, so that any kind
//! of wait counts: a condition variable, a socket, another process. A member that waits for a mutex
//! counts as blocked only after `MUTEX`. The thread that holds the mutex may be no member and
//! goes on by itself. An example is the mutex of the allocator, which threads of several clocks
//! share. A member in `sleep` counts as busy, because it goes on by itself. A member that polls
//! memory is never blocked for long; it reports each round in which it found nothing ([`Poller`]).
//!
//! An attempt to move the clock inspects all members twice. It succeeds if all of this holds for
//! the time between:
//! * No member has reported work.
//! * No blocked member has run.
//! * Every polling member has completed two empty rounds: one that may have begun before the first
//!   inspection, and one that began after it.
//!
//! Then every member that could act on a word of memory has read it as it was at the first
//! inspection.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::lock::lock;

/// The time of a new clock, in nanoseconds.
const START_NS: u64 = 1_000_000_000;
/// The first step of the clock after something has happened, in nanoseconds.
const FIRST_STEP_NS: u64 = 50_000;
/// The longest step, in nanoseconds.
const LONGEST_STEP_NS: u64 = 100_000_000_000;
/// A step is this part of the time in which nothing has happened. A deadline expires late by one
/// step at most.
const STEP_PART: u64 = 2;
/// Virtual time without an event after which the ranks count as stuck.
const STUCK_NS: u64 = 3_600_000_000_000;
/// Real time between two inspections of the members.
const LOOK: Duration = Duration::from_micros(250);
/// The longest such time: while attempts fail, and once [`LONG_NS`] have passed.
const LONGEST_LOOK: Duration = Duration::from_millis(4);
/// Virtual time without any event after which attempts become rarer. A thread that is no member may
/// hold what members wait for, and a busy machine may keep it from its processor.
const LONG_NS: u64 = 1_000_000_000;
/// How long a member waits for a mutex until it counts as blocked. Longer than a busy machine keeps
/// the holder from a processor, and finite, because some other waits look like that for a mutex.
const MUTEX: Duration = Duration::from_millis(200);
/// How long a polling host thread pauses between two rounds.
const ROUND: Duration = Duration::from_micros(50);

/// The clock and its members. Clones are the same clock.
#[derive(Debug, Clone)]
pub struct VirtualTime {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    now_ns: Arc<AtomicU64>,
    /// Counts what members have done that others may wait for.
    activity: AtomicU64,
    /// One more than the `activity` at which [`STUCK_NS`] were over.
    stuck: AtomicU64,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    members: BTreeMap<i32, Arc<Member>>,
    /// Threads that have been started and have not joined yet.
    starting: u64,
    /// Times at which a member wakes.
    wakes: Vec<u64>,
    attempt: Option<Attempt>,
    /// Members that wait for a mutex: their time on a processor, and since when.
    at_mutex: BTreeMap<i32, (u64, Instant)>,
    /// `activity` at the last step, and virtual time since it last changed.
    quiet: (u64, u64),
    next_look: Option<Instant>,
    failed: u32,
}

/// The reports of one thread.
#[derive(Debug, Default)]
struct Member {
    /// Empty rounds since the thread began to poll; 0 while it does not.
    rounds: AtomicU64,
}

/// The first inspection of an attempt.
#[derive(Debug)]
struct Attempt {
    activity: u64,
    seen: BTreeMap<i32, Seen>,
}

/// A member at an inspection.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Seen {
    /// Empty rounds so far.
    Polling(u64),
    /// Blocked, after so much time on a processor.
    Blocked(u64),
}

thread_local! {
    static CURRENT: RefCell<Option<(VirtualTime, Arc<Member>)>> = const { RefCell::new(None) };
}

fn current() -> Option<(VirtualTime, Arc<Member>)> {
    CURRENT.with_borrow(Clone::clone)
}

impl VirtualTime {
    /// A clock without members; `None` where the system does not show which threads are blocked.
    pub fn new() -> Option<VirtualTime> {
        // Clocks that have just begun are rare, and kernels may take 0 for no time at all.
        let inner = Inner { now_ns: Arc::new(AtomicU64::new(START_NS)), ..Inner::default() };
        look_at(thread_id()).map(|_| VirtualTime { inner: Arc::new(inner) })
    }

    /// The clock that the calling thread is a member of.
    pub fn of_this_thread() -> Option<VirtualTime> {
        current().map(|(time, _)| time)
    }

    /// The time since an origin before the clock began.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.inner.now_ns.load(Ordering::Acquire))
    }

    /// The word that holds the time, in nanoseconds.
    pub fn now_ns(&self) -> Arc<AtomicU64> {
        self.inner.now_ns.clone()
    }

    /// Makes the calling thread a member until the guard is dropped, on the same thread.
    pub fn join(&self) -> Membership {
        let (id, member) = (thread_id(), Arc::new(Member::default()));
        let mut table = lock(&self.inner.table);
        table.attempt = None;
        let replaced = table.members.insert(id, member.clone());
        drop(table);
        let before = CURRENT.replace(Some((self.clone(), member)));
        Membership { time: self.clone(), id, replaced, before, _here: std::marker::PhantomData }
    }

    /// The same; `None` if the thread is a member already.
    pub fn join_as_guest(&self) -> Option<Membership> {
        let is_member = current().is_some_and(|(time, _)| Arc::ptr_eq(&time.inner, &self.inner));
        (!is_member).then(|| self.join())
    }

    /// Blocks the calling thread, a member or not, until `duration` has passed on this clock.
    pub fn sleep(&self, duration: Duration) {
        let until = self.now() + duration;
        let until_ns = u64::try_from(until.as_nanos()).unwrap_or(u64::MAX);
        lock(&self.inner.table).wakes.push(until_ns);
        let poller = Poller::new(Some(self));
        while self.now() < until {
            poller.pause();
        }
        drop(poller);
        let mut table = lock(&self.inner.table);
        if let Some(at) = table.wakes.iter().position(|wake| *wake == until_ns) {
            table.wakes.swap_remove(at);
        }
    }

    fn act(&self) {
        self.inner.activity.fetch_add(1, Ordering::AcqRel);
    }

    /// Moves the clock if no member can progress; called by members after an empty round.
    fn try_to_step(&self) {
        // Another member holds the table, and inspects already.
        let Ok(mut table) = self.inner.table.try_lock() else { return };
        let now = Instant::now();
        if table.next_look.is_some_and(|next| now < next) {
            return;
        }
        let activity = self.inner.activity.load(Ordering::Acquire);
        if let Some(attempt) = table.attempt.take_if(|attempt| attempt.activity == activity) {
            match table.compare(&attempt) {
                Compared::Wait => {
                    table.attempt = Some(attempt);
                    table.next_look = Some(now + LOOK);
                    return;
                }
                Compared::Changed => table.failed += 1,
                // A member may have begun to act during the second inspection.
                Compared::Quiet(_) if self.inner.activity.load(Ordering::Acquire) != activity => {}
                Compared::Quiet(seen) => {
                    self.step(&mut table, activity);
                    table.failed = 0;
                    table.attempt = Some(Attempt { activity, seen });
                    let pause = if table.quiet.1 < LONG_NS { LOOK } else { LONGEST_LOOK };
                    table.next_look = Some(now + pause);
                    return;
                }
            }
        }
        let seen = table.look();
        if seen.is_none() {
            table.failed += 1;
        }
        table.attempt = seen.map(|seen| Attempt { activity, seen });
        table.next_look = Some(now + LONGEST_LOOK.min(LOOK * (1 << table.failed.min(4))));
    }

    fn step(&self, table: &mut Table, activity: u64) {
        if table.quiet.0 != activity {
            table.quiet = (activity, 0);
        }
        let now_ns = self.inner.now_ns.load(Ordering::Acquire);
        let next_wake = table.wakes.iter().filter(|wake| **wake > now_ns).min();
        let step = (table.quiet.1 / STEP_PART).clamp(FIRST_STEP_NS, LONGEST_STEP_NS);
        let step = next_wake.map_or(step, |wake| step.min(wake - now_ns));
        table.quiet.1 += step;
        if table.quiet.1 >= STUCK_NS {
            self.inner.stuck.store(activity + 1, Ordering::Release);
        }
        self.inner.now_ns.fetch_add(step, Ordering::AcqRel);
    }
}

enum Compared {
    /// A polling member has not completed its rounds yet.
    Wait,
    Changed,
    /// The second inspection is the first one of the next attempt.
    Quiet(BTreeMap<i32, Seen>),
}

impl Table {
    /// All members; `None` where one of them runs or is about to.
    fn look(&mut self) -> Option<BTreeMap<i32, Seen>> {
        if self.starting > 0 {
            return None;
        }
        let at_mutex = &mut self.at_mutex;
        let mut is_blocked = |id: i32, wait: Wait, ran: u64| match wait {
            Wait::None => false,
            Wait::Other => true,
            Wait::Mutex => {
                let since = at_mutex.entry(id).or_insert((ran, Instant::now()));
                if since.0 != ran {
                    *since = (ran, Instant::now());
                }
                since.1.elapsed() >= MUTEX
            }
        };
        let look = |(&id, member): (&i32, &Arc<Member>)| match member.rounds.load(Ordering::Acquire) {
            0 => look_at(id)
                .filter(|look| is_blocked(id, look.wait, look.ran_ns))
                .map(|look| (id, Seen::Blocked(look.ran_ns))),
            rounds => Some((id, Seen::Polling(rounds))),
        };
        self.members.iter().map(look).collect()
    }

    fn compare(&mut self, attempt: &Attempt) -> Compared {
        let rounds =
            |id: &i32| self.members.get(id).map_or(0, |member| member.rounds.load(Ordering::Acquire));
        for (id, seen) in &attempt.seen {
            if let Seen::Polling(before) = seen {
                match rounds(id) {
                    0 => return Compared::Changed,
                    now if now < before + 2 => return Compared::Wait,
                    _ => {}
                }
            }
        }
        let Some(now) = self.look() else { return Compared::Changed };
        let same = now.len() == attempt.seen.len()
            && now.iter().zip(&attempt.seen).all(|((id, now), (id_before, before))| {
                let polls = matches!((now, before), (Seen::Polling(_), Seen::Polling(_)));
                id == id_before && (polls || now == before)
            });
        if same { Compared::Quiet(now) } else { Compared::Changed }
    }
}

/// A thread's membership, which ends with it.
#[derive(Debug)]
pub struct Membership {
    time: VirtualTime,
    id: i32,
    replaced: Option<Arc<Member>>,
    before: Option<(VirtualTime, Arc<Member>)>,
    /// The value is for one thread.
    _here: std::marker::PhantomData<*const ()>,
}

impl Drop for Membership {
    fn drop(&mut self) {
        CURRENT.set(self.before.take());
        let mut table = lock(&self.time.inner.table);
        table.attempt = None;
        match self.replaced.take() {
            Some(replaced) => table.members.insert(self.id, replaced),
            None => table.members.remove(&self.id),
        };
        table.at_mutex.remove(&self.id);
        drop(table);
        self.time.act();
    }
}

/// Starts a thread that has the name and is a member of the calling thread's clock, if that has
/// one.
pub fn spawn<T: Send + 'static>(
    name: String,
    work: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<JoinHandle<T>> {
    std::thread::Builder::new().name(name).spawn(as_member(VirtualTime::of_this_thread(), work))
}

/// Work for another thread, which then is a member of the clock.
pub fn as_member<T>(time: Option<VirtualTime>, work: impl FnOnce() -> T) -> impl FnOnce() -> T {
    let starting = time.map(Starting::new);
    move || {
        let _member = starting.as_ref().map(|starting| starting.0.join());
        drop(starting);
        work()
    }
}

/// A thread that is being started.
struct Starting(VirtualTime);

impl Starting {
    fn new(time: VirtualTime) -> Starting {
        lock(&time.inner.table).starting += 1;
        Starting(time)
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        lock(&self.0.inner.table).starting -= 1;
    }
}

/// A thread that polls memory, on any clock. Dropping it ends the polling.
#[derive(Debug)]
pub struct Poller {
    time: Option<VirtualTime>,
    member: Option<Arc<Member>>,
    /// The membership of a thread that was no member before.
    _joined: Option<Membership>,
}

impl Poller {
    /// The calling thread polls for something that happens by the clock `time`.
    pub fn new(time: Option<&VirtualTime>) -> Poller {
        let Some(time) = time else { return Poller { time: None, member: None, _joined: None } };
        let joined = time.join_as_guest();
        let member = current().map(|(_, member)| member);
        Poller { time: Some(time.clone()), member, _joined: joined }
    }

    /// A poller on the clock that the calling thread is a member of.
    pub fn of_this_thread() -> Poller {
        Poller::new(VirtualTime::of_this_thread().as_ref())
    }

    /// The thread has polled everything, and found nothing to do.
    pub fn found_nothing(&self) {
        if let (Some(time), Some(member)) = (&self.time, &self.member) {
            member.rounds.fetch_add(1, Ordering::AcqRel);
            time.try_to_step();
        }
    }

    /// The thread has found something to do, or will wait in another way. Call it before the next
    /// empty round is reported: until then the thread's rounds keep an attempt from succeeding.
    pub fn acts(&self) {
        if let (Some(time), Some(member)) = (&self.time, &self.member)
            && member.rounds.swap(0, Ordering::AcqRel) != 0
        {
            time.act();
        }
    }

    /// Nothing has happened for so long that nothing ever will.
    pub fn is_stuck(&self) -> bool {
        let is_stuck = |time: &VirtualTime| {
            let activity = time.inner.activity.load(Ordering::Acquire);
            time.inner.stuck.load(Ordering::Acquire) == activity + 1
        };
        self.time.as_ref().is_some_and(is_stuck)
    }

    /// Ends an empty round, and pauses if there is a clock.
    pub fn pause(&self) {
        if self.time.is_some() {
            self.found_nothing();
            std::thread::sleep(ROUND);
        }
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        self.acts();
    }
}

/// The state of a thread, as the system shows it.
struct Look {
    wait: Wait,
    /// Its time on a processor, in nanoseconds.
    ran_ns: u64,
}

/// The kind of wait that a thread is blocked in.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Wait {
    /// Nothing, or something that ends by itself: sleep, a page fault, a call that changes
    /// mappings.
    None,
    Mutex,
    Other,
}

fn thread_id() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// The state of a thread of this process, or `None` where the system does not show it. `syscall`
/// (proc(5)) holds the number and the arguments of the call that the thread is blocked in. It holds
/// `running` for a thread that runs or could, and -1 for a thread that is blocked in no call. The
/// first field of `schedstat` is the time on a processor in nanoseconds.
fn look_at(id: i32) -> Option<Look> {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/self/task/{id}/{file}")).ok();
    let mut wait = wait_of(&read("syscall")?);
    if wait != Wait::None && waits_for_a_disk(&read("stat")?) {
        wait = Wait::None;
    }
    let ran_ns = read("schedstat")?.split_ascii_whitespace().next()?.parse().ok()?;
    Some(Look { wait, ran_ns })
}

/// Reads the text of `stat` (proc(5)): the state behind the name in parentheses is D while a disk
/// works, and no peer can end such a wait.
fn waits_for_a_disk(stat: &str) -> bool {
    stat.rsplit_once(')').is_some_and(|(_, fields)| fields.trim_start().starts_with('D'))
}

/// Reads the text of `syscall`.
fn wait_of(syscall: &str) -> Wait {
    let mut fields = syscall.split_ascii_whitespace();
    let Some(Ok(call)) = fields.next().map(str::parse::<i64>) else { return Wait::None };
    let argument =
        |at| fields.clone().nth(at).and_then(|text| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok());
    match call {
        // The third argument is the word's value when the wait began. The value 2 is a mutex of std
        // or glibc that others wait for, and 5 a `Once` of std that runs. One of the two highest
        // bits is a `RwLock`. A parked thread has all bits set.
        libc::SYS_futex => match argument(2).map(|value| value as u32) {
            Some(2 | 5) => Wait::Mutex,
            Some(value) if value >= 1 << 30 && value != u32::MAX => Wait::Mutex,
            _ => Wait::Other,
        },
        libc::SYS_poll
        | libc::SYS_ppoll
        | libc::SYS_select
        | libc::SYS_pselect6
        | libc::SYS_epoll_wait
        | libc::SYS_epoll_pwait
        | libc::SYS_epoll_pwait2
        | libc::SYS_accept
        | libc::SYS_accept4
        | libc::SYS_connect
        | libc::SYS_read
        | libc::SYS_readv
        | libc::SYS_recvfrom
        | libc::SYS_recvmsg
        | libc::SYS_write
        | libc::SYS_writev
        | libc::SYS_sendto
        | libc::SYS_sendmsg
        | libc::SYS_wait4
        | libc::SYS_waitid
        | libc::SYS_flock
        | libc::SYS_fcntl => Wait::Other,
        _ => Wait::None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::mpsc::channel;

    use super::*;

    /// Real time for which a clock that must not move is observed.
    const WATCHED: Duration = Duration::from_millis(30);
    /// Real time in which a clock that passes has begun to, on a busy machine.
    const PATIENCE: Duration = Duration::from_secs(120);

    /// Polls for `duration` of virtual time; false if the clock stops for [`PATIENCE`] before.
    fn passes(time: &VirtualTime, duration: Duration) -> bool {
        let (poller, began, start) = (Poller::new(Some(time)), time.now(), Instant::now());
        while time.now() - began < duration {
            if start.elapsed() > PATIENCE {
                return false;
            }
            poller.pause();
        }
        true
    }

    /// Polls for [`WATCHED`]; whether the clock stops meanwhile.
    fn stands(time: &VirtualTime) -> bool {
        let (poller, began, start) = (Poller::new(Some(time)), time.now(), Instant::now());
        while start.elapsed() < WATCHED {
            poller.pause();
        }
        time.now() == began
    }

    #[test]
    fn the_clock_stands_while_a_member_runs_or_sleeps() {
        let time = VirtualTime::new().unwrap();
        let _member = time.join();
        for sleeps in [false, true] {
            let (stop, stopped) = channel::<()>();
            let ready = Arc::new(Barrier::new(2));
            let thread = {
                let ready = ready.clone();
                let busy = move || {
                    ready.wait();
                    while stopped.try_recv().is_err() {
                        if sleeps {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                    }
                };
                spawn("busy".into(), busy).unwrap()
            };
            ready.wait();
            assert!(stands(&time), "sleeps: {sleeps}");
            stop.send(()).unwrap();
            thread.join().unwrap();
        }
        assert!(passes(&time, Duration::from_secs(100)));
    }

    #[test]
    fn the_clock_passes_while_members_are_blocked_and_stands_once_they_go_on() {
        let time = VirtualTime::new().unwrap();
        let _member = time.join();
        let (wake, woken) = channel::<()>();
        let (stop, stopped) = channel::<()>();
        let work = move || {
            woken.recv().unwrap();
            while stopped.try_recv().is_err() {
                std::hint::spin_loop();
            }
        };
        let thread = spawn("blocked".into(), work).unwrap();
        assert!(passes(&time, Duration::from_secs(10)));
        wake.send(()).unwrap();
        assert!(stands(&time));
        stop.send(()).unwrap();
        thread.join().unwrap();
    }

    /// A thread that is no member holds a mutex: the allocator's, say.
    #[test]
    fn the_clock_stands_while_a_member_waits_for_a_mutex() {
        let time = VirtualTime::new().unwrap();
        let _member = time.join();
        let mutex = Arc::new(Mutex::new(()));
        let held = mutex.lock().unwrap();
        let wants = mutex.clone();
        let thread = spawn("wants".into(), move || drop(wants.lock())).unwrap();
        let began = Instant::now();
        // On a machine that is so busy the member may have waited for too long by now.
        assert!(stands(&time) || began.elapsed() >= MUTEX);
        drop(held);
        thread.join().unwrap();
        assert!(passes(&time, Duration::from_secs(10)));
    }

    #[test]
    fn waits_are_told_apart() {
        for (text, wait) in [
            ("running", Wait::None),
            ("-1 0x7ffd 0x7f3c", Wait::None),
            ("202 0x7f00 0x80 0x2 0x0 0x0 0x0 0x7ffd 0x7f3c", Wait::Mutex),
            ("202 0x7f00 0x89 0x40000001 0x0 0x0 0xffffffff 0x7ffd 0x7f3c", Wait::Mutex),
            ("202 0x7f00 0x89 0x11 0x0 0x0 0xffffffff 0x7ffd 0x7f3c", Wait::Other),
            ("202 0x7f00 0x89 0xffffffff 0x0 0x0 0xffffffff 0x7ffd 0x7f3c", Wait::Other),
            ("45 0x5 0x7f00 0x8 0x0 0x0 0x0 0x7ffd 0x7f3c", Wait::Other),
            ("35 0x7f00 0x7f00 0x0 0x0 0x0 0x0 0x7ffd 0x7f3c", Wait::None),
            ("11 0x7f00 0x1000 0x0 0x0 0x0 0x0 0x7ffd 0x7f3c", Wait::None),
        ] {
            assert_eq!(wait_of(text), wait, "{text}");
        }
    }

    #[test]
    fn a_wait_for_a_disk_is_known_by_its_state() {
        for (text, disk) in [
            ("7 (virtual GPU 0) D 1 7 7", true),
            ("7 (a) D (b) S 1 7 7", false),
            ("7 (DD) S 1 7 7", false),
            ("7 (a) R 1 7 7", false),
        ] {
            assert_eq!(waits_for_a_disk(text), disk, "{text}");
        }
    }

    #[test]
    fn a_member_that_polls_must_have_looked_twice() {
        let time = VirtualTime::new().unwrap();
        let (step, steps) = channel::<()>();
        let (polled, polls) = channel::<()>();
        let on = time.clone();
        // Ends a round on request, and is blocked in between: a late inspection.
        let work = move || {
            let poller = Poller::new(Some(&on));
            for () in steps {
                poller.found_nothing();
                polled.send(()).unwrap();
            }
        };
        let thread = std::thread::spawn(as_member(Some(time.clone()), work));
        let round = || {
            step.send(()).unwrap();
            polls.recv().unwrap();
        };
        round();
        assert!(stands(&time));
        let rounds = std::thread::scope(|scope| {
            let passed = scope.spawn(|| passes(&time, Duration::from_micros(50)));
            // This thread is no member, or its work here would stop the clock.
            let mut rounds = 0;
            while !passed.is_finished() {
                round();
                rounds += 1;
            }
            passed.join().unwrap().then_some(rounds)
        });
        assert!(rounds.is_some_and(|rounds| rounds >= 2), "{rounds:?}");
        drop(step);
        thread.join().unwrap();
    }

    #[test]
    fn sleepers_wake_in_order_and_on_time() {
        let time = VirtualTime::new().unwrap();
        let began = time.now();
        let woken = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            let (time, woken) = (&time, &woken);
            for milliseconds in [70, 10, 400, 11] {
                let sleep = as_member(Some(time.clone()), move || {
                    time.sleep(Duration::from_millis(milliseconds));
                    woken.lock().unwrap().push((milliseconds, time.now() - began));
                });
                scope.spawn(sleep);
            }
        });
        let woken = woken.into_inner().unwrap();
        assert_eq!(woken.iter().map(|(asked, _)| *asked).collect::<Vec<_>>(), [10, 11, 70, 400]);
        for (asked, at) in woken {
            // The clock stops at the end of a sleep, and the others' first steps are short.
            let (asked, at) = (Duration::from_millis(asked), at);
            assert!(at >= asked && at < asked + Duration::from_millis(60), "{asked:?}: {at:?}");
        }
    }

    #[test]
    fn a_clock_by_which_nothing_happens_says_so() {
        let time = VirtualTime::new().unwrap();
        let poller = Poller::new(Some(&time));
        while !poller.is_stuck() {
            poller.pause();
        }
        assert!(time.now() > Duration::from_nanos(STUCK_NS));
        poller.acts();
        assert!(!poller.is_stuck());
    }

    #[test]
    fn without_a_clock_nothing_is_counted() {
        let poller = Poller::of_this_thread();
        poller.pause();
        assert!(!poller.is_stuck() && VirtualTime::of_this_thread().is_none());
    }
}

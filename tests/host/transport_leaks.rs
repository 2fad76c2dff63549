//! Links leak no thread and no descriptor, and idle proxies sleep. The test runs alone in its
//! process, because it counts threads and descriptors.

use std::sync::Arc;
use std::time::{Duration, Instant};

use epoxide::Result;
use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::driver::{Memory, MemoryKind};
use epoxide::group::run_threads;
use epoxide::internal::transport::{Hooks, Proxies, Shaping, connect};
use epoxide::transport::{TransportKind, TransportOptions};
use epoxide_testing::alone;

const PATIENCE: Duration = Duration::from_secs(120);

fn open() -> (usize, usize) {
    let count = |directory: &str| std::fs::read_dir(directory).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

/// Runs `test` on each of `ranks` ranks, with its proxies, between barriers.
fn with_proxies(ranks: u32, options: &TransportOptions, test: impl Fn(u32, &Proxies) -> Result<()> + Sync) {
    run_threads(ranks, PATIENCE, |rank, group| {
        let device = VirtualGpu::new(VirtConfig::default());
        let memory = Arc::new(Memory::alloc(&device, 4096, MemoryKind::SharedHost, "wire")?);
        let peers: Vec<u32> = (0..ranks).filter(|peer| *peer != rank).collect();
        let links = connect(options, &memory, &*group, &peers, PATIENCE)?;
        let proxies = Proxies::start(&device, links)?;
        group.barrier(PATIENCE)?;
        test(rank, &proxies)?;
        group.barrier(PATIENCE)?;
        drop(proxies);
        group.barrier(PATIENCE)
    })
    .unwrap();
}

#[test]
fn nothing_stays_and_idle_proxies_cost_little() {
    alone::run("transport_leaks::nothing_stays_and_idle_proxies_cost_little", || {
        leave_nothing();
        idle();
    });
}

fn leave_nothing() {
    let before = open();
    for kind in [TransportKind::Shm, TransportKind::Tcp] {
        for shaping in [None, Some(Shaping::new(0).cut_after(1, 0))] {
            let options = TransportOptions {
                queues_per_peer: 3,
                hooks: Hooks { shaping, ..Hooks::default() },
                ..TransportOptions::new(kind)
            };
            with_proxies(4, &options, |_, _| {
                // At least the proxies, and the threads and descriptors that detect a peer's death.
                assert!(open().1 >= before.1 + 4 * 9 && open().0 > before.0, "the count works");
                Ok(())
            });
        }
        // A setup that fails.
        run_threads(2, PATIENCE, |rank, group| {
            let device = VirtualGpu::new(VirtConfig::default());
            let bytes = 4096 * (1 + u64::from(rank));
            let memory = Arc::new(Memory::alloc(&device, bytes, MemoryKind::SharedHost, "wire")?);
            assert!(connect(&TransportOptions::new(kind), &memory, &*group, &[1 - rank], PATIENCE).is_err());
            Ok(())
        })
        .unwrap();
        // A thread that was joined may be in /proc for a moment.
        let start = Instant::now();
        while open() != before && start.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(open(), before, "descriptors and threads, {kind}");
    }
}

/// Work of this process's proxies so far.
#[derive(Debug, Clone, Copy)]
struct Work {
    /// Each proxy's number of sleeps, by thread.
    sleeps: [u64; PROXIES],
    /// Processor time of all of them.
    processor: Duration,
}

const PROXIES: usize = 48;

/// Returns `None` until all proxies run, because a thread sets its name when it begins.
fn work_of_proxies() -> Option<Work> {
    let (mut sleeps, mut processor) = (Vec::new(), Duration::ZERO);
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        let read = |file: &str| std::fs::read_to_string(task.join(file)).unwrap_or_default();
        // A proxy's thread is called `to RANK qQUEUE`.
        if !read("comm").starts_with("to ") {
            continue;
        }
        let status = read("status");
        let slept = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
        sleeps.push(slept.trim().parse::<u64>().unwrap());
        let times = read("schedstat");
        processor += Duration::from_nanos(times.split(' ').next().unwrap().parse().unwrap());
    }
    Some(Work { sleeps: sleeps.try_into().ok()?, processor })
}

/// Idle proxies sleep for 4 ms at a time after their first second. The test counts sleeps, not
/// time, because a busy machine can only make the sleeps fewer.
fn idle() {
    const SLEEP: Duration = Duration::from_millis(4);
    /// Most processor time between two sleeps. A proxy takes some microseconds; one that spins
    /// takes the whole time.
    const AWAKE: Duration = Duration::from_millis(1);
    // 4 ranks with 3 peers and 4 queues each.
    let options = TransportOptions { queues_per_peer: 4, ..TransportOptions::new(TransportKind::Shm) };
    with_proxies(4, &options, |rank, proxies| {
        assert_eq!(proxies.all().len() * 4, PROXIES);
        if rank != 0 {
            return Ok(());
        }
        let begin = Instant::now();
        while work_of_proxies().is_none() {
            assert!(begin.elapsed() < PATIENCE / 2, "a proxy has not begun");
            std::thread::sleep(Duration::from_millis(10));
        }
        loop {
            let (start, before) = (Instant::now(), work_of_proxies().unwrap());
            std::thread::sleep(Duration::from_secs(1));
            let after = work_of_proxies().unwrap();
            let most = (start.elapsed().as_nanos() / SLEEP.as_nanos()) as u64 + 2;
            let slept: Vec<u64> =
                after.sleeps.iter().zip(before.sleeps).map(|(now, then)| now - then).collect();
            let total = slept.iter().sum::<u64>();
            let each = (after.processor - before.processor) / (total as u32).max(1);
            let share = (after.processor - before.processor).as_secs_f64() / start.elapsed().as_secs_f64();
            if slept.iter().all(|slept| (1..=most).contains(slept)) && each < AWAKE {
                println!("{PROXIES} idle proxies take {:.1} % of a processor", 100.0 * share);
                return Ok(());
            }
            // In their first second they sleep for less.
            assert!(
                begin.elapsed() < PATIENCE / 2,
                "in {:?} the proxies slept {slept:?} times, at most {most} are meant, and were awake for {each:?} each time",
                start.elapsed()
            );
        }
    });
}

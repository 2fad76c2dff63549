//! What links leave behind: nothing; and what idle proxies cost: little. Alone in its process, as it counts threads,
//! descriptors and processor time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use epoxide::Result;
use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::driver::{Memory, MemoryKind};
use epoxide::group::launch::run_threads;
use epoxide::transport::{Proxies, Shaping, TransportKind, TransportOptions, connect};
use epoxide_testing::alone;

const PATIENCE: Duration = Duration::from_secs(60);

fn open() -> (usize, usize) {
    let count = |directory: &str| std::fs::read_dir(directory).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

fn cpu() -> Duration {
    let mut usage = std::mem::MaybeUninit::uninit();
    // SAFETY: the out pointer is valid, and filled where the call succeeds, as it does with this constant.
    let usage: libc::rusage = unsafe {
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()), 0);
        usage.assume_init()
    };
    let time = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
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
            let options = TransportOptions { queues_per_peer: 3, shaping, ..TransportOptions::new(kind) };
            with_proxies(4, &options, |_, _| {
                // At least the proxies, and what tells a peer's death.
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

fn idle() {
    // 48 proxies: 4 ranks with 3 peers and 4 queues each.
    let options = TransportOptions { queues_per_peer: 4, ..TransportOptions::new(TransportKind::Shm) };
    with_proxies(4, &options, |rank, proxies| {
        assert_eq!(proxies.all().len(), 12);
        std::thread::sleep(Duration::from_millis(1500));
        let (start, used) = (Instant::now(), cpu());
        std::thread::sleep(Duration::from_secs(2));
        let share = (cpu() - used).as_secs_f64() / start.elapsed().as_secs_f64();
        if rank == 0 {
            println!("48 idle proxies take {:.1} % of a processor", 100.0 * share);
        }
        assert!(share < 0.8, "{share} of a processor for 48 idle proxies");
        Ok(())
    });
}

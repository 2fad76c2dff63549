//! Tests which calls wait for a running kernel, and which of them block other calls: the driver
//! page's table line by line, and its consequences.

use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::Scope;
use std::time::{Duration, Instant};

use super::gpu::PAGEABLE_AT_ONCE_BYTES;
use super::manual::ManualGpus;
use super::tests::{PTX, Rig, Words, handle, on_both, word};
use super::*;
use crate::driver::{
    CopyEnd, DevicePtr, Driver, Fence, LaunchConfig, Memory, MemoryKind, Module as OwnedModule,
    NoDriverCalls, RawMemory, RawStream, Stream,
};
use crate::error::{Error, Result};
use crate::virtual_time::{Poller, VirtualTime};

/// Time for calls that do not wait, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// A call that has not returned by then is taken to wait.
const WHILE: Duration = Duration::from_millis(60);

/// Runs a call on a thread of its own; the receiver gets a message when it has returned.
fn spawn<'scope>(scope: &'scope Scope<'scope, '_>, call: impl FnOnce() + Send + 'scope) -> Receiver<()> {
    let (done, returned) = channel();
    scope.spawn(move || {
        call();
        done.send(())
    });
    returned
}

#[track_caller]
fn assert_returns(call: &Receiver<()>, what: &str) {
    call.recv_timeout(PATIENCE).unwrap_or_else(|error| panic!("{what} has not returned: {error}"));
}

#[track_caller]
fn assert_waits(call: &Receiver<()>, what: &str) {
    assert_eq!(call.recv_timeout(WHILE), Err(RecvTimeoutError::Timeout), "{what} has returned");
}

/// Waits until a call holds the lock of the rig's device.
fn await_held(rig: &Rig) {
    let start = Instant::now();
    while !rig.gpu.shared.lock().held {
        assert!(start.elapsed() < PATIENCE, "no call holds the lock");
        std::thread::yield_now();
    }
}

/// A copy between a device and the host, on either kind of host memory.
fn copy(stream: &Stream, dst: CopyEnd, src: CopyEnd, bytes: u64) -> Result<()> {
    // SAFETY: the tests keep device and mapped memory until the stream is done, and pageable memory
    // until this has returned.
    unsafe { stream.device().driver.copy(handle(stream), dst, src, bytes) }
}

/// A device whose stream is blocked by a kernel, and an unrelated device.
struct Scene {
    rig: Rig,
    elsewhere: Rig,
    gate: Words,
    /// Idle.
    side: Stream,
    pinned: Words,
    data: Memory,
    module: Mutex<Option<OwnedModule>>,
}

impl Scene {
    fn new(rig: Rig, elsewhere: Rig) -> Scene {
        let scene = Scene {
            gate: rig.words(1),
            side: rig.stream(),
            pinned: rig.words(1024),
            data: rig.alloc(2 << 20, MemoryKind::Device),
            module: Mutex::new(Some(OwnedModule::load(&rig.device, PTX).unwrap())),
            rig,
            elsewhere,
        };
        scene.rig.wait(&scene.rig.stream, scene.gate.ptr(), 1);
        scene
    }

    fn write_data(&self, stream: &Stream, host: *mut u8, bytes: u64) {
        copy(stream, CopyEnd::Device(self.data.ptr()), CopyEnd::Host(host), bytes).unwrap();
    }

    fn read_data(&self, stream: &Stream, host: *mut u8, bytes: u64) {
        copy(stream, CopyEnd::Host(host), CopyEnd::Device(self.data.ptr()), bytes).unwrap();
    }

    /// A call of another library on the same device: a pinned copy in an idle stream.
    fn neighbour(&self) {
        self.write_data(&self.side, self.pinned.host_ptr(), 4096);
        self.side.synchronize().unwrap();
    }

    /// Calls on another device, waiting ones included.
    fn elsewhere(&self) {
        let rig = &self.elsewhere;
        let words = rig.words(1);
        rig.store(&rig.stream, words.ptr(), 1);
        rig.stream.synchronize().unwrap();
        drop((words, rig.alloc(1024, MemoryKind::Unpooled), rig.alloc(1024, MemoryKind::Device)));
        drop(OwnedModule::load(&rig.device, PTX).unwrap());
    }
}

/// The behaviour of a call while a kernel runs.
#[derive(Clone, Copy, PartialEq)]
enum Waits {
    /// The call returns.
    No,
    /// The call does not return, and its neighbours do.
    Alone,
    /// Neither the call nor its neighbours return.
    HoldingOthersUp,
}

/// Makes a call during a running kernel. Checks whether it, a neighbour's call and a call on
/// another device return while the kernel runs, and that all return in the end.
#[track_caller]
fn check(waits: Waits, call: impl Fn(&Scene) + Sync) {
    let machine = ManualGpus::with_patience(3, PATIENCE);
    let devices = [(Rig::threaded(), Rig::threaded()), (Rig::manual(&machine), Rig::manual(&machine))];
    for (rig, elsewhere) in devices {
        let scene = Scene::new(rig, elsewhere);
        std::thread::scope(|scope| {
            let _watch = (scene.rig.watch(), scene.elsewhere.watch());
            let returned = spawn(scope, || call(&scene));
            match waits {
                Waits::No => assert_returns(&returned, "the call"),
                Waits::Alone => assert_waits(&returned, "the call"),
                Waits::HoldingOthersUp => await_held(&scene.rig),
            }
            let elsewhere = spawn(scope, || scene.elsewhere());
            let neighbour = spawn(scope, || scene.neighbour());
            assert_returns(&elsewhere, "a call of another device");
            match waits {
                Waits::No | Waits::Alone => assert_returns(&neighbour, "the neighbour"),
                Waits::HoldingOthersUp => assert_waits(&neighbour, "the neighbour"),
            }
            if waits != Waits::No {
                assert_waits(&returned, "the call");
            }
            assert!(
                !scene.rig.gpu.shared.lock().queues.values().all(epoxide_vgpu::stream::Queue::is_idle),
                "the kernel has ended"
            );
            word(&scene.gate, 0).store(1, Ordering::Release);
            if waits != Waits::No {
                assert_returns(&returned, "the call");
            }
            if waits == Waits::HoldingOthersUp {
                assert_returns(&neighbour, "the neighbour");
            }
        });
        scene.rig.stream.synchronize().unwrap();
    }
}

#[test]
fn freeing_what_is_not_stream_ordered_waits_and_holds_others_up() {
    for kind in [MemoryKind::Unpooled, MemoryKind::MappedHost, MemoryKind::SharedHost] {
        for bytes in [1 << 10, 1 << 20] {
            check(Waits::HoldingOthersUp, |scene| drop(scene.rig.alloc(bytes, kind)));
        }
    }
}

#[test]
fn loading_a_module_waits_and_holds_others_up() {
    check(Waits::HoldingOthersUp, |scene| {
        scene.rig.device.driver.module_load(PTX).unwrap();
    });
}

#[test]
fn unloading_a_module_waits() {
    check(Waits::Alone, |scene| drop(scene.module.lock().unwrap().take().unwrap()));
}

#[test]
fn a_copy_to_pageable_memory_waits() {
    for bytes in [4 << 10, 1 << 20] {
        check(Waits::Alone, |scene| {
            let mut host = vec![0; bytes as usize];
            scene.read_data(&scene.rig.stream, host.as_mut_ptr(), bytes);
            // The neighbour has cleared the beginning.
            let fresh = |(index, byte): (usize, &u8)| (*byte == 0) == (index < 4096);
            assert!(host.iter().enumerate().all(fresh));
        });
    }
}

#[test]
fn a_large_copy_from_pageable_memory_waits() {
    check(Waits::Alone, |scene| {
        let mut host = vec![7; PAGEABLE_AT_ONCE_BYTES as usize + 1];
        scene.write_data(&scene.rig.stream, host.as_mut_ptr(), host.len() as u64);
        assert_eq!(scene.rig.read(scene.data.ptr().add(PAGEABLE_AT_ONCE_BYTES - 3)), 0x0707_0707);
    });
}

#[test]
fn synchronising_waits() {
    check(Waits::Alone, |scene| scene.rig.stream.synchronize().unwrap());
    check(Waits::Alone, |scene| {
        let event = scene.rig.event();
        event.record(&scene.rig.stream).unwrap();
        event.synchronize().unwrap();
    });
}

#[test]
fn enqueueing_in_a_full_stream_waits() {
    check(Waits::Alone, |scene| {
        for _ in 0..2000 {
            scene.rig.add_one(&scene.rig.stream, scene.data.ptr(), 1);
        }
    });
    // Fills the stream with operations of any kind.
    let full = |scene: &Scene| {
        let event = scene.rig.event();
        // The kernel is one.
        (1..1024).for_each(|_| event.record(&scene.rig.stream).unwrap());
        event
    };
    check(Waits::No, |scene| drop(full(scene)));
    check(Waits::Alone, |scene| full(scene).record(&scene.rig.stream).unwrap());
    check(Waits::Alone, |scene| scene.rig.stream.wait(&full(scene)).unwrap());
    check(Waits::Alone, |scene| {
        full(scene);
        scene.write_data(&scene.rig.stream, scene.pinned.host_ptr(), 16);
    });
    check(Waits::Alone, |scene| {
        full(scene);
        let graph = scene.side.capture(|| Ok(())).unwrap();
        // SAFETY: nothing was recorded.
        unsafe { graph.launch(&scene.rig.stream).unwrap() };
    });
}

#[test]
fn stream_ordered_memory_never_waits() {
    check(Waits::No, |scene| {
        for bytes in [1 << 10, 1 << 20] {
            let memory = scene.rig.alloc(bytes, MemoryKind::Device);
            scene.rig.add_one(&scene.rig.stream, memory.ptr(), 64);
        }
    });
}

#[test]
fn allocating_host_memory_does_not_wait() {
    // Giving it back would.
    for kind in [MemoryKind::MappedHost, MemoryKind::SharedHost, MemoryKind::Unpooled] {
        check(Waits::No, |scene| {
            scene.rig.device.driver.alloc(4096, kind, "test").unwrap();
        });
    }
}

#[test]
fn shared_memory_does_not_wait() {
    check(Waits::No, |scene| {
        let memory = scene.rig.alloc(4096, MemoryKind::Shareable);
        let import = |rig: &Rig| Memory::import(&rig.device, memory.export().unwrap(), 4096, "test").unwrap();
        drop((import(&scene.rig), import(&scene.elsewhere)));
        assert!(memory.export_dma_buf().is_err());
    });
}

#[test]
fn other_copies_do_not_wait() {
    check(Waits::No, |scene| {
        for stream in [&scene.rig.stream, &scene.side] {
            scene.write_data(stream, scene.pinned.host_ptr(), 4096);
            scene.read_data(stream, scene.pinned.host_ptr(), 4096);
            let mut small = vec![1; PAGEABLE_AT_ONCE_BYTES as usize];
            scene.write_data(stream, small.as_mut_ptr(), PAGEABLE_AT_ONCE_BYTES);
        }
        let mut large = vec![2; 2 << 20];
        scene.write_data(&scene.side, large.as_mut_ptr(), 2 << 20);
        scene.read_data(&scene.side, large.as_mut_ptr(), 2 << 20);
        scene.data.write(&scene.side, 0, &large).unwrap();
        scene.data.read(&scene.side, 0, &mut large).unwrap();
        // SAFETY: the memory outlives the stream's work.
        unsafe { scene.rig.stream.fill(scene.data.ptr(), 0, 4096) }.unwrap();
    });
}

#[test]
fn events_streams_queries_launches_and_graphs_do_not_wait() {
    check(Waits::No, |scene| {
        let (rig, stream) = (&scene.rig, &scene.rig.stream);
        let (before, behind, new) = (rig.event(), rig.event(), rig.stream());
        before.record(&new).unwrap();
        before.synchronize().unwrap();
        before.record(&new).unwrap();
        new.synchronize().unwrap();
        assert!(before.elapsed_ms(&before).unwrap() == 0.0);
        behind.record(stream).unwrap();
        new.wait(&behind).unwrap();
        assert!(!behind.is_done().unwrap() && !stream.is_done().unwrap());
        assert!(rig.device.free_memory().unwrap() > 0);
        // The first launch of a kernel.
        rig.add_one(stream, scene.data.ptr(), 32);
        rig.add_one(&scene.side, scene.data.ptr(), 32);
        let graph = scene.side.capture(|| {
            rig.add_one(&scene.side, scene.data.ptr(), 32);
            Ok(())
        });
        let graph = graph.unwrap();
        // SAFETY: the scene keeps the memory.
        unsafe {
            graph.launch(stream).unwrap();
            graph.launch(stream).unwrap();
        }
    });
}

/// A kernel that stores word 0, and then waits until a thread stores word 1.
fn ask(rig: &Rig) -> Words {
    let words = rig.words(2);
    rig.store(&rig.stream, words.ptr(), 1);
    rig.wait(&rig.stream, words.ptr().add(4), 1);
    words
}

/// Answers the kernel of [`ask`] while another thread frees memory: runs `help`, then stores the
/// word. `check` gets receivers for the return of the free and of the helper; it may release the
/// kernel itself.
fn with_a_proxy(help: impl Fn(&Rig) + Sync, check: impl Fn(&Rig, &Words, [Receiver<()>; 2])) {
    let machine = ManualGpus::with_patience(4, PATIENCE);
    for rig in [Rig::threaded(), Rig::manual(&machine)] {
        let memory = rig.alloc(4096, MemoryKind::Unpooled);
        let words = ask(&rig);
        std::thread::scope(|scope| {
            let _watch = rig.watch();
            let freed = spawn(scope, || drop(memory));
            await_held(&rig);
            let helped = spawn(scope, || {
                while word(&words, 0).load(Ordering::Acquire) == 0 {
                    std::thread::yield_now();
                }
                help(&rig);
                word(&words, 1).store(1, Ordering::Release);
            });
            check(&rig, &words, [freed, helped]);
        });
    }
}

#[test]
fn a_proxy_that_needs_the_driver_and_a_free_are_in_a_deadlock() {
    let help = |rig: &Rig| rig.stream().synchronize().unwrap();
    with_a_proxy(help, |_, words, [freed, helped]| {
        assert_waits(&freed, "the free");
        assert_waits(&helped, "the proxy");
        word(words, 1).store(1, Ordering::Release);
        assert_returns(&freed, "the free");
        assert_returns(&helped, "the proxy");
    });
}

#[test]
fn a_proxy_that_needs_only_memory_lets_a_free_end() {
    with_a_proxy(
        |_| {},
        |rig, _, [freed, helped]| {
            assert_returns(&helped, "the proxy");
            assert_returns(&freed, "the free");
            rig.stream.synchronize().unwrap();
        },
    );
}

#[test]
fn a_proxy_that_breaks_the_rule_makes_the_device_unusable() {
    let help = |rig: &Rig| {
        let _rule = NoDriverCalls::new("the test's proxy");
        assert!(Stream::new(&rig.device).is_err());
    };
    with_a_proxy(help, |rig, _, [freed, helped]| {
        assert_returns(&helped, "the proxy");
        assert_returns(&freed, "the free");
        let error = rig.stream.synchronize().unwrap_err();
        assert!(matches!(&error, Error::VirtualFault(_)), "{error}");
        let text = error.to_string();
        assert!(text.contains("device 0") && text.contains("made by the test's proxy"), "{text}");
    });
}

/// Handles of everything a device has.
struct Handles {
    memory: RawMemory,
    module: u64,
    kernel: u64,
    stream: u64,
    event: u64,
    graph: u64,
}

impl Handles {
    fn new(device: &dyn Driver) -> Handles {
        let module = device.module_load(PTX).unwrap();
        let stream = device.stream_create(false).unwrap();
        let memory = device.alloc(4, MemoryKind::MappedHost, "test").unwrap();
        device.capture_begin(stream).unwrap();
        Handles {
            memory,
            module,
            kernel: device.module_kernel(module, "store", 0).unwrap(),
            stream,
            event: device.event_create(true).unwrap(),
            graph: device.capture_end(stream).unwrap(),
        }
    }
}

#[test]
fn every_call_obeys_the_rule() {
    type Call<'a> = (&'static str, &'a dyn Fn(&dyn Driver, &Handles));
    let config = LaunchConfig { grid: 1, block: 1, shared_bytes: 0, cooperative: false, dependent: false };
    let fd = || OwnedFd::from(std::io::pipe().unwrap().0);
    let calls: &[Call<'_>] = &[
        ("free_memory", &|device, _| assert!(device.free_memory().is_err())),
        ("alloc", &|device, _| assert!(device.alloc(4, MemoryKind::Device, "test").is_err())),
        ("export", &|device, with| assert!(device.export(&with.memory).is_err())),
        ("export_dma_buf", &|device, with| assert!(device.export_dma_buf(&with.memory).is_err())),
        ("import", &|device, _| assert!(device.import(fd(), 4, "test").is_err())),
        // SAFETY: nothing uses the memory.
        ("free", &|device, with| unsafe { device.free(&with.memory) }),
        ("module_load", &|device, _| assert!(device.module_load(PTX).is_err())),
        ("module_kernel", &|device, with| assert!(device.module_kernel(with.module, "wait", 0).is_err())),
        // SAFETY: none of its kernels runs.
        ("module_unload", &|device, with| unsafe { device.module_unload(with.module) }),
        ("launch", &|device, with| {
            // SAFETY: it is refused.
            assert!(unsafe { device.launch(with.stream, with.kernel, &config, &[]) }.is_err());
        }),
        ("stream_create", &|device, _| assert!(device.stream_create(false).is_err())),
        ("stream_adopt", &|device, _| {
            // SAFETY: the null stream is always there.
            assert!(unsafe { device.stream_adopt(RawStream(std::ptr::null_mut())) }.is_err());
        }),
        ("stream_raw", &|device, with| assert!(!device.stream_raw(with.stream).0.is_null())),
        ("stream_destroy", &|device, with| device.stream_destroy(with.stream)),
        ("stream_synchronize", &|device, with| assert!(device.stream_synchronize(with.stream).is_err())),
        ("stream_query", &|device, with| assert!(device.stream_query(with.stream).is_err())),
        ("event_create", &|device, _| assert!(device.event_create(true).is_err())),
        ("event_destroy", &|device, with| device.event_destroy(with.event)),
        ("event_record", &|device, with| assert!(device.event_record(with.event, with.stream).is_err())),
        ("stream_wait_event", &|device, with| {
            assert!(device.stream_wait_event(with.stream, with.event).is_err());
        }),
        ("event_synchronize", &|device, with| assert!(device.event_synchronize(with.event).is_err())),
        ("event_query", &|device, with| assert!(device.event_query(with.event).is_err())),
        ("event_elapsed_ms", &|device, with| {
            assert!(device.event_elapsed_ms(with.event, with.event).is_err());
        }),
        ("copy", &|device, with| {
            let end = CopyEnd::Device(with.memory.ptr);
            // SAFETY: it is refused.
            assert!(unsafe { device.copy(with.stream, end, end, 0) }.is_err());
        }),
        ("fill", &|device, with| {
            // SAFETY: it is refused.
            assert!(unsafe { device.fill(with.stream, with.memory.ptr, 0, 0) }.is_err());
        }),
        ("capture_begin", &|device, with| assert!(device.capture_begin(with.stream).is_err())),
        ("capture_end", &|device, with| assert!(device.capture_end(with.stream).is_err())),
        ("graph_launch", &|device, with| assert!(device.graph_launch(with.graph, with.stream).is_err())),
        ("graph_destroy", &|device, with| device.graph_destroy(with.graph)),
    ];
    for (name, call) in calls {
        let device = VirtualGpu::new(VirtConfig::default());
        let handles = Handles::new(&*device.driver);
        let rule = NoDriverCalls::new("the test");
        assert!(device.info().is_virtual);
        device.driver.staging();
        device.driver.make_progress();
        drop(rule);
        device.free_memory().expect("none of these is a driver call");
        let rule = NoDriverCalls::new("the test");
        call(&*device.driver, &handles);
        drop(rule);
        let error = device.free_memory().expect_err(name).to_string();
        assert!(error.contains("made by the test"), "{name}: {error}");
    }
}

#[test]
fn on_an_unusable_device_nothing_waits() {
    on_both(|rig| {
        let words = rig.words(1);
        let host = rig.alloc(4096, MemoryKind::MappedHost);
        rig.wait(&rig.stream, words.ptr(), 1);
        rig.store(&rig.stream(), DevicePtr(8), 1);
        while rig.stream.is_done().is_ok() {
            rig.device.driver.make_progress();
        }
        drop((host, words));
        assert!(rig.device.driver.module_load(PTX).is_err());
        assert!(rig.stream.synchronize().is_err());
    });
}

#[test]
fn a_machine_gives_up_waits_that_never_end() {
    let rig = Rig::manual(&ManualGpus::new(6));
    let gate = rig.words(1);
    let data = rig.alloc(4096, MemoryKind::Device);
    let memory = rig.alloc(4096, MemoryKind::Unpooled);
    let module = OwnedModule::load(&rig.device, PTX).unwrap();
    rig.wait(&rig.stream, gate.ptr(), 1);
    let gave_up = |error: Error| assert!(error.to_string().contains("gave up"), "{error}");
    // Calls without a result take effect in any case.
    drop((memory, module));
    gave_up(rig.device.driver.module_load(PTX).unwrap_err());
    let mut host = vec![1; 4096];
    let (dst, src) = (CopyEnd::Host(host.as_mut_ptr()), CopyEnd::Device(data.ptr()));
    gave_up(copy(&rig.stream, dst, src, 4096).unwrap_err());
    let event = rig.event();
    // The kernel and the copy are two.
    (2..1024).for_each(|_| event.record(&rig.stream).unwrap());
    gave_up(event.record(&rig.stream).unwrap_err());

    word(&gate, 0).store(1, Ordering::Release);
    rig.stream.synchronize().unwrap();
    assert!(host.iter().all(|byte| *byte == 1), "it is the caller's again");
}

#[test]
fn on_a_machine_a_free_waits_for_deadlines_in_virtual_time() {
    let machine = ManualGpus::new(8);
    let rig = Rig::manual(&machine);
    let words = rig.words(2);
    let ns = 50_000_000_000u64;
    let out = words.ptr().add(4);
    let params: [&[u8]; 4] =
        [&words.ptr().0.to_le_bytes(), &1u32.to_le_bytes(), &out.0.to_le_bytes(), &ns.to_le_bytes()];
    rig.try_launch(&rig.stream, "wait_or_expire", 1, &params).unwrap();
    drop(rig.alloc(4096, MemoryKind::Unpooled));
    assert_eq!(word(&words, 1).load(Ordering::Acquire), 2);
    assert!(machine.now_ns() >= ns);
}

#[test]
fn a_single_thread_makes_room_on_a_machine_by_running_it() {
    let rig = Rig::manual(&ManualGpus::new(2));
    let words = rig.words(1);
    for _ in 0..2000 {
        rig.add_one(&rig.stream, words.ptr(), 1);
    }
    rig.stream.synchronize().unwrap();
    assert_eq!(word(&words, 0).load(Ordering::Acquire), 2000);
}

/// Found on a busy machine: deadlines of 300 s expired while a thread that freed memory was kept
/// from its processor.
#[test]
fn the_clock_of_ranks_stands_while_any_thread_holds_the_lock() {
    let time = VirtualTime::new().unwrap();
    let _member = time.join();
    let gpu = VirtualGpu::start(VirtConfig::default());
    std::thread::scope(|scope| {
        let holder = scope.spawn(|| {
            let (lock, ended) = gpu.hold("test", gpu.shared.enter().unwrap());
            ended.unwrap();
            let (start, began) = (Instant::now(), time.now());
            while start.elapsed() < WHILE {
                std::hint::spin_loop();
            }
            assert_eq!(time.now(), began);
            drop(lock);
        });
        let poller = Poller::new(Some(&time));
        while !holder.is_finished() {
            poller.pause();
        }
    });
    time.sleep(Duration::from_secs(300));
}

#[test]
fn a_fence_has_one_deadline_for_all_streams() {
    let time = VirtualTime::new().unwrap();
    let _member = time.join();
    let rig = Rig::threaded();
    let words = rig.words(2);
    let streams = [1u64, 2, 3, 4, 5, 6].map(|seconds| {
        let (stream, out, ns) = (rig.stream(), words.ptr().add(4), seconds * 1_000_000_000);
        let params: [&[u8]; 4] =
            [&words.ptr().0.to_le_bytes(), &1u32.to_le_bytes(), &out.0.to_le_bytes(), &ns.to_le_bytes()];
        rig.try_launch(&stream, "wait_or_expire", 1, &params).unwrap();
        stream
    });
    let fence = Fence::new(&rig.device, &mut Vec::new()).unwrap();
    assert!(!fence.wait_timeout(Duration::from_secs(3)).unwrap(), "the last kernel takes 6 s");
    assert!(fence.wait_timeout(Duration::from_secs(600)).unwrap());
    drop(streams);
}

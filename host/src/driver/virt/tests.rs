//! The driver's contract, on both executors.

use std::ops::Deref;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use epoxide_gpu::layout::Section;

use super::config::{Executor, Hooks};
use super::manual::{Drive, ManualGpus};
use super::*;
use crate::driver::{
    CopyEnd, Device, DevicePtr, Event, Fence, Graph as OwnedGraph, Kernel, LaunchConfig, MappedMemory,
    Memory, MemoryKind, Module as OwnedModule, RawStream, Stream,
};
use crate::error::{Error, Result};

const ONE_WARP: LaunchConfig =
    LaunchConfig { grid: 1, block: 32, shared_bytes: 0, cooperative: false, dependent: false };

pub(crate) const PTX: &str = r#"
.version 7.8
.target sm_90
.address_size 64

// words[i] += 1 for i in 0..n
.visible .entry add_one(.param .u64 words, .param .u32 n)
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [words];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r2, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r2, %r1;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r2, 4;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.u32 %r5, [%rd4];
    add.s32 %r5, %r5, 1;
    st.global.u32 [%rd4], %r5;
DONE:
    ret;
}

.visible .entry store(.param .u64 word, .param .u32 value)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [word];
    ld.param.u32 %r1, [value];
    st.release.sys.global.u32 [%rd1], %r1;
    ret;
}

// words[0] = value, then words[1] = value
.visible .entry answer(.param .u64 words, .param .u64 value)
{
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [words];
    ld.param.u64 %rd2, [value];
    st.global.u64 [%rd1], %rd2;
    st.release.sys.global.u64 [%rd1+8], %rd2;
    ret;
}

// Returns once the word has reached the value.
.visible .entry wait(.param .u64 word, .param .u32 value)
{
    .reg .pred %p<2>;
    .reg .b32 %r<3>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [word];
    ld.param.u32 %r1, [value];
LOOP:
    ld.acquire.sys.global.u32 %r2, [%rd1];
    setp.lt.u32 %p1, %r2, %r1;
    @%p1 bra LOOP;
    ret;
}

// The same with a deadline in ns; out = 1 if the word came in time, else 2.
.visible .entry wait_or_expire(.param .u64 word, .param .u32 value, .param .u64 out, .param .u64 ns)
{
    .reg .pred %p<3>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [word];
    ld.param.u32 %r1, [value];
    ld.param.u64 %rd2, [out];
    ld.param.u64 %rd3, [ns];
    mov.u64 %rd4, %globaltimer;
    add.s64 %rd5, %rd4, %rd3;
LOOP:
    ld.acquire.sys.global.u32 %r2, [%rd1];
    setp.ge.u32 %p1, %r2, %r1;
    @%p1 bra CAME;
    mov.u64 %rd4, %globaltimer;
    setp.lt.u64 %p2, %rd4, %rd5;
    @%p2 bra LOOP;
    mov.u32 %r3, 2;
    st.global.u32 [%rd2], %r3;
    ret;
CAME:
    mov.u32 %r3, 1;
    st.global.u32 [%rd2], %r3;
    ret;
}
"#;

/// A device with the kernels above.
pub(super) struct Rig {
    pub(super) device: Device,
    pub(super) module: OwnedModule,
    pub(super) stream: Stream,
    /// The device.
    pub(super) gpu: Arc<VirtualGpu>,
}

/// Makes a device unusable where a test fails, so that nothing waits any more for its kernels.
pub(super) struct Watch(Arc<VirtualGpu>);

impl Drop for Watch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.shared.fail("the test has failed");
        }
    }
}

/// Mapped host words that kernels may wait for.
pub(super) struct Words {
    // First, since freeing the memory waits for the kernels.
    _watch: Watch,
    memory: Memory,
}

impl Deref for Words {
    type Target = Memory;

    fn deref(&self) -> &Memory {
        &self.memory
    }
}

impl Rig {
    fn new(config: VirtConfig) -> Rig {
        let gpu = Arc::new(VirtualGpu::start(config));
        let device = Device { driver: gpu.clone() };
        let module = OwnedModule::load(&device, PTX).unwrap();
        let stream = Stream::new(&device).unwrap();
        Rig { device, module, stream, gpu }
    }

    pub(super) fn threaded() -> Rig {
        Rig::new(VirtConfig::default())
    }

    pub(super) fn manual(machine: &ManualGpus) -> Rig {
        Rig::new(VirtConfig {
            hooks: Hooks { executor: Executor::Manual(machine.clone()), ..Hooks::default() },
            ..VirtConfig::default()
        })
    }

    /// Hold this during a wait for threads that may wait for this device.
    pub(super) fn watch(&self) -> Watch {
        Watch(self.gpu.clone())
    }

    pub(super) fn stream(&self) -> Stream {
        Stream::high_priority(&self.device).unwrap()
    }

    pub(super) fn event(&self) -> Event {
        Event::timed(&self.device).unwrap()
    }

    pub(super) fn kernel(&self, name: &'static str) -> Kernel {
        self.module.kernel(name, 0).unwrap()
    }

    pub(super) fn alloc(&self, bytes: u64, kind: MemoryKind) -> Memory {
        Memory::alloc(&self.device, bytes, kind, "test").unwrap()
    }

    /// Mapped host words, zeroed.
    pub(super) fn words(&self, count: u64) -> Words {
        Words { _watch: self.watch(), memory: self.alloc(count * 4, MemoryKind::MappedHost) }
    }

    pub(super) fn try_launch(
        &self,
        stream: &Stream,
        name: &'static str,
        blocks: u32,
        params: &[&[u8]],
    ) -> Result<()> {
        let config =
            LaunchConfig { grid: blocks, block: 32, shared_bytes: 0, cooperative: false, dependent: false };
        // SAFETY: the tests keep memory until its streams are idle; wrong parameters are refused.
        unsafe { stream.launch(&self.kernel(name), &config, params) }
    }

    pub(super) fn add_one(&self, stream: &Stream, words: DevicePtr, count: u32) {
        let params: [&[u8]; 2] = [&words.0.to_le_bytes(), &count.to_le_bytes()];
        self.try_launch(stream, "add_one", count.div_ceil(32), &params).unwrap();
    }

    pub(super) fn store(&self, stream: &Stream, word: DevicePtr, value: u32) {
        self.try_launch(stream, "store", 1, &[&word.0.to_le_bytes(), &value.to_le_bytes()]).unwrap();
    }

    pub(super) fn wait(&self, stream: &Stream, word: DevicePtr, value: u32) {
        self.try_launch(stream, "wait", 1, &[&word.0.to_le_bytes(), &value.to_le_bytes()]).unwrap();
    }

    pub(super) fn read(&self, address: DevicePtr) -> u32 {
        let mut bytes = [0; 4];
        // SAFETY: the tests give addresses of memory that they hold.
        unsafe { self.stream().read(&mut bytes, address).unwrap() };
        u32::from_le_bytes(bytes)
    }
}

/// A word of mapped host memory.
pub(super) fn word(memory: &Memory, index: u64) -> &AtomicU32 {
    assert!(index * 4 < memory.bytes() && !memory.host_ptr().is_null());
    // SAFETY: inside the memory, aligned, and only accessed atomically here.
    unsafe { AtomicU32::from_ptr(memory.host_ptr().cast::<u32>().add(index as usize)) }
}

/// Runs a test on a threaded device and on one that is driven by hand.
pub(super) fn on_both(test: impl Fn(Rig)) {
    test(Rig::threaded());
    test(Rig::manual(&ManualGpus::new(7)));
}

#[test]
fn a_stream_runs_in_order() {
    on_both(|rig| {
        let memory = rig.alloc(400, MemoryKind::Device);
        let (stream, address) = (&rig.stream, memory.ptr());
        // SAFETY: the memory outlives the synchronise in `read`.
        unsafe { stream.fill(address, 1, 400).unwrap() };
        for _ in 0..3 {
            rig.add_one(stream, address, 100);
        }
        let mut bytes = [0; 400];
        // SAFETY: as above.
        unsafe { stream.read(&mut bytes, address).unwrap() };
        for value in bytes.chunks_exact(4) {
            assert_eq!(value, 0x0101_0104u32.to_le_bytes());
        }
        assert!(stream.is_done().unwrap());
    });
}

#[test]
fn calls_return_before_the_work_is_done() {
    on_both(|rig| {
        let words = rig.words(2);
        rig.wait(&rig.stream, words.ptr(), 1);
        rig.store(&rig.stream, words.ptr().add(4), 5);
        rig.device.driver.make_progress();
        assert!(!rig.stream.is_done().unwrap());
        assert_eq!(word(&words, 1).load(Ordering::Acquire), 0);
        word(&words, 0).store(1, Ordering::Release);
        rig.stream.synchronize().unwrap();
        assert_eq!(word(&words, 1).load(Ordering::Acquire), 5);
    });
}

/// A deadline is about work that does not end, not about a machine that has no time for the host.
#[test]
fn a_wait_goes_on_while_the_host_runs_the_work() {
    let rig = Rig::manual(&ManualGpus::new(7));
    let memory = rig.alloc(400, MemoryKind::Device);
    let event = rig.event();
    for _ in 0..30 {
        rig.add_one(&rig.stream, memory.ptr(), 100);
    }
    event.record(&rig.stream).unwrap();
    assert!(event.wait_timeout(Duration::ZERO).unwrap());
}

#[test]
fn streams_run_concurrently() {
    on_both(|rig| {
        let words = rig.words(1);
        let other = rig.stream();
        rig.wait(&rig.stream, words.ptr(), 1);
        rig.store(&other, words.ptr(), 1);
        rig.stream.synchronize().unwrap();
    });
}

#[test]
fn an_event_stands_for_its_last_record() {
    on_both(|rig| {
        let words = rig.words(3);
        let (blocked, free, waiter) = (rig.stream(), rig.stream(), rig.stream());
        let event = rig.event();
        assert!(event.is_done().unwrap());
        waiter.wait(&event).unwrap();

        rig.wait(&blocked, words.ptr(), 1);
        event.record(&blocked).unwrap();
        waiter.wait(&event).unwrap();
        rig.store(&waiter, words.ptr().add(4), 1);
        assert!(!event.is_done().unwrap());
        // The waiter still waits for the first record.
        event.record(&free).unwrap();
        event.synchronize().unwrap();
        assert!(event.is_done().unwrap());
        free.synchronize().unwrap();
        assert_eq!(word(&words, 1).load(Ordering::Acquire), 0);
        assert!(!waiter.is_done().unwrap());

        word(&words, 0).store(1, Ordering::Release);
        waiter.synchronize().unwrap();
        assert_eq!(word(&words, 1).load(Ordering::Acquire), 1);
        assert!(blocked.is_done().unwrap());
    });
}

#[test]
fn elapsed_time_between_events() {
    on_both(|rig| {
        let memory = rig.alloc(4096, MemoryKind::Device);
        let (start, end) = (rig.event(), rig.event());
        assert!(start.elapsed_ms(&end).unwrap_err().to_string().contains("never recorded"));
        start.record(&rig.stream).unwrap();
        rig.add_one(&rig.stream, memory.ptr(), 1024);
        end.record(&rig.stream).unwrap();
        end.synchronize().unwrap();
        assert!(start.elapsed_ms(&end).unwrap() > 0.0);
        assert!(end.elapsed_ms(&start).unwrap() < 0.0);
        let untimed = Event::new(&rig.device).unwrap();
        assert!(start.elapsed_ms(&untimed).unwrap_err().to_string().contains("without timing"));
    });
}

#[test]
fn elapsed_time_of_an_event_to_come_is_an_error() {
    let rig = Rig::manual(&ManualGpus::new(1));
    let (start, end) = (rig.event(), rig.event());
    start.record(&rig.stream).unwrap();
    end.record(&rig.stream).unwrap();
    assert!(start.elapsed_ms(&end).unwrap_err().to_string().contains("not come to it"));
}

#[test]
fn pageable_sources_are_read_at_once_and_mapped_ones_in_order() {
    on_both(|rig| {
        let words = rig.words(2);
        let target = rig.alloc(8, MemoryKind::Device);
        let mut pageable = 3u32.to_le_bytes();
        rig.wait(&rig.stream, words.ptr(), 1);
        let copy = |at: u64, host: *mut u8| {
            let dst = CopyEnd::Device(target.ptr().add(at));
            // SAFETY: mapped memory outlives the stream's work; the pageable source is read before
            // this returns.
            unsafe { rig.device.driver.copy(handle(&rig.stream), dst, CopyEnd::Host(host), 4) }.unwrap();
        };
        copy(0, pageable.as_mut_ptr());
        copy(4, words.host_ptr().wrapping_add(4));
        pageable.fill(9);
        word(&words, 1).store(4, Ordering::Release);
        word(&words, 0).store(1, Ordering::Release);
        rig.stream.synchronize().unwrap();
        assert_eq!((rig.read(target.ptr()), rig.read(target.ptr().add(4))), (3, 4));
    });
}

/// The raw handle of a stream, by way of adopting it.
pub(super) fn handle(stream: &Stream) -> u64 {
    // SAFETY: the stream is the device's own and outlives the handle, which the tests leave to the
    // device.
    unsafe { stream.device().driver.stream_adopt(stream.raw()) }.unwrap()
}

#[test]
fn a_fault_is_sticky_and_drops_queued_work() {
    on_both(|rig| {
        let words = rig.words(1);
        let event = rig.event();
        // Delayed, so that the fault occurs after the calls below.
        rig.wait(&rig.stream, words.ptr(), 1);
        rig.store(&rig.stream, DevicePtr(8), 1);
        rig.wait(&rig.stream, words.ptr(), 2);
        event.record(&rig.stream).unwrap();
        word(&words, 0).store(1, Ordering::Release);
        let error = rig.stream.synchronize().unwrap_err();
        assert!(matches!(&error, Error::VirtualFault(text) if text.contains("store")), "{error}");
        let same = |other: Error| assert_eq!(other.to_string(), error.to_string());
        same(event.synchronize().unwrap_err());
        same(event.is_done().unwrap_err());
        same(rig.stream.is_done().unwrap_err());
        same(rig.device.driver.stream_create(false).unwrap_err());
        same(rig.device.driver.alloc(4, MemoryKind::Device, "late").unwrap_err());
        same(rig.module.kernel("store", 0).unwrap_err());
    });
}

#[test]
fn a_faulting_copy_is_refused_before_it_is_enqueued() {
    on_both(|rig| {
        let memory = rig.alloc(16, MemoryKind::Device);
        // SAFETY: the driver rejects a write beyond the end.
        let error = unsafe { rig.stream.write(memory.ptr().add(8), &[0; 16]).unwrap_err() };
        assert!(matches!(&error, Error::Argument { argument: "dst", .. }), "{error}");
        let error = memory.write(&rig.stream, 8, &[0; 16]).unwrap_err();
        assert!(matches!(&error, Error::Argument { argument: "offset", .. }), "{error}");
        // SAFETY: the range is checked.
        let error = unsafe { rig.stream.fill(DevicePtr(64), 0, 4) }.unwrap_err();
        assert!(matches!(&error, Error::Argument { argument: "dst", .. }), "{error}");
        rig.stream.synchronize().unwrap();
    });
}

#[test]
fn a_destroyed_stream_finishes_its_work() {
    on_both(|rig| {
        let words = rig.words(2);
        let short = rig.stream();
        rig.wait(&short, words.ptr(), 1);
        rig.store(&short, words.ptr().add(4), 1);
        drop(short);
        word(&words, 0).store(1, Ordering::Release);
        rig.wait(&rig.stream, words.ptr().add(4), 1);
        rig.stream.synchronize().unwrap();
    });
}

#[test]
fn raw_streams_are_shared() {
    on_both(|rig| {
        let words = rig.words(1);
        // SAFETY: the stream outlives the adopted one.
        let adopted = unsafe { Stream::adopt(&rig.device, rig.stream.raw()) }.unwrap();
        rig.wait(&rig.stream, words.ptr(), 1);
        assert!(!adopted.is_done().unwrap());
        word(&words, 0).store(1, Ordering::Release);
        adopted.synchronize().unwrap();
        drop(adopted);
        rig.stream.synchronize().unwrap();
        let null = RawStream(std::ptr::null_mut());
        // SAFETY: the null stream is always there.
        let (a, b) = unsafe { (Stream::adopt(&rig.device, null), Stream::adopt(&rig.device, null)) };
        assert_eq!(a.unwrap().raw(), b.unwrap().raw());
        let other = Rig::threaded();
        // SAFETY: it is refused.
        assert!(unsafe { Stream::adopt(&other.device, rig.stream.raw()) }.is_err());
    });
}

#[test]
fn a_capture_is_replayed() {
    on_both(|rig| {
        let memory = rig.alloc(8, MemoryKind::Device);
        memory.write(&rig.stream, 0, &[0; 8]).unwrap();
        let graph = rig
            .stream
            .capture(|| {
                rig.add_one(&rig.stream, memory.ptr(), 2);
                rig.add_one(&rig.stream, memory.ptr(), 1);
                Ok(())
            })
            .unwrap();
        assert_eq!(rig.read(memory.ptr()), 0);
        for _ in 0..3 {
            // SAFETY: the test holds the memory of all that was recorded; so below.
            unsafe { graph.launch(&rig.stream).unwrap() };
        }
        // A graph within a graph.
        let twice = rig
            .stream
            // SAFETY: as above.
            .capture(|| unsafe { graph.launch(&rig.stream).and_then(|()| graph.launch(&rig.stream)) })
            .unwrap();
        drop(graph);
        // SAFETY: as above.
        unsafe { twice.launch(&rig.stream).unwrap() };
        rig.stream.synchronize().unwrap();
        assert_eq!((rig.read(memory.ptr()), rig.read(memory.ptr().add(4))), (10, 5));
    });
}

#[test]
fn a_graph_keeps_the_modules_of_its_kernels() {
    on_both(|rig| {
        let memory = rig.alloc(4, MemoryKind::Device);
        memory.write(&rig.stream, 0, &[0; 4]).unwrap();
        let loaded = || rig.gpu.shared.lock().modules.len();
        let before = loaded();
        let module = OwnedModule::load(&rig.device, PTX).unwrap();
        let kernel = module.kernel("add_one", 0).unwrap();
        drop(module);
        let (address, count) = (memory.ptr().0.to_le_bytes(), 1u32.to_le_bytes());
        // SAFETY: the test holds the memory of all that is recorded; so below.
        let launch = || unsafe { rig.stream.launch(&kernel, &ONE_WARP, &[&address, &count]) };
        let graph = rig.stream.capture(|| launch().and_then(|()| launch())).unwrap();
        drop(kernel);
        assert_eq!(loaded(), before + 1);
        // A graph within a graph is kept, too.
        // SAFETY: as above.
        let outer = rig.stream.capture(|| unsafe { graph.launch(&rig.stream) }).unwrap();
        drop(graph);
        assert_eq!(loaded(), before + 1);
        // SAFETY: as above.
        unsafe { outer.launch(&rig.stream).unwrap() };
        rig.stream.synchronize().unwrap();
        assert_eq!(rig.read(memory.ptr()), 2);
        drop(outer);
        assert_eq!(loaded(), before);
    });
}

#[test]
fn a_capture_that_fails_keeps_no_module() {
    on_both(|rig| {
        let memory = rig.alloc(4, MemoryKind::Device);
        let loaded = rig.gpu.shared.lock().modules.len();
        let module = OwnedModule::load(&rig.device, PTX).unwrap();
        let kernel = module.kernel("add_one", 0).unwrap();
        drop(module);
        let params: [&[u8]; 2] = [&memory.ptr().0.to_le_bytes(), &1u32.to_le_bytes()];
        let refused = rig.stream.capture(|| {
            // SAFETY: recorded, and never run.
            unsafe { rig.stream.launch(&kernel, &ONE_WARP, &params)? };
            Err(Error::internal("test", "it does not end well"))
        });
        assert!(refused.is_err());
        drop(kernel);
        assert_eq!(rig.gpu.shared.lock().modules.len(), loaded);
    });
}

#[test]
fn a_capture_forks_and_joins() {
    on_both(|rig| {
        let words = rig.words(2);
        let side = rig.stream();
        let (fork, join) = (rig.event(), rig.event());
        let graph = rig
            .stream
            .capture(|| {
                fork.record(&rig.stream)?;
                side.wait(&fork)?;
                // Only concurrent lanes pass this wait.
                rig.wait(&rig.stream, words.ptr(), 1);
                rig.store(&side, words.ptr(), 1);
                join.record(&side)?;
                rig.stream.wait(&join)?;
                rig.add_one(&rig.stream, words.ptr().add(4), 1);
                Ok(())
            })
            .unwrap();
        for replay in 1..4 {
            word(&words, 0).store(0, Ordering::Release);
            // SAFETY: as above.
            unsafe { graph.launch(&rig.stream).unwrap() };
            rig.stream.synchronize().unwrap();
            assert_eq!(word(&words, 1).load(Ordering::Acquire), replay);
        }
        assert!(side.is_done().unwrap());
        let error = fork.synchronize().unwrap_err();
        assert!(error.to_string().contains("captured"), "{error}");
        assert!(side.wait(&join).is_err());
        fork.record(&side).unwrap();
        fork.synchronize().unwrap();
    });
}

#[test]
fn a_capture_rejects_calls_that_it_cannot_record() {
    on_both(|rig| {
        let side = rig.stream();
        let event = rig.event();
        let capture = |work: &dyn Fn()| -> Result<OwnedGraph> {
            rig.stream.capture(|| {
                work();
                Ok(())
            })
        };
        let text = |result: Result<OwnedGraph>| result.unwrap_err().to_string();
        let refused = text(capture(&|| assert!(rig.stream.synchronize().is_err())));
        assert!(refused.contains("stream_synchronize"), "{refused}");
        let refused = text(capture(&|| assert!(rig.stream.is_done().is_err())));
        assert!(refused.contains("stream_query"), "{refused}");
        let refused = text(capture(&|| assert!(side.synchronize().is_err())));
        assert!(refused.contains("stream_synchronize"), "{refused}");
        let refused = text(capture(&|| assert!(event.synchronize().is_err())));
        assert!(refused.contains("event_synchronize"), "{refused}");
        capture(&|| assert!(side.is_done().unwrap() && event.is_done().unwrap())).unwrap();
        let refused = text(capture(&|| {
            assert!(Memory::alloc(&rig.device, 4, MemoryKind::Device, "late").is_err());
            assert!(event.record(&rig.stream).is_err());
        }));
        assert!(refused.contains("allocation"), "{refused}");

        event.record(&side).unwrap();
        let refused = text(capture(&|| assert!(rig.stream.wait(&event).is_err())));
        assert!(refused.contains("outside of the capture"), "{refused}");

        let memory = rig.alloc(4, MemoryKind::Device);
        let refused = text(capture(&|| {
            event.record(&rig.stream).unwrap();
            side.wait(&event).unwrap();
            rig.add_one(&side, memory.ptr(), 1);
            assert!(rig.device.driver.capture_end(handle(&side)).is_err());
        }));
        assert!(refused.contains("not joined"), "{refused}");
        // Neither stream is left in capture mode.
        side.synchronize().unwrap();
        rig.stream.synchronize().unwrap();
        assert!(rig.device.driver.capture_end(handle(&side)).is_err());
    });
}

#[test]
fn a_stream_is_of_no_capture_that_became_invalid() {
    on_both(|rig| {
        let other = rig.stream();
        let graph = rig.stream.capture_for(Some(7), || {
            assert_eq!([rig.stream.captured_for()?, other.captured_for()?], [Some(7), None]);
            other.synchronize().unwrap_err();
            assert_eq!(rig.device.driver.stream_capture(handle(&rig.stream))?, 0);
            assert_eq!([rig.stream.captured_for()?, other.captured_for()?], [Some(7), None]);
            Ok(())
        });
        graph.unwrap_err();
    });
}

#[test]
fn launches_are_checked() {
    let rig = Rig::threaded();
    let refused = |blocks: u32, params: &[&[u8]]| {
        let error = rig.try_launch(&rig.stream, "store", blocks, params).unwrap_err();
        assert!(matches!(error, Error::Launch { kernel: "store", .. }), "{error}");
        error.to_string()
    };
    assert!(refused(1, &[&[0; 8]]).contains("2 parameters, 1"));
    let text = refused(1, &[&[0; 8], &[0; 8]]);
    assert!(text.contains("parameter 1") && text.contains("4 bytes, 8"), "{text}");
    let text = refused(0, &[&[0; 8], &[0; 4]]);
    assert!(text.contains("grid is [0, 1, 1] (each must be from 1 to"), "{text}");

    let launch = |block: u32, shared_bytes: u32, cooperative: bool, grid: u32| {
        let config = LaunchConfig { grid, block, shared_bytes, cooperative, dependent: false };
        // SAFETY: nothing runs that is not refused.
        unsafe { rig.stream.launch(&rig.kernel("store"), &config, &[&[0; 8], &[0; 4]]) }
    };
    for ((block, shared_bytes, cooperative, grid), part) in [
        ((2048, 0, false, 1), "block is [2048, 1, 1] (each must be from 1 to"),
        (
            (32, 100 << 10, false, 1),
            "102400 bytes of dynamic shared memory, but it was looked up for at most 49152",
        ),
        ((1024, 0, true, 2 * 132 + 1), "only 264"),
        ((u32::MAX, 0, true, 1), "block is [4294967295, 1, 1] (each must be from 1 to"),
    ] {
        let error = launch(block, shared_bytes, cooperative, grid).unwrap_err();
        assert!(matches!(error, Error::Launch { kernel: "store", .. }), "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
    let error = rig.module.kernel("store", 1 << 20).unwrap_err().to_string();
    assert!(error.contains("1048576 bytes of dynamic shared memory wanted"), "{error}");
    rig.stream.synchronize().unwrap();
}

#[test]
fn cooperative_launches_that_cannot_be_resident_are_refused_and_the_device_stays_usable() {
    const SHARED: &str = "
.version 7.8
.target sm_90
.address_size 64

.visible .entry shared()
{
    .shared .align 4 .b8 bytes[49152];
    .reg .b32 %r<2>;
    mov.u32 %r1, 0;
    st.shared.u32 [bytes], %r1;
    ret;
}
";
    let few = Hooks { max_blocks_resident: Some(3), ..Hooks::default() };
    // A multiprocessor has room for four such blocks.
    for (hooks, fit) in [(Hooks::default(), 4 * 132), (few, 3)] {
        let rig = Rig::new(VirtConfig { hooks, ..VirtConfig::default() });
        let kernel = OwnedModule::load(&rig.device, SHARED).unwrap().kernel("shared", 0).unwrap();
        let launch = |grid| {
            let config = LaunchConfig { grid, cooperative: true, ..ONE_WARP };
            // SAFETY: the kernel has no parameters.
            unsafe { rig.stream.launch(&kernel, &config, &[]) }
        };
        let error = launch(1000).unwrap_err();
        assert!(matches!(error, Error::Launch { kernel: "shared", .. }), "{error}");
        assert!(error.to_string().contains(&format!("only {fit}")), "{error}");
        launch(fit + 1).unwrap_err();
        launch(fit).unwrap();
        rig.stream.synchronize().unwrap();
    }
}

#[test]
fn static_and_dynamic_shared_memory_count_together() {
    const STATIC: &str = "
.version 7.8
.target sm_90
.address_size 64

.visible .entry static_bytes()
{
    .shared .align 4 .b8 bytes[8192];
    .reg .b32 %r<2>;
    mov.u32 %r1, 0;
    st.shared.u32 [bytes], %r1;
    ret;
}
";
    let rig = Rig::threaded();
    let module = OwnedModule::load(&rig.device, STATIC).unwrap();
    let launch = |wanted, shared_bytes| {
        let kernel = module.kernel("static_bytes", wanted).unwrap();
        // SAFETY: the kernel has no parameters.
        unsafe { rig.stream.launch(&kernel, &LaunchConfig { shared_bytes, ..ONE_WARP }, &[]) }
    };
    launch(0, 40 << 10).unwrap();
    launch(44 << 10, 44 << 10).unwrap();
    let error = launch(0, 44 << 10).unwrap_err();
    assert!(matches!(error, Error::Launch { kernel: "static_bytes", .. }), "{error}");
    let text = "45056 bytes of dynamic shared memory, but it was looked up for at most 40960";
    assert!(error.to_string().contains(text), "{error}");
    rig.stream.synchronize().unwrap();
}

#[test]
fn bad_modules_are_refused_with_the_place() {
    let rig = Rig::threaded();
    let bad = PTX.replacen("mad.lo.s32", "mod.lo.s32", 1);
    let line = bad.lines().position(|line| line.contains("mod.lo.s32")).unwrap() + 1;
    let error = OwnedModule::load(&rig.device, &bad).unwrap_err();
    assert!(matches!(&error, Error::Ptx(text) if text.contains(&format!("line {line},"))), "{error}");
    let error = rig.module.kernel("stor", 0).unwrap_err();
    assert!(matches!(&error, Error::Ptx(text) if text.contains("add_one")), "{error}");
}

#[test]
fn memory_is_counted_poisoned_and_given_back() {
    let rig = Rig::new(VirtConfig { memory_bytes: 1 << 20, ..VirtConfig::default() });
    let memory = rig.alloc(1 << 19, MemoryKind::Device);
    // Not by a stream that is dropped: the free of memory waits for what its drop enqueues.
    let mut word = [0; 4];
    memory.read(&rig.stream, 0, &mut word).unwrap();
    assert_ne!(word, [0; 4], "fresh memory holds poison");
    let shareable = rig.alloc(1, MemoryKind::Shareable);
    assert_eq!(rig.device.free_memory().unwrap(), (1 << 19) - 4096);
    let host = rig.alloc(1 << 22, MemoryKind::MappedHost);
    assert_eq!(host.host_ptr() as u64, host.ptr().0);
    let error = Memory::alloc(&rig.device, 1 << 19, MemoryKind::Device, "big").unwrap_err();
    assert!(
        matches!(&error, Error::OutOfMemory { what, requested: 524_288, available: 520_192 } if what == "big"),
        "{error}"
    );
    assert!(Memory::alloc(&rig.device, u64::MAX, MemoryKind::Device, "huge").is_err());
    assert!(memory.export().unwrap_err().to_string().contains("Shareable"));
    drop((memory, shareable));
    assert_eq!(rig.device.free_memory().unwrap(), 1 << 20);
}

#[test]
fn memory_of_no_bytes_has_an_address() {
    let rig = Rig::threaded();
    for kind in [
        MemoryKind::Device,
        MemoryKind::Shareable,
        MemoryKind::MappedHost,
        MemoryKind::SharedHost,
        MemoryKind::Unpooled,
    ] {
        let memory = rig.alloc(0, kind);
        assert_eq!(memory.bytes(), 0, "{kind:?}");
        assert_ne!(memory.ptr(), DevicePtr::NULL, "{kind:?}");
        memory.write(&rig.stream, 0, &[]).unwrap();
        memory.read(&rig.stream, 0, &mut []).unwrap();
    }
}

#[test]
fn freed_memory_stays_until_queued_work_is_done() {
    on_both(|rig| {
        let gate = rig.words(1);
        let data = rig.alloc(64 * 4, MemoryKind::Device);
        let free_before = rig.device.free_memory().unwrap();
        rig.wait(&rig.stream, gate.ptr(), 1);
        rig.add_one(&rig.stream, data.ptr(), 64);
        drop(data);
        assert_eq!(rig.device.free_memory().unwrap(), free_before);
        word(&gate, 0).store(1, Ordering::Release);
        rig.stream.synchronize().unwrap();
        assert!(rig.device.free_memory().unwrap() > free_before);
    });
}

/// A free of a GPU's pool runs behind the device's streams.
#[test]
fn freed_memory_that_queued_work_may_use_cannot_be_allocated() {
    let rig = Rig::new(VirtConfig { memory_bytes: 1 << 20, ..VirtConfig::default() });
    let gate = rig.words(1);
    let whole = || Memory::alloc(&rig.device, 1 << 20, MemoryKind::Device, "whole");
    let first = whole().unwrap();
    rig.wait(&rig.stream, gate.ptr(), 1);
    drop(first);
    let error = whole().unwrap_err();
    assert!(matches!(&error, Error::OutOfMemory { available: 0, .. }), "{error}");
    word(&gate, 0).store(1, Ordering::Release);
    rig.stream.synchronize().unwrap();
    drop(whole().unwrap());
}

/// Unmapping does not wait: an owner that frees too early causes a fault, here as on a GPU.
#[test]
fn memory_that_peers_map_goes_at_once_and_kernels_in_flight_fault() {
    on_both(|rig| {
        let gate = rig.words(1);
        let pool = rig.alloc(64 * 4, MemoryKind::Shareable);
        rig.wait(&rig.stream, gate.ptr(), 1);
        rig.add_one(&rig.stream, pool.ptr(), 64);
        drop(pool);
        word(&gate, 0).store(1, Ordering::Release);
        let error = rig.stream.synchronize().unwrap_err();
        assert!(matches!(&error, Error::VirtualFault(text) if text.contains("add_one")), "{error}");
    });
}

#[test]
fn a_fence_comes_behind_all_streams_but_those_that_record() {
    on_both(|rig| {
        let gate = rig.words(2);
        let (busy, other, captured) = (rig.stream(), rig.stream(), rig.stream());
        rig.wait(&busy, gate.ptr(), 1);
        let mut spare = Vec::new();
        let graph = captured.capture(|| {
            let fence = Fence::new(&rig.device, &mut spare)?;
            assert!(!fence.wait_timeout(Duration::from_millis(5))?, "one stream is not through");
            // Behind the fence for others, and not for the stream that it waits for.
            fence.order_before(&other)?;
            rig.store(&other, gate.ptr().add(4), 1);
            word(&gate, 0).store(1, Ordering::Release);
            assert!(fence.wait_timeout(Duration::from_secs(120))?);
            fence.into_spare(&mut spare);
            Ok(())
        });
        other.synchronize().unwrap();
        assert_eq!(word(&gate, 1).load(Ordering::Acquire), 1);
        // The rig's stream, these two, and perhaps one for destroyed streams.
        assert!((3..=4).contains(&spare.len()), "{}", spare.len());
        drop(graph.unwrap());
    });
}

/// Waits until a fence has passed, after checking that it has not while `gate` is closed.
fn assert_behind_gate(fence: &Fence, gate: &Words) {
    assert!(!fence.wait_timeout(Duration::from_millis(5)).unwrap(), "work in front of it still runs");
    word(gate, 0).store(1, Ordering::Release);
    assert!(fence.wait_timeout(Duration::from_secs(120)).unwrap());
}

#[test]
fn a_fence_comes_behind_what_a_stream_had_before_its_capture() {
    on_both(|rig| {
        let gate = rig.words(1);
        let captured = rig.stream();
        rig.wait(&captured, gate.ptr(), 1);
        let mut fence = None;
        let graph = captured.capture(|| {
            fence = Some(Fence::new(&rig.device, &mut Vec::new())?);
            Ok(())
        });
        assert_behind_gate(&fence.unwrap(), &gate);
        drop(graph.unwrap());
    });
}

#[test]
fn a_fence_comes_behind_what_a_stream_had_before_it_joined_a_capture() {
    on_both(|rig| {
        let gate = rig.words(1);
        let (joins, fork, join) = (rig.stream(), rig.event(), rig.event());
        rig.wait(&joins, gate.ptr(), 1);
        let mut fence = None;
        let graph = rig.stream.capture(|| {
            fork.record(&rig.stream)?;
            joins.wait(&fork)?;
            fence = Some(Fence::new(&rig.device, &mut Vec::new())?);
            join.record(&joins)?;
            rig.stream.wait(&join)
        });
        assert_behind_gate(&fence.unwrap(), &gate);
        drop(graph.unwrap());
    });
}

#[test]
fn a_fence_comes_behind_a_stream_that_is_gone() {
    on_both(|rig| {
        let gate = rig.words(1);
        let gone = rig.stream();
        rig.wait(&gone, gate.ptr(), 1);
        drop(gone);
        assert_behind_gate(&Fence::new(&rig.device, &mut Vec::new()).unwrap(), &gate);
    });
}

#[test]
fn handles_of_another_device_are_refused() {
    let (here, there) = (Rig::threaded(), Rig::threaded());
    let event = there.event();
    let error = here.stream.wait(&event).unwrap_err();
    assert!(matches!(&error, Error::Argument { argument: "event", .. }), "{error}");
}

#[test]
fn peers_share_memory() {
    let machine = ManualGpus::new(3);
    for (a, b) in [(Rig::threaded(), Rig::threaded()), (Rig::manual(&machine), Rig::manual(&machine))] {
        let pool = a.alloc(8, MemoryKind::Shareable);
        let peer = Memory::import(&b.device, pool.export().unwrap(), 8, "rank 0").unwrap();
        assert_eq!(a.read(pool.ptr()), 0, "shareable memory is zero");
        a.wait(&a.stream, pool.ptr(), 1);
        a.store(&a.stream, pool.ptr().add(4), 2);
        b.store(&b.stream, peer.ptr(), 1);
        b.wait(&b.stream, peer.ptr().add(4), 2);
        b.stream.synchronize().unwrap();
        a.stream.synchronize().unwrap();
        assert!(peer.export().is_err());
        let fd = pool.export().unwrap();
        assert!(Memory::import(&b.device, fd, 1 << 20, "rank 0").is_err());
    }
}

#[test]
fn peers_share_memory_across_processes() {
    use epoxide_launch::{one_test, spawn_ranks};
    let timeout = Duration::from_secs(120);
    let outcome = spawn_ranks(2, timeout, |_| {
        let mut command = one_test("driver::virt::tests::as_a_rank");
        command.env(ROLE, "1").stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        Ok(command)
    });
    assert_eq!(outcome.unwrap().code(), 0);
}

const ROLE: &str = "EPOXIDE_TEST_VIRT";

/// A rank of the test above; does nothing as a test of its own.
#[test]
fn as_a_rank() {
    use crate::group::{ProcessGroup, rendezvous};
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let group = rendezvous(Duration::from_secs(120)).unwrap();
    let rig = Rig::threaded();
    let own = rig.alloc(4, MemoryKind::Shareable);
    let mut fds = group.exchange_fds(&[own.export().unwrap().as_fd()]).unwrap();
    let fd = fds[1 - group.rank() as usize].remove(0);
    let peer = Memory::import(&rig.device, fd, 4, "peer").unwrap();
    // The two kernels take turns in raising both words.
    for round in 1..20 {
        rig.store(&rig.stream, peer.ptr(), round);
        rig.wait(&rig.stream, own.ptr(), round);
    }
    rig.stream.synchronize().unwrap();
    group.barrier(group.timeout()).unwrap();
}

/// Runs a kernel of `ptx` that stores answers for the host in mapped memory, for some rounds.
fn answers_to_the_host(ptx: &str, executor: Executor) -> Result<()> {
    let checker = Some(Checker::new(CheckConfig::default()));
    let rig = Rig::new(VirtConfig {
        checker,
        hooks: Hooks { executor, ..Hooks::default() },
        ..VirtConfig::default()
    });
    let kernel = OwnedModule::load(&rig.device, ptx)?.kernel("answer", 0)?;
    let answers = MappedMemory::alloc(&rig.device, 16, "answers")?;
    answers.describe(&[Section::one("count", 8), Section::one("tag", 8).at(8)]);
    let config = LaunchConfig { grid: 1, block: 1, shared_bytes: 0, cooperative: false, dependent: false };
    for round in 1..20u64 {
        // SAFETY: the memory is freed behind the kernel.
        unsafe {
            rig.stream.launch(&kernel, &config, &[&answers.ptr().0.to_le_bytes(), &round.to_le_bytes()])?;
        }
        while answers.load(8)? != round {
            rig.device.driver.make_progress();
        }
        assert_eq!(answers.read_all::<u32>(0, 2)?, [round as u32, 0]);
        assert_eq!(answers.read::<u64>(0)?, round);
    }
    Ok(())
}

#[test]
fn host_reads_of_mapped_memory_are_checked() {
    for executor in [Executor::Threaded, Executor::Manual(ManualGpus::new(7))] {
        answers_to_the_host(PTX, executor.clone()).unwrap();
        let relaxed = PTX.replace("st.release.sys.global.u64", "st.relaxed.sys.global.u64");
        let error = answers_to_the_host(&relaxed, executor.clone()).unwrap_err();
        assert!(
            matches!(&error, Error::VirtualFault(text) if text.contains("data race at 'answers' + 0x0 (count)")),
            "{error}"
        );
        let said = error.to_string();
        assert!(
            said.contains("orders nothing: the write is no release") && said.contains("st.relaxed.sys"),
            "{said}"
        );
    }
    let memory = MappedMemory::alloc(&Rig::threaded().device, 16, "answers").unwrap();
    let refused = memory.load(4).unwrap_err().to_string();
    assert!(refused.contains("multiple of 8"), "{refused}");
    assert!(memory.load(u64::MAX - 7).is_err() && memory.read_all::<u32>(8, 3).is_err());
}

#[test]
fn races_name_the_part_of_memory_that_they_are_in() {
    let checker = Some(Checker::new(CheckConfig::default()));
    let [a, b] = [0, 1]
        .map(|ordinal| Rig::new(VirtConfig { ordinal, checker: checker.clone(), ..VirtConfig::default() }));
    let pool = a.alloc(1024, MemoryKind::Shareable);
    pool.describe(&[Section::array("ready", 8, 128)]);
    let peer = Memory::import(&b.device, pool.export().unwrap(), 1024, "pool of rank 0").unwrap();
    a.add_one(&a.stream, pool.ptr().add(256), 1);
    b.add_one(&b.stream, peer.ptr().add(256), 1);
    let ends = [a.stream.synchronize(), b.stream.synchronize()];
    let report = ends.into_iter().find_map(Result::err).unwrap().to_string();
    assert!(report.contains("+ 0x100 (ready[2])"), "{report}");
}

#[test]
fn a_dropped_device_abandons_spinning_kernels() {
    let device = VirtualGpu::new(VirtConfig::default());
    // Raw handles, because owners could not be freed while a kernel spins.
    let module = device.driver.module_load(PTX).unwrap();
    let kernel = device.driver.module_kernel(module, "wait", 0).unwrap();
    let stream = device.driver.stream_create(false).unwrap();
    let word = device.driver.alloc(4, MemoryKind::Device, "word").unwrap().ptr;
    let params: [&[u8]; 2] = [&word.0.to_le_bytes(), &u32::MAX.to_le_bytes()];
    // SAFETY: the parameters are those of the kernel, and the word is as old as the device.
    unsafe { device.driver.launch(stream, kernel, &ONE_WARP, &params) }.unwrap();
    drop(device);
}

/// Two devices hand a word to and fro; returns the machine's digest.
fn ping_pong(seed: u64) -> u64 {
    let machine = ManualGpus::new(seed);
    let rigs = [Rig::manual(&machine), Rig::manual(&machine)];
    let pool = rigs[0].alloc(8, MemoryKind::Shareable);
    let peer = Memory::import(&rigs[1].device, pool.export().unwrap(), 8, "rank 0").unwrap();
    for round in 1..10 {
        rigs[0].store(&rigs[0].stream, pool.ptr(), round);
        rigs[0].wait(&rigs[0].stream, pool.ptr().add(4), round);
        rigs[1].wait(&rigs[1].stream, peer.ptr(), round);
        rigs[1].store(&rigs[1].stream, peer.ptr().add(4), round);
    }
    let extra = rigs[0].alloc(4 * 512, MemoryKind::Device);
    let side = rigs[0].stream();
    rigs[0].add_one(&side, extra.ptr(), 512);
    assert_eq!(machine.drive(10), Drive::Ran);
    rigs.iter().for_each(|rig| rig.stream.synchronize().unwrap());
    side.synchronize().unwrap();
    assert_eq!(machine.drive(10), Drive::Idle);
    machine.schedule_digest()
}

#[test]
fn a_seed_fixes_the_whole_run() {
    assert_eq!(ping_pong(1), ping_pong(1));
    assert_ne!(ping_pong(1), ping_pong(2));
}

#[test]
fn a_wait_in_vain_is_reported() {
    let machine = ManualGpus::new(5);
    let rig = Rig::manual(&machine);
    let words = rig.words(1);
    rig.wait(&rig.stream, words.ptr(), 1);
    let error = rig.stream.synchronize().unwrap_err().to_string();
    assert!(error.contains("spinning") && error.contains("'wait'") && error.contains("seed 5"), "{error}");
    // The device is as usable as before.
    word(&words, 0).store(1, Ordering::Release);
    rig.stream.synchronize().unwrap();
}

#[test]
fn large_grids_that_spin_are_found_to() {
    let machine = ManualGpus::new(9);
    let rigs = [Rig::manual(&machine), Rig::manual(&machine)];
    let words: Vec<Words> = rigs.iter().map(|rig| rig.words(1)).collect();
    for (rig, words) in rigs.iter().zip(&words) {
        let params: [&[u8]; 2] = [&words.ptr().0.to_le_bytes(), &1u32.to_le_bytes()];
        rig.try_launch(&rig.stream, "wait", 500, &params).unwrap();
    }
    let error = rigs[0].stream.synchronize().unwrap_err().to_string();
    assert!(error.contains("GPU 0: kernel 'wait': 500") && error.contains("lines more"), "{error}");
    words.iter().for_each(|words| word(words, 0).store(1, Ordering::Release));
    rigs.iter().for_each(|rig| rig.stream.synchronize().unwrap());
}

#[test]
fn deadlines_of_kernels_expire_in_virtual_time() {
    let machine = ManualGpus::new(5);
    let rig = Rig::manual(&machine);
    let words = rig.words(2);
    let ns = 100_000_000_000u64;
    let launch = || {
        let (flag, out) = (words.ptr(), words.ptr().add(4));
        let params: [&[u8]; 4] =
            [&flag.0.to_le_bytes(), &1u32.to_le_bytes(), &out.0.to_le_bytes(), &ns.to_le_bytes()];
        rig.try_launch(&rig.stream, "wait_or_expire", 1, &params).unwrap();
    };
    launch();
    assert_eq!(machine.drive(100_000), Drive::Spinning);
    rig.stream.synchronize().unwrap();
    assert_eq!(word(&words, 1).load(Ordering::Acquire), 2);
    assert!(machine.now_ns() >= ns);
    word(&words, 0).store(1, Ordering::Release);
    launch();
    rig.stream.synchronize().unwrap();
    assert_eq!(word(&words, 1).load(Ordering::Acquire), 1);
}

#[test]
fn a_patient_machine_lets_other_threads_enqueue() {
    let machine = ManualGpus::with_patience(5, Duration::from_secs(120));
    let (a, b) = (Rig::manual(&machine), Rig::manual(&machine));
    let pool = a.alloc(4, MemoryKind::Shareable);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            a.wait(&a.stream, pool.ptr(), 1);
            a.stream.synchronize().unwrap();
        });
        let peer = Memory::import(&b.device, pool.export().unwrap(), 4, "rank 0").unwrap();
        std::thread::sleep(Duration::from_millis(30));
        b.store(&b.stream, peer.ptr(), 1);
        b.stream.synchronize().unwrap();
    });
    assert!(machine.now_ns() < 1_000_000_000);
}

//! Check mode where a case is more than one kernel on one device: streams, devices, the host, and
//! memory and registers whose contents a program must not rely on. Single kernels are files, which
//! `cases.rs` runs.

use epoxide_vgpu::{
    CheckConfig, Checker, Fault, FaultKind, Grid, GridConfig, Launch, Machine, MachineError, Memory,
    MemoryError, Module, Past, Progress, Region, Residency, Trace, for_each_seed,
};

use crate::cases::SHARED;
use crate::common::{broken_seeds, correct_seeds, device, kernel, launch, run_numbered};

/// 8-byte words of every test's buffer.
const WORDS: usize = 64;

fn races() -> Checker {
    Checker::new(CheckConfig::default())
}

/// A kernel `k(buf)` from a body.
fn parse(body: &str) -> Module {
    let ptx = kernel(SHARED, body);
    Module::parse(&ptx).unwrap_or_else(|e| panic!("{e}\n{ptx}"))
}

/// Runs grids to their ends, in turns of random lengths.
fn finish(grids: &mut [&mut Grid], seed: u64) -> Result<(), Box<Fault>> {
    let mut turn = seed;
    let mut done = vec![false; grids.len()];
    let mut rounds = 0;
    while done.iter().any(|d| !d) {
        turn = turn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = (turn >> 33) as usize % grids.len();
        done[at] = grids[at].step(1 + (turn >> 40) % 16)? == Progress::Done;
        rounds += 1;
        assert!(rounds < 1_000_000, "does not end: {}", grids[at].stuck_report());
    }
    Ok(())
}

/// A buffer of a device, and the means to launch `k(buf)` on it.
struct Device {
    checker: Option<Checker>,
    memory: Memory,
    buf: Region,
    seed: u64,
}

impl Device {
    /// In check mode, with a buffer of which word `i` holds `i << 32`.
    fn new(seed: u64) -> Self {
        Self::with(seed, Some(races()))
    }

    fn with(seed: u64, checker: Option<Checker>) -> Self {
        let memory = Memory::checked(seed, checker.clone());
        let buf = memory.alloc(WORDS as u64 * 8, "buf").unwrap();
        let bytes: Vec<u8> = (0..WORDS as u64).flat_map(|i| (i << 32).to_ne_bytes()).collect();
        memory.write(buf.addr(), &bytes).unwrap();
        Self { checker, memory, buf, seed }
    }

    /// In check mode, with a buffer of 64 bytes of the host.
    fn on_host(seed: u64, label: &str) -> Self {
        let checker = Some(races());
        let memory = Memory::checked(seed, checker.clone());
        let buf = memory.alloc_host(64, label).unwrap();
        Self { checker, memory, buf, seed }
    }

    fn checker(&self) -> &Checker {
        self.checker.as_ref().expect("check mode")
    }

    /// Begins a launch of one thread on this buffer, as work of no stream.
    fn start_on(&self, module: &Module, buf: &Region) -> Grid {
        let (kernel, params) = (module.kernel("k").unwrap(), buf.addr().to_ne_bytes());
        Grid::new(kernel, self.memory.clone(), &device(self.seed), launch(1, 1), &params).unwrap()
    }

    /// Begins a launch as work of a stream of its own, after `past`.
    fn start_in(&self, module: &Module, shape: GridConfig, past: &Past) -> Grid {
        let (kernel, params) = (module.kernel("k").unwrap(), self.buf.addr().to_ne_bytes());
        let order = Some((self.checker().timeline(), past));
        let (residency, memory) = (Residency::InTurn, self.memory.clone());
        Grid::launch(residency, kernel, memory, &device(self.seed), shape, &params, order).unwrap()
    }

    /// Runs a launch of one thread to its end.
    fn run(&self, module: &Module) -> Result<(), Box<Fault>> {
        finish(&mut [&mut self.start_on(module, &self.buf)], self.seed)
    }

    /// The same as work of a stream of its own, after `past`.
    fn run_after(&self, module: &Module, past: &Past) -> Result<Past, Box<Fault>> {
        let mut grid = self.start_in(module, launch(1, 1), past);
        finish(&mut [&mut grid], self.seed)?;
        Ok(grid.past())
    }

    fn words(&self) -> Result<Vec<u64>, MemoryError> {
        let mut bytes = vec![0; self.buf.bytes() as usize];
        self.memory.read(self.buf.addr(), &mut bytes)?;
        Ok(bytes.chunks_exact(8).map(|c| u64::from_ne_bytes(c.try_into().unwrap())).collect())
    }
}

/// The fault must be a race between these two accesses, in either order, for want of `missing`.
fn assert_race(fault: &Fault, [a, b]: [&str; 2], missing: &str) {
    let FaultKind::Race(race) = &fault.kind else { panic!("not a race: {fault}") };
    let (second, first) = (&fault.at.ptx_text, &race.other.at.ptx_text);
    let between = second.contains(a) && first.contains(b) || second.contains(b) && first.contains(a);
    assert!(between && race.missing.contains(missing), "{fault}");
    assert_eq!((race.other.kernel.as_str(), fault.kernel.as_str()), ("k", "k"), "{fault}");
}

/// Adds 1 to the first word, in the plainest way.
const INCREMENT: &str = "ld.global.u64 %rd1, [%rd40]; add.u64 %rd1, %rd1, 1; st.global.u64 [%rd40], %rd1;";

#[test]
fn the_end_of_a_kernel_orders_what_is_launched_after_it() {
    let module = parse(INCREMENT);
    for_each_seed(correct_seeds(), |seed| {
        let device = Device::new(seed);
        (0..3).for_each(|_| device.run(&module).unwrap());
        assert_eq!(device.words().unwrap()[0], 3);
    });
}

#[test]
fn kernels_of_two_streams_race_without_an_event() {
    let module = parse(INCREMENT);
    for_each_seed(correct_seeds(), |seed| {
        for event in [true, false] {
            let device = Device::new(seed);
            let before = device.checker().host_past();
            let after = device.run_after(&module, &before).unwrap();
            // It runs after the other one, but without the event nothing orders the two.
            let result = device.run_after(&module, if event { &after } else { &before });
            if event {
                device.checker().host_waited(&result.unwrap());
                assert_eq!(device.words().unwrap()[0], 2);
            } else {
                assert_race(&result.unwrap_err(), ["st.global.u64", "ld.global.u64"], "kernel boundary");
            }
        }
    });
}

#[test]
fn the_host_must_wait_for_the_stream_that_wrote() {
    let device = Device::new(0);
    let past = device.run_after(&parse(INCREMENT), &device.checker().host_past()).unwrap();
    let error = device.words().unwrap_err().to_string();
    assert!(error.contains("a read by the host") && error.contains("st.global.u64"), "{error}");
    device.checker().host_waited(&past);
    assert_eq!(device.words().unwrap()[0], 1);
}

/// Runs a writer on one device and a reader on another over a buffer of the first.
fn between_devices(writer: &Module, reader: &Module, seed: u64) -> Result<Vec<u64>, MachineError> {
    let mut machine =
        Machine::with_config(2, device(seed), Some(CheckConfig::default())).with_longest_turn(16);
    let buf = machine.upload(0, "buf", &[0u64; 3])?;
    let near = machine.map(1, &buf)?;
    machine.launch_with(0, writer, "k", launch(1, 1), &[&buf])?;
    machine.launch_with(1, reader, "k", launch(1, 1), &[&near])?;
    machine.run()?;
    buf.download()
}

#[test]
fn messages_between_devices_need_scope_sys() {
    let writer = "
    mov.u64 %rd1, 7;
    mov.u32 %r2, 1;
    st.global.u64 [%rd40], %rd1;
    st.release.sys.global.u32 [%rd40+8], %r2;";
    let reader = "
READER:
    ld.acquire.sys.global.u32 %r3, [%rd40+8];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra READER;
    ld.global.u64 %rd2, [%rd40];
    st.global.u64 [%rd40+16], %rd2;";
    let [wide_writer, wide_reader] = [writer, reader].map(parse);
    let [gpu_writer, gpu_reader] = [writer, reader].map(|body| parse(&body.replace(".sys", ".gpu")));
    for_each_seed(correct_seeds(), |seed| {
        assert_eq!(between_devices(&wide_writer, &wide_reader, seed).unwrap()[2], 7);
        if seed < broken_seeds() {
            for (w, r) in [(&gpu_writer, &wide_reader), (&wide_writer, &gpu_reader)] {
                let error = between_devices(w, r, seed).unwrap_err();
                let MachineError::Fault(fault) = error else { panic!("{error}") };
                assert_race(&fault, ["st.release", "ld.acquire"], "does not reach the other thread: .sys");
            }
        }
    });
}

/// Runs a kernel that answers the host in mapped memory, whose words the host polls and then reads;
/// or reads as early as after `steps` instructions, if it does not poll.
fn answers_the_host(body: &str, seed: u64, polls: bool, steps: u64) -> Result<u64, String> {
    threads_answer_the_host(1, body, seed, polls, steps)
}

fn threads_answer_the_host(
    threads: u32,
    body: &str,
    seed: u64,
    polls: bool,
    steps: u64,
) -> Result<u64, String> {
    let module = parse(body);
    let device = Device::on_host(seed, "answers");
    let (memory, buf) = (&device.memory, &device.buf);
    buf.watch();
    buf.name_parts(|at| (at < 16).then(|| ["count", "tag"][at as usize / 8].to_owned()));
    let mut grid = device.start_in(&module, launch(1, threads), &device.checker().host_past());
    grid.step(steps).map_err(|fault| fault.to_string())?;
    while polls && memory.load_acquire(buf.addr() + 8).map_err(|error| error.to_string())? == 0 {
        grid.step(1).map_err(|fault| fault.to_string())?;
    }
    memory.host_reads(buf.addr(), 16).map_err(|error| error.to_string())?;
    // SAFETY: aligned, and mapped for as long as `buf` lives.
    let count = unsafe { (buf.addr() as *const u64).read_volatile() };
    finish(&mut [&mut grid], seed).map_err(|fault| fault.to_string())?;
    Ok(count)
}

#[test]
fn the_host_reads_what_was_released_to_it() {
    let body = "
    mov.u64 %rd1, 7;
    st.global.u64 [%rd40], %rd1;
    st.release.sys.global.u64 [%rd40+8], %rd1;";
    for_each_seed(correct_seeds(), |seed| {
        assert_eq!(answers_the_host(body, seed, true, 0).unwrap(), 7);
        if seed >= broken_seeds() {
            return;
        }
        let relaxed = body.replace("st.release", "st.relaxed");
        let error = answers_the_host(&relaxed, seed, true, 0).unwrap_err();
        assert!(error.contains("at 'answers' + 0x0 (count): a read by the host"), "{error}");
        assert!(error.contains("orders nothing: the write is no release"), "{error}");
        let narrow = body.replace(".sys", ".gpu");
        let error = answers_the_host(&narrow, seed, true, 0).unwrap_err();
        assert!(error.contains("at 'answers' + 0x8 (tag)"), "{error}");
        // Published before its data: the host reads before the data are written, or after a write
        // that is not ordered before the read.
        let early = "
    mov.u64 %rd1, 7;
    st.release.sys.global.u64 [%rd40+8], %rd1;
    st.global.u64 [%rd40], %rd1;";
        for steps in [0, 100] {
            let error = answers_the_host(early, seed, true, steps).unwrap_err();
            assert!(error.contains("at 'answers' + 0x0 (count)"), "{error}");
            let came_later = "releases what its thread did before it: the access came later";
            assert!(steps == 0 || error.contains(came_later), "{error}");
        }
        // A host that has polled too early has not read the release.
        let device = Device::on_host(seed, "answers");
        let past = device.checker().host_past();
        assert_eq!(device.memory.load_acquire(device.buf.addr() + 8).unwrap(), 0);
        device.run_after(&parse(body), &past).unwrap();
        let error = device.memory.host_reads(device.buf.addr(), 8).unwrap_err().to_string();
        assert!(error.contains("a read by the host") && !error.contains("releases what"), "{error}");
        // A host that reads without polling the released word races as well.
        for steps in [0, 100] {
            assert!(answers_the_host(body, seed, false, steps).unwrap_err().contains("data race"));
        }
    });
}

/// Waits for the host's word.
const HOST_WAIT: &str = "
AGAIN:
    ld.acquire.sys.global.u64 %rd1, [%rd40+8];
    setp.eq.u64 %p1, %rd1, 0;
    @%p1 bra AGAIN;";
/// Reads what the word is for.
const HOST_READ: &str = "
    ld.global.u64 %rd2, [%rd40];";

/// Runs a kernel that waits for the host's word, reads what the host wrote in front of it, and
/// answers; then the host writes anew.
fn reads_from_the_host(body: &str, seed: u64, is_late: bool, polls: bool) -> Result<u64, String> {
    let device = Device::on_host(seed, "request");
    let (memory, buf) = (&device.memory, &device.buf);
    buf.watch();
    let module = parse(body);
    let mut grid = device.start_in(&module, launch(1, 1), &device.checker().host_past());
    grid.step(1 + seed % 8).map_err(|fault| fault.to_string())?;
    let gives = |value: u64| {
        memory.host_writes(buf.addr(), 8).map_err(|error| error.to_string())?;
        // SAFETY: aligned, and mapped for as long as `buf` lives.
        unsafe { (buf.addr() as *mut u64).write_volatile(value) };
        Ok::<_, String>(())
    };
    if !is_late {
        gives(7)?;
    }
    memory.store_release(buf.addr() + 8, 1).map_err(|error| error.to_string())?;
    if is_late {
        gives(7)?;
    }
    finish(&mut [&mut grid], seed).map_err(|fault| fault.to_string())?;
    if polls {
        assert_eq!(memory.load_acquire(buf.addr() + 16).map_err(|error| error.to_string())?, 7);
    }
    // Another thread writes anew. It has been told of the answer in a way that is not tracked.
    std::thread::scope(|scope| scope.spawn(|| gives(8)).join().unwrap())?;
    Ok(memory.load_acquire(buf.addr() + 8).unwrap())
}

#[test]
fn a_kernel_reads_what_the_host_released_to_it() {
    let body = &format!("{HOST_WAIT}{HOST_READ}\n    st.release.sys.global.u64 [%rd40+16], %rd2;");
    for_each_seed(correct_seeds(), |seed| {
        assert_eq!(reads_from_the_host(body, seed, false, true).unwrap(), 1);
        if seed >= broken_seeds() {
            return;
        }
        for (ordered, apart) in [
            ("ld.acquire", "ld.relaxed"),
            ("ld.acquire.sys", "ld.acquire.gpu"),
            ("ld.acquire.sys", "ld.weak"),
        ] {
            let error = reads_from_the_host(&body.replace(ordered, apart), seed, false, true).unwrap_err();
            assert!(error.contains("race"), "{error}");
        }
        let relaxed = reads_from_the_host(&body.replace("ld.acquire", "ld.relaxed"), seed, false, true);
        let error = relaxed.unwrap_err();
        assert!(error.contains("at 'request' + 0x0: a weak read is not ordered behind"), "{error}");
        assert!(error.contains("by the host"), "{error}");
        let relaxed = reads_from_the_host(&body.replace("st.release", "st.relaxed"), seed, false, true);
        assert!(relaxed.unwrap_err().contains("a write by the host"));
        // Released ahead of what it is for, and written anew without a look at the answer.
        assert!(reads_from_the_host(body, seed, true, true).unwrap_err().contains("race"));
        assert!(reads_from_the_host(body, seed, false, false).unwrap_err().contains("a write by the host"));
    });
    let device = Device::on_host(0, "request");
    assert!(matches!(
        device.memory.store_release(device.buf.addr() + 4, 1),
        Err(MemoryError::Misaligned { align: 8, .. })
    ));
}

/// A write that was announced may not be over, so a word of another thread does not release it.
#[test]
fn a_word_of_the_host_releases_its_own_threads_writes() {
    let reader = parse(&format!("{HOST_WAIT}{HOST_READ}"));
    let of_two = |seed: u64, is_over: bool| {
        let device = Device::on_host(seed, "request");
        let (memory, buf) = (&device.memory, &device.buf);
        buf.watch();
        let past = device.checker().host_past();
        let write = || {
            memory.host_writes(buf.addr(), 8).unwrap();
            if is_over {
                memory.host_reads(buf.addr(), 8).unwrap();
            }
        };
        std::thread::scope(|scope| scope.spawn(write).join().unwrap());
        memory.store_release(buf.addr() + 8, 1).unwrap();
        device.run_after(&reader, &past).map_err(|fault| fault.to_string())
    };
    for_each_seed(correct_seeds(), |seed| {
        of_two(seed, true).unwrap();
        let error = of_two(seed, false).unwrap_err();
        assert!(
            error.contains("a weak read is not ordered behind") && error.contains("by the host"),
            "{error}"
        );
    });
}

#[test]
fn a_race_with_the_host_names_the_reads_of_its_word() {
    let wait = &HOST_WAIT.replace("ld.acquire", "ld.relaxed");
    for_each_seed(correct_seeds(), |seed| {
        let error = reads_from_the_host(&format!("{wait}{HOST_READ}"), seed, false, true).unwrap_err();
        let missing = "missing: an acquire of scope .sys of a word that the host releases behind it";
        let seen = "of what was written by a release of scope .sys by the host";
        assert!(error.contains(missing) && error.contains(seen), "{error}");
        assert!(error.contains("orders nothing, unless a fence follows: the read is no acquire"), "{error}");

        // An earlier launch reads the word, in time or too early.
        let device = Device::on_host(seed, "request");
        device.buf.watch();
        let past = device.checker().host_past();
        let once = parse("ld.acquire.sys.global.u64 %rd1, [%rd40+8];");
        device.run_after(&once, &past).unwrap();
        device.memory.host_writes(device.buf.addr(), 8).unwrap();
        device.memory.store_release(device.buf.addr() + 8, 1).unwrap();
        let error = device.run_after(&parse(HOST_READ), &past).unwrap_err().to_string();
        let early = "; it came before the last write there";
        assert!(error.contains(seen) && error.contains(early), "{error}");
        device.run_after(&parse(wait), &past).unwrap();
        let error = device.run_after(&parse(HOST_READ), &past).unwrap_err().to_string();
        assert!(error.contains("relaxed read of scope .sys in kernel 'k', in another launch"), "{error}");
    });
}

/// Memory that host code writes as well is not checked, but memory that host code declares to read
/// must have been released to it.
#[test]
fn the_host_takes_what_was_released_to_it() {
    let body = "
    mov.u64 %rd1, 7;
    st.global.u64 [%rd40], %rd1;
    st.release.sys.global.u64 [%rd40+8], %rd1;";
    let takes = |body: &str, seed: u64, polls: bool| -> Result<(), String> {
        let device = Device::on_host(seed, "request");
        let (memory, buf) = (&device.memory, &device.buf);
        // The checker does not track this store of the host.
        // SAFETY: aligned, and mapped for as long as `buf` lives.
        unsafe { (buf.addr() as *mut u64).add(2).write_volatile(1) };
        let past = device.checker().host_past();
        device.run_after(&parse(body), &past).map_err(|fault| fault.to_string())?;
        let error = |error: MemoryError| error.to_string();
        if polls {
            assert_eq!(memory.load_acquire(buf.addr() + 8).map_err(error)?, 7);
        }
        memory.host_reads(buf.addr() + 16, 48).map_err(error)?;
        memory.host_reads(buf.addr(), 8).map_err(error)
    };
    for_each_seed(correct_seeds(), |seed| {
        takes(body, seed, true).unwrap();
        let early = "
    mov.u64 %rd1, 7;
    st.release.sys.global.u64 [%rd40+8], %rd1;
    st.global.u64 [%rd40], %rd1;";
        let unpolled = takes(body, seed, false);
        let others = [body.replace("st.release", "st.relaxed"), body.replace(".sys", ".gpu"), early.into()];
        for wrong in others.iter().map(|body| takes(body, seed, true)).chain([unpolled]) {
            let error = wrong.unwrap_err();
            assert!(error.contains("at 'request' + 0x0: a read by the host"), "{error}");
        }
    });
}

#[test]
fn a_missing_barrier_ahead_of_a_release_to_the_host_is_named() {
    let body = "
    setp.eq.u32 %p1, %r40, 32;
    setp.eq.u32 %p2, %r40, 0;
    mov.u64 %rd1, 7;
    @%p1 st.global.u64 [%rd40], %rd1;
    barrier.sync 0;
    @%p2 st.release.sys.global.u64 [%rd40+8], %rd1;";
    for_each_seed(correct_seeds(), |seed| {
        assert_eq!(threads_answer_the_host(64, body, seed, true, 1000).unwrap(), 7);
        let without = body.replace("barrier.sync 0;", "");
        let error = threads_answer_the_host(64, &without, seed, true, 1000).unwrap_err();
        let seen = "seen: the word that the host has loaded last was written by a release of scope .sys";
        assert!(error.contains(seen) && error.contains("a barrier between the two threads"), "{error}");
        let gap = "\n  gap: nothing orders the earlier access ahead of this release: a barrier";
        assert!(error.contains(gap), "{error}");
        // The host has loaded another word since.
        let device = Device::on_host(seed, "answers");
        device.buf.watch();
        let mut grid = device.start_in(&parse(&without), launch(1, 64), &device.checker().host_past());
        finish(&mut [&mut grid], seed).unwrap();
        for word in [8, 24] {
            device.memory.load_acquire(device.buf.addr() + word).unwrap();
        }
        let error = device.memory.host_reads(device.buf.addr(), 16).unwrap_err().to_string();
        let seen = "seen: a word that the host has loaded was written by a release of scope .sys";
        assert!(error.contains(seen) && error.contains(gap), "{error}");
    });
}

#[test]
fn a_race_names_the_part_on_every_device_that_maps_it() {
    let first = Device::new(0);
    first.buf.name_parts(|at| (at < 64).then(|| format!("ready[{}]", at / 8)));
    let memory = Memory::checked(1, first.checker.clone());
    let near = memory.import(first.buf.export().unwrap(), first.buf.bytes(), "buf of rank 0").unwrap();
    let second = Device { checker: first.checker.clone(), memory, buf: near, seed: 1 };
    let module = parse("st.global.u64 [%rd40+24], %rd40;");
    let before = first.checker().host_past();
    first.run_after(&module, &before).unwrap();
    // The address that it writes is another one there.
    let fault = second.run_after(&module, &before).unwrap_err().to_string();
    assert!(fault.contains("global memory at 'buf of rank 0' + 0x18 (ready[3]): a weak write"), "{fault}");
}

#[test]
fn a_race_of_the_host_with_a_peer_names_what_its_device_has_read_of_the_peer() {
    let first = Device::new(0);
    let memory = Memory::checked(1, first.checker.clone());
    let near = memory.import(first.buf.export().unwrap(), first.buf.bytes(), "buf of rank 0").unwrap();
    let second = Device { checker: first.checker.clone(), memory, buf: near, seed: 1 };
    let writer = parse(
        "st.global.u64 [%rd40+24], %rd40; // data
         mov.u32 %r1, 1;
         st.relaxed.sys.global.u32 [%rd40+64], %r1; // flag",
    );
    let reader = parse("ld.relaxed.sys.global.u32 %r1, [%rd40+64]; // reads the flag");
    let before = first.checker().host_past();
    first.run_after(&writer, &before).unwrap();
    let read = || second.memory.read(second.buf.addr() + 24, &mut [0; 8]).unwrap_err().to_string();
    assert!(!read().contains("its device has read"), "no kernel of the device has run");
    second.run_after(&reader, &before).unwrap();
    let error = read();
    assert!(error.contains("a read by the host") && error.contains("// data"), "{error}");
    let of_flag = "\n  its device has read 'buf' + 0x40 in kernel 'k' at PTX line ";
    assert!(error.contains(of_flag) && error.contains("\n    last written by kernel 'k' at PTX"), "{error}");
}

#[test]
fn a_race_with_another_device_names_the_reads_of_its_words() {
    let first = Device::new(0);
    let memory = Memory::checked(1, first.checker.clone());
    let near = memory.import(first.buf.export().unwrap(), first.buf.bytes(), "buf of rank 0").unwrap();
    let second = Device { checker: first.checker.clone(), memory, buf: near, seed: 1 };
    let before = first.checker().host_past();
    first.run_after(&parse("st.release.sys.global.u32 [%rd40+64], %r40;"), &before).unwrap();
    second
        .run_after(&parse("ld.acquire.sys.global.u32 %r1, [%rd40+64]; // an earlier wait"), &before)
        .unwrap();
    // Another launch of the peer, which the wait was not for.
    first.run_after(&parse("st.global.u64 [%rd40+24], %rd40;"), &before).unwrap();
    let text = second.run_after(&parse("ld.global.u64 %rd1, [%rd40+24];"), &before).unwrap_err().to_string();
    assert!(text.contains("seen: acquire of scope .sys in kernel 'k', in another launch"), "{text}");
    assert!(text.contains("// an earlier wait"), "{text}");
}

/// The reader looks at the flag once, before the writer sets it, and goes on.
#[test]
fn a_race_behind_a_wait_that_ended_too_early_names_the_read() {
    let writer = parse(
        "mov.u32 %r1, 1;
         st.global.u64 [%rd40+64], %rd40; // data
         st.release.gpu.global.u32 [%rd40+96], %r1; // flag",
    );
    let reader = parse(
        "ld.acquire.gpu.global.u32 %r2, [%rd40+96]; // too early
         mov.u32 %r1, 0;
MORE:
         add.u32 %r1, %r1, 1;
         setp.lt.u32 %p1, %r1, 1000;
         @%p1 bra MORE;
         ld.global.u64 %rd1, [%rd40+64];",
    );
    let device = Device::new(0);
    let before = device.checker().host_past();
    let mut reads = device.start_in(&reader, launch(1, 1), &before);
    reads.step(32).unwrap();
    device.run_after(&writer, &before).unwrap();
    let text = finish(&mut [&mut reads], 0).unwrap_err().to_string();
    assert!(text.contains("data race") && text.contains("// data"), "{text}");
    assert!(text.contains("\n  the last read of 'buf' + 0x60 in kernel 'k' at PTX line "), "{text}");
    assert!(text.contains("came before its write in kernel 'k' at PTX line "), "{text}");

    // An earlier launch has not waited.
    let device = Device::new(0);
    let before = device.checker().host_past();
    device.run_after(&parse("ld.acquire.gpu.global.u32 %r2, [%rd40+96];"), &before).unwrap();
    device.run_after(&writer, &before).unwrap();
    let race = device.run_after(&parse("ld.global.u64 %rd1, [%rd40+64];"), &before).unwrap_err().to_string();
    assert!(race.contains("data race"), "{race}");
    assert!(race.contains("\n  the last read of 'buf' + 0x60 in kernel 'k' at PTX line "), "{race}");
}

/// Behind a read of unwritten memory and a wrong value, reads of the same launch are named. Those of
/// earlier launches are not: later operations write anew what they have read.
#[test]
fn faults_without_an_order_name_the_early_reads_of_their_launch() {
    for is_same in [true, false] {
        let device = Device::new(0);
        let fresh = device.memory.alloc(256, "fresh").unwrap();
        let start = |body: &str| device.start_on(&parse(body), &fresh);
        let (early, late) = ("ld.acquire.gpu.global.u32 %r2, [%rd40+96];", "st.global.u32 [%rd40], %r40;");
        let spin = "
            mov.u32 %r1, 0;
MORE:
            add.u32 %r1, %r1, 1;
            setp.lt.u32 %p1, %r1, 1000;
            @%p1 bra MORE;";
        let write = "st.release.gpu.global.u32 [%rd40+96], %r40;";
        finish(&mut [&mut start(write)], 0).unwrap();
        if !is_same {
            finish(&mut [&mut start(early)], 0).unwrap();
        }
        let own = if is_same { early } else { "" };
        let mut grid = start(&format!("{own}{spin}{late}ld.global.u64 %rd1, [%rd40+128];"));
        grid.step(40).unwrap();
        finish(&mut [&mut start(write)], 0).unwrap();
        let text = finish(&mut [&mut grid], 0).unwrap_err().to_string();
        let line = "the last read of 'fresh' + 0x60 in kernel 'k'";
        assert!(text.contains("unwritten") && text.contains(line) == is_same, "{text}");
        let origin = device.memory.origin(fresh.addr()).unwrap();
        assert_eq!(origin.contains(line), is_same, "{origin}");
    }
}

#[test]
fn a_race_within_a_launch_names_early_reads_of_its_own_blocks() {
    let device = Device::new(0);
    let before = device.checker().host_past();
    let blocks = parse(
        "mov.u32 %r1, %ctaid.x;
         setp.eq.u32 %p1, %r1, 0;
         @%p1 ld.acquire.gpu.global.u32 %r2, [%rd40+104];
         @%p1 ld.acquire.gpu.global.u32 %r2, [%rd40+96];
         mov.u32 %r3, 0;
MORE:
         add.u32 %r3, %r3, 1;
         setp.lt.u32 %p2, %r3, 1000;
         @%p2 bra MORE;
         @!%p1 st.release.gpu.global.u32 [%rd40+96], %r1;
         st.global.u32 [%rd40+64], %r1;",
    );
    let mut grid = device.start_in(&blocks, launch(2, 1), &before);
    grid.step(60).unwrap();
    // A peer, or an earlier launch that a wait was for.
    device.run_after(&parse("st.release.gpu.global.u32 [%rd40+104], %r40;"), &before).unwrap();
    let text = finish(&mut [&mut grid], 0).unwrap_err().to_string();
    for word in ["0x60", "0x68"] {
        assert!(text.contains(&format!("the last read of 'buf' + {word} in kernel 'k'")), "{text}");
    }
}

#[test]
fn reads_of_freed_memory_are_not_taken_for_early_ones() {
    for is_freed in [false, true] {
        let mut device = Device::new(0);
        let before = device.checker().host_past();
        device.run_after(&parse("ld.acquire.gpu.global.u32 %r2, [%rd40+96];"), &before).unwrap();
        if is_freed {
            device.buf = device.memory.alloc_zeroed(8, "small").unwrap();
            // In the place of the buffer that is freed now.
            device.buf = device.memory.alloc_zeroed(WORDS as u64 * 8, "new").unwrap();
        }
        let writer = "st.global.u64 [%rd40], %rd40;\nst.release.gpu.global.u32 [%rd40+96], %r40;";
        device.run_after(&parse(writer), &before).unwrap();
        let reader = parse("ld.global.u64 %rd1, [%rd40];");
        let text = device.run_after(&reader, &before).unwrap_err().to_string();
        assert!(text.contains("data race") && text.contains("the last read of") != is_freed, "{text}");
    }
}

#[test]
fn a_race_of_blocks_without_a_flag_names_the_last_barrier() {
    let module = parse("bar.sync 0; // meets\nmov.u32 %r9, %ctaid.x;\nst.global.u32 [%rd40+32], %r9;");
    let device = Device::new(0);
    let mut grid = device.start_in(&module, launch(2, 1), &device.checker().host_past());
    let fault = finish(&mut [&mut grid], 0).unwrap_err().to_string();
    assert!(fault.contains("seen: barrier in kernel 'k'") && fault.contains("// meets"), "{fault}");
}

#[test]
fn reads_of_unwritten_memory_are_reported() {
    let module = parse("ld.global.u64 %rd1, [%rd40+40];");
    let device = Device::new(0);
    let reads = |buf: &Region| {
        finish(&mut [&mut device.start_on(&module, buf)], 0).map_err(|fault| fault.to_string())
    };
    let fresh = device.memory.alloc(64, "fresh").unwrap();
    fresh.name_parts(|at| Some(format!("word[{}]", at / 8)));
    let garbage = reads(&fresh).unwrap_err();
    assert!(garbage.contains("unwritten global memory, at 'fresh' + 0x28 (word[5])"), "{garbage}");
    reads(&device.memory.alloc_zeroed(64, "zeroed").unwrap()).unwrap();
    reads(&device.memory.alloc_host(64, "host").unwrap()).unwrap();
}

/// A counter that was never set to zero. `exch` does not depend on the old value.
#[test]
fn atomics_that_compute_with_unwritten_memory_are_reported() {
    let run = |body: &str, zeroed: bool| {
        let device = Device::new(0);
        let memory = &device.memory;
        let buf = if zeroed { memory.alloc_zeroed(64, "zeroed") } else { memory.alloc(64, "fresh") }.unwrap();
        finish(&mut [&mut device.start_on(&parse(body), &buf)], 0).map_err(|fault| fault.to_string())
    };
    let computing = [
        "atom.global.add.u32 %r1, [%rd40+8], 1;",
        "red.relaxed.gpu.global.max.u64 [%rd40+8], %rd40;",
        "atom.acq_rel.gpu.global.cas.b32 %r1, [%rd40+8], 0, 1;",
        "red.global.add.f32 [%rd40+8], 0f3F800000;",
    ];
    for body in computing {
        let error = run(body, false).unwrap_err();
        assert!(error.contains("unwritten global memory, at 'fresh' + 0x8"), "{body}: {error}");
        run(body, true).unwrap();
    }
    // The exchange wrote the word.
    let exchange = "atom.global.exch.b32 %r1, [%rd40+8], 1;";
    run(exchange, false).unwrap();
    run(&format!("{exchange}\natom.global.add.u32 %r1, [%rd40+8], 1;"), false).unwrap();
    let beside = format!("{exchange}\natom.global.add.u32 %r1, [%rd40+12], 1;");
    assert!(run(&beside, false).unwrap_err().contains("'fresh' + 0xc"));
}

#[test]
fn the_nearest_writes_around_an_unwritten_word_are_named() {
    let writer = "st.global.u64 [%rd40+16], %rd40; // before\nst.global.u32 [%rd40+40], %r40; // after";
    let [writer, reader] = [writer, "ld.global.u64 %rd1, [%rd40+24];"].map(parse);
    let device = Device::new(0);
    let run = |module, buf: &Region| finish(&mut [&mut device.start_on(module, buf)], 0);
    let near = |buf: &Region| match run(&reader, buf).unwrap_err().kind {
        FaultKind::Unwritten { offset: 24, near, .. } => near.writes,
        other => panic!("{other}"),
    };
    let fresh = device.memory.alloc(64, "fresh").unwrap();
    fresh.name_parts(|at| Some(format!("word[{}]", at / 8)));
    run(&writer, &fresh).unwrap();
    let found = near(&fresh);
    let found: Vec<_> =
        found.iter().map(|party| (party.access.as_str(), party.at.ptx_text.as_str())).collect();
    let before = ("weak write 4 bytes before it, word[2],", "st.global.u64 [%rd40+16], %rd40; // before");
    let after = ("weak write 16 bytes after it, word[5],", "st.global.u32 [%rd40+40], %r40; // after");
    assert_eq!(found, [before, after]);
    assert_eq!(near(&device.memory.alloc(64, "unused").unwrap()), []);
}

#[test]
fn a_wrong_value_names_its_writer_and_what_the_writer_has_read() {
    let first = "st.global.u64 [%rd40+8], %rd40; // first";
    let second = "ld.global.u64 %rd1, [%rd40+8]; // reads\nst.global.u64 [%rd40+64], %rd1; // second";
    let device = Device::new(0);
    [first, second].map(parse).iter().for_each(|module| device.run(module).unwrap());
    let origin = |at| device.memory.origin(device.buf.addr() + at);
    let text = origin(64).unwrap();
    assert!(
        text.starts_with("last written by a weak write in kernel 'k'") && text.contains("// second"),
        "{text}"
    );
    let source = "its block has read 'buf' + 0x8 in kernel 'k' at PTX line ";
    assert!(text.contains(source) && text.contains("last written by kernel 'k' at PTX line "), "{text}");
    assert!(!origin(8).unwrap().contains("has read"));
    // The host has written it, and a kernel the word behind it.
    let text = origin(0).unwrap();
    let beside = "last written by no kernel\n  beside it: weak write 8 bytes after it in kernel 'k'";
    assert!(text.starts_with(beside) && text.contains("// first"), "{text}");
    assert_eq!(device.memory.origin(device.memory.alloc(64, "unused").unwrap().addr()), None);
}

/// A row that goes to the next place leaves a value of an earlier launch behind.
#[test]
fn a_stale_value_names_what_later_launches_have_written_beside_it() {
    let first = "st.global.u64 [%rd40+8], %rd40; // first\nst.global.u64 [%rd40+24], %rd40;";
    let second =
        "st.global.u64 [%rd40], %rd40; // of another array\nst.global.u64 [%rd40+16], %rd40; // second";
    let device = Device::new(0);
    device.buf.name_parts(|at| Some(if at < 8 { "flag".into() } else { format!("word[{}]", at / 8 - 1) }));
    [first, second].map(parse).iter().for_each(|module| device.run(module).unwrap());
    let text = device.memory.origin(device.buf.addr() + 8).unwrap();
    let beside = "\n  beside it, by a later launch: weak write 8 bytes after it, word[1], in kernel 'k'";
    assert!(text.contains("// first") && text.contains(beside) && text.contains("// second"), "{text}");
    assert!(!text.contains("// of another array"), "{text}");
    // The latest value, and one of memory without names, have none.
    let unnamed = Device::new(0);
    [first, second].map(parse).iter().for_each(|module| unnamed.run(module).unwrap());
    for (device, at) in [(&device, 16), (&unnamed, 8)] {
        let text = device.memory.origin(device.buf.addr() + at).unwrap();
        assert!(!text.contains("by a later launch"), "{text}");
    }
}

#[test]
fn a_wrong_value_names_shared_memory_of_its_own_function_first() {
    let store = |(line, call)| {
        format!(".loc 1 {line} 1 // inlined_at 1 {call}\nst.shared.u32 [DATA+{}], %r40;\n", 4 * line)
    };
    let stores: String = [(20, 5), (31, 6), (32, 6), (33, 6), (34, 6), (35, 6)].map(store).concat();
    let file = ".file 1 \"k.rs\"\n.loc 1 2 1\n";
    // The compiler has moved line 21 behind the value's store. Line 23 is behind it in the source.
    let moved: String = [(21, 5), (23, 5)].map(store).concat();
    let value = ".loc 1 22 1 // inlined_at 1 5\nst.global.u64 [%rd40+64], %rd40;\n";
    let body = format!("{file}{stores}{value}{moved}");
    let device = Device::new(0);
    device.run(&parse(&body)).unwrap();
    let text = device.memory.origin(device.buf.addr() + 64).unwrap();
    assert!(text.contains("at k.rs:22, called at :5\n"), "{text}");
    let shared = "shared memory is written at k.rs:21, k.rs:20, k.rs:35, k.rs:34";
    assert!(text.lines().any(|line| line.ends_with(shared)), "{text}");
}

#[test]
fn a_wrong_value_names_what_the_kernels_before_its_writer_have_read() {
    let bodies = [
        "st.global.u64 [%rd40+8], %rd40; // first",
        "ld.global.u64 %rd1, [%rd40+8]; // reads first\nst.global.u64 [%rd40+64], %rd1; // second",
        "ld.global.u64 %rd1, [%rd40+64]; // reads second\nst.global.u64 [%rd40+128], %rd1; // third",
    ];
    let device = Device::new(0);
    bodies.map(parse).iter().for_each(|module| device.run(module).unwrap());
    let text = device.memory.origin(device.buf.addr() + 128).unwrap();
    let (own, before) = text.split_once("\n  before that 'buf' + 0x8 was read in kernel 'k'").unwrap();
    assert!(own.contains("its block has read 'buf' + 0x40") && !own.contains("+ 0x8 in"), "{text}");
    assert_eq!(before.matches("last written by kernel 'k'").count(), 1, "{text}");
}

/// A row of a table that an earlier launch wrote leads to the wrong place.
#[test]
fn a_wrong_address_names_the_tables_that_earlier_launches_have_written() {
    let table = parse("mov.u64 %rd1, 24;\nst.global.u64 [%rd40], %rd1; // table");
    let read = "ld.global.u64 %rd1, [%rd40]; // index\nadd.s64 %rd2, %rd40, %rd1;";
    let reader = parse(&format!("{read}\nld.global.u64 %rd3, [%rd2];"));
    let own = "mov.u32 %r9, %ctaid.x;";
    let writer = parse(&format!("{own}\n{read}\nst.global.u32 [%rd2], %r9;"));
    let of_table = "\n  its block has read 'fresh' + 0x0 in kernel 'k' at PTX line ";
    let device = Device::new(0);
    let run = |module, buf: &Region| finish(&mut [&mut device.start_on(module, buf)], 0);
    let fresh = device.memory.alloc(64, "fresh").unwrap();
    run(&table, &fresh).unwrap();
    let text = run(&reader, &fresh).unwrap_err().to_string();
    assert!(text.contains("unwritten global memory, at 'fresh' + 0x18"), "{text}");
    assert_eq!(text.matches(of_table).count(), 1, "{text}");
    // Without a table of another launch there is nothing to name.
    let direct = parse("ld.global.u64 %rd3, [%rd40+24];");
    let unused = device.memory.alloc(64, "unused").unwrap();
    assert!(!run(&direct, &unused).unwrap_err().to_string().contains("has read"));

    let race = |module: &Module| {
        let shape = launch(2, 1);
        let (kernel, params) = (module.kernel("k").unwrap(), fresh.addr().to_ne_bytes());
        let mut grid = Grid::new(kernel, device.memory.clone(), &self::device(0), shape, &params).unwrap();
        finish(&mut [&mut grid], 0).unwrap_err().to_string()
    };
    let text = race(&writer);
    assert!(text.contains("data race") && text.contains("a weak write is not ordered behind"), "{text}");
    assert_eq!(text.matches(of_table).count(), 1, "{text}");
    let direct = parse(&format!("{own}\nst.global.u32 [%rd40+32], %r9;"));
    assert!(!race(&direct).contains("has read"));
}

#[test]
fn the_longest_waits_are_named_with_the_last_writes_there() {
    let waiter = "
    mov.u32 %r2, 0;
AGAIN:
    ld.acquire.gpu.global.u32 %r3, [%rd40+8];
    ld.relaxed.gpu.global.u32 %r4, [%rd40+16];
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p2, %r2, 50;
    @%p2 bra AGAIN;
SHORT:
    ld.acquire.gpu.global.u32 %r3, [%rd40+24];
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p2, %r2, 60;
    @%p2 bra SHORT;";
    let writer = "st.release.gpu.global.u32 [%rd40+8], 1; // flag
    atom.global.add.u32 %r3, [%rd40+32], 1; // count";
    let [writer, waiter] = [writer, waiter].map(parse);
    let device = Device::new(0);
    assert_eq!(device.checker().longest_waits(2), "");
    device.run(&writer).unwrap();
    let text = device.checker().longest_waits(2);
    assert!(text.starts_with("\n  one of the latest atomics") && text.ends_with("'buf' + 0x20"), "{text}");
    [&writer, &waiter].iter().for_each(|module| device.run(module).unwrap());
    let text = device.checker().longest_waits(2);
    assert_eq!(text.matches("times the same value: a read").count(), 2, "{text}");
    assert!(text.contains("ld.acquire.gpu.global.u32 %r3, [%rd40+8];\n   of 'buf' + 0x8"), "{text}");
    assert!(text.contains("last written by a release of scope .gpu") && text.contains("// flag"), "{text}");
    assert!(text.contains("[%rd40+16];\n   of 'buf' + 0x10\n   which no kernel has written"), "{text}");
    assert_eq!(text.matches("one of the latest atomics").count(), 1, "{text}");
    assert!(text.ends_with("kernel 'k' at PTX line 17\n   of 'buf' + 0x20"), "{text}");
}

#[test]
fn renewed_memory_is_garbage_with_no_past() {
    let device = Device::new(0);
    let [reader, writer] = ["ld.global.u64 %rd1, [%rd40];", "st.global.u64 [%rd40], %rd40;"].map(parse);
    let before = device.checker().host_past();
    let run = |module| device.run_after(module, &before);
    run(&reader).unwrap();
    device.buf.renew(0, 16);
    let fault = run(&reader).unwrap_err();
    assert!(matches!(fault.kind, FaultKind::Unwritten { offset: 0, .. }), "{fault}");
    // Its next owner does not race with earlier users, and bytes that it did not renew are
    // unchanged.
    run(&writer).unwrap();
    assert!(matches!(run(&reader).unwrap_err().kind, FaultKind::Race(_)));
}

#[test]
fn unwritten_memory_is_poison_that_depends_on_the_seed() {
    let module = parse(
        "
    st.global.u64 [%rd42], %rd5;
    mov.u32 %r1, DATA;
    ld.shared.u64 %rd1, [%r1];
    st.global.u64 [%rd42+64], %rd1;
    ld.global.u64 %rd2, [%rd42+128];
    st.global.u64 [%rd42+128], %rd2;",
    );
    let [one, same, other] = [1, 1, 2].map(|seed| {
        let memory = Memory::checked(seed, None);
        let buf = memory.alloc(WORDS as u64 * 8, "fresh").unwrap();
        let device = Device { checker: None, memory, buf, seed: 0 };
        device.run(&module).unwrap();
        let got = device.words().unwrap();
        [got[0], got[8], got[16]]
    });
    assert_eq!(one, same);
    for (a, b) in one.iter().zip(&other) {
        assert_ne!(a, b, "the seed draws the poison");
        // Read as an integer it is far below zero, as a float as well, in both halves: nothing that
        // looks like a result.
        for value in [a, b] {
            assert!(value >> 60 == 15 && value >> 28 & 15 == 15, "{value:#x}");
        }
    }
}

#[test]
fn shuffles_from_lanes_that_take_no_part_give_poison() {
    // Lanes 0 to 15 shuffle among themselves, but take from 16 lanes above.
    let body = "
    setp.gt.u32 %p1, %r40, 15;
    @%p1 bra END;
    add.u32 %r1, %r40, 16;
    shfl.sync.idx.b32 %r2|%p2, %r40, %r1, 31, 65535;
    cvt.u64.u32 %rd1, %r2;
    st.global.u64 [%rd42], %rd1;
END:";
    let module = parse(body);
    let got = [1, 2]
        .map(|seed| run_numbered(&module, launch(1, 32), seed, Some(CheckConfig::default())).unwrap()[0]);
    assert!(got[0] >= 0xf000_0000 && got[1] >= 0xf000_0000 && got[0] != got[1], "{got:x?}");
}

#[test]
fn a_counter_that_a_kernel_resets_is_not_for_two_streams_at_a_time() {
    let module = parse(
        "
    mov.u32 %r2, 1;
    atom.acq_rel.gpu.global.add.u32 %r3, [%rd40], %r2; // count
    setp.ne.u32 %p1, %r3, 3;
    @%p1 bra END;
    mov.u32 %r4, 0;
    st.global.u32 [%rd40], %r4; // reset
END:",
    );
    for_each_seed(correct_seeds(), |seed| {
        for event in [true, false] {
            let device = Device::new(seed);
            let before = device.checker().host_past();
            let begin = |past: &Past| device.start_in(&module, launch(4, 1), past);
            let mut first = begin(&before);
            if event {
                finish(&mut [&mut first], seed).unwrap();
                let mut second = begin(&first.past());
                finish(&mut [&mut second], seed).unwrap();
                device.checker().host_waited(&second.past());
                assert_eq!(device.words().unwrap()[0], 0);
            } else {
                let mut second = begin(&before);
                let fault = finish(&mut [&mut first, &mut second], seed).unwrap_err();
                assert_race(&fault, ["// count", "// reset"], "kernel boundary");
            }
        }
    });
}

#[test]
fn a_rank_that_joins_does_not_clear_signals_that_others_use() {
    // The kernel of rank 0 signals and then waits for rank 1.
    let module = parse(
        "
    mov.u32 %r2, 1;
    st.release.sys.global.u32 [%rd40], %r2; // signal
WAIT:
    ld.acquire.sys.global.u32 %r3, [%rd40+8]; // poll
    setp.eq.u32 %p1, %r3, 0;
    @%p1 bra WAIT;",
    );
    for_each_seed(correct_seeds(), |seed| {
        let checker = races();
        let [ours, theirs] = [seed, seed + 1].map(|seed| Memory::checked(seed, Some(checker.clone())));
        let signals = ours.alloc(4096, "signals").unwrap();
        let near = theirs.import(signals.export().unwrap(), 4096, "signals").unwrap();
        // In order: rank 1 clears its mapping, and rank 0 synchronises with it before it starts.
        let _ = checker.host_past();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _ = checker.host_past();
                theirs.fill(near.addr(), 0, 4096).unwrap();
                epoxide_vgpu::host_meets();
            });
        });
        epoxide_vgpu::host_meets();
        let ours = Device { checker: Some(checker.clone()), memory: ours, buf: signals, seed };
        let mut grid = ours.start_on(&module, &ours.buf);
        while grid.step(16).unwrap() != Progress::Spinning {}
        // Out of order: rank 1 joins while the kernel runs. Rank 1 is ordered behind all that rank
        // 0 did before, but not behind the kernel.
        epoxide_vgpu::host_meets();
        let join = |at: u64| {
            std::thread::scope(|scope| {
                let rank_1 = scope.spawn(|| {
                    let _ = checker.host_past();
                    epoxide_vgpu::host_meets();
                    theirs.fill(near.addr() + at, 0, 8)
                });
                rank_1.join().unwrap()
            })
        };
        let error = join(0).unwrap_err().to_string();
        assert!(error.contains("a write by the host") && error.contains("// signal"), "{error}");
        assert!(error.contains("missing: a wait of the host"), "{error}");
        // A kernel that reads the overwritten memory reports it as well.
        join(16).unwrap();
        let late = parse("ld.relaxed.sys.global.u32 %r1, [%rd40+16]; // late");
        let fault = ours.run(&late).unwrap_err();
        let FaultKind::Race(race) = &fault.kind else { panic!("{fault}") };
        assert!(race.other.kernel.is_empty() && race.missing.contains("a wait of the host"), "{fault}");
        assert!(fault.at.ptx_text.contains("// late"), "{fault}");
    });
}

#[test]
fn reads_of_an_earlier_kernel_of_the_stream_are_named() {
    // One stream writes and signals by a relaxed store; on the other a kernel waits for the signal,
    // and the next one reads.
    let writer = "
    mov.u64 %rd1, 7;
    mov.u32 %r2, 1;
    st.global.u64 [%rd40], %rd1;
    st.relaxed.gpu.global.u32 [%rd40+8], %r2;";
    let waiter = "
AGAIN:
    ld.acquire.gpu.global.u32 %r3, [%rd40+8];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra AGAIN;";
    let [writer, waiter, reader] = [writer, waiter, "ld.global.u64 %rd2, [%rd40];"].map(parse);
    let device = Device::new(1);
    let before = device.checker().host_past();
    device.run_after(&writer, &before).unwrap();
    let past = device.run_after(&waiter, &before).unwrap();
    let fault = device.run_after(&reader, &past).unwrap_err();
    let FaultKind::Race(race) = &fault.kind else { panic!("{fault}") };
    let [attempt] = race.attempts.as_slice() else { panic!("{fault}") };
    assert!(
        attempt.what.at.ptx_text.contains("ld.acquire") && attempt.what.launch == Launch::Other,
        "{fault}"
    );
    assert!(attempt.verdict.contains("the write is no release"), "{fault}");
}

#[test]
fn a_fault_lists_the_last_steps_of_its_warps() {
    let writer_and_reader = "
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READER;
    st.global.u64 [%rd40], 7;
    st.relaxed.gpu.global.u32 [%rd40+8], 1;
    ret;
READER:
    ld.acquire.gpu.global.u32 %r3, [%rd40+8];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra READER;
    ld.global.u64 %rd2, [%rd40];";
    let fault_of = |body: &str, blocks, check| match run_numbered(&parse(body), launch(blocks, 1), 1, check) {
        Err(MachineError::Fault(fault)) => fault,
        other => panic!("{other:?}"),
    };
    let fault = fault_of(writer_and_reader, 2, Some(CheckConfig::default()));
    let texts = |trace: &Trace| trace.steps.iter().map(|step| step.at.ptx_text.clone()).collect::<Vec<_>>();
    let [reader, writer @ ..] = fault.traces.as_slice() else { panic!("{fault}") };
    assert_eq!((reader.block, reader.warp), ([1, 0, 0], 0));
    assert_eq!(texts(reader), ["ld.acquire.gpu.global.u32 %r3, [%rd40+8];"], "{fault}");
    if let Some(writer) = writer.first() {
        assert_eq!(texts(writer)[0], "st.relaxed.gpu.global.u32 [%rd40+8], 1;", "{fault}");
    }
    assert!(fault.to_string().contains("%r3, [%rd40+8]; [lane 0]"), "{fault}");
    // Without checks no steps are recorded.
    assert!(fault_of("trap;", 1, None).traces.is_empty());
}

#[test]
fn the_last_steps_of_a_warp_name_their_lanes() {
    // Lanes 2 and up leave, lane 1 stores, and all of those meet ahead of the read.
    let body = "
    setp.gt.u32 %p1, %r40, 1;
    @%p1 ret;
    setp.ne.u32 %p2, %r40, 1;
    @!%p2 st.global.u64 [%rd40+8], 7;
    @%p2 bra LAST;
    st.global.u64 [%rd40+16], 7;
LAST:
    bar.warp.sync 3;
    mov.u32 %r2, DATA;
    ld.shared.u32 %r3, [%r2];";
    for_each_seed(correct_seeds(), |seed| {
        let outcome = run_numbered(&parse(body), launch(1, 32), seed, Some(CheckConfig::default()));
        let Err(MachineError::Fault(fault)) = outcome else { panic!("{outcome:?}") };
        let steps: Vec<_> = fault.traces[0].steps.iter().map(|step| (step.lanes, step.to_string())).collect();
        let lanes_of = |text: &str| steps.iter().find(|(_, step)| step.contains(text)).unwrap();
        assert_eq!(lanes_of("bar.warp.sync").0, 3, "{fault}");
        assert_eq!(lanes_of("[%rd40+8]").0, 2, "{fault}");
        assert!(lanes_of("[%rd40+16]").1.ends_with("[lane 1]"), "{fault}");
        assert!(lanes_of("bar.warp.sync").1.ends_with("[lanes 0-1]"), "{fault}");
    });
}

#[test]
fn freed_memory_is_called_by_its_name() {
    let module = parse("ld.global.u64 %rd1, [%rd40]; st.global.u32 [%rd1+16], %r40; // late");
    for checker in [None, Some(races())] {
        let device = Device::with(1, checker.clone());
        let memory = &device.memory;
        let victim = memory.alloc(4096, "victim").unwrap();
        let address = victim.addr();
        memory.write(device.buf.addr(), &address.to_ne_bytes()).unwrap();
        device.run(&module).unwrap();
        drop(victim);
        // In check mode its place is not reused.
        let _others = if checker.is_some() {
            (0..100).map(|_| memory.alloc(4096, "other").unwrap()).collect::<Vec<Region>>()
        } else {
            vec![]
        };
        let fault = device.run(&module).unwrap_err();
        let FaultKind::OutOfBounds { nearest: Some(near), .. } = &fault.kind else { panic!("{fault}") };
        assert_eq!((near.label.as_str(), near.addr, near.bytes, near.freed), ("victim", address, 4096, true));
        let text = fault.to_string();
        assert!(
            text.contains("is in 'victim' + 0x10, which has been freed") && text.contains("// late"),
            "{text}"
        );
        let error = memory.fill(address + 8, 0, 8).unwrap_err();
        assert!(error.to_string().ends_with("is in 'victim' + 0x8, which has been freed"), "{error}");
    }
}

/// Reads word 1 through the read-only cache, publishes that, and ends.
const READ_ONLY: &str = "ld.global.nc.u64 %rd1, [%rd40+8]; st.global.u64 [%rd40+16], %rd1;
     mov.u32 %r1, 1; st.release.sys.global.u32 [%rd40], %r1;";
/// Waits for it and then writes word 1.
const WRITE_BEHIND_IT: &str = "WAIT: ld.acquire.sys.global.u32 %r1, [%rd40]; setp.eq.u32 %p1, %r1, 0;
     @%p1 bra WAIT; st.global.u64 [%rd40+8], 7;";

#[test]
fn a_peer_may_not_write_what_a_kernel_reads_as_read_only_memory() {
    let run = |seed, reader: &str| {
        let mut machine = Machine::with_config(2, device(seed), Some(CheckConfig::default()));
        let words = machine.upload(0, "words", &[0u64, 5, 0]).unwrap();
        let peer = machine.map(1, &words).unwrap();
        machine.launch_with(0, &parse(reader), "k", launch(1, 1), &[&words]).unwrap();
        machine.launch_with(1, &parse(WRITE_BEHIND_IT), "k", launch(1, 1), &[&peer]).unwrap();
        machine.run()
    };
    // The order of the two suffices for a plain load.
    for_each_seed(correct_seeds(), |seed| run(seed, &READ_ONLY.replace(".nc", "")).unwrap());
    for_each_seed(broken_seeds(), |seed| match run(seed, READ_ONLY) {
        // The peer does not wait for the end of the reader's kernel, so its write is not ordered
        // behind it.
        Err(MachineError::Fault(fault)) => {
            let FaultKind::Race(race) = &fault.kind else { panic!("{fault}") };
            assert_eq!(race.other.launch, Launch::OtherDevice);
            assert!(race.missing.contains("ld.global.nc"), "{fault}");
        }
        other => panic!("{other:?}"),
    });
}

#[test]
fn read_only_memory_may_change_between_kernels() {
    let [reader, writer] = [READ_ONLY, WRITE_BEHIND_IT].map(parse);
    for_each_seed(correct_seeds(), |seed| {
        let mut machine = Machine::with_config(1, device(seed), Some(CheckConfig::default()));
        let words = machine.upload(0, "words", &[0u64, 5, 0]).unwrap();
        for module in [&reader, &writer, &reader] {
            machine.launch_with(0, module, "k", launch(1, 1), &[&words]).unwrap();
        }
        machine.run().unwrap();
        assert_eq!(words.download().unwrap()[2], 7);
        words.upload(&[0, 6]).unwrap();
        machine.launch_with(0, &reader, "k", launch(1, 1), &[&words]).unwrap();
        machine.run().unwrap();
        assert_eq!(words.download().unwrap()[2], 6);
    });
}

//! Exercises every method of the CUDA driver on a real machine and prints one line per check. The
//! exit code is 1 if any check failed, and 77 if there is no GPU.
//!
//! ```text
//! cargo run --release -p epoxide-examples --features cuda --example cuda_smoke
//! ```

use std::error::Error as StdError;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use epoxide::Error;
use epoxide::driver::cuda::{self, CudaDevice};
use epoxide::driver::{Device, DevicePtr, Event, Kernel, LaunchConfig, Memory, MemoryKind, Module, Stream};
use epoxide::internal::driver::{CopyEnd, driver, export, footprint, import};

type Fallible = Result<String, Box<dyn StdError>>;

const PTX: &str = include_str!("cuda_smoke.ptx");
const WORDS: u32 = 1 << 20;
const BYTES: u64 = WORDS as u64 * 4;
/// The first argument of the process that this example starts as a second rank.
const CHILD: &str = "--import-in-child";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().is_some_and(|arg| arg == CHILD) {
        return match child(&args[1..]) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("child: {error}");
                ExitCode::FAILURE
            }
        };
    }

    for (name, found) in cuda::doctor() {
        match found {
            Ok(text) => println!("info  {name}: {text}"),
            Err(text) => println!("info  {name}: MISSING: {text}"),
        }
    }
    let devices = match open_all() {
        Ok(devices) => devices,
        Err(error @ Error::Unavailable { .. }) => {
            println!("SKIP  {error}");
            return ExitCode::from(77);
        }
        Err(error) => {
            println!("FAIL  {error}");
            return ExitCode::FAILURE;
        }
    };

    let mut report = Report::default();
    one_device(&mut report, &devices[0]);
    report.check("modules load from eight threads", || load_from_threads(&devices));
    report.check("export and import, same device", || share(&devices[0], &devices[0]));
    report.check("export and import, other process", || share_with_child(&devices));
    if let [first, second, ..] = &devices[..] {
        report.check("export and import, other device", || share(first, second));
        report.check("every device writes to every other", || all_to_all(&devices));
        report.check("peer copy", || peer_copy(first, second));
        report.check("a stream of another device is refused", || foreign_stream(first, second));
    } else {
        println!("SKIP  checks between devices: this machine has one");
    }
    println!("{} checks, {} failed", report.run, report.failed);
    if report.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[derive(Default)]
struct Report {
    run: u32,
    failed: u32,
}

impl Report {
    fn check(&mut self, name: &str, work: impl FnOnce() -> Fallible) {
        self.run += 1;
        let start = Instant::now();
        match work() {
            Ok(detail) => println!("OK    {name} ({:.1?}) {detail}", start.elapsed()),
            Err(error) => {
                self.failed += 1;
                println!("FAIL  {name}: {error}");
            }
        }
    }

    /// A call that must fail with an error whose text holds `expected`.
    fn refuses<T>(&mut self, name: &str, expected: &str, work: impl FnOnce() -> Result<T, Error>) {
        self.check(name, || match work() {
            Ok(_) => Err("it succeeded".into()),
            Err(error) if error.to_string().contains(expected) => Ok(format!("-> {error}")),
            Err(error) => Err(format!("{expected:?} expected in: {error}").into()),
        });
    }
}

fn open_all() -> Result<Vec<Device>, Error> {
    cuda::devices()?.iter().map(|info| CudaDevice::open(info.ordinal)).collect()
}

fn ensure(holds: bool, message: impl Into<String>) -> Result<(), Box<dyn StdError>> {
    if holds { Ok(()) } else { Err(message.into().into()) }
}

/// Everything that one device can do.
fn one_device(report: &mut Report, device: &Device) {
    report.check("info and free memory", || {
        let (info, free) = (device.info(), device.free_memory()?);
        ensure(!info.is_virtual && info.sm_count > 0, format!("{info:?}"))?;
        ensure(free > 0 && free <= info.total_memory, format!("{free} bytes free"))?;
        Ok(format!("{free} bytes free of {}", info.total_memory))
    });
    report.check("copies and fill", || copies(device));
    report.check("shareable memory is zero", || {
        let memory = Memory::alloc(device, BYTES, MemoryKind::Shareable, "zeroes")?;
        let words = read_words(&Stream::new(device)?, &memory, WORDS)?;
        ensure(words.iter().all(|&word| word == 0), "some byte is not zero")?;
        Ok(format!("{} bytes taken for {BYTES}", footprint(&memory)))
    });
    report.check("freed memory is used again", || {
        // The pool keeps up to a GiB of freed memory.
        const KEPT: u64 = 1 << 30;
        let before = device.free_memory()?;
        for kind in [MemoryKind::Device, MemoryKind::Shareable] {
            for _ in 0..4 {
                drop(Memory::alloc(device, 1 << 30, kind, "a GiB")?);
            }
        }
        let after = device.free_memory()?;
        ensure(
            before.saturating_sub(after) < KEPT + (1 << 28),
            format!("{before} bytes free before, {after} after"),
        )?;
        Ok(String::new())
    });
    report.check("mapped host memory and stream and event queries", || mapped_host(device));
    report.check("a stream waits for another's event", || wait_between_streams(device));
    report.check("an adopted stream is used and left alone", || adopted_stream(device));
    report.check("event timing", || timing(device));
    report.check("200 KiB of dynamic shared memory", || big_shared(device));
    report.check("cooperative launch", || cooperative(device));
    report.check("capture and ten replays", || capture(device));
    report
        .check("memory dropped in a capture stays until its kernel has ended", || dropped_in_capture(device));
    report.check("dma-buf export", || {
        let memory = Memory::alloc(device, BYTES, MemoryKind::Shareable, "dma-buf")?;
        match cuda::export_dma_buf(memory.ptr(), footprint(&memory)) {
            Ok(fd) => Ok(format!("fd {}", fd.as_raw_fd())),
            Err(error @ Error::Unavailable { .. }) => Ok(format!("not here: {error}")),
            Err(error) => Err(error.into()),
        }
    });

    report.refuses("device 999", "this process sees", || CudaDevice::open(999));
    report.refuses("32 TiB of device memory", "out of device memory", || {
        Memory::alloc(device, 1 << 45, MemoryKind::Device, "too much")
    });
    report.refuses("32 TiB of shareable memory", "out of device memory", || {
        Memory::alloc(device, 1 << 45, MemoryKind::Shareable, "too much")
    });
    report.refuses("export of plain memory", "MemoryKind::Shareable", || {
        export(&Memory::alloc(device, BYTES, MemoryKind::Device, "plain")?)
    });
    report.refuses("import of no device memory", "not-a-peer", || {
        let file = std::fs::File::open("/dev/null").map_err(|error| Error::os("open", error))?;
        import(device, file.into(), BYTES, "not-a-peer")
    });
    report.refuses("PTX with a mistake", "PTX module: ", || {
        Module::load(device, &PTX.replacen("ld.global.u32", "ld.globule.u32", 1))
    });
    report.refuses("PTX of the future", "PTX 99.0", || {
        Module::load(device, &PTX.replacen(".version 8.4", ".version 99.0", 1))
    });
    report.refuses("a kernel that is not there", "no_such_kernel", || {
        Module::load(device, PTX)?.kernel("no_such_kernel", 0)
    });
    report.refuses("2048 threads per block", "launch of bump", || {
        let (stream, kernel) = (Stream::new(device)?, Module::load(device, PTX)?.kernel("bump", 0)?);
        // SAFETY: the launch is refused, so the null address is not used.
        unsafe { stream.launch(&kernel, &blocks(1, 2048), &[&0u64.to_ne_bytes()]) }
    });
    let cooperative = [
        ("a cooperative grid that does not fit", false),
        ("a dependent cooperative grid that does not fit", true),
    ];
    for (what, dependent) in cooperative {
        report.refuses(what, "cooperative", || {
            let (stream, kernel) = (Stream::new(device)?, Module::load(device, PTX)?.kernel("grid_meet", 0)?);
            let config = LaunchConfig { cooperative: true, dependent, ..blocks(1 << 20, 1024) };
            // SAFETY: the launch is refused, so the null addresses are not used.
            unsafe { stream.launch(&kernel, &config, &[&0u64.to_ne_bytes(), &0u64.to_ne_bytes()]) }
        });
    }
    report.check("the context survived all refusals", || copies(device));
}

fn blocks(grid: u32, block: u32) -> LaunchConfig {
    LaunchConfig { grid, block, shared_bytes: 0, cooperative: false, dependent: false }
}

fn kernel(device: &Device, name: &'static str) -> Result<Kernel, Error> {
    Module::load(device, PTX)?.kernel(name, 0)
}

fn read_words(stream: &Stream, memory: &Memory, count: u32) -> Result<Vec<u32>, Error> {
    let mut bytes = vec![0u8; count as usize * 4];
    memory.read(stream, 0, &mut bytes)?;
    Ok(bytes.chunks_exact(4).map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]])).collect())
}

/// A word of mapped host memory, at its host address.
fn host_word(memory: &Memory) -> &AtomicU32 {
    // SAFETY: the memory is mapped host memory of at least four bytes, page-aligned, and lives as
    // long as the borrow.
    unsafe { AtomicU32::from_ptr(memory.host_ptr().cast()) }
}

fn copies(device: &Device) -> Fallible {
    let stream = Stream::high_priority(device)?;
    let (first, second) = (
        Memory::alloc(device, BYTES, MemoryKind::Device, "first")?,
        Memory::alloc(device, BYTES, MemoryKind::Device, "second")?,
    );
    let sent: Vec<u8> = (0..BYTES).map(|index| (index % 251) as u8).collect();
    first.write(&stream, 0, &sent)?;
    // SAFETY: both allocations outlive the synchronising read below.
    unsafe {
        stream.copy(second.ptr(), first.ptr(), BYTES)?;
        stream.fill(second.ptr(), 0xab, 16)?;
        stream.fill(second.ptr(), 0xcd, 0)?;
    }
    let mut back = vec![0u8; BYTES as usize];
    second.read(&stream, 0, &mut back)?;
    ensure(back[..16] == [0xab; 16] && back[16..] == sent[16..], "device copy differs")?;

    let mut copy = vec![0u8; BYTES as usize];
    let driver = driver(device);
    let raw = driver.stream_create(false)?;
    // SAFETY: both vectors outlive the synchronise.
    let copied = unsafe {
        driver.copy(raw, CopyEnd::Host(copy.as_mut_ptr()), CopyEnd::Host(back.as_mut_ptr()), BYTES)
    };
    let synchronised = driver.stream_synchronize(raw);
    driver.stream_destroy(raw);
    copied.and(synchronised)?;
    ensure(copy == back, "host copy differs")?;
    driver.make_progress();
    Ok(String::new())
}

fn mapped_host(device: &Device) -> Fallible {
    let stream = Stream::new(device)?;
    let event = Event::new(device)?;
    ensure(event.is_done()?, "an event that was never recorded is not done")?;
    let (flag, reply) = (
        Memory::alloc(device, 4096, MemoryKind::MappedHost, "flag")?,
        Memory::alloc(device, 4096, MemoryKind::MappedHost, "reply")?,
    );
    host_word(&flag).store(0, Ordering::Release);
    host_word(&reply).store(0, Ordering::Release);
    let await_flag = kernel(device, "await_flag")?;
    // SAFETY: the kernel ends before both words go, at the synchronise below.
    unsafe {
        stream.launch(
            &await_flag,
            &blocks(1, 1),
            &[&flag.ptr().0.to_ne_bytes(), &reply.ptr().0.to_ne_bytes()],
        )?;
    }
    event.record(&stream)?;
    let running = !stream.is_done()? && !event.is_done()?;
    let timed_out = !event.wait_timeout(Duration::from_millis(20))?;
    let start = Instant::now();
    host_word(&flag).store(42, Ordering::Release);
    while host_word(&reply).load(Ordering::Acquire) == 0 && start.elapsed() < Duration::from_secs(5) {
        driver(device).make_progress();
    }
    let answered = start.elapsed();
    event.synchronize()?;
    stream.synchronize()?;
    ensure(running && timed_out, "the waiting kernel counted as done")?;
    ensure(stream.is_done()? && event.is_done()?, "the finished kernel counts as running")?;
    let seen = host_word(&reply).load(Ordering::Acquire);
    ensure(seen == 42, format!("the kernel saw {seen:#x}, not 42"))?;
    Ok(format!("host to device and back in {answered:.1?}"))
}

fn dropped_in_capture(device: &Device) -> Fallible {
    let stream = Stream::new(device)?;
    let flag = Memory::alloc(device, 4096, MemoryKind::MappedHost, "flag")?;
    let word = Memory::alloc(device, BYTES, MemoryKind::Device, "word")?;
    let address = word.ptr();
    host_word(&flag).store(0, Ordering::Release);
    let await_flag = kernel(device, "await_flag")?;
    // SAFETY: the flag outlives the kernel, which ends before the synchronise below. The word is
    // freed behind the stream.
    unsafe {
        let params = [flag.ptr().0.to_ne_bytes(), address.0.to_ne_bytes()];
        stream.launch(&await_flag, &blocks(1, 1), &[&params[0], &params[1]])?;
    }
    let graph = stream.capture(|| {
        drop(word);
        Ok(())
    });
    let taken = Memory::alloc(device, BYTES, MemoryKind::Device, "other memory");
    host_word(&flag).store(7, Ordering::Release);
    stream.synchronize()?;
    drop(graph?);
    ensure(taken?.ptr() != address, "other memory was given the same address")?;
    Ok(String::new())
}

fn wait_between_streams(device: &Device) -> Fallible {
    let (first, second) = (Stream::new(device)?, Stream::high_priority(device)?);
    let event = Event::new(device)?;
    let flag = Memory::alloc(device, 4096, MemoryKind::MappedHost, "flag")?;
    let word = Memory::alloc(device, 4096, MemoryKind::Device, "word")?;
    host_word(&flag).store(0, Ordering::Release);
    let (await_flag, bump) = (kernel(device, "await_flag")?, kernel(device, "bump")?);
    word.write(&second, 0, &0u32.to_ne_bytes())?;
    let address = word.ptr().0.to_ne_bytes();
    // SAFETY: both kernels end before the memory is freed, at the reads below.
    unsafe {
        first.launch(&await_flag, &blocks(1, 1), &[&flag.ptr().0.to_ne_bytes(), &address])?;
        event.record(&first)?;
        second.wait(&event)?;
        second.launch(&bump, &blocks(1, 1), &[&address])?;
    }
    std::thread::sleep(Duration::from_millis(20));
    let waited = !second.is_done()?;
    host_word(&flag).store(7, Ordering::Release);
    let value = read_words(&second, &word, 1)?[0];
    first.synchronize()?;
    ensure(waited, "the second stream ran ahead")?;
    ensure(value == 8, format!("{value}, not 7 + 1"))?;
    Ok(String::new())
}

fn adopted_stream(device: &Device) -> Fallible {
    let owner = Stream::new(device)?;
    let word = Memory::alloc(device, 4096, MemoryKind::Device, "word")?;
    let bump = kernel(device, "bump")?;
    word.write(&owner, 0, &0u32.to_ne_bytes())?;
    // SAFETY: `owner` outlives the adopted stream; the kernel ends before the memory is freed.
    unsafe {
        let adopted = Stream::adopt(device, owner.raw())?;
        ensure(adopted.raw() == owner.raw(), "another CUstream came back")?;
        adopted.launch(&bump, &blocks(1, 1), &[&word.ptr().0.to_ne_bytes()])?;
        drop(adopted);
        owner.launch(&bump, &blocks(1, 1), &[&word.ptr().0.to_ne_bytes()])?;
    }
    let value = read_words(&owner, &word, 1)?[0];
    ensure(value == 2, format!("{value}, not 2"))?;
    // SAFETY: the default stream always exists.
    let default = unsafe { Stream::adopt(device, epoxide::driver::RawStream(std::ptr::null_mut()))? };
    default.synchronize()?;
    Ok("and so is the default stream".into())
}

fn timing(device: &Device) -> Fallible {
    let stream = Stream::new(device)?;
    let (start, end) = (Event::timed(device)?, Event::timed(device)?);
    let flag = Memory::alloc(device, 4096, MemoryKind::MappedHost, "flag")?;
    let word = Memory::alloc(device, 4096, MemoryKind::Device, "word")?;
    host_word(&flag).store(0, Ordering::Release);
    let await_flag = kernel(device, "await_flag")?;
    start.record(&stream)?;
    // SAFETY: the kernel ends before the memory is freed, at the synchronise below.
    unsafe {
        stream.launch(
            &await_flag,
            &blocks(1, 1),
            &[&flag.ptr().0.to_ne_bytes(), &word.ptr().0.to_ne_bytes()],
        )?;
    }
    end.record(&stream)?;
    let early = start.elapsed_ms(&end);
    std::thread::sleep(Duration::from_millis(20));
    host_word(&flag).store(1, Ordering::Release);
    end.synchronize()?;
    let milliseconds = start.elapsed_ms(&end)?;
    ensure(early.is_err(), "a time was given before the end")?;
    ensure((15.0..4000.0).contains(&milliseconds), format!("{milliseconds} ms for a wait of 20 ms"))?;
    Ok(format!("{milliseconds:.2} ms for a wait of 20 ms"))
}

fn big_shared(device: &Device) -> Fallible {
    let stream = Stream::new(device)?;
    let bytes: u32 = 200 * 1024;
    let word = Memory::alloc(device, 4096, MemoryKind::Device, "word")?;
    let kernel = Module::load(device, PTX)?.kernel("last_shared_word", bytes)?;
    let config = LaunchConfig { shared_bytes: bytes, ..blocks(1, 1) };
    // SAFETY: the kernel ends before the memory is freed, at the read below.
    unsafe { stream.launch(&kernel, &config, &[&word.ptr().0.to_ne_bytes(), &bytes.to_ne_bytes()])? };
    let value = read_words(&stream, &word, 1)?[0];
    ensure(value == 0x5eed, format!("{value:#x} came back"))?;
    Ok(String::new())
}

fn cooperative(device: &Device) -> Fallible {
    let stream = Stream::new(device)?;
    let words = Memory::alloc(device, 4096, MemoryKind::Device, "counters")?;
    let grid_meet = kernel(device, "grid_meet")?;
    let grid = device.info().sm_count;
    let config = LaunchConfig { cooperative: true, ..blocks(grid, 32) };
    words.write(&stream, 0, &[0; 8])?;
    let (counter, met) = (words.ptr().0.to_ne_bytes(), words.ptr().add(4).0.to_ne_bytes());
    // SAFETY: the kernel ends before the memory is freed, at the read below.
    unsafe { stream.launch(&grid_meet, &config, &[&counter, &met])? };
    let met = read_words(&stream, &words, 2)?[1];
    ensure(met == grid, format!("{met} of {grid} blocks met"))?;
    Ok(format!("{grid} blocks met"))
}

fn capture(device: &Device) -> Fallible {
    let stream = Stream::new(device)?;
    let word = Memory::alloc(device, 4096, MemoryKind::Device, "word")?;
    let bump = kernel(device, "bump")?;
    word.write(&stream, 0, &0u32.to_ne_bytes())?;
    let address = word.ptr().0.to_ne_bytes();
    // SAFETY: all replays end before the memory is freed, at the read below.
    let graph = stream.capture(|| unsafe { stream.launch(&bump, &blocks(3, 1), &[&address]) })?;
    let recorded = read_words(&stream, &word, 1)?[0];
    ensure(recorded == 0, "the recording ran")?;
    for _ in 0..10 {
        // SAFETY: as above.
        unsafe { graph.launch(&stream)? };
    }
    let value = read_words(&stream, &word, 1)?[0];
    ensure(value == 30, format!("{value}, not 30"))?;

    let spoilt = stream.capture(|| stream.synchronize());
    let text = spoilt.err().map(|error| error.to_string()).unwrap_or_default();
    ensure(text.contains("capture"), format!("synchronising in a capture: {text:?}"))?;
    stream.synchronize()?;
    Ok(format!("; in a capture: {text}"))
}

fn load_from_threads(devices: &[Device]) -> Fallible {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|index| {
                let device = &devices[index % devices.len()];
                scope.spawn(move || -> Result<(), String> {
                    let run = || -> Fallible { increment(device) };
                    run().map(drop).map_err(|error| error.to_string())
                })
            })
            .collect();
        for thread in threads {
            thread.join().map_err(|_| "a thread panicked")??;
        }
        Ok(String::new())
    })
}

/// Runs `add_one` on `device` over its own memory.
fn increment(device: &Device) -> Fallible {
    let stream = Stream::new(device)?;
    let memory = Memory::alloc(device, BYTES, MemoryKind::Device, "words")?;
    // SAFETY: the memory outlives the synchronising read below.
    unsafe { stream.fill(memory.ptr(), 0, BYTES)? };
    add_one(&stream, memory.ptr(), memory.ptr())?;
    let words = read_words(&stream, &memory, WORDS)?;
    ensure(words.iter().all(|&word| word == 1), "add_one did not add one everywhere")?;
    Ok(String::new())
}

/// `dst[i] = src[i] + 1`; waits for it.
fn add_one(stream: &Stream, dst: DevicePtr, src: DevicePtr) -> Result<(), Error> {
    let add_one = kernel(stream.device(), "add_one")?;
    let params: [&[u8]; 3] = [&dst.0.to_ne_bytes(), &src.0.to_ne_bytes(), &WORDS.to_ne_bytes()];
    // SAFETY: the callers' memory outlives the synchronise.
    unsafe { stream.launch(&add_one, &blocks(WORDS.div_ceil(256), 256), &params)? };
    stream.synchronize()
}

/// `importer` maps memory of `owner`, reads it by a kernel, writes it by a kernel, and outlives the
/// owner's mapping.
fn share(owner: &Device, importer: &Device) -> Fallible {
    let (owner_stream, stream) = (Stream::new(owner)?, Stream::new(importer)?);
    let original = Memory::alloc(owner, BYTES, MemoryKind::Shareable, "pool")?;
    let local = Memory::alloc(importer, BYTES, MemoryKind::Device, "copy")?;
    let sent: Vec<u8> = (0..WORDS).flat_map(u32::to_ne_bytes).collect();
    original.write(&owner_stream, 0, &sent)?;

    let peer = import(importer, export(&original)?, BYTES, "the owner")?;
    ensure(peer.ptr() != original.ptr(), "the import is no mapping of its own")?;
    add_one(&stream, local.ptr(), peer.ptr())?;
    let read = read_words(&stream, &local, WORDS)?;
    ensure(read.iter().enumerate().all(|(index, &word)| word == index as u32 + 1), "peer reads are wrong")?;

    add_one(&stream, peer.ptr(), local.ptr())?;
    let written = read_words(&owner_stream, &original, WORDS)?;
    ensure(
        written.iter().enumerate().all(|(index, &word)| word == index as u32 + 2),
        "peer writes are wrong",
    )?;

    drop(original);
    let kept = read_words(&stream, &peer, WORDS)?;
    ensure(kept == written, "the memory went with the owner's mapping")?;
    Ok(String::new())
}

/// The same with a second process as the importer, on the last device.
fn share_with_child(devices: &[Device]) -> Fallible {
    let (owner, importer) = (&devices[0], devices.len() - 1);
    let stream = Stream::new(owner)?;
    let memory = Memory::alloc(owner, BYTES, MemoryKind::Shareable, "pool")?;
    // SAFETY: the memory outlives the synchronise.
    unsafe { stream.fill(memory.ptr(), 0, BYTES)? };
    stream.synchronize()?;
    let fd = export(&memory)?;
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty())?;
    let status = Command::new(std::env::current_exe()?)
        .args([CHILD, &fd.as_raw_fd().to_string(), &importer.to_string()])
        .status()?;
    ensure(status.success(), format!("the child ended with {status}"))?;
    let words = read_words(&stream, &memory, WORDS)?;
    ensure(words.iter().all(|&word| word == 1), "the child's writes are wrong")?;
    Ok(format!("device 0 to device {importer}"))
}

/// The second process: adds one to every word of the memory behind the inherited descriptor.
fn child(args: &[String]) -> Result<(), Box<dyn StdError>> {
    let [fd, ordinal] = args else { return Err("two arguments expected".into()) };
    // SAFETY: the parent left this descriptor open for us, and no other code of this process uses
    // it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd.parse()?) };
    let device = CudaDevice::open(ordinal.parse()?)?;
    let peer = import(&device, fd, BYTES, "the parent")?;
    add_one(&Stream::new(&device)?, peer.ptr(), peer.ptr())?;
    Ok(())
}

/// Every device adds one to a system-scope counter of every other, all at once.
fn all_to_all(devices: &[Device]) -> Fallible {
    let owned = devices
        .iter()
        .map(|device| Memory::alloc(device, BYTES, MemoryKind::Shareable, "counter"))
        .collect::<Result<Vec<_>, _>>()?;
    let mut running = Vec::new();
    for device in devices {
        let (stream, bump) = (Stream::new(device)?, kernel(device, "bump")?);
        for memory in &owned {
            let peer = import(device, export(memory)?, BYTES, "a peer")?;
            // SAFETY: `running` keeps the mapping until the stream has been waited for.
            unsafe { stream.launch(&bump, &blocks(100, 1), &[&peer.ptr().0.to_ne_bytes()])? };
            running.push((peer, bump.clone()));
        }
        stream.synchronize()?;
    }
    for (device, memory) in devices.iter().zip(&owned) {
        let count = read_words(&Stream::new(device)?, memory, 1)?[0];
        let expected = 100 * devices.len() as u32;
        ensure(count == expected, format!("device {} counted {count} of {expected}", device.info().ordinal))?;
    }
    Ok(format!("{} mappings", running.len()))
}

fn peer_copy(first: &Device, second: &Device) -> Fallible {
    const SIZE: u64 = 256 << 20;
    let stream = Stream::new(first)?;
    let (start, end) = (Event::timed(first)?, Event::timed(first)?);
    let source = Memory::alloc(first, SIZE, MemoryKind::Device, "source")?;
    let target = Memory::alloc(second, SIZE, MemoryKind::Shareable, "target")?;
    let peer = import(first, export(&target)?, SIZE, "the other device")?;
    // SAFETY: all memory outlives the synchronise.
    unsafe {
        stream.fill(source.ptr(), 0x5a, SIZE)?;
        stream.copy(peer.ptr(), source.ptr(), SIZE)?;
        start.record(&stream)?;
        for _ in 0..10 {
            stream.copy(peer.ptr(), source.ptr(), SIZE)?;
        }
        end.record(&stream)?;
    }
    stream.synchronize()?;
    let mut last = [0; 4];
    target.read(&Stream::new(second)?, SIZE - 4, &mut last)?;
    let word = u32::from_ne_bytes(last);
    ensure(word == 0x5a5a_5a5a, format!("{word:#x} came over"))?;
    let gigabytes = 10.0 * SIZE as f64 / f64::from(start.elapsed_ms(&end)?) / 1e6;
    Ok(format!("{gigabytes:.0} GB/s"))
}

fn foreign_stream(first: &Device, second: &Device) -> Fallible {
    let theirs = Stream::new(second)?;
    // SAFETY: the stream is live; its device is wrong, which the call must reject.
    match unsafe { Stream::adopt(first, theirs.raw()) } {
        Err(error @ Error::Argument { .. }) => Ok(format!("-> {error}")),
        Err(error) => Err(error.into()),
        Ok(_) => Err("it was adopted".into()),
    }
}

//! Memory: fills, host memory, facts about addresses.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::cuda::*;

#[test]
fn fills_have_elements_of_one_two_and_four_bytes() {
    let _context = Context::on(0);
    let addr = upload(&[0; 4]);
    ok!(cuMemsetD32_v2(addr => u64, 0x0102_0304 => u32, 4 => usize));
    ok!(cuMemsetD16_v2(addr + 4 => u64, 0xa0b0 => u16, 2 => usize));
    ok!(cuMemsetD8_v2(addr + 9 => u64, 0xff => u8, 3 => usize));
    assert_eq!(download(addr, 4), [0x0102_0304, 0xa0b0_a0b0, 0xffff_ff04, 0x0102_0304]);
    assert_ne!(cu!(cuMemsetD8_v2(addr + 4090 => u64, 0 => u8, 100 => usize)), 0);
    assert_eq!(cu!(cuMemsetD32_v2(addr + 2 => u64, 0 => u32, 1 => usize)), INVALID_VALUE);
}

/// The process may have less memory left than the fill is long.
#[test]
fn a_long_fill_takes_little_memory_of_the_host() {
    const BYTES: usize = 128 << 20;
    // Check mode keeps records of the words.
    let checks = std::env::var("EPOXIDE_VGPU_CHECK").is_ok_and(|value| value == "1");
    if checks || !alone("memory::a_long_fill_takes_little_memory_of_the_host") {
        return;
    }
    let _context = Context::on(0);
    let addr = alloc(BYTES / 4);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let data = status.lines().find_map(|line| line.strip_prefix("VmData:")).expect("Linux has the line");
    let kib: u64 = data.trim().trim_end_matches(" kB").parse().unwrap();
    let most = Some((kib << 10) + (BYTES as u64 >> 2));
    let limit = rustix::process::Rlimit { current: most, maximum: most };
    rustix::process::setrlimit(rustix::process::Resource::Data, limit).unwrap();
    ok!(cuMemsetD32_v2(addr => u64, 0x0102_0304 => u32, BYTES / 4 => usize));
    ok!(cuMemsetD16_v2(addr + 2 => u64, 0xa0b0 => u16, BYTES / 2 - 2 => usize));
    assert_eq!(download(addr, 2), [0xa0b0_0304, 0xa0b0_a0b0]);
    assert_eq!(download(addr + BYTES as u64 - 8, 2), [0xa0b0_a0b0, 0x0102_a0b0]);
}

#[test]
fn copies_past_the_end_are_errors_of_the_call() {
    let _context = Context::on(0);
    let (addr, bytes, mut to) = (upload(&[1, 2]), 8, [0u32; 2048]);
    let name = c"counter".as_ptr();
    let (module, mut counter, mut length) = (Module::load(), 0, 0);
    ok!(cuModuleGetGlobal_v2(
        &mut counter => *mut u64, &mut length => *mut usize, module.0 => Handle, name => *const i8,
    ));
    for start in [addr, counter] {
        let to = to.as_mut_ptr();
        ok!(cuMemcpyDtoH_v2(to => *mut u32, start => u64, bytes => usize));
        assert_eq!(cu!(cuMemcpyDtoH_v2(to => *mut u32, start => u64, bytes + 1 => usize)), INVALID_VALUE);
        assert_eq!(cu!(cuMemcpyHtoD_v2(start + 4 => u64, to => *const u32, bytes => usize)), INVALID_VALUE);
        assert_eq!(cu!(cuMemcpyDtoD_v2(start => u64, addr + 4 => u64, bytes => usize)), INVALID_VALUE);
    }
    assert_eq!(download(addr, 2), [1, 2]);
    assert_eq!(
        cu!(cuMemcpyDtoH_v2(std::ptr::null_mut() => *mut u32, addr => u64, bytes => usize)),
        INVALID_VALUE
    );
    assert_eq!(cu!(cuMemcpyHtoD_v2(64 => u64, to.as_ptr() => *const u32, bytes => usize)), INVALID_VALUE);
}

#[test]
fn host_and_managed_memory_have_one_address_everywhere() {
    let _context = Context::on(1);
    let module = Module::load();
    let (mut host, mut managed) = (0u64, 0u64);
    ok!(cuMemHostAlloc(&mut host => *mut u64, 64 => usize, 0 => u32));
    ok!(cuMemAllocManaged(&mut managed => *mut u64, 64 => usize, 1 => u32));
    for addr in [host, managed] {
        let word = addr as *mut u32;
        // SAFETY: the memory is this process's, and no kernel runs.
        unsafe { word.write(30) };
        module.add(0, [1, 1], addr, 12);
        ok!(cuCtxSynchronize());
        // SAFETY: as above.
        assert_eq!(unsafe { word.read() }, 42);
    }
    let attribute = |attribute: i32, addr: u64| {
        let mut value = 0u64;
        let code = cu!(cuPointerGetAttribute(&mut value => *mut u64, attribute => i32, addr => u64));
        (code, value)
    };
    assert_eq!((attribute(2, host), attribute(2, managed), attribute(8, managed)), ((0, 1), (0, 2), (0, 1)));
    assert_eq!((attribute(9, managed + 60), attribute(11, managed + 60)), ((0, 1), (0, managed)));
    assert_eq!(attribute(2, 64).0, INVALID_VALUE);
    ok!(cuMemFreeHost(host => u64));
    ok!(cuMemFree_v2(managed => u64));
}

#[test]
fn memory_of_the_program_is_registered_and_keeps_its_address() {
    let _context = Context::on(1);
    let module = Module::load();
    let words: Vec<AtomicU32> = (0..64).map(AtomicU32::new).collect();
    let (addr, bytes) = (words.as_ptr() as u64, size_of_val(&words[..]));
    let register = |addr: u64, bytes: usize| cu!(cuMemHostRegister_v2(addr => u64, bytes => usize, 2 => u32));
    assert_eq!(register(0, 64), INVALID_VALUE);
    assert_eq!(register(addr, 0), INVALID_VALUE);
    assert_eq!(register(addr, bytes), 0);
    // A part of it, and memory around it.
    for (addr, bytes) in [(addr + 8, 4), (addr - 4, 8), (addr - 64, bytes + 128)] {
        assert_eq!(register(addr, bytes), 712);
    }
    let mut device = 0u64;
    ok!(cuMemHostGetDevicePointer_v2(&mut device => *mut u64, addr + 4 => u64, 0 => u32));
    assert_eq!(device, addr + 4);
    module.add(0, [1, 32], addr, 100);
    ok!(cuCtxSynchronize());
    let values: Vec<u32> = words.iter().map(|word| word.load(Ordering::Relaxed)).collect();
    assert_eq!(values, (0..64).map(|at| if at < 32 { at + 100 } else { at }).collect::<Vec<_>>());
    ok!(cuMemHostUnregister(addr => u64));
    assert_eq!(cu!(cuMemHostUnregister(addr => u64)), 713);
    assert_eq!(register(addr, bytes), 0);
    ok!(cuMemHostUnregister(addr => u64));
}

#[test]
fn registered_memory_is_given_back_after_the_kernels_of_other_contexts() {
    // Kernels of other tests would wait for this call, and be waited for.
    if !alone("memory::registered_memory_is_given_back_after_the_kernels_of_other_contexts") {
        return;
    }
    let other = Context::on(1);
    let module = Module::load();
    let own = Context::on(0);
    // The flag that a kernel waits for is the second word.
    let words: Vec<AtomicU32> = (0..2).map(|_| AtomicU32::new(0)).collect();
    let addr = words.as_ptr() as u64;
    ok!(cuMemHostRegister_v2(addr => u64, 8 => usize, 2 => u32));
    // The word to which the kernel's store is copied.
    let mut seen = 0u64;
    ok!(cuMemHostAlloc(&mut seen => *mut u64, 8 => usize, 0 => u32));
    // SAFETY: the word is in mapped memory, and aligned.
    let seen_word = unsafe { AtomicU32::from_ptr(seen as *mut u32) };
    seen_word.store(0, Ordering::Release);
    other.make_current();
    module.launch_at("wait", 0, [1, 1], addr);
    ok!(cuMemcpyDtoDAsync_v2(seen => u64, addr => u64, 4 => usize, 0 => Handle));
    std::thread::scope(|threads| {
        threads.spawn(|| {
            own.make_current();
            ok!(cuMemHostUnregister(addr => u64));
            assert_eq!(seen_word.load(Ordering::Acquire), 3);
        });
        // A call that does not wait has returned by then.
        std::thread::sleep(std::time::Duration::from_millis(200));
        words[1].store(3, Ordering::Release);
    });
    other.make_current();
    ok!(cuCtxSynchronize());
    own.make_current();
    ok!(cuMemFreeHost(seen => u64));
}

#[test]
fn memory_is_not_made_in_a_context_that_was_destroyed() {
    // No other test changes how much is free.
    if !alone("memory::memory_is_not_made_in_a_context_that_was_destroyed") {
        return;
    }
    let _watches = Context::on(0);
    let free = || {
        let (mut free, mut total) = (0usize, 0usize);
        ok!(cuMemGetInfo_v2(&mut free => *mut usize, &mut total => *mut usize));
        free
    };
    let before = free();
    for _ in 0..10 {
        let (send, context) = std::sync::mpsc::channel();
        let allocates = std::thread::spawn(move || {
            let context = Context::on(0);
            send.send(context.0).expect("the test waits for it");
            // The other thread destroys it.
            std::mem::forget(context);
            let mut addr = 0u64;
            cu!(cuMemAlloc_v2(&mut addr => *mut u64, 64 << 20 => usize))
        });
        let context: Handle = context.recv().expect("the thread sends it");
        // The memory counts before it is filled.
        while free() == before && !allocates.is_finished() {
            std::hint::spin_loop();
        }
        ok!(cuCtxDestroy_v2(context => Handle));
        let code = allocates.join().expect("it does not panic");
        assert!([0, INVALID_CONTEXT].contains(&code), "{code}");
        assert_eq!(free(), before);
    }
}

#[test]
fn memory_is_limited_and_counted() {
    let _context = Context::on(1);
    let info = || {
        let (mut free, mut total) = (0, 0);
        ok!(cuMemGetInfo_v2(&mut free => *mut usize, &mut total => *mut usize));
        (free, total)
    };
    let (_, total) = info();
    let mut addr = 0u64;
    assert_eq!(cu!(cuMemAlloc_v2(&mut addr => *mut u64, total + 1 => usize)), 2, "CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(cu!(cuMemAlloc_v2(&mut addr => *mut u64, 0 => usize)), INVALID_VALUE);
    assert_eq!(cu!(cuMemAlloc_v2(std::ptr::null_mut() => *mut u64, 4 => usize)), INVALID_VALUE);
}

#[test]
fn memory_is_freed_in_stream_order() {
    if !alone("memory::memory_is_freed_in_stream_order") {
        return;
    }
    let _context = Context::on(0);
    let (module, stream) = (Module::load(), stream(1));
    let mut addr = 0u64;
    let result = upload(&[0]);
    ok!(cuMemAllocAsync(&mut addr => *mut u64, 4 => usize, stream => Handle));
    ok!(cuMemsetD32Async(addr => u64, 1 => u32, 1 => usize, stream => Handle));
    module.add(stream, [1, 1], addr, 1);
    ok!(cuMemcpyDtoDAsync_v2(result => u64, addr => u64, 4 => usize, stream => Handle));
    ok!(cuMemFreeAsync(addr => u64, stream => Handle));
    assert_eq!(cu!(cuMemFreeAsync(addr => u64, stream => Handle)), INVALID_VALUE);
    ok!(cuStreamSynchronize(stream => Handle));
    assert_eq!(download(result, 1), [2]);
}

#[test]
fn rows_are_copied_by_their_pitch() {
    let _context = Context::on(0);
    let addr = upload(&[0; 8]);
    let from: Vec<u32> = (1..=6).collect();
    #[repr(C)]
    struct Side(usize, usize, u32, *const u32, u64, usize, usize);
    #[repr(C)]
    struct Copy(Side, Side, usize, usize);
    let host = Side(4, 0, 1, from.as_ptr(), 0, 0, 12);
    let device = Side(0, 0, 2, std::ptr::null(), addr, 0, 16);
    ok!(cuMemcpy2D_v2(&Copy(host, device, 8, 2) => *const Copy));
    assert_eq!(download(addr, 8), [2, 3, 0, 0, 5, 6, 0, 0]);
    // Rows at addresses of more than 64 bits, as their start or their pitch or their number has it.
    let host = |x: usize, y: usize, pitch: usize| Side(x, y, 1, from.as_ptr(), 0, 0, pitch);
    let device = |y: usize, pitch: usize| Side(0, y, 2, std::ptr::null(), addr + 8, 0, pitch);
    for wrong in [
        Copy(host(0, 0, 12), device(0, usize::MAX - 3), 4, 3),
        Copy(host(0, 0, 12), device(1, usize::MAX - 3), 4, 1),
        Copy(host(0, 0, 12), device(1 << 63, 2), 4, 1),
        Copy(host(0, 0, usize::MAX - 3), device(0, 4), 4, 2),
        Copy(host(usize::MAX - 3, 1, 4), device(0, 4), 4, 1),
    ] {
        assert_eq!(cu!(cuMemcpy2D_v2(&wrong => *const Copy)), INVALID_VALUE);
    }
    assert_eq!(download(addr, 8), [2, 3, 0, 0, 5, 6, 0, 0]);
    // Results of an H200: a pitch that is less than offset and width is an error, of one row too.
    let device = |pitch: usize| Side(0, 0, 2, std::ptr::null(), addr, 0, pitch);
    let copy = |x: usize, pitches: [usize; 2], width: usize, rows: usize| {
        let what = Copy(host(x, 0, pitches[0]), device(pitches[1]), width, rows);
        cu!(cuMemcpy2D_v2(&what => *const Copy))
    };
    for (x, pitches, rows) in [(0, [4, 16], 1), (0, [16, 4], 1), (0, [4, 16], 2), (4, [8, 16], 2)] {
        assert_eq!(copy(x, pitches, 8, rows), INVALID_VALUE, "{x} {pitches:?} {rows}");
    }
    assert_eq!(download(addr, 8), [2, 3, 0, 0, 5, 6, 0, 0]);
    // A pitch of 0 stands for offset and width.
    assert_eq!(copy(4, [0, 16], 4, 2), 0);
    assert_eq!(download(addr, 8), [2, 3, 0, 0, 4, 6, 0, 0]);
    assert_eq!(copy(0, [12, 0], 8, 2), 0);
    assert_eq!(download(addr, 8), [1, 2, 4, 5, 4, 6, 0, 0]);
    // Rows without bytes, however many.
    assert_eq!((copy(0, [0, 0], 0, usize::MAX), copy(0, [0, 0], 8, 0)), (0, 0));
    assert_eq!(download(addr, 8), [1, 2, 4, 5, 4, 6, 0, 0]);
}

#[test]
fn rows_that_no_address_reaches_are_not_filled() {
    let _context = Context::on(0);
    let addr = upload(&[1, 2, 3, 4]);
    let fill = |at: u64, pitch: usize, width: usize, rows: usize| cu!(cuMemsetD2D8_v2(at => u64, pitch => usize, 0 => u8, width => usize, rows => usize));
    // The next row would be the byte before.
    assert_eq!(fill(addr + 8, usize::MAX, 1, 3), INVALID_VALUE);
    assert_eq!(fill(addr + 8, 1 << 63, 1, 3), INVALID_VALUE);
    assert_eq!(fill(addr, 4, 1, usize::MAX), INVALID_VALUE);
    assert_eq!(download(addr, 4), [1, 2, 3, 4]);
    assert_eq!(fill(addr, 8, 4, 2), 0);
    assert_eq!(download(addr, 4), [0, 2, 0, 4]);
    // Results of an H200: rows may not overlap, and one row has no pitch.
    assert_eq!((fill(addr, 4, 8, 2), fill(addr, 0, 8, 2)), (INVALID_VALUE, INVALID_VALUE));
    assert_eq!(download(addr, 4), [0, 2, 0, 4]);
    assert_eq!((fill(addr, 0, 8, 1), fill(addr, 0, 0, usize::MAX), fill(addr, 0, 8, 0)), (0, 0, 0));
    assert_eq!(download(addr, 4), [0, 0, 0, 4]);
}

#[test]
fn memory_in_stream_order_lies_on_the_device_of_its_stream_or_pool() {
    let second = Context::on(1);
    let (module, other) = (Module::load(), stream(1));
    let mut pools = [0; 2];
    for (device, pool) in (0..).zip(&mut pools) {
        ok!(cuDeviceGetDefaultMemPool(pool => *mut Handle, device => i32));
    }
    let first = Context::on(0);
    let device_of = |addr: u64| {
        let mut device = -1;
        ok!(cuPointerGetAttribute(&mut device => *mut i32, 9 => i32, addr => u64));
        device
    };
    let mut addr = 0u64;
    ok!(cuMemAllocAsync(&mut addr => *mut u64, 4 => usize, other => Handle));
    assert_eq!(device_of(addr), 1);
    ok!(cuMemsetD32Async(addr => u64, 1 => u32, 1 => usize, other => Handle));
    module.add(other, [1, 1], addr, 1);
    ok!(cuStreamSynchronize(other => Handle));
    assert_eq!(download(addr, 1), [2]);
    ok!(cuMemFreeAsync(addr => u64, other => Handle));
    for (device, pool) in (0..).zip(pools) {
        for stream in [0, other] {
            ok!(cuMemAllocFromPoolAsync(&mut addr => *mut u64, 4 => usize, pool => Handle, stream => Handle));
            assert_eq!(device_of(addr), device);
            ok!(cuMemFreeAsync(addr => u64, stream => Handle));
        }
    }
    ok!(cuStreamSynchronize(other => Handle));
    drop((first, second));
}

/// CUDA's documentation: a copy from pageable memory begins with a wait for the stream.
#[test]
fn a_copy_from_pageable_memory_reads_it_behind_earlier_work() {
    let _context = Context::on(0);
    let (addr, word) = (upload(&[1]), AtomicU32::new(0));
    be_late(0, word.as_ptr());
    ok!(cuMemcpyHtoD_v2(addr => u64, word.as_ptr() => *const u32, 4 => usize));
    assert_eq!(download(addr, 1), [10]);
}

/// CUDA's documentation: fills of page-locked and managed memory are synchronous, and so are
/// copies from host to host memory, also in a stream.
#[test]
fn fills_and_copies_of_host_memory_are_done_when_they_return() {
    let _context = Context::on(0);
    let (mut host, mut managed, own) = (0u64, 0u64, stream(1));
    ok!(cuMemHostAlloc(&mut host => *mut u64, 64 => usize, 0 => u32));
    ok!(cuMemAllocManaged(&mut managed => *mut u64, 64 => usize, 1 => u32));
    // SAFETY: the word is in memory of this test that outlives the reads, and aligned.
    let read = |addr: u64| unsafe { AtomicU32::from_ptr(addr as *mut u32) }.load(Ordering::Acquire);
    for addr in [host, managed] {
        be_late(0, std::ptr::null_mut());
        ok!(cuMemsetD32_v2(addr => u64, 7 => u32, 1 => usize));
        assert_eq!(read(addr), 7);
        be_late(0, std::ptr::null_mut());
        ok!(cuMemsetD2D32_v2(addr + 8 => u64, 8 => usize, 9 => u32, 1 => usize, 2 => usize));
        assert_eq!([addr + 8, addr + 16].map(read), [9, 9]);
    }
    // From page-locked and from pageable memory.
    be_late(own, std::ptr::null_mut());
    ok!(cuMemcpyAsync(host + 4 => u64, host => u64, 4 => usize, own => Handle));
    assert_eq!(read(host + 4), 7);
    let word = AtomicU32::new(0);
    be_late(own, word.as_ptr());
    ok!(cuMemcpyAsync(host + 4 => u64, word.as_ptr() as u64 => u64, 4 => usize, own => Handle));
    assert_eq!(read(host + 4), 10);
}

#[test]
fn rows_past_the_end_of_the_memory_leave_all_rows_as_they_were() {
    let _context = Context::on(0);
    let (addr, words) = (upload(&[1, 2, 3, 4]), 4);
    // The second row is at no address of a program.
    let pitch = 1usize << 47;
    let fill =
        |rows: usize| cu!(cuMemsetD2D32_v2(addr => u64, pitch => usize, 0 => u32, 1 => usize, rows => usize));
    assert_eq!(fill(2), INVALID_VALUE);
    // The second row is not aligned.
    let unaligned = cu!(cuMemsetD2D32_v2(addr => u64, 6 => usize, 0 => u32, 1 => usize, 2 => usize));
    assert_eq!((unaligned, download(addr, words)), (INVALID_VALUE, vec![1, 2, 3, 4]));
    #[repr(C)]
    struct Side(usize, usize, u32, *const u32, u64, usize, usize);
    #[repr(C)]
    struct Copy(Side, Side, usize, usize);
    let from = [9u32; 2];
    let host = Side(0, 0, 1, from.as_ptr(), 0, 0, 4);
    let copy = Copy(host, Side(0, 0, 2, std::ptr::null(), addr, 0, pitch), 4, 2);
    assert_eq!(cu!(cuMemcpy2D_v2(&copy => *const Copy)), INVALID_VALUE);
    assert_eq!(download(addr, words), [1, 2, 3, 4]);
    assert_eq!(fill(1), 0);
    assert_eq!(download(addr, words), [0, 2, 3, 4]);
}

//! Order of streams, events, host functions, captures.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::cuda::*;

#[test]
fn a_kernel_may_wait_for_work_of_another_stream() {
    let _context = Context::on(0);
    let (module, waits, stores) = (Module::load(), stream(1), stream(1));
    let addr = upload(&[0, 0]);
    module.launch_at("wait", waits, [1, 1], addr);
    assert_eq!(cu!(cuStreamQuery(waits => Handle)), NOT_READY);
    ok!(cuMemsetD32Async(addr + 4 => u64, 9 => u32, 1 => usize, stores => Handle));
    ok!(cuStreamSynchronize(waits => Handle));
    assert_eq!(download(addr, 2), [9, 9]);
}

#[test]
fn a_kernel_may_wait_for_the_host_and_for_another_device() {
    let first = Context::on(0);
    let (module, own) = (Module::load(), stream(1));
    let mut flags = 0u64;
    ok!(cuMemHostAlloc(&mut flags => *mut u64, 8 => usize, 0 => u32));
    module.launch_at("wait", own, [1, 1], flags);
    // SAFETY: the word is in mapped memory of 8 bytes, and aligned.
    let flag = unsafe { AtomicU32::from_ptr((flags + 4) as *mut u32) };
    flag.store(3, Ordering::Release);
    ok!(cuStreamSynchronize(own => Handle));

    flag.store(0, Ordering::Release);
    module.launch_at("wait", own, [1, 1], flags);
    let second = Context::on(1);
    Module::load().add(0, [1, 1], flags + 4, 8);
    ok!(cuCtxSynchronize());
    drop(second);
    first.make_current();
    ok!(cuStreamSynchronize(own => Handle));
    // SAFETY: as above.
    assert_eq!(unsafe { (flags as *const u32).read() }, 8);
}

#[test]
fn events_order_streams_and_measure_time() {
    let _context = Context::on(0);
    let (module, streams, [begin, end]) = (Module::load(), [stream(1), stream(1)], [event(), event()]);
    let addr = upload(&[0, 0]);
    assert_eq!(cu!(cuEventQuery(end => Handle)), 0);
    record(begin, streams[0]);
    module.launch_at("wait", streams[0], [1, 1], addr);
    record(end, streams[0]);
    wait(streams[1], end);
    module.add(streams[1], [1, 1], addr, 1);
    assert_eq!(cu!(cuEventQuery(end => Handle)), NOT_READY);
    let mut ms = -1f32;
    let elapsed = cu!(cuEventElapsedTime(&mut ms => *mut f32, begin => Handle, end => Handle));
    assert_eq!(elapsed, NOT_READY);
    let third = stream(1);
    ok!(cuMemsetD32Async(addr + 4 => u64, 5 => u32, 1 => usize, third => Handle));
    ok!(cuStreamSynchronize(streams[1] => Handle));
    assert_eq!(download(addr, 1), [6]);
    ok!(cuEventSynchronize(end => Handle));
    ok!(cuEventElapsedTime(&mut ms => *mut f32, begin => Handle, end => Handle));
    assert!(ms > 0.0, "{ms}");
}

#[test]
fn the_default_stream_waits_for_blocking_streams_and_they_for_it() {
    let _context = Context::on(0);
    let (module, blocking) = (Module::load(), stream(0));
    let addr = upload(&[0, 0]);
    module.launch_at("wait", blocking, [1, 1], addr);
    // The copy is behind the kernel, and the second kernel behind the copy.
    ok!(cuMemcpyDtoDAsync_v2(addr + 4 => u64, addr => u64, 4 => usize, 0 => Handle));
    module.add(blocking, [1, 2], addr, 1);
    assert_eq!(cu!(cuStreamQuery(0 => Handle)), NOT_READY);
    let free = stream(1);
    ok!(cuMemsetD32Async(addr + 4 => u64, 7 => u32, 1 => usize, free => Handle));
    ok!(cuCtxSynchronize());
    assert_eq!(download(addr, 2), [8, 8]);
}

unsafe extern "C" fn add_ten(data: *mut c_void) {
    // SAFETY: the test passes a word that outlives the stream's work.
    let word = unsafe { &*data.cast::<AtomicU32>() };
    word.fetch_add(10, Ordering::Relaxed);
}

#[test]
fn host_functions_are_called_in_stream_order() {
    let _context = Context::on(0);
    let (module, own) = (Module::load(), stream(1));
    let mut host = 0u64;
    ok!(cuMemHostAlloc(&mut host => *mut u64, 4 => usize, 0 => u32));
    module.add(own, [1, 1], host, 1);
    ok!(cuLaunchHostFunc(own => Handle, add_ten => unsafe extern "C" fn(*mut c_void), host as *mut c_void => *mut c_void));
    module.add(own, [1, 1], host, 1);
    ok!(cuStreamSynchronize(own => Handle));
    // SAFETY: mapped memory of this test.
    assert_eq!(unsafe { (host as *const u32).read() }, 12);
}

#[test]
fn a_captured_graph_forks_and_joins_and_runs_again() {
    let _context = Context::on(0);
    let (module, streams, [fork, join]) = (Module::load(), [stream(1), stream(1)], [event(), event()]);
    let addr = upload(&[1, 10]);
    ok!(cuStreamBeginCapture_v2(streams[0] => Handle, 1 => i32));
    record(fork, streams[0]);
    wait(streams[1], fork);
    module.add(streams[0], [1, 1], addr, 1);
    module.add(streams[1], [1, 1], addr + 4, 10);
    record(join, streams[1]);
    wait(streams[0], join);
    module.add(streams[0], [1, 2], addr, 100);
    let mut free = 0u64;
    let (mut graph, mut exec) = (0, 0);
    ok!(cuStreamEndCapture(streams[0] => Handle, &mut graph => *mut Handle));
    ok!(cuGraphInstantiateWithFlags(&mut exec => *mut Handle, graph => Handle, 0 => u64));
    ok!(cuGraphDestroy(graph => Handle));
    assert_eq!(download(addr, 2), [1, 10]);
    for _ in 0..3 {
        ok!(cuGraphLaunch(exec => Handle, streams[1] => Handle));
    }
    ok!(cuStreamSynchronize(streams[1] => Handle));
    assert_eq!(download(addr, 2), [304, 340]);
    ok!(cuGraphExecDestroy(exec => Handle));

    // A call that a capture forbids ends it.
    ok!(cuStreamBeginCapture_v2(streams[0] => Handle, 1 => i32));
    assert_eq!(cu!(cuMemAlloc_v2(&mut free => *mut u64, 4 => usize)), 900);
    assert_eq!(cu!(cuStreamEndCapture(streams[0] => Handle, &mut graph => *mut Handle)), 901);

    // So does a wait for work outside of it.
    let outside = event();
    record(outside, streams[1]);
    ok!(cuStreamBeginCapture_v2(streams[0] => Handle, 1 => i32));
    assert_eq!(cu!(cuStreamWaitEvent(streams[0] => Handle, outside => Handle, 0 => u32)), 905);
    assert_eq!(cu!(cuStreamEndCapture(streams[0] => Handle, &mut graph => *mut Handle)), 901);
    ok!(cuStreamSynchronize(streams[0] => Handle));
}

#[test]
fn work_of_a_destroyed_stream_comes_before_the_calls_that_wait_for_it() {
    let _context = Context::on(0);
    let module = Module::load();
    let addr = upload(&[1]);
    for flags in [0, 1] {
        let own = stream(flags);
        module.add(own, [1, 1], addr, 1);
        ok!(cuStreamDestroy_v2(own => Handle));
        ok!(cuCtxSynchronize());
        let free = stream(1);
        module.add(free, [1, 1], addr, 1);
        ok!(cuStreamSynchronize(free => Handle));
    }
    assert_eq!(download(addr, 1), [5]);
}

#[test]
fn the_default_stream_waits_for_blocking_streams_that_were_destroyed() {
    let _context = Context::on(0);
    let module = Module::load();
    let addr = upload(&[1]);
    let mut host = 0u64;
    ok!(cuMemHostAlloc(&mut host => *mut u64, 4 => usize, 0 => u32));
    // SAFETY: the word is in mapped memory of 4 bytes, and aligned.
    let flag = unsafe { AtomicU32::from_ptr(host as *mut u32) };
    // A stream that has work when the default stream gets its own, and one that is removed by then.
    for is_removed in [false, true] {
        flag.store(0, Ordering::Release);
        let blocking = stream(0);
        module.add(blocking, [1, 1], addr, 1);
        ok!(cuLaunchHostFunc(blocking => Handle, add_ten => unsafe extern "C" fn(*mut c_void), host as *mut c_void => *mut c_void));
        ok!(cuStreamDestroy_v2(blocking => Handle));
        while is_removed && flag.load(Ordering::Acquire) == 0 {
            std::thread::yield_now();
        }
        module.add(0, [1, 1], addr, 1);
        assert_eq!(download(addr, 1), [if is_removed { 5 } else { 3 }]);
    }
}

/// As measured on an H200 with driver 580.159.04.
#[test]
fn captures_forbid_calls_by_mode_and_thread() {
    // A global capture also forbids calls of other tests' threads.
    if !alone("streams::captures_forbid_calls_by_mode_and_thread") {
        return;
    }
    let context = Context::on(0);
    let (other, outside) = (stream(1), event());
    record(outside, other);
    let calls: [&(dyn Fn(u64) -> i32 + Sync); 6] = [
        &|_| cu!(cuEventQuery(outside => Handle)),
        &|_| cu!(cuEventSynchronize(outside => Handle)),
        &|_| cu!(cuStreamQuery(other => Handle)),
        &|_| cu!(cuStreamSynchronize(other => Handle)),
        &|addr| cu!(cuMemFreeAsync(addr => u64, other => Handle)),
        &|_| cu!(cuMemAllocAsync(&mut 0 => *mut u64, 4 => usize, other => Handle)),
    ];
    // The mode of the capture, whether another thread calls, the mode of the thread that calls.
    let cases = [
        (0, false, 0, true),
        (1, false, 0, true),
        (1, false, 2, false),
        (2, false, 0, false),
        (0, true, 0, true),
        (0, true, 2, false),
        (1, true, 0, false),
    ];
    for (index, call) in calls.iter().enumerate() {
        for (mode, from_another, own_mode, is_forbidden) in cases {
            let (captured, addr, mut graph) = (stream(1), alloc(1), 0);
            ok!(cuStreamSynchronize(other => Handle));
            ok!(cuStreamBeginCapture_v2(captured => Handle, mode => i32));
            let call = || {
                context.make_current();
                let mut exchanged = own_mode;
                ok!(cuThreadExchangeStreamCaptureMode(&mut exchanged => *mut i32));
                let code = call(addr);
                ok!(cuThreadExchangeStreamCaptureMode(&mut exchanged => *mut i32));
                code
            };
            let code = match from_another {
                true => std::thread::scope(|scope| scope.spawn(call).join().unwrap()),
                false => call(),
            };
            let ended = cu!(cuStreamEndCapture(captured => Handle, &mut graph => *mut Handle));
            let expected = if is_forbidden { (900, 901) } else { (0, 0) };
            assert_eq!((code, ended), expected, "call {index}, {mode} {from_another} {own_mode}");
        }
    }
}

#[test]
fn a_graph_runs_on_the_devices_that_it_was_captured_on() {
    let [first, second] = [Context::on(0), Context::on(1)];
    // Kernels reach memory of their own device alone.
    let part = |context: &Context| {
        context.make_current();
        (Module::load(), stream(1), event(), upload(&[1]))
    };
    let (module, own, fork, addr) = part(&first);
    let (other_module, other, join, other_addr) = part(&second);
    ok!(cuStreamBeginCapture_v2(own => Handle, 2 => i32));
    record(fork, own);
    wait(other, fork);
    module.add(own, [1, 1], addr, 10);
    other_module.add(other, [1, 1], other_addr, 100);
    record(join, other);
    wait(own, join);
    let (mut graph, mut exec) = (0, 0);
    ok!(cuStreamEndCapture(own => Handle, &mut graph => *mut Handle));
    ok!(cuGraphInstantiateWithFlags(&mut exec => *mut Handle, graph => Handle, 0 => u64));
    // A launch in a stream of the other device changes nothing.
    for launched in [own, other] {
        ok!(cuGraphLaunch(exec => Handle, launched => Handle));
        ok!(cuStreamSynchronize(launched => Handle));
    }
    assert_eq!((download(addr, 1), download(other_addr, 1)), (vec![21], vec![201]));
    // A capture has no lanes of other contexts for it.
    ok!(cuStreamBeginCapture_v2(own => Handle, 2 => i32));
    assert_eq!(cu!(cuGraphLaunch(exec => Handle, own => Handle)), NOT_SUPPORTED);
    ok!(cuStreamEndCapture(own => Handle, &mut graph => *mut Handle));
}

#[test]
fn a_capture_ends_with_its_stream_and_with_the_context() {
    let context = Context::on(0);
    let [began, joined] = [stream(1), stream(1)];
    let begin = |own: Handle| {
        let fork = event();
        ok!(cuStreamBeginCapture_v2(own => Handle, 1 => i32));
        record(fork, own);
        wait(joined, fork);
    };
    let is_captured = |stream: Handle| {
        let mut state = -1;
        ok!(cuStreamIsCapturing(stream => Handle, &mut state => *mut i32));
        state
    };
    begin(began);
    assert_eq!(is_captured(joined), 1);
    ok!(cuStreamDestroy_v2(began => Handle));
    // The thread may allocate again, and the other stream is free.
    assert_eq!((download(upload(&[1]), 1), is_captured(joined)), (vec![1], 0));

    // A capture is not valid any more without a stream that joined it.
    let began = stream(1);
    begin(began);
    ok!(cuStreamDestroy_v2(joined => Handle));
    let mut graph = 0;
    assert_eq!(cu!(cuStreamEndCapture(began => Handle, &mut graph => *mut Handle)), 901);

    ok!(cuStreamBeginCapture_v2(began => Handle, 1 => i32));
    drop(context);
    let _other = Context::on(0);
    assert_eq!(download(upload(&[1]), 1), [1]);
}

pub fn begin(stream: Handle, mode: i32) {
    ok!(cuStreamBeginCapture_v2(stream => Handle, mode => i32));
}

/// The code of the end of a capture.
pub fn end(stream: Handle) -> Code {
    cu!(cuStreamEndCapture(stream => Handle, &mut 0 => *mut Handle))
}

/// The codes are those of CUDA's documentation.
#[test]
fn the_default_stream_is_unusable_beside_captures_of_blocking_streams() {
    let _context = Context::on(0);
    let (module, blocking, addr, outside) = (Module::load(), stream(0), upload(&[1]), event());
    let state = |stream: Handle| {
        let mut state = -1;
        (cu!(cuStreamIsCapturing(stream => Handle, &mut state => *mut i32)), state)
    };
    begin(blocking, 2);
    for default in [0, 1] {
        assert_eq!(state(default).0, 906);
        let (mut state, none) = (-1, std::ptr::null_mut::<u64>());
        let code = cu!(cuStreamGetCaptureInfo_v2(
            default => Handle, &mut state => *mut i32, none => *mut u64, none => *mut u64, none => *mut u64,
            none => *mut u64,
        ));
        assert_eq!(code, 906);
    }
    assert_eq!((state(blocking), end(blocking)), ((0, 1), 0));
    let mut params = [(&raw const addr).cast_mut().cast(), (&raw const addr).cast_mut().cast()];
    let mut word = 5u32;
    let calls: [&mut dyn FnMut() -> Code; 6] = [
        &mut || cu!(cuMemsetD32Async(addr => u64, 1 => u32, 1 => usize, 0 => Handle)),
        &mut || module.try_launch("add", 0, [1, 1], &mut params),
        &mut || cu!(cuMemcpyHtoD_v2(addr => u64, &raw mut word => *const u32, 4 => usize)),
        &mut || cu!(cuEventRecord(outside => Handle, 0 => Handle)),
        &mut || cu!(cuStreamSynchronize(0 => Handle)),
        &mut || cu!(cuStreamWaitEvent(0 => Handle, outside => Handle, 0 => u32)),
    ];
    record(outside, stream(1));
    for (index, call) in calls.into_iter().enumerate() {
        begin(blocking, 2);
        assert_eq!((call(), end(blocking)), (906, 901), "call {index}");
    }
    assert_eq!(download(addr, 1), [1]);
}

/// CUDA's documentation says that the stream cannot be captured, and names no code for the wait.
#[test]
fn the_default_stream_does_not_join_a_capture() {
    let _context = Context::on(0);
    let (own, fork, addr, word) = (stream(1), event(), upload(&[1]), 5u32);
    begin(own, 2);
    record(fork, own);
    assert_eq!(cu!(cuStreamWaitEvent(0 => Handle, fork => Handle, 0 => u32)), 906);
    ok!(cuMemcpyHtoD_v2(addr => u64, &raw const word => *const u32, 4 => usize));
    assert_eq!((download(addr, 1), end(own)), (vec![5], 901));
}

#[test]
fn a_stream_that_was_destroyed_with_work_is_no_handle_any_more() {
    let _context = Context::on(0);
    let (own, word) = (stream(1), AtomicU32::new(0));
    be_late(own, word.as_ptr());
    ok!(cuStreamDestroy_v2(own => Handle));
    assert_eq!((cu!(cuStreamQuery(own => Handle)), cu!(cuStreamDestroy_v2(own => Handle))), (400, 400));
    ok!(cuCtxSynchronize());
    assert_eq!(word.load(Ordering::Relaxed), 10);
}

/// `CU_EVENT_WAIT_EXTERNAL` is illegal outside of a capture, as on an H200.
#[test]
fn each_launch_of_a_graph_waits_for_events_outside_of_its_capture() {
    let _context = Context::on(0);
    let ([own, other], outside, mut exec) = ([stream(1), stream(1)], event(), 0);
    record(outside, other);
    let wait = |flags: u32| cu!(cuStreamWaitEvent(own => Handle, outside => Handle, flags => u32));
    assert_eq!([0, 1, 2].map(wait), [0, 401, INVALID_VALUE]);
    let (from, to) = (AtomicU32::new(0), upload(&[0]));
    let mut graph = 0;
    begin(own, 0);
    assert_eq!([2, 1].map(wait), [INVALID_VALUE, 0]);
    ok!(cuMemcpyHtoDAsync_v2(to => u64, from.as_ptr() => *const u32, 4 => usize, own => Handle));
    ok!(cuStreamEndCapture(own => Handle, &mut graph => *mut Handle));
    ok!(cuGraphInstantiateWithFlags(&mut exec => *mut Handle, graph => Handle, 0 => u64));
    let launch = || cu!(cuGraphLaunch(exec => Handle, own => Handle));
    for _ in 0..2 {
        from.store(5, Ordering::Release);
        assert_eq!(launch(), 0);
        ok!(cuStreamSynchronize(own => Handle));
        assert_eq!(download(to, 1), [5]);
        be_late(other, from.as_ptr());
        record(outside, other);
        assert_eq!(launch(), 0);
        ok!(cuStreamSynchronize(own => Handle));
        assert_eq!(download(to, 1), [10]);
    }
    ok!(cuEventDestroy_v2(outside => Handle));
    assert_eq!(launch(), 400);
}

/// CUDA's documentation: an operation that is not allowed ends all captures that it involves.
#[test]
fn a_forbidden_call_ends_all_captures_that_it_involves() {
    if !alone("streams::a_forbidden_call_ends_all_captures_that_it_involves") {
        return;
    }
    let _context = Context::on(0);
    let ([first, second], fork) = ([stream(1), stream(1)], event());
    let begin_both = || [first, second].iter().for_each(|stream| begin(*stream, 1));
    begin_both();
    record(fork, second);
    let merges = cu!(cuStreamWaitEvent(first => Handle, fork => Handle, 0 => u32));
    assert_eq!((merges, end(first), end(second)), (902, 901, 901));
    let calls: [&dyn Fn() -> Code; 4] = [
        &|| cu!(cuMemAlloc_v2(&mut 0 => *mut u64, 4 => usize)),
        &|| cu!(cuMemHostAlloc(&mut 0 => *mut u64, 4 => usize, 0 => u32)),
        &|| cu!(cuMemAllocHost_v2(&mut 0 => *mut u64, 4 => usize)),
        &|| cu!(cuMemAllocManaged(&mut 0 => *mut u64, 4 => usize, 1 => u32)),
    ];
    // The library does not order captures.
    for (index, call) in calls.iter().enumerate().flat_map(|call| [call; 10]) {
        begin_both();
        assert_eq!((call(), end(first), end(second)), (900, 901, 901), "call {index}");
    }
}

/// CUDA's documentation: queries of a captured stream, of an event of a capture, and of the context
/// of either, are errors that end the capture, in each mode.
#[test]
fn a_query_of_what_is_captured_ends_the_capture() {
    let _context = Context::on(0);
    let (own, inside) = (stream(1), event());
    let calls: [(&dyn Fn() -> Code, Code); 6] = [
        (&|| cu!(cuEventQuery(inside => Handle)), 907),
        (&|| cu!(cuEventSynchronize(inside => Handle)), 907),
        (&|| cu!(cuStreamQuery(own => Handle)), 900),
        (&|| cu!(cuStreamSynchronize(own => Handle)), 900),
        (&|| cu!(cuCtxSynchronize()), 900),
        (&|| cu!(cuMemsetD32Async(64 => u64, 0 => u32, 0 => usize, own => Handle)), 0),
    ];
    for (index, (call, code)) in calls.into_iter().enumerate() {
        begin(own, 2);
        record(inside, own);
        let ended = if code == 0 { 0 } else { 901 };
        assert_eq!((call(), end(own)), (code, ended), "call {index}");
    }
    // A capture that has ended so has an error of its own.
    begin(own, 2);
    let query = || cu!(cuStreamQuery(own => Handle));
    assert_eq!((query(), query(), end(own), query()), (900, 901, 901, 0));
    let blocking = stream(0);
    begin(blocking, 2);
    assert_eq!((cu!(cuCtxSynchronize()), end(blocking)), (900, 901));
}

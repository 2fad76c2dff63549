//! Faults of kernels, and arguments that are null.

use std::collections::HashSet;
use std::ffi::c_void;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use crate::cuda::*;

#[test]
fn a_fault_makes_its_context_unusable_and_no_other() {
    let other = Context::on(0);
    let module = Module::load();
    let kept = upload(&[1]);
    let failing = Context::on(0);
    let (bad, own) = (Module::load(), stream(1));
    ok!(cuStreamSynchronize(own => Handle));
    bad.add(own, [1, 1], 64, 1);
    // Whether the kernel has failed already or not, the fault shows at the next wait.
    let mut end = event();
    std::thread::sleep(std::time::Duration::from_millis(50));
    record(end, own);
    bad.add(own, [1, 1], 64, 1);
    assert_eq!(cu!(cuStreamSynchronize(own => Handle)), 700, "CUDA_ERROR_ILLEGAL_ADDRESS");
    let mut addr = 0u64;
    assert_eq!(cu!(cuMemAlloc_v2(&mut addr => *mut u64, 4 => usize)), 700);
    assert_eq!(cu!(cuEventCreate(&mut end => *mut Handle, 0 => u32)), 700);
    drop(failing);
    other.make_current();
    module.add(0, [1, 1], kept, 1);
    assert_eq!(download(kept, 1), [2]);
}

/// Has a kernel of a context fail, without a call that returns the fault.
fn fail_unnoticed(failing: &Context, bad: &Module, other: &Context, good: &Module) {
    failing.make_current();
    bad.add(0, [1, 1], 64, 1);
    other.make_current();
    // The engine runs all kernels of its device in turn, and those of older streams first. One that
    // is enqueued later and has ended has been given at least as many turns.
    for _ in 0..3 {
        good.add(0, [1, 1], upload(&[1]), 1);
        ok!(cuCtxSynchronize());
    }
    failing.make_current();
}

#[test]
fn work_of_a_context_with_an_unnoticed_fault_is_dropped_and_no_call_waits_for_it() {
    if !alone("faults::work_of_a_context_with_an_unnoticed_fault_is_dropped_and_no_call_waits_for_it") {
        return;
    }
    let failing = Context::on(0);
    let (bad, blocking, [own, side]) = (Module::load(), stream(0), [stream(1), stream(1)]);
    let [fork, join] = [event(), event()];
    let addr = upload(&[1, 1]);
    ok!(cuStreamBeginCapture_v2(own => Handle, 2 => i32));
    record(fork, own);
    wait(side, fork);
    bad.add(side, [1, 1], addr, 1);
    record(join, side);
    wait(own, join);
    let (mut graph, mut exec) = (0, 0);
    ok!(cuStreamEndCapture(own => Handle, &mut graph => *mut Handle));
    ok!(cuGraphInstantiateWithFlags(&mut exec => *mut Handle, graph => Handle, 0 => u64));
    let other = Context::on(0);
    let good = Module::load();
    let words = [0u32; 2];
    let register = || {
        ok!(cuMemHostRegister_v2(words.as_ptr() => *const u32, 8 => usize, 0 => u32));
    };
    fail_unnoticed(&failing, &bad, &other, &good);
    // In check mode the default stream has work behind this too.
    bad.add(blocking, [1, 1], addr, 1);
    bad.add(0, [1, 1], addr, 1);
    ok!(cuGraphLaunch(exec => Handle, own => Handle));
    other.make_current();
    register();
    // The call waits for the work of all contexts.
    let (ended, has_ended) = std::sync::mpsc::channel();
    let (context, at) = (other.0, words.as_ptr() as usize);
    std::thread::spawn(move || {
        ok!(cuCtxSetCurrent(context => Handle));
        ok!(cuMemHostUnregister(at => usize));
        ended.send(()).expect("the test waits");
    });
    has_ended.recv_timeout(std::time::Duration::from_secs(60)).expect("the call returns");
    failing.make_current();
    assert_eq!(cu!(cuCtxSynchronize()), 700);
}

unsafe extern "C" fn send_code(_stream: Handle, code: Code, data: *mut c_void) {
    // SAFETY: the test passes a box of its own to each callback, which is called once.
    let (number, sender) = *unsafe { Box::from_raw(data.cast::<(u32, Sender<(u32, Code)>)>()) };
    sender.send((number, code)).expect("the test waits");
}

unsafe extern "C" fn hold(_stream: Handle, _code: Code, data: *mut c_void) {
    // SAFETY: the test passes a box to this one callback, which is called once.
    let release = *unsafe { Box::from_raw(data.cast::<Receiver<()>>()) };
    release.recv_timeout(Duration::from_secs(60)).expect("the test releases the stream");
}

/// CUDA's documentation: a callback is called exactly once, with the code of an earlier fault. An
/// H200 does not take one that is added behind the fault.
#[test]
fn callbacks_of_a_context_that_failed_are_called_with_its_code() {
    let _context = Context::on(0);
    let (bad, own) = (Module::load(), stream(1));
    let (sender, codes) = std::sync::mpsc::channel::<(u32, Code)>();
    let add_callback = |number: u32| {
        let data = Box::into_raw(Box::new((number, sender.clone())));
        ok!(cuStreamAddCallback(
            own => Handle, send_code => unsafe extern "C" fn(Handle, Code, *mut c_void),
            data.cast() => *mut c_void, 0 => u32,
        ));
    };
    let next = || codes.recv_timeout(Duration::from_secs(60)).expect("the callback is called");
    add_callback(0);
    assert_eq!(next(), (0, 0));
    // The kernel runs once all callbacks are behind it.
    let (release, held) = std::sync::mpsc::channel::<()>();
    ok!(cuStreamAddCallback(
        own => Handle, hold => unsafe extern "C" fn(Handle, Code, *mut c_void),
        Box::into_raw(Box::new(held)).cast() => *mut c_void, 0 => u32,
    ));
    bad.add(own, [1, 1], 64, 1);
    (1..4).for_each(add_callback);
    release.send(()).expect("the stream waits");
    (1..4).for_each(|number| assert_eq!(next(), (number, 700), "CUDA_ERROR_ILLEGAL_ADDRESS"));
    // The context has failed, and no call has returned the fault yet. The callback is not called:
    // its data would be null.
    let adds = cu!(cuStreamAddCallback(
        own => Handle, send_code => unsafe extern "C" fn(Handle, Code, *mut c_void),
        std::ptr::null_mut() => *mut c_void, 0 => u32,
    ));
    assert_eq!(adds, 700);
    assert_eq!(cu!(cuStreamSynchronize(own => Handle)), 700);
}

#[test]
fn functions_that_are_not_supported_say_so() {
    assert_eq!(
        cu!(cuArrayCreate_v2(std::ptr::null_mut() => *mut Handle, std::ptr::null() => *const u8)),
        801
    );
}

/// Set in a process that a test starts to run the rest of itself.
const CHILD: &str = "EPOXIDE_TEST_ROLE";

#[test]
fn null_arguments_are_errors_and_never_crash() {
    if std::env::var_os(CHILD).is_some() {
        return call_everything_with_nulls();
    }
    let program = std::env::current_exe().expect("this program has a path");
    let child = Command::new(program)
        .args(["faults::null_arguments_are_errors_and_never_crash", "--exact", "--nocapture"])
        .env(CHILD, "nulls")
        .output()
        .expect("the program starts again");
    let (out, report) = (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    assert!(child.status.success() && out.contains("1 passed"), "{}: {out}\n{report}", child.status);
    // Each unsupported function is reported at its first call alone.
    let lines: Vec<&str> = report.lines().filter(|line| line.ends_with("is not supported")).collect();
    let names: HashSet<&str> = lines.iter().copied().collect();
    assert!(lines.len() > 200 && names.len() == lines.len(), "{report}");
}

/// A kernel that counts a number of turns down.
const COUNTS: &str = ".version 8.4 .target sm_90 .address_size 64
    .visible .entry count_down(.param .u32 turns) {
        .reg .b32 %r<2>; .reg .pred %p<1>;
        ld.param.u32 %r0, [turns];
    TURN:
        sub.u32 %r0, %r0, 1; setp.ne.u32 %p0, %r0, 0; @%p0 bra TURN;
        ret;
    }";

#[test]
fn kernels_that_only_wait_end_after_the_time_that_is_set() {
    if std::env::var_os(CHILD).is_some() {
        let _context = Context::on(0);
        Module::load().launch_at("wait", 0, [1, 1], upload(&[0, 0]));
        assert_eq!(cu!(cuCtxSynchronize()), 702, "CUDA_ERROR_LAUNCH_TIMEOUT");
        return;
    }
    let program = std::env::current_exe().expect("this program has a path");
    let child = Command::new(program)
        .args(["faults::kernels_that_only_wait_end_after_the_time_that_is_set", "--exact", "--nocapture"])
        .envs([(CHILD, "waits"), ("EPOXIDE_VGPU_STUCK_SECONDS", "1")])
        .output()
        .expect("the program starts again");
    let report = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && report.contains("kernel 'wait': 1 groups of lanes"), "{report}");
    assert!(report.contains("spins on") && report.contains("EPOXIDE_VGPU_STUCK_SECONDS"), "{report}");
}

/// Stores 10 in the word at `data` after more than the time for which kernels may only wait.
unsafe extern "C" fn very_late_ten(data: *mut c_void) {
    std::thread::sleep(Duration::from_millis(2500));
    // SAFETY: the test passes an aligned word that outlives the stream's work.
    unsafe { AtomicU32::from_ptr(data.cast()) }.store(10, Ordering::Release);
}

#[test]
fn a_kernel_waits_for_a_host_function_of_another_device() {
    if std::env::var_os(CHILD).is_some() {
        let (other, own) = (Context::on(1), Context::on(0));
        let mut words = 0u64;
        ok!(cuMemHostAlloc(&mut words => *mut u64, 8 => usize, 1 => u32));
        Module::load().launch_at("wait", 0, [1, 1], words);
        other.make_current();
        let host = stream(1);
        let word = (words + 4) as *mut c_void;
        ok!(cuLaunchHostFunc(
            host => Handle, very_late_ten => unsafe extern "C" fn(*mut c_void), word => *mut c_void,
        ));
        own.make_current();
        ok!(cuCtxSynchronize());
        // SAFETY: host memory of this test.
        assert_eq!(unsafe { (words as *const u32).read() }, 10);
        return;
    }
    let program = std::env::current_exe().expect("this program has a path");
    let child = Command::new(program)
        .args(["faults::a_kernel_waits_for_a_host_function_of_another_device", "--exact", "--nocapture"])
        .envs([(CHILD, "waits"), ("EPOXIDE_VGPU_STUCK_SECONDS", "1"), ("EPOXIDE_VGPU_DEVICES", "2")])
        .output()
        .expect("the program starts again");
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
}

/// The limit of check mode can be set and lifted, and the report says how.
#[test]
fn the_limit_of_warp_instructions_is_set() {
    if let Some(limit) = std::env::var_os(CHILD) {
        let _context = Context::on(0);
        let mut turns = 100_000u32;
        let mut params = [(&raw mut turns).cast()];
        assert_eq!(Module::of(COUNTS).try_launch("count_down", 0, [1, 32], &mut params), 0);
        let code = if limit == "1000" { 702 } else { 0 };
        assert_eq!(cu!(cuCtxSynchronize()), code, "CUDA_ERROR_LAUNCH_TIMEOUT");
        return;
    }
    let program = std::env::current_exe().expect("this program has a path");
    for check in ["0", "1"] {
        for limit in ["", "0", "1000", "10000000"] {
            let child = Command::new(&program)
                .args(["faults::the_limit_of_warp_instructions_is_set", "--exact", "--nocapture"])
                .envs([(CHILD, limit), ("EPOXIDE_VGPU_STEPS", limit), ("EPOXIDE_VGPU_CHECK", check)])
                .output()
                .expect("the program starts again");
            let report = String::from_utf8_lossy(&child.stderr);
            assert!(child.status.success(), "limit {limit:?}: {report}");
            let remedy = "EPOXIDE_VGPU_STEPS sets the limit, 0 lifts it";
            assert_eq!(report.contains("livelock"), limit == "1000", "limit {limit:?}: {report}");
            assert_eq!(report.contains(remedy), limit == "1000", "limit {limit:?}: {report}");
            assert!(!report.contains("the device's livelock limit"), "limit {limit:?}: {report}");
        }
    }
}

#[test]
fn a_first_launch_waits_where_code_is_loaded_lazily() {
    if std::env::var_os(CHILD).is_some() {
        let _context = Context::on(0);
        let (module, [waits, adds]) = (Module::load(), [stream(1), stream(1)]);
        let addr = upload(&[0, 0]);
        for name in ["wait", "add"] {
            ok!(cuFuncLoad(module.function(name) => Handle));
        }
        module.launch_at("wait", waits, [1, 1], addr);
        module.add(adds, [1, 1], addr + 4, 1);
        ok!(cuCtxSynchronize());
        // The same by another module, whose `add` is not loaded: it waits for a kernel that waits.
        let other = Module::load();
        let addr = upload(&[0, 0]);
        other.launch_at("wait", waits, [1, 1], addr);
        let (mut at, mut value) = (addr + 4, 1u32);
        let mut params = [(&raw mut at).cast(), (&raw mut value).cast()];
        assert_eq!(other.try_launch("add", adds, [1, 1], &mut params), 702, "CUDA_ERROR_LAUNCH_TIMEOUT");
        return;
    }
    let program = std::env::current_exe().expect("this program has a path");
    let child = Command::new(program)
        .args(["faults::a_first_launch_waits_where_code_is_loaded_lazily", "--exact", "--nocapture"])
        .envs([(CHILD, "lazily"), ("EPOXIDE_VGPU_STUCK_SECONDS", "1"), ("CUDA_MODULE_LOADING", "LAZY")])
        .output()
        .expect("the program starts again");
    let report = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && report.contains("kernel 'wait': 1 groups of lanes"), "{report}");
}

/// Tests whose words are not ordered by the memory model: a fill sets the flag that a kernel polls.
const RACES: [&str; 3] = [
    "streams::a_kernel_may_wait_for_work_of_another_stream",
    "streams::events_order_streams_and_measure_time",
    "streams::the_default_stream_waits_for_blocking_streams_and_they_for_it",
];

#[test]
fn check_mode_reports_the_tests_with_races_and_no_others() {
    let program = std::env::current_exe().expect("this program has a path");
    let child = Command::new(program)
        .args(["check_mode", "null_arguments", "a_first_launch"].map(|name| format!("--skip=faults::{name}")))
        .arg("--skip=program::")
        .env("EPOXIDE_VGPU_CHECK", "1")
        .output()
        .expect("the program starts again");
    let out = String::from_utf8_lossy(&child.stdout);
    let mut failed: Vec<&str> =
        out.lines().filter_map(|line| line.strip_prefix("test ")?.strip_suffix(" ... FAILED")).collect();
    failed.sort_unstable();
    assert_eq!(failed, RACES, "{out}\n{}", String::from_utf8_lossy(&child.stderr));
}

fn call_everything_with_nulls() {
    type Function = unsafe extern "C" fn(
        usize,
        usize,
        usize,
        usize,
        usize,
        usize,
        usize,
        usize,
        usize,
        usize,
        usize,
        usize,
    ) -> Code;
    let mut called = 0;
    for with_context in [false, true] {
        let context = with_context.then(|| Context::on(0));
        for name in epoxide_vgpu_cuda::names() {
            // SAFETY: all arguments are zeros, which each function takes as nulls, numbers or
            // handles. C ignores those that are too many.
            unsafe {
                let function = library().get::<Function>(name.as_bytes()).expect(name);
                function(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
            }
            called += 1;
            if let Some(context) = &context {
                // Some remove the current context.
                context.make_current();
            }
        }
    }
    assert!(called > 600, "{called}");
}

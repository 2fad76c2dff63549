//! Codes of calls around captures and of other cases that CUDA's documentation leaves open,
//! compared with those of an H200. One program makes both: over NVIDIA's driver it records, and
//! here it compares. Recorded on 2026-11-30 with driver 580.159.04. On a machine with two GPUs this
//! program records `codes_h200.tsv` in the current folder:
//! `driver --ignored --exact codes::record_codes`.

use std::ffi::{CStr, CString, c_void};
use std::io::Error;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use crate::cuda::*;
use crate::launch;
use crate::sharing::{Access, properties};
use crate::streams::{begin, end};

/// Lines that differ: name, the codes here, and why.
const ACCEPTED: &[(&str, &str, &str)] = &[
    ("attribute of a kernel on another device", "801", ON_DEVICE),
    ("PTX of version 9.9", "222 222", AT_LOAD),
    ("PTX with an error of version 9.9", "222 222", AT_LOAD),
    ("PTX of version 99.0", "222 222", AT_LOAD),
    ("PTX with an error of version 99.0", "222 222", AT_LOAD),
    ("cuGetProcAddress_v2: cuLaunchHostFunc of 9000", "0 1 0", FIRST),
    ("cuGetProcAddress: cuLaunchHostFunc of 9000", "0 1", FIRST),
    ("attribute 11 of a launch is 1", "801", PREFERRED),
    ("attribute 11 of a launch is 2", "801", PREFERRED),
];
const ON_DEVICE: &str = "kernels have attributes on the device of the current context alone";
const AT_LOAD: &str = "errors of a library's PTX show at its load, and not at its first use";
const FIRST: &str = "first versions are known for functions with a suffix alone";
const PREFERRED: &str = "preferred clusters are not supported";

const MODES: [&str; 3] = ["global", "thread-local", "relaxed"];

/// `add` of [`PTX`], for one thread, and `bad`, which stores at address 16.
const KERNELS: &str = "\
.version 7.8
.target sm_90
.address_size 64
.visible .entry add(.param .u64 at, .param .u32 value)
{
.reg .b64 %a;
.reg .b32 %word, %value;
ld.param.u64 %a, [at];
ld.param.u32 %value, [value];
ld.global.u32 %word, [%a];
add.u32 %word, %word, %value;
st.global.u32 [%a], %word;
ret;
}
.visible .entry bad()
{
.reg .b64 %a;
mov.u64 %a, 16;
st.global.u64 [%a], %a;
ret;
}
";

/// The streams, events and memory of a case around a capture, made in front of it.
struct Parts {
    /// The stream that is captured, and another one.
    own: Handle,
    other: Handle,
    /// An event for records in the capture, and one that another stream has passed.
    inside: Handle,
    outside: Handle,
    at: u64,
}

/// A case of one mode: its name, the flags of its streams, and the codes of its calls.
type InCapture<'a> = (&'a str, u32, &'a dyn Fn(&Parts) -> Vec<Code>);

fn is_captured(stream: Handle) -> bool {
    let mut state = 0;
    ok!(cuStreamIsCapturing(stream => Handle, &mut state => *mut i32));
    state != 0
}

fn wait_flags(stream: Handle, event: Handle, flags: u32) -> Code {
    cu!(cuStreamWaitEvent(stream => Handle, event => Handle, flags => u32))
}

fn fill(stream: Handle, at: u64) -> Code {
    cu!(cuMemsetD32Async(at => u64, 1 => u32, 1 => usize, stream => Handle))
}

fn to_device(at: u64, word: &u32) -> Code {
    cu!(cuMemcpyHtoD_v2(at => u64, &raw const *word => *const u32, 4 => usize))
}

/// The codes of cases around a capture, with that of its end.
fn around_captures(mode: i32, lines: &mut String) {
    let ptx = CString::new(KERNELS).unwrap();
    let folder = tempfile::Builder::new().prefix("libcuda").tempdir().unwrap();
    let path = folder.path().join("kernels.ptx");
    std::fs::write(&path, KERNELS).unwrap();
    let path = CString::new(path.to_str().unwrap()).unwrap();
    let alloc = || cu!(cuMemAlloc_v2(&mut 0 => *mut u64, 64 => usize));
    let query = |stream: Handle| cu!(cuStreamQuery(stream => Handle));
    let synchronise = |stream: Handle| cu!(cuStreamSynchronize(stream => Handle));
    let stream_0_waits = |p: &Parts| {
        record(p.inside, p.own);
        vec![wait_flags(0, p.inside, 0)]
    };
    let copies: [InCapture<'_>; 5] = [
        ("copy to the device", 0, &|p| vec![to_device(p.at, &7)]),
        ("copy from the device", 0, &|p| {
            vec![cu!(cuMemcpyDtoH_v2(&mut 0 => *mut u32, p.at => u64, 4 => usize))]
        }),
        ("copy within the device", 0, &|p| {
            vec![cu!(cuMemcpyDtoD_v2(p.at => u64, p.at + 64 => u64, 4 => usize))]
        }),
        ("fill", 0, &|p| vec![cu!(cuMemsetD32_v2(p.at => u64, 1 => u32, 1 => usize))]),
        ("asynchronous fill of stream 0", 0, &|p| vec![fill(0, p.at)]),
    ];
    let with_flags = |flags| copies.into_iter().map(move |(name, _, call)| (name, flags, call));
    let cases: [InCapture<'_>; 28] = [
        ("state of stream 0", 0, &|_| {
            let mut state = -1;
            vec![cu!(cuStreamIsCapturing(0 => Handle, &mut state => *mut i32)), state]
        }),
        ("query of stream 0", 0, &|_| vec![query(0)]),
        ("wait for stream 0", 0, &|_| vec![synchronise(0)]),
        ("stream 0 waits for an event of the capture", 0, &stream_0_waits),
        ("stream 0 waits for an event of the capture", 1, &stream_0_waits),
        ("merge of two captures", 1, &|p| {
            begin(p.other, mode);
            record(p.inside, p.other);
            vec![wait_flags(p.own, p.inside, 0)]
        }),
        ("cuMemAlloc beside two captures", 1, &|p| {
            begin(p.other, mode);
            vec![alloc()]
        }),
        ("cuMemHostAlloc", 1, &|_| vec![cu!(cuMemHostAlloc(&mut 0 => *mut u64, 64 => usize, 0 => u32))]),
        ("cuMemAllocHost", 1, &|_| vec![cu!(cuMemAllocHost_v2(&mut 0 => *mut u64, 64 => usize))]),
        ("cuMemAllocManaged", 1, &|_| {
            vec![cu!(cuMemAllocManaged(&mut 0 => *mut u64, 64 => usize, 1 => u32))]
        }),
        ("cuCtxSynchronize", 1, &|_| vec![cu!(cuCtxSynchronize())]),
        ("query of its stream, then a fill", 1, &|p| vec![query(p.own), fill(p.own, p.at)]),
        ("wait for its stream, then a fill", 1, &|p| vec![synchronise(p.own), fill(p.own, p.at)]),
        ("query of its event, then a fill", 1, &|p| {
            record(p.inside, p.own);
            vec![cu!(cuEventQuery(p.inside => Handle)), fill(p.own, p.at)]
        }),
        ("wait for its event", 1, &|p| {
            record(p.inside, p.own);
            vec![cu!(cuEventSynchronize(p.inside => Handle))]
        }),
        ("query of another event", 1, &|p| vec![cu!(cuEventQuery(p.outside => Handle))]),
        ("query of another stream", 1, &|p| vec![query(p.other)]),
        ("cuModuleLoad", 1, &|_| vec![cu!(cuModuleLoad(&mut 0 => *mut Handle, path.as_ptr() => *const i8))]),
        ("cuModuleLoadData", 1, &|_| {
            vec![cu!(cuModuleLoadData(&mut 0 => *mut Handle, ptx.as_ptr() => *const i8))]
        }),
        ("cuLibraryLoadData", 1, &|_| vec![load_library(&ptx).0]),
        ("its stream waits for another event", 1, &|p| vec![wait_flags(p.own, p.outside, 0)]),
        ("external wait", 1, &|p| vec![wait_flags(p.own, p.outside, 1)]),
        ("external wait for an event that was never recorded", 1, &|p| vec![wait_flags(p.own, p.inside, 1)]),
        ("external wait for its own event", 1, &|p| {
            record(p.inside, p.own);
            vec![wait_flags(p.own, p.inside, 1)]
        }),
        ("wait with flag 2", 1, &|p| vec![wait_flags(p.own, p.outside, 2)]),
        ("cuStreamAddCallback", 1, &|p| vec![add_callback(p.own, std::ptr::null_mut())]),
        ("cuMemFree", 1, &|p| vec![cu!(cuMemFree_v2(p.at => u64))]),
        ("cuEventCreate", 1, &|_| vec![cu!(cuEventCreate(&mut 0 => *mut Handle, 2 => u32))]),
    ];
    for (name, flags, call) in with_flags(0).chain(with_flags(1)).chain(cases) {
        let _context = Context::on(0);
        let no_timing = || {
            let mut event = 0;
            ok!(cuEventCreate(&mut event => *mut Handle, 2 => u32));
            event
        };
        let [own, other] = [stream(flags), stream(flags)];
        let parts = Parts { own, other, inside: no_timing(), outside: no_timing(), at: upload(&[0; 1024]) };
        record(parts.outside, other);
        ok!(cuCtxSynchronize());
        begin(own, mode);
        let mut codes = call(&parts);
        codes.push(end(own));
        if is_captured(other) {
            codes.push(end(other));
        }
        let kind = ["blocking", "non-blocking"][flags as usize];
        put(lines, &format!("{} capture, {kind}: {name}", MODES[mode as usize]), &codes);
    }
}

/// Adds a line.
fn put(lines: &mut String, name: &str, codes: &[Code]) {
    let codes: Vec<String> = codes.iter().map(Code::to_string).collect();
    *lines += &format!("{name}\t{}\n", codes.join(" "));
}

fn load_library(ptx: &CStr) -> (Code, Handle) {
    let (mut library, none) = (0, std::ptr::null::<c_void>());
    let code = cu!(cuLibraryLoadData(
        &mut library => *mut Handle, ptx.as_ptr() => *const i8, none => *const c_void, none => *const c_void,
        0 => u32, none => *const c_void, none => *const c_void, 0 => u32,
    ));
    (code, library)
}

unsafe extern "C" fn send_code(_stream: Handle, code: Code, data: *mut c_void) {
    // SAFETY: null, or a sender that outlives the program, since it is leaked.
    if let Some(sender) = unsafe { data.cast::<Sender<Code>>().as_ref() } {
        let _ = sender.send(code);
    }
}

fn add_callback(stream: Handle, data: *mut c_void) -> Code {
    cu!(cuStreamAddCallback(
        stream => Handle, send_code => unsafe extern "C" fn(Handle, Code, *mut c_void), data => *mut c_void, 0 => u32,
    ))
}

/// Waits with `CU_EVENT_WAIT_EXTERNAL`, and a graph with one.
fn external_waits(lines: &mut String) {
    let _context = Context::on(0);
    let ([own, other], outside, late) = ([stream(1), stream(1)], event(), AtomicU32::new(0));
    record(outside, other);
    put(
        lines,
        "wait outside of a capture with flag 1 and 2",
        &[1, 2].map(|flags| wait_flags(own, outside, flags)),
    );
    begin(own, 0);
    let waits = wait_flags(own, outside, 1);
    let (mut graph, mut exec) = (0, 0);
    let ends = cu!(cuStreamEndCapture(own => Handle, &mut graph => *mut Handle));
    let made = cu!(cuGraphInstantiateWithFlags(&mut exec => *mut Handle, graph => Handle, 0 => u64));
    // The graph waits for the last record before its launch.
    be_late(other, late.as_ptr());
    record(outside, other);
    let launches = cu!(cuGraphLaunch(exec => Handle, own => Handle));
    let synchronises = cu!(cuStreamSynchronize(own => Handle));
    let word = late.load(Ordering::Acquire) as Code;
    put(lines, "graph with an external wait", &[waits, ends, made, launches, synchronises, word]);
    ok!(cuCtxSynchronize());
}

fn looked_up_functions(lines: &mut String) {
    let names = [
        (c"cuNoSuchThing", 12000),
        (c"cuMemAlloc", 1000),
        (c"cuMemAlloc", 2000),
        (c"cuMemAlloc", 13000),
        (c"cuMemAlloc", 99000),
        (c"cuNoSuchThing", 99000),
        (c"cuMemAlloc_v2", 2000),
        (c"cuMemAlloc_v2", 12000),
        (c"cuCtxSynchronize_v2", 12000),
        (c"cuCtxSynchronize_v2", 13000),
        (c"cuCtxCreate_v4", 11000),
        (c"cuCtxCreate_v4", 13000),
        (c"cuGetProcAddress_v2", 12000),
        (c"cuLaunchHostFunc", 9000),
        (c"cuLaunchHostFunc", 10000),
    ];
    for (name, version) in names {
        let (mut addr, mut status) = (64usize, -1);
        let code = cu!(cuGetProcAddress_v2(
            name.as_ptr() => *const i8, &mut addr => *mut usize, version => i32, 0 => u64, &mut status => *mut i32,
        ));
        let found = if addr > 64 { 1 } else { addr as Code };
        let line = format!("cuGetProcAddress_v2: {} of {version}", name.to_str().unwrap());
        put(lines, &line, &[code, found, status]);
        let mut addr = 64usize;
        let code = cu!(cuGetProcAddress(
            name.as_ptr() => *const i8, &mut addr => *mut usize, version => i32, 0 => u64,
        ));
        let found = if addr > 64 { 1 } else { addr as Code };
        put(lines, &line.replace("_v2:", ":"), &[code, found]);
    }
}

/// What copies and fills that do not wait, or wait, leave where a host function is late.
fn late_functions(lines: &mut String) {
    let _context = Context::on(0);
    let (at, own) = (upload(&[0]), stream(0));
    for (name, stream) in [("stream 0", 0), ("a blocking stream", own)] {
        let mut word = 0u32;
        be_late(stream, &raw mut word);
        ok!(cuMemcpyHtoD_v2(at => u64, &raw const word => *const u32, 4 => usize));
        let name = format!("copy of pageable memory behind a late function of {name}");
        put(lines, &name, &[download(at, 1)[0] as Code]);
        ok!(cuCtxSynchronize());
    }
    let memory = |is_managed: bool| {
        let mut at = 0u64;
        match is_managed {
            true => ok!(cuMemAllocManaged(&mut at => *mut u64, 64 => usize, 1 => u32)),
            false => ok!(cuMemHostAlloc(&mut at => *mut u64, 64 => usize, 0 => u32)),
        }
        // SAFETY: the host accesses such memory at the same address, and it lives as its context.
        (at, unsafe { AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(at as usize)) })
    };
    let [(locked, to), (source, from), (managed, both)] = [false, false, true].map(memory);
    for (name, at, word) in [("page-locked", locked, to), ("managed", managed, both)] {
        word.store(1, Ordering::Release);
        be_late(0, std::ptr::null_mut());
        ok!(cuMemsetD32_v2(at => u64, 7 => u32, 1 => usize));
        // The host may access managed memory once kernels have ended.
        if at == managed {
            ok!(cuStreamSynchronize(0 => Handle));
        }
        put(
            lines,
            &format!("fill of {name} memory behind a late function"),
            &[word.load(Ordering::Acquire) as Code],
        );
        ok!(cuStreamSynchronize(0 => Handle));
    }
    from.store(5, Ordering::Release);
    be_late(0, std::ptr::null_mut());
    ok!(cuMemcpyAsync(locked => u64, source => u64, 4 => usize, 0 => Handle));
    let name = "cuMemcpyAsync between page-locked memory behind a late function";
    put(lines, name, &[to.load(Ordering::Acquire) as Code]);
    be_late(own, std::ptr::null_mut());
    put(lines, "cuStreamDestroy with work", &[cu!(cuStreamDestroy_v2(own => Handle))]);
    ok!(cuCtxSynchronize());
}

fn copies_between_contexts(lines: &mut String) {
    let first = Context::on(0);
    let (module, x) = (Module::of(KERNELS), upload(&[5]));
    let second = Context::on(1);
    let y = upload(&[0]);
    let copy = || cu!(cuMemcpyPeer(y => u64, second.0 => Handle, x => u64, first.0 => Handle, 4 => usize));
    let add = || {
        first.make_current();
        module.add(0, [1, 1], x, 1);
        second.make_current();
    };
    first.make_current();
    be_late(0, std::ptr::null_mut());
    add();
    put(lines, "cuMemcpyPeer behind work of its source", &[copy(), download(y, 1)[0] as Code]);
    be_late(0, std::ptr::null_mut());
    let code = copy();
    add();
    put(lines, "cuMemcpyPeer in front of work of its source", &[code, download(y, 1)[0] as Code]);
    ok!(cuCtxSynchronize());
}

fn access_of_memory(lines: &mut String) {
    let _context = Context::on(0);
    let (handle_types, access_flags) = (14, 16);
    let attribute = |attribute: i32, at: u64| {
        let mut value = 0u64;
        let code = cu!(cuPointerGetAttribute(&mut value => *mut u64, attribute => i32, at => u64));
        [code, value as Code]
    };
    let access = |at: u64| {
        let mut flags = 7u64;
        let code = cu!(cuMemGetAccess(&mut flags => *mut u64, &[1, 0] => *const [i32; 2], at => u64));
        [code, flags as Code]
    };
    let set = |at: u64, unit: usize, flags: i32| {
        let access = Access { location: [1, 0], flags };
        cu!(cuMemSetAccess(at => u64, unit => usize, &access => *const Access, 1 => usize))
    };
    let (mut unit, properties) = (0usize, properties(0));
    ok!(cuMemGetAllocationGranularity(&mut unit => *mut usize, &properties => *const _, 0 => i32));
    let (mut at, mut handle) = (0u64, 0u64);
    ok!(cuMemCreate(&mut handle => *mut u64, unit => usize, &properties => *const _, 0 => u64));
    ok!(cuMemAddressReserve(&mut at => *mut u64, unit => usize, 0 => usize, 0 => u64, 0 => u64));
    ok!(cuMemMap(at => u64, unit => usize, 0 => usize, handle => u64, 0 => u64));
    put(lines, "mapping: handle types", &attribute(handle_types, at));
    put(lines, "mapping: access", &[attribute(access_flags, at), access(at)].concat());
    for flags in [3, 1, 0, 2] {
        let codes = [&[set(at, unit, flags)], &attribute(access_flags, at)[..], &access(at)].concat();
        put(lines, &format!("mapping: access {flags} is set"), &codes);
    }
    let release = || cu!(cuMemRelease(handle => u64));
    put(lines, "mapping: release twice", &[release(), release()]);
    let fills = |at: u64| cu!(cuMemsetD32_v2(at => u64, 1 => u32, 1 => usize));
    put(lines, "mapping: access and fill behind the release", &[set(at, unit, 3), fills(at)]);
    put(lines, "mapping: unmap", &[cu!(cuMemUnmap(at => u64, unit => usize))]);
    let (device, mut locked) = (alloc(16), 0u64);
    ok!(cuMemHostAlloc(&mut locked => *mut u64, 64 => usize, 0 => u32));
    for (name, at) in [("cuMemAlloc", device), ("cuMemHostAlloc", locked)] {
        put(lines, &format!("memory of {name}: handle types"), &attribute(handle_types, at));
        put(lines, &format!("memory of {name}: access"), &[attribute(access_flags, at), access(at)].concat());
    }
}

fn libraries_and_versions(lines: &mut String) {
    let context = Context::on(0);
    let ptx = CString::new(KERNELS).unwrap();
    let (loads, library) = load_library(&ptx);
    let (mut kernel, mut count) = (0, 0u32);
    let mut find = |name: &CStr| cu!(cuLibraryGetKernel(&mut kernel => *mut Handle, library => Handle, name.as_ptr() => *const i8));
    ok!(cuCtxSetCurrent(0 => Handle));
    let finds = find(c"add");
    let counts = cu!(cuLibraryGetKernelCount(&mut count => *mut u32, library => Handle));
    context.make_current();
    put(lines, "library without a context", &[loads, finds, counts]);
    put(lines, "kernel that a library lacks", &[find(c"no_such_kernel")]);
    ok!(cuLibraryGetKernel(&mut kernel => *mut Handle, library => Handle, c"add".as_ptr() => *const i8));
    let sets = cu!(cuKernelSetAttribute(8 => i32, 100 << 10 => i32, kernel => Handle, 1 => i32));
    put(lines, "attribute of a kernel on another device", &[sets]);
    for version in ["9.9", "99.0"] {
        let (_, rest) = KERNELS.split_once(".version").unwrap();
        let (_, rest) = rest.split_once('\n').unwrap();
        for (what, rest) in [("PTX", rest), ("PTX with an error", ".target nothing")] {
            let text = CString::new(format!(".version {version}\n{rest}")).unwrap();
            let loads = cu!(cuModuleLoadData(&mut 0 => *mut Handle, text.as_ptr() => *const i8));
            put(lines, &format!("{what} of version {version}"), &[loads, load_library(&text).0]);
        }
    }
}

fn attributes_of_launches(lines: &mut String) {
    let _context = Context::on(0);
    let (module, own) = (Module::of(KERNELS), stream(1));
    let at = upload(&[0]);
    let function = module.function("add");
    for (id, value) in [1, 8, 10, 11, 14, 15].map(|id| (id, 0)).into_iter().chain([(11, 1), (11, 2), (15, 1)])
    {
        let mut values = [0; 16];
        values[..3].copy_from_slice(&if id == 11 && value > 0 { [value, 1, 1] } else { [value, 0, 0] });
        let launches = launch::with_attribute(function, own, (id, values), (at, 1));
        put(lines, &format!("attribute {id} of a launch is {value}"), &[launches]);
    }
    ok!(cuCtxSynchronize());
}

/// The codes of calls in a forked process, which cannot use the driver.
fn child(lines: &mut String) {
    let library = library();
    // SAFETY: the functions have these signatures.
    let (init, count) = unsafe {
        (
            *library.get::<unsafe extern "C" fn(u32) -> Code>(b"cuInit").unwrap(),
            *library.get::<unsafe extern "C" fn(*mut i32) -> Code>(b"cuDeviceGetCount").unwrap(),
        )
    };
    let mut command = Command::new("true");
    let calls = move || {
        // SAFETY: the types are those of the driver API.
        let (init, count) = unsafe { (init(0), count(&mut 0)) };
        // The parent gets the error with its number.
        Err(Error::from_raw_os_error(1000 + 10 * init + count))
    };
    // SAFETY: the closure makes the two calls alone. They return before they allocate or take a
    // lock that another thread may have had.
    unsafe { command.pre_exec(calls) };
    let codes = command.spawn().unwrap_err().raw_os_error().unwrap() - 1000;
    put(lines, "forked process: cuInit and cuDeviceGetCount", &[codes / 10, codes % 10]);
}

/// Callbacks that are added in front of a fault and behind it. A GPU is not usable any more then.
fn callbacks_and_a_fault(lines: &mut String) {
    let context = Context::on(0);
    let (module, own) = (Module::of(KERNELS), stream(1));
    let (sender, codes) = channel::<Code>();
    let sender = Box::into_raw(Box::new(sender)).cast();
    be_late(own, std::ptr::null_mut());
    assert_eq!(module.try_launch("bad", own, [1, 1], &mut []), 0);
    let adds = add_callback(own, sender);
    let called = codes.recv_timeout(Duration::from_secs(60)).unwrap_or(-1);
    put(lines, "callback in front of a fault", &[adds, called]);
    let adds = add_callback(own, sender);
    let longest = if adds == 0 { Duration::from_secs(60) } else { Duration::from_millis(100) };
    put(lines, "callback behind a fault", &[adds, codes.recv_timeout(longest).unwrap_or(-1)]);
    put(lines, "wait behind a fault", &[cu!(cuStreamSynchronize(own => Handle))]);
    std::mem::forget(context);
}

/// The lines of a record: a name, a tab, and codes or results.
fn lines() -> String {
    let mut lines = String::new();
    (0..3).for_each(|mode| around_captures(mode, &mut lines));
    external_waits(&mut lines);
    looked_up_functions(&mut lines);
    late_functions(&mut lines);
    copies_between_contexts(&mut lines);
    access_of_memory(&mut lines);
    libraries_and_versions(&mut lines);
    attributes_of_launches(&mut lines);
    child(&mut lines);
    callbacks_and_a_fault(&mut lines);
    lines
}

#[test]
fn codes_are_those_of_an_h200() {
    // A global capture also forbids calls of other tests' threads.
    if !alone("codes::codes_are_those_of_an_h200") {
        return;
    }
    let (here, there) = (lines(), include_str!("codes_h200.tsv"));
    assert_eq!(here.lines().count(), there.lines().count());
    let accepted: Vec<String> =
        ACCEPTED.iter().map(|(name, codes, reason)| format!("{name}\t{codes} ({reason})")).collect();
    let mut differ = vec![];
    for (here, there) in here.lines().zip(there.lines()) {
        let is_accepted = accepted.iter().any(|line| line.starts_with(&format!("{here} (")));
        // A difference that is gone is to be taken out of the list.
        if is_accepted == (here == there) {
            differ.push(format!("{here}\n  H200: {there}"));
        }
    }
    assert!(differ.is_empty(), "{} lines differ\n{}", differ.len(), differ.join("\n"));
}

#[test]
#[ignore = "records the codes of this machine's driver"]
fn record_codes() {
    OTHER_LIBRARY.set("libcuda.so.1".into()).expect("runs by itself");
    std::fs::write("codes_h200.tsv", lines()).unwrap();
}

//! Multicast objects. These calls go to virtual GPUs alone: on hardware they change what GPUs
//! share.

use std::ffi::c_void;

use crate::cuda::*;
use crate::sharing::{Access, MIB, Properties, properties};

/// The unit of everything here.
const UNIT: usize = 2 * MIB;
const INVALID_DEVICE: Code = 101;
const ILLEGAL_ADDRESS: Code = 700;

/// `CUmulticastObjectProp`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Team {
    devices: u32,
    size: usize,
    handle_types: u64,
    flags: u64,
}

const TEAM: Team = Team { devices: 2, size: 2 * UNIT, handle_types: 1, flags: 0 };

/// `sum` stores the sums of 32 words of all devices behind their multicast addresses, `write`
/// stores there, `flag` adds 1 to the first, and `read` reads it by an ordinary load.
const PTX: &str = "
.version 8.1
.target sm_90
.address_size 64
.visible .entry sum(.param .u64 all, .param .u64 to)
{
.reg .b32 %r<3>;
.reg .b64 %rd<4>;
ld.param.u64 %rd1, [all];
ld.param.u64 %rd2, [to];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd3, %r1, 4;
add.s64 %rd1, %rd1, %rd3;
add.s64 %rd2, %rd2, %rd3;
multimem.ld_reduce.relaxed.sys.global.add.u32 %r2, [%rd1];
st.global.u32 [%rd2], %r2;
ret;
}
.visible .entry write(.param .u64 all)
{
.reg .b32 %r<3>;
.reg .b64 %rd<4>;
ld.param.u64 %rd1, [all];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd3, %r1, 4;
add.s64 %rd1, %rd1, %rd3;
multimem.st.global.u32 [%rd1], %r1;
ret;
}
.visible .entry flag(.param .u64 all)
{
.reg .b64 %rd<2>;
ld.param.u64 %rd1, [all];
multimem.red.release.sys.global.add.u32 [%rd1], 1;
ret;
}
.visible .entry read(.param .u64 all)
{
.reg .b32 %r<2>;
.reg .b64 %rd<2>;
ld.param.u64 %rd1, [all];
ld.global.u32 %r1, [%rd1];
ret;
}
";

/// The library under test is that of virtual GPUs.
fn virtual_context(device: i32) -> Context {
    let context = Context::on(device);
    assert_eq!(OTHER_LIBRARY.get(), Some(&library_path()));
    context
}

fn create(team: &Team) -> (Code, u64) {
    let mut handle = 0;
    (cu!(cuMulticastCreate(&mut handle => *mut u64, team => *const Team)), handle)
}

/// Physical memory of a device.
fn physical(device: i32, bytes: usize) -> u64 {
    let (mut handle, prop) = (0, properties(device));
    ok!(cuMemCreate(&mut handle => *mut u64, bytes => usize, &prop => *const Properties, 0 => u64));
    handle
}

/// Maps a handle for devices.
fn map(handle: u64, bytes: usize, offset: usize, devices: &[i32]) -> u64 {
    let mut addr = 0;
    ok!(cuMemAddressReserve(&mut addr => *mut u64, bytes => usize, 0 => usize, 0 => u64, 0 => u64));
    ok!(cuMemMap(addr => u64, bytes => usize, offset => usize, handle => u64, 0 => u64));
    let access: Vec<Access> = devices.iter().map(|at| Access { location: [1, *at], flags: 3 }).collect();
    ok!(cuMemSetAccess(addr => u64, bytes => usize, access.as_ptr() => *const Access, access.len() => usize));
    addr
}

fn bind_mem(team: u64, at: usize, memory: u64, from: usize, bytes: usize) -> Code {
    cu!(cuMulticastBindMem(team => u64, at => usize, memory => u64, from => usize, bytes => usize, 0 => u64))
}

#[test]
fn devices_have_multicast_objects() {
    let _context = virtual_context(0);
    let mut value = 0i32;
    // CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    ok!(cuDeviceGetAttribute(&mut value => *mut i32, 132 => i32, 1 => i32));
    assert_eq!(value, 1);
    let mut unit = 0usize;
    for option in [0, 1] {
        ok!(cuMulticastGetGranularity(&mut unit => *mut usize, &TEAM => *const Team, option => i32));
        assert_eq!(unit, UNIT);
    }
    let wrong = cu!(cuMulticastGetGranularity(&mut unit => *mut usize, &TEAM => *const Team, 2 => i32));
    assert_eq!(wrong, INVALID_VALUE);
    for (team, code) in [
        (Team { devices: 0, ..TEAM }, INVALID_VALUE),
        (Team { devices: 3, ..TEAM }, INVALID_VALUE),
        (Team { size: 0, ..TEAM }, INVALID_VALUE),
        (Team { size: UNIT + 4096, ..TEAM }, INVALID_VALUE),
        (Team { flags: 1, ..TEAM }, INVALID_VALUE),
        // Handles of other systems.
        (Team { handle_types: 8, ..TEAM }, NOT_SUPPORTED),
    ] {
        assert_eq!(create(&team).0, code);
    }
}

#[test]
fn kernels_of_both_devices_access_memory_of_both() {
    let contexts = [virtual_context(0), virtual_context(1)];
    let (code, team) = create(&TEAM);
    assert_eq!(code, 0);
    assert_eq!(cu!(cuMulticastAddDevice(team => u64, 5 => i32)), INVALID_DEVICE);
    ok!(cuMulticastAddDevice(team => u64, 1 => i32));
    assert_eq!(cu!(cuMulticastAddDevice(team => u64, 1 => i32)), INVALID_VALUE);
    ok!(cuMulticastAddDevice(team => u64, 0 => i32));
    assert_eq!(cu!(cuMulticastAddDevice(team => u64, 0 => i32)), INVALID_VALUE);

    // By handle, at an offset in the memory, and by address.
    let memory = [physical(0, 2 * UNIT), physical(1, UNIT)];
    let own = [map(memory[0], 2 * UNIT, 0, &[0]) + UNIT as u64, map(memory[1], UNIT, 0, &[1])];
    for (at, from, bytes, code) in [
        (0, 0, UNIT + 4096, INVALID_VALUE),
        (4096, 0, UNIT, INVALID_VALUE),
        (0, 4096, UNIT, INVALID_VALUE),
        (0, UNIT, 2 * UNIT, INVALID_VALUE),
        (2 * UNIT, 0, UNIT, INVALID_VALUE),
        (0, 0, 0, INVALID_VALUE),
        (0, UNIT, UNIT, 0),
        // The device has memory.
        (0, 0, UNIT, INVALID_VALUE),
    ] {
        assert_eq!(bind_mem(team, at, memory[0], from, bytes), code, "{at} {from} {bytes}");
    }
    assert_eq!(bind_mem(team, 0, team, 0, UNIT), INVALID_VALUE);
    let bind_at = |device: i32, addr: u64| {
        cu!(cuMulticastBindAddr_v2(
            team => u64, device => i32, 0 => usize, addr => u64, UNIT => usize, 0 => u64
        ))
    };
    assert_eq!(bind_at(0, own[1]), INVALID_DEVICE);
    assert_eq!(bind_at(1, own[1] + 4096), INVALID_VALUE);
    assert_eq!(bind_at(1, own[1]), 0);

    let all = map(team, UNIT, 0, &[0, 1]);
    let second_unit = map(team, UNIT, UNIT, &[0]);
    let mut flags = 0u64;
    let location = [1i32, 1];
    ok!(cuMemGetAccess(&mut flags => *mut u64, &location => *const [i32; 2], all => u64));
    assert_eq!(flags, 3);
    for (context, own) in contexts.iter().zip(own) {
        context.make_current();
        let words: Vec<u32> = (0..32).map(|word| word + own as u32 % 7).collect();
        ok!(cuMemcpyHtoD_v2(own => u64, words.as_ptr() => *const u32, 128 => usize));
    }
    for context in &contexts {
        context.make_current();
        let (module, mut out, mut all) = (Module::of(PTX), upload(&[0; 32]), all);
        let mut params = [(&raw mut all).cast::<c_void>(), (&raw mut out).cast()];
        assert_eq!(module.try_launch("sum", 0, [1, 32], &mut params), 0);
        let shift = own.map(|own| own as u32 % 7).iter().sum::<u32>();
        let want: Vec<u32> = (0..32).map(|word| 2 * word + shift).collect();
        assert_eq!(download(out, 32), want);
    }
    contexts[0].make_current();
    let module = Module::of(PTX);
    module.launch_at("write", 0, [1, 32], all);
    module.launch_at("flag", 0, [1, 3], all);
    ok!(cuCtxSynchronize());
    for own in own {
        let mut want: Vec<u32> = (0..32).collect();
        want[0] = 3;
        assert_eq!(download(own, 32), want);
    }
    // Copies do not reach multicast addresses, and nothing is bound in the second unit.
    let mut word = 0u32;
    assert_eq!(cu!(cuMemcpyDtoH_v2(&mut word => *mut u32, all => u64, 4 => usize)), INVALID_VALUE);
    for (kernel, at) in [("read", all), ("write", own[0]), ("write", second_unit)] {
        let failing = virtual_context(0);
        Module::of(PTX).launch_at(kernel, 0, [1, 1], at);
        assert_eq!(cu!(cuCtxSynchronize()), ILLEGAL_ADDRESS, "{kernel}");
        drop(failing);
        contexts[0].make_current();
    }
    // Without memory of device 1 the range is not whole.
    ok!(cuMulticastUnbind(team => u64, 1 => i32, 0 => usize, UNIT => usize));
    let failing = virtual_context(0);
    Module::of(PTX).launch_at("write", 0, [1, 1], all);
    assert_eq!(cu!(cuCtxSynchronize()), ILLEGAL_ADDRESS);
    drop(failing);
    contexts[0].make_current();
    for (at, bytes, code) in [(0, 4096, INVALID_VALUE), (UNIT, 2 * UNIT, INVALID_VALUE), (0, UNIT, 0)] {
        let unbound = cu!(cuMulticastUnbind(team => u64, 0 => i32, at => usize, bytes => usize));
        assert_eq!(unbound, code, "{at} {bytes}");
    }
    for (addr, bytes) in [(all, UNIT), (second_unit, UNIT), (own[0] - UNIT as u64, 2 * UNIT), (own[1], UNIT)]
    {
        ok!(cuMemUnmap(addr => u64, bytes => usize));
        ok!(cuMemAddressFree(addr => u64, bytes => usize));
    }
    for handle in [team, memory[0], memory[1]] {
        ok!(cuMemRelease(handle => u64));
        assert_eq!(cu!(cuMemRelease(handle => u64)), INVALID_VALUE);
    }
}

#[test]
fn a_bind_waits_for_all_devices() {
    let context = virtual_context(0);
    let (_, team) = create(&TEAM);
    let memory = physical(0, UNIT);
    ok!(cuMulticastAddDevice(team => u64, 0 => i32));
    let binds = std::thread::spawn(move || bind_mem(team, 0, memory, 0, UNIT));
    let maps = std::thread::spawn(move || map(team, UNIT, 0, &[0]));
    // The time does not matter for the outcome: the calls return behind this one in any case.
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(!binds.is_finished() && !maps.is_finished());
    ok!(cuMulticastAddDevice(team => u64, 1 => i32));
    assert_eq!(binds.join().expect("it returns"), 0);
    maps.join().expect("it returns");
    drop(context);
}

#[test]
fn a_call_that_waits_for_devices_ends_with_the_object() {
    // Work of other tests would wake the call.
    if !alone("multicast::a_call_that_waits_for_devices_ends_with_the_object") {
        return;
    }
    let context = virtual_context(0);
    let (_, team) = create(&TEAM);
    let memory = physical(0, UNIT);
    let (send, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || send.send(bind_mem(team, 0, memory, 0, UNIT)).expect("the test waits"));
    // The call waits by then, or finds no object.
    std::thread::sleep(std::time::Duration::from_millis(50));
    ok!(cuMemRelease(team => u64));
    let code = ended.recv_timeout(std::time::Duration::from_secs(60)).expect("the call returns");
    assert_eq!(code, INVALID_VALUE);
    drop(context);
}

#[test]
fn a_handle_of_a_multicast_object_is_shared_within_the_process() {
    let _context = virtual_context(0);
    let (_, team) = create(&Team { devices: 1, ..TEAM });
    ok!(cuMulticastAddDevice(team => u64, 1 => i32));
    let export = |handle: u64| {
        let mut fd = -1i32;
        let code = cu!(cuMemExportToShareableHandle(&mut fd => *mut i32, handle => u64, 1 => i32, 0 => u64));
        (code, fd)
    };
    let (code, fd) = export(team);
    assert_eq!(code, 0);
    let mut again = 0u64;
    ok!(cuMemImportFromShareableHandle(&mut again => *mut u64, fd as usize as *mut c_void => *mut c_void, 1 => i32));
    // Neither memory of another device nor memory that cannot be shared can be bound.
    assert_eq!(bind_mem(again, 0, physical(0, UNIT), 0, UNIT), INVALID_DEVICE);
    let (mut private, mut prop) = (0u64, properties(1));
    prop.handle_types = 0;
    ok!(cuMemCreate(&mut private => *mut u64, UNIT => usize, &prop => *const Properties, 0 => u64));
    assert_eq!(bind_mem(again, 0, private, 0, UNIT), INVALID_VALUE);
    assert_eq!(bind_mem(again, 0, physical(1, UNIT), 0, UNIT), 0);
    // Each has a use of its own.
    for handle in [team, again] {
        ok!(cuMemRelease(handle => u64));
    }
    assert_eq!(bind_mem(again, UNIT, private, 0, UNIT), INVALID_VALUE);
    let (_, own) = create(&Team { handle_types: 0, ..TEAM });
    assert_eq!(export(own).0, INVALID_VALUE);
    ok!(cuMulticastAddDevice(own => u64, 0 => i32));
    ok!(cuMulticastAddDevice(own => u64, 1 => i32));
    assert_eq!(bind_mem(own, 0, private, 0, UNIT), 0);
}

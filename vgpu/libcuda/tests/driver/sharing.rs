//! Peers, virtual memory management, memory of other processes.

use std::ffi::c_void;
use std::process::Command;

use crate::cuda::*;

pub const MIB: usize = 1 << 20;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Properties {
    kind: i32,
    pub handle_types: i32,
    location: [i32; 2],
    win32: usize,
    flags: [u8; 8],
}

#[repr(C)]
pub struct Access {
    pub location: [i32; 2],
    pub flags: i32,
}

pub fn properties(device: i32) -> Properties {
    Properties { kind: 1, handle_types: 1, location: [1, device], win32: 0, flags: [0; 8] }
}

#[test]
fn a_peer_needs_access_for_kernels_and_none_for_copies() {
    let first = Context::on(0);
    let addr = upload(&[5]);
    let second = Context::on(1);
    assert_eq!(download(addr, 1), [5]);
    let lacking = Context::on(1);
    Module::load().add(0, [1, 1], addr, 1);
    assert_eq!(cu!(cuCtxSynchronize()), 700, "CUDA_ERROR_ILLEGAL_ADDRESS");
    drop(lacking);
    second.make_current();
    ok!(cuCtxEnablePeerAccess(first.0 => Handle, 0 => u32));
    assert_eq!(cu!(cuCtxEnablePeerAccess(first.0 => Handle, 0 => u32)), 704);
    Module::load().add(0, [1, 1], addr, 1);
    assert_eq!(download(addr, 1), [6]);
    first.make_current();
    let later = upload(&[1]);
    second.make_current();
    Module::load().add(0, [1, 1], later, 1);
    assert_eq!(download(later, 1), [2]);
    ok!(cuCtxDisablePeerAccess(first.0 => Handle));
}

#[test]
fn peer_access_is_enabled_by_each_context_and_ends_with_the_last() {
    // Other tests enable the access of the same devices.
    if !alone("sharing::peer_access_is_enabled_by_each_context_and_ends_with_the_last") {
        return;
    }
    let [first, also_first] = [Context::on(0), Context::on(0)];
    first.make_current();
    let addr = upload(&[0]);
    let [second, third, fourth] = [Context::on(1), Context::on(1), Context::on(1)];
    let enable = |own: &Context, peer: &Context| {
        own.make_current();
        cu!(cuCtxEnablePeerAccess(peer.0 => Handle, 0 => u32))
    };
    let disable = |own: &Context, peer: &Context| {
        own.make_current();
        cu!(cuCtxDisablePeerAccess(peer.0 => Handle))
    };
    let add = |own: &Context| {
        own.make_current();
        Module::load().add(0, [1, 1], addr, 1);
        cu!(cuCtxSynchronize())
    };
    assert_eq!((enable(&second, &first), enable(&second, &first)), (0, 704));
    assert_eq!((enable(&second, &also_first), enable(&third, &first)), (0, 0));
    assert_eq!((add(&second), add(&third)), (0, 0));
    assert_eq!((disable(&second, &first), disable(&second, &first)), (0, 705));
    assert_eq!((add(&second), add(&third)), (0, 0));
    drop(second);
    assert_eq!(add(&third), 0);
    first.make_current();
    assert_eq!(download(addr, 1), [5]);
    assert_eq!((disable(&third, &first), add(&third)), (0, 700), "CUDA_ERROR_ILLEGAL_ADDRESS");

    // A peer reaches no variable of a module, loaded before or behind that call.
    for (own, is_late) in [(&fourth, false), (&Context::on(1), true)] {
        first.make_current();
        let mut module = Module::load();
        assert_eq!(enable(own, &first), 0);
        first.make_current();
        if is_late {
            module = Module::load();
        }
        let (mut variable, mut bytes) = (0, 0);
        ok!(cuModuleGetGlobal_v2(
            &mut variable => *mut u64, &mut bytes => *mut usize, module.0 => Handle,
            c"counter".as_ptr() => *const i8,
        ));
        own.make_current();
        assert_eq!(download(variable, 2), [5, 6]);
        Module::load().add(0, [1, 1], variable, 1);
        assert_eq!(cu!(cuCtxSynchronize()), 700, "CUDA_ERROR_ILLEGAL_ADDRESS");
    }
}

#[test]
fn physical_memory_is_mapped_in_reserved_addresses() {
    let _context = Context::on(0);
    let module = Module::load();
    let (mut unit, prop) = (0usize, properties(0));
    ok!(cuMemGetAllocationGranularity(&mut unit => *mut usize, &prop => *const Properties, 0 => i32));
    assert_eq!(unit, 2 * MIB);
    let mut base = 0u64;
    ok!(cuMemAddressReserve(&mut base => *mut u64, 3 * unit => usize, 0 => usize, 0 => u64, 0 => u64));
    let mut handles = [0u64; 2];
    for (at, handle) in handles.iter_mut().enumerate() {
        ok!(cuMemCreate(handle => *mut u64, unit => usize, &prop => *const Properties, 0 => u64));
        ok!(cuMemMap(base + (at * unit) as u64 => u64, unit => usize, 0 => usize, *handle => u64, 0 => u64));
    }
    let access = Access { location: [1, 0], flags: 3 };
    ok!(cuMemSetAccess(base => u64, 2 * unit => usize, &access => *const Access, 1 => usize));
    // Words on both sides of the border between the mappings, by one copy and one kernel.
    let border = base + unit as u64 - 8;
    let words = [1u32, 2, 3, 4];
    ok!(cuMemcpyHtoD_v2(border => u64, words.as_ptr() => *const u32, 16 => usize));
    module.add(0, [1, 4], border, 10);
    assert_eq!(download(border, 4), [11, 12, 13, 14]);

    // The same memory, exported and imported, at the third place.
    let (mut fd, mut again) = (-1i32, 0u64);
    ok!(cuMemExportToShareableHandle(&mut fd => *mut i32, handles[1] => u64, 1 => i32, 0 => u64));
    ok!(cuMemImportFromShareableHandle(&mut again => *mut u64, fd as usize as *mut c_void => *mut c_void, 1 => i32));
    let third = base + 2 * unit as u64;
    ok!(cuMemMap(third => u64, unit => usize, 0 => usize, again => u64, 0 => u64));
    assert_eq!(download(third, 2), [13, 14]);
    assert_eq!(cu!(cuMemAddressFree(base => u64, 3 * unit => usize)), INVALID_VALUE);
    for handle in [handles[0], handles[1], again] {
        ok!(cuMemRelease(handle => u64));
    }
    ok!(cuMemUnmap(base => u64, 3 * unit => usize));
    let mut word = 0u32;
    let gone = cu!(cuMemcpyDtoH_v2(&mut word => *mut u32, border => u64, 4 => usize));
    assert_eq!(gone, INVALID_VALUE);
    ok!(cuMemAddressFree(base => u64, 3 * unit => usize));
}

#[repr(C)]
#[derive(Clone, Copy)]
struct IpcHandle([u8; 64]);

/// Has the handle, in the process that opens it.
const HANDLE: &str = "EPOXIDE_TEST_MARK";

fn part_of_another_process(digits: &str) {
    let mut handle = IpcHandle([0; 64]);
    for (at, byte) in handle.0.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).expect("two digits");
    }
    let _context = Context::on(1);
    let mut addr = 0u64;
    ok!(cuIpcOpenMemHandle_v2(&mut addr => *mut u64, handle => IpcHandle, 1 => u32));
    Module::load().add(0, [1, 2], addr, 10);
    assert_eq!(download(addr, 2), [12, 13]);
}

#[test]
fn an_allocation_is_opened_by_its_handle() {
    if let Ok(digits) = std::env::var(HANDLE) {
        return part_of_another_process(&digits);
    }
    let _context = Context::on(0);
    let addr = upload(&[1, 2]);
    let mut handle = IpcHandle([0; 64]);
    ok!(cuIpcGetMemHandle(&mut handle => *mut IpcHandle, addr => u64));
    let mut other = 0u64;
    ok!(cuIpcOpenMemHandle_v2(&mut other => *mut u64, handle => IpcHandle, 1 => u32));
    assert_ne!(other, addr);
    Module::load().add(0, [1, 2], other, 1);
    assert_eq!(download(addr, 2), [2, 3]);
    ok!(cuIpcCloseMemHandle(other => u64));

    // The same in a process of its own.
    let digits: String = handle.0.iter().map(|byte| format!("{byte:02x}")).collect();
    let child = Command::new(std::env::current_exe().expect("this program has a path"))
        .args(["sharing::an_allocation_is_opened_by_its_handle", "--exact"])
        .env(HANDLE, digits)
        .output()
        .expect("the program starts again");
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
    assert_eq!(download(addr, 2), [12, 13]);
    let wrong = IpcHandle([7; 64]);
    assert_eq!(
        cu!(cuIpcOpenMemHandle_v2(&mut other => *mut u64, wrong => IpcHandle, 1 => u32)),
        INVALID_VALUE
    );
}

/// By CUDA's documentation, a handle that the context has opened already gives the same address
/// once more, and the last close unmaps it.
#[test]
fn a_handle_that_is_open_in_the_context_is_counted() {
    if !alone("sharing::a_handle_that_is_open_in_the_context_is_counted") {
        return;
    }
    let open = |handle: IpcHandle| {
        let mut addr = 0u64;
        ok!(cuIpcOpenMemHandle_v2(&mut addr => *mut u64, handle => IpcHandle, 1 => u32));
        addr
    };
    let handle_of = |addr: u64| {
        let mut handle = IpcHandle([0; 64]);
        ok!(cuIpcGetMemHandle(&mut handle => *mut IpcHandle, addr => u64));
        handle
    };
    let close = |addr: u64| cu!(cuIpcCloseMemHandle(addr => u64));
    let context = Context::on(0);
    let (addr, second) = (upload(&[1, 2]), upload(&[3]));
    let handle = handle_of(addr);
    let opened = open(handle);
    // The handle of one allocation is always the same.
    assert_eq!(open(handle_of(addr)), opened);
    let of_second = open(handle_of(second));
    assert_ne!(of_second, opened);
    // Another context, of the same device, has a mapping of its own.
    let other = Context::on(0);
    let of_other = open(handle);
    assert_ne!(of_other, opened);
    assert_eq!(close(of_other), 0);
    assert_eq!(close(of_other), INVALID_VALUE);
    context.make_current();
    assert_eq!(close(opened), 0);
    assert_eq!(download(opened, 2), [1, 2]);
    assert_eq!(close(opened), 0);
    let mut word = 0u32;
    let read = |addr: u64, word: &mut u32| cu!(cuMemcpyDtoH_v2(word => *mut u32, addr => u64, 4 => usize));
    assert_eq!((close(opened), read(opened, &mut word)), (INVALID_VALUE, INVALID_VALUE));
    assert_eq!(download(of_second, 1), [3]);
    drop(other);
}

/// CUDA's documentation: the copy is in order with all work of the current context and of both that
/// it names.
#[test]
fn a_copy_between_contexts_comes_between_the_work_of_both() {
    let first = Context::on(0);
    let (module, src) = (Module::load(), upload(&[1]));
    let second = Context::on(1);
    let dst = upload(&[0]);
    let copy = || {
        ok!(cuMemcpyPeer(dst => u64, second.0 => Handle, src => u64, first.0 => Handle, 4 => usize));
    };
    first.make_current();
    be_late(0, std::ptr::null_mut());
    module.add(0, [1, 1], src, 1);
    second.make_current();
    copy();
    assert_eq!(download(dst, 1), [2]);
    // The copy is late, and so is the fill behind it.
    be_late(0, std::ptr::null_mut());
    ok!(cuMemsetD32Async(dst => u64, 0 => u32, 1 => usize, 0 => Handle));
    copy();
    first.make_current();
    ok!(cuMemsetD32_v2(src => u64, 9 => u32, 1 => usize));
    ok!(cuCtxSynchronize());
    assert_eq!((download(src, 1), download(dst, 1)), (vec![9], vec![2]));
}

/// Reserved addresses for `units` of physical memory, and the unit.
fn reserve(units: usize) -> (u64, usize) {
    let (mut base, unit) = (0u64, 2 * MIB);
    ok!(cuMemAddressReserve(&mut base => *mut u64, units * unit => usize, 0 => usize, 0 => u64, 0 => u64));
    (base, unit)
}

#[test]
fn attributes_of_an_address_name_its_handles_and_who_accesses_it() {
    // Other tests enable the access of the same devices.
    if !alone("sharing::attributes_of_an_address_name_its_handles_and_who_accesses_it") {
        return;
    }
    let first = Context::on(0);
    let own = upload(&[1]);
    let mut host = 0u64;
    ok!(cuMemHostAlloc(&mut host => *mut u64, 4 => usize, 0 => u32));
    let attribute = |attribute: i32, addr: u64| {
        let mut value = 0u64;
        ok!(cuPointerGetAttribute(&mut value => *mut u64, attribute => i32, addr => u64));
        value
    };
    let access = |device: i32, addr: u64| {
        let (mut flags, location) = (7u64, [1, device]);
        ok!(cuMemGetAccess(&mut flags => *mut u64, &location => *const [i32; 2], addr => u64));
        flags
    };
    let (handle_types, access_flags) = (14, 16);
    let (base, unit) = reserve(2);
    for (at, types) in [(base, 0), (base + unit as u64, 1)] {
        let (mut handle, properties) = (0u64, Properties { handle_types: types, ..properties(0) });
        ok!(cuMemCreate(&mut handle => *mut u64, unit => usize, &properties => *const Properties, 0 => u64));
        ok!(cuMemMap(at => u64, unit => usize, 0 => usize, handle => u64, 0 => u64));
        assert_eq!(attribute(handle_types, at), types as u64);
        assert_eq!((attribute(access_flags, at), access(0, at)), (0, 0));
    }
    let allowed = Access { location: [1, 0], flags: 3 };
    ok!(cuMemSetAccess(base => u64, unit => usize, &allowed => *const Access, 1 => usize));
    assert_eq!([base, base + unit as u64, own, host].map(|at| attribute(access_flags, at)), [3, 0, 3, 3]);
    assert_eq!([base, own, host].map(|at| (access(0, at), access(1, at))), [(3, 0), (0, 0), (0, 0)]);
    let read = Access { location: [1, 0], flags: 1 };
    ok!(cuMemSetAccess(base => u64, unit => usize, &read => *const Access, 1 => usize));
    assert_eq!((attribute(access_flags, base), access(0, base)), (1, 1));
    let second = Context::on(1);
    assert_eq!([base, own, host].map(|at| attribute(access_flags, at)), [0, 0, 3]);
    ok!(cuCtxEnablePeerAccess(first.0 => Handle, 0 => u32));
    assert_eq!([base, own, host].map(|at| attribute(access_flags, at)), [0, 3, 3]);
    drop(second);
}

#[test]
fn a_handle_is_released_once_and_its_mapping_stays() {
    let _context = Context::on(0);
    let ((base, unit), mut handle) = (reserve(1), 0u64);
    ok!(cuMemCreate(&mut handle => *mut u64, unit => usize, &properties(0) => *const Properties, 0 => u64));
    ok!(cuMemMap(base => u64, unit => usize, 0 => usize, handle => u64, 0 => u64));
    let mut again = 0u64;
    ok!(cuMemRetainAllocationHandle(&mut again => *mut u64, base => u64));
    let release = |handle: u64| cu!(cuMemRelease(handle => u64));
    assert_eq!((release(handle), release(again), release(handle)), (0, 0, INVALID_VALUE));
    // The mapping has a use of the memory still.
    ok!(cuMemRetainAllocationHandle(&mut again => *mut u64, base => u64));
    ok!(cuMemUnmap(base => u64, unit => usize));
    assert_eq!((release(again), release(again)), (0, INVALID_VALUE));
}

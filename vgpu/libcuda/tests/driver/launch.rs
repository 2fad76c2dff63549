//! Modules and launches.

use std::ffi::{CStr, CString, c_void};

use crate::cuda::*;

#[test]
fn a_kernel_adds_to_what_was_uploaded() {
    if !alone("launch::a_kernel_adds_to_what_was_uploaded") {
        return;
    }
    let _context = Context::on(0);
    let module = Module::load();
    let words: Vec<u32> = (0..256).collect();
    let addr = upload(&words);
    module.add(0, [4, 64], addr, 10);
    assert_eq!(download(addr, 256), (10..266).collect::<Vec<u32>>());
    ok!(cuMemFree_v2(addr => u64));
    assert_eq!(cu!(cuMemFree_v2(addr => u64)), INVALID_VALUE);
}

#[test]
fn parameters_may_be_in_a_buffer() {
    let _context = Context::on(0);
    let module = Module::load();
    let addr = upload(&[1]);
    let mut buffer = [0u8; 12];
    buffer[..8].copy_from_slice(&addr.to_ne_bytes());
    buffer[8..].copy_from_slice(&41u32.to_ne_bytes());
    let mut bytes = buffer.len();
    let mut extra = [
        std::ptr::without_provenance_mut(1),
        buffer.as_mut_ptr().cast(),
        std::ptr::without_provenance_mut(2),
        (&raw mut bytes).cast(),
        std::ptr::null_mut(),
    ];
    let (function, none) = (module.function("add"), std::ptr::null_mut());
    ok!(cuLaunchKernel(
        function => Handle, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 0 => u32, 0 => Handle,
        none => *mut *mut c_void, extra.as_mut_ptr() => *mut *mut c_void,
    ));
    assert_eq!(download(addr, 1), [42]);
}

#[test]
fn a_list_of_parameters_ends_where_it_says() {
    let _context = Context::on(0);
    let module = Module::load();
    let launch = |name: &str, extra: &mut [usize]| {
        let (function, none) = (module.function(name), std::ptr::null_mut());
        cu!(cuLaunchKernel(
            function => Handle, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 0 => u32, 0 => Handle,
            none => *mut *mut c_void, extra.as_mut_ptr().cast() => *mut *mut c_void,
        ))
    };
    // A kernel without parameters needs no buffer.
    let bytes = 0usize;
    let lists: [&mut [usize]; 2] = [&mut [0, 7, 7, 7], &mut [2, (&raw const bytes).addr(), 0, 7]];
    for list in lists {
        assert_eq!((launch("count", list), launch("add", list)), (0, INVALID_VALUE), "{list:?}");
    }
    ok!(cuCtxSynchronize());
}

#[test]
fn a_device_has_the_attributes_of_what_works() {
    let _context = Context::on(0);
    let attribute = |attribute: i32| {
        let mut value = -1;
        ok!(cuDeviceGetAttribute(&mut value => *mut i32, attribute => i32, 0 => i32));
        value
    };
    // Registered host memory, also for reads alone, clusters, domains and tensor maps: an H200's.
    assert_eq!([99, 113, 120, 126, 127].map(attribute), [1, 1, 1, 4, 1]);
    // IPC events are missing.
    assert_eq!(attribute(125), 0);
}

#[test]
fn no_block_fits_with_more_shared_memory_than_there_is() {
    let _context = Context::on(0);
    let function = Module::load().function("copy_box");
    for bytes in [1 << 20, usize::MAX - 8, usize::MAX] {
        let mut blocks = -1;
        ok!(cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &mut blocks => *mut i32, function => Handle, 32 => i32, bytes => usize,
        ));
        assert_eq!(blocks, 0, "{bytes}");
    }
}

#[test]
fn more_than_48_kib_of_dynamic_shared_memory_are_asked_for_first() {
    const MAX_DYNAMIC_SHARED: i32 = 8;
    const KIB: u32 = 1024;
    let _context = Context::on(0);
    let function = Module::load().function("count");
    let launch = |bytes: u32| {
        let null = std::ptr::null_mut::<*mut c_void>();
        cu!(cuLaunchKernel(
            function => Handle, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, bytes => u32,
            0 => Handle, null => *mut *mut c_void, null => *mut *mut c_void,
        ))
    };
    let ask_for = |bytes: u32| cu!(cuFuncSetAttribute(function => Handle, MAX_DYNAMIC_SHARED => i32, bytes as i32 => i32));
    assert_eq!([48 * KIB, 48 * KIB + 1, 64 * KIB].map(launch), [0, INVALID_VALUE, INVALID_VALUE]);
    assert_eq!([64 * KIB, 228 * KIB].map(ask_for), [0, INVALID_VALUE]);
    assert_eq!([64 * KIB, 64 * KIB + 1].map(launch), [0, INVALID_VALUE]);
    ok!(cuCtxSynchronize());
}

#[test]
fn variables_belong_to_the_load_of_a_module() {
    if !alone("launch::variables_belong_to_the_load_of_a_module") {
        return;
    }
    let _context = Context::on(0);
    let modules = [Module::load(), Module::load()];
    let find = |module: &Module| {
        let (mut addr, mut bytes) = (0, 0);
        let name = c"counter".as_ptr();
        ok!(cuModuleGetGlobal_v2(&mut addr => *mut u64, &mut bytes => *mut usize, module.0 => Handle, name => *const i8));
        assert_eq!(bytes, 8);
        addr
    };
    let counters = modules.each_ref().map(find);
    modules[0].try_launch("count", 0, [1, 1], &mut []);
    modules[0].try_launch("count", 0, [1, 1], &mut []);
    assert_eq!(counters.map(|addr| download(addr, 2)), [vec![5, 8], vec![5, 6]]);
    ok!(cuModuleUnload(modules[0].0 => Handle));
    let mut word = 0u32;
    let code = cu!(cuMemcpyDtoH_v2(&raw mut word => *mut u32, counters[0] => u64, 4 => usize));
    assert_eq!((code, download(counters[1], 2)), (INVALID_VALUE, vec![5, 6]));
}

#[test]
fn variables_are_freed_with_their_context() {
    if !alone("launch::variables_are_freed_with_their_context") {
        return;
    }
    // A module that is loaded later may lie at the address.
    let other = Context::on(0);
    let kernels = Module::load();
    let context = Context::on(0);
    let (module, name) = (Module::load(), c"counter".as_ptr());
    let (mut addr, mut bytes, mut word) = (0, 0, 0u32);
    ok!(cuModuleGetGlobal_v2(&mut addr => *mut u64, &mut bytes => *mut usize, module.0 => Handle, name => *const i8));
    assert_eq!(download(addr, 2), [5, 6]);
    drop(context);
    other.make_current();
    assert_eq!(cu!(cuMemcpyDtoH_v2(&raw mut word => *mut u32, addr => u64, 4 => usize)), INVALID_VALUE);
    kernels.add(0, [1, 1], addr, 1);
    assert_eq!(cu!(cuCtxSynchronize()), 700, "CUDA_ERROR_ILLEGAL_ADDRESS");
}

#[test]
fn errors_of_ptx_name_the_line_in_the_log() {
    let _context = Context::on(0);
    let text = CString::new(PTX.replace("mad.lo.u32", "no.such.instruction")).unwrap();
    let mut log = [0u8; 200];
    let keys = [5, 6];
    let values = [log.as_mut_ptr() as usize, log.len()];
    let mut module: Handle = 0;
    let code = cu!(cuModuleLoadDataEx(
        &mut module => *mut Handle, text.as_ptr() => *const i8, 2 => u32, keys.as_ptr() => *const i32,
        values.as_ptr() => *const usize,
    ));
    let log = CStr::from_bytes_until_nul(&log).unwrap().to_string_lossy();
    assert_eq!(code, 218, "CUDA_ERROR_INVALID_PTX");
    assert!(log.contains("line 14") && log.contains("no.such.instruction"), "{log}");
    let elf = cu!(cuModuleLoadData(&mut module => *mut Handle, c"\x7fELF".as_ptr() => *const i8));
    assert_eq!(elf, 209, "CUDA_ERROR_NO_BINARY_FOR_GPU");
}

#[test]
fn ptx_of_a_newer_version_is_an_error_of_its_own() {
    let _context = Context::on(0);
    let load = |version: &str| {
        let text = CString::new(PTX.replacen("7.8", version, 1)).unwrap();
        cu!(cuModuleLoadData(&mut 0 => *mut Handle, text.as_ptr() => *const i8))
    };
    assert_eq!(["7.8", "9.5", "9.6", "9.9", "10.0", "99.0"].map(load), [0, 0, 222, 222, 222, 222]);
}

#[test]
fn launches_are_checked_before_they_run() {
    let _context = Context::on(0);
    let module = Module::load();
    let mut addr = upload(&[0]);
    let mut value = 1u32;
    let mut params = [(&raw mut addr).cast(), (&raw mut value).cast()];
    for shape in [[0, 1], [1, 0], [1, 1025]] {
        assert_eq!(module.try_launch("add", 0, shape, &mut params), INVALID_VALUE, "{shape:?}");
    }
    assert_eq!(module.try_launch("add", 0x1234, [1, 1], &mut params), 400, "CUDA_ERROR_INVALID_HANDLE");
    assert_eq!(download(addr, 1), [0]);
}

/// CUDA's barrier of a grid stands on a workspace, which a cooperative launch alone gives.
#[test]
fn blocks_of_a_cooperative_launch_have_a_workspace() {
    let _context = Context::on(0);
    let module = Module::load();
    let mut addr = upload(&[7]);
    let function = module.function("has_workspace");
    let mut params = [(&raw mut addr).cast::<c_void>()];
    for (cooperative, expected) in [(false, 0), (true, 1)] {
        let code = if cooperative {
            cu!(cuLaunchCooperativeKernel(
                function => Handle, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 0 => u32,
                0 => Handle, params.as_mut_ptr() => *mut *mut c_void,
            ))
        } else {
            module.try_launch("has_workspace", 0, [1, 1], &mut params)
        };
        assert_eq!((code, download(addr, 1)), (0, vec![expected]));
    }
}

#[test]
fn a_library_is_unloaded_from_all_contexts_also_behind_an_error() {
    if !alone("launch::a_library_is_unloaded_from_all_contexts_also_behind_an_error") {
        return;
    }
    let text = CString::new(PTX).unwrap();
    let mut library = 0;
    let (keys, values): (*const i32, *const usize) = (std::ptr::null(), std::ptr::null());
    ok!(cuLibraryLoadData(
        &mut library => *mut Handle, text.as_ptr() => *const i8, keys => *const i32, values => *const usize, 0 => u32,
        keys => *const i32, values => *const usize, 0 => u32,
    ));
    let contexts: Vec<(Context, u64)> = (0..8)
        .map(|_| {
            let (context, name) = (Context::on(0), c"counter".as_ptr());
            let (mut addr, mut bytes) = (0u64, 0usize);
            ok!(cuLibraryGetGlobal(
                &mut addr => *mut u64, &mut bytes => *mut usize, library => Handle, name => *const i8
            ));
            (context, addr)
        })
        .collect();
    // The module of one context is gone already.
    let mut module = 0;
    ok!(cuLibraryGetModule(&mut module => *mut Handle, library => Handle));
    ok!(cuModuleUnload(module => Handle));
    assert_eq!(cu!(cuLibraryUnload(library => Handle)), 400, "CUDA_ERROR_INVALID_HANDLE");
    for (context, addr) in &contexts {
        context.make_current();
        let mut word = 0u32;
        assert_eq!(cu!(cuMemcpyDtoH_v2(&raw mut word => *mut u32, *addr => u64, 4 => usize)), INVALID_VALUE);
    }
}

#[test]
fn libraries_are_loaded_into_each_context_that_uses_them() {
    let text = CString::new(PTX).unwrap();
    let (mut library, mut kernel) = (0, 0);
    let (keys, values): (*const i32, *const usize) = (std::ptr::null(), std::ptr::null());
    let _first = Context::on(0);
    ok!(cuLibraryLoadData(
        &mut library => *mut Handle, text.as_ptr() => *const i8, keys => *const i32, values => *const usize, 0 => u32,
        keys => *const i32, values => *const usize, 0 => u32,
    ));
    ok!(cuLibraryGetKernel(&mut kernel => *mut Handle, library => Handle, c"add".as_ptr() => *const i8));
    for device in [0, 1] {
        let _context = Context::on(device);
        let (mut addr, mut value) = (upload(&[1, 2]), 5u32);
        let mut params: [*mut c_void; 2] = [(&raw mut addr).cast(), (&raw mut value).cast()];
        ok!(cuLaunchKernel(
            kernel => Handle, 1 => u32, 1 => u32, 1 => u32, 2 => u32, 1 => u32, 1 => u32, 0 => u32, 0 => Handle,
            params.as_mut_ptr() => *mut *mut c_void, std::ptr::null_mut() => *mut *mut c_void,
        ));
        assert_eq!(download(addr, 2), [6, 7]);
    }
    // The attributes of a kernel are those of the current context's device.
    const MAX_DYNAMIC_SHARED: i32 = 8;
    let (mut bytes, second) = (0, Context::on(1));
    for (device, code) in [(0, NOT_SUPPORTED), (1, 0), (2, 101)] {
        let set = cu!(cuKernelSetAttribute(MAX_DYNAMIC_SHARED => i32, 1024 => i32, kernel => Handle, device => i32));
        let got = cu!(cuKernelGetAttribute(
            &mut bytes => *mut i32, MAX_DYNAMIC_SHARED => i32, kernel => Handle, device => i32
        ));
        assert_eq!((set, got), (code, code), "device {device}");
    }
    drop(second);
    ok!(cuLibraryUnload(library => Handle));
}

/// A kernel of a library has no context. By CUDA's documentation its launch takes that of the
/// stream, and the current one for the null stream.
#[test]
fn a_kernel_of_a_library_is_launched_in_the_context_of_the_stream() {
    let text = CString::new(PTX).unwrap();
    let (mut library, mut kernel) = (0, 0);
    let (keys, values): (*const i32, *const usize) = (std::ptr::null(), std::ptr::null());
    let (other, of_other, there) = (Context::on(1), stream(1), upload(&[1, 2]));
    let (current, here) = (Context::on(0), upload(&[1, 2]));
    ok!(cuLibraryLoadData(
        &mut library => *mut Handle, text.as_ptr() => *const i8, keys => *const i32, values => *const usize, 0 => u32,
        keys => *const i32, values => *const usize, 0 => u32,
    ));
    ok!(cuLibraryGetKernel(&mut kernel => *mut Handle, library => Handle, c"add".as_ptr() => *const i8));
    // The codes of the three kinds of launches, each of which adds `value`.
    let launches = |stream: Handle, mut at: u64, mut value: u32| {
        let mut params: [*mut c_void; 2] = [(&raw mut at).cast(), (&raw mut value).cast()];
        let (params, extra) = (params.as_mut_ptr(), std::ptr::null_mut());
        let plain = cu!(cuLaunchKernel(
            kernel => Handle, 1 => u32, 1 => u32, 1 => u32, 2 => u32, 1 => u32, 1 => u32, 0 => u32, stream => Handle,
            params => *mut *mut c_void, extra => *mut *mut c_void,
        ));
        let cooperative = cu!(cuLaunchCooperativeKernel(
            kernel => Handle, 1 => u32, 1 => u32, 1 => u32, 2 => u32, 1 => u32, 1 => u32, 0 => u32, stream => Handle,
            params => *mut *mut c_void,
        ));
        let (grid, block) = ([1; 3], [2, 1, 1]);
        let config = Config { grid, block, shared: 0, stream, attributes: std::ptr::null(), count: 0 };
        let extended = cu!(cuLaunchKernelEx(
            &raw const config => *const Config, kernel => Handle, params => *mut *mut c_void,
            extra => *mut *mut c_void,
        ));
        [plain, cooperative, extended]
    };
    assert_eq!(launches(of_other, there, 5), [0; 3]);
    assert_eq!(launches(0, here, 1), [0; 3]);
    assert_eq!(download(here, 2), [4, 5]);
    // No context is current.
    drop(current);
    ok!(cuCtxSetCurrent(0 => Handle));
    assert_eq!(launches(of_other, there, 10), [0; 3]);
    assert_eq!(launches(0, there, 10), [INVALID_CONTEXT; 3]);
    ok!(cuStreamSynchronize(of_other => Handle));
    other.make_current();
    assert_eq!(download(there, 2), [46, 47]);
    ok!(cuLibraryUnload(library => Handle));
}

#[test]
fn kernels_of_a_library_are_named_and_counted_without_a_context() {
    let text = CString::new(PTX).unwrap();
    let (mut library, mut kernel, mut other, mut count) = (0, 0, 0, 0u32);
    let (keys, values): (*const i32, *const usize) = (std::ptr::null(), std::ptr::null());
    assert_eq!(cu!(cuCtxSynchronize()), INVALID_CONTEXT);
    ok!(cuLibraryLoadData(
        &mut library => *mut Handle, text.as_ptr() => *const i8, keys => *const i32, values => *const usize, 0 => u32,
        keys => *const i32, values => *const usize, 0 => u32,
    ));
    ok!(cuLibraryGetKernelCount(&mut count => *mut u32, library => Handle));
    assert_eq!(count as usize, PTX.matches(".entry").count());
    ok!(cuLibraryGetKernel(&mut kernel => *mut Handle, library => Handle, c"add".as_ptr() => *const i8));
    let missing =
        cu!(cuLibraryGetKernel(&mut other => *mut Handle, library => Handle, c"sub".as_ptr() => *const i8));
    assert_eq!(missing, 500, "CUDA_ERROR_NOT_FOUND");
    let mut name = std::ptr::null::<std::ffi::c_char>();
    ok!(cuKernelGetName(&mut name => *mut *const std::ffi::c_char, kernel => Handle));
    // SAFETY: the library returns a C string that lives as long as the process.
    assert_eq!(unsafe { CStr::from_ptr(name) }, c"add");
    ok!(cuLibraryUnload(library => Handle));
}

#[test]
fn the_newest_function_that_a_version_has_is_found() {
    let find = |name: &CStr, version: i32| {
        let (mut addr, mut status) = (0usize, -1);
        let code = cu!(cuGetProcAddress_v2(
            name.as_ptr() => *const i8, &mut addr => *mut usize, version => i32, 0 => u64, &mut status => *mut i32,
        ));
        (code, addr, status)
    };
    let symbol = |name: &[u8]| {
        // SAFETY: the address alone is compared.
        let symbol = unsafe { library().get::<unsafe extern "C" fn()>(name) }.unwrap();
        *symbol as usize
    };
    assert_eq!(find(c"cuMemAlloc", 12000), (0, symbol(b"cuMemAlloc_v2"), 0));
    assert_eq!(find(c"cuCtxCreate", 11000), (0, symbol(b"cuCtxCreate_v2"), 0));
    assert_eq!(find(c"cuCtxCreate", 13000), (0, symbol(b"cuCtxCreate_v4"), 0));
    assert_eq!(find(c"cuEventElapsedTime", 12000), (0, symbol(b"cuEventElapsedTime"), 0));
    assert_eq!(find(c"cuNoSuchFunction", 13000), (0, 0, 1));
    assert_eq!(find(c"cuCtxCreate_v4", 13000), (0, 0, 1));
    // CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
    assert_eq!(find(c"cuMemAlloc", 1000), (0, 0, 2));
    assert_eq!(find(c"cuMemAlloc", 99000), (INVALID_VALUE, 0, -1));
}

/// `CUlaunchAttribute`.
#[repr(C)]
struct Attribute {
    id: u32,
    pad: u32,
    value: [u32; 16],
}

/// `CUlaunchConfig`.
#[repr(C)]
struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: Handle,
    attributes: *const Attribute,
    count: u32,
}

/// The code of a launch of one thread with an attribute. Its parameters are an address and a word.
pub fn with_attribute(
    function: Handle,
    stream: Handle,
    (id, value): (u32, [u32; 16]),
    (mut at, mut word): (u64, u32),
) -> Code {
    let attribute = Attribute { id, pad: 0, value };
    let (grid, block) = ([1; 3], [1; 3]);
    let config = Config { grid, block, shared: 0, stream, attributes: &raw const attribute, count: 1 };
    let mut params: [*mut c_void; 2] = [(&raw mut at).cast(), (&raw mut word).cast()];
    cu!(cuLaunchKernelEx(
        &raw const config => *const Config, function => Handle, params.as_mut_ptr() => *mut *mut c_void,
        std::ptr::null_mut() => *mut *mut c_void,
    ))
}

#[test]
fn a_launch_names_the_blocks_of_a_cluster() {
    /// `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`
    const CLUSTER: u32 = 4;
    let _context = Context::on(0);
    let module = Module::load();
    let at = upload(&[0; 32]);
    let function = module.function("rank_in_cluster");
    let launch = |blocks: u32, cluster: u32| {
        let mut at = at;
        let mut value = [0; 16];
        value[..3].copy_from_slice(&[cluster, 1, 1]);
        let attribute = Attribute { id: CLUSTER, pad: 0, value };
        let (grid, block) = ([blocks, 1, 1], [1; 3]);
        let config = Config { grid, block, shared: 0, stream: 0, attributes: &raw const attribute, count: 1 };
        let mut params: [*mut c_void; 1] = [(&raw mut at).cast()];
        cu!(cuLaunchKernelEx(
            &raw const config => *const Config, function => Handle, params.as_mut_ptr() => *mut *mut c_void,
            std::ptr::null_mut() => *mut *mut c_void,
        ))
    };
    assert_eq!(launch(6, 3), 0);
    // CUDA_ERROR_INVALID_CLUSTER_SIZE
    assert_eq!(launch(6, 4), 912);
    assert_eq!(download(at, 6), [30, 31, 32, 30, 31, 32]);
    // Clusters of 16 blocks once the kernel allows them.
    assert_eq!(launch(32, 16), 912);
    const NON_PORTABLE_CLUSTER_SIZE_ALLOWED: i32 = 14;
    let allow = |value: i32| cu!(cuFuncSetAttribute(function => Handle, NON_PORTABLE_CLUSTER_SIZE_ALLOWED => i32, value => i32));
    assert_eq!((allow(2), allow(1)), (1, 0));
    let mut allowed = 0;
    let asked = cu!(cuFuncGetAttribute(
        &mut allowed => *mut i32, NON_PORTABLE_CLUSTER_SIZE_ALLOWED => i32, function => Handle
    ));
    assert_eq!((asked, allowed), (0, 1));
    assert_eq!(launch(32, 16), 0);
    let ranks: Vec<u32> = (0..32).map(|block| 160 + block % 16).collect();
    assert_eq!(download(at, 32), ranks);
    assert_eq!((launch(32, 32), allow(0), launch(32, 16)), (912, 0, 912));
}

#[test]
fn attributes_of_a_launch_that_only_affect_speed_are_ignored() {
    let _context = Context::on(0);
    let module = Module::load();
    let function = module.function("add");
    let at = upload(&[1]);
    // The part of shared memory, the use of NVLink, no preferred cluster, and one, an event that a
    // kernel completes, and a number that no attribute has.
    let cases = [
        (14, 1, 0),
        (16, 1, 0),
        (11, 0, 0),
        (11, 1, NOT_SUPPORTED),
        (12, 1, NOT_SUPPORTED),
        (15, 0, INVALID_VALUE),
    ];
    for (id, value, code) in cases {
        assert_eq!(with_attribute(function, 0, (id, [value; 16]), (at, 1)), code, "attribute {id}");
    }
    assert_eq!(download(at, 1), [4]);
}

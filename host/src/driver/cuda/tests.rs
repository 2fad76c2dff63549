//! Tests that need neither a GPU nor a driver, but for those of captures, handles, kernels and green
//! contexts.

use std::time::Duration;

use epoxide_vgpu::ptx::Version;

use super::ffi::{self, CuResult};
use super::memory::file_bytes;
use super::module::{log_text, param_pointers};
use super::{CudaDevice, calls, devices, doctor, ptx};
use crate::driver::{Device, Event, LaunchConfig, Memory, MemoryKind, Module, RawStream, Stream};
use crate::error::Error;

fn assert_send_sync<T: Send + Sync>() {}

#[test]
fn a_device_may_be_used_from_any_thread() {
    assert_send_sync::<CudaDevice>();
    assert_send_sync::<Device>();
    assert_send_sync::<RawStream>();
}

#[test]
fn without_a_gpu_devices_are_unavailable_with_a_remedy() {
    match devices() {
        Ok(found) => assert!(!found.is_empty(), "no device must be an error"),
        Err(Error::Unavailable { what, reason }) => {
            assert_eq!(what, "the CUDA driver");
            let found = super::library::library().is_ok();
            let why = if found { "cuInit says" } else { "it cannot be loaded: libcuda.so.1: " };
            assert!(reason.starts_with(why) && reason.contains(';'), "{reason}");
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn opening_a_device_that_is_not_there_is_unavailable() {
    match CudaDevice::open(u32::MAX) {
        Err(Error::Unavailable { .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_thread_without_a_context_has_no_current_device() {
    match CudaDevice::current() {
        Err(Error::Unavailable { what, reason }) => {
            assert!(
                ["the CUDA driver", "this thread's current CUDA device"].contains(&what.as_str()),
                "{what}"
            );
            assert!(reason.contains(';') || reason.contains("CudaDevice::open"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_doctor_answers_without_a_gpu() {
    let report = doctor();
    assert_eq!(report[0].0, "CUDA driver");
    for (name, found) in &report {
        let text = found.as_ref().unwrap_or_else(|reason| reason);
        assert!(!text.is_empty(), "{name}");
    }
}

#[test]
fn errors_name_the_call_the_code_and_the_remedy() {
    let text = CuResult::STUB_LIBRARY.error("cuInit").to_string();
    assert!(text.starts_with("cuInit failed: CUDA_ERROR_STUB_LIBRARY (34); "), "{text}");
    assert!(text.contains("LD_LIBRARY_PATH"), "{text}");
}

#[test]
fn a_code_without_a_remedy_ends_with_the_code() {
    let text = CuResult(424_242).error("cuLaunchKernel").to_string();
    assert!(text.ends_with("(424242)"), "{text}");
}

#[test]
fn all_faults_and_all_capture_codes_have_remedies() {
    for code in [700, 710, 714, 715, 716, 717, 718, 719] {
        assert!(CuResult(code).remedy().contains("context is lost"), "{code}");
    }
    for code in 900..=908 {
        assert!(CuResult(code).remedy().contains("`Stream::capture`"), "{code}");
    }
    assert_eq!(CuResult(720).remedy(), "");
}

#[test]
fn not_ready_is_no_error() {
    assert!(!CuResult::NOT_READY.check_ready("cuEventQuery").unwrap());
    assert!(CuResult::SUCCESS.check_ready("cuEventQuery").unwrap());
    assert!(CuResult::ILLEGAL_ADDRESS.check_ready("cuEventQuery").is_err());
}

#[test]
fn ptx_versions_are_read_from_the_directive() {
    let version = |text| Version::of(text).map(|version| (version.major, version.minor));
    assert_eq!(version("// head .version 1.0\n\n.version 8.4 // note\n.target sm_90"), Some((8, 4)));
    assert_eq!(version("  .version\t7.8\n"), Some((7, 8)));
    assert_eq!(version(".target sm_90"), None);
    assert_eq!(version(".version eight"), None);
}

#[test]
fn each_ptx_version_names_the_oldest_driver() {
    let branch =
        |major, minor| ptx::oldest_driver_for(Version { major, minor }).map(|release| release.branch);
    assert_eq!(branch(7, 0), Some(520));
    assert_eq!(branch(8, 0), Some(525));
    assert_eq!(branch(8, 2), Some(535));
    assert_eq!(branch(8, 4), Some(550));
    assert_eq!(branch(8, 5), Some(555));
    assert_eq!(branch(8, 8), Some(575));
    assert_eq!(branch(9, 0), Some(580));
    assert_eq!(branch(99, 0), None);
}

#[test]
fn each_driver_names_the_newest_ptx() {
    let newest = |cuda| ptx::newest_ptx_for(cuda).map(|version| version.to_string());
    assert_eq!(newest(11000), None);
    assert_eq!(newest(12020).as_deref(), Some("8.2"));
    assert_eq!(newest(12065).as_deref(), Some("8.5"));
    assert_eq!(newest(13000).as_deref(), Some("9.0"));
    assert_eq!(newest(99000).as_deref(), Some("9.1"));
}

#[test]
fn too_new_ptx_says_what_to_install() {
    let text = ptx::too_new(".version 8.4\n", 12020);
    assert_eq!(
        text,
        "the module is PTX 8.4, this driver (CUDA 12.2) reads up to PTX 8.2; install driver R550 (CUDA 12.4) or newer"
    );
    let text = ptx::too_new(".version 99.0\n", 13000);
    assert!(text.contains("PTX 99.0") && text.contains("lower PTX version"), "{text}");
}

#[test]
fn parameters_become_one_pointer_each_in_order() {
    let (first, second) = (7u64.to_ne_bytes(), 3u32.to_ne_bytes());
    let params: [&[u8]; 2] = [&first, &second];
    let pointers = param_pointers(&params);
    assert_eq!(pointers.len(), 2);
    assert_eq!(pointers[0].cast_const().cast(), first.as_ptr());
    assert_eq!(pointers[1].cast_const().cast(), second.as_ptr());
    assert!(param_pointers(&[]).is_empty());
}

#[test]
fn an_adopted_handle_keeps_the_stream_it_stands_for() {
    // The default streams are small integers, real ones are addresses.
    for stream in [0u64, 1, 2, 0x7fff_ffff_fff0] {
        assert_eq!(calls::raw(stream) as u64, stream);
        assert_eq!(calls::raw(stream | calls::ADOPTED) as u64, stream);
    }
}

#[test]
fn jit_logs_end_at_the_first_nul() {
    assert_eq!(log_text(b"ptxas: line 3\n\0junk"), "ptxas: line 3");
    assert_eq!(log_text(b"no end"), "no end");
    assert_eq!(log_text(&[0; 8]), "");
}

#[test]
fn files_in_memory_have_whole_huge_pages() {
    assert_eq!(file_bytes(0, "test").unwrap(), 2 << 20);
    assert_eq!(file_bytes((2 << 20) + 1, "test").unwrap(), 4 << 20);
    for bytes in [u64::MAX, 1 << 63, i64::MAX as u64] {
        let error = file_bytes(bytes, "rows").unwrap_err().to_string();
        assert!(error.contains(&format!("bytes = {bytes}")) && error.contains("rows"), "{error}");
    }
}

/// A driver that checks its arguments: it returns error codes of its own where they are not the
/// test's.
const FAKE_DRIVER: &str = r#"
use std::ffi::{c_uint, c_void};
#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernel(f: usize, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint,
    stream: usize, params: *mut *mut c_void, extra: *mut *mut c_void) -> i32 {
    let all = [f, gx as usize, gy as usize, gz as usize, bx as usize, by as usize, bz as usize, shared as usize, stream,
        params as usize, extra as usize];
    for (i, value) in all.iter().enumerate() { if *value != 100 + i { return 1000 + i as i32; } }
    7
}
#[unsafe(no_mangle)]
pub extern "C" fn cuTexRefSetMipmapLevelClamp(texture: usize, least: f32, most: f32) -> i32 {
    if texture == 1 && least == 2.5 && most == -3.5 { 8 } else { 1000 }
}
"#;

/// Set in the process that has the fake driver.
const CHILD: &str = "EPOXIDE_TEST_FAKE_DRIVER";

#[test]
fn the_driver_is_found_at_run_time_and_gets_its_arguments_as_they_are() {
    unsafe extern "C" {
        fn cuTexRefSetMipmapLevelClamp(texture: usize, least: f32, most: f32) -> CuResult;
    }
    if std::env::var_os(CHILD).is_some() {
        let at = |address: usize| address as *mut std::ffi::c_void;
        for _ in 0..2 {
            // SAFETY: the fake driver compares its arguments and touches none of them.
            let said = unsafe {
                let (params, extra) = (at(109).cast(), at(110).cast());
                ffi::cuLaunchKernel(at(100), 101, 102, 103, 104, 105, 106, 107, at(108), params, extra)
            };
            assert_eq!(said, CuResult(7));
            // SAFETY: as above.
            assert_eq!(unsafe { cuTexRefSetMipmapLevelClamp(1, 2.5, -3.5) }, CuResult(8));
            // SAFETY: as above; it has no such function.
            assert_eq!(unsafe { ffi::cuInit(0) }, CuResult::NOT_FOUND);
        }
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (source, library) = (folder.path().join("fake.rs"), folder.path().join("libcuda.so.1"));
    std::fs::write(&source, FAKE_DRIVER).unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut compile = std::process::Command::new(rustc);
    compile.args(["--edition=2024", "--crate-type=cdylib"]);
    assert!(compile.arg("-o").arg(&library).arg(&source).status().unwrap().success());
    let name = "driver::cuda::tests::the_driver_is_found_at_run_time_and_gets_its_arguments_as_they_are";
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args([name, "--exact"]).env(CHILD, "1").env("LD_LIBRARY_PATH", folder.path());
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A stream of a new green context of this device with at least so many multiprocessors. Both are
/// leaked.
fn green_stream(device: &Device, multiprocessors: u32) -> RawStream {
    use std::ffi::{CStr, c_int, c_uint, c_void};

    use super::ffi::CuStream;
    use super::late::{DevResource, resolve};

    type GetResource = unsafe extern "C" fn(c_int, *mut DevResource, c_int) -> CuResult;
    type Split = unsafe extern "C" fn(
        *mut DevResource,
        *mut c_uint,
        *const DevResource,
        *mut DevResource,
        c_uint,
        c_uint,
    ) -> CuResult;
    type Describe = unsafe extern "C" fn(*mut *mut c_void, *mut DevResource, c_uint) -> CuResult;
    type Create = unsafe extern "C" fn(*mut *mut c_void, *mut c_void, c_int, c_uint) -> CuResult;
    type CreateStream = unsafe extern "C" fn(*mut CuStream, *mut c_void, c_uint, c_int) -> CuResult;
    // SAFETY: each type is the C signature of that function since CUDA 12.5.
    unsafe fn function<F: Copy>(name: &CStr) -> F {
        let found = resolve(name, 12050);
        assert!(!found.is_null(), "{name:?}");
        // SAFETY: a function pointer is as large as a pointer, and the caller gives its type.
        unsafe { std::mem::transmute_copy(&found) }
    }
    let ordinal = device.info().ordinal as c_int;
    let (mut all, mut part, mut rest) =
        (DevResource::default(), DevResource::default(), DevResource::default());
    let (mut groups, mut description, mut context) = (1, std::ptr::null_mut(), std::ptr::null_mut());
    let mut stream: CuStream = std::ptr::null_mut();
    // SAFETY: the types are those of the functions; all pointers are to values of this function;
    // the flags request a context whose streams do not wait for the default one.
    unsafe {
        let get: GetResource = function(c"cuDeviceGetDevResource");
        get(ordinal, &mut all, DevResource::SM).check("cuDeviceGetDevResource").unwrap();
        let split: Split = function(c"cuDevSmResourceSplitByCount");
        split(&mut part, &mut groups, &all, &mut rest, 0, multiprocessors)
            .check("cuDevSmResourceSplitByCount")
            .unwrap();
        let describe: Describe = function(c"cuDevResourceGenerateDesc");
        describe(&mut description, &mut part, 1).check("cuDevResourceGenerateDesc").unwrap();
        let create: Create = function(c"cuGreenCtxCreate");
        create(&mut context, description, ordinal, 1).check("cuGreenCtxCreate").unwrap();
        let create_stream: CreateStream = function(c"cuGreenCtxStreamCreate");
        create_stream(&mut stream, context, 1, 0).check("cuGreenCtxStreamCreate").unwrap();
    }
    RawStream(stream)
}

/// Whether there is a GPU, or a virtual one in its place.
///
/// # Panics
/// Where EPOXIDE_TEST_DEVICE names GPUs and there is none.
fn is_there() -> bool {
    let asked = std::env::var("EPOXIDE_TEST_DEVICE").is_ok_and(|device| device == "cuda");
    match devices() {
        Ok(_) => true,
        Err(error) if asked => panic!("EPOXIDE_TEST_DEVICE=cuda: {error}"),
        Err(_) => false,
    }
}

/// Where there is a GPU: an operation with more blocks than the green context of its stream has
/// multiprocessors ends.
#[test]
fn a_green_context_is_enough_for_an_operation_with_more_blocks() {
    use crate::low_latency::{Buffer, CombineRequest, DispatchRequest, Options, Shape};
    use crate::{DType, StreamOrder, Tensor, TypedTensor};

    const TOKENS: u64 = 128;
    if !is_there() {
        return;
    }
    let sums = crate::group::run_threads(1, Duration::from_secs(60), |_, group| {
        let device = CudaDevice::open(0)?;
        // SAFETY: a stream of this device that nobody destroys.
        let stream = unsafe { Stream::adopt(&device, green_stream(&device, 8)) }?;
        assert!((8..=16).contains(&stream.multiprocessors()), "{}", stream.multiprocessors());
        let shape = Shape { max_tokens: TOKENS as u32, hidden: 1024, num_topk: 1, num_experts: 8 };
        let options = Options::new(shape).timeout(Duration::from_secs(5));
        let mut buffer = Buffer::new(device, &*group, options)?;
        let mut place = buffer.place(0)?;
        let x = vec![half::bf16::ONE; (TOKENS * 1024) as usize];
        let x = Tensor::from_host(&stream, DType::Bf16, &[TOKENS, 1024], &x)?;
        let ids: Vec<i64> = (0..TOKENS as i64).map(|token| token % 8).collect();
        let topk_idx = TypedTensor::from_host(&stream, &[TOKENS, 1], &ids)?;
        let order = StreamOrder::on(&stream);
        let received = buffer.dispatch(&mut place, DispatchRequest::new(&x, &topk_idx), order)?;
        let rows = received.x.clone();
        buffer.combine(received, CombineRequest::by_row(&rows), order)?.x.to_host::<half::bf16>(&stream)
    });
    assert!(sums.unwrap()[0].iter().all(|&sum| sum == half::bf16::ONE));
}

/// Where there is a GPU, or a virtual one in its place.
#[test]
fn captures_outlast_queries_and_drops_of_their_thread() {
    if !is_there() {
        return;
    }
    let device = CudaDevice::open(0).unwrap();
    let (stream, other) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
    let event = Event::new(&device).unwrap();
    event.record(&other).unwrap();
    let kinds = [MemoryKind::Device, MemoryKind::MappedHost, MemoryKind::SharedHost, MemoryKind::Unpooled];
    let memory = kinds.map(|kind| Memory::alloc(&device, 4096, kind, "test").unwrap());
    let captured = stream.capture(|| {
        assert!(event.wait_timeout(Duration::MAX)? && other.wait_timeout(Duration::MAX)?);
        drop((memory, event, other));
        Ok(())
    });
    captured.unwrap();
}

/// The memory was unmapped while it was zeroed, and the context was lost. As above.
#[test]
fn captures_may_allocate_memory_that_peers_map() {
    if !is_there() {
        return;
    }
    let device = CudaDevice::open(0).unwrap();
    let stream = Stream::new(&device).unwrap();
    let mut memory = None;
    let captured = stream.capture(|| {
        memory = Some(Memory::alloc(&device, 1 << 20, MemoryKind::Shareable, "test")?);
        Ok(())
    });
    captured.unwrap();
    let mut bytes = vec![1; 1 << 20];
    memory.unwrap().read(&stream, 0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
}

/// Each driver takes the other's handle for one of its own: CUDA for an address. As above.
#[test]
fn handles_of_the_other_driver_are_refused() {
    use crate::driver::virt::{VirtConfig, VirtualGpu};
    if !is_there() {
        return;
    }
    let devices = [CudaDevice::open(0).unwrap(), VirtualGpu::new(VirtConfig::default())];
    let [cuda, virt] = devices.map(|device| {
        let event = Event::timed(&device).unwrap();
        let stream = Stream::new(&device).unwrap();
        event.record(&stream).unwrap();
        (stream, event, Memory::alloc(&device, 16, MemoryKind::Device, "test").unwrap())
    });
    for ((stream, end, _), (_, event, memory)) in [(&cuda, &virt), (&virt, &cuda)] {
        for (argument, outcome) in [
            ("event", stream.wait(event)),
            ("stream", event.record(stream)),
            ("stream", memory.write(stream, 0, &[1])),
            ("stream", memory.read(stream, 0, &mut [1])),
            ("end", event.elapsed_ms(end).map(drop)),
        ] {
            let error = outcome.unwrap_err();
            assert!(matches!(&error, Error::Argument { argument: is, .. } if *is == argument), "{error}");
            let text = error.to_string();
            assert!(text.contains("virtual GPU") && text.contains("make it there"), "{text}");
        }
    }
}

/// 48 KiB are for both kinds together, without a request for more. As above.
#[test]
fn kernels_with_static_shared_memory_get_the_dynamic_bytes_they_are_looked_up_for() {
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
    if !is_there() {
        return;
    }
    let device = CudaDevice::open(0).unwrap();
    let stream = Stream::new(&device).unwrap();
    let module = Module::load(&device, STATIC).unwrap();
    let launch = |wanted, shared_bytes| {
        let kernel = module.kernel("static_bytes", wanted).unwrap();
        let config = LaunchConfig { grid: 1, block: 32, shared_bytes, cooperative: false, dependent: false };
        // SAFETY: the kernel has no parameters.
        unsafe { stream.launch(&kernel, &config, &[]) }
    };
    launch(0, 40 << 10).unwrap();
    launch(0, 44 << 10).unwrap_err();
    launch(44 << 10, 44 << 10).unwrap();
    stream.synchronize().unwrap();
    // A later lookup for less lowers nothing.
    launch(0, 44 << 10).unwrap();
    stream.synchronize().unwrap();
    let error = module.kernel("static_byte", 0).unwrap_err().to_string();
    assert!(error.contains("there are: static_bytes") && error.contains("cargo build-ptx"), "{error}");
}

/// Work that the stream had before may still use the memory. As above.
#[test]
fn captures_by_other_code_keep_memory_that_is_dropped() {
    if !is_there() {
        return;
    }
    let device = CudaDevice::open(0).unwrap();
    let stream = Stream::new(&device).unwrap();
    let alloc = || Memory::alloc(&device, 1 << 20, MemoryKind::Device, "test").unwrap();
    let dropped = alloc();
    let address = dropped.ptr();
    let mut graph = std::ptr::null_mut();
    // Relaxed, so that this thread may allocate meanwhile.
    let mode = ffi::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the stream is live.
    unsafe { ffi::cuStreamBeginCapture_v2(stream.raw().0, mode) }.check("cuStreamBeginCapture").unwrap();
    drop(dropped);
    let taken: Vec<_> = (0..4).map(|_| alloc()).collect();
    // SAFETY: as above, and the out pointer is valid.
    unsafe { ffi::cuStreamEndCapture(stream.raw().0, &mut graph) }.check("cuStreamEndCapture").unwrap();
    // SAFETY: the graph is the one just recorded.
    unsafe { ffi::cuGraphDestroy(graph) }.check("cuGraphDestroy").unwrap();
    assert!(taken.iter().all(|memory| memory.ptr() != address));
}

/// Other captures have other numbers. As above.
#[test]
fn streams_that_join_the_capture_of_a_step_are_of_its_buffer() {
    if !is_there() {
        return;
    }
    let device = CudaDevice::open(0).unwrap();
    let [stream, joined, other] = [(); 3].map(|()| Stream::new(&device).unwrap());
    let (fork, join) = (Event::new(&device).unwrap(), Event::new(&device).unwrap());
    let graph = stream.capture_for(Some(7), || {
        fork.record(&stream)?;
        joined.wait(&fork)?;
        assert_eq!([stream.captured_for()?, joined.captured_for()?], [Some(7); 2]);
        let of_others = std::thread::scope(|scope| {
            let capture = || {
                assert_eq!(other.captured_for()?, None);
                other.capture(|| other.captured_for().map(|buffer| assert_eq!(buffer, None)))
            };
            scope.spawn(capture).join().expect("no panic").map(drop)
        });
        join.record(&joined)?;
        stream.wait(&join)?;
        of_others
    });
    graph.unwrap();
    assert_eq!(stream.captured_for().unwrap(), None);
}

//! The shared library, loaded once, and wrappers of its calls for the tests.

use std::ffi::{CString, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use libloading::Library;

/// A result code, and the handle of anything.
pub type Code = i32;
pub type Handle = usize;

pub const INVALID_VALUE: Code = 1;
pub const INVALID_CONTEXT: Code = 201;
pub const NOT_SUPPORTED: Code = 801;
pub const NOT_READY: Code = 600;

/// Kernels with an address `at` as parameter. `add` adds `value` to word `tid` of each of `blocks`
/// rows, `wait` polls word 1 until it is not 0 and copies it to word 0, `far` reads word 0 and
/// stores 7 there, `race` stores in word 0 by all threads and reads it, `has_workspace` stores whether the
/// grid has one. `copy_box` stores the 8 words of a box of a tensor map.
pub const PTX: &str = include_str!("kernels.ptx");

pub fn library_path() -> PathBuf {
    let program = std::env::current_exe().expect("this program has a path");
    program.parent().expect("it lies in a folder").join("libepoxide_vgpu_cuda.so")
}

/// The library under test, where it is not that of virtual GPUs.
pub static OTHER_LIBRARY: OnceLock<PathBuf> = OnceLock::new();

/// The library, initialised with two devices.
pub fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        // SAFETY: all code that runs before the library is loaded reads the environment through
        // the standard library, whose lock this call takes.
        unsafe { std::env::set_var("EPOXIDE_VGPU_DEVICES", "2") };
        // SAFETY: the library's constructors are those of Rust's standard library.
        let library = unsafe { Library::new(OTHER_LIBRARY.get_or_init(library_path)) }
            .expect("cargo has built the shared library");
        // SAFETY: the function has this signature.
        let code =
            unsafe { library.get::<unsafe extern "C" fn(u32) -> Code>(b"cuInit").expect("it has cuInit")(0) };
        assert_eq!(code, 0, "cuInit");
        library
    })
}

/// Calls a function of the library with arguments of exactly its types; gives its code.
macro_rules! cu {
    ($name:ident($($arg:expr => $ty:ty),* $(,)?)) => {{
        let library = $crate::cuda::library();
        // SAFETY: the types are those of the driver API, and pointers are valid for the call.
        unsafe {
            library
                .get::<unsafe extern "C" fn($($ty),*) -> $crate::cuda::Code>(stringify!($name).as_bytes())
                .expect("the library has the function")($($arg),*)
        }
    }};
}
pub(crate) use cu;

/// The same where success is expected.
macro_rules! ok {
    ($name:ident($($args:tt)*)) => {
        assert_eq!($crate::cuda::cu!($name($($args)*)), 0, stringify!($name))
    };
}
pub(crate) use ok;

/// Runs a test in a process of its own, where no other test can be given an address that this one
/// has freed.
/// `true` in that process; `test` is the name with its module.
pub fn alone(test: &str) -> bool {
    const MARK: &str = "EPOXIDE_TEST_ALONE";
    if std::env::var_os(MARK).is_some() {
        return true;
    }
    let program = std::env::current_exe().expect("this program has a path");
    let mut command = std::process::Command::new(program);
    let output = command.args(["--exact", test]).env(MARK, "1").output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{output:?}");
    false
}

/// A context of its own, current on this thread. Faults of one test do not reach another.
pub struct Context(pub Handle);

impl Context {
    pub fn on(device: i32) -> Context {
        let mut context = 0;
        ok!(cuCtxCreate_v2(&mut context => *mut Handle, 0 => u32, device => i32));
        Context(context)
    }

    pub fn make_current(&self) {
        ok!(cuCtxSetCurrent(self.0 => Handle));
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        ok!(cuCtxDestroy_v2(self.0 => Handle));
    }
}

pub fn alloc(words: usize) -> u64 {
    let mut addr = 0;
    ok!(cuMemAlloc_v2(&mut addr => *mut u64, words * 4 => usize));
    addr
}

/// Device memory with these words.
pub fn upload(words: &[u32]) -> u64 {
    let addr = alloc(words.len());
    ok!(cuMemcpyHtoD_v2(addr => u64, words.as_ptr() => *const u32, size_of_val(words) => usize));
    addr
}

pub fn download(addr: u64, words: usize) -> Vec<u32> {
    let mut to = vec![0; words];
    ok!(cuMemcpyDtoH_v2(to.as_mut_ptr() => *mut u32, addr => u64, words * 4 => usize));
    to
}

pub fn stream(flags: u32) -> Handle {
    let mut stream = 0;
    ok!(cuStreamCreate(&mut stream => *mut Handle, flags => u32));
    stream
}

pub fn event() -> Handle {
    let mut event = 0;
    ok!(cuEventCreate(&mut event => *mut Handle, 0 => u32));
    event
}

pub fn record(event: Handle, stream: Handle) {
    ok!(cuEventRecord(event => Handle, stream => Handle));
}

pub fn wait(stream: Handle, event: Handle) {
    ok!(cuStreamWaitEvent(stream => Handle, event => Handle, 0 => u32));
}

/// A host function that takes longer than a call that does not wait for it, and then stores 10 in
/// the word at `data` unless that is null.
unsafe extern "C" fn late_ten(data: *mut c_void) {
    std::thread::sleep(std::time::Duration::from_millis(50));
    if !data.is_null() {
        // SAFETY: the test passes an aligned word that outlives the stream's work.
        unsafe { AtomicU32::from_ptr(data.cast()) }.store(10, Ordering::Release);
    }
}

/// Has a stream call a host function that is late, and stores 10 in a word.
pub fn be_late(stream: Handle, word: *mut u32) {
    ok!(cuLaunchHostFunc(
        stream => Handle, late_ten => unsafe extern "C" fn(*mut c_void), word.cast() => *mut c_void,
    ));
}

/// A module of [`PTX`] in the current context.
pub struct Module(pub Handle);

impl Module {
    pub fn load() -> Module {
        Module::of(PTX)
    }

    /// A module of a text in the current context.
    pub fn of(text: &str) -> Module {
        let text = CString::new(text).expect("no zero inside");
        let mut module = 0;
        ok!(cuModuleLoadData(&mut module => *mut Handle, text.as_ptr() => *const i8));
        Module(module)
    }

    pub fn function(&self, name: &str) -> Handle {
        let name = CString::new(name).expect("no zero inside");
        let mut function = 0;
        ok!(cuModuleGetFunction(&mut function => *mut Handle, self.0 => Handle, name.as_ptr() => *const i8));
        function
    }

    /// The code of a launch with these parameters.
    pub fn try_launch(
        &self,
        name: &str,
        stream: Handle,
        [blocks, threads]: [u32; 2],
        params: &mut [*mut c_void],
    ) -> Code {
        let function = self.function(name);
        cu!(cuLaunchKernel(
            function => Handle, blocks => u32, 1 => u32, 1 => u32, threads => u32, 1 => u32, 1 => u32, 0 => u32,
            stream => Handle, params.as_mut_ptr() => *mut *mut c_void, std::ptr::null_mut() => *mut *mut c_void,
        ))
    }

    /// Launches a kernel whose only parameter is an address.
    pub fn launch_at(&self, name: &str, stream: Handle, shape: [u32; 2], mut at: u64) {
        let mut params = [(&raw mut at).cast()];
        assert_eq!(self.try_launch(name, stream, shape, &mut params), 0, "{name}");
    }

    /// Launches `add`.
    pub fn add(&self, stream: Handle, shape: [u32; 2], mut at: u64, mut value: u32) {
        let mut params = [(&raw mut at).cast(), (&raw mut value).cast()];
        assert_eq!(self.try_launch("add", stream, shape, &mut params), 0, "add");
    }
}

//! Steering the fake libnccl.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::driver::{Device, Stream};
use epoxide::{DType, Tensor};
use epoxide_nccl::{Communicator, Config, Library, UniqueId};
use epoxide_testing::fake_nccl;

/// Long enough for calls that do not hang, on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// A deadline that expires on purpose, before any other event.
pub const SOON: Duration = Duration::from_millis(200);
/// The close timeout where a call of NCCL holds a thread. A quarter of it passes in waiting for
/// that thread; the rest is for NCCL's abort.
pub const HELD: Duration = Duration::from_secs(8);

/// [`Fake::set`]: the function hangs until the communicator is aborted.
pub const HANG: c_int = -1;
/// [`Fake::set`]: the function hangs until [`Fake::release`].
pub const HANG_FOR_GOOD: c_int = -2;
/// `ncclRemoteError`.
pub const REMOTE: c_int = 6;

/// Variant to build: all functions, those of NCCL 2.7, all but one, or all without the symbol that
/// distinguishes the fake from NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    New,
    Old,
    Broken,
    Foreign,
}

/// A fake of this test's own: it shares nothing with those of other tests.
pub struct Fake {
    pub library: Arc<Library>,
    controls: libloading::Library,
    _folder: tempfile::TempDir,
}

/// The file of a version.
fn built(version: Version) -> PathBuf {
    match version {
        Version::New => fake_nccl::built(&[]),
        Version::Old => fake_nccl::built(&["--cfg=old"]),
        Version::Broken => fake_nccl::built(&["--cfg=broken"]),
        Version::Foreign => fake_nccl::built(&["--cfg=foreign"]),
    }
}

/// A copy of a version's file: the loader takes it for another library.
pub fn file(version: Version) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = folder.path().join("libnccl.so.2");
    std::fs::copy(built(version), &file).unwrap();
    (folder, file)
}

impl Fake {
    pub fn new() -> Fake {
        Fake::of(Version::New)
    }

    pub fn of(version: Version) -> Fake {
        let (folder, file) = file(version);
        let library = Library::open(&file).unwrap();
        // SAFETY: loaded just now; its initialisers do nothing.
        let controls = unsafe { libloading::Library::new(&file) }.unwrap();
        Fake { library, controls, _folder: folder }
    }

    fn control<F: Copy>(&self, name: &str) -> F {
        // SAFETY: callers name the type that the function has in fake/lib.rs.
        *unsafe { self.controls.get::<F>(name.as_bytes()) }.unwrap()
    }

    /// Result of a function from now on: a code, [`HANG`] or [`HANG_FOR_GOOD`]; 0 lets it work.
    pub fn set(&self, function: &str, code: c_int) {
        let function = CString::new(function).unwrap();
        let set: unsafe extern "C" fn(*const c_char, c_int) = self.control("fake_set");
        // SAFETY: a NUL-terminated text.
        unsafe { set(function.as_ptr(), code) }
    }

    /// Makes NCCL's threads detect an error, in every communicator.
    pub fn fail_all(&self, code: c_int) {
        let fail: extern "C" fn(c_int) = self.control("fake_fail_all");
        fail(code);
    }

    /// Lets everything return that hangs.
    pub fn release(&self) {
        let release: extern "C" fn() = self.control("fake_release");
        release();
    }

    /// How often a function was called.
    pub fn calls(&self, function: &str) -> u32 {
        let function = CString::new(function).unwrap();
        let calls: unsafe extern "C" fn(*const c_char) -> u32 = self.control("fake_calls");
        // SAFETY: a NUL-terminated text.
        unsafe { calls(function.as_ptr()) }
    }

    /// Waits until a function has been called.
    pub fn await_call(&self, function: &str) {
        let start = Instant::now();
        while self.calls(function) == 0 {
            assert!(start.elapsed() < PATIENCE, "{function} is not called");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Communicators that are there.
    pub fn live(&self) -> u32 {
        let live: extern "C" fn() -> u32 = self.control("fake_live");
        live()
    }

    /// Registrations made and released, and misuse.
    pub fn log(&self) -> Vec<String> {
        let log: extern "C" fn() -> *const c_char = self.control("fake_log");
        // SAFETY: a NUL-terminated text that stays.
        let text = unsafe { CStr::from_ptr(log()) }.to_string_lossy().into_owned();
        text.lines().map(str::to_owned).collect()
    }

    /// Checks that everything was freed, and nothing was misused.
    #[track_caller]
    pub fn assert_clean(&self) {
        let misuse: Vec<String> = self.log().into_iter().filter(|line| line.starts_with("misuse")).collect();
        assert_eq!((self.live(), misuse), (0, vec![]), "communicators left, and misuse");
    }

    pub fn id(&self) -> UniqueId {
        UniqueId::new(&self.library).unwrap()
    }

    /// The only rank of two that joins.
    pub fn alone(&self, config: Config) -> epoxide::Result<Communicator> {
        Communicator::new(&self.library, &device(), &self.id(), 0, 2, config)
    }

    /// A communicator of one rank.
    pub fn single(&self, config: Config) -> Communicator {
        Communicator::new(&self.library, &device(), &self.id(), 0, 1, config).unwrap()
    }

    /// Runs `rank_main` on a thread per rank of a communicator; the results by rank.
    pub fn ranks<T: Send>(
        &self,
        size: u32,
        config: &Config,
        rank_main: impl Fn(Communicator) -> T + Sync,
    ) -> Vec<T> {
        let id = self.id();
        std::thread::scope(|scope| {
            let start = |rank| {
                let (id, rank_main, config) = (&id, &rank_main, config.clone());
                scope.spawn(move || {
                    let made = Communicator::new(&self.library, &device(), id, rank, size, config);
                    rank_main(made.unwrap())
                })
            };
            let threads: Vec<_> = (0..size).map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        // Threads that a test left behind on purpose.
        self.release();
    }
}

pub fn device() -> Device {
    VirtualGpu::new(VirtConfig::default())
}

/// Patient with everything that works.
pub fn patient() -> Config {
    Config { timeout: PATIENCE, close_timeout: PATIENCE, ..Config::named("test") }
}

/// A short timeout, and a long wait for the abort to end.
pub fn impatient() -> Config {
    Config { timeout: SOON, close_timeout: PATIENCE, ..Config::named("test") }
}

/// Returns a communicator of the ranks of `parent` with `config`, whose deadline is meant to
/// expire. Creation has the deadline of `parent`. Collective.
pub fn hurried(parent: &Communicator, config: &Config) -> Communicator {
    parent.split(Some(0), parent.rank() as i32, Some(config.clone())).unwrap().unwrap()
}

/// A stream and a tensor with these values.
pub fn tensor(device: &Device, values: &[f32]) -> (Stream, Tensor<'static>) {
    let stream = Stream::new(device).unwrap();
    let tensor = Tensor::from_host(&stream, DType::F32, &[values.len() as u64], values).unwrap();
    (stream, tensor)
}

/// The reason an error gives, which must be one of a group.
#[track_caller]
pub fn reason(error: &epoxide::Error) -> String {
    match error {
        epoxide::Error::Group { reason, .. } => reason.clone(),
        error => panic!("{error:?}"),
    }
}

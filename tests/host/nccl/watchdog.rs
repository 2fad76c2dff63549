//! The watchdog and its dumps. Each test is alone in its process, because the environment names
//! their files.

use std::io::Write;
use std::time::{Duration, Instant};

use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::group::ReduceOp;
use epoxide::internal::driver::{Executor, Hooks, ManualGpus};
use epoxide_nccl::{Communicator, Config, DEBUG_INFO_FILE, DEBUG_INFO_PIPE, Watchdog};
use epoxide_testing::alone;

use super::fake::{Fake, HELD, PATIENCE, REMOTE, SOON, hurried, patient, reason, tensor};

fn watched(timeout: Duration) -> Config {
    let watchdog = Some(Watchdog { interval: Duration::from_millis(10) });
    Config { timeout, watchdog, ..patient() }
}

/// In the process that has the variables: `test`. Elsewhere starts that process, and gives what is
/// to be found in the folder.
fn with_folder(path: &str, test: impl FnOnce(&std::path::Path)) {
    const FOLDER: &str = "NCCL_TEST_FOLDER";
    if let Some(folder) = std::env::var_os(FOLDER) {
        return test(folder.as_ref());
    }
    let folder = tempfile::tempdir().unwrap();
    let ended = alone::one_test(path)
        .env(FOLDER, folder.path())
        .env(DEBUG_INFO_FILE, folder.path().join("info_"))
        .env(DEBUG_INFO_PIPE, folder.path().join("ask_"))
        .env("EPOXIDE_FLIGHT_RECORDER", folder.path().join("flight"))
        .output()
        .unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
}

fn dump(folder: &std::path::Path) -> serde_json::Value {
    let file = folder.join("info_0");
    let start = Instant::now();
    loop {
        // The file may not exist yet, or be incomplete.
        let text = std::fs::read(&file).unwrap_or_default();
        if let Ok(dump) = serde_json::from_slice(&text) {
            std::fs::remove_file(&file).unwrap();
            return dump;
        }
        assert!(start.elapsed() < PATIENCE, "no dump");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn aborts_operations_that_hang_on_the_device_and_dumps() {
    with_folder("nccl::watchdog::aborts_operations_that_hang_on_the_device_and_dumps", |folder| {
        let fake = Fake::new();
        // A device that runs only when driven, so that work in its streams stays in flight.
        let machine = ManualGpus::new(1);
        let config = VirtConfig {
            hooks: Hooks { executor: Executor::Manual(machine.clone()), ..Hooks::default() },
            ..VirtConfig::default()
        };
        let device = VirtualGpu::new(config);
        let parent = Communicator::new(&fake.library, &device, &fake.id(), 0, 1, patient()).unwrap();
        // The first operation has to end before that.
        let communicator = hurried(&parent, &watched(Duration::from_secs(3)));
        let (stream, data) = tensor(&device, &[1.0]);
        let done = communicator.all_reduce(&data, ReduceOp::Sum, &stream).unwrap();
        stream.synchronize().unwrap();
        done.wait().unwrap();
        // No thread waits for this operation, and the device does not reach the work in front of
        // its event.
        // SAFETY: the tensor's four bytes, which stay until the stream is synchronised.
        unsafe { stream.fill(data.ptr(), 0, 4) }.unwrap();
        let work = communicator.all_reduce(&data, ReduceOp::Sum, &stream).unwrap();

        let dump = dump(folder);
        assert!(dump["reason"].as_str().unwrap().contains("has not ended within 3s"), "{dump}");
        assert_eq!((&dump["rank"], &dump["size"]), (&0.into(), &1.into()));
        assert_eq!(dump["operations"][0]["state"], "completed");
        assert_eq!(dump["operations"][1]["state"], "started");
        assert_eq!(dump["operations"][1]["operation"], "all_reduce");
        assert_eq!(dump["operations"][1]["reduction"], "f32 sum");
        assert_eq!(dump["nccl"]["operations_under_way"], "all_reduce #1");
        let error = work.wait().unwrap_err();
        assert!(reason(&error).contains("has not ended within 3s"), "{error}");
        assert!(folder.join("flight.test.rank0.json").exists());
        stream.synchronize().unwrap();
        // A waiting thread gets the reason before NCCL has been called; the drop waits for the
        // call.
        drop(communicator);
        assert_eq!(fake.calls("ncclCommAbort"), 1);
        drop(parent);
        fake.assert_clean();
    });
}

/// NCCL's kernels leave at an abort, and the events behind them are done.
#[test]
fn an_operation_that_an_abort_ends_has_no_result() {
    let fake = Fake::new();
    let machine = ManualGpus::new(1);
    let hooks = Hooks { executor: Executor::Manual(machine), ..Hooks::default() };
    let device = VirtualGpu::new(VirtConfig { hooks, ..VirtConfig::default() });
    let communicator = Communicator::new(&fake.library, &device, &fake.id(), 0, 1, patient()).unwrap();
    let (stream, data) = tensor(&device, &[1.0]);
    // The device does not reach the work in front of the operation's event before the abort.
    // SAFETY: the tensor's four bytes, which stay until the stream is synchronised.
    unsafe { stream.fill(data.ptr(), 0, 4) }.unwrap();
    let work = communicator.all_reduce(&data, ReduceOp::Sum, &stream).unwrap();
    communicator.abort("the job ends").unwrap();
    stream.synchronize().unwrap();
    let error = work.wait().unwrap_err();
    assert!(reason(&error).contains("the job ends"), "{error}");
    drop(communicator);
    fake.assert_clean();
}

#[test]
fn aborts_operations_that_hang_in_a_call_of_nccl() {
    with_folder("nccl::watchdog::aborts_operations_that_hang_in_a_call_of_nccl", |folder| {
        let fake = Fake::new();
        let config = Config { close_timeout: HELD, blocking: true, ..watched(SOON) };
        let parent = fake.single(patient());
        let communicator = hurried(&parent, &config);
        let (stream, data) = tensor(communicator.device(), &[1.0]);
        fake.set("ncclAllReduce", super::fake::HANG);
        let error = communicator.all_reduce(&data, ReduceOp::Sum, &stream).unwrap_err();
        assert!(reason(&error).contains("has not ended within 200ms"), "{error}");
        assert!(dump(folder)["reason"].as_str().unwrap().contains("all_reduce"));
        drop((communicator, parent));
        fake.assert_clean();
    });
}

#[test]
fn gives_up_when_nccls_threads_fail_and_dumps_when_asked() {
    with_folder("nccl::watchdog::gives_up_when_nccls_threads_fail_and_dumps_when_asked", |folder| {
        let fake = Fake::new();
        let communicator = fake.single(watched(PATIENCE));
        let pipe = folder.join("ask_0.pipe");
        let start = Instant::now();
        while !pipe.exists() {
            assert!(start.elapsed() < PATIENCE, "no pipe");
            std::thread::sleep(Duration::from_millis(1));
        }
        for _ in 0..2 {
            std::fs::OpenOptions::new().write(true).open(&pipe).unwrap().write_all(b"1").unwrap();
            assert_eq!(dump(folder)["nccl"]["state"], "ready");
        }
        communicator.check().unwrap();
        fake.fail_all(REMOTE);
        let reported = dump(folder);
        assert!(reported["reason"].as_str().unwrap().contains("remote process exited"), "{reported}");
        assert!(reason(&communicator.check().unwrap_err()).contains("remote process exited"));
        drop(communicator);
        assert!(!pipe.exists());
        fake.assert_clean();
    });
}

//! A program in C, linked against the library as against a driver.

use std::mem::offset_of;
use std::path::Path;
use std::process::{Command, Output};

use epoxide_vgpu_cuda::run::{VgpuArg, VgpuOptions};

use crate::cuda::{PTX, library_path};

/// Compiles `source`.c into the program `program` of a folder where the library is `libcuda.so.1`.
fn compile(folder: &Path, source: &str) {
    for name in ["libcuda.so.1", "libcuda.so"] {
        std::os::unix::fs::symlink(library_path(), folder.join(name)).unwrap();
    }
    std::fs::write(folder.join("kernels.ptx"), PTX).unwrap();
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new("cc");
    cc.args(["-std=c99", "-Wall", "-Werror", "-o", "program", "-I"]).arg(own.join("include"));
    cc.arg(own.join("tests/driver").join(source).with_extension("c")).args(["-L.", "-lcuda"]);
    cc.current_dir(folder);
    let compiled = cc.output().expect("the C compiler that links Rust programs");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}

fn run(folder: &Path, what: &str, check: &str) -> Output {
    Command::new(folder.join("program"))
        .args([&folder.join("kernels.ptx"), Path::new(what)])
        .env("LD_LIBRARY_PATH", folder)
        .env("EPOXIDE_VGPU_CHECK", check)
        .env_remove("EPOXIDE_VGPU_DEVICES")
        .output()
        .unwrap()
}

#[test]
fn a_program_in_c_runs_and_its_race_is_reported_in_check_mode() {
    let folder = tempfile::Builder::new().prefix("libcuda").tempdir().unwrap();
    compile(folder.path(), "program");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    for check in ["0", "1"] {
        let ran = run(folder.path(), "add", check);
        assert_eq!((text(&ran.stdout), text(&ran.stderr)), ("ok\n".to_owned(), String::new()));
    }
    let ran = run(folder.path(), "race", "0");
    assert_eq!((text(&ran.stdout), text(&ran.stderr)), ("0\n".to_owned(), String::new()));
    let ran = run(folder.path(), "race", "1");
    assert_eq!(text(&ran.stdout), "719\n", "CUDA_ERROR_LAUNCH_FAILED");
    let report = text(&ran.stderr);
    assert!(report.contains("data race") && report.contains("'allocation 1' + 0x0"), "{report}");
}

/// The thread's local data is dropped by then.
#[test]
fn an_exit_handler_may_call_the_library() {
    let folder = tempfile::Builder::new().prefix("libcuda").tempdir().unwrap();
    compile(folder.path(), "program");
    for check in ["0", "1"] {
        let ran = run(folder.path(), "exit", check);
        let report = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(String::from_utf8_lossy(&ran.stdout), "0 1 0\n", "{check}: {report}");
        assert!(ran.status.success(), "{check}: {report}");
    }
}

#[test]
fn a_wrong_variable_is_named() {
    let folder = tempfile::Builder::new().prefix("libcuda").tempdir().unwrap();
    compile(folder.path(), "program");
    let ran = run(folder.path(), "add", "yes");
    assert_eq!(String::from_utf8_lossy(&ran.stdout), "cuInit(0): 1\n");
    let report = String::from_utf8_lossy(&ran.stderr);
    assert!(report.contains("EPOXIDE_VGPU_CHECK is 'yes': it must be a number from 0 to 1"), "{report}");
}

#[test]
fn the_header_has_the_layout_of_the_library_and_its_function_runs_a_kernel() {
    let folder = tempfile::Builder::new().prefix("libcuda").tempdir().unwrap();
    compile(folder.path(), "run");
    let ran = Command::new(folder.path().join("program"))
        .arg(folder.path().join("kernels.ptx"))
        .env("LD_LIBRARY_PATH", folder.path())
        .output()
        .unwrap();
    let out = String::from_utf8_lossy(&ran.stdout);
    let mut lines = out.lines();
    let arg = [
        size_of::<VgpuArg>(),
        offset_of!(VgpuArg, data),
        offset_of!(VgpuArg, bytes),
        offset_of!(VgpuArg, kind),
    ];
    let options = [
        size_of::<VgpuOptions>(),
        offset_of!(VgpuOptions, seed),
        offset_of!(VgpuOptions, max_warp_instructions),
        offset_of!(VgpuOptions, check),
    ];
    for expected in [arg, options] {
        let expected: Vec<String> = expected.iter().map(usize::to_string).collect();
        assert_eq!(lines.next(), Some(expected.join(" ").as_str()), "{out}");
    }
    assert_eq!(lines.next(), Some("4"), "VGPU_FAULT: {out}");
    assert!(out.contains("data race") && out.contains("'at' + 0x0"), "{out}");
    let (_, out) = out.split_once("\n1\n0 data of parameter 1 is null\n").expect("VGPU_BAD_ARGUMENT");
    let (shared, out) = out.split_at(out.match_indices('\n').nth(7).expect("eight lines").0 + 1);
    assert_eq!(
        shared,
        "1 1: 0 1 2 3 4\n1 2: 0 2 4 6 8\n1 3: 0 2 4 6 8\n2 1: 0 2 4 6 8\n2 3: 0 2 4 6 8\n3 1: 0 2 4 6 8\n\
         3 2: 0 2 4 6 8\n3 3: 0 2 4 6 8\n"
    );
    let out = out.strip_prefix(
        "1\ndata of parameters 0 and 1 overlap, and the kernel may write one of them: give both the same data \
         and bytes, or memory of their own\n0\n4\n",
    );
    let large = |bytes: u64| {
        format!("3 parameter 0 has {bytes} bytes of data: the host cannot allocate as many\n").repeat(3)
    };
    let count = "1 kernel 'race' takes 1 arguments, 1152921504606846976 were given";
    let (out, rest) = out.expect("the overlap is an error").split_at(large(1 << 62).len() * 2);
    assert_eq!(out, large(1 << 62) + &large(1 << 63));
    assert!(rest.starts_with(count), "{rest}");
}

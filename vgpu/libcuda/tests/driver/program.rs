//! A program in C, linked against the library as against a driver.

use std::path::Path;
use std::process::{Command, Output};

use crate::cuda::{PTX, library_path};

/// Compiles `program.c` into a folder where the library is `libcuda.so.1`.
fn compile(folder: &Path) {
    for name in ["libcuda.so.1", "libcuda.so"] {
        std::os::unix::fs::symlink(library_path(), folder.join(name)).unwrap();
    }
    std::fs::write(folder.join("kernels.ptx"), PTX).unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/driver/program.c");
    let mut cc = Command::new("cc");
    cc.args(["-std=c99", "-Wall", "-Werror", "-o", "program", source, "-L.", "-lcuda"]).current_dir(folder);
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
    compile(folder.path());
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

#[test]
fn a_wrong_variable_is_named() {
    let folder = tempfile::Builder::new().prefix("libcuda").tempdir().unwrap();
    compile(folder.path());
    let ran = run(folder.path(), "add", "yes");
    assert_eq!(String::from_utf8_lossy(&ran.stdout), "cuInit(0): 1\n");
    let report = String::from_utf8_lossy(&ran.stderr);
    assert!(report.contains("EPOXIDE_VGPU_CHECK is 'yes': it must be a number from 0 to 1"), "{report}");
}

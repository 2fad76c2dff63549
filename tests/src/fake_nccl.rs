//! The fake libnccl of the tests (`tests/host/nccl/fake/lib.rs`). The first test process compiles
//! it, and later ones use the file.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// Returns the library compiled with `flags`. The file lies beside the test binary, and its name
/// depends on the source and the flags.
///
/// # Panics
/// Where it does not compile.
pub fn built(flags: &[&str]) -> PathBuf {
    // Processes may compile it twice at the same time; threads of one process need not.
    static COMPILING: Mutex<()> = Mutex::new(());
    let _compiling = COMPILING.lock().unwrap_or_else(PoisonError::into_inner);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("host/nccl/fake/lib.rs");
    let mut hasher = DefaultHasher::new();
    std::fs::read(&source).expect("the source of the fake libnccl").hash(&mut hasher);
    flags.hash(&mut hasher);
    let this = std::env::current_exe().expect("this test binary");
    let file = this.with_file_name(format!("libnccl-fake-{:016x}.so", hasher.finish()));
    if !file.exists() {
        let unfinished = file.with_extension(std::process::id().to_string());
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let made = Command::new(rustc)
            .args(["--edition=2024", "--crate-type=cdylib", "--crate-name=nccl", "-Copt-level=1"])
            .arg("--check-cfg=cfg(old, broken, foreign, wrong, values(none(), \"ncclRecv\", \"ncclAllGather\", \"ncclReduceScatter\"))")
            .args(flags)
            .arg("-o")
            .args([&unfinished, &source])
            .output()
            .expect("rustc runs");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        std::fs::rename(unfinished, &file).expect("the fake libnccl gets its name");
    }
    file
}

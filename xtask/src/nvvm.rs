//! The optional back end: Rust-CUDA's `rustc_codegen_nvvm`.
//!
//! It is not published as a crate. Who wants it builds it from its repository, outside this workspace, and names the library.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::backend::Arch;
use crate::job::{Job, TARGET};
use crate::sources;
use crate::workspace::{Workspace, capture, env_path};

/// The toolchain that the back end is written for.
const TOOLCHAIN: &str = "nightly-2026-04-02";

/// Names the back end's library.
const BACKEND_VAR: &str = "RUSTC_CODEGEN_NVVM";

/// Flags that decide what the PTX says, without the back end's own path and `-arch`.
const CODEGEN: [&str; 7] = [
    "--cfg=epoxide_backend=\"nvvm\"",
    "-Zunstable-options",
    "-Zsaturating_float_casts=false",
    "-Cpanic=immediate-abort",
    "-Zcrate-attr=feature(register_tool)",
    "-Zcrate-attr=register_tool(nvvm_internal)",
    "-Zcrate-attr=no_std",
];

/// What the back end consists of.
pub struct Parts {
    /// `librustc_codegen_nvvm.so`.
    codegen: PathBuf,
    /// The CUDA 12 root with libNVVM.
    cuda: PathBuf,
}

/// Parts that this machine lacks, each with how to get it.
#[derive(Debug)]
pub struct MissingParts(Vec<String>);

impl fmt::Display for MissingParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the nvvm back end is not complete on this machine. Missing:")?;
        self.0.iter().try_for_each(|part| write!(f, "\n- {part}"))
    }
}

impl std::error::Error for MissingParts {}

impl Parts {
    /// Looks for all parts; the error lists every one that is missing.
    pub fn find() -> Result<Self, MissingParts> {
        let mut missing = Vec::new();
        missing.extend(toolchain_fault());
        let codegen = env_path(BACKEND_VAR).filter(|file| file.is_file());
        match &codegen {
            Some(file) => missing.extend(llvm_fault(file)),
            None => missing.push(format!(
                "rustc_codegen_nvvm: clone the Rust-CUDA repository elsewhere, `cargo build -p rustc_codegen_nvvm --release` there, \
                 set {BACKEND_VAR} to the librustc_codegen_nvvm.so it leaves.\n  \
                 That build needs LLVM 7 with headers (LLVM_CONFIG=llvm-config-7, LLVM_LINK_SHARED=1)"
            )),
        }
        let cuda = env_path("CUDA_PATH").filter(|root| has_libnvvm(root));
        if cuda.is_none() {
            missing.push(
                "libNVVM: set CUDA_PATH to a CUDA 12 toolkit, one that holds nvvm/lib64/libnvvm.so and nvvm/libdevice".to_owned(),
            );
        }
        match (codegen, cuda) {
            (Some(codegen), Some(cuda)) if missing.is_empty() => Ok(Self { codegen, cuda }),
            _ => Err(MissingParts(missing)),
        }
    }
}

/// The flags that the PTX header names.
pub fn codegen_flags(arch: &Arch) -> Vec<String> {
    let llvm = format!("-Cllvm-args=-arch={} --override-libm", arch.compute());
    CODEGEN.map(str::to_owned).into_iter().chain([llvm]).collect()
}

/// The build. Without `parts`, names in angle brackets stand for what is missing.
pub fn command(ws: &Workspace, job: &Job, parts: Option<&Parts>) -> Command {
    let codegen =
        parts.map_or_else(|| format!("<{BACKEND_VAR}>"), |parts| parts.codegen.display().to_string());
    let cuda = parts.map_or_else(|| "<CUDA_PATH>".into(), |parts| parts.cuda.clone());
    let mut flags = vec![format!("-Zcodegen-backend={codegen}")];
    flags.extend(codegen_flags(&job.arch));
    // rustup's proxy, because the back end works with one toolchain only, the whole of it.
    let mut command = Command::new("rustup");
    for (key, value) in ws.cargo().get_envs() {
        match value {
            Some(value) => command.env(key, value),
            None => command.env_remove(key),
        };
    }
    command
        .current_dir(&ws.root)
        .env("CARGO_FEATURE_NO_F16_F128", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
        .env("CARGO_TARGET_DIR", job.target_dir(ws))
        .env("CUDA_PATH", cuda)
        .args(["run", TOOLCHAIN, "cargo", "build", "--package", sources::PACKAGE, "--lib", "--release"])
        .args(["--config", "profile.release.debug=0", "-Zbuild-std=core,alloc", "--target", TARGET]);
    command
}

/// The file that the build leaves.
pub fn product(ws: &Workspace, job: &Job) -> PathBuf {
    job.target_dir(ws).join(TARGET).join("release/epoxide_gpu.ptx")
}

/// What the back end's rustc says to `-V`.
pub fn compiler_version() -> Result<String> {
    capture(Command::new("rustup").args(["run", TOOLCHAIN, "rustc", "-V"]).env_remove("RUSTUP_TOOLCHAIN"))
}

fn toolchain_fault() -> Option<String> {
    let sysroot = capture(
        Command::new("rustup")
            .args(["run", TOOLCHAIN, "rustc", "--print", "sysroot"])
            .env_remove("RUSTUP_TOOLCHAIN"),
    );
    let has_source =
        |root: &String| Path::new(root).join("lib/rustlib/src/rust/library/core/Cargo.toml").is_file();
    if sysroot.as_ref().is_ok_and(has_source) {
        return None;
    }
    Some(format!(
        "the toolchain: `rustup toolchain install {TOOLCHAIN} --component rust-src,rustc-dev,llvm-tools`"
    ))
}

/// The back end loads LLVM 7 when it starts.
fn llvm_fault(codegen: &Path) -> Option<String> {
    let libraries = capture(Command::new("ldd").arg(codegen)).ok()?;
    let missing = libraries.lines().any(|line| line.contains("libLLVM") && line.contains("not found"));
    missing.then(|| {
        "LLVM 7's shared library, which rustc_codegen_nvvm loads: put the folder of libLLVM-7 on LD_LIBRARY_PATH \
         (Ubuntu 20.04's libllvm7, unpacked, works)"
            .to_owned()
    })
}

fn has_libnvvm(root: &Path) -> bool {
    ["libnvvm.so", "libnvvm.so.4"].iter().any(|file| root.join("nvvm/lib64").join(file).exists())
        && root.join("nvvm/libdevice/libdevice.10.bc").is_file()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_shows_what_is_missing() {
        let ws = Workspace::find().unwrap();
        let job = Job::new(&ws, crate::backend::Backend::Nvvm, "sm_90".parse().unwrap(), None);
        let line = crate::workspace::describe(&command(&ws, &job, None));
        assert!(line.contains("-Zcodegen-backend=<RUSTC_CODEGEN_NVVM>"), "{line}");
        assert!(line.contains("-arch=compute_90 --override-libm"), "{line}");
        assert!(line.contains("-Zbuild-std=core,alloc"), "{line}");
    }
}

//! The optional back end: Rust-CUDA's `rustc_codegen_nvvm`.
//!
//! It is not published as a crate that a current rustc compiles. [`fetch()`] builds it from its
//! repository under `target/nvvm`; users with a build of their own name the library.

mod fetch;
mod parts;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use self::parts::BACKEND_VAR;
use crate::backend::Arch;
use crate::job::{Job, TARGET};
use crate::workspace::{self, Workspace, capture};

pub use fetch::fetch;
pub use parts::{MissingParts, Parts};

/// Flags that decide what the PTX says, without the back end's own path and `-arch`.
const CODEGEN: [&str; 8] = [
    "--cfg=epoxide_backend=\"nvvm\"",
    "-Zunstable-options",
    "-Zsaturating_float_casts=false",
    "-Cpanic=immediate-abort",
    "-Zcrate-attr=feature(register_tool)",
    "-Zcrate-attr=register_tool(nvvm_internal)",
    "-Zcrate-attr=no_std",
    // Jump threading duplicates block barriers into divergent branches.
    "-Zmir-enable-passes=-JumpThreading",
];

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
    let mut command = rustup_run(ws);
    command
        .current_dir(&ws.root)
        .env("CARGO_FEATURE_NO_F16_F128", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
        .env("CARGO_TARGET_DIR", job.target_dir(ws))
        .env("CUDA_PATH", cuda)
        .args(["cargo", "rustc", "--package", &job.kernels.package, "--lib", "--release"])
        .args(["--config", "profile.release.debug=0", "-Zbuild-std=core,alloc", "--target", TARGET])
        .args(["--crate-type", "cdylib", "--", "-Zcrate-attr=feature(asm_experimental_arch)"]);
    if let Some(parts) = parts {
        command.env("LD_LIBRARY_PATH", parts::library_path(&parts.libraries));
    }
    command
}

/// The file that the build leaves.
pub fn product(ws: &Workspace, job: &Job) -> PathBuf {
    job.target_dir(ws).join(TARGET).join(format!("release/{}.ptx", job.kernels.library))
}

/// The toolchain that the back end is written for.
const TOOLCHAIN: &str = "nightly-2026-04-02";

/// rustup's proxy, because the back end works with one toolchain only, the whole of it; without the
/// settings of the cargo that runs us.
fn rustup_run(ws: &Workspace) -> Command {
    let mut command = Command::new("rustup");
    for (key, value) in ws.cargo().get_envs() {
        match value {
            Some(value) => command.env(key, value),
            None => command.env_remove(key),
        };
    }
    command.args(["run", TOOLCHAIN]);
    command
}

/// Output of `-V` of the back end's rustc.
pub fn compiler_version() -> Result<String> {
    capture(Command::new("rustup").args(["run", TOOLCHAIN, "rustc", "-V"]).env_remove("RUSTUP_TOOLCHAIN"))
}

/// Whether that toolchain is installed, with the components that the back end takes.
fn has_toolchain() -> bool {
    let sysroot = capture(
        Command::new("rustup")
            .args(["run", TOOLCHAIN, "rustc", "--print", "sysroot"])
            .env_remove("RUSTUP_TOOLCHAIN"),
    );
    let Ok(sysroot) = sysroot else { return false };
    let rustlib = Path::new(&sysroot).join("lib/rustlib");
    // The compiler's own crates are what rustc-dev brings.
    let compiler = rustlib.join(format!("{}-unknown-linux-gnu/lib", std::env::consts::ARCH));
    let has_compiler = workspace::files(&compiler, "rmeta").is_ok_and(|files| {
        files.iter().any(|file| {
            file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("librustc_middle"))
        })
    });
    rustlib.join("src/rust/library/core/Cargo.toml").is_file() && has_compiler
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job() -> Job {
        let kernels = crate::kernels::Kernels {
            package: "k".into(),
            library: "k".into(),
            dir: "/w/k".into(),
            stem: "k".into(),
            arch: "sm_90".parse().unwrap(),
        };
        Job::new(&Workspace::at("/w"), kernels, "cargo build-ptx", crate::backend::Backend::Nvvm, None, None)
    }

    #[test]
    fn the_command_shows_what_is_missing() {
        let (ws, job) = (Workspace::at("/w"), job());
        let line = crate::workspace::describe(&command(&ws, &job, None));
        assert!(line.contains("-Zcodegen-backend=<RUSTC_CODEGEN_NVVM>"), "{line}");
        assert!(line.contains("-arch=compute_90 --override-libm"), "{line}");
        assert!(line.contains("-Zmir-enable-passes=-JumpThreading"), "{line}");
        assert!(line.contains("-Zbuild-std=core,alloc"), "{line}");
    }

    #[test]
    fn the_command_finds_what_the_back_end_loads() {
        let (ws, job) = (Workspace::at("/w"), job());
        let parts = Parts {
            codegen: "/b/librustc_codegen_nvvm.so".into(),
            cuda: "/cuda".into(),
            libraries: vec!["/cuda/nvvm/lib64".into(), "/llvm".into()],
        };
        let line = crate::workspace::describe(&command(&ws, &job, Some(&parts)));
        assert!(line.contains("LD_LIBRARY_PATH=/cuda/nvvm/lib64:/llvm"), "{line}");
        assert!(line.contains("CUDA_PATH=/cuda "), "{line}");
        assert!(line.contains("-Zcodegen-backend=/b/librustc_codegen_nvvm.so"), "{line}");
    }
}

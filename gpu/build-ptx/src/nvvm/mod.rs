//! The optional back end: Rust-CUDA's `rustc_codegen_nvvm`.
//!
//! It is not published as a crate that a current rustc compiles. [`fetch()`] builds it from its
//! repository under `target/nvvm`; users with a build of their own name the library.

mod fetch;
mod parts;
mod toolchain;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use self::parts::BACKEND_VAR;
use crate::build::profile;
use crate::job::{Job, TARGET};
use crate::workspace::Workspace;

pub use fetch::fetch;
pub use parts::{MissingParts, Parts};
pub use toolchain::Toolchain;

/// Flags that determine the PTX, without the back end's own path and those of [`codegen_flags`].
const CODEGEN: [&str; 7] = [
    "--cfg=epoxide_backend=\"nvvm\"",
    "-Zunstable-options",
    "-Zsaturating_float_casts=false",
    "-Zcrate-attr=feature(register_tool)",
    "-Zcrate-attr=register_tool(nvvm_internal)",
    "-Zcrate-attr=no_std",
    // Jump threading duplicates block barriers into divergent branches.
    "-Zmir-enable-passes=-JumpThreading",
];

/// Settings of the release profile, which override the workspace's. Below level 2 rustc inlines
/// nothing that could prove a divisor or an index, the back end cannot link incremental builds, and
/// checks of overflow would be traps in kernels.
pub(crate) const PROFILE: [&str; 8] = [
    "opt-level=3",
    "lto='off'",
    "codegen-units=1",
    "debug=0",
    "incremental=false",
    "overflow-checks=false",
    "debug-assertions=false",
    "strip='none'",
];

/// The flags that the PTX header names.
///
/// `-fma=0` keeps libNVVM from fusing a multiplication and an addition: kernels round as the host
/// does.
pub fn codegen_flags(ws: &Workspace, job: &Job) -> Vec<String> {
    let llvm = format!("-Cllvm-args=-arch={} --override-libm -fma=0", job.arch.compute());
    let panic = Toolchain::of(ws).panic_flag().map(str::to_owned);
    CODEGEN.map(str::to_owned).into_iter().chain(panic).chain([llvm]).collect()
}

/// The build, of these packages. Without `parts`, names in angle brackets stand for missing ones.
pub fn command(ws: &Workspace, job: &Job, parts: Option<&Parts>, packages: &BTreeSet<String>) -> Command {
    let codegen =
        parts.map_or_else(|| format!("<{BACKEND_VAR}>"), |parts| parts.codegen.display().to_string());
    let cuda = parts.map_or_else(|| "<CUDA_PATH>".into(), |parts| parts.cuda.clone());
    let mut flags = vec![format!("-Zcodegen-backend={codegen}")];
    flags.extend(codegen_flags(ws, job));
    let toolchain = Toolchain::of(ws);
    let mut command = toolchain.run(ws);
    command
        .current_dir(&ws.root)
        .env("CARGO_FEATURE_NO_F16_F128", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
        .env("CARGO_TARGET_DIR", job.target_dir(ws))
        .env("CARGO_BUILD_BUILD_DIR", job.target_dir(ws))
        .env("CARGO_BUILD_DEP_INFO_BASEDIR", &ws.root)
        .env("CUDA_PATH", cuda)
        .args(["cargo", "rustc", "--package", &job.kernels.package, "--lib", "--release"])
        .args(profile("release", &PROFILE, packages).iter().flat_map(|setting| ["--config", setting]))
        .args(["-Zbuild-std=core,alloc", "--target", TARGET])
        .args(toolchain.build_std_features())
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
        let line = crate::workspace::describe(&command(&ws, &job, None, &BTreeSet::new()));
        assert!(line.contains("-Zcodegen-backend=<RUSTC_CODEGEN_NVVM>"), "{line}");
        assert!(line.contains("-arch=compute_90 --override-libm -fma=0"), "{line}");
        assert!(line.contains("--config profile.release.opt-level=3"), "{line}");
        assert!(line.contains("-Cpanic=immediate-abort"), "{line}");
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
        let line =
            crate::workspace::describe(&command(&ws, &job, Some(&parts), &BTreeSet::from(["k".to_owned()])));
        assert!(line.contains("--config profile.release.package.k.overflow-checks=false"), "{line}");
        assert!(line.contains("LD_LIBRARY_PATH=/cuda/nvvm/lib64:/llvm"), "{line}");
        assert!(line.contains("CUDA_PATH=/cuda "), "{line}");
        assert!(line.contains("-Zcodegen-backend=/b/librustc_codegen_nvvm.so"), "{line}");
    }
}

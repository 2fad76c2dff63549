//! The one toolchain that the back end works with, by rustup.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::workspace::{self, Workspace, capture};

/// The toolchain that the back end is written for.
pub const TOOLCHAIN: &str = "nightly-2026-04-02";

/// rustup's proxy, because the back end works with one toolchain only, the whole of it; without the
/// settings of the cargo that runs us.
pub fn rustup_run(ws: &Workspace) -> Command {
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
pub fn has_toolchain() -> bool {
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

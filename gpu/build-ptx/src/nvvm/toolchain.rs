//! The nightly that the back end is written for, the whole of it: the back end is a part of rustc.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::parts;
use crate::workspace::{self, Workspace, capture};

/// The nightly of the commit that [`super::fetch()`] builds.
pub const PINNED: &str = "nightly-2026-04-02";

/// The first nightly in which a panic that aborts at once is a strategy of rustc's. Before it was a
/// feature of the standard library.
const FIRST_IMMEDIATE_ABORT: &str = "nightly-2025-09-23";

/// A toolchain by rustup's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toolchain(String);

impl Toolchain {
    /// The toolchain of the back end's source under `target/nvvm`, which may be another commit than
    /// the pinned one; without source there, the pinned one.
    pub fn of(ws: &Workspace) -> Self {
        let file = workspace::read(&parts::source(ws).join("rust-toolchain.toml"));
        Self(file.ok().and_then(|text| channel(&text)).unwrap_or_else(|| PINNED.to_owned()))
    }

    /// rustup's name.
    pub fn name(&self) -> &str {
        &self.0
    }

    /// The flag of rustc that turns a panic into `trap`, where rustc has it. Otherwise
    /// [`build_std_features`](Self::build_std_features) does.
    pub fn panic_flag(&self) -> Option<&'static str> {
        self.has_immediate_abort().then_some("-Cpanic=immediate-abort")
    }

    /// The flag of cargo that turns a panic into `trap`, for older nightlies.
    pub fn build_std_features(&self) -> Option<&'static str> {
        (!self.has_immediate_abort()).then_some("-Zbuild-std-features=panic_immediate_abort")
    }

    /// Dates in names compare as text; a toolchain without one counts as new.
    fn has_immediate_abort(&self) -> bool {
        !self.0.starts_with("nightly-2") || self.0.as_str() >= FIRST_IMMEDIATE_ABORT
    }

    /// rustup's proxy, without the settings of the cargo that runs us.
    pub fn run(&self, ws: &Workspace) -> Command {
        let mut command = Command::new("rustup");
        for (key, value) in ws.cargo().get_envs() {
            match value {
                Some(value) => command.env(key, value),
                None => command.env_remove(key),
            };
        }
        command.args(["run", &self.0]);
        command
    }

    /// Output of `-V` of its rustc.
    pub fn version(&self) -> Result<String> {
        self.ask(&["-V"])
    }

    /// Whether it is installed, with the components that the back end needs.
    pub fn is_complete(&self) -> bool {
        let Ok(sysroot) = self.ask(&["--print", "sysroot"]) else { return false };
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

    fn ask(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new("rustup");
        command.args(["run", &self.0, "rustc"]).args(arguments).env_remove("RUSTUP_TOOLCHAIN");
        capture(&mut command)
    }
}

/// The channel in a `rust-toolchain.toml`.
fn channel(text: &str) -> Option<String> {
    let value =
        text.lines().find_map(|line| line.trim().strip_prefix("channel")?.trim().strip_prefix('='))?;
    Some(value.trim().trim_matches('"').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_names_its_toolchain() {
        let root = tempfile::tempdir().unwrap();
        let ws = Workspace::at(root.path());
        assert_eq!(Toolchain::of(&ws).name(), PINNED);
        let file = parts::source(&ws).join("rust-toolchain.toml");
        workspace::write(&file, "[toolchain]\nchannel = \"nightly-2025-06-23\"\ncomponents = []\n").unwrap();
        assert_eq!(Toolchain::of(&ws).name(), "nightly-2025-06-23");
    }

    #[test]
    fn a_panic_is_a_trap_in_every_nightly() {
        let old = Toolchain("nightly-2025-06-23".into());
        assert_eq!(old.build_std_features(), Some("-Zbuild-std-features=panic_immediate_abort"));
        assert_eq!(old.panic_flag(), None);
        for name in [PINNED, "nightly", "my-own"] {
            let new = Toolchain(name.into());
            assert_eq!((new.panic_flag(), new.build_std_features()), (Some("-Cpanic=immediate-abort"), None));
        }
    }
}

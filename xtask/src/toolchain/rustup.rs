//! The pinned rustup toolchain, if it has the `rust-src` component.

use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::compiler::Compiler;
use crate::workspace::{Workspace, capture};

/// How long `rustup component add` may take. Without a reachable server it retries for minutes.
const FETCH_LIMIT: Duration = Duration::from_secs(60);

/// The pinned toolchain's compiler. rustup is asked where the compiler is, not whether the component is there: it is wrong about
/// that where a component was pinned but never fetched.
pub fn installed(ws: &Workspace) -> Result<Compiler> {
    let channel = ws.pinned_channel()?;
    let rustc = capture(Command::new("rustup").args(["which", "rustc", "--toolchain", &channel]))?;
    Compiler::probe(rustc.as_ref(), "rustup")
}

/// The command that makes [`installed`] succeed.
pub fn remedy(ws: &Workspace) -> String {
    let channel = ws.pinned_channel().unwrap_or_else(|_| "<channel>".into());
    format!("rustup toolchain install {channel} --component rust-src")
}

/// Adds `rust-src` to the pinned toolchain, within [`FETCH_LIMIT`].
pub fn fetch_source(ws: &Workspace) -> Result<()> {
    let channel = ws.pinned_channel()?;
    capture(Command::new("rustup").args(["which", "rustc", "--toolchain", &channel]))?;
    println!("adding rust-src to the rustup toolchain {channel}");
    run(&["component", "add", "rust-src", "--toolchain", &channel], FETCH_LIMIT)
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

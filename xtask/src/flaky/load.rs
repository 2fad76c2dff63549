//! Busy processes: each keeps one processor busy for as long as the command runs.

use std::hint::spin_loop;
use std::io::Read;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

/// Busy processes, which end when this is dropped.
///
/// A process also ends when its standard input is closed. The command holds the other end of that
/// pipe and never writes, so a killed command leaves no busy process behind.
pub struct Load(Vec<Child>);

impl Load {
    /// Starts so many.
    pub fn start(loops: u32) -> Result<Load> {
        let mut load = Load(Vec::new());
        for _ in 0..loops {
            // The link still leads to this program when cargo has replaced the file.
            let mut command = Command::new("/proc/self/exe");
            let child =
                command.arg("spin").stdin(Stdio::piped()).spawn().context("cannot start a busy process")?;
            load.0.push(child);
        }
        Ok(load)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // An error means that the process has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Keeps one processor busy until standard input ends.
pub fn spin() -> Result<()> {
    std::thread::spawn(|| {
        let mut input = [0];
        while std::io::stdin().read(&mut input).is_ok_and(|count| count > 0) {}
        std::process::exit(0);
    });
    loop {
        spin_loop();
    }
}

//! One VM: QEMU's command line, its log, and the exit code in it.

use std::io::{BufRead, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// Start of the guest's last line. The program's exit code follows, or a word if the guest itself
/// failed.
const EXIT: &str = "RDMA-VM-EXIT ";

/// A machine's processors.
///
/// The emulator is named, without a fallback: a KVM that starts and then does not run the kernel,
/// as nested ones do, would hang.
const PROCESSOR: [&str; 6] =
    ["-accel", "tcg,thread=multi", "-cpu", "max,-erms,-fsrm,-pclmulqdq,-smap,-smep,la57=off", "-M", "pc"];

/// The kernel's command line. The kernel writes to the serial line, quietly, and ends when it
/// panics. The clock source is the processor (the alternative is an emulated device, slow). The
/// check at boot for late timer interrupts is off: on a busy machine they are late.
const KERNEL: &str = "console=ttyS0 quiet panic=-1 nokaslr mitigations=off tsc=reliable random.trust_cpu=on \
                      no_timer_check";

/// The rate of the processor's time stamp counter in kHz. QEMU's guests read that counter, and would
/// compare it with an emulated timer at boot. On a busy machine the result is wrong: the clock of a
/// guest ran eight times too fast, so that its deadlines passed.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "no safe function reads the counter")]
fn counter_khz() -> u64 {
    // The processor may stop between the two reads: of some pairs the closest one counts.
    let now = || {
        let pairs = (0..20).map(|_| {
            // SAFETY: each x86-64 processor has the instruction.
            let (at, count) = (Instant::now(), unsafe { std::arch::x86_64::_rdtsc() });
            (at.elapsed(), at, count)
        });
        pairs.min().map_or((Instant::now(), 0), |(_, at, count)| (at, count))
    };
    let (start, first) = now();
    std::thread::sleep(Duration::from_millis(50));
    let (end, last) = now();
    (last - first) * 1_000_000 / (end - start).as_nanos() as u64
}

/// Adds what all machines have in common to QEMU's command.
pub fn configure(qemu: &mut Command, cpus: u32, memory: u64, kernel: &Path, initrd: &Path, settings: &str) {
    qemu.args(PROCESSOR);
    qemu.args(["-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"]);
    qemu.args(["-smp", &cpus.to_string(), "-m", &format!("{memory}M")]);
    qemu.arg("-kernel").arg(kernel).arg("-initrd").arg(initrd);
    #[cfg(target_arch = "x86_64")]
    let clock = format!("tsc_early_khz={}", counter_khz());
    #[cfg(not(target_arch = "x86_64"))]
    let clock = "";
    qemu.args(["-append", &format!("{KERNEL} {clock} {settings}")]);
}

/// A machine that runs.
pub struct Machine {
    qemu: Child,
    log: JoinHandle<Option<u8>>,
    /// The guest has written its last line.
    over: Arc<AtomicBool>,
}

impl Machine {
    /// Boots it. The output of its serial line goes to `log` and, behind `prefix`, to the standard
    /// output.
    pub fn boot(qemu: &mut Command, log: &Path, prefix: String) -> Result<Machine> {
        let mut file =
            std::fs::File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        qemu.stdin(Stdio::null()).stdout(Stdio::piped());
        qemu.stderr(file.try_clone()?);
        let mut qemu = qemu.spawn().context("cannot start qemu-system-x86_64")?;
        let serial = qemu.stdout.take().context("no pipe from QEMU")?;
        let over = Arc::<AtomicBool>::default();
        let is_over = over.clone();
        let read = move || {
            let mut code = None;
            for line in BufReader::new(serial).split(b'\n').map_while(|line| line.ok()) {
                let line = plain(&String::from_utf8_lossy(&line));
                // A failure to write the log or the output does not stop the machine.
                let _ = writeln!(file, "{line}");
                if let Some(word) = line.strip_prefix(EXIT) {
                    // Later kernel messages go to the log alone.
                    is_over.store(true, Ordering::Release);
                    code = word.trim().parse().ok();
                }
                if !is_over.load(Ordering::Acquire) {
                    let _ = writeln!(std::io::stdout(), "{prefix}{line}");
                }
            }
            code
        };
        Ok(Machine { qemu, log: std::thread::spawn(read), over })
    }

    /// Whether it has ended.
    pub fn ended(&mut self) -> bool {
        !matches!(self.qemu.try_wait(), Ok(None))
    }

    /// Whether it has ended without a last line, as after a crash of its kernel.
    pub fn crashed(&mut self) -> bool {
        self.ended() && self.log.is_finished() && !self.over.load(Ordering::Acquire)
    }

    /// The program's exit code; none where the machine did not get that far. Switches it off if it
    /// still runs.
    pub fn finish(mut self) -> Option<u8> {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
        self.log.join().ok().flatten()
    }
}

/// A line of the serial console without text overwritten after carriage returns, and without
/// terminal control.
fn plain(line: &str) -> String {
    let mut text = String::new();
    let last = line.trim_end_matches('\r').rsplit('\r').next().unwrap_or_default();
    let mut chars = last.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\x1b' if chars.next_if_eq(&'[').is_some() => {
                while chars.next().is_some_and(|c| !c.is_ascii_alphabetic()) {}
            }
            '\x1b' => {
                chars.next();
            }
            c => text.push(c),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boots(script: &str) -> Option<u8> {
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut machine =
            Machine::boot(Command::new("sh").args(["-c", script]), log.path(), "vm0| ".into()).unwrap();
        while !machine.ended() {
            std::thread::yield_now();
        }
        machine.finish()
    }

    #[test]
    fn the_exit_code_is_in_the_log() {
        assert_eq!(boots("echo a line; printf 'RDMA-VM-EXIT 3\\r\\n'"), Some(3));
        assert_eq!(boots("echo RDMA-VM-EXIT vm"), None);
        assert_eq!(boots("echo kernel panic; exit 0"), None);
    }

    #[test]
    fn a_machine_without_a_last_line_has_crashed() {
        let log = tempfile::NamedTempFile::new().unwrap();
        for (script, has_crashed) in [("printf 'RDMA-VM-EXIT 0\\r\\n'", false), ("echo kernel panic", true)] {
            let qemu = &mut Command::new("sh");
            let mut machine = Machine::boot(qemu.args(["-c", script]), log.path(), String::new()).unwrap();
            while !machine.ended() || !machine.log.is_finished() {
                std::thread::yield_now();
            }
            assert_eq!(machine.crashed(), has_crashed, "{script}");
        }
    }

    #[test]
    fn terminal_control_is_taken_out() {
        assert_eq!(plain("\x1bc\x1b[2J\x1b[01;32mok\x1b[0m\r"), "ok");
        assert_eq!(plain("\r| 10 %\r| 20 %\r\x1b[2Kdone\r\r"), "done");
    }

    #[test]
    fn the_emulator_has_no_alternative() {
        let mut qemu = Command::new("qemu");
        configure(&mut qemu, 2, 512, Path::new("k"), Path::new("i"), "rdma.vm=0");
        let words: Vec<_> = qemu.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        assert_eq!(words.iter().filter(|word| *word == "-accel").count(), 1);
        assert!(words.last().unwrap().ends_with("rdma.vm=0"));
        assert!(!words.iter().any(|word| word.contains("kvm")));
    }
}

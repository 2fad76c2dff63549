//! `cargo xtask rdma-vm`: runs a program on a real verbs stack (Soft-RoCE), in virtual machines,
//! where there is no RDMA hardware.
//!
//! A Debian kernel with `rdma_rxe` under QEMU's emulation, and a root file system of a few
//! megabytes in memory: two seconds from start to end. Nothing is installed, and no privilege is
//! needed.

mod cable;
mod cpio;
mod image;
mod kernel;
mod machine;
mod parts;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;

use crate::workspace::{self, Workspace};
use cable::Cable;
use image::GuestJob;
use machine::Machine;
use parts::{Parts, Unavailable};

/// Exit code where a VM did not come up, or did not end in time.
const EXIT_VM: u8 = 125;
/// Exit code where this machine cannot have a VM.
const EXIT_UNAVAILABLE: u8 = 77;
/// Longest wait for a VM, beyond the program's time, for its boot.
const BOOT: Duration = Duration::from_secs(60);

/// Options of `cargo xtask rdma-vm`.
#[derive(Args)]
#[command(after_help = "\
In the guest: RDMA devices rxe0.. over the interfaces wire0.., addresses 192.168.77.1.. (of VM 0, 1, .., or of wire0, wire1); the \
tools of ibverbs-utils and perftest, rdma, ip, tc, busybox; `wire down` and `wire up` pull the cable. EPOXIDE_VM and EPOXIDE_VMS \
number the VMs; with more than one, RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set too.

Exit code: the program's, with several VMs the first that is not 0; 125 where a VM fails or takes too long; 77 where this \
machine cannot have one. Logs stay in target/rdma-vm/logs/NAME.")]
pub struct Options {
    /// How many VMs, on one virtual cable
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    vms: u32,
    /// RDMA devices: 2 are the ends of one wire in one VM
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
    devices: u32,
    /// Virtual processors of each VM. With fewer than there are polling threads the network gets no
    /// time
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    cpus: u32,
    /// Memory of each VM in MiB, besides its files
    #[arg(long, default_value_t = 768, value_parser = clap::value_parser!(u64).range(128..=65536))]
    memory: u64,
    /// Seconds that the program may take
    #[arg(long, default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86400))]
    timeout: u64,
    /// A setting of the program's environment, NAME=VALUE; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// A file to put beside the program; may be repeated
    #[arg(long, value_name = "FILE")]
    with: Vec<PathBuf>,
    /// Folder of the logs. Runs at the same time need different ones
    #[arg(long, default_value = "vms")]
    name: String,
    /// Fetch what the VMs are made of, and run nothing
    #[arg(long, conflicts_with = "program")]
    fetch: bool,
    /// The program and its arguments: a file of this machine where its name has a `/`, else a
    /// program of the guest
    #[arg(last = true, default_value = "ibv_devinfo")]
    program: Vec<String>,
}

/// Runs the program; the code is what `cargo xtask rdma-vm` exits with.
pub fn run(ws: &Workspace, options: Options) -> Result<ExitCode> {
    match boot_and_wait(ws, options) {
        Ok(codes) => Ok(verdict(&codes)),
        Err(error) => {
            eprintln!("error: {error:#}");
            Ok(ExitCode::from(match error.downcast_ref::<Unavailable>() {
                Some(_) => EXIT_UNAVAILABLE,
                None => EXIT_VM,
            }))
        }
    }
}

fn boot_and_wait(ws: &Workspace, options: Options) -> Result<Vec<Option<u8>>> {
    let vms = options.vms as usize;
    anyhow::ensure!(
        vms == 1 || options.devices == 1,
        "--devices 2 is for one VM; several have one device each"
    );
    let (program, arguments) = options.program.split_first().context("no program after `--`")?;
    let job = GuestJob {
        program: program.clone(),
        arguments: arguments.to_vec(),
        env: options.env.clone(),
        with: options.with.clone(),
    };
    let parts = Parts::find_or_fetch(ws)?;
    if options.fetch {
        return Ok(Vec::new());
    }
    let scratch = Scratch::new()?;
    let initrd = scratch.0.join("initrd");
    let archive = image::build(&parts, &job)?;
    // The archive lies in memory until it is unpacked there.
    let memory = options.memory + 2 * (archive.len() as u64 >> 20);
    workspace::write(&initrd, archive)?;
    let cable = Cable::new(&scratch.0, vms)?;
    let logs = ws.target("rdma-vm/logs").join(&options.name);
    std::fs::create_dir_all(&logs).with_context(|| format!("cannot create {}", logs.display()))?;

    let limit = Duration::from_secs(options.timeout) + BOOT;
    let deadline = Instant::now() + limit;
    let mut machines = Vec::new();
    for vm in 0..vms {
        let mut qemu = parts.qemu()?;
        let settings = format!(
            "rdma.vm={vm} rdma.vms={vms} rdma.devices={} rdma.timeout={}",
            options.devices, options.timeout
        );
        machine::configure(&mut qemu, options.cpus, memory, &parts.kernel(), &initrd, &settings);
        if vms > 1 {
            qemu.args(cable.arguments(vm));
        }
        let prefix = if vms > 1 { format!("vm{vm}| ") } else { String::new() };
        machines.push(Machine::boot(&mut qemu, &logs.join(format!("vm{vm}.log")), prefix)?);
    }
    // The others would wait for one that has crashed.
    while !machines.iter_mut().all(Machine::ended)
        && !machines.iter_mut().any(Machine::crashed)
        && Instant::now() < deadline
    {
        std::thread::sleep(Duration::from_millis(20));
    }
    let codes: Vec<Option<u8>> = machines.into_iter().map(Machine::finish).collect();
    if cable.lost() > 0 {
        eprintln!(
            "the cable lost {} frames: a VM did not take them for seconds; is this machine busy?",
            cable.lost()
        );
    }
    for (vm, code) in codes.iter().enumerate() {
        let log = logs.join(format!("vm{vm}.log"));
        match code {
            Some(0) => {}
            Some(code) => eprintln!("vm{vm}: the program's exit code is {code}; log {}", ws.display(&log)),
            None => eprintln!(
                "vm{vm}: did not come up, or not to an end within {} s, or another one crashed; log {}",
                options.timeout,
                ws.display(&log)
            ),
        }
    }
    Ok(codes)
}

fn verdict(codes: &[Option<u8>]) -> ExitCode {
    ExitCode::from(exit_code(codes))
}

/// A VM that failed outweighs any program.
fn exit_code(codes: &[Option<u8>]) -> u8 {
    let codes: Vec<u8> = codes.iter().map(|code| code.unwrap_or(EXIT_VM)).collect();
    if codes.contains(&EXIT_VM) { EXIT_VM } else { codes.into_iter().find(|code| *code != 0).unwrap_or(0) }
}

/// A folder with a short path, for sockets: theirs end at 107 bytes. Removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Scratch> {
        let dir = std::env::temp_dir().join(format!("rdma-vm.{}", std::process::id()));
        // Fails where something of this name is there already: then it is not ours.
        std::fs::create_dir(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        Ok(Scratch(dir))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(Path::new(&self.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_on_the_command_line_is_one_of_a_test() {
        let root = crate::repository::find().unwrap().root;
        let run = |names: &[&str]| {
            let mut script = std::process::Command::new("bash");
            let ended = script.arg(root.join("tests/rdma/run.sh")).args(names).output().unwrap();
            (ended.status.code(), String::from_utf8_lossy(&ended.stderr).into_owned())
        };
        // The first name is one: neither a build nor a machine starts.
        let (code, error) = run(&["doctor", "docter"]);
        assert!(code == Some(2) && error.contains("no test is called docter"), "{code:?}: {error}");
    }

    #[test]
    fn the_exit_code_is_that_of_the_first_that_failed() {
        assert_eq!(exit_code(&[Some(0), Some(0)]), 0);
        assert_eq!(exit_code(&[Some(0), Some(7), Some(3)]), 7);
        assert_eq!(exit_code(&[Some(7), None]), EXIT_VM);
    }
}

//! NVIDIA's assembler: finds it, and runs it on PTX files.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::backend::{Arch, Backend};
use crate::described::{self, KernelInfo};
use crate::lint::Finding;
use crate::packages;
use crate::workspace::{self, Workspace};

/// The Python wheel that holds ptxas, and the version the project tests with.
const WHEEL: &str = "nvidia-cuda-nvcc==13.0.88";

/// Where ptxas lies inside the wheel.
const IN_WHEEL: &str = "nvidia/cu13/bin/ptxas";

const RULE: &str = "ptxas";

/// How to get ptxas.
pub const REMEDY: &str = "run build-ptx with `--fetch-ptxas`, or set EPOXIDE_PTXAS to one";

/// Resources of one entry on the GPU, as `ptxas -v` reports them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The entry's name.
    pub entry: String,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of static shared memory per block.
    pub shared: u32,
    /// Bytes of local-memory stack per thread.
    pub stack: u32,
    /// Bytes of register spills per thread, stores and loads.
    pub spills: u32,
    /// Named barriers in use.
    pub barriers: u32,
}

/// A ptxas on this machine: `EPOXIDE_PTXAS`, the fetched one, or the first on `PATH`.
pub fn find(ws: &Workspace) -> Option<PathBuf> {
    workspace::env_path("EPOXIDE_PTXAS")
        .or_else(|| Some(fetched(ws)).filter(|file| file.is_file()))
        .or_else(|| workspace::on_path("ptxas"))
}

/// A ptxas on this machine, fetched into `target/` where there is none.
pub fn find_or_fetch(ws: &Workspace) -> Result<PathBuf> {
    match find(ws) {
        Some(found) => Ok(found),
        None => fetch(ws),
    }
}

fn fetched(ws: &Workspace) -> PathBuf {
    ws.target("ptxas").join(IN_WHEEL)
}

fn fetch(ws: &Workspace) -> Result<PathBuf> {
    const NEEDS: &str = "fetching ptxas needs python3 with pip; or set EPOXIDE_PTXAS to one you have";
    println!("fetching ptxas ({WHEEL})");
    let partial = ws.target("ptxas.partial");
    workspace::fresh_dir(&partial)?;
    packages::unpack_wheel(WHEEL, &partial).context(NEEDS)?;
    make_executable(&partial.join(IN_WHEEL))?;
    workspace::publish_dir(&partial, &ws.target("ptxas"))?;
    Ok(fetched(ws))
}

fn make_executable(file: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o755))
        .with_context(|| format!("{WHEEL} holds no {IN_WHEEL}"))
}

/// Assembles a PTX file, throws the result away, and returns what each entry uses.
pub fn assemble(ptxas: &Path, file: &Path, sm: &str) -> Result<Vec<Usage>> {
    let mut command = Command::new(ptxas);
    command.arg(format!("-arch={sm}")).args(["-v", "--output-file", "/dev/null"]).arg(file);
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {}; {REMEDY}", ptxas.display()))?;
    let report = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("ptxas refuses {}:\n{}", file.display(), report.trim_end());
    }
    Ok(parse(&report))
}

/// The most bytes that a kernel may spill on architectures newer than its PTX is for, or by another
/// back end than rustc's own. The driver compiles it there with the same launch bounds, and another
/// assembler or back end may be a few registers short.
const SPILLS_ELSEWHERE: u32 = 64;

/// Assembles a PTX file for the newer architectures that run it too, and holds what its kernels use
/// there to their attributes.
pub fn check_newer(
    ptxas: &Path,
    file: &Path,
    (arch, backend): (&Arch, Backend),
    described: &[KernelInfo],
) -> Vec<Finding> {
    let described = &ceilings(described, backend);
    let check = |newer: Arch| match assemble(ptxas, file, newer.sm()) {
        Ok(usages) => {
            let spilling = usages.iter().filter(|usage| usage.spills > 0).count();
            let most = usages.iter().map(|usage| usage.spills).max().unwrap_or(0);
            println!("{newer} runs it too: {spilling} kernels spill, at most {most} bytes");
            let mut findings = check_with(&usages, described, SPILLS_ELSEWHERE);
            findings.iter_mut().for_each(|finding| finding.message += &format!(" on {newer}"));
            findings
        }
        Err(error) => vec![Finding::new(RULE, 0, format!("{newer}: {error:#}"))],
    };
    std::thread::scope(|scope| {
        let checks: Vec<_> = arch.newer().map(|newer| scope.spawn(move || check(newer))).collect();
        let findings = checks.into_iter().map(|check| match check.join() {
            Ok(findings) => findings,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        findings.collect::<Vec<_>>().concat()
    })
}

/// Holds the usage to the kernels' attributes: no stack, no spills, registers within the ceiling.
pub fn check(usages: &[Usage], described: &[KernelInfo], backend: Backend) -> Vec<Finding> {
    let spills = if backend == Backend::InTree { 0 } else { SPILLS_ELSEWHERE };
    check_with(usages, &ceilings(described, backend), spills)
}

/// The kernels with the ceilings of registers for PTX of this back end. The attributes' ceilings
/// are for rustc's own back end. Another back end allocates differently, and only the threads of a
/// block bound it.
fn ceilings(described: &[KernelInfo], backend: Backend) -> Vec<KernelInfo> {
    let mut described = described.to_vec();
    if backend != Backend::InTree {
        described.iter_mut().for_each(|kernel| kernel.max_registers = u32::MAX);
    }
    described
}

/// The same with this many bytes of spills, and of stack for them.
fn check_with(usages: &[Usage], described: &[KernelInfo], spills: u32) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut report = |message: String| findings.push(Finding::new(RULE, 0, message));
    for usage in usages {
        let Some(kernel) = described::find(described, &usage.entry) else { continue };
        let name = &kernel.name;
        if usage.stack > spills && kernel.local_depot_allowed.is_none() {
            report(format!("`{name}` has {} bytes of stack per thread, expected none", usage.stack));
        }
        if usage.spills > spills {
            report(format!("`{name}` spills {} bytes of registers per thread", usage.spills));
        }
        if usage.registers > kernel.max_registers {
            report(format!(
                "`{name}` uses {} registers, its attribute allows {}",
                usage.registers, kernel.max_registers
            ));
        }
    }
    findings
}

/// The usage as a table for people, one line per entry.
pub fn table(usages: &[Usage]) -> String {
    let width = usages.iter().map(|usage| usage.entry.len()).max().unwrap_or(0).max("entry".len());
    let head = ["registers", "shared", "stack", "spills", "barriers"].map(|title| format!("{title:>10}"));
    let mut text = format!("{:<width$}{}\n", "entry", head.concat());
    for usage in usages {
        let numbers = [usage.registers, usage.shared, usage.stack, usage.spills, usage.barriers];
        let cells = numbers.map(|number| format!("{number:>10}"));
        text += &format!("{:<width$}{}\n", usage.entry, cells.concat());
    }
    text
}

fn parse(report: &str) -> Vec<Usage> {
    let mut usages: Vec<Usage> = Vec::new();
    for line in report.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let entry = rest.split('\'').next().unwrap_or(rest).to_owned();
            usages.push(Usage { entry, ..Usage::default() });
            continue;
        }
        let Some(usage) = usages.last_mut() else { continue };
        if line.contains("bytes stack frame") {
            usage.stack = number_before(line, "bytes stack frame");
            usage.spills =
                number_before(line, "bytes spill stores") + number_before(line, "bytes spill loads");
        } else if line.contains("Used ") {
            usage.registers = number_before(line, "registers");
            usage.barriers = number_before(line, "barriers");
            usage.shared = number_before(line, "bytes smem");
        }
    }
    usages
}

/// The number right before `unit`, or 0: `ptxas` leaves out what is zero.
fn number_before(line: &str, unit: &str) -> u32 {
    line.split_once(unit)
        .and_then(|(before, _)| before.trim_end().rsplit([' ', ',']).next()?.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::described::samples::kernel;

    const REPORT: &str = "ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'copy' for 'sm_90'
ptxas info    : Function properties for copy
    72 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 70 registers, used 1 barriers, 72 bytes cumulative stack size, 2048 bytes smem
ptxas info    : Compile time = 8.069 ms
ptxas info    : Compiling entry function 'count' for 'sm_90'
ptxas info    : Function properties for count
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
";

    #[test]
    fn reads_the_report() {
        let usages = parse(REPORT);
        let copy =
            Usage { entry: "copy".into(), registers: 70, shared: 2048, stack: 72, spills: 12, barriers: 1 };
        let count = Usage { entry: "count".into(), registers: 8, ..Usage::default() };
        assert_eq!(usages, [copy, count]);
        assert_eq!(table(&usages).lines().count(), 3);
    }

    #[test]
    fn stack_spills_and_registers_are_held_to_the_attribute() {
        let usages = parse(REPORT);
        let findings = check(&usages, &[kernel("copy"), kernel("count")], Backend::InTree);
        let messages: Vec<_> = findings.iter().map(|finding| finding.message.as_str()).collect();
        assert_eq!(messages.len(), 3, "{messages:?}");
        assert!(messages[0].contains("72 bytes of stack"));
        assert!(messages[1].contains("spills 12"));
        assert!(messages[2].contains("70 registers"));
        let nvvm = check(&usages, &[kernel("copy")], Backend::Nvvm);
        assert_eq!(nvvm.len(), 1, "the stack is more than spills take: {nvvm:?}");
        let few = check_with(&usages, &[kernel("copy")], 12);
        assert!(few.iter().all(|finding| !finding.message.contains("spills")), "{few:?}");
        assert_eq!(check_with(&usages, &[kernel("copy")], 11).len(), 3);
    }
}

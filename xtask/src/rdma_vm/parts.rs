//! Parts of a VM: QEMU, a kernel and a few programs, out of Debian packages that are unpacked under
//! `target/` and never installed. They are fetched once, from the sources of this machine's apt.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::kernel;
use crate::workspace::{self, Workspace, capture};

/// This machine cannot have the VM; the text gives the reason.
#[derive(Debug)]
pub struct Unavailable(String);

impl std::fmt::Display for Unavailable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unavailable {}

/// The tools, besides what they depend on. apt leaves out what the machine has.
const PACKAGES: [&str; 7] = [
    "qemu-system-x86",
    "busybox-static",
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "perftest",
    "xz-utils",
];
/// Names the current kernel package in its dependencies. (The -cloud- kernel has no rxe.)
const KERNEL: &str = "linux-image-amd64";
/// Counts changes of this file that make fetched parts useless.
const RECIPE: &str = "1";

/// The unpacked parts.
pub struct Parts {
    dir: PathBuf,
}

impl Parts {
    /// The parts, fetched where they are not there yet.
    pub fn find_or_fetch(ws: &Workspace) -> Result<Parts> {
        let parts = Parts { dir: ws.target("rdma-vm/parts") };
        let recipe = format!("{RECIPE} {} {}", PACKAGES.join(" "), kernel::MODULES.join(" "));
        if parts.are_of(&recipe) {
            return Ok(parts);
        }
        if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
            return Err(Unavailable("the VM needs Linux on x86_64".into()).into());
        }
        println!("fetching QEMU and a kernel into {} (90 MB of packages)", ws.display(&parts.dir));
        // The folder is this process's alone: two that fetch at once must not mix.
        let partial = ws.target(&format!("rdma-vm/parts.partial.{}", std::process::id()));
        workspace::fresh_dir(&partial)?;
        let fetched = fetch(&partial).and_then(|()| parts.publish(&partial, &recipe));
        if fetched.is_err() {
            let _ = std::fs::remove_dir_all(&partial);
        }
        fetched.map(|()| parts)
    }

    /// Whether the parts are there, fetched by this recipe.
    fn are_of(&self, recipe: &str) -> bool {
        std::fs::read_to_string(self.dir.join("recipe")).is_ok_and(|have| have == recipe)
    }

    /// Moves fetched parts to their folder. Parts that another process has published meanwhile
    /// stay: its machine may run on them.
    fn publish(&self, partial: &Path, recipe: &str) -> Result<()> {
        if self.are_of(recipe) {
            return std::fs::remove_dir_all(partial)
                .with_context(|| format!("cannot remove {}", partial.display()));
        }
        workspace::write(&partial.join("recipe"), recipe)?;
        workspace::publish_dir(partial, &self.dir)
    }

    /// The kernel, an ELF file.
    pub fn kernel(&self) -> PathBuf {
        self.dir.join("vmlinux")
    }

    /// The kernel modules, named so that their order is the one to load them in.
    pub fn modules(&self) -> PathBuf {
        self.dir.join("modules")
    }

    /// A file of the guest's tools, such as `usr/bin/rdma`, from an unpacked package or else from
    /// this machine.
    pub fn file(&self, path: &str) -> Result<PathBuf> {
        [self.tools(), "/".into()]
            .iter()
            .map(|root: &PathBuf| root.join(path))
            .find(|file| file.exists())
            .with_context(|| {
                format!(
                    "neither /{path} nor its package is here; remove {} to fetch anew",
                    self.dir.display()
                )
            })
    }

    /// A command that finds the libraries of the unpacked packages first.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut dirs =
            ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"].map(|dir| self.tools().join(dir)).to_vec();
        if let Some(more) = std::env::var_os("LD_LIBRARY_PATH") {
            dirs.extend(std::env::split_paths(&more));
        }
        let mut command = Command::new(program);
        // A folder with a `:` in its name is no part of such a list; then the machine's libraries
        // have to do.
        if let Ok(list) = std::env::join_paths(dirs) {
            command.env("LD_LIBRARY_PATH", list);
        }
        command
    }

    /// QEMU, ready for its machine's arguments.
    pub fn qemu(&self) -> Result<Command> {
        let mut command = self.command(self.file("usr/bin/qemu-system-x86_64")?);
        // Debian's emulator (TCG) is a module.
        command.env("QEMU_MODULE_DIR", self.file("usr/lib/x86_64-linux-gnu/qemu")?);
        for data in ["usr/share/qemu", "usr/share/seabios"] {
            command.arg("-L").arg(self.file(data)?);
        }
        Ok(command)
    }

    fn tools(&self) -> PathBuf {
        self.dir.join("tools")
    }
}

fn fetch(dir: &Path) -> Result<()> {
    // Try the machine's package lists first. If they are absent or old, use lists of our own,
    // because an ordinary user cannot update the machine's.
    let debs = dir.join("debs");
    let lists = dir.join("lists");
    if let Err(first) = download(&debs, None) {
        let own = format!("Dir::State::lists={}", lists.display());
        std::fs::create_dir_all(lists.join("partial"))?;
        apt("apt-get", &debs, Some(&own), &["-qq", "update"])
            .and_then(|_| download(&debs, Some(&own)))
            .map_err(|second| {
                Unavailable(format!(
                    "apt cannot fetch the packages {} and {KERNEL}: {first:#}; with package lists of its own: {second:#}",
                    PACKAGES.join(", ")
                ))
            })?;
    }
    let (tools, package) = (dir.join("tools"), dir.join("kernel"));
    std::fs::create_dir_all(&tools)?;
    for deb in workspace::files(&debs, "deb")? {
        let is_kernel =
            deb.file_name().is_some_and(|name| name.to_string_lossy().starts_with("linux-image-"));
        capture(Command::new("dpkg").arg("-x").arg(&deb).arg(if is_kernel { &package } else { &tools }))?;
    }
    unpack_kernel(dir, &package)?;
    for scrap in [&debs, &package, &lists] {
        if scrap.exists() {
            std::fs::remove_dir_all(scrap)?;
        }
    }
    Ok(())
}

/// Takes the kernel and the modules out of the unpacked package: 70 of 400 MB.
fn unpack_kernel(dir: &Path, package: &Path) -> Result<()> {
    let find = |dirs: [&str; 2], what: &str| {
        let entries = dirs.iter().filter_map(|dir| std::fs::read_dir(package.join(dir)).ok()).flatten();
        let mut paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        paths.find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(what)))
    };
    let image = find(["boot", "boot"], "vmlinuz-").context("the kernel package has no boot/vmlinuz-*")?;
    let elf = kernel::unpack(&std::fs::read(image)?, &dir.join("payload"))?;
    workspace::write(&dir.join("vmlinux"), elf)?;
    let modules =
        find(["lib/modules", "usr/lib/modules"], "").context("the kernel package has no modules")?;
    for (number, (name, contents)) in kernel::modules(&modules)?.into_iter().enumerate() {
        workspace::write(&dir.join(format!("modules/{number:02}-{name}.ko")), contents)?;
    }
    Ok(())
}

fn download(debs: &Path, lists: Option<&str>) -> Result<()> {
    std::fs::create_dir_all(debs.join("partial"))?;
    let depends = apt("apt-cache", debs, lists, &["depends", KERNEL])?;
    let kernel = kernel_package(&depends).with_context(|| format!("{KERNEL} names no kernel"))?;
    apt("apt-get", debs, lists, &["-qq", "download", kernel])?;
    let install = ["-qq", "--yes", "--no-install-recommends", "--download-only", "install"];
    apt("apt-get", debs, lists, &[&install[..], &PACKAGES[..]].concat())?;
    Ok(())
}

/// The first dependency that is a kernel: names change with every security update.
fn kernel_package(depends: &str) -> Option<&str> {
    let names = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    names.map(str::trim).find(|name| {
        name.strip_prefix("linux-image-")
            .is_some_and(|version| version.starts_with(|c: char| c.is_ascii_digit()))
    })
}

/// Runs a program of apt that writes nothing outside `debs`, as any user.
fn apt(program: &str, debs: &Path, lists: Option<&str>, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new(program);
    command.current_dir(debs).env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
    let archives = format!("Dir::Cache::archives={}", debs.display());
    let options = [
        &archives,
        "Debug::NoLocking=1",
        "APT::Sandbox::User=root",
        "Dir::Cache::pkgcache=",
        "Dir::Cache::srcpkgcache=",
    ];
    for option in options.into_iter().chain(lists) {
        command.args(["-o", option]);
    }
    capture(command.args(arguments))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_another_process_has_published_stay() {
        let folder = tempfile::tempdir().unwrap();
        let parts = Parts { dir: folder.path().join("parts") };
        let publish = |number: u32, recipe| {
            let partial = folder.path().join(number.to_string());
            workspace::write(&partial.join("vmlinux"), number.to_string()).unwrap();
            parts.publish(&partial, recipe).unwrap();
            assert!(!partial.exists());
            workspace::read(&parts.kernel()).unwrap()
        };
        assert_eq!(publish(1, "a"), "1");
        assert_eq!(publish(2, "a"), "1");
        assert_eq!(publish(3, "b"), "3");
    }

    #[test]
    fn the_kernel_is_the_dependency_with_a_version() {
        let depends = "linux-image-amd64\n  Depends: linux-base\n  Depends: linux-image-6.1.0-56-amd64\n  Suggests: x\n";
        assert_eq!(kernel_package(depends), Some("linux-image-6.1.0-56-amd64"));
        assert_eq!(kernel_package("linux-image-amd64\n"), None);
    }
}

//! Fetches the nvvm back end and its dependencies into `target/nvvm`, as far as this machine can.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::Toolchain;
use super::parts::{self, Missing, MissingParts, Part, Places};
use crate::packages;
use crate::toolchain::rustup;
use crate::workspace::{self, Workspace, capture};

/// The wheels that make a CUDA root, with the folder that each has for its files. They are what the
/// back end was tested with, and the last of CUDA 12.
const CUDA_WHEELS: [(&str, &str); 2] = [
    ("nvidia-cuda-nvcc-cu12==12.9.86", "nvidia/cuda_nvcc"),
    ("nvidia-cuda-runtime-cu12==12.9.79", "nvidia/cuda_runtime"),
];

/// LLVM 7 by Debian's and Ubuntu's names, with what it loads. Debian 10 and Ubuntu 20.04 have them.
const LLVM_PACKAGES: [&str; 4] = ["llvm-7", "llvm-7-dev", "libllvm7", "libffi7"];

/// Releases of libclang, in the order in which they are tried: of Debian 12 and Ubuntu 22.04, then
/// of Ubuntu 20.04.
const CLANG_RELEASES: [u32; 2] = [14, 12];

/// Rust-CUDA, and the state of it that the kernels were tested with.
const REPOSITORY: &str = "https://github.com/Rust-GPU/rust-cuda";
pub const COMMIT: &str = "946c91f080770f30d42d7c706ac8185969274073";

/// A toolchain with rustc-dev is 700 MB.
const TOOLCHAIN_LIMIT: Duration = Duration::from_secs(600);

/// Fetches every part that is missing, and builds the back end. The error names each that could not
/// be had, with what was tried.
pub fn fetch(ws: &Workspace) -> Result<()> {
    let mut failed = Vec::new();
    // A failure does not stop the loop: each part is useful by itself.
    for part in Places::of(ws).missing() {
        if part != Part::Codegen
            && let Err(error) = fetch_part(ws, &part)
        {
            failed.push(Missing::tried(part, &error));
        }
    }
    let places = Places::of(ws);
    if places.missing().contains(&Part::Codegen)
        && let Err(error) = build(ws, &places)
    {
        failed.push(Missing::tried(Part::Codegen, &error));
    }
    if let Some(missing) = MissingParts::after_fetching(failed) {
        return Err(missing.into());
    }
    parts::Parts::find(ws)?;
    println!("the nvvm back end is complete");
    Ok(())
}

fn fetch_part(ws: &Workspace, part: &Part) -> Result<()> {
    let dir = parts::dir(ws);
    match part {
        Part::Toolchain(name) => {
            println!("installing the toolchain {name}");
            let components = ["--component", "rust-src,rustc-dev,llvm-tools"];
            let install = ["toolchain", "install", name, "--profile", "minimal"];
            rustup::run(&[&install[..], &components[..]].concat(), TOOLCHAIN_LIMIT)
        }
        Part::Libnvvm | Part::CudaHeaders => {
            if let Some(named) = workspace::env_path("CUDA_PATH") {
                bail!("CUDA_PATH names {}: unset it to use a fetched CUDA", named.display());
            }
            fetch_cuda(&dir)
        }
        // The user's toolkit is the user's.
        Part::LibnvvmLink(_) => bail!("CUDA_PATH names a folder of your own"),
        // The user's LLVM is the user's.
        Part::Llvm(Some(_)) if workspace::env_path("LLVM_CONFIG").is_some() => {
            bail!("LLVM_CONFIG names a program of your own")
        }
        Part::Llvm(_) => fetch_packages(&dir, "llvm", &LLVM_PACKAGES),
        Part::Libclang => fetch_libclang(&dir),
        Part::Library(_) => bail!("the library belongs to a rustc_codegen_nvvm that was not built here"),
        Part::Codegen => build(ws, &Places::of(ws)),
    }
}

/// A CUDA root out of wheels: `include/cuda.h`, `nvvm/include`, `nvvm/lib64`, `nvvm/libdevice`.
fn fetch_cuda(dir: &Path) -> Result<()> {
    let partial = dir.join("cuda.partial");
    let root = partial.join("root");
    workspace::fresh_dir(&root)?;
    for (wheel, folder) in CUDA_WHEELS {
        println!("fetching {wheel}");
        packages::unpack_wheel(wheel, &partial).context("fetching CUDA's wheels needs python3 with pip")?;
        for part in ["nvvm", "include"] {
            let from = partial.join(folder).join(part);
            if from.is_dir() {
                merge_dir(&from, &root.join(part))?;
            }
        }
    }
    let link = root.join("nvvm/lib64/libnvvm.so.4");
    std::os::unix::fs::symlink("libnvvm.so", &link)
        .with_context(|| format!("cannot make the link {}", link.display()))?;
    workspace::publish_dir(&root, &dir.join("cuda"))?;
    std::fs::remove_dir_all(&partial).with_context(|| format!("cannot remove {}", partial.display()))
}

/// Moves what is in `from` to `to`, which may have files of its own: both wheels have an `include`.
fn merge_dir(from: &Path, to: &Path) -> Result<()> {
    if !to.exists() {
        return std::fs::rename(from, to).with_context(|| format!("cannot rename {}", from.display()));
    }
    let reading = || format!("cannot read {}", from.display());
    for entry in std::fs::read_dir(from).with_context(reading)? {
        let from = entry.with_context(reading)?.path();
        let to = to.join(from.file_name().unwrap_or_default());
        if from.is_dir() {
            merge_dir(&from, &to)?;
        } else {
            std::fs::rename(&from, &to).with_context(|| format!("cannot rename {}", from.display()))?;
        }
    }
    Ok(())
}

/// libclang, the headers that belong to it, and what it loads, of the first release that there is.
fn fetch_libclang(dir: &Path) -> Result<()> {
    let mut failed = None;
    for release in CLANG_RELEASES {
        let names = [
            format!("libclang1-{release}"),
            format!("libclang-common-{release}-dev"),
            format!("libllvm{release}"),
        ];
        match fetch_packages(dir, "clang", &names.each_ref().map(String::as_str)) {
            Ok(()) => return Ok(()),
            // The newest release's failure is more informative than the absence of an old one.
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    failed.map_or(Ok(()), Err)
}

fn fetch_packages(dir: &Path, name: &str, packages: &[&str]) -> Result<()> {
    packages::check_tools()?;
    println!("fetching {}", packages.join(", "));
    let partial = dir.join(format!("{name}.partial"));
    packages::with_fresh_lists(|| {
        workspace::fresh_dir(&partial)?;
        packages::download(&partial, packages)
    })?;
    let root = partial.join("root");
    packages::unpack(&partial, &root)?;
    workspace::publish_dir(&root, &dir.join(name))?;
    std::fs::remove_dir_all(&partial).with_context(|| format!("cannot remove {}", partial.display()))
}

/// Builds the back end from its repository.
fn build(ws: &Workspace, places: &Places) -> Result<()> {
    let source = fetch_source(ws)?;
    let (Ok(llvm_config), Some(libclang), Some(cuda)) =
        (&places.llvm_config, &places.libclang, places.cuda_with_headers())
    else {
        bail!("its source is in {}; the parts for building it are not complete", ws.display(&source));
    };
    println!("building rustc_codegen_nvvm");
    let mut command = build_command(ws, &source, places.libraries());
    command.env("LLVM_CONFIG", llvm_config).env("LIBCLANG_PATH", libclang).env("CUDA_PATH", cuda);
    workspace::run(&mut command)
}

/// Without the variables that name the parts' places.
fn build_command(ws: &Workspace, source: &Path, libraries: &[std::path::PathBuf]) -> Command {
    let clang = parts::dir(ws).join("clang");
    let mut folders = libraries.to_vec();
    folders.extend(parts::unpacked_libraries(&clang).filter(|folder| folder.is_dir()));
    let mut command = Toolchain::of(ws).run(ws);
    command
        .current_dir(source)
        // The back end would link LLVM statically, and the packages have the shared one only.
        .env("LLVM_LINK_SHARED", "1")
        .env("CARGO_TARGET_DIR", parts::dir(ws).join("build"))
        .env("LD_LIBRARY_PATH", parts::library_path(&folders))
        .args(["cargo", "build", "--package", "rustc_codegen_nvvm", "--release"]);
    // libclang finds the headers that belong to it beside itself, which an unpacked one does not
    // have at the usual place.
    let releases = CLANG_RELEASES.map(|release| clang.join(format!("usr/lib/llvm-{release}/lib/clang")));
    let versions =
        releases.iter().flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten());
    if let Some(headers) = versions.map(|version| version.path().join("include")).find(|dir| dir.is_dir()) {
        command.env("BINDGEN_EXTRA_CLANG_ARGS", format!("-isystem {}", headers.display()));
    }
    command
}

/// The checkout, cloned where it is not there yet.
fn fetch_source(ws: &Workspace) -> Result<std::path::PathBuf> {
    let source = parts::source(ws);
    if source.is_dir() {
        return Ok(source);
    }
    println!("cloning {REPOSITORY}");
    let partial = parts::dir(ws).join("source.partial");
    workspace::fresh_dir(&partial)?;
    let mut clone = git();
    // Without a reachable server, git would retry for minutes.
    clone.args([
        "-c",
        "http.lowSpeedLimit=1000",
        "-c",
        "http.lowSpeedTime=60",
        "clone",
        "--quiet",
        REPOSITORY,
    ]);
    capture(clone.arg(&partial))?;
    capture(git().current_dir(&partial).args(["checkout", "--quiet", COMMIT]))?;
    workspace::publish_dir(&partial, &source)?;
    Ok(source)
}

fn git() -> Command {
    let mut git = Command::new("git");
    git.env("GIT_TERMINAL_PROMPT", "0");
    git
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_build_takes_the_pinned_toolchain_and_a_shared_llvm() {
        let ws = Workspace::at("/w");
        let line = workspace::describe(&build_command(&ws, Path::new("/source"), &["/llvm".into()]));
        assert!(line.contains("LLVM_LINK_SHARED=1") && line.contains("LD_LIBRARY_PATH=/llvm"), "{line}");
        assert!(
            line.contains("rustup run nightly-2026-04-02 cargo build --package rustc_codegen_nvvm"),
            "{line}"
        );
    }

    #[test]
    fn headers_of_both_wheels_lie_in_one_folder() {
        let root = tempfile::tempdir().unwrap();
        let file = |name: &str| root.path().join(name);
        for name in [
            "nvcc/include/crt/host.h",
            "nvcc/include/a.h",
            "runtime/include/crt/b.h",
            "runtime/include/cuda.h",
        ] {
            workspace::write(&file(name), "").unwrap();
        }
        for wheel in ["nvcc", "runtime"] {
            merge_dir(&file(wheel).join("include"), &file("cuda")).unwrap();
        }
        for name in ["crt/host.h", "a.h", "crt/b.h", "cuda.h"] {
            assert!(file("cuda").join(name).is_file(), "{name}");
        }
    }
}

//! Parts of the back end, their places, and the remedy for each missing one.
//!
//! Each part is searched for at the path in an environment variable, then in `target/nvvm`, where
//! [`super::fetch()`] puts it, then where packages install it.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Toolchain;
use super::fetch::COMMIT;
use crate::workspace::{self, Workspace, capture, env_path};

/// Names the back end's library.
pub const BACKEND_VAR: &str = "RUSTC_CODEGEN_NVVM";

/// Parts that a build of the kernels needs.
#[derive(Debug)]
pub struct Parts {
    /// `librustc_codegen_nvvm.so`.
    pub codegen: PathBuf,
    /// The CUDA 12 root with libNVVM.
    pub cuda: PathBuf,
    /// Folders of the libraries that the back end loads.
    pub libraries: Vec<PathBuf>,
}

impl Parts {
    /// Finds all parts; the error lists every missing part.
    pub fn find(ws: &Workspace) -> Result<Self, MissingParts> {
        let places = Places::of(ws);
        let missing: Vec<Missing> = places.missing().into_iter().map(Missing::of).collect();
        match (places.codegen, places.cuda) {
            (Some(codegen), Some(cuda)) if missing.is_empty() => {
                Ok(Self { codegen, cuda, libraries: places.libraries })
            }
            _ => Err(MissingParts(missing)),
        }
    }
}

/// One thing that can be missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// The nightly of this name, with its components.
    Toolchain(String),
    /// `librustc_codegen_nvvm.so`.
    Codegen,
    /// libNVVM by the name that the back end loads, and its library of device functions.
    Libnvvm,
    /// libNVVM is there, but not by the name that the back end loads.
    LibnvvmLink(PathBuf),
    /// To build the back end: `cuda.h` and `nvvm.h`.
    CudaHeaders,
    /// To build the back end: LLVM 7's headers and `llvm-config`; with the fault of one that is
    /// there.
    Llvm(Option<String>),
    /// To build the back end: libclang, which reads those headers.
    Libclang,
    /// A library that the back end loads, by file name.
    Library(String),
}

impl Part {
    /// Description of the part.
    fn what(&self) -> String {
        match self {
            Self::Toolchain(name) => format!("the toolchain {name} with rust-src, rustc-dev and llvm-tools"),
            Self::Codegen => "rustc_codegen_nvvm, built from Rust-CUDA's repository".into(),
            Self::Libnvvm => {
                "libNVVM of CUDA 12: nvvm/lib64/libnvvm.so.4 and nvvm/libdevice/libdevice.10.bc".into()
            }
            Self::LibnvvmLink(_) => {
                "libNVVM under the name libnvvm.so.4, by which the back end loads it".into()
            }
            Self::CudaHeaders => {
                "include/cuda.h and nvvm/include/nvvm.h of CUDA 12, to build rustc_codegen_nvvm".into()
            }
            Self::Llvm(None) => "LLVM 7 with headers, to build rustc_codegen_nvvm".into(),
            Self::Llvm(Some(fault)) => {
                format!("an llvm-config of LLVM 7 that runs, to build rustc_codegen_nvvm: {fault}")
            }
            Self::Libclang => "libclang, to build rustc_codegen_nvvm".into(),
            Self::Library(name) if name.starts_with("libLLVM") => {
                format!("{name} (LLVM 7), which rustc_codegen_nvvm loads")
            }
            Self::Library(name) => format!("{name}, which rustc_codegen_nvvm loads"),
        }
    }

    /// How to get it where [`super::fetch()`] cannot.
    fn remedy(&self) -> String {
        match self {
            Self::Toolchain(name) => {
                format!("`rustup toolchain install {name} --component rust-src,rustc-dev,llvm-tools`")
            }
            Self::Codegen => format!(
                "put a checkout of Rust-CUDA ({COMMIT}, or another commit with its own rust-toolchain.toml) at target/nvvm/source and do \
                 this again, or set {BACKEND_VAR} to a librustc_codegen_nvvm.so of your own. The crate of that name, 0.3.0, is of 2022 \
                 and compiles on no current rustc"
            ),
            Self::Libnvvm | Self::CudaHeaders => {
                "set CUDA_PATH to a CUDA 12 toolkit; CUDA 13's libNVVM writes PTX that needs newer drivers, and is not tested".into()
            }
            Self::LibnvvmLink(folder) => format!("`ln -s libnvvm.so {}`", folder.join(LIBNVVM).display()),
            Self::Llvm(_) => "Debian 12 has no LLVM 7, Ubuntu 20.04 has: do this again with APT_CONFIG set to an apt.conf whose \
                              sources have both, or set LLVM_CONFIG to an llvm-config that says 7.x, with its libraries on LD_LIBRARY_PATH"
                .into(),
            Self::Libclang => "install it (Debian: libclang1-14 and libclang-common-14-dev), or set LIBCLANG_PATH to its folder".into(),
            Self::Library(name) => {
                let from = match name.as_str() {
                    LIBNVVM => "the CUDA toolkit's nvvm/lib64",
                    name if name.starts_with("libLLVM") => "Ubuntu 20.04's libllvm7, unpacked, works",
                    name if name.starts_with("libffi") => "of the distribution that LLVM 7 came from: Ubuntu 20.04's libffi7, unpacked, works",
                    _ => "of the distribution that it was built on",
                };
                format!("put its folder on LD_LIBRARY_PATH ({from})")
            }
        }
    }
}

/// A part that is missing, with what was tried to get it.
#[derive(Debug)]
pub struct Missing {
    part: Part,
    tried: Option<String>,
}

impl Missing {
    /// A missing part whose download was not tried.
    fn of(part: Part) -> Self {
        Self { part, tried: None }
    }

    /// Fetching it failed so.
    pub fn tried(part: Part, error: &anyhow::Error) -> Self {
        Self { part, tried: Some(format!("{error:#}")) }
    }
}

/// Parts that this machine lacks, each with how to get it.
#[derive(Debug)]
pub struct MissingParts(Vec<Missing>);

impl MissingParts {
    /// The parts that fetching did not get; `None` if nothing is missing.
    pub fn after_fetching(missing: Vec<Missing>) -> Option<Self> {
        (!missing.is_empty()).then_some(Self(missing))
    }
}

impl fmt::Display for MissingParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the nvvm back end is not complete on this machine")?;
        if self.0.iter().all(|missing| missing.tried.is_none()) {
            write!(f, "; build-ptx with `--fetch-nvvm` gets what can be had into target/nvvm")?;
        }
        write!(f, ". Missing:")?;
        for Missing { part, tried } in &self.0 {
            write!(f, "\n- {}\n  remedy: {}", part.what(), part.remedy())?;
            if let Some(tried) = tried {
                write!(f, "\n  tried: {}", tried.trim_end().replace('\n', "\n    "))?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for MissingParts {}

/// The name by which the back end loads libNVVM.
const LIBNVVM: &str = "libnvvm.so.4";

/// The paths of the parts that were found.
pub struct Places {
    toolchain: String,
    has_toolchain: bool,
    codegen: Option<PathBuf>,
    /// A CUDA root that holds libNVVM, under any name.
    cuda: Option<PathBuf>,
    /// `llvm-config` of an LLVM 7, or what is wrong with the one that should be used.
    pub llvm_config: Result<PathBuf, Option<String>>,
    /// The folder of libclang.
    pub libclang: Option<PathBuf>,
    libraries: Vec<PathBuf>,
}

impl Places {
    /// Looks around.
    pub fn of(ws: &Workspace) -> Self {
        let fetched = dir(ws);
        let codegen = env_path(BACKEND_VAR).or_else(|| Some(built(ws))).filter(|file| file.is_file());
        let cuda =
            env_path("CUDA_PATH").or_else(|| Some(fetched.join("cuda"))).filter(|root| has_libnvvm(root));
        let mut libraries: Vec<PathBuf> = cuda.iter().map(|root| root.join("nvvm/lib64")).collect();
        libraries.extend(unpacked_libraries(&fetched.join("llvm")).filter(|folder| folder.is_dir()));
        let toolchain = Toolchain::of(ws);
        Self {
            toolchain: toolchain.name().to_owned(),
            has_toolchain: toolchain.is_complete(),
            codegen,
            cuda,
            llvm_config: find_llvm_config(env_path("LLVM_CONFIG"), &fetched, &libraries),
            libclang: find_libclang(&fetched),
            libraries,
        }
    }

    /// The CUDA root, if it can build the back end.
    pub fn cuda_with_headers(&self) -> Option<&Path> {
        self.cuda.as_deref().filter(|root| has_headers(root))
    }

    /// Folders of the libraries that the back end loads.
    pub fn libraries(&self) -> &[PathBuf] {
        &self.libraries
    }

    /// Everything that is missing. Parts that only building the back end needs count if it has to
    /// be built.
    pub fn missing(&self) -> Vec<Part> {
        let mut missing = Vec::new();
        let mut unless = |there: bool, part: Part| {
            if !there {
                missing.push(part);
            }
        };
        unless(self.has_toolchain, Part::Toolchain(self.toolchain.clone()));
        match &self.cuda {
            None => unless(false, Part::Libnvvm),
            Some(root) => {
                let folder = root.join("nvvm/lib64");
                unless(folder.join(LIBNVVM).exists(), Part::LibnvvmLink(folder));
            }
        }
        match &self.codegen {
            Some(file) => unresolved(file, &self.libraries)
                .into_iter()
                .for_each(|name| unless(false, Part::Library(name))),
            None => {
                if let Err(fault) = &self.llvm_config {
                    unless(false, Part::Llvm(fault.clone()));
                }
                unless(self.libclang.is_some(), Part::Libclang);
                unless(self.cuda.is_none() || self.cuda_with_headers().is_some(), Part::CudaHeaders);
                unless(false, Part::Codegen);
            }
        }
        missing
    }
}

/// Where [`super::fetch()`] puts what it gets.
pub fn dir(ws: &Workspace) -> PathBuf {
    ws.target("nvvm")
}

/// The back end's source: a clone of [`super::fetch()`], or a checkout that the user put there.
pub fn source(ws: &Workspace) -> PathBuf {
    dir(ws).join("source")
}

/// The back end as [`super::fetch()`] builds it.
pub fn built(ws: &Workspace) -> PathBuf {
    dir(ws).join("build/release/librustc_codegen_nvvm.so")
}

/// `LD_LIBRARY_PATH` with these folders before the user's.
pub fn library_path(folders: &[PathBuf]) -> OsString {
    let user = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let user = std::env::split_paths(&user).filter(|folder| !folder.as_os_str().is_empty());
    // A folder that holds a colon cannot be in the list; the back end then names the library that
    // it does not find.
    std::env::join_paths(folders.iter().cloned().chain(user)).unwrap_or_default()
}

/// The folders that hold the libraries of packages unpacked in `root`.
pub fn unpacked_libraries(root: &Path) -> impl Iterator<Item = PathBuf> {
    let multiarch = format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    [root.join(multiarch), root.join("usr/lib/llvm-7/lib")].into_iter()
}

fn has_libnvvm(root: &Path) -> bool {
    let folder = root.join("nvvm/lib64");
    ["libnvvm.so", LIBNVVM].iter().any(|file| folder.join(file).exists())
        && root.join("nvvm/libdevice/libdevice.10.bc").is_file()
}

fn has_headers(root: &Path) -> bool {
    root.join("include/cuda.h").is_file() && root.join("nvvm/include/nvvm.h").is_file()
}

/// The first `llvm-config` of LLVM 7. The error reports why a named or fetched one is not used; a
/// program on `PATH` may be of any LLVM.
fn find_llvm_config(
    named: Option<PathBuf>,
    fetched: &Path,
    libraries: &[PathBuf],
) -> Result<PathBuf, Option<String>> {
    let version = |program: &Path| {
        let mut command = Command::new(program);
        // An unpacked one loads a library that was unpacked beside it.
        capture(command.arg("--version").env("LD_LIBRARY_PATH", library_path(libraries)))
    };
    let unpacked = Some(fetched.join("llvm/usr/bin/llvm-config-7")).filter(|file| file.exists());
    let mut fault = None;
    for program in named.into_iter().chain(unpacked) {
        match version(&program) {
            Ok(text) if text.starts_with("7.") => return Ok(program),
            Ok(text) => {
                fault.get_or_insert_with(|| format!("{} is of LLVM {text}", program.display()));
            }
            Err(error) => {
                fault.get_or_insert_with(|| format!("{error:#}"));
            }
        }
    }
    let mut on_path = ["llvm-config-7", "llvm-config"].into_iter().filter_map(workspace::on_path);
    on_path.find(|program| version(program).is_ok_and(|text| text.starts_with("7."))).ok_or(fault)
}

fn find_libclang(fetched: &Path) -> Option<PathBuf> {
    // Not libclang-cpp, which is another library.
    let is_libclang = |file: &PathBuf| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let version =
            name.strip_prefix("libclang-").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
        (name.starts_with("libclang.so") || version) && name.contains(".so")
    };
    let holds_it = |folder: &PathBuf| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).any(|file| is_libclang(&file))
    };
    let multiarch = format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let installed = Path::new("/").join(&multiarch);
    let roots = [fetched.join("clang").join(multiarch), installed, "/usr/lib64".into(), "/usr/lib".into()];
    let versions = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    let versions = versions.filter(|entry| entry.file_name().to_string_lossy().starts_with("llvm-"));
    let versions = versions.map(|entry| entry.path().join("lib"));
    env_path("LIBCLANG_PATH").into_iter().chain(roots).chain(versions).find(holds_it)
}

/// The libraries that `file` needs and the loader does not find, but for rustc's own, which is
/// already loaded.
fn unresolved(file: &Path, folders: &[PathBuf]) -> Vec<String> {
    let mut ldd = Command::new("ldd");
    let report = capture(ldd.arg(file).env("LD_LIBRARY_PATH", library_path(folders)));
    // Without ldd the compiler reports it, if it cannot load the back end.
    report.map_or_else(|_| Vec::new(), |report| not_found(&report))
}

fn not_found(report: &str) -> Vec<String> {
    report
        .lines()
        .filter_map(|line| line.trim().strip_suffix("=> not found"))
        .map(|name| name.trim().to_owned())
        .filter(|name| !name.starts_with("librustc_driver"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nowhere() -> Places {
        Places {
            toolchain: "nightly-x".into(),
            has_toolchain: false,
            codegen: None,
            cuda: None,
            llvm_config: Err(None),
            libclang: None,
            libraries: Vec::new(),
        }
    }

    #[test]
    fn everything_that_is_missing_is_named_with_its_remedy() {
        let missing = nowhere().missing();
        let toolchain = Part::Toolchain("nightly-x".into());
        assert_eq!(missing, [toolchain, Part::Libnvvm, Part::Llvm(None), Part::Libclang, Part::Codegen]);
        let text = MissingParts(missing.into_iter().map(Missing::of).collect()).to_string();
        for word in [
            "rustup toolchain install",
            "CUDA_PATH",
            "LLVM_CONFIG",
            "LIBCLANG_PATH",
            BACKEND_VAR,
            "fetch-nvvm",
        ] {
            assert!(text.contains(word), "{word}: {text}");
        }
        let failed = Missing::tried(Part::Llvm(None), &anyhow::anyhow!("no such package"));
        let text = MissingParts::after_fetching(vec![failed]).unwrap().to_string();
        assert!(text.contains("tried: no such package") && !text.contains("fetch-nvvm"), "{text}");
    }

    #[test]
    fn a_back_end_that_is_there_needs_nothing_to_be_built() {
        let codegen = Some(std::env::current_exe().unwrap());
        let places = Places { has_toolchain: true, codegen, ..nowhere() };
        assert_eq!(places.missing(), [Part::Libnvvm]);
    }

    #[test]
    fn a_wheels_libnvvm_lacks_the_link() {
        let root = tempfile::tempdir().unwrap();
        for file in ["nvvm/lib64/libnvvm.so", "nvvm/libdevice/libdevice.10.bc"] {
            workspace::write(&root.path().join(file), "").unwrap();
        }
        assert!(has_libnvvm(root.path()) && !has_headers(root.path()));
        let cuda = Some(root.path().to_owned());
        let places =
            Places { has_toolchain: true, codegen: None, cuda, llvm_config: Ok("a".into()), ..nowhere() };
        let folder = root.path().join("nvvm/lib64");
        let expected = [Part::LibnvvmLink(folder.clone()), Part::Libclang, Part::CudaHeaders, Part::Codegen];
        assert_eq!(places.missing(), expected);
        std::os::unix::fs::symlink("libnvvm.so", folder.join(LIBNVVM)).unwrap();
        assert_eq!(places.missing(), expected[1..]);
    }

    #[test]
    fn an_llvm_config_that_does_not_run_is_named_with_its_error() {
        let fetched = tempfile::tempdir().unwrap();
        let program = fetched.path().join("llvm/usr/bin/llvm-config-7");
        let write = |script: &str| {
            workspace::write(&program, script).unwrap();
            capture(Command::new("chmod").arg("755").arg(&program)).unwrap();
        };
        write("#!/bin/sh\n[ \"$LD_LIBRARY_PATH\" ] && echo 7.0.1\n");
        assert_eq!(find_llvm_config(None, fetched.path(), &["/llvm".into()]), Ok(program.clone()));
        write("#!/bin/sh\necho 'libLLVM-7.so.1: cannot open shared object file' >&2\nexit 127\n");
        let fault = find_llvm_config(None, fetched.path(), &[]).unwrap_err();
        let text = MissingParts(vec![Missing::of(Part::Llvm(fault))]).to_string();
        assert!(text.contains("llvm-config-7") && text.contains("libLLVM-7.so.1: cannot open"), "{text}");
        write("#!/bin/sh\necho 14.0.6\n");
        let fault = find_llvm_config(None, fetched.path(), &[]).unwrap_err().unwrap();
        assert!(fault.ends_with("llvm-config-7 is of LLVM 14.0.6"), "{fault}");
    }

    #[test]
    fn libraries_that_the_loader_does_not_find_are_named() {
        let report = "\tlinux-vdso.so.1 (0x00007ffc)\n\tlibLLVM-7.so.1 => not found\n\tlibnvvm.so.4 => not found\n\
                      \tlibrustc_driver-0a.so => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x00007f)\n";
        let names = not_found(report);
        assert_eq!(names, ["libLLVM-7.so.1", LIBNVVM]);
        let text = MissingParts(names.into_iter().map(|name| Missing::of(Part::Library(name))).collect())
            .to_string();
        assert!(text.contains("libllvm7") && text.contains("nvvm/lib64"), "{text}");
    }
}

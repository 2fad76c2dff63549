//! Parts of the back end, their places, and the remedy for each missing one.
//!
//! Each part is taken from where an environment variable names it, else from `target/nvvm`, where
//! [`super::fetch()`] puts it, else from where packages install it.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{TOOLCHAIN, has_toolchain};
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
    /// Looks for all parts; the error lists every one that is missing.
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
    /// The nightly, with its components.
    Toolchain,
    /// `librustc_codegen_nvvm.so`.
    Codegen,
    /// libNVVM by the name that the back end loads, and its library of device functions.
    Libnvvm,
    /// libNVVM is there, but not by the name that the back end loads.
    LibnvvmLink(PathBuf),
    /// To build the back end: `cuda.h` and `nvvm.h`.
    CudaHeaders,
    /// To build the back end: LLVM 7's headers and `llvm-config`.
    Llvm,
    /// To build the back end: libclang, which reads those headers.
    Libclang,
    /// A library that the back end loads, by file name.
    Library(String),
}

impl Part {
    /// Description of the part.
    fn what(&self) -> String {
        match self {
            Self::Toolchain => format!("the toolchain {TOOLCHAIN} with rust-src, rustc-dev and llvm-tools"),
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
            Self::Llvm => "LLVM 7 with headers, to build rustc_codegen_nvvm".into(),
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
            Self::Toolchain => format!("`rustup toolchain install {TOOLCHAIN} --component rust-src,rustc-dev,llvm-tools`"),
            Self::Codegen => format!(
                "clone Rust-CUDA, `LLVM_LINK_SHARED=1 cargo build -p rustc_codegen_nvvm --release` there, and set {BACKEND_VAR} to the \
                 librustc_codegen_nvvm.so it leaves. The crate of that name, 0.3.0, is of 2022 and compiles on no current rustc"
            ),
            Self::Libnvvm | Self::CudaHeaders => {
                "set CUDA_PATH to a CUDA 12 toolkit; CUDA 13's libNVVM writes PTX that needs newer drivers, and is not tested".into()
            }
            Self::LibnvvmLink(folder) => format!("`ln -s libnvvm.so {}`", folder.join(LIBNVVM).display()),
            Self::Llvm => "set LLVM_CONFIG to an llvm-config that says 7.x: Ubuntu 20.04's llvm-7 and llvm-7-dev, unpacked, work; \
                           Debian 12 has no LLVM 7"
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
    /// Those that fetching did not bring; `None` where nothing is missing.
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

/// Where the parts lie, as far as they are there.
pub struct Places {
    has_toolchain: bool,
    codegen: Option<PathBuf>,
    /// A CUDA root that holds libNVVM, under any name.
    cuda: Option<PathBuf>,
    /// `llvm-config` of an LLVM 7.
    pub llvm_config: Option<PathBuf>,
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
        Self {
            has_toolchain: has_toolchain(),
            codegen,
            cuda,
            llvm_config: find_llvm_config(&fetched),
            libclang: find_libclang(&fetched),
            libraries,
        }
    }

    /// The CUDA root, where it has what building the back end takes.
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
        unless(self.has_toolchain, Part::Toolchain);
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
                unless(self.llvm_config.is_some(), Part::Llvm);
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

fn find_llvm_config(fetched: &Path) -> Option<PathBuf> {
    let named = env_path("LLVM_CONFIG").map(Some).into_iter();
    let known = [Some(fetched.join("llvm/usr/bin/llvm-config-7"))].into_iter();
    let on_path = ["llvm-config-7", "llvm-config"].into_iter().map(workspace::on_path);
    named.chain(known).chain(on_path).flatten().find(|program| {
        capture(Command::new(program).arg("--version")).is_ok_and(|version| version.starts_with("7."))
    })
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

/// The libraries that `file` wants and the loader does not find, but for rustc's own, which is
/// loaded by then.
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
            has_toolchain: false,
            codegen: None,
            cuda: None,
            llvm_config: None,
            libclang: None,
            libraries: Vec::new(),
        }
    }

    #[test]
    fn everything_that_is_missing_is_named_with_its_remedy() {
        let missing = nowhere().missing();
        assert_eq!(missing, [Part::Toolchain, Part::Libnvvm, Part::Llvm, Part::Libclang, Part::Codegen]);
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
        let failed = Missing::tried(Part::Llvm, &anyhow::anyhow!("no such package"));
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
            Places { has_toolchain: true, codegen: None, cuda, llvm_config: Some("a".into()), ..nowhere() };
        let folder = root.path().join("nvvm/lib64");
        let expected = [Part::LibnvvmLink(folder.clone()), Part::Libclang, Part::CudaHeaders, Part::Codegen];
        assert_eq!(places.missing(), expected);
        std::os::unix::fs::symlink("libnvvm.so", folder.join(LIBNVVM)).unwrap();
        assert_eq!(places.missing(), expected[1..]);
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

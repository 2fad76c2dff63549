//! Finding a rustc that can build `core` for the GPU.
//!
//! No toolchain ships a prebuilt `core` for nvptx64, so the compiler must come with the source of
//! its own library.

mod debian;
pub mod rustup;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::workspace::{self, Workspace, capture};

/// Names a compiler to use as it is, before any other.
pub const OVERRIDE: &str = "EPOXIDE_KERNEL_RUSTC";

/// A rustc that comes with the source of its library.
#[derive(Clone, Debug)]
pub struct Compiler {
    /// The program.
    pub rustc: PathBuf,
    /// The cargo of the same release, where the toolchain has one.
    pub cargo: Option<PathBuf>,
    /// Output of its `-V`.
    pub version: String,
    /// The folder with `core`, `alloc` and `std`.
    pub library: PathBuf,
    /// Where we found it, in words.
    pub origin: &'static str,
}

impl Compiler {
    /// Runs a compiler's `-V`, and checks that the library source lies beside it.
    fn probe(rustc: &Path, origin: &'static str) -> Result<Self> {
        let ask = |arguments: &[&str]| {
            let mut command = Command::new(rustc);
            command.args(arguments).env_remove("RUSTUP_TOOLCHAIN");
            capture(&mut command)
        };
        let version = ask(&["-V"])?;
        let sysroot = PathBuf::from(ask(&["--print", "sysroot"])?);
        let library = sysroot.join("lib/rustlib/src/rust/library");
        if !library.join("core/Cargo.toml").is_file() {
            bail!(
                "{} has no rust-src: {} is missing",
                rustc.display(),
                library.join("core/Cargo.toml").display()
            );
        }
        // Never rustup's proxy, which can lie beside a rustc that is one as well.
        let cargo = Some(sysroot.join("bin/cargo")).filter(|cargo| cargo.is_file());
        Ok(Self { rustc: rustc.to_owned(), cargo, version, library, origin })
    }
}

/// A compiler that is already on this machine; `Ok(None)` where there is none.
pub fn installed(ws: &Workspace) -> Result<Option<Compiler>> {
    if let Some(rustc) = workspace::env_path(OVERRIDE) {
        return Compiler::probe(&rustc, OVERRIDE).context(OVERRIDE).map(Some);
    }
    Ok(rustup::installed().or_else(|_| debian::installed(ws)).ok())
}

/// A compiler, fetched where this machine has none. The error names every remedy.
pub fn find_or_fetch(ws: &Workspace) -> Result<Compiler> {
    if let Some(found) = installed(ws)? {
        return Ok(found);
    }
    let no_rustup = match rustup::fetch_source().and_then(|()| rustup::installed()) {
        Ok(compiler) => return Ok(compiler),
        Err(error) => error,
    };
    println!("rust-src: {no_rustup:#}");
    let no_debian = match debian::fetch(ws).and_then(|()| debian::installed(ws)) {
        Ok(compiler) => return Ok(compiler),
        Err(error) => error,
    };
    bail!(
        "no compiler here can build the kernels (`cargo build` needs none: it uses the PTX that was built before).\n\
         Any one of these helps:\n\
         - {}   [tried: {no_rustup:#}]\n\
         - {}   [tried: {no_debian:#}]\n\
         - set {OVERRIDE} to a rustc 1.95 or later that has rust-src",
        rustup::remedy(),
        debian::REMEDY,
    )
}

/// For `doctor`: each source of a compiler, with the compiler found or a remedy.
pub fn survey(ws: &Workspace) -> Vec<(&'static str, Result<Compiler>)> {
    let mut places = Vec::new();
    if let Some(rustc) = workspace::env_path(OVERRIDE) {
        places.push((OVERRIDE, Compiler::probe(&rustc, OVERRIDE)));
    }
    places.push(("rustup", rustup::installed().with_context(rustup::remedy)));
    places.push(("Debian packages", debian::installed(ws).context(debian::REMEDY)));
    places
}

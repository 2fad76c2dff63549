//! A compiler and the source of its library.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use crate::workspace::capture;

/// A rustc that comes with the source of its library.
#[derive(Clone, Debug)]
pub struct Compiler {
    /// The program.
    pub rustc: PathBuf,
    /// Output of its `-V`.
    pub version: String,
    /// The folder with `core`, `alloc` and `std`.
    pub library: PathBuf,
    /// Where we found it, in words.
    pub origin: &'static str,
}

impl Compiler {
    /// Runs a compiler's `-V`, and checks that the library source lies beside it.
    pub(super) fn probe(rustc: &Path, origin: &'static str) -> Result<Self> {
        let ask = |arguments: &[&str]| {
            let mut command = Command::new(rustc);
            command.args(arguments).env_remove("RUSTUP_TOOLCHAIN");
            capture(&mut command)
        };
        let version = ask(&["-V"])?;
        let library = Path::new(&ask(&["--print", "sysroot"])?).join("lib/rustlib/src/rust/library");
        if !library.join("core/Cargo.toml").is_file() {
            bail!(
                "{} has no rust-src: {} is missing",
                rustc.display(),
                library.join("core/Cargo.toml").display()
            );
        }
        Ok(Self { rustc: rustc.to_owned(), version, library, origin })
    }
}

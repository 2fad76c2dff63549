//! The compiler back end that writes the PTX, its architecture and its PTX version.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use epoxide_vgpu::ptx::Version;

/// A way from Rust to PTX.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// rustc's own `nvptx64-nvidia-cuda` target. The committed PTX comes from this one.
    InTree,
    /// Rust-CUDA's `rustc_codegen_nvvm`, where the user has it.
    Nvvm,
}

impl Backend {
    /// The highest `.version` that this back end may write.
    ///
    /// It decides the oldest driver that loads the PTX: 8.4 needs R550. libNVVM 12.9 always writes
    /// 8.8 (R575).
    pub const fn version_ceiling(self) -> Version {
        match self {
            Self::InTree => Version { major: 8, minor: 4 },
            Self::Nvvm => Version { major: 8, minor: 8 },
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InTree => "in-tree",
            Self::Nvvm => "nvvm",
        })
    }
}

/// A GPU architecture by PTX's name for it, such as `sm_90`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arch(String);

impl Arch {
    /// `sm_90`.
    pub fn sm(&self) -> &str {
        &self.0
    }

    /// The number: 90 of `sm_90` and of `sm_90a`.
    pub fn number(&self) -> u32 {
        number(&self.0).unwrap_or_default()
    }

    /// The project's other architectures that run PTX for this one, because the driver compiles it
    /// there. PTX for `sm_90a` runs on no newer ones.
    pub fn newer(&self) -> impl Iterator<Item = Arch> + '_ {
        const KNOWN: [&str; 3] = ["sm_90", "sm_100", "sm_120"];
        let forward = !self.0.ends_with(['a', 'f']);
        let known = KNOWN.into_iter().map(|name| Arch(name.to_owned()));
        known.filter(move |arch| forward && arch.number() > self.number())
    }

    /// `compute_90`, as libNVVM calls it.
    pub fn compute(&self) -> String {
        self.0.replacen("sm_", "compute_", 1)
    }
}

/// The number in `sm_90` and `sm_90a`.
fn number(name: &str) -> Option<u32> {
    name.strip_prefix("sm_")?.trim_end_matches(['a', 'f']).parse().ok()
}

impl Default for Arch {
    /// `sm_90`.
    fn default() -> Self {
        Self("sm_90".to_owned())
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Arch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match number(text) {
            Some(80..=90) => Ok(Self(text.to_owned())),
            // The in-tree back end writes PTX 8.4, which ends at sm_90a. The nvvm back end writes
            // LLVM 7's dialect, which libNVVM does not take for newer GPUs.
            Some(91..) => {
                Err("the compilers here end at sm_90a: choose sm_90, whose PTX newer GPUs run".to_owned())
            }
            Some(_) => Err("the functions of epoxide-simt are for sm_80 and later".to_owned()),
            None => Err("expected a name such as sm_90".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures() {
        assert_eq!("sm_90".parse::<Arch>().unwrap().compute(), "compute_90");
        assert!("sm_90a".parse::<Arch>().is_ok());
        assert!("sm_75".parse::<Arch>().is_err());
        assert!("90".parse::<Arch>().is_err());
        for newer in ["sm_100", "sm_100a", "sm_120"] {
            let error = newer.parse::<Arch>().unwrap_err();
            assert!(error.contains("choose sm_90, whose PTX newer GPUs run"), "{error}");
        }
    }

    #[test]
    fn ptx_runs_on_newer_architectures_unless_it_is_for_one_alone() {
        let newer = |text: &str| {
            let arch = text.parse::<Arch>().unwrap();
            arch.newer().map(|arch| arch.sm().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(newer("sm_80"), ["sm_90", "sm_100", "sm_120"]);
        assert_eq!(newer("sm_90"), ["sm_100", "sm_120"]);
        assert_eq!(newer("sm_90a"), [""; 0]);
    }

    #[test]
    fn versions_compare_by_number() {
        let version = |text: &str| text.parse::<Version>().unwrap();
        assert!(version("8.10") > version("8.4"));
        assert!(version("9.0") > version("8.10"));
        assert!("8".parse::<Version>().is_err());
    }
}

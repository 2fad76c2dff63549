//! Which compiler back end writes the PTX, for which architecture, in which PTX version.

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
    /// It decides the oldest driver that loads the PTX: 8.4 needs R550. libNVVM 12.9 writes 8.8
    /// (R575) and cannot be told otherwise.
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

    /// `compute_90`, as libNVVM calls it.
    pub fn compute(&self) -> String {
        self.0.replacen("sm_", "compute_", 1)
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
        let number = text.strip_prefix("sm_").unwrap_or_default().trim_end_matches(['a', 'f']);
        match number.parse::<u32>() {
            Ok(90..) => Ok(Self(text.to_owned())),
            Ok(_) => Err("the kernels use instructions of sm_90 and later".to_owned()),
            Err(_) => Err("expected a name such as sm_90".to_owned()),
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
        assert!("sm_80".parse::<Arch>().is_err());
        assert!("90".parse::<Arch>().is_err());
    }

    #[test]
    fn versions_compare_by_number() {
        let version = |text: &str| text.parse::<Version>().unwrap();
        assert!(version("8.10") > version("8.4"));
        assert!(version("9.0") > version("8.10"));
        assert!("8".parse::<Version>().is_err());
    }
}

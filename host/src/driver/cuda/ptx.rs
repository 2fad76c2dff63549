//! Which driver reads which PTX version.

use epoxide_vgpu::ptx::Version;

/// One release of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DriverRelease {
    /// The newest PTX it reads.
    pub ptx: Version,
    /// Its CUDA version, as `cuDriverGetVersion` reports it.
    pub cuda: u32,
    /// Its release branch: 580 for R580.
    pub branch: u32,
}

/// "PTX Release History" of the PTX ISA manual, oldest first.
const RELEASES: [DriverRelease; 13] = [
    release(7, 8, 11080, 520),
    release(8, 0, 12000, 525),
    release(8, 1, 12010, 530),
    release(8, 2, 12020, 535),
    release(8, 3, 12030, 545),
    release(8, 4, 12040, 550),
    release(8, 5, 12050, 555),
    release(8, 5, 12060, 560),
    release(8, 6, 12070, 565),
    release(8, 7, 12080, 570),
    release(8, 8, 12090, 575),
    release(9, 0, 13000, 580),
    release(9, 1, 13010, 590),
];

const fn release(major: u32, minor: u32, cuda: u32, branch: u32) -> DriverRelease {
    DriverRelease { ptx: Version { major, minor }, cuda, branch }
}

/// The oldest driver release that reads this PTX; `None` for PTX newer than the table.
pub fn oldest_driver_for(version: Version) -> Option<DriverRelease> {
    RELEASES.into_iter().find(|release| release.ptx >= version)
}

/// The newest PTX that a driver of this CUDA version reads, if in the table.
pub fn newest_ptx_for(cuda: u32) -> Option<Version> {
    RELEASES.into_iter().rev().find(|release| release.cuda <= cuda).map(|release| release.ptx)
}

/// `13.0` for 13000.
pub fn cuda_version_text(cuda: u32) -> String {
    format!("{}.{}", cuda / 1000, cuda % 1000 / 10)
}

/// The error text for a module whose PTX is too new for a driver of CUDA version `cuda`, with the
/// remedy.
pub fn too_new(ptx: &str, cuda: u32) -> String {
    let wanted = match Version::of(ptx) {
        Some(version) => format!("the module is PTX {version}"),
        None => "the module has no readable .version".into(),
    };
    let have = match newest_ptx_for(cuda) {
        Some(newest) => format!("this driver (CUDA {}) reads up to PTX {newest}", cuda_version_text(cuda)),
        None => format!("this driver is of CUDA {}", cuda_version_text(cuda)),
    };
    let remedy = match Version::of(ptx).map(oldest_driver_for) {
        Some(Some(release)) => {
            format!("install driver R{} (CUDA {}) or newer", release.branch, cuda_version_text(release.cuda))
        }
        _ => "install a newer driver, or build the kernels for a lower PTX version".into(),
    };
    format!("{wanted}, {have}; {remedy}")
}

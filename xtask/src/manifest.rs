//! What the kernels promise about themselves. The gpu crate owns the table; the lints hold the PTX to it.

pub use epoxide_gpu::kernels::{KernelInfo, MANIFEST};

/// The kernel of this entry name.
pub fn find<'a>(manifest: &'a [KernelInfo], entry: &str) -> Option<&'a KernelInfo> {
    manifest.iter().find(|kernel| kernel.name == entry)
}

/// Sample kernels for the unit tests of other modules.
#[cfg(test)]
pub mod samples {
    use super::KernelInfo;
    use epoxide_gpu::kernels::ParamLayout;

    const PARAMS: &[ParamLayout] =
        &[ParamLayout { name: "src", size: 8, align: 8 }, ParamLayout { name: "n", size: 4, align: 4 }];

    /// A kernel `name(src: u64, n: u32)` of up to 256 threads, one block barrier and no exceptions.
    pub const fn kernel(name: &'static str) -> KernelInfo {
        KernelInfo {
            name,
            params: PARAMS,
            max_threads: 256,
            min_blocks_per_sm: 2,
            barriers: 1,
            max_registers: 64,
            dependent: false,
            local_depot_allowed: None,
            traps_allowed: 0,
        }
    }
}

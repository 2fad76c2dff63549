//! The loaded kernels, and how large their launches are.

use std::borrow::Cow;
use std::sync::Arc;
use std::thread::ScopedJoinHandle;

use epoxide_gpu::kernels::{
    self as gpu, Call, CeilingPull, CeilingPush, CombineBf16, CombineF32, Dispatch, DispatchLayout,
    MAX_SLOT_BYTES, Notify, StageCombine,
};
use epoxide_gpu::layout::row_stride;

use super::DType;
use crate::driver::{Device, Kernel, LaunchConfig, Module, Stream};
use crate::error::{Error, Result};

/// Names a file with PTX to load instead of the embedded one. Development only.
const PTX_OVERRIDE: &str = "EPOXIDE_PTX";

/// Launch shapes of the copy kernels. The defaults are the best measured on H200 (docs/BENCHMARKS.md).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// Warps per block in dispatch, 1 to 16.
    pub dispatch_warps: u32,
    /// Largest stage in dispatch, in bytes; longer rows travel in pieces.
    pub dispatch_stage_bytes: u32,
    /// Most stages per warp in dispatch, at least 2.
    pub dispatch_stages: u32,
    /// Warps per block in combine, 1 to 16.
    pub combine_warps: u32,
    /// Largest slot in combine, in bytes, at most 4096; longer rows travel in pieces.
    pub combine_slot_bytes: u32,
    /// Most slots per warp in combine, at least 2.
    pub combine_slots: u32,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning {
            dispatch_warps: 3,
            dispatch_stage_bytes: 16384,
            dispatch_stages: 10,
            combine_warps: 16,
            combine_slot_bytes: 4096,
            combine_slots: 3,
        }
    }
}

impl Tuning {
    /// Checks the ranges.
    pub(super) fn validate(&self) -> Result<()> {
        let check = |name, value: u32, range: std::ops::RangeInclusive<u32>| {
            if range.contains(&value) {
                return Ok(());
            }
            Err(Error::argument(name, value, format!("must be {} to {}", range.start(), range.end())))
        };
        check("dispatch_warps", self.dispatch_warps, 1..=16)?;
        check("dispatch_stage_bytes", self.dispatch_stage_bytes, 128..=65536)?;
        check("dispatch_stages", self.dispatch_stages, 2..=32)?;
        check("combine_warps", self.combine_warps, 1..=16)?;
        check("combine_slot_bytes", self.combine_slot_bytes, 512..=MAX_SLOT_BYTES)?;
        check("combine_slots", self.combine_slots, 2..=32)
    }
}

/// Warps per block, buffers per warp, bytes per buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RingShape {
    pub warps: u32,
    pub count: u32,
    pub bytes: u32,
}

impl RingShape {
    /// Fits rings of buffers of `bytes` into `shared_bytes`: up to `count` for each of up to `warps` warps. Fewer warps
    /// come before fewer than three buffers, which is what keeps loads and stores in flight together.
    fn fit(bytes: u32, warps: u32, count: u32, shared_bytes: u32) -> RingShape {
        let per_warp = |warps: u32| shared_bytes / (warps * (bytes + 8));
        let mut warps = warps;
        while warps > 1 && per_warp(warps) < 3.min(count) {
            warps -= 1;
        }
        RingShape { warps, count: per_warp(warps).clamp(2, count), bytes }
    }

    pub fn shared_bytes(&self) -> u32 {
        self.warps * self.count * (self.bytes + 8)
    }

    pub fn threads(&self) -> u32 {
        self.warps * 32
    }
}

/// The kernels of one device.
#[derive(Debug)]
pub(super) struct Kernels {
    pub dispatch_layout: Kernel,
    pub notify: Kernel,
    pub dispatch: Kernel,
    pub stage_combine: Kernel,
    pub ceiling_push: Kernel,
    pub ceiling_pull: Kernel,
    combine_bf16: Kernel,
    combine_f32: Kernel,
    tuning: Tuning,
    shared_limit: u32,
}

impl Kernels {
    /// Loads the embedded PTX: every kernel as a module of its own, all at once, since a driver compiles a module on one
    /// core.
    pub fn load(device: &Arc<dyn Device>, tuning: Tuning) -> Result<Kernels> {
        let text = match std::env::var_os(PTX_OVERRIDE) {
            None => Cow::Borrowed(epoxide_gpu::PTX),
            Some(path) => Cow::Owned(std::fs::read_to_string(&path).map_err(|error| {
                Error::argument(PTX_OVERRIDE, path.to_string_lossy(), format!("cannot be read: {error}"))
            })?),
        };
        let shared_limit = device.info().max_shared_bytes_per_block;
        std::thread::scope(|scope| {
            let load = |info: gpu::KernelInfo, shared_bytes| {
                let ptx = epoxide_gpu::single_kernel(&text, info.name);
                scope.spawn(move || Module::load(device, &ptx)?.kernel(info.name, shared_bytes))
            };
            use gpu::Kernel as _;
            // The largest first.
            let combine_bf16 = load(CombineBf16::INFO, shared_limit);
            let combine_f32 = load(CombineF32::INFO, shared_limit);
            let dispatch = load(Dispatch::INFO, shared_limit);
            let notify = load(Notify::INFO, NOTIFY_SHARED_BYTES);
            let dispatch_layout = load(DispatchLayout::INFO, shared_limit);
            let stage_combine = load(StageCombine::INFO, 0);
            let ceiling_push = load(CeilingPush::INFO, shared_limit);
            let ceiling_pull = load(CeilingPull::INFO, shared_limit);
            Ok(Kernels {
                dispatch_layout: joined(dispatch_layout)?,
                notify: joined(notify)?,
                dispatch: joined(dispatch)?,
                stage_combine: joined(stage_combine)?,
                ceiling_push: joined(ceiling_push)?,
                ceiling_pull: joined(ceiling_pull)?,
                combine_bf16: joined(combine_bf16)?,
                combine_f32: joined(combine_f32)?,
                tuning,
                shared_limit,
            })
        })
    }

    /// The ring of a dispatch, and the bytes of a row that travel together: a stage holds those and the scales.
    pub fn dispatch_ring(&self, row_bytes: u32, num_scales: u32) -> (RingShape, u32) {
        let t = &self.tuning;
        let pieces = row_bytes.div_ceil(t.dispatch_stage_bytes);
        let piece_bytes = row_bytes.div_ceil(pieces).next_multiple_of(16);
        let stage_bytes = (piece_bytes + num_scales * 4).next_multiple_of(128);
        let ring = RingShape::fit(stage_bytes, t.dispatch_warps, t.dispatch_stages, self.shared_limit);
        (ring, piece_bytes)
    }

    pub fn combine_ring(&self, row_bytes: u32) -> RingShape {
        let t = &self.tuning;
        // A warp's lanes take 512 bytes at a time; whole turns keep all lanes busy.
        let align = if row_bytes < 512 { 16 } else { 512 };
        let pieces = row_bytes.div_ceil(t.combine_slot_bytes / align * align);
        let bytes = row_bytes.div_ceil(pieces).next_multiple_of(align);
        RingShape::fit(bytes, t.combine_warps, t.combine_slots, self.shared_limit)
    }

    /// The combine kernel for rows of `dtype`.
    pub fn combine(&self, dtype: DType) -> &Kernel {
        if dtype == DType::F32 { &self.combine_f32 } else { &self.combine_bf16 }
    }
}

fn joined(loader: ScopedJoinHandle<'_, Result<Kernel>>) -> Result<Kernel> {
    loader.join().unwrap_or_else(|_| Err(Error::os("module load", "the loading thread panicked")))
}

/// Dynamic shared memory of notify, in bytes; its documentation has the map.
pub(super) const NOTIFY_SHARED_BYTES: u32 = 80 * 4;

/// Launches a checked call.
///
/// # Safety
/// The addresses in the call's arguments are live until the kernel ends.
pub(super) unsafe fn launch<K: gpu::Kernel>(
    stream: &Stream,
    kernel: &Kernel,
    grid: u32,
    block: u32,
    shared_bytes: u32,
    call: std::result::Result<Call<K>, gpu::ContractError>,
) -> Result<()> {
    let call = call.map_err(|broken| Error::Launch {
        kernel: broken.kernel,
        rule: format!("requires {}: {}", broken.clause, broken.values),
    })?;
    let config = LaunchConfig { grid, block, shared_bytes, cooperative: false };
    // SAFETY: `Call<K>` holds exactly kernel K's parameter; the caller vouches for the addresses.
    unsafe { stream.launch(kernel, &config, &[call.param()]) }
}

/// Bytes from one pool row to the next, as the kernels compute it.
pub(super) fn pool_row_stride(row_bytes: u64) -> u64 {
    row_stride(row_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARED: u32 = 227 * 1024;

    #[test]
    fn rings_fit_in_shared_memory() {
        for bytes in (16..65536).step_by(112) {
            let ring = RingShape::fit(bytes, 8, 8, SHARED);
            assert!(
                ring.shared_bytes() <= SHARED && ring.count >= 2 && ring.bytes == bytes,
                "{bytes}: {ring:?}"
            );
        }
    }

    #[test]
    fn the_benchmark_rows_get_the_measured_shapes() {
        assert_eq!(RingShape::fit(14336, 4, 8, SHARED), RingShape { warps: 4, count: 4, bytes: 14336 });
        assert_eq!(RingShape::fit(3584, 12, 16, SHARED), RingShape { warps: 12, count: 5, bytes: 3584 });
    }
}

//! High throughput: the kernels in front of and behind those of an operation that is launched as two
//! halves, or whose waits are measured.

use epoxide_simt::{Global, kernel_args};

use super::args::CombineArgs;
use super::assert::layout_assert;
use super::device_ptr::DevicePtr;
use super::pool::Comm;

/// Arguments of `enter_operation`.
#[kernel_args(requires(self.comm.num_ranks >= 1))]
pub struct EnterArgs {
    /// The peers, and the call of the operation.
    pub comm: Comm,
    /// In: the [`super::PlanHeader`] of the routing that the operation goes by. Null in a dispatch
    /// with a count exchange, whose plan will be its own.
    pub header: DevicePtr,
    /// In and out, or null where entries are not waited for: i64 `[num_ranks]`, ns that each rank
    /// has been waited for.
    pub waited: Global<u64>,
    /// 1 where `end_operation` will end the operation.
    pub holds: u32,
    /// 1 in a combine.
    pub is_combine: u32,
}

layout_assert!(EnterArgs, size = size_of::<Comm>() + 24, is_combine at size_of::<Comm>() + 20);

/// Arguments of `end_operation`.
#[kernel_args(requires(self.combine.comm.num_ranks >= 1, self.is_combine == 0 || self.combine.pieces >= 1))]
pub struct EndArgs {
    /// The peers, and the sums of a combine; a dispatch has no tokens here.
    pub combine: CombineArgs,
    /// In and out, or null: i64 `[num_ranks]`, ns that each rank has been waited for.
    pub waited: Global<u64>,
    /// 1 in a combine.
    pub is_combine: u64,
}

layout_assert!(EndArgs, size = size_of::<CombineArgs>() + 16, is_combine at size_of::<CombineArgs>() + 8);

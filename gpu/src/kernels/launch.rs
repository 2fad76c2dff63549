//! The host's side of `#[kernel]`.

use bytemuck::Pod;
use std::fmt;
use std::marker::PhantomData;

/// A parameter of a PTX entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamLayout {
    /// Its name in the source.
    pub name: &'static str,
    /// Bytes.
    pub size: usize,
    /// Alignment in bytes.
    pub align: usize,
}

/// What the PTX of a kernel must look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// Name of the entry.
    pub name: &'static str,
    /// Parameters, in order.
    pub params: &'static [ParamLayout],
    /// Most threads per block (`.maxntid`).
    pub max_threads: u32,
    /// Blocks that must fit on one multiprocessor (`.minnctapersm`).
    pub min_blocks_per_sm: u32,
    /// Number of `barrier.sync` instructions.
    pub barriers: u32,
    /// Most registers per thread.
    pub max_registers: u32,
    /// Why the kernel may use local memory, if it may.
    pub local_depot_allowed: Option<&'static str>,
    /// Number of `trap` instructions.
    pub traps_allowed: u32,
}

/// A kernel that the host can call.
pub trait Kernel {
    /// Its argument struct.
    type Args: Pod;
    /// What its PTX must look like.
    const INFO: KernelInfo;
    /// Checks the `requires` clauses against `args`.
    fn call(args: Self::Args) -> Result<Call<Self>, ContractError>
    where
        Self: Sized;
}

/// A checked call of kernel `K`: only [`Kernel::call`] makes one.
pub struct Call<K: Kernel> {
    args: K::Args,
    kernel: PhantomData<K>,
}

impl<K: Kernel> Call<K> {
    pub(super) fn new(args: K::Args) -> Self {
        Call { args, kernel: PhantomData }
    }

    /// The bytes of the one parameter.
    pub fn param(&self) -> &[u8] {
        bytemuck::bytes_of(&self.args)
    }
}

/// A `requires` clause that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContractError {
    /// The kernel.
    pub kernel: &'static str,
    /// The clause as written.
    pub clause: &'static str,
    /// What its sides came to.
    pub values: String,
}

impl fmt::Display for ContractError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {} requires {}: {}", self.kernel, self.clause, self.values)
    }
}

impl std::error::Error for ContractError {}

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
    /// Whether its first instruction waits until the kernel in front of it in the stream has ended
    /// (`griddepcontrol.wait`): then it may be launched before that (programmatic dependent launch).
    pub dependent: bool,
    /// Why the kernel may use local memory, if it may.
    pub local_depot_allowed: Option<&'static str>,
    /// Number of `trap` instructions.
    pub traps_allowed: u32,
}

/// An entry of the PTX module: what `#[kernel]` makes a type of. The type's own `call(..)`, which takes what the kernel takes, checks its
/// clauses and gives a [`Call`].
pub trait Entry {
    /// Its argument struct.
    type Args: Pod;
    /// What its PTX must look like.
    const INFO: KernelInfo;
}

/// A checked call of kernel `K`: only its `call` makes one.
pub struct Call<K: Entry> {
    args: K::Args,
    kernel: PhantomData<K>,
}

impl<K: Entry> Call<K> {
    pub(super) fn new(args: K::Args) -> Self {
        Call { args, kernel: PhantomData }
    }

    /// The bytes of the one parameter.
    pub fn param(&self) -> &[u8] {
        bytemuck::bytes_of(&self.args)
    }
}

/// A `requires` clause that does not hold.
#[derive(Clone, PartialEq, Eq)]
pub struct ContractError {
    /// The kernel.
    pub kernel: &'static str,
    /// The clause as written.
    pub clause: &'static str,
    /// What the sides of a comparison came to; of another clause, the arguments that it looks at.
    pub values: String,
}

impl fmt::Display for ContractError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {} requires {}: {}", self.kernel, self.clause, self.values)
    }
}

impl fmt::Debug for ContractError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for ContractError {}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable;

    use crate::kernels::{InternodeCount, StageCombine};
    use crate::layout::{InternodeCountArgs, StageArgs};

    #[test]
    fn a_clause_that_does_not_hold_shows_its_values() {
        let args = StageArgs { row_bytes: 24, ..StageArgs::zeroed() };
        let error = StageCombine::call(args).err().unwrap();
        let text = "kernel stage_combine requires args.row_bytes.is_multiple_of(16): args.row_bytes = 24";
        assert_eq!((error.to_string(), format!("{error:?}")), (text.to_owned(), text.to_owned()));
        let args =
            InternodeCountArgs { num_channels: 1, num_ranks: 3, ranks_per_node: 2, ..Zeroable::zeroed() };
        let error = InternodeCount::call(args).err().unwrap();
        assert_eq!(error.values, "args.num_ranks = 3, args.ranks_per_node = 2");
        let error = InternodeCount::call(InternodeCountArgs { num_channels: 0, ..args }).err().unwrap();
        assert_eq!(error.values, "0 against 1");
    }
}

//! The host's side of `#[kernel]`: the items of a kernel's type, and checked calls.

use alloc::format;
use alloc::string::String;
use core::fmt;
use core::marker::PhantomData;

use bytemuck::Pod;

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

/// The properties that the PTX of a kernel must have. `to_string()` gives the line that describes
/// it in the PTX.
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
    /// (`griddepcontrol.wait`). Such a kernel may be launched before that (programmatic dependent
    /// launch).
    pub dependent: bool,
    /// Why the kernel may use local memory, if it may.
    pub local_depot_allowed: Option<&'static str>,
    /// Number of `trap` instructions.
    pub traps_allowed: u32,
    /// A hash of the kernel's attribute, signature and body.
    pub source: u64,
}

/// An entry of a PTX module. The type's own `call(..)`, which takes what the kernel takes, checks
/// its clauses and returns a [`Call`].
///
/// # Safety
/// `#[kernel]` implements it, and nothing else does: `Args` is what the PTX entry `INFO.name`
/// takes, and calls come from the type's `call`.
pub unsafe trait Entry {
    /// Its argument struct.
    type Args: Pod;
    /// The properties that its PTX must have.
    const INFO: KernelInfo;
}

/// The clauses of a struct that kernels share. `#[kernel_args]` implements it.
pub trait Contract: Pod {
    /// Checks the clauses, in their order. `path` is what kernel `kernel` calls the struct.
    ///
    /// # Errors
    /// The first clause that does not hold.
    fn check(&self, kernel: &'static str, path: &str) -> Result<(), ContractError>;
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Blocks.
    pub grid: u32,
    /// Threads per block.
    pub block: u32,
    /// Dynamic shared memory per block, in bytes.
    pub shared_bytes: u32,
}

/// The shape of a launch by the kernel's attribute, for the arguments of a call. `None`:
/// it says nothing.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Named {
    pub grid: Option<u32>,
    pub block: Option<u32>,
    pub shared_bytes: Option<u32>,
}

/// A checked call of kernel `K`: only its `call` makes one.
pub struct Call<K: Entry> {
    args: K::Args,
    named: Named,
    kernel: PhantomData<K>,
}

impl<K: Entry> Clone for Call<K> {
    fn clone(&self) -> Self {
        Call { args: self.args, named: self.named, kernel: PhantomData }
    }
}

impl<K: Entry> fmt::Debug for Call<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call")
            .field("kernel", &K::INFO.name)
            .field("named", &self.named)
            .finish_non_exhaustive()
    }
}

impl<K: Entry> Call<K> {
    /// A call whose clauses hold.
    ///
    /// # Safety
    /// Every clause of the kernel's contract holds for `args`.
    #[doc(hidden)]
    pub unsafe fn checked(args: K::Args, named: Named) -> Self {
        Call { args, named, kernel: PhantomData }
    }

    /// The name of the PTX entry.
    pub fn name(&self) -> &'static str {
        K::INFO.name
    }

    /// The bytes of the one parameter.
    pub fn param(&self) -> &[u8] {
        bytemuck::bytes_of(&self.args)
    }

    /// The shape of the launch, by the kernel's attribute. Without `shared` in it, the block has no
    /// dynamic shared memory.
    ///
    /// # Errors
    /// The attribute names no grid or no block, or the block is empty or larger than `threads`.
    pub fn shape(&self) -> Result<Shape, ContractError> {
        let missing = |clause| ContractError {
            kernel: K::INFO.name,
            clause: String::from(clause),
            values: String::from("its attribute names none; launch it with a shape of your own"),
        };
        let grid = self.named.grid.ok_or_else(|| missing("grid = .."))?;
        let block = self.named.block.ok_or_else(|| missing("block = .."))?;
        self.shape_of(grid, block, self.named.shared_bytes.unwrap_or(0))
    }

    /// A shape of the caller's, held to what the kernel's attribute says.
    ///
    /// # Errors
    /// The attribute names another grid, another block or more shared memory; or the grid is empty,
    /// or the block is empty or larger than `threads`.
    pub fn shape_of(&self, grid: u32, block: u32, shared_bytes: u32) -> Result<Shape, ContractError> {
        let Named { grid: want_grid, block: want_block, shared_bytes: want_shared } = self.named;
        let error = |clause: &str, values| {
            Err(ContractError { kernel: K::INFO.name, clause: String::from(clause), values })
        };
        if let Some(want) = want_grid
            && want != grid
        {
            return error("grid = ..", format!("{want} blocks, {grid} were given"));
        }
        if let Some(want) = want_block
            && want != block
        {
            return error("block = ..", format!("{want} threads, {block} were given"));
        }
        if let Some(want) = want_shared
            && shared_bytes < want
        {
            return error("shared = ..", format!("{want} bytes of shared memory, {shared_bytes} were given"));
        }
        if grid == 0 {
            return error("grid >= 1", String::from("0 against 1"));
        }
        if !(1..=K::INFO.max_threads).contains(&block) {
            let most = K::INFO.max_threads;
            return error("1 <= block <= threads", format!("{block} threads in a block of at most {most}"));
        }
        Ok(Shape { grid, block, shared_bytes })
    }
}

/// A clause of a kernel's contract that does not hold.
#[derive(Clone, PartialEq, Eq)]
pub struct ContractError {
    /// The kernel.
    pub kernel: &'static str,
    /// The clause as written. In one of the argument struct, the argument's name stands for `self`.
    pub clause: String,
    /// The values of both sides of a comparison, or the arguments of another clause.
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

impl core::error::Error for ContractError {}

/// The text of a clause of an argument struct, with `path` in place of `self`.
#[doc(hidden)]
pub fn spelled(text: &str, path: &str) -> String {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut words = text.split("self");
    let mut spelled = String::from(words.next().unwrap_or_default());
    for word in words {
        let is_inside = spelled.ends_with(is_word) || word.starts_with(is_word);
        spelled.push_str(if is_inside { "self" } else { path });
        spelled.push_str(word);
    }
    spelled
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;
    use crate::{Global, kernel, kernel_args};

    const THREADS: u32 = 64;

    /// Strides by its block, so that it must have that many threads.
    #[kernel(
        threads = THREADS, block = THREADS, grid = len.div_ceil(THREADS), shared = len * 4,
        requires(len >= 1, len.is_multiple_of(2))
    )]
    unsafe fn shaped(out: Global<u32>, len: u32) {
        out.st(0, len);
    }

    /// Runs in any shape.
    #[kernel(threads = 128)]
    unsafe fn free(out: Global<u32>, len: u32) {
        out.st(0, len);
    }

    #[test]
    fn a_call_carries_the_shape_that_its_arguments_ask_for() {
        let call = Shaped::call(Global::new(16), 130).unwrap();
        assert_eq!(call.shape().unwrap(), Shape { grid: 3, block: 64, shared_bytes: 520 });
        assert_eq!(call.shape_of(3, 64, 1000).unwrap().shared_bytes, 1000);
        assert_eq!((call.name(), call.param().len()), ("shaped", 16));
    }

    #[test]
    fn another_shape_is_an_error_that_names_both() {
        let call = Shaped::call(Global::new(16), 130).unwrap();
        let text = |shape: Result<Shape, ContractError>| shape.unwrap_err().to_string();
        assert_eq!(
            text(call.shape_of(3, 32, 520)),
            "kernel shaped requires block = ..: 64 threads, 32 were given"
        );
        assert!(text(call.shape_of(2, 64, 520)).contains("3 blocks, 2 were given"));
        assert!(text(call.shape_of(3, 64, 519)).contains("520 bytes of shared memory, 519 were given"));
    }

    #[test]
    fn a_kernel_without_a_shape_takes_one_that_fits() {
        let call = Free::call(Global::new(16), 130).unwrap();
        assert!(call.shape().unwrap_err().to_string().contains("grid = .."));
        assert_eq!(call.shape_of(2, 128, 0).unwrap(), Shape { grid: 2, block: 128, shared_bytes: 0 });
        for (grid, block) in [(0, 32), (1, 0), (1, 129)] {
            assert!(call.shape_of(grid, block, 0).is_err(), "{grid} {block}");
        }
    }

    #[test]
    fn clauses_show_their_values() {
        let error = Shaped::call(Global::new(16), 0).err().unwrap();
        assert_eq!(error.to_string(), "kernel shaped requires len >= 1: 0 against 1");
        let error = Shaped::call(Global::new(16), 3).err().unwrap();
        assert_eq!(error.to_string(), "kernel shaped requires len.is_multiple_of(2): len = 3");
    }

    /// What both kernels below read.
    #[kernel_args(requires(
        self.myself >= 1,
        self.myself.is_power_of_two(),
        self.first + self.myself <= MOST,
    ))]
    pub struct Rows {
        first: u32,
        myself: u32,
    }
    const MOST: u32 = 100;

    #[kernel_args]
    pub struct OfPair {
        rows: Rows,
        out: Global<u32>,
    }

    #[kernel(threads = 128, requires(args.myself < 32))]
    unsafe fn few_rows(args: Rows) {
        let _ = args;
    }

    #[kernel(threads = 128, requires(..Rows(args.rows), args.rows.myself > 2))]
    unsafe fn nested(args: OfPair) {
        args.out.st(args.rows.first, args.rows.myself);
    }

    #[test]
    fn clauses_of_a_struct_hold_for_each_kernel_that_takes_it() {
        let text = |rows| match FewRows::call(rows) {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        };
        assert_eq!(text(Rows { first: 0, myself: 8 }), "");
        assert_eq!(
            text(Rows { first: 0, myself: 0 }),
            "kernel few_rows requires args.myself >= 1: 0 against 1"
        );
        assert_eq!(
            text(Rows { first: 0, myself: 3 }),
            "kernel few_rows requires args.myself.is_power_of_two(): args.myself = 3"
        );
        assert_eq!(
            text(Rows { first: 0, myself: 64 }),
            "kernel few_rows requires args.myself < 32: 64 against 32"
        );
        let of_pair = |first, myself| OfPair { rows: Rows { first, myself }, out: Global::new(16) };
        let text = |args| Nested::call(args).err().unwrap().to_string();
        assert_eq!(
            text(of_pair(99, 4)),
            "kernel nested requires args.rows.first + args.rows.myself <= MOST: 103 against 100"
        );
        assert_eq!(text(of_pair(0, 2)), "kernel nested requires args.rows.myself > 2: 2 against 2");
    }
}

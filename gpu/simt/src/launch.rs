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
    /// Whether its first instruction waits until the preceding kernel of the stream has ended
    /// (`griddepcontrol.wait`). Such a kernel may be launched before that (programmatic dependent
    /// launch).
    pub dependent: bool,
    /// Why the kernel may use local memory, if it may.
    pub local_depot_allowed: Option<&'static str>,
    /// Number of `trap` instructions.
    pub traps_allowed: u32,
    /// A hash of the kernel's attribute, signature and body, and of its argument struct.
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

/// A number of blocks or of threads by the kernel's attribute.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub enum Count {
    /// `grid = ..`
    Exactly(u32),
    /// `grid >= ..`
    AtLeast(u32),
}

impl Count {
    /// The clause that a number does not fulfil, and the required value.
    fn broken_by(self, given: u32) -> Option<(&'static str, String)> {
        match self {
            Count::Exactly(want) if given != want => Some(("= ..", format!("{want}"))),
            Count::AtLeast(want) if given < want => Some((">= ..", format!("at least {want}"))),
            _ => None,
        }
    }
}

/// The shape of a launch by the kernel's attribute, for a call's arguments. `None`: not
/// specified.
#[doc(hidden)]
#[derive(Clone, Copy)]
pub struct Named<A> {
    pub grid: Option<Count>,
    pub block: Option<Count>,
    /// The bytes of dynamic shared memory, for the arguments and the threads of a block.
    pub shared_bytes: Option<fn(&A, u32) -> u32>,
}

/// A checked call of kernel `K`: only its `call` makes one.
pub struct Call<K: Entry> {
    args: K::Args,
    named: Named<K::Args>,
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
            .field("grid", &self.named.grid)
            .field("block", &self.named.block)
            .finish_non_exhaustive()
    }
}

impl<K: Entry> Call<K> {
    /// A call whose clauses hold.
    ///
    /// # Safety
    /// Every clause of the kernel's contract holds for `args`.
    #[doc(hidden)]
    pub unsafe fn checked(args: K::Args, named: Named<K::Args>) -> Self {
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
    /// The attribute names no grid or no block, or only a least number; or the block is empty or
    /// larger than `threads`.
    pub fn shape(&self) -> Result<Shape, ContractError> {
        let Some(Count::Exactly(grid)) = self.named.grid else {
            return Err(missing(&K::INFO, "grid = .."));
        };
        self.shape_on(grid)
    }

    /// The shape of a launch of `grid` blocks, by the kernel's attribute. Without `shared` in it, the
    /// block has no dynamic shared memory.
    ///
    /// # Errors
    /// The attribute names another grid, or no block; or the grid is empty, or the block is empty or
    /// larger than `threads`.
    pub fn shape_on(&self, grid: u32) -> Result<Shape, ContractError> {
        let Some(Count::Exactly(block)) = self.named.block else {
            return Err(missing(&K::INFO, "block = .."));
        };
        let shape = launches(&K::INFO, [self.named.grid, self.named.block], [grid, block])?;
        Ok(Shape { shared_bytes: self.needed_shared_bytes(block), ..shape })
    }

    /// The caller's shape, checked against the kernel's attribute.
    ///
    /// # Errors
    /// The attribute names another grid, another block or more shared memory; or the grid is empty,
    /// or the block is empty or larger than `threads`.
    pub fn shape_of(&self, grid: u32, block: u32, shared_bytes: u32) -> Result<Shape, ContractError> {
        let shape = launches(&K::INFO, [self.named.grid, self.named.block], [grid, block])?;
        let want = self.needed_shared_bytes(block);
        if shared_bytes < want {
            let values = format!("{want} bytes of shared memory, {shared_bytes} were given");
            return Err(broken(&K::INFO, String::from("shared = .."), values));
        }
        Ok(Shape { shared_bytes, ..shape })
    }

    /// The bytes of dynamic shared memory that a block of so many threads must have.
    fn needed_shared_bytes(&self, block: u32) -> u32 {
        self.named.shared_bytes.map_or(0, |bytes| bytes(&self.args, block))
    }
}

// Functions of `KernelInfo` are compiled once, and those of `K` for each kernel.

/// Blocks and threads without shared memory, if the attribute allows so many.
fn launches(
    kernel: &KernelInfo,
    [blocks, threads]: [Option<Count>; 2],
    [grid, block]: [u32; 2],
) -> Result<Shape, ContractError> {
    for (what, unit, count, given) in [("grid", "blocks", blocks, grid), ("block", "threads", threads, block)]
    {
        if let Some((clause, want)) = count.and_then(|count| count.broken_by(given)) {
            let values = format!("{want} {unit}, {given} were given");
            return Err(broken(kernel, format!("{what} {clause}"), values));
        }
    }
    if grid == 0 {
        return Err(broken(kernel, String::from("grid >= 1"), String::from("0 against 1")));
    }
    if !(1..=kernel.max_threads).contains(&block) {
        let values = format!("{block} threads in a block of at most {}", kernel.max_threads);
        return Err(broken(kernel, String::from("1 <= block <= threads"), values));
    }
    Ok(Shape { grid, block, shared_bytes: 0 })
}

/// The error of an attribute that does not name a part of the shape.
fn missing(kernel: &KernelInfo, clause: &str) -> ContractError {
    let remedy = "its attribute names none; launch it with a shape of your own";
    broken(kernel, String::from(clause), String::from(remedy))
}

fn broken(kernel: &KernelInfo, clause: String, values: String) -> ContractError {
    ContractError { kernel: kernel.name, clause, values }
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

    /// Parameters with names that the attribute could have given to something of its own.
    #[kernel(threads = 32, grid = named, block = reserved.max(kernel), requires(path >= 1), shared = args)]
    unsafe fn awkward(named: u32, reserved: u32, kernel: u32, path: u32, args: u32, out: Global<u32>) {
        out.st(named, reserved + kernel + path + args);
    }

    #[test]
    fn parameters_may_have_any_name() {
        let call = Awkward::call(3, 32, 1, 1, 16, Global::new(16)).unwrap();
        assert_eq!(call.shape().unwrap(), Shape { grid: 3, block: 32, shared_bytes: 16 });
        assert!(Awkward::call(3, 32, 1, 0, 16, Global::new(16)).is_err());
    }

    /// Accepts more blocks or threads too. Shared memory depends on the block's threads.
    #[kernel(threads = 128, grid >= 2, block >= len, shared = block * 4 + len)]
    unsafe fn roomy(out: Global<u32>, len: u32) {
        out.st(0, len);
    }

    #[test]
    fn a_least_number_is_held_and_shared_memory_follows_the_block() {
        let call = Roomy::call(Global::new(16), 40).unwrap();
        assert_eq!(call.shape_of(5, 64, 296).unwrap(), Shape { grid: 5, block: 64, shared_bytes: 296 });
        let text = |grid, block, shared| call.shape_of(grid, block, shared).unwrap_err().to_string();
        assert_eq!(text(1, 64, 296), "kernel roomy requires grid >= ..: at least 2 blocks, 1 were given");
        assert!(text(2, 39, 296).contains("block >= ..: at least 40 threads, 39 were given"));
        assert!(text(2, 64, 295).contains("296 bytes of shared memory, 295 were given"));
        assert!(call.shape().unwrap_err().to_string().contains("grid = .."), "a least number is no shape");
    }

    #[test]
    fn clauses_show_their_values() {
        let error = Shaped::call(Global::new(16), 0).err().unwrap();
        assert_eq!(error.to_string(), "kernel shaped requires len >= 1: 0 against 1");
        let error = Shaped::call(Global::new(16), 3).err().unwrap();
        assert_eq!(error.to_string(), "kernel shaped requires len.is_multiple_of(2): len = 3");
    }

    /// Arguments of both kernels below.
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

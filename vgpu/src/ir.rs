//! The compact form that the interpreter runs: names resolved to register slots, one variant per
//! kind of work.
//!
//! Registers live in three files per warp ([`Regs`]): 32-bit (8- and 16-bit values too), 64-bit,
//! and predicates. A slot holds the 32 lanes of one register side by side, so an operation on a
//! full warp is a loop the compiler vectorises. Immediates and read-only special registers are
//! slots as well, filled when the warp starts: an operand is always just a slot number.

use crate::compiled::native::Native;
use crate::exec::mma::Mma;
use crate::exec::products::WarpProduct;
use crate::exec::wgmma::Product;
use crate::ptx::Source;
use crate::registers::Regs;
use crate::tensor_map::{MOST_AXES, MOST_DIMENSIONS};

/// Named barriers per block.
pub(crate) const NAMED_BARRIERS: usize = 16;

/// The number of the barrier of the cluster.
pub(crate) const CLUSTER_BARRIER: u32 = 16;

/// Barriers per block: the named ones, and that of the cluster.
pub(crate) const BARRIERS: usize = NAMED_BARRIERS + 1;

/// All 32 lanes.
pub(crate) const FULL: u32 = u32::MAX;

/// Slot 0 of each file is a scratch register: it takes unused results, and as an optional operand
/// it means "not given".
pub(crate) const SINK: u32 = 0;

/// Predicate slot of the carry flag (`add.cc`, `addc`, ..).
pub(crate) const CARRY: u32 = 1;

/// Register file of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum File {
    R32,
    R64,
    Pred,
}

/// An arithmetic operation over the lanes of a mask. Its constructor defines the meaning of each
/// slot.
///
/// Calling it is safe on this machine. It is unsafe in form because it may use instructions that
/// only some processors of the architecture have. Its constructor in `exec::lanes` has checked that
/// this processor has them.
pub(crate) type AluFn = unsafe fn(&mut Regs, &[u32; 6], u32);

/// Initial value of a slot when a warp starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Init {
    /// The same bits in every lane.
    Bits(u64),
    /// Address of the module's variables plus an offset.
    GlobalAddress(u64),
    /// Address of a shared variable: offset in the block's window.
    SharedAddress(u64),
    /// Start of dynamic shared memory, behind such an offset.
    DynamicShared(u64),
    Special(Special),
}

impl Init {
    /// Its value is not the same in all warps of a grid. `clusters`: nor in all blocks of a cluster.
    pub(crate) fn differs_by_warp(self, clusters: bool) -> bool {
        match self {
            Init::Special(special) => matches!(
                special,
                Special::Tid(_)
                    | Special::WarpId
                    | Special::Ctaid(_)
                    | Special::SmId
                    | Special::ClusterId(_)
                    | Special::ClusterCtaid(_)
                    | Special::ClusterRank
            ),
            Init::SharedAddress(_) | Init::DynamicShared(_) => clusters,
            Init::Bits(_) | Init::GlobalAddress(_) => false,
        }
    }
}

/// Special registers that do not change while a warp runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    LaneId,
    WarpId,
    NWarpId,
    SmId,
    NSmId,
    LaneMaskLt,
    LaneMaskLe,
    LaneMaskEq,
    LaneMaskGe,
    LaneMaskGt,
    GridId,
    /// The low and the high half of the address of the grid's workspace; 0 unless the launch is
    /// cooperative.
    WorkspaceLow,
    WorkspaceHigh,
    DynamicSmemSize,
    TotalSmemSize,
    /// Index of the cluster in the grid, and clusters in the grid.
    ClusterId(u8),
    NClusterId(u8),
    /// Index of the block in its cluster, blocks of a cluster, and both as one number.
    ClusterCtaid(u8),
    ClusterNctaid(u8),
    ClusterRank,
    ClusterSize,
    /// Whether the launch, or the kernel, names a cluster.
    ExplicitCluster,
    Zero,
}

/// Registers that are read at the moment of execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timer {
    Clock,
    ClockHi,
    Clock64,
    Global,
    GlobalLo,
    GlobalHi,
}

impl Timer {
    /// The register has 64 bits.
    pub(crate) fn is_wide(self) -> bool {
        matches!(self, Timer::Clock64 | Timer::Global)
    }
}

/// State space of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Global,
    /// Shared memory of the block.
    Shared,
    /// Shared memory of any block of the cluster.
    Cluster,
    Local,
    Param,
}

/// Memory ordering of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sem {
    Weak,
    /// Also `.volatile` and `.mmio`.
    Relaxed,
    Acquire,
    Release,
    AcqRel,
}

impl Sem {
    pub(crate) fn acquires(self) -> bool {
        matches!(self, Sem::Acquire | Sem::AcqRel)
    }

    pub(crate) fn releases(self) -> bool {
        matches!(self, Sem::Release | Sem::AcqRel)
    }
}

/// Set of threads that an ordered access or a fence orders. Fast mode ignores scopes, because every
/// access is to real host memory; checks need them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Scope {
    Cta,
    Cluster,
    Gpu,
    Sys,
}

/// Semantics of a fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fence {
    Sc(Scope),
    AcqRel(Scope),
    Acquire(Scope),
    Release(Scope),
    /// Between the generic and the async proxy, for shared memory, global memory, or both.
    Async {
        shared: bool,
        global: bool,
    },
    /// `fence.mbarrier_init`: relaxed arrivals at the cluster's barrier behind it release the
    /// initialisations of mbarriers before it.
    MbarrierInit,
    /// Aliases: nothing that is ever out of order here.
    Other,
}

impl Fence {
    /// The scope of one that a release pattern may have.
    pub(crate) fn releases(self) -> Option<Scope> {
        match self {
            Fence::Release(scope) | Fence::AcqRel(scope) | Fence::Sc(scope) => Some(scope),
            _ => None,
        }
    }

    /// The scope of one that an acquire pattern may have.
    pub(crate) fn acquires(self) -> Option<Scope> {
        match self {
            Fence::Acquire(scope) | Fence::AcqRel(scope) | Fence::Sc(scope) => Some(scope),
            _ => None,
        }
    }
}

/// `[base + offset]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addr {
    pub(crate) slot: u32,
    /// The base is a 64-bit register.
    pub(crate) wide: bool,
    pub(crate) offset: i64,
}

/// A load or a store of `n` elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub(crate) space: Space,
    pub(crate) sem: Sem,
    /// The scope of a strong access.
    pub(crate) scope: Scope,
    pub(crate) addr: Addr,
    /// Bytes per element: 1, 2, 4 or 8.
    pub(crate) bytes: u8,
    /// Elements: 1, 2 or 4.
    pub(crate) n: u8,
    /// Registers are in the 64-bit file.
    pub(crate) wide: bool,
    /// Sign-extend loaded elements.
    pub(crate) signed: bool,
    /// The elements are the halves of one value of 128 bits, which is read and written whole.
    pub(crate) whole: bool,
    /// The program guarantees that the memory is not written while the kernel runs
    /// (`ld.global.nc`).
    pub(crate) read_only: bool,
    pub(crate) regs: [u32; 4],
}

impl Access {
    /// Bytes that are read or written at once.
    pub(crate) fn unit(&self) -> u8 {
        if self.whole { self.bytes * self.n } else { self.bytes }
    }

    /// Whether it reads words of global memory that others may write, each as long as its register:
    /// most loops that poll do.
    #[inline(always)]
    pub(crate) fn is_word_of_others(&self) -> bool {
        let global = self.addr.wide && matches!(self.space, Space::Global | Space::Generic);
        let word = matches!((self.bytes, self.wide), (4, false) | (8, true));
        self.sem != Sem::Weak && self.n == 1 && global && word && !self.signed
    }

    /// A loaded element as its register holds it.
    #[inline(always)]
    pub(crate) fn extend(&self, element: u64) -> u64 {
        let shift = 64 - 8 * u32::from(self.bytes);
        if self.signed { ((element << shift) as i64 >> shift) as u64 } else { element }
    }
}

/// Read-modify-write operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rmw {
    Add,
    Min,
    Max,
    MinS,
    MaxS,
    Inc,
    Dec,
    And,
    Or,
    Xor,
    Exch,
    Cas,
    AddF32,
    /// `AddF32` in global memory, where the hardware flushes subnormals.
    AddF32Ftz,
    AddF64,
    AddF16,
    AddBf16,
    AddF16x2,
    AddBf16x2,
    MinF16,
    MaxF16,
    MinBf16,
    MaxBf16,
}

/// `atom` and `red`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Atomic {
    pub(crate) op: Rmw,
    pub(crate) space: Space,
    pub(crate) sem: Sem,
    pub(crate) scope: Scope,
    pub(crate) addr: Addr,
    /// 2, 4 or 8.
    pub(crate) bytes: u8,
    /// [`SINK`] for `red`.
    pub(crate) d: u32,
    pub(crate) a: u32,
    /// Second operand of `cas`.
    pub(crate) b: u32,
}

/// Warp-wide operations: they wait until all lanes of the member mask are there.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WarpOp {
    /// `barrier.warp.sync`
    Sync,
    Shfl {
        mode: ShflMode,
        d: u32,
        p: u32,
        a: u32,
        lane: u32,
        clamp: u32,
    },
    VoteAll {
        d: u32,
        p: u32,
    },
    VoteAny {
        d: u32,
        p: u32,
    },
    VoteUni {
        d: u32,
        p: u32,
    },
    Ballot {
        d: u32,
        p: u32,
    },
    MatchAny {
        d: u32,
        a: u32,
        wide: bool,
    },
    MatchAll {
        d: u32,
        p: u32,
        a: u32,
        wide: bool,
    },
    Redux {
        op: Rmw,
        d: u32,
        a: u32,
    },
    Elect {
        d: u32,
        p: u32,
    },
    /// Adds the product of `a` and `b` to `d`, in place.
    Mma {
        mma: Mma,
        d: [u32; 4],
        a: [u32; 4],
        b: [u32; 2],
    },
    /// The number in [`Operands::warp_products`].
    Product {
        product: u32,
    },
}

impl WarpOp {
    /// Whether all lanes of the mask must be there. By the PTX manual votes, matches, reductions
    /// and shuffles wait for those that have not exited, and so does the barrier in practice.
    pub(crate) fn needs_all_members(&self) -> bool {
        matches!(self, WarpOp::Elect { .. } | WarpOp::Mma { .. } | WarpOp::Product { .. })
    }
}

/// Modes of `shfl.sync`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShflMode {
    Up,
    Down,
    Bfly,
    Idx,
}

/// Role of a lane at a block barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BarrierKind {
    Sync,
    Arrive,
}

/// Reduction of the threads' predicates at a block barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Votes {
    Count,
    All,
    Any,
}

/// Operations on an mbarrier object.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MbarOp {
    Init {
        count: u32,
    },
    Inval,
    /// `state` may be [`SINK`]; `tx` is [`SINK`] without `.expect_tx`.
    Arrive {
        state: u32,
        count: u32,
        tx: u32,
        drop: bool,
        /// The program promises that the phase does not complete.
        no_complete: bool,
        order: Order,
    },
    ExpectTx {
        tx: u32,
    },
    CompleteTx {
        tx: u32,
    },
    /// `state` is a 64-bit slot.
    TestState {
        p: u32,
        state: u32,
        order: Order,
    },
    TestParity {
        p: u32,
        parity: u32,
        order: Order,
    },
}

impl MbarOp {
    /// The order that a test makes; a relaxed one of others.
    pub(crate) fn order(&self) -> Order {
        match *self {
            MbarOp::Arrive { order, .. }
            | MbarOp::TestState { order, .. }
            | MbarOp::TestParity { order, .. } => order,
            _ => Order { relaxed: true, scope: Scope::Cta },
        }
    }
}

/// The order that an operation on a barrier object makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Order {
    /// It releases or acquires nothing by itself.
    pub(crate) relaxed: bool,
    pub(crate) scope: Scope,
}

/// Bulk copies.
#[derive(Clone, Copy, Debug)]
pub(crate) enum BulkOp {
    /// Global to shared, completing on an mbarrier.
    Load {
        dst: Addr,
        src: Addr,
        size: u32,
        mbar: Addr,
    },
    /// Shared to global, in a bulk group.
    Store {
        dst: Addr,
        src: Addr,
        size: u32,
    },
    /// Shared to shared of a block of the cluster, completing on an mbarrier there.
    SharedToShared {
        dst: Addr,
        src: Addr,
        size: u32,
        mbar: Addr,
    },
    Prefetch {
        src: Addr,
        size: u32,
    },
    /// The number in [`Operands::tensor_copies`].
    Tensor {
        copy: u32,
    },
    /// A load to several blocks of the cluster: the number in [`Operands::multicasts`].
    Multicast {
        copy: u32,
    },
    /// `st.async`, `red.async`: the number in [`Operands::remote_stores`].
    RemoteStore {
        store: u32,
    },
    /// `cp.reduce.async.bulk`: the number in [`Operands::reductions`].
    Reduce {
        copy: u32,
    },
    Commit,
    Wait {
        pending: u32,
        read_only: bool,
    },
}

/// Asynchronous copies by threads (`cp.async` without `.bulk`), and the waits for them.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CopyOp {
    /// Copies `bytes` bytes from global to shared memory. The slot `read` has the number of bytes
    /// that come from the source, and the rest are zeros; all of them if it is [`SINK`].
    Start {
        dst: Addr,
        src: Addr,
        bytes: u8,
        read: u32,
    },
    Commit,
    /// Waits for all but the latest `allowed` groups.
    Wait {
        allowed: u32,
    },
    WaitAll,
    /// Arrives on an mbarrier once the copies so far have happened. `counted`: the mbarrier's count
    /// includes the arrival (`.noinc`).
    Arrive {
        mbar: Addr,
        space: Space,
        counted: bool,
    },
}

/// Operands of instructions that have more than an [`Op`] has room for.
#[derive(Debug, Default)]
pub(crate) struct Operands {
    pub(crate) products: Vec<Product>,
    pub(crate) warp_products: Vec<WarpProduct>,
    pub(crate) tensor_copies: Vec<TensorCopy>,
    pub(crate) multicasts: Vec<Multicast>,
    pub(crate) remote_stores: Vec<RemoteStore>,
    pub(crate) reductions: Vec<Reduction>,
    pub(crate) multimems: Vec<Multimem>,
}

/// `multimem`: an access to the memory of each device behind a multicast address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Multimem {
    /// `multimem.ld_reduce`.
    pub(crate) loads: bool,
    /// The reduction; `None` of `multimem.st`.
    pub(crate) reduces: Option<Reduces>,
    pub(crate) sem: Sem,
    pub(crate) scope: Scope,
    pub(crate) addr: Addr,
    /// Bytes of a register's part: 1, 2, 4 or 8. Registers: 1, 2, 4 or 8.
    pub(crate) bytes: u8,
    pub(crate) n: u8,
    pub(crate) regs: [u32; 8],
}

/// A reduction of the values behind a multicast address, or of one and a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reduces {
    pub(crate) op: Reduce,
    pub(crate) number: Number,
    /// Bytes of a number.
    pub(crate) bytes: u8,
    /// The type of the sums on the way: wider, with `.acc::f32` or `.acc::f16`.
    pub(crate) sums: Number,
}

/// Types of numbers in a [`Multimem`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Number {
    /// Bits too.
    Unsigned,
    Signed,
    F16,
    Bf16,
    F32,
    F64,
    E4m3,
    E5m2,
}

/// `cp.async.bulk` with `.multicast::cluster`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Multicast {
    pub(crate) dst: Addr,
    pub(crate) src: Addr,
    pub(crate) size: u32,
    pub(crate) mbar: Addr,
    /// Blocks of the cluster, one bit each.
    pub(crate) blocks: u32,
}

/// `cp.reduce.async.bulk`, from shared memory of the block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reduction {
    pub(crate) dst: Addr,
    pub(crate) src: Addr,
    pub(crate) size: u32,
    /// To shared memory of a block of the cluster, completing on this mbarrier there. Without one,
    /// to global memory in a bulk group.
    pub(crate) mbar: Option<Addr>,
    pub(crate) combine: Combine,
}

/// The operation by which a copy changes each element of its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Combine {
    pub(crate) op: Rmw,
    /// Bytes of an element: 2, 4 or 8.
    pub(crate) bytes: u8,
}

/// `st.async`, of values that come later than their instruction; `red.async` with an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoteStore {
    pub(crate) dst: Addr,
    pub(crate) mbar: Addr,
    /// `None` for a store.
    pub(crate) op: Option<Rmw>,
    /// Bytes of an element: 4 or 8. Elements: 1, 2 or 4.
    pub(crate) bytes: u8,
    pub(crate) n: u8,
    pub(crate) regs: [u32; 4],
}

/// `cp.async.bulk.tensor`
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorCopy {
    pub(crate) way: Way,
    /// The address of the tensor map.
    pub(crate) map: Addr,
    /// The dimensions that the instruction names, and their coordinates.
    pub(crate) rank: u8,
    pub(crate) coordinates: [u32; MOST_DIMENSIONS],
    /// The box in shared memory.
    pub(crate) shared: Addr,
    /// Blocks of the cluster that a load is for, one bit each; [`SINK`] for this one.
    pub(crate) blocks: u32,
    /// The offsets of pixels in W, H and D, of which a store has none. A copy of a box has no list.
    pub(crate) offsets: Option<[u32; MOST_AXES]>,
}

/// The operation of a reduction by a copy or into shared memory of a cluster, of any type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reduce {
    Add,
    Min,
    Max,
    Inc,
    Dec,
    And,
    Or,
    Xor,
}

impl Reduce {
    /// The operations by their names in PTX.
    pub(crate) const NAMES: [(&str, Reduce); 8] = [
        ("add", Reduce::Add),
        ("min", Reduce::Min),
        ("max", Reduce::Max),
        ("inc", Reduce::Inc),
        ("dec", Reduce::Dec),
        ("and", Reduce::And),
        ("or", Reduce::Or),
        ("xor", Reduce::Xor),
    ];

    /// The operation on integers.
    pub(crate) fn of_integers(self, is_signed: bool) -> Rmw {
        match self {
            Reduce::Add => Rmw::Add,
            Reduce::Min if is_signed => Rmw::MinS,
            Reduce::Max if is_signed => Rmw::MaxS,
            Reduce::Min => Rmw::Min,
            Reduce::Max => Rmw::Max,
            Reduce::Inc => Rmw::Inc,
            Reduce::Dec => Rmw::Dec,
            Reduce::And => Rmw::And,
            Reduce::Or => Rmw::Or,
            Reduce::Xor => Rmw::Xor,
        }
    }
}

/// The direction of a copy of a tensor's box.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Way {
    /// To shared memory, completing on this mbarrier.
    Load(Addr),
    /// To global memory, in a bulk group.
    Store,
    /// The same, and changes what is there.
    Reduce(Reduce),
    /// Nowhere: checks the tensor map alone. `shared` is not given.
    Prefetch,
}

/// `wgmma`, which the four warps of a warpgroup execute together.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WgmmaOp {
    Fence,
    Commit,
    /// Waits until at most so many groups are under way.
    Wait {
        allowed: u32,
    },
    /// The number in [`Operands::products`].
    Multiply {
        product: u32,
    },
}

/// One instruction's work.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Alu {
        f: AluFn,
        s: [u32; 6],
        /// The operation of `f`, for compiled code.
        #[cfg_attr(not(all(target_arch = "x86_64", not(miri))), allow(dead_code))]
        native: Native,
    },
    Bra {
        target: u32,
    },
    /// Index slot and table number.
    BrxIdx {
        index: u32,
        table: u32,
    },
    Ld(Access),
    St(Access),
    Atom(Atomic),
    Fence(Fence),
    Timer {
        what: Timer,
        d: u32,
    },
    ActiveMask {
        d: u32,
    },
    Warp {
        op: WarpOp,
        mask: u32,
    },
    /// `count` is [`SINK`] when all threads take part.
    Barrier {
        kind: BarrierKind,
        id: u32,
        count: u32,
        aligned: bool,
    },
    /// `barrier.cluster.arrive`
    ClusterArrive {
        aligned: bool,
        relaxed: bool,
    },
    /// `barrier.cluster.wait`: until all have arrived as often as its warp.
    ClusterWait {
        aligned: bool,
    },
    /// `barrier.red` before its barrier: counts the predicate `p` of the lanes.
    BarrierVote {
        id: u32,
        p: u32,
    },
    /// Second step of a barrier with votes: stores the reduction of all threads' votes. `d` is a
    /// predicate, except for [`Votes::Count`].
    BarrierResult {
        what: Votes,
        d: u32,
    },
    Mbar {
        op: MbarOp,
        addr: Addr,
        space: Space,
    },
    /// `mbarrier.pending_count d, state`.
    PendingCount {
        d: u32,
        state: u32,
    },
    Bulk(BulkOp),
    /// The number in [`Operands::multimems`], and whether it is a load.
    Multimem {
        access: u32,
        loads: bool,
    },
    Copy(CopyOp),
    Wgmma(WgmmaOp),
    /// `discard.L2` and `applypriority.L2`: a line of 128 bytes of global memory.
    Line {
        addr: Addr,
        discards: bool,
    },
    /// Checks that the first `rows` lanes have addresses of rows of 16 bytes.
    CheckRows {
        addr: Addr,
        rows: u32,
    },
    /// Checks that no `wgmma` under way uses the registers of the next instruction: the number in
    /// [`Kernel::register_checks`].
    ///
    /// [`Kernel::register_checks`]: crate::kernel::Kernel::register_checks
    CheckRegisters(u32),
    /// The next instruction reads registers that nothing can have written: the number in
    /// [`Kernel::unwritten`].
    ///
    /// [`Kernel::unwritten`]: crate::kernel::Kernel::unwritten
    UnwrittenRegisters(u32),
    /// `vprintf`: addresses of the format and of the arguments, and its result.
    Print {
        format: u32,
        arguments: u32,
        d: u32,
    },
    /// Yields to other warps.
    Sleep,
    Exit,
    Trap,
    /// A fault of the lanes that execute it.
    CallThroughPointer,
    /// Hints, and fences whose order always holds here.
    Nop,
}

impl Op {
    /// Whether it is a step of an exploration: others may observe when it is executed.
    pub(crate) fn is_step(&self) -> bool {
        match self {
            // These order what their own thread does.
            Op::Fence(fence) => matches!(fence, Fence::Sc(_)),
            Op::Warp { .. } => false,
            Op::Timer { .. } | Op::Print { .. } => true,
            _ => self.concerns_others(),
        }
    }

    /// Whether it is arithmetic, a branch, or a weak access: it publishes no earlier store.
    pub(crate) fn is_weak(&self) -> bool {
        match self {
            Op::Ld(access) | Op::St(access) => access.sem == Sem::Weak,
            Op::Alu { .. } | Op::Bra { .. } | Op::Nop | Op::UnwrittenRegisters(_) => true,
            _ => false,
        }
    }

    /// Whether it accesses memory that others can access, or meets, waits for or orders other
    /// lanes.
    pub(crate) fn concerns_others(&self) -> bool {
        match self {
            Op::Ld(access) | Op::St(access) => !matches!(access.space, Space::Local | Space::Param),
            Op::Warp { op, .. } => matches!(op, WarpOp::Sync),
            Op::Atom(_) | Op::Fence(_) | Op::Barrier { .. } | Op::Mbar { .. } => true,
            Op::Multimem { .. } => true,
            Op::Line { discards, .. } => *discards,
            Op::Bulk(_) | Op::Copy(_) | Op::Wgmma(_) | Op::ClusterArrive { .. } | Op::ClusterWait { .. } => {
                true
            }
            _ => false,
        }
    }
}

/// A guard that is always true.
pub(crate) const NO_GUARD: u32 = u32::MAX;
/// Bit of a guard that negates it.
pub(crate) const GUARD_NOT: u32 = 1 << 31;

/// An instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inst {
    pub(crate) op: Op,
    /// Predicate slot, possibly with [`GUARD_NOT`], or [`NO_GUARD`].
    pub(crate) guard: u32,
    /// How many arithmetic instructions follow each other from this one on; 0 if it is another
    /// kind.
    pub(crate) straight: u32,
}

/// Counts the arithmetic instructions behind each other, once all code is there.
pub(crate) fn count_straight_runs(code: &mut [Inst]) {
    let mut straight = 0;
    for inst in code.iter_mut().rev() {
        straight = if matches!(inst.op, Op::Alu { .. }) { straight + 1 } else { 0 };
        inst.straight = straight;
    }
}

/// Where an instruction came from.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Origin {
    pub(crate) ptx_line: u32,
    /// A byte of that line in the text.
    pub(crate) ptx_byte: usize,
    /// Lines in the source; line 0 when unknown.
    pub(crate) source: Source,
}

// An instruction is a cache line.
const _: () = assert!(size_of::<Inst>() <= 64);

//! Errors of loading, launching and running, with texts a person can act on.

use std::fmt;

use crate::check::Class;
use crate::exec::state::RecentStep;
use crate::ir::CLUSTER_BARRIER;
use crate::kernel::Kernel;
use crate::lower::slice::behind_address;
use crate::memory_error::{MemoryError, NearRegion, Spot, place};
use crate::names::{counted, readable_name};

/// PTX that cannot be loaded, with the place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PtxError {
    /// Line in the PTX text, from 1.
    pub line: usize,
    /// Column in the line, from 1.
    pub column: usize,
    /// The error.
    pub message: String,
    /// The line itself.
    pub source_line: String,
}

impl fmt::Display for PtxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PTX {}:{}: {}\n  | {}", self.line, self.column, self.message, self.source_line.trim_end())
    }
}

impl std::error::Error for PtxError {}

/// A launch that cannot start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The parameter block has the wrong length.
    #[error("kernel '{}' takes {expected} bytes of parameters, {actual} were given", readable_name(kernel))]
    ParamBytes {
        /// Kernel name.
        kernel: String,
        /// Bytes the kernel declares.
        expected: usize,
        /// Bytes given.
        actual: usize,
    },
    /// The number of arguments is not that of the parameters.
    #[error(
        "kernel '{}' takes {expected} arguments, {actual} were given{}",
        readable_name(kernel),
        indented(params)
    )]
    ArgumentCount {
        /// Kernel name.
        kernel: String,
        /// Parameters of the kernel.
        expected: usize,
        /// Arguments given.
        actual: usize,
        /// [A line for each parameter](crate::Kernel::param_lines).
        params: Vec<String>,
    },
    /// An argument is larger or smaller than its parameter.
    #[error(
        "parameter {param} of kernel '{}' has {expected} bytes, its argument has {actual}{}",
        readable_name(kernel),
        indented(params)
    )]
    ArgumentBytes {
        /// Kernel name.
        kernel: String,
        /// Number of the parameter, from 0.
        param: usize,
        /// Bytes the kernel declares.
        expected: usize,
        /// Bytes of the argument.
        actual: usize,
        /// [A line for each parameter](crate::Kernel::param_lines).
        params: Vec<String>,
    },
    /// A `usize` or `isize` does not fit into its parameter.
    #[error(
        "parameter {param} of kernel '{}' has {bytes} bytes, too few for {value}{}",
        readable_name(kernel),
        indented(params)
    )]
    ArgumentRange {
        /// Kernel name.
        kernel: String,
        /// Number of the parameter, from 0.
        param: usize,
        /// Bytes the kernel declares.
        bytes: usize,
        /// The argument.
        value: i128,
        /// [A line for each parameter](crate::Kernel::param_lines).
        params: Vec<String>,
    },
    /// A grid or block dimension is zero or too large.
    #[error(
        "bad launch of '{}': {what} is {value:?} (each must be from 1 to {max:?})",
        readable_name(kernel)
    )]
    Dimension {
        /// Kernel name.
        kernel: String,
        /// `grid` or `block`.
        what: &'static str,
        /// Requested dimensions.
        value: [u32; 3],
        /// Largest allowed.
        max: [u32; 3],
    },
    /// More threads per block than the kernel or the hardware allows.
    #[error("kernel '{}' allows {max} threads per block, {threads} were asked for", readable_name(kernel))]
    TooManyThreads {
        /// Kernel name.
        kernel: String,
        /// Requested threads.
        threads: u64,
        /// Limit (`.maxntid`, or 1024).
        max: u32,
    },
    /// The block does not have the shape that `.reqntid` demands.
    #[error(
        "kernel '{}' requires blocks of {required:?} threads, {block:?} was asked for",
        readable_name(kernel)
    )]
    BlockShape {
        /// Kernel name.
        kernel: String,
        /// Shape demanded.
        required: [u32; 3],
        /// Requested shape.
        block: [u32; 3],
    },
    /// A cluster of blocks that the grid, the kernel or the device does not allow.
    #[error("kernel '{}' in clusters of {cluster:?} blocks: {message}", readable_name(kernel))]
    Cluster {
        /// Kernel name.
        kernel: String,
        /// Blocks of a cluster in x, y, z.
        cluster: [u32; 3],
        /// The rule that is broken, and the remedy.
        message: String,
    },
    /// More shared memory than a block may have.
    #[error(
        "kernel '{}' needs {static_bytes} + {dynamic_bytes} bytes of shared memory, a block may have {max}",
        readable_name(kernel)
    )]
    SharedMemory {
        /// Kernel name.
        kernel: String,
        /// Bytes of static shared variables.
        static_bytes: u32,
        /// Requested dynamic bytes.
        dynamic_bytes: u32,
        /// Device limit in bytes.
        max: u32,
    },
    /// A cooperative launch of more blocks than the device holds at a time.
    #[error(
        "cooperative launch of '{}': {blocks} blocks, of which the device holds {resident} at a time; launch fewer blocks, or smaller ones",
        readable_name(kernel)
    )]
    NotResident {
        /// Kernel name.
        kernel: String,
        /// Requested blocks.
        blocks: u64,
        /// Blocks that fit on the device together.
        resident: u64,
    },
    /// Too many blocks for the keys of check mode.
    #[error(
        "kernel '{}' has {blocks} blocks: check mode tells 2^20 of a grid apart, and 2^27 grids; check a smaller launch",
        readable_name(kernel)
    )]
    TooLargeToCheck {
        /// Kernel name.
        kernel: String,
        /// Requested blocks.
        blocks: u64,
    },
    /// Memory of the launch itself, such as that of module variables, could not be allocated.
    #[error("memory of the launch: {0}")]
    Memory(#[from] MemoryError),
}

/// Lines behind the first one of an error.
fn indented(lines: &[String]) -> String {
    lines.iter().map(|line| format!("\n  {line}")).collect()
}

/// The launch of an access, relative to another access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Launch {
    /// The same launch, or there is no other access.
    #[default]
    Same,
    /// In another one on the same device.
    Other,
    /// On another device.
    OtherDevice,
}

/// The place of an instruction of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct InstructionPlace {
    /// Line in the PTX text, from 1.
    pub ptx_line: usize,
    /// The PTX line, without spaces around it.
    pub ptx_text: String,
    /// File and line of the kernel's source, when the PTX carries line information.
    pub source: Option<(String, u32)>,
    /// File and line of the inlined function that the instruction belongs to, when that is another
    /// line.
    pub inlined: Option<(String, u32)>,
    /// The calls in the kernel's source that `source` was inlined for, the nearest first.
    pub callers: Vec<(String, u32)>,
}

impl InstructionPlace {
    /// The line, in the source or, without line information, in the PTX.
    pub(crate) fn line(&self) -> String {
        self.source
            .as_ref()
            .map_or_else(|| format!("PTX line {}", self.ptx_line), |(file, line)| format!("{file}:{line}"))
    }

    /// Writes the line of the source or, without line information, that of the PTX.
    fn write_line(&self, f: &mut fmt::Formatter<'_>, indent: &str) -> fmt::Result {
        match &self.source {
            Some(_) => write!(f, "{indent}{self}"),
            None => write!(f, "{indent}PTX line {}: {}", self.ptx_line, self.ptx_text),
        }
    }

    /// Writes the lines of the source and of the PTX, each behind `indent`.
    fn write(&self, f: &mut fmt::Formatter<'_>, indent: &str) -> fmt::Result {
        if self.source.is_some() {
            self.write_line(f, indent)?;
        }
        write!(f, "{indent}PTX line {}: {}", self.ptx_line, self.ptx_text)
    }
}

/// `at rows.rs:210 (inlined: memory.rs:17), called at :260, kernel.rs:40`; without line information
/// the PTX line.
impl fmt::Display for InstructionPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {}", self.line())?;
        if let Some((file, line)) = &self.inlined {
            write!(f, " (inlined: {file}:{line})")?;
        }
        // A file is named where it is another one than before.
        let (mut before, mut separator) = (self.source.as_ref().map(|(file, _)| file), ", called at ");
        for (file, line) in &self.callers {
            let path = if before == Some(file) { "" } else { file };
            write!(f, "{separator}{path}:{line}")?;
            (before, separator) = (Some(file), ", ");
        }
        Ok(())
    }
}

/// A read of a register that nothing can have written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnwrittenRegister {
    /// Name in the PTX.
    pub register: String,
    /// The instruction.
    pub at: InstructionPlace,
}

/// One side of a race.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Party {
    /// Manner of the access, such as `weak write`.
    pub access: String,
    /// Kernel; empty for the host and for copies in a stream.
    pub kernel: String,
    /// Block index.
    pub block: [u32; 3],
    /// Warp index within the block, where it is known.
    pub warp: Option<u32>,
    /// Lane, where one is to blame.
    pub lane: Option<u32>,
    /// The launch.
    pub launch: Launch,
    /// The device, where its [`Machine`](crate::Machine) has several.
    pub device: Option<u32>,
    /// The instruction.
    pub at: InstructionPlace,
}

impl Party {
    pub(crate) fn host() -> Self {
        Self::default()
    }

    /// The manner of the access, with its scope.
    fn access_with(&self, scope: &str) -> String {
        if self.access.contains(" of scope ") {
            return self.access.clone();
        }
        format!("{} of scope {scope}", self.access)
    }
}

/// ` of device 2`, or nothing.
pub(crate) fn of_device(device: Option<u32>) -> String {
    device.map_or_else(String::new, |device| format!(" of device {device}"))
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kernel.is_empty() {
            return write!(f, "{} by the host, or by a copy in a stream", self.access);
        }
        let launch = match self.launch {
            Launch::Same => "",
            Launch::Other => ", in another launch",
            Launch::OtherDevice if self.device.is_some() => "",
            Launch::OtherDevice => " of another device",
        };
        let Self { access, kernel, block, device, .. } = self;
        write!(
            f,
            "{access} in kernel '{}'{}{launch}, block {block:?}",
            readable_name(kernel),
            of_device(*device)
        )?;
        if let Some(warp) = self.warp {
            write!(f, ", warp {warp}")?;
        }
        if let Some(lane) = self.lane {
            write!(f, ", lane {lane}")?;
        }
        self.at.write(f, "\n    ")
    }
}

/// Synchronisation that was meant to order two accesses, or may have been.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// A wait, or a strong read.
    pub what: Party,
    /// The write that it read.
    pub of: Option<Party>,
    /// The order that it creates, or the reason why it creates none.
    pub verdict: String,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.what)?;
        if let Some(of) = &self.of {
            write!(f, "\n   of what was written by a {of}")?;
        }
        write!(f, "\n   {}", self.verdict)
    }
}

/// The side of a flag that a gap is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// The thread that writes the flag, behind the earlier access.
    Writer,
    /// The thread that reads the flag, ahead of the later access. A bulk copy's side too.
    Reader,
}

/// The part of an order that is missing or falls short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GapKind {
    /// A relaxed write without a fence ahead of it, or a relaxed read without one behind it.
    NoFence,
    /// The scope of a fence leaves the other side out.
    NarrowFence,
    /// The scope of a release, an acquire, a relaxed access or an atomic leaves the other side out.
    NarrowAccess,
    /// The fence stands ahead of a barrier, in another thread than the one that writes the flag.
    FenceAheadOfBarrier,
    /// The release, or the fence ahead of it, stands ahead of the earlier access.
    AheadOfAccess,
    /// Nothing orders the threads of one side: the earlier access ahead of the release, or the later
    /// access behind the acquire.
    Uncovered,
    /// No wait for the group of the earlier bulk copy stands between the copy and its thread's next
    /// release or barrier.
    NoWait,
    /// No fence of any proxy stands before a bulk copy.
    NoProxyFence,
    /// A fence stands there, but it orders the generic proxy alone.
    OtherProxy,
    /// A proxy fence stands there, but it orders accesses to the other space.
    OtherSpace,
    /// A proxy fence stands ahead of the earlier access or of its order.
    ProxyFenceAhead,
}

impl GapKind {
    /// A short name for tools, such as `narrow-fence`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            GapKind::NoFence => "no-fence",
            GapKind::NarrowFence => "narrow-fence",
            GapKind::NarrowAccess => "narrow-access",
            GapKind::FenceAheadOfBarrier => "fence-ahead-of-barrier",
            GapKind::AheadOfAccess => "ahead-of-access",
            GapKind::Uncovered => "uncovered",
            GapKind::NoWait => "no-wait",
            GapKind::NoProxyFence => "no-proxy-fence",
            GapKind::OtherProxy => "other-proxy",
            GapKind::OtherSpace => "other-space",
            GapKind::ProxyFenceAhead => "proxy-fence-ahead",
        }
    }
}

/// A missing part of an order: one of the causes of a race.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Gap {
    /// The side of the flag.
    pub side: Side,
    /// The kind.
    pub kind: GapKind,
    /// The scope that is too narrow, such as `.cta`; empty for other kinds.
    pub scope: &'static str,
    /// The narrowest scope that does; empty where scopes do not matter.
    pub needs: &'static str,
    /// The instruction that falls short, or beside which a fence is missing.
    pub at: Party,
}

impl Gap {
    /// The gap as a sentence, without its place.
    #[must_use]
    pub fn sentence(&self) -> String {
        let Gap { kind, scope, needs, at, .. } = self;
        let (side, other, access, place) = match self.side {
            Side::Writer => ("writer", "reader", "write", "ahead of it"),
            Side::Reader => ("reader", "writer", "read", "behind it"),
        };
        let order = if self.side == Side::Writer { "release" } else { "acquire" };
        let wide = if *needs == ".sys" { ".sys".to_owned() } else { format!("{needs} or wider") };
        match kind {
            GapKind::NoFence => format!(
                "the flag's {access} is no {order}, and the {side} has no fence {place}: it needs one of scope {wide}"
            ),
            GapKind::NarrowFence => format!(
                "the {side}'s fence has scope {scope}, which leaves the {other} out: it needs {wide}"
            ),
            GapKind::NarrowAccess => {
                format!("this {} leaves the other thread out: it needs {wide}", at.access_with(scope))
            }
            GapKind::FenceAheadOfBarrier => {
                "the fence stands ahead of the barrier: the thread that writes the flag needs one of its own behind the barrier"
                    .into()
            }
            GapKind::AheadOfAccess => format!("this {} stands ahead of the earlier access", at.access),
            GapKind::Uncovered if self.side == Side::Writer => {
                format!("nothing orders the earlier access ahead of this {}: a barrier between the two threads", at.access)
            }
            GapKind::Uncovered => {
                format!("nothing orders the later access behind this {}: a barrier between the two threads", at.access)
            }
            GapKind::NoWait => {
                format!("no wait for the copy was seen ahead of this {}: a wait_group by the copy's thread", at.access)
            }
            GapKind::NoProxyFence => "no fence.proxy.async stands before this copy".into(),
            GapKind::OtherProxy => {
                "this fence orders the generic proxy alone: a fence.proxy.async is needed beside it".into()
            }
            GapKind::OtherSpace => "this fence.proxy.async orders the other space".into(),
            GapKind::ProxyFenceAhead => {
                "this fence.proxy.async stands ahead of the earlier access, or of the order between the two".into()
            }
        }
    }

    /// The place in one line, as in `two.cu:6, PTX line 53: membar.gl;`.
    #[must_use]
    pub fn place(&self) -> String {
        let InstructionPlace { ptx_line, ptx_text, source, .. } = &self.at.at;
        let source = source.as_ref().map_or_else(String::new, |(file, line)| format!("{file}:{line}, "));
        format!("{source}PTX line {ptx_line}: {ptx_text}")
    }
}

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n    {}", self.sentence(), self.place())
    }
}

/// The report of a read of unwritten global memory, beside its place.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Nearby {
    /// The kernels' last writes of the nearest words before and after it.
    pub writes: Vec<Party>,
    /// Lines about the memory that the block has read and other launches have written, since the
    /// address may come from there. Empty without any.
    pub origin: String,
}

/// The kinds of the two accesses of a race, the later one first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Hazard {
    /// The later access reads what the earlier one writes.
    #[default]
    ReadAfterWrite,
    /// The later access overwrites what the earlier one reads.
    WriteAfterRead,
    /// Both write. An atomic operation counts as a write.
    WriteAfterWrite,
}

impl Hazard {
    pub(crate) fn new(later_writes: bool, earlier_wrote: bool) -> Self {
        match (later_writes, earlier_wrote) {
            (false, _) => Hazard::ReadAfterWrite,
            (true, false) => Hazard::WriteAfterRead,
            (true, true) => Hazard::WriteAfterWrite,
        }
    }

    /// The name in reports and files, such as `read-after-write`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Hazard::ReadAfterWrite => "read-after-write",
            Hazard::WriteAfterRead => "write-after-read",
            Hazard::WriteAfterWrite => "write-after-write",
        }
    }
}

/// Two accesses without an order between them, at least one of them a write.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Race {
    /// `global` or `shared`.
    pub space: &'static str,
    /// Label of the region; empty in shared memory.
    pub label: String,
    /// Offset of the first word in the region or in the shared window, in bytes.
    pub offset: u64,
    /// Name of the part, such as `ready[3]`, or of a shared variable, `tile + 0x40`. Empty without
    /// names.
    pub part: String,
    /// Manner of the access that was stopped, such as `weak read`; the fault gives its position.
    pub access: String,
    /// The access before it.
    pub other: Party,
    /// The kinds of the two.
    pub hazard: Hazard,
    /// The synchronisation that would have ordered the two.
    pub missing: String,
    /// The synchronisation that was observed between the two, from the earlier access to the later.
    /// Without one: the last reads of the later access's block.
    pub attempts: Vec<Attempt>,
    /// The parts of the order that are missing, where the checker finds them: those of the flag
    /// that comes closest to ordering the two.
    pub gaps: Vec<Gap>,
    /// Lines about reads by the later access's block that came before a write by the other's
    /// launch. For two writes also about the memory that the block has read and other launches have
    /// written, since one address may be wrong. Empty without any.
    pub origin: String,
    /// [`Class::Corrupts`], [`Class::Model`] or [`Class::Proxy`].
    pub class: Class,
}

impl Default for Race {
    /// A race of which nothing is known yet.
    fn default() -> Self {
        Self {
            space: "global",
            label: String::new(),
            offset: 0,
            part: String::new(),
            access: String::new(),
            other: Party::default(),
            hazard: Hazard::default(),
            missing: String::new(),
            attempts: vec![],
            gaps: vec![],
            origin: String::new(),
            class: Class::Corrupts,
        }
    }
}

impl fmt::Display for Race {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            space,
            label,
            offset,
            part,
            access,
            other,
            missing,
            attempts,
            gaps,
            origin,
            hazard: _,
            class: _,
        } = self;
        let place = Spot { label, offset: *offset, part };
        write!(
            f,
            "data race in {space} memory at {place}: a {access} is not ordered behind\n  a {other}\n  missing: {missing}"
        )?;
        gaps.iter().try_for_each(|gap| write!(f, "\n  gap: {gap}"))?;
        attempts.iter().try_for_each(|attempt| write!(f, "\n  seen: {attempt}"))?;
        write!(f, "{origin}")
    }
}

/// The text of a hang.
pub(crate) const HANG: &str =
    "all kernels only wait, for each other or for the host, and no deadline of theirs has ended that";

/// Why a kernel was stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultKind {
    /// A global or generic access outside of every region, maybe in one that has been freed.
    OutOfBounds {
        /// First byte.
        addr: u64,
        /// Length in bytes.
        bytes: u64,
        /// Closest region, or the freed one.
        nearest: Option<NearRegion>,
    },
    /// An access outside of the block's shared memory, the lane's local memory or the kernel's
    /// parameters.
    OutOfWindow {
        /// `shared`, `local` or `param`.
        space: &'static str,
        /// Offset in the window, in bytes.
        offset: u64,
        /// Length of the access in bytes.
        bytes: u64,
        /// First valid offset.
        start: u64,
        /// First offset past the end.
        end: u64,
    },
    /// An address of shared memory of a block that the cluster does not have.
    OutOfCluster {
        /// The block's number in the cluster.
        rank: u32,
        /// Blocks of the cluster.
        blocks: u32,
    },
    /// An access to shared memory of a block of the cluster that has ended, or that may end before
    /// the access.
    EndedBlock {
        /// The block whose memory it is.
        block: [u32; 3],
        /// The access, where the block's end is the place of the fault.
        message: String,
    },
    /// Check mode: an arrival at the mbarrier of another block has a scope that leaves that block
    /// out.
    NarrowArrival,
    /// An address that is not a multiple of the access's alignment.
    Misaligned {
        /// Address or offset.
        addr: u64,
        /// Alignment needed, in bytes.
        align: u64,
    },
    /// `trap` was executed: a Rust panic in a kernel ends here.
    Trap,
    /// An aligned barrier (`bar.sync`) was reached by part of a warp only.
    DivergentBarrier {
        /// Barrier number.
        barrier: u32,
        /// Lanes at the barrier.
        lanes: u32,
        /// Lanes of the warp that have not exited.
        live: u32,
    },
    /// A block barrier that is not aligned (`barrier.sync`) was reached by a diverged warp. Its
    /// lanes had taken different paths since they last met at a `bar.warp.sync` or an aligned
    /// barrier.
    ApartAtBarrier {
        /// Barrier number.
        barrier: u32,
        /// Lanes that are sure to be together, of those at the barrier.
        together: u32,
        /// Lanes of the warp that have not exited.
        live: u32,
        /// Line in the PTX of the branch that last took lanes apart.
        parted_on: usize,
    },
    /// A barrier number or thread count that is not allowed, or more arrivals than it expects.
    BadBarrier {
        /// Barrier number.
        barrier: u32,
        /// The error.
        message: String,
    },
    /// A warp-wide instruction whose member mask omits a lane that executes it.
    BadMemberMask {
        /// The mask.
        mask: u32,
        /// Lanes that executed the instruction with it.
        lanes: u32,
    },
    /// Check mode: an election or a matrix product whose member mask names lanes that have exited
    /// or never existed, or a shuffle that reads from such lanes.
    AbsentMembers {
        /// The mask.
        mask: u32,
        /// Lanes of it that are not there, of a shuffle those that it reads from.
        absent: u32,
    },
    /// An mbarrier was misused.
    Mbarrier {
        /// Offset of the mbarrier in shared memory.
        offset: u64,
        /// The error.
        message: String,
    },
    /// A copy by `cp.async` of a size for which its effect is undefined.
    AsyncCopy {
        /// The error.
        message: String,
    },
    /// A bulk copy with an address or a size that the hardware rejects.
    BulkCopy {
        /// The error.
        message: String,
    },
    /// A multicast address was accessed by another instruction than `multimem`, or `multimem` was
    /// used at another address, or where no memory of a device is bound.
    Multicast {
        /// The error.
        message: String,
    },
    /// `wgmma` was misused: by warps that are not together, without a fence or a wait, or with a bad
    /// matrix descriptor.
    Wgmma {
        /// The error.
        message: String,
    },
    /// A block ended while a bulk copy of its own may still have used its shared memory.
    CopyOutlivesBlock {
        /// The error.
        message: String,
    },
    /// Check mode: two accesses that nothing orders.
    Race(Box<Race>),
    /// Check mode: a read of unwritten memory.
    Unwritten {
        /// `global` or `shared`.
        space: &'static str,
        /// Label of the region; empty in shared memory.
        label: String,
        /// Offset of the first word in the region or in the shared window, in bytes.
        offset: u64,
        /// Name of the part, such as `ready[3]`, or of a shared variable, `tile + 0x40`. Empty
        /// without names.
        part: String,
        /// Length in bytes.
        bytes: u64,
        /// In shared memory: the last barrier that the lane has passed, of the block or the warp, or its
        /// last test of an mbarrier.
        behind: Option<Box<Party>>,
        /// In global memory: writes around it, and where the address may come from.
        near: Box<Nearby>,
    },
    /// Check mode: a read of registers that nothing can have written.
    UnwrittenRegister {
        /// Names in the PTX.
        registers: Vec<String>,
    },
    /// No warp of the block can ever go on.
    Deadlock(StuckReport),
    /// The grid ran too many instructions, and memory may have changed, but no block began or ended
    /// ([`DeviceConfig::livelock_limit`]).
    ///
    /// [`DeviceConfig::livelock_limit`]: crate::DeviceConfig::livelock_limit
    Livelock {
        /// Warp instructions since a block last began or ended, or all warps only waited.
        instructions: u64,
        /// Position of every live warp.
        report: StuckReport,
    },
    /// All kernels of a machine wait for events that no kernel will cause: the devices, and the
    /// waits of their kernels. The place is that of the first.
    Hang(Vec<(usize, StuckReport)>),
    /// Something that is in PTX but not in this virtual GPU, found only when it ran.
    Unsupported(String),
}

impl FaultKind {
    /// A short name, as lists of accepted reports and tools use it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            FaultKind::OutOfBounds { nearest: Some(near), .. } if near.freed => "use-after-free",
            FaultKind::OutOfBounds { .. }
            | FaultKind::OutOfWindow { .. }
            | FaultKind::OutOfCluster { .. } => "out-of-bounds",
            FaultKind::EndedBlock { .. } => "ended-block",
            FaultKind::NarrowArrival => "narrow-arrival",
            FaultKind::Misaligned { .. } => "misaligned",
            FaultKind::Trap => "trap",
            FaultKind::DivergentBarrier { .. } => "divergent-barrier",
            FaultKind::ApartAtBarrier { .. } => "apart-at-barrier",
            FaultKind::BadBarrier { .. } => "bad-barrier",
            FaultKind::BadMemberMask { .. } => "bad-member-mask",
            FaultKind::AbsentMembers { .. } => "absent-members",
            FaultKind::Mbarrier { .. } => "mbarrier",
            FaultKind::AsyncCopy { .. } => "async-copy",
            FaultKind::BulkCopy { .. } => "bulk-copy",
            FaultKind::Multicast { .. } => "multicast",
            FaultKind::Wgmma { .. } => "wgmma",
            FaultKind::CopyOutlivesBlock { .. } => "copy-outlives-block",
            FaultKind::Race(race) if race.class == Class::Proxy => "missing-proxy-fence",
            FaultKind::Race(_) => "race",
            FaultKind::Unwritten { .. } => "unwritten-read",
            FaultKind::UnwrittenRegister { .. } => "unwritten-register",
            FaultKind::Deadlock(_) => "deadlock",
            FaultKind::Livelock { .. } => "livelock",
            FaultKind::Hang(_) => "hang",
            FaultKind::Unsupported(_) => "unsupported",
        }
    }

    /// The class that it belongs to.
    #[must_use]
    pub fn class(&self) -> Class {
        match self {
            FaultKind::OutOfBounds { nearest: Some(near), .. } if near.freed => Class::Lifetime,
            FaultKind::Unwritten { .. }
            | FaultKind::UnwrittenRegister { .. }
            | FaultKind::CopyOutlivesBlock { .. }
            | FaultKind::EndedBlock { .. } => Class::Lifetime,
            FaultKind::NarrowArrival => Class::Model,
            FaultKind::OutOfBounds { .. }
            | FaultKind::OutOfWindow { .. }
            | FaultKind::OutOfCluster { .. }
            | FaultKind::Misaligned { .. }
            | FaultKind::Multicast { .. }
            | FaultKind::AsyncCopy { .. }
            | FaultKind::BulkCopy { .. } => Class::Bounds,
            FaultKind::Race(race) => race.class,
            FaultKind::DivergentBarrier { .. }
            | FaultKind::ApartAtBarrier { .. }
            | FaultKind::BadBarrier { .. }
            | FaultKind::BadMemberMask { .. }
            | FaultKind::AbsentMembers { .. }
            | FaultKind::Mbarrier { .. }
            | FaultKind::Wgmma { .. }
            | FaultKind::Deadlock(_)
            | FaultKind::Livelock { .. }
            | FaultKind::Hang(_) => Class::Synchronisation,
            FaultKind::Trap | FaultKind::Unsupported(_) => Class::Stopped,
        }
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FaultKind::OutOfBounds { addr, bytes, nearest } => {
                write!(f, "access of {bytes} bytes at {addr:#x} {}", place(*addr, nearest.as_ref()))
            }
            FaultKind::OutOfWindow { space, offset, bytes, start, end } => {
                write!(
                    f,
                    "access of {bytes} bytes at {space} offset {offset:#x}; valid are {start:#x}..{end:#x}"
                )
            }
            FaultKind::OutOfCluster { rank, blocks } => write!(
                f,
                "access to shared memory of block number {rank} of a cluster, which has {blocks} blocks from 0"
            ),
            FaultKind::EndedBlock { block, message } if message.is_empty() => write!(
                f,
                "access to shared memory of block {block:?} of the cluster, which has ended: a barrier.cluster.arrive and \
                 .wait behind the access keeps its blocks until then"
            ),
            FaultKind::EndedBlock { block, message } => {
                write!(
                    f,
                    "block {block:?} may end before another block accesses its shared memory: {message}"
                )
            }
            FaultKind::NarrowArrival => write!(
                f,
                "arrival at the mbarrier of another block with scope .cta, which leaves that block out: by the model it orders \
                 nothing there. .release.cluster does, or the assumption ClusterArrivals"
            ),
            FaultKind::Misaligned { addr, align } => {
                write!(f, "address {addr:#x} is not a multiple of {align}")
            }
            FaultKind::Trap => write!(f, "trap (a panic or a failed check in the kernel)"),
            FaultKind::DivergentBarrier { barrier, lanes, live } => write!(
                f,
                "aligned barrier {barrier} reached by lanes {lanes:#010x} while lanes {live:#010x} are alive"
            ),
            FaultKind::ApartAtBarrier { barrier, together, live, parted_on } => write!(
                f,
                "barrier {barrier} reached by lanes {together:#010x} of a warp of which lanes {live:#010x} are alive and may be elsewhere \
                 since PTX line {parted_on}: put `bar.warp.sync` of them all in front"
            ),
            FaultKind::BadBarrier { barrier, message } => write!(f, "{}: {message}", name_of(*barrier)),
            FaultKind::BadMemberMask { mask, lanes } => {
                write!(f, "member mask {mask:#010x} leaves out some of the executing lanes {lanes:#010x}")
            }
            FaultKind::AbsentMembers { mask, absent } => {
                write!(
                    f,
                    "member mask {mask:#010x} names lanes {absent:#010x}, which have exited or never were"
                )
            }
            FaultKind::Mbarrier { offset, message } => {
                write!(f, "mbarrier at shared offset {offset:#x}: {message}")
            }
            FaultKind::AsyncCopy { message } => write!(f, "cp.async: {message}"),
            FaultKind::BulkCopy { message } | FaultKind::CopyOutlivesBlock { message } => {
                write!(f, "bulk copy: {message}")
            }
            FaultKind::Multicast { message } => write!(f, "{message}"),
            FaultKind::Wgmma { message } => write!(f, "wgmma: {message}"),
            FaultKind::Race(race) => write!(f, "{race}"),
            FaultKind::Unwritten { space, label, offset, part, bytes, behind, near } => {
                let place = Spot { label, offset: *offset, part };
                write!(f, "read of {bytes} bytes of unwritten {space} memory, at {place}")?;
                behind.iter().try_for_each(|barrier| {
                    write!(f, "\n  behind the last barrier of its lane, a {barrier}")
                })?;
                near.writes.iter().try_for_each(|write| write!(f, "\n  near: {write}"))?;
                write!(f, "{}", near.origin)
            }
            FaultKind::UnwrittenRegister { registers } => write!(
                f,
                "read of register{} '{}', which nothing has written on any path to here",
                if registers.len() == 1 { "" } else { "s" },
                registers.join("', '")
            ),
            FaultKind::Deadlock(report) => write!(f, "deadlock\n{report}"),
            FaultKind::Livelock { instructions, report } => write!(
                f,
                "livelock: {instructions} warp instructions, and no block has begun or ended meanwhile; if the kernel needs as many, \
                 raise the device's livelock limit\n{report}"
            ),
            FaultKind::Hang(devices) => {
                write!(f, "{HANG}")?;
                devices.iter().try_for_each(|(at, report)| write!(f, "\ndevice {at}: {report}"))
            }
            FaultKind::Unsupported(what) => write!(f, "not supported by the virtual GPU: {what}"),
        }
    }
}

/// The last instructions of a warp that access memory, or wait for or order others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// Block index.
    pub block: [u32; 3],
    /// Warp index within the block.
    pub warp: u32,
    /// Latest first.
    pub steps: Vec<TraceStep>,
}

/// An instruction of a [`Trace`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceStep {
    /// The instruction.
    pub at: InstructionPlace,
    /// The lanes that executed it lately, one bit each; 0 where they are not known.
    pub lanes: u32,
}

/// Steps of a warp that a fault lists.
const TRACED_STEPS: usize = 12;

impl TraceStep {
    /// Instructions as reports name them.
    pub(crate) fn list(kernel: &Kernel, steps: impl Iterator<Item = RecentStep>) -> Vec<TraceStep> {
        // Lanes that are apart execute an instruction one after the other.
        let mut merged: Vec<RecentStep> = vec![];
        for (pc, lanes) in steps {
            match merged.iter_mut().find(|(known, _)| *known == pc) {
                Some((_, all)) => *all |= lanes,
                None => merged.push((pc, lanes)),
            }
        }
        let step = |(pc, lanes)| TraceStep { lanes, ..TraceStep::at(kernel, pc) };
        let mut steps: Vec<TraceStep> = merged.into_iter().map(step).collect();
        // Keep only the last instruction of a Rust line that became several.
        steps.dedup_by(|a, b| a.at.source.is_some() && a.at.source == b.at.source);
        steps.truncate(TRACED_STEPS);
        steps
    }

    /// An instruction as reports name it.
    pub(crate) fn at(kernel: &Kernel, pc: u32) -> TraceStep {
        TraceStep { at: kernel.place_of(pc), lanes: 0 }
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "last instructions of block {:?}, warp {}, latest first:", self.block, self.warp)?;
        self.steps.iter().try_for_each(|step| write!(f, "\n    {step}"))
    }
}

impl fmt::Display for TraceStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let InstructionPlace { ptx_line, ptx_text, source, .. } = &self.at;
        if let Some((file, line)) = source {
            write!(f, "{file}:{line} ")?;
        }
        write!(f, "PTX {ptx_line}: {ptx_text}")?;
        match self.lanes {
            0 => Ok(()),
            lanes => write!(f, " [{}]", lane_numbers(lanes)),
        }
    }
}

/// The lanes of a mask, as in `lanes 0-3, 8`.
fn lane_numbers(mask: u32) -> String {
    let lanes = (0..32u32).filter(|lane| mask >> lane & 1 != 0);
    format!("{} {}", if mask.is_power_of_two() { "lane" } else { "lanes" }, ranges(lanes))
}

/// Numbers in rising order, as in `0-3, 8`.
pub(crate) fn ranges<N: Into<u64>>(numbers: impl IntoIterator<Item = N>) -> String {
    let mut ranges: Vec<[u64; 2]> = vec![];
    for number in numbers.into_iter().map(Into::into) {
        match ranges.last_mut() {
            Some([_, last]) if *last + 1 == number => *last = number,
            _ => ranges.push([number; 2]),
        }
    }
    let range = |[first, last]: [u64; 2]| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    ranges.into_iter().map(range).collect::<Vec<_>>().join(", ")
}

/// A kernel that was stopped, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Kernel name.
    pub kernel: String,
    /// The device, where its [`Machine`](crate::Machine) has several.
    pub device: Option<u32>,
    /// Block index.
    pub block: [u32; 3],
    /// Warp index within the block.
    pub warp: u32,
    /// Lane, where one is to blame.
    pub lane: Option<u32>,
    /// The instruction.
    pub at: InstructionPlace,
    /// Kind of the fault.
    pub kind: FaultKind,
    /// Instructions that have computed the address, the nearest first, of a bad access, a read of
    /// unwritten memory or the later of two writes that race; a line of the source occurs once.
    pub address: Vec<InstructionPlace>,
    /// Check mode: the last steps of the warps involved.
    pub traces: Vec<Trace>,
}

/// Lines that are listed of the computation of an address.
const MOST_OF_ADDRESS: usize = 16;

/// The instructions behind the address of access `pc`, where the fault is one of the address.
/// `writers`: see [`behind_address`].
pub(crate) fn address_of(
    kernel: &Kernel,
    pc: u32,
    kind: &FaultKind,
    writers: &dyn Fn(u32) -> Vec<u32>,
) -> Vec<InstructionPlace> {
    let is_of_address = match kind {
        FaultKind::OutOfBounds { .. }
        | FaultKind::OutOfWindow { .. }
        | FaultKind::Misaligned { .. }
        | FaultKind::Unwritten { .. } => true,
        FaultKind::Race(race) => race.hazard == Hazard::WriteAfterWrite,
        _ => false,
    };
    let behind = if is_of_address { behind_address(kernel, pc, writers, MOST_OF_ADDRESS) } else { vec![] };
    behind.into_iter().map(|pc| kernel.place_of(pc)).collect()
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}\n  in kernel '{}'{}, block {:?}, warp {}",
            self.kind,
            readable_name(&self.kernel),
            of_device(self.device),
            self.block,
            self.warp
        )?;
        if let Some(lane) = self.lane {
            write!(f, ", lane {lane}")?;
        }
        self.at.write(f, "\n  ")?;
        if !self.address.is_empty() {
            write!(f, "\n  its address was computed")?;
            self.address.iter().try_for_each(|at| at.write_line(f, "\n    "))?;
        }
        self.traces.iter().try_for_each(|trace| write!(f, "\n  {trace}"))
    }
}

impl std::error::Error for Fault {}

/// A barrier of a block, or that of its cluster, in words.
fn name_of(barrier: u32) -> String {
    if barrier == CLUSTER_BARRIER {
        "the barrier of the cluster".into()
    } else {
        format!("barrier {barrier}")
    }
}

/// The event that a group of lanes waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitingFor {
    /// Nothing: it can run.
    Nothing,
    /// A block barrier.
    Barrier {
        /// Barrier number.
        barrier: u32,
        /// Threads that have arrived.
        arrived: u32,
        /// Threads expected.
        expected: u32,
    },
    /// Other lanes of its own warp, at a warp-wide instruction.
    Lanes {
        /// Member mask of the instruction.
        mask: u32,
        /// Lanes that have arrived.
        arrived: u32,
    },
    /// An mbarrier in shared memory.
    Mbarrier {
        /// Offset in shared memory.
        offset: u64,
        /// Arrivals still missing.
        pending: u32,
        /// Bytes of bulk copies still missing.
        pending_bytes: i64,
        /// Phase bit.
        phase: u32,
    },
    /// Another warp of its warpgroup, which has not reached the products that `wgmma.wait_group`
    /// waits for.
    Warpgroup {
        /// Index of that warp within the block.
        warp: u32,
        /// The last group of products to wait for, from 1.
        group: u32,
    },
    /// A word in memory that it reads again and again.
    Memory {
        /// Address.
        addr: u64,
        /// Value read last.
        value: u64,
    },
}

impl WaitingFor {
    /// Writes it with the name of the place, where it has one.
    fn write(&self, f: &mut fmt::Formatter<'_>, place: &str) -> fmt::Result {
        match self {
            WaitingFor::Mbarrier { pending, pending_bytes, phase, .. } if !place.is_empty() => write!(
                f,
                "waits on mbarrier {place}: phase {phase}, {pending} arrivals and {pending_bytes} bytes missing"
            ),
            WaitingFor::Memory { value, .. } if !place.is_empty() => {
                write!(f, "spins on {place}, last value {value:#x} ({value})")
            }
            WaitingFor::Nothing => write!(f, "running"),
            WaitingFor::Barrier { barrier, arrived, expected } => {
                write!(f, "waits at {}: {arrived} of {expected} threads have arrived", name_of(*barrier))
            }
            WaitingFor::Lanes { mask, arrived } => {
                write!(f, "waits for lanes {:#010x} at a warp-wide instruction", mask & !arrived)
            }
            WaitingFor::Mbarrier { offset, pending, pending_bytes, phase } => write!(
                f,
                "waits on mbarrier at shared offset {offset:#x}: phase {phase}, {pending} arrivals and \
                 {pending_bytes} bytes missing"
            ),
            WaitingFor::Warpgroup { warp, group } => {
                write!(f, "waits for warp {warp} of its warpgroup to commit the wgmma group {group}")
            }
            WaitingFor::Memory { addr, value } => {
                write!(f, "spins on {addr:#x}, last value {value:#x} ({value})")
            }
        }
    }
}

impl fmt::Display for WaitingFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, "")
    }
}

/// One group of lanes that run together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StuckWarp {
    /// Block index.
    pub block: [u32; 3],
    /// Warp index within the block.
    pub warp: u32,
    /// Lanes of the group, one bit each.
    pub lanes: u32,
    /// The instruction.
    pub at: InstructionPlace,
    /// The event that it waits for.
    pub waiting: WaitingFor,
    /// The word or the mbarrier that it waits for, as in `'buffers' + 0x4`. Empty where it has no name.
    /// Of lanes that read several words by one load, the word of the first lane.
    pub place: String,
    /// The words of the other lanes, where they are not the same.
    pub others: Vec<OtherWord>,
    /// Check mode, for a wait on an mbarrier: the instructions that initialised it and arrived
    /// last.
    pub mbarrier: Vec<TraceStep>,
}

/// A word that lanes poll beside the one of the first lane of their group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherWord {
    /// Lanes that poll it, one bit each.
    pub lanes: u32,
    /// The word, as in `'buffers' + 0x4`. Empty where it has no name.
    pub place: String,
    /// Its contents.
    pub value: u64,
}

impl StuckWarp {
    /// Whether both wait at the same place for the same event.
    fn waits_like(&self, other: &StuckWarp) -> bool {
        let event = |of: &StuckWarp| (of.at.ptx_line, of.lanes);
        event(self) == event(other)
            && (&self.waiting, &self.place, &self.others, &self.mbarrier)
                == (&other.waiting, &other.place, &other.others, &other.mbarrier)
    }
}

/// Words of other lanes that a line of a hang lists.
const MOST_OTHER_WORDS: usize = 8;

/// Every live warp of a grid, and the event that it waits for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StuckReport {
    /// Kernel name.
    pub kernel: String,
    /// One entry per group of lanes.
    pub warps: Vec<StuckWarp>,
    /// The barriers of a part of a block that wait for threads, by number, each with the other
    /// instructions of the kernel that arrive there, where their barrier number is a constant.
    pub barriers: Vec<(u32, Vec<InstructionPlace>)>,
}

impl fmt::Display for StuckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "kernel '{}': {} groups of lanes are alive",
            readable_name(&self.kernel),
            self.warps.len()
        )?;
        // Warps of a block that differ in nothing else are one line.
        let mut lines: Vec<(&StuckWarp, Vec<u32>)> = vec![];
        for warp in &self.warps {
            let mut of_block = lines.iter_mut().rev().take_while(|(first, _)| first.block == warp.block);
            match of_block.find(|(first, _)| first.waits_like(warp)) {
                Some((_, all)) => all.push(warp.warp),
                None => lines.push((warp, vec![warp.warp])),
            }
        }
        for (w, all) in lines {
            let warps = if all.len() == 1 { "warp" } else { "warps" };
            write!(f, "\n  block {:?} {warps} {} lanes {:#010x}: ", w.block, ranges(all), w.lanes)?;
            w.waiting.write(f, &w.place)?;
            if w.at.source.is_some() {
                write!(f, " {}", w.at)?;
            }
            write!(f, " (PTX line {}: {})", w.at.ptx_line, w.at.ptx_text)?;
            w.mbarrier.iter().try_for_each(|step| write!(f, "\n    its mbarrier: {step}"))?;
            for OtherWord { lanes, place, value } in w.others.iter().take(MOST_OTHER_WORDS) {
                write!(f, "\n    {}: {place}, value {value:#x} ({value})", lane_numbers(*lanes))?;
            }
            match w.others.len().saturating_sub(MOST_OTHER_WORDS) {
                0 => {}
                more => write!(f, "\n    and {}", counted(more as u64, "more word"))?,
            }
        }
        for (barrier, places) in &self.barriers {
            for place in places {
                write!(f, "\n  barrier {barrier} has another arrival {place}")?;
            }
        }
        Ok(())
    }
}

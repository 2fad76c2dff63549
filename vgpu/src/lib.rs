//! A virtual GPU: parses PTX and executes it on the CPU, with checks.
//!
//! It runs the very PTX that ships to real GPUs, inline assembly included, so tests without a GPU
//! run the code that a GPU runs. Nothing in it depends on the kernels' purpose.
//!
//! - [`Machine`] is devices with their memory and a stream each: ten lines from PTX to a result.
//!   The items below are its parts.
//! - [`Trial`] runs a program in several modes under several seeds, and merges its reports.
//! - [`Report`]s are what check mode collects, with a [`Class`] each; [`Assumptions`] and an
//!   [`AcceptList`] leave some out.
//! - [`Module::parse`] turns PTX text into [`Kernel`]s. An unknown instruction is an error that
//!   gives its line.
//! - [`Memory`] is the memory that a device can address. Device addresses are host addresses of
//!   this process; memory can be exported to and imported from other processes.
//! - [`ptx`] reads PTX for tools: statements with their places, and control flow.
//! - [`Grid`] is a launched kernel. It runs while [`Grid::step`] is called, on the caller's thread,
//!   and can be paused at any time.
//! - [`stream`] has the parts of a driver: queues of work, events, captures.
//!
//! Every access is checked for bounds and alignment. A [`Fault`] names kernel, block, warp, lane,
//! PTX line and Rust line. A deadlock names every warp and the event that it waits for. With a
//! seed, the scheduler and the completion of copies are drawn from it, and the same seed takes
//! the same path again. [`Explore`] runs small programs under every schedule.
//!
//! On processors with AVX-512 or AVX2, arithmetic and branches of kernels that run for long are
//! compiled to its instructions. Results, counts of instructions and schedules are the interpreter's. With
//! `EPOXIDE_VGPU_COMPILE=0` in the environment nothing is compiled, and with
//! `EPOXIDE_VGPU_COMPILE=1` each kernel is compiled when it first runs.
//!
//! Where the environment variable `EPOXIDE_VGPU_COVERAGE` names a folder, each process writes there
//! which instructions it has executed; `cargo build-ptx --coverage` makes a table of kernels and
//! Rust lines of it.
//!
//! ```
//! use epoxide_vgpu::{DeviceConfig, Grid, GridConfig, Memory, Module, Progress};
//!
//! let ptx = "
//! .version 8.4
//! .target sm_90
//! .address_size 64
//! .visible .entry square(.param .u64 out)
//! {
//!     .reg .b32 %r<3>;
//!     .reg .b64 %rd<4>;
//!     ld.param.u64 %rd1, [out];
//!     mov.u32 %r1, %tid.x;
//!     mul.lo.u32 %r2, %r1, %r1;
//!     mul.wide.u32 %rd2, %r1, 4;
//!     add.s64 %rd3, %rd1, %rd2;
//!     st.global.u32 [%rd3], %r2;
//!     ret;
//! }";
//! let module = Module::parse(ptx)?;
//! let memory = Memory::new();
//! let out = memory.alloc(32 * 4, "out")?;
//! let launch = GridConfig::new(1, 32, 0);
//! let kernel = module.kernel("square").ok_or("no such kernel")?;
//! let mut grid =
//!     Grid::new(kernel, memory.clone(), &DeviceConfig::default(), launch, &out.addr().to_ne_bytes())?;
//! while grid.step(10_000)? != Progress::Done {}
//! let mut word = [0; 4];
//! memory.read(out.addr() + 5 * 4, &mut word)?;
//! assert_eq!(u32::from_ne_bytes(word), 25);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod check;
mod compiled;
mod coverage;
mod device;
mod exec;
mod explore;
mod fault;
mod faulty;
mod float;
mod float_mode;
mod grid;
mod ir;
mod kernel;
mod lower;
mod machine;
mod mbarrier;
mod memory;
mod memory_error;
mod module;
mod multicast;
mod names;
pub mod ptx;
mod racing;
mod registers;
mod seeds;
pub mod stream;
mod symmetric;
mod tensor_map;
mod trial;

pub use check::{
    AcceptList, Accepted, Assumptions, Cause, CheckConfig, Checker, Class, Loaded, Past, Report, ReportPlace,
    Stored, Summary, Timeline, host_meets,
};
pub use device::{
    CHECKED_LIVELOCK_LIMIT, Clock, Cluster, ClusterSizes, DeviceConfig, EXPLORED_LIVELOCK_LIMIT, GridConfig,
    Output, Schedule, VIRTUAL_NS_PER_WARP_INSTRUCTION,
};
pub use explore::{Coverage, Explore, Explored, Failure, Path};
pub use fault::{
    Attempt, Fault, FaultKind, Gap, GapKind, Hazard, InstructionPlace, Launch, LaunchError, Nearby,
    OtherWord, Party, PtxError, Race, Side, StuckReport, StuckWarp, Trace, TraceStep, UnwrittenRegister,
    WaitingFor,
};
pub use grid::{Grid, Progress, Residency, Stats};
pub use kernel::{Kernel, ParamInfo};
pub use machine::{Argument, ArgumentValue, Array, Machine, MachineError, Mismatch, Number, WrongNumber};
pub use memory::{Memory, Region, Reservation};
pub use memory_error::{MemoryError, NearRegion};
pub use module::{Module, Refusal};
pub use multicast::MulticastObject;
pub use names::{brief_name, readable_name};
pub use seeds::for_each_seed;
pub use symmetric::Symmetric;
pub use tensor_map::{ElementType, Fill, PixelTensor, Swizzle, TensorMap, TensorMapError, TiledTensor};
pub use trial::{FailedRuns, Mode, ModeSeeds, TRIAL_LIVELOCK_LIMIT, Trial, Tried, TriedReport};

/// The examples of the README are compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Whether the virtual GPU supports an opcode, given with all of its modifiers
/// (`ld.global.v4.u32`). Only [`Module::parse`] checks operands.
#[must_use]
pub fn supported_opcode(opcode_with_modifiers: &str) -> bool {
    lower::decode::decode(opcode_with_modifiers).is_ok()
}

//! Check mode: finds accesses that rely on an order which the memory model does not promise.
//!
//! Happens-before is tracked with vector clocks, after the PTX memory model (PTX ISA, "Memory
//! Consistency Model"). Edges come only from morally strong release and acquire patterns, fences,
//! block and warp barriers, mbarriers, kernel boundaries and the host's waits. Bulk copies are
//! actors of their own in the async proxy. They rely on generic accesses only across a
//! `fence.proxy.async`, and only an observed completion orders them before other accesses. The
//! model's text leaves open at which end of a path the proxy fence must stand; both ends are
//! accepted.
//!
//! One [`Checker`] watches the memory of all devices of a process;
//! [`Memory::checked`](crate::Memory::checked) joins a device to it. Memory that other processes or
//! plain host code access is hidden from it ([`Region::hide`](crate::Region::hide)). Host code that
//! reads by [`Memory::load_acquire`](crate::Memory::load_acquire) and
//! [`Memory::host_reads`](crate::Memory::host_reads) is watched like a kernel. In hidden memory,
//! the check is only whether kernels released the bytes to the host.
//!
//! | file | |
//! |---|---|
//! | `clock.rs` | vector clocks |
//! | `grids.rs` | the grids, and whom a scope takes in |
//! | `known.rs` | what has happened before some point |
//! | `shadow.rs` | for every word, who wrote and who read it |
//! | `block.rs` | what the lanes of a block know, and how they learn it |
//! | `watch.rs` | what the interpreter calls, and where an access goes |
//! | `world.rs` | all of it together, and what the host does |
//! | `checker.rs` | what a program calls |
//! | `stores.rs` | how many bytes kernels store and how often they load, where, for tests that count |
//! | `history.rs` | by which reads an order was meant to come about |
//! | `report.rs` | what was found, in words |

pub(crate) mod block;
mod checker;
pub(crate) mod clock;
pub(crate) mod grids;
pub(crate) mod history;
mod known;
pub(crate) mod report;
pub(crate) mod shadow;
mod stores;
pub(crate) mod watch;
pub(crate) mod world;

pub use checker::{CheckConfig, Checker, host_meets};
pub(crate) use known::Known;
pub use known::{Past, Timeline};
pub use stores::{Loaded, Stored};

//! Check mode: finds accesses that rely on an order which the memory model does not guarantee.
//!
//! Happens-before is tracked with vector clocks, after the PTX memory model (PTX ISA, "Memory
//! Consistency Model"). Edges come only from morally strong release and acquire patterns, fences,
//! barriers of warps, blocks and clusters, mbarriers, kernel boundaries and the host's waits. Bulk
//! copies are actors of their own in the async proxy. They rely on generic accesses only across a
//! `fence.proxy.async`, and only an observed completion orders them before other accesses. The
//! model's text leaves open at which end of a path the proxy fence must stand; both ends are
//! accepted. Copies by `cp.async` are actors of the generic proxy: they need no fence, but the same
//! observed completion.
//!
//! One [`Checker`] watches the memory of all devices of a process;
//! [`Memory::checked`](crate::Memory::checked) joins a device to it. Memory that other processes or
//! plain host code access is hidden from it ([`Region::hide`](crate::Region::hide)). Host code that
//! accesses memory by [`Memory::load_acquire`](crate::Memory::load_acquire),
//! [`Memory::store_release`](crate::Memory::store_release),
//! [`Memory::host_reads`](crate::Memory::host_reads) and
//! [`Memory::host_writes`](crate::Memory::host_writes) is watched like a kernel. Threads of the host
//! may pass on what they read in ways that the checker does not track, such as sockets: a write by
//! one of them counts as ordered behind all that the others have read so. In hidden memory, the
//! check is only whether kernels released the bytes to the host.
//!
//! | file | |
//! |---|---|
//! | `clock.rs` | vector clocks |
//! | `grids.rs` | launched grids, and the actors that a scope includes |
//! | `past.rs` | causal pasts |
//! | `record.rs` | accesses, and whether one comes after another |
//! | `word.rs` | the history of a word: its last write and the reads since |
//! | `shadow.rs` | the histories of all words |
//! | `releases.rs` | the release patterns that reads of a location observe |
//! | `block.rs` | causal pasts of the lanes of a block, and the operations that extend them |
//! | `cluster.rs` | the blocks of a cluster: whose memory an address is in, and their ends |
//! | `hooks.rs` | the interpreter's calls, and the memory that an access goes to |
//! | `world.rs` | the state of a checker, and accesses by the host |
//! | `checker.rs` | the public interface |
//! | `stores.rs` | counts of stored bytes and of loads, for tests |
//! | `hash.rs` | maps with small keys |
//! | `history.rs` | recent synchronisation, for the synchronisation that a report lists |
//! | `gaps.rs` | the fences, scopes and barriers that a race lacks |
//! | `report.rs` | reports as text |
//! | `causes.rs` | reports grouped by their causes |
//! | `reports.rs` | collected reports, their classes, and lists of accepted ones |

pub(crate) mod block;
mod causes;
mod checker;
pub(crate) mod clock;
pub(crate) mod cluster;
mod gaps;
pub(crate) mod grids;
pub(crate) mod hash;
pub(crate) mod history;
pub(crate) mod hooks;
#[cfg(test)]
mod oracle;
mod past;
pub(crate) mod record;
mod releases;
pub(crate) mod report;
mod reports;
pub(crate) mod shadow;
mod stores;
mod word;
pub(crate) mod world;

pub use causes::{Cause, Summary};
pub(crate) use checker::MOST_COLLECTED;
pub use checker::{Assumptions, CheckConfig, Checker, host_meets};
pub(crate) use past::CausalPast;
pub use past::{Past, Timeline};
pub(crate) use reports::Reports;
pub use reports::{AcceptList, Accepted, Class, Report, ReportPlace};
pub use stores::{Loaded, Stored};

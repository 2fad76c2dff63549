//! NVIDIA's collective library beside ours: a communicator that cannot leak or hang.
//!
//! Programs that use this library use NCCL for the rest of their traffic. [`Library`] finds it when
//! the program runs: nothing is linked, and a program builds and starts on machines without it. [`Communicator`] is NCCL's communicator as a Rust value. It is made with a
//! deadline, can be aborted from any thread, and is always freed or reported as leaked. Its
//! operations on device tensors give [`Work`](epoxide_group::Work) handles like those of
//! [`epoxide::group`]. [`NcclGroup`] is a process group that sends its device tensors over it.
//!
//! ```no_run
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use epoxide::driver::{Device, Stream};
//! use epoxide::{DType, Tensor};
//! use epoxide::group::{ProcessGroup, ReduceOp};
//! use epoxide_nccl::{Communicator, Config, Library, Watchdog};
//!
//! /// Sums a tensor over all ranks.
//! fn sum(device: &Device, group: &dyn ProcessGroup) -> epoxide::Result<Vec<f32>> {
//!     let library = Library::find()?;
//!     let config = Config {
//!         timeout: Duration::from_secs(60),
//!         watchdog: Some(Watchdog::default()),
//!         ..Config::named("gradients")
//!     };
//!     let communicator = Communicator::over_group(&library, device, group, config)?;
//!     let stream = Stream::new(device)?;
//!     let tensor = Tensor::from_host(&stream, DType::F32, &[1024], &[1.0f32; 1024])?;
//!     let work = communicator.all_reduce(&tensor, ReduceOp::Sum, &stream)?;
//!     // Kernels that use the tensor can be launched into the stream now. The host waits here, up to the deadline.
//!     work.wait()?;
//!     let sums = tensor.to_host(&stream)?;
//!     communicator.finalize()?;
//!     Ok(sums)
//! }
//! ```
//!
//! | file | concern |
//! |---|---|
//! | `places`, `library` | where libnccl may be; loading it and checking what it has |
//! | `ffi` | NCCL's types and functions as C has them |
//! | `config`, `unique_id` | what a communicator is made from |
//! | `in_flight`, `registration`, `debug_info` | the records: operations under way, registered memory; the dumps |
//! | `core` | a communicator's state, the turn, and its end: the one place that gives it back |
//! | `follow`, `watchdog` | following operations to their end; giving up what hangs |
//! | `communicator`, `collectives` | what callers see of that; the operations |
//! | `group` | the process group |

mod collectives;
mod communicator;
mod config;
mod core;
mod debug_info;
mod ffi;
mod follow;
mod group;
mod in_flight;
mod library;
mod places;
mod registration;
mod unique_id;
mod watchdog;

use epoxide::driver;
use epoxide_base::{error, foreign, lock, own_file};

pub use collectives::P2p;
pub use communicator::Communicator;
pub use config::{Config, Watchdog};
pub use debug_info::{DEBUG_INFO_FILE, DEBUG_INFO_PIPE};
pub use group::NcclGroup;
pub use library::{Library, doctor};
pub use places::NCCL_LIBRARY;
pub use registration::Registration;
pub use unique_id::UniqueId;

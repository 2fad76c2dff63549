//! Expert parallelism: buffers, which dispatch rows to the ranks of experts and combine the
//! results.
//!
//! ```text
//! throughput/    low_latency/    the modes: rows, counts and layouts
//!        \        /
//!          core/                 what an operation of a buffer needs, whatever its mode
//!            |
//! tensor.rs payload.rs quantise.rs experts.rs topology.rs
//! ```

pub mod core;
mod experts;
pub mod low_latency;
mod payload;
mod quantise;
mod tensor;
pub mod throughput;
pub mod topology;

pub use core::{Sizes, StreamOrder};
pub use experts::{ExpertId, ExpertMap, ExpertRows, Placement};
pub use payload::Payload;
pub use quantise::Quantise;
pub use tensor::{DType, Element, Tensor, TypedTensor};
use topology::Topology;

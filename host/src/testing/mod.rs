//! Reference answers and payloads for tests, benchmarks and `epoxide roundtrip`: plain serial Rust, no device.
//!
//! [`oracle`] computes every public quantity of layout, dispatch and combine from the routing alone; [`payload`] makes
//! rows that tell their tokens apart or whose sums are exact; [`lockstep`] runs ranks one at a time. Nothing here shares
//! code with the kernels. [`ranks`] runs a test on several ranks, as threads or as processes; [`neighbour`] is another library on
//! their devices.

pub mod lockstep;
pub mod neighbour;
pub mod oracle;
pub mod payload;
pub mod ranks;

pub use crate::group::launch::HeldPort;

//! epoxide: expert parallelism in Rust.
//!
//! Moves Mixture-of-Experts tokens between GPUs: **dispatch** sends each token to the ranks that hold its experts,
//! **combine** brings the experts' outputs back and sums them. The kernels are written in Rust and shipped as PTX; the same
//! PTX runs on NVIDIA GPUs and on a virtual GPU, so everything works, and is tested, without a GPU.

pub mod driver;
pub mod ep;
mod error;
pub mod group;
#[doc(hidden)]
pub mod internal;
pub mod transport;

pub use ep::low_latency;

pub use error::{Error, Result, Scope};

//! Kernels, one file each, and their PTX. `cargo build-ptx` compiles them, and `cargo test` runs the
//! PTX on the virtual GPU.

#[cfg(all(feature = "cuda", not(target_arch = "nvptx64")))]
pub mod cuda;
mod exchange;
mod histogram;
mod matrix_product;
mod matrix_product_bf16;
mod reduction;
mod rms_norm;
mod softmax;
mod vector_add;

pub use exchange::*;
pub use histogram::*;
pub use matrix_product::*;
pub use matrix_product_bf16::*;
pub use reduction::*;
pub use rms_norm::*;
pub use softmax::*;
pub use vector_add::*;

/// The kernels as PTX, for a driver to load. Programs need no more than this text.
#[cfg(not(target_arch = "nvptx64"))]
pub const PTX: &str = include_str!("../ptx/own_kernels.sm_80.ptx");

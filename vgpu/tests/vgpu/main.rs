//! Tests of the virtual GPU, in one binary: `cargo test --release --test vgpu`.
//!
//! A module tests one part. `common` runs snippets and kernels, and picks how much a tier tries.

mod apart;
mod arithmetic;
mod block;
mod cases;
mod check;
mod cluster;
mod common;
mod convert;
mod explore;
mod foreign;
mod gaps;
mod load;
mod memory;
mod mma;
mod multimem;
mod numbers;
mod pixels;
mod products;
mod random;
mod reports;
mod schedule;
mod seldom;
mod sparse;
mod stores;
mod system;
mod tensor;
mod warp;
mod wgmma;
mod wmma;

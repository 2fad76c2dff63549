//! Compiles a crate of kernels to PTX, and checks the result. The command is `cargo build-ptx`;
//! this library has its parts, for other build tools.
//!
//! The crate of kernels is one that depends on `epoxide-simt`. The PTX that the compiler writes
//! describes its kernels itself, so there is no list of them anywhere.
//!
//! 1. [`toolchain`] finds the compiler: the pinned release, with the source of `core`.
//! 2. [`build`] compiles, and [`postprocess`] makes the PTX that is committed: launch bounds,
//!    source lines, a header with its origin.
//! 3. [`lint`] holds it to rules that neither compiler nor assembler checks, and to the kernels'
//!    own descriptions.
//! 4. [`check`] checks that committed PTX matches the sources.
//! 5. [`coverage`] reports which lines of the kernels a test run has executed.

#![forbid(unsafe_code)]

pub mod backend;
pub mod build;
pub mod check;
pub mod command;
pub mod coverage;
pub mod described;
pub mod doctor;
pub mod header;
pub mod job;
pub mod kernels;
pub mod lint;
pub mod metadata;
pub mod nvvm;
pub mod packages;
pub mod postprocess;
pub mod ptxas;
pub mod sources;
pub mod toolchain;
pub mod workspace;

//! Compiles a crate of kernels to PTX, and checks what comes out. The command is `cargo build-ptx`;
//! this library is what it does, for build tools of one's own.
//!
//! The crate of kernels is one that depends on `epoxide-simt`. The PTX that the compiler writes
//! describes its kernels itself, so there is no list of them anywhere.
//!
//! 1. [`toolchain`] finds the compiler: the pinned release, with the source of `core`.
//! 2. [`build`] compiles, and [`postprocess`] makes the PTX that is committed: launch bounds,
//!    source lines, a header with its origin.
//! 3. [`lint`] holds it to rules that neither compiler nor assembler checks, and to the kernels'
//!    own descriptions.
//! 4. [`check`] says whether committed PTX is what the sources give.
//! 5. [`coverage`] says which lines of the kernels a test run has executed.

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

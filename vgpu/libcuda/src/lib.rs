//! `libcuda.so.1` over virtual GPUs: a program that calls the CUDA driver API runs its PTX on the
//! CPU, with the checks of [`epoxide_vgpu`].
//!
//! The README describes how a program finds the library, which environment variables it reads, and
//! which calls it has.
//!
//! | file | content |
//! |---|---|
//! | `abi` | codes, structs and pointer arguments as C has them |
//! | `config` | environment variables |
//! | `world` | devices, and the tables from handles to objects |
//! | `work`, `engine` | work of streams, and the thread of each device that runs it |
//! | `symbols` | `cuGetProcAddress`, and the functions that exist but are not supported |
//! | `calls` | the functions, by subject |
//! | `run` | `vgpu_run`: one launch, without a driver |

pub mod abi;
pub mod calls;
mod config;
mod engine;
pub mod run;
mod symbols;
mod work;
mod world;

#[doc(hidden)]
pub use symbols::names;

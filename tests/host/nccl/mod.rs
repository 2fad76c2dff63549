//! `epoxide::nccl` against a libnccl that the tests build (`fake/lib.rs`), on virtual GPUs.

mod collectives;
mod ends;
mod fake;
mod groups;
mod leaks;
mod library;
mod watchdog;

//! Low latency on virtual GPUs, against the oracle.

mod acceptance;
mod batch;
mod by_expert;
pub mod faults;
mod gather;
mod internode;
mod links;
mod many;
mod mxfp8;
pub mod ones;
mod payloads;
mod pooled;
mod property;
mod readers;
mod regroup;
mod rounds;
mod shapes;
mod steps;
mod sums;
mod waits;

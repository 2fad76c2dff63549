//! Low latency on virtual GPUs, against the oracle.

mod acceptance;
mod faults;
mod property;
mod rounds;
mod shapes;

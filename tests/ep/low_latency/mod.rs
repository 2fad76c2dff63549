//! Low latency on virtual GPUs, against the oracle.

mod shapes;

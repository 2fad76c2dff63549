//! Low-latency round trips that compare every bit with the oracle.

mod case;
mod check;
mod data;
mod gathered;
mod inputs;
mod rounds;

pub use case::{LowLatencyCase, ReturnPath};
pub use inputs::LowLatencyInputs;
pub use rounds::LowLatencyRank;

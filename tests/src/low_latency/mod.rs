//! Low-latency round trips that compare every bit with the oracle.

mod case;
mod check;
mod data;
mod gathered;
mod inputs;
mod rounds;
mod segments;

pub use case::{LowLatencyCase, ReturnPath, RowMemory, Segments};
pub use inputs::LowLatencyInputs;
pub use rounds::LowLatencyRank;

//! Round trips: layout, dispatch and combine of one routing, each output compared with the oracle,
//! bit for bit.
//!
//! Every rank computes its expected results by itself, out of the case alone, a piece at a time. So
//! the same code serves threads and processes, thousands of small cases, and rows as large as a
//! model's.

mod by_expert;
mod case;
mod check;
mod graph;

pub use case::{Case, Return, Scales};
pub use check::{Expected, compare_weights};

//! Round trips: layout, dispatch and combine of one routing, each output compared with the oracle, bit for bit.
//!
//! Every rank computes what it must get by itself, out of the case alone, a piece at a time: so the same code serves threads and
//! processes, small cases by the thousand and rows as large as a model's.

mod by_expert;
mod case;
mod check;
mod graph;

pub use case::{Case, Return, Scales};
pub use check::{Expected, compare_weights};

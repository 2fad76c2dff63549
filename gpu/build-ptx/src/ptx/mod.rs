//! A light reader of PTX text: statements with their lines, grouped by entry.
//!
//! It knows just enough for the lints and for the post-processing: it does not understand
//! instructions. The virtual GPU has the real parser.

mod flow;
mod lanes;
mod text;

pub use lanes::Lanes;
pub use text::{Entry, Module, Statement, split_comment};

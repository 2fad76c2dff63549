//! Litmus tests of the PTX memory model. [`table`] lists them with the model's verdicts,
//! [`program`] makes PTX of one, [`many`] of very many instances of it in one launch.

pub mod many;
pub mod program;
pub mod table;

//! Litmus tests of the PTX memory model: [`table`] lists them with the model's verdicts,
//! [`program`] makes PTX of one, [`many`] of very many instances of it in one launch. The virtual
//! GPU is held against them, and GPUs are.

pub mod many;
pub mod memory;
pub mod program;
pub mod table;

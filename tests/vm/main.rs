//! The virtual machine: kernels by themselves, litmus tests of its memory, and input that nobody would give it or the parsers beside it.

mod fuzz;
mod kernels;
mod litmus;

//! Tests of the virtual GPU: kernels by themselves and litmus tests of its memory; and the fuzz
//! targets, of its PTX parser and of the other parsers.

mod fuzz;
mod kernels;
mod litmus;
mod numbers;
mod own_kernels;
mod plans;

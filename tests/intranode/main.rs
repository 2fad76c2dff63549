//! Dispatch and combine between ranks of one node, on virtual GPUs, against the serial oracle of `epoxide::testing`.

mod harness;
mod roundtrip;
mod turns;

mod errors;
mod processes;
mod programs;
mod property;
mod schedules;
mod shapes;
mod streams;
mod timeouts;
mod trace;

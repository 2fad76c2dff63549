//! Dispatch and combine between ranks of one node, on virtual GPUs, against the serial oracle of `epoxide::testing`.

#[path = "../common/cases.rs"]
mod cases;
#[path = "../common/harness.rs"]
mod harness;
#[path = "../common/roundtrip.rs"]
mod roundtrip;
#[path = "../common/turns.rs"]
mod turns;
#[path = "../common/valid.rs"]
mod valid;

mod errors;
mod processes;
mod programs;
mod property;
mod schedules;
mod shapes;
mod streams;
mod timeouts;
mod trace;

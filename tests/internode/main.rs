//! Dispatch and combine across nodes, on virtual GPUs, against the serial oracle of `epoxide::testing`.

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
mod mutation;
mod neighbour;
mod pairs;
mod processes;
mod property;
mod shapes;
mod timeouts;
mod wire;

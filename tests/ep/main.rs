//! Dispatch and combine on virtual GPUs, within a node and across nodes, against the serial oracle
//! of `epoxide_testing`.

mod backward;
mod by_expert;
mod calls;
mod cases;
mod counts;
mod deaths;
mod errors;
mod experts;
mod expiry;
mod failing;
mod gate;
mod halves;
mod overlap;
mod own_memory;
mod parts;
mod payloads;
mod promises;
mod sms;
mod spread;
mod survivors;
mod turns;
mod valid;
mod waits;

mod internode;
mod intranode;
mod low_latency;
mod many;
mod mapped;
mod property;
mod quantise;
mod residency;
mod shapes;
mod timeouts;

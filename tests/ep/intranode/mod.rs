//! Dispatch and combine between ranks of one node.

mod errors;
mod processes;
mod programs;
mod schedules;
mod shapes;
mod staged;
mod streams;
mod timeouts;
mod trace;

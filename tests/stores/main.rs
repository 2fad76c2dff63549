//! The stores: what all of them promise, and what the one over TCP does when things go wrong.

mod conformance;
mod faults;
mod secrets;

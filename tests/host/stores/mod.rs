//! The stores: what all of them promise, and what the one over TCP does when things go wrong.

mod attacks;
mod conformance;
mod faults;
mod relays;
mod secrets;

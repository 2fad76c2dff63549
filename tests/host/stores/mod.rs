//! The stores: the guarantees of all, and the faults of the one over TCP.

mod attacks;
mod conformance;
mod faults;
mod relays;
mod secrets;

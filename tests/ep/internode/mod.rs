//! Dispatch and combine across nodes.

mod errors;
mod links;
mod mutation;
mod neighbour;
mod pairs;
mod processes;
mod shapes;
mod timeouts;
mod traffic;

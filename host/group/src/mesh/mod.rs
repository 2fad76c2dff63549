//! Sockets between ranks that exchange messages, and waits on them.
//!
//! The mesh has no thread: the caller of an operation of the group drives all its sockets while it
//! waits. So a peer's bytes are always taken, and two ranks that send to each other never block
//! each other.

mod address;
mod conn;
mod connect;
mod engine;
mod frame;
mod fuzz;
mod hello;
mod peers;
#[cfg(test)]
mod tests;
mod wait;
mod wake;

pub(crate) use address::{Address, Listener, address_key};
pub use address::{SOCKET_IFNAME, Sockets};
pub use address::{host_id, interface_address, loopback};
pub(crate) use engine::{Current, Directory, Engine};
pub(crate) use frame::Signature;
pub use fuzz::{fuzz_frames, fuzz_hello, sample_frames, sample_hello};
pub(crate) use wake::Wake;

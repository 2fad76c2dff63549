//! The store over TCP, in the wire protocol of PyTorch's `TCPStore` (its libuv server, the default
//! since 2.4).

mod admission;
mod client;
mod connection;
mod listen;
mod protocol;
mod record;
mod server;
#[cfg(test)]
mod tests;

pub use client::{TcpStore, TcpStoreOptions};
pub use protocol::{DEFAULT_PORT, fuzz_requests, sample_requests};
pub use record::{fuzz_records, sample_records};
pub use server::TcpStoreServer;

//! What runs on the host alone: process groups, their stores, ranks as threads and processes, NCCL, and what all of these leave behind.

mod groups;
mod nccl;
mod ranks;
mod store_leaks;
mod stores;
mod transport_leaks;

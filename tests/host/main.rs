//! Tests of host code: process groups, stores, ranks as threads and processes, NCCL, leaks of stores
//! and transports.

mod groups;
mod nccl;
mod ranks;
mod store_leaks;
mod stores;
mod transport_leaks;

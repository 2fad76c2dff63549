//! Tests of host code: process groups, stores, NCCL, leaks of stores and transports.

mod groups;
mod nccl;
mod store_leaks;
mod stores;
mod transport_leaks;

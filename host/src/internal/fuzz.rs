//! The parsers of bytes from strangers and of files that a user names, each as a function of bytes:
//! those of process groups and those of the transports.

pub use epoxide_group::internal::fuzz::{
    addresses, mesh_frames, mesh_hello, pieces, secret_file, store_files, store_records, store_requests,
};

pub use crate::transport::tcp::{fuzz_tcp_frames as tcp_frames, fuzz_tcp_hello as tcp_hello};

/// Valid input for each, to be varied.
pub mod samples {
    pub use epoxide_group::internal::fuzz::samples::{
        addresses, mesh_frames, mesh_hello, secret_file, store_files, store_records, store_requests,
    };

    pub use crate::transport::tcp::{sample_tcp_frames as tcp_frames, sample_tcp_hello as tcp_hello};
}

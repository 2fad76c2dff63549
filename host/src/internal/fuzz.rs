//! The parsers of bytes from strangers and of files that a user names, each as a function of bytes.
//! The fuzz targets call them, and so do the tests that stand for those targets. A parser must not
//! panic, nor take more memory than a few times its input.

pub use crate::group::file_store::fuzz_store_files as store_files;
pub use crate::group::mesh::{fuzz_frames as mesh_frames, fuzz_hello as mesh_hello};
pub use crate::group::rendezvous::fuzz_addresses as addresses;
pub use crate::group::secret::fuzz_secret_file as secret_file;
pub use crate::group::tcp::{fuzz_records as store_records, fuzz_requests as store_requests};
pub use crate::transport::tcp::{fuzz_tcp_frames as tcp_frames, fuzz_tcp_hello as tcp_hello};

/// Cuts bytes into pieces of a length that the first of them gives, as a network may.
pub(crate) fn pieces(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let (length, rest) = bytes.split_first().unwrap_or((&0, &[]));
    rest.chunks(usize::from(*length) + 1)
}

/// Valid input for each, to be varied.
pub mod samples {
    pub use crate::group::file_store::sample_store_files as store_files;
    pub use crate::group::mesh::{sample_frames as mesh_frames, sample_hello as mesh_hello};
    pub use crate::group::rendezvous::sample_addresses as addresses;
    pub use crate::group::secret::sample_secret_files as secret_file;
    pub use crate::group::tcp::{sample_records as store_records, sample_requests as store_requests};
    pub use crate::transport::tcp::{sample_tcp_frames as tcp_frames, sample_tcp_hello as tcp_hello};
}

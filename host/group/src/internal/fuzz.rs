//! The parsers of unauthenticated bytes and of files that a user names, each as a function of
//! bytes. The fuzz targets call the parsers, and so do the tests that replace those targets. A
//! parser must not panic, nor take more memory than a few times its input.

pub use crate::file_store::fuzz_store_files as store_files;
pub use crate::mesh::{fuzz_frames as mesh_frames, fuzz_hello as mesh_hello};
pub use crate::rendezvous::fuzz_addresses as addresses;
pub use crate::secret::fuzz_secret_file as secret_file;
pub use crate::tcp::{fuzz_records as store_records, fuzz_requests as store_requests};

/// Cuts bytes into pieces of a length that the first of them gives, as a network may.
pub fn pieces(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let (length, rest) = bytes.split_first().unwrap_or((&0, &[]));
    rest.chunks(usize::from(*length) + 1)
}

/// Valid input for each, to be varied.
pub mod samples {
    pub use crate::file_store::sample_store_files as store_files;
    pub use crate::mesh::{sample_frames as mesh_frames, sample_hello as mesh_hello};
    pub use crate::rendezvous::sample_addresses as addresses;
    pub use crate::secret::sample_secret_files as secret_file;
    pub use crate::tcp::{sample_records as store_records, sample_requests as store_requests};
}

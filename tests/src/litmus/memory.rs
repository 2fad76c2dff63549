//! Where the memory of a test lies, and what it holds.

/// Locations in global memory, each in 16 bytes of its own. `p64`, `p32`, `p16` and `p8` are the
/// first bits of `p`, with their number in the name. `p16.1` and `p8.1` are the 16 and the 8 bits
/// behind those.
pub const LOCATIONS: [&str; 9] = ["x", "y", "f", "h", "t", "e", "v4", "p", "G"];
/// Where the results of the threads begin, and how far apart those of two threads are, in bytes.
pub const RESULTS: u64 = 256;
pub(super) const PER_THREAD: u64 = 64;
/// Length of the memory that all threads share.
pub const BYTES: u64 = 1024;
/// Contents of a result that no thread has stored.
pub const NO_RESULT: u32 = 0x00ee_0000;

/// A result that the condition names: which one, and its value.
pub type Wanted = (u64, u32);

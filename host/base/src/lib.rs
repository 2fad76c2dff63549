//! The ground of the epoxide crates. Users of the library reach what they need of it through
//! `epoxide`: [`Error`], [`Result`] and [`Scope`]. The modules are for the crates of the project;
//! any version may change them.

pub mod error;
pub mod foreign;
pub mod lock;
pub mod meeting;
pub mod own_file;
pub mod virtual_time;

pub use error::{Error, Result, Scope};

use std::time::{Duration, Instant};

/// The end of a wait that starts now.
pub fn deadline(wait: Duration) -> Instant {
    // Longer than any process lives; an `Instant` cannot be arbitrarily late.
    const LONGEST: Duration = Duration::from_secs(1 << 30);
    Instant::now() + wait.min(LONGEST)
}

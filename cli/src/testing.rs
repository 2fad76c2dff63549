//! Flags for tests, as a command line has them.

use std::ffi::OsString;

use clap::Parser;

#[derive(Parser)]
struct Line<A: clap::Args> {
    #[command(flatten)]
    args: A,
}

/// The flags in `words`, behind the command's name, or the error.
pub fn parse<A: clap::Args>(
    words: impl IntoIterator<Item = impl Into<OsString> + Clone>,
) -> Result<A, clap::Error> {
    Line::try_parse_from(words).map(|line| line.args)
}

//! Reading what a user names, but no more than it can be: a device or a wrong file must not take
//! all memory.

use std::fs::File;
use std::io::{self, Error, ErrorKind, Read};
use std::path::Path;

/// Most bytes of PTX.
pub const PTX: u64 = 64 << 20;
/// Most bytes of JSON: results, or the selections of a batch.
pub const JSON: u64 = 256 << 20;

/// All of `reader` as text.
///
/// # Errors
/// Where it holds more than `most` bytes, or no UTF-8.
pub fn read_text(reader: impl Read, most: u64) -> io::Result<String> {
    let mut text = String::new();
    // One more than allowed, to distinguish a text of that length from a longer one.
    let length = reader.take(most.saturating_add(1)).read_to_string(&mut text);
    if text.len() as u64 > most || matches!(length, Ok(length) if length as u64 > most) {
        let reason =
            format!("it holds more than {most} bytes, which is no file of this kind; name another one");
        return Err(Error::new(ErrorKind::InvalidData, reason));
    }
    length.map(|_| text)
}

/// The text of the file at `path`.
///
/// # Errors
/// As of [`read_text`], and where it cannot be opened.
pub fn read_text_file(path: &Path, most: u64) -> io::Result<String> {
    read_text(File::open(path)?, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_end_is_refused_and_what_is_as_long_as_it_may_be_is_read() {
        let error = read_text_file(Path::new("/dev/zero"), 1 << 20).unwrap_err().to_string();
        assert!(error.contains("more than 1048576 bytes") && error.contains("name another"), "{error}");
        assert_eq!(read_text(&b"four"[..], 4).unwrap(), "four");
        assert!(read_text(&b"fives"[..], 4).is_err());
        assert!(read_text(&b"\xff"[..], 4).is_err());
        assert!(read_text_file(Path::new("/no/such/file"), 4).is_err());
    }
}

//! Digests of routings and kernels: two results with equal digests measured the same.

use std::fmt::Write;

/// Bytes of the hash that are kept: enough to tell things apart, and no protection from an
/// attacker.
const BYTES: usize = 8;

/// The first 16 hexadecimal digits of the SHA-256 of every rank's expert ids in rank order. The ids
/// are little-endian 64-bit integers; each rank's number of ids precedes its ids. The digest is the
/// same on every machine and in every version.
pub fn of_routing<'a>(ranks: impl IntoIterator<Item = &'a [i64]>) -> String {
    let mut hash = hmac_sha256::Hash::new();
    for ids in ranks {
        hash.update((ids.len() as u64).to_le_bytes());
        hash.update(ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>());
    }
    digits(hash)
}

/// The same of a text.
pub fn of_text(text: &str) -> String {
    let mut hash = hmac_sha256::Hash::new();
    hash.update(text);
    digits(hash)
}

fn digits(hash: hmac_sha256::Hash) -> String {
    hash.finalize()[..BYTES].iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files of other versions must have the same digest. Python's hashlib computed the expected
    /// values.
    #[test]
    fn a_routing_has_the_same_digest_for_ever() {
        assert_eq!(of_routing([&[0, 3, -1][..], &[2, 1, 7]]), "1dbbcfdfb0a7e72b");
        assert_eq!(of_routing([&[0, 3][..], &[-1, 2, 1, 7]]), "3abe046e6e5876b8");
        assert_eq!(of_text("abc"), "ba7816bf8f01cfea");
    }
}

//! The arithmetic of seeds and digests.

/// 2^64 divided by the golden ratio: the increment of SplitMix64.
pub(super) const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Mixes a word into a hash, by the finaliser of SplitMix64.
pub(super) fn mix(hash: u64, word: u64) -> u64 {
    let mut z = hash.rotate_left(23) ^ word.wrapping_mul(GOLDEN) ^ GOLDEN;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

//! Blocks of several ranks in one payload: each a 64-bit length and its bytes.

/// Appends a block.
pub(crate) fn push(payload: &mut Vec<u8>, block: &[u8]) {
    payload.extend_from_slice(&(block.len() as u64).to_le_bytes());
    payload.extend_from_slice(block);
}

/// The payload of several blocks.
pub(crate) fn pack<'a>(blocks: impl Iterator<Item = &'a [u8]> + Clone) -> Vec<u8> {
    let bytes = blocks.clone().map(|block| block.len() + 8).sum();
    let mut payload = Vec::with_capacity(bytes);
    blocks.for_each(|block| push(&mut payload, block));
    payload
}

/// The blocks of a payload, if it holds exactly `count`.
pub(crate) fn unpack(mut payload: &[u8], count: usize) -> Option<Vec<Vec<u8>>> {
    let mut blocks = Vec::new();
    while !payload.is_empty() {
        let (length, rest) = payload.split_first_chunk::<8>()?;
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        let (block, rest) = rest.split_at_checked(length)?;
        blocks.push(block.to_vec());
        payload = rest;
    }
    (blocks.len() == count).then_some(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_garbage() {
        let blocks: [&[u8]; 3] = [b"abc", b"", b"d"];
        let payload = pack(blocks.into_iter());
        assert_eq!(unpack(&payload, 3).unwrap(), blocks);
        assert!(unpack(&payload, 2).is_none());
        assert!(unpack(&payload[..payload.len() - 1], 3).is_none());
        assert!(unpack(&[0xff; 9], 1).is_none());
    }
}

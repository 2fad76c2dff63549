//! Tensor maps: descriptions of tensors in global memory for `cp.async.bulk.tensor`.

use crate::machine::Argument;

/// Most dimensions of a tensor.
pub(crate) const MOST_DIMENSIONS: usize = 5;

/// Marks the first word of a tensor map, in the upper half.
const MARK: u64 = 0x7e25_0001;

/// A tensor in global memory and the box of it that one copy moves. All lists begin with the
/// innermost dimension, whose elements are neighbours in memory.
#[derive(Debug, Clone, Copy)]
pub struct TiledTensor<'a> {
    /// Address of the first element, a multiple of 16.
    pub address: u64,
    /// Bytes of an element: 1, 2, 4 or 8.
    pub element_bytes: u32,
    /// Elements of the tensor: 1 to 5 dimensions, each from 1 to 2^32.
    pub shape: &'a [u64],
    /// Distance of neighbours in each dimension but the innermost, in bytes: multiples of 16 below
    /// 2^40.
    pub strides: &'a [u64],
    /// Elements of the box: each from 1 to 256.
    pub tile: &'a [u32],
    /// Only one of so many elements of the box is copied, in each dimension: from 1 to 8. The
    /// innermost one is ignored.
    pub element_strides: &'a [u32],
    /// How rows of the box trade places in shared memory.
    pub swizzle: Swizzle,
}

/// Order of the 16-byte units of a box in shared memory: bits 4 and up of the address are combined
/// with bits 7 and up by exclusive or.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Swizzle {
    /// The units lie in order.
    #[default]
    None,
    /// One bit: for rows of 32 bytes.
    Bytes32,
    /// Two bits: for rows of 64 bytes.
    Bytes64,
    /// Three bits: for rows of 128 bytes.
    Bytes128,
}

impl Swizzle {
    /// Bits of an address that change.
    pub(crate) fn bits(self) -> u32 {
        match self {
            Swizzle::None => 0,
            Swizzle::Bytes32 => 1,
            Swizzle::Bytes64 => 2,
            Swizzle::Bytes128 => 3,
        }
    }
}

/// A tensor map: 128 bytes that a kernel gets as a parameter, finds in memory, or makes of zeros by
/// `tensormap.replace`. Their layout is known to the virtual GPU alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct TensorMap([u64; 16]);

/// A tensor map that cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tensor map: {0}")]
pub struct TensorMapError(String);

fn check(holds: bool, message: impl FnOnce() -> String) -> Result<(), TensorMapError> {
    if holds { Ok(()) } else { Err(TensorMapError(message())) }
}

/// Checks the rows of a box with the rows of its swizzle.
fn check_row(tile: &[u32], element_bytes: u32, swizzle: u32) -> Result<(), TensorMapError> {
    let row = tile[0] * element_bytes;
    check(row.is_multiple_of(16), || format!("rows of the box have {row} bytes, no multiple of 16"))?;
    let width = 16 << swizzle;
    let is_one_row = tile[1..].iter().all(|&len| len == 1);
    check(swizzle == 0 || row == width || row < width && is_one_row, || {
        format!("rows of the box have {row} bytes, and those of the swizzle {width}")
    })
}

impl TensorMap {
    /// Describes a tensor that is copied box by box.
    ///
    /// # Errors
    /// Where a number is outside of the bounds that [`TiledTensor`] states, the lists differ in
    /// length, or the innermost dimension of the box does not fit: it is a multiple of 16 bytes,
    /// and as long as the rows of the swizzle unless the box is one row.
    pub fn tiled(tensor: &TiledTensor<'_>) -> Result<Self, TensorMapError> {
        let TiledTensor { address, element_bytes, shape, strides, tile, element_strides, swizzle } = *tensor;
        let rank = shape.len();
        check((1..=MOST_DIMENSIONS).contains(&rank), || {
            format!("{rank} dimensions, where 1 to 5 are allowed")
        })?;
        for (what, len, wanted) in [
            ("strides", strides.len(), rank - 1),
            ("box dimensions", tile.len(), rank),
            ("element strides", element_strides.len(), rank),
        ] {
            check(len == wanted, || format!("{len} {what} for {rank} dimensions, which have {wanted}"))?;
        }
        check(matches!(element_bytes, 1 | 2 | 4 | 8), || {
            format!("elements have {element_bytes} bytes, where 1, 2, 4 or 8 are allowed")
        })?;
        check(address.is_multiple_of(16), || format!("address {address:#x} is not a multiple of 16"))?;
        for &len in shape {
            check((1..=1 << 32).contains(&len), || format!("a dimension of {len}: each is from 1 to 2^32"))?;
        }
        for &stride in strides {
            check(stride.is_multiple_of(16) && stride < 1 << 40, || {
                format!("a stride of {stride} bytes: each is a multiple of 16 below 2^40")
            })?;
        }
        for &len in tile {
            check((1..=256).contains(&len), || format!("a box dimension of {len}: each is from 1 to 256"))?;
        }
        for &stride in element_strides {
            check((1..=8).contains(&stride), || {
                format!("an element stride of {stride}: each is from 1 to 8")
            })?;
        }
        check_row(tile, element_bytes, swizzle.bits())?;
        let mut words = [0u64; 16];
        words[0] = MARK << 32 | u64::from(swizzle.bits()) << 16 | u64::from(element_bytes) << 8 | rank as u64;
        words[1] = address_word(address);
        for d in 0..rank {
            // Lengths less 1 fit 32 bits.
            words[2 + d] = (shape[d] - 1) << 32 | u64::from(tile[d]) << 16 | u64::from(element_strides[d]);
        }
        words[7..7 + strides.len()].copy_from_slice(strides);
        Ok(Self(words))
    }

    /// The 128 bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; 128] {
        let mut bytes = [0; 128];
        bytes.chunks_exact_mut(8).zip(self.0).for_each(|(to, word)| to.copy_from_slice(&word.to_ne_bytes()));
        bytes
    }
}

impl Argument for TensorMap {
    fn pack(&self, params: &mut Vec<u8>) {
        params.extend_from_slice(&self.to_bytes());
    }
}

/// Words of a tensor map that have a meaning.
pub(crate) const WORDS: usize = 11;

/// A field of a tensor map in memory, which `tensormap.replace` writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Field {
    /// As [`address_word`] has it.
    Address,
    Rank,
    ElementBytes,
    /// Bits of an address that the swizzle changes.
    Swizzle,
    /// The length of the tile in the dimension of this number.
    Tile(u8),
    ElementStride(u8),
    /// The length less 1.
    Length(u8),
    /// In bytes, of the dimension behind that of this number.
    Stride(u8),
}

impl Field {
    /// Where it lies in the map, and its bytes.
    pub(crate) fn place(self) -> (i64, u8) {
        let of = |word: i64, d: u8| 8 * (word + i64::from(d));
        match self {
            Field::Rank => (0, 1),
            Field::ElementBytes => (1, 1),
            Field::Swizzle => (2, 1),
            Field::Address => (8, 8),
            Field::ElementStride(d) => (of(2, d), 1),
            Field::Tile(d) => (of(2, d) + 2, 2),
            Field::Length(d) => (of(2, d) + 4, 4),
            Field::Stride(d) => (of(7, d), 8),
        }
    }
}

/// Where the mark of a tensor map lies, and its four bytes.
pub(crate) const MARK_PLACE: (i64, u64) = (4, MARK);

/// An address of a tensor as the second word has it. The highest bit stands for one that is no
/// multiple of 16.
pub(crate) fn address_word(address: u64) -> u64 {
    around_bit_21(address >> 4) | u64::from(!address.is_multiple_of(16)) << 63
}

/// A number of 63 bits, as the second word has it. Bit 21 of that word means nothing here: CUTLASS
/// clears it in maps of small tensors, because of an error of drivers up to 13.1.
fn around_bit_21(number: u64) -> u64 {
    number & 0x1f_ffff | number >> 21 << 22
}

/// The inverse of [`around_bit_21`].
fn without_bit_21(word: u64) -> u64 {
    word & 0x1f_ffff | word >> 22 << 21
}

/// A decoded tensor map.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensor {
    pub(crate) rank: usize,
    pub(crate) element_bytes: u64,
    address: u64,
    shape: [u64; MOST_DIMENSIONS],
    /// Of all dimensions.
    strides: [u64; MOST_DIMENSIONS],
    tile: [u64; MOST_DIMENSIONS],
    element_strides: [u64; MOST_DIMENSIONS],
    swizzle: u32,
}

/// 16 bytes of a box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    /// Offset in the shared window.
    pub(crate) shared: u64,
    /// The part of it that lies in the tensor: the address, the offset in the unit and the length.
    pub(crate) global: u64,
    pub(crate) first: u8,
    pub(crate) len: u8,
}

impl Tensor {
    /// Decodes a tensor map. `None` where it is none. The error is a number that a kernel has
    /// replaced, or has left out.
    pub(crate) fn decode(words: &[u64; WORDS]) -> Option<Result<Self, TensorMapError>> {
        (words[0] >> 32 == MARK).then(|| Self::decode_marked(words))
    }

    fn decode_marked(words: &[u64; WORDS]) -> Result<Self, TensorMapError> {
        let (head, address) = (words[0], without_bit_21(words[1]) << 4);
        let (rank, element_bytes) = ((head & 0xff) as usize, head >> 8 & 0xff);
        let swizzle = (head >> 16 & 0xff) as u32;
        check((1..=MOST_DIMENSIONS).contains(&rank), || {
            format!("{rank} dimensions, where 1 to 5 are allowed")
        })?;
        check(matches!(element_bytes, 1 | 2 | 4 | 8) && swizzle <= 3, || {
            format!("elements of {element_bytes} bytes, and swizzle {swizzle}")
        })?;
        check(words[1] >> 63 == 0, || "an address that is not a multiple of 16".into())?;
        for stride in words[2..2 + rank].iter().map(|word| word & 0xff) {
            check(stride <= 8, || format!("an element stride of {stride}: each is from 1 to 8"))?;
        }
        let tile: [u32; MOST_DIMENSIONS] =
            std::array::from_fn(|d| if d < rank { (words[2 + d] >> 16 & 0xffff) as u32 } else { 1 });
        for len in &tile {
            check((1..=256).contains(len), || format!("a box dimension of {len}: each is from 1 to 256"))?;
        }
        for &stride in &words[7..6 + rank] {
            check(stride.is_multiple_of(16) && stride < 1 << 40, || {
                format!("a stride of {stride} bytes: each is a multiple of 16 below 2^40")
            })?;
        }
        check_row(&tile[..rank], element_bytes as u32, swizzle)?;
        let dimension = |d: usize, of: fn(u64) -> u64| if d < rank { of(words[2 + d]) } else { 1 };
        let dimensions = |of: fn(u64) -> u64| std::array::from_fn(|d| dimension(d, of));
        Ok(Self {
            rank,
            element_bytes,
            address,
            shape: dimensions(|word| (word >> 32) + 1),
            strides: std::array::from_fn(|d| if d == 0 { element_bytes } else { words[6 + d] }),
            tile: tile.map(u64::from),
            element_strides: dimensions(|word| word & 0xff).map(|stride: u64| stride.max(1)),
            swizzle,
        })
    }

    /// Elements of the box that are copied, in each dimension.
    fn copied(&self) -> [u64; MOST_DIMENSIONS] {
        std::array::from_fn(|d| {
            if d == 0 { self.tile[0] } else { self.tile[d].div_ceil(self.element_strides[d]) }
        })
    }

    fn row_bytes(&self) -> u64 {
        self.tile[0] * self.element_bytes
    }

    /// Bytes of the box in shared memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.copied().iter().skip(1).fold(self.row_bytes(), |bytes, len| bytes.saturating_mul(*len))
    }

    /// The box at `coordinates`, with the offset `shared` of its begin in the shared window, in the
    /// order of the box. A box must have less than 2^32 bytes.
    pub(crate) fn units(&self, coordinates: &[i32; MOST_DIMENSIONS], shared: u64) -> Vec<Unit> {
        let copied = self.copied();
        let mut units = Vec::with_capacity((self.bytes() / 16) as usize);
        // The bytes of a row that lie in the tensor.
        let at = |element: i64| (element.clamp(0, self.tile[0] as i64) as u64) * self.element_bytes;
        let first = i64::from(coordinates[0]);
        let inside = at(-first)..at(self.shape[0] as i64 - first);
        let rows: u64 = copied[1..].iter().product();
        for row in 0..rows {
            let (mut rest, mut start, mut exists) = (row, self.address, !inside.is_empty());
            for d in 1..self.rank {
                let index = i64::from(coordinates[d]) + (rest % copied[d] * self.element_strides[d]) as i64;
                rest /= copied[d];
                exists &= (0..self.shape[d] as i64).contains(&index);
                start = start.wrapping_add((index as u64).wrapping_mul(self.strides[d]));
            }
            start = start.wrapping_add((first as u64).wrapping_mul(self.element_bytes));
            for unit in (0..self.row_bytes()).step_by(16) {
                let linear = shared + row * self.row_bytes() + unit;
                let phase = linear >> 7 & ((1 << self.swizzle) - 1);
                let (from, to) = (inside.start.clamp(unit, unit + 16), inside.end.clamp(unit, unit + 16));
                let len = if exists { to.saturating_sub(from) } else { 0 };
                units.push(Unit {
                    shared: linear ^ phase << 4,
                    global: start.wrapping_add(from),
                    first: (from - unit) as u8,
                    len: len as u8,
                });
            }
        }
        units
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_may_clear_the_bit_that_drivers_set_wrongly() {
        let tensor = TiledTensor {
            address: u64::MAX << 4,
            element_bytes: 2,
            shape: &[64, 64],
            strides: &[128],
            tile: &[64, 8],
            element_strides: &[1, 1],
            swizzle: Swizzle::Bytes128,
        };
        let TensorMap(mut words) = TensorMap::tiled(&tensor).unwrap();
        words[1] &= !(1 << 21);
        let decoded = Tensor::decode(words[..WORDS].try_into().unwrap()).unwrap().unwrap();
        assert_eq!((decoded.address, decoded.rank), (u64::MAX << 4, 2));
    }
}

//! Tensor maps: descriptions of tensors in global memory for `cp.async.bulk.tensor`.

use crate::ir::{Combine, Reduce, Rmw};
use crate::machine::Argument;

/// Most dimensions of a tensor.
pub(crate) const MOST_DIMENSIONS: usize = 5;

/// Most dimensions of a pixel's place in an image.
pub(crate) const MOST_AXES: usize = MOST_DIMENSIONS - 2;

/// Marks the first word of a tensor map, in the upper half.
const MARK: u64 = 0x7e25_0001;

/// A tensor in global memory and the box of it that one copy moves. All lists begin with the
/// innermost dimension, whose elements are neighbours in memory.
#[derive(Debug, Clone, Copy)]
pub struct TiledTensor<'a> {
    /// Address of the first element, a multiple of 16.
    pub address: u64,
    /// The type of its elements.
    pub element_type: ElementType,
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
    /// The elements of a load that are outside of the tensor.
    pub fill: Fill,
}

/// A tensor of images in global memory, and the pixels that one copy moves (`im2col`).
///
/// The dimensions are those of [`TiledTensor`]: channels, then one to three of the place in an image
/// (W, H, D), and the image. A copy takes pixels one behind the other: along W, H and D in a box of
/// each image, and then in the next image. Elements of a load lie beside the pixels of the box, by
/// offsets that the instruction has.
#[derive(Debug, Clone, Copy)]
pub struct PixelTensor<'a> {
    /// Address of the first element, a multiple of 16.
    pub address: u64,
    /// The type of its elements.
    pub element_type: ElementType,
    /// Elements of the tensor: 3 to 5 dimensions, each from 1 to 2^32.
    pub shape: &'a [u64],
    /// Distance of neighbours in each dimension but the innermost, in bytes: multiples of 16 below
    /// 2^40.
    pub strides: &'a [u64],
    /// The first place of the box, from the first one of an image, in W, H and D: 16 bits in one
    /// dimension, 8 in each of two, 5 in each of three.
    pub lower_corner: &'a [i32],
    /// The last place of the box, from the last one of an image, as `lower_corner`.
    pub upper_corner: &'a [i32],
    /// Channels of a pixel that are copied: from 1 to 256.
    pub channels: u32,
    /// Pixels of a copy: from 1 to 1024, with 228 KiB at most.
    pub pixels: u32,
    /// The steps from a pixel to the next, in each dimension: from 1 to 8. The innermost one is
    /// ignored.
    pub element_strides: &'a [u32],
    /// How pixels trade places in shared memory.
    pub swizzle: Swizzle,
    /// The elements of a load that are outside of the tensor.
    pub fill: Fill,
}

/// Types of elements of a tensor, by the numbers of the driver API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // The names are the documentation.
pub enum ElementType {
    U8,
    U16,
    U32,
    I32,
    U64,
    I64,
    F16,
    F32,
    F64,
    Bf16,
    /// As `F32`: copies flush nothing.
    F32Ftz,
    /// Loads round an f32 to tf32, to nearest even, and make `0x7fffe000` of a NaN. Stores change
    /// nothing.
    Tf32,
    /// As `Tf32`: copies flush nothing.
    Tf32Ftz,
}

impl ElementType {
    /// All types: each at its number.
    pub const ALL: [ElementType; 13] = [
        ElementType::U8,
        ElementType::U16,
        ElementType::U32,
        ElementType::I32,
        ElementType::U64,
        ElementType::I64,
        ElementType::F16,
        ElementType::F32,
        ElementType::F64,
        ElementType::Bf16,
        ElementType::F32Ftz,
        ElementType::Tf32,
        ElementType::Tf32Ftz,
    ];

    /// Bytes of an element.
    #[must_use]
    pub fn bytes(self) -> u32 {
        match self {
            ElementType::U8 => 1,
            ElementType::U16 | ElementType::F16 | ElementType::Bf16 => 2,
            ElementType::U64 | ElementType::I64 | ElementType::F64 => 8,
            ElementType::U32 | ElementType::I32 => 4,
            ElementType::F32 | ElementType::F32Ftz | ElementType::Tf32 | ElementType::Tf32Ftz => 4,
        }
    }

    /// Whether it is a float.
    #[must_use]
    pub fn is_float(self) -> bool {
        self as u32 >= ElementType::F16 as u32
    }

    /// Whether loads round its elements to tf32.
    pub(crate) fn rounds(self) -> bool {
        matches!(self, ElementType::Tf32 | ElementType::Tf32Ftz)
    }

    /// The type as one byte of a map: the length in bytes, and the kind.
    pub(crate) fn byte(self) -> u64 {
        let bit = |holds: bool, bit: u64| if holds { bit } else { 0 };
        u64::from(self.bytes())
            | bit(self.is_float(), FLOAT)
            | bit(self.is_float() && self.bytes() == 4, F32)
            | bit(matches!(self, ElementType::I32 | ElementType::I64), SIGNED)
            | bit(self == ElementType::Bf16, BF16)
            | bit(matches!(self, ElementType::F32Ftz | ElementType::Tf32Ftz), FLUSHED)
    }
}

/// Bits of [`ElementType::byte`].
const FLOAT: u64 = 0x10;
const F32: u64 = 0x20;
const SIGNED: u64 = 0x40;
const BF16: u64 = 0x80;
/// A bit beside f32: sums flush subnormals.
const FLUSHED: u64 = SIGNED;

/// Elements outside of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fill {
    /// Zeros.
    #[default]
    Zeros,
    /// NaNs: each two bytes are `0x7ff7`.
    Nan,
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
/// `tensormap.replace`. Their layout is private to the virtual GPU.
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
    check(swizzle == 0 || row <= width, || {
        format!("rows of the box have {row} bytes, and those of the swizzle {width}")
    })
}

/// The most pixels of a copy.
const MOST_PIXELS: u32 = 1024;

/// The most bytes of a box. An H200's driver rejects more.
const MOST_BYTES: u64 = 228 << 10;

/// Checks the bytes of a box, which an H200's driver counts by quotients that are rounded down.
fn check_box(tile: &[u32], steps: &[u32], element_bytes: u32) -> Result<(), TensorMapError> {
    let elements: u64 = tile.iter().zip(steps).map(|(len, step)| u64::from(len / step)).product();
    let bytes = elements * u64::from(element_bytes);
    check(bytes <= MOST_BYTES, || format!("a box of {bytes} bytes, where {MOST_BYTES} are the most"))
}

impl TensorMap {
    /// Describes a tensor that is copied box by box.
    ///
    /// # Errors
    /// Where a number is outside of the bounds that [`TiledTensor`] states, the lists differ in
    /// length, or the innermost dimension of the box does not fit: it is a multiple of 16 bytes,
    /// and no longer than the rows of the swizzle.
    pub fn tiled(tensor: &TiledTensor<'_>) -> Result<Self, TensorMapError> {
        let TiledTensor { address, element_type, shape, strides, tile, element_strides, .. } = *tensor;
        let TiledTensor { swizzle, fill, .. } = *tensor;
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
        check(fill == Fill::Zeros || element_type.is_float(), || {
            format!("a fill with NaN for elements of {element_type:?}")
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
        check_row(tile, element_type.bytes(), swizzle.bits())?;
        check_box(tile, element_strides, element_type.bytes())?;
        let mut words = [0u64; 16];
        words[0] = MARK << 32
            | (fill as u64) << 24
            | u64::from(swizzle.bits()) << 16
            | element_type.byte() << 8
            | rank as u64;
        words[1] = address_word(address);
        for d in 0..rank {
            // Lengths less 1 fit 32 bits.
            words[2 + d] = (shape[d] - 1) << 32 | u64::from(tile[d]) << 16 | u64::from(element_strides[d]);
        }
        words[2] |= u64::from(element_type.rounds()) << 8;
        words[7..7 + strides.len()].copy_from_slice(strides);
        Ok(Self(words))
    }

    /// Describes a tensor that is copied pixel by pixel.
    ///
    /// # Errors
    /// Where a number is outside of the bounds that [`PixelTensor`] states, the lists differ in
    /// length, the box has no pixel, or the channels of a pixel do not fit: they have a multiple of 16
    /// bytes, and no more than the rows of the swizzle.
    pub fn of_pixels(tensor: &PixelTensor<'_>) -> Result<Self, TensorMapError> {
        let PixelTensor { address, element_type, shape, strides, channels, pixels, .. } = *tensor;
        let PixelTensor { lower_corner, upper_corner, element_strides, swizzle, fill, .. } = *tensor;
        let rank = shape.len();
        check((3..=MOST_DIMENSIONS).contains(&rank), || {
            format!("{rank} dimensions of images, where 3 to 5 are allowed")
        })?;
        let axes = rank - 2;
        check(lower_corner.len() == axes && upper_corner.len() == axes, || {
            format!("a corner needs {axes} numbers for {rank} dimensions")
        })?;
        let bound = [1 << 15, 1 << 7, 1 << 4][axes - 1];
        for &corner in lower_corner.iter().chain(upper_corner) {
            check((-bound..bound).contains(&corner), || {
                format!("a corner of {corner}: each is from {} to {}", -bound, bound - 1)
            })?;
        }
        check((1..=MOST_PIXELS).contains(&pixels), || {
            format!("{pixels} pixels, where 1 to {MOST_PIXELS} are allowed")
        })?;
        let tile: [u32; MOST_DIMENSIONS] = std::array::from_fn(|d| if d == 0 { channels } else { 1 });
        let tiled = TiledTensor {
            address,
            element_type,
            shape,
            strides,
            tile: &tile[..rank],
            element_strides,
            swizzle,
            fill,
        };
        let mut map = Self::tiled(&tiled)?;
        let bytes = u64::from(channels * element_type.bytes() * pixels);
        check(bytes <= MOST_BYTES, || format!("pixels of {bytes} bytes, where {MOST_BYTES} are the most"))?;
        for axis in 0..axes {
            // An H200's driver takes the low 32 bits of a length as a number with a sign.
            let last = i64::from(shape[axis + 1] as i32) - 1 + i64::from(upper_corner[axis]);
            check(i64::from(lower_corner[axis]) <= last, || {
                format!("a box from {} to {last} has no pixel", lower_corner[axis])
            })?;
        }
        let packed = |corner: &[i32]| {
            let numbers = corner.iter().enumerate();
            numbers.map(|(axis, &at)| u64::from(at as u16) << (16 * axis)).sum::<u64>()
        };
        map.0[3] |= OF_PIXELS;
        map.0[WORDS] = packed(lower_corner) | u64::from(pixels) << 48;
        map.0[WORDS + 1] = packed(upper_corner);
        Ok(map)
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
/// The same of a map of pixels.
pub(crate) const WORDS_OF_PIXELS: usize = 13;

/// The bit of word 3 that marks a map of pixels.
const OF_PIXELS: u64 = 1 << 8;

/// Whether a map has words behind the first ones: it is of pixels.
pub(crate) fn is_of_pixels(words: &[u64]) -> bool {
    words[0] >> 32 == MARK && words[3] & OF_PIXELS != 0
}

/// A field of a tensor map in memory, which `tensormap.replace` writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Field {
    /// In the format of [`address_word`].
    Address,
    Rank,
    /// In the format of [`ElementType::byte`].
    Element,
    /// 1 where loads round to tf32. It stays where another type replaces tf32, as on an H200.
    Rounds,
    /// 1 for NaNs.
    Fill,
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
            Field::Element => (1, 1),
            Field::Swizzle => (2, 1),
            Field::Fill => (3, 1),
            Field::Rounds => (of(2, 0) + 1, 1),
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

/// An address of a tensor in the format of the second word. The highest bit stands for one that is
/// no multiple of 16.
pub(crate) fn address_word(address: u64) -> u64 {
    around_bit_21(address >> 4) | u64::from(!address.is_multiple_of(16)) << 63
}

/// A number of 63 bits, in the format of the second word. Bit 21 of that word means nothing here:
/// CUTLASS clears it in maps of small tensors, because of an error of drivers up to 13.1.
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
    /// The type of its elements, in the format of [`ElementType::byte`].
    element: u64,
    address: u64,
    shape: [u64; MOST_DIMENSIONS],
    /// Of all dimensions.
    strides: [u64; MOST_DIMENSIONS],
    tile: [u64; MOST_DIMENSIONS],
    element_strides: [u64; MOST_DIMENSIONS],
    swizzle: u32,
    pixels: Option<Pixels>,
    /// The conversion of loads.
    pub(crate) reads: Reads,
}

/// The pixels of a copy.
#[derive(Clone, Copy, Debug)]
struct Pixels {
    count: u64,
    /// The first and the last place of the box in an image, in W, H and D.
    first: [i64; MOST_AXES],
    last: [i64; MOST_AXES],
}

/// The conversion of 16 bytes of a tensor by a load of a box.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reads {
    rounds: bool,
    fill: Fill,
}

impl Reads {
    /// 16 bytes outside of the tensor.
    pub(crate) fn outside(self) -> [u8; 16] {
        match self.fill {
            Fill::Zeros => [0; 16],
            Fill::Nan => std::array::from_fn(|i| 0x7ff7u16.to_le_bytes()[i % 2]),
        }
    }

    /// Changes the elements of a tensor as the load does.
    pub(crate) fn convert(self, bytes: &mut [u8]) {
        if self.rounds {
            for element in bytes.as_chunks_mut::<4>().0 {
                *element = tf32(u32::from_le_bytes(*element)).to_le_bytes();
            }
        }
    }
}

/// An f32 rounded to tf32, as an H200's loads of boxes do it.
fn tf32(bits: u32) -> u32 {
    if bits & 0x7fff_ffff > 0x7f80_0000 {
        return 0x7fff_e000;
    }
    // To nearest even, up to an infinity.
    (bits + 0xfff + (bits >> 13 & 1)) & !0x1fff
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
    pub(crate) fn decode(words: &[u64; WORDS_OF_PIXELS]) -> Option<Result<Self, TensorMapError>> {
        (words[0] >> 32 == MARK).then(|| Self::decode_marked(words))
    }

    fn decode_marked(words: &[u64; WORDS_OF_PIXELS]) -> Result<Self, TensorMapError> {
        let (head, address) = (words[0], without_bit_21(words[1]) << 4);
        let (rank, element_bytes) = ((head & 0xff) as usize, head >> 8 & 0xf);
        let fill = if head >> 24 & 0xff == 0 { Fill::Zeros } else { Fill::Nan };
        let swizzle = (head >> 16 & 0xff) as u32;
        check((1..=MOST_DIMENSIONS).contains(&rank), || {
            format!("{rank} dimensions, where 1 to 5 are allowed")
        })?;
        check(matches!(element_bytes, 1 | 2 | 4 | 8) && swizzle <= 3, || {
            format!("elements of {element_bytes} bytes, and swizzle {swizzle}")
        })?;
        let (element, rounds) = (head >> 8 & 0xff, words[2] >> 8 & 1 == 1);
        check(fill == Fill::Zeros || element & FLOAT != 0, || "a fill with NaN for integers".into())?;
        check(!rounds || element & F32 != 0, || "another type in place of tf32, which is no f32".into())?;
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
        let shape: [u64; MOST_DIMENSIONS] = dimensions(|word| (word >> 32) + 1);
        let corner = |word: usize, axis: usize| i64::from((words[word] >> (16 * axis)) as i16);
        let pixels = is_of_pixels(words).then(|| Pixels {
            count: words[WORDS] >> 48,
            first: std::array::from_fn(|axis| corner(WORDS, axis)),
            last: std::array::from_fn(|axis| shape[axis + 1] as i64 - 1 + corner(WORDS + 1, axis)),
        });
        Ok(Self {
            rank,
            element_bytes,
            element,
            address,
            shape,
            strides: std::array::from_fn(|d| if d == 0 { element_bytes } else { words[6 + d] }),
            tile: tile.map(u64::from),
            element_strides: dimensions(|word| word & 0xff).map(|stride: u64| stride.max(1)),
            swizzle,
            pixels,
            reads: Reads { rounds, fill },
        })
    }

    /// Whether it is copied pixel by pixel.
    pub(crate) fn is_of_pixels(&self) -> bool {
        self.pixels.is_some()
    }

    /// How a reduction changes an element; `None` where the type has no such operation.
    pub(crate) fn combine(&self, reduce: Reduce) -> Option<Combine> {
        let (bytes, is_float) = (self.element_bytes as u8, self.element & FLOAT != 0);
        let is_signed = self.element & SIGNED != 0;
        let op = match (reduce, bytes, is_float) {
            (Reduce::Add, 4, true) if self.element & FLUSHED != 0 => Rmw::AddF32Ftz,
            (Reduce::Add, 4, true) => Rmw::AddF32,
            (Reduce::Add, 8, true) => Rmw::AddF64,
            (Reduce::Add, 2, true) if self.element & BF16 != 0 => Rmw::AddBf16,
            (Reduce::Add, 2, true) => Rmw::AddF16,
            (Reduce::Min, 2, true) if self.element & BF16 != 0 => Rmw::MinBf16,
            (Reduce::Max, 2, true) if self.element & BF16 != 0 => Rmw::MaxBf16,
            (Reduce::Min, 2, true) => Rmw::MinF16,
            (Reduce::Max, 2, true) => Rmw::MaxF16,
            (Reduce::Min | Reduce::Max, 4 | 8, false) => reduce.of_integers(is_signed),
            (Reduce::Inc | Reduce::Dec, 4, false) if !is_signed => reduce.of_integers(false),
            (Reduce::Add | Reduce::And | Reduce::Or | Reduce::Xor, 4 | 8, false)
                if bytes == 4 || !is_signed =>
            {
                reduce.of_integers(false)
            }
            _ => return None,
        };
        Some(Combine { op, bytes })
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

    /// Distance of the rows of the box in shared memory.
    fn pitch(&self) -> u64 {
        if self.swizzle == 0 { self.row_bytes() } else { 16 << self.swizzle }
    }

    fn rows(&self) -> u64 {
        self.pixels.map_or_else(|| self.copied()[1..].iter().product(), |pixels| pixels.count)
    }

    /// The place of the pixel behind another one, in all dimensions but the innermost.
    fn next_pixel(&self, pixels: &Pixels, place: &mut [i64; MOST_DIMENSIONS]) {
        let image = self.rank - 1;
        for (axis, at) in place[1..image].iter_mut().enumerate() {
            *at += self.element_strides[axis + 1] as i64;
            if *at <= pixels.last[axis] {
                return;
            }
            *at = pixels.first[axis];
        }
        place[image] += self.element_strides[image] as i64;
    }

    /// Bytes of the box.
    pub(crate) fn bytes(&self) -> u64 {
        self.rows().saturating_mul(self.row_bytes())
    }

    /// Bytes of shared memory that the box takes, those between its rows among them.
    pub(crate) fn shared_bytes(&self) -> u64 {
        self.rows().saturating_mul(self.pitch())
    }

    /// Checks the coordinates of a box. An H200 reports an illegal instruction for others.
    pub(crate) fn check_coordinates(
        &self,
        coordinates: &[i32; MOST_DIMENSIONS],
        is_store: bool,
    ) -> Result<(), String> {
        let first = i64::from(coordinates[0]) * self.element_bytes as i64;
        if first % 16 != 0 {
            return Err(format!(
                "coordinate {} of the innermost dimension is at byte {first} of a row, no multiple of 16",
                coordinates[0]
            ));
        }
        if let Some(at) = coordinates[..self.rank].iter().find(|at| is_store && **at < 0) {
            return Err(format!("coordinate {at} of a store: it must not begin before its tensor"));
        }
        let Some(pixels) = &self.pixels else { return Ok(()) };
        for (axis, name) in ["W", "H", "D"].into_iter().enumerate().take(self.rank.saturating_sub(2)) {
            let (first, last) = (pixels.first[axis], pixels.last[axis]);
            let (at, length) = (coordinates[axis + 1], self.shape[axis + 1]);
            if !(first..=last).contains(&i64::from(at)) {
                return Err(format!(
                    "coordinate {at} in {name}, where the box of pixels is from {first} to {last}"
                ));
            }
            if is_store && (first < 0 || last >= length as i64) {
                return Err(format!(
                    "a store of pixels whose box is from {first} to {last} in {name}, where an image has {length}"
                ));
            }
        }
        Ok(())
    }

    /// The box or the pixels at `coordinates`, with the offset `shared` of their begin in the shared
    /// window, in their order. They have less than 2^32 bytes. `offsets` are those of a load of pixels,
    /// in W, H and D.
    pub(crate) fn units(
        &self,
        coordinates: &[i32; MOST_DIMENSIONS],
        offsets: [u16; MOST_AXES],
        shared: u64,
    ) -> Vec<Unit> {
        let (copied, pitch) = (self.copied(), self.pitch());
        let mut units = Vec::with_capacity((self.bytes() / 16) as usize);
        // The bytes of a row that lie in the tensor.
        let at = |element: i64| (element.clamp(0, self.tile[0] as i64) as u64) * self.element_bytes;
        let first = i64::from(coordinates[0]);
        let inside = at(-first)..at(self.shape[0] as i64 - first);
        let begin = coordinates.map(i64::from);
        let mut pixel = begin;
        for row in 0..self.rows() {
            let mut place = begin;
            if let Some(pixels) = &self.pixels {
                place = pixel;
                (0..self.rank - 2).for_each(|axis| place[axis + 1] += i64::from(offsets[axis]));
                self.next_pixel(pixels, &mut pixel);
            } else {
                let mut rest = row;
                for (d, at) in place[..self.rank].iter_mut().enumerate().skip(1) {
                    *at += (rest % copied[d] * self.element_strides[d]) as i64;
                    rest /= copied[d];
                }
            }
            let (mut start, mut exists) = (self.address, !inside.is_empty());
            for (d, &at) in place[..self.rank].iter().enumerate().skip(1) {
                exists &= (0..self.shape[d] as i64).contains(&at);
                start = start.wrapping_add((at as u64).wrapping_mul(self.strides[d]));
            }
            start = start.wrapping_add((first as u64).wrapping_mul(self.element_bytes));
            for unit in (0..self.row_bytes()).step_by(16) {
                let linear = shared + row * pitch + unit;
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
    fn tf32_is_rounded_as_by_an_h200() {
        for (bits, rounded) in [
            (0x0080_0fff, 0x0080_0000),
            (0x0080_1000, 0x0080_0000),
            (0x0080_3000, 0x0080_4000),
            (0x8000_1001, 0x8000_2000),
            (0x8000_1000, 0x8000_0000),
            (0x7f7f_f000, 0x7f80_0000),
            (0xff80_0000, 0xff80_0000),
            (0xff80_0001, 0x7fff_e000),
        ] {
            assert_eq!(tf32(bits), rounded, "{bits:#x}");
        }
    }

    #[test]
    fn a_program_may_clear_the_bit_that_drivers_set_wrongly() {
        let tensor = TiledTensor {
            address: u64::MAX << 4,
            element_type: ElementType::F16,
            shape: &[64, 64],
            strides: &[128],
            tile: &[64, 8],
            element_strides: &[1, 1],
            swizzle: Swizzle::Bytes128,
            fill: Fill::Zeros,
        };
        let TensorMap(mut words) = TensorMap::tiled(&tensor).unwrap();
        words[1] &= !(1 << 21);
        let decoded = Tensor::decode(words[..WORDS_OF_PIXELS].try_into().unwrap()).unwrap().unwrap();
        assert_eq!((decoded.address, decoded.rank), (u64::MAX << 4, 2));
    }
}

//! Matrix descriptors of `wgmma`: where the elements of a matrix lie in shared memory.
//!
//! The layouts are the canonical ones of the PTX manual, section "Asynchronous warpgroup-level
//! matrix shared memory layout". Their unit is 16 bytes of one row, or column, of the matrix. Eight
//! units behind each other, the rows of a *core matrix*, are 8 x 16 bytes. With a swizzle, a row of
//! 32, 64 or 128 bytes holds 2, 4 or 8 units, and the units of the row trade places: bits 4 to 6 of
//! the address are combined with bits 7 to 9 by exclusive or.

use std::ops::Range;

use super::mma::{COLUMNS, Element};

/// The dimension whose neighbours are neighbours in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Major {
    /// The dimension that the sums run over.
    K,
    /// Rows of A, columns of B.
    Mn,
}

/// Bits of a descriptor that mean nothing, and must be 0.
const RESERVED: u64 = 0x3ff1_c000_c000_c000;

const UNIT: u64 = 16;

/// The dimension of a matrix that the sums run over.
#[derive(Clone, Copy, Debug)]
pub(super) struct Depth {
    k: u64,
    /// Its elements are `1 << shift` units: 2, or 4 for B beside a sparse A.
    shift: u32,
}

impl Depth {
    pub(super) fn new(k: u64, element: Element) -> Self {
        Self { k, shift: (k * element.bytes() as u64 / UNIT).trailing_zeros() }
    }

    pub(super) fn units(self) -> u64 {
        1 << self.shift
    }

    /// The row of unit `at` of a matrix whose rows have neighbouring k, and the unit in the row.
    fn place(self, at: u64) -> (u64, u64) {
        (at >> self.shift, at & (self.units() - 1))
    }
}

/// A decoded descriptor. Offsets are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Descriptor {
    start: u64,
    /// The leading dimension's offset, and the stride dimension's.
    leading: u64,
    stride: u64,
    /// Row of the swizzle pattern in which the matrix starts.
    base: u64,
    /// The pattern's rows have `1 << swizzle` units; 0 for no swizzle.
    swizzle: u32,
}

impl Descriptor {
    /// Decodes a descriptor of a matrix with `columns` rows of A, or columns of B, and `along_k`
    /// units in the other dimension.
    pub(super) fn new(bits: u64, major: Major, columns: u64, along_k: u64) -> Result<Self, String> {
        let field = |first: u32| (bits >> first & 0x3fff) << 4;
        let swizzle = [0, 3, 2, 1][(bits >> 62) as usize];
        let d =
            Self { start: field(0), leading: field(16), stride: field(32), base: bits >> 49 & 7, swizzle };
        if bits & RESERVED != 0 {
            return Err(format!("matrix descriptor {bits:#018x} has bits of {RESERVED:#x}, which must be 0"));
        }
        let row = UNIT << swizzle;
        let units = match major {
            Major::K => along_k,
            Major::Mn => (columns / 8).min(1 << swizzle),
        };
        if swizzle > 0 && d.start % row + units * UNIT > row {
            return Err(format!(
                "matrix descriptor {bits:#018x}: {} bytes from the start address {:#x} on reach beyond a row of the swizzle, of {row} \
                 bytes",
                units * UNIT,
                d.start
            ));
        }
        let phase = d.start >> 7 & d.pattern();
        if swizzle > 0 && phase != d.base & d.pattern() {
            return Err(format!(
                "matrix descriptor {bits:#018x}: the start address {:#x} is misaligned: the swizzle pattern begins at multiples of {}, \
                 unless the base offset is {phase} and not {}",
                d.start,
                128 << swizzle,
                d.base
            ));
        }
        if swizzle == 0 && d.base != 0 {
            return Err(format!("matrix descriptor {bits:#018x} has a base offset without a swizzle"));
        }
        Ok(d)
    }

    /// The bits that the swizzle changes, as a mask of units.
    fn pattern(&self) -> u64 {
        (1 << self.swizzle) - 1
    }

    /// The swizzled offset of a unit that has this offset without a swizzle.
    fn swizzled(&self, offset: u64) -> u64 {
        let at = self.start + offset;
        let phase = (at >> 7).wrapping_sub(self.base) & self.pattern();
        at ^ phase << 4
    }

    /// Unit `unit` of row `row` of a matrix whose rows have neighbouring k.
    fn unit_along_k(&self, row: u64, unit: u64) -> u64 {
        let along = if self.swizzle == 0 { unit * self.leading } else { unit * UNIT };
        self.swizzled(row / 8 * self.stride + row % 8 * (UNIT << self.swizzle) + along)
    }

    /// The unit of 8 rows from `8 * eight` on, at `k`, of a matrix whose columns have neighbouring
    /// rows.
    fn unit_across_k(&self, eight: u64, k: u64) -> u64 {
        let offset = match self.swizzle {
            0 => eight * self.stride + k / 8 * self.leading,
            _ => {
                let width = 1 << self.swizzle;
                eight % width * UNIT + eight / width * self.leading + k / 8 * self.stride
            }
        };
        self.swizzled(offset + k % 8 * (UNIT << self.swizzle))
    }

    /// The places of all units of 8 rows of A, or columns of B, from `8 * eight` on.
    pub(super) fn units(&self, major: Major, eight: u64, depth: Depth) -> impl Iterator<Item = u64> + use<> {
        let d = *self;
        let count = if major == Major::K { 8 * depth.units() } else { depth.k };
        (0..count).map(move |i| match major {
            Major::K => {
                let (row, unit) = depth.place(i);
                d.unit_along_k(8 * eight + row, unit)
            }
            Major::Mn => d.unit_across_k(eight, i),
        })
    }
}

/// The elements of units in the order of [`Descriptor::units`]: `[k, 8]`.
pub(super) fn elements<E, const K: usize>(
    major: Major,
    element: Element,
    depth: Depth,
    units: impl Iterator<Item = Result<[u8; 16], E>>,
) -> Result<[[f64; COLUMNS]; K], E> {
    let mut block = [[0.0; COLUMNS]; K];
    let each = 16 / element.bytes();
    for (i, unit) in units.enumerate() {
        let unit = unit?;
        let (row, first) = depth.place(i as u64);
        let (row, first) = (row as usize, first as usize * each);
        for at in 0..each {
            let bytes = element.bytes();
            let mut register = [0; 4];
            register[..bytes].copy_from_slice(&unit[at * bytes..][..bytes]);
            let value = element.of(u32::from_le_bytes(register), 0);
            match major {
                Major::K => block[first + at][row] = value,
                Major::Mn => block[i][at] = value,
            }
        }
    }
    Ok(block)
}

/// Joins units that follow each other to ranges, in order.
pub(super) fn ranges(units: impl Iterator<Item = u64>) -> Vec<Range<u64>> {
    let mut starts: Vec<u64> = units.collect();
    starts.sort_unstable();
    starts.dedup();
    let mut ranges: Vec<Range<u64>> = vec![];
    for at in starts {
        match ranges.last_mut() {
            Some(last) if last.end == at => last.end = at + UNIT,
            _ => ranges.push(at..at + UNIT),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_bits_are_those_outside_of_the_fields() {
        let fields = 0x3fff | 0x3fff << 16 | 0x3fff << 32 | 7 << 49 | 3 << 62;
        assert_eq!(RESERVED, !fields);
    }

    #[test]
    fn units_that_follow_each_other_are_one_range() {
        assert_eq!(ranges([48, 0, 16, 16, 80].into_iter()), [0..32, 48..64, 80..96]);
    }
}

//! Kinds of operands, and values worth trying for each.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// Format of an operand or a result: it decides the register, and the values to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A predicate.
    Pred,
    /// An integer in a register of so many bits.
    Int(u32),
    /// The same where the assembler takes no literal.
    Bits(u32),
    /// An integer that is not zero: a quotient by zero is anything.
    Divisor(u32),
    /// A 32-bit count or position of bits.
    Count,
    /// One in 0..256: the manual leaves larger values open.
    ByteCount,
    /// A floating-point number.
    Float(Format),
    /// Two of them, side by side.
    Pair(Format),
}

/// A floating-point format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    E5m2,
    E4m3,
    F16,
    Bf16,
    F32,
    F64,
}

impl Format {
    /// The format of a PTX type.
    pub fn name(self) -> &'static str {
        match self {
            Format::E5m2 => "e5m2",
            Format::E4m3 => "e4m3",
            Format::F16 => "f16",
            Format::Bf16 => "bf16",
            Format::F32 => "f32",
            Format::F64 => "f64",
        }
    }

    /// Bits of the whole and of the stored significand.
    pub fn bits(self) -> (u32, u32) {
        match self {
            Format::E5m2 => (8, 2),
            Format::E4m3 => (8, 3),
            Format::F16 => (16, 10),
            Format::Bf16 => (16, 7),
            Format::F32 => (32, 23),
            Format::F64 => (64, 52),
        }
    }

    /// The NaN that instructions give.
    pub fn nan(self) -> u64 {
        let (bits, _) = self.bits();
        u64::MAX >> (65 - bits)
    }

    /// Whether the bits are those of a NaN.
    pub fn is_nan(self, value: u64) -> bool {
        let (bits, mantissa) = self.bits();
        let magnitude = value & (u64::MAX >> (65 - bits));
        match self {
            Format::E4m3 => magnitude == 0x7f,
            _ => magnitude > u64::MAX >> (65 - bits) >> mantissa << mantissa,
        }
    }
}

impl Kind {
    /// Width of the register; 1 for a predicate.
    pub fn bits(self) -> u32 {
        match self {
            Kind::Pred => 1,
            Kind::Int(bits) | Kind::Bits(bits) | Kind::Divisor(bits) => bits,
            Kind::Count | Kind::ByteCount => 32,
            Kind::Float(format) => format.bits().0,
            Kind::Pair(format) => 2 * format.bits().0,
        }
    }

    /// The letter of its registers.
    pub fn register(self) -> char {
        match self.bits() {
            1 => 'p',
            16 => 'h',
            32 => 'r',
            _ => 'd',
        }
    }

    /// Whether a literal may stand in its place. Not for floats: an assembler may then compute at
    /// compile time, and the machine is not tested.
    pub fn may_be_literal(self) -> bool {
        matches!(self, Kind::Int(_) | Kind::Divisor(_) | Kind::Count | Kind::ByteCount)
    }

    /// A value that is likely to be at the edge of something.
    pub fn value(self, rng: &mut ChaCha8Rng) -> u64 {
        match self {
            Kind::Pred => rng.random_range(0..2),
            Kind::Int(bits) | Kind::Bits(bits) => integer(bits, rng),
            Kind::Divisor(bits) => integer(bits, rng).max(1),
            Kind::Count => match rng.random_range(0..8) {
                0 => rng.random::<u32>().into(),
                1 => rng.random_range(0..300),
                _ => rng.random_range(0..70),
            },
            Kind::ByteCount => match rng.random_range(0..4) {
                0 => rng.random_range(0..256),
                _ => rng.random_range(0..70),
            },
            Kind::Float(format) => float(format, rng),
            Kind::Pair(format) => {
                let low = float(format, rng);
                low | float(format, rng) << format.bits().0
            }
        }
    }
}

fn mask(bits: u32) -> u64 {
    u64::MAX >> (64 - bits)
}

fn integer(bits: u32, rng: &mut ChaCha8Rng) -> u64 {
    let power = 1u64 << rng.random_range(0..bits);
    let value = match rng.random_range(0..10) {
        0 => rng.random_range(0..4),
        1 => rng.random_range(0..4u64).wrapping_neg(),
        2 => power,
        3 => power.wrapping_sub(1),
        4 => power.wrapping_neg(),
        5 => (1 << (bits - 1)) - rng.random_range(0..2),
        6 => mask(bits) >> rng.random_range(0..bits),
        7 => rng.random::<u64>() >> rng.random_range(0..64),
        _ => rng.random(),
    };
    value & mask(bits)
}

fn float(format: Format, rng: &mut ChaCha8Rng) -> u64 {
    let (bits, mantissa) = format.bits();
    let top = mask(bits - 1);
    let infinity = top >> mantissa << mantissa;
    let bias = (1u64 << (bits - mantissa - 2)) - 1;
    let sign = rng.random_range(0..2u64) << (bits - 1);
    let value = match rng.random_range(0..16) {
        0 => 0,
        // Subnormals, with the smallest and the largest, and the smallest normal number. Also twice
        // that number minus a little: half of it is a tie of the largest subnormal and the smallest
        // normal number.
        1 => 1,
        2 => ((1 << mantissa) << rng.random_range(0..2)) - rng.random_range(0..2),
        3 => rng.random::<u64>() & mask(mantissa),
        // The largest number, infinity, NaNs.
        4 => infinity - rng.random_range(0..2),
        5 => infinity | (rng.random::<u64>() & mask(mantissa)),
        6 => (bias - rng.random_range(0..2)) << mantissa,
        7 => rng.random::<u64>() & top,
        // Beside the powers of two at which formats and integers end.
        8 => {
            const ENDS: [i64; 16] =
                [-150, -149, -134, -133, -126, -25, -24, -17, -14, 7, 8, 15, 16, 31, 63, 127];
            let end = ENDS[rng.random_range(0..ENDS.len())].clamp(2 - bias as i64, bias as i64 - 1);
            let nudge = [0, 1, 1 << (mantissa / 2)][rng.random_range(0..3)];
            let power = ((bias as i64 + end) as u64) << mantissa;
            if rng.random() { power + nudge } else { power - nudge }
        }
        // The rest has few bits set, give or take one: sums and products that end in ties, and
        // conversions that do. The exponents reach beyond the ends of the narrower formats.
        kind => {
            let reach = [2, 8, 20, 30, 70, 160][kind as usize % 6].min(bias - 1);
            let exponent = bias - reach + rng.random_range(0..=2 * reach);
            let kept = rng.random_range(0..=mantissa);
            let significand = (rng.random::<u64>() & mask(mantissa)) >> kept << kept;
            (exponent << mantissa | significand).wrapping_add(rng.random_range(0..3)).wrapping_sub(1)
        }
    };
    (value & top) | sign
}

/// Related operands: equal, opposite, or neighbours.
pub fn relate(kind: Kind, other: u64, rng: &mut ChaCha8Rng) -> u64 {
    let top = 1u64 << (kind.bits() - 1);
    let value = match rng.random_range(0..4) {
        0 => other,
        1 => other ^ top,
        2 => other.wrapping_add(1),
        _ => other.wrapping_sub(1),
    };
    let value = value & mask(kind.bits());
    if matches!(kind, Kind::Divisor(_)) { value.max(1) } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nans() {
        assert_eq!(Format::F32.nan(), 0x7fff_ffff);
        assert_eq!(Format::E5m2.nan(), 0x7f);
        assert!(Format::F32.is_nan(0xff80_0001) && !Format::F32.is_nan(0xff80_0000));
        assert!(Format::E4m3.is_nan(0xff) && !Format::E4m3.is_nan(0x7e));
        assert!(Format::F64.is_nan(u64::MAX) && !Format::F64.is_nan(0x7ff0 << 48));
    }
}

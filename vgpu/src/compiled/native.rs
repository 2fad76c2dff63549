//! Operations that compiled code has instructions for.

/// A width of registers: 32 or 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Width {
    W32,
    W64,
}

/// Operations `d = op(a, b)` of integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Binary {
    Add,
    Sub,
    Mul,
    And,
    Or,
    Xor,
    MinUnsigned,
    MinSigned,
    MaxUnsigned,
    MaxSigned,
}

/// Operations `d = op(a)` of integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Unary {
    Move,
    Not,
    Negate,
    CountOnes,
    LeadingZeros,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Shift {
    Left,
    Right,
    RightSigned,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Float {
    Add,
    Sub,
    Mul,
}

/// Operations on predicates; the one operand of `Move` and `Not` is slot 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Logic {
    Move,
    Not,
    And,
    Or,
    Xor,
}

/// The types of the operands of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Compared {
    Unsigned(Width),
    Signed(Width),
    F32,
}

/// The meaning of an arithmetic instruction, where compiled code has instructions for it. Slots are
/// those of the instruction's [`Spec`](crate::exec::lanes::Spec): `d`, and the operands in the order
/// of PTX.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Native {
    /// Only its function can do it.
    #[default]
    Function,
    Unary(Unary, Width),
    Binary(Binary, Width),
    /// Counts have 32 bits.
    Shift(Shift, Width),
    /// The low half of the product, and a sum.
    MultiplyAdd(Width),
    /// The quotient of unsigned numbers of 32 bits, or its remainder.
    Divide {
        remainder: bool,
    },
    /// A product of 64 bits.
    MultiplyWide {
        signed: bool,
    },
    MultiplyAddWide {
        signed: bool,
    },
    Select(Width),
    /// 32 bits to 64.
    Extend {
        signed: bool,
    },
    /// 64 bits to 32.
    Truncate,
    /// Low bits of 32, zero-extended.
    Keep(u32),
    /// f32, rounded to nearest; a NaN is the canonical one.
    Float(Float),
    FusedMultiplyAdd,
    /// Two f32 to a pair of bf16.
    PackBf16,
    /// bf16 to f32.
    WidenBf16,
    /// 64 bits to their halves. Slots: whole, low, high.
    Split,
    /// Halves to 64 bits. Slots: whole, low, high.
    Join,
    /// With the immediate of `vcmpps`, or `vpcmpd`. Slots: p, q, a, b, c, combination.
    Compare(Compared, u8),
    Logic(Logic),
}

impl Native {
    /// The comparison of this name.
    pub(crate) fn comparison(compared: Compared, name: &str) -> Native {
        let integer = match name {
            "eq" => 0,
            "lt" | "lo" => 1,
            "le" | "ls" => 2,
            "ne" => 4,
            "ge" | "hs" => 5,
            "gt" | "hi" => 6,
            _ => return Native::Function,
        };
        if compared != Compared::F32 {
            return Native::Compare(compared, integer);
        }
        // The ordered forms are false when an operand is a NaN, the unordered ones true. None
        // raises a flag.
        let float = match name {
            "eq" => 0x00,
            "lt" => 0x11,
            "le" => 0x12,
            "ne" => 0x0c,
            "ge" => 0x1d,
            "gt" => 0x1e,
            _ => return Native::Function,
        };
        Native::Compare(compared, float)
    }
}

//! Element types that can be reduced, and how.

use std::fmt;

use bytemuck::Pod;
use half::bf16;

use crate::error::{Error, Result};

/// The type of the elements of a reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum ElementType {
    I8 = 1,
    U8 = 2,
    I32 = 3,
    U32 = 4,
    I64 = 5,
    U64 = 6,
    F32 = 7,
    F64 = 8,
    Bf16 = 9,
}

impl ElementType {
    /// All of them.
    pub const ALL: [ElementType; 9] = [
        ElementType::I8,
        ElementType::U8,
        ElementType::I32,
        ElementType::U32,
        ElementType::I64,
        ElementType::U64,
        ElementType::F32,
        ElementType::F64,
        ElementType::Bf16,
    ];

    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            ElementType::I8 | ElementType::U8 => 1,
            ElementType::Bf16 => 2,
            ElementType::I32 | ElementType::U32 | ElementType::F32 => 4,
            ElementType::I64 | ElementType::U64 | ElementType::F64 => 8,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<ElementType> {
        ElementType::ALL.into_iter().find(|dtype| *dtype as u8 == code)
    }

    fn is_float(self) -> bool {
        matches!(self, ElementType::F32 | ElementType::F64 | ElementType::Bf16)
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

/// How a reduction combines two elements.
///
/// Integers wrap around. The ranks and the size fix the order of the operands, and the operations
/// are commutative, so every rank gets the same bits in every run. All NaNs of results have the
/// same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReduceOp {
    /// The sum.
    Sum = 1,
    /// The product.
    Product = 2,
    /// The least; of floats, a NaN only where all are, and -0 where there is one among zeros.
    Min = 3,
    /// The greatest; of floats, a NaN only where all are, and +0 where there is one among zeros.
    Max = 4,
    /// Bitwise and; integers only.
    Band = 5,
    /// Bitwise or; integers only.
    Bor = 6,
    /// Bitwise exclusive or; integers only.
    Bxor = 7,
    /// The sum divided by the number of ranks; of integers, rounded towards zero.
    Average = 8,
}

impl ReduceOp {
    /// All of them.
    pub(crate) const ALL: [ReduceOp; 8] = [
        ReduceOp::Sum,
        ReduceOp::Product,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Band,
        ReduceOp::Bor,
        ReduceOp::Bxor,
        ReduceOp::Average,
    ];

    pub(crate) fn from_code(code: u8) -> Option<ReduceOp> {
        ReduceOp::ALL.into_iter().find(|op| *op as u8 == code)
    }

    /// Rejects bitwise operations on floats.
    pub(crate) fn check(self, dtype: ElementType) -> Result<()> {
        let bitwise = matches!(self, ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor);
        if bitwise && dtype.is_float() {
            return Err(Error::argument(
                "op",
                self,
                format!("bitwise operations need integers, not {dtype}"),
            ));
        }
        Ok(())
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

/// An element that collectives carry and reduce: `i8 u8 i32 u32 i64 u64 f32 f64 bf16`.
pub trait Reducible: Pod + Send + sealed::Arithmetic {}

mod sealed {
    /// The arithmetic of a dtype.
    pub trait Arithmetic: Sized {
        /// Its code on the wire.
        const DTYPE: super::ElementType;

        /// `a op b`, which has the same bits as `b op a`.
        fn combine(op: super::ReduceOp, a: Self, b: Self) -> Self;
        fn divide(self, by: u32) -> Self;
    }
}
use sealed::Arithmetic;

macro_rules! integers {
    ($($type:ty: $dtype:ident),*) => {$(
        impl Reducible for $type {}
        impl Arithmetic for $type {
            const DTYPE: ElementType = ElementType::$dtype;

            #[inline(always)]
            fn combine(op: ReduceOp, a: Self, b: Self) -> Self {
                match op {
                    ReduceOp::Sum | ReduceOp::Average => a.wrapping_add(b),
                    ReduceOp::Product => a.wrapping_mul(b),
                    ReduceOp::Min => a.min(b),
                    ReduceOp::Max => a.max(b),
                    ReduceOp::Band => a & b,
                    ReduceOp::Bor => a | b,
                    ReduceOp::Bxor => a ^ b,
                }
            }
            fn divide(self, by: u32) -> Self {
                // Through i128, since the number of ranks need not fit the type.
                (i128::from(self) / i128::from(by)) as $type
            }
        }
    )*};
}
integers!(i8: I8, u8: U8, i32: I32, u32: U32, i64: I64, u64: U64);

macro_rules! floats {
    ($($type:ty: $dtype:ident),*) => {$(
        impl Reducible for $type {}
        impl Arithmetic for $type {
            const DTYPE: ElementType = ElementType::$dtype;

            #[inline(always)]
            fn combine(op: ReduceOp, a: Self, b: Self) -> Self {
                let result = match op {
                    ReduceOp::Sum | ReduceOp::Average => a + b,
                    ReduceOp::Product => a * b,
                    // Zeros are equal, and `min` and `max` may return either sign.
                    ReduceOp::Min if a == b => <$type>::from_bits(a.to_bits() | b.to_bits()),
                    ReduceOp::Max if a == b => <$type>::from_bits(a.to_bits() & b.to_bits()),
                    ReduceOp::Min => a.min(b),
                    ReduceOp::Max => a.max(b),
                    // `ReduceOp::check` has rejected these before.
                    ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => a,
                };
                // The processor returns one of two NaNs, by the order of the operands.
                if result.is_nan() { <$type>::NAN } else { result }
            }
            fn divide(self, by: u32) -> Self {
                self / by as $type
            }
        }
    )*};
}
floats!(f32: F32, f64: F64);

impl Reducible for bf16 {}

impl Arithmetic for bf16 {
    const DTYPE: ElementType = ElementType::Bf16;

    #[inline(always)]
    fn combine(op: ReduceOp, a: Self, b: Self) -> Self {
        bf16::from_f32(f32::combine(op, a.to_f32(), b.to_f32()))
    }

    fn divide(self, by: u32) -> Self {
        bf16::from_f32(self.to_f32() / by as f32)
    }
}

/// `into = into op other`, element by element.
pub(crate) fn reduce(dtype: ElementType, op: ReduceOp, into: &mut [u8], other: &[u8]) {
    fn each<T: Reducible>(into: &mut [u8], other: &[u8], combine: impl Fn(T, T) -> T) {
        let size = size_of::<T>();
        for (a, b) in into.chunks_exact_mut(size).zip(other.chunks_exact(size)) {
            let result = combine(bytemuck::pod_read_unaligned(a), bytemuck::pod_read_unaligned(b));
            a.copy_from_slice(bytemuck::bytes_of(&result));
        }
    }
    fn typed<T: Reducible>(op: ReduceOp, into: &mut [u8], other: &[u8]) {
        // A loop per common operation, so that each is vectorised.
        match op {
            ReduceOp::Sum | ReduceOp::Average => {
                each::<T>(into, other, |a, b| T::combine(ReduceOp::Sum, a, b))
            }
            ReduceOp::Max => each::<T>(into, other, |a, b| T::combine(ReduceOp::Max, a, b)),
            op => each::<T>(into, other, |a, b| T::combine(op, a, b)),
        }
    }
    match dtype {
        ElementType::I8 => typed::<i8>(op, into, other),
        ElementType::U8 => typed::<u8>(op, into, other),
        ElementType::I32 => typed::<i32>(op, into, other),
        ElementType::U32 => typed::<u32>(op, into, other),
        ElementType::I64 => typed::<i64>(op, into, other),
        ElementType::U64 => typed::<u64>(op, into, other),
        ElementType::F32 => typed::<f32>(op, into, other),
        ElementType::F64 => typed::<f64>(op, into, other),
        ElementType::Bf16 => typed::<bf16>(op, into, other),
    }
}

/// The last step of an average; nothing for other operations.
pub(crate) fn finish(dtype: ElementType, op: ReduceOp, data: &mut [u8], size: u32) {
    fn typed<T: Reducible>(data: &mut [u8], size: u32) {
        for element in data.chunks_exact_mut(size_of::<T>()) {
            let value: T = bytemuck::pod_read_unaligned(element);
            element.copy_from_slice(bytemuck::bytes_of(&value.divide(size)));
        }
    }
    if op != ReduceOp::Average {
        return;
    }
    match dtype {
        ElementType::I8 => typed::<i8>(data, size),
        ElementType::U8 => typed::<u8>(data, size),
        ElementType::I32 => typed::<i32>(data, size),
        ElementType::U32 => typed::<u32>(data, size),
        ElementType::I64 => typed::<i64>(data, size),
        ElementType::U64 => typed::<u64>(data, size),
        ElementType::F32 => typed::<f32>(data, size),
        ElementType::F64 => typed::<f64>(data, size),
        ElementType::Bf16 => typed::<bf16>(data, size),
    }
}

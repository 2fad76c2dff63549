//! How rows become e4m3 on their way.

use epoxide_gpu::layout::{self, SCALE_BLOCK};

use crate::ep::DType;
use crate::error::{Error, Result};

/// How an operation converts BF16 rows on their way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantise {
    /// They travel as they are.
    Not,
    /// They travel as e4m3. Each 128 elements have a scale of their own, their largest magnitude (at least 1e-4) over 448, that they are to be
    /// multiplied with.
    Fp8,
    /// The same, with the next larger power of two as scale.
    Fp8PowerOfTwo,
}

impl Quantise {
    /// An error unless rows of so many elements of the type can be quantised so.
    pub(super) fn check(self, hidden: u64, dtype: DType) -> Result<()> {
        let is_possible = dtype == DType::Bf16 && hidden.is_multiple_of(SCALE_BLOCK.into());
        if self == Quantise::Not || is_possible {
            return Ok(());
        }
        let rule = format!("quantising takes bf16 rows with a multiple of {SCALE_BLOCK} elements");
        Err(Error::argument("quantise", format!("{self:?} of {hidden} x {dtype}"), rule))
    }

    /// The value that kernels get.
    pub(super) fn on_device(self) -> u32 {
        match self {
            Quantise::Not => layout::Quantise::Not as u32,
            Quantise::Fp8 => layout::Quantise::Fp8 as u32,
            Quantise::Fp8PowerOfTwo => layout::Quantise::Fp8PowerOfTwo as u32,
        }
    }
}

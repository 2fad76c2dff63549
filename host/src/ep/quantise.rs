//! How rows become e4m3 on their way.

use epoxide_gpu::layout::{self, MX_BLOCK, SCALE_BLOCK};

use super::payload::Record;
use super::tensor::DType;
use crate::error::{Error, Result};

/// How an operation converts BF16 rows on their way: a dispatch of either mode, or a combine of low
/// latency, with f32 scales.
///
/// Low latency converts rows while it sends them. High throughput converts them by a kernel before
/// the sending one, into memory of the buffer. Both make the same bytes. A row has a multiple of
/// 128 elements; in high throughput with [`Quantise::Mxfp8`] a multiple of 32 is enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Quantise {
    /// Rows are sent unchanged.
    None = layout::Quantise::None as u32,
    /// Rows are sent as e4m3. Each 128 elements have their own scale, by which the receiver
    /// multiplies them. The scale is their largest magnitude (at least 1e-4) over 448. An infinity
    /// or a NaN makes all 128 elements NaN.
    Fp8 = layout::Quantise::Fp8 as u32,
    /// The same of finite rows, with the next larger power of two as scale.
    Fp8PowerOfTwo = layout::Quantise::Fp8PowerOfTwo as u32,
    /// The rows of a dispatch are sent as MXFP8, as version 1.0 of the [OCP Microscaling Formats
    /// (MX) specification][mx] defines it: e4m3, and each 32 elements have a scale of their own, a
    /// power of two (UE8M0).
    ///
    /// Scales arrive as those of rows that are MXFP8 already ([`Payload::mxfp8`]): in low latency
    /// as a column of [`Received::columns`](crate::low_latency::Received::columns), four to an i32,
    /// that of the first 32 elements lowest; in high throughput as a column of
    /// [`Received::recv_columns`](crate::throughput::Received::recv_columns), a byte each. Ranks
    /// that have such rows may send them with their column in the same dispatch.
    ///
    /// | of a block | becomes |
    /// |---|---|
    /// | the scale | 2<sup>floor(log2(m)) - 8</sup>, where m is the largest magnitude (section 6.3); 2<sup>-127</sup> where that is less, also of zeros |
    /// | an element | its quotient by the scale, rounded to nearest even, at most 448: quotients reach up to 512, so that the largest may lose an eighth |
    /// | an infinite element | 448 with its sign. m counts as 2<sup>128</sup>: the scale is 2<sup>120</sup>, by which 448 is infinite again in f32 and bf16, and finite elements stay finite |
    /// | a NaN | NaN (0x7f). The scale is NaN as well (0xff), and thereby the whole block |
    ///
    /// The formula has no value for infinities and NaN: their rows of the table are this library's
    /// choice. A combine returns rows as they are or with f32 scales.
    ///
    /// [mx]: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
    /// [`Payload::mxfp8`]: crate::Payload::mxfp8
    Mxfp8 = layout::Quantise::Mxfp8 as u32,
}

impl Quantise {
    /// Elements of a row that a scale is made for.
    pub(super) fn block(self) -> u32 {
        if self == Quantise::Mxfp8 { MX_BLOCK } else { SCALE_BLOCK }
    }

    /// An error unless rows of so many elements of the type, whole blocks of `block`, can be
    /// quantised so.
    pub(super) fn check(self, hidden: u64, dtype: DType, block: u32) -> Result<()> {
        let is_possible = dtype == DType::Bf16 && hidden.is_multiple_of(block.into());
        if self == Quantise::None || is_possible {
            return Ok(());
        }
        let rule = format!(
            "quantising takes bf16 rows with a multiple of {block} elements: pad rows, or send rows that are quantised already"
        );
        Err(Error::argument("quantise", format!("{self:?} of {hidden} x {dtype}"), rule))
    }

    /// The scales of a row of so many elements, as they are sent.
    pub(super) fn record(self, hidden: u32) -> Record {
        match self {
            Quantise::None => Record::default(),
            Quantise::Fp8 | Quantise::Fp8PowerOfTwo => Record::of_f32(hidden / SCALE_BLOCK),
            Quantise::Mxfp8 => Record::of_ue8m0(hidden / MX_BLOCK),
        }
    }

    /// Whether rows get f32 scales.
    pub(super) fn makes_f32_scales(self) -> bool {
        matches!(self, Quantise::Fp8 | Quantise::Fp8PowerOfTwo)
    }
}

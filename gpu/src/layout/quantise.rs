//! How rows are quantised, and the arguments of the kernel that does it in front of a dispatch.

use epoxide_simt::kernel_args;

use super::assert::layout_assert;
use super::device_ptr::DevicePtr;

/// The quantisation of rows in an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Quantise {
    /// They travel as they are.
    None = 0,
    /// BF16 rows travel as e4m3, each 128 elements with a scale of their own.
    Fp8 = 1,
    /// The same, with scales that are powers of two.
    Fp8PowerOfTwo = 2,
    /// BF16 rows of a dispatch travel as e4m3, each [`MX_BLOCK`] elements with a UE8M0 scale of
    /// their own. Four scales are a word, in the place of the f32 scale of those 128 elements.
    Mxfp8 = 3,
}

/// Elements that share an f32 scale.
pub const SCALE_BLOCK: u32 = 128;
/// Elements that share a UE8M0 scale.
pub const MX_BLOCK: u32 = 32;

/// Blocks of [`SCALE_BLOCK`] elements that a warp of `quantise_rows` loads together.
pub const QUANTISED_AT_ONCE: u32 = 16;

/// Arguments of `quantise_rows`.
#[kernel_args(requires(
    self.hidden >= 1,
    self.quantise >= Quantise::Fp8 as u32,
    self.quantise <= Quantise::Mxfp8 as u32,
    self.hidden.is_multiple_of(if self.quantise == Quantise::Mxfp8 as u32 { MX_BLOCK } else { SCALE_BLOCK }),
    self.num_tokens as u64 * self.hidden.div_ceil(SCALE_BLOCK) as u64 <= 1 << 30,
))]
pub struct QuantiseArgs {
    /// In: bf16 `[num_tokens, hidden]`.
    pub x: DevicePtr,
    /// Out: e4m3 `[num_tokens, hidden]`.
    pub rows: DevicePtr,
    /// Out: `[num_tokens, hidden / 128 rounded up]`, f32 scales, or as MXFP8 words of four UE8M0
    /// scales; those behind a row are 0.
    pub scales: DevicePtr,
    /// Elements of a row, a multiple of [`SCALE_BLOCK`], as MXFP8 of [`MX_BLOCK`].
    pub hidden: u32,
    /// Tokens of this rank.
    pub num_tokens: u32,
    /// [`Quantise`], but not [`Quantise::None`].
    pub quantise: u32,
    /// 0.
    pub reserved: u32,
}

layout_assert!(QuantiseArgs, size = 40, reserved at 36);

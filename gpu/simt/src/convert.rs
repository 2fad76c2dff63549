//! Conversions between `f32` and pairs of smaller floats, and functions of `f32`.

#[cfg(target_arch = "nvptx64")]
use core::arch::asm;

device_fns! {
    /// Two `f32` rounded to nearest even and packed, `lo` in the low half.
    /// `cvt.rn.bf16x2.f32 r, hi, lo;`
    pub fn pack_bf16x2(lo: f32, hi: f32) -> u32 {
        let r: u32;
        // SAFETY: arithmetic on registers.
        unsafe {
            asm!("cvt.rn.bf16x2.f32 {r}, {h}, {l};",
                r = out(reg32) r, h = in(reg32) hi, l = in(reg32) lo, options(pure, nomem, nostack))
        };
        r
    }

    /// Two `f32` rounded to nearest even as `f16` and packed, `lo` in the low half; numbers that are
    /// too large become infinite. `cvt.rn.f16x2.f32 r, hi, lo;`
    pub fn pack_f16x2(lo: f32, hi: f32) -> u32 {
        let r: u32;
        // SAFETY: arithmetic on registers.
        unsafe {
            asm!("cvt.rn.f16x2.f32 {r}, {h}, {l};",
                r = out(reg32) r, h = in(reg32) hi, l = in(reg32) lo, options(pure, nomem, nostack))
        };
        r
    }

    /// Two `f32` rounded to nearest even as e4m3 and packed, `lo` in the low byte; larger numbers
    /// become the largest, 448.
    pub fn pack_e4m3x2(lo: f32, hi: f32) -> u32 {
        let r: u16;
        // SAFETY: arithmetic on registers.
        unsafe {
            asm!("cvt.rn.satfinite.e4m3x2.f32 {r}, {h}, {l};",
                r = out(reg16) r, h = in(reg32) hi, l = in(reg32) lo, options(pure, nomem, nostack))
        };
        r as u32
    }

    /// Two e4m3 numbers as a pair of `f16`, exactly. `cvt.rn.f16x2.e4m3x2 r, v;`
    pub fn unpack_e4m3x2(v: u16) -> u32 {
        let r: u32;
        // SAFETY: arithmetic on registers.
        unsafe { asm!("cvt.rn.f16x2.e4m3x2 {r}, {v};", r = out(reg32) r, v = in(reg16) v, options(pure, nomem, nostack)) };
        r
    }

    /// The low half of an `f16` pair, exactly. `cvt.f32.f16 r, v;`
    pub fn f16x2_lo(v: u32) -> f32 {
        let r: f32;
        // SAFETY: arithmetic on registers.
        unsafe { asm!("cvt.f32.f16 {r}, {v};", r = out(reg32) r, v = in(reg16) v as u16, options(pure, nomem, nostack)) };
        r
    }

    /// The square root of `v`, rounded to nearest even: the bits of `f32::sqrt` on the host.
    /// `sqrt.rn.f32 r, v;`
    pub fn sqrt(v: f32) -> f32 {
        let r: f32;
        // SAFETY: arithmetic on registers.
        unsafe { asm!("sqrt.rn.f32 {r}, {v};", r = out(reg32) r, v = in(reg32) v, options(pure, nomem, nostack)) };
        r
    }

    /// 2 to the power of `v`, to within 2 units in the last place. `ex2.approx.f32 r, v;`
    pub fn ex2_approx(v: f32) -> f32 {
        let r: f32;
        // SAFETY: arithmetic on registers.
        unsafe { asm!("ex2.approx.f32 {r}, {v};", r = out(reg32) r, v = in(reg32) v, options(pure, nomem, nostack)) };
        r
    }
}

/// The high half of an `f16` pair, exactly.
#[inline(always)]
pub fn f16x2_hi(v: u32) -> f32 {
    f16x2_lo(v >> 16)
}

/// The low half of a BF16 pair, exactly.
#[inline(always)]
pub fn bf16x2_lo(v: u32) -> f32 {
    f32::from_bits(v << 16)
}

/// The high half of a BF16 pair, exactly.
#[inline(always)]
pub fn bf16x2_hi(v: u32) -> f32 {
    f32::from_bits(v & 0xffff_0000)
}

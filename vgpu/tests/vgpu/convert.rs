//! `cvt` against the PTX manual: extension, saturation, rounding, packing order.

use crate::common::{check, d, f, reject};
const M: u64 = u32::MAX as u64;

#[test]
#[should_panic(expected = "gave 0x3, expected 0x4")]
fn the_helper_notices_wrong_results() {
    check("add.u32 %r0, %r1, %r2;", &[1, 2], 4);
}

#[test]
fn integers() {
    check("cvt.u32.u16 %r0, %h1;", &[0xffff], 0xffff);
    check("cvt.s32.s16 %r0, %h1;", &[0xffff], M);
    check("cvt.u64.u32 %rd0, %r1;", &[M], M);
    check("cvt.s64.s32 %rd0, %r1;", &[M], u64::MAX);
    check("cvt.u32.u64 %r0, %rd1;", &[0x1_0000_0005], 5);
    check("cvt.u16.u32 %h0, %r1;", &[0x1_abcd], 0xabcd);
    check("cvt.s8.s32 %r0, %r1;", &[0x80], 0xffff_ff80);
    check("cvt.u8.u32 %r0, %r1;", &[0x1ff], 0xff);
    check("cvt.s32.s8 %r0, %r1;", &[0x17f], 0x7f);
    check("cvt.s64.s8 %rd0, %rd1;", &[0x80], (-128i64) as u64);
    check("cvt.u32.u8 %r0, %h1;", &[0x1ff], 0xff);
    check("cvt.sat.u8.s32 %r0, %r1;", &[M], 0);
    check("cvt.sat.u8.s32 %r0, %r1;", &[300], 255);
    check("cvt.sat.s8.s32 %r0, %r1;", &[0x8000_0000], 0xffff_ff80);
    check("cvt.sat.s32.u32 %r0, %r1;", &[M], 0x7fff_ffff);
    check("cvt.sat.u32.s64 %r0, %rd1;", &[(-5i64) as u64], 0);
}

#[test]
fn integer_to_float() {
    check("cvt.rn.f32.s32 %r0, %r1;", &[M], f(-1.0));
    check("cvt.rn.f32.u32 %r0, %r1;", &[M], f(4_294_967_296.0));
    check("cvt.rz.f32.u32 %r0, %r1;", &[M], f(4_294_967_040.0));
    check("cvt.rp.f32.s32 %r0, %r1;", &[16_777_217], f(16_777_218.0));
    check("cvt.rm.f32.s32 %r0, %r1;", &[16_777_217], f(16_777_216.0));
    check("cvt.rn.f64.u64 %rd0, %rd1;", &[u64::MAX], d(18_446_744_073_709_551_616.0));
    check("cvt.rn.f64.s64 %rd0, %rd1;", &[u64::MAX], d(-1.0));
    check("cvt.rn.f32.u64 %r0, %rd1;", &[1 << 40], f(1_099_511_627_776.0));
    check("cvt.rn.f16.s32 %h0, %r1;", &[M], 0xbc00);
    check("cvt.rn.bf16.u16 %h0, %h1;", &[3], 0x4040);
    check("cvt.rn.f32.s8 %r0, %r1;", &[0xff], f(-1.0));
    check("cvt.rn.f64.u32 %rd0, %r1;", &[M], d(4_294_967_295.0));
}

#[test]
fn float_to_integer_rounds_and_saturates() {
    for (mode, plus, minus) in [("rni", 2, -2i32), ("rzi", 2, -2), ("rmi", 2, -3), ("rpi", 3, -2)] {
        check(&format!("cvt.{mode}.s32.f32 %r0, %r1;"), &[f(2.5)], plus);
        check(&format!("cvt.{mode}.s32.f32 %r0, %r1;"), &[f(-2.5)], minus as u32 as u64);
        check(&format!("cvt.{mode}.s32.f64 %r0, %rd1;"), &[d(-2.5)], minus as u32 as u64);
    }
    check("cvt.rni.s32.f32 %r0, %r1;", &[f(3.5)], 4);
    check("cvt.rzi.s32.f32 %r0, %r1;", &[f(1e20)], 0x7fff_ffff);
    check("cvt.rzi.s32.f32 %r0, %r1;", &[f(-1e20)], 0x8000_0000);
    check("cvt.rzi.u32.f32 %r0, %r1;", &[f(-1.0)], 0);
    check("cvt.rzi.u32.f32 %r0, %r1;", &[f(f32::INFINITY)], M);
    check("cvt.rzi.u8.f32 %r0, %r1;", &[f(300.0)], 255);
    check("cvt.rzi.s8.f32 %r0, %r1;", &[f(-300.0)], 0xffff_ff80);
    check("cvt.rzi.u64.f32 %rd0, %r1;", &[f(1e30)], u64::MAX);
    check("cvt.rzi.s64.f64 %rd0, %rd1;", &[d(-1e30)], 1 << 63);
    check("cvt.rzi.u16.f16 %h0, %h1;", &[0x4100], 2);
    check("cvt.rni.s16.bf16 %h0, %h1;", &[0xc060], (-4i16) as u16 as u64);
    // NaN: zero, except that 64-bit types give the top bit.
    check("cvt.rzi.s32.f32 %r0, %r1;", &[f(f32::NAN)], 0);
    check("cvt.rzi.u32.f32 %r0, %r1;", &[f(f32::NAN)], 0);
    check("cvt.rzi.s64.f32 %rd0, %r1;", &[f(f32::NAN)], 1 << 63);
    check("cvt.rzi.u64.f64 %rd0, %rd1;", &[d(f64::NAN)], 1 << 63);
    check("cvt.rzi.s32.f64 %r0, %rd1;", &[d(f64::NAN)], 0x8000_0000);
    check("cvt.rpi.ftz.s32.f32 %r0, %r1;", &[1], 0);
    check("cvt.rpi.s32.f32 %r0, %r1;", &[1], 1);
}

#[test]
fn float_to_float() {
    check("cvt.f64.f32 %rd0, %r1;", &[f(1.5)], d(1.5));
    check("cvt.rn.f32.f64 %r0, %rd1;", &[d(0.1)], f(0.1));
    check("cvt.rz.f32.f64 %r0, %rd1;", &[d(1e300)], f(f32::MAX));
    check("cvt.rp.f32.f64 %r0, %rd1;", &[d(1e-300)], 1);
    check("cvt.rp.ftz.f32.f64 %r0, %rd1;", &[d(1e-300)], 0);
    check("cvt.rn.f16.f32 %h0, %r1;", &[f(65520.0)], 0x7c00);
    check("cvt.rn.f32.f64 %r0, %rd1;", &[0xfff8_0000_0000_0001], 0x7fff_ffff);
    check("cvt.f32.f16 %r0, %h1;", &[0xfe01], 0x7fff_ffff);
    check("cvt.rz.f16.f32 %h0, %r1;", &[f(65520.0)], 0x7bff);
    check("cvt.f32.f16 %r0, %h1;", &[0x0001], f(2f32.powi(-24)));
    check("cvt.f32.bf16 %r0, %h1;", &[0x4049], 0x4049_0000);
    check("cvt.rn.bf16.f32 %h0, %r1;", &[0x3f80_8000], 0x3f80);
    check("cvt.rn.bf16.f32 %h0, %r1;", &[0x3f81_8000], 0x3f82);
    check("cvt.rz.bf16.f32 %h0, %r1;", &[0x3f81_ffff], 0x3f81);
    check("cvt.rn.bf16.f32 %h0, %r1;", &[0x7fc0_1234], 0x7fff);
    check("cvt.rn.relu.bf16.f32 %h0, %r1;", &[f(-1.0)], 0);
    check("cvt.rni.f32.f32 %r0, %r1;", &[f(2.5)], f(2.0));
    check("cvt.rmi.f32.f32 %r0, %r1;", &[f(-0.5)], f(-1.0));
    check("cvt.rzi.f64.f64 %rd0, %rd1;", &[d(-0.5)], d(-0.0));
    check("cvt.rpi.f16.f16 %h0, %h1;", &[0x3e00], 0x4000);
    check("cvt.sat.f32.f32 %r0, %r1;", &[f(7.0)], f(1.0));
    check("cvt.sat.f32.f32 %r0, %r1;", &[f(f32::NAN)], 0);
    check("cvt.ftz.f32.f32 %r0, %r1;", &[1], 0);
}

/// Rounded as if exponents had no end, as an H200 does it: not before rounding, and not with the
/// fewer digits of a subnormal.
#[test]
fn a_result_that_is_subnormal_when_rounded_with_all_digits_is_flushed() {
    let smallest = 2f64.powi(-126);
    let (below, just_below) = (smallest * (1.0 - 2f64.powi(-24)), smallest * (1.0 - 2f64.powi(-27)));
    check("cvt.rn.f32.f64 %r0, %rd1;", &[d(below)], 0x0080_0000);
    check("cvt.rn.ftz.f32.f64 %r0, %rd1;", &[d(below)], 0);
    check("cvt.rn.ftz.f32.f64 %r0, %rd1;", &[d(just_below)], 0x0080_0000);
    check("cvt.rz.ftz.f32.f64 %r0, %rd1;", &[d(just_below)], 0);
    check("cvt.rp.ftz.f32.f64 %r0, %rd1;", &[d(1e-310)], 0);
    check("cvt.rp.ftz.f32.f64 %r0, %rd1;", &[d(-just_below)], 0x8000_0000);
    check("cvt.rn.ftz.sat.f32.f64 %r0, %rd1;", &[d(below)], 0);
    check("cvt.rn.ftz.sat.f32.f64 %r0, %rd1;", &[d(1e-40)], 0);
    check("cvt.rn.ftz.f32.f64 %r0, %rd1;", &[d(smallest)], 0x0080_0000);
    check("cvt.rn.ftz.f32.f64 %r0, %rd1;", &[d(f64::NAN)], 0x7fc0_0000);
    check("mul.rn.ftz.f32 %r0, %r1, %r2;", &[0x00ff_ffff, f(0.5)], 0);
    check("mul.rn.f32 %r0, %r1, %r2;", &[0x00ff_ffff, f(0.5)], 0x0080_0000);
    check("fma.rn.ftz.f32 %r0, %r1, %r2, %r3;", &[0x00ff_ffff, f(0.5), 0], 0);
    check("div.rn.ftz.f32 %r0, %r1, %r2;", &[0x00ff_ffff, f(2.0)], 0);
    check("rcp.rp.ftz.f32 %r0, %r1;", &[0x7e80_0001], 0);
}

#[test]
fn packed_conversions_put_the_first_source_high() {
    let two = &[f(1.0), f(2.0)];
    check("cvt.rn.bf16x2.f32 %r0, %r1, %r2;", two, 0x3f80_4000);
    check("cvt.rz.bf16x2.f32 %r0, %r1, %r2;", &[0x3f81_ffff, 0x4000_0000], 0x3f81_4000);
    check("cvt.rn.relu.bf16x2.f32 %r0, %r1, %r2;", &[f(-1.0), f(2.0)], 0x4000);
    check("cvt.rn.f16x2.f32 %r0, %r1, %r2;", two, 0x3c00_4000);
    check("cvt.rn.satfinite.e4m3x2.f32 %h0, %r1, %r2;", two, 0x3840);
    check("cvt.rn.satfinite.e4m3x2.f32 %h0, %r1, %r2;", &[f(-1e9), f(f32::NAN)], 0xfe7f);
    check("cvt.rn.satfinite.relu.e4m3x2.f32 %h0, %r1, %r2;", &[f(-1.0), f(448.0)], 0x007e);
    check("cvt.rn.satfinite.e5m2x2.f32 %h0, %r1, %r2;", two, 0x3c40);
    check("cvt.rn.satfinite.e5m2x2.f32 %h0, %r1, %r2;", &[f(1e9), f(0.0)], 0x7b00);
    check("cvt.rn.f16x2.e4m3x2 %r0, %h1;", &[0x3840], 0x3c00_4000);
    check("cvt.rn.f16x2.e5m2x2 %r0, %h1;", &[0x3c40], 0x3c00_4000);
    check("cvt.rn.satfinite.e4m3x2.f16x2 %h0, %r1;", &[0x3c00_4000], 0x3840);
    check("cvt.rn.satfinite.e5m2x2.f16x2 %h0, %r1;", &[0x3c00_4000], 0x3c40);
}

#[test]
fn tf32_keeps_ten_bits() {
    let (tie, odd_tie) = (0x3f80_1000, 0x3f80_3000);
    for (mode, of_tie, of_odd_tie) in [("rn", 0x3f80_0000, 0x3f80_4000), ("rna", 0x3f80_2000, 0x3f80_4000)] {
        check(&format!("cvt.{mode}.tf32.f32 %r0, %r1;"), &[tie], of_tie);
        check(&format!("cvt.{mode}.tf32.f32 %r0, %r1;"), &[odd_tie], of_odd_tie);
        check(&format!("cvt.{mode}.tf32.f32 %r0, %r1;"), &[f(f32::MAX)], f(f32::INFINITY));
    }
    check("cvt.rz.tf32.f32 %r0, %r1;", &[odd_tie | 0xfff], 0x3f80_2000);
    check("cvt.rn.satfinite.tf32.f32 %r0, %r1;", &[f(f32::MIN)], 0xff7f_e000);
    check("cvt.rn.relu.tf32.f32 %r0, %r1;", &[f(-1.0)], 0);
    check("cvt.rn.tf32.f32 %r0, %r1;", &[f(f32::NAN)], 0x7fff_ffff);
    check("cvt.rn.tf32.f32 %r0, %r1;", &[0x0000_3000], 0x0000_4000);
}

#[test]
fn illegal_conversions_are_rejected() {
    for op in [
        "cvt.f32.s32 %r0, %r1;",            // Must say how to round.
        "cvt.rn.f64.f32 %rd0, %r1;",        // Nothing to round.
        "cvt.rni.f32.f64 %r0, %rd1;",       // Integral rounding between formats.
        "cvt.rn.s32.f32 %r0, %r1;",         // Needs the integral form.
        "cvt.rn.e4m3x2.f32 %h0, %r1, %r2;", // Needs satfinite.
        "cvt.tf32.f32 %r0, %r1;",           // Must say how to round.
        "cvt.rna.relu.tf32.f32 %r0, %r1;",  // Only with the other modes.
        "cvt.u32.u16 %r0, %r1, %r2;",       // Three operands.
        "cvt.u64.u32 %r0, %r1;",            // Destination too narrow.
    ] {
        let e = reject(op);
        assert!(e.source_line.contains("cvt"), "{op}: {e}");
    }
}

//! Instructions that kernels seldom have, against values worked out by hand from the PTX manual.

use crate::common::{check, f, per_lane, reject, run_body};

const M: u64 = u32::MAX as u64;
const ONE: u64 = 0x3c00;
const TWO: u64 = 0x4000;
const HALF: u64 = 0x3800;
const MINUS_ONE: u64 = 0xbc00;
const NAN: u64 = 0x7e00;

fn s(v: i32) -> u64 {
    (v as u32).into()
}

#[test]
fn f16_flushes_operands_and_results() {
    check("add.f16 %h0, %h1, %h2;", &[1, 0x0400], 0x0401);
    check("add.ftz.f16 %h0, %h1, %h2;", &[1, 0x0400], 0x0400);
    check("sub.rn.ftz.f16 %h0, %h1, %h2;", &[0x0401, 0x0400], 0);
    check("sub.ftz.f16 %h0, %h1, %h2;", &[0x0400, 0x0401], 0x8000);
    // 2047 * 2^-24 / 2 is a tie of the largest subnormal and the smallest normal number.
    check("mul.f16 %h0, %h1, %h2;", &[0x07ff, HALF], 0x0400);
    check("mul.ftz.f16 %h0, %h1, %h2;", &[0x07ff, HALF], 0);
    check("fma.rn.ftz.f16 %h0, %h1, %h2, %h3;", &[ONE, 0x0400, 1], 0x0400);
    check("add.ftz.f16x2 %r0, %r1, %r2;", &[0x0001_3c00, 0x0400_3c00], 0x0400_4000);
    check("abs.ftz.f16 %h0, %h1;", &[0x8001], 0);
    check("abs.ftz.f16x2 %r0, %r1;", &[0xbc00_8001], 0x3c00_0000);
    check("neg.ftz.f16 %h0, %h1;", &[1], 0x8000);
    check("neg.ftz.f16x2 %r0, %r1;", &[0x3c00_83ff], 0xbc00_0000);
    check("min.ftz.f16 %h0, %h1, %h2;", &[1, 0x8001], 0x8000);
    check("max.ftz.NaN.f16x2 %r0, %r1, %r2;", &[0x7e00_0001, 0x3c00_8001], 0x7fff_0000);
}

#[test]
fn f16_saturates() {
    check("add.sat.f16 %h0, %h1, %h2;", &[ONE, ONE], ONE);
    check("add.sat.f16 %h0, %h1, %h2;", &[MINUS_ONE, HALF], 0);
    check("sub.rn.sat.f16 %h0, %h1, %h2;", &[ONE, HALF], HALF);
    check("mul.sat.f16 %h0, %h1, %h2;", &[NAN, HALF], 0);
    check("mul.ftz.sat.f16x2 %r0, %r1, %r2;", &[0x4000_0001, 0x4000_4000], 0x3c00_0000);
    check("fma.rn.sat.f16 %h0, %h1, %h2, %h3;", &[ONE, HALF, HALF], ONE);
    check("fma.rn.ftz.sat.f16x2 %r0, %r1, %r2, %r3;", &[0x3c00_3c00, 0x3800_4000, 0x0001_0000], 0x3800_3c00);
}

#[test]
fn fma_with_relu() {
    check("fma.rn.relu.f16 %h0, %h1, %h2, %h3;", &[ONE, MINUS_ONE, HALF], 0);
    check("fma.rn.relu.f16 %h0, %h1, %h2, %h3;", &[ONE, ONE, ONE], TWO);
    check("fma.rn.relu.f16 %h0, %h1, %h2, %h3;", &[0xfe00, ONE, ONE], 0x7fff);
    check("fma.rn.ftz.relu.f16x2 %r0, %r1, %r2, %r3;", &[0x3c00_0001, 0x3c00_3c00, 0x3c00_0000], 0x4000_0000);
    check("fma.rn.relu.bf16 %h0, %h1, %h2, %h3;", &[0x3f80, 0xbf80, 0], 0);
    check("fma.rn.relu.bf16x2 %r0, %r1, %r2, %r3;", &[0x3f80_3f80, 0xbf80_3f80, 0x0000_3f80], 0x0000_4000);
    // The manual does not give the bits of an out-of-bounds NaN.
    reject("fma.rn.oob.f16 %h0, %h1, %h2, %h3;");
    reject("add.ftz.bf16 %h0, %h1, %h2;");
    reject("add.relu.f16 %h0, %h1, %h2;");
}

#[test]
fn extremes_with_the_sign_of_both() {
    for (a, b, min, max) in [
        (-3.0, 2.0, -2.0, -3.0),
        (-3.0, -2.0, 2.0, 3.0),
        (3.0, 2.0, 2.0, 3.0),
        (0.0, -0.0, -0.0, -0.0),
        (f32::NAN, -2.0, -2.0, -2.0),
    ] {
        check("min.xorsign.abs.f32 %r0, %r1, %r2;", &[f(a), f(b)], f(min));
        check("max.xorsign.abs.f32 %r0, %r1, %r2;", &[f(a), f(b)], f(max));
    }
    check("min.NaN.xorsign.abs.f32 %r0, %r1, %r2;", &[f(-f32::NAN), f(2.0)], 0x7fff_ffff);
    check("max.ftz.xorsign.abs.f32 %r0, %r1, %r2;", &[0x8000_0001, 1], 0x8000_0000);
    check("max.xorsign.abs.f16 %h0, %h1, %h2;", &[MINUS_ONE, TWO], 0xc000);
    check("min.NaN.xorsign.abs.bf16 %h0, %h1, %h2;", &[0xbf80, 0xc000], 0x3f80);
    check("min.xorsign.abs.f16x2 %r0, %r1, %r2;", &[0xbc00_3c00, 0x4000_c000], 0xbc00_bc00);
    check("max.xorsign.abs.bf16x2 %r0, %r1, %r2;", &[0xbf80_3f80, 0x4000_4000], 0xc000_4000);
    check("min.relu.s32 %r0, %r1, %r2;", &[s(-5), 3], 0);
    check("max.relu.s32 %r0, %r1, %r2;", &[s(-5), 3], 3);
    check("max.relu.s16x2 %r0, %r1, %r2;", &[0xffff_0001, 0xfffe_0007], 7);
    check("min.relu.s16x2 %r0, %r1, %r2;", &[0x0009_0001, 0x0003_ffff], 0x0003_0000);
}

#[test]
fn comparisons_of_16_bit_floats() {
    check("setp.eq.ftz.f16 %p0, %h1, %h2;", &[1, 0x8000], 1);
    check("setp.eq.f16 %p0, %h1, %h2;", &[1, 0x8000], 0);
    // The lower halves give the first result. Lower: 2 < 1; upper: 1 < 2.
    let pair = [0x3c00_4000, 0x4000_3c00];
    check("setp.lt.f16x2 %p0|%p9, %r1, %r2;", &pair, 0);
    check("setp.lt.f16x2 %p9|%p0, %r1, %r2;", &pair, 1);
    check("setp.equ.ftz.f16x2 %p0|_, %r1, %r2;", &[0x0000_0001, 0x0000_8001], 1);
    check("setp.ltu.bf16x2 %p9|%p0, %r1, %r2;", &[0x7fc0_0000, 0], 1);
    for c in [0, 1] {
        let inputs = [0x3c00_3c00, 0x4000_4000, c];
        check("setp.lt.xor.f16x2 %p3|%p0, %r1, %r2, %p3;", &inputs, c ^ 1);
        check("setp.lt.and.f16x2 %p0|%p3, %r1, %r2, %p3;", &inputs, c);
    }
    check("set.lt.f16.f16 %h0, %h1, %h2;", &[ONE, TWO], ONE);
    check("set.gt.f16.u32 %h0, %r1, %r2;", &[1, 2], 0);
    check("set.gt.bf16.f32 %h0, %r1, %r2;", &[f(2.0), f(1.0)], 0x3f80);
    check("set.eq.bf16.b64 %h0, %rd1, %rd2;", &[1 << 40, 1 << 40], 0x3f80);
    check("set.eq.u16.f16 %h0, %h1, %h2;", &[ONE, ONE], 0xffff);
    check("set.ne.s16.bf16 %h0, %h1, %h2;", &[0x3f80, 0x3f80], 0);
    check("set.eq.ftz.u32.f16 %r0, %h1, %h2;", &[1, 0], M);
    check("set.lt.f16x2.f16x2 %r0, %r1, %r2;", &pair, 0x3c00_0000);
    check("set.lt.bf16x2.bf16x2 %r0, %r1, %r2;", &[0x3f80_4000, 0x4000_3f80], 0x3f80_0000);
    check("set.lt.u32.f16x2 %r0, %r1, %r2;", &pair, 0xffff_0000);
    check("set.ge.s32.bf16x2 %r0, %r1, %r2;", &[0x3f80_4000, 0x4000_3f80], 0xffff);
    check("set.lt.or.f16x2.f16x2 %r0, %r1, %r2, !%p3;", &[pair[0], pair[1], 0], 0x3c00_3c00);
    reject("setp.lt.f16x2 %p0, %r1, %r2;");
    reject("set.lt.f16.bf16 %h0, %h1, %h2;");
    reject("set.lt.ftz.bf16.f16 %h0, %h1, %h2;");
    reject("set.lt.f16x2.bf16x2 %r0, %r1, %r2;");
}

#[test]
fn conversions() {
    check("cvt.pack.sat.s16.s32 %r0, %r1, %r2;", &[70000, s(-5)], 0x7fff_fffb);
    check("cvt.pack.sat.u16.s32 %r0, %r1, %r2;", &[70000, s(-5)], 0xffff_0000);
    check("cvt.pack.sat.u8.s32.b32 %r0, %r1, %r2, %r3;", &[300, s(-1), 0x1234_5678], 0x5678_ff00);
    check("cvt.pack.sat.s8.s32.b32 %r0, %r1, %r2, 0;", &[s(-200), 5], 0x8005);
    check("cvt.pack.sat.s4.s32.b32 %r0, %r1, %r2, %r3;", &[s(-9), 5, 0x0123_4567], 0x2345_6785);
    check("cvt.pack.sat.u4.s32.b32 %r0, %r1, %r2, %r3;", &[9, 16, 1], 0x19f);
    check("cvt.pack.sat.u2.s32.b32 %r0, %r1, %r2, %r3;", &[2, 7, 0x1234_5678], 0x2345_678b);
    check("cvt.pack.sat.s2.s32.b32 %r0, %r1, %r2, %r3;", &[1, s(-7), 0], 0b0110);
    check("cvt.rn.satfinite.f16x2.f32 %r0, %r1, %r2;", &[f(1e9), f(-1e9)], 0x7bff_fbff);
    check("cvt.rz.satfinite.relu.f16x2.f32 %r0, %r1, %r2;", &[f(f32::INFINITY), f(-1.0)], 0x7bff_0000);
    check("cvt.rn.relu.satfinite.f16x2.f32 %r0, %r1, %r2;", &[f(1.0), f(f32::NAN)], 0x3c00_7fff);
    check("cvt.rz.satfinite.bf16x2.f32 %r0, %r1, %r2;", &[f(f32::INFINITY), f(-1.0)], 0x7f7f_bf80);
    check("cvt.rz.relu.satfinite.bf16x2.f32 %r0, %r1, %r2;", &[f(f32::INFINITY), f(-1.0)], 0x7f7f_0000);
    check("cvt.rn.relu.satfinite.bf16x2.f32 %r0, %r1, %r2;", &[f(2.0), f(f32::NEG_INFINITY)], 0x4000_0000);
    check("cvt.rp.f32.bf16 %r0, %h1;", &[0x3f80], f(1.0));
    check("cvt.rz.f64.bf16 %rd0, %h1;", &[0xc000], (-2f64).to_bits());
    reject("cvt.pack.sat.u8.s32 %r0, %r1, %r2;");
    reject("cvt.pack.sat.s16.s32.b32 %r0, %r1, %r2, %r3;");
}

#[test]
fn dot_products_of_two() {
    // (-1, 2) times (3, 255).
    check("dp2a.lo.s32.u32 %r0, %r1, %r2, %r3;", &[0xffff_0002, 0x0000_03ff, 10], 510 - 3 + 10);
    check("dp2a.lo.s32.s32 %r0, %r1, %r2, %r3;", &[0xffff_0002, 0x0000_03ff, 10], 10 - 2 - 3);
    check("dp2a.lo.u32.u32 %r0, %r1, %r2, %r3;", &[0xffff_0002, 0x0000_03ff, 0], 510 + 3 * 65535);
    check("dp2a.hi.u32.s32 %r0, %r1, %r2, %r3;", &[0x0001_ffff, 0x02ff_0000, 0], s(2 - 65535));
    check("dp2a.hi.s32.u32 %r0, %r1, %r2, %r3;", &[0x0001_ffff, 0x02ff_abcd, 0], s(2 - 255));
}

#[test]
fn numbers_of_some_bits() {
    check("szext.clamp.s32 %r0, %r1, %r2;", &[0x80, 8], 0xffff_ff80);
    check("szext.clamp.u32 %r0, %r1, %r2;", &[0x1ff, 8], 0xff);
    check("szext.clamp.s32 %r0, %r1, %r2;", &[M, 0], 0);
    check("szext.clamp.s32 %r0, %r1, %r2;", &[0x1234_5678, 40], 0x1234_5678);
    check("szext.wrap.s32 %r0, %r1, %r2;", &[0x1234_5688, 40], 0xffff_ff88);
    check("szext.wrap.u32 %r0, %r1, %r2;", &[M, 32], 0);
    let mask = 0b1010_1000;
    for (base, offset, want) in [
        (0, 1, 3),
        (0, 2, 5),
        (5, 1, 5),
        (5, 2, 7),
        (6, -1, 5),
        (6, -2, 3),
        (5, 0, 5),
        (4, 0, M),
        (0, 4, M),
        (2, -1, M),
        (31, i32::MIN, M),
    ] {
        check("fns.b32 %r0, %r1, %r2, %r3;", &[mask, base, s(offset)], want);
    }
}

#[test]
fn sums_behind_the_upper_half_of_a_product() {
    check("mad24.hi.u32 %r0, %r1, %r2, %r3;", &[0xff01_0000, 0x0002_0000, 5], 0x0002_0005);
    check("mad24.hi.s32 %r0, %r1, %r2, %r3;", &[0x00ff_ffff, 0x0001_0000, 5], 4);
    check("mad24.hi.sat.s32 %r0, %r1, %r2, %r3;", &[0x7f_ffff, 0x7f_ffff, 0x7fff_ffff], 0x7fff_ffff);
    check("mad.hi.sat.s32 %r0, %r1, %r2, %r3;", &[0x4000_0000, 4, 0x7fff_ffff], 0x7fff_ffff);
    check("mad.hi.sat.s32 %r0, %r1, %r2, %r3;", &[0x4000_0000, s(-8), s(i32::MIN)], s(i32::MIN));
    reject("mad.hi.sat.u32 %r0, %r1, %r2, %r3;");
}

#[test]
fn a_table_of_three_with_a_predicate() {
    for q in [0, 1] {
        let some = [0xf, 0x3c, 0x18, q];
        check("lop3.and.b32 %r9|%p0, %r1, %r2, %r3, 0x80, %p4;", &some, q);
        check("lop3.or.b32 _|%p0, %r1, %r2, %r3, 0x80, !%p4;", &[0xf, 0x3c, 0x80, q], q ^ 1);
        check("lop3.or.b32 _|%p0, %r1, %r2, %r3, 0x80, %p4;", &some, 1);
        check("lop3.or.b32 %r0|%p4, %r1, %r2, %r3, 0x80, %p4;", &some, 8);
    }
}

/// All results of an instruction are for the lanes whose guard held before it.
#[test]
fn a_result_may_be_the_guard() {
    for guard in [0, 1] {
        let some = [0xf, 0x3c, 0, guard];
        // The predicate becomes false, and the register is written nevertheless.
        let table =
            "mov.u32 %r0, 77; setp.ne.u32 %p5, 0, 0; @%p4 lop3.and.b32 %r0|%p4, %r1, %r2, %r3, 0xc0, %p5;";
        check(table, &some, if guard == 1 { 0xc } else { 77 });
        let table =
            "mov.u32 %r0, 77; setp.eq.u32 %p5, 0, 0; @!%p4 lop3.or.b32 %r0|%p4, %r1, %r2, %r3, 0xc0, %p5;";
        check(table, &some, if guard == 0 { 0xc } else { 77 });
    }
    // Lower: 1 < 2; upper: 2 < 1, and the other way round.
    for (lower, pair) in [(1, [0x4000_3c00, 0x3c00_4000]), (0, [0x3c00_4000, 0x4000_3c00])] {
        for guard in [0, 1] {
            for negated in ["", "!"] {
                let runs = guard == u64::from(negated.is_empty());
                let before = |old: u64| format!("setp.eq.u32 %p0, {old}, 1; mov.pred %p5, %p3;");
                let inputs = [pair[0], pair[1], guard];
                for old in [0, 1] {
                    let first = format!("{} @{negated}%p5 setp.lt.f16x2 %p0|%p5, %r1, %r2;", before(old));
                    check(&first, &inputs, if runs { lower } else { old });
                    let second = format!("{} @{negated}%p5 setp.lt.f16x2 %p5|%p0, %r1, %r2;", before(old));
                    check(&second, &inputs, if runs { 1 - lower } else { old });
                }
                let kept = "mov.pred %p0, %p3;";
                let itself = format!("{kept} @{negated}%p0 setp.lt.f16x2 %p0|%p5, %r1, %r2;");
                check(&itself, &inputs, if runs { lower } else { guard });
                let itself = format!("{kept} @{negated}%p0 setp.lt.f16x2 %p5|%p0, %r1, %r2;");
                check(&itself, &inputs, if runs { 1 - lower } else { guard });
            }
        }
    }
}

#[test]
fn approximations_of_16_bits() {
    check("ex2.approx.f16 %h0, %h1;", &[0x4200], 0x4800);
    check("ex2.approx.f16x2 %r0, %r1;", &[0xfc00_0000], 0x0000_3c00);
    check("ex2.approx.ftz.bf16 %h0, %h1;", &[0x4000], 0x4080);
    // 2^-127 is subnormal.
    check("ex2.approx.ftz.bf16x2 %r0, %r1;", &[0xc2fe_0001], 0x0000_3f80);
    check("tanh.approx.f16 %h0, %h1;", &[0x8000], 0x8000);
    check("tanh.approx.f16x2 %r0, %r1;", &[0x7c00_0000], 0x3c00_0000);
    check("tanh.approx.bf16 %h0, %h1;", &[0xff80], 0xbf80);
    check("tanh.approx.bf16x2 %r0, %r1;", &[0x7f80_7fff], 0x3f80_7fff);
    reject("ex2.approx.bf16 %h0, %h1;");
}

#[test]
fn a_matrix_is_transposed_in_registers() {
    let number = |row: u64, column: u64| row << 8 | column;
    // Lane t holds columns 2 (t % 4) and the next of row t / 4.
    let lane = |t: u64, at: fn(u64, u64) -> (u64, u64)| {
        let [low, high] = [0, 1].map(|k| at(t / 4, t % 4 * 2 + k));
        number(low.0, low.1) | number(high.0, high.1) << 16
    };
    let given = (0..32).map(|t| lane(t, |row, column| (row, column))).collect();
    let wanted: Vec<u64> = (0..32).map(|t| lane(t, |row, column| (column, row))).collect();
    let snippet = "movmatrix.sync.aligned.m8n8.trans.b16 %r0, %r1;";
    assert_eq!(per_lane(snippet, 32, &[given]), wanted);
    reject("movmatrix.sync.aligned.m8n8.b16 %r0, %r1;");
}

#[test]
fn atomics_on_vectors_add_each_element() {
    let two = |low: f32, high: f32| f(low) | f(high) << 32;
    // The results are the operands the other way round.
    let body = "mov.f32 %r1, 1.0; mov.f32 %r2, 2.0;
        atom.global.add.v2.f32 {%r2, %r1}, [%rd40+8], {%r1, %r2};
        st.global.v2.f32 [%rd40], {%r2, %r1};";
    let words = run_body("", body, 1, &[0, two(10.0, 20.0), 7]);
    assert_eq!(words, [two(10.0, 20.0), two(11.0, 22.0), 7]);
    let body = "mov.b16 %h1, 0x3c00; mov.b16 %h2, 0x4000;
        red.relaxed.gpu.global.add.noftz.v4.f16 [%rd40], {%h1, %h2, %h1, %h2};
        red.global.add.noftz.v2.bf16x2 [%rd40+8], {%r1, %r2};";
    assert_eq!(run_body("", body, 1, &[0x3c00_3c00_3c00_3c00, 0x3f80])[0], 0x4200_4000_4200_4000);
    for wrong in [
        "red.global.add.v8.f32 [%rd40], {%r1, %r1, %r1, %r1, %r1, %r1, %r1, %r1};",
        "red.shared.add.v2.f32 [%rd40], {%r1, %r1};",
        "red.global.add.v2.u32 [%rd40], {%r1, %r1};",
        "red.global.add.v2.f32 [%rd40], {%r1, %r1, %r1};",
        "red.global.add.noftz.v8.f16x2 [%rd40], {%r1, %r1, %r1, %r1, %r1, %r1, %r1, %r1};",
    ] {
        reject(wrong);
    }
}

//! Every arithmetic instruction against values worked out by hand from the PTX manual.

use crate::common::{check, d, f, reject, run_body};
const M: u64 = u32::MAX as u64;
const MIN: u64 = 0x8000_0000;

#[test]
fn moves() {
    check("mov.u32 %r0, %r1;", &[7], 7);
    check("mov.b64 %rd0, %rd1;", &[u64::MAX], u64::MAX);
    check("mov.b16 %h0, %h1;", &[0xabcd], 0xabcd);
    check("mov.u32 %r0, -1;", &[], M);
    check("mov.f32 %r0, 0f3F800000;", &[], f(1.0));
    check("mov.f64 %rd0, 0d3FF0000000000000;", &[], d(1.0));
    check("mov.f32 %r0, 1.5;", &[], f(1.5));
    check("mov.pred %p0, %p1;", &[1], 1);
    check("mov.pred %p0, -1;", &[], 1);
    check("mov.pred %p0, 0;", &[], 0);
    check("mov.b64 %rd0, {%r1, %r2};", &[0x1111, 0x2222], 0x2222_0000_1111);
    check("mov.b32 %r0, {%h1, %h2};", &[0x1111, 0x2222], 0x2222_1111);
    check("mov.b64 %rd0, {%h1, %h2, %h3, %h4};", &[1, 2, 3, 4], 0x0004_0003_0002_0001);
    check("mov.b64 {%r0, %r9}, %rd1;", &[0x2222_0000_1111], 0x1111);
    check("mov.b64 {_, %r0}, %rd1;", &[0x2222_0000_1111], 0x2222);
    check("mov.b32 {%h9, %h0}, %r1;", &[0xaaaa_bbbb], 0xaaaa);
    check("mov.b64 {%h9, %h8, %h0, %h7}, %rd1;", &[0x0004_0003_0002_0001], 3);
}

#[test]
fn integer_add_sub() {
    check("add.u32 %r0, %r1, %r2;", &[M, 2], 1);
    check("add.s32 %r0, %r1, -3;", &[1], M - 1);
    check("add.s64 %rd0, %rd1, %rd2;", &[u64::MAX, 1], 0);
    check("add.s16 %h0, %h1, %h2;", &[0xffff, 2], 1);
    check("add.sat.s32 %r0, %r1, %r2;", &[0x7fff_ffff, 1], 0x7fff_ffff);
    check("add.sat.s32 %r0, %r1, %r2;", &[MIN, M], MIN);
    check("sub.sat.s32 %r0, %r1, %r2;", &[MIN, 1], MIN);
    check("sub.u32 %r0, %r1, %r2;", &[0, 1], M);
    check("sub.s64 %rd0, %rd1, %rd2;", &[0, 1], u64::MAX);
    check("sub.u16 %h0, %h1, %h2;", &[0, 1], 0xffff);
    check("add.u16x2 %r0, %r1, %r2;", &[0xffff_0001, 0x0001_ffff], 0);
    check("min.s16x2 %r0, %r1, %r2;", &[0xffff_0001, 0x0001_ffff], M);
    check("max.u16x2 %r0, %r1, %r2;", &[0xffff_0001, 0x0001_ffff], M);
    check("sad.u32 %r0, %r1, %r2, %r3;", &[3, 10, 100], 107);
    check("sad.s32 %r0, %r1, %r2, %r3;", &[M, 1, 0], 2);
}

#[test]
fn carry_chain() {
    let add = "add.cc.u32 %r5, %r1, %r2; addc.u32 %r0, %r3, %r4;";
    check(add, &[M, 1, 10, 20], 31);
    check(add, &[M, 0, 10, 20], 30);
    let chain = "add.cc.u32 %r5, %r1, %r2; addc.cc.u32 %r6, %r3, 0; addc.u32 %r0, 0, 0;";
    check(chain, &[M, 1, M], 1);
    check(chain, &[M, 0, M], 0);
    // Without .cc the flag stays as it was.
    check("add.cc.u32 %r5, %r1, 1; addc.u32 %r6, 1, 1; addc.u32 %r0, 0, 0;", &[M], 1);
    let sub = "sub.cc.u32 %r5, %r1, %r2; subc.u32 %r0, %r3, %r4;";
    check(sub, &[0, 1, 10, 3], 6);
    check(sub, &[1, 1, 10, 3], 7);
    check("add.cc.u64 %rd5, %rd1, %rd2; addc.u64 %rd0, 0, 0;", &[u64::MAX, 1], 1);
}

#[test]
fn integer_mul() {
    check("mul.lo.u32 %r0, %r1, %r2;", &[0x1_0001, 0x1_0001], 0x2_0001);
    check("mul.hi.u32 %r0, %r1, %r2;", &[M, M], 0xffff_fffe);
    check("mul.hi.s32 %r0, %r1, %r2;", &[M, M], 0);
    check("mul.hi.s32 %r0, %r1, %r2;", &[MIN, 2], M);
    check("mul.hi.u64 %rd0, %rd1, %rd2;", &[u64::MAX, u64::MAX], u64::MAX - 1);
    check("mul.hi.s64 %rd0, %rd1, %rd2;", &[u64::MAX, 1], u64::MAX);
    check("mul.lo.s64 %rd0, %rd1, %rd2;", &[u64::MAX, 5], (-5i64) as u64);
    check("mul.hi.u16 %h0, %h1, %h2;", &[0xffff, 0xffff], 0xfffe);
    check("mul.lo.s16 %h0, %h1, %h2;", &[0xffff, 2], 0xfffe);
    check("mul.wide.u32 %rd0, %r1, %r2;", &[M, M], 0xffff_fffe_0000_0001);
    check("mul.wide.s32 %rd0, %r1, %r2;", &[M, 2], (-2i64) as u64);
    check("mul.wide.u16 %r0, %h1, %h2;", &[0xffff, 0xffff], 0xfffe_0001);
    check("mul.wide.s16 %r0, %h1, %h2;", &[0xffff, 3], M - 2);
    check("mad.lo.u32 %r0, %r1, %r2, %r3;", &[3, 4, 5], 17);
    check("mad.lo.s64 %rd0, %rd1, %rd2, %rd3;", &[u64::MAX, 4, 5], 1);
    check("mad.hi.u32 %r0, %r1, %r2, %r3;", &[M, M, 5], 3);
    check("mad.hi.u64 %rd0, %rd1, %rd2, %rd3;", &[u64::MAX, 2, 5], 6);
    check("mad.wide.u32 %rd0, %r1, %r2, %rd3;", &[M, 2, 1], 0x1_ffff_ffff);
    check("mad.wide.s32 %rd0, %r1, %r2, %rd3;", &[M, 2, 1], u64::MAX);
    check("mad.wide.u16 %r0, %h1, %h2, %r3;", &[0xffff, 2, 1], 0x1_ffff);
    check("mad.wide.s16 %r0, %h1, %h2, %r3;", &[0xffff, 2, 1], M);
    check("mul24.lo.u32 %r0, %r1, %r2;", &[0xff00_0003, 5], 15);
    check("mul24.lo.s32 %r0, %r1, %r2;", &[0x00ff_ffff, 5], M - 4);
    check("mul24.hi.u32 %r0, %r1, %r2;", &[0x10000, 0x20000], 0x20000);
    check("mad24.lo.s32 %r0, %r1, %r2, %r3;", &[0x00ff_ffff, 5, 6], 1);
    check("dp4a.u32.u32 %r0, %r1, %r2, %r3;", &[0x0102_0304, 0x0101_01ff, 1], 1 + 1 + 2 + 3 + 4 * 255);
    check("dp4a.s32.s32 %r0, %r1, %r2, %r3;", &[0x0102_0304, 0x0101_01ff, 1], 3);
    check("dp4a.u32.s32 %r0, %r1, %r2, %r3;", &[0xff, 0xff, 0], (-255i32) as u32 as u64);
}

#[test]
fn integer_div_rem() {
    check("div.u32 %r0, %r1, %r2;", &[M, 16], 0x0fff_ffff);
    check("div.s32 %r0, %r1, %r2;", &[(-7i32) as u32 as u64, 2], (-3i32) as u32 as u64);
    check("rem.s32 %r0, %r1, %r2;", &[(-7i32) as u32 as u64, 2], M);
    check("rem.s32 %r0, %r1, %r2;", &[7, (-2i32) as u32 as u64], 1);
    check("rem.u64 %rd0, %rd1, %rd2;", &[u64::MAX, 10], 5);
    check("div.s32 %r0, %r1, %r2;", &[MIN, M], MIN);
    check("rem.s32 %r0, %r1, %r2;", &[MIN, M], 0);
    check("div.u32 %r0, %r1, %r2;", &[5, 0], M);
    check("rem.u32 %r0, %r1, %r2;", &[5, 0], M);
    check("div.s64 %rd0, %rd1, %rd2;", &[5, 0], u64::MAX);
    check("div.u16 %h0, %h1, %h2;", &[0xffff, 2], 0x7fff);
}

#[test]
fn abs_neg_min_max() {
    check("abs.s32 %r0, %r1;", &[M], 1);
    check("abs.s32 %r0, %r1;", &[MIN], MIN);
    check("abs.s64 %rd0, %rd1;", &[(-9i64) as u64], 9);
    check("neg.s32 %r0, %r1;", &[1], M);
    check("neg.s16 %h0, %h1;", &[1], 0xffff);
    check("min.u32 %r0, %r1, %r2;", &[M, 1], 1);
    check("min.s32 %r0, %r1, %r2;", &[M, 1], M);
    check("max.s32 %r0, %r1, %r2;", &[M, 1], 1);
    check("max.u64 %rd0, %rd1, %rd2;", &[u64::MAX, 1], u64::MAX);
    check("max.s64 %rd0, %rd1, %rd2;", &[u64::MAX, 1], 1);
    check("min.s16 %h0, %h1, %h2;", &[0xffff, 1], 0xffff);
}

#[test]
fn logic() {
    check("and.b32 %r0, %r1, %r2;", &[0b1100, 0b1010], 0b1000);
    check("or.b64 %rd0, %rd1, %rd2;", &[0b1100, 0b1010], 0b1110);
    check("xor.b16 %h0, %h1, %h2;", &[0b1100, 0b1010], 0b0110);
    check("not.b32 %r0, %r1;", &[0], M);
    check("not.b64 %rd0, %rd1;", &[0], u64::MAX);
    check("cnot.b32 %r0, %r1;", &[0], 1);
    check("cnot.b32 %r0, %r1;", &[5], 0);
    for (a, b) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        check("and.pred %p0, %p1, %p2;", &[a, b], a & b);
        check("or.pred %p0, %p1, %p2;", &[a, b], a | b);
        check("xor.pred %p0, %p1, %p2;", &[a, b], a ^ b);
        check("not.pred %p0, %p1; or.pred %p0, %p0, %p2;", &[a, b], (a ^ 1) | b);
    }
    // The table is indexed by the bits of a (high), b, c (low).
    let (a, b, c) = (0xaaaa_5555u32, 0xcccc_3333, 0xf0f0_1234);
    let three = &[a.into(), b.into(), c.into()];
    check("lop3.b32 %r0, %r1, %r2, %r3, 0x80;", three, (a & b & c).into());
    check("lop3.b32 %r0, %r1, %r2, %r3, 0x96;", three, (a ^ b ^ c).into());
    check("lop3.b32 %r0, %r1, %r2, %r3, 0xE2;", three, lut(a, b, c, 0xe2));
}

/// Evaluates a look-up table bit by bit: the definition of `lop3`.
fn lut(a: u32, b: u32, c: u32, table: u32) -> u64 {
    (0..32).fold(0, |r, i| {
        let k = (a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1;
        r | u64::from(table >> k & 1) << i
    })
}

#[test]
fn shifts_clamp_their_count() {
    check("shl.b32 %r0, %r1, %r2;", &[1, 31], MIN);
    check("shl.b32 %r0, %r1, %r2;", &[1, 32], 0);
    check("shl.b32 %r0, %r1, %r2;", &[1, M], 0);
    check("shl.b16 %h0, %h1, %r2;", &[1, 16], 0);
    check("shl.b64 %rd0, %rd1, %r2;", &[1, 63], 1 << 63);
    check("shl.b64 %rd0, %rd1, %r2;", &[1, 64], 0);
    check("shr.u32 %r0, %r1, %r2;", &[MIN, 31], 1);
    check("shr.u32 %r0, %r1, %r2;", &[MIN, 32], 0);
    check("shr.s32 %r0, %r1, %r2;", &[MIN, 32], M);
    check("shr.s32 %r0, %r1, %r2;", &[MIN, 1000], M);
    check("shr.s64 %rd0, %rd1, %r2;", &[1 << 63, 200], u64::MAX);
    check("shr.u64 %rd0, %rd1, %r2;", &[1 << 63, 64], 0);
    check("shr.b32 %r0, %r1, 4;", &[0x100], 0x10);
    check("shr.s16 %h0, %h1, %r2;", &[0x8000, 4], 0xf800);
    let (lo, hi) = (0x89ab_cdef, 0x0123_4567);
    check("shf.l.wrap.b32 %r0, %r1, %r2, %r3;", &[lo, hi, 8], 0x2345_6789);
    check("shf.r.wrap.b32 %r0, %r1, %r2, %r3;", &[lo, hi, 8], 0x6789_abcd);
    check("shf.l.wrap.b32 %r0, %r1, %r2, %r3;", &[lo, hi, 40], 0x2345_6789);
    check("shf.l.clamp.b32 %r0, %r1, %r2, %r3;", &[lo, hi, 40], lo);
    check("shf.r.clamp.b32 %r0, %r1, %r2, %r3;", &[lo, hi, 40], hi);
    check("shf.r.wrap.b32 %r0, %r1, %r2, %r3;", &[lo, hi, 32], lo);
    check("shf.l.clamp.b32 %r0, %r1, %r2, 0;", &[lo, hi], hi);
}

#[test]
fn bit_fields() {
    check("bfe.u32 %r0, %r1, 8, 8;", &[0x1234_5678], 0x56);
    check("bfe.s32 %r0, %r1, 8, 8;", &[0x0000_8000], 0xffff_ff80);
    check("bfe.u32 %r0, %r1, 0, 0;", &[M], 0);
    check("bfe.s32 %r0, %r1, 0, 0;", &[M], 0);
    check("bfe.u32 %r0, %r1, 24, 32;", &[0xab00_0000], 0xab);
    check("bfe.s32 %r0, %r1, 24, 32;", &[0xab00_0000], 0xffff_ffab);
    check("bfe.s32 %r0, %r1, 40, 4;", &[MIN], M); // Beyond the top: sign bits.
    check("bfe.u32 %r0, %r1, 40, 4;", &[MIN], 0);
    check("bfe.u32 %r0, %r1, 0, 32;", &[0x1234_5678], 0x1234_5678);
    // Only the low byte counts.
    check("bfe.u32 %r0, %r1, %r2, %r3;", &[0x1234_5678, 0x104, 0x104], 7);
    check("bfe.u64 %rd0, %rd1, 60, 8;", &[0xf000_0000_0000_0000], 0xf);
    check("bfe.s64 %rd0, %rd1, 60, 4;", &[0xf000_0000_0000_0000], u64::MAX);
    check("bfi.b32 %r0, %r1, %r2, 8, 8;", &[0xab, M], 0xffff_abff);
    check("bfi.b32 %r0, %r1, %r2, 28, 8;", &[0xab, 0], 0xb000_0000);
    check("bfi.b32 %r0, %r1, %r2, 8, 0;", &[0xab, 7], 7);
    check("bfi.b32 %r0, %r1, %r2, 32, 8;", &[0xab, 7], 7);
    check("bfi.b32 %r0, %r1, %r2, 0, 32;", &[0xab, M], 0xab);
    check("bfi.b64 %rd0, %rd1, %rd2, 32, 32;", &[5, 7], 0x5_0000_0007);
    check("brev.b32 %r0, %r1;", &[1], MIN);
    check("brev.b64 %rd0, %rd1;", &[1], 1 << 63);
    check("clz.b32 %r0, %r1;", &[0], 32);
    check("clz.b64 %r0, %rd1;", &[1], 63);
    check("popc.b32 %r0, %r1;", &[M], 32);
    check("popc.b64 %r0, %rd1;", &[u64::MAX], 64);
    check("bfind.u32 %r0, %r1;", &[0x10], 4);
    check("bfind.u32 %r0, %r1;", &[0], M);
    check("bfind.s32 %r0, %r1;", &[M], M);
    check("bfind.s32 %r0, %r1;", &[0xffff_fffd], 1);
    check("bfind.shiftamt.u32 %r0, %r1;", &[0x10], 27);
    check("bfind.u64 %r0, %rd1;", &[1 << 40], 40);
    check("bfind.shiftamt.s64 %r0, %rd1;", &[1 << 40], 23);
    check("bmsk.clamp.b32 %r0, 4, 8;", &[], 0xff0);
    check("bmsk.clamp.b32 %r0, 28, 40;", &[], 0xf000_0000);
    check("bmsk.wrap.b32 %r0, 33, 1;", &[], 2);
}

#[test]
fn permute() {
    let (a, b) = (0x3322_1180, 0x7766_5544);
    let p = |mode: &str, c: u64, want: u64| {
        check(&format!("prmt.b32{mode} %r0, %r1, %r2, %r3;"), &[a, b, c], want);
    };
    p("", 0x3210, a);
    p("", 0x7654, b);
    p("", 0x0123, 0x8011_2233);
    p("", 0x8888, M); // Sign of byte 0.
    p("", 0x9090, 0x0080_0080);
    p(".f4e", 0, a);
    p(".f4e", 3, 0x6655_4433);
    p(".b4e", 0, 0x5566_7780);
    p(".b4e", 1, 0x6677_8011);
    p(".rc8", 2, 0x2222_2222);
    p(".ecl", 0, a);
    p(".ecl", 2, 0x3322_2222);
    p(".ecr", 0, 0x8080_8080);
    p(".ecr", 2, 0x2222_1180);
    p(".rc16", 0, 0x1180_1180);
    p(".rc16", 1, 0x3322_3322);
    p(".rc16", 3, 0x3322_3322);
}

#[test]
fn comparisons() {
    check("setp.lt.s32 %p0, %r1, %r2;", &[M, 1], 1);
    check("setp.lt.u32 %p0, %r1, %r2;", &[M, 1], 0);
    check("setp.lo.u32 %p0, %r1, %r2;", &[1, M], 1);
    check("setp.ls.u32 %p0, %r1, %r2;", &[1, 1], 1);
    check("setp.hi.u32 %p0, %r1, %r2;", &[1, 1], 0);
    check("setp.hs.u32 %p0, %r1, %r2;", &[1, 1], 1);
    check("setp.eq.b32 %p0, %r1, %r2;", &[5, 5], 1);
    check("setp.ne.b64 %p0, %rd1, %rd2;", &[5, 5], 0);
    check("setp.ge.s64 %p0, %rd1, 0;", &[u64::MAX], 0);
    check("setp.gt.u64 %p0, %rd1, 0;", &[u64::MAX], 1);
    check("setp.le.s16 %p0, %h1, 0;", &[0xffff], 1);
    check("setp.eq.u16 %p0, %h1, 7;", &[7], 1);
    // Combined with a predicate; the second result uses the negated comparison.
    for c in [0, 1] {
        check("setp.eq.and.u32 %p0, %r1, 1, %p2;", &[1, c], c);
        check("setp.eq.or.u32 %p0, %r1, 1, %p2;", &[2, c], c);
        check("setp.eq.xor.u32 %p0, %r1, 1, %p2;", &[1, c], c ^ 1);
        check("setp.eq.and.u32 %p0, %r1, 1, !%p2;", &[1, c], c ^ 1);
        check("setp.eq.and.u32 %p9|%p0, %r1, 1, %p2;", &[2, c], c);
        check("setp.eq.and.u32 %p9|%p0, %r1, 1, %p2;", &[1, c], 0);
    }
    check("setp.eq.u32 %p9|%p0, %r1, 1;", &[1], 0);
    check("setp.eq.u32 %p0|%p9, %r1, 1;", &[1], 1);
    check("setp.eq.u32 _|%p0, %r1, 1;", &[2], 1);
    check("set.eq.u32.u32 %r0, %r1, %r2;", &[1, 1], M);
    check("set.lt.f32.s32 %r0, %r1, %r2;", &[M, 1], f(1.0));
    check("set.gt.and.u32.f32 %r0, %r1, %r2, %p3;", &[f(2.0), f(1.0), 0], 0);
    check("selp.b32 %r0, %r1, %r2, %p3;", &[1, 2, 1], 1);
    check("selp.b64 %rd0, %rd1, %rd2, %p3;", &[1, 2, 0], 2);
    check("selp.b16 %h0, %h1, %h2, %p3;", &[1, 2, 0], 2);
    check("selp.f32 %r0, 0f3F800000, 0f00000000, %p1;", &[1], f(1.0));
    check("slct.u32.s32 %r0, %r1, %r2, %r3;", &[1, 2, 0], 1);
    check("slct.u32.s32 %r0, %r1, %r2, %r3;", &[1, 2, M], 2);
    check("slct.u64.f32 %rd0, %rd1, %rd2, %r3;", &[1, 2, f(-0.0)], 1);
    check("slct.u64.f32 %rd0, %rd1, %rd2, %r3;", &[1, 2, f(f32::NAN)], 2);
}

#[test]
fn float_comparisons_and_nan() {
    let ordered = [("eq", false), ("ne", false), ("lt", false), ("le", false), ("gt", false), ("ge", false)];
    for (op, with_nan) in ordered {
        check(&format!("setp.{op}.f32 %p0, %r1, %r2;"), &[f(f32::NAN), f(1.0)], with_nan.into());
        check(&format!("setp.{op}u.f32 %p0, %r1, %r2;"), &[f(f32::NAN), f(1.0)], 1);
        check(&format!("setp.{op}u.ftz.f32 %p0, %r1, %r2;"), &[f(f32::NAN), f(1.0)], 1);
        check(&format!("setp.{op}u.f64 %p0, %rd1, %rd2;"), &[d(1.0), d(f64::NAN)], 1);
        let (one, two) = (f(1.0), f(2.0));
        let expect = |a: f32, b: f32| {
            u64::from(match op {
                "eq" => a == b,
                "ne" => a != b,
                "lt" => a < b,
                "le" => a <= b,
                "gt" => a > b,
                _ => a >= b,
            })
        };
        for u in ["", "u", ".ftz", "u.ftz"] {
            check(&format!("setp.{op}{u}.f32 %p0, %r1, %r2;"), &[one, two], expect(1.0, 2.0));
            check(&format!("setp.{op}{u}.f32 %p0, %r1, %r2;"), &[two, two], expect(2.0, 2.0));
        }
        check(&format!("setp.{op}.f16 %p0, %h1, %h2;"), &[0x3c00, 0x4000], expect(1.0, 2.0));
        check(&format!("setp.{op}.bf16 %p0, %h1, %h2;"), &[0x3f80, 0x3f80], expect(1.0, 1.0));
    }
    check("setp.num.f32 %p0, %r1, %r2;", &[f(1.0), f(2.0)], 1);
    check("setp.num.f32 %p0, %r1, %r2;", &[f(1.0), f(f32::NAN)], 0);
    check("setp.nan.f64 %p0, %rd1, %rd2;", &[d(f64::NAN), d(1.0)], 1);
    check("setp.eq.ftz.f32 %p0, %r1, %r2;", &[1, 0], 1);
    check("setp.eq.f32 %p0, %r1, %r2;", &[1, 0], 0);
    check("setp.eq.f32 %p0, %r1, %r2;", &[f(-0.0), f(0.0)], 1);
    for (name, value, want) in [
        ("finite", 1.0, 1),
        ("finite", f32::INFINITY, 0),
        ("infinite", f32::NEG_INFINITY, 1),
        ("number", f32::NAN, 0),
        ("notanumber", f32::NAN, 1),
        ("normal", f32::from_bits(1), 0),
        ("normal", 1.0, 1),
        ("normal", -0.0, 1),
        ("normal", f32::INFINITY, 0),
        ("normal", f32::NAN, 0),
        ("subnormal", 0.0, 0),
        ("subnormal", f32::from_bits(1), 1),
    ] {
        check(&format!("testp.{name}.f32 %p0, %r1;"), &[f(value)], want);
    }
    check("testp.finite.f64 %p0, %rd1;", &[d(f64::INFINITY)], 0);
    check("testp.normal.f64 %p0, %rd1;", &[d(0.0)], 1);
}

#[test]
fn directed_rounding() {
    let (one, third) = (f(1.0), f(1.0 / 3.0));
    // 1/3 in f32 is above the third.
    for (mode, result) in [("rn", third), ("rz", third - 1), ("rm", third - 1), ("rp", third)] {
        check(&format!("div.{mode}.f32 %r0, %r1, %r2;"), &[one, f(3.0)], result);
        check(&format!("rcp.{mode}.f32 %r0, %r1;"), &[f(3.0)], result);
        // An exact zero is negative only when rounding down.
        let zero = if mode == "rm" { MIN } else { 0 };
        check(&format!("sub.{mode}.f32 %r0, %r1, %r2;"), &[one, one], zero);
        check(&format!("fma.{mode}.f32 %r0, %r1, %r2, %r3;"), &[one, one, f(-1.0)], zero);
    }
    check("add.rp.f32 %r0, %r1, %r2;", &[one, 1], one + 1);
    check("add.rm.f32 %r0, %r1, %r2;", &[one, 0x8000_0001], one - 1);
    check("add.rp.ftz.f32 %r0, %r1, %r2;", &[one, 1], one);
    check("add.rp.sat.f32 %r0, %r1, %r2;", &[one, 1], one);
    check("mul.rz.f32 %r0, %r1, %r2;", &[f(f32::MAX), f(2.0)], f(f32::MAX));
    check("mul.rp.f64 %rd0, %rd1, %rd2;", &[d(f64::MIN_POSITIVE), d(f64::MIN_POSITIVE)], 1);
    check("sqrt.rp.f64 %rd0, %rd1;", &[d(2.0)], d(2f64.sqrt()));
    check("sqrt.rm.f64 %rd0, %rd1;", &[d(2.0)], d(2f64.sqrt()) - 1);
    check("fma.rm.f64 %rd0, %rd1, %rd2, %rd3;", &[d(1.0), d(1.0), d(-1e-300)], d(1.0) - 1);
    for op in ["add.rz.f16 %h0, %h1, %h2;", "ex2.approx.rz.f32 %r0, %r1;", "add.rz.u32 %r0, %r1, %r2;"] {
        reject(op);
    }
}

#[test]
fn a_nan_result_has_no_payload() {
    const NAN: u64 = 0x7fff_ffff;
    let nan = 0xffc0_1234;
    for op in ["add.f32", "sub.rn.f32", "mul.ftz.f32", "div.rn.f32", "div.full.f32", "div.approx.ftz.f32"] {
        check(&format!("{op} %r0, %r1, %r2;"), &[nan, f(1.0)], NAN);
        check(&format!("{op} %r0, %r1, %r2;"), &[f(1.0), nan], NAN);
    }
    check("sub.f32 %r0, %r1, %r2;", &[f(f32::INFINITY), f(f32::INFINITY)], NAN);
    check("mul.ftz.f32 %r0, %r1, %r2;", &[1, f(f32::INFINITY)], NAN);
    check("fma.rn.f32 %r0, %r1, %r2, %r3;", &[f(1.0), f(1.0), nan], NAN);
    check("fma.rn.sat.f32 %r0, %r1, %r2, %r3;", &[f(1.0), f(1.0), nan], 0);
    check("sqrt.rn.f32 %r0, %r1;", &[f(-1.0)], NAN);
    check("rsqrt.approx.f32 %r0, %r1;", &[f(-1.0)], NAN);
    check("lg2.approx.ftz.f32 %r0, %r1;", &[f(-1.0)], NAN);
    check("add.f16 %h0, %h1, %h2;", &[0xfe12, 0x3c00], 0x7fff);
    check("fma.rn.bf16 %h0, %h1, %h2, %h3;", &[0x7f80, 0, 0], 0x7fff);
    // Instructions that only move bits keep them.
    check("mov.f32 %r0, %r1;", &[nan], nan);
    check("selp.f32 %r0, %r1, %r2, %p3;", &[nan, 0, 1], nan);
}

#[test]
fn the_ends_of_the_approximations() {
    let (huge, limit) = (f(3e38), f(2f32.powi(126)));
    for op in ["div.approx.f32", "div.approx.ftz.f32"] {
        let op = format!("{op} %r0, %r1, %r2;");
        check(&op, &[f(f32::MAX), huge], 0);
        check(&op, &[f(f32::MAX), f(-3e38)], MIN);
        check(&op, &[f(f32::INFINITY), huge], 0x7fff_ffff);
        check(&op, &[f(2.0), limit], f(2f32.powi(-125)));
    }
    check("div.full.f32 %r0, %r1, %r2;", &[huge, huge], f(1.0));
    const NAN: u64 = 0x7fff_ffff_0000_0000;
    let (inf, minus_inf, tiny) = (d(f64::INFINITY), d(f64::NEG_INFINITY), 1u64 << 51);
    for (operand, rcp, rsqrt) in [
        (d(4.0), d(0.25), d(0.5)),
        // The lower words of the operand and of the result are ignored.
        (d(4.0) + 0xffff_ffff, d(0.25), d(0.5)),
        (d(3.0), d(1.0 / 3.0) >> 32 << 32, d(1.0 / 3f64.sqrt()) >> 32 << 32),
        (0, inf, inf),
        (1 << 63, minus_inf, minus_inf),
        (tiny, inf, inf),
        (tiny | 1 << 63, minus_inf, minus_inf),
        (inf, 0, 0),
        (minus_inf, 1 << 63, NAN),
        (d(-4.0), d(-0.25), NAN),
        (d(f64::NAN), NAN, NAN),
        // A NaN only by its lower word counts as infinity, because only the upper word is read.
        (inf + 1, 0, 0),
        // The reciprocal is subnormal.
        (d(2f64.powi(1023)), 0, d(2f64.powi(-512) * 2f64.sqrt()) >> 32 << 32),
    ] {
        check("rcp.approx.ftz.f64 %rd0, %rd1;", &[operand], rcp);
        check("rsqrt.approx.ftz.f64 %rd0, %rd1;", &[operand], rsqrt);
    }
}

#[test]
fn f32_and_f64_arithmetic() {
    check("add.rn.f32 %r0, %r1, %r2;", &[f(0.1), f(0.2)], f(0.1 + 0.2));
    check("add.f32 %r0, %r1, 0f3F800000;", &[f(2.5)], f(3.5));
    check("sub.f32 %r0, %r1, %r2;", &[f(1.0), f(3.0)], f(-2.0));
    check("mul.f32 %r0, %r1, %r2;", &[f(1.5), f(3.0)], f(4.5));
    check("mul.rn.ftz.f32 %r0, %r1, %r2;", &[1, f(1.0)], 0);
    check("mul.rn.f32 %r0, %r1, %r2;", &[1, f(1.0)], 1);
    check("add.ftz.f32 %r0, %r1, %r2;", &[0x8000_0001, f(-0.0)], MIN);
    check("add.sat.f32 %r0, %r1, %r2;", &[f(0.7), f(0.7)], f(1.0));
    check("add.sat.f32 %r0, %r1, %r2;", &[f(-3.0), f(0.7)], 0);
    check("add.sat.f32 %r0, %r1, %r2;", &[f(f32::NAN), f(0.7)], 0);
    // One rounding: the product alone would round to 1.
    let e = 1.0 + f32::EPSILON;
    check(
        "fma.rn.f32 %r0, %r1, %r2, %r3;",
        &[f(e), f(1.0 - f32::EPSILON), f(-1.0)],
        f(-(f32::EPSILON * f32::EPSILON)),
    );
    check("mad.rn.f32 %r0, %r1, %r2, %r3;", &[f(2.0), f(3.0), f(4.0)], f(10.0));
    check("fma.rn.f64 %rd0, %rd1, %rd2, %rd3;", &[d(2.0), d(3.0), d(4.0)], d(10.0));
    check("div.rn.f32 %r0, %r1, %r2;", &[f(1.0), f(3.0)], f(1.0 / 3.0));
    check("div.full.f32 %r0, %r1, %r2;", &[f(1.0), f(4.0)], f(0.25));
    check("div.approx.ftz.f32 %r0, %r1, %r2;", &[f(1.0), f(4.0)], f(0.25));
    check("div.rn.f32 %r0, %r1, %r2;", &[f(1.0), f(0.0)], f(f32::INFINITY));
    check("rcp.rn.f32 %r0, %r1;", &[f(4.0)], f(0.25));
    check("rcp.approx.ftz.f32 %r0, %r1;", &[1], f(f32::INFINITY));
    check("sqrt.rn.f32 %r0, %r1;", &[f(2.0)], f(2f32.sqrt()));
    check("sqrt.approx.f32 %r0, %r1;", &[f(9.0)], f(3.0));
    check("rsqrt.approx.f32 %r0, %r1;", &[f(4.0)], f(0.5));
    check("ex2.approx.f32 %r0, %r1;", &[f(5.0)], f(32.0));
    check("ex2.approx.ftz.f32 %r0, %r1;", &[f(-140.0)], 0);
    check("lg2.approx.f32 %r0, %r1;", &[f(0.125)], f(-3.0));
    check("sin.approx.f32 %r0, %r1;", &[f(0.0)], 0);
    check("cos.approx.f32 %r0, %r1;", &[f(0.0)], f(1.0));
    check("tanh.approx.f32 %r0, %r1;", &[f(100.0)], f(1.0));
    check("abs.f32 %r0, %r1;", &[f(-1.5)], f(1.5));
    check("abs.ftz.f32 %r0, %r1;", &[0x8000_0001], 0);
    check("neg.f32 %r0, %r1;", &[f(0.0)], MIN);
    check("neg.f64 %rd0, %rd1;", &[d(1.5)], d(-1.5));
    check("abs.f64 %rd0, %rd1;", &[d(-1.5)], d(1.5));
    check("add.f64 %rd0, %rd1, %rd2;", &[d(0.1), d(0.2)], d(0.1 + 0.2));
    check("sub.rn.f64 %rd0, %rd1, %rd2;", &[d(0.1), d(0.2)], d(0.1 - 0.2));
    check("mul.f64 %rd0, %rd1, %rd2;", &[d(0.1), d(0.2)], d(0.1 * 0.2));
    check("div.rn.f64 %rd0, %rd1, %rd2;", &[d(1.0), d(3.0)], d(1.0 / 3.0));
    check("sqrt.rn.f64 %rd0, %rd1;", &[d(2.0)], d(2f64.sqrt()));
    check("rcp.rn.f64 %rd0, %rd1;", &[d(8.0)], d(0.125));
    check("copysign.f32 %r0, %r1, %r2;", &[f(-1.0), f(3.0)], f(-3.0));
    check("copysign.f64 %rd0, %rd1, %rd2;", &[d(1.0), d(-3.0)], d(3.0));
}

#[test]
fn float_min_max() {
    const NAN: u64 = 0x7fff_ffff;
    let nan = f(f32::NAN);
    check("min.f32 %r0, %r1, %r2;", &[f(1.0), nan], f(1.0));
    check("max.f32 %r0, %r1, %r2;", &[nan, f(1.0)], f(1.0));
    check("max.f32 %r0, %r1, %r2;", &[nan, nan], NAN);
    check("min.NaN.f32 %r0, %r1, %r2;", &[f(1.0), nan], NAN);
    check("max.NaN.f32 %r0, %r1, %r2;", &[f(1.0), f(2.0)], f(2.0));
    check("min.f32 %r0, %r1, %r2;", &[f(0.0), f(-0.0)], f(-0.0));
    check("max.f32 %r0, %r1, %r2;", &[f(-0.0), f(0.0)], 0);
    check("max.ftz.f32 %r0, %r1, %r2;", &[1, f(-1.0)], 0);
    check("min.f64 %rd0, %rd1, %rd2;", &[d(f64::NAN), d(1.0)], d(1.0));
    check("max.f64 %rd0, %rd1, %rd2;", &[d(2.0), d(1.0)], d(2.0));
    check("max.f16 %h0, %h1, %h2;", &[0x3c00, 0x7e00], 0x3c00);
    check("max.NaN.f16 %h0, %h1, %h2;", &[0x3c00, 0x7e00], 0x7fff);
    check("min.bf16x2 %r0, %r1, %r2;", &[0x3f80_4000, 0x4000_3f80], 0x3f80_3f80);
    check("max.NaN.bf16x2 %r0, %r1, %r2;", &[0x7fc0_4000, 0x4000_3f80], 0x7fff_4000);
}

#[test]
fn half_arithmetic() {
    // f16: 1.0 = 3c00, 2.0 = 4000, 3.0 = 4200; bf16: 1.0 = 3f80, 2.0 = 4000, 3.0 = 4040.
    check("add.f16 %h0, %h1, %h2;", &[0x3c00, 0x4000], 0x4200);
    check("sub.rn.f16 %h0, %h1, %h2;", &[0x4200, 0x4000], 0x3c00);
    check("mul.f16 %h0, %h1, %h2;", &[0x4000, 0x4200], 0x4600);
    check("fma.rn.f16 %h0, %h1, %h2, %h3;", &[0x4000, 0x3c00, 0x3c00], 0x4200);
    check("add.bf16 %h0, %h1, %h2;", &[0x3f80, 0x4000], 0x4040);
    check("mul.bf16 %h0, %h1, %h2;", &[0x4000, 0x4040], 0x40c0);
    check("fma.rn.bf16 %h0, %h1, %h2, %h3;", &[0x4000, 0x3f80, 0x3f80], 0x4040);
    check("add.f16x2 %r0, %r1, %r2;", &[0x3c00_4000, 0x4000_3c00], 0x4200_4200);
    check("add.bf16x2 %r0, %r1, %r2;", &[0x3f80_4000, 0x4000_3f80], 0x4040_4040);
    check("sub.bf16x2 %r0, %r1, %r2;", &[0x4040_4040, 0x4000_3f80], 0x3f80_4000);
    check("mul.f16x2 %r0, %r1, %r2;", &[0x4000_3c00, 0x4200_4200], 0x4600_4200);
    check("fma.rn.bf16x2 %r0, %r1, %r2, %r3;", &[0x4000_3f80, 0x3f80_3f80, 0x3f80_4000], 0x4040_4040);
    check("fma.rn.f16x2 %r0, %r1, %r2, %r3;", &[0x4000_3c00, 0x3c00_3c00, 0x3c00_4000], 0x4200_4200);
    check("neg.bf16x2 %r0, %r1;", &[0x3f80_bf80], 0xbf80_3f80);
    check("abs.f16x2 %r0, %r1;", &[0xbc00_3c00], 0x3c00_3c00);
    check("neg.f16 %h0, %h1;", &[0x3c00], 0xbc00);
    check("abs.bf16 %h0, %h1;", &[0xbf80], 0x3f80);
}

#[test]
fn multiply_add_in_a_carry_chain() {
    // A product of 64 bits and a sum of 64 bits, in two words.
    for (a, b, c) in
        [(u32::MAX, u32::MAX, u64::MAX), (3, 5, u64::MAX - 14), (0x1234_5678, 0x9abc_def0, 1 << 32)]
    {
        let want = (u64::from(a) * u64::from(b)).wrapping_add(c);
        let inputs = [a.into(), b.into(), c & 0xffff_ffff, c >> 32];
        let low = "mad.lo.cc.u32 %r0, %r1, %r2, %r3; madc.hi.u32 %r5, %r1, %r2, %r4;";
        check(low, &inputs, want & 0xffff_ffff);
        check(&low.replace("%r0", "%r9").replace("%r5", "%r0"), &inputs, want >> 32);
    }
    // Carries go in and out.
    check(
        "add.cc.u32 %r5, %r1, %r1; madc.lo.cc.u32 %r6, %r2, %r2, %r1; addc.u32 %r0, 0, 0;",
        &[u32::MAX.into(), 0],
        1,
    );
    check("mad.lo.cc.u64 %rd5, %rd1, %rd1, %rd2; madc.hi.u64 %rd0, %rd1, %rd1, 7;", &[u64::MAX, u64::MAX], 6);
    check(
        "mad.hi.cc.s32 %r5, %r1, %r2, 0; addc.u32 %r0, %r5, 0;",
        &[u64::from(-3i32 as u32), 5],
        u32::MAX.into(),
    );
    check("add.cc.u32 %r5, 0, 0; madc.hi.s64 %rd0, %rd1, %rd2, 0;", &[-3i64 as u64, 5], u64::MAX);
}

#[test]
fn directed_rounding_of_fma() {
    let third = 1.0f32 / 3.0;
    let exact = f64::from(third) * 3.0;
    assert!(exact > 1.0 && (exact as f32) == 1.0);
    check("fma.rp.f32 %r0, %r1, %r2, 0f00000000;", &[f(third), f(3.0)], f(1f32.next_up()));
    check("fma.rm.f32 %r0, %r1, %r2, 0f00000000;", &[f(third), f(3.0)], f(1.0));
    check("fma.rz.f32 %r0, %r1, %r2, 0f00000000;", &[f(-third), f(3.0)], f(-1.0));
    check("fma.rm.f32 %r0, %r1, %r2, 0f00000000;", &[f(-third), f(3.0)], f((-1f32).next_down()));
    // Nearly nothing is added to one, and a subnormal is nothing with `.ftz`.
    check("fma.rp.f32 %r0, %r1, %r1, 0f3F800000;", &[f(1e-30)], f(1f32.next_up()));
    check("fma.rm.ftz.f32 %r0, %r1, 0f3F800000, 0f3F800000;", &[f(-1e-40)], f(1.0));
}

/// A program may have set its thread to flush subnormals. Kernels do not see it, and the program
/// finds its own mode behind them.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[test]
fn results_do_not_depend_on_the_mode_of_the_calling_thread() {
    use std::arch::asm;

    /// Subnormals become zero where they are read and where they are results.
    const FLUSHES: u32 = 0x1f80 | 1 << 15 | 1 << 6;
    let body = "mov.b32 %r1, 1; mov.b32 %r2, 0; add.f32 %r3, %r1, %r2; st.global.b32 [%rd40], %r3;
        mov.b64 %rd1, 1; mov.b64 %rd2, 0; add.f64 %rd3, %rd1, %rd2; st.global.b64 [%rd40+8], %rd3;
        mov.f32 %r4, 0d36A0000000000000; st.global.b32 [%rd40+16], %r4;";
    let run = move || {
        let (mut before, mut behind) = (FLUSHES, 0u32);
        // SAFETY: `before` is a valid mode. The thread computes with no floats outside of kernels.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw mut before, options(nostack)) };
        let got = run_body("", body, 1, &[0; 3]);
        // SAFETY: the instruction stores the mode to the variable.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut behind, options(nostack)) };
        // The lowest bits note exceptions that have occurred.
        (got, behind & !0x3f)
    };
    let (got, behind) = std::thread::spawn(run).join().unwrap();
    assert_eq!(got, [1; 3]);
    assert_eq!(behind, FLUSHES);
}

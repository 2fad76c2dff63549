//! Forms that kernels seldom have: 16-bit floats with modifiers, packed comparisons, and the rarer
//! integer instructions.
//!
//! Left out, because the manual leaves the result to the machine: `fma.oob`, whose NaN has no bits
//! there, and a `fns` whose base is above 31, or whose offset has no magnitude of 32 bits.

use super::*;

pub(super) fn add(t: &mut Table) {
    half_arithmetic(t);
    signs_of_both(t);
    half_comparisons(t);
    conversions(t);
    integers(t);
}

/// `add`, `sub`, `mul` and `fma` with `.ftz`, `.sat` and `.relu`.
fn half_arithmetic(t: &mut Table) {
    for (name, op, operands) in [
        ("add", Op::Add, 2),
        ("add.rn", Op::Add, 2),
        ("sub", Op::Sub, 2),
        ("sub.rn", Op::Sub, 2),
        ("mul", Op::Mul, 2),
        ("mul.rn", Op::Mul, 2),
        ("fma.rn", Op::Fma, 3),
    ] {
        for (modifiers, ftz, sat) in &F32_MODIFIERS[1..] {
            let mode = Mode { ftz: *ftz, sat: *sat, ..Mode::plain(F16) };
            let eval = move |x: &[u64]| float::arithmetic(op, mode, x);
            t.op(format!("{name}{modifiers}.f16"), &[Float(F16)].repeat(operands), Float(F16), eval);
            let pair = Pair(F16);
            t.op(format!("{name}{modifiers}.f16x2"), &[pair].repeat(operands), pair, halves(eval));
        }
    }
    for (format, modifiers, ftz) in [(F16, ".relu", false), (F16, ".ftz.relu", true), (Bf16, ".relu", false)]
    {
        let mode = Mode { ftz, ..Mode::plain(format) };
        let eval = move |x: &[u64]| float::relu(float::arithmetic(Op::Fma, mode, x), format);
        let n = format.name();
        t.op(format!("fma.rn{modifiers}.{n}"), &[Float(format); 3], Float(format), eval);
        t.op(format!("fma.rn{modifiers}.{n}x2"), &[Pair(format); 3], Pair(format), halves(eval));
    }
}

/// `.xorsign.abs`: `min` and `max` of magnitudes, with a sign that is that of both operands.
fn signs_of_both(t: &mut Table) {
    for (format, ftz) in [(F16, false), (F16, true), (Bf16, false), (F32, false), (F32, true)] {
        for (op, greater) in [("min", false), ("max", true)] {
            for (modifier, nan) in [("", false), (".NaN", true)] {
                let sign = 1u64 << (format.bits().0 - 1);
                let mode = Mode { ftz, ..Mode::plain(format) };
                let eval = move |x: &[u64]| {
                    let magnitudes = [x[0] & !sign, x[1] & !sign];
                    let v = float::min_max(greater, nan, mode, &magnitudes);
                    if format.is_nan(v) { v } else { v | (x[0] ^ x[1]) & sign }
                };
                let flush = if ftz { ".ftz" } else { "" };
                let opcode = format!("{op}{flush}{modifier}.xorsign.abs.{}", format.name());
                t.op(&opcode, &[Float(format); 2], Float(format), eval);
                if format != F32 {
                    t.op(format!("{opcode}x2"), &[Pair(format); 2], Pair(format), halves(eval));
                }
            }
        }
    }
}

/// Packed `setp`, and `set` of 16-bit floats or with a result of 16 bits.
fn half_comparisons(t: &mut Table) {
    const NAMES: [&str; 14] =
        ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"];
    type Combine = fn(bool, bool) -> bool;
    let combine: [(&str, Combine); 3] = [("and", |a, b| a & b), ("or", |a, b| a | b), ("xor", |a, b| a ^ b)];
    for (format, ftz) in [(F16, false), (F16, true), (Bf16, false)] {
        let (n, flush) = (format.name(), if ftz { ".ftz" } else { "" });
        let (single, pair) = (Float(format), Pair(format));
        for (i, name) in NAMES.into_iter().enumerate() {
            let at = move |x: &[u64], shift: u32| {
                holds(name, float::compare(x[0] >> shift & 0xffff, x[1] >> shift & 0xffff, format, ftz))
            };
            let (operator, c) = combine[i % 3];
            for (results, shift) in [("$0|%q", 0), ("%q|$0", 16)] {
                let text = format!("setp.{name}{flush}.{n}x2 {results}, $1, $2;");
                t.text(text, &[pair; 2], Pred, move |x| at(x, shift).into());
                let text = format!("setp.{name}.{operator}{flush}.{n}x2 {results}, $1, $2, $3;");
                t.text(text, &[pair, pair, Pred], Pred, move |x| c(at(x, shift), x[2] == 1).into());
            }
            // Each of the types that a result may have, in turn.
            let one = match format {
                F16 => 0x3c00,
                _ => 0x3f80,
            };
            let results = [
                ("u16", 16, 0xffff),
                ("s16", 16, 0xffff),
                ("u32", 32, u64::from(u32::MAX)),
                ("s32", 32, u64::from(u32::MAX)),
                ("f16", 16, 0x3c00),
                ("bf16", 16, 0x3f80),
            ];
            let (result, bits, yes) = results[i % results.len()];
            // PTX has no `.ftz` for a result of bf16, and no result of f16 for bf16.
            let (result, bits, yes) = match (result, format) {
                ("bf16", F16) if ftz => ("f16", 16, 0x3c00),
                ("f16", Bf16) => ("bf16", 16, 0x3f80),
                other => (other.0, bits, yes),
            };
            let choose = move |holds: bool, yes: u64| if holds { yes } else { 0 };
            t.op(format!("set.{name}{flush}.{result}.{n}"), &[single; 2], Int(bits), move |x| {
                choose(at(x, 0), yes)
            });
            let packed = [("u32".to_owned(), 0xffff), (format!("{n}x2"), one), ("s32".to_owned(), 0xffff)];
            let (result, yes) = packed[i % packed.len()].clone();
            let both = move |low: bool, high: bool| choose(low, yes) | choose(high, yes) << 16;
            if i % 2 == 0 {
                let opcode = format!("set.{name}{flush}.{result}.{n}x2");
                t.op(opcode, &[pair; 2], Int(32), move |x| both(at(x, 0), at(x, 16)));
            } else {
                let opcode = format!("set.{name}.{operator}{flush}.{result}.{n}x2");
                t.op(opcode, &[pair, pair, Pred], Int(32), move |x| {
                    both(c(at(x, 0), x[2] == 1), c(at(x, 16), x[2] == 1))
                });
            }
        }
    }
    // Results of 16 bits of the other types, by one comparison of each.
    for (i, ty) in INTS.into_iter().enumerate() {
        let name = ["lt", "ge", "eq", "gt", "ne", "le"][i];
        for (result, one) in [("f16", 0x3c00), ("bf16", 0x3f80)] {
            t.op(format!("set.{name}.{result}.{}", ty.name), &[ty.kind(); 2], Int(16), move |x| {
                if holds(name, Some(ty.of(x[0]).cmp(&ty.of(x[1])))) { one } else { 0 }
            });
        }
    }
    for (format, name) in [(F32, "ltu"), (F64, "ge")] {
        for (result, one) in [("f16", 0x3c00), ("bf16", 0x3f80)] {
            let opcode = format!("set.{name}.{result}.{}", format.name());
            t.op(opcode, &[Float(format); 2], Int(16), move |x| {
                if holds(name, float::compare(x[0], x[1], format, false)) { one } else { 0 }
            });
        }
    }
}

/// `cvt.pack`, packed `.satfinite`, and roundings that change nothing.
fn conversions(t: &mut Table) {
    let word = Int(32);
    for (name, bits, signed) in [
        ("u16", 16, false),
        ("s16", 16, true),
        ("u8", 8, false),
        ("s8", 8, true),
        ("u4", 4, false),
        ("s4", 4, true),
        ("u2", 2, false),
        ("s2", 2, true),
    ] {
        let ty = int("", bits, signed);
        let packed = move |x: &[u64]| {
            let (min, max) = ty.range();
            let part = |v: u64| S32.of(v).clamp(min, max) as u64 & ((1 << bits) - 1);
            part(x[0]) << bits | part(x[1])
        };
        if bits == 16 {
            t.op(format!("cvt.pack.sat.{name}.s32"), &[word; 2], word, packed);
        } else {
            t.op(format!("cvt.pack.sat.{name}.s32.b32"), &[word; 3], word, move |x| {
                U32.cut(i128::from(packed(x) | x[2] << (2 * bits)))
            });
        }
    }
    for to in [F16, Bf16] {
        for (r, round) in &ROUNDS[..2] {
            let (n, round) = (to.name(), *round);
            let finite = move |v: u64| float::convert_finite(v, F32, to, round);
            let relu = move |v: u64| float::relu(finite(v), to);
            let f32s = [Float(F32); 2];
            // The table has it already.
            if (to, *r) != (Bf16, "rn") {
                let opcode = format!("cvt.{r}.satfinite.{n}x2.f32");
                t.op(opcode, &f32s, Pair(to), move |x| finite(x[0]) << 16 | finite(x[1]));
            }
            let opcode = format!("cvt.{r}.relu.satfinite.{n}x2.f32");
            t.op(opcode, &f32s, Pair(to), move |x| relu(x[0]) << 16 | relu(x[1]));
        }
    }
    for to in [F32, F64] {
        for (r, _) in ROUNDS {
            t.convert(format!(".{r}"), Bf16, Mode::plain(to)).any_nan = true;
        }
    }
}

fn integers(t: &mut Table) {
    let word = Int(32);
    for a in [U32, S32] {
        for b in [U32, S32] {
            for (mode, first) in [("lo", 0), ("hi", 16)] {
                t.op(format!("dp2a.{mode}.{}.{}", a.name, b.name), &[word; 3], word, move |x| {
                    let half = |v: u64| (if a.signed { S16 } else { U16 }).of(v);
                    let byte = |v: u64| (if b.signed { S8 } else { U8 }).of(v);
                    let products =
                        half(x[0]) * byte(x[1] >> first) + half(x[0] >> 16) * byte(x[1] >> (first + 8));
                    S32.cut(products + S32.of(x[2]))
                });
            }
        }
    }
    for ty in [U32, S32] {
        for (mode, clamps) in [("clamp", true), ("wrap", false)] {
            t.op(format!("szext.{mode}.{}", ty.name), &[word, Count], word, move |x| {
                match if clamps { x[1].min(32) } else { x[1] % 32 } {
                    0 => 0,
                    bits => ty.cut(int("", bits as u32, ty.signed).of(x[0])),
                }
            });
        }
        let low = int("", 24, ty.signed);
        let sum = move |x: &[u64]| ((low.of(x[0]) * low.of(x[1])) >> 16) + ty.of(x[2]);
        t.op(format!("mad24.hi.{}", ty.name), &[word; 3], word, move |x| ty.cut(sum(x)));
        if ty.signed {
            t.op("mad24.hi.sat.s32", &[word; 3], word, move |x| ty.clamp(sum(x)));
        }
    }
    t.op("mad.hi.sat.s32", &[word; 3], word, |x| {
        S32.clamp(((S32.of(x[0]) * S32.of(x[1])) >> 32) + S32.of(x[2]))
    });
    // The n-th set bit, counted from a bit on: for small n, and for n over the whole range.
    for (few, offset) in [(false, "max.s32 %y, $3, -2147483647;"), (true, "shr.s32 %y, $3, 28;")] {
        let text = format!("{offset} and.b32 %x, $2, 31; fns.b32 $0, $1, %x, %y;");
        t.text(text, &[word; 3], word, move |x| {
            let offset = S32.of(x[2]);
            let offset = if few { offset >> 28 } else { offset.max(-0x7fff_ffff) };
            let (base, set) = (x[1] as i128 & 31, |i: &i128| x[0] >> i & 1 == 1);
            let found = match offset {
                0 => Some(base).filter(|i| set(i)),
                1.. => (base..32).filter(set).nth((offset - 1) as usize),
                _ => (0..=base).rev().filter(set).nth((-offset - 1) as usize),
            };
            found.map_or(0xffff_ffff, |i| i as u64)
        });
    }
    for (op, greater) in [("min", false), ("max", true)] {
        let relu = move |ty: IntType, a: u64, b: u64| {
            let (a, b) = (ty.of(a), ty.of(b));
            ty.cut((if greater { a.max(b) } else { a.min(b) }).max(0))
        };
        t.op(format!("{op}.relu.s32"), &[word; 2], word, move |x| relu(S32, x[0], x[1]));
        t.op(format!("{op}.relu.s16x2"), &[Bits(32); 2], word, move |x| {
            relu(S16, x[0], x[1]) | relu(S16, x[0] >> 16, x[1] >> 16) << 16
        });
    }
    for (operator, and) in [("and", true), ("or", false)] {
        for table in [0x80u64, 0x96] {
            let logic = move |x: &[u64]| {
                let v = if table == 0x80 { x[0] & x[1] & x[2] } else { x[0] ^ x[1] ^ x[2] };
                (v, if and { v != 0 && x[3] == 1 } else { v != 0 || x[3] == 1 })
            };
            let operands = [word, word, word, Pred];
            for (results, result) in [("$0|%q", word), ("%x|$0", Pred), ("_|$0", Pred)] {
                let text = format!("lop3.{operator}.b32 {results}, $1, $2, $3, {table:#x}, $4;");
                t.text(text, &operands, result, move |x| {
                    let (v, p) = logic(x);
                    if result == Pred { p.into() } else { v }
                });
            }
        }
    }
}

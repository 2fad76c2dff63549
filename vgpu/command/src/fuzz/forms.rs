//! The table of instruction forms: their text, their operands, and their results by the PTX manual.
//!
//! Nothing here is taken from the virtual GPU: integers are computed as `i128`, floating point by
//! [`super::float`].
//!
//! Quotients by zero and approximations are left out, because the manual leaves their results to
//! the machine. `cvt.rm` and `cvt.rp` from f32 to f16 with `.ftz` are left out, because an H200
//! departs from the manual (docs/KERNELS.md).

mod seldom;

use std::cmp::Ordering;

use super::float::{self, Mode, NEAREST, Op, ROUNDS};
use super::kind::Format::{self, *};
use super::kind::Kind::{self, *};

type Eval = Box<dyn Fn(&[u64]) -> u64>;

/// An instruction with all of its modifiers, or a short run of them that only has a result
/// together.
pub struct Form {
    /// Instructions. `$0` is the result, `$1` and so on are the operands. Free registers are `%hx`,
    /// `%hy` (16 bits), `%x`, `%y` (32 bits), `%u`, `%v` (64 bits) and `%q` (a predicate).
    pub text: String,
    pub operands: Vec<Kind>,
    pub result: Kind,
    /// The manual leaves the bits of a NaN open.
    pub any_nan: bool,
    /// The threads that must be there.
    pub needs: Needs,
    /// The result by the PTX manual, from the bits of the operands; `None` for
    /// [`effects`](super::effects).
    pub eval: Option<Eval>,
}

/// The threads that must reach a form together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Needs {
    /// Each thread is for itself.
    Nothing,
    /// The lanes of the mask at this place.
    Mask,
    /// All 32 lanes of a warp.
    Warp,
    /// All threads of a block.
    Block,
}

impl Form {
    /// Whether it is one instruction, which a predicate may guard.
    pub fn is_single(&self) -> bool {
        self.text.matches(';').count() == 1
    }

    /// Whether it stands under a predicate. H200 departs from the manual where a guard of `set` is
    /// false (docs/KERNELS.md).
    pub fn may_be_guarded(&self) -> bool {
        self.is_single()
            && self.needs == Needs::Nothing
            && self.result != Pred
            && !self.is_wrong_where_paths_meet()
            && !self.text.starts_with("set.")
            && !self.operands.is_empty()
    }

    /// Whether an assembler may make one instruction of it and its neighbour, which rounds once
    /// where two round twice: sums and products that name no rounding.
    pub fn may_be_contracted(&self) -> bool {
        let opcode = self.opcodes().next().unwrap_or_default();
        let mut parts = opcode.split('.');
        let sum = parts.next().is_some_and(|base| ["add", "sub", "mul"].contains(&base));
        let rounds = |part: &str| ROUNDS.iter().any(|(name, _)| *name == part);
        sum && matches!(self.result, Float(_) | Pair(_)) && !parts.any(rounds)
    }

    /// Whether ptxas passes the result on wrongly to `reader`, which reads the register as `kind`
    /// (docs/KERNELS.md). It converts the value where the manual has the bits, makes one conversion
    /// of two, takes the most negative number for a positive one behind `abs` and `neg` and an
    /// integer's sign for a float's behind `cnot`, or reads the lower half of a narrow load twice.
    pub fn is_forwarded_wrongly_to(&self, reader: &Form, kind: Kind) -> bool {
        let opcode = self.opcodes().last().unwrap_or_default();
        let base = base_of(opcode);
        let typed = matches!(self.result, Float(_) | Pair(_)) || base == "cvt";
        let twice = base == "cvt" && reader.opcodes().any(|opcode| base_of(opcode) == "cvt");
        let wraps = matches!(self.result, Int(_)) && ["abs", "neg", "cnot"].contains(&base);
        let narrow = base == "ld"
            && ["8", "16"].iter().any(|bits| opcode.trim_end_matches(bits).ends_with(['s', 'u']));
        let half = narrow && matches!(kind, Pair(_));
        typed && self.result != kind || twice || wraps || half || base == "set"
    }

    /// Whether ptxas makes a move of it where both operands are one register, and so keeps the
    /// payload of a NaN (docs/KERNELS.md).
    pub fn folds_equal_operands(&self) -> bool {
        matches!(self.result, Float(_) | Pair(_)) && ["min", "max"].iter().any(|op| self.text.starts_with(op))
    }

    /// Whether ptxas may drop the `.ftz` of a comparison that it computes once more: for a result
    /// that meets that of another path, and for a guard (docs/KERNELS.md).
    pub fn loses_ftz(&self) -> bool {
        self.text.starts_with("setp.") && self.text.contains(".ftz.")
    }

    /// Whether ptxas departs from the manual where the result meets the value of another path
    /// (docs/KERNELS.md): a comparison without its `.ftz`, or half of a byte's sign extension.
    pub fn is_wrong_where_paths_meet(&self) -> bool {
        let opcode = self.opcodes().last().unwrap_or_default();
        let mut types = opcode.rsplit('.');
        let from_float = types.next().is_some_and(|from| from.contains('f'));
        let byte = types.next().is_some_and(|to| to == "s8" || to == "u8");
        self.loses_ftz() || base_of(opcode) == "cvt" && from_float && byte
    }

    /// The opcodes of its instructions, with their modifiers.
    pub fn opcodes(&self) -> impl Iterator<Item = &str> {
        let statements = self.text.split(';').map(|statement| statement.trim_matches([' ', '{', '}']));
        let statements = statements.filter(|statement| !statement.is_empty() && !statement.starts_with('.'));
        statements.map(|statement| {
            let mut words = statement.split_whitespace();
            let first = words.next().unwrap_or_default();
            if first.starts_with('@') { words.next().unwrap_or_default() } else { first }
        })
    }

    /// The opcode that it is about: the last that is no plain load, or the only one.
    pub fn subject(&self) -> &str {
        let opcodes: Vec<&str> = self.opcodes().collect();
        let helper = |opcode: &&&str| {
            [
                "ld.shared",
                "ld.global.b",
                "ld.local",
                "st.",
                "bar.sync",
                "bar.warp",
                "barrier.sync",
                "cp.async.wait",
                "cp.async.commit",
            ]
            .iter()
            .any(|start| opcode.starts_with(start))
        };
        opcodes.iter().rev().find(|opcode| !helper(opcode)).or(opcodes.last()).copied().unwrap_or_default()
    }
}

/// The name of an instruction without its modifiers.
fn base_of(opcode: &str) -> &str {
    opcode.split('.').next().unwrap_or_default()
}

/// Every form with a formula.
pub fn all() -> Vec<Form> {
    let mut t = Table(Vec::new());
    integer_arithmetic(&mut t);
    carry_chains(&mut t);
    logic_and_shifts(&mut t);
    bit_fields(&mut t);
    selections(&mut t);
    comparisons(&mut t);
    float_arithmetic(&mut t);
    float_to_float(&mut t);
    packed_conversions(&mut t);
    integer_conversions(&mut t);
    seldom::add(&mut t);
    t.0
}

struct Table(Vec<Form>);

impl Table {
    /// A form written `opcode $0, $1, ..`.
    fn op(
        &mut self,
        opcode: impl AsRef<str>,
        operands: &[Kind],
        result: Kind,
        eval: impl Fn(&[u64]) -> u64 + 'static,
    ) -> &mut Form {
        let list: Vec<String> = (0..=operands.len()).map(|i| format!("${i}")).collect();
        self.text(format!("{} {};", opcode.as_ref(), list.join(", ")), operands, result, eval)
    }

    /// A form with a text of its own.
    fn text(
        &mut self,
        text: impl Into<String>,
        operands: &[Kind],
        result: Kind,
        eval: impl Fn(&[u64]) -> u64 + 'static,
    ) -> &mut Form {
        let at = self.0.len();
        self.0.push(Form {
            text: text.into(),
            operands: operands.to_vec(),
            result,
            any_nan: false,
            needs: Needs::Nothing,
            eval: Some(Box::new(eval)),
        });
        &mut self.0[at]
    }

    /// `cvt` from one format to that of the mode.
    fn convert(&mut self, modifiers: impl AsRef<str>, from: Format, mode: Mode) -> &mut Form {
        let opcode = format!("cvt{}.{}.{}", modifiers.as_ref(), mode.format.name(), from.name());
        self.op(opcode, &[Float(from)], Float(mode.format), move |x| float::convert(x[0], from, mode))
    }
}

/// An integer type.
#[derive(Clone, Copy)]
struct IntType {
    name: &'static str,
    bits: u32,
    signed: bool,
}

const fn int(name: &'static str, bits: u32, signed: bool) -> IntType {
    IntType { name, bits, signed }
}

const U8: IntType = int("u8", 8, false);
const S8: IntType = int("s8", 8, true);
const U16: IntType = int("u16", 16, false);
const S16: IntType = int("s16", 16, true);
const U32: IntType = int("u32", 32, false);
const S32: IntType = int("s32", 32, true);
const U64: IntType = int("u64", 64, false);
const S64: IntType = int("s64", 64, true);
const INTS: [IntType; 6] = [U16, S16, U32, S32, U64, S64];

impl IntType {
    /// Bytes live in 32-bit registers.
    fn register_bits(self) -> u32 {
        if self.bits == 8 { 32 } else { self.bits }
    }

    fn kind(self) -> Kind {
        Int(self.register_bits())
    }

    /// The number that the low bits of a register stand for.
    fn of(self, raw: u64) -> i128 {
        let shift = 128 - self.bits;
        let high = i128::from(raw) << shift;
        if self.signed { high >> shift } else { (high as u128 >> shift) as i128 }
    }

    /// A result cut to its type and extended to its register.
    fn cut(self, v: i128) -> u64 {
        self.of(v as u64) as u64 & (u64::MAX >> (64 - self.register_bits()))
    }

    fn range(self) -> (i128, i128) {
        match self.signed {
            true => (-(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1),
            false => (0, (1 << self.bits) - 1),
        }
    }

    fn clamp(self, v: i128) -> u64 {
        let (min, max) = self.range();
        self.cut(v.clamp(min, max))
    }

    /// The upper half of a product, which was computed modulo 2^128.
    fn high(self, product: i128) -> i128 {
        if self.signed { product >> self.bits } else { (product as u128 >> self.bits) as i128 }
    }

    /// The type of twice the width.
    fn wide(self) -> IntType {
        match (self.bits, self.signed) {
            (16, false) => U32,
            (16, true) => S32,
            (_, false) => U64,
            (_, true) => S64,
        }
    }
}

fn integer_arithmetic(t: &mut Table) {
    type Binary = fn(i128, i128) -> i128;
    let binary: [(&str, Binary); 5] = [
        ("add", |a, b| a + b),
        ("sub", |a, b| a - b),
        ("mul.lo", i128::wrapping_mul),
        ("min", |a, b| a.min(b)),
        ("max", |a, b| a.max(b)),
    ];
    for ty in INTS {
        let (n, k) = (ty.name, ty.kind());
        for (op, f) in binary {
            t.op(format!("{op}.{n}"), &[k, k], k, move |x| ty.cut(f(ty.of(x[0]), ty.of(x[1]))));
        }
        let quotient = [k, Divisor(ty.bits)];
        t.op(format!("div.{n}"), &quotient, k, move |x| ty.cut(ty.of(x[0]) / ty.of(x[1])));
        t.op(format!("rem.{n}"), &quotient, k, move |x| ty.cut(ty.of(x[0]) % ty.of(x[1])));
        let product = move |x: &[u64]| ty.of(x[0]).wrapping_mul(ty.of(x[1]));
        t.op(format!("mul.hi.{n}"), &[k, k], k, move |x| ty.cut(ty.high(product(x))));
        t.op(format!("mad.hi.{n}"), &[k, k, k], k, move |x| ty.cut(ty.high(product(x)) + ty.of(x[2])));
        t.op(format!("mad.lo.{n}"), &[k, k, k], k, move |x| ty.cut(product(x).wrapping_add(ty.of(x[2]))));
        t.op(format!("sad.{n}"), &[k, k, k], k, move |x| {
            ty.cut(ty.of(x[2]) + (ty.of(x[0]) - ty.of(x[1])).abs())
        });
        if ty.bits < 64 {
            let wide = ty.wide();
            let w = wide.kind();
            t.op(format!("mul.wide.{n}"), &[k, k], w, move |x| wide.cut(product(x)));
            t.op(format!("mad.wide.{n}"), &[k, k, w], w, move |x| wide.cut(product(x) + wide.of(x[2])));
        }
        if ty.signed {
            t.op(format!("abs.{n}"), &[k], k, move |x| ty.cut(ty.of(x[0]).abs()));
            t.op(format!("neg.{n}"), &[k], k, move |x| ty.cut(-ty.of(x[0])));
        }
    }
    let word = Int(32);
    t.op("add.sat.s32", &[word, word], word, |x| S32.clamp(S32.of(x[0]) + S32.of(x[1])));
    t.op("sub.sat.s32", &[word, word], word, |x| S32.clamp(S32.of(x[0]) - S32.of(x[1])));
    for (ty, low) in [(U32, int("u24", 24, false)), (S32, int("s24", 24, true))] {
        let n = ty.name;
        let product = move |x: &[u64]| low.of(x[0]) * low.of(x[1]);
        t.op(format!("mul24.lo.{n}"), &[word, word], word, move |x| ty.cut(product(x)));
        t.op(format!("mul24.hi.{n}"), &[word, word], word, move |x| ty.cut(product(x) >> 16));
        t.op(format!("mad24.lo.{n}"), &[word, word, word], word, move |x| ty.cut(product(x) + ty.of(x[2])));
    }
    for ty in [U16, S16] {
        for (op, f) in [binary[0], binary[3], binary[4]] {
            t.op(format!("{op}.{}x2", ty.name), &[Bits(32); 2], word, move |x| {
                let half = |shift: u32| ty.cut(f(ty.of(x[0] >> shift), ty.of(x[1] >> shift))) << shift;
                half(0) | half(16)
            });
        }
    }
    for (a, b) in [(U32, U32), (U32, S32), (S32, U32), (S32, S32)] {
        t.op(format!("dp4a.{}.{}", a.name, b.name), &[word, word, word], word, move |x| {
            let byte = |ty: IntType, v: u64, i: u32| (if ty.signed { S8 } else { U8 }).of(v >> (8 * i));
            let sum: i128 = (0..4).map(|i| byte(a, x[0], i) * byte(b, x[1], i)).sum();
            S32.cut(sum + S32.of(x[2]))
        });
    }
}

/// Additions and subtractions of two or three words through the carry flag.
fn carry_chains(t: &mut Table) {
    let word = Int(32);
    let two = |x: &[u64]| [i128::from(x[0] | x[2] << 32), i128::from(x[1] | x[3] << 32)];
    for ty in ["u32", "s32"] {
        let text =
            |op: &str| format!("{op}.cc.{ty} %x, $1, $2; {op}c.{ty} %y, $3, $4; mov.b64 $0, {{%x, %y}};");
        t.text(text("add"), &[word; 4], Int(64), move |x| U64.cut(two(x)[0] + two(x)[1]));
        t.text(text("sub"), &[word; 4], Int(64), move |x| U64.cut(two(x)[0] - two(x)[1]));
    }
    let product = |x: &[u64]| i128::from(x[0]) * i128::from(x[1]);
    let text = "mad.lo.cc.u32 %x, $1, $2, $3; madc.hi.u32 %y, $1, $2, $4; mov.b64 $0, {%x, %y};";
    t.text(text, &[word; 4], Int(64), move |x| U64.cut(product(x) + i128::from(x[2] | x[3] << 32)));
    let text = "mad.lo.cc.u64 %u, $1, $2, $3; madc.hi.u64 $0, $1, $2, $4;";
    t.text(text, &[Int(64); 4], Int(64), |x| {
        let product = u128::from(x[0]) * u128::from(x[1]);
        (product.wrapping_add(u128::from(x[2]) | u128::from(x[3]) << 64) >> 64) as u64
    });
    // The carry out of two words; a plain addition in between leaves the flag alone.
    for op in ["add", "sub"] {
        let text = format!(
            "{op}.cc.u32 %x, $1, $2; {op}c.cc.u32 %y, $3, $4; add.u32 %x, %x, %y; {op}c.u32 $0, 0, 0;"
        );
        t.text(text, &[word; 4], word, move |x| {
            let [a, b] = two(x);
            U32.cut(if op == "add" { (a + b) >> 64 } else { (a - b) >> 64 })
        });
        let text = format!("{op}.cc.u64 %u, $1, $2; {op}c.u64 $0, $3, $4;");
        t.text(text, &[Int(64); 4], Int(64), move |x| {
            let [a, b, c, d] = [0, 1, 2, 3].map(|i| i128::from(x[i]));
            U64.cut(if op == "add" {
                c + d + i128::from(a + b > U64.range().1)
            } else {
                c - d - i128::from(a < b)
            })
        });
    }
}

fn logic_and_shifts(t: &mut Table) {
    for (ty, n) in [(U16, "b16"), (U32, "b32"), (U64, "b64")] {
        let k = ty.kind();
        t.op(format!("and.{n}"), &[k, k], k, |x| x[0] & x[1]);
        t.op(format!("or.{n}"), &[k, k], k, |x| x[0] | x[1]);
        t.op(format!("xor.{n}"), &[k, k], k, |x| x[0] ^ x[1]);
        t.op(format!("not.{n}"), &[k], k, move |x| ty.cut(!i128::from(x[0])));
        t.op(format!("cnot.{n}"), &[k], k, |x| u64::from(x[0] == 0));
        t.op(format!("shl.{n}"), &[k, Count], k, move |x| ty.cut(i128::from(x[0]) << x[1].min(64)));
        t.op(format!("shr.{n}"), &[k, Count], k, move |x| ty.cut(i128::from(x[0]) >> x[1].min(64)));
    }
    for ty in INTS {
        let k = ty.kind();
        t.op(format!("shr.{}", ty.name), &[k, Count], k, move |x| ty.cut(ty.of(x[0]) >> x[1].min(64)));
    }
    type Logic = fn(u64, u64) -> u64;
    let logic: [(&str, Logic); 3] = [("and", |a, b| a & b), ("or", |a, b| a | b), ("xor", |a, b| a ^ b)];
    for (op, f) in logic {
        t.op(format!("{op}.pred"), &[Pred, Pred], Pred, move |x| f(x[0], x[1]));
    }
    t.op("not.pred", &[Pred], Pred, |x| x[0] ^ 1);
    // The upper word of `$2:$1` after a shift to the left, the lower word after a shift to the
    // right.
    let word = Int(32);
    for (mode, limit) in [("clamp", true), ("wrap", false)] {
        let count = move |n: u64| if limit { n.min(32) } else { n % 32 };
        let both = |x: &[u64]| u128::from(x[0] | x[1] << 32);
        t.op(format!("shf.l.{mode}.b32"), &[word, word, Count], word, move |x| {
            U32.cut((both(x) << count(x[2]) >> 32) as i128)
        });
        t.op(format!("shf.r.{mode}.b32"), &[word, word, Count], word, move |x| {
            U32.cut((both(x) >> count(x[2])) as i128)
        });
    }
    for table in [0x01u64, 0x3c, 0x80, 0x96, 0xca, 0xe2, 0xe8, 0xfe] {
        t.text(format!("lop3.b32 $0, $1, $2, $3, {table:#x};"), &[word; 3], word, move |x| {
            let bit = |v: u64, i: u32| v >> i & 1;
            (0..32).fold(0, |r, i| {
                r | (table >> (bit(x[0], i) << 2 | bit(x[1], i) << 1 | bit(x[2], i)) & 1) << i
            })
        });
    }
}

fn bit_fields(t: &mut Table) {
    let word = Int(32);
    for ty in [U32, S32, U64, S64] {
        let (n, k, top) = (ty.name, ty.kind(), u64::from(ty.bits) - 1);
        // The manual's pseudo code, bit by bit.
        let count = if ty.bits == 64 { ByteCount } else { Count };
        t.op(format!("bfe.{n}"), &[k, count, count], k, move |x| {
            let (a, position, length) = (x[0], x[1] & 0xff, x[2] & 0xff);
            let sign = match ty.signed && length != 0 {
                true => a >> (position + length - 1).min(top) & 1,
                false => 0,
            };
            (0..=top).fold(0, |r, i| {
                let bit = if i < length && position + i <= top { a >> (position + i) & 1 } else { sign };
                r | bit << i
            })
        });
        let found = move |a: u64| {
            let a = if ty.of(a) < 0 { !ty.of(a) } else { ty.of(a) };
            a.checked_ilog2()
        };
        t.op(format!("bfind.{n}"), &[k], word, move |x| found(x[0]).map_or(0xffff_ffff, u64::from));
        t.op(format!("bfind.shiftamt.{n}"), &[k], word, move |x| {
            found(x[0]).map_or(0xffff_ffff, |at| top - u64::from(at))
        });
    }
    for (n, k, bits) in [("b32", Int(32), 32u64), ("b64", Int(64), 64)] {
        let bit = |v: u64, i: u64| v >> i & 1;
        let count = if bits == 64 { ByteCount } else { Count };
        t.op(format!("bfi.{n}"), &[k, k, count, count], k, move |x| {
            let (position, length) = (x[2] & 0xff, x[3] & 0xff);
            (0..bits).fold(0, |r, i| {
                let inside = i >= position && i < position + length;
                r | (if inside { bit(x[0], i - position) } else { bit(x[1], i) }) << i
            })
        });
        t.op(format!("brev.{n}"), &[k], k, move |x| {
            (0..bits).fold(0, |r, i| r | bit(x[0], i) << (bits - 1 - i))
        });
        t.op(format!("popc.{n}"), &[k], word, move |x| (0..bits).map(|i| bit(x[0], i)).sum());
        t.op(format!("clz.{n}"), &[k], word, move |x| {
            (0..bits).take_while(|i| bit(x[0], bits - 1 - i) == 0).count() as u64
        });
    }
    for (mode, clamps) in [("clamp", true), ("wrap", false)] {
        t.op(format!("bmsk.{mode}.b32"), &[Count, Count], word, move |x| {
            let [position, length] = [x[0], x[1]].map(|v| if clamps { v.min(32) } else { v % 32 });
            (0..32).fold(0, |r, i| r | u64::from(i >= position && i < position + length) << i)
        });
    }
    type Selector = fn(u64, u64) -> u64;
    let modes: [(&str, Selector); 7] = [
        ("", |c, i| c >> (4 * i) & 15),
        (".f4e", |c, i| ((c & 3) + i) % 8),
        (".b4e", |c, i| (8 + (c & 3) - i) % 8),
        (".rc8", |c, _| c & 3),
        (".ecl", |c, i| i.max(c & 3)),
        (".ecr", |c, i| i.min(c & 3)),
        (".rc16", |c, i| (c & 1) * 2 + i % 2),
    ];
    for (mode, selector) in modes {
        t.op(format!("prmt.b32{mode}"), &[word, word, word], word, move |x| {
            let bytes = [x[0], x[1]].map(|v| (v as u32).to_le_bytes()).concat();
            (0..4).fold(0, |r, i| {
                let s = selector(x[2], i);
                let byte = bytes[s as usize % 8];
                let sign = if byte < 0x80 { 0 } else { 0xff };
                r | u64::from(if s & 8 == 0 { byte } else { sign }) << (8 * i)
            })
        });
    }
}

fn selections(t: &mut Table) {
    for (n, bits) in [("u16", 16), ("s16", 16), ("b32", 32), ("s32", 32), ("b64", 64), ("u64", 64)] {
        let k = Int(bits);
        t.op(format!("selp.{n}"), &[k, k, Pred], k, |x| x[if x[2] == 1 { 0 } else { 1 }]);
    }
    for (n, bits) in [("b16", 16), ("u32", 32), ("f32", 32), ("s64", 64), ("f64", 64)] {
        let k = if n.starts_with('f') { Bits(bits) } else { Int(bits) };
        t.op(format!("selp.{n}"), &[k, k, Pred], k, |x| x[if x[2] == 1 { 0 } else { 1 }]);
        t.op(format!("slct.{n}.s32"), &[k, k, Int(32)], k, |x| x[usize::from(S32.of(x[2]) < 0)]);
        for (modifier, ftz) in [("", false), (".ftz", true)] {
            t.op(format!("slct{modifier}.{n}.f32"), &[k, k, Float(F32)], k, move |x| {
                let order = float::compare(x[2], 0, F32, ftz);
                x[usize::from(!order.is_some_and(Ordering::is_ge))]
            });
        }
    }
}

/// A comparison by its name in PTX; `None` means that an operand is NaN.
fn holds(name: &str, order: Option<Ordering>) -> bool {
    match (name, order) {
        ("num", _) => order.is_some(),
        ("nan", _) => order.is_none(),
        (_, None) => name.len() == 3,
        (_, Some(order)) => match &name[..2] {
            "eq" => order.is_eq(),
            "ne" => order.is_ne(),
            "lt" | "lo" => order.is_lt(),
            "le" | "ls" => order.is_le(),
            "gt" | "hi" => order.is_gt(),
            _ => order.is_ge(),
        },
    }
}

/// The formats of arithmetic, with and without `.ftz`.
const HALF_AND_FULL: [(Format, bool); 6] =
    [(F16, false), (F16, true), (Bf16, false), (F32, false), (F32, true), (F64, false)];

type Compare = Box<dyn Fn(&[u64]) -> bool>;

fn comparisons(t: &mut Table) {
    const ORDERED: [&str; 6] = ["eq", "ne", "lt", "le", "gt", "ge"];
    const UNORDERED: [&str; 8] = ["equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"];
    // (comparison with modifiers, type, operands, result)
    let mut list: Vec<(String, &str, Kind, Compare)> = Vec::new();
    for ty in INTS {
        let unsigned: &[&str] = if ty.signed { &[] } else { &["lo", "ls", "hi", "hs"] };
        for &name in ORDERED.iter().chain(unsigned) {
            let f = move |x: &[u64]| holds(name, Some(ty.of(x[0]).cmp(&ty.of(x[1]))));
            list.push((name.to_owned(), ty.name, ty.kind(), Box::new(f)));
        }
    }
    for (ty, bits) in [("b16", 16), ("b32", 32), ("b64", 64)] {
        for name in ["eq", "ne"] {
            let f = move |x: &[u64]| holds(name, Some(x[0].cmp(&x[1])));
            list.push((name.to_owned(), ty, Int(bits), Box::new(f)));
        }
    }
    for (format, ftz) in HALF_AND_FULL {
        for name in ORDERED.into_iter().chain(UNORDERED) {
            let f = move |x: &[u64]| holds(name, float::compare(x[0], x[1], format, ftz));
            let name = if ftz { format!("{name}.ftz") } else { name.to_owned() };
            list.push((name, format.name(), Float(format), Box::new(f)));
        }
    }
    // Each comparison once alone and once combined with a predicate, in turn by each operator, on
    // each result. `set` takes the same comparisons; it has a result in turn of each type that it
    // may have.
    type Combine = fn(bool, bool) -> bool;
    let combine: [(&str, Combine); 3] = [("and", |a, b| a & b), ("or", |a, b| a | b), ("xor", |a, b| a ^ b)];
    for (i, (name, ty, kind, f)) in list.into_iter().enumerate() {
        let f = std::rc::Rc::new(f);
        let g = f.clone();
        t.op(format!("setp.{name}.{ty}"), &[kind, kind], Pred, move |x| g(x).into());
        let (operator, c) = combine[i % 3];
        let (compare, ftz) = name.split_once('.').map_or((&*name, ""), |(compare, _)| (compare, ".ftz"));
        let opcode = format!("setp.{compare}.{operator}{ftz}.{ty}");
        let g = f.clone();
        // 16-bit floats have no second result, and no `set` with a result of 32 bits.
        let small = matches!(kind, Float(F16 | Bf16));
        if i % 2 == 0 || small {
            t.op(opcode, &[kind, kind, Pred], Pred, move |x| c(g(x), x[2] == 1).into());
        } else {
            // The second result is that of the opposite comparison.
            t.text(format!("{opcode} %q|$0, $1, $2, !$3;"), &[kind, kind, Pred], Pred, move |x| {
                c(!g(x), x[2] == 0).into()
            });
        }
        if small {
            continue;
        }
        let (result, one) = [("u32", 0xffff_ffff), ("s32", 0xffff_ffff), ("f32", 0x3f80_0000)][i % 3];
        let g = f.clone();
        if i % 2 == 0 {
            let opcode = format!("set.{compare}{ftz}.{result}.{ty}");
            t.op(opcode, &[kind, kind], Int(32), move |x| if g(x) { one } else { 0 });
        } else {
            let opcode = format!("set.{compare}.{operator}{ftz}.{result}.{ty}");
            t.op(opcode, &[kind, kind, Pred], Int(32), move |x| if c(g(x), x[2] == 1) { one } else { 0 });
        }
    }
    for format in [F32, F64] {
        for what in ["finite", "infinite", "number", "notanumber", "normal", "subnormal"] {
            t.op(format!("testp.{what}.{}", format.name()), &[Float(format)], Pred, move |x| {
                float::test(what, x[0], format).into()
            });
        }
    }
}

/// `.ftz` and `.sat` in all combinations.
const F32_MODIFIERS: [(&str, bool, bool); 4] =
    [("", false, false), (".ftz", true, false), (".sat", false, true), (".ftz.sat", true, true)];

/// Applies a function to both halves of packed operands.
fn halves(f: impl Fn(&[u64]) -> u64) -> impl Fn(&[u64]) -> u64 {
    move |x| {
        let low: Vec<u64> = x.iter().map(|v| v & 0xffff).collect();
        let high: Vec<u64> = x.iter().map(|v| v >> 16).collect();
        f(&low) | f(&high) << 16
    }
}

fn float_arithmetic(t: &mut Table) {
    const OPS: [(&str, Op, usize); 8] = [
        ("add", Op::Add, 2),
        ("sub", Op::Sub, 2),
        ("mul", Op::Mul, 2),
        ("fma", Op::Fma, 3),
        ("mad", Op::Fma, 3),
        ("div", Op::Div, 2),
        ("rcp", Op::Rcp, 1),
        ("sqrt", Op::Sqrt, 1),
    ];
    for (name, op, operands) in OPS {
        let k = [Float(F32)];
        let saturates = operands == 3 || matches!(op, Op::Add | Op::Sub | Op::Mul);
        for (r, round) in ROUNDS {
            for (modifiers, ftz, sat) in F32_MODIFIERS {
                if !sat || saturates {
                    let mode = Mode { format: F32, round, ftz, sat };
                    let opcode = format!("{name}.{r}{modifiers}.f32");
                    t.op(opcode, &k.repeat(operands), k[0], move |x| float::arithmetic(op, mode, x));
                }
            }
            let k = [Float(F64)];
            let mode = Mode { round, ..Mode::plain(F64) };
            let eval = move |x: &[u64]| float::arithmetic(op, mode, x);
            // By the manual payloads pass through f64, but which of several is left open.
            t.op(format!("{name}.{r}.f64"), &k.repeat(operands), k[0], eval).any_nan = true;
        }
        if !saturates || name == "mad" {
            continue;
        }
        for format in [F16, Bf16] {
            let eval = move |x: &[u64]| float::arithmetic(op, Mode::plain(format), x);
            let n = format.name();
            t.op(format!("{name}.rn.{n}"), &[Float(format)].repeat(operands), Float(format), eval);
            let pair = Pair(format);
            t.op(format!("{name}.rn.{n}x2"), &[pair].repeat(operands), pair, halves(eval));
        }
    }
    // Without a rounding: to nearest, unless the assembler contracts it with another.
    for (name, op, _) in &OPS[..3] {
        let (name, op) = (*name, *op);
        for (modifiers, ftz, sat) in F32_MODIFIERS {
            let mode = Mode { format: F32, round: NEAREST, ftz, sat };
            t.op(format!("{name}{modifiers}.f32"), &[Float(F32); 2], Float(F32), move |x| {
                float::arithmetic(op, mode, x)
            });
        }
        for format in [F64, F16, Bf16] {
            let eval = move |x: &[u64]| float::arithmetic(op, Mode::plain(format), x);
            let (n, k) = (format.name(), Float(format));
            t.op(format!("{name}.{n}"), &[k, k], k, eval).any_nan = format == F64;
            if format != F64 {
                t.op(format!("{name}.{n}x2"), &[Pair(format); 2], Pair(format), halves(eval));
            }
        }
    }
    signs_and_extremes(t);
}

/// `abs`, `neg`, `copysign`, `min`, `max`.
fn signs_and_extremes(t: &mut Table) {
    for (format, ftz) in HALF_AND_FULL {
        let n = format!("{}{}", if ftz { "ftz." } else { "" }, format.name());
        let k = Float(format);
        let sign = 1u64 << (format.bits().0 - 1);
        let mode = Mode { ftz, ..Mode::plain(format) };
        // Adding a zero of the same sign changes nothing but a subnormal to be flushed.
        let flush = move |v: u64| float::arithmetic(Op::Add, mode, &[v, v & sign]);
        let abs = move |x: &[u64]| flush(x[0]) & !sign;
        let neg = move |x: &[u64]| flush(x[0]) ^ sign;
        t.op(format!("abs.{n}"), &[k], k, abs).any_nan = true;
        t.op(format!("neg.{n}"), &[k], k, neg).any_nan = true;
        let small = matches!(format, F16 | Bf16);
        if small {
            t.op(format!("abs.{n}x2"), &[Pair(format)], Pair(format), halves(abs)).any_nan = true;
            t.op(format!("neg.{n}x2"), &[Pair(format)], Pair(format), halves(neg)).any_nan = true;
        } else if !ftz {
            t.op(format!("copysign.{n}"), &[k, k], k, move |x| x[1] & !sign | x[0] & sign);
        }
        for (op, greater) in [("min", false), ("max", true)] {
            for (modifier, nan) in [("", false), (".NaN", true)] {
                if nan && format == F64 {
                    continue;
                }
                let eval = move |x: &[u64]| float::min_max(greater, nan, mode, x);
                // `.ftz` comes first.
                let opcode = format!("{op}{}{modifier}.{}", if ftz { ".ftz" } else { "" }, format.name());
                // The manual does not define the payload of the result of two NaNs of f64.
                t.op(&opcode, &[k, k], k, eval).any_nan = format == F64;
                if small {
                    t.op(format!("{opcode}x2"), &[Pair(format); 2], Pair(format), halves(eval));
                }
            }
        }
    }
}

fn float_to_float(t: &mut Table) {
    for (from, to) in [(F64, F32), (F64, F16), (F64, Bf16), (F32, F16), (F32, Bf16), (F16, Bf16), (Bf16, F16)]
    {
        for (r, round) in ROUNDS {
            let plain = Mode { round, ..Mode::plain(to) };
            // The manual leaves the payload open here too.
            t.convert(format!(".{r}"), from, plain).any_nan = from == F64;
            if (from, to) == (F64, F32) {
                t.convert(format!(".{r}.ftz"), from, Mode { ftz: true, ..plain }).any_nan = true;
                t.convert(format!(".{r}.sat"), from, Mode { sat: true, ..plain });
                t.convert(format!(".{r}.ftz.sat"), from, Mode { ftz: true, sat: true, ..plain });
            }
            if to == F16 && from != Bf16 {
                t.convert(format!(".{r}.sat"), from, Mode { sat: true, ..plain });
            }
            if (from, to) == (F32, F16) && matches!(r, "rn" | "rz") {
                t.convert(format!(".{r}.ftz"), from, Mode { ftz: true, ..plain });
                t.convert(format!(".{r}.ftz.sat"), from, Mode { ftz: true, sat: true, ..plain });
            }
            if (from, to) == (F32, Bf16) {
                t.convert(format!(".{r}.ftz"), from, Mode { ftz: true, ..plain });
            }
        }
    }
    for (from, to) in [(F16, F32), (F16, F64), (Bf16, F32), (Bf16, F64), (F32, F64)] {
        let form = t.convert("", from, Mode::plain(to));
        form.any_nan = to == F64 || from == Bf16;
    }
    let [flush, clamp, both] = [(true, false), (false, true), (true, true)]
        .map(|(ftz, sat)| move |to| Mode { ftz, sat, ..Mode::plain(to) });
    t.convert(".ftz", F32, flush(F64)).any_nan = true;
    t.convert(".ftz", F16, flush(F32)).any_nan = true;
    t.convert(".ftz", Bf16, flush(F32)).any_nan = true;
    for (from, to) in [(F16, F32), (F16, F16), (F16, F64), (F32, F64), (F64, F64)] {
        t.convert(".sat", from, clamp(to));
    }
    t.convert(".ftz.sat", F16, both(F32));
    t.convert(".ftz.sat", F32, both(F64));
    for format in [F16, Bf16, F64] {
        t.convert("", format, Mode::plain(format)).any_nan = true;
    }
    for (modifiers, ftz, sat) in F32_MODIFIERS {
        let form = t.convert(modifiers, F32, Mode { format: F32, round: NEAREST, ftz, sat });
        form.any_nan = true;
    }
    for (format, ftz) in [(F16, false), (Bf16, false), (F32, false), (F32, true), (F64, false)] {
        for (r, round) in ROUNDS {
            let n = format.name();
            let mode = Mode { format, round, ftz, sat: false };
            let opcode = format!("cvt.{r}i{}.{n}.{n}", if ftz { ".ftz" } else { "" });
            t.op(opcode, &[Float(format)], Float(format), move |x| float::round_to_integral(x[0], mode))
                .any_nan = true;
            if format != Bf16 {
                let opcode = format!("cvt.{r}i{}.sat.{n}.{n}", if ftz { ".ftz" } else { "" });
                let mode = Mode { sat: true, ..mode };
                t.op(opcode, &[Float(format)], Float(format), move |x| float::round_to_integral(x[0], mode));
            }
        }
    }
}

/// Two numbers at a time, the first in the upper half; and `.relu` and `.satfinite`.
fn packed_conversions(t: &mut Table) {
    let f32s = [Float(F32); 2];
    for to in [F16, Bf16] {
        for (r, round) in &ROUNDS[..2] {
            let mode = Mode { round: *round, ..Mode::plain(to) };
            let plain = move |v: u64| float::convert(v, F32, mode);
            let relu = move |v: u64| float::relu(plain(v), to);
            let n = to.name();
            t.op(format!("cvt.{r}.{n}x2.f32"), &f32s, Pair(to), move |x| plain(x[0]) << 16 | plain(x[1]));
            t.op(format!("cvt.{r}.relu.{n}x2.f32"), &f32s, Pair(to), move |x| relu(x[0]) << 16 | relu(x[1]));
            t.op(format!("cvt.{r}.relu.{n}.f32"), &f32s[..1], Float(to), move |x| relu(x[0]));
            let round = *round;
            let finite = move |v: u64| float::convert_finite(v, F32, to, round);
            t.op(format!("cvt.{r}.satfinite.{n}.f32"), &f32s[..1], Float(to), move |x| finite(x[0]));
            if (to, *r) == (Bf16, "rn") {
                let pair = move |x: &[u64]| finite(x[0]) << 16 | finite(x[1]);
                t.op(format!("cvt.{r}.satfinite.{n}x2.f32"), &f32s, Pair(to), pair);
            }
            let opcode = format!("cvt.{r}.relu.satfinite.{n}.f32");
            t.op(opcode, &f32s[..1], Float(to), move |x| float::relu(finite(x[0]), to));
        }
    }
    for to in [E4m3, E5m2] {
        let n = to.name();
        for relu in [false, true] {
            let one = move |v: u64, from: Format| {
                let v = float::convert_finite(v, from, to, NEAREST);
                if relu { float::relu(v, to) } else { v }
            };
            let modifiers = if relu { "rn.satfinite.relu" } else { "rn.satfinite" };
            t.op(format!("cvt.{modifiers}.{n}x2.f32"), &f32s, Pair(to), move |x| {
                one(x[0], F32) << 8 | one(x[1], F32)
            });
            t.op(format!("cvt.{modifiers}.{n}x2.f16x2"), &[Pair(F16)], Pair(to), move |x| {
                one(x[0] >> 16, F16) << 8 | one(x[0] & 0xffff, F16)
            });
            t.op(format!("cvt.rn{}.f16x2.{n}x2", if relu { ".relu" } else { "" }), &[Pair(to)], Pair(F16), {
                move |x| {
                    let one = |v: u64| float::convert(v, to, Mode::plain(F16));
                    let one = |v: u64| if relu { float::relu(one(v), F16) } else { one(v) };
                    one(x[0] >> 8) << 16 | one(x[0] & 0xff)
                }
            });
        }
    }
}

fn integer_conversions(t: &mut Table) {
    let bytes_too = || [U8, S8].into_iter().chain(INTS);
    for to in bytes_too() {
        for from in bytes_too() {
            let opcode = |modifier: &str| format!("cvt{modifier}.{}.{}", to.name, from.name);
            t.op(opcode(""), &[from.kind()], to.kind(), move |x| to.cut(from.of(x[0])));
            // Saturation is only for what can be out of range.
            let ((min, max), (from_min, from_max)) = (to.range(), from.range());
            if from_min < min || from_max > max {
                t.op(opcode(".sat"), &[from.kind()], to.kind(), move |x| to.clamp(from.of(x[0])));
            }
        }
    }
    for int in bytes_too() {
        for format in [F16, Bf16, F32, F64] {
            // PTX has no conversions between bytes and bf16.
            if format == Bf16 && int.bits == 8 {
                continue;
            }
            for (r, round) in ROUNDS {
                let mode = Mode { round, ..Mode::plain(format) };
                let (i, f) = (int.name, format.name());
                for (modifiers, ftz, sat) in F32_MODIFIERS {
                    if ftz && format != F32 || sat && format == Bf16 {
                        continue;
                    }
                    let mode = Mode { ftz, sat, ..mode };
                    t.op(format!("cvt.{r}{modifiers}.{f}.{i}"), &[int.kind()], Float(format), move |x| {
                        float::from_integer(int.of(x[0]), mode)
                    });
                    // `.sat` changes nothing: the result is clamped to the integer's range anyway.
                    let mode = Mode { sat: false, ..mode };
                    float_to_integer(t, format!("cvt.{r}i{modifiers}.{i}.{f}"), mode, int);
                }
            }
        }
    }
}

fn float_to_integer(t: &mut Table, opcode: String, mode: Mode, int: IntType) {
    // NaN gives zero, but the top bit if a type is f64 or a 64-bit integer.
    let nan = if mode.format == F64 || int.bits == 64 { 1i128 << (int.bits - 1) } else { 0 };
    t.op(opcode, &[Float(mode.format)], int.kind(), move |x| {
        int.cut(float::to_integer(x[0], mode, int.range()).unwrap_or(nan))
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_form_has_a_name_of_its_own_that_the_virtual_gpu_knows() {
        let forms = all();
        let texts: BTreeSet<&str> = forms.iter().map(|form| &*form.text).collect();
        assert_eq!(texts.len(), forms.len());
        assert!(forms.len() > 700, "{}", forms.len());
        let unknown: Vec<&str> = forms
            .iter()
            .flat_map(|form| form.text.split_inclusive("; "))
            .filter_map(|instruction| instruction.split(' ').next())
            .filter(|opcode| !epoxide_vgpu::supported_opcode(opcode))
            .collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }

    #[test]
    fn what_ptxas_passes_on_wrongly_is_named() {
        let forms = all();
        let form = |name: &str| {
            let found = forms.iter().find(|form| form.text.starts_with(&format!("{name} ")));
            found.unwrap_or_else(|| panic!("no form {name}"))
        };
        for (writer, reader, kind) in [
            ("cvt.rn.bf16.f16", "cvt.rzi.u32.f16", Float(F16)),
            ("cvt.rp.f16.bf16", "abs.bf16", Float(Bf16)),
            ("cvt.sat.s16.u16", "add.f16", Float(F16)),
            ("cvt.rn.relu.satfinite.bf16.f32", "add.u16", Int(16)),
            ("mul.rz.ftz.f32", "shr.u64", Count),
            ("set.hs.xor.f32.u64", "add.u32", Int(32)),
            ("neg.s32", "cvt.sat.u32.s32", Int(32)),
            ("abs.s16", "setp.gt.s16", Int(16)),
            ("cvt.rz.bf16.f16", "cvt.rzi.u32.bf16", Float(Bf16)),
            ("cvt.rni.ftz.sat.u64.f32", "cvt.sat.u32.u64", Int(64)),
            ("cnot.b32", "add.f16x2", Pair(F16)),
        ] {
            assert!(form(writer).is_forwarded_wrongly_to(form(reader), kind), "{writer}");
        }
        for (writer, reader, kind) in [
            ("mul.rz.ftz.f32", "add.rn.f32", Float(F32)),
            ("add.u32", "add.rn.f32", Float(F32)),
            ("cvt.rz.bf16.f16", "abs.bf16", Float(Bf16)),
        ] {
            assert!(!form(writer).is_forwarded_wrongly_to(form(reader), kind), "{writer}");
        }
        assert!(form("max.f16").folds_equal_operands() && !form("max.s32").folds_equal_operands());
        for name in ["setp.gt.ftz.f32", "cvt.rzi.s8.f32", "cvt.rmi.sat.u8.f16", "cvt.rpi.ftz.u8.f32"] {
            assert!(form(name).is_wrong_where_paths_meet() && !form(name).may_be_guarded(), "{name}");
        }
        for name in ["setp.gt.f32", "cvt.rzi.s16.f32", "cvt.s8.s32", "cvt.rn.f32.s8"] {
            assert!(!form(name).is_wrong_where_paths_meet(), "{name}");
        }
    }

    #[test]
    fn values_worked_out_by_hand() {
        let forms = all();
        let check = |name: &str, x: &[u64], want: u64| {
            let form = forms.iter().find(|form| form.text.starts_with(&format!("{name} ")));
            let form = form.unwrap_or_else(|| panic!("no form {name}"));
            let got = form.eval.as_ref().unwrap()(x);
            assert_eq!(got, want, "{name}: {got:#x}, not {want:#x}");
        };
        check("mul.hi.u64", &[u64::MAX, u64::MAX], u64::MAX - 1);
        check("mul.hi.s32", &[0x8000_0000, 2], 0xffff_ffff);
        check("mad.lo.u64", &[u64::MAX, u64::MAX, 1], 2);
        check("sad.s16", &[0xffff, 1, 0], 2);
        check("div.s32", &[0x8000_0000, 0xffff_ffff], 0x8000_0000);
        check("shr.s16", &[0x8000, 99], 0xffff);
        check("bfe.s32", &[0x8000, 8, 8], 0xffff_ff80);
        check("bfind.s32", &[0xffff_fffd], 1);
        check("prmt.b32", &[0x3322_1180, 0x7766_5544, 0x9090], 0x0080_0080);
        check("dp4a.u32.s32", &[0xff, 0xff, 0], -255i32 as u32 as u64);
        check("cvt.s8.u32", &[0x80], 0xffff_ff80);
        check("cvt.sat.u8.s32", &[0xffff_ffff], 0);
        check("cvt.rzi.s64.f32", &[Format::F32.nan()], 1 << 63);
        check("cvt.rn.f16x2.e4m3x2", &[0x3840], 0x3c00_4000);
        check("add.rn.sat.f32", &[Format::F32.nan(), 0], 0);
        check("min.f32", &[0, 0x8000_0000], 0x8000_0000);
        check("fma.rn.bf16", &[0x4000, 0x3f80, 0x3f80], 0x4040);
    }
}

//! Forms whose result depends on more than their operands: on other lanes, on memory, on the place
//! of the thread. Only two devices can be compared with them; they have no formula.
//!
//! Their results are the same on every device and in every schedule. Lanes exchange values through
//! collectives of exactly the lanes that are there, warps through shared memory between barriers.
//! Atomics either have a word of their own, or they commute and their old values are dropped.
//!
//! Letters that a program replaces, beside those of [`Form::text`]:
//!
//! | letter | becomes |
//! |---|---|
//! | `$m` | the mask of the lanes that are at this place |
//! | `$t` | a distance between threads, below the threads of a block |
//! | `$c` | clamp and segments of `shfl` |
//! | `$i` | the offset of a row of the input |
//! | `$j`, `$h`, `$w`, `$e` | an offset into 16 bytes, a multiple of 1, 2, 4 or 8 |
//!
//! Registers with 16 bytes of the thread's own behind them: `%own` in shared memory that other
//! threads read between barriers, `%swap` where other lanes do, `%priv` in shared memory, `%cell`
//! in global memory, and the variable `stack` in local memory. `%tile` is where the `%own` of a
//! block begin; `%bins` and `%gbin` are 64 bytes that a block shares. `%me` is the thread, `%all`
//! the number of threads.

mod matrices;

use super::forms::{Form, Needs};
use super::kind::Format::*;
use super::kind::Kind::{self, *};

/// Every such form.
pub fn all() -> Vec<Form> {
    let mut t = Table(Vec::new());
    places(&mut t);
    moves(&mut t);
    calls(&mut t);
    tensor_floats(&mut t);
    warps(&mut t);
    blocks(&mut t);
    own_words(&mut t);
    read_only(&mut t);
    copies(&mut t);
    atomics(&mut t);
    float_atomics(&mut t);
    vector_atomics(&mut t);
    matrices::add(&mut t);
    t.0
}

struct Table(Vec<Form>);

impl Table {
    fn form(&mut self, needs: Needs, text: impl Into<String>, operands: &[Kind], result: Kind) {
        let (text, operands) = (text.into(), operands.to_vec());
        self.0.push(Form { text, operands, result, any_nan: false, needs, eval: None });
    }
}

const WORD: Kind = Int(32);
const LONG: Kind = Int(64);

fn places(t: &mut Table) {
    for name in [
        "laneid",
        "tid.x",
        "ntid.x",
        "ctaid.x",
        "nctaid.x",
        "tid.y",
        "lanemask_eq",
        "lanemask_lt",
        "lanemask_le",
        "lanemask_gt",
        "lanemask_ge",
    ] {
        t.form(Needs::Nothing, format!("mov.u32 $0, %{name};"), &[], WORD);
    }
}

/// Registers cut into parts and put together.
fn moves(t: &mut Table) {
    let half = Int(16);
    t.form(Needs::Nothing, "mov.b64 $0, {$1, $2};", &[WORD, WORD], LONG);
    t.form(Needs::Nothing, "mov.b64 {$0, %x}, $1;", &[LONG], WORD);
    t.form(Needs::Nothing, "mov.b64 {%x, $0}, $1;", &[LONG], WORD);
    t.form(Needs::Nothing, "mov.b32 $0, {$1, $2};", &[half, half], WORD);
    t.form(Needs::Nothing, "mov.b32 {%hx, $0}, $1;", &[WORD], half);
    t.form(Needs::Nothing, "mov.b64 $0, {$1, $2, $3, $4};", &[half; 4], LONG);
    t.form(Needs::Nothing, "mov.b64 {%hx, %hy, $0, %hx}, $1;", &[LONG], half);
}

/// Functions in front of the kernels of a module.
pub const FUNCTIONS: &str = "
.func (.param .b32 result) mix(.param .b32 a, .param .b32 b)
{
    .reg .pred %p;
    .reg .b32 %a, %b;
    ld.param.b32 %a, [a];
    ld.param.b32 %b, [b];
    setp.lt.s32 %p, %a, %b;
    @%p bra less;
    xor.b32 %a, %a, %b;
    bra end;
less:
    mad.lo.u32 %a, %a, 3, %b;
end:
    st.param.b32 [result], %a;
    ret;
}
.func (.param .b64 result) twice(.param .b32 a, .param .b64 b)
{
    .reg .b32 %a;
    .reg .b64 %b;
    ld.param.b32 %a, [a];
    ld.param.b64 %b, [b];
    .param .b32 v;
    .param .b32 w;
    st.param.b32 [v], %a;
    call (w), mix, (v, v);
    ld.param.b32 %a, [w];
    mad.wide.s32 %b, %a, 7, %b;
    st.param.b64 [result], %b;
    ret;
}
";

/// Calls of them, in code that lanes may have entered apart.
fn calls(t: &mut Table) {
    let text = "{ .param .b32 va; .param .b32 vb; .param .b32 vr; st.param.b32 [va], $1; st.param.b32 [vb], $2; \
                call (vr), mix, (va, vb); ld.param.b32 $0, [vr]; }";
    t.form(Needs::Nothing, text, &[WORD, WORD], WORD);
    let text = "{ .param .b32 va; .param .b64 vb; .param .b64 vr; st.param.b32 [va], $1; st.param.b64 [vb], $2; \
                call (vr), twice, (va, vb); ld.param.b64 $0, [vr]; }";
    t.form(Needs::Nothing, text, &[WORD, LONG], LONG);
}

/// Numbers for tensor cores, which have no formula here.
fn tensor_floats(t: &mut Table) {
    for modifiers in ["rn", "rz", "rn.relu", "rz.relu", "rna", "rna.satfinite"] {
        // ptxas cuts off the payload of a NaN here, and makes infinity or a number of it
        // (docs/KERNELS.md).
        let text = match modifiers {
            "rna" | "rna.satfinite" => format!(
                "setp.nan.f32 %q, $1, $1; selp.b32 %x, 0x7fffffff, $1, %q; cvt.{modifiers}.tf32.f32 $0, %x;"
            ),
            _ => format!("cvt.{modifiers}.tf32.f32 $0, $1;"),
        };
        t.form(Needs::Nothing, text, &[Float(F32)], Float(F32));
        t.0.iter_mut().last().into_iter().for_each(|form| form.any_nan = true);
    }
}

fn warps(t: &mut Table) {
    for what in ["all", "any", "uni"] {
        t.form(Needs::Mask, format!("vote.sync.{what}.pred $0, $1, $m;"), &[Pred], Pred);
    }
    t.form(Needs::Mask, "vote.sync.ballot.b32 $0, $1, $m;", &[Pred], WORD);
    t.form(Needs::Mask, "vote.sync.ballot.b32 $0, !$1, $m;", &[Pred], WORD);
    for (bits, kind, temporary) in [(32, WORD, "%y"), (64, LONG, "%u")] {
        // Values as they are, and values of which many are equal.
        for few in ["", "few"] {
            let (cut, of) = match few {
                "" => (String::new(), "$1"),
                _ => (format!("and.b{bits} {temporary}, $1, 3; "), temporary),
            };
            t.form(Needs::Mask, format!("{cut}match.any.sync.b{bits} $0, {of}, $m;"), &[kind], WORD);
            let all = format!("{cut}match.all.sync.b{bits}");
            t.form(Needs::Mask, format!("{all} $0|%q, {of}, $m;"), &[kind], WORD);
            t.form(Needs::Mask, format!("{all} %x|$0, {of}, $m;"), &[kind], Pred);
        }
        // Not of a literal: ptxas would then compute the outcome, and drop what a guard of it would
        // keep (docs/KERNELS.md).
        t.form(Needs::Mask, format!("match.all.sync.b{bits} %x|$0, %zero{bits}, $m;"), &[], Pred);
    }
    for op in
        ["add.u32", "add.s32", "min.u32", "min.s32", "max.u32", "max.s32", "and.b32", "or.b32", "xor.b32"]
    {
        t.form(Needs::Mask, format!("redux.sync.{op} $0, $1, $m;"), &[WORD], WORD);
    }
    // From a lane that is there: the lowest, the highest, the lane itself.
    let to_lane = [("brev.b32 %x, $m; clz.b32 %x, %x;"), ("bfind.u32 %x, $m;"), ("mov.u32 %x, %laneid;")];
    for lane in to_lane {
        t.form(Needs::Mask, format!("{lane} shfl.sync.idx.b32 $0, $1, %x, 0x1f, $m;"), &[WORD], WORD);
    }
    for mode in ["up", "down", "bfly", "idx"] {
        let op = format!("shfl.sync.{mode}.b32");
        t.form(Needs::Warp, format!("{op} $0|%q, $1, $2, $c, $m;"), &[WORD, WORD], WORD);
        t.form(Needs::Warp, format!("{op} %x|$0, $1, $2, $c, $m;"), &[WORD, WORD], Pred);
        t.form(Needs::Warp, format!("and.b32 %y, $3, 0x1f1f; {op} $0, $1, $2, %y, $m;"), &[WORD; 3], WORD);
        // The lanes of a whole warp, by a small distance.
        let clamp = if mode == "up" { 0 } else { 31 };
        t.form(Needs::Warp, format!("and.b32 %y, $2, 7; {op} $0, $1, %y, {clamp}, $m;"), &[WORD, WORD], WORD);
        t.form(
            Needs::Warp,
            format!("and.b32 %y, $2, 7; {op} %x|$0, $1, %y, {clamp}, $m;"),
            &[WORD, WORD],
            Pred,
        );
    }
    let swap = "bar.warp.sync $m; st.shared.b32 [%swap], $1; xor.b32 %y, %swap, 16; bar.warp.sync $m; ld.shared.b32 $0, [%y];";
    t.form(Needs::Warp, swap, &[WORD], WORD);
}

fn blocks(t: &mut Table) {
    for (op, result) in [("and.pred", Pred), ("or.pred", Pred), ("popc.u32", WORD)] {
        for operand in ["$1", "!$1"] {
            let op = op.replacen('.', ".aligned.", 1);
            t.form(Needs::Block, format!("barrier.cta.red.{op} $0, 0, {operand};"), &[Pred], result);
        }
        t.form(Needs::Block, format!("bar.red.{op} $0, 0, $1;"), &[Pred], result);
    }
    // Each thread stores 16 bytes, and loads from those of another.
    let far =
        "bar.sync 0; add.u32 %x, %me, $t; rem.u32 %x, %x, %all; shl.b32 %x, %x, 4; add.u32 %x, %x, %tile;";
    let store = "bar.sync 0; st.shared.v2.b32 [%own], {$1, $2}; st.shared.v2.b32 [%own+8], {$2, $1};";
    for (ty, offset, result) in loads() {
        t.form(
            Needs::Block,
            format!("{store} {far} ld.shared.{ty} $0, [%x+${offset}];"),
            &[WORD, WORD],
            result,
        );
    }
    let wide = "bar.warp.sync $m; barrier.sync 0; st.shared.v4.b32 [%own], {$1, $2, $3, $1};";
    let far = far.replace("bar.sync 0;", "bar.warp.sync $m; barrier.sync 0;");
    for part in ["{$0, %y, %y, %y}", "{%y, $0, %y, %y}", "{%y, %y, $0, %y}", "{%y, %y, %y, $0}"] {
        t.form(Needs::Block, format!("{wide} {far} ld.shared.v4.b32 {part}, [%x];"), &[WORD; 3], WORD);
    }
    let pair = "bar.sync 0; st.shared.v2.b64 [%own], {$1, $2}; bar.sync 0; add.u32 %x, %me, $t; rem.u32 %x, %x, %all; \
                shl.b32 %x, %x, 4; add.u32 %x, %x, %tile;";
    t.form(Needs::Block, format!("{pair} ld.shared.v2.b64 {{%u, $0}}, [%x];"), &[LONG, LONG], LONG);
    // Operations that commute, of all threads of a block on four words.
    let orders = ["add", "min", "max", "and", "or", "xor"];
    for (space, base) in [("shared", "%y"), ("global", "%u")] {
        let place = match space {
            "shared" => "and.b32 %x, %me, 3; shl.b32 %x, %x, 3; add.u32 %y, %x, %bins;",
            _ => "and.b32 %x, %me, 3; shl.b32 %x, %x, 3; cvt.u64.u32 %u, %x; add.u64 %u, %u, %gbin;",
        };
        let begin = format!(
            "bar.sync 0; {place} setp.lt.u32 %q, %me, 4; @%q st.{space}.b64 [{base}], 0x00ffee0012345678; bar.sync 0;"
        );
        for op in orders {
            for (ty, kind) in [("u32", WORD), ("s32", WORD), ("u64", LONG), ("s64", LONG)] {
                let bits = if kind == WORD { 32 } else { 64 };
                let ty = match op {
                    "and" | "or" | "xor" if ty.starts_with('s') => continue,
                    "and" | "or" | "xor" => format!("b{bits}"),
                    "add" if ty == "s64" => continue,
                    _ => ty.to_owned(),
                };
                let dropped = if kind == WORD { "%x" } else { "%v" };
                for change in [
                    format!("red.relaxed.gpu.{space}.{op}.{ty} [{base}], $1;"),
                    format!("atom.relaxed.cta.{space}.{op}.{ty} {dropped}, [{base}], $1;"),
                ] {
                    let text = format!("{begin} {change} bar.sync 0; ld.{space}.b{bits} $0, [{base}];");
                    t.form(Needs::Block, text, &[kind], kind);
                }
            }
        }
    }
}

/// Loads by type, with the letter of their offsets.
fn loads() -> [(&'static str, char, Kind); 12] {
    [
        ("u8", 'j', WORD),
        ("s8", 'j', WORD),
        ("u8", 'j', Int(16)),
        ("s8", 'j', Int(16)),
        ("s8", 'j', LONG),
        ("u16", 'h', WORD),
        ("s16", 'h', WORD),
        ("s16", 'h', LONG),
        ("b32", 'w', WORD),
        ("s32", 'w', LONG),
        ("u32", 'w', LONG),
        ("b64", 'e', LONG),
    ]
}

/// Stores and loads of a thread's own 16 bytes.
fn own_words(t: &mut Table) {
    for (space, base) in [("global", "%cell"), ("shared", "%priv"), ("local", "stack")] {
        let of = if space == "local" { "mov.u64 %u, stack; " } else { "" };
        let at = if space == "local" { "%u" } else { base };
        let fill =
            format!("{of}st.{space}.v2.b32 [{at}], {{$1, $2}}; st.{space}.v2.b32 [{at}+8], {{$2, $1}};");
        for (ty, offset, result) in loads() {
            t.form(
                Needs::Nothing,
                format!("{fill} ld.{space}.{ty} $0, [{at}+${offset}];"),
                &[WORD, WORD],
                result,
            );
        }
        for (ty, offset, operand) in
            [("b8", 'j', WORD), ("b8", 'j', Int(16)), ("b16", 'h', Int(16)), ("b32", 'w', WORD)]
        {
            let text = format!("{fill} st.{space}.{ty} [{at}+${offset}], $3; ld.{space}.b64 $0, [{at}+$e];");
            t.form(Needs::Nothing, text, &[WORD, WORD, operand], LONG);
        }
        let text = format!(
            "{of}st.{space}.v4.b32 [{at}], {{$1, $2, $3, $2}}; ld.{space}.v4.b32 {{%x, %y, $0, %x}}, [{at}];"
        );
        t.form(Needs::Nothing, text, &[WORD; 3], WORD);
    }
    // An index that is computed at run time.
    let indexed = "st.local.v2.b32 [stack], {$1, $2}; st.local.v2.b32 [stack+8], {$2, $1}; and.b32 %x, $3, 12; \
                   cvt.u64.u32 %u, %x; mov.u64 %v, stack; add.u64 %u, %u, %v;";
    t.form(Needs::Nothing, format!("{indexed} ld.local.b32 $0, [%u];"), &[WORD; 3], WORD);
    t.form(Needs::Nothing, format!("{indexed} cvta.local.u64 %u, %u; ld.b32 $0, [%u];"), &[WORD; 3], WORD);
    // Generic addresses.
    let generic = "st.b64 [%cell+$e], $1; ld.global.b64 $0, [%cell+$e];";
    t.form(Needs::Nothing, generic, &[LONG], LONG);
    let generic =
        "st.shared.b64 [%priv+$e], $1; cvt.u64.u32 %u, %priv; cvta.shared.u64 %u, %u; ld.b64 $0, [%u+$e];";
    t.form(Needs::Nothing, generic, &[LONG], LONG);
}

/// Loads of the input, which nothing writes.
fn read_only(t: &mut Table) {
    for (ty, _, result) in loads() {
        t.form(Needs::Nothing, format!("ld.global.nc.{ty} $0, [%in+$i];"), &[], result);
    }
    t.form(Needs::Nothing, "ld.global.nc.v2.b32 {%x, $0}, [%in+$i];", &[], WORD);
    t.form(Needs::Nothing, "ld.global.v4.b16 {%hx, %hy, $0, %hx}, [%in+$i];", &[], Int(16));
}

/// Asynchronous copies of the input, which their own thread waits for.
fn copies(t: &mut Table) {
    let (all, group) = ("cp.async.wait_all;", "cp.async.commit_group; cp.async.wait_group 0;");
    for wait in [all, group] {
        for (copy, bits, kind) in [
            ("cp.async.ca.shared.global [%priv], [%in+$i], 4;", 32, WORD),
            ("cp.async.ca.shared.global [%priv+8], [%in+$i], 8;", 64, LONG),
            ("cp.async.ca.shared.global [%priv+8], [%in+$i], 8, 3;", 64, LONG),
        ] {
            let at = if bits == 32 { "%priv" } else { "%priv+8" };
            t.form(Needs::Nothing, format!("{copy} {wait} ld.shared.b{bits} $0, [{at}];"), &[], kind);
        }
        // Sizes that are computed at run time, and a predicate that ignores the source.
        let size = "and.b32 %x, $1, 7; min.u32 %x, %x, 4;";
        let copy = "cp.async.ca.shared.global.L2::128B [%priv], [%in+$i], 4, %x;";
        t.form(Needs::Nothing, format!("{size} {copy} {wait} ld.shared.b32 $0, [%priv];"), &[WORD], WORD);
        for ignored in ["$1", "!$1"] {
            let copy = format!("cp.async.ca.shared::cta.global [%priv+8], [%in+$i], 8, {ignored};");
            t.form(Needs::Nothing, format!("{copy} {wait} ld.shared.b64 $0, [%priv+8];"), &[Pred], LONG);
        }
        // 16 bytes, which the two values of neighbours are.
        for size in ["16", "16, 5", "16, 0"] {
            let copy = format!("ld.param.u64 %u, [in]; cp.async.cg.shared.global [%priv], [%u+$i], {size};");
            t.form(Needs::Nothing, format!("{copy} {wait} ld.shared.b64 $0, [%priv+$e];"), &[], LONG);
        }
    }
}

/// Sums of floats on a word of the thread's own: the old value, and the new one.
fn float_atomics(t: &mut Table) {
    let types = [
        ("f32", Float(F32)),
        ("f64", Float(F64)),
        ("noftz.f16", Float(F16)),
        ("noftz.bf16", Float(Bf16)),
        ("noftz.f16x2", Pair(F16)),
        ("noftz.bf16x2", Pair(Bf16)),
    ];
    for (ty, kind) in types {
        let bits = kind.bits();
        for (space, at) in [("global", "%cell"), ("shared", "%priv")] {
            // The word is compared in the end, and a NaN in it has bits that the manual leaves
            // open.
            let first = format!("st.{space}.b{bits} [{at}], $1;");
            let old = format!("{first} atom.{space}.add.{ty} $0, [{at}], $2; {first}");
            t.form(Needs::Nothing, old, &[kind, kind], kind);
            let change = format!("red.{space}.add.{ty} [{at}], $2;");
            let sum = match bits {
                16 => "%hx",
                32 => "%x",
                _ => "%u",
            };
            // Through a free register: the result's may be that of the first operand.
            let new =
                format!("{first} {change} ld.{space}.b{bits} {sum}, [{at}]; {first} mov.b{bits} $0, {sum};");
            t.form(Needs::Nothing, new, &[kind, kind], kind);
            t.0.iter_mut().last().into_iter().for_each(|form| form.any_nan = true);
        }
    }
}

/// Sums of vectors of floats: an old value, and a new one.
fn vector_atomics(t: &mut Table) {
    for (ty, most, kind) in [
        ("f32", 4, Float(F32)),
        ("noftz.f16x2", 4, Pair(F16)),
        ("noftz.bf16x2", 4, Pair(Bf16)),
        ("noftz.f16", 8, Float(F16)),
        ("noftz.bf16", 8, Float(Bf16)),
    ] {
        for n in [2, 4, 8].into_iter().filter(|n| *n <= most) {
            let bits = kind.bits();
            let (part, other) = if bits == 16 { ("%hx", "%hy") } else { ("%x", "%y") };
            let list = |first: &str, others: &str| {
                vec![first].into_iter().chain(vec![others; n - 1]).collect::<Vec<_>>().join(", ")
            };
            let (noftz, format) = ty.rsplit_once('.').map_or(("", ty), |(_, format)| (".noftz", format));
            // One of two operands is the first number, and the other is all others.
            let fill: String = (0..n)
                .map(|i| {
                    format!(
                        "st.global.b{bits} [%cell+{}], ${};",
                        i as u32 * bits / 8,
                        if i == 0 { 1 } else { 2 }
                    )
                })
                .collect();
            let added = list("$2", "$1");
            let old = format!(
                "{fill} atom.global.add{noftz}.v{n}.{format} {{{}}}, [%cell], {{{added}}};",
                list(other, part)
            );
            let new = format!(
                "{fill} red.global.add{noftz}.v{n}.{format} [%cell], {{{added}}}; ld.global.b{bits} {part}, [%cell+{}];",
                (n as u32 - 1) * bits / 8
            );
            // A NaN in memory has bits that the manual leaves open.
            for text in [old, new] {
                t.form(Needs::Nothing, format!("{text} {fill} mov.b{bits} $0, {part};"), &[kind, kind], kind);
                t.0.iter_mut().last().into_iter().for_each(|form| form.any_nan = true);
            }
        }
    }
}

/// Atomics on a word of the thread's own: the old value, and the new one.
fn atomics(t: &mut Table) {
    let list = [
        ("add", "u32 s32 u64"),
        ("min", "u32 s32 u64 s64"),
        ("max", "u32 s32 u64 s64"),
        ("and", "b32 b64"),
        ("or", "b32 b64"),
        ("xor", "b32 b64"),
        ("inc", "u32"),
        ("dec", "u32"),
        ("exch", "b32 b64"),
        ("cas", "b16 b32 b64"),
    ];
    for (op, types) in list {
        for ty in types.split(' ') {
            let bits: u32 = ty[1..].parse().unwrap_or(32);
            let kind = Int(bits);
            for (space, at) in [("global", "%cell"), ("shared", "%priv")] {
                let first = format!("st.{space}.b{bits} [{at}], $1;");
                let (operands, list) = match op {
                    "cas" => (vec![kind; 3], "$2, $3"),
                    _ => (vec![kind; 2], "$2"),
                };
                t.form(
                    Needs::Nothing,
                    format!("{first} atom.{space}.{op}.{ty} $0, [{at}], {list};"),
                    &operands,
                    kind,
                );
                let load = format!("ld.{space}.b{bits} $0, [{at}];");
                let sink = match bits {
                    16 => "%hx",
                    32 => "%x",
                    _ => "%u",
                };
                let change = match op {
                    "cas" | "exch" => format!("atom.relaxed.cta.{space}.{op}.{ty} {sink}, [{at}], {list};"),
                    _ => format!("red.{space}.{op}.{ty} [{at}], {list};"),
                };
                t.form(Needs::Nothing, format!("{first} {change} {load}"), &operands, kind);
            }
        }
    }
    // A swap that happens.
    for (bits, kind) in [(32, WORD), (64, LONG)] {
        let text = format!(
            "st.global.b{bits} [%cell], $1; atom.global.cas.b{bits} $0, [%cell], $1, $2; ld.global.b{bits} $0, [%cell];"
        );
        t.form(Needs::Nothing, text, &[kind, kind], kind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_narrow_load_is_passed_on_wrongly_to_packed_operands() {
        let forms = all();
        let named = |part: &str| forms.iter().find(|form| form.text.contains(part)).unwrap();
        let reader = named("red.shared.add.noftz.f16x2");
        for narrow in ["ld.shared.s16 $0", "ld.global.u8 $0", "ld.local.s8 $0"] {
            assert!(named(narrow).is_forwarded_wrongly_to(reader, Pair(F16)), "{narrow}");
            assert!(!named(narrow).is_forwarded_wrongly_to(reader, WORD), "{narrow}");
        }
        assert!(!named("ld.shared.b32 $0").is_forwarded_wrongly_to(reader, Pair(F16)));
    }

    #[test]
    fn open_bits_of_a_nan_stay_out_of_what_is_compared() {
        let forms = all();
        let sums: Vec<&Form> =
            forms.iter().filter(|form| form.any_nan && form.text.contains("red.")).collect();
        assert_eq!(sums.len(), 24);
        for form in sums {
            let last = form.text.rfind("$1");
            assert!(form.text.find("$0") > last, "memory gets the sum where $0 is $1: {}", form.text);
        }
        for opcode in ["cvt.rna.tf32.f32", "cvt.rna.satfinite.tf32.f32"] {
            let form = forms.iter().find(|form| form.text.contains(opcode));
            assert!(form.is_some_and(|form| form.text.starts_with("setp.nan.f32 %q, $1, $1;")), "{opcode}");
        }
    }
}

//! Tiles of a warp: `mma.sync`, `ldmatrix` and their like.
//!
//! Sums of products of integers are exact. Those of floats have an order that the manual leaves
//! open, so their elements are 0.5, 0.75, 1 and 1.5, whose sums are exact. Sums of f64 are fused
//! multiply-adds in the order of k, whatever the elements.

use super::*;

pub(super) fn add(t: &mut Table) {
    integers(t);
    bits(t);
    doubles(t);
    floats(t);
    sparse_integers(t);
    sparse_floats(t);
    tiles(t);
}

/// Registers of which the one at `at` is the result.
fn parts(count: usize, at: usize) -> String {
    let names: Vec<&str> = (0..count).map(|i| if i == at { "$0" } else { ["%x", "%y"][i % 2] }).collect();
    names.join(", ")
}

/// `count` operands, from the one of this number on.
fn operands(count: usize, first: usize) -> String {
    let names: Vec<String> = (0..count).map(|i| format!("${}", (first + i) % 4 + 1)).collect();
    names.join(", ")
}

fn integers(t: &mut Table) {
    for (shape, bits, a, b, sums) in [
        ("m8n8k16", 8, "$1", "$2", 2),
        ("m16n8k16", 8, "$1, $2", "$3", 4),
        ("m16n8k32", 8, "$1, $2, $3, $4", "$2, $4", 4),
        ("m8n8k32", 4, "$1", "$2", 2),
        ("m16n8k32", 4, "$1, $2", "$3", 4),
        ("m16n8k64", 4, "$1, $2, $3, $4", "$2, $4", 4),
    ] {
        for (left, right) in [("s", "s"), ("u", "u"), ("s", "u"), ("u", "s")] {
            for modifier in ["", ".satfinite"] {
                for at in [0, sums - 1] {
                    let d = parts(sums, at);
                    let c = ["$1", "$4", "$3", "$4"][..sums].join(", ");
                    let text = format!(
                        "bar.warp.sync $m; mma.sync.aligned.{shape}.row.col{modifier}.s32.{left}{bits}.{right}{bits}.s32 \
                         {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}};"
                    );
                    t.form(Needs::Warp, text, &[WORD; 4], WORD);
                }
            }
        }
    }
}

/// `.b1`: bits that both have, or that differ, are counted.
fn bits(t: &mut Table) {
    for (shape, a, b, sums) in [("m8n8k128", 1, 1, 2), ("m16n8k128", 2, 1, 4), ("m16n8k256", 4, 2, 4)] {
        for (op, at) in [("and", 0), ("xor", 0), ("and", sums - 1), ("xor", sums - 1)] {
            let (d, a, b, c) = (parts(sums, at), operands(a, 0), operands(b, 1), operands(sums, 2));
            let text = format!(
                "bar.warp.sync $m; mma.sync.aligned.{shape}.row.col.s32.b1.b1.s32.{op}.popc {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}};"
            );
            t.form(Needs::Warp, text, &[WORD; 4], WORD);
        }
    }
}

fn doubles(t: &mut Table) {
    for (shape, a, b, sums) in
        [("m8n8k4", 1, 1, 2), ("m16n8k4", 2, 1, 4), ("m16n8k8", 4, 2, 4), ("m16n8k16", 8, 4, 4)]
    {
        for round in ["", ".rz", ".rm", ".rp"] {
            for at in [0, sums - 1] {
                let d = (0..sums).map(|i| if i == at { "$0" } else { "%u" }).collect::<Vec<_>>().join(", ");
                let (a, b, c) = (operands(a, 0), operands(b, 1), operands(sums, 2));
                let text = format!(
                    "bar.warp.sync $m; mma.sync.aligned.{shape}.row.col{round}.f64.f64.f64.f64 {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}};"
                );
                t.form(Needs::Warp, text, &[Float(F64); 4], Float(F64));
                t.0.iter_mut().last().into_iter().for_each(|form| form.any_nan = true);
            }
        }
    }
}

/// Types of factors: the bits that stay random, and the bits of 0.5. The others are 0.
const FACTORS: [(&str, u32, u32); 5] = [
    ("f16", 0x8600_8600, 0x3800_3800),
    ("bf16", 0x80c0_80c0, 0x3f00_3f00),
    ("tf32", 0x80c0_0000, 0x3f00_0000),
    ("e4m3", 0x8c8c_8c8c, 0x3030_3030),
    ("e5m2", 0x8686_8686, 0x3838_3838),
];

/// Random bits made numbers whose products have exact sums: the instructions, and the registers of
/// A, B and C. All of A are one register, and so are all of B.
fn few_values(factors: [(&str, u32, u32); 2], sum: &str, counts: [usize; 3]) -> (String, [String; 3]) {
    let [(_, keep_a, half_a), (_, keep_b, half_b)] = factors;
    let (keep_c, half_c) =
        if sum == "f16" { (FACTORS[0].1, FACTORS[0].2) } else { (FACTORS[2].1, FACTORS[2].2) };
    let mut text = String::from("bar.warp.sync $m; { .reg .b32 %fa<2>; .reg .b32 %fb<2>; .reg .b32 %fc<2>; ");
    for i in 0..2 {
        let (a, b, c) = (i + 1, i + 2, i + 3);
        text += &format!(
            "and.b32 %fa{i}, ${a}, {keep_a:#x}; or.b32 %fa{i}, %fa{i}, {half_a:#x}; \
             and.b32 %fb{i}, ${b}, {keep_b:#x}; or.b32 %fb{i}, %fb{i}, {half_b:#x}; \
             and.b32 %fc{i}, ${c}, {keep_c:#x}; or.b32 %fc{i}, %fc{i}, {half_c:#x}; "
        );
    }
    let list =
        |name: &str, n: usize| (0..n).map(|i| format!("%f{name}{}", i % 2)).collect::<Vec<_>>().join(", ");
    (text, [list("a", counts[0]), list("b", counts[1]), list("c", counts[2])])
}

fn floats(t: &mut Table) {
    let [f16, bf16, tf32, e4m3, e5m2] = FACTORS;
    for (shape, left, right, sum, counts) in [
        ("m16n8k8", f16, f16, "f32", [2, 1, 4]),
        ("m16n8k16", f16, f16, "f32", [4, 2, 4]),
        ("m16n8k8", f16, f16, "f16", [2, 1, 2]),
        ("m16n8k16", f16, f16, "f16", [4, 2, 2]),
        ("m16n8k8", bf16, bf16, "f32", [2, 1, 4]),
        ("m16n8k16", bf16, bf16, "f32", [4, 2, 4]),
        ("m16n8k4", tf32, tf32, "f32", [2, 1, 4]),
        ("m16n8k8", tf32, tf32, "f32", [4, 2, 4]),
        ("m16n8k32", e4m3, e5m2, "f32", [4, 2, 4]),
        ("m16n8k32", e5m2, e4m3, "f32", [4, 2, 4]),
    ] {
        let (begin, [a, b, c]) = few_values([left, right], sum, counts);
        for at in [0, counts[2] - 1] {
            let (d, of_a, of_b) = (parts(counts[2], at), left.0, right.0);
            let text = format!(
                "{begin}mma.sync.aligned.{shape}.row.col.{sum}.{of_a}.{of_b}.{sum} {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}}; }}"
            );
            t.form(Needs::Warp, text, &[WORD; 4], WORD);
        }
    }
}

/// Instructions that make valid metadata of random bits, in `%m0`: two ways for each of the types.
/// `mma.sp` allows any order of two indices, and `::ordered_metadata` does not.
fn metadata(from: &str, element: &str, ordered: bool) -> [String; 2] {
    // 0b0100 and 0b1110.
    let adjacent =
        format!("and.b32 %m0, {from}, 0x11111111; mul.lo.u32 %m0, %m0, 10; or.b32 %m0, %m0, 0x44444444; ");
    // One of the first two elements, and one of the last two.
    let apart = format!("and.b32 %m0, {from}, 0x55555555; or.b32 %m0, %m0, 0x88888888; ");
    // The second index is the first one with one bit changed, or both.
    let any = format!(
        "shr.u32 %m1, {from}, 2; and.b32 %m1, %m1, 0x33333333; shr.u32 %m2, %m1, 1; or.b32 %m2, %m1, %m2; \
         not.b32 %m2, %m2; and.b32 %m2, %m2, 0x11111111; or.b32 %m1, %m1, %m2; and.b32 %m0, {from}, 0x33333333; \
         xor.b32 %m1, %m1, %m0; shl.b32 %m1, %m1, 2; or.b32 %m0, %m0, %m1; "
    );
    match (element, ordered) {
        ("tf32", _) => [adjacent.clone(), adjacent],
        (_, true) => [adjacent, apart],
        _ => [any, apart],
    }
}

/// The product of a sparse A: of a shape and types, with registers of A, B, C and D, and a selector.
fn sparse(
    t: &mut Table,
    begin: &str,
    element: &str,
    types: &str,
    registers: [&str; 3],
    sums: usize,
    selector: usize,
) {
    let [a, b, c] = registers;
    for (kind, ordered) in [("sp", false), ("sp::ordered_metadata", true)] {
        for (at, metadata) in [0, sums - 1].into_iter().zip(metadata("$4", element, ordered)) {
            let d = parts(sums, at);
            let text = format!(
                "{begin}.reg .b32 %m<3>; {metadata}mma.{kind}.sync.aligned.{types} {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}}, %m0, {selector}; }}"
            );
            t.form(Needs::Warp, text, &[WORD; 4], WORD);
        }
    }
}

fn sparse_integers(t: &mut Table) {
    for (shape, bits, a, selectors) in
        [("m16n8k32", 8, 2, 2), ("m16n8k64", 8, 4, 1), ("m16n8k64", 4, 2, 2), ("m16n8k128", 4, 4, 1)]
    {
        for (i, (left, right)) in [("s", "s"), ("u", "u"), ("s", "u"), ("u", "s")].into_iter().enumerate() {
            let saturates = if i % 2 == 0 { "" } else { ".satfinite" };
            let types = format!("{shape}.row.col{saturates}.s32.{left}{bits}.{right}{bits}.s32");
            let registers = [operands(a, 0), operands(a, 1), operands(4, 2)];
            let registers = registers.each_ref().map(String::as_str);
            sparse(t, "bar.warp.sync $m; { ", "", &types, registers, 4, i / 2 % selectors);
        }
    }
}

fn sparse_floats(t: &mut Table) {
    let [f16, bf16, tf32, e4m3, e5m2] = FACTORS;
    for (shape, left, right, sum, counts, selectors) in [
        ("m16n8k16", f16, f16, "f32", [2, 2, 4], 4),
        ("m16n8k32", f16, f16, "f32", [4, 4, 4], 2),
        ("m16n8k16", f16, f16, "f16", [2, 2, 2], 4),
        ("m16n8k32", f16, f16, "f16", [4, 4, 2], 2),
        ("m16n8k16", bf16, bf16, "f32", [2, 2, 4], 4),
        ("m16n8k32", bf16, bf16, "f32", [4, 4, 4], 2),
        ("m16n8k8", tf32, tf32, "f32", [2, 2, 4], 4),
        ("m16n8k16", tf32, tf32, "f32", [4, 4, 4], 2),
        ("m16n8k64", e4m3, e5m2, "f32", [4, 4, 4], 1),
        ("m16n8k64", e5m2, e4m3, "f32", [4, 4, 4], 1),
    ] {
        let (begin, registers) = few_values([left, right], sum, counts);
        let types = format!("{shape}.row.col.{sum}.{}.{}.{sum}", left.0, right.0);
        let registers = registers.each_ref().map(String::as_str);
        for selector in 0..selectors {
            sparse(t, &begin, left.0, &types, registers, counts[2], selector);
        }
    }
}

fn tiles(t: &mut Table) {
    let text = "bar.warp.sync $m; movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;";
    t.form(Needs::Warp, text, &[WORD], WORD);
    // 16 bytes of each lane, which are rows of matrices.
    let fill = "bar.warp.sync $m; st.shared.v4.b32 [%swap], {$1, $2, $3, $1}; bar.warp.sync $m;";
    for trans in ["", ".trans"] {
        for (count, at) in [(1, 0), (2, 0), (2, 1), (4, 0), (4, 3)] {
            let d = parts(count, at);
            let text =
                format!("{fill} ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{d}}}, [%swap];");
            t.form(Needs::Warp, text, &[WORD; 3], WORD);
            let generic = "cvt.u64.u32 %u, %swap; cvta.shared.u64 %u, %u;";
            let text =
                format!("{fill} {generic} ldmatrix.sync.aligned.m8n8.x{count}{trans}.b16 {{{d}}}, [%u];");
            t.form(Needs::Warp, text, &[WORD; 3], WORD);
        }
        for count in [1, 2, 4] {
            let from = ["$1", "$2", "$3", "$2"][..count].join(", ");
            let text = format!(
                "{fill} stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%swap], {{{from}}}; bar.warp.sync $m; \
                 ld.shared.b64 $0, [%swap+$e];"
            );
            t.form(Needs::Warp, text, &[WORD; 3], LONG);
        }
    }
}

//! Products of matrices: `wmma` from memory to memory, `mma.sync` and `mma.sp` from registers to
//! registers, and `wgmma` of registers and shared memory.
//! Registers and memory hold random elements, so the place of an element does not matter here.

use std::rc::Rc;

use super::Case;
use crate::tensor_maps::Rng;

/// A format of elements: bits, and those of exponent and mantissa. An integer has no mantissa.
#[derive(Clone, Copy, PartialEq)]
struct Format {
    name: &'static str,
    bits: u32,
    exponent: u32,
    mantissa: u32,
    /// Bits of 0 behind the mantissa.
    padding: u32,
}

const fn format(name: &'static str, bits: u32, exponent: u32, mantissa: u32) -> Format {
    Format { name, bits, exponent, mantissa, padding: 0 }
}

const F16: Format = format("f16", 16, 5, 10);
const BF16: Format = format("bf16", 16, 8, 7);
const TF32: Format = Format { padding: 13, ..format("tf32", 32, 8, 10) };
const E4M3: Format = format("e4m3", 8, 4, 3);
const E5M2: Format = format("e5m2", 8, 5, 2);
const F32: Format = format("f32", 32, 8, 23);
const F64: Format = format("f64", 64, 11, 52);
const S8: Format = format("s8", 8, 0, 0);
const U8: Format = format("u8", 8, 0, 0);
const S32: Format = format("s32", 32, 0, 0);

impl Format {
    /// The bits of a number that the format has.
    fn bits_of(self, number: f64) -> u64 {
        let (bias, mantissa) = ((1 << (self.exponent - 1)) - 1, self.mantissa as i32);
        let magnitude = number.abs();
        let exponent = (magnitude.to_bits() >> 52) as i32 - 1023;
        let bits = match exponent + bias {
            _ if number == 0.0 => 0,
            ..=0 => (magnitude * 2f64.powi(mantissa + bias - 1)) as u64,
            biased => {
                (biased as u64) << mantissa | (magnitude.to_bits() & ((1 << 52) - 1)) >> (52 - mantissa)
            }
        };
        (bits | u64::from(number < 0.0) << (self.bits - 1 - self.padding)) << self.padding
    }

    /// The smallest positive number.
    fn smallest(self) -> f64 {
        2f64.powi(2 - (1 << (self.exponent - 1)) - self.mantissa as i32)
    }

    /// A number whose exponent is at most `most` from 0, or, one in 16, a zero.
    fn any(self, rng: &mut Rng, most: i64) -> u64 {
        let bias = (1 << (self.exponent - 1)) - 1;
        let exponent = (bias + rng.from(-most, most)).clamp(0, (1 << self.exponent) - 2) as u64;
        let bits = rng.next() & ((1 << self.mantissa) - 1) | exponent << self.mantissa;
        let sign = (rng.next() & 1) << (self.bits - 1 - self.padding);
        if rng.from(0, 15) == 0 { 0 } else { (bits | sign) << self.padding }
    }

    /// An infinity, a NaN or a zero.
    fn special(self, rng: &mut Rng) -> u64 {
        let sign = (rng.next() & 1) << (self.bits - 1);
        let infinity = ((1 << self.exponent) - 1) << self.mantissa;
        let payload = 1 + rng.next() % ((1 << self.mantissa) - 1);
        let magnitude = match rng.from(0, 3) {
            0 => 0,
            // It has no infinity and one NaN.
            _ if self == E4M3 => 0x7f,
            1 => infinity | payload,
            _ => infinity,
        };
        sign | magnitude << self.padding
    }
}

/// Numbers of matrices.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Numbers {
    /// Whole numbers; all bits of integers are random.
    Whole,
    /// The same with infinities, NaNs and negative zeros.
    Special,
    /// Sums that are multiples of the smallest number of A.
    Small,
    /// Any numbers whose exponents are at most so far from 0. Their sums are not exact.
    Any(i64),
}

const ALL: [Numbers; 3] = [Numbers::Whole, Numbers::Special, Numbers::Small];
const INEXACT: [Numbers; 4] = [Numbers::Any(0), Numbers::Any(3), Numbers::Any(10), Numbers::Any(100)];

/// Bytes of elements of matrix 0 (A) to 2 (C), the factors of which are of format `a`.
fn elements(
    rng: &mut Rng,
    format: Format,
    matrix: usize,
    numbers: Numbers,
    a: Format,
    bytes: usize,
) -> Vec<u8> {
    let element = |rng: &mut Rng| {
        if format.exponent == 0 {
            return match format.bits {
                // Sums of which some are near the bounds.
                32 => rng.of(&[0, 0x7fff_fff0, 0x8000_0010, 77]),
                _ => rng.next(),
            };
        }
        if format == F64 {
            let mantissa = rng.from(-(1 << 52), 1 << 52) as f64;
            return (mantissa * 2f64.powi(rng.from(-60, 8) as i32)).to_bits();
        }
        if numbers == Numbers::Special && rng.from(0, 15) == 0 {
            return format.special(rng);
        }
        if let Numbers::Any(most) = numbers {
            return format.any(rng, if matrix == 2 { 2 * most + 2 } else { most });
        }
        let whole = if matrix == 2 {
            rng.from(-500, 500) as f64
        } else {
            f64::from(rng.of(&[0, 1, 2, 3, 4, 6, -1, -2, -3, -4, -6]))
        };
        let number = match (numbers, matrix) {
            (Numbers::Small, 0) => rng.from(-3, 3) as f64 * a.smallest(),
            (Numbers::Small, 2) => rng.from(-15, 15) as f64 * a.smallest(),
            _ => whole,
        };
        format.bits_of(number)
    };
    let each = format.bits as usize / 8;
    (0..bytes / each).flat_map(|_| element(rng).to_le_bytes().into_iter().take(each)).collect()
}

/// Bytes of memory of one matrix.
const ROOM: usize = 8192;

fn list(name: &str, count: usize) -> String {
    let names: Vec<_> = (0..count).map(|i| format!("%{name}{i}")).collect();
    format!("{{{}}}", names.join(", "))
}

pub fn cases() -> Vec<Case> {
    let mut cases = vec![];
    fragments(&mut cases);
    registers(&mut cases);
    warpgroups(&mut cases);
    cases
}

/// A case whose kernel gets the address of `memory`, and leaves its result behind byte `result`.
fn case(name: String, ptx: &Rc<str>, kernel: String, memory: Vec<u8>, result: usize) -> Case {
    let (ptx, buffers, result) = (Rc::clone(ptx), vec![memory], (0, result));
    Case { name, ptx, kernel, shape: [1, 32], buffers, map: None, words: vec![], result }
}

/// `wmma`: each shape and type, with all layouts of the four matrices.
fn fragments(cases: &mut Vec<Case>) {
    fragments_of(cases, Rng(5), &ALL);
    fragments_of(cases, Rng(13), &INEXACT);
}

fn fragments_of(cases: &mut Vec<Case>, mut rng: Rng, kinds: &[Numbers]) {
    let mut products = vec![("m16n16k8", TF32, F32, [4, 4, 8], "")];
    for round in ["", ".rn", ".rz", ".rm", ".rp"] {
        products.push(("m8n8k4", F64, F64, [1, 1, 2], round));
    }
    for (shape, halves, bytes) in
        [("m16n16k16", [4, 4], [2, 2]), ("m32n8k16", [8, 2], [4, 1]), ("m8n32k16", [2, 8], [1, 4])]
    {
        products.push((shape, F16, F16, [8, 8, 4], ""));
        products.push((shape, F16, F32, [8, 8, 8], ""));
        products.push((shape, BF16, F32, [halves[0], halves[1], 8], ""));
        for saturates in ["", ".satfinite"] {
            products.push((shape, S8, S32, [bytes[0], bytes[1], 8], saturates));
            products.push((shape, U8, S32, [bytes[0], bytes[1], 8], saturates));
        }
    }
    for (shape, factor, sum, counts, modifier) in products {
        let name = format!("wmma {shape} {} {}{modifier}", factor.name, sum.name);
        let mut text = String::from(".version 8.6\n.target sm_90a\n.address_size 64\n");
        for layouts in 0..16 {
            let strides: [Option<i64>; 4] =
                std::array::from_fn(|_| (rng.from(0, 1) == 1).then(|| 16 * rng.from(2, 3)));
            text += &fragment_kernel(shape, [factor, sum], counts, modifier, layouts, strides);
        }
        let ptx: Rc<str> = text.into();
        for &numbers in kinds {
            if numbers != Numbers::Whole && (factor == F64 || factor.exponent == 0) {
                continue;
            }
            for layouts in 0..16 {
                let mut memory = vec![];
                for (matrix, format) in [factor, factor, sum].into_iter().enumerate() {
                    memory.extend(elements(&mut rng, format, matrix, numbers, factor, ROOM));
                }
                memory.extend(rng.bytes(ROOM));
                let name = format!("{name} {numbers:?}");
                cases.push(case(name, &ptx, format!("k{layouts}"), memory, 3 * ROOM));
            }
        }
    }
}

/// Loads, a product and a store of consecutive matrices. Bit `i` of `layouts`: matrix `i` is stored
/// by rows.
fn fragment_kernel(
    shape: &str,
    [factor, sum]: [Format; 2],
    counts: [usize; 3],
    modifier: &str,
    layouts: usize,
    strides: [Option<i64>; 4],
) -> String {
    let layout = |i: usize| if layouts >> i & 1 == 1 { "row" } else { "col" };
    let stride = |i: usize| strides[i].map_or(String::new(), |stride| format!(", {stride}"));
    let (space, base) = [("", "%rd1"), (".global", "%rd1"), (".shared", "%r1")][layouts % 3];
    let bits = if sum.bits == 64 { 64 } else { 32 };
    let mut text = format!(
        ".visible .entry k{layouts}(.param .u64 memory)\n{{
.reg .pred %p<2>; .reg .b32 %r<8>; .reg .b64 %rd<8>;
.reg .b{bits} %a<8>; .reg .b{bits} %b<8>; .reg .b{bits} %c<8>;
.shared .align 128 .b8 M[{room}];
ld.param.u64 %rd1, [memory]; mov.u32 %r1, M; mov.u32 %r4, %tid.x; shl.b32 %r4, %r4, 3; mov.u32 %r2, %r4;
IN: add.u32 %r3, %r1, %r2; cvt.u64.u32 %rd2, %r2; add.u64 %rd2, %rd1, %rd2;
ld.global.u64 %rd3, [%rd2]; st.shared.u64 [%r3], %rd3; add.u32 %r2, %r2, 256;
setp.lt.u32 %p1, %r2, {room}; @%p1 bra IN; bar.sync 0;\n",
        room = 4 * ROOM
    );
    for (i, letter, ty) in [(0, "a", factor.name), (1, "b", factor.name), (2, "c", sum.name)] {
        text += &format!(
            "wmma.load.{letter}.sync.aligned.{}.{shape}{space}.{ty} {}, [{base}+{}]{};\n",
            layout(i),
            list(letter, counts[i]),
            i * ROOM,
            stride(i)
        );
    }
    let types = match factor.name {
        "f16" => format!("{0}.{0}", sum.name),
        factor => format!("{0}.{factor}.{factor}.{0}", sum.name),
    };
    // A rounding stands before the types, and a saturation behind them.
    let (before, behind) = if factor == F64 { (modifier, "") } else { ("", modifier) };
    let [a, b, c] = [("a", counts[0]), ("b", counts[1]), ("c", counts[2])].map(|(name, n)| list(name, n));
    text += &format!(
        "wmma.mma.sync.aligned.{}.{}.{shape}{before}.{types}{behind} {c}, {a}, {b}, {c};
wmma.store.d.sync.aligned.{}.{shape}{space}.{} [{base}+{}], {c}{};\n",
        layout(0),
        layout(1),
        layout(3),
        sum.name,
        3 * ROOM,
        stride(3)
    );
    if space == ".shared" {
        text += &format!(
            "bar.sync 0; mov.u32 %r2, %r4;
OUT: add.u32 %r3, %r1, %r2; cvt.u64.u32 %rd2, %r2; add.u64 %rd2, %rd1, %rd2;
ld.shared.u64 %rd3, [%r3+{0}]; st.global.u64 [%rd2+{0}], %rd3; add.u32 %r2, %r2, 256;
setp.lt.u32 %p1, %r2, {ROOM}; @%p1 bra OUT;\n",
            3 * ROOM
        );
    }
    text + "ret;\n}\n"
}

/// `mma.sync` of floats, each shape and type, with 4 products of each kind of numbers.
fn registers(cases: &mut Vec<Case>) {
    registers_of(cases, Rng(6), &ALL);
    registers_of(cases, Rng(10), &INEXACT);
    sparse(cases, Rng(14), &[ALL.as_slice(), &INEXACT].concat());
}

/// A product of a warp: its shape, the formats of A, B and the sum, and the registers of A and B.
type OfWarp = (&'static str, Format, Format, Format, [usize; 2]);

/// Kernels of `mma.sync`, or of `mma.sp` with metadata at byte 2048.
fn of_warps(products: &[OfWarp], is_sparse: bool) -> String {
    let mut text = String::from(".version 8.7\n.target sm_90a\n.address_size 64\n");
    for (i, (shape, a, b, sum, [of_a, of_b])) in products.iter().enumerate() {
        let of_c = if *sum == F32 { 4 } else { 2 };
        text += &format!(
            ".visible .entry k{i}(.param .u64 memory)\n{{
.reg .b32 %r<3>; .reg .b32 %a<4>; .reg .b32 %b<4>; .reg .b32 %c<4>; .reg .b64 %rd<4>;
ld.param.u64 %rd1, [memory]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd3, %rd1, %rd2;
mul.wide.u32 %rd2, %r1, 16; add.u64 %rd1, %rd1, %rd2;\n"
        );
        for (name, count, at) in [("a", *of_a, 0), ("b", *of_b, 512), ("c", of_c, 1024)] {
            for register in 0..count {
                text += &format!("ld.global.b32 %{name}{register}, [%rd1+{}];\n", at + 4 * register);
            }
        }
        let (mma, metadata) = match is_sparse {
            true => {
                text += "ld.global.b32 %r2, [%rd3+2048];\n";
                ("mma.sp::ordered_metadata", ", %r2, 0")
            }
            false => ("mma", ""),
        };
        let (d, of_a, of_b) = (list("c", of_c), list("a", *of_a), list("b", *of_b));
        text += &format!(
            "{mma}.sync.aligned.{shape}.row.col.{sum}.{a}.{b}.{sum} {d}, {of_a}, {of_b}, {d}{metadata};\n",
            sum = sum.name,
            a = a.name,
            b = b.name
        );
        for register in 0..of_c {
            text += &format!("st.global.b32 [%rd1+{}], %c{register};\n", 1536 + 4 * register);
        }
        text += "ret;\n}\n";
    }
    text
}

fn registers_of(cases: &mut Vec<Case>, mut rng: Rng, kinds: &[Numbers]) {
    let mut products = vec![];
    for (shape, counts) in [("m16n8k8", [2, 1]), ("m16n8k16", [4, 2])] {
        products.extend([(shape, F16, F16, F32, counts), (shape, F16, F16, F16, counts)]);
        products.push((shape, BF16, BF16, F32, counts));
    }
    products.extend([("m16n8k4", TF32, TF32, F32, [2, 1]), ("m16n8k8", TF32, TF32, F32, [4, 2])]);
    for (shape, counts) in [("m16n8k16", [2, 1]), ("m16n8k32", [4, 2])] {
        for (a, b) in [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)] {
            products.extend([(shape, a, b, F32, counts), (shape, a, b, F16, counts)]);
        }
    }
    let ptx: Rc<str> = of_warps(&products, false).into();
    for (i, (shape, a, b, sum, _)) in products.into_iter().enumerate() {
        for &numbers in kinds {
            for _ in 0..4 {
                let mut memory = vec![];
                for (matrix, format) in [a, b, sum].into_iter().enumerate() {
                    memory.extend(elements(&mut rng, format, matrix, numbers, a, 512));
                }
                memory.extend(rng.bytes(512));
                let name = format!("mma {shape} {} {} {} {numbers:?}", a.name, b.name, sum.name);
                let result = if matches!(numbers, Numbers::Any(_)) { 0 } else { 1536 };
                cases.push(case(name, &ptx, format!("k{i}"), memory, result));
            }
        }
    }
}

/// Metadata of a lane for a sparse A: of each chunk two of four elements, or one of two of tf32.
fn metadata(rng: &mut Rng, a: Format) -> [u8; 4] {
    let of_two = [0b0100, 0b1110];
    let of_four = [0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110];
    let chunk = |rng: &mut Rng| rng.of(if a == TF32 { of_two.as_slice() } else { &of_four });
    let chunks = (0..8).map(|at| chunk(rng) << (4 * at));
    chunks.fold(0u32, |all, chunk| all | chunk).to_le_bytes()
}

/// `mma.sp` of floats, as [`registers`].
fn sparse(cases: &mut Vec<Case>, mut rng: Rng, kinds: &[Numbers]) {
    let mut products = vec![
        ("m16n8k16", F16, F16, F32, [2, 2]),
        ("m16n8k32", F16, F16, F32, [4, 4]),
        ("m16n8k32", F16, F16, F16, [4, 4]),
        ("m16n8k16", BF16, BF16, F32, [2, 2]),
        ("m16n8k32", BF16, BF16, F32, [4, 4]),
        ("m16n8k8", TF32, TF32, F32, [2, 2]),
        ("m16n8k16", TF32, TF32, F32, [4, 4]),
    ];
    for (a, b) in [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)] {
        products.push(("m16n8k64", a, b, F32, [4, 4]));
    }
    let ptx: Rc<str> = of_warps(&products, true).into();
    for (i, (shape, a, b, sum, _)) in products.into_iter().enumerate() {
        for &numbers in kinds {
            for _ in 0..4 {
                let mut memory = vec![];
                for (matrix, format) in [a, b, sum].into_iter().enumerate() {
                    memory.extend(elements(&mut rng, format, matrix, numbers, a, 512));
                }
                memory.extend(rng.bytes(512));
                memory.extend((0..32).flat_map(|_| metadata(&mut rng, a)));
                let name = format!("mma.sp {shape} {} {} {} {numbers:?}", a.name, b.name, sum.name);
                cases.push(case(name, &ptx, format!("k{i}"), memory, 1536));
            }
        }
    }
}

/// Bytes of shared memory for each of A and B of `wgmma`.
const SHARED: usize = 24 << 10;

/// The canonical layout of a matrix in shared memory that its descriptor specifies.
#[derive(Clone, Copy)]
struct Layout {
    /// Neighbouring rows of A, or columns of B, are neighbours in memory.
    transposed: bool,
    /// Bytes of a row of the swizzle, or 16 for none.
    swizzle: u64,
    leading: u64,
    stride: u64,
    /// Bytes from the begin of the pattern.
    start: u64,
}

impl Layout {
    /// A layout of a matrix with `rows` rows, or columns, of `row` bytes each, such that the matrix
    /// fits into shared memory.
    fn random(rng: &mut Rng, rows: u64, of_16_bits: bool, row: u64) -> Layout {
        let swizzle = if rows > 192 { rng.of(&[16, 32, 64]) } else { rng.of(&[16, 32, 64, 128]) };
        let transposed = of_16_bits && rng.from(0, 1) == 1;
        // A row must fit into a row of the swizzle.
        let swizzle = if !transposed && swizzle > 16 { row.max(swizzle) } else { swizzle };
        let (leading, stride) = match (transposed, swizzle) {
            (false, 16) => (128, 8 * row),
            (false, _) => (0, 8 * swizzle),
            (true, 16) => (16 * rows, 128),
            // One block of 8 k behind the other, and behind them the next rows.
            (true, _) => (row / 2 * swizzle, 8 * swizzle),
        };
        // Rows that lie beside one another in those of the swizzle.
        let places = (swizzle / row) as i64;
        let start = if transposed || swizzle == 16 { 0 } else { row as i64 * rng.from(0, places - 1) };
        Layout { transposed, swizzle, leading, stride, start: start as u64 }
    }

    /// The descriptor without the matrix's address.
    fn descriptor(&self) -> u64 {
        let mode = match self.swizzle {
            16 => 0,
            128 => 1,
            64 => 2,
            _ => 3u64,
        };
        self.start >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32 | mode << 62
    }
}

/// A product of a warpgroup.
struct Warpgroup {
    line: String,
    layouts: [Layout; 2],
    registers_of_d: usize,
    adds: bool,
    /// A register of metadata lies behind those of A.
    sparse: bool,
}

impl Warpgroup {
    fn random(rng: &mut Rng, [a, b, sum]: [Format; 3], saturates: &str, sparse: bool) -> Warpgroup {
        let columns = if a.exponent == 0 {
            rng.of(&[8, 16, 24, 32, 64, 96, 128, 192, 256])
        } else {
            8 * rng.from(1, 32) as u64
        };
        let of_16_bits = a.bits == 16;
        // A in shared memory has 64 rows. Half of a sparse one is there.
        let row_of_b = if sparse { 64 } else { 32 };
        let layouts =
            [(64, 32), (columns, row_of_b)].map(|(rows, row)| Layout::random(rng, rows, of_16_bits, row));
        let in_registers = rng.from(0, 1) == 1;
        let registers_of_d = columns as usize * sum.bits as usize / 64;
        let metadata = match (sparse, a.bits) {
            (false, _) => String::new(),
            (true, 8) => ", %a4, 0".to_owned(),
            (true, _) => format!(", %a4, {}", rng.from(0, 1)),
        };
        let mut line = format!(
            "wgmma.mma_async{}.sync.aligned.m64n{columns}k{}{saturates}.{}.{}.{} {}, {}, %rd2{metadata}, %p1",
            if sparse { ".sp" } else { "" },
            u64::from(256 / a.bits) * row_of_b / 32,
            sum.name,
            a.name,
            b.name,
            list("d", registers_of_d),
            if in_registers { list("a", 4) } else { "%rd1".to_owned() },
        );
        if a.exponent > 0 {
            line += [", 1", ", -1"][rng.from(0, 1) as usize];
            line += [", 1", ", -1"][rng.from(0, 1) as usize];
        }
        if of_16_bits {
            for layout in &layouts[usize::from(in_registers)..] {
                line += if layout.transposed { ", 1" } else { ", 0" };
            }
        }
        Warpgroup { line, layouts, registers_of_d, adds: rng.from(0, 3) > 0, sparse }
    }

    /// Registers in memory in front of those of D.
    fn registers_of_a(&self) -> usize {
        4 + usize::from(self.sparse)
    }

    /// The memory of a kernel: two descriptors, the shared memory of A and B, and the registers of A and
    /// of D.
    fn kernel(&self, i: usize) -> String {
        let mut text = format!(
            ".visible .entry k{i}(.param .u64 memory)\n{{
.reg .pred %p<3>; .reg .b32 %r<8>; .reg .b64 %rd<8>; .reg .b32 %d<128>; .reg .b32 %a<5>;
.shared .align 1024 .b8 A[{SHARED}];\n.shared .align 1024 .b8 B[{SHARED}];
ld.param.u64 %rd7, [memory]; mov.u32 %r1, A; mov.u32 %r6, B; mov.u32 %r7, %tid.x;
shl.b32 %r2, %r7, 3;
IN: cvt.u64.u32 %rd3, %r2; add.u64 %rd3, %rd7, %rd3; add.u32 %r4, %r1, %r2; add.u32 %r5, %r6, %r2;
ld.global.u64 %rd4, [%rd3+16]; st.shared.u64 [%r4], %rd4;
ld.global.u64 %rd4, [%rd3+{}]; st.shared.u64 [%r5], %rd4;
add.u32 %r2, %r2, 1024; setp.lt.u32 %p2, %r2, {SHARED}; @%p2 bra IN;
fence.proxy.async.shared::cta; bar.sync 0;
ld.global.u64 %rd1, [%rd7]; shr.u32 %r1, %r1, 4; cvt.u64.u32 %rd5, %r1; add.u64 %rd1, %rd1, %rd5;
ld.global.u64 %rd2, [%rd7+8]; shr.u32 %r6, %r6, 4; cvt.u64.u32 %rd5, %r6; add.u64 %rd2, %rd2, %rd5;
mul.wide.u32 %rd6, %r7, 4; add.u64 %rd6, %rd7, %rd6; setp.eq.u32 %p1, {}, 1;\n",
            16 + SHARED,
            u32::from(self.adds),
        );
        let a = 16 + 2 * SHARED;
        let d = a + 512 * self.registers_of_a();
        for register in 0..self.registers_of_a() {
            text += &format!("ld.global.b32 %a{register}, [%rd6+{}];\n", a + 512 * register);
        }
        for register in 0..self.registers_of_d {
            text += &format!("ld.global.b32 %d{register}, [%rd6+{}];\n", d + 512 * register);
        }
        text += &format!(
            "wgmma.fence.sync.aligned;\n{};
wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n",
            self.line
        );
        for register in 0..self.registers_of_d {
            text += &format!("st.global.b32 [%rd6+{}], %d{register};\n", d + 512 * register);
        }
        text + "ret;\n}\n"
    }
}

/// `wgmma`: each type with 8 shapes, layouts and signs.
fn warpgroups(cases: &mut Vec<Case>) {
    warpgroups_of(cases, Rng(9), &ALL, false);
    warpgroups_of(cases, Rng(11), &INEXACT, false);
    warpgroups_of(cases, Rng(15), &[ALL.as_slice(), &INEXACT].concat(), true);
}

fn warpgroups_of(cases: &mut Vec<Case>, mut rng: Rng, kinds: &[Numbers], sparse: bool) {
    let mut products =
        vec![([F16, F16, F16], ""), ([F16, F16, F32], ""), ([BF16, BF16, F32], ""), ([TF32, TF32, F32], "")];
    for (a, b) in [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)] {
        products.extend([([a, b, F32], ""), ([a, b, F16], "")]);
    }
    for (a, b) in [(S8, S8), (S8, U8), (U8, S8), (U8, U8)] {
        products.extend([([a, b, S32], ""), ([a, b, S32], ".satfinite")]);
    }
    let instruction = if sparse { "wgmma.sp" } else { "wgmma" };
    for (formats, saturates) in products {
        let [a, b, sum] = formats;
        let all: Vec<_> = (0..8).map(|_| Warpgroup::random(&mut rng, formats, saturates, sparse)).collect();
        let mut text = String::from(".version 8.6\n.target sm_90a\n.address_size 64\n");
        text.extend(all.iter().enumerate().map(|(i, product)| product.kernel(i)));
        let ptx: Rc<str> = text.into();
        for &numbers in kinds {
            if numbers != Numbers::Whole && a.exponent == 0 {
                continue;
            }
            for (i, product) in all.iter().enumerate() {
                let mut memory: Vec<u8> =
                    product.layouts.iter().flat_map(|layout| layout.descriptor().to_le_bytes()).collect();
                memory.extend(elements(&mut rng, a, 0, numbers, a, SHARED));
                memory.extend(elements(&mut rng, b, 1, numbers, a, SHARED));
                memory.extend(elements(&mut rng, a, 0, numbers, a, 4 * 512));
                if sparse {
                    memory.extend((0..128).flat_map(|_| metadata(&mut rng, a)));
                }
                let result = memory.len();
                memory.extend(elements(&mut rng, sum, 2, numbers, a, product.registers_of_d * 512));
                let name = format!("{instruction} {} {} {}{saturates} {numbers:?}", a.name, b.name, sum.name);
                let one = case(name, &ptx, format!("k{i}"), memory, result);
                cases.push(Case { shape: [1, 128], ..one });
            }
        }
    }
}

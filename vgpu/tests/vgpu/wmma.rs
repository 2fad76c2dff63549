//! `wmma` against a host oracle: matrices in memory, by rows and by columns, and their product in
//! memory. The layout of fragments in registers is up to the machine.

use epoxide_vgpu::{CheckConfig, Machine, Module, supported_opcode};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::common::{device, kernel, launch, reject, tier};
use crate::numbers::{BF16, F16, F32, Matrix, S8, S32, TF32, Type, U8, matrix};

/// A type whose elements have up to 8 bytes.
#[derive(Clone, Copy)]
struct Wide {
    name: &'static str,
    bytes: usize,
    bits: fn(f64) -> u64,
}

const fn wide(ty: Type, bits: fn(f64) -> u64) -> Wide {
    Wide { name: ty.name, bytes: ty.bytes, bits }
}

const W_F16: Wide = wide(F16, |x| (F16.bits)(x).into());
const W_BF16: Wide = wide(BF16, |x| (BF16.bits)(x).into());
const W_TF32: Wide = wide(TF32, |x| (TF32.bits)(x).into());
const W_S8: Wide = wide(S8, |x| (S8.bits)(x).into());
const W_U8: Wide = wide(U8, |x| (U8.bits)(x).into());
const W_F32: Wide = wide(F32, |x| (F32.bits)(x).into());
const W_S32: Wide = wide(S32, |x| (S32.bits)(x).into());
const W_F64: Wide = Wide { name: "f64", bytes: 8, bits: f64::to_bits };

#[derive(Clone, Copy)]
struct Product {
    shape: [usize; 3],
    factor: Wide,
    sum: Wide,
    /// Registers of A, B, and C or D.
    registers: [usize; 3],
    /// By rows: A, B, C, D.
    by_rows: [bool; 4],
    space: &'static str,
}

/// Bytes of shared or global memory of a matrix.
const ROOM: usize = 4096;

impl Product {
    fn name(&self) -> String {
        let [m, n, k] = self.shape;
        format!("m{m}n{n}k{k}")
    }

    /// Loads, the product, and the store. `strides`: in elements; 0 where the instruction names
    /// none.
    fn text(&self, strides: [usize; 4]) -> String {
        let layout = |i: usize| if self.by_rows[i] { "row" } else { "col" };
        let (shape, space) = (self.name(), self.space);
        let list = |name: &str, n: usize| {
            let names: Vec<_> = (0..n).map(|r| format!("%{name}{r}")).collect();
            format!("{{{}}}", names.join(", "))
        };
        let stride = |i: usize| if strides[i] == 0 { String::new() } else { format!(", {}", strides[i]) };
        let bits = if self.sum.bytes == 8 { 64 } else { 32 };
        let mut text = format!(
            ".reg .b{bits} %a<8>; .reg .b{bits} %b<8>; .reg .b{bits} %c<8>;
             .shared .align 128 .b8 M[{}];\nmov.u64 %rd1, %rd40;\n",
            4 * ROOM
        );
        if space == ".shared" {
            text += &format!(
                "mov.u32 %r1, M; shl.b32 %r2, %r40, 3;
                 FILL: add.u32 %r3, %r1, %r2; cvt.u64.u32 %rd2, %r2; add.u64 %rd2, %rd40, %rd2;
                 ld.global.u64 %rd3, [%rd2]; st.shared.u64 [%r3], %rd3; add.u32 %r2, %r2, 256;
                 setp.lt.u32 %p1, %r2, {}; @%p1 bra FILL; bar.sync 0;\n",
                4 * ROOM
            );
        }
        let base = if space == ".shared" { "%r1" } else { "%rd1" };
        for (i, letter, ty) in [(0, "a", self.factor), (1, "b", self.factor), (2, "c", self.sum)] {
            text += &format!(
                "wmma.load.{letter}.sync.aligned.{}.{shape}{space}.{} {}, [{base}+{}]{};\n",
                layout(i),
                ty.name,
                list(letter, self.registers[i]),
                i * ROOM,
                stride(i)
            );
        }
        let types = match self.factor.name {
            "f16" => format!("{0}.{0}", self.sum.name),
            factor => format!("{0}.{factor}.{factor}.{0}", self.sum.name),
        };
        let (a, b, c) =
            (list("a", self.registers[0]), list("b", self.registers[1]), list("c", self.registers[2]));
        text += &format!(
            "wmma.mma.sync.aligned.{}.{}.{shape}.{types} {c}, {a}, {b}, {c};
             wmma.store.d.sync.aligned.{}.{shape}{space}.{} [{base}+{}], {c}{};\n",
            layout(0),
            layout(1),
            layout(3),
            self.sum.name,
            3 * ROOM,
            stride(3)
        );
        if space == ".shared" {
            text += &format!(
                "bar.sync 0; shl.b32 %r2, %r40, 3;
                 BACK: add.u32 %r3, %r1, %r2; cvt.u64.u32 %rd2, %r2; add.u64 %rd2, %rd40, %rd2;
                 ld.shared.u64 %rd3, [%r3+{0}]; st.global.u64 [%rd2+{0}], %rd3; add.u32 %r2, %r2, 256;
                 setp.lt.u32 %p1, %r2, {ROOM}; @%p1 bra BACK;\n",
                3 * ROOM
            );
        }
        kernel("", &text)
    }

    fn compare(&self, rng: &mut ChaCha8Rng, strided: bool, check: Option<CheckConfig>) {
        let [m, n, k] = self.shape;
        let sizes = [[m, k], [k, n], [m, n], [m, n]];
        let packed = |i: usize| sizes[i][usize::from(self.by_rows[i])];
        // Rows begin at multiples of 16 bytes.
        let stride = |i: usize| packed(i) + if strided { 16 } else { 0 };
        let range = if self.factor.name == "u8" { 0..=6 } else { -6..=6 };
        let a = matrix(m, k, || f64::from(rng.random_range(range.clone())));
        let b = matrix(k, n, || f64::from(rng.random_range(range.clone())));
        let c = matrix(m, n, || f64::from(rng.random_range(-500..=500)));
        let at = |i: usize, row: usize, column: usize| match self.by_rows[i] {
            true => row * stride(i) + column,
            false => column * stride(i) + row,
        };
        let mut buffer = vec![0x5a; 4 * ROOM];
        let mut fill = |i: usize, ty: Wide, matrix: &Matrix| {
            for (row, values) in matrix.iter().enumerate() {
                for (column, &value) in values.iter().enumerate() {
                    let place = i * ROOM + at(i, row, column) * ty.bytes;
                    let bits = (ty.bits)(value).to_le_bytes();
                    buffer[place..place + ty.bytes].copy_from_slice(&bits[..ty.bytes]);
                }
            }
        };
        fill(0, self.factor, &a);
        fill(1, self.factor, &b);
        fill(2, self.sum, &c);
        let mut expected = buffer.clone();
        for row in 0..m {
            for column in 0..n {
                let sum = (0..k).fold(c[row][column], |sum, k| sum + a[row][k] * b[k][column]);
                let place = 3 * ROOM + at(3, row, column) * self.sum.bytes;
                let bits = (self.sum.bits)(sum).to_le_bytes();
                expected[place..place + self.sum.bytes].copy_from_slice(&bits[..self.sum.bytes]);
            }
        }
        let strides = std::array::from_fn(|i| if strided { stride(i) } else { 0 });
        let text = self.text(strides);
        let module = Module::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let mut machine = Machine::with_config(1, device(3), check);
        let buf = machine.upload(0, "buf", &buffer).unwrap();
        machine.launch_with(0, &module, "k", launch(1, 32), &[&buf]).unwrap();
        machine.run().unwrap_or_else(|e| panic!("{e}"));
        assert!(buf.download().unwrap() == expected, "{text}");
    }
}

#[test]
fn products_of_fragments_are_exact() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let square = [16, 16, 16];
    let mut products = vec![([16, 16, 8], W_TF32, W_F32, [4, 4, 8]), ([8, 8, 4], W_F64, W_F64, [1, 1, 2])];
    for (shape, halves, bytes) in
        [(square, [4, 4], [2, 2]), ([32, 8, 16], [8, 2], [4, 1]), ([8, 32, 16], [2, 8], [1, 4])]
    {
        products.push((shape, W_F16, W_F16, [8, 8, 4]));
        products.push((shape, W_F16, W_F32, [8, 8, 8]));
        products.push((shape, W_BF16, W_F32, [halves[0], halves[1], 8]));
        products.push((shape, W_S8, W_S32, [bytes[0], bytes[1], 8]));
        products.push((shape, W_U8, W_S32, [bytes[0], bytes[1], 8]));
    }
    for (at, (shape, factor, sum, registers)) in products.into_iter().enumerate() {
        for layouts in 0..16 {
            if !tier([0, 5, 6, 11].contains(&((layouts + at) % 16)), true) {
                continue;
            }
            let by_rows = std::array::from_fn(|i| layouts >> i & 1 == 1);
            let space = ["", ".global", ".shared"][(layouts + at) % 3];
            let product = Product { shape, factor, sum, registers, by_rows, space };
            let check = (layouts % 2 == 0).then(CheckConfig::default);
            product.compare(&mut rng, layouts & 4 == 0, check);
        }
    }
}

#[test]
fn what_is_no_fragment_is_refused() {
    for opcode in [
        "wmma.load.a.sync.aligned.row.m16n16k16.global.f32",
        "wmma.load.c.sync.aligned.row.m16n16k16.s8",
        "wmma.load.d.sync.aligned.row.m16n16k16.f32",
        "wmma.load.a.sync.aligned.m16n16k16.f16",
        "wmma.load.a.aligned.row.m16n16k16.f16",
        "wmma.store.d.sync.aligned.row.m16n16k8.f16",
        "wmma.mma.sync.aligned.row.m16n16k16.f32.f32",
        "wmma.mma.sync.aligned.row.col.m16n16k16.f16.f32",
        "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32.satfinite",
        "wmma.mma.sync.aligned.row.col.m16n16k16.s32.s8.u8.s32",
        "wmma.mma.sync.aligned.row.col.m8n8k4.rn.f32.f32",
    ] {
        assert!(!supported_opcode(opcode), "{opcode}");
    }
    let error = reject("wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {%r1, %r2, %r3, %r4}, [%rd1];");
    assert!(error.message.contains("4 registers given, 8 expected"), "{error}");
}

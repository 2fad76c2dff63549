//! `wgmma` against a host oracle. The places of elements in registers and in shared memory are
//! those of the PTX manual, section "Asynchronous warpgroup level matrix multiply-accumulate".

use epoxide_vgpu::{
    CheckConfig, Class, Fault, FaultKind, GridConfig, Machine, MachineError, Module, for_each_seed,
    supported_opcode,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::common::{device, kernel, launch, reject, tier};
use crate::numbers::{BF16, E4M3, E5M2, F16, F32, Matrix, S8, S32, TF32, Type, U8, cut_off, matrix};
use crate::sparse::{metadata as sparse_metadata, sparse};

/// A product: `[64, k]` by `[k, columns]`.
#[derive(Clone, Copy)]
struct Shape {
    columns: usize,
    a: Type,
    b: Type,
    sum: Type,
    saturates: bool,
    /// Adds the product to D.
    adds: bool,
    negates: [bool; 2],
    /// A lies in registers.
    a_in_registers: bool,
    layouts: [Layout; 2],
    /// A is sparse, with this selector.
    sparse: Option<usize>,
}

/// A canonical layout: of a matrix that is `[rows of A, or columns of B; k]`.
#[derive(Clone, Copy, Debug)]
struct Layout {
    /// Neighbouring rows, or columns, are neighbours in memory.
    transposed: bool,
    /// Bytes of a row of the swizzle, or 16 for none.
    swizzle: usize,
    leading: usize,
    stride: usize,
    /// Bytes from the start of the swizzle pattern to the matrix.
    start: usize,
    /// Rows of 128 bytes by which the pattern is off its alignment.
    base: usize,
}

impl Layout {
    /// The place of an element, in bytes from the pattern's alignment on.
    fn place(&self, row: usize, k: usize, bytes: usize) -> usize {
        let t = 16 / bytes;
        let width = self.swizzle / 16;
        let offset = match (self.transposed, width) {
            // ((8,m),(T,2)):((1T,SBO),(1,LBO))
            (false, 1) => row % 8 * 16 + row / 8 * self.stride + k % t * bytes + k / t * self.leading,
            // ((8,m),(T,2)):((wT,SBO),(1,T))
            (false, w) => row % 8 * w * 16 + row / 8 * self.stride + k * bytes,
            // ((T,1,m),(8,k)):((1,T,SBO),(1T,LBO))
            (true, 1) => row % t * bytes + row / t * self.stride + k % 8 * 16 + k / 8 * self.leading,
            // ((T,w,m),(8,k)):((1,T,LBO),(wT,SBO))
            (true, w) => {
                row % t * bytes
                    + row / t % w * 16
                    + row / (t * w) * self.leading
                    + k % 8 * w * 16
                    + k / 8 * self.stride
            }
        };
        // Swizzle<0 to 3, 4, 3>, from the start of the pattern on.
        let at = self.start + offset;
        self.base * 128 + (at ^ (at >> 3 & (width - 1) << 4))
    }

    /// The descriptor without the matrix's address in shared memory.
    fn descriptor(&self) -> u64 {
        let mode = match self.swizzle {
            16 => 0,
            128 => 1,
            64 => 2,
            _ => 3u64,
        };
        let field = |bytes: usize| (bytes as u64 >> 4) & 0x3fff;
        field(self.base * 128 + self.start)
            | field(self.leading) << 16
            | field(self.stride) << 32
            | (self.base as u64) << 49
            | mode << 62
    }
}

const PLAIN: Layout = Layout { transposed: false, swizzle: 16, leading: 128, stride: 256, start: 0, base: 0 };

fn swizzled(swizzle: usize) -> Layout {
    Layout { swizzle, leading: 0, stride: 8 * swizzle, ..PLAIN }
}

/// Neighbouring rows are neighbours in memory. `rows` is the length of the matrix.
fn transposed(swizzle: usize, rows: usize) -> Layout {
    let layout = Layout { transposed: true, ..swizzled(swizzle) };
    match swizzle {
        16 => Layout { stride: 128, leading: rows * 16, ..layout },
        // One block of 8 k behind the other, and beside them the next rows.
        _ => Layout { stride: 8 * swizzle, leading: 16 * swizzle, ..layout },
    }
}

/// Bytes of shared memory for each of A and B.
const ROOM: usize = 24 << 10;

/// Registers of a thread for A, and for its metadata.
const A_REGISTERS: usize = 5;

fn shape(columns: usize, a: Type, b: Type, sum: Type) -> Shape {
    Shape {
        columns,
        a,
        b,
        sum,
        saturates: false,
        adds: true,
        negates: [false; 2],
        a_in_registers: false,
        layouts: [PLAIN; 2],
        sparse: None,
    }
}

/// Row and column in D, of element `i` of a thread: figure "WGMMA .m64nNk16 register fragment layout
/// for accumulator matrix D".
fn place_d(thread: usize, i: usize) -> (usize, usize) {
    let (warp, lane) = (thread / 32, thread % 32);
    (16 * warp + lane / 4 + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * (lane % 4) + i % 2)
}

/// Row and column in A of element `i` of a thread.
fn place_a(thread: usize, i: usize, bytes: usize) -> (usize, usize) {
    let (warp, lane) = (thread / 32, thread % 32);
    // Elements of a register, and registers: the rows alternate, then k increases.
    let each = 4 / bytes;
    let register = i / each;
    let row = 16 * warp + lane / 4 + 8 * (register % 2);
    (row, lane % 4 * each + i % each + 4 * each * (register / 2))
}

impl Shape {
    /// Columns of A that are stored.
    fn stored_k(&self) -> usize {
        32 / self.a.bytes
    }

    fn k(&self) -> usize {
        if self.sparse.is_some() { 2 * self.stored_k() } else { self.stored_k() }
    }

    fn opcode(&self) -> String {
        let Shape { columns, a, b, sum, saturates, .. } = self;
        let saturates = if *saturates { ".satfinite" } else { "" };
        let (k, a, b, d) = (self.k(), a.name, b.name, sum.name);
        let sparse = if self.sparse.is_some() { ".sp" } else { "" };
        format!("wgmma.mma_async{sparse}.sync.aligned.m64n{columns}k{k}{saturates}.{d}.{a}.{b}")
    }

    fn d_registers(&self) -> usize {
        self.columns * self.sum.bytes / 8
    }

    /// The product's line, with D in `%d0` and up, A in `%a0` to `%a3`, metadata in `%a4`,
    /// descriptors `%rd1`, `%rd2`.
    fn line(&self) -> String {
        let list = |name: &str, n: usize| {
            let names: Vec<_> = (0..n).map(|r| format!("%{name}{r}")).collect();
            format!("{{{}}}", names.join(", "))
        };
        let d = list("d", self.d_registers());
        let a = if self.a_in_registers { list("a", 4) } else { "%rd1".into() };
        let sparse = self.sparse.map_or(String::new(), |selector| format!(", %a4, {selector}"));
        let mut line = format!("{} {d}, {a}, %rd2{sparse}, %p1", self.opcode());
        if self.sum.name != "s32" {
            for negates in self.negates {
                line += if negates { ", -1" } else { ", 1" };
            }
        }
        if self.a.bytes == 2 {
            for layout in &self.layouts[usize::from(self.a_in_registers)..] {
                line += if layout.transposed { ", 1" } else { ", 0" };
            }
        }
        line + ";"
    }

    /// A kernel around `product`, for 128 threads. The buffer: two descriptors, the shared memory of A
    /// and B, registers of A and of D.
    fn text(&self, product: &str) -> String {
        let mut body = format!(
            ".shared .align 1024 .b8 A[{ROOM}];\n.shared .align 1024 .b8 B[{ROOM}];
             .reg .b32 %d<128>; .reg .b32 %a<{A_REGISTERS}>;
             mov.u32 %r1, A;
             mov.u32 %r2, %r40;
             FILL:
             shl.b32 %r3, %r2, 3;
             cvt.u64.u32 %rd3, %r3;
             add.u64 %rd3, %rd40, %rd3;
             ld.global.u64 %rd4, [%rd3+16];
             add.u32 %r4, %r1, %r3;
             st.shared.u64 [%r4], %rd4;
             add.u32 %r2, %r2, 128;
             setp.lt.u32 %p2, %r2, {};
             @%p2 bra FILL;
             fence.proxy.async.shared::cta;
             bar.sync 0;
             ld.global.u64 %rd1, [%rd40];
             ld.global.u64 %rd2, [%rd40+8];
             mov.u32 %r5, A;
             shr.u32 %r5, %r5, 4;
             cvt.u64.u32 %rd5, %r5;
             add.u64 %rd1, %rd1, %rd5;
             mov.u32 %r5, B;
             shr.u32 %r5, %r5, 4;
             cvt.u64.u32 %rd5, %r5;
             add.u64 %rd2, %rd2, %rd5;
             mul.wide.u32 %rd6, %r40, 4;
             add.u64 %rd6, %rd40, %rd6;
             setp.eq.u32 %p1, {}, 1;\n",
            2 * ROOM / 8,
            u32::from(self.adds)
        );
        let (a, d) = (16 + 2 * ROOM, 16 + 2 * ROOM + A_REGISTERS * 512);
        for i in 0..A_REGISTERS {
            body += &format!("ld.global.u32 %a{i}, [%rd6+{}];\n", a + 512 * i);
        }
        for i in 0..self.d_registers() {
            body += &format!("ld.global.u32 %d{i}, [%rd6+{}];\n", d + 512 * i);
        }
        body += product;
        for i in 0..self.d_registers() {
            body += &format!("\nst.global.u32 [%rd6+{}], %d{i};", d + 512 * i);
        }
        kernel("", &body)
    }

    fn kernel(&self) -> String {
        let line = self.line();
        self.text(&format!(
            "wgmma.fence.sync.aligned;\n{line}\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
        ))
    }

    /// The buffer of a kernel: A is `[64, k]`, or what is stored of it with metadata, B is
    /// `[k, columns]`, D is `[64, columns]`.
    fn buffer(&self, a: &Matrix, metadata: &[u32; 128], b: &Matrix, d: &Matrix) -> Vec<u8> {
        let mut buffer: Vec<u8> = self.layouts.iter().flat_map(|l| l.descriptor().to_le_bytes()).collect();
        let mut fill =
            |layout: Layout, ty: Type, [rows, depth]: [usize; 2], value: &dyn Fn(usize, usize) -> f64| {
                let mut room = vec![0x5a; ROOM];
                for row in 0..rows {
                    for k in 0..depth {
                        let at = layout.place(row, k, ty.bytes);
                        let bits = (ty.bits)(value(row, k)).to_le_bytes();
                        room[at..at + ty.bytes].copy_from_slice(&bits[..ty.bytes]);
                    }
                }
                buffer.extend(room);
            };
        fill(self.layouts[0], self.a, [64, self.stored_k()], &|row, k| a[row][k]);
        fill(self.layouts[1], self.b, [self.columns, self.k()], &|column, k| b[k][column]);
        let mut registers = |n: usize, bytes: usize, bits: &dyn Fn(usize, usize) -> u32| {
            for register in 0..n {
                for thread in 0..128 {
                    let each = 4 / bytes;
                    let part = |at: usize| bits(thread, register * each + at) << (8 * bytes * at);
                    buffer.extend((0..each).map(part).fold(0, |all, part| all | part).to_le_bytes());
                }
            }
        };
        registers(4, self.a.bytes, &|thread, i| {
            let (row, k) = place_a(thread, i, self.a.bytes);
            (self.a.bits)(a[row][k])
        });
        registers(1, 4, &|thread, _| metadata[thread]);
        registers(self.d_registers(), self.sum.bytes, &|thread, i| {
            let (row, column) = place_d(thread, i);
            (self.sum.bits)(d[row][column])
        });
        buffer
    }

    /// The bits of D.
    fn run(&self, a: &Matrix, b: &Matrix, d: &Matrix, check: Option<CheckConfig>) -> Vec<Vec<u32>> {
        self.run_sparse(a, &[0; 128], b, d, check)
    }

    fn run_sparse(
        &self,
        a: &Matrix,
        metadata: &[u32; 128],
        b: &Matrix,
        d: &Matrix,
        check: Option<CheckConfig>,
    ) -> Vec<Vec<u32>> {
        let module = Module::parse(&self.kernel()).unwrap_or_else(|e| panic!("{e}"));
        let out = run(&module, &self.buffer(a, metadata, b, d), launch(1, 128), 3, check)
            .unwrap_or_else(|e| panic!("{}: {e}", self.opcode()));
        let out = &out[16 + 2 * ROOM + A_REGISTERS * 512..];
        let mut bits = vec![vec![0; self.columns]; 64];
        for thread in 0..128 {
            for i in 0..self.columns / 2 {
                let each = 4 / self.sum.bytes;
                let at = (i / each * 128 + thread) * 4 + i % each * self.sum.bytes;
                let mut word = [0; 4];
                word[..self.sum.bytes].copy_from_slice(&out[at..at + self.sum.bytes]);
                let (row, column) = place_d(thread, i);
                bits[row][column] = u32::from_le_bytes(word);
            }
        }
        bits
    }

    /// The sums, each in the order of k in double precision.
    fn exact(&self, a: &Matrix, b: &Matrix, d: &Matrix) -> Matrix {
        let sign = if self.negates[0] != self.negates[1] { -1.0 } else { 1.0 };
        let sum = |row: usize, column: usize| {
            let start = if self.adds { d[row][column] } else { 0.0 };
            (0..self.k()).fold(start, |sum, k| sum + sign * a[row][k] * b[k][column])
        };
        (0..64).map(|row| (0..self.columns).map(|column| sum(row, column)).collect()).collect()
    }

    /// Compares products of whole numbers that are exact in all types.
    fn compare(&self, rng: &mut ChaCha8Rng, check: Option<CheckConfig>) {
        let whole = |rng: &mut ChaCha8Rng, ty: Type, most: i32| {
            f64::from(rng.random_range(if ty.name == "u8" { 0 } else { -most }..=most))
        };
        let (mut metadata, bits) = ([0; 128], 8 * self.a.bytes);
        let (a, stored) = match self.sparse {
            None => {
                let a = matrix(64, self.k(), || whole(rng, self.a, 6));
                (a.clone(), a)
            }
            Some(selector) => {
                let a = sparse(rng, [64, self.k()], bits, false, |rng| whole(rng, self.a, 6));
                for (warp, indices) in a.indices.chunks(16).enumerate() {
                    let of_warp = sparse_metadata(indices, self.k(), bits, selector);
                    metadata[32 * warp..][..32].copy_from_slice(&of_warp);
                }
                (a.dense, a.stored)
            }
        };
        let b = matrix(self.k(), self.columns, || whole(rng, self.b, 6));
        let d = matrix(64, self.columns, || whole(rng, S32, 500));
        let expected: Vec<Vec<u32>> = self
            .exact(&a, &b, &d)
            .into_iter()
            .map(|row| row.into_iter().map(self.sum.bits).collect())
            .collect();
        let layouts = self.layouts;
        let found = self.run_sparse(&stored, &metadata, &b, &d, check);
        assert!(found == expected, "{} {layouts:?}", self.opcode());
    }
}

fn run(
    module: &Module,
    buffer: &[u8],
    shape: GridConfig,
    seed: u64,
    check: Option<CheckConfig>,
) -> Result<Vec<u8>, MachineError> {
    let mut machine = Machine::with_config(1, device(seed), check);
    let buf = machine.upload(0, "buf", buffer)?;
    machine.launch_with(0, module, "k", shape, &[&buf])?;
    machine.run()?;
    buf.download()
}

const TYPES: [(Type, Type, Type); 14] = [
    (BF16, BF16, F32),
    (F16, F16, F32),
    (F16, F16, F16),
    (TF32, TF32, F32),
    (E4M3, E4M3, F32),
    (E4M3, E5M2, F32),
    (E5M2, E4M3, F16),
    (E5M2, E5M2, F32),
    (E4M3, E4M3, F16),
    (S8, S8, S32),
    (S8, U8, S32),
    (U8, S8, S32),
    (U8, U8, S32),
    (E5M2, E5M2, F16),
];

#[test]
fn products_of_all_types_and_widths_are_exact() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for (at, (a, b, sum)) in TYPES.into_iter().enumerate() {
        let widths: Vec<usize> = (8..=256).step_by(8).collect();
        let exist =
            |columns: &usize| sum.name != "s32" || columns.is_multiple_of(16) || matches!(columns, 8 | 24);
        let all: Vec<usize> = widths.into_iter().filter(exist).collect();
        for (i, &columns) in all.iter().enumerate() {
            let plain = shape(columns, a, b, sum);
            assert!(supported_opcode(&plain.opcode()), "{}", plain.opcode());
            // A few of them by default: the narrowest, the widest, and one in between.
            if !tier([0, at + 2, all.len() - 1].contains(&i), true) {
                continue;
            }
            let check = i.is_multiple_of(2).then(CheckConfig::default);
            plain.compare(&mut rng, check);
            Shape { a_in_registers: true, ..plain }.compare(&mut rng, check);
        }
    }
}

#[test]
fn matrices_lie_in_every_canonical_layout() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let k_major = |ty: Type| {
        let mut all = vec![PLAIN, Layout { leading: 2048, stride: 128, ..PLAIN }];
        for swizzle in [32, 64, 128] {
            let layout = swizzled(swizzle);
            all.push(layout);
            // Further on in k, and with room between the rows.
            all.push(Layout { start: swizzle - 32, stride: 16 * swizzle, leading: 16, ..layout });
        }
        // A pattern that does not begin at a multiple of its length.
        all.push(Layout { base: 3, ..swizzled(128) });
        if ty.bytes == 1 { all[..3].to_vec() } else { all }
    };
    let mn_major = |rows: usize| {
        let swizzles =
            [16, 32, 64, 128].into_iter().filter(move |s| rows * 2 >= *s || rows.is_multiple_of(8));
        swizzles.map(move |swizzle| transposed(swizzle, rows))
    };
    for (ty, sum) in [(BF16, F32), (F16, F32), (TF32, F32), (E4M3, F32), (S8, S32)] {
        let columns = 48;
        let plain = shape(columns, ty, ty, sum);
        for layout in k_major(ty) {
            Shape { layouts: [layout, PLAIN], ..plain }.compare(&mut rng, None);
            Shape { layouts: [PLAIN, layout], ..plain }.compare(&mut rng, None);
        }
        if ty.bytes == 2 {
            for (of_a, of_b) in mn_major(64).zip(mn_major(columns)) {
                Shape { layouts: [of_a, PLAIN], ..plain }.compare(&mut rng, None);
                Shape { layouts: [PLAIN, of_b], ..plain }.compare(&mut rng, None);
                let both = Shape { layouts: [of_a, of_b], ..plain };
                both.compare(&mut rng, Some(CheckConfig::default()));
                Shape { a_in_registers: true, ..both }.compare(&mut rng, None);
            }
        }
    }
}

/// Layouts of B beside a sparse A, whose rows have 64 bytes.
fn sparse_layouts(columns: usize, bytes: usize) -> Vec<Layout> {
    let mut layouts = vec![
        Layout { stride: 512, ..PLAIN },
        Layout { leading: 16 * columns, stride: 128, ..PLAIN },
        swizzled(64),
        swizzled(128),
        Layout { start: 64, ..swizzled(128) },
    ];
    if bytes == 2 {
        let fits = |swizzle: &usize| columns.is_multiple_of(swizzle / 2);
        // Four blocks of 8 k stand where a dense product has two.
        let twice = |layout: Layout| match layout.swizzle {
            16 => layout,
            swizzle => Layout { leading: 32 * swizzle, ..layout },
        };
        let swizzles = [16, 32, 64, 128].into_iter().filter(fits);
        layouts.extend(swizzles.map(|swizzle| twice(transposed(swizzle, columns))));
    }
    layouts
}

#[test]
fn sparse_products_of_all_types_are_exact() {
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    for (at, (a, b, sum)) in TYPES.into_iter().enumerate() {
        let selectors = if a.bytes == 1 { 1 } else { 2 };
        for columns in tier(vec![[8, 16, 64][at % 3]], vec![8, 16, 48, 64, 128]) {
            for (i, of_b) in sparse_layouts(columns, b.bytes).into_iter().enumerate() {
                let layouts = [[PLAIN, swizzled(32), swizzled(128)][i % 3], of_b];
                let sparse = Some(i % selectors);
                let plain = Shape { layouts, sparse, ..shape(columns, a, b, sum) };
                assert!(supported_opcode(&plain.opcode()), "{}", plain.opcode());
                let check = i.is_multiple_of(2).then(CheckConfig::default);
                plain.compare(&mut rng, check);
                Shape { a_in_registers: true, ..plain }.compare(&mut rng, check);
            }
        }
    }
    // A whose neighbouring rows are neighbours in memory, and scales.
    let mn = Shape { layouts: [transposed(128, 64), swizzled(64)], ..shape(24, F16, F16, F32) };
    Shape { sparse: Some(1), negates: [true, false], ..mn }.compare(&mut rng, None);
    Shape { sparse: Some(0), adds: false, ..mn }.compare(&mut rng, None);
}

#[test]
fn a_sparse_product_has_rows_of_b_of_64_bytes() {
    // They do not fit rows of 32.
    let product = Shape { sparse: Some(0), layouts: [PLAIN, swizzled(32)], ..shape(8, F16, F16, F32) };
    let (a, b, d) = (matrix(64, 16, || 1.0), matrix(32, 8, || 1.0), matrix(64, 8, || 0.0));
    let module = Module::parse(&product.kernel()).unwrap();
    let buffer = product.buffer(&a, &[0x4444_4444; 128], &b, &d);
    let Err(MachineError::Fault(fault)) = run(&module, &buffer, launch(1, 128), 3, None) else {
        panic!("passes")
    };
    assert_wgmma(&fault, "beyond a row of the swizzle", "wgmma.mma_async.sp");
    let error = reject(
        "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 {%r1, %r2, %r3, %r4}, %rd1, %rd2, %r5, 2, %p1, 1, 1, 0, 0;",
    );
    assert!(error.message.contains("the sparsity selector must be a constant from 0 to 1"), "{error}");
}

#[test]
fn scales_negate_and_leave_out() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    for negates in [[true, false], [false, true], [true, true]] {
        for adds in [false, true] {
            for a_in_registers in [false, true] {
                let plain = shape(16, F16, F16, F32);
                Shape { negates, adds, a_in_registers, ..plain }.compare(&mut rng, None);
            }
        }
    }
    Shape { adds: false, ..shape(32, S8, S8, S32) }.compare(&mut rng, None);
}

#[test]
fn sums_are_cut_off_as_by_an_h200() {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    for ty in [F16, BF16, TF32] {
        let shape = shape(24, ty, ty, F32);
        // Numbers of 8 significant bits, which all types have, over many powers of 2.
        let mut number = || {
            let (mantissa, exponent) = (rng.random_range(-255..=255), rng.random_range(-12..4));
            f64::from(mantissa) * 2f64.powi(exponent)
        };
        let (a, b) = (matrix(64, shape.k(), &mut number), matrix(shape.k(), 24, &mut number));
        let d = matrix(64, 24, &mut number);
        let sum = |row: usize, column: usize| {
            let products: Vec<_> = (0..shape.k()).map(|at| [a[row][at], b[at][column]]).collect();
            cut_off(d[row][column], &products)
        };
        let expected: Vec<Vec<u32>> =
            (0..64).map(|row| (0..24).map(|column| sum(row, column)).collect()).collect();
        assert!(shape.run(&a, &b, &d, None) == expected, "{}", shape.opcode());
    }
}

#[test]
fn integer_sums_wrap_or_saturate() {
    for saturates in [false, true] {
        let shape = Shape { saturates, ..shape(8, U8, U8, S32) };
        let (a, b) = (matrix(64, 32, || 255.0), matrix(32, 8, || 255.0));
        let d = matrix(64, 8, || f64::from(i32::MAX) - 3.0);
        let sum = i64::from(i32::MAX) - 3 + 32 * 255 * 255;
        let expected = if saturates { i32::MAX as u32 } else { sum as u32 };
        assert!(shape.run(&a, &b, &d, None) == vec![vec![expected; 8]; 64]);
    }
}

/// The fault of a kernel around the lines `product`, of bf16 with 16 columns.
fn fault_of(product: &str, threads: u32, check: Option<CheckConfig>) -> Fault {
    fault_with(shape(16, BF16, BF16, F32), product, threads, check)
}

fn fault_with(shape: Shape, product: &str, threads: u32, check: Option<CheckConfig>) -> Fault {
    let module = Module::parse(&shape.text(product)).unwrap_or_else(|e| panic!("{e}"));
    let zeros = |rows, columns| matrix(rows, columns, || 0.0);
    let buffer =
        shape.buffer(&zeros(64, 32), &[0; 128], &zeros(32, shape.columns), &zeros(64, shape.columns));
    match run(&module, &buffer, launch(1, threads), 5, check) {
        Err(MachineError::Fault(fault)) => *fault,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("no fault:\n{product}"),
    }
}

/// The product of [`fault_of`].
fn line() -> String {
    shape(16, BF16, BF16, F32).line()
}

const FENCE: &str = "wgmma.fence.sync.aligned;\n";
const COMMIT: &str = "\nwgmma.commit_group.sync.aligned;\n";
const WAIT: &str = "wgmma.wait_group.sync.aligned 0;\n";

fn assert_wgmma(fault: &Fault, text: &str, at: &str) {
    let FaultKind::Wgmma { message } = &fault.kind else { panic!("{fault}") };
    assert!(message.contains(text), "{fault}");
    assert!(fault.at.ptx_text.contains(at), "{fault}");
    assert_eq!((fault.kind.name(), fault.kind.class()), ("wgmma", Class::Synchronisation));
}

#[test]
fn a_product_needs_a_fence() {
    let product = line();
    let fault = fault_of(&format!("{product}{COMMIT}{WAIT}"), 128, None);
    assert_wgmma(&fault, "has executed no wgmma.fence", "wgmma.mma_async");
    // A register that is written behind the fence needs another one; a product does not.
    for (between, is_fault) in [
        ("add.f32 %d3, %d3, %d3;", true),
        ("add.f32 %d3, %d3, %d3;\nwgmma.fence.sync.aligned;", false),
        ("add.f32 %d90, %d3, %d3;", true),
        ("mov.f32 %d3, %d4;", false),
        (&product, false),
    ] {
        let text = format!("{FENCE}{between}\n{product}{COMMIT}{WAIT}");
        if is_fault {
            let fault = fault_of(&text, 128, None);
            assert_wgmma(&fault, "were accessed since the last wgmma.fence", "wgmma.mma_async");
        } else {
            passes(&text);
        }
    }
}

/// Runs a kernel around lines that are right.
fn passes(product: &str) {
    let shape = shape(16, BF16, BF16, F32);
    let module = Module::parse(&shape.text(product)).unwrap_or_else(|e| panic!("{e}"));
    let zeros = |rows, columns| matrix(rows, columns, || 0.0);
    let buffer = shape.buffer(&zeros(64, 16), &[0; 128], &zeros(16, 16), &zeros(64, 16));
    for check in [None, Some(CheckConfig::default())] {
        for_each_seed(tier(4, 100), |seed| {
            run(&module, &buffer, launch(1, 128), seed, check).unwrap_or_else(|e| panic!("{e}\n{product}"));
        });
    }
}

#[test]
fn registers_of_a_product_rest_until_the_wait() {
    let product = line();
    for (touch, text) in [
        ("add.f32 %d90, %d3, %d3;", "register '%d3' is read"),
        ("cvt.rzi.s32.f32 %d5, %d91;", "register '%d5' is written"),
        ("mov.f32 %d5, 0f00000000;", "register '%d5' is written"),
        ("st.global.u32 [%rd6+54800], %d7;", "register '%d7' is read"),
        ("mov.f32 %d90, %d3;\nadd.f32 %d91, %d90, %d90;", "register '%d90' is read"),
        ("mov.b32 {%h0, %h1}, %d3;\nadd.u16 %h2, %h1, %h1;", "register '%h1' is read"),
    ] {
        for ahead in ["", "wgmma.wait_group.sync.aligned 1;\n"] {
            let begin = "mov.f32 %d91, 0f3f800000;\n";
            let fault =
                fault_of(&format!("{begin}{FENCE}{product}{COMMIT}{ahead}{touch}\n{WAIT}"), 128, None);
            let last = touch.lines().next_back().unwrap();
            assert_wgmma(&fault, text, last);
            assert!(fault.kind.to_string().contains("wgmma.wait_group"), "{fault}");
            passes(&format!("{begin}{FENCE}{product}{COMMIT}{WAIT}{touch}"));
        }
    }
    // Without a commit the product is in no group that a wait waits for.
    let fault = fault_of(&format!("{FENCE}{product}\n{WAIT}add.f32 %d90, %d3, %d3;"), 128, None);
    assert_wgmma(&fault, "register '%d3' is read", "add.f32");
    // Moves are renamings, and a wait for all but one group waits for the older product.
    passes(&format!("{FENCE}{product}{COMMIT}mov.f32 %d90, %d3;\nmov.f32 %d3, %d90;\n{WAIT}"));
    passes(&format!("{FENCE}{product}{COMMIT}mov.b32 {{%h0, %h1}}, %d3;\n{WAIT}add.u16 %h2, %h0, %h1;"));
    let other = product.replace("%d", "%e");
    passes(&format!(
        ".reg .b32 %e<8>;\n{FENCE}{product}{COMMIT}{other}{COMMIT}wgmma.wait_group.sync.aligned 1;\nadd.f32 %d90, %d3, %d3;\n{WAIT}"
    ));
}

#[test]
fn registers_of_a_rest_until_the_wait() {
    let in_registers = Shape { a_in_registers: true, ..shape(16, BF16, BF16, F32) };
    let product = in_registers.line();
    let fault =
        fault_with(in_registers, &format!("{FENCE}{product}{COMMIT}add.u32 %a1, %a1, 1;\n{WAIT}"), 128, None);
    assert_wgmma(&fault, "register '%a1' is written", "add.u32");
    // The sums of one product as A of the next.
    let next = product
        .replace("{%a0, %a1, %a2, %a3}", "{%d0, %d1, %d2, %d3}")
        .replace("{%d0, %d1, %d2, %d3, %d4", "{%d90, %d91, %d92, %d93, %d94");
    let next = next.replace("%d5, %d6, %d7}", "%d95, %d96, %d97}");
    let zeros: String = (90..98).map(|r| format!("mov.f32 %d{r}, 0f00000000;\n")).collect();
    let fault =
        fault_with(in_registers, &format!("{zeros}{FENCE}{product}{COMMIT}{next}{COMMIT}{WAIT}"), 128, None);
    assert_wgmma(&fault, "register '%d0' is read", "wgmma.mma_async");
}

/// Warp 2 commits only behind a barrier, which the others reach behind their wait.
#[test]
fn a_wait_for_a_warp_that_waits_itself_is_a_deadlock() {
    let product = line();
    let body = format!(
        "shr.u32 %r6, %r40, 5;\nsetp.eq.u32 %p3, %r6, 2;\n{FENCE}{product}\n@%p3 bar.sync 1;{COMMIT}{WAIT}@!%p3 bar.sync 1;"
    );
    for check in [None, Some(CheckConfig::default())] {
        let fault = fault_of(&body, 128, check);
        let FaultKind::Deadlock(report) = &fault.kind else { panic!("{fault}") };
        assert_eq!(report.warps.len(), 4, "{fault}");
        assert!(fault.at.ptx_text.contains("wgmma.wait_group"), "{fault}");
        assert!(fault.to_string().contains("warp 2"), "{fault}");
    }
}

#[test]
fn the_warps_of_a_warpgroup_execute_the_same() {
    let product = line();
    let end = format!("{COMMIT}{WAIT}");
    // Warp 2 takes another product.
    let apart = format!(
        "{FENCE}shr.u32 %r6, %r40, 5;\nsetp.eq.u32 %p3, %r6, 2;\n@%p3 bra OTHER;\n{product}\nbra JOIN;\nOTHER:\n{product}\nJOIN:{end}"
    );
    assert_wgmma(
        &fault_of(&apart, 128, None),
        "the warps of a warpgroup execute the same",
        "wgmma.mma_async",
    );
    // Warp 2 leaves the product out.
    let absent =
        format!("{FENCE}shr.u32 %r6, %r40, 5;\nsetp.eq.u32 %p3, %r6, 2;\n@%p3 exit;\n{product}{end}");
    let fault = fault_of(&absent, 128, None);
    let FaultKind::Wgmma { message } = &fault.kind else { panic!("{fault}") };
    assert!(message.contains("has ended") || message.contains("warp 2 ends"), "{fault}");
    // Its descriptor is another one.
    let descriptor = format!(
        "{FENCE}shr.u32 %r6, %r40, 5;\nsetp.eq.u32 %p3, %r6, 2;\n@%p3 add.u64 %rd2, %rd2, 1;\n{product}{end}"
    );
    assert_wgmma(&fault_of(&descriptor, 128, None), "with operands", "wgmma.mma_async");
    // Lanes have different descriptors, and different scales.
    let lanes = format!("{FENCE}cvt.u64.u32 %rd7, %r40;\nadd.u64 %rd2, %rd2, %rd7;\n{product}{end}");
    assert_wgmma(&fault_of(&lanes, 128, None), "lanes disagree about a matrix descriptor", "wgmma.mma_async");
    let scales = format!("{FENCE}setp.eq.u32 %p1, %r40, 40;\n{product}{end}");
    assert_wgmma(&fault_of(&scales, 128, None), "lanes disagree about scale-d", "wgmma.mma_async");
    // Three warps.
    assert_wgmma(&fault_of(&format!("{FENCE}{product}{end}"), 96, None), "no warpgroup", "wgmma.fence");
}

#[test]
fn a_warp_comes_to_a_product_as_a_whole() {
    let product = line();
    let end = format!("{COMMIT}{WAIT}");
    let apart = format!(
        "{FENCE}setp.eq.u32 %p3, %r40, 33;\n@%p3 bra OTHER;\n{product}\nbra JOIN;\nOTHER:\n{product}\nJOIN:{end}"
    );
    assert_wgmma(&fault_of(&apart, 128, None), "the warp is not converged", "wgmma.mma_async");
    let exited = format!("{FENCE}setp.eq.u32 %p3, %r40, 33;\n@%p3 exit;\n{product}{end}");
    assert_wgmma(&fault_of(&exited, 128, None), "the warp has only the lanes", "wgmma");
    // Lanes that come later are waited for.
    passes(&format!(
        "{FENCE}setp.eq.u32 %p3, %r40, 33;\n@!%p3 bra JOIN;\nadd.u32 %r6, %r40, 1;\nJOIN:\n{product}{end}"
    ));
}

#[test]
fn bad_descriptors_are_faults() {
    let product = line();
    let end = format!("{COMMIT}{WAIT}");
    for (change, text) in [
        ("or.b64 %rd2, %rd2, 0x4000;", "which must be 0"),
        ("or.b64 %rd1, %rd1, 0x0010000000000000;", "which must be 0"),
        ("or.b64 %rd2, %rd2, 0x0002000000000000;", "a base offset without a swizzle"),
        // 128 bytes beside the alignment of the swizzle of 128.
        ("or.b64 %rd2, %rd2, 0x4000000000000008;", "is misaligned"),
        // The last 16 bytes of a row.
        ("or.b64 %rd2, %rd2, 0x4000000000000007;", "beyond a row of the swizzle"),
    ] {
        let fault = fault_of(&format!("{FENCE}{change}\n{product}{end}"), 128, None);
        assert_wgmma(&fault, text, "wgmma.mma_async");
    }
    for (change, check) in [("add.u64 %rd2, %rd2, 0x600;", None), ("add.u64 %rd2, %rd2, 0x2000;", Some(()))] {
        let check = check.map(|()| CheckConfig::default());
        let fault = fault_of(&format!("{FENCE}{change}\n{product}{end}"), 128, check);
        assert!(matches!(fault.kind, FaultKind::OutOfWindow { space: "shared", .. }), "{fault}");
        assert!(fault.at.ptx_text.contains("wgmma.mma_async"), "{fault}");
    }
}

#[test]
fn what_is_no_product_is_refused() {
    for opcode in [
        "wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n264k16.f32.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n0k16.f32.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n64k8.f32.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n64k16.f16.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.f16",
        "wgmma.mma_async.sync.aligned.m64n40k32.s32.s8.s8",
        "wgmma.mma_async.sync.aligned.m64n64k32.satfinite.f32.e4m3.e4m3",
        "wgmma.mma_async.sync.aligned.m64n64k256.s32.b1.b1.and.popc",
        "wgmma.mma_async.sp.sync.aligned.m64n64k16.f32.bf16.bf16",
        "wgmma.mma_async.aligned.m64n64k16.f32.bf16.bf16",
        "wgmma.fence",
    ] {
        assert!(!supported_opcode(opcode), "{opcode}");
    }
    let opcode = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16";
    for (operands, what) in [
        ("{%r1, %r2, %r3}, %rd1, %rd2, %p1, 1, 1, 0, 0", "3 registers given, 4 expected"),
        ("{%r1, %r2, %r3, %r3}, %rd1, %rd2, %p1, 1, 1, 0, 0", "a register of its own"),
        ("{%r1, %r2, %r3, %r4}, %rd1, %rd2, %p1, 1, 1, 0", "7 operands given, 8 expected"),
        ("{%r1, %r2, %r3, %r4}, %rd1, %rd2, %p1, 0, 1, 0, 0", "a scale of a matrix is 1 or -1"),
        ("{%r1, %r2, %r3, %r4}, %rd1, %rd2, %p1, 1, 1, 2, 0", "must be a constant"),
        ("{%r1, %r2, %r3, %r4}, %r5, %rd2, %p1, 1, 1, 0, 0", "64 bits are needed"),
        ("{%r1, %r2, %r3, %r4}, {%r5}, %rd2, %p1, 1, 1, 0", "1 registers given, 4 expected"),
    ] {
        let error = reject(&format!("{opcode} {operands};"));
        assert!(error.message.contains(what), "{error}");
    }
}

//! Compiled code against the interpreter.

use std::path::{Path, PathBuf};

use super::assembler::Target;
use super::machine::{Compiled, compiles, targets};
use super::translate::holders;
use super::{Calls, Window};
use crate::ir::{FULL, File, GUARD_NOT, Init, NO_GUARD, Op, SINK};
use crate::kernel::Kernel;
use crate::lower::live::Live;
use crate::module::Module;
use crate::registers::Regs;
use crate::seeds::Rng;
use crate::{DeviceConfig, Grid, GridConfig, Memory, Progress};

/// Other instructions than arithmetic and branches end the code.
const NONE: Calls = Calls {
    call: std::ptr::null(),
    poll: std::ptr::null(),
    execution: std::ptr::null_mut(),
    parameters: std::ptr::null(),
};

/// Numbers at the edges of formats, as bits of 32.
const SPECIAL: [u32; 24] = [
    0,
    1,
    2,
    31,
    32,
    33,
    63,
    64,
    255,
    256,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x3f80_0000,
    0xbf80_0000,
    0x7f80_0000,
    0xff80_0000,
    0x7fc0_0001,
    0xff81_2345,
    0x0000_0007,
    0x8040_0000,
    0x0080_0000,
    0x7f7f_ffff,
    0x3f80_8000,
];

fn word(rng: &mut Rng) -> u32 {
    match rng.below(4) {
        0 => SPECIAL[rng.below(SPECIAL.len() as u64) as usize],
        1 => rng.below(70) as u32,
        // Floats that are near each other.
        2 => 0x3f80_0000 ^ (rng.next() as u32 & 0x80ff_ffff),
        _ => rng.next() as u32,
    }
}

fn wide(rng: &mut Rng) -> u64 {
    match rng.below(4) {
        0 => u64::from(word(rng)),
        1 => word(rng) as i32 as u64,
        _ => u64::from(word(rng)) << 32 | u64::from(word(rng)),
    }
}

/// Registers of a warp before a block: arbitrary ones, and the constants.
fn registers(kernel: &Kernel, rng: &mut Rng) -> Regs {
    let mut regs = Regs::of_warps(1, kernel.slots).remove(0);
    for row in regs.r32.iter_mut() {
        // Often the same in all lanes, as much of a kernel is.
        let same = (rng.below(3) == 0).then(|| word(rng));
        row.iter_mut().for_each(|v| *v = same.unwrap_or_else(|| word(rng)));
    }
    for row in regs.r64.iter_mut() {
        row.iter_mut().for_each(|v| *v = wide(rng));
    }
    for p in &mut regs.pred {
        *p = [0, FULL, rng.next() as u32][rng.below(3) as usize];
    }
    for &(file, slot, init) in &kernel.inits {
        let Init::Bits(v) = init else { continue };
        match file {
            File::R32 => regs.r32[slot as usize] = [v as u32; 32],
            File::R64 => regs.r64[slot as usize] = [v; 32],
            File::Pred => regs.pred[slot as usize] = if v != 0 { FULL } else { 0 },
        }
    }
    regs
}

fn copy(kernel: &Kernel, from: &Regs) -> Regs {
    let mut regs = Regs::of_warps(1, kernel.slots).remove(0);
    regs.r32.copy_from_slice(&from.r32);
    regs.r64.copy_from_slice(&from.r64);
    regs.pred.copy_from_slice(&from.pred);
    regs
}

/// Runs the arithmetic instructions `start..end` one by one.
fn interpret(kernel: &Kernel, regs: &mut Regs, mask: u32, range: std::ops::Range<usize>) {
    for inst in &kernel.code[range] {
        let Op::Alu { f, s, .. } = &inst.op else { panic!("not arithmetic") };
        let guard = match inst.guard {
            NO_GUARD => FULL,
            g if g & GUARD_NOT != 0 => !regs.pred[(g & !GUARD_NOT) as usize],
            g => regs.pred[g as usize],
        };
        if guard & mask != 0 {
            // SAFETY: the constructor of `f` checked that this processor has its instructions.
            unsafe { f(regs, s, mask & guard) };
        }
    }
}

/// Runs every block of a kernel both ways, for all lanes and for some by turns. Returns how many
/// there are.
fn same_blocks(kernel: &Kernel, target: Target, rng: &mut Rng, rounds: usize) -> usize {
    let compiled = Compiled::default();
    // Values leave registers for others in every second kernel.
    compiled.compile_with(kernel, true, target, [11, holders(target)][rng.below(2) as usize]);
    let live = Live::new(kernel);
    let leaders = live.leaders();
    let n = kernel.code.len();
    let is_alu = |i: usize| matches!(kernel.code[i].op, Op::Alu { .. });
    let starts: Vec<usize> = (0..n).filter(|&i| is_alu(i) && (leaders[i] || !is_alu(i - 1))).collect();
    for round in 0..rounds {
        let mask = match round % 2 {
            0 => FULL,
            _ => [rng.next() as u32 | 1, 1 << rng.below(32)][rng.below(2) as usize],
        };
        let Some(code) = compiled.code(true, mask) else { return 0 };
        let before = registers(kernel, rng);
        for &start in &starts {
            let end = (start + 1..n).find(|&i| !is_alu(i) || leaders[i]).unwrap_or(n);
            let (mut want, mut got) = (copy(kernel, &before), copy(kernel, &before));
            interpret(kernel, &mut want, mask, start..end);
            let budget = (end - start) as u64;
            // SAFETY: the registers have the slots of the kernel, and the code is for these lanes.
            let ran = unsafe { code.run(start as u32, &mut got, mask, budget, Window::ALL, NONE) };
            assert_eq!(ran, Some((end as u32, budget)), "{} {start}", kernel.name);
            let same = |(file, slot): (File, u32)| {
                let at = slot as usize;
                // Rows as a whole first: these programs are not optimised.
                let equal = match file {
                    File::R32 => want.r32[at] == got.r32[at],
                    File::R64 => want.r64[at] == got.r64[at],
                    File::Pred => want.pred[at] == got.pred[at],
                };
                // The sink is never read, even if the signature has it as read.
                if equal || slot == SINK {
                    return;
                }
                let (want, got) = match file {
                    File::R32 => (want.r32[at].map(u64::from), got.r32[at].map(u64::from)),
                    File::R64 => (want.r64[at], got.r64[at]),
                    File::Pred => {
                        let bits = |p: u32| std::array::from_fn(|i| u64::from(p >> i & 1));
                        (bits(want.pred[at]), bits(got.pred[at]))
                    }
                };
                let lane = (0..32).find(|&i| want[i] != got[i]).unwrap_or(0);
                let text: Vec<_> = (start..end).map(|pc| kernel.place_of(pc as u32).ptx_text).collect();
                panic!(
                    "{}: {file:?} {slot} of lane {lane} is {:#x}, not {:#x}, lanes {mask:#x}, behind {}",
                    kernel.name,
                    got[lane],
                    want[lane],
                    text.join("\n")
                );
            };
            live.before(end).into_iter().for_each(same);
            // Lanes that did not run keep what they had.
            if mask == FULL {
                continue;
            }
            for (before, got) in before.r32.iter().zip(got.r32.iter()).filter(|(before, got)| before != got) {
                assert!(
                    (0..32).all(|i| mask >> i & 1 != 0 || before[i] == got[i]),
                    "{} {start}",
                    kernel.name
                );
            }
            for (before, got) in before.r64.iter().zip(got.r64.iter()).filter(|(before, got)| before != got) {
                assert!(
                    (0..32).all(|i| mask >> i & 1 != 0 || before[i] == got[i]),
                    "{} {start}",
                    kernel.name
                );
            }
            for (before, got) in before.pred.iter().zip(&got.pred) {
                assert_eq!(before & !mask, got & !mask, "{} {start}", kernel.name);
            }
        }
    }
    starts.len()
}

/// Bytes of the parameters of a kernel: an address, and more.
const PARAMETERS: usize = 48;

/// The text of a kernel with these statements, of which all registers are stored at the end.
fn program(body: &str) -> String {
    let mut stores = String::new();
    for i in 0..8 {
        stores += &format!("st.global.b32 [%rd9+{}], %r{i};\n", 128 * i);
        stores += &format!("st.global.b64 [%rd9+{}], %rd{i};\n", 1024 + 256 * i);
        stores += &format!("selp.b32 %r9, 1, 0, %p{i}; st.global.b32 [%rd9+{}], %r9;\n", 4096 + 128 * i);
        stores += &format!("st.global.b16 [%rd9+{}], %rs{i};\n", 8192 + 128 * i);
    }
    format!(
        ".version 8.4\n.target sm_90\n.address_size 64\n.entry k(.param .u64 out, .param .align 16 .b8 more[32])\n{{\n\
         .shared .align 16 .b8 sh[4096]; .local .align 16 .b8 own[64];\n\
         .reg .pred %p<10>; .reg .b16 %rs<10>; .reg .b32 %r<11>; .reg .b64 %rd<11>;\n\
         ld.param.u64 %rd9, [out];\n{body}\n{stores}ret;\n}}\n"
    )
}

/// Operand shapes: r: 32 bits, d: 64 bits, h: 16 bits, p: a predicate, i: a small constant.
const FORMS: &[&str] = &[
    "mov.b32 r, r",
    "mov.b32 r, i",
    "mov.b64 d, d",
    "mov.pred p, p",
    "mov.b64 d, {r, r}",
    "mov.b64 {r, r}, d",
    "mov.b32 {h, h}, r",
    "add.s32 r, r, r",
    "sub.s32 r, r, i",
    "mul.lo.s32 r, r, r",
    "mad.lo.s32 r, r, r, r",
    "add.s64 d, d, d",
    "sub.s64 d, d, d",
    "mul.lo.s64 d, d, d",
    "mad.lo.s64 d, d, d, d",
    "mul.wide.u32 d, r, r",
    "mul.wide.s32 d, r, i",
    "mad.wide.u32 d, r, r, d",
    "mad.wide.s32 d, r, r, d",
    "mul.hi.u32 r, r, r",
    "div.u32 r, r, i",
    "div.u32 r, r, r",
    "rem.u32 r, r, r",
    "rem.u32 r, i, r",
    "div.s32 r, r, r",
    "and.b32 r, r, r",
    "or.b32 r, r, i",
    "xor.b32 r, r, r",
    "not.b32 r, r",
    "and.b64 d, d, d",
    "or.b64 d, d, d",
    "xor.b64 d, d, i",
    "not.b64 d, d",
    "and.pred p, p, p",
    "or.pred p, p, p",
    "xor.pred p, p, p",
    "not.pred p, p",
    "shl.b32 r, r, r",
    "shl.b32 r, r, i",
    "shr.u32 r, r, r",
    "shr.u32 r, r, i",
    "shr.s32 r, r, r",
    "shr.s32 r, r, i",
    "shl.b64 d, d, r",
    "shl.b64 d, d, i",
    "shr.u64 d, d, r",
    "shr.u64 d, d, i",
    "shr.s64 d, d, r",
    "shr.s64 d, d, i",
    "min.u32 r, r, r",
    "min.s32 r, r, r",
    "max.u32 r, r, r",
    "max.s32 r, r, r",
    "min.u64 d, d, d",
    "min.s64 d, d, d",
    "max.u64 d, d, d",
    "max.s64 d, d, d",
    "neg.s32 r, r",
    "neg.s64 d, d",
    "abs.s32 r, r",
    "popc.b32 r, r",
    "clz.b32 r, r",
    "selp.b32 r, r, r, p",
    "selp.b32 r, 1, 0, p",
    "selp.b64 d, d, d, p",
    "selp.b16 h, h, h, p",
    "cvt.u64.u32 d, r",
    "cvt.s64.s32 d, r",
    "cvt.u32.u64 r, d",
    "cvt.u16.u32 h, r",
    "cvt.u32.u16 r, h",
    "cvt.s32.s16 r, h",
    "cvt.u32.u8 r, r",
    "cvt.rn.bf16x2.f32 r, r, r",
    "cvt.f32.bf16 r, h",
    "cvt.rn.f32.u32 r, r",
    "add.f32 r, r, r",
    "sub.f32 r, r, r",
    "mul.f32 r, r, r",
    "fma.rn.f32 r, r, r, r",
    "add.ftz.f32 r, r, r",
    "add.sat.f32 r, r, r",
    "mul.ftz.f32 r, r, r",
    "fma.rn.sat.f32 r, r, r, r",
    "add.rz.f32 r, r, r",
    "max.f32 r, r, r",
    "add.s16 h, h, h",
    "add.cc.u32 r, r, r",
    "addc.u32 r, r, r",
    "lop3.b32 r, r, r, r, 0x96",
    "setp.eq.s32 p, r, r",
    "setp.ne.s32 p, r, i",
    "setp.lt.u32 p, r, r",
    "setp.le.u32 p|p, r, r",
    "setp.lo.u32 p, r, r",
    "setp.hs.u32 p, r, i",
    "setp.gt.s32 p, r, r",
    "setp.ge.s32 p, r, r",
    "setp.lt.and.s32 p|p, r, r, p",
    "setp.ge.or.u32 p, r, r, !p",
    "setp.eq.xor.b32 p, r, r, p",
    "setp.eq.b64 p, d, d",
    "setp.gt.u32 p, r, r",
    "setp.le.s32 p, r, r",
    "setp.lt.u64 p, d, d",
    "setp.le.u64 p|p, d, d",
    "setp.ge.u64 p, d, d",
    "setp.gt.u64 p, d, d",
    "setp.gt.s64 p|p, d, d",
    "setp.ge.s64 p, d, d",
    "setp.le.s64 p, d, d",
    "setp.lt.s64 p|p, d, d",
    "setp.ne.and.b64 p, d, d, p",
    "setp.eq.f32 p, r, r",
    "setp.ne.f32 p, r, r",
    "setp.lt.f32 p, r, r",
    "setp.le.f32 p, r, r",
    "setp.gt.f32 p|p, r, r",
    "setp.ge.f32 p, r, r",
    "setp.neu.f32 p, r, r",
    "setp.nan.f32 p, r, r",
    "setp.lt.ftz.f32 p, r, r",
    "setp.lt.s16 p, h, h",
];

/// An instruction of a form with registers drawn at random.
fn instance(form: &str, rng: &mut Rng) -> String {
    let (opcode, operands) = form.split_once(' ').unwrap_or((form, ""));
    let mut text = format!("{opcode} ");
    let mut two = vec![];
    for c in operands.chars() {
        // The two results of one instruction must be different registers.
        let mut pick = |rng: &mut Rng| {
            let n = loop {
                let n = rng.below(8);
                if !two.contains(&n) {
                    break n;
                }
            };
            two.push(n);
            if two.len() == 2 {
                two.clear();
            }
            n
        };
        let both = operands.contains('|') || operands.starts_with('{');
        let mut register = |rng: &mut Rng| if both { pick(rng) } else { rng.below(8) };
        match c {
            'r' => text += &format!("%r{}", register(rng)),
            'd' => text += &format!("%rd{}", rng.below(8)),
            'h' => text += &format!("%rs{}", register(rng)),
            'p' => text += &format!("%p{}", register(rng)),
            'i' => text += &rng.below(70).max(1).to_string(),
            c => text.push(c),
        }
    }
    text + ";"
}

/// A guard, or none.
fn guard(rng: &mut Rng) -> String {
    match rng.below(6) {
        0 => format!("@%p{} ", rng.below(8)),
        1 => format!("@!%p{} ", rng.below(8)),
        _ => String::new(),
    }
}

fn kernel_of(text: &str) -> std::sync::Arc<Kernel> {
    let module = Module::parse(text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    module.kernel("k").unwrap()
}

#[test]
fn every_form_computes_what_its_function_computes() {
    if !compiles() {
        return;
    }
    let mut rng = Rng::new(1);
    for form in FORMS {
        for _ in 0..6 {
            let text = program(&format!("{}{}", guard(&mut rng), instance(form, &mut rng)));
            for &target in targets() {
                assert!(same_blocks(&kernel_of(&text), target, &mut rng, 12) > 0);
            }
        }
    }
}

#[test]
fn random_blocks_compute_what_their_functions_compute() {
    if !compiles() {
        return;
    }
    crate::for_each_seed(150, |seed| {
        let mut rng = Rng::new(seed);
        let length = 1 + rng.below(60);
        let body: Vec<String> = (0..length)
            .map(|_| {
                let form = FORMS[rng.below(FORMS.len() as u64) as usize];
                format!("{}{}", guard(&mut rng), instance(form, &mut rng))
            })
            .collect();
        for &target in targets() {
            assert!(same_blocks(&kernel_of(&program(&body.join("\n"))), target, &mut rng, 8) > 0);
        }
    });
}

/// Files below a folder whose names end in `.ptx`.
fn ptx_below(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            ptx_below(&path, files);
        } else if path.extension().is_some_and(|ext| ext == "ptx") {
            files.push(path);
        }
    }
}

#[test]
fn blocks_of_committed_kernels_compute_what_their_functions_compute() {
    if !compiles() {
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = vec![];
    for folder in ["gpu/ptx", "vgpu/tests/vgpu/foreign/ptx"] {
        ptx_below(&root.join(folder), &mut files);
    }
    assert!(files.len() > 10, "{files:?}");
    let (mut rng, mut blocks) = (Rng::new(2), 0);
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let (module, _) =
            Module::parse_supported(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        for kernel in module.kernels() {
            for &target in targets() {
                blocks += same_blocks(kernel, target, &mut rng, 2);
            }
        }
    }
    assert!(blocks > 5000, "{blocks}");
}

/// Loads and stores of each shape: `A` stands for an address in a space where lanes may have
/// addresses of their own.
const ACCESSES: &[(&str, u64)] = &[
    ("ld.SPACE.b32 r, [A]", 4),
    ("ld.SPACE.b64 d, [A]", 8),
    ("ld.SPACE.v2.b32 {r, r}, [A]", 8),
    ("ld.SPACE.v4.b32 {r, r, r, r}, [A]", 16),
    ("ld.SPACE.v2.b64 {d, d}, [A]", 16),
    ("ld.SPACE.u8 r, [A]", 1),
    ("ld.SPACE.s8 r, [A]", 1),
    ("ld.SPACE.s16 d, [A]", 2),
    ("ld.SPACE.b16 h, [A]", 2),
    ("ld.SPACE.s32 d, [A]", 4),
    ("ld.SPACE.v2.u16 {h, h}, [A]", 4),
    ("ld.volatile.SPACE.b32 r, [A]", 4),
    ("ld.relaxed.gpu.SPACE.b64 d, [A]", 8),
    ("ld.relaxed.gpu.SPACE.v2.b64 {d, d}, [A]", 16),
    ("st.SPACE.b32 [A], r", 4),
    ("st.SPACE.b64 [A], d", 8),
    ("st.SPACE.v2.b32 [A], {r, r}", 8),
    ("st.SPACE.v4.b32 [A], {r, r, r, r}", 16),
    ("st.SPACE.v2.b64 [A], {d, d}", 16),
    ("st.SPACE.b8 [A], r", 1),
    ("st.SPACE.b16 [A], h", 2),
    ("st.SPACE.v2.b16 [A], {h, h}", 4),
    ("st.relaxed.gpu.SPACE.b64 [A], d", 8),
    ("st.relaxed.gpu.SPACE.v2.b64 [A], {d, d}", 16),
    ("atom.SPACE.add.u32 r, [A], r", 4),
    ("atom.SPACE.cas.b64 d, [A], d, d", 8),
    ("red.SPACE.max.u32 [A], r", 4),
];

/// Loads of parameters.
const PARAMETER_LOADS: &[(&str, &str)] = &[
    ("ld.param.b32 r, [A]", "more+4"),
    ("ld.param.b64 d, [A]", "more+16"),
    ("ld.param.v2.b32 {r, r}, [A]", "more+8"),
    ("ld.param.v4.b32 {r, r, r, r}, [A]", "more+16"),
    ("ld.param.v2.b64 {d, d}, [A]", "more"),
    ("ld.param.u8 r, [A]", "more+3"),
    ("ld.param.s32 d, [A]", "more+12"),
];

/// An instruction of a form with registers drawn at random, and this address.
fn access_at(form: &str, address: &str, rng: &mut Rng) -> String {
    instance(form, rng).replace("[A]", &format!("[{address}]"))
}

/// A load or a store at one place, in rows, or scattered, and seldom a bad address.
fn access(rng: &mut Rng) -> String {
    let guard = guard(rng);
    if rng.below(5) == 0 {
        let (form, at) = PARAMETER_LOADS[rng.below(PARAMETER_LOADS.len() as u64) as usize];
        return format!("{guard}{}\n", access_at(form, at, rng));
    }
    let (form, size) = ACCESSES[rng.below(ACCESSES.len() as u64) as usize];
    let mut space = ["global", "shared", "local", "generic", "shared window"][rng.below(5) as usize];
    if space == "local" && (form.starts_with("atom") || form.starts_with("red")) {
        space = "global";
    }
    // The place of each lane, in elements.
    let place = match rng.below(6) {
        0 => format!("mov.u32 %r8, {};", rng.below(64)),
        1 => format!("mov.u32 %r8, %laneid; mad.lo.u32 %r8, %r8, 5, {};", rng.below(9)),
        2 => format!("mov.u32 %r8, %laneid; mul.lo.u32 %r8, %r8, 37; and.b32 %r8, %r8, {};", rng.below(64)),
        _ => format!("mov.u32 %r8, %laneid; add.u32 %r8, %r8, {};", rng.below(9)),
    };
    let mut text = format!("{place} mul.lo.u32 %r8, %r8, {size}; and.b32 %r8, %r8, 2047;\n");
    if rng.below(60) == 0 {
        text += ["@%p3 add.u32 %r8, %r8, 1;", "@%p4 add.u32 %r8, %r8, 0x100000;"][rng.below(2) as usize];
    }
    if space == "local" {
        text += "and.b32 %r8, %r8, 0x10003f; and.b32 %r8, %r8, 0xfffffff0;\n";
    }
    let wide = "cvt.u64.u32 %rd8, %r8; add.u64 %rd8, %rd8";
    let (prefix, address) = match space {
        "global" => (format!("{wide}, %rd9;\n"), "%rd8+16384"),
        "generic" => (format!("{wide}, %rd9;\n"), "%rd8+20480"),
        // By offsets of 32 bits, with the variable's in a register of its own.
        "shared" => ("mov.u32 %r10, sh; add.u32 %r8, %r8, %r10;\n".into(), "%r8+16"),
        "local" => ("mov.u32 %r10, own; add.u32 %r8, %r8, %r10;\n".into(), "%r8"),
        _ => (format!("mov.u64 %rd10, sh; cvta.shared.u64 %rd10, %rd10; {wide}, %rd10;\n"), "%rd8+32"),
    };
    let named = match space {
        "generic" | "shared window" => form.replace(".SPACE", ""),
        // Only weak accesses have these.
        "local" => form.replace(".volatile", "").replace(".relaxed.gpu", "").replace("SPACE", "local"),
        space => form.replace("SPACE", space),
    };
    text + &prefix + &format!("{guard}{}\n", access_at(&named, address, rng))
}

/// Loops and branches by which lanes part and meet, with collectives and barriers between, and with
/// `accesses` loads and stores.
fn branching(rng: &mut Rng, accesses: bool) -> String {
    let mut body = String::from("mov.u32 %r0, %tid.x; mov.u32 %r1, 1; mov.u64 %rd0, 7;\n");
    for i in 2..8 {
        body += &format!("mul.lo.u32 %r{i}, %r0, {};", 3 + rng.below(50));
        body += &format!("mul.wide.u32 %rd{}, %r{i}, {}; mov.u32 %r9, 0;\n", i - 1, rng.below(1000));
        body += &format!("setp.gt.u32 %p{i}, %r{i}, {};\n", rng.below(900));
    }
    body += "mov.pred %p0, 0; setp.lt.u32 %p1, %r0, 9; mov.u64 %rd7, 1;\n";
    (0..8).for_each(|i| body += &format!("cvt.u16.u32 %rs{i}, %r{};\n", i % 4));
    for part in 0..6 {
        body += &format!("mov.u32 %r9, 0;\nL{part}:\n");
        for _ in 0..rng.below(9) {
            let form = FORMS[rng.below(FORMS.len() as u64) as usize];
            body += &format!("{}{}\n", guard(rng), instance(form, rng));
            if accesses && rng.below(2) == 0 {
                body += &access(rng);
            }
        }
        // The lanes that run together, and the time, become part of the results.
        let now = ["activemask.b32 %r4;\n", "mov.u32 %r5, %clock;\n", "fence.acq_rel.gpu;\n", ""];
        body += now[rng.below(4) as usize];
        // Lanes that leave the loop early do not reach a collective within it.
        match rng.below(if accesses { 2 } else { 4 }) {
            0 => body += &format!("@%p{} bra M{part};\nadd.u32 %r3, %r3, %r0;\nM{part}:\n", rng.below(8)),
            1 => {
                body += &format!("@%p{} bra M{part};\n", rng.below(8));
                body += &format!("st.global.b32 [%rd9+{}], %r0;\nM{part}:\n", 12288 + 4 * part);
            }
            2 => body += "bar.warp.sync 0xffffffff;\n",
            _ => body += "shfl.sync.bfly.b32 %r4, %r4, 1, 31, 0xffffffff;\n",
        }
        // The number of iterations depends on the lane.
        body += &format!("add.u32 %r9, %r9, 1; and.b32 %r8, %r0, {};\n", rng.below(32));
        body += &format!("setp.lt.u32 %p8, %r9, %r8; @%p8 bra L{part};\n");
        if rng.below(2) == 0 {
            body += "bar.warp.sync 0xffffffff; bar.sync 0;\n";
        }
    }
    body
}

/// Runs a program compiled and interpreted, and compares each step and the memory. Returns whether
/// it ended with a fault.
fn same_steps(seed: u64, text: &str, checked: bool) -> bool {
    let run = |compile: bool| {
        let kernel = kernel_of(text);
        if compile {
            let target = targets()[seed as usize / 2 % targets().len()];
            kernel.compiled.compile_with(&kernel, checked, target, holders(target));
        }
        let checker = checked.then(|| crate::Checker::new(crate::CheckConfig::default()));
        let memory = Memory::checked(seed, checker);
        let out = memory.alloc_zeroed(32768, "out").unwrap();
        let device =
            DeviceConfig { schedule_seed: seed.is_multiple_of(2).then_some(seed), ..DeviceConfig::default() };
        let mut params = out.addr().to_ne_bytes().to_vec();
        params.extend((8..PARAMETERS).map(|i| (i * 37) as u8));
        let mut grid =
            Grid::new(kernel, memory.clone(), &device, GridConfig::new(2, 64, 0), &params).unwrap();
        let (mut steps, mut faulty) = (vec![], false);
        for _ in 0..20_000 {
            let done = grid.step(37);
            steps.push(grid.stats().warp_instructions);
            steps.push(grid.schedule_digest());
            match done {
                Ok(Progress::Done) => break,
                Ok(_) => {}
                // A bad address, or blocks store to the same words.
                Err(fault) => {
                    faulty = true;
                    steps.push(fault.at.ptx_line as u64);
                    steps.push(fault.lane.map_or(64, u64::from));
                    steps.push((fault.block[0] << 8 | fault.warp).into());
                    break;
                }
            }
        }
        let mut bytes = vec![0; 32768];
        // Check mode does not let the host read what a grid with a fault wrote.
        let _ = memory.read(out.addr(), &mut bytes);
        (steps, bytes, faulty)
    };
    let (compiled, interpreted) = (run(true), run(false));
    assert!(compiled.0 == interpreted.0, "steps differ\n{text}");
    if let Some(at) = (0..32768).find(|&i| compiled.1[i] != interpreted.1[i]) {
        let line = || text.lines().enumerate().map(|(i, l)| format!("{} {l}\n", i + 1)).collect::<String>();
        panic!("byte {at} is {}, not {}\n{}", compiled.1[at], interpreted.1[at], line());
    }
    interpreted.2
}

#[test]
fn grids_take_the_same_steps_compiled_and_interpreted() {
    if !compiles() {
        return;
    }
    crate::for_each_seed(200, |seed| {
        same_steps(seed, &program(&branching(&mut Rng::new(seed), false)), seed.is_multiple_of(3));
    });
}

#[test]
fn loads_and_stores_of_compiled_code_are_those_of_the_interpreter() {
    if !compiles() {
        return;
    }
    let (mut faults, mut runs) = (0, 0);
    crate::for_each_seed(400, |seed| {
        let text = program(&branching(&mut Rng::new(seed), true));
        faults += u32::from(same_steps(seed, &text, seed.is_multiple_of(7)));
        runs += 1;
    });
    // Both ways of ending are tested, unless one seed is replayed.
    assert!(runs == 1 || faults * 20 > runs && faults * 2 < runs, "{faults} of {runs}");
}

//! `multimem`: results of all forms against an oracle from the manual, races, and errors.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::sync::Arc;

use epoxide_vgpu::{
    Array, CheckConfig, Class, Coverage, DeviceConfig, Explore, FaultKind, GridConfig, Machine, MachineError,
    MemoryError, Module, MulticastObject, Path, Reservation, for_each_seed, supported_opcode,
};
use half::{bf16, f16};
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::common::{broken_seeds, device, replaying, tier};

/// PTX for types of 8 bits, which ptxas accepts for no earlier target.
const HEAD: &str = ".version 8.6\n.target sm_100a\n.address_size 64\n";

/// A form: its instruction, the type, and how many of them.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Form {
    kind: &'static str,
    op: &'static str,
    sums: &'static str,
    ty: &'static str,
    n: usize,
}

/// Bits of a register, bits of a number in it, and the register's type.
fn layout(ty: &str) -> (usize, usize, &'static str) {
    let (number, packed) = ty.split_once('x').unwrap_or((ty, "1"));
    let bits = match number {
        "e4m3" | "e5m2" => 8,
        "bf16" => 16,
        _ => number[1..].parse().unwrap(),
    };
    let whole = bits * packed.parse::<usize>().unwrap();
    let register = match (ty, whole) {
        ("f32", _) => "f32",
        ("f64", _) => "f64",
        (_, 8) => "b8",
        (_, 16) => "b16",
        (_, 32) => "b32",
        _ => "b64",
    };
    (whole, bits, register)
}

const SMALL: [&str; 6] = ["e4m3", "e4m3x2", "e4m3x4", "e5m2", "e5m2x2", "e5m2x4"];
const HALF: [&str; 4] = ["f16", "f16x2", "bf16", "bf16x2"];

/// All forms that ptxas 13.0.88 accepts.
fn forms() -> Vec<Form> {
    let mut forms = vec![];
    let mut add = |kind, op, sums, types: &[&'static str]| {
        for &ty in types {
            for n in [1, 2, 4, 8] {
                let vector = ty.starts_with(['f', 'e']) && ty != "f64" || ty.starts_with("bf");
                if matches!(layout(ty).0 * n, 32 | 64 | 128) && (n == 1 || vector) {
                    forms.push(Form { kind, op, sums, ty, n });
                }
            }
        }
    };
    let all = [&["b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64"], &HALF[..], &SMALL].concat();
    add("st", "", "", &all);
    for kind in ["ld_reduce", "red"] {
        add(kind, ".add", "", &[&["u32", "u64", "s32", "f32", "f64"], &HALF[..]].concat());
        for op in [".min", ".max"] {
            add(kind, op, "", &["u32", "u64", "s32", "s64"]);
        }
        for op in [".and", ".or", ".xor"] {
            add(kind, op, "", &["b32", "b64"]);
        }
    }
    add("ld_reduce", ".add", ".acc::f32", &HALF);
    add("ld_reduce", ".add", "", &SMALL);
    add("ld_reduce", ".add", ".acc::f16", &SMALL);
    for op in [".min", ".max"] {
        add("ld_reduce", op, "", &HALF);
        add("ld_reduce", op, "", &SMALL);
        add("red", op, "", &HALF);
    }
    // ptxas accepts them in vectors alone.
    forms.retain(|f| !(f.kind == "red" && f.n == 1 && HALF.contains(&f.ty) && f.op != ".add"));
    forms
}

impl Form {
    fn bytes(&self) -> usize {
        layout(self.ty).0 / 8 * self.n
    }

    fn opcode(&self, more: &str) -> String {
        let Form { kind, op, sums, ty, n } = self;
        let vector = if *n == 1 { String::new() } else { format!(".v{n}") };
        format!("multimem.{kind}{more}.global{op}{sums}{vector}.{ty}")
    }

    /// A kernel of one warp in which each lane has a place of its own. `io` has the operands, or
    /// gets the results.
    fn kernel(&self, name: &str, more: &str) -> String {
        let (bits, _, register) = layout(self.ty);
        let regs: Vec<String> = (0..self.n).map(|e| format!("%v{e}")).collect();
        let list = if self.n == 1 { regs[0].clone() } else { format!("{{{}}}", regs.join(", ")) };
        let moves = |opcode: &str, store: bool| {
            (0..self.n).fold(String::new(), |mut text, e| {
                let at = e * bits / 8;
                let _ = match store {
                    true => writeln!(text, "{opcode}.global.b{bits} [%rd4+{at}], %v{e};"),
                    false => writeln!(text, "{opcode}.global.b{bits} %v{e}, [%rd4+{at}];"),
                };
                text
            })
        };
        let body = match self.kind {
            "ld_reduce" => format!("{} {list}, [%rd3];\n{}", self.opcode(more), moves("st", true)),
            _ => format!("{}{} [%rd3], {list};", moves("ld", false), self.opcode(more)),
        };
        format!(
            ".visible .entry {name}(.param .u64 all, .param .u64 io)\n{{\n.reg .b32 %r1;\n.reg .b64 %rd<5>;\n\
             .reg .{register} %v<{}>;\nld.param.u64 %rd1, [all];\nld.param.u64 %rd2, [io];\n\
             mov.u32 %r1, %tid.x;\nmad.wide.u32 %rd3, %r1, {}, %rd1;\nmad.wide.u32 %rd4, %r1, {}, %rd2;\n\
             {body}\nret;\n}}\n",
            self.n,
            self.bytes(),
            self.bytes()
        )
    }
}

/// The value of a number of 8 bits; of NaN, NaN.
fn small_value(bits: u8, ty: &str) -> f64 {
    let (exponent_bits, bias) = if ty.starts_with("e4m3") { (4, 7) } else { (5, 15) };
    let mantissa_bits = 7 - exponent_bits;
    let exponent = i32::from(bits >> mantissa_bits & ((1 << exponent_bits) - 1));
    let mantissa = f64::from(bits & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    let value = match exponent {
        0 => mantissa * 2f64.powi(1 - bias),
        _ => (1.0 + mantissa) * 2f64.powi(exponent - bias),
    };
    let nan = if mantissa_bits == 3 { bits & 0x7f == 0x7f } else { exponent == 31 };
    match (nan, bits >> 7) {
        (true, _) => f64::NAN,
        (false, 0) => value,
        (false, _) => -value,
    }
}

/// The nearest number of 8 bits, to even, or the largest.
fn small_nearest(value: f64, ty: &str) -> u8 {
    // Infinities saturate too.
    let magnitude = value.abs().min(1e6);
    let finite = (0..0x7fu8).take_while(|bits| small_value(*bits, ty).is_finite());
    let nearest = finite.min_by(|a, b| {
        let distance = |bits: u8| (small_value(bits, ty) - magnitude).abs();
        distance(*a).total_cmp(&distance(*b)).then((a & 1).cmp(&(b & 1)))
    });
    nearest.unwrap() | if value.is_sign_negative() { 0x80 } else { 0 }
}

/// Numbers reduced in order, each as its bits.
fn reduced(form: &Form, values: &[u64]) -> u64 {
    let fold = |f: &dyn Fn(u64, u64) -> u64| values.iter().copied().reduce(f).unwrap();
    let number = form.ty.split('x').next().unwrap();
    let (least, wide) = (form.op == ".min", !form.sums.is_empty());
    // Values without NaN. Zeros differ in their signs.
    let choose = |a: f64, b: f64| {
        let a_first = a.total_cmp(&b).is_le();
        if a_first == least { a } else { b }
    };
    match number {
        "f32" => fold(&|a, b| (f32::from_bits(a as u32) + f32::from_bits(b as u32)).to_bits().into()),
        "f64" => fold(&|a, b| (f64::from_bits(a) + f64::from_bits(b)).to_bits()),
        "f16" | "bf16" => {
            let value = |bits: u64| match number {
                "f16" => f16::from_bits(bits as u16).to_f32(),
                _ => bf16::from_bits(bits as u16).to_f32(),
            };
            let bits = |value: f32| -> u64 {
                match number {
                    "f16" => f16::from_f32(value).to_bits().into(),
                    _ => bf16::from_f32(value).to_bits().into(),
                }
            };
            match form.op {
                ".add" if wide => bits(values.iter().map(|v| value(*v)).reduce(|a, b| a + b).unwrap()),
                // A sum in f32 has more than twice the places, so that two roundings are one.
                ".add" => fold(&|a, b| bits(value(a) + value(b))),
                _ => fold(&|a, b| bits(choose(value(a).into(), value(b).into()) as f32)),
            }
        }
        "e4m3" | "e5m2" => {
            let value = |bits: u64| small_value(bits as u8, number);
            let bits = |value: f64| u64::from(small_nearest(value, number));
            match form.op {
                ".add" if wide => {
                    let numbers = values.iter().map(|v| f16::from_f32(value(*v) as f32));
                    let sum = numbers.reduce(|a, b| f16::from_f32(a.to_f32() + b.to_f32()));
                    bits(sum.unwrap().to_f32().into())
                }
                ".add" => fold(&|a, b| bits(value(a) + value(b))),
                _ => fold(&|a, b| bits(choose(value(a), value(b)))),
            }
        }
        _ => {
            let bits = layout(form.ty).1 as u32;
            let signed = |v: u64| if bits == 32 { i64::from(v as u32 as i32) } else { v as i64 };
            let is_signed = number.starts_with('s');
            let result = fold(&|a, b| match (form.op, is_signed) {
                (".add", _) => a.wrapping_add(b),
                (".and", _) => a & b,
                (".or", _) => a | b,
                (".xor", _) => a ^ b,
                (".min", true) => signed(a).min(signed(b)) as u64,
                (".max", true) => signed(a).max(signed(b)) as u64,
                (".min", false) => a.min(b),
                (".max", false) => a.max(b),
                other => panic!("{other:?}"),
            });
            result & u64::MAX >> (64 - bits)
        }
    }
}

/// Random bytes that are numbers of a form's type, without infinities and NaNs. One in four numbers
/// has a small exponent, so that some are close to each other.
fn numbers(rng: &mut ChaCha8Rng, ty: &str, bytes: usize) -> Vec<u8> {
    let each = layout(ty).1 / 8;
    let mut all = vec![];
    while all.len() < bytes {
        let bits = rng.next_u64();
        let near = rng.next_u32().is_multiple_of(4);
        let fields = |exponent: u32, mantissa: u32, bias: u64| {
            let top = (1u64 << exponent) - 1;
            let e = if near { bias + bits % 3 } else { bits >> mantissa & top };
            bits & !(top << mantissa) | (if e == top { bias } else { e }) << mantissa
        };
        let bits = match ty.split('x').next().unwrap() {
            "f16" => fields(5, 10, 15),
            "bf16" => fields(8, 7, 127),
            "f32" => fields(8, 23, 127),
            "f64" => fields(11, 52, 1023),
            "e5m2" => fields(5, 2, 15),
            "e4m3" if bits & 0x7f == 0x7f => bits & !1,
            _ => bits,
        };
        all.extend(&bits.to_le_bytes()[..each]);
    }
    all
}

fn number_at(bytes: &[u8], at: usize, each: usize) -> u64 {
    let mut number = [0; 8];
    number[..each].copy_from_slice(&bytes[at..at + each]);
    u64::from_le_bytes(number)
}

/// A fast machine, one with a seed, one in check mode, and one with weak memory.
fn machine(devices: usize, seed: u64) -> Machine {
    let weak = CheckConfig { weak_memory: Some(seed), ..CheckConfig::default() };
    match seed % 4 {
        0 => Machine::new(devices),
        1 => Machine::with_config(devices, device(seed), None),
        2 => Machine::with_config(devices, device(seed), Some(CheckConfig::default())),
        _ => Machine::with_config(devices, device(seed), Some(weak)),
    }
}

#[test]
fn results_of_all_forms_are_those_of_the_manual() {
    let forms = forms();
    // The number of combinations that ptxas accepts.
    assert_eq!(forms.len(), 224);
    let text: String =
        (0..).zip(&forms).map(|(i, form): (usize, _)| form.kernel(&format!("k{i}"), "")).collect();
    let module = Module::parse(&format!("{HEAD}{text}")).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for round in 0..tier(2, 20) {
        for (i, form) in forms.iter().enumerate() {
            let devices = [1, 2, 3, 4, 8][rng.next_u32() as usize % 5];
            let mut machine = machine(devices, rng.next_u64());
            let total = 32 * form.bytes();
            let memory = machine.symmetric_alloc::<u8>("all", total).unwrap();
            let before: Vec<Vec<u8>> = (0..devices).map(|_| numbers(&mut rng, form.ty, total)).collect();
            before.iter().enumerate().for_each(|(d, bytes)| memory.of(d).upload(bytes).unwrap());
            let all = machine.multicast(&memory).unwrap();
            let by = rng.next_u32() as usize % devices;
            let operands = numbers(&mut rng, form.ty, total);
            let io = machine.upload(by, "io", &operands).unwrap();
            machine
                .launch_with(by, &module, &format!("k{i}"), GridConfig::new(1, 32, 0), &[&all[by], &io])
                .unwrap();
            machine.run().unwrap_or_else(|error| panic!("{form:?}: {error}"));
            let each = layout(form.ty).1 / 8;
            let (io, operands) = (io.download().unwrap(), &operands);
            for (d, before_on) in before.iter().enumerate() {
                let after = memory.of(d).download().unwrap();
                for at in (0..total).step_by(each) {
                    let old = number_at(before_on, at, each);
                    let operand = number_at(operands, at, each);
                    let want = match form.kind {
                        "st" => operand,
                        "red" => reduced(form, &[old, operand]),
                        _ => old,
                    };
                    assert_eq!(
                        number_at(&after, at, each),
                        want,
                        "{form:?} round {round} {old:#x} {operand:#x}"
                    );
                }
            }
            if form.kind == "ld_reduce" {
                for at in (0..total).step_by(each) {
                    let values: Vec<u64> = before.iter().map(|bytes| number_at(bytes, at, each)).collect();
                    let (got, want) = (number_at(&io, at, each), reduced(form, &values));
                    assert_eq!(got, want, "{form:?} of {values:#x?}: {got:#x}, {want:#x}");
                }
            }
        }
    }
}

#[test]
fn forms_are_taken_as_ptxas_takes_them() {
    let forms = forms();
    let mut types: Vec<&str> = forms.iter().map(|form| form.ty).collect();
    types.sort_unstable();
    types.dedup();
    let mut taken = 0;
    for ty in types {
        for n in [1, 2, 4, 8] {
            let mut ask = |form: Form| {
                let is_form = forms.contains(&form);
                assert_eq!(supported_opcode(&form.opcode("")), is_form, "{form:?}");
                taken += usize::from(is_form);
            };
            ask(Form { kind: "st", op: "", sums: "", ty, n });
            for op in [".add", ".min", ".max", ".and", ".or", ".xor", ".inc", ".dec"] {
                ask(Form { kind: "red", op, sums: "", ty, n });
                for sums in ["", ".acc::f32", ".acc::f16"] {
                    ask(Form { kind: "ld_reduce", op, sums, ty, n });
                }
            }
        }
    }
    assert_eq!(taken, forms.len());
    for (opcode, is_taken) in [
        ("multimem.ld_reduce.acquire.gpu.global.add.u32", true),
        ("multimem.ld_reduce.weak.add.u32", true),
        ("multimem.ld_reduce.release.sys.add.u32", false),
        ("multimem.st.release.cta.u32", true),
        ("multimem.st.acquire.gpu.u32", false),
        ("multimem.red.relaxed.cluster.max.s64", true),
        ("multimem.red.weak.add.u32", false),
        ("multimem.red.shared.add.u32", false),
    ] {
        assert_eq!(supported_opcode(opcode), is_taken, "{opcode}");
    }
}

#[test]
fn a_number_wins_over_a_nan() {
    let form = |op, ty, n| Form { kind: "ld_reduce", op, sums: "", ty, n };
    for (form, nan, number) in
        [(form(".min", "f16", 2), 0x7e00u16, 0x4500), (form(".max", "bf16", 2), 0x7fc1, 0xc0a0)]
    {
        let module = Module::parse(&format!("{HEAD}{}", form.kernel("k", ""))).unwrap();
        let mut machine = Machine::checked(2, 1);
        let memory = machine.symmetric("all", &[nan; 64]).unwrap();
        memory.of(1).upload(&[number; 2]).unwrap();
        let all = machine.multicast(&memory).unwrap();
        let out = machine.alloc::<u16>(0, "out", 64).unwrap();
        machine.launch_with(0, &module, "k", GridConfig::new(1, 32, 0), &[&all[0], &out]).unwrap();
        machine.run().unwrap();
        // Two NaNs give the canonical one.
        assert_eq!(out.download().unwrap()[..4], [number, number, 0x7fff, 0x7fff]);
    }
}

/// Threads and words of a rank in [`all_reduce`].
const THREADS: u32 = 64;
const WORDS: usize = 4 * THREADS as usize;

/// Each device stores its numbers, all devices meet, each reduces its part of the numbers of all
/// devices and stores the sums to all devices, all meet again, and each reads all sums. `red`
/// raises a flag of all devices, and `poll` reads the device's own.
fn all_reduce([red, other_red]: [&str; 2], [poll, other_poll]: [&str; 2]) -> Module {
    let meet = |red: &str, poll: &str, at: u32| {
        format!(
            "bar.sync 0;\n@%p1 bra MET{at};\nmov.u32 %r4, 1;\n{red}\n\
             mad.lo.u32 %r5, %r2, {at}, 0;\nPOLL{at}: {poll}\nsetp.lo.u32 %p2, %r6, %r5;\n@%p2 bra POLL{at};\n\
             MET{at}: bar.sync 0;\n"
        )
    };
    let text = format!(
        ".version 8.1\n.target sm_90\n.address_size 64\n\
         .visible .entry reduce(.param .u64 own, .param .u64 all, .param .u64 flag, .param .u64 flags, .param .u64 out,\n\
         .param .u32 rank, .param .u32 ranks)\n{{\n\
         .reg .pred %p<4>;\n.reg .b32 %r<16>;\n.reg .f32 %f<8>;\n.reg .b64 %rd<12>;\n\
         ld.param.u64 %rd1, [own];\nld.param.u64 %rd2, [all];\nld.param.u64 %rd3, [flag];\nld.param.u64 %rd4, [flags];\n\
         ld.param.u64 %rd5, [out];\nld.param.u32 %r1, [rank];\nld.param.u32 %r2, [ranks];\n\
         mov.u32 %r3, %tid.x;\nsetp.ne.u32 %p1, %r3, 0;\n\
         // The device's own numbers: thread + rank, four times.\n\
         add.u32 %r7, %r3, %r1;\ncvt.rn.f32.u32 %f1, %r7;\nmul.wide.u32 %rd6, %r3, 16;\nadd.s64 %rd7, %rd1, %rd6;\n\
         st.global.v4.f32 [%rd7], {{%f1, %f1, %f1, %f1}};\n\
         {first}\
         // Threads of the rank's part.\n\
         rem.u32 %r8, %r3, %r2;\nsetp.ne.u32 %p3, %r8, %r1;\n@%p3 bra DONE;\n\
         add.s64 %rd8, %rd2, %rd6;\n\
         multimem.ld_reduce.global.add.v4.f32 {{%f2, %f3, %f4, %f5}}, [%rd8];\n\
         multimem.st.global.v4.f32 [%rd8], {{%f2, %f3, %f4, %f5}};\n\
         DONE:\n\
         {second}\
         ld.global.v4.f32 {{%f2, %f3, %f4, %f5}}, [%rd7];\n\
         add.s64 %rd9, %rd5, %rd6;\nst.global.v4.f32 [%rd9], {{%f2, %f3, %f4, %f5}};\nret;\n}}\n",
        first = meet(red, poll, 1),
        second = meet(other_red, other_poll, 2),
    );
    Module::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

const RED: &str = "multimem.red.release.sys.global.add.u32 [%rd4], %r4;";
const POLL: &str = "ld.acquire.sys.global.u32 %r6, [%rd3];";

/// Runs an all-reduce on all devices. True if the sums are right.
fn run_all_reduce(module: &Module, machine: &mut Machine) -> Result<bool, MachineError> {
    let devices = machine.devices();
    let own = machine.symmetric_alloc::<f32>("numbers", WORDS)?;
    let flag = machine.symmetric("flag", &[0u32])?;
    let (all, flags) = (machine.multicast(&own)?, machine.multicast(&flag)?);
    let mut outs: Vec<Array<f32>> = vec![];
    for at in 0..devices {
        outs.push(machine.alloc(at, "out", WORDS)?);
        let (rank, ranks) = (at as u32, devices as u32);
        machine.launch_with(
            at,
            module,
            "reduce",
            GridConfig::new(1, THREADS, 0),
            &[own.of(at), &all[at], flag.of(at), &flags[at], &outs[at], &rank, &ranks],
        )?;
    }
    machine.run()?;
    let ranks: usize = (0..devices).sum();
    let want = |word: usize| (word / 4 * devices + ranks) as f32;
    for out in &outs {
        if !out.download()?.iter().enumerate().all(|(word, sum)| *sum == want(word)) {
            return Ok(false);
        }
    }
    Ok(true)
}

#[test]
fn an_all_reduce_is_right_under_all_checks() {
    let fenced = "fence.acq_rel.sys;\nmultimem.red.relaxed.sys.global.add.u32 [%rd4], %r4;";
    let polled = "ld.relaxed.sys.global.u32 %r6, [%rd3];\nfence.acq_rel.sys;";
    // Without a semantics and a scope, `multimem.red` is relaxed and of scope `.sys`.
    let implied = "fence.acq_rel.sys;\nmultimem.red.add.u32 [%rd4], %r4;";
    let modules =
        [[RED, POLL], [fenced, polled], [implied, POLL]].map(|[red, poll]| all_reduce([red; 2], [poll; 2]));
    for_each_seed(tier(20, 200), |seed| {
        for devices in [4, 8] {
            let module = &modules[seed as usize % 3];
            let weak = CheckConfig { weak_memory: Some(seed), ..CheckConfig::default() };
            for check in [None, Some(CheckConfig::default()), Some(weak)] {
                let mut machine = Machine::with_config(devices, device(seed), check);
                assert!(run_all_reduce(module, &mut machine).unwrap());
            }
        }
    });
}

#[test]
fn what_an_all_reduce_lacks_is_reported_at_its_line() {
    let relaxed = "multimem.red.relaxed.sys.global.add.u32 [%rd4], %r4;";
    let narrow = "multimem.red.release.gpu.global.add.u32 [%rd4], %r4;";
    let blind = "ld.relaxed.sys.global.u32 %r6, [%rd3];";
    for (reds, polls, at) in [
        ([relaxed, RED], [POLL; 2], relaxed),
        ([RED, relaxed], [POLL; 2], relaxed),
        ([narrow, RED], [POLL; 2], narrow),
        ([RED, narrow], [POLL; 2], narrow),
        ([RED; 2], [blind, POLL], blind),
        ([RED; 2], [POLL, blind], blind),
    ] {
        let module = all_reduce(reds, polls);
        for_each_seed(broken_seeds(), |seed| {
            let mut machine = Machine::with_config(4, device(seed), Some(CheckConfig::default()));
            let Err(MachineError::Fault(fault)) = run_all_reduce(&module, &mut machine) else {
                panic!("no report of {at}")
            };
            let text = fault.to_string();
            let FaultKind::Race(race) = fault.kind else { panic!("{text}") };
            assert_eq!(race.class, Class::Corrupts);
            // Narrow operations of two devices race with each other, too.
            assert!(race.label.starts_with(if at == narrow { "" } else { "numbers" }), "{text}");
            assert!(race.gaps.iter().any(|gap| gap.at.at.ptx_text.contains(at)), "{at}: {text}");
        });
    }
}

#[test]
fn weak_memory_shows_a_missing_fence_as_a_wrong_sum() {
    let module = all_reduce(["multimem.red.relaxed.sys.global.add.u32 [%rd4], %r4;"; 2], [POLL; 2]);
    let mut wrong = 0;
    for_each_seed(broken_seeds(), |seed| {
        let check = CheckConfig { races: false, weak_memory: Some(seed), ..CheckConfig::default() };
        let mut machine = Machine::with_config(4, device(seed), Some(check));
        wrong += u32::from(!run_all_reduce(&module, &mut machine).unwrap());
    });
    assert!(wrong > 0 || replaying());
}

/// A kernel of one thread with a multicast address of a word, and the device's own address of it.
fn one_thread(body: &str) -> String {
    format!(
        ".version 8.1\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 all, .param .u64 own)\n{{\n\
         .reg .pred %p<2>;\n.reg .b32 %r<8>;\n.reg .b64 %rd<8>;\nld.param.u64 %rd1, [all];\nld.param.u64 %rd2, [own];\n\
         {body}\nret;\n}}\n"
    )
}

/// Runs a body on each device, with words of which every device has four, 0 at first. Register
/// `%r1` holds a value for stores, the number of the device from 1.
fn run_bodies(bodies: &[&str], machine: &mut Machine) -> Result<Vec<u32>, MachineError> {
    let words = machine.symmetric("words", &[0u32; 4])?;
    let all = machine.multicast(&words)?;
    for (at, body) in bodies.iter().enumerate() {
        let text = one_thread(&format!("mov.u32 %r1, {};\n{body}", at + 1));
        let module = Module::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        machine.launch_with(at, &module, "k", GridConfig::new(1, 1, 0), &[&all[at], words.of(at)])?;
    }
    machine.run()?;
    let words = (0..machine.devices()).map(|at| words.of(at).download());
    Ok(words.collect::<Result<Vec<_>, _>>()?.concat())
}

#[test]
fn an_access_counts_at_each_device() {
    let store = |more: &str| format!("multimem.st{more}.global.u32 [%rd1], %r1;");
    let red = |more: &str| format!("multimem.red{more}.global.add.u32 [%rd1], %r1;");
    let load = |more: &str| format!("multimem.ld_reduce{more}.global.add.u32 %r2, [%rd1];");
    let st = |more: &str| format!("st{more}.global.u32 [%rd2], %r1;");
    let ld = |more: &str| format!("ld{more}.global.u32 %r2, [%rd2];");
    let races = |bodies: [&str; 2], seed: u64| {
        let mut machine = Machine::with_config(2, device(seed), Some(CheckConfig::default()));
        match run_bodies(&bodies, &mut machine) {
            Ok(_) => None,
            Err(MachineError::Fault(fault)) => match fault.kind {
                FaultKind::Race(race) => Some(*race),
                kind => panic!("{kind}"),
            },
            Err(error) => panic!("{error}"),
        }
    };
    for (one, other, is_race) in [
        (store(""), store(""), true),
        (store(".weak"), store(".relaxed.sys"), true),
        (store(".relaxed.sys"), store(".relaxed.sys"), false),
        (store(".relaxed.gpu"), store(".relaxed.gpu"), true),
        (store(""), ld(""), true),
        (store(".relaxed.sys"), ld(".relaxed.sys"), false),
        (load(""), st(""), true),
        (load(".relaxed.sys"), st(".relaxed.sys"), false),
        (load(".relaxed.sys"), st(".relaxed.gpu"), true),
        (load(""), ld(""), false),
        (load(""), load(".acquire.sys"), false),
        (red(""), red(".release.sys"), false),
        (red(".relaxed.gpu"), red(".relaxed.gpu"), true),
        (red(""), "red.relaxed.sys.global.add.u32 [%rd2], %r1;".into(), false),
        (red(""), "red.relaxed.gpu.global.add.u32 [%rd2], %r1;".into(), true),
        (red(""), ld(""), true),
        // A word beside it.
        (store(""), "st.global.u32 [%rd2+4], %r1;".into(), false),
    ] {
        for_each_seed(broken_seeds() / 4, |seed| {
            let found = races([&one, &other], seed);
            assert_eq!(found.is_some(), is_race, "{one} {other}");
        });
    }
    let race = races([&store(""), &st("")], 1).unwrap();
    assert_eq!((race.space, race.offset), ("global", 0));
}

#[test]
fn a_report_names_the_device_of_the_memory() {
    let mut machine = Machine::checked(3, 1);
    // Device 2 alone conflicts with the load, at its own memory.
    let idle = "";
    let bodies = ["multimem.ld_reduce.global.add.u32 %r2, [%rd1];", idle, "st.global.u32 [%rd2], %r1;"];
    let labels: BTreeSet<String> = (0..tier(20, 200))
        .map(|seed| {
            let mut machine = Machine::with_config(3, device(seed), Some(CheckConfig::default()));
            let Err(MachineError::Fault(fault)) = run_bodies(&bodies, &mut machine) else {
                panic!("no race")
            };
            let FaultKind::Race(race) = fault.kind else { panic!("{fault}") };
            race.label
        })
        .collect();
    assert_eq!(labels, ["words of device 2".to_owned()].into());
    assert_eq!(run_bodies(&[idle; 3], &mut machine).unwrap(), [0; 12]);
}

#[test]
fn a_store_reaches_devices_one_after_the_other_under_weak_memory() {
    let writer = "multimem.st.relaxed.sys.global.u32 [%rd1], %r1;";
    let reader = "multimem.ld_reduce.relaxed.sys.global.add.u32 %r2, [%rd1];\nst.global.u32 [%rd2+8], %r2;";
    let outcomes = |weak_memory| {
        let mut found = BTreeSet::new();
        let run = |path: &Path| -> Result<(), MachineError> {
            let check = CheckConfig { races: false, weak_memory, ..CheckConfig::default() };
            let mut machine = Machine::with_config(2, DeviceConfig::default(), Some(check)).explored(path);
            found.insert(run_bodies(&[writer, reader], &mut machine)?[4 + 2]);
            Ok(())
        };
        let explored = Explore::default().run(run);
        assert!(explored.failure.is_none());
        assert_eq!(explored.coverage, Coverage::Complete);
        found
    };
    // The manual does not order the stores of the two devices.
    assert_eq!(outcomes(Some(0)), [0, 1, 2].into());
    assert!(outcomes(None).is_subset(&[0, 1, 2].into()));
}

/// The error of a body on the first of two devices.
fn error_of(body: &str, mut machine: Machine) -> MachineError {
    run_bodies(&[body], &mut machine).unwrap_err()
}

#[test]
fn multicast_addresses_are_for_multimem_alone() {
    for body in [
        "ld.global.u32 %r2, [%rd1];",
        "st.global.u32 [%rd1], %r1;",
        "atom.global.add.u32 %r2, [%rd1], %r1;",
        "red.relaxed.sys.global.add.u32 [%rd1+4], %r1;",
        "ld.u32 %r2, [%rd1];",
        "ld.acquire.sys.global.u32 %r2, [%rd1];",
    ] {
        for machine in [Machine::new(2), Machine::checked(2, 1)] {
            let error = error_of(body, machine);
            let MachineError::Fault(fault) = &error else { panic!("{error}") };
            assert!(matches!(fault.kind, FaultKind::Multicast { .. }), "{error}");
            assert_eq!((fault.kind.name(), fault.kind.class()), ("multicast", Class::Bounds));
            let text = error.to_string();
            assert!(text.contains("the multicast address 'words' + 0x"), "{text}");
            assert!(text.contains("multimem instructions alone may access it"), "{text}");
        }
    }
    let machine = Machine::new(2);
    let words = machine.symmetric("words", &[1u32, 2]).unwrap();
    let all = machine.multicast(&words).unwrap();
    for error in [all[0].download().unwrap_err(), all[1].upload(&[3]).unwrap_err()] {
        assert!(matches!(error, MachineError::Memory(MemoryError::Multicast { .. })), "{error}");
    }
}

#[test]
fn multimem_is_for_multicast_addresses_alone() {
    let kind = |body: &str| match error_of(body, Machine::new(2)) {
        MachineError::Fault(fault) => fault.kind,
        error => panic!("{error}"),
    };
    let found = kind("multimem.st.global.u32 [%rd2+4], %r1;");
    let FaultKind::Multicast { message } = found else { panic!("{found}") };
    assert!(message.ends_with("which is no multicast address but 'words of device 0' + 0x4"), "{message}");
    let found = kind("mov.u64 %rd3, 64;\nmultimem.red.global.add.u32 [%rd3], %r1;");
    assert!(matches!(found, FaultKind::OutOfBounds { addr: 64, bytes: 4, .. }), "{found}");
    let found = kind("multimem.st.global.u32 [%rd1+2], %r1;");
    assert!(matches!(found, FaultKind::Misaligned { align: 4, .. }), "{found}");
    let found = kind("multimem.st.global.v2.f16x2 [%rd1+4], {%r1, %r1};");
    assert!(matches!(found, FaultKind::Misaligned { align: 8, .. }), "{found}");
    let found = kind(
        ".shared .align 16 .b8 s[64];\nmov.u64 %rd3, s;\ncvta.shared.u64 %rd4, %rd3;\nmultimem.st.u32 [%rd4], %r1;",
    );
    assert!(matches!(found, FaultKind::OutOfBounds { .. }), "{found}");
}

#[test]
fn memory_of_all_devices_must_be_bound() {
    let machine = Machine::checked(2, 1);
    let object = MulticastObject::new(3 * 4096);
    object.add_device(5).unwrap();
    object.add_device(2).unwrap();
    assert_eq!(object.devices(), [2, 5]);
    assert!(object.add_device(2).is_err());
    let memory = |at| machine.memory(at).unwrap();
    let region = |at: usize, label| Arc::new(memory(at).alloc_zeroed(2 * 4096, label).unwrap());
    let (first, second) = (region(0, "first"), region(1, "second"));
    object.bind(2, 0, (first.clone(), 0), 2 * 4096).unwrap();
    object.bind(5, 4096, (second.clone(), 4096), 4096).unwrap();
    for (device, at, from, bytes) in [
        // A device that is not there, memory that is bound, and bounds.
        (3, 0, 0, 4096),
        (2, 4096, 0, 4096),
        (5, 0, 0, 2 * 4096),
        (5, 0, 4096, 2 * 4096),
        (5, 2 * 4096, 0, 2 * 4096),
        (5, 0, 0, 0),
        (5, 100, 0, 4096),
    ] {
        assert!(
            object.bind(device, at, (second.clone(), from), bytes).is_err(),
            "{device} {at} {from} {bytes}"
        );
    }
    let all = memory(0).multicast(&object, "all").unwrap();
    let again = memory(1).share(&all).unwrap();
    assert_eq!((again.addr(), all.bytes()), (all.addr(), 3 * 4096));
    assert!(object.bind(5, 0, (Arc::new(again), 0), 4096).is_err());
    let reservation = Reservation::new(1 << 20, 1 << 21).unwrap();
    let place = |at: u64| (&reservation, reservation.addr() + at);
    let part = memory(1).multicast_at(place(8192), (&object, 4096), 8192, "part").unwrap();
    assert_eq!(part.addr(), reservation.addr() + 8192);
    for (at, from, bytes) in [(0, 8192, 8192), (1 << 20, 0, 4096), (100, 0, 4096), (0, 100, 4096)] {
        assert!(memory(1).multicast_at(place(at), (&object, from), bytes, "no").is_err());
    }
    let module = Module::parse(&one_thread("multimem.red.global.add.u32 [%rd1], 1;")).unwrap();
    let run = |device: usize, at: u64| {
        let mut machine = Machine::checked(2, 1);
        // The kernel runs on a machine whose devices have the addresses.
        let own = [0, 1].map(|at| machine.memory(at).unwrap().share(&all));
        own.iter().for_each(|shared| assert!(shared.is_ok()));
        let params = [at.to_ne_bytes(), [0; 8]].concat();
        machine.launch(device, &module, "k", GridConfig::new(1, 1, 0), &params).unwrap();
        machine.run().map_err(|error| error.to_string())
    };
    let error = run(0, all.addr()).unwrap_err();
    assert!(
        error.contains(
            "of 4 bytes at the multicast address 'all' + 0x0, to which no memory of device 5 is bound"
        ),
        "{error}"
    );
    let error = run(1, all.addr() + 2 * 4096).unwrap_err();
    assert!(error.contains("'all' + 0x2000, to which no memory of device 2 is bound"), "{error}");
    run(0, all.addr() + 4096).unwrap();
    let word = |at: usize, region: &epoxide_vgpu::Region, offset| {
        let mut word = [0; 4];
        memory(at).read(region.addr() + offset, &mut word).unwrap();
        u32::from_ne_bytes(word)
    };
    assert_eq!((word(0, &first, 4096), word(1, &second, 4096)), (1, 1));
    // The region of a device stays until it is unbound.
    let addr = second.addr();
    drop(second);
    assert!(memory(1).check(addr, 4096).is_ok());
    assert_eq!((object.unbind(5, 0, 4096), object.unbind(5, 0, 2 * 4096)), (0, 1));
    assert!(memory(1).check(addr, 4096).is_err());
    assert!(run(0, all.addr() + 4096).is_err());
    assert!(MulticastObject::new(4096).devices().is_empty());
}

#[test]
fn freed_multicast_addresses_are_a_use_after_free() {
    let mut machine = Machine::checked(2, 1);
    let words = machine.symmetric("words", &[0u32; 4]).unwrap();
    let all = machine.multicast(&words).unwrap();
    let module = Module::parse(&one_thread("multimem.st.global.u32 [%rd1], 1;")).unwrap();
    let params = [all[0].addr().to_ne_bytes(), [0; 8]].concat();
    drop(all);
    machine.launch(0, &module, "k", GridConfig::new(1, 1, 0), &params).unwrap();
    let Err(MachineError::Fault(fault)) = machine.run() else { panic!("no fault") };
    assert_eq!(fault.kind.name(), "use-after-free", "{fault}");
    // Arrays of a launch live as long as its kernel, and so does the memory behind them.
    let all = machine.multicast(&words).unwrap();
    machine.launch_with(0, &module, "k", GridConfig::new(1, 1, 0), &[&all[0], words.of(0)]).unwrap();
    drop(all);
    machine.run().unwrap();
    assert_eq!(words.of(1).download().unwrap(), [1, 0, 0, 0]);
}

#[test]
fn multicast_addresses_are_of_an_array_of_each_device() {
    let globals = ".visible .global .align 4 .u32 flag[2];\n";
    let text = one_thread("multimem.red.global.add.u32 [%rd1], 3;").replacen(
        ".visible",
        &format!("{globals}.visible"),
        1,
    );
    let module = Module::parse(&text).unwrap();
    let mut machine = Machine::checked(2, 1);
    let array = |device, len| machine.upload(device, "words", &vec![1u32; len]).unwrap();
    let (first, second, longer) = (array(0, 4), array(1, 4), array(1, 5));
    assert!(machine.multicast_of(&[&first]).is_err());
    assert!(machine.multicast_of(&[&first, &longer]).is_err());
    // Variables of a module too.
    let flags = [0, 1].map(|device| machine.variable::<u32>(device, &module, "flag").unwrap());
    for arrays in [[&first, &second], [&flags[0], &flags[1]]] {
        let before = arrays[1].download().unwrap()[0];
        let all = machine.multicast_of(&arrays).unwrap();
        machine.launch_with(1, &module, "k", GridConfig::new(1, 1, 0), &[&all[1], arrays[1]]).unwrap();
        machine.run().unwrap();
        assert_eq!(arrays.map(|array| array.download().unwrap()[0]), [before + 3; 2]);
    }
}

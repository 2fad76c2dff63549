//! Many instances of a test in one launch, because a GPU shows rare outcomes only then: the places
//! of their memory, and the PTX around the threads of the test.
//!
//! An entry `k` of such a module takes [`KERNEL_PARAMS`]; `clear` resets the memory for a first
//! run, and `check` counts.

use std::fmt::Write;

use super::program::{LOCATIONS, NO_RESULT, RESULTS, Wanted};

/// Most instances of a launch.
pub const INSTANCES: u64 = 8192;
/// How far apart two instances of one location may be, in bytes. The least is a sector of the
/// caches, of which a location leaves half free.
pub const STRIDE: [u64; 4] = [32, 64, 128, 256];
/// From one location to the next, in bytes. No power of two, which might put all locations of an
/// instance into one set of a cache.
const LOCATION: u64 = INSTANCES * STRIDE[3] + 33 * 128;
/// Behind the locations: how many threads have arrived at the start, and how many did not wait for
/// the others.
const START: u64 = LOCATIONS.len() as u64 * LOCATION;
const LATE: u64 = START + 4;
/// Results of one instance, in bytes.
const RESULT_BYTES: u64 = 256;
/// Where the results begin in the memory of a launch.
pub const RESULTS_AT: u64 = START + LOCATION;
/// Start of the memory that the stress blocks write.
pub const SCRATCH_AT: u64 = RESULTS_AT + INSTANCES * RESULT_BYTES;
/// Length of that memory.
pub const BYTES: u64 = SCRATCH_AT + STRESSED * 4096 + 8192;
/// Places that the stress blocks write.
const STRESSED: u64 = 64;
/// Polls of a thread for the arrival of the others: tens of milliseconds, of which a GPU needs
/// microseconds.
const POLLS: u32 = 20_000;

/// Parameters of a test's kernels, in this order: three addresses and eight numbers, of which the
/// last is 0.
pub const KERNEL_PARAMS: &str = ".param .u64 buf, .param .u64 results, .param .u64 scratch, .param .u32 groups, .param .u32 stride, \
                                 .param .u32 shift, .param .u32 seed, .param .u32 spread, .param .u32 warm, .param .u32 stress, \
                                 .param .u32 zero";

/// Registers that the threads of a test do not use.
const REGISTERS: &str = ".reg .pred %q<3>;\n.reg .b32 %w<20>;\n.reg .b64 %wd<32>;\n";

/// Facts about a test that `start` needs.
pub(super) struct Start<'a> {
    /// Threads on all devices.
    pub threads: usize,
    /// How many devices these are on.
    pub devices: usize,
    /// Locations that the test uses.
    pub used: &'a [u64],
}

/// The operand for an address of the notation, which counts from the start of one instance's
/// memory.
pub(super) fn operand(at: u64) -> String {
    match at.checked_sub(RESULTS) {
        Some(result) => format!("[%rd4+{result}]"),
        None => format!("[%rd1+{}]", offset(at)),
    }
}

/// The operand of the thread's access `number`, counted from 1. An assembler swaps accesses whose
/// addresses provably differ, and merges two loads of provably equal addresses. So the offset added
/// here is always 0, which the assembler cannot prove.
pub(super) fn access(ptx: &mut String, number: usize, offset: u64) -> String {
    let _ = writeln!(ptx, "mad.wide.u32 %wd{}, %w17, {number}, %rd1;", number + 1);
    format!("[%wd{}+{offset}]", number + 1)
}

/// The offset of an address below the results from its instance's first location.
pub(super) fn offset(at: u64) -> u64 {
    at / 16 * LOCATION + at % 16
}

/// The scope that reaches all threads of a launch.
fn scope(devices: usize) -> &'static str {
    if devices > 1 { "sys" } else { "gpu" }
}

/// Computes the number of the block in the test (`%r3`), and of the thread in it (`%r2`), in a grid
/// of many groups of `blocks` blocks.
pub(super) fn begin(ptx: &mut String, blocks: usize, packed: u32) {
    let _ = writeln!(
        ptx,
        "{REGISTERS}ld.param.u64 %rd1, [buf];\nld.param.u64 %rd4, [results];\nld.param.u32 %w1, [groups];\n\
         ld.param.u32 %w2, [stride];\nld.param.u32 %w3, [shift];\nld.param.u32 %w4, [seed];\nld.param.u32 %w5, [spread];\n\
         ld.param.u32 %w6, [stress];\nld.param.u32 %w10, [warm];\nld.param.u32 %w17, [zero];\nmov.u32 %w7, %ctaid.x;\nsetp.lt.u32 %q1, %w7, %w6;\n\
         @%q1 bra STRESS;\nsub.u32 %w7, %w7, %w6;\nrem.u32 %r3, %w7, {blocks};\ndiv.u32 %w7, %w7, {blocks};\n\
         mad.lo.u32 %w7, %r3, %w3, %w7;\nrem.u32 %w7, %w7, %w1;\nmov.u32 %r2, %tid.x;\nand.b32 %w8, %r2, {};\n\
         sub.u32 %r2, %r2, %w8;",
        packed - 1
    );
}

/// Finds the memory of the instance; `%r5` is the number of the thread.
pub(super) fn place(ptx: &mut String, packed: u32) {
    // The lanes of two threads of one instance differ, as their blocks do.
    let _ = writeln!(
        ptx,
        "mad.lo.u32 %w8, %r5, %w3, %w8;\nand.b32 %w8, %w8, {};\nmad.lo.u32 %w9, %w7, {packed}, %w8;\n\
         mul.wide.u32 %wd1, %w9, %w2;\nadd.s64 %rd1, %rd1, %wd1;\nmul.wide.u32 %wd1, %w9, {RESULT_BYTES};\n\
         add.s64 %rd4, %rd4, %wd1;",
        packed - 1
    );
}

/// Lets the threads of an instance begin together, up to a small delay that is drawn for each warp.
/// A thread whose wait expires continues alone, which is an execution of the test as well.
pub(super) fn start(ptx: &mut String, test: &Start) {
    let scope = scope(test.devices);
    // Reads the memory beside the locations, so that a cache holds the locations' old contents.
    // Reads of the locations themselves would be races. The values read are 0; they are added to
    // the count so that the reads come first.
    ptx.push_str(
        "setp.eq.u32 %q1, %r5, 99;\n@%q1 bra START;\nmov.u32 %w11, 1;\nsetp.eq.u32 %q1, %w10, 0;\n@%q1 bra COLD;\n",
    );
    for &at in test.used {
        let _ = writeln!(
            ptx,
            "ld.global.u32 %w12, [%rd1+{}];\nadd.u32 %w11, %w11, %w12;",
            offset(at) / 16 * 16 + 16
        );
    }
    let _ = writeln!(
        ptx,
        "COLD:\natom.relaxed.{scope}.global.add.u32 %w12, [%rd1+{START}], %w11;\nmov.u32 %w13, {POLLS};\nPOLL:\n\
         ld.relaxed.{scope}.global.u32 %w12, [%rd1+{START}];\nsetp.ge.u32 %q1, %w12, {};\n@%q1 bra TOGETHER;\n\
         sub.u32 %w13, %w13, 1;\nsetp.ne.u32 %q1, %w13, 0;\n@%q1 bra POLL;\n\
         red.relaxed.{scope}.global.add.u32 [%rd1+{LATE}], 1;\nTOGETHER:",
        test.threads
    );
    // The delay: cycles below `spread`, a power of two or 0.
    ptx.push_str(
        "mad.lo.u32 %w14, %r5, 0x9e3779b1, %w4;\nadd.u32 %w14, %w14, %w7;\nmul.lo.u32 %w14, %w14, 0x85ebca6b;\n\
         shr.u32 %w15, %w14, 15;\nxor.b32 %w14, %w14, %w15;\nmul.lo.u32 %w14, %w14, 0xc2b2ae35;\nshr.u32 %w14, %w14, 12;\n\
         sub.u32 %w15, %w5, 1;\nand.b32 %w14, %w14, %w15;\nsetp.eq.u32 %q1, %w5, 0;\n@%q1 bra START;\nmov.u32 %w15, %clock;\n\
         DELAY:\nmov.u32 %w16, %clock;\nsub.u32 %w16, %w16, %w15;\nsetp.lt.u32 %q1, %w16, %w14;\n@%q1 bra DELAY;\n",
    );
    ptx.push_str("START:\n");
}

/// Code of the blocks that only keep the memory busy: they read and write words that no test uses.
pub(super) fn stress(ptx: &mut String, devices: usize) {
    let scope = scope(devices);
    let _ = writeln!(
        ptx,
        "STRESS:\nld.param.u64 %rd1, [scratch];\nmad.lo.u32 %w8, %w7, 0x9e3779b1, %w4;\nmul.lo.u32 %w8, %w8, 0x85ebca6b;\n\
         shr.u32 %w8, %w8, 16;\nand.b32 %w8, %w8, {};\nmul.wide.u32 %wd1, %w8, 4096;\nadd.s64 %rd1, %rd1, %wd1;\n\
         mov.u32 %w9, %tid.x;\nmul.wide.u32 %wd1, %w9, 4;\nadd.s64 %rd1, %rd1, %wd1;\nmov.u32 %w11, 128;\nAGAIN:\n\
         st.relaxed.{scope}.global.u32 [%rd1], %w11;\nld.relaxed.{scope}.global.u32 %w12, [%rd1+4096];\n\
         st.relaxed.{scope}.global.u32 [%rd1+2048], %w12;\nsub.u32 %w11, %w11, 1;\nsetp.ne.u32 %q1, %w11, 0;\n@%q1 bra AGAIN;\nret;",
        STRESSED - 1
    );
}

/// The entries `clear (buf, results, stride, instances)` and
/// `check (buf, results, counts, stride, instances)`, of a thread for each instance. `check` adds
/// to the counts: guards that passed, conditions that held, instances whose threads did not start
/// together.
pub(super) fn ends(ptx: &mut String, initial: &[(u64, u32)], wanted: &[Wanted], guards: &[Wanted]) {
    let instance = format!(
        "{REGISTERS}.reg .b64 %rd<8>;\nld.param.u64 %rd1, [buf];\nld.param.u64 %rd4, [results];\nld.param.u32 %w2, [stride];\n\
         ld.param.u32 %w3, [instances];\nmov.u32 %w4, %ctaid.x;\nmov.u32 %w5, %ntid.x;\nmov.u32 %w6, %tid.x;\n\
         mad.lo.u32 %w4, %w4, %w5, %w6;\nsetp.ge.u32 %q1, %w4, %w3;\n@%q1 bra END;\nmul.wide.u32 %wd1, %w4, %w2;\n\
         add.s64 %rd1, %rd1, %wd1;\nmul.wide.u32 %wd1, %w4, {RESULT_BYTES};\nadd.s64 %rd4, %rd4, %wd1;\n"
    );
    let _ = writeln!(
        ptx,
        ".visible .entry clear(.param .u64 buf, .param .u64 results, .param .u32 stride, .param .u32 instances)\n{{\n{instance}\
         mov.u32 %w7, 0;\nmov.u32 %w8, {NO_RESULT};"
    );
    for location in 0..=LOCATIONS.len() as u64 {
        for half in [0, 16] {
            let at = location * LOCATION + half;
            let _ = writeln!(ptx, "st.global.v4.u32 [%rd1+{at}], {{%w7, %w7, %w7, %w7}};");
        }
    }
    for at in (0..RESULT_BYTES).step_by(16) {
        let _ = writeln!(ptx, "st.global.v4.u32 [%rd4+{at}], {{%w8, %w8, %w8, %w8}};");
    }
    for &(at, value) in initial {
        let _ = writeln!(ptx, "mov.u32 %w9, {value};\nst.global.u32 {}, %w9;", operand(at));
    }
    let _ = writeln!(
        ptx,
        "END:\nret;\n}}\n.visible .entry check(.param .u64 buf, .param .u64 results, .param .u64 counts, .param .u32 stride, \
         .param .u32 instances)\n{{\n{instance}ld.param.u64 %rd2, [counts];"
    );
    for (count, conditions) in [guards, wanted].into_iter().enumerate() {
        ptx.push_str("setp.eq.u32 %q2, %w2, %w2;\n");
        for &(at, value) in conditions {
            let _ =
                writeln!(ptx, "ld.global.u32 %w7, {};\nsetp.eq.and.u32 %q2, %w7, {value}, %q2;", operand(at));
        }
        let _ = writeln!(ptx, "@%q2 red.relaxed.gpu.global.add.u32 [%rd2+{}], 1;", count * 4);
    }
    let _ = writeln!(
        ptx,
        "ld.global.u32 %w7, [%rd1+{LATE}];\nsetp.ne.u32 %q2, %w7, 0;\n@%q2 red.relaxed.gpu.global.add.u32 [%rd2+8], 1;\n\
         END:\nret;\n}}"
    );
}

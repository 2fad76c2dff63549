//! How kernels access memory.
//!
//! - Every read-modify-write names its order and its scope; no `membar`, no volatile accesses.
//! - No local memory: a local variable in PTX is a round trip to device memory.
//! - Loads through the read-only cache only where a kernel requests them.

use std::ops::Range;

use epoxide_vgpu::ptx::{Instruction, Stmt, VarSpace};

use super::{Finding, Module};
use crate::described::{self, KernelInfo};

const ORDERS: [&str; 4] = ["relaxed", "acquire", "release", "acq_rel"];
const SCOPES: [&str; 4] = ["cta", "cluster", "gpu", "sys"];

/// Runs the three rules.
pub fn check(module: &Module, described: &[KernelInfo]) -> Vec<Finding> {
    [atomics(module), locals(module, described), read_only(module)].concat()
}

/// Rejects `atom`, `red` and `multimem.red` without order or scope (rustc drops both from `core`
/// atomics), `membar`, and volatile accesses.
fn atomics(module: &Module) -> Vec<Finding> {
    module.instructions().filter_map(|(_, inst)| unordered(inst)).collect()
}

fn unordered(inst: &Instruction) -> Option<Finding> {
    let opcode = &inst.opcode;
    let has_any = |list: [&str; 4]| list.into_iter().any(|modifier| inst.has(modifier));
    let read_modify_write = inst.is("atom") || inst.is("red") || opcode.starts_with("multimem.red");
    let message = if read_modify_write && !(has_any(ORDERS) && has_any(SCOPES)) {
        format!(
            "`{opcode}` lacks memory order or scope: use the functions of epoxide-simt, not core::sync::atomic"
        )
    } else if inst.is("membar") {
        format!("`{opcode}`: use a fence that names order and scope")
    } else if inst.has("volatile") {
        format!("`{opcode}`: volatile orders nothing; use a relaxed or acquire/release access")
    } else {
        return None;
    };
    Some(Finding::new("atomics", inst.whole.line, message))
}

/// Rejects `.local` variables where the kernel's attribute gives no reason for them. A variable that
/// is written and never read is none: libNVVM leaves such stores in loops, and ptxas drops them.
fn locals(module: &Module, described: &[KernelInfo]) -> Vec<Finding> {
    let mut findings = vec![];
    for entry in &module.file.entries {
        let name = &entry.name;
        if described::find(described, name).is_some_and(|kernel| kernel.local_depot_allowed.is_some()) {
            continue;
        }
        if !entry.instructions().any(may_read_local) {
            continue;
        }
        for stmt in &entry.body {
            let Stmt::Var(variable) = stmt else { continue };
            if variable.space == VarSpace::Local {
                let line = variable.pos.line;
                let message = format!(
                    "`{name}` keeps a variable in local memory: `{}`. An array is indexed at run time; index it by \
                     constants, or read it through a pointer",
                    module.line(line)
                );
                findings.push(Finding::new("locals", line, message));
            }
        }
    }
    findings
}

/// Whether an instruction may read local memory, or make an address that others may read.
fn may_read_local(inst: &Instruction) -> bool {
    let elsewhere = ["global", "shared", "param", "const"].iter().any(|space| inst.has(space));
    inst.is("cvta") || inst.is("call") || (inst.is("ld") || inst.is("atom")) && !elsewhere
}

/// Rejects `ld.global.nc` outside inline assembly: the compiler makes it from `&T`, and it may read
/// stale bytes when another SM, GPU or NIC writes them.
fn read_only(module: &Module) -> Vec<Finding> {
    let inline = inline_assembly(module.text);
    let written = |line: usize| inline.iter().any(|lines| lines.contains(&line));
    module
        .instructions()
        .filter(|(_, inst)| inst.is("ld") && inst.has("nc") && !written(inst.whole.line))
        .map(|(entry, inst)| {
            let message = format!(
                "`{}` reads a `&T` through the read-only cache: `{}`. Take a raw pointer, or say `ld_nc` where the data never changes",
                entry.name, module.show(inst)
            );
            Finding::new("readonly", inst.whole.line, message)
        })
        .collect()
}

/// The lines between the compiler's marks around each `asm!`.
fn inline_assembly(text: &str) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = vec![];
    for (number, line) in (1..).zip(text.lines()) {
        match line.trim().strip_prefix("//").map(str::trim) {
            Some("begin inline asm") => found.push(number..usize::MAX),
            Some("end inline asm") => found.last_mut().into_iter().for_each(|lines| lines.end = number),
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, of};
    use super::*;
    use crate::described::samples::kernel;

    #[test]
    fn ordered_and_scoped_passes() {
        let body = "atom.acq_rel.sys.global.add.u32 %r1, [%rd1], 1;
            red.release.gpu.global.add.u64 [%rd1], 1;
            @%p1 atom.relaxed.cta.shared.cas.b32 %r1, [%r2], 0, 1;
            fence.acq_rel.sys;
            ld.acquire.sys.global.b64 %rd2, [%rd1];";
        assert_eq!(of(body, atomics), []);
    }

    #[test]
    fn missing_order_or_scope_fails() {
        assert_one(&of("atom.global.add.u32 %r1, [%rd1], 1;", atomics), "lacks");
        assert_one(&of("red.relaxed.global.add.u32 [%rd1], 1;", atomics), "lacks");
        assert_one(&of("@!%p2 red.gpu.global.add.u32 [%rd1], 1;", atomics), "lacks");
    }

    #[test]
    fn old_fences_and_volatile_fail() {
        assert_one(&of("membar.sys;", atomics), "fence");
        assert_one(&of("ld.volatile.global.b32 %r1, [%rd1];", atomics), "volatile");
        assert_one(&of("st.volatile.global.b32 [%rd1], %r1;", atomics), "volatile");
    }

    const DEPOT: &str = ".local .align 8 .b8 __local_depot0[72];\nld.local.b32 %r1, [__local_depot0];\nret;";

    #[test]
    fn registers_pass_and_a_depot_fails() {
        assert_eq!(of(".reg .b32 %r<5>;\nret;", |m| locals(m, &[kernel("copy")])), []);
        assert_one(&of(DEPOT, |m| locals(m, &[kernel("copy")])), "local memory");
    }

    #[test]
    fn a_variable_that_is_never_read_passes() {
        let with = |inst: &str| {
            let body = format!(
                ".local .align 8 .b8 __local_depot0[8];\nst.local.b32 [__local_depot0], %r1;\n{inst}ret;"
            );
            of(&body, |m| locals(m, &[kernel("copy")])).len()
        };
        assert_eq!(with("ld.global.b32 %r1, [%rd1];\n"), 0);
        // Through another name: a generic address, and a load from one.
        assert_eq!(with("cvta.local.u64 %rd1, %rd2;\n"), 1);
        assert_eq!(with("ld.b32 %r1, [%rd1];\n"), 1);
    }

    #[test]
    fn the_attribute_can_allow_it() {
        let excused =
            KernelInfo { local_depot_allowed: Some("diagnostics only".to_owned()), ..kernel("copy") };
        assert_eq!(of(DEPOT, |m| locals(m, std::slice::from_ref(&excused))), []);
    }

    const LOAD: &str = "ld.global.nc.L1::no_allocate.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];";

    #[test]
    fn explicit_loads_pass_and_implicit_ones_fail() {
        assert_eq!(of(&format!("// begin inline asm\n{LOAD}\n// end inline asm\nret;"), read_only), []);
        assert_one(
            &of(&format!("// begin inline asm\n// end inline asm\n{LOAD}"), read_only),
            "read-only cache",
        );
    }
}

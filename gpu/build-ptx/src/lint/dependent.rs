//! A kernel that may be launched before the one in front of it has ended waits for that one first.

use epoxide_vgpu::ptx::Instruction;

use super::{Finding, Module};
use crate::described::{self, KernelInfo};

const RULE: &str = "dependent";

/// Before `griddepcontrol.wait`, only loads of parameters and arithmetic are allowed. Without the
/// wait, no launch may rely on it.
pub fn check(module: &Module, described: &[KernelInfo]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for entry in &module.file.entries {
        let Some(kernel) = described::find(described, &entry.name) else { continue };
        let wait = entry.instructions().position(is_wait);
        if kernel.dependent && wait.is_none() {
            let message = format!(
                "`{}` is launched before the kernel in front of it has ended, but has no `griddepcontrol.wait`",
                entry.name
            );
            findings.push(Finding::new(RULE, entry.pos.line, message));
        }
        for inst in entry.instructions().take(wait.unwrap_or(0)).filter(|inst| !is_harmless(inst)) {
            let message = format!(
                "`{}` stands in front of `griddepcontrol.wait` in `{}`",
                module.show(inst),
                entry.name
            );
            findings.push(Finding::new(RULE, inst.whole.line, message));
        }
    }
    findings
}

fn is_wait(inst: &Instruction) -> bool {
    inst.is("griddepcontrol") && inst.has("wait")
}

/// Whether an instruction reads and writes only registers and parameters, and does not branch.
fn is_harmless(inst: &Instruction) -> bool {
    const ARITHMETIC: [&str; 16] = [
        "mov", "add", "sub", "mul", "mad", "shl", "shr", "and", "or", "xor", "not", "setp", "selp", "cvt",
        "cvta", "min",
    ];
    inst.is("ld") && inst.has("param") || ARITHMETIC.contains(&inst.base())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, of};
    use super::*;
    use crate::described::samples::kernel;

    fn dependent() -> [KernelInfo; 1] {
        [KernelInfo { dependent: true, ..kernel("copy") }]
    }

    #[test]
    fn a_wait_behind_parameters_passes() {
        let text = "ld.param.b64 %rd1, [copy_param_0];\ngriddepcontrol.wait;\nst.global.u32 [%rd1], 0;\nret;";
        assert_eq!(of(text, |m| check(m, &dependent())), []);
        assert_eq!(of("ret;", |m| check(m, &[kernel("copy")])), []);
    }

    #[test]
    fn a_dependent_kernel_without_a_wait_fails() {
        assert_one(&of("ret;", |m| check(m, &dependent())), "has no");
    }

    #[test]
    fn memory_and_branches_in_front_of_the_wait_fail() {
        for ahead in ["ld.global.u32 %r1, [%rd1];", "bra $L1;", "st.shared.u32 [%r1], 0;"] {
            let text = format!("add.s32 %r2, %r2, 1;\n{ahead}\ngriddepcontrol.wait;\nret;");
            assert_one(&of(&text, |m| check(m, &dependent())), ahead.trim_end_matches(';'));
        }
    }
}

//! A kernel that may be launched before the one in front of it has ended waits for that one first.

use super::finding::Finding;
use crate::described::{self, KernelInfo};
use crate::ptx::{Module, Statement};

const RULE: &str = "dependent";

/// In front of `griddepcontrol.wait` stand loads of parameters and arithmetic alone; without the
/// wait, no launch may count on it.
pub fn check(module: &Module, described: &[KernelInfo]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for entry in &module.entries {
        let Some(kernel) = described::find(described, &entry.name) else { continue };
        let wait = entry.body.iter().position(is_wait);
        if kernel.dependent && wait.is_none() {
            let message = format!(
                "`{}` is launched before the kernel in front of it has ended, but has no `griddepcontrol.wait`",
                entry.name
            );
            findings.push(Finding::new(RULE, entry.line, message));
        }
        let ahead = &entry.body[..wait.unwrap_or(0)];
        for statement in ahead.iter().filter(|statement| !is_harmless(statement)) {
            let message =
                format!("`{}` stands in front of `griddepcontrol.wait` in `{}`", statement.text, entry.name);
            findings.push(Finding::new(RULE, statement.line, message));
        }
    }
    findings
}

fn is_wait(statement: &Statement) -> bool {
    statement.is("griddepcontrol") && statement.has_modifier("wait")
}

/// Whether a statement reads and writes nothing but registers and parameters, and goes nowhere
/// else.
fn is_harmless(statement: &Statement) -> bool {
    const ARITHMETIC: [&str; 16] = [
        "mov", "add", "sub", "mul", "mad", "shl", "shr", "and", "or", "xor", "not", "setp", "selp", "cvt",
        "cvta", "min",
    ];
    statement.opcode().is_none()
        || statement.is("ld") && statement.has_modifier("param")
        || ARITHMETIC.iter().any(|opcode| statement.is(opcode))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, entry};
    use super::*;
    use crate::described::samples::kernel;

    fn dependent() -> [KernelInfo; 1] {
        [KernelInfo { dependent: true, ..kernel("copy") }]
    }

    #[test]
    fn a_wait_behind_parameters_passes() {
        let text = "ld.param.b64 %rd1, [copy_param_0];\ngriddepcontrol.wait;\nst.global.u32 [%rd1], 0;\nret;";
        assert_eq!(check(&entry(text), &dependent()), []);
        assert_eq!(check(&entry("ret;"), &[kernel("copy")]), []);
    }

    #[test]
    fn a_dependent_kernel_without_a_wait_fails() {
        assert_one(&check(&entry("ret;"), &dependent()), "has no");
    }

    #[test]
    fn memory_and_branches_in_front_of_the_wait_fail() {
        for ahead in ["ld.global.u32 %r1, [%rd1];", "bra $L1;", "st.shared.u32 [%r1], 0;"] {
            let text = format!("add.s32 %r2, %r2, 1;\n{ahead}\ngriddepcontrol.wait;\nret;");
            assert_one(&check(&entry(&text), &dependent()), ahead.trim_end_matches(';'));
        }
    }
}

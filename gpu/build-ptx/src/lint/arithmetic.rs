//! Rejects accidentally slow arithmetic and hidden bounds checks.

use epoxide_vgpu::ptx::{Entry, Instruction, Stmt};

use super::{Finding, Module};
use crate::described::{self, KernelInfo};

const RULE: &str = "arithmetic";

/// Counts `trap` per entry, and refuses 64-bit division and f64 arithmetic.
pub fn check(module: &Module, described: &[KernelInfo]) -> Vec<Finding> {
    let mut findings: Vec<Finding> =
        module.instructions().filter_map(|(_, inst)| slow(module, inst)).collect();
    for entry in &module.file.entries {
        let allowed = described::find(described, &entry.name).map_or(0, |kernel| kernel.traps_allowed);
        let is_trap = |stmt: &Stmt| matches!(stmt, Stmt::Inst(inst) if inst.is("trap"));
        let traps: Vec<_> = (0..entry.body.len()).filter(|&at| is_trap(&entry.body[at])).collect();
        if traps.len() <= allowed as usize {
            continue;
        }
        let message = format!(
            "`{}` has {} trap, its attribute allows {allowed}: index unchecked, where the index is proven",
            entry.name,
            traps.len()
        );
        findings.push(Finding::new(RULE, entry.pos.line, message));
        for at in traps {
            let branches = branches_to(entry, at);
            findings.extend(branches.map(|inst| Finding::new(RULE, inst.whole.line, "leads to a trap")));
        }
    }
    findings
}

/// The branches to the labels right before statement `at`: a trap has a block of its own, far from
/// its check.
fn branches_to(entry: &Entry, at: usize) -> impl Iterator<Item = &Instruction> {
    let before = entry.body[..at].iter().rev().take_while(|stmt| !matches!(stmt, Stmt::Inst(_)));
    let mut labels = Vec::new();
    for stmt in before {
        if let Stmt::Label { name, .. } = stmt {
            labels.push(name.as_str());
        }
    }
    let leads_there = move |inst: &&Instruction| {
        inst.is("bra") && inst.operands.iter().flat_map(|(o, _)| o.names()).any(|name| labels.contains(&name))
    };
    entry.instructions().filter(leads_there)
}

fn slow(module: &Module, inst: &Instruction) -> Option<Finding> {
    let division = inst.is("div") || inst.is("rem");
    let moves = ["ld", "st", "mov", "selp"].into_iter().any(|name| inst.is(name));
    let message = if division && (inst.has("u64") || inst.has("s64")) {
        format!("`{}`: over 100 instructions; use u32, a power of two or a reciprocal", module.show(inst))
    } else if inst.has("f64") && !moves {
        format!("`{}`: f64 arithmetic; use f32", module.show(inst))
    } else {
        return None;
    };
    Some(Finding::new(RULE, inst.whole.line, message))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, of};
    use super::*;
    use crate::described::samples::kernel;

    #[test]
    fn plain_arithmetic_passes() {
        let body = "div.u32 %r1, %r2, 3;\nfma.rn.f32 %r1, %r1, %r2, %r3;\nshr.u64 %rd1, %rd1, 3;";
        assert_eq!(of(body, |m| check(m, &[kernel("copy")])), []);
    }

    #[test]
    fn slow_arithmetic_fails() {
        assert_one(&of("rem.u64 %rd1, %rd2, 7;", |m| check(m, &[kernel("copy")])), "100 instructions");
        assert_one(&of("mul.rn.f64 %rd1, %rd2, %rd3;", |m| check(m, &[kernel("copy")])), "f64");
    }

    #[test]
    fn traps_are_counted() {
        assert_one(&of("trap;\nexit;", |m| check(m, &[kernel("copy")])), "has 1 trap");
        let excused = KernelInfo { traps_allowed: 1, ..kernel("copy") };
        assert_eq!(of("trap;\nexit;", |m| check(m, std::slice::from_ref(&excused))), []);
    }

    #[test]
    fn the_check_before_a_trap_is_named() {
        let findings = of("@%p1 bra $L1;\nret;\n$L1:\n.loc 1 2 3\ntrap;", |m| check(m, &[kernel("copy")]));
        let lines: Vec<_> = findings.iter().map(|finding| (finding.line, finding.message.as_str())).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[1], (11, "leads to a trap"));
    }
}

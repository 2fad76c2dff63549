//! Nothing slow by accident, and no hidden bounds checks.

use super::finding::Finding;
use crate::described::{self, KernelInfo};
use crate::ptx::{Entry, Module, Statement};

const RULE: &str = "arithmetic";

/// Counts `trap` per entry, and refuses 64-bit division and f64 arithmetic.
pub fn check(module: &Module, described: &[KernelInfo]) -> Vec<Finding> {
    let mut findings: Vec<Finding> = module.instructions().filter_map(|(_, s)| slow(s)).collect();
    for entry in &module.entries {
        let allowed = described::find(described, &entry.name).map_or(0, |kernel| kernel.traps_allowed);
        let traps: Vec<_> = entry.body.iter().enumerate().filter(|(_, s)| s.is("trap")).collect();
        if traps.len() <= allowed as usize {
            continue;
        }
        let message = format!(
            "`{}` has {} trap, its attribute allows {allowed}: index unchecked, where the index is proven",
            entry.name,
            traps.len()
        );
        findings.push(Finding::new(RULE, entry.line, message));
        for (at, _) in traps {
            findings.extend(branches_to(entry, at).map(|s| Finding::new(RULE, s.line, "leads to a trap")));
        }
    }
    findings
}

/// The branches to the labels right before statement `at`: a trap stands in a block of its own, far
/// from the check that leads there.
fn branches_to(entry: &Entry, at: usize) -> impl Iterator<Item = &Statement> {
    let labels = entry.body[..at].iter().rev().take_while(|s| s.opcode().is_none());
    let labels: Vec<&str> = labels.filter_map(|s| s.text.strip_suffix(':')).collect();
    entry
        .body
        .iter()
        .filter(move |statement| statement.is("bra") && statement.words().any(|word| labels.contains(&word)))
}

fn slow(statement: &Statement) -> Option<Finding> {
    let has = |modifier: &str| statement.has_modifier(modifier);
    let division = statement.is("div") || statement.is("rem");
    let moves = ["ld", "st", "mov", "selp"].into_iter().any(|name| statement.is(name));
    let message = if division && (has("u64") || has("s64")) {
        format!("`{}`: over 100 instructions; use u32, a power of two or a reciprocal", statement.text)
    } else if has("f64") && !moves {
        format!("`{}`: f64 arithmetic; use f32", statement.text)
    } else {
        return None;
    };
    Some(Finding::new(RULE, statement.line, message))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, entry};
    use super::*;
    use crate::described::samples::kernel;

    #[test]
    fn plain_arithmetic_passes() {
        let body = "div.u32 %r1, %r2, 3;\nfma.rn.f32 %r1, %r1, %r2, %r3;\nshr.u64 %rd1, %rd1, 3;";
        assert_eq!(check(&entry(body), &[kernel("copy")]), []);
    }

    #[test]
    fn slow_arithmetic_fails() {
        assert_one(&check(&entry("rem.u64 %rd1, %rd2, 7;"), &[kernel("copy")]), "100 instructions");
        assert_one(&check(&entry("mul.rn.f64 %rd1, %rd2, %rd3;"), &[kernel("copy")]), "f64");
    }

    #[test]
    fn traps_are_counted() {
        assert_one(&check(&entry("trap;\nexit;"), &[kernel("copy")]), "has 1 trap");
        let excused = KernelInfo { traps_allowed: 1, ..kernel("copy") };
        assert_eq!(check(&entry("trap;\nexit;"), &[excused]), []);
    }

    #[test]
    fn the_check_before_a_trap_is_named() {
        let findings = check(&entry("@%p1 bra $L1;\nret;\n$L1:\n.loc 1 2 3\ntrap;"), &[kernel("copy")]);
        let lines: Vec<_> = findings.iter().map(|finding| (finding.line, finding.message.as_str())).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[1], (11, "leads to a trap"));
    }
}

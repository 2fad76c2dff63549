//! Block barriers are the unaligned kind, votes the aligned kind, and both as many as the source
//! has.

use super::finding::Finding;
use crate::described::{self, KernelInfo};
use crate::ptx::{Module, Statement};

const RULE: &str = "barriers";

/// Refuses `bar.*`, aligned barriers without a vote and unaligned ones with one, and counts those
/// that wait per entry: compilers duplicate barriers into divergent branches. A vote is aligned
/// since ptxas copies unaligned ones itself.
pub fn check(module: &Module, described: &[KernelInfo]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (_, statement) in module.instructions() {
        let is_vote = statement.has_modifier("red");
        let aligned = statement.has_modifier("aligned");
        // `bar.warp.sync` synchronises the lanes of a mask, not a block.
        let old = statement.is("bar") && !statement.has_modifier("warp");
        if old || statement.is("barrier") && aligned != is_vote {
            let rule = if is_vote { "the aligned `barrier.red`" } else { "the unaligned `barrier.sync`" };
            let message = format!("`{}`: use {rule}", statement.text);
            findings.push(Finding::new(RULE, statement.line, message));
        }
    }
    for entry in &module.entries {
        let Some(kernel) = described::find(described, &entry.name) else { continue };
        let count = entry.body.iter().filter(|statement| is_block_barrier(statement)).count();
        if count != kernel.barriers as usize {
            let message = format!(
                "`{}` has {count} block barriers, its attribute says {}: the compiler duplicated or dropped one, or the \
                 source changed. Where the source has {count}, write `barriers = {count}`",
                entry.name, kernel.barriers
            );
            findings.push(Finding::new(RULE, entry.line, message));
        }
    }
    findings
}

fn is_block_barrier(statement: &Statement) -> bool {
    statement.is("barrier")
        && ["sync", "red"].iter().any(|what| statement.has_modifier(what))
        && !statement.has_modifier("cluster")
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, entry};
    use super::*;
    use crate::described::samples::kernel;

    #[test]
    fn the_expected_barrier_passes() {
        assert_eq!(
            check(
                &entry("barrier.sync 1, 64;\nbar.warp.sync 0xffffffff;\nbarrier.cluster.arrive;\nret;"),
                &[kernel("copy")]
            ),
            []
        );
    }

    #[test]
    fn a_wrong_count_fails() {
        assert_one(&check(&entry("barrier.sync 0;\nbarrier.sync 0;"), &[kernel("copy")]), "has 2");
        let votes = "barrier.sync 0;\nbarrier.cta.red.or.aligned.pred %p1, 0, %p1;";
        assert_one(&check(&entry(votes), &[kernel("copy")]), "has 2");
        assert_one(&check(&entry("ret;"), &[kernel("copy")]), "has 0");
    }

    #[test]
    fn aligned_barriers_fail() {
        let without = KernelInfo { barriers: 0, ..kernel("copy") };
        assert_one(&check(&entry("bar.sync 0;"), &[without]), "unaligned");
        assert_one(&check(&entry("barrier.sync.aligned 0;"), &[kernel("copy")]), "unaligned");
        assert_one(&check(&entry("barrier.red.or.pred %p1, 0, %p1;"), &[kernel("copy")]), "the aligned");
    }
}

//! Block barriers are the unaligned kind, votes the aligned kind, and both as many as the source
//! has.

use epoxide_vgpu::ptx::Instruction;

use super::{Finding, Module};
use crate::described::{self, KernelInfo};

const RULE: &str = "barriers";

/// Refuses `bar.*`, aligned barriers without a vote and unaligned ones with one, and counts those
/// that wait per entry: compilers duplicate barriers into divergent branches. A vote is aligned
/// since ptxas copies unaligned ones itself.
pub fn check(module: &Module, described: &[KernelInfo]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (_, inst) in module.instructions() {
        let is_vote = inst.has("red");
        let aligned = inst.has("aligned");
        // `bar.warp.sync` synchronises the lanes of a mask, not a block.
        let old = inst.is("bar") && !inst.has("warp");
        if old || inst.is("barrier") && aligned != is_vote {
            let rule = if is_vote { "the aligned `barrier.red`" } else { "the unaligned `barrier.sync`" };
            let message = format!("`{}`: use {rule}", module.show(inst));
            findings.push(Finding::new(RULE, inst.whole.line, message));
        }
    }
    for entry in &module.file.entries {
        let Some(kernel) = described::find(described, &entry.name) else { continue };
        let count = entry.instructions().filter(|inst| is_block_barrier(inst)).count();
        if count != kernel.barriers as usize {
            let message = format!(
                "`{}` has {count} block barriers, its attribute says {}: the compiler duplicated or dropped one, or the \
                 source changed. Where the source has {count}, write `barriers = {count}`",
                entry.name, kernel.barriers
            );
            findings.push(Finding::new(RULE, entry.pos.line, message));
        }
    }
    findings
}

fn is_block_barrier(inst: &Instruction) -> bool {
    inst.is("barrier") && ["sync", "red"].iter().any(|what| inst.has(what)) && !inst.has("cluster")
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, of};
    use super::*;
    use crate::described::samples::kernel;

    #[test]
    fn the_expected_barrier_passes() {
        assert_eq!(
            of("barrier.sync 1, 64;\nbar.warp.sync 0xffffffff;\nbarrier.cluster.arrive;\nret;", |m| check(
                m,
                &[kernel("copy")]
            )),
            []
        );
    }

    #[test]
    fn a_wrong_count_fails() {
        assert_one(&of("barrier.sync 0;\nbarrier.sync 0;", |m| check(m, &[kernel("copy")])), "has 2");
        let votes = "barrier.sync 0;\nbarrier.cta.red.or.aligned.pred %p1, 0, %p1;";
        assert_one(&of(votes, |m| check(m, &[kernel("copy")])), "has 2");
        assert_one(&of("ret;", |m| check(m, &[kernel("copy")])), "has 0");
    }

    #[test]
    fn aligned_barriers_fail() {
        let without = KernelInfo { barriers: 0, ..kernel("copy") };
        assert_one(&of("bar.sync 0;", |m| check(m, std::slice::from_ref(&without))), "unaligned");
        assert_one(&of("barrier.sync.aligned 0;", |m| check(m, &[kernel("copy")])), "unaligned");
        assert_one(&of("barrier.red.or.pred %p1, 0, %p1;", |m| check(m, &[kernel("copy")])), "the aligned");
    }
}

//! Warp collectives stand where all lanes arrive: under no branch that lanes take differently.
//!
//! A collective must stay whole, but LLVM does not model that. It may copy one into both arms of a
//! branch, where each copy waits for lanes that wait in the other.

use super::finding::Finding;
use crate::ptx::{Entry, Lanes, Module, Statement};

const RULE: &str = "collectives";

/// Rejects warp collectives of all lanes, such as `shfl.sync` with the mask 0xffffffff, under a
/// branch or guard that lanes take differently.
pub fn check(module: &Module) -> Vec<Finding> {
    let mut findings = Vec::new();
    for entry in &module.entries {
        let lanes = Lanes::of(entry);
        for (index, statement) in entry.body.iter().enumerate().filter(|(_, it)| is_collective(it)) {
            let message = if lanes.guard_differs(index) {
                format!("`{}`: its guard differs between lanes, and it needs them all", statement.text)
            } else if let Some(branch) = lanes.apart_since(index) {
                let branch = &entry.body[branch];
                let mut copies = copies(entry, index);
                copies.retain(|copy| lanes.apart_since(*copy).is_some());
                let cause = if copies.is_empty() {
                    "move it in front of the branch".to_owned()
                } else {
                    let lines: Vec<_> =
                        copies.iter().map(|copy| entry.body[*copy].line.to_string()).collect();
                    format!(
                        "the compiler has copied it, see line {}: leave it no reason to",
                        lines.join(" and ")
                    )
                };
                let source =
                    module.source(entry, branch.line).map_or_else(String::new, |at| format!(" ({at})"));
                format!(
                    "`{}` needs all lanes, which the branch `{}` on line {}{source} parts: {cause}",
                    statement.text, branch.text, branch.line
                )
            } else {
                continue;
            };
            findings.push(Finding::new(RULE, statement.line, message));
        }
    }
    findings
}

/// Whether lanes wait for each other here, all 32. Block barriers are counted by a rule of their
/// own, and the unaligned kind may be reached in several places.
fn is_collective(statement: &Statement) -> bool {
    let of_a_block = statement.is("barrier") || statement.is("bar") && !statement.has_modifier("warp");
    // The last operand is the mask. Matrix instructions have none: their last one is a list of
    // registers.
    let masked = statement.operands().last().is_some_and(|mask| mask.starts_with('%'));
    statement.has_modifier("sync") && !of_a_block && !masked
}

/// Other statements that do the same and come from the same place in the source.
fn copies(entry: &Entry, index: usize) -> Vec<usize> {
    let mut places = Vec::with_capacity(entry.body.len());
    let mut place = None;
    for statement in &entry.body {
        place = if statement.text.starts_with(".loc") { Some(statement.text.as_str()) } else { place };
        places.push(place);
    }
    let same = |other: &usize| {
        *other != index
            && places[index].is_some()
            && places[*other] == places[index]
            && entry.body[*other].opcode() == entry.body[index].opcode()
    };
    (0..entry.body.len()).filter(same).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, entry};
    use super::*;

    const SHUFFLE: &str = "shfl.sync.idx.b32 %r9, %r8, 0, 31, 0xffffffff;\n";

    /// Findings for a branch on `%p1`, which `set` sets, with the shuffle in one arm.
    fn under(set: &str) -> Vec<Finding> {
        check(&entry(&format!("{set}\n@%p1 bra $L1;\n{SHUFFLE}$L1:\nret;")))
    }

    #[test]
    fn a_collective_behind_a_branch_that_has_ended_passes() {
        let body = format!(
            "mov.u32 %r1, %laneid;\nsetp.eq.b32 %p1, %r1, 0;\n@%p1 bra $L1;\nst.global.b32 [%rd1], %r1;\n$L1:\n{SHUFFLE}ret;"
        );
        assert_eq!(check(&entry(&body)), []);
    }

    #[test]
    fn a_collective_that_was_copied_into_both_arms_fails_twice() {
        let place = ".loc 1 7 3 // inlined_at 2 9\n";
        let body = format!(
            "mov.u32 %r1, %laneid;\nsetp.eq.b32 %p1, %r1, 0;\n@%p1 bra $L1;\n{place}{SHUFFLE}st.global.b32 [%rd1], %r9;\nbra.uni $L2;\n\
             $L1:\n{place}{SHUFFLE}$L2:\nret;"
        );
        let findings = check(&entry(&body));
        assert_eq!(findings.iter().map(|finding| finding.line).collect::<Vec<_>>(), [15, 20]);
        assert!(findings[0].message.contains("has copied it, see line 20"), "{findings:?}");
        assert!(findings[1].message.contains("`@%p1 bra $L1` on line 13"), "{findings:?}");
        // Copies under a branch that all lanes take the same way are sound.
        assert_eq!(check(&entry(&body.replace("%laneid", "%ctaid.x"))), []);
    }

    #[test]
    fn every_kind_of_collective_counts() {
        let collectives = [
            "bar.warp.sync 0xffffffff",
            "vote.sync.ballot.b32 %r9, %p2, -1",
            "redux.sync.min.u32 %r9, %r8, 0xffffffff",
            "match.any.sync.b32 %r9, %r8, 0xffffffff",
            "elect.sync %r9|%p3, 0xffffffff",
            "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%fd1, %fd2}, {%fd3}, {%fd4}, {%fd1, %fd2}",
        ];
        for collective in collectives {
            let body = format!(
                "mov.u32 %r1, %laneid;\nsetp.eq.b32 %p1, %r1, 0;\n@%p1 bra $L1;\n{collective};\n$L1:\nret;"
            );
            assert_one(&check(&entry(&body)), "move it in front of the branch");
        }
        // Some lanes may meet by a mask of theirs, and whole blocks in several places.
        for passes in ["bar.warp.sync %r2", "barrier.sync 0", "cp.async.bulk.commit_group"] {
            let body = format!(
                "mov.u32 %r1, %laneid;\nsetp.eq.b32 %p1, %r1, 0;\n@%p1 bra $L1;\n{passes};\n$L1:\nret;"
            );
            assert_eq!(check(&entry(&body)), []);
        }
    }

    #[test]
    fn values_that_lanes_share_part_no_lanes() {
        let sets = [
            // A parameter, a load at an address that all lanes share, and results of collectives.
            "ld.param.b32 %r1, [copy_param_1];\nsetp.eq.b32 %p1, %r1, 0;",
            "ld.param.b64 %rd1, [copy_param_0];\nld.global.b32 %r1, [%rd1+8];\nsetp.eq.b32 %p1, %r1, 0;",
            "mov.u32 %r1, %laneid;\nsetp.eq.b32 %p2, %r1, 0;\nvote.sync.ballot.b32 %r2, %p2, 0xffffffff;\nsetp.eq.b32 %p1, %r2, 0;",
            "mov.u32 %r1, %laneid;\nshfl.sync.idx.b32 %r2, %r1, 3, 31, 0xffffffff;\nsetp.eq.b32 %p1, %r2, 0;",
            "mov.u32 %r1, %laneid;\nsetp.eq.b32 %p2, %r1, 0;\nbarrier.red.or.pred %p1, 0, %p2;",
            // The warp's number, in three disguises.
            "mov.u32 %r1, %tid.x;\nshr.u32 %r2, %r1, 5;\nsetp.eq.b32 %p1, %r2, 3;",
            "mov.u32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, 32;",
            "mov.u32 %r1, %tid.x;\nsetp.gt.u32 %p1, %r1, 31;",
            "mov.u32 %r1, %tid.x;\nand.b32 %r2, %r1, 992;\nsetp.eq.b32 %p1, %r2, 64;",
            // The register has another use elsewhere.
            "mov.b32 %r2, 0;\nsetp.eq.b32 %p1, %r2, 0;\nmov.u32 %r2, %laneid;",
            // A name in a scope is not the one of the scope before.
            "mov.u32 %r1, %laneid;\n{ .reg .pred q; setp.ne.u32 q, %r1, 0; }\n{ .reg .pred q; setp.ne.u32 q, %r2, 0; mov.pred %p1, q; }",
        ];
        for set in sets {
            assert_eq!(under(set), [], "{set}");
        }
    }

    #[test]
    fn values_that_differ_part_lanes() {
        let sets = [
            "mov.u32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, 33;",
            "mov.u32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, %r2;",
            "mov.u32 %r1, %tid.x;\nand.b32 %r2, %r1, 31;\nsetp.eq.b32 %p1, %r2, 0;",
            "mov.u32 %r1, %tid.y;\nsetp.eq.b32 %p1, %r1, 0;",
            "mov.u64 %rd1, %globaltimer;\nsetp.lt.u64 %p1, %rd1, 1000;",
            // Loads at each lane's own address, and results that each lane gets for itself.
            "mov.u32 %r1, %laneid;\nmul.wide.u32 %rd2, %r1, 4;\nld.global.b32 %r2, [%rd2];\nsetp.eq.b32 %p1, %r2, 0;",
            "atom.relaxed.gpu.global.add.u32 %r1, [%rd1], 1;\nsetp.eq.b32 %p1, %r1, 0;",
            "mov.u32 %r1, %laneid;\nshfl.sync.idx.b32 %r2, %r3, %r1, 31, 0xffffffff;\nsetp.eq.b32 %p1, %r2, 0;",
            "mov.u32 %r1, %laneid;\nshfl.sync.down.b32 %r2, %r1, 1, 31, 0xffffffff;\nsetp.eq.b32 %p1, %r2, 0;",
            // Values that only some lanes set: under a guard, or on one of two paths.
            "mov.u32 %r1, %laneid;\nsetp.eq.b32 %p2, %r1, 0;\nmov.b32 %r2, 0;\n@%p2 mov.b32 %r2, 1;\nsetp.eq.b32 %p1, %r2, 0;",
            "mov.u32 %r1, %laneid;\nsetp.eq.b32 %p2, %r1, 0;\nmov.b32 %r2, 0;\n@%p2 bra $L9;\nmov.b32 %r2, 1;\n$L9:\nsetp.eq.b32 %p1, %r2, 0;",
            // How often lanes went round a loop that they leave one by one.
            "mov.u32 %r1, %laneid;\nmov.b32 %r2, 0;\n$L9:\nadd.s32 %r2, %r2, 1;\nsetp.lt.u32 %p2, %r2, %r1;\n@%p2 bra $L9;\nsetp.eq.b32 %p1, %r2, 4;",
        ];
        for set in sets {
            assert_eq!(under(set).len(), 1, "{set}");
        }
    }

    #[test]
    fn threads_of_blocks_with_two_dimensions_are_no_warps() {
        let mut module = entry(&format!(
            "mov.u32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, 32;\n@%p1 bra $L1;\n{SHUFFLE}$L1:\nret;"
        ));
        assert_eq!(check(&module), []);
        module.entries[0].directives = ".maxntid 16, 16, 1".to_owned();
        assert_one(&check(&module), "needs all lanes");
    }

    #[test]
    fn guards_and_the_rest_behind_a_return_count_too() {
        let lane = "mov.u32 %r1, %laneid;\nsetp.eq.b32 %p1, %r1, 0;\n";
        assert_one(&check(&entry(&format!("{lane}@%p1 {SHUFFLE}ret;"))), "its guard differs");
        assert_one(&check(&entry(&format!("{lane}@%p1 ret;\n{SHUFFLE}ret;"))), "`@%p1 ret` on line 13");
        let round = format!("{lane}$L1:\n{SHUFFLE}@%p1 bra $L1;\nret;");
        assert_one(&check(&entry(&round)), "`@%p1 bra $L1` on line 15");
    }
}

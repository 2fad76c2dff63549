//! Warp collectives must be where all lanes arrive: under no divergent branch.
//!
//! A collective must stay whole, but LLVM does not model that. It may copy one into both arms of a
//! branch, where each copy waits for lanes that wait in the other.

use epoxide_vgpu::ptx::{Entry, Instruction, Operand, Stmt};

use super::lanes::Lanes;
use super::{Finding, Module};

const RULE: &str = "collectives";

/// Rejects warp collectives of all lanes, such as `shfl.sync` with the mask 0xffffffff, under a
/// branch or guard that lanes take differently.
pub fn check(module: &Module) -> Vec<Finding> {
    let mut findings = Vec::new();
    for entry in &module.file.entries {
        let lanes = Lanes::of(entry);
        // Branches, each with a collective that it parts lanes in front of.
        let mut parted: Vec<(&Instruction, &Instruction)> = Vec::new();
        for (index, inst) in instructions(entry).filter(|(_, inst)| is_collective(inst)) {
            let message = if lanes.guard_differs(index) {
                format!("`{}`: its guard differs between lanes, and it needs them all", module.show(inst))
            } else if let Some(branch) = lanes.apart_since(index) {
                // The shuffles of one sum are one finding.
                let same_call = |&(at, other): &(&Instruction, &Instruction)| {
                    std::ptr::eq(at, branch) && is_of_one_place(other, inst) && !is_copy(other, inst)
                };
                if parted.iter().any(same_call) {
                    continue;
                }
                parted.push((branch, inst));
                let copies = copies(entry, index, inst);
                let copies = copies.filter(|(copy, _)| lanes.apart_since(*copy).is_some());
                let lines: Vec<_> = copies.map(|(_, copy)| copy.whole.line.to_string()).collect();
                let cause = if lines.is_empty() {
                    "move it in front of the branch".to_owned()
                } else {
                    format!(
                        "the compiler has copied it, see line {}: leave it no reason to",
                        lines.join(" and ")
                    )
                };
                let source = module.source(branch).map_or_else(String::new, |at| format!(" ({at})"));
                format!(
                    "`{}` needs all lanes, which the branch `{}` on line {}{source} parts: {cause}",
                    module.show(inst),
                    module.show(branch),
                    branch.whole.line
                )
            } else {
                continue;
            };
            findings.push(Finding::new(RULE, inst.whole.line, message));
        }
    }
    findings
}

/// The instructions of a kernel, with their indices in its body.
fn instructions(entry: &Entry) -> impl Iterator<Item = (usize, &Instruction)> {
    let indexed = entry.body.iter().enumerate();
    indexed.filter_map(|(at, stmt)| if let Stmt::Inst(inst) = stmt { Some((at, inst)) } else { None })
}

/// Whether lanes wait for each other here, all 32. Block barriers are counted by a rule of their
/// own, and the unaligned kind may be reached in several places.
fn is_collective(inst: &Instruction) -> bool {
    let of_a_block = inst.is("barrier") || inst.is("bar") && !inst.has("warp");
    // The last operand is the mask. Matrix instructions have none: their last one is a list of
    // registers.
    let mask = inst.operands.last();
    let masked = mask.is_some_and(|(mask, _)| matches!(mask, Operand::Name(name) if name.starts_with('%')));
    inst.has("sync") && !of_a_block && !masked
}

/// Whether both come from the same place in the source.
fn is_of_one_place(one: &Instruction, other: &Instruction) -> bool {
    one.source.is_some() && one.source == other.source
}

/// Whether one is a copy of the other: from the same place, with the same opcode and the same numbers.
/// Steps of a sum over a warp differ in the numbers.
fn is_copy(one: &Instruction, other: &Instruction) -> bool {
    let is_register = |operand: &Operand| matches!(operand, Operand::Name(name) if name.starts_with('%'));
    let same = |((one, _), (other, _)): (&(Operand, _), &(Operand, _))| {
        one == other || is_register(one) && is_register(other)
    };
    is_of_one_place(one, other)
        && one.opcode == other.opcode
        && one.operands.len() == other.operands.len()
        && one.operands.iter().zip(&other.operands).all(same)
}

/// Copies of an instruction.
fn copies<'a>(
    entry: &'a Entry,
    index: usize,
    inst: &'a Instruction,
) -> impl Iterator<Item = (usize, &'a Instruction)> {
    instructions(entry).filter(move |(other, copy)| *other != index && is_copy(copy, inst))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, of, text};
    use super::*;

    const SHUFFLE: &str = "shfl.sync.idx.b32 %r9, %r8, 0, 31, 0xffffffff;\n";

    /// Findings for a branch on `%p1`, which `set` sets, with the shuffle in one arm.
    fn under(set: &str) -> Vec<Finding> {
        of(&format!("{set}\n@%p1 bra $L1;\n{SHUFFLE}$L1:\nret;"), check)
    }

    #[test]
    fn a_collective_behind_a_branch_that_has_ended_passes() {
        let body = format!(
            "mov.u32 %r1, %laneid;\nsetp.eq.b32 %p1, %r1, 0;\n@%p1 bra $L1;\nst.global.b32 [%rd1], %r1;\n$L1:\n{SHUFFLE}ret;"
        );
        assert_eq!(of(&body, check), []);
    }

    #[test]
    fn a_collective_that_was_copied_into_both_arms_fails_twice() {
        let place = ".loc 1 7 3 // inlined_at 2 9\n";
        let body = format!(
            "mov.u32 %r1, %laneid;\nsetp.eq.b32 %p1, %r1, 0;\n@%p1 bra $L1;\n{place}{SHUFFLE}st.global.b32 [%rd1], %r9;\nbra.uni $L2;\n\
             $L1:\n{place}{SHUFFLE}$L2:\nret;"
        );
        let findings = of(&body, check);
        assert_eq!(findings.iter().map(|finding| finding.line).collect::<Vec<_>>(), [15, 20]);
        assert!(findings[0].message.contains("has copied it, see line 20"), "{findings:?}");
        assert!(findings[1].message.contains("`@%p1 bra $L1` on line 13"), "{findings:?}");
        // Copies under a branch that all lanes take the same way are sound.
        assert_eq!(of(&body.replace("%laneid", "%ctaid.x"), check), []);
    }

    #[test]
    fn the_shuffles_of_a_sum_under_a_branch_are_one_finding() {
        let place = ".loc 1 7 3 // inlined_at 2 9\n";
        let shuffles: String = [16, 8, 4].map(|mask| {
            format!("{place}shfl.sync.bfly.b32 %r9|%p3, %r8, {mask}, 31, 0xffffffff;\nadd.f32 %r8, %r8, %r9;\n")
        }).concat();
        let body = format!(
            "mov.u32 %r1, %laneid;\nsetp.lt.u32 %p1, %r1, 20;\n@%p1 bra $L1;\nbra.uni $L2;\n$L1:\n{shuffles}$L2:\nret;"
        );
        assert_one(&of(&body, check), "move it in front of the branch");
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
            assert_one(&of(&body, check), "move it in front of the branch");
        }
        // Some lanes may meet by a mask of theirs, and whole blocks in several places.
        for passes in ["bar.warp.sync %r2", "barrier.sync 0", "cp.async.bulk.commit_group"] {
            let body = format!(
                "mov.u32 %r1, %laneid;\nsetp.eq.b32 %p1, %r1, 0;\n@%p1 bra $L1;\n{passes};\n$L1:\nret;"
            );
            assert_eq!(of(&body, check), []);
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
            // The warp's number, in five disguises.
            "mov.u32 %r1, %tid.x;\nshr.u32 %r2, %r1, 5;\nsetp.eq.b32 %p1, %r2, 3;",
            "mov.u32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, 32;",
            "mov.u32 %r1, %tid.x;\nsetp.gt.u32 %p1, %r1, 31;",
            "mov.u32 %r1, %tid.x;\nand.b32 %r2, %r1, 992;\nsetp.eq.b32 %p1, %r2, 64;",
            "mov.u32 %r1, %tid.x;\nshl.b32 %r2, %r1, 4;\nand.b32 %r3, %r2, -512;\nsetp.ge.u32 %p1, %r3, %r4;",
            "mov.u32 %r1, %tid.x;\nshl.b32 %r2, %r1, 4;\nsetp.lt.u32 %p1, %r2, 1024;",
            // The warp's number in the grid: by a shift, by a product, in 64 bits and by a mask.
            "mov.u32 %r1, %ctaid.x;\nshl.b32 %r2, %r1, 8;\nmov.u32 %r3, %tid.x;\nadd.s32 %r4, %r3, %r2;\nshr.u32 %r5, %r4, 5;\nsetp.ge.u32 %p1, %r5, %r6;",
            "mov.u32 %r1, %ctaid.x;\nmov.u32 %r3, %tid.x;\nmad.lo.s32 %r4, %r1, 256, %r3;\nshr.u32 %r5, %r4, 5;\nsetp.ge.u32 %p1, %r5, %r6;",
            "mov.u32 %r1, %ctaid.x;\nmul.wide.u32 %rd1, %r1, 96;\nmov.u32 %r3, %tid.x;\ncvt.u64.u32 %rd2, %r3;\nor.b64 %rd3, %rd1, %rd2;\nshr.u64 %rd4, %rd3, 5;\nsetp.ge.u64 %p1, %rd4, %rd5;",
            "mov.u32 %r1, %ctaid.x;\nmul.lo.s32 %r2, %r1, %ntid.x;\nand.b32 %r2, %r2, -32;\nmov.u32 %r3, %tid.x;\nsub.s32 %r4, %r3, %r2;\nsetp.lt.u32 %p1, %r4, %r2;",
            // Both paths from a branch on lanes copy the same number, or the same register.
            "mov.u32 %r1, %laneid;\nsetp.eq.b32 %p2, %r1, 0;\n@%p2 bra $L8;\nmov.b32 %r2, 0;\nbra.uni $L9;\n$L8:\nmov.b32 %r2, 0;\n$L9:\nsetp.eq.b32 %p1, %r2, 0;",
            "mov.b32 %r3, 7;\nmov.u32 %r1, %laneid;\nsetp.eq.b32 %p2, %r1, 0;\n@%p2 bra $L8;\nmov.b32 %r2, %r3;\nbra.uni $L9;\n$L8:\nmov.b32 %r2, %r3;\n$L9:\nsetp.eq.b32 %p1, %r2, 0;",
            "mov.b32 %r3, 7;\nmov.u32 %r1, %laneid;\nsetp.eq.b32 %p2, %r1, 0;\nmov.b32 %r2, %r3;\n@%p2 bra $L9;\nst.global.b32 [%rd1], %r2;\nmov.b32 %r2, %r3;\n$L9:\nsetp.eq.b32 %p1, %r2, 0;",
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
            // Loads at each lane's own address, and results that differ by lane.
            "mov.u32 %r1, %laneid;\nmul.wide.u32 %rd2, %r1, 4;\nld.global.b32 %r2, [%rd2];\nsetp.eq.b32 %p1, %r2, 0;",
            "atom.relaxed.gpu.global.add.u32 %r1, [%rd1], 1;\nsetp.eq.b32 %p1, %r1, 0;",
            "mov.u32 %r1, %laneid;\nshfl.sync.idx.b32 %r2, %r3, %r1, 31, 0xffffffff;\nsetp.eq.b32 %p1, %r2, 0;",
            "mov.u32 %r1, %laneid;\nshfl.sync.down.b32 %r2, %r1, 1, 31, 0xffffffff;\nsetp.eq.b32 %p1, %r2, 0;",
            // Values that only some lanes set: under a guard, or on one of two paths.
            "mov.u32 %r1, %laneid;\nsetp.eq.b32 %p2, %r1, 0;\nmov.b32 %r2, 0;\n@%p2 mov.b32 %r2, 1;\nsetp.eq.b32 %p1, %r2, 0;",
            "mov.u32 %r1, %laneid;\nsetp.eq.b32 %p2, %r1, 0;\nmov.b32 %r2, 0;\n@%p2 bra $L9;\nmov.b32 %r2, 1;\n$L9:\nsetp.eq.b32 %p1, %r2, 0;",
            // The two paths set different numbers, or a register that each path has set.
            "mov.u32 %r1, %laneid;\nsetp.eq.b32 %p2, %r1, 0;\n@%p2 bra $L8;\nmov.b32 %r2, 0;\nbra.uni $L9;\n$L8:\nmov.b32 %r2, 1;\n$L9:\nsetp.eq.b32 %p1, %r2, 0;",
            "mov.u32 %r1, %laneid;\nsetp.eq.b32 %p2, %r1, 0;\n@%p2 bra $L8;\nld.global.b32 %r3, [%rd1];\nmov.b32 %r2, %r3;\nbra.uni $L9;\n$L8:\nld.global.b32 %r3, [%rd2];\nmov.b32 %r2, %r3;\n$L9:\nsetp.eq.b32 %p1, %r2, 0;",
            // Lanes that leave a loop at once keep what others overwrite.
            "mov.u32 %r1, %laneid;\nmov.b32 %r2, 1;\n$L9:\nsetp.eq.b32 %p2, %r1, 0;\n@%p2 bra $L8;\nmov.b32 %r2, 0;\nsub.s32 %r1, %r1, 1;\nbra.uni $L9;\n$L8:\nsetp.eq.b32 %p1, %r2, 0;",
            // A number of a thread with bits of the lane in it.
            "mov.u32 %r1, %tid.x;\nshl.b32 %r2, %r1, 4;\nand.b32 %r3, %r2, -256;\nsetp.ge.u32 %p1, %r3, %r4;",
            // Numbers of the grid whose base is no multiple of 32, for all that is known.
            "mov.u32 %r1, %ctaid.x;\nmov.u32 %r2, %ntid.x;\nmov.u32 %r3, %tid.x;\nmad.lo.s32 %r4, %r1, %r2, %r3;\nshr.u32 %r5, %r4, 5;\nsetp.ge.u32 %p1, %r5, %r6;",
            "mov.u32 %r1, %ctaid.x;\nshl.b32 %r2, %r1, 4;\nmov.u32 %r3, %tid.x;\nadd.s32 %r4, %r3, %r2;\nshr.u32 %r5, %r4, 5;\nsetp.ge.u32 %p1, %r5, %r6;",
            "mov.u32 %r1, %ctaid.x;\nmov.u32 %r3, %tid.x;\nmad.lo.s32 %r4, %r1, 48, %r3;\nshr.u32 %r5, %r4, 5;\nsetp.ge.u32 %p1, %r5, %r6;",
            "mov.b32 %r2, 256;\nmov.u32 %r1, %ctaid.x;\n$L9:\nadd.s32 %r2, %r2, %r1;\nsetp.lt.u32 %p2, %r2, 999;\n@%p2 bra $L9;\nmov.u32 %r3, %tid.x;\nadd.s32 %r4, %r3, %r2;\nshr.u32 %r5, %r4, 5;\nsetp.ge.u32 %p1, %r5, %r6;",
            // A base whose bits are zero before the shift, a saturated sum, and numbers as floats.
            "mov.u32 %r1, %ctaid.x;\nshl.b32 %r2, %r1, 8;\nshr.u32 %r2, %r2, 5;\nmov.u32 %r3, %tid.x;\nadd.s32 %r4, %r3, %r2;\nshr.u32 %r5, %r4, 5;\nsetp.ge.u32 %p1, %r5, %r6;",
            "mov.u32 %r1, %ctaid.x;\nshl.b32 %r2, %r1, 8;\nmov.u32 %r3, %tid.x;\nadd.sat.s32 %r4, %r3, %r2;\nshr.u32 %r5, %r4, 5;\nsetp.ge.u32 %p1, %r5, %r6;",
            "mov.u32 %r3, %tid.x;\ncvt.rn.f32.u32 %f1, %r3;\nmov.b32 %f2, 1106771968;\nsetp.lt.f32 %p1, %f1, %f2;",
            // The count of iterations of a loop that lanes leave one by one.
            "mov.u32 %r1, %laneid;\nmov.b32 %r2, 0;\n$L9:\nadd.s32 %r2, %r2, 1;\nsetp.lt.u32 %p2, %r2, %r1;\n@%p2 bra $L9;\nsetp.eq.b32 %p1, %r2, 4;",
        ];
        for set in sets {
            assert_eq!(under(set).len(), 1, "{set}");
        }
    }

    #[test]
    fn threads_of_blocks_with_two_dimensions_are_no_warps() {
        let body =
            format!("mov.u32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, 32;\n@%p1 bra $L1;\n{SHUFFLE}$L1:\nret;");
        assert_eq!(of(&body, check), []);
        let flat = text(&body).replace(".maxntid 256, 1, 1", ".maxntid 16, 16, 1");
        assert_one(&check(&Module::read(&flat).unwrap()), "needs all lanes");
    }

    #[test]
    fn guards_and_the_rest_behind_a_return_count_too() {
        let lane = "mov.u32 %r1, %laneid;\nsetp.eq.b32 %p1, %r1, 0;\n";
        assert_one(&of(&format!("{lane}@%p1 {SHUFFLE}ret;"), check), "its guard differs");
        assert_one(&of(&format!("{lane}@%p1 ret;\n{SHUFFLE}ret;"), check), "`@%p1 ret` on line 13");
        let round = format!("{lane}$L1:\n{SHUFFLE}@%p1 bra $L1;\nret;");
        assert_one(&of(&round, check), "`@%p1 bra $L1` on line 15");
    }
}

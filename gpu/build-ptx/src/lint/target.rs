//! Instructions must exist on the GPUs that the PTX is for. ptxas checks the same; this needs no
//! ptxas, and names the Rust line.

use epoxide_vgpu::ptx::Instruction;

use super::{Finding, Module};
use crate::backend::Arch;

const RULE: &str = "target";

/// Rejects instructions that are newer than the module's `.target`.
pub fn check(module: &Module) -> Vec<Finding> {
    let Ok(target) = module.file.target.parse::<Arch>() else { return Vec::new() };
    let newer = module.instructions().filter(|(_, inst)| since(inst) > target.number());
    let finding = |inst: &Instruction| {
        let message = format!(
            "`{}` is for sm_{} and later, and the PTX for {target}: set `arch` in [package.metadata.ptx]",
            inst.opcode,
            since(inst)
        );
        Finding::new(RULE, inst.whole.line, message)
    };
    newer.map(|(_, inst)| finding(inst)).collect()
}

/// The first architecture that has an instruction, from 80 on: of those that kernels here use, by
/// the "Target ISA Notes" of the PTX manual.
fn since(inst: &Instruction) -> u32 {
    let is = |names: &[&str]| names.iter().any(|name| inst.is(name));
    let has = |names: &[&str]| names.iter().any(|name| inst.has(name));
    let sm_90 = is(&["griddepcontrol", "elect", "mapa", "getctarank", "multimem", "stmatrix"])
        || is(&["cp"]) && has(&["bulk"])
        || is(&["mbarrier"]) && has(&["try_wait", "expect_tx"])
        || is(&["fence"]) && (has(&["proxy"]) && has(&["async"]) || has(&["mbarrier_init"]))
        || is(&["st", "red"]) && has(&["async"])
        || has(&["cluster", "shared::cluster"]);
    match () {
        () if sm_90 => 90,
        () if is(&["cvt"]) && has(&["e4m3x2", "e5m2x2"]) => 89,
        () => 80,
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, text};
    use super::*;

    fn findings(target: &str, body: &str) -> Vec<Finding> {
        check(&Module::read(&text(body).replace("sm_90", target)).unwrap())
    }

    #[test]
    fn instructions_of_the_target_pass() {
        let old =
            "cp.async.cg.shared.global [%r1], [%rd1], 16;\nredux.sync.or.b32 %r1, %r2, 0xffffffff;\nret;";
        assert_eq!(findings("sm_80", old), []);
        assert_eq!(findings("sm_90", "griddepcontrol.wait;\nret;"), []);
    }

    #[test]
    fn newer_instructions_fail() {
        for (inst, since) in [
            ("griddepcontrol.wait;", "sm_90 and later"),
            ("cp.async.bulk.commit_group;", "sm_90 and later"),
            ("mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;", "sm_90 and later"),
            ("fence.proxy.async.shared::cta;", "sm_90 and later"),
            ("cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2;", "sm_89 and later"),
        ] {
            assert_one(&findings("sm_80", &format!("{inst}\nret;")), since);
        }
    }
}

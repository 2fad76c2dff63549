//! The virtual GPU can run it: CI tests the code that a GPU runs.

use std::collections::BTreeMap;

use epoxide_vgpu::{PtxError, supported_opcode};

use super::{Finding, Module};

const RULE: &str = "opcodes";

/// Rejects opcodes that the virtual GPU does not implement, each once, and text that it cannot
/// load.
pub fn check(module: &Module) -> Vec<Finding> {
    let mut unknown: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for (_, inst) in module.instructions().filter(|(_, inst)| !supported_opcode(&inst.opcode)) {
        unknown.entry(&inst.opcode).or_insert((inst.whole.line, 0)).1 += 1;
    }
    if unknown.is_empty() {
        return epoxide_vgpu::Module::parse(module.text).err().iter().map(refused).collect();
    }
    unknown
        .into_iter()
        .map(|(opcode, (line, count))| {
            let message = format!(
                "the virtual GPU does not implement `{opcode}` ({count}x), so that no test could run it: use functions of \
                 epoxide-simt, or add it to `vgpu/` in epoxide's repository"
            );
            Finding::new(RULE, line, message)
        })
        .collect()
}

/// The finding for text that the virtual GPU cannot load.
pub fn refused(error: &PtxError) -> Finding {
    Finding::new(RULE, error.line, format!("the virtual GPU: {error}"))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{self, assert_one, of};
    use super::*;

    #[test]
    fn known_opcodes_pass() {
        assert_eq!(of("$L1:\n.reg .pred %p<2>;\n@%p1 ret;", check), []);
    }

    #[test]
    fn an_unknown_opcode_is_named_once() {
        assert_one(&of("wgmma.fence;\nwgmma.fence;\nret;", check), "`wgmma.fence` (2x)");
    }

    #[test]
    fn a_refusal_is_passed_on() {
        assert_one(&of("bra NOWHERE;", check), "label 'NOWHERE' does not exist");
        let text = testing::text("ret;") + ".shared .b8 tile[512];\n.shared .b8 tile[16];\n";
        assert_one(&check(&Module::read(&text).unwrap()), "'tile' is defined twice");
    }
}

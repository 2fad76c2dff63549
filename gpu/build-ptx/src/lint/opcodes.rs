//! The virtual GPU can run it: CI tests the code that a GPU runs.

use std::collections::BTreeMap;

use super::finding::Finding;
use crate::ptx::Module;

const RULE: &str = "opcodes";

/// Refuses opcodes that the virtual GPU does not implement, each once, and text that it cannot
/// parse.
pub fn check(text: &str, module: &Module) -> Vec<Finding> {
    check_with(&VGPU, text, module)
}

/// The questions that this rule asks the virtual GPU.
struct Machine {
    /// Whether it implements an opcode, given with all modifiers.
    supports: fn(&str) -> bool,
    /// Why it cannot load a module, if so.
    refuses: fn(&str) -> Option<String>,
}

/// The virtual GPU of this repository.
const VGPU: Machine = Machine {
    supports: epoxide_vgpu::supported_opcode,
    refuses: |text| epoxide_vgpu::Module::parse(text).err().map(|error| error.to_string()),
};

fn check_with(machine: &Machine, text: &str, module: &Module) -> Vec<Finding> {
    let mut unknown: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for (_, statement) in module.instructions() {
        let Some(opcode) = statement.opcode().filter(|opcode| !(machine.supports)(opcode)) else { continue };
        unknown.entry(opcode).or_insert((statement.line, 0)).1 += 1;
    }
    if unknown.is_empty() {
        let refusal = (machine.refuses)(text);
        return refusal
            .map(|why| Finding::new(RULE, 0, format!("the virtual GPU: {why}")))
            .into_iter()
            .collect();
    }
    unknown
        .into_iter()
        .map(|(opcode, (line, count))| {
            let message =
                format!("the virtual GPU does not implement `{opcode}` ({count}x): teach it in vgpu/");
            Finding::new(RULE, line, message)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, text};
    use super::*;

    const KNOWS_RET: Machine = Machine { supports: |opcode| opcode == "ret", refuses: |_| None };

    fn findings(machine: &Machine, body: &str) -> Vec<Finding> {
        let text = text(body);
        check_with(machine, &text, &Module::read(&text))
    }

    #[test]
    fn known_opcodes_pass() {
        assert_eq!(findings(&KNOWS_RET, "$L1:\n.reg .b32 %r<2>;\n@%p1 ret;"), []);
    }

    #[test]
    fn an_unknown_opcode_is_named_once() {
        assert_one(&findings(&KNOWS_RET, "wgmma.fence;\nwgmma.fence;\nret;"), "`wgmma.fence` (2x)");
    }

    #[test]
    fn a_refusal_is_passed_on() {
        let stubborn = Machine { refuses: |_| Some("line 3: what?".into()), ..KNOWS_RET };
        assert_one(&findings(&stubborn, "ret;"), "what?");
    }
}

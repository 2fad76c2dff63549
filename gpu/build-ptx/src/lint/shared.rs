//! The attribute of a kernel with dynamic shared memory must specify the bytes of a block. Without
//! `shared`, a launch by the attribute allocates none, and the kernel would fail only when it runs.

use std::collections::BTreeSet;

use epoxide_vgpu::ptx::{Instruction, Stmt, VarSpace};

use super::{Finding, Module};
use crate::described::{self, KernelInfo};

const RULE: &str = "shared";

/// Rejects kernels that use the base of dynamic shared memory, themselves or in functions that they
/// call, and whose attribute has no `shared`.
pub fn check(module: &Module, described: &[KernelInfo]) -> Vec<Finding> {
    let uses = users(module);
    let undeclared = |name: &str| described::find(described, name).is_some_and(|kernel| !kernel.names_shared);
    let entries = module.file.entries.iter().filter(|entry| undeclared(&entry.name));
    let findings = entries.filter_map(|entry| {
        let inst = entry.instructions().find(|inst| names_any(inst, &uses))?;
        let message = format!(
            "`{}` uses dynamic shared memory, and its attribute does not say how much: add `shared = Tiles::BYTES` \
             to `#[kernel(..)]` for a `shared! {{ struct Tiles .. }}`, or `shared = 0` where each launch chooses: `{}`",
            entry.name,
            module.show(inst)
        );
        Some(Finding::new(RULE, inst.whole.line, message))
    });
    findings.collect()
}

/// The arrays in dynamic shared memory, and the functions that use one.
fn users(module: &Module) -> BTreeSet<String> {
    let dynamic = module.file.variables.iter().filter(|variable| variable.bytes.is_none());
    let shared = dynamic.filter(|variable| variable.space == VarSpace::Shared);
    let mut uses: BTreeSet<String> = shared.map(|variable| variable.name.clone()).collect();
    loop {
        let known = uses.len();
        for function in &module.file.functions {
            let mut instructions = function.body.iter().flatten().filter_map(|stmt| match stmt {
                Stmt::Inst(inst) => Some(inst),
                _ => None,
            });
            if instructions.any(|inst| names_any(inst, &uses)) {
                uses.insert(function.name.clone());
            }
        }
        if uses.len() == known {
            return uses;
        }
    }
}

fn names_any(inst: &Instruction, names: &BTreeSet<String>) -> bool {
    inst.operands.iter().flat_map(|(operand, _)| operand.names()).any(|name| names.contains(name))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, text};
    use super::*;
    use crate::described::samples::kernel;

    const DYNAMIC: &str = ".extern .shared .align 128 .b8 EPOXIDE_SHARED[];\n";

    fn findings(module: &str, body: &str, names_shared: bool) -> Vec<Finding> {
        let text = text(body).replacen(".visible .entry", &format!("{module}.visible .entry"), 1);
        let described = [KernelInfo { names_shared, ..kernel("copy") }];
        check(&Module::read(&text).unwrap_or_else(|error| panic!("{error}")), &described)
    }

    #[test]
    fn the_attribute_names_the_bytes() {
        let body = "mov.u32 %r1, EPOXIDE_SHARED;\nret;";
        assert_eq!(findings(DYNAMIC, body, true), []);
        let found = findings(DYNAMIC, body, false);
        assert_one(&found, "add `shared = Tiles::BYTES`");
        assert!(found[0].message.starts_with("`copy` uses dynamic shared memory"), "{found:?}");
        assert_eq!(found[0].line, 12);
    }

    #[test]
    fn shared_memory_that_the_ptx_declares_needs_nothing() {
        let declared = format!("{DYNAMIC}.shared .align 16 .b8 SHARED_Tiles_1_1[64];\n");
        assert_eq!(findings(&declared, "mov.u32 %r1, SHARED_Tiles_1_1;\nret;", false), []);
        assert_eq!(findings(DYNAMIC, "ret;", false), []);
    }

    #[test]
    fn functions_that_the_kernel_calls_count() {
        let inner = ".func inner()\n{\nmov.u32 %r1, EPOXIDE_SHARED;\nret;\n}\n";
        let outer = ".func outer()\n{\ncall.uni inner;\nret;\n}\n";
        let module = format!("{DYNAMIC}{inner}{outer}");
        assert_one(&findings(&module, "call.uni outer;\nret;", false), "`copy` uses dynamic");
        assert_eq!(findings(&module, "ret;", false), []);
    }
}

//! The module's own declarations: version, target, variables, and source paths that name no
//! machine.

use epoxide_vgpu::ptx::{Instruction, VarSpace, Variable};

use super::{Expect, Finding, Module};

const RULE: &str = "module";

/// Checks `.version`, `.target`, module-scope variables and `.file` paths.
pub fn check(module: &Module, expect: &Expect) -> Vec<Finding> {
    let mut findings = Vec::new();
    let file = &module.file;
    if file.version > expect.version {
        let message = format!(
            "`.version {}`: at most {} loads on the drivers we support",
            file.version, expect.version
        );
        findings.push(Finding::new(RULE, module.line_with(".version"), message));
    }
    if file.target != expect.target || !file.target_options.is_empty() {
        let line = module.line_with(".target");
        let message = format!("`{}`: expected {}", module.line(line), expect.target);
        findings.push(Finding::new(RULE, line, message));
    }
    for variable in &file.variables {
        if matches!(variable.space, VarSpace::Global | VarSpace::Const) {
            findings.push(Finding::new(RULE, variable.pos.line, of_variable(module, variable)));
        }
    }
    for (number, path) in file.lines.files.iter().filter(|(_, path)| path.starts_with('/')) {
        let message = format!(
            "`.file {number} \"{path}\"`: an absolute path; the text must not depend on the checkout"
        );
        findings.push(Finding::new(RULE, module.line_with(&format!("\"{path}\"")), message));
    }
    findings
}

/// The finding for a variable in memory, with the first instruction that uses it: the compiler has
/// made it from a constant, whose name the PTX lacks.
fn of_variable(module: &Module, variable: &Variable) -> String {
    let declaration = module.line(variable.pos.line).split('=').next().unwrap_or_default().trim();
    let uses = |inst: &Instruction| {
        inst.operands.iter().flat_map(|(operand, _)| operand.names()).any(|name| name == variable.name)
    };
    let user =
        module.instructions().find(|(_, inst)| uses(inst)).map_or_else(String::new, |(entry, inst)| {
            let source = module.source(inst).map_or_else(String::new, |source| format!(" ({source})"));
            format!(" Kernel `{}` uses it first in `{}`{source}.", entry.name, module.show(inst))
        });
    format!(
        "`{declaration}`: a variable at module scope; a constant became memory.{user} Pass the table as a `Global<T>`, \
         or compute its elements"
    )
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, text};
    use super::*;
    use epoxide_vgpu::ptx::Version;

    fn findings(text: &str) -> Vec<Finding> {
        let version = Version { major: 8, minor: 4 };
        check(&Module::read(text).unwrap(), &Expect { described: &[], version, target: "sm_90" })
    }

    fn with(item: &str) -> String {
        format!("{}\n{item}\n", text("ret;"))
    }

    #[test]
    fn shipped_preamble_passes() {
        assert_eq!(findings(&with(".extern .shared .align 128 .b8 DYN[];\n.file 1 \"gpu/src/lib.rs\"")), []);
    }

    #[test]
    fn preamble_is_checked() {
        assert_one(&findings(&text("ret;").replace("8.4", "8.5")), "`.version 8.5`");
        assert_one(&findings(&text("ret;").replace("sm_90", "sm_100")), "expected sm_90");
        assert_one(&findings(&text("ret;").replace("sm_90", "sm_90, debug")), "expected sm_90");
        let narrow = text("ret;").replace("_size 64", "_size 32");
        assert!(Module::read(&narrow).is_err_and(|error| error.message.contains("only .address_size 64")));
    }

    #[test]
    fn a_constant_in_memory_names_kernel_line_and_remedy() {
        let table = ".global .align 4 .b8 anon_1[4] = {1, 2, 3, 4};\n";
        let body = ".loc 1 7 3\nmov.u64 %rd1, anon_1;\n.loc 1 8 3\nld.global.b32 %r1, [anon_1];\nret;";
        let text = text(body).replacen(".visible", &format!("{table}.visible"), 1);
        let found = findings(&(text + ".file 1 \"src/k.rs\"\n"));
        assert_one(&found, "Kernel `copy` uses it first in `mov.u64 %rd1, anon_1` (src/k.rs:7).");
        assert_one(&found, "Pass the table as a `Global<T>`");
        assert!(!found[0].message.contains("{1, 2"), "{found:?}");
    }

    #[test]
    fn variables_and_absolute_paths_fail() {
        assert_one(&findings(&with(".global .align 4 .u32 counter;")), "module scope");
        assert_one(
            &findings(&with(".const .align 4 .b8 table[8] = {1, 2, 3, 4, 5, 6, 7, 8};")),
            "module scope",
        );
        assert_one(&findings(&with(".file 1 \"/home/me/lib.rs\"")), "absolute path");
    }
}

//! The module's own declarations: version, target, variables, and source paths that name no
//! machine.

use super::finding::{Expect, Finding};
use crate::backend::PtxVersion;
use crate::ptx::Module;

const RULE: &str = "module";

/// Module-scope `.global` and `.const` variables that may exist. Each is state shared by all
/// launches.
const VARIABLES_ALLOWED: [&str; 0] = [];

/// Checks `.version`, `.target`, `.address_size`, module-scope variables and `.file` paths.
pub fn check(module: &Module, expect: &Expect) -> Vec<Finding> {
    let mut findings = Vec::new();
    let value = |directive: &str| {
        module.items.iter().find_map(|item| Some((item.line, item.text.strip_prefix(directive)?.trim())))
    };

    let (line, version) = value(".version").unwrap_or_default();
    let in_range = version.parse::<PtxVersion>().is_ok_and(|version| version <= expect.version);
    if !in_range {
        let message =
            format!("`.version {version}`: at most {} loads on the drivers we support", expect.version);
        findings.push(Finding::new(RULE, line, message));
    }
    let (line, target) = value(".target").unwrap_or_default();
    if target != expect.target {
        findings.push(Finding::new(RULE, line, format!("`.target {target}`: expected {}", expect.target)));
    }
    let (line, size) = value(".address_size").unwrap_or_default();
    if size != "64" {
        findings.push(Finding::new(RULE, line, format!("`.address_size {size}`: expected 64")));
    }

    for item in &module.items {
        let variable = item.text.split(' ').any(|word| word == ".global" || word == ".const");
        if variable && !item.words().any(|word| VARIABLES_ALLOWED.contains(&word)) {
            let message = format!("`{}`: a variable at module scope; a constant became memory", item.text);
            findings.push(Finding::new(RULE, item.line, message));
        }
        if item.text.starts_with(".file") && item.text.contains("\"/") {
            let message =
                format!("`{}`: an absolute path; the text must not depend on the checkout", item.text);
            findings.push(Finding::new(RULE, item.line, message));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, text};
    use super::*;

    fn findings(text: &str) -> Vec<Finding> {
        let version = PtxVersion { major: 8, minor: 4 };
        check(&Module::read(text), &Expect { described: &[], version, target: "sm_90" })
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
        assert_one(&findings(&text("ret;").replace("_size 64", "_size 32")), "expected 64");
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

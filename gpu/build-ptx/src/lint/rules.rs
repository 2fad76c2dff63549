//! All rules on a text.

use super::finding::{Expect, Finding};
use super::{
    arithmetic, atomics, barriers, collectives, dependent, entries, functions, locals, module, opcodes,
    readonly,
};
use crate::ptx::Module;

/// Runs every text rule.
pub fn run(text: &str, expect: &Expect) -> Vec<Finding> {
    let module = Module::read(text);
    let mut findings = entries::check(&module, expect.described);
    findings.extend(functions::check(&module));
    findings.extend(locals::check(&module, expect.described));
    findings.extend(atomics::check(&module));
    findings.extend(barriers::check(&module, expect.described));
    findings.extend(dependent::check(&module, expect.described));
    findings.extend(collectives::check(&module));
    findings.extend(readonly::check(&module));
    findings.extend(arithmetic::check(&module, expect.described));
    findings.extend(module::check(&module, expect));
    findings.extend(opcodes::check(text, &module));
    for finding in &mut findings {
        let entry = module.entries.iter().rev().find(|entry| entry.line <= finding.line);
        if let Some(source) = entry.and_then(|entry| module.source(entry, finding.line)) {
            finding.message += &format!(" ({source})");
        }
    }
    findings.sort_by_key(|finding| finding.line);
    findings
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;
    use crate::backend::PtxVersion;
    use crate::described::samples::kernel;

    #[test]
    fn findings_come_in_line_order_and_name_their_rule() {
        let described = [kernel("copy")];
        let version = PtxVersion { major: 8, minor: 4 };
        let expect = Expect { described: &described, version, target: "sm_90" };
        let text = testing::text("membar.gl;\nbar.sync 0;\ntrap;\nret;");
        let findings = run(&text, &expect);
        let rules: Vec<_> = findings.iter().map(|finding| finding.rule).collect();
        assert!(rules.contains(&"atomics") && rules.contains(&"barriers") && rules.contains(&"arithmetic"));
        assert!(findings.is_sorted_by_key(|finding| finding.line));
        let shown = findings.iter().find(|finding| finding.rule == "atomics").unwrap().to_string();
        assert!(shown.starts_with("line 11: ") && shown.ends_with("[atomics]"), "{shown}");
    }
}

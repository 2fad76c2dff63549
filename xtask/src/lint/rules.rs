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
    let mut findings = entries::check(&module, expect.manifest);
    findings.extend(functions::check(&module));
    findings.extend(locals::check(&module, expect.manifest));
    findings.extend(atomics::check(&module));
    findings.extend(barriers::check(&module, expect.manifest));
    findings.extend(dependent::check(&module, expect.manifest));
    findings.extend(collectives::check(&module));
    findings.extend(readonly::check(&module));
    findings.extend(arithmetic::check(&module, expect.manifest));
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
    use crate::manifest::samples::kernel;

    #[test]
    fn ptx_that_nobody_would_ship() {
        let manifest = crate::manifest::MANIFEST;
        let version = PtxVersion { major: 8, minor: 4 };
        let expect = Expect { manifest, version, target: "sm_90" };
        let samples = epoxide_testing::fuzz::sample_ptx(epoxide_gpu::PTX);
        epoxide_testing::fuzz::run("ptx lints", 500, &samples, |bytes| {
            let findings = run(&String::from_utf8_lossy(bytes), &expect);
            assert!(findings.is_sorted_by_key(|finding| finding.line));
        });
    }

    #[test]
    fn findings_come_in_line_order_and_name_their_rule() {
        let manifest = [kernel("copy")];
        let version = PtxVersion { major: 8, minor: 4 };
        let expect = Expect { manifest: &manifest, version, target: "sm_90" };
        let text = testing::text("membar.gl;\nbar.sync 0;\ntrap;\nret;");
        let findings = run(&text, &expect);
        let rules: Vec<_> = findings.iter().map(|finding| finding.rule).collect();
        assert!(rules.contains(&"atomics") && rules.contains(&"barriers") && rules.contains(&"arithmetic"));
        assert!(findings.is_sorted_by_key(|finding| finding.line));
        let shown = findings.iter().find(|finding| finding.rule == "atomics").unwrap().to_string();
        assert!(shown.starts_with("line 11: ") && shown.ends_with("[atomics]"), "{shown}");
    }
}

//! What every PTX file must satisfy, whichever compiler wrote it.
//!
//! LLVM does not read inline PTX, and several constructs compile to something legal but wrong: these lints are the net. Each rule is
//! one small file, with a snippet that passes and one that does not. Exceptions are in the kernel manifest.

mod arithmetic;
mod atomics;
mod barriers;
mod collectives;
mod entries;
mod functions;
mod locals;
mod module;
mod opcodes;
mod readonly;

use std::fmt;

use crate::backend::PtxVersion;
use crate::manifest::KernelInfo;
use crate::ptx::Module;

/// Something a rule found wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The rule's name.
    pub rule: &'static str,
    /// The line in the PTX file, from 1; 0 where it is about the file as a whole.
    pub line: usize,
    /// What is wrong, and what to do.
    pub message: String,
}

impl Finding {
    /// A finding about one line, or about the whole file (line 0).
    pub fn new(rule: &'static str, line: usize, message: impl Into<String>) -> Self {
        Self { rule, line, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line > 0 {
            write!(f, "line {}: ", self.line)?;
        }
        write!(f, "{} [{}]", self.message, self.rule)
    }
}

/// What a file is held to.
pub struct Expect<'a> {
    /// The kernels it must hold.
    pub manifest: &'a [KernelInfo],
    /// The highest `.version` allowed.
    pub version: PtxVersion,
    /// The `.target`, such as `sm_90`.
    pub target: &'a str,
}

/// Runs every text rule.
pub fn run(text: &str, expect: &Expect) -> Vec<Finding> {
    let module = Module::read(text);
    let mut findings = entries::check(&module, expect.manifest);
    findings.extend(functions::check(&module));
    findings.extend(locals::check(&module, expect.manifest));
    findings.extend(atomics::check(&module));
    findings.extend(barriers::check(&module, expect.manifest));
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

/// Snippets for the rules' tests.
#[cfg(test)]
mod testing {
    use super::Finding;
    use crate::ptx::Module;

    /// A module with one entry `copy(src: u64, n: u32)` around `body`, launch bounds included.
    pub fn entry(body: &str) -> Module {
        Module::read(&text(body))
    }

    /// The text of that module; the body starts on line 11.
    pub fn text(body: &str) -> String {
        let params = "\t.param .u64 copy_param_0,\n\t.param .u32 copy_param_1\n";
        let bounds = ".maxntid 256, 1, 1\n.minnctapersm 2\n";
        format!(
            ".version 8.4\n.target sm_90\n.address_size 64\n.visible .entry copy(\n{params})\n{bounds}{{\n{body}\n}}\n"
        )
    }

    /// Asserts one finding whose message holds `part`.
    pub fn assert_one(findings: &[Finding], part: &str) {
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert!(findings[0].message.contains(part), "{findings:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::samples::kernel;

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

//! Snippets for the rules' tests.

use super::finding::Finding;
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

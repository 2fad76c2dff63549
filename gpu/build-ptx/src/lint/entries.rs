//! The entries, their launch bounds and their parameters are those of its description.

use epoxide_vgpu::ptx::Entry;

use super::{Finding, Module};
use crate::described::{self, KernelInfo};

const RULE: &str = "entries";

/// Compares every entry with its kernel, both ways.
pub fn check(module: &Module, described: &[KernelInfo]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for kernel in described {
        if !module.file.entries.iter().any(|entry| entry.name == kernel.name) {
            let message = format!("no entry `{}`, which the PTX describes", kernel.name);
            findings.push(Finding::new(RULE, 0, message));
        }
    }
    for entry in &module.file.entries {
        match described::find(described, &entry.name) {
            Some(kernel) => compare(entry, kernel, &mut findings),
            None => {
                let message =
                    format!("entry `{}` has no description: make kernels with `#[kernel]`", entry.name);
                findings.push(Finding::new(RULE, entry.pos.line, message));
            }
        }
    }
    findings
}

fn compare(entry: &Entry, kernel: &KernelInfo, findings: &mut Vec<Finding>) {
    let name = &entry.name;
    let mut report = |message: String| findings.push(Finding::new(RULE, entry.pos.line, message));

    if entry.max_block.map(|block| block[0]) != Some(kernel.max_threads) {
        report(format!("`{name}` lacks `.maxntid {}, 1, 1`", kernel.max_threads));
    }
    if entry.min_blocks_per_sm.unwrap_or(0) != kernel.min_blocks_per_sm {
        report(format!("`{name}` lacks `.minnctapersm {}`", kernel.min_blocks_per_sm));
    }

    if entry.params.len() != kernel.params.len() {
        let (have, want) = (entry.params.len(), kernel.params.len());
        report(format!("`{name}` takes {have} parameters, its description says {want}"));
        return;
    }
    for (have, want) in entry.params.iter().zip(&kernel.params) {
        if (have.size, have.align) != (want.size, want.align) {
            report(format!(
                "parameter `{}` of `{name}` has size {} and alignment {}, its description says {} and {}",
                want.name, have.size, have.align, want.size, want.align
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, text};
    use super::*;
    use crate::described::samples::kernel;

    fn findings(text: &str, names: &[&str]) -> Vec<Finding> {
        let described: Vec<_> = names.iter().map(|name| kernel(name)).collect();
        check(&Module::read(text).unwrap(), &described)
    }

    #[test]
    fn matching_entry_passes() {
        assert_eq!(findings(&text("ret;"), &["copy"]), []);
    }

    #[test]
    fn missing_and_surplus_entries() {
        assert_one(&findings(&text("ret;"), &["copy", "other"]), "no entry `other`");
        assert_one(&findings(&text("ret;"), &[]), "`copy` has no description");
    }

    #[test]
    fn launch_bounds_must_be_there() {
        assert_one(&findings(&text("ret;").replace(".maxntid 256, 1, 1\n", ""), &["copy"]), ".maxntid 256");
        assert_one(&findings(&text("ret;").replace("persm 2", "persm 1"), &["copy"]), ".minnctapersm 2");
    }

    #[test]
    fn parameters_must_agree() {
        let one_less = text("ret;").replace(",\n\t.param .u32 copy_param_1", "");
        assert_one(&findings(&one_less, &["copy"]), "takes 1 parameters");
        let wider = text("ret;").replace(".param .u32", ".param .u64");
        assert_one(&findings(&wider, &["copy"]), "parameter `n`");
    }
}

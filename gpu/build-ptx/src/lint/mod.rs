//! Requirements of every PTX file, from any compiler.
//!
//! LLVM does not parse inline PTX, and several constructs compile to legal but wrong code. These
//! lints reject it. They parse PTX as the virtual GPU does. Each rule comes with a snippet that
//! passes and one that does not. Exceptions are in the kernel's attribute, which the PTX repeats.

mod arithmetic;
mod barriers;
mod collectives;
mod dependent;
mod entries;
mod functions;
mod lanes;
mod memory;
mod module;
mod opcodes;
mod shared;
mod target;

use std::fmt;
use std::path::Path;

use anyhow::{Result, ensure};
use epoxide_vgpu::PtxError;
use epoxide_vgpu::ptx::{self, Entry, File, Instruction, Version};

use crate::described::KernelInfo;
use crate::job::Job;
use crate::workspace::Workspace;
use crate::{described, ptxas};

/// Something a rule found wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The rule's name.
    pub rule: &'static str,
    /// The line in the PTX file, from 1; 0 where it is about the file as a whole.
    pub line: usize,
    /// The error and its remedy.
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

/// Requirements of a file.
pub struct Expect<'a> {
    /// The kernels it must hold, as it describes them.
    pub described: &'a [KernelInfo],
    /// The highest `.version` allowed.
    pub version: Version,
    /// The `.target`, such as `sm_90`.
    pub target: &'a str,
}

/// A module, with its text.
pub(crate) struct Module<'a> {
    text: &'a str,
    file: File,
}

impl<'a> Module<'a> {
    fn read(text: &'a str) -> Result<Self, PtxError> {
        Ok(Self { text, file: ptx::parse(text)? })
    }

    /// All instructions, each with the entry it belongs to.
    fn instructions(&self) -> impl Iterator<Item = (&Entry, &Instruction)> {
        self.file.entries.iter().flat_map(|entry| entry.instructions().map(move |inst| (entry, inst)))
    }

    /// The text of an instruction, white space reduced to single blanks.
    fn show(&self, inst: &Instruction) -> String {
        inst.whole.of(self.text).split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// The line of this number, trimmed.
    fn line(&self, number: usize) -> &str {
        self.text.lines().nth(number.wrapping_sub(1)).unwrap_or("").trim()
    }

    /// The number of the first line that holds `part`; 0 if none does.
    fn line_with(&self, part: &str) -> usize {
        self.text.lines().position(|line| line.contains(part)).map_or(0, |at| at + 1)
    }

    /// The Rust source of an instruction: the place itself, and the place in the kernel's own code
    /// where it was inlined.
    fn source(&self, inst: &Instruction) -> Option<String> {
        let source = inst.source?;
        let [here, own] = [source.innermost, source.own]
            .map(|at| self.file.lines.place(at).map(|(path, line)| format!("{path}:{line}")));
        let here = here?;
        Some(own.filter(|own| *own != here).map_or(here.clone(), |own| format!("{here}, inlined at {own}")))
    }
}

/// Runs every rule that needs nothing but the text.
pub fn run(text: &str, expect: &Expect) -> Vec<Finding> {
    let module = match Module::read(text) {
        Ok(module) => module,
        Err(error) => return vec![opcodes::refused(&error)],
    };
    let mut findings = entries::check(&module, expect.described);
    findings.extend(functions::check(&module));
    findings.extend(memory::check(&module, expect.described));
    findings.extend(barriers::check(&module, expect.described));
    findings.extend(dependent::check(&module, expect.described));
    findings.extend(collectives::check(&module));
    findings.extend(arithmetic::check(&module, expect.described));
    findings.extend(module::check(&module, expect));
    findings.extend(opcodes::check(&module));
    findings.extend(target::check(&module));
    name_sources(&module, &mut findings);
    findings.sort_by_key(|finding| finding.line);
    findings
}

/// Kernels in the compiler's own PTX that use dynamic shared memory without `shared` in their
/// attribute. Shipped PTX does not record which attributes have it.
pub fn undeclared_shared(raw: &str, described: &[KernelInfo]) -> Vec<Finding> {
    // The lints of the text that ships report PTX that cannot be read.
    let Ok(module) = Module::read(raw) else { return vec![] };
    let mut findings = shared::check(&module, described);
    name_sources(&module, &mut findings);
    findings
}

/// Adds the kernel and the Rust line to findings about an instruction.
fn name_sources(module: &Module, findings: &mut [Finding]) {
    for finding in findings {
        let found = module.instructions().find(|(_, inst)| inst.whole.line == finding.line);
        let Some((entry, inst)) = found else { continue };
        if !finding.message.contains(&format!("`{}`", entry.name)) {
            finding.message = format!("kernel `{}`: {}", entry.name, finding.message);
        }
        if let Some(source) = module.source(inst) {
            finding.message += &format!(" ({source})");
        }
    }
}

/// Lints a PTX file by text and by ptxas, prints what each kernel uses, and fails on any finding.
pub fn lint_file(ws: &Workspace, job: &Job, file: &Path, text: &str) -> Result<()> {
    let described = described::kernels(text);
    let expect =
        Expect { described: &described, version: job.backend.version_ceiling(), target: job.arch.sm() };
    let mut findings = run(text, &expect);
    match ptxas::find(ws) {
        Some(ptxas) => match ptxas::assemble(&ptxas, file, job.arch.sm()) {
            Ok(usages) => {
                print!("{}", ptxas::table(&usages));
                findings.extend(ptxas::check(&usages, &described, job.backend));
            }
            Err(error) => findings.push(Finding::new("ptxas", 0, format!("{error:#}"))),
        },
        None => println!("skipped ptxas: {}", ptxas::REMEDY),
    }
    for finding in &findings {
        eprintln!("{}: {finding}", ws.display(file));
    }
    ensure!(findings.is_empty(), "{}: {} lint findings", ws.display(file), findings.len());
    ensure!(
        !described.is_empty(),
        "{}: package `{}` has no kernel: is a file of kernels without its `mod` in src/lib.rs, or are they behind a \
         feature that is no default one? The PTX is built with default features alone",
        ws.display(file),
        job.kernels.package
    );
    println!("{}: lints pass ({} kernels)", ws.display(file), described.len());
    Ok(())
}

/// Snippets for the rules' tests.
#[cfg(test)]
mod testing {
    use super::{Finding, Module};

    /// A module with one entry `copy(src: u64, n: u32)` around `body`, launch bounds included; the
    /// body starts on line 11.
    pub fn text(body: &str) -> String {
        let params = "\t.param .u64 copy_param_0,\n\t.param .u32 copy_param_1\n";
        let bounds = ".maxntid 256, 1, 1\n.minnctapersm 2\n";
        format!(
            ".version 8.4\n.target sm_90\n.address_size 64\n.visible .entry copy(\n{params})\n{bounds}{{\n{body}\n}}\n"
        )
    }

    /// The findings of a rule on the module with this body.
    pub fn of(body: &str, check: impl Fn(&Module) -> Vec<Finding>) -> Vec<Finding> {
        let text = text(body);
        check(&Module::read(&text).unwrap_or_else(|error| panic!("{error}")))
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
    use crate::described::samples::kernel;

    const VERSION: Version = Version { major: 8, minor: 4 };

    #[test]
    fn findings_come_in_line_order_and_name_their_rule() {
        let described = [kernel("copy")];
        let expect = Expect { described: &described, version: VERSION, target: "sm_90" };
        let text = testing::text("membar.gl;\nbar.sync 0;\ntrap;\nret;");
        let findings = run(&text, &expect);
        let rules: Vec<_> = findings.iter().map(|finding| finding.rule).collect();
        assert!(rules.contains(&"atomics") && rules.contains(&"barriers") && rules.contains(&"arithmetic"));
        assert!(findings.is_sorted_by_key(|finding| finding.line));
        let shown = findings.iter().find(|finding| finding.rule == "atomics").unwrap().to_string();
        assert!(shown.starts_with("line 11: ") && shown.ends_with("[atomics]"), "{shown}");
    }

    #[test]
    fn sources_name_the_kernel_too() {
        let body = ".loc 1 7 3\nmembar.gl;\n.loc 2 9 1 // inlined_at 1 8\nmembar.sys;\nret;";
        let files = ".file 1 \"gpu/src/kernels/f.rs\"\n.file 2 \"rust/c.rs\"\n";
        let text = testing::text(body) + files;
        let findings = run(&text, &Expect { described: &[], version: VERSION, target: "sm_90" });
        let ends = |end: &str| findings.iter().any(|finding| finding.message.ends_with(end));
        assert!(ends("(gpu/src/kernels/f.rs:7)"), "{findings:?}");
        assert!(ends("(rust/c.rs:9, inlined at gpu/src/kernels/f.rs:8)"), "{findings:?}");
        let names = |finding: &Finding| finding.message.starts_with("kernel `copy`: `membar");
        assert_eq!(findings.iter().filter(|finding| names(finding)).count(), 2, "{findings:?}");
    }

    #[test]
    fn findings_about_an_instruction_name_the_kernel_once() {
        let body = "call.uni (r), helper, (p);\nwgmma.fence;\nrem.u64 %rd1, %rd2, 7;\nbar.sync 0;\n\
                    griddepcontrol.launch_dependents;\nmov.u32 %r1, %laneid;\nsetp.eq.b32 %p1, %r1, 0;\n\
                    @%p1 bra $L1;\nbar.warp.sync 0xffffffff;\n$L1:\nret;";
        let text = testing::text(body).replace("sm_90", "sm_80");
        let findings =
            run(&text, &Expect { described: &[kernel("copy")], version: VERSION, target: "sm_80" });
        for rule in ["functions", "opcodes", "arithmetic", "barriers", "target", "collectives"] {
            let found =
                findings.iter().find(|finding| finding.rule == rule).unwrap_or_else(|| panic!("{rule}"));
            assert_eq!(found.message.matches("`copy`").count(), 1, "{found}");
        }
    }

    #[test]
    fn text_that_the_virtual_gpu_cannot_load_is_named_by_kernel() {
        let findings = run(
            &testing::text("bra NOWHERE;"),
            &Expect { described: &[kernel("copy")], version: VERSION, target: "sm_90" },
        );
        let found = findings.iter().find(|finding| finding.rule == "opcodes").unwrap();
        assert_eq!(found.line, 11);
        assert!(found.message.starts_with("kernel `copy`: the virtual GPU"), "{found}");
    }

    #[test]
    fn a_file_without_kernels_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (ws, file) = (Workspace::at(folder.path()), folder.path().join("k.ptx"));
        let kernels = crate::kernels::Kernels {
            package: "k".into(),
            library: "k".into(),
            dir: folder.path().into(),
            stem: "k".into(),
            arch: crate::backend::Arch::default(),
        };
        let job = Job::new(&ws, kernels, "cargo build-ptx", crate::backend::Backend::InTree, None, None);
        let text = ".version 8.4\n.target sm_90\n.address_size 64\n";
        std::fs::write(&file, text).unwrap();
        let error = lint_file(&ws, &job, &file, text).unwrap_err().to_string();
        assert!(error.contains("k.ptx: package `k` has no kernel"), "{error}");
        assert!(error.contains("`mod`") && error.contains("feature"), "{error}");
    }

    #[test]
    fn text_that_is_no_ptx_is_one_finding() {
        let findings = run(
            &testing::text("add.s32 %r1 %r2;"),
            &Expect { described: &[], version: VERSION, target: "sm_90" },
        );
        testing::assert_one(&findings, "expected ','");
    }
}

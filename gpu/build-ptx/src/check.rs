//! Checks that PTX matches the sources and passes the lints.

use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::backend::Backend;
use crate::build::{self, Builder};
use crate::header::Header;
use crate::job::Job;
use crate::lint::lint_file;
use crate::workspace::{self, Workspace, read, write};
use crate::{described, postprocess, ptxas, sources, toolchain};

/// How many differing lines to show.
const SHOWN: usize = 5;

/// Checks the committed PTX, or what another back end's build has left.
///
/// 1. Its header's fingerprint and flags are those of the sources, and the hash of its text is the
///    header's. This needs no compiler.
/// 2. It passes the lints, and ptxas assembles it for the newer architectures that run it too.
/// 3. A rebuild gives the same text, where the compiler is the one in the header. With another
///    compiler, the rebuilt PTX must pass the lints and `test` instead. Without one the result is
///    [`NotCompared`].
pub fn run(ws: &Workspace, job: &Job, test: &dyn Fn(&Path) -> Result<()>) -> Result<()> {
    let fix = fix(job);
    let text = read(&job.out).with_context(|| fix.clone())?;
    let header =
        Header::parse(&text).with_context(|| format!("{} has no header: {fix}", ws.display(&job.out)))?;
    check_header(ws, job, &text, &header)?;
    println!("{}: header matches the sources", ws.display(&job.out));
    lint_file(ws, job, &job.out, &text)?;
    check_newer(ws, job, &text)?;

    let named = workspace::env_path(toolchain::OVERRIDE).is_some();
    let builder = Builder::find(ws, job.backend).map_err(|error| without_compiler(job, named, error))?;
    let fresh = builder.compile(ws, job)?;
    if builder.version() == header.compiler {
        return compare(job, &text, &fresh);
    }
    println!("the PTX was made by {}: testing the fresh PTX instead of comparing", header.compiler);
    let file = job.target_dir(ws).join("fresh.ptx");
    write(&file, &fresh)?;
    lint_file(ws, job, &file, &fresh)?;
    test(&file).with_context(|| format!("PTX compiled by {}", builder.version()))
}

/// The error of a check that found no fault and could not compare the PTX with a rebuild.
#[derive(Debug)]
pub struct NotCompared(pub String);

impl fmt::Display for NotCompared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "header, text and lints agree, but no rebuild was compared: {}", self.0)
    }
}

impl std::error::Error for NotCompared {}

/// The error where no compiler was found. A compiler that the user has named must be there, and
/// missing parts of the nvvm back end are an error of their own.
fn without_compiler(job: &Job, named: bool, error: anyhow::Error) -> anyhow::Error {
    match job.backend {
        Backend::InTree if !named => NotCompared(format!("{error:#}")).into(),
        _ => error,
    }
}

fn check_newer(ws: &Workspace, job: &Job, text: &str) -> Result<()> {
    let Some(ptxas) = ptxas::find(ws) else { return Ok(()) };
    let findings = ptxas::check_newer(&ptxas, &job.out, (&job.arch, job.backend), &described::kernels(text));
    for finding in &findings {
        eprintln!("{}: {finding}", ws.display(&job.out));
    }
    ensure!(findings.is_empty(), "{}: {} findings on newer GPUs", ws.display(&job.out), findings.len());
    Ok(())
}

/// Remedy for stale or missing PTX.
pub(crate) fn fix(job: &Job) -> String {
    let Job { command, options, .. } = job;
    match job.backend {
        Backend::InTree => format!("run `{command}{options}` and commit the result"),
        backend => format!("run `{command}{options} --backend {backend}`"),
    }
}

fn check_header(ws: &Workspace, job: &Job, text: &str, header: &Header) -> Result<()> {
    let (file, fix) = (ws.display(&job.out), fix(job));
    ensure!(
        header.backend == job.backend.to_string(),
        "{file} was made by the {} back end: check it with `--backend {}`",
        header.backend,
        header.backend
    );
    let metadata = build::device_metadata(ws)?;
    let sources = sources::fingerprint(ws, &metadata, &job.kernels.package, &header.files)
        .with_context(|| format!("{file} is stale, or a file of its sources is missing; {fix}"))?;
    ensure!(
        header.sources == sources,
        "{file} is stale: the kernel sources or their dependencies changed; {fix}"
    );
    ensure!(header.flags == build::flags(ws, job), "{file} is stale: it was built with other flags; {fix}");
    check_text(&file.to_string(), text, header, &fix)
}

/// Checks the hash of the text, which PTX of earlier builders lacks.
fn check_text(file: &str, text: &str, header: &Header, fix: &str) -> Result<()> {
    let same = header.text.as_ref().is_none_or(|hash| *hash == postprocess::digest(text));
    ensure!(same, "{file} is not what was built: its text was edited below the header; {fix}");
    Ok(())
}

fn compare(job: &Job, committed: &str, fresh: &str) -> Result<()> {
    let files = |text: &str| Header::parse(text).map(|header| header.files);
    ensure!(
        files(committed) == files(fresh),
        "the compiler reads other files than the header names; {}",
        fix(job)
    );
    let (old, new) = (postprocess::comparable(committed), postprocess::comparable(fresh));
    if old == new {
        println!("a rebuild gives the same text");
        return Ok(());
    }
    let length = old.len().max(new.len());
    let line = |list: &[&str], at: usize| list.get(at).map_or("<end>", |line| line).to_owned();
    let differing = (0..length).filter(|&at| old.get(at) != new.get(at)).take(SHOWN);
    for at in differing {
        eprintln!("- {}\n+ {}", line(&old, at), line(&new, at));
    }
    bail!("the PTX is not what the same compiler makes of the sources; {}", fix(job))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Kernels;

    fn job(backend: Backend) -> Job {
        let kernels = Kernels {
            package: "k".into(),
            library: "k".into(),
            dir: "/w/k".into(),
            stem: "k".into(),
            arch: crate::backend::Arch::default(),
        };
        Job::new(&Workspace::at("/w"), kernels, "cargo build-ptx", backend, None, None)
    }

    #[test]
    fn a_check_without_a_compiler_is_no_success() {
        let error = |named| without_compiler(&job(Backend::InTree), named, anyhow::anyhow!("no rustc"));
        assert!(error(false).downcast_ref::<NotCompared>().is_some_and(|why| why.0 == "no rustc"));
        // A compiler that the user has named.
        assert!(error(true).downcast_ref::<NotCompared>().is_none());
        let nvvm = without_compiler(&job(Backend::Nvvm), false, anyhow::anyhow!("no parts"));
        assert_eq!(nvvm.to_string(), "no parts");
    }

    #[test]
    fn an_edited_text_is_found_without_a_compiler() {
        let header = Header {
            package: "k".into(),
            command: "cargo build-ptx".into(),
            backend: "in-tree".into(),
            compiler: "rustc".into(),
            flags: String::new(),
            sources: String::new(),
            files: Vec::new(),
            text: None,
        };
        let built = postprocess::ship(".version 8.4\nret;\n", &header, &[]);
        let check = |text: &str| check_text("k.ptx", text, &Header::parse(text).unwrap(), "build");
        check(&built).unwrap();
        let error = check(&built.replace("ret;", "exit;")).unwrap_err().to_string();
        assert!(error.contains("its text was edited"), "{error}");
    }

    #[test]
    fn a_header_without_a_file_that_the_compiler_reads_is_stale() {
        let text = |file: &str| {
            format!(
                "// Device code of k, compiled by `b`. Do not edit.\n// backend: in-tree\n// compiler: c\n\
                 // flags: f\n// sources: s\n{file}\nret;\n"
            )
        };
        let job = job(Backend::InTree);
        compare(&job, &text("// file: a.bin\n"), &text("// file: a.bin\n")).unwrap();
        let error = compare(&job, &text(""), &text("// file: a.bin\n")).unwrap_err().to_string();
        assert!(error.contains("other files"), "{error}");
    }
}

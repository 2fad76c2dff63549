//! Checks that PTX matches the sources and passes the lints.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::backend::Backend;
use crate::build::{self, Builder};
use crate::header::Header;
use crate::job::Job;
use crate::lint::lint_file;
use crate::workspace::{Workspace, read, write};
use crate::{described, postprocess, ptxas, sources};

/// How many differing lines to show.
const SHOWN: usize = 5;

/// Checks the committed PTX, or what another back end's build has left.
///
/// 1. Its header's fingerprint and flags are those of the sources. This needs no compiler.
/// 2. It passes the lints, and ptxas assembles it for the newer architectures that run it too.
/// 3. A rebuild gives the same text, where the compiler is the one in the header. With another
///    compiler, the rebuilt PTX must pass the lints and `test` instead.
pub fn run(ws: &Workspace, job: &Job, test: &dyn Fn(&Path) -> Result<()>) -> Result<()> {
    let fix = fix(job);
    let text = read(&job.out).with_context(|| fix.clone())?;
    let header =
        Header::parse(&text).with_context(|| format!("{} has no header: {fix}", ws.display(&job.out)))?;
    check_header(ws, job, &header)?;
    println!("{}: header matches the sources", ws.display(&job.out));
    lint_file(ws, job, &job.out, &text)?;
    check_newer(ws, job, &text)?;

    let builder = match Builder::find(ws, job.backend) {
        Ok(builder) => builder,
        Err(error) => {
            println!("skipped the rebuild: {error:#}");
            return Ok(());
        }
    };
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
fn fix(job: &Job) -> String {
    match job.backend {
        Backend::InTree => format!("run `{}` and commit the result", job.command),
        backend => format!("run `{} --backend {backend}`", job.command),
    }
}

fn check_header(ws: &Workspace, job: &Job, header: &Header) -> Result<()> {
    let (file, fix) = (ws.display(&job.out), fix(job));
    ensure!(
        header.backend == job.backend.to_string(),
        "{file} was made by the {} back end: check it with `--backend {}`",
        header.backend,
        header.backend
    );
    let sources = sources::fingerprint(ws, &build::device_metadata(ws)?, &job.kernels.package)?;
    ensure!(
        header.sources == sources,
        "{file} is stale: the kernel sources or their dependencies changed; {fix}"
    );
    ensure!(header.flags == build::flags(ws, job), "{file} is stale: it was built with other flags; {fix}");
    Ok(())
}

fn compare(job: &Job, committed: &str, fresh: &str) -> Result<()> {
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

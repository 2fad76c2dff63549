//! `cargo xtask build-ptx --check` and `cargo xtask ptx-lint`: is the PTX what the sources say, and is it sound?

use anyhow::{Context, Result, bail, ensure};

use crate::backend::Backend;
use crate::build;
use crate::header::Header;
use crate::job::Job;
use crate::lint::lint_file;
use crate::toolchain::{self, Compiler};
use crate::workspace::{Workspace, env_path, read, run as run_command, write};
use crate::{postprocess, sources};

const FIX: &str = "run `cargo xtask build-ptx` and commit the result";

/// How many differing lines to show.
const SHOWN: usize = 5;

/// Checks the committed PTX.
///
/// 1. Its header's fingerprint and flags are those of the sources. This needs no compiler.
/// 2. It passes the lints.
/// 3. A rebuild gives the same text, where the compiler is the one in the header. With another compiler, the rebuilt PTX must pass
///    the lints and the test suite instead.
pub fn run(ws: &Workspace, job: &Job) -> Result<()> {
    ensure!(
        job.backend == Backend::InTree,
        "the committed PTX comes from the in-tree back end: check that one"
    );
    let text = read(&job.out).context(FIX)?;
    let header =
        Header::parse(&text).with_context(|| format!("{} has no header: {FIX}", ws.display(&job.out)))?;
    check_header(ws, job, &header)?;
    println!("{}: header matches the sources", ws.display(&job.out));
    lint_file(ws, job, &job.out, &text)?;

    let compiler = match toolchain::find_or_fetch(ws) {
        Ok(compiler) => compiler,
        Err(error) => {
            println!("skipped the rebuild: {error:#}");
            return Ok(());
        }
    };
    let fresh = build::compile_with(ws, job, &compiler)?;
    if compiler.version == header.compiler {
        return compare(&text, &fresh);
    }
    println!("the committed PTX was made by {}: testing the fresh PTX instead of comparing", header.compiler);
    test_fresh(ws, job, &fresh, &compiler)
}

fn check_header(ws: &Workspace, job: &Job, header: &Header) -> Result<()> {
    let file = ws.display(&job.out);
    let sources = sources::fingerprint(ws, &build::device_metadata(ws)?)?;
    ensure!(
        header.sources == sources,
        "{file} is stale: the kernel sources or their dependencies changed; {FIX}"
    );
    ensure!(header.flags == build::flags(job), "{file} is stale: it was built with other flags; {FIX}");
    Ok(())
}

fn compare(committed: &str, fresh: &str) -> Result<()> {
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
    bail!("the committed PTX is not what the same compiler makes of the sources; {FIX}")
}

fn test_fresh(ws: &Workspace, job: &Job, fresh: &str, compiler: &Compiler) -> Result<()> {
    let file = job.target_dir(ws).join("fresh.ptx");
    write(&file, fresh)?;
    lint_file(ws, job, &file, fresh)?;
    let mut tests = ws.cargo();
    if let Some(target_dir) = env_path("CARGO_TARGET_DIR") {
        tests.env("CARGO_TARGET_DIR", target_dir);
    }
    tests.env("EPOXIDE_PTX", &file).args(["test", "--release"]);
    tests.args(["--package", "epoxide", "--package", "epoxide-testing", "--package", "epoxide-cli"]);
    run_command(&mut tests).with_context(|| format!("the tests fail on PTX compiled by {}", compiler.version))
}

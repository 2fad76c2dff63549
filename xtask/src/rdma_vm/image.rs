//! The guest's root file system: a shell, the RDMA tools, kernel modules, and the program to run
//! with its shared libraries.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::cpio::Archive;
use super::parts::Parts;
use crate::workspace::{capture, files};

/// The first process of the guest.
const INIT: &str = include_str!("init.sh");
/// Programs that a test may call, besides busybox's.
const TOOLS: [&str; 10] = [
    "usr/bin/ibv_devices",
    "usr/bin/ibv_devinfo",
    "usr/bin/ibv_rc_pingpong",
    "usr/bin/ib_write_bw",
    "usr/bin/ib_write_lat",
    "usr/bin/ib_read_bw",
    "usr/bin/ib_send_bw",
    "usr/bin/rdma",
    "bin/ip",
    "sbin/tc",
];
const LIB: &str = "lib/x86_64-linux-gnu";
/// The folder of libibverbs's providers, which are loaded at run time, so no file lists them as a
/// dependency.
const PROVIDERS: &str = "usr/lib/x86_64-linux-gnu/libibverbs";

/// The program to run in the guest.
pub struct GuestJob {
    /// A program of this machine where the name has a `/` in it, else one of the guest.
    pub program: String,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// `NAME=VALUE` settings of its environment.
    pub env: Vec<String>,
    /// More files of this machine that are put beside it.
    pub with: Vec<PathBuf>,
}

/// The archive that the guest boots from.
pub fn build(parts: &Parts, job: &GuestJob) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for dir in ["proc", "sys", "dev", "tmp", "run", "root", "etc", "usr/bin", "test", LIB] {
        archive.dir(dir);
    }
    archive.link("lib64", "lib");
    archive.link("usr/lib", "../lib");
    archive.file("init", INIT.as_bytes());
    archive.file("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n");
    archive.file("etc/group", b"root:x:0:\n");
    archive.copy("bin/busybox", &parts.file("bin/busybox")?)?;
    program(&mut archive, parts, "bin/sh", &parts.file("bin/dash")?)?;
    for tool in TOOLS {
        let name = tool.rsplit('/').next().unwrap_or(tool);
        program(&mut archive, parts, &format!("usr/bin/{name}"), &parts.file(tool)?)?;
    }
    provider(&mut archive, parts)?;
    for module in files(&parts.modules(), "ko")? {
        archive.copy(&format!("lib/modules/{}", file_name(&module)?), &module)?;
    }
    let mut words = vec![job.program.clone()];
    if job.program.contains('/') {
        let path = Path::new(&job.program);
        program(&mut archive, parts, &format!("test/{}", file_name(path)?), path)?;
        words[0] = format!("./{}", file_name(path)?);
    }
    for file in &job.with {
        let path = format!("test/{}", file_name(file)?);
        ensure!(!archive.contains(&path), "--with {}: there is a file of this name already", file.display());
        program(&mut archive, parts, &path, file)?;
    }
    words.extend(job.arguments.iter().cloned());
    archive.file("test/run", script(&job.env, &words)?.as_bytes());
    Ok(archive.finish())
}

/// The shell script that starts the program.
fn script(env: &[String], words: &[String]) -> Result<String> {
    let mut script = String::from("#!/bin/sh\n");
    for setting in env {
        let (name, value) =
            setting.split_once('=').with_context(|| format!("--env {setting}: write NAME=VALUE"))?;
        let valid = |c: char| c.is_ascii_alphanumeric() || c == '_';
        ensure!(
            !name.is_empty() && name.chars().all(valid),
            "--env {setting}: `{name}` is no name of a variable"
        );
        script += &format!("export {name}={}\n", quote(value));
    }
    let words: Vec<String> = words.iter().map(|word| quote(word)).collect();
    Ok(script + "exec " + &words.join(" ") + "\n")
}

fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The RXE provider of libibverbs, and the file that registers it.
fn provider(archive: &mut Archive, parts: &Parts) -> Result<()> {
    let dir = parts.file(PROVIDERS)?;
    let is_rxe =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("librxe-"));
    let library = files(&dir, "so")?.into_iter().find(is_rxe);
    let library = library.with_context(|| format!("no librxe-*.so in {}", dir.display()))?;
    program(archive, parts, &format!("{LIB}/libibverbs/{}", file_name(&library)?), &library)?;
    archive.copy("etc/libibverbs.d/rxe.driver", &parts.file("etc/libibverbs.d/rxe.driver")?)
}

/// Adds a program or library, and the shared libraries it needs.
fn program(archive: &mut Archive, parts: &Parts, path: &str, source: &Path) -> Result<()> {
    let contents = std::fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
    archive.file(path, &contents);
    if !contents.starts_with(b"\x7fELF") {
        return Ok(());
    }
    // `ldd` fails for a statically linked file, which needs no libraries.
    let Ok(listing) = capture(parts.command("ldd").arg(source)) else { return Ok(()) };
    for library in libraries(&listing).with_context(|| format!("{} does not run here", source.display()))? {
        let name = file_name(&library)?;
        let dir = if name.starts_with("ld-linux") { "lib" } else { LIB };
        archive.copy(&format!("{dir}/{name}"), &library)?;
    }
    Ok(())
}

/// The files that `ldd` lists.
fn libraries(listing: &str) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for line in listing.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [name, "=>", "not", ..] => bail!("its library {name} is not found"),
            [_, "=>", file, ..] if file.starts_with('/') => files.push(file.into()),
            [file, ..] if file.starts_with('/') => files.push(file.into()),
            _ => {}
        }
    }
    Ok(files)
}

fn file_name(path: &Path) -> Result<String> {
    let name = path.file_name().with_context(|| format!("{} is no file", path.display()))?;
    Ok(name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_keeps_words_as_they_are() {
        let words = ["./a b".to_owned(), "it's".to_owned(), "$HOME".to_owned()];
        let text = script(&["KEY=a=b c".to_owned()], &words).unwrap();
        assert_eq!(text, "#!/bin/sh\nexport KEY='a=b c'\nexec './a b' 'it'\\''s' '$HOME'\n");
        assert!(script(&["KEY".to_owned()], &words).is_err());
        assert!(script(&["A B=1".to_owned()], &words).is_err());
    }

    #[test]
    fn reads_what_ldd_lists() {
        let listing = "\tlinux-vdso.so.1 (0x1)\n\tlibc.so.6 => /lib/libc.so.6 (0x2)\n\t/lib64/ld-linux-x86-64.so.2 (0x3)\n";
        let want: Vec<PathBuf> = vec!["/lib/libc.so.6".into(), "/lib64/ld-linux-x86-64.so.2".into()];
        assert_eq!(libraries(listing).unwrap(), want);
        let error = libraries("\tlibx.so.1 => not found\n").unwrap_err().to_string();
        assert!(error.contains("libx.so.1"), "{error}");
    }
}

//! A workspace on disk, and running other programs from it.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};

/// A cargo workspace.
#[derive(Clone, Debug)]
pub struct Workspace {
    /// Absolute path of its root folder.
    pub root: PathBuf,
}

impl Workspace {
    /// The workspace of this root folder.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The workspace that the folder `dir` lies in.
    pub fn around(dir: &Path) -> Result<Self> {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.current_dir(dir).args(["locate-project", "--workspace", "--message-format", "plain"]);
        strip_cargo_env(&mut command);
        let manifest = PathBuf::from(capture(&mut command)?);
        let root = manifest.parent().with_context(|| format!("{} has no folder", manifest.display()))?;
        Ok(Self::at(root))
    }

    /// The folder that products of the builder's own go to. Always inside the workspace,
    /// independent of `CARGO_TARGET_DIR`, so that later runs find earlier downloads.
    pub fn target(&self, name: &str) -> PathBuf {
        self.root.join("target").join(name)
    }

    /// `path` as seen from the root, for messages.
    pub fn display<'a>(&self, path: &'a Path) -> std::path::Display<'a> {
        path.strip_prefix(&self.root).unwrap_or(path).display()
    }

    /// A command in the root folder that calls cargo without the settings of the cargo that runs
    /// us.
    pub fn cargo(&self) -> Command {
        self.cargo_of(None)
    }

    /// The same with the cargo `program`. Without one it is the cargo that runs us.
    pub fn cargo_of(&self, program: Option<&Path>) -> Command {
        // `CARGO` is the real cargo, not rustup's proxy, so a pinned toolchain that is missing does
        // not stop it.
        let callers = || std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(program.map_or_else(callers, OsString::from));
        command.current_dir(&self.root);
        strip_cargo_env(&mut command);
        command
    }

    /// The same, with the build directory of the cargo that runs us, so that both share what is
    /// built.
    pub fn cargo_in_callers_target(&self) -> Command {
        let mut command = self.cargo();
        if let Some(target_dir) = env_path("CARGO_TARGET_DIR") {
            command.env("CARGO_TARGET_DIR", target_dir);
        }
        command
    }
}

/// Reads a text file; the error names it.
pub fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Writes a file and the folders above it; the error names it.
pub fn write(path: &Path, contents: impl AsRef<[u8]>) -> Result<()> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    }
    std::fs::write(path, contents).with_context(|| format!("cannot write {}", path.display()))
}

/// Creates `dir` anew, empty.
pub fn fresh_dir(dir: &Path) -> Result<()> {
    if dir.exists() {
        std::fs::remove_dir_all(dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    }
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))
}

/// Moves the finished `partial` directory to `dir`: `dir` is either absent or complete.
pub fn publish_dir(partial: &Path, dir: &Path) -> Result<()> {
    if dir.exists() {
        std::fs::remove_dir_all(dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    }
    std::fs::rename(partial, dir)
        .with_context(|| format!("cannot rename {} to {}", partial.display(), dir.display()))
}

/// The files of a folder with this extension, in order.
pub fn files(dir: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let mut files: Vec<PathBuf> = entries
        .map(|entry| Ok(entry?.path()))
        .filter(|path: &Result<PathBuf>| {
            path.as_ref().map_or(true, |path| path.extension().is_some_and(|e| e == extension))
        })
        .collect::<Result<_>>()?;
    files.sort();
    Ok(files)
}

/// The first file of this name on `PATH`.
pub fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| file.is_file())
}

/// A path from an environment variable that is set and not empty.
pub fn env_path(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Runs a command with its output on the terminal, and returns whether it succeeds.
pub fn succeeds(command: &mut Command) -> Result<bool> {
    Ok(status(command)?.success())
}

fn status(command: &mut Command) -> Result<ExitStatus> {
    command.stdin(Stdio::null()).status().with_context(|| cannot_start(command))
}

/// Runs a command with its output on the terminal; an error names the whole command.
pub fn run(command: &mut Command) -> Result<()> {
    let status = status(command)?;
    if !status.success() {
        bail!("`{}` failed: {status}", describe(command));
    }
    Ok(())
}

/// Runs a command and returns its standard output, trimmed.
pub fn capture(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| cannot_start(command))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed: {}\n{}", describe(command), output.status, stderr.trim_end());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The command as one could type it in bash: the variables it sets, the program, the arguments.
pub fn describe(command: &Command) -> String {
    let sets = command
        .get_envs()
        .filter_map(|(key, value)| Some(format!("{}={}", key.to_string_lossy(), quote(value?))));
    let words = std::iter::once(command.get_program()).chain(command.get_args()).map(quote);
    sets.chain(words).collect::<Vec<_>>().join(" ")
}

fn cannot_start(command: &Command) -> String {
    format!("cannot start `{}`", command.get_program().to_string_lossy())
}

/// A word as one could type it in bash.
pub(crate) fn quote(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=+./:,@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.into_owned();
    }
    // `$'..'` can also hold the 0x1f that stands between encoded rustc flags.
    let escaped = word.replace('\\', r"\\").replace('\'', r"\'").replace('\u{1f}', r"\037");
    if escaped == word { format!("'{word}'") } else { format!("$'{escaped}'") }
}

/// A program of the user's, without the settings of the cargo that runs us.
pub fn user_command(words: &[String]) -> Result<Command> {
    let (program, arguments) = words.split_first().context("a command begins with a program")?;
    let mut command = Command::new(program);
    command.args(arguments);
    strip_cargo_env(&mut command);
    Ok(command)
}

/// Removes from a nested cargo's environment the outer cargo's own variables (`CARGO_PKG_*`, ..)
/// and a user's settings for host builds (`RUSTFLAGS`, `RUSTC_WRAPPER`, ..).
fn strip_cargo_env(command: &mut Command) {
    const KEEP: [&str; 6] =
        ["CARGO_HOME", "CARGO_NET_", "CARGO_HTTP_", "CARGO_REGISTR", "CARGO_SOURCE_", "CARGO_TERM_"];
    const DROP: [&str; 5] = ["CARGO", "RUSTC", "RUSTFLAGS", "RUSTDOC", "RUSTUP_TOOLCHAIN"];
    for (key, _) in std::env::vars_os() {
        let Some(name) = key.to_str() else { continue };
        let starts_with_any = |list: &[&str]| list.iter().any(|prefix| name.starts_with(prefix));
        if starts_with_any(&DROP) && !starts_with_any(&KEEP) {
            command.env_remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn describe_quotes_what_a_shell_would_split() {
        let mut command = Command::new("cargo");
        command.env("FLAGS", "-a\u{1f}-b c").arg("build").arg("two words");
        assert_eq!(describe(&command), r"FLAGS=$'-a\037-b c' cargo build 'two words'");
    }
}

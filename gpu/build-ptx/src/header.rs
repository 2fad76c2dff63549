//! The comment lines at the top of a PTX file: its compiler, the command, and its sources.

use std::fmt;

/// Start of the first line, before the package and the command.
const TITLE: &str = "// Device code of ";

/// Where a PTX file comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The package that has the kernels.
    pub package: String,
    /// The command that compiles it.
    pub command: String,
    /// The back end that wrote it, by its command-line name.
    pub backend: String,
    /// Output of `rustc -V`.
    pub compiler: String,
    /// The code generation flags, without those that only rename paths.
    pub flags: String,
    /// The fingerprint of the kernel sources.
    pub sources: String,
    /// Files in the fingerprint that lie outside the libraries' folders, as seen from the
    /// workspace's root.
    pub files: Vec<String>,
    /// The hash of the text below the header. PTX of earlier builders has none.
    pub text: Option<String>,
}

impl Header {
    /// Reads the header of a PTX file; `None` where it has none or part of it is missing.
    pub fn parse(text: &str) -> Option<Self> {
        let lines: Vec<&str> = text.lines().take_while(|line| line.starts_with("//")).collect();
        let field = |name: &str| {
            let prefix = format!("// {name}: ");
            lines.iter().find_map(|line| line.strip_prefix(&prefix)).map(str::to_owned)
        };
        let title = lines.first()?.strip_prefix(TITLE)?.strip_suffix("`. Do not edit.")?;
        let (package, command) = title.split_once(", compiled by `")?;
        Some(Self {
            package: package.to_owned(),
            command: command.to_owned(),
            backend: field("backend")?,
            compiler: field("compiler")?,
            flags: field("flags")?,
            sources: field("sources")?,
            files: lines
                .iter()
                .filter_map(|line| line.strip_prefix("// file: "))
                .map(str::to_owned)
                .collect(),
            text: field("text"),
        })
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{TITLE}{}, compiled by `{}`. Do not edit.", self.package, self.command)?;
        writeln!(f, "// backend: {}", self.backend)?;
        writeln!(f, "// compiler: {}", self.compiler)?;
        writeln!(f, "// flags: {}", self.flags)?;
        writeln!(f, "// sources: {}", self.sources)?;
        self.files.iter().try_for_each(|file| writeln!(f, "// file: {file}"))?;
        self.text.iter().try_for_each(|hash| writeln!(f, "// text: {hash}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_header_is_read_back() {
        let header = Header {
            package: "own-kernels".into(),
            command: "cargo build-ptx".into(),
            backend: "in-tree".into(),
            compiler: "rustc 1.96.0 (abc 2026-05-25)".into(),
            flags: "-Ctarget-cpu=sm_90 -Cpanic=immediate-abort".into(),
            sources: "00ff".into(),
            files: vec!["../shared/k.rs".into(), "data/a table.bin".into()],
            text: Some("11aa".into()),
        };
        let text = format!("{header}\n.version 8.4\n");
        assert_eq!(Header::parse(&text), Some(header.clone()));
        let earlier = Header { files: Vec::new(), text: None, ..header };
        assert_eq!(Header::parse(&format!("{earlier}\n.version 8.4\n")), Some(earlier));
        assert_eq!(Header::parse(".version 8.4\n"), None);
    }
}

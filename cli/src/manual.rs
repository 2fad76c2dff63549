//! `epoxide completions` and `epoxide man`: made from the definition of the command line, so that they cannot fall behind it.

use std::path::PathBuf;

use clap::Command;
use clap_complete::Shell;

use crate::output;
use crate::stop::{Result, Stop};

/// Options of `epoxide completions`.
#[derive(Debug, clap::Args)]
pub struct CompletionArgs {
    /// The shell: `epoxide completions bash > /etc/bash_completion.d/epoxide`, say
    shell: Shell,
}

/// Options of `epoxide man`.
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// Write a page for each command into this folder, instead of printing the first one
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// Prints the script that completes the words of `command`.
pub fn completions(args: &CompletionArgs, mut command: Command) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "epoxide", &mut script);
    output::text_line(String::from_utf8_lossy(&script).trim_end())
}

/// Prints or writes the pages of `command`.
pub fn man(args: &ManArgs, command: Command) -> Result<()> {
    match &args.out {
        None => {
            let mut page = Vec::new();
            let made = clap_mangen::Man::new(command).render(&mut page);
            made.map_err(|error| Stop::failed(format!("man: {error}")))?;
            output::text_line(String::from_utf8_lossy(&page).trim_end())
        }
        Some(folder) => clap_mangen::generate_to(command, folder).map_err(|error| {
            Stop::usage(format!("--out {}: {error}; give a folder that is there", folder.display()))
        }),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::Cli;

    #[test]
    fn every_command_has_a_page_and_is_completed() {
        let folder = tempfile::tempdir().unwrap();
        man(&ManArgs { out: Some(folder.path().to_owned()) }, Cli::command()).unwrap();
        for name in
            ["epoxide.1", "epoxide-roundtrip.1", "epoxide-bench.1", "epoxide-bench-ab.1", "epoxide-doctor.1"]
        {
            let page = std::fs::read_to_string(folder.path().join(name)).unwrap();
            assert!(page.contains(".SH") && page.contains("epoxide"), "{name}");
        }
        let stop = man(&ManArgs { out: Some("/no/such/folder".into()) }, Cli::command()).unwrap_err();
        assert!(stop.code == crate::stop::USAGE && stop.message.unwrap().contains("/no/such/folder"));
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "epoxide", &mut script);
            let script = String::from_utf8(script).unwrap();
            assert!(script.contains("fail-if-slower") && script.contains("ranks-per-node"), "{shell}");
        }
    }
}

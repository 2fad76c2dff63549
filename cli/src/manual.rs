//! `epoxide completions` and `epoxide man`: made from the definition of the command line, so that
//! they cannot fall behind it.
//!
//! The feature `manual` brings the crates that make them. Without it both commands are bad usage;
//! `--help` lists them in any case.

use std::path::PathBuf;

use clap::Command;

use crate::error::{CommandError, Result};
#[cfg(feature = "manual")]
use crate::output;

/// Options of `epoxide completions`.
#[derive(Debug, clap::Args)]
pub struct CompletionArgs {
    /// The shell: `epoxide completions bash > /etc/bash_completion.d/epoxide`, say
    shell: ShellName,
}

/// Shells whose words can be completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "lower")]
enum ShellName {
    Bash,
    Elvish,
    Fish,
    PowerShell,
    Zsh,
}

/// Options of `epoxide man`.
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// Write a page for each command into this folder, instead of printing the first one
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// Prints the script that completes the words of `command`.
#[cfg(feature = "manual")]
pub fn completions(args: &CompletionArgs, command: Command) -> Result<()> {
    output::text_line(script(args.shell, command).trim_end())
}

#[cfg(feature = "manual")]
fn script(shell: ShellName, mut command: Command) -> String {
    let shell = match shell {
        ShellName::Bash => clap_complete::Shell::Bash,
        ShellName::Elvish => clap_complete::Shell::Elvish,
        ShellName::Fish => clap_complete::Shell::Fish,
        ShellName::PowerShell => clap_complete::Shell::PowerShell,
        ShellName::Zsh => clap_complete::Shell::Zsh,
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "epoxide", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Prints or writes the pages of `command`.
#[cfg(feature = "manual")]
pub fn man(args: &ManArgs, command: Command) -> Result<()> {
    match &args.out {
        None => {
            let mut page = Vec::new();
            let made = clap_mangen::Man::new(command).render(&mut page);
            made.map_err(|error| CommandError::failed(format!("man: {error}")))?;
            output::text_line(String::from_utf8_lossy(&page).trim_end())
        }
        Some(folder) => clap_mangen::generate_to(command, folder).map_err(|error| {
            CommandError::usage(format!("--out {}: {error}; give a folder that is there", folder.display()))
        }),
    }
}

/// Bad usage: the feature is off.
#[cfg(not(feature = "manual"))]
pub fn completions(_: &CompletionArgs, _: Command) -> Result<()> {
    Err(CommandError::without_feature("completions", "manual"))
}

/// Bad usage: the feature is off.
#[cfg(not(feature = "manual"))]
pub fn man(_: &ManArgs, _: Command) -> Result<()> {
    Err(CommandError::without_feature("man", "manual"))
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, ValueEnum};

    use super::*;
    use crate::Cli;
    use crate::error::USAGE;

    #[cfg(feature = "manual")]
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
        let error = man(&ManArgs { out: Some("/no/such/folder".into()) }, Cli::command()).unwrap_err();
        assert!(error.code == USAGE && error.message.unwrap().contains("/no/such/folder"));
        for shell in ShellName::value_variants() {
            let script = script(*shell, Cli::command());
            assert!(script.contains("fail-if-slower") && script.contains("ranks-per-node"), "{shell:?}");
        }
    }

    #[cfg(not(feature = "manual"))]
    #[test]
    fn without_the_feature_a_page_is_bad_usage_and_says_how_to_get_it() {
        let of_page = man(&ManArgs { out: None }, Cli::command()).unwrap_err();
        let of_script = completions(&CompletionArgs { shell: ShellName::Bash }, Cli::command()).unwrap_err();
        for (error, command) in [(of_page, "man"), (of_script, "completions")] {
            let message = error.message.unwrap();
            assert_eq!(error.code, USAGE, "{message}");
            let remedy = format!("`cargo run --release --features manual -- {command} ..`");
            assert!(message.contains(&remedy), "{message}");
        }
    }

    #[test]
    fn shells_have_their_usual_names() {
        let names = ShellName::value_variants().iter().map(|shell| shell.to_possible_value().unwrap());
        let names: Vec<String> = names.map(|name| name.get_name().to_owned()).collect();
        assert_eq!(names, ["bash", "elvish", "fish", "powershell", "zsh"]);
    }
}

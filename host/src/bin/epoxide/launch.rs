//! `epoxide launch`: starts the ranks of a group on this host.

use std::ffi::OsString;
use std::process::Command;
use std::time::Duration;

use epoxide::group::launch::spawn_ranks;

use crate::stop::{Result, Stop};

/// Options of `epoxide launch`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and EPOXIDE_STORE in its \
                        environment. The exit code is that of the first rank that failed; a signal is 128 + its number."
)]
pub struct Args {
    /// Ranks to start.
    #[arg(long, value_name = "P", value_parser = clap::value_parser!(u32).range(1..))]
    nproc_per_node: u32,

    /// Seconds that the other ranks get to end when one has failed.
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    grace: u64,

    /// The command of every rank.
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// Starts the ranks and waits for them.
pub fn run(args: Args) -> Result<()> {
    let Some((program, arguments)) = args.command.split_first() else {
        return Err(Stop::usage("launch: give the command of the ranks after --"));
    };
    let outcome = spawn_ranks(args.nproc_per_node, Duration::from_secs(args.grace), |_| {
        let mut command = Command::new(program);
        command.args(arguments);
        Ok(command)
    })?;
    let Some(rank) = outcome.first_failure else {
        return Ok(());
    };
    let code = outcome.code();
    let how = outcome.exits.get(rank as usize).map_or_else(String::new, ToString::to_string);
    let failed = Stop::failed(format!("launch: rank {rank} {how}"));
    Err(Stop { code: u8::try_from(code).unwrap_or(failed.code), ..failed })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn launch(line: &[&str]) -> Result<()> {
        let words = ["launch"].iter().chain(line);
        run(Line::try_parse_from(words).unwrap().args)
    }

    #[test]
    fn ranks_see_their_place_and_the_first_failure_is_passed_on() {
        let script = |text: &str| launch(&["--nproc-per-node", "3", "--", "sh", "-c", text]);
        assert_eq!(
            script(r#"test "$WORLD_SIZE$LOCAL_WORLD_SIZE" = 33 && test "$RANK" = "$LOCAL_RANK""#),
            Ok(())
        );
        let stop = script(r#"if [ "$RANK" = 1 ]; then exit 7; fi"#).unwrap_err();
        assert_eq!((stop.code, stop.message.as_deref()), (7, Some("launch: rank 1 exited with code 7")));
    }

    #[test]
    fn bad_lines_are_refused() {
        for line in
            [&["--nproc-per-node", "0", "--", "true"][..], &["--", "true"], &["--nproc-per-node", "2"]]
        {
            assert!(Line::try_parse_from(["launch"].iter().chain(line)).is_err(), "{line:?}");
        }
        assert_eq!(launch(&["--nproc-per-node", "1", "--", "/no/such/program"]).unwrap_err().code, 1);
    }
}

//! `epoxide launch`: starts the ranks of a group on this host.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use epoxide::internal::group::environment;
use epoxide_launch::{Launch, LaunchEnd, Nodes, Signals, Sinks};

use crate::error::{CommandError, Result};
use crate::output::complain;

/// The variable for `--node-timeout`.
const NODE_TIMEOUT: &str = "EPOXIDE_NODE_TIMEOUT";
/// Time for the reader of standard error once a signal has ended the launch.
const READER: Duration = Duration::from_secs(2);

/// Options of `epoxide launch`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Each rank finds the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ..) and \
                  EPOXIDE_STORE in its environment, and EPOXIDE_JOB_SECRET, without which nobody joins or ends the launch. On \
                  one node the secret is new; on several give each the same one, in EPOXIDE_JOB_SECRET or in a file of \
                  mode 0600 that EPOXIDE_JOB_SECRET_FILE names (`openssl rand -hex 32` makes one), or whoever reaches the \
                  ports can take part, as with torchrun. The exit code is that of the first rank that failed, or 128 + the \
                  number of the signal that ended it or the launch, also while it waits for other nodes: 130 after \
                  Ctrl-C, 143 after SIGTERM. A second Ctrl-C, or one behind SIGTERM or SIGHUP, kills the ranks at once. \
                  Started with SIGINT ignored, as a script's background job is, the launcher ignores it; the ranks do not."
)]
pub struct Args {
    /// Ranks to start on each node.
    #[arg(long, value_name = "P", value_parser = clap::value_parser!(u32).range(1..=1024))]
    nproc_per_node: u32,

    /// Nodes; run the command once on each.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536))]
    nnodes: u32,

    /// The number of this node, from 0.
    #[arg(long, value_name = "R", default_value_t = 0)]
    node_rank: u32,

    /// Host and port at which the first node's launcher listens, the same on every node. With one
    /// node rank 0 may listen there [default: any free port, with one node]
    #[arg(long, value_name = "H:P", value_parser = endpoint)]
    rdzv_endpoint: Option<(String, u16)>,

    /// Name of the run, for TORCHELASTIC_RUN_ID.
    #[arg(long, value_name = "ID")]
    rdzv_id: Option<String>,

    /// How often all ranks are started again after a failure.
    #[arg(long, value_name = "K", default_value_t = 0)]
    max_restarts: u32,

    /// Let the other ranks go on when one has failed, as those do that regroup. The exit code is that
    /// of the first failure, once all have ended. On one node, without restarts.
    #[arg(long)]
    keep_survivors: bool,

    /// Also write each rank's output to DIR/attempt_N/RANK/stdout.log and stderr.log.
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,

    /// Pass lines on as they are, without [rank R] before them.
    #[arg(long)]
    no_prefix: bool,

    /// Seconds between asking ranks to end (SIGTERM) and killing them.
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    grace: u64,

    /// Seconds that the launcher of another node may give no sign of life before the launch ends;
    /// the same on every node [default: EPOXIDE_NODE_TIMEOUT, else 30]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    node_timeout: Option<u64>,

    /// A command that stands without `--` in front: refused, with what to write.
    #[arg(hide = true, trailing_var_arg = true, value_name = "CMD", value_parser = stray)]
    stray: Vec<OsString>,

    /// The command of every rank.
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// Error for a command without `--`, with the corrected line.
fn stray(text: &str) -> Result<OsString, String> {
    Err(format!("the command of the ranks stands behind `--`: epoxide launch .. -- {text} .."))
}

/// Host and port; an IPv6 address has brackets.
fn endpoint(text: &str) -> Result<(String, u16), String> {
    let parsed = text.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    let (host, port) = parsed.ok_or("must be host:port, such as node0:29500")?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host = bare.unwrap_or(host);
    if host.is_empty() || port == 0 || (bare.is_none() && host.contains(':')) {
        return Err(
            "must be host:port with a port above 0, such as node0:29500 or [fe80::1]:29500".to_owned()
        );
    }
    Ok((host.to_owned(), port))
}

/// Starts the ranks and waits for them.
pub fn run(args: Args) -> Result<()> {
    let mut signals = Signals::catch()?;
    run_with(args, Some(&mut signals), Sinks::standard())
}

fn run_with(args: Args, signals: Option<&mut Signals>, sinks: Sinks) -> Result<()> {
    let Some((program, arguments)) = args.command.split_first() else {
        return Err(CommandError::usage("launch: give the command of the ranks after --"));
    };
    let default = Launch::new(args.nproc_per_node);
    let node_timeout = match args.node_timeout {
        Some(seconds) => Some(Duration::from_secs(seconds)),
        None => node_timeout_of_environment()?,
    };
    let launch = Launch {
        nodes: Nodes { count: args.nnodes, rank: args.node_rank, endpoint: args.rdzv_endpoint },
        max_restarts: args.max_restarts,
        keep_survivors: args.keep_survivors,
        grace: Duration::from_secs(args.grace),
        node_timeout: node_timeout.unwrap_or(default.node_timeout),
        log_dir: args.log_dir,
        prefix: !args.no_prefix,
        run_id: args.rdzv_id.unwrap_or(default.run_id),
        sinks,
        ..default
    };
    let ended = launch.run(signals, |_| {
        let mut command = Command::new(program);
        command.args(arguments);
        Ok(command)
    })?;
    let said = match (&ended.failure, ended.signal) {
        (None, None) => return Ok(()),
        (Some(failure), _) => format!("launch: {failure}"),
        (None, Some(signal)) => format!("launch: ended by signal {signal}"),
    };
    let error = launch_error(&ended, said);
    if ended.signal.is_none() {
        return Err(error);
    }
    // The reader of the output may have stalled, and a relay that was given up may hold standard
    // error.
    let (done, printed) = mpsc::channel();
    let code = error.code;
    let print = move || {
        error.message.iter().for_each(|message| complain(message));
        // A failure means that the wait below has ended.
        let _ = done.send(());
    };
    // If no thread can be started, the message is lost and the wait ends at once.
    let _ = std::thread::Builder::new().name("last line".to_owned()).spawn(print);
    let _ = printed.recv_timeout(READER);
    Err(CommandError::reported(code))
}

/// The timeout that the environment gives; an empty variable counts as unset.
fn node_timeout_of_environment() -> Result<Option<Duration>> {
    let Some(text) = environment(NODE_TIMEOUT) else { return Ok(None) };
    match text.parse() {
        Ok(seconds) if seconds > 0 => Ok(Some(Duration::from_secs(seconds))),
        _ => Err(CommandError::usage(format!("{NODE_TIMEOUT} = {text}: must be seconds, at least 1"))),
    }
}

/// The error of a command with a failed launch, with the launch's exit code.
pub fn launch_error(ended: &LaunchEnd, said: String) -> CommandError {
    let failed = CommandError::failed(said);
    CommandError { code: u8::try_from(ended.code()).unwrap_or(failed.code), ..failed }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::parse;

    fn launch(line: &[&str]) -> Result<()> {
        let words = ["launch"].iter().chain(line);
        let sinks = Sinks::new(Box::new(std::io::sink()), Box::new(std::io::sink()));
        run_with(parse(words).unwrap(), None, sinks)
    }

    #[test]
    fn ranks_see_their_place_and_the_first_failure_is_passed_on() {
        let script = |text: &str| launch(&["--nproc-per-node", "3", "--", "sh", "-c", text]);
        assert_eq!(
            script(r#"test "$WORLD_SIZE$LOCAL_WORLD_SIZE" = 33 && test "$RANK" = "$LOCAL_RANK""#),
            Ok(())
        );
        let error = script(r#"if [ "$RANK" = 1 ]; then exit 7; fi"#).unwrap_err();
        assert_eq!((error.code, error.message.as_deref()), (7, Some("launch: rank 1 exited with code 7")));
        let error = script(r#"if [ "$RANK" = 1 ]; then echo why >&2; kill -9 $$; fi"#).unwrap_err();
        let message =
            "launch: rank 1 was ended by signal 9 (SIGKILL); its last lines on standard error:\n  why";
        assert_eq!((error.code, error.message.as_deref()), (128 + 9, Some(message)));
    }

    #[test]
    fn bad_lines_are_refused() {
        for line in [
            &["--nproc-per-node", "0", "--", "true"][..],
            &["--", "true"],
            &["--nproc-per-node", "2"],
            &["--nproc-per-node", "2", "--rdzv-endpoint", "host", "--", "true"],
            &["--nproc-per-node", "2", "--rdzv-endpoint", "host:0", "--", "true"],
            &["--nproc-per-node", "2", "--rdzv-endpoint", "::1:29500", "--", "true"],
            &["--nproc-per-node", "2", "--nnodes", "0", "--", "true"],
        ] {
            assert!(parse::<Args>(["launch"].iter().chain(line)).is_err(), "{line:?}");
        }
        for line in [&["sh", "-c", "true"][..], &["./program"], &["sh", "-c", "true", "--", "x"]] {
            let line = [&["--nproc-per-node", "2"], line].concat();
            let error = parse::<Args>(["launch"].iter().chain(&line)).unwrap_err().to_string();
            assert!(error.contains(&format!("behind `--`: epoxide launch .. -- {} ..", line[2])), "{error}");
        }
        let error =
            parse::<Args>(["launch", "--nproc-per-node", "2", "--nnodez", "1", "--", "true"]).unwrap_err();
        assert!(error.to_string().contains("unexpected argument '--nnodez'"), "{error}");
        assert_eq!(launch(&["--nproc-per-node", "1", "--", "/no/such/program"]).unwrap_err().code, 1);
        for (line, named) in [
            (&["--nnodes", "2"][..], "rendezvous endpoint"),
            (&["--nnodes", "2", "--node-rank", "2"], "node rank = 2"),
            (&["--keep-survivors", "--max-restarts", "1"], "keep_survivors = with 1 nodes and 1 restarts"),
        ] {
            let line = [&["--nproc-per-node", "1"], line, &["--", "true"]].concat();
            let error = launch(&line).unwrap_err();
            assert_eq!(error.code, crate::error::USAGE);
            assert!(error.message.as_deref().is_some_and(|message| message.contains(named)), "{error:?}");
        }
    }

    #[test]
    fn endpoints_are_hosts_and_ports() {
        assert_eq!(endpoint("node0:29500"), Ok(("node0".to_owned(), 29500)));
        assert_eq!(endpoint("[::1]:1"), Ok(("::1".to_owned(), 1)));
    }
}

//! Ranks that put over verbs queues, and what can go wrong; run in virtual machines by
//! tests/rdma/run.sh.
//!
//! ```text
//! rdma_probe SCENARIO [--ranks N]
//! ```
//!
//! Starts N ranks as processes, which are all there are; or, in one of several VMs, this VM's
//! single rank. Exit codes: 0 if every rank passed the scenario, 1 if one did not, 2 for bad usage,
//! 77 without an RDMA device.

mod faults;
mod lost;
mod puts;
mod rank;

use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use epoxide::{Error, Result};

use rank::Rank;

/// Exit code where there is no RDMA device.
const UNAVAILABLE: u8 = 77;
/// Set for the processes that are ranks.
const IS_RANK: &str = "RDMA_PROBE_RANK";

#[derive(Parser)]
struct Options {
    /// Scenario to run
    scenario: Scenario,
    /// Ranks to start, where this is not one of several VMs
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=8))]
    ranks: u32,
    /// Puts on each queue
    #[arg(long, default_value_t = 200)]
    puts: u64,
    /// Queues to each peer
    #[arg(long, default_value_t = 2)]
    queues: u32,
    /// Seconds that the ranks may take
    #[arg(long, default_value_t = 60)]
    timeout: u64,
    /// One more put of each rank, larger than the card's largest message
    #[arg(long)]
    large: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Scenario {
    /// Random puts on all queues between all ranks; every byte and counter is checked
    Puts,
    /// The same, and rank 0's cable is out for two seconds in the middle
    LinkDown,
    /// Rank 0's cable is pulled out for good: an error on all ranks
    LinkLost,
    /// Rank 0's network interface is set down: an error on all ranks
    InterfaceDown,
    /// A key that the peer's card does not know: an error
    WrongKey,
    /// A put behind the end of the peer's region: an error
    SmallRegion,
    /// Rank 1 is killed: an error on the others
    PeerKilled,
    /// A put waits for a network that is gone, and is interrupted
    Interrupted,
    /// Rank 1 has left: the next put is an error
    Goodbye,
    /// Rank 1 is killed while it dispatches: the others give up in time, and go on without it
    KilledInDispatch,
    /// The same while it combines
    KilledInCombine,
    /// Rank 1's cable is out for good: all give up in time, and go on alone
    Unplugged,
}

impl Scenario {
    /// Whether rank 1 is to be killed.
    fn kills(self) -> bool {
        matches!(self, Scenario::PeerKilled | Scenario::KilledInDispatch | Scenario::KilledInCombine)
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    if std::env::var_os(IS_RANK).is_none() {
        return start_ranks(&options);
    }
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("rank {}: {error}", std::env::var("RANK").unwrap_or_default());
            ExitCode::from(if matches!(error, Error::Unavailable { .. }) { UNAVAILABLE } else { 1 })
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let rank = Rank::join(Duration::from_secs(options.timeout))?;
    match options.scenario {
        Scenario::Puts => puts::run(&rank, options.queues, options.puts, options.large, None),
        Scenario::LinkDown => {
            puts::run(&rank, options.queues, options.puts, options.large, Some(Duration::from_secs(2)))
        }
        Scenario::LinkLost => faults::link_lost(&rank, || puts::pull_cable(None)),
        Scenario::InterfaceDown => faults::link_lost(&rank, faults::interface_down),
        Scenario::WrongKey => faults::wrong_key(&rank),
        Scenario::SmallRegion => faults::small_region(&rank),
        Scenario::PeerKilled => faults::peer_killed(&rank),
        Scenario::Interrupted => faults::interrupted(&rank),
        Scenario::Goodbye => faults::goodbye(&rank),
        Scenario::KilledInDispatch => lost::run(&rank, lost::How::InDispatch),
        Scenario::KilledInCombine => lost::run(&rank, lost::How::InCombine),
        Scenario::Unplugged => lost::run(&rank, lost::How::Unplugged),
    }
}

/// Starts this VM's ranks and judges how they end. None outlives the deadline.
fn start_ranks(options: &Options) -> ExitCode {
    let vms = std::env::var("EPOXIDE_VMS").is_ok_and(|vms| vms != "1");
    let mut children: Vec<(u32, Child)> = Vec::new();
    for local in 0..if vms { 1 } else { options.ranks } {
        match start(options, local, vms) {
            Ok(child) => children.push(child),
            Err(error) => {
                println!("cannot start a rank: {error}");
                children.iter_mut().for_each(|(_, child)| drop(child.kill()));
                return ExitCode::FAILURE;
            }
        }
    }
    // The ranks have deadlines of their own; this is for one that hangs all the same.
    let deadline = Instant::now() + Duration::from_secs(options.timeout) * 2;
    let mut code = 0;
    for (rank, mut child) in children {
        let status = wait(&mut child, deadline);
        let as_wanted = match status {
            Some(status) if options.scenario.kills() && rank == 1 => killed(status),
            Some(status) => status.success(),
            None => false,
        };
        if !as_wanted {
            println!(
                "rank {rank} ended wrongly: {}",
                status.map_or("it hung".into(), |status| status.to_string())
            );
            let skipped = status.and_then(|status| status.code()) == Some(UNAVAILABLE.into());
            code = if skipped && code != 1 { UNAVAILABLE } else { 1 };
        }
    }
    ExitCode::from(code)
}

fn start(options: &Options, local: u32, vms: bool) -> std::io::Result<(u32, Child)> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1)).env(IS_RANK, "1");
    let rank = if vms {
        std::env::var("RANK").ok().and_then(|rank| rank.parse().ok()).unwrap_or(0)
    } else {
        command.env("RANK", local.to_string()).env("LOCAL_RANK", local.to_string());
        command.env("WORLD_SIZE", options.ranks.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", "29500");
        local
    };
    Ok((rank, command.spawn()?))
}

fn killed(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt as _;
    status.signal() == Some(9)
}

fn wait(child: &mut Child, deadline: Instant) -> Option<ExitStatus> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(10)),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
        }
    }
}

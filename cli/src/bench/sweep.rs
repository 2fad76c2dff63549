//! `--sweep`: measures what is missing, with a progress line, and says which is best.

use std::io::IsTerminal;
use std::path::Path;

use epoxide_bench::results::Point;
use epoxide_bench::sweep::{self, Run, Sweep, summary};
use epoxide_bench::{Error, Plan};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::Args;
use super::report;
use super::start::{launched, open};
use crate::options::{Mode, WorldFlags};
use crate::output;
use crate::stop::{Result, Stop};

/// Measures what `out` does not hold yet; gives the points of this sweep, old and new.
pub fn run(args: &Args, plan: &Plan, sweep: &Sweep, out: &Path) -> Result<Vec<Point>> {
    let bar = ProgressBar::new(0);
    if !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} ({eta})") {
        bar.set_style(style);
    }
    let launched = launched()?;
    let topology = |nodes, ranks_per_node| {
        let place = WorldFlags { mode: None, nodes: Some(nodes), ranks_per_node: Some(ranks_per_node) };
        let topology = place.topology(Mode::Intranode, launched);
        topology.map_err(|stop| Error::Usage(stop.message.unwrap_or_default()))
    };
    let progress = |group: &Plan, done: usize, total: usize| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
        bar.set_message(format!("{} ranks, {} tokens", group.topology.ranks(), group.tokens));
    };
    let open = |rank| open(args.device, rank);
    let swept = sweep::run(plan, sweep, out, &Run { topology: &topology, open: &open, progress: &progress });
    bar.finish_and_clear();
    let swept = swept?;
    for reason in &swept.skipped {
        output::complain(&format!("skipped: {reason}"));
    }
    if swept.points.is_empty() {
        return Err(Stop::skipped("bench: no point of the sweep can be run here"));
    }
    output::text_line(&summary(&swept.points))?;
    if args.graph.is_some() {
        output::text_line(report::replays(&swept.points).trim_end())?;
    }
    Ok(swept.points)
}

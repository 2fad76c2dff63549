//! `--sweep`: measures the missing points, with a progress line, and prints the best one.

use std::path::Path;

use epoxide_bench::results::Point;
use epoxide_bench::sweep::{self, Means, Sweep, summary};
use epoxide_bench::{Error, Plan, ways};

use super::Args;
use super::report;
use super::start::open;
use crate::error::{CommandError, Result};
use crate::output::{self, Progress};

/// Measures what `out` does not hold yet; gives the points of this sweep, old and new.
pub fn run(args: &Args, plans: &[Plan], sweep: &Sweep, out: &Path) -> Result<Vec<Point>> {
    let Some(plan) = plans.first() else { return Ok(Vec::new()) };
    let sweep = &match plans.len() {
        1 => sweep.clone(),
        _ => sweep.clone().or_tokens(plans.iter().map(|plan| plan.tokens).collect()),
    };
    let bar = Progress::new("bench", 0, true);
    let plan_on = |nodes, ranks_per_node| {
        let plan = args.plan_on(nodes, ranks_per_node);
        plan.map_err(|error| Error::Usage(error.message.unwrap_or_default()))
    };
    let progress = |group: &Plan, done: usize, total: usize| {
        bar.reached(
            format!("{} ranks, {} tokens", group.topology.ranks(), group.tokens),
            done as u64,
            total as u64,
        );
    };
    let open = |rank| open(args.sizes.device, rank);
    let how = Means { plan: &plan_on, open: &open, progress: &progress, watch: &() };
    let swept = sweep::run(plan, sweep, out, &how);
    drop(bar);
    let swept = swept?;
    for (left_out, reason) in &swept.left_out {
        let (ranks, tokens) = (left_out.topology.ranks(), left_out.tokens);
        let sms = left_out.num_sms.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        output::complain(&format!("left out: {ranks} ranks, {tokens} tokens, {sms} SMs: {reason}"));
    }
    if swept.points.is_empty() {
        // The first reason decides the exit code: bad usage, or a machine that lacks something.
        let (_, reason) =
            swept.left_out.into_iter().next().ok_or_else(|| CommandError::usage("--sweep: no points"))?;
        return Err(reason.into());
    }
    output::text_line(&summary(&swept.points))?;
    if let Some(ways) = ways::summary(&swept.points) {
        output::text_line(&ways)?;
    }
    if args.sizes.graph.is_some() {
        output::text_line(report::replays(&swept.points).trim_end())?;
    }
    Ok(swept.points)
}

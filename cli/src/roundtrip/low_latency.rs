//! Low latency in the acceptance test: rows of random bytes from the first on.

use std::time::Duration;

use epoxide::low_latency::{Buffer, Options, Shape};
use epoxide_testing::low_latency::{LowLatencyRank, Segments};
use epoxide_testing::roundtrip::{Replays, RoundTrip};

use super::report::{ConfigReport, RankReport};
use super::{Acceptance, Script, failure_of};
use crate::error::Result;
use crate::options::Settings;
use crate::ranks::RankContext;

impl Acceptance for Buffer {
    fn options(settings: &Settings) -> Options {
        let shape = Shape {
            max_tokens: settings.tokens.max(1),
            hidden: settings.hidden,
            num_topk: settings.topk,
            num_experts: settings.experts,
        };
        let options = Options::new(shape)
            .timeout(Duration::from_secs(settings.timeout))
            .num_sms(settings.num_sms)
            .ranks_per_node(settings.ranks / settings.nodes)
            .transport(settings.network());
        let options = match Segments::of_draws(settings.experts) {
            Some(of) => options.rows_by_expert(shape.most_rows_by_expert(settings.ranks, of.alignment)),
            None => options,
        };
        if settings.keep_nodes { options.keep_nodes() } else { options }
    }

    fn config(context: &RankContext, rank: &LowLatencyRank) -> ConfigReport {
        ConfigReport::new(context, rank.buffer.rows(), rank.buffer.pool_bytes())
    }

    fn first_checks(script: &mut Script<'_>, rank: &mut LowLatencyRank) -> Result<()> {
        script.console.doing("every bit against the oracle");
        let cases = Buffer::first_cases(&script.cases);
        let rows = cases.iter().try_fold(0, |_, case| rank.round_trip(case));
        let report = rows.map(|rows| RankReport {
            rank: rank.rank,
            num_tokens: script.cases.sizes.tokens,
            num_recv_tokens: rows as u32,
            first_data: None,
            failure: rank.take_failure(),
        });
        let reports = script.context.gather(report.map_err(Into::into))?;
        let seconds = script.lap();
        (script.publish)(&|report| {
            report.ranks.clone_from(&reports);
            report.times.bit_for_bit_seconds = seconds;
        });
        reports.iter().try_for_each(|report| failure_of(report.rank, report.failure.clone()))?;
        let pool = if script.cases.nodes == 1 { ", in the pool" } else { "" };
        script.console.line(format!(
            "[verify] OK (rows by expert, summed already{pool}: contents, tables, counts, expert-major copies and segments, exact sums)"
        ));
        Ok(())
    }

    fn rows_text(_: u64) -> String {
        String::new()
    }

    fn replays_text(replays: u64, _: Replays, _: f64) -> String {
        format!("{replays} replays of 3 pairs, exact sums")
    }
}

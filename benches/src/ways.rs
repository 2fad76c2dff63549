//! Finds the fastest way to do the work of a dispatch and its combine.

use std::fmt::Write;

use crate::results::{Key, PhaseName, Point, Slowest, Way};

impl Way {
    /// Name above a column.
    fn short(self) -> &'static str {
        match self {
            Way::HighThroughput => "high throughput",
            Way::LowLatency => "low latency",
            Way::NcclAllToAll => "NCCL a2a",
            Way::NcclAllGather => "NCCL ag + rs",
        }
    }
}

/// The three things that every way does.
pub const STEPS: [&str; 3] = ["dispatch", "combine", "pair"];
const PAIR: usize = 2;

impl Point {
    /// Times of a way for each of [`STEPS`], timed alike for all ways; `None` if not measured.
    pub fn way(&self, way: Way) -> [Option<&Slowest>; 3] {
        if way == Way::HighThroughput {
            let phase = |name| self.phase(name)?.slowest.as_ref();
            let pair = self.pair.as_ref().map(|pair| &pair.period);
            return [phase(PhaseName::DispatchCached), phase(PhaseName::CombineInPool), pair];
        }
        match self.baselines.iter().find(|result| result.way == way) {
            None => [None; 3],
            Some(of) => [of.dispatch.slowest.as_ref(), of.combine.slowest.as_ref(), Some(&of.pair.period)],
        }
    }

    /// Whether the host's launches limit the pairs of a way: a pair then takes longer than a
    /// dispatch and a combine, each by itself.
    pub fn launches_limit(&self, way: Way) -> bool {
        match self.way(way) {
            [Some(dispatch), Some(combine), Some(pair)] => {
                !self.is_virtual && pair.p50_us > dispatch.p50_us + combine.p50_us
            }
            _ => false,
        }
    }

    /// The ways by their medians for one of [`STEPS`], fastest first, without pairs that the host's
    /// launches limit.
    pub fn ranking(&self, step: usize) -> Vec<(Way, f64)> {
        let counts = |way: &Way| step != PAIR || !self.launches_limit(*way);
        let took = |way: Way| Some((way, self.way(way)[step]?.p50_us));
        let mut ways: Vec<(Way, f64)> = Way::ALL.into_iter().filter(counts).filter_map(took).collect();
        ways.sort_by(|a, b| a.1.total_cmp(&b.1));
        ways
    }

    /// For one of [`STEPS`] the median of the fastest way of epoxide over that of the others.
    pub fn ratio(&self, step: usize) -> Option<f64> {
        let ranking = self.ranking(step);
        let best = |ours| ranking.iter().find(|(way, _)| way.is_ours() == ours).map(|(_, us)| *us);
        best(true).zip(best(false)).map(|(ours, theirs)| ours / theirs).filter(|ratio| ratio.is_finite())
    }
}

/// For each size, and each of dispatch, combine and pair: the times of every way, the fastest way,
/// and its margin.
pub fn summary(points: &[Point]) -> Option<String> {
    let measured: Vec<&Point> = points.iter().filter(|point| !point.baselines.is_empty()).collect();
    let first = measured.first()?;
    let unit = if first.is_virtual { first.caveat() } else { "us" };
    let chain = first.pair.as_ref().map_or(0, |pair| pair.chain);
    let mut out = format!(
        "  ways, median of each iteration's slowest rank, {unit}; pair: {chain} one after the other, time of one\n  \
         nodes ranks  tokens  SMs {:8}",
        ""
    );
    // Writing to a string cannot fail.
    for way in Way::ALL {
        let _ = write!(out, " {:>15}", way.short());
    }
    let _ = write!(out, " | {:>14} | fastest", "epoxide / NCCL");
    for point in &measured {
        let Key { nodes, num_ranks, tokens, num_sms, .. } = &point.key;
        for (step, name) in STEPS.iter().enumerate() {
            let _ = write!(out, "\n  {nodes:>5} {num_ranks:>5} {tokens:>7} {num_sms:>4} {name:<8}");
            for way in Way::ALL {
                let mark = if step == PAIR && point.launches_limit(way) { "*" } else { "" };
                let took = point.way(way)[step].map_or("-".into(), |of| format!("{:.1}{mark}", of.p50_us));
                let _ = write!(out, " {took:>15}");
            }
            let ratio = point.ratio(step).map_or("-".into(), |ratio| format!("{ratio:.2}"));
            let _ = write!(out, " | {ratio:>14} | {}", fastest(&point.ranking(step)));
        }
    }
    if measured.iter().any(|point| Way::ALL.into_iter().any(|way| point.launches_limit(way))) {
        out += "\n  *: longer than a dispatch and a combine: the host's launches limit it, and it is not compared";
    }
    if first.is_virtual {
        out += "\n  what stands in for NCCL beside a virtual GPU works on the host, ahead of the stream: its times are of nothing";
    }
    Some(out)
}

fn fastest(ranking: &[(Way, f64)]) -> String {
    match ranking {
        [(way, us), (next, next_us), ..] if *us > 0.0 => {
            format!("{}: {} takes {:.2} times as long", way.text(), next.text(), next_us / us)
        }
        [(way, _), ..] => way.text().into(),
        [] => "-".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{Pairs, Phase, WayResult};
    use crate::tests::h200;

    fn slowest(us: f64) -> Slowest {
        Slowest::new(&[&[us, us]])
    }

    /// A point with the given times of ways for dispatch, combine and pair.
    fn point(tokens: u32, own: [f64; 3], others: &[(Way, [f64; 3])]) -> Point {
        let mut point = h200().remove(0);
        point.key.tokens = tokens;
        let phase = |point: &Point, name, us| Phase {
            slowest: Some(slowest(us)),
            ..point.phase(name).cloned().unwrap()
        };
        let pairs = |us| Pairs { chain: 4, period: slowest(us) };
        let result = |&(way, us): &(Way, [f64; 3])| WayResult {
            way,
            dispatch: phase(&point, PhaseName::DispatchCached, us[0]),
            combine: phase(&point, PhaseName::CombineInPool, us[1]),
            pair: pairs(us[2]),
            dispatch_link_bytes: 1.0,
            combine_link_bytes: 2.0,
        };
        let baselines = others.iter().map(result).collect();
        for of in &mut point.phases {
            let us = if of.name.is_dispatch() { own[0] } else { own[1] };
            of.slowest = Some(slowest(us));
        }
        (point.pair, point.baselines) = (Some(pairs(own[2])), baselines);
        point
    }

    #[test]
    fn the_fastest_way_is_named_for_each_size_and_step() {
        let (low, one, all) = (Way::LowLatency, Way::NcclAllToAll, Way::NcclAllGather);
        let small = point(
            1,
            [12.0, 14.0, 20.0],
            &[(low, [16.0, 10.0, 15.0]), (one, [60.0, 5.0, 60.0]), (all, [24.0, 25.0, 45.0])],
        );
        // Low latency has no sizes like that.
        let large = point(
            8192,
            [800.0, 900.0, 1700.0],
            &[(one, [1000.0, 990.0, 1990.0]), (all, [1200.0, 810.0, 1700.0])],
        );
        let without = h200().remove(0);
        assert!(summary(std::slice::from_ref(&without)).is_none());
        let table = summary(&[without, small.clone(), large]).unwrap();
        let lines: Vec<Vec<&str>> =
            table.lines().skip(2).map(|line| line.split('|').map(str::trim).collect()).collect();
        let expected = [
            ("dispatch", "0.50", "epoxide high throughput: epoxide low latency takes 1.33 times as long"),
            ("combine", "2.00", "NCCL all-to-all: epoxide low latency takes 2.00 times as long"),
            ("pair", "0.33", "epoxide low latency: epoxide high throughput takes 1.33 times as long"),
            ("dispatch", "0.80", "epoxide high throughput: NCCL all-to-all takes 1.25 times as long"),
            (
                "combine",
                "1.11",
                "NCCL all-gather + reduce-scatter: epoxide high throughput takes 1.11 times as long",
            ),
            (
                "pair",
                "1.00",
                "epoxide high throughput: NCCL all-gather + reduce-scatter takes 1.00 times as long",
            ),
        ];
        assert_eq!(lines.len(), expected.len(), "{table}");
        for (line, (step, ratio, fastest)) in lines.iter().zip(expected) {
            assert!(line[0].contains(step) && line[1..] == [ratio, fastest], "{line:?}");
        }
        assert!(lines[3][0].contains(" - ") && !table.contains("VIRTUAL"), "{table}");
        assert_eq!(
            small.ranking(0).iter().map(|(way, _)| *way).collect::<Vec<_>>(),
            [Way::HighThroughput, low, all, one]
        );

        assert!(!table.contains('*'), "{table}");

        // Another run's iterations follow.
        let mut both = small.clone();
        both.add_runs(small);
        assert!(Way::ALL.iter().all(|way| both.way(*way).iter().all(|of| of.unwrap().samples_us.len() == 4)));
    }

    #[test]
    fn pairs_that_the_hosts_launches_limit_are_marked_and_not_compared() {
        let (one, all) = (Way::NcclAllToAll, Way::NcclAllGather);
        let limited = (one, [12.0, 12.0, 36.0]);
        let alone = point(1, [12.0, 14.0, 20.0], &[limited]);
        assert_eq!((alone.ratio(0), alone.ratio(PAIR)), (Some(1.0), None));
        let beside = point(1, [12.0, 14.0, 20.0], &[limited, (all, [15.0, 16.0, 25.0])]);
        assert_eq!(beside.ratio(PAIR), Some(0.8));
        // One of epoxide's own.
        let own = point(1, [12.0, 14.0, 27.0], &[(one, [12.0, 12.0, 24.0])]);
        assert_eq!(own.ratio(PAIR), None);
        let table = summary(&[alone, beside, own]).unwrap();
        let pairs: Vec<&str> = table.lines().filter(|line| line.contains(" pair ")).collect();
        let expected = [
            ("36.0*", "| - |", "epoxide high throughput"),
            ("36.0*", "| 0.80 |", "epoxide high throughput: NCCL all-gather"),
            ("27.0*", "| - |", "NCCL all-to-all"),
        ];
        assert_eq!(pairs.len(), expected.len(), "{table}");
        for (line, (time, ratio, fastest)) in pairs.into_iter().zip(expected) {
            let words = line.split_whitespace().collect::<Vec<_>>().join(" ");
            assert_eq!(line.matches('*').count(), 1, "{line}");
            assert!(words.contains(&format!(" {time} ")) && words.contains(ratio), "{line}");
            assert!(words.rsplit('|').next().unwrap().trim().starts_with(fastest), "{line}");
        }
        assert!(table.contains("*: longer than a dispatch and a combine"), "{table}");

        // Times of the virtual GPU are of nothing.
        let mut of_virtual = point(1, [12.0, 14.0, 20.0], &[limited]);
        of_virtual.is_virtual = true;
        assert!(!of_virtual.launches_limit(one));
    }
}

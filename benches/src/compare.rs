//! Ratios of two results, with their spread, and whether they mean anything.
//!
//! The unit is the run: a buffer and rows of its own, warmed up and timed. Iterations of one run
//! share its conditions (memory, clocks, other load). They agree with each other better than with
//! the next run's, so a test over iterations would find nearly every pair of runs different. The
//! median of a run counts.
//!
//! If runs of A and B alternated, with a random order within each pair, the random order itself
//! gives the test. If A and B are the same, the opposite result of each pair is equally likely. So
//! every choice of signs of the pairs' log ratios is as likely as the observed one, for any noise
//! and any drift from pair to pair. If they did not alternate, runs are exchanged between the
//! sides, which assumes that the machine did not change between them. Virtual GPUs, whose machine
//! has other work, then get no verdict.
//!
//! Phases of a run are compared together: an arrangement counts against a phase if *any* phase
//! stands out as much in it. So the chance of an alarm holds for the whole comparison. Correlated
//! phases do not lose power by it (max T of Westfall and Young, in one step). Differences below a
//! tolerance are noise, whatever the test's result.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt::Write;

use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};

use crate::results::{Key, Phase, Point, Run, Slowest, mean, percentile};
use crate::{Error, Result};

/// Chance that a comparison of equal things calls any of its phases different.
pub const ALPHA: f64 = 0.005;
/// Fewer iterations a run have no median worth the name.
const FEWEST_SAMPLES: usize = 5;
/// Fewest pairs whose signs can be chosen in so many ways that all alike is less likely than
/// [`ALPHA`].
pub const FEWEST_PAIRS: usize = 9;
/// The same of runs that did not alternate, on each side.
pub const FEWEST_RUNS: usize = 6;
/// Up to this many pairs, or runs of both sides, all arrangements are enumerated.
const EXACT: usize = 16;
/// Otherwise so many are drawn.
const DRAWN: usize = 20_000;
/// An interval whose ends differ by more than this factor does not show equality either.
const WIDEST: f64 = 1.1;
/// Bootstrap resamples.
const RESAMPLES: usize = 2000;

/// Verdict on a difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// B takes less time.
    Faster,
    /// B takes more time.
    Slower,
    /// Not distinguishable from chance, or below the tolerance.
    Noise,
    /// Not distinguishable from chance, but the ratio's interval is wide.
    TooWide,
    /// Runs of fewer iterations than the test requires.
    TooFewSamples(usize),
    /// Fewer runs, or pairs of runs, than the test requires.
    TooFewRuns(usize, usize),
    /// Runs of virtual GPUs that did not alternate.
    Apart,
    /// A run's median is not above 0, so it has no ratio to another.
    NoTime,
}

impl Verdict {
    fn text(self) -> String {
        match self {
            Verdict::Faster => "faster".into(),
            Verdict::Slower => "slower".into(),
            Verdict::Noise => "noise".into(),
            Verdict::TooWide => {
                format!("not told: the interval is wider than {:.0}%", (WIDEST - 1.0) * 100.0)
            }
            Verdict::TooFewSamples(have) => format!("too few samples ({have} < {FEWEST_SAMPLES})"),
            Verdict::TooFewRuns(have, need) => format!("too few runs ({have} < {need})"),
            Verdict::Apart => "not told: runs did not alternate".into(),
            Verdict::NoTime => "not told: a run's median is not above 0".into(),
        }
    }

    /// How to get one.
    fn remedy(self) -> String {
        match self {
            Verdict::Faster | Verdict::Slower | Verdict::Noise => String::new(),
            Verdict::TooWide => {
                "make more runs (--repeat), of more iterations, or on a machine without other work".into()
            }
            Verdict::TooFewSamples(_) => format!("measure with --iters {FEWEST_SAMPLES} or more"),
            Verdict::TooFewRuns(_, need) => {
                format!("measure with `epoxide bench ab --repeat {}` or more", need.max(FEWEST_PAIRS))
            }
            Verdict::Apart => "measure with `epoxide bench ab`, which alternates".into(),
            Verdict::NoTime => "measure larger sizes, or without --between-us".into(),
        }
    }

    /// Whether there is one.
    pub fn is_told(self) -> bool {
        matches!(self, Verdict::Faster | Verdict::Slower | Verdict::Noise)
    }
}

/// One thing that both sides timed.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// The sizes.
    pub key: Key,
    /// The timed operation.
    pub what: String,
    /// The runs' medians, of A and of B: their geometric mean over runs.
    pub median_us: (f64, f64),
    /// B over A: the one median over the other, which is the geometric mean of the pairs' ratios
    /// where there are pairs.
    pub ratio: f64,
    /// 95% of the bootstrap's ratios lie here; `None` for single runs.
    pub interval: Option<(f64, f64)>,
    /// The probability that any line differs as much if A and B are the same.
    pub p: Option<f64>,
    /// The verdict.
    pub verdict: Verdict,
    /// Logarithms of the runs' medians, in order.
    logs: (Vec<f64>, Vec<f64>),
    /// Whether run i of A and run i of B are a pair.
    paired: bool,
}

/// All that both sides timed.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// Point by point, phase by phase.
    pub lines: Vec<Line>,
    /// Difference that counts as noise.
    tolerance: f64,
    /// Points of A and of B without a partner.
    alone: (usize, usize),
    /// The same of what was timed of points with one.
    alone_lines: (usize, usize),
    /// Points that a later program or driver measured again.
    replaced: (usize, usize),
    /// Devices, drivers and settings in which points differ from their partners.
    differences: BTreeSet<String>,
    /// The kernels of A and of B, for people.
    kernels: [String; 2],
    is_virtual: bool,
}

/// A timed phase: the median of each run.
struct Timed {
    what: String,
    runs_us: Vec<f64>,
    /// Iterations of a run.
    samples: usize,
}

/// Whether two points have the same sizes.
fn is_like(a: &Point, b: &Point) -> bool {
    let (mut a, mut b) = (Cow::Borrowed(&a.key), Cow::Borrowed(&b.key));
    if a.chunk_tokens.is_some() {
        // Low latency of schema version 1 has no seed: there the digest of the routing decides.
        (a.to_mut().seed, b.to_mut().seed) = (0, 0);
    }
    a == b
}

/// Whether two points may be of the same routing. Files of before have no digest.
fn may_share_routing(a: &Point, b: &Point) -> bool {
    a.routing_digest.as_ref().zip(b.routing_digest.as_ref()).is_none_or(|(a, b)| a == b)
}

/// Whether two points of the same sizes are of the same measurement, by whichever program.
fn are_of_one_measurement(a: &Point, b: &Point) -> bool {
    let settings = |point: &Point| {
        let Point { warmup, iters, shapes, settings, is_virtual, .. } = *point;
        (warmup, iters, shapes, settings, is_virtual)
    };
    settings(a) == settings(b) && (&a.device, &a.nccl) == (&b.device, &b.nccl) && may_share_routing(a, b)
}

/// Devices, drivers and settings in which two points differ, by the names of the JSON.
fn differing(a: &Point, b: &Point) -> Vec<String> {
    let own = |point: &Point| {
        let Point { device, driver_version, warmup, iters, .. } = point;
        json!({"device": device, "driver_version": driver_version, "warmup": warmup, "iters": iters})
    };
    // Files of before have no settings.
    let settings = a.settings.zip(b.settings).map(|(a, b)| (json!(a), json!(b)));
    let pairs = [(own(a), own(b)), (json!(a.shapes), json!(b.shapes))].into_iter().chain(settings);
    let differing = pairs.flat_map(|(a, b)| {
        let fields = [&a, &b].into_iter().filter_map(Value::as_object).flat_map(Map::keys);
        let names: BTreeSet<&String> = fields.filter(|name| a[*name] != b[*name]).collect();
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let texts =
            names.into_iter().map(|name| format!("{name}: {} and {}", text(&a[name]), text(&b[name])));
        texts.collect::<Vec<_>>()
    });
    differing.collect()
}

/// For each point of A the index of the point of B that it is compared with. The same measurement
/// takes precedence, then the same routing. A point of B has at most one partner.
fn partners(a: &[Point], b: &[Point]) -> Vec<Option<usize>> {
    // Equal seeds that drew different routings are an error, which the caller reports.
    let matches: [fn(&Point, &Point) -> bool; 3] =
        [are_of_one_measurement, may_share_routing, |a, b| a.key.seed == b.key.seed];
    let mut partners = vec![None; a.len()];
    for matches in matches {
        for (at, old) in a.iter().enumerate() {
            let is_partner = |other: &usize| {
                !partners.contains(&Some(*other)) && is_like(&b[*other], old) && matches(&b[*other], old)
            };
            partners[at] = partners[at].or_else(|| (0..b.len()).find(is_partner));
        }
    }
    partners
}

/// All comparable times of a point with stored runs. Baselines are left out: a faster or slower
/// other program is no verdict on this one.
fn timed(point: &Point) -> Vec<Timed> {
    let runs = point.runs.len();
    let timed = |what: String, median_us: f64, samples_us: &[f64]| {
        let samples = samples_us.len() / runs;
        let runs_us = match samples {
            // Files without samples have the median alone.
            0 => vec![median_us],
            // Left-over samples are dropped, so that there is one median for each run.
            _ => samples_us.chunks_exact(samples).take(runs).map(|run| percentile(run, 0.5)).collect(),
        };
        Timed { what, runs_us, samples }
    };
    let of_slowest = |what: String, times: &Slowest| timed(what, times.p50_us, &times.samples_us);
    let is_low_latency = point.is_low_latency();
    let back = point.key.combine_dtype.as_deref().filter(|dtype| *dtype != "bf16");
    let name = |phase: &Phase| match back.filter(|_| !phase.name.is_dispatch()) {
        Some(dtype) => format!("{} {dtype}", phase.name.text()),
        None => phase.name.text().to_owned(),
    };
    let phases = point.phases.iter().filter_map(|phase| match is_low_latency {
        true => Some(of_slowest(name(phase), phase.slowest.as_ref()?)),
        false => Some(timed(name(phase), phase.call.median_us, &phase.call.samples_us)),
    });
    let pair = point.pair.iter().filter(|_| is_low_latency);
    let pair = pair.map(|pair| of_slowest(format!("pair of {}", pair.chain), &pair.period));
    let kernels = point.phases.iter().filter_map(|phase| {
        Some(of_slowest(format!("kernel of {}", name(phase)), &phase.within.as_ref()?.done))
    });
    let replays = point.graph.iter().flat_map(|step| {
        let timings = step.timings().into_iter();
        timings.filter_map(|(how, times)| Some(of_slowest(format!("{}, {how}", step.text()), times?)))
    });
    phases.chain(pair).chain(kernels).chain(replays).collect()
}

/// The points with their runs, since several points may be runs of one measurement. A point of
/// another program or driver replaces those before it, because sweeps append what they measure
/// anew. Also returns how many were replaced.
fn gathered(points: &[Point]) -> (Vec<Point>, usize) {
    let versions = |point: &Point| (point.kernels.clone(), point.driver_version);
    let (mut gathered, mut replaced): (Vec<Point>, usize) = (Vec::new(), 0);
    for point in points {
        let mut point = point.clone();
        if point.runs.is_empty() {
            point.runs = vec![Run { started: 0.0 }];
        }
        let is_same = |other: &&mut Point| is_like(other, &point) && are_of_one_measurement(other, &point);
        match gathered.iter_mut().find(is_same) {
            Some(other) if versions(other) == versions(&point) => other.add_runs(point),
            Some(other) => (*other, replaced) = (point, replaced + 1),
            None => gathered.push(point),
        }
    }
    (gathered, replaced)
}

/// Whether runs of A and B alternated, so that each two that follow each other are one of both.
fn alternated(a: &[Run], b: &[Run]) -> bool {
    let of = |runs: &[Run], side: bool| runs.iter().map(|run| (run.started, side)).collect::<Vec<_>>();
    let mut all = [of(a, false), of(b, true)].concat();
    all.sort_by(|x, y| x.0.total_cmp(&y.0));
    let known = all.iter().all(|(started, _)| *started > 0.0);
    known && all.len() > 2 && a.len() == b.len() && all.chunks(2).all(|pair| pair[0].1 != pair[1].1)
}

/// Compares the points that both have; a difference below `tolerance`, a share, is noise.
///
/// # Errors
/// Where there are none.
pub fn compare(a: &[Point], b: &[Point], tolerance: f64) -> Result<Comparison> {
    let ((a, replaced_of_a), (b, replaced_of_b)) = (gathered(a), gathered(b));
    let mut lines = Vec::new();
    let (mut pairs, mut alone_lines, mut is_virtual) = (0, (0, 0), false);
    let mut differences = BTreeSet::new();
    for (old, partner) in a.iter().zip(partners(&a, &b)) {
        let Some(new) = partner.map(|at| &b[at]) else { continue };
        if old.is_virtual != new.is_virtual {
            return Err(Error::Usage(
                "compare: one side is of the virtual GPU, the other of hardware".into(),
            ));
        }
        if let (Some(ours), Some(theirs)) = (&old.routing_digest, &new.routing_digest)
            && ours != theirs
        {
            return Err(Error::Usage(format!(
                "compare: equal sizes, {} tokens on {} ranks, but different routings, {ours} and {theirs}: measure both with one version of \
                 the program",
                old.key.tokens, old.key.num_ranks
            )));
        }
        (pairs, is_virtual) = (pairs + 1, is_virtual || old.is_virtual);
        differences.extend(differing(old, new));
        let paired = alternated(&old.runs, &new.runs);
        let (ones, others, before) = (timed(old), timed(new), lines.len());
        for one in &ones {
            if let Some(other) = others.iter().find(|other| other.what == one.what) {
                lines.push(line(old, one, other, paired));
            }
        }
        let common = lines.len() - before;
        alone_lines =
            (alone_lines.0 + ones.len() - common, alone_lines.1 + others.len().saturating_sub(common));
    }
    if let (0, [old], [new]) = (pairs, &a[..], &b[..]) {
        return Err(Error::Usage(format!("compare: different points: {:?} and {:?}", old.key, new.key)));
    }
    if pairs == 0 {
        return Err(Error::Usage(
            "compare: the files have no point in common (same sizes, network, seed and SMs)".into(),
        ));
    }
    judge(&mut lines, tolerance);
    let alone = (a.len() - pairs, b.len() - pairs);
    let kernels = [&a, &b].map(|points| {
        let texts: BTreeSet<String> = points.iter().map(Point::kernels_text).collect();
        texts.into_iter().collect::<Vec<_>>().join("; ")
    });
    let replaced = (replaced_of_a, replaced_of_b);
    Ok(Comparison { lines, tolerance, alone, alone_lines, replaced, differences, kernels, is_virtual })
}

/// A line without a verdict, or with the reason why there is none.
fn line(point: &Point, a: &Timed, b: &Timed, paired: bool) -> Line {
    let logs = |timed: &Timed| timed.runs_us.iter().map(|us| us.ln()).collect::<Vec<f64>>();
    let logs = (logs(a), logs(b));
    let (samples, runs) = (a.samples.min(b.samples), logs.0.len().min(logs.1.len()));
    let need = if paired { FEWEST_PAIRS } else { FEWEST_RUNS };
    let has_times = logs.0.iter().chain(&logs.1).all(|log| log.is_finite());
    let verdict = match () {
        () if !has_times => Verdict::NoTime,
        () if samples < FEWEST_SAMPLES => Verdict::TooFewSamples(samples),
        () if runs < need => Verdict::TooFewRuns(runs, need),
        () if point.is_virtual && !paired => Verdict::Apart,
        () => Verdict::Noise,
    };
    Line {
        key: point.key.clone(),
        what: a.what.clone(),
        median_us: (mean(&logs.0).exp(), mean(&logs.1).exp()),
        ratio: (mean(&logs.1) - mean(&logs.0)).exp(),
        interval: (runs > 1 && has_times).then(|| bootstrap(&logs.0, &logs.1, paired)),
        p: None,
        verdict,
        logs,
        paired,
    }
}

/// Kind of a line's runs: whether they are pairs, and how many A and B have.
type Design = (bool, usize, usize);

/// The least p that runs can have: one arrangement of all is as far apart, or two that are
/// mirrored.
fn least_p((paired, a, b): Design) -> f64 {
    let arrangements = match (paired, a + b) {
        (true, _) if a <= EXACT => 2f64.powi(a as i32 - 1),
        (false, runs) if runs <= EXACT => {
            let dealt = (1..=b).map(|run| (a + run) as f64 / run as f64).product::<f64>();
            if a == b { dealt / 2.0 } else { dealt }
        }
        _ => DRAWN as f64 + 1.0,
    };
    1.0 / arrangements
}

/// Tests all lines together that have the same kind of runs.
fn judge(lines: &mut [Line], tolerance: f64) {
    let design = |line: &Line| -> Design { (line.paired, line.logs.0.len(), line.logs.1.len()) };
    let mut designs: Vec<_> = lines.iter().filter(|line| line.verdict.is_told()).map(design).collect();
    designs.sort_unstable();
    designs.dedup();
    for of in &designs {
        let group = || lines.iter().filter(|line| line.verdict.is_told() && design(line) == *of);
        let ps = if of.0 {
            let differences =
                |line: &Line| line.logs.0.iter().zip(&line.logs.1).map(|(a, b)| b - a).collect();
            exchange_in_pairs(&group().map(differences).collect::<Vec<Vec<f64>>>())
        } else {
            let all = |line: &Line| [&line.logs.0[..], &line.logs.1].concat();
            exchange_between_sides(&group().map(all).collect::<Vec<Vec<f64>>>(), of.1)
        };
        let group = lines.iter_mut().filter(|line| line.verdict.is_told() && design(line) == *of);
        for (line, p) in group.zip(ps) {
            // Each group is tested separately, so correct for their number.
            let p = (p * designs.len() as f64).min(1.0);
            line.p = Some(p);
            let is_wide = line.interval.is_some_and(|(low, high)| high > WIDEST * low);
            let cannot_tell = |of: Design| least_p(of) * designs.len() as f64 >= ALPHA;
            line.verdict = match () {
                () if cannot_tell(*of) => {
                    let have = of.1.min(of.2);
                    let need = (have + 1..=EXACT + 1).find(|&runs| !cannot_tell((of.0, runs, runs)));
                    Verdict::TooFewRuns(have, need.unwrap_or(have + 1))
                }
                () if p >= ALPHA && is_wide => Verdict::TooWide,
                () if p >= ALPHA || (line.ratio - 1.0).abs() < tolerance => Verdict::Noise,
                () if line.ratio < 1.0 => Verdict::Faster,
                () => Verdict::Slower,
            };
        }
    }
}

/// For each line of differences, one a pair, how often any line is as far from 0 where signs are
/// chosen at will.
fn exchange_in_pairs(lines: &[Vec<f64>]) -> Vec<f64> {
    let pairs = lines.first().map_or(0, Vec::len);
    let sum = |line: &[f64], exchanged: &[bool]| {
        line.iter().zip(exchanged).map(|(d, &exchanged)| if exchanged { -d } else { *d }).sum()
    };
    // All signs turned are as far from 0, so the last pair may stay.
    let is_one = |bits: u32| bits < 1 << pairs.saturating_sub(1);
    let draw = |rng: &mut ChaCha8Rng, arrangement: &mut [bool]| arrangement.fill_with(|| rng.random());
    shares(lines, &vec![false; pairs], is_one, draw, sum)
}

/// For each line, how often any line's sides are as far apart if its runs are dealt anew. The first
/// `of_a` runs are A's.
fn exchange_between_sides(lines: &[Vec<f64>], of_a: usize) -> Vec<f64> {
    let runs = lines.first().map_or(0, Vec::len);
    let seen: Vec<bool> = (0..runs).map(|run| run < of_a).collect();
    let centred: Vec<Vec<f64>> =
        lines.iter().map(|line| line.iter().map(|value| value - mean(line)).collect()).collect();
    let sum = |line: &[f64], is_a: &[bool]| {
        line.iter().zip(is_a).filter(|(_, is_a)| **is_a).map(|(value, _)| value).sum()
    };
    let is_one = |bits: u32| bits.count_ones() as usize == of_a;
    shares(&centred, &seen, is_one, |rng, arrangement| arrangement.shuffle(rng), sum)
}

/// For each line the share of arrangements in which any line's statistic is at least the observed
/// one: the square of the line's sum over the sum of squares, which no arrangement changes. It
/// grows with Student's t, and alike for lines with equal numbers of runs, so that lines can be
/// compared. The arrangements are all that `is_one` accepts, or drawn ones where there are many.
fn shares(
    lines: &[Vec<f64>],
    seen: &[bool],
    is_one: impl Fn(u32) -> bool,
    draw: impl Fn(&mut ChaCha8Rng, &mut [bool]),
    sum: impl Fn(&[f64], &[bool]) -> f64,
) -> Vec<f64> {
    let mut arrangements = Vec::new();
    if seen.len() <= EXACT {
        let all = (0..1u32 << seen.len()).filter(|bits| is_one(*bits));
        arrangements.extend(all.map(|bits| (0..seen.len()).map(|at| bits >> at & 1 != 0).collect()));
    } else {
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        arrangements.push(seen.to_vec());
        for _ in 0..DRAWN {
            let mut drawn = seen.to_vec();
            draw(&mut rng, &mut drawn);
            arrangements.push(drawn);
        }
    }
    let value = |line: &[f64], arrangement: &[bool]| {
        let (sum, squares) = (sum(line, arrangement), line.iter().map(|value| value * value).sum::<f64>());
        if squares > 0.0 { sum * sum / squares } else { 0.0 }
    };
    let most =
        |arrangement: &Vec<bool>| lines.iter().map(|line| value(line, arrangement)).fold(0.0, f64::max);
    let most: Vec<f64> = arrangements.iter().map(most).collect();
    let share = |line: &Vec<f64>| {
        let own = value(line, seen) * (1.0 - 1e-9);
        most.iter().filter(|most| **most >= own).count() as f64 / most.len() as f64
    };
    lines.iter().map(share).collect()
}

/// The 95% interval of the ratio B over A over resampled pairs or runs. The same runs give the same
/// interval.
fn bootstrap(a: &[f64], b: &[f64], paired: bool) -> (f64, f64) {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut draw = |runs: usize| -> Vec<usize> { (0..runs).map(|_| rng.random_range(0..runs)).collect() };
    let of =
        |logs: &[f64], drawn: &[usize]| drawn.iter().map(|&at| logs[at]).sum::<f64>() / drawn.len() as f64;
    let ratios: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let drawn = draw(a.len());
            let drawn_of_b = if paired { drawn.clone() } else { draw(b.len()) };
            (of(b, &drawn_of_b) - of(a, &drawn)).exp()
        })
        .collect();
    (percentile(&ratios, 0.025), percentile(&ratios, 0.975))
}

impl Comparison {
    /// Lines with a verdict of faster or slower.
    pub fn differences(&self) -> impl Iterator<Item = &Line> {
        self.lines.iter().filter(|line| matches!(line.verdict, Verdict::Faster | Verdict::Slower))
    }

    /// Points and phases that only one side has, for people.
    fn without_partner(&self) -> Option<String> {
        let text = |(a, b): (usize, usize), what: &str| {
            (a + b > 0).then(|| format!("{a} {what} of A and {b} of B have no partner"))
        };
        let texts = [text(self.alone, "points"), text(self.alone_lines, "phases")];
        Some(texts.into_iter().flatten().collect::<Vec<_>>().join("; ")).filter(|text| !text.is_empty())
    }

    /// Lines with a verdict of slower, by at least this share.
    ///
    /// # Errors
    /// No line is slower by it, and one has no verdict, or may be slower by as much, or something has no
    /// line: with the reason and the remedy.
    pub fn slower_by(&self, share: f64) -> Result<Vec<&Line>> {
        let slower = self.differences().filter(|line| line.verdict == Verdict::Slower);
        let slower: Vec<&Line> = slower.filter(|line| line.ratio - 1.0 >= share).collect();
        if !slower.is_empty() {
            return Ok(slower);
        }
        if let Some(alone) = self.without_partner() {
            return Err(Error::Usage(format!(
                "compare: no verdict on what one side alone has: {alone}; measure both with the same flags"
            )));
        }
        if let Some(line) = self.lines.iter().find(|line| !line.verdict.is_told()) {
            let (why, remedy) = (line.verdict.text(), line.verdict.remedy());
            return Err(Error::Usage(format!("compare: no verdict on {}: {why}; {remedy}", line.what)));
        }
        // No difference was shown, nor that it is smaller.
        let may_be_slower = |line: &&Line| {
            line.p.is_some_and(|p| p >= ALPHA) && line.interval.is_some_and(|(_, high)| high - 1.0 >= share)
        };
        if let Some(line) = self.lines.iter().find(may_be_slower) {
            return Err(Error::Usage(format!(
                "compare: no verdict on {}: its interval reaches {:.3}, so B may be slower by {} % or more; make more runs (--repeat)",
                line.what,
                line.interval.map_or(1.0, |(_, high)| high),
                share * 100.0
            )));
        }
        Ok(slower)
    }

    /// A table.
    pub fn text(&self) -> String {
        let width = self.lines.iter().map(|line| line.what.len()).max().unwrap_or(0);
        let mut out = format!(
            "nodes ranks  tokens   SMs dtype {:<width$}     runs       A us       B us   B / A             95%        p  B is",
            "phase"
        );
        for line in &self.lines {
            let interval = line.interval.map_or("-".into(), |(low, high)| format!("{low:.3} - {high:.3}"));
            let runs = match (line.paired, line.logs.0.len(), line.logs.1.len()) {
                (true, pairs, _) => format!("{pairs} pairs"),
                (false, a, b) => format!("{a}, {b}"),
            };
            let p = line.p.map_or("-".into(), |p| format!("{p:.4}"));
            let Key { nodes, num_ranks, tokens, num_sms, dtype, .. } = &line.key;
            let Line { what, median_us: (a, b), ratio, .. } = line;
            let verdict = line.verdict.text();
            // Writing to a string cannot fail.
            let _ =
                write!(out, "\n{nodes:>5} {num_ranks:>5} {tokens:>7} {num_sms:>5} {dtype:<5} {what:<width$}");
            let _ =
                write!(out, " {runs:>8} {a:>10.1} {b:>10.1} {ratio:>7.3} {interval:>15} {p:>8}  {verdict}");
        }
        let _ = write!(
            out,
            "\nA us, B us: geometric means of the runs' medians; B / A is their ratio, 95% its interval over runs. p: the chance that \
             any line stands out as much where there is no difference. Noise: p >= {ALPHA}, or less than {:.1}% apart",
            self.tolerance * 100.0
        );
        let [of_a, of_b] = &self.kernels;
        let _ = match of_a == of_b {
            true => write!(out, "\nkernels of both: {of_a}"),
            false => write!(out, "\nkernels of A: {of_a}\nkernels of B: {of_b}"),
        };
        if !self.differences.is_empty() {
            let differences: Vec<&str> = self.differences.iter().map(String::as_str).collect();
            let _ = write!(out, "\nA and B differ: {}", differences.join("; "));
        }
        if let (a, b) = self.replaced
            && a + b > 0
        {
            let _ =
                write!(out, "\n{a} points of A and {b} of B are of an earlier program or driver: left out");
        }
        if let Some(alone) = self.without_partner() {
            let _ = write!(out, "\n{alone}");
        }
        if self.lines.iter().any(|line| matches!(line.verdict, Verdict::TooFewRuns(..))) {
            out += "\ntoo few runs: iterations of one run agree with each other better than with those of the next; measure with \
                    `epoxide bench --repeat N`, or with `epoxide bench ab`, which alternates";
        }
        if self.lines.iter().any(|line| line.verdict == Verdict::Apart) {
            out += "\nnot told: a virtual GPU is as fast as this machine's other work leaves it, so its runs must alternate: `epoxide bench ab`";
        }
        if self.lines.iter().any(|line| line.verdict == Verdict::TooWide) {
            out += "\nnot told: the runs differ by so much that the sides may be equal or far apart; make more runs (--repeat), of more \
                    iterations, or on a machine without other work";
        }
        if self.is_virtual {
            out += "\nVIRTUAL GPU: interpreter times, of no hardware";
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use epoxide_testing::tier;

    use super::*;
    use crate::results::{LOW_LATENCY, Pairs, Settings};
    use crate::tests::h200;
    use crate::versions::Versions;

    /// Runs of a noisy machine. The machine drifts, each run has a small offset, some a large one,
    /// and iterations scatter within a run.
    struct Machine {
        point: Point,
        rng: ChaCha8Rng,
        drift: f64,
        noise: f64,
        clock: f64,
    }

    impl Machine {
        fn new(seed: u64, noise: f64) -> Machine {
            static POINT: LazyLock<Point> = LazyLock::new(|| h200().remove(0));
            Machine {
                point: POINT.clone(),
                rng: ChaCha8Rng::seed_from_u64(seed),
                drift: 0.0,
                noise,
                clock: 1e9,
            }
        }

        fn bell(&mut self) -> f64 {
            (0..12).map(|_| self.rng.random::<f64>()).sum::<f64>() - 6.0
        }

        /// A run of a point whose first phase takes `factor` times its usual time.
        fn run(&mut self, factor: f64) -> Point {
            let mut point = self.point.clone();
            self.drift += self.noise * self.bell();
            let off = self.drift + self.noise * self.bell();
            let off = if self.rng.random_bool(0.05) { off + 20.0 * self.noise } else { off };
            for (at, phase) in point.phases.iter_mut().enumerate() {
                let own = off + self.noise * self.bell();
                let us = 100.0 * (at + 1) as f64 * own.exp() * if at == 0 { factor } else { 1.0 };
                phase.call.samples_us =
                    (0..9).map(|_| us * (1.0 + 0.1 * self.noise * self.rng.random::<f64>())).collect();
            }
            self.clock += 1.0;
            (point.iters, point.runs) = (9, vec![Run { started: self.clock }]);
            point
        }

        /// Runs of A and B in turn, with a random order within a pair.
        fn ab(&mut self, pairs: usize, factor: f64) -> (Vec<Point>, Vec<Point>) {
            let (mut a, mut b) = (Vec::new(), Vec::new());
            for _ in 0..pairs {
                if self.rng.random() {
                    b.push(self.run(factor));
                    a.push(self.run(1.0));
                } else {
                    a.push(self.run(1.0));
                    b.push(self.run(factor));
                }
            }
            (a, b)
        }
    }

    #[test]
    fn exchanged_pairs_agree_with_a_case_worked_by_hand() {
        // Two of the 16 choices of signs have a sum of 10 or -10, and two a sum of 8 or -8.
        assert_eq!(exchange_in_pairs(&[vec![1.0, 2.0, 3.0, 4.0]]), [2.0 / 16.0]);
        assert_eq!(exchange_in_pairs(&[vec![-1.0, 2.0, 3.0, 4.0]]), [4.0 / 16.0]);
        assert_eq!(exchange_in_pairs(&[vec![0.0; 4]]), [1.0]);
        // Another line differs as much in two more choices.
        let two = exchange_in_pairs(&[vec![1.0, 1.0, 1.0, 1.0], vec![1.0, 1.0, 1.0, -1.0]]);
        assert_eq!(two, [4.0 / 16.0, 1.0]);
    }

    #[test]
    fn exchanged_sides_agree_with_a_case_worked_by_hand() {
        // Two of 20 ways to deal six runs are as far apart.
        assert_eq!(exchange_between_sides(&[vec![1.0, 2.0, 3.0, 11.0, 12.0, 13.0]], 3), [2.0 / 20.0]);
        assert_eq!(exchange_between_sides(&[vec![5.0; 6]], 3), [1.0]);
    }

    /// Files may have more samples than their runs explain.
    #[test]
    fn samples_that_no_run_has_are_left_out() {
        let mut machine = Machine::new(1, 0.0);
        let mut side = |started: [f64; 2], samples: usize| {
            let mut point = machine.run(1.0);
            point.runs = started.map(|started| Run { started }).to_vec();
            for phase in &mut point.phases {
                phase.call.samples_us = vec![1.0; samples];
            }
            vec![point]
        };
        let (a, b) = (side([1.0, 3.0], 3), side([2.0, 4.0], 2));
        compare(&a, &b, 0.0).unwrap();
        compare(&b, &a, 0.0).unwrap();
    }

    #[test]
    fn the_fewest_runs_are_the_fewest_that_can_tell() {
        let told = |pairs: usize| exchange_in_pairs(&[vec![0.1; pairs]])[0] < ALPHA;
        assert!(told(FEWEST_PAIRS) && !told(FEWEST_PAIRS - 1));
        let told = |runs: usize| {
            let line: Vec<f64> = (0..2 * runs).map(|run| f64::from(u8::from(run >= runs))).collect();
            exchange_between_sides(&[line], runs)[0] < ALPHA
        };
        assert!(told(FEWEST_RUNS) && !told(FEWEST_RUNS - 1));
        // Many are drawn, and agree.
        assert!(exchange_in_pairs(&[vec![0.1; EXACT + 4]])[0] < ALPHA);
        assert!(exchange_between_sides(&[(0..20).map(f64::from).collect()], 10)[0] < ALPHA);
    }

    #[test]
    fn equal_things_are_seldom_called_different() {
        // Two in a hundred would be too many: of 300 one or two are expected.
        let (seeds, most) = tier::pick((100, 2), (300, 5));
        let alarms = (0..seeds)
            .filter(|&seed| {
                let (a, b) = Machine::new(seed, 0.03).ab(12, 1.0);
                compare(&a, &b, 0.0).unwrap().differences().next().is_some()
            })
            .count();
        assert!(alarms <= most, "{alarms} false alarms of {seeds}");
    }

    #[test]
    fn five_percent_of_one_phase_are_seen() {
        let (seeds, least) = tier::pick((60, 58), (200, 195));
        let mut told = 0;
        for seed in 0..seeds {
            let (a, b) = Machine::new(seed, 0.003).ab(12, 1.05);
            let comparison = compare(&a, &b, 0.01).unwrap();
            let lines: Vec<&Line> = comparison.differences().collect();
            assert!(lines.iter().all(|line| line.what == "dispatch cached"), "{}", comparison.text());
            told += u32::from(lines.iter().any(|line| line.verdict == Verdict::Slower));
        }
        assert!(told >= least, "{told} of {seeds}");
    }

    #[test]
    fn runs_that_are_too_few_or_alike_get_no_verdict() {
        let (a, b) = Machine::new(1, 0.001).ab(10, 1.2);
        let verdict = |a: &[Point], b: &[Point]| compare(a, b, 0.01).unwrap().lines[0].verdict;
        assert_eq!(verdict(&a, &b), Verdict::Slower);
        assert_eq!(verdict(&b, &a), Verdict::Faster);
        assert_eq!(verdict(&a[..1], &b[..1]), Verdict::TooFewRuns(1, FEWEST_RUNS));
        assert_eq!(verdict(&a[..4], &b[..4]), Verdict::TooFewRuns(4, FEWEST_PAIRS));
        // The same runs, not alternated: fewer are enough, if the machine is assumed constant.
        let after = |points: &[Point]| -> Vec<Point> {
            let mut points = points.to_vec();
            points.iter_mut().for_each(|point| point.runs[0].started += 1e6);
            points
        };
        assert_eq!(verdict(&a[..6], &after(&b[..6])), Verdict::Slower);
        let of = |points: &[Point], change: &dyn Fn(&mut Point)| -> Vec<Point> {
            let mut points = points.to_vec();
            points.iter_mut().for_each(change);
            points
        };
        let on_virtual = |points: &[Point]| of(points, &|point| point.is_virtual = true);
        assert_eq!(verdict(&on_virtual(&a), &on_virtual(&b)), Verdict::Slower);
        assert_eq!(verdict(&on_virtual(&a), &on_virtual(&after(&b))), Verdict::Apart);
        assert_eq!(verdict(&on_virtual(&a[..1]), &on_virtual(&b[..1])), Verdict::TooFewRuns(1, FEWEST_RUNS));
        let short = |points: &[Point]| {
            of(points, &|point| point.phases.iter_mut().for_each(|phase| phase.call.samples_us.truncate(4)))
        };
        let comparison = compare(&short(&a), &short(&b), 0.01).unwrap();
        assert!(comparison.text().contains("too few samples (4 < 5)"), "{}", comparison.text());
        let error = comparison.slower_by(0.01).unwrap_err().to_string();
        assert!(error.ends_with("too few samples (4 < 5); measure with --iters 5 or more"), "{error}");
        let comparison = compare(&on_virtual(&a), &on_virtual(&after(&b)), 0.01).unwrap();
        let error = comparison.slower_by(0.01).unwrap_err().to_string();
        assert!(error.ends_with("measure with `epoxide bench ab`, which alternates"), "{error}");
        // Sure, but smaller than what runs drift by.
        let (a, b) = Machine::new(2, 0.0001).ab(10, 1.005);
        let comparison = compare(&a, &b, 0.01).unwrap();
        assert!(comparison.lines[0].p.unwrap() < ALPHA);
        assert_eq!(comparison.lines[0].verdict, Verdict::Noise);
    }

    #[test]
    fn the_ratio_is_that_of_the_medians_that_are_printed() {
        let (a, b) = Machine::new(5, 0.003).ab(10, 1.2);
        for line in compare(&a, &b, 0.01).unwrap().lines {
            let (a, b) = line.median_us;
            assert!((b / a / line.ratio - 1.0).abs() < 1e-9, "{line:?}");
        }
    }

    #[test]
    fn a_wide_interval_is_not_called_noise() {
        let (mut told, mut wide) = (0, 0);
        for seed in 0..20 {
            let (a, b) = Machine::new(seed, 0.2).ab(9, 1.0);
            let comparison = compare(&a, &b, 0.01).unwrap();
            for line in &comparison.lines {
                let (low, high) = line.interval.unwrap();
                let is_wide = high / low > WIDEST;
                assert!(!(is_wide && line.verdict == Verdict::Noise), "{line:?}");
                assert!(is_wide || line.verdict != Verdict::TooWide, "{line:?}");
                wide += u32::from(line.verdict == Verdict::TooWide);
            }
            told += u32::from(comparison.text().contains("not told: the interval is wider than 10%"));
            if let Err(error) = comparison.slower_by(0.01) {
                assert!(!error.to_string().contains("--repeat 9"), "{error}");
            }
            let may_be_slower = |line: &Line| line.interval.is_some_and(|(_, high)| high >= 1.01);
            assert_eq!(
                comparison.slower_by(0.01).is_err(),
                comparison.text().contains("not told") || comparison.lines.iter().any(may_be_slower)
            );
        }
        assert!(told >= 18 && wide > told, "{told} comparisons, {wide} lines");
        // Runs that agree are noise.
        let (a, b) = Machine::new(7, 0.001).ab(10, 1.0);
        assert!(compare(&a, &b, 0.01).unwrap().lines.iter().all(|line| line.verdict == Verdict::Noise));
    }

    #[test]
    fn a_gate_fails_where_something_is_slower_or_nothing_can_be_told() {
        let (a, b) = Machine::new(3, 0.001).ab(10, 1.05);
        let comparison = compare(&a, &b, 0.01).unwrap();
        assert_eq!(comparison.slower_by(0.01).unwrap().len(), 1);
        assert_eq!(comparison.slower_by(0.2).unwrap().len(), 0);
        // One run was off by 2 %, so that 1 % of another phase cannot be excluded.
        let reversed = compare(&b, &a, 0.01).unwrap();
        assert_eq!(reversed.slower_by(0.02).unwrap().len(), 0);
        let error = reversed.slower_by(0.01).unwrap_err().to_string();
        assert!(error.contains("dispatch uncached: its interval reaches 1.010"), "{error}");
        let error = compare(&a[..2], &b[..2], 0.01).unwrap().slower_by(0.01).unwrap_err().to_string();
        assert!(error.contains("too few runs (2 < 9)") && error.contains("bench ab"), "{error}");
    }

    #[test]
    fn a_gate_does_not_pass_a_phase_that_may_be_slower() {
        // Equal things whose runs scatter by 0.5 %: noise, but no proof that B is not 0.1 % slower.
        let (a, b) = Machine::new(8, 0.005).ab(10, 1.0);
        let comparison = compare(&a, &b, 0.01).unwrap();
        assert!(comparison.lines.iter().all(|line| line.verdict == Verdict::Noise), "{}", comparison.text());
        assert_eq!(comparison.slower_by(0.05).unwrap().len(), 0);
        let error = comparison.slower_by(0.001).unwrap_err().to_string();
        assert!(error.contains("B may be slower by 0.1 % or more"), "{error}");
    }

    #[test]
    fn a_gate_does_not_pass_what_one_side_alone_has() {
        let (a, b) = Machine::new(3, 0.0001).ab(10, 1.0);
        assert_eq!(compare(&a, &b, 0.01).unwrap().slower_by(0.01).unwrap().len(), 0);
        let with = |points: &[Point], change: &dyn Fn(&mut Point)| -> Vec<Point> {
            let mut points = points.to_vec();
            points.iter_mut().for_each(change);
            points
        };
        let more = with(&a, &|point| point.key.tokens += 1);
        let fewer = with(&b, &|point| point.phases.truncate(3));
        for (a, b, alone) in [
            ([&a[..], &more].concat(), b.clone(), "1 points of A and 0 of B have no partner"),
            (a.clone(), [&b[..], &more].concat(), "0 points of A and 1 of B have no partner"),
            (a.clone(), fewer.clone(), "1 phases of A and 0 of B have no partner"),
            (fewer, a, "0 phases of A and 1 of B have no partner"),
        ] {
            let comparison = compare(&a, &b, 0.01).unwrap();
            assert!(comparison.text().contains(alone), "{}", comparison.text());
            let error = comparison.slower_by(0.01).unwrap_err().to_string();
            assert!(error.contains(alone), "{error}");
        }
    }

    /// Two tests of 9 pairs each cannot tell: the least p is 1 of 256, times 2.
    #[test]
    fn runs_that_several_tests_leave_too_few_get_no_verdict() {
        let mut machine = Machine::new(1, 0.0001);
        let (mut a, mut b) = machine.ab(FEWEST_PAIRS, 1.2);
        assert_eq!(compare(&a, &b, 0.01).unwrap().lines[0].verdict, Verdict::Slower);
        let (mut more_a, mut more_b) = machine.ab(12, 1.2);
        more_a.iter_mut().chain(&mut more_b).for_each(|point| point.key.tokens += 1);
        a.extend(more_a);
        b.extend(more_b);
        let comparison = compare(&a, &b, 0.01).unwrap();
        let verdict = |tokens: u32| {
            let is_of = |line: &&Line| line.key.tokens == tokens && line.what == "dispatch cached";
            comparison.lines.iter().find(is_of).map(|line| line.verdict)
        };
        let tokens = a[0].key.tokens;
        assert_eq!(verdict(tokens), Some(Verdict::TooFewRuns(FEWEST_PAIRS, FEWEST_PAIRS + 1)));
        assert_eq!(verdict(tokens + 1), Some(Verdict::Slower));
        assert!(comparison.slower_by(0.5).unwrap_err().to_string().contains("too few runs (9 < 10)"));
    }

    #[test]
    fn the_least_p_is_that_of_runs_that_are_apart() {
        for pairs in [1, 2, 9] {
            assert_eq!(exchange_in_pairs(&[vec![0.1; pairs]]), [least_p((true, pairs, pairs))]);
        }
        for (a, b) in [(3, 3), (2, 4), (6, 6)] {
            let line: Vec<f64> = (0..a + b).map(|run| f64::from(u8::from(run >= a))).collect();
            let p = exchange_between_sides(&[line], a)[0];
            assert!((p - least_p((false, a, b))).abs() < 1e-12, "{a}, {b}: {p}");
        }
    }

    /// A clock of coarse ticks measures 0, and a difference of two times may be below it.
    #[test]
    fn runs_without_a_time_get_no_verdict() {
        let (a, b) = Machine::new(6, 0.001).ab(10, 1.2);
        for us in [0.0, -1.0] {
            let mut b = b.clone();
            b[3].phases[0].call.samples_us.fill(us);
            for (a, b) in [(&a, &b), (&b, &a)] {
                let comparison = compare(a, b, 0.01).unwrap();
                assert_eq!(comparison.lines[0].verdict, Verdict::NoTime);
                assert!(comparison.lines[1..].iter().all(|line| line.verdict == Verdict::Noise));
                let error = comparison.slower_by(0.01).unwrap_err().to_string();
                assert!(error.contains("is not above 0; measure larger sizes"), "{error}");
                assert!(!error.contains("--repeat"), "{error}");
            }
        }
    }

    #[test]
    fn the_interval_holds_the_ratio() {
        let (a, b) = Machine::new(4, 0.003).ab(10, 1.5);
        let comparison = compare(&a, &b, 0.01).unwrap();
        let line = &comparison.lines[0];
        let (low, high) = line.interval.unwrap();
        assert!(low <= line.ratio && line.ratio <= high && low > 1.4 && high < 1.6, "{line:?}");
    }

    #[test]
    fn old_files_have_single_runs_and_no_verdict() {
        let points = h200();
        let comparison = compare(&points, &points, 0.01).unwrap();
        assert!(comparison.lines.iter().all(|line| !line.verdict.is_told() && line.ratio == 1.0));
        assert!(comparison.text().contains("too few samples (0 < 5)"));
    }

    #[test]
    fn points_of_different_routings_are_not_compared() {
        let with = |digest: Option<&str>| {
            let mut point = h200().remove(0);
            point.routing_digest = digest.map(str::to_owned);
            [point]
        };
        let of = |a, b| compare(&with(a), &with(b), 0.01).map(drop);
        // Files of before have none.
        assert!(of(None, Some("1")).is_ok() && of(Some("1"), Some("1")).is_ok());
        let error = of(Some("1"), Some("2")).unwrap_err().to_string();
        assert!(error.contains("different routings, 1 and 2"), "{error}");
    }

    #[test]
    fn each_point_is_compared_with_that_of_its_own_settings() {
        let point = |warps: u32, us: f64| {
            let mut point = h200().remove(0);
            point.shapes.combine_warps = Some(warps);
            point.phases.truncate(1);
            point.phases[0].call.median_us = us;
            point
        };
        let ratios = |a: &[Point], b: &[Point]| -> Vec<f64> {
            compare(a, b, 0.01).unwrap().lines.iter().map(|line| line.ratio.round()).collect()
        };
        let (a, b) = ([point(2, 10.0), point(3, 100.0)], [point(3, 200.0), point(2, 30.0)]);
        assert_eq!(ratios(&a, &b), [3.0, 2.0]);
        // Another tuning may be compared, but no point twice.
        let comparison = compare(&a, &b[..1], 0.01).unwrap();
        assert_eq!((comparison.lines.len(), comparison.alone), (1, (1, 0)));
        assert_eq!(ratios(&a[..1], &b[..1]), [20.0]);
    }

    /// A sweep appends the points of a later program, and keeps those of an earlier one.
    #[test]
    fn points_of_another_program_are_not_runs_of_this_one() {
        let (a, b) = Machine::new(3, 0.0001).ab(10, 1.0);
        let with = |change: &dyn Fn(&mut Point)| -> Vec<Point> {
            let mut points = b.clone();
            points.iter_mut().for_each(change);
            points
        };
        let versions = |ptx: &str| Some(Versions { ptx: ptx.into(), ..Versions::default() });
        let earlier = with(&|point| {
            point.kernels = versions("1");
            point.phases[0].call.samples_us.iter_mut().for_each(|us| *us *= 2.0);
        });
        let later = with(&|point| point.kernels = versions("2"));
        let comparison = compare(&a, &[earlier, later].concat(), 0.01).unwrap();
        let text = comparison.text();
        assert!(comparison.lines.iter().all(|line| line.logs.1.len() == 10), "{text}");
        assert!(comparison.differences().next().is_none(), "{text}");
        assert!(text.contains("kernels of B: PTX 2"), "{text}");
        assert!(text.contains("0 points of A and 1 of B are of an earlier program or driver"), "{text}");
        // Devices and untimed iterations make measurements of their own, and that of A counts.
        let others: [fn(&mut Point); 2] = [|point| point.device.push('0'), |point| point.warmup += 1];
        for other in others {
            let comparison = compare(&a, &[with(&other), b.clone()].concat(), 0.01).unwrap();
            assert!(comparison.lines.iter().all(|line| line.logs.1.len() == 10));
            assert_eq!(comparison.alone, (0, 1));
            assert!(!comparison.text().contains("A and B differ"), "{}", comparison.text());
        }
    }

    #[test]
    fn other_devices_and_settings_are_named() {
        let (a, mut b) = Machine::new(3, 0.0001).ab(10, 1.0);
        for point in &mut b {
            point.device = "NVIDIA H100".into();
            (point.shapes.combine_warps, point.warmup) = (Some(3), point.warmup + 1);
        }
        let differ = |a: &[Point], b: &[Point]| {
            let text = compare(a, b, 0.01).unwrap().text();
            text.lines().find_map(|line| line.strip_prefix("A and B differ: ").map(str::to_owned))
        };
        let (device, warmup) = (&a[0].device, a[0].warmup);
        let of_warmup = format!("warmup: {warmup} and {}", warmup + 1);
        let expected = format!("combine_warps: null and 3; device: {device} and NVIDIA H100; {of_warmup}");
        assert_eq!(differ(&a, &b), Some(expected));
        let settings = |points: &[Point], flush_mib: u64| -> Vec<Point> {
            let settings = Some(Settings { flush_mib, ..Settings::default() });
            points.iter().cloned().map(|point| Point { settings, ..point }).collect()
        };
        let differing = differ(&settings(&a, 256), &settings(&a, 0));
        assert_eq!(differing.as_deref(), Some("flush_mib: 256 and 0"));
        // Files of before have no settings.
        assert_eq!(differ(&a, &settings(&a, 0)), None);
    }

    /// Seeds of low latency do not count, since version 1 had none.
    #[test]
    fn points_of_two_seeds_are_not_runs_of_one() {
        let point = |seed: u64, us: f64| {
            let mut point = h200().remove(0);
            (point.mode, point.key.chunk_tokens, point.key.seed) = (LOW_LATENCY.into(), Some(1), seed);
            point.routing_digest = Some(seed.to_string());
            let period = Slowest::new(&[&[us; 5]]);
            (point.pair, point.phases) = (Some(Pairs { chain: 1, period }), Vec::new());
            point
        };
        let comparison = |a: &[Point], b: &[Point]| compare(a, b, 0.01).unwrap();
        let (a, b) = ([point(1, 10.0), point(2, 100.0)], [point(2, 200.0), point(1, 30.0)]);
        let ratios: Vec<f64> = comparison(&a, &b).lines.iter().map(|line| line.ratio.round()).collect();
        assert_eq!(ratios, [3.0, 2.0]);
        assert_eq!(comparison(&a, &b[..1]).alone, (1, 0));
    }
}

//! Ratios of two results, with their spread, and whether they mean anything.
//!
//! The verdict is a two-sided Mann-Whitney U test on the iterations' times (normal approximation, corrected for ties and
//! continuity): it asks whether one side's times rank above the other's, whatever their distributions look like, so a few
//! slow iterations do not decide. The spread is the 95% interval of the ratio of medians over bootstrap resamples.
//! Differences below a tolerance are noise whatever the test says: it knows the iterations of two runs, and runs of the
//! same program drift by a little.

use std::fmt::Write;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::results::{Point, percentile};
use crate::{Error, Result};

/// Chance of a false alarm that a verdict of a difference accepts.
const ALPHA: f64 = 0.01;
/// Fewer iterations a side say nothing at [`ALPHA`].
const FEWEST_SAMPLES: usize = 5;
/// Bootstrap resamples.
const RESAMPLES: usize = 2000;

/// What a difference is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// B takes less time.
    Faster,
    /// B takes more time.
    Slower,
    /// Not to be told from chance, or below the tolerance.
    Noise,
    /// There are no samples to tell by.
    Unknown,
}

impl Verdict {
    fn text(self) -> &'static str {
        match self {
            Verdict::Faster => "faster",
            Verdict::Slower => "slower",
            Verdict::Noise => "noise",
            Verdict::Unknown => "no samples",
        }
    }
}

/// What is compared of a point: the calls of a phase, or replays of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Timed<'a> {
    /// What was timed; the same on both sides of a comparison.
    pub what: String,
    /// Median over iterations.
    pub median_us: f64,
    /// The iterations.
    pub samples_us: &'a [f64],
}

/// All that can be compared of a point.
fn timed(point: &Point) -> Vec<Timed<'_>> {
    let phases = point.phases.iter().map(|phase| Timed {
        what: phase.name.text().into(),
        median_us: phase.call.median_us,
        samples_us: &phase.call.samples_us,
    });
    let replays = point.graph.iter().flat_map(|step| {
        step.timings().into_iter().filter_map(move |(how, times)| {
            let what = format!("{}, {how}", step.text());
            times.map(|times| Timed { what, median_us: times.p50_us, samples_us: &times.samples_us })
        })
    });
    phases.chain(replays).collect()
}

/// What was timed on side B against the same on side A.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// Median of B over that of A.
    pub ratio: f64,
    /// 95% of the bootstrap's ratios lie here.
    pub interval: Option<(f64, f64)>,
    /// The chance of such a difference where there is none.
    pub p: Option<f64>,
    /// What to make of it.
    pub verdict: Verdict,
}

/// Compares the points that both have, as a table.
///
/// # Errors
/// Where there are none.
pub fn text(a: &[Point], b: &[Point], tolerance: f64) -> Result<String> {
    let mut pairs: Vec<(&Point, &Point)> = Vec::new();
    for old in a {
        if let Some(new) = b.iter().find(|new| new.key == old.key) {
            if old.is_virtual != new.is_virtual {
                return Err(Error::Usage(
                    "compare: one side is of the virtual GPU, the other of hardware".into(),
                ));
            }
            pairs.push((old, new));
        }
    }
    if let (true, [old], [new]) = (pairs.is_empty(), a, b) {
        return Err(Error::Usage(format!("compare: different points: {:?} and {:?}", old.key, new.key)));
    }
    if pairs.is_empty() {
        return Err(Error::Usage(
            "compare: the files have no point in common (same sizes, network, seed and SMs)".into(),
        ));
    }
    let all = pairs.iter().flat_map(|(old, _)| timed(old));
    let width = all.map(|timed| timed.what.len()).max().unwrap_or(0);
    let mut out = format!(
        "{:>5} {:>5} {:>7} {:>5} {:<5} {:<width$} {:>10} {:>10} {:>7} {:>15} {:>8}  {}",
        "nodes", "ranks", "tokens", "SMs", "dtype", "phase", "A us", "B us", "B / A", "95%", "p", "B is"
    );
    for (old, new) in &pairs {
        let others = timed(new);
        for one in timed(old) {
            let Some(other) = others.iter().find(|other| other.what == one.what) else { continue };
            let c = compare(&one, other, tolerance);
            let interval = c.interval.map_or("-".into(), |(low, high)| format!("{low:.3} - {high:.3}"));
            // Writing to a string cannot fail.
            let _ = write!(
                out,
                "\n{:>5} {:>5} {:>7} {:>5} {:<5} {:<width$} {:>10.1} {:>10.1} {:>7.3} {interval:>15} {:>8}  {}",
                old.key.nodes,
                old.key.num_ranks,
                old.key.tokens,
                old.key.num_sms,
                old.key.dtype,
                one.what,
                one.median_us,
                other.median_us,
                c.ratio,
                c.p.map_or("-".into(), |p| format!("{p:.4}")),
                c.verdict.text()
            );
        }
    }
    let _ = write!(
        out,
        "\nmedians; noise: p >= {ALPHA} (Mann-Whitney) or less than {:.1}% apart; {} points of A and {} of B have no partner",
        tolerance * 100.0,
        a.len() - pairs.len(),
        b.iter().filter(|new| !a.iter().any(|old| old.key == new.key)).count()
    );
    if pairs.iter().any(|(old, _)| old.is_virtual) {
        out += "\nVIRTUAL GPU: interpreter times, of no hardware";
    }
    Ok(out)
}

/// Compares two times of one thing.
pub fn compare(a: &Timed<'_>, b: &Timed<'_>, tolerance: f64) -> Comparison {
    let ratio = b.median_us / a.median_us;
    let (a, b) = (a.samples_us, b.samples_us);
    if a.len().min(b.len()) < FEWEST_SAMPLES {
        return Comparison { ratio, interval: None, p: None, verdict: Verdict::Unknown };
    }
    let p = mann_whitney(a, b);
    let verdict = match (p < ALPHA && (ratio - 1.0).abs() >= tolerance, ratio < 1.0) {
        (false, _) => Verdict::Noise,
        (true, true) => Verdict::Faster,
        (true, false) => Verdict::Slower,
    };
    Comparison { ratio, interval: Some(bootstrap(a, b)), p: Some(p), verdict }
}

/// The two-sided p value that `a` and `b` come from one distribution.
fn mann_whitney(a: &[f64], b: &[f64]) -> f64 {
    let (n, m) = (a.len() as f64, b.len() as f64);
    let mut all: Vec<(f64, bool)> =
        a.iter().map(|&x| (x, true)).chain(b.iter().map(|&x| (x, false))).collect();
    all.sort_by(|x, y| x.0.total_cmp(&y.0));
    let (mut ranks_of_a, mut ties, mut start) = (0.0, 0.0, 0);
    while start < all.len() {
        let same = all[start..].iter().take_while(|x| x.0 == all[start].0).count();
        let rank = start as f64 + (same as f64 + 1.0) / 2.0;
        ranks_of_a += rank * all[start..start + same].iter().filter(|x| x.1).count() as f64;
        ties += (same * same * same - same) as f64;
        start += same;
    }
    let total = n + m;
    let u = ranks_of_a - n * (n + 1.0) / 2.0;
    let variance = n * m / 12.0 * (total + 1.0 - ties / (total * (total - 1.0)));
    if variance <= 0.0 {
        return 1.0;
    }
    let z = ((u - n * m / 2.0).abs() - 0.5).max(0.0) / variance.sqrt();
    erfc(z / std::f64::consts::SQRT_2).min(1.0)
}

/// The complementary error function for x >= 0 (Abramowitz and Stegun 7.1.26, to 1.5e-7).
fn erfc(x: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.327_591_1 * x);
    let series = [1.061_405_429, -1.453_152_027, 1.421_413_741, -0.284_496_736, 0.254_829_592];
    series.into_iter().fold(0.0, |sum, term| (sum + term) * t) * (-x * x).exp()
}

/// The 95% interval of the ratio of medians, B over A. The same samples give the same interval.
fn bootstrap(a: &[f64], b: &[f64]) -> (f64, f64) {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut median = |samples: &[f64]| {
        let drawn: Vec<f64> = samples.iter().map(|_| samples[rng.random_range(0..samples.len())]).collect();
        percentile(&drawn, 0.5)
    };
    let ratios: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let old = median(a);
            median(b) / old
        })
        .collect();
    (percentile(&ratios, 0.025), percentile(&ratios, 0.975))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(samples_us: &[f64]) -> Timed<'_> {
        Timed { what: String::new(), median_us: percentile(samples_us, 0.5), samples_us }
    }

    fn noisy(seed: u64, centre: f64) -> Vec<f64> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        (0..20).map(|_| centre + rng.random_range(-5.0..5.0)).collect()
    }

    #[test]
    fn the_test_agrees_with_a_known_case() {
        // Every value of one side below the other's: U = 0, z = (12.5 - 0.5) / sqrt(25 * 11 / 12).
        let p = mann_whitney(&[1.0, 2.0, 3.0, 4.0, 5.0], &[6.0, 7.0, 8.0, 9.0, 10.0]);
        assert!((p - 0.012_19).abs() < 1e-4, "{p}");
        assert_eq!(mann_whitney(&[3.0; 9], &[3.0; 9]), 1.0);
        let (a, b) = (noisy(1, 100.0), noisy(2, 101.0));
        assert!((mann_whitney(&a, &b) - mann_whitney(&b, &a)).abs() < 1e-12);
    }

    #[test]
    fn differences_are_told_from_noise() {
        let base = noisy(1, 100.0);
        let verdict = |samples: &[f64]| compare(&of(&base), &of(samples), 0.01).verdict;
        assert_eq!(verdict(&noisy(1, 100.0)), Verdict::Noise);
        assert_eq!(verdict(&noisy(2, 120.0)), Verdict::Slower);
        assert_eq!(verdict(&noisy(3, 80.0)), Verdict::Faster);
        // Sure, but smaller than what runs drift by.
        let shifted: Vec<f64> = vec![100.0; 20];
        let steady = compare(&of(&shifted), &of(&shifted.map_by(0.2)), 0.01);
        assert_eq!(steady.verdict, Verdict::Noise);
        assert!(steady.p.unwrap() < ALPHA);
        assert_eq!(verdict(&[50.0; 3]), Verdict::Unknown);
        // One slow iteration decides nothing.
        let mut spiked = noisy(1, 100.0);
        spiked[7] = 900.0;
        assert_eq!(verdict(&spiked), Verdict::Noise);
    }

    trait MapBy {
        fn map_by(&self, by: f64) -> Vec<f64>;
    }

    impl MapBy for Vec<f64> {
        fn map_by(&self, by: f64) -> Vec<f64> {
            self.iter().map(|x| x + by).collect()
        }
    }

    #[test]
    fn same_distributions_seldom_alarm() {
        let alarms = (0..200)
            .filter(|&i| {
                let (a, b) = (noisy(2 * i + 10, 100.0), noisy(2 * i + 11, 100.0));
                compare(&of(&a), &of(&b), 0.0).verdict != Verdict::Noise
            })
            .count();
        assert!(alarms <= 6, "{alarms} false alarms of 200 at 1%");
    }

    #[test]
    fn the_interval_holds_the_ratio() {
        let c = compare(&of(&noisy(4, 100.0)), &of(&noisy(5, 150.0)), 0.01);
        let (low, high) = c.interval.unwrap();
        assert!(low <= c.ratio && c.ratio <= high && low > 1.4 && high < 1.6, "{c:?}");
    }
}

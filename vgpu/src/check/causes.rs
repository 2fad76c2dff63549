//! Reports grouped by their causes.

use std::fmt;

use super::reports::{Report, ReportPlace};
use crate::fault::{Fault, FaultKind, Gap, Party};
use crate::names::{brief_name, counted};

/// Reports that one change of the kernel would fix: races with the same gaps, or races of the same
/// flags without gaps. Each report of another kind has its own cause.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cause {
    /// The cause as a sentence, with the line of each gap. Names of kernels are readable, without
    /// parameters.
    pub text: String,
    /// The gaps, of the first report.
    pub gaps: Vec<Gap>,
    /// Indices of the reports.
    pub reports: Vec<usize>,
    /// Occurrences of all of them.
    pub occurrences: u64,
}

/// Reports by their causes, as [`Report::summary`] groups them. Its text has a line for each cause
/// and each report, each with a newline at its end.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Summary {
    /// The causes, in the order of their first reports.
    pub causes: Vec<Cause>,
    /// One line for each report: its kind, class, kernels and places.
    pub reports: Vec<String>,
}

fn is_same_place(a: &Party, b: &Party) -> bool {
    ReportPlace::of(a).is_same_line(&ReportPlace::of(b))
}

fn is_same_gap(a: &Gap, b: &Gap) -> bool {
    (a.side, a.kind, a.needs) == (b.side, b.kind, b.needs) && is_same_place(&a.at, &b.at)
}

/// Whether both lists have the same elements, in any order.
fn is_same_set<T>(a: &[T], b: &[T], same: impl Fn(&T, &T) -> bool) -> bool {
    let within = |a: &[T], b: &[T]| a.iter().all(|x| b.iter().any(|y| same(x, y)));
    within(a, b) && within(b, a)
}

impl Report {
    /// Whether one change of the kernel would fix both.
    #[must_use]
    pub fn has_cause_of(&self, other: &Report) -> bool {
        let (FaultKind::Race(a), FaultKind::Race(b)) = (&self.fault.kind, &other.fault.kind) else {
            return self.is_alike(other);
        };
        if self.kind() != other.kind() || a.gaps.is_empty() != b.gaps.is_empty() {
            return false;
        }
        if !a.gaps.is_empty() {
            return is_same_set(&a.gaps, &b.gaps, is_same_gap);
        }
        let seen_alike = |x: &crate::fault::Attempt, y: &crate::fault::Attempt| {
            let same_write = match (&x.of, &y.of) {
                (Some(x), Some(y)) => is_same_place(x, y),
                (x, y) => x.is_none() && y.is_none(),
            };
            is_same_place(&x.what, &y.what) && same_write && x.verdict == y.verdict
        };
        let same_flags = !a.attempts.is_empty() && is_same_set(&a.attempts, &b.attempts, seen_alike);
        self.is_alike(other) || same_flags && a.missing == b.missing
    }

    /// Groups reports by their causes. Displayed, a summary has a line for each cause, and one for
    /// each of its reports.
    ///
    /// ```
    /// use epoxide_vgpu::{Machine, Report};
    ///
    /// let machine = Machine::checked(2, 0);
    /// // Behind `machine.run()`:
    /// print!("{}", Report::summary(&machine.reports()));
    /// ```
    #[must_use]
    pub fn summary(reports: &[Report]) -> Summary {
        let mut summary = Summary::default();
        for (at, report) in reports.iter().enumerate() {
            summary.reports.push(report.line());
            let known = |cause: &&mut Cause| reports[cause.reports[0]].has_cause_of(report);
            match summary.causes.iter_mut().find(known) {
                Some(cause) => {
                    cause.reports.push(at);
                    cause.occurrences += report.occurrences;
                }
                None => summary.causes.push(Cause {
                    text: report.cause(),
                    gaps: report.gaps().to_vec(),
                    reports: vec![at],
                    occurrences: report.occurrences,
                }),
            }
        }
        summary
    }

    /// The gaps of a race; empty for other kinds.
    #[must_use]
    pub fn gaps(&self) -> &[Gap] {
        match &self.fault.kind {
            FaultKind::Race(race) => &race.gaps,
            _ => &[],
        }
    }

    fn cause(&self) -> String {
        let gap = |gap: &Gap| {
            format!("{} ({}, in kernel '{}')", gap.sentence(), gap.place(), brief_name(&gap.at.kernel))
        };
        match &self.fault.kind {
            FaultKind::Race(race) if race.gaps.is_empty() => {
                format!("missing: {} (in kernel {})", race.missing, self.kernels())
            }
            FaultKind::Race(race) => race.gaps.iter().map(gap).collect::<Vec<_>>().join("; "),
            kind => {
                let text = kind.to_string();
                format!("{} (in kernel {})", text.lines().next().unwrap_or_default(), self.kernels())
            }
        }
    }

    /// The names of the kernels of its places.
    fn kernels(&self) -> String {
        let places = self.places();
        let kernels = places.iter().filter(|at| !at.kernel.is_empty());
        let mut kernels: Vec<String> = kernels.map(|at| format!("'{}'", brief_name(&at.kernel))).collect();
        kernels.dedup();
        kernels.join(" and ")
    }

    fn line(&self) -> String {
        let Fault { kind, .. } = &self.fault;
        let on = match kind {
            FaultKind::Race(race) if race.space == "shared" => " on shared memory".to_owned(),
            FaultKind::Race(race) => format!(" on '{}'", race.label),
            _ => String::new(),
        };
        let hazard = self.hazard().map_or_else(String::new, |hazard| format!(" {}", hazard.name()));
        let place = |place: &ReportPlace| match place.kernel.as_str() {
            "" => "the host".to_owned(),
            _ => place.at.line(),
        };
        format!(
            "{} ({}){hazard}{on} at {} in kernel {}, {}",
            self.kind(),
            self.class(),
            self.places().iter().map(place).collect::<Vec<_>>().join(" and "),
            self.kernels(),
            counted(self.occurrences, "time")
        )
    }
}

impl fmt::Display for Cause {
    /// The cause in one line, with the number of its reports.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reports = counted(self.reports.len() as u64, "report");
        write!(f, "cause: {reports}, {}: {}", counted(self.occurrences, "time"), self.text)
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.causes.iter().try_for_each(|cause| {
            writeln!(f, "{cause}")?;
            cause.reports.iter().try_for_each(|report| writeln!(f, "  {}", self.reports[*report]))
        })
    }
}

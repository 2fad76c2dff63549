//! Collected reports: one for each pair of lines, its class, and lists of accepted ones.

use std::collections::HashMap;

use crate::fault::{Fault, FaultKind, Hazard, InstructionPlace, Party};
use crate::ptx::SourceLine;

/// The kind of error that a report shows, the worst first. Each class has a rule that the checker
/// decides from the run alone, without an assumption on hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Class {
    /// A race that no stated assumption removes: nothing orders the two accesses. Another schedule,
    /// or weak memory ([`CheckConfig::weak_memory`](crate::CheckConfig::weak_memory)), may give
    /// other results.
    Corrupts,
    /// A race, or an arrival of too narrow a scope, by the letter of the memory model only: one of the
    /// [`Assumptions`](crate::Assumptions) orders the two accesses, and the report names it.
    Model,
    /// The accesses are ordered, but one of them is a bulk copy, and there is no
    /// `fence.proxy.async` between the ordering and the copy.
    Proxy,
    /// Memory or a register is used before its first write, or memory after it was freed, after its
    /// block has ended, or by a copy that outlives its block.
    Lifetime,
    /// An address outside of its memory, misaligned, or of the wrong kind for its instruction.
    Bounds,
    /// A barrier, a mask, an mbarrier or a wait is used wrongly, or nothing can go on.
    Synchronisation,
    /// The kernel stopped itself, or it uses something that the virtual GPU lacks.
    Stopped,
}

impl Class {
    /// All of them.
    pub const ALL: [Class; 7] = [
        Class::Corrupts,
        Class::Model,
        Class::Proxy,
        Class::Lifetime,
        Class::Bounds,
        Class::Synchronisation,
        Class::Stopped,
    ];

    /// The name in reports and files, such as `corrupts`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Class::Corrupts => "corrupts",
            Class::Model => "model",
            Class::Proxy => "proxy",
            Class::Lifetime => "lifetime",
            Class::Bounds => "bounds",
            Class::Synchronisation => "synchronisation",
            Class::Stopped => "stopped",
        }
    }

    /// The rule, as a sentence.
    #[must_use]
    pub fn rule(self) -> &'static str {
        match self {
            Class::Corrupts => {
                "Nothing orders two accesses: another schedule or weak memory may give other results."
            }
            Class::Model => {
                "The memory model does not order two accesses, but an assumption that can be stated does."
            }
            Class::Proxy => {
                "Two accesses are ordered, but no fence.proxy.async stands between the order and a bulk copy."
            }
            Class::Lifetime => {
                "Memory or a register is used before its first write, or memory after its end, or by a copy that outlives its \
                 block."
            }
            Class::Bounds => {
                "An address is outside of its memory, misaligned, or of the wrong kind for its instruction."
            }
            Class::Synchronisation => {
                "A barrier, a mask, an mbarrier or a wait is used wrongly, or nothing can go on."
            }
            Class::Stopped => "The kernel stopped itself, or it uses something that the virtual GPU lacks.",
        }
    }
}

impl std::fmt::Display for Class {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A line of a kernel that a report names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReportPlace {
    /// Kernel name; empty for the host and for copies in a stream.
    pub kernel: String,
    /// The instruction.
    pub at: InstructionPlace,
}

impl ReportPlace {
    /// The instruction of one side of a race, or of a gap.
    #[must_use]
    pub fn of(party: &Party) -> ReportPlace {
        ReportPlace { kernel: party.kernel.clone(), at: party.at.clone() }
    }

    /// Whether both are the same line of the source of the same kernel; without line information,
    /// the same line of PTX. An unrolled loop has many lines of PTX for one of the source.
    #[must_use]
    pub fn is_same_line(&self, other: &ReportPlace) -> bool {
        let (a, b) = (&self.at, &other.at);
        let line = |at: &InstructionPlace| at.source.is_none().then_some(at.ptx_line);
        self.kernel == other.kernel
            && (&a.source, &a.inlined) == (&b.source, &b.inlined)
            && line(a) == line(b)
    }
}

/// A report that was collected: the first occurrence of its [`Hazard`] at a pair of lines, and how
/// many there were. [`ReportPlace::is_same_line`] defines which lines are the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The first occurrence.
    pub fault: Fault,
    /// Occurrences, the first one included.
    pub occurrences: u64,
    /// A run has ended with it: no kernel has executed anything behind it.
    pub ended_run: bool,
}

impl Report {
    /// A report of a fault that occurred once.
    #[must_use]
    pub fn new(fault: Fault) -> Self {
        Self { fault, occurrences: 1, ended_run: false }
    }

    /// The class of the first occurrence.
    #[must_use]
    pub fn class(&self) -> Class {
        self.fault.kind.class()
    }

    /// The kind, such as `race`; see [`FaultKind::name`].
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.fault.kind.name()
    }

    /// The line of the access that was reported, and for a race that of the earlier access.
    #[must_use]
    pub fn places(&self) -> Vec<ReportPlace> {
        let Fault { kernel, at, kind, .. } = &self.fault;
        let here = ReportPlace { kernel: kernel.clone(), at: at.clone() };
        let FaultKind::Race(race) = kind else { return vec![here] };
        vec![here, ReportPlace::of(&race.other)]
    }

    /// The kinds of the two accesses of a race; `None` for other kinds.
    #[must_use]
    pub fn hazard(&self) -> Option<Hazard> {
        match &self.fault.kind {
            FaultKind::Race(race) => Some(race.hazard),
            _ => None,
        }
    }

    /// Whether it is of the same kind and [`Hazard`] at the same pair of lines, in either order. So
    /// a read after a write and a write after a read are two reports: each has its own remedy.
    #[must_use]
    pub fn is_alike(&self, other: &Report) -> bool {
        let same = match (self.places().as_slice(), other.places().as_slice()) {
            ([a], [x]) => a.is_same_line(x),
            ([a, b], [x, y]) => {
                a.is_same_line(x) && b.is_same_line(y) || a.is_same_line(y) && b.is_same_line(x)
            }
            _ => false,
        };
        same && self.kind() == other.kind() && self.hazard() == other.hazard()
    }

    /// Adds the reports `more` of another run to `all`. A report that is there already
    /// ([`Report::is_alike`]) raises the count, and replaces the old report if its class is worse.
    pub fn merge(all: &mut Vec<Report>, more: Vec<Report>) {
        for report in more {
            match all.iter_mut().find(|known| known.is_alike(&report)) {
                Some(known) => known.add(report),
                None => all.push(report),
            }
        }
    }

    /// Adds the occurrences of a report that is alike.
    pub(crate) fn add(&mut self, other: Report) {
        self.occurrences += other.occurrences;
        self.ended_run |= other.ended_run;
        if other.class() < self.class() {
            self.fault = other.fault;
        }
    }
}

/// An access's line in a kernel: the identity of the kernel, and [`Kernel::lines`].
///
/// [`Kernel::lines`]: crate::Kernel
pub(super) type Line = (usize, [SourceLine; 2]);
/// The kind, a pair of lines in order, and the kinds of the accesses of a race.
pub(super) type Pair = (&'static str, [Line; 2], Option<Hazard>);

/// The reports that a checker has collected.
#[derive(Debug, Default)]
pub(crate) struct Reports {
    /// Reports that are collected at the most.
    pub(crate) limit: usize,
    all: Vec<Report>,
    known: HashMap<Pair, usize>,
}

impl Reports {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, ..Self::default() }
    }

    /// Whether a report at these lines was collected before. If so, counts one more occurrence.
    pub(super) fn count_again(&mut self, pair: &Pair) -> bool {
        let known = self.known.get(pair).and_then(|&at| self.all.get_mut(at));
        known.map(|report| report.occurrences += 1).is_some()
    }

    /// Whether a new report ends the run.
    pub(crate) fn is_full(&self) -> bool {
        self.all.len() >= self.limit
    }

    pub(super) fn add(&mut self, pair: Pair, fault: Fault) {
        self.known.insert(pair, self.all.len());
        self.all.push(Report::new(fault));
    }

    /// Notes a fault whose lines have not been looked up. Returns it if there is no room.
    pub(crate) fn note(&mut self, fault: Box<Fault>) -> Result<(), Box<Fault>> {
        let report = Report::new(*fault);
        if let Some(known) = self.all.iter_mut().find(|known| known.is_alike(&report)) {
            known.occurrences += 1;
        } else if self.is_full() {
            return Err(Box::new(report.fault));
        } else {
            self.all.push(report);
        }
        Ok(())
    }

    pub(crate) fn all(&self) -> &[Report] {
        &self.all
    }
}

/// A line of an [`AcceptList`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Line in the file, from 1.
    pub line: usize,
    /// The kind of the reports, or `*`.
    pub kind: String,
    /// A part of the name of one of the kernels, or `*`.
    pub kernel: String,
    /// One or two places: `ptx:LINE` or `FILE:LINE`, of which `FILE` is the end of a path.
    pub places: Vec<String>,
    /// Why these reports are accepted.
    pub reason: String,
    used: bool,
}

impl Accepted {
    fn fits(&self, kind: &str, places: &[ReportPlace], name_of: &dyn Fn(&str) -> String) -> bool {
        let kernel = |place: &ReportPlace| {
            self.kernel == "*"
                || place.kernel.contains(&self.kernel)
                || name_of(&place.kernel).contains(&self.kernel)
        };
        let at = |text: &String, place: &ReportPlace| match text.split_once("ptx:") {
            Some(("", line)) => line.parse() == Ok(place.at.ptx_line),
            _ => [&place.at.source, &place.at.inlined].into_iter().flatten().any(|(file, line)| {
                let full = format!("{file}:{line}");
                full.strip_suffix(text.as_str()).is_some_and(|head| head.is_empty() || head.ends_with('/'))
            }),
        };
        let fit = match (self.places.as_slice(), places) {
            ([one], all) => all.iter().any(|place| at(one, place)),
            ([a, b], [x, y]) => at(a, x) && at(b, y) || at(a, y) && at(b, x),
            _ => false,
        };
        fit && (self.kind == "*" || self.kind == kind) && places.iter().any(kernel)
    }
}

/// Reports that are known and accepted, from a file.
///
/// A line of the file is `KIND KERNEL PLACE [PLACE] -- REASON`; empty lines and lines that begin
/// with `#` are left out. `KIND` is a [`Report::kind`] or `*`. `KERNEL` is a part of the name of a
/// kernel, mangled or not, or `*`. A place is `ptx:LINE`, or `FILE:LINE` with the end of the path
/// of a source file: that of the kernel, or that of a function inlined there. An entry with one
/// place accepts the reports of which either side is there.
///
/// ```
/// let list = epoxide_vgpu::AcceptList::parse(
///     "race dispatch intranode.cu:470 intranode.cu:360 -- the ring has room for all tokens",
/// )?;
/// assert_eq!(list.entries()[0].reason, "the ring has room for all tokens");
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AcceptList(Vec<Accepted>);

impl AcceptList {
    /// Reads the text of a file.
    ///
    /// # Errors
    /// A line without its parts, with its number.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut entries = vec![];
        for (line, content) in (1..).zip(text.lines().map(str::trim)) {
            if content.is_empty() || content.starts_with('#') {
                continue;
            }
            let (head, reason) = content.split_once(" -- ").map_or((content, ""), |(a, b)| (a, b.trim()));
            let words: Vec<&str> = head.split_whitespace().collect();
            let ([kind, kernel, places @ ..], false) = (words.as_slice(), reason.is_empty()) else {
                return Err(format!("line {line}: '{content}' is not KIND KERNEL PLACE [PLACE] -- REASON"));
            };
            let is_place = |place: &&str| {
                place.rsplit_once(':').is_some_and(|(file, n)| !file.is_empty() && n.parse::<u32>().is_ok())
            };
            if !(1..=2).contains(&places.len()) || !places.iter().all(is_place) {
                return Err(format!(
                    "line {line}: needs one or two places such as ptx:120 or kernel.cu:17 between the kernel and ' -- '"
                ));
            }
            entries.push(Accepted {
                line,
                kind: (*kind).to_owned(),
                kernel: (*kernel).to_owned(),
                places: places.iter().map(|&place| place.to_owned()).collect(),
                reason: reason.to_owned(),
                used: false,
            });
        }
        Ok(Self(entries))
    }

    /// The reason for which a report is accepted, if it is. `name_of` gives the readable name of a
    /// kernel. All entries that fit count as used.
    pub fn accepts(&mut self, report: &Report, name_of: &dyn Fn(&str) -> String) -> Option<String> {
        let (kind, places) = (report.kind(), report.places());
        let mut reason = None;
        for entry in self.0.iter_mut().filter(|entry| entry.fits(kind, &places, name_of)) {
            entry.used = true;
            reason.get_or_insert_with(|| entry.reason.clone());
        }
        reason
    }

    /// All entries.
    #[must_use]
    pub fn entries(&self) -> &[Accepted] {
        &self.0
    }

    /// The entries that have accepted nothing.
    pub fn unused(&self) -> impl Iterator<Item = &Accepted> {
        self.0.iter().filter(|entry| !entry.used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::Race;

    fn race(here: (&str, usize), there: (&str, usize)) -> Report {
        let at = |line: usize| InstructionPlace {
            ptx_line: line,
            source: Some(("/src/a/ring.cu".to_owned(), line as u32)),
            ..InstructionPlace::default()
        };
        let other = Party { kernel: there.0.into(), at: at(there.1), ..Party::default() };
        let race = Race { other, class: Class::Corrupts, ..Race::default() };
        Report::new(Fault {
            kernel: here.0.into(),
            device: None,
            block: [0; 3],
            warp: 0,
            lane: None,
            at: at(here.1),
            kind: FaultKind::Race(Box::new(race)),
            address: vec![],
            traces: vec![],
        })
    }

    #[test]
    fn reports_of_several_runs_merge_by_their_lines_in_either_order() {
        let mut all = vec![race(("a", 3), ("b", 5))];
        Report::merge(&mut all, vec![race(("b", 5), ("a", 3)), race(("a", 5), ("b", 3))]);
        assert_eq!(all.iter().map(|report| report.occurrences).collect::<Vec<_>>(), [2, 1]);
    }

    #[test]
    fn an_accept_list_matches_kinds_kernels_and_places() {
        let accepts = |text: &str| {
            let mut list = AcceptList::parse(text).unwrap();
            let found = list.accepts(&race(("_Z1av", 3), ("b", 5)), &|name| name.replace("_Z1av", "a()"));
            assert_eq!(list.unused().count(), usize::from(found.is_none()), "{text}");
            found.is_some()
        };
        for text in [
            "race a() ptx:3 ptx:5 -- known",
            "* * ptx:5 ptx:3 -- known",
            "race b ring.cu:5 -- known",
            "race _Z1av a/ring.cu:3 ptx:5 -- known",
        ] {
            assert!(accepts(text), "{text}");
        }
        for text in [
            "unwritten-read a ptx:3 -- another kind",
            "race c ptx:3 -- another kernel",
            "race a ptx:4 -- another line",
            "race a ptx:3 ptx:3 -- another pair",
            "race a ing.cu:3 -- a part of a file's name",
        ] {
            assert!(!accepts(text), "{text}");
        }
    }

    #[test]
    fn a_bad_line_of_an_accept_list_is_named() {
        for text in ["race a ptx:3", "race -- why", "race a b -- why", "race a ptx:1 ptx:2 ptx:3 -- why"] {
            let error = AcceptList::parse(&format!("# list\n\n{text}\n")).unwrap_err();
            assert!(error.starts_with("line 3: "), "{error}");
        }
    }
}

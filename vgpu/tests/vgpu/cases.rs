//! Check mode, as a specification in files: faults that shipped in other people's communication
//! kernels, each beside its repaired version, and the rules of the checker one by one.
//!
//! A file of `cases/` is a correct kernel and the edits that break it; its README describes the
//! format. The correct kernel must run without a report and compute the same under every seed, and
//! the broken one must be reported under every seed. The schedule decides which of the two accesses
//! comes second, so a case marks both. The synchronisation that would have ordered them is part of
//! the report, and of the case.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use epoxide_vgpu::{
    Assumptions, CheckConfig, Cluster, FaultKind, GridConfig, MachineError, Module, for_each_seed,
};

use crate::common::{broken_seeds, correct_seeds, kernel, launch, replaying, run_numbered};

/// Shared variables that the kernels use: data, and an mbarrier.
pub const SHARED: &str = ".shared .align 128 .b8 DATA[1024];\n.shared .align 8 .b8 MBAR[16];";

/// How many runs of a broken kernel must show that it is.
#[derive(Clone, Copy, PartialEq)]
enum Seeds {
    Every,
    Most,
    Some,
}

/// A kernel, and the required outcome of its runs.
struct Variant {
    /// File and variant, for messages.
    name: String,
    ptx: String,
    module: Module,
    shape: GridConfig,
    /// The mode, given a seed; `None` is fast mode.
    modes: Vec<fn(u64) -> Option<CheckConfig>>,
    assume: Assumptions,
    result: Vec<(usize, u64)>,
    /// The class of the report of a broken kernel, where the file gives one.
    class: Option<String>,
    /// Parts of the report of a broken kernel.
    reports: Vec<String>,
    /// `None` for a kernel that passes.
    broken: Option<Seeds>,
    /// Lines of the two accesses, by number.
    marks: [Vec<usize>; 2],
}

fn mode(name: &str) -> fn(u64) -> Option<CheckConfig> {
    match name {
        "fast" => |_| None,
        "check" => |_| Some(CheckConfig::default()),
        "strict" => |_| Some(CheckConfig { strict_exits: true, ..CheckConfig::default() }),
        "weak" => {
            |seed| Some(CheckConfig { races: false, weak_memory: Some(seed), ..CheckConfig::default() })
        }
        _ => panic!("no mode '{name}'"),
    }
}

/// Splits `[a, b] rest` into the names and the rest. Without brackets there are no names.
fn named(text: &str) -> (Vec<&str>, &str) {
    match text.strip_prefix('[').and_then(|text| text.split_once(']')) {
        Some((names, rest)) => (names.split(',').map(str::trim).collect(), rest.trim()),
        None => (vec![], text.trim()),
    }
}

fn number(text: &str) -> u64 {
    let digits = text.strip_prefix("0x");
    let value = digits.map_or_else(|| text.parse(), |digits| u64::from_str_radix(digits, 16));
    value.unwrap_or_else(|e| panic!("'{text}': {e}"))
}

/// All variants of a file, the correct one first.
fn variants(path: &Path) -> Vec<Variant> {
    let text = std::fs::read_to_string(path).unwrap();
    let mut names = vec![""];
    for line in text.lines().map(str::trim_start) {
        let Some(edit) = line.strip_prefix("//@").or(line.strip_prefix("//")) else { continue };
        for name in named(edit).0 {
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    names.iter().map(|name| variant(path, &text, name, names.len() > 1)).collect()
}

fn variant(path: &Path, text: &str, name: &str, has_variants: bool) -> Variant {
    let title = format!("{}[{name}]", path.file_name().unwrap().to_str().unwrap());
    let mut body: Vec<&str> = vec![];
    let mut settings: Vec<(Vec<&str>, &str)> = vec![];
    // The index of the line above, which edits replace, and the lines of this variant alone.
    let (mut above, mut own) = (0, vec![]);
    for line in text.lines() {
        let start = line.trim_start();
        if let Some(setting) = start.strip_prefix("//@") {
            settings.push(named(setting));
        } else if let Some(edit) = start.strip_prefix("//").filter(|edit| edit.starts_with('[')) {
            let (names, line) = named(edit);
            if names.contains(&name) {
                body[above] = line;
                own.push(above);
            }
        } else if !start.starts_with("//") {
            above = body.len();
            body.push(line);
        }
    }
    const KEYS: [&str; 8] = ["launch", "mode", "assume", "result", "report", "class", "seeds", "passes"];
    for (_, setting) in &settings {
        assert!(KEYS.contains(&setting.split(':').next().unwrap()), "{title}: no setting '{setting}'");
    }
    // The settings of this variant, else those of all.
    let values = |key: &str| -> Vec<&str> {
        let of_key = |text: &'_ &str| text.split_once(':').map_or(*text, |(key, _)| key) == key;
        let all = settings.iter().filter(|(_, text)| of_key(text));
        let own: Vec<_> = all.clone().filter(|(names, _)| names.contains(&name)).collect();
        let general = all.filter(|(names, _)| names.is_empty());
        let chosen = if own.is_empty() { general.collect() } else { own };
        chosen
            .into_iter()
            .map(|(_, text)| text.split_once(':').map_or("", |(_, value)| value.trim()))
            .collect()
    };
    let one = |key: &str, default| values(key).first().copied().unwrap_or(default);
    let ptx = kernel(SHARED, &body.join("\n"));
    let first = ptx.lines().count() - 2 - body.len();
    let mut marks = [vec![], vec![]];
    let mut general = marks.clone();
    for (at, line) in body.iter().enumerate() {
        for mark in line.split("//~").skip(1) {
            let (names, letter) = named(mark);
            let kind = ["A", "B"].iter().position(|known| *known == letter).expect(letter);
            if names.contains(&name) || names.is_empty() && own.contains(&at) {
                marks[kind].push(first + at + 1);
            } else if names.is_empty() {
                general[kind].push(first + at + 1);
            }
        }
    }
    // Marks of its own take the place of those for all, letter by letter.
    for (own, general) in marks.iter_mut().zip(general) {
        if own.is_empty() {
            *own = general;
        }
    }
    let broken = if has_variants {
        !name.is_empty() && values("passes").is_empty()
    } else {
        !values("report").is_empty()
    };
    let seeds = match one("seeds", "every") {
        "every" => Seeds::Every,
        "most" => Seeds::Most,
        "some" => Seeds::Some,
        other => panic!("{title}: seeds: {other}"),
    };
    let (shape, cluster) = match one("launch", "1 x 1").split_once(" in clusters of ") {
        Some((shape, cluster)) => (shape, Some([number(cluster) as u32, 1, 1])),
        None => (one("launch", "1 x 1"), None),
    };
    let (blocks, threads) = shape.split_once(" x ").expect("BLOCKS x THREADS");
    let word = |text: &str| {
        let (word, value) = text.split_once('=').expect("WORD = VALUE");
        (number(word.trim()) as usize, number(value.trim()))
    };
    let mut assume = Assumptions::default();
    for name in values("assume") {
        assume.state(name).unwrap_or_else(|e| panic!("{title}: {e}"));
    }
    Variant {
        assume,
        class: values("class").first().map(|&class| class.to_owned()),
        module: Module::parse(&ptx).unwrap_or_else(|e| panic!("{title}: {e}")),
        name: title,
        shape: GridConfig {
            cluster: cluster.map(Cluster::from),
            ..launch(number(blocks) as u32, number(threads) as u32)
        },
        modes: one("mode", "check").split(',').map(|name| mode(name.trim())).collect(),
        result: one("result", "").split_terminator(',').map(word).collect(),
        reports: values("report").into_iter().map(str::to_owned).collect(),
        broken: broken.then_some(seeds),
        marks,
        ptx,
    }
}

impl Variant {
    fn run(&self, mode: fn(u64) -> Option<CheckConfig>, seed: u64) -> Result<Vec<u64>, MachineError> {
        // Classes are decided for collected reports.
        let collect = usize::from(self.class.is_some());
        let check = mode(seed).map(|check| CheckConfig { assume: self.assume, collect, ..check });
        run_numbered(&self.module, self.shape, seed, check)
    }

    fn check(&self) {
        let Some(seeds) = self.broken else {
            return for_each_seed(correct_seeds(), |seed| {
                for mode in &self.modes {
                    let got = self.run(*mode, seed);
                    self.assert_result(&got.unwrap_or_else(|e| panic!("{}: {e}", self.name)));
                }
            });
        };
        let runs = if seeds == Seeds::Every { broken_seeds() } else { correct_seeds() };
        for mode in &self.modes {
            let mut found = 0;
            for_each_seed(runs, |seed| match self.run(*mode, seed) {
                Err(error) => {
                    self.assert_report(&error);
                    found += 1;
                }
                Ok(got) => {
                    assert!(seeds != Seeds::Every, "{}: no report", self.name);
                    found += u64::from(seeds == Seeds::Some && !self.holds(&got));
                }
            });
            let enough = match seeds {
                Seeds::Every => runs - 1,
                Seeds::Most => runs / 2,
                Seeds::Some => 0,
            };
            assert!(found > enough || replaying(), "{}: {found} of {runs} seeds", self.name);
        }
    }

    fn holds(&self, got: &[u64]) -> bool {
        self.result.iter().all(|&(word, value)| got[word] == value)
    }

    fn assert_result(&self, got: &[u64]) {
        assert!(self.holds(got), "{}: {got:x?} instead of {:x?}", self.name, self.result);
    }

    fn assert_report(&self, error: &MachineError) {
        let (name, text) = (&self.name, error.to_string());
        for part in &self.reports {
            assert!(text.contains(part), "{name}: does not say '{part}': {text}");
        }
        let MachineError::Fault(fault) = error else { return };
        if let Some(class) = &self.class {
            assert_eq!(fault.kind.class().name(), class, "{name}: {text}");
        }
        let mut lines = vec![(fault.at.ptx_line, &fault.at.ptx_text)];
        let [a, b] = &self.marks;
        let at_marks = if let FaultKind::Race(race) = &fault.kind {
            assert_eq!((race.other.kernel.as_str(), fault.kernel.as_str()), ("k", "k"), "{name}: {text}");
            lines.push((race.other.at.ptx_line, &race.other.at.ptx_text));
            let b = if b.is_empty() { a } else { b };
            let between = |first, second| a.contains(&first) && b.contains(&second);
            between(lines[0].0, lines[1].0) || between(lines[1].0, lines[0].0)
        } else {
            a.contains(&lines[0].0)
        };
        assert!(at_marks, "{name}: not at the marked lines {:?}: {text}", self.marks);
        // The numbers of the lines are those of the text.
        for (number, line) in lines {
            assert_eq!(self.ptx.lines().nth(number - 1).unwrap().trim(), line.trim(), "{name}: {text}");
        }
    }
}

#[test]
fn files() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../vgpu/tests/vgpu/cases");
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = paths.filter(|path| path.extension().is_some_and(|end| end == "ptx")).collect();
    paths.sort();
    let all: Vec<Variant> = paths.iter().flat_map(|path| variants(path)).collect();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(vec![]));
    let work = || {
        while let Some(variant) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            if catch_unwind(AssertUnwindSafe(|| variant.check())).is_err() {
                failed.lock().unwrap().push(&variant.name);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "of {} variants, these fail: {failed:?}", all.len());
}

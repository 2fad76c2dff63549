//! Figures that are not in a results file: those of other projects, and of this one if only a table
//! was kept. Each has its version, command and date, or a note that none was recorded.

use serde::{Deserialize, Serialize};

use crate::results::SCHEMA_VERSION;

/// Longest time, in microseconds: ten years.
const LONGEST_US: f64 = 3.2e14;

/// A drawing's worth of figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// [`SCHEMA_VERSION`] of the writer.
    pub schema_version: u32,
    /// Hardware, sizes.
    pub title: String,
    /// The timed work, and the differences between systems.
    pub note: String,
    /// How they are drawn.
    pub style: Style,
    /// Label of the positions of a panel.
    pub x_label: String,
    /// The systems, in the order of the legend.
    pub systems: Vec<System>,
    /// The panels.
    pub panels: Vec<Panel>,
}

/// How figures are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Style {
    /// A line for each system.
    Lines,
    /// The same, and panels with the fastest of this project's over the fastest of the others'.
    LinesAndRatios,
    /// A group of bars for each position.
    Bars,
}

/// A measured system.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct System {
    /// Common name of the system.
    pub name: String,
    /// Version or commit; for this project the kernels.
    pub version: String,
    /// The command that was run.
    pub command: String,
    /// Day of the measurement.
    pub date: String,
    /// Whether it is this project.
    #[serde(default)]
    pub is_ours: bool,
}

/// Times of one thing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Panel {
    /// The timed operation.
    pub title: String,
    /// The positions, such as numbers of tokens.
    pub x: Vec<String>,
    /// The lines, each of as many values as there are positions.
    pub lines: Vec<Line>,
}

/// Times of a system.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Index of the system.
    pub system: usize,
    /// Medians in microseconds; `null` where there is none.
    pub us: Vec<Option<f64>>,
    /// 99th percentiles.
    #[serde(default)]
    pub p99_us: Vec<Option<f64>>,
}

impl Figures {
    /// The figures in a text; `None` if the text is another kind of file.
    ///
    /// # Errors
    /// The first fault of the figures.
    pub fn of_text(text: &str) -> Result<Option<Figures>, String> {
        let broken = |error: serde_json::Error| format!("not a file of figures: {error}");
        match serde_json::from_str::<serde_json::Value>(text) {
            Ok(value) if value.get("panels").is_some() => {
                let figures: Figures = serde_json::from_value(value).map_err(broken)?;
                figures.check().map(|()| Some(figures))
            }
            _ => Ok(None),
        }
    }

    /// Parses bytes as figures, which are rejected with a reason, or are the same when written and
    /// read again. For the fuzz target.
    ///
    /// # Panics
    /// The rule above does not hold.
    pub fn fuzz(bytes: &[u8]) {
        match Figures::of_text(&String::from_utf8_lossy(bytes)) {
            Ok(Some(figures)) => {
                let again = serde_json::to_string(&figures).map(|text| Figures::of_text(&text));
                let same = matches!(&again, Ok(Ok(Some(again))) if *again == figures);
                assert!(same, "{figures:?}, then {again:?}");
                for panel in &figures.panels {
                    for at in 0..panel.x.len() {
                        let [ours, others] =
                            [true, false].map(|ours| panel.fastest(at, &figures.systems, ours));
                        let is_time = |us: f64| (0.0..=LONGEST_US).contains(&us);
                        assert!([ours, others].into_iter().flatten().all(is_time));
                    }
                }
            }
            Ok(None) => {}
            Err(reason) => assert!(!reason.is_empty()),
        }
    }

    fn check(&self) -> Result<(), String> {
        if self.schema_version != SCHEMA_VERSION {
            return Err(format!("schema_version {}; figures have {SCHEMA_VERSION}", self.schema_version));
        }
        for panel in &self.panels {
            for line in &panel.lines {
                let (title, count) = (&panel.title, panel.x.len());
                if line.system >= self.systems.len() {
                    return Err(format!("{title}: a line is of system {}, which there is not", line.system));
                }
                if line.us.len() != count || !(line.p99_us.is_empty() || line.p99_us.len() == count) {
                    return Err(format!("{title}: a line has not one value for each of {count} positions"));
                }
                let values = line.us.iter().chain(&line.p99_us).flatten();
                if let Some(us) = values.into_iter().find(|us| !(0.0..=LONGEST_US).contains(*us)) {
                    return Err(format!("{title}: {us} is no time in us"));
                }
            }
        }
        match self.panels.iter().all(|panel| panel.x.is_empty() || panel.lines.is_empty()) {
            true => Err("holds no figures".into()),
            false => Ok(()),
        }
    }
}

impl Panel {
    /// The smallest time at a position among this project's systems, or among the others.
    pub fn fastest(&self, at: usize, systems: &[System], ours: bool) -> Option<f64> {
        let lines = self.lines.iter().filter(|line| systems[line.system].is_ours == ours);
        lines.filter_map(|line| line.us[at]).min_by(f64::total_cmp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_figures_do_not_panic() {
        let samples = [
            include_str!("../data/peers-h200.json"),
            include_str!("../data/low-latency-2xh200.json"),
            include_str!("../data/nccl-2xh200.json"),
        ];
        let samples = samples.map(|text| text.as_bytes().to_vec());
        epoxide_testing::fuzz::run("figures", 5_000, &samples, Figures::fuzz);
    }

    #[test]
    fn figures_that_contradict_themselves_are_refused() {
        let one = |us: &str, system: usize| {
            format!(
                r#"{{"schema_version": 2, "title": "", "note": "", "style": "bars", "x_label": "",
                    "systems": [{{"name": "a", "version": "1", "command": "b", "date": "2026-11-23"}}],
                    "panels": [{{"title": "pair", "x": ["1"], "lines": [{{"system": {system}, "us": {us}}}]}}]}}"#
            )
        };
        assert!(Figures::of_text(&one("[12.5]", 0)).unwrap().is_some());
        assert_eq!(Figures::of_text("{\"points\": []}"), Ok(None));
        for (text, part) in [
            (one("[12.5]", 1), "pair: a line is of system 1"),
            (one("[1, 2]", 0), "not one value for each of 1 positions"),
            (one("[-1]", 0), "-1 is no time"),
            (one("7", 0), "not a file of figures"),
            (one("[1]", 0).replace("version\": 2", "version\": 1"), "schema_version 1"),
            (one("[]", 0).replace("[\"1\"]", "[]"), "holds no figures"),
        ] {
            let error = Figures::of_text(&text).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}

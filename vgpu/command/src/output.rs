//! Findings as text, as JSON and as SARIF 2.1.0.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum;
use epoxide_vgpu::{Class, Gap, Hazard, InstructionPlace, Report, ReportPlace, Side};
use serde_json::{Value, json};

use crate::names::readable;

/// Forms of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// One object with everything.
    Json,
    /// SARIF 2.1.0, for code hosts and editors.
    Sarif,
}

/// The meaning of the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Clean,
    Reports,
}

/// A line of a kernel.
#[derive(Clone, Debug)]
pub struct Place {
    /// Readable name; empty where no kernel is to blame.
    pub kernel: String,
    /// The PTX file.
    pub ptx: PathBuf,
    pub at: InstructionPlace,
}

impl Place {
    pub fn of(ptx: &Path, place: ReportPlace) -> Self {
        Self { kernel: readable(&place.kernel), ptx: ptx.to_owned(), at: place.at }
    }

    fn json(&self) -> Value {
        let (file, line) = self.at.source.clone().unzip();
        json!({
            "kernel": self.kernel,
            "ptx": self.ptx.display().to_string(),
            "ptx_line": self.at.ptx_line,
            "ptx_text": self.at.ptx_text,
            "source": file,
            "line": line,
            "callers": self.callers(|file, line| json!({ "source": file, "line": line })),
        })
    }

    /// The calls that led there, the nearest first.
    fn callers(&self, call: impl Fn(&str, u32) -> Value) -> Vec<Value> {
        self.at.callers.iter().map(|(file, line)| call(file, *line)).collect()
    }

    /// The line and the calls that led there, as frames of a stack. `None` without calls.
    fn stack(&self) -> Option<Value> {
        let frame = |location: Value| json!({ "location": location });
        let calls = self.callers(|file, line| frame(location(file, line.into(), "")));
        if calls.is_empty() {
            return None;
        }
        let frames: Vec<Value> = std::iter::once(frame(self.location())).chain(calls).collect();
        Some(json!({ "frames": frames }))
    }

    fn in_ptx(&self) -> Value {
        location(&self.ptx.display().to_string(), self.at.ptx_line as u64, &self.kernel)
    }

    /// The kernel and the line, the same for every machine that compiles the source.
    fn fingerprint(&self) -> String {
        match &self.at.source {
            Some((file, line)) => {
                let name = file.rsplit('/').next().unwrap_or(file);
                format!("{}:{name}:{line}", self.kernel)
            }
            None => format!("{}:{}", self.kernel, self.at.ptx_line),
        }
    }

    /// The line of the source, where the PTX names it.
    fn location(&self) -> Value {
        match &self.at.source {
            Some((file, line)) => location(file, u64::from(*line), &self.kernel),
            None => self.in_ptx(),
        }
    }
}

/// Something to report.
#[derive(Clone, Debug)]
pub struct Finding {
    pub kind: String,
    pub class: Class,
    /// The kinds of the accesses of a race, such as `read-after-write`.
    pub hazard: Option<&'static str>,
    pub text: String,
    pub places: Vec<Place>,
    pub occurrences: u64,
    /// A run has ended with it.
    pub ended_run: bool,
    /// The first few seeds of runs with the finding.
    pub seeds: Vec<u64>,
    /// The reason for which a list accepts it.
    pub accepted: Option<String>,
    /// The gaps of a race, with readable names.
    pub gaps: Vec<Value>,
    /// The number of its cause among those of the document, from 0.
    pub cause: Option<usize>,
}

/// Seeds that a finding lists.
pub const MOST_SEEDS: usize = 8;

impl Finding {
    /// A finding from a report; `text` is the report with readable names.
    pub fn of(ptx: &Path, report: &Report, text: String) -> Self {
        Self {
            kind: report.kind().to_owned(),
            class: report.class(),
            hazard: report.hazard().map(Hazard::name),
            text,
            places: report.places().into_iter().map(|place| Place::of(ptx, place)).collect(),
            occurrences: report.occurrences,
            ended_run: report.ended_run,
            seeds: vec![],
            accepted: None,
            gaps: report.gaps().iter().map(|gap| gap_json(ptx, gap)).collect(),
            cause: None,
        }
    }

    fn text(&self) -> String {
        let mut head = format!("{} ({})", self.kind, self.class);
        if self.occurrences > 1 {
            head += &format!(", {} times", self.occurrences);
        }
        if !self.seeds.is_empty() {
            let seeds: Vec<_> = self.seeds.iter().map(u64::to_string).collect();
            let more = if self.seeds.len() == MOST_SEEDS { ", .." } else { "" };
            head += &format!(", seeds {}{more}", seeds.join(", "));
        }
        if self.ended_run {
            head += ", ended the run";
        }
        if let Some(reason) = &self.accepted {
            return format!("accepted: {head}: {}\n  {reason}\n", self.where_it_is());
        }
        format!("{head}:\n{}\n", self.text.trim_end())
    }

    /// The places in one line.
    fn where_it_is(&self) -> String {
        let place = |place: &Place| match &place.at.source {
            Some((file, line)) => format!("{file}:{line}"),
            None => format!("{}:{}", place.ptx.display(), place.at.ptx_line),
        };
        self.places.iter().map(place).collect::<Vec<_>>().join(" and ")
    }

    fn json(&self) -> Value {
        json!({
            "kind": self.kind,
            "class": self.class.name(),
            "hazard": self.hazard,
            "text": self.text,
            "places": self.places.iter().map(Place::json).collect::<Vec<_>>(),
            "occurrences": self.occurrences,
            "ended_run": self.ended_run,
            "seeds": self.seeds,
            "accepted": self.accepted,
            "gaps": self.gaps,
            "cause": self.cause,
        })
    }

    fn sarif(&self, rules: &[(String, Class)]) -> Value {
        let level = match self.class {
            Class::Model | Class::Proxy => "warning",
            _ => "error",
        };
        let mut result = json!({
            "ruleId": self.kind,
            "ruleIndex": rules.iter().position(|(kind, _)| *kind == self.kind),
            "level": level,
            "message": { "text": self.text },
            "occurrenceCount": self.occurrences,
            "properties": {
                "class": self.class.name(),
                "hazard": self.hazard,
                "seeds": self.seeds,
                "ended_run": self.ended_run,
                "gaps": self.gaps,
                "cause": self.cause,
            },
        });
        if let [first, others @ ..] = self.places.as_slice() {
            result["locations"] = json!([first.location()]);
            let ptx = self.places.iter().filter(|place| place.at.source.is_some()).map(Place::in_ptx);
            let related = others.iter().map(Place::location).chain(ptx);
            let related: Vec<Value> =
                (0..).zip(related).map(|(id, location)| with_id(location, id)).collect();
            result["relatedLocations"] = json!(related);
            let stacks: Vec<Value> = self.places.iter().filter_map(Place::stack).collect();
            if !stacks.is_empty() {
                result["stacks"] = json!(stacks);
            }
            let mut lines: Vec<_> = self.places.iter().map(Place::fingerprint).collect();
            lines.sort();
            let print = format!("{} {} {}", self.kind, self.hazard.unwrap_or_default(), lines.join(" "));
            result["partialFingerprints"] = json!({ "vgpuLines/v2": print });
        }
        if let Some(reason) = &self.accepted {
            result["suppressions"] = json!([{ "kind": "external", "justification": reason }]);
        }
        result
    }
}

fn gap_json(ptx: &Path, gap: &Gap) -> Value {
    json!({
        "side": if gap.side == Side::Writer { "writer" } else { "reader" },
        "kind": gap.kind.name(),
        "scope": gap.scope,
        "needs": gap.needs,
        "text": gap.sentence(),
        "place": Place::of(ptx, ReportPlace::of(&gap.at)).json(),
    })
}

fn with_id(mut location: Value, id: u64) -> Value {
    location["id"] = json!(id);
    location
}

fn location(file: &str, line: u64, kernel: &str) -> Value {
    let mut location = json!({
        "physicalLocation": {
            "artifactLocation": { "uri": uri(file) },
            "region": { "startLine": line.max(1) },
        },
    });
    if !kernel.is_empty() {
        location["logicalLocations"] = json!([{ "fullyQualifiedName": kernel, "kind": "function" }]);
    }
    location
}

/// A path as a URI: absolute ones with their scheme.
fn uri(path: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte);
    let escape = |byte: u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    let escaped: String = path.bytes().map(escape).collect();
    if path.starts_with('/') { format!("file://{escaped}") } else { escaped }
}

/// Writes to standard output. A reader that has closed it has read enough.
///
/// # Errors
/// Standard output cannot be written to.
pub fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        done => done.context("cannot write to standard output"),
    }
}

/// The whole output of a command.
pub struct Document {
    pub command: &'static str,
    pub findings: Vec<Finding>,
    /// Sentences behind the findings.
    pub notes: Vec<String>,
    /// Further parts of the JSON.
    pub more: serde_json::Map<String, Value>,
}

impl Document {
    /// Prints it, and returns the verdict for the exit code.
    ///
    /// # Errors
    /// Standard output cannot be written to.
    pub fn print(&self, format: Format) -> Result<Verdict> {
        let text = match format {
            Format::Text => self.text(),
            Format::Json => format!("{:#}\n", self.json()),
            Format::Sarif => format!("{:#}\n", self.sarif()),
        };
        print(&text)?;
        let open = self.findings.iter().any(|finding| finding.accepted.is_none());
        Ok(if open { Verdict::Reports } else { Verdict::Clean })
    }

    fn text(&self) -> String {
        let findings = self.findings.iter().map(|finding| finding.text() + "\n");
        findings.chain(self.notes.iter().map(|note| format!("{note}\n"))).collect()
    }

    fn json(&self) -> Value {
        let mut all = serde_json::Map::new();
        all.insert("command".into(), json!(self.command));
        all.insert("version".into(), json!(env!("CARGO_PKG_VERSION")));
        all.insert("reports".into(), self.findings.iter().map(Finding::json).collect());
        all.insert("notes".into(), json!(self.notes));
        all.extend(self.more.clone());
        Value::Object(all)
    }

    fn sarif(&self) -> Value {
        let mut rules: Vec<(String, Class)> = vec![];
        for finding in &self.findings {
            if !rules.iter().any(|(kind, _)| *kind == finding.kind) {
                rules.push((finding.kind.clone(), finding.class));
            }
        }
        let rule = |(kind, class): &(String, Class)| {
            json!({
                "id": kind,
                "name": kind,
                "shortDescription": { "text": kind.replace('-', " ") },
                "fullDescription": { "text": class.rule() },
            })
        };
        let notes: Vec<Value> =
            self.notes.iter().map(|note| json!({ "level": "note", "message": { "text": note } })).collect();
        json!({
            "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
            "version": "2.1.0",
            "runs": [{
                "tool": { "driver": {
                    "name": "vgpu",
                    "version": env!("CARGO_PKG_VERSION"),
                    "rules": rules.iter().map(rule).collect::<Vec<_>>(),
                } },
                "invocations": [{
                    "executionSuccessful": true,
                    "toolExecutionNotifications": notes,
                }],
                "columnKind": "utf16CodeUnits",
                "results": self.findings.iter().map(|finding| finding.sarif(&rules)).collect::<Vec<_>>(),
            }],
        })
    }
}

/// Reads a text file.
///
/// # Errors
/// It cannot be read, or is no UTF-8.
pub fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_become_uris() {
        assert_eq!(uri("a b/k.cu"), "a%20b/k.cu");
        assert_eq!(uri("/x/ä.cu"), "file:///x/%C3%A4.cu");
    }
}

//! Output of `vgpu fuzz`: each difference, and the counts of comparisons.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use super::forms::{Form, Needs};
use super::program::{BLOCKS, Of, Program, Style, Use};
use super::{Args, Device, Difference, Outcome, Run, alike};
use crate::output::{Verdict, print};

/// Threads whose values are printed of a difference.
const MOST_THREADS: usize = 6;
/// Differences that are printed in full, of all instructions.
const MOST_SHOWN: usize = 80;

/// Differences and counts.
pub struct Report {
    seed: u64,
    device: Device,
    show: usize,
    out: Option<PathBuf>,
    /// Programs that differ.
    pub differing: usize,
    /// Differences by the instruction that they are about.
    pub by_subject: BTreeMap<String, usize>,
    shown: usize,
    /// Results that differ from the manual, by form: how many, and the first.
    pub from_manual: BTreeMap<usize, (usize, String)>,
    /// Instructions and their results, by opcode.
    counts: BTreeMap<String, (u64, u64)>,
    /// Results compared with the manual.
    by_manual: u64,
}

impl Report {
    pub fn new(args: &Args) -> Self {
        Self {
            seed: args.seed,
            device: args.device,
            show: args.show,
            out: args.out.clone(),
            differing: 0,
            by_subject: BTreeMap::new(),
            shown: 0,
            from_manual: BTreeMap::new(),
            counts: BTreeMap::new(),
            by_manual: 0,
        }
    }

    /// Writes a file to the folder of `--out`, if there is one.
    pub fn keep(&self, name: &str, contents: impl AsRef<[u8]>) -> Result<()> {
        let Some(out) = &self.out else { return Ok(()) };
        let path = out.join(name);
        std::fs::write(&path, contents).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Counts the instructions of a program that was compared.
    pub fn count(&mut self, forms: &[Form], program: &Program) {
        for (_, one) in program.uses() {
            for opcode in forms[one.form].opcodes() {
                let (instructions, results) = self.counts.entry(opcode.to_owned()).or_default();
                *instructions += 1;
                *results += program.lanes() as u64;
            }
        }
    }

    /// Compares the virtual GPU's results with the formulas of the manual.
    pub fn against_the_manual(&mut self, forms: &[Form], run: &Run, virt: &[u64]) {
        if run.program.style != Style::Apart {
            return;
        }
        let lanes = run.program.lanes();
        for (output, (_, one)) in run.program.uses().into_iter().enumerate() {
            let form = &forms[one.form];
            for lane in 0..lanes {
                let Some(want) = run.program.by_the_manual(forms, one, lane) else { continue };
                let got = virt[output * lanes + lane];
                self.by_manual += 1;
                if !alike(form.result, form.any_nan, got, want) {
                    let describe = || {
                        format!("({}) gave {got:#x}, the manual {want:#x}", values(run.program, one, lane))
                    };
                    self.from_manual.entry(one.form).or_insert_with(|| (0, describe())).0 += 1;
                }
            }
        }
    }

    /// Whether a difference is worth the search for a small program: not if enough of the same
    /// instruction were shown. A program that stores each result names it by the first that
    /// differs.
    pub fn is_worth_a_search(&mut self, forms: &[Form], run: &Run, outcome: &Outcome) -> bool {
        let known = match run.program.style {
            Style::Chained => None,
            _ => subject(forms, run, outcome),
        };
        if self.shown >= MOST_SHOWN {
            let subject = known.unwrap_or_else(|| "not looked for: enough was printed".to_owned());
            *self.by_subject.entry(subject).or_default() += 1;
            return false;
        }
        !known.is_some_and(|subject| self.enough(&subject))
    }

    /// Counts a difference about an instruction. Returns whether more than the shown number exist.
    fn enough(&mut self, subject: &str) -> bool {
        match self.by_subject.get_mut(subject) {
            Some(count) if *count >= self.show => {
                *count += 1;
                true
            }
            _ => false,
        }
    }

    /// The text about a difference, unless enough were printed. `whole` is the program as it was
    /// drawn, `small` what is left of it, or `whole` again where the difference does not stay.
    pub fn difference(
        &mut self,
        forms: &[Form],
        (number, whole): (u64, &Run),
        (small, outcome): (&Run, &Outcome),
        other: &str,
    ) -> Result<Option<String>> {
        let subject = subject(forms, small, outcome).unwrap_or_else(|| "several instructions".to_owned());
        if self.enough(&subject) {
            return Ok(None);
        }
        *self.by_subject.entry(subject.clone()).or_default() += 1;
        if self.shown >= MOST_SHOWN {
            return Ok(None);
        }
        self.shown += 1;
        let mut text = format!("\ndifference {}: {subject}\n", self.shown);
        let (left, all) = (small.program.uses().len(), whole.program.uses().len());
        let device = format!("{:?}", self.device).to_lowercase();
        let _ = writeln!(
            text,
            "  program {number} of seed {}: {left} of {all} instructions are left; {} threads in each of {BLOCKS} blocks",
            self.seed, small.program.threads
        );
        let _ = writeln!(
            text,
            "  again: vgpu fuzz --device {device} --seed {} --first {number} --programs 1",
            self.seed
        );
        if std::ptr::eq(whole, small) {
            text +=
                "  not the same in each run: a part of the program that differed did not when it ran again\n";
        }
        match outcome {
            Outcome::Same => {}
            Outcome::Fails(who, failure) => {
                let _ = writeln!(text, "  {who} {failure}");
            }
            Outcome::Differ(found) => text += &differences(forms, small, found, other),
        }
        text += "  the kernel:\n";
        small.written.text.lines().for_each(|line| {
            let _ = writeln!(text, "    {line}");
        });
        let name = format!("difference-{:03}", self.shown);
        let words = small.job.input.iter().flat_map(|word| word.to_le_bytes());
        self.keep(&format!("{name}.in"), words.collect::<Vec<u8>>())?;
        self.keep(&format!("{name}.ptx"), super::module(std::slice::from_ref(small)))?;
        Ok(Some(text))
    }

    /// Prints what was compared, and returns the verdict.
    pub fn end(&self, forms: &[Form], programs: u64, took: Duration) -> Result<Verdict> {
        let mut text = String::new();
        for (form, (count, first)) in &self.from_manual {
            let _ = writeln!(
                text,
                "the manual: {}: {count} results differ; the first: {first}",
                forms[*form].text
            );
        }
        if self.by_subject.values().any(|count| *count > 0) {
            let _ = writeln!(text, "differences by instruction:");
            for (subject, count) in &self.by_subject {
                let _ = writeln!(text, "  {count:>6}  {subject}");
            }
        }
        let _ = writeln!(
            text,
            "compared:\n  {:<10} {:>8} {:>13} {:>14}",
            "", "opcodes", "instructions", "by all threads"
        );
        let mut kinds: BTreeMap<&str, (u64, u64, u64)> = BTreeMap::new();
        for (opcode, (instructions, results)) in &self.counts {
            let kind = kinds.entry(opcode.split('.').next().unwrap_or(opcode)).or_default();
            *kind = (kind.0 + 1, kind.1 + instructions, kind.2 + results);
        }
        for (kind, (opcodes, instructions, results)) in &kinds {
            let _ = writeln!(text, "  {kind:<10} {opcodes:>8} {instructions:>13} {results:>14}");
        }
        let all: u64 = self.counts.values().map(|(instructions, _)| instructions).sum();
        let _ = writeln!(
            text,
            "{programs} programs of seed {} in {:.1} s, {} opcodes, {all} instructions, {} results held against the manual: \
             {} programs differ, {} forms depart from the manual",
            self.seed,
            took.as_secs_f64(),
            self.counts.len(),
            self.by_manual,
            self.differing,
            self.from_manual.len()
        );
        print(&text)?;
        let lines = self
            .counts
            .iter()
            .map(|(opcode, (instructions, results))| format!("{opcode}\t{instructions}\t{results}\n"));
        self.keep("counts.tsv", lines.collect::<String>())?;
        let clean = self.differing == 0 && self.from_manual.is_empty();
        Ok(if clean { Verdict::Clean } else { Verdict::Reports })
    }
}

/// The operands of a use in a lane, as far as they are known.
fn values(program: &Program, one: &Use, lane: usize) -> String {
    match program.operands(one, lane) {
        Some(operands) => operands.iter().map(|value| format!("{value:#x}")).collect::<Vec<_>>().join(", "),
        None => "results of earlier steps, or a false guard".to_owned(),
    }
}

/// The instruction that a difference is about: that of the first step that differs, or of the only
/// one.
fn subject(forms: &[Form], run: &Run, outcome: &Outcome) -> Option<String> {
    let uses = run.program.uses();
    let named = |id: usize| {
        let (_, one) = uses.iter().find(|(other, _)| *other == id)?;
        Some(forms[one.form].subject().to_owned())
    };
    let only = || if let [(id, _)] = &uses[..] { named(*id) } else { None };
    match outcome {
        Outcome::Differ(found) => {
            let first = found.iter().find_map(|one| match run.written.outputs[one.output].of {
                Of::Step(id) => Some(id),
                _ => None,
            });
            first.map_or_else(only, named)
        }
        Outcome::Fails(_, failure) => {
            let kind = match failure {
                super::Failure::Refused(_) => "refused",
                _ => "failed",
            };
            Some(format!("{kind}: {}", only()?))
        }
        Outcome::Same => only(),
    }
}

/// The values of the first thread that differs, step by step, and the results of others.
fn differences(forms: &[Form], run: &Run, found: &[Difference], other: &str) -> String {
    let mut text = String::new();
    let Some(first) = found.first() else { return text };
    let mut lanes: Vec<usize> = found.iter().map(|one| one.lane).collect();
    lanes.sort_unstable();
    lanes.dedup();
    let _ = writeln!(text, "  {} of {} threads differ", lanes.len(), run.program.lanes());
    let place = |lane: usize| {
        let threads = run.program.threads;
        format!("thread {} of block {} (lane {})", lane % threads, lane / threads, lane % threads % 32)
    };
    let _ = writeln!(text, "  {}:", place(first.lane));
    for (id, line) in &run.written.lines {
        let Some((_, one)) = run.program.uses().into_iter().find(|(of, _)| of == id) else { continue };
        let _ = writeln!(text, "    {line}");
        if !one.operands.is_empty() {
            let _ = writeln!(text, "      operands: {}", values(run.program, one, first.lane));
        }
        if let Some(value) = run.program.by_the_manual(forms, one, first.lane) {
            let _ = writeln!(text, "      the manual: {value:#x}");
        }
        let of_step = found
            .iter()
            .find(|one| one.lane == first.lane && run.written.outputs[one.output].of == Of::Step(*id));
        match of_step {
            Some(one) => {
                let _ = writeln!(text, "      virtual {:#x}, {other} {:#x}  <- differs", one.virt, one.other);
            }
            None if run.program.style != Style::Chained => text += "      the same on both\n",
            None => {}
        }
    }
    let of_step = |one: &&Difference| matches!(run.written.outputs[one.output].of, Of::Step(_));
    // Registers at the end hold the results of the step that differs.
    let at_end = found.iter().filter(|one| !of_step(one) && !found.iter().any(|other| of_step(&other)));
    for one in at_end.take(MOST_THREADS) {
        let what = match &run.written.outputs[one.output].of {
            Of::Register(name) => format!("{name} at the end"),
            _ => "a word of memory at the end".to_owned(),
        };
        let _ = writeln!(
            text,
            "    {what}, {}: virtual {:#x}, {other} {:#x}",
            place(one.lane),
            one.virt,
            one.other
        );
    }
    text += &together(forms, run, first.lane);
    let others = found.iter().filter(|one| one.output == first.output && one.lane != first.lane);
    for one in others.take(MOST_THREADS) {
        let operands = run.program.uses().first().map_or_else(String::new, |(_, one_use)| {
            format!(" operands of the first step: {};", values(run.program, one_use, one.lane))
        });
        let _ = writeln!(
            text,
            "  {}:{operands} virtual {:#x}, {other} {:#x}",
            place(one.lane),
            one.virt,
            one.other
        );
    }
    text
}

/// The operands of the threads that a step brings together with this one, where it is the only step
/// left.
fn together(forms: &[Form], run: &Run, lane: usize) -> String {
    let uses = run.program.uses();
    let [(_, one)] = &uses[..] else { return String::new() };
    let threads = run.program.threads;
    let block = lane / threads * threads;
    let (first, count) = match forms[one.form].needs {
        Needs::Nothing => return String::new(),
        Needs::Mask | Needs::Warp => (block + lane % threads / 32 * 32, 32),
        Needs::Block => (block, threads),
    };
    let end = (block + threads).min(first + count);
    let each: Vec<String> =
        (first..end).map(|lane| format!("({})", values(run.program, one, lane))).collect();
    format!(
        "  operands of the threads that meet there, from thread {}: {}\n",
        first % threads,
        each.join(" ")
    )
}

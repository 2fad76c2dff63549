//! `cargo xtask ptx-fuzz`: holds the virtual GPU against the PTX manual, and writes what a real GPU
//! can be held against.
//!
//! Random modules over a table of instruction forms ([`forms`]) run on the virtual GPU; the same
//! forms are evaluated by code of their own. Every result must be the same, bit for bit. With
//! `--out`, modules, operands and results go to a folder, and `examples/ptx_fuzz.rs` runs them on a
//! GPU.

mod float;
mod forms;
mod kind;
mod module;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use epoxide_vgpu::{GridConfig, Machine};

use crate::workspace;
use forms::Form;
use kind::Kind;
use module::{BLOCKS, LANES, Module, THREADS};

#[derive(Args)]
pub struct Options {
    /// Seed of the modules: the same seed gives the same modules
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many modules
    #[arg(long, default_value_t = 200)]
    modules: usize,
    /// A folder to write modules, operands and the virtual GPU's results to, for the example
    /// `ptx_fuzz`
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Runs the modules, compares, and fails on any difference.
pub fn run(options: &Options) -> Result<()> {
    let forms = forms::all();
    let modules = module::random(&forms, options.seed, options.modules);
    let mut differences = Differences::default();
    for (number, module) in modules.iter().enumerate() {
        let results = execute(module).with_context(|| format!("module {number}:\n{}", module.text))?;
        differences.compare(&forms, module, &results);
        if let Some(dir) = &options.out {
            write(dir, number, &forms, module, &results)?;
        }
    }
    print!("{}", differences.report(&forms));
    println!(
        "{} instruction forms; {} modules of seed {}: {} results, {} differ",
        forms.len(),
        modules.len(),
        options.seed,
        differences.compared,
        differences.total()
    );
    if let Some(dir) = &options.out {
        println!("to hold a GPU against them:");
        println!(
            "cargo run --release -p epoxide-examples --features cuda --example ptx_fuzz -- {}",
            dir.display()
        );
    }
    ensure!(
        differences.total() == 0,
        "the virtual GPU differs from the PTX manual (--seed {})",
        options.seed
    );
    Ok(())
}

/// Runs a module on the virtual GPU and returns the words of `out`.
fn execute(module: &Module) -> Result<Vec<u64>> {
    let parsed = epoxide_vgpu::Module::parse(&module.text)?;
    let mut machine = Machine::new(1);
    let input = machine.upload(0, "in", &module.input())?;
    let output = machine.upload(0, "out", &vec![0u64; module.uses.len() * LANES])?;
    let shape = GridConfig::new(BLOCKS as u32, THREADS as u32, 0);
    machine.launch_with(0, &parsed, "fuzz", shape, &[&input, &output])?;
    machine.run()?;
    Ok(output.download()?)
}

/// Results that differ, by form: how many, and the first.
#[derive(Default)]
struct Differences {
    compared: usize,
    found: BTreeMap<usize, (usize, String)>,
}

impl Differences {
    fn compare(&mut self, forms: &[Form], module: &Module, results: &[u64]) {
        for (u, row) in module.uses.iter().zip(results.chunks(LANES)) {
            let form = &forms[u.form];
            for (lane, &got) in row.iter().enumerate() {
                self.compared += 1;
                let want = u.expected(form, lane);
                if got == want || form.any_nan && both_nan(form.result, got, want) {
                    continue;
                }
                let describe = || {
                    let operands: Vec<String> =
                        u.operands.iter().map(|row| format!("{:#x}", row[lane])).collect();
                    let guard = u.guard.as_ref().map_or("", |g| if g[lane] == 0 { ", guarded" } else { "" });
                    format!("({}){guard} gave {got:#x}, evaluated to {want:#x}", operands.join(", "))
                };
                self.found.entry(u.form).or_insert_with(|| (0, describe())).0 += 1;
            }
        }
    }

    fn total(&self) -> usize {
        self.found.values().map(|(count, _)| count).sum()
    }

    fn report(&self, forms: &[Form]) -> String {
        let mut text = String::new();
        for (form, (count, first)) in &self.found {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{}: {count} differ; the first: {first}", forms[*form].text);
        }
        text
    }
}

/// Whether two results are the same but for the bits of NaNs.
fn both_nan(kind: Kind, a: u64, b: u64) -> bool {
    match kind {
        Kind::Float(format) => format.is_nan(a) && format.is_nan(b),
        Kind::Pair(format) => [0, format.bits().0].into_iter().all(|shift| {
            let (a, b) = (a >> shift & 0xffff, b >> shift & 0xffff);
            a == b || format.is_nan(a) && format.is_nan(b)
        }),
        _ => false,
    }
}

/// Writes a module as four files: PTX, the words of `in` and of `out` (little endian), and a line
/// for each result row.
///
/// A line has three fields with tabs between: the kind of the result, how many rows of `in` belong
/// to it, and the instruction. The kind decides how NaNs compare: `bits` by their bits, `f32` and
/// so on by being one.
fn write(dir: &Path, number: usize, forms: &[Form], module: &Module, results: &[u64]) -> Result<()> {
    let bytes = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let mut lines = format!("{BLOCKS} {THREADS}\n");
    for u in &module.uses {
        let form = &forms[u.form];
        let kind = match form.result {
            Kind::Float(format) if form.any_nan => format.name().to_owned(),
            Kind::Pair(format) if form.any_nan => format!("{}x2", format.name()),
            _ => "bits".to_owned(),
        };
        lines += &format!("{kind}\t{}\t{}\n", u.operands.iter().chain(&u.guard).count(), form.text);
    }
    let file = |extension: &str| dir.join(format!("{number:05}.{extension}"));
    workspace::write(&file("ptx"), &module.text)?;
    workspace::write(&file("in"), bytes(&module.input()))?;
    workspace::write(&file("out"), bytes(results))?;
    workspace::write(&file("forms"), lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_virtual_gpu_computes_what_the_manual_says() {
        let options = Options { seed: 7, modules: 60, out: None };
        run(&options).unwrap();
    }

    #[test]
    fn a_wrong_evaluation_is_noticed() {
        let mut forms = forms::all();
        let at = forms.iter().position(|form| form.text.starts_with("add.u32 ")).unwrap();
        let form = forms.swap_remove(at);
        let right = form.eval;
        let forms = [Form { eval: Box::new(move |x| right(x) ^ u64::from(x[0] == 0)), ..form }];
        let mut differences = Differences::default();
        for module in module::random(&forms, 1, 2) {
            differences.compare(&forms, &module, &execute(&module).unwrap());
        }
        assert!(differences.total() > 0 && differences.total() < differences.compared);
        let report = differences.report(&forms);
        assert!(report.starts_with("add.u32 $0, $1, $2;: ") && report.contains("(0x0, "), "{report}");
    }

    #[test]
    fn the_same_seed_gives_the_same_modules() {
        let forms = forms::all();
        let go = |seed| {
            let modules = module::random(&forms, seed, 3);
            modules.iter().map(|m| (m.text.clone(), m.input())).collect::<Vec<_>>()
        };
        assert_eq!(go(5), go(5));
        assert_ne!(go(5), go(6));
    }

    #[test]
    fn nans_are_alike_only_where_the_format_has_them() {
        use kind::Format::{Bf16, F32};
        assert!(both_nan(Kind::Float(F32), 0x7fff_ffff, 0xffc0_0000));
        assert!(!both_nan(Kind::Float(F32), 0x7fff_ffff, 0x7f80_0000));
        assert!(both_nan(Kind::Pair(Bf16), 0x7fff_1234, 0xffff_1234));
        assert!(!both_nan(Kind::Pair(Bf16), 0x7fff_1234, 0xffff_1235));
        assert!(!both_nan(Kind::Int(32), 0x7fff_ffff, 0xffc0_0000));
    }
}

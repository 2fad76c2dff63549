//! Counts the instructions of PTX files that the virtual GPU refuses.
//!
//! `cargo run --release --example refused -- FILE..` prints one row for each opcode: in how many
//! files and how often it occurs, and its files. Then it prints the first error of each file that
//! cannot be loaded.

use std::collections::{BTreeMap, BTreeSet};

use epoxide_vgpu::{Module, ptx, supported_opcode};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut refused: BTreeMap<String, (usize, BTreeSet<String>)> = BTreeMap::new();
    let (mut files, mut errors) = (0, vec![]);
    for path in std::env::args().skip(1) {
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        files += 1;
        if let Err(error) = Module::parse(&text) {
            errors.push(format!("{path}: {error}"));
        }
        // A file that cannot even be read is among the errors.
        let Ok(parsed) = ptx::parse(&text) else { continue };
        let bodies = parsed.entries.iter().map(|entry| &entry.body);
        let functions = parsed.functions.iter().filter_map(|function| function.body.as_ref());
        for statement in bodies.chain(functions).flatten() {
            let ptx::Stmt::Inst(instruction) = statement else { continue };
            if !supported_opcode(&instruction.opcode) {
                let (count, of) = refused.entry(instruction.opcode.clone()).or_default();
                *count += 1;
                of.insert(path.rsplit('/').next().unwrap_or(&path).to_owned());
            }
        }
    }
    let mut rows: Vec<_> = refused.into_iter().collect();
    rows.sort_by_key(|(_, (count, of))| std::cmp::Reverse((of.len(), *count)));
    println!("of {files} files:");
    for (opcode, (count, of)) in rows {
        let of: Vec<_> = of.into_iter().collect();
        println!("{:3} files {count:6} times  {opcode}  ({})", of.len(), of.join(" "));
    }
    println!("{} of them cannot be loaded:", errors.len());
    errors.iter().for_each(|error| println!("{error}"));
    Ok(())
}

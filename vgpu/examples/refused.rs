//! Counts the instructions of PTX files that the virtual GPU refuses.
//!
//! `cargo run --release --example refused -- FILE..` prints one row for each opcode: in how many
//! files and how often it occurs, and its files. Operands are not looked at.

use std::collections::{BTreeMap, BTreeSet};

use epoxide_vgpu::{ptx, supported_opcode};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut refused: BTreeMap<String, (usize, BTreeSet<String>)> = BTreeMap::new();
    let mut files = 0;
    for path in std::env::args().skip(1) {
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        let parsed = match ptx::parse(&text) {
            Ok(parsed) => parsed,
            Err(error) => {
                println!("{path}: cannot be read: {error}");
                continue;
            }
        };
        files += 1;
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
    Ok(())
}

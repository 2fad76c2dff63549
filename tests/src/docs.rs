//! Tests of the pages in `docs/` and of the README: links are valid, every environment variable is
//! listed, and the charts show values of the tables.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Returns the repository's root.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the files below `folder` whose names end with one of `ends`, build outputs left out.
fn files(folder: &Path, ends: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
        if entry.file_type().unwrap().is_dir() {
            if name != "target" && name != ".git" {
                found.extend(files(&path, ends));
            }
        } else if ends.iter().any(|end| name.ends_with(end)) {
            found.push(path);
        }
    }
    found
}

fn pages() -> Vec<PathBuf> {
    let names = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"];
    let pages = names.iter().map(|name| root().join(name));
    pages.chain(files(&root().join("docs"), &[".md"])).collect()
}

/// Returns the lines of a page that are no code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

/// Returns the anchors of a page's headings, by GitHub's rule.
fn anchors(page: &Path) -> BTreeSet<String> {
    let text = std::fs::read_to_string(page).unwrap();
    let headings = prose(&text).filter_map(|line| line.strip_prefix('#'));
    let slug = |heading: &str| {
        let kept = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = kept.chars().filter(|&c| c.is_alphanumeric() || "-_ ".contains(c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(slug).collect()
}

#[test]
fn links_lead_somewhere() {
    let mut links = 0;
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        let lines: Vec<_> = prose(&text).collect();
        let lines = lines.join("\n");
        for link in lines.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if link.contains("://") {
                continue;
            }
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let to = if path.is_empty() { page.clone() } else { page.parent().unwrap().join(path) };
            assert!(to.exists(), "{}: {link}", page.display());
            assert!(anchor.is_empty() || anchors(&to).contains(anchor), "{}: {link}", page.display());
            links += 1;
        }
    }
    assert!(links > 100, "{links}");
}

#[test]
fn every_variable_is_in_the_table() {
    /// The symbol of shared memory in PTX is no variable.
    const SYMBOL: &str = "EPOXIDE_SHARED";
    let table = std::fs::read_to_string(root().join("docs/environment.md")).unwrap();
    let mut sources = files(&root(), &[".rs", ".sh"]);
    sources.push(root().join(".ci/run"));
    let mut named = BTreeSet::new();
    for source in sources {
        let text = String::from_utf8_lossy(&std::fs::read(source).unwrap()).into_owned();
        for (at, _) in text.match_indices("EPOXIDE_") {
            let of_name = |c: &char| c.is_ascii_uppercase() || c.is_ascii_digit() || *c == '_';
            if !text[..at].ends_with(|c: char| of_name(&c)) {
                named.insert(text[at..].chars().take_while(of_name).collect::<String>());
            }
        }
    }
    assert!(named.len() > 40, "{named:?}");
    let listed =
        |name: &str| table.match_indices(name).any(|(at, _)| table[at + name.len()..].starts_with('`'));
    // A name that ends with an underscore is the beginning of several.
    let missing: Vec<_> =
        named.iter().filter(|name| *name != SYMBOL && !name.ends_with('_') && !listed(name)).collect();
    assert!(missing.is_empty(), "docs/environment.md lacks {missing:?}");
}

#[test]
fn charts_show_values_of_the_tables() {
    let page = std::fs::read_to_string(root().join("docs/BENCHMARKS.md")).unwrap();
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    let tables: Vec<_> = page.lines().chain(readme.lines()).filter(|line| line.starts_with('|')).collect();
    let in_tables: BTreeSet<_> = tables
        .iter()
        .flat_map(|line| line.split(|c: char| !c.is_ascii_digit() && c != '.'))
        .filter_map(|word| word.parse::<f64>().ok())
        .map(f64::to_bits)
        .collect();
    for name in ["peers-h200", "low-latency-2xh200", "nccl-2xh200"] {
        let text = std::fs::read_to_string(root().join(format!("benches/data/{name}.json"))).unwrap();
        let figures: serde_json::Value = serde_json::from_str(&text).unwrap();
        let lines =
            figures["panels"].as_array().unwrap().iter().flat_map(|panel| panel["lines"].as_array().unwrap());
        let values: Vec<f64> = lines
            .flat_map(|line| line["us"].as_array().into_iter().flatten())
            .filter_map(serde_json::Value::as_f64)
            .collect();
        assert!(values.len() > 10, "{name}");
        let missing: Vec<_> = values.iter().filter(|value| !in_tables.contains(&value.to_bits())).collect();
        assert!(missing.is_empty(), "{name}: {missing:?}");
        assert!(page.contains(&format!("]({name}.svg)")), "{name}");
    }
}

//! Tests of the pages in `docs/` and of the README: links are valid, every environment variable is
//! listed, and the charts show values of the tables.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};

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

/// CONTRIBUTING.md and docs/environment.md name `EPOXIDE_VGPU_SEED` for them.
#[test]
fn seed_loops_of_test_programs_can_be_replayed() {
    let mut replayed = 0;
    for file in ["tests/ep", "tests/vm"].iter().flat_map(|folder| files(&root().join(folder), &[".rs"])) {
        let text = std::fs::read_to_string(&file).unwrap();
        replayed += text.matches("for_each_seed(").count();
        // A search for the first seed that shows something is no such loop.
        if file.ends_with("vm/litmus.rs") {
            continue;
        }
        for line in text.lines().filter(|line| line.trim_start().starts_with("for seed in ")) {
            let is_chosen = line.contains("in tier::sample([");
            assert!(is_chosen, "{}: use epoxide_vgpu::for_each_seed: {line}", file.display());
        }
    }
    assert!(replayed > 20, "{replayed}");
}

/// Returns the literals of some code, without those of attributes and of documentation.
fn literals(code: TokenStream) -> Vec<String> {
    let (mut found, mut is_attribute) = (Vec::new(), false);
    for token in code {
        match &token {
            TokenTree::Group(group) if !is_attribute => found.extend(literals(group.stream())),
            TokenTree::Literal(literal) => found.push(literal.to_string()),
            _ => {}
        }
        let is_mark = |c: char| c == '#' || c == '!' && is_attribute;
        is_attribute = matches!(&token, TokenTree::Punct(mark) if is_mark(mark.as_char()));
    }
    found
}

/// A remedy that names a field which was renamed cannot be followed.
#[test]
fn texts_name_items_that_exist() {
    let public = std::fs::read_to_string(root().join("docs/PUBLIC-API.txt")).unwrap().replace("->", "");
    // Without parameters of types.
    let mut depth = 0u32;
    let public: String = public
        .chars()
        .filter(|c| {
            depth += u32::from(*c == '<');
            let is_outside = depth == 0;
            depth -= u32::from(*c == '>');
            is_outside
        })
        .collect();
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let has = |item: &str| {
        let found = public.match_indices(item);
        found.filter(|(at, _)| public[..*at].ends_with(':')).any(|(at, _)| {
            let rest = &public[at + item.len()..];
            !rest.starts_with(is_of_name)
        })
    };
    let mut named = 0;
    for source in ["host", "cli"].iter().flat_map(|folder| files(&root().join(folder), &[".rs"])) {
        let text = std::fs::read_to_string(&source).unwrap();
        for literal in literals(text.parse().unwrap()) {
            let words = literal.split(|c: char| !is_of_name(c) && c != ':');
            for item in words.filter(|word| word.starts_with(|c: char| c.is_ascii_uppercase())) {
                let Some((of, member)) = item.trim_end_matches(':').split_once("::") else { continue };
                // Types that are not public, and functions of other crates, are left out.
                if !member.is_empty() && public.contains(&format!("::{of}::")) {
                    named += 1;
                    assert!(has(item.trim_end_matches(':')), "{}: {item} in {literal}", source.display());
                }
            }
        }
    }
    assert!(named > 20, "{named}");
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

/// Returns the numbers of a cell.
fn numbers(cell: &str) -> Vec<f64> {
    let words = cell.split(|c: char| !c.is_ascii_digit() && c != '.');
    words.filter_map(|word| word.parse().ok()).collect()
}

/// Returns a page's tables, by rows and cells.
fn tables(text: &str) -> Vec<Vec<Vec<&str>>> {
    let mut tables = vec![Vec::new()];
    for line in text.lines() {
        match line.strip_prefix('|') {
            Some(row) => tables.last_mut().unwrap().push(row.split('|').map(str::trim).collect()),
            None if tables.last().unwrap().is_empty() => {}
            None => tables.push(Vec::new()),
        }
    }
    tables
}

/// A value at x is in a row or a column of x. Bars have names for x, which may be in any cell.
#[test]
fn charts_show_values_of_the_tables() {
    let page = std::fs::read_to_string(root().join("docs/BENCHMARKS.md")).unwrap();
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    let tables: Vec<_> = [&page, &readme].into_iter().flat_map(|text| tables(text)).collect();
    let cells = || tables.iter().flat_map(|rows| rows.iter().map(move |row| (&rows[0], row)));
    let is_in_a_table = |x: Option<f64>, value: f64| {
        cells().any(|(header, row)| {
            header.iter().zip(row).any(|(heading, cell)| {
                let is_of = |cell: &str| x.is_none_or(|x| numbers(cell).contains(&x));
                (is_of(row[0]) || is_of(heading)) && numbers(cell).contains(&value)
            })
        })
    };
    for name in ["peers-h200", "low-latency-2xh200", "nccl-2xh200"] {
        let text = std::fs::read_to_string(root().join(format!("benches/data/{name}.json"))).unwrap();
        let figures: serde_json::Value = serde_json::from_str(&text).unwrap();
        let mut values = 0;
        for panel in figures["panels"].as_array().unwrap() {
            let xs = panel["x"].as_array().unwrap();
            for line in panel["lines"].as_array().unwrap() {
                for (x, us) in xs.iter().zip(line["us"].as_array().unwrap()) {
                    let Some(us) = us.as_f64() else { continue };
                    let at = x.as_str().unwrap().parse().ok();
                    assert!(is_in_a_table(at, us), "{name}: {us} at {x}");
                    values += 1;
                }
            }
        }
        assert!(values > 10, "{name}");
        assert!(page.contains(&format!("]({name}.svg)")), "{name}");
    }
    assert!(is_in_a_table(Some(512.0), 87.6) && !is_in_a_table(Some(8.0), 87.6));
}

/// A conflict that was solved by hand leaves both texts.
#[test]
fn no_change_has_five_words_twice() {
    let text = std::fs::read_to_string(root().join("CHANGELOG.md")).unwrap();
    for bullet in text.split("\n* ").skip(1) {
        let bullet = bullet.split("\n\n").next().unwrap();
        let words: Vec<_> = bullet.split_whitespace().collect();
        let mut seen = BTreeSet::new();
        for five in words.windows(5).filter(|five| !five.concat().contains("](")) {
            assert!(seen.insert(five), "'{}' twice in: {bullet}", five.join(" "));
        }
    }
}

/// A build product or a package that was added by accident, which every clone would get.
#[test]
fn no_file_but_the_ptx_is_larger_than_half_a_megabyte() {
    let large = files(&root(), &[""]).into_iter().filter(|file| file.metadata().unwrap().len() > 500_000);
    let large: Vec<_> = large.map(|file| file.strip_prefix(root()).unwrap().to_owned()).collect();
    assert_eq!(large, [Path::new("gpu/ptx/epoxide.sm_90.ptx")]);
}

//! Tests that one build of the crates that packages share serves `cargo run`, `cargo test` and
//! `cargo xtask`.
//!
//! Cargo compiles a crate once for each set of features that its dependents enable. The packages
//! that a command line selects determine the dependents. So one feature that only some of them
//! enable makes cargo compile the crate, and all its dependents, again.

use std::collections::{BTreeMap, BTreeSet};

use crate::workspace::{Workspace, capture};

/// The features of each package that cargo compiles for `selection`. A package has several sets
/// where cargo compiles it both for the program and for its macros.
fn features(ws: &Workspace, selection: &[&str]) -> BTreeMap<String, BTreeSet<String>> {
    let mut command = ws.cargo();
    command.args(["tree", "--quiet", "--locked", "--prefix", "none", "--format", "{p};{f}"]).args(selection);
    let mut features: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in capture(&mut command).unwrap().lines() {
        if let Some((package, of_package)) = line.trim_end_matches(" (*)").split_once(';') {
            features.entry(package.to_owned()).or_default().insert(of_package.trim().to_owned());
        }
    }
    features
}

/// Selects the default members of the workspace.
const DEFAULT: [&str; 3] = ["--workspace", "--exclude", "epoxide-cudarc"];

#[test]
fn commands_share_one_build_of_every_crate() {
    let ws = crate::repository::find().unwrap();
    let build = ["--edges", "normal,build"];
    let of_command = features(&ws, &[&["--package", "epoxide-cli"], &build[..]].concat());
    let mut of_tests = features(&ws, &[&DEFAULT[..], &["--edges", "normal,build,dev"]].concat());
    // Packages that only tests compile are not shared, and neither is the command itself.
    of_tests.retain(|package, _| of_command.contains_key(package) && !package.starts_with("epoxide-cli "));
    assert!(of_tests.keys().any(|package| package.starts_with("epoxide-vgpu ")), "{of_tests:?}");
    let with = |features: &'static str| [&DEFAULT[..], &["--features", features]].concat();
    for (command, selection) in [
        ("cargo run --release", &DEFAULT[..]),
        ("cargo run --release -p epoxide-cli", &["--package", "epoxide-cli"]),
        ("cargo run --release --features plots,manual", &with("plots,manual")),
        ("cargo run --release --features cuda,rdma", &with("cuda,rdma")),
        ("cargo xtask", &["--package", "xtask"]),
    ] {
        for (package, asked) in features(&ws, &[selection, &build].concat()) {
            // These packages differ by the features that the command line names.
            let named =
                ["epoxide ", "epoxide-bench ", "epoxide-examples ", "epoxide-testing ", "epoxide-tests "];
            if command.contains("cuda") && named.iter().any(|name| package.starts_with(name)) {
                continue;
            }
            if let Some(shared) = of_tests.get(&package) {
                // Build scripts of the features' own crates may compile one in a further way.
                assert!(
                    asked.is_subset(shared) || shared.is_subset(&asked),
                    "`{command}` compiles {package} with the features {asked:?}, `cargo test --release` with \
                     {shared:?}: name those that are missing in cli/Cargo.toml and xtask/Cargo.toml"
                );
            }
        }
    }
}

/// CI tests these packages with all features, and then runs the command from the whole workspace.
#[test]
fn features_of_the_command_reach_its_crates() {
    let ws = crate::repository::find().unwrap();
    let named = ["--features", "cuda,rdma,plots,manual", "--edges", "normal,build"];
    let tested = ["--package", "epoxide", "--package", "epoxide-cli", "--package", "epoxide-tests"];
    let of_tested = features(&ws, &[&tested, &named[..]].concat());
    let of_all = features(&ws, &[&DEFAULT[..], &named[..]].concat());
    let ours: Vec<_> = of_tested.iter().filter(|(package, _)| package.starts_with("epoxide")).collect();
    assert!(ours.len() >= 6, "{ours:?}");
    for (package, features) in ours {
        assert_eq!(Some(features), of_all.get(package), "cargo compiles {package} twice: see cli/Cargo.toml");
    }
}

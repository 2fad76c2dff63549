//! The output of `cargo metadata` about the packages of a workspace.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::workspace::{Workspace, capture};

/// The answer of `cargo metadata`, packages and resolved graph.
pub struct Metadata(Value);

/// One package of the dependency graph.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Package {
    /// Name in the registry.
    pub name: String,
    /// Exact version.
    pub version: String,
    /// The folder that holds its `Cargo.toml`.
    pub dir: PathBuf,
    /// The folder of its library's first file: `src` but where its `Cargo.toml` names another one.
    pub library: PathBuf,
    /// Whether it lies on this machine rather than in a registry.
    pub local: bool,
    /// Repository and commit of a package from git.
    pub git: Option<String>,
    /// Whether it is a procedural macro, which is compiled for the host.
    pub proc_macro: bool,
}

impl Metadata {
    /// Queries cargo with more `args`, such as a platform filter or features. Fetches missing
    /// packages.
    pub fn query(ws: &Workspace, args: &[&str]) -> Result<Self> {
        let json = capture(ws.cargo().args(["metadata", "--format-version=1"]).args(args))?;
        Ok(Self(serde_json::from_str(&json).context("cargo metadata wrote no JSON")?))
    }

    /// An answer that a test makes up.
    #[cfg(test)]
    pub(crate) fn of(answer: Value) -> Self {
        Self(answer)
    }

    /// Everything compiled into `root`: itself and its normal dependencies, all levels. A
    /// procedural macro is listed, its own dependencies are not.
    pub fn compiled_into(&self, root: &str) -> Result<BTreeSet<Package>> {
        let root_id = self.id(root)?;
        let mut found = BTreeSet::new();
        let mut seen = BTreeSet::new();
        let mut todo = vec![root_id];
        while let Some(id) = todo.pop() {
            if !seen.insert(id) {
                continue;
            }
            let Some(package) = self.packages().find(|package| package["id"] == id) else { continue };
            found.extend(describe(package));
            if !is_proc_macro(package) {
                todo.extend(self.normal_dependencies(id));
            }
        }
        Ok(found)
    }

    /// Names of the normal dependencies of `root` itself, procedural macros aside.
    pub fn normal_dependencies_of(&self, root: &str) -> Result<BTreeSet<String>> {
        let root = self.id(root)?;
        let is_library =
            |id: &&str| self.packages().any(|package| package["id"] == **id && !is_proc_macro(package));
        let ids: Vec<&str> = self.normal_dependencies(root).filter(is_library).collect();
        let named =
            self.packages().filter(|package| package["id"].as_str().is_some_and(|id| ids.contains(&id)));
        Ok(named.filter_map(|package| package["name"].as_str()).map(str::to_owned).collect())
    }

    fn id(&self, name: &str) -> Result<&str> {
        self.packages()
            .find(|package| package["name"] == name)
            .and_then(|package| package["id"].as_str())
            .with_context(|| format!("the workspace has no package `{name}`"))
    }

    pub(crate) fn packages(&self) -> impl Iterator<Item = &Value> {
        list(&self.0["packages"])
    }

    fn normal_dependencies<'a>(&'a self, id: &'a str) -> impl Iterator<Item = &'a str> {
        list(&self.0["resolve"]["nodes"])
            .filter(move |node| node["id"] == id)
            .flat_map(|node| list(&node["deps"]))
            .filter(|dep| list(&dep["dep_kinds"]).any(|kind| kind["kind"].is_null()))
            .filter_map(|dep| dep["pkg"].as_str())
    }
}

pub(crate) fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn is_proc_macro(package: &Value) -> bool {
    list(&package["targets"]).flat_map(|target| list(&target["kind"])).any(|kind| kind == "proc-macro")
}

/// Whether a kind of target is one of a package's library: a package has one at most.
fn is_of_library(kind: &Value) -> bool {
    ["lib", "rlib", "dylib", "cdylib", "staticlib", "proc-macro"].iter().any(|library| kind == library)
}

fn describe(package: &Value) -> Option<Package> {
    let dir = Path::new(package["manifest_path"].as_str()?).parent()?;
    Some(Package {
        name: package["name"].as_str()?.to_owned(),
        version: package["version"].as_str()?.to_owned(),
        dir: dir.to_owned(),
        library: list(&package["targets"])
            .filter(|target| list(&target["kind"]).any(is_of_library))
            .find_map(|target| Path::new(target["src_path"].as_str()?).parent())
            .map_or_else(|| dir.join("src"), Path::to_owned),
        local: package["source"].is_null(),
        git: package["source"].as_str().filter(|source| source.starts_with("git+")).map(str::to_owned),
        proc_macro: is_proc_macro(package),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follows_normal_dependencies_and_stops_at_macros() {
        let package = |id: &str, kind: &str, source: Value| {
            serde_json::json!({ "id": id, "name": id, "version": "1.0.0", "source": source,
                "manifest_path": format!("/r/{id}/Cargo.toml"), "targets": [{ "kind": [kind] }] })
        };
        let dep = |id: &str, kind: Value| serde_json::json!({ "pkg": id, "dep_kinds": [{ "kind": kind }] });
        let registry = Value::from("registry");
        let metadata = Metadata(serde_json::json!({
            "packages": [package("gpu", "lib", Value::Null), package("half", "lib", registry.clone()),
                package("derive", "proc-macro", registry.clone()), package("syn", "lib", registry.clone()),
                package("rand", "lib", registry)],
            "resolve": { "nodes": [
                { "id": "gpu", "deps": [dep("half", Value::Null), dep("rand", "dev".into())] },
                { "id": "half", "deps": [dep("derive", Value::Null)] },
                { "id": "derive", "deps": [dep("syn", Value::Null)] } ] } }));
        let found = metadata.compiled_into("gpu").unwrap();
        let names: Vec<_> = found.iter().map(|package| package.name.as_str()).collect();
        assert_eq!(names, ["derive", "gpu", "half"]);
        assert!(
            metadata.packages().find(|package| package["name"] == "gpu").and_then(describe).unwrap().local
        );
        assert!(metadata.compiled_into("none").is_err());
    }
}

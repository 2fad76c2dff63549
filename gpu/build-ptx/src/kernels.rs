//! The crate whose kernels are compiled.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::backend::Arch;
use crate::metadata::{Metadata, list};
use crate::workspace::Workspace;

/// The crate that makes kernels out of functions: its dependents have kernels.
pub(crate) const DSL: &str = "epoxide-simt";

/// A package with kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernels {
    /// Its name.
    pub package: String,
    /// The library's name for the compiler.
    pub library: String,
    /// The folder with its `Cargo.toml`.
    pub dir: PathBuf,
    /// Name of its PTX files: `name` of `[package.metadata.ptx]`, or the library's name.
    pub stem: String,
    /// The oldest GPUs that its kernels are for: `arch` of `[package.metadata.ptx]`, or sm_90.
    pub arch: Arch,
}

impl Kernels {
    /// The package `name`. Without a name, the package around `dir` if it has kernels, or else the
    /// workspace's only package with kernels.
    pub fn find(ws: &Workspace, name: Option<&str>, dir: &Path) -> Result<Self> {
        Self::choose(&Metadata::query(ws, &["--no-deps"])?, name, dir)
    }

    fn choose(metadata: &Metadata, name: Option<&str>, dir: &Path) -> Result<Self> {
        if let Some(name) = name {
            let package = metadata.packages().find(|package| package["name"] == name);
            return Self::of(package.with_context(|| format!("the workspace has no package `{name}`"))?);
        }
        let found: Vec<&Value> = metadata.packages().filter(|package| has_kernels(package)).collect();
        let around = |package: &&&Value| folder(package).is_some_and(|folder| dir.starts_with(folder));
        match (found.iter().filter(around).max_by_key(|p| folder(p)), &found[..]) {
            (Some(package), _) | (None, [package]) => Self::of(package),
            (None, []) => {
                bail!(
                    "no package here has kernels: none depends on `{DSL}`. In the folder of one, run `cargo add \
                     {DSL} --path EPOXIDE/gpu/simt`, where EPOXIDE is a checkout of epoxide"
                )
            }
            (None, several) => {
                let names: Vec<_> = several.iter().filter_map(|package| package["name"].as_str()).collect();
                bail!("several packages have kernels: name one with `--package` ({})", names.join(", "))
            }
        }
    }

    fn of(package: &Value) -> Result<Self> {
        let name = package["name"].as_str().context("cargo metadata has a package without a name")?;
        let is_library = |target: &&Value| {
            list(&target["kind"]).any(|kind| kind == "lib" || kind == "cdylib" || kind == "rlib")
        };
        let library = list(&package["targets"])
            .find(is_library)
            .and_then(|target| target["name"].as_str())
            .with_context(|| {
                format!("package `{name}` has no library: kernels are compiled from src/lib.rs")
            })?
            .replace('-', "_");
        let stem = package["metadata"]["ptx"]["name"].as_str().map_or_else(|| library.clone(), str::to_owned);
        let arch = match package["metadata"]["ptx"]["arch"].as_str() {
            Some(text) => text.parse().map_err(|error| {
                anyhow::anyhow!("package `{name}`, `arch = \"{text}\"` in [package.metadata.ptx]: {error}")
            })?,
            None => Arch::default(),
        };
        let dir = folder(package).with_context(|| format!("cargo metadata names no folder of `{name}`"))?;
        Ok(Self { package: name.to_owned(), library, dir, stem, arch })
    }
}

/// Whether a package of `cargo metadata` depends on the DSL, tests aside.
fn has_kernels(package: &Value) -> bool {
    list(&package["dependencies"]).any(|on| on["name"] == DSL && on["kind"].is_null())
}

fn folder(package: &Value) -> Option<PathBuf> {
    Some(Path::new(package["manifest_path"].as_str()?).parent()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, kind: Value, dir: &str) -> Value {
        serde_json::json!({
            "name": name, "manifest_path": format!("{dir}/Cargo.toml"),
            "targets": [{ "kind": ["lib"], "name": name }],
            "dependencies": [{ "name": DSL, "kind": kind }],
        })
    }

    fn choose(packages: &[Value], name: Option<&str>, dir: &str) -> Result<Kernels> {
        let metadata = Metadata::of(serde_json::json!({ "packages": packages }));
        Kernels::choose(&metadata, name, Path::new(dir))
    }

    #[test]
    fn the_only_package_with_kernels_is_chosen() {
        let packages = [package("own-kernels", Value::Null, "/w/k"), package("tests", "dev".into(), "/w/t")];
        let found = choose(&packages, None, "/w").unwrap();
        assert_eq!((found.package.as_str(), found.library.as_str()), ("own-kernels", "own_kernels"));
        assert_eq!((found.stem.as_str(), found.dir), ("own_kernels", "/w/k".into()));
        assert_eq!(choose(&packages, Some("tests"), "/w").unwrap().package, "tests");
    }

    #[test]
    fn of_several_the_one_around_the_folder_is_chosen() {
        let packages = [package("a", Value::Null, "/w/a"), package("b", Value::Null, "/w/b")];
        assert_eq!(choose(&packages, None, "/w/b/src").unwrap().package, "b");
        let error = choose(&packages, None, "/w").unwrap_err().to_string();
        assert!(error.contains("--package") && error.contains("a, b"), "{error}");
    }

    #[test]
    fn the_manifest_can_name_the_file_and_the_oldest_gpus() {
        let mut gpu = package("gpu", Value::Null, "/w/gpu");
        assert_eq!(choose(std::slice::from_ref(&gpu), None, "/w").unwrap().arch.sm(), "sm_90");
        gpu["metadata"] = serde_json::json!({ "ptx": { "name": "all", "arch": "sm_80" } });
        let found = choose(&[gpu.clone()], None, "/w").unwrap();
        assert_eq!((found.stem.as_str(), found.arch.sm()), ("all", "sm_80"));
        gpu["metadata"]["ptx"]["arch"] = "sm_70".into();
        let error = choose(&[gpu], None, "/w").unwrap_err().to_string();
        assert!(error.contains("package `gpu`") && error.contains("sm_80 and later"), "{error}");
    }

    #[test]
    fn without_kernels_or_a_library_the_remedy_is_named() {
        let error = choose(&[], None, "/w").unwrap_err().to_string();
        assert!(error.contains("`cargo add epoxide-simt --path EPOXIDE/gpu/simt`"), "{error}");
        assert!(error.contains("EPOXIDE is a checkout of epoxide"), "{error}");
        let mut program = package("p", Value::Null, "/w");
        program["targets"][0]["kind"] = serde_json::json!(["bin"]);
        assert!(choose(&[program], None, "/w").unwrap_err().to_string().contains("src/lib.rs"));
        assert!(choose(&[], Some("p"), "/w").is_err());
    }
}

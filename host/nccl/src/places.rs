//! The places where the library may be.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Variable with the file of the library; no other is tried then.
pub const NCCL_LIBRARY: &str = "NCCL_LIBRARY";

/// Names for the system's loader.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// The library in the Python package, below a folder of packages.
const IN_PACKAGES: &str = "nvidia/nccl/lib/libnccl.so.2";

/// Places to try, in this order.
pub fn all() -> Vec<PathBuf> {
    places(&|name| std::env::var_os(name).filter(|value| !value.is_empty()))
}

fn places(variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    if let Some(file) = variable(NCCL_LIBRARY) {
        return vec![file.into()];
    }
    let mut places: Vec<PathBuf> = NAMES.iter().map(PathBuf::from).collect();
    for file in package_folders(variable).into_iter().map(|folder| folder.join(IN_PACKAGES)) {
        if file.exists() && !places.contains(&file) {
            places.push(file);
        }
    }
    places
}

/// The folders in which Python would search for packages, as far as its rules apply without running
/// it.
fn package_folders(variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let list = |name| variable(name).iter().flat_map(std::env::split_paths).collect::<Vec<_>>();
    let mut folders = list("PYTHONPATH");
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| variable(name)).map(Into::into).collect();
    // PREFIX/bin/python3. A virtual environment's is a link, and so is /usr/bin/python3: the prefix
    // is where the link is.
    let pythons = list("PATH").into_iter().filter(|folder| folder.join("python3").exists());
    prefixes.extend(pythons.filter_map(|bin| bin.parent().map(Path::to_owned)));
    prefixes.extend(variable("HOME").map(|home| Path::new(&home).join(".local")));
    prefixes.extend(["/usr/local", "/usr"].map(PathBuf::from));
    for prefix in prefixes {
        let lib = prefix.join("lib");
        let mut versions: Vec<PathBuf> = std::fs::read_dir(&lib)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
            .map(|entry| entry.path())
            .collect();
        versions.sort();
        for version in versions {
            folders.extend(["site-packages", "dist-packages"].map(|packages| version.join(packages)));
        }
    }
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_alone_then_the_loader_then_packages() {
        let root = tempfile::tempdir().unwrap();
        let put = |packages: &str| {
            let file = root.path().join(packages).join(IN_PACKAGES);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(&file, "").unwrap();
            file
        };
        let environment = put("env/lib/python3.12/site-packages");
        let own_path = put("modules");
        let on_path = put("opt/lib/python3.11/dist-packages");
        std::fs::create_dir_all(root.path().join("opt/bin")).unwrap();
        std::fs::write(root.path().join("opt/bin/python3"), "").unwrap();
        let at = |path: &str| Some(root.path().join(path).into_os_string());
        let variables = |name: &str| match name {
            "VIRTUAL_ENV" => at("env"),
            "PYTHONPATH" => at("modules"),
            "PATH" => at("opt/bin"),
            _ => None,
        };
        let found = places(&variables);
        assert_eq!(&found[..2], ["libnccl.so.2", "libnccl.so"].map(PathBuf::from));
        assert_eq!(&found[2..5], [own_path, environment, on_path]);
        let named = |name: &str| if name == NCCL_LIBRARY { at("mine.so") } else { variables(name) };
        assert_eq!(places(&named), [root.path().join("mine.so")]);
    }
}

//! A build: kernels in, PTX out.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::backend::{Arch, Backend};
use crate::header::Header;
use crate::job::{Commands, Job, TARGET};
use crate::kernels::DSL;
use crate::lint::{lint_file, undeclared_shared};
use crate::metadata::Metadata;
use crate::toolchain::{self, Compiler};
use crate::workspace::{Workspace, describe, files, read, succeeds, write};
use crate::{described, nvvm, postprocess, sources};

/// The flags that determine the PTX. The header lists them.
///
/// - `ptx84` sets `.version 8.4`: rustc warns that the feature is unstable, and nothing else may
///   warn.
/// - `immediate-abort` turns a panic into `trap`; plain `abort` drags formatting code into the PTX.
/// - Jump threading duplicates block barriers into divergent branches.
/// - Line directives are `.loc` lines and nothing else: same instructions, same registers, no debug
///   sections.
/// - Verbose assembly has comments, and those of a `.loc` name the lines that its code was inlined
///   into.
const CODEGEN: [&str; 6] = [
    "-Ctarget-feature=+ptx84",
    "-Zunstable-options",
    "-Cpanic=immediate-abort",
    "-Zmir-enable-passes=-JumpThreading",
    "-Cdebuginfo=line-directives-only",
    "-Zverbose-asm",
];

/// Attributes that every kernel crate is compiled with, so that it need not have them: the features
/// of entries and inline PTX, and `no_std`.
const CRATE_ATTRIBUTES: [&str; 3] =
    ["-Zcrate-attr=no_std", "-Zcrate-attr=feature(abi_ptx)", "-Zcrate-attr=feature(asm_experimental_arch)"];

/// The profile `ptx`: one module, every dependency inlined.
const PROFILE: [&str; 10] = [
    "inherits='release'",
    "opt-level=3",
    "lto='fat'",
    "codegen-units=1",
    "panic='abort'",
    "debug=0",
    "incremental=false",
    "overflow-checks=false",
    "debug-assertions=false",
    "strip='none'",
];

/// Settings of a profile, as cargo's `--config` takes them. A workspace's own release profile
/// changes nothing, whether for all packages or for some: checks of overflow would be traps in
/// kernels. So each package that is compiled has the settings that cargo allows for one.
pub(crate) fn profile(name: &str, settings: &[&str], packages: &BTreeSet<String>) -> Vec<String> {
    const OF_ALL: [&str; 3] = ["inherits", "lto", "panic"];
    let of_one = || settings.iter().filter(|setting| !OF_ALL.iter().any(|key| setting.starts_with(key)));
    let whole = settings.iter().map(|setting| format!("profile.{name}.{setting}"));
    // `*` would compile the dependencies of procedural macros with these settings too, for nothing.
    let packages = packages.iter().map(String::as_str).chain(["core", "alloc", "compiler_builtins"]);
    let parts = packages.flat_map(|package| {
        of_one().map(move |setting| format!("profile.{name}.package.{package}.{setting}"))
    });
    whole.chain(parts).collect()
}

/// Names of the packages that are compiled for the GPU, beside those of Rust's own library.
pub(crate) fn compiled_packages(ws: &Workspace, job: &Job) -> Result<BTreeSet<String>> {
    let packages = device_metadata(ws)?.compiled_into(&job.kernels.package)?;
    Ok(packages.into_iter().filter(|package| !package.proc_macro).map(|package| package.name).collect())
}

/// Builds, lints and writes the PTX.
pub fn run(ws: &Workspace, job: &Job) -> Result<()> {
    let text = Builder::find(ws, job.backend)?.compile(ws, job)?;
    // A file that fails the lints is kept in the build folder for inspection. It never replaces a
    // good one.
    let fresh = job.target_dir(ws).join("shipped.ptx");
    write(&fresh, &text)?;
    lint_file(ws, job, &fresh, &text)?;
    write(&job.out, &text)?;
    println!("wrote {}", ws.display(&job.out));
    for other in stale_others(job, &text)? {
        eprintln!(
            "warning: {} is of other sources: remove it, or build it with `--arch`; make sure that the crate \
             includes {}",
            ws.display(&other),
            ws.display(&job.out)
        );
    }
    Ok(())
}

/// The same kernels' PTX for other architectures beside the file just written, where it is of other
/// sources. A crate that still includes such a file launches old kernels.
fn stale_others(job: &Job, text: &str) -> Result<Vec<PathBuf>> {
    let sources = |text: &str| Header::parse(text).map(|header| header.sources);
    let prefix = format!("{}.sm_", job.kernels.stem);
    let Some(folder) = job.out.parent().filter(|folder| folder.is_dir()) else { return Ok(Vec::new()) };
    let mut stale = Vec::new();
    for file in files(folder, "ptx")? {
        let is_other = file != job.out
            && file.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix));
        if is_other && sources(&read(&file)?) != sources(text) {
            stale.push(file);
        }
    }
    Ok(stale)
}

/// Compiler of a job on this machine.
pub enum Builder {
    /// rustc's own back end, by this compiler.
    InTree(Compiler),
    /// `rustc_codegen_nvvm`, with the version of the rustc that it belongs to.
    Nvvm(nvvm::Parts, String),
}

impl Builder {
    /// Finds the tools of the job's back end. The in-tree compiler is fetched if it is missing.
    pub fn find(ws: &Workspace, backend: Backend) -> Result<Self> {
        Ok(match backend {
            Backend::InTree => Self::InTree(toolchain::find_or_fetch(ws)?),
            Backend::Nvvm => Self::Nvvm(nvvm::Parts::find(ws)?, nvvm::Toolchain::of(ws).version()?),
        })
    }

    /// Output of the compiler's `-V`.
    pub fn version(&self) -> &str {
        match self {
            Self::InTree(compiler) => &compiler.version,
            Self::Nvvm(_, version) => version,
        }
    }

    /// Compiles the kernels and post-processes the PTX.
    pub fn compile(&self, ws: &Workspace, job: &Job) -> Result<String> {
        let (product, profile, mut command) = match self {
            Self::InTree(compiler) => {
                println!("compiling the kernels with {} ({})", compiler.version, compiler.origin);
                (product(ws, job), "ptx", in_tree_command(ws, job, compiler)?)
            }
            Self::Nvvm(parts, version) => {
                println!("compiling the kernels with rustc_codegen_nvvm, {version}");
                (
                    nvvm::product(ws, job),
                    "release",
                    nvvm::command(ws, job, Some(parts), &compiled_packages(ws, job)?),
                )
            }
        };
        // Cargo documents this list of the files that were read: it lies beside the product.
        let list = job.target_dir(ws).join(TARGET).join(profile).join(format!("{}.d", job.kernels.library));
        remove_earlier(&product)?;
        remove_earlier(&list)?;
        run_compiler(&mut command, job).map_err(|error| {
            let found =
                device_metadata(ws).and_then(|metadata| dependencies(&metadata, &job.kernels.package));
            with_dependencies(error, &found.unwrap_or_default())
        })?;
        ship(ws, job, &product, &read(&list)?, self.version())
    }
}

/// The file that the in-tree compiler writes. The builder chooses the path, because cargo's own
/// folders have another layout in each version, and the user's settings can move them.
fn product(ws: &Workspace, job: &Job) -> PathBuf {
    job.target_dir(ws).join(format!("{}.s", job.kernels.library))
}

/// Removes the product of an earlier build, so that it never passes for that of this one.
fn remove_earlier(product: &Path) -> Result<()> {
    match std::fs::remove_file(product) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", product.display()))
        }
        _ => Ok(()),
    }
}

/// Runs the compiler, whose own messages go to the terminal.
fn run_compiler(command: &mut Command, job: &Job) -> Result<()> {
    if job.commands == Commands::Shown {
        println!("{}", describe(command));
    }
    if succeeds(command)? {
        return Ok(());
    }
    match job.commands {
        Commands::Shown => {
            bail!("the kernels do not compile: the compiler's messages and its command are above")
        }
        Commands::Hidden => {
            bail!(
                "the kernels do not compile: the compiler's messages are above; --verbose prints its command"
            )
        }
    }
}

/// Names of the dependencies that are compiled for the GPU with a package, beside those that
/// kernels always have.
fn dependencies(metadata: &Metadata, package: &str) -> Result<BTreeSet<String>> {
    let mut names = metadata.normal_dependencies_of(package)?;
    for usual in metadata.compiled_into(DSL)? {
        names.remove(&usual.name);
    }
    Ok(names)
}

/// The compiler's error, with dependencies that may need what a GPU lacks.
fn with_dependencies(error: anyhow::Error, names: &BTreeSet<String>) -> anyhow::Error {
    if names.is_empty() {
        return error;
    }
    let names = names.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
    anyhow!(
        "{error}\n\
         dependencies are compiled for the GPU too: {names}. Move one that needs `std` to \
         [target.'cfg(not(target_arch = \"nvptx64\"))'.dependencies] in Cargo.toml, or make it optional"
    )
}

/// Prints the compiler's command line without running it, with names in place of parts that are
/// missing.
pub fn print_command(ws: &Workspace, job: &Job) -> Result<()> {
    let command = match job.backend {
        Backend::InTree => in_tree_command(ws, job, &toolchain::find_or_fetch(ws)?)?,
        Backend::Nvvm => {
            nvvm::command(ws, job, nvvm::Parts::find(ws).ok().as_ref(), &compiled_packages(ws, job)?)
        }
    };
    println!("{}", describe(&command));
    Ok(())
}

/// The flags named in the PTX header.
pub fn flags(ws: &Workspace, job: &Job) -> String {
    match job.backend {
        Backend::InTree => codegen_flags(&job.arch).join(" "),
        Backend::Nvvm => nvvm::codegen_flags(ws, job).join(" "),
    }
}

/// The dependency graph of the device's target.
pub fn device_metadata(ws: &Workspace) -> Result<Metadata> {
    Metadata::query(ws, &["--filter-platform", TARGET])
}

fn ship(ws: &Workspace, job: &Job, product: &Path, dependencies: &str, compiler: &str) -> Result<String> {
    let raw = read(product).context("the compiler reported success but wrote no PTX")?;
    let (metadata, package) = (device_metadata(ws)?, &job.kernels.package);
    let files = sources::others(ws, &metadata, package, dependencies)?;
    let header = Header {
        package: job.kernels.package.clone(),
        command: job.command.clone(),
        backend: job.backend.to_string(),
        compiler: compiler.to_owned(),
        flags: flags(ws, job),
        sources: sources::fingerprint(ws, &metadata, package, &files)?,
        files,
        text: None,
    };
    let mut kernels = described::kernels(&raw);
    if kernels.is_empty() && job.backend == Backend::Nvvm {
        // libNVVM keeps no comments: the kernels are those of the other back end.
        let in_tree = Job { backend: Backend::InTree, ..job.clone() }.default_out(ws);
        kernels = described::kernels(&read(&in_tree)?);
    }
    let findings = undeclared_shared(&raw, &kernels);
    for finding in &findings {
        eprintln!("{}: {finding}", ws.display(product));
    }
    ensure!(findings.is_empty(), "kernels whose attribute lacks `shared`: {}", findings.len());
    Ok(postprocess::ship(&raw, &header, &kernels))
}

fn codegen_flags(arch: &Arch) -> Vec<String> {
    let cpu = format!("-Ctarget-cpu={arch}");
    std::iter::once(cpu).chain(CODEGEN.map(str::to_owned)).collect()
}

/// `cargo rustc` in the variant without a linker: the assembly *is* the PTX.
///
/// `--crate-type cdylib` is not optional: with the crate's `rlib` in the list cargo drops LTO
/// without a word, and functions of dependencies stay unresolved.
fn in_tree_command(ws: &Workspace, job: &Job, compiler: &Compiler) -> Result<Command> {
    let mut flags = vec!["-Clinker=/bin/true".to_owned()];
    flags.extend(codegen_flags(&job.arch));
    flags.extend(path_flags(ws, job, compiler)?);
    let packages = compiled_packages(ws, job)?;
    let mut command = ws.cargo_of(compiler.cargo.as_deref());
    command
        // `-Z` flags and feature gates on a released compiler; for this one build only.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTC", &compiler.rustc)
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
        .env("CARGO_TARGET_DIR", job.target_dir(ws))
        .env("CARGO_BUILD_BUILD_DIR", job.target_dir(ws))
        .env("CARGO_BUILD_DEP_INFO_BASEDIR", &ws.root)
        .args(["rustc", "--package", &job.kernels.package, "--lib", "--profile", "ptx"])
        .args(profile("ptx", &PROFILE, &packages).iter().flat_map(|setting| ["--config", setting]))
        .args(["-Zbuild-std=core", "--target", TARGET, "--crate-type", "cdylib"])
        .arg("--")
        .arg(emit_flag(ws, job))
        .args(CRATE_ATTRIBUTES);
    Ok(command)
}

/// Names the product to rustc. The path is relative where rustc runs in the workspace's root,
/// because rustc takes a comma in it for the next kind of output.
fn emit_flag(ws: &Workspace, job: &Job) -> OsString {
    let product = product(ws, job);
    let inside = job.kernels.dir.starts_with(&ws.root);
    let path = product.strip_prefix(&ws.root).ok().filter(|_| inside).unwrap_or(&product);
    let mut flag = OsString::from("--emit=asm=");
    flag.push(path);
    flag
}

/// Names every source file without the machine's own directories, so that any checkout gives the
/// same text: `gpu/src/..`, `cargo/half-2.7.1/..`, `rust/core/..`.
fn path_flags(ws: &Workspace, job: &Job, compiler: &Compiler) -> Result<Vec<String>> {
    let mut prefixes = vec![(ws.root.clone(), String::new())];
    for package in device_metadata(ws)?.compiled_into(&job.kernels.package)? {
        match (package.local, package.dir.parent()) {
            (false, Some(registry)) => prefixes.push((registry.to_owned(), "cargo".to_owned())),
            // A folder of the repository that is no member of the workspace.
            (true, _) if !package.dir.starts_with(&ws.root) => prefixes.push((package.dir, package.name)),
            _ => {}
        }
    }
    prefixes.push((compiler.library.clone(), "rust".to_owned()));
    prefixes.extend(compiler.library.canonicalize().map(|library| (library, "rust".to_owned())));
    prefixes.dedup();
    Ok(prefixes.iter().map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_release_profile_does_not_count() {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| write(&folder.path().join(name), text).unwrap();
        write(
            "Cargo.toml",
            "[package]\nname = \"k\"\nedition = \"2024\"\n[workspace]\n\
             [dependencies]\na = { path = \"a\" }\nb-c = { path = \"b\" }\n\
             [profile.release]\noverflow-checks = true\ndebug-assertions = true\nstrip = true\n\
             [profile.release.package.\"*\"]\noverflow-checks = true\nopt-level = 1\n\
             [profile.release.package.b-c]\ndebug-assertions = true\ncodegen-units = 7\n\
             [profile.release.package.k]\noverflow-checks = true\n",
        );
        for (folder, name) in [("a", "a"), ("b", "b-c")] {
            write(
                &format!("{folder}/Cargo.toml"),
                &format!("[package]\nname = \"{name}\"\nedition = \"2024\"\n"),
            );
            write(&format!("{folder}/src/lib.rs"), "");
        }
        write("src/lib.rs", "");
        let packages = ["a", "b-c", "k"].map(str::to_owned).into();
        let rustc_arguments = |name: &str, settings: &[&str]| {
            let mut command = Command::new(&cargo);
            command.current_dir(folder.path()).env_remove("RUSTFLAGS").env("CARGO_TARGET_DIR", folder.path());
            command.args(["build", "-v", "--profile", name]);
            let settings = profile(name, settings, &packages);
            command.args(settings.iter().flat_map(|setting| ["--config", setting]));
            let output = command.output().unwrap();
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stderr).unwrap()
        };
        for (profile, settings) in [("ptx", &PROFILE[..]), ("release", &nvvm::PROFILE[..])] {
            let arguments = rustc_arguments(profile, settings);
            assert_eq!(arguments.matches("--crate-name").count(), 3, "{arguments}");
            for leaked in
                ["overflow-checks=on", "debug-assertions=on", "strip=symbols", "opt-level=1", "units=7"]
            {
                assert!(!arguments.contains(leaked), "{leaked}: {arguments}");
            }
        }
    }

    fn job(ws: &Workspace, dir: &str) -> Job {
        let kernels = crate::kernels::Kernels {
            package: "k".into(),
            library: "k".into(),
            dir: dir.into(),
            stem: "k".into(),
            arch: Arch::default(),
        };
        Job::new(ws, kernels, "cargo build-ptx", Backend::InTree, None, None)
    }

    #[test]
    fn the_product_has_a_path_of_the_builders_own() {
        let ws = Workspace::at("/a,b");
        let flag = |dir: &str| emit_flag(&ws, &job(&ws, dir));
        assert_eq!(flag("/a,b/k"), "--emit=asm=target/ptx/sm_90-in-tree/k.s");
        // rustc runs in a member's own folder where that lies elsewhere.
        assert_eq!(flag("/c/k"), "--emit=asm=/a,b/target/ptx/sm_90-in-tree/k.s");
    }

    #[test]
    fn a_compile_error_names_dependencies_that_may_need_std() {
        let package = |name: &str, kind: &str| {
            serde_json::json!({ "id": name, "name": name, "version": "1.0.0", "source": null,
                "manifest_path": format!("/r/{name}/Cargo.toml"), "targets": [{ "kind": [kind] }] })
        };
        let dep = |id: &str| serde_json::json!({ "pkg": id, "dep_kinds": [{ "kind": null }] });
        let answer = |deps: &[&str]| {
            let deps: Vec<_> = deps.iter().copied().map(dep).collect();
            Metadata::of(serde_json::json!({
                "packages": [package("k", "lib"), package(DSL, "lib"), package("bytemuck", "lib"),
                    package("serde", "lib"), package("derive", "proc-macro")],
                "resolve": { "nodes": [{ "id": "k", "deps": deps }, { "id": DSL, "deps": [dep("bytemuck")] }] },
            }))
        };
        let error = |deps: &[&str]| {
            with_dependencies(anyhow!("no"), &dependencies(&answer(deps), "k").unwrap()).to_string()
        };
        assert_eq!(error(&[DSL, "bytemuck", "derive"]), "no");
        let text = error(&[DSL, "bytemuck", "serde"]);
        assert!(text.contains("compiled for the GPU too: serde. Move one that needs `std`"), "{text}");
    }

    #[test]
    fn earlier_ptx_for_another_architecture_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let text = |sources: &str| {
            format!(
                "// Device code of k, compiled by `b`. Do not edit.\n// backend: in-tree\n// compiler: c\n\
                 // flags: f\n// sources: {sources}\n\nret;\n"
            )
        };
        for (name, sources) in [
            ("k.sm_80.ptx", "new"),
            ("k.sm_90.ptx", "old"),
            ("k.sm_90a.ptx", "new"),
            ("other.sm_90.ptx", "old"),
        ] {
            write(&folder.path().join(name), text(sources)).unwrap();
        }
        let ws = Workspace::at(folder.path());
        let mut job = job(&ws, "/w/k");
        job.out = folder.path().join("k.sm_80.ptx");
        assert_eq!(stale_others(&job, &text("new")).unwrap(), [folder.path().join("k.sm_90.ptx")]);
    }

    #[test]
    fn an_earlier_product_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("k.s");
        write(&file, "earlier").unwrap();
        remove_earlier(&file).unwrap();
        assert!(!file.exists());
        remove_earlier(&file).unwrap();
    }

    #[test]
    fn a_compile_error_prints_the_command_on_request_only() {
        let ws = Workspace::at("/w");
        let mut job = job(&ws, "/w/k");
        let error = |job: &Job| {
            let mut command = Command::new("sh");
            run_compiler(command.args(["-c", "exit 101"]), job).unwrap_err().to_string()
        };
        assert_eq!(
            error(&job),
            "the kernels do not compile: the compiler's messages are above; --verbose prints its command"
        );
        job.commands = Commands::Shown;
        assert!(!error(&job).contains("exit 101") && !error(&job).contains("--verbose"));
        run_compiler(Command::new("true").arg("-x"), &job).unwrap();
    }
}

//! Programs that the tests run, if they are installed.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::harness::skip;

/// Set to 1 where a missing tool is an error.
const REQUIRE: &str = "EPOXIDE_REQUIRE_INTEROP";
/// The virtual environment that setup.sh made.
const VENV: &str = "EPOXIDE_TORCH_VENV";
/// How long one run of a tool may take: PyTorch alone takes seconds to load on a busy machine.
const PATIENCE: Duration = Duration::from_secs(600);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Ends the test, which does not run here, for this reason.
fn lacking(reason: &str) -> ! {
    let required = std::env::var(REQUIRE).is_ok_and(|value| value == "1");
    assert!(!required, "{reason}, and {REQUIRE}=1; run tests/interop/setup.sh");
    skip(reason.to_owned())
}

/// The interpreter that has PyTorch; without one the test is skipped.
pub fn python() -> PathBuf {
    let venv = std::env::var_os(VENV).map_or_else(|| root().join("target/torch-venv"), PathBuf::from);
    let python = venv.join("bin/python");
    if !python.exists() {
        lacking("no PyTorch");
    }
    python
}

/// A command that runs a part of scenario.py.
pub fn scenario(python: &Path, part: &str, host: &str, port: u16, rank: u32, size: u32) -> Command {
    let mut command = Command::new(python);
    command.args(["-W", "ignore"]).arg(root().join("tests/interop/scenario.py")).args([part, host]);
    command.args([port.to_string(), rank.to_string(), size.to_string()]);
    command
}

/// Open MPI's mpirun, whose files go to the folder `files`; without it the test is skipped.
pub fn mpirun(files: &Path) -> Command {
    let version = Command::new("mpirun").arg("--version").output();
    if !version.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("Open MPI")) {
        lacking("no mpirun of Open MPI");
    }
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "--mca", "orte_tmpdir_base"]).arg(files);
    command
}

/// A process whose output is kept, and which does not outlive this.
pub struct Running {
    child: Child,
    what: String,
    output: Vec<std::thread::JoinHandle<String>>,
}

impl Running {
    pub fn start(mut command: Command) -> Running {
        let what = format!("{command:?}");
        // Not this test's own place in some launch.
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            let launcher = ["OMPI_", "PMIX_", "PMI_", "SLURM_", "TORCHELASTIC_", "MASTER_"];
            let plain = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "EPOXIDE_STORE"];
            if launcher.iter().any(|prefix| name.starts_with(prefix)) || plain.contains(&&*name) {
                command.env_remove(name);
            }
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap_or_else(|error| panic!("{what}: {error}"));
        Running { child, what, output: Vec::new() }
    }

    /// The rest of its first line of output that begins with `start`.
    pub fn announced(&mut self, start: &str) -> String {
        let stdout = self.child.stdout.as_mut().unwrap();
        let mut line = String::new();
        let mut byte = [0];
        while stdout.read(&mut byte).unwrap_or(0) == 1 {
            match byte[0] {
                b'\n' if line.starts_with(start) => return line.split_off(start.len()),
                b'\n' => line.clear(),
                byte => line.push(byte.into()),
            }
        }
        let mut errors = String::new();
        let _ = self.child.stderr.take().unwrap().read_to_string(&mut errors);
        panic!("{} ended without {start:?}:\n{errors}", self.what);
    }

    /// Begins to read what it writes.
    pub fn listen(&mut self) {
        fn drain(mut from: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
            std::thread::spawn(move || {
                let mut bytes = Vec::new();
                let _ = from.read_to_end(&mut bytes);
                String::from_utf8_lossy(&bytes).into_owned()
            })
        }
        self.output.extend(self.child.stdout.take().map(drain));
        self.output.extend(self.child.stderr.take().map(drain));
    }

    /// Waits for the process's end. Returns its exit code and all output that was not read before.
    pub fn end(mut self) -> (Option<i32>, String) {
        drop(self.child.stdin.take());
        self.listen();
        let start = Instant::now();
        let code = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status.code(),
                None if start.elapsed() > PATIENCE => {
                    self.child.kill().unwrap();
                    self.child.wait().unwrap();
                    break None;
                }
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        let output = self.output.drain(..).map(|thread| thread.join().unwrap()).collect();
        (code, output)
    }

    /// Waits for its end, which must be a good one.
    pub fn succeed(self) -> String {
        let what = self.what.clone();
        let (code, output) = self.end();
        assert_eq!(code, Some(0), "{what}:\n{output}");
        output
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Only if the test failed before its end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! The devices that programs run on.

use std::fmt;
use std::time::Duration;

use epoxide_vgpu::{CheckConfig, DeviceConfig, GridConfig, Machine, MachineError, Module};

use super::program::BLOCKS;

/// A kernel to run, with the words of `in` and how many words `out` has, which are zero at first.
pub struct Job {
    pub kernel: String,
    pub threads: usize,
    pub input: Vec<u64>,
    pub outputs: usize,
}

/// A module that cannot be loaded, a kernel that fails, or worse.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    Refused(String),
    Faulted(String),
    /// The device is lost: nothing runs on it any more in this process.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Lost(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Refused(text) => write!(f, "does not load the program: {text}"),
            Failure::Faulted(text) => write!(f, "fails to run the program: {text}"),
            Failure::Lost(text) => write!(f, "is lost behind a failure: {text}"),
        }
    }
}

/// The longest that a kernel may take on a GPU: a correct one takes microseconds.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub const LONGEST_KERNEL: Duration = Duration::from_secs(20);
/// The longest that a GPU may take to load a module and run its kernels.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub const LONGEST_ANSWER: Duration = Duration::from_secs(120);
/// Warp instructions of the longest kernel on a virtual GPU.
const MOST_INSTRUCTIONS: u64 = 1 << 22;

/// A device.
pub trait Target {
    /// Its name in the output, one word.
    fn name(&self) -> &'static str;
    /// The device in words: its model, and how it runs.
    fn description(&self) -> String;
    /// Runs the kernels of a module one after the other; returns the words of each `out`.
    ///
    /// # Errors The first failure, without the kernel that failed.
    fn run(&mut self, ptx: &str, jobs: &[&Job]) -> Result<Vec<Vec<u64>>, Failure>;
}

/// A virtual GPU.
pub enum Virtual {
    /// Warps take turns, without checks.
    Fast,
    /// In an order that a seed draws, with all checks.
    Checked(u64),
}

impl Target for Virtual {
    fn name(&self) -> &'static str {
        match self {
            Virtual::Fast => "virtual",
            Virtual::Checked(_) => "checked",
        }
    }

    fn description(&self) -> String {
        match self {
            Virtual::Fast => "the virtual GPU, warps by turns".to_owned(),
            Virtual::Checked(_) => "the virtual GPU, other schedules and all checks".to_owned(),
        }
    }

    fn run(&mut self, ptx: &str, jobs: &[&Job]) -> Result<Vec<Vec<u64>>, Failure> {
        let module = Module::parse(ptx).map_err(|error| Failure::Refused(error.to_string()))?;
        let schedule_seed = match self {
            Virtual::Fast => None,
            Virtual::Checked(seed) => Some(*seed),
        };
        let one = |job: &&Job| -> Result<Vec<u64>, MachineError> {
            let config = DeviceConfig {
                livelock_limit: Some(MOST_INSTRUCTIONS),
                schedule_seed,
                ..DeviceConfig::default()
            };
            let mut machine = Machine::with_config(1, config, schedule_seed.map(|_| CheckConfig::default()));
            let input = machine.upload(0, "in", &job.input)?;
            let output = machine.upload(0, "out", &vec![0u64; job.outputs])?;
            let shape = GridConfig::new(BLOCKS as u32, job.threads as u32, 0);
            machine.launch_with(0, &module, &job.kernel, shape, &[&input, &output])?;
            machine.run()?;
            output.download()
        };
        jobs.iter().map(|job| one(job).map_err(|error| Failure::Faulted(error.to_string()))).collect()
    }
}
